"""Which command starts MPI ranks on this machine: the launcher of the library that mpi4py loads.

The launcher of another MPI starts N worlds of one rank each, so PATH alone is not asked. This
module needs the standard library only and does not initialise MPI: the scripts in launch/ run it as
a file before anything is installed (``python launcher.py`` prints the command, one word per line).

The environment variable MPIEXEC, e.g. ``MPIEXEC="srun --mpi=pmi2"``, replaces the search; the words
``-n N program`` are put behind it.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

__all__ = ["find_launcher"]

# Family: what the library's version and the launcher's --version say; the launcher's names.
_FAMILIES = {
    "Open MPI": (("Open MPI",), ("mpirun.openmpi", "mpirun", "mpiexec")),
    "MPICH": (
        ("MPICH", "MVAPICH", "Intel(R) MPI", "HYDRA"),
        ("mpiexec.hydra", "mpirun.mpich", "mpirun", "mpiexec"),
    ),
}

# What MPICH keeps in /dev/shm, in bytes, as (fixed, per rank), found by trying 1 to 8 ranks of
# MPICH 5.0: without it the ranks die of a signal. Open MPI does without. Most of it is for UCX,
# which can be told to use System V segments instead.
_SHM_FULL = (16 << 20, 6 << 20)
_SHM_LESS = (2 << 20, 2 << 20)

_PROBE = """
import json, mpi4py
mpi4py.rc.initialize = mpi4py.rc.finalize = False
from mpi4py import MPI
with open("/proc/self/maps") as maps:
    files = sorted({line.split(None, 5)[5].strip() for line in maps if "/" in line})
print(json.dumps([MPI.Get_library_version(), files, mpi4py.get_config()]))
"""


class _NoRoom(RuntimeError):
    """/dev/shm is too small: another MPI would not help."""


def find_launcher(ranks: int = 2) -> list[str]:
    """Return the command that starts up to so many ranks here, without ``-n N``.

    RuntimeError says what is missing, and how to mend it.
    """
    family, command = _find()
    return [*_shared_memory(family, ranks), *command]


def _shared_memory(family: str, ranks: int) -> list[str]:
    """Return what makes MPICH do with the room that /dev/shm has."""
    if family != "MPICH":
        return []
    try:
        stat = os.statvfs("/dev/shm")
        free = stat.f_bavail * stat.f_frsize
    except OSError:
        free = 0
    if free >= _SHM_FULL[0] + ranks * _SHM_FULL[1] or "UCX_TLS" in os.environ:
        return []
    need = _SHM_LESS[0] + ranks * _SHM_LESS[1]
    if free >= need:
        return ["env", "UCX_TLS=^posix"]
    raise _NoRoom(
        f"/dev/shm has {free >> 20} MiB free, and MPICH needs {need >> 20} for {ranks} ranks:"
        " enlarge it (docker run --shm-size=256m, or mount -o remount,size=256m /dev/shm)"
    )


@functools.cache
def _find() -> tuple[str, tuple[str, ...]]:
    if chosen := os.environ.get("MPIEXEC"):
        return "", tuple(shlex.split(chosen))
    version, files, config = _probe()
    title = version.strip().split("\n")[0]
    family, marks, names = "", ("",), ("mpiexec", "mpirun")
    for candidate, (its_marks, its_names) in _FAMILIES.items():
        if any(mark in version for mark in its_marks):
            family, marks, names = candidate, its_marks, its_names

    folders: list[Path] = []
    for file in [*files, *config.values()]:
        if re.match(r"libmpi\w*\.so|mpicc$", Path(str(file)).name):
            for path in (Path(file), Path(file).resolve()):  # /usr/lib/ARCH/openmpi/lib: several up
                folders += [parent / "bin" for parent in path.parents]
    places = [str(folder / name) for folder in dict.fromkeys(folders) for name in names]
    for place in [*places, *names]:
        path = shutil.which(place)
        if path and any(mark in _version(path) for mark in marks):
            return family, tuple(_local(family, path))
    raise RuntimeError(
        f"mpi4py uses {title}, and its launcher ({', '.join(names)}) is neither beside that library"
        " nor on PATH: put it on PATH, or set MPIEXEC to the command that starts ranks"
    )


def _local(family: str, path: str) -> list[str]:
    """Return the launcher with what keeps all ranks on this host, also in a batch job."""
    if family == "MPICH":
        return [path, "-launcher", "fork", "-hosts", "localhost"]
    if family == "Open MPI":
        # It has no option for it: in an allocation it takes the hosts from Slurm.
        slurm = [name for name in ("SLURM_JOBID", "SLURM_JOB_ID") if name in os.environ]
        hide = ["env", *(word for name in slurm for word in ("-u", name))] if slurm else []
        root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        # A rank has many threads: bound to one core, they would wait for each other.
        return [*hide, path, *root, "--oversubscribe", "--bind-to", "none"]
    return [path]


def _probe() -> tuple[str, list[str], dict[str, str]]:
    done = subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, text=True)
    if done.returncode:
        why = (done.stderr.strip().split("\n") or [""])[-1]
        raise RuntimeError(
            f"mpi4py does not load in {sys.executable} ({why}):"
            " pip install mpi4py mpich, or load your cluster's MPI first"
        )
    return tuple(json.loads(done.stdout))


def _version(path: str) -> str:
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout + done.stderr


def _try() -> None:
    """Raise RuntimeError unless two ranks start and see each other."""
    program = "from mpi4py import MPI; c = MPI.COMM_WORLD; assert c.allreduce(1) == 2"
    command = [*find_launcher(2), "-n", "2", sys.executable, "-c", program]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"two ranks do not end in 60 s: {shlex.join(command)}") from None
    if done.returncode:
        why = (done.stderr + done.stdout).strip()[-2000:]
        raise RuntimeError(f"two ranks do not run: {shlex.join(command)}\n{why}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="mkernel_cp.launcher", description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=2, help="how many are to be started")
    parser.add_argument("--try", action="store_true", dest="try_", help="also run two ranks")
    options = parser.parse_args(argv)
    try:
        words = find_launcher(options.ranks)
        if options.try_:
            _try()
    except RuntimeError as error:
        print(f"mkernel_cp: {error}", file=sys.stderr)
        return 3 if isinstance(error, _NoRoom) else 1
    print("\n".join(words))
    return 0


if __name__ == "__main__":
    sys.exit(main())
