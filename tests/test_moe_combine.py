"""`moe_combine` against its reference: what a dispatch has spread comes back, weighted."""

import contextlib
import dataclasses
import time

import numpy as np
import pytest
import routing
import simulations
import worlds
from routing import ExpertCase, expected_sum, ids_of, router_weights_of, rows_of
from shapes import DTYPES

import mkernel_cp as mk
from mkernel_cp.moe_plan import Combine, MoeCombinePlan, plan_moe_combine


def cases(world):
    """The edges; dtypes take turns, and so do routings."""
    made = []
    uneven = tuple((23, 0, 9, 1)[rank % 4] for rank in range(world))

    def add(name, tokens, n, experts, slots, **more):
        number = len(made) + world
        more.setdefault("dtype", DTYPES[number % 4])
        more.setdefault("routing", routing.ROUTINGS[number % len(routing.ROUTINGS)])
        made.append(ExpertCase(name, tuple(tokens), 1, n, experts, slots, **more))

    for kind in routing.ROUTINGS if world == 3 else ("zipf",):
        add("routing", (17,) * world, 19, 2 * world + 1, 3, routing=kind)
    for dtype in DTYPES:
        add("dtype", uneven, 40, 6, 4, dtype=dtype, routing="uniform")
    add("fewer experts than ranks", uneven, 7, max(1, world - 1), 2)
    add("more slots than experts", uneven[::-1], 4, 2, 5, routing="repeats")
    add("no experts", uneven, 4, 0, 2)
    add("no slots", uneven, 4, 3, 0)
    add("no tokens", (0,) * world, 4, 3, 2)
    add("one token", (*(0,) * (world - 1), 1), 4, world + 1, 1, routing="hot")
    add("N = 1", uneven, 1, 3, 2)
    add("N = 0", uneven, 0, 3, 2, routing="zipf")
    return made


CASES = [case for world in worlds.SIZES for case in cases(world)]


def dispatched(comm, case, seed, tokens=None, **asked):
    """The layout of a dispatch of nothing worth computing."""
    ids = worlds.put(comm, ids_of(case, seed, tokens)[comm.rank])
    x = worlds.put(comm, np.zeros((len(ids), 1)))
    asked = {"max_tokens": 30, "capacity": 30 * case.world * max(1, case.slots), **asked}
    w = worlds.put(comm, np.zeros((case.counts[comm.rank], 1, 1)))
    return mk.moe_dispatch_gemm(x, ids, w, comm=comm, num_experts=case.experts, **asked)[1]


def own_rows(comm, case, seed, tokens=None, behind=3):
    """Rows of a rank, and NaN behind them; and the weights of its choices."""
    rows = rows_of(case, seed, tokens)[comm.rank]
    room = worlds.nan_filled((len(rows) + behind, case.n), case.dtype)
    room[: len(rows)] = rows
    return worlds.put(comm, room), worlds.put(
        comm, router_weights_of(case, seed, tokens)[comm.rank].copy()
    )


@pytest.mark.operator
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_reference(case):
    def program(comm):
        for seed in (1, 2):
            layout = dispatched(comm, case, seed)
            rows, weights = own_rows(comm, case, seed)
            out = worlds.put(comm, worlds.nan_filled((len(weights), case.n), case.dtype))
            worlds.poison(comm)
            assert mk.moe_combine(rows, weights, layout, comm=comm, out=out) is out
            right = expected_sum(case, seed, comm.rank)
            right.assert_close(worlds.get(comm, out), f"rank {comm.rank}")

    worlds.run(case.world, program)


@pytest.mark.operator
@pytest.mark.parametrize("lanes", [1, 2, 3])
@pytest.mark.parametrize("size", worlds.SIZES)
def test_many_calls_of_one_plan_with_any_numbers_of_tokens(size, lanes):
    """Inputs change under the peers' eyes as soon as a call returns."""
    case = ExpertCase("calls", (30,) * size, 1, 7, 5, 3, "float32")
    random = np.random.default_rng(size)
    kinds = [dataclasses.replace(case, routing=kind) for kind in routing.ROUTINGS]
    turns = [(kinds[seed % 7], tuple(random.integers(0, 31, size).tolist())) for seed in range(14)]

    def program(comm):
        worlds.chaos(comm, seed=11 * size + lanes, lanes=lanes, delay_ns=(500_000, 300_000))
        options = mk.Options((2, 2), chunk_bytes=70)
        step = None
        for seed, (turn, tokens) in enumerate(turns):
            layout = dispatched(comm, turn, seed, tokens)
            rows, weights = own_rows(comm, turn, seed, tokens)
            step = step or mk.MoeCombine(rows, weights, layout, comm=comm, options=options)
            worlds.poison(comm)
            out = step(rows, weights, layout)
            worlds.fill(comm, rows, np.nan)
            worlds.fill(comm, weights, np.nan)
            right = expected_sum(turn, seed, comm.rank, None, tokens)
            right.assert_close(worlds.get(comm, out), f"call {seed}")

    worlds.run(size, program)


