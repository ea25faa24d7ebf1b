"""`bench`: what an operator takes, beside the same work by other means."""

import argparse
import contextlib
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from .. import __version__
from ..attention_plan import MOST_COLUMNS
from ..bench import records
from ..bench.allgather_gemm import AllGatherGemmBench
from ..bench.moe import MoeCombineBench, MoeDispatchGemmBench, MoeLayerBench
from ..bench.operator import OperatorBench
from ..bench.reductions import GemmAllReduceBench, GemmReduceScatterBench
from ..bench.ring_attention import RingAttentionBench
from ..communicator import Communicator, runtime_of
from ..errors import Error
from . import spelled
from .job import CommandError, together

BENCHES: dict[str, type[OperatorBench]] = {
    spelled(kind.operator): kind
    for kind in (
        AllGatherGemmBench,
        GemmReduceScatterBench,
        GemmAllReduceBench,
        RingAttentionBench,
        MoeDispatchGemmBench,
        MoeCombineBench,
        MoeLayerBench,
    )
}
_TARGETS = {
    "cuda": "device time in ms, queued ahead of the host",
    "host": "CPU threads beside NumPy and MPI, in ms; not a measure of speed",
}


def shape_of(keys: tuple[str, ...], meaning: str) -> Callable[[str], tuple[int, ...]]:
    """Return what reads the numbers of ``M,K,N`` or the like, for `argparse`.

    `meaning` says in an error what they are.
    """

    def shape(text: str) -> tuple[int, ...]:
        try:
            extents = tuple(map(int, text.split(",")))
        except ValueError:
            extents = ()
        if len(extents) != len(keys) or min(extents) < 1:
            raise argparse.ArgumentTypeError(
                f"{text!r}: use {','.join(keys)}, whole numbers of at least 1: {meaning}"
            )
        of = dict(zip(keys, extents, strict=True))
        if "k" in of and of["k"] > of["E"]:
            raise argparse.ArgumentTypeError(f"{text}: a token chooses k of E experts, so k <= E")
        if "Hq" in of and of["Hq"] % of["Hkv"]:
            raise argparse.ArgumentTypeError(f"{text}: Hq is not a multiple of Hkv")
        if of.get("D", 1) > MOST_COLUMNS:
            raise argparse.ArgumentTypeError(f"{text}: D is at most {MOST_COLUMNS}")
        return extents

    return shape


def repeats(text: str) -> int:
    """Return a number of repeats, for `argparse`."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: use a whole number of at least 1")
    return int(text)


def bench(comm: Communicator, arguments: argparse.Namespace) -> int:
    """Measure an operator and print a table; `CommandError` if a result was wrong.

    A record is the median of several repeats in one set of processes, each with operands of its
    own.
    """
    kind = BENCHES[arguments.operator]
    together(comm, "to look at the outputs", lambda: _check_outputs(comm, arguments))
    shapes = arguments.shape or (kind.quick_shapes if arguments.quick else kind.shapes)[comm.target]
    dtype, keys = np.dtype(arguments.dtype), records.SHAPE_KEYS[kind.operator]
    variant = {key: getattr(arguments, key) for key in records.VARIANT_KEYS[kind.operator]}
    cases = [
        (kind.operator, dict(zip(keys, extents, strict=True)), dtype.name, variant)
        for extents in shapes
    ]
    table = records.Table(
        [records.title(*case) for case in cases], [rival.name for rival in kind.rivals()]
    )
    done: list[dict[str, Any]] = []
    wrong: list[str] = []
    with (
        _progress(comm, len(shapes) * arguments.repeat) as (say, advance),
        kind.opened(comm, dtype, variant) as measurement,
    ):
        say(_title(comm, measurement.link_rate, measurement.network_rate))
        for extents, case in zip(shapes, cases, strict=True):
            measured = [advance(measurement.measure(*extents)) for _ in range(arguments.repeat)]
            try:
                record = records.make_record(comm, *case, measured)
            except Error as error:
                wrong.append(str(error))
                continue
            if not done:
                say(table.headings)
            done.append(record)
            say(table.line(record))
            if arguments.json and comm.rank == 0:
                records.write(arguments.json, done)
        for note in records.notes(done):
            say(note)
        if arguments.json and done:
            say(f"records: {arguments.json}")
        if arguments.plot and comm.rank == 0 and done:
            records.draw(arguments.plot, done)
    if wrong:
        raise CommandError("\n".join(wrong))
    return 0


def _check_outputs(comm: Communicator, arguments: argparse.Namespace) -> None:
    """Raise what would keep the results from being written, before they are measured."""
    if comm.rank != 0:
        return
    if arguments.plot:
        records.check_chart(arguments.plot)
    for path in filter(None, (arguments.json, arguments.plot)):
        with open(path, "a"):
            pass
    if arguments.json:
        try:
            records.held(arguments.json)
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f"{arguments.json} holds something else than records ({error}): give --json "
                "another file"
            ) from None


@contextlib.contextmanager
def _progress(comm: Communicator, total: int) -> Iterator[tuple[Callable, Callable]]:
    """Give what prints a line on rank 0, and what counts a step of the bar and returns it."""
    if comm.rank != 0:
        yield (lambda text: None), (lambda step: step)
        return
    tqdm = None
    with contextlib.suppress(ImportError):
        tqdm = importlib.import_module("tqdm").tqdm
    if tqdm is None:
        yield (lambda text: print(text, flush=True)), (lambda step: step)
        return
    with tqdm(total=total, disable=None, leave=False) as bar:  # None: only on a terminal

        def advance(step: Any) -> Any:
            bar.update()
            return step

        yield (lambda text: bar.write(text)), advance


def _title(comm: Communicator, link_rate: float, network_rate: float) -> str:
    runtime = runtime_of(comm)
    ranks = "rank" if comm.size == 1 else "ranks"
    link = f", {link_rate / 1e9:.1f} GB/s into each" if min(runtime.topology.sizes) > 1 else ""
    network = ""
    if runtime.network:
        cards = len(runtime.network.cards)
        network = f", {network_rate / cards / 1e9:.2f} GB/s out of each network card"
    return (
        f"mkernel_cp {__version__}, {comm.size} {ranks} on {comm.device}{link}{network}: "
        f"{_TARGETS[comm.target]}"
    )
