"""Back-to-back calls over mpirun: inputs change with every call, ranks and roles are late.

Arguments: calls, most delay in units of a call, kernels folder or '-', sanitizer or ''.
"""

import sys
import time

import numpy as np
import worlds

import mkernel_cp as mk
from mkernel_cp import compiler


def main(calls, most, folder, sanitize):
    kernels = compiler.using_kernels(None if folder == "-" else folder, sanitize=sanitize or None)
    with kernels, mk.Communicator() as comm:
        rng = np.random.default_rng(1)
        counts = tuple(int(n) for n in rng.integers(5, 30, comm.size))
        start = np.cumsum([0, *counts])
        late = np.random.default_rng([2, comm.rank])
        k, n = 41, 33
        a = comm.empty((counts[comm.rank], k), np.float32)
        out = np.empty((sum(counts), n), np.float32)
        durations = []
        for _ in range(20):
            began = time.perf_counter()
            mk.allgather_gemm(a, np.ones((k, n), np.float32), comm=comm, row_counts=counts)
            durations.append(time.perf_counter() - began)
        duration = min(durations)
        worlds.chaos(comm, seed=9, delay_ns=(int(1e9 * most * duration),) * 2)
        wrong = 0
        for step in range(calls):
            data = np.random.default_rng([3, step])
            whole = data.standard_normal((start[-1], k)).astype(np.float32)
            b = data.standard_normal((comm.size, k, n)).astype(np.float32)[comm.rank]
            a[...] = whole[start[comm.rank] : start[comm.rank + 1]]
            out[...] = np.nan
            worlds.poison(comm)
            if late.random() < 0.1:
                time.sleep(most * duration * late.random())
            mk.allgather_gemm(a, b, comm=comm, row_counts=counts, out=out)
            a[...] = np.nan
            wrong += not np.allclose(out, whole @ b, rtol=0, atol=1e-4)
            b[...] = np.nan
        total = sum(comm._runtime.agree("wrong results", lambda: wrong))
        if comm.rank == 0:
            print(f"{comm.size} ranks, {calls} calls, {total} wrong")
    sys.exit(total > 0)


main(int(sys.argv[1]), float(sys.argv[2]), *sys.argv[3:])
