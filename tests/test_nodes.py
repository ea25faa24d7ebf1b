"""Ranks on several virtual nodes, which reach each other over the network only."""

import os
import resource
import signal
import threading
import time

import numpy as np
import pytest
import worlds
from launcher import mpirun
from shapes import cases, operands
from test_processes import mishap

import mkernel_cp as mk
from mkernel_cp import errors
from mkernel_cp.topology import Topology
from mkernel_cp.transport import soft

TRANSPORTS = ("verbs", "efa")
NODES = [(1, 1), (2, 1), (1, 2, 1), (2, 2), (1, 1, 1, 1), (1, 3)]
CASES = [case for size in (2, 3, 4) for case in cases(count=6, seed=size, world=size, largest=90)]
A, B = np.ones((4, 6)), np.ones((6, 5))


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


def fits(case):
    return [nodes for nodes in NODES if sum(nodes) == case.world]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    ("case", "nodes"),
    [(case, fits(case)[i % len(fits(case))]) for i, case in enumerate(CASES) if fits(case)][::4],
    ids=str,
)
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


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("nodes", NODES[1:], ids=str)
def test_back_to_back_calls_with_late_ranks_and_roles(nodes, transport):
    size = sum(nodes)
    rng = np.random.default_rng(size)
    counts = tuple(int(rows) for rows in rng.integers(0, 40, size))
    k, columns, calls = 37, 29, 12
    data = rng.standard_normal((calls, sum(counts), k)).astype(np.float32)
    start = np.cumsum([0, *counts])

    def program(comm):
        lanes = 1 + sum(nodes[:1])
        delays = (2_000_000, 500_000, 1_000_000, 1_500_000)
        worlds.chaos(comm, seed=7 * size + lanes, lanes=lanes, delay_ns=delays)
        a = comm.empty((counts[comm.rank], k), np.float32)
        b = np.full((k, columns), comm.rank + 1, np.float32)
        options = mk.Options(chunk_bytes=1000)
        for step in range(calls):
            if step % 3 == 2:
                comm.barrier()  # generations that the network does not see
            a[:] = data[step, start[comm.rank] : start[comm.rank + 1]]
            worlds.poison(comm)
            out = mk.allgather_gemm(a, b, comm=comm, row_counts=counts, options=options)
            a[:] = np.nan
            np.testing.assert_allclose(out, data[step] @ b, rtol=0, atol=1e-3)

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
                before, pulled = comm.network.counters(), comm.bytes_from_peers
                for _ in range(3):
                    out = step(own, b)
                sent = comm.network.counters()[0] - before[0]
                assert sent == 3 * step.plan.bytes_to_network
                letters = 64 * (len(comm.topology.gateways) + len(comm.topology.sources))
                assert sent == 3 * (2 * counts[comm.rank] * k * 4 + letters)
                assert comm.bytes_from_peers - pulled == 3 * step.plan.bytes_from_peers
            assert np.array_equal(out, np.repeat(np.arange(4), counts)[:, None] * k * b[:1])
        others = [rank for rank in range(4) if rank not in comm.topology.peers]
        assert comm.segments.pointers.shape[0] > 1
        assert not comm.segments.pointers[:, others].any()
        assert comm.segments.pointers[:, comm.topology.peers].all()
        return comm.network.counters()

    counters = worlds.run(4, program, nodes=(1, 2, 1), transport=transport)
    sent, received, *_ = map(sum, zip(*counters, strict=True))
    assert sent == received


def test_the_same_bits_on_any_number_of_nodes():
    rng = np.random.default_rng(1)
    a, b = rng.standard_normal((40, 65)), rng.standard_normal((65, 8))

    def program(comm):
        return mk.allgather_gemm(a[comm.rows(40)], b, comm=comm).tobytes()

    results = [worlds.run(4, program, nodes=n) for n in (None, 2, (1, 2, 1), 4)]
    assert len({*results[0], *results[1], *results[2], *results[3]}) == 1


