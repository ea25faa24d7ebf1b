"""Plans: every choice that is made for an operator, its shape, dtype and world, before it runs.

Pure Python: a plan can be made, printed and tested without a device or a compiler.
"""

import json
import math
import operator
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import ml_dtypes
import numpy as np

from .memory import round_up
from .reference import accumulator_dtype
from .topology import Topology

DTYPES = tuple(map(np.dtype, (ml_dtypes.bfloat16, np.float16, np.float32, np.float64)))
_NAMES = ", ".join(dtype.name for dtype in DTYPES)
_LINE_ALIGNMENT = 128
# Copying by registers, so many thread blocks fill a link.
_MOVERS = 20
_CHUNK_BYTES, _LEAST_CHUNK_BYTES = 1 << 16, 1 << 13
_CHUNKS = 1024  # or more, if they are large
_CHUNK_LINE, _CHUNK_LINES = 2048, 32  # bytes of a line of a chunk, and at most so many lines
# Where data pass through slots of host memory: in a slot, before them, and of a word that tells
# that it is free.
SLOT_BYTES, PARCEL_BYTES, CREDIT_BYTES = 1 << 16, 64, 8


@dataclass(frozen=True)
class Options:
    """Choices of a plan that a caller makes; None leaves one to the plan.

    Parameters
    ----------
    split : tuple of int, optional
        (movers, compute): agents per role; None for compute means as many as there is room and
        work for. Without movers compute agents do their work too. Sums over ranks may have a third,
        inter-reduce: agents that add what leaves their node; nothing within one node.
    tile : tuple of int, optional
        (rows, columns, k) of what an agent computes at a time, each at least 1. On GPUs of compute
        capability 9.0, operators on experts that multiply 16-bit operands take few, which the error
        for another one lists; whether an expert's last rows make shorter tiles follows from how
        many it has, about.
    chunk_bytes : int, optional
        About how much of an operand is moved at a time. All ranks must give the same.
    transfer_dtype : data-type, optional
        Of partial sums on their way to the rank that adds them: that of the operands (default), or
        float32 for 16-bit operands. All ranks must give the same.
    tf32 : bool, optional
        Round float32 operands to 11 bits of significand as they are multiplied, which GPUs do many
        times as fast; sums stay in float32. All ranks must give the same. GPUs of compute
        capability 9.0 read `a` in C and `b` in F order for it, and copy what lies otherwise.
    sm_budget : int, optional
        How many multiprocessors of a GPU a call takes at most, so that other kernels have the rest.
        Nothing on the host target.

    Examples
    --------
    >>> mk.allgather_gemm(a, b, comm=comm, options=mk.Options(split=(2, 6)))
    """

    split: tuple[int, int | None] | tuple[int, int | None, int] | None = None
    tile: tuple[int, int, int] | None = None
    chunk_bytes: int | None = None
    transfer_dtype: Any = None
    tf32: bool = False
    sm_budget: int | None = None

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "tf32", flag("tf32", self.tf32))
            if self.transfer_dtype is not None:
                transfer_dtype = asked_dtype("transfer_dtype", self.transfer_dtype)
                object.__setattr__(self, "transfer_dtype", transfer_dtype)
        except TypeError as error:
            raise TypeError(f"Options: {error}") from None
        for name, lengths, least in (("split", (2, 3), (0, 1, 1)), ("tile", (3,), (1, 1, 1))):
            value = getattr(self, name)
            if value is not None:
                asked = f"use {' or '.join(map(str, lengths))}"
                try:
                    given = tuple(value)
                    free = name == "split" and len(given) in lengths and given[1] is None
                    value = tuple(
                        None if free and i == 1 else integer(extent)
                        for i, extent in enumerate(given)
                    )
                except TypeError:
                    raise TypeError(f"Options({name}={value!r}): {asked} integers") from None
                if len(value) not in lengths or not all(
                    extent is None or low <= extent <= 1024
                    for low, extent in zip(least, value, strict=False)
                ):
                    bounds = ", ".join(f"{low} to 1024" for low in least[: max(lengths)])
                    raise ValueError(f"Options({name}={value}): {asked} numbers, from {bounds}")
                object.__setattr__(self, name, value)
        for name in ("chunk_bytes", "sm_budget"):
            value = getattr(self, name)
            if value is not None:
                value = at_least(1, f"Options: {name}", value)
                object.__setattr__(self, name, value)


def integer(value: Any) -> int:
    """Return what is an integer as one of Python's; TypeError for anything else, a bool too."""
    if isinstance(value, bool):
        raise TypeError("a bool")
    return operator.index(value)


def at_least(least: int, name: str, value: Any) -> int:
    """Return an argument that is an integer of at least so much."""
    try:
        value = integer(value)
    except TypeError:
        raise TypeError(f"{name}={value!r}: use an integer") from None
    if value < least:
        raise ValueError(f"{name}={value}: use at least {least}")
    return value


def number(value: Any) -> float:
    """Return what `float` makes of a value; TypeError for a bool, of Python or of an array."""
    if isinstance(value, bool) or getattr(value, "dtype", None) == np.dtype(bool):
        raise TypeError("a bool")
    return float(value)


def flag(name: str, value: Any) -> bool:
    """Return an argument that is True or False; TypeError for anything else."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name}={value!r}: use True or False")
    return bool(value)


def asked_dtype(name: str, value: Any) -> np.dtype:
    """Return the dtype that an argument names; TypeError, with those there are, if none."""
    try:
        return np.dtype(value)
    except TypeError:
        raise TypeError(f"{name}={value!r} is no dtype: use one of {_NAMES}") from None


def check_dtype(name: str, dtype: np.dtype) -> None:
    """Raise TypeError, with the allowed ones, for a dtype that operators do not take."""
    if dtype not in DTYPES:
        raise TypeError(f"{name} has dtype {dtype}: not allowed; use one of {_NAMES}")


def output_dtype(dtype: np.dtype, requested: object, name: str = "dtype") -> np.dtype:
    """Return the dtype of an output or a transfer: the operands', or float32 for 16-bit ones."""
    requested = dtype if requested is None else asked_dtype(name, requested)
    allowed = [dtype] if dtype.itemsize > 2 else [dtype, np.dtype(np.float32)]
    if requested not in allowed:
        names = " or ".join(d.name for d in allowed)
        raise TypeError(f"{name}={requested}: not allowed for {dtype} operands; use {names}")
    return requested


def cpp_type(dtype: np.dtype) -> str:
    """Return what types.cuh calls a dtype."""
    return {"float32": "float", "float64": "double"}.get(dtype.name, dtype.name)


def type_defines(
    dtype: np.dtype,
    out_dtype: np.dtype,
    transfer_dtype: np.dtype | None = None,
    *,
    tf32: bool = False,
) -> dict[str, str]:
    """Return the macros that say a kernel's dtypes; a transfer dtype where it has one."""
    defines = {
        "MK_TYPE": "tfloat32" if tf32 else cpp_type(dtype),
        "MK_OUT_TYPE": cpp_type(out_dtype),
    }
    return defines | ({"MK_TRANSFER_TYPE": cpp_type(transfer_dtype)} if transfer_dtype else {})


def network_bytes(staged: bool, sent: Sequence[int], received: Sequence[int]) -> int:
    """Return what a rank sends: messages of so many bytes, and what slots cost for all of them."""
    slots = [sum(parcels(1, nbytes) for nbytes in messages) for messages in (sent, received)]
    return sum(sent) + staged * slot_bytes(*slots)


