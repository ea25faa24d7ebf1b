"""What only a GPU shows: streams, graphs, launches that do not wait, and failures found later."""

import contextlib
import itertools
import json
import time

import ml_dtypes
import numpy as np
import pytest
import worlds
from test_ring_attention import AttentionCase, blocks_of, counts_in, expected

import mkernel_cp as mk
from mkernel_cp import compiler
from mkernel_cp.arguments import Options

pytestmark = pytest.mark.gpu

SPIN = r"""
extern "C" __global__ void spin(long long nanoseconds) {
    long long start, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    do asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    while (now - start < nanoseconds);
}
"""


def spin(seconds):
    """Keep the current stream busy."""
    import cupy

    cupy.RawKernel(SPIN, "spin")((1,), (1,), (int(seconds * 1e9),))


def operands(comm, rows=40, k=30, n=20, seed=0, dtype=np.float64):
    """Operands in a segment and on this GPU, and the product, which is exact."""
    rng = np.random.default_rng(seed)
    a = rng.integers(-3, 4, (rows * comm.size, k)).astype(dtype)
    b = rng.integers(-3, 4, (k, n)).astype(dtype)
    own = worlds.put(comm, a[comm.rank * rows : (comm.rank + 1) * rows])
    return comm.asarray(own), worlds.put(comm, b), a @ b


def outcomes(program, **options):
    """Run a program that is to fail; return what each rank raised. A new communicator works."""
    mpi = worlds.gpu_world
    deadlines = {"entry_timeout": 2, "progress_timeout": 2}
    comm = mk.Communicator(mpi, target="cuda", oversubscribe=True, **{**deadlines, **options})
    start = time.monotonic()
    try:
        outcome = program(comm)
    except Exception as error:
        outcome = error
    took = time.monotonic() - start
    mpi.Barrier()
    with contextlib.suppress(mk.Error):
        comm.close()
    with mk.Communicator(mpi, target="cuda", oversubscribe=True) as comm:
        a, b, product = operands(comm)
        np.testing.assert_array_equal(mk.allgather_gemm(a, b, comm=comm).get(), product)
    assert max(mpi.allgather(took)) < 10
    return mpi.allgather(outcome)


def call_and_wait(comm, seed=0, **options):
    """One call of operands made before; what has not been finished of its result is NaN."""
    a, b, product = operands(comm, seed=seed)
    out = worlds.put(comm, np.zeros(product.shape))
    try:
        mk.allgather_gemm(a, b, comm=comm, out=out, **options)
        comm.synchronize()
    except mk.Error:
        wrong = out.get() != product
        assert np.isnan(out.get()[wrong]).all()
        raise


# --- the toolkit ----------------------------------------------------------------------------------


@pytest.mark.gpu(world=1)
@pytest.mark.parametrize("name", ["allgather_gemm", "ring_attention"])
def test_plain_cupy_compiles_a_kernel(name):
    import cupy

    source = compiler.kernel_source(name).read_text()
    options = ("-std=c++17", "-I" + mk.include_dir())
    module = cupy.RawModule(code=source, options=options)
    assert module.get_function(name).num_regs > 0


@pytest.mark.gpu(world=1)
def test_a_module_for_another_target_or_gpu_is_refused(tmp_path):
    path = tmp_path / "nothing.cu"
    path.write_text("#include <mkernel/roles.cuh>\n")

    def program(comm):
        with pytest.raises(mk.ConfigurationError, match="for target 'host'"):
            comm.launch(mk.Module(path, target="host").kernel("nothing"), 1)
        with pytest.raises(mk.CompileError, match="no kernel nothing"):
            comm.launch(mk.Module(path).kernel("nothing"), 1)
        with pytest.raises(mk.CompileError, match="compiled for sm_120"):
            comm.launch(mk.Module(path, arch="sm_120").kernel("nothing"), 1)

    worlds.run(1, program)


@pytest.mark.gpu(world=2)
def test_wrong_data_are_told_by_a_later_call_which_is_made_all_the_same():
    def program(comm):
        x, w = (worlds.put(comm, np.ones(shape, np.float16)) for shape in ((4, 8), (1, 8, 16)))
        right, wrong = (worlds.put(comm, np.full((4, 1), expert)) for expert in (1, 2))
        asked = {"comm": comm, "capacity": 8}
        rows, layout = mk.moe_dispatch_gemm(x, right, w, **asked)
        out = worlds.put(comm, np.full((8, 16), 7, np.float16))
        spin(0.5)
        mk.moe_dispatch_gemm(x, wrong, w, out=(out, layout), **asked)
        with pytest.raises(ValueError, match=r"rank 0 passes topk_idx\[0, 0\] = 2"):
            comm.synchronize()
        assert (out.get() == 7).all()
        assert int(layout.count) == 0
        rows, layout = mk.moe_dispatch_gemm(x, right, w, **asked)
        assert (layout.trim(rows).get() == 8).all()
        assert int(layout.count) == 8 * comm.rank

    worlds.run(2, program)


