"""Rank 1 may open only so many more files as the argument says."""

import os
import resource
import sys

from mpi4py import MPI

import mkernel_cp as mk

rank = MPI.COMM_WORLD.Get_rank()
most = resource.getrlimit(resource.RLIMIT_NOFILE)
if rank == 1:
    used = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + int(sys.argv[1]), most[1]))
try:
    mk.Communicator()
except (mk.ConfigurationError, mk.OutOfMemoryError) as error:
    print(f"{type(error).__name__} {error}\n", end="", flush=True)
resource.setrlimit(resource.RLIMIT_NOFILE, most)
