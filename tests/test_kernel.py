"""Kernels of a user's own: compiled with the package's headers, launched like an operator."""

import textwrap
import threading

import numpy as np
import pytest
import worlds

import mkernel_cp as mk

SOURCE = """
    #include <mkernel/roles.cuh>

    namespace mk {

    struct SumParams {
        World* world;
        CallMessage message;
        double* own;
        double* out;   // (size, count): every rank's
        i64 count;
        double factor;
    };

    // Every rank reads every other rank's array.
    MK_KERNEL(gather_scaled, SumParams, p) {
        Launch launch(p.world, {1, 0});
        launch.announce(p.message);
        for (u64 step = 0; step < launch.size(); ++step) {
            u64 peer = (launch.rank() + step) % launch.size();
            const double* theirs = p.own;
            if (step > 0) {
                if (!launch.await_call(peer, p.message.digest)) break;
                theirs = static_cast<double*>(launch.operand_of(peer));
                if (!theirs) break;
            }
            for (i64 i = launch.agent().lane(); i < p.count; i += launch.agent().lanes())
                p.out[i64(peer) * p.count + i] = FACTOR * p.factor * theirs[i];
            launch.agent().sync();
            if (step > 0) launch.have_read(peer, 1);
        }
        launch.finish();
    }

    }  // namespace mk
"""
COUNT = 17


@pytest.fixture
def module(tmp_path):
    path = tmp_path / "gather.cu"
    path.write_text(textwrap.dedent(SOURCE))
    return mk.Module(path, defines={"FACTOR": 2})


@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("size", worlds.SIZES)
def test_a_kernel_of_ones_own_meets_its_peers(module, size, lanes):
    def program(comm):
        worlds.chaos(comm, seed=lanes, lanes=lanes, delay_ns=(300_000, 0))
        kernel = module.kernel("gather_scaled")
        own = comm.empty(COUNT)
        for step in range(20):
            own[...] = np.arange(COUNT) + 100 * comm.rank + 1000 * step
            out = worlds.nan_filled((size, COUNT), np.float64)
            comm.launch(kernel, 1, (own, out, COUNT, 0.5), operand=own)
            own[...] = np.nan
            ranks = np.arange(size)[:, None]
            np.testing.assert_array_equal(out, np.arange(COUNT) + 100 * ranks + 1000 * step)

    worlds.run(size, program)


def test_launches_and_operators_take_turns(module):
    def program(comm):
        kernel = module.kernel("gather_scaled")
        own, out = comm.zeros(COUNT), np.empty((2, COUNT))
        a, b = np.ones((3, 4)), np.ones((4, 5))
        for _ in range(5):
            comm.launch(kernel, 1, (own, out, COUNT, 1.0), operand=own)
            np.testing.assert_array_equal(mk.allgather_gemm(a, b, comm=comm), 4.0)
            np.testing.assert_array_equal(out, 0.0)

    worlds.run(2, program)


def test_wrong_arguments_leave_the_communicator_usable(module):
    def program(comm):
        kernel = module.kernel("gather_scaled")
        own, out = comm.zeros((2, COUNT)), np.empty((2, COUNT))
        args = (own, out, COUNT, 1.0)
        for wrong, keywords, kind, text in (
            (args[:3], {}, ValueError, "3 arguments"),
            ((*args[:3], "x"), {}, TypeError, "argument 'x'"),
            ((*args[:2], 1 << 70, 1.0), {}, TypeError, "64 bits"),
            (args, {"operand": np.zeros(COUNT)}, ValueError, r"empty\(\), zeros\(\)"),
            (args, {"operand": own.T}, ValueError, "contiguous"),
            (args, {"operand": own[::-1]}, ValueError, "ascending"),
            (args, {"operand": own[0, 0:1].reshape(())}, ValueError, "contiguous"),
            (args, {"shared_bytes": -1}, ValueError, "shared_bytes=-1: use at least 0"),
            (args, {"shared_bytes": True}, TypeError, "shared_bytes=True: use an integer"),
        ):
            with pytest.raises(kind, match=text):
                comm.launch(kernel, 1, wrong, **keywords)
        with pytest.raises(ValueError, match="at least 1"):
            comm.launch(kernel, 0, args, operand=own[0])
        with pytest.raises(TypeError, match="agents=True: use an integer"):
            comm.launch(kernel, True, args, operand=own[0])
        with pytest.raises(TypeError, match="Module"):
            comm.launch("gather_scaled", 1, args)
        nothing = comm.zeros((0, COUNT))
        comm.launch(kernel, 1, (own, out, 0, 1.0), operand=nothing)
        comm.launch(kernel, 1, args, operand=own[0])
        np.testing.assert_array_equal(out, 0.0)

    worlds.run(2, program)


def test_a_rank_that_does_not_launch_is_named(module):
    def main(mpi):
        comm = mk.Communicator(mpi, entry_timeout=0.3)
        kernel = module.kernel("gather_scaled")
        own = comm.zeros(COUNT)
        if comm.rank == 0:
            with pytest.raises(mk.TimeoutError, match=r"launch of gather_scaled.*rank 1"):
                comm.launch(kernel, 1, (own, np.empty((2, COUNT)), COUNT, 1.0), operand=own)
        everybody.wait(30)
        with pytest.raises(mk.TimeoutError):
            comm.close()

    everybody = threading.Barrier(2)
    mk.LocalWorld(2).run(main)


