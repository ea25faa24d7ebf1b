"""ThreadSanitizer over the kernels: it alone sees a missing release, which x86 hides."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from launcher import ROOT, mpirun

PROGRAMS = Path(__file__).parent / "programs"
RACE = 66


def sanitizer(folder):
    """The environment of a Python under ThreadSanitizer, or None if none starts here."""
    compiler = os.environ.get("CXX", "c++")
    found = subprocess.run(
        [*compiler.split(), "-print-file-name=libtsan.so"], capture_output=True, text=True
    ).stdout.strip()
    probe = folder / "probe.cpp"
    probe.write_text("#include <thread>\nint main() { std::thread([] {}).join(); }\n")
    built = subprocess.run(
        [*compiler.split(), "-fsanitize=thread", str(probe), "-o", str(folder / "probe")],
        capture_output=True,
    )
    if built.returncode or not os.path.isabs(found):
        return None
    if subprocess.run([folder / "probe"], capture_output=True).returncode:
        return None
    return {
        "LD_PRELOAD": found,
        "TSAN_OPTIONS": f"exitcode={RACE}:report_signal_unsafe=0",
        "UCX_MEM_EVENTS": "no",  # UCX patches mmap, and MPI_Init would crash
        "OPENBLAS_NUM_THREADS": "1",
    }


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    found = sanitizer(tmp_path_factory.mktemp("tsan"))
    if found is None:
        # CI must have it; elsewhere the reason for the skip is printed at the end of the run.
        assert not os.environ.get("CI"), "ThreadSanitizer does not start here"
        pytest.skip("ThreadSanitizer does not start here: no test for missing releases was run")
    return found


@pytest.mark.tsan
@pytest.mark.parametrize(
    "program", ["threads.py", "attention_threads.py", "expert_threads.py", "node_threads.py"]
)
def test_ranks_as_threads_do_not_race(environment, kernels, program):
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    result = subprocess.run(
        [sys.executable, str(PROGRAMS / program), kernels or "-"],
        env={**os.environ, **environment, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert result.returncode == 0, (result.stdout + result.stderr)[:6000]
    assert "all right" in result.stdout


@pytest.mark.tsan
@pytest.mark.mpi
def test_ranks_as_processes_do_not_race(environment, kernels):
    """Each rank's own agents; what crosses processes it cannot see."""
    others = {name: value for name, value in environment.items() if name != "LD_PRELOAD"}
    program = ("stress.py", 30, 2, kernels or "-", "thread")
    arguments = (environment["LD_PRELOAD"], PROGRAMS / program[0], *program[1:])
    result = mpirun(4, PROGRAMS / "preloaded.py", *arguments, timeout=200, env=others)
    assert result.returncode == 0, (result.stdout + result.stderr)[:6000]
    assert "4 ranks, 30 calls, 0 wrong" in result.stdout
