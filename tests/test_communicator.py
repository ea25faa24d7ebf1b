"""Communicators: what they say, arrays in segments, agreements, and their ends."""

import contextlib
import ctypes
import gc
import itertools
import os
import re
import threading
import time
import weakref
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import worlds
from launcher import mpirun

import mkernel_cp as mk
from mkernel_cp import memory
from mkernel_cp.failure import Awaited, Reason
from mkernel_cp.host_pages import abort, write_record
from mkernel_cp.memory import Segment, extent

A, B = np.ones((4, 6)), np.ones((6, 5))


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name in ("TARGET", "NODES", "TIMEOUT"):
        monkeypatch.delenv(f"MKERNEL_{name}", raising=False)


def outcomes(size, program, **options):
    """Run a program on a communicator of every rank; return its results or exceptions."""

    def main(mpi):
        try:
            with mk.Communicator(mpi, **options) as comm:
                return program(comm)
        except Exception as error:
            return error

    return mk.LocalWorld(size).run(main)


def constructions(size, *options_of):
    """Make a communicator with options of each rank (the last for the rest); return what came."""

    def main(mpi):
        try:
            mk.Communicator(mpi, **options_of[min(mpi.Get_rank(), len(options_of) - 1)]).close()
        except Exception as error:
            return error

    return mk.LocalWorld(size).run(main)


@contextlib.contextmanager
def rescued(comm, seconds=4.0):
    """End a wait that would last for ever, by a TimeoutError that no test here expects."""

    def end():
        page = comm._runtime.calls.pages[comm.rank]
        awaited = Awaited.AGREEMENT
        write_record(page, by_watcher=True, reason=Reason.PROGRESS_TIMEOUT, awaited=awaited)
        abort([page], comm.rank, by_watcher=True)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def start(array):
    return extent(array)[0]


def number_of_segments(comm):
    return len(comm._runtime.memory.segments.pointers)


def peers_bytes(comm, array):
    """What every rank's array holds, read as a kernel of this rank would read it."""
    segments = comm._runtime.memory.segments
    place = segments.locate(*extent(array))
    places = comm._runtime.agree("places", lambda: (place.segment, place.offset, array.nbytes))
    return [
        ctypes.string_at(int(segments.pointers[segment, rank]) + offset, nbytes)
        for rank, (segment, offset, nbytes) in enumerate(places)
    ]


# --- what it says of itself ---------------------------------------------------------------------


@pytest.mark.parametrize("size", worlds.SIZES)
def test_rows_are_array_splits(size):
    extents = [0, 1, 2, 3, 4, 5, 7, 100, 101, 1 << 40]

    def program(comm):
        return [(comm.row_counts(m), comm.rows(m)) for m in extents]

    results = worlds.run(size, program)
    for index, m in enumerate(extents):
        counts = {rank[index][0] for rank in results}
        assert len(counts) == 1
        slices = [rank[index][1] for rank in results]
        assert [part.stop - part.start for part in slices] == list(*counts)
        assert [part.start for part in slices] == [0, *(part.stop for part in slices[:-1])]
        assert slices[-1].stop == m
        if m <= 101:
            parts = np.array_split(np.arange(m), size)
            for part, expected in zip(slices, parts, strict=True):
                np.testing.assert_array_equal(np.arange(m)[part], expected)


def test_rows_of_what_is_no_extent_are_refused():
    def program(comm):
        for call in (comm.rows, comm.row_counts):
            with pytest.raises(ValueError, match="-1"):
                call(-1)
            for wrong in (True, 2.0, "3", np.array([2])):
                with pytest.raises(TypeError, match="use an integer"):
                    call(wrong)

    worlds.run(2, program)


def test_attributes_and_repr():
    def program(mpi):
        comm = mk.Communicator(mpi, target="host")
        assert (comm.rank, comm.size) == (mpi.Get_rank(), 3)
        assert (comm.node, comm.num_nodes) == (0, 1)
        assert (comm.local_rank, comm.local_size) == (comm.rank, 3)
        assert (comm.target, comm.device) == ("host", "cpu")
        assert comm.mpi is not mpi
        assert comm.mpi.allgather(comm.rank) == [0, 1, 2]
        assert comm.closed is False
        text = repr(comm)
        for part in (f"rank {comm.rank} of 3", "node 0 of 1", "target host", "device cpu"):
            assert part in text
        assert "closed" not in text
        comm.close()
        assert comm.closed is True
        assert "closed" in repr(comm)

    mk.LocalWorld(3).run(program)


