"""The runtime of a communicator: what operators use of it, how it is made, and how it ends."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from . import configuration, errors, lifetime, structs, tuning
from .agreement import Agreements
from .calls import Calls
from .construction import together
from .host_pages import HostPage, SignalPage, digest_of
from .launches import Launches
from .links import SocketLinks
from .memory import Segment
from .mirrors import Mirrors
from .shared_memory import SharedMemory
from .targets import cuda
from .targets.host import HostTarget
from .topology import Topology
from .trace import current as current_trace
from .transport.setup import connect
from .watcher import Watcher
from .world import World

_STAGING_AGENTS = 2  # as Stager::agents_in


class Runtime:
    """One rank's end of a communicator.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm or LocalComm
        Duplicated.
    device : int or None
    **asked
        As for `configuration.agreed`.

    Attributes
    ----------
    mpi : mpi4py.MPI.Intracomm or LocalComm
        The duplicate.
    rank, size, num_nodes : int
    topology : Topology
    target : str
    machine : HostTarget or CudaTarget
        Memory, arrays and launches of the target.
    network : Network or None
        Between nodes; None if there is one node.
    tuning : Table
        Choices that were measured.
    calls : Calls
    agree : callable
        As `Agreements.agree`.
    memory : SharedMemory
    world : World
    launches : Launches
    plans : dict
        By what was asked for.
    answers : dict
        The same, by the arrays and arguments of calls.
    """

    def __init__(self, comm: Any, *, device: int | None, **asked: Any):
        self.machine: Any = None
        self.network: Any = None
        self._agreements: Agreements | None = None
        self.memory: Any = None
        self.plans: dict[Any, Any] = {}
        self.answers: dict[Any, Any] = {}
        self._agreed: dict[int, list[Any]] = {}
        self._links: list[Any] = []
        self._mirrors: Mirrors | None = None
        self._end: lifetime.End | None = None
        self.mpi = comm.Dup()
        self.rank, self.size = self.mpi.Get_rank(), self.mpi.Get_size()
        try:
            self._configuration = configuration.agreed(self.mpi, **asked)
            self.target = self._configuration.target
            self.topology = Topology(self.rank, self._configuration.nodes)
            self.num_nodes = len(self.topology.sizes)
            self._choose_machine(device)
            self._share_pages()
            self._share_tuning()
            self._self_test()
            if self.num_nodes > 1:
                self._open_network()
            self._together(self._build)
        except BaseException:
            self._dismantle()
            raise

    # --- construction: the only place that may block in MPI ---------------------------------------

    def _choose_machine(self, device: int | None) -> None:
        asked = self._configuration
        host_links = self._linked(asked.hosts[self.rank])
        if self.target == "cuda":
            self.machine = cuda.CudaTarget(self.mpi, self.topology, device, asked.oversubscribe)
        elif self.num_nodes > 1:
            self.machine = HostTarget(self._linked(self.topology.node))
        else:
            self.machine = HostTarget(host_links)

    def _linked(self, group: int) -> Any:
        """Return what passes memory between the ranks that have this number alike."""
        ranks = self.mpi.Split(group, self.rank)
        links = ranks.links() if hasattr(ranks, "links") else SocketLinks(ranks)
        ranks.Free()
        self._links.append(links)
        return links

    def _share_pages(self) -> None:
        host_links = self._links[0]
        pages = self._exchange(HostTarget(host_links), HostPage.nbytes())
        begin = self._configuration.hosts[self.rank]
        neighbours = range(begin, begin + len(pages))
        remote = [rank for rank in range(self.size) if rank not in neighbours]
        if remote:
            self._mirrors = Mirrors(self.mpi, remote, self._together)
            self._links.append(self._mirrors)
            copies = self._together(lambda: [_private_page() for _ in remote])
            pages = [*copies[:begin], *pages, *copies[begin:]]
        signals = self._exchange(self.machine, SignalPage.nbytes(self.size))
        signals = self.topology.by_rank(signals)
        self._together(lambda: self._watch(pages, signals, host_links, neighbours))
        calls = self.calls
        self._end = lifetime.End(
            *(calls.pages, self.rank, calls.signals, self._watcher, self._links, self.machine)
        )
        # Also without close(); at exit, when finalizers do nothing any more, _at_exit sees to it.
        weakref.finalize(calls, self._end).atexit = False

    def _watch(
        self,
        segments: Sequence[Segment],
        signals: Sequence[Segment | None],
        host_links: Any,
        neighbours: range,
    ) -> None:
        """Make calls possible, and see whose peers die."""
        pages = [HostPage(segment) for segment in segments]
        addresses = self.machine.map_pages(pages, segments[0].nbytes)
        self._page_addresses = addresses
        self._signal_pages = [s and SignalPage(s, self.size) for s in signals]
        account = self.machine.signals(self._signal_pages[self.rank])
        self.calls = Calls(self.rank, pages, addresses, self.machine, account, self._mirrors)
        self._watcher: Watcher | None = None
        if self._mirrors is not None:
            self._mirrors.start(pages)
        processes = isinstance(host_links, SocketLinks)
        if processes or self._mirrors is not None:
            lost = lifetime.Lost(pages, self.rank, account)
            sockets, pids = (host_links.sockets, host_links.pids) if processes else ({}, {})
            self._watcher = Watcher(
                {neighbours[peer]: link for peer, link in sockets.items()},
                {neighbours[peer]: pid for peer, pid in pids.items()},
                *(self._mirrors, lost, pages[self.rank].beat),
            )
            self._watcher.start()

    def _together(self, step: Callable[[], Any]) -> Any:
        return together(self.mpi, step)

    def _exchange(self, machine: Any, nbytes: int) -> list[Segment]:
        created: list[Segment] = []

        def create() -> Any:
            created.append(machine.create(nbytes))
            return machine.ticket(created[0])

        try:
            tickets = self.mpi.allgather(self._together(create))
        except BaseException:
            for segment in created:
                machine.discard(segment)
            raise
        return self._together(lambda: machine.open(created[0], tickets, lambda peer: None))

    def _share_tuning(self) -> None:
        """Take the choices that rank 0 knows of, so that all have the same."""
        card = tuning.card_of(self.machine.device)
        measured = self.rank == 0 and self.num_nodes == 1  # all of it on one node
        known = self._together(lambda: tuning.load(card, self.size) if measured else [])
        self.tuning = tuning.Table(self.mpi.allgather(known)[0])

    def _self_test(self) -> None:
        """Write a pattern to every peer and read back what they wrote."""
        machine, pages, peers = self.machine, self._signal_pages, self.topology.peers
        place = structs.shared().Inbox.reserved.offset
        there = {peer: pages[peer].inbox_address(self.rank) + place for peer in peers}
        here = {peer: pages[self.rank].inbox_address(peer) + place for peer in peers}
        machine.write_words([*there.values()], [_pattern(self.rank, peer) for peer in peers])
        self.mpi.allgather(None)
        wrong = [
            peer
            for peer in peers
            if machine.word(here[peer]) != _pattern(peer, self.rank)
            or machine.word(there[peer]) != _pattern(self.rank, peer)
        ]
        results = self.mpi.allgather(wrong)
        if any(results):
            raise errors.ConfigurationError(
                f"{self.target} memory does not carry data between these ranks (reader: writers): "
                f"{ {rank: bad for rank, bad in enumerate(results) if bad} }; between GPUs the "
                "usual cause is an IOMMU or PCIe access control (ACS) that is switched on"
            )

    def _open_network(self) -> None:
        """Connect with the ranks of other nodes that this one exchanges data with."""
        asked, pages = self._configuration, self.calls.pages
        self.network = self._end.network = connect(
            *(self.topology, asked.hosts, [page.address for page in pages], self.machine),
            *(asked.transport, asked.nics, asked.fabric),
            *(self._together, self.mpi.allgather),
        )

    def _build(self) -> None:
        asked, machine, network = self._configuration, self.machine, self.network
        deadlines = asked.entry_seconds, asked.progress_seconds
        self._agreements = Agreements(
            self.mpi, self.calls, machine, *deadlines, self._watcher is not None
        )
        self.agree = self._agreements.agree
        self.world = World(
            *(self.topology, machine, self._page_addresses, self._signal_pages),
            *(0 if network is None else network.address, *deadlines),
        )
        self.memory = SharedMemory(
            *(self.calls, self._agreements, machine, self.topology, asked.hosts, network),
            self.world,
        )
        self.launches = Launches(
            *(self.calls, self.agree, self.memory, machine, self.world),
            self._signal_pages[self.rank],
            _STAGING_AGENTS if network is not None and network.staged else 0,
        )

    # --- plans ------------------------------------------------------------------------------------

    def agreement(
        self, what: str, need: Callable[[list], tuple[int, ...]] | None, work: Callable[[], Any]
    ) -> list[Any]:
        """Return what the ranks agreed on for `what`, asking them if it is new to them.

        It is new to all ranks or to none, since `what` holds nothing but what all must agree on.

        Parameters
        ----------
        what : str
            The operator and all agreed extents, dtypes and options.
        need : callable
            Given the contributions, signals and bytes of the arena, and perhaps words; a function
            of these and `what` alone. None: nothing.
        work : callable
            This rank's contribution.

        Returns
        -------
        list
            The contributions of all ranks.
        """
        key = digest_of(what)
        if key not in self._agreed:
            answers = self.agree(what, work)
            if need is not None:
                self.memory.reserve(*need(answers))
            self._agreed[key] = answers
        return self._agreed[key]

    def refuse_nodes(self, what: str) -> None:
        """Raise for what works within one node only."""
        if self.num_nodes > 1:
            raise errors.ConfigurationError(
                f"{what} works within one node only so far, and the ranks of this communicator are "
                f"on nodes of {list(self.topology.sizes)}: leave out nodes= and MKERNEL_NODES"
            )

    # --- the end ----------------------------------------------------------------------------------

    def close(self, *, together: bool) -> Exception | None:
        """Let go of everything; return the failure of an earlier call, once.

        `together`: all ranks do so now, none because of an exception.
        """
        if self.calls.is_over():
            return None
        try:
            trace = current_trace()
            if trace is not None:
                trace.collect(self.launches, together=together)
        finally:
            pending = self._finish()
        return pending

    def _finish(self) -> Exception | None:
        self.calls.enter("close()")
        try:
            if self.calls.depth > 1:
                raise errors.ConcurrentCallError("close() within a call of this communicator")
            self.calls.wait()
            pending = self.calls.pending() or self.calls.fault()
            self._end.reported = True
            self._dismantle()
            return pending
        finally:
            self.calls.leave()

    def _dismantle(self) -> None:
        for plan in list(self.plans.values()):
            plan.close()
        if self._end is not None:
            self.calls.end()
            self._end()
        else:
            for links in self._links:
                links.close()
            if self.machine is not None:
                self.machine.close()
        if self.memory is not None:
            self.memory.forget()
        # Freeing needs ranks that are there, and no collective that was left half done.
        stranded = self._agreements is not None and self._agreements.stranded
        if not (lifetime.lost or stranded or _finalized(self.mpi)):
            self.mpi.Free()


def _private_page() -> Segment:
    page = Segment.create(HostPage.nbytes())
    page.close_fd()
    return page


def _finalized(mpi: Any) -> bool:
    if hasattr(mpi, "links"):
        return False
    from mpi4py import MPI

    return MPI.Is_finalized()


def _pattern(writer: int, reader: int) -> int:
    return digest_of(f"self-test {writer} {reader}")
