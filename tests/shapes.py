"""Shapes and operands for the tests of the operators: the edges by name, then random ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import ml_dtypes
import numpy as np

from mkernel_cp.reference import array_split_counts

__all__ = ["DTYPES", "Case", "ReductionCase", "cases", "operands", "reduction_operands"]

DTYPES = ("bfloat16", "float16", "float32", "float64")
_SIXTEEN_BIT = ("bfloat16", "float16")


@dataclass(frozen=True)
class Case:
    """One call of an operator on all ranks: extents, types and how the operands lie in memory.

    Attributes
    ----------
    name : str
        Name of the edge, or ``random-<i>``; unique within one list of `cases`.
    row_counts : tuple of int
        Rows of A on each rank.
    k : int
        Columns of A and rows of every b.
    n_per_rank : tuple of int
        Columns of b on each rank.
    dtype, out_dtype : str
        Types of the operands and of the output.
    a_order, b_order : {'C', 'F'}
        Which index runs fastest: the last or the first.
    a_pitched, b_pitched : bool
        Whether the operand is a view of a larger array, with an odd pitch in elements and a start
        that is aligned to one element only.

    Examples
    --------
    >>> str(Case("tiny", (2, 1), 5, (3, 3), "float32", "float32"))
    'tiny-2+1x5x3+3-float32-CC'
    """

    name: str
    row_counts: tuple[int, ...]
    k: int
    n_per_rank: tuple[int, ...]
    dtype: str
    out_dtype: str
    a_order: str = field(default="C", kw_only=True)
    b_order: str = field(default="C", kw_only=True)
    a_pitched: bool = field(default=False, kw_only=True)
    b_pitched: bool = field(default=False, kw_only=True)

    @property
    def world(self) -> int:
        """Number of ranks."""
        return len(self.row_counts)

    @property
    def m(self) -> int:
        """Rows of A on all ranks together."""
        return sum(self.row_counts)

    @property
    def equal_rows(self) -> bool:
        """Whether ``row_counts=None`` says the same as `row_counts`."""
        return len(set(self.row_counts)) == 1

    def __str__(self) -> str:
        """All of it in one word, for a test's id."""
        rows, columns = ("+".join(map(str, x)) for x in (self.row_counts, self.n_per_rank))
        types = self.dtype if self.dtype == self.out_dtype else f"{self.dtype}-{self.out_dtype}"
        layout = self.a_order + "p" * self.a_pitched + self.b_order + "p" * self.b_pitched
        return f"{self.name}-{rows}x{self.k}x{columns}-{types}-{layout}"


@dataclass(frozen=True)
class ReductionCase(Case):
    """One call of a sum over ranks. `row_counts` are the rows of the result that each rank owns.

    It is a `Case` whose K and N have changed places: the columns of the result are the same on all
    ranks, the terms of the sum differ.

    Attributes
    ----------
    transfer_dtype : str
        Type of partial sums on their way.
    """

    transfer_dtype: str = field(default="", kw_only=True)

    @property
    def k_per_rank(self) -> tuple[int, ...]:
        """Columns of a and rows of b on each rank."""
        return self.n_per_rank

    @property
    def n(self) -> int:
        """Columns of the result."""
        return self.k

    @property
    def split_rows(self) -> bool:
        """Whether ``row_counts=None`` says the same as `row_counts`."""
        return self.row_counts == array_split_counts(self.m, self.world)

    def __str__(self) -> str:
        """All of it in one word, for a test's id."""
        own = "" if self.transfer_dtype == self.dtype else f"-by-{self.transfer_dtype}"
        return super().__str__() + own