def test_users_see_what_they_call_and_nothing_else():
    names = {name for name in dir(mk.Communicator) if not name.startswith("_")}
    arrays, calls = {"empty", "zeros", "asarray", "asnumpy"}, {"launch", "barrier", "synchronize"}
    assert names == {"closed", "close", "rows", "row_counts", *arrays, *calls}
    (state,) = worlds.run(1, lambda comm: {name for name in vars(comm) if name[0] != "_"})
    places = {"node", "num_nodes", "local_rank", "local_size"}
    assert state == {"mpi", "rank", "size", "target", "device", *places}


def test_context_manager_closes_also_behind_an_exception():
    def program(mpi):
        with mk.Communicator(mpi) as comm:
            assert isinstance(comm, mk.Communicator)
            assert not comm.closed
        assert comm.closed
        with pytest.raises(KeyError, match="mine"), mk.Communicator(mpi) as comm:
            raise KeyError("mine")
        assert comm.closed

    mk.LocalWorld(2).run(program)


# --- arrays -------------------------------------------------------------------------------------

DTYPES = ["u1", "?", "f2", "f4", "f8", "c16", ">i4", "M8[s]", ml_dtypes.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("order", ["C", "F"])
def test_empty_has_the_asked_shape_dtype_and_order(dtype, order):
    shapes = [(), 5, (5,), [2, 3], (0,), (4, 0, 3), np.int64(3), (3, 1, 4)]

    def program(comm):
        for shape in shapes:
            array, model = comm.empty(shape, dtype, order), np.empty(shape, dtype, order)
            assert type(array) is np.ndarray
            assert (array.shape, array.dtype) == (model.shape, model.dtype)
            assert array.strides == model.strides or not array.size
            assert array.flags.c_contiguous == model.flags.c_contiguous
            assert array.flags.f_contiguous == model.flags.f_contiguous
            assert array.flags.writeable
            assert array.flags.aligned
            assert comm._runtime.memory.holds(array) == bool(array.size)
        assert comm.empty(3).dtype == np.float64

    worlds.run(2, program)


@pytest.mark.parametrize("dtype", [*DTYPES, "M8", "S3", "U2", "V4", "u1,S3,2f4"], ids=str)
def test_zeros_are_zeros_also_in_used_memory(dtype):
    def program(comm):
        for shape in ((), (0, 2), (7, 3)):
            comm.empty(4096, np.uint8)[...] = 0xFF
            array = comm.zeros(shape, dtype, "F")
            assert (array.shape, array.dtype) == (shape, np.dtype(dtype))
            assert array.tobytes() == np.zeros(shape, dtype).tobytes()

    assert outcomes(2, program) == [None, None]


def test_shapes_and_dtypes_may_differ_by_rank_and_peers_see_the_contents():
    kinds = [((3, 5), "f8"), ((1000, 700), "f4"), ((), ml_dtypes.bfloat16), ((2, 2), "u1")]

    def program(comm):
        shape, dtype = kinds[comm.rank]
        array = comm.empty(shape, dtype, "CF"[comm.rank % 2])
        for value in (3, 4):
            array[...] = value + comm.rank
            comm.barrier()
            for rank, data in enumerate(peers_bytes(comm, array)):
                shape, dtype = kinds[rank]
                assert data == np.full(shape, value + rank, dtype).tobytes()
            comm.barrier()

    worlds.run(4, program)


def test_some_ranks_may_ask_for_nothing():
    def program(comm):
        array = comm.zeros((comm.rank, 5))
        array[...] = comm.rank
        return [np.frombuffer(data).tolist() for data in peers_bytes_or_none(comm, array)]

    def peers_bytes_or_none(comm, array):
        return comm._runtime.agree("bytes", array.tobytes)

    assert worlds.run(3, program) == [[[], [1.0] * 5, [2.0] * 10]] * 3


class _Subclass(np.ndarray):
    pass


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (np.arange(12.0).reshape(3, 4), None),
        (np.asfortranarray(np.arange(12.0).reshape(3, 4)), None),
        (np.arange(24.0).reshape(4, 6)[::2, 1:4], None),
        (np.arange(24.0).reshape(4, 6)[:, 1:4].T, None),
        (np.arange(12)[::-1], None),
        (np.array(2.5), None),
        (np.empty((0, 4), ml_dtypes.bfloat16), None),
        (np.arange(6, dtype=ml_dtypes.bfloat16), np.float32),
        ([[1, 2], [3, 4]], np.float16),
        (7, ml_dtypes.bfloat16),
        (np.arange(6.0).view(_Subclass), None),
    ],
    ids=lambda value: f"{type(value).__name__}-{np.shape(value)}",
)
def test_asarray_copies_what_is_elsewhere(value, dtype):
    def program(comm):
        model = np.asarray(value, dtype)
        array = comm.asarray(value, dtype)
        assert type(array) is np.ndarray
        assert (array.shape, array.dtype) == (model.shape, model.dtype)
        np.testing.assert_array_equal(array, model)
        assert not np.shares_memory(array, model)
        assert comm._runtime.memory.holds(array) == bool(array.size)
        # "A copy has the order of `a`, without gaps": NumPy's K order, for axes that run forward.
        if min(model.strides, default=0) >= 0:
            assert array.strides == model.copy(order="K").strides or not array.size
        again = comm.asarray(array)
        assert again is array or not array.size

    worlds.run(2, program)


