"""`Communicator`: the ranks that make fused calls together, and the memory that they share."""

import ctypes
import itertools
import logging
import math
import operator
import os
import pickle
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import errors, lifetime, settings, structs, tuning
from .construction import Raised, host_of, together
from .failure import Awaited, Reason, Role
from .host_pages import (
    ANNOUNCED,
    READY,
    REFUSED,
    HostPage,
    SignalPage,
    abort,
    digest_of,
    signal,
    write_record,
)
from .kernel import Kernel
from .links import SocketLinks
from .memory import Heap, Segment, SegmentTable, round_up
from .mirrors import Mirrors
from .reference import array_split_counts
from .targets import cuda
from .targets.host import HostTarget
from .topology import Topology
from .trace import current as current_trace
from .transport.setup import connect
from .watcher import Watcher

logger = logging.getLogger("mkernel_cp")

_HEAP_GRAIN = 1 << 21
_NOWHERE = (1 << 64) - 1  # as in world.cuh
_STAGING_AGENTS = 2  # as Stager::agents_in
_WORD_SECONDS = 1.0  # that another rank may take to tell of a failure
_SILENCE_SECONDS = 2.0  # of a watcher, that mean nothing yet on a busy machine


@dataclass
class TestHooks:
    """What tests change in every launch of a communicator.

    Attributes
    ----------
    lanes : int
        Threads per agent.
    seed : int
        Draws random yields and early copies; 0 for none.
    delay_ns : tuple of int
        Per role, up to how long its agents start late.
    """

    __test__ = False  # not a test class, whatever pytest thinks of its name
    lanes: int = 1
    seed: int = 0
    delay_ns: tuple[int, ...] = (0, 0)


@dataclass(frozen=True)
class Arena:
    """The segment that serves all plans of a communicator: signals first, data behind.

    Attributes
    ----------
    number : int
        Of the segment.
    signals, nbytes : int
        Signal words at its start, and bytes of data behind them.
    """

    number: int
    signals: int
    nbytes: int

    @staticmethod
    def data_offset_for(signals: int) -> int:
        """Return where the data start behind so many signals, in bytes."""
        return round_up(8 * signals, 4096)


