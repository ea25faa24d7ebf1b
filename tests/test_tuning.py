"""Measured choices: the table, who gets them, and how they are measured."""

import json
import types
from dataclasses import replace

import numpy as np
import pytest
import worlds
from launcher import mpirun

import mkernel_cp as mk
from mkernel_cp import tuning
from mkernel_cp.bench import tuner
from mkernel_cp.commands.bench import BENCHES
from mkernel_cp.moe_plan import Dispatch
from mkernel_cp.operators.moe_dispatch_gemm import measured
from mkernel_cp.tiles import Gpu

ENTRY = tuning.Entry(
    *("allgather_gemm", "cpu", "float32", 2, (64, 48, 32)),
    tile=(16, 8, 24),
    movers=2,
    chunk_bytes=512,
    ms=1.0,
    model_ms=2.0,
)
SUMS = "gemm_reduce_scatter", "gemm_allreduce"
CHOSEN = mk.Options((2, None), (16, 8, 24), 512)
A, B = np.ones((32, 48), np.float32), np.ones((48, 32), np.float32)


def fill(options=None, m=64, k=48, n=32, dtype="float32", entry=ENTRY):
    table = tuning.Table([entry])
    return table.fill(options or mk.Options(), entry.operator, dtype, (m, k, n))


def test_shapes_of_about_the_same_extents_get_the_same_choices():
    assert fill() == fill(m=70, k=45, n=33) == CHOSEN
    assert fill(dtype="float64") == mk.Options()
    assert fill(m=128) == fill(k=96) == mk.Options()
    assert fill(m=0, k=0, n=0) == mk.Options()


def test_what_ranks_agree_on_does_not_depend_on_what_one_of_them_has():
    assert fill(n=1000) == mk.Options(chunk_bytes=512)
    sums = replace(ENTRY, operator="gemm_allreduce")
    assert fill(k=1000, entry=sums) == CHOSEN
    assert fill(n=1000, entry=sums) == mk.Options()


@pytest.mark.parametrize(
    "options",
    [mk.Options(split=(1, 1)), mk.Options(tile=(8, 8, 8)), mk.Options(sm_budget=4)],
    ids=str,
)
def test_a_callers_choices_stand_alone(options):
    assert fill(options) == options


def test_a_callers_chunks_go_with_measured_tiles():
    assert fill(mk.Options(chunk_bytes=99)) == replace(CHOSEN, chunk_bytes=99)


def test_a_table_is_kept_and_read_again(tmp_path):
    path = tmp_path / "new" / "table.json"
    assert tuning.read(path) == []
    other = replace(ENTRY, shape=(65, 48, 32), tile=None, movers=None, chunk_bytes=None)
    tuning.keep(path, [ENTRY, other])
    tuning.keep(path, [replace(ENTRY, ms=0.5)])
    assert tuning.read(path) == [replace(ENTRY, ms=0.5), other]
    assert other.options == mk.Options()
    assert [file.name for file in path.parent.iterdir()] == ["table.json"]


@pytest.mark.parametrize("text", ["", "{", "5", "[5]", '[{"tile": null}]'])
def test_what_is_no_table_is_named(tmp_path, text):
    path = tmp_path / "table.json"
    path.write_text(text)
    with pytest.raises(mk.ConfigurationError, match=r"table.json is no table.*delete it"):
        tuning.read(path)


def test_the_shipped_table_is_one():
    assert all(isinstance(entry, tuning.Entry) for entry in tuning.read(tuning.SHIPPED))


@pytest.fixture
def own_table(tmp_path, monkeypatch):
    path = tmp_path / "tuned.json"
    monkeypatch.setattr(tuning, "own_path", lambda: path)
    return path


def test_calls_take_what_was_measured(own_table):
    others = replace(ENTRY, ranks=3, tile=(4, 4, 4)), replace(ENTRY, card="another", movers=1)
    tuning.keep(own_table, [ENTRY, *others])

    def program(comm):
        with mk.AllGatherGemm(A, B, comm=comm) as step:
            assert step.plan.tile == ENTRY.tile
            assert step.plan.split[0] == ENTRY.movers
            assert step.plan.chunk_bytes == ENTRY.chunk_bytes
            np.testing.assert_array_equal(step(A, B), 48)
        with mk.AllGatherGemm(A, B, comm=comm, options=mk.Options((1, 1))) as step:
            assert step.plan.tile != ENTRY.tile

    worlds.run(2, program)


@pytest.mark.parametrize("kind", [mk.GemmReduceScatter, mk.GemmAllReduce])
def test_sums_take_what_was_measured(kind, own_table):
    measured = replace(ENTRY, operator=kind.function, shape=(1024, 48, 512), chunk_bytes=None)
    tuning.keep(own_table, [measured])

    def program(comm):
        a, b = np.ones((1024, 3 + comm.rank), np.float32), np.ones((3 + comm.rank, 512), np.float32)
        with kind(a, b, comm=comm) as step:
            assert step.plan.tile[:2] == ENTRY.tile[:2]
            assert step.plan.split[0] == ENTRY.movers
            np.testing.assert_array_equal(step(a, b), 7)

    worlds.run(2, program)


