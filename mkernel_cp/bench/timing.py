"""What calls take: on the device, interleaved and queued ahead of the host; and on the host."""

import contextlib
import importlib
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..communicator import Communicator, runtime_of
from ..errors import Error
from ..operators.allgather_gemm import AllGatherGemm

_WARM_ROUNDS = 2
_FIRST_DELAY = 1e-3
_LONGEST_DELAY = 0.5
_NOTICEABLE = 0.02
_BURST = 50  # calls that a stream takes without holding back the host

_DELAY = r"""
extern "C" __global__ void delay(unsigned long long nanoseconds) {
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); while (now - start < nanoseconds);
}
"""

Call = Callable[[int], Any]
"""A call with one of several sets of operands, chosen by a number that grows; gives its result."""


class HostClock:
    """Time on the host target, where a call is over when it returns.

    It also says what the members of a clock are.
    """

    rounds = 3
    host_calls = 100

    def device(self) -> int | None:
        """Return the current device."""
        return None

    def stream(self) -> Any:
        """Return a context in which all calls are made."""
        return contextlib.nullcontext()

    def delay(self, seconds: float) -> None:
        """Hold back what follows for so long, without waiting for it."""

    def mark(self) -> Any:
        """Return a mark behind all calls so far."""
        return time.perf_counter()

    def passed(self, mark: Any) -> bool:
        """Return whether the device has come to a mark that follows a delay."""
        return False

    def wait(self, mark: Any) -> None:
        """Return when the device has come to a mark."""

    def ms(self, start: Any, stop: Any) -> float:
        """Return the milliseconds between two marks that the device has passed."""
        return 1e3 * (stop - start)


class CudaClock:
    """Time on a GPU, by events."""

    rounds = 20
    host_calls = 1000

    def __init__(self) -> None:
        self._cupy = importlib.import_module("cupy")
        self._delay = self._cupy.RawKernel(_DELAY, "delay")

    def device(self) -> int:
        return self._cupy.cuda.runtime.getDevice()

    def stream(self) -> Any:
        return self._cupy.cuda.Stream(non_blocking=True)

    def delay(self, seconds: float) -> None:
        self._delay((1,), (1,), (np.uint64(1e9 * seconds),))

    def mark(self) -> Any:
        event = self._cupy.cuda.Event()
        event.record()
        return event

    def passed(self, mark: Any) -> bool:
        return mark.done

    def wait(self, mark: Any) -> None:
        mark.synchronize()

    def ms(self, start: Any, stop: Any) -> float:
        return self._cupy.cuda.get_elapsed_time(start, stop)


def clock_for(comm: Communicator) -> HostClock | CudaClock:
    """Return the clock of a communicator's target."""
    return HostClock() if comm.target == "host" else CudaClock()


class Gate:
    """A barrier of the devices: no rank passes before all have come. Making one is collective.

    It is a fused call for one element per rank, which peers have to read before it ends.
    """

    def __init__(self, comm: Communicator):
        one = np.ones((1, 1), np.float32)
        self._operands = comm.asarray(one), runtime_of(comm).machine.asarray(one, None)
        self._out = runtime_of(comm).machine.empty((comm.size, 1), one.dtype)
        self._step = AllGatherGemm(*self._operands, comm=comm)

    def __call__(self) -> None:
        self._step(*self._operands, out=self._out)

    def close(self) -> None:
        """Forget its plan."""
        self._step.close()


def interleaved_ms(
    comm: Communicator, clock: Any, gate: Gate, calls: Mapping[str, Call]
) -> dict[str, float]:
    """Return the device time of each call in ms: median of the rounds, maximum over ranks.

    Collective. In every round each call is made once, behind a gate, so that none pays for the
    delay of another rank; and another one first, as a pause comes before it. The device starts on a
    round when the host has queued all of it; a round in which it did not wait for the host to do so
    is repeated with a longer delay.
    """
    samples: dict[str, list[float]] = {name: [] for name in calls}
    agree, delay, number = runtime_of(comm).agree, _FIRST_DELAY, 0
    while number < _WARM_ROUNDS + clock.rounds:
        ahead, times = _round(clock, gate, calls, number, delay)
        if not all(agree("whether the hosts were ahead", lambda ahead=ahead: ahead)):
            delay *= 2
            if delay > _LONGEST_DELAY:
                raise Error(f"the host needs more than {_LONGEST_DELAY} s to queue {[*calls]}")
            continue
        if number >= _WARM_ROUNDS:
            for name, ms in times.items():
                samples[name].append(ms)
        number += 1
    medians = {name: statistics.median(times) for name, times in samples.items()}
    everyone = agree("what took how long", lambda: medians)
    return {name: max(one[name] for one in everyone) for name in calls}


def _round(
    clock: Any, gate: Gate, calls: Mapping[str, Call], number: int, delay: float
) -> tuple[bool, dict[str, float]]:
    clock.delay(delay)
    delayed = clock.mark()
    marks = {}
    first = number % len(calls)
    for position, (name, call) in enumerate(([*calls.items()] * 2)[first : first + len(calls)]):
        gate()
        start = clock.mark()
        call(number + position)
        marks[name] = start, clock.mark()
    ahead = not clock.passed(delayed)
    clock.wait(clock.mark())
    return ahead, {name: clock.ms(*pair) for name, pair in marks.items()}


def is_queued(clock: Any, call: Callable[[], Any]) -> bool:
    """Return whether a call leaves its work to the device; one that waits for it does not."""
    clock.delay(_NOTICEABLE)
    delayed = clock.mark()
    call()
    queued = not clock.passed(delayed)
    clock.wait(clock.mark())
    return queued


def host_us(comm: Communicator, clock: Any, call: Callable[[], Any]) -> float:
    """Return what a call costs the host in microseconds: the median, maximum over ranks."""
    seconds = []
    for number in range(clock.host_calls):
        if number % _BURST == 0:
            comm.synchronize()
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    comm.synchronize()
    return 1e6 * max(runtime_of(comm).agree("the host's cost", lambda: statistics.median(seconds)))
