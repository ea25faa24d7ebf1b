"""`moe_dispatch_gemm` against its reference: any routing, any number of tokens, faulty data."""

import contextlib
import dataclasses
import json
import time

import numpy as np
import pytest
import routing
import simulations
import worlds
from routing import ExpertCase, expected, ids_of, tokens_of, weights_of
from shapes import DTYPES

import mkernel_cp as mk
from mkernel_cp import moe_plan, reference
from mkernel_cp.moe_plan import (
    Dispatch,
    MoeDispatchGemmPlan,
    dispatch_tile,
    plan_moe_dispatch_gemm,
)
from mkernel_cp.tiles import Gpu


def cases(world):
    """The edges; dtypes take turns, and so do routings."""
    made = []
    uneven = tuple((23, 0, 9, 1)[rank % 4] for rank in range(world))

    def add(name, tokens, h, n, experts, slots, **more):
        number = len(made) + world
        more.setdefault("dtype", DTYPES[number % 4])
        more.setdefault("routing", routing.ROUTINGS[number % len(routing.ROUTINGS)])
        made.append(ExpertCase(name, tuple(tokens), h, n, experts, slots, **more))

    for kind in routing.ROUTINGS:
        add("routing", (17,) * world, 33, 19, 2 * world + 1, 3, routing=kind)
    for dtype in DTYPES:
        add("dtype", uneven, 64, 40, 4, 2, dtype=dtype)
    for dtype in DTYPES[:2]:
        add("out dtype", uneven, 24, 16, 3, 2, dtype=dtype, out_dtype="float32")
    add("fewer experts than ranks", uneven, 10, 7, max(1, world - 1), 2)
    add("one expert", uneven, 10, 7, 1, 1)
    add("many experts", uneven, 6, 5, 37, 8)
    add("more slots than experts", uneven[::-1], 9, 4, 2, 5, routing="repeats")
    add("no experts", uneven, 5, 4, 0, 2)
    add("no slots", uneven, 5, 4, 3, 0)
    add("no tokens", (0,) * world, 5, 4, 3, 2)
    add("most experts without rows", (3,) * world, 5, 4, 25 * world, 2, routing="uniform")
    add("one token", (*(0,) * (world - 1), 1), 5, 4, world + 1, 1, routing="hot")
    add("H = 1", uneven, 1, 3, 3, 2)
    add("H = 0", uneven, 0, 3, 3, 2, routing="zipf")
    add("I = 0", uneven, 4, 0, 3, 2, routing="zipf")
    add("wide", (40,) * world, 200, 150, world, 2)
    add("many tiles", (150,) * world, 264, 392, world, 2, dtype="bfloat16", routing="zipf")
    return made


CASES = [case for world in worlds.SIZES for case in cases(world)]


def call(comm, case, seed, *, step=None, tokens=None, **keywords):
    """One call on poisoned memory."""
    x, ids = (blocks(case, seed, tokens)[comm.rank] for blocks in (tokens_of, ids_of))
    ids = ids.astype(np.int32 if seed % 2 else np.int64)
    x, ids, w = (worlds.put(comm, array) for array in (x, ids, weights_of(case, comm.rank)))
    worlds.poison(comm)
    if step is None:
        agreed = {"num_experts": case.experts, "dtype": case.out_dtype, **keywords}
        return mk.moe_dispatch_gemm(x, ids, w, comm=comm, **agreed)
    return step(x, ids, w, **keywords)


def assert_right(comm, case, seed, rows, layout, tokens=None):
    """Rows are right, and their order is exactly that of the reference."""
    right, route = expected(case, seed, comm.rank, tokens)
    np.testing.assert_array_equal(worlds.get(comm, layout.expert_offsets), route.expert_offsets)
    count = int(layout.count)
    for name in ("source_rank", "source_token", "source_slot"):
        found = worlds.get(comm, getattr(layout, name))
        np.testing.assert_array_equal(found[:count], getattr(route, name))
    right.assert_close(worlds.get(comm, layout.trim(rows)), f"rank {comm.rank}")


def call_and_wait(comm, step, *own, **keywords):
    """On GPUs a call does not wait to see whether something is wrong with its data."""
    step(*own, **keywords)
    comm.synchronize()


def most_rows(case):
    """Room for all, also where tokens name an expert twice."""
    return sum(case.tokens) * case.slots


@pytest.mark.operator
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_reference(case):
    def program(comm):
        for seed in (1, 2):
            rows, layout = call(comm, case, seed, capacity=most_rows(case))
            assert rows.shape == (most_rows(case), case.n)
            assert_right(comm, case, seed, rows, layout)

    worlds.run(case.world, program)


