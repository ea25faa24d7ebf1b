"""The reference judges: right results pass it, and slightly wrong ones do not."""

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from mkernel_cp.reference import (
    accumulator_dtype,
    allgather_gemm,
    array_split_counts,
    gemm_allreduce,
    gemm_reduce_scatter,
    moe_combine,
    moe_dispatch_gemm,
    moe_layer,
    moe_routing,
    ring_attention,
    unit_roundoff,
)
from mkernel_cp.topology import Topology

DTYPES = ("bfloat16", "float16", "float32", "float64")
DEPTHS = (1, 2, 3, 16, 17, 64, 100, 333, 1000, 4096)
SIZE = 24


def make(kind, m, k, n, dtype, seed=0):
    random = np.random.default_rng([seed, k])
    if kind == "normal":
        a, b = random.standard_normal((m, k)), random.standard_normal((k, n))
    else:
        a, b = random.random((m, k)), random.random((k, n))
    if kind == "cancelling":
        a *= (-1.0) ** np.arange(k)
    return a.astype(dtype), b.astype(dtype)


def sequential(a, b):
    """One multiplication and one addition at a time, each rounded to the accumulator's type."""
    accumulator = accumulator_dtype(a.dtype)
    a, b = a.astype(accumulator), b.astype(accumulator)
    c = np.zeros((a.shape[0], b.shape[1]), accumulator)
    for k in range(a.shape[1]):
        c += a[:, k, None] * b[k]
    return c


