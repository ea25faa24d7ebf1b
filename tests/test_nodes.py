"""Ranks on several virtual nodes, which reach each other over the network only."""

import itertools
import os
import resource
import signal
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import worlds
from launcher import mpirun
from shapes import cases, operands
from test_processes import mishap
from test_reductions import CLASSES, call, call_case, share
from worlds import all_are

import mkernel_cp as mk
from mkernel_cp import errors
from mkernel_cp.topology import Topology
from mkernel_cp.transport import soft

TRANSPORTS = ("verbs", "efa")
NODES = [(1, 1), (2, 1), (1, 2, 1), (2, 2), (1, 1, 1, 1), (1, 3)]
SIZES = (2, 3, 4)
A, B = np.ones((4, 6), np.float32), np.ones((6, 5), np.float32)
SUMS = ("gemm_reduce_scatter", "gemm_allreduce")
OPERATORS = ("allgather_gemm", *SUMS)
TYPES = "bfloat16", "float32"  # few: it is not the arithmetic that differs between nodes
CASES, SUM_CASES = (
    [
        case
        for size in SIZES
        for case in cases(operator, count=6, seed=size, world=size, dtypes=TYPES, largest=90)
    ]
    for operator in ("allgather_gemm", "reduction")
)
SUM_CASES = [replace(case, transfer_dtype=case.dtype) for case in SUM_CASES]


@pytest.mark.parametrize("sizes", [(3,), (1, 2), (2, 1), (1, 2, 1), (2, 3, 1), (1, 1, 1, 1)])
def test_a_rank_sends_once_to_each_other_node(sizes):
    ranks = [Topology(rank, sizes) for rank in range(sum(sizes))]
    for own in ranks:
        assert len(own.gateways) == len(sizes) - 1
        assert {ranks[g].node for g in own.gateways} == {*range(len(sizes))} - {own.node}
        assert all(own.rank in ranks[gateway].sources for gateway in own.gateways)
        assert all(own.rank in ranks[source].gateways for source in own.sources)
        assert all(other in ranks[link].links for other in [own.rank] for link in own.links)
        for rank, holder in enumerate(own.holders):
            assert ranks[holder].node == own.node
            assert holder == rank or rank in ranks[holder].sources


def test_gateways_share_the_work_evenly():
    assert [Topology(rank, (4, 2)).gateways for rank in range(6)] == [[4], [5], [4], [5], [0], [1]]
    assert Topology(4, (4, 2)).sources == [0, 2]
    assert Topology(1, (4, 2)).holders == [0, 1, 2, 3, 0, 1]


def on_nodes(cases, every):
    """Some of the cases, each with nodes that it fits."""
    fits = {size: [nodes for nodes in NODES if sum(nodes) == size] for size in SIZES}
    some = [(case, fits[case.world]) for case in cases][::every]
    return [(case, nodes[i % len(nodes)]) for i, (case, nodes) in enumerate(some)]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(("case", "nodes"), on_nodes(CASES, 5), ids=str)
def test_result_is_within_its_bound(case, nodes, transport):
    def program(comm):
        for seed in (1, 2):
            a_blocks, b_blocks = operands(case, seed)
            a, b = a_blocks[comm.rank], b_blocks[comm.rank]
            out = worlds.nan_filled((case.m, case.n_per_rank[comm.rank]), case.out_dtype)
            worlds.poison(comm)
            asked = {"row_counts": worlds.row_counts(case), "dtype": case.out_dtype}
            mk.allgather_gemm(a, b, comm=comm, out=out, **asked)
            assert worlds.expected(case, seed, comm.rank).check(out) <= 1

    worlds.run(case.world, program, nodes=nodes, transport=transport)


@pytest.mark.parametrize("operator", SUMS)
@pytest.mark.parametrize(("case", "nodes"), on_nodes(SUM_CASES, 8), ids=str)
def test_a_sum_is_within_its_bound(operator, case, nodes):
    def program(comm):
        out, expected = call_case(operator, comm, case, 1)
        expected.assert_close(out, f"rank {comm.rank}")

    worlds.run(case.world, program, nodes=nodes, transport=TRANSPORTS[case.k % 2])


