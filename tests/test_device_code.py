"""The kernels are device code: NVRTC takes them, and what comes out spills no registers."""

import functools
import itertools
import re
import shutil
import struct

import numpy as np
import pytest

import mkernel_cp as mk
from mkernel_cp import compiler, tiles
from mkernel_cp.attention_plan import (
    attention_tiles,
    hopper_attention_tile,
    portable_attention_tile,
)

pytestmark = pytest.mark.nvrtc

FEW_ROWS = "gemm_reduce_low_latency"  # has small tiles
KERNELS = ("allgather_gemm", "gemm_reduce_scatter", "gemm_allreduce", FEW_ROWS)
# Bytes that a thread may keep in memory for want of registers. Where all warps of a block have the
# same number, consumers of a tile lack a few between panels. Whoever sums over ranks lacks some
# while it delivers a tile.
MAY_SPILL = {
    ("allgather_gemm", "sm_80"): 288,
    ("allgather_gemm", "sm_90a"): 176,  # with NVRTC 12.9
    ("gemm_reduce_scatter", "sm_80"): 384,
    ("gemm_reduce_scatter", "sm_90a"): 192,
    ("gemm_allreduce", "sm_80"): 960,
    ("gemm_allreduce", "sm_90a"): 192,
    (FEW_ROWS, "sm_90a"): 64,
    # What a thread knows of tokens and of a second product is kept in memory while it multiplies.
    ("moe_dispatch_gemm", "sm_80"): 64,
    ("moe_dispatch_gemm", "sm_90a"): 192,
    ("moe_combine", "sm_80"): 96,  # of float64, what the slots of a token have
    ("moe_layer", "sm_80"): 384,
    ("moe_layer", "sm_90a"): 768,
}
TYPES = [
    ("bfloat16", "bfloat16"),
    ("bfloat16", "float"),
    ("float16", "float16"),
    ("float16", "float"),
    ("float", "float"),
    ("tfloat32", "float"),
    ("double", "double"),
]
# No macro at all: as plain cupy.RawModule compiles it.
MACROS = {"plain": {}, **{f"{a}-{out}": {"MK_TYPE": a, "MK_OUT_TYPE": out} for a, out in TYPES}}


# All of one kernel, and on each architecture what differs most; of the others, which have the same
# engines, that only.
VARIANTS = [
    *itertools.product(KERNELS[:1], ["sm_80"], MACROS),
    *itertools.product(KERNELS[:1], ["sm_90a"], ["plain", "tfloat32-float", "double-double"]),
    *itertools.product(KERNELS[1:3], ["sm_80"], ["plain"]),
    (FEW_ROWS, "sm_80", "bfloat16-bfloat16"),
    *itertools.product(KERNELS[1:], ["sm_90a"], ["double-double"]),
]


def compile_kernel(name, architecture, defines):
    """Return the cubin of a kernel (None if it does not compile) and the log."""
    options = (
        "-std=c++17",
        f"-I{compiler.include_dir()}",
        f"--gpu-architecture={architecture}",
        "--ptxas-options=-v",
        *(f"-D{macro}={value}" for macro, value in defines.items()),
    )
    return _compiled(compiler.kernel_source(name), options)


# Several tests look at the same kernel.
_compiled = functools.cache(compiler.nvrtc_compile)


def complaint(cubin, log, entry, architecture="sm_90a", *, traced=False, limit=None):
    """Return what is wrong with a compilation, or None."""
    if cubin is None:
        return f"does not compile:\n{log}"
    if b"\0.text." + entry.encode() + b"\0" not in cubin:
        return f"has no entry point {entry}"
    spills = list(map(int, re.findall(r"(\d+) bytes spill (?:stores|loads)", log)))
    if len(spills) < 2:
        return f"ptxas does not say what it spills:\n{log}"
    losses = compiler.losses(log)
    if limit is None:
        limit = 256 if traced else MAY_SPILL.get((entry, architecture), 0)
    if max(spills) > limit:
        return f"spills registers:\n{log}"
    if any("spill" not in line for line in losses):
        return f"is slowed down by ptxas:\n{log}"
    if "warning" in log:
        return f"compiles with a warning:\n{log}"
    return None