def truncating(a, b, width=16):
    """Exact sums of `width` products, cut to float32 toward zero, as matrix units do."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    c = np.zeros((a.shape[0], b.shape[1]), np.float32)
    for k in range(0, a.shape[1], width):
        exact = c + a[:, k : k + width] @ b[k : k + width]
        c = exact.astype(np.float32)
        c = np.where(np.abs(c) > np.abs(exact), np.nextafter(c, np.float32(0)), c)
    return c


def outputs(dtype):
    return sorted({dtype, str(accumulator_dtype(dtype))})


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
@pytest.mark.parametrize("m", [0, 1, 2, 6, 7, 8, 100])
def test_counts_are_those_of_array_split(m, parts):
    assert array_split_counts(m, parts) == tuple(
        len(part) for part in np.array_split(np.arange(m), parts)
    )


@pytest.mark.parametrize(("m", "parts"), [(-1, 2), (3, 0)])
def test_counts_refuse(m, parts):
    with pytest.raises(ValueError, match="parts"):
        array_split_counts(m, parts)


@pytest.mark.parametrize("dtype", DTYPES)
def test_unit_roundoff_is_where_one_plus_it_starts_to_round_up(dtype):
    u = unit_roundoff(dtype)
    one = np.dtype(dtype).type(1)
    # Halfway between two numbers, rounded to the even one.
    assert np.dtype(dtype).type(1 + u) == one
    assert np.dtype(dtype).type(1 + 2 * u) > one
    assert u == {"bfloat16": 2**-8, "float16": 2**-11, "float32": 2**-24, "float64": 2**-53}[dtype]


def test_accumulators():
    assert [accumulator_dtype(dtype) for dtype in DTYPES] == ["float32"] * 3 + ["float64"]
    with pytest.raises(TypeError, match="bfloat16, float16, float32, float64"):
        accumulator_dtype("int32")


@pytest.mark.parametrize("kind", ["normal", "positive", "cancelling"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sequential_accumulation_passes(dtype, kind):
    for k in DEPTHS:
        a, b = make(kind, SIZE, k, SIZE, dtype)
        for out in outputs(dtype):
            allgather_gemm([a], b, out).assert_close(sequential(a, b).astype(out), f"K = {k}")


@pytest.mark.parametrize("kind", ["normal", "positive", "cancelling"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_truncating_accumulation_passes(dtype, kind):
    for k in DEPTHS:
        a, b = make(kind, SIZE, k, SIZE, dtype)
        for out in outputs(dtype):
            allgather_gemm([a], b, out).assert_close(truncating(a, b).astype(out), f"K = {k}")


def test_long_constant_vectors_can_exceed_the_bound():
    a, b = make("positive", SIZE, 1, SIZE, "float32")
    a, b = np.repeat(a, 4096, axis=1), np.repeat(b, 4096, axis=0)
    assert allgather_gemm([a], b).check(sequential(a, b)) > 1


@pytest.mark.parametrize("k", [k for k in DEPTHS if k <= 16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_up_to_16_terms_the_bound_covers_the_worst_case(dtype, k):
    a, b = make("positive", SIZE, k, SIZE, dtype)
    worst = (
        k * unit_roundoff(accumulator_dtype(dtype)) * (a.astype(np.float64) @ b.astype(np.float64))
    )
    assert np.all(worst <= allgather_gemm([a], b, accumulator_dtype(dtype)).bound)


@pytest.mark.parametrize("kind", ["normal", "positive", "cancelling"])
@pytest.mark.parametrize("k", DEPTHS)
@pytest.mark.parametrize("dtype", DTYPES)
class TestWrongResults:
    @pytest.fixture
    def parts(self, dtype, kind, k):
        a, b = make(kind, SIZE, k, SIZE, dtype)
        return a, b, sequential(a, b)

    def refused_everywhere(self, a, b, c):
        return all(allgather_gemm([a], b, o).check(c.astype(o)) > 1 for o in outputs(str(a.dtype)))

    def test_last_term_dropped(self, parts):
        a, b, _ = parts
        assert self.refused_everywhere(a, b, sequential(a[:, :-1], b[:-1]))

    def test_stale_row(self, parts, dtype, kind, k):
        a, b, c = parts
        c[7] = sequential(make(kind, SIZE, k, SIZE, dtype, seed=1)[0][7:8], b)[0]
        assert self.refused_everywhere(a, b, c)

    def test_row_of_zeros(self, parts):
        a, b, c = parts
        c[-1] = 0
        assert self.refused_everywhere(a, b, c)

    def test_transposed_tile(self, parts):
        a, b, c = parts
        c[8:16, 8:16] = c[8:16, 8:16].T.copy()
        assert self.refused_everywhere(a, b, c)

    def test_swapped_rows(self, parts):
        a, b, c = parts
        c[[3, 4]] = c[[4, 3]]
        assert self.refused_everywhere(a, b, c)

    def test_one_bfloat16_ulp_in_a_wide_output(self, parts):
        a, b, c = parts
        out = accumulator_dtype(a.dtype)
        assert allgather_gemm([a], b, out).check(c * c.dtype.type(1 + 2**-7)) > 1

    def test_unwritten_element(self, parts):
        a, b, c = parts
        c[5, 6] = np.nan
        assert self.refused_everywhere(a, b, c)


def exact_product(a, b):
    return [
        [sum((Fraction(float(x)) * Fraction(float(y)) for x, y in zip(row, column, strict=True)),
             Fraction(0)) for column in b.T]
        for row in a
    ]  # fmt: skip


def assert_hardly_worse_than_rounding_once(a, b):
    expected = allgather_gemm([a], b)
    for i, row in enumerate(exact_product(a, b)):
        for j, exact in enumerate(row):
            value, bound = float(expected.value[i, j]), float(expected.bound[i, j])
            beyond_rounding = abs(Fraction(value) - exact) - Fraction(abs(np.spacing(value))) / 2
            assert beyond_rounding <= Fraction(bound) / 10**5
    assert expected.check(a @ b) <= 1


@pytest.mark.parametrize("spread", [0, 10, 100])
def test_float64_value_is_better_than_what_it_judges(spread):
    random = np.random.default_rng(spread)
    a = random.standard_normal((4, 301)) * 10.0 ** random.integers(-spread, spread + 1, (4, 301))
    b = random.standard_normal((301, 5)) * 10.0 ** random.integers(-spread, spread + 1, (301, 5))
    # A product that cancels to its last bits.
    a[0, 150:300], b[150:300, 0] = -a[0, :150], b[:150, 0]
    assert_hardly_worse_than_rounding_once(a, b)


def test_float64_value_is_as_good_where_the_slices_are_as_large_as_they_get():
    random = np.random.default_rng(0)
    assert_hardly_worse_than_rounding_once(
        1 - 0.01 * random.random((2, 4095)), 1 - 0.01 * random.random((4095, 3))
    )


def test_float64_extremes_neither_overflow_nor_vanish():
    a = np.array([[1e200, -1e200, 1e200], [1e-200, 1e-200, 0], [5e-324, 0, 0], [0, 0, 0]])
    b = np.array([[1e100, 1e-100], [1e100, 1e-100], [1e108, 1e-108]])
    expected = allgather_gemm([a], b)
    assert np.isfinite(expected.bound).all()
    norms = np.multiply.outer([3**0.5 * 1e200, 2**0.5 * 1e-200], [1e108, 2**0.5 * 1e-100])
    bound = 2**-53 * np.abs(expected.value[:2]) + 2**-51 * 3**0.5 * norms
    np.testing.assert_allclose(expected.bound[:2], bound, rtol=1e-12, atol=1e-322)
    assert expected.value[0, 1] == pytest.approx(1e92, rel=1e-15)
    assert expected.value[1, 0] == pytest.approx(2e-100, rel=1e-15)
    assert expected.value[2, 0] == pytest.approx(5e-324 * 1e100, rel=1e-15)
    assert np.all(expected.value[3] == 0)
    with np.errstate(all="ignore"):
        assert expected.check(a @ b) <= 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_are_rows_in_rank_order(dtype):
    a, b = make("normal", 10, 6, 4, dtype)
    whole = allgather_gemm([a], b)
    blocks = allgather_gemm([a[:0], a[:3], a[3:4], a[4:]], b)
    np.testing.assert_array_equal(blocks.value, whole.value)
    np.testing.assert_array_equal(blocks.bound, whole.bound)
    assert blocks.value.dtype == blocks.bound.dtype == np.float64
    assert blocks.dtype == dtype


@pytest.mark.parametrize("dtype", DTYPES)
def test_empty_extents(dtype):
    def zeros(*shape):
        return np.zeros(shape, dtype)

    no_terms = allgather_gemm([zeros(2, 0), zeros(3, 0)], zeros(0, 4))
    assert no_terms.check(zeros(5, 4)) == 0
    assert no_terms.check(zeros(5, 4) + zeros(5, 4).dtype.type(1e-5)) > 1
    assert allgather_gemm([zeros(0, 3)] * 2, zeros(3, 4)).check(zeros(0, 4)) == 0
    assert allgather_gemm([zeros(2, 3)], zeros(3, 0)).check(zeros(2, 0)) == 0
    allgather_gemm([zeros(0, 3)], zeros(3, 0)).assert_close(zeros(0, 0))


@pytest.mark.parametrize("dtype", DTYPES)
def test_zero_rows_must_be_zero_and_zero_over_zero_is_right(dtype):
    a, b = make("normal", 4, 8, 4, dtype)
    a[1] = 0
    c = sequential(a, b).astype(dtype)
    expected = allgather_gemm([a], b)
    assert expected.check(c) <= 1
    c[1, 1] = 1e-6
    assert expected.check(c) > 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_infinity_stay_in_their_rows_and_columns(dtype):
    a, b = make("normal", 6, 9, 5, dtype)
    a[1, 2], a[2, 3], a[3, 8] = np.nan, np.inf, -np.inf
    b[3, 0], b[4, 4] = 0, np.inf
    expected = allgather_gemm([a[:2], a[2:]], b)
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(
            np.isnan(expected.value), np.isnan(a.astype(np.float64) @ b.astype(np.float64))
        )
    clean = np.ix_([0, 4, 5], [0, 1, 2, 3])
    assert np.isfinite(expected.value[clean]).all()
    assert (expected.bound[clean] > 0).all()
    assert not np.isfinite(expected.value[1:4]).any()
    assert not np.isfinite(expected.value[:, 4]).any()
    assert not np.isnan(expected.bound).any()

    with np.errstate(invalid="ignore"):
        c = sequential(a, b).astype(dtype)
    assert expected.check(c) <= 1
    for index, wrong in [((1, 1), 0), ((2, 1), -c[2, 1]), ((2, 1), np.nan), ((2, 0), np.inf),
                         ((0, 1), np.nan), ((4, 0), np.inf), ((3, 3), 1)]:  # fmt: skip
        changed = c.copy()
        changed[index] = wrong
        assert expected.check(changed) > 1


def test_overflow_of_float16():
    largest = 65504.0
    # The second column: past the largest finite number, the largest, the one before, and far less.
    a = np.array([[256.0], [255.875], [255.75], [250.0]], np.float16)
    b = np.array([[512.0, -256.0]], np.float16)
    expected = allgather_gemm([a], b)

    def errors(element, *candidates):
        c = np.clip(expected.value, -largest, largest)
        c[:, 0] = np.inf
        results = []
        for candidate in candidates:
            c[element] = candidate
            results.append(expected.check(c.astype(np.float16)))
        return results

    assert all(error <= 1 for error in errors((0, 0), np.inf))
    assert all(error > 1 for error in errors((0, 0), largest, -np.inf, np.nan, 1.0))
    # -65536 is one spacing past the largest finite number: both are within the bound.
    assert all(error <= 1 for error in errors((0, 1), -np.inf, -largest))
    assert all(error > 1 for error in errors((0, 1), np.inf, largest, -65440.0))
    # -65472 is finite in float16; infinity would be two spacings off.
    assert all(error <= 1 for error in errors((2, 1), -65472.0))
    assert all(error > 1 for error in errors((2, 1), -np.inf))
    assert all(error > 1 for error in errors((3, 1), -np.inf))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_overflow_past_float32(dtype):
    a, b = np.full((1, 1), 1e30, dtype), np.array([[1e30, -1e30, 1]], dtype)
    expected = allgather_gemm([a], b)
    assert np.isfinite(expected.value).all()
    assert expected.check(np.array([[np.inf, -np.inf, 1e30]], dtype)) <= 1
    assert expected.check(np.array([[np.inf, -np.inf, np.inf]], dtype)) > 1
    largest = ml_dtypes.finfo(dtype).max
    assert expected.check(np.array([[largest, -np.inf, 1e30]], dtype)) > 1


def test_subnormal_results_round_within_the_bound():
    a = np.array([[2.0**-14, 2.0**-20, 2.0**-24]], np.float16).T
    b = np.array([[2.0**-11, 3 * 2.0**-12, 0.75, 0.5]], np.float16)
    c = (a.astype(np.float64) @ b.astype(np.float64)).astype(np.float16)
    assert allgather_gemm([a], b).check(c) <= 1


def test_text_of_a_failure():
    a, b = make("normal", 6, 5, 4, "float32")
    expected = allgather_gemm([a], b)
    c = sequential(a, b)
    expected.assert_close(c)
    c[2:4, 1:3] += 1
    c[3, 2] = 1000
    with pytest.raises(AssertionError) as failure:
        expected.assert_close(c, what="rank 1")
    text = str(failure.value)
    assert text.startswith("rank 1: 4 of 24 elements are wrong, all in [2:4, 1:3]; worst at (3, 2)")
    assert "got 1000.0" in text
    assert repr(float(expected.value[3, 2])) in text
    assert "times the bound" in text
    assert "shape (6, 4), float32" in text


@pytest.mark.parametrize("wrong", [np.zeros((4, 6), "f4"), np.zeros((6, 4), "f8")])
def test_other_shape_or_type_is_refused(wrong):
    a, b = make("normal", 6, 5, 4, "float32")
    expected = allgather_gemm([a], b)
    with pytest.raises(ValueError, match=r"expected \(6, 4\) of float32"):
        expected.check(wrong)
    with pytest.raises(AssertionError, match=r"here: .*expected \(6, 4\) of float32"):
        expected.assert_close(wrong, "here")


def test_arguments_are_checked():
    a, b = make("normal", 6, 5, 4, "float32")
    with pytest.raises(ValueError, match="empty"):
        allgather_gemm([], b)
    with pytest.raises(ValueError, match="2 dimensions"):
        allgather_gemm([a[0]], b)
    with pytest.raises(ValueError, match=r"\[5, 4\] columns, b has 5 rows"):
        allgather_gemm([a, a[:, :4]], b)
    with pytest.raises(TypeError, match="all must be the same"):
        allgather_gemm([a.astype("f8")], b)
    with pytest.raises(TypeError, match="int64 is not supported; use one of bfloat16, float16"):
        allgather_gemm([a.astype("i8")], b.astype("i8"))
    with pytest.raises(TypeError, match="float32 operands cannot give float16; use one of float32"):
        allgather_gemm([a], b, "float16")
    assert allgather_gemm([a.astype("f2")], b.astype("f2"), np.float32).dtype == np.float32


RANKS = 4


def terms(kind, depth, dtype):
    """Operands of a sum over ranks; the third has no terms of its own."""
    depths = (depth, 2 * depth, 0, depth + 1)
    pairs = [make(kind, SIZE, k, SIZE, dtype, seed) for seed, k in enumerate(depths)]
    return [list(blocks) for blocks in zip(*pairs, strict=True)]


def added(a_blocks, b_blocks, rank, out, transfer, order=None):
    """A rank's rows as a kernel makes them: own sums first, others rounded on their way."""
    counts = array_split_counts(SIZE, RANKS)
    rows = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
    own, *others = order or [(rank + step) % RANKS for step in range(RANKS)]
    total = sequential(a_blocks[own][rows], b_blocks[own])
    for peer in others:
        partial = sequential(a_blocks[peer][rows], b_blocks[peer])
        total = total + partial.astype(transfer).astype(total.dtype)
    return total.astype(out)


