"""Threads as ranks: what `LocalComm` says is what mpi4py says of the same calls."""

import threading
import time

import numpy as np
import pytest

import mkernel_cp as mk


def run(size, program, *args):
    return mk.LocalWorld(size).run(program, *args)


def iallgather(comm, values, dtype=np.int64):
    """Start a gather; return its request, what it reads, and what it fills."""
    send = np.array(values, dtype)
    receive = np.full((comm.Get_size(), *send.shape), 77, dtype)
    return comm.Iallgather(send, receive), send, receive


def finish(request):
    deadline = time.monotonic() + 20
    while not request.Test():
        assert time.monotonic() < deadline
        time.sleep(1e-4)


# --- the world ----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 5])
def test_results_are_in_rank_order_whoever_ends_first(size):
    def program(comm, factor):
        time.sleep(0.02 * (size - comm.Get_rank()))
        return factor * comm.Get_rank(), comm.Get_size()

    assert run(size, program, 10) == [(10 * rank, size) for rank in range(size)]


def test_ranks_are_threads_of_their_own_that_run_together():
    together = threading.Barrier(4)

    def program(comm):
        together.wait(20)
        return threading.current_thread().name, threading.get_ident()

    names, idents = zip(*run(4, program), strict=True)
    assert names == ("rank 0", "rank 1", "rank 2", "rank 3")
    assert len({*idents, threading.get_ident()}) == 5


@pytest.mark.parametrize("size", [0, -1])
def test_a_world_has_a_rank(size):
    with pytest.raises(ValueError, match=f"size={size}"):
        mk.LocalWorld(size)


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, SystemExit])
def test_exceptions_are_collected_when_all_have_ended(kind):
    ended = []

    def program(comm):
        rank = comm.Get_rank()
        time.sleep(0.02 * (4 - rank))
        if rank in (1, 3):
            raise kind(f"of {rank}")
        ended.append(rank)

    with pytest.raises(kind) as caught:
        run(4, program)
    assert str(caught.value) == "of 1"  # `match` would look at the notes too
    assert sorted(ended) == [0, 2]
    if hasattr(caught.value, "__notes__"):
        assert f"rank 3: {kind.__name__}: of 3" in caught.value.__notes__
    assert run(4, lambda comm: comm.Get_rank()) == [0, 1, 2, 3]


def test_a_world_runs_again_and_worlds_do_not_meet():
    world = mk.LocalWorld(3)

    def program(comm, value):
        return comm.allgather((comm.Get_rank(), value))

    def both(comm):
        inner = mk.LocalWorld(2).run(program, f"inner {comm.Get_rank()}")
        return inner, comm.allgather(comm.Get_rank())

    for value in "ab":
        assert world.run(program, value) == [[(rank, value) for rank in range(3)]] * 3
    for rank, (inner, outer) in enumerate(world.run(both)):
        assert inner == [[(r, f"inner {rank}") for r in range(2)]] * 2
        assert outer == [0, 1, 2]


# --- allgather and Iallgather -------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 4])
def test_allgather_gives_any_objects_in_rank_order(size):
    values = ["text", None, {"size": 5}, ValueError("an error is a value")][:size]

    def program(comm):
        return [comm.allgather(values[comm.Get_rank()]) for _ in range(3)]

    assert run(size, program) == [[values] * 3] * size


def test_collectives_are_matched_in_order_however_far_a_rank_runs_ahead():
    rounds = 200

    def program(comm):
        rng = np.random.default_rng(comm.Get_rank())
        for step in range(rounds):
            if rng.random() < 0.05:
                time.sleep(1e-3)
            assert comm.allgather((step, comm.Get_rank())) == [(step, rank) for rank in range(4)]
        return comm._group

    groups = run(4, program)
    assert all(group is groups[0] for group in groups)
    assert groups[0].calls == {}, "what has been taken is kept"


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0,)])
@pytest.mark.parametrize("dtype", [np.int64, np.uint8, np.float64])
def test_iallgather_fills_rows_in_rank_order(shape, dtype):
    def program(comm):
        values = np.arange(np.prod(shape, dtype=int)).reshape(shape) + 10 * comm.Get_rank()
        request, _, receive = iallgather(comm, values, dtype)
        finish(request)
        return receive

    everything = [
        np.arange(np.prod(shape, dtype=int)).reshape(shape) + 10 * rank for rank in (0, 1, 2)
    ]
    for receive in run(3, program):
        assert receive.dtype == dtype
        np.testing.assert_array_equal(receive, np.array(everything, dtype))


def test_iallgather_returns_before_the_others_call():
    late = threading.Event()

    def program(comm):
        if comm.Get_rank() == 1:
            assert late.wait(20)
        request, _, receive = iallgather(comm, [comm.Get_rank()])
        if comm.Get_rank() == 0:
            assert not request.Test()
            assert not request.Test()
            assert (receive == 77).all(), "filled before it was complete"
            late.set()
        finish(request)
        assert request.Test(), "complete is complete"
        return receive.ravel().tolist()

    assert run(2, program) == [[0, 1]] * 2


def test_after_completion_both_buffers_are_the_callers():
    def program(comm):
        request, send, receive = iallgather(comm, [comm.Get_rank()])
        comm.allgather(None)
        finish(request)
        send[:] = receive[:] = -1
        assert request.Test()
        comm.allgather(None)
        return receive.ravel().tolist()

    assert run(3, program) == [[-1] * 3] * 3


