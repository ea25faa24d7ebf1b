"""`LocalWorld`: R ranks as threads of one process, without MPI.

It gives the few calls of mpi4py that a communicator makes, and segments that are simply shared. For
tests, debuggers and ThreadSanitizer, which see no further than one process.
"""

import gc
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .memory import Segment


class LocalWorld:
    """Ranks that are threads.

    Parameters
    ----------
    size : int
        Number of ranks.
    hosts : sequence of int, optional
        How many ranks each of several hosts is to have, for tests; default: all on one.

    Examples
    --------
    >>> def program(mpi):
    ...     with mk.Communicator(mpi) as comm:
    ...         counts = comm.row_counts(len(a))
    ...         return mk.allgather_gemm(a[comm.rows(len(a))], b, comm=comm, row_counts=counts)
    >>> results = mk.LocalWorld(4).run(program)
    """

    def __init__(self, size: int, *, hosts: Sequence[int] = ()):
        if size < 1:
            raise ValueError(f"size={size}: a world has at least one rank")
        self.size = size
        self._hosts = [host for host, ranks in enumerate(hosts or (size,)) for _ in range(ranks)]
        if len(self._hosts) != size:
            raise ValueError(f"hosts={hosts}: the numbers must add up to the {size} ranks")

    def run(self, program: Callable[..., Any], *args: Any) -> list[Any]:
        """Call ``program(comm, *args)`` on every rank, each in a thread of its own.

        Returns
        -------
        list
            The results in rank order.

        Raises
        ------
        BaseException
            That of the lowest rank that raised, once all have ended; the others' are its notes.
        """
        group = _Group(list(range(self.size)), _Family(self._hosts))
        results: list[Any] = [None] * self.size
        raised: dict[int, BaseException] = {}

        def main(rank: int) -> None:
            try:
                results[rank] = program(LocalComm(group, rank), *args)
            except BaseException as error:
                raised[rank] = error
                # Or the traceback would keep its communicator open, and the others waiting.
                traceback.clear_frames(error.__traceback__)
                gc.collect()
            finally:
                group.family.leave(rank)

        threads = [
            threading.Thread(target=main, args=(rank,), name=f"rank {rank}", daemon=True)
            for rank in range(self.size)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if raised:
            first = min(raised)
            error = raised[first]
            if hasattr(error, "add_note"):
                for rank in sorted(raised):
                    error.add_note(f"rank {rank}: {type(raised[rank]).__name__}: {raised[rank]}")
            raise error
        return results


class _Family:
    """What all communicators of a world share: one condition, hosts, and who has left the world."""

    def __init__(self, hosts: Sequence[int]) -> None:
        self.changed, self.hosts = threading.Condition(), hosts
        self.left: list[int] = []

    def leave(self, rank: int) -> None:
        """Wake those who wait for a rank that does not come any more."""
        with self.changed:
            self.left.append(rank)
            self.changed.notify_all()


class _Group:
    """What the ranks of one communicator share: the contributions to its collectives."""

    def __init__(self, members: list[int], family: _Family):
        self.size, self.members, self.family = len(members), members, family
        self.changed = family.changed
        self.calls: dict[tuple[str, int], dict[int, Any]] = {}


class LocalComm:
    """The calls of `mpi4py.MPI.Intracomm` that `Communicator` makes, between threads."""

    COMM_TYPE_SHARED = 0

    def __init__(self, group: _Group, rank: int):
        self._group, self._rank = group, rank
        self._sequence: dict[str, int] = {}

    def Get_rank(self) -> int:
        """Return this rank."""
        return self._rank

    def Get_size(self) -> int:
        """Return the number of ranks."""
        return self._group.size

    def allgather(self, value: Any) -> list[Any]:
        """Return every rank's value; not copied."""
        return self._contribute("allgather", value).wait()

    def Iallgather(self, send: np.ndarray, receive: np.ndarray) -> "_Request":
        """Start gathering arrays of equal size; as in MPI, they are used until it is complete."""

        def deliver(values: list[np.ndarray]) -> None:
            receive.reshape(len(values), -1)[:] = np.stack([value.reshape(-1) for value in values])

        return self._contribute("Iallgather", send.copy(), deliver)

    def Dup(self) -> "LocalComm":
        """Return a communicator of the same ranks with collectives of its own."""
        return self.Split(0, self._rank)

    def Split_type(self, kind: int, key: int = 0) -> "LocalComm":
        """Return the ranks that share memory: those of a host."""
        group = self._group
        return self.Split(group.family.hosts[group.members[self._rank]], key)

    def Split(self, color: int = 0, key: int = 0) -> "LocalComm":
        """Return the ranks with the same color, ordered by key and rank."""
        groups: dict[int, _Group] = {}
        entries = self.allgather((color, key, self._rank, groups))
        members = sorted((k, r) for c, k, r, _ in entries if c == color)
        # The lowest member's dictionary is the place where the others find the new group.
        place = entries[min(r for _, r in members)][3]
        with self._group.changed:
            own = [self._group.members[r] for _, r in members]
            group = place.setdefault(color, _Group(own, self._group.family))
        return LocalComm(group, [r for _, r in members].index(self._rank))

    def Free(self) -> None:
        """Do nothing."""

    def links(self) -> "LocalLinks":
        """Return what passes segments between these ranks."""
        return LocalLinks(self)

    def _contribute(self, kind: str, value: Any, deliver: Any = None) -> "_Request":
        number = self._sequence.get(kind, 0)
        self._sequence[kind] = number + 1
        request = _Request(self._group, (kind, number), deliver)
        with self._group.changed:
            self._group.calls.setdefault((kind, number), {})[self._rank] = value
            self._group.changed.notify_all()
        return request


class _Request:
    def __init__(self, group: _Group, call: tuple[str, int], deliver: Any):
        self._group, self._call, self._deliver = group, call, deliver
        self._result: list[Any] | None = None

    def Test(self) -> bool:
        """Return whether it is complete; if so, the result has been delivered."""
        return self.wait(0.0) is not None

    def wait(self, seconds: float | None = None) -> list[Any] | None:
        """Return the contributions of all ranks, or None if they are not there in time."""
        if self._result is not None:
            return self._result
        calls = self._group.calls
        with self._group.changed:
            complete = lambda: len(calls[self._call]) >= self._group.size  # noqa: E731
            over = lambda: complete() or (seconds is None and self._gone())  # noqa: E731
            self._group.changed.wait_for(over, seconds)
            if not complete():
                if seconds is not None:
                    return None
                raise RuntimeError(f"rank {self._gone()[0]} of the world has ended, and is awaited")
            values = calls[self._call]
            self._result = [values[rank] for rank in range(self._group.size)]
            # The last rank that takes it clears it away.
            values["taken"] = values.get("taken", 0) + 1
            if values["taken"] == self._group.size:
                del calls[self._call]
        if self._deliver:
            self._deliver(self._result)
        return self._result

    def _gone(self) -> list[int]:
        """Return who is awaited and has left the world."""
        group, here = self._group, self._group.calls[self._call]
        return [m for r, m in enumerate(group.members) if r not in here and m in group.family.left]


class LocalLinks:
    """Segments of threads: every rank sees the owner's own mapping."""

    def __init__(self, comm: LocalComm):
        self._comm = comm

    def exchange(self, segment: Segment, check: Callable[[int], None]) -> list[Segment]:
        """Return every rank's segment, in rank order; `check` raises if the wait is to end."""
        segment.close_fd()
        request = self._comm._contribute("exchange", segment)
        next_rank = (self._comm.Get_rank() + 1) % self._comm.Get_size()
        while not request.wait(0.05):
            check(next_rank)
        return request.wait()

    def close(self) -> None:
        """Do nothing."""
