"""Ranks as threads of one process, for ThreadSanitizer, which sees no further.

Arguments: kernels folder or '-'.
"""

import sys

import numpy as np
import worlds

import mkernel_cp as mk
from mkernel_cp import compiler

COUNTS = (33, 7, 0, 70)


def program(comm, lanes, way):
    rng = np.random.default_rng(comm.rank)
    k, n = 75, 40
    a, b = comm.empty((COUNTS[comm.rank], k), np.float32), np.empty((k, n), np.float32)
    plans = [
        mk.AllGatherGemm(
            a, b, comm=comm, row_counts=COUNTS, options=mk.Options(split, chunk_bytes=3000)
        )
        for split in ((1, 1), (2, 2))
    ]
    terms = np.empty((70, 9), np.float32), np.empty((9, 80), np.float32)
    sums = [
        kind(*terms, comm=comm, options=mk.Options(split, (16, 16, 8)))
        for split in ((1, 1), (int(way == "pulled"), 2))
        for kind in (mk.GemmReduceScatter, mk.GemmAllReduce)
    ]
    worlds.chaos(comm, seed=lanes, lanes=lanes, delay_ns=(300_000, 300_000))
    for step in range(8):
        a[...], b[...] = rng.standard_normal(a.shape), rng.standard_normal(b.shape)
        blocks = comm._runtime.agree("blocks", lambda: np.array(a))
        out = plans[step % 2](a, b)
        if not np.allclose(out, np.vstack(blocks) @ b, atol=1e-4):
            raise SystemExit("wrong result")
        for x in terms:
            x[...] = rng.standard_normal(x.shape)
        whole = sum(comm._runtime.agree("products", lambda: terms[0] @ terms[1]))
        out = sums[step % 4](*terms)
        rows = slice(None) if step % 2 else comm.rows(70)
        if not np.allclose(out, whole[rows], atol=1e-4):
            raise SystemExit("wrong sum")


with compiler.using_kernels(None if sys.argv[1] == "-" else sys.argv[1], sanitize="thread"):
    for lanes, way in ((1, "pushed"), (2, "low latency"), *((3, way) for way in worlds.WAYS)):
        with worlds.sums(way):
            worlds.run(len(COUNTS), program, lanes, way)
print("all right")
