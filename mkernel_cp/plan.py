"""Plans: every choice that is made for an operator, its shape, dtype and world, before it runs.

Pure Python: a plan can be made, printed and tested without a device or a compiler.
"""

import json
import math
import operator
import os
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import ml_dtypes
import numpy as np

from .memory import round_up

DTYPES = tuple(map(np.dtype, (ml_dtypes.bfloat16, np.float16, np.float32, np.float64)))
_NAMES = ", ".join(dtype.name for dtype in DTYPES)
_LINE_ALIGNMENT = 128
# Copying by registers, so many thread blocks fill a link.
_MOVERS = 20
_CHUNK_BYTES = 1 << 16


@dataclass(frozen=True)
class Options:
    """Choices of a plan that a caller makes; None leaves one to the plan.

    Parameters
    ----------
    split : tuple of int, optional
        (movers, compute): agents per role. Without movers compute agents do their work too.
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
                least = (0, 1) if name == "split" else (1,) * length
                if len(value) != length or not all(
                    low <= extent <= 1024 for low, extent in zip(least, value, strict=True)
                ):
                    raise ValueError(
                        f"Options({name}={value}): use {length} numbers from {least} to 1024"
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
    stages: int = 3

    engine: ClassVar[str] = "portable"
    cluster: ClassVar[int] = 1

    def shared_bytes(self, dtype: np.dtype, out_dtype: np.dtype) -> int:
        """Return the shared memory of a thread block: the panels, or in their place the result."""
        rows, columns, k = self.tile
        ring = self.stages * (rows + columns) * k * dtype.itemsize
        return max(ring, rows * (columns + 8) * out_dtype.itemsize)

    def defines(self, dtype: np.dtype) -> dict[str, int]:
        """Return the macros that say so; none for what the header takes by itself."""
        if self == default_tile(dtype):
            return {}
        names = "MK_TILE_ROWS", "MK_TILE_COLUMNS", "MK_TILE_K", "MK_STAGES"
        return dict(zip(names, (*self.tile, self.stages), strict=True))


def default_tile(dtype: np.dtype) -> PortableTile:
    """Return what engine/portable.cuh takes by itself."""
    return PortableTile((128, 128 if dtype.itemsize == 8 else 256, 128 // dtype.itemsize))


def portable_tile(
    dtype: np.dtype, out_dtype: np.dtype, options: Options, shared_bytes: int
) -> PortableTile:
    """Choose the tile of engine/portable.cuh for a GPU with so much shared memory per block."""
    if options.tile is None:
        k = 128 // dtype.itemsize
        smaller = (PortableTile((rows, 128, k)) for rows in (128, 64, 32))
        candidates = [default_tile(dtype), *smaller]
        fits = (t for t in candidates if t.shared_bytes(dtype, out_dtype) <= shared_bytes)
        return next(fits, candidates[-1])
    tile = PortableTile(options.tile)
    least = max(128 // dtype.itemsize, 32), max(128 // dtype.itemsize, 64), 128 // dtype.itemsize
    most = 4096 // dtype.itemsize
    powers = all(extent & (extent - 1) == 0 for extent in tile.tile)
    need = tile.shared_bytes(dtype, out_dtype)
    if not powers or any(
        not low <= extent <= most for extent, low in zip(tile.tile, least, strict=True)
    ):
        raise ValueError(
            f"Options(tile={tile.tile}): a GPU needs powers of two, at least {least} and at most "
            f"{most}, for {dtype.name}"
        )
    if need > shared_bytes:
        raise ValueError(
            f"Options(tile={tile.tile}) takes {need} bytes of shared memory, the GPU has "
            f"{shared_bytes} per block: use a smaller one"
        )
    return tile


@dataclass(frozen=True)
class HopperTile:
    """What engine/hopper.cuh is compiled with.

    Attributes
    ----------
    tile : tuple of int
        (rows, columns, k): what a cluster computes at a time, and what a gate lets in.
    cluster : int
        Blocks that share a tile.
    stages : int
        Panels of 64 of k in flight.
    strips : int
        Pieces of the result that each half of a block's rows keeps while they are stored.
    courier_bytes : int
        Shared memory for what a block brings from peers meanwhile.
    """

    tile: tuple[int, int, int]
    cluster: int
    stages: int
    strips: int
    courier_bytes: int

    engine: ClassVar[str] = "hopper"

    def shared_bytes(self, dtype: np.dtype, out_dtype: np.dtype) -> int:
        """Return the shared memory of a thread block."""
        return _hopper_bytes(self.tile, self.cluster, self.stages, self.strips) + self.courier_bytes

    def defines(self, dtype: np.dtype) -> dict[str, int]:
        """Return the macros that say so."""
        rows, columns, _ = self.tile
        return {
            "MK_ENGINE_HOPPER": 1,
            "MK_THREADS": 384,
            "MK_TILE_ROWS": rows,
            "MK_TILE_COLUMNS": columns,
            "MK_CLUSTER": self.cluster,
            "MK_STAGES": self.stages,
            "MK_STRIPS": self.strips,
        }

    def boxes(
        self, dtype: np.dtype, a_by_columns: bool, b_by_columns: bool
    ) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return what tensor copies bring of A and of B at a time: (of a line, lines)."""
        rows, columns, _ = self.tile
        run = 128 // dtype.itemsize
        a_lines = run if a_by_columns else rows // self.cluster
        b_lines = columns // self.cluster if b_by_columns else run
        return (run, a_lines), (run, b_lines)