def slot_bytes(sent: int, received: int) -> int:
    """Return the bytes that a rank sends for slots that leave it, and for those that it gets."""
    return PARCEL_BYTES * sent + CREDIT_BYTES * received


def parcels(lines: int, nbytes: int) -> int:
    """Return in how many slots so many lines go, of so many bytes each."""
    if lines * nbytes == 0:
        return 1
    width = min(nbytes, SLOT_BYTES)
    return -(-lines // (SLOT_BYTES // width)) * -(-nbytes // width)


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
    nvrtc : tuple of int
        Version of the compiler.
    """

    arch: str
    processors: int
    shared_bytes: int
    nvrtc: tuple[int, int] = (13, 0)


# What engine/portable.cuh has in shared memory besides panels: strips of the result, one for each
# of 8 warps, and barriers and the like.
_STRIP_BYTES = 8 * 16 * (128 + 16)
_CONTROL_BYTES = 1024
# Bytes of a line of a piece of the result, which is staged and delivered at once on GPUs.
_PIECE_LINE = 128
# The shortest and the longest line of a panel.
_LINE_BYTES = 128, 1024


@dataclass(frozen=True)
class HostTile:
    """What engine/host.cuh computes at a time.

    Attributes
    ----------
    tile : tuple of int
        (rows, columns, k).
    """

    tile: tuple[int, int, int]

    engine: ClassVar[str] = "host"
    cluster: ClassVar[int] = 1
    moves: ClassVar[bool] = False
    row_step: ClassVar[int] = 0

    def shared_bytes(self, dtype: np.dtype, out_dtype: np.dtype) -> int:
        """Return what gemm() carves up."""
        rows, columns, k = self.tile
        accumulators = rows * columns + rows * k + k * columns
        return accumulators * max(4, dtype.itemsize) + rows * columns * out_dtype.itemsize

    @property
    def part(self) -> tuple[int, int]:
        """Rows and columns of a finished tile that are delivered together."""
        return self.tile[:2]

    def piece_columns(self, dtype: np.dtype) -> int:
        """Return the columns of a piece of a part, which is delivered at once: of the whole."""
        return self.part[1]

    def defines(self, dtype: np.dtype) -> dict[str, int]:
        """Return no macros: the tile is a run-time value."""
        return {}


def host_tile(row_counts: tuple[int, ...], n: int, k: int, options: Options) -> HostTile:
    """Choose the tile of engine/host.cuh."""
    tile = options.tile or (64, 64, 64)
    rows, columns, depth = (
        min(extent, max(1, limit))
        for extent, limit in zip(tile, (max(row_counts), n, k), strict=True)
    )
    return HostTile((rows, columns, depth))


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

    engine: ClassVar[str] = "portable"
    cluster: ClassVar[int] = 1
    moves: ClassVar[bool] = False
    row_step: ClassVar[int] = 0

    def shared_bytes(self, dtype: np.dtype, out_dtype: np.dtype) -> int:
        """Return the shared memory of a thread block: panels, and strips of the result."""
        rows, columns, k = self.tile
        ring = self.stages * (rows + columns) * k * dtype.itemsize
        return ring + _STRIP_BYTES + _CONTROL_BYTES

    @property
    def part(self) -> tuple[int, int]:
        """Rows and columns of a finished tile that are delivered together: those of a warp."""
        return self.tile[0] // 2, self.tile[1] // 4

    def piece_columns(self, dtype: np.dtype) -> int:
        """Return the columns of a piece of a part, which is delivered at once, for staged sums."""
        return min(self.part[1], _PIECE_LINE // accumulator_dtype(dtype).itemsize)

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


def portable_tile(
    dtype: np.dtype, options: Options, shared_bytes: int, *, small: bool = False
) -> PortableTile:
    """Choose the tile of engine/portable.cuh for a GPU with so much shared memory per block.

    A large tile goes before many stages, of which two will do. `small`: not of the largest.
    """
    shortest, longest = (size // dtype.itemsize for size in _LINE_BYTES)
    default = default_tile(dtype)
    if options.tile is None:
        shapes = [default.tile[:2], *((rows, 128) for rows in (128, 64, 32))]
        tiles = [(*shape, shortest) for shape in shapes[2 if small else 0 :]]
    else:
        tiles = [options.tile]
    candidates = [PortableTile(tile, stages) for tile in tiles for stages in (4, 3, 2)]
    if options.tile == default.tile or (options.tile is None and not small):
        candidates.insert(0, default)
    fits = (choice for choice in candidates if choice.shared_bytes(dtype, dtype) <= shared_bytes)
    chosen = next(fits, candidates[-1])
    least = max(shortest, 32), max(shortest, 64), shortest
    powers = all(extent & (extent - 1) == 0 for extent in chosen.tile)
    need = chosen.shared_bytes(dtype, dtype)
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
class HopperTile:
    """What engine/hopper.cuh is compiled with.

    Attributes
    ----------
    tile : tuple of int
        (rows, columns, k): what a cluster computes at a time, and what a gate lets in.
    cluster : int
        Blocks that share a tile.
    stages : int
        Panels of 128 bytes of k in flight.
    strips : int
        Pieces of the result that each half of a block's rows keeps while they are stored.
    courier_bytes : int
        Shared memory for what a block brings from peers meanwhile.
    movers : int
        Blocks that do nothing else; without any, a warp of each block does.
    row_step : int
        If a tile may have fewer rows: of how many it has a multiple. Or 0.
    """

    tile: tuple[int, int, int]
    cluster: int
    stages: int
    strips: int
    courier_bytes: int
    movers: int
    row_step: int = 0

    engine: ClassVar[str] = "hopper"
    moves: ClassVar[bool] = True  # a warp of each block does, if nothing else

    @property
    def halves(self) -> bool:
        """Whether a tile of half as many columns takes half the time."""
        return self.cluster == 1 and self.tile[1] % 128 == 0 and not self.row_step

    @property
    def part(self) -> tuple[int, int]:
        """Rows and columns of a finished tile that are delivered together: half a block's."""
        if self.row_step:
            return self.tile[0], self.tile[1] // 2
        return self.tile[0] // self.cluster // 2, self.tile[1]

    def piece_columns(self, dtype: np.dtype) -> int:
        """Return the columns of a piece of a part, which is delivered at once, for staged sums."""
        return _PIECE_LINE // accumulator_dtype(dtype).itemsize

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
            **({"MK_COURIERS": 0} if self.movers else {}),
            **({"MK_FLEXIBLE": 1} if self.row_step else {}),
        }

    def boxes(
        self,
        dtype: np.dtype,
        a_by_columns: bool,
        b_by_columns: bool,
        *,
        a_rows: int | None = None,
        b_columns: int | None = None,
        sides: int = 1,
    ) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return what tensor copies bring of A and of B at a time: (of a line, lines).

        Parameters
        ----------
        dtype : numpy.dtype
        a_by_columns, b_by_columns : bool
            Whether their columns are the lines, and not their rows.
        a_rows, b_columns : int, optional
            That there are: what lies beyond them takes a copy longer than what there is.
        sides : int, optional
            In how many places the columns of a tile are.
        """
        rows, columns, _ = self.tile
        run = 128 // dtype.itemsize

        def box(across: bool, lines: int, most: int | None) -> tuple[int, int]:
            return run, run if across else lines if most is None else min(lines, max(1, most))

        return (
            box(a_by_columns, _ROW_BOX if self.row_step else rows // self.cluster, a_rows),
            box(not b_by_columns, columns // self.cluster // sides, b_columns),
        )


_HOPPER_GATE = 512
# Where a tile may have fewer rows, it multiplies and loads so many at a time.
_ROW_STEP, _ROW_BOX = 16, 32
# Rows and columns of a tile, blocks that share it, and how fast it is, as a part of the fastest.
_HOPPER_TILES = (
    (128, 256, 1, 1.0),
    (256, 256, 2, 1.01),
    (128, 192, 1, 0.96),
    (128, 128, 1, 0.8),
    (128, 64, 1, 0.6),
)
_HALF_TILE = 0.55  # of the time of a whole one
# Of groups of rows: rows and columns of a tile, how many it has a multiple of, and how fast it is.
# Where tiles are of fewer rows, agents wait for each other, so that they read at the same time what
# they share of the weights: on two H200 that is a fifth faster for groups of 1024 rows, than tiles
# of as many rows each. Of much larger ones few tiles are cut short.
_GROUP_TILES = ((128, 256, 0, 1.0), (128, 256, _ROW_STEP, 1.0), (128, 128, _ROW_STEP, 0.8))
_LARGE_GROUP = 2048
_SMALL = 128  # columns, of which a thread has so few sums that there are registers for more
HOPPER_TILES = tuple((*shape[:2], _HOPPER_GATE) for shape in _HOPPER_TILES)
# What the start and the end of a tile take as long as, of k, by the blocks that share it.
_HOPPER_TILE_K = {1: 350, 2: 500}
# Where each block has one tile, those of peers' rows wait: for the call, and for the rows so much
# longer than a link may take to bring them.
_CALL_S, _BRINGING = 12e-6, 1.3


def _hopper_bytes(tile: tuple[int, ...], cluster: int, stages: int, strips: int) -> int:
    rows, columns = tile[0] // cluster, tile[1]
    beside = 2048  # barriers, the schedule, and where rows are that lie apart
    return stages * (rows + columns) * 128 + 2 * strips * 8192 + beside


LINK_RATE = 350e9  # bytes per second into a rank
# Bytes per second that a block brings if it does nothing else, and operations per second of a
# multiprocessor: as on an H100. In what part of the time of a product its rows are to be there.
_MOVER_RATE, _PROCESSOR_RATE, _IN_TIME = 20e9, 6e12, 0.8
_LEAST_MOVERS = 4


def _hopper_tile(
    rows: int,
    columns: int,
    k: int,
    cluster: int,
    movers: int,
    shared_bytes: int,
    *,
    beside: bool = False,
    listed: bool = False,
) -> HopperTile:
    """Return a tile with all the stages that there is room for.

    `beside`: beside the tiles, each block brings what peers have, by way of all that is left.
    `listed`: rows of A lie apart.
    """
    courier = 16 * 1024 + 512 if beside else 0
    # Strips for a whole part in 16 bits: the next tile begins before this one is stored. Copies
    # of single rows take longer than boxes, so rather more stages.
    strips = 2 if listed else max(2, rows // cluster // 2 * columns * 2 // 8192)
    room = shared_bytes - courier - _hopper_bytes((rows, columns), cluster, 0, strips)
    stages = min(8, room // ((rows // cluster + columns) * 128))
    tile = HopperTile((rows, columns, k), cluster, stages, strips, 0, movers)
    return with_courier(tile, shared_bytes) if beside else tile


def bringing(tile: HopperTile, shared_bytes: int) -> HopperTile:
    """Return a tile beside which there is room for each block to bring what peers have."""
    rows, columns, k = tile.tile
    return _hopper_tile(rows, columns, k, tile.cluster, tile.movers, shared_bytes, beside=True)


def with_courier(tile: HopperTile, shared_bytes: int) -> HopperTile:
    """Return a tile beside which blocks bring what peers have, by way of all that it leaves."""
    taken = _hopper_bytes(tile.tile, tile.cluster, tile.stages, tile.strips)
    return replace(tile, courier_bytes=shared_bytes - taken)


def hopper_tile(
    row_counts: tuple[int, ...],
    n: int,
    options: Options,
    gpu: Gpu,
    k: int,
    *,
    gathers: bool,
    small: bool = False,
) -> HopperTile | None:
    """Choose the tile of engine/hopper.cuh; None if the options ask for one that it cannot take.

    `gathers`: rows of A come from peers, and the last tiles may be halved; if tiles leave enough
    multiprocessors, those bring the rows. `small`: it has few columns.
    """
    processors = min(gpu.processors, options.sm_budget or gpu.processors)
    brings = gathers and len(row_counts) > 1
    asked = options.split[0] if brings and options.split else 0

    def tile_count(candidate: tuple[int, int, int, float]) -> int:
        rows, columns, *_ = candidate
        return sum(math.ceil(count / rows) for count in row_counts) * math.ceil(n / columns)

    def make(candidate: tuple[int, int, int, float], gate: int = _HOPPER_GATE) -> HopperTile:
        rows, columns, cluster, _ = candidate
        idle = processors - tile_count(candidate) * cluster
        movers = _MOVERS if brings and options.split is None and idle >= _MOVERS else asked
        beside = brings and not movers
        return _hopper_tile(rows, columns, gate, cluster, movers, gpu.shared_bytes, beside=beside)

    def cost(candidate: tuple[int, int, int, float]) -> float:
        rows, columns, cluster, rate = candidate
        tiles = tile_count(candidate)
        agents = max(1, (processors - asked) // cluster)
        half = gathers and _halved(tiles, make(candidate), agents) > 0
        waves = tiles // agents + _HALF_TILE if half else math.ceil(tiles / agents)
        area = rows // cluster * columns
        seconds = 2 * waves * area * (k + _HOPPER_TILE_K[cluster]) / (rate * _PROCESSOR_RATE)
        if gathers and len(row_counts) > 1 and 4 * tiles <= 5 * agents:
            incoming = 2 * (sum(row_counts) - min(row_counts)) * k
            seconds = _CALL_S + max(seconds, _BRINGING * incoming / LINK_RATE)
        return seconds

    if options.tile is None:
        return make(min(_HOPPER_TILES, key=lambda t: (small and t[1] > _SMALL, cost(t))))
    *shape, gate = options.tile
    found = [t for t in _HOPPER_TILES if t[:2] == tuple(shape) and gate % 64 == 0]
    return make(found[0], gate) if found else None


def hopper_group_tiles(gpu: Gpu, movers: int, *, pairs: bool = False) -> list[HopperTile]:
    """Return the tiles of engine/hopper.cuh for groups of rows, which a block multiplies alone.

    `pairs`: each column has a partner half a tile further.
    """
    return [
        replace(
            _hopper_tile(rows, columns, _HOPPER_GATE, 1, movers, gpu.shared_bytes, listed=True),
            row_step=step,
        )
        for rows, columns, step, _ in _GROUP_TILES
        if (rows, columns) in _group_shapes(pairs)
    ]


def takes_group_tile(tile: tuple[int, int, int], *, pairs: bool = False) -> bool:
    """Return whether engine/hopper.cuh takes a tile for groups of rows.

    `pairs`: as for `hopper_group_tiles`.
    """
    return tile[:2] in _group_shapes(pairs) and tile[2] % 64 == 0


def _group_shapes(pairs: bool) -> list[tuple[int, int]]:
    """Return rows and columns of the tiles that there are for groups of rows."""
    shapes = [(rows, columns) for rows, columns, *_ in _GROUP_TILES if columns == 256 or not pairs]
    return list(dict.fromkeys(shapes))


def hopper_group_tile(
    rows: float,
    groups: int,
    products: Sequence[tuple[int, int]],
    incoming: int,
    options: Options,
    gpu: Gpu,
    *,
    pairs: bool = False,
) -> HopperTile:
    """Choose the tile of engine/hopper.cuh for groups of rows, each with a matrix of its own.

    Parameters
    ----------
    rows : float
        Of a group, about.
    groups : int
    products : sequence of (columns, k)
        One behind the other.
    incoming : int
        Bytes of rows that come from peers.
    options : Options
    gpu : Gpu
    pairs : bool
        As for `hopper_group_tiles`.

    Raises
    ------
    ValueError
        If the options ask for a tile that it cannot take.
    """
    if options.tile is not None and not takes_group_tile(options.tile, pairs=pairs):
        allowed = " or ".join(f"({rows}, {columns}, k)" for rows, columns in _group_shapes(pairs))
        raise ValueError(
            f"Options(tile={options.tile}): for these experts{' and swiglu' if pairs else ''} the "
            f"GPU takes {allowed}, where k is a multiple of 64"
        )
    processors = min(gpu.processors, options.sm_budget or gpu.processors)
    operations = 2 * groups * rows * sum(columns * k for columns, k in products)
    seconds = operations / (processors * _PROCESSOR_RATE) or math.inf
    needed = max(_LEAST_MOVERS, math.ceil(incoming / (_IN_TIME * seconds) / _MOVER_RATE))
    movers = max(1, min(processors // 8, needed))
    rates = {(height, width): rate for height, width, _, rate in _GROUP_TILES}

    def cost(candidate: HopperTile) -> float:
        most, width, _ = candidate.tile
        blocks = groups * math.ceil(rows / most)
        height = most
        if candidate.row_step and blocks:
            height = round_up(math.ceil(groups * rows / blocks), candidate.row_step)
        agents = max(1, processors - movers)
        waves = (math.ceil(blocks * math.ceil(columns / width) / agents) for columns, _ in products)
        each = (k + _HOPPER_TILE_K[1] for _, k in products)
        time = sum(count * depth for count, depth in zip(waves, each, strict=True))
        return time * height * width / rates[most, width]

    def is_for_others(candidate: HopperTile) -> bool:
        return (candidate.row_step == 0) != (rows >= _LARGE_GROUP)

    candidates = sorted(hopper_group_tiles(gpu, movers, pairs=pairs), key=is_for_others)
    if options.tile is None:
        best = min((tile for tile in candidates if not is_for_others(tile)), key=cost)
        across = math.ceil(products[0][0] / best.tile[1])
        return replace(best, movers=processors - _in_step(processors - movers, across))
    taken = next(tile for tile in candidates if tile.tile[:2] == options.tile[:2])
    return replace(taken, tile=options.tile)


def _in_step(agents: int, across: int) -> int:
    """Return how many of some agents are to multiply groups of `across` tiles side by side.

    Those of whole groups stay together, and read the rows and weights that they share once; on two
    H200 124 agents took 8 % longer than 120 or 128 do for their number, of 8 tiles side by side.
    """
    whole = agents // max(1, across) * across
    return whole if 16 * whole >= 15 * agents else agents


def _takes_hopper(gpu: Gpu, dtype: np.dtype, tf32: bool) -> bool:
    """Return whether a GPU multiplies operands by the instructions of engine/hopper.cuh."""
    return gpu.arch == "sm_90a" and (dtype.itemsize == 2 or tf32)


def gpu_tiles(
    dtype: np.dtype, gpu: Gpu, *, gathers: bool, tf32: bool = False, small: bool = False
) -> list[PortableTile | HopperTile]:
    """Return the tiles that plans of several ranks choose from, where the caller does not."""
    if _takes_hopper(gpu, dtype, tf32):
        return [
            _hopper_tile(
                *(*shape, _HOPPER_GATE, cluster, movers, gpu.shared_bytes),
                beside=gathers and not movers,
            )
            for *shape, cluster, _ in _HOPPER_TILES
            if not small or shape[1] <= _SMALL
            for movers in ((0, _MOVERS) if gathers else (0,))
        ]
    return [portable_tile(dtype, Options(), gpu.shared_bytes, small=small)]


def kernel_defines(
    types: dict[str, str],
    tile: HostTile | PortableTile | HopperTile,
    dtype: np.dtype,
    *,
    a_by_columns: bool = False,
    b_by_columns: bool = False,
) -> dict[str, Any]:
    """Return the macros of a kernel that multiplies: of its types, its tile, its operands' order.

    An engine that reads them through tensor maps is compiled for one order; others see strides.
    """
    words: dict[str, Any] = {**types, **tile.defines(dtype)}
    if tile.engine == "hopper":
        words |= {"MK_A_BY_COLUMNS": a_by_columns, "MK_B_BY_COLUMNS": b_by_columns}
    return words


class PlanFile:
    """What all plans have: they can be written down, and read by another process."""

    operator: ClassVar[str]
    more_dtypes: ClassVar[tuple[str, ...]] = ()

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
            return tuple(map(given, value)) if isinstance(value, list) else value

        with open(path, encoding="utf-8") as file:
            try:
                try:
                    entries = json.load(file)
                except ValueError:
                    raise ValueError("it is no JSON") from None
                cls._check_entries(entries)
                values = {key: given(value) for key, value in entries.items() if key != "operator"}
                for key in ("dtype", "out_dtype", *cls.more_dtypes):
                    values[key] = np.dtype(values[key])
                return cls(**values)
            except (ValueError, TypeError) as error:
                raise ValueError(
                    f"{os.fspath(path)} holds no plan of {cls.operator}: {error}"
                ) from None

    @classmethod
    def _check_entries(cls, entries: Any) -> None:
        """Raise ValueError unless a JSON object has what a plan of this kind is written as."""
        if not isinstance(entries, dict):
            raise ValueError("it is no JSON object")
        if entries.get("operator", cls.operator) != cls.operator:
            raise ValueError(f"it is one of {entries['operator']}")
        known = "operator", *(field.name for field in fields(cls))
        missing = ", ".join(name for name in known if name not in entries)
        unknown = ", ".join(name for name in entries if name not in known)
        found = [f"it lacks {missing}"] * bool(missing) + [f"{unknown} is unknown"] * bool(unknown)
        if found:
            raise ValueError(
                f"{' and '.join(found)}: it was written by another version of mkernel_cp; make "
                "the plan again"
            )


class NodesPlan(PlanFile):
    """What plans have whose ranks may be on several nodes: `rank`, and the ranks of each node.

    `staged` says whether what goes between them passes through slots of host memory on its way, as
    network cards do not reach the memory of kernels.
    """

    rank: int
    nodes: tuple[int, ...]
    staged: bool

    @property
    def network_agents(self) -> int:
        """Agents that serve the network."""
        return network_agents(self.nodes)

    @property
    def topology(self) -> Topology:
        """The nodes, as this rank sees them."""
        return Topology(self.rank, self.nodes)

    def _between_nodes(self, receivers: list[int]) -> tuple[str, ...]:
        """Return what leaves the node for some ranks, in words."""
        if len(self.nodes) == 1:
            return ()
        ranks = f"rank{'s' * (len(receivers) > 1)} {', '.join(map(str, receivers)) or 'none'}"
        return (
            f"nodes of {list(self.nodes)} ranks: {self.bytes_to_network} bytes leave this one, to "
            f"{ranks}{', through slots of host memory' if self.staged else ''}",
        )


@dataclass(frozen=True)
class GemmPlan(NodesPlan):
    """What the plans of all operators that multiply have.

    Attributes
    ----------
    rank : int
    row_counts : tuple of int
        Rows of every rank.
    n, k : int
        Columns of this rank's B, and its rows.
    dtype, out_dtype : numpy.dtype
    target, engine : str
    tile : tuple of int
        (rows, columns, k) of what is computed at a time.
    cluster : int
        Agents that share a tile.
    split : tuple of int
        (movers, compute): agents per role; of sums between nodes also inter-reduce.
    shared_bytes : int
        Scratch memory of an agent.
    tf32 : bool
        Whether operands are rounded as they are multiplied.
    nodes : tuple of int
        Ranks of each node.
    staged : bool
        Whether what goes between them passes through slots of host memory on its way, as network
        cards do not reach the memory of kernels.
    """

    rank: int
    row_counts: tuple[int, ...]
    n: int
    k: int
    dtype: np.dtype
    out_dtype: np.dtype
    target: str
    engine: str
    tile: tuple[int, int, int]
    cluster: int
    split: tuple[int, ...]
    shared_bytes: int
    tf32: bool
    nodes: tuple[int, ...]
    staged: bool

    @property
    def m(self) -> int:
        """Rows of all ranks together."""
        return sum(self.row_counts)

    @property
    def row_start(self) -> tuple[int, ...]:
        """The first row of every rank, and M behind the last."""
        return tuple(sum(self.row_counts[:rank]) for rank in range(len(self.row_counts) + 1))

    @property
    def network_agents(self) -> int:
        """Agents that serve the network, beside those that add."""
        return network_agents(self.nodes, self.cluster, sum(self.split[2:]))

    def _heading(self) -> tuple[str, str]:
        clusters = f" in clusters of {self.cluster}" if self.cluster > 1 else ""
        return (
            f"{self.operator}: ({self.m}, {self.k}) @ ({self.k}, {self.n}) "
            f"{self.dtype.name} -> {self.out_dtype.name}{tf32_text(self.tf32)}, rank "
            f"{self.rank} of {len(self.row_counts)}, rows {list(self.row_counts)}",
            f"target {self.target}, engine {self.engine}: tile {self.tile}, "
            f"{self.split[1]} compute agent{'s' * (self.split[1] != 1)}{clusters}",
        )

    def _movers(self) -> str:
        movers = self.split[0]
        return f"{movers} mover{'s' * (movers > 1)}" if movers else "a part of each compute agent"


@dataclass(frozen=True)
class AllGatherGemmPlan(GemmPlan):
    """The plan of `allgather_gemm` on one rank: what `GemmPlan` has, and how A travels.

    Attributes
    ----------
    by_columns : bool
        In F order: all ranks hold it so.
    chunk_bytes : int
        How much a mover was to bring at a time.
    chunk : tuple of int
        (rows, k) of what it does bring.
    phase_k : int
        So much of k comes from all ranks before more does.
    whole_tiles : int
        Tiles that are not halved; the last ones may be, for all agents to have some of them.
    """

    operator: ClassVar[str] = "allgather_gemm"

    by_columns: bool
    chunk_bytes: int
    chunk: tuple[int, int]
    phase_k: int
    whole_tiles: int

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

    def row_bytes(self, rank: int) -> int:
        """Return the bytes of a rank's rows."""
        return self.row_counts[rank] * self.k * self.dtype.itemsize

    @property
    def bytes_from_peers(self) -> int:
        """Bytes that this rank pulls in one call from the ranks of its node."""
        if self.n == 0:
            return 0
        holders = enumerate(self.topology.holders)
        return sum(self.row_bytes(r) for r, holder in holders if holder != self.rank)

    @property
    def bytes_to_network(self) -> int:
        """Bytes that this rank sends to other nodes in one call: its rows once to each, letters."""
        topology = self.topology
        sent = len(topology.gateways) * self._parcels(self.rank)
        received = sum(map(self._parcels, topology.sources))
        rows = len(topology.gateways) * self.row_bytes(self.rank)
        return rows + topology.letter_bytes + self.staged * slot_bytes(sent, received)

    def _lines(self, rank: int) -> Iterator[tuple[int, int]]:
        """Give the lines of each chunk of a rank's rows, and the bytes of one.

        Lines without gaps are one.
        """
        rows = self.row_counts[rank]
        for row in range(0, rows, self.chunk[0]):
            for k in range(0, self.k, self.chunk[1]):
                shape = min(self.chunk[0], rows - row), min(self.chunk[1], self.k - k)
                lines, run = shape[::-1] if self.by_columns else shape
                nbytes = run * self.dtype.itemsize
                yield (1, lines * nbytes) if nbytes == self.pitch(rank) else (lines, nbytes)

    def _parcels(self, rank: int) -> int:
        """Return in how many slots the rows of a rank leave it, to one node."""
        return sum(parcels(*lines) for lines in self._lines(rank))

    def writes(self, transport: str) -> list[int]:
        """Return in how many writes each chunk of all ranks comes over the network.

        On EFA, each line has an immediate of its own.
        """
        every = (lines for rank in range(len(self.row_counts)) for lines in self._lines(rank))
        return [count if transport == "efa" else 1 for count, _ in every]

    @property
    def options(self) -> Options:
        """What makes an operator choose this plan again."""
        return Options(self.split, self.tile, self.chunk_bytes, tf32=self.tf32)

    @property
    def memory(self) -> int:
        """Bytes that this rank shares with its peers for it: landing zones and signals."""
        signals = sum(map(self.chunks, range(len(self.row_counts))))
        return self.arena_offsets()[-1] + 8 * signals * (2 if len(self.nodes) > 1 else 1)

    def explain(self) -> str:
        """Return the plan in words, one choice a line."""
        kib = self.chunk[0] * self.chunk[1] * self.dtype.itemsize / 1024
        return "\n".join(
            (
                *self._heading(),
                f"A travels in {'F' if self.by_columns else 'C'} order, "
                f"{self.bytes_from_peers} bytes to this rank in chunks of {self.chunk} "
                f"({kib:g} KiB) by {self._movers()}",
                *self._between_nodes(self.topology.gateways),
            )
        )