def test_asarray_returns_what_is_there_already():
    def program(comm):
        array = comm.zeros((8, 9))
        for view in (array, array[2:5], array[:, ::3], array.T, array[7, 8], array[7:8, 8:9]):
            view = np.asarray(view) if np.ndim(view) else array[7:8, 8]
            before = number_of_segments(comm)
            assert comm.asarray(view) is view
            assert number_of_segments(comm) == before
        scalar = comm.zeros(())
        assert comm.asarray(scalar) is scalar
        assert comm.asarray(array, np.float32) is not array

    worlds.run(2, program)


def test_asarray_may_copy_on_some_ranks_only():
    def program(comm):
        shared = comm.zeros((50, 50))
        plain = np.full((40, 70 + comm.rank), 1.0 + comm.rank)
        for copying in ({0}, {1}, {0, 2}, {0, 1, 2}, set()):
            own = plain if comm.rank in copying else shared
            array = comm.asarray(own)
            assert (array is own) == (comm.rank not in copying)
            for rank, data in enumerate(peers_bytes(comm, array)):
                shape = (40, 70 + rank) if rank in copying else (50, 50)
                value = 1.0 + rank if rank in copying else 0.0
                assert data == np.full(shape, value).tobytes()
            comm.barrier()

    worlds.run(3, program)


def test_an_array_of_another_communicator_is_elsewhere():
    def program(mpi):
        with mk.Communicator(mpi) as first, mk.Communicator(mpi) as second:
            array = first.zeros(10)
            assert not second._runtime.memory.holds(array)
            assert second.asarray(array) is not array
            assert first.asarray(array) is array

    mk.LocalWorld(2).run(program)


def test_arrays_outlive_the_communicator():
    def program(comm):
        first, second = comm.asarray(np.arange(100.0)), comm.empty((3, 3), order="F")
        second[...] = comm.rank
        return first[10:], second

    for rank, (first, second) in enumerate(worlds.run(3, program)):
        gc.collect()
        np.testing.assert_array_equal(first, np.arange(10.0, 100))
        np.testing.assert_array_equal(second, rank)
        first += 1
        np.testing.assert_array_equal(first, np.arange(11.0, 101))


def test_memory_is_used_again_when_the_last_view_is_gone():
    def program(comm):
        comm.barrier()
        array = comm.empty((100, 100))
        place, view = start(array), array[50:, ::2]
        del array
        assert start(comm.empty((100, 100))) != place
        view[...] = 1.0
        del view
        gc.collect()
        assert start(comm.empty((100, 100))) == place
        cycle = [comm.empty((100, 100))]
        assert start(cycle[0]) == place
        cycle.append(cycle)
        del cycle
        comm.barrier()  # a collection that is under way would miss it, and keep others out
        comm._runtime.agree("collected", gc.collect)
        assert start(comm.empty((100, 100))) == place

    worlds.run(2, program)


def test_rounds_of_allocating_and_freeing_take_no_more_memory():
    def program(comm):
        rng = np.random.default_rng(comm.rank)
        held, counts = [], []
        for step in range(500):
            array = comm.empty(int(rng.integers(0, 60_000)), np.uint8)
            array[...] = step % 251
            held.append((array, step % 251))
            del array
            if len(held) > 8:
                held.pop(int(rng.integers(len(held))))
            counts.append(number_of_segments(comm))
        for array, value in held:
            assert (array == value).all()
        return counts

    for counts in worlds.run(2, program):
        assert counts == [1] * 500


