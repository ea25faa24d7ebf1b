"""What all operators check of their operands and outputs."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ..arguments import Options, at_least, check_dtype, integer
from ..memory import round_up


class Operand:
    """An array of the target, and its shadow: a NumPy array that lies in the same place.

    Parameters
    ----------
    name : str
        Of the argument.
    value : array
        What the caller passed.
    machine : HostTarget or CudaTarget
    """

    def __init__(self, name: str, value: Any, machine: Any):
        self.name = name
        self.array = machine.array(name, value)
        self.shadow: np.ndarray = machine.shadow(self.array)


def options(value: Any, exact: str = "", *, sums: bool = False) -> Options:
    """Return the options of a call; TypeError if they are something else.

    `exact` names an operator that does not round float32: it refuses to be asked for that. `sums`:
    the operator adds over ranks, and may have agents that do so between nodes.
    """
    if value is not None and not isinstance(value, Options):
        raise TypeError(f"options is a {type(value).__name__}: use mkernel_cp.Options")
    if exact and value is not None and value.tf32:
        raise TypeError(f"Options(tf32=True): {exact} multiplies float32 as it is; leave it out")
    if value is not None and not sums and len(value.split or ()) > 2:
        raise ValueError(
            f"Options(split={value.split}): only sums over ranks have agents of a third role; use "
            "(movers, compute)"
        )
    return value or Options()


def matrix(name: str, value: np.ndarray) -> None:
    """Raise ValueError or TypeError unless an operand has two dimensions and an allowed dtype."""
    if value.ndim != 2:
        raise ValueError(f"{name} has shape {value.shape}: use a matrix of 2 dimensions")
    check_dtype(name, value.dtype)


def same_dtype(a: np.ndarray, b: np.ndarray) -> np.dtype:
    """Return the dtype of two operands; TypeError if they differ."""
    if a.dtype != b.dtype:
        raise TypeError(f"a has dtype {a.dtype}, b {b.dtype}: use the same for both")
    return a.dtype


def counts(
    name: str, value: Sequence[int] | None, own: int, rank: int, size: int, what: str = "rows"
) -> tuple:
    """Return how many rows or positions every rank has; None means as many as here."""
    if value is None:
        return (own,) * size
    result = numbers(name, value, size)
    if result[rank] != own:
        raise ValueError(
            f"{name}[{rank}] is {result[rank]}, but this rank, {rank}, passes {own} {what}"
        )
    return result


def numbers(name: str, value: Sequence[int], size: int) -> tuple[int, ...]:
    """Return one number per rank, each at least 0; TypeError or ValueError otherwise."""
    try:
        result = tuple(map(integer, value))
    except TypeError:
        raise TypeError(f"{name}={value!r}: use a sequence of {size} integers") from None
    if len(result) != size or min(result) < 0:
        raise ValueError(f"{name}={list(result)}: use {size} numbers, one per rank, each >= 0")
    return result


def whole_number(name: str, value: Any) -> int | None:
    """Return an argument that is None or an integer of at least 0; TypeError or ValueError."""
    return None if value is None else at_least(0, name, value)


def output(
    value: Any,
    shape: tuple[int, ...],
    dtype: np.dtype,
    inputs: Iterable[tuple[str, np.ndarray]],
    machine: Any,
    name: str = "out",
    remedy: str = "; dtype= changes it",
) -> Operand:
    """Return `value` if the result can be written into it, or a new array if it is None."""
    if value is None:
        return Operand(name, machine.empty(shape, dtype), machine)
    operand = Operand(name, value, machine)
    out = operand.shadow
    if out.shape != shape:
        raise ValueError(f"{name} has shape {out.shape}: the result has {shape}")
    if out.dtype != dtype:
        raise TypeError(f"{name} has dtype {out.dtype}: the result has {dtype}{remedy}")
    if not out.flags.writeable:
        raise ValueError(f"{name} is read-only")
    if _repeats(out):
        raise ValueError(
            f"{name} has elements that share memory: use an array without broadcasting"
        )
    for other, array in inputs:
        if _overlap(out, array):
            raise ValueError(f"{name} overlaps {other}: use memory of its own for the result")
    return operand


def _repeats(a: np.ndarray) -> bool:
    """Return whether elements of an array share memory: an axis steps over less than the inner."""
    reach = a.itemsize
    for step, extent in sorted((abs(step), n) for n, step in zip(a.shape, a.strides, strict=True)):
        if extent > 1 and a.size:
            if step < reach:
                return True
            reach = step * extent
    return False


def _overlap(a: np.ndarray, b: np.ndarray) -> bool:
    try:
        return np.shares_memory(a, b, max_work=10_000)
    except np.exceptions.TooHardError:
        return True


def element_steps(a: np.ndarray) -> tuple[int, ...] | None:
    """Return strides in elements; None if a kernel cannot step through the array so."""
    # The stride of an axis of length 1 leads nowhere, and NumPy leaves anything there.
    steps = [step if n > 1 else a.itemsize for n, step in zip(a.shape, a.strides, strict=True)]
    if not a.flags.aligned or any(step % a.itemsize for step in steps):
        return None
    return tuple(step // a.itemsize for step in steps)


def line_pitch(a: np.ndarray, by_columns: bool) -> int | None:
    """Return the bytes from one row (or column) to the next, if each is contiguous; else None."""
    line, step = (a.strides[1], a.strides[0]) if by_columns else a.strides
    lines, run = (a.shape[1], a.shape[0]) if by_columns else a.shape
    if (run > 1 and step != a.itemsize) or (lines > 1 and line < run * a.itemsize):
        return None
    return line if lines > 1 else run * a.itemsize


def aligned_lines(a: np.ndarray, by_columns: bool) -> tuple[tuple[int, int], int] | None:
    """Return the lines of a matrix as tensor copies see them; None if they cannot read them.

    Returns
    -------
    ((run, lines), pitch) or None
        Elements of a line, how many lines, and the bytes from one to the next.
    """
    pitch = line_pitch(a, by_columns)
    run, lines = a.shape if by_columns else a.shape[::-1]
    if pitch is not None and lines <= 1:
        pitch = round_up(run * a.itemsize, 16)
    if pitch is None or pitch % 16 or (a.size and a.ctypes.data % 16):
        return None
    return (run, lines), pitch


def map_lines(
    to: Any,
    array: np.ndarray,
    by_columns: bool,
    box: tuple[int, int],
    machine: Any,
    *,
    tf32: bool = False,
) -> None:
    """Give a ``Matrix`` a tensor map, if its lines can have one.

    `tf32`: what it loads is rounded.
    """
    lines = aligned_lines(array, by_columns)
    to.box_lines = box[1] if lines is not None and array.size else 0
    if to.box_lines:
        extents, pitch = lines
        to.map.opaque[:] = machine.tensor_map(
            array.ctypes.data, array.dtype, extents, (pitch,), box, tf32=tf32
        )


def aligned_stack(
    a: np.ndarray, by_columns: bool
) -> tuple[tuple[int, int, int], tuple[int, int]] | None:
    """Return the lines of matrices of equal shape as tensor copies see them, or None.

    Returns
    -------
    ((run, lines, matrices), (pitch, stride)) or None
        As `aligned_lines`, and the bytes from one matrix to the next.
    """
    if not a.size:
        return (*a.shape[:0:-1], len(a)), (16, 16)
    lines = aligned_lines(a[0], by_columns)
    if lines is None:
        return None
    extents, pitch = lines
    stride = a.strides[0] if len(a) > 1 else extents[1] * pitch  # which leads nowhere
    if stride <= 0 or stride % 16:
        return None
    return (*extents, len(a)), (pitch, stride)


def aligned_heads(a: np.ndarray) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return (batch, positions, heads, D) as tensor copies see it; None if they cannot read it.

    Returns
    -------
    (extents, pitches) or None
        Elements of a line, positions, heads, batch entries; and the bytes from one to the next of
        each but the first.
    """
    axes = 3, 1, 2, 0
    extents = tuple(a.shape[axis] for axis in axes)
    # The stride of an axis of length 1 leads nowhere, and NumPy leaves anything there.
    run, *pitches = (16 if a.shape[axis] <= 1 else a.strides[axis] for axis in axes)
    if extents[0] > 1 and run != a.itemsize:
        return None
    if any(pitch <= 0 or pitch % 16 for pitch in pitches) or (a.size and a.ctypes.data % 16):
        return None
    return extents, tuple(pitches)


def prefers_columns(a: np.ndarray) -> bool | None:
    """Return whether an operand lies in F order; None if either order reads it well."""
    rows, columns = line_pitch(a, False) is not None, line_pitch(a, True) is not None
    return None if rows == columns else columns
