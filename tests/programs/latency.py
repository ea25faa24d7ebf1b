"""Median time of warm 64 x 64 calls, one mover and one compute agent per rank. Argument: calls."""

import sys
import time

import numpy as np

import mkernel_cp as mk

with mk.Communicator() as comm:
    a = comm.asarray(np.random.default_rng(comm.rank).standard_normal((32, 64)))
    b = np.random.default_rng(9).standard_normal((64, 64))
    out = np.empty((32 * comm.size, 64))
    step = mk.AllGatherGemm(a, b, comm=comm, options=mk.Options(split=(1, 1)))
    seconds = []
    for _ in range(int(sys.argv[1])):
        began = time.perf_counter()
        step(a, b, out=out)
        seconds.append(time.perf_counter() - began)
    median = max(comm._runtime.agree("median", lambda: float(np.median(seconds))))
    if comm.rank == 0:
        print(1e3 * median)