def test_live_arrays_never_overlap_whenever_a_collector_runs():
    def program(comm):
        rng = np.random.default_rng(10 + comm.rank)
        live = []
        for step in range(120):
            array = comm.empty(int(rng.integers(1, 300_000)), np.uint8)
            array[...] = step
            # Half of them are in cycles, so only the collector frees them, in any thread.
            live.append([array, step])
            if step % 2:
                live[-1].append(live[-1])
            del array
            while len(live) > 5:
                live.pop(int(rng.integers(len(live))))
            if rng.random() < 0.3:
                gc.collect()
            for array, value, *_ in live:
                assert array.min() == array.max() == value
            del array
        return number_of_segments(comm)

    stop = threading.Event()

    def collect():
        while not stop.wait(2e-3):
            gc.collect()

    collector = threading.Thread(target=collect)
    collector.start()
    try:
        results = worlds.run(3, program)
    finally:
        stop.set()
        collector.join()
    assert max(results) < 30


@pytest.mark.parametrize(
    ("kind", "text", "arguments"),
    [
        (ValueError, "negative", (-1,)),
        (ValueError, "negative", ((3, -2),)),
        (TypeError, None, (2.5,)),
        (TypeError, None, ((2.5, 3),)),
        *((TypeError, "use an integer", (shape,)) for shape in (True, (2, False), np.True_)),
        (TypeError, None, ("12",)),
        (ValueError, "dimension", ((1,) * 65,)),
        (ValueError, "dimension", ((0, 1 << 70),)),
        (TypeError, "objects cannot be shared", (3, object)),
        (TypeError, "objects cannot be shared", (3, [("x", "f8"), ("y", "O")])),
        (TypeError, "no such type", (3, "no such type")),
        (ValueError, "'K'.* use 'C' or 'F'", (3, "f8", "K")),
        (ValueError, "use 'C' or 'F'", (3, "f8", None)),
    ],
    ids=lambda value: str(value)[:20],
)
def test_wrong_shapes_dtypes_and_orders(kind, text, arguments):
    def everybody(comm):
        for call in (comm.empty, comm.zeros):
            with pytest.raises(kind, match=text):
                call(*arguments)
        assert not comm.closed
        assert comm.zeros(5).sum() == 0.0

    def one(comm):
        if comm.rank == 1:
            return comm.empty(*arguments)
        return comm.empty(3)

    assert outcomes(2, everybody) == [None, None]
    results = outcomes(2, one)
    assert isinstance(results[1], kind), results
    assert isinstance(results[0], mk.PeerError), results


def test_asarray_refuses_objects():
    def program(comm):
        with pytest.raises(TypeError, match="objects cannot be shared"):
            comm.asarray(np.array([object()]))
        with pytest.raises(ValueError, match="convert"):
            comm.asarray(["text"], np.float64)
        assert comm.asarray([1.0]).tolist() == [1.0]

    worlds.run(2, program)


def test_too_large_an_operand_leaves_earlier_plans_usable():
    def program(comm):
        step = mk.AllGatherGemm(A, B, comm=comm)
        mk.allgather_gemm(A, B, comm=comm)
        enormous = np.broadcast_to(1.0, (1 << 42, 6))
        for _ in range(2):
            with pytest.raises(mk.OutOfMemoryError, match="rank 0: cannot allocate"):
                mk.allgather_gemm(enormous, B[:, :0], comm=comm)
            np.testing.assert_array_equal(step(A, B), 6.0)
            np.testing.assert_array_equal(mk.allgather_gemm(A, B, comm=comm), 6.0)

    assert outcomes(2, program) == [None, None]


