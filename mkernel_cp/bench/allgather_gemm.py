"""`allgather_gemm` beside cuBLAS, NCCL and its rivals."""

import contextlib
import gc
import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from .. import reference
from ..communicator import Communicator
from ..errors import Error
from ..operators.allgather_gemm import AllGatherGemm, allgather_gemm
from . import baselines, timing
from .baselines import Operands
from .link import link_rate
from .timing import Call

_SETS = 3  # of operands, used in turn: what the call before has left in a cache is of no use
_CHECKED_ROWS, _CHECKED_COLUMNS = 64, 256
_SMALL = 32, 64, 64  # rows of a rank, K, N: the host's cost is the same for all shapes

_SQUARES = tuple((m, m, m // 4) for m in (4096, 8192, 16384, 32768))
_LANGUAGE_MODELS = ((512, 8192, 7168), (2048, 8192, 7168), (8192, 8192, 7168), (16384, 5120, 3456))
_ODD = ((4100, 4104, 1000), (4224, 4160, 1024), (1023, 129, 77))
SHAPES = {"cuda": _SQUARES + _LANGUAGE_MODELS + _ODD, "host": ((96, 80, 40), (101, 77, 19))}
QUICK_SHAPES = {"cuda": (*_SQUARES[:2], _ODD[0]), "host": SHAPES["host"][:1]}


@dataclass(frozen=True)
class Case:
    """What is measured.

    Attributes
    ----------
    m : int
        Rows of A, of all ranks together; they are split as by `numpy.array_split`.
    k : int
    n : int
        Columns of each rank's B.
    dtype : numpy.dtype
    """

    m: int
    k: int
    n: int
    dtype: np.dtype


class AllGatherGemmBench:
    """What all cases of one run share. Collective, like its calls.

    Use `opened` to make one.

    Attributes
    ----------
    link_rate : float
        Bytes per second that reach a rank, measured now.
    """

    def __init__(self, comm: Communicator, alone: Communicator, clock: Any, gate: timing.Gate):
        self._comm, self._alone, self._clock, self._gate = comm, alone, clock, gate
        self._machine = comm.machine
        self._numpy = np if comm.target == "host" else importlib.import_module("cupy")
        self._gemm = baselines.gemm_for(comm)
        self.link_rate = link_rate(comm, clock, gate)
        self._gather = self._attempt(lambda: baselines.gather_for(comm))
        self._rivals = {rival.name: self._meet(rival) for rival in baselines.RIVALS}
        self._costs: dict[np.dtype, dict[str, float]] = {}

    @classmethod
    @contextlib.contextmanager
    def opened(cls, comm: Communicator) -> Iterator["AllGatherGemmBench"]:
        """Give the benchmark of a communicator of processes."""
        baselines.without_multicast()
        clock = timing.clock_for(comm)
        part = comm.mpi.Split(comm.rank)
        with (
            clock.stream(),
            Communicator(part, target=comm.target, device=clock.device()) as alone,
            contextlib.closing(timing.Gate(comm)) as gate,
        ):
            self = cls(comm, alone, clock, gate)
            yield self
            for rival in self._rivals.values():
                if not isinstance(rival, str):
                    rival.close()
        part.Free()

    def _meet(self, rival: Any) -> Any:
        """Return a rival, or why there is none."""
        if self._comm.target == "host":
            return "needs GPUs"
        # Alone first: joining the others may be to wait for them.
        module = self._attempt(lambda: importlib.import_module(rival.module))
        return module if isinstance(module, str) else self._attempt(lambda: rival(self._comm))

    def _attempt(self, work: Callable[[], Any]) -> Any:
        """Return `work()`, or if it failed on any rank, why it did on the first of them."""
        result, problem = None, None
        try:
            result = work()
        except Exception as error:
            name = "" if isinstance(error, Error) else f"{type(error).__name__}: "
            problem = name + str(error).strip().partition("\n")[0]
        problems = self._comm.agree("whether that worked", lambda: problem)
        return next(filter(None, problems), result)

    # --- a case -----------------------------------------------------------------------------------

    def measure(self, case: Case) -> dict[str, Any]:
        """Return what a record has of a case that is measured, with operands of its own.

        Words stand for the time of a baseline that does not run here, and of a wrong result.
        """
        try:
            return self._measure(case)
        finally:
            gc.collect()  # so that the next case finds room

    def _measure(self, case: Case) -> dict[str, Any]:
        comm, alone = self._comm, self._alone
        sets = [self._operands(case, number) for number in range(_SETS)]
        own, whole, b, counts = sets[0].own, sets[0].whole, sets[0].b, sets[0].row_counts
        with (
            AllGatherGemm(own, b, comm=comm, row_counts=counts) as fused,
            AllGatherGemm(whole, b, comm=alone) as engine,
        ):

            def with_each(run: Callable[[Operands], Any]) -> Callable[[], Call]:
                return lambda: lambda number: run(sets[number % _SETS])

            ways = {
                "compute_ms": with_each(lambda one: self._gemm(one.whole, one.b, one.out)),
                "engine_ms": with_each(lambda one: engine(one.whole, one.b, out=one.out)),
                "fused_ms": with_each(lambda one: fused(one.own, one.b, out=one.out)),
                "unfused_ms": self._unfused(sets),
                **{
                    name: rival if isinstance(rival, str) else lambda r=rival: r.prepare(sets)
                    for name, rival in self._rivals.items()
                },
            }
            found = {
                name: way
                if isinstance(way, str)
                else self._attempt(lambda w=way: self._checked(case, sets[0], w()))
                for name, way in ways.items()
            }
            calls = {name: call for name, call in found.items() if not isinstance(call, str)}
            found |= timing.interleaved_ms(comm, self._clock, self._gate, calls)
            plan = fused.plan.to_json()
        bytes_in = (case.m - min(counts)) * case.k * case.dtype.itemsize
        rivals = {name: self._told(name, case, found.pop(name)) for name in self._rivals}
        return {
            **found,
            "transfer_ms": 1e3 * bytes_in / self.link_rate,
            "host_us": self._host_cost(case.dtype),
            "rivals": rivals,
            "plan": plan,
        }

    def _unfused(self, sets: Sequence[Operands]) -> Callable[[], Call] | str:
        """Return what makes the call that gathers and then multiplies, or why there is none."""
        gather = self._gather
        if isinstance(gather, str):
            return gather

        def prepare() -> Call:
            gathered = self._machine.empty(sets[0].whole.shape, sets[0].whole.dtype)

            def call(number: int) -> Any:
                one = sets[number % _SETS]
                gather(one.own, gathered, one.row_counts)
                return self._gemm(gathered, one.b, one.out)

            return call

        return prepare

    def _told(self, name: str, case: Case, found: Any) -> Any:
        """Return a rival's time, or why there is none and what it was in an earlier run."""
        if not isinstance(found, str):
            return found
        shape = case.m, case.k, case.n
        return found + baselines.figure(name, self._comm.size, shape, case.dtype)

    # --- operands and results ---------------------------------------------------------------------

    def _operands(self, case: Case, number: int) -> Operands:
        """Return random operands; every rank knows all of A."""
        comm, machine = self._comm, self._machine
        counts = comm.row_counts(case.m)
        seed = 1000 * (1 + number)
        whole = self._alone.empty((case.m, case.k), case.dtype)
        starts = np.cumsum((0, *counts))
        for rank, rows in enumerate(counts):
            if rows:
                block = self._normal(seed + rank, (rows, case.k), case.dtype)
                machine.copy(whole[starts[rank] : starts[rank + 1]], block)
        own = comm.empty((counts[comm.rank], case.k), case.dtype)
        machine.copy(own, whole[comm.rows(case.m)])
        b = self._normal(seed + comm.size + comm.rank, (case.k, case.n), case.dtype)
        return Operands(own, whole, b, machine.empty((case.m, case.n), case.dtype), counts)

    def _normal(self, seed: int, shape: tuple[int, int], dtype: np.dtype) -> Any:
        wide = np.float64 if dtype == np.float64 else np.float32
        values = self._numpy.random.default_rng(seed).standard_normal(shape, dtype=wide)
        if dtype == ml_dtypes.bfloat16:  # cut off: not every CuPy converts to it
            return (values.view(np.uint32) >> 16).astype(np.uint16).view(dtype)
        return values.astype(dtype)

    def _checked(self, case: Case, one: Operands, call: Call) -> Call:
        """Return a call whose result is right, and which leaves its work to the device.

        Error otherwise; not before all is done that the other ranks may wait for.
        """
        self._machine.fill(one.out, np.nan)
        fault = self._fault(case, one, call(0))
        call(1)
        queued = timing.is_queued(self._clock, lambda: call(2))
        if fault:
            raise Error(f"wrong result: {fault}")
        if not queued:
            raise Error("waits for the GPU, so it has no device time of its own")
        return call

    def _fault(self, case: Case, one: Operands, result: Any) -> str:
        """Return what is wrong with a result, if it is not written everywhere or where sampled."""
        bits = np.dtype(f"u{case.dtype.itemsize}")
        c = self._numpy.asarray(result).view(bits)
        unwritten = np.array(np.nan, case.dtype).view(bits).item()
        if (c == unwritten).any():
            return "some of it is not written, or is not a number"
        borders = np.cumsum(one.row_counts)
        here = self._numpy.asarray
        rows = here(_some(case.m, _CHECKED_ROWS, [*borders, *(borders - 1)]))
        columns = here(_some(case.n, _CHECKED_COLUMNS, []))

        def pick(array: Any, *index: Any) -> np.ndarray:
            return self._machine.asnumpy(array.view(bits)[index]).view(case.dtype)

        every = slice(None)
        picked = self._machine.asnumpy(c[rows][:, columns]).view(case.dtype)
        expected = reference.allgather_gemm(
            [pick(one.whole, rows)], pick(one.b, every, columns), case.dtype
        )
        error = expected.check(picked)
        return f"an error is {error:.3g} times its bound" if error > 1 else ""

    # --- the host ---------------------------------------------------------------------------------

    def _host_cost(self, dtype: np.dtype) -> dict[str, float]:
        """Return what a warm call with `out` costs the host, in microseconds."""
        if dtype not in self._costs:
            comm, (rows, k, n) = self._comm, _SMALL
            one = self._operands(Case(comm.size * rows, k, n, dtype), 0)
            a, b, out = one.own, one.b, one.out
            with AllGatherGemm(a, b, comm=comm) as step:
                calls = {
                    "class": lambda: step(a, b, out=out),
                    "function": lambda: allgather_gemm(a, b, comm=comm, out=out),
                }
                self._costs[dtype] = {
                    name: timing.host_us(comm, self._clock, call) for name, call in calls.items()
                }
        return self._costs[dtype]


def _some(extent: int, most: int, wanted: Sequence[int]) -> np.ndarray:
    """Return some indices below `extent` in order: the first, the last, the wanted, random ones."""
    random = np.random.default_rng(extent).integers(0, extent, most)
    chosen = np.unique([0, extent - 1, *wanted, *random])
    return chosen[(0 <= chosen) & (chosen < extent)]