def cases(
    operator: str = "allgather_gemm",
    *,
    count: int,
    seed: int,
    world: int,
    dtypes: Sequence[str] = DTYPES,
    largest: int = 150,
) -> list[Case]:
    """The edge shapes of an operator, and then `count` random ones.

    The edges are the same for every seed; `seed` turns which of `dtypes` each of them gets. In a
    world of 1, edges that distinguish ranks keep their name and shrink to what is left.

    Parameters
    ----------
    operator : {'allgather_gemm', 'reduction'}
        What the shapes are for.
    count : int
        Number of random cases after the edges. Their extents are primes from 5 on, so multiples of
        no tile, vector or world; one rank in four has no rows.
    seed : int
        Same arguments, same list.
    world : int
        Number of ranks, 1 or more.
    dtypes : sequence of str
        Types of the operands to use.
    largest : int
        Largest extent of a random case: rows per rank, K, and columns per rank; 5 or more.

    Returns
    -------
    list of Case

    Raises
    ------
    ValueError
        If `operator` is unknown, or `world` or `largest` is too small.

    Examples
    --------
    >>> [case.name for case in cases(count=1, seed=0, world=2)][-2:]
    ['pitched_FF', 'random-0']
    """
    if operator not in ("allgather_gemm", "reduction"):
        raise ValueError(
            f"no shapes for operator {operator!r}; there are for 'allgather_gemm' and 'reduction'"
        )
    if world < 1 or largest < 5:
        raise ValueError(f"need world >= 1 and largest >= 5, got {world} and {largest}")
    found = _allgather_gemm_edges(world, dtypes, seed)
    found += _random_cases(count, seed, world, dtypes, largest)
    return found if operator == "allgather_gemm" else [*map(_turned, found, range(len(found)))]


def _turned(case: Case, number: int) -> ReductionCase:
    """Return the sum over ranks that has the extents of a case; every other one travels exact."""
    transfer = "float32" if case.dtype in _SIXTEEN_BIT and number % 2 else case.dtype
    return ReductionCase(**vars(case), transfer_dtype=transfer)