# --- construction -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"target": "gpu"}, ValueError, "'gpu'.*auto, cuda, host"),
        ({"target": None}, ValueError, "None.*auto, cuda, host"),
        ({"target": "cuda"}, mk.ConfigurationError, "threads share no GPU"),
        ({"nodes": 2, "nics": ["mlx5_0"]}, mk.ConfigurationError, "no network card mlx5_0.*soft0"),
        ({"transport": "tcp"}, ValueError, "'tcp'.*auto, verbs, efa"),
        ({"nics": "soft0"}, TypeError, "names of network cards"),
        ({"nodes": 0}, ValueError, "nodes=0.*1 to 3"),
        ({"nodes": 4}, ValueError, "nodes=4.*1 to 3"),
        ({"nodes": (1, 1)}, ValueError, "add up to the 3 ranks"),
        ({"nodes": (4, -1)}, ValueError, "add up to the 3 ranks"),
        ({"nodes": ()}, ValueError, "add up to the 3 ranks"),
        ({"nodes": 1.0}, TypeError, "nodes=1.0: use an integer or a sequence of integers"),
        ({"nodes": True}, TypeError, "nodes=True: use an integer"),
        ({"nodes": (True, 2)}, TypeError, "True, 2.*use an integer"),
        ({"nodes": "12"}, TypeError, "nodes='12': use an integer"),
        ({"entry_timeout": -1}, ValueError, "entry_timeout=-1"),
        ({"progress_timeout": -0.5}, ValueError, "progress_timeout=-0.5"),
        ({"entry_timeout": float("nan")}, ValueError, "entry_timeout=nan"),
        ({"progress_timeout": float("inf")}, ValueError, "progress_timeout=inf"),
        ({"entry_timeout": 1e12}, ValueError, "entry_timeout"),
        ({"entry_timeout": "soon"}, ValueError, "entry_timeout"),
        ({"entry_timeout": [1]}, TypeError, "entry_timeout"),
        ({"entry_timeout": True}, TypeError, "entry_timeout=True: use a number of seconds"),
        ({"progress_timeout": np.False_}, TypeError, "progress_timeout=.*False.*: use a number"),
    ],
    ids=str,
)
@pytest.mark.parametrize("wrong", ["all", "last"])
def test_wrong_arguments_are_raised_alike_by_all_ranks(options, kind, text, wrong):
    results = constructions(3, options) if wrong == "all" else constructions(3, {}, {}, options)
    assert len({str(error) for error in results}) == 1, results
    if wrong == "last" and kind is mk.ConfigurationError:
        kind, text = mk.ArgumentMismatchError, "same arguments"  # a fault if all ranks want it
    for error in results:
        assert type(error) is kind, results
        assert re.search(text, str(error)), str(error)
    if kind is not mk.ConfigurationError:
        assert f"rank {0 if wrong == 'all' else 2}" in str(results[0])
    assert constructions(3, {}) == [None] * 3


@pytest.mark.parametrize("nodes", [1, np.int64(1), (3,), [3], np.array([3])], ids=repr)
def test_one_node_may_be_said(nodes):
    assert constructions(3, {"nodes": nodes}) == [None] * 3


@pytest.mark.parametrize("option", ["entry_timeout", "progress_timeout"])
def test_different_timeouts_are_told_on_all_ranks(option):
    for error in constructions(3, {option: 5}, {option: 6}, {option: 5}):
        assert type(error) is mk.ArgumentMismatchError
        assert "rank 0" in str(error)
        assert "rank 1" in str(error)
        assert "6.0" in str(error)


@pytest.mark.parametrize(
    ("name", "value", "kind", "text"),
    [
        ("TIMEOUT", "soon", mk.ConfigurationError, "MKERNEL_TIMEOUT=soon"),
        ("TIMEOUT", "-1", mk.ConfigurationError, "MKERNEL_TIMEOUT=-1"),
        ("TIMEOUT", "1,2,3", mk.ConfigurationError, "MKERNEL_TIMEOUT=1,2,3"),
        ("TARGET", "gpu", mk.ConfigurationError, "MKERNEL_TARGET=gpu"),
        ("TARGET", "cuda", mk.ConfigurationError, "threads share no GPU"),
        ("NODES", "3", mk.ConfigurationError, "MKERNEL_NODES: nodes=3.*1 to 2"),
        ("NODES", "0", mk.ConfigurationError, "MKERNEL_NODES=0"),
        ("NODES", "1,1,1", mk.ConfigurationError, "add up to the 2 ranks"),
    ],
)
def test_wrong_variables_are_raised_by_all_ranks(monkeypatch, name, value, kind, text):
    monkeypatch.setenv(f"MKERNEL_{name}", value)
    results = constructions(2, {})
    assert [type(error) for error in results] == [kind] * 2
    assert str(results[0]) == str(results[1])
    assert re.search(text, str(results[0])), str(results[0])


def test_an_argument_wins_over_a_variable(monkeypatch):
    monkeypatch.setenv("MKERNEL_TARGET", "cuda")
    monkeypatch.setenv("MKERNEL_NODES", "2")
    assert constructions(2, {"target": "host", "nodes": 1}) == [None, None]


def late_call(comm):
    """A call and an agreement that rank 1 enters half a second late."""
    mk.allgather_gemm(A, B, comm=comm)
    for call in (lambda: mk.allgather_gemm(A, B, comm=comm), comm.barrier):
        if comm.rank == 1:
            time.sleep(0.5)
        call()


