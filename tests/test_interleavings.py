"""Thousands of interleavings of the protocol, each drawn from a seed and run in virtual time."""

import contextlib

import numpy as np
import pytest
import worlds

import mkernel_cp as mk
from mkernel_cp.failure import Reason

COUNTS, K, N = (3, 2, 4), 5, 3
LAUNCHES = 3


class World:
    """Three ranks whose launches are prepared, to be run by a simulator again and again."""

    def __init__(self, lanes, split=(2, 2), **options):
        self.size = len(COUNTS)
        self.start = np.cumsum([0, *COUNTS])
        self.lanes = lanes
        rng = np.random.default_rng(0)
        self.data = rng.integers(-4, 5, (LAUNCHES, sum(COUNTS), K)).astype(np.float32)
        self.b = rng.integers(-4, 5, (self.size, K, N)).astype(np.float32)
        self.expected = self.data[:, None] @ self.b[None]
        plan = mk.Options(split=split, tile=(2, 2, 2), chunk_bytes=24)

        def program(mpi):
            comm = mk.Communicator(mpi, **options)
            a = comm.empty((COUNTS[comm.rank], K), np.float32)
            out = np.empty((sum(COUNTS), N), np.float32)
            b = self.b[comm.rank]
            step = mk.AllGatherGemm(a, b, comm=comm, row_counts=COUNTS, options=plan)
            comm.hooks.lanes = lanes
            return comm, step, a, b, out, step.prepare(a, b, out)

        self.ranks = mk.LocalWorld(self.size).run(program)

    def simulate(self, seed, **stop):
        """Run all launches once; return the faults seen, and the kernel's account of it."""
        faults = []

        def host(rank, launch):
            comm, _, a, _, out, _ = self.ranks[rank]
            ended_well = comm._signals.generation == first + launch + 1
            if launch >= 0:
                right = out == self.expected[launch, rank]
                # What was not finished is NaN; what was finished is right.
                if not (right.all() if ended_well else (right | np.isnan(out)).all()):
                    faults.append((seed, rank, launch, out.copy()))
            if launch + 1 < LAUNCHES:
                a[...] = self.data[launch + 1, self.start[rank] : self.start[rank + 1]]
            else:
                a[...] = np.nan
            out[...] = np.nan
            worlds.poison(comm)
            return ended_well

        first = self.ranks[0][0]._signals.generation
        rows = []
        for rank, (_, _, _, _, _, (request, _)) in enumerate(self.ranks):
            host(rank, -1)
            request.seed = 1 + seed * self.size + rank
            rows.append([request] * LAUNCHES)
        kernel = self.ranks[0][1]._kernel
        return faults, kernel.simulate(rows, seed, host, **stop)

    def close(self):
        for comm, *_ in self.ranks:
            with contextlib.suppress(mk.Error):
                comm.close()


@pytest.fixture
def make_world():
    made = []

    def make(*args, **keywords):
        made.append(World(*args, **keywords))
        return made[-1]

    yield make
    for world in made:
        world.close()


@pytest.mark.parametrize(
    ("lanes", "split", "seeds"),
    [(1, (1, 1), 4000), (1, (2, 2), 4000), (2, (1, 2), 1000), (3, (2, 1), 1000)],
)
def test_every_interleaving_gives_the_right_result(make_world, lanes, split, seeds):
    world = make_world(lanes, split)
    for seed in range(seeds):
        faults, _ = world.simulate(seed)
        assert not faults
        generations = {comm._signals.generation for comm, *_ in world.ranks}
        assert len(generations) == 1, f"seed {seed}: not all launches ended well"


@pytest.mark.parametrize("stop_step", range(0, 480, 16))
def test_a_stopped_rank_ends_all_waits_at_a_deadline(make_world, stop_step):
    """In virtual time: ten minutes to enter, thirty seconds to go on."""
    world = make_world(1)
    faults, simulation = world.simulate(stop_step, stopped_rank=1, stop_step=stop_step)
    assert not faults
    reasons = set()
    for rank in (0, 2):
        comm = world.ranks[rank][0]
        with pytest.raises(mk.TimeoutError, match="rank"):
            comm.synchronize()
        reasons |= {page.words.by_kernel.reason for page in comm._pages}
    assert reasons - {0} <= {Reason.ENTRY_TIMEOUT, Reason.PROGRESS_TIMEOUT}
    assert 30e9 <= simulation.elapsed_ns <= 2 * 630e9


def test_a_simulation_repeats(make_world):
    steps = []
    for _ in range(2):
        world = make_world(2)
        steps.append([world.simulate(seed)[1].steps for seed in range(20)])
        world.close()
    assert steps[0] == steps[1]
