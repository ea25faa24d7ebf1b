"""`moe_layer` against its reference: a dispatch, two products and a combination in one launch."""

import contextlib
import dataclasses
import time

import numpy as np
import pytest
import routing
import simulations
import worlds
from routing import (
    ExpertCase,
    expected_layer,
    ids_of,
    layer_weights_of,
    router_weights_of,
    tokens_of,
)
from shapes import DTYPES
from test_moe_dispatch_gemm import call_and_wait

import mkernel_cp as mk
from mkernel_cp.moe_plan import ACTIVATIONS, Layer, MoeLayerPlan, layer_tile, plan_moe_layer
from mkernel_cp.tiles import Gpu, HostTile

# Kernels take long to compile, and each combination is one.
ACTIVATION_OF = dict(zip(DTYPES, ACTIVATIONS[:3] + ACTIVATIONS[:1], strict=True))


def cases(world):
    """The edges; dtypes and routings take turns, and each dtype has an activation."""
    made = []
    uneven = tuple((23, 0, 9, 1)[rank % 4] for rank in range(world))

    def add(name, tokens, h, n, columns, experts, slots, **more):
        number = len(made) + world
        more.setdefault("dtype", DTYPES[number % 4])
        more.setdefault("routing", routing.ROUTINGS[number % len(routing.ROUTINGS)])
        more.setdefault("activation", ACTIVATION_OF[more["dtype"]])
        made.append(ExpertCase(name, tuple(tokens), h, n, experts, slots, columns=columns, **more))

    for kind in routing.ROUTINGS if world == 3 else ("zipf",):
        add("routing", (17,) * world, 33, 19, 21, 2 * world + 1, 3, routing=kind)
    for dtype in DTYPES:
        add("dtype", uneven, 72, 40, 64, 4, 2, dtype=dtype)
    if world == 3:
        for activation in ACTIVATIONS:
            add("activation", uneven, 40, 30, 20, 4, 2, dtype="float32", activation=activation)
    add("fewer experts than ranks", uneven, 10, 7, 10, max(1, world - 1), 2)
    add("more slots than experts", uneven[::-1], 9, 4, 5, 2, 5, routing="repeats")
    add("no experts", uneven, 5, 4, 3, 0, 2)
    add("no slots", uneven, 5, 4, 3, 3, 0)
    add("no tokens", (0,) * world, 5, 4, 3, 3, 2)
    add("one token", (*(0,) * (world - 1), 1), 5, 4, 3, world + 1, 1, routing="hot")
    add("ones", uneven, 1, 1, 1, 3, 2)
    add("H = 0", uneven, 0, 3, 4, 3, 2, routing="zipf")
    add("I = 0", uneven, 4, 0, 4, 3, 2, routing="zipf")
    add("N = 0", uneven, 4, 3, 0, 3, 2, routing="zipf")
    add("wide", (40,) * world, 100, 150, 130, world, 2)
    add("many tiles", (90,) * world, 136, 264, 328, world, 2, dtype="bfloat16", routing="zipf")
    return made


CASES = [case for world in worlds.SIZES for case in cases(world)]


def own_operands(comm, case, seed, tokens=None):
    """The operands of one rank."""
    blocks = (
        tokens_of(case, seed, tokens),
        ids_of(case, seed, tokens),
        router_weights_of(case, seed, tokens),
        *layer_weights_of(case),
    )
    return tuple(worlds.put(comm, x[comm.rank]) for x in blocks)


def poison(comm, step=None):
    """NaN wherever nothing has come to be yet."""
    worlds.poison(comm)
    for plan in [step] if step else comm._runtime.plans.values():
        for name in ("hidden", "made", "stash") if isinstance(plan, mk.MoeLayer) else ():
            comm._runtime.machine.fill(plan._room[name], np.nan)


def call(comm, case, seed, **keywords):
    """One call on poisoned memory."""
    asked = {"num_experts": case.experts, "activation": case.activation}
    asked["capacity"] = sum(case.tokens) * case.slots
    out = worlds.nan_filled((case.tokens[comm.rank], case.columns), case.dtype)
    out = worlds.put(comm, out)
    poison(comm)
    own = own_operands(comm, case, seed)
    assert mk.moe_layer(*own, comm=comm, out=out, **{**asked, **keywords}) is out
    return worlds.get(comm, out)


