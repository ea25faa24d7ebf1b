"""Memory that peers of a node can reach: segments, the heap of user arrays, the arena of plans.

On the host target a segment is an anonymous file in memory (memfd) that every peer maps. It has no
name, so a killed process leaves nothing behind. `targets.cuda` has a segment of a GPU's memory.
"""

import bisect
import collections
import contextlib
import ctypes
import math
import mmap
import os
import re
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from . import errors

ALIGNMENT = 256
_PAGE = mmap.PAGESIZE


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def offsets_of(sizes: dict[str, int], alignment: int = 256) -> dict[str, int]:
    """Return where things of these sizes lie one behind the other, and their ``end``."""
    offsets, end = {}, 0
    for name, size in sizes.items():
        offsets[name] = end
        end += round_up(size, alignment)
    return {**offsets, "end": end}


def extent(a: np.ndarray) -> tuple[int, int]:
    """Return the lowest address of an array and the bytes up to its highest."""
    low, high = np.lib.array_utils.byte_bounds(a)
    return low, high - low


def available_memory() -> int:
    """Return the bytes that this process could still use, by the machine and by its cgroup."""
    limits = [2**63]
    with contextlib.suppress(OSError, AttributeError):
        found = re.search(r"MemAvailable:\s*(\d+) kB", Path("/proc/meminfo").read_text())
        limits.append(int(found.group(1)) * 1024)
    with contextlib.suppress(OSError, ValueError):
        group = Path("/proc/self/cgroup").read_text().rpartition("0::/")[2].strip()
        folder = Path("/sys/fs/cgroup", group)
        used = int((folder / "memory.current").read_text())
        # Cached files count as used, and are given up when memory is needed.
        found = re.search(r"inactive_file (\d+)", (folder / "memory.stat").read_text())
        cached = int(found.group(1)) if found else 0
        limits.append(int((folder / "memory.max").read_text()) - used + cached)
    return max(0, min(limits))


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class _Mapping:
    """A shared mapping of a file; Python's own would keep a descriptor for each."""

    def __init__(self, fd: int, nbytes: int):
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        address = _libc.mmap(None, nbytes, protection, mmap.MAP_SHARED, fd, 0)
        if address == ctypes.c_void_p(-1).value:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        weakref.finalize(self, _libc.munmap, address, nbytes).atexit = False
        self.__array_interface__ = _bytes_at(address, nbytes)


def _bytes_at(address: int, nbytes: int) -> dict[str, Any]:
    return {"version": 3, "data": (address, False), "shape": (nbytes,), "typestr": "|u1"}


class Segment:
    """Bytes of one rank, mapped into this process.

    Parameters
    ----------
    fd : int
        The memory file; the segment owns it.
    nbytes : int
        Its size.
    """

    def __init__(self, fd: int, nbytes: int):
        self.nbytes = nbytes
        self._fd: int | None = fd
        try:
            mapping = _Mapping(fd, nbytes)
        except OSError as error:
            self.close_fd()
            raise errors.OutOfMemoryError(
                f"cannot map {nbytes} bytes of shared memory: {error.strerror}"
            ) from None
        self.bytes = np.asarray(mapping)
        self.address = self.bytes.ctypes.data

    @classmethod
    def create(cls, nbytes: int) -> "Segment":
        """Allocate a segment of at least `nbytes`, zeroed; OutOfMemoryError if that fails."""
        nbytes = round_up(max(nbytes, 1), _PAGE)
        # Pages come with their first use, and without memory the kernel would kill us then.
        available = available_memory()
        if nbytes > available:
            raise errors.OutOfMemoryError(
                f"cannot allocate {nbytes} bytes of shared memory: {available} bytes are available"
            )
        try:
            fd = os.memfd_create("mkernel_cp", os.MFD_CLOEXEC)
        except OSError as error:
            raise errors.OutOfMemoryError(f"memfd_create: {error.strerror}") from None
        try:
            os.ftruncate(fd, nbytes)
        except OSError as error:
            os.close(fd)
            raise errors.OutOfMemoryError(
                f"cannot allocate {nbytes} bytes of shared memory: {error.strerror}"
            ) from None
        return cls(fd, nbytes)

    def block(self, address: int, nbytes: int) -> tuple[Any, np.ndarray]:
        """Return an array of bytes in it, and what lives as long as any view of that."""
        owner = _Block(address, nbytes, self)
        return owner, np.asarray(owner)

    @property
    def fd(self) -> int:
        """The memory file, until `close_fd`."""
        return self._fd

    def close_fd(self) -> None:
        """Close the file: the mapping stays, until the last array over it is gone."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


class _Block:
    """What an array in a segment holds on to: when its last view goes, its bytes are free again."""

    def __init__(self, address: int, nbytes: int, segment: Segment):
        self._segment = segment
        self.__array_interface__ = _bytes_at(address, nbytes)


@dataclass(frozen=True)
class Location:
    """Where an address lies: in this rank's segment number `segment`, at `offset` bytes."""

    segment: int
    offset: int


