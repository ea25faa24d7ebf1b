"""Pages of ranks on other hosts: copies of them here, kept up to date over TCP.

Each rank sends its own page to every rank of another host, piece by piece as it changes, and at
least with every beat of its watcher. The end of a connection tells of a death.
"""

import contextlib
import fcntl
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from . import errors
from .host_pages import HostPage

_SETUP_SECONDS = 20.0
_ATTEMPT_SECONDS = 2.0
_VANISHED_SECONDS = 6  # without an answer, until a host counts as gone
_SETTLE_SECONDS = 3.0  # for which a rank that is stopped is waited for
_HELLO = struct.Struct("=I16s")
_PIECE = struct.Struct("=QQ")  # its place in the page and its bytes
_ABORT = 1 << 63  # in place of a place: the abort word of the receiver is to be this
_WORD = struct.Struct("=Q")
_SIOCGIFADDR = 0x8915


class Mirrors:
    """The connections of a rank with those of other hosts. Making them is collective.

    Parameters
    ----------
    mpi : mpi4py.MPI.Comm or LocalComm
        All ranks; used for the set-up only.
    peers : sequence of int
        The ranks of other hosts.
    together : callable
        Runs a step; what fails on one rank is raised on all.

    Attributes
    ----------
    sockets : dict of int to socket.socket
        Per peer.
    """

    def __init__(
        self,
        mpi: Any,
        peers: Sequence[int],
        together: Callable[[Callable[[], Any]], Any],
    ):
        self._rank, self._peers = mpi.Get_rank(), tuple(peers)
        self.sockets: dict[int, socket.socket] = {}
        self._links: dict[int, _Link] = {}
        with contextlib.ExitStack() as stack:
            listener = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))

            def listen() -> Any:
                listener.bind(("", 0))
                listener.listen(mpi.Get_size())
                return secrets.token_bytes(16), listener.getsockname()[1], _addresses()

            try:
                places = mpi.allgather(together(listen))
                together(lambda: self._connect(listener, places))
            except BaseException:
                self.close()
                raise

    def start(self, pages: Sequence[HostPage]) -> None:
        """Begin to use pages: this rank's own, and the copies of its peers'."""
        self._own = pages[self._rank]
        self._links = {
            peer: _Link(link, self._rank, pages[peer]) for peer, link in self.sockets.items()
        }

    def send(self) -> None:
        """Tell all peers what has changed in this rank's page, as far as they take it now."""
        pieces = self._own.pieces()
        for link in self._links.values():
            link.send(pieces)

    def receive(self, peer: int) -> bool:
        """Take in what a peer has sent; return whether it is still there."""
        return self._links[peer].receive(self._own)

    def settle(self) -> None:
        """After a failure: wait until all peers know of one, and their records are here."""
        end = time.monotonic() + _SETTLE_SECONDS
        while time.monotonic() < end and not all(link.settled for link in self._links.values()):
            time.sleep(0.01)

    def close(self) -> None:
        """Send what is left, and end the connections: for the peers, this rank is gone."""
        if self._links:
            self.send()  # what a full buffer has left before
            self.send()
        for link in self.sockets.values():
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_WR)
                # What is unread when it is closed would make the peer lose what it was sent.
                while link.recv(1 << 16, socket.MSG_DONTWAIT):
                    pass
            link.close()
        self.sockets.clear()

    # --- set-up -----------------------------------------------------------------------------------

    def _connect(self, listener: socket.socket, places: Sequence[tuple[bytes, int, Any]]) -> None:
        """Connect to lower ranks, and be connected to by higher ones."""
        own = places[self._rank][0]
        higher = {peer for peer in self._peers if peer > self._rank}
        accepting = threading.Thread(target=self._accept, args=(listener, own, higher), daemon=True)
        accepting.start()
        deadline = time.monotonic() + _SETUP_SECONDS
        problem = None
        answered: set[str] = set()  # addresses, which are tried first: hosts have several ranks
        for peer in self._peers:
            if peer < self._rank and problem is None:
                token, port, addresses = places[peer]
                addresses = sorted(addresses, key=lambda address: address not in answered)
                problem = self._reach(peer, token, port, addresses)
                if problem is None:
                    answered.add(self.sockets[peer].getpeername()[0])
        accepting.join(max(0.0, deadline - time.monotonic()) if problem is None else 0.0)
        if problem is None and not higher <= self.sockets.keys():
            problem = (
                f"ranks {sorted(higher - self.sockets.keys())} do not connect to rank {self._rank}"
            )
        if problem:
            raise errors.ConfigurationError(
                f"{problem}: ranks on different hosts watch each other over TCP; is a firewall "
                "between them?"
            )
        for link in self.sockets.values():
            _keep_alive(link)

    def _reach(self, peer: int, token: bytes, port: int, addresses: Iterable[str]) -> str | None:
        """Connect to a peer at one of its addresses; return what is wrong if none answers."""
        failures = []
        for address in addresses:
            try:
                link = socket.create_connection((address, port), _ATTEMPT_SECONDS)
                try:
                    link.sendall(_HELLO.pack(self._rank, token))
                    # Another host may have the same address, in a network of its own.
                    if _receive_exactly(link, len(token)) != token[::-1]:
                        raise OSError("another process answers")
                except BaseException:
                    link.close()
                    raise
                self.sockets[peer] = link
                return None
            except OSError as error:
                failures.append(f"{address}: {error.strerror or error}")
        return f"rank {self._rank} cannot reach rank {peer} ({'; '.join(failures)})"

    def _accept(self, listener: socket.socket, token: bytes, expected: set[int]) -> None:
        listener.settimeout(_SETUP_SECONDS)
        with contextlib.suppress(OSError):  # the time is up, or the listener closed
            while not expected <= self.sockets.keys():
                link, _ = listener.accept()
                link.settimeout(_ATTEMPT_SECONDS)
                try:
                    rank, theirs = _HELLO.unpack(_receive_exactly(link, _HELLO.size))
                    if not secrets.compare_digest(theirs, token) or rank not in expected:
                        raise OSError("a stranger")
                    link.sendall(token[::-1])
                except (OSError, struct.error):
                    link.close()
                    continue
                self.sockets[rank] = link


