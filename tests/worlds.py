"""Worlds for shared test bodies, and what makes hidden faults of a protocol show.

A body gets its arrays by `put` and looks at results by `get`, so that it runs on both targets. On
GPUs every rank of the world that mpirun started runs the same tests.
"""

import contextlib
import ctypes
import functools
import time
import traceback
from unittest import mock

import numpy as np
import one_gpu
from shapes import Case, ReductionCase, operands, reduction_operands

import mkernel_cp as mk
from mkernel_cp import plan, reference, slots
from mkernel_cp.arguments import Options
from mkernel_cp.communicator import Communicator
from mkernel_cp.targets.host import HostTarget
from mkernel_cp.transport import staging

SIZES = (1, 2, 3, 4)

# A byte that makes NaN, and one that makes numbers, of every type.
NAN, NUMBER = 0xFF, 0x40

# Real network cards between nodes, in place of those of software.
nics = ()

# The ranks that mpirun started, where the shared bodies run on GPUs.
gpu_world = None
# Whether they run on threads that share one GPU.
on_one_gpu = False


def until(condition, seconds):
    """Wait for a condition, but no longer; return whether it holds."""
    end = time.monotonic() + seconds
    while not (holds := condition()) and time.monotonic() < end:
        time.sleep(0.01)
    return holds


def run(size, program, *args, **options):
    """Run ``program(comm, *args)`` on `size` ranks; return their results."""
    if gpu_world is not None:
        return _run_on_gpus(size, program, args, options)
    if on_one_gpu:
        return one_gpu.run(size, program, *args, **options)

    def main(mpi):
        with Communicator(mpi, **options) as comm:
            return program(comm, *args)

    return mk.LocalWorld(size).run(main)


def _run_on_gpus(size, program, args, options):
    rank = gpu_world.Get_rank()
    part = gpu_world.Split(0 if rank < size else 1, rank)
    result, problem = None, None
    try:
        if rank < size:
            with Communicator(part, target="cuda", oversubscribe=True, **options) as comm:
                result = program(comm, *args)
    except Exception:
        problem = traceback.format_exc()
    part.Free()
    answers = gpu_world.allgather((result, problem))
    problems = [f"rank {rank}: {text}" for rank, (_, text) in enumerate(answers) if text]
    assert not problems, "\n".join(problems)
    return [result for result, _ in answers[:size]]


def put(comm, array):
    """The array for calls on this target, with the same strides."""
    if comm.target == "host":
        return array
    import cupy

    if array.size == 0:
        return cupy.empty(array.shape, array.dtype)
    low, high = np.lib.array_utils.byte_bounds(array)
    raw = (ctypes.c_ubyte * (high - low)).from_address(low)
    place = cupy.asarray(np.frombuffer(raw, np.uint8)).data + (array.ctypes.data - low)
    return cupy.ndarray(array.shape, array.dtype, place, array.strides)


def get(comm, array):
    """A result in host memory."""
    return comm.asnumpy(array)


def fill(comm, array, values):
    """Write values into an array of this target, in the order of the calls."""
    values = np.broadcast_to(np.asarray(values, array.dtype), array.shape)
    comm._runtime.machine.copy(array, put(comm, np.ascontiguousarray(values)))


def stream(comm):
    """A stream to work on, which a graph can capture."""
    if comm.target == "host":
        return contextlib.nullcontext()
    import cupy

    return cupy.cuda.Stream(non_blocking=True)


def replayer(comm, calls):
    """What repeats calls: on GPUs a graph that has captured them."""
    if comm.target == "host":
        return calls
    import cupy

    current = cupy.cuda.get_current_stream()
    current.begin_capture()
    calls()
    graph = current.end_capture()
    return lambda: graph.launch(current)