@dataclass(frozen=True)
class GemmReduceScatterPlan(GemmPlan):
    """The plan of `gemm_reduce_scatter` on one rank: what `GemmPlan` has, and how sums travel.

    Attributes
    ----------
    transfer_dtype : numpy.dtype
        Of partial sums on their way.
    part : tuple of int
        (rows, columns) of a tile that travel and are added together.
    piece_columns : int
        Columns of a part that lie together in a slot.
    zones : tuple of (int, int)
        (slots, bytes of one) of each landing zone, on every rank alike.
    low_latency : bool
        Sums travel in words that are their own signals, for few rows: each tile to those who add
        it, and on, before the next one.
    pulled : bool
        Partial sums stay where they were computed until who adds them has them brought; else they
        are stored there at once.
    stripes : int
        Parts of the columns. In each, peers' rows are multiplied before own ones, so that links are
        in use all the time.
    """

    operator: ClassVar[str] = "gemm_reduce_scatter"
    more_dtypes: ClassVar[tuple[str, ...]] = ("transfer_dtype",)

    transfer_dtype: np.dtype
    part: tuple[int, int]
    piece_columns: int
    zones: tuple[tuple[int, int], ...]
    low_latency: bool
    pulled: bool
    stripes: int

    @property
    def stripe_columns(self) -> int:
        """Columns of a stripe: whole tiles."""
        across = math.ceil(self.n / self.tile[1])
        return max(1, math.ceil(across / self.stripes)) * self.tile[1]

    @property
    def parts(self) -> tuple[int, ...]:
        """Parts of tiles of every rank's rows."""
        return tile_counts(self.row_counts, self.n, (*self.part, 0))

    @property
    def added_start(self) -> tuple[int, ...]:
        """Each rank's first part among those that are added where its are, in this node.

        First come those of other nodes' ranks, and then those of the rank that adds them.
        """
        holders, parts = self.topology.holders, self.parts
        each = tuple(enumerate(holders))
        return tuple(
            sum(
                parts[other]
                for other, theirs in each
                if theirs == adds != other and (other < rank or rank == adds)
            )
            for rank, adds in each
        )

    @property
    def receivers(self) -> list[int]:
        """To which ranks of other nodes this one sends sums."""
        return self.topology.sources

    @property
    def chunks(self) -> int:
        """In how many chunks sums come over the network at the most."""
        return self.zones[-1][0] if len(self.nodes) > 1 else 0

    def sum_bytes(self, ranks: Iterable[int], dtype: np.dtype) -> int:
        """Return the bytes of the rows of some ranks."""
        return sum(self.row_counts[rank] for rank in ranks) * self.n * dtype.itemsize

    @property
    def bytes_from_peers(self) -> int:
        """Bytes that come to this rank in one call from the ranks of its node."""
        if self.low_latency:
            return self._told_bytes()
        added = self.rank, *self.topology.sources
        return (self.topology.local_size - 1) * self.sum_bytes(added, self.transfer_dtype)

    @property
    def bytes_to_network(self) -> int:
        """Bytes that this rank sends to other nodes in one call: its node's sums, letters."""
        topology, dtype = self.topology, self.transfer_dtype
        sent = sum(self._parcels(rank, dtype) for rank in topology.sources)
        received = len(topology.gateways) * self._parcels(self.rank, dtype)
        slots = self.staged * slot_bytes(sent, received)
        return self.sum_bytes(topology.sources, dtype) + topology.letter_bytes + slots

    def _told_bytes(self, sums: int = 0) -> int:
        """Return the bytes of peers' products for own rows, and of rows of sums, in words."""
        own = self.row_counts[self.rank] * self.transfer_dtype.itemsize
        size = (len(self.row_counts) - 1) * own + sums * self.out_dtype.itemsize
        return size * round_up(self.n, _TOLD_COLUMNS[self.engine]) * 8 // _TOLD_BYTES

    def _parcels(self, rank: int, dtype: np.dtype) -> int:
        """Return in how many slots sums of a rank's rows leave another one."""
        rows, columns = (
            [min(step, extent - begin) for begin in range(0, extent, step)]
            for extent, step in zip((self.row_counts[rank], self.n), self.part, strict=True)
        )
        return sum(parcels(1, high * wide * dtype.itemsize) for high in rows for wide in columns)

    @property
    def options(self) -> Options:
        """What makes an operator choose this plan again."""
        return Options(self.split, self.tile, transfer_dtype=self.transfer_dtype, tf32=self.tf32)

    @property
    def memory(self) -> int:
        """Bytes that this rank shares with its peers for it: slots and signals."""
        return sum(slots * (size + 8) for slots, size in self.zones)

    def explain(self) -> str:
        """Return the plan in words, one choice a line."""
        rings = " and then ".join(", ".join(map(str, ring)) for ring in self.topology.rings)
        order = "ranks from the owner of a row on" if self.low_latency else f"ranks {rings}"
        stripes = (
            f"{self.stripes} stripe{'s' * (self.stripes > 1)} of {self.stripe_columns} columns"
        )
        return "\n".join(
            (
                *self._heading(),
                f"partial sums {'are brought' if self.pulled else 'travel'} as "
                f"{self.transfer_dtype.name} and are added in the order of "
                f"{order}; {self.bytes_from_peers} bytes come to this rank, into "
                f"{self.memory} bytes of slots",
                *self._between_nodes(self.receivers),
                "with low latency, in words that are their own signals"
                if self.low_latency
                else f"columns are taken in {stripes}",
            )
        )


