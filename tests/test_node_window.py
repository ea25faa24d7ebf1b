"""`ring_attention` between virtual nodes."""

import time

import numpy as np
import pytest
import simulations
import worlds
from test_nodes import TRANSPORTS, TYPES, all_are, letters, maps_its_node_only, outcomes
from test_ring_attention import (
    AttentionCase,
    Simulated,
    assert_right,
    blocks_of,
    call,
    cases,
    expected,
)

import mkernel_cp as mk
from mkernel_cp.attention_plan import Attention, zigzag_counts

NODES = [(1, 1), (1, 2), (2, 2), (1, 2, 1), (1, 1, 1, 1), (3, 3), (3, 1, 2)]


def few(made):
    """Cases of few types: it is not the arithmetic that differs between nodes."""
    return [case for case in made if case.dtype in TYPES]


CASES = [
    (nodes, transport, case)
    for number, nodes in enumerate(NODES[:5])
    for i, case in enumerate(few(cases(sum(nodes)))[number::6])
    for transport in (TRANSPORTS[i % 2],)
]


@pytest.mark.parametrize(("nodes", "transport", "case"), CASES, ids=str)
def test_equals_reference(nodes, transport, case):
    def program(comm):
        for seed in (1, 2):
            assert_right(comm, case, seed, call(comm, case, seed))

    worlds.run(case.world, program, nodes=nodes, transport=transport)


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize(
    ("window", "transport", "causal"), [(1, "verbs", False), (2, "efa", False), (1, "efa", True)]
)
def test_every_interleaving_gives_the_right_result(
    window, transport, causal, staged, monkeypatch, closed_behind
):
    if staged:
        worlds.stage(monkeypatch, 64, count=1)
    options = {"nodes": (2, 1), "transport": transport}
    turns = closed_behind(Simulated("zigzag", causal, window, 1, (1, 2), **options))
    simulations.assert_right(turns, 40)


def windows(counts, nodes, **asked):
    """The same calls by way of windows of one unit, of two, and of all."""
    agreed = Attention(2, counts, 6, 3, 8, np.dtype("f4"), scale=1.0, nodes=nodes, **asked)
    slot = max(map(agreed.slot_bytes, range(len(counts))))
    return [slot, 2 * slot, None]


@pytest.mark.parametrize(
    ("nodes", "transport"), list(zip(NODES[1:], TRANSPORTS * 3, strict=True)), ids=str
)
def test_back_to_back_calls_with_late_ranks_and_roles(nodes, transport):
    size, calls = sum(nodes), 6
    masks = {"causal": size % 2 == 0, "layout": "zigzag" if nodes[0] == 1 else "contiguous"}
    uneven = (13, 0, 22, 5, 9, 1)[:size]
    counts = zigzag_counts(43, size) if nodes[0] == 1 else uneven
    case = AttentionCase("calls", counts, (6, 3), 8, "float32", *masks.values(), batch=2)
    limits = windows(counts, nodes, **masks)

    def program(comm):
        lanes = 1 + size % 3
        delays = (2_000_000, 500_000, 1_000_000, 1_500_000)
        worlds.chaos(comm, seed=7 * size + lanes, lanes=lanes, delay_ns=delays)
        own = [comm.empty(blocks[comm.rank].shape, np.float32) for blocks in blocks_of(case, 0)]
        steps = [
            mk.RingAttention(
                *own,
                comm=comm,
                seq_counts=counts,
                scale=case.scale,
                max_workspace=limit,
                options=mk.Options((1 + number, 2), (5, 6, 8), 100),
                **masks,
            )
            for number, limit in enumerate(limits)
        ]
        assert [step.plan.window for step in steps] == [1, 2, 6]
        for seed in range(calls):
            for x, blocks in zip(own, blocks_of(case, seed), strict=True):
                x[:] = blocks[comm.rank]
            worlds.poison(comm)
            out = steps[seed % 3](*own)
            for x in own:
                x[:] = np.nan
            expected(case, seed, comm.rank)[0].assert_close(out)

    worlds.run(size, program, nodes=nodes, transport=transport)


