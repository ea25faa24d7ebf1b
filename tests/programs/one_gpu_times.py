"""What allgather_gemm takes on ranks that are threads and share one GPU, by how its rows are moved.

Arguments: ranks, M, K, N. Beside each time, that of 8 columns: little more than the moving.
"""

import sys
from pathlib import Path

import ml_dtypes
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import one_gpu

import mkernel_cp as mk
from mkernel_cp.bench.data import normal

CALLS = 20
CHOICES = [
    mk.Options(),
    *(mk.Options(chunk_bytes=1 << power) for power in (14, 15, 17, 18)),
    *(mk.Options(split=(movers, None)) for movers in (2, 4, 8, 16)),
]


def times(comm, m, k, n):
    """Return a list of (options, milliseconds, of 8 columns, plan)."""
    import cupy

    def milliseconds(step, b):
        out = comm._runtime.machine.empty((m, b.shape[1]), dtype)
        events = [cupy.cuda.Event() for _ in range(2)]
        for event in events:
            for _ in range(CALLS):
                step(a, b, out=out)
            event.record()
        comm.synchronize()
        return cupy.cuda.get_elapsed_time(*events) / CALLS

    dtype = np.dtype(ml_dtypes.bfloat16)
    a = comm.empty((comm.row_counts(m)[comm.rank], k), dtype)
    comm._runtime.machine.copy(a, normal(cupy, dtype, comm.rank, a.shape))
    results = []
    for options in CHOICES:
        both = []
        for columns in (n, 8):
            b = normal(cupy, dtype, comm.size + comm.rank, (k, columns))
            with mk.AllGatherGemm(a, b, comm=comm, options=options) as step:
                both.append(milliseconds(step, b))
                both.append(step.plan)
        results.append((options, both[0], both[2], both[1].explain()))
    return results


if __name__ == "__main__":
    ranks, *shape = map(int, sys.argv[1:])
    answers = one_gpu.run(ranks, times, *shape)
    print(answers[0][0][3])
    for per_rank in zip(*answers, strict=True):
        whole, moving = (max(answer[i] for answer in per_rank) for i in (1, 2))
        print(f"{whole:9.4f} ms  {moving:9.4f} ms of 8 columns  {per_rank[0][0]}")