@pytest.mark.parametrize(("name", "architecture", "macros"), VARIANTS)
def test_compiles_as_device_code_without_spills(name, architecture, macros):
    chosen = MACROS[macros]
    if name == FEW_ROWS:
        dtype = np.dtype(macros.split("-")[0].replace("double", "float64"))
        tile = tiles.portable_tile(dtype, mk.Options(), SHARED_BYTES[architecture], small=True)
        chosen = chosen | tile.defines(dtype)
    cubin, log = compile_kernel(name, architecture, chosen)
    found = complaint(cubin, log, name, architecture)
    assert found is None, found


@pytest.mark.parametrize("name", KERNELS[:1])
def test_macros_choose_the_types_and_none_means_bfloat16(name):
    cubins = {word: compile_kernel(name, "sm_80", MACROS[word])[0] for word in MACROS}
    assert cubins.pop("plain") == cubins["bfloat16-bfloat16"]
    assert len(set(cubins.values())) == len(TYPES)


def hopper(types, cluster):
    """The macros of the engine `hopper`."""
    tile = {"MK_CLUSTER": cluster, "MK_TILE_ROWS": 128 * cluster, "MK_TILE_COLUMNS": 256}
    macros = {"MK_ENGINE_HOPPER": 1, "MK_THREADS": 384, **tile}
    return macros | {"MK_TYPE": types[0], "MK_OUT_TYPE": types[1]}


HALVES = [pair for pair in TYPES if "16" in pair[0]]
TF32 = ("tfloat32", "float")


@pytest.mark.parametrize(
    ("name", "types", "cluster"),
    [
        *zip(KERNELS[:1] * 4, HALVES, [1, 2, 2, 1], strict=True),
        *itertools.product(KERNELS[1:], HALVES[:1], [1]),
        *itertools.product(KERNELS[1:3], HALVES[3:], [2]),
        (FEW_ROWS, HALVES[3], 1),
        *itertools.product((*KERNELS[:2], FEW_ROWS), [TF32], [1]),
    ],
)
def test_compiles_with_the_hopper_engine(name, types, cluster):
    """Neither serialised multiplies nor a dropped setmaxnreg, which ptxas only mentions."""
    macros = hopper(types, cluster) | {"MK_B_BY_COLUMNS": int(types == TF32)}
    if name == FEW_ROWS:
        macros["MK_TILE_COLUMNS"] = 64 if types == HALVES[0] else 128
    if name != "allgather_gemm":
        macros["MK_TRANSFER_TYPE"] = types[1]
    elif types == HALVES[1]:
        macros["MK_COURIERS"] = 0  # there are movers
    cubin, log = compile_kernel(name, "sm_90a", macros)
    limit = 64 if name == "allgather_gemm" else None  # a verdict or two, between tiles
    found = complaint(cubin, log, name, limit=limit)
    assert found is None, found


def experts(dtype, other, activation="none"):
    """The macros of an operator on experts: of its results or of sums on their way, too."""
    words = {"MK_TYPE": dtype, "MK_OUT_TYPE": other, "MK_TRANSFER_TYPE": other}
    return words | {"MK_ACTIVATION": activation}


EXPERTS = [
    ("moe_dispatch_gemm", "sm_80", experts("bfloat16", "bfloat16")),
    (
        *("moe_dispatch_gemm", "sm_90a"),
        hopper(("float16", "float"), 1) | {"MK_B_BY_COLUMNS": 1, "MK_FLEXIBLE": 1},
    ),
    ("moe_combine", "sm_80", experts("float16", "float")),
    ("moe_layer", "sm_80", experts("float", "float", "gelu")),
    ("moe_layer", "sm_90a", {}),
    ("moe_layer", "sm_90a", hopper(("bfloat16", "bfloat16"), 1) | {"MK_FLEXIBLE": 1}),
]


