"""The operators on experts between virtual nodes."""

import dataclasses
import time

import numpy as np
import pytest
import routing
import simulations
import test_moe_combine
import test_moe_dispatch_gemm
import test_moe_layer
import worlds
from routing import (
    ExpertCase,
    expected_layer,
    expected_sum,
    ids_of,
    tokens_of,
    weights_of,
)
from test_moe_combine import cases as combine_cases
from test_moe_combine import dispatched, own_rows
from test_moe_dispatch_gemm import assert_right, call, cases, most_rows
from test_moe_layer import call as call_layer
from test_moe_layer import cases as layer_cases
from test_moe_layer import own_operands, poison
from test_nodes import TRANSPORTS, TYPES, all_are, letters, maps_its_node_only, outcomes

import mkernel_cp as mk
from mkernel_cp.topology import Topology

NODES = [(1, 1), (1, 2), (2, 2), (1, 2, 1), (1, 1, 1, 1), (3, 3), (3, 1, 2)]


def few(made):
    """Cases of few types: it is not the arithmetic that differs between nodes."""
    return [case for case in made if case.dtype in TYPES and not case.out_dtype]


CASES = [
    (nodes, TRANSPORTS[i % 2], case)
    for number, nodes in enumerate(NODES[:5])
    for i, case in enumerate(few(cases(sum(nodes)))[number::5])
]


@pytest.mark.parametrize(("nodes", "transport", "case"), CASES, ids=str)
def test_dispatch_equals_reference(nodes, transport, case):
    def program(comm):
        for seed in (1, 2):
            rows, layout = call(comm, case, seed, capacity=most_rows(case))
            assert_right(comm, case, seed, rows, layout)

    worlds.run(case.world, program, nodes=nodes, transport=transport)


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    ("operator", "asked"),
    [
        (test_moe_dispatch_gemm, ("uniform", 1, (1, 2))),
        (test_moe_combine, (1, (1, 2))),
        (test_moe_layer, ("swiglu", 1, (1, 2))),
    ],
    ids=["dispatch", "combine", "layer"],
)
def test_every_interleaving_gives_the_right_result(
    operator, asked, transport, staged, monkeypatch, closed_behind
):
    if staged:
        worlds.stage(monkeypatch, 64, count=1)
    turns = closed_behind(operator.Simulated(*asked, nodes=(2, 1), transport=transport))
    simulations.assert_right(turns, 20)


def turns_of(size, count, **more):
    """A case, and for each call another routing, and other numbers of tokens."""
    case = ExpertCase("calls", (30,) * size, 9, 7, 2 * size + 1, 3, "float32", **more)
    random = np.random.default_rng(size)
    kinds = [dataclasses.replace(case, routing=kind) for kind in routing.ROUTINGS]
    numbers = [tuple(random.integers(0, 31, size).tolist()) for _ in range(count)]
    return case, [(kinds[i % len(kinds)], tokens) for i, tokens in enumerate(numbers)]


def late(comm, size):
    """Let ranks and roles be late, and agents have several lanes."""
    lanes = 1 + size % 3
    delays = (2_000_000, 500_000, 1_000_000, 1_500_000, 800_000)
    worlds.chaos(comm, seed=7 * size + lanes, lanes=lanes, delay_ns=delays)


