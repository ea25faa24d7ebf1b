"""Ranks on several hosts, which share no memory: pretended ones, over network cards of software."""

import contextlib
import gc
import os
import socket
import threading
import time

import numpy as np
import pytest
from worlds import all_are

import mkernel_cp as mk
from mkernel_cp import mirrors
from mkernel_cp.configuration import _real_nodes
from mkernel_cp.failure import Reason
from mkernel_cp.host_pages import ANNOUNCED, HostPage, signal
from mkernel_cp.lifetime import failure_in
from mkernel_cp.memory import Segment
from mkernel_cp.transport import devices, network, soft

A, B = np.ones((4, 6)), np.ones((6, 5))
DEADLINE = 20  # of a call, in seconds


@pytest.fixture(autouse=True)
def fabric(monkeypatch):
    monkeypatch.setenv("MKERNEL_FABRIC", "soft:seed=3")


def outcomes(hosts, program, **options):
    """What each rank raised, or returned."""

    def main(mpi):
        try:
            with mk.Communicator(mpi, entry_timeout=DEADLINE, **options) as comm:
                return program(comm)
        except (mk.Error, ValueError) as error:
            return error

    began = time.monotonic()
    results = mk.LocalWorld(sum(hosts), hosts=hosts).run(main)
    assert time.monotonic() - began < DEADLINE  # no failure waits for that
    return results


def within(mpi, program):
    with mk.Communicator(mpi) as comm:
        result = program(comm)
        comm.barrier()
        return result


@pytest.mark.parametrize(
    ("hosts", "nodes", "transport"),
    [((2, 1), None, "verbs"), ((1, 2, 1), None, "efa"), ((3, 1), (1, 2, 1), "verbs")],
)
def test_each_host_is_a_node_and_calls_are_right(hosts, nodes, transport):
    size, calls = sum(hosts), 30
    data = np.random.default_rng(size).standard_normal((calls, 5 * size, 7))

    def program(comm):
        mine = slice(5 * comm.rank, 5 * comm.rank + 5)
        a = comm.empty((5, 7))
        for step in range(calls):
            if step % 7 == comm.rank:
                time.sleep(0.01)
            if step % 10 == 9:
                comm.barrier()
            a[:] = data[step, mine]
            out = mk.allgather_gemm(a, data[step, :7], comm=comm)
            a[:] = np.nan
            np.testing.assert_allclose(out, data[step] @ data[step, :7], rtol=0, atol=1e-12)
        return comm._runtime.topology.sizes

    results = outcomes(hosts, program, nodes=nodes, transport=transport)
    assert results == [nodes or hosts] * size


def test_some_of_the_ranks_may_be_a_world_of_their_own():
    """One rank of each host, and then the others."""

    def main(mpi):
        part = mpi.Split(mpi.Get_rank() in (0, 2))
        with mk.Communicator(part) as comm:
            out = mk.allgather_gemm(A * mpi.Get_rank(), B, comm=comm)
        return comm._runtime.topology.sizes, out[::4, 0].tolist()

    results = mk.LocalWorld(4, hosts=(2, 2)).run(main)
    assert results == [((1, 1), [0, 12]), ((1, 1), [6, 18])] * 2


def test_ranks_of_different_hosts_share_no_memory():
    def program(comm):
        comm.zeros(3)
        here = {page.address for page in comm._runtime.calls.pages}
        return here, comm._runtime.memory.segments.pointers[-1].astype(bool).tolist()

    (one, seen), (same, _), (other, _) = outcomes((2, 1), program)
    assert seen == [True, True, False]
    assert len(one & same) == 2
    assert not one & other


MISHAPS = {
    "shape": (lambda c: mk.allgather_gemm(np.ones((5, 6)), B, comm=c), mk.ArgumentMismatchError),
    "call": (lambda c: c.barrier(), mk.ArgumentMismatchError),
    "refusal": (lambda c: mk.allgather_gemm(A, B[:3], comm=c), mk.PeerError),
    "end": (lambda c: None, mk.PeerLostError),
}


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("mishap", MISHAPS)
def test_what_one_rank_does_is_told_on_all_hosts(mishap, victim):
    work, kind = MISHAPS[mishap]

    def program(comm):
        mk.allgather_gemm(A, B, comm=comm)
        return work(comm) if comm.rank == victim else mk.allgather_gemm(A, B, comm=comm)

    results = outcomes((2, 1), program)
    own = results.pop(victim)
    if kind is mk.ArgumentMismatchError:
        results.append(own)
        all_are(results, kind, f"rank {victim} calls", "allgather_gemm(row_counts=[4, 4, 4]")
    elif mishap == "refusal":
        assert type(own) is ValueError
        all_are(results, kind, f"rank {victim} raised instead of calling: ValueError: a has shape")
    else:
        assert own is None
        for error in results:
            all_are([error], kind, f"rank {victim} has closed")


