"""gemm_reduce_scatter and gemm_allreduce: one set of bodies for both."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import worlds
from shapes import DTYPES, ReductionCase, cases, reduction_operands

import mkernel_cp as mk

OPERATORS = ("gemm_reduce_scatter", "gemm_allreduce")
CASES = [
    case for size in worlds.SIZES for case in cases("reduction", count=8, seed=size, world=size)
]
CLASSES = {"gemm_reduce_scatter": mk.GemmReduceScatter, "gemm_allreduce": mk.GemmAllReduce}


@pytest.fixture(params=worlds.SUMS)
def operator(request):
    """An operator in each of its forms, whatever the shape."""
    name, way = worlds.SUMS[request.param]
    with worlds.sums(way):
        yield name


def share(operator, comm, counts):
    """The rows of the sum that this rank gets."""
    start = sum(counts[: comm.rank]) if operator == "gemm_reduce_scatter" else 0
    rows = counts[comm.rank] if operator == "gemm_reduce_scatter" else sum(counts)
    return slice(start, start + rows)


def call(operator, comm, a, b, **keywords):
    """One call; gemm_allreduce has no row_counts."""
    if operator == "gemm_allreduce":
        keywords.pop("row_counts", None)
    return getattr(mk, operator)(a, b, comm=comm, **keywords)


def call_case(operator, comm, case, seed, integers=False, **options):
    """One call of a rank on poisoned memory, and its reference."""
    a_blocks, b_blocks = reduction_operands(case, seed, integers=integers)
    rows = share(operator, comm, case.row_counts)
    out = worlds.nan_filled((rows.stop - rows.start, case.n), case.out_dtype)
    out = worlds.put(comm, out)
    worlds.poison(comm)
    result = call(
        operator,
        comm,
        worlds.put(comm, a_blocks[comm.rank]),
        worlds.put(comm, b_blocks[comm.rank]),
        row_counts=None if case.split_rows else case.row_counts,
        out=out,
        dtype=case.out_dtype,
        options=mk.Options(transfer_dtype=case.transfer_dtype, **options),
    )
    assert result is out
    whole = operator == "gemm_allreduce"
    return worlds.get(comm, out), worlds.expected_sum(
        *(case_of(operator, case), seed, None if whole else comm.rank),
        *(comm._runtime.topology.sizes, integers),
    )


def case_of(operator, case):
    """A case as the operator sees it: the ranks add the rows that array_split gives them."""
    if operator == "gemm_reduce_scatter":
        return case
    return replace(case, row_counts=mk.reference.array_split_counts(case.m, case.world))


@pytest.mark.operator
@pytest.mark.parametrize(
    ("operator", "case"),
    # Each case in every other form.
    [(form, case) for i, form in enumerate(worlds.SUMS) for case in CASES[i % 2 :: 2]],
    indirect=["operator"],
    ids=str,
)
def test_equals_reference(operator, case):
    def program(comm):
        out, expected = call_case(operator, comm, case, 1)
        expected.assert_close(out, f"rank {comm.rank}")

    worlds.run(case.world, program)


@pytest.mark.operator
@pytest.mark.parametrize("case", CASES[::3], ids=str)
def test_small_integers_are_exact(operator, case):
    def program(comm):
        out, expected = call_case(operator, comm, case, 3, integers=True)
        np.testing.assert_array_equal(out.astype(np.float64), expected.value)

    worlds.run(case.world, program)


@pytest.mark.operator(world=2)
def test_operands_may_be_rounded_to_tf32(operator):
    counts = mk.reference.array_split_counts(101, 2)
    case = ReductionCase(
        "tf32", counts, 70, (45, 129), "float32", "float32", transfer_dtype="float32"
    )

    def program(comm):
        a_blocks, b_blocks = reduction_operands(case, 5)
        own = (worlds.put(comm, blocks[comm.rank]) for blocks in (a_blocks, b_blocks))
        out = worlds.get(comm, call(operator, comm, *own, options=mk.Options(tf32=True)))
        for tf32 in (True, False):
            whole = mk.reference.gemm_allreduce(a_blocks, b_blocks, tf32=tf32)
            rows = share(operator, comm, counts)
            part = mk.reference.Expected(whole.value[rows], whole.bound[rows], whole.dtype)
            assert (part.check(out) <= 1) is tf32

    worlds.run(2, program)


@pytest.mark.operator
@pytest.mark.parametrize("size", worlds.SIZES)
@pytest.mark.parametrize("transfer", ["bfloat16", "float32"])
def test_sums_start_with_the_owner_and_go_around_the_ring(operator, size, transfer):
    """Every partial sum is exact, and the order of the additions is seen in the last bits."""
    rng = np.random.default_rng(size)
    m, n = 23, 31
    a = np.ones((size, m, 1))
    b = (rng.standard_normal((size, 1, n)) * 2.0 ** rng.integers(0, 30, (size, 1, n))).astype(
        ml_dtypes.bfloat16
    )
    partials = np.broadcast_to(b.astype(np.float32), (size, m, n))
    counts = mk.reference.array_split_counts(m, size)
    owners = np.repeat(np.arange(size), counts)
    whole = np.stack([partials[owner, row] for row, owner in enumerate(owners)])
    for step in range(1, size):
        whole += partials[(owners + step) % size, np.arange(m)]

    def program(comm):
        out = call(
            operator,
            comm,
            worlds.put(comm, a[comm.rank].astype(ml_dtypes.bfloat16)),
            worlds.put(comm, b[comm.rank]),
            dtype=np.float32,
            options=mk.Options(transfer_dtype=transfer),
        )
        np.testing.assert_array_equal(worlds.get(comm, out), whole[share(operator, comm, counts)])

    worlds.run(size, program)


@pytest.mark.operator
@pytest.mark.parametrize("lanes", [1, 2, 3])
@pytest.mark.parametrize("size", worlds.SIZES)
def test_back_to_back_calls_with_late_ranks_and_roles(operator, size, lanes):
    """Inputs change as soon as a call returns; a slot that is used too early shows."""
    rng = np.random.default_rng(size)
    counts = tuple(int(rows) for rows in rng.integers(0, 20, size))
    if operator == "gemm_allreduce":
        counts = mk.reference.array_split_counts(sum(counts), size)
    depths = rng.integers(0, 30, size)
    a = [rng.standard_normal((30, sum(counts), k)).astype(np.float32) for k in depths]
    b = [rng.standard_normal((30, k, 29)).astype(np.float32) for k in depths]

    def program(comm):
        worlds.chaos(comm, seed=7 * size + lanes, lanes=lanes, delay_ns=(1_000_000, 500_000))
        own_a = worlds.put(comm, np.empty(a[comm.rank].shape[1:], np.float32))
        own_b = worlds.put(comm, np.empty(b[comm.rank].shape[1:], np.float32))
        for step in range(30):
            worlds.fill(comm, own_a, a[comm.rank][step])
            worlds.fill(comm, own_b, b[comm.rank][step])
            worlds.poison(comm)
            options = mk.Options(tile=(8, 8, 8)) if comm.target == "host" and step % 3 else None
            out = call(operator, comm, own_a, own_b, row_counts=counts, options=options)
            worlds.fill(comm, own_a, np.nan)
            worlds.fill(comm, own_b, np.nan)
            whole = sum(x[step] @ y[step] for x, y in zip(a, b, strict=True))
            out = worlds.get(comm, out)
            rows = share(operator, comm, counts)
            np.testing.assert_allclose(out, whole[rows], rtol=0, atol=1e-4)

    worlds.run(size, program)


@pytest.mark.operator
@pytest.mark.parametrize("size", worlds.SIZES)
def test_replayed_calls_equal_reference(operator, size):
    """On GPUs the calls are captured once; inputs change, and other operators come between."""
    rng = np.random.default_rng(4)
    m, k, n = 21, 33, 17
    data = rng.integers(-4, 5, (12, 2, size, m, k)).astype(np.float32)
    b = rng.integers(-4, 5, (size, k, n)).astype(np.float32)

    def program(comm):
        with worlds.stream(comm):
            rows = share(operator, comm, comm.row_counts(m))
            a = [worlds.put(comm, np.zeros((m, k), np.float32)) for _ in range(2)]
            outs = [
                worlds.put(comm, np.zeros((rows.stop - rows.start, n), np.float32))
                for _ in range(2)
            ]
            other = worlds.put(comm, b[comm.rank])
            step = CLASSES[operator](a[0], other, comm=comm)
            gathered = comm.zeros((m, k), np.float32)

            def calls():
                for x, out in zip(a, outs, strict=True):
                    step(x, other, out=out)

            mk.allgather_gemm(gathered, other, comm=comm)  # its plan may need a larger arena
            calls()
            comm.synchronize()
            replay = worlds.replayer(comm, calls)
            for number, values in enumerate(data):
                for x, value in zip(a, values, strict=True):
                    worlds.fill(comm, x, value[comm.rank])
                replay()
                for out, value in zip(outs, values, strict=True):
                    whole = (value @ b).sum(axis=0)
                    np.testing.assert_array_equal(worlds.get(comm, out), whole[rows])
                if number % 5 == 2:
                    worlds.fill(comm, gathered, values[0][comm.rank])
                    out = mk.allgather_gemm(gathered, other, comm=comm)
                    expected = values[0].reshape(size * m, k) @ b[comm.rank]
                    np.testing.assert_array_equal(worlds.get(comm, out), expected)
            comm.synchronize()

    worlds.run(size, program)


@pytest.mark.operator(world=3)
@pytest.mark.parametrize("dtype", DTYPES)
def test_same_bits_for_any_form_split_tile_and_stripe_and_on_all_ranks(dtype):
    rng = np.random.default_rng(5)
    a, b = rng.standard_normal((3, 97, 131)), rng.standard_normal((3, 131, 61))

    def program(comm):
        own = worlds.put(comm, a[comm.rank].astype(dtype))
        other = worlds.put(comm, b[comm.rank].astype(dtype))
        wholes = []
        # Nobody pulls beside the tiles but on Hopper.
        for option in worlds.different_options(comm, dtype, fewest=int(way == "pulled")):
            for _ in range(2):
                whole = mk.gemm_allreduce(own, other, comm=comm, options=option)
                part = mk.gemm_reduce_scatter(own, other, comm=comm, options=option)
                whole, part = worlds.get(comm, whole), worlds.get(comm, part)
                wholes.append(whole.tobytes())
                assert part.tobytes() == whole[comm.rows(97)].tobytes()
        return wholes

    found = set()
    for way in worlds.WAYS:
        with worlds.sums(way):
            found |= {bits for rank in worlds.run(3, program) for bits in rank}
    assert len(found) == 1


@pytest.mark.operator(world=2)
def test_all_bits_of_a_sum_may_be_set(operator):
    """What travels in words that are their own signals is never taken for nothing."""

    def program(comm):
        a = np.full((4, 1), 0xFFFFFFFF, np.uint32).view(np.float32)  # no number, as others are
        a, b = worlds.put(comm, a), worlds.put(comm, np.ones((1, 24), np.float32))
        for _ in range(2):
            out = worlds.get(comm, call(operator, comm, a, b))
            assert np.isnan(out).all()
        return out.tobytes()

    with worlds.sums("low latency"):
        results = worlds.run(2, program, progress_timeout=5)
    assert operator == "gemm_reduce_scatter" or len(set(results)) == 1


@pytest.mark.operator(world=3)
def test_nan_and_infinity_reach_only_what_depends_on_them(operator):
    rng = np.random.default_rng(6)
    a, b = rng.standard_normal((3, 60, 50)), rng.standard_normal((3, 50, 40))
    a[1, 17, 3], a[2, 44, 7], b[0, 9, 21] = np.nan, np.inf, np.nan

    def program(comm):
        own, other = worlds.put(comm, a[comm.rank]), worlds.put(comm, b[comm.rank])
        out = worlds.get(comm, call(operator, comm, own, other))
        with np.errstate(invalid="ignore"):
            whole = (a @ b).sum(axis=0)[share(operator, comm, comm.row_counts(60))]
        np.testing.assert_array_equal(np.isnan(out), np.isnan(whole))
        np.testing.assert_allclose(out, whole, atol=1e-11)

    worlds.run(3, program)


@pytest.mark.operator(world=3)
def test_counted_bytes_are_the_plans(operator):
    def program(comm):
        rng = np.random.default_rng(comm.rank)
        for m, k, n, size in ((64, 64, 64, 2), (33, 17, 5, 4), (2, 30, 9, 2), (20, 3, 0, 2)):
            a = rng.standard_normal((m, k + comm.rank)).astype(np.float16)
            b = rng.standard_normal((k + comm.rank, n)).astype(np.float16)
            options = mk.Options(transfer_dtype=f"float{8 * size}")
            a, b = worlds.put(comm, a), worlds.put(comm, b)
            with CLASSES[operator](a, b, comm=comm, options=options, dtype=np.float32) as step:
                before = worlds.bytes_from_peers(comm)
                step(a, b)
                step(a, b)
                assert worlds.bytes_from_peers(comm) - before == 2 * step.plan.bytes_from_peers
                own = comm.row_counts(m)[comm.rank]
                partials, sums = 2 * own * n * size, (m - own) * n * 4
                whole = operator == "gemm_allreduce"
                if not step.plan.low_latency:
                    assert step.plan.bytes_from_peers == partials + whole * sums

    worlds.run(3, program)


@pytest.mark.operator(world=2)
def test_operands_and_output_may_have_any_strides(operator):
    rng = np.random.default_rng(9)
    a, b = rng.standard_normal((2, 60, 40)), rng.standard_normal((2, 40, 70))
    views = (
        lambda x: x[3:51:2, 30:10:-1],
        lambda x: x[:24, ::2],
        lambda x: x.T[5:29, 8:28],
        lambda x: x[::-1, ::-1][:24, :20],
    )

    def program(comm):
        other = worlds.put(comm, b[comm.rank])[:20, ::5]
        room = worlds.put(comm, np.full((60, 80), np.nan))
        outs = (room[3:51:2, 70:42:-2], room[:24, :14].T[:14].T, room.T[:24, 5:19])
        for view in views:
            own = view(worlds.put(comm, a[comm.rank]))
            whole = sum(view(a[r]) @ b[r, :20, ::5] for r in range(2))
            rows = share(operator, comm, comm.row_counts(24))
            for out in outs:
                worlds.fill(comm, room, np.nan)
                call(operator, comm, own, other, out=out[rows])
                np.testing.assert_allclose(worlds.get(comm, out[rows]), whole[rows], atol=1e-12)
                outside = room.size - out[rows].size
                assert np.isnan(worlds.get(comm, room)).sum() == outside

    worlds.run(2, program)


def test_output_of_uneven_elements_is_filled_by_a_copy(operator):
    rng = np.random.default_rng(9)
    a, b = rng.standard_normal((2, 24, 10)), rng.standard_normal((2, 10, 12))

    def program(comm):
        fields = np.zeros((24, 12), np.dtype([("pad", "u1"), ("x", "f8")]))
        rows = share(operator, comm, comm.row_counts(24))
        call(operator, comm, a[comm.rank], b[comm.rank], out=fields["x"][rows])
        np.testing.assert_allclose(fields["x"][rows], (a @ b).sum(axis=0)[rows], atol=1e-12)

    worlds.run(2, program)


def test_result_is_a_new_array_that_later_calls_leave_alone(operator):
    def program(comm):
        a, b = np.full((4, 4), 1.0), np.eye(4)
        first = call(operator, comm, a, b)
        call(operator, comm, 2 * a, b)
        np.testing.assert_array_equal(first, 2.0)

    worlds.run(2, program)


def test_terms_may_change_without_the_others():
    """K_r is one rank's own affair: the others' plans go on."""

    def program(comm):
        for k in (3, 3 + comm.rank, 0 if comm.rank else 5, 3):
            agreements = len(comm._runtime._agreed)
            out = mk.gemm_allreduce(np.ones((5, k)), np.ones((k, 4)), comm=comm)
            total = sum(comm._runtime.agree("terms", lambda k=k: k))
            np.testing.assert_array_equal(out, total)
            assert agreements in (0, len(comm._runtime._agreed))

    worlds.run(3, program)


A, B = np.ones((4, 6)), np.ones((6, 5))
HALF = A.astype(np.float16), B.astype(np.float16)
WRONG = {
    "a list": (TypeError, "ndarray", [[1.0]], B, {}),
    "one dimension": (ValueError, "2 dimensions", A[0], B, {}),
    "integers": (TypeError, "bfloat16, float16", A.astype(int), B.astype(int), {}),
    "mixed": (TypeError, "same for both", A.astype(np.float32), B, {}),
    "inner extents": (ValueError, "as many columns", A[:, :5], B, {}),
    "narrowing": (TypeError, "use float64", A, B, {"dtype": np.float32}),
    "out of another shape": (ValueError, "the result has", A, B, {"out": np.ones((3, 5))}),
    "out of integers": (TypeError, "ndarray", A, B, {"out": [[1.0]]}),
    "options": (TypeError, "Options", A, B, {"options": {"tile": 3}}),
    "transfer that narrows": (
        TypeError,
        r"Options\(transfer_dtype=float32\).*use float64",
        *(A, B, {"options": mk.Options(transfer_dtype="float32")}),
    ),
    "transfer of another kind": (
        TypeError,
        "use float16 or float32",
        *(*HALF, {"options": mk.Options(transfer_dtype=ml_dtypes.bfloat16)}),
    ),
}
COUNTS = {
    "counts of another world": (ValueError, "2 numbers", A, B, {"row_counts": (4,)}),
    "negative counts": (ValueError, ">= 0", A, B, {"row_counts": (8, -4)}),
    "fractional counts": (TypeError, "integers", A, B, {"row_counts": (2.0, 2.0)}),
    "other counts than rows": (ValueError, "add up to 5", A, B, {"row_counts": (2, 3)}),
}


@pytest.mark.parametrize(
    ("operator", "name"),
    [(operator, name) for operator in OPERATORS for name in WRONG]
    + [("gemm_reduce_scatter", name) for name in COUNTS],
)
def test_wrong_arguments_on_all_ranks_leave_the_communicator_usable(operator, name):
    kind, text, a, b, keywords = (WRONG | COUNTS)[name]

    def program(comm):
        for _ in range(2):
            with pytest.raises(kind, match=text):
                getattr(mk, operator)(a, b, comm=comm, **keywords)
            np.testing.assert_array_equal(call(operator, comm, A, B), 2 * A.shape[1])

    worlds.run(2, program)


def test_overlapping_outputs_and_other_operands_are_refused(operator):
    def program(comm):
        room = np.ones((12, 8))
        rows = share(operator, comm, comm.row_counts(8))
        with pytest.raises(ValueError, match="overlaps a"):
            call(operator, comm, room[:8], np.eye(8), out=room[1:9][rows])
        with pytest.raises(ValueError, match="overlaps b"):
            call(operator, comm, np.eye(8), room[:8], out=room[1:9][rows])
        with CLASSES[operator](A, B, comm=comm) as step:
            with pytest.raises(ValueError, match="this plan is for"):
                step(A[:3], B)
            np.testing.assert_array_equal(step(A, B), 12.0)
        with pytest.raises(ValueError, match="closed"):
            step(A, B)

    worlds.run(2, program)


def test_a_larger_problem_moves_the_arena_under_earlier_plans(operator):
    def program(comm):
        rng = np.random.default_rng(0)
        small = rng.standard_normal((5, 7)), rng.standard_normal((7, 3))
        large = rng.standard_normal((300, 20)), rng.standard_normal((20, 300))
        step = CLASSES[operator](*small, comm=comm)
        for a, b in (small, large, small):
            rows = share(operator, comm, comm.row_counts(len(a)))
            np.testing.assert_allclose(call(operator, comm, a, b), 2 * (a @ b)[rows], atol=1e-12)
            rows = share(operator, comm, comm.row_counts(5))
            np.testing.assert_allclose(step(*small), 2 * (small[0] @ small[1])[rows])

    worlds.run(2, program)


def test_operators_take_turns_in_one_arena():
    """Landing zones and slots of different operators share memory, never at the same time."""

    def program(comm):
        worlds.chaos(comm, seed=3, delay_ns=(300_000, 300_000))
        rng = np.random.default_rng(1)
        a, b = rng.standard_normal((3, 30, 12)), rng.standard_normal((3, 12, 20))
        whole, gathered = (a @ b).sum(axis=0), a.reshape(90, 12) @ b[comm.rank]
        own, other = a[comm.rank], b[comm.rank]
        for _ in range(8):
            worlds.poison(comm)
            out = mk.gemm_allreduce(own, other, comm=comm)
            np.testing.assert_allclose(out, whole, atol=1e-12)
            out = mk.allgather_gemm(own, other, comm=comm)
            np.testing.assert_allclose(out, gathered, atol=1e-12)
            out = mk.gemm_reduce_scatter(own, other, comm=comm)
            np.testing.assert_allclose(out, whole[comm.rows(30)], atol=1e-12)

    worlds.run(3, program)


def test_a_case_names_what_it_is():
    case = ReductionCase("x", (1, 2), 5, (3, 0), "float16", "float32", transfer_dtype="float32")
    assert str(case) == "x-1+2x5x3+0-float16-float32-CC-by-float32"
