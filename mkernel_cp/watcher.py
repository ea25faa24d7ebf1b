"""A thread that notices the death of a peer at once, and ends this rank's waits."""

import contextlib
import os
import select
import socket
import threading
from collections.abc import Callable, Mapping


class Watcher(threading.Thread):
    """Watches a socket and a process descriptor per peer; never calls CUDA or MPI.

    Parameters
    ----------
    sockets : mapping of int to socket.socket
        Per peer; nothing is read from them.
    pids : mapping of int to int
        Per peer; 0 if it is in a process namespace that is not seen here.
    lost : callable
        Called once per peer that is gone, with its rank.
    beat : callable
        Called ten times a second: what it does shows that this process runs.
    """

    _BEAT_MS = 100

    def __init__(
        self,
        sockets: Mapping[int, socket.socket],
        pids: Mapping[int, int],
        lost: Callable[[int], None],
        beat: Callable[[], None],
    ):
        super().__init__(name="mkernel_cp watcher", daemon=True)
        self._lost, self._beat = lost, beat
        self._poll = select.poll()
        self._peers: dict[int, int] = {}
        self._process_fds: list[int] = []
        for peer, link in sockets.items():
            self._register(link.fileno(), select.POLLRDHUP, peer)
            # A forked child may keep a dead rank's socket open: so the process is watched too.
            with contextlib.suppress(OSError):
                fd = os.pidfd_open(pids[peer])
                self._process_fds.append(fd)
                self._register(fd, select.POLLIN, peer)
        self._wake, self._waker = os.pipe2(os.O_CLOEXEC)
        self._poll.register(self._wake, select.POLLIN)

    def _register(self, fd: int, events: int, peer: int) -> None:
        self._poll.register(fd, events)
        self._peers[fd] = peer

    def run(self) -> None:
        gone: set[int] = set()
        while True:
            self._beat()
            for fd, _ in self._poll.poll(self._BEAT_MS):
                if fd == self._wake:
                    return
                self._poll.unregister(fd)
                peer = self._peers[fd]
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
