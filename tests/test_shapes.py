"""The generator of shapes gives what it promises, for every world."""

from itertools import product

import numpy as np
import pytest
from shapes import DTYPES, Case, cases, operands

from mkernel_cp.reference import allgather_gemm

WORLDS = (1, 2, 3, 4, 8)


@pytest.fixture(params=WORLDS)
def world(request):
    return request.param


@pytest.fixture
def listed(world):
    return cases(count=20, seed=3, world=world)


def test_every_edge_occurs(listed, world):
    def some(condition):
        return any(condition(case) for case in listed)

    some_ranks = range(1, world + 1) if world == 1 else range(1, world)
    for multiple in (-1, 0, 1):
        assert some(lambda c, d=multiple: all(r % 64 == d % 64 for r in c.row_counts) and c.m)
        assert some(lambda c, d=multiple: c.k % 64 == d % 64 and c.k > 1)
        assert some(lambda c, d=multiple: all(n % 64 == d % 64 and n for n in c.n_per_rank))
    for vector in (2, 4, 8):
        assert some(lambda c, v=vector: c.k % (2 * v) == v and c.n_per_rank[0] % (2 * v) == v)
    assert some(lambda c: c.m == 1)
    assert some(lambda c: c.row_counts == (1,) * world)
    assert some(lambda c: c.m == 0)
    assert some(lambda c: c.row_counts.count(0) in some_ranks)
    assert some(lambda c: c.row_counts[0] == 0 and (c.m or world == 1))
    assert some(lambda c: c.row_counts[-1] == 0 and (c.m or world == 1))
    assert some(lambda c: c.k == 1)
    assert some(lambda c: c.k == 0)
    assert some(lambda c: c.k > 512)
    assert some(lambda c: set(c.n_per_rank) == {1})
    assert some(lambda c: c.n_per_rank.count(0) == 1)
    assert some(lambda c: len(set(c.n_per_rank)) == world and 0 not in c.n_per_rank)
    assert some(lambda c: c.m == world - 1)
    assert some(lambda c: 0 not in c.row_counts and len(set(c.row_counts)) == world)
    assert some(lambda c: not c.equal_rows) == (world > 1)
    for orders in product("CF", repeat=2):
        for pitched in (True, False):
            assert some(
                lambda c, o=orders, p=pitched: (
                    (c.a_order, c.b_order, c.a_pitched, c.b_pitched) == (*o, p, p)
                    and c.name.startswith("pitched" if p else "order")
                )
            )
    for dtype in DTYPES:
        assert some(lambda c, d=dtype: c.dtype == c.out_dtype == d)
    for dtype in ("bfloat16", "float16"):
        assert some(lambda c, d=dtype: (c.dtype, c.out_dtype) == (d, "float32"))


def test_cases_are_well_formed(listed, world):
    assert len({case.name for case in listed}) == len({str(case) for case in listed}) == len(listed)
    for case in listed:
        assert case.world == len(case.n_per_rank) == world
        assert all(type(x) is int for x in (*case.row_counts, case.k, *case.n_per_rank))
        assert case.out_dtype in (case.dtype, "float32")


def test_random_cases_are_multiples_of_nothing(world):
    drawn = [case for case in cases(count=50, seed=1, world=world, largest=90) if "-" in case.name]
    assert len(drawn) == 50
    for case in drawn:
        extents = [rows for rows in case.row_counts if rows] + [case.k, *case.n_per_rank]
        assert all(5 <= x <= 90 and all(x % q for q in range(2, x)) for x in extents)
    assert {case.dtype for case in drawn} == set(DTYPES)
    assert {(case.a_order, case.b_order) for case in drawn} == set(product("CF", repeat=2))
    assert {(case.a_pitched, case.b_pitched) for case in drawn} == set(
        product([True, False], repeat=2)
    )
    assert any(0 in case.row_counts for case in drawn)


