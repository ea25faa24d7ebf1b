"""`allgather_gemm` beside cuBLAS, NCCL and its rivals."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from .. import reference
from ..operators.allgather_gemm import AllGatherGemm, allgather_gemm
from . import baselines
from .baselines import GemmOperands, available
from .operator import OperatorBench, Sample, Shape, Work

_SQUARES = tuple((m, m, m // 4) for m in (4096, 8192, 16384, 32768))
_LANGUAGE_MODELS = ((512, 8192, 7168), (2048, 8192, 7168), (8192, 8192, 7168), (16384, 5120, 3456))
_FEW_ROWS = ((16, 2048, 8192), (64, 8192, 7168), (256, 8192, 7168))
_ODD = ((4100, 4104, 1000), (4224, 4160, 1024), (1023, 129, 77))
_HOST = ((96, 80, 40), (101, 77, 19))
SHAPES = {"cuda": _SQUARES + _LANGUAGE_MODELS + _FEW_ROWS + _ODD, "host": _HOST}
QUICK_SHAPES = {"cuda": (*_SQUARES[:2], _ODD[0]), "host": _HOST[:1]}


class AllGatherGemmBench(OperatorBench):
    """`allgather_gemm`: M counts the rows of all ranks, N the columns of each rank's B."""

    operator = "allgather_gemm"
    step_type, function = AllGatherGemm, allgather_gemm
    shapes, quick_shapes = SHAPES, QUICK_SHAPES

    def _small(self, ranks: int) -> Shape:
        return 32 * ranks, 64, 64

    def _communication(self) -> Any:
        return baselines.gather_for(self._comm)

    def _compute(self, sets: Sequence[GemmOperands]) -> Work:
        return lambda one: self._gemm(*one.alike, one.made)

    def _unfused(self, sets: Sequence[GemmOperands]) -> Work:
        gather, (whole, _) = available(self._library), sets[0].alike
        gathered = self._machine.empty(whole.shape, whole.dtype)

        def run(one: GemmOperands) -> Any:
            a, b = one.own
            gather(a, gathered, one.row_counts)
            return self._gemm(gathered, b, one.out)

        return run

    def _bytes_in(self, one: GemmOperands, shape: Shape) -> int:
        return (sum(one.row_counts) - min(one.row_counts)) * shape[1] * self._dtype.itemsize

    def operands(self, m: int, k: int, n: int, number: int) -> GemmOperands:
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
        out = machine.empty((m, n), dtype)
        return GemmOperands(
            own=(own, b),
            out=out,
            asked={"row_counts": counts},
            alike=(whole, b),
            made=out,
            row_counts=counts,
        )

    def _samples(self, one: GemmOperands) -> dict[str, Sample]:
        """Return what to look at: rows of every rank, at its borders too, and some columns."""
        rows, columns = self._some(one.out, np.cumsum(one.row_counts))
        (a, b), every = one.alike, slice(None)
        a, b = self._picked(a, rows, every), self._picked(b, every, columns)
        sample = Sample(one.out, rows, columns, reference.allgather_gemm([a], b))
        return dict.fromkeys(("compute_ms", "engine_ms", "fused_ms", "unfused_ms"), sample)
