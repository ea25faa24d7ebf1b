"""The struct ``World``, by which kernels know a communicator."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from . import structs
from .host_pages import SignalPage
from .topology import Topology


class World:
    """The struct where kernels read it.

    Parameters
    ----------
    topology : Topology
    machine : HostTarget or CudaTarget
    pages : sequence of int
        Addresses of the host pages of all ranks.
    signal_pages : sequence of SignalPage or None
        Of all ranks; None on other nodes.
    network : int
        Address of what kernels know of the network; 0 without.
    entry_seconds, progress_seconds : float

    Attributes
    ----------
    address : int
    struct : ctypes.Structure
        This rank's copy; `update` makes its changes known. What kernels count is in memory only.
    """

    def __init__(
        self,
        topology: Topology,
        machine: Any,
        pages: Sequence[int],
        signal_pages: Sequence[SignalPage | None],
        network: int,
        entry_seconds: float,
        progress_seconds: float,
    ):
        rank, own = topology.rank, signal_pages[topology.rank]
        outbox = [page.inbox_address(rank) if page else 0 for page in signal_pages]
        self._machine = machine
        self._tables = {
            "outbox": machine.constant(np.array(outbox, np.uint64)),
            "pages": machine.constant(np.array(pages, np.uint64)),
            "segments": machine.constant(np.zeros((0, len(pages)), np.uint64)),
        }
        self.struct = structs.shared().World(
            rank=rank,
            size=len(pages),
            node_begin=topology.begin,
            node_size=topology.local_size,
            entry_timeout_ns=int(entry_seconds * 1e9),
            progress_timeout_ns=int(progress_seconds * 1e9),
            looked=own.looked_word,
            counters=own.counters,
            bytes_from_peers=own.bytes_word,
            inbox=own.inbox_address(0),
            network=network,
            **{name: table.address for name, table in self._tables.items()},
        )
        self.address = own.world_address
        self.update()

    def update(self) -> None:
        """Have later launches see what has changed in the struct; waits for those before."""
        first = type(self.struct).delay_seed.offset  # kernels write what is before it
        self._machine.wait()
        self._machine.upload(self.address + first, np.frombuffer(self.struct, np.uint8)[first:])

    def set_segments(self, pointers: np.ndarray) -> None:
        """Say where the segments of all ranks are now: addresses, of shape (segments, ranks)."""
        table = self._machine.constant(pointers)
        self.struct.segments = table.address
        self.update()
        self._tables["segments"] = table