class Turns:
    """Calls one after another, each with operands of its own."""

    def __init__(self, operator, size, calls):
        rng = np.random.default_rng(size)
        counts = tuple(int(rows) for rows in rng.integers(0, 40, size))
        if operator == "gemm_allreduce":
            counts = mk.reference.array_split_counts(sum(counts), size)
        m, n, start = sum(counts), 29, np.cumsum([0, *counts])
        self.counts = counts
        if operator == "allgather_gemm":
            data = rng.standard_normal((calls, m, 37)).astype(np.float32)
            self.b = [np.full((37, n), rank + 1, np.float32) for rank in range(size)]
            self.a = [[x[start[r] : start[r + 1]] for x in data] for r in range(size)]
            self.expected = [[x @ b for x in data] for b in self.b]
            self.options = [mk.Options(chunk_bytes=1000)]
            return
        depths = [*rng.integers(1, 30, size - 1), 0]
        self.a = [rng.standard_normal((calls, m, k)).astype(np.float32) for k in depths]
        self.b = [rng.standard_normal((k, n)).astype(np.float32) for k in depths]
        sums = [sum(a[i] @ b for a, b in zip(self.a, self.b, strict=True)) for i in range(calls)]
        rows = [slice(start[r], start[r + 1]) for r in range(size)]
        whole = operator == "gemm_allreduce"
        self.expected = [[x if whole else x[part] for x in sums] for part in rows]
        splits = (1, 1), (0, 2, 2), (1, 2, 3)
        self.options = [mk.Options(split=split, tile=(8, 12, 8)) for split in splits]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    ("operator", "nodes"),
    [*itertools.product(OPERATORS[:1], NODES[1:]), *itertools.product(SUMS, NODES[2:5])],
    ids=str,
)
def test_back_to_back_calls_with_late_ranks_and_roles(operator, nodes, transport):
    size, calls = sum(nodes), 7
    turns = Turns(operator, size, calls)

    def program(comm):
        lanes = 1 + sum(nodes[:1])
        delays = (2_000_000, 500_000, 1_000_000, 1_500_000, 800_000)
        worlds.chaos(comm, seed=7 * size + lanes, lanes=lanes, delay_ns=delays)
        a, b = comm.empty(turns.a[comm.rank][0].shape, np.float32), turns.b[comm.rank]
        for step in range(calls):
            if step % 3 == 2:
                comm.barrier()  # generations that the network does not see
            a[:] = turns.a[comm.rank][step]
            worlds.poison(comm)
            options = turns.options[step % len(turns.options)]
            out = call(operator, comm, a, b, row_counts=turns.counts, options=options)
            a[:] = np.nan
            np.testing.assert_allclose(out, turns.expected[comm.rank][step], rtol=0, atol=1e-3)

    worlds.run(size, program, nodes=nodes, transport=transport)


@pytest.mark.software
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("order", ["C", "F"])
def test_each_byte_crosses_the_network_once_and_no_heap_is_mapped(order, transport):
    """In place, packed or with gaps, in either order of the operand."""
    counts, k = (9, 0, 31, 14), 32

    def program(comm):
        a = comm.zeros((counts[comm.rank], 2 * k), np.float32, order=order)
        for own in (a[:, :k], a[:, ::2], np.array(a[:, :k], order=order)):
            own[:] = comm.rank
            b = np.ones((k, comm.rank), np.float32)  # rank 0 has no columns, and passes rows on
            with mk.AllGatherGemm(own, b, comm=comm, row_counts=counts) as step:
                before, pulled = comm._runtime.network.counters(), worlds.bytes_from_peers(comm)
                for _ in range(3):
                    out = step(own, b)
                sent = comm._runtime.network.counters()[0] - before[0]
                assert sent == 3 * step.plan.bytes_to_network
                assert sent == 3 * (2 * counts[comm.rank] * k * 4 + letters(comm))
                assert worlds.bytes_from_peers(comm) - pulled == 3 * step.plan.bytes_from_peers
            assert np.array_equal(out, np.repeat(np.arange(4), counts)[:, None] * k * b[:1])
        assert comm._runtime.memory.segments.pointers.shape[0] > 1
        return maps_its_node_only(comm)

    counters = worlds.run(4, program, nodes=(1, 2, 1), transport=transport)
    sent, received, *_ = map(sum, zip(*counters, strict=True))
    assert sent == received


def letters(comm):
    """Bytes of a call besides its data."""
    return 64 * (len(comm._runtime.topology.gateways) + len(comm._runtime.topology.sources))


