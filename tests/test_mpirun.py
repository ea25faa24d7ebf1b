"""The operator between processes, which share nothing but segments."""

from pathlib import Path

import pytest
from launcher import mpirun

PROGRAMS = Path(__file__).parent / "programs"


@pytest.mark.mpi
@pytest.mark.parametrize(("ranks", "calls"), [(1, 100), (2, 100), (3, 100), (4, 1000), (16, 100)])
def test_back_to_back_calls_equal_numpy(ranks, calls, kernels):
    result = mpirun(ranks, PROGRAMS / "stress.py", calls, 10, kernels or "-", "", timeout=240)
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"{ranks} ranks, {calls} calls, 0 wrong" in result.stdout


@pytest.mark.mpi
@pytest.mark.alone
def test_a_small_warm_call_takes_less_than_a_millisecond():
    # A machine that is busy with something else may be slow once.
    medians = []
    while not medians or (min(medians) >= 1 and len(medians) < 3):
        result = mpirun(2, PROGRAMS / "latency.py", 1000)
        assert result.returncode == 0, result.stderr
        medians.append(float(result.stdout))
    assert min(medians) < 1, f"medians of 1000 calls in ms: {medians}"
