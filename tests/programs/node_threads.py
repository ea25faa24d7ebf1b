"""Ranks on virtual nodes, their proxies and the software network card as threads of one process.

Arguments: kernels folder or '-'.
"""

import dataclasses
import sys

import numpy as np
import worlds
from routing import (
    ROUTINGS,
    ExpertCase,
    expected_layer,
    ids_of,
    layer_weights_of,
    router_weights_of,
    tokens_of,
)

import mkernel_cp as mk
from mkernel_cp import compiler, reference, slots
from mkernel_cp.targets.host import HostTarget
from mkernel_cp.transport import staging

COUNTS = (33, 7, 0, 70)
CASE = ExpertCase("threads", (9, 4, 0, 7), 8, 6, 6, 3, "float32", activation="silu", columns=5)


def products(comm, lanes):
    rng = np.random.default_rng(comm.rank)
    k, n = 75, 20
    a, b = comm.empty((COUNTS[comm.rank], k), np.float32), np.empty((k, n), np.float32)
    options = mk.Options((1, 1), chunk_bytes=3000)
    step = mk.AllGatherGemm(a, b, comm=comm, row_counts=COUNTS, options=options)
    terms = np.empty((19, 9), np.float32), np.empty((9, 33), np.float32)
    split = mk.Options((lanes % 2, 1, 2), (8, 16, 8))
    sums = mk.GemmAllReduce(*terms, comm=comm, options=split)
    worlds.chaos(comm, seed=lanes, lanes=lanes, delay_ns=(300_000,) * 5)
    for _ in range(5):
        a[...], b[...] = rng.standard_normal(a.shape), rng.standard_normal(b.shape)
        blocks = comm._runtime.agree("blocks", lambda: np.array(a))
        if not np.allclose(step(a, b), np.vstack(blocks) @ b, atol=1e-4):
            raise SystemExit("wrong result")
        for x in terms:
            x[...] = rng.standard_normal(x.shape)
        whole = sum(comm._runtime.agree("products", lambda: terms[0] @ terms[1]))
        if not np.allclose(sums(*terms), whole, atol=1e-4):
            raise SystemExit("wrong sum")


def attention_and_experts(comm, lanes):
    rng, rank = np.random.default_rng(comm.rank), comm.rank
    qkv = np.empty((3, 1, COUNTS[rank] % 10, 3, 8), np.float32)
    counts, room = [count % 10 for count in COUNTS], 20 * 2 * 8 * 4
    parts, few = mk.Options((1, 1), (5, 6, 8), 100), mk.Options((1, 1), (8, 8, 8), 200)
    attend = mk.RingAttention(*qkv, comm=comm, seq_counts=counts, max_workspace=room, options=parts)
    asked = {"comm": comm, "num_experts": CASE.experts, "activation": CASE.activation}
    w1, w2 = (blocks[rank] for blocks in layer_weights_of(CASE))
    layer = None
    worlds.chaos(comm, seed=lanes, lanes=lanes, delay_ns=(300_000,) * 5)
    for number in range(5):
        qkv[...] = rng.standard_normal(qkv.shape)
        k, v = zip(*comm._runtime.agree("keys and values", lambda: qkv[1:].copy()), strict=True)
        if reference.ring_attention(qkv[0], k, v, rank)[0].check(attend(*qkv)) > 1:
            raise SystemExit("wrong attention")
        routed = dataclasses.replace(CASE, routing=ROUTINGS[number])
        x, ids, factors = (
            of(routed, number)[rank] for of in (tokens_of, ids_of, router_weights_of)
        )
        layer = layer or mk.MoeLayer(x, ids, factors, w1, w2, capacity=60, **asked, options=few)
        right = expected_layer(routed, number, rank, None, None, comm._runtime.topology.sizes)
        if right.check(layer(x, ids, factors, w1, w2)) > 1:
            raise SystemExit("wrong layer")


def program(comm, lanes):
    products(comm, lanes)
    attention_and_experts(comm, lanes)


with compiler.using_kernels(None if sys.argv[1] == "-" else sys.argv[1], sanitize="thread"):
    for lanes, nodes, transport in ((1, (2, 2), "verbs"), (2, (1, 2, 1), "efa"), (1, 4, "efa")):
        worlds.run(len(COUNTS), program, lanes, nodes=nodes, transport=transport)
    # Through slots of host memory, of which there are few.
    HostTarget.reached_by_cards, staging.SLOTS, slots.SLOT_BYTES = False, 2, 1024
    worlds.run(len(COUNTS), products, 2, nodes=(2, 1, 1), transport="verbs")
print("all right")
