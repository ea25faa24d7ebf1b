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
# Copying by registers, so many thread blocks fill a link.
_MOVERS = 20


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
                try:
                    value = tuple(operator.index(extent) for extent in value)
                except TypeError:
                    raise TypeError(f"Options({name}={value!r}): use {length} integers") from None
                if len(value) != length or not all(1 <= extent <= 1024 for extent in value):
                    raise ValueError(
                        f"Options({name}={value}): use {length} numbers from 1 to 1024"
                    )
                object.__setattr__(self, name, value)
        if self.chunk_bytes is not None:
            if not isinstance(self.chunk_bytes, int | np.integer):
                raise TypeError(f"Options(chunk_bytes={self.chunk_bytes!r}): use an integer")
            if self.chunk_bytes < 1:
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


def type_defines(dtype: np.dtype, out_dtype: np.dtype) -> dict[str, str]:
    """Return the macros that say a kernel's dtypes."""
    return {"MK_TYPE": cpp_type(dtype), "MK_OUT_TYPE": cpp_type(out_dtype)}


@dataclass(frozen=True)
class Gpu:
    """What a plan has to know of a GPU.

    Attributes
    ----------
    arch : str
        What kernels are compiled for, as 'sm_80'.
    processors : int
        Multiprocessors.
    shared_bytes : int
        The most shared memory of a thread block.
    """

    arch: str
    processors: int
    shared_bytes: int


# What engine/portable.cuh has in shared memory besides panels: strips of the result, one for each
# of 8 warps, and barriers and the like.
_STRIP_BYTES = 8 * 16 * (128 + 16)
_CONTROL_BYTES = 1024
# The shortest and the longest line of a panel.
_LINE_BYTES = 128, 1024


@dataclass(frozen=True)
class PortableTile:
    """What engine/portable.cuh is compiled with.

    Attributes
    ----------
    tile : tuple of int
        (rows, columns, k).
    stages : int
        Panels of k in flight.
    """

    tile: tuple[int, int, int]
    stages: int

    def shared_bytes(self, dtype: np.dtype) -> int:
        """Return the shared memory of a thread block."""
        rows, columns, k = self.tile
        ring = self.stages * (rows + columns) * k * dtype.itemsize
        return ring + _STRIP_BYTES + _CONTROL_BYTES

    def defines(self, dtype: np.dtype) -> dict[str, int]:
        """Return the macros that say so; none for what the header takes by itself."""
        if self == default_tile(dtype):
            return {}
        names = "MK_TILE_ROWS", "MK_TILE_COLUMNS", "MK_TILE_K", "MK_STAGES"
        return dict(zip(names, (*self.tile, self.stages), strict=True))


def default_tile(dtype: np.dtype) -> PortableTile:
    """Return what engine/portable.cuh takes by itself."""
    if dtype.itemsize == 2:
        return PortableTile((128, 256, 128), 2)
    return PortableTile((128, 128 if dtype.itemsize == 8 else 256, 128 // dtype.itemsize), 4)


def portable_tile(dtype: np.dtype, options: Options, shared_bytes: int) -> PortableTile:
    """Choose the tile of engine/portable.cuh for a GPU with so much shared memory per block.

    A large tile goes before many stages, of which two will do.
    """
    shortest, longest = (size // dtype.itemsize for size in _LINE_BYTES)
    default = default_tile(dtype)
    if options.tile is None:
        tiles = [(*default.tile[:2], shortest), *((rows, 128, shortest) for rows in (128, 64, 32))]
    else:
        tiles = [options.tile]
    candidates = [PortableTile(tile, stages) for tile in tiles for stages in (4, 3, 2)]
    if options.tile in (None, default.tile):
        candidates.insert(0, default)
    fits = (choice for choice in candidates if choice.shared_bytes(dtype) <= shared_bytes)
    chosen = next(fits, candidates[-1])
    least = max(shortest, 32), max(shortest, 64), shortest
    powers = all(extent & (extent - 1) == 0 for extent in chosen.tile)
    need = chosen.shared_bytes(dtype)
    if not powers or any(
        not low <= extent <= longest for extent, low in zip(chosen.tile, least, strict=True)
    ):
        raise ValueError(
            f"Options(tile={chosen.tile}): a GPU needs powers of two, at least {least} and at most "
            f"{longest}, for {dtype.name}"
        )
    if need > shared_bytes:
        raise ValueError(
            f"Options(tile={chosen.tile}) takes {need} bytes of shared memory, the GPU has "
            f"{shared_bytes} per block: use a smaller one"
        )
    return chosen


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
    shared_bytes : int
        Scratch memory of an agent.
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
    shared_bytes: int

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
    gpu: Gpu | None = None,
    capacity: int = 0,
) -> AllGatherGemmPlan:
    """Choose a plan: for a GPU that runs `capacity` agents at a time, or for the host target.

    On the host target, two compute agents at most: it is for proving the protocol, and more threads
    than cores only make ranks wait for each other. On a GPU every multiprocessor gets an agent, as
    far as there is work for it.
    """
    ranks = len(row_counts)
    chunk = chunk_shape(row_counts, k, dtype, options.chunk_bytes)
    if gpu is None:
        tile = options.tile or (64, 64, 64)
        tile = tuple(
            min(extent, max(1, limit))
            for extent, limit in zip(tile, (max(row_counts), n, k), strict=True)
        )
        shared_bytes = _host_shared_bytes(tile, dtype, out_dtype)
    else:
        portable = portable_tile(dtype, options, gpu.shared_bytes)
        tile, shared_bytes = portable.tile, portable.shared_bytes(dtype)
    tiles = sum(math.ceil(rows / tile[0]) for rows in row_counts) * math.ceil(n / tile[1])
    if options.split:
        movers, compute = options.split
    elif gpu is None:
        cores = len(os.sched_getaffinity(0))
        movers, compute = 1, max(1, min(2, cores // ranks, tiles))
    else:
        chunks = math.ceil(max(row_counts) / chunk[0]) * math.ceil(k / chunk[1])
        movers = max(1, min(_MOVERS, capacity // 2, chunks))
        compute = max(1, min(capacity - (movers if ranks > 1 else 0), tiles))
    split = (0 if ranks == 1 else movers, compute)
    if gpu is not None and sum(split) > capacity:
        raise ValueError(
            f"Options(split={options.split}): the GPU runs {capacity} agents at a time; use fewer"
        )
    return AllGatherGemmPlan(
        rank=rank,
        row_counts=row_counts,
        n=n,
        k=k,
        dtype=dtype,
        out_dtype=out_dtype,
        by_columns=by_columns,
        target="cuda" if gpu else "host",
        engine="portable" if gpu else "host",
        tile=tile,
        chunk=chunk,
        split=split,
        shared_bytes=shared_bytes,
    )


def _host_shared_bytes(tile: tuple[int, ...], dtype: np.dtype, out_dtype: np.dtype) -> int:
    """Return what gemm() of engine/host.cuh carves up."""
    rows, columns, k = tile
    accumulators = rows * columns + rows * k + k * columns
    return accumulators * max(4, dtype.itemsize) + rows * columns * out_dtype.itemsize