def test_compiles_for_several_nodes():
    """What serves the network takes no registers from what multiplies; it lacks some itself."""
    macros = MACROS["double-double"] | {"MK_NODES": 1}
    cubin, log = compile_kernel("allgather_gemm", "sm_90a", macros)
    found = complaint(cubin, log, "allgather_gemm", limit=128)
    assert found is None, found


@pytest.mark.parametrize(("name", "architecture", "macros"), EXPERTS)
def test_operators_on_experts_compile_as_device_code(name, architecture, macros):
    found = complaint(*compile_kernel(name, architecture, macros), name, architecture)
    assert found is None, found


SHARED_BYTES = {"sm_80": 163 << 10, "sm_90a": 227 << 10}
# Architecture, dtype, columns of a head; what has most sums, and what is used most.
ATTENTION = [
    ("sm_80", "float16", 256),
    ("sm_80", "float32", 256),
    ("sm_80", "float64", 128),
    ("sm_90a", "float64", 256),
]


@pytest.mark.parametrize(("architecture", "dtype", "columns"), ATTENTION)
def test_attention_compiles_without_spills(architecture, dtype, columns):
    dtype = np.dtype(dtype)
    tile = portable_attention_tile(columns, dtype, SHARED_BYTES[architecture])
    macros = {"MK_TYPE": tiles.cpp_type(dtype), **tile.defines(dtype)}
    built = compile_kernel("ring_attention", architecture, macros)
    found = complaint(*built, "ring_attention", architecture)
    assert found is None, found


# Bytes that movers lack registers for, which have many loads under way, and with 256 columns the
# warp that loads, which has the registers that consumers leave it.
HOPPER_MAY_SPILL = [
    ("bfloat16", 64, 96),
    ("float16", 96, 96),
    ("bfloat16", 128, 96),
    ("float16", 256, 192),
]


@pytest.mark.parametrize(("dtype", "columns", "limit"), HOPPER_MAY_SPILL)
def test_attention_compiles_with_the_hopper_engine(dtype, columns, limit):
    """Neither serialised multiplies nor a dropped setmaxnreg, with any NVRTC that plans take."""
    dtype = np.dtype(dtype)
    gpu = tiles.Gpu("sm_90a", 132, SHARED_BYTES["sm_90a"], compiler.nvrtc_version())
    tile = hopper_attention_tile(columns, SHARED_BYTES["sm_90a"])
    taken = tile in attention_tiles(dtype, gpu)
    assert taken == (gpu.nvrtc >= (12, 8))
    if not taken:
        return
    macros = {"MK_TYPE": tiles.cpp_type(dtype), **tile.defines(dtype)}
    built = compile_kernel("ring_attention", "sm_90a", macros)
    found = complaint(*built, "ring_attention", limit=limit)
    assert found is None, found


def test_attention_compiles_for_several_nodes():
    """Movers, which ask for what has come over the network, lack registers."""
    dtype = np.dtype("bfloat16")
    tile = hopper_attention_tile(128, SHARED_BYTES["sm_90a"])
    macros = {"MK_TYPE": tiles.cpp_type(dtype), "MK_NODES": 1, **tile.defines(dtype)}
    built = compile_kernel("ring_attention", "sm_90a", macros)
    found = complaint(*built, "ring_attention", limit=576)
    assert found is None, found


@pytest.mark.parametrize("macros", [{}, {"MK_TRACE": 1}], ids=["plain", "traced"])
def test_attention_compiles_without_a_plan(macros):
    built = compile_kernel("ring_attention", "sm_80", macros)
    found = complaint(*built, "ring_attention", "sm_80", traced=bool(macros))
    assert found is None, found


# Architecture, macros.
TRACED = {
    "portable": ("sm_80", MACROS["bfloat16-bfloat16"]),
    "portable, double": ("sm_90a", MACROS["double-double"]),
    "hopper": ("sm_90a", hopper(("bfloat16", "float"), 1)),
    "hopper, cluster": ("sm_90a", hopper(("float16", "float16"), 2)),
}


@pytest.mark.parametrize("variant", TRACED)
@pytest.mark.parametrize("name", KERNELS[:1])
def test_compiles_for_a_trace(name, variant):
    architecture, macros = TRACED[variant]
    cubin, log = compile_kernel(name, architecture, {**macros, "MK_TRACE": 1})
    found = complaint(cubin, log, name, architecture, traced=True)
    assert found is None, found


