"""What the operators compute, in NumPy, and how far a correct result may be from it.

This module is the specification: a kernel is right when its output lies, element by element, within
the bound given here, and nothing else is a pass. The values are accumulated in float64; for float64
operands they come from exact partial products, so the reference is always better than what it
judges.

The bound of a product that is accumulated in a type with unit roundoff ``u_acc`` and then rounded
once to the output type (``u_out``) is::

    u_out * |ref_ij|  +  4 * sqrt(K) * u_acc * ||a_i||_2 * ||b_j||_2  +  underflow

where the last term is half the smallest subnormal of the output type, and half that of the
accumulator for each of the K products; and ``2 * u_in * ||a_i||_2 * ||b_j||_2`` where float32
operands are rounded to tf32 (``u_in = 2**-11``). The worst case over all roundings is
``K * u_acc * |a_i|.|b_j|`` to first order [1]_, far above what is ever seen and too weak to notice
a lost term. Roundings that behave like independent random variables of mean zero give
``lambda * sqrt(K) * u_acc * |a_i|.|b_j|`` with high probability, in any order of summation [2]_;
lambda is 4 here, and ``|a_i|.|b_j| <= ||a_i|| ||b_j||``. Up to K = 16 this is no smaller than the
worst case. Beyond, data that rounds the same way at every step (long constant vectors) can exceed
it: judge with random data.

A sum over ranks has the accumulation term of each rank's partial sum, and besides::

    u_acc * |s_t|  for each of the R - 1 additions, s_t being the sum after it
    u_transfer * |partial_r|  +  underflow  for each partial sum that crosses a link

where the order of the additions is part of the definition: the owner of a row starts with its own
partial sum and adds those of the ranks behind it around the ring. Where there are several nodes,
each forms such a sum, another node's starting with the owner's gateway there; that crosses a link
as one, and the sums of the nodes are added in their order.

`ring_attention` and the operators on experts have bounds of their own, given there; the value is
accumulated in float64, for float64 operands in NumPy's long double.

.. [1] N. J. Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., SIAM, 2002, sec. 3.1.
.. [2] N. J. Higham and T. Mary, A new approach to probabilistic rounding error analysis, SIAM
   J. Sci. Comput. 41(5), A2815-A2835, 2019.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from .topology import Topology

__all__ = [
    "Expected",
    "accumulator_dtype",
    "allgather_gemm",
    "array_split_counts",
    "gemm_allreduce",
    "gemm_reduce_scatter",
    "moe_combine",
    "moe_dispatch_gemm",
    "moe_layer",
    "moe_routing",
    "ring_attention",
    "unit_roundoff",
]

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_FLOAT16, _FLOAT32, _FLOAT64 = (np.dtype(name) for name in ("float16", "float32", "float64"))
_OUTPUTS = {
    _BFLOAT16: (_BFLOAT16, _FLOAT32),
    _FLOAT16: (_FLOAT16, _FLOAT32),
    _FLOAT32: (_FLOAT32,),
    _FLOAT64: (_FLOAT64,),
}


def array_split_counts(m: int, parts: int) -> tuple[int, ...]:
    """Sizes of the parts into which `numpy.array_split` divides `m` rows.

    Parameters
    ----------
    m : int
        Number of rows, 0 or more.
    parts : int
        Number of parts, 1 or more.

    Returns
    -------
    tuple of int
        `parts` sizes that add up to `m`; the first ``m % parts`` of them are one larger.

    Raises
    ------
    TypeError
        If one of them is no integer.
    ValueError
        If `m` is negative or `parts` is less than 1.

    Examples
    --------
    >>> array_split_counts(10, 4)
    (3, 3, 2, 2)
    """
    try:
        m, parts = operator.index(m), operator.index(parts)
    except TypeError:
        raise TypeError(f"{m!r} rows in {parts!r} parts: use integers") from None
    if m < 0 or parts < 1:
        raise ValueError(f"{m} rows in {parts} parts: use 0 rows or more, and 1 part or more")
    size, larger = divmod(m, parts)
    return (size + 1,) * larger + (size,) * (parts - larger)


def unit_roundoff(dtype: DTypeLike) -> float:
    """Largest relative error of rounding to nearest: half the spacing of the numbers at 1.

    Parameters
    ----------
    dtype : dtype
        bfloat16 (2**-8), float16 (2**-11), float32 (2**-24) or float64 (2**-53).

    Returns
    -------
    float

    Raises
    ------
    TypeError
        If `dtype` is none of these.

    Examples
    --------
    >>> unit_roundoff("float16") == 2.0**-11
    True
    """
    return float(ml_dtypes.finfo(_supported(dtype)).eps) / 2


def accumulator_dtype(dtype: DTypeLike) -> np.dtype:
    """Type in which products of `dtype` operands, and partial sums of ranks, are added.

    Parameters
    ----------
    dtype : dtype
        Type of the operands: bfloat16, float16, float32 or float64.

    Returns
    -------
    numpy.dtype
        float64 for float64, else float32.

    Raises
    ------
    TypeError
        If `dtype` is none of these.

    Examples
    --------
    >>> accumulator_dtype("float16")
    dtype('float32')
    """
    return _FLOAT64 if _supported(dtype) == _FLOAT64 else _FLOAT32


@dataclass(frozen=True, eq=False)
class Expected:
    """The result that an operator should give on one rank, and the error that it may have.

    Attributes
    ----------
    value : ndarray of float64
        The result, not rounded to the output type; where it overflows the output type, still the
        finite number.
    bound : ndarray of float64
        Largest admissible ``|c - value|``, of `value`'s shape; never NaN, and 0 where `value` is
        NaN or infinite, since there the result must match.
    dtype : numpy.dtype
        Type that the output must have.

    Examples
    --------
    >>> a, b = np.ones((2, 3), np.float32), np.ones((3, 4), np.float32)
    >>> expected = allgather_gemm([a[:1], a[1:]], b)
    >>> expected.check(a @ b)
    0.0
    >>> expected.assert_close(a @ b, what="ones")
    """

    value: np.ndarray
    bound: np.ndarray
    dtype: np.dtype

    def check(self, c: ArrayLike) -> float:
        """Largest error in units of the bound; the result is right when this is at most 1.

        NaN must stand exactly where `value` has NaN, and an infinite `value` must be met by the
        same infinity. For a finite `value`, an infinity counts as the first number past the largest
        finite one of the output type, or as `value` itself beyond that: so an overflow may give
        infinity of the right sign, or the largest finite number where that is within the bound.

        Parameters
        ----------
        c : array_like
            Result in host memory, of `value`'s shape and of type `dtype`.

        Returns
        -------
        float
            max of ``|c - value| / bound``, with 0/0 = 0; inf where NaN or infinity does not match;
            0.0 for an empty result.

        Raises
        ------
        ValueError
            If the shape or the type of `c` differs.
        """
        return float(np.max(self._errors_in_bounds(np.asarray(c)), initial=0.0))

    def assert_close(self, c: ArrayLike, what: str = "") -> None:
        """Raise unless every element of `c` is within the bound (see `check`).

        Parameters
        ----------
        c : array_like
            Result in host memory.
        what : str, optional
            What is judged, the start of the error's text.

        Raises
        ------
        AssertionError
            With the worst element, the count of wrong ones and the box of indices that holds them;
            or with both shapes and types if these differ.
        """
        c = np.asarray(c)
        prefix = f"{what}: " if what else ""
        try:
            errors = self._errors_in_bounds(c)
        except ValueError as mismatch:
            raise AssertionError(f"{prefix}{mismatch}") from None
        wrong = np.argwhere(errors > 1)
        if not len(wrong):
            return
        worst = tuple(int(i) for i in np.unravel_index(np.argmax(errors), errors.shape))
        first, last = wrong.min(axis=0), wrong.max(axis=0)
        box = ", ".join(f"{low}:{high + 1}" for low, high in zip(first, last, strict=True))
        raise AssertionError(
            f"{prefix}{len(wrong)} of {errors.size} elements are wrong, all in [{box}]; worst at "
            f"{worst}: got {float(c[worst])!r}, expected {float(self.value[worst])!r}, error is "
            f"{errors[worst]:.4g} times the bound {self.bound[worst]:.4g}; "
            f"shape {c.shape}, {self.dtype}"
        )

    def _errors_in_bounds(self, c: np.ndarray) -> np.ndarray:
        if c.shape != self.value.shape or c.dtype != self.dtype:
            raise ValueError(
                f"got shape {c.shape} of {c.dtype}, expected {self.value.shape} of {self.dtype}"
            )
        got = c.astype(np.float64)
        with np.errstate(all="ignore"):
            first_past_finite = np.ldexp(1.0, ml_dtypes.finfo(self.dtype).maxexp)
            stands_for = np.copysign(np.maximum(first_past_finite, np.abs(self.value)), got)
            nearest = np.where(np.isinf(got) & np.isfinite(self.value), stands_for, got)
            same = (nearest == self.value) | (np.isnan(got) & np.isnan(self.value))
            errors = np.abs(nearest - self.value) / self.bound
        return np.where(same, 0.0, np.where(np.isnan(errors), np.inf, errors))


def allgather_gemm(
    a_blocks: Sequence[np.ndarray],
    b: np.ndarray,
    dtype: DTypeLike | None = None,
    *,
    tf32: bool = False,
) -> Expected:
    """Product of the rows of all ranks with one rank's matrix.

    Parameters
    ----------
    a_blocks : sequence of ndarray, each (M_r, K)
        Every rank's rows of A, in rank order; M_r and K may be 0.
    b : ndarray (K, N_r)
        The rank's own matrix, of the type of the blocks; N_r may be 0.
    dtype : dtype, optional
        Type of the output: that of the operands (default), or float32 for 16-bit operands.
    tf32 : bool, optional
        Whether float32 operands may be rounded to 11 bits of significand as they are multiplied.

    Returns
    -------
    Expected
        ``A @ b``, of shape (sum of M_r, N_r). With K = 0 all zeros. NaN and infinity in row i of A
        reach row i of the result only, those in column j of `b` column j only. The bound assumes
        that no partial sum overflows the accumulator on the way to a finite result.

    Raises
    ------
    TypeError
        If the operands differ in type, or a type is not supported.
    ValueError
        If there is no block, or the shapes do not fit.

    Examples
    --------
    >>> a_blocks = [np.full((1, 2), 3, np.float32), np.full((2, 2), 4, np.float32)]
    >>> allgather_gemm(a_blocks, np.ones((2, 1), np.float32)).value.ravel()
    array([6., 8., 8.])
    """
    a_blocks = [np.asarray(block) for block in a_blocks]
    b = np.asarray(b)
    if not a_blocks:
        raise ValueError("a_blocks is empty: there is one block for each rank, if only of 0 rows")
    if any(operand.ndim != 2 for operand in (*a_blocks, b)):
        raise ValueError("every block of a, and b, must have 2 dimensions")
    if any(block.shape[1] != b.shape[0] for block in a_blocks):
        raise ValueError(
            f"blocks of a have {[block.shape[1] for block in a_blocks]} columns, b has "
            f"{b.shape[0]} rows"
        )
    if any(block.dtype != b.dtype for block in a_blocks):
        raise TypeError(
            f"blocks of a have types {[str(block.dtype) for block in a_blocks]}, b has {b.dtype}: "
            "all must be the same"
        )
    a64 = np.concatenate([block.astype(np.float64) for block in a_blocks])
    output = _output_dtype(b.dtype, dtype)
    return _product(a64, b.astype(np.float64), b.dtype, output, tf32)


def gemm_reduce_scatter(
    a_blocks: Sequence[np.ndarray],
    b_blocks: Sequence[np.ndarray],
    row_counts: Sequence[int] | None = None,
    rank: int = 0,
    out_dtype: DTypeLike | None = None,
    transfer_dtype: DTypeLike | None = None,
    *,
    tf32: bool = False,
    nodes: Sequence[int] | None = None,
) -> Expected:
    """One rank's rows of the sum over ranks of ``a @ b``.

    Parameters
    ----------
    a_blocks : sequence of ndarray, each (M, K_r)
        Every rank's columns of A, in rank order; M and K_r may be 0.
    b_blocks : sequence of ndarray, each (K_r, N)
        Every rank's rows of B, of the same type; N may be 0.
    row_counts : sequence of int, optional
        Rows of the sum on every rank. Default: as `array_split_counts` says.
    rank : int, optional
        Whose rows.
    out_dtype : dtype, optional
        Type of the output: that of the operands (default), or float32 for 16-bit operands.
    transfer_dtype : dtype, optional
        Type of a partial sum that crosses a link; likewise.
    tf32 : bool, optional
        As for `allgather_gemm`.
    nodes : sequence of int, optional
        Ranks of each node: sums over each are added in their order, and those of other nodes cross
        a link once more. Default: all on one.

    Returns
    -------
    Expected
        Of shape (row_counts[rank], N). The bound assumes that no partial sum overflows the
        accumulator or the transfer type.

    Raises
    ------
    TypeError
        If the operands differ in type, or a type is not supported.
    ValueError
        If there is no block, or shapes or counts do not fit.

    Examples
    --------
    >>> a_blocks, b_blocks = [np.ones((3, 2))] * 2, [np.ones((2, 1)), np.full((2, 1), 10.0)]
    >>> gemm_reduce_scatter(a_blocks, b_blocks, rank=1).value
    array([[22.]])
    """
    a_blocks, b_blocks = (
        [np.asarray(block) for block in blocks] for blocks in (a_blocks, b_blocks)
    )
    dtype = _check_terms(a_blocks, b_blocks)
    ranks, m = len(a_blocks), len(a_blocks[0])
    counts = array_split_counts(m, ranks) if row_counts is None else tuple(row_counts)
    if len(counts) != ranks or sum(counts) != m or not 0 <= rank < ranks:
        raise ValueError(
            f"row_counts {counts} and rank {rank} do not fit {ranks} blocks of {m} rows"
        )
    output, transfer = _output_dtype(dtype, out_dtype), _output_dtype(dtype, transfer_dtype)
    accumulator = accumulator_dtype(dtype)
    rows = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
    sizes = (ranks,) if nodes is None else tuple(nodes)
    if sum(sizes) != ranks or min(sizes) < 1:
        raise ValueError(f"nodes {sizes} do not fit {ranks} blocks")
    topology = Topology(rank, sizes)
    order = [r for ring in topology.rings for r in ring]
    a64 = {r: a_blocks[r][rows].astype(np.float64) for r in order}
    b64 = {r: b_blocks[r].astype(np.float64) for r in order}
    with np.errstate(all="ignore"):
        whole = np.hstack([*a64.values()]), np.vstack([*b64.values()])
        value = _accurate_product(*whole) if dtype == _FLOAT64 else np.matmul(*whole)
        bound = unit_roundoff(output) * np.abs(value)
        bound += float(ml_dtypes.finfo(output).smallest_subnormal) / 2
        tiny = float(ml_dtypes.finfo(transfer).smallest_subnormal) / 2

        def crossing(partial: np.ndarray) -> np.ndarray | float:
            exact = transfer == accumulator
            return 0.0 if exact else unit_roundoff(transfer) * np.abs(partial) + tiny

        total = np.zeros_like(value)
        for node, ring in enumerate(topology.rings):
            of_node = np.zeros_like(value)
            for step, r in enumerate(ring):
                partial = a64[r] @ b64[r]
                of_node += partial
                bound += _accumulation_bound(a64[r], b64[r], accumulator, tf32)
                if step > 0:
                    bound += unit_roundoff(accumulator) * np.abs(of_node) + crossing(partial)
            total += of_node
            if node > 0:
                bound += unit_roundoff(accumulator) * np.abs(total)
            if node != topology.node:
                bound += crossing(of_node)
    return Expected(value, np.where(np.isfinite(value), bound, 0.0), output)


def gemm_allreduce(
    a_blocks: Sequence[np.ndarray],
    b_blocks: Sequence[np.ndarray],
    out_dtype: DTypeLike | None = None,
    transfer_dtype: DTypeLike | None = None,
    *,
    tf32: bool = False,
    nodes: Sequence[int] | None = None,
) -> Expected:
    """The whole sum over ranks of ``a @ b``, each row as the rank that adds it has it.

    Parameters
    ----------
    a_blocks, b_blocks, out_dtype, transfer_dtype, tf32, nodes
        As for `gemm_reduce_scatter`.

    Returns
    -------
    Expected
        Of shape (M, N).

    Raises
    ------
    TypeError, ValueError
        As for `gemm_reduce_scatter`.

    Examples
    --------
    >>> gemm_allreduce([np.ones((1, 2))] * 3, [np.ones((2, 1))] * 3).value
    array([[6.]])
    """
    asked = {"tf32": tf32, "nodes": nodes}
    parts = [
        gemm_reduce_scatter(a_blocks, b_blocks, None, rank, out_dtype, transfer_dtype, **asked)
        for rank in range(max(1, len(a_blocks)))
    ]
    value, bound = (np.concatenate([getattr(p, x) for p in parts]) for x in ("value", "bound"))
    return Expected(value, bound, parts[0].dtype)


def _check_terms(a_blocks: list[np.ndarray], b_blocks: list[np.ndarray]) -> np.dtype:
    """Return the type of the operands of a sum of products, if they fit."""
    if not a_blocks or len(a_blocks) != len(b_blocks):
        raise ValueError(
            f"{len(a_blocks)} blocks of a and {len(b_blocks)} of b: there is one of each per rank"
        )
    blocks = [*a_blocks, *b_blocks]
    if any(block.ndim != 2 for block in blocks):
        raise ValueError("every block must have 2 dimensions")
    pairs = [(a.shape, b.shape) for a, b in zip(a_blocks, b_blocks, strict=True)]
    (m, _), (_, n) = pairs[0]
    if any((a[0], a[1], b[1]) != (m, b[0], n) for a, b in pairs):
        raise ValueError(f"shapes {pairs} do not make a sum of products")
    if any(block.dtype != blocks[0].dtype for block in blocks):
        raise TypeError(f"types {[str(block.dtype) for block in blocks]}: all must be the same")
    return blocks[0].dtype


_TF32_ROUNDOFF = 2.0**-11
# Fixed by the emulation in tests/test_reference.py, which gets to two thirds of what it allows.
_ATTENTION_GROWTH = 2.0


def ring_attention(
    q: np.ndarray,
    k_blocks: Sequence[np.ndarray],
    v_blocks: Sequence[np.ndarray],
    rank: int,
    *,
    causal: bool = False,
    scale: float | None = None,
    layout: str = "contiguous",
) -> tuple[Expected, Expected]:
    """Attention of one rank's queries over the keys and values of all ranks.

    With ``s_ij = scale * q_i . k_j`` over the positions j that i sees (all, or with `causal` those
    up to its own, in the whole sequence)::

        lse_i = log(sum_j exp(s_ij))        out_i = sum_j exp(s_ij - lse_i) v_j

    What is not seen has no influence, not even NaN; what is seen acts as in NumPy. A row that sees
    nothing gives 0 and -inf.

    Parameters
    ----------
    q : ndarray (B, S_r, Hq, D)
        Queries of rank `rank`.
    k_blocks, v_blocks : sequence of ndarray, each (B, S_r, Hkv, D)
        Every rank's keys and values, in rank order, of the type of `q`. Hq is a multiple of Hkv.
    rank : int
    causal : bool, optional
    scale : float, optional
        Default: ``1 / sqrt(D)``.
    layout : {'contiguous', 'zigzag'}, optional
        Which positions of the sequence the ranks hold: the next ones in rank order, or those of
        parts r and 2R - 1 - r of ``numpy.array_split(positions, 2 * R)``.

    Returns
    -------
    out : Expected
        (B, S_r, Hq, D), of the type of the operands. The bound of an element in column d is::

            u_out |ref|  +  (u_P + 2 e_i) max_j |v_jd|  +  underflow
            e_i  =  u_acc (sqrt(D) |scale| ||q_i||_2 max_j ||k_j||_2  +  sqrt(n_i))

        where j are the n_i positions that i sees. Operands of 16 bits may have their weights
        rounded to their type, of unit roundoff u_P, before they multiply v; for others u_P is 0
        here. The result is a weighted mean, so this adds at most u_P max|v|. e_i is what the
        accumulator adds to the logarithm of a weight and to the sums; its factor 2 is fixed by an
        emulation (roundings like random variables, as above).
    lse : Expected
        (B, Hq, S_r), of the accumulator's type, with the bound ``u_acc |ref| + 2 e_i``.

    Raises
    ------
    TypeError
        If the operands differ in type, or a type is not supported.
    ValueError
        If the shapes do not fit, or the layout is unknown.

    Examples
    --------
    >>> q = k = np.zeros((1, 2, 1, 1), np.float32)
    >>> v = np.array([1, 3], np.float32).reshape(1, 2, 1, 1)
    >>> out, lse = ring_attention(q, [k], [v], 0, causal=True)
    >>> out.value.ravel().tolist(), np.exp(lse.value).ravel().round(12).tolist()
    ([1.0, 2.0], [1.0, 2.0])
    """
    q, k_blocks, v_blocks = np.asarray(q), list(map(np.asarray, k_blocks)), list(v_blocks)
    dtype = _check_attention(q, k_blocks, v_blocks, rank)
    lengths = [block.shape[1] for block in k_blocks]
    held = _positions(lengths, layout)
    # With all in the order of the sequence, what a query sees is its beginning.
    order = np.argsort(np.concatenate(held))
    work = np.longdouble if dtype == _FLOAT64 else np.float64
    wide = [np.concatenate(blocks, axis=1)[:, order] for blocks in (k_blocks, v_blocks)]
    k, v = (x.astype(np.float64).astype(work).transpose(0, 2, 1, 3) for x in wide)
    batch, positions, heads, columns = q.shape
    kv_heads, total = k.shape[1:3]
    rows = q.astype(np.float64).astype(work).transpose(0, 2, 1, 3)
    rows = rows.reshape(batch, kv_heads, heads // kv_heads, positions, columns)
    seen = held[rank] + 1 if causal else np.full(positions, total)
    visible = np.arange(total) < seen[:, None]
    scale = 1 / np.sqrt(columns) if scale is None else scale

    def of_seen(x: np.ndarray) -> np.ndarray:
        """Return the largest of all x that each query sees, 0 where it sees none."""
        first = np.zeros_like(x[:, :, :1])
        return np.maximum.accumulate(np.concatenate((first, x), axis=2), axis=2)[:, :, seen]

    with np.errstate(all="ignore"):
        scores = np.where(visible, rows @ k[:, :, None].swapaxes(-1, -2) * work(scale), -np.inf)
        highest = scores.max(axis=-1, keepdims=True, initial=-np.inf)
        weights = np.exp(scores - np.where(highest == -np.inf, 0, highest))
        sums = weights.sum(axis=-1, keepdims=True)
        mean = weights @ np.where(np.isfinite(v), v, 0)[:, :, None]
        for j in np.flatnonzero(~np.isfinite(v).all(axis=(0, 1, 3))):  # what is unseen adds nothing
            special = np.where(np.isfinite(v[:, :, j]), 0, v[:, :, j])[:, :, None, None]
            mean += np.where(visible[:, j, None], weights[..., j, None] * special, 0)
        blind = np.broadcast_to(seen[:, None] == 0, sums.shape)
        value = np.where(blind, 0, mean / sums).astype(np.float64)
        lse = (highest + np.log(sums))[..., 0].astype(np.float64)

        norms = of_seen(np.where(np.isfinite(k).all(axis=-1), _norms(k, axis=-1), 0))[:, :, None]
        accumulator = unit_roundoff(accumulator_dtype(dtype))
        growth = np.sqrt(columns) * abs(scale) * _norms(rows, axis=-1) * norms + np.sqrt(seen)
        growth = (_ATTENTION_GROWTH * accumulator * growth).astype(np.float64)
        rounded = unit_roundoff(dtype) if dtype.itemsize == 2 else 0.0
        bound = (
            unit_roundoff(dtype) * np.abs(value)
            + (rounded + growth)[..., None] * of_seen(np.abs(v)).astype(np.float64)[:, :, None]
            + float(ml_dtypes.finfo(dtype).smallest_subnormal) / 2
        )
        lse_bound = accumulator * np.abs(lse) + growth
    bound = np.where(np.isfinite(value), bound, 0.0)
    lse_bound = np.where(np.isfinite(lse), lse_bound, 0.0)
    shape = (batch, heads, positions, columns)
    return (
        Expected(*(x.reshape(shape).swapaxes(1, 2) for x in (value, bound)), dtype),
        Expected(*(x.reshape(shape[:3]) for x in (lse, lse_bound)), accumulator_dtype(dtype)),
    )


def _check_attention(q: np.ndarray, k_blocks: list, v_blocks: list, rank: int) -> np.dtype:
    blocks = [*k_blocks, *v_blocks]
    if any(x.ndim != 4 for x in (q, *blocks)):
        raise ValueError("q and every block of k and v must have 4 dimensions")
    if not 0 <= rank < len(k_blocks) or [x.shape for x in k_blocks] != [x.shape for x in v_blocks]:
        raise ValueError("k_blocks and v_blocks need a block of the same shape for every rank")
    batch, positions, heads, columns = q.shape
    if k_blocks[rank].shape[1] != positions or any(
        (x.shape[0], x.shape[3]) != (batch, columns) or x.shape[2] != k_blocks[0].shape[2]
        for x in blocks
    ):
        raise ValueError("blocks of k and v differ from each other, or from q, in more than heads")
    if not k_blocks[0].shape[2] or heads % k_blocks[0].shape[2] or not columns:
        raise ValueError(f"q has {heads} heads, k and v {k_blocks[0].shape[2]}: not a multiple")
    if any(x.dtype != q.dtype for x in blocks):
        raise TypeError(f"q has type {q.dtype}, blocks of k and v have others")
    return _supported(q.dtype)


def _positions(lengths: Sequence[int], layout: str) -> list[np.ndarray]:
    """Return which positions of the sequence each rank holds."""
    ranks, sequence = len(lengths), np.arange(sum(lengths))
    if layout == "contiguous":
        held = np.split(sequence, np.cumsum(lengths)[:-1])
    elif layout == "zigzag":
        parts = np.array_split(sequence, 2 * ranks)
        held = [np.concatenate((parts[rank], parts[-1 - rank])) for rank in range(ranks)]
    else:
        raise ValueError(f"layout {layout!r} is unknown; use contiguous or zigzag")
    if [len(x) for x in held] != list(lengths):
        raise ValueError(f"ranks hold {list(lengths)} positions: not so in a layout of {layout}")
    return held


@dataclass(frozen=True, eq=False)
class Routing:
    """Which tokens the experts of one rank get, row by row.

    Attributes
    ----------
    expert_offsets : ndarray of int64 (E_r + 1,)
        Rows ``expert_offsets[e]:expert_offsets[e + 1]`` are those of the rank's expert e.
    source_rank, source_token, source_slot : ndarray of int32 (rows,)
        Where each comes from: ``x[token]`` of the rank, because ``topk_idx[token, slot]`` says so.
    """

    expert_offsets: np.ndarray
    source_rank: np.ndarray
    source_token: np.ndarray
    source_slot: np.ndarray


def moe_routing(topk_blocks: Sequence[np.ndarray], rank: int, num_experts: int) -> Routing:
    """The rows that the experts of one rank get: in order of expert, source rank, token, slot.

    Parameters
    ----------
    topk_blocks : sequence of ndarray of int, each (T_r, k)
        Every rank's choice of experts, -1 for none, in rank order. An id that a token names twice
        makes two rows.
    rank : int
        Whose experts.
    num_experts : int
        E; rank r has those that `numpy.array_split` gives it.

    Returns
    -------
    Routing

    Raises
    ------
    ValueError
        If an id is none of -1 to E - 1, or shapes do not fit.

    Examples
    --------
    >>> routing = moe_routing([np.array([[1, 0]]), np.array([[-1, 1]])], 1, 2)
    >>> routing.source_rank.tolist(), routing.source_slot.tolist()
    ([0, 1], [0, 1])
    """
    topk_blocks = [np.asarray(block) for block in topk_blocks]
    if any(block.ndim != 2 or block.shape[1] != topk_blocks[0].shape[1] for block in topk_blocks):
        raise ValueError("every block of topk must be (tokens, k), with the same k")
    if any(((block < -1) | (block >= num_experts)).any() for block in topk_blocks):
        raise ValueError(f"there is an id outside -1 to {num_experts - 1}")
    counts = array_split_counts(num_experts, len(topk_blocks))
    first, experts = sum(counts[:rank]), counts[rank]
    found = [
        (expert, source, token, slot)
        for source, block in enumerate(topk_blocks)
        for token, slot in np.argwhere((block >= first) & (block < first + experts)).tolist()
        for expert in (int(block[token, slot]) - first,)
    ]
    table = np.array(sorted(found), np.int64).reshape(-1, 4)
    offsets = np.searchsorted(table[:, 0], np.arange(experts + 1))
    return Routing(offsets.astype(np.int64), *table[:, 1:].T.astype(np.int32))


def moe_dispatch_gemm(
    x_blocks: Sequence[np.ndarray],
    topk_blocks: Sequence[np.ndarray],
    w: np.ndarray,
    rank: int,
    num_experts: int,
    dtype: DTypeLike | None = None,
) -> tuple[Expected, Routing]:
    """Tokens of all ranks times the weights of the experts of one rank that they chose.

    Parameters
    ----------
    x_blocks : sequence of ndarray, each (T_r, H)
        Every rank's tokens, in rank order.
    topk_blocks, rank, num_experts
        As for `moe_routing`.
    w : ndarray (E_r, H, I)
        The rank's experts.
    dtype : dtype, optional
        Type of the output: that of the operands (default), or float32 for 16-bit operands.

    Returns
    -------
    rows : Expected
        (rows, I): without what lies behind the last row in an output with more. Each row has the
        bound of a product, as in `allgather_gemm`.
    routing : Routing

    Raises
    ------
    TypeError, ValueError
        As for `allgather_gemm` and `moe_routing`.

    Examples
    --------
    >>> x, topk = [np.array([[2.0], [3.0]])], [np.array([[1, -1], [0, 1]])]
    >>> rows, routing = moe_dispatch_gemm(x, topk, np.array([[[1.0]], [[10.0]]]), 0, 2)
    >>> rows.value.ravel().tolist(), routing.source_token.tolist()
    ([3.0, 20.0, 30.0], [1, 0, 1])
    """
    w = np.asarray(w)
    routing = moe_routing(topk_blocks, rank, num_experts)
    if len(w) != len(routing.expert_offsets) - 1:
        raise ValueError(f"rank {rank} has {len(routing.expert_offsets) - 1} experts, w {len(w)}")
    sources = list(zip(routing.source_rank, routing.source_token, strict=True))
    parts = []
    for expert, (begin, end) in enumerate(
        zip(routing.expert_offsets, routing.expert_offsets[1:], strict=False)
    ):
        a = np.empty((end - begin, w.shape[1]), w.dtype)
        for row, (source, token) in zip(a, sources[begin:end], strict=True):
            row[...] = x_blocks[source][token]
        parts.append(allgather_gemm([a], w[expert], dtype))
    empty = np.zeros((0, w.shape[2]))
    value, bound = (
        np.concatenate([empty, *(getattr(part, x) for part in parts)]) for x in ("value", "bound")
    )
    return Expected(value, bound, _output_dtype(w.dtype, dtype)), routing


def moe_combine(
    row_blocks: Sequence[np.ndarray],
    topk_blocks: Sequence[np.ndarray],
    topk_weight: np.ndarray,
    rank: int,
    num_experts: int,
    transfer_dtype: DTypeLike | None = None,
    nodes: Sequence[int] | None = None,
) -> Expected:
    """What the experts made of one rank's tokens, weighted and added up.

    ``out[t] = sum_d sum_j topk_weight[t, j] * row(t, j)``: for each rank d, in rank order, the sum
    over the slots j of which d has the expert, in the order of slots. No expert at all gives 0.
    Where there are several nodes, the sums over the ranks of each are added in their order.

    Parameters
    ----------
    row_blocks : sequence of ndarray, each (rows, N)
        Every rank's rows, as `moe_routing` orders them; further ones are ignored.
    topk_blocks, num_experts
        As for `moe_routing`.
    topk_weight : ndarray (T_r, k)
        The weights of rank `rank`, of the accumulator's type.
    rank : int
        Whose tokens.
    transfer_dtype : dtype, optional
        Type in which a sum over the slots of another rank crosses the link: that of the rows
        (default), or float32 for 16-bit rows.
    nodes : sequence of int, optional
        Ranks of each node. Of another node, the rank that stands there for this one adds what its
        peers have, and sends that as one sum, which is rounded again. Default: all on one.

    Returns
    -------
    Expected
        (T_r, N), of the rows' type. The bound has ``u_acc`` times the size of each product and of
        each addition's result on the way, ``u_transfer`` times that of each sum that crosses a
        link, and ``u_out`` times that of the result; and half a subnormal where one may vanish.

    Raises
    ------
    TypeError, ValueError
        If shapes or types do not fit.

    Examples
    --------
    >>> rows = [np.array([[1.0], [2.0]]), np.array([[30.0]])]
    >>> topk = [np.array([[0, 1], [0, -1]]), np.zeros((0, 2), int)]
    >>> moe_combine(rows, topk, np.array([[1.0, 0.5], [4.0, 9.0]]), 0, 2).value.tolist()
    [[16.0], [8.0]]
    """
    row_blocks = [np.asarray(block) for block in row_blocks]
    dtype = row_blocks[0].dtype
    if any(block.dtype != dtype for block in row_blocks):
        raise TypeError("blocks of rows differ in type")
    values = [block.astype(np.float64) for block in row_blocks]
    exact = [np.zeros(block.shape) for block in row_blocks]
    transfer = _output_dtype(dtype, transfer_dtype)
    sizes = tuple(nodes or (len(values),))
    return _combined(
        *(values, exact, dtype, topk_blocks, topk_weight, rank, num_experts, transfer, sizes)
    )


def _combined(
    values: Sequence[np.ndarray],
    bounds: Sequence[np.ndarray],
    dtype: np.dtype,
    topk_blocks: Sequence[np.ndarray],
    topk_weight: np.ndarray,
    rank: int,
    num_experts: int,
    transfer: np.dtype,
    nodes: tuple[int, ...],
) -> Expected:
    """Return what `moe_combine` does, for rows that are known up to bounds."""
    accumulator = accumulator_dtype(dtype)
    if topk_weight.shape != topk_blocks[rank].shape or topk_weight.dtype != accumulator:
        raise ValueError(f"topk_weight must be like topk_blocks[{rank}], of {accumulator}")
    work = np.longdouble if dtype == _FLOAT64 else np.float64
    u, half = (
        {t: f(t) for t in {dtype, accumulator, transfer}}
        for f in (unit_roundoff, lambda t: float(ml_dtypes.finfo(t).smallest_subnormal) / 2)
    )
    shape = topk_weight.shape[0], values[0].shape[1]
    bound, topology = np.zeros(shape), Topology(rank, nodes)

    def sent(partial: np.ndarray, some: np.ndarray) -> None:
        if transfer != accumulator:
            bound[some] += u[transfer] * np.abs(partial[some]) + half[transfer]

    def nothing() -> tuple[np.ndarray, np.ndarray]:
        return np.zeros(shape, work), np.zeros(shape[0], bool)

    def add(to: tuple[np.ndarray, np.ndarray], partial: np.ndarray, some: np.ndarray) -> None:
        total, added = to
        total[some] += partial[some]
        again = some & added
        bound[again] += u[accumulator] * np.abs(total[again])
        added |= some

    def of_rank(d: int) -> tuple[np.ndarray, np.ndarray]:
        with np.errstate(all="ignore"):
            routing = moe_routing(topk_blocks, d, num_experts)
            own = np.flatnonzero(routing.source_rank == rank)
            row_of = np.full(topk_weight.shape, -1)
            row_of[routing.source_token[own], routing.source_slot[own]] = own
            partial, summed = np.zeros(shape, work), np.zeros(shape[0], bool)
            for slot, rows in enumerate(row_of.T):
                at = np.flatnonzero(rows >= 0)
                weight = topk_weight[at, slot, None]
                term = weight.astype(work) * values[d][rows[at]].astype(work)
                bound[at] += u[accumulator] * np.abs(term) + half[accumulator]
                bound[at] += np.abs(weight) * bounds[d][rows[at]]
                partial[at] += term
                again = at[summed[at]]
                bound[again] += u[accumulator] * np.abs(partial[again])
                summed[at] = True
            return partial, summed

    whole = nothing()
    with np.errstate(all="ignore"):
        for node, size in enumerate(nodes):
            begin, holder, of_node = sum(nodes[:node]), topology.holder(rank, node), nothing()
            for d in range(begin, begin + size):
                partial, summed = of_rank(d)
                if d != holder:
                    sent(partial, summed)
                add(of_node, partial, summed)
            if holder != rank:
                sent(*of_node)
            add(whole, *of_node)
        total, _ = whole
        value = total.astype(np.float64)
        bound = bound + u[dtype] * np.abs(value) + half[dtype]
    return Expected(value, np.where(np.isfinite(value), bound, 0.0), dtype)


# How much of the accumulator's roundoff an activation may add to its value, and the largest slope.
_ACTIVATION_GROWTH, _ACTIVATION_SLOPE = 8.0, 1.13
_erfc = np.vectorize(math.erfc, otypes=[np.float64])


def moe_layer(
    x_blocks: Sequence[np.ndarray],
    topk_blocks: Sequence[np.ndarray],
    topk_weight: np.ndarray,
    w1_blocks: Sequence[np.ndarray],
    w2_blocks: Sequence[np.ndarray],
    rank: int,
    num_experts: int,
    activation: str | None = "swiglu",
    transfer_dtype: DTypeLike | None = None,
    nodes: Sequence[int] | None = None,
) -> Expected:
    """A layer of experts: two products with an activation between, for one rank's tokens.

    The rows ``h = act(x @ w1[e])`` and ``y = h @ w2[e]`` of every chosen expert, each rounded to
    the operands' type, combined as by `moe_combine`. ``act`` is one of::

        None      a
        'silu'    a / (1 + exp(-a))
        'gelu'    a erfc(-a / sqrt(2)) / 2
        'swiglu'  silu(gate) * up, where gate is the first half of the columns and up the second

    Parameters
    ----------
    x_blocks, topk_blocks, topk_weight, rank, num_experts, transfer_dtype, nodes
        As for `moe_dispatch_gemm` and `moe_combine`.
    w1_blocks : sequence of ndarray, each (E_r, H, I)
        Every rank's first weights; (E_r, H, 2 I) for 'swiglu'.
    w2_blocks : sequence of ndarray, each (E_r, I, N)
        Every rank's second weights.
    activation : {'swiglu', 'gelu', 'silu', None}, optional

    Returns
    -------
    Expected
        (T_r, N). The bound of a stage is that of its operation on exact operands, and what the
        bounds b of its operands make of it: through an activation ``1.13 b`` (its largest slope),
        through the second product ``min(b @ |w2|, 4 sqrt(b**2 @ w2**2))`` (roundings like random
        variables, as above), through the sums ``|weight| b``. An activation itself may be off by
        ``8 u_acc (1 + a**2)`` times its size, and is rounded once.

    Examples
    --------
    >>> x, topk, one = [np.array([[2.0]])], [np.array([[1]])], np.ones((1, 1))
    >>> w1, w2 = np.array([[[9.0]], [[-1.0]]]), np.array([[[9.0]], [[10.0]]])
    >>> moe_layer(x, topk, one, [w1], [w2], 0, 2, None).value.item()
    -20.0
    """
    dtype = w1_blocks[0].dtype
    rows = []
    for d, (w1, w2) in enumerate(zip(w1_blocks, w2_blocks, strict=True)):
        wide = accumulator_dtype(dtype)
        first, routing = moe_dispatch_gemm(x_blocks, topk_blocks, w1, d, num_experts, wide)
        hidden, off = _activated(first, activation, dtype)
        value, bound = (np.zeros((len(hidden), w2.shape[2])) for _ in range(2))
        for expert, factor in enumerate(w2.astype(np.float64)):
            own = slice(*routing.expert_offsets[expert : expert + 2])
            product = _product(hidden[own], factor, dtype, dtype)
            value[own] = product.value
            with np.errstate(all="ignore"):
                linear = off[own] @ np.abs(factor)
                random = 4 * np.sqrt(off[own] ** 2 @ factor**2)
                bound[own] = product.bound + np.minimum(linear, random)
                bound[own] += unit_roundoff(dtype) * bound[own]  # it is rounded as it is
        rows.append((value, bound))
    values, bounds = zip(*rows, strict=True)
    transfer = _output_dtype(dtype, transfer_dtype)
    sizes = tuple(nodes or (len(values),))
    return _combined(
        *(values, bounds, dtype, topk_blocks, topk_weight, rank, num_experts, transfer, sizes)
    )


def _activated(
    a: Expected, activation: str | None, dtype: np.dtype
) -> tuple[np.ndarray, np.ndarray]:
    """Return an activation of what is known up to a bound, rounded to a type, and its bound."""
    value, bound = a.value, a.bound
    up, up_bound = np.ones_like(value), np.zeros_like(value)
    if activation == "swiglu":
        (value, up), (bound, up_bound) = (np.split(x, 2, axis=1) for x in (value, bound))
    with np.errstate(all="ignore"):
        if activation is None:
            result, off = value, bound
        elif activation in ("silu", "swiglu"):
            result = value / (1 + np.exp(-value))
        elif activation == "gelu":
            result = value * _erfc(-value / np.sqrt(2)) / 2 if value.size else value
        else:
            raise ValueError(f"activation {activation!r} is unknown")
        if activation is not None:
            growth = _ACTIVATION_GROWTH * unit_roundoff(accumulator_dtype(dtype))
            off = _ACTIVATION_SLOPE * bound + growth * (1 + value**2) * np.abs(result)
        off = off * np.abs(up) + (np.abs(result) + off) * up_bound
        result = result * up
        off += unit_roundoff(dtype) * (np.abs(result) + off)
        off += float(ml_dtypes.finfo(dtype).smallest_subnormal) / 2
    return result, off


def _product(
    a: np.ndarray, b: np.ndarray, dtype: np.dtype, output: np.dtype, tf32: bool = False
) -> Expected:
    """Return a product of operands of a type, given in float64."""
    with np.errstate(all="ignore"):
        value = _accurate_product(a, b) if dtype == _FLOAT64 else a @ b
        bound = (
            unit_roundoff(output) * np.abs(value)
            + _accumulation_bound(a, b, accumulator_dtype(dtype), tf32)
            + float(ml_dtypes.finfo(output).smallest_subnormal) / 2
        )
    return Expected(value, np.where(np.isfinite(value), bound, 0.0), output)


def _supported(dtype: DTypeLike) -> np.dtype:
    dtype = np.dtype(dtype)
    if dtype not in _OUTPUTS:
        raise TypeError(f"{dtype} is not supported; use one of {', '.join(map(str, _OUTPUTS))}")
    return dtype


def _output_dtype(operands: np.dtype, requested: DTypeLike | None) -> np.dtype:
    allowed = _OUTPUTS[_supported(operands)]
    output = operands if requested is None else np.dtype(requested)
    if output not in allowed:
        raise TypeError(
            f"{operands} operands cannot give {output}; use one of {', '.join(map(str, allowed))}"
        )
    return output


def _accumulation_bound(
    a: np.ndarray, b: np.ndarray, accumulator: np.dtype, tf32: bool
) -> np.ndarray:
    """``4 sqrt(K) u ||a_i|| ||b_j||``, and half a subnormal for each product that underflows.

    With ``2 u_in ||a_i|| ||b_j||`` besides, where operands are rounded to tf32.
    """
    k = a.shape[1]
    growth = 4 * np.sqrt(k) * unit_roundoff(accumulator) + 2 * _TF32_ROUNDOFF * tf32
    underflow = k * float(ml_dtypes.finfo(accumulator).smallest_subnormal) / 2
    return np.multiply.outer(growth * _norms(a, axis=1), _norms(b, axis=0)) + underflow


def _norms(matrix: np.ndarray, axis: int) -> np.ndarray:
    # Divided by the largest entry, so that no square overflows or vanishes.
    largest = np.max(np.abs(matrix), axis=axis, keepdims=True, initial=0.0)
    scaled = matrix / np.where(largest > 0, largest, 1.0)
    return largest.squeeze(axis) * np.sqrt(np.sum(scaled * scaled, axis=axis))


def _accurate_product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """``a @ b`` of float64, as if computed in about 70 bits and then rounded.

    Rows of `a` and columns of `b` are scaled by powers of two and cut into slices of integers, few
    bits each, whose products and sums are exact in float64 whatever the order in which BLAS adds
    them (Ozaki, Ogita, Oishi and Rump, Numer. Algorithms 59, 95-118, 2012).
    """
    slices = 4
    finite_a, finite_b = np.isfinite(a), np.isfinite(b)
    # Sums of `slices` * K products of two slices stay below 2**53.
    bits = (53 - (slices * max(a.shape[1], 1) - 1).bit_length()) // 2
    a_slices, a_exponents = _integer_slices(np.where(finite_a, a, 0.0), 1, bits, slices)
    b_slices, b_exponents = _integer_slices(np.where(finite_b, b, 0.0), 0, bits, slices)
    value = np.zeros((a.shape[0], b.shape[1]))
    # From the least weight up: only the last sum rounds what matters.
    for order in reversed(range(slices)):
        exact = np.hstack(a_slices[: order + 1]) @ np.vstack(b_slices[order::-1])
        value = np.ldexp(value, -bits) + exact
    value = np.ldexp(value, a_exponents + b_exponents - 2 * bits)
    # A row or column with NaN or infinity gives nothing else.
    clean = finite_a.all(axis=1, keepdims=True) & finite_b.all(axis=0, keepdims=True)
    return value if clean.all() else np.where(clean, value, a @ b)


def _integer_slices(
    matrix: np.ndarray, axis: int, bits: int, slices: int
) -> tuple[list[np.ndarray], np.ndarray]:
    """``matrix = 2**exponents * sum_s slice_s * 2**(-bits * (s + 1))``, up to the bits cut off."""
    largest = np.max(np.abs(matrix), axis=axis, keepdims=True, initial=0.0)
    exponents = np.frexp(largest)[1]
    rest = np.ldexp(matrix, -exponents)
    parts = []
    for _ in range(slices):
        rest = np.ldexp(rest, bits)
        parts.append(np.rint(rest))
        rest = rest - parts[-1]
    return parts, exponents
