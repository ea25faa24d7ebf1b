"""The cuda target as far as it can be tested without a GPU."""

import dataclasses
import itertools

import numpy as np
import pytest
from launcher import ROOT, mpirun

import mkernel_cp as mk
from mkernel_cp import arguments, compiler, plan, tiles
from mkernel_cp.targets import cuda, host
from mkernel_cp.topology import Topology

H100 = tiles.Gpu("sm_90a", 132, 232448)
PORTABLE = tiles.Gpu("sm_90", 132, 232448)
A100 = tiles.Gpu("sm_80", 108, 166912)
SMALL = tiles.Gpu("sm_86", 84, 101376)


def survey(uuid, **reaches):
    return cuda._Survey(0, uuid, "a GPU", H100, reaches)


@pytest.mark.mpi
@pytest.mark.parametrize("ranks", [1, 3])
def test_every_test_for_gpus_has_a_world(ranks):
    options = ("-q", "-p", "no:cacheprovider", "--gpu", "--collect-only", "--disable-warnings")
    done = mpirun(ranks, "-m", "pytest", *options, ROOT / "tests")
    assert done.returncode == 0, done.stdout
    assert "test_gpu.py" in done.stdout


def test_targets_have_the_same_members():
    def members(kind):
        return {name for name in vars(kind) if not name.startswith("_")}

    made = {"device", "gpu", "shared", "capturing", "captured"}  # of an instance
    assert members(host.HostTarget) - made <= members(cuda.CudaTarget)


def test_ranks_with_one_gpu_are_refused_by_name():
    surveys = [survey("a"), survey("b"), survey("a")]
    with pytest.raises(mk.ConfigurationError, match=r"\[0, 2\].*oversubscribe=True"):
        cuda._refuse_shared_gpus(surveys, False)
    cuda._refuse_shared_gpus(surveys, True)
    cuda._refuse_shared_gpus(surveys[:2], False)


def test_gpus_that_do_not_reach_each_other_are_refused_by_pair():
    surveys = [survey("a", b=True, c=False), survey("b", a=True, c=True), survey("c", a=False)]
    with pytest.raises(mk.ConfigurationError, match=r"\[\(0, 2\), \(2, 0\)\]"):
        cuda._refuse_missing_links(surveys, Topology(0, (3,)))
    cuda._refuse_missing_links(surveys, Topology(0, (2, 1)))