@pytest.mark.gpu(world=2)
@pytest.mark.parametrize("dtype", [np.float64, ml_dtypes.bfloat16])
def test_a_trace_has_all_ranks_on_one_clock(tmp_path, dtype):
    def program(comm):
        a, b, _ = operands(comm, 700, 256, 300, dtype=dtype)
        step = mk.AllGatherGemm(a, b, comm=comm)
        untraced = step(a, b)
        with mk.trace(tmp_path / "trace.json"):
            for _ in range(3):
                out = step(a, b)
        np.testing.assert_array_equal(worlds.get(comm, out), worlds.get(comm, untraced))
        plans = comm._runtime.agree("plans", lambda: step.plan)
        if comm.rank > 0:
            return
        file = json.loads((tmp_path / "trace.json").read_text())
        spans = [event for event in file["traceEvents"] if event["ph"] == "X"]
        copies = [span for span in spans if span["cat"] == "copy"]
        copied = sum(span["args"]["bytes"] for span in copies)
        assert copied == 3 * sum(plan.bytes_from_peers for plan in plans)
        for kind in ("compute", "store"):
            areas = [
                np.diff([s["args"]["rows"], s["args"]["columns"]])
                for s in spans
                if s["cat"] == kind
            ]
            assert sum(map(np.prod, areas)) == 3 * sum(plan.m * plan.n for plan in plans)
        begins = {
            (s["pid"], s["args"]["generation"]): s["ts"] for s in spans if s["cat"] == "launch"
        }
        # By so many may clocks be off: a GPU that others use too says late what it is.
        microseconds = max(20, 2 * file["otherData"]["clock_error_ns"] / 1000)
        for copy in copies:
            args = copy["args"]
            assert copy["ts"] > begins[args["source"], args["generation"]] - microseconds

    worlds.run(2, program)


# --- operands -------------------------------------------------------------------------------------


@pytest.mark.gpu(world=2)
def test_arrays_of_other_libraries_are_taken_without_a_copy():
    class Interface:
        def __init__(self, array):
            self.__cuda_array_interface__ = array.__cuda_array_interface__

    class DLPack:
        def __init__(self, array):
            self._array = array

        def __dlpack__(self, **keywords):
            return self._array.__dlpack__(**keywords)

        def __dlpack_device__(self):
            return self._array.__dlpack_device__()

    def program(comm):
        a, b, product = operands(comm)
        for kind in (Interface, DLPack):
            assert comm._runtime.machine.array("b", kind(b)).data.ptr == b.data.ptr
            out = worlds.put(comm, np.zeros(product.shape))
            mk.allgather_gemm(kind(a), kind(b), comm=comm, out=kind(out))
            np.testing.assert_array_equal(out.get(), product)

    worlds.run(2, program)


@pytest.mark.gpu(world=2)
def test_operands_that_are_none_are_refused_by_all_and_change_nothing():
    import cupy

    def program(comm):
        a, b, product = operands(comm)
        for wrong, kind, text in (
            ((a.get(), b), TypeError, "in host memory"),
            ((a, b.get()), TypeError, "in host memory"),
            ((a.tolist(), b), TypeError, "list"),
            ((a.astype(np.uint16), b.astype(np.uint16)), TypeError, "uint16.*bfloat16"),
            ((a.astype(complex), b.astype(complex)), TypeError, "complex128.*not allowed"),
            ((a, b.astype(np.float32)), TypeError, "float32"),
            ((a, b[1:]), ValueError, "columns"),
        ):
            with pytest.raises(kind, match=text):
                mk.allgather_gemm(*wrong, comm=comm)
        with pytest.raises(TypeError, match="__cuda_stream__"):
            mk.allgather_gemm(a, b, comm=comm, stream="null")
        if cupy.cuda.runtime.getDeviceCount() > 1:
            with cupy.cuda.Device((b.device.id + 1) % cupy.cuda.runtime.getDeviceCount()):
                elsewhere = cupy.ones(b.shape)
                with pytest.raises(ValueError, match="current device"):
                    mk.allgather_gemm(a, b, comm=comm)
            with pytest.raises(TypeError, match="copy it there"):
                mk.allgather_gemm(a, elsewhere, comm=comm)
        np.testing.assert_array_equal(mk.allgather_gemm(a, b, comm=comm).get(), product)

    worlds.run(2, program)


