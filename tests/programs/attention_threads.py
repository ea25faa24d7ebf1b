"""`ring_attention` by ranks that are threads of one process, for ThreadSanitizer.

Arguments: kernels folder or '-'.
"""

import sys

import numpy as np
import worlds

import mkernel_cp as mk
from mkernel_cp import compiler, reference

COUNTS = (13, 7, 0, 20)


def program(comm, lanes):
    rng = np.random.default_rng(comm.rank)
    shape = (1, COUNTS[comm.rank], 3, 8)
    qkv = [comm.empty(shape, np.float32) for _ in range(3)]
    slot = sum(COUNTS) * 2 * 8 * 4
    steps = [
        mk.RingAttention(
            *qkv,
            comm=comm,
            seq_counts=COUNTS,
            causal=causal,
            max_workspace=units * slot,
            options=mk.Options(split, (5, 6, 8), 100),
        )
        for split, units, causal in (((1, 1), 1, True), ((2, 2), 2, False))
    ]
    worlds.chaos(comm, seed=lanes, lanes=lanes, delay_ns=(300_000, 300_000))
    for number in range(6):
        for x in qkv:
            x[...] = rng.standard_normal(x.shape)
        blocks = comm._runtime.agree("blocks", lambda: [np.array(x) for x in qkv[1:]])
        k, v = zip(*blocks, strict=True)
        causal = number % 2 == 0
        expected, _ = reference.ring_attention(qkv[0], k, v, comm.rank, causal=causal)
        if expected.check(steps[number % 2](*qkv)) > 1:
            raise SystemExit("wrong result")


with compiler.using_kernels(None if sys.argv[1] == "-" else sys.argv[1], sanitize="thread"):
    for lanes in (1, 2, 3):
        worlds.run(len(COUNTS), program, lanes)
print("all right")
