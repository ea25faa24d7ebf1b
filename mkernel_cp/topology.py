"""Which rank is on which node, and who exchanges data with whom between nodes."""

from collections.abc import Sequence
from typing import Any

# Of the first word of a rank to another node, and of what else comes without data.
LETTER_BYTES = 64


class Topology:
    """The nodes, as one rank sees them.

    Parameters
    ----------
    rank : int
    sizes : tuple of int
        Ranks of each node; ranks are numbered node by node.

    Attributes
    ----------
    node, begin : int
        The rank's node, and the first rank of that.
    local_rank, local_size : int
    peers : range
        The ranks of its node.
    gateways : list of int
        On every other node, the rank that it sends to.
    sources : list of int
        The ranks of other nodes that send to it.
    holders : list of int
        For every rank, who of this node has what it sends, and adds what is for it.
    rings : list of list of int
        Per node, its ranks as they add to what is for this rank: first itself, or its gateway.

    Examples
    --------
    >>> Topology(2, (1, 2)).gateways
    [0]
    """

    def __init__(self, rank: int, sizes: tuple[int, ...]):
        self.rank, self.size, self.sizes = rank, sum(sizes), sizes
        begins = [sum(sizes[:node]) for node in range(len(sizes))]
        self._place = [(node, local) for node, n in enumerate(sizes) for local in range(n)]
        self.node, self.local_rank = self._place[rank]
        self.begin, self.local_size = begins[self.node], sizes[self.node]
        self.peers = range(self.begin, self.begin + self.local_size)
        nodes = range(len(sizes))
        self.gateways = [self.holder(rank, node) for node in nodes if node != self.node]
        self.holders = [self.holder(other, self.node) for other in range(self.size)]
        self.sources = [r for r, holder in enumerate(self.holders) if holder == rank != r]
        self.rings = [
            [begin + (self.holder(rank, node) - begin + step) % n for step in range(n)]
            for node, (begin, n) in enumerate(zip(begins, sizes, strict=True))
        ]

    def holder(self, rank: int, node: int) -> int:
        """Return who of a node stands for a rank: itself, or its gateway there."""
        home, local = self._place[rank]
        return rank if home == node else sum(self.sizes[:node]) + local % self.sizes[node]

    def node_of(self, rank: int) -> int:
        """Return the node of a rank."""
        return self._place[rank][0]

    @property
    def links(self) -> list[int]:
        """The ranks that it is connected with, in either direction."""
        return sorted({*self.gateways, *self.sources})

    @property
    def letter_bytes(self) -> int:
        """Bytes of letters and receipts that a rank sends to other nodes in one call."""
        return (len(self.gateways) + len(self.sources)) * LETTER_BYTES

    def by_rank(self, of_node: Sequence[Any]) -> list[Any]:
        """Return what the ranks of this node have, in a list over all ranks; None for others."""
        result: list[Any] = [None] * self.size
        result[self.begin : self.begin + self.local_size] = of_node
        return result