@pytest.mark.operator
@pytest.mark.parametrize("size", worlds.SIZES)
def test_replayed_calls_equal_reference(size):
    """On GPUs a dispatch and a sum are captured once: one layout tells of ever other routings."""
    case = ExpertCase("graph", (9, 5, 0, 7)[:size], 1, 6, 5, 2, "float32")
    kinds = [dataclasses.replace(case, routing=kind) for kind in routing.ROUTINGS]

    def program(comm):
        with worlds.stream(comm):
            ids = worlds.put(comm, ids_of(case, 0)[comm.rank].copy())
            x = worlds.put(comm, np.zeros((len(ids), 1), np.float32))
            w = worlds.put(comm, np.zeros((case.counts[comm.rank], 1, 1), np.float32))
            dispatch = mk.MoeDispatchGemm(
                *(x, ids, w), comm=comm, num_experts=5, capacity=2 * sum(case.tokens)
            )
            rows, weights = own_rows(comm, case, 0, behind=2 * sum(case.tokens))
            found = dispatch(x, ids, w)
            combine = mk.MoeCombine(rows, weights, found[1], comm=comm)
            out = worlds.put(comm, np.zeros((len(ids), 6), np.float32))

            def calls():
                dispatch(x, ids, w, out=found)
                for _ in range(2):
                    combine(rows, weights, found[1], out=out)

            calls()
            comm.synchronize()
            replay = worlds.replayer(comm, calls)
            for seed in range(10):
                kind = kinds[seed % len(kinds)]
                own, factors = own_rows(comm, kind, seed)
                worlds.fill(comm, rows[: len(own)], worlds.get(comm, own))
                worlds.fill(comm, weights, worlds.get(comm, factors))
                worlds.fill(comm, ids, ids_of(kind, seed)[comm.rank])
                replay()
                right = expected_sum(kind, seed, comm.rank)
                right.assert_close(worlds.get(comm, out))
                if seed % 4 == 2:
                    right.assert_close(worlds.get(comm, combine(rows, weights, found[1])))
            comm.synchronize()

    worlds.run(size, program)


@pytest.mark.operator(world=3)
@pytest.mark.parametrize("dtype", DTYPES)
def test_same_bits_over_repeats_and_splits(dtype):
    case = ExpertCase("bits", (20, 0, 29), 1, 17, 7, 3, dtype)

    def program(comm):
        layout = dispatched(comm, case, 4)
        rows, weights = own_rows(comm, case, 4)
        more = [] if comm._runtime.machine.gpu else [(2, 5), (0, 2)]
        splits = [None, (1, 1), (3, 1), (1, 3), *more]
        options = [split and mk.Options(split, chunk_bytes=100) for split in splits]
        return {
            worlds.get(
                comm, mk.moe_combine(rows, weights, layout, comm=comm, options=option)
            ).tobytes()
            for option in options
            for _ in range(2)
        }

    assert all(len(bits) == 1 for bits in worlds.run(3, program))


@pytest.mark.operator(world=3)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sums_cross_links_once_and_in_the_type_asked_for(dtype):
    case = ExpertCase("transfer", (25, 0, 28), 1, 30, 6, 4, dtype)

    def program(comm):
        for seed, transfer in ((2, None), (2, "float32"), (3, None), (3, "float32")):
            layout = dispatched(comm, case, seed)
            rows, weights = own_rows(comm, case, seed)
            before = worlds.bytes_from_peers(comm)
            options = mk.Options(transfer_dtype=transfer)
            out = mk.moe_combine(rows, weights, layout, comm=comm, options=options)
            expected_sum(case, seed, comm.rank, transfer).assert_close(worlds.get(comm, out))
            ranks_of = ids_of(case, seed)[comm.rank] // 2  # two experts a rank, and -1 for none
            pairs = sum(len(set(row) - {-1, comm.rank}) for row in ranks_of.tolist())
            size = np.dtype(transfer or dtype).itemsize
            assert worlds.bytes_from_peers(comm) - before == pairs * case.n * size

    worlds.run(3, program)


