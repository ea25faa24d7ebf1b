"""Every fault ends in a sentence: on every rank, soon, and the same one."""

import contextlib
import ctypes
import resource
import threading
import time

import numpy as np
import pytest
import worlds

import mkernel_cp as mk
from mkernel_cp import lifetime
from mkernel_cp.failure import Problem

A, B = np.ones((4, 6)), np.ones((6, 5))
SUMS = (mk.gemm_reduce_scatter, mk.gemm_allreduce)
HALF = A.astype(np.float16), B.astype(np.float16)
EXACT = mk.Options(transfer_dtype=np.float32)


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """Compile first what the tests call, since they look at the clock."""

    def program(comm):
        for dtype, out in ((np.float64, None), (np.float16, None), (np.float16, np.float32)):
            for operator in (mk.allgather_gemm, *SUMS):
                operator(A.astype(dtype), B.astype(dtype), comm=comm, dtype=out)
        for operator in SUMS:
            operator(*HALF, comm=comm, options=EXACT)

    for way in worlds.WAYS:
        with worlds.sums(way):
            worlds.run(2, program)


@pytest.fixture(params=worlds.SUMS)
def operator(request):
    """An operator that sums over ranks, in each of its forms."""
    name, way = worlds.SUMS[request.param]
    with worlds.sums(way):
        yield getattr(mk, name)


def outcomes(size, program, **options):
    """Run a program on every rank and return the exception of each, or its result."""
    # A fault that goes unnoticed is to cost seconds, not ten minutes.
    options = {"entry_timeout": 10, "progress_timeout": 10, **options}

    def main(mpi):
        comm = mk.Communicator(mpi, **options)
        try:
            return program(comm)
        except Exception as error:
            return error
        finally:
            barrier.wait(60)
            with contextlib.suppress(mk.Error):
                comm.close()

    barrier = threading.Barrier(size)
    return mk.LocalWorld(size).run(main)


def all_are(results, kind, *texts):
    for error in results:
        assert isinstance(error, kind), results
        for text in texts:
            assert text.lower() in str(error).lower(), str(error)


def test_a_rank_that_never_calls_ends_in_the_entry_deadline():
    def program(comm):
        if comm.rank != 1:
            out = np.zeros((12, 5))
            try:
                mk.allgather_gemm(A, B, comm=comm, out=out)
            finally:
                assert comm.closed

    began = time.monotonic()
    results = outcomes(3, program, entry_timeout=0.4)
    assert time.monotonic() - began < 5
    all_are(results[::2], mk.TimeoutError, "rank 1", "allgather_gemm", "entry_timeout")


def test_what_was_not_finished_is_nan():
    def program(comm):
        a = comm.asarray(rows)
        mk.allgather_gemm(a, B, comm=comm)
        if comm.rank == 1:
            worlds.until(own_is_right, 60)
            comm.close()
            return None
        with pytest.raises(mk.PeerLostError):
            mk.allgather_gemm(a, B, comm=comm, out=out)
        assert own_is_right()
        assert np.isnan(out[20:]).all()
        return None

    def own_is_right():
        return np.allclose(out[:20], rows @ B, atol=1e-12)

    out, rows = np.zeros((40, 5)), np.random.default_rng(0).standard_normal((20, 6))
    assert outcomes(2, program) == [None, None]


def test_sums_with_a_rank_that_never_calls_end_in_the_entry_deadline(operator):
    """The result is NaN, and nothing is pushed to that rank: it may be using its slots."""

    def program(comm):
        operator(A, B, comm=comm)
        worlds.poison(comm)
        if comm.rank == 1:
            ended.wait(60)
            assert worlds.poisoned(comm)
            return None
        out = np.zeros((4 if operator is mk.gemm_allreduce else comm.row_counts(4)[comm.rank], 5))
        with pytest.raises(mk.TimeoutError, match=r"rank 1.*entry_timeout"):
            operator(A, B, comm=comm, out=out)
        ended.wait(60)
        assert np.isnan(out).all()
        return None

    ended = threading.Barrier(3)
    began = time.monotonic()
    assert outcomes(3, program, entry_timeout=0.4) == [None] * 3
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("rows", [0, 4])
@pytest.mark.parametrize("warm", [False, True])
def test_sums_that_differ_are_told_on_all_ranks(operator, rows, warm):
    """Also by a rank that owns no rows, and for which nobody would wait."""
    a = A[:rows]
    others = {
        "shape": lambda comm: operator(np.ones((rows + 1, 6)), B, comm=comm),
        "columns": lambda comm: operator(a, np.ones((6, 3)), comm=comm),
        "dtype": lambda comm: operator(HALF[0][:rows], HALF[1], comm=comm),
        "transfer": lambda comm: operator(HALF[0][:rows], HALF[1], comm=comm, options=EXACT),
        "operator": lambda comm: SUMS[operator is SUMS[0]](a, B, comm=comm),
        "gather": lambda comm: mk.allgather_gemm(a, B, comm=comm),
    }
    for other in others.values():

        def program(comm, other=other):
            operator(a, B, comm=comm)
            if warm:
                other(comm)
            other(comm) if comm.rank == 2 else operator(a, B, comm=comm)
            operator(a, B, comm=comm)

        began = time.monotonic()
        all_are(outcomes(3, program), mk.ArgumentMismatchError, "rank 2", operator.__name__)
        assert time.monotonic() - began < 5


