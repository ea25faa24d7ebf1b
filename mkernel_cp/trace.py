"""`trace`: what fused calls do, and when, as a file for Perfetto or chrome://tracing."""

import contextlib
import contextvars
import dataclasses
import enum
import fcntl
import json
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np

from . import errors, structs
from .arguments import at_least
from .failure import Awaited, Role

logger = logging.getLogger("mkernel_cp")

_LAUNCHES = 0  # the thread of the file that shows whole launches
# Parts of a compute agent of engine/hopper.cuh, as Agent::part() counts them.
_HOPPER_PARTS = {
    0: "producer",
    1: "storer 0",
    2: "storer 1",
    3: "courier",
    4: "consumer 0",
    8: "consumer 1",
}
_AWAITED = {
    Awaited.CALL: "call of rank {peer}",
    Awaited.ARRIVAL: "chunk {index} of rank {peer}",
    Awaited.READ: "rank {peer} to have read",
    Awaited.TURN: "turn",
    Awaited.ROUTES: "routes, part {index}",
    Awaited.ROWS: "rows of compute agent {index}",
    Awaited.AGREEMENT: "agreement",
    Awaited.PARTIAL: "tile {index} of rank {peer}",
    Awaited.SUM: "sum {index} of rank {peer}",
    Awaited.ROOM: "room, of agent {index}",
    Awaited.QUEUE: "room for command {index}",
    Awaited.SENT: "command {index} to be sent",
    Awaited.NETWORK: "chunk {index} of rank {peer} over the network",
    Awaited.RECEIPT: "receipt of rank {peer}",
    Awaited.CREDIT: "rank {peer} to need unit {index} no more",
    Awaited.SLOT: "slot at rank {peer}",
}


def _name_of_part(part: int, hopper: bool) -> str:
    """Return what a part of an agent is called, by what it does; in the end all warps may work."""
    name = f"warp {part}" if part else ""
    return _HOPPER_PARTS.get(part, name) if hopper else name


class Kind(enum.IntEnum):
    """What a span tells of, as in trace.cuh."""

    ENTER = 1
    WAIT = 2
    COPY = 3
    COMPUTE = 4
    STORE = 5
    FINISH = 6
    SORT = 7
    AGREE = 8
    NOTE = 9
    SUM = 10


# Kernels that compute tiles of experts, not of ranks.
_OF_EXPERTS = "moe_dispatch_gemm", "moe_layer"


@contextlib.contextmanager
def trace(path: str | os.PathLike[str], *, capacity: int = 2048) -> Iterator[None]:
    """Write a timeline of all fused calls that this thread makes while the context lasts.

    The file opens in https://ui.perfetto.dev or chrome://tracing. A process of it is a rank, a
    thread an agent in its role, or a part of one; a span says what was waited for, copied, computed
    or stored, and for how long. Operators on experts also sort their tokens, agree on who gets
    which, note which rows are of which ranks, and sum the rows of a token.

    All ranks of a communicator trace the same calls: the first one of them, and the end of the
    context (or of the communicator, if that is earlier), are collective.

    Parameters
    ----------
    path : path
        The file, which rank 0 writes, in place of one that is there. At the end it always is there,
        without spans if no call has run. Ranks that share no communicator need files of their own.
    capacity : int, optional
        Spans that a thread can record. Further ones are counted, and the file says how many.

    Raises
    ------
    ConfigurationError
        By the first call, on all ranks, if rank 0 cannot write the file; nothing has run then.
    ConcurrentCallError
        Within another trace.

    Notes
    -----
    Traced kernels are compiled apart, by their first call. They do the same work in the same order,
    a little slower. CUDA graphs are not traced, neither what they capture nor what they replay.

    Times are those of one clock, the host's: each rank finds out at the start and at the end what
    its kernels' clock is off from it, by a few kernels that do nothing else (on the host target it
    is the same one). On GPUs that is right to some microseconds, less so where other processes use
    them too; the file says to how many, as ``clock_error_ns``. `portable` engines wait for the
    panels of a tile while they compute it, so these waits lie within. Where a GPU's copy engine
    brings the chunks, several are under way: a span ends when the last piece of its chunk has been
    asked for.

    Where the context is left by an exception, or a call has failed, no rank waits for another: each
    writes its own spans, rank 0 to `path`, others beside it, as to ``trace.rank1.json``. Where such
    a file is left of an earlier trace, its rank removes it.

    Examples
    --------
    >>> with mk.trace("trace.json"):
    ...     mk.allgather_gemm(a, b, comm=comm)
    """
    outer = _current.get()
    if outer is not None:
        raise errors.ConcurrentCallError(
            f"trace({os.fspath(path)!r}) within trace({str(outer.path)!r}): one at a time; leave "
            "that first"
        )
    this = Trace(Path(path), at_least(1, "capacity", capacity))
    token = _current.set(this)
    try:
        yield
    except BaseException:
        this.end(together=False)
        raise
    else:
        this.end(together=True)
    finally:
        _current.reset(token)