class _Link:
    """A connection with one peer: what it was sent, and what of it has come here."""

    def __init__(self, link: socket.socket, rank: int, mirror: HostPage):
        self._socket, self._rank, self._mirror = link, rank, mirror
        self._sent: dict[int, bytes] = {}
        self._leaving, self._coming = bytearray(), bytearray()
        self._aborted = self._told = False
        self._here = True

    @property
    def settled(self) -> bool:
        """Whether the peer has met a failure, after which it records no other, or is gone."""
        return not self._here or self._told

    def send(self, pieces: Mapping[int, bytes]) -> None:
        if not self._here or self._mirror.words.closed:
            return
        if not self._leaving:
            for place, piece in pieces.items():
                if self._sent.get(place) != piece:
                    self._leaving += _PIECE.pack(place, len(piece)) + piece
                    self._sent[place] = piece
            why = self._mirror.words.abort
            # Set here, for a failure of this rank: its record has been sent.
            if why & 0xFFFFFFFF == 1 + self._rank and not self._aborted:
                self._aborted = True
                self._leaving += _PIECE.pack(_ABORT, _WORD.size) + _WORD.pack(why)
        with contextlib.suppress(OSError):  # the buffer is full, or the peer gone, as receive sees
            while self._leaving:
                del self._leaving[: self._socket.send(self._leaving, socket.MSG_DONTWAIT)]

    def receive(self, own: HostPage) -> bool:
        try:
            while data := self._socket.recv(1 << 16, socket.MSG_DONTWAIT):
                self._coming += data
        except BlockingIOError:
            self._take(own)
            return True
        except OSError:
            pass
        self._take(own)
        self._here = False
        return False

    def _take(self, own: HostPage) -> None:
        """Apply the pieces that are there in whole."""
        begin = 0
        while len(self._coming) >= begin + _PIECE.size:
            place, nbytes = _PIECE.unpack_from(self._coming, begin)
            end = begin + _PIECE.size + nbytes
            if len(self._coming) < end:
                break
            piece = bytes(self._coming[begin + _PIECE.size : end])
            if place == _ABORT:
                own.words.abort = own.words.abort or _WORD.unpack(piece)[0]
            else:
                self._mirror.apply(place, piece)
                self._told = self._told or (place == 0 and any(piece[: _WORD.size]))
            begin = end
        del self._coming[:begin]


def _receive_exactly(link: socket.socket, nbytes: int) -> bytes:
    data = b""
    while len(data) < nbytes:
        more = link.recv(nbytes - len(data))
        if not more:
            raise OSError("it hangs up")
        data += more
    return data


def _addresses() -> list[str]:
    """Return the IPv4 addresses of this host, those that others may reach first."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):  # an interface without an address
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, request)
                found.append(socket.inet_ntoa(answer[20:24]))
    return sorted(dict.fromkeys([*found, "127.0.0.1"]), key=lambda a: a.startswith("127."))


def _keep_alive(link: socket.socket) -> None:
    """Let a connection end when the other host is silent."""
    link.settimeout(None)
    for level, option, value in (
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _VANISHED_SECONDS - 1),
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * _VANISHED_SECONDS),
        (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    ):
        link.setsockopt(level, option, value)