@pytest.mark.gpu(world=2)
def test_memory_that_is_not_there_is_refused_on_all_ranks():
    def program(comm):
        for _ in range(2):
            with pytest.raises(mk.OutOfMemoryError, match=r"rank 1.*bytes"):
                comm.empty(1 << 40 if comm.rank == 1 else 8, np.uint8)
        a, b, product = operands(comm)
        np.testing.assert_array_equal(mk.allgather_gemm(a, b, comm=comm).get(), product)

    worlds.run(2, program)


# --- streams and graphs ---------------------------------------------------------------------------


@pytest.mark.gpu(world=2)
def test_a_call_is_ordered_on_its_stream():
    import cupy

    class Foreign:
        def __init__(self, stream):
            self._stream = stream

        def __cuda_stream__(self):
            return 0, self._stream.ptr

    def program(comm):
        streams = [
            cupy.cuda.Stream(non_blocking=True),
            cupy.cuda.Stream(),
            cupy.cuda.Stream.null,
            cupy.cuda.Stream.ptds,
        ]
        ways = (None, lambda s: s, lambda s: s.ptr, Foreign)
        for seed, (stream, way) in enumerate(itertools.product(streams, ways)):
            a, b, product = operands(comm, seed=seed)
            right, out = a.copy(), cupy.zeros(product.shape)
            a[...] = np.nan
            cupy.cuda.Device().synchronize()
            with stream:
                spin(0.01)
                a[...] = right
                if way is None:
                    mk.allgather_gemm(a, b, comm=comm, out=out)
            if way is not None:
                mk.allgather_gemm(a, b, comm=comm, out=out, stream=way(stream))
            with stream:
                a[...] = np.nan
                result = out.copy()
                done = stream.record()
            consumer = cupy.cuda.Stream(non_blocking=True)
            consumer.wait_event(done)
            np.testing.assert_array_equal(result.get(stream=consumer), product)

    worlds.run(2, program)


@pytest.mark.gpu(world=2)
def test_a_call_returns_before_what_is_queued_has_run():
    def program(comm):
        a, b, product = operands(comm)
        out = worlds.put(comm, np.zeros(product.shape))
        mk.allgather_gemm(a.copy(), b, comm=comm, out=out)  # CuPy loads now what copies
        comm.synchronize()
        comm.barrier()
        spin(1.0)
        start = time.perf_counter()
        mk.allgather_gemm(a, b, comm=comm, out=out)
        plain = mk.allgather_gemm(a.copy(), b, comm=comm)
        took = time.perf_counter() - start
        np.testing.assert_array_equal(plain.get(), product)
        np.testing.assert_array_equal(out.get(), product)
        return took

    assert max(worlds.run(2, program)) < 0.005


@pytest.mark.gpu(world=2)
def test_a_captured_call_is_one_kernel():
    import cupy
    from cuda.bindings import driver

    def program(comm):
        a, b, product = operands(comm)
        out = worlds.put(comm, np.zeros(product.shape))
        step = mk.AllGatherGemm(a, b, comm=comm)
        step(a, b, out=out)
        out[...] = 0
        stream = cupy.cuda.Stream(non_blocking=True)
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        driver.cuStreamBeginCapture(stream.ptr, mode)
        step(a, b, out=out, stream=stream)
        _, graph = driver.cuStreamEndCapture(stream.ptr)
        _, _, count = driver.cuGraphGetNodes(graph)
        _, nodes, _ = driver.cuGraphGetNodes(graph, count)
        kinds = [driver.cuGraphNodeGetType(node)[1] for node in nodes]
        assert kinds == [driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL]

    worlds.run(2, program)


@pytest.mark.gpu(world=2)
def test_what_a_capture_cannot_hold_is_refused():
    import cupy

    def program(comm):
        a, b, product = operands(comm)
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            stream.begin_capture()
            with pytest.raises(mk.ConfigurationError, match="warm up first"):
                mk.allgather_gemm(a, b, comm=comm, out=cupy.zeros(product.shape))
            with contextlib.suppress(cupy.cuda.runtime.CUDARuntimeError):
                stream.end_capture()
            np.testing.assert_array_equal(mk.allgather_gemm(a, b, comm=comm).get(), product)
            stream.begin_capture()
            with pytest.raises(ValueError, match="out="):
                mk.allgather_gemm(a, b, comm=comm)
            with contextlib.suppress(cupy.cuda.runtime.CUDARuntimeError):
                stream.end_capture()
            np.testing.assert_array_equal(mk.allgather_gemm(a, b, comm=comm).get(), product)

    worlds.run(2, program)