@pytest.mark.operator
@pytest.mark.parametrize("lanes", [1, 2, 3])
@pytest.mark.parametrize("size", worlds.SIZES)
def test_many_calls_of_one_plan_with_any_numbers_of_tokens(size, lanes, monkeypatch):
    """No word between hosts; inputs change under the peers' eyes as soon as a call returns."""
    if lanes > 1:
        monkeypatch.setattr(moe_plan, "_SORT_WORDS", (1, 1))  # a few tokens are sorted at a time
    case = ExpertCase("calls", (30,) * size, 9, 7, 5, 3, "float32")
    random = np.random.default_rng(size)
    kinds = [dataclasses.replace(case, routing=kind) for kind in routing.ROUTINGS]
    turns = [(kinds[seed % 7], tuple(random.integers(0, 31, size).tolist())) for seed in range(28)]

    def program(comm):
        rank, w = comm.rank, worlds.put(comm, weights_of(case, comm.rank))
        room = comm.empty((30, case.h), np.float32)
        worlds.chaos(comm, seed=11 * size + lanes, lanes=lanes, delay_ns=(500_000, 300_000))
        options = mk.Options((2, 2), worlds.small_tile(comm, (4, 5, 6)), 70)
        asked = {"max_tokens": 30, "capacity": 90 * size, "num_experts": 5, "options": options}
        first = worlds.put(comm, ids_of(case, 0)[rank])
        with mk.MoeDispatchGemm(room, first, w, comm=comm, **asked) as step:
            for seed, (turn, tokens) in enumerate(turns):
                x = room[: tokens[rank]]
                worlds.fill(comm, x, tokens_of(turn, seed, tokens)[rank])
                ids = worlds.put(comm, ids_of(turn, seed, tokens)[rank].copy())
                worlds.poison(comm)
                rows, layout = step(x, ids, w)
                worlds.fill(comm, room, np.nan)
                worlds.fill(comm, ids, -7)
                assert_right(comm, turn, seed, rows, layout, tokens)

    worlds.run(size, program)


@pytest.mark.operator
@pytest.mark.parametrize("size", worlds.SIZES)
def test_replayed_calls_equal_reference(size):
    """On GPUs calls are captured once; tokens and routing change, and other calls come between."""
    case = ExpertCase("graph", (9, 5, 0, 7)[:size], 8, 6, 5, 2, "float32")
    kinds = [dataclasses.replace(case, routing=kind) for kind in routing.ROUTINGS]

    def program(comm):
        with worlds.stream(comm):
            rank, w = comm.rank, worlds.put(comm, weights_of(case, comm.rank))
            sets = [
                (comm.zeros((case.tokens[rank], 8), np.float32), worlds.put(comm, ids.copy()))
                for ids in (ids_of(case, 0)[rank], ids_of(case, 1)[rank])
            ]
            asked = {"num_experts": 5, "capacity": most_rows(case)}
            step = mk.MoeDispatchGemm(*sets[0], w, comm=comm, **asked)
            outs = [step(*own, w) for own in sets]

            def calls():
                for own, out in zip(sets, outs, strict=True):
                    step(*own, w, out=out)

            calls()
            comm.synchronize()
            replay = worlds.replayer(comm, calls)
            for seed in range(0, 20, 2):
                for number, (x, ids) in enumerate(sets):
                    worlds.fill(comm, x, tokens_of(case, seed + number)[rank])
                    kind = kinds[(seed + number) % len(kinds)]
                    worlds.fill(comm, ids, ids_of(kind, seed + number)[rank])
                replay()
                results = [*outs, *([step(*sets[1], w)] if seed % 4 else [])]
                for number, result in enumerate(results):
                    own = seed + min(number, 1)
                    assert_right(comm, kinds[own % len(kinds)], own, *result)
            comm.synchronize()

    worlds.run(size, program)


@pytest.mark.operator(world=3)
@pytest.mark.parametrize("dtype", DTYPES)
def test_same_bits_over_repeats_and_splits(dtype):
    case = ExpertCase("bits", (20, 0, 31), 24, 17, 7, 3, dtype)

    def program(comm):
        more = [] if comm._runtime.machine.gpu else [(2, 8), (0, 2)]
        splits = [None, (1, 1), (3, 1), (1, 3), *more]
        found = set()
        for option in [split and mk.Options(split, chunk_bytes=100) for split in splits]:
            for _ in range(2):
                rows, layout = call(comm, case, 4, options=option)
                assert_right(comm, case, 4, rows, layout)
                found.add(worlds.get(comm, layout.trim(rows)).tobytes())
        return found

    assert all(len(bits) == 1 for bits in worlds.run(3, program))


