"""Pages through which ranks of a node speak without MPI: signals, abort words, texts of calls.

A `HostPage` is host memory on every target, as it is to work when a GPU does not. A `SignalPage` is
where kernels look: its words are read and written here on the host target only.
"""

import ctypes
import hashlib
import struct
from collections.abc import Sequence

from . import structs
from .memory import Segment, round_up

# Progress of HostPage.called, as in signal.cuh.
ANNOUNCED, READY, REFUSED = 1, 2, 3

_LINE = 64
_TEXT_SLOTS, _TEXT_BYTES = 16, 2048
_SAID = struct.Struct("=QQQ")  # generation, bytes of text, whether it is a refusal
_GENERATION = struct.Struct("=Q")


def signal(generation: int, progress: int) -> int:
    """Return the value of a signal."""
    return generation << 32 | progress


def digest_of(text: str) -> int:
    """Return 64 bits that stand for a text."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


class SignalPage:
    """A rank's `World`, counters and inbox, in memory that its kernels and its peers write.

    Parameters
    ----------
    segment : Segment
        At least `nbytes(size)`, zeroed when the rank creates it.
    size : int
        Number of ranks.
    """

    def __init__(self, segment: Segment, size: int):
        world = structs.shared().World
        self.segment = segment
        self.world_address = segment.address
        self.generation_word = segment.address + world.generation.offset
        self.running_word = segment.address + world.running.offset
        self.failures_word = segment.address + world.failures.offset
        # A line each, as different agents write them.
        self.bytes_word = segment.address + self._world_nbytes()
        self.looked_word = self.bytes_word + _LINE
        self.counters = self.looked_word + _LINE
        self.counters_nbytes = self._counters_nbytes(size)
        self._inbox = self.counters + round_up(self.counters_nbytes, _LINE)

    @staticmethod
    def _world_nbytes() -> int:
        return round_up(ctypes.sizeof(structs.shared().World), _LINE)

    @staticmethod
    def _counters_nbytes(size: int) -> int:
        return 2 * 8 * (2 + size)  # two banks

    @classmethod
    def nbytes(cls, size: int) -> int:
        """Return the bytes that a page for so many ranks takes."""
        inbox = size * ctypes.sizeof(structs.shared().Inbox)
        counters = round_up(cls._counters_nbytes(size), _LINE)
        return cls._world_nbytes() + 2 * _LINE + counters + inbox

    def inbox_address(self, peer: int) -> int:
        """Return the address of what `peer` tells this rank."""
        return self._inbox + peer * ctypes.sizeof(structs.shared().Inbox)


class HostPage:
    """A rank's abort word and records, its word to others, and the texts of its last calls.

    Parameters
    ----------
    segment : Segment
        At least `nbytes()`, zeroed when the rank creates it.
    """

    def __init__(self, segment: Segment):
        page = structs.shared().HostPage
        self._segment = segment
        self.address = segment.address
        self.words = page.from_address(segment.address)
        self._numbers = (ctypes.c_uint64 * (ctypes.sizeof(page) // 8)).from_address(self.address)
        start = round_up(ctypes.sizeof(page), _LINE)
        self._said: list[tuple[str, bool]] = [("", False)] * _TEXT_SLOTS
        self._texts = memoryview(segment.bytes)[start : start + _TEXT_SLOTS * _TEXT_BYTES]

    @staticmethod
    def nbytes() -> int:
        """Return the bytes that a page takes."""
        page = ctypes.sizeof(structs.shared().HostPage)
        return round_up(page, _LINE) + _TEXT_SLOTS * _TEXT_BYTES

    def beat(self) -> None:
        """Show that this process runs."""
        self.words.beat += 1

    def pieces(self) -> dict[int, bytes]:
        """Return what a copy of the page is made of, in the order to apply it: by place, its bytes.

        A word is read after those that come later in time, so that it is no older than they say.
        """
        words = self._numbers
        first = struct.pack(f"={len(words)}Q", *words[:])
        slots = range(0, len(self._texts), _TEXT_BYTES)
        texts = {at + _TEXT_BYTES: bytes(self._texts[at : at + _TEXT_BYTES]) for at in slots}
        return {**texts, 0: first}

    def apply(self, place: int, piece: bytes) -> None:
        """Take over a piece of another page; the words from the last to the first."""
        if place:
            self._texts[place - _TEXT_BYTES : place - _TEXT_BYTES + len(piece)] = piece
            return
        abort, *others = struct.unpack(f"={len(self._numbers)}Q", piece)
        for i in range(len(others), 0, -1):
            self._numbers[i] = others[i - 1]
        if abort:  # else it may have been set here, for the other one to take note
            self._numbers[0] = abort

    def set_text(self, generation: int, text: str, *, refusal: bool = False) -> None:
        """Say what this rank calls in a generation, or why it refuses to."""
        slot = generation % _TEXT_SLOTS
        start = slot * _TEXT_BYTES
        if self._said[slot] == (text, refusal):  # as in a loop of calls
            _GENERATION.pack_into(self._texts, start, generation)
            return
        self._said[slot] = text, refusal
        data = text.encode()[: _TEXT_BYTES - _SAID.size]
        self._texts[start + _SAID.size : start + _SAID.size + len(data)] = data
        _SAID.pack_into(self._texts, start, generation, len(data), refusal)

    def refused(self, generation: int) -> bool:
        """Return whether the rank has refused in a generation, even if it has gone on since."""
        start = generation % _TEXT_SLOTS * _TEXT_BYTES
        said, _, refusal = _SAID.unpack_from(self._texts, start)
        return said == generation and bool(refusal)

    def last_text(self) -> tuple[int, str]:
        """Return the last generation of which the rank said something, and what."""
        return max(said for said, *_ in self._slots()), self.text(1 << 63)

    def _slots(self) -> dict[tuple[int, int, int], int]:
        return {
            _SAID.unpack_from(self._texts, slot * _TEXT_BYTES): slot * _TEXT_BYTES
            for slot in range(_TEXT_SLOTS)
        }

    def text(self, generation: int) -> str:
        """Return what the rank said of a generation, or, if nothing, of the last before it."""
        slots = self._slots()
        # The host does not see the generations of graphs: they are what it has said last.
        earlier = [key for key in slots if key[0] <= generation]
        if not earlier:
            return "something that so many calls later is forgotten"
        said, length, refusal = max(earlier)
        if said == 0:
            return "nothing"
        start = slots[said, length, refusal]
        start += _SAID.size
        return bytes(self._texts[start : start + length]).decode(errors="replace")


def write_record(page: HostPage, *, by_watcher: bool, **fields: int) -> None:
    """Write a record whose fields are those of the struct; `written` last."""
    record = page.words.by_watcher if by_watcher else page.words.by_kernel
    for name, value in fields.items():
        setattr(record, name, value)
    record.written = 1


def abort(pages: Sequence[HostPage], rank: int, *, by_watcher: bool = False) -> None:
    """Point the abort words of pages that have none to the record of `rank`."""
    for page in pages:
        if not page.words.abort:
            page.words.abort = (1 + rank) | (by_watcher << 32)