@pytest.mark.parametrize(
    ("said", "kind"),
    [("refusal", mk.PeerError), ("end", mk.PeerLostError), ("nothing", mk.NetworkError)],
)
def test_cards_that_miss_what_a_rank_took_along_tell_what_it_did(said, kind):
    def program(comm):
        if comm.rank == 1:
            return None
        own, other = comm._runtime.calls.pages
        record, generation = own.words.by_proxy, 7
        record.reason, record.peer, record.generation = Reason.NETWORK, 1, generation
        own.words.abort = 1 + comm.rank | 1 << 33
        if said == "refusal":
            other.set_text(generation, "ValueError: a has shape", refusal=True)
        other.words.closed = said == "end"
        error = failure_in(comm._runtime.calls.pages, comm.rank)
        own.words.abort = other.words.closed = 0
        return error

    error, _ = mk.LocalWorld(2).run(lambda mpi: within(mpi, program))
    assert type(error) is kind
    assert said != "refusal" or "ValueError: a has shape" in str(error)


def test_agreements_that_differ_are_told_alike():
    def program(comm):
        return comm.barrier() if comm.rank == 2 else comm.zeros(3)

    results = outcomes((2, 1), program)
    all_are(results, mk.ArgumentMismatchError, "rank 0 calls empty", "rank 2 calls barrier()")


def test_a_rank_that_never_calls_ends_in_the_deadline_on_all_hosts():
    def program(comm):
        mk.allgather_gemm(A, B, comm=comm)
        if comm.rank == 2:
            ended.wait(10)
        try:
            mk.allgather_gemm(A, B, comm=comm)
        finally:
            if comm.rank != 2:
                ended.wait(10)

    ended = threading.Barrier(3)

    def main(mpi):
        try:
            with mk.Communicator(mpi, entry_timeout=0.5) as comm:
                program(comm)
        except mk.Error as error:
            return error

    results = mk.LocalWorld(3, hosts=(2, 1)).run(main)
    all_are(results, mk.TimeoutError, "Rank 2 has not made this call", "entry_timeout")


@pytest.mark.parametrize("transport", ["verbs", "efa"])
def test_a_card_that_dies_is_an_error_on_all_hosts(transport, monkeypatch):
    monkeypatch.setenv("MKERNEL_FABRIC", "soft:fault=dies@20")

    def program(comm):
        out = np.zeros((12, 5))
        try:
            for _ in range(20):
                mk.allgather_gemm(A, B, comm=comm, out=out)
        except mk.NetworkError:
            assert (np.isnan(out) | (out == 6)).all()
            raise

    results = outcomes((2, 1), program, transport=transport)
    all_are(results, mk.NetworkError, "network card soft", "of rank")


def test_software_does_not_reach_other_hosts(monkeypatch):
    monkeypatch.setattr(soft, "reach", lambda: threading.current_thread().name)
    all_are(outcomes((2, 1), repr), mk.ConfigurationError, "MKERNEL_FABRIC=soft", "one host only")


def test_hosts_without_cards_say_so_on_all_ranks_and_leave_nothing(monkeypatch):
    outcomes((2, 1), repr)
    files = len(os.listdir("/proc/self/fd"))
    monkeypatch.delenv("MKERNEL_FABRIC")
    texts = "rank 0: nodes on different hosts need a network card for verbs", "(ports: none)"
    all_are(outcomes((2, 1), repr), mk.ConfigurationError, *texts)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= files


def test_without_libraries_or_cards_all_ranks_say_so(monkeypatch):
    """On machines that have a card by what sysfs says."""
    port = devices.Port("mlx5_0", "InfiniBand", True, 400.0, (), devices.Place())
    monkeypatch.delenv("MKERNEL_FABRIC")
    monkeypatch.setattr(devices, "ports", lambda: [port])
    monkeypatch.setattr(network, "LIBRARIES", ("libibverbs.so.none", "libefa.so.none"))
    texts = "rank 0: libibverbs.so.none: cannot open", "apt install ibverbs-providers"
    all_are(outcomes((2, 1), repr), mk.ConfigurationError, *texts)
    monkeypatch.setattr(network, "LIBRARIES", (soft.path(),) * 2)
    texts = "rank 0: there is no network card mlx5_0; there are: soft0"
    all_are(outcomes((2, 1), repr), mk.ConfigurationError, texts)
    texts = "network card for efa with an active port", "(ports: mlx5_0 (InfiniBand))"
    all_are(outcomes((2, 1), repr, transport="efa"), mk.ConfigurationError, *texts)