def test_what_works_within_one_node_only_says_so():
    calls = {
        "gemm_reduce_scatter": lambda comm: mk.gemm_reduce_scatter(A, B, comm=comm),
        "gemm_allreduce": lambda comm: mk.gemm_allreduce(A, B, comm=comm),
        "ring_attention": lambda comm: mk.ring_attention(*[np.ones((1, 4, 2, 8))] * 3, comm=comm),
        "moe_dispatch_gemm": lambda comm: mk.moe_dispatch_gemm(A, one, B[None], comm=comm),
        "moe_layer": lambda comm: mk.moe_layer(A, one, one * 1.0, B[None], B.T[None], comm=comm),
    }
    one = np.zeros((len(A), 1), np.int32)

    def program(comm, call):
        call(comm)

    for name, call in calls.items():
        with pytest.raises(mk.ConfigurationError, match=f"{name}.*one node only.*MKERNEL_NODES"):
            worlds.run(2, program, call, nodes=2)


def test_a_trace_shows_the_agents_of_the_network(tmp_path):
    path = tmp_path / "trace.json"

    def program(comm):
        with mk.trace(path):
            mk.allgather_gemm(A, B, comm=comm)

    worlds.run(3, program, nodes=(2, 1))
    text = path.read_text()
    for word in ("inter_send", "inter_receive", "over the network", "receipt of rank"):
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


def all_are(results, kind, *texts):
    assert {type(result) for result in results} == {kind}, results
    assert len({str(result) for result in results}) == 1, results
    for text in texts:
        assert text in str(results[0])


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("fault", ["down@1", "down@40", "error@30"])
def test_a_network_that_fails_is_an_error_on_all_ranks(fault, transport, monkeypatch):
    monkeypatch.setenv("MKERNEL_FABRIC", f"soft:seed=3,fault={fault}")

    def program(comm):
        out = np.zeros((12, 5))
        try:
            for _ in range(20):
                mk.allgather_gemm(A, B, comm=comm, out=out)
        except mk.NetworkError:
            assert (np.isnan(out) | (out == 6)).all()
            assert np.isnan(out).any() or fault != "down@1"
            raise

    began = time.monotonic()
    results = outcomes(3, program, nodes=(2, 1), transport=transport)
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
def test_ranks_on_different_nodes_that_differ_are_told(warm, transport):
    others = {
        "shape": lambda comm: mk.allgather_gemm(np.ones((5, 6)), B, comm=comm),
        "barrier": lambda comm: comm.barrier(),
    }
    for other in others.values():

        def program(comm, other=other):
            if warm:
                mk.allgather_gemm(A, B, comm=comm)
                mk.allgather_gemm(np.ones((5, 6)), B, comm=comm)
            if comm.rank == 2:
                return other(comm)
            return mk.allgather_gemm(A, B, comm=comm)

        results = outcomes(3, program, nodes=(2, 1), transport=transport, entry_timeout=20)
        all_are(results, mk.ArgumentMismatchError, "rank 2 calls")


def test_a_rank_of_another_node_that_refuses_or_never_calls():
    def refuses(comm):
        mk.allgather_gemm(A, B, comm=comm)
        mk.allgather_gemm(A, B if comm.rank else B[:3], comm=comm)

    def leaves(comm):
        mk.allgather_gemm(A, B, comm=comm)
        if comm.rank:
            mk.allgather_gemm(A, B, comm=comm)

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
    ("nodes", "transport", "ranks"),
    [("2", "verbs", 4), ("1,2,1", "efa", 4), ("1,1,1,1", "verbs", 4), ("2", "efa", 4)],
)
def test_the_demo_is_right_between_processes(nodes, transport, ranks):
    environment = {"MKERNEL_NODES": nodes, "MKERNEL_TRANSPORT": transport}
    result = mpirun(ranks, "-m", "mkernel_cp", "demo", env=environment)
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"over {transport} on network cards made of software" in result.stdout
    assert "all 8 rows agree with the reference" in result.stdout
