"""Thousands of interleavings of the protocol, each drawn from a seed and run in virtual time."""

import contextlib
import ctypes

import numpy as np
import pytest
import simulations
import worlds

import mkernel_cp as mk
from mkernel_cp.failure import Reason

LAUNCHES = 3
FORMS = {
    "allgather_gemm": ("allgather_gemm", "pushed"),
    **worlds.SUMS,
    "allgather_gemm, gathered": ("allgather_gemm", "gathered"),
}
# Of a rank: rows of the result that it owns, or brings; one of the three owns none of a sum.
COUNTS = {
    "allgather_gemm": (3, 2, 4),
    "gemm_reduce_scatter": (3, 0, 2),
    "gemm_allreduce": (1, 1, 0),
}


class World:
    """Three ranks whose launches are prepared, to be run by a simulator again and again."""

    def __init__(self, form, lanes, split=(2, 2), **options):
        self.size, self.lanes = 3, lanes
        operator, way = FORMS[form]
        counts = COUNTS[operator]
        m, k, n = sum(counts), 5, 3
        rows = [slice(sum(counts[:rank]), sum(counts[: rank + 1])) for rank in range(self.size)]
        rng = np.random.default_rng(0)
        if operator == "allgather_gemm":
            data = rng.integers(-4, 5, (LAUNCHES, m, k)).astype(np.float32)
            self.a = [[launch[part] for part in rows] for launch in data]
            b = rng.integers(-4, 5, (self.size, k, n)).astype(np.float32)
            self.expected = data[:, None] @ b[None]
        else:
            data = rng.integers(-4, 5, (LAUNCHES, self.size, m, k)).astype(np.float32)
            depths = (k, 0, 2)
            self.a = [
                [x[:, :depth] for x, depth in zip(launch, depths, strict=True)] for launch in data
            ]
            b = [rng.integers(-4, 5, (depth, n)).astype(np.float32) for depth in depths]
            sums = [sum(x @ y for x, y in zip(launch, b, strict=True)) for launch in self.a]
            scattered = operator == "gemm_reduce_scatter"
            self.expected = [[x[part] if scattered else x for part in rows] for x in sums]
        more = {} if operator == "gemm_allreduce" else {"row_counts": counts}
        kind = {
            "allgather_gemm": mk.AllGatherGemm,
            "gemm_reduce_scatter": mk.GemmReduceScatter,
            "gemm_allreduce": mk.GemmAllReduce,
        }[operator]
        plan = mk.Options(split=split, tile=(2, 2, 2), chunk_bytes=24)

        def program(mpi):
            comm = mk.Communicator(mpi, **options)
            a = comm.empty(self.a[0][comm.rank].shape, np.float32)
            out = np.empty(self.expected[0][comm.rank].shape, np.float32)
            step = kind(a, b[comm.rank], comm=comm, options=plan, **more)
            comm._runtime.launches.hooks.lanes = lanes
            return comm, step, a, out, step.prepare(a, b[comm.rank], out)

        with worlds.sums(way), worlds.gathered(way == "gathered"):
            self.ranks = mk.LocalWorld(self.size).run(program)
        self.helpers = simulations.helpers(comm for comm, *_ in self.ranks)

    def simulate(self, seed, poison=worlds.NAN, **stop):
        """Run all launches once; return the faults seen, and the kernel's account of it."""
        faults = []

        def host(rank, launch):
            comm, _, a, out, _ = self.ranks[rank]
            calls = comm._runtime.calls
            ended_well = calls.signals.generation == first + launch + 1
            if launch >= 0:
                right = out == self.expected[launch][rank]
                # What was not finished is NaN; what was finished is right.
                if not (right.all() if ended_well else (right | np.isnan(out)).all()):
                    faults.append((seed, rank, launch, out.copy()))
            goes_on = ended_well and launch + 1 < LAUNCHES
            a[...] = self.a[launch + 1][rank] if goes_on else np.nan
            out[...] = np.nan
            if ended_well:
                worlds.poison(comm, poison)
            # What it has sent may be told when it has gone already.
            calls.pages[rank].words.closed = 0 if goes_on else 1 + calls.signals.generation
            return ended_well

        first = self.ranks[0][0]._runtime.calls.signals.generation
        rows = []
        for rank, (_, _, _, _, (request, _)) in enumerate(self.ranks):
            host(rank, -1)
            request.seed = 1 + seed * self.size + rank
            rows.append([request] * LAUNCHES)
        kernel = self.ranks[0][1]._kernel
        return faults, kernel.simulate(rows, seed, host, helpers=self.helpers, **stop)

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
    [(1, (1, 1), 4000), (1, (2, 2), 4000), (2, (1, 2), 500), (3, (2, 1), 500)],
)
@pytest.mark.parametrize("form", FORMS)
def test_every_interleaving_gives_the_right_result(make_world, form, lanes, split, seeds):
    world = make_world(form, lanes, split)
    seeds = seeds if form == "allgather_gemm" else seeds // 2
    simulations.assert_right(world, seeds, LAUNCHES)