@pytest.mark.operator(world=3)
@pytest.mark.parametrize("kind", ["one rank", "zipf", "none"])
def test_a_token_comes_once_however_many_experts_of_a_rank_it_chose(kind):
    case = ExpertCase("bytes", (20, 13, 5), 8, 4, 9, 4, "float32", kind)

    def program(comm):
        before = worlds.bytes_from_peers(comm)
        _, layout = call(comm, case, 1)
        count = int(layout.count)
        sources, tokens = (
            worlds.get(comm, array)[:count].tolist()
            for array in (layout.source_rank, layout.source_token)
        )
        pairs = set(zip(sources, tokens, strict=True))
        came = sum(source != comm.rank for source, _ in pairs)
        assert worlds.bytes_from_peers(comm) - before == came * case.h * 4
        return came

    came = worlds.run(3, program)
    assert (sum(came) > 0) == (kind != "none")
    assert kind != "one rank" or came == [0, 0, 33]


def test_nothing_comes_to_ranks_without_experts():
    """Nor do those of their agents bring any that bring the first tokens."""
    case = ExpertCase("none", (9,) * 8, 8, 4, 1, 1, "float32", "one expert")

    def main(mpi):
        with mk.Communicator(mpi) as comm:
            own = tokens_of(case, 1)[comm.rank], ids_of(case, 1)[comm.rank]
            step = mk.MoeDispatchGemm(
                *(*own, weights_of(case, comm.rank)),
                comm=comm,
                num_experts=case.experts,
                options=mk.Options(split=(1, 16)),
            )
            assert step.plan.dispatch.first_chunks(step.plan.split) > 0
            for _ in range(2):  # tables hold something then
                step(*own, weights_of(case, comm.rank))
            return worlds.bytes_from_peers(comm)

    assert mk.LocalWorld(8).run(main) == [2 * 7 * 9 * 8 * 4, *[0] * 7]


@pytest.mark.operator(world=2)
def test_rows_behind_the_last_are_left_alone():
    case = ExpertCase("room", (6, 4), 5, 3, 4, 2, "float64")

    def program(comm):
        room = worlds.put(comm, np.full((2 * 40, 9), 7.0))
        out = room[::2, 6::-2][:, :3]
        rows, layout = call(comm, case, 1, capacity=40, out=(out, None))
        assert rows is out
        assert repr(layout) == (
            f"<DispatchLayout: up to 40 rows of 2 experts, {case.tokens[comm.rank]} tokens sent "
            f"of up to 6, 2 experts each, target {comm.target}>"
        )
        assert_right(comm, case, 1, rows, layout)
        count = int(layout.count)
        assert count < 40
        out[:count] = 7
        assert (worlds.get(comm, room) == 7).all()
        again = call(comm, case, 2, capacity=40, out=(out, layout))
        assert again[1] is layout
        assert_right(comm, case, 2, *again)

    worlds.run(2, program)


@pytest.mark.operator(world=3)
def test_operands_of_any_strides():
    case = ExpertCase("strides", (7, 9, 4), 6, 5, 4, 2, "float32")

    def program(comm):
        rank, n = comm.rank, case.tokens[comm.rank]
        x, ids, w = tokens_of(case, 3)[rank], ids_of(case, 3)[rank], weights_of(case, rank)
        shared = comm.empty((n, 11), np.float32)
        worlds.fill(comm, shared[:, 3:9], x)
        fields = np.zeros(x.shape, [("pad", "u1"), ("x", "f4")])
        fields["x"] = x
        uneven = np.zeros(w.shape, [("pad", "u1"), ("w", "f4")])
        uneven["w"] = w
        odd = np.zeros(ids.shape, [("pad", "u1"), ("i", "i8")])
        odd["i"] = ids
        forms = {
            "F order": (np.asfortranarray(x), np.asfortranarray(ids), np.asfortranarray(w)),
            "backward": (x[::-1].copy()[::-1], ids[:, ::-1].copy()[:, ::-1], w[::-1].copy()[::-1]),
            "spread": (np.repeat(x, 2, 1)[:, ::2], np.repeat(ids, 3, 0)[::3], w),
            "transposed": (x, ids, w.transpose(2, 0, 1).copy().transpose(1, 2, 0)),
            "uneven": (fields["x"], odd["i"], uneven["w"]),
        }
        if comm.target == "cuda":
            del forms["uneven"]  # CuPy has no such arrays
        forms = {name: [worlds.put(comm, x) for x in own] for name, own in forms.items()}
        forms["in place"] = (shared[:, 3:9], *forms["spread"][1:])
        for name, (x, ids, w) in forms.items():
            with mk.MoeDispatchGemm(x, ids, w, comm=comm, num_experts=4, max_tokens=9) as step:
                worlds.poison(comm)
                assert_right(comm, case, 3, *step(x, ids, w))
                in_place = step._params.message.operand.segment != comm._runtime.memory.arena.number
                assert in_place == (name == "in place")
        if comm.target == "host":  # an output that a kernel cannot step through
            rows = np.zeros((most_rows(case), 5), [("pad", "u1"), ("y", "f4")])["y"]
            assert_right(comm, case, 3, *call(comm, case, 3, out=(rows, None), capacity=len(rows)))

    worlds.run(3, program)


