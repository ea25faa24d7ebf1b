import ml_dtypes
import numpy as np
import pytest
import worlds
from shapes import DTYPES, Case, cases, operands

import mkernel_cp as mk
from mkernel_cp.operators import operands as operators
from mkernel_cp.operators.operands import Operand
from mkernel_cp.operators.operator import Preparation

CASES = [
    case for size in worlds.SIZES for case in cases(count=12, seed=size, world=size, largest=150)
]


def call(comm, case, seed, **keywords):
    """One call of a rank on poisoned memory, and its reference."""
    a_blocks, b_blocks = operands(case, seed, integers=keywords.pop("integers", False))
    out = worlds.put(comm, worlds.nan_filled((case.m, case.n_per_rank[comm.rank]), case.out_dtype))
    worlds.poison(comm)
    result = mk.allgather_gemm(
        worlds.put(comm, a_blocks[comm.rank]),
        worlds.put(comm, b_blocks[comm.rank]),
        comm=comm,
        row_counts=worlds.row_counts(case),
        out=out,
        dtype=case.out_dtype,
        **keywords,
    )
    assert result is out
    return worlds.get(comm, out)


@pytest.fixture(params=[False, True], ids=["as they come", "gathered"])
def rows(request):
    with worlds.gathered(request.param):
        yield


@pytest.mark.operator
@pytest.mark.usefixtures("rows")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_reference(case):
    def program(comm):
        for seed in (1, 2):
            out = call(comm, case, seed)
            worlds.expected(case, seed, comm.rank).assert_close(out, f"rank {comm.rank}")

    worlds.run(case.world, program)


@pytest.mark.operator(world=2)
@pytest.mark.parametrize(("a_order", "b_order"), ["CC", "CF", "FC", "FF"])
def test_operands_may_be_rounded_to_tf32(a_order, b_order):
    orders = {"a_order": a_order, "b_order": b_order}
    case = Case("tf32", (70, 33), 100, (45, 129), "float32", "float32", **orders)

    def program(comm):
        options = mk.Options(tf32=True)
        a_blocks, b_blocks = operands(case, 5)
        expected = mk.reference.allgather_gemm(a_blocks, b_blocks[comm.rank], tf32=True)
        out = call(comm, case, 5, options=options)
        expected.assert_close(out)
        assert worlds.expected(case, 5, comm.rank).check(out) > 1  # it is not plain float32
        exact = call(comm, case, 6, options=options, integers=True)
        expected = worlds.expected(case, 6, comm.rank, integers=True)
        np.testing.assert_array_equal(exact, expected.value)

    worlds.run(2, program)


@pytest.mark.operator(world=2)
def test_a_call_keeps_to_a_budget_of_multiprocessors():
    def program(comm):
        a, b = (worlds.put(comm, np.ones((500, 500), np.float16)) for _ in "ab")
        for budget in (8, 10_000):
            with mk.AllGatherGemm(a, b, comm=comm, options=mk.Options(sm_budget=budget)) as step:
                np.testing.assert_array_equal(worlds.get(comm, step(a, b)), 500)
                assert comm.target == "host" or budget > 8 or sum(step.plan.split) <= 8

    worlds.run(2, program)


@pytest.mark.operator(world=2)
@pytest.mark.parametrize(
    ("m", "n", "k"),
    [(1, 8, 147456), (17, 640, 4096), (127, 264, 72), (64, 1536, 16), (1000, 8, 72)],
)
def test_extreme_extents(m, n, k):
    """Also where those who multiply bring the rows, though there are others that have time."""

    def program(comm):
        counts = comm.row_counts(m)
        case = Case("extreme", counts, k, (n,) * comm.size, "float16", "float16")
        for split in (None, (0, None)):
            out = call(comm, case, 4, options=mk.Options(split))
            worlds.expected(case, 4, comm.rank).assert_close(out)

    worlds.run(2, program)


@pytest.mark.operator
@pytest.mark.parametrize("case", CASES[::3], ids=str)
def test_small_integers_are_exact(case):
    def program(comm):
        out = call(comm, case, 3, integers=True)
        exact = worlds.expected(case, 3, comm.rank, integers=True).value
        np.testing.assert_array_equal(out.astype(np.float64), exact)

    worlds.run(case.world, program)


