"""The calls of a rank: one at a time, known to its peers, and failed on all if on one."""

import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from . import errors, lifetime
from .failure import Awaited, Reason, Role
from .host_pages import ANNOUNCED, REFUSED, HostPage, abort, signal, write_record
from .mirrors import Mirrors
from .trace import current as current_trace

logger = logging.getLogger("mkernel_cp")

_WORD_SECONDS = 1.0  # that another rank may take to tell of a failure


class Calls:
    """What a rank calls, what its peers hear of it, and what has failed.

    Parameters
    ----------
    rank : int
    pages : sequence of HostPage
        Of all ranks; those of other hosts are copies.
    addresses : sequence of int
        Where this rank's kernels find them.
    machine : HostTarget or CudaTarget
    signals : Signals
        The machine's account of this rank's generations.
    mirrors : Mirrors or None
        What keeps the copies up to date.

    Attributes
    ----------
    rank, size : int
    pages, signals
        As above.
    depth : int
        Of calls within calls, now.
    """

    def __init__(
        self,
        rank: int,
        pages: Sequence[HostPage],
        addresses: Sequence[int],
        machine: Any,
        signals: Any,
        mirrors: Mirrors | None,
    ):
        self.rank, self.size = rank, len(pages)
        self.pages, self.signals = pages, signals
        self.depth = 0
        self._own, self._address = pages[rank], addresses[rank]
        self._machine, self._mirrors = machine, mirrors
        self._failure: errors.Error | None = None
        self._over = False
        self._process = os.getpid()
        self._in_call = threading.RLock()
        self._told: BaseException | None = None  # the last error that the peers know of

    # --- one call after the other -----------------------------------------------------------------

    def calling(self, what: str) -> "_Calling":
        """Make one call, from the check of its arguments to its end.

        No other thread can make one meanwhile. What keeps this rank alone from making it is told to
        the peers, which would wait for it otherwise.
        """
        return _Calling(self, what)

    def enter(self, what: str) -> None:
        """Keep other threads from making calls until `leave`; ConcurrentCallError if one does."""
        if not self._in_call.acquire(blocking=False):
            raise errors.ConcurrentCallError(
                f"{what} while another thread is in a call of this communicator: the ranks' calls "
                "need one order; make them from one thread, or give each thread its communicator"
            )
        self.depth += 1

    def leave(self) -> None:
        """End what `enter` has begun."""
        self.depth -= 1
        self._in_call.release()

    def begin(self, what: str) -> None:
        """Raise what keeps any call from being made."""
        if self._process != os.getpid():
            raise RuntimeError(
                f"{what} in a forked child: a communicator belongs to the process that made it; "
                "make it after the fork, or start the child by 'spawn' (with the import of MPI and "
                "the program under if __name__ == '__main__')"
            )
        if self._over:
            raise ValueError(f"{what} on a closed communicator")
        self.raise_failure()

    def is_over(self) -> bool:
        """Return whether the rank has made its last call, or is a forked child's parent's."""
        return self._over or self._process != os.getpid()

    def end(self) -> None:
        """Refuse calls from now on."""
        self._over = True

    @property
    def closed(self) -> bool:
        """Whether no call can be made any more."""
        return self._over or self.failed()

    # --- what the peers hear ----------------------------------------------------------------------

    @property
    def generation(self) -> int:
        """Of the last call or agreement that this rank has made."""
        self.signals.refresh()
        return self.signals.generation

    def post(self, generation: int, progress: int, digest: int = 0) -> None:
        """Tell all ranks what this host does in a generation in place of a launch.

        They see it when the launches before are over: who is further has left this one out.
        """
        for word, value in (("digest", digest), ("called", signal(generation, progress))):
            place = getattr(type(self._own.words), word).offset
            self._machine.write_in_order(self._address + place, value)

    def refuse(self, error: BaseException) -> None:
        """Post an error in place of this rank's next call, so that no peer waits for it."""
        self._told = error
        generation = self.generation + 1
        text = f"{type(error).__name__}: {error}"
        self._own.set_text(generation, text, refusal=True)
        self.post(generation, REFUSED)
        self.signals.advance()

    def known_to_all(self, error: BaseException) -> BaseException:
        """Return an error that every rank is about to raise, so that none is told of it."""
        self._told = error
        return error

    def peers(self) -> Iterator[int]:
        """Return the other ranks, from the next one on."""
        return ((self.rank + i) % self.size for i in range(1, self.size))

    # --- what has failed --------------------------------------------------------------------------

    def failed(self) -> bool:
        """Return whether a failure has closed the communicator."""
        return self._failure is not None or bool(self._own.words.abort)

    def pending(self) -> errors.Error | None:
        """Return the failure that this rank has met, if any; it closes it for all calls."""
        if self._failure is None:
            if self._mirrors is not None and self._own.words.abort:
                self._mirrors.settle()
            self._failure = lifetime.failure_in(self.pages, self.rank)
        return self._failure

    def raise_failure(self) -> None:
        """Raise the failure that this rank has met, if any."""
        if self.failed():
            raise self.pending().with_traceback(None)  # not behind those of earlier calls

    def fail(self, reason: Reason, peer: int, generation: int, waited: float = 0.0) -> None:
        """Record a failure that the host saw, tell all ranks, and raise it."""
        self.raise_failure()  # of another rank, perhaps the cause of what was seen here
        if not self._own.words.by_kernel.written:
            write_record(
                self._own,
                by_watcher=False,
                reason=reason,
                generation=generation,
                role=Role.HOST,
                awaited=Awaited.AGREEMENT,
                peer=peer,
                expected=signal(generation, ANNOUNCED),
                seen=self.pages[peer].words.called,
                waited_ns=int(waited * 1e9),
            )
            abort([self._own, *self.pages], self.rank)
        self.raise_failure()

    def leave_word_to(self, rank: int) -> None:
        """Have a rank tell all what all have seen, as its word takes a while to other hosts."""
        end = time.monotonic() + _WORD_SECONDS
        while self.rank != rank and self._mirrors is not None and time.monotonic() < end:
            self.raise_failure()
            time.sleep(0.01)

    def fault(self) -> ValueError | None:
        """Return what a kernel has found wrong with the data of a call, once.

        All ranks do, each by itself, and none leaves out a call for it: so they stay in step.
        """
        return lifetime.fault_in(self._own)

    # --- waiting ----------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Wait for the calls of this rank, and raise what has failed in one."""
        self.begin("synchronize()")
        self._machine.wait(self.tell_who_is_awaited)
        self.raise_failure()
        error = self.fault()
        if error is not None:
            raise error

    def wait(self) -> None:
        """Wait for the calls of this rank; what fails is `pending`."""
        try:
            self._machine.wait()
        except errors.Error as error:
            self._failure = self._failure or error

    def tell_who_is_awaited(self, seconds: float) -> None:
        """Warn that this rank has waited so long."""
        generation, text = self._own.last_text()
        last = {peer: self.pages[peer].last_text() for peer in self.peers()}
        behind = "; ".join(
            f"rank {peer} has got as far as call {said} ({what})"
            for peer, (said, what) in sorted(last.items())
            if said < generation
        )
        logger.warning(
            "rank %d has waited %.0f s in synchronize(), up to call %d (%s): %s",
            *(self.rank, seconds, generation, text, behind or "all ranks have made that call"),
        )


class _Calling:
    """The context of one call; a class, as generators cost a microsecond."""

    __slots__ = "_calls", "_what"

    def __init__(self, calls: Calls, what: str):
        self._calls, self._what = calls, what

    def __enter__(self) -> None:
        calls = self._calls
        calls.enter(self._what)
        try:
            calls.begin(self._what)
        except BaseException:
            calls.leave()
            raise
        trace = current_trace()
        if trace is not None:
            trace.meet(calls.rank)

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        calls = self._calls
        try:
            if error is None:
                if calls.depth == 1:
                    fault = calls.fault()
                    if fault is not None:
                        raise fault
            elif error is not calls._told and not calls.failed():
                calls.refuse(error)
        finally:
            calls.leave()
