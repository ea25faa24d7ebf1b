"""How a communicator ends: by its own rank, by a peer's death, or with the process."""

import atexit
import contextlib
import os
import sys
import weakref
from collections.abc import Sequence
from typing import Any

from . import errors, failure
from .failure import Reason
from .host_pages import HostPage, abort, write_record
from .watcher import Watcher

# Ranks whose processes are gone, as their communicators count.
lost: set[int] = set()
_open: "weakref.WeakSet[End]" = weakref.WeakSet()
_unreported: list[str] = []
_owner = os.getpid()


def failure_in(pages: Sequence[HostPage], rank: int) -> errors.Error | None:
    """Return the failure that a rank has met; None if it has met none.

    Where ranks have met different ones at the same time, all raise the first of them.
    """
    if not pages[rank].words.abort:
        return None
    found = [_record(pages, word) for page in pages if (word := page.words.abort)]
    # A record of another host may not have come from there.
    origin, record = min(
        found, key=lambda one: (not one[1].reason, one[1].generation, one[1].reason, one[0])
    )
    words = pages[origin].words
    if not record.reason:
        return errors.PeerLostError(f"lost rank {origin}, which had failed: it did not say how")
    if record.reason == Reason.LOST:
        lost.add(record.peer)
    if record.reason == Reason.NETWORK:
        cause = _cause(pages[record.peer], record.generation)
        if cause is None:
            return failure.of_network(origin, record, bytes(words.card))
        record = type(record).from_buffer_copy(record)
        record.reason = cause
    texts = [page.text(record.generation) for page in pages]
    return failure.build(origin, record, texts)


def _cause(peer: HostPage, generation: int) -> Reason | None:
    """Return what a failed exchange with a peer follows from; None: from what the card met.

    A rank that has refused or closed takes its memory along, perhaps before others hear of it.
    """
    if peer.refused(generation):
        return Reason.REFUSED
    return Reason.CLOSED if peer.words.closed and not peer.words.abort else None


def _record(pages: Sequence[HostPage], word: int) -> tuple[int, Any]:
    """Return the rank that an abort word names, and its record."""
    origin = (word & 0xFFFFFFFF) - 1
    words = pages[origin].words
    return origin, (words.by_kernel, words.by_watcher, words.by_proxy)[word >> 32]


def fault_in(page: HostPage) -> ValueError | None:
    """Return what a kernel of this rank has found wrong with the data of a call, once."""
    fault = page.words.fault
    if not fault.problem:
        return None
    error = failure.of_data(fault, page.text(fault.generation))
    fault.problem = 0
    return error


class Lost:
    """What the watcher does about a lost peer; holds no communicator, so it keeps none alive."""

    def __init__(self, pages: Sequence[HostPage], rank: int, signals: Any):
        self._pages, self._rank, self._signals = pages, rank, signals

    def __call__(self, peer: int) -> None:
        own = self._pages[self._rank]
        # A rank that has closed needs no obituary: who still waits for it sees that it has.
        if self._pages[peer].words.closed or own.words.abort:
            return
        generation = self._signals.generation + 1
        write_record(own, by_watcher=True, reason=Reason.LOST, peer=peer, generation=generation)
        # The others' too: this rank may be gone before they notice the first loss themselves.
        abort([own, *self._pages], self._rank, by_watcher=True)


class End:
    """Lets go of a communicator's threads and sockets; holds no communicator either."""

    def __init__(
        self,
        pages: Sequence[HostPage],
        rank: int,
        signals: Any,
        watcher: Watcher | None,
        links: Sequence[Any],
        machine: Any,
    ):
        self._pages, self._rank, self._signals = pages, rank, signals
        self._watcher, self._links, self._machine = watcher, links, machine
        self.network: Any = None
        self._process = os.getpid()
        self._over = False
        self.reported = False
        _open.add(self)

    def __call__(self) -> None:
        if self._over or self._process != os.getpid():
            return  # in a forked child all of it is its parent's
        self._over = True
        _open.discard(self)
        own, finished = self._pages[self._rank].words, 0
        with contextlib.suppress(errors.Error):
            self._machine.wait()
            self._signals.refresh()
            finished = 0 if own.abort else self._signals.generation
        # What peers meet from here on is their failure, not this rank's.
        error = failure_in(self._pages, self._rank) or fault_in(self._pages[self._rank])
        if error is not None and not self.reported:
            _unreported.append(f"{type(error).__name__}: {error}")
        # Peers see that it has closed before they see its sockets end.
        own.closed = 1 + finished
        if self._watcher is not None:
            self._watcher.stop()
        if self.network is not None:
            self.network.close()
        for links in self._links:
            links.close()
        self._machine.close()


@atexit.register
def _at_exit() -> None:
    """Leave with an error if a failure was never reported, and without MPI if a rank is lost."""
    if _owner != os.getpid():
        return  # a forked child
    for end in list(_open):
        end()
    if _unreported or lost:
        # MPI_Finalize would wait for ranks that do not come.
        for text in _unreported:
            print(f"mkernel_cp: {text}", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
