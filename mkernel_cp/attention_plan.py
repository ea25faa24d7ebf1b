"""The plan of `ring_attention`: who holds which positions, and in which order who uses them.

Pure Python, as all plans.
"""

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from .arguments import Options
from .memory import round_up
from .plan import NodesPlan, choose_split, counted, network_agents
from .reference import array_split_counts
from .slots import network_bytes
from .tiles import LINK_RATE, Gpu
from .topology import LETTER_BYTES, Topology

LAYOUTS = ("contiguous", "zigzag")
COLUMNS = (64, 128, 256)  # of a head, that engines of GPUs are compiled for: others take the next
HOPPER_COLUMNS = (64, 96, 128, 256)
_HOPPER_NVRTC = 12, 8  # the oldest that compiles that engine well
MOST_COLUMNS = COLUMNS[-1]
MOST_COMPUTE_AGENTS = 1024
_ALIGNMENT = 256
# About how much is moved at a time: within a node, and between nodes, where each is a message.
_CHUNK_BYTES, _MESSAGE_BYTES = 1 << 15, 1 << 16
_WINDOW_BYTES = 1 << 26  # that a window takes unasked, if two units need no more
# So many blocks fill a link, and so many queries of a head of keys keep a GPU busy for about twice
# as long as the keys then take; where there are more, fewer movers will do. A mover of the engine
# `portable` has half a multiprocessor.
_MOST_MOVERS, _LEAST_MOVERS, _BUSY_QUERIES = 24, 4, 2048
# One of the engine `hopper` has all of a multiprocessor, which then does not compute. Bytes per
# second that it brings, and operations per second of one that computes: as on an H200.
_MOVER_RATE, _PROCESSOR_RATE = 18e9, 4.8e12


@dataclass(frozen=True)
class Run:
    """Positions that follow each other in the sequence, and at the rank that holds them.

    Attributes
    ----------
    source : int
        The rank.
    first, count : int
        Which of its positions.
    position : int
        Of the first, in the sequence.
    """

    source: int
    first: int
    count: int
    position: int


def _pairs(queries: Run, keys: Run, causal: bool) -> int:
    """Return how many keys the queries of a run see of another, all together."""
    if not causal:
        return queries.count * keys.count

    def seen_up_to(position: int) -> int:  # by queries from the first key's position on
        before = max(0, position - keys.position + 1)
        ramp = min(before, keys.count)
        return ramp * (ramp + 1) // 2 + (before - ramp) * keys.count

    return seen_up_to(queries.position + queries.count - 1) - seen_up_to(queries.position - 1)


def zigzag_counts(positions: int, ranks: int) -> tuple[int, ...]:
    """Return how many positions every rank holds in the layout 'zigzag'."""
    sizes = array_split_counts(positions, 2 * ranks)
    return tuple(sizes[rank] + sizes[-1 - rank] for rank in range(ranks))