@pytest.mark.parametrize("form", [form for form in FORMS if form.endswith("low latency")])
def test_words_that_a_failed_call_has_left_are_no_sums(make_world, form):
    """A launch that was queued behind one that fails stores NaN, whatever lies there."""
    world = make_world(form, 1)
    for comm, *_ in world.ranks:
        worlds.words(comm)[...] = worlds.NUMBER
        failures = comm._runtime._signal_pages[comm.rank].failures_word
        ctypes.c_uint64.from_address(failures).value = 1
    faults, _ = world.simulate(0)
    assert not faults


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("transport", ["verbs", "efa"])
@pytest.mark.parametrize("form", list(FORMS)[:3])
def test_every_interleaving_between_nodes_gives_the_right_result(
    make_world, form, transport, staged, monkeypatch
):
    """Proxies and network cards get turns, too."""
    if staged:
        worlds.stage(monkeypatch, 64, count=1)
    world = make_world(form, 1, (1, 2), nodes=(2, 1), transport=transport)
    simulations.assert_right(world, 40, LAUNCHES)


@pytest.mark.parametrize("form", list(FORMS)[:3])
def test_what_a_rank_has_sent_comes_when_it_has_closed(make_world, form):
    """Proxies are slow: they tell it late."""
    world = make_world(form, 1, (1, 2), nodes=(1, 1, 1))
    world.helpers[1:] = [simulations.slow(proxy, 20) for proxy in world.helpers[1:]]
    simulations.assert_right(world, 5, LAUNCHES)


@pytest.mark.parametrize(
    "form", [form for form, (_, way) in worlds.SUMS.items() if way != "pulled"]
)
def test_sums_do_without_movers(make_world, form):
    simulations.assert_right(make_world(form, 1, (0, 2)), 500, LAUNCHES)


@pytest.mark.parametrize("part", range(30))
@pytest.mark.parametrize("form", FORMS)
def test_a_stopped_rank_ends_all_waits_at_a_deadline(make_world, form, part):
    """In virtual time: ten minutes to enter, thirty seconds to go on.

    Landing zones and slots hold numbers: the NaN of what was not finished comes from the sinks.
    """
    world = make_world(form, 1)
    whole = world.simulate(part)[1].steps
    stop = {"stopped_rank": 1, "stop_step": whole * part // 45}
    faults, simulation = world.simulate(part, worlds.NUMBER, **stop)
    assert not faults
    reasons = set()
    for rank in (0, 2):
        comm = world.ranks[rank][0]
        with pytest.raises(mk.TimeoutError, match="rank"):
            comm.synchronize()
        reasons |= {page.words.by_kernel.reason for page in comm._runtime.calls.pages}
    assert reasons - {0} <= {Reason.ENTRY_TIMEOUT, Reason.PROGRESS_TIMEOUT}
    assert 30e9 <= simulation.elapsed_ns <= 2 * 630e9


@pytest.mark.parametrize("form", list(FORMS)[:3])
def test_who_waits_for_a_rank_that_waits_for_the_call_of_another_gives_it_time(make_world, form):
    world = make_world(form, 1, (1, 2), nodes=(2, 1))
    stop = {"stopped_rank": 1, "stop_step": 0}
    faults, simulation = world.simulate(0, worlds.NUMBER, **stop)
    assert not faults
    assert simulation.elapsed_ns > 600e9
    for rank in (0, 2):
        with pytest.raises(mk.TimeoutError, match=r"for the call of rank 1 .*entry_timeout"):
            world.ranks[rank][0].synchronize()


@pytest.mark.parametrize(
    ("form", "seed"), [*zip(list(FORMS)[:3], (2, 14, 14), strict=True)], ids=list(FORMS)[:3]
)
def test_who_passes_no_call_on_is_late_not_those_who_have_called(make_world, form, seed):
    """Rank 1 is who tells rank 2 of rank 0."""
    world = make_world(form, 1, (1, 2), nodes=(1, 2))
    stop = {"stopped_rank": 1, "stop_step": 0}
    assert not world.simulate(seed, worlds.NUMBER, **stop)[0]
    for rank in (0, 2):
        with pytest.raises(mk.TimeoutError, match=r"Rank 1 has not made this call"):
            world.ranks[rank][0].synchronize()


@pytest.mark.parametrize("part", range(6))
@pytest.mark.parametrize("form", list(FORMS)[:3])
def test_a_rank_that_closes_behind_a_broken_launch_is_not_waited_for(make_world, form, part):
    """It has told and sent some of it by then, and others on other nodes hear of no failure."""
    nodes = ((2, 1), (1, 2), (1, 1, 1))[part % 3]
    world = make_world(form, 1, (1, 2), nodes=nodes)
    broken = 2 * part % 3
    world.helpers.append(simulations.breaks(world.ranks[broken][0], 10 + 11 * part))
    faults, simulation = world.simulate(part, worlds.NUMBER)
    assert not faults
    assert simulation.elapsed_ns < 1e9
    for rank in {0, 1, 2} - {broken}:
        with pytest.raises(mk.PeerLostError, match=f"rank {broken} has closed"):
            world.ranks[rank][0].synchronize()


def test_a_simulation_repeats(make_world):
    steps = []
    for _ in range(2):
        world = make_world("allgather_gemm", 2)
        steps.append([world.simulate(seed)[1].steps for seed in range(20)])
        world.close()
    assert steps[0] == steps[1]