@pytest.mark.software
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(("nodes", "causal"), [((1, 2, 1), False), ((2, 2), True)])
def test_what_a_node_needs_crosses_once_and_no_heap_is_mapped(nodes, causal, transport):
    """Of a rank whose positions no query of the node sees, nothing."""
    counts, shape = (9, 4, 31, 14), (2, 3, 8)
    limits = windows(counts, nodes, causal=causal, layout="contiguous")

    def program(comm):
        batch, heads, columns = shape
        positions, topology = counts[comm.rank], comm._runtime.topology
        asked = {"comm": comm, "seq_counts": counts, "causal": causal, "scale": 1.0}
        whole = comm.zeros((batch, 2 * heads, positions, columns), np.float32)
        q = np.ones((batch, positions, 2 * heads, columns), np.float32)
        views = (whole[:, heads:], whole[:, ::2], whole[:, :heads].copy())
        for own, limit in zip(views, limits, strict=True):
            k = own.transpose(0, 2, 1, 3)
            k[:] = comm.rank
            with mk.RingAttention(q, k, k, max_workspace=limit, **asked) as step:
                before, pulled = comm._runtime.network.counters(), worlds.bytes_from_peers(comm)
                for _ in range(3):
                    out = step(q, k, k)
                sent = comm._runtime.network.counters()[0] - before[0]
                plan = step.plan
                assert sent == 3 * plan.bytes_to_network
                assert worlds.bytes_from_peers(comm) - pulled == 3 * plan.bytes_from_peers
            # Causal: only what ranks of a later node see.
            to = sum(node > topology.node or not causal for node in range(len(nodes)))
            to -= not causal
            data = to * 2 * batch * heads * positions * columns * 4
            freed = 64 * len(topology.sources) * (6 - plan.window)
            assert plan.bytes_to_network == data + freed + letters(comm)
            assert out.min() >= 0
            assert out.max() <= (comm.rank if causal else 3)
        return maps_its_node_only(comm)

    counters = worlds.run(4, program, nodes=nodes, transport=transport)
    sent, received, *_ = map(sum, zip(*counters, strict=True))
    assert sent == received


def test_the_same_bits_in_every_call_and_over_any_transport():
    case = AttentionCase("bits", (17, 5, 20), (4, 2), 8, "bfloat16", True)

    def program(comm):
        return [[x.tobytes() for x in call(comm, case, 1)] for _ in range(3)]

    results = [worlds.run(3, program, nodes=(2, 1), transport=t) for t in TRANSPORTS]
    first = [calls[0] for calls in results[0]]
    assert all(
        again == first[rank] for ranks in results for rank, c in enumerate(ranks) for again in c
    )


def walk_of(nodes, rank):
    agreed = Attention(
        1, (4,) * sum(nodes), 1, 1, 8, np.dtype("f4"), False, 1.0, "contiguous", nodes=nodes
    )
    return [run.source for run in agreed.walk(rank)]


def test_walks_begin_in_the_node_and_part_outside():
    assert [walk_of((2, 3), rank) for rank in range(5)] == [
        [0, 1, 4, 3, 2],
        [1, 0, 3, 2, 4],
        [2, 4, 3, 1, 0],
        [3, 2, 4, 0, 1],
        [4, 3, 2, 1, 0],
    ]


Q, K = np.ones((1, 4, 4, 8), np.float32), np.ones((1, 4, 2, 8), np.float32)


@pytest.mark.parametrize(("fault", "transport"), [("down@1", "efa"), ("error@30", "verbs")])
def test_a_network_that_fails_is_an_error_on_all_ranks(fault, transport, monkeypatch):
    options = {"nodes": (2, 1), "transport": transport}
    worlds.run(3, lambda comm: mk.ring_attention(Q, K, K, comm=comm), **options)  # compiles
    monkeypatch.setenv("MKERNEL_FABRIC", f"soft:seed=3,fault={fault}")

    def program(comm):
        out = np.zeros(Q.shape, np.float32)
        try:
            for _ in range(20):
                mk.ring_attention(Q, K, K, comm=comm, out=out)
        except mk.NetworkError:
            assert (np.isnan(out) | (out == 1)).all()
            assert np.isnan(out).any() or fault != "down@1"
            raise

    began = time.monotonic()
    results = outcomes(3, program, **options)
    assert time.monotonic() - began < 10
    all_are(results, mk.NetworkError, "network card soft")


def test_ranks_on_different_nodes_that_differ_are_told():
    def program(comm):
        mk.ring_attention(Q, K, K, comm=comm)
        mk.ring_attention(Q, K, K, comm=comm, causal=comm.rank == 2)

    results = outcomes(3, program, nodes=(2, 1), entry_timeout=20)
    all_are(results, mk.ArgumentMismatchError, "rank 2 calls ring_attention")


def test_chunks_that_cannot_be_told_apart_are_refused():
    x = np.zeros((1 << 14, 1, 32, 2), np.float32)

    def program(comm):
        with pytest.raises(ValueError, match=r"between nodes use at most.*chunk_bytes"):
            mk.ring_attention(x, x, x, comm=comm)

    worlds.run(2, program, nodes=2)
