"""What a plan could choose otherwise, and which of it is fastest."""

import contextlib
import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .. import plan as plans
from .. import tuning
from ..communicator import Communicator
from ..errors import Error
from ..operators.allgather_gemm import AllGatherGemm
from ..operators.gemm import GemmOperator
from ..operators.gemm_allreduce import GemmAllReduce
from ..operators.gemm_reduce_scatter import GemmReduceScatter
from ..plan import Options
from . import timing
from .data import normal
from .timing import Call

OPERATORS: dict[str, type[GemmOperator]] = {
    kind.function: kind for kind in (AllGatherGemm, GemmReduceScatter, GemmAllReduce)
}
_WORTHWHILE = 0.98  # of the time that the cost model's choices take
_SETS = 3  # of operands, used in turn: what the call before has left in a cache is of no use

# What is tried, per engine.
_TILES = {
    "hopper": plans.HOPPER_TILES,
    "portable": (),
    "host": ((32, 32, 64), (64, 64, 64), (128, 64, 64)),
}
_MOVERS = {"hopper": (0, 4, 8, 16), "portable": (8, 16, 24, 32), "host": (0, 1, 2)}
_CHUNK_BYTES = tuple(1 << power for power in (14, 15, 16, 17, 18))


@dataclass(frozen=True, eq=False)
class _Operands:
    a: Any
    b: Any
    out: Any


class Tuner:
    """Measures the choices of an operator. Collective, like its calls; `opened` makes one.

    It forgets what the communicator knows of earlier measurements.
    """

    def __init__(
        self, comm: Communicator, clock: Any, gate: timing.Gate, operator: str, dtype: np.dtype
    ):
        self._comm, self._clock, self._gate = comm, clock, gate
        self._operator, self._dtype = operator, dtype
        self._numpy = np if comm.target == "host" else importlib.import_module("cupy")
        comm.tuning = tuning.Table()

    @classmethod
    @contextlib.contextmanager
    def opened(cls, comm: Communicator, operator: str, dtype: np.dtype) -> Iterator["Tuner"]:
        """Give the tuner of an operator on a communicator, for operands of one dtype."""
        clock = timing.clock_for(comm)
        with clock.stream(), contextlib.closing(timing.Gate(comm)) as gate:
            yield cls(comm, clock, gate, operator, dtype)

    def tune(self, m: int, k: int, n: int) -> tuning.Entry:
        """Return the fastest choices for a shape.

        The cost model's come first; then tiles, movers and chunks take turns, each beside the best
        of the others so far. The winner is measured once more beside the model's choices.

        Parameters
        ----------
        m : int
            Rows of A, or of the sum, of all ranks together: split as by `numpy.array_split`.
        k : int
            Of a sum, the terms of each rank.
        n : int
            Columns of each rank's B.
        """
        gathers = self._operator == "allgather_gemm"
        self._counts = self._comm.row_counts(m)
        self._sets = [self._operands(m, k, n, seed) for seed in range(_SETS)]
        with self._step(Options()) as step:
            model, engine = _freed(step.plan.options), step.plan.engine
            expected = step(self._sets[0].a, self._sets[0].b)
        self._expected = expected.view(f"u{self._dtype.itemsize}")
        best = self._fastest(
            [model, *(Options(tile=tile, chunk_bytes=model.chunk_bytes) for tile in _TILES[engine])]
        )
        if self._comm.size > 1:
            movers = [replace(best, split=(count, None)) for count in _MOVERS[engine]]
            best = self._fastest([best, *movers])
        if self._comm.size > 1 and gathers:
            best = self._fastest([best, *(replace(best, chunk_bytes=b) for b in _CHUNK_BYTES)])
        times = self._measure([model, best])
        if times[best] > _WORTHWHILE * times[model]:
            best = model
        return tuning.Entry(
            operator=self._operator,
            card=tuning.card_of(self._comm.device),
            dtype=self._dtype.name,
            ranks=self._comm.size,
            m=m,
            k=k,
            n=n,
            tile=best.tile if best.tile != model.tile else None,
            movers=best.split[0] if best.split != model.split else None,
            chunk_bytes=best.chunk_bytes if best.chunk_bytes != model.chunk_bytes else None,
            ms=times[best],
            model_ms=times[model],
        )

    def _fastest(self, candidates: Sequence[Options]) -> Options:
        times = self._measure(candidates)
        return min(times, key=times.__getitem__)

    def _measure(self, candidates: Sequence[Options]) -> dict[Options, float]:
        """Return the milliseconds of the choices that a plan takes, with what it adds to them."""
        with contextlib.ExitStack() as stack:
            steps = {}
            for options in candidates:
                with contextlib.suppress(ValueError):  # no choice for this engine, on all ranks
                    step = stack.enter_context(self._step(options))
                    steps[_freed(step.plan.options)] = step
            names = {str(options): options for options in steps}
            calls = {name: self._checked(steps[options]) for name, options in names.items()}
            times = timing.interleaved_ms(self._comm, self._clock, self._gate, calls)
        return {names[name]: ms for name, ms in times.items()}

    def _step(self, options: Options) -> Any:
        one, kind = self._sets[0], OPERATORS[self._operator]
        more = {} if kind is GemmAllReduce else {"row_counts": self._counts}
        return kind(one.a, one.b, comm=self._comm, options=options, **more)

    def _checked(self, step: Any) -> Call:
        """Return what makes calls of a plan; Error if its result is another than the model's."""

        def call(number: int) -> Any:
            one = self._sets[number % _SETS]
            return step(one.a, one.b, out=one.out)

        self._comm.machine.fill(self._sets[0].out, np.nan)
        found = self._numpy.asarray(call(0)).view(self._expected.dtype)
        if not (found == self._expected).all():
            raise Error(f"{step.plan.options} gives another result than the cost model's choices")
        return call

    def _operands(self, m: int, k: int, n: int, seed: int) -> _Operands:
        comm, what = self._comm, (self._numpy, self._dtype)
        own, gathers = self._counts[comm.rank], self._operator == "allgather_gemm"
        a = comm.empty((own if gathers else m, k), self._dtype)
        seed = 2 * (seed * comm.size + comm.rank)
        comm.machine.copy(a, normal(*what, seed, a.shape))
        rows = own if self._operator == "gemm_reduce_scatter" else m
        out = comm.machine.empty((rows, n), self._dtype)
        return _Operands(a, normal(*what, seed + 1, (k, n)), out)


def _freed(options: Options) -> Options:
    """Return a plan's options with as many compute agents as there is room and work for."""
    return replace(options, split=(options.split[0], None))
