"""Thousands of interleavings of the protocol, each drawn from a seed and run in virtual time."""

import ctypes

import numpy as np
import pytest
import simulations
import worlds

import mkernel_cp as mk

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


class World(simulations.World):
    tolerance = 0  # of small integers

    def __init__(self, form, lanes, split=(2, 2), **options):
        operator, way = FORMS[form]
        counts = COUNTS[operator]
        m, k, n = sum(counts), 5, 3
        rows = [slice(sum(counts[:rank]), sum(counts[: rank + 1])) for rank in range(3)]
        rng = np.random.default_rng(0)
        if operator == "allgather_gemm":
            data = rng.integers(-4, 5, (self.launches, m, k)).astype(np.float32)
            self.a = [[launch[part] for part in rows] for launch in data]
            self.b = rng.integers(-4, 5, (3, k, n)).astype(np.float32)
            self.results = data[:, None] @ self.b[None]
        else:
            data = rng.integers(-4, 5, (self.launches, 3, m, k)).astype(np.float32)
            depths = (k, 0, 2)
            self.a = [
                [x[:, :depth] for x, depth in zip(launch, depths, strict=True)] for launch in data
            ]
            self.b = [rng.integers(-4, 5, (depth, n)).astype(np.float32) for depth in depths]
            sums = [sum(x @ y for x, y in zip(launch, self.b, strict=True)) for launch in self.a]
            scattered = operator == "gemm_reduce_scatter"
            self.results = [[x[part] if scattered else x for part in rows] for x in sums]
        self.asked = {} if operator == "gemm_allreduce" else {"row_counts": counts}
        self.asked["options"] = mk.Options(split=split, tile=(2, 2, 2), chunk_bytes=24)
        self.kind = {
            "allgather_gemm": mk.AllGatherGemm,
            "gemm_reduce_scatter": mk.GemmReduceScatter,
            "gemm_allreduce": mk.GemmAllReduce,
        }[operator]
        with worlds.sums(way), worlds.gathered(way == "gathered"):
            super().__init__(lanes, **options)

    def prepare(self, comm):
        a = comm.empty(self.a[0][comm.rank].shape, np.float32)
        b = self.b[comm.rank]
        out = np.empty(self.results[0][comm.rank].shape, np.float32)
        step = self.kind(a, b, comm=comm, **self.asked)
        return step, a, out, step.prepare(a, b, out)

    def expected(self, rank, launch):
        return self.results[launch][rank]

    def set_up(self, rank, launch):
        _, _, a, out, _ = self.ranks[rank]
        a[...] = np.nan if launch is None else self.a[launch][rank]
        out[...] = np.nan


@pytest.mark.parametrize(
    ("lanes", "split", "seeds"),
    [(1, (1, 1), 4000), (1, (2, 2), 4000), (2, (1, 2), 500), (3, (2, 1), 500)],
)
@pytest.mark.parametrize("form", FORMS)
def test_every_interleaving_gives_the_right_result(closed_behind, form, lanes, split, seeds):
    world = closed_behind(World(form, lanes, split))
    seeds = seeds if form == "allgather_gemm" else seeds // 2
    simulations.assert_right(world, seeds)


@pytest.mark.parametrize("form", [form for form in FORMS if form.endswith("low latency")])
def test_words_that_a_failed_call_has_left_are_no_sums(closed_behind, form):
    """A launch that was queued behind one that fails stores NaN, whatever lies there."""
    world = closed_behind(World(form, 1))
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
    closed_behind, form, transport, staged, monkeypatch
):
    """Proxies and network cards get turns, too."""
    if staged:
        worlds.stage(monkeypatch, 64, count=1)
    world = closed_behind(World(form, 1, (1, 2), nodes=(2, 1), transport=transport))
    simulations.assert_right(world, 40)


@pytest.mark.parametrize("form", list(FORMS)[:3])
def test_what_a_rank_has_sent_comes_when_it_has_closed(closed_behind, form):
    """Proxies are slow: they tell it late."""
    world = closed_behind(World(form, 1, (1, 2), nodes=(1, 1, 1)))
    world.helpers[1:] = [simulations.slow(proxy, 20) for proxy in world.helpers[1:]]
    simulations.assert_right(world, 5)


@pytest.mark.parametrize(
    "form", [form for form, (_, way) in worlds.SUMS.items() if way != "pulled"]
)
def test_sums_do_without_movers(closed_behind, form):
    simulations.assert_right(closed_behind(World(form, 1, (0, 2))), 500)


@pytest.mark.parametrize("part", range(30))
@pytest.mark.parametrize("form", FORMS)
def test_a_stopped_rank_ends_all_waits_at_a_deadline(closed_behind, form, part):
    """Landing zones and slots hold numbers: NaN for what was not finished comes from the sinks."""
    world = closed_behind(World(form, 1))
    simulations.assert_all_waits_end(world, part, part / 45, poison=worlds.NUMBER)


@pytest.mark.parametrize("form", list(FORMS)[:3])
def test_who_waits_for_a_rank_that_waits_for_the_call_of_another_gives_it_time(closed_behind, form):
    world = closed_behind(World(form, 1, (1, 2), nodes=(2, 1)))
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
def test_who_passes_no_call_on_is_late_not_those_who_have_called(closed_behind, form, seed):
    """Rank 1 is who tells rank 2 of rank 0."""
    world = closed_behind(World(form, 1, (1, 2), nodes=(1, 2)))
    stop = {"stopped_rank": 1, "stop_step": 0}
    assert not world.simulate(seed, worlds.NUMBER, **stop)[0]
    for rank in (0, 2):
        with pytest.raises(mk.TimeoutError, match=r"Rank 1 has not made this call"):
            world.ranks[rank][0].synchronize()


@pytest.mark.parametrize("part", range(6))
@pytest.mark.parametrize("form", list(FORMS)[:3])
def test_a_rank_that_closes_behind_a_broken_launch_is_not_waited_for(closed_behind, form, part):
    """It has told and sent some of it by then, and others on other nodes hear of no failure."""
    nodes = ((2, 1), (1, 2), (1, 1, 1))[part % 3]
    world = closed_behind(World(form, 1, (1, 2), nodes=nodes))
    broken = 2 * part % 3
    world.helpers.append(simulations.breaks(world.ranks[broken][0], 10 + 11 * part))
    faults, simulation = world.simulate(part, worlds.NUMBER)
    assert not faults
    assert simulation.elapsed_ns < 1e9
    for rank in {0, 1, 2} - {broken}:
        with pytest.raises(mk.PeerLostError, match=f"rank {broken} has closed"):
            world.ranks[rank][0].synchronize()


def test_a_simulation_repeats(closed_behind):
    steps = []
    for _ in range(2):
        world = closed_behind(World("allgather_gemm", 2))
        steps.append([world.simulate(seed)[1].steps for seed in range(20)])
        world.close()
    assert steps[0] == steps[1]
