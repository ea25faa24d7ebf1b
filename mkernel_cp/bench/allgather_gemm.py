"""`allgather_gemm` beside cuBLAS, NCCL and its rivals."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from .. import reference
from ..operators.allgather_gemm import AllGatherGemm, allgather_gemm
from . import baselines
from .baselines import Operands
from .operator import OperatorBench, Sample, Shape, Way
from .timing import Call

_SMALL = 32, 64, 64  # rows of a rank, K, N

_SQUARES = tuple((m, m, m // 4) for m in (4096, 8192, 16384, 32768))
_LANGUAGE_MODELS = ((512, 8192, 7168), (2048, 8192, 7168), (8192, 8192, 7168), (16384, 5120, 3456))
_ODD = ((4100, 4104, 1000), (4224, 4160, 1024), (1023, 129, 77))
SHAPES = {"cuda": _SQUARES + _LANGUAGE_MODELS + _ODD, "host": ((96, 80, 40), (101, 77, 19))}
QUICK_SHAPES = {"cuda": (*_SQUARES[:2], _ODD[0]), "host": SHAPES["host"][:1]}


class AllGatherGemmBench(OperatorBench):
    """`allgather_gemm`: M counts the rows of all ranks, N the columns of each rank's B."""

    operator = "allgather_gemm"
    shapes, quick_shapes = SHAPES, QUICK_SHAPES

    def _communication(self) -> Any:
        return baselines.gather_for(self._comm)

    def _small_calls(self) -> dict[str, Callable[[], Any]]:
        comm, (rows, k, n) = self._comm, _SMALL
        one = self._operands(comm.size * rows, k, n, 0)
        a, b, out = one.own, one.b, one.out
        step = AllGatherGemm(a, b, comm=comm)
        return {
            "class": lambda: step(a, b, out=out),
            "function": lambda: allgather_gemm(a, b, comm=comm, out=out),
        }

    @contextlib.contextmanager
    def _steps(self, one: Operands) -> Iterator[tuple[Any, Any]]:
        with (
            AllGatherGemm(one.own, one.b, comm=self._comm, row_counts=one.row_counts) as fused,
            AllGatherGemm(one.whole, one.b, comm=self._alone) as engine,
        ):
            yield fused, engine

    def _ways(self, sets: Sequence[Operands], fused: Any, engine: Any) -> dict[str, Way]:
        runs = {
            "compute_ms": lambda one: self._gemm(one.whole, one.b, one.out),
            "engine_ms": lambda one: engine(one.whole, one.b, out=one.out),
            "fused_ms": lambda one: fused(one.own, one.b, out=one.out),
        }
        sample = self._sample(sets[0])
        ways = {name: Way(self._in_turn(sets, run), sample) for name, run in runs.items()}
        return ways | {"unfused_ms": Way(self._unfused(sets), sample)}

    def _bytes_in(self, one: Operands, shape: Shape) -> int:
        return (sum(one.row_counts) - min(one.row_counts)) * shape[1] * self._dtype.itemsize

    def _unfused(self, sets: Sequence[Operands]) -> Callable[[], Call] | str:
        """Return what makes the call that gathers and then multiplies, or why there is none."""
        gather = self._library
        if isinstance(gather, str):
            return gather

        def prepare() -> Call:
            gathered = self._machine.empty(sets[0].whole.shape, sets[0].whole.dtype)

            def call(number: int) -> Any:
                one = sets[number % len(sets)]
                gather(one.own, gathered, one.row_counts)
                return self._gemm(gathered, one.b, one.out)

            return call

        return prepare

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

    def _sample(self, one: Operands) -> Sample:
        """Return what to look at: rows of every rank, at its borders too, and some columns."""
        rows, columns = self._some(one.out, np.cumsum(one.row_counts))
        every = slice(None)
        a, b = self._picked(one.whole, rows, every), self._picked(one.b, every, columns)
        return Sample(one.out, rows, columns, reference.allgather_gemm([a], b))
