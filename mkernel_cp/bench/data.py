"""Operands to measure with: how many sets, of which random numbers."""

from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

SETS = 3  # of operands, used in turn: what the call before has left in a cache is of no use


@dataclass(frozen=True, eq=False, kw_only=True)
class Operands:
    """One set of what an operator takes and gives: on all ranks, and on this one alone.

    Attributes
    ----------
    own : tuple
        What it takes, with peers' data where peers can read it.
    out : array or tuple
        Where its result comes, as ``out=`` takes it.
    asked : dict
        Its other arguments.
    alike, made, asked_alone
        The same on this rank alone, which then has as much to compute and all data there; nothing
        where only the fused operator is measured.
    """

    own: tuple[Any, ...]
    out: Any
    asked: dict[str, Any] = field(default_factory=dict)
    alike: tuple[Any, ...] = ()
    made: Any = None
    asked_alone: dict[str, Any] = field(default_factory=dict)


def normal(numpy: Any, dtype: np.dtype, seed: int, shape: tuple[int, ...]) -> Any:
    """Return an array of NumPy or CuPy, which is passed, with normally distributed numbers."""
    wide = np.float64 if dtype == np.float64 else np.float32
    values = numpy.random.default_rng(seed).standard_normal(shape, dtype=wide)
    if dtype == ml_dtypes.bfloat16:  # cut off: not every CuPy converts to it
        return (values.view(np.uint32) >> 16).astype(np.uint16).view(dtype)
    return values.astype(dtype)