_HOPPER_GATE = 512
# Rows and columns of a tile, blocks that share it, and how fast it is, as a part of the fastest.
_HOPPER_TILES = (
    (128, 256, 1, 1.0),
    (256, 256, 2, 1.01),
    (128, 192, 1, 0.96),
    (128, 128, 1, 0.9),
    (128, 64, 1, 0.6),
)
_HOPPER_TILE_K = 700  # of k, what the start and the end of a tile take as long as


def _hopper_bytes(tile: tuple[int, ...], cluster: int, stages: int, strips: int) -> int:
    rows, columns = tile[0] // cluster, tile[1]
    return stages * (rows + columns) * 128 + 2 * strips * 8192 + 1024


def _hopper_tile(
    rows: int, columns: int, k: int, cluster: int, ranks: int, shared_bytes: int
) -> HopperTile:
    courier = 16 * 1024 + 512 if ranks > 1 else 0
    strips = 1 if courier and (rows // cluster + columns) > 320 else 2
    room = shared_bytes - courier - _hopper_bytes((rows, columns), cluster, 0, strips)
    stages = min(8, room // ((rows // cluster + columns) * 128))
    return HopperTile((rows, columns, k), cluster, stages, strips, courier)


def hopper_tile(
    row_counts: tuple[int, ...], n: int, options: Options, gpu: Gpu, k: int
) -> HopperTile | None:
    """Choose the tile of engine/hopper.cuh; None if the options ask for one that it cannot take."""
    ranks = len(row_counts)
    if options.tile is not None:
        rows, columns, gate = options.tile
        found = [t for t in _HOPPER_TILES if (rows, columns) == t[:2] and gate % 64 == 0]
        return _hopper_tile(*options.tile, found[0][2], ranks, gpu.shared_bytes) if found else None

    def cost(candidate: tuple[int, int, int, float]) -> float:
        rows, columns, cluster, rate = candidate
        tiles = sum(math.ceil(count / rows) for count in row_counts) * math.ceil(n / columns)
        waves = math.ceil(tiles / (gpu.processors // cluster))
        return waves * rows / cluster * columns * (k + _HOPPER_TILE_K) / rate

    rows, columns, cluster, _ = min(_HOPPER_TILES, key=cost)
    return _hopper_tile(rows, columns, _HOPPER_GATE, cluster, ranks, gpu.shared_bytes)


def gpu_tile(
    row_counts: tuple[int, ...],
    n: int,
    k: int,
    dtype: np.dtype,
    out_dtype: np.dtype,
    options: Options,
    gpu: Gpu,
) -> PortableTile | HopperTile:
    """Choose the engine of a GPU and its tile."""
    tile = None
    if gpu.arch == "sm_90a" and dtype.itemsize == 2:
        tile = hopper_tile(row_counts, n, options, gpu, k)
    return tile or portable_tile(dtype, out_dtype, options, gpu.shared_bytes)


class PlanFile:
    """What all plans have: they can be written down, and read by another process."""

    operator: ClassVar[str]

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON has it: dtypes by name, lists for tuples."""

        def plain(value: Any) -> Any:
            if isinstance(value, np.dtype):
                return value.name
            return list(value) if isinstance(value, tuple) else value

        return {field.name: plain(getattr(self, field.name)) for field in fields(self)}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a JSON file."""
        text = json.dumps({"operator": self.operator, **self.to_json()}, indent=2)
        with open(path, "w", encoding="utf-8") as file:
            file.write(text + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "PlanFile":
        """Return the plan that a JSON file holds; ValueError if it holds no such plan.

        Its `options` make an operator choose the same again, which then gives the same bits.

        Examples
        --------
        >>> options = AllGatherGemmPlan.load("plan.json").options
        >>> step = mk.AllGatherGemm(a, b, comm=comm, options=options)
        """

        def given(value: Any) -> Any:
            return tuple(value) if isinstance(value, list) else value

        with open(path, encoding="utf-8") as file:
            try:
                entries = json.load(file)
                name = entries.pop("operator")
                values = {key: given(value) for key, value in entries.items()}
                for key in ("dtype", "out_dtype"):
                    values[key] = np.dtype(values[key])
                if name != cls.operator:
                    raise ValueError(f"it is one of {name}")
                return cls(**values)
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise ValueError(
                    f"{os.fspath(path)} holds no plan of {cls.operator}: {error}"
                ) from None


@dataclass(frozen=True)
class AllGatherGemmPlan(PlanFile):
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
        (rows, columns, k) of what is computed at a time.
    cluster : int
        Agents that share a tile.
    chunk_bytes : int
        How much a mover was to bring at a time.
    chunk : tuple of int
        (rows, k) of what it does bring.
    phase_k : int
        So much of k comes from all ranks before more does.
    split : tuple of int
        (movers, compute): agents per role.
    shared_bytes : int
        Scratch memory of an agent.
    """

    operator: ClassVar[str] = "allgather_gemm"

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
    cluster: int
    chunk_bytes: int
    chunk: tuple[int, int]
    phase_k: int
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
        return line_pitch(self.row_counts[rank] if self.by_columns else self.k, self.dtype)

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
    def options(self) -> Options:
        """What makes an operator choose this plan again."""
        return Options(self.split, self.tile, self.chunk_bytes)

    @property
    def memory(self) -> int:
        """Bytes that this rank shares with its peers for it: landing zones and signals."""
        signals = sum(map(self.chunks, range(len(self.row_counts))))
        return self.arena_offsets()[-1] + 8 * signals

    def explain(self) -> str:
        """Return the plan in words, one choice a line."""
        movers, compute = self.split
        who = f"{movers} movers" if movers else "a part of each compute agent"
        clusters = f" in clusters of {self.cluster}" if self.cluster > 1 else ""
        kib = self.chunk[0] * self.chunk[1] * self.dtype.itemsize / 1024
        return "\n".join(
            (
                f"allgather_gemm: ({self.m}, {self.k}) @ ({self.k}, {self.n}) "
                f"{self.dtype.name} -> {self.out_dtype.name}, rank {self.rank} of "
                f"{len(self.row_counts)}, rows {list(self.row_counts)}",
                f"target {self.target}, engine {self.engine}: tile {self.tile}, "
                f"{compute} compute agents{clusters}",
                f"A travels in {'F' if self.by_columns else 'C'} order, "
                f"{self.bytes_from_peers} bytes to this rank in chunks of {self.chunk} "
                f"({kib:g} KiB) by {who}",
            )
        )


def line_pitch(run: int, dtype: np.dtype) -> int:
    """Return the bytes from line to line that every engine reads well."""
    return round_up(run * dtype.itemsize, _LINE_ALIGNMENT)


def arena_offsets(
    row_counts: tuple[int, ...], k: int, dtype: np.dtype, by_columns: bool
) -> tuple[int, ...]:
    """Return where each rank's rows of A start in an arena, in bytes, and the end of the last."""
    offsets = [0]
    for rows in row_counts:
        lines, run = (k, rows) if by_columns else (rows, k)
        size = lines * line_pitch(run, dtype)
        offsets.append(offsets[-1] + round_up(size, _LINE_ALIGNMENT))
    return tuple(offsets)


def chunk_shape(
    row_counts: tuple[int, ...], k: int, dtype: np.dtype, chunk_bytes: int | None
) -> tuple[int, int]:
    """Return (rows, k) of a chunk; the same on all ranks, so only from what they agree on.

    Chunks start at multiples of 16 bytes of a line, whichever way lines run.
    """
    unit = 16 // dtype.itemsize
    elements = (chunk_bytes or _CHUNK_BYTES) // dtype.itemsize

    def whole(extent: int, most: int) -> int:
        return max(1, min(extent, max(unit, most // unit * unit)))

    rows = whole(max(row_counts), min(32, elements // unit))
    return rows, whole(k, elements // rows)


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
        chosen = gpu_tile(row_counts, n, k, dtype, out_dtype, options, gpu)
        tile, shared_bytes = chosen.tile, chosen.shared_bytes(dtype, out_dtype)
    tiles = sum(math.ceil(rows / tile[0]) for rows in row_counts) * math.ceil(n / tile[1])
    if options.split:
        movers, compute = options.split
    elif gpu is not None and chosen.engine == "hopper":
        # A warp of each block moves.
        clusters = min(capacity // chosen.cluster, max(1, tiles))
        movers, compute = 0, clusters * chosen.cluster
    elif gpu is None:
        cores = len(os.sched_getaffinity(0))
        movers, compute = 1, max(1, min(2, cores // ranks, tiles))
    else:
        chunks = math.ceil(max(row_counts) / chunk[0]) * math.ceil(k / chunk[1])
        movers = max(1, min(_MOVERS, capacity // 2, chunks))
        compute = max(1, min(capacity - (movers if ranks > 1 else 0), tiles))
    split = (0 if ranks == 1 else movers, compute)
    if gpu is not None and (split[0] % chosen.cluster or compute % chosen.cluster):
        raise ValueError(
            f"Options(split={options.split}): blocks come in clusters of {chosen.cluster}; use "
            "multiples of that"
        )
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
        engine=chosen.engine if gpu else "host",
        tile=tile,
        cluster=chosen.cluster if gpu else 1,
        chunk_bytes=options.chunk_bytes or _CHUNK_BYTES,
        chunk=chunk,
        phase_k=_phase_k(k, chunk[1], tiles * (chosen.cluster if gpu else 1) <= compute),
        split=split,
        shared_bytes=shared_bytes,
    )


def _phase_k(k: int, chunk_k: int, at_once: bool) -> int:
    """Return how much of k is to come from all ranks before more does.

    Where all tiles are computed at once, none needs the rows of a rank before those of another, and
    all get on with each piece of k; else tiles of one rank come before those of the next.
    """
    return chunk_k if at_once else round_up(max(1, k), chunk_k)


def _host_shared_bytes(tile: tuple[int, ...], dtype: np.dtype, out_dtype: np.dtype) -> int:
    """Return what gemm() of engine/host.cuh carves up."""
    rows, columns, k = tile
    accumulators = rows * columns + rows * k + k * columns
    return accumulators * max(4, dtype.itemsize) + rows * columns * out_dtype.itemsize
