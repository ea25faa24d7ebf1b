"""Traces: every span is there, lies where it belongs, and costs nothing when none is asked for."""

import collections
import contextlib
import json
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest
import worlds
from launcher import ROOT, mpirun
from routing import ExpertCase
from test_moe_layer import own_operands

import mkernel_cp as mk
from mkernel_cp.trace import _name_of_part, current

PROGRAMS = Path(__file__).parent / "programs"
CALLS, COUNTS, K = 4, (70, 33, 51), 40
SPLITS = [(2, 3), (0, 2)]


def operands(comm, step=0):
    rng = np.random.default_rng(10 * step + comm.rank)
    return rng.standard_normal((COUNTS[comm.rank], K)), rng.standard_normal((K, 37))


def traced(path, split, *, lanes=1, **keywords):
    """Trace calls on three ranks; return the plans, and per rank the generations that were."""

    def program(comm):
        worlds.chaos(comm, seed=lanes, lanes=lanes, delay_ns=(200_000, 200_000))
        step = mk.AllGatherGemm(
            *operands(comm),
            comm=comm,
            row_counts=COUNTS,
            options=mk.Options(split, (32, 16, 16), 4000),
        )
        untraced = [step(*operands(comm, i)) for i in range(CALLS)]
        generations = []
        with mk.trace(path, **keywords):
            for i in range(CALLS):
                worlds.poison(comm)
                np.testing.assert_array_equal(step(*operands(comm, i)), untraced[i])
                generations.append(comm._runtime.calls.generation)
        np.testing.assert_array_equal(step(*operands(comm)), untraced[0])
        return step.plan, generations

    return worlds.run(len(COUNTS), program)


@pytest.fixture(scope="module", params=SPLITS, ids=str)
def example(request, tmp_path_factory):
    """A trace: plans, generations, and what its file says."""
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    answers = traced(path, request.param)
    return *zip(*answers, strict=True), json.loads(path.read_text())


def spans(file, *kinds):
    return [e for e in file["traceEvents"] if e["ph"] == "X" and (not kinds or e["cat"] in kinds)]


def names(file, kind):
    return {
        (e["pid"], e["tid"]): e["args"]["name"] for e in file["traceEvents"] if e["name"] == kind
    }


def by_thread(file):
    threads = collections.defaultdict(list)
    for span in spans(file):
        threads[span["pid"], span["tid"]].append(span)
    return threads


def test_the_file_is_in_chromes_format(example):
    *_, file = example
    assert file["displayTimeUnit"] == "ns"
    assert file["otherData"]["lost"] == []
    assert file["otherData"]["clock_error_ns"] == 0  # kernels have the host's clock
    for event in file["traceEvents"]:
        assert event["ph"] in "MX"
        assert {"name", "pid", "tid", "args"} <= set(event)
    for span in spans(file):
        assert span["ts"] >= 0, span
        assert span["dur"] >= 0, span
        assert not {"failed", "unfinished"} & set(span["args"]), span
    assert min(span["ts"] for span in spans(file)) == 0


def test_every_rank_agent_and_role_has_a_thread(example):
    plans, _, file = example
    processes = names(file, "process_name")
    assert {pid: name for (pid, _), name in processes.items()} == {
        rank: f"rank {rank} (cpu)" for rank in range(len(COUNTS))
    }
    threads = names(file, "thread_name")
    for rank, plan in enumerate(plans):
        movers, compute = plan.split
        expected = ["launches", *(f"mover {i}" for i in range(movers))]
        expected += [f"compute {movers + i}" for i in range(compute)]
        assert [name for (pid, _), name in threads.items() if pid == rank] == expected
    assert set(threads) == set(by_thread(file))


def test_launches_of_the_context_alone_are_there(example):
    _, generations, file = example
    for rank, own in enumerate(generations):
        launches = [s for s in spans(file, "launch") if s["pid"] == rank]
        assert [s["args"]["generation"] for s in launches] == own
        assert all(s["name"].startswith("allgather_gemm(row_counts=[70, 33") for s in launches)
        for span in spans(file):
            if span["pid"] == rank:
                launch = launches[own.index(span["args"]["generation"])]
                assert launch["ts"] <= span["ts"] <= launch["ts"] + launch["dur"], span