@pytest.mark.gpu(world=1)
def test_graphs_that_are_replayed_at_once_are_told_apart():
    import cupy

    def program(comm):
        worlds.chaos(comm, seed=1, delay_ns=(0, 200_000_000))
        a, b, product = operands(comm)
        graphs = []
        for _ in range(2):
            stream, out = cupy.cuda.Stream(non_blocking=True), cupy.zeros(product.shape)
            mk.allgather_gemm(a, b, comm=comm, out=out)
            comm.synchronize()
            with stream:
                stream.begin_capture()
                mk.allgather_gemm(a, b, comm=comm, out=out)
                graphs.append((stream.end_capture(), stream))
        for graph, stream in graphs:
            graph.launch(stream)
        cupy.cuda.Device().synchronize()
        comm.synchronize()

    (error,) = outcomes(program)
    assert isinstance(error, mk.ConcurrentCallError), error
    assert "one after the other" in str(error)


# --- many calls -----------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("size", worlds.SIZES)
def test_a_thousand_calls_with_changing_inputs_and_late_ranks_and_roles(size):
    import cupy

    counts = [tuple(30 + 17 * rank for rank in range(size)), (256,) * size, (70,) * size]
    kinds = [("float32", counts[0], 515, 72), ("bfloat16", counts[1], 1024, 256)]
    kinds += [("float64", counts[2], 130, 90)]

    def program(comm):
        worlds.chaos(comm, seed=5, delay_ns=(300_000, 300_000))
        pool = []
        for number, (dtype, rows, k, n) in enumerate(kinds):
            start = sum(rows[: comm.rank])
            in_place = comm.empty((rows[comm.rank], k), np.dtype(dtype))
            for seed in range(6):
                rng = np.random.default_rng([number, seed])
                a = rng.integers(-2, 3, (sum(rows), k))
                b = rng.integers(-2, 3, (k, n + 8 * comm.rank))
                own = a[start : start + rows[comm.rank]].astype(dtype)
                product = worlds.put(comm, (a @ b).astype(np.float64))
                own, b = worlds.put(comm, own), worlds.put(comm, b.astype(dtype))
                out_dtype = np.float32 if dtype == "bfloat16" else None
                pool.append((rows, in_place, own, b, product, out_dtype))
        order, host = np.random.default_rng(3), np.random.default_rng(comm.rank)
        wrong = cupy.zeros((), np.int64)
        for number in range(1000):
            rows, in_place, own, b, product, dtype = pool[order.integers(len(pool))]
            a = in_place if number % 3 else cupy.empty_like(own)
            comm._runtime.machine.copy(a, own)
            c = mk.allgather_gemm(a, b, comm=comm, row_counts=rows, dtype=dtype)
            a.view(np.uint8)[...] = 255
            wrong += (c != product).any()
            if host.random() < 0.1:
                time.sleep(host.random() * 0.004)
        return int(wrong)

    assert worlds.run(size, program) == [0] * size


@pytest.mark.gpu
@pytest.mark.parametrize("size", worlds.SIZES)
def test_five_hundred_calls_of_attention_with_late_ranks_and_roles(size):
    """Two sets of operands take turns in the same arrays; the bits stay those of the first."""
    import cupy

    counts = counts_in("zigzag", 900, size)
    case = AttentionCase("many", counts, (4, 2), 64, "bfloat16", True, "zigzag")

    def program(comm):
        worlds.chaos(comm, seed=6, delay_ns=(300_000, 300_000))
        sets = [
            [worlds.put(comm, blocks[comm.rank]) for blocks in blocks_of(case, seed)]
            for seed in range(2)
        ]
        qkv = [comm.empty(x.shape, x.dtype) for x in sets[0]]
        asked = {"causal": True, "layout": "zigzag", "seq_counts": counts}
        first, wrong = [], cupy.zeros((), np.int64)
        for number in range(500):
            for x, values in zip(qkv, sets[number % 2], strict=True):
                comm._runtime.machine.copy(x, values)
            out = mk.ring_attention(*qkv, comm=comm, **asked)
            for x in qkv:
                x.view(np.uint8)[...] = 255
            if number < 2:
                expected(case, number, comm.rank)[0].assert_close(worlds.get(comm, out))
                first.append(out.view(np.uint8))
            wrong += (out.view(np.uint8) != first[number % 2]).any()
        return int(wrong)

    assert worlds.run(size, program) == [0] * size


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32, np.float64])
@pytest.mark.parametrize("size", worlds.SIZES)
def test_a_hundred_runs_have_the_same_bits(size, dtype):
    import cupy

    def program(comm):
        rng = np.random.default_rng(comm.rank)
        a = worlds.put(comm, rng.standard_normal((500, 700)).astype(dtype))
        b = worlds.put(comm, rng.standard_normal((700, 300)).astype(dtype))
        runs = [mk.allgather_gemm(a, b, comm=comm).view(np.uint8) for _ in range(100)]
        differs = cupy.zeros((), np.int64)
        for run in runs[1:]:
            differs += (run != runs[0]).any()
        return int(differs)

    assert worlds.run(size, program) == [0] * size