@pytest.mark.operator
@pytest.mark.usefixtures("rows")
@pytest.mark.parametrize("lanes", [1, 2, 3])
@pytest.mark.parametrize("size", worlds.SIZES)
def test_back_to_back_calls_with_late_ranks_and_roles(size, lanes):
    """Inputs change under the peers' eyes as soon as a call returns; so early reuse shows."""
    rng = np.random.default_rng(size)
    counts = tuple(int(rows) for rows in rng.integers(0, 40, size))
    k, columns = 37, 29
    data = rng.standard_normal((30, sum(counts), k)).astype(np.float32)
    b = rng.standard_normal((30, size, k, columns)).astype(np.float32)
    start = np.cumsum([0, *counts])

    def program(comm):
        worlds.chaos(comm, seed=7 * size + lanes, lanes=lanes, delay_ns=(2_000_000, 500_000))
        a = comm.empty((counts[comm.rank], k), np.float32)
        own_b = worlds.put(comm, np.empty((k, columns), np.float32))
        for step in range(30):
            worlds.fill(comm, a, data[step, start[comm.rank] : start[comm.rank + 1]])
            worlds.fill(comm, own_b, b[step, comm.rank])
            worlds.poison(comm)
            out = mk.allgather_gemm(a, own_b, comm=comm, row_counts=counts)
            worlds.fill(comm, a, np.nan)
            worlds.fill(comm, own_b, np.nan)
            out = worlds.get(comm, out)
            np.testing.assert_allclose(out, data[step] @ b[step, comm.rank], rtol=0, atol=1e-4)

    worlds.run(size, program)


@pytest.mark.operator
@pytest.mark.usefixtures("rows")
@pytest.mark.parametrize("size", worlds.SIZES)
def test_replayed_calls_equal_reference(size):
    """On GPUs the calls are captured once; inputs change, and other calls come between."""
    rng = np.random.default_rng(4)
    rows, k, columns, together = 21, 33, 17, 3
    data = rng.integers(-4, 5, (20, together, size * rows, k)).astype(np.float32)
    b = rng.integers(-4, 5, (k, columns)).astype(np.float32)

    def program(comm):
        with worlds.stream(comm):
            own = slice(comm.rank * rows, (comm.rank + 1) * rows)
            a = [comm.zeros((rows, k), np.float32) for _ in range(together)]
            outs = [
                worlds.put(comm, np.zeros((size * rows, columns), np.float32))
                for _ in range(together)
            ]
            other = worlds.put(comm, b)
            step = mk.AllGatherGemm(a[0], other, comm=comm)

            def calls():
                for x, out in zip(a, outs, strict=True):
                    step(x, other, out=out)

            calls()
            comm.synchronize()
            replay = worlds.replayer(comm, calls)
            for number, values in enumerate(data):
                for x, value in zip(a, values, strict=True):
                    worlds.fill(comm, x, value[own])
                replay()
                for out, value in zip(outs, values, strict=True):
                    np.testing.assert_array_equal(worlds.get(comm, out), value @ b)
                if number % 5 == 2:
                    out = mk.allgather_gemm(a[1], other, comm=comm)
                    np.testing.assert_array_equal(worlds.get(comm, out), values[1] @ b)
                if number == 11:
                    comm.barrier()
            comm.synchronize()

    worlds.run(size, program)


@pytest.mark.operator(world=4)
@pytest.mark.parametrize("dtype", DTYPES)
def test_same_bits_for_any_world_split_tile_and_chunk(dtype):
    rng = np.random.default_rng(5)
    a, b = rng.standard_normal((97, 131)), rng.standard_normal((131, 61))
    a, b = a.astype(dtype), b.astype(dtype)

    def program(comm):
        own, other = worlds.put(comm, a[comm.rows(97)]), worlds.put(comm, b)
        counts = comm.row_counts(97)
        return [
            worlds.get(
                comm, mk.allgather_gemm(own, other, comm=comm, row_counts=counts, options=option)
            ).tobytes()
            for option in worlds.different_options(comm, dtype)
            for _ in range(3)
        ]

    found = set()
    for first in (False, True):
        with worlds.gathered(first):
            for size in worlds.SIZES:
                found |= {bits for rank in worlds.run(size, program) for bits in rank}
    assert len(found) == 1