@pytest.mark.operator(world=3)
def test_operands_of_any_strides():
    case = ExpertCase("strides", (7, 9, 4), 1, 5, 4, 2, "float32")

    def program(comm):
        layout = dispatched(comm, case, 3)
        rows, weights = (worlds.get(comm, x) for x in own_rows(comm, case, 3))
        right = expected_sum(case, 3, comm.rank)
        fields = np.zeros((3, *rows.shape), [("pad", "u1"), ("x", "f4")])["x"]
        fields[0] = rows
        other = np.zeros(weights.shape, [("pad", "u1"), ("x", "f4")])["x"]
        other[...] = weights
        whole = worlds.put(comm, np.full((2 * len(weights), 11), 7.0, np.float32))
        spread = whole[::2, 10:0:-2]
        odd = fields[1][: len(weights)]
        for out, own, factors in (
            (spread, np.asfortranarray(rows), np.asfortranarray(weights)),
            *([(odd, fields[0], other)] if comm.target == "host" else []),  # CuPy has none
            (None, np.repeat(rows, 2, 1)[:, ::2], weights[::-1].copy()[::-1]),
        ):
            own, factors = worlds.put(comm, own), worlds.put(comm, factors)
            made = mk.moe_combine(own, factors, layout, comm=comm, out=out)
            right.assert_close(np.array(worlds.get(comm, made)))
        spread[...] = 7
        assert (worlds.get(comm, whole) == 7).all()

    worlds.run(3, program)


@pytest.mark.operator(world=2)
def test_weights_of_no_expert_have_no_influence():
    def program(comm):
        ids = np.array([[-1, 0], [1, -1], [-1, -1]])
        weights = np.array([[np.nan, 2.0], [3.0, np.inf], [np.nan, np.nan]])
        own = (np.ones((3, 2)), ids, np.ones((1, 2, 2)))
        rows, layout = mk.moe_dispatch_gemm(*(worlds.put(comm, x) for x in own), comm=comm)
        out = mk.moe_combine(rows, worlds.put(comm, weights), layout, comm=comm)
        np.testing.assert_array_equal(worlds.get(comm, out), [[4, 4], [6, 6], [0, 0]])

    worlds.run(2, program)


def test_sums_are_in_the_order_of_slots_and_then_of_ranks():
    """So that large terms cancel before a small one is lost."""

    def program(comm):
        ids = np.array([[0, 1, 2], [2, 1, 0], [3, 1, 0]])
        w = np.array([[[1e8]], [[-1e8]], [[1.0]], [[-1e8]], [[0.0]], [[0.0]]], np.float32)
        w = w[2 * comm.rank : 2 * comm.rank + 2] if comm.size == 3 else w
        x, ids, w = (worlds.put(comm, x) for x in (np.ones((3, 1), np.float32), ids, w))
        rows, layout = mk.moe_dispatch_gemm(x, ids, w, comm=comm)
        weights = worlds.put(comm, np.ones((3, 3), np.float32))
        return worlds.get(comm, mk.moe_combine(rows, weights, layout, comm=comm)).ravel().tolist()

    # Experts 0 and 1 at rank 0, 2 and 3 at rank 1: on three ranks, on all of them alike.
    assert worlds.run(3, program) == [[1.0, 1.0, -1e8]] * 3
    assert worlds.run(1, program) == [[1.0, 0.0, -1e8]]

    def across(comm):
        w = np.array([[[1e8]], [[-1e8]], [[1.0]]], np.float32)[comm.rank : comm.rank + 1]
        x, ids = np.ones((1, 1), np.float32), np.array([[2, 1, 0]])
        rows, layout = mk.moe_dispatch_gemm(x, ids, w, comm=comm)
        return mk.moe_combine(rows, np.ones((1, 3), np.float32), layout, comm=comm).item()

    assert worlds.run(3, across) == [1.0] * 3


# --- plans ----------------------------------------------------------------------------------------


def test_plans_are_saved_and_choose_the_same_again(tmp_path):
    types = np.dtype("f2"), np.dtype("f4")
    agreed = Combine(3, 10, 2, *types, 20, 500)
    options = mk.Options((2, 3), None, 500, "float32")
    plan = plan_moe_combine(1, agreed, options)
    assert agreed.chunk_tokens == 12
    assert agreed.chunks == 2
    plan.save(tmp_path / "plan.json")
    again = MoeCombinePlan.load(tmp_path / "plan.json")
    assert again == plan
    assert plan_moe_combine(1, again.combine, again.options) == plan
    for part in ("rank 1 of 3", "3 agents", "as float32, 12 tokens"):
        assert part in plan.explain()
    assert plan.memory > 3 * 20 * 10 * 4


# --- wrong arguments and failures -----------------------------------------------------------------

