"""What the links between the ranks carry when all of them are in use."""

import ctypes
import importlib
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from .. import settings
from ..communicator import Communicator, runtime_of
from ..errors import Error
from ..memory import extent
from ..transport.check import exchange, plain_network
from .timing import Gate, interleaved_ms

_PIECE = {"cuda": 128 << 20, "host": 1 << 20}
_TIMES = 5

_COPY = r"""
typedef unsigned long long size;
extern "C" __global__ void copy(uint4* to, const uint4* from, size count) {
    size first = blockIdx.x * (size)blockDim.x + threadIdx.x, step = gridDim.x * (size)blockDim.x;
    for (size i = first; i < count; i += step) to[i] = from[i];
}
"""

Copy = Callable[[int, int, int], Any]
"""Copies between addresses: to, from, bytes."""


def link_rate(comm: Communicator, clock: Any, gate: Gate) -> float:
    """Return the bytes per second that reach every rank when all of a node send to all there.

    Collective; inf where a node has one rank. The best of pull and push, by the copy engines and by
    a kernel; the peers take turns, and no two ranks use the same one at a time.
    """
    begin, size = runtime_of(comm).topology.begin, comm.local_size
    least = min(runtime_of(comm).topology.sizes)
    if least == 1:
        return math.inf
    piece = _PIECE[comm.target]
    random = np.random.default_rng(comm.rank)
    source = comm.asarray(random.integers(0, 256, piece, np.uint8))
    landing = comm.empty(comm.size * piece, np.uint8)
    sources, landings = _addresses(comm, source), _addresses(comm, landing)

    def exchange(copy: Copy, push: bool) -> None:
        for step in range(1, size):
            peer = begin + (comm.local_rank + step) % size
            reader, writer = (peer, comm.rank) if push else (comm.rank, peer)
            copy(landings[reader] + writer * piece, sources[writer], piece)

    calls = {
        f"{name}, {'push' if push else 'pull'}": lambda number, c=copy, p=push: exchange(c, p)
        for name, copy in _copies(comm).items()
        for push in (False, True)
    }
    fastest = min(interleaved_ms(comm, clock, gate, calls).values())
    return (least - 1) * piece / (1e-3 * fastest)


def network_rate(comm: Communicator) -> float:
    """Return the bytes per second that leave every rank for other nodes when all send.

    Collective; inf for one node. The best of several plain writes to the gateways, in host memory.
    """
    if comm.num_nodes == 1:
        return math.inf
    runtime, nbytes = runtime_of(comm), _PIECE[comm.target]
    where, network = runtime.topology, runtime.network
    data = np.zeros((comm.size + 1, nbytes), np.uint8)  # of each rank, and what this one sends
    data[comm.size] = comm.rank + 1
    sends = dict.fromkeys(
        where.gateways, ((0, comm.size * nbytes), (0, comm.rank * nbytes), nbytes)
    )
    fabric = settings.fabric() or settings.SoftFabric() if network.software else None
    rates = []
    with plain_network(comm.mpi, where, data, network.transport, network.cards, fabric) as (
        nodes,
        pages,
    ):
        for generation in range(1, 1 + _TIMES):
            data[: comm.size] = 0
            _, seconds = exchange(
                *(nodes, where, generation, sends),
                *(comm.barrier, lambda: comm.closed or bool(pages[comm.rank].words.abort)),
            )
            wrong = [rank for rank in where.sources if (data[rank] != rank + 1).any()]
            found = runtime.agree("what came over the network", lambda s=seconds, w=wrong: (s, w))
            if any(wrong for _, wrong in found):
                raise Error(f"plain writes over the network did not come: {[w for _, w in found]}")
            rates.append(len(where.gateways) * nbytes / max(seconds for seconds, _ in found))
    return max(rates)


def _addresses(comm: Communicator, array: Any) -> list[int]:
    """Return where this rank finds an array from `Communicator.empty` of each rank."""
    place = runtime_of(comm).memory.segments.locate(*extent(runtime_of(comm).machine.shadow(array)))
    places = runtime_of(comm).agree("where the operands of the copies lie", lambda: place)
    pointers = runtime_of(comm).memory.segments.pointers
    return [int(pointers[at.segment, rank]) + at.offset for rank, at in enumerate(places)]


def _copies(comm: Communicator) -> dict[str, Copy]:
    """Return the ways to copy on this target."""
    if comm.target == "host":
        return {"memmove": ctypes.memmove}
    cupy = importlib.import_module("cupy")
    runtime, current_stream = cupy.cuda.runtime, cupy.cuda.get_current_stream
    kernel = cupy.RawKernel(_COPY, "copy")
    blocks = runtime_of(comm).machine.gpu.processors

    def by_engine(to: int, source: int, nbytes: int) -> None:
        between_any = 4
        runtime.memcpyAsync(to, source, nbytes, between_any, current_stream().ptr)

    def by_kernel(to: int, source: int, nbytes: int) -> None:
        kernel((2 * blocks,), (1024,), (np.uint64(to), np.uint64(source), np.uint64(nbytes // 16)))

    return {"copy engine": by_engine, "kernel": by_kernel}