@pytest.mark.mpi
def test_without_cupy_or_gpu_the_error_says_what_to_install():
    program = "import mkernel_cp as mk; mk.Communicator(target='cuda')"
    done = mpirun(2, "-c", program, env={"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode != 0
    assert "ConfigurationError: rank 0: " in done.stderr
    assert "install mkernel_cp with its extra cu1" in done.stderr or "no GPU" in done.stderr


@pytest.mark.parametrize("gpu", [H100, A100, SMALL], ids=lambda gpu: gpu.arch)
@pytest.mark.parametrize("dtype", arguments.DTYPES, ids=str)
def test_default_tiles_fit_the_gpu(dtype, gpu):
    tile = tiles.portable_tile(dtype, mk.Options(), gpu.shared_bytes)
    assert tile.shared_bytes(dtype, dtype) <= gpu.shared_bytes
    assert tile.stages >= 2
    assert bool(tile.defines(dtype)) == (tile != tiles.default_tile(dtype))
    if gpu is H100:
        assert not tile.defines(dtype)
    if gpu is not SMALL:
        assert tile.tile[:2] == tiles.default_tile(dtype).tile[:2]


def test_a_tile_that_is_asked_for_gets_the_stages_that_fit():
    half = arguments.DTYPES[0]

    def chosen(*tile, gpu=H100):
        return tiles.portable_tile(half, mk.Options(tile=tile), gpu.shared_bytes)

    assert chosen(128, 256, 128) == tiles.default_tile(half)
    assert chosen(128, 256, 64) == tiles.PortableTile((128, 256, 64), 4)
    assert chosen(128, 256, 64, gpu=A100).stages == 3
    assert chosen(128, 128, 64, gpu=SMALL).stages == 2


@pytest.mark.nvrtc
@pytest.mark.parametrize("gpu", [H100, A100, SMALL], ids=lambda gpu: gpu.arch)
def test_tiles_are_those_of_the_header(tmp_path, gpu):
    """Python and the header compute the same shared memory, with and without macros."""
    for number, dtype in enumerate(arguments.DTYPES):
        tile = tiles.portable_tile(dtype, mk.Options(), gpu.shared_bytes)
        tiling = f"mk::engine::Tiling<mk::{tiles.cpp_type(dtype)}>"
        tiling = tiling.replace("mk::float>", "float>").replace("mk::double>", "double>")
        source = tmp_path / f"tile_{number}.cu"
        source.write_text(
            f'#include "mkernel/engine/portable.cuh"\n'
            f"using Tiling = {tiling};\n"
            f'static_assert(Tiling::rows == {tile.tile[0]}, "");\n'
            f'static_assert(Tiling::columns == {tile.tile[1]}, "");\n'
            f'static_assert(Tiling::k == {tile.tile[2]} && Tiling::stages == {tile.stages}, "");\n'
            f'static_assert(Tiling::shared_bytes == {tile.shared_bytes(dtype, dtype)}, "");\n'
        )
        defines = [f"-D{name}={value}" for name, value in tile.defines(dtype).items()]
        options = ["-std=c++17", f"-I{compiler.include_dir()}", f"--gpu-architecture={gpu.arch}"]
        code, log = compiler.nvrtc_compile(source, [*options, *defines])
        assert code is not None, log


def make(options=None, *, ranks=4, rows=4096, n=1024, capacity=132, gpu=PORTABLE):
    dtype = arguments.DTYPES[0]
    return plan.plan_allgather_gemm(
        0, (rows,) * ranks, n, 4096, dtype, dtype, False, options or mk.Options(), gpu, capacity
    )


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("tile", [tile[:2] for tile in tiles._HOPPER_TILES], ids=str)
def test_tiles_of_the_hopper_engine_fit(tile, ranks):
    made = make(mk.Options(tile=(*tile, 128)), gpu=H100, ranks=ranks, rows=1 << 14)
    assert made.engine == "hopper"
    assert made.tile == (*tile, 128)
    assert sum(made.split) == 132
    assert made.split[0] == 0
    assert made.shared_bytes <= H100.shared_bytes
    for movers, gathers in itertools.product((0, 8), (False, True)):
        options = mk.Options(tile=(*tile, 128), split=(movers, None))
        chosen = tiles.hopper_tile((4096,) * ranks, 1024, options, H100, 4096, gathers=gathers)
        assert chosen.stages >= 3
        assert (chosen.courier_bytes > 0) == (ranks > 1 and gathers and not movers)
        assert chosen.strips * 8192 >= chosen.part[0] * chosen.part[1] * 2  # a whole part


def test_the_hopper_engine_is_for_16_bits_and_its_own_tiles():
    assert make(gpu=H100).engine == "hopper"
    assert make(mk.Options(tile=(64, 128, 64)), gpu=H100).engine == "portable"
    assert make(rows=0, gpu=H100).split == (1, 1)
    float32 = np.dtype(np.float32)
    tile = tiles.choose_tile((64,), 64, 64, float32, mk.Options(), H100)
    assert tile.engine == "portable"
    with pytest.raises(ValueError, match="clusters of 2"):
        make(mk.Options(tile=(256, 256, 64), split=(0, 5)), gpu=H100)


def test_plans_of_a_gpu_use_it_and_no_more():
    assert sum(make().split) == 132
    assert make(ranks=1, rows=1 << 14).split == (0, 132)
    assert make(ranks=1, rows=128, n=256).split == (0, 1)
    for ranks, rows, n, capacity in itertools.product((1, 2), (0, 1, 5000), (0, 7, 900), (2, 9)):
        split = make(ranks=ranks, rows=rows, n=n, capacity=capacity).split
        assert sum(split) <= capacity
        assert split[1] >= 1
        assert (split[0] >= 1) == (ranks > 1)
    assert "target cuda, engine portable" in make().explain()
    assert dataclasses.replace(make(), n=0).bytes_from_peers == 0


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (mk.Options(split=(100, 100)), "132 agents run"),
        (mk.Options(tile=(100, 128, 64)), "powers of two"),
        (mk.Options(tile=(128, 16, 64)), "at least"),
        (mk.Options(tile=(1024, 256, 64)), "at most 512"),
        (mk.Options(tile=(512, 512, 64)), "232448"),
    ],
    ids=str,
)
def test_options_that_a_gpu_cannot_take_are_refused(options, text):
    with pytest.raises(ValueError, match=text):
        make(options)