@pytest.mark.parametrize("without", [{1}, {0, 1, 2}], ids=str)
def test_an_operand_that_was_not_passed_is_told_by_all(module, without):
    def main(mpi):
        try:
            with mk.Communicator(mpi) as comm:
                own, out = comm.zeros(COUNT), np.empty((3, COUNT))
                operand = None if comm.rank in without else own
                kernel = module.kernel("gather_scaled")
                comm.launch(kernel, 1, (own, out, COUNT, 1.0), operand=operand)
        except mk.Error as error:
            return error

    results = mk.LocalWorld(3).run(main)
    worlds.all_are(results, mk.ArgumentMismatchError, "launch of gather_scaled", "no operand=")


def test_a_source_that_has_no_such_kernel_or_does_not_compile(module, tmp_path):
    broken = tmp_path / "broken.cu"
    broken.write_text("#include <mkernel/roles.cuh>\nnonsense\n")

    def program(comm):
        with pytest.raises(mk.CompileError, match="no kernel other"):
            comm.launch(module.kernel("other"), 1)
        with pytest.raises(mk.CompileError, match="nonsense"):
            comm.launch(mk.Module(broken).kernel("any"), 1)

    worlds.run(2, program)


def test_options_reach_the_compiler(tmp_path):
    path = tmp_path / "gather.cu"
    path.write_text(textwrap.dedent(SOURCE))

    def program(comm):
        own, out = comm.empty(COUNT), np.empty((1, COUNT))
        own[...] = np.arange(COUNT)
        for factor in (3, 5):
            module = mk.Module(path, target="host", options=[f"-DFACTOR={factor}"])
            kernel = module.kernel("gather_scaled")
            comm.launch(kernel, 1, (own, out, COUNT, 1.0), operand=own)
            np.testing.assert_array_equal(out[0], factor * own)

    worlds.run(1, program)


def test_modules_and_kernels_say_what_they_are(module, tmp_path):
    source = f"{str(tmp_path / 'gather.cu')!r}"
    text = f"Module({source}, target='auto', arch=None, options=(), defines={{'FACTOR': '2'}})"
    assert repr(module) == text
    assert repr(module.kernel("gather_scaled")).startswith(f"Kernel(source={source}, name='gather_")


def test_what_a_module_is_not_for_is_refused(module, tmp_path):
    for keywords, kind in (
        ({"target": "gpu"}, ValueError),
        ({"arch": "90"}, ValueError),
        ({"options": "-DFACTOR=2"}, TypeError),
        ({"options": [1]}, TypeError),
        ({"defines": {"RATE": 0.1}}, TypeError),
    ):
        with pytest.raises(kind, match=next(iter(keywords))):
            mk.Module(tmp_path / "gather.cu", **keywords)

    def program(comm):
        kernel = mk.Module(tmp_path / "gather.cu", target="cuda").kernel("gather_scaled")
        with pytest.raises(mk.ConfigurationError, match="for target 'cuda'"):
            comm.launch(kernel, 1)
        with pytest.raises(TypeError, match="no streams"):
            comm.launch(module.kernel("gather_scaled"), 1, stream=7)
        with pytest.raises(TypeError, match="no streams"):
            mk.allgather_gemm(np.ones((2, 2)), np.ones((2, 2)), comm=comm, stream=7)

    worlds.run(2, program)


STEPS = """
    #include <mkernel/roles.cuh>

    namespace mk {

    struct StepParams {
        World* world;
        CallMessage message;
        u64* signal;
        i64 steps, step_ns;
    };

    // The second agent raises a signal step by step, and the first one waits for the last step.
    MK_KERNEL(steps, StepParams, p) {
        Launch launch(p.world, {1, 1});
        const Subject last{Awaited::arrival, everyone, 0};
        if (launch.is(Role::mover)) launch.wait(launch.agent(), p.signal, u64(p.steps), last);
        for (i64 i = 1; launch.is(Role::compute) && i <= p.steps; ++i) {
            const u64 until = now_ns() + u64(p.step_ns);
            for (u32 spins = 0; now_ns() < until; ++spins) pause(spins);
            store_release<Scope::device>(p.signal, launch.target(u64(i)));
        }
        launch.finish();
    }

    }  // namespace mk
"""


@pytest.mark.parametrize(("steps", "seconds"), [(12, 0.1), (1, 1.2)])
def test_a_wait_that_goes_on_is_not_over(tmp_path, steps, seconds):
    """A deadline counts from what was seen last."""
    path = tmp_path / "steps.cu"
    path.write_text(textwrap.dedent(STEPS))
    kernel = mk.Module(path).kernel("steps")

    def main(mpi):
        with mk.Communicator(mpi, progress_timeout=1) as comm:
            signal = comm.zeros(1, np.uint64)
            comm.launch(kernel, 2, (signal, steps, int(seconds * 1e9)))

    if steps > 1:
        mk.LocalWorld(1).run(main)
    else:
        with pytest.raises(mk.TimeoutError):
            mk.LocalWorld(1).run(main)