@pytest.mark.operator(world=3)
@pytest.mark.usefixtures("rows")
def test_nan_and_infinity_reach_only_what_depends_on_them():
    rng = np.random.default_rng(6)
    a, b = rng.standard_normal((60, 50)), rng.standard_normal((50, 40))
    a[17, 3], a[44, 7], b[9, 21] = np.nan, np.inf, np.nan

    def program(comm):
        own, other = worlds.put(comm, a[comm.rows(60)]), worlds.put(comm, b)
        out = mk.allgather_gemm(own, other, comm=comm, row_counts=comm.row_counts(60))
        out = worlds.get(comm, out)
        clean = np.ones((60, 40), bool)
        clean[[17, 44]] = clean[:, 21] = False
        assert np.isfinite(out[clean]).all()
        assert np.isnan(out[17]).all()
        assert np.isnan(out[:, 21]).all()
        rest = np.arange(40) != 21
        np.testing.assert_array_equal(out[44, rest], np.sign(b[7, rest]) * np.inf)

    worlds.run(3, program)


@pytest.mark.operator(world=3)
@pytest.mark.usefixtures("rows")
def test_counted_bytes_are_the_plans():
    def program(comm):
        rng = np.random.default_rng(comm.rank)
        for rows, k, n in ((64, 64, 64), (33, 17, 5), (20, 30, 0), (0, 8, 8)):
            a, b = rng.standard_normal((rows, k)), rng.standard_normal((k, n * comm.rank))
            a, b = worlds.put(comm, a), worlds.put(comm, b)
            with mk.AllGatherGemm(a, b, comm=comm) as step:
                before = worlds.bytes_from_peers(comm)
                step(a, b)
                step(a, b)
                assert worlds.bytes_from_peers(comm) - before == 2 * step.plan.bytes_from_peers
                expected = (comm.size - 1) * a.nbytes if b.size else 0
                assert step.plan.bytes_from_peers == expected

    worlds.run(3, program)


@pytest.mark.operator(world=2)
@pytest.mark.parametrize("counts", [(23, 1), (1, 23)], ids=str)
def test_own_rows_are_gathered_too(counts):
    """They are awaited, too: another mover brings those of the peer. Peers do not send them."""
    rng = np.random.default_rng(8)
    a, b = rng.standard_normal((24, 40)), rng.standard_normal((40, 9))
    own = [slice(0, counts[0]), slice(counts[0], 24)]

    def program(comm):
        worlds.chaos(comm, seed=5, delay_ns=(3_000_000, 0))
        rows, other = comm.asarray(worlds.put(comm, a[own[comm.rank]])), worlds.put(comm, b)
        options = mk.Options(split=(2, 2) if comm.target == "host" else None, chunk_bytes=640)
        with mk.AllGatherGemm(rows, other, comm=comm, row_counts=counts, options=options) as step:
            assert step.plan.gathered
            before = worlds.bytes_from_peers(comm)
            for _ in range(5):
                worlds.poison(comm)
                out = worlds.get(comm, step(rows, other))
                np.testing.assert_allclose(out, a @ b, rtol=0, atol=1e-12)
            assert worlds.bytes_from_peers(comm) - before == 5 * step.plan.bytes_from_peers

    with worlds.gathered(True):
        worlds.run(2, program)


@pytest.mark.operator(world=3)
@pytest.mark.usefixtures("rows")
def test_operands_in_a_segment_are_read_in_place():
    def program(comm):
        rng = np.random.default_rng(comm.rank)
        wide = comm.asarray(rng.standard_normal((20, 90)))
        for a in (wide, wide[:, 5:70], wide[2:19, ::-1], wide[::3], wide[:7].T):
            b = rng.standard_normal((a.shape[1], 30))
            blocks = comm._runtime.agree("blocks", lambda a=a: worlds.get(comm, a).copy())
            other = worlds.put(comm, b)
            step = mk.AllGatherGemm(a, other, comm=comm)
            worlds.poison(comm)
            out = worlds.get(comm, step(a, other))
            np.testing.assert_allclose(out, np.vstack(blocks) @ b, atol=1e-12)
            before = Preparation(comm._runtime.machine)
            in_place = step._operand(Operand("a", a, comm._runtime.machine), before)[2].array is a
            assert in_place == (a.strides[1] == 8 or a.strides[0] == 8)

    worlds.run(3, program)


def test_order_may_differ_between_ranks_and_calls():
    rng = np.random.default_rng(8)
    a, b = rng.standard_normal((3, 31, 47)), rng.standard_normal((47, 9))

    def program(comm):
        for orders in ("CFC", "FFF", "CCC", "FCF"):
            for shared in (False, True):
                own = np.asarray(a[comm.rank], order=orders[comm.rank])
                own = comm.asarray(own) if shared else own
                out = mk.allgather_gemm(own, b, comm=comm)
                np.testing.assert_allclose(out, a.reshape(93, 47) @ b, atol=1e-12)

    worlds.run(3, program)