@dataclass(frozen=True)
class Attention:
    """What all ranks must agree on, and what follows from it for each.

    Attributes
    ----------
    batch : int
    seq_counts : tuple of int
        Positions of every rank.
    heads, kv_heads, columns : int
        Of queries; of keys and values; of a head.
    dtype : numpy.dtype
    causal : bool
    scale : float
    layout : str
    max_workspace : int or None
        The most bytes of a rank's window.
    chunk_bytes : int or None
        About how much is moved at a time.
    nodes : tuple of int or None
        Ranks of each node; None: all on one.
    staged : bool
        Whether what goes between nodes passes through slots of host memory.
    """

    batch: int
    seq_counts: tuple[int, ...]
    heads: int
    kv_heads: int
    columns: int
    dtype: np.dtype
    causal: bool
    scale: float
    layout: str
    max_workspace: int | None = None
    chunk_bytes: int | None = None
    nodes: tuple[int, ...] | None = None
    staged: bool = False

    def __str__(self) -> str:
        """All of it, as the ranks compare it and errors show it."""
        asked = (("max_workspace", self.max_workspace), ("chunk_bytes", self.chunk_bytes))
        tail = "".join(f", {name}={value}" for name, value in asked if value is not None)
        return (
            f"ring_attention(B={self.batch}, seq_counts={list(self.seq_counts)}, Hq={self.heads}, "
            f"Hkv={self.kv_heads}, D={self.columns}, {self.dtype.name}, causal={self.causal}, "
            f"scale={self.scale!r}, layout={self.layout}{tail})"
        )

    @property
    def ranks(self) -> int:
        """How many there are."""
        return len(self.seq_counts)

    @property
    def units(self) -> int:
        """Heads of keys and values in all batch entries."""
        return self.batch * self.kv_heads

    def held_by(self, rank: int) -> tuple[Run, ...]:
        """Return the runs of positions that a rank holds, in its order."""
        if self.layout == "contiguous":
            sizes, pieces = self.seq_counts, (rank,)
        else:
            sizes = array_split_counts(sum(self.seq_counts), 2 * self.ranks)
            pieces = (rank, 2 * self.ranks - 1 - rank)
        runs, first = [], 0
        for piece in pieces:
            runs.append(Run(rank, first, sizes[piece], sum(sizes[:piece])))
            first += sizes[piece]
        return tuple(run for run in runs if run.count)

    def walk(self, rank: int) -> tuple[Run, ...]:
        """Return the runs of keys that a rank's queries see: own ones, then rank - 1's, ...

        Those of its node come first; then the ranks of a node begin at different ones.
        """
        own, topology = self.held_by(rank), self.topology(rank)
        last = max((run.position + run.count - 1 for run in own), default=-1)
        begin, local, size = topology.begin, topology.local_rank, topology.local_size
        near = [begin + (local - step) % size for step in range(size)]
        far = [(begin - 1 - step) % self.ranks for step in range(self.ranks - size)]
        runs = (run for source in near + far[local:] + far[:local] for run in self.held_by(source))
        return tuple(run for run in runs if own and not (self.causal and run.position > last))

    def pulled(self, rank: int) -> tuple[Run, ...]:
        """Return the part of the walk that lies at peers."""
        return tuple(run for run in self.walk(rank) if run.source != rank)

    def topology(self, rank: int) -> Topology:
        """Return the nodes, as a rank sees them."""
        return Topology(rank, self.nodes or (self.ranks,))

    def landing(self, rank: int) -> tuple[Run, ...]:
        """Return the runs that land in a rank's window.

        Those that it pulls, and those of other nodes that it passes on, as their gateway.
        """
        topology = self.topology(rank)
        wanted = (run for peer in topology.peers for run in self.pulled(peer))
        passed_on = (run for run in wanted if run.source in topology.sources)
        return tuple(dict.fromkeys((*self.pulled(rank), *passed_on)))

    def places(self, rank: int) -> dict[Run, int]:
        """Return the place of the runs that land at a rank, in a slot of its window."""
        runs = self.landing(rank)
        return {run: sum(before.count for before in runs[:i]) for i, run in enumerate(runs)}

    def leaving(self, rank: int) -> tuple[tuple[int, Run], ...]:
        """Return the gateways that a rank sends its runs to, each with a run."""
        gateways = self.topology(rank).gateways
        return tuple((to, run) for to in gateways for run in self.landing(to) if run.source == rank)

    def arriving(self, rank: int) -> tuple[Run, ...]:
        """Return the runs that come to a rank from other nodes, as their gateway."""
        sources = self.topology(rank).sources
        return tuple(run for run in self.landing(rank) if run.source in sources)

    def messages(self, runs: Iterable[Run]) -> list[int]:
        """Return the bytes of each chunk of the keys of some runs, in one unit."""
        line = self.columns * self.dtype.itemsize
        return [
            min(self.chunk, run.count - begin) * line
            for run in runs
            for begin in range(0, run.count, self.chunk)
        ]

    def pairs(self, rank: int, keys: Iterable[Run]) -> int:
        """Return how often a query of a head of this rank sees one of some keys."""
        return sum(_pairs(run, seen, self.causal) for run in self.held_by(rank) for seen in keys)

    def bytes_of(self, positions: int) -> int:
        """Return the bytes of the keys and values of one unit at so many positions."""
        return positions * 2 * self.columns * self.dtype.itemsize

    def slot_bytes(self, rank: int) -> int:
        """Return the bytes of a slot of a rank's window: what lands there of one unit."""
        return self.bytes_of(sum(run.count for run in self.landing(rank)))

    @functools.cached_property
    def window(self) -> int:
        """Slots of every rank's window; ValueError if `max_workspace` is too small for one."""
        slot = max(map(self.slot_bytes, range(self.ranks)))
        room = self.max_workspace
        if room is None:
            room = max(_WINDOW_BYTES, 2 * slot)
        if slot > room:
            raise ValueError(
                f"max_workspace={room}: this needs at least {slot} bytes, for the keys and values "
                "that one head sees at the peers; there are no passes over parts of a head yet"
            )
        return max(1, min(self.units, room // slot if slot else self.units))

    @property
    def chunk(self) -> int:
        """Positions of a chunk."""
        line = self.columns * self.dtype.itemsize
        nbytes = self.chunk_bytes or self.usual_chunk_bytes
        return max(1, min(nbytes // line, max(self.seq_counts)))

    @property
    def usual_chunk_bytes(self) -> int:
        """Bytes of a chunk where the caller does not choose them."""
        return _MESSAGE_BYTES if len(self.nodes or ()) > 1 else _CHUNK_BYTES

    def chunks(self, runs: Iterable[Run]) -> int:
        """Return in how many chunks the keys of some runs come; values come in as many."""
        return sum(-(-run.count // self.chunk) for run in runs)

    @functools.cached_property
    def first_chunks(self) -> dict[Run, int]:
        """The first chunk of the runs of every rank, by which all ranks call it."""
        runs = [run for rank in range(self.ranks) for run in self.held_by(rank)]
        return {run: self.chunks(runs[:i]) for i, run in enumerate(runs)}

    @property
    def unit_chunks(self) -> int:
        """Chunks of the keys, or of the values, of a unit of all ranks."""
        return self.chunks(run for rank in range(self.ranks) for run in self.held_by(rank))

    @property
    def chunks_between_nodes(self) -> int:
        """Chunks that may come over the network: those, and by node and unit the end of it."""
        return self.units * (2 * self.unit_chunks + len(self.nodes or ()))

    def arena_offsets(self, rank: int) -> tuple[int, int, int, int]:
        """Where a rank keeps things in the arena, in bytes.

        Returns
        -------
        tuple of int
            Of the window, at every rank the same; of the copies of its keys and of its values,
            which hold them if the caller's arrays are no segment's; the end. Before the first
            stands where these lie.
        """
        own = self.bytes_of(self.seq_counts[rank]) // 2 * self.units
        keys = _ALIGNMENT + round_up(self.window * self.slot_bytes(rank), _ALIGNMENT)
        values = keys + round_up(own, _ALIGNMENT)
        return _ALIGNMENT, keys, values, values + round_up(own, _ALIGNMENT)

    def signal_sizes(self) -> dict[str, int]:
        """Return the words of everything among the signals."""
        chunks, several = 2 * self.units * self.unit_chunks, len(self.nodes or ()) > 1
        return {
            "left": MOST_COMPUTE_AGENTS,
            "arrived": chunks,
            "heard": chunks if several else 0,
            "freed": self.ranks if several else 0,
        }

    def need(self) -> tuple[int, int]:
        """Return the signals and bytes of an arena that serves every rank."""
        signals = sum(self.signal_sizes().values())
        return signals, max(self.arena_offsets(rank)[-1] for rank in range(self.ranks))


@dataclass(frozen=True)
class RingAttentionPlan(NodesPlan):
    """The plan of `ring_attention` on one rank.

    Attributes
    ----------
    rank : int
    batch : int
    seq_counts : tuple of int
        Positions of the sequence on every rank.
    heads, kv_heads, columns : int
        Heads of queries; of keys and values; columns of a head (D).
    dtype, out_dtype : numpy.dtype
    causal : bool
    scale : float
    layout : str
    target, engine : str
    tile : tuple of int
        (queries, keys, columns) of what is computed at a time.
    chunk_bytes : int
        How much a mover was to bring at a time.
    chunk : int
        Positions that it does bring.
    max_workspace : int or None
        The most bytes that the window was to take.
    window : int
        Units whose keys and values may be here at a time.
    split : tuple of int
        (movers, compute): agents per role.
    shared_bytes : int
        Scratch memory of an agent.
    nodes : tuple of int
        Ranks of each node.
    staged : bool
        Whether what goes between them passes through slots of host memory.

    Notes
    -----
    Loaded from a file, `options` and `max_workspace` make an operator choose the same again.
    """

    operator: ClassVar[str] = "ring_attention"

    rank: int
    batch: int
    seq_counts: tuple[int, ...]
    heads: int
    kv_heads: int
    columns: int
    dtype: np.dtype
    out_dtype: np.dtype
    causal: bool
    scale: float
    layout: str
    target: str
    engine: str
    tile: tuple[int, int, int]
    chunk_bytes: int
    chunk: int
    max_workspace: int | None
    window: int
    split: tuple[int, int]
    shared_bytes: int
    nodes: tuple[int, ...]
    staged: bool

    @property
    def attention(self) -> Attention:
        """What the ranks have agreed on."""
        return Attention(
            batch=self.batch,
            seq_counts=self.seq_counts,
            heads=self.heads,
            kv_heads=self.kv_heads,
            columns=self.columns,
            dtype=self.dtype,
            causal=self.causal,
            scale=self.scale,
            layout=self.layout,
            max_workspace=self.max_workspace,
            chunk_bytes=self.chunk_bytes,
            nodes=self.nodes,
            staged=self.staged,
        )

    @property
    def workspace(self) -> int:
        """Bytes of the window."""
        return self.window * self.attention.slot_bytes(self.rank)

    @property
    def bytes_from_peers(self) -> int:
        """Bytes that this rank pulls in one call from the ranks of its node."""
        agreed, holders = self.attention, self.topology.holders
        runs = (run for run in agreed.pulled(self.rank) if holders[run.source] != self.rank)
        return agreed.units * agreed.bytes_of(sum(run.count for run in runs))

    @property
    def bytes_to_network(self) -> int:
        """Bytes that this rank sends to other nodes in one call: what each needs, and letters."""
        agreed, topology = self.attention, self.topology
        leaving = [run for _, run in agreed.leaving(self.rank)]
        chunks = agreed.messages(leaving), agreed.messages(agreed.arriving(self.rank))
        freed = ([LETTER_BYTES] * len(peers) for peers in (topology.sources, topology.gateways))
        sent = 2 * agreed.units * network_bytes(self.staged, *chunks)
        told = max(0, agreed.units - self.window) * network_bytes(self.staged, *freed)
        return sent + told + topology.letter_bytes

    @property
    def options(self) -> Options:
        """What makes an operator choose this plan again."""
        return Options(self.split, self.tile, self.chunk_bytes)

    @property
    def memory(self) -> int:
        """Bytes that this rank shares with its peers for it: window, copies and signals."""
        signals, nbytes = self.attention.need()
        return nbytes + 8 * signals

    def explain(self) -> str:
        """Return the plan in words, one choice a line."""
        movers, compute = self.split
        nbytes = self.chunk * self.columns * self.dtype.itemsize
        return "\n".join(
            (
                f"ring_attention: ({self.batch}, {sum(self.seq_counts)}, {self.heads}, "
                f"{self.columns}) over {self.kv_heads} heads of keys and values, {self.dtype.name}"
                f"{', causal' if self.causal else ''}, rank {self.rank} of "
                f"{len(self.seq_counts)}, {self.layout} positions {list(self.seq_counts)}",
                f"target {self.target}, engine {self.engine}: tile {self.tile}, "
                f"{counted(compute, 'compute agent')}",
                f"{self.bytes_from_peers} bytes to this rank in chunks of {self.chunk} positions "
                f"({nbytes} bytes) by {counted(movers, 'mover')}, into a window of {self.window} "
                f"of {counted(self.attention.units, 'unit')} ({self.workspace} bytes)",
                *self._between_nodes(self.topology.gateways),
            )
        )


@dataclass(frozen=True)
class HostAttentionTile:
    """What engine/attention_host.cuh computes at a time.

    Attributes
    ----------
    tile : tuple of int
        (queries, keys, columns).
    """

    tile: tuple[int, int, int]

    engine: ClassVar[str] = "host"
    cluster: ClassVar[int] = 1
    moves: ClassVar[bool] = False

    def shared_bytes(self, dtype: np.dtype) -> int:
        """Return what QueryRows carves up."""
        queries, keys, columns = self.tile
        accumulators = 2 * queries * columns + queries * keys + keys * columns + 2 * queries
        return accumulators * max(4, dtype.itemsize) + queries * columns * dtype.itemsize

    def defines(self, dtype: np.dtype) -> dict[str, int]:
        """Return no macros: the tile is a run-time value."""
        return {}


@dataclass(frozen=True)
class PortableAttentionTile:
    """What engine/attention_portable.cuh is compiled with.

    Attributes
    ----------
    tile : tuple of int
        (queries, keys, columns).
    stages : int
        Panels of keys or values in flight.
    """

    tile: tuple[int, int, int]
    stages: int

    engine: ClassVar[str] = "portable"
    cluster: ClassVar[int] = 1
    moves: ClassVar[bool] = False

    def shared_bytes(self, dtype: np.dtype) -> int:
        """Return the shared memory of a thread block: queries, panels, and what else there is."""
        queries, keys, columns = self.tile
        return (queries + self.stages * keys) * _padded(columns) * dtype.itemsize + 2048

    def defines(self, dtype: np.dtype) -> dict[str, int]:
        """Return the macros that say so."""
        names = "MK_TILE_ROWS", "MK_TILE_COLUMNS", "MK_TILE_K", "MK_STAGES"
        queries, keys, columns = self.tile
        return dict(zip(names, (queries, keys, _padded(columns), self.stages), strict=True))


@dataclass(frozen=True)
class HopperAttentionTile:
    """What engine/attention_hopper.cuh is compiled with.

    Attributes
    ----------
    tile : tuple of int
        (queries, keys, columns).
    stages : int
        Panels of keys or values in flight.
    """

    tile: tuple[int, int, int]
    stages: int

    engine: ClassVar[str] = "hopper"
    cluster: ClassVar[int] = 1
    moves: ClassVar[bool] = False
    strip: ClassVar[int] = 64  # queries of a consumer

    def shared_bytes(self, dtype: np.dtype) -> int:
        """Return the shared memory of a thread block: queries, panels, and what else there is."""
        queries, keys, columns = self.tile
        line = round_up(_padded(columns, HOPPER_COLUMNS), 64) * dtype.itemsize
        return (queries + self.stages * keys) * line + 1024

    def defines(self, dtype: np.dtype) -> dict[str, int]:
        """Return the macros that say so."""
        queries, keys, columns = self.tile
        return {
            "MK_ENGINE_HOPPER": 1,
            "MK_THREADS": 384,
            "MK_TILE_ROWS": queries,
            "MK_TILE_COLUMNS": keys,
            "MK_TILE_K": _padded(columns, HOPPER_COLUMNS),
            "MK_STAGES": self.stages,
            # Movers copy by registers: it takes less time than by way of shared memory.
            "MK_BULK_COPIES": 0,
            "MK_LOADS": 10,  # they have registers for about so many
        }


def _padded(columns: int, extents: tuple[int, ...] = COLUMNS) -> int:
    """Return how many columns an engine is compiled for that takes those of a head."""
    return next(extent for extent in extents if extent >= columns)


def hopper_attention_tile(columns: int, shared_bytes: int) -> HopperAttentionTile:
    """Return what engine/attention_hopper.cuh takes: as many panels as there is room for.

    Sums of 256 columns leave a thread registers for the scores of 64 keys, else it has those of
    128.
    """
    queries, keys = 128, 64 if columns > 128 else 128
    line = round_up(_padded(columns, HOPPER_COLUMNS), 64) * 2
    stages = (shared_bytes - 1024) // line - queries
    return HopperAttentionTile((queries, keys, columns), min(8, stages // keys))


def portable_attention_tile(
    columns: int, dtype: np.dtype, shared_bytes: int
) -> PortableAttentionTile:
    """Return what engine/attention_portable.cuh takes, for a GPU with so much memory per block.

    AttentionTiling there says the same. Two blocks on a multiprocessor go before many stages.
    """
    line = _padded(columns) * dtype.itemsize
    if dtype.itemsize == 2:
        queries, keys = 128 if line <= 256 else 64, 64
    else:
        queries, keys = 16 if line > 1024 else 64, 32 if line <= 512 else 16
    choices = [PortableAttentionTile((queries, keys, columns), stages) for stages in (4, 3, 2)]
    room = shared_bytes // 2 - 1024  # of which a block takes 1024 unasked
    fits = (choice for choice in choices if choice.shared_bytes(dtype) <= room)
    return next(fits, choices[-1])


def attention_tiles(dtype: np.dtype, gpu: Gpu) -> list[PortableAttentionTile | HopperAttentionTile]:
    """Return a tile for each kernel that some head makes a GPU take."""
    tiles: list[Any] = [portable_attention_tile(n, dtype, gpu.shared_bytes) for n in COLUMNS]
    if _has_hopper(dtype, gpu):
        tiles += [hopper_attention_tile(n, gpu.shared_bytes) for n in HOPPER_COLUMNS]
    return tiles


def _has_hopper(dtype: np.dtype, gpu: Gpu) -> bool:
    """Return whether there is the engine `hopper`.

    For an older NVRTC its consumers have too few registers: their multiplies would not overlap.
    """
    return gpu.arch == "sm_90a" and dtype.itemsize == 2 and gpu.nvrtc >= _HOPPER_NVRTC


def choose_attention_tile(
    rank: int, attention: Attention, options: Options, gpu: Gpu | None
) -> HostAttentionTile | PortableAttentionTile | HopperAttentionTile:
    """Choose the engine and its tile, for a GPU or for the host target.

    The engine `hopper` reads lines of multiples of 16 bytes.

    Raises
    ------
    ValueError
        If the options ask for a tile that the engine cannot take.
    """
    columns, all_columns = attention.columns, "attention takes all columns of a head at a time"
    if gpu is None:
        queries, keys, depth = options.tile or (64, 64, columns)
        if depth != columns:
            raise ValueError(
                f"Options(tile={options.tile}): {all_columns}; use {(queries, keys, columns)}"
            )
        most = max(attention.seq_counts, default=0)
        queries = min(queries, max(1, attention.seq_counts[rank]))
        return HostAttentionTile((queries, min(keys, max(1, most)), columns))
    portable = portable_attention_tile(columns, attention.dtype, gpu.shared_bytes)
    choices: list[Any] = [portable]
    if _has_hopper(attention.dtype, gpu) and columns % 8 == 0:
        choices.insert(0, hopper_attention_tile(columns, gpu.shared_bytes))
    for chosen in choices:
        if options.tile in (None, chosen.tile):
            return chosen
    raise ValueError(
        f"Options(tile={options.tile}): {all_columns}, and for {attention.dtype.name} and "
        f"D={columns} a GPU takes {' or '.join(str(chosen.tile) for chosen in choices)}"
    )


def _hopper_movers(rank: int, attention: Attention, tiles: int, capacity: int) -> int:
    """Return with how many movers a call should take the least time.

    Agents take equal turns, and wait where keys are not here: in the beginning, when they have
    done with own ones, for all units that they are at, and for the movers where these are slower.
    """
    operations = 4 * attention.columns * attention.heads * attention.batch
    pulled = attention.pulled(rank)
    unit_bytes = attention.bytes_of(sum(run.count for run in pulled))
    own = operations * attention.pairs(rank, attention.held_by(rank))
    work = own + operations * attention.pairs(rank, pulled)
    if not work:
        return 1

    def seconds(movers: int) -> float:
        agents, rate = max(1, capacity - movers), min(LINK_RATE, movers * _MOVER_RATE)
        units = max(1, min(attention.units, agents * attention.units / tiles))  # at a time
        turn = work / tiles / _PROCESSOR_RATE
        late = units * unit_bytes / rate - turn * own / work
        computing = math.ceil(tiles / agents) * turn + max(0, late)
        return max(computing, attention.units * unit_bytes / rate)

    return min(range(min(2, max(1, capacity - 1)), max(3, capacity // 4)), key=seconds)


def plan_ring_attention(
    rank: int,
    attention: Attention,
    options: Options,
    gpu: Gpu | None = None,
    capacity: int = 0,
) -> RingAttentionPlan:
    """Choose a plan: for a GPU that runs `capacity` agents at a time, or for the host target.

    On the host target, two compute agents at most: see `plan_allgather_gemm`.
    """
    chosen = choose_attention_tile(rank, attention, options, gpu)
    nodes = attention.nodes or (attention.ranks,)
    blocks = sum(math.ceil(run.count / chosen.tile[0]) for run in attention.held_by(rank))
    tiles = blocks * attention.heads * attention.batch
    if chosen.engine == "hopper":
        movers = _hopper_movers(rank, attention, tiles, capacity)
    else:
        queries = max(1, attention.seq_counts[rank] * (attention.heads // attention.kv_heads))
        hurry = 4 if attention.causal else 1  # half as much is multiplied; twice that was faster
        needed = hurry * _MOST_MOVERS * _BUSY_QUERIES // queries
        movers = max(_LEAST_MOVERS, min(_MOST_MOVERS, needed))
    movers = max(1, min(movers, 2 * attention.chunks(attention.pulled(rank))))
    if attention.ranks > 1 and options.split and options.split[0] == 0:
        raise ValueError(
            f"Options(split={options.split}): ring_attention needs movers of their own, which wait "
            "until those who compute have made room; use at least 1"
        )
    split = choose_split(
        *(chosen, attention.ranks, tiles, movers, options),
        min(capacity - network_agents(nodes), MOST_COMPUTE_AGENTS),
    )
    return RingAttentionPlan(
        rank=rank,
        batch=attention.batch,
        seq_counts=attention.seq_counts,
        heads=attention.heads,
        kv_heads=attention.kv_heads,
        columns=attention.columns,
        dtype=attention.dtype,
        out_dtype=attention.dtype,
        causal=attention.causal,
        scale=attention.scale,
        layout=attention.layout,
        target="cuda" if gpu else "host",
        engine=chosen.engine,
        tile=chosen.tile,
        chunk_bytes=attention.chunk_bytes or attention.usual_chunk_bytes,
        chunk=attention.chunk,
        max_workspace=attention.max_workspace,
        window=attention.window,
        split=split,
        shared_bytes=chosen.shared_bytes(attention.dtype),
        nodes=nodes,
        staged=attention.staged,
    )
