"""Agreements of the hosts: what each rank says is given to all, and no rank waits in MPI."""

import pickle
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from .calls import Calls
from .construction import Raised
from .failure import Reason
from .host_pages import ANNOUNCED, READY, digest_of, signal

_SILENCE_SECONDS = 2.0  # of a watcher, that mean nothing yet on a busy machine


class Agreements:
    """Collectives of MPI's, polled: under the deadlines of calls, which a lost peer ends.

    Parameters
    ----------
    mpi : mpi4py.MPI.Intracomm or LocalComm
    calls : Calls
    machine : HostTarget or CudaTarget
    entry_seconds, progress_seconds : float
        How long a peer may take to come, and be silent when it has; 0 for no limit.
    watched : bool
        Whether each rank has a watcher, which shows that it runs.

    Attributes
    ----------
    stranded : bool
        Whether a collective of MPI's was given up.
    """

    def __init__(
        self,
        mpi: Any,
        calls: Calls,
        machine: Any,
        entry_seconds: float,
        progress_seconds: float,
        watched: bool,
    ):
        self.stranded = False
        self._mpi, self._calls, self._machine = mpi, calls, machine
        self._entry_seconds = entry_seconds
        limited = watched and progress_seconds
        self._silence = max(progress_seconds, _SILENCE_SECONDS) if limited else None
        self._pulse: dict[int, tuple[int, float]] = {}

    def agree(self, what: str, work: Callable[[], Any]) -> list[Any]:
        """Give `work()` of every rank to all ranks; a generation of its own.

        The ranks first announce what they are about to do, so that one that calls something else
        ends in an error, not in a wait. An exception of `work` is raised on all ranks alike.
        """
        with self._calls.calling(what):
            values = self._agree(what, work)
            for value in values:
                if isinstance(value, Raised):
                    raise self._calls.known_to_all(value.error)
            return values

    def _agree(self, what: str, work: Callable[[], Any]) -> list[Any]:
        calls = self._calls
        self._machine.refuse_capture(what)
        generation = calls.generation + 1
        digest = digest_of(what)
        calls.pages[calls.rank].set_text(generation, what)
        calls.post(generation, ANNOUNCED, digest)
        self._pulse.clear()
        try:
            data = pickle.dumps((generation, digest, work()))
        except Exception as error:
            calls.raise_failure()
            data = pickle.dumps((generation, digest, Raised(calls.rank, error)))
        replies = self._gather(data, generation)
        values = []
        for rank, (turn, theirs, value) in enumerate(map(pickle.loads, replies)):
            if turn != generation or theirs != digest:
                calls.leave_word_to(0)
            if turn != generation:  # the one who is ahead has refused calls that the other makes
                ahead = rank if turn > generation else calls.rank
                calls.fail(Reason.REFUSED, ahead, min(turn, generation))
            if theirs != digest:
                calls.fail(Reason.MISMATCH, rank, generation)
            values.append(value)
        calls.post(generation, READY, digest)
        calls.signals.advance()
        return values

    def _gather(self, data: bytes, generation: int) -> list[bytes]:
        """Allgather of bytes, polled: MPI never blocks this rank while another may be gone."""
        size = self._calls.size
        lengths = np.zeros(size, np.int64)
        own = np.array([len(data)], np.int64)
        self._complete(self._mpi.Iallgather(own, lengths), (own, lengths), generation)
        width = int(lengths.max())
        padded = np.frombuffer(data.ljust(width, b"\0"), np.uint8).copy()
        everything = np.zeros((size, width), np.uint8)
        request = self._mpi.Iallgather(padded, everything)
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
                self.stranded = True
                _abandoned.append((request, buffers))
                raise
            # Ever longer: other ranks may need the core, to compile for instance.
            time.sleep(0 if tries < 100 else min(1e-2, 5e-7 * tries))

    def _look(self, generation: int, waited: float) -> None:
        """Raise if this agreement cannot come about any more."""
        calls = self._calls
        calls.raise_failure()
        for peer in calls.peers():
            page = calls.pages[peer]
            closed = page.words.closed  # looked at first: what it called came before
            called = page.words.called
            if page.refused(generation):
                calls.fail(Reason.REFUSED, peer, generation)
            late = self._entry_seconds and waited > self._entry_seconds
            if called >> 32 > generation and not late:
                continue  # it has all our data, and went on
            if called == signal(generation, READY):
                continue  # it has all our data, and may well have closed
            if closed:
                why = page.words.abort  # it says more than that it has closed
                if why and not calls.failed():
                    calls.pages[calls.rank].words.abort = why
                calls.fail(Reason.CLOSED, peer, generation)
            if called == signal(generation, ANNOUNCED):
                self._look_at_pulse(peer, generation)
                continue  # it agrees too; the answers tell on what
            if late:
                calls.fail(Reason.ENTRY_TIMEOUT, peer, generation, waited)

    def _look_at_pulse(self, peer: int, generation: int) -> None:
        """Raise if a peer that is at work has stopped: what it does may take long, silence not."""
        beat, now = self._calls.pages[peer].words.beat, time.monotonic()
        seen, since = self._pulse.get(peer, (None, now))
        if beat != seen:
            self._pulse[peer] = beat, now
        elif self._silence and now - since > self._silence:
            self._calls.fail(Reason.PROGRESS_TIMEOUT, peer, generation, now - since)

    def look_at(self, peer: int) -> None:
        """Raise if a peer that this rank waits for, in the work of an agreement, has stopped."""
        self._calls.raise_failure()
        self._look_at_pulse(peer, self._calls.signals.generation + 1)


# Requests that were given up, and their buffers: MPI may write to them until the process ends.
_abandoned: list[Any] = []