def test_what_is_not_finite_stays_in_its_row():
    case = ExpertCase("nan", (6, 6), 5, 4, 3, 2, "float32")
    x = [block.copy() for block in tokens_of(case, 1)]
    x[0][2, 3], x[1][4, 0] = np.nan, np.inf

    def program(comm):
        w = weights_of(case, comm.rank)
        own = x[comm.rank], ids_of(case, 1)[comm.rank]
        rows, layout = mk.moe_dispatch_gemm(*own, w, comm=comm, num_experts=3)
        right, _ = reference.moe_dispatch_gemm(x, ids_of(case, 1), w, comm.rank, 3)
        right.assert_close(layout.trim(rows))

    worlds.run(2, program)


# --- data that are wrong --------------------------------------------------------------------------


def faulty(kind, x, ids, rank):
    """Tokens and ids of a rank, with a fault that all ranks are to hear of."""
    ids = ids.copy()
    if kind == "id" and rank == 1:
        ids[4, 1], ids[5, 0] = 5, -9
    elif kind == "negative id" and rank == 2:
        ids[0, 2] = -2
    elif kind == "capacity":
        ids[:, 0] = 0
    elif kind == "tokens" and rank == 2:
        x, ids = (np.tile(block, (2, 1))[:12] for block in (x, ids))
    return x, ids


FAULTS = {
    "id": (ValueError, r"rank 1 passes topk_idx\[4, 1\] = 5, which is no expert"),
    "negative id": (ValueError, r"rank 2 passes topk_idx\[0, 2\] = -2"),
    "capacity": (mk.CapacityError, r"rank 0 would get \d+ rows, and has room for 20: .*capacity="),
    "tokens": (mk.CapacityError, r"rank 2 passes 12 tokens, .* at most 9: .*max_tokens="),
}


@pytest.mark.operator(world=3)
@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("kind", FAULTS)
def test_faults_of_data_are_told_on_all_ranks_and_nothing_is_written(kind, lanes):
    case = ExpertCase("faults", (7, 6, 8), 4, 3, 5, 3, "float32")
    error, text = FAULTS[kind]

    def program(comm):
        rank = comm.rank
        x, ids, w = tokens_of(case, 1)[rank], ids_of(case, 1)[rank], weights_of(case, rank)
        few = np.where(np.arange(3) == rank, ids, -1)  # one expert a token
        wrong = [worlds.put(comm, array) for array in faulty(kind, x, ids, rank)]
        x, ids, few, w = (worlds.put(comm, array) for array in (x, ids, few, w))
        worlds.chaos(comm, seed=lanes, lanes=lanes, delay_ns=(200_000, 200_000))
        out = worlds.put(comm, np.full((20, 3), 7.0, np.float32))
        ask = {"num_experts": 5, "max_tokens": 9, "capacity": 20}
        with mk.MoeDispatchGemm(x, ids, w, comm=comm, **ask) as step:
            for _ in range(3):
                layout = step(x, few, w)[1]
                with pytest.raises(error, match=text) as caught:
                    call_and_wait(comm, step, *wrong, w, out=(out, layout))
                assert (worlds.get(comm, out) == 7).all()
                assert int(layout.count) == 0
                rows, layout = step(x, few, w)
                assert np.isfinite(worlds.get(comm, layout.trim(rows))).all()
                comm.synchronize()
        assert not comm.closed
        return str(caught.value)

    assert len(set(worlds.run(3, program))) == 1


def test_a_default_capacity_does_not_count_on_repeated_ids():
    def program(comm):
        x, w = np.ones((4, 2)), np.ones((1, 2, 3))
        ids = np.full((4, 2), [[0, 1]])
        rows, layout = mk.moe_dispatch_gemm(x, ids, w, comm=comm)
        assert rows.shape == (8, 3)
        assert int(layout.count) == 8
        np.testing.assert_array_equal(layout.trim(rows), 2.0)
        with pytest.raises(mk.CapacityError, match="rank 0 would get 16 rows, and has room for 8"):
            mk.moe_dispatch_gemm(x, np.zeros_like(ids), w, comm=comm)
        rows, layout = mk.moe_dispatch_gemm(x, 0 * ids, w, comm=comm, capacity=16)
        assert int(layout.count) == 16 * (comm.rank == 0)

    worlds.run(2, program)


