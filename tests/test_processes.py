"""Ranks that die, stop, fork or leave: the others say so soon, and end by themselves."""

import os
import signal
import time
from pathlib import Path

import pytest
from launcher import mpirun

PROGRAMS = Path(__file__).parent / "programs"


def mishap(what, folder, *hosts, ranks=4):
    """Run a mishap; return what each rank said, how its process ended, and the error output.

    `hosts`: how many ranks are as if on each of several.
    """
    began = time.monotonic()
    program = PROGRAMS / "mishap.py"
    result = mpirun(
        ranks, PROGRAMS / "witness.py", folder, program, what, folder, *hosts, timeout=60
    )
    said = {int(p.name[5:]): p.read_text() for p in Path(folder).glob("said-*")}
    status = {int(p.name[7:]): int(p.read_text()) for p in Path(folder).glob("status-*")}
    assert time.monotonic() - began < 30
    return said, status, result.stderr


def left_behind():
    """Shared-memory files that are neither MPICH's nor Python's multiprocessing's."""
    others = ("mpich", "sem.mp-", "psm_")
    return {name for name in os.listdir("/dev/shm") if not name.startswith(others)}


@pytest.mark.mpi
@pytest.mark.parametrize("repeat", range(20))
def test_survivors_of_a_killed_rank_name_it_and_end(repeat, tmp_path):
    before = left_behind()
    what = ("killed", "killed", "killed_in_sums", "killed_in_agreement")[repeat % 4]
    said, status, _ = mishap(what, tmp_path)
    assert status == {0: 1, 1: -signal.SIGKILL, 2: 1, 3: 1}
    assert sorted(said) == [0, 2, 3]
    for text in said.values():
        assert "PeerLostError: lost rank 1" in text
        assert float(text.split()[0]) < 10
    assert left_behind() == before


@pytest.mark.mpi
def test_500_rounds_of_open_use_close_leave_nothing():
    result = mpirun(2, PROGRAMS / "rounds.py", 500, timeout=200)
    assert result.returncode == 0, result.stderr
    assert "flat after 500 rounds" in result.stdout


@pytest.mark.mpi
def test_a_dropped_failure_makes_the_exit_code(tmp_path):
    said, status, errors = mishap("dropped", tmp_path, ranks=2)
    assert "SystemExit: 0" in said[0]
    assert status[0] == 1
    assert "mkernel_cp: TimeoutError: rank 0 waited" in errors


@pytest.mark.mpi
def test_a_failure_nobody_heard_of_is_told_at_exit(tmp_path):
    said, status, errors = mishap("unreported", tmp_path, ranks=2)
    assert "SystemExit: 0" in said[0]
    assert status == {0: 1, 1: 1}
    assert "mkernel_cp: TimeoutError: rank 1 waited" in errors


@pytest.mark.mpi
@pytest.mark.parametrize("what", ["exits", "raises"])
def test_a_rank_that_leaves_is_not_waited_for(what, tmp_path):
    said, status, _ = mishap(what, tmp_path, ranks=3)
    for rank in (0, 2):
        assert "PeerLostError: rank 1 has closed" in said[rank], said
        assert status[rank] == 1


@pytest.mark.mpi
def test_a_stopped_rank_ends_in_a_deadline_on_all_ranks_when_it_comes_back(tmp_path):
    said, status, _ = mishap("stopped", tmp_path, ranks=3)
    for rank in (0, 1, 2):
        assert "TimeoutError: rank" in said[rank], said
        assert "rank 1" in said[rank].lower(), said
        assert status[rank] == 1


@pytest.mark.mpi
@pytest.mark.parametrize("what", ["finalized", "forked"])
def test_close_after_finalize_and_forked_children(what, tmp_path):
    said, status, errors = mishap(what, tmp_path, ranks=2)
    for text in said.values():
        assert text.endswith("nothing"), text
    assert status == {0: 0, 1: 0}, errors
