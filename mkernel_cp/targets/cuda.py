"""The cuda target: segments are the driver's allocations, arrays are CuPy's, launches do not wait.

CuPy and cuda-python are imported when a communicator chooses this target, not before.
"""

import contextlib
import copy
import ctypes
import glob
import importlib
import mmap
import time
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .. import compiler, errors, kernel
from ..host_pages import HostPage, SignalPage
from ..memory import round_up
from ..tiles import Gpu
from ..topology import Topology
from ..transport import devices
from .host import address_of

# The driver carves small allocations out of blocks of 2 MiB, and shares whole blocks.
_GRAIN = 1 << 21
_OLDEST = (8, 0)
_PER_THREAD = 2  # the address of the default stream of each thread
_MOST_MAPS = 1024  # that are kept
_CLOCK_TRIPS = 8  # at least
_LONG_TRIP_NS = 20_000
_CLOCK_SECONDS = 0.1  # for which a shorter trip is looked for
_TELL_SECONDS = 30.0  # after which a wait says whom it is for
_UNCHANGED = contextlib.nullcontext()
_ORDERINGS = {0: "nobody: a read is needed", 100: "this GPU", 200: "all GPUs"}


def has_gpu() -> bool:
    """Return whether this host has an NVIDIA device node, whatever may be installed."""
    return bool(glob.glob("/dev/nvidia[0-9]*"))


@dataclass(frozen=True)
class _Survey:
    """A rank's GPU, and what it says of those that it can see.

    Attributes
    ----------
    index : int
        As this process counts.
    uuid : str
    name : str
    gpu : Gpu
    reaches : dict of str to bool
        Per uuid of another visible GPU, whether its memory can be reached.
    """

    index: int
    uuid: str
    name: str
    gpu: Gpu
    reaches: dict[str, bool]