def test_the_variables_deadlines_are_taken_and_arguments_win(monkeypatch):
    monkeypatch.setenv("MKERNEL_TIMEOUT", "0.2")
    for error in outcomes(2, late_call):
        assert isinstance(error, mk.TimeoutError)
        assert "entry_timeout" in str(error)
    assert outcomes(2, late_call, entry_timeout=30) == [None, None]
    assert outcomes(2, late_call, entry_timeout=0) == [None, None]
    monkeypatch.setenv("MKERNEL_TIMEOUT", "30,7")
    deadlines = worlds.run(2, lambda comm: comm._runtime.world.struct.progress_timeout_ns)
    assert deadlines == [7 * 10**9] * 2
    for error in outcomes(2, late_call, entry_timeout=0.2):
        assert isinstance(error, mk.TimeoutError)


@pytest.mark.parametrize("seconds", ["18446744073.8", "1e11", "1e300"])
def test_an_enormous_deadline_of_the_variable_is_refused_or_kept(monkeypatch, seconds):
    """2 ** 64 ns and a little more are no short time."""
    monkeypatch.setenv("MKERNEL_TIMEOUT", f"{seconds},{seconds}")
    results = outcomes(2, late_call)
    refused = all(isinstance(error, ValueError) for error in results)
    assert refused or results == [None, None], results


# --- agreements ---------------------------------------------------------------------------------


def test_agree_gives_objects_of_any_size_to_all():
    rng = np.random.default_rng(0)
    values = [None, "text" * 100, {"array": rng.standard_normal(200_000)}, [(1, 2.5), b"\0" * 7]]

    def program(comm):
        for turn in range(8):
            own = values[(comm.rank + turn) % 4]
            found = comm._runtime.agree(f"turn {turn}", lambda own=own: own)
            assert len(found) == comm.size
            for rank, value in enumerate(found):
                expected = values[(rank + turn) % 4]
                if isinstance(expected, dict):
                    np.testing.assert_array_equal(value["array"], expected["array"])
                    value["array"][:] = np.nan  # a copy of this rank's own
                else:
                    assert value == expected

    worlds.run(4, program)


class _OfTwo(Exception):
    def __init__(self, first, second):
        super().__init__(first, second)


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        (ValueError("no good"), ValueError),
        (KeyError("no good"), KeyError),
        (mk.CompileError("no good"), mk.CompileError),
        (OSError(28, "no good"), OSError),
        (_OfTwo("no", "good"), mk.PeerError),
        (UnicodeDecodeError("utf-8", b"x", 0, 1, "no good"), mk.PeerError),
    ],
    ids=lambda value: getattr(value, "__name__", repr(value)),
)
def test_one_ranks_exception_is_raised_by_all_and_closes_nothing(raised, kind):
    def work(comm):
        if comm.rank == 1:
            raise raised
        return "well"

    def program(comm):
        for _ in range(2):
            with pytest.raises(kind, match="rank 1: ") as caught:
                comm._runtime.agree("to work", lambda: work(comm))
            assert type(caught.value) is kind
            assert "good" in str(caught.value)
            assert not comm.closed
        return comm._runtime.agree("to go on", lambda: comm.rank)

    assert outcomes(3, program) == [[0, 1, 2]] * 3


def test_of_several_exceptions_all_raise_the_lowest_ranks():
    def program(comm):
        def work():
            if comm.rank:
                raise (ValueError, KeyError, TypeError)[comm.rank](f"of {comm.rank}")

        with pytest.raises(KeyError, match=r"rank 1.*of 1"):
            comm._runtime.agree("to fail", work)

    worlds.run(3, program)


def test_a_result_that_cannot_be_sent_is_an_exception_like_any_other():
    def program(comm):
        with rescued(comm):
            comm._runtime.agree("to send", lambda: threading.Lock() if comm.rank == 1 else 5)

    for error in outcomes(3, program):
        assert isinstance(error, (TypeError, mk.PeerError)), error
        assert "lock" in str(error).lower()


def test_who_is_interrupted_in_an_agreement_is_not_waited_for():
    def work(comm):
        if comm.rank == 1:
            raise KeyboardInterrupt
        return 5

    def program(comm):
        with rescued(comm), contextlib.suppress(KeyboardInterrupt):
            comm._runtime.agree("to go on", lambda: work(comm))

    results = outcomes(3, program)
    for error in results[::2]:
        assert isinstance(error, mk.PeerError), results
        assert "rank 1" in str(error)
        assert "KeyboardInterrupt" in str(error)