@dataclass(frozen=True)
class GemmAllReducePlan(GemmReduceScatterPlan):
    """The plan of `gemm_allreduce` on one rank; `row_counts` says who adds which rows.

    The sums of a stripe are handed out while the next one is multiplied.
    """

    operator: ClassVar[str] = "gemm_allreduce"

    @property
    def bytes_from_peers(self) -> int:
        """Bytes that come to this rank in one call: partial sums, and the sums of other rows."""
        if self.low_latency:
            return self._told_bytes(self.m - self.row_counts[self.rank])
        pushed = (r for r, holder in enumerate(self.topology.holders) if holder != self.rank)
        return super().bytes_from_peers + self.sum_bytes(pushed, self.out_dtype)

    @property
    def bytes_to_network(self) -> int:
        """Bytes that this rank sends to other nodes in one call: also the sums of its rows."""
        topology, dtype = self.topology, self.out_dtype
        nodes, once = len(topology.gateways), self.sum_bytes((self.rank,), dtype)
        sent = nodes * self._parcels(self.rank, dtype)
        received = sum(self._parcels(rank, dtype) for rank in topology.sources)
        return super().bytes_to_network + nodes * once + self.staged * slot_bytes(sent, received)

    @property
    def receivers(self) -> list[int]:
        """To which ranks of other nodes this one sends sums."""
        return self.topology.links

    @property
    def chunks(self) -> int:
        """In how many chunks sums come over the network at the most."""
        return super().chunks + sum(self.parts)

    def explain(self) -> str:
        """Return the plan in words, one choice a line."""
        if self.low_latency:
            return f"{super().explain()}; owners send their sums to all"
        return f"{super().explain()}, each handed out to all and stored by {self._movers()}"


