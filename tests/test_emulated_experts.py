"""The operators on experts for GPUs, where there is no GPU."""

import contextlib
import ctypes
import threading

import emulated
import numpy as np
import pytest
import test_moe_combine as combine
import test_moe_dispatch_gemm as dispatch
import test_moe_layer as layer
import test_staging
import worlds
from routing import ExpertCase, ids_of, tokens_of, weights_of

import mkernel_cp as mk
from mkernel_cp import tiles
from mkernel_cp.host_kernel import HostKernel

on = emulated.on


@pytest.fixture(scope="module", autouse=True)
def compiled(kernels, tmp_path_factory):
    with (
        emulated.kernels(tmp_path_factory.mktemp("emulated") / "kernels"),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(tiles, "_GROUP_TILES", (tiles._GROUP_TILES[0], (128, 128, 2.0)))
        yield


@pytest.fixture(autouse=True)
def gpus(on):
    """They are slow, and no deadline is to end what they do."""
    on("portable", progress_timeout=0)


def case(name, tokens, h, n, experts, slots, routing, activation=None, columns=0, out_dtype=None):
    """Of one type: kernels take long to compile."""
    more = routing, out_dtype, activation, columns
    return ExpertCase(name, tokens, h, n, experts, slots, "float16", *more)


@pytest.mark.parametrize(
    "case",
    [
        case("tiles", (140, 30), 70, 270, 3, 2, "zipf"),
        case("alone", (50,), 16, 9, 3, 2, "repeats"),
        case("no experts", (5, 6), 8, 4, 0, 2, "uniform"),
    ],
    ids=str,
)
def test_dispatch_equals_reference(case):
    dispatch.test_equals_reference(case)


@pytest.mark.parametrize(
    "case",
    [
        case("aligned", (23, 0, 9), 1, 40, 6, 4, "uniform"),
        case("odd", (9, 17), 1, 19, 5, 3, "zipf"),
    ],
    ids=str,
)
def test_combine_equals_reference(case):
    combine.test_equals_reference(case)


def steps_in_turn(comm):
    """How often agents have told each other that they have nearly loaded a tile, in the last call.

    The counters of the next one are clear.
    """
    address, generation = comm._runtime.world.struct.counters, comm._runtime.calls.generation
    counters = np.ctypeslib.as_array(
        (ctypes.c_uint64 * (2 * (2 + comm.size))).from_address(address)
    )
    banks = counters.reshape(2, 2 + comm.size)
    assert not banks[(generation + 1) % 2].any()
    return banks[generation % 2, -1]


def tiles_of(layout, columns, tile):
    rows = np.diff(layout.expert_offsets)
    return (-(-rows // tile[0])).sum() * -(-columns // tile[1])


@pytest.mark.parametrize(
    ("case", "order"),
    [
        (case("tiles", (70, 30), 136, 136, 3, 2, "zipf"), "C"),
        (case("one expert", (1, 130, 0), 456, 8, 4, 1, "one expert"), "C"),
        (case("transposed", (50, 25), 72, 136, 2, 2, "uniform"), "F"),
        (case("heights", (190, 120), 16, 72, 3, 1, "zipf", out_dtype="float32"), "C"),
    ],
    ids=str,
)
def test_rows_are_gathered(on, case, order):
    """Tokens come through the copy engine; rows of a tile that are no expert's are left alone."""

    def program(comm):
        rank, w = comm.rank, weights_of(case, comm.rank)
        if order == "F":
            w = w.swapaxes(1, 2).copy().swapaxes(1, 2)
        with mk.MoeDispatchGemm(
            *(tokens_of(case, 1)[rank], ids_of(case, 1)[rank], w),
            comm=comm,
            num_experts=case.experts,
            max_tokens=max(case.tokens),
            dtype=case.out_dtype,
        ) as step:
            assert step.plan.engine == "hopper"
            assert step.plan.row_step > 0
            for seed in (1, 2):
                x = np.full((case.tokens[rank], case.h + 1), np.nan, case.dtype)[:, 1:]
                x[...] = tokens_of(case, seed)[rank]
                out = np.full((step.plan.capacity, case.n), 7, case.out_dtype or case.dtype)
                worlds.poison(comm)
                rows, layout = step(x, ids_of(case, seed)[rank], w, out=(out, None))
                steps = steps_in_turn(comm)
                if case.h:
                    assert steps == tiles_of(layout, case.n, step.plan.tile)
                dispatch.assert_right(comm, case, seed, rows, layout)
                assert (rows[int(layout.count) :] == 7).all()

    on("hopper", progress_timeout=0)
    worlds.run(case.world, program)


@pytest.mark.parametrize("engine", emulated.ENGINES)
def test_layer_equals_reference(on, engine):
    on(engine, progress_timeout=0)
    layer.test_equals_reference(case("tails", (50, 33), 104, 72, 5, 3, "zipf", "swiglu", 80))


def test_between_nodes_through_host_memory(on, monkeypatch):
    """As on GPUs that network cards do not reach."""
    monkeypatch.setattr(HostKernel, "capacity", lambda self, shared_bytes, processors=None: 8)
    worlds.stage(monkeypatch, 4096)
    on("hopper", progress_timeout=0)
    test_staging.test_layers_of_experts_on_other_nodes(2, (1, 1), "verbs")


def test_few_tokens_are_sorted_at_a_time(monkeypatch):
    monkeypatch.setattr(dispatch.moe_plan, "_SORT_WORDS", (1, 1))
    dispatch.test_equals_reference(case("tails", (30, 0, 43), 21, 45, 5, 3, "one rank"))


def test_what_does_not_arrive_leaves_nan():
    """A rank is awaited in vain, by movers and by those who compute."""
    ids = np.arange(20).reshape(10, 2) % 3
    tokens, factors = np.ones((10, 8), np.float16), np.ones((1, 8, 16), np.float16)
    weights = np.ones((10, 2), np.float32)

    def main(mpi, name):
        comm = mk.Communicator(mpi, progress_timeout=0)
        comm._runtime.machine.gpu = emulated.ENGINES["hopper"]
        rows, layout = mk.moe_dispatch_gemm(tokens, ids, factors, comm=comm)
        out = np.zeros_like(rows if name == "dispatch" else rows[:10])
        calls = {
            "dispatch": lambda: mk.moe_dispatch_gemm(
                *(tokens, ids, factors), comm=comm, out=(out, layout)
            ),
            "combine": lambda: mk.moe_combine(rows, weights, layout, comm=comm, out=out),
            "layer": lambda: mk.moe_layer(
                *(tokens, ids, weights, factors, np.ones((1, 8, 16), np.float16)),
                comm=comm,
                out=out,
            ),
        }
        calls[name]()
        out[...] = 0
        comm._runtime.world.struct.entry_timeout_ns = 1_000_000_000
        comm._runtime.world.update()
        try:
            if comm.rank == 1:
                ended.wait(60)
                comm.synchronize()
            else:
                begun.wait(60)  # neither is to time out before the other has called
                calls[name]()
        except mk.TimeoutError:
            if comm.rank != 1:
                ended.wait(60)
            return comm.rank, out, int(layout.count)
        finally:
            with contextlib.suppress(mk.Error):
                comm.close()
        raise AssertionError("no rank ends well")

    for name in ("dispatch", "combine", "layer"):
        begun, ended = threading.Barrier(2), threading.Barrier(3)
        for rank, out, count in mk.LocalWorld(3).run(main, name):
            if rank == 1:
                assert (out == 0).all()
            else:
                assert np.isnan(out).all(), name
                assert count == 0 or name != "dispatch"
