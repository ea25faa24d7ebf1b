"""The queue in which kernels put what the proxy is to do, in host memory."""

import ctypes
import mmap
import time

import numpy as np

from .. import structs
from ..memory import round_up

_LINE = 64
_PAGE = mmap.PAGESIZE
_ENTER, _WRITE = 1, 2  # as Ask in channel.cuh


class CommandQueue:
    """Room for commands, and the counts by which their writers and the proxy agree.

    Parameters
    ----------
    capacity : int
        Commands that may be under way.

    Attributes
    ----------
    address : int
        Of the ``CommandQueue`` struct of types.cuh.
    struct : ctypes.Structure
        That itself.
    slots, counts : numpy.ndarray
        The words of the commands; how many were put in, seen to be taken, taken, and sent.
    """

    def __init__(self, capacity: int = 1024):
        mk = structs.shared()
        self.slots = lines(capacity)
        self.counts = lines(4)
        words = (self.counts.ctypes.data + i * _LINE for i in range(4))
        self.struct = mk.CommandQueue(self.slots.ctypes.data, capacity, *words)
        self.address = ctypes.addressof(self.struct)

    def struct_with(self, tickets: int, taken_seen: int) -> ctypes.Structure:
        """Return the struct with other words for what only kernels count."""
        struct = type(self.struct).from_buffer_copy(self.struct)
        struct.tickets, struct.taken_seen = tickets, taken_seen
        return struct

    def put(self, *words: int) -> None:
        """Put in a command, its words behind its number, as the only one that does so."""
        ticket = self.tickets
        while ticket - self.taken >= len(self.slots):
            time.sleep(0)
        self.counts[0, 0] = ticket + 1
        slot = self.slots[ticket % len(self.slots)]
        slot[1:] = words
        slot[0] = ticket + 1

    def enter(self, generation: int, writes: np.ndarray) -> None:
        """Begin a call in which chunks come here, each in so many writes; keep `writes`."""
        self.put(_ENTER << 32, 0, generation, writes.ctypes.data, 0, 0, len(writes))

    def write(
        self,
        peer: int,
        place: int,
        generation: int,
        source: tuple[int, int],
        target: tuple[int, int],
        nbytes: int,
    ) -> None:
        """Have bytes written to a peer, whose signal of this place then says that they are there.

        `source` and `target` are a registered region and an offset in it.
        """
        begin, end = (region << 48 | offset for region, offset in (source, target))
        pitches = nbytes << 32 | nbytes
        self.put(_WRITE << 32 | 1, peer << 32 | place, generation, begin, end, pitches, nbytes)

    @property
    def tickets(self) -> int:
        """How many commands have been put in."""
        return int(self.counts[0, 0])

    @property
    def taken(self) -> int:
        """How many of them have left their slots."""
        return int(self.counts[2, 0])

    @property
    def sent(self) -> int:
        """How many of them, from the first on, are sent."""
        return int(self.counts[3, 0])


def lines(count: int) -> np.ndarray:
    """Return cache lines of zeros, in pages of memory of their own."""
    raw = np.zeros(round_up(count * _LINE, _PAGE) + _PAGE, np.uint8)
    start = -raw.ctypes.data % _PAGE
    return raw[start : start + count * _LINE].view(np.uint64).reshape(count, -1)
