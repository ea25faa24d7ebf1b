"""The programs in launch/examples run on several ranks and agree with NumPy."""

import importlib.util

import numpy as np
import pytest
import worlds
from launcher import ROOT, mpirun


def example(name):
    """The program as a module."""
    path = ROOT / "launch" / "examples" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.operator
@pytest.mark.parametrize("size", worlds.SIZES)
def test_heat_is_one_launch_per_step(size):
    heat = example("heat")
    start = np.random.default_rng(size).random((67, 45))

    def program(comm):
        worlds.chaos(comm, seed=size, delay_ns=(200_000, 100_000))
        launches, launch = [], comm._runtime.machine.launch
        comm._runtime.machine.launch = lambda *request: (launches.append(request), launch(*request))
        result = heat.steps_of_kernels(start, 40, comm)
        assert len(launches) == 40
        expected = heat.steps_of_numpy(start, 40)[comm.rows(67)]
        np.testing.assert_allclose(result, expected, rtol=0, atol=1e-13)

    worlds.run(size, program)


@pytest.mark.gpu
@pytest.mark.parametrize("size", worlds.SIZES)
def test_purification_projects(size):
    purification = example("purification")

    def program(comm):
        h = purification.hamiltonian(60, comm.rows(60))
        return purification.purify(h, 30, comm)

    p = np.concatenate(worlds.run(size, program))
    occupied = np.linalg.eigh(purification.hamiltonian(60, slice(None)))[1][:, :30]
    np.testing.assert_allclose(p, occupied @ occupied.T, rtol=0, atol=1e-9)


@pytest.mark.mpi
@pytest.mark.parametrize(("ranks", "size"), [(1, 64), (3, 100), (4, 3)])
def test_purification(ranks, size):
    program = ROOT / "launch" / "examples" / "purification.py"
    done = mpirun(ranks, program, "--size", str(size))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert f"{size} states, {size // 2} occupied, {ranks} rank(s)" in lines[-1]
    assert float(lines[-1].split()[-1]) < 1e-9
    errors = [float(line.split()[-1]) for line in lines[:-1]]
    assert errors[-1] < 1e-11 < min(errors[:-1])


@pytest.mark.mpi
def test_purification_of_a_degenerate_level_says_that_there_is_no_gap():
    program = (
        "import numpy as np, purification, mkernel_cp as mk\n"
        "with mk.Communicator() as comm:\n"
        "    h = np.diag([0.0, 1, 1, 1, 1, 2])[comm.rows(6)]\n"
        "    purification.purify(h, 3, comm, most=20)\n"
    )
    done = mpirun(2, "-c", program, env={"PYTHONPATH": str(ROOT / "launch" / "examples")})
    assert done.returncode != 0
    assert "no gap above state 3" in done.stderr


@pytest.mark.mpi
@pytest.mark.parametrize(("ranks", "size"), [(1, 5), (2, 64), (3, 3), (4, 101)])
def test_heat(ranks, size):
    program = ROOT / "launch" / "examples" / "heat.py"
    done = mpirun(ranks, program, "--size", str(size), "--steps", "40")
    assert done.returncode == 0, done.stderr
    assert f"40 steps of {size} x {size} on {ranks} ranks" in done.stdout


@pytest.mark.operator
@pytest.mark.parametrize("size", worlds.SIZES)
def test_least_squares_finds_what_numpy_does_with_the_same_bits_on_all_ranks(size):
    least_squares = example("least_squares")
    rng = np.random.default_rng(size)
    a, b = rng.standard_normal((101, 7)), rng.standard_normal(101)

    def program(comm):
        return least_squares.solve(a[comm.rows(101)], b[comm.rows(101)], comm)

    answers = worlds.run(size, program)
    assert len({x.tobytes() for x in answers}) == 1
    np.testing.assert_allclose(answers[0], np.linalg.lstsq(a, b)[0], rtol=0, atol=1e-12)


@pytest.mark.operator
@pytest.mark.parametrize("block", [1, 16])
@pytest.mark.parametrize("size", worlds.SIZES)
def test_conjugate_gradients_solve_every_column(size, block):
    gradients = example("conjugate_gradients")
    b = np.random.default_rng(size).standard_normal((90, block))
    b[:, block // 2] *= block == 1  # of a block, one column has nothing to be solved

    def program(comm):
        own = comm.rows(90)
        x, iterations = gradients.solve(gradients.matrix(90, own), b[own], comm)
        assert 10 < iterations < 90
        exact = np.linalg.solve(gradients.matrix(90, slice(None)), b)
        np.testing.assert_allclose(x, exact[own], rtol=0, atol=1e-7)

    worlds.run(size, program)


@pytest.mark.mpi
@pytest.mark.parametrize(("ranks", "size", "block"), [(1, 50, 16), (3, 100, 1), (4, 3, 16)])
def test_conjugate_gradients(ranks, size, block):
    program = ROOT / "launch" / "examples" / "conjugate_gradients.py"
    done = mpirun(ranks, program, "--size", str(size), "--block", str(block))
    assert done.returncode == 0, done.stderr
    assert f"{size} unknowns, {block} right-hand side(s), {ranks} rank(s)" in done.stdout
    assert float(done.stdout.split()[-1]) < 1e-7


@pytest.mark.mpi
@pytest.mark.parametrize(("ranks", "rows"), [(1, 100), (3, 1001), (4, 30)])
def test_least_squares(ranks, rows):
    program = ROOT / "launch" / "examples" / "least_squares.py"
    done = mpirun(ranks, program, "--rows", str(rows), "--columns", "20")
    assert done.returncode == 0, done.stderr
    assert f"{rows} equations, 20 unknowns, {ranks} rank(s)" in done.stdout
    assert "1 answer" in done.stdout


@pytest.mark.mpi
@pytest.mark.parametrize(("ranks", "positions"), [(1, 3), (3, 101), (4, 600)])
def test_long_sequence(ranks, positions):
    program = ROOT / "launch" / "examples" / "long_sequence.py"
    done = mpirun(ranks, program, "--positions", str(positions))
    assert done.returncode == 0, done.stderr
    assert f"{positions} positions on {ranks} rank(s)" in done.stdout
    assert float(done.stdout.split()[-1]) < 1e-5


@pytest.mark.mpi
@pytest.mark.parametrize(("ranks", "tokens", "experts"), [(1, 50, 4), (3, 500, 10), (4, 3, 2)])
def test_expert_mlp(ranks, tokens, experts):
    program = ROOT / "launch" / "examples" / "expert_mlp.py"
    done = mpirun(ranks, program, "--tokens", str(tokens), "--experts", str(experts))
    assert done.returncode == 0, done.stderr
    assert f"{experts} experts on {ranks} rank(s)" in done.stdout
    assert float(done.stdout.split()[-1]) < 1e-5
