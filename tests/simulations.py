"""Worlds whose launches a simulator runs again and again, in an order drawn from a seed."""

import contextlib
import ctypes
import itertools

import numpy as np
import pytest
import worlds

import mkernel_cp as mk
from mkernel_cp import settings, structs
from mkernel_cp.failure import Reason
from mkernel_cp.transport import soft


class World:
    """Three ranks whose launches are prepared, to be run by a simulator again and again.

    Its kinds say what a rank prepares, what it is to give, and what is done before a launch.
    """

    launches, tolerance = 3, 1e-5

    def __init__(self, lanes, **options):
        def program(mpi):
            comm = mk.Communicator(mpi, **options)
            comm._runtime.launches.hooks.lanes = lanes
            return comm, *self.prepare(comm)

        self.ranks = mk.LocalWorld(3).run(program)
        self.helpers = helpers(comm for comm, *_ in self.ranks)

    def prepare(self, comm):
        """Return the operator, what `set_up` wants, the output, and the prepared launch."""
        raise NotImplementedError

    def expected(self, rank, launch):
        """Return what a launch is to give."""
        raise NotImplementedError

    def set_up(self, rank, launch):
        """Do what a host does before a launch; None: behind the last one. All else is spoilt."""
        raise NotImplementedError

    def is_right(self, rank, launch, out, ended_well):
        """What was not finished is NaN; what was finished is right."""
        right = np.isclose(out, self.expected(rank, launch), self.tolerance, self.tolerance)
        return (right if ended_well else right | np.isnan(out)).all()

    def simulate(self, seed, poison=worlds.NAN, **stop):
        """Run all launches once; return the faults seen, and the kernel's account of it."""
        faults = []

        def host(rank, launch):
            comm, _, _, out, _ = self.ranks[rank]
            calls = comm._runtime.calls
            ended_well = calls.signals.generation == first + launch + 1
            if launch >= 0 and not self.is_right(rank, launch, out, ended_well):
                faults.append((seed, rank, launch, out.copy()))
            goes_on = ended_well and launch + 1 < self.launches
            if ended_well:
                worlds.poison(comm, poison)
            self.set_up(rank, launch + 1 if goes_on else None)
            # What it has sent may be told when it has gone already.
            calls.pages[rank].words.closed = 0 if goes_on else 1 + calls.signals.generation
            return ended_well

        first = self.ranks[0][0]._runtime.calls.signals.generation
        rows = []
        for rank, (*_, (request, _)) in enumerate(self.ranks):
            host(rank, -1)
            request.seed = 1 + seed * len(self.ranks) + rank
            rows.append([request] * self.launches)
        kernel = self.ranks[0][1]._kernel
        return faults, kernel.simulate(rows, seed, host, helpers=self.helpers, **stop)

    def close(self):
        for comm, *_ in self.ranks:
            with contextlib.suppress(mk.Error, ValueError):  # of data that were wrong
                comm.close()


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


def assert_right(world, seeds):
    """Check that all launches end well, with the right result, for so many seeds."""
    comms = [comm for comm, *_ in world.ranks]
    for seed in range(seeds):
        before = comms[0]._runtime.calls.signals.generation
        soft.configure(settings.SoftFabric(seed=seed))
        faults, _ = world.simulate(seed)
        assert not faults
        generations = {comm._runtime.calls.signals.generation for comm in comms}
        assert generations == {before + world.launches}, f"seed {seed}: not all launches ended well"


def assert_all_waits_end(world, seed, part, **poison):
    """Check what is told if rank 1 stops when so much of a run is done.

    In virtual time: ten minutes to enter, thirty seconds to go on.
    """
    stop = int(world.simulate(seed)[1].steps * part)
    faults, simulation = world.simulate(seed, **poison, stopped_rank=1, stop_step=stop)
    assert not faults
    reasons = set()
    for rank in (0, 2):
        comm = world.ranks[rank][0]
        with pytest.raises(mk.TimeoutError, match="rank"):
            comm.synchronize()
        reasons |= {page.words.by_kernel.reason for page in comm._runtime.calls.pages}
    assert reasons - {0} <= {Reason.ENTRY_TIMEOUT, Reason.PROGRESS_TIMEOUT}
    assert 30e9 <= simulation.elapsed_ns <= 2 * 630e9