IDS = np.array([[0, 1], [1, 0], [0, 1]])
ROWS, WEIGHTS = np.ones((6, 4)), np.ones((3, 2))
WRONG = {
    "a list": (TypeError, "ndarray", {"rows": [1.0]}),
    "a vector": (ValueError, "2 dimensions", {"rows": ROWS[0]}),
    "few rows": (ValueError, "layout has 6 rows, but rows has 5", {"rows": ROWS[:5]}),
    "integers": (TypeError, "bfloat16, float16", {"rows": ROWS.astype(int)}),
    "weights of another type": (
        TypeError,
        "must be float64",
        {"topk_weight": WEIGHTS.astype("f4")},
    ),
    "weights of 16 bits": (
        TypeError,
        "with operands of float16 it must be float32",
        {"rows": ROWS.astype("f2"), "topk_weight": WEIGHTS.astype("f2")},
    ),
    "weights of other tokens": (ValueError, "of the 3 tokens", {"topk_weight": WEIGHTS[:2]}),
    "no layout": (TypeError, "moe_dispatch_gemm", {"layout": None}),
    "out of another shape": (ValueError, "the result has", {"out": np.ones((3, 5))}),
    "out of another dtype": (TypeError, "the result has", {"out": np.ones((3, 4), "f4")}),
    "transfer": (TypeError, "transfer_dtype", {"options": mk.Options(transfer_dtype="f4")}),
    "tf32": (TypeError, "as it is", {"options": mk.Options(tf32=True)}),
    "options": (TypeError, "Options", {"options": {"split": 3}}),
}


def layout_of(comm):
    w = np.ones((1, 1, 1))
    return mk.moe_dispatch_gemm(np.ones((3, 1)), IDS, w, comm=comm)[1]


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_on_all_ranks_leave_the_communicator_usable(name):
    kind, text, changed = WRONG[name]

    def program(comm):
        asked = {"rows": ROWS, "topk_weight": WEIGHTS, "layout": layout_of(comm), "comm": comm}
        with pytest.raises(kind, match=text):
            mk.moe_combine(**{**asked, **changed})
        np.testing.assert_array_equal(mk.moe_combine(**asked), 2.0)

    worlds.run(2, program)


def test_overlapping_outputs_other_operands_and_closed_plans_are_refused():
    def program(comm):
        layout = layout_of(comm)
        rows = ROWS.copy()
        with pytest.raises(ValueError, match="out overlaps rows"):
            mk.moe_combine(rows, WEIGHTS, layout, comm=comm, out=rows[:3])
        with mk.MoeCombine(ROWS, WEIGHTS, layout, comm=comm) as step:
            with pytest.raises(ValueError, match="this plan is for"):
                step(ROWS[:, :3], WEIGHTS, layout)
            np.testing.assert_array_equal(step(ROWS, WEIGHTS, layout), 2.0)
        with pytest.raises(ValueError, match="closed"):
            step(ROWS, WEIGHTS, layout)

    worlds.run(2, program)


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("name", ["columns", "dtype", "chunks"])
def test_different_calls_are_told_on_all_ranks(name, warm):
    different = {
        "columns": {"rows": ROWS[:, :3]},
        "dtype": {"rows": ROWS.astype("f4"), "topk_weight": WEIGHTS.astype("f4")},
        "chunks": {"options": mk.Options(chunk_bytes=100)},
    }[name]

    def main(mpi):
        with contextlib.suppress(mk.Error), mk.Communicator(mpi) as comm:
            same = {"rows": ROWS, "topk_weight": WEIGHTS, "layout": layout_of(comm), "comm": comm}
            other = {**same, **different}
            if warm:
                for asked in (same, other):
                    mk.moe_combine(**asked)
            with pytest.raises(mk.ArgumentMismatchError, match=r"rank \d calls moe_combine\(N="):
                mk.moe_combine(**(other if comm.rank == 1 else same))

    mk.LocalWorld(2).run(main)


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("how", ["another", "the same, filled in again"])
@pytest.mark.parametrize("wrong", range(3))
def test_a_layout_of_another_dispatch_on_one_rank_is_told_on_all(wrong, how, nodes):
    case, outs = ExpertCase("layouts", (9, 8, 9), 1, 4, 6, 4, "float32"), {}

    def program(comm):
        layout, other = (dispatched(comm, case, seed) for seed in (1, 2))
        rows, weights = own_rows(comm, case, 1, behind=len(layout.source_rank))
        for _ in range(2):
            right = expected_sum(case, 1, comm.rank, None, None, comm._runtime.topology.sizes)
            right.assert_close(mk.moe_combine(rows, weights, layout, comm=comm))
        if how != "another":
            mine = layout if comm.rank == wrong else None
            dispatched(comm, case, 2, out=(np.empty((len(layout.source_rank), 1)), mine))
        elif comm.rank == wrong:
            layout = other
        out = outs[comm.rank] = np.full((len(weights), case.n), 7, case.dtype)
        mk.moe_combine(rows, weights, layout, comm=comm, out=out)

    def main(mpi):
        with pytest.raises(mk.Error) as raised, mk.Communicator(mpi, nodes=nodes) as comm:
            program(comm)
        return raised.value

    errors = mk.LocalWorld(3).run(main)
    worlds.all_are(errors, mk.ArgumentMismatchError, "moe_dispatch_gemm that their layouts are of")
    for out in outs.values():  # a late rank knows before it begins
        assert np.isnan(out).all() or (out == 7).all()