@pytest.mark.operator(world=2)
def test_output_may_have_any_strides():
    rng = np.random.default_rng(9)
    a, b = rng.standard_normal((24, 10)), rng.standard_normal((10, 12))

    def program(comm):
        own, other = worlds.put(comm, a[comm.rows(24)]), worlds.put(comm, b)
        counts = comm.row_counts(24)
        whole = worlds.put(comm, np.full((60, 80), np.nan))
        for out in (whole[3:51:2, 70:10:-5], whole[:24, :12].T[:12].T, whole.T[:24, 5:17]):
            worlds.fill(comm, out, np.nan)
            outside = np.isnan(worlds.get(comm, whole)).sum()
            mk.allgather_gemm(own, other, comm=comm, row_counts=counts, out=out)
            np.testing.assert_allclose(worlds.get(comm, out), a @ b, atol=1e-12)
            assert np.isnan(worlds.get(comm, whole)).sum() == outside - out.size
            worlds.fill(comm, out, np.nan)

    worlds.run(2, program)


def test_output_of_uneven_elements_is_filled_by_a_copy():
    rng = np.random.default_rng(9)
    a, b = rng.standard_normal((24, 10)), rng.standard_normal((10, 12))

    def program(comm):
        fields = np.zeros((24, 12), np.dtype([("pad", "u1"), ("x", "f8")]))
        mk.allgather_gemm(
            a[comm.rows(24)], b, comm=comm, row_counts=comm.row_counts(24), out=fields["x"]
        )
        np.testing.assert_allclose(fields["x"], a @ b, atol=1e-12)

    worlds.run(2, program)


def test_strides_of_single_rows_and_columns_mean_nothing():
    one_row = np.lib.stride_tricks.as_strided(np.arange(8.0), (1, 4), (3, 8))
    one_column = np.lib.stride_tricks.as_strided(np.arange(8.0), (4, 1), (8, 5))
    field = np.zeros((1, 3), [("pad", "u1"), ("x", "f8")])["x"]
    field[...] = 2.0

    def program(comm):
        out = mk.allgather_gemm(one_row, one_column, comm=comm)
        np.testing.assert_array_equal(out, [[14.0], [14.0]])
        np.testing.assert_array_equal(mk.allgather_gemm(field.T, field, comm=comm), 4.0)

    worlds.run(2, program)


def test_result_is_a_new_array_that_later_calls_leave_alone():
    def program(comm):
        a, b = np.full((4, 4), 1.0), np.eye(4)
        first = mk.allgather_gemm(a, b, comm=comm)
        mk.allgather_gemm(2 * a, b, comm=comm)
        np.testing.assert_array_equal(first, 1.0)

    worlds.run(2, program)


