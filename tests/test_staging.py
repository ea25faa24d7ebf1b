"""Between nodes through slots of host memory, as where network cards reach no memory of kernels."""

import numpy as np
import pytest
import worlds
from routing import ExpertCase, expected_layer, expected_sum, ids_of
from test_moe_combine import dispatched, own_rows
from test_moe_dispatch_gemm import assert_right as assert_rows
from test_moe_dispatch_gemm import call as dispatch
from test_moe_dispatch_gemm import most_rows
from test_moe_layer import call as call_layer
from test_moe_layer import own_operands
from test_nodes import OPERATORS, SUMS, TRANSPORTS, Turns, all_are, letters, outcomes
from test_reductions import CLASSES, call
from test_ring_attention import AttentionCase
from test_ring_attention import assert_right as assert_attention
from test_ring_attention import call as attend

import mkernel_cp as mk
from mkernel_cp import slots, tiles
from mkernel_cp.attention_plan import Attention, plan_ring_attention
from mkernel_cp.moe_plan import (
    Layer,
    layer_tile,
    plan_moe_combine,
    plan_moe_dispatch_gemm,
    plan_moe_layer,
)

WORLDS = [(2, (1, 1), "efa"), (3, (2, 1), "verbs"), (4, (1, 2, 1), "efa")]
A, B = np.ones((4, 6), np.float32), np.ones((6, 5), np.float32)


@pytest.fixture(autouse=True)
def staged(monkeypatch):
    worlds.stage(monkeypatch, 512)


@pytest.mark.operator
@pytest.mark.parametrize(
    ("size", "nodes", "operator", "transport"),
    [
        (2, (1, 1), "gemm_reduce_scatter", "efa"),
        (2, (1, 1), "gemm_allreduce", "verbs"),
        (3, (1, 1, 1), "allgather_gemm", "verbs"),
        (2, (1, 1), "allgather_gemm", "verbs"),
        (4, (1, 2, 1), "allgather_gemm", "efa"),
        (4, (1, 1, 1, 1), "gemm_reduce_scatter", "efa"),
        (4, (2, 1, 1), "gemm_allreduce", "verbs"),
    ],
    ids=str,
)
def test_calls_and_replays_with_late_ranks_and_roles(size, nodes, operator, transport, monkeypatch):
    """Over a link that still reads slots when others could be filled."""
    monkeypatch.setenv("MKERNEL_FABRIC", "soft:rate=0.01")
    turns, calls = Turns(operator, size, 6), range(6)

    def program(comm):
        assert comm._runtime.network.staged
        late = (500_000, 200_000, 300_000, 400_000, 300_000, 600_000, 600_000)
        worlds.chaos(comm, seed=7 * size, lanes=1 + size % 3, delay_ns=late)
        with worlds.stream(comm):
            a = comm.empty(turns.a[comm.rank][0].shape, np.float32)
            b = worlds.put(comm, turns.b[comm.rank])
            out = worlds.put(comm, np.zeros_like(turns.expected[comm.rank][0]))
            every = [None] if comm._runtime.machine.gpu else turns.options
            options = every[size % len(every)]
            asked = {"row_counts": turns.counts, "options": options}
            call(operator, comm, a, b, **asked)
            comm.synchronize()
            replay = worlds.replayer(comm, lambda: call(operator, comm, a, b, out=out, **asked))
            for step in calls:
                worlds.fill(comm, a, turns.a[comm.rank][step])
                worlds.fill(comm, out, np.nan)
                if step % 3 == 1:
                    call(operator, comm, a, b, **asked)
                worlds.poison(comm)
                replay()
                worlds.fill(comm, a, np.nan)
                found = worlds.get(comm, out)
                np.testing.assert_allclose(found, turns.expected[comm.rank][step], 0, 1e-3)
            comm.synchronize()

    worlds.run(size, program, nodes=nodes, transport=transport)


@pytest.mark.operator
@pytest.mark.parametrize(("size", "nodes", "transport"), WORLDS, ids=str)
def test_attention_over_keys_of_other_nodes(size, nodes, transport):
    case = AttentionCase("staged", (41, 30, 0, 19)[:size], (4, 2), 40, "bfloat16", causal=True)

    def program(comm):
        for seed in (1, 2):
            assert_attention(comm, case, seed, attend(comm, case, seed))

    worlds.run(size, program, nodes=nodes, transport=transport)