def maps_its_node_only(comm):
    """Check that no heap of another node is mapped; return what its card has counted."""
    others = [rank for rank in range(comm.size) if rank not in comm._runtime.topology.peers]
    assert not comm._runtime.memory.segments.pointers[:, others].any()
    assert comm._runtime.memory.segments.pointers[:, comm._runtime.topology.peers].all()
    return comm._runtime.network.counters()


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("operator", SUMS)
def test_a_node_sends_one_sum_of_each_row(operator, transport):
    """Whatever the tiles: none of them crosses with gaps. One rank has no rows."""
    m, k, n = 3, 7, 31

    def program(comm):
        a, b = np.ones((m, k), np.float32), np.ones((k, n), np.float32)
        rows, topology = comm.row_counts(m), comm._runtime.topology
        for tile in ((2, 12, 8), (5, 40, 3)):
            with CLASSES[operator](a, b, comm=comm, options=mk.Options(tile=tile)) as step:
                before, pushed = comm._runtime.network.counters(), worlds.bytes_from_peers(comm)
                for _ in range(3):
                    out = step(a, b)
                    assert (out == 4 * k).all()
                sent = comm._runtime.network.counters()[0] - before[0]
                assert sent == 3 * step.plan.bytes_to_network
                assert worlds.bytes_from_peers(comm) - pushed == 3 * step.plan.bytes_from_peers
            partial = sum(rows[source] for source in topology.sources)
            total = len(topology.gateways) * rows[comm.rank] * (operator == "gemm_allreduce")
            assert sent == 3 * ((partial + total) * n * 4 + letters(comm))
        return maps_its_node_only(comm)

    counters = worlds.run(4, program, nodes=(1, 2, 1), transport=transport)
    sent, received, *_ = map(sum, zip(*counters, strict=True))
    assert sent == received


@pytest.mark.parametrize("nodes", [(2, 2), (1, 2, 1), (1, 1, 1, 1), (3, 3), (3, 1, 2)], ids=str)
@pytest.mark.parametrize("operator", SUMS)
def test_sums_go_around_the_ring_of_a_node_and_then_from_node_to_node(operator, nodes):
    """Every product is exact, and the order of the additions is seen in the last bits."""
    size = sum(nodes)
    rng = np.random.default_rng(size)
    m, n = 13, 31
    spread = 2.0 ** rng.integers(0, 30, (size, 1, n))
    b = (rng.standard_normal((size, 1, n)) * spread).astype(np.float32)
    counts = mk.reference.array_split_counts(m, size)
    begins = np.cumsum([0, *nodes])
    home = [node for node, count in enumerate(nodes) for _ in range(count)]

    def row(owner):
        total = None
        for node, count in enumerate(nodes):
            first = owner - begins[home[owner]]
            of_node = b[begins[node] + first % count]
            for step in range(1, count):
                of_node = of_node + b[begins[node] + (first + step) % count]
            total = of_node if total is None else total + of_node
        return total

    whole = np.vstack([row(owner) for owner in np.repeat(range(size), counts)])

    def program(comm):
        a = np.ones((m, 1), np.float32)
        for options in (mk.Options(split=(1, 1)), mk.Options((0, 2, 3), (2, 8, 8))):
            out = call(operator, comm, a, b[comm.rank], options=options)
            np.testing.assert_array_equal(out, whole[share(operator, comm, counts)])

    worlds.run(size, program, nodes=nodes, transport=TRANSPORTS[size % 3 % 2])


def test_sums_have_the_same_bits_on_all_ranks_for_any_transport_and_split():
    """Products are rounded on their way."""
    rng = np.random.default_rng(2)
    a, b = rng.standard_normal((3, 40, 25)), rng.standard_normal((3, 25, 18))

    def program(comm):
        own, other = a[comm.rank].astype("bfloat16"), b[comm.rank].astype("bfloat16")
        found = []
        for options in (None, mk.Options((2, 3, 2), (16, 5, 24)), mk.Options((0, 2), (7, 1024, 8))):
            whole = mk.gemm_allreduce(own, other, comm=comm, options=options)
            part = mk.gemm_reduce_scatter(own, other, comm=comm, options=options)
            found.append(whole.tobytes())
            assert part.tobytes() == whole[comm.rows(40)].tobytes()
        return found

    results = [worlds.run(3, program, nodes=(1, 2), transport=t) for t in TRANSPORTS]
    assert len({bits for ranks in results for found in ranks for bits in found}) == 1


def test_the_same_bits_on_any_number_of_nodes():
    rng = np.random.default_rng(1)
    a, b = rng.standard_normal((40, 65)), rng.standard_normal((65, 8))

    def program(comm):
        return mk.allgather_gemm(a[comm.rows(40)], b, comm=comm).tobytes()

    results = [worlds.run(4, program, nodes=n) for n in (None, 2, (1, 2, 1), 4)]
    assert len({*results[0], *results[1], *results[2], *results[3]}) == 1


