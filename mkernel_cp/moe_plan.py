"""Plans of the operators on experts: who has which, and where tables, tokens and rows lie.

Pure Python, as all plans.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar

import numpy as np

from .arguments import Options
from .memory import offsets_of, round_up
from .plan import NodesPlan, choose_split, counted, inter_reduce, line_pitch, network_agents
from .reference import accumulator_dtype, array_split_counts
from .slots import network_bytes
from .tiles import (
    MOVERS,
    Gpu,
    HopperTile,
    HostTile,
    PortableTile,
    default_tile,
    hopper_group_tile,
    hopper_group_tiles,
    portable_tile,
    takes_group_tile,
)
from .topology import Topology

MOST_AGENTS = 1024
_ALIGNMENT = 256
_CHUNK_BYTES = 1 << 16
_ALIGNED_ELEMENTS = 8  # of 16 bits, as tensor copies want lines
_WORD = 8
_SHARE_BYTES, _SUMMARY_BYTES, _ROUTE_BYTES, _DELIVERY_BYTES = 16, 24, 24, 48  # structs of types.cuh
_ROW_BYTES = 16  # struct Routing::Row of experts.cuh
# Words of bits that agents sort with: for each expert, and for all together.
_SORT_WORDS = 16, 1 << 13


@dataclass(frozen=True)
class Dispatch:
    """What all ranks must agree on to send tokens to experts, and what follows from it for each.

    Attributes
    ----------
    ranks : int
    h : int
        Columns of a token.
    n : int
        Columns that an expert makes of them.
    experts : int
        Of all ranks.
    slots : int
        Experts that a token may want (k).
    dtype, out_dtype : numpy.dtype
    max_tokens : int or None
        The most tokens of a rank; None as long as the ranks have not told each other.
    capacity : int or None
        Rows of every rank's result; None: as many as it may get.
    chunk_bytes : int or None
        About how much is moved at a time.
    nodes : tuple of int or None
        Ranks of each node; None: all on one.
    staged : bool
        Whether what goes between nodes passes through slots of host memory.
    weighted : bool
        Whether weights of its tokens go with what a rank tells of them.
    """

    ranks: int
    h: int
    n: int
    experts: int
    slots: int
    dtype: np.dtype
    out_dtype: np.dtype
    max_tokens: int | None
    capacity: int | None = None
    chunk_bytes: int | None = None
    nodes: tuple[int, ...] | None = None
    staged: bool = False
    weighted: bool = False

    def __str__(self) -> str:
        """All of it, as the ranks compare it and errors show it."""
        chunk = "" if self.chunk_bytes is None else f", chunk_bytes={self.chunk_bytes}"
        return (
            f"moe_dispatch_gemm(H={self.h}, I={self.n}, num_experts={self.experts}, "
            f"k={self.slots}, {self.dtype.name} -> {self.out_dtype.name}, "
            f"max_tokens={self.max_tokens}, capacity={self.capacity}{chunk})"
        )

    @property
    def experts_of(self) -> tuple[int, ...]:
        """How many experts each rank has."""
        return array_split_counts(self.experts, self.ranks)

    @property
    def products(self) -> tuple[tuple[int, int], ...]:
        """(columns, k) of the product."""
        return ((self.n, self.h),)

    @property
    def capacities(self) -> tuple[int, ...]:
        """Rows of each rank's result."""
        if self.capacity is not None:
            return (self.capacity,) * self.ranks
        most = self.ranks * self.max_tokens
        return tuple(most * min(self.slots, experts) for experts in self.experts_of)

    @property
    def pitch(self) -> int:
        """Bytes from one token to the next where it lands."""
        return line_pitch(self.h, self.dtype)

    @property
    def chunk_tokens(self) -> int:
        """Tokens of a chunk."""
        line = max(1, self.h * self.dtype.itemsize)
        return max(1, min((self.chunk_bytes or _CHUNK_BYTES) // line, self.max_tokens))

    @property
    def chunks(self) -> int:
        """In how many chunks the tokens of a rank come, at the most."""
        return math.ceil(self.max_tokens / self.chunk_tokens)

    def first_chunks(self, split: Sequence[int]) -> int:
        """Return how many chunks of each peer compute agents bring, one each at the most.

        In the beginning all wait for the tokens of a few experts, which movers alone bring late.
        """
        movers, compute, *_ = split
        if movers == 0 or self.ranks == 1 or self.several_nodes:
            return 0
        return min(self.chunks, compute // (self.ranks - 1))

    def arena_sizes(self) -> dict[str, int]:
        """Return the bytes of everything in the arena of every rank.

        The place of a rank's own tokens among those that land holds them if the caller's array is
        no segment's.
        """
        experts, starts = max(self.experts_of), (self.experts + 1) * _SHARE_BYTES
        return {
            **self.table_sizes(),
            "known": self.ranks * starts,
            "said": self.ranks * _SUMMARY_BYTES,
            "totals": self.ranks * _WORD,
            "deliveries": experts * self.ranks * _DELIVERY_BYTES,
            "list": self.ranks * self.max_tokens * 4,
            "places": max(self.capacities) * _WORD,
            "landing": self.ranks * self.max_tokens * self.pitch,
            **(self._node_sizes() if self.several_nodes else {}),
        }

    def table_sizes(self) -> dict[str, int]:
        """Return the bytes of what a rank tells of its tokens, which begins the arena.

        What stands before `routes` all agree by, before tokens move.
        """
        return {
            "summary": _SUMMARY_BYTES,
            "starts": (self.experts + 1) * _SHARE_BYTES,
            "crossing": len(self.nodes) * _WORD if self.several_nodes else 0,
            "weights": _weight_bytes(self) if self.weighted else 0,
            "routes": self.max_tokens * self.slots * _ROUTE_BYTES,
            "tokens": self.max_tokens * min(self.slots, self.ranks) * 4,
        }

    @property
    def head_bytes(self) -> int:
        """Bytes of the tables that all agree by."""
        return offsets_of(self.table_sizes())["routes"]

    def bytes_to_network(self, rank: int, id_blocks: Sequence[np.ndarray]) -> int:
        """Return the bytes that a rank sends to other nodes in a call, for all ranks' choices."""
        topology = Topology(rank, self.nodes or (self.ranks,))
        nodes = map(topology.node_of, topology.gateways)
        sent = (self._messages(id_blocks[rank], node) for node in nodes)
        received = (self._messages(id_blocks[source], topology.node) for source in topology.sources)
        messages = (list(chain.from_iterable(each)) for each in (sent, received))
        return network_bytes(self.staged, *messages) + topology.letter_bytes

    def _messages(self, ids: np.ndarray, node: int) -> list[int]:
        """Return the bytes of all that a rank sends to another node, for its tokens' choices.

        What all agree by; and if any row is made there, a route for each of them, their places for
        each rank that needs them, and chunk by chunk the tokens, once.
        """
        chosen, ranks = _chosen(self, self.experts, ids), _ranks_of(self, node)
        there = np.isin(chosen, ranks)
        if not there.any():
            return [self.head_bytes]
        listed = sum(int((chosen == peer).any(axis=1).sum()) for peer in ranks)
        tokens = int(there.any(axis=1).sum())
        chunks = [
            min(self.chunk_tokens, tokens - begin) * self.h * self.dtype.itemsize
            for begin in range(0, tokens, self.chunk_tokens)
        ]
        return [self.head_bytes, int(there.sum()) * _ROUTE_BYTES, listed * 4, *chunks]

    def _node_sizes(self) -> dict[str, int]:
        """Return the bytes of what a rank sends to other nodes and gets from them."""
        others, tables = len(self.nodes) - 1, self.table_sizes()
        tokens = self.max_tokens * self.h * self.dtype.itemsize
        return {
            "crossing_list": tables["tokens"],
            "place_of": self.max_tokens * 4,
            "order": others * self.max_tokens * 4,
            "mirrors": self.ranks * offsets_of(tables)["end"],
            "leaving": others * tokens,
            "landed": self.ranks * tokens,
        }

    @property
    def several_nodes(self) -> bool:
        """Whether there is more than one node."""
        return len(self.nodes or ()) > 1

    @property
    def parts(self) -> int:
        """Parts in which what a rank sends comes to another node: see Crossing of experts.cuh."""
        return 3 + self.chunks

    def signal_sizes(self) -> dict[str, int]:
        """Return the words of everything among the signals."""
        return {
            "routed": 1,
            "told": MOST_AGENTS,
            "arrived": self.ranks * self.chunks,
            "placed": max(self.experts_of) * self.ranks,
            "heard": self.ranks * self.parts if self.several_nodes else 0,
        }

    def need(self) -> tuple[int, int]:
        """Return the signals and bytes of an arena that serves every rank."""
        return offsets_of(self.signal_sizes(), 1)["end"], offsets_of(self.arena_sizes())["end"]

    @property
    def sorted_tokens(self) -> int:
        """Tokens that an agent sorts at a time."""
        each, all_together = _SORT_WORDS
        words = max(1, min(each, all_together // (self.experts + 1)))
        return max(1, 32 * words // max(1, self.slots))

    @property
    def sort_bytes(self) -> int:
        """Scratch memory of an agent that sorts, or finds out what comes: see experts.cuh."""
        experts, rows = self.experts + 1, self.sorted_tokens * self.slots
        desk = experts * (3 * _SHARE_BYTES + 4 * math.ceil(rows / 32)) + rows * _ROW_BYTES
        return max(desk, 2 * max(self.experts_of) * self.ranks * _WORD)


@dataclass(frozen=True)
class MoeDispatchGemmPlan(NodesPlan):
    """The plan of `moe_dispatch_gemm` on one rank.

    Attributes
    ----------
    rank, ranks : int
    h, n : int
        Columns of a token, and of a row of the result.
    num_experts, slots : int
        Experts of all ranks, and those that a token may want (k).
    dtype, out_dtype : numpy.dtype
    max_tokens : int
        The most tokens that a rank may pass.
    max_capacity : int or None
        Rows of a result that were asked for.
    target, engine : str
    tile : tuple of int
        (rows, columns, k) of what is computed at a time.
    row_step : int
        Of how many rows a tile has a multiple, if it may have fewer; or 0.
    chunk_bytes : int
        How much a mover was to bring at a time.
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
    Loaded from a file, `options` make an operator choose the same again.
    """

    operator: ClassVar[str] = "moe_dispatch_gemm"

    rank: int
    ranks: int
    h: int
    n: int
    num_experts: int
    slots: int
    dtype: np.dtype
    out_dtype: np.dtype
    max_tokens: int
    max_capacity: int | None
    target: str
    engine: str
    tile: tuple[int, int, int]
    row_step: int
    chunk_bytes: int
    split: tuple[int, int]
    shared_bytes: int
    nodes: tuple[int, ...]
    staged: bool

    @property
    def dispatch(self) -> Dispatch:
        """What the ranks have agreed on."""
        return Dispatch(
            ranks=self.ranks,
            h=self.h,
            n=self.n,
            experts=self.num_experts,
            slots=self.slots,
            dtype=self.dtype,
            out_dtype=self.out_dtype,
            max_tokens=self.max_tokens,
            capacity=self.max_capacity,
            chunk_bytes=self.chunk_bytes,
            nodes=self.nodes,
            staged=self.staged,
        )

    @property
    def experts(self) -> int:
        """Experts of this rank."""
        return self.dispatch.experts_of[self.rank]

    @property
    def capacity(self) -> int:
        """Rows of this rank's result."""
        return self.dispatch.capacities[self.rank]

    @property
    def options(self) -> Options:
        """What makes an operator choose this plan again."""
        return Options(self.split, self.tile, self.chunk_bytes)

    @property
    def memory(self) -> int:
        """Bytes that this rank shares with its peers for it: tables, landing zone, signals."""
        signals, nbytes = self.dispatch.need()
        return nbytes + 8 * signals

    def explain(self) -> str:
        """Return the plan in words, one choice a line."""
        movers, compute = self.split
        agreed = self.dispatch
        first = agreed.first_chunks(self.split)
        besides = f", the first {first} of each peer by compute agents" if first else ""
        return "\n".join(
            (
                f"moe_dispatch_gemm: up to {self.max_tokens} tokens a rank of {self.h} columns to "
                f"{self.slots} of {self.num_experts} experts, {self.experts} of them here, each "
                f"({self.h}, {self.n}) {self.dtype.name} -> {self.out_dtype.name}, rank "
                f"{self.rank} of {self.ranks}, {self.capacity} rows at the most",
                f"target {self.target}, engine {self.engine}: tile {self.tile}, "
                f"{counted(compute, 'compute agent')}",
                f"tokens come in chunks of {agreed.chunk_tokens} by {counted(movers, 'mover')}"
                f"{besides}; "
                f"{self.memory} bytes of tables, landing zone and signals",
            )
        )


@dataclass(frozen=True)
class Combine:
    """What all ranks must agree on to add up what experts have made, and what follows from it.

    Attributes
    ----------
    ranks : int
    n : int
        Columns of a row.
    slots : int
        Rows that are made of a token, at the most (k).
    dtype, transfer_dtype : numpy.dtype
        Of the rows and the result; of sums on their way.
    max_tokens : int
        The most tokens of a rank.
    chunk_bytes : int or None
        About how much is sent at a time.
    nodes : tuple of int or None
        Ranks of each node; None: all on one.
    staged : bool
        Whether what goes between nodes passes through slots of host memory.
    """

    parts: ClassVar[int] = 1  # of what a rank shows other nodes: weights

    ranks: int
    n: int
    slots: int
    dtype: np.dtype
    transfer_dtype: np.dtype
    max_tokens: int
    chunk_bytes: int | None = None
    nodes: tuple[int, ...] | None = None
    staged: bool = False

    def __str__(self) -> str:
        """All of it, as the ranks compare it and errors show it."""
        chunk = "" if self.chunk_bytes is None else f", chunk_bytes={self.chunk_bytes}"
        return (
            f"moe_combine(N={self.n}, k={self.slots}, {self.dtype.name} by way of "
            f"{self.transfer_dtype.name}, max_tokens={self.max_tokens}{chunk})"
        )

    @property
    def pitch(self) -> int:
        """Bytes from the sum for one token to the next."""
        return line_pitch(self.n, self.transfer_dtype)

    @property
    def chunk_tokens(self) -> int:
        """Tokens whose sums are sent together."""
        line = max(1, self.n * self.transfer_dtype.itemsize)
        return max(1, min((self.chunk_bytes or _CHUNK_BYTES) // line, self.max_tokens))

    @property
    def chunks(self) -> int:
        """In how many chunks the tokens of a rank come, at the most."""
        return math.ceil(self.max_tokens / self.chunk_tokens)

    def arena_sizes(self) -> dict[str, int]:
        """Return the bytes of everything in the arena."""
        tables = self.table_sizes()
        return {
            **tables,
            "factors": self.ranks * tables["weights"],
            "sums": self.ranks * self.max_tokens * self.pitch,
            **(self._node_sizes(tables) if self.several_nodes else {}),
        }

    def table_sizes(self) -> dict[str, int]:
        """Return the bytes of what a rank shows its peers."""
        return {"weights": _weight_bytes(self)}

    def _node_sizes(self, tables: dict[str, int]) -> dict[str, int]:
        """Return the bytes of what a rank sends to other nodes and gets from them."""
        return {
            "mirrors": self.ranks * offsets_of(tables)["end"],
            "leaving_sums": self.ranks * self.chunks * self.message_bytes,
            "arriving_sums": len(self.nodes) * self.chunks * self.message_bytes,
        }

    @property
    def several_nodes(self) -> bool:
        """Whether there is more than one node."""
        return len(self.nodes or ()) > 1

    @property
    def head_bytes(self) -> int:
        """Bytes by which a message says where sums are in it."""
        return round_up(4 * self.chunk_tokens, 16)

    @property
    def message_bytes(self) -> int:
        """Bytes of a message with the sums of a chunk, at the most."""
        sums = self.chunk_tokens * self.n * self.transfer_dtype.itemsize
        return round_up(self.head_bytes + sums, 16)

    def sums_to_network(self, rank: int, id_blocks: Sequence[np.ndarray], experts: int) -> int:
        """Return the bytes of the sums that a rank sends to other nodes, for all ranks' choices."""
        topology = Topology(rank, self.nodes or (self.ranks,))

        def messages(source: int, node: int) -> list[int]:
            chosen = _chosen(self, experts, id_blocks[source])
            there = np.isin(chosen, _ranks_of(self, node)).any(axis=1)
            begins = range(0, self.chunks * self.chunk_tokens, self.chunk_tokens)
            sums = [int(there[begin : begin + self.chunk_tokens].sum()) for begin in begins]
            return [self.head_bytes + s * self.n * self.transfer_dtype.itemsize for s in sums]

        nodes = map(topology.node_of, topology.gateways)
        sent = (messages(source, topology.node) for source in topology.sources)
        received = (messages(rank, node) for node in nodes)
        both = (list(chain.from_iterable(each)) for each in (sent, received))
        return network_bytes(self.staged, *both)

    def weights_to_network(self, rank: int, tokens: Sequence[int]) -> int:
        """Return the bytes of what else a rank sends in a call of its own; `tokens`: of each."""
        topology = Topology(rank, self.nodes or (self.ranks,))
        each = self.slots * accumulator_dtype(self.dtype).itemsize
        sent = [tokens[rank] * each] * len(topology.gateways)
        received = [tokens[source] * each for source in topology.sources]
        return network_bytes(self.staged, sent, received) + topology.letter_bytes

    def signal_sizes(self) -> dict[str, int]:
        """Return the words of everything among the signals."""
        return {
            "computed": MOST_AGENTS,
            "summed": self.ranks * self.chunks,
            "rows": self.ranks * self.max_tokens * self.slots,
            "sent": self.ranks * self.max_tokens,
            "summed_here": self.ranks**2 * self.chunks if self.several_nodes else 0,
            "heard": self.ranks if self.several_nodes else 0,
        }

    def need(self) -> tuple[int, int]:
        """Return the signals and bytes of an arena that serves every rank."""
        return offsets_of(self.signal_sizes(), 1)["end"], offsets_of(self.arena_sizes())["end"]


@dataclass(frozen=True)
class MoeCombinePlan(NodesPlan):
    """The plan of `moe_combine` on one rank.

    Attributes
    ----------
    rank, ranks : int
    n : int
        Columns of a row.
    slots : int
        Rows that are made of a token, at the most (k).
    dtype, transfer_dtype : numpy.dtype
        Of the rows and the result; of sums on their way.
    max_tokens : int
        The most tokens of a rank.
    target, engine : str
    chunk_bytes : int
        How much was to be sent at a time.
    split : tuple of int
        (movers, compute): agents per role; of several nodes also inter-reduce.
    shared_bytes : int
        Scratch memory of an agent.
    nodes : tuple of int
        Ranks of each node.
    staged : bool
        Whether what goes between them passes through slots of host memory.
    """

    operator: ClassVar[str] = "moe_combine"
    more_dtypes: ClassVar[tuple[str, ...]] = ("transfer_dtype",)

    rank: int
    ranks: int
    n: int
    slots: int
    dtype: np.dtype
    out_dtype: np.dtype
    transfer_dtype: np.dtype
    max_tokens: int
    target: str
    engine: str
    chunk_bytes: int
    split: tuple[int, ...]
    shared_bytes: int
    nodes: tuple[int, ...]
    staged: bool

    @property
    def combine(self) -> Combine:
        """What the ranks have agreed on."""
        return Combine(
            ranks=self.ranks,
            n=self.n,
            slots=self.slots,
            dtype=self.dtype,
            transfer_dtype=self.transfer_dtype,
            max_tokens=self.max_tokens,
            chunk_bytes=self.chunk_bytes,
            nodes=self.nodes,
            staged=self.staged,
        )

    @property
    def options(self) -> Options:
        """What makes an operator choose this plan again."""
        return Options(self.split, None, self.chunk_bytes, self.transfer_dtype)

    @property
    def memory(self) -> int:
        """Bytes that this rank shares with its peers for it: sums, weights, signals."""
        signals, nbytes = self.combine.need()
        return nbytes + 8 * signals

    def explain(self) -> str:
        """Return the plan in words, one choice a line."""
        movers, compute, *_ = self.split
        return "\n".join(
            (
                f"moe_combine: up to {self.max_tokens} tokens a rank of {self.n} columns, "
                f"{self.slots} rows each, {self.dtype.name}, rank {self.rank} of {self.ranks}",
                f"target {self.target}: {compute} agents add the rows of a rank, in the order of "
                f"slots, and {movers} more with them those of all ranks, in their order; sums "
                f"cross links as {self.transfer_dtype.name}, {self.combine.chunk_tokens} tokens at "
                f"a time, through {self.memory} bytes",
            )
        )


def plan_moe_combine(
    rank: int, combine: Combine, options: Options, gpu: Gpu | None = None, capacity: int = 0
) -> MoeCombinePlan:
    """Choose a plan: for a GPU that runs `capacity` agents at a time, or for the host target."""
    engine = default_tile(combine.dtype) if gpu else HostTile((1, 1, 1))
    return MoeCombinePlan(
        rank=rank,
        ranks=combine.ranks,
        n=combine.n,
        slots=combine.slots,
        dtype=combine.dtype,
        out_dtype=combine.dtype,
        transfer_dtype=combine.transfer_dtype,
        max_tokens=combine.max_tokens,
        target="cuda" if gpu else "host",
        engine=engine.engine,
        chunk_bytes=combine.chunk_bytes or _CHUNK_BYTES,
        split=expert_split(engine, combine, combine.max_tokens, options, capacity),
        shared_bytes=0,
        nodes=combine.nodes or (combine.ranks,),
        staged=combine.staged,
    )


def _weight_bytes(agreed: Dispatch | Combine) -> int:
    """Return the bytes of the weights of a rank's tokens, at the most."""
    return agreed.max_tokens * agreed.slots * accumulator_dtype(agreed.dtype).itemsize


def _chosen(agreed: Dispatch | Combine, experts: int, ids: np.ndarray) -> np.ndarray:
    """Return the ranks of the experts that tokens have chosen; -1 for none."""
    owners = np.repeat(np.arange(agreed.ranks), array_split_counts(experts, agreed.ranks))
    return np.where(ids < 0, -1, owners[ids]) if experts else np.full(ids.shape, -1)


def _ranks_of(agreed: Dispatch | Combine, node: int) -> range:
    """Return the ranks of a node."""
    return range(sum(agreed.nodes[:node]), sum(agreed.nodes[: node + 1]))


def _together(first: dict[str, int], other: dict[str, int]) -> dict[str, int]:
    """Return sizes of both; what the first has, too, is shared."""
    return {**first, **{name: size for name, size in other.items() if name not in first}}


ACTIVATIONS = ("swiglu", "gelu", "silu", None)


@dataclass(frozen=True)
class Layer:
    """What all ranks must agree on for a layer of experts, and what follows from it for each.

    Attributes
    ----------
    ranks : int
    h, inner, n : int
        Columns of a token; of what is between the two products; of the result.
    experts, slots : int
        Of all ranks; those that a token may want (k).
    dtype, transfer_dtype : numpy.dtype
        Of everything; of sums on their way.
    activation : str or None
    max_tokens, capacity, chunk_bytes, nodes, staged
        As for `Dispatch`.
    """

    ranks: int
    h: int
    inner: int
    n: int
    experts: int
    slots: int
    dtype: np.dtype
    transfer_dtype: np.dtype
    activation: str | None
    max_tokens: int | None
    capacity: int | None = None
    chunk_bytes: int | None = None
    nodes: tuple[int, ...] | None = None
    staged: bool = False

    def __str__(self) -> str:
        """All of it, as the ranks compare it and errors show it."""
        chunk = "" if self.chunk_bytes is None else f", chunk_bytes={self.chunk_bytes}"
        return (
            f"moe_layer(H={self.h}, I={self.inner}, N={self.n}, num_experts={self.experts}, "
            f"k={self.slots}, {self.dtype.name} by way of {self.transfer_dtype.name}, "
            f"activation={self.activation}, max_tokens={self.max_tokens}, "
            f"capacity={self.capacity}{chunk})"
        )

    @property
    def dispatch(self) -> Dispatch:
        """How tokens come to the experts."""
        return Dispatch(
            ranks=self.ranks,
            h=self.h,
            n=self.inner,
            experts=self.experts,
            slots=self.slots,
            dtype=self.dtype,
            out_dtype=self.dtype,
            max_tokens=self.max_tokens,
            capacity=self.capacity,
            chunk_bytes=self.chunk_bytes,
            nodes=self.nodes,
            staged=self.staged,
            weighted=True,
        )

    @property
    def combine(self) -> Combine:
        """How what experts have made comes back."""
        return Combine(
            ranks=self.ranks,
            n=self.n,
            slots=self.slots,
            dtype=self.dtype,
            transfer_dtype=self.transfer_dtype,
            max_tokens=self.max_tokens,
            chunk_bytes=self.chunk_bytes,
            nodes=self.nodes,
            staged=self.staged,
        )

    @property
    def products(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """(columns, k) of both products."""
        return (self.inner * (1 + self.gated), self.h), (self.n, self.inner)

    @property
    def gated(self) -> bool:
        """Whether each column of the first product has a partner, which is its gate."""
        return self.activation == "swiglu"

    def arena_sizes(self) -> dict[str, int]:
        """Return the bytes of everything in the arena of every rank."""
        return _together(self.dispatch.arena_sizes(), self.combine.arena_sizes())

    def signal_sizes(self) -> dict[str, int]:
        """Return the words of everything among the signals."""
        return _together(self.dispatch.signal_sizes(), self.combine.signal_sizes())

    def need(self) -> tuple[int, int]:
        """Return the signals and bytes of an arena that serves every rank."""
        return offsets_of(self.signal_sizes(), 1)["end"], offsets_of(self.arena_sizes())["end"]


@dataclass(frozen=True)
class MoeLayerPlan(NodesPlan):
    """The plan of `moe_layer` on one rank.

    Attributes
    ----------
    rank, ranks : int
    h, inner, n : int
        Columns of a token; of what is between the two products; of the result.
    num_experts, slots : int
        Experts of all ranks, and those that a token may want (k).
    dtype, transfer_dtype : numpy.dtype
    activation : str or None
    max_tokens : int
        The most tokens that a rank may pass.
    max_capacity : int or None
        The most rows of a rank's experts that were asked for.
    target, engine : str
    tile : tuple of int
        (rows, columns, k) of what is computed at a time.
    row_step : int
        Of how many rows a tile has a multiple, if it may have fewer; or 0.
    part : tuple of int
        (rows, columns) of what is between the products that are stored together.
    chunk_bytes : int
        How much was to be moved at a time.
    split : tuple of int
        (movers, compute): agents per role; of several nodes also inter-reduce.
    shared_bytes : int
        Scratch memory of an agent.
    nodes : tuple of int
        Ranks of each node.
    staged : bool
        Whether what goes between them passes through slots of host memory.
    """

    operator: ClassVar[str] = "moe_layer"
    more_dtypes: ClassVar[tuple[str, ...]] = ("transfer_dtype",)

    rank: int
    ranks: int
    h: int
    inner: int
    n: int
    num_experts: int
    slots: int
    dtype: np.dtype
    out_dtype: np.dtype
    transfer_dtype: np.dtype
    activation: str | None
    max_tokens: int
    max_capacity: int | None
    target: str
    engine: str
    tile: tuple[int, int, int]
    row_step: int
    part: tuple[int, int]
    chunk_bytes: int
    split: tuple[int, ...]
    shared_bytes: int
    nodes: tuple[int, ...]
    staged: bool

    @property
    def layer(self) -> Layer:
        """What the ranks have agreed on."""
        return Layer(
            ranks=self.ranks,
            h=self.h,
            inner=self.inner,
            n=self.n,
            experts=self.num_experts,
            slots=self.slots,
            dtype=self.dtype,
            transfer_dtype=self.transfer_dtype,
            activation=self.activation,
            max_tokens=self.max_tokens,
            capacity=self.max_capacity,
            chunk_bytes=self.chunk_bytes,
            nodes=self.nodes,
            staged=self.staged,
        )

    @property
    def experts(self) -> int:
        """Experts of this rank."""
        return self.layer.dispatch.experts_of[self.rank]

    @property
    def capacity(self) -> int:
        """The most rows of this rank's experts."""
        return self.layer.dispatch.capacities[self.rank]

    @property
    def parts(self) -> int:
        """The most parts of what is between the products; see FinishedParts of activation.cuh."""
        rows, columns = self.part
        return (self.capacity // rows + self.experts + 1) * math.ceil(self.inner / columns)

    @property
    def options(self) -> Options:
        """What makes an operator choose this plan again."""
        return Options(self.split, self.tile, self.chunk_bytes, self.transfer_dtype)

    @property
    def memory(self) -> int:
        """Bytes that this rank shares with its peers for it: tables, tokens, sums, signals."""
        signals, nbytes = self.layer.need()
        return nbytes + 8 * signals

    def explain(self) -> str:
        """Return the plan in words, one choice a line."""
        movers, compute, *_ = self.split
        rows = self.capacity * (self.inner + self.n) * self.dtype.itemsize
        return "\n".join(
            (
                f"moe_layer: up to {self.max_tokens} tokens a rank to {self.slots} of "
                f"{self.num_experts} experts, {self.experts} of them here, each "
                f"{self.h} -> {self.inner} -> {self.n} columns, {self.activation}, "
                f"{self.dtype.name}, rank {self.rank} of {self.ranks}",
                f"target {self.target}, engine {self.engine}: tile {self.tile}, "
                f"{counted(compute, 'compute agent')}; {self.capacity} rows at the most, "
                f"{rows} bytes",
                f"tokens come in chunks of {self.layer.dispatch.chunk_tokens} by "
                f"{counted(movers, 'mover')}; sums come back as {self.transfer_dtype.name} in "
                f"chunks of {self.layer.combine.chunk_tokens}, through {self.memory} bytes",
            )
        )


def layer_tile(rank: int, layer: Layer, options: Options, gpu: Gpu | None) -> Any:
    """Choose the tile of a rank's products."""
    return _tile(layer.dispatch, rank, layer.products, options, gpu, pairs=layer.gated)


def plan_moe_layer(
    rank: int, layer: Layer, chosen: Any, options: Options, capacity: int = 0
) -> MoeLayerPlan:
    """Choose a plan for a tile: for a GPU that runs `capacity` agents, or for the host target.

    On the host target, two compute agents at most: see `plan_allgather_gemm`.
    """
    tiles = _most_tiles(layer.dispatch, rank, max(layer.inner, layer.n), chosen)
    rows, columns = chosen.part
    return MoeLayerPlan(
        rank=rank,
        ranks=layer.ranks,
        h=layer.h,
        inner=layer.inner,
        n=layer.n,
        num_experts=layer.experts,
        slots=layer.slots,
        dtype=layer.dtype,
        out_dtype=layer.dtype,
        transfer_dtype=layer.transfer_dtype,
        activation=layer.activation,
        max_tokens=layer.max_tokens,
        max_capacity=layer.capacity,
        target=_target(chosen),
        engine=chosen.engine,
        tile=chosen.tile,
        row_step=chosen.row_step,
        part=(rows, columns // 2 if pairs_columns(layer, chosen) else columns),
        chunk_bytes=layer.chunk_bytes or _CHUNK_BYTES,
        split=expert_split(chosen, layer, tiles, options, capacity),
        shared_bytes=shared_bytes(layer.dispatch, chosen, accumulator_dtype(layer.dtype)),
        nodes=layer.nodes or (layer.ranks,),
        staged=layer.staged,
    )


def dispatch_tile(rank: int, dispatch: Dispatch, options: Options, gpu: Gpu | None) -> Any:
    """Choose the tile of a rank's products."""
    return _tile(dispatch, rank, dispatch.products, options, gpu)


def plan_moe_dispatch_gemm(
    rank: int, dispatch: Dispatch, chosen: Any, options: Options, capacity: int = 0
) -> MoeDispatchGemmPlan:
    """Choose a plan for a tile: for a GPU that runs `capacity` agents, or for the host target.

    On the host target, two compute agents at most: see `plan_allgather_gemm`.
    """
    tiles = _most_tiles(dispatch, rank, dispatch.n, chosen)
    return MoeDispatchGemmPlan(
        rank=rank,
        ranks=dispatch.ranks,
        h=dispatch.h,
        n=dispatch.n,
        num_experts=dispatch.experts,
        slots=dispatch.slots,
        dtype=dispatch.dtype,
        out_dtype=dispatch.out_dtype,
        max_tokens=dispatch.max_tokens,
        max_capacity=dispatch.capacity,
        target=_target(chosen),
        engine=chosen.engine,
        tile=chosen.tile,
        row_step=chosen.row_step,
        chunk_bytes=dispatch.chunk_bytes or _CHUNK_BYTES,
        split=expert_split(chosen, dispatch, tiles, options, capacity, adds=False),
        shared_bytes=shared_bytes(dispatch, chosen, dispatch.out_dtype),
        nodes=dispatch.nodes or (dispatch.ranks,),
        staged=dispatch.staged,
    )


def expert_tiles(dtype: np.dtype, gpu: Gpu, *, pairs: bool = False) -> list[Any]:
    """Return the tiles that plans choose from, where the caller does not."""
    fast = hopper_group_tiles(gpu, 1, pairs=pairs) if _has_fast_engine(dtype, gpu) else []
    return [portable_tile(dtype, Options(), gpu.shared_bytes), *fast]


def pairs_columns(layer: Layer, chosen: Any) -> bool:
    """Return whether a column of the first product and its gate are in one tile."""
    return layer.gated and chosen.engine == "hopper"


def _target(chosen: HostTile | PortableTile | HopperTile) -> str:
    return "host" if chosen.engine == "host" else "cuda"


def _has_fast_engine(dtype: np.dtype, gpu: Gpu) -> bool:
    return gpu.arch == "sm_90a" and dtype.itemsize == 2


def takes_fast_engine(dtype: np.dtype, products: Sequence[tuple[int, int]], gpu: Gpu) -> bool:
    """Return whether a GPU has a fast engine for products of these (columns, k)."""
    aligned = all(extent % _ALIGNED_ELEMENTS == 0 for product in products for extent in product)
    return _has_fast_engine(dtype, gpu) and aligned


def takes_measured(
    tile: tuple[int, int, int],
    dtype: np.dtype,
    products: Sequence[tuple[int, int]],
    gpu: Gpu,
    *,
    pairs: bool = False,
) -> bool:
    """Return whether a tile can be that of products; measured are those of the fast engine."""
    return takes_fast_engine(dtype, products, gpu) and takes_group_tile(tile, pairs=pairs)


def _tile(
    dispatch: Dispatch,
    rank: int,
    products: Sequence[tuple[int, int]],
    options: Options,
    gpu: Gpu | None,
    *,
    pairs: bool = False,
) -> HostTile | PortableTile | HopperTile:
    if gpu is None:
        most = dispatch.capacities[rank], *map(max, zip(*products, strict=True))
        limits = zip(options.tile or (32, 64, 64), most, strict=True)
        return HostTile(tuple(min(extent, max(1, limit)) for extent, limit in limits))
    if dispatch.sort_bytes > gpu.shared_bytes:
        raise ValueError(
            f"{dispatch.experts} experts: to sort by them takes {dispatch.sort_bytes} bytes of "
            f"shared memory, the GPU has {gpu.shared_bytes} per block: use fewer"
        )
    if takes_fast_engine(dispatch.dtype, products, gpu):
        rows = dispatch.ranks * dispatch.max_tokens * dispatch.slots / max(1, dispatch.experts)
        incoming = (dispatch.ranks - 1) * dispatch.max_tokens * dispatch.pitch
        groups = dispatch.experts_of[rank]
        return hopper_group_tile(rows, groups, products, incoming, options, gpu, pairs=pairs)
    return portable_tile(dispatch.dtype, options, gpu.shared_bytes)


def _most_tiles(dispatch: Dispatch, rank: int, columns: int, chosen: Any) -> int:
    rows = dispatch.capacities[rank] // chosen.tile[0] + dispatch.experts_of[rank]
    return rows * math.ceil(columns / chosen.tile[1])


def shared_bytes(dispatch: Dispatch, chosen: Any, staged: np.dtype) -> int:
    """Return the scratch memory of an agent, which first sorts tokens and then multiplies them."""
    return max(chosen.shared_bytes(dispatch.dtype, staged), dispatch.sort_bytes)


def expert_split(
    chosen: Any, agreed: Any, tiles: int, options: Options, capacity: int, *, adds: bool = True
) -> tuple[int, ...]:
    """Return how many agents move and how many compute; on a GPU some move on one rank, too.

    Between nodes some add as well, if `adds`.
    """
    ranks, nodes = agreed.ranks, agreed.nodes or (agreed.ranks,)
    adding = inter_reduce(nodes, options) if adds else ()
    capacity -= network_agents(nodes) + sum(adding)
    alone = 1 if chosen.engine == "host" else 2
    if alone > 1 and options.split and not options.split[0]:
        raise ValueError(f"Options(split={options.split}): on a GPU use at least one mover")
    split = choose_split(
        chosen, max(alone, ranks), tiles, MOVERS, options, min(capacity, MOST_AGENTS)
    )
    return *split, *adding