def test_a_result_without_capacity_is_refused_where_memory_is_short():
    def program(comm):
        comm._runtime.machine.room = lambda: 1000
        x, ids, w = np.ones((4, 2)), np.zeros((4, 1), int), np.ones((1, 2, 9))
        with pytest.raises(ValueError, match=r"more than a quarter of the 1000 .* capacity="):
            mk.moe_dispatch_gemm(x, ids, w, comm=comm)
        del comm._runtime.machine.room
        mk.moe_dispatch_gemm(x, ids, w, comm=comm)

    worlds.run(2, program)


# --- plans ----------------------------------------------------------------------------------------


def dispatch(**changed):
    """What ranks agree on, for plans."""
    values = {
        "ranks": 3,
        "h": 16,
        "n": 10,
        "experts": 7,
        "slots": 2,
        "dtype": np.dtype("f4"),
        "out_dtype": np.dtype("f4"),
        "max_tokens": 20,
    }
    return Dispatch(**{**values, **changed})


def test_capacities():
    assert dispatch().experts_of == (3, 2, 2)
    assert dispatch(slots=1).capacities == (60, 60, 60)
    assert dispatch(experts=4, slots=3).capacities == (120, 60, 60)
    assert dispatch(experts=2).capacities == (60, 60, 0)
    assert dispatch(capacity=11).capacities == (11, 11, 11)


def test_compute_agents_bring_one_chunk_each_before_they_compute():
    """Those of the next peer are others'; on several nodes they would wait for the network."""
    asked = dispatch(chunk_bytes=150)
    assert (asked.chunks, asked.chunk_tokens) == (10, 2)
    firsts = [asked.first_chunks(split) for split in ((0, 9), (1, 1), (1, 5), (2, 9), (3, 40))]
    assert firsts == [0, 0, 2, 4, 10]
    assert dispatch(ranks=1).first_chunks((1, 9)) == 0
    assert dispatch(nodes=(2, 1)).first_chunks((1, 9)) == 0


def test_plans_are_saved_and_choose_the_same_again(tmp_path):
    options = mk.Options((2, 3), (4, 5, 16), 500)
    asked = dispatch(chunk_bytes=500)
    plan = plan_moe_dispatch_gemm(1, asked, dispatch_tile(1, asked, options, None), options)
    assert plan.dispatch.chunk_tokens == 7
    assert plan.dispatch.chunks == 3
    plan.save(tmp_path / "plan.json")
    again = MoeDispatchGemmPlan.load(tmp_path / "plan.json")
    assert again == plan
    tile = dispatch_tile(1, again.dispatch, again.options, None)
    assert plan_moe_dispatch_gemm(1, again.dispatch, tile, again.options) == plan
    for part in ("rank 1 of 3", "2 of 7 experts", "2 movers", "chunks of 7", "120 rows"):
        assert part in plan.explain()
    assert plan.memory > 3 * 20 * 16 * 4
    assert "by 1 mover," in dataclasses.replace(plan, split=(1, 3)).explain()


def test_plans_for_gpus():
    gpu, half = Gpu("sm_90a", 132, 227 << 10), np.dtype("f2")
    large = {"ranks": 4, "h": 7168, "n": 2048, "experts": 256, "slots": 8, "max_tokens": 8192}
    asked, none = dispatch(**large, dtype=half, out_dtype=half), mk.Options()
    tile = dispatch_tile(0, asked, none, gpu)
    plan = plan_moe_dispatch_gemm(0, asked, tile, none, 132)
    assert (plan.target, plan.engine) == ("cuda", "hopper")
    assert (plan.tile, plan.split) == ((128, 256, 512), (12, 120))
    assert "engine hopper" in plan.explain()
    assert "by 12 movers, the first 40 of each peer by compute agents" in plan.explain()
    assert asked.sort_bytes < plan.shared_bytes <= gpu.shared_bytes
    assert plan_moe_dispatch_gemm(0, dispatch(ranks=1), tile, none, 132).split[0] > 0
    again = dispatch_tile(0, plan.dispatch, plan.options, gpu)
    assert plan_moe_dispatch_gemm(0, plan.dispatch, again, plan.options, 132) == plan
    for other in (
        {"n": 2044},
        {"h": 7164},
        {"dtype": np.dtype("f4"), "out_dtype": np.dtype("f4")},
    ):
        asked_of_it = dispatch(**{**large, "dtype": half, "out_dtype": half, **other})
        tile_of_it = dispatch_tile(0, asked_of_it, none, gpu)
        plan = plan_moe_dispatch_gemm(0, asked_of_it, tile_of_it, none, 132)
        assert (plan.engine, plan.split) == ("portable", (20, 112))
    few = dispatch(**{**large, "max_tokens": 16, "n": 64}, dtype=half, out_dtype=half)
    assert dispatch_tile(0, few, none, gpu).tile[1] == 128
    assert (tile.row_step, dispatch_tile(0, few, none, gpu).row_step) == (16, 16)
    taken = dispatch_tile(0, asked, mk.Options(tile=(128, 128, 64)), gpu)
    assert (taken.engine, taken.tile, taken.row_step) == ("hopper", (128, 128, 64), 16)
    for tokens, tile_of_it in ((32768, (128, 256, 512)), (16, (128, 256, 64))):
        experts = dispatch(**{**large, "max_tokens": tokens}, dtype=half)
        taken = dispatch_tile(0, experts, mk.Options(tile=tile_of_it), gpu)
        assert (taken.tile, taken.row_step) == (tile_of_it, 16)
    for wrong in ((64, 128, 64), (128, 256, 32), (128, 128, 1), (256, 256, 512)):
        with pytest.raises(ValueError, match=r"takes \(128, 256, k\) or \(128, 128, k\), where k"):
            dispatch_tile(0, asked, mk.Options(tile=wrong), gpu)
    other = dispatch(**{**large, "n": 2044}, dtype=half, out_dtype=half)
    assert dispatch_tile(0, other, mk.Options(tile=(64, 128, 64)), gpu).tile == (64, 128, 64)
    with pytest.raises(ValueError, match="use at least one mover"):
        plan_moe_dispatch_gemm(0, asked, tile, mk.Options((0, 8)), 132)
    with pytest.raises(ValueError, match="9000 experts: to sort by them takes"):
        dispatch_tile(0, dispatch(experts=9000), none, gpu)


