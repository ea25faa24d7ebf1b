"""Ranks that are threads of one process and share one GPU, whose kernels run side by side.

Processes on one GPU take turns, of milliseconds each; here a call takes what it takes, so that the
protocol and the movers can be measured where there is one GPU only. The ranks' memory is this
process's own: nothing is mapped.
"""

import dataclasses
import functools
import itertools
import threading
from unittest import mock

import numpy as np

import mkernel_cp as mk
from mkernel_cp import communicator, errors
from mkernel_cp.runtime import Runtime
from mkernel_cp.targets import cuda

_registering = threading.Lock()
_ROOM = 1 << 30
_ANY_KIND = 4  # of a copy: its ends tell


def _make_room(cupy):
    """Fill CuPy's pools for a rank: no driver allocates while a kernel waits."""
    cupy.empty(_ROOM, np.uint8)
    pinned = [cupy.cuda.alloc_pinned_memory(1 << bits) for bits in range(9, 25)]
    del pinned
    for size in (1, 2, 4, 8):  # kernels that fill arrays are loaded now
        array = cupy.empty((4, 4), f"u{size}")
        array[...], array[:, :2][...] = 1, 1


class _Share(cuda.CudaTarget):
    """An equal part of the GPU's multiprocessors."""

    def __init__(self, mpi, topology):
        super().__init__(mpi, topology, 0, oversubscribe=True)
        share = self.gpu.processors // mpi.Get_size()
        self.gpu = dataclasses.replace(self.gpu, processors=share)
        self._chain = cuda._Chain(self._cupy)  # launches of the ranks wait for each other

    def asnumpy(self, array):
        """Wait first: a copy that waits itself keeps the other ranks out of the driver."""
        self._cupy.cuda.get_current_stream().synchronize()
        return super().asnumpy(array)

    def copy(self, to, source):
        """Copy by the engine for that: a kernel would have to be loaded while other ranks' run."""
        if to.size == 0:
            return
        wide = [axis for axis in range(to.ndim) if to.shape[axis] > 1]  # others have any stride
        if any(source.strides[axis] <= 0 for axis in wide):
            return super().copy(to, source)
        by_stride = sorted(wide, key=lambda axis: -to.strides[axis])
        first = (*(slice(None) if axis in wide else 0 for axis in range(to.ndim)), ...)
        order = [wide.index(axis) for axis in by_stride]
        to, source = (
            array[first].transpose(order)[None, None, ..., None] for array in (to, source)
        )
        size, lines = to.dtype.itemsize, -2
        if to.strides[-2] == source.strides[-2] == size:  # the last axis is contiguous
            size, lines = to.shape[-2] * size, -3
        stream = self._cupy.cuda.get_current_stream()
        for index in np.ndindex(to.shape[:lines]):
            ends = (
                (array[index].data.ptr, max(size, array.strides[lines])) for array in (to, source)
            )
            where = itertools.chain.from_iterable(ends)
            self._runtime.memcpy2DAsync(*where, size, to.shape[lines], _ANY_KIND, stream.ptr)

    def ticket(self, segment):
        return segment.address, segment.nbytes

    def open(self, segment, tickets, check):
        return [
            segment if rank == self._rank else cuda.Segment(self._cupy, self._index, *tickets[rank])
            for rank in self._peers
        ]

    def map_pages(self, pages, nbytes):
        """Have each page registered once, by its rank."""
        with _registering:
            own = pages[self._rank]
            super().map_pages([own], nbytes)
        self._pages = pages
        return [page.address for page in pages]

    def discard(self, segment):
        """Free nothing: that would wait for the other ranks' kernels, and they for this rank."""
        segment.bury.detach()

    def _sweep(self):
        """Free nothing, here too."""


class _Kernel(cuda.Kernel):
    def _capacity(self, shared_bytes):
        whole = super()._capacity(shared_bytes)
        if self._cluster > 1:  # the driver counts those of the whole GPU
            whole = whole * self._gpu.processors // self._processors()
        return whole // self._cluster * self._cluster

    def _processors(self):
        attribute = self._driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
        return cuda._check(self._driver, self._driver.cuDeviceGetAttribute(attribute, 0))[0]

    def start(self, request, stream):
        """All ranks' agents fit at once; cooperative launches might take turns."""
        (status,) = self._driver.cuLaunchKernel(
            *(self._function, request.agents, 1, 1, self._threads, 1, 1, request.shared_bytes),
            *(stream.ptr, request.arguments, 0),
        )
        if status:
            raise errors.Error(f"{self._name} could not be launched: {status.name}")


class _Runtime(Runtime):
    def _choose_machine(self, device):
        self.target = "cuda"
        self._links.append(self.mpi.links())
        self.machine = _Share(self.mpi, self.topology)


def run(size, program, *args, **options):
    """Run ``program(comm, *args)`` on ranks that share the GPU, each on a stream of its own."""
    import cupy

    # Loading waits for running kernels: no rank loads what another has loaded, or is loading.
    load_once, loading = functools.cache(cupy.RawModule), threading.Lock()

    def load(**where):
        with loading:
            return load_once(**where)

    def main(mpi):
        with (
            cupy.cuda.Device(0),
            cupy.cuda.Stream(non_blocking=True),
        ):
            _make_room(cupy)
            with mk.Communicator(mpi, target="host", **options) as comm:
                return program(comm, *args)

    with (
        mock.patch.multiple(cuda, Kernel=_Kernel),
        mock.patch.object(cupy, "RawModule", load),
        mock.patch.object(communicator, "Runtime", _Runtime),
    ):
        return mk.LocalWorld(size).run(main)