def current() -> "Trace | None":
    """Return the trace that this thread is in, if any."""
    return _current.get()


@dataclass(frozen=True)
class _Call:
    """What was called, whether by the engine `hopper`, and whether its tiles are of experts."""

    what: str = "launch"
    hopper: bool = False
    of_experts: bool = False


@dataclass
class _RankTrace:
    """What one rank has recorded.

    Attributes
    ----------
    rank : int
    device : str
    calls : dict of int to _Call
        Per generation.
    tracks : list of (int, int, array)
        Agent, part, and spans in the order of their beginnings.
    lost : list of (int, int, int)
        Agent, part, and how many spans found no room.
    clocks : list of (int, int, int)
        What the kernels' clock and the host's showed at the same time, at the start and the end,
        and by how much the second may be wrong.
    """

    rank: int
    device: str
    calls: dict[int, _Call] = dataclasses.field(default_factory=dict)
    tracks: list[tuple[int, int, np.ndarray]] = dataclasses.field(default_factory=list)
    lost: list[tuple[int, int, int]] = dataclasses.field(default_factory=list)
    clocks: list[tuple[int, int, int]] = dataclasses.field(default_factory=list)


class _Book:
    """Tracks for so many agents and parts, in memory of the kernels."""

    def __init__(self, machine: Any, agents: int, parts: int, capacity: int):
        mk = structs.shared()
        self.agents, self.parts = agents, parts
        tracks, self._event = agents * parts, np.dtype(mk.TraceEvent)
        self._machine = machine
        self._recorded = machine.empty((tracks,), np.dtype(np.uint64))
        machine.zero(self._recorded)
        size = self._event.itemsize
        self._events = machine.empty((tracks, capacity, size), np.dtype(np.uint8))
        self._trace = machine.constant(
            mk.Trace(
                parts=parts,
                capacity=capacity,
                recorded=machine.shadow(self._recorded).ctypes.data,
                events=machine.shadow(self._events).ctypes.data,
            )
        )
        self.address = self._trace.address

    def read_into(self, to: _RankTrace) -> None:
        """Add what has been recorded; all launches are over."""
        recorded = self._machine.asnumpy(self._recorded).astype(int)
        capacity = self._events.shape[1]
        most = min(capacity, recorded.max(initial=0))
        events = self._machine.asnumpy(self._events[:, :most])
        for track, count in enumerate(recorded):
            agent, part = divmod(track, self.parts)
            if count:
                spans = events[track, : min(count, capacity)].copy().view(self._event)
                to.tracks.append((agent, part, spans.reshape(-1)))
            if count > capacity:
                to.lost.append((agent, part, int(count) - capacity))