def test_spans_of_a_thread_nest(example):
    *_, file = example
    for thread in by_thread(file).values():
        ends = []
        for span in sorted(thread, key=lambda s: (round(1000 * s["ts"]), -s["dur"])):
            begin, end = (round(1000 * t) for t in (span["ts"], span["ts"] + span["dur"]))
            while ends and ends[-1] <= begin:
                ends.pop()
            assert not ends or end <= ends[-1], span
            ends.append(end)


def test_chunks_are_dealt_to_all_who_move(tmp_path):
    """However few come from each peer."""

    def program(comm):
        a, b = np.ones((1, 8)), np.ones((8, 5))
        with mk.trace(tmp_path / "trace.json"):
            mk.allgather_gemm(a, b, comm=comm, options=mk.Options((3, 1)))

    worlds.run(4, program)
    file = json.loads((tmp_path / "trace.json").read_text())
    copies = collections.Counter((span["pid"], span["tid"]) for span in spans(file, "copy"))
    assert set(copies.values()) == {1}
    assert len(copies) == 4 * 3


def test_copied_bytes_are_the_plans(example):
    plans, _, file = example
    for rank, plan in enumerate(plans):
        copies = [s["args"] for s in spans(file, "copy") if s["pid"] == rank]
        assert sum(copy["bytes"] for copy in copies) == CALLS * plan.bytes_from_peers
        assert {copy["source"] for copy in copies} == {0, 1, 2} - {rank}


@pytest.mark.parametrize("kind", ["compute", "store"])
def test_tiles_cover_the_result_once(example, kind):
    plans, generations, file = example
    for rank, (plan, own) in enumerate(zip(plans, generations, strict=True)):
        for generation in own:
            written = np.zeros((plan.m, plan.n), int)
            for span in spans(file, kind):
                args = span["args"]
                if span["pid"] == rank and args["generation"] == generation:
                    first = plan.row_start[args["source"]]
                    rows, columns = args["rows"], args["columns"]
                    written[first + rows[0] : first + rows[1], slice(*columns)] += 1
            assert (written == 1).all()