@pytest.mark.parametrize(
    ("nodes", "transport"), list(zip(NODES[1:], TRANSPORTS * 3, strict=True)), ids=str
)
def test_dispatch_back_to_back_with_late_ranks_and_roles(nodes, transport):
    size = sum(nodes)
    case, turns = turns_of(size, 7)

    def program(comm):
        rank, w = comm.rank, weights_of(case, comm.rank)
        late(comm, size)
        room = comm.empty((30, case.h), np.float32)
        asked = {"max_tokens": 30, "capacity": 90 * size, "num_experts": case.experts}
        steps = [
            mk.MoeDispatchGemm(
                *(room, ids_of(case, 0)[rank], w), comm=comm, options=options, **asked
            )
            for options in (mk.Options((2, 2), (4, 5, 6), 70), mk.Options((0, 2), (8, 8, 8)))
        ]
        for seed, (turn, tokens) in enumerate(turns):
            x, ids = room[: tokens[rank]], ids_of(turn, seed, tokens)[rank].copy()
            x[...] = tokens_of(turn, seed, tokens)[rank]
            worlds.poison(comm)
            rows, layout = steps[seed % 3 // 2](x, ids, w)
            room[...], ids[...] = np.nan, -7
            assert_right(comm, turn, seed, rows, layout, tokens)

    worlds.run(size, program, nodes=nodes, transport=transport)


class Crossing:
    """What crosses the network and the links of a node, by the routing of a case."""

    def __init__(self, case, seed, nodes):
        owner = np.repeat(np.arange(case.world), case.counts)
        home = np.repeat(np.arange(len(nodes)), nodes)
        self.home, self.case, self.nodes = home, case, nodes
        self.rank_of = [np.where(ids < 0, -1, owner[ids]) for ids in ids_of(case, seed)]
        self.node_of = [np.where(ranks < 0, -1, home[ranks]) for ranks in self.rank_of]

    def tokens_out(self, rank):
        """Tokens that go to other nodes; rows made of them there; entries of lists for ranks."""
        others = [node for node in range(len(self.nodes)) if node != self.home[rank]]
        tokens = sum((self.node_of[rank] == node).any(axis=1).sum() for node in others)
        rows = np.isin(self.node_of[rank], others).sum()
        away = [peer for peer in range(self.case.world) if self.home[peer] in others]
        listed = sum((self.rank_of[rank] == peer).any(axis=1).sum() for peer in away)
        return int(tokens), int(rows), int(listed)

    def sums_out(self, rank):
        """Sums for tokens of the ranks of other nodes that this one stands for."""
        node = self.home[rank]
        sources = Topology(rank, self.nodes).sources
        return int(sum((self.node_of[source] == node).any(axis=1).sum() for source in sources))

    def sums_in(self, rank):
        """Sums that a rank brings from peers, for its tokens and for those of such ranks."""
        owners = [rank, *Topology(rank, self.nodes).sources]
        peers = [peer for peer in np.flatnonzero(self.home == self.home[rank]) if peer != rank]
        return int(sum((self.rank_of[o] == p).any(axis=1).sum() for o in owners for p in peers))


@pytest.mark.parametrize("nodes", NODES[1:4], ids=str)
def test_combine_back_to_back_with_late_ranks_and_roles(nodes):
    size = sum(nodes)
    _, turns = turns_of(size, 7)

    def program(comm):
        late(comm, size)
        step = None
        for seed, (turn, tokens) in enumerate(turns):
            layout = dispatched(comm, turn, seed, tokens)
            rows, weights = own_rows(comm, turn, seed, tokens)
            options = mk.Options((2, 2, 1 + size % 2), chunk_bytes=70)
            step = step or mk.MoeCombine(rows, weights, layout, comm=comm, options=options)
            worlds.poison(comm)
            out = step(rows, weights, layout)
            rows[...], weights[...] = np.nan, np.nan
            right = expected_sum(turn, seed, comm.rank, None, tokens, nodes)
            right.assert_close(out, f"call {seed}")

    worlds.run(size, program, nodes=nodes, transport=TRANSPORTS[nodes[0] % 2])


@pytest.mark.parametrize("nodes", NODES[2:], ids=str)
def test_layer_back_to_back_with_late_ranks_and_roles(nodes):
    size = sum(nodes)
    case, turns = turns_of(size, 7, activation="swiglu", columns=6)

    def program(comm):
        late(comm, size)
        room, options = comm.empty((30, case.h), np.float32), mk.Options((2, 2, 2), (4, 5, 6), 70)
        asked = {"max_tokens": 30, "capacity": 90 * size, "num_experts": case.experts}
        with mk.MoeLayer(*own_operands(comm, case, 0), comm=comm, options=options, **asked) as step:
            for seed, (turn, tokens) in enumerate(turns):
                x, *others = own_operands(comm, turn, seed, tokens)
                ids, weights, w1, w2 = others[0].copy(), others[1].copy(), *others[2:]
                own = room[: len(x)]
                own[...] = x
                poison(comm, step)
                out = step(own, ids, weights, w1, w2)
                room[...], ids[...], weights[...] = np.nan, -7, np.nan
                right = expected_layer(turn, seed, comm.rank, None, tokens, nodes)
                right.assert_close(out, f"call {seed}")

    worlds.run(size, program, nodes=nodes, transport=TRANSPORTS[1 - nodes[0] % 2])


@pytest.mark.parametrize("nodes", NODES[1:5:2], ids=str)
def test_combine_and_layer_equal_reference(nodes):
    size = sum(nodes)

    def program(comm):
        for case in few(combine_cases(size)):
            layout = dispatched(comm, case, 1)
            rows, weights = own_rows(comm, case, 1)
            worlds.poison(comm)
            out = mk.moe_combine(rows, weights, layout, comm=comm)
            expected_sum(case, 1, comm.rank, nodes=nodes).assert_close(out, str(case))
        for case in few(layer_cases(size)):
            right = expected_layer(case, 1, comm.rank, nodes=nodes)
            right.assert_close(call_layer(comm, case, 1), str(case))

    worlds.run(size, program, nodes=nodes, transport=TRANSPORTS[size % 2])


def test_sums_are_in_the_order_of_ranks_in_a_node_and_then_of_nodes():
    """So that large terms cancel in one node, and in the other order a small one is lost."""
    made = np.array([3e8, 1.0, -3e8, 1.0], np.float32)

    def program(comm):
        w = made[comm.rank].reshape(1, 1, 1)
        x, ids = np.ones((1, 1), np.float32), np.array([[2, 0, 3, 1]])
        rows, layout = mk.moe_dispatch_gemm(x, ids, w, comm=comm)
        weights = np.ones((1, 4), np.float32)
        one = mk.moe_combine(rows, weights, layout, comm=comm).item()
        two = mk.moe_layer(x, ids, weights, w, np.ones_like(w), comm=comm, activation=None).item()
        assert one == two
        return one

    def total(nodes):
        sums, begin = np.float32(0), 0
        for size in nodes:
            node = np.float32(0)
            for value in made[begin : begin + size]:
                node += value
            sums, begin = sums + node, begin + size
        return float(sums)

    found = {nodes: total(nodes) for nodes in ((2, 2), (1, 2, 1), (3, 1))}
    assert len(set(found.values())) > 1
    for nodes, right in found.items():
        assert worlds.run(4, program, nodes=nodes) == [right] * 4


@pytest.mark.software
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("kind", ["uniform", "one rank"])
def test_a_token_crosses_once_to_each_node_that_needs_it(kind, transport):
    nodes = (1, 2, 1)
    case = ExpertCase("once", (20, 0, 9, 13), 12, 5, 9, 4, "float32", kind)
    crossing = Crossing(case, 1, nodes)

    def program(comm):
        own = tokens_of(case, 1)[comm.rank], ids_of(case, 1)[comm.rank]
        w = weights_of(case, comm.rank)
        with mk.MoeDispatchGemm(*own, w, comm=comm, num_experts=case.experts) as step:
            before = comm._runtime.network.counters()[0]
            for _ in range(3):
                step(*own, w)
            sent = comm._runtime.network.counters()[0] - before
            assert sent % 3 == 0
            tokens, rows, listed = crossing.tokens_out(comm.rank)
            data = tokens * case.h * 4 + rows * 24 + listed * 4
            heads = len(comm._runtime.topology.gateways) * step.plan.dispatch.head_bytes
            assert sent // 3 == data + heads + letters(comm)
        return maps_its_node_only(comm)

    counters = worlds.run(4, program, nodes=nodes, transport=transport)
    sent, received, *_ = map(sum, zip(*counters, strict=True))
    assert sent == received


@pytest.mark.software
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_node_sends_one_sum_for_each_token(transport):
    nodes = (1, 2, 1)
    case = ExpertCase("once", (20, 0, 9, 13), 12, 5, 9, 4, "float32", columns=6)
    crossing = Crossing(case, 1, nodes)

    def moved(comm, calls):
        def so_far():
            return np.array([comm._runtime.network.counters()[0], worlds.bytes_from_peers(comm)])

        before = so_far()
        for _ in range(3):
            calls()
        found = so_far() - before
        assert not (found % 3).any()
        return (found // 3).tolist()

    def program(comm):
        rank, topology = comm.rank, comm._runtime.topology
        own = own_operands(comm, case, 1)
        tokens, rows, listed = crossing.tokens_out(rank)
        to, heads = crossing.sums_out(rank), len(topology.sources)
        layout = dispatched(comm, case, 1)
        made, weights = own_rows(comm, case, 1)
        with mk.MoeCombine(made, weights, layout, comm=comm) as step:
            agreed = step.plan.combine
            sent, brought = moved(comm, lambda: step(made, weights, layout))
            told = agreed.chunks * agreed.head_bytes * heads
            shown = len(topology.gateways) * weights.nbytes
            assert sent == to * case.n * 4 + told + shown + letters(comm)
            assert brought == crossing.sums_in(rank) * case.n * 4
        with mk.MoeLayer(*own, comm=comm, num_experts=9, activation=None) as step:
            agreed = step.plan.layer
            sent, _ = moved(comm, lambda: step(*own))
            told = agreed.combine.chunks * agreed.combine.head_bytes * heads
            there = tokens * case.h * 4 + rows * 24 + listed * 4
            there += len(topology.gateways) * agreed.dispatch.head_bytes
            assert sent == there + to * case.columns * 4 + told + letters(comm)
        return maps_its_node_only(comm)

    counters = worlds.run(4, program, nodes=nodes, transport=transport)
    sent, received, *_ = map(sum, zip(*counters, strict=True))
    assert sent == received


def test_faults_of_data_are_told_on_all_ranks_of_all_nodes():
    case = ExpertCase("fault", (5, 4, 3), 6, 4, 5, 2, "float32")

    def program(comm):
        w = weights_of(case, comm.rank)
        with mk.MoeDispatchGemm(
            *(tokens_of(case, 1)[comm.rank], ids_of(case, 1)[comm.rank], w),
            comm=comm,
            num_experts=5,
            capacity=most_rows(case),
            max_tokens=5,
        ) as step:
            for seed in range(2, 6):
                x, ids = tokens_of(case, seed)[comm.rank], ids_of(case, seed)[comm.rank].copy()
                if comm.rank == 2 and seed % 2 == 0:
                    ids[1, 1] = 77
                worlds.poison(comm)
                if seed % 2 == 0:
                    with pytest.raises(ValueError, match=r"rank 2.*77"):
                        step(x, ids, w)
                else:
                    rows, layout = step(x, ids, w)
                    assert_right(comm, case, seed, rows, layout)

    for transport in TRANSPORTS:
        worlds.run(3, program, nodes=(2, 1), transport=transport)


X, IDS, W = np.ones((4, 6), np.float32), np.zeros((4, 1), np.int32), np.ones((1, 6, 5), np.float32)


def combine_ones(comm):
    """What each token gets: 6, from rank 0's expert."""
    rows, layout = mk.moe_dispatch_gemm(X, IDS, W, comm=comm)
    return mk.moe_combine(rows, np.ones((4, 1), np.float32), layout, comm=comm)


def layer_of_ones(comm):
    weights = np.ones((4, 1), np.float32)
    return mk.moe_layer(X, IDS, weights, W, W[:, :5, :], comm=comm, activation=None)


CALLS = {
    "moe_dispatch_gemm": lambda comm: mk.moe_dispatch_gemm(X, IDS, W, comm=comm)[0],
    "moe_combine": combine_ones,
    "moe_layer": layer_of_ones,
}


@pytest.mark.parametrize(
    ("operator", "fault", "transport"),
    [
        ("moe_dispatch_gemm", "down@1", "efa"),
        ("moe_dispatch_gemm", "error@30", "verbs"),
        ("moe_combine", "error@30", "efa"),
        ("moe_layer", "down@1", "verbs"),
    ],
)
def test_a_network_that_fails_is_an_error_on_all_ranks(operator, fault, transport, monkeypatch):
    worlds.run(3, CALLS[operator], nodes=(2, 1), transport=transport)  # compiles
    monkeypatch.setenv("MKERNEL_FABRIC", f"soft:seed=3,fault={fault}")

    def program(comm):
        for _ in range(20):
            CALLS[operator](comm)

    began = time.monotonic()
    results = outcomes(3, program, nodes=(2, 1), transport=transport)
    assert time.monotonic() - began < 10
    all_are(results, mk.NetworkError, "network card soft")


@pytest.mark.parametrize("operator", CALLS)
def test_ranks_on_different_nodes_that_differ_are_told(operator):
    def program(comm):
        CALLS[operator](comm)
        if comm.rank == 2:
            return comm.barrier()
        return CALLS[operator](comm)

    results = outcomes(3, program, nodes=(2, 1), entry_timeout=20)
    all_are(results, mk.ArgumentMismatchError, "rank 2 calls")
