"""Tiles: what engines compute at a time, how kernels are compiled for them, and their choice.

Rates and times are those of an H100 or H200, as far as they were measured.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from .arguments import Options
from .memory import round_up
from .reference import accumulator_dtype

# Copying by registers, so many thread blocks fill a link.
MOVERS = 20


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
# Of groups of rows, whose last tile may have fewer: rows and columns of a tile, and how fast it is.
_GROUP_TILES = ((128, 256, 1.0), (128, 128, 0.8))
SMALL_COLUMNS = 128  # columns, of which a thread has so few sums that there are registers for more
HOPPER_TILES = tuple((*shape[:2], _HOPPER_GATE) for shape in _HOPPER_TILES)
# What the start and the end of a tile take as long as, of k, by the blocks that share it.
_HOPPER_TILE_K = {1: 350, 2: 500}
# Where each block has one tile, those of peers' rows wait: for the call, and for the rows so much
# longer than a link may take to bring them.
_CALL_S, _BRINGING = 12e-6, 1.3
# Where they have few, little is multiplied while partial sums travel, and nothing while the last
# totals do. In a probe on two H200 smaller tiles were 7 to 12 % faster for 256 to 1024 rows of 8192
# columns, and slower for more.
_FEW_WAVES, _HANDING_RATE = 2, 250e9  # bytes per second, as they travel when they are waited for


def _hopper_bytes(tile: tuple[int, ...], cluster: int, stages: int, strips: int) -> int:
    rows, columns = tile[0] // cluster, tile[1]
    beside = 2048  # barriers, the schedule, and where rows are that lie apart
    return stages * (rows + columns) * 128 + 2 * strips * 8192 + beside


LINK_RATE = 350e9  # bytes per second into a rank
# Bytes per second that a block brings if it does nothing else, and operations per second of a
# multiprocessor: as on an H100. In what part of the time of a product its rows are to be there.
_MOVER_RATE, PROCESSOR_RATE, _IN_TIME = 20e9, 6e12, 0.8
_LEAST_MOVERS = 4
_MOVED_BYTES = 1e5  # that a mover brings before tiles wait for long


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
    step = _ROW_STEP if listed else 0
    tile = HopperTile((rows, columns, k), cluster, stages, strips, 0, movers, step)
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
    handed: tuple[int, int] = (0, 0),
) -> HopperTile | None:
    """Choose the tile of engine/hopper.cuh; None if the options ask for one that it cannot take.

    `gathers`: rows of A come from peers, and the last tiles may be halved; if tiles leave enough
    multiprocessors, those bring the rows. `small`: it has few columns. `handed`: bytes of a partial
    sum on its way to who adds it, and of a total on its way to the others.
    """
    processors = min(gpu.processors, options.sm_budget or gpu.processors)
    brings = gathers and len(row_counts) > 1
    asked = options.split[0] if brings and options.split else 0
    incoming = 2 * (sum(row_counts) - min(row_counts)) * k
    wanted = max(_LEAST_MOVERS, math.ceil(incoming / _MOVED_BYTES))

    def tile_count(candidate: tuple[int, int, int, float]) -> int:
        rows, columns, *_ = candidate
        return sum(math.ceil(count / rows) for count in row_counts) * math.ceil(n / columns)

    def make(candidate: tuple[int, int, int, float], gate: int = _HOPPER_GATE) -> HopperTile:
        rows, columns, cluster, _ = candidate
        idle = processors - tile_count(candidate) * cluster
        enough = brings and options.split is None and idle >= min(MOVERS, wanted)
        movers = min(MOVERS, idle) if enough else asked
        beside = brings and not movers
        return _hopper_tile(rows, columns, gate, cluster, movers, gpu.shared_bytes, beside=beside)

    few = tile_count(_HOPPER_TILES[0]) <= _FEW_WAVES * processors
    travelling = (sum(row_counts) - min(row_counts)) * n  # sums, from or to a rank

    def cost(candidate: tuple[int, int, int, float]) -> float:
        rows, columns, cluster, rate = candidate
        tiles = tile_count(candidate)
        agents = max(1, (processors - asked) // cluster)
        half = gathers and halved(tiles, make(candidate), agents) > 0
        waves = tiles // agents + _HALF_TILE if half else math.ceil(tiles / agents)
        area = rows // cluster * columns
        seconds = 2 * waves * area * (k + _HOPPER_TILE_K[cluster]) / (rate * PROCESSOR_RATE)
        if gathers and len(row_counts) > 1 and 4 * tiles <= 5 * agents:
            seconds = _CALL_S + max(seconds, _BRINGING * incoming / LINK_RATE)
        if handed[0] and few:
            partials, totals = (travelling * nbytes / _HANDING_RATE for nbytes in handed)
            last = min(1, agents * len(row_counts) / max(1, tiles))  # of the totals, at the end
            seconds = max(seconds, seconds / max(1, waves) + partials) + last * totals
        return seconds

    if options.tile is None:
        return make(min(_HOPPER_TILES, key=lambda t: (small and t[1] > SMALL_COLUMNS, cost(t))))
    *shape, gate = options.tile
    found = [t for t in _HOPPER_TILES if t[:2] == tuple(shape) and gate % 64 == 0]
    return make(found[0], gate) if found else None


def hopper_group_tiles(gpu: Gpu, movers: int, *, pairs: bool = False) -> list[HopperTile]:
    """Return the tiles of engine/hopper.cuh for groups of rows, which a block multiplies alone.

    `pairs`: each column has a partner half a tile further.
    """
    return [
        _hopper_tile(*shape, _HOPPER_GATE, 1, movers, gpu.shared_bytes, listed=True)
        for shape in _group_shapes(pairs)
    ]


def takes_group_tile(tile: tuple[int, int, int], *, pairs: bool = False) -> bool:
    """Return whether engine/hopper.cuh takes a tile for groups of rows.

    `pairs`: as for `hopper_group_tiles`.
    """
    return tile[:2] in _group_shapes(pairs) and tile[2] % 64 == 0


def _group_shapes(pairs: bool) -> list[tuple[int, int]]:
    """Return rows and columns of the tiles that there are for groups of rows."""
    return [(rows, columns) for rows, columns, _ in _GROUP_TILES if columns == 256 or not pairs]


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
    seconds = operations / (processors * PROCESSOR_RATE) or math.inf
    needed = max(_LEAST_MOVERS, math.ceil(incoming / (_IN_TIME * seconds) / _MOVER_RATE))
    movers = max(1, min(processors // 8, needed))
    rates = {(height, width): rate for height, width, rate in _GROUP_TILES}

    def cost(candidate: HopperTile) -> float:
        most, width, _ = candidate.tile
        blocks = groups * math.ceil(rows / most)
        height = round_up(math.ceil(groups * rows / blocks), _ROW_STEP) if blocks else most
        agents = max(1, processors - movers)
        waves = (math.ceil(blocks * math.ceil(columns / width) / agents) for columns, _ in products)
        each = (k + _HOPPER_TILE_K[1] for _, k in products)
        time = sum(count * depth for count, depth in zip(waves, each, strict=True))
        return time * height * width / rates[most, width]

    candidates = hopper_group_tiles(gpu, movers, pairs=pairs)
    if options.tile is None:
        best = min(candidates, key=cost)
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
            if not small or shape[1] <= SMALL_COLUMNS
            for movers in ((0, MOVERS) if gathers else (0,))
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


def halved(tiles: int, chosen: HostTile | PortableTile | HopperTile, agents: int) -> int:
    """Return how many of the last tiles are halved: all of the last wave, if it is half empty."""
    rest = tiles % agents
    whole = chosen.engine != "hopper" or not chosen.halves
    return 0 if whole or tiles < agents or 2 * rest > agents else rest


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
    handed: tuple[int, int] = (0, 0),
) -> HostTile | PortableTile | HopperTile:
    """Choose the engine and its tile, for a GPU or for the host target.

    `gathers`: rows of A come from peers, and the last tiles may be halved. `small`: a small one, on
    a GPU. `handed`: as for `hopper_tile`.
    """
    if gpu is None:
        return host_tile(row_counts, n, k, options)
    tile = None
    if _takes_hopper(gpu, dtype, options.tf32):
        wanted = {"gathers": gathers, "small": small, "handed": handed}
        tile = hopper_tile(row_counts, n, options, gpu, k, **wanted)
    return tile or portable_tile(dtype, options, gpu.shared_bytes, small=small)
