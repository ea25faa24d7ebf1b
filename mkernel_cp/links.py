"""One socket per pair of ranks of a node: it passes memory files, and its end tells of a death."""

import array
import contextlib
import os
import secrets
import select
import socket
import struct
from collections.abc import Callable, Iterator
from typing import Any

from . import errors
from .memory import Segment

_SETUP_SECONDS = 60.0
_HELLO = struct.Struct("=I16s")
_HEADER = struct.Struct("=QQ")  # number of the exchange, bytes of the file


class SocketLinks:
    """Abstract UNIX sockets between the ranks of one node; no file system entry is made.

    Parameters
    ----------
    mpi : mpi4py.MPI.Comm
        The ranks of the node; used for the set-up only.
    """

    def __init__(self, mpi: Any):
        self._rank, self._size = mpi.Get_rank(), mpi.Get_size()
        token = mpi.bcast(secrets.token_bytes(16) if self._rank == 0 else None, root=0)
        self._exchanges = 0
        self.sockets: dict[int, socket.socket] = {}
        self.pids: dict[int, int] = {}
        problem = None
        with contextlib.ExitStack() as stack:
            try:
                listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                listener.bind(_name(token, self._rank))
                listener.listen(self._size)
                listener.settimeout(_SETUP_SECONDS)
            except OSError as error:
                problem = f"rank {self._rank} cannot listen on a UNIX socket: {error}"
            _raise_together(mpi, problem)
            try:
                self._connect(listener, token)
            except OSError as error:
                problem = f"rank {self._rank} cannot reach its node peers by UNIX sockets: {error}"
            try:
                _raise_together(mpi, problem)
            except errors.ConfigurationError:
                self.close()
                raise

    def _connect(self, listener: socket.socket, token: bytes) -> None:
        for peer in range(self._rank):
            link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self.sockets[peer] = link
            link.settimeout(_SETUP_SECONDS)
            link.connect(_name(token, peer))
            link.sendall(_HELLO.pack(self._rank, token))
        while len(self.sockets) < self._size - 1:
            link, _ = listener.accept()
            link.settimeout(_SETUP_SECONDS)
            hello = link.recv(_HELLO.size, socket.MSG_WAITALL)
            # Anybody may connect to an abstract socket: only who knows the token is a peer.
            if len(hello) < _HELLO.size or not secrets.compare_digest(hello[4:], token):
                link.close()
                continue
            self.sockets[_HELLO.unpack(hello)[0]] = link
        credentials = struct.Struct("3i")
        for peer, link in self.sockets.items():
            raw = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, credentials.size)
            self.pids[peer] = credentials.unpack(raw)[0]

    def exchange(self, segment: Segment, check: Callable[[int], None]) -> list[Segment]:
        """Return every rank's segment, mapped here, in rank order.

        Parameters
        ----------
        segment : Segment
            This rank's; its file is closed afterwards.
        check : callable
            Called with the peer that is waited for; raises if the wait is to end.
        """
        self._exchanges += 1
        header = _HEADER.pack(self._exchanges, segment.nbytes)
        rights = array.array("i", [segment.fd]).tobytes()
        for peer, link in self.sockets.items():
            with _naming(peer):
                link.sendmsg([header], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
        segment.close_fd()
        # All messages are taken before any is used: a failure leaves none for the next exchange.
        files: dict[int, tuple[int, int]] = {}
        try:
            for peer, link in self.sockets.items():
                files[peer] = self._receive(peer, link, check)
            segments = {self._rank: segment}
            for peer in list(files):
                segments[peer] = Segment(*files.pop(peer))
                segments[peer].close_fd()
        finally:
            for fd, _ in files.values():
                os.close(fd)
        return [segments[rank] for rank in range(self._size)]

    def _receive(
        self, peer: int, link: socket.socket, check: Callable[[int], None]
    ) -> tuple[int, int]:
        """Return the file that a peer passes, and its size."""
        ready = select.poll()
        ready.register(link, select.POLLIN)
        while not ready.poll(50):
            check(peer)
        with _naming(peer):
            data, fds, _, _ = socket.recv_fds(link, _HEADER.size, 1)
        if len(data) == _HEADER.size and len(fds) == 1:
            number, nbytes = _HEADER.unpack(data)
            if number == self._exchanges:
                os.set_inheritable(fds[0], False)
                return fds[0], nbytes
        for fd in fds:
            os.close(fd)
        if not data:
            raise errors.PeerLostError(f"lost rank {peer}: its socket has ended")
        raise errors.OutOfMemoryError(
            f"no file came from rank {peer}: is the limit of open files (ulimit -n) too low?"
        )

    def close(self) -> None:
        """Close the sockets: for the peers, this rank is gone."""
        for link in self.sockets.values():
            link.close()
        self.sockets.clear()


@contextlib.contextmanager
def _naming(peer: int) -> Iterator[None]:
    """Turn what a dead peer's socket says into its name."""
    try:
        yield
    except ConnectionError as error:
        raise errors.PeerLostError(f"lost rank {peer}: {error}") from None


def _name(token: bytes, rank: int) -> str:
    return f"\0mkernel_cp-{token.hex()}-{rank}"


def _raise_together(mpi: Any, problem: str | None) -> None:
    problems = [text for text in mpi.allgather(problem) if text]
    if problems:
        raise errors.ConfigurationError("; ".join(problems))
