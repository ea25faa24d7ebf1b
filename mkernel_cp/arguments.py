"""Arguments: what callers may pass, and the errors that say so."""

import operator
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

DTYPES = tuple(map(np.dtype, (ml_dtypes.bfloat16, np.float16, np.float32, np.float64)))
_NAMES = ", ".join(dtype.name for dtype in DTYPES)


@dataclass(frozen=True)
class Options:
    """Choices of a plan that a caller makes; None leaves one to the plan.

    Parameters
    ----------
    split : tuple of int, optional
        (movers, compute): agents per role; None for compute means as many as there is room and
        work for. Without movers compute agents do their work too. Sums over ranks may have a third,
        inter-reduce: agents that add what leaves their node; nothing within one node.
    tile : tuple of int, optional
        (rows, columns, k) of what an agent computes at a time, each at least 1. On GPUs of compute
        capability 9.0, operators on experts that multiply 16-bit operands take few, which the error
        for another one lists.
    chunk_bytes : int, optional
        About how much of an operand is moved at a time; nothing for `gemm_reduce_scatter` and
        `gemm_allreduce`, which move finished tiles. All ranks must give the same.
    transfer_dtype : data-type, optional
        Of partial sums on their way to the rank that adds them: that of the operands (default), or
        float32 for 16-bit operands. All ranks must give the same.
    tf32 : bool, optional
        Round float32 operands to 11 bits of significand as they are multiplied, which GPUs do many
        times as fast; sums stay in float32. All ranks must give the same. GPUs of compute
        capability 9.0 read `a` in C and `b` in F order for it, and copy what lies otherwise.
    sm_budget : int, optional
        How many multiprocessors of a GPU a call takes at most, so that other kernels have the rest.
        Nothing on the host target. For sums all ranks must give the same.

    Examples
    --------
    >>> mk.allgather_gemm(a, b, comm=comm, options=mk.Options(split=(2, 6)))
    """

    split: tuple[int, int | None] | tuple[int, int | None, int] | None = None
    tile: tuple[int, int, int] | None = None
    chunk_bytes: int | None = None
    transfer_dtype: Any = None
    tf32: bool = False
    sm_budget: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "tf32", flag("Options(tf32)", self.tf32))
        if self.transfer_dtype is not None:
            transfer_dtype = asked_dtype("Options(transfer_dtype)", self.transfer_dtype)
            object.__setattr__(self, "transfer_dtype", transfer_dtype)
        for name, lengths, least in (
            ("split", (2, 3), {"movers": 0, "compute": 1, "inter-reduce": 1}),
            ("tile", (3,), {"rows": 1, "columns": 1, "k": 1}),
        ):
            value = getattr(self, name)
            if value is not None:
                asked = f"use {' or '.join(map(str, lengths))}"
                try:
                    given = tuple(value)
                    free = name == "split" and len(given) in lengths and given[1] is None
                    value = tuple(
                        None if free and i == 1 else integer(extent)
                        for i, extent in enumerate(given)
                    )
                except TypeError:
                    raise TypeError(f"Options({name}={value!r}): {asked} integers") from None
                if len(value) not in lengths or not all(
                    extent is None or low <= extent <= 1024
                    for low, extent in zip(least.values(), value, strict=False)
                ):
                    bounds = ", ".join(f"{role} from {low} to 1024" for role, low in least.items())
                    bounds += "; compute may be None" if name == "split" else ""
                    raise ValueError(f"Options({name}={value}): {asked} numbers: {bounds}")
                object.__setattr__(self, name, value)
        for name in ("chunk_bytes", "sm_budget"):
            value = getattr(self, name)
            if value is not None:
                value = at_least(1, f"Options({name})", value)
                object.__setattr__(self, name, value)


def integer(value: Any) -> int:
    """Return what is an integer as one of Python's; TypeError for anything else, a bool too."""
    if isinstance(value, bool):
        raise TypeError("a bool")
    return operator.index(value)


def _given(name: str, text: str) -> str:
    """Return an argument as it was given: ``x=1``, or for a name like ``of(x)``: ``of(x=1)``."""
    return f"{name[:-1]}={text})" if name.endswith(")") else f"{name}={text}"


def at_least(least: int, name: str, value: Any) -> int:
    """Return an argument that is an integer of at least so much."""
    try:
        value = integer(value)
    except TypeError:
        raise TypeError(f"{_given(name, repr(value))}: use an integer") from None
    if value < least:
        raise ValueError(f"{_given(name, repr(value))}: use at least {least}")
    return value


def number(value: Any) -> float:
    """Return what `float` makes of a value; TypeError for a bool, of Python or of an array."""
    if isinstance(value, bool) or getattr(value, "dtype", None) == np.dtype(bool):
        raise TypeError("a bool")
    return float(value)


def flag(name: str, value: Any) -> bool:
    """Return an argument that is True or False; TypeError for anything else."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{_given(name, repr(value))}: use True or False")
    return bool(value)


def asked_dtype(name: str, value: Any) -> np.dtype:
    """Return the dtype that an argument names; TypeError, with those there are, if none."""
    try:
        return np.dtype(value)
    except TypeError:
        raise TypeError(f"{_given(name, repr(value))} is no dtype: use one of {_NAMES}") from None


def check_dtype(name: str, dtype: np.dtype) -> None:
    """Raise TypeError, with the allowed ones, for a dtype that operators do not take."""
    if dtype not in DTYPES:
        raise TypeError(f"{name} has dtype {dtype}: not allowed; use one of {_NAMES}")


def output_dtype(dtype: np.dtype, requested: object, name: str = "dtype") -> np.dtype:
    """Return the dtype of an output or a transfer: the operands', or float32 for 16-bit ones."""
    requested = dtype if requested is None else asked_dtype(name, requested)
    allowed = [dtype] if dtype.itemsize > 2 else [dtype, np.dtype(np.float32)]
    if requested not in allowed:
        names = " or ".join(d.name for d in allowed)
        given = _given(name, requested.name)
        raise TypeError(f"{given}: not allowed for {dtype} operands; use {names}")
    return requested