def test_the_most_tokens_are_those_of_the_first_call():
    def program(comm):
        x, w = np.ones((9, 2)), np.ones((1, 2, 3))
        own = x[: 4 + comm.rank], np.zeros((4 + comm.rank, 1), int)
        with mk.MoeDispatchGemm(*own, w, comm=comm) as step:
            assert step.plan.max_tokens == 6
            step(x[:6], np.zeros((6, 1), int), w)
            with pytest.raises(mk.CapacityError, match="rank 1 passes 7 tokens"):
                step(x[: 6 + (comm.rank == 1)], np.zeros((6 + (comm.rank == 1), 1), int), w)

    worlds.run(3, program)


def test_a_larger_problem_moves_the_arena_under_earlier_plans():
    small = ExpertCase("small", (5, 7), 4, 3, 3, 2, "float32")
    large = ExpertCase("large", (150, 170), 40, 30, 6, 3, "float32")

    def program(comm):
        for case in (small, large, small):
            assert_right(comm, case, 1, *call(comm, case, 1))
            out = mk.allgather_gemm(np.full((3, 5), 2.0), np.eye(5), comm=comm)
            np.testing.assert_array_equal(out, 2.0)

    worlds.run(2, program)


# --- wrong arguments and failures -----------------------------------------------------------------

