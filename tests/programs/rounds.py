"""Opens, uses and closes a communicator again and again; nothing may grow. Argument: rounds."""

import os
import resource
import sys
import time
from pathlib import Path

import numpy as np
from mpi4py import MPI

import mkernel_cp as mk


def held():
    """Resident bytes, open files, threads, mappings, and files of shared memory."""
    time.sleep(0.5)  # a thread that has been joined may still be seen for a moment
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    others = ("mpich", "sem.mp-", "psm_")
    ours = [name for name in os.listdir("/dev/shm") if not name.startswith(others)]
    mappings = Path("/proc/self/maps").read_text().count("\n")
    threads = len(os.listdir("/proc/self/task"))
    return pages * resource.getpagesize(), len(os.listdir("/proc/self/fd")), threads, mappings, ours


def once(step):
    with mk.Communicator() as comm:
        rows = 10 + step % 7
        a = comm.asarray(np.full((rows, 20), float(step)))
        out = mk.allgather_gemm(a, np.ones((20, 30)), comm=comm)
        assert (out == 20.0 * step).all()


rounds = int(sys.argv[1])
for step in range(rounds // 5):
    once(step)
before = held()
for step in range(rounds):
    once(step)
after = held()
assert after[0] - before[0] < 8 << 20, (before, after)
assert after[1] <= before[1], (before, after)
assert after[2] <= before[2], (before, after)
assert after[3] <= before[3] + 10, (before, after)
assert after[4] == before[4], (before, after)
if MPI.COMM_WORLD.Get_rank() == 0:
    print("flat after", rounds, "rounds")
