"""Which tokens go to which experts, and in which order they lie."""

from typing import Any

import numpy as np

from ..communicator import Communicator, runtime_of
from ..operators.moe_dispatch_gemm import DispatchLayout, MoeDispatchGemm
from ..reference import array_split_counts

ROUTINGS = ("uniform", "zipf")
"""Whether all experts are as popular, or expert e in proportion to 1 / (1 + e)."""


class Route:
    """Who sends what to whom, as every rank can tell.

    Attributes
    ----------
    ids : array (T_r, k)
        Of this rank's tokens.
    asked, asked_alone : dict
        What the operators that dispatch are told of it; and of this rank's rows as tokens.
    offsets : array
        The first row of each of this rank's experts, and behind the last one their number.
    row_slots : array
        Of the slots of all tokens, that of each row.
    row_experts : array (rows, 1)
        The expert of each row, by its number here.
    capacity : int
        The most rows of a rank.
    landing, returning : list of int
        How many tokens come to each rank from others, and then how many sums for its own.
    sent : array
        This rank's tokens in the order of experts, as often as they are wanted.
    sent_counts, received_counts : list of int
        Of these, how many go to each rank, and come from each.
    order, back : array
        Of what comes in the order of ranks and experts, that of the rows; and the other way.
    returned : array
        Where each slot of each of this rank's tokens is in `sent`.
    """

    def __init__(self, ids: np.ndarray, tokens: tuple[int, ...], experts: int, rank: int):
        ranks, slots = len(tokens), ids.shape[1]
        counts = array_split_counts(experts, ranks)
        ends = np.cumsum(counts)
        source = np.repeat(np.arange(ranks), tokens)
        owner = np.searchsorted(ends, ids, side="right")
        first = ends[rank] - counts[rank]
        here = np.flatnonzero(owner.ravel() == rank)
        local = ids.ravel()[here] - first
        by_expert = np.argsort(local, kind="stable")  # rows are in the order of source and token
        self.offsets = np.cumsum([0, *np.bincount(local, minlength=counts[rank])])
        self.row_slots = here[by_expert]
        self.row_experts = local[by_expert, None]
        self.capacity = int(np.bincount(owner.ravel(), minlength=ranks).max())
        self.asked = {
            "num_experts": experts,
            "max_tokens": max(tokens),
            "capacity": self.capacity,
        }
        self.asked_alone = {
            "num_experts": counts[rank],
            "max_tokens": len(here),
            "capacity": self.capacity,
        }
        wanted = np.array([(owner == r).any(axis=1) & (source != r) for r in range(ranks)])
        self.landing = wanted.sum(axis=1).tolist()
        self.returning = [int(wanted[:, source == r].sum()) for r in range(ranks)]
        own = slice(sum(tokens[:rank]), sum(tokens[: rank + 1]))
        self.ids = ids[own]
        pairs = np.argsort(self.ids.ravel(), kind="stable")
        self.sent, self.returned = pairs // slots, np.argsort(pairs)
        self.sent_counts = np.bincount(owner[own].ravel(), minlength=ranks).tolist()
        sources = source[here // slots]
        self.received_counts = np.bincount(sources, minlength=ranks).tolist()
        arrived = np.lexsort((local, sources))  # stable, too
        place = np.empty_like(arrived)
        place[arrived] = np.arange(len(arrived))
        self.order = place[by_expert]
        self.back = np.argsort(self.order)


def route_for(comm: Communicator, tokens: int, experts: int, slots: int, routing: str) -> Route:
    """Return the route of random choices; ranks share out tokens and experts. Local."""
    ids = choose(tokens, experts, slots, routing)
    return Route(ids, comm.row_counts(tokens), experts, comm.rank)


def choose(tokens: int, experts: int, slots: int, routing: str) -> np.ndarray:
    """Return the ids of different experts for each token."""
    random = np.random.default_rng([tokens, experts, slots])
    chances = np.ones(experts) if routing == "uniform" else 1 / np.arange(1, experts + 1)
    scores = np.log(chances) + random.gumbel(size=(tokens, experts))
    return np.argsort(-scores, axis=1)[:, :slots].astype(np.int64)


def layout_of(
    comm: Communicator,
    ids: np.ndarray,
    asked: dict[str, int],
    dtype: np.dtype,
) -> DispatchLayout:
    """Return the layout of a dispatch that leaves nothing to multiply. Collective."""
    machine, here = runtime_of(comm).machine, comm.row_counts(asked["num_experts"])[comm.rank]
    x, w = (machine.empty(shape, dtype) for shape in ((len(ids), 1), (here, 1, 1)))
    for array in (x, w):
        machine.zero(array)
    operands = x, machine.asarray(ids, None), w
    with MoeDispatchGemm(*operands, comm=comm, **asked) as step:
        return step(*operands)[1]


def take(xp: Any, rows: Any, index: Any, to: Any) -> None:
    """Copy some rows, in the longest words that they consist of."""
    length = rows.shape[1] * rows.itemsize
    word = next(name for name in ("c16", "u8", "u4", "u2") if length % np.dtype(name).itemsize == 0)
    xp.take(rows.view(word), index, axis=0, out=to.view(word))
