"""Plans: every choice that is made for an operator, its shape, dtype and world, before it runs.

Pure Python: a plan can be made, printed and tested without a device or a compiler.
"""

import math
import operator
import os
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from .memory import round_up

DTYPES = tuple(map(np.dtype, (ml_dtypes.bfloat16, np.float16, np.float32, np.float64)))
_NAMES = ", ".join(dtype.name for dtype in DTYPES)
_LINE_ALIGNMENT = 64


@dataclass(frozen=True)
class Options:
    """Choices of a plan that a caller makes; None leaves one to the plan.

    Parameters
    ----------
    split : tuple of int, optional
        (movers, compute): agents per role, each at least 1.
    tile : tuple of int, optional
        (rows, columns, k) of what an agent computes at a time, each at least 1.
    chunk_bytes : int, optional
        About how much of an operand is moved at a time. All ranks must give the same.

    Examples
    --------
    >>> mk.allgather_gemm(a, b, comm=comm, options=mk.Options(split=(2, 6)))
    """

    split: tuple[int, int] | None = None
    tile: tuple[int, int, int] | None = None
    chunk_bytes: int | None = None

    def __post_init__(self) -> None:
        for name, length in (("split", 2), ("tile", 3)):
            value = getattr(self, name)
            if value is not None:
                value = tuple(operator.index(extent) for extent in value)
                if len(value) != length or not all(1 <= extent <= 1024 for extent in value):
                    raise ValueError(
                        f"Options({name}={value}): use {length} numbers from 1 to 1024"
                    )
                object.__setattr__(self, name, value)
        if self.chunk_bytes is not None and operator.index(self.chunk_bytes) < 1:
            raise ValueError(f"Options(chunk_bytes={self.chunk_bytes}): use at least 1")


def check_dtype(name: str, dtype: np.dtype) -> np.dtype:
    """Return a dtype that operators take; TypeError with the allowed ones otherwise."""
    if dtype not in DTYPES:
        raise TypeError(f"{name} has dtype {dtype}: not allowed; use one of {_NAMES}")
    return dtype


def output_dtype(dtype: np.dtype, requested: object) -> np.dtype:
    """Return the output's dtype: the operands', or float32 for 16-bit operands."""
    requested = dtype if requested is None else np.dtype(requested)
    allowed = [dtype] if dtype.itemsize > 2 else [dtype, np.dtype(np.float32)]
    if requested not in allowed:
        names = " or ".join(d.name for d in allowed)
        raise TypeError(f"dtype={requested}: not allowed for {dtype} operands; use {names}")
    return requested


def cpp_type(dtype: np.dtype) -> str:
    """Return what types.cuh calls a dtype."""
    return {"float32": "float", "float64": "double"}.get(dtype.name, dtype.name)


