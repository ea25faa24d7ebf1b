"""The memory that ranks share: arrays of users and the arena of plans, in segments of each rank."""

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from . import errors
from .agreement import Agreements
from .arguments import integer
from .calls import Calls
from .memory import Heap, Segment, SegmentTable, extent, round_up
from .topology import Topology
from .world import World

_HEAP_GRAIN, _PAGE, _LINE = 1 << 21, 4096, 128


@dataclass(frozen=True)
class Arena:
    """The segment that serves all plans of a communicator: signals, words, and data behind.

    The words are data that are their own signals (low_latency.cuh): of no use to others, who would
    leave something there.

    Attributes
    ----------
    number : int
        Of the segment.
    signals, nbytes, words : int
        Signals at its start, bytes of data at its end, and words between.
    """

    number: int
    signals: int
    nbytes: int
    words: int

    @property
    def words_offset(self) -> int:
        """Where the words start, in bytes."""
        return round_up(8 * self.signals, _LINE)

    @property
    def data_offset(self) -> int:
        """Where the data start, in bytes."""
        return round_up(self.words_offset + 8 * self.words, _PAGE)

    @property
    def size(self) -> int:
        """Bytes of all."""
        return self.data_offset + self.nbytes


class SharedMemory:
    """The segments of all ranks. They come and go by agreement; arrays in them are freed locally.

    Parameters
    ----------
    calls : Calls
    agreements : Agreements
    machine : HostTarget or CudaTarget
    topology : Topology
    hosts : sequence of int
        The host of each rank.
    network : Network or None
    world : World
        Where kernels learn of segments.

    Attributes
    ----------
    segments : SegmentTable
    arena : Arena or None
        As it is; a plan made for an earlier one binds its addresses again.
    """

    def __init__(
        self,
        calls: Calls,
        agreements: Agreements,
        machine: Any,
        topology: Topology,
        hosts: Sequence[int],
        network: Any,
        world: World,
    ):
        self.segments = SegmentTable(calls.rank, calls.size)
        self.arena: Arena | None = None
        self._calls, self._agreements, self._machine = calls, agreements, machine
        self._topology, self._hosts, self._world = topology, hosts, world
        self._cards = None if network is None or network.staged else network
        self._heap = Heap()
        self._heap_numbers: list[int] = []

    # --- arrays -----------------------------------------------------------------------------------

    def empty(self, shape: Any, dtype: Any, order: str) -> Any:
        """Do as `Communicator.empty`."""
        with self._calls.calling("empty()"):
            return self._empty(shape, dtype, order)

    def zeros(self, shape: Any, dtype: Any, order: str) -> Any:
        """Do as `Communicator.zeros`."""
        with self._calls.calling("zeros()"):
            array = self._empty(shape, dtype, order)
            self._machine.zero(array)
            return array

    def asarray(self, a: Any, dtype: Any) -> Any:
        """Do as `Communicator.asarray`."""
        with self._calls.calling("asarray()"):
            a = self._machine.asarray(a, dtype)
            here = a.size == 0 or self.holds(self._machine.shadow(a))
            steps = [abs(step) for n, step in zip(a.shape, a.strides, strict=True) if n > 1]
            fortran = len(steps) > 1 and steps == sorted(steps)
            copy = self._empty(0 if here else a.shape, a.dtype, "F" if fortran else "C")
            if here:
                return a
            self._machine.copy(copy, a)
            return copy

    def holds(self, a: np.ndarray) -> bool:
        """Return whether all of a user's array lies in a heap segment, where peers can read it.

        `a` is the array or its shadow.
        """
        place = self.segments.locate(*extent(a)) if a.size else None
        return place is not None and (self.arena is None or place.segment != self.arena.number)

    def _empty(self, shape: Any, dtype: Any, order: str) -> Any:
        try:
            shape = (shape,) if isinstance(shape, int | np.integer) else tuple(shape)
            shape = tuple(map(integer, shape))
        except TypeError:
            raise TypeError(f"shape={shape!r}: use an integer or a tuple of integers") from None
        dtype = np.dtype(dtype)
        if min(shape, default=0) < 0:
            raise ValueError(f"shape {shape}: negative dimensions are not allowed")
        if dtype.hasobject:
            raise TypeError(f"dtype {dtype}: objects cannot be shared between processes")
        if dtype.itemsize == 0 or dtype.subdtype:
            raise TypeError(f"dtype {dtype}: use one whose elements have a size and no shape")
        np.broadcast_to(np.empty((), dtype), shape)  # raises what NumPy says of such a shape
        if order not in ("C", "F"):
            raise ValueError(f"order {order!r}: not allowed; use 'C' or 'F'")
        nbytes = math.prod(shape) * dtype.itemsize
        answers = self._agreements.agree(
            "empty(), zeros() or asarray()",
            lambda: (not self._heap.fits(nbytes), self._unused_heap_segments()),
        )
        if any(full for full, _ in answers):
            # What no rank uses any more makes room first.
            for number in sorted(set.intersection(*(unused for _, unused in answers))):
                segment = self.segments[number]
                if self._let_go(number):
                    self._heap.remove(segment)
                    self._heap_numbers.remove(number)
            segments = self._share(round_up(max(nbytes, 1), _HEAP_GRAIN))
            self._heap_numbers.append(self._add(segments))
            self._heap.add(segments[self._calls.rank])
        self._machine.begin()  # a launch may still use what the room held before
        if order == "F":
            return self._heap.allocate(shape[::-1], dtype).T
        return self._heap.allocate(shape, dtype)

    # --- segments ---------------------------------------------------------------------------------

    def reserve(self, signals: int, nbytes: int, words: int = 0) -> None:
        """Have an arena with so much room, the same on all ranks."""
        old, wanted = self.arena, (signals, nbytes, words)
        have = (old.signals, old.nbytes, old.words) if old else (0, 0, 0)
        if old and all(map(operator.ge, have, wanted)):
            return
        made = Arena(-1, *map(max, have, wanted))
        segments = self._share(made.size)
        if old:
            # Nobody uses it once all ranks have come here and their earlier calls are over.
            self._let_go(old.number)
        self.arena = replace(made, number=self._add(segments))

    def _add(self, segments: list[Segment]) -> int:
        number = self.segments.add(segments)
        self._world.set_segments(self.segments.pointers)
        if self._cards is not None:
            own, register = segments[self._calls.rank], self._cards.register
            self._cards.learn(
                number,
                self._agreements.agree(
                    "to register memory with network cards",
                    lambda: register(number, own.address, own.nbytes),
                ),
            )
        return number

    def _unused_heap_segments(self) -> set[int]:
        return {n for n in self._heap_numbers if self._heap.is_unused(self.segments[n])}

    def _let_go(self, number: int) -> bool:
        """Give back segments that no rank uses any more, unless a captured graph may."""
        agree, machine = self._agreements.agree, self._machine
        machine.wait()
        if any(agree("whether graphs hold memory", lambda: machine.captured)):
            return False
        unused = self.segments.remove(number)
        if self._cards is not None:
            self._cards.unregister(number)
        agree("to let go of memory", lambda: machine.unmap(unused))
        machine.discard(unused[self._calls.rank])
        return True

    def _share(self, nbytes: int) -> list[Segment]:
        """Return a new segment of every rank; all ranks succeed or none does."""
        machine = self._machine
        created: list[Segment] = []
        mapped: list[Segment] = []

        def create() -> Any:
            available = machine.available()
            created.append(machine.create(nbytes))
            return machine.ticket(created[0]), nbytes, available

        try:
            answers = self._agreements.agree("to share memory", create)
            # Ranks of one host draw on the same memory.
            for host in sorted(set(self._hosts)):
                there = [answers[rank] for rank, its in enumerate(self._hosts) if its == host]
                total = sum(size for _, size, _ in there)
                available = min(left for *_, left in there)
                if total > available:
                    error = errors.OutOfMemoryError(
                        f"the ranks of the host of rank {host} ask for {total} bytes of shared "
                        f"memory together, and {available} are available"
                    )
                    raise self._calls.known_to_all(error)
        except BaseException:
            for segment in created:
                machine.discard(segment)
            raise
        tickets = [ticket for ticket, *_ in answers]
        self._agreements.agree(
            "to map shared memory",
            lambda: mapped.extend(machine.open(created[0], tickets, self._look_at_neighbour)),
        )
        return self._topology.by_rank(mapped)

    def _look_at_neighbour(self, local: int) -> None:
        self._agreements.look_at(self._topology.peers[local])

    def forget(self) -> None:
        """Let go of all segments; arrays in them stay valid."""
        self.segments, self._heap = SegmentTable(self._calls.rank, self._calls.size), Heap()