class _Recorder:
    """What one communicator records in a trace."""

    def __init__(self, launches: Any, capacity: int):
        self._capacity = capacity
        self._books: list[_Book] = []
        self._trace = _RankTrace(launches.calls.rank, launches.machine.device)
        self._trace.clocks.append(launches.machine.clocks())

    def expect(self, launches: Any, agents: int, parts: int) -> None:
        """Have room for a launch of so many agents."""
        if self._books:
            last = self._books[-1]
            if last.agents >= agents and last.parts >= parts:
                return
            agents, parts = max(agents, last.agents), max(parts, last.parts)
        self._books.append(_Book(launches.machine, agents, parts, self._capacity))
        launches.record_in(self._books[-1].address)

    def note(self, generation: int, call: _Call) -> None:
        """Say what is called in a generation."""
        self._trace.calls[generation] = call

    def read(self, launches: Any) -> _RankTrace:
        """Return all that was recorded, and let go of the memory."""
        with contextlib.suppress(errors.Error):  # the call that has failed raises it
            launches.machine.wait()
        launches.record_in(0)
        for book in self._books:
            book.read_into(self._trace)
        self._books.clear()
        self._trace.clocks.append(launches.machine.clocks())
        return self._trace


class Trace:
    """A trace that lasts.

    Parameters
    ----------
    path : pathlib.Path
    capacity : int
        Spans of a track.
    """

    def __init__(self, path: Path, capacity: int):
        self.path = path
        self._capacity = capacity
        self._found = _stamp(path)
        self._rank: int | None = None  # in the communicator of the first call
        self._file: TextIO | None = None  # of a rank 0
        self._recorders: dict[Any, _Recorder] = {}
        self._gathered: list[list[_RankTrace]] = []  # per communicator

    def meet(self, rank: int) -> None:
        """Learn from a call, before anything can be wrong with it, which rank this is."""
        if self._rank is None:
            self._rank = rank

    def variant(self, launches: Any, kernel: Any, request: Any, what: str) -> Any:
        """Return the kernel that is to run in place of another: it records what it does."""
        source = launches.source_of(kernel)
        source = dataclasses.replace(source, defines=(*source.defines, ("MK_TRACE", "1")))
        recorder = self._recorders.get(launches)
        if recorder is None:

            def begin() -> None:
                if launches.calls.rank == 0 and not self._open():
                    raise errors.ConfigurationError(
                        f"another trace is being written to {self.path}: give the ranks of each "
                        "communicator a path of their own"
                    )
                launches.load(source)  # here, where no deadline counts

            launches.agree("trace()", begin)
            recorder = self._recorders[launches] = _Recorder(launches, self._capacity)
        traced = launches.load(source)
        capacity = traced.capacity(request.shared_bytes)
        if request.agents > capacity:
            raise errors.ConfigurationError(
                f"{what} has {request.agents} agents, and {launches.machine.device} runs "
                f"{capacity} at a time when it is traced: pass Options(split=...) with fewer"
            )
        recorder.expect(launches, request.agents, traced.parts)
        hopper = "MK_ENGINE_HOPPER" in dict(source.defines)
        call = _Call(what, hopper, source.name in _OF_EXPERTS)
        recorder.note(launches.calls.generation + 1, call)
        launches.machine.begin()  # behind what the agreement has queued
        return traced

    def _open(self) -> bool:
        """Open the file, for this trace alone; return whether no other one has it."""
        if self._file is not None:
            return True
        try:
            file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115
        except OSError as error:
            raise errors.ConfigurationError(
                f"cannot write the trace to {self.path}: {error.strerror}; give trace() a path "
                "that rank 0 can write"
            ) from None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.close()
            return False
        self._file = file
        self._dump()  # whatever ends this process, an older trace is not taken for this one
        return True

    def collect(self, launches: Any, *, together: bool) -> None:
        """Take what a communicator has recorded; collective if `together`, and none has failed."""
        recorder = self._recorders.pop(launches, None)
        if recorder is None:
            return
        try:
            own = recorder.read(launches)
        except Exception as error:
            if together:
                raise
            logger.warning("rank %d: the trace is lost: %s", launches.calls.rank, error)
            return
        if not together or launches.calls.closed:
            self._gathered.append([own])
            return
        try:
            ranks = launches.agree("the end of trace()", lambda: own)
        except BaseException:
            self._gathered.append([own])
            raise
        if launches.calls.rank == 0:
            self._gathered.append(ranks)

    def end(self, *, together: bool) -> None:
        """Collect what is left, and write the file."""
        try:
            for launches in list(self._recorders):
                self.collect(launches, together=together)
        finally:
            self._recorders.clear()
            try:
                self._write()
            except (OSError, errors.ConfigurationError) as error:
                if together:
                    raise
                logger.warning("%s", error)

    def _write(self) -> None:
        if self._file is None and self._rank:  # what could not be handed to rank 0
            own = self.path.with_name(f"{self.path.stem}.rank{self._rank}{self.path.suffix}")
            own.unlink(missing_ok=True)
            if self._gathered:
                self._file = open(own, "a", encoding="utf-8")  # noqa: SIM115
        elif self._file is None and (self._rank == 0 or _stamp(self.path) == self._found):
            self._open()  # nothing has run here, nor, if the file is as it was, on other ranks
        if self._file is not None:
            with self._file:
                self._dump()

    def _dump(self) -> None:
        self._file.truncate(0)
        self._file.write(json.dumps(_chrome_trace(self._gathered), separators=(",", ":")))
        self._file.flush()