class CudaTarget:
    """Kernels on one GPU per rank. Making one is collective.

    Parameters
    ----------
    mpi : mpi4py.MPI.Comm
        The ranks.
    topology : Topology
    device : int or None
        This rank's GPU as CUDA counts; None: by rank. It becomes the current device.
    oversubscribe : bool
        Whether several ranks may have the same one.
    """

    name = "cuda"
    reached_by_cards = False

    def __init__(self, mpi: Any, topology: Topology, device: int | None, oversubscribe: bool):
        self._rank, self._peers = topology.rank, topology.peers
        answer: _Survey | Exception
        try:
            self._cupy, self._driver = _libraries()
            answer = _survey(self._cupy.cuda.runtime, device, self._rank)
        except (errors.ConfigurationError, ValueError, TypeError) as error:
            answer = error
        surveys = mpi.allgather(answer)
        for rank, survey in enumerate(surveys):
            if isinstance(survey, Exception):
                raise type(survey)(f"rank {rank}: {survey}")
        _refuse_shared_gpus(surveys, oversubscribe)
        _refuse_missing_links(surveys, topology)
        own = surveys[self._rank]
        self._index, self.gpu = own.index, own.gpu
        self.device = f"cuda:{own.index} ({own.name})"
        self._runtime = self._cupy.cuda.runtime
        self._driver_error = self._cupy.cuda.driver.CUDADriverError
        self._array = self._cupy.ndarray
        self._cupy.cuda.Device(self._index).use()
        self._side = self._cupy.cuda.Stream(non_blocking=True)
        self._chain = _chains.setdefault(self._index, _Chain(self._cupy))
        self.shared = len({survey.uuid for survey in surveys}) < len(surveys)
        self.capturing = self.captured = False  # now; ever
        self._stream: Any = None  # of the call that is made
        self._held: list[Any] = []
        self._maps: dict[Any, tuple[int, ...]] = {}
        self._opened: list[Segment] = []
        self._registered: list[int] = []
        self._pages: Sequence[HostPage] = ()

    # --- memory -----------------------------------------------------------------------------------

    def create(self, nbytes: int) -> "Segment":
        """Return a new segment of this rank, zeroed; OutOfMemoryError if there is no room."""
        nbytes = round_up(max(nbytes, 1), _GRAIN)
        self._sweep()
        try:
            try:
                address = self._runtime.malloc(nbytes)
            except self._runtime.CUDARuntimeError:
                # CuPy keeps what its arrays have freed.
                self._cupy.get_default_memory_pool().free_all_blocks()
                address = self._runtime.malloc(nbytes)
        except self._runtime.CUDARuntimeError:
            free, total = self._runtime.memGetInfo()
            raise errors.OutOfMemoryError(
                f"cannot allocate {nbytes} bytes on {self.device}: {free} of {total} are free"
            ) from None
        self._runtime.memsetAsync(address, 0, nbytes, self._side.ptr)
        self._side.synchronize()
        segment = Segment(self._cupy, self._index, address, nbytes)
        segment.bury = weakref.finalize(segment, _graveyard.append, _Grave(self, address))
        segment.bury.atexit = False
        return segment

    def available(self) -> int:
        """Return no limit: each rank draws on its own GPU, whose driver says when it is full."""
        return 1 << 62

    def room(self) -> int:
        """Return the bytes that are free for this rank's arrays."""
        return self._runtime.memGetInfo()[0] + self._cupy.get_default_memory_pool().free_bytes()

    def ticket(self, segment: "Segment") -> tuple[bytes, int]:
        """Return what the peers need to open a segment, to be pickled."""
        return self._runtime.ipcGetMemHandle(segment.address), segment.nbytes

    def open(
        self, segment: "Segment", tickets: list[Any], check: Callable[[int], None]
    ) -> list["Segment"]:
        """Return every node peer's segment, mapped here."""
        segments = []
        for rank in self._peers:
            handle, nbytes = tickets[rank]
            if rank == self._rank:
                segments.append(segment)
                continue
            lazy_peer_access = 1
            try:
                address = self._runtime.ipcOpenMemHandle(handle, lazy_peer_access)
            except self._runtime.CUDARuntimeError as error:
                raise errors.ConfigurationError(
                    f"cannot map GPU memory of rank {rank} ({error}): all ranks must see all GPUs "
                    "(CUDA_VISIBLE_DEVICES), and containers must share the host's IPC namespace"
                ) from None
            segments.append(Segment(self._cupy, self._index, address, nbytes))
            self._opened.append(segments[-1])
        return segments

    def unmap(self, segments: Sequence["Segment"]) -> None:
        """Let go of the peers' segments of a number; nothing that uses them may be running."""
        for segment in segments:
            if segment in self._opened:
                self._opened.remove(segment)
                with contextlib.suppress(self._runtime.CUDARuntimeError):  # of a broken GPU
                    self._runtime.ipcCloseMemHandle(segment.address)

    def discard(self, segment: "Segment") -> None:
        """Give back a segment that no peer has mapped, or has any more."""
        if segment.bury.detach():
            self._runtime.free(segment.address)

    def constant(self, data: Any) -> "Constant":
        """Return a ctypes structure or NumPy array where kernels can read it."""
        return Constant(self, data)

    def map_pages(self, pages: Sequence[HostPage], nbytes: int) -> list[int]:
        """Return where kernels find pages of host memory."""
        self._pages = pages
        return [self._map(page.address, nbytes) for page in pages]

    def _map(self, address: int, nbytes: int) -> int:
        """Return where kernels find host memory, which must be whole pages."""
        driver, portable_and_mapped = self._driver, 3
        _check(driver, driver.cuMemHostRegister(address, nbytes, portable_and_mapped))
        self._registered.append(address)
        return int(*_check(driver, driver.cuMemHostGetDevicePointer(address, 0)))

    def pin(self, array: np.ndarray) -> None:
        """Let kernels use host memory, whole pages of it, at its address here."""
        here = array.ctypes.data
        there = self._map(here, round_up(array.nbytes, mmap.PAGESIZE))
        if there != here:
            raise errors.ConfigurationError(
                f"{self.device} has another address for memory of the host than this process, "
                "which the network between nodes cannot do with: use one node"
            )

    def write_words(self, addresses: Sequence[int], values: Sequence[int]) -> None:
        """Write words of kernels' memory, here or at a peer."""
        for address, value in zip(addresses, values, strict=True):
            self.upload(address, ctypes.c_uint64(value))

    def word(self, address: int) -> int:
        """Return a word of kernels' memory, when what was launched is over."""
        self.wait()
        value = ctypes.c_uint64()
        to_host = 2
        self._runtime.memcpyAsync(ctypes.addressof(value), address, 8, to_host, self._side.ptr)
        self._side.synchronize()
        return value.value

    def clocks(self) -> tuple[int, int, int]:
        """Return what the kernels' clock and the host's monotonic one show now, in nanoseconds.

        And by how much the second may be wrong.
        """
        self.wait()
        clock = self.kernel(kernel.Kernel(str(compiler.kernel_source("read_clock")), "read_clock"))
        now = self.constant(np.zeros(1, np.uint64))
        request = clock.request(ctypes.c_uint64(now.address), 1, 1, 0, 0)
        answers: list[tuple[int, int, int]] = []
        patience = time.monotonic() + _CLOCK_SECONDS
        # Where others use the GPU too, many a trip is long: it has to wait for its turn.
        while len(answers) < _CLOCK_TRIPS or (
            min(answers)[0] > _LONG_TRIP_NS and time.monotonic() < patience
        ):
            begun = time.monotonic_ns()
            clock.start(request, self._side)
            self._side.synchronize()
            ended = time.monotonic_ns()
            answers.append((ended - begun, self.word(now.address), (begun + ended) // 2))
        trip, kernels, host = min(answers)  # the shortest
        return kernels, host, trip // 2

    def place(self) -> devices.Place:
        """Return where the network cards of this rank should be near."""
        return devices.of_pci(self._runtime.deviceGetPCIBusId(self._index))

    def upload(self, address: int, data: Any) -> None:
        """Copy a ctypes object or NumPy array to kernels' memory; return when it is there."""
        size = data.nbytes if isinstance(data, np.ndarray) else ctypes.sizeof(data)
        to_device = 1
        if size:
            self._runtime.memcpyAsync(address, address_of(data), size, to_device, self._side.ptr)
            self._side.synchronize()

    # --- arrays -----------------------------------------------------------------------------------

    def array(self, name: str, value: Any) -> Any:
        """Return an operand or output as this target's array, without a copy; else TypeError."""
        cupy = self._cupy
        if not isinstance(value, cupy.ndarray):
            value = self._borrow(name, value)
        if value.device.id != self._index and value.size:
            raise TypeError(
                f"{name} is on cuda:{value.device.id}, the communicator on cuda:{self._index}: "
                "copy it there"
            )
        return value

    def _borrow(self, name: str, value: Any) -> Any:
        cupy = self._cupy
        if hasattr(value, "__cuda_array_interface__"):
            return cupy.asarray(value)
        on_gpu = False
        if hasattr(value, "__dlpack_device__") and not isinstance(value, np.ndarray):
            cuda, managed = 2, 13
            on_gpu = value.__dlpack_device__()[0] in (cuda, managed)
        if on_gpu:
            return cupy.from_dlpack(value)
        raise TypeError(
            f"{name} is a {type(value).__module__}.{type(value).__name__} in host memory: use a "
            "cupy.ndarray (cupy.asarray makes one), or another array of the GPU"
        )

    def asarray(self, value: Any, dtype: Any) -> Any:
        """Return anything that CuPy makes an array of as this target's array."""
        return self._cupy.asarray(value, dtype)

    def asnumpy(self, array: Any) -> np.ndarray:
        """Return an array's data in host memory, when what was launched before is over."""
        return self._cupy.asnumpy(array)

    def shadow(self, array: Any) -> np.ndarray:
        """Return a NumPy array of the same address, shape and strides; its data are not read."""
        if array.size == 0:
            return np.empty(array.shape, array.dtype)
        return np.asarray(_Shadow(array)).view(array.dtype)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        """Return a new array of this process."""
        self._check_current_device()
        return self._cupy.empty(shape, dtype)

    def copy(self, to: Any, source: Any) -> None:
        """Copy elements, in the order of the calls."""
        # Not every version of CuPy copies every dtype, but all copy bits.
        bits = f"u{to.dtype.itemsize}"
        to.view(bits)[...] = source.view(bits)

    def fill(self, array: Any, value: float) -> None:
        """Set all elements to a value, in the order of the calls."""
        bits = f"u{array.dtype.itemsize}"
        array.view(bits)[...] = np.array(value, array.dtype).view(bits).item()

    def zero(self, array: Any) -> None:
        """Set an array without gaps to zero, in the order of the calls."""
        stream = self._cupy.cuda.get_current_stream()
        self._runtime.memsetAsync(array.data.ptr, 0, array.nbytes, stream.ptr)

    # --- launches ---------------------------------------------------------------------------------

    def on(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        """Make a stream that a caller has passed the current one; None leaves it as it is."""
        if stream is None:
            return _UNCHANGED
        if isinstance(stream, self._cupy.cuda.Stream | self._cupy.cuda.ExternalStream):
            return stream
        if hasattr(stream, "__cuda_stream__"):
            _, stream = stream.__cuda_stream__()
        if isinstance(stream, bool) or not isinstance(stream, int | np.integer):
            raise TypeError(
                f"stream is a {type(stream).__name__}: use None for the current one, a stream of "
                "CuPy, its address as an integer, or an object with __cuda_stream__"
            )
        return self._cupy.cuda.ExternalStream(int(stream), self._index)

    def signals(self, page: SignalPage) -> "Signals":
        """Return this rank's account of its generations."""
        return Signals(self, page)

    def kernel(self, source: kernel.Kernel) -> "Kernel":
        """Return a kernel of a source file, compiled and loaded."""
        arch, defines = source.arch or self.gpu.arch, dict(source.defines)
        path = compiler.cubin(source.source, arch, defines=defines, options=source.options)
        try:
            return Kernel(self._cupy, self._driver, self.gpu, path, source.name)
        except self._driver_error as error:
            raise errors.CompileError(
                f"{source.source} has no kernel {source.name} for {self.device} when compiled for "
                f"{arch} ({error}): define it with MK_KERNEL({source.name}, ...)"
            ) from None

    def tensor_map(
        self,
        address: int,
        dtype: np.dtype,
        extents: tuple[int, ...],
        pitches: tuple[int, ...],
        box: tuple[int, ...],
        *,
        tf32: bool = False,
    ) -> tuple[int, ...]:
        """Return the words of a tensor map of lines, whose boxes are swizzled by 128 bytes.

        Parameters
        ----------
        address : int
        dtype : numpy.dtype
        extents, box : tuple of int
            Elements of a line, and lines, in one dimension or more.
        pitches : tuple of int
            Bytes from one line to the next in each of these.
        tf32 : bool, optional
            Round float32 to tf32 on the way.
        """
        key = address, dtype, extents, pitches, box, tf32
        if key not in self._maps:
            if len(self._maps) == _MOST_MAPS:
                self._maps.clear()
            driver, kinds = self._driver, self._driver.CUtensorMapDataType
            kind = "TFLOAT32" if tf32 else dtype.name.upper()
            (encoded,) = _check(
                driver,
                driver.cuTensorMapEncodeTiled(
                    getattr(kinds, f"CU_TENSOR_MAP_DATA_TYPE_{kind}"),
                    len(extents),
                    address,
                    [driver.cuuint64_t(extent) for extent in extents],
                    [driver.cuuint64_t(pitch) for pitch in pitches],
                    [driver.cuuint32_t(extent) for extent in box],
                    [driver.cuuint32_t(1)] * len(box),
                    driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
                    driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
                    driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                    driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
                ),
            )
            self._maps[key] = tuple(map(int, encoded.opaque))
        return self._maps[key]

    def key(self, *arrays: Any) -> Any:
        """Return what stands for operands in a repeated call; None to look at them each time."""
        key = []
        for array in arrays:
            if type(array) is not self._array:
                return None
            key.append((array.data.ptr, array.shape, array.strides, array.dtype))
        return tuple(key)

    def begin(self) -> None:
        """Order what follows on the current stream behind the last launch."""
        stream = self._stream = self._current_stream()
        self.capturing = stream.is_capturing()
        # A capture cannot wait for an event from outside it: graphs are the caller's to order.
        if self.capturing:
            self.captured = True
        else:
            self._chain.follow(stream)

    def launch(self, kernel: "Kernel", request: "Request") -> None:
        """Start a kernel on the stream of begin(); Error if it could not be started."""
        kernel.start(request, self._stream)
        if not self.capturing:
            self._chain.extend(self._stream)

    def hold(self, *objects: Any) -> None:
        """Keep what a launch uses for as long as a graph may launch it again."""
        if self.capturing:
            self._held.append(objects)

    def refuse_capture(self, what: str) -> None:
        """Raise if the current stream captures a graph, which cannot hold what is to come."""
        if self._current_stream().is_capturing():
            raise errors.ConfigurationError(
                f"{what} while the current stream captures a CUDA graph: warm up first, with the "
                "same call outside the capture"
            )

    def write_in_order(self, address: int, value: int) -> None:
        """Set a word that kernels see, behind the last launch and before the next."""
        with self._in_order() as stream:
            _check(self._driver, self._driver.cuStreamWriteValue64(stream, address, value, 0))

    def clear_in_order(self, address: int, nbytes: int) -> None:
        """Set kernels' memory to zero, behind the last launch and before the next."""
        with self._in_order() as stream:
            self._runtime.memsetAsync(address, 0, nbytes, stream)

    @contextlib.contextmanager
    def _in_order(self) -> Iterator[int]:
        """Give a stream, on which what is queued has its place among the launches."""
        self._chain.follow(self._side)
        yield self._side.ptr
        self._chain.extend(self._side)

    def wait(self, tell: Callable[[float], None] | None = None) -> None:
        """Return when all that was launched is over; if that takes long, tell so once.

        What graphs have launched counts only as far as they are on the current stream.
        """
        if self.captured:
            stream = self._cupy.cuda.get_current_stream()
            if not stream.is_capturing():
                self._chain.follow(stream)
                self._chain.extend(stream)
        self._chain.wait(tell)

    def close(self) -> None:
        """Let go of what the target holds, when all that was launched is over."""
        self._held.clear()
        self.unmap(list(self._opened))
        for address in self._registered:
            self._driver.cuMemHostUnregister(address)
        self._registered.clear()
        if self._pages:
            self._pages[self._rank].words.unmapped = 1
        self._sweep()

    def unmapped_by_all(self) -> bool:
        """Return whether no rank uses memory of its peers any more."""
        return all(page.words.unmapped for page in self._pages)

    def free(self, address: int) -> None:
        """Free an allocation."""
        self._runtime.free(address)

    def _sweep(self) -> None:
        """Free buried segments that no peer has mapped; it would wait for a running kernel."""
        try:
            if not self._chain.over():
                return
        except errors.Error:
            return
        for grave in list(_graveyard):
            if grave.target.unmapped_by_all():
                _graveyard.remove(grave)
                grave.target.free(grave.address)

    def _current_stream(self) -> Any:
        self._check_current_device()
        return self._cupy.cuda.get_current_stream()

    def _check_current_device(self) -> None:
        if self._runtime.getDevice() != self._index:
            raise ValueError(
                f"the current device is cuda:{self._runtime.getDevice()}, the communicator's "
                f"cuda:{self._index}: call cupy.cuda.Device({self._index}).use()"
            )


class Segment:
    """Bytes of one rank's GPU, mapped into this process.

    Attributes
    ----------
    address, nbytes : int
    """

    def __init__(self, cupy: Any, index: int, address: int, nbytes: int):
        self._cupy, self._index = cupy, index
        self.address, self.nbytes = address, nbytes

    @property
    def bytes(self) -> Any:
        """All of it, as an array."""
        return self._view(self.address, self.nbytes, self)

    def block(self, address: int, nbytes: int) -> tuple[Any, Any]:
        """Return an array of bytes in it, and what lives as long as any view of that."""
        owner = _Owner(self)
        return owner, self._view(address, nbytes, owner)

    def _view(self, address: int, nbytes: int, owner: Any) -> Any:
        memory = self._cupy.cuda.UnownedMemory(address, nbytes, owner, self._index)
        pointer = self._cupy.cuda.MemoryPointer(memory, 0)
        return self._cupy.ndarray((nbytes,), np.uint8, pointer)


class _Owner:
    """What an array in a segment holds on to."""

    def __init__(self, segment: Segment):
        self._segment = segment


@dataclass(frozen=True, eq=False)
class _Grave:
    """An allocation that this process uses no more, but perhaps its peers."""

    target: CudaTarget
    address: int


class _Shadow:
    """The place of a CuPy array, for NumPy."""

    def __init__(self, array: Any):
        self.__array_interface__ = {
            "version": 3,
            "data": (array.data.ptr, False),
            "shape": array.shape,
            "strides": array.strides,
            "typestr": f"|V{array.dtype.itemsize}",
        }


class Constant:
    """Data that kernels read, copied to the GPU.

    Attributes
    ----------
    address : int
    """

    def __init__(self, target: CudaTarget, data: Any):
        size = data.nbytes if isinstance(data, np.ndarray) else ctypes.sizeof(data)
        self._memory = target.empty((max(size, 1),), np.dtype(np.uint8))
        self.address = self._memory.data.ptr
        # The pool may have handed out what a kernel on the current stream still uses.
        target._cupy.cuda.get_current_stream().synchronize()
        target.upload(self.address, data)


class Signals:
    """Which generations are over once what this rank has started is; the host counts along.

    Parameters
    ----------
    target : CudaTarget
    page : SignalPage
    """

    def __init__(self, target: CudaTarget, page: SignalPage):
        self._target, self._page = target, page
        self.generation = 0

    def refresh(self) -> None:
        """Find out how often graphs have launched kernels, which the host does not see."""
        if self._target.captured:
            self.generation = self._target.word(self._page.generation_word)

    def advance(self) -> None:
        """Count a generation that no kernel ran for, in the order of the launches."""
        self.generation += 1
        page = self._page
        self._target.clear_in_order(page.counters, page.counters_nbytes)
        self._target.write_in_order(page.generation_word, self.generation)

    def launched(self, generation: int) -> bool:
        """Return whether a launch that was to make this generation has not failed so far."""
        if not self._target.capturing:
            self.generation = generation
        return True


class Request:
    """One launch.

    Attributes
    ----------
    agents, shared_bytes : int
    arguments : int
        Address of the array of pointers to the parameters.
    """

    def __init__(self, params: ctypes.Structure, agents: int, shared_bytes: int):
        self.agents, self.shared_bytes = agents, shared_bytes
        self._params = copy.copy(params)  # of its own, as a request may be kept
        self._pointers = (ctypes.c_void_p * 1)(ctypes.addressof(self._params))
        self.arguments = ctypes.addressof(self._pointers)


class Kernel:
    """A kernel, loaded.

    Attributes
    ----------
    params_bytes : int
        Size of the struct that it takes.
    parts : int
        Of an agent, that record in a trace by themselves: see ``Agent::part``.
    """

    def __init__(self, cupy: Any, driver: Any, gpu: Gpu, path: Any, name: str):
        self._driver, self._gpu, self._name = driver, gpu, name
        self._module = cupy.RawModule(path=str(path))
        self._function = driver.CUfunction(int(self._module.get_function(name).kernel.ptr))
        _, self.params_bytes = _check(driver, driver.cuFuncGetParamInfo(self._function, 0))
        # The kernel's launch bounds are the threads that it is written for.
        self._threads = self._attribute("MAX_THREADS_PER_BLOCK")
        self.parts = self._threads // 32
        self._cluster = max(1, self._attribute("REQUIRED_CLUSTER_WIDTH"))

    def _attribute(self, name: str) -> int:
        driver = self._driver
        attribute = getattr(driver.CUfunction_attribute, f"CU_FUNC_ATTRIBUTE_{name}")
        (value,) = _check(driver, driver.cuFuncGetAttribute(attribute, self._function))
        return value

    def capacity(self, shared_bytes: int, processors: int | None = None) -> int:
        """Return how many agents with so much shared memory the GPU runs at a time.

        Parameters
        ----------
        shared_bytes : int
        processors : int, optional
            Multiprocessors that may be used. Default: all.
        """
        whole = self._capacity(shared_bytes)
        if processors is None or processors >= self._gpu.processors:
            return whole
        share = whole * processors // self._gpu.processors
        return max(1, share // self._cluster) * self._cluster

    def _capacity(self, shared_bytes: int) -> int:
        driver, function = self._driver, self._function
        if shared_bytes > self._gpu.shared_bytes:
            return 0
        # CuPy gives all who load a file the same function: others may have allowed it more.
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        (allowed,) = _check(driver, driver.cuFuncGetAttribute(attribute, function))
        if shared_bytes > allowed:
            _check(driver, driver.cuFuncSetAttribute(function, attribute, shared_bytes))
        if self._cluster == 1:
            blocks = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(
                function, self._threads, shared_bytes
            )
            return _check(driver, blocks)[0] * self._gpu.processors
        shape = driver.CUlaunchConfig()
        shape.gridDimX, shape.gridDimY, shape.gridDimZ = self._cluster, 1, 1
        shape.blockDimX, shape.blockDimY, shape.blockDimZ = self._threads, 1, 1
        shape.sharedMemBytes = shared_bytes
        clusters = driver.cuOccupancyMaxActiveClusters(function, shape)
        return _check(driver, clusters)[0] * self._cluster

    def request(
        self, params: ctypes.Structure, agents: int, lanes: int, shared_bytes: int, seed: int
    ) -> Request:
        """Return what asks for a launch; lanes and seed are for the host target."""
        return Request(params, agents, shared_bytes)

    def start(self, request: Request, stream: Any) -> None:
        """Start it on a stream; Error if the driver refuses."""
        (status,) = self._driver.cuLaunchCooperativeKernel(
            *(self._function, request.agents, 1, 1, self._threads, 1, 1, request.shared_bytes),
            *(stream.ptr, request.arguments),
        )
        if status:
            raise errors.Error(f"{self._name} could not be launched: {status.name}")


class _Chain:
    """The order of all fused launches of this process on one GPU."""

    def __init__(self, cupy: Any):
        self._cupy = cupy
        self._last = cupy.cuda.Event(disable_timing=True)
        self._stream: Any = None  # of the last one

    def follow(self, stream: Any) -> None:
        # A stream has an order of its own, but an address alone does not say that it is the same:
        # one that others made may be gone, and the default one of each thread has one address.
        own = isinstance(stream, self._cupy.cuda.Stream) and stream.ptr != _PER_THREAD
        if self._stream is not None and not (own and stream == self._stream):
            stream.wait_event(self._last)

    def extend(self, stream: Any) -> None:
        self._last.record(stream)
        self._stream = stream

    def over(self) -> bool:
        try:
            return self._stream is None or self._last.done
        except self._cupy.cuda.runtime.CUDARuntimeError as error:
            raise errors.Error(f"the GPU has failed: {error}") from None

    def wait(self, tell: Callable[[float], None] | None) -> None:
        pause, start = 1e-6, time.monotonic()
        while not self.over():
            time.sleep(pause)
            pause = min(2 * pause, 1e-3)
            waited = time.monotonic() - start
            if tell is not None and waited > _TELL_SECONDS:
                tell(waited)
                tell = None


_chains: dict[int, _Chain] = {}
_graveyard: list[_Grave] = []


def _libraries() -> tuple[types.ModuleType, types.ModuleType]:
    """Import CuPy and cuda-python, and see that they reach a GPU; else ConfigurationError."""
    extra = f"install mkernel_cp with its extra cu{driver_series()}"
    try:
        cupy = importlib.import_module("cupy")
        driver = importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise errors.ConfigurationError(
            f"target 'cuda' needs CuPy and cuda-python ({error}): {extra}"
        ) from None
    if int(cupy.__version__.split(".")[0]) < 14:
        raise errors.ConfigurationError(f"CuPy is {cupy.__version__}, and 14 is needed: {extra}")
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise errors.ConfigurationError(
            f"the NVIDIA driver gives no GPU ({error}): see what nvidia-smi says; or use "
            "target='host' (MKERNEL_TARGET=host)"
        ) from None
    if count == 0:
        raise errors.ConfigurationError("no GPU is visible: see CUDA_VISIBLE_DEVICES")
    return cupy, driver


def describe() -> list[str]:
    """Return the names of the GPUs that this process sees; ConfigurationError if it cannot."""
    runtime = _libraries()[0].cuda.runtime
    return [
        runtime.getDeviceProperties(index)["name"].decode()
        for index in range(runtime.getDeviceCount())
    ]


class PciGpu(NamedTuple):
    """A GPU as network cards meet it.

    Attributes
    ----------
    index : int
        As CUDA counts.
    address : str
        On the PCI bus.
    ordering : str
        For whom what a network card has written becomes visible in order.
    """

    index: int
    address: str
    ordering: str


def on_pci() -> list[PciGpu]:
    """Return the GPUs that this process sees; ConfigurationError if it cannot."""
    cupy, driver = _libraries()
    runtime, gpus = cupy.cuda.runtime, []
    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING
    for index in range(runtime.getDeviceCount()):
        (ordering,) = _check(driver, driver.cuDeviceGetAttribute(attribute, index))
        gpus.append(PciGpu(index, runtime.deviceGetPCIBusId(index), _ORDERINGS[ordering]))
    return gpus


def with_memory(index: int, work: Callable[[int, int], Any]) -> Any:
    """Return ``work(address, nbytes)`` for some memory of a GPU, which becomes the current one."""
    runtime = _libraries()[0].cuda.runtime
    runtime.setDevice(index)
    try:
        address = runtime.malloc(_GRAIN)
    except runtime.CUDARuntimeError as error:
        raise errors.OutOfMemoryError(f"GPU {index} gives no memory: {error}") from None
    try:
        return work(address, _GRAIN)
    finally:
        runtime.free(address)


def export_dmabuf(address: int, nbytes: int) -> int:
    """Return a file that stands for memory of a GPU; Error if the driver gives none."""
    driver = _libraries()[1]
    kind = driver.CUmemRangeHandleType.CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
    return int(*_check(driver, driver.cuMemGetHandleForAddressRange(address, nbytes, kind, 0)))


def driver_series() -> int:
    """Return the CUDA series that the driver runs, 12 or 13; 13 if it does not say."""
    version = ctypes.c_int(13000)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    return 12 if version.value < 13000 else 13


def _survey(runtime: Any, device: int | None, rank: int) -> _Survey:
    count = runtime.getDeviceCount()
    if device is None:
        device = rank % count
    if isinstance(device, bool) or not isinstance(device, int | np.integer):
        raise TypeError(f"device={device!r}: use an integer, as CUDA counts, or None")
    if not 0 <= device < count:
        raise ValueError(f"device={device}: this process sees {count} GPU(s), from 0 on")
    facts = [runtime.getDeviceProperties(index) for index in range(count)]
    own = facts[device]
    capability = own["major"], own["minor"]
    name = own["name"].decode()
    if capability < _OLDEST:
        raise errors.ConfigurationError(
            f"{name} has compute capability {capability[0]}.{capability[1]}: GPUs from 8.0 on are "
            "supported"
        )
    arch = f"sm_{capability[0]}{capability[1]}" + ("a" if capability == (9, 0) else "")
    return _Survey(
        int(device),
        own["uuid"].hex(),
        name,
        Gpu(
            *(arch, own["multiProcessorCount"], own["sharedMemPerBlockOptin"]),
            compiler.nvrtc_version(),
        ),
        {
            other["uuid"].hex(): bool(runtime.deviceCanAccessPeer(device, index))
            for index, other in enumerate(facts)
            if index != device
        },
    )


def _refuse_shared_gpus(surveys: Sequence[_Survey], oversubscribe: bool) -> None:
    ranks: dict[str, list[int]] = {}
    for rank, survey in enumerate(surveys):
        ranks.setdefault(survey.uuid, []).append(rank)
    shared = [group for group in ranks.values() if len(group) > 1]
    if shared and not oversubscribe:
        raise errors.ConfigurationError(
            f"these ranks have the same GPU: {', '.join(map(str, shared))}; start as many ranks as "
            "there are GPUs, choose them with device=, or pass oversubscribe=True, which is slow "
            "and meant for tests"
        )


def _refuse_missing_links(surveys: Sequence[_Survey], topology: Topology) -> None:
    missing = [
        (a, b)
        for a, one in enumerate(surveys)
        for b, other in enumerate(surveys)
        if topology.node_of(a) == topology.node_of(b) and not one.reaches.get(other.uuid, True)
    ]
    if missing:
        raise errors.ConfigurationError(
            f"no peer-to-peer access between the GPUs of these ranks: {missing}; nvidia-smi topo "
            "-p2p r shows why. Use ranks whose GPUs reach each other"
        )


def _check(driver: types.ModuleType, result: tuple) -> tuple:
    """Return the values of a call to the driver."""
    status, *values = result
    if status != driver.CUresult.CUDA_SUCCESS:
        raise errors.Error(f"CUDA driver: {status.name}")
    return tuple(values)
