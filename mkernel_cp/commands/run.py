"""`run`: an operator on files."""

import argparse
import contextlib
import math
import os
import signal
import stat
import time
import tokenize
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from ..arguments import check_dtype, output_dtype
from ..attention_plan import MOST_COLUMNS, zigzag_counts
from ..communicator import Communicator, runtime_of
from ..operators import allgather_gemm as gather
from ..operators import gemm_allreduce as reduce
from ..operators import gemm_reduce_scatter as scatter
from ..operators.moe_combine import moe_combine as combine
from ..operators.moe_dispatch_gemm import moe_dispatch_gemm as dispatch
from ..operators.moe_layer import moe_layer as layer
from ..operators.ring_attention import ring_attention as attention
from ..operators.ring_attention import zigzag_split
from ..reference import accumulator_dtype, array_split_counts
from .job import together

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
# What NumPy makes of bfloat16 in a file: two bytes without a meaning.
_VOID = np.dtype("V2")
_IDS = np.dtype(np.int32), np.dtype(np.int64)
# That ids may name where nothing else tells how many there are: each takes memory on every rank.
_MOST_EXPERTS = 1 << 16


def allgather_gemm(comm: Communicator, arguments: argparse.Namespace) -> int:
    """Multiply two files into a third; the rows of A and columns of B and C are split by rank."""

    def work(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> None:
        rows, columns = comm.rows(a.shape[0]), comm.rows(b.shape[1])
        counts = comm.row_counts(a.shape[0])
        own = _operands(comm, a[rows], b[:, columns])
        _store(comm, c[:, columns], gather.allgather_gemm, *own, row_counts=counts)

    return _multiply(comm, arguments, work)


def gemm_reduce_scatter(comm: Communicator, arguments: argparse.Namespace) -> int:
    """Multiply two files into a third; the columns of A and rows of B and C are split by rank."""

    def work(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> None:
        depth, rows = comm.rows(b.shape[0]), comm.rows(a.shape[0])
        own = _operands(comm, a[:, depth], b[depth])
        _store(comm, c[rows], scatter.gemm_reduce_scatter, *own)

    return _multiply(comm, arguments, work)


def gemm_allreduce(comm: Communicator, arguments: argparse.Namespace) -> int:
    """Do the same with the whole sum on every rank, each of which writes some rows."""

    def work(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> None:
        depth, rows = comm.rows(b.shape[0]), comm.rows(a.shape[0])
        own = _operands(comm, a[:, depth], b[depth])
        result = reduce.gemm_allreduce(*own, comm=comm, dtype=c.dtype)
        c[rows] = comm.asnumpy(result)[rows]
        comm.synchronize()

    return _multiply(comm, arguments, work)


def counts(text: str) -> tuple[int, ...]:
    """Return the numbers of a list with commas, for `argparse`."""
    numbers = text.split(",")
    if not all(number.strip().isdecimal() for number in numbers):
        raise argparse.ArgumentTypeError(
            f"{text!r}: use whole numbers of at least 0 with commas between them, one for each rank"
        )
    return tuple(map(int, numbers))


def ring_attention(comm: Communicator, arguments: argparse.Namespace) -> int:
    """Find what the queries of a file make of the keys and values of two others.

    The positions are split by rank, as `layout` says or by counts; in the files they are in order.
    """
    layout = arguments.layout
    outputs = [path for path in (arguments.output, arguments.lse) if path is not None]

    def counts_of(positions: int) -> tuple[int, ...]:
        split = zigzag_counts(positions, comm.size)
        counts = arguments.seq_counts
        if counts is None:
            return split if layout == "zigzag" else comm.row_counts(positions)
        if len(counts) != comm.size or sum(counts) != positions:
            raise ValueError(
                f"--seq-counts {list(counts)}: {arguments.q} has {positions} positions; use "
                f"{comm.size} numbers, one for each rank, that add up to them"
            )
        if layout == "zigzag" and counts != split:
            raise ValueError(
                f"--seq-counts {list(counts)}: in the layout 'zigzag' the ranks hold {list(split)}"
            )
        return counts

    def open_inputs() -> tuple[list[np.ndarray], list[_Result]]:
        q = _open_array(arguments.q, 4)
        k, v = (_open_array(p, 4, like=(arguments.q, q.dtype)) for p in (arguments.k, arguments.v))
        batch, positions, heads, columns = q.shape
        kv_heads = k.shape[2]
        _check_shape(arguments.k, k.shape, (batch, positions, kv_heads, columns))
        _check_shape(arguments.v, v.shape, k.shape)
        if not kv_heads or not heads or heads % kv_heads:
            raise ValueError(
                f"{arguments.q} has {heads} heads, {arguments.k} {kv_heads}: use a multiple"
            )
        if not 1 <= columns <= MOST_COLUMNS:
            raise ValueError(f"{arguments.q} has heads of {columns}: use 1 to {MOST_COLUMNS}")
        counts_of(positions)
        if len({os.path.realpath(path) for path in outputs}) < len(outputs):
            raise ValueError(f"--lse {arguments.lse}: the result goes there; use another file")
        mask = "causal " if arguments.causal else ""
        words = f"{mask}attention of {q.shape} over {k.shape} {q.dtype}"
        lse = _Result(
            (batch, heads, positions), accumulator_dtype(q.dtype), f"log-sum-exp of {words}"
        )
        return [q, k, v], [_Result(q.shape, q.dtype, words), lse][: len(outputs)]

    def work(q: Any, k: Any, v: Any, o: np.ndarray, lse: np.ndarray | None = None) -> None:
        every, counts = np.arange(q.shape[1]), counts_of(q.shape[1])
        if layout == "zigzag":
            held = zigzag_split(every, comm.size, axis=0)
        else:
            held = np.split(every, np.cumsum(counts)[:-1])
        own = held[comm.rank]
        found, sums = attention(
            *_operands(comm, *(x[:, own] for x in (q, k, v))),
            comm=comm,
            seq_counts=counts,
            causal=arguments.causal,
            scale=arguments.scale,
            layout=layout,
            return_lse=True,
        )
        o[:, own] = comm.asnumpy(found)
        if lse is not None:
            lse[:, :, own] = comm.asnumpy(sums)
        comm.synchronize()

    return _fill(comm, outputs, open_inputs, work)


def moe_dispatch_gemm(comm: Communicator, arguments: argparse.Namespace) -> int:
    """Multiply the tokens of a file with the experts that another one names, in order of experts.

    Rows are in the order of expert, token and slot; the tokens and the experts are split by rank.
    """

    def open_inputs() -> tuple[list[np.ndarray], list[_Result]]:
        x, ids = _open_tokens(arguments)
        w = _open_array(arguments.w, 3, like=(arguments.x, x.dtype))
        _check_shape(arguments.w, w.shape, (w.shape[0], x.shape[1], w.shape[2]))
        _check_ids(arguments.topk_idx, ids, len(w))
        dtype = output_dtype(x.dtype, arguments.dtype)
        shape = int(np.count_nonzero(ids >= 0)), w.shape[2]
        return [x, ids, w], [_Result(shape, dtype, f"{x.shape} @ {w.shape} {x.dtype}")]

    def work(x: np.ndarray, ids: np.ndarray, w: np.ndarray, rows: np.ndarray) -> None:
        counts = _rows_of_ranks(comm, ids, len(w))
        tokens, experts = comm.rows(len(x)), comm.rows(len(w))
        own = _operands(comm, x[tokens], ids[tokens], w[experts])
        asked = {"num_experts": len(w), "capacity": max(counts), "dtype": rows.dtype}
        found, layout = dispatch(*own, comm=comm, **asked)
        first = sum(counts[: comm.rank])
        rows[first : first + counts[comm.rank]] = comm.asnumpy(layout.trim(found))
        comm.synchronize()

    return _fill(comm, [arguments.output], open_inputs, work)


def moe_combine(comm: Communicator, arguments: argparse.Namespace) -> int:
    """Add up the rows of each token: one for every expert that it names, in order of experts.

    Rows are in the order in which `moe_dispatch_gemm` leaves them; tokens and experts are split by
    rank.
    """

    def open_inputs() -> tuple[list[np.ndarray], list[_Result]]:
        rows, ids = _open_array(arguments.rows), _open_array(arguments.topk_idx, 2, _IDS)
        weights = _open_weights(arguments, rows.dtype, ids)
        _check_ids(arguments.topk_idx, ids, min(_experts_named(ids), _MOST_EXPERTS))
        _check_shape(arguments.rows, rows.shape, (int((ids >= 0).sum()), rows.shape[1]))
        words = f"sums of {rows.shape} {rows.dtype}"
        return [rows, ids, weights], [_Result((len(ids), rows.shape[1]), rows.dtype, words)]

    def work(rows: np.ndarray, ids: np.ndarray, weights: np.ndarray, y: np.ndarray) -> None:
        named = _experts_named(ids)
        counts = _rows_of_ranks(comm, ids, named)
        first, tokens = sum(counts[: comm.rank]), comm.rows(len(ids))
        # The layout is that of a dispatch which leaves nothing to multiply.
        nothing = np.zeros((tokens.stop - tokens.start, 1), rows.dtype)
        experts = np.zeros((comm.row_counts(named)[comm.rank], 1, 1), rows.dtype)
        x, choice, w = _operands(comm, nothing, ids[tokens], experts)
        _, layout = dispatch(x, choice, w, comm=comm, num_experts=named, capacity=max(counts))
        own = _operands(comm, rows[first : first + counts[comm.rank]], weights[tokens])
        y[tokens] = comm.asnumpy(combine(*own, layout, comm=comm))
        comm.synchronize()

    return _fill(comm, [arguments.output], open_inputs, work)


def moe_layer(comm: Communicator, arguments: argparse.Namespace) -> int:
    """Make of the tokens of a file what a layer of experts makes of them.

    The tokens and the experts are split by rank.
    """
    activation = None if arguments.activation == "none" else arguments.activation

    def open_inputs() -> tuple[list[np.ndarray], list[_Result]]:
        x, ids = _open_tokens(arguments)
        like = arguments.x, x.dtype
        w1, w2 = (_open_array(path, 3, like=like) for path in (arguments.w1, arguments.w2))
        experts, inner, columns = w2.shape
        halves = 2 if activation == "swiglu" else 1
        need = experts, x.shape[1], halves * inner
        _check_shape(arguments.w1, w1.shape, need, f"and --activation {arguments.activation} ")
        weights = _open_weights(arguments, x.dtype, ids)
        _check_ids(arguments.topk_idx, ids, experts)
        words = f"{x.shape} by {experts} experts, {arguments.activation} {x.dtype}"
        return [x, ids, weights, w1, w2], [_Result((len(x), columns), x.dtype, words)]

    def work(x: Any, ids: Any, weights: Any, w1: Any, w2: Any, y: np.ndarray) -> None:
        capacity = max(_rows_of_ranks(comm, ids, len(w1)))
        tokens, experts = comm.rows(len(x)), comm.rows(len(w1))
        own = _operands(comm, x[tokens], ids[tokens], weights[tokens], w1[experts], w2[experts])
        asked = {"activation": activation, "num_experts": len(w1), "capacity": capacity}
        y[tokens] = comm.asnumpy(layer(*own, comm=comm, **asked))
        comm.synchronize()

    return _fill(comm, [arguments.output], open_inputs, work)


def _open_tokens(arguments: argparse.Namespace) -> tuple[np.ndarray, np.ndarray]:
    x, ids = _open_array(arguments.x), _open_array(arguments.topk_idx, 2, _IDS)
    _check_shape(arguments.topk_idx, ids.shape, (len(x), ids.shape[1]))
    return x, ids


def _open_weights(arguments: argparse.Namespace, dtype: np.dtype, ids: np.ndarray) -> np.ndarray:
    weights = _open_array(arguments.topk_weight, 2, (accumulator_dtype(dtype),))
    _check_shape(arguments.topk_weight, weights.shape, ids.shape)
    return weights


def finite(text: str) -> float:
    """Return a number; ArgumentTypeError for what is none."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r}: use a finite number")
    return value


def _experts_named(ids: np.ndarray) -> int:
    """Return how many experts there are at the least."""
    return int(ids.max(initial=-1)) + 1


def _check_shape(path: str, shape: tuple[int, ...], need: tuple[int, ...], more: str = "") -> None:
    if shape != need:
        raise ValueError(f"{path} has shape {shape}: with the other files {more}it needs {need}")


def _check_ids(path: str, ids: np.ndarray, experts: int) -> None:
    wrong = np.argwhere((ids < -1) | (ids >= experts))
    if len(wrong):
        at = tuple(wrong[0].tolist())
        raise ValueError(
            f"{path} has {ids[at]} at {at}: use ids from 0 to {experts - 1}, or -1 for none"
        )


def _rows_of_ranks(comm: Communicator, ids: np.ndarray, experts: int) -> list[int]:
    """Return how many rows the experts of each rank get."""
    ends = np.cumsum(array_split_counts(experts, comm.size))
    owners = np.searchsorted(ends, ids[ids >= 0], side="right")
    return np.bincount(owners, minlength=comm.size).tolist()


def _operands(comm: Communicator, *parts: np.ndarray) -> Iterator[Any]:
    return (runtime_of(comm).machine.asarray(part, None) for part in parts)


def _store(
    comm: Communicator, part: np.ndarray, call: Callable[..., Any], a: Any, b: Any, **asked: Any
) -> None:
    """Make a call whose result is a part of the output."""
    out = part if comm.target == "host" else None
    result = call(a, b, comm=comm, out=out, dtype=part.dtype, **asked)
    if out is None:
        part[...] = comm.asnumpy(result)
        comm.synchronize()


def _multiply(
    comm: Communicator,
    arguments: argparse.Namespace,
    work: Callable[[np.ndarray, np.ndarray, np.ndarray], None],
) -> int:
    """Multiply two files: `work` fills in this rank's part of the output."""

    def open_inputs() -> tuple[list[np.ndarray], list[_Result]]:
        a, b = (_open_array(path) for path in (arguments.a, arguments.b))
        names = f"{arguments.a} has shape {a.shape}, {arguments.b} {b.shape}"
        if a.shape[1] != b.shape[0]:
            raise ValueError(f"{names}: A needs as many columns as B has rows")
        if a.dtype != b.dtype:
            raise TypeError(f"{arguments.a} has dtype {a.dtype}, {arguments.b} {b.dtype}: use one")
        dtype = output_dtype(a.dtype, arguments.dtype)
        shape = (a.shape[0], b.shape[1])
        return [a, b], [_Result(shape, dtype, f"{a.shape} @ {b.shape} {a.dtype}")]

    return _fill(comm, [arguments.output], open_inputs, work)


@dataclass(frozen=True)
class _Result:
    """What an output is to be, and of what."""

    shape: tuple[int, ...]
    dtype: np.dtype
    words: str


def _fill(
    comm: Communicator,
    outputs: Sequence[str],
    open_inputs: Callable[[], tuple[list[np.ndarray], list[_Result]]],
    work: Callable[..., None],
) -> int:
    """Open the inputs, have `work` fill in this rank's part of the outputs, and say so."""
    opened: list[Any] = []

    def attempt() -> str:
        opened.extend(open_inputs())
        return uuid.uuid4().hex

    name = together(comm, "to open the inputs", attempt)[0]
    inputs, results = opened
    start = time.perf_counter()
    with contextlib.ExitStack() as stack:
        to = [
            stack.enter_context(_output(comm, path, f"{name}-{i}", result.shape, result.dtype))
            for i, (path, result) in enumerate(zip(outputs, results, strict=True))
        ]
        work(*inputs, *to)
    seconds = time.perf_counter() - start
    for path, result in zip(outputs, results, strict=True):
        if comm.rank == 0:
            print(
                f"{path}: {result.shape} {result.dtype} = {result.words}, {comm.size} rank(s), "
                f"target {comm.target}, {seconds:.3f} s",
                flush=True,
            )
    return 0


def _open_array(
    path: str,
    dimensions: int = 2,
    dtypes: tuple[np.dtype, ...] | None = None,
    like: tuple[str, np.dtype] | None = None,
) -> np.ndarray:
    """Return a .npy file as a memory-mapped array; OSError, ValueError or TypeError if it is none.

    Every refusal names the file. `like`: another file, whose dtype it must have.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise ValueError(f"{path} is not a regular file")
    with open(path, "rb") as file:
        try:
            shape, fortran_order, dtype = _read_header(file)
        except (ValueError, SyntaxError, tokenize.TokenError) as error:
            raise ValueError(f"{path} is not a .npy file of numbers: {error}") from None
        offset = file.tell()
        size = os.fstat(file.fileno()).st_size
    dtype = _BFLOAT16 if dtype == _VOID else dtype
    if len(shape) != dimensions:
        kind = "a matrix" if dimensions == 2 else "an array"
        raise ValueError(f"{path} has shape {shape}: use {kind} of {dimensions} dimensions")
    if dtypes is None:
        check_dtype(path, dtype)
    elif dtype not in dtypes:
        raise TypeError(f"{path} has dtype {dtype}: use {' or '.join(map(str, dtypes))}")
    if like is not None and dtype != like[1]:
        raise TypeError(f"{like[0]} has dtype {like[1]}, {path} {dtype}: use one")
    if any(type(extent) is not int or extent < 0 for extent in shape):
        raise ValueError(f"{path} has shape {shape}: use extents of 0 or more")
    need = offset + math.prod(shape) * dtype.itemsize
    if size < need:
        raise ValueError(
            f"{path} is truncated: it has {size} bytes, and {shape} {dtype} takes {need}"
        )
    return _map(path, dtype, "r", offset, shape, "F" if fortran_order else "C")


def _read_header(file: Any) -> tuple[tuple[int, ...], bool, np.dtype]:
    version = np.lib.format.read_magic(file)
    if version == (1, 0):
        return np.lib.format.read_array_header_1_0(file)
    if version == (2, 0):
        return np.lib.format.read_array_header_2_0(file)
    raise ValueError(f"version {version} of the format")


def _map(
    path: str, dtype: np.dtype, mode: str, offset: int, shape: tuple[int, ...], order: str
) -> np.ndarray:
    if 0 in shape:
        return np.empty(shape, dtype, order)  # nothing can be mapped
    return np.memmap(path, dtype, mode, offset, shape, order)


@contextlib.contextmanager
def _output(
    comm: Communicator, path: str, name: str, shape: tuple[int, ...], dtype: np.dtype
) -> Iterator[np.ndarray]:
    """Give all ranks one memory-mapped array, which becomes the file `path` if all succeed.

    Until then it is a file beside it, which is gone if one of them fails.
    """
    final = Path(os.path.realpath(path))
    temporary = final.with_name(f".mkernel_cp-{name}.tmp")
    header = {
        "descr": np.lib.format.dtype_to_descr(_VOID if dtype == _BFLOAT16 else dtype),
        "fortran_order": False,
        "shape": shape,
    }

    def create() -> int | None:
        if comm.rank != 0:
            return None
        if final.exists() and not final.is_file():
            raise ValueError(f"{path} is not a regular file")
        try:
            with open(temporary, "xb") as file:
                np.lib.format.write_array_header_1_0(file, header)
                file.flush()
                offset = file.tell()
                # Now: a mapped page without room on the disk would be a SIGBUS.
                os.posix_fallocate(file.fileno(), 0, offset + math.prod(shape) * dtype.itemsize)
        except (OSError, OverflowError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise ValueError(f"cannot write {path}: {why}") from None
        return offset

    def rename() -> None:
        if comm.rank == 0:
            os.replace(temporary, final)

    # A launcher that ends its ranks asks them first: then the file goes, too.
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        offset = together(comm, "to make the output", create)[0]
        arrays: list[np.ndarray] = []
        # All, before one that fails removes the file.
        together(
            comm,
            "to map the output",
            lambda: arrays.append(_map(str(temporary), dtype, "r+", offset, shape, "C")),
        )
        (array,) = arrays
        yield array
        if isinstance(array, np.memmap):
            together(comm, "to write the output", array.flush)
        together(comm, "to rename the output", rename)
    finally:
        # Any rank may be the one that survives. After the renaming there is no such file.
        with contextlib.suppress(OSError):
            temporary.unlink()
        signal.signal(signal.SIGTERM, previous)