def _stamp(path: Path) -> tuple[int, ...] | None:
    """Return what changes when a file is written; None if there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def _chrome_trace(gathered: list[list[_RankTrace]]) -> dict[str, Any]:
    """Return the JSON object of a file, in the format of Chrome's trace events."""
    traces = [(number, one) for number, ranks in enumerate(gathered) for one in ranks]
    times = [[_host_ns(one, spans) for *_, spans in one.tracks] for _, one in traces]
    origin = min((int(a.min()) for tracks in times for a, _ in tracks), default=0)
    events: list[dict[str, Any]] = []
    lost: list[dict[str, Any]] = []
    for process, ((number, one), tracks) in enumerate(zip(traces, times, strict=True)):
        first = sum(len(ranks) for ranks in gathered[:number])
        pid = process if first else one.rank
        name = f"rank {one.rank} ({one.device})"
        if len(gathered) > 1:
            name = f"communicator {number}, {name}"
        events.append(_metadata("process_name", pid, name=name))
        events.append(_metadata("process_sort_index", pid, sort_index=pid))
        events += _Process(pid, one, [(a - origin, b - origin) for a, b in tracks]).events()
        lost += [
            {"rank": one.rank, "agent": agent, "part": part, "spans": count}
            for agent, part, count in one.lost
        ]
    if lost:
        logger.warning("the trace lacks spans that found no room: trace(capacity=) makes more")
    wrong = max((wrong for _, one in traces for *_, wrong in one.clocks), default=0)
    other = {"clock": "host, CLOCK_MONOTONIC", "clock_error_ns": wrong}
    other |= {"origin_ns": origin, "lost": lost}
    return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": other}


def _metadata(kind: str, pid: int, tid: int = _LAUNCHES, **args: Any) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": args}