def test_same_arguments_same_list(world):
    assert cases(count=5, seed=7, world=world) == cases(count=5, seed=7, world=world)
    assert cases(count=5, seed=7, world=world)[-5:] != cases(count=5, seed=8, world=world)[-5:]
    assert cases(count=0, seed=7, world=world) == cases(count=5, seed=7, world=world)[:-5]


def test_dtypes_are_those_asked_for():
    assert {c.dtype for c in cases(count=9, seed=0, world=2, dtypes=("float64",))} == {"float64"}
    first_edge = [cases(count=0, seed=seed, world=2)[0].dtype for seed in range(len(DTYPES))]
    assert sorted(first_edge) == sorted(DTYPES)


@pytest.mark.parametrize(
    "arguments",
    [{"operator": "gemm"}, {"world": 0}, {"largest": 4}],
)
def test_cases_refuse(arguments):
    with pytest.raises(ValueError):
        cases(**{"count": 1, "seed": 0, "world": 2} | arguments)


def assert_laid_out(array, shape, dtype, order, pitched):
    assert array.shape == shape
    assert array.dtype == dtype
    assert not np.isnan(array.astype(np.float64)).any()
    if not pitched:
        assert array.flags.c_contiguous if order == "C" else array.flags.f_contiguous
        return
    view = array if order == "C" else array.T
    base = array.base
    while base.base is not None:
        base = base.base
    pitch = base.shape[1]
    assert view.strides == (pitch * array.itemsize, array.itemsize)
    assert pitch % 2 == 1
    assert pitch > view.shape[1]
    if not view.size:
        return
    start = view.__array_interface__["data"][0] - base.__array_interface__["data"][0]
    # The view covers rows 1:-1 and columns from 2: all else is NaN, on every side.
    assert start // array.itemsize == pitch + 2
    around = np.ones(base.shape, bool)
    around[1:-1, 2 : 2 + view.shape[1]] = False
    assert around[[0, -1]].all()
    assert around[:, [0, -1]].all()
    np.testing.assert_array_equal(np.isnan(base.astype(np.float64)), around)


@pytest.mark.parametrize("integers", [False, True])
def test_operands_lie_as_the_case_says(listed, integers):
    for case in listed:
        a_blocks, b_blocks = operands(case, seed=1, integers=integers)
        assert len(a_blocks) == len(b_blocks) == case.world
        for block, rows in zip(a_blocks, case.row_counts, strict=True):
            assert_laid_out(block, (rows, case.k), case.dtype, case.a_order, case.a_pitched)
        for b, columns in zip(b_blocks, case.n_per_rank, strict=True):
            assert_laid_out(b, (case.k, columns), case.dtype, case.b_order, case.b_pitched)


def test_operands_are_deterministic_and_of_order_one():
    case = Case("case", (40, 50), 60, (70, 80), "float32", "float32", a_order="F", a_pitched=True)
    lists = [operands(case, seed) for seed in (1, 1, 2)]
    for x, y, z in zip(*(a_blocks + b_blocks for a_blocks, b_blocks in lists), strict=True):
        np.testing.assert_array_equal(x, y)
        assert not np.array_equal(x, z)
        assert 0.9 < x.std() < 1.1
    a_first_rank, a_second_rank = lists[0][0]
    assert not np.array_equal(a_first_rank, a_second_rank[:40])


@pytest.mark.parametrize("world", [2])
def test_integers_are_exact_in_the_output_type(listed):
    for case in listed:
        a_blocks, b_blocks = operands(case, seed=1, integers=True)
        for b in b_blocks:
            value = allgather_gemm(a_blocks, b, case.out_dtype).value
            np.testing.assert_array_equal(value.astype(case.out_dtype).astype(np.float64), value)
        # No worse for any order of summation: the sum of magnitudes is exact, too.
        terms = np.concatenate([np.count_nonzero(block, axis=1) for block in a_blocks])
        limit = {"bfloat16": 64, "float16": 512}.get(case.out_dtype, case.k)
        assert np.all(terms == min(case.k, limit))
        assert np.float64(4 * limit).astype(case.out_dtype) == 4 * limit