@pytest.mark.operator
@pytest.mark.parametrize(("size", "nodes", "transport"), WORLDS, ids=str)
def test_experts_on_other_nodes(size, nodes, transport):
    case = ExpertCase("staged", (23, 30, 0, 9)[:size], 40, 24, 5, 3, "bfloat16", "zipf")

    def program(comm):
        for seed in (1, 2):
            assert_rows(comm, case, seed, *dispatch(comm, case, seed, capacity=most_rows(case)))
            layout, (rows, weights) = dispatched(comm, case, seed), own_rows(comm, case, seed)
            worlds.poison(comm)
            out = worlds.get(comm, mk.moe_combine(rows, weights, layout, comm=comm))
            expected_sum(case, seed, comm.rank, nodes=nodes).assert_close(out)

    worlds.run(size, program, nodes=nodes, transport=transport)


@pytest.mark.operator
@pytest.mark.parametrize(("size", "nodes", "transport"), WORLDS, ids=str)
def test_layers_of_experts_on_other_nodes(size, nodes, transport):
    case = ExpertCase(
        *("staged", (23, 30, 0, 9)[:size], 40, 24, 5, 3, "bfloat16", "zipf", None, "swiglu", 16)
    )

    def program(comm):
        for seed in (1, 2):
            out = call_layer(comm, case, seed)
            expected_layer(case, seed, comm.rank, nodes=nodes).assert_close(out)

    worlds.run(size, program, nodes=nodes, transport=transport)


@pytest.mark.software
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("chunk_bytes", [64, 256, 2048])
def test_cards_write_what_the_plan_says_and_no_more(order, chunk_bytes):
    """Several lines in a slot, or a line in several."""
    counts, k = (9, 0, 31, 14), 100

    def program(comm):
        a = np.full((counts[comm.rank], k), comm.rank, np.float32, order=order)
        b, options = np.ones((k, 3), np.float32), mk.Options(chunk_bytes=chunk_bytes)
        with mk.AllGatherGemm(a, b, comm=comm, row_counts=counts, options=options) as step:
            before = comm._runtime.network.counters()[0]
            out = step(a, b)
            sent = comm._runtime.network.counters()[0] - before
            assert sent == step.plan.bytes_to_network > 2 * a.nbytes + letters(comm)
            assert "through slots of host memory" in step.plan.explain()
        assert np.array_equal(out, np.repeat(np.arange(4), counts)[:, None] * k * b[:1])

    worlds.run(4, program, nodes=(1, 2, 1), transport=TRANSPORTS[chunk_bytes % 3 % 2])


@pytest.mark.software
@pytest.mark.parametrize("operator", SUMS)
def test_cards_write_sums_as_the_plan_says(operator):
    m, k, n = 11, 7, 31

    def program(comm):
        a, b = np.ones((m, k), np.float32), np.ones((k, n), np.float32)
        for tile in ((2, 12, 8), (5, 40, 3)):
            with CLASSES[operator](a, b, comm=comm, options=mk.Options(tile=tile)) as step:
                before = comm._runtime.network.counters()[0]
                assert (step(a, b) == 4 * k).all()
                assert comm._runtime.network.counters()[0] - before == step.plan.bytes_to_network

    worlds.run(4, program, nodes=(1, 2, 1))


@pytest.mark.software
@pytest.mark.parametrize("window", [1, 2, None])
def test_cards_write_keys_and_values_as_the_plan_says(window):
    counts = (9, 0, 31, 14)

    def program(comm):
        q, k = (np.ones((2, counts[comm.rank], heads, 10), np.float32) for heads in (6, 3))
        room = window and window * sum(counts) * 2 * 10 * 4
        asked = {"seq_counts": counts, "causal": window == 2, "max_workspace": room}
        options = mk.Options(chunk_bytes=640)
        with mk.RingAttention(q, k, k, comm=comm, options=options, **asked) as step:
            before = comm._runtime.network.counters()[0]
            assert np.allclose(step(q, k, k), 1)
            assert comm._runtime.network.counters()[0] - before == step.plan.bytes_to_network
            assert "through slots of host memory" in step.plan.explain()

    worlds.run(4, program, nodes=(1, 2, 1), transport=TRANSPORTS[window == 2])


