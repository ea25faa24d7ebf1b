"""Pretended GPUs: what is compiled for GPUs runs on threads of the CPU.

The headers in `emulation` take the place of the two that only a GPU runs. All else is as it is: the
plan for a GPU, kernels and engines, the protocol between ranks.
"""

import contextlib
import re
import shutil
from pathlib import Path

import pytest
import worlds

from mkernel_cp import compiler
from mkernel_cp.host_kernel import HostKernel
from mkernel_cp.targets.host import HostTarget
from mkernel_cp.tiles import Gpu

_HEADERS = Path(__file__).parent / "emulation"

AGENTS = 4
"""How many the pretended GPU runs at a time."""

ENGINES = {
    engine: Gpu(arch, AGENTS, size << 10)
    for engine, arch, size in (("portable", "sm_80", 163), ("hopper", "sm_90a", 227))
}
"""A GPU for each."""


@contextlib.contextmanager
def kernels(folder: Path):
    """Have kernels compiled as for GPUs, with those headers; copies of all go to a folder."""
    shutil.copytree(compiler.kernels_dir(), folder)
    headers = folder / "include" / "mkernel"
    for header in _HEADERS.glob("*.cuh"):
        shutil.copy(header, headers)
    target = headers / "target.cuh"
    text, count = re.subn(r"#if defined\(__CUDACC__\).*", "#if 1", target.read_text())
    assert count == 1
    target.write_text(text)
    with pytest.MonkeyPatch.context() as patch, compiler.using_kernels(folder):
        # With that macro, of some systems, a jump to another stack counts as a fault.
        options = (*compiler._HOST_OPTIONS, "-Wno-unknown-pragmas", "-U_FORTIFY_SOURCE")
        patch.setattr(compiler, "_HOST_OPTIONS", options)
        patch.setattr(HostKernel, "capacity", lambda self, shared_bytes, processors=None: AGENTS)
        patch.setattr(HostTarget, "tensor_map", _tensor_map, raising=False)
        patch.setattr(HostTarget, "kernel", _kernel)
        yield


def _kernel(machine, source):
    """Compile what a GPU has instructions for."""
    defines = {"MK_BULK_COPIES": int(machine.gpu.arch == "sm_90a"), **dict(source.defines)}
    return HostKernel(source.source, source.name, defines, source.options)


def _tensor_map(machine, address, dtype, extents, pitches, box, tf32=False):
    """Say in 16 words what the driver's encoding of a map says, of four dimensions."""
    assert address % 16 == 0
    assert all(pitch > 0 and pitch % 16 == 0 for pitch in pitches)
    more = 4 - len(extents)
    words = address, dtype.itemsize, *extents, *[1] * more, *pitches, *[0] * more, *box, *[1] * more
    return (*words, tf32, *[0] * (15 - len(words)))


@pytest.fixture
def on(monkeypatch):
    """Ranks of `worlds.run` get GPUs for an engine.

    Threads of a block take turns, and copies end early, in an order from the seed.
    """
    run = worlds.run

    def use(engine, seed=1, **more):
        def on_gpu(comm, program):
            comm._runtime.machine.gpu = ENGINES[engine]
            worlds.chaos(comm, seed=seed)
            return program(comm)

        def run_on_gpus(size, program, **options):
            return run(size, on_gpu, program, **more, **options)

        monkeypatch.setattr(worlds, "run", run_on_gpus)

    return use
