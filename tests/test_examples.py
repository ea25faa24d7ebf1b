"""The programs in launch/examples run on several ranks and agree with NumPy."""

import pytest
from launcher import ROOT, mpirun

pytestmark = pytest.mark.mpi


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


@pytest.mark.parametrize(("ranks", "size"), [(1, 5), (2, 64), (3, 3), (4, 101)])
def test_heat(ranks, size):
    program = ROOT / "launch" / "examples" / "heat.py"
    done = mpirun(ranks, program, "--size", str(size), "--steps", "40")
    assert done.returncode == 0, done.stderr
    assert f"40 steps of {size} x {size} on {ranks} ranks" in done.stdout