class Communicator:
    """Ranks that make fused calls together.

    Making one is collective, like every call on it that is not said to be local. It is a context
    manager; leaving it closes it.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm or LocalComm, optional
        The ranks; duplicated. Default: ``MPI.COMM_WORLD``.
    target : {'auto', 'host', 'cuda'}, optional
        What kernels are compiled for. 'auto' takes MKERNEL_TARGET; if that is unset, 'cuda' if any
        rank's host has an NVIDIA GPU, else 'host'. Ranks that are threads have 'host'.
    device : int, optional
        This rank's GPU, as CUDA counts; it becomes the current device. Default: by rank. Nothing
        on the host target.
    nodes : int or sequence of int, optional
        Virtual nodes: their number, or the size of each; none reaches over two hosts. Default:
        MKERNEL_NODES, else each host is a node. The ranks of one host then reach those of another
        node over the network only, as on different hosts.
    transport : {'auto', 'verbs', 'efa'}, optional
        How nodes are reached. 'auto' takes MKERNEL_TRANSPORT; if that is unset, 'efa' if there is
        an EFA card, else 'verbs'.
    nics : sequence of str, optional
        This rank's network cards, with a colon and the number of a port where that is not the
        first active one: ``['mlx5_0', 'mlx5_1:2']``. Default: MKERNEL_NICS, else the fastest that
        are nearest to this rank; on a host without any, nodes meet over one made of software.
    entry_timeout, progress_timeout : float, optional
        Seconds that a call waits for a peer to enter it (default 600), and for a peer that has
        entered it to go on (default 30); 0 means no limit. MKERNEL_TIMEOUT changes the defaults.
    oversubscribe : bool, optional
        Let several ranks have one GPU, which is slow and meant for tests. Default: refuse that.

    Attributes
    ----------
    rank, size : int
    node, num_nodes, local_rank, local_size : int
        Where this rank is: its node, and its place in that.
    target : str
    device : str
        'cpu' on the host target; number and name of the GPU on the cuda target.
    mpi : mpi4py.MPI.Intracomm or LocalComm
        The duplicate.

    Raises
    ------
    ConfigurationError
        On all ranks, if the ranks cannot work together or a setting is wrong on one of them.
    OutOfMemoryError
        On all ranks, if there is no shared memory.

    Examples
    --------
    >>> from mpi4py import MPI
    >>> import mkernel_cp as mk
    >>> with mk.Communicator(MPI.COMM_WORLD) as comm:
    ...     a = comm.asarray(rows_of_this_rank)
    ...     c = mk.allgather_gemm(a, b, comm=comm)
    """

    def __init__(
        self,
        comm: Any = None,
        *,
        target: str = "auto",
        device: int | None = None,
        nodes: int | Sequence[int] | None = None,
        transport: str = "auto",
        nics: Sequence[str] | None = None,
        entry_timeout: float | None = None,
        progress_timeout: float | None = None,
        oversubscribe: bool = False,
    ):
        if comm is None:
            from mpi4py import MPI

            comm = MPI.COMM_WORLD
        if not hasattr(comm, "Dup"):
            raise TypeError(
                f"comm is a {type(comm).__name__}: use an intracommunicator of mpi4py, or what "
                "LocalWorld passes to its program"
            )
        settings.warn_unknown()
        self._end: lifetime.End | None = None
        self._machine: Any = None
        self._all_links: list[Any] = []
        self._mirrors: Mirrors | None = None
        self._failure: errors.Error | None = None
        self._closed = False
        self._stranded = False  # a collective of MPI's was given up
        self._process = os.getpid()
        self._in_call = threading.RLock()
        self._depth = 0  # of calls within calls
        self._told: BaseException | None = None  # the last error that the peers know of
        self.mpi = comm.Dup()
        self.rank, self.size = self.mpi.Get_rank(), self.mpi.Get_size()
        try:
            asked = target, nodes, transport, nics
            self._settle(*asked, entry_timeout, progress_timeout, oversubscribe)
            self._choose_machine(device, oversubscribe)
            self._share_pages()
            self._share_tuning()
            self._self_test()
            if self.num_nodes > 1:
                self._open_network()
        except BaseException:
            self._dismantle()
            raise

    # --- construction: the only place that may block in MPI ---------------------------------------

    def _settle(
        self,
        target: Any,
        nodes: Any,
        transport: Any,
        nics: Any,
        entry: Any,
        progress: Any,
        oversubscribe: bool,
    ) -> None:
        """Agree on what all ranks must have alike."""
        fact: Any
        try:
            defaults = settings.timeouts()
            self._nics = _nics(nics)
            fact = {
                "target": _target(target),
                "nodes": _nodes(nodes, self.size),
                "transport": _transport(transport),
                "fabric": settings.fabric(),
                "timeouts": (
                    _seconds("entry_timeout", entry, defaults.entry),
                    _seconds("progress_timeout", progress, defaults.progress),
                ),
                "oversubscribe": bool(oversubscribe),
            }
        except (TypeError, ValueError, errors.Error) as error:
            fact = error
        facts = self.mpi.allgather((fact, host_of(self.mpi), cuda.has_gpu()))
        for rank, (fact, *_) in enumerate(facts):
            if isinstance(fact, Exception):
                raise type(fact)(f"rank {rank}: {fact}")
        threads = hasattr(self.mpi, "links")
        automatic = "cuda" if any(has for *_, has in facts) and not threads else "host"
        for fact, *_ in facts:
            if fact["target"] == "auto":
                fact["target"] = automatic
        first = facts[0][0]
        for rank, (fact, *_) in enumerate(facts):
            if fact != first:
                raise errors.ArgumentMismatchError(
                    f"Communicator() on rank 0 has {first}, on rank {rank} {fact}; give all ranks "
                    "the same arguments and the same MKERNEL_* variables"
                )
        self.target = first["target"]
        self._hosts = [host for _, host, _ in facts]
        nodes = _real_nodes(self._hosts, first["nodes"])
        self.topology = Topology(self.rank, nodes)
        self._asked = first
        if self.target == "cuda" and threads:
            raise errors.ConfigurationError(
                "ranks that are threads share no GPU: use target='host' for them, or start "
                "processes with mpirun"
            )
        self.node, self.num_nodes = self.topology.node, len(nodes)
        self.local_rank, self.local_size = self.topology.local_rank, self.topology.local_size
        self._network: Any = None
        self._entry_seconds, self._progress_seconds = first["timeouts"]

    def _choose_machine(self, device: int | None, oversubscribe: bool) -> None:
        self._links = self._linked(self._hosts[self.rank])
        if self.target == "cuda":
            self._machine = cuda.CudaTarget(self.mpi, self.topology, device, oversubscribe)
        elif self.num_nodes > 1:
            self._machine = HostTarget(self._linked(self.node))
        else:
            self._machine = HostTarget(self._links)
        self.device = self._machine.device

    def _linked(self, group: int) -> Any:
        """Return what passes memory between the ranks that have this number alike."""
        ranks = self.mpi.Split(group, self.rank)
        links = ranks.links() if hasattr(ranks, "links") else SocketLinks(ranks)
        ranks.Free()
        self._all_links.append(links)
        return links

    def _share_pages(self) -> None:
        pages = self._exchange_blocking(HostTarget(self._links), HostPage.nbytes())
        begin = self._hosts[self.rank]
        self._host_peers = range(begin, begin + len(pages))
        remote = [rank for rank in range(self.size) if rank not in self._host_peers]
        if remote:
            self._mirrors = Mirrors(self.mpi, remote, self._together)
            self._all_links.append(self._mirrors)
            copies = self._together(lambda: [Segment.create(HostPage.nbytes()) for _ in remote])
            for copy in copies:
                copy.close_fd()
            pages = [*copies[:begin], *pages, *copies[begin:]]
        signals = self._exchange_blocking(self._machine, SignalPage.nbytes(self.size))
        signals = self.topology.by_rank(signals)
        self._together(lambda: self._assemble(pages, signals))
        self._end = lifetime.End(
            self._pages, self.rank, self._watcher, self._all_links, self._machine
        )
        # Also without close(); at exit, when finalizers do nothing any more, _at_exit sees to it.
        weakref.finalize(self, self._end).atexit = False

    def _assemble(self, pages: list[Segment], signals: list[Segment]) -> None:
        self._watcher: Watcher | None = None
        self._pages = [HostPage(segment) for segment in pages]
        self._page_addresses = self._machine.map_pages(self._pages, pages[0].nbytes)
        self._signal_pages = [s and SignalPage(s, self.size) for s in signals]
        self._signals = self._machine.signals(self._signal_pages[self.rank])
        self._segments = SegmentTable(self.rank, self.size)
        self._heap = Heap()
        self._heap_numbers: list[int] = []
        self._arena: Arena | None = None
        self._agreements: dict[int, Any] = {}
        self._pulse: dict[int, tuple[int, float]] = {}
        self.plans: dict[Any, Any] = {}  # by what was asked for
        self.answers: dict[Any, Any] = {}  # the same, by the arrays and arguments of calls
        self._kernels: dict[Any, Any] = {}
        self.hooks = TestHooks()
        self._make_world()
        if self._mirrors is not None:
            self._mirrors.start(self._pages)
        processes = isinstance(self._links, SocketLinks)
        if processes or self._mirrors is not None:
            watch = lifetime.Lost(self._pages, self.rank, self._signals)
            sockets, pids = (self._links.sockets, self._links.pids) if processes else ({}, {})
            self._watcher = Watcher(
                {self._host_peers[peer]: link for peer, link in sockets.items()},
                {self._host_peers[peer]: pid for peer, pid in pids.items()},
                *(self._mirrors, watch, self._pages[self.rank].beat),
            )
            self._watcher.start()

    def _together(self, step: Callable[[], Any]) -> Any:
        return together(self.mpi, step)

    def _exchange_blocking(self, machine: Any, nbytes: int) -> list[Segment]:
        created: list[Segment] = []

        def create() -> Any:
            created.append(machine.create(nbytes))
            return machine.ticket(created[0])

        tickets = self.mpi.allgather(self._together(create))
        return self._together(lambda: machine.open(created[0], tickets, lambda peer: None))

    def _share_tuning(self) -> None:
        """Take the choices that rank 0 knows of, so that all have the same."""
        card = tuning.card_of(self.device)
        measured = self.rank == 0 and self.num_nodes == 1  # all of it on one node
        known = self._together(lambda: tuning.load(card, self.size) if measured else [])
        self.tuning = tuning.Table(self.mpi.allgather(known)[0])

    def _make_world(self) -> None:
        """Fill in the struct by which kernels know this communicator."""
        mk, page, constant = structs.shared(), self._signal_pages[self.rank], self._machine.constant
        outbox = [page.inbox_address(self.rank) if page else 0 for page in self._signal_pages]
        self._pointers = {
            "outbox": constant(np.array(outbox, np.uint64)),
            "pages": constant(np.array(self._page_addresses, np.uint64)),
            "segments": constant(self._segments.pointers),
        }
        self._world = mk.World(
            rank=self.rank,
            size=self.size,
            node_begin=self.topology.begin,
            node_size=self.local_size,
            entry_timeout_ns=int(self._entry_seconds * 1e9),
            progress_timeout_ns=int(self._progress_seconds * 1e9),
            generation=page.generation_word,
            running=page.running_word,
            looked=page.looked_word,
            counters=page.counters,
            failures=page.failures_word,
            bytes_from_peers=page.bytes_word,
            inbox=page.inbox_address(0),
            **{name: pointers.address for name, pointers in self._pointers.items()},
        )
        self._world_constant = constant(self._world)
        self._delays: tuple[Any, ...] = ()

    def _add_segments(self, segments: list[Segment]) -> int:
        number = self._segments.add(segments)
        self._tell_segments()
        if self._network is not None and not self._network.staged:
            own, register = segments[self.rank], self._network.register
            self._network.learn(
                number,
                self.agree(
                    "to register memory with network cards",
                    lambda: register(number, own.address, own.nbytes),
                ),
            )
        return number

    def _tell_segments(self) -> None:
        table = self._machine.constant(self._segments.pointers)
        self._world.segments = table.address
        self._world_constant.update()
        self._pointers["segments"] = table

    def _self_test(self) -> None:
        """Write a pattern to every peer and read back what they wrote."""
        machine, pages, peers = self._machine, self._signal_pages, self.topology.peers
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
        asked = self._asked
        self._network = self._end.network = connect(
            *(self.topology, self._hosts, [page.address for page in self._pages], self._machine),
            *(asked["transport"], self._nics, asked["fabric"]),
            *(self._together, self.mpi.allgather),
        )
        self._world.network = self._network.address
        self._world_constant.update()

    # --- topology ---------------------------------------------------------------------------------

    @property
    def network(self) -> Any:
        """The network between nodes; None if there is one node."""
        return self._network

    @property
    def closed(self) -> bool:
        """Whether no call can be made any more, after `close` or a failure."""
        return self._closed or self._failed()

    def row_counts(self, m: int) -> tuple[int, ...]:
        """Return how many of `m` rows each rank gets if they are split as by `numpy.array_split`.

        Local.
        """
        return array_split_counts(m, self.size)

    def rows(self, m: int) -> slice:
        """Return which of `m` rows are this rank's if they are split as by `numpy.array_split`.

        Local.

        Examples
        --------
        >>> a_r = a[comm.rows(len(a))]
        """
        counts = self.row_counts(m)
        start = sum(counts[: self.rank])
        return slice(start, start + counts[self.rank])

    def __repr__(self) -> str:
        state = ", closed" if self.closed else ""
        return (
            f"<Communicator rank {self.rank} of {self.size}, node {self.node} of {self.num_nodes} "
            f"(local rank {self.local_rank} of {self.local_size}), target {self.target}, "
            f"device {self.device}{state}>"
        )

    # --- arrays in segments -----------------------------------------------------------------------

    def empty(self, shape: Any, dtype: Any = np.float64, order: str = "C") -> np.ndarray:
        """Return an uninitialised array that peers can read in place.

        Collective, but shapes and dtypes may differ by rank. Its memory is free for other arrays
        when the last view of it is gone; that is local. The array may outlive the communicator.

        Parameters
        ----------
        shape : int or tuple of int
        dtype : data-type, optional
        order : {'C', 'F'}, optional

        Returns
        -------
        numpy.ndarray, or cupy.ndarray on the cuda target

        Raises
        ------
        OutOfMemoryError
            On all ranks, if one of them has no shared memory left; the communicator stays usable.
        """
        with self.calling("empty()"):
            return self._empty(shape, dtype, order)

    def _empty(self, shape: Any, dtype: Any, order: str) -> Any:
        try:
            shape = (shape,) if isinstance(shape, int | np.integer) else tuple(shape)
            shape = tuple(operator.index(extent) for extent in shape)
        except TypeError:
            raise TypeError(f"shape={shape!r}: use an integer or a tuple of integers") from None
        dtype = np.dtype(dtype)
        if min(shape, default=0) < 0:
            raise ValueError(f"shape {shape}: negative dimensions are not allowed")
        if dtype.hasobject:
            raise TypeError(f"dtype {dtype}: objects cannot be shared between processes")
        if dtype.itemsize == 0 or dtype.subdtype:
            raise TypeError(f"dtype {dtype}: use one whose elements have a size and no shape")
        np.broadcast_to(np.empty((), dtype), shape)  # raises what NumPy says of such a shape
        if order not in ("C", "F"):
            raise ValueError(f"order {order!r}: not allowed; use 'C' or 'F'")
        nbytes = math.prod(shape) * dtype.itemsize
        answers = self.agree(
            "empty(), zeros() or asarray()",
            lambda: (not self._heap.fits(nbytes), self._unused_heap_segments()),
        )
        if any(full for full, _ in answers):
            # What no rank uses any more makes room first.
            for number in sorted(set.intersection(*(unused for _, unused in answers))):
                segment = self._segments[number]
                if self._let_go(number):
                    self._heap.remove(segment)
                    self._heap_numbers.remove(number)
            segments = self._share(round_up(max(nbytes, 1), _HEAP_GRAIN))
            self._heap_numbers.append(self._add_segments(segments))
            self._heap.add(segments[self.rank])
        self._machine.begin()  # a launch may still use what the room held before
        if order == "F":
            return self._heap.allocate(shape[::-1], dtype).T
        return self._heap.allocate(shape, dtype)

    def zeros(self, shape: Any, dtype: Any = np.float64, order: str = "C") -> np.ndarray:
        """Return an array of zeros that peers can read in place; see `empty`."""
        with self.calling("zeros()"):
            array = self._empty(shape, dtype, order)
            self._machine.zero(array)
            return array

    def asarray(self, a: Any, dtype: Any = None) -> np.ndarray:
        """Return `a` in memory that peers can read in place: `a` itself if it is there already.

        Collective; see `empty`. A copy has the order of `a`, without gaps between its rows.
        """
        with self.calling("asarray()"):
            a = self._machine.asarray(a, dtype)
            here = a.size == 0 or self.in_segment(self._machine.shadow(a))
            steps = [abs(step) for n, step in zip(a.shape, a.strides, strict=True) if n > 1]
            fortran = len(steps) > 1 and steps == sorted(steps)
            copy = self._empty(0 if here else a.shape, a.dtype, "F" if fortran else "C")
            if here:
                return a
            self._machine.copy(copy, a)
            return copy

    # --- agreement of the hosts -------------------------------------------------------------------

    def agree(self, what: str, work: Callable[[], Any]) -> list[Any]:
        """Give `work()` of every rank to all ranks; a generation of its own.

        The ranks first announce what they are about to do, so that one that calls something else
        ends in an error, not in a wait. An exception of `work` is raised on all ranks alike.
        """
        with self.calling(what):
            values = self._agree(what, work)
            for value in values:
                if isinstance(value, Raised):
                    self._told = value.error
                    raise value.error
            return values

    def _agree(self, what: str, work: Callable[[], Any]) -> list[Any]:
        self._machine.refuse_capture(what)
        self._signals.refresh()
        generation = self._signals.generation + 1
        digest = digest_of(what)
        self._pages[self.rank].set_text(generation, what)
        self._post(generation, ANNOUNCED, digest)
        try:
            data = pickle.dumps((generation, digest, work()))
        except Exception as error:
            self._raise_failure()
            data = pickle.dumps((generation, digest, Raised(self.rank, error)))
        replies = self._gather(data, generation)
        values = []
        for rank, (turn, theirs, value) in enumerate(map(pickle.loads, replies)):
            if turn != generation or theirs != digest:
                self._leave_word_to(0)
            if turn != generation:  # the one who is ahead has refused calls that the other makes
                ahead = rank if turn > generation else self.rank
                self._fail(Reason.REFUSED, ahead, min(turn, generation))
            if theirs != digest:
                self._fail(Reason.MISMATCH, rank, generation)
            values.append(value)
        self._post(generation, READY, digest)
        self._signals.advance()
        return values

    def _gather(self, data: bytes, generation: int) -> list[bytes]:
        """Allgather of bytes, polled: MPI never blocks this rank while another may be gone."""
        lengths = np.zeros(self.size, np.int64)
        own = np.array([len(data)], np.int64)
        self._complete(self.mpi.Iallgather(own, lengths), (own, lengths), generation)
        width = int(lengths.max())
        padded = np.frombuffer(data.ljust(width, b"\0"), np.uint8).copy()
        everything = np.zeros((self.size, width), np.uint8)
        request = self.mpi.Iallgather(padded, everything)
        self._complete(request, (padded, everything), generation)
        return [row[:n].tobytes() for row, n in zip(everything, lengths, strict=True)]

    def _complete(self, request: Any, buffers: Any, generation: int) -> None:
        start = time.monotonic()
        tries = 0
        self._pulse.clear()
        while not request.Test():
            tries += 1
            try:
                self._look(generation, time.monotonic() - start)
            except BaseException:
                self._stranded = True
                _abandoned.append((request, buffers))
                raise
            # Ever longer: other ranks may need the core, to compile for instance.
            time.sleep(0 if tries < 100 else min(1e-2, 5e-7 * tries))

    def _look(self, generation: int, waited: float) -> None:
        """Raise if this agreement cannot come about any more."""
        self._raise_failure()
        for peer in self._peers():
            closed = self._pages[peer].words.closed  # looked at first: what it called came before
            called = self._pages[peer].words.called
            if self._pages[peer].refused(generation):
                self._fail(Reason.REFUSED, peer, generation)
            late = self._entry_seconds and waited > self._entry_seconds
            if called >> 32 > generation and not late:
                continue  # it has all our data, and went on
            if called == signal(generation, READY):
                continue  # it has all our data, and may well have closed
            if closed:
                why = self._pages[peer].words.abort  # it says more than that it has closed
                if why and not self._failed():
                    self._pages[self.rank].words.abort = why
                self._fail(Reason.CLOSED, peer, generation)
            if called == signal(generation, ANNOUNCED):
                self._look_at_pulse(peer, generation)
                continue  # it agrees too; the answers tell on what
            if late:
                self._fail(Reason.ENTRY_TIMEOUT, peer, generation, waited)

    def _look_at_pulse(self, peer: int, generation: int) -> None:
        """Raise if a peer that is at work has stopped: what it does may take long, silence not."""
        beat, now = self._pages[peer].words.beat, time.monotonic()
        seen, since = self._pulse.get(peer, (None, now))
        if beat != seen:
            self._pulse[peer] = beat, now
        limit = max(self._progress_seconds, _SILENCE_SECONDS) if self._progress_seconds else None
        if self._watcher and limit and beat == seen and now - since > limit:
            self._fail(Reason.PROGRESS_TIMEOUT, peer, generation, now - since)

    def _await_neighbour(self, local: int) -> None:
        self._raise_failure()
        self._look_at_pulse(self.topology.peers[local], self._signals.generation + 1)

    def _unused_heap_segments(self) -> set[int]:
        return {n for n in self._heap_numbers if self._heap.is_unused(self._segments[n])}

    def _let_go(self, number: int) -> bool:
        """Give back segments that no rank uses any more, unless a captured graph may."""
        self._machine.wait()
        if any(self.agree("whether graphs hold memory", lambda: self._machine.captured)):
            return False
        unused = self._segments.remove(number)
        if self._network is not None and not self._network.staged:
            self._network.unregister(number)
        self.agree("to let go of memory", lambda: self._machine.unmap(unused))
        self._machine.discard(unused[self.rank])
        return True

    def _share(self, nbytes: int) -> list[Segment]:
        """Return a new segment of every rank; all ranks succeed or none does."""
        machine = self._machine
        created: list[Segment] = []
        mapped: list[Segment] = []

        def create() -> Any:
            available = machine.available()
            created.append(machine.create(nbytes))
            return machine.ticket(created[0]), nbytes, available

        try:
            answers = self.agree("to share memory", create)
            # Ranks of one host draw on the same memory.
            for host in sorted(set(self._hosts)):
                there = [answers[rank] for rank, its in enumerate(self._hosts) if its == host]
                total = sum(size for _, size, _ in there)
                available = min(left for *_, left in there)
                if total > available:
                    error = self._told = errors.OutOfMemoryError(
                        f"the ranks of the host of rank {host} ask for {total} bytes of shared "
                        f"memory together, and {available} are available"
                    )
                    raise error
        except BaseException:
            for segment in created:
                machine.discard(segment)
            raise
        tickets = [ticket for ticket, *_ in answers]
        self._pulse.clear()
        self.agree(
            "to map shared memory",
            lambda: mapped.extend(machine.open(created[0], tickets, self._await_neighbour)),
        )
        return self.topology.by_rank(mapped)

    # --- what operators need ----------------------------------------------------------------------

    def agreement(
        self, what: str, need: Callable[[], tuple[int, int]] | None, work: Callable[[], Any]
    ) -> list[Any]:
        """Return what the ranks agreed on for `what`, asking them if it is new to them.

        It is new to all ranks or to none, since `what` holds nothing but what all must agree on.

        Parameters
        ----------
        what : str
            The operator and all agreed extents, dtypes and options.
        need : callable
            Signals and bytes of the arena; a function of `what` alone. None: nothing.
        work : callable
            This rank's contribution.

        Returns
        -------
        list
            The contributions of all ranks.
        """
        key = digest_of(what)
        if key not in self._agreements:
            answers = self.agree(what, work)
            if need is not None:
                self._reserve(*need())
            self._agreements[key] = answers
        return self._agreements[key]

    def _reserve(self, signals: int, nbytes: int) -> None:
        old = self._arena
        if old and old.signals >= signals and old.nbytes >= nbytes:
            return
        signals = max(signals, old.signals if old else 0)
        nbytes = max(nbytes, old.nbytes if old else 0)
        segments = self._share(Arena.data_offset_for(signals) + nbytes)
        if old:
            # Nobody uses it once all ranks have come here and their earlier calls are over.
            self._let_go(old.number)
        self._arena = Arena(self._add_segments(segments), signals, nbytes)

    @property
    def arena(self) -> Arena | None:
        """The arena as it is; a plan made for an earlier one binds its addresses again."""
        return self._arena

    @property
    def segments(self) -> SegmentTable:
        """Every rank's segments."""
        return self._segments

    @property
    def machine(self) -> Any:
        """The target: memory, arrays and launches."""
        return self._machine

    def in_segment(self, a: np.ndarray) -> bool:
        """Return whether all of a user's array lies in a heap segment, where peers can read it.

        `a` is the array or its shadow.
        """
        place = self._segments.locate(*extent(a)) if a.size else None
        return place is not None and (self._arena is None or place.segment != self._arena.number)

    @staticmethod
    def digest(what: str) -> int:
        """Return the digest by which kernels compare what their ranks call."""
        return digest_of(what)

    @property
    def world_address(self) -> int:
        """Address of the ``World`` struct."""
        return self._world_constant.address

    @property
    def bytes_from_peers(self) -> int:
        """Bytes that kernels have brought here from peers, as they counted them."""
        return self._machine.word(self._signal_pages[self.rank].bytes_word)

    @property
    def generation(self) -> int:
        """Of the last call or agreement that this rank has made."""
        self._signals.refresh()
        return self._signals.generation

    def prepare(self, kernel: Any, params: ctypes.Structure, agents: int, shared_bytes: int) -> Any:
        """Return the launch struct for a kernel; keeps `params` alive."""
        delays = self.hooks.delay_ns, self.hooks.seed
        if delays != self._delays:
            self._delays = delays
            for role, delay in enumerate(self.hooks.delay_ns):
                self._world.delay_ns[role] = delay
            self._world.delay_seed = self.hooks.seed * self.size + self.rank
            self._world_constant.update()
        agents += self.staging_agents
        return kernel.request(params, agents, self.hooks.lanes, shared_bytes, self._lane_seed())

    @property
    def staging_agents(self) -> int:
        """Agents that each launch has beside those of its plan: what they do no kernel knows of."""
        return _STAGING_AGENTS if self._network is not None and self._network.staged else 0

    def _lane_seed(self) -> int:
        if not self.hooks.seed:
            return 0
        return (self.hooks.seed * self.size + self.rank) * 1_000_003 + self._signals.generation + 1

    def run(self, kernel: Any, request: Any, what: str) -> None:
        """Launch; raise what any rank raised in it as far as this target waits for that."""
        trace = current_trace()
        if trace is not None and not self._machine.capturing:
            kernel = trace.variant(self, kernel, request, what)
        generation = self._signals.generation + 1
        self._pages[self.rank].set_text(generation, what)
        try:
            self._machine.launch(kernel, request)
        except OSError as reason:
            raise errors.OutOfMemoryError(
                f"{what}: its threads or its grid could not be started: {reason.strerror or reason}"
            ) from None
        if not self._signals.launched(generation):
            self._raise_failure()
            raise errors.Error(f"{what}: the kernel ended without result or record")

    def launch(
        self,
        kernel: Kernel,
        agents: int,
        args: Sequence[Any] = (),
        *,
        operand: Any = None,
        shared_bytes: int = 0,
        stream: Any = None,
    ) -> None:
        """Run a kernel of one's own on every rank; collective, and a call like any operator's.

        The kernel takes one struct: ``mk::World*``, ``mk::CallMessage``, and then `args`, 8 bytes
        each. The message tells the peers where `operand` lies; it is for
        ``mk::Launch::announce``, and its digest for ``await_call``.

        Parameters
        ----------
        kernel : Kernel
            Of a `Module`; compiled by its first launch.
        agents : int
            How many of them; agents of one launch run at the same time.
        args : sequence of array, int or float
            Arrays are passed as pointers.
        operand : array, optional
            From `empty`, `zeros` or `asarray`: what peers read by ``mk::Launch::operand_of``; its
            rows must be contiguous.
        shared_bytes : int, optional
            Scratch memory of each agent.
        stream : optional
            As for every operator.

        Raises
        ------
        TypeError, ValueError
            If this rank's arguments are wrong; its peers raise `PeerError`.
        ArgumentMismatchError
            On all ranks, if they launch different kernels, or one reads an operand that its peer
            has not passed.
        Error
            As for every operator.
        """
        with self.calling("launch()"), self._machine.on(stream):
            if not isinstance(kernel, Kernel):
                raise TypeError(
                    f"kernel is a {type(kernel).__name__}: use Module(...).kernel(name)"
                )
            what = f"launch of {kernel.name}"
            self.refuse_nodes("launch()")
            if operator.index(shared_bytes) < 0:
                raise ValueError(f"shared_bytes={shared_bytes}: use 0 or more")
            if operator.index(agents) < 1:
                raise ValueError(f"agents={agents}: use at least 1")
            message = structs.shared().CallMessage(digest=digest_of(what))
            loaded = self.load(kernel)
            if operand is None:
                message.operand.segment = _NOWHERE
            else:
                operand = self._machine.shadow(self._machine.array("operand", operand))
                self._place(operand, message)
            words = b"".join(map(self._argument, args))
            params = ctypes.create_string_buffer(
                struct.pack("=Q", self.world_address) + bytes(message) + words,
                8 + ctypes.sizeof(message) + len(words),
            )
            if len(params) != loaded.params_bytes:
                raise ValueError(
                    f"{what}: its struct has {loaded.params_bytes} bytes; World*, CallMessage and "
                    f"{len(args)} arguments make {len(params)}"
                )
            capacity = loaded.capacity(shared_bytes)
            if agents > capacity:
                raise ValueError(
                    f"agents={agents}: {self.device} runs {capacity} of {kernel.name} at a time"
                )
            self._machine.begin()
            request = self.prepare(loaded, params, agents, shared_bytes)
            self.run(loaded, request, what)

    def refuse_nodes(self, what: str) -> None:
        """Raise for what works within one node only."""
        if self.num_nodes > 1:
            raise errors.ConfigurationError(
                f"{what} works within one node only so far, and the ranks of this communicator are "
                f"on nodes of {list(self.topology.sizes)}: leave out nodes= and MKERNEL_NODES"
            )

    def _place(self, operand: np.ndarray, message: ctypes.Structure) -> None:
        """Say in a message where peers find an operand; ValueError if they cannot read it."""
        if operand.size == 0:
            return
        contiguous = operand.ndim > 0 and operand.strides[-1] == operand.itemsize
        if not contiguous or min(operand.strides) < 0 or not self.in_segment(operand):
            raise ValueError(
                "operand: use an array from empty(), zeros() or asarray(), with contiguous rows in "
                "ascending order, so that peers can read it"
            )
        place = self._segments.locate(*extent(operand))
        message.operand.segment, message.operand.offset = place.segment, place.offset
        message.operand_pitch = operand.strides[0]

    def load(self, kernel: Kernel) -> Any:
        """Return a kernel as this communicator's target runs it; compiled by the first use."""
        if kernel not in self._kernels:
            if kernel.target not in ("auto", self.target):
                raise errors.ConfigurationError(
                    f"{kernel.name} is for target {kernel.target!r}, the communicator's is "
                    f"{self.target!r}: leave out target= of its Module, or make another"
                )
            self._kernels[kernel] = self._machine.kernel(kernel)
        return self._kernels[kernel]

    def source_of(self, loaded: Any) -> Kernel:
        """Return what `load` has made a kernel of."""
        return next(source for source, known in self._kernels.items() if known is loaded)

    def record_in(self, address: int) -> None:
        """Tell traced kernels where their ``Trace`` struct lies."""
        self._world.trace = address
        self._world_constant.update()

    def _argument(self, value: Any) -> bytes:
        """Return the 8 bytes by which a kernel gets an argument."""
        if isinstance(value, float | np.floating):
            return struct.pack("=d", value)
        if not hasattr(value, "shape") or isinstance(value, np.generic):
            try:
                number = operator.index(value)
                return struct.pack("=q" if number < 1 << 63 else "=Q", number)
            except (TypeError, struct.error):
                raise TypeError(
                    f"argument {value!r}: use an array, a float, or an integer of 64 bits"
                ) from None
        array = self._machine.shadow(self._machine.array("argument", value))
        return struct.pack("=Q", array.ctypes.data)

    def calling(self, what: str) -> "_Calling":
        """Make one call, from the check of its arguments to its end.

        No other thread can make one meanwhile. What keeps this rank alone from making it is told to
        the peers, which would wait for it otherwise.
        """
        return _Calling(self, what)

    def _enter(self, what: str) -> None:
        if not self._in_call.acquire(blocking=False):
            raise errors.ConcurrentCallError(
                f"{what} while another thread is in a call of this communicator: the ranks' calls "
                "need one order; make them from one thread, or give each thread its communicator"
            )
        self._depth += 1

    def _leave(self) -> None:
        self._depth -= 1
        self._in_call.release()

    def refuse(self, error: BaseException) -> None:
        """Post an error in place of this rank's next call, so that no peer waits for it."""
        self._told = error
        self._signals.refresh()
        generation = self._signals.generation + 1
        text = f"{type(error).__name__}: {error}"
        self._pages[self.rank].set_text(generation, text, refusal=True)
        self._post(generation, REFUSED)
        self._signals.advance()

    def _raise_fault(self) -> None:
        """Raise what a kernel has found wrong with the data of a call, once.

        All ranks do, each by itself, and none leaves out a call for it: so they stay in step.
        """
        error = lifetime.fault_in(self._pages[self.rank])
        if error is not None:
            raise error

    def _post(self, generation: int, progress: int, digest: int = 0) -> None:
        """Tell all ranks what this host does in a generation in place of a launch.

        They see it when the launches before are over: who is further has left this one out.
        """
        page, address = self._pages[self.rank], self._page_addresses[self.rank]
        for word, value in (("digest", digest), ("called", signal(generation, progress))):
            place = getattr(type(page.words), word).offset
            self._machine.write_in_order(address + place, value)

    def _peers(self) -> Iterator[int]:
        return ((self.rank + i) % self.size for i in range(1, self.size))

    # --- failure and end --------------------------------------------------------------------------

    def _begin(self, what: str) -> None:
        if self._process != os.getpid():
            raise RuntimeError(
                f"{what} in a forked child: a communicator belongs to the process that made it; "
                "make it after the fork, or start the child by 'spawn' (with the import of MPI and "
                "the program under if __name__ == '__main__')"
            )
        if self._closed:
            raise ValueError(f"{what} on a closed communicator")
        self._raise_failure()

    def _failed(self) -> bool:
        return self._failure is not None or bool(self._pages[self.rank].words.abort)

    def _raise_failure(self) -> None:
        if self._failed():
            raise self._pending()

    def _pending(self) -> errors.Error | None:
        """Return the failure that this communicator met, if any; it closes it for all calls."""
        if self._failure is None:
            if self._mirrors is not None and self._pages[self.rank].words.abort:
                self._mirrors.settle()
            self._failure = lifetime.failure_in(self._pages, self.rank)
        return self._failure

    def _fail(self, reason: Reason, peer: int, generation: int, waited: float = 0.0) -> None:
        """Record a failure that the host saw, tell all ranks, and raise it."""
        self._raise_failure()  # of another rank, perhaps the cause of what was seen here
        page = self._pages[self.rank]
        if not page.words.by_kernel.written:
            write_record(
                page,
                by_watcher=False,
                reason=reason,
                generation=generation,
                role=Role.HOST,
                awaited=Awaited.AGREEMENT,
                peer=peer,
                expected=signal(generation, ANNOUNCED),
                seen=self._pages[peer].words.called,
                waited_ns=int(waited * 1e9),
            )
            abort([page, *self._pages], self.rank)
        self._raise_failure()

    def _leave_word_to(self, rank: int) -> None:
        """Have a rank tell all what all have seen, as its word takes a while to other hosts."""
        end = time.monotonic() + _WORD_SECONDS
        while self.rank != rank and self._mirrors is not None and time.monotonic() < end:
            self._raise_failure()
            time.sleep(0.01)

    def synchronize(self) -> None:
        """Wait for the calls of this rank, and raise what has failed in one, if any has. Local.

        On the host target a call returns when it is complete, so there is nothing to wait for.
        """
        self._begin("synchronize()")
        self._machine.wait(self._tell_who_is_awaited)
        self._raise_failure()
        self._raise_fault()

    def _tell_who_is_awaited(self, seconds: float) -> None:
        generation, text = self._pages[self.rank].last_text()
        last = {peer: self._pages[peer].last_text() for peer in self._peers()}
        behind = "; ".join(
            f"rank {peer} has got as far as call {said} ({what})"
            for peer, (said, what) in sorted(last.items())
            if said < generation
        )
        logger.warning(
            "rank %d has waited %.0f s in synchronize(), up to call %d (%s): %s",
            *(self.rank, seconds, generation, text, behind or "all ranks have made that call"),
        )

    def barrier(self) -> None:
        """Return when all ranks have called it; under the deadlines of a call, as MPI's is not."""
        self.agree("barrier()", lambda: None)

    def close(self) -> None:
        """Free what the communicator holds. Arrays in its segments stay valid here.

        Collective over MPI, but never waits for a rank, unless within a `trace`. May be called
        again.

        Raises
        ------
        Error
            The failure of an earlier call, once.
        """
        if self._closed or self._process != os.getpid():
            return  # in a forked child it is its parent's
        try:
            self._leave_trace(together=True)
        finally:
            pending = self._finish()
        if pending is not None:
            raise pending

    def _finish(self) -> Exception | None:
        """Wait for this rank's calls, let go of everything, and return the pending failure."""
        self._enter("close()")
        try:
            if self._depth > 1:
                raise errors.ConcurrentCallError("close() within a call of this communicator")
            self._wait_for_all()
            pending = self._pending() or lifetime.fault_in(self._pages[self.rank])
            self._end.reported = True
            self._dismantle()
            return pending
        finally:
            self._leave()

    def _leave_trace(self, *, together: bool) -> None:
        trace = current_trace()
        if trace is not None:
            trace.collect(self, together=together)

    def _wait_for_all(self) -> None:
        try:
            self._machine.wait()
        except errors.Error as error:
            self._failure = self._failure or error

    def __enter__(self) -> "Communicator":
        return self

    def __exit__(self, kind: Any, value: Any, traceback: Any) -> None:
        if value is None:
            self.close()
        elif not self._closed:
            self._leave_trace(together=False)
            self._finish()

    def _dismantle(self) -> None:
        self._closed = True
        for plan in list(getattr(self, "plans", {}).values()):
            plan.close()
        if self._end is not None:
            self._end()
            self._segments, self._heap = SegmentTable(self.rank, self.size), Heap()
        else:
            for links in self._all_links:
                links.close()
            if self._machine is not None:
                self._machine.close()
        # Freeing needs ranks that are there, and no collective that was left half done.
        hindered = lifetime.lost or self._stranded or _finalized(self.mpi)
        if self._process == os.getpid() and not hindered:
            self.mpi.Free()


