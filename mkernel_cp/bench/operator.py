"""What the benchmarks of all operators have in common: who is measured, how, and what is right."""

import abc
import contextlib
import gc
import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from .. import reference
from ..communicator import Communicator, runtime_of
from ..errors import Error
from . import baselines, timing
from .baselines import Operands
from .data import normal
from .link import link_rate, network_rate
from .timing import Call

_SETS = 3  # of operands, used in turn: what the call before has left in a cache is of no use
_SAMPLE = 64, 256  # rows and columns whose results are compared

Shape = tuple[int, ...]
"""Extents as records have them, in the order of `OperatorBench.keys`."""


@dataclass(frozen=True, eq=False)
class Sample:
    """What some elements of a result should be: those where these rows and columns cross.

    Attributes
    ----------
    out : array
        Where the result comes, unless the call returns another array.
    """

    out: Any
    rows: Any
    columns: Any
    expected: reference.Expected


@dataclass(frozen=True)
class Way:
    """A way to do the work, or a part of it: what makes the call, or why there is none."""

    prepare: Callable[[], Call] | str
    sample: Sample


class OperatorBench(abc.ABC):
    """What all shapes of one run share. Collective, like its calls; use `opened` to make one.

    Attributes
    ----------
    operator : str
        What is measured.
    keys : tuple of str
        What records call the extents of a shape.
    shapes, quick_shapes : dict
        By target, what is measured if nothing else is asked for.
    link_rate, network_rate : float
        Bytes per second that reach a rank from its node, and that leave it for others, measured
        now.
    """

    operator: ClassVar[str]
    keys: ClassVar[tuple[str, ...]] = ("M", "K", "N")
    shapes: ClassVar[dict[str, tuple[Shape, ...]]]
    quick_shapes: ClassVar[dict[str, tuple[Shape, ...]]]

    def __init__(
        self,
        comm: Communicator,
        alone: Communicator,
        clock: Any,
        gate: timing.Gate,
        dtype: np.dtype,
    ):
        self._comm, self._alone, self._clock, self._gate = comm, alone, clock, gate
        self._machine, self._dtype = runtime_of(comm).machine, dtype
        self._bits = np.dtype(f"u{dtype.itemsize}")
        self._numpy = np if comm.target == "host" else importlib.import_module("cupy")
        self.link_rate, self.network_rate = link_rate(comm, clock, gate), network_rate(comm)
        # Before libraries start threads of their own in this process.
        self._host_us = {
            name: timing.host_us(comm, clock, call) for name, call in self._small_calls().items()
        }
        self._gemm = baselines.gemm_for(comm)
        self._library = self._attempt(self._communication)
        self._rivals = {rival.name: self._meet(rival) for rival in baselines.RIVALS}

    @classmethod
    @contextlib.contextmanager
    def opened(cls, comm: Communicator, dtype: np.dtype, **asked: Any) -> Iterator["OperatorBench"]:
        """Give the benchmark of a communicator of processes, for operands of one dtype."""
        baselines.without_multicast()
        clock = timing.clock_for(comm)
        part = comm.mpi.Split(comm.rank)
        with (
            clock.stream(),
            Communicator(part, target=comm.target, device=clock.device(), nodes=1) as alone,
            contextlib.closing(timing.Gate(comm)) as gate,
        ):
            self = cls(comm, alone, clock, gate, dtype, **asked)
            yield self
            for rival in self._rivals.values():
                if not isinstance(rival, str):
                    rival.close()
        part.Free()

    def _meet(self, rival: Any) -> Any:
        """Return a rival, or why there is none."""
        if self.operator not in rival.operators:
            return f"has no {self.operator}"
        if self._comm.target == "host":
            return "needs GPUs"
        # Alone first: joining the others may be to wait for them.
        module = self._attempt(lambda: importlib.import_module(rival.module))
        return module if isinstance(module, str) else self._attempt(lambda: rival(self._comm))

    def _attempt(self, work: Callable[[], Any]) -> Any:
        """Return `work()`, or if it failed on any rank, why it did on the first of them."""
        return baselines.attempt(self._comm, work)

    # --- what an operator says --------------------------------------------------------------------

    @abc.abstractmethod
    def _small_calls(self) -> dict[str, Callable[[], Any]]:
        """Return calls of a small shape, of the class and of the function, with ``out=``."""

    @abc.abstractmethod
    def _communication(self) -> Any:
        """Return the part of a library that moves the data of the unfused way. Collective."""

    @abc.abstractmethod
    def _operands(self, *shape_and_number: int) -> Operands:
        """Return a set of random operands, of a shape and with a number of its own."""

    @abc.abstractmethod
    def _steps(self, one: Operands) -> contextlib.AbstractContextManager:
        """Give the operator planned for all ranks, and for this one alone."""

    @abc.abstractmethod
    def _ways(self, sets: Sequence[Operands], fused: Any, engine: Any) -> dict[str, Way]:
        """Return the ways to do the work, less the rivals', by what records call their time."""

    def _rivals_sample(self, ways: dict[str, Way]) -> Sample:
        """Return what a rival's result should be."""
        return ways["fused_ms"].sample

    @abc.abstractmethod
    def _bytes_in(self, one: Operands, shape: Shape) -> int:
        """Return the bytes that must come to the rank that gets most."""

    # --- a shape ----------------------------------------------------------------------------------

    def measure(self, *shape: int) -> dict[str, Any]:
        """Return what a record has of a shape that is measured, with operands of its own.

        Words stand for the time of a baseline that does not run here, and of a wrong result.

        Parameters
        ----------
        *shape : int
            As records have them. Where ranks share out rows, they do as `numpy.array_split`.
        """
        try:
            return self._measure(shape)
        finally:
            gc.collect()  # so that the next shape finds room

    def _measure(self, shape: Shape) -> dict[str, Any]:
        sets = [self._operands(*shape, number) for number in range(_SETS)]
        with self._steps(sets[0]) as (fused, engine):
            ways = self._ways(sets, fused, engine)
            sample = self._rivals_sample(ways)
            ways |= {
                name: Way(rival if isinstance(rival, str) else self._prepared(rival, sets), sample)
                for name, rival in self._rivals.items()
            }
            found = {
                name: way.prepare
                if isinstance(way.prepare, str)
                else self._attempt(lambda w=way: self._checked(w.prepare(), w.sample))
                for name, way in ways.items()
            }
            calls = {name: call for name, call in found.items() if not isinstance(call, str)}
            found |= timing.interleaved_ms(self._comm, self._clock, self._gate, calls)
            plan = fused.plan.to_json()
            bytes_in, bytes_out = self._bytes_in(sets[0], shape), 0
            if self._comm.num_nodes > 1:
                both = fused.plan.bytes_from_peers, fused.plan.bytes_to_network
                crossing = runtime_of(self._comm).agree("what crosses links", lambda: both)
                bytes_in, bytes_out = map(max, zip(*crossing, strict=True))
        rivals = {name: self._told(name, shape, found.pop(name)) for name in self._rivals}
        return {
            **found,
            "transfer_ms": 1e3 * bytes_in / self.link_rate,
            "network_ms": 1e3 * bytes_out / self.network_rate,
            "host_us": self._host_us,
            "rivals": rivals,
            "plan": plan,
        }

    @staticmethod
    def _in_turn(sets: Sequence[Operands], run: Callable[[Operands], Any]) -> Callable[[], Call]:
        """Return what makes the call that runs one set after the other."""
        return lambda: lambda number: run(sets[number % len(sets)])

    def _prepared(self, rival: Any, sets: Sequence[Operands]) -> Callable[[], Call]:
        return lambda: rival.prepare(self.operator, sets)

    def _told(self, name: str, shape: Shape, found: Any) -> Any:
        """Return a rival's time, or why there is none and what it was in an earlier run."""
        if not isinstance(found, str):
            return found
        return found + baselines.figure(name, self.operator, self._comm.size, shape, self._dtype)

    # --- operands and results ---------------------------------------------------------------------

    def _normal(self, seed: int, shape: tuple[int, int]) -> Any:
        return normal(self._numpy, self._dtype, seed, shape)

    def _some(self, out: Any, borders: Sequence[int]) -> tuple[Any, Any]:
        """Return what to look at: rows on both sides of borders, others, and some columns."""
        (m, n), borders = out.shape, np.asarray(borders)
        rows = _some(m, _SAMPLE[0], [*borders, *(borders - 1)])
        return self._numpy.asarray(rows), self._numpy.asarray(_some(n, _SAMPLE[1], []))

    def _picked(self, array: Any, rows: Any, columns: Any) -> np.ndarray:
        bits = array.view(self._bits)  # not every CuPy indexes every dtype
        return self._machine.asnumpy(bits[rows][:, columns]).view(self._dtype)

    def _checked(self, call: Call, sample: Sample) -> Call:
        """Return a call whose result is right, and which leaves its work to the device.

        Error otherwise; not before all is done that the other ranks may wait for.
        """
        self._machine.fill(sample.out, np.nan)
        fault = self._fault(self._numpy.asarray(call(0)), sample)
        call(1)
        queued = timing.is_queued(self._clock, lambda: call(2))
        if fault:
            raise Error(f"wrong result: {fault}")
        if not queued:
            raise Error("waits for the GPU, so it has no device time of its own")
        return call

    def _fault(self, result: Any, sample: Sample) -> str:
        """Return what is wrong with a result, if something is."""
        unwritten = np.array(np.nan, self._dtype).view(self._bits).item()
        if (result.view(self._bits) == unwritten).any():
            return "some of it is not written, or is not a number"
        error = sample.expected.check(
            self._picked(result[sample.rows], slice(None), sample.columns)
        )
        return f"an error is {error:.3g} times its bound" if error > 1 else ""


def _some(extent: int, most: int, wanted: Sequence[int]) -> np.ndarray:
    """Return some indices below `extent` in order: the first, the last, the wanted, random ones."""
    random = np.random.default_rng(extent).integers(0, max(1, extent), most)
    chosen = np.unique([0, extent - 1, *wanted, *random])
    return chosen[(0 <= chosen) & (chosen < extent)]