def test_nodes_of_one_host_have_real_cards_only_if_they_can_be_opened(monkeypatch):
    def program(mpi):
        with mk.Communicator(mpi, nodes=2) as comm:
            return comm._runtime.network.software, comm._runtime.network.cards

    ports = [
        devices.Port("soft_efa0", devices.EFA, True, 100.0, (), devices.Place()),
        devices.Port("soft_efa1", devices.EFA, False, 400.0, (), devices.Place()),
    ]
    monkeypatch.delenv("MKERNEL_FABRIC")
    monkeypatch.setattr(devices, "ports", lambda: ports)
    monkeypatch.setattr(network, "LIBRARIES", ("libibverbs.so.none",) * 2)
    monkeypatch.setattr(devices, "may_open", lambda: True)
    assert mk.LocalWorld(2).run(program) == [(True, ("soft0",))] * 2
    monkeypatch.setattr(network, "LIBRARIES", (soft.path(),) * 2)
    assert mk.LocalWorld(2).run(program) == [(False, ("soft_efa0",))] * 2
    monkeypatch.setattr(devices, "may_open", lambda: False)
    assert mk.LocalWorld(2).run(program) == [(True, ("soft0",))] * 2
    monkeypatch.setattr(devices, "may_open", lambda: True)
    ports.pop(0)
    assert mk.LocalWorld(2).run(program) == [(True, ("soft0",))] * 2


def test_nodes_follow_hosts():
    assert _real_nodes([0, 0, 2, 3, 3], None) == (2, 1, 2)
    assert _real_nodes([0, 0, 2, 3, 3], (1, 1, 1, 2)) == (1, 1, 1, 2)
    with pytest.raises(mk.ConfigurationError, match="no node reaches over two hosts"):
        _real_nodes([0, 0, 2, 3, 3], (2, 3))
    with pytest.raises(mk.ConfigurationError, match=r"must follow each other.*\[0, 1, 0, 1\]"):
        _real_nodes([0, 1, 0, 1], None)


def test_a_copy_of_a_page_is_no_older_than_its_flags_and_keeps_what_was_set_here():
    page, copy = (HostPage(Segment.create(HostPage.nbytes())) for _ in range(2))
    before = page.pieces()
    page.set_text(7, "a call")
    page.words.called, page.words.digest = signal(7, ANNOUNCED), 99
    page.words.by_proxy.peer = 5
    copy.words.abort = 4
    *texts, words = page.pieces().items()
    assert words[0] == 0  # the last
    for place, piece in texts:
        copy.apply(place, piece)
    assert copy.text(7) == "a call"
    assert copy.words.called == 0
    copy.apply(*words)
    assert (copy.words.called, copy.words.digest) == (signal(7, ANNOUNCED), 99)
    assert (copy.words.abort, copy.words.by_proxy.peer) == (4, 5)
    changed = [place for place, piece in page.pieces().items() if before[place] != piece]
    assert len(changed) == 2


def test_a_silent_host_ends_the_connection():
    """What the operating system is asked for; a cable cannot be pulled here."""

    def program(comm):
        (link,) = comm._runtime._mirrors.sockets.values()
        alive = link.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        return alive, link.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)

    assert outcomes((1, 1), program) == [(1, 6000)] * 2


def test_hosts_that_do_not_reach_each_other_say_so_on_all_ranks(monkeypatch):
    monkeypatch.setattr(mirrors, "_SETUP_SECONDS", 0.5)
    monkeypatch.setattr(mirrors, "_addresses", lambda: ["240.0.0.1"])
    texts = "ranks [2] do not connect to rank 0", "over TCP; is a firewall between them?"
    all_are(outcomes((2, 1), repr), mk.ConfigurationError, *texts)


def test_a_stranger_at_the_door_is_sent_away(monkeypatch):
    """Somebody else connects to a rank while it waits for its peer."""
    listen = socket.socket.listen
    strangers = []

    def visited(listener, backlog):
        listen(listener, backlog)
        if listener.family == socket.AF_INET:
            strangers.append(socket.create_connection(listener.getsockname()))
            strangers[-1].sendall(bytes(20))

    monkeypatch.setattr(socket.socket, "listen", visited)
    with contextlib.ExitStack() as stack:
        results = outcomes((1, 1), lambda comm: comm.barrier())
        for stranger in strangers:
            stack.enter_context(stranger)
    assert results == [None, None]
    assert len(strangers) == 2
