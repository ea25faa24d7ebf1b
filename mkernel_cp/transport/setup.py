"""How the ranks of different nodes are connected."""

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .. import errors, settings, structs
from ..topology import Topology
from . import soft
from .network import LETTERS, Network


class Nodes:
    """The network of one rank, as its kernels see it.

    Attributes
    ----------
    address : int
        Of the ``Network`` struct of types.cuh.
    transport : str
        'verbs' or 'efa'.
    """

    def __init__(self, network: Network, topology: Topology):
        self._network = network
        self._arrays = {
            name: np.array(getattr(topology, name), np.uint64)
            for name in ("gateways", "sources", "links", "holders")
        }
        self._struct = structs.shared().Network(
            queue=network.queue.struct,
            gateway_count=len(topology.gateways),
            source_count=len(topology.sources),
            link_count=len(topology.links),
            arrived=network.arrived.ctypes.data,
            letters=network.letters.ctypes.data,
            region=LETTERS,
            node=topology.node,
            **{name: array.ctypes.data for name, array in self._arrays.items()},
        )
        self.address = ctypes.addressof(self._struct)
        self.register, self.learn = network.register, network.learn
        self.unregister, self.counters = network.unregister, network.counters
        self.transport = network.transport
        self.close = network.close


def connect(
    topology: Topology,
    pages: Sequence[int],
    transport: str,
    nics: Sequence[str] | None,
    fabric: settings.SoftFabric | None,
    together: Callable[[Callable[[], Any]], Any],
    allgather: Callable[[Any], list[Any]],
) -> Nodes:
    """Return the network of a rank, connected and at work. Collective.

    Parameters
    ----------
    topology : Topology
    pages : sequence of int
        Address of every rank's ``HostPage``.
    transport : {'auto', 'verbs', 'efa'}
    nics : sequence of str or None
        Names of network cards; None for the first of the software network.
    fabric : settings.SoftFabric or None
        What the software network is to do.
    together : callable
        Runs a step; what fails on one rank is raised on all.
    allgather : callable
    """
    transport = "verbs" if transport == "auto" else transport
    cards = tuple(nics or (soft.EFA_CARDS if transport == "efa" else soft.VERBS_CARDS)[:1])
    opened: list[Network] = []

    def start() -> None:
        soft.configure(fabric or settings.SoftFabric())
        where = topology.rank, topology.size, topology.links, pages
        opened.append(Network(*where, transport=transport, cards=cards, software=True))

    try:
        together(start)
        network = opened[0]
        counts = allgather(len(cards))
        if len(set(counts)) > 1:
            raise errors.ConfigurationError(
                f"the ranks use different numbers of network cards, {counts}: give each as many in "
                "nics= or MKERNEL_NICS"
            )
        addresses = allgather(together(network.addresses))
        theirs = {peer: addresses[peer][topology.rank] for peer in topology.links}
        together(lambda: network.connect(theirs))
        network.learn(LETTERS, allgather(together(network.register_letters)))
        together(network.start)
        return Nodes(network, topology)
    except BaseException:
        for network in opened:
            network.close()
        raise