A, B = np.ones((4, 6)), np.ones((6, 5))
WRONG = {
    "a list": (TypeError, "ndarray", [[1.0]], B, {}),
    "one dimension": (ValueError, "2 dimensions", A[0], B, {}),
    "integers": (TypeError, "bfloat16, float16", A.astype(int), B.astype(int), {}),
    "complex": (TypeError, "bfloat16, float16", A + 0j, B + 0j, {}),
    "16-bit pattern": (TypeError, "bfloat16", A.astype(np.uint16), B.astype(np.uint16), {}),
    "other byte order": (TypeError, "float64", A.astype(">f8"), B.astype(">f8"), {}),
    "mixed": (TypeError, "same for both", A.astype(np.float32), B, {}),
    "inner extents": (ValueError, "as many columns", A[:, :5], B, {}),
    "narrowing": (TypeError, "use float64", A, B, {"dtype": np.float32}),
    "float64 from bfloat16": (
        TypeError,
        "use bfloat16 or float32",
        A.astype(ml_dtypes.bfloat16),
        B.astype(ml_dtypes.bfloat16),
        {"dtype": np.float64},
    ),
    "counts of another world": (ValueError, "2 numbers", A, B, {"row_counts": (4,)}),
    "negative counts": (ValueError, ">= 0", A, B, {"row_counts": (4, -4)}),
    "a third role": (ValueError, "third role", A, B, {"options": mk.Options(split=(1, 2, 3))}),
    "fractional counts": (TypeError, "integers", A, B, {"row_counts": (4.0, 4.0)}),
    "other counts than rows": (ValueError, "passes 4 rows", A, B, {"row_counts": (5, 5)}),
    "out of another shape": (ValueError, "the result has", A, B, {"out": np.ones((8, 6))}),
    "out of another dtype": (TypeError, "dtype=", A, B, {"out": np.ones((8, 5), np.float32)}),
    "options": (TypeError, "Options", A, B, {"options": {"tile": 3}}),
    "tf32 of float64": (TypeError, "float32", A, B, {"options": mk.Options(tf32=True)}),
    "a mask": (TypeError, "masked", np.ma.masked_array(A), B, {}),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_on_all_ranks_leave_the_communicator_usable(name):
    kind, text, a, b, keywords = WRONG[name]

    def program(comm):
        for _ in range(2):
            with pytest.raises(kind, match=text):
                mk.allgather_gemm(a, b, comm=comm, **keywords)
            out = mk.allgather_gemm(A, B, comm=comm)
            np.testing.assert_array_equal(out, A.shape[1])

    worlds.run(2, program)


def test_read_only_broadcast_and_overlapping_outputs_are_refused():
    def program(comm):
        square = np.ones((4, 8))
        frozen = np.ones((8, 5))
        frozen.flags.writeable = False
        spread = np.lib.stride_tricks.as_strided(np.ones(5), (8, 5), (0, 8))
        room = comm.zeros((12, 8))
        for out, text in ((frozen, "read-only"), (spread, "share memory")):
            with pytest.raises(ValueError, match=text):
                mk.allgather_gemm(A, B, comm=comm, out=out)
        with pytest.raises(ValueError, match="overlaps a"):
            mk.allgather_gemm(room[:4], np.eye(8), comm=comm, out=room[3:11])
        with pytest.raises(ValueError, match="overlaps b"):
            mk.allgather_gemm(square, room[:8], comm=comm, out=room[4:])

    worlds.run(2, program)


@pytest.mark.parametrize("row_counts", [None, (8,), [8]], ids=str)
def test_a_question_that_is_asked_again_is_not_checked_again(monkeypatch, row_counts):
    """As on GPUs, where arrays have an address that says it all."""

    def key(machine, *arrays):
        return tuple((x.ctypes.data, x.shape, x.strides, x.dtype) for x in arrays)

    monkeypatch.setattr("mkernel_cp.targets.host.HostTarget.key", key)
    checks = []
    matrix = operators.matrix
    monkeypatch.setattr(operators, "matrix", lambda *x: checks.append(x) or matrix(*x))

    def program(comm):
        a, out, other = np.ones((8, 6)), np.zeros((8, 5)), np.zeros((8, 5))
        for step in range(4):
            checks.clear()
            a[...] = step
            mk.allgather_gemm(a, B, comm=comm, row_counts=row_counts, out=out)
            np.testing.assert_array_equal(out, 6 * step)
            hashable = not isinstance(row_counts, list)
            assert (checks == []) is (hashable and step > 0)
        np.testing.assert_array_equal(
            mk.allgather_gemm(a, B, comm=comm, row_counts=row_counts, out=other), out
        )
        with pytest.raises(ValueError, match="row_counts"):
            mk.allgather_gemm(a, B, comm=comm, row_counts=(9,), out=out)

    worlds.run(1, program)


def test_a_plan_refuses_other_operands():
    def program(comm):
        with mk.AllGatherGemm(A, B, comm=comm) as step:
            with pytest.raises(ValueError, match="this plan is for"):
                step(A[:3], B)
            with pytest.raises(ValueError, match="this plan is for"):
                step(A.astype(np.float32), B.astype(np.float32))
            np.testing.assert_array_equal(step(A, B), 6.0)

    worlds.run(2, program)


def test_a_larger_problem_moves_the_arena_under_earlier_plans():
    def program(comm):
        rng = np.random.default_rng(0)
        small = rng.standard_normal((5, 7)), rng.standard_normal((7, 3))
        large = rng.standard_normal((300, 200)), rng.standard_normal((200, 3))
        step = mk.AllGatherGemm(*small, comm=comm)
        for a, b in (small, large, small):
            out = mk.allgather_gemm(a, b, comm=comm)
            np.testing.assert_allclose(out, np.tile(a @ b, (2, 1)), atol=1e-12)
            np.testing.assert_allclose(step(*small), np.tile(small[0] @ small[1], (2, 1)))

    worlds.run(2, program)