@pytest.mark.parametrize(("rows", "columns", "told"), [(5, 5, True), (4, 3, False)])
def test_how_to_pass_different_numbers_of_rows_is_told_where_these_differ(rows, columns, told):
    def program(comm):
        other = np.ones((rows, 6)), np.ones((6, columns))
        mk.gemm_allreduce(*(other if comm.rank == 1 else (A, B)), comm=comm)

    remedy = "where ranks have different numbers of rows, each passes all in row_counts="
    for error in outcomes(2, program):
        assert isinstance(error, mk.ArgumentMismatchError)
        assert (remedy in str(error)) == told


def test_ranks_that_share_out_rows_differently_are_told():
    """Each of the two believes that all rows are its own, and pushes nothing."""

    def program(comm):
        counts = (4, 0), (0, 4)
        for own in (*counts, counts[comm.rank]):
            mk.gemm_reduce_scatter(A, B, comm=comm, row_counts=own)

    began = time.monotonic()
    all_are(
        outcomes(2, program), mk.ArgumentMismatchError, "row_counts=[4, 0]", "row_counts=[0, 4]"
    )
    assert time.monotonic() - began < 5


def test_a_rank_that_refuses_a_sum_alone_is_quoted_though_it_owns_no_rows(operator):
    def program(comm):
        operator(A[:2], B, comm=comm)
        operator(A[:2].astype(int) if comm.rank == 2 else A[:2], B, comm=comm)

    began = time.monotonic()
    results = outcomes(3, program)
    assert time.monotonic() - began < 5
    assert isinstance(results[2], TypeError)
    all_are(results[:2], mk.PeerError, "rank 2", "TypeError", "bfloat16, float16")


@pytest.mark.parametrize("way", worlds.WAYS)
def test_a_rank_that_nobody_waits_for_does_not_run_ahead_of_its_message(way):
    """It owns no rows and has no terms; another kind of call follows."""

    def program(comm):
        k = 0 if comm.rank == 2 else 6
        for step in range(40):
            if comm.rank == step % 2:
                time.sleep(0.002)
            out = mk.gemm_reduce_scatter(A[:2, :k], B[:k], comm=comm)
            np.testing.assert_array_equal(out, 12.0)
            np.testing.assert_array_equal(mk.allgather_gemm(A, B, comm=comm), 6.0)

    with worlds.sums(way):
        assert outcomes(3, program) == [None] * 3


@pytest.mark.parametrize("warm", ["cold", "warm", "mixed"])
@pytest.mark.parametrize("other", ["rows", "dtype", "operator", "out dtype", "order of calls"])
def test_different_calls_are_told_on_all_ranks(other, warm):
    half = {"rows": A.astype(np.float16), "dtype": A.astype(np.float16)}

    def calls(comm):
        yield lambda: mk.allgather_gemm(A.astype(np.float16), B.astype(np.float16), comm=comm)
        if other == "rows":
            yield lambda: mk.allgather_gemm(
                half["rows"][:3], B.astype(np.float16), comm=comm, row_counts=(3,) * comm.size
            )
        elif other == "operator":
            yield comm.barrier
        elif other == "out dtype":
            yield lambda: mk.allgather_gemm(
                A.astype(np.float16), B.astype(np.float16), comm=comm, dtype=np.float32
            )
        else:
            yield lambda: mk.allgather_gemm(A, B, comm=comm)

    def program(comm):
        usual, unusual = calls(comm)
        if warm != "cold":
            usual()
        if warm == "warm":
            unusual()
        (unusual if comm.rank == 1 else usual)()
        usual()

    began = time.monotonic()
    results = outcomes(3, program)
    assert time.monotonic() - began < 10
    all_are(results, mk.ArgumentMismatchError, "rank 1", "allgather_gemm")