@pytest.mark.parametrize("kind", ["normal", "positive", "cancelling"])
@pytest.mark.parametrize("dtype", DTYPES)
class TestSumsOverRanks:
    @pytest.fixture(params=(1, 17, 333))
    def blocks(self, dtype, kind, request):
        return terms(kind, request.param, dtype)

    def variants(self, dtype):
        return [(out, transfer) for out in outputs(dtype) for transfer in outputs(dtype)]

    def test_sums_in_ring_order_pass(self, blocks, dtype):
        for out, transfer in self.variants(dtype):
            parts = [added(*blocks, rank, out, transfer) for rank in range(RANKS)]
            for rank, part in enumerate(parts):
                expected = gemm_reduce_scatter(*blocks, None, rank, out, transfer)
                expected.assert_close(part, f"rank {rank}")
            gemm_allreduce(*blocks, out, transfer).assert_close(np.concatenate(parts))

    def test_wrong_sums_are_refused(self, blocks, dtype):
        for out, transfer in self.variants(dtype):
            expected = gemm_reduce_scatter(*blocks, None, 1, out, transfer)
            for order in ([1, 3], [1, 2, 0], [1, 3, 3], [1, 3, 0, 0], [3, 0], [0, 1, 3, 1]):
                assert expected.check(added(*blocks, 1, out, transfer, order)) > 1
            assert expected.check(added(*blocks, 0, out, transfer)) > 1