@pytest.mark.operator
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_reference(case):
    def program(comm):
        for seed in (1, 2):
            out = call(comm, case, seed)
            expected_layer(case, seed, comm.rank).assert_close(out, f"rank {comm.rank}")

    worlds.run(case.world, program)


@pytest.mark.operator
@pytest.mark.parametrize("lanes", [1, 2, 3])
@pytest.mark.parametrize("size", worlds.SIZES)
def test_many_calls_of_one_plan_with_any_numbers_of_tokens(size, lanes):
    """Inputs change under the peers' eyes as soon as a call returns."""
    activation = ACTIVATIONS[lanes]
    case = ExpertCase("calls", (30,) * size, 9, 7, 5, 3, "float32", "zipf", None, activation, 6)
    random = np.random.default_rng(size)
    kinds = [dataclasses.replace(case, routing=kind) for kind in routing.ROUTINGS]
    turns = [(kinds[seed % 7], tuple(random.integers(0, 31, size).tolist())) for seed in range(14)]

    def program(comm):
        rank = comm.rank
        room = comm.empty((30, case.h), np.float32)
        worlds.chaos(comm, seed=11 * size + lanes, lanes=lanes, delay_ns=(500_000, 300_000))
        options = mk.Options((2, 2), worlds.small_tile(comm, (4, 5, 6)), 70)
        asked = {"max_tokens": 30, "capacity": 90 * size, "num_experts": 5, "options": options}
        first = own_operands(comm, case, 0)
        with mk.MoeLayer(*first, comm=comm, activation=activation, **asked) as step:
            for seed, (turn, tokens) in enumerate(turns):
                x, ids, weights, w1, w2 = own_operands(comm, turn, seed, tokens)
                shared = room[: len(x)]
                comm._runtime.machine.copy(shared, x)
                ids, weights = ids.copy(), weights.copy()
                poison(comm, step)
                out = step(shared, ids, weights, w1, w2)
                for array, value in ((room, np.nan), (ids, -7), (weights, np.nan)):
                    worlds.fill(comm, array, value)
                right = expected_layer(turn, seed, rank, None, tokens)
                right.assert_close(worlds.get(comm, out), f"call {seed} on rank {rank}")

    worlds.run(size, program)


@pytest.mark.parametrize("size", worlds.SIZES)
def test_many_calls_whose_tiles_have_fewer_rows(monkeypatch, size):
    """As plans of one engine have it: those of an expert are of one height."""
    monkeypatch.setattr(HostTile, "row_step", 1)
    test_many_calls_of_one_plan_with_any_numbers_of_tokens(size, 2)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_same_bits_over_repeats_and_splits_and_as_in_three_calls(dtype):
    case = ExpertCase("bits", (20, 0, 31), 24, 17, 7, 3, dtype, "zipf", None, None, 19)

    def program(comm):
        splits = [None, (1, 1), (3, 2), (2, 5), (0, 2)]
        options = [split and mk.Options(split, chunk_bytes=100) for split in splits]
        found = {call(comm, case, 4, options=option).tobytes() for option in options * 2}
        x, ids, weights, w1, w2 = own_operands(comm, case, 4)
        hidden, layout = mk.moe_dispatch_gemm(x, ids, w1, comm=comm, num_experts=7)
        rows = layout.trim(hidden)
        made = np.zeros((len(rows), case.columns), dtype)
        for expert, factor in enumerate(w2):
            own = slice(*layout.expert_offsets[expert : expert + 2])
            local = mk.LocalWorld(1).run(lambda mpi: _alone(mpi, rows[own], factor))  # noqa: B023
            made[own] = local[0]
        found.add(mk.moe_combine(made, weights, layout, comm=comm).tobytes())
        return found

    assert all(len(bits) == 1 for bits in worlds.run(3, program))


def _alone(mpi, a, b):
    """A product on one rank: in the order of k, as all are."""
    with mk.Communicator(mpi) as comm:
        return mk.allgather_gemm(a, b, comm=comm)


