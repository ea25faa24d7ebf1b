"""The operators on experts by ranks that are threads of one process, for ThreadSanitizer.

Arguments: kernels folder or '-'.
"""

import dataclasses
import sys

import numpy as np
import worlds
from routing import (
    ROUTINGS,
    ExpertCase,
    expected,
    expected_layer,
    ids_of,
    layer_weights_of,
    router_weights_of,
    tokens_of,
    weights_of,
)

import mkernel_cp as mk
from mkernel_cp import compiler, reference

CASE = ExpertCase("threads", (13, 7, 0, 20), 8, 6, 6, 3, "float32", activation="swiglu", columns=5)


PLAN = mk.Options((2, 2), (5, 4, 4), 100)


def program(comm, lanes):
    rank, w = comm.rank, weights_of(CASE, comm.rank)
    room = comm.empty((20, 8), np.float32)
    steps = [
        mk.MoeDispatchGemm(
            *(room, np.zeros((20, 3), int), w),
            comm=comm,
            num_experts=6,
            capacity=120,
            options=mk.Options(split, (5, 4, 4), 100),
        )
        for split in ((1, 1), (2, 2))
    ]
    worlds.chaos(comm, seed=lanes, lanes=lanes, delay_ns=(300_000, 300_000))
    for number in range(6):
        case = dataclasses.replace(CASE, routing=ROUTINGS[number])
        x = room[: CASE.tokens[rank]]
        x[...] = tokens_of(case, number)[rank]
        rows, layout = steps[number % 2](x, ids_of(case, number)[rank], w)
        if expected(case, number, rank)[0].check(layout.trim(rows)) > 1:
            raise SystemExit("wrong result")
        weights = np.full((len(x), 3), 0.5, np.float32)
        summed = mk.moe_combine(rows, weights, layout, comm=comm, options=PLAN)
        own = np.array(layout.trim(rows))
        blocks = comm._runtime.agree("rows", lambda own=own: own)
        if reference.moe_combine(blocks, ids_of(case, number), weights, rank, 6).check(summed) > 1:
            raise SystemExit("wrong sums")
        own = (x, ids_of(case, number)[rank], router_weights_of(case, number)[rank])
        factors = (blocks[rank] for blocks in layer_weights_of(CASE))
        asked = {"num_experts": 6, "capacity": 120, "options": PLAN}
        made = mk.moe_layer(*own, *factors, comm=comm, **asked)
        if expected_layer(case, number, rank).check(made) > 1:
            raise SystemExit("wrong layer")


with compiler.using_kernels(None if sys.argv[1] == "-" else sys.argv[1], sanitize="thread"):
    for lanes in (1, 2, 3):
        worlds.run(len(CASE.tokens), program, lanes)
print("all right")