def tf32_text(tf32: bool) -> str:
    """Return what is said of operands that are rounded as they are multiplied."""
    return ", multiplied as tf32" if tf32 else ""


def tile_counts(row_counts: tuple[int, ...], n: int, tile: tuple[int, int, int]) -> tuple[int, ...]:
    """Return how many tiles the rows of every rank have."""
    return tuple(math.ceil(rows / tile[0]) * math.ceil(n / tile[1]) for rows in row_counts)


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
    row_counts: tuple[int, ...],
    k: int,
    dtype: np.dtype,
    by_columns: bool,
    chunk_bytes: int | None,
) -> tuple[int, int]:
    """Return (rows, k) of a chunk; the same on all ranks, so only from what they agree on.

    Chunks start at multiples of 16 bytes of a line, whichever way lines run: along k, or by columns
    along the rows. Every line of a chunk is a copy of its own, so lines are long.
    """
    unit = 16 // dtype.itemsize
    nbytes = chunk_bytes or default_chunk_bytes(sum(row_counts) * k * dtype.itemsize)
    elements = nbytes // dtype.itemsize

    def lines_and_run(lines: int, run: int) -> tuple[int, int]:
        count = max(1, min(lines, _CHUNK_LINES, nbytes // _CHUNK_LINE))
        return count, max(1, min(run, max(unit, elements // count // unit * unit)))

    if by_columns:
        return lines_and_run(k, max(row_counts))[::-1]
    return lines_and_run(max(row_counts), k)


def default_chunk_bytes(nbytes: int) -> int:
    """Return the bytes of a chunk of so many that are moved; a power of two.

    Each costs a signal, a few microseconds of who brings it; but what comes in a few pieces comes
    late. So all who bring some have several.
    """
    least = 1 << max(0, nbytes // _CHUNKS - 1).bit_length()
    return min(_CHUNK_BYTES, max(_LEAST_CHUNK_BYTES, least))


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
    nodes: tuple[int, ...] | None = None,
    staged: bool = False,
) -> AllGatherGemmPlan:
    """Choose a plan: for a GPU that runs `capacity` agents at a time, or for the host target.

    On the host target, two compute agents at most: it is for proving the protocol, and more threads
    than cores only make ranks wait for each other. On a GPU every multiprocessor gets an agent, as
    far as there is work for it; if tiles leave enough of them, those are movers.
    """
    chunk_bytes = options.chunk_bytes or default_chunk_bytes(sum(row_counts) * k * dtype.itemsize)
    chunk = chunk_shape(row_counts, k, dtype, by_columns, chunk_bytes)
    chosen = choose_tile(row_counts, n, k, dtype, options, gpu, gathers=True)
    tiles = sum(tile_counts(row_counts, n, chosen.tile))
    chunks = math.ceil(max(row_counts) / chunk[0]) * math.ceil(k / chunk[1])
    ranks = len(row_counts)
    nodes = nodes or (ranks,)
    capacity -= network_agents(nodes, chosen.cluster)
    work = tiles
    if chosen.moves and ranks > 1 and not chosen.movers:
        work = max(tiles, chunks)
    elif chosen.moves and ranks > 1 and options.split is None:
        cluster = chosen.cluster
        left = capacity - max(1, tiles) * cluster  # the network may have taken some
        movers = min(chosen.movers, left, chunks) // cluster * cluster
        chosen = replace(chosen, movers=max(cluster, movers))
    split = choose_split(chosen, ranks, work, min(_MOVERS, chunks), options, capacity)
    return AllGatherGemmPlan(
        rank=rank,
        row_counts=row_counts,
        n=n,
        k=k,
        dtype=dtype,
        out_dtype=out_dtype,
        by_columns=by_columns,
        target="cuda" if gpu else "host",
        engine=chosen.engine,
        tile=chosen.tile,
        cluster=chosen.cluster,
        chunk_bytes=chunk_bytes,
        chunk=chunk,
        phase_k=_phase_k(k, chunk, row_counts, split, 4 * tiles * chosen.cluster <= 5 * split[1]),
        whole_tiles=tiles - _halved(tiles, chosen, split[1]),
        nodes=nodes,
        staged=staged,
        split=split,
        shared_bytes=chosen.shared_bytes(dtype, out_dtype),
        tf32=options.tf32,
    )


def network_agents(nodes: tuple[int, ...], cluster: int = 1, adding: int = 0) -> int:
    """Return how many agents serve the network, beside some that add: whole clusters with them."""
    return 0 if len(nodes) == 1 else round_up(adding + 2, cluster) - adding


def _halved(tiles: int, chosen: HostTile | PortableTile | HopperTile, agents: int) -> int:
    """Return how many of the last tiles are halved: all of the last wave, if it is half empty."""
    rest = tiles % agents
    whole = chosen.engine != "hopper" or not chosen.halves
    return 0 if whole or tiles < agents or 2 * rest > agents else rest


def _phase_k(
    k: int,
    chunk: tuple[int, int],
    row_counts: tuple[int, ...],
    split: tuple[int, ...],
    at_once: bool,
) -> int:
    """Return how much of k is to come from all ranks before more does.

    Where all tiles, or all but a few, are computed at once, none needs the rows of a rank before
    those of another, and all get on with each piece of k: as many chunks as are brought at a time.
    Else tiles of one rank come before those of the next.
    """
    if not at_once:
        return round_up(max(1, k), chunk[1])
    panel = sum(-(-rows // chunk[0]) for rows in row_counts)
    return max(1, (split[0] or split[1]) // max(1, panel)) * chunk[1]


def choose_tile(
    row_counts: tuple[int, ...],
    n: int,
    k: int,
    dtype: np.dtype,
    options: Options,
    gpu: Gpu | None,
    *,
    gathers: bool = False,
    small: bool = False,
) -> HostTile | PortableTile | HopperTile:
    """Choose the engine and its tile, for a GPU or for the host target.

    `gathers`: rows of A come from peers, and the last tiles may be halved. `small`: a small one, on
    a GPU.
    """
    if gpu is None:
        return host_tile(row_counts, n, k, options)
    tile = None
    if _takes_hopper(gpu, dtype, options.tf32):
        tile = hopper_tile(row_counts, n, options, gpu, k, gathers=gathers, small=small)
    return tile or portable_tile(dtype, options, gpu.shared_bytes, small=small)


def choose_split(
    chosen: HostTile | PortableTile | HopperTile,
    ranks: int,
    tiles: int,
    most_movers: int,
    options: Options,
    capacity: int,
) -> tuple[int, int]:
    """Return how many agents move and how many compute so many tiles."""
    movers, compute = (options.split or (None, None))[:2]
    if movers is None:
        if chosen.moves:
            movers = chosen.movers
        else:
            movers = 1 if chosen.engine == "host" else max(1, min(capacity // 2, most_movers))
    movers = 0 if ranks == 1 else movers
    if compute is None:
        room = max(1, (capacity - movers) // chosen.cluster)
        if chosen.engine == "host":
            room = max(1, min(2, len(os.sched_getaffinity(0)) // ranks))
        compute = min(room, max(1, tiles)) * chosen.cluster
    split = movers, compute
    if chosen.engine == "host":
        return split
    if not chosen.moves and ranks > 1 and not movers:
        raise ValueError(
            f"Options(split={options.split}): compute agents of the engine {chosen.engine} can do "
            "nothing beside; use at least one mover"
        )
    if split[0] % chosen.cluster or compute % chosen.cluster:
        raise ValueError(
            f"Options(split={options.split}): blocks come in clusters of {chosen.cluster}; use "
            "multiples of that"
        )
    if sum(split) > capacity:
        if options.split:
            raise ValueError(
                f"Options(split={options.split}): {capacity} agents run at a time, on the GPU or "
                "within sm_budget; use fewer"
            )
        raise ValueError(
            f"Options(sm_budget={options.sm_budget}): {capacity} agents run at a time, and this "
            f"call needs {sum(split)}; use more multiprocessors"
        )
    return split


# Columns that low_latency.cuh tells together, as the engines have them; and data that a word of 8
# bytes carries.
_TOLD_COLUMNS = {"host": 4, "portable": 4, "hopper": 16}
_TOLD_BYTES = 4
_HANDOVER_S = 5e-6  # what it takes that bytes are known to be there


def has_low_latency(
    kind: type["GemmReduceScatterPlan"],
    row_counts: tuple[int, ...],
    n: int,
    out_dtype: np.dtype,
    transfer_dtype: np.dtype,
    tile: HostTile | PortableTile | HopperTile,
    gpu: Gpu | None,
) -> bool:
    """Return whether sums are to travel in words that are their own signals.

    They take twice the bytes, but nobody has to find out that these are there. In each wave of
    tiles all wait for each other.
    """
    peers, size, handovers = len(row_counts) - 1, transfer_dtype.itemsize, 1
    (tiles,) = tile_counts((sum(row_counts),), n, tile.tile)
    waves = math.ceil(tiles * tile.cluster / gpu.processors) if gpu else 1
    if peers == 0 or tiles == 0 or (tile.engine == "hopper" and tile.tile[1] > _SMALL):
        return False
    if kind is GemmAllReducePlan:
        size, handovers = size + out_dtype.itemsize, 2
    return peers * max(row_counts) * n * size / LINK_RATE < handovers * _HANDOVER_S / waves


def told_elements(row_counts: tuple[int, ...], n: int, tile: tuple[int, int, int]) -> int:
    """Return the elements of all whole tiles of the rows of all ranks."""
    (tiles,) = tile_counts((sum(row_counts),), n, tile)
    return tiles * tile[0] * tile[1]


def whole_groups(tile: Any) -> Any:
    """Return a tile whose columns are told in whole groups."""
    rows, columns, k = tile.tile
    return replace(tile, tile=(rows, round_up(columns, _TOLD_COLUMNS[tile.engine]), k))


# Movers that store the sums of gemm_allreduce on a GPU, and agents that add what leaves a node.
_COLLECTORS, _ADDERS = 8, 4
# With what is pulled, fewer stripes are faster: links need not be in use all the time.
_MOST_STRIPES, _MOST_STRIPES_PULLED = 4, 2
_LEAST_WAVES_PULLED = 2  # of tiles: else nothing is multiplied behind what would be pushed


def pulls_partials(
    kind: type[GemmReduceScatterPlan],
    chosen: HostTile | PortableTile | HopperTile,
    gpu: Gpu | None,
    row_counts: tuple[int, ...],
    n: int,
    k: int,
    transfer_dtype: np.dtype,
) -> bool:
    """Return whether partial sums are to be pulled: stores at peers hold up who multiplies.

    Where a product takes less time than its sums do on the links, these wait for nothing: the
    sooner each is under way the better. Nor is a stage given up for it.
    """
    if kind is not GemmReduceScatterPlan or gpu is None or chosen.engine != "hopper":
        return False
    if bringing(chosen, gpu.shared_bytes).stages < chosen.stages:
        return False
    waves = sum(tile_counts(row_counts, n, chosen.tile)) * chosen.cluster / gpu.processors
    ranks = len(row_counts)
    multiplying = 2 * k / (gpu.processors * _PROCESSOR_RATE)  # of an element of the result
    travelling = (ranks - 1) / ranks * transfer_dtype.itemsize / LINK_RATE
    return waves > _LEAST_WAVES_PULLED and multiplying > travelling


def plan_reduction(
    kind: type[GemmReduceScatterPlan],
    rank: int,
    row_counts: tuple[int, ...],
    n: int,
    k: int,
    dtype: np.dtype,
    out_dtype: np.dtype,
    transfer_dtype: np.dtype,
    chosen: HostTile | PortableTile | HopperTile,
    low_latency: bool,
    options: Options,
    capacity: int = 0,
    nodes: tuple[int, ...] | None = None,
    staged: bool = False,
    *,
    pulled: bool = False,
) -> GemmReduceScatterPlan:
    """Choose a plan of a kind, for the tile and the form that the ranks have agreed on.

    As many stripes as leave a compute agent two tiles of each rank's rows in each, but no more than
    4, or 2 if partial sums are pulled.
    """
    ranks = len(row_counts)
    tiled = (sum(row_counts),) if low_latency else row_counts
    tiles = sum(tile_counts(tiled, n, chosen.tile))
    whole = kind is GemmAllReducePlan
    movers = _COLLECTORS if whole and not low_latency else 1
    nodes = nodes or (ranks,)
    adding = inter_reduce(nodes, options, 1 if chosen.engine == "host" else _ADDERS)
    capacity -= sum(adding) + network_agents(nodes, chosen.cluster, sum(adding))
    split = (*choose_split(chosen, ranks, tiles, movers, options, capacity), *adding)
    across, waves = math.ceil(n / chosen.tile[1]), math.ceil(tiles * chosen.cluster / split[1])
    most = _MOST_STRIPES_PULLED if pulled else _MOST_STRIPES
    stripes = max(1, min(most, across, waves // (2 * ranks)))
    return kind(
        rank=rank,
        row_counts=row_counts,
        n=n,
        k=k,
        dtype=dtype,
        out_dtype=out_dtype,
        transfer_dtype=transfer_dtype,
        target="host" if chosen.engine == "host" else "cuda",
        engine=chosen.engine,
        tile=chosen.tile,
        cluster=chosen.cluster,
        split=split,
        shared_bytes=chosen.shared_bytes(dtype, accumulator_dtype(dtype)),
        tf32=options.tf32,
        nodes=nodes,
        staged=staged,
        part=chosen.part,
        piece_columns=chosen.piece_columns(dtype),
        zones=reduction_zones(
            *(kind, row_counts, n, out_dtype, transfer_dtype, chosen, low_latency, nodes),
            pulled=pulled,
        ),
        low_latency=low_latency,
        pulled=pulled,
        stripes=1 if low_latency or ranks == 1 else stripes,
    )


def inter_reduce(nodes: tuple[int, ...], options: Options, default: int = 1) -> tuple[int, ...]:
    """Return how many agents add what leaves their node, as the last part of a split, if any."""
    return () if len(nodes) == 1 else (options.split or ())[2:] or (default,)


def added_parts(parts: tuple[int, ...], nodes: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """Return how many parts each rank adds, of so many of every rank, and how many are others'."""
    ranks = [Topology(rank, nodes) for rank in range(len(parts))]
    others = [sum(parts[source] for source in rank.sources) for rank in ranks]
    return [other + own for other, own in zip(others, parts, strict=True)], others


def reduction_zones(
    kind: type[GemmReduceScatterPlan],
    row_counts: tuple[int, ...],
    n: int,
    out_dtype: np.dtype,
    transfer_dtype: np.dtype,
    chosen: HostTile | PortableTile | HopperTile,
    low_latency: bool,
    nodes: tuple[int, ...],
    *,
    pulled: bool = False,
) -> tuple[tuple[int, int], ...]:
    """Return (slots, bytes of one) of each landing zone: what all ranks have at the same places.

    The partial sums of each peer for the parts of the rank that adds most; if they are pulled, as
    many that are offered; for `gemm_allreduce` also the sums of all. No slot is used twice in a
    call, so none is waited for. With low latency nothing but signals, which are data, too: partial
    sums of all peers, and sums. Between nodes the last three are what a rank adds of others' rows,
    what leaves its node of them, and what comes from the other nodes.
    """
    if low_latency:
        size = (len(row_counts) - 1) * transfer_dtype.itemsize
        size += out_dtype.itemsize if kind is GemmAllReducePlan else 0
        return ((told_elements(row_counts, n, chosen.tile) * size // _TOLD_BYTES, 0),)
    rows, columns = chosen.part
    parts = tile_counts(row_counts, n, (rows, columns, 0))
    added, others = added_parts(parts, nodes)

    def zone(slots: int, dtype: np.dtype) -> tuple[int, int]:
        return slots, round_up(rows * columns * dtype.itemsize, _LINE_ALIGNMENT)

    zones = [zone((max(nodes) - 1) * max(added), transfer_dtype)] * (2 if pulled else 1)
    if kind is GemmAllReducePlan:
        zones.append(zone(sum(parts), out_dtype))
    if len(nodes) > 1:
        zones.append(zone(max(others), accumulator_dtype(out_dtype)))
        zones.append(zone(max(others), transfer_dtype))
        zones.append(zone((len(nodes) - 1) * max(parts), transfer_dtype))
    return tuple(zones)