@pytest.mark.operator
@pytest.mark.parametrize("size", worlds.SIZES)
def test_replayed_calls_equal_reference(size):
    """On GPUs calls are captured once; tokens and routing change, and other calls come between."""
    tokens = (9, 5, 0, 7)[:size]
    case = ExpertCase("graph", tokens, 8, 6, 5, 2, "float32", "zipf", None, "silu", 5)
    kinds = [dataclasses.replace(case, routing=kind) for kind in routing.ROUTINGS]

    def program(comm):
        with worlds.stream(comm):
            rank = comm.rank
            *own, w1, w2 = own_operands(comm, case, 0)
            own = [comm.asarray(own[0]), *(array.copy() for array in own[1:])]
            out = worlds.put(comm, np.zeros((len(own[0]), 5), np.float32))
            asked = {"num_experts": 5, "activation": "silu", "capacity": sum(tokens) * 2}
            step = mk.MoeLayer(*own, w1, w2, comm=comm, **asked)

            def calls():
                for _ in range(2):
                    step(*own, w1, w2, out=out)

            calls()
            comm.synchronize()
            replay = worlds.replayer(comm, calls)
            for seed in range(10):
                kind = kinds[seed % len(kinds)]
                blocks = tokens_of(case, seed), ids_of(kind, seed), router_weights_of(kind, seed)
                for array, block in zip(own, blocks, strict=True):
                    worlds.fill(comm, array, block[rank])
                replay()
                right = expected_layer(kind, seed, rank)
                right.assert_close(worlds.get(comm, out))
                if seed % 4 == 2:
                    right.assert_close(worlds.get(comm, step(*own, w1, w2)))
            comm.synchronize()

    worlds.run(size, program)