def test_several_may_be_under_way_and_end_in_any_order():
    def program(comm):
        started = [iallgather(comm, [10 * step + comm.Get_rank()]) for step in range(6)]
        order = np.random.default_rng(comm.Get_rank()).permutation(6)
        for step in order:
            finish(started[step][0])
        return [receive.ravel().tolist() for _, _, receive in started]

    assert run(3, program) == [[[10 * step + r for r in range(3)] for step in range(6)]] * 3


def test_hosts_share_out_all_ranks():
    with pytest.raises(ValueError, match=r"hosts=\(1, 1\): the numbers must add up to the 3"):
        mk.LocalWorld(3, hosts=(1, 1))
    for hosts in ((2, 1), (1, 1, 1)):
        parts = mk.LocalWorld(3, hosts=hosts).run(lambda comm: comm.Split_type(0).Get_size())
        assert parts == [ranks for ranks in hosts for _ in range(ranks)]


# --- Split, Dup, Split_type ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("colors", "keys"),
    [
        ([0, 0, 0, 0], [0, 0, 0, 0]),
        ([0, 0, 0, 0], [3, 2, 1, 0]),
        ([0, 1, 0, 1], [0, 0, 0, 0]),
        ([7, 3, 7, 7], [5, 0, -5, 5]),
        ([0, 1, 2, 3], [9, 9, 9, 9]),
        ([1, 0, 0, 1], [1, 1, 0, 0]),
    ],
)
def test_split_groups_by_color_and_orders_by_key_then_rank(colors, keys):
    def program(comm):
        rank = comm.Get_rank()
        part = comm.Split(colors[rank], keys[rank])
        assert comm.Get_rank() == rank
        return part.Get_rank(), part.Get_size(), part.allgather(rank)

    for rank, (new_rank, size, members) in enumerate(run(4, program)):
        same = [r for r in range(4) if colors[r] == colors[rank]]
        assert members == sorted(same, key=lambda r: (keys[r], r))
        assert size == len(same)
        assert members[new_rank] == rank


def test_split_without_arguments_is_a_duplicate():
    def program(comm):
        part = comm.Split()
        return part.Get_rank(), part.Get_size()

    assert run(3, program) == [(0, 3), (1, 3), (2, 3)]


def test_parts_may_be_split_again():
    def program(comm):
        half = comm.Split(comm.Get_rank() % 2)
        alone = half.Split(half.Get_rank())
        back = half.Split(0, -half.Get_rank())
        return half.allgather(comm.Get_rank()), alone.Get_size(), back.allgather(comm.Get_rank())

    results = run(4, program)
    assert results[0] == results[2] == ([0, 2], 1, [2, 0])
    assert results[1] == results[3] == ([1, 3], 1, [3, 1])


def test_a_duplicate_has_collectives_of_its_own():
    """As MPI says: what is sent on one is never received on the other, in whatever order."""

    def program(comm):
        twin = comm.Dup()
        assert (twin.Get_rank(), twin.Get_size()) == (comm.Get_rank(), comm.Get_size())
        started = {}
        for name in ("twin", "comm") if comm.Get_rank() else ("comm", "twin"):
            on = {"twin": twin, "comm": comm}[name]
            started[name] = iallgather(on, [comm.Get_rank() + 100 * (name == "twin")])
        for request, _, _ in started.values():
            finish(request)
        twin.Free()
        after = comm.allgather("still")
        return *(started[name][2].ravel().tolist() for name in ("comm", "twin")), after

    assert run(3, program) == [([0, 1, 2], [100, 101, 102], ["still"] * 3)] * 3


def test_all_threads_share_memory():
    def program(comm):
        local = comm.Split_type(comm.COMM_TYPE_SHARED)
        turned = comm.Split_type(comm.COMM_TYPE_SHARED, key=-comm.Get_rank())
        return local.allgather(comm.Get_rank()), turned.Get_rank()

    assert run(3, program) == [([0, 1, 2], 2), ([0, 1, 2], 1), ([0, 1, 2], 0)]


def test_segments_are_passed_in_rank_order():
    from mkernel_cp.memory import Segment

    def program(comm):
        links = comm.links()
        segment = Segment.create(4096 * (1 + comm.Get_rank()))
        segment.bytes[0] = 50 + comm.Get_rank()
        segments = links.exchange(segment, lambda: None)
        assert segments[comm.Get_rank()] is segment
        assert segment.fd is None
        return [(s.nbytes // 4096, int(s.bytes[0])) for s in segments]

    assert run(3, program) == [[(1, 50), (2, 51), (3, 52)]] * 3


def test_a_check_ends_an_exchange_that_nobody_joins():
    from mkernel_cp.memory import Segment

    def program(comm):
        if comm.Get_rank() == 0:

            def check(peer):
                raise mk.PeerLostError("enough")

            comm.links().exchange(Segment.create(1), check)

    with pytest.raises(mk.PeerLostError, match="enough"):
        run(2, program)


def test_a_rank_that_raises_before_it_meets_the_others_ends_the_world():
    def program(comm):
        if comm.Get_rank() == 1:
            raise KeyError("before")
        mk.Communicator(comm)

    with pytest.raises((RuntimeError, KeyError)) as caught:
        mk.LocalWorld(3).run(program)
    assert "rank 1 of the world has ended" in str(caught.value) or "before" in str(caught.value)
