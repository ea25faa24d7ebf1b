"""What a rank has of the network between nodes: cards, connections, registered memory, the proxy.

The work is done by native/network.cpp; here it is set up, with bytes that the ranks exchange.
"""

import ctypes
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from .. import compiler, errors, structs
from . import soft
from .queue import CommandQueue, lines

_TEXT_BYTES = 1024
# Of letters, the first words of a call; segments have lower numbers.
LETTERS = 0xFFFF
LIBRARIES = "libibverbs.so.1", "libefa.so.1"
# Chunks that may come in one call.
MOST_CHUNKS = 1 << 20
# To each peer, on each card: an immediate waits until the data before it are there, and meanwhile
# the other one goes on.
_QUEUE_PAIRS = 2


def loads() -> bool:
    """Return whether this machine has the library that drives real cards."""
    try:
        ctypes.CDLL(LIBRARIES[0])
    except OSError:
        return False
    return True


def check_chunks(count: int, what: str, remedy: str) -> None:
    """Raise ValueError if a call has more chunks of something than can be told apart."""
    if count > MOST_CHUNKS:
        raise ValueError(
            f"{count} chunks of {what}: between nodes use at most {MOST_CHUNKS}; {remedy} makes "
            "them larger"
        )


class _Shared(ctypes.Structure):
    """``Shared`` of network.cpp."""

    _fields_ = tuple(
        (name, ctypes.c_uint64)
        for name in ("queue", "rank", "size", "arrived", "counted", "arrivals", "letters", "pages")
    )


class GpuMemory(NamedTuple):
    """How network cards reach memory of a GPU.

    Attributes
    ----------
    path : {'dma-buf', 'peermem', 'staged'}
        By a file that the GPU's driver gives out; by an address that the card's driver asks that
        of the GPU about (nvidia_peermem); not at all, so that data go through host memory.
    place : tuple or None
        What the peers must know.
    refusals : str
        Why it is none of the ways before.
    """

    path: str
    place: tuple[int, list[int]] | None
    refusals: str


