"""What the benchmarks of all operators have in common: who is measured, how, and what is right."""

import abc
import contextlib
import gc
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from .. import reference
from ..arguments import Options
from ..communicator import Communicator, runtime_of
from ..errors import Error
from . import baselines, timing
from .baselines import available
from .data import SETS, Operands, normal
from .link import link_rate, network_rate
from .timing import Call

_SAMPLE = 64, 256  # rows and columns whose results are compared

Shape = tuple[int, ...]
"""Extents as records have them, in the order of `records.SHAPE_KEYS`."""

Work = Callable[[Any], Any]
"""Does some work with one set of operands; gives its result."""


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


@contextlib.contextmanager
def measuring(comm: Communicator) -> Iterator[tuple[Communicator, Any, timing.Gate]]:
    """Give what a measurement needs: a communicator of this rank alone, a clock and a gate."""
    clock, part = timing.clock_for(comm), comm.mpi.Split(comm.rank)
    with (
        clock.stream(),
        Communicator(part, target=comm.target, device=clock.device(), nodes=1) as alone,
        contextlib.closing(timing.Gate(comm)) as gate,
    ):
        yield alone, clock, gate
    part.Free()


class OperatorBench(abc.ABC):
    """What all shapes of one run share. Collective, like its calls; `opened` makes one to measure.

    Parameters
    ----------
    comm : Communicator
        Of processes.
    alone : Communicator
        Of this one.
    dtype : numpy.dtype
        Of operands.
    variant : dict
        What else is asked for, by `records.VARIANT_KEYS`.

    Attributes
    ----------
    operator : str
        What is measured.
    step_type : type
        The operator's class.
    function : callable
    choices : tuple of str
        What `tune` looks for in its plans.
    within_node : bool
        Whether it is measured beside others within one node only so far.
    shapes, quick_shapes : dict
        By target, what is measured if nothing else is asked for.
    link_rate, network_rate : float
        Bytes per second that reach a rank from its node, and that leave it for others, measured
        now.
    """

    operator: ClassVar[str]
    step_type: ClassVar[type]
    function: ClassVar[Callable[..., Any]]
    choices: ClassVar[tuple[str, ...]] = ("tile", "movers", "chunk_bytes")
    within_node: ClassVar[bool] = False
    shapes: ClassVar[dict[str, tuple[Shape, ...]]]
    quick_shapes: ClassVar[dict[str, tuple[Shape, ...]]]

    def __init__(
        self,
        comm: Communicator,
        alone: Communicator,
        dtype: np.dtype,
        variant: Mapping[str, Any],
    ):
        self._comm, self._alone, self._machine = comm, alone, runtime_of(comm).machine
        self._dtype, self._variant = dtype, variant
        self._bits = np.dtype(f"u{dtype.itemsize}")
        self._numpy = np if comm.target == "host" else importlib.import_module("cupy")

    @classmethod
    def rivals(cls) -> list[type]:
        """Return those that have the operator, too."""
        return [rival for rival in baselines.RIVALS if cls.operator in rival.operators]

    @classmethod
    @contextlib.contextmanager
    def opened(
        cls, comm: Communicator, dtype: np.dtype, variant: Mapping[str, Any]
    ) -> Iterator["OperatorBench"]:
        """Give a benchmark with its libraries and rivals."""
        if cls.within_node:
            runtime_of(comm).refuse_nodes(f"the bench of {cls.operator}")
        baselines.without_multicast()
        with measuring(comm) as (alone, clock, gate):
            self = cls(comm, alone, dtype, variant)
            self._clock, self._gate = clock, gate
            self.link_rate, self.network_rate = link_rate(comm, clock, gate), network_rate(comm)
            # Before libraries start threads of their own in this process.
            self._host_us = {
                name: timing.host_us(comm, clock, call)
                for name, call in self._small_calls().items()
            }
            self._load()
            yield self
            for rival in self._rivals.values():
                if not isinstance(rival, str):
                    rival.close()

    def _load(self) -> None:
        """Load libraries and rivals, or say why there is none."""
        self._gemm = baselines.gemm_for(self._comm)
        self._library = self._attempt(self._communication)
        self._rivals = {rival.name: self._meet(rival) for rival in self.rivals()}

    def _meet(self, rival: Any) -> Any:
        """Return a rival, or why there is none."""
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
    def _small(self, ranks: int) -> Shape:
        """Return a shape whose calls take the device less than the host."""

    @abc.abstractmethod
    def _communication(self) -> Any:
        """Return the part of a library that moves the data of the unfused way. Collective."""

    @abc.abstractmethod
    def operands(self, *shape_and_number: int) -> Operands:
        """Return a set of random operands, of a shape and with a number of its own."""

    @abc.abstractmethod
    def _compute(self, sets: Sequence[Any]) -> Work:
        """Return what a library does of one rank's work; Error if it is not there."""

    @abc.abstractmethod
    def _unfused(self, sets: Sequence[Any]) -> Work:
        """Return the whole work by libraries, one after the other; Error if one is not there."""

    @abc.abstractmethod
    def _samples(self, one: Any) -> dict[str, Sample]:
        """Return what results of a set should be, by what records call the times of all ways.

        Those of rivals are as that of 'unfused_ms'.
        """

    @abc.abstractmethod
    def _bytes_in(self, one: Any, shape: Shape) -> int:
        """Return the bytes that must come to the rank that gets most."""

    def result(self, returned: Any, one: Any) -> Any:
        """Return the matrix that is compared, of what the operator returns or gets as ``out=``."""
        return returned

    # --- its calls --------------------------------------------------------------------------------

    def _small_calls(self) -> dict[str, Callable[[], Any]]:
        """Return calls of a small shape, of the class and of the function, with ``out=``."""
        comm, function = self._comm, type(self).function
        one = self.operands(*self._small(comm.size), 0)
        step = self.planned(one)
        return {
            "class": lambda: step(*one.own, out=one.out),
            "function": lambda: function(*one.own, comm=comm, out=one.out, **one.asked),
        }

    def planned(self, one: Operands, options: Options | None = None) -> Any:
        """Return the operator, planned for such operands: a context manager."""
        return self.step_type(*one.own, comm=self._comm, options=options, **one.asked)

    def _ways(self, fused: Any, engine: Any) -> dict[str, Callable[[Sequence[Any]], Work]]:
        """Return what makes the ways to do the work, but for the rivals'."""
        return {
            "compute_ms": self._compute,
            "engine_ms": lambda _: lambda one: self.result(engine(*one.alike, out=one.made), one),
            "fused_ms": lambda _: lambda one: self.result(fused(*one.own, out=one.out), one),
            "unfused_ms": self._unfused,
        }

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
        sets = [self.operands(*shape, number) for number in range(SETS)]
        first = sets[0]
        with (
            self.planned(first) as fused,
            self.step_type(*first.alike, comm=self._alone, **first.asked_alone) as engine,
        ):
            samples = self._samples(first)
            samples |= dict.fromkeys(self._rivals, samples["unfused_ms"])
            makers = {
                **{name: self._in_turn(way) for name, way in self._ways(fused, engine).items()},
                **{name: self._prepared(rival) for name, rival in self._rivals.items()},
            }
            found = {
                name: self._attempt(lambda m=make, s=samples[name]: self._checked(m(sets), s))
                for name, make in makers.items()
            }
            calls = {name: call for name, call in found.items() if not isinstance(call, str)}
            found |= timing.interleaved_ms(self._comm, self._clock, self._gate, calls)
            plan = fused.plan.to_json()
            bytes_in, bytes_out = self._bytes_in(first, shape), 0
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
    def _in_turn(way: Callable[[Sequence[Any]], Work]) -> Callable[[Sequence[Any]], Call]:
        """Return what makes the call that runs one set after the other."""

        def make(sets: Sequence[Any]) -> Call:
            run = way(sets)
            return lambda number: run(sets[number % len(sets)])

        return make

    def _prepared(self, rival: Any) -> Callable[[Sequence[Any]], Call]:
        return lambda sets: available(rival).prepare(self.operator, sets)

    def _told(self, name: str, shape: Shape, found: Any) -> Any:
        """Return a rival's time, or why there is none and what it was in an earlier run."""
        if not isinstance(found, str):
            return found
        return found + baselines.figure(name, self.operator, self._comm.size, shape, self._dtype)

    # --- operands and results ---------------------------------------------------------------------

    def _normal(self, seed: int, shape: Shape) -> Any:
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