def test_a_rank_that_refuses_alone_is_quoted_by_the_others():
    def program(comm):
        mk.allgather_gemm(A, B, comm=comm)
        mk.allgather_gemm(A.astype(int) if comm.rank == 2 else A, B, comm=comm)

    began = time.monotonic()
    results = outcomes(3, program)
    assert time.monotonic() - began < 5
    assert isinstance(results[2], TypeError)
    all_are(results[:2], mk.PeerError, "rank 2", "TypeError", "bfloat16, float16")


def test_a_rank_that_refuses_alone_and_goes_on_learns_that_all_is_over():
    def program(comm):
        mk.allgather_gemm(A, B, comm=comm)
        if comm.rank == 0:
            with pytest.raises(TypeError):
                mk.allgather_gemm(A.astype(int), B, comm=comm)
        mk.allgather_gemm(A, B, comm=comm)
        mk.allgather_gemm(A, B, comm=comm)

    all_are(outcomes(2, program), mk.PeerError, "rank 0", "TypeError")


def test_a_refusal_ends_an_agreement():
    def program(comm):
        if comm.rank == 0:
            comm.empty(-1)
        else:
            comm.empty(5)

    results = outcomes(2, program)
    assert isinstance(results[0], ValueError)
    all_are(results[1:], mk.PeerError, "rank 0", "negative dimensions")


def test_a_lost_peer_ends_waits_at_once(monkeypatch):
    monkeypatch.setattr(lifetime, "lost", set())  # or this process would not end as others do

    def program(comm):
        mk.allgather_gemm(A, B, comm=comm)
        if comm.rank == 1:
            time.sleep(0.2)
            for rank in (0, 2):
                lifetime.Lost(comm._runtime.calls.pages, rank, comm._runtime.calls.signals)(1)
            return
        mk.allgather_gemm(A, B, comm=comm)

    began = time.monotonic()
    results = outcomes(3, program, entry_timeout=8)
    assert time.monotonic() - began < 5
    all_are(results[::2], mk.PeerLostError, "rank 1")
    assert lifetime.lost


def test_failure_of_one_pair_ends_the_others_waits():
    """Rank 0 gives up on rank 1 after 0.3 s; rank 2, with no limit of its own, hears of it."""

    def program(comm):
        if comm.rank == 1:
            time.sleep(1.5)
            return
        if comm.rank == 2:
            comm._runtime.world.struct.entry_timeout_ns = 0
            comm._runtime.world.update()
            comm._runtime._agreements._entry_seconds = 0
        mk.allgather_gemm(A, B, comm=comm)

    def warm_program(comm):
        mk.allgather_gemm(A, B, comm=comm)
        program(comm)

    for body in (program, warm_program):
        began = time.monotonic()
        results = outcomes(3, body, entry_timeout=0.3)
        assert time.monotonic() - began < 5
        all_are(results[::2], mk.TimeoutError, "rank 0 waited", "rank 1")


def test_a_peer_that_has_closed_is_not_waited_for():
    def program(comm):
        mk.allgather_gemm(A, B, comm=comm)
        if comm.rank == 1:
            comm.close()
            return
        mk.allgather_gemm(A, B, comm=comm)

    began = time.monotonic()
    results = outcomes(2, program, entry_timeout=8)
    assert time.monotonic() - began < 5
    all_are(results[:1], mk.PeerLostError, "rank 1 has closed")


def test_close_reports_a_failure_once():
    def program(comm):
        if comm.rank == 0:
            with pytest.raises(mk.TimeoutError):
                mk.allgather_gemm(A, B, comm=comm)
            for call in (comm.synchronize, comm.barrier, lambda: comm.empty(3)):
                with pytest.raises(mk.TimeoutError, match="rank 1"):
                    call()
            with pytest.raises(mk.TimeoutError, match="rank 1"):
                comm.close()
            comm.close()
            with pytest.raises(ValueError, match="closed communicator"):
                comm.barrier()

    assert outcomes(2, program, entry_timeout=0.2) == [None, None]