X, IDS, W = np.ones((4, 6)), np.arange(8).reshape(4, 2) % 2, np.ones((2, 6, 3))
WRONG = {
    "a list": (TypeError, "ndarray", {"x": [1.0]}),
    "a vector": (ValueError, "2 dimensions", {"x": X[0]}),
    "integers": (TypeError, "bfloat16, float16", {"x": X.astype(int)}),
    "mixed": (TypeError, "same for both", {"w": W.astype("f4")}),
    "w of two dimensions": (ValueError, r"\(experts, H, I\)", {"w": W[0]}),
    "H differs": (ValueError, "as many rows", {"w": W[:, :5]}),
    "fractional ids": (TypeError, "int32 or int64", {"topk_idx": IDS.astype(float)}),
    "ids of other tokens": (ValueError, "each of the 4 tokens", {"topk_idx": IDS[:3]}),
    "a vector of ids": (ValueError, r"\(tokens, k\)", {"topk_idx": IDS[:, 0]}),
    "other experts": (ValueError, "num_experts=7: rank .* passes 2", {"num_experts": 7}),
    "negative max_tokens": (ValueError, "at least 0", {"max_tokens": -1}),
    "fractional capacity": (TypeError, "integer", {"capacity": 1.5}),
    "one out": (TypeError, "a pair", {"out": np.ones((16, 3))}),
    "no layout": (TypeError, "DispatchLayout", {"out": (np.ones((16, 3)), 1)}),
    "out of another shape": (ValueError, "the result has", {"out": (np.ones((16, 4)), None)}),
    "out of another dtype": (TypeError, "dtype=", {"out": (np.ones((16, 3), "f4"), None)}),
    "dtype": (TypeError, "not allowed for float64", {"dtype": "f4"}),
    "tf32": (TypeError, "as it is", {"options": mk.Options(tf32=True)}),
    "options": (TypeError, "Options", {"options": {"tile": 3}}),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_on_all_ranks_leave_the_communicator_usable(name):
    kind, text, changed = WRONG[name]

    def program(comm):
        with pytest.raises(kind, match=text):
            mk.moe_dispatch_gemm(**{"x": X, "topk_idx": IDS, "w": W, "comm": comm, **changed})
        rows, layout = mk.moe_dispatch_gemm(X, IDS, W, comm=comm)
        np.testing.assert_array_equal(layout.trim(rows), 6.0)

    worlds.run(2, program)


def test_a_plan_refuses_other_operands_and_calls_after_its_end():
    def program(comm):
        with mk.MoeDispatchGemm(X, IDS, W, comm=comm) as step:
            for other in ((X[:, :5], IDS, W), (X, IDS, W[:1]), (X.astype("f4"), IDS, W)):
                with pytest.raises(ValueError, match="this plan is for"):
                    step(*other)
            with pytest.raises(ValueError, match="2 experts a token"):
                step(X, IDS[:, :1], W)
            room = np.ones((8, 6))
            with pytest.raises(ValueError, match=r"out\[0\] overlaps x"):
                step(room[:4], IDS, W, out=(room[:, :3], None))
            with pytest.raises(ValueError, match=r"out\[0\] has shape \(8, 6\)"):
                mk.MoeDispatchGemm(X, IDS, W, comm=comm, out=(room, None))
        with pytest.raises(ValueError, match="closed"):
            step(X, IDS, W)

    worlds.run(1, program)


DIFFERENT = {
    "H": {"x": X[:, :5], "w": W[:, :5]},
    "I": {"w": W[..., :2]},
    "slots": {"topk_idx": IDS[:, :1]},
    "experts": {"w": W[:1]},
    "dtype": {"x": X.astype("f4"), "w": W.astype("f4")},
    "max_tokens": {"max_tokens": 9},
    "capacity": {"capacity": 30},
    "chunks": {"options": mk.Options(chunk_bytes=100)},
}


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("name", DIFFERENT)
def test_different_calls_are_told_on_all_ranks(name, warm):
    same = {"x": X, "topk_idx": IDS, "w": W}

    def main(mpi):
        with contextlib.suppress(mk.Error), mk.Communicator(mpi) as comm:
            other = {**same, **DIFFERENT[name]}
            if warm:
                for asked in (same, other):
                    mk.moe_dispatch_gemm(comm=comm, **asked)
            with pytest.raises(mk.ArgumentMismatchError, match=r"rank \d calls moe_dispatch_gemm"):
                mk.moe_dispatch_gemm(comm=comm, **(other if comm.rank == 1 else same))
            assert comm.closed

    mk.LocalWorld(3).run(main)


def test_unequal_numbers_of_experts_are_named():
    def main(mpi):
        with contextlib.suppress(mk.Error), mk.Communicator(mpi) as comm:
            w = W[: 2 - comm.rank]
            with pytest.raises(mk.ArgumentMismatchError, match="each passes their sum in num_exp"):
                mk.moe_dispatch_gemm(X, IDS, w, comm=comm)

    mk.LocalWorld(2).run(main)


def outcomes(program, **options):
    """What three ranks raised, and their outputs."""

    def main(mpi):
        comm = mk.Communicator(mpi, **options)
        x, w = np.ones((9, 8)), np.ones((2, 8, 4))
        ids = np.arange(18).reshape(9, 2) % 6
        out = np.full((30, 4), 7.0)
        plan = mk.Options((2, 2), (4, 2, 8))
        step = mk.MoeDispatchGemm(x, ids, w, comm=comm, capacity=30, options=plan)
        _, layout = step(x, ids, w)
        try:
            program(comm, lambda: step(x, ids, w, out=(out, layout)))
        except mk.Error as error:
            return error, out, layout
        finally:
            with contextlib.suppress(mk.Error):
                comm.close()
        return None, out, layout

    return mk.LocalWorld(3).run(main)


@pytest.mark.parametrize("missing", range(3))
def test_a_rank_that_never_calls_ends_in_the_deadline_and_leaves_nan(missing):
    def program(comm, again):
        if comm.rank != missing:
            again()
        else:
            time.sleep(0.4)
            comm.synchronize()

    for rank, (error, out, layout) in enumerate(outcomes(program, entry_timeout=0.2)):
        assert isinstance(error, mk.TimeoutError)
        assert f"rank {missing}" in str(error).lower()
        if rank == missing:
            assert (out == 7).all()
        else:
            assert np.isnan(out).all()
            assert int(layout.count) == 0


def test_a_rank_that_refuses_alone_is_quoted_by_the_others():
    def program(comm, again):
        if comm.rank == 2:
            with pytest.raises(ValueError, match="at least 0"):
                mk.moe_dispatch_gemm(X, IDS, W, comm=comm, capacity=-1)
            raise mk.Error("refused")
        again()

    results = [error for error, *_ in outcomes(program)]
    assert str(results[2]) == "refused"
    for error in results[:2]:
        assert isinstance(error, mk.PeerError)
        assert "rank 2 raised instead of calling: ValueError" in str(error)


def test_a_late_rank_is_waited_for():
    def program(comm, again):
        time.sleep(0.2 * (comm.rank == 1))
        rows, layout = again()
        np.testing.assert_array_equal(layout.trim(rows), 8.0)

    assert all(error is None for error, *_ in outcomes(program, progress_timeout=0.1))


def test_a_trace_tells_of_chunks_and_tiles(tmp_path):
    case = ExpertCase("trace", (6, 6), 5, 4, 2, 1, "float32", "one rank")

    def program(comm):
        with mk.trace(tmp_path / "trace.json"):
            call(comm, case, 1, options=mk.Options(chunk_bytes=40))

    worlds.run(2, program)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [(event["pid"], event["cat"], event["args"]) for event in events if event["ph"] == "X"]
    copied = [args for pid, kind, args in spans if kind == "copy" and pid == 1]
    assert [args["bytes"] for args in copied] == [40, 40, 40]
    assert {args["source"] for args in copied} == {0}
    assert any(kind == "compute" and pid == 1 for pid, kind, _ in spans)
    assert any(args.get("for") == "routes" for *_, args in spans)


# --- interleavings --------------------------------------------------------------------------------

UNTOUCHED = 77.0


class Simulated(simulations.World):
    launches = 4

    def __init__(self, kind, lanes, split, **options):
        self.case = ExpertCase("turns", (3, 0, 4), 3, 2, 5, 2, "float32", kind)
        self.plan = mk.Options(split, (2, 1, 2), 12)
        super().__init__(lanes, **options)

    def prepare(self, comm):
        x = comm.empty((self.case.tokens[comm.rank], 3), np.float32)
        ids = np.zeros((len(x), 2), int)
        w = weights_of(self.case, comm.rank)
        asked = {"num_experts": 5, "capacity": 16, "options": self.plan}
        step = mk.MoeDispatchGemm(x, ids, w, comm=comm, **asked)
        out = np.empty((16, 2), np.float32)
        layout = mk.DispatchLayout(step.plan, comm._runtime.machine)
        return step, (x, ids, layout), out, step.prepare(x, ids, w, (out, layout))

    def is_right(self, rank, launch, out, ended_well):
        """All of it, or what there is of it; the third launch has an id that is none."""
        _, _, (*_, layout), _, _ = self.ranks[rank]
        if launch == 2:
            return (out == UNTOUCHED).all() or (not ended_well and np.isnan(out).all())
        right, route = expected(self.case, launch, rank)
        count = len(right.value)
        close = np.isclose(out[:count], right.value, atol=1e-5)
        if not ended_well:
            rest = out[count:]
            return (close | np.isnan(out[:count])).all() and (
                np.isnan(rest) | (rest == UNTOUCHED)
            ).all()
        same = [
            (getattr(layout, name)[:count] == getattr(route, name)).all()
            for name in ("source_rank", "source_token", "source_slot")
        ]
        return close.all() and (out[count:] == UNTOUCHED).all() and all(same)

    def set_up(self, rank, launch):
        _, _, (x, ids, _), out, _ = self.ranks[rank]
        out[...], x[...], ids[...] = UNTOUCHED, np.nan, -7
        if launch is None:
            return
        x[...], ids[...] = (of(self.case, launch)[rank] for of in (tokens_of, ids_of))
        if launch == 2 and rank == 0:
            ids[2, 1] = 99


@pytest.mark.parametrize(
    ("kind", "lanes", "split"),
    [
        ("uniform", 1, (2, 2)),
        ("zipf", 1, (1, 2)),
        ("one rank", 1, (2, 1)),
        ("repeats", 1, (0, 2)),
        ("hot", 2, (1, 1)),
    ],
)
def test_every_interleaving_gives_the_right_result(closed_behind, kind, lanes, split):
    world = closed_behind(Simulated(kind, lanes, split))
    simulations.assert_right(world, 200 // lanes)


@pytest.mark.parametrize("part", range(20))
def test_a_stopped_rank_ends_all_waits_at_a_deadline(closed_behind, part):
    world = closed_behind(Simulated("uniform", 1, (2, 2)))
    simulations.assert_all_waits_end(world, part, part / 24)
