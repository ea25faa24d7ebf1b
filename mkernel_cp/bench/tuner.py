"""What a plan could choose otherwise, and which of it is fastest."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from .. import tuning
from ..arguments import Options
from ..communicator import Communicator, runtime_of
from ..errors import Error
from ..tiles import HOPPER_TILES
from . import timing
from .data import SETS
from .operator import OperatorBench, measuring
from .routes import ROUTINGS
from .timing import Call

_WORTHWHILE = 0.98  # of the time that the cost model's choices take

# What is tried, per engine.
_TILES = {
    "hopper": HOPPER_TILES,
    "portable": (),
    "host": ((32, 32, 64), (64, 64, 64), (128, 64, 64)),
}
_MOVERS = {"hopper": (0, 4, 8, 16), "portable": (8, 16, 24, 32), "host": (0, 1, 2)}
_CHUNK_BYTES = tuple(1 << power for power in (14, 15, 16, 17, 18))
_VARIANT = {"routing": ROUTINGS[0]}


class Tuner:
    """Measures the choices of an operator. Collective, like its calls; `opened` makes one.

    It forgets what the communicator knows of earlier measurements.
    """

    def __init__(
        self,
        comm: Communicator,
        clock: Any,
        gate: timing.Gate,
        bench: OperatorBench,
        dtype: np.dtype,
    ):
        self._comm, self._clock, self._gate = comm, clock, gate
        self._bench, self._dtype = bench, dtype
        runtime_of(comm).tuning = tuning.Table()

    @classmethod
    @contextlib.contextmanager
    def opened(
        cls, comm: Communicator, kind: type[OperatorBench], dtype: np.dtype
    ) -> Iterator["Tuner"]:
        """Give the tuner of an operator on a communicator, for operands of one dtype."""
        with measuring(comm) as (alone, clock, gate):
            yield cls(comm, clock, gate, kind(comm, alone, dtype, _VARIANT), dtype)

    def tune(self, *shape: int) -> tuning.Entry:
        """Return the fastest choices for a shape, as `tuning.Entry` has it.

        The cost model's come first; then tiles, movers and chunks take turns, each beside the best
        of the others so far. The winner is measured once more beside the model's choices.
        """
        bench = self._bench
        self._sets = [bench.operands(*shape, number) for number in range(SETS)]
        with bench.planned(self._sets[0], Options()) as step:
            model, engine = _freed(step.plan.options), step.plan.engine
            self._expected = self._bits(self._call(step, 0)).copy()
        best = model
        if "tile" in bench.choices:
            tiles = (Options(tile=t, chunk_bytes=model.chunk_bytes) for t in _TILES[engine])
            best = self._fastest([best, *tiles])
        if self._comm.size > 1:
            movers = [replace(best, split=(count, None)) for count in _MOVERS[engine]]
            best = self._fastest([best, *movers])
        if self._comm.size > 1 and "chunk_bytes" in bench.choices:
            best = self._fastest([best, *(replace(best, chunk_bytes=b) for b in _CHUNK_BYTES)])
        times = self._measure([model, best])
        if times[best] > _WORTHWHILE * times[model]:
            best = model
        return tuning.Entry(
            operator=bench.operator,
            card=tuning.card_of(self._comm.device),
            dtype=self._dtype.name,
            ranks=self._comm.size,
            shape=shape,
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
                    step = stack.enter_context(self._bench.planned(self._sets[0], options))
                    steps[_freed(step.plan.options)] = step
            names = {str(options): options for options in steps}
            calls = {name: self._checked(steps[options]) for name, options in names.items()}
            times = timing.interleaved_ms(self._comm, self._clock, self._gate, calls)
        return {names[name]: ms for name, ms in times.items()}

    def _checked(self, step: Any) -> Call:
        """Return what makes calls of a plan; Error if its result is another than the model's."""
        one = self._sets[0]
        runtime_of(self._comm).machine.fill(self._bench.result(one.out, one), np.nan)
        if not (self._bits(self._call(step, 0)) == self._expected).all():
            raise Error(f"{step.plan.options} gives another result than the cost model's choices")
        return lambda number: self._call(step, number)

    def _call(self, step: Any, number: int) -> Any:
        one = self._sets[number % SETS]
        return self._bench.result(step(*one.own, out=one.out), one)

    def _bits(self, result: Any) -> Any:
        return result.view(f"u{self._dtype.itemsize}")


def _freed(options: Options) -> Options:
    """Return a plan's options with as many compute agents as there is room and work for."""
    return replace(options, split=(options.split[0], None))