def test_nobody_leaves_a_barrier_before_all_have_come():
    entered = np.zeros((40, 4), bool)

    def program(comm):
        rng = np.random.default_rng(comm.rank)
        for step in range(40):
            if rng.random() < 0.2:
                time.sleep(0.01 * rng.random())
            entered[step, comm.rank] = True
            comm.barrier()
            assert entered[step].all()

    worlds.run(4, program)


# --- several communicators ----------------------------------------------------------------------


def test_communicators_at_once_do_not_meet():
    rng = np.random.default_rng(4)
    data, b = rng.standard_normal((3, 4, 5, 7)), rng.standard_normal((7, 3))

    def use(comm, block, rank):
        shared = comm.asarray(block[rank])
        comm.barrier()
        members = comm._runtime.agree("members", lambda: rank)
        expected = np.vstack([block[member] for member in members]) @ b
        for a in (shared, block[rank]):
            np.testing.assert_allclose(mk.allgather_gemm(a, b, comm=comm), expected, atol=1e-12)
        return members

    def program(mpi):
        rank = mpi.Get_rank()
        halves, turned = mpi.Split(rank % 2, rank), mpi.Split(0, -rank)
        with (
            mk.Communicator(mpi) as whole,
            mk.Communicator(halves) as half,
            mk.Communicator(turned) as back,
            mk.Communicator(mpi.Split(rank)) as alone,
        ):
            for _ in range(3):
                assert use(whole, data[0], rank) == [0, 1, 2, 3]
                assert use(half, data[1], rank) == [rank % 2, rank % 2 + 2]
                assert use(alone, data[2], rank) == [rank]
                # One half is a call ahead of the other on its own communicator.
                if rank % 2:
                    use(half, data[2], rank)
                assert use(back, data[2], rank) == [3, 2, 1, 0]
                if rank % 2 == 0:
                    use(half, data[2], rank)
            back.close()
            assert use(half, data[0], rank) == [rank % 2, rank % 2 + 2]
            assert use(whole, data[2], rank) == [0, 1, 2, 3]

    mk.LocalWorld(4).run(program)


def test_fifty_communicators_of_many_worlds_leave_nothing():
    def program(mpi, rounds):
        for step in range(rounds):
            colors = np.random.default_rng([6, step]).integers(0, 3, 4)
            part = mpi.Split(int(colors[mpi.Get_rank()]), mpi.Get_rank())
            with mk.Communicator(part) as comm:
                assert comm.size == (colors == colors[mpi.Get_rank()]).sum()
                rows, k = 1 + 7 * (step % 5), 3 + step
                a = comm.asarray(np.full((rows, k), 1.0 + comm.rank))
                out = mk.allgather_gemm(a, np.ones((k, 2)), comm=comm)
                expected = np.repeat(np.arange(1.0, 1 + comm.size), rows) * k
                np.testing.assert_array_equal(out, np.column_stack([expected] * 2))

    def left():
        gc.collect()
        return len(os.listdir("/proc/self/fd")), memory_maps()

    def memory_maps():
        with open("/proc/self/maps") as maps:
            return sum("memfd:mkernel_cp" in line for line in maps)

    mk.LocalWorld(4).run(program, 2)
    before = left()
    mk.LocalWorld(4).run(program, 50)
    assert left() == before


@pytest.mark.parametrize("failing", range(1, 11))
def test_what_is_never_made_leaves_no_files(failing, monkeypatch):
    """Pages of three ranks, copies of those of the other host, and signals."""

    def create(nbytes):
        if next(made) == failing:
            raise mk.OutOfMemoryError("no memory")
        return whole(nbytes)

    made, whole = itertools.count(1), Segment.create
    monkeypatch.setattr(Segment, "create", create)
    files = len(os.listdir("/proc/self/fd"))

    def program(mpi):
        with pytest.raises(mk.OutOfMemoryError, match="no memory"):
            mk.Communicator(mpi)

    mk.LocalWorld(3, hosts=(2, 1)).run(program)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == files


# --- the end ------------------------------------------------------------------------------------