def _allgather_gemm_edges(world: int, dtypes: Sequence[str], seed: int) -> list[Case]:
    edges: list[Case] = []

    def add(name, rows, k, n, *, dtype=None, out_dtype=None, **layout):
        row_counts = (rows,) * world if isinstance(rows, int) else tuple(rows)
        n_per_rank = (n,) * world if isinstance(n, int) else tuple(n)
        dtype = dtype or dtypes[(len(edges) + seed) % len(dtypes)]
        edges.append(Case(name, row_counts, k, n_per_rank, dtype, out_dtype or dtype, **layout))

    ranks = range(world)
    last = world - 1
    add("tile_multiples", 128, 128, 64)
    add("tile_less_one", 63, 63, 63)
    add("tile_plus_one", 65, 65, 65)
    add("two_tiles_plus_one", 129, 129, 129)
    # Rows that start on 2, 4 and 8 elements, but not on 64.
    for vector in (2, 4, 8):
        add(f"tile_plus_{vector}", 64 + vector, 64 + vector, 64 + vector)
    add("many_k_panels", 17, 9 * 64 + 1, 19)
    add("one_row", [int(rank == last) for rank in ranks], 70, 33)
    add("one_row_each", 1, 33, 70)
    add("zero_rows", 0, 33, 20)
    add("zero_rows_first_rank", [37 * (rank > 0) for rank in ranks], 40, 21)
    add("zero_rows_last_rank", [37 * (rank < last) for rank in ranks], 41, 22)
    add("k_one", 30, 1, 31)
    add("k_zero", 7, 0, 9)
    add("n_one", 66, 35, 1)
    add("n_zero_on_one_rank", 29, 31, [23 * (rank < last) for rank in ranks])
    add("n_differs", 34, 36, [5 + 62 * rank for rank in ranks])
    add("fewer_rows_than_ranks", array_split_counts(world - 1, world), 45, 13)
    add("uneven_row_counts", [(67, 2, 130, 1)[r % 4] + 10 * (r // 4) for r in ranks], 43, 47)
    for dtype in dtypes:
        if dtype in _SIXTEEN_BIT:
            add(f"float32_output_{dtype}", 38, 71, 39, dtype=dtype, out_dtype="float32")
    for a_order in "CF":
        for b_order in "CF":
            add(f"order_{a_order}{b_order}", 68, 77, 59, a_order=a_order, b_order=b_order)
    for a_order in "CF":
        for b_order in "CF":
            add(
                f"pitched_{a_order}{b_order}", 67, 76, 58,
                a_order=a_order, b_order=b_order, a_pitched=True, b_pitched=True,
            )  # fmt: skip
    return edges


def _random_cases(
    count: int, seed: int, world: int, dtypes: Sequence[str], largest: int
) -> list[Case]:
    random = np.random.default_rng([seed, world])
    primes = [p for p in range(5, largest + 1) if all(p % q for q in range(2, math.isqrt(p) + 1))]

    def draw_case(index: int) -> Case:
        dtype = str(random.choice(dtypes))
        out_dtype = str(random.choice([dtype, "float32"])) if dtype in _SIXTEEN_BIT else dtype
        rows = random.choice(primes, world) * (random.random(world) >= 0.25)
        a_order, b_order = map(str, random.choice(["C", "F"], 2))
        a_pitched, b_pitched = map(bool, random.integers(2, size=2))
        return Case(
            f"random-{index}",
            tuple(rows.tolist()),
            int(random.choice(primes)),
            tuple(random.choice(primes, world).tolist()),
            dtype,
            out_dtype,
            a_order=a_order,
            b_order=b_order,
            a_pitched=a_pitched,
            b_pitched=b_pitched,
        )

    return [draw_case(index) for index in range(count)]


def operands(
    case: Case, seed: int, *, integers: bool = False
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Random operands of a case, every rank's, in the wanted order and pitch.

    Parameters
    ----------
    case : Case
    seed : int
        Same case and seed, same operands.
    integers : bool, optional
        Draw from -2, -1, 1, 2 instead of a normal distribution, so that every product and sum is
        exact in the output type. Rows of A with more entries than that allows (64 for bfloat16, 512
        for float16) have zeros at random places.

    Returns
    -------
    a_blocks : list of ndarray, rank r's (row_counts[r], k)
    b_blocks : list of ndarray, rank r's (k, n_per_rank[r])
        Pitched ones are views of arrays that hold NaN everywhere else.

    Examples
    --------
    >>> case = Case("tiny", (2, 1), 5, (3, 3), "float32", "float32")
    >>> a_blocks, b_blocks = operands(case, seed=0)
    >>> [block.shape for block in a_blocks + b_blocks]
    [(2, 5), (1, 5), (5, 3), (5, 3)]
    """
    random = np.random.default_rng(seed)
    # The largest product of two entries is 4, and integers are exact up to 2 / eps.
    terms = int(2 / float(ml_dtypes.finfo(case.out_dtype).eps)) // 4

    def draw(rows: int, columns: int) -> np.ndarray:
        if integers:
            return random.choice([-2.0, -1.0, 1.0, 2.0], (rows, columns))
        return random.standard_normal((rows, columns))

    def draw_a(rows: int) -> np.ndarray:
        values = draw(rows, case.k)
        if integers and case.k > terms:
            values[np.argsort(random.random(values.shape), axis=1) >= terms] = 0
        return values

    a_blocks = [
        _laid_out(draw_a(rows), case.dtype, case.a_order, case.a_pitched)
        for rows in case.row_counts
    ]
    b_blocks = [
        _laid_out(draw(case.k, columns), case.dtype, case.b_order, case.b_pitched)
        for columns in case.n_per_rank
    ]
    return a_blocks, b_blocks


def reduction_operands(
    case: ReductionCase, seed: int, *, integers: bool = False
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Random operands of a sum over ranks, every rank's, in the wanted order and pitch.

    Parameters
    ----------
    case : ReductionCase
    seed, integers
        As for `operands`; integers are exact in the sum over all ranks.

    Returns
    -------
    a_blocks : list of ndarray, rank r's (m, k_per_rank[r])
    b_blocks : list of ndarray, rank r's (k_per_rank[r], n)
        Pitched ones are views of arrays that hold NaN everywhere else.
    """
    depth = sum(case.k_per_rank)
    rows = Case(case.name, (case.m,), depth, (case.n,), case.dtype, case.out_dtype)
    exact = min(case.out_dtype, case.transfer_dtype, key=lambda name: np.dtype(name).itemsize)
    (a,), (b,) = operands(replace(rows, out_dtype=exact), seed, integers=integers)
    ends = np.cumsum(case.k_per_rank)[:-1]
    return (
        [_laid_out(x, case.dtype, case.a_order, case.a_pitched) for x in np.split(a, ends, axis=1)],
        [_laid_out(x, case.dtype, case.b_order, case.b_pitched) for x in np.split(b, ends)],
    )


def _laid_out(values: np.ndarray, dtype: str, order: str, pitched: bool) -> np.ndarray:
    values = values.astype(dtype)
    if order == "F":
        return _laid_out(values.T, dtype, "C", pitched).T
    if not pitched:
        return np.ascontiguousarray(values)
    rows, columns = values.shape
    # One line of NaN before and after, 2 before each line and at least 1 behind: an odd pitch, and
    # an odd number of elements before the first.
    pitch = (columns + 3) | 1
    view = np.full((rows + 2, pitch), np.nan, dtype)[1:-1, 2 : 2 + columns]
    view[...] = values
    return view
