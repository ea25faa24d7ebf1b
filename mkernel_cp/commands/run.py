"""`run`: an operator on files."""

import argparse
import contextlib
import math
import os
import signal
import stat
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from ..communicator import Communicator
from ..operators import allgather_gemm as gather
from ..operators import gemm_allreduce as reduce
from ..operators import gemm_reduce_scatter as scatter
from ..plan import check_dtype, output_dtype
from .job import together

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
# What NumPy makes of bfloat16 in a file: two bytes without a meaning.
_VOID = np.dtype("V2")


def allgather_gemm(comm: Communicator, arguments: argparse.Namespace) -> int:
    """Multiply two files into a third; the rows of A and columns of B and C are split by rank."""

    def work(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> None:
        rows, columns = comm.rows(a.shape[0]), comm.rows(b.shape[1])
        counts = comm.row_counts(a.shape[0])
        own = _operands(comm, a[rows], b[:, columns])
        _store(comm, c[:, columns], gather.allgather_gemm, *own, row_counts=counts)

    return _multiply(comm, arguments, work)


def gemm_reduce_scatter(comm: Communicator, arguments: argparse.Namespace) -> int:
    """Multiply two files into a third; the columns of A and rows of B and C are split by rank."""

    def work(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> None:
        depth, rows = comm.rows(b.shape[0]), comm.rows(a.shape[0])
        own = _operands(comm, a[:, depth], b[depth])
        _store(comm, c[rows], scatter.gemm_reduce_scatter, *own)

    return _multiply(comm, arguments, work)


def gemm_allreduce(comm: Communicator, arguments: argparse.Namespace) -> int:
    """Do the same with the whole sum on every rank, each of which writes some rows."""

    def work(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> None:
        depth, rows = comm.rows(b.shape[0]), comm.rows(a.shape[0])
        own = _operands(comm, a[:, depth], b[depth])
        result = reduce.gemm_allreduce(*own, comm=comm, dtype=c.dtype)
        c[rows] = comm.machine.asnumpy(result)[rows]
        comm.synchronize()

    return _multiply(comm, arguments, work)


def _operands(comm: Communicator, *parts: np.ndarray) -> Iterator[Any]:
    return (comm.machine.asarray(part, None) for part in parts)


def _store(
    comm: Communicator, part: np.ndarray, call: Callable[..., Any], a: Any, b: Any, **asked: Any
) -> None:
    """Make a call whose result is a part of the output."""
    out = part if comm.target == "host" else None
    result = call(a, b, comm=comm, out=out, dtype=part.dtype, **asked)
    if out is None:
        part[...] = comm.machine.asnumpy(result)
        comm.synchronize()


def _multiply(
    comm: Communicator,
    arguments: argparse.Namespace,
    work: Callable[[np.ndarray, np.ndarray, np.ndarray], None],
) -> int:
    """Open the files, have `work` fill in this rank's part of the output, and say so."""
    matrices: list[np.ndarray] = []

    def open_inputs() -> str:
        a, b = (_open_matrix(path) for path in (arguments.a, arguments.b))
        names = f"{arguments.a} has shape {a.shape}, {arguments.b} {b.shape}"
        if a.shape[1] != b.shape[0]:
            raise ValueError(f"{names}: A needs as many columns as B has rows")
        if a.dtype != b.dtype:
            raise TypeError(f"{arguments.a} has dtype {a.dtype}, {arguments.b} {b.dtype}: use one")
        output_dtype(a.dtype, arguments.dtype)
        matrices.extend((a, b))
        return uuid.uuid4().hex

    name = together(comm, "to open the inputs", open_inputs)[0]
    a, b = matrices
    dtype = output_dtype(a.dtype, arguments.dtype)
    shape = (a.shape[0], b.shape[1])
    start = time.perf_counter()
    with _output(comm, arguments.output, name, shape, dtype) as c:
        work(a, b, c)
    if comm.rank == 0:
        print(
            f"{arguments.output}: {shape} {dtype} = {a.shape} @ {b.shape} {a.dtype}, "
            f"{comm.size} rank(s), target {comm.target}, {time.perf_counter() - start:.3f} s",
            flush=True,
        )
    return 0


def _open_matrix(path: str) -> np.ndarray:
    """Return a .npy file as a memory-mapped matrix; OSError, ValueError or TypeError if it is none.

    Every refusal names the file.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise ValueError(f"{path} is not a regular file")
    with open(path, "rb") as file:
        try:
            shape, fortran_order, dtype = _read_header(file)
        except ValueError as error:
            raise ValueError(f"{path} is not a .npy file of numbers: {error}") from None
        offset = file.tell()
        size = os.fstat(file.fileno()).st_size
    dtype = _BFLOAT16 if dtype == _VOID else dtype
    if len(shape) != 2:
        raise ValueError(f"{path} has shape {shape}: use a matrix of 2 dimensions")
    check_dtype(path, dtype)
    need = offset + math.prod(shape) * dtype.itemsize
    if size < need:
        raise ValueError(
            f"{path} is truncated: it has {size} bytes, and {shape} {dtype} takes {need}"
        )
    return _map(path, dtype, "r", offset, shape, "F" if fortran_order else "C")


def _read_header(file: Any) -> tuple[tuple[int, ...], bool, np.dtype]:
    version = np.lib.format.read_magic(file)
    if version == (1, 0):
        return np.lib.format.read_array_header_1_0(file)
    if version == (2, 0):
        return np.lib.format.read_array_header_2_0(file)
    raise ValueError(f"version {version} of the format")


def _map(
    path: str, dtype: np.dtype, mode: str, offset: int, shape: tuple[int, ...], order: str
) -> np.ndarray:
    if 0 in shape:
        return np.empty(shape, dtype, order)  # nothing can be mapped
    return np.memmap(path, dtype, mode, offset, shape, order)


@contextlib.contextmanager
def _output(
    comm: Communicator, path: str, name: str, shape: tuple[int, ...], dtype: np.dtype
) -> Iterator[np.ndarray]:
    """Give all ranks one memory-mapped matrix, which becomes the file `path` if all succeed.

    Until then it is a file beside it, which is gone if one of them fails.
    """
    final = Path(os.path.realpath(path))
    temporary = final.with_name(f".mkernel_cp-{name}.tmp")
    header = {
        "descr": np.lib.format.dtype_to_descr(_VOID if dtype == _BFLOAT16 else dtype),
        "fortran_order": False,
        "shape": shape,
    }

    def create() -> int | None:
        if comm.rank != 0:
            return None
        if final.exists() and not final.is_file():
            raise ValueError(f"{path} is not a regular file")
        try:
            with open(temporary, "xb") as file:
                np.lib.format.write_array_header_1_0(file, header)
                file.flush()
                offset = file.tell()
                # Now: a mapped page without room on the disk would be a SIGBUS.
                os.posix_fallocate(file.fileno(), 0, offset + math.prod(shape) * dtype.itemsize)
        except (OSError, OverflowError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise ValueError(f"cannot write {path}: {why}") from None
        return offset

    def rename() -> None:
        if comm.rank == 0:
            os.replace(temporary, final)

    # A launcher that ends its ranks asks them first: then the file goes, too.
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        offset = together(comm, "to make the output", create)[0]
        matrix = _map(str(temporary), dtype, "r+", offset, shape, "C")
        yield matrix
        if isinstance(matrix, np.memmap):
            together(comm, "to write the output", matrix.flush)
        together(comm, "to rename the output", rename)
    finally:
        # Any rank may be the one that survives. After the renaming there is no such file.
        with contextlib.suppress(OSError):
            temporary.unlink()
        signal.signal(signal.SIGTERM, previous)
