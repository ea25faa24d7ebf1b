"""`ring_attention` beside a library's attention with all keys here, and a ring around that.

A program: ``mpirun -n 4 python -m mkernel_cp.bench.ring_attention``; ``--help`` says more.
"""

import argparse
import contextlib
import importlib
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import reference
from ..commands.job import CommandError, on_ranks
from ..communicator import Communicator, runtime_of
from ..errors import Error
from ..operators.ring_attention import RingAttention
from ..plan import DTYPES
from . import baselines, timing
from .data import normal
from .link import link_rate
from .timing import Call

_SETS = 3  # of operands, used in turn: what the call before has left in a cache is of no use
_SAMPLES = 64  # rows of a result that are compared
_KEYS = "S", "B", "Hq", "Hkv", "D"
SHAPES = {
    "cuda": tuple((s, 4, 16, 16, 128) for s in (12288, 24576, 49152)),
    "host": ((96, 2, 4, 2, 16),),
}
_HEADINGS = ("compute", "transfer", "floor", "engine", "ring", "fused")


@dataclass(frozen=True, eq=False)
class Operands:
    """One set of what `ring_attention` takes and gives.

    Attributes
    ----------
    q : array (B, S_r, Hq, D)
    kv : array (2, B, S_r, Hkv, D)
        Keys and values, where peers can read them.
    whole : array (2, B, S, Hkv, D)
        Those of all ranks, in the order of the sequence.
    out : array (B, S_r, Hq, D)
    """

    q: Any
    kv: Any
    whole: Any
    out: Any


# --- a library's attention ------------------------------------------------------------------------


class NumpyAttention:
    """Attention of NumPy; it also says what the members of such a library are."""

    numpy: Any = np

    def queued(self) -> contextlib.AbstractContextManager:
        """Return a context in which all its work is done in the order of the caller's."""
        return contextlib.nullcontext()

    def __call__(self, q: Any, k: Any, v: Any, causal: bool) -> tuple[Any, Any]:
        """Return (B, Hq, Sq, D) and the log-sum-exp; if causal, the last query sees all keys."""
        wide = reference.accumulator_dtype(q.dtype)
        group = q.shape[2] // k.shape[2]
        q, k, v = (x.astype(wide).transpose(0, 2, 1, 3) for x in (q, k, v))
        k, v = (x.repeat(group, axis=1) for x in (k, v))
        scores = q @ k.swapaxes(-1, -2) / wide.type(math.sqrt(q.shape[-1]))
        if causal:
            rows, columns = scores.shape[-2:]
            scores[..., ~np.tri(rows, columns, columns - rows, dtype=bool)] = -np.inf
        lse = np.logaddexp.reduce(scores, axis=-1)
        return np.exp(scores - lse[..., None]) @ v, lse

    def store(self, result: Any, to: Any) -> None:
        """Write a result into an array (B, Sq, Hq, D)."""
        to[...] = result.transpose(0, 2, 1, 3)


class TorchAttention:
    """Attention of PyTorch: cuDNN's, and for causal masks FlashAttention's."""

    def __init__(self) -> None:
        self._torch = baselines.Torch()
        self.numpy, self.queued = self._torch.module, self._torch.on_current_stream

    def __call__(self, q: Any, k: Any, v: Any, causal: bool) -> tuple[Any, Any]:
        group = q.shape[2] // k.shape[2]
        q, k, v = (self._torch.tensor(x).transpose(1, 2) for x in (q, k, v))
        if group > 1:
            k, v = (x.repeat_interleave(group, 1) for x in (k, v))
        aten = self._torch.module.ops.aten
        if causal:
            found = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)
        else:
            found = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True)
        out, lse = found[:2]
        return out, lse.reshape(out.shape[:-1])

    def store(self, result: Any, to: Any) -> None:
        self._torch.tensor(to).copy_(result.transpose(1, 2))


# --- exchanges around a ring ----------------------------------------------------------------------


class MpiExchange:
    """Sends an array to the next rank while another comes from the one before.

    It also says what the members of such an exchange are. Making one is collective.
    """

    def __init__(self, comm: Communicator):
        self._mpi = comm.mpi
        self._next, self._last = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        self._pending: list[Any] = []

    def start(self, own: Any, theirs: Any) -> None:
        """Start it, behind what was queued before."""
        own, theirs = own.view(np.uint8), theirs.view(np.uint8)
        self._pending = [self._mpi.Irecv(theirs, self._last), self._mpi.Isend(own, self._next)]

    def wait(self) -> None:
        """Let what is queued from now on wait for the end."""
        for request in self._pending:
            request.Wait()