def test_a_new_communicator_works_after_a_failure():
    def main(mpi):
        comm = mk.Communicator(mpi, entry_timeout=0.2)
        if comm.rank == 0:
            with pytest.raises(mk.TimeoutError):
                mk.allgather_gemm(A, B, comm=comm)
        else:
            time.sleep(0.5)
        with pytest.raises(mk.TimeoutError):
            comm.close()
        with mk.Communicator(mpi) as again:
            np.testing.assert_array_equal(mk.allgather_gemm(A, B, comm=again), 6.0)

    mk.LocalWorld(2).run(main)


def test_a_late_rank_within_the_deadline_is_waited_for():
    def program(comm):
        mk.allgather_gemm(A, B, comm=comm)
        if comm.rank == 1:
            time.sleep(0.5)
        return mk.allgather_gemm(A, B, comm=comm)

    for out in outcomes(2, program, entry_timeout=20, progress_timeout=0.2):
        np.testing.assert_array_equal(out, 6.0)


def test_who_waits_long_leaves_the_cores_to_others():
    def program(comm):
        options = mk.Options(split=(8, 1))
        mk.allgather_gemm(A, B, comm=comm, options=options)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
        if comm.rank == 1:
            time.sleep(0.3)
        naps = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - before
        mk.allgather_gemm(A, B, comm=comm, options=options)
        return naps

    _, naps = outcomes(2, program)
    assert naps < 8 * 600


def test_no_deadline_is_no_deadline():
    def program(comm):
        if comm.rank == 1:
            time.sleep(0.7)
        return mk.allgather_gemm(A, B, comm=comm)

    for out in outcomes(2, program, entry_timeout=0, progress_timeout=0):
        np.testing.assert_array_equal(out, 6.0)


def test_a_rank_that_is_slow_to_plan_is_waited_for(monkeypatch):
    """Compile time counts against no deadline."""
    from mkernel_cp.targets import host as module

    class Slow(module.HostKernel):
        def __init__(self, *args):
            if threading.current_thread().name == "rank 1":
                time.sleep(1.0)
            super().__init__(*args)

    monkeypatch.setattr(module, "HostKernel", Slow)

    def program(comm):
        return mk.allgather_gemm(A, B, comm=comm)

    for out in outcomes(2, program, entry_timeout=0.4, progress_timeout=0.4):
        np.testing.assert_array_equal(out, 6.0)


def test_one_ranks_failure_to_plan_is_raised_by_all_and_leaves_the_communicator_usable(monkeypatch):
    from mkernel_cp.targets import host as module

    class Broken(module.HostKernel):
        def __init__(self, *args):
            if threading.current_thread().name == "rank 1" and broken:
                raise mk.CompileError("no space left")
            super().__init__(*args)

    monkeypatch.setattr(module, "HostKernel", Broken)
    broken = True

    def program(comm):
        nonlocal broken
        with pytest.raises(mk.CompileError, match="rank 1: no space left"):
            mk.allgather_gemm(A, B, comm=comm)
        comm.barrier()
        broken = False
        comm.barrier()
        return mk.allgather_gemm(A, B, comm=comm)

    for out in outcomes(2, program):
        np.testing.assert_array_equal(out, 6.0)


def test_out_of_memory_on_one_rank_is_raised_by_all_and_leaves_the_communicator_usable():
    def program(comm):
        size = 1 << 60 if comm.rank == 1 else 10
        with pytest.raises(mk.OutOfMemoryError, match="rank 1"):
            comm.empty(size, np.uint8)
        comm.empty(100)
        np.testing.assert_array_equal(mk.allgather_gemm(A, B, comm=comm), 6.0)

    assert outcomes(2, program) == [None, None]


def test_worlds_of_one_rank_need_no_peer():
    def program(comm):
        return mk.allgather_gemm(A, B, comm=comm)

    np.testing.assert_array_equal(worlds.run(1, program, entry_timeout=0.001)[0], 6.0)


def test_a_second_thread_is_refused_while_a_call_runs():
    def program(comm):
        mk.allgather_gemm(A, B, comm=comm)
        if comm.rank == 1:
            time.sleep(0.5)
        elif comm.rank == 0:
            refused = []

            def intrude():
                time.sleep(0.2)
                for call in (comm.barrier, lambda: mk.allgather_gemm(A, B, comm=comm)):
                    with pytest.raises(mk.ConcurrentCallError, match="another thread"):
                        call()
                    refused.append(call)

            thread = threading.Thread(target=intrude)
            thread.start()
            out = mk.allgather_gemm(A, B, comm=comm)
            thread.join()
            assert len(refused) == 2
            return out
        return mk.allgather_gemm(A, B, comm=comm)

    for out in outcomes(2, program):
        np.testing.assert_array_equal(out, 6.0)


