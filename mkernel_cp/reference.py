"""What the operators compute, in NumPy, and how far a correct result may be from it.

This module is the specification: a kernel is right when its output lies, element by element, within
the bound given here, and nothing else is a pass. The values are accumulated in float64; for float64
operands they come from exact partial products, so the reference is always better than what it
judges.

The bound of a product that is accumulated in a type with unit roundoff ``u_acc`` and then rounded
once to the output type (``u_out``) is::

    u_out * |ref_ij|  +  4 * sqrt(K) * u_acc * ||a_i||_2 * ||b_j||_2  +  underflow

where the last term is half the smallest subnormal of the output type, and half that of the
accumulator for each of the K products. The worst case over all roundings is
``K * u_acc * |a_i|.|b_j|`` to first order [1]_, far above what is ever seen and too weak to notice
a lost term. Roundings that behave like independent random variables of mean zero give
``lambda * sqrt(K) * u_acc * |a_i|.|b_j|`` with high probability, in any order of summation [2]_;
lambda is 4 here, and ``|a_i|.|b_j| <= ||a_i|| ||b_j||``. Up to K = 16 this is no smaller than the
worst case. Beyond, data that rounds the same way at every step (long constant vectors) can exceed
it: judge with random data.

.. [1] N. J. Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., SIAM, 2002, sec. 3.1.
.. [2] N. J. Higham and T. Mary, A new approach to probabilistic rounding error analysis, SIAM
   J. Sci. Comput. 41(5), A2815-A2835, 2019.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np
from numpy.typing import ArrayLike, DTypeLike

__all__ = [
    "Expected",
    "accumulator_dtype",
    "allgather_gemm",
    "array_split_counts",
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
    ValueError
        If `m` is negative or `parts` is less than 1.

    Examples
    --------
    >>> array_split_counts(10, 4)
    (3, 3, 2, 2)
    """
    if m < 0 or parts < 1:
        raise ValueError(f"need m >= 0 and parts >= 1, got m={m}, parts={parts}")
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
    a_blocks: Sequence[np.ndarray], b: np.ndarray, dtype: DTypeLike | None = None
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
    output = _output_dtype(b.dtype, dtype)
    a64 = np.concatenate([block.astype(np.float64) for block in a_blocks])
    b64 = b.astype(np.float64)
    with np.errstate(all="ignore"):
        value = _accurate_product(a64, b64) if b.dtype == _FLOAT64 else a64 @ b64
        bound = (
            unit_roundoff(output) * np.abs(value)
            + _accumulation_bound(a64, b64, accumulator_dtype(b.dtype))
            + float(ml_dtypes.finfo(output).smallest_subnormal) / 2
        )
    return Expected(value, np.where(np.isfinite(value), bound, 0.0), output)


# Fixed by the emulation in tests/test_reference.py, which stays below two thirds of the bounds.
_SCORES = 0.5
_SUMS = 2.0


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

    What is not seen has no influence, if it is NaN; what is seen acts as in NumPy. A row that sees
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

            u_out |ref| + (u_P + 2 e_i) max_j |v_jd| + underflow

        where the maximum is over the j that i sees. The weights P are rounded to the operands' type
        before they are multiplied, if that has 16 bits (``u_P``, else 0): the result is a weighted
        mean, so this changes it by no more than u_P max|v|, c = 1. ``e_i`` is what the accumulator
        does to the logarithm of a weight, and again to their sum::

            e_i = u_acc (0.5 sqrt(D) |scale| ||q_i|| max_j ||k_j|| + 2 sqrt(n_i) + 2 |log| terms)

        with n_i positions seen.
    lse : Expected
        (B, Hq, S_r), of the accumulator's type, with the bound ``u |ref| + 2 e_i``.

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


def _accumulation_bound(a: np.ndarray, b: np.ndarray, accumulator: np.dtype) -> np.ndarray:
    """``4 sqrt(K) u ||a_i|| ||b_j||``, and half a subnormal for each product that underflows."""
    k = a.shape[1]
    growth = 4 * np.sqrt(k) * unit_roundoff(accumulator)
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
