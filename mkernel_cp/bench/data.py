"""Random data to measure with."""

from typing import Any

import ml_dtypes
import numpy as np


def normal(numpy: Any, dtype: np.dtype, seed: int, shape: tuple[int, ...]) -> Any:
    """Return an array of NumPy or CuPy, which is passed, with normally distributed numbers."""
    wide = np.float64 if dtype == np.float64 else np.float32
    values = numpy.random.default_rng(seed).standard_normal(shape, dtype=wide)
    if dtype == ml_dtypes.bfloat16:  # cut off: not every CuPy converts to it
        return (values.view(np.uint32) >> 16).astype(np.uint16).view(dtype)
    return values.astype(dtype)