class _Calling:
    """The context of one call; a class, as generators cost a microsecond."""

    __slots__ = "_comm", "_what"

    def __init__(self, comm: Communicator, what: str):
        self._comm, self._what = comm, what

    def __enter__(self) -> None:
        comm = self._comm
        comm._enter(self._what)
        try:
            comm._begin(self._what)
        except BaseException:
            comm._leave()
            raise
        trace = current_trace()
        if trace is not None:
            trace.meet(comm)

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        comm = self._comm
        try:
            if error is None:
                if comm._depth == 1:
                    comm._raise_fault()
            elif error is not comm._told and not comm._failed():
                comm.refuse(error)
        finally:
            comm._leave()


def _finalized(mpi: Any) -> bool:
    if hasattr(mpi, "links"):
        return False
    from mpi4py import MPI

    return MPI.Is_finalized()


def _target(target: str) -> str:
    if target not in settings.TARGETS:
        allowed = ", ".join(settings.TARGETS)
        raise ValueError(f"target {target!r}: not allowed; use one of {allowed}")
    return settings.target() if target == "auto" else target


def _transport(transport: str) -> str:
    if transport not in settings.TRANSPORTS:
        allowed = ", ".join(settings.TRANSPORTS)
        raise ValueError(f"transport {transport!r}: not allowed; use one of {allowed}")
    return settings.transport() if transport == "auto" else transport


