"""The engine of `ring_attention` for GPUs, and the operator on it, where there is no GPU."""

import contextlib
import threading

import emulated
import numpy as np
import pytest
import test_ring_attention as shared
import test_staging
import worlds
from emulated import ENGINES
from test_ring_attention import AttentionCase, counts_in

import mkernel_cp as mk
from mkernel_cp.host_kernel import HostKernel

on = emulated.on
SPLIT = mk.Options((1, 2))


@pytest.fixture(scope="module", autouse=True)
def compiled(kernels, tmp_path_factory):
    with emulated.kernels(tmp_path_factory.mktemp("emulated") / "kernels"):
        yield


CASES = {
    "portable": [
        AttentionCase("causal", (70, 61), (2, 1), 64, "bfloat16", True),
        AttentionCase("two tiles", (300,), (2, 1), 32, "bfloat16", True),
        AttentionCase(
            "zigzag", counts_in("zigzag", 150, 2), (2, 1), 24, "float16", True, "zigzag", 2
        ),
        AttentionCase("full", (7, 5, 9), (2, 2), 5, "float16", scale=-0.7),
        AttentionCase("causal", (70, 31), (2, 1), 40, "float32", True),
        AttentionCase("full", (30, 35), (2, 2), 64, "float32"),
        AttentionCase("causal", (70, 31), (2, 1), 64, "float64", True),
        AttentionCase("full", (30, 35), (2, 2), 21, "float64"),
        AttentionCase("nothing", (0, 3), (2, 2), 8, "float16", True),
        AttentionCase("no batch", (4, 3), (2, 2), 8, "float16", True, batch=0),
        AttentionCase("wide", (70, 11), (1, 1), 200, "float64", True),
    ],
    "hopper": [
        AttentionCase("tails", (150, 7, 131), (2, 1), 128, "bfloat16"),
        AttentionCase("causal", (70, 200), (2, 1), 64, "bfloat16", True),
        AttentionCase("scale", (70, 31), (2, 2), 40, "bfloat16", scale=-0.7),
        AttentionCase("zigzag", counts_in("zigzag", 300, 2), (1, 1), 96, "float16", True, "zigzag"),
        AttentionCase("wide", (90, 140), (2, 1), 256, "float16", True),
        AttentionCase("nothing", (0, 3), (2, 2), 8, "bfloat16", True),
        AttentionCase("no batch", (4, 3), (2, 2), 8, "bfloat16", True, batch=0),
    ],
}


@pytest.mark.parametrize(
    ("engine", "case"), [(name, case) for name in CASES for case in CASES[name]], ids=str
)
def test_equals_reference(on, engine, case):
    def program(comm):
        shared.assert_right(comm, case, 1, shared.call(comm, case, 1, options=SPLIT))

    on(engine)
    worlds.run(case.world, program)


@pytest.mark.parametrize("seed", range(2))
def test_any_order_of_threads_and_copies(on, seed):
    """Many panels and tiles pass through few slots."""
    case = AttentionCase("long", (300, 140), (1, 1), 128, "bfloat16", batch=2)

    def program(comm):
        shared.assert_right(comm, case, seed, shared.call(comm, case, seed, options=SPLIT))

    on("hopper", seed=1 + seed)
    worlds.run(2, program)


@pytest.mark.parametrize(
    ("engine", "dtype"),
    [*(("portable", dtype) for dtype in shared.DTYPES), ("hopper", "bfloat16")],
)
def test_masked_nan_does_not_leak_and_what_is_seen_acts_as_in_numpy(on, engine, dtype):
    on(engine)
    shared.test_masked_nan_does_not_leak_and_what_is_seen_acts_as_in_numpy("zigzag", dtype)


def test_operands_may_have_any_strides(on):
    on("portable")
    shared.test_keys_and_values_in_a_segment_are_read_in_place_and_others_copied()