def different_options(comm, dtype, fewest=0):
    """Options that lead to different plans, with `fewest` movers or more."""
    if comm.target == "host":
        return [None, Options((2, 3), (16, 40, 24), 1000), Options((fewest, 2), (1, 1024, 7))]
    itemsize = np.dtype(dtype).itemsize
    tile = (128, 128, 256) if itemsize == 2 else (64, 128, 128 // itemsize)
    return [None, Options((2, 2), None, 1000), Options(tile=tile)]


def small_tile(comm, tile):
    """A tile that makes many of a small problem; engines of GPUs have larger ones only."""
    return None if comm._runtime.machine.gpu else tile


def stage(patch, slot_bytes, count=2):
    """Have nodes meet through few slots of host memory, as on GPUs that network cards do not reach.

    The slots are small: so they are used again and again in every call.
    """
    patch.setattr(HostTarget, "reached_by_cards", False)
    patch.setattr(staging, "SLOTS", count)
    patch.setattr(slots, "SLOT_BYTES", slot_bytes)


# How partial sums come to who adds them.
WAYS = ("pushed", "pulled", "low latency")
# The operators that sum over ranks, each in all ways that it has: name, way.
SUMS = {
    name if way == WAYS[0] else f"{name}, {way}": (name, way)
    for way in WAYS
    for name in ("gemm_reduce_scatter", "gemm_allreduce")
    if (name, way) != ("gemm_allreduce", "pulled")
}


def gathered(first):
    """Have `allgather_gemm` multiply all rows together, when all are here; or as rows come."""
    return mock.patch.object(plan, "gathers_first", return_value=first)


@contextlib.contextmanager
def sums(way):
    """Let partial sums come in one way, whatever the shape, if the operator has it."""
    scatter = plan.GemmReduceScatterPlan
    with (
        mock.patch.object(plan, "_HANDOVER_S", 2 * (np.inf if way == "low latency" else -np.inf,)),
        mock.patch.object(
            plan, "pulls_partials", lambda kind, *_: way == "pulled" and kind is scatter
        ),
    ):
        yield


def poison(comm, byte=NAN):
    """Fill the data of this rank's arena, by default with NaN: what has not arrived shows."""
    if comm._runtime.memory.arena is not None:
        _arena_data(comm)[...] = byte


def poisoned(comm):
    """Whether nothing has come to this rank's arena since."""
    return bool((_arena_data(comm) == NAN).all())


def signals(comm):
    """Return the signals of this rank's arena, and the words that are their own ones."""
    memory = comm._runtime.memory
    return memory.segments[memory.arena.number].bytes[: memory.arena.data_offset]


def words(comm):
    """Return the words of data of this rank's arena that are their own signals."""
    memory, arena = comm._runtime.memory, comm._runtime.memory.arena
    return memory.segments[arena.number].bytes[arena.words_offset : arena.data_offset]


def _arena_data(comm):
    memory = comm._runtime.memory
    return memory.segments[memory.arena.number].bytes[memory.arena.data_offset :]


def bytes_from_peers(comm):
    """How much kernels have brought to this rank, as they counted it."""
    return comm._runtime.launches.bytes_from_peers


def chaos(comm, *, seed, lanes=1, delay_ns=(0, 0)):
    """Let launches yield at random points, copy early at random, and start roles late."""
    hooks = comm._runtime.launches.hooks
    hooks.seed, hooks.lanes, hooks.delay_ns = seed, lanes, delay_ns


def all_are(results, kind, *texts):
    """Check that all ranks have raised one error, in the same words, with these among them."""
    assert {type(result) for result in results} == {kind}, results
    assert len({str(result) for result in results}) == 1, results
    for text in texts:
        assert text in str(results[0])


def row_counts(case: Case):
    """What a caller passes for a case: None where that says the same."""
    return None if case.equal_rows else case.row_counts


@functools.lru_cache(maxsize=512)
def expected(case: Case, seed: int, rank: int, integers: bool = False) -> reference.Expected:
    """The reference of one rank."""
    a_blocks, b_blocks = operands(case, seed, integers=integers)
    return reference.allgather_gemm(a_blocks, b_blocks[rank], case.out_dtype)


@functools.lru_cache(maxsize=512)
def expected_sum(case: ReductionCase, seed: int, rank: int | None, nodes, integers: bool = False):
    """The reference of one rank's rows, or of the whole sum."""
    blocks = reduction_operands(case, seed, integers=integers)
    types = case.out_dtype, case.transfer_dtype
    if rank is None:
        return reference.gemm_allreduce(*blocks, *types, nodes=nodes)
    return reference.gemm_reduce_scatter(*blocks, case.row_counts, rank, *types, nodes=nodes)


def nan_filled(shape, dtype, order="C"):
    """An output in which what nobody writes shows."""
    return np.full(shape, np.nan, dtype, order=order)
