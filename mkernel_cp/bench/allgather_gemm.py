"""`allgather_gemm` beside cuBLAS, NCCL and its rivals."""

import contextlib
import gc
import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import reference
from ..communicator import Communicator
from ..errors import Error
from ..operators.allgather_gemm import AllGatherGemm, allgather_gemm
from . import baselines, timing
from .baselines import Operands
from .data import normal
from .link import link_rate
from .timing import Call

_SETS = 3  # of operands, used in turn: what the call before has left in a cache is of no use
_SAMPLE = 64, 256  # rows and columns whose results are compared
_SMALL = 32, 64, 64  # rows of a rank, K, N

_SQUARES = tuple((m, m, m // 4) for m in (4096, 8192, 16384, 32768))
_LANGUAGE_MODELS = ((512, 8192, 7168), (2048, 8192, 7168), (8192, 8192, 7168), (16384, 5120, 3456))
_ODD = ((4100, 4104, 1000), (4224, 4160, 1024), (1023, 129, 77))
SHAPES = {"cuda": _SQUARES + _LANGUAGE_MODELS + _ODD, "host": ((96, 80, 40), (101, 77, 19))}
QUICK_SHAPES = {"cuda": (*_SQUARES[:2], _ODD[0]), "host": SHAPES["host"][:1]}


@dataclass(frozen=True, eq=False)
class _Sample:
    """What some elements of a result should be: those where these rows and columns cross."""

    rows: Any
    columns: Any
    expected: reference.Expected


class AllGatherGemmBench:
    """What all shapes of one run share. Collective, like its calls; use `opened` to make one.

    Attributes
    ----------
    link_rate : float
        Bytes per second that reach a rank, measured now.
    """

    def __init__(
        self,
        comm: Communicator,
        alone: Communicator,
        clock: Any,
        gate: timing.Gate,
        dtype: np.dtype,
    ):
        self._comm, self._alone, self._clock, self._gate = comm, alone, clock, gate
        self._machine, self._dtype = comm.machine, dtype
        self._bits = np.dtype(f"u{dtype.itemsize}")
        self._numpy = np if comm.target == "host" else importlib.import_module("cupy")
        self.link_rate = link_rate(comm, clock, gate)
        # Before libraries start threads of their own in this process.
        self._host_us = self._host_cost()
        self._gemm = baselines.gemm_for(comm)
        self._gather = self._attempt(lambda: baselines.gather_for(comm))
        self._rivals = {rival.name: self._meet(rival) for rival in baselines.RIVALS}

    @classmethod
    @contextlib.contextmanager
    def opened(cls, comm: Communicator, dtype: np.dtype) -> Iterator["AllGatherGemmBench"]:
        """Give the benchmark of a communicator of processes, for operands of one dtype."""
        baselines.without_multicast()
        clock = timing.clock_for(comm)
        part = comm.mpi.Split(comm.rank)
        with (
            clock.stream(),
            Communicator(part, target=comm.target, device=clock.device()) as alone,
            contextlib.closing(timing.Gate(comm)) as gate,
        ):
            self = cls(comm, alone, clock, gate, dtype)
            yield self
            for rival in self._rivals.values():
                if not isinstance(rival, str):
                    rival.close()
        part.Free()

    def _meet(self, rival: Any) -> Any:
        """Return a rival, or why there is none."""
        if self._comm.target == "host":
            return "needs GPUs"
        # Alone first: joining the others may be to wait for them.
        module = self._attempt(lambda: importlib.import_module(rival.module))
        return module if isinstance(module, str) else self._attempt(lambda: rival(self._comm))

    def _attempt(self, work: Callable[[], Any]) -> Any:
        """Return `work()`, or if it failed on any rank, why it did on the first of them."""
        return baselines.attempt(self._comm, work)

    # --- a shape ----------------------------------------------------------------------------------

    def measure(self, m: int, k: int, n: int) -> dict[str, Any]:
        """Return what a record has of a shape that is measured, with operands of its own.

        Words stand for the time of a baseline that does not run here, and of a wrong result.

        Parameters
        ----------
        m : int
            Rows of A, of all ranks together; they are split as by `numpy.array_split`.
        k : int
        n : int
            Columns of each rank's B.
        """
        try:
            return self._measure(m, k, n)
        finally:
            gc.collect()  # so that the next shape finds room

    def _measure(self, m: int, k: int, n: int) -> dict[str, Any]:
        comm, alone = self._comm, self._alone
        sets = [self._operands(m, k, n, number) for number in range(_SETS)]
        own, whole, b, counts = sets[0].own, sets[0].whole, sets[0].b, sets[0].row_counts
        sample = self._sample(sets[0])
        with (
            AllGatherGemm(own, b, comm=comm, row_counts=counts) as fused,
            AllGatherGemm(whole, b, comm=alone) as engine,
        ):

            def with_each(run: Callable[[Operands], Any]) -> Callable[[], Call]:
                return lambda: lambda number: run(sets[number % _SETS])

            ways = {
                "compute_ms": with_each(lambda one: self._gemm(one.whole, one.b, one.out)),
                "engine_ms": with_each(lambda one: engine(one.whole, one.b, out=one.out)),
                "fused_ms": with_each(lambda one: fused(one.own, one.b, out=one.out)),
                "unfused_ms": self._unfused(sets),
                **{
                    name: rival if isinstance(rival, str) else lambda r=rival: r.prepare(sets)
                    for name, rival in self._rivals.items()
                },
            }
            found = {
                name: way
                if isinstance(way, str)
                else self._attempt(lambda w=way: self._checked(w(), sets[0].out, sample))
                for name, way in ways.items()
            }
            calls = {name: call for name, call in found.items() if not isinstance(call, str)}
            found |= timing.interleaved_ms(comm, self._clock, self._gate, calls)
            plan = fused.plan.to_json()
        bytes_in = (m - min(counts)) * k * self._dtype.itemsize
        rivals = {name: self._told(name, (m, k, n), found.pop(name)) for name in self._rivals}
        return {
            **found,
            "transfer_ms": 1e3 * bytes_in / self.link_rate,
            "host_us": self._host_us,
            "rivals": rivals,
            "plan": plan,
        }

    def _unfused(self, sets: Sequence[Operands]) -> Callable[[], Call] | str:
        """Return what makes the call that gathers and then multiplies, or why there is none."""
        gather = self._gather
        if isinstance(gather, str):
            return gather

        def prepare() -> Call:
            gathered = self._machine.empty(sets[0].whole.shape, sets[0].whole.dtype)

            def call(number: int) -> Any:
                one = sets[number % _SETS]
                gather(one.own, gathered, one.row_counts)
                return self._gemm(gathered, one.b, one.out)

            return call

        return prepare

    def _told(self, name: str, shape: tuple[int, int, int], found: Any) -> Any:
        """Return a rival's time, or why there is none and what it was in an earlier run."""
        if not isinstance(found, str):
            return found
        return found + baselines.figure(name, self._comm.size, shape, self._dtype)

    # --- operands and results ---------------------------------------------------------------------

    def _operands(self, m: int, k: int, n: int, number: int) -> Operands:
        """Return random operands; every rank knows all of A."""
        comm, machine, dtype = self._comm, self._machine, self._dtype
        counts = comm.row_counts(m)
        starts = np.cumsum((0, *counts))
        seed = 1000 * (1 + number)
        whole = self._alone.empty((m, k), dtype)
        for rank, rows in enumerate(counts):
            if rows:
                block = self._normal(seed + rank, (rows, k))
                machine.copy(whole[starts[rank] : starts[rank + 1]], block)
        own = comm.empty((counts[comm.rank], k), dtype)
        machine.copy(own, whole[comm.rows(m)])
        b = self._normal(seed + comm.size + comm.rank, (k, n))
        return Operands(own, whole, b, machine.empty((m, n), dtype), counts)

    def _normal(self, seed: int, shape: tuple[int, int]) -> Any:
        return normal(self._numpy, self._dtype, seed, shape)

    def _sample(self, one: Operands) -> _Sample:
        """Return what to look at: rows of every rank, at its borders too, and some columns."""
        (m, n), borders = one.out.shape, np.cumsum(one.row_counts)
        rows = self._numpy.asarray(_some(m, _SAMPLE[0], [*borders, *(borders - 1)]))
        columns = self._numpy.asarray(_some(n, _SAMPLE[1], []))
        every = slice(None)
        a, b = self._picked(one.whole, rows, every), self._picked(one.b, every, columns)
        return _Sample(rows, columns, reference.allgather_gemm([a], b))

    def _picked(self, array: Any, rows: Any, columns: Any) -> np.ndarray:
        bits = array.view(self._bits)  # not every CuPy indexes every dtype
        return self._machine.asnumpy(bits[rows][:, columns]).view(self._dtype)

    def _checked(self, call: Call, out: Any, sample: _Sample) -> Call:
        """Return a call whose result is right, and which leaves its work to the device.

        Error otherwise; not before all is done that the other ranks may wait for.
        """
        self._machine.fill(out, np.nan)
        fault = self._fault(self._numpy.asarray(call(0)), sample)
        call(1)
        queued = timing.is_queued(self._clock, lambda: call(2))
        if fault:
            raise Error(f"wrong result: {fault}")
        if not queued:
            raise Error("waits for the GPU, so it has no device time of its own")
        return call

    def _fault(self, result: Any, sample: _Sample) -> str:
        """Return what is wrong with a result, if something is."""
        unwritten = np.array(np.nan, self._dtype).view(self._bits).item()
        if (result.view(self._bits) == unwritten).any():
            return "some of it is not written, or is not a number"
        error = sample.expected.check(
            self._picked(result[sample.rows], slice(None), sample.columns)
        )
        return f"an error is {error:.3g} times its bound" if error > 1 else ""

    # --- the host ---------------------------------------------------------------------------------

    def _host_cost(self) -> dict[str, float]:
        """Return what a warm call with `out` costs the host, in microseconds, for any shape."""
        comm, (rows, k, n) = self._comm, _SMALL
        one = self._operands(comm.size * rows, k, n, 0)
        a, b, out = one.own, one.b, one.out
        with AllGatherGemm(a, b, comm=comm) as step:
            calls = {
                "class": lambda: step(a, b, out=out),
                "function": lambda: allgather_gemm(a, b, comm=comm, out=out),
            }
            return {name: timing.host_us(comm, self._clock, call) for name, call in calls.items()}


def _some(extent: int, most: int, wanted: Sequence[int]) -> np.ndarray:
    """Return some indices below `extent` in order: the first, the last, the wanted, random ones."""
    random = np.random.default_rng(extent).integers(0, extent, most)
    chosen = np.unique([0, extent - 1, *wanted, *random])
    return chosen[(0 <= chosen) & (chosen < extent)]
