"""The engine of `ring_attention` for GPUs, and the operator on it, where there is no GPU."""

import contextlib
import time

import emulated
import numpy as np
import pytest
import test_ring_attention as shared
import worlds
from test_ring_attention import AttentionCase, counts_in

import mkernel_cp as mk

GPU = emulated.GPUS["sm_80"]
SPLIT = mk.Options((1, 2))


@pytest.fixture(scope="module", autouse=True)
def compiled(kernels, tmp_path_factory):
    with emulated.kernels(tmp_path_factory.mktemp("emulated") / "kernels"):
        yield


@pytest.fixture(autouse=True)
def on_gpus(monkeypatch):
    run = worlds.run
    monkeypatch.setattr(
        worlds,
        "run",
        lambda size, program, **options: run(size, emulated.on_gpu, GPU, 1, program, **options),
    )


CASES = [
    AttentionCase("causal", (70, 61), (2, 1), 64, "bfloat16", True),
    AttentionCase("two tiles", (300,), (2, 1), 32, "bfloat16", True),
    AttentionCase("zigzag", counts_in("zigzag", 150, 2), (2, 1), 24, "float16", True, "zigzag", 2),
    AttentionCase("full", (7, 5, 9), (2, 2), 5, "float16", scale=-0.7),
    AttentionCase("causal", (70, 31), (2, 1), 40, "float32", True),
    AttentionCase("full", (30, 35), (2, 2), 64, "float32"),
    AttentionCase("causal", (70, 31), (2, 1), 64, "float64", True),
    AttentionCase("full", (30, 35), (2, 2), 21, "float64"),
    AttentionCase("nothing", (0, 3), (2, 2), 8, "float16", True),
    AttentionCase("no batch", (4, 3), (2, 2), 8, "float16", True, batch=0),
    AttentionCase("wide", (70, 61), (2, 1), 128, "bfloat16", True),
    AttentionCase("wide", (70, 11), (1, 1), 200, "float64", True),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_reference(case):
    def program(comm):
        shared.assert_right(comm, case, 1, shared.call(comm, case, 1, options=SPLIT))

    worlds.run(case.world, program)


@pytest.mark.parametrize("dtype", shared.DTYPES)
def test_masked_nan_does_not_leak_and_what_is_seen_acts_as_in_numpy(dtype):
    shared.test_masked_nan_does_not_leak_and_what_is_seen_acts_as_in_numpy("zigzag", dtype)


def test_operands_may_have_any_strides():
    shared.test_keys_and_values_in_a_segment_are_read_in_place_and_others_copied()


def test_output_may_have_any_strides():
    shared.test_output_may_have_any_strides()


def test_many_units_pass_through_a_small_window():
    shared.test_many_units_pass_through_a_small_window(2, 1)


def test_what_does_not_arrive_leaves_nan():
    """A rank is awaited in vain; the others' tiles that need none of its keys are right."""
    counts = (40, 40, 40)

    def main(mpi):
        comm = mk.Communicator(mpi, entry_timeout=0.3)
        comm.machine.gpu = GPU
        x = np.ones((1, counts[comm.rank], 1, 8), np.float16)
        out, lse = np.zeros_like(x), np.zeros((1, 1, 40), np.float32)
        try:
            mk.ring_attention(x, x, x, comm=comm, causal=True)
            if comm.rank == 1:
                time.sleep(1)
            else:
                arguments = {"causal": True, "return_lse": True, "out": (out, lse)}
                mk.ring_attention(x, x, x, comm=comm, options=SPLIT, **arguments)
            comm.synchronize()
        except mk.TimeoutError:
            return comm.rank, out, lse
        finally:
            with contextlib.suppress(mk.Error):
                comm.close()
        raise AssertionError("no rank ends well")

    for rank, out, lse in mk.LocalWorld(3).run(main):
        if rank == 2:
            assert np.isnan(out).all()
            assert np.isnan(lse).all()
        elif rank == 0:
            assert (np.isnan(out) | (out == 1)).all()