class NcclExchange:
    """ncclSend and ncclRecv through CuPy, on a stream of their own."""

    def __init__(self, comm: Communicator):
        self._nccl = nccl = importlib.import_module("cupy.cuda.nccl")
        self._cuda = importlib.import_module("cupy").cuda
        make = nccl.get_unique_id
        agree = runtime_of(comm).agree
        identity = agree("to start NCCL", lambda: make() if comm.rank == 0 else None)[0]
        self._comm = nccl.NcclCommunicator(comm.size, identity, comm.rank)
        self._next, self._last = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        self._stream = self._cuda.Stream(non_blocking=True)

    def start(self, own: Any, theirs: Any) -> None:
        nccl, stream = self._nccl, self._stream
        stream.wait_event(self._cuda.get_current_stream().record())
        nccl.groupStart()
        self._comm.send(own.data.ptr, own.nbytes, nccl.NCCL_UINT8, self._next, stream.ptr)
        self._comm.recv(theirs.data.ptr, theirs.nbytes, nccl.NCCL_UINT8, self._last, stream.ptr)
        nccl.groupEnd()

    def wait(self) -> None:
        self._cuda.get_current_stream().wait_event(self._stream.record())


def merge(numpy: Any, one: tuple[Any, Any] | None, other: tuple[Any, Any]) -> tuple[Any, Any]:
    """Return attention over the keys of two results, each with its log-sum-exp, in float32."""
    if one is None:
        out, lse = other
        return out * numpy.ones_like(lse)[..., None], lse
    lse = numpy.logaddexp(one[1], other[1])
    parts = (out * numpy.exp(part - lse)[..., None] for out, part in (one, other))
    return sum(parts), lse


# --- a shape --------------------------------------------------------------------------------------