def added_on_nodes(a_blocks, b_blocks, rank, transfer, nodes, lost=None):
    """The same in the operands' type, each node's sum first; `lost` is left out."""
    counts, topology = array_split_counts(SIZE, RANKS), Topology(rank, nodes)
    rows, total = slice(sum(counts[:rank]), sum(counts[: rank + 1])), None
    for node, ring in enumerate(topology.rings):
        of_node = None
        for peer in ring:
            partial = sequential(a_blocks[peer][rows], b_blocks[peer])
            if peer == lost:
                partial = np.zeros_like(partial)
            crossed = partial if of_node is None else partial.astype(transfer).astype(partial.dtype)
            of_node = crossed if of_node is None else of_node + crossed
        if node != topology.node:
            of_node = of_node.astype(transfer).astype(of_node.dtype)
        total = of_node if total is None else total + of_node
    return total.astype(a_blocks[0].dtype)


@pytest.mark.parametrize("nodes", [(2, 2), (1, 2, 1), (1, 1, 1, 1)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_between_nodes_pass_in_their_order_and_as_a_whole_only(dtype, nodes):
    blocks = terms("normal", 33, dtype)
    for transfer in outputs(dtype):
        for rank in range(RANKS):
            expected = gemm_reduce_scatter(*blocks, None, rank, None, transfer, nodes=nodes)
            assert expected.check(added_on_nodes(*blocks, rank, transfer, nodes)) <= 1
            assert expected.check(added_on_nodes(*blocks, rank, transfer, nodes, lost=3)) > 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_partial_sums_that_are_rounded_twice_are_refused_where_float32_is_asked_for(dtype):
    blocks = terms("normal", 64, dtype)
    coarse = added(*blocks, 0, "float32", dtype)
    assert gemm_reduce_scatter(*blocks, None, 0, "float32", dtype).check(coarse) <= 1
    assert gemm_reduce_scatter(*blocks, None, 0, "float32", "float32").check(coarse) > 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sum_over_one_rank_is_a_product(dtype):
    a, b = make("normal", 10, 6, 4, dtype)
    one, product = gemm_allreduce([a], [b]), allgather_gemm([a], b)
    np.testing.assert_array_equal(one.value, product.value)
    np.testing.assert_allclose(one.bound, product.bound, rtol=1e-15)


def test_float64_sums_are_as_good_as_one_product():
    a, b = make("normal", 5, 90, 4, "float64")
    split = [30, 31]
    blocks = np.split(a, split, axis=1), np.split(b, split)
    np.testing.assert_array_equal(gemm_allreduce(*blocks).value, allgather_gemm([a], b).value)


def test_rows_are_shared_out_as_asked_for():
    blocks = [[x] * 3 for x in make("normal", 10, 6, 4, "float64")]
    whole = gemm_allreduce(*blocks).value
    for counts in (None, (0, 10, 0), (1, 2, 7)):
        parts = [gemm_reduce_scatter(*blocks, counts, rank).value for rank in range(3)]
        np.testing.assert_allclose(np.concatenate(parts), whole, rtol=1e-15)


def test_operands_of_sums_are_checked():
    a, b = make("normal", 6, 5, 4, "float32")
    with pytest.raises(ValueError, match="one of each per rank"):
        gemm_allreduce([], [])
    with pytest.raises(ValueError, match="one of each per rank"):
        gemm_reduce_scatter([a, a], [b])
    with pytest.raises(ValueError, match="2 dimensions"):
        gemm_reduce_scatter([a[0]], [b])
    with pytest.raises(ValueError, match="do not make a sum"):
        gemm_reduce_scatter([a, a[1:]], [b, b])
    with pytest.raises(ValueError, match="do not fit"):
        gemm_reduce_scatter([a, a], [b, b], (3, 4))
    with pytest.raises(TypeError, match="all must be the same"):
        gemm_allreduce([a, a.astype("f8")], [b, b.astype("f8")])
    with pytest.raises(TypeError, match="cannot give float16"):
        gemm_reduce_scatter([a], [b], transfer_dtype="float16")
    with pytest.raises(ValueError, match=r"nodes \(1, 2\) do not fit 2 blocks"):
        gemm_reduce_scatter([a, a], [b, b], nodes=(1, 2))


def draw_attention(kind, n, columns, dtype, heads=(1, 1), batch=1):
    """Queries, keys and values of a sequence."""
    random = np.random.default_rng([n, columns, len(kind)])
    q, k, v = (
        random.standard_normal((batch, n, count, columns)) for count in (heads[0], *heads[1:] * 2)
    )
    if kind == "positive":
        q, k, v = abs(q), abs(k), abs(v)
    elif kind == "sharp":
        q *= 6
    elif kind == "flat":
        q *= 0.1
    elif kind == "aligned":
        k[:, ::3] = q[:, :1, :1]
    return tuple(x.astype(dtype) for x in (q, k, v))


def online_softmax(q, k, v, tile, round_weights):
    """Attention of one head, every operation rounded to the accumulator's type, in its order."""
    dtype, accumulator = q.dtype, accumulator_dtype(q.dtype)
    q, k, v = (x[0, :, 0].astype(accumulator) for x in (q, k, v))
    n, columns = q.shape
    highest, total = np.full(n, -np.inf, accumulator), np.zeros(n, accumulator)
    sums, scale = np.zeros((n, columns), accumulator), accumulator.type(1 / np.sqrt(columns))
    for begin in range(0, n, tile):
        keys = slice(begin, min(begin + tile, n))
        scores = np.zeros((n, keys.stop - begin), accumulator)
        for column in range(columns):
            scores += q[:, column, None] * k[keys, column]
        scores *= scale
        before, highest = highest, np.maximum(highest, scores.max(axis=1))
        kept, weights = np.exp(before - highest), np.exp(scores - highest[:, None])
        total *= kept
        sums *= kept[:, None]
        rounded = weights.astype(dtype).astype(accumulator) if round_weights else weights
        for j in range(keys.stop - begin):
            total += weights[:, j]
            sums += rounded[:, j, None] * v[begin + j]
    out = (sums / total[:, None]).astype(dtype)
    return out[None, :, None], (highest + np.log(total))[None, None]


@pytest.mark.parametrize("kind", ["normal", "positive", "sharp", "flat", "aligned"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_emulated_attention_passes(dtype, kind):
    """What fixes the constant in the bound of what the accumulator does."""
    worst = [0.0, 0.0]
    for columns in (1, 8, 64):
        for n in (1, 2, 17, 97):
            q, k, v = draw_attention(kind, n, columns, dtype)
            expected = ring_attention(q, [k], [v], 0)
            for tile, round_weights in ((1, False), (16, "16" in dtype)):
                results = online_softmax(q, k, v, tile, round_weights)
                errors = (part.check(x) for part, x in zip(expected, results, strict=True))
                worst = [max(pair) for pair in zip(worst, errors, strict=True)]
    # Right with a margin, but not by far: half of the constant would refuse some of these.
    assert max(worst) <= 0.8
    assert worst[0] > 0.05
    assert worst[1] > 0.3


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("causal", [False, True])
def test_attention_is_that_of_the_whole_sequence(causal, layout):
    q, k, v = draw_attention("normal", 13, 5, "float64", (6, 2), 2)
    whole = ring_attention(q, [k], [v], 0, causal=causal, scale=0.3)
    scores = 0.3 * np.einsum("bqhd,bkhd->bhqk", q, k.repeat(3, axis=2))
    scores[:, :, ~np.tri(13, dtype=bool) & causal] = -np.inf
    weights = np.exp(scores)
    sums = weights.sum(axis=-1)
    out = np.einsum("bhqk,bkhd->bqhd", weights / sums[..., None], v.repeat(3, axis=2))
    assert whole[0].check(out) < 100  # hardly rounded with care
    np.testing.assert_allclose(whole[0].value, out, rtol=1e-13, atol=1e-13)
    np.testing.assert_allclose(whole[1].value, np.log(sums), rtol=1e-13, atol=1e-13)

    parts = np.array_split(np.arange(13), 6)
    held = {
        "contiguous": np.split(np.arange(13), [0, 4, 5]),
        "zigzag": [np.concatenate((parts[r], parts[5 - r])) for r in range(3)],
    }[layout]
    for rank, own in enumerate(held):
        blocks = ([x[:, positions] for positions in held] for x in (k, v))
        part = ring_attention(q[:, own], *blocks, rank, causal=causal, scale=0.3, layout=layout)
        for expected, all_of_it, axis in zip(part, whole, (1, 2), strict=True):
            for name in ("value", "bound"):
                np.testing.assert_allclose(
                    getattr(expected, name), getattr(all_of_it, name).take(own, axis), rtol=1e-15
                )


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_that_is_slightly_wrong_is_refused(dtype):
    q, k, v = draw_attention("normal", 17, 8, dtype)
    out, lse = ring_attention(q, [k], [v], 0, causal=True)
    right = out.value.astype(dtype), lse.value.astype(lse.dtype)
    assert out.check(right[0]) <= 1
    assert lse.check(right[1]) <= 1
    others = {
        "no mask": ring_attention(q, [k], [v], 0),
        "mask off by one": ring_attention(q[:, 1:], [k[:, :-1]], [v[:, :-1]], 0, causal=True),
        "scale": ring_attention(q, [k], [v], 0, causal=True, scale=0.37),
        "stale value": ring_attention(q, [k], [np.roll(v, 1, axis=1)], 0, causal=True),
    }
    for name, wrong in others.items():
        rows = slice(1, None) if name == "mask off by one" else slice(None)
        changed = right[0].copy()
        changed[:, rows] = wrong[0].value.astype(dtype)
        assert out.check(changed) > 1, name
        if name != "stale value":
            changed = right[1].copy()
            changed[..., rows] = wrong[1].value.astype(lse.dtype)
            assert lse.check(changed) > 1, name


def test_what_attention_does_not_see_has_no_influence_and_what_it_sees_acts_as_in_numpy():
    q, k, v = draw_attention("normal", 9, 4, "float64")
    clean = ring_attention(q, [k], [v], 0, causal=True)
    v[0, 6, 0, 2], v[0, 4, 0, 1], k[0, 7, 0, 0] = np.nan, np.inf, np.nan
    out, lse = ring_attention(q, [k], [v], 0, causal=True)
    special = ~np.isfinite(out.value[0, :, 0])
    expected = np.zeros((9, 4), bool)
    expected[6:, 2] = expected[4:, 1] = expected[7:] = True
    np.testing.assert_array_equal(special, expected)
    assert (out.value[0, 4:7, 0, 1] == np.inf).all()
    np.testing.assert_array_equal(np.isnan(lse.value[0, 0]), np.arange(9) >= 7)
    np.testing.assert_array_equal(out.value[0, ~expected[:, 1] & ~expected[:, 2]],
                                  clean[0].value[0, ~expected[:, 1] & ~expected[:, 2]])  # fmt: skip
    assert (out.bound[out.value != np.inf] >= 0).all()
    assert not np.isnan(out.bound).any()
    empty = ring_attention(q[:, :0], [k[:, :0]], [v[:, :0]], 0)
    assert empty[0].value.shape == (1, 0, 1, 4)


def test_arguments_of_attention_are_checked():
    q, k, v = draw_attention("normal", 6, 4, "float32", (4, 2))
    with pytest.raises(ValueError, match="4 dimensions"):
        ring_attention(q[0], [k], [v], 0)
    with pytest.raises(ValueError, match="every rank"):
        ring_attention(q, [k], [v], 1)
    with pytest.raises(ValueError, match="more than heads"):
        ring_attention(q, [k[:, 1:]], [v[:, 1:]], 0)
    with pytest.raises(ValueError, match="3 heads, k and v 2"):
        ring_attention(q[:, :, :3], [k], [v], 0)
    with pytest.raises(TypeError, match="others"):
        ring_attention(q.astype("f8"), [k], [v], 0)
    with pytest.raises(ValueError, match="layout 'odd'"):
        ring_attention(q, [k], [v], 0, layout="odd")
    with pytest.raises(ValueError, match=r"\[2, 4\] positions"):
        ring_attention(q[:, :2], [k[:, :2], k[:, 2:]], [v[:, :2], v[:, 2:]], 0, layout="zigzag")


# --- experts --------------------------------------------------------------------------------------


def draw_routing(ranks, experts, k, tokens, seed=0):
    """Ids of all ranks, some of them -1, some repeated."""
    random = np.random.default_rng([seed, experts, k])
    return [random.integers(-1, experts, (count, k)) for count in tokens[:ranks]]


def test_rows_of_experts_are_in_the_order_of_expert_source_token_and_slot():
    topk = draw_routing(3, 5, 4, (7, 0, 6))
    rows = 0
    for rank, first, experts in ((0, 0, 2), (1, 2, 2), (2, 4, 1)):
        routing = moe_routing(topk, rank, 5)
        expected = [
            (source, token, slot)
            for expert in range(first, first + experts)
            for source, block in enumerate(topk)
            for token in range(len(block))
            for slot in range(4)
            if block[token, slot] == expert
        ]
        found = (routing.source_rank, routing.source_token, routing.source_slot)
        assert list(zip(*(x.tolist() for x in found), strict=True)) == expected
        counts = [sum((block == first + e).sum() for block in topk) for e in range(experts)]
        assert np.diff(routing.expert_offsets).tolist() == counts
        rows += len(expected)
    assert rows == sum((block >= 0).sum() for block in topk)
    assert moe_routing(topk, 2, 2 + topk[0].max()).expert_offsets.dtype == np.int64
    with pytest.raises(ValueError, match="outside -1 to 3"):
        moe_routing(topk, 0, 4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_experts_are_products(dtype):
    topk = draw_routing(2, 3, 2, (9, 5))
    x = [make("normal", count, 33, 1, dtype, seed=count)[0] for count in (9, 5)]
    w = np.stack([make("normal", 1, 33, 6, dtype, seed=e)[1] for e in range(2)])
    rows, routing = moe_dispatch_gemm(x, topk, w, 0, 3)
    for expert in range(2):
        own = slice(*routing.expert_offsets[expert : expert + 2])
        sources = zip(routing.source_rank[own], routing.source_token[own], strict=True)
        a = np.stack([x[source][token] for source, token in sources])
        product = allgather_gemm([a], w[expert])
        np.testing.assert_array_equal(rows.value[own], product.value)
        np.testing.assert_array_equal(rows.bound[own], product.bound)


def combined(rows, topk, weight, rank, experts, transfer, order=1):
    """As an operator does it: products, sums of a rank, what crosses the link, sum over ranks."""
    dtype, accumulator = rows[0].dtype, accumulator_dtype(rows[0].dtype)
    total = np.zeros((len(weight), rows[0].shape[1]), accumulator)
    for d in range(len(rows))[::order]:
        routing = moe_routing(topk, d, experts)
        partial = np.zeros_like(total)
        own = np.flatnonzero(routing.source_rank == rank)
        for row in own[np.argsort(routing.source_slot[own], kind="stable")]:
            token, slot = routing.source_token[row], routing.source_slot[row]
            partial[token] += weight[token, slot] * rows[d][row].astype(accumulator)
        total += partial if d == rank else partial.astype(transfer).astype(accumulator)
    return total.astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_emulated_combination_of_experts_passes_and_a_lost_term_does_not(dtype):
    experts, ranks, k = 6, 3, 5
    topk = draw_routing(ranks, experts, k, (40, 33, 0), seed=1)
    random = np.random.default_rng(0)
    counts = [moe_routing(topk, d, experts).expert_offsets[-1] for d in range(ranks)]
    rows = [random.standard_normal((count, 30)).astype(dtype) for count in counts]
    weight = random.standard_normal(topk[0].shape).astype(accumulator_dtype(dtype))
    worst = 0.0
    for transfer in {dtype, accumulator_dtype(dtype).name} if dtype != "float64" else {dtype}:
        expected = moe_combine(rows, topk, weight, 0, experts, transfer)
        worst = max(worst, expected.check(combined(rows, topk, weight, 0, experts, transfer)))
        lost = topk[0].copy()
        token, slot = np.argwhere(lost >= 0)[0]
        changed = weight.copy()
        changed[token, slot] = 0
        assert expected.check(combined(rows, topk, changed, 0, experts, transfer)) > 1
    assert 0.2 < worst <= 1
    if dtype == "bfloat16":
        exact = moe_combine(rows, topk, weight, 0, experts, "float32")
        assert exact.check(combined(rows, topk, weight, 0, experts, dtype)) > 1


def test_arguments_of_experts_are_checked():
    topk, rows = [np.zeros((2, 1), int)], [np.ones((2, 3), np.float32)]
    with pytest.raises(ValueError, match="has 2 experts, w 1"):
        moe_dispatch_gemm([np.ones((2, 4))], topk, np.ones((1, 4, 3)), 0, 2)
    with pytest.raises(ValueError, match="topk_weight"):
        moe_combine(rows, topk, np.ones((2, 1)), 0, 1)
    with pytest.raises(ValueError, match="same k"):
        moe_routing([topk[0], np.zeros((2, 2), int)], 0, 1)
    two = [topk[0], topk[0][:0]]
    with pytest.raises(TypeError, match="differ in type"):
        moe_combine([rows[0], np.ones((0, 3))], two, np.ones((2, 1), np.float32), 0, 1)
    nobody = moe_combine(rows, [np.full((2, 1), -1)], np.ones((2, 1), np.float32), 0, 1)
    assert (nobody.value == 0).all()


ACTIVATIONS = {
    None: lambda a: a,
    "silu": lambda a: a / (1 + np.exp(-a)),
    "gelu": lambda a: a * np.vectorize(math.erfc)(-a / 2**0.5).astype(a.dtype) / 2,
    "swiglu": lambda a: np.multiply(
        np.split(a, 2, 1)[0] / (1 + np.exp(-np.split(a, 2, 1)[0])), np.split(a, 2, 1)[1]
    ),
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_emulated_layer_of_experts_passes_and_one_that_is_slightly_wrong_does_not(
    dtype, activation
):
    experts, counts = 3, (2, 1)
    topk = draw_routing(2, experts, 2, (30, 20), seed=2)
    halves = 2 if activation == "swiglu" else 1
    random = np.random.default_rng(1)
    x = [random.standard_normal((len(block), 40)).astype(dtype) for block in topk]
    w1 = [random.standard_normal((n, 40, 24 * halves)).astype(dtype) for n in counts]
    w2 = [random.standard_normal((n, 24, 10)).astype(dtype) for n in counts]
    accumulator = accumulator_dtype(dtype)
    weight = random.standard_normal(topk[0].shape).astype(accumulator)
    expected = moe_layer(x, topk, weight, w1, w2, 0, experts, activation)

    def emulate(first=1.0, second=1.0):
        rows = []
        for d in range(2):
            routing = moe_routing(topk, d, experts)
            block = np.zeros((routing.expert_offsets[-1], 10), dtype)
            for expert in range(counts[d]):
                own = slice(*routing.expert_offsets[expert : expert + 2])
                sources = zip(routing.source_rank[own], routing.source_token[own], strict=True)
                a = np.array([x[source][token] for source, token in sources])
                hidden = sequential(a, w1[d][expert]) * accumulator.type(first)
                hidden = ACTIVATIONS[activation](hidden).astype(dtype)
                made = sequential(hidden, w2[d][expert]) * accumulator.type(second)
                block[own] = made.astype(dtype)
            rows.append(block)
        return combined(rows, topk, weight, 0, experts, dtype)

    assert expected.check(emulate()) <= 1
    # What wide types round once matters less than what they add up.
    off = 1 + (100 if accumulator != dtype else 2000) * unit_roundoff(dtype)
    assert expected.check(emulate(first=off)) > 1
    assert expected.check(emulate(second=off)) > 1
