"""`compile`: fill the cache of compiled code, for a job that is to start at once. Needs no GPU."""

import argparse
import itertools
import time

import numpy as np

from .. import compiler, plan
from ..errors import CompileError, ConfigurationError
from .job import say

# And whether partial sums travel, whose dtype then is that of the operands.
_OPERATORS = (("allgather_gemm", False), ("gemm_reduce_scatter", True), ("gemm_allreduce", True))


def compile_kernels(arguments: argparse.Namespace) -> int:
    """Compile every operator for every dtype and the default tile; return the exit code."""
    start, before = time.monotonic(), compiler.compile_count()
    jobs = list(itertools.product(_OPERATORS, plan.DTYPES, (None, np.float32)))
    kernels = 0
    try:
        for (name, sums), dtype, requested in jobs:
            if requested is not None and dtype.itemsize > 2:
                continue
            out_dtype = plan.output_dtype(dtype, requested)
            compiler.cubin(
                compiler.kernel_source(name),
                arguments.arch,
                defines=plan.type_defines(dtype, out_dtype, dtype if sums else None),
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