class Network:
    """The cards that a rank uses, and the proxy that works for its kernels.

    Parameters
    ----------
    rank, size : int
    links : sequence of int
        The peers that it exchanges data with.
    pages : sequence of int
        Address of every rank's ``HostPage``.
    transport : {'verbs', 'efa'}
    cards : sequence of str
    software : bool
        Whether the cards are made of software.
    counts : int
        Kinds of arrivals that are counted.

    Attributes
    ----------
    queue : CommandQueue
        What it is asked for.
    arrived : numpy.ndarray
        A signal per rank for its letter, one per rank for its receipt, and then one per chunk;
        behind them counts.
    counted : int
        The first of these.
    letters : numpy.ndarray
        Bytes of ``Letter`` structs: that of this rank, then two of each rank, by generation, and
        one that nobody reads, and a blank one.

    Raises
    ------
    ConfigurationError
        If there is no library or no such card.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        links: Sequence[int],
        pages: Sequence[int],
        *,
        transport: str,
        cards: Sequence[str],
        software: bool,
        counts: int = 0,
    ):
        self._native = compiler.host_library(compiler.native_dir() / "network.cpp")
        self._native.network_address_bytes.restype = ctypes.c_uint64
        self._native.network_context.restype = ctypes.c_void_p
        self.links, self.cards, self.software = tuple(links), tuple(cards), software
        self.transport = transport
        paths = (soft.path(),) * 2 if software else LIBRARIES
        self._handle = ctypes.c_void_p()
        self._call(
            errors.ConfigurationError,
            self._native.network_open,
            ctypes.byref(self._handle),
            *(path.encode() for path in paths),
            ",".join(cards).encode(),
            *map(ctypes.c_uint64, (transport == "efa", _QUEUE_PAIRS, len(links))),
        )
        self.queue = CommandQueue()
        self.counted = 2 * size + MOST_CHUNKS
        self.arrived = lines(-(-(self.counted + counts) // 8)).reshape(-1)
        letter = ctypes.sizeof(structs.shared().Letter)
        self._raw_letters = lines((3 + 2 * size) * letter // 64)
        self.letters = self._raw_letters.view(np.uint8).reshape(-1, letter)
        self._pages = np.array(pages, np.uint64)
        self._shared = _Shared(
            queue=self.queue.address,
            rank=rank,
            size=size,
            arrived=self.arrived.ctypes.data,
            counted=self.counted,
            arrivals=self.counted + counts,
            letters=self.letters[1:].ctypes.data,
            pages=self._pages.ctypes.data,
        )

    def _call(self, error: type[errors.Error], function: Callable[..., int], *args: Any) -> None:
        """Call a native function; raise what it says in words."""
        text = ctypes.create_string_buffer(_TEXT_BYTES)
        if function(*args, text, ctypes.c_uint64(_TEXT_BYTES)):
            raise error(text.value.decode(errors="replace"))

    def addresses(self) -> dict[int, bytes]:
        """Return, for each peer, what it needs to be connected."""
        nbytes = len(self.cards) * self._native.network_address_bytes()
        result = {}
        for peer in self.links:
            room = ctypes.create_string_buffer(nbytes)
            self._call(
                errors.NetworkError, self._native.network_address, self._handle, _u64(peer), room
            )
            result[peer] = room.raw
        return result

    def connect(self, addresses: Mapping[int, bytes]) -> None:
        """Connect with all peers, by what they say of themselves."""
        for peer, address in addresses.items():
            self._call(
                errors.NetworkError, self._native.network_connect, self._handle, _u64(peer), address
            )

    def register(
        self, number: int, address: int, nbytes: int, dmabuf: int = -1
    ) -> tuple[int, list[int]]:
        """Let the cards read memory here, and peers write it; return what the peers must know.

        `dmabuf` is a file that stands for memory of a GPU.
        """
        keys = (ctypes.c_uint64 * len(self.cards))()
        self._call(
            errors.NetworkError,
            self._native.network_register,
            *(self._handle, _u64(number), ctypes.c_void_p(address), _u64(nbytes)),
            *(ctypes.c_int(dmabuf), keys),
        )
        return address, list(keys)

    def register_gpu(
        self, number: int, address: int, nbytes: int, export: Callable[[], int]
    ) -> GpuMemory:
        """Do so with memory of a GPU, by the first way that the driver and all cards allow.

        `export` returns a dma-buf of the memory, as a file that is closed here.
        """
        refusals = []
        for path in ("dma-buf", "peermem"):
            dmabuf = -1
            try:
                if path == "dma-buf":
                    dmabuf = export()
                place = self.register(number, address, nbytes, dmabuf)
                return GpuMemory(path, place, "; ".join(refusals))
            except errors.Error as error:
                refusals.append(f"{path}: {error}")
            finally:
                if dmabuf >= 0:
                    os.close(dmabuf)
        return GpuMemory("staged", None, "; ".join(refusals))

    def register_letters(self) -> tuple[int, list[int]]:
        """Do so with the letters."""
        return self.register(LETTERS, self.letters.ctypes.data, self.letters.nbytes)

    def unregister(self, number: int) -> None:
        """Take it back."""
        self._native.network_unregister(self._handle, _u64(number))

    def learn(self, number: int, places: Sequence[tuple[int, list[int]]]) -> None:
        """Take note of what every rank has registered."""
        for peer in self.links:
            address, keys = places[peer]
            given = (ctypes.c_uint64 * len(keys))(*keys)
            self._native.network_learn(self._handle, _u64(peer), _u64(number), _u64(address), given)

    def start(self) -> None:
        """Start the proxy."""
        shared = ctypes.byref(self._shared)
        self._call(errors.OutOfMemoryError, self._native.network_start, self._handle, shared)

    def by_hand(self) -> ctypes.Structure:
        """Stop the proxy's thread; return what a simulation takes its steps by."""
        self._native.network_halt(self._handle)
        return structs.helper(self._native.network_step, self._handle.value)

    def counters(self) -> tuple[int, int, int, int]:
        """Return what the cards have counted: bytes out and in, messages out and in."""
        if not self.software:
            raise errors.ConfigurationError("only network cards made of software are counted here")
        contexts = (
            self._native.network_context(self._handle, _u64(card))
            for card in range(len(self.cards))
        )
        return tuple(map(sum, zip(*map(soft.counters, contexts), strict=True)))

    def shared(self) -> list[np.ndarray]:
        """Return the host memory that kernels use, too."""
        return [self.queue.slots, self.queue.counts, self.arrived, self._raw_letters]

    def close(self) -> None:
        """Stop the proxy and let go of the cards."""
        handle, self._handle = self._handle, None
        if handle:
            self._native.network_close(handle)


_u64 = ctypes.c_uint64