def test_tracebacks_of_later_calls_do_not_pile_up():
    def program(comm):
        depths = []
        for _ in range(5):
            with pytest.raises(mk.ArgumentMismatchError) as raised:
                mk.allgather_gemm(*HALF, comm=comm, dtype=(np.float16, np.float32)[comm.rank])
            depths.append(len(raised.traceback))
        return depths

    for depths in outcomes(2, program):
        assert len(set(depths[1:])) == 1


def test_launches_at_once_are_told_apart():
    """As graphs that are replayed at once make them: here one seems never to have ended."""

    def program(comm):
        mk.allgather_gemm(A, B, comm=comm)
        if comm.rank == 1:
            word = comm._runtime._signal_pages[comm.rank].running_word
            ctypes.c_uint64.from_address(word).value = 1
        mk.allgather_gemm(A, B, comm=comm)

    all_are(outcomes(3, program), mk.ConcurrentCallError, "rank 1", "one after the other")


def test_a_long_wait_says_whom_it_is_for(caplog):
    def program(comm):
        mk.allgather_gemm(A, B, comm=comm)
        if comm.rank == 0:
            calls = comm._runtime.calls
            calls.pages[0].set_text(calls.signals.generation + 1, "the next call")
            calls.tell_who_is_awaited(31.2)

    worlds.run(2, program)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    said = record.getMessage()
    assert said.startswith("rank 0 has waited 31 s in synchronize(), up to call 5 (the next call)")
    assert "rank 1 has got as far as call 4 (allgather_gemm(" in said


def test_two_communicators_called_in_another_order_end_in_the_deadline():
    def main(mpi):
        comms = [mk.Communicator(mpi, entry_timeout=0.5) for _ in range(2)]
        order = comms if comms[0].rank == 0 else comms[::-1]
        with pytest.raises(mk.TimeoutError, match="same calls"):
            mk.allgather_gemm(A, B, comm=order[0])
        both_have_failed.wait(60)
        for comm in comms:
            with contextlib.suppress(mk.Error):
                comm.close()

    both_have_failed = threading.Barrier(2)
    mk.LocalWorld(2).run(main)