def test_close_may_be_called_again_and_calls_after_it_say_so():
    def program(mpi):
        comm = mk.Communicator(mpi)
        array = comm.zeros(3)
        step = mk.AllGatherGemm(A, B, comm=comm)
        mk.allgather_gemm(A, B, comm=comm)
        comm.close()
        comm.close()
        for call in (
            lambda: comm.empty(3),
            lambda: comm.zeros(3),
            lambda: comm.asarray(array),
            lambda: comm._runtime.agree("x", lambda: 1),
            comm.barrier,
            comm.synchronize,
            lambda: mk.allgather_gemm(A, B, comm=comm),
            lambda: mk.AllGatherGemm(A, B, comm=comm),
            lambda: step(A, B),
        ):
            for _ in range(2):
                with pytest.raises(ValueError, match="closed communicator"):
                    call()
        with pytest.raises(ValueError, match="closed communicator"), comm:
            comm.barrier()
        assert comm.rows(5).start == (0, 3)[comm.rank]
        assert array.tolist() == [0.0] * 3

    mk.LocalWorld(2).run(program)


def test_a_closed_plan_says_so():
    def program(comm):
        with mk.AllGatherGemm(A, B, comm=comm) as step:
            np.testing.assert_array_equal(step(A, B), 6.0)
        step.close()
        with pytest.raises(ValueError, match="closed"):
            step(A, B)
        np.testing.assert_array_equal(mk.allgather_gemm(A, B, comm=comm), 6.0)

    assert outcomes(2, program) == [None, None]


@pytest.mark.parametrize("waiting_in", ["agreement", "call"])
@pytest.mark.parametrize("planned", [False, True])
def test_peers_see_that_a_collected_communicator_is_gone(planned, waiting_in):
    """Soon, long before a deadline; a plan of the communicator makes it part of a cycle."""

    def use(comm):
        if planned or waiting_in == "call":
            mk.allgather_gemm(A, B, comm=comm)
        comm.barrier()

    def wait(comm):
        try:
            if waiting_in == "call":
                mk.allgather_gemm(A, B, comm=comm)
            else:
                comm.barrier()
        except mk.PeerLostError as error:
            return str(error)
        finally:
            with contextlib.suppress(mk.Error):
                comm.close()

    def main(mpi):
        comm = mk.Communicator(mpi, entry_timeout=20)
        use(comm)
        if mpi.Get_rank() != 1:
            return wait(comm)
        if not planned:
            comm._runtime.plans.clear()
        gone = weakref.ref(comm._runtime.calls)
        del comm
        for _ in range(100):  # one is not enough while a collection is under way elsewhere
            gc.collect()
            if gone() is None:
                break

    began = time.monotonic()
    results = mk.LocalWorld(3).run(main)
    assert time.monotonic() - began < 8
    assert results[1] is None
    for text in results[::2]:
        assert "rank 1 has closed" in text


def test_an_end_without_shared_memory_is_raised_by_all(monkeypatch):
    monkeypatch.setattr(memory, "available_memory", lambda: 100)
    results = constructions(2, {})
    assert [type(error) for error in results] == [mk.OutOfMemoryError] * 2
    assert "rank 0: cannot allocate" in str(results[1])


# --- segments -----------------------------------------------------------------------------------


def test_rooms_that_no_rank_uses_are_given_back_before_larger_ones_are_made():
    def program(comm):
        for mebibytes in range(3, 30, 3):
            array = comm.empty(mebibytes << 20, np.uint8)
            array[:] = 7
            del array
            gc.collect()
        return len(comm._runtime.memory._heap_numbers)

    assert worlds.run(3, program) == [1, 1, 1]


def test_the_ranks_of_a_node_share_its_memory():
    """Each request is smaller than what is available, but not all together."""
    share = memory.available_memory() * 2 // 3

    def program(comm):
        with pytest.raises(mk.OutOfMemoryError, match="together"):
            comm.empty(share, np.uint8)
        return comm.zeros(5).sum()

    assert worlds.run(2, program) == [0, 0]


@pytest.mark.mpi
def test_a_mapping_that_fails_leaves_the_next_ones_in_step():
    program = Path(__file__).parent / "programs" / "unmappable.py"
    result = mpirun(4, program)
    assert result.returncode == 0, result.stderr
    assert "in step" in result.stdout


@pytest.mark.mpi
@pytest.mark.parametrize("files", [1, 2, 3, 4])
def test_a_rank_that_cannot_be_set_up_is_named_by_all(files):
    """Wherever in the construction it is that the files are used up."""
    program = Path(__file__).parent / "programs" / "few_files.py"
    result = mpirun(3, program, files, timeout=30)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("Error rank 1") == 3, result.stdout