def test_a_tile_is_computed_when_its_chunks_have_been_waited_for(example):
    plans, _, file = example
    arrivals = collections.defaultdict(list)
    for span in spans(file, "wait"):
        if span["args"]["for"] == "arrival":
            key = span["pid"], span["tid"], span["args"]["generation"], span["args"]["chunk"]
            arrivals[key].append(span["ts"] + span["dur"])
    copied = {
        (s["pid"], s["args"]["generation"], s["args"]["chunk"]): s["ts"]
        for s in spans(file, "copy")
    }
    looked_at = waited = 0
    for span in spans(file, "compute"):
        args, plan = span["args"], plans[span["pid"]]
        if args["source"] == span["pid"]:
            continue
        first = sum(plan.chunks(rank) for rank in range(args["source"]))
        panels = -(-K // plan.chunk[1])
        for block in range(args["rows"][0] // plan.chunk[0], -(-args["rows"][1] // plan.chunk[0])):
            chunk = first + block * panels
            # Nobody waits for what is seen to be there already.
            ended = arrivals[span["pid"], span["tid"], args["generation"], chunk]
            assert not ended or min(ended) <= span["ts"] + 1e-4  # nanoseconds, whose sum rounds
            waited += len(ended)
            assert copied[span["pid"], args["generation"], chunk] < span["ts"]
            looked_at += 1
    assert looked_at > 100
    assert waited > 0


def test_waits_name_whom_they_are_for(example):
    *_, file = example
    for span in spans(file, "wait"):
        assert span["args"]["peer"] in {0, 1, 2} - {span["pid"]}, span
    reasons = collections.Counter(span["args"]["for"] for span in spans(file, "wait"))
    assert set(reasons) - {"read"} == {"call", "arrival"}
    assert (
        reasons["read"] <= CALLS * 6
    )  # the last agent of a rank, for peers that have not read yet


def test_one_of_several_lanes_records(tmp_path):
    answers = traced(tmp_path / "trace.json", (1, 1), lanes=3)
    file = json.loads((tmp_path / "trace.json").read_text())
    assert sum(s["args"]["bytes"] for s in spans(file, "copy")) == CALLS * sum(
        plan.bytes_from_peers for plan, _ in answers
    )
    assert len(spans(file, "finish")) == CALLS * 2 * len(COUNTS)


def test_spans_without_room_are_counted(tmp_path, caplog):
    traced(tmp_path / "all.json", (1, 1))
    traced(tmp_path / "some.json", (1, 1), capacity=5)
    everything, some = (json.loads((tmp_path / f"{n}.json").read_text()) for n in ("all", "some"))
    lost = some["otherData"]["lost"]
    assert {(entry["rank"], entry["agent"]) for entry in lost} == {
        (rank, agent) for rank in range(len(COUNTS)) for agent in range(2)
    }
    recorded = [s for s in spans(some) if s["cat"] != "launch"]
    assert len(recorded) == 5 * 6
    assert sum(entry["spans"] for entry in lost) > 0
    assert len(spans(everything)) > len(recorded)
    assert "found no room" in caplog.text


def test_nothing_stays_allocated(tmp_path):
    def program(comm):
        a, b = operands(comm)
        with mk.trace(tmp_path / "trace.json"):
            mk.allgather_gemm(a, b, comm=comm, row_counts=COUNTS)
            (book,) = current()._recorders[comm._runtime.launches]._books
            memory = weakref.ref(book._events)
            assert comm._runtime.world.struct.trace == book.address
            del book
        assert memory() is None
        assert comm._runtime.world.struct.trace == 0
        assert current() is None

    worlds.run(len(COUNTS), program)


def test_a_path_that_cannot_be_written_is_refused_before_anything_runs(tmp_path):
    def program(comm):
        a, b = operands(comm)
        out = np.full((sum(COUNTS), 37), np.nan)
        step = mk.AllGatherGemm(a, b, comm=comm, row_counts=COUNTS)
        path = tmp_path / "nowhere" / "trace.json"
        for _ in range(2):
            with pytest.raises(mk.ConfigurationError, match=r"^rank 0: cannot write .*nowhere"):  # noqa: SIM117
                with mk.trace(path):
                    step(a, b, out=out)
            assert np.isnan(out).all()
        step(a, b, out=out)
        assert not np.isnan(out).any()

    worlds.run(len(COUNTS), program)


@pytest.mark.parametrize("fails", [True, False])
def test_the_file_is_there_in_place_of_older_ones(tmp_path, fails):
    """Also where the first call fails while it is planned."""
    path, others = tmp_path / "trace.json", tmp_path / "trace.rank1.json"
    path.write_text("an older trace")
    others.write_text("of a call that failed")

    def program(comm):
        a, b = operands(comm)
        refused = pytest.raises(TypeError, match="rounds float32")
        with refused if fails else contextlib.nullcontext(), mk.trace(path):
            options = mk.Options(tf32=fails)
            mk.allgather_gemm(a, b, comm=comm, row_counts=COUNTS, options=options)

    worlds.run(len(COUNTS), program)
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]
    assert bool(spans(json.loads(path.read_text()))) != fails


def test_ranks_without_calls_leave_the_file_of_those_that_make_some(tmp_path):
    path = tmp_path / "trace.json"
    path.write_text("an older trace")

    def main(mpi):
        calls = mpi.Get_rank() > 0
        part = mpi.Split(calls)
        with mk.trace(path):
            if calls:
                with mk.Communicator(part) as comm:
                    mk.allgather_gemm(np.ones((3, 4)), np.ones((4, 5)), comm=comm)
            else:
                written.wait(30)
        if calls:
            written.wait(30)

    written = threading.Barrier(3)
    mk.LocalWorld(3).run(main)
    assert spans(json.loads(path.read_text()), "compute")


def test_traces_do_not_nest_and_one_without_calls_has_no_spans(tmp_path):
    (tmp_path / "outer").write_text("an older trace")
    with mk.trace(tmp_path / "outer"):
        text = r"trace\('inner'\) within trace\('.*outer'\): one at a time"
        with pytest.raises(mk.ConcurrentCallError, match=text), mk.trace("inner"):
            pass
    with pytest.raises(TypeError, match="capacity=True: use an integer"):
        mk.trace("none", capacity=True).__enter__()
    with pytest.raises(ValueError, match="at least 1"), mk.trace("none", capacity=0):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["outer"]
    assert json.loads((tmp_path / "outer").read_text())["traceEvents"] == []
    with (
        pytest.raises(mk.ConfigurationError, match="cannot write"),
        mk.trace(tmp_path / "no" / "t"),
    ):
        pass


def test_a_rank_that_does_not_trace_is_named(tmp_path):
    def main(mpi):
        with contextlib.suppress(mk.Error), mk.Communicator(mpi, entry_timeout=10) as comm:
            step = mk.AllGatherGemm(*operands(comm), comm=comm, row_counts=COUNTS)
            context = mk.trace(tmp_path / "t") if comm.rank else contextlib.nullcontext()
            with pytest.raises(mk.ArgumentMismatchError, match=r"calls trace\(\)"), context:
                step(*operands(comm))

    mk.LocalWorld(len(COUNTS)).run(main)


def test_a_failed_call_leaves_a_file_of_each_rank(tmp_path):
    def main(mpi):
        comm = mk.Communicator(mpi, entry_timeout=0.3)
        step = mk.AllGatherGemm(*operands(comm), comm=comm, row_counts=COUNTS)
        context = mk.trace(tmp_path / "trace.json")

        def calls():
            step(*operands(comm))
            if comm.rank == 1:
                everybody.wait(30)
            step(*operands(comm))

        with pytest.raises(mk.TimeoutError), context:
            calls()
        if comm.rank != 1:
            everybody.wait(30)
        with contextlib.suppress(mk.TimeoutError):
            comm.close()

    everybody = threading.Barrier(len(COUNTS))
    mk.LocalWorld(len(COUNTS)).run(main)
    for rank in range(len(COUNTS)):
        file = json.loads((tmp_path / f"trace{f'.rank{rank}' if rank else ''}.json").read_text())
        assert {span["pid"] for span in spans(file)} == {rank}
        failed = [span for span in spans(file, "wait") if "failed" in span["args"]]
        assert bool(failed) == (rank != 1)
        assert all(span["args"]["peer"] == 1 for span in failed if span["args"]["for"] == "call")


def test_communicators_that_end_within_a_trace_and_share_it(tmp_path):
    def main(mpi):
        with mk.trace(tmp_path / "trace.json"):
            for _ in range(2):
                with mk.Communicator(mpi) as comm:
                    a, b = operands(comm)
                    mk.allgather_gemm(a, b, comm=comm, row_counts=COUNTS)

    mk.LocalWorld(len(COUNTS)).run(main)
    file = json.loads((tmp_path / "trace.json").read_text())
    processes = names(file, "process_name")
    assert len({pid for pid, _ in processes}) == 2 * len(COUNTS)
    assert "communicator 1, rank 2 (cpu)" in processes.values()


def test_two_traces_cannot_write_one_file(tmp_path):
    def main(mpi):
        with mk.Communicator(mpi.Split(mpi.Get_rank())) as comm, mk.trace(tmp_path / "t"):
            try:
                mk.allgather_gemm(np.ones((3, 4)), np.ones((4, 5)), comm=comm)
            except mk.ConfigurationError as error:
                return str(error)
            finally:
                both.wait(30)

    both = threading.Barrier(2)
    answers = mk.LocalWorld(2).run(main)
    assert sum(answer is None for answer in answers) == 1
    assert any("a path of their own" in str(answer) for answer in answers)


def test_kernels_of_ones_own_are_traced(tmp_path):
    def program(comm):
        kernel = mk.Module(ROOT / "launch" / "examples" / "heat.cu").kernel("heat")
        field, following, halo = comm.zeros((4, 5)), np.empty((4, 5)), np.zeros((2, 5))
        arguments = field, following, halo, comm.zeros(2, np.uint64), 4, 5, 4, 0.1
        with mk.trace(tmp_path / "trace.json"):
            comm.launch(kernel, 3, arguments, operand=field)
            comm.launch(kernel, 4, arguments, operand=field)  # needs more room

    worlds.run(2, program)
    file = json.loads((tmp_path / "trace.json").read_text())
    assert [s["name"] for s in spans(file, "launch")] == ["launch of heat"] * 4
    assert len(spans(file, "enter")) == len(spans(file, "finish")) == 2 * (3 + 4)
    chunks = {(s["pid"], s["name"]) for s in spans(file, "wait") if s["args"]["for"] == "arrival"}
    assert chunks == {(0, "wait: chunk 1 of rank 1"), (1, "wait: chunk 0 of rank 0")}


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    """A trace of a layer of experts, and of a sum alone, and how many rows each rank has."""
    case = ExpertCase("traced", (23, 0, 30), 6, 8, 5, 3, "float32", "uniform", None, "silu", 8)
    path = tmp_path_factory.mktemp("trace") / "experts.json"

    def program(comm):
        x, ids, weights, w1, w2 = own_operands(comm, case, 1)
        asked = {"comm": comm, "options": mk.Options((2, 2), chunk_bytes=100)}
        rows, layout = mk.moe_dispatch_gemm(x, ids, w1, num_experts=5, **asked)
        with mk.trace(path):
            mk.moe_layer(x, ids, weights, w1, w2, activation="silu", num_experts=5, **asked)
            mk.moe_combine(rows, weights, layout, **asked)
        return int(layout.count)

    counts = worlds.run(case.world, program)
    return case, counts, json.loads(path.read_text())


def sums_in(file, case, generations):
    """How often each row of a rank (second index) is in the sums of each (first)."""
    found = np.zeros((case.world, case.world, max(case.tokens)), int)
    for span in spans(file, "sum"):
        if span["args"]["generation"] in generations:
            found[span["pid"], span["args"]["source"], slice(*span["args"]["rows"])] += 1
    return found


def test_what_becomes_of_tokens_is_in_spans(experts):
    case, counts, file = experts
    layer = min(s["args"]["generation"] for s in spans(file, "launch"))
    for rank, (tokens, count) in enumerate(zip(case.tokens, counts, strict=True)):
        own = collections.defaultdict(list)
        for span in spans(file):
            if (span["pid"], span["args"]["generation"]) == (rank, layer):
                own[span["cat"]].append(span)
        in_order, noted = np.zeros(max(case.tokens), int), np.zeros(count, int)
        for span in own["sort"]:
            assert span["args"]["source"] == rank
            in_order[slice(*span["args"]["rows"])] += 1
        assert (in_order == (np.arange(len(in_order)) < tokens)).all()
        (agreed,) = own["agree"]
        calls = [s["ts"] + s["dur"] for s in own["wait"] if s["args"]["for"] == "call"]
        assert max(calls) <= agreed["ts"] + 1e-4  # nanoseconds, whose sum rounds
        for span in own["note"]:
            assert case.tokens[span["args"]["source"]] > 0
            assert span["ts"] >= agreed["ts"]
            noted[slice(*span["args"]["rows"])] += 1
        assert (noted == 1).all()
        tiles = own["compute"]
        assert {span["args"]["expert"] for span in tiles} == set(range(case.counts[rank]))
        assert all(f"of expert {span['args']['expert']}, col" in span["name"] for span in tiles)


def test_sums_of_each_rank_for_each_are_spans(experts):
    case, counts, file = experts
    generations = sorted({s["args"]["generation"] for s in spans(file, "launch")})
    for generation in generations:
        found = sums_in(file, case, {generation})
        for rank, tokens in enumerate(case.tokens):
            # How many tokens a peer has nobody asks; of its own a rank knows.
            assert (found[:, rank, :tokens] == 1).all()
            assert (found[rank, rank, tokens:] == 0).all()
    for rank, count in enumerate(counts):
        names = {
            span["name"]
            for span in spans(file, "note")
            if (span["pid"], span["args"]["generation"]) == (rank, generations[-1])
        }
        assert names == {f"note: rows 0:{count} of all ranks"}


@pytest.mark.mpi
def test_processes_write_one_file(tmp_path):
    result = mpirun(3, PROGRAMS / "traced.py", tmp_path / "trace.json")
    assert result.returncode == 0, result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]
    file = json.loads((tmp_path / "trace.json").read_text())
    assert {span["pid"] for span in spans(file)} == {0, 1, 2}
    assert sum(s["args"]["bytes"] for s in spans(file, "copy")) == 3 * 3 * 2 * 40 * 30 * 8
    # One clock: a rank copies from a peer after that has begun the call.
    begins = {
        (s["pid"], i): s["ts"] for s in spans(file, "launch") for i in [s["args"]["generation"]]
    }
    for copy in spans(file, "copy"):
        assert copy["ts"] > begins[copy["args"]["source"], copy["args"]["generation"]]


def test_every_warp_of_a_block_has_a_name_of_its_own():
    warps = 384 // 32
    assert len({_name_of_part(part, hopper=True) for part in range(warps)}) == warps
    assert _name_of_part(4, hopper=True) == "consumer 0"
    assert _name_of_part(5, hopper=True) == _name_of_part(5, hopper=False) == "warp 5"
