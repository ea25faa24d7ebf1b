"""`compile`: fill the cache of compiled code, for a job that is to start at once. Needs no GPU."""

import argparse
import itertools
import time

import numpy as np

from .. import compiler, plan
from ..errors import CompileError, ConfigurationError
from .job import say

# And whether partial sums travel, whose dtype then is that of the operands.
OPERATORS = (("allgather_gemm", False), ("gemm_reduce_scatter", True), ("gemm_allreduce", True))


_FLOAT32 = np.dtype(np.float32)


def compile_kernels(arguments: argparse.Namespace) -> int:
    """Compile every operator for every dtype and the default tile; return the exit code."""
    start, before = time.monotonic(), compiler.compile_count()
    chosen = [one for one in OPERATORS if arguments.operator in (None, one[0])]
    kinds = [(dtype, dtype, False) for dtype in plan.DTYPES]
    kinds += [(dtype, _FLOAT32, dtype == _FLOAT32) for dtype in plan.DTYPES if dtype.itemsize < 8]
    kernels = 0
    try:
        for (name, sums), (dtype, out_dtype, tf32) in itertools.product(chosen, kinds):
            transfer_dtype = dtype if sums else None
            compiler.cubin(
                compiler.kernel_source(name),
                arguments.arch,
                defines=plan.type_defines(dtype, out_dtype, transfer_dtype, tf32=tf32),
            )
            kernels += 1
    except (CompileError, ConfigurationError, ValueError) as error:
        say(error)
        return 1
    print(
        f"{kernels} kernels for {arguments.arch}: {compiler.compile_count() - before} compiled in "
        f"{time.monotonic() - start:.1f} s, the others were there"
    )
    return 0
