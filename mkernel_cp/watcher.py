"""A thread that notices the death of a peer at once, and ends this rank's waits."""

import contextlib
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping

from .mirrors import Mirrors


class Watcher(threading.Thread):
    """Watches a socket and a process descriptor per peer; never calls CUDA or MPI.

    Parameters
    ----------
    sockets : mapping of int to socket.socket
        Per peer of this host; nothing is read from them.
    pids : mapping of int to int
        Per such peer; 0 if it is in a process namespace that is not seen here.
    mirrors : Mirrors or None
        The connections with other hosts, which have their turn here.
    lost : callable
        Called once per peer that is gone, with its rank.
    beat : callable
        Called ten times a second: what it does shows that this process runs.
    """

    _BEAT_SECONDS = 0.1

    def __init__(
        self,
        sockets: Mapping[int, socket.socket],
        pids: Mapping[int, int],
        mirrors: Mirrors | None,
        lost: Callable[[int], None],
        beat: Callable[[], None],
    ):
        super().__init__(name="mkernel_cp watcher", daemon=True)
        self._lost, self._beat, self._mirrors = lost, beat, mirrors
        self._poll = select.poll()
        self._peers: dict[int, int] = {}
        self._process_fds: list[int] = []
        self._remote: set[int] = set()
        for peer, link in sockets.items():
            self._register(link.fileno(), select.POLLRDHUP, peer)
            # A forked child may keep a dead rank's socket open: so the process is watched too.
            with contextlib.suppress(OSError):
                fd = os.pidfd_open(pids[peer])
                self._process_fds.append(fd)
                self._register(fd, select.POLLIN, peer)
        for peer, link in mirrors.sockets.items() if mirrors else ():
            self._remote.add(peer)
            self._register(link.fileno(), select.POLLIN, peer)
        self._wake, self._waker = os.pipe2(os.O_CLOEXEC)
        self._poll.register(self._wake, select.POLLIN)

    def _register(self, fd: int, events: int, peer: int) -> None:
        self._poll.register(fd, events)
        self._peers[fd] = peer

    def run(self) -> None:
        gone: set[int] = set()
        due = time.monotonic()
        while True:
            if time.monotonic() >= due:
                due = time.monotonic() + self._BEAT_SECONDS
                self._beat()
                if self._mirrors is not None:
                    self._mirrors.send()
            for fd, _ in self._poll.poll(max(0.0, 1000 * (due - time.monotonic()))):
                if fd == self._wake:
                    return
                peer = self._peers[fd]
                if peer in self._remote and self._mirrors.receive(peer):
                    continue
                self._poll.unregister(fd)
                if peer not in gone:
                    gone.add(peer)
                    self._lost(peer)

    def stop(self) -> None:
        """End the thread, and close what it owns."""
        os.write(self._waker, b".")
        # A garbage collector may close a communicator in this very thread.
        if self.is_alive() and threading.current_thread() is not self:
            self.join()
        for fd in (self._wake, self._waker, *self._process_fds):
            os.close(fd)