class RingAttentionBench:
    """What all shapes of one run share. Collective, like its calls.

    Attributes
    ----------
    link_rate : float
        Bytes per second that reach a rank, measured now.
    """

    def __init__(self, comm: Communicator, dtype: np.dtype, causal: bool):
        self._comm, self._dtype, self._causal = comm, dtype, causal
        self._machine = runtime_of(comm).machine
        host = comm.target == "host"
        self._numpy = np if host else importlib.import_module("cupy")
        baselines.without_multicast()
        self._clock, self._gate = timing.clock_for(comm), timing.Gate(comm)
        self._part = comm.mpi.Split(comm.rank)
        device = self._clock.device()
        self._alone = Communicator(self._part, target=comm.target, device=device)
        self.link_rate = link_rate(comm, self._clock, self._gate)
        self._attend = baselines.attempt(comm, NumpyAttention if host else TorchAttention)
        kind = MpiExchange if host else NcclExchange
        self._exchange = baselines.attempt(comm, lambda: kind(comm))

    def close(self) -> None:
        """Forget its plans."""
        self._alone.close()
        self._part.Free()
        self._gate.close()

    def measure(self, shape: Sequence[int]) -> dict[str, Any]:
        """Return the times of a shape in ms, or words for what has none.

        Parameters
        ----------
        shape : sequence of int
            S, B, Hq, Hkv, D.
        """
        comm, clock = self._comm, self._clock
        runtime_of(comm).refuse_nodes("the bench of ring_attention")
        positions = shape[0]
        if positions % (2 * comm.size):
            raise CommandError(f"S={positions}: use a multiple of {2 * comm.size}, twice the ranks")
        sets = [self._operands(shape, number) for number in range(_SETS)]
        first = sets[0]
        asked = {"causal": self._causal, "layout": "zigzag" if self._causal else "contiguous"}
        with RingAttention(first.q, *first.kv, comm=comm, **asked) as fused:
            ways = {
                "compute": self._library,
                "ring": self._ring(first),
                "fused": lambda one: fused(one.q, *one.kv, out=one.out),
            }
            found = {
                name: baselines.attempt(comm, lambda way=way: self._checked(way, sets, self._own))
                for name, way in ways.items()
            }
            found["engine"] = baselines.attempt(comm, lambda: self._engine(sets))
            calls = {name: call for name, call in found.items() if not isinstance(call, str)}
            found |= timing.interleaved_ms(comm, clock, self._gate, calls)
            nbytes = runtime_of(comm).agree("what comes", lambda: fused.plan.bytes_from_peers)
        found["transfer"] = 1e3 * max(nbytes) / self.link_rate
        numbers = [found[name] for name in ("compute", "transfer")]
        words = [number for number in numbers if isinstance(number, str)]
        found["floor"] = words[0] if words else max(numbers)
        return {name: found[name] for name in _HEADINGS}

    # --- ways to do it --------------------------------------------------------------------------

    @property
    def _own(self) -> list[int]:
        return self._parts(self._comm.rank)

    def _parts(self, rank: int) -> list[int]:
        """Return which of the equal parts of the sequence a rank holds."""
        return [rank, 2 * self._comm.size - 1 - rank] if self._causal else [rank]

    def _library(self, one: Operands) -> Any:
        """Attention of this rank's queries over all keys, which are here."""
        attend = self._available(self._attend)
        parts = self._own
        length = one.q.shape[1] // len(parts)
        with attend.queued():
            for number, part in enumerate(parts):
                own = slice(number * length, (number + 1) * length)
                k, v = one.whole[:, :, : (part + 1) * length] if self._causal else one.whole
                result, _ = attend(one.q[:, own], k, v, self._causal)
                attend.store(result, one.out[:, own])
        return one.out

    def _engine(self, sets: Sequence[Operands]) -> Call:
        """Return the operator on this rank alone: on as much of the batch as is its share.

        That is the same arithmetic, in tiles of the same size, with all keys here.
        """
        ranks, batch = self._comm.size, sets[0].q.shape[0]
        if batch % ranks:
            raise Error(f"B={batch} is no multiple of {ranks} ranks")

        def alone(one: Operands) -> Operands:
            whole = one.whole[:, : batch // ranks]
            shape = whole.shape[1], whole.shape[2], *one.q.shape[2:]
            return Operands(one.q.reshape(shape), whole, whole, one.out.reshape(shape))

        def run(one: Operands) -> Any:
            return attend(one.q, *one.kv, out=one.out)

        shares = [alone(one) for one in sets]
        first = shares[0]
        attend = RingAttention(first.q, *first.kv, comm=self._alone, causal=self._causal)
        return self._checked(run, shares, [0])

    def _ring(self, like: Operands) -> Callable[[Operands], Any]:
        """Return the same with the keys of one rank after the other, which go around the ring."""
        comm = self._comm
        rooms = [self._machine.empty(like.kv.shape, like.kv.dtype) for _ in range(2)]

        def run(one: Operands) -> Any:
            attend, exchange = self._available(self._attend), self._available(self._exchange)
            own, kv = self._parts(comm.rank), one.kv
            length = one.q.shape[1] // len(own)
            merged: list[Any] = [None] * len(own)
            with attend.queued():
                for step in range(comm.size):
                    if step + 1 < comm.size:
                        exchange.start(kv, rooms[step % 2])
                    for i, query in enumerate(own):
                        for j, part in enumerate(self._parts((comm.rank - step) % comm.size)):
                            if self._causal and part > query:
                                continue
                            q = one.q[:, i * length : (i + 1) * length]
                            k, v = kv[:, :, j * length : (j + 1) * length]
                            found = attend(q, k, v, self._causal and part == query)
                            merged[i] = merge(attend.numpy, merged[i], found)
                    if step + 1 < comm.size:
                        exchange.wait()
                        kv = rooms[step % 2]
                for i, (out, _) in enumerate(merged):
                    attend.store(out, one.out[:, i * length : (i + 1) * length])
            return one.out

        return run

    @staticmethod
    def _available(found: Any) -> Any:
        if isinstance(found, str):
            raise Error(found)
        return found

    # --- operands and results -------------------------------------------------------------------

    def _operands(self, shape: Sequence[int], number: int) -> Operands:
        """Return random operands; every rank knows all keys and values."""
        comm, (positions, batch, heads, kv_heads, columns) = self._comm, shape
        own = positions // comm.size
        whole = self._normal(1000 * (1 + number), (2, batch, positions, kv_heads, columns))
        q = self._normal(1000 * (1 + number) + 1 + comm.rank, (batch, own, heads, columns))
        kv = comm.empty((2, batch, own, kv_heads, columns), self._dtype)
        parts = self._parts(comm.rank)
        length = own // len(parts)
        for i, part in enumerate(parts):
            source = whole[:, :, part * length : (part + 1) * length]
            self._machine.copy(kv[:, :, i * length : (i + 1) * length], source)
        return Operands(q, kv, whole, self._machine.empty(q.shape, self._dtype))

    def _normal(self, seed: int, shape: tuple[int, ...]) -> Any:
        return normal(self._numpy, self._dtype, seed, shape)

    def _checked(
        self, way: Callable[[Operands], Any], sets: Sequence[Operands], parts: Sequence[int]
    ) -> Call:
        """Return a call whose result is right, and which leaves its work to the device.

        The queries are these parts of the sequence.
        """

        def call(number: int) -> Any:
            return way(sets[number % _SETS])

        self._machine.fill(sets[0].out, np.nan)
        call(0)
        fault = self._fault(sets[0], parts)
        call(1)
        queued = timing.is_queued(self._clock, lambda: call(2))
        if fault > 1:
            raise Error(f"wrong result: an error is {fault:.3g} times its bound")
        if not queued and self._comm.target == "cuda":
            raise Error("waits for the GPU, so it has no device time of its own")
        return call

    def _fault(self, one: Operands, parts: Sequence[int]) -> float:
        """Return the largest error of some rows, in units of its bound."""
        batch, own, heads, _ = one.q.shape
        length = own // len(parts)
        random = np.random.default_rng(self._comm.rank)
        worst = 0.0
        for b, row, head in random.integers(0, (batch, own, heads), (_SAMPLES, 3)):
            seen = parts[row // length] * length + row % length + 1
            seen = int(seen) if self._causal else one.whole.shape[2]
            kv_head = head // (heads // one.whole.shape[3])
            keys = (x[b : b + 1, :seen, kv_head : kv_head + 1] for x in one.whole)
            # Of two ranks, the second, which has one position.
            k, v = (np.split(self._machine.asnumpy(x), [seen - 1], axis=1) for x in keys)
            place = slice(b, b + 1), slice(row, row + 1), slice(head, head + 1)
            query = self._machine.asnumpy(one.q[place])
            expected, _ = reference.ring_attention(query, k, v, 1)
            worst = max(worst, float(expected.check(self._machine.asnumpy(one.out[place]))))
        return worst


# --- the program ----------------------------------------------------------------------------------


def shape(text: str) -> tuple[int, ...]:
    """Return the numbers of ``S,B,Hq,Hkv,D``, for `argparse`."""
    extents = tuple(map(int, text.split(",")))
    if len(extents) != len(_KEYS) or min(extents) < 1:
        raise ValueError
    return extents


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m mkernel_cp.bench.ring_attention",
        description="Times in ms: compute, a library's attention over all keys; transfer, what has "
        "to come here at the link rate; engine, the operator on each rank alone, for its share of "
        "the batch; ring, the library's attention with the keys of one rank after the other; "
        "fused, the operator. efficiency = floor / fused.",
    )
    parser.add_argument("--shape", type=shape, action="append", metavar=",".join(_KEYS))
    parser.add_argument("--causal", action="store_true", help="a causal mask, in zigzag layout")
    parser.add_argument("--dtype", choices=[dtype.name for dtype in DTYPES], default="bfloat16")
    parser.add_argument("--json", metavar="PATH", help="write what is printed")
    return parser


def run(comm: Communicator, arguments: argparse.Namespace) -> int:
    """Measure all shapes and print a table; `CommandError` if a result of ours was wrong."""
    rows, wrong = [], []
    with contextlib.closing(
        RingAttentionBench(comm, np.dtype(arguments.dtype), arguments.causal)
    ) as bench:
        for extents in arguments.shape or SHAPES[comm.target]:
            times = bench.measure(extents)
            kind = {"causal": arguments.causal, "dtype": arguments.dtype, "world": comm.size}
            rows.append(dict(zip(_KEYS, extents, strict=True)) | kind | times)
            title = " x ".join(map(str, extents)) + (" causal" if arguments.causal else "")
            if comm.rank == 0:
                print(_line(title, times), flush=True)
            if isinstance(times["fused"], str):
                wrong.append(f"{title} has no time: {times['fused']}")
    if comm.rank == 0 and arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=1)
    if wrong:
        raise CommandError("\n".join(wrong))
    return 0


def _line(title: str, times: dict[str, Any]) -> str:
    cells = [
        f"{name} {found if isinstance(found, str) else format(found, '.4g')}"
        for name, found in times.items()
    ]
    if not any(isinstance(times[name], str) for name in ("floor", "fused")):
        cells.append(f"efficiency {times['floor'] / times['fused']:.3f}")
    return f"{title}: {', '.join(cells)}"


if __name__ == "__main__":
    asked = _parser().parse_args()
    sys.exit(on_ranks(lambda comm: run(comm, asked)))