@pytest.mark.operator(world=3)
@pytest.mark.parametrize("transfer", [None, "float32"])
def test_tokens_and_sums_cross_links_once(transfer):
    case = ExpertCase("bytes", (20, 13, 5), 8, 4, 6, 4, "bfloat16", "zipf", None, "swiglu", 10)

    def program(comm):
        before = worlds.bytes_from_peers(comm)
        out = call(comm, case, 1, options=mk.Options(transfer_dtype=transfer))
        expected_layer(case, 1, comm.rank, transfer).assert_close(out)
        ranks_of = [ids // 2 for ids in ids_of(case, 1)]  # two experts a rank, and -1 for none
        came = sum(
            (block == comm.rank).any(axis=1).sum()
            for rank, block in enumerate(ranks_of)
            if rank != comm.rank
        )
        pairs = sum(len(set(row) - {-1, comm.rank}) for row in ranks_of[comm.rank].tolist())
        size = np.dtype(transfer or "bfloat16").itemsize
        moved = worlds.bytes_from_peers(comm) - before
        assert moved == came * case.h * 2 + pairs * case.columns * size

    worlds.run(3, program)


@pytest.mark.operator(world=3)
def test_operands_of_any_strides():
    case = ExpertCase("strides", (7, 9, 4), 6, 5, 4, 2, "float32", "zipf", None, "swiglu", 3)

    def program(comm):
        x, ids, weights, w1, w2 = (worlds.get(comm, x) for x in own_operands(comm, case, 3))
        right = expected_layer(case, 3, comm.rank)
        other = np.zeros(w1.shape, [("pad", "u1"), ("w", "f4")])["w"]
        other[...] = w1
        out = np.zeros((len(x), 3), [("pad", "u1"), ("y", "f4")])["y"]
        whole = worlds.put(comm, np.full((2 * len(x), 7), 7.0, np.float32))
        asked = {"comm": comm, "num_experts": 4}
        turned = w2.transpose(2, 1, 0).copy().transpose(2, 1, 0)
        if comm.target == "cuda":
            out, other = None, w1[::-1].copy()[::-1]  # CuPy has no uneven strides
        spread = whole[::2, 6:0:-2]
        for target, own in (
            (None, [np.asfortranarray(y) for y in (x, ids, weights, w1, w2)]),
            (spread, [y[::-1].copy()[::-1] for y in (x, ids, weights, w1, w2)]),
            (out, (x, ids, weights, other, turned)),
        ):
            made = mk.moe_layer(*(worlds.put(comm, y) for y in own), out=target, **asked)
            right.assert_close(np.array(worlds.get(comm, made)))
        spread[...] = 7
        assert (worlds.get(comm, whole) == 7).all()

    worlds.run(3, program)


@pytest.mark.operator(world=3)
def test_faults_of_data_are_told_on_all_ranks_and_nothing_is_written():
    case = ExpertCase("faults", (7, 6, 8), 4, 3, 5, 3, "float32", "zipf", None, "silu", 6)

    def program(comm):
        x, ids, weights, w1, w2 = own_operands(comm, case, 1)
        asked = {"num_experts": 5, "activation": "silu", "max_tokens": 9, "capacity": 40}
        out = worlds.put(comm, np.full((len(x), 6), 7.0, np.float32))
        twice = [
            worlds.put(comm, np.tile(worlds.get(comm, y), (2, 1))[:12]) for y in (x, ids, weights)
        ]
        none = worlds.get(comm, ids)
        none = worlds.put(comm, np.where(none == none[2, 0], 5, none))
        with mk.MoeLayer(x, ids, weights, w1, w2, comm=comm, **asked) as step:
            for error, text, own in (
                (ValueError, r"\[2, 0\] = 5", (x, none, weights)),
                (mk.CapacityError, "rank 0 would get 63 rows", (x, ids * 0, weights)),
                (
                    mk.CapacityError,
                    "rank 1 passes 12",
                    twice if comm.rank == 1 else (x, ids, weights),
                ),
            ):
                if error is ValueError and comm.rank != 0:
                    own = (x, ids, weights)
                room = out if len(own[0]) == len(x) else None
                text = text.replace("2, 0", r"\d, \d")
                with pytest.raises(error, match=text):
                    call_and_wait(comm, step, *own, w1, w2, out=room)
                assert (worlds.get(comm, out) == 7).all()
                right = expected_layer(case, 1, comm.rank)
                right.assert_close(worlds.get(comm, step(x, ids, weights, w1, w2)))

    worlds.run(3, program)


def test_a_layer_without_capacity_is_refused_where_memory_is_short():
    def program(comm):
        comm._runtime.machine.room = lambda: 1000
        with pytest.raises(ValueError, match=r"more than a quarter of the 1000 .* capacity="):
            mk.moe_layer(X, IDS, WEIGHTS, W1, W2, comm=comm)
        del comm._runtime.machine.room
        mk.moe_layer(X, IDS, WEIGHTS, W1, W2, comm=comm)

    worlds.run(2, program)


# --- plans ----------------------------------------------------------------------------------------


def test_plans_are_saved_and_choose_the_same_again(tmp_path):
    types = np.dtype("f2"), np.dtype("f4")
    agreed = Layer(3, 16, 24, 10, 7, 2, *types, "gelu", 20, None, 500)
    options = mk.Options((2, 3), (4, 5, 16), 500, "float32")
    plan = plan_moe_layer(1, agreed, layer_tile(1, agreed, options, None), options)
    assert plan.parts == (120 // 4 + 2 + 1) * 5
    plan.save(tmp_path / "plan.json")
    again = MoeLayerPlan.load(tmp_path / "plan.json")
    assert again == plan
    tile = layer_tile(1, again.layer, again.options, None)
    assert plan_moe_layer(1, again.layer, tile, again.options) == plan
    for part in ("rank 1 of 3", "16 -> 24 -> 10 columns, gelu", "2 of 7 experts", "as float32"):
        assert part in plan.explain()
    assert plan.memory > 3 * 20 * 16 * 2


def test_plans_for_gpus():
    gpu, half = Gpu("sm_90a", 132, 227 << 10), np.dtype("f2")
    options = mk.Options()

    def plan_of(activation, n=7168):
        agreed = Layer(4, 7168, 2048, n, 256, 8, half, half, activation, 32768)
        tile = layer_tile(0, agreed, options, gpu)
        return plan_moe_layer(0, agreed, tile, options, 132)

    # A part of a tile is half of its columns; those that are multiplied by their gates are half as
    # many as a tile's.
    assert [plan_of(a).engine for a in ACTIVATIONS] == ["hopper"] * 4
    assert plan_of("swiglu").part == (128, plan_of("swiglu").tile[1] // 4)
    assert plan_of("gelu").part == (128, plan_of("gelu").tile[1] // 2)
    assert plan_of("swiglu", 7170).engine == "portable"
    gated, plain = (Layer(4, 64, 64, 64, 8, 2, half, half, a, 64) for a in ("swiglu", "gelu"))
    narrow = mk.Options(tile=(128, 128, 64))
    assert layer_tile(0, plain, narrow, gpu).engine == "hopper"
    with pytest.raises(ValueError, match=r"and swiglu the GPU takes \(128, 256, k\), where k is"):
        layer_tile(0, gated, narrow, gpu)
    with pytest.raises(ValueError, match=r"experts the GPU takes \(128, 256, k\) or \(128, 128, k"):
        layer_tile(0, plain, mk.Options(tile=(128, 64, 64)), gpu)


# --- wrong arguments and failures -----------------------------------------------------------------

X, IDS, WEIGHTS = np.ones((4, 6)), np.arange(8).reshape(4, 2) % 2, np.ones((4, 2))
W1, W2 = np.ones((1, 6, 4)), np.ones((1, 2, 3))
WRONG = {
    "a list": (TypeError, "ndarray", {"x": [1.0]}),
    "mixed": (TypeError, "same for all", {"w2": W2.astype("f4")}),
    "w1 of two dimensions": (ValueError, "use", {"w1": W1[0]}),
    "no gate": (ValueError, r"'swiglu' w1 needs \(1, 6, 4\)", {"w1": W1[..., :2]}),
    "a gate": (ValueError, r"None w1 needs \(1, 6, 2\)", {"activation": None}),
    "activation": (ValueError, "'swiglu', 'gelu', 'silu', None", {"activation": "relu"}),
    "fractional ids": (TypeError, "int32 or int64", {"topk_idx": WEIGHTS}),
    "weights": (ValueError, r"use \(4, 2\)", {"topk_weight": WEIGHTS[:3]}),
    "weights' type": (TypeError, "must be float64", {"topk_weight": WEIGHTS.astype("f4")}),
    "experts": (ValueError, "num_experts=7: rank .* passes 1", {"num_experts": 7}),
    "capacity": (ValueError, "at least 0", {"capacity": -1}),
    "out of another shape": (ValueError, "the result has", {"out": np.ones((4, 4))}),
    "transfer": (TypeError, "transfer_dtype", {"options": mk.Options(transfer_dtype="f4")}),
    "tf32": (TypeError, "as it is", {"options": mk.Options(tf32=True)}),
    "options": (TypeError, "Options", {"options": {"tile": 3}}),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_on_all_ranks_leave_the_communicator_usable(name):
    kind, text, changed = WRONG[name]
    own = {"x": X, "topk_idx": IDS, "topk_weight": WEIGHTS, "w1": W1, "w2": W2}

    def program(comm):
        with pytest.raises(kind, match=text):
            mk.moe_layer(**{**own, "comm": comm, **changed})
        right = 2 * 2 * 36 / (1 + np.exp(-6.0))
        np.testing.assert_allclose(mk.moe_layer(**own, comm=comm), right)

    worlds.run(2, program)


def test_other_operands_closed_plans_and_overlaps_are_refused():
    own = (X, IDS, WEIGHTS, W1, W2)

    def program(comm):
        with mk.MoeLayer(*own, comm=comm) as step:
            with pytest.raises(ValueError, match="this plan is for"):
                step(X[:, :5], *own[1:])
            with pytest.raises(ValueError, match="2 experts a token"):
                step(X, IDS[:, :1], WEIGHTS[:, :1], W1, W2)
            room = np.ones((4, 9))
            with pytest.raises(ValueError, match="out overlaps x"):
                step(room[:, :6], *own[1:], out=room[:, 5:8])
            step(*own)
        with pytest.raises(ValueError, match="closed"):
            step(*own)

    worlds.run(2, program)


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("name", ["N", "activation", "max_tokens"])
def test_different_calls_are_told_on_all_ranks(name, warm):
    same = {"x": X, "topk_idx": IDS, "topk_weight": WEIGHTS, "w1": W1, "w2": W2}
    different = {
        "N": {"w2": W2[..., :2]},
        "activation": {"activation": "silu", "w1": W1[..., :2]},
        "max_tokens": {"max_tokens": 5},
    }[name]

    def main(mpi):
        with contextlib.suppress(mk.Error), mk.Communicator(mpi) as comm:
            other = {**same, **different}
            if warm:
                for asked in (same, other):
                    mk.moe_layer(comm=comm, **asked)
            with pytest.raises(mk.ArgumentMismatchError, match=r"rank \d calls moe_layer\(H="):
                mk.moe_layer(comm=comm, **(other if comm.rank == 1 else same))

    mk.LocalWorld(2).run(main)


@pytest.mark.parametrize("missing", range(3))
def test_a_rank_that_never_calls_ends_in_the_deadline_and_leaves_nan(missing):
    case = ExpertCase("missing", (9, 8, 9), 4, 4, 6, 4, "float64", "zipf", None, "gelu", 3)

    def main(mpi):
        comm = mk.Communicator(mpi, entry_timeout=0.2)
        own = own_operands(comm, case, 1)
        options = mk.Options((2, 2), (4, 2, 8), 64)
        asked = {"num_experts": 6, "activation": "gelu", "options": options}
        step = mk.MoeLayer(*own, comm=comm, **asked)
        out = np.full((len(own[0]), 3), 7.0)
        try:
            if comm.rank != missing:
                step(*own, out=out)
            else:
                time.sleep(0.4)
                comm.synchronize()
        except mk.Error as error:
            return error, out
        finally:
            with contextlib.suppress(mk.Error):
                comm.close()
        return None, out

    for rank, (error, out) in enumerate(mk.LocalWorld(3).run(main)):
        assert isinstance(error, mk.TimeoutError)
        assert np.isnan(out).all() if rank != missing else (out == 7).all()


# --- interleavings --------------------------------------------------------------------------------


class Simulated(simulations.World):
    def __init__(self, activation, lanes, split, routing="uniform", rows=2, **options):
        self.case = ExpertCase(
            "turns", (3, 0, 4), 3, 2, 5, 2, "float32", routing, None, activation, 2
        )
        self.plan = mk.Options(split, (rows, 1, 2), 24)
        super().__init__(lanes, **options)

    def prepare(self, comm):
        own = own_operands(comm, self.case, 0)
        x = comm.empty(own[0].shape, np.float32)
        own = (x, own[1].copy(), own[2].copy(), *own[3:])
        asked = {"num_experts": 5, "activation": self.case.activation, "options": self.plan}
        step = mk.MoeLayer(*own, comm=comm, capacity=16, **asked)
        out = np.empty((len(x), 2), np.float32)
        return step, own, out, step.prepare(*own, out)

    def expected(self, rank, launch):
        return expected_layer(self.case, launch, rank).value

    def set_up(self, rank, launch):
        comm, step, own, out, _ = self.ranks[rank]
        out[...], own[0][...], own[1][...] = 7, np.nan, -7
        poison(comm, step)
        if launch is None:
            return
        blocks = own_operands(comm, self.case, launch)
        own[0][...], own[1][...] = blocks[:2]
        place = step._stage_of_weights  # what a call of the host does before its launch
        staged = comm._runtime.memory.segments[place.segment].bytes[place.offset :]
        staged[: blocks[2].nbytes].view(np.float32)[...] = blocks[2].ravel()


@pytest.mark.parametrize(
    ("activation", "lanes", "split"),
    [("swiglu", 1, (2, 2)), (None, 1, (1, 3)), ("gelu", 1, (0, 2)), ("swiglu", 2, (1, 2))],
)
def test_every_interleaving_gives_the_right_result(closed_behind, activation, lanes, split):
    world = closed_behind(Simulated(activation, lanes, split))
    simulations.assert_right(world, 120 // lanes)


def test_every_interleaving_of_tiles_of_fewer_rows(monkeypatch, closed_behind):
    """As plans of one engine have them: those of an expert are of one height, here 4 rows of 7."""
    monkeypatch.setattr(HostTile, "row_step", 1)
    world = closed_behind(Simulated("silu", 1, (1, 3), "one expert", 6))
    simulations.assert_right(world, 120)


@pytest.mark.parametrize("part", range(16))
def test_a_stopped_rank_ends_all_waits_at_a_deadline(closed_behind, part):
    world = closed_behind(Simulated("silu", 1, (2, 2)))
    simulations.assert_all_waits_end(world, part, part / 19)