def _nics(nics: Any) -> tuple[str, ...] | None:
    if nics is None:
        return settings.nics()
    names = () if isinstance(nics, str) else tuple(nics)
    if not names or not all(isinstance(name, str) for name in names):
        raise TypeError(f"nics={nics!r}: use a sequence of names of network cards")
    return names


def _real_nodes(hosts: Sequence[int], asked: tuple[int, ...] | None) -> tuple[int, ...]:
    """Return the sizes of the nodes: hosts, or what was asked for, as far as hosts allow that."""
    real = [hosts.count(host) for host in dict.fromkeys(hosts)]
    if list(hosts) != sorted(hosts):
        raise errors.ConfigurationError(
            f"the ranks of each host must follow each other, and rank by rank their hosts (by "
            f"their lowest rank) are {list(hosts)}: start them host by host (Open MPI: --map-by "
            "slot; MPICH: -ppn; Slurm: --distribution=block)"
        )
    if asked is None:
        return tuple(real)
    ends = set(itertools.accumulate(asked))
    if not ends >= set(itertools.accumulate(real)):
        raise errors.ConfigurationError(
            f"nodes of {list(asked)} ranks do not fit hosts of {real}: no node reaches over two "
            "hosts; leave out nodes= and MKERNEL_NODES to have each host be one"
        )
    return asked


