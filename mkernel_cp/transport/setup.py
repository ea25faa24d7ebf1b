"""How the ranks of different nodes are connected."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .. import errors, settings, structs
from ..topology import Topology
from . import devices, soft
from .network import LETTERS, Network, loads
from .queue import lines
from .staging import REGION, Staging

_COMMANDS = 1024  # that kernels may have asked for before they wait


class Nodes:
    """The network of one rank, as its kernels see it.

    Attributes
    ----------
    address : int
        Of the ``Network`` struct of types.cuh.
    transport : str
        'verbs' or 'efa'.
    cards : tuple of str
    software : bool
        Whether its cards are made of software.
    staged : bool
        Whether these do not reach the memory of kernels, so that data go through slots of the host.
    """

    def __init__(self, network: Network, topology: Topology, machine: Any, staging: Staging | None):
        self._network, self._staging = network, staging
        self._constants: list[Any] = []

        def constant(data: Any) -> int:
            self._constants.append(machine.constant(data))
            return self._constants[-1].address

        for array in (*network.shared(), *([staging.memory] if staging else ())):
            machine.pin(array)
        queue, more = network.queue.struct, {}
        if staging:
            arrived = network.arrived[network.counted :].ctypes.data
            slots = staging.struct(constant, network.queue, network.counted, arrived)
            more["staging"] = constant(slots)
            # What kernels ask for, others of their agents take: all of it is kernels' memory.
            asked = (constant(lines(count)) for count in (_COMMANDS, 1, 1, 1, 1))
            queue = structs.shared().CommandQueue(next(asked), _COMMANDS, *asked)
        names = "gateways", "sources", "links", "holders"
        self.address = constant(
            structs.shared().Network(
                queue=queue,
                gateway_count=len(topology.gateways),
                source_count=len(topology.sources),
                link_count=len(topology.links),
                arrived=network.arrived.ctypes.data,
                letters=network.letters.ctypes.data,
                region=LETTERS,
                node=topology.node,
                **{name: constant(np.array(getattr(topology, name), np.uint64)) for name in names},
                **more,
            )
        )
        self.queue, self.arrived, self.cards = network.queue, network.arrived, network.cards
        self.register, self.learn = network.register, network.learn
        self.unregister, self.counters = network.unregister, network.counters
        self.transport, self.software = network.transport, network.software
        self.staged = staging is not None
        self.by_hand, self.close = network.by_hand, network.close


def connect(
    topology: Topology,
    hosts: Sequence[int],
    pages: Sequence[int],
    machine: Any,
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
    hosts : sequence of int
        Per rank, a number for its host.
    pages : sequence of int
        Address of every rank's ``HostPage``.
    machine : HostTarget or CudaTarget
    transport : {'auto', 'verbs', 'efa'}
    nics : sequence of str or None
        Names of network cards; None for those that are nearest.
    fabric : settings.SoftFabric or None
        What the software network is to do; None for real cards, if there are any or some are named.
    together : callable
        Runs a step; what fails on one rank is raised on all.
    allgather : callable
    """
    ports = devices.ports()
    # On one host, cards that nobody named are used if they can be.
    wanted = nics is not None or (loads() and devices.may_open() and _fitting(ports, transport))
    facts = allgather((ports, machine.place(), soft.reach(), bool(wanted)))
    real = len(set(hosts)) > 1 or any(wanted for *_, wanted in facts)
    software = fabric is not None or not real
    if software and len({reach for _, _, reach, _ in facts}) > 1:
        raise errors.ConfigurationError(
            "MKERNEL_FABRIC=soft: network cards made of software reach the processes of one host "
            "only, and these ranks are on several: unset it"
        )
    if transport == "auto":
        kinds = {port.kind for ports, *_ in facts for port in ports}
        transport = "efa" if devices.EFA in kinds and not software else "verbs"
    here = [rank for rank, host in enumerate(hosts) if host == hosts[topology.rank]]
    places = [facts[rank][1] for rank in here]

    def cards() -> Sequence[str]:
        if nics is not None:
            return nics
        if software:
            return (soft.EFA_CARDS if transport == "efa" else soft.VERBS_CARDS)[:1]
        return _nearest(ports, places, transport)[here.index(topology.rank)]

    chosen = together(cards)
    # What was chosen here is cut to what all have; what was asked for is not.
    given = allgather((len(chosen), nics is None))
    least = min(count for count, _ in given)
    counts = [least if automatic else count for count, automatic in given]
    chosen = chosen[: counts[topology.rank]]
    if len(set(counts)) > 1:
        raise errors.ConfigurationError(
            f"the ranks use different numbers of network cards, {counts}: give each as many in "
            "nics= or MKERNEL_NICS"
        )
    opened: list[Network] = []
    staging = None if machine.reached_by_cards else Staging(topology)

    def start() -> None:
        if software:
            soft.configure(fabric or settings.SoftFabric())
        where = topology.rank, topology.size, topology.links, pages
        counts = staging.arrivals if staging else 0
        kind = {"transport": transport, "cards": chosen, "software": software}
        opened.append(Network(*where, **kind, counts=counts))

    try:
        together(start)
        network = opened[0]
        addresses = allgather(together(network.addresses))
        theirs = {peer: addresses[peer][topology.rank] for peer in topology.links}
        together(lambda: network.connect(theirs))
        network.learn(LETTERS, allgather(together(network.register_letters)))
        if staging:
            slots = REGION, staging.memory.ctypes.data, staging.memory.nbytes
            network.learn(REGION, allgather(together(lambda: network.register(*slots))))
        nodes = together(lambda: Nodes(network, topology, machine, staging))
        together(network.start)
        return nodes
    except BaseException:
        for network in opened:
            network.close()
        raise


def _fitting(ports: Sequence[devices.Port], transport: str) -> list[devices.Port]:
    """Return the active ports that a transport can use."""
    kinds = {"auto": (True, False), "efa": (True,), "verbs": (False,)}[transport]
    return [port for port in ports if port.active and (port.kind == devices.EFA) in kinds]


def _nearest(
    ports: Sequence[devices.Port], places: Sequence[devices.Place], transport: str
) -> list[tuple[str, ...]]:
    """Return the cards of each rank of this host; ConfigurationError if there are none."""
    chosen = devices.choose(_fitting(ports, transport), places)
    if not all(chosen):
        there = [f"{port.name} ({port.kind}{'' if port.active else ', down'})" for port in ports]
        raise errors.ConfigurationError(
            f"nodes on different hosts need a network card for {transport} with an active port, "
            f"and this host has none (ports: {', '.join(there) or 'none'}): `mkernel-cp doctor` "
            "shows them; in a container, pass /dev/infiniband and /sys/class/infiniband on; else "
            "run all ranks on one host"
        )
    return chosen
