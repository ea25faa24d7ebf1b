"""`gemm_reduce_scatter` and `gemm_allreduce` beside cuBLAS, NCCL and their rivals."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import numpy as np

from .. import reference
from ..communicator import runtime_of
from ..operators.gemm_allreduce import GemmAllReduce, gemm_allreduce
from ..operators.gemm_reduce_scatter import GemmReduceScatter, gemm_reduce_scatter
from . import baselines
from .baselines import Operands
from .operator import OperatorBench, Sample, Shape, Way

_SMALL = 128, 64, 64  # M, K of a rank, N

_SQUARES = tuple((m, m // 4, m) for m in (4096, 8192, 16384, 32768))
_LANGUAGE_MODELS = ((512, 7168, 8192), (2048, 7168, 8192), (8192, 7168, 8192))
_FEW_ROWS = tuple((m, 2048, 8192) for m in (16, 64, 256, 1024))
_ODD = ((4100, 1000, 4104), (1023, 77, 129))
_HOST = ((96, 40, 80), (101, 19, 77))
SHAPES = {"cuda": _SQUARES + _LANGUAGE_MODELS + _ODD, "host": _HOST}
QUICK_SHAPES = {"cuda": (*_SQUARES[:2], _ODD[0]), "host": _HOST[:1]}
ALLREDUCE_SHAPES = {"cuda": _SQUARES + _FEW_ROWS + _ODD, "host": _HOST}
QUICK_ALLREDUCE_SHAPES = {"cuda": (*QUICK_SHAPES["cuda"], _FEW_ROWS[0]), "host": _HOST[:1]}


class ReductionBench(OperatorBench):
    """What both have in common: M and N are those of the sum, K is that of each rank.

    Attributes
    ----------
    step_type : type
        The operator's class.
    function : callable
    whole : bool
        Every rank gets all rows.
    """

    step_type: ClassVar[type]
    function: ClassVar[Callable[..., Any]]
    whole: ClassVar[bool]
    shapes, quick_shapes = SHAPES, QUICK_SHAPES

    def _communication(self) -> Any:
        return baselines.reduction_for(self._comm, self.whole)

    def _small_calls(self) -> dict[str, Callable[[], Any]]:
        one = self._operands(*_SMALL, 0)
        a, b, out = one.own, one.b, one.out
        step, function = self.step_type(a, b, comm=self._comm), type(self).function
        return {
            "class": lambda: step(a, b, out=out),
            "function": lambda: function(a, b, comm=self._comm, out=out),
        }

    @contextlib.contextmanager
    def _steps(self, one: Operands) -> Iterator[tuple[Any, Any]]:
        with (
            self.step_type(one.own, one.b, comm=self._comm) as fused,
            self.step_type(one.own, one.b, comm=self._alone) as engine,
        ):
            yield fused, engine

    def _ways(self, sets: Sequence[Operands], fused: Any, engine: Any) -> dict[str, Way]:
        own, summed, roughly = self._samples(sets[0])

        def unfused(one: Operands) -> Any:
            self._gemm(one.own, one.b, one.product)
            self._library(one.product, one.out, one.row_counts)
            return one.out

        runs = {
            "compute_ms": (lambda one: self._gemm(one.own, one.b, one.product), own),
            "engine_ms": (lambda one: engine(one.own, one.b, out=one.product), own),
            "fused_ms": (lambda one: fused(one.own, one.b, out=one.out), summed),
            "unfused_ms": (unfused, roughly),
        }
        ways = {name: Way(self._in_turn(sets, run), sample) for name, (run, sample) in runs.items()}
        if isinstance(self._library, str):
            ways["unfused_ms"] = Way(self._library, roughly)
        return ways

    def _rivals_sample(self, ways: dict[str, Way]) -> Sample:
        return ways["unfused_ms"].sample

    def _bytes_in(self, one: Operands, shape: Shape) -> int:
        counts, n = one.row_counts, shape[2]
        partials = ((len(counts) - 1) * rows for rows in counts)
        sums = ((sum(counts) - rows) * self.whole for rows in counts)
        return max(map(sum, zip(partials, sums, strict=True))) * n * self._dtype.itemsize

    def _operands(self, m: int, k: int, n: int, number: int) -> Operands:
        """Return random operands; every rank can make those of all."""
        machine, counts = self._machine, self._comm.row_counts(m)
        a, b = self._terms(m, k, n, self._comm.rank, number)
        out = machine.empty((m if self.whole else counts[self._comm.rank], n), self._dtype)
        return Operands(a, None, b, out, counts, machine.empty((m, n), self._dtype))

    def _terms(self, m: int, k: int, n: int, rank: int, number: int) -> tuple[Any, Any]:
        seed = 1000 * (1 + number) + 2 * rank
        return self._normal(seed, (m, k)), self._normal(seed + 1, (k, n))

    def _samples(self, one: Operands) -> tuple[Sample, Sample, Sample]:
        """Return what to look at of this rank's product, of the sum, and of that of libraries.

        They may round to the type of the operands after every addition.
        """
        comm, (m, n), k = self._comm, one.product.shape, one.own.shape[1]
        starts, every = np.cumsum((0, *one.row_counts)), slice(None)
        rows, columns = self._some(one.product, starts)
        a, b = self._picked(one.own, rows, every), self._picked(one.b, every, columns)
        own = Sample(one.product, rows, columns, reference.allgather_gemm([a], b))

        first = 0 if self.whole else starts[comm.rank]
        rows, columns = self._some(one.out, starts if self.whole else [])
        terms = [self._terms(m, k, n, rank, 0) for rank in range(comm.size)]
        a_blocks = [self._picked(a, rows + first, every) for a, _ in terms]
        b_blocks = [self._picked(b, every, columns) for _, b in terms]
        # How many of these rows every rank owns.
        counts = np.diff(np.searchsorted(self._machine.asnumpy(rows) + first, starts))
        nodes = runtime_of(comm).topology.sizes
        parts = [
            reference.gemm_reduce_scatter(a_blocks, b_blocks, counts.tolist(), rank, nodes=nodes)
            for rank in range(comm.size)
        ]
        value, bound = (np.concatenate([getattr(p, x) for p in parts]) for x in ("value", "bound"))
        sums = reference.Expected(value, bound, self._dtype)
        partials = (
            abs(a.astype(np.float64) @ b.astype(np.float64))
            for a, b in zip(a_blocks, b_blocks, strict=True)
        )
        steps = comm.size * reference.unit_roundoff(self._dtype) * sum(partials)
        rough = reference.Expected(value, bound + steps, self._dtype)
        return own, Sample(one.out, rows, columns, sums), Sample(one.out, rows, columns, rough)


class GemmReduceScatterBench(ReductionBench):
    """`gemm_reduce_scatter`."""

    operator = "gemm_reduce_scatter"
    step_type, function, whole = GemmReduceScatter, gemm_reduce_scatter, False


class GemmAllReduceBench(ReductionBench):
    """`gemm_allreduce`."""

    operator = "gemm_allreduce"
    step_type, function, whole = GemmAllReduce, gemm_allreduce, True
    shapes, quick_shapes = ALLREDUCE_SHAPES, QUICK_ALLREDUCE_SHAPES