def test_what_works_within_one_node_only_says_so():
    source = '#include "mkernel/roles.cuh"\nMK_KERNEL(nothing, mk::Trace, p) {}\n'

    def program(comm):
        comm.launch(mk.Module(source).kernel("nothing"), 1)

    with pytest.raises(mk.ConfigurationError, match=r"launch.*one node only.*MKERNEL_NODES"):
        worlds.run(2, program, nodes=2)


def test_a_trace_shows_the_agents_of_the_network(tmp_path):
    path = tmp_path / "trace.json"

    def program(comm):
        with mk.trace(path):
            mk.gemm_reduce_scatter(A, B, comm=comm)

    worlds.run(3, program, nodes=(2, 1))
    text = path.read_text()
    roles = "inter_send", "inter_receive", "inter_reduce"
    for word in (*roles, "over the network", "receipt of rank"):
        assert word in text


# --- failures: alike on all ranks ---------------------------------------------------------------


def outcomes(size, program, **options):
    """What each rank raised, or returned."""

    def main(mpi):
        try:
            with mk.Communicator(mpi, **options) as comm:
                return program(comm)
        except errors.Error as error:
            return error

    return mk.LocalWorld(size).run(main)


@pytest.mark.parametrize(
    ("operator", "fault", "transport"),
    [
        *itertools.product(OPERATORS[:1], ["down@1", "down@40", "error@30"], TRANSPORTS),
        *itertools.product(SUMS, ["error@30"], TRANSPORTS),
        *zip(SUMS, ["down@1"] * 2, TRANSPORTS, strict=False),
    ],
)
def test_a_network_that_fails_is_an_error_on_all_ranks(operator, fault, transport, monkeypatch):
    gathers, options = operator == "allgather_gemm", {"nodes": (2, 1), "transport": transport}

    def program(comm, calls=20):
        rows = share(operator, comm, comm.row_counts(len(A)))
        out = np.zeros((12 if gathers else rows.stop - rows.start, 5), np.float32)
        try:
            for _ in range(calls):
                call(operator, comm, A, B, out=out)
        except mk.NetworkError:
            assert (np.isnan(out) | (out == (6 if gathers else 18))).all()
            assert np.isnan(out).any() or fault != "down@1"
            raise

    worlds.run(3, program, 1, **options)  # compiles
    monkeypatch.setenv("MKERNEL_FABRIC", f"soft:seed=3,fault={fault}")
    began = time.monotonic()
    results = outcomes(3, program, **options)
    assert time.monotonic() - began < 10
    all_are(results, mk.NetworkError, "network card soft", "in an exchange with rank")


@pytest.fixture
def little_memory_to_lock():
    most = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 16, most[1]))
    yield
    resource.setrlimit(resource.RLIMIT_MEMLOCK, most)


@pytest.mark.software
@pytest.mark.parametrize(
    ("fault", "transport", "kind", "texts"),
    [
        ("absent", "verbs", mk.ConfigurationError, ("no network card soft", "there are: none")),
        ("denied", "efa", mk.ConfigurationError, ("ibv_open_device (may this user", "errno 13")),
        ("refuse", "verbs", mk.NetworkError, ("ibv_reg_mr of", "errno 95")),
        ("memlock", "efa", mk.NetworkError, ("ulimit -l: 65536 bytes", "errno 12")),
    ],
)
@pytest.mark.usefixtures("little_memory_to_lock")
def test_what_a_card_refuses_is_an_error_on_all_ranks(fault, transport, kind, texts, monkeypatch):
    """Nothing is left, and the next communicator works."""

    def program(comm):
        mk.allgather_gemm(comm.asarray(A), B, comm=comm)  # its operand is too much to lock

    options = {"nodes": (2, 1), "transport": transport}
    worlds.run(3, program, **options)
    files, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    monkeypatch.setenv("MKERNEL_FABRIC", f"soft:fault={fault}")
    began = time.monotonic()
    all_are(outcomes(3, program, **options), kind, "rank 0: ", *texts)
    assert time.monotonic() - began < 10
    monkeypatch.undo()
    worlds.run(3, program, **options)
    assert len(os.listdir("/proc/self/fd")) <= files
    assert threading.active_count() <= threads


@pytest.mark.software
def test_cards_that_differ_in_number_are_an_error_on_all_ranks():
    def main(mpi):
        try:
            cards = ["soft0", "soft1"][: 1 + mpi.Get_rank()]
            mk.Communicator(mpi, nodes=2, nics=cards).close()
        except mk.Error as error:
            return error
        return None

    all_are(mk.LocalWorld(2).run(main), mk.ConfigurationError, "network cards, [1, 2]")