@pytest.mark.parametrize("variant", ["portable", "hopper"])
@pytest.mark.parametrize("name", KERNELS[:1])
def test_without_a_trace_the_machine_code_is_that_of_sources_without_spans(name, variant, tmp_path):
    shutil.copytree(compiler.kernels_dir(), tmp_path / "kernels")
    line = re.compile(r".*(\bSpan \w+\(|\b(computed|stored|span)\.\w+\().*\n")
    removed = 0
    for header in (tmp_path / "kernels" / "include").rglob("*.cuh"):
        if header.name != "trace.cuh":
            text, count = line.subn("\n", header.read_text())
            header.write_text(text)
            removed += count
    assert removed > 10
    whole = compile_kernel(name, *TRACED[variant])[0]
    with compiler.using_kernels(tmp_path / "kernels"):
        without = compile_kernel(name, *TRACED[variant])[0]
    assert machine_code(whole, name) == machine_code(without, name)


def machine_code(cubin, entry):
    """The instructions of a kernel: its section of an ELF file of 64 bits."""
    (table,), (count, names) = (
        struct.unpack_from("<Q", cubin, 40),
        struct.unpack_from("<HH", cubin, 60),
    )
    headers = [struct.unpack_from("<IIQQQQ", cubin, table + 64 * i) for i in range(count)]
    for name, _, _, _, start, size in headers:
        if cubin[headers[names][4] + name :].startswith(b".text." + entry.encode() + b"\0"):
            return cubin[start : start + size]
    raise AssertionError(f"no code of {entry}")


def test_the_clocks_kernel_compiles():
    found = complaint(*compile_kernel("read_clock", "sm_80", {}), "read_clock")
    assert found is None, found


def test_a_faulty_kernel_is_noticed(tmp_path):
    """The checks themselves: an error, a spill and a missing entry point are seen."""
    (tmp_path / "include" / "mkernel").mkdir(parents=True)
    spill = (
        'extern "C" __global__ void __launch_bounds__(1024, 2) fault(float* p) {\n'
        "    float x[64];\n"
        "#pragma unroll\n"
        "    for (int i = 0; i < 64; ++i) x[i] = p[i * 1024 + threadIdx.x];\n"
        "    __syncthreads();\n"
        "#pragma unroll\n"
        "    for (int i = 0; i < 64; ++i) p[i * 1024 + threadIdx.x] = x[63 - i] * x[i];\n"
        "}\n"
    )
    texts = {
        "does not compile": 'extern "C" __global__ void fault() { nothing(); }\n',
        "has no entry point": "__global__ void fault() {}\n",
        "spills registers": spill,
    }
    with compiler.using_kernels(tmp_path):
        for number, (text, body) in enumerate(texts.items()):
            (tmp_path / f"fault{number}.cu").write_text(body)
            found = complaint(*compile_kernel(f"fault{number}", "sm_80", {}), "fault")
            assert found is not None, text
            assert text in found


def test_cubins_are_cached_by_content(tmp_path, monkeypatch):
    monkeypatch.setenv("MKERNEL_CACHE_DIR", str(tmp_path))
    source = tmp_path / "twice.cu"
    source.write_text('extern "C" __global__ void twice(float* x) { *x *= FACTOR; }\n')
    before = compiler.compile_count()
    paths = [
        compiler.cubin(source, arch, defines={"FACTOR": factor})
        for arch, factor in (("sm_80", 2), ("sm_80", 2), ("sm_80", 3), ("sm_90a", 2))
    ]
    assert paths[0] == paths[1]
    assert len(set(paths)) == 3
    assert compiler.compile_count() - before == 3
    assert paths[0].read_bytes().startswith(b"\x7fELF")
    with pytest.raises(mk.CompileError, match='identifier "FACTOR" is undefined'):
        compiler.cubin(source, "sm_80")
    with pytest.raises(ValueError, match="sm_80 or sm_90a"):
        compiler.cubin(source, "compute_80")
