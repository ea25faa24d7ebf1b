"""Slots in host memory: through them goes what network cards cannot read or write themselves."""

from typing import Any

import numpy as np

from .. import slots, structs
from ..topology import Topology
from .queue import CommandQueue, lines

# Of what leaves a rank, and of what arrives from each of its peers.
SLOTS = 16
# The slots among what is registered with network cards.
REGION = 0xFFFE


class Staging:
    """The slots of one rank.

    Parameters
    ----------
    topology : Topology

    Attributes
    ----------
    memory : numpy.ndarray
        What network cards read and write.
    arrivals : int
        How many counts of arrivals there are.
    """

    def __init__(self, topology: Topology):
        self._topology = topology
        rings = len(topology.links)
        slot_lines = 1 + slots.SLOT_BYTES // slots.PARCEL_BYTES
        self.memory = lines(2 + (1 + rings) * SLOTS * slot_lines)
        self.arrivals = rings * (SLOTS + 1)

    def struct(self, constant: Any, to_proxy: CommandQueue, first: int, arrived: int) -> Any:
        """Return the ``Staging`` struct of types.cuh.

        Parameters
        ----------
        constant : callable
            Puts an array where kernels find it; returns its address.
        to_proxy : CommandQueue
        first, arrived : int
            Number of the first arrival, and address of its count.
        """
        mk, topology = structs.shared(), self._topology
        links, link_of = (mk.StagedLink * len(topology.links))(), np.zeros(topology.size, np.uint64)
        for number, peer in enumerate(topology.links):
            there = Topology(peer, topology.sizes).links.index(topology.rank)
            links[number] = mk.StagedLink(rank=peer, number_there=there)
            link_of[peer] = number
        return mk.Staging(
            queue=to_proxy.struct_with(constant(lines(1)), constant(lines(1))),
            region=REGION,
            memory=self.memory.ctypes.data,
            slots=SLOTS,
            room=slots.SLOT_BYTES,
            first=first,
            arrived=arrived,
            left=constant(lines(1)),
            read_by=constant(np.zeros(SLOTS, np.uint64)),
            link_of=constant(link_of),
            link_count=len(links),
            links=constant(links),
        )
