"""The host target: segments are memory files, arrays are NumPy's, a launch returns when it is over.

It also says what the members of a target are.
"""

import contextlib
import ctypes
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .. import kernel
from ..host_kernel import HostKernel
from ..host_pages import HostPage, SignalPage
from ..memory import Segment, available_memory
from ..tiles import Gpu
from ..transport import devices

_UNCHANGED = contextlib.nullcontext()
_u64 = ctypes.POINTER(ctypes.c_uint64)


class HostTarget:
    """Kernels on threads.

    Parameters
    ----------
    links : SocketLinks or LocalLinks
        What passes memory files between the ranks.
    """

    name = "host"
    device = "cpu"
    gpu: Gpu | None = None
    shared = False  # several ranks have one GPU
    capturing = captured = False  # a graph: now; ever
    reached_by_cards = True  # of the network: what kernels read and write

    def __init__(self, links: Any):
        self._links = links

    # --- memory -----------------------------------------------------------------------------------

    def create(self, nbytes: int) -> Segment:
        """Return a new segment of this rank, zeroed; OutOfMemoryError if there is no room."""
        return Segment.create(nbytes)

    def available(self) -> int:
        """Return the bytes that all ranks of the node together can still allocate."""
        return available_memory()

    def room(self) -> int:
        """Return the bytes that are free for this rank's arrays."""
        return available_memory()

    def ticket(self, segment: Segment) -> Any:
        """Return what the peers need to open a segment, to be pickled."""
        return None

    def open(self, segment: Segment, tickets: list[Any], check: Callable[[int], None]) -> list[Any]:
        """Return every rank's segment, mapped here. Collective.

        `check` is called with the peer that is waited for, and raises to end the wait.
        """
        return self._links.exchange(segment, check)

    def unmap(self, segments: Sequence[Segment]) -> None:
        """Let go of the peers' segments of a number; nothing that uses them may be running."""

    def discard(self, segment: Segment) -> None:
        """Give back a segment that no peer has mapped, or has any more."""
        segment.close_fd()

    def constant(self, data: Any) -> "Constant":
        """Return a ctypes structure or NumPy array where kernels can read it."""
        return Constant(data)

    def map_pages(self, pages: Sequence[HostPage], nbytes: int) -> list[int]:
        """Return where kernels find pages of host memory, each of so many bytes."""
        return [page.address for page in pages]

    def pin(self, array: np.ndarray) -> None:
        """Let kernels use host memory, whole pages of it, at its address here."""

    def write_words(self, addresses: Sequence[int], values: Sequence[int]) -> None:
        """Write words of kernels' memory, here or at a peer."""
        for address, value in zip(addresses, values, strict=True):
            ctypes.cast(address, _u64)[0] = value

    def upload(self, address: int, data: np.ndarray) -> None:
        """Copy an array to kernels' memory."""
        ctypes.memmove(address, data.ctypes.data, data.nbytes)

    def word(self, address: int) -> int:
        """Return a word of kernels' memory, when what was launched is over."""
        return int(ctypes.cast(address, _u64)[0])

    def clocks(self) -> tuple[int, int, int]:
        """Return what the kernels' clock and the host's monotonic one show now, in nanoseconds.

        And by how much the second may be wrong.
        """
        now = time.monotonic_ns()
        return now, now, 0

    def place(self) -> devices.Place:
        """Return where the network cards of this rank should be near."""
        return devices.of_process()

    # --- arrays -----------------------------------------------------------------------------------

    def array(self, name: str, value: Any) -> np.ndarray:
        """Return an operand or output as this target's array, without a copy; else TypeError."""
        if not isinstance(value, np.ndarray):
            raise TypeError(
                f"{name} is a {type(value).__name__}: use a numpy.ndarray (numpy.asarray makes one)"
            )
        if isinstance(value, np.ma.MaskedArray):
            raise TypeError(f"{name} is a masked array: its mask would be lost; use filled(...)")
        return value

    def asarray(self, value: Any, dtype: Any) -> np.ndarray:
        """Return anything that NumPy makes an array of as this target's array."""
        return np.asarray(value, dtype)

    def asnumpy(self, array: np.ndarray) -> np.ndarray:
        """Return an array's data in host memory, when what was launched before is over."""
        return array

    def shadow(self, array: np.ndarray) -> np.ndarray:
        """Return a NumPy array of the same address, shape and strides; its data are not read."""
        return array

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Return a new array of this process."""
        return np.empty(shape, dtype)

    def copy(self, to: np.ndarray, source: np.ndarray) -> None:
        """Copy elements, in the order of the calls."""
        to[...] = source

    def fill(self, array: np.ndarray, value: float) -> None:
        """Set all elements to a value, in the order of the calls."""
        array[...] = value

    def zero(self, array: np.ndarray) -> None:
        """Set an array without gaps to zero, in the order of the calls."""
        array[...] = np.zeros((), array.dtype)

    # --- launches ---------------------------------------------------------------------------------

    def on(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        """Make a stream that a caller has passed the current one; None leaves it as it is."""
        if stream is not None:
            raise TypeError(
                f"stream is a {type(stream).__name__}: the host target has no streams, leave it out"
            )
        return _UNCHANGED

    def signals(self, page: SignalPage) -> "Signals":
        """Return this rank's account of its generations."""
        return Signals(page)

    def kernel(self, source: kernel.Kernel) -> HostKernel:
        """Return a kernel of a source file, compiled and loaded."""
        return HostKernel(source.source, source.name, dict(source.defines), source.options)

    def key(self, *arrays: Any) -> Any:
        """Return what stands for operands in a repeated call; None to look at them each time."""
        return None

    def begin(self) -> None:
        """Order what follows on the current stream behind the last launch."""

    def launch(self, kernel: HostKernel, request: Any) -> None:
        """Run a kernel; OSError if nothing could be started."""
        status = kernel.run(request)
        if status:
            raise OSError(status, os.strerror(status))

    def write_in_order(self, address: int, value: int) -> None:
        """Set a word that kernels see, behind the last launch and before the next."""
        ctypes.cast(address, _u64)[0] = value

    def hold(self, *objects: Any) -> None:
        """Keep what a launch uses for as long as a graph may launch it again."""

    def refuse_capture(self, what: str) -> None:
        """Raise if what follows would become part of a graph, which cannot hold it."""

    def wait(self, tell: Callable[[float], None] | None = None) -> None:
        """Return when all that was launched is over; if that takes long, tell so once."""

    def close(self) -> None:
        """Let go of what the target holds, when all that was launched is over."""


class Constant:
    """Data that kernels read.

    Attributes
    ----------
    address : int
        Where they do.
    """

    def __init__(self, data: Any):
        self._data = data
        self.address = address_of(data)


class Signals:
    """Which generations are over, by the word that the kernels count in.

    Parameters
    ----------
    page : SignalPage
    """

    def __init__(self, page: SignalPage):
        self._page = page
        self._generation = ctypes.c_uint64.from_address(page.generation_word)

    @property
    def generation(self) -> int:
        """Of the last call or agreement that ended well."""
        return self._generation.value

    def refresh(self) -> None:
        """Find out how often graphs have launched kernels, which the host does not see."""

    def advance(self) -> None:
        """Count a generation that no kernel ran for."""
        ctypes.memset(self._page.counters, 0, self._page.counters_nbytes)
        self._generation.value += 1

    def launched(self, generation: int) -> bool:
        """Return whether a launch that was to make this generation has not failed so far."""
        return self.generation == generation


def address_of(data: Any) -> int:
    """Return the address of a ctypes structure or a NumPy array."""
    return data.ctypes.data if isinstance(data, np.ndarray) else ctypes.addressof(data)
