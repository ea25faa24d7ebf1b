"""`compile`: fill the cache of compiled code, for a job that is to start at once. Needs no GPU."""

import argparse
import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np

from .. import compiler
from ..arguments import DTYPES
from ..attention_plan import attention_tiles
from ..errors import CompileError, ConfigurationError
from ..moe_plan import ACTIVATIONS, expert_tiles
from ..tiles import Gpu, cpp_type, gpu_tiles, kernel_defines, type_defines
from . import spelled
from .job import say

# Of those that multiply, whether partial sums travel, whose dtype then is that of the operands.
_GEMMS = {"allgather_gemm": False, "gemm_reduce_scatter": True, "gemm_allreduce": True}
_EXPERTS = "moe_dispatch_gemm", "moe_combine", "moe_layer"
OPERATORS = (*_GEMMS, "ring_attention", *_EXPERTS)
# Where an operator has more kernels than that of its name: one for few rows.
_FORMS = {name: (name, "gemm_reduce_low_latency") for name, sums in _GEMMS.items() if sums}

_LINE = "{:<26}{:>10}{:>10}{:>10}"

_FLOAT32 = np.dtype(np.float32)
# KiB of shared memory that a thread block can have, by compute capability.
_SHARED_KIB = {"80": 163, "87": 163, "90": 227, "100": 227, "103": 227}
_SHARED_KIB_OF_OTHERS = 99


def kernels_for(operator: str, arch: str, *, small: bool = False) -> list[dict[str, Any]]:
    """Return the macros of an operator's kernels: for every dtype, the tiles that plans take.

    Those of the GEMMs are for operands in C order, or with tf32 in the orders in which all are
    read; attention has one for each width of heads, and a layer of experts one for each activation,
    whose sums travel in the dtype of the operands. `small`: those of sums of few rows.
    """
    kib = _SHARED_KIB.get(arch[3:].rstrip("af"), _SHARED_KIB_OF_OTHERS)
    gpu = Gpu(arch, 0, kib << 10, compiler.nvrtc_version())
    if operator == "ring_attention":
        return [
            {"MK_TYPE": cpp_type(dtype), **tile.defines(dtype)}
            for dtype in DTYPES
            for tile in attention_tiles(dtype, gpu)
        ]
    if operator == "moe_layer":
        return [
            kernel_defines(
                {
                    "MK_TYPE": cpp_type(dtype),
                    "MK_TRANSFER_TYPE": cpp_type(dtype),
                    "MK_ACTIVATION": activation or "none",
                },
                tile,
                dtype,
            )
            for dtype in DTYPES
            for activation in ACTIVATIONS
            for tile in expert_tiles(dtype, gpu, pairs=activation == "swiglu")
        ]
    if operator in _EXPERTS:
        other = "MK_TRANSFER_TYPE" if operator == "moe_combine" else "MK_OUT_TYPE"
        return [
            kernel_defines({"MK_TYPE": cpp_type(dtype), other: cpp_type(out_dtype)}, tile, dtype)
            for dtype in DTYPES
            for out_dtype in (
                {dtype: dtype, _FLOAT32: _FLOAT32} if dtype.itemsize == 2 else [dtype]
            )
            for tile in expert_tiles(dtype, gpu)[: 1 if operator == "moe_combine" else None]
        ]
    kinds = [(dtype, dtype, False) for dtype in DTYPES]
    kinds += [(dtype, _FLOAT32, dtype == _FLOAT32) for dtype in DTYPES if dtype.itemsize < 8]
    sums = _GEMMS[operator]
    return [
        kernel_defines(
            type_defines(dtype, out_dtype, dtype if sums else None, tf32=tf32),
            tile,
            dtype,
            b_by_columns=tf32,
        )
        for dtype, out_dtype, tf32 in kinds
        for tile in gpu_tiles(dtype, gpu, gathers=not sums, tf32=tf32, small=small)
    ]


def compile_kernels(arguments: argparse.Namespace) -> int:
    """Compile the kernels on all cores, say so of each, and at the end in a table.

    Returns the exit code.
    """
    arch, asked, begin = arguments.arch, arguments.operator, time.monotonic()
    forms = {
        form: operator
        for operator in OPERATORS
        if asked in (None, spelled(operator))
        for form in _FORMS.get(operator, (operator,))
    }
    done: list[tuple[str, int, float]] = []
    try:
        kernels = [
            (form, arch, defines)
            for form, operator in forms.items()
            for defines in kernels_for(operator, arch, small=form != operator)
        ]
        cores, fresh = len(os.sched_getaffinity(0)), multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(min(cores, len(kernels)), fresh) as workers:
            for (form, _, defines), made in zip(
                kernels, workers.map(_compile, kernels), strict=True
            ):
                done.append((form, *made))
                name = f"{form} {defines['MK_TYPE']}"
                words = f"{made[1]:.1f} s" if made[0] else "was there"
                print(f"{len(done):3} of {len(kernels)}  {name:<36}{words:>9}", flush=True)
    except (CompileError, ConfigurationError, ValueError) as error:
        say(error)
        return 1
    print(_LINE.format("kernel", "variants", "compiled", "seconds"))
    for form in dict.fromkeys(form for form, *_ in done):
        its = [(compiled, seconds) for name, compiled, seconds in done if name == form]
        compiled, seconds = map(sum, zip(*its, strict=True))
        print(_LINE.format(form, len(its), compiled, f"{seconds:.1f}"))
    print(
        f"{len(done)} kernels for {arch}: {sum(compiled for _, compiled, _ in done)} compiled in "
        f"{time.monotonic() - begin:.1f} s, the others were there"
    )
    return 0


def _compile(kernel: tuple[str, str, dict[str, Any]]) -> tuple[int, float]:
    """Compile a kernel unless it is there; return how many compilations that took, and seconds."""
    form, arch, defines = kernel
    start, before = time.monotonic(), compiler.compile_count()
    compiler.cubin(compiler.kernel_source(form), arch, defines=defines)
    return compiler.compile_count() - before, time.monotonic() - start
