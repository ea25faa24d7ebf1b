"""`gemm_reduce_scatter` and `gemm_allreduce` beside cuBLAS, NCCL and their rivals."""

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from .. import reference
from ..communicator import runtime_of
from ..operators.gemm_allreduce import GemmAllReduce, gemm_allreduce
from ..operators.gemm_reduce_scatter import GemmReduceScatter, gemm_reduce_scatter
from . import baselines
from .baselines import GemmOperands, available
from .operator import OperatorBench, Sample, Shape, Work

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
    whole : bool
        Every rank gets all rows.
    """

    whole: ClassVar[bool]
    choices = "tile", "movers"
    shapes, quick_shapes = SHAPES, QUICK_SHAPES

    def _small(self, ranks: int) -> Shape:
        return 128, 64, 64

    def _communication(self) -> Any:
        return baselines.reduction_for(self._comm, self.whole)

    def _compute(self, sets: Sequence[GemmOperands]) -> Work:
        return lambda one: self._gemm(*one.alike, one.made)

    def _unfused(self, sets: Sequence[GemmOperands]) -> Work:
        reduce = available(self._library)

        def run(one: GemmOperands) -> Any:
            reduce(self._gemm(*one.own, one.made), one.out, one.row_counts)
            return one.out

        return run

    def _bytes_in(self, one: GemmOperands, shape: Shape) -> int:
        counts, n = one.row_counts, shape[2]
        partials = ((len(counts) - 1) * rows for rows in counts)
        sums = ((sum(counts) - rows) * self.whole for rows in counts)
        return max(map(sum, zip(partials, sums, strict=True))) * n * self._dtype.itemsize

    def operands(self, m: int, k: int, n: int, number: int) -> GemmOperands:
        """Return random operands; every rank can make those of all."""
        machine, counts = self._machine, self._comm.row_counts(m)
        own = self._terms(m, k, n, self._comm.rank, number)
        out = machine.empty((m if self.whole else counts[self._comm.rank], n), self._dtype)
        product = machine.empty((m, n), self._dtype)
        return GemmOperands(own=own, out=out, alike=own, made=product, row_counts=counts)

    def _terms(self, m: int, k: int, n: int, rank: int, number: int) -> tuple[Any, Any]:
        seed = 1000 * (1 + number) + 2 * rank
        return self._normal(seed, (m, k)), self._normal(seed + 1, (k, n))

    def _samples(self, one: GemmOperands) -> dict[str, Sample]:
        """Return what to look at of this rank's product, of the sum, and of that of libraries.

        They may round to the type of the operands after every addition.
        """
        comm, (m, n), (a, b) = self._comm, one.made.shape, one.own
        starts, every, k = np.cumsum((0, *one.row_counts)), slice(None), a.shape[1]
        rows, columns = self._some(one.made, starts)
        a, b = self._picked(a, rows, every), self._picked(b, every, columns)
        own = Sample(one.made, rows, columns, reference.allgather_gemm([a], b))

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
        return {
            "compute_ms": own,
            "engine_ms": own,
            "fused_ms": Sample(one.out, rows, columns, sums),
            "unfused_ms": Sample(one.out, rows, columns, rough),
        }


class GemmReduceScatterBench(ReductionBench):
    """`gemm_reduce_scatter`."""

    operator = "gemm_reduce_scatter"
    step_type, function, whole = GemmReduceScatter, gemm_reduce_scatter, False


class GemmAllReduceBench(ReductionBench):
    """`gemm_allreduce`."""

    operator = "gemm_allreduce"
    step_type, function, whole = GemmAllReduce, gemm_allreduce, True
    shapes, quick_shapes = ALLREDUCE_SHAPES, QUICK_ALLREDUCE_SHAPES