def test_two_threads_never_get_a_wrong_result():
    """One of them is refused, at whatever moment it comes."""

    def program(comm):
        rng = np.random.default_rng(comm.rank)
        a, b = rng.standard_normal((300, 400)), rng.standard_normal((400, 8))
        expected, outcome = None, {"right": 0, "refused": 0}
        step = mk.AllGatherGemm(a, b, comm=comm)
        expected = step(a, b)

        def call():
            for _ in range(40):
                try:
                    assert (step(a, b) == expected).all()
                    outcome["right"] += 1
                except mk.ConcurrentCallError:
                    outcome["refused"] += 1

        threads = [threading.Thread(target=call) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return outcome

    (outcome,) = outcomes(1, program)
    assert sum(outcome.values()) == 80
    assert outcome["right"]


@pytest.mark.parametrize("other", ["barrier", "empty", "cold"])
def test_a_refusal_is_noticed_by_an_agreement_though_the_rank_goes_on(other):
    def program(comm):
        with mk.AllGatherGemm(A, B, comm=comm) as step:
            step(A, B)
            if comm.rank == 0:
                with pytest.raises(ValueError):
                    step(A[:3], B)
                step(A, B)
            elif other == "barrier":
                comm.barrier()
            elif other == "empty":
                comm.empty(3)
            else:
                mk.allgather_gemm(A[:2], B, comm=comm)

    began = time.monotonic()
    results = outcomes(2, program)
    assert time.monotonic() - began < 5
    all_are(results, mk.PeerError, "rank 0", "this plan is for")


def test_what_fails_before_the_launch_is_told_to_the_peers(monkeypatch):
    def program(comm):
        step = mk.AllGatherGemm(A, B, comm=comm)
        step(A, B)
        if comm.rank == 1:
            monkeypatch.setattr(comm._runtime.machine, "begin", lambda: 1 / 0)
        step(A, B)

    began = time.monotonic()
    results = outcomes(2, program)
    assert time.monotonic() - began < 5
    assert isinstance(results[1], ZeroDivisionError)
    all_are(results[:1], mk.PeerError, "rank 1", "ZeroDivisionError")


def note_fault(comm, rank):
    """Write what a kernel would, which has found too many rows for a rank."""
    fault = comm._runtime.calls.pages[comm.rank].words.fault
    fault.generation, fault.rank, fault.values[:] = comm._runtime.calls.generation, rank, (9, 4, 0)
    fault.problem = Problem.CAPACITY


def test_wrong_data_that_are_seen_late_are_told_by_a_call_that_is_made_all_the_same():
    """Each rank sees them when it does; nobody waits in vain for one that has raised."""

    def program(comm):
        comm.barrier()
        for seen in range(3):
            for call in range(3):
                if call == seen * (comm.rank + 1) % 3:
                    note_fault(comm, 1)
                    with pytest.raises(mk.CapacityError, match="rank 1 would get 9"):
                        mk.allgather_gemm(A, B, comm=comm)
                else:
                    np.testing.assert_array_equal(mk.allgather_gemm(A, B, comm=comm), 6)
            note_fault(comm, 1)
            with pytest.raises(mk.CapacityError, match="would get 9 rows, and has room for 4"):
                comm.synchronize()
            comm.barrier()
        note_fault(comm, 1)
        with pytest.raises(mk.CapacityError, match="would get 9 rows"):
            comm.close()

    assert outcomes(3, program) == [None] * 3


@pytest.mark.parametrize("call", ["cold", "odd strides"])
def test_a_given_output_is_nan_wherever_a_call_failed(call):
    def program(comm):
        out = np.zeros((8, 5), [("pad", "u1"), ("x", "f8")])["x"]
        if call == "odd strides":
            mk.allgather_gemm(A, B, comm=comm)
        else:
            out = np.zeros((8, 5))
        if comm.rank == 0:
            with pytest.raises(mk.TimeoutError):
                mk.allgather_gemm(A, B, comm=comm, out=out)
            assert np.isnan(out[4:]).all()
            own = out[:4]
            assert (np.isnan(own) | (own == 6)).all()

    assert outcomes(2, program, entry_timeout=0.3) == [None, None]


@pytest.mark.parametrize("refusals", [1, 15, 16, 40])
def test_any_number_of_refusals_is_noticed(refusals):
    def program(comm):
        if comm.rank == 0:
            for _ in range(refusals):
                with pytest.raises(ValueError):
                    comm.empty(-1)
        else:
            time.sleep(0.2)
        comm.empty(5)
        comm.barrier()
        mk.allgather_gemm(A, B, comm=comm)

    began = time.monotonic()
    results = outcomes(2, program)
    assert time.monotonic() - began < 5
    all_are(results, mk.PeerError, "rank 0")


def test_close_is_refused_while_a_call_runs():
    def program(comm):
        mk.allgather_gemm(A, B, comm=comm)
        refused = []

        def intrude():
            time.sleep(0.2)
            with pytest.raises(mk.ConcurrentCallError):
                comm.close()
            refused.append(True)

        if comm.rank == 1:
            time.sleep(0.5)
            return mk.allgather_gemm(A, B, comm=comm)
        thread = threading.Thread(target=intrude)
        thread.start()
        out = mk.allgather_gemm(A, B, comm=comm)
        thread.join()
        assert refused
        return out

    for out in outcomes(2, program):
        np.testing.assert_array_equal(out, 6.0)


def test_close_within_a_call_is_refused():
    def program(comm):
        with pytest.raises(mk.ConcurrentCallError, match="within a call"):
            comm._runtime.agree("to close", comm.close)
        return mk.allgather_gemm(A, B, comm=comm)

    for out in outcomes(2, program):
        np.testing.assert_array_equal(out, 6.0)


def test_a_local_rank_that_raises_is_not_waited_for():
    def main(mpi):
        comm = mk.Communicator(mpi, entry_timeout=20)
        comm.barrier()
        if comm.rank == 1:
            raise RuntimeError("of its own")
        with pytest.raises(mk.PeerLostError, match="rank 1"):
            mk.allgather_gemm(A, B, comm=comm)
        with contextlib.suppress(mk.Error):
            comm.close()

    began = time.monotonic()
    with pytest.raises(RuntimeError, match="of its own"):
        mk.LocalWorld(2).run(main)
    assert time.monotonic() - began < 8