def test_tensor_copies_take_what_lies_in_lines_of_16_bytes(on):
    """In a segment, and with heads before positions; other operands are copied."""
    case = AttentionCase("strides", (40, 30), (2, 2), 8, "bfloat16", True)

    def program(comm):
        given = [blocks[comm.rank] for blocks in shared.blocks_of(case, 1)]
        spread = np.zeros((*given[0].shape, 2), given[0].dtype)
        spread[..., 0] = given[0]
        k = comm.empty(np.array(given[1].shape)[[0, 2, 1, 3]], given[1].dtype).swapaxes(1, 2)
        k[...] = given[1]
        v = np.zeros((1, given[2].shape[1], 2, 9), given[2].dtype)[..., 1:]
        v[...] = given[2]
        asked = {"comm": comm, "seq_counts": case.seq_counts, "causal": True, "return_lse": True}
        results = mk.ring_attention(spread[..., 0], k, v, options=SPLIT, **asked)
        shared.assert_right(comm, case, 1, results)

    on("hopper")
    worlds.run(2, program)


def test_output_may_have_any_strides(on):
    on("portable")
    shared.test_output_may_have_any_strides()


def test_many_units_pass_through_a_small_window(on):
    on("portable")
    shared.test_many_units_pass_through_a_small_window(2, 1)


@pytest.mark.parametrize("seed", range(3))
def test_units_are_left_when_they_have_been_read(on, seed):
    """There is room for one at a time: what is loaded late is another one's."""
    case = AttentionCase("window", (40, 50), (4, 4), 8, "bfloat16", batch=4)
    room = 50 * 2 * 8 * 2

    def program(comm):
        asked = {"max_workspace": room, "options": SPLIT}
        shared.assert_right(comm, case, seed, shared.call(comm, case, seed, **asked))

    on("hopper", seed=1 + seed)
    worlds.run(2, program)


def test_what_lies_behind_the_keys_has_no_influence(on):
    """Not on the last bits either: neither keys of the next run nor NaN where they are not yet.

    Values cancel, so that the order shows in which they are added.
    """
    random = np.random.default_rng(1)
    v = random.standard_normal((4, 55, 1, 64)) * 2.0 ** random.integers(0, 30, (4, 55, 1, 64))
    v = np.concatenate((v, -v), axis=1).astype("bfloat16")
    q = np.zeros_like(v)

    def program(comm):
        options = mk.Options((1, 1), chunk_bytes=500)
        step = mk.RingAttention(q, q, v, comm=comm, options=options)
        worlds.poison(comm, worlds.NUMBER)
        right = step(q, q, v).astype(np.float32)
        assert np.isfinite(right).all()
        for _ in range(4):
            worlds.poison(comm)
            np.testing.assert_array_equal(step(q, q, v).astype(np.float32), right)

    on("hopper")
    worlds.run(3, program)


def test_between_nodes_through_host_memory(on, monkeypatch):
    """As on GPUs that network cards do not reach."""
    monkeypatch.setattr(HostKernel, "capacity", lambda self, shared_bytes, processors=None: 8)
    worlds.stage(monkeypatch, 4096)
    on("hopper", progress_timeout=0)
    test_staging.test_attention_over_keys_of_other_nodes(2, (1, 1), "verbs")


@pytest.mark.parametrize("engine", ENGINES)
def test_what_does_not_arrive_leaves_nan(engine):
    """Two ranks are awaited in vain."""

    def main(mpi):
        comm = mk.Communicator(mpi, entry_timeout=1)
        comm._runtime.machine.gpu = ENGINES[engine]
        x = np.ones((1, 40, 1, 8), "bfloat16")
        out, lse = np.zeros_like(x), np.zeros((1, 1, 40), np.float32)
        asked = {"causal": True, "return_lse": True, "options": SPLIT}
        step = mk.RingAttention(x, x, x, comm=comm, **asked)
        try:
            if comm.rank == 2:
                step(x, x, x, out=(out, lse))
            else:
                ended.wait(60)
            comm.synchronize()
        except mk.TimeoutError:
            if comm.rank == 2:
                ended.wait(60)
            return out, lse
        finally:
            with contextlib.suppress(mk.Error):
                comm.close()
        raise AssertionError("no rank ends well")

    ended = threading.Barrier(3)
    for result in mk.LocalWorld(3).run(main)[2]:
        assert np.isnan(result).all()
