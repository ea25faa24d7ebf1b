"""Traces a few calls between processes. Arguments: path."""

import sys

import numpy as np
from mpi4py import MPI

import mkernel_cp as mk

with mk.Communicator(MPI.COMM_WORLD) as comm:
    a = comm.asarray(np.full((40, 30), 1.0 + comm.rank))
    b = np.ones((30, 20))
    with mk.trace(sys.argv[1]):
        for _ in range(3):
            mk.allgather_gemm(a, b, comm=comm)