def _host_ns(one: _RankTrace, spans: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return when spans began and ended by the host's clock."""
    (kernels, host, _), (last_kernels, last_host, _) = one.clocks[0], one.clocks[-1]
    elapsed = last_kernels - kernels
    drift = (last_host - host - elapsed) / elapsed if elapsed > 0 else 0.0

    def convert(times: np.ndarray) -> np.ndarray:
        since = times.astype(np.int64) - kernels
        return host + since + (since * drift).astype(np.int64)

    begin = convert(spans["begin_ns"])
    unfinished = spans["end_ns"] == 0
    return begin, np.where(unfinished, begin, convert(spans["end_ns"]))


class _Span(NamedTuple):
    """A `TraceEvent` of types.cuh, in Python's numbers, which are quicker to look at one by one."""

    kind: int
    role: int
    generation: int
    begin_ns: int
    end_ns: int
    failed: int
    peer: int
    values: Sequence[int]

    @classmethod
    def each(cls, spans: np.ndarray) -> Iterator["_Span"]:
        return map(cls._make, zip(*(spans[name].tolist() for name in cls._fields), strict=True))


class _Process:
    """One rank's part of the file."""

    def __init__(self, pid: int, one: _RankTrace, times: list[tuple[np.ndarray, np.ndarray]]):
        self._pid, self._one, self._times = pid, one, times
        # A wait for a chunk does not know whose it is; who copies it does.
        self._sources = {
            (span.generation, span.values[1]): span.peer
            for *_, spans in one.tracks
            for span in _Span.each(spans[spans["kind"] == Kind.COPY])
        }

    def events(self) -> list[dict[str, Any]]:
        """Return everything of the rank: names of threads, launches, spans."""
        threads: dict[tuple[int, int, str], list[dict[str, Any]]] = {}
        launches: dict[int, tuple[int, int]] = {}
        for (agent, part, spans), (begins, ends) in zip(self._one.tracks, self._times, strict=True):
            for span, begin, end in zip(
                _Span.each(spans), begins.tolist(), ends.tolist(), strict=True
            ):
                first, last = launches.get(span.generation, (begin, end))
                launches[span.generation] = min(first, begin), max(last, end)
                hopper = self._call(span.generation).hopper and span.role == Role.COMPUTE
                name = _name_of_part(part, hopper)
                event = self._event(span, begin, end)
                threads.setdefault((agent, span.role, name), []).append(event)
        lanes = {generation: self._call(generation).what for generation in launches}
        events = [_metadata("thread_name", self._pid, name="launches")]
        events += [
            self._complete(lanes[generation], begin, end, {"generation": generation}, _LAUNCHES)
            for generation, (begin, end) in launches.items()
        ]
        for tid, (agent, role, name) in enumerate(sorted(threads), _LAUNCHES + 1):
            thread = f"{Role(role).name.lower()} {agent}"
            thread += f": {name}" if name else ""
            events.append(_metadata("thread_name", self._pid, tid, name=thread))
            events.append(_metadata("thread_sort_index", self._pid, tid, sort_index=tid))
            events += [{**event, "tid": tid} for event in threads[agent, role, name]]
        return events

    def _call(self, generation: int) -> _Call:
        return self._one.calls.get(generation, _Call())

    def _event(self, span: "_Span", begin: int, end: int) -> dict[str, Any]:
        kind, generation = Kind(span.kind), span.generation
        first, second = span.values
        args: dict[str, Any] = {"generation": generation}
        name = kind.name.lower()
        peer: Any = span.peer
        if kind is Kind.WAIT:
            awaited = Awaited(first)
            if awaited is Awaited.ARRIVAL:
                peer = self._sources.get((generation, second), peer)
                args["chunk"] = second
            peer = "?" if peer >> 63 else peer
            args |= {"for": awaited.name.lower(), "peer": peer}
            name += ": " + _AWAITED[awaited].format(peer=peer, index=second)
        elif kind is Kind.COPY:
            args |= {"source": peer, "bytes": first, "chunk": second}
            name += f": chunk {second} of rank {peer}"
        elif kind is Kind.NOTE:
            rows, peer = divmod(first, 1 << 32), "all" if peer >> 63 else peer
            args |= {"source": peer, "rows": rows}
            name += ": rows {}:{} of ".format(*rows)
            name += "all ranks" if peer == "all" else f"rank {peer}"
        elif kind in (Kind.COMPUTE, Kind.STORE, Kind.SORT, Kind.SUM):
            rows, columns = (divmod(value, 1 << 32) for value in (first, second))
            computed = kind in (Kind.COMPUTE, Kind.STORE)
            owner = "expert" if computed and self._call(generation).of_experts else "rank"
            args |= {"source" if owner == "rank" else owner: peer, "rows": rows, "columns": columns}
            name += ": rows {}:{} of {} {}, columns {}:{}".format(*rows, owner, peer, *columns)
        if span.failed:
            args["failed"] = True
        if span.end_ns == 0:
            args["unfinished"] = True
        return self._complete(name, begin, end, args, cat=kind.name.lower())

    def _complete(
        self,
        name: str,
        begin: int,
        end: int,
        args: dict[str, Any],
        tid: int = _LAUNCHES,
        cat: str = "launch",
    ) -> dict[str, Any]:
        where = {"pid": self._pid, "tid": tid}
        times = {"ts": begin / 1000, "dur": (end - begin) / 1000}
        return {"name": name, "cat": cat, "ph": "X", **times, **where, "args": args}


# Ranks may be threads: each has its own.
_current: contextvars.ContextVar[Trace | None] = contextvars.ContextVar("trace", default=None)