@pytest.mark.software
@pytest.mark.parametrize("kind", ["uniform", "one rank"])
def test_cards_write_tokens_and_sums_as_the_plan_says(kind):
    case = ExpertCase("once", (20, 0, 9, 13), 150, 5, 9, 4, "float32", kind, columns=70)
    ids = ids_of(case, 1)

    def program(comm):
        def sent(call):
            before = comm._runtime.network.counters()[0]
            call()
            return comm._runtime.network.counters()[0] - before

        own, options = own_operands(comm, case, 1), mk.Options(chunk_bytes=1500)
        asked = {"comm": comm, "options": options}
        with mk.MoeDispatchGemm(*own[:2], own[3], num_experts=9, **asked) as step:
            planned = step.plan.dispatch.bytes_to_network(comm.rank, ids)
            assert sent(lambda: step(*own[:2], own[3])) == planned
        layout = dispatched(comm, case, 1)
        made, weights = own_rows(comm, case, 1)
        few = mk.Options(chunk_bytes=20)  # more chunks than agents
        with mk.MoeCombine(made, weights, layout, comm=comm, options=few) as step:
            out = worlds.nan_filled((case.tokens[comm.rank], case.n), np.float32)
            planned = step.plan.combine.sums_to_network(comm.rank, ids, 9)
            planned += step.plan.combine.weights_to_network(comm.rank, case.tokens)
            assert sent(lambda: step(made, weights, layout, out=out)) == planned
            expected_sum(case, 1, comm.rank, nodes=comm._runtime.topology.sizes).assert_close(out)
        with mk.MoeLayer(*own, num_experts=9, activation=None, **asked) as step:
            planned = step.plan.layer.dispatch.bytes_to_network(comm.rank, ids)
            planned += step.plan.layer.combine.sums_to_network(comm.rank, ids, 9)
            assert sent(lambda: step(*own)) == planned

    worlds.run(4, program, nodes=(1, 2, 1), transport=TRANSPORTS[kind == "uniform"])


def test_those_who_serve_the_network_are_among_what_a_gpu_runs():
    half, options, gpu, agents = np.dtype("f2"), mk.Options(), tiles.Gpu("sm_80", 66, 163 << 10), 66
    asked = {"nodes": (1, 1), "staged": True}
    attention = Attention(
        *(1, (4096, 4096), 8, 8, 64, half), causal=True, scale=1.0, layout="contiguous", **asked
    )
    layer = Layer(2, 512, 512, 512, 8, 2, half, half, "silu", 4096, **asked)
    tile = layer_tile(0, layer, options, gpu)
    plans = [
        plan_ring_attention(0, attention, options, gpu, agents),
        plan_moe_dispatch_gemm(0, layer.dispatch, tile, options, agents),
        plan_moe_combine(0, layer.combine, options, gpu, agents),
        plan_moe_layer(0, layer, tile, options, agents),
    ]
    for each in plans:
        assert sum(each.split) + each.network_agents == agents, each.operator
        assert each.staged


def test_a_line_may_be_longer_than_a_slot(monkeypatch):
    monkeypatch.setattr(slots, "SLOT_BYTES", 128)
    assert [slots.parcels(*of) for of in ((0, 5), (5, 0), (3, 128), (4, 40), (2, 300))] == [
        *(1, 1, 3, 2, 6)
    ]


@pytest.mark.parametrize(
    ("operator", "fault"), [(OPERATORS[0], "down@40"), (OPERATORS[1], "error@30")]
)
def test_a_network_that_fails_is_an_error_on_all_ranks(operator, fault, monkeypatch):
    monkeypatch.setenv("MKERNEL_FABRIC", f"soft:seed=3,fault={fault}")

    def program(comm):
        for _ in range(20):
            call(operator, comm, A, B)

    results = outcomes(3, program, nodes=(2, 1))
    all_are(results, mk.NetworkError, "network card soft", "in an exchange with rank")


def test_a_rank_that_takes_nothing_out_ends_in_the_deadline():
    def program(comm):
        late = 3_000_000_000 if comm.rank else 0  # at the most; the seed says how much
        worlds.chaos(comm, seed=5, delay_ns=(0,) * 6 + (late,))
        mk.allgather_gemm(A, B, comm=comm)

    results = outcomes(2, program, nodes=2, progress_timeout=0.1)
    all_are(results, mk.TimeoutError, "s in allgather_gemm(", "progress_timeout=")