@pytest.mark.software
def test_cards_on_different_networks_are_an_error_on_all_ranks():
    def main(mpi):
        try:
            mk.Communicator(mpi, nodes=2, nics=[soft.VERBS_CARDS[mpi.Get_rank()]]).close()
        except mk.Error as error:
            return error
        return None

    texts = "soft0 and the card of rank 1 do not understand each other", "there InfiniBand"
    all_are(mk.LocalWorld(2).run(main), mk.NetworkError, *texts)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("operator", OPERATORS)
def test_ranks_on_different_nodes_that_differ_are_told(operator, warm, transport):
    longer = np.ones((5, 6), np.float32)
    others = {
        "shape": lambda comm: call(operator, comm, longer, B),
        "barrier": lambda comm: comm.barrier(),
    }
    for other in others.values():

        def program(comm, other=other):
            if warm:
                call(operator, comm, A, B)
                call(operator, comm, longer, B)
            if comm.rank == 2:
                return other(comm)
            return call(operator, comm, A, B)

        results = outcomes(3, program, nodes=(2, 1), transport=transport, entry_timeout=20)
        all_are(results, mk.ArgumentMismatchError, "rank 2 calls")


@pytest.mark.parametrize("operator", OPERATORS)
def test_a_rank_of_another_node_that_refuses_or_never_calls(operator):
    def refuses(comm):
        call(operator, comm, A, B)
        call(operator, comm, A, B if comm.rank else B[:3])

    def leaves(comm):
        call(operator, comm, A, B)
        if comm.rank:
            call(operator, comm, A, B)

    def main(mpi, program, **options):
        try:
            with mk.Communicator(mpi, nodes=(1, 2), **options) as comm:
                program(comm)
        except (errors.Error, ValueError) as error:
            return error
        return None

    own, *others = mk.LocalWorld(3).run(main, refuses)
    assert type(own) is ValueError
    all_are(others, mk.PeerError, "rank 0 raised instead of calling")
    own, *others = mk.LocalWorld(3).run(main, leaves)
    assert own is None
    all_are(others, mk.PeerLostError, "rank 0 has closed")


@pytest.mark.software
def test_many_communicators_one_after_another_and_side_by_side():
    """Each has queue pairs, keys and a proxy of its own; all of it is given back."""

    def program(mpi):
        before = None
        for turn in range(8):
            with (
                mk.Communicator(mpi, nodes=2, transport=TRANSPORTS[turn % 2]) as one,
                mk.Communicator(mpi, nodes=(1, 2)) as other,
            ):
                for comm in (one, other, one):
                    out = mk.allgather_gemm(A * turn, B, comm=comm)
                    assert (out == 6 * turn).all()
            mpi.allgather(None)
            files = len(os.listdir("/proc/self/fd"))
            before = before or files
            assert files <= before + 3

    mk.LocalWorld(3).run(program)


@pytest.mark.software
@pytest.mark.mpi
@pytest.mark.parametrize(("transport", "hosts"), [("verbs", ()), ("efa", (2, 2))])
def test_survivors_of_a_killed_rank_name_it_on_all_nodes(transport, hosts, tmp_path, monkeypatch):
    if hosts:
        monkeypatch.setenv("MKERNEL_FABRIC", "soft")
    else:
        monkeypatch.setenv("MKERNEL_NODES", "2")
    monkeypatch.setenv("MKERNEL_TRANSPORT", transport)
    said, status, _ = mishap("killed", tmp_path, *hosts)
    assert status == {0: 1, 1: -signal.SIGKILL, 2: 1, 3: 1}
    assert sorted(said) == [0, 2, 3]
    for text in said.values():
        assert "PeerLostError: lost rank 1" in text
        assert float(text.split()[0]) < 10


@pytest.mark.software
@pytest.mark.mpi
@pytest.mark.parametrize(
    ("ranks", "nodes", "transport"),
    [(4, "2", "verbs"), (4, "1,2,1", "efa"), (4, "1,1,1,1", "verbs"), (6, "2", "efa")],
)
def test_the_demo_is_right_between_processes(ranks, nodes, transport):
    environment = {"MKERNEL_NODES": nodes, "MKERNEL_TRANSPORT": transport}
    environment["MKERNEL_FABRIC"] = "soft:seed=5"
    result = mpirun(ranks, "-m", "mkernel_cp", "demo", env=environment)
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"over {transport} on network cards made of software" in result.stdout
    assert "all 25 rows agree with the reference" in result.stdout
