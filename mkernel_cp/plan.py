"""Plans: every choice that is made for an operator, its shape, dtype and world, before it runs.

Pure Python: a plan can be made, printed and tested without a device or a compiler.
"""

import json
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import numpy as np

from .arguments import Options
from .memory import round_up
from .reference import accumulator_dtype
from .slots import parcels, slot_bytes
from .tiles import (
    LINK_RATE,
    MOVERS,
    PROCESSOR_RATE,
    SMALL_COLUMNS,
    Gpu,
    HopperTile,
    HostTile,
    PortableTile,
    bringing,
    choose_tile,
    halved,
)
from .topology import Topology

_LINE_ALIGNMENT = 128
_CHUNK_BYTES, _LEAST_CHUNK_BYTES = 1 << 16, 1 << 13
_CHUNKS = 1024  # or more, if they are large
_CHUNK_LINE, _CHUNK_LINES = 2048, 32  # bytes of a line of a chunk, and at most so many lines


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
                plan = cls(**values)
                _ = plan.options  # what they refuse, an operator would
                return plan
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
            f"{counted(self.split[1], 'compute agent')}{clusters}",
        )

    def _movers(self) -> str:
        movers = self.split[0]
        return counted(movers, "mover") if movers else "a part of each compute agent"


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
    gathered : bool
        All rows come together before they are multiplied, in tiles of those of any ranks.
    """

    operator: ClassVar[str] = "allgather_gemm"

    by_columns: bool
    chunk_bytes: int
    chunk: tuple[int, int]
    phase_k: int
    whole_tiles: int
    gathered: bool

    def chunks(self, rank: int) -> int:
        """Return in how many chunks the rows of a rank come."""
        rows, k = self.chunk
        return -(-self.row_counts[rank] // rows) * -(-self.k // k)

    def pitch(self, rank: int) -> int:
        """Return the bytes between lines of a rank's rows in the arena."""
        return line_pitch(self.row_counts[rank] if self.by_columns else self.k, self.dtype)

    def arena_offsets(self) -> tuple[int, ...]:
        """Where the rows of every rank lie in the arena, in bytes, and the end of the last.

        The place of this rank's own rows holds them if the caller's array is no segment's, or if
        all are gathered.
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
        nbytes = math.prod(self.chunk) * self.dtype.itemsize
        return "\n".join(
            (
                *self._heading(),
                f"A travels in {'F' if self.by_columns else 'C'} order, "
                f"{self.bytes_from_peers} bytes to this rank in chunks of {self.chunk} "
                f"({nbytes} bytes) by {self._movers()}",
                *(["its few rows are multiplied when all are here"] if self.gathered else []),
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
    words : int
        Words of data that are their own signals, likewise.
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
    words: int
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
        return size * round_up(self.n, _TOLD_COLUMNS[self.engine])

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
        """Bytes that this rank shares with its peers for it: slots and signals, or words."""
        return 8 * self.words + sum(slots * (size + 8) for slots, size in self.zones)

    def explain(self) -> str:
        """Return the plan in words, one choice a line."""
        rings = " and then ".join(", ".join(map(str, ring)) for ring in self.topology.rings)
        order = "ranks from the owner of a row on" if self.low_latency else f"ranks {rings}"
        stripes = f"{counted(self.stripes, 'stripe')} of {self.stripe_columns} columns"
        return "\n".join(
            (
                *self._heading(),
                f"partial sums {'are brought' if self.pulled else 'travel'} as "
                f"{self.transfer_dtype.name} and are added in the order of "
                f"{order}; {self.bytes_from_peers} bytes come to this rank, into "
                f"{self.memory} bytes of {'words' if self.low_latency else 'slots'}",
                *self._between_nodes(self.receivers),
                "they travel with low latency: each word is its own signal"
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


def counted(count: int, what: str) -> str:
    """Return how many there are of something, in words."""
    return f"{count} {what}{'s' * (count != 1)}"


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
    ranks = len(row_counts)
    nodes = nodes or (ranks,)
    tiled = tiled_rows(row_counts, n, k, dtype, gpu, nodes, by_columns=by_columns)
    chosen = choose_tile(tiled, n, k, dtype, options, gpu, gathers=True)
    gathered = tiled != row_counts
    tiles = sum(tile_counts(tiled, n, chosen.tile))
    chunks = math.ceil(max(row_counts) / chunk[0]) * math.ceil(k / chunk[1])
    capacity -= network_agents(nodes, chosen.cluster)
    work = tiles
    if chosen.moves and ranks > 1 and not chosen.movers:
        work = max(tiles, chunks)
    elif chosen.moves and ranks > 1 and options.split is None:
        cluster = chosen.cluster
        left = capacity - max(1, tiles) * cluster  # the network may have taken some
        movers = min(chosen.movers, left, chunks) // cluster * cluster
        chosen = replace(chosen, movers=max(cluster, movers))
    split = choose_split(chosen, ranks, work, min(MOVERS, chunks), options, capacity)
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
        phase_k=_phase_k(
            *(k, chunk, row_counts, split),
            not gathered and 4 * tiles * chosen.cluster <= 5 * split[1],
        ),
        whole_tiles=tiles - halved(tiles, chosen, split[1]),
        gathered=gathered,
        nodes=nodes,
        staged=staged,
        split=split,
        shared_bytes=chosen.shared_bytes(dtype, out_dtype),
        tf32=options.tf32,
    )


# Of B, what the L2 cache keeps until it is wanted again, and bytes per second of what it does not.
_CACHED_BYTES, _MEMORY_RATE = 25e6, 4e12
_GATHERING_S = 5e-6  # until rows come, that nothing hides if all are awaited
_REREADING_S = 8e-6  # of B, that costs sums nothing: others travel meanwhile


def gathers_first(
    row_counts: tuple[int, ...],
    n: int,
    k: int,
    dtype: np.dtype,
    gpu: Gpu | None,
) -> bool:
    """Return whether all rows are to be here before they are multiplied, and then together."""
    incoming = (sum(row_counts) - min(row_counts)) * k * dtype.itemsize
    return _rereading_s(row_counts, n, k, dtype, gpu) > _GATHERING_S + incoming / LINK_RATE


def _rereading_s(
    row_counts: tuple[int, ...], n: int, k: int, dtype: np.dtype, gpu: Gpu | None
) -> float:
    """Return how much longer products of each rank's rows take one by one than all together.

    For each B is read anew, which takes longer than to multiply few rows.
    """
    b_bytes = k * n * dtype.itemsize
    if gpu is None or b_bytes <= _CACHED_BYTES:
        return 0
    memory = b_bytes / _MEMORY_RATE
    each = [2 * rows * k * n / (gpu.processors * PROCESSOR_RATE) for rows in row_counts]
    return sum(max(memory, seconds) for seconds in each if seconds) - max(memory, sum(each))


def tiled_rows(
    row_counts: tuple[int, ...],
    n: int,
    k: int,
    dtype: np.dtype,
    gpu: Gpu | None,
    nodes: tuple[int, ...],
    *,
    by_columns: bool,
) -> tuple[int, ...]:
    """Return the rows of each rank as they are tiled: those of all as one's, if all come first.

    In F order those of each rank lie by themselves.
    """
    apart = by_columns or len(nodes) > 1 or len(row_counts) == 1
    if apart or not gathers_first(row_counts, n, k, dtype, gpu):
        return row_counts
    return (sum(row_counts), *(0,) * (len(row_counts) - 1))


def network_agents(nodes: tuple[int, ...], cluster: int = 1, adding: int = 0) -> int:
    """Return how many agents serve the network, beside some that add: whole clusters with them."""
    return 0 if len(nodes) == 1 else round_up(adding + 2, cluster) - adding


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


# Columns that low_latency.cuh tells together, as the engines have them.
_TOLD_COLUMNS = {"host": 8, "portable": 8, "hopper": 32}
# What it takes that partial sums are known to be there, and totals.
_HANDOVER_S = 5e-6, 7.5e-6


def has_low_latency(
    kind: type["GemmReduceScatterPlan"],
    row_counts: tuple[int, ...],
    n: int,
    out_dtype: np.dtype,
    transfer_dtype: np.dtype,
    tile: HostTile | PortableTile | HopperTile,
    gpu: Gpu | None,
    k: int,
    dtype: np.dtype,
) -> bool:
    """Return whether sums are to travel in words that are their own signals.

    Nobody has to find out that these are there, and rows of all ranks are multiplied together. But
    they take longer than copies of as many bytes, and in each wave of tiles all wait for each
    other.
    """
    peers, size, saved = len(row_counts) - 1, transfer_dtype.itemsize, _HANDOVER_S[0]
    (tiles,) = tile_counts((sum(row_counts),), n, tile.tile)
    waves = math.ceil(tiles * tile.cluster / gpu.processors) if gpu else 1
    if peers == 0 or tiles == 0 or (tile.engine == "hopper" and tile.tile[1] > SMALL_COLUMNS):
        return False
    if kind is GemmAllReducePlan:
        size, saved = size + out_dtype.itemsize, sum(_HANDOVER_S)
    saved += max(0, _rereading_s(row_counts, n, k, dtype, gpu) - _REREADING_S)
    return peers * max(row_counts) * n * size / LINK_RATE < saved / waves


def told_words(
    kind: type["GemmReduceScatterPlan"],
    row_counts: tuple[int, ...],
    n: int,
    out_dtype: np.dtype,
    transfer_dtype: np.dtype,
    tile: tuple[int, int, int],
) -> int:
    """Return the words that sums with low latency take: partial sums of all peers, and sums."""
    size = (len(row_counts) - 1) * transfer_dtype.itemsize
    size += out_dtype.itemsize if kind is GemmAllReducePlan else 0
    return told_elements(row_counts, n, tile) * size // 8


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
    multiplying = 2 * k / (gpu.processors * PROCESSOR_RATE)  # of an element of the result
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
        words=told_words(kind, row_counts, n, out_dtype, transfer_dtype, chosen.tile)
        if low_latency
        else 0,
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
    call, so none is waited for. With low latency there is none. Between nodes the last three are
    what a rank adds of others' rows, what leaves its node of them, and what comes from the other
    nodes.
    """
    if low_latency:
        return ((0, 0),)
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