def test_operators_on_experts_take_what_was_measured(own_table):
    shape = 20, 24, 40, 4, 2  # tokens, H, I, E, k
    tuned = {
        name: replace(ENTRY, operator=name, shape=extents, tile=tile)
        for name, extents, tile in (
            ("moe_dispatch_gemm", shape, (16, 8, 24)),
            ("moe_layer", shape, (8, 16, 24)),
            ("moe_combine", (20, 40, 4, 2), None),
        )
    }
    tuning.keep(own_table, tuned.values())

    def program(comm):
        x, ids = np.ones((9 + comm.rank, 24), np.float32), np.zeros((9 + comm.rank, 2), int)
        weights, w1 = np.ones(ids.shape, np.float32), np.ones((2, 24, 40), np.float32)
        dispatch = mk.MoeDispatchGemm(x, ids, w1, comm=comm)
        rows, layout = dispatch(x, ids, w1)
        combine = mk.MoeCombine(rows, weights, layout, comm=comm)
        w2 = np.ones((2, 40, 24), np.float32)
        layer = mk.MoeLayer(x, ids, weights, w1, w2, comm=comm, activation="silu")
        for step in (dispatch, combine, layer):
            entry = tuned[step.plan.operator]
            assert (step.plan.split[0], step.plan.chunk_bytes) == (2, 512)
            assert entry.tile is None or step.plan.tile == entry.tile
        np.testing.assert_array_equal(combine(rows, weights, layout), 48)

    worlds.run(2, program)


@pytest.mark.parametrize(
    ("h", "tile", "pairs", "taken"),
    [
        (72, (128, 128, 512), False, True),
        (70, (128, 128, 512), False, False),
        (72, (128, 128, 512), True, False),
        (72, (128, 192, 512), False, False),
    ],
)
def test_tiles_of_a_fast_engine_are_for_what_it_takes(h, tile, pairs, taken):
    """Of about the same shape, but not aligned, another engine makes the products."""
    dtype = np.dtype(np.float16)
    shape = 20, 72, 48, 4, 2
    entry = replace(ENTRY, operator="moe_layer", dtype="float16", shape=shape, tile=tile)
    machine = types.SimpleNamespace(gpu=Gpu("sm_90a", 132, 227 << 10))
    comm = types.SimpleNamespace(size=2, machine=machine, tuning=tuning.Table([entry]))
    agreed = Dispatch(2, h, 48, 4, 2, dtype, dtype, 10)
    asked = mk.Options(), "moe_layer", agreed, agreed.products, comm
    found = measured(*asked, pairs=pairs)
    assert found == mk.Options((2, None), tile if taken else None, 512)


def test_all_ranks_take_what_rank_0_knows(own_table, monkeypatch):
    """A table may differ from host to host."""
    reads = []
    monkeypatch.setattr(tuning, "load", lambda *what: reads.append(what) or [ENTRY])
    tiles = worlds.run(2, lambda comm: mk.AllGatherGemm(A, B, comm=comm).plan.tile)
    assert tiles == [ENTRY.tile] * 2
    assert reads == [("cpu", 2)]


def test_a_faulty_table_is_told_on_all_ranks(own_table):
    own_table.write_text("nonsense")

    def main(mpi):
        with pytest.raises(mk.ConfigurationError, match=r"rank 0.*tuned.json"):
            mk.Communicator(mpi)
        return True

    assert mk.LocalWorld(2).run(main) == [True] * 2


SHAPES = {
    **dict.fromkeys(("moe_dispatch_gemm", "moe_layer"), (60, 70, 90, 3, 2)),
    "moe_combine": (60, 90, 3, 2),
}


@pytest.mark.parametrize(
    ("operator", "size"),
    [
        *(("allgather-gemm", 1), ("moe-combine", 1)),
        *((name, 2) for name, kind in BENCHES.items() if kind.choices),
    ],
)
def test_the_fastest_choices_are_found(operator, size, monkeypatch):
    """With times that a test has made up."""
    kind = BENCHES[operator]
    shape = SHAPES.get(kind.operator, (600, 70, 900))
    multiplies, in_chunks = kind.operator != "moe_combine", kind.operator not in SUMS

    def interleaved(comm, clock, gate, calls):
        measured.append(len(calls))
        fast = "tile=(32, 32" if multiplies else "chunk_bytes=32768"
        return {name: 1.0 if fast in name else 2.0 for name in calls}

    measured = []
    monkeypatch.setattr(tuner.timing, "interleaved_ms", interleaved)

    def program(comm):
        with tuner.Tuner.opened(comm, kind, np.dtype(np.float16)) as one:
            return one.tune(*shape)

    entries = worlds.run(size, program)
    assert entries == entries[:1] * size
    assert entries[0].shape == shape
    if multiplies:
        assert entries[0].options == mk.Options(tile=(32, 32, 64))
    else:
        assert entries[0].options == mk.Options(chunk_bytes=32768 if size > 1 else None)
    if multiplies or size > 1:
        assert (entries[0].ms, entries[0].model_ms) == (1.0, 2.0)
    rounds = multiplies + 1 + (size > 1) * (1 + in_chunks)
    assert len(measured) == rounds * size


def test_nothing_is_kept_for_a_small_gain(monkeypatch):
    def interleaved(comm, clock, gate, calls):
        return {name: 0.99 if "tile=(32, 32" in name else 1.0 for name in calls}

    monkeypatch.setattr(tuner.timing, "interleaved_ms", interleaved)

    def program(comm):
        with tuner.Tuner.opened(comm, BENCHES["allgather-gemm"], np.dtype(np.float64)) as one:
            return one.tune(200, 70, 90)

    (entry,) = worlds.run(1, program)
    assert entry.options == mk.Options()
    assert entry.ms == entry.model_ms == 1.0


@pytest.mark.parametrize("operator", ["allgather-gemm", "moe-layer"])
def test_the_command_fills_a_table(operator, tmp_path):
    path = tmp_path / "table.json"
    words = "tune", operator, "--quick", "--output", path
    done = mpirun(2, "-m", "mkernel_cp", *words, env={"MKERNEL_TARGET": "host"})
    assert done.returncode == 0, done.stderr
    assert f"{operator.replace('-', '_')} " in done.stdout
    assert json.loads(path.read_text())[0]["ranks"] == 2