@dataclass(frozen=True)
class AllGatherGemmPlan:
    """The plan of `allgather_gemm` on one rank.

    Attributes
    ----------
    rank : int
    row_counts : tuple of int
        Rows of A on every rank.
    n, k : int
        Columns of this rank's B, and its rows.
    dtype, out_dtype : numpy.dtype
    by_columns : bool
        A travels in F order: all ranks hold it so.
    target, engine : str
    tile : tuple of int
        (rows, columns, k) of what an agent computes at a time.
    chunk : tuple of int
        (rows, k) of what a mover brings at a time.
    split : tuple of int
        (movers, compute): agents per role.
    """

    rank: int
    row_counts: tuple[int, ...]
    n: int
    k: int
    dtype: np.dtype
    out_dtype: np.dtype
    by_columns: bool
    target: str
    engine: str
    tile: tuple[int, int, int]
    chunk: tuple[int, int]
    split: tuple[int, int]

    @property
    def m(self) -> int:
        """Rows of A and of the result."""
        return sum(self.row_counts)

    @property
    def row_start(self) -> tuple[int, ...]:
        """The first row of every rank, and M behind the last."""
        return tuple(sum(self.row_counts[:rank]) for rank in range(len(self.row_counts) + 1))

    def chunks(self, rank: int) -> int:
        """Return in how many chunks the rows of a rank come."""
        rows, k = self.chunk
        return -(-self.row_counts[rank] // rows) * -(-self.k // k)

    def pitch(self, rank: int) -> int:
        """Return the bytes between lines of a rank's rows in the arena."""
        run = self.row_counts[rank] if self.by_columns else self.k
        return round_up(run * self.dtype.itemsize, _LINE_ALIGNMENT)

    def arena_offsets(self) -> tuple[int, ...]:
        """Where the rows of every rank lie in the arena, in bytes, and the end of the last.

        The place of this rank's own rows holds them if the caller's array is no segment's.
        """
        return arena_offsets(self.row_counts, self.k, self.dtype, self.by_columns)

    @property
    def bytes_from_peers(self) -> int:
        """Bytes that this rank pulls in one call."""
        if self.n == 0:
            return 0
        return (self.m - self.row_counts[self.rank]) * self.k * self.dtype.itemsize

    @property
    def shared_bytes(self) -> int:
        """Scratch memory of an agent: what gemm() of engine/host.cuh carves up."""
        rows, columns, k = self.tile
        accumulators = rows * columns + rows * k + k * columns
        return accumulators * max(4, self.dtype.itemsize) + rows * columns * self.out_dtype.itemsize

    def explain(self) -> str:
        """Return the plan in words, one choice a line."""
        movers, compute = self.split
        kib = self.chunk[0] * self.chunk[1] * self.dtype.itemsize / 1024
        return "\n".join(
            (
                f"allgather_gemm: ({self.m}, {self.k}) @ ({self.k}, {self.n}) "
                f"{self.dtype.name} -> {self.out_dtype.name}, rank {self.rank} of "
                f"{len(self.row_counts)}, rows {list(self.row_counts)}",
                f"target {self.target}, engine {self.engine}: tile {self.tile}, "
                f"{compute} compute agents",
                f"A travels in {'F' if self.by_columns else 'C'} order, "
                f"{self.bytes_from_peers} bytes to this rank in chunks of {self.chunk} "
                f"({kib:g} KiB), {movers} movers",
            )
        )


def arena_offsets(
    row_counts: tuple[int, ...], k: int, dtype: np.dtype, by_columns: bool
) -> tuple[int, ...]:
    """Return where each rank's rows of A start in an arena, in bytes, and the end of the last."""
    offsets = [0]
    for rows in row_counts:
        lines, run = (k, rows) if by_columns else (rows, k)
        size = lines * round_up(run * dtype.itemsize, _LINE_ALIGNMENT)
        offsets.append(offsets[-1] + round_up(size, _LINE_ALIGNMENT))
    return tuple(offsets)


def chunk_shape(
    row_counts: tuple[int, ...], k: int, dtype: np.dtype, chunk_bytes: int | None
) -> tuple[int, int]:
    """Return (rows, k) of a chunk; the same on all ranks, so only from what they agree on."""
    elements = max(1, (chunk_bytes or 1 << 18) // dtype.itemsize)
    rows = min(64, max(1, *row_counts), elements)
    return rows, max(1, min(k, elements // rows))


def plan_allgather_gemm(
    rank: int,
    row_counts: tuple[int, ...],
    n: int,
    k: int,
    dtype: np.dtype,
    out_dtype: np.dtype,
    by_columns: bool,
    options: Options,
) -> AllGatherGemmPlan:
    """Choose a plan for the host target.

    Two compute agents at most: the host target is for proving the protocol, and more threads than
    cores only make ranks wait for each other.
    """
    ranks = len(row_counts)
    tile = options.tile or (64, 64, 64)
    tile = tuple(
        min(extent, max(1, limit))
        for extent, limit in zip(tile, (max(row_counts), n, k), strict=True)
    )
    cores = len(os.sched_getaffinity(0))
    tiles = sum(math.ceil(rows / tile[0]) for rows in row_counts) * math.ceil(n / tile[1])
    movers, compute = options.split or (1, max(1, min(2, cores // ranks, tiles)))
    return AllGatherGemmPlan(
        rank=rank,
        row_counts=row_counts,
        n=n,
        k=k,
        dtype=dtype,
        out_dtype=out_dtype,
        by_columns=by_columns,
        target="host",
        engine="host",
        tile=tile,
        chunk=chunk_shape(row_counts, k, dtype, options.chunk_bytes),
        split=(0 if ranks == 1 else movers, compute),
    )