# --- failures -------------------------------------------------------------------------------------


@pytest.mark.gpu(world=2)
def test_a_rank_that_does_not_call_is_named_on_all():
    def program(comm):
        if comm.rank == 1:
            call_and_wait(comm)  # the plan is there
            time.sleep(4)
        else:
            call_and_wait(comm)
        call_and_wait(comm, seed=1)

    for error in outcomes(program):
        assert isinstance(error, mk.TimeoutError), error
        assert "rank 1 has not made this call" in str(error).lower()


@pytest.mark.gpu(world=2)
def test_attention_that_waits_in_vain_leaves_nan():
    def attend(comm):
        x = worlds.put(comm, np.ones((1, 200, 2, 64), np.float16))
        out = worlds.put(comm, np.zeros((1, 200, 2, 64), np.float16))
        mk.ring_attention(x, x, x, comm=comm, out=out)
        comm.synchronize()
        assert (out == 1).all()
        return x, out

    def program(comm):
        x, out = attend(comm)
        if comm.rank == 1:
            time.sleep(4)
        try:
            mk.ring_attention(x, x, x, comm=comm, out=out)
            comm.synchronize()
        except mk.Error:
            # Rank 1 is told when it calls, and has written nothing.
            assert comm.rank == 1 or np.isnan(worlds.get(comm, out)).all()
            raise

    worlds.run(2, attend)  # compiles
    for error in outcomes(program):
        assert isinstance(error, mk.TimeoutError), error


@pytest.mark.gpu(world=2)
@pytest.mark.parametrize(("delays", "role"), [((8e9, 0), "compute"), ((8e9, 8e9), "mover")])
def test_a_role_that_hangs_ends_in_the_deadline(delays, role):
    def program(comm):
        call_and_wait(comm)
        worlds.chaos(comm, seed=2, delay_ns=tuple(int(delay) for delay in delays))
        call_and_wait(comm, seed=1, options=Options(split=(6, 6)))

    errors = outcomes(program)
    for error in errors:
        assert isinstance(error, mk.TimeoutError), error
    assert len(set(map(str, errors))) == 1


@pytest.mark.gpu(world=3)
def test_ranks_that_disagree_are_told_so():
    def program(comm):
        call_and_wait(comm)
        a, b, _ = operands(comm, k=30 + (comm.rank == 1))
        mk.allgather_gemm(a, b, comm=comm)
        comm.synchronize()

    for error in outcomes(program):
        assert isinstance(error, mk.ArgumentMismatchError), error
        assert "K=31" in str(error)


@pytest.mark.gpu(world=3)
def test_a_rank_that_refuses_alone_is_quoted_on_the_others():
    def program(comm):
        call_and_wait(comm)
        a, b, _ = operands(comm)
        mk.allgather_gemm(a, b if comm.rank else b[:7], comm=comm)
        comm.synchronize()

    first, *others = outcomes(program)
    assert isinstance(first, ValueError)
    for error in others:
        assert isinstance(error, mk.PeerError), error
        assert "rank 0 raised instead of calling: ValueError" in str(error)


@pytest.mark.gpu(world=2)
def test_a_rank_that_has_closed_is_a_lost_peer():
    def program(comm):
        call_and_wait(comm)
        if comm.rank == 1:
            comm.close()
        else:
            call_and_wait(comm, seed=1)

    error, _ = outcomes(program)
    assert isinstance(error, mk.PeerLostError), error
    assert "rank 1 has closed" in str(error)