def test_layouts_of_other_communicators_are_refused():
    def main(mpi):
        with mk.Communicator(mpi) as other, mk.Communicator(mpi) as comm:
            x, w, theirs = np.ones((3, 1)), np.ones((1, 1, 1)), layout_of(other)
            with pytest.raises(ValueError, match=r"^layout is of another communicator"):
                mk.moe_combine(ROWS, WEIGHTS, theirs, comm=comm)
            with pytest.raises(ValueError, match=r"^out\[1\] is of another communicator"):
                mk.moe_dispatch_gemm(x, IDS, w, comm=comm, out=(np.ones((6, 1)), theirs))
            np.testing.assert_array_equal(
                mk.moe_combine(ROWS, WEIGHTS, layout_of(comm), comm=comm), 2.0
            )

    mk.LocalWorld(2).run(main)


@pytest.mark.parametrize("missing", range(3))
def test_a_rank_that_never_calls_ends_in_the_deadline_and_leaves_nan(missing):
    case = ExpertCase("missing", (9, 8, 9), 1, 4, 6, 4, "float64")

    def main(mpi):
        comm = mk.Communicator(mpi, entry_timeout=0.2)
        layout = dispatched(comm, case, 1)
        rows, weights = own_rows(comm, case, 1)
        plan = mk.Options((2, 2), chunk_bytes=64)
        step = mk.MoeCombine(rows, weights, layout, comm=comm, options=plan)
        out = np.full((len(weights), case.n), 7.0)
        try:
            if comm.rank != missing:
                step(rows, weights, layout, out=out)
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
    def __init__(self, lanes, split, **options):
        self.case = ExpertCase("turns", (3, 0, 4), 1, 2, 5, 3, "float32", "uniform")
        self.split = split
        super().__init__(lanes, **options)

    def prepare(self, comm):
        layouts = [dispatched(comm, self.case, seed) for seed in range(self.launches)]
        layout = dispatched(comm, self.case, 0)
        weights = comm.empty((self.case.tokens[comm.rank], 3), np.float32)
        rows = np.zeros((60, 2), np.float32)
        plan = mk.Options(self.split, chunk_bytes=16)
        step = mk.MoeCombine(rows, weights, layout, comm=comm, options=plan)
        out = np.empty((len(weights), 2), np.float32)
        launch = step.prepare(rows, weights, layout, out)
        return step, (rows, weights, layout, layouts), out, launch

    def expected(self, rank, launch):
        return expected_sum(self.case, launch, rank).value

    def set_up(self, rank, launch):
        comm, step, (rows, weights, layout, layouts), out, _ = self.ranks[rank]
        out[...], rows[...], weights[...] = 7, np.nan, np.nan
        if launch is None:
            return
        own = rows_of(self.case, launch)[rank]
        rows[: len(own)] = own
        weights[...] = router_weights_of(self.case, launch)[rank]
        for name in ("expert_offsets", "source_rank", "source_token", "source_slot"):
            getattr(layout, name)[...] = getattr(layouts[launch], name)
        place = step._stage  # what a call of the host does before its launch
        staged = comm._runtime.memory.segments[place.segment].bytes[place.offset :]
        staged[: weights.nbytes].view(np.float32)[...] = weights.ravel()


@pytest.mark.parametrize(
    ("lanes", "split"), [(1, (2, 2)), (1, (1, 2)), (1, (0, 2)), (1, (2, 1)), (2, (1, 1))]
)
def test_every_interleaving_gives_the_right_result(closed_behind, lanes, split):
    world = closed_behind(Simulated(lanes, split))
    simulations.assert_right(world, 200 // lanes)


@pytest.mark.parametrize("part", range(12))
def test_a_stopped_rank_ends_all_waits_at_a_deadline(closed_behind, part):
    world = closed_behind(Simulated(1, (2, 2)))
    simulations.assert_all_waits_end(world, part, part / 15)