class Heap:
    """The blocks of this rank's heap segments that user arrays do not occupy.

    Allocating and freeing are local; only adding a segment concerns the other ranks.
    """

    def __init__(self) -> None:
        self._free: list[tuple[int, int]] = []  # (address, bytes), by address
        self._segments: dict[int, Segment] = {}
        # A garbage collector may free in the middle of allocate(): it only leaves a note here.
        self._returned: collections.deque[tuple[int, int]] = collections.deque()

    def add(self, segment: Segment) -> None:
        """Make a whole segment available."""
        self._segments[segment.address] = segment
        self._insert(segment.address, segment.nbytes)

    def is_unused(self, segment: Segment) -> bool:
        """Return whether no array lies in a segment."""
        self._take_back()
        return (segment.address, segment.nbytes) in self._free

    def remove(self, segment: Segment) -> None:
        """Take an unused segment away."""
        self._free.remove((segment.address, segment.nbytes))
        del self._segments[segment.address]

    def fits(self, nbytes: int) -> bool:
        """Return whether `allocate` would succeed."""
        self._take_back()
        return any(size >= _padded(nbytes) for _, size in self._free)

    def allocate(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Return an uninitialised array; the room must be there (`fits`)."""
        nbytes = math.prod(shape) * dtype.itemsize
        need = _padded(nbytes)
        index = next(i for i, (_, size) in enumerate(self._free) if size >= need)
        address, size = self._free.pop(index)
        if size > need:
            self._free.insert(index, (address + need, size - need))
        start = max(s for s in self._segments if s <= address)
        owner, flat = self._segments[start].block(address, nbytes)
        weakref.finalize(owner, self._returned.append, (address, need)).atexit = False
        return flat.view(dtype).reshape(shape)

    def _take_back(self) -> None:
        while self._returned:
            self._insert(*self._returned.popleft())

    def _insert(self, address: int, nbytes: int) -> None:
        index = bisect.bisect(self._free, (address, 0))
        end = address + nbytes
        # Neighbours merge, except across segments that happen to be mapped side by side.
        if index < len(self._free) and self._free[index][0] == end and end not in self._segments:
            nbytes += self._free.pop(index)[1]
        if index and sum(self._free[index - 1]) == address and address not in self._segments:
            index -= 1
            address, before = self._free.pop(index)
            nbytes += before
        self._free.insert(index, (address, nbytes))


def _padded(nbytes: int) -> int:
    return round_up(max(nbytes, 1), ALIGNMENT)


class SegmentTable:
    """Every rank's segments, by number: what kernels turn a (segment, offset) of a peer into.

    Parameters
    ----------
    rank, size : int
        This rank, and how many there are.
    """

    def __init__(self, rank: int, size: int):
        self._rank, self._size = rank, size
        self._rows: list[list[Segment | None] | None] = []
        self.pointers = np.zeros((0, size), np.uint64)

    def add(self, segments: list[Segment | None]) -> int:
        """Add a segment of every rank, in rank order; return their number.

        None stands for that of a rank on another node, which is not mapped here.
        """
        if None in self._rows:
            number = self._rows.index(None)
            self._rows[number] = segments
        else:
            number = len(self._rows)
            self._rows.append(segments)
        self._update()
        return number

    def remove(self, number: int) -> list[Segment]:
        """Forget the segments of a number, which may be used again; return them."""
        row, self._rows[number] = self._rows[number], None
        self._update()
        return row

    def __getitem__(self, number: int) -> Segment:
        return self._rows[number][self._rank]

    def locate(self, address: int, nbytes: int) -> Location | None:
        """Return where `nbytes` from an address on lie, or None if in no segment of this rank."""
        for number, row in enumerate(self._rows):
            if row is None:
                continue
            offset = address - row[self._rank].address
            if 0 <= offset and offset + nbytes <= row[self._rank].nbytes:
                return Location(number, offset)
        return None

    def _update(self) -> None:
        self.pointers = np.array(
            [[s.address if s else 0 for s in row or [None] * self._size] for row in self._rows],
            np.uint64,
        ).reshape(-1, self._size)
