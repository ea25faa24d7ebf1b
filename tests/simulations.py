"""Worlds whose launches a simulator runs again and again, in an order drawn from a seed."""

import ctypes
import itertools

from mkernel_cp import settings, structs
from mkernel_cp.transport import soft


def helpers(comms):
    """What gets turns beside the launches: network cards of software, and proxies."""
    networks = [comm._runtime.network for comm in comms if comm._runtime.network]
    return [soft.by_hand(), *(network.by_hand() for network in networks)] if networks else []


_STEP = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)


def slow(helper, turns):
    """The same helper, but it uses only one of so many turns."""
    step, taken = _STEP(helper.step), itertools.count(1)
    return _helper(lambda _: next(taken) % turns == 0 and step(helper.of))


def breaks(comm, turn):
    """A helper that ends this rank's launch at one of its turns, in vain and without a word."""
    taken = itertools.count(1)
    failures = ctypes.c_uint64.from_address(comm._runtime._signal_pages[comm.rank].failures_word)

    def step(_):
        now = next(taken) == turn
        failures.value |= now
        return now

    return _helper(step)


def _helper(step):
    callback = _STEP(step)
    helper = structs.helper(callback)
    helper.kept = callback
    return helper


def assert_right(world, seeds, launches):
    """Check that all launches end well, with the right result, for so many seeds."""
    comms = [comm for comm, *_ in world.ranks]
    for seed in range(seeds):
        before = comms[0]._runtime.calls.signals.generation
        soft.configure(settings.SoftFabric(seed=seed))
        faults, _ = world.simulate(seed)
        assert not faults
        generations = {comm._runtime.calls.signals.generation for comm in comms}
        assert generations == {before + launches}, f"seed {seed}: not all launches ended well"