def _nodes(nodes: Any, size: int) -> tuple[int, ...] | None:
    if nodes is None:
        nodes = settings.nodes()
        if nodes is None:
            return None
        try:
            return _nodes(nodes, size)
        except ValueError as error:
            raise errors.ConfigurationError(f"MKERNEL_NODES: {error}") from None
    if isinstance(nodes, int | np.integer):
        if not 1 <= nodes <= size:
            raise ValueError(f"nodes={nodes}: not allowed; use 1 to {size}, the number of ranks")
        return array_split_counts(size, int(nodes))
    if isinstance(nodes, str):
        raise TypeError(f"nodes={nodes!r}: use an integer or a sequence of integers")
    sizes = tuple(operator.index(count) for count in nodes)
    if sum(sizes) != size or min(sizes) < 1:
        raise ValueError(
            f"nodes={list(sizes)}: the sizes must be positive and add up to the {size} ranks"
        )
    return sizes


def _seconds(name: str, value: float | None, default: float) -> float:
    try:
        seconds = float(default if value is None else value)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}={value!r}: use a number of seconds") from None
    # The kernels count in 64-bit nanoseconds; a century is no limit that anybody means.
    if not 0 <= seconds <= 3.2e9:
        raise ValueError(f"{name}={seconds}: not allowed; use seconds from 0 (no limit) to 3.2e9")
    return seconds


def _pattern(writer: int, reader: int) -> int:
    return digest_of(f"self-test {writer} {reader}")


def extent(a: np.ndarray) -> tuple[int, int]:
    """Return the lowest address of an array and the bytes up to its highest."""
    low, high = np.lib.array_utils.byte_bounds(a)
    return low, high - low


# Requests that were given up, and their buffers: MPI may write to them until the process ends.
_abandoned: list[Any] = []
