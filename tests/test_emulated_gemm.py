"""The GEMM engines for GPUs and the operators on them, where there is no GPU."""

import contextlib
import threading
import time

import emulated
import numpy as np
import pytest
import test_allgather_gemm as gather
import test_courier as courier
import test_reductions as sums
import worlds
from emulated import ENGINES
from shapes import Case, ReductionCase

import mkernel_cp as mk
from mkernel_cp import plan as plans
from mkernel_cp import tiles
from mkernel_cp.host_kernel import HostKernel

on = emulated.on
# Of the tiles of hopper: a small one, quick here, and one of two blocks that load for each other.
NARROW, WIDE, PAIR = (128, 64, 1, 1.0), (128, 128, 1, 0.1), (256, 256, 2, 0.1)


@pytest.fixture(scope="module", autouse=True)
def compiled(kernels, tmp_path_factory):
    with (
        emulated.kernels(tmp_path_factory.mktemp("emulated") / "kernels"),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(tiles, "_HOPPER_TILES", (NARROW, WIDE, PAIR))
        yield


def gathered(name, counts, k, columns, dtype="float16", out="", **orders):
    return Case(name, counts, k, columns, dtype, out or dtype, **orders)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("engine", ENGINES)
def test_any_order_of_threads_and_copies(on, engine, seed):
    """Many panels and tiles pass through few slots."""
    case = gathered("long", (140, 150), 500, (140, 130))

    def program(comm):
        out = gather.call(comm, case, seed)
        worlds.expected(case, seed, comm.rank).assert_close(out)

    on(engine, seed=1 + seed)
    worlds.run(2, program)


GATHERED = {
    "portable": [
        gathered("tails", (70, 33), 100, (45, 270), "bfloat16", "float32"),
        gathered("transposed", (40, 0, 150), 77, (9, 33, 0), a_order="F", b_order="F"),
        gathered("exact", (33, 20), 50, (140, 7), "float32", a_pitched=True),
        gathered("double", (33, 140), 50, (140, 7), "float64", b_order="F"),
        gathered("no terms", (5, 6), 0, (9, 8)),
    ],
    "hopper": [
        gathered("tails", (70, 33), 100, (45, 270)),
        gathered("wide", (140, 70), 200, (300, 8), "bfloat16", "float32", b_pitched=True),
        gathered("transposed", (40, 0, 150), 77, (9, 33, 0), a_order="F", b_order="F"),
        gathered("mixed", (150, 140), 136, (129, 70), a_order="F"),
        gathered("none of the first", (0, 40), 77, (9, 33), a_order="F"),
        gathered("no terms", (5, 6), 0, (9, 8)),
    ],
}


@pytest.mark.parametrize(
    ("engine", "case", "together"),
    [
        (name, case, together)
        for name in GATHERED
        for case in GATHERED[name]
        for together in ((False, True) if case.a_order == "C" else (False,))
    ],
    ids=str,
)
def test_rows_of_all_ranks(on, engine, case, together):
    on(engine)
    with worlds.gathered(together):
        gather.test_equals_reference(case)


def test_long_chunks_pass_through_few_slots(on, tmp_path):
    on("hopper")
    courier.test_no_signal_comes_before_its_bytes(2, "copy engine, several pieces", tmp_path)


@pytest.mark.parametrize("movers", [0, 2])
def test_pairs_of_blocks(on, movers):
    case = gathered("tiles", (300, 140), 150, (270, 70), "bfloat16")
    options = mk.Options(tile=(*PAIR[:2], 64), split=(movers, None))

    def program(comm):
        for seed in (1, 2):
            out = gather.call(comm, case, seed, options=options)
            worlds.expected(case, seed, comm.rank).assert_close(out)

    on("hopper")
    worlds.run(2, program)


@pytest.mark.parametrize("order", "CF")
def test_halved_tiles(on, order):
    """The last wave is half empty: each of its tiles is two, of half as many columns."""
    case = gathered("halves", (300, 150), 150, (100, 120), "bfloat16", b_order=order)
    options = mk.Options(tile=(*WIDE[:2], 64))

    def program(comm):
        out = gather.call(comm, case, 1, options=options)
        worlds.expected(case, 1, comm.rank).assert_close(out)

    on("hopper")
    worlds.run(2, program)


@pytest.mark.parametrize("orders", ["CF", "FC"])
@pytest.mark.parametrize("engine", ENGINES)
def test_operands_may_be_rounded_to_tf32(on, engine, orders):
    on(engine)
    gather.test_operands_may_be_rounded_to_tf32(*orders)


def test_terms_may_be_rounded_to_tf32(on):
    on("hopper")
    sums.test_operands_may_be_rounded_to_tf32("gemm_reduce_scatter")


SUMMED = [
    ReductionCase(
        "tails", (70, 33, 5), 100, (45, 70, 9), *["float16"] * 2, transfer_dtype="float16"
    ),
    ReductionCase(
        "wide", (150, 140), 200, (70, 0), "bfloat16", "float32", transfer_dtype="float32"
    ),
    # The second rank's rows of a begin where a tensor copy of its columns may begin, and where not.
    *(
        ReductionCase(
            *(name, (rows, 37), 103, (79, 19), "bfloat16", "float32"),
            a_order="F",
            a_pitched=True,
            transfer_dtype="float32",
        )
        for name, rows in (("by columns", 88), ("by rows", 83))
    ),
]
DOUBLE = ReductionCase("double", (33, 20), 70, (45, 9), *["float64"] * 2, transfer_dtype="float64")


@pytest.mark.parametrize(
    ("engine", "case"),
    [*((name, case) for name in ENGINES for case in SUMMED), ("portable", DOUBLE)],
    ids=str,
)
@pytest.mark.parametrize("form", worlds.SUMS)
def test_sums_over_ranks(on, form, engine, case):
    operator, way = worlds.SUMS[form]
    on(engine)
    with worlds.sums(way):
        sums.test_equals_reference(operator, case)


@pytest.mark.parametrize("transfer", ["bfloat16", "float32"])
@pytest.mark.parametrize("seed", range(3))
def test_many_strips_pass_through_few_slots(on, seed, transfer, monkeypatch):
    """A warp alone stores what the peer has pushed of earlier stripes."""
    monkeypatch.setattr(tiles, "_HOPPER_TILES", ((128, 256, 1, 1.0),))
    half = "bfloat16"
    case = ReductionCase("strips", (200, 190), 1032, (40, 30), half, half, transfer_dtype=transfer)
    options = {"split": (0, 1)}

    def program(comm):
        out, expected = sums.call_case("gemm_allreduce", comm, case, seed, **options)
        expected.assert_close(out)

    on("hopper", seed=1 + seed)
    with worlds.sums("pushed"):
        worlds.run(2, program)


@pytest.mark.parametrize("engine", ENGINES)
def test_who_has_not_called_is_told_nothing(on, engine):
    """Its arena may still hold what it needs in an earlier call."""

    def program(comm):
        a, b = (worlds.put(comm, np.ones(shape, np.float16)) for shape in ((24, 16), (16, 40)))
        with mk.GemmAllReduce(a, b, comm=comm) as step:
            assert step.plan.low_latency
            step(a, b)
            comm.mpi.allgather(None)
            if comm.rank == 1:
                before = worlds.signals(comm).copy()
                time.sleep(0.3)
                assert (worlds.signals(comm) == before).all()
            out = step(a, b)
            assert (worlds.get(comm, out) == 32).all()

    on(engine)
    with worlds.sums("low latency"):
        worlds.run(2, program)


@pytest.mark.parametrize(("columns", "n"), [(64, 136), (128, 264)])
@pytest.mark.parametrize("operator", ["gemm_reduce_scatter", "gemm_allreduce"])
def test_few_rows_in_tiles_of_any_width(on, operator, columns, n):
    """Each of three owners has rows of some warps, and of some instructions of a warp."""
    half = "bfloat16"
    case = ReductionCase("few", (5, 27, 9), n, (40, 130, 8), half, half, transfer_dtype=half)

    def program(comm):
        out, expected = sums.call_case(operator, comm, case, 3, tile=(128, columns, 64))
        expected.assert_close(out)

    on("hopper")
    with worlds.sums("low latency"):
        worlds.run(3, program)


@pytest.mark.parametrize("form", worlds.SUMS)
def test_sums_of_pairs_of_blocks(on, monkeypatch, form):
    """The second block of a pair has no rows of some tiles."""
    operator, way = worlds.SUMS[form]
    monkeypatch.setattr(tiles, "_HOPPER_TILES", (PAIR,))
    half = "bfloat16"
    case = ReductionCase("pairs", (150, 70), 40, (9, 70), half, half, transfer_dtype=half)
    on("hopper")
    with worlds.sums(way):
        sums.test_equals_reference(operator, case)


@pytest.mark.parametrize("k", [(8, 900), (900, 900), (8, 9)])
def test_ranks_agree_on_whether_they_pull(on, monkeypatch, k):
    """Each has terms of its own number; who has most of them decides."""
    monkeypatch.setattr(plans, "LINK_RATE", 1e12)
    monkeypatch.setattr(plans, "_LEAST_WAVES_PULLED", 0)
    monkeypatch.setattr(tiles, "_HOPPER_TILES", (PAIR,))
    monkeypatch.setattr(plans, "_HANDOVER_S", (-np.inf, -np.inf))

    def program(comm):
        a, b = np.ones((20, k[comm.rank]), np.float16), np.ones((k[comm.rank], 24), np.float16)
        with mk.GemmReduceScatter(a, b, comm=comm) as step:
            assert step.plan.pulled is (max(k) == 900)
            assert (step(a, b) == sum(k)).all()

    on("hopper")
    worlds.run(2, program)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("form", ["allgather_gemm", *worlds.SUMS])
def test_what_does_not_arrive_leaves_nan(form, engine):
    """A rank is awaited in vain; what needs nothing of it is right."""
    operator, way = worlds.SUMS.get(form, (form, "pushed"))
    kind = getattr(mk, operator)
    terms = 640  # so that all stages have held some

    def main(mpi):
        comm = mk.Communicator(mpi)
        comm._runtime.machine.gpu = ENGINES[engine]
        rows = 40 if operator == "allgather_gemm" else 200  # some, of each owner, are whole strips
        a, b = np.ones((rows, terms), np.float16), np.ones((terms, 40), np.float16)
        out = kind(a, b, comm=comm)
        out[...] = 0
        results[comm.rank] = out
        begun.wait(60)
        if comm.rank == 1:
            if (form, engine) == ("allgather_gemm", "portable"):
                worlds.until(lambda: all(map(own_is_right, (0, 2))), 60)
            else:  # a pretended copy engine stores some only when it is waited for
                time.sleep(3 if form == "allgather_gemm" else 1)
            comm.close()
            return
        try:
            with pytest.raises(mk.PeerLostError, match="rank 1"):
                kind(a, b, comm=comm, out=out)
        finally:
            with contextlib.suppress(mk.Error):
                comm.close()

    def own_is_right(rank):
        return (results[rank][40 * rank : 40 * rank + 40] == terms).all()

    results, begun = [None] * 3, threading.Barrier(3)
    with worlds.sums(way):
        mk.LocalWorld(3).run(main)
    for rank in (0, 2):
        out = results[rank]
        if operator == "allgather_gemm":
            assert own_is_right(rank)
            assert np.isnan(out[40:80]).all()
            out = out[:40]
        right = terms if operator == "allgather_gemm" else 3 * terms
        assert ((out == right) | np.isnan(out)).all()
        assert np.isnan(out).any() or operator == "allgather_gemm"


@pytest.mark.parametrize(
    ("engine", "operator"), [("hopper", "allgather_gemm"), ("portable", "gemm_allreduce")]
)
def test_between_nodes_through_host_memory(on, engine, operator, monkeypatch):
    """As on GPUs that network cards do not reach."""
    monkeypatch.setattr(HostKernel, "capacity", lambda self, shared_bytes, processors=None: 11)
    worlds.stage(monkeypatch, 4096)
    rows = gathered("rows", (70, 33), 72, (45, 9))
    half = "bfloat16"
    terms = ReductionCase("sums", (31, 31), 140, (30, 9), half, half, transfer_dtype=half)

    def program(comm):
        if operator == "allgather_gemm":
            out, right = gather.call(comm, rows, 1), worlds.expected(rows, 1, comm.rank)
        else:
            out, right = sums.call_case(operator, comm, terms, 1)
        right.assert_close(out)

    on(engine)
    worlds.run(2, program, nodes=2)
