"""The proxy on the software network card: what is written arrives, in whole and once."""

import contextlib
import ctypes
import itertools
import os
import threading
import time

import numpy as np
import pytest
import worlds

import mkernel_cp as mk
from mkernel_cp import errors, settings, structs
from mkernel_cp.host_pages import HostPage
from mkernel_cp.memory import Segment
from mkernel_cp.transport import check, soft
from mkernel_cp.transport.network import Network

TRANSPORTS = {"verbs": soft.VERBS_CARDS, "efa": soft.EFA_CARDS}
WRITE = 2 << 32


class Rank:
    """A rank without kernels: what they would ask for is asked for by hand."""

    def __init__(self, rank, size, transport, cards, pages):
        links = [peer for peer in range(size) if peer != rank]
        self.network = Network(
            *(rank, size, links, [page.address for page in pages]),
            transport=transport,
            cards=cards,
            software=not worlds.nics,
        )
        self.rank, self.size, self.generation = rank, size, 0
        self.page = pages[rank]
        self.data = np.full(1 << 20, 0xFF, np.uint8)

    def enter(self, writes):
        """Begin a call in which chunks arrive here."""
        self.generation += 1
        self.writes = np.array(writes, np.uint64)
        self.network.queue.enter(self.generation, self.writes)

    def write(self, peer, chunk, start, lines, line_bytes, from_pitch, to_pitch, to=None):
        """Have lines written to the same place at a peer."""
        to = start if to is None else to
        pitches = from_pitch << 32 | to_pitch
        place = peer << 32 | (2 * self.size + chunk)
        self.network.queue.put(
            WRITE | lines, place, self.generation, start, to, pitches, line_bytes
        )

    def await_chunk(self, chunk, seconds=10):
        """Wait until a chunk has arrived."""
        word = self.network.arrived[2 * self.size + chunk :]
        self._await(lambda: word[0] >= self.generation << 32 | 1, seconds)

    def await_sent(self, seconds=10):
        """Wait until all that was asked for is sent."""
        self._await(lambda: self.network.queue.sent >= self.network.queue.tickets, seconds)

    def _await(self, condition, seconds):
        end = time.monotonic() + seconds
        while not condition():
            assert not self.page.words.abort, self.failure()
            assert time.monotonic() < end, "it does not come"
            time.sleep(0)

    def failure(self):
        """The status of a failed request, the peer that it was for, and the card."""
        record = self.page.words.by_proxy
        name = bytes(self.page.words.card).rstrip(b"\0").decode()
        return record.index, record.peer, name

    def await_failure(self, seconds=10):
        end = time.monotonic() + seconds
        while not self.page.words.by_proxy.written:
            assert time.monotonic() < end, "no failure is reported"
            time.sleep(1e-3)
        return self.failure()


@pytest.fixture
def connect():
    """Ranks that are connected, and disconnected at the end."""
    made = []

    def make(transport, size=2, cards=1, **fabric):
        soft.configure(settings.SoftFabric(**fabric))
        pages = [HostPage(Segment.create(HostPage.nbytes())) for _ in range(size)]
        names = (worlds.nics or TRANSPORTS[transport])[:cards]
        ranks = [Rank(rank, size, transport, names, pages) for rank in range(size)]
        made.extend(ranks)
        addresses = [rank.network.addresses() for rank in ranks]
        for rank in ranks:
            rank.network.connect({p: addresses[p][rank.rank] for p in rank.network.links})
        places = [rank.network.register(0, rank.data.ctypes.data, 1 << 20) for rank in ranks]
        for rank in ranks:
            rank.network.learn(0, places)
            rank.network.start()
        return ranks

    yield make
    for rank in made:
        rank.network.close()
    soft.configure(settings.SoftFabric())


@pytest.mark.parametrize("cards", [1, 2])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_lines_arrive_where_they_belong_and_nowhere_else(connect, transport, cards):
    one, other = connect(transport, cards=cards, seed=7)
    # Lines, bytes of each, from one to the next here, and there.
    shapes = [
        *((1, 8, 8, 8), (7, 100, 128, 160), (5, 1000, 1000, 1000), (300, 3, 16, 7)),
        (1, 70_000, 70_000, 70_000),
    ]
    writes = [1 if transport == "verbs" or step == run else n for n, run, _, step in shapes]
    rng = np.random.default_rng(1)
    for _ in range(5):
        other.enter(writes)
        one.enter([])
        one.data[:] = rng.integers(0, 255, len(one.data))
        other.data[:] = 0xFF
        expected, start = other.data.copy(), 0
        for chunk, (n, run, step, pitch) in enumerate(shapes):
            one.write(1, chunk, start, n, run, step, pitch)
            for line in range(n):
                to, begin = start + line * pitch, start + line * step
                expected[to : to + run] = one.data[begin : begin + run]
            start += n * max(step, pitch)
        for chunk in range(len(shapes)):
            other.await_chunk(chunk)
        one.await_sent()
        np.testing.assert_array_equal(other.data, expected)
    if not worlds.nics:
        sent = sum(n * run for n, run, *_ in shapes) * 5
        assert one.network.counters()[0] == sent
        assert other.network.counters()[1] == sent


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_signal_means_that_all_its_bytes_are_there(connect, transport):
    """In every order in which the network may bring them."""
    chunks, count, run = 4, 6, 9000
    for seed in range(20):
        one, other = connect(transport, seed=seed)
        other.enter([count if transport == "efa" else 1] * chunks)
        one.enter([])
        one.data[:] = seed + 1
        for chunk in range(chunks):
            one.write(1, chunk, chunk * count * 2 * run, count, run, run, 2 * run)
        missing = 0
        for chunk in range(chunks):
            other.await_chunk(chunk)
            begin = chunk * count * 2 * run
            here = other.data[begin : begin + count * 2 * run].reshape(count, 2, run)[:, 0]
            missing += int((here != seed + 1).sum())
        assert missing == 0, f"seed {seed}"
        one.await_sent()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_letters_say_their_generation_themselves(connect, transport):
    one, other = connect(transport)
    mine = one.network.register_letters()
    theirs = other.network.register_letters()
    one.network.learn(0xFFFF, [mine, theirs])
    size = ctypes.sizeof(structs.shared().Letter)
    for generation in (1, 2, 40, 41, 1000):
        one.network.letters[0].view(np.uint64)[:2] = generation, generation * 7
        one.generation = generation
        to = (1 + generation % 2 * 2 + 0) * size
        place = 0xFFFF << 48
        words = WRITE | 1, 1 << 32 | 0, generation, place, place | to, size << 32 | size, size
        one.network.queue.put(*words)
        other._await(lambda g=generation: other.network.arrived[0] == g << 32 | 1, 10)
        row = other.network.letters[1 + generation % 2 * 2].view(np.uint64)
        assert tuple(row[:2]) == (generation, generation * 7)
        one.await_sent()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_sent_means_read(connect, transport):
    """What is published as sent may be overwritten, however slow the link is."""
    one, other = connect(transport, rate=0.02)
    other.enter([1] * 8)
    one.enter([])
    one.data[:] = 5
    for chunk in range(8):
        one.write(1, chunk, chunk * 20_000, 1, 20_000, 20_000, 20_000)
    one.await_sent()
    one.data[:] = 6
    for chunk in range(8):
        other.await_chunk(chunk)
    assert (other.data[:160_000] == 5).all()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_1e5_commands_that_come_faster_than_the_link_takes_them(connect, transport):
    one, other = connect(transport, seed=5)
    count, word = 100_000, np.dtype(np.uint64).itemsize
    other.enter([1] * count)
    one.enter([])
    numbers = one.data[: count * word].view(np.uint64)
    numbers[:] = np.arange(count)
    there = other.data[: count * word].view(np.uint64)
    arrived = other.network.arrived[2 * other.size :][:count]

    def look():
        """Return how many have arrived; what has must be there."""
        done = np.flatnonzero(arrived == other.generation << 32 | 1)
        assert np.array_equal(there[done], done), "early"
        return len(done)

    most_behind = 0
    for chunk in range(count):
        one.write(1, chunk, chunk * word, 1, word, word, word)
        if chunk % 20_000 == 0:
            most_behind = max(most_behind, chunk - look())
    assert most_behind > 0  # else the link was the faster one
    end = time.monotonic() + 60
    while look() < count:
        assert time.monotonic() < end
        time.sleep(0.01)
    one.await_sent()
    messages = 2 * count if transport == "verbs" else count
    if not worlds.nics:
        assert one.network.counters()[:3:2] == (count * word, messages)


@pytest.mark.software
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_lost_message_comes_again_or_is_reported(connect, transport):
    one, other = connect(transport, fault="drop@2")
    other.enter([1, 1, 1])
    one.enter([])
    one.data[:] = 5
    for chunk in range(3):
        one.write(1, chunk, chunk * 100, 1, 100, 100, 100)
    if transport == "efa":  # SRD repeats by itself; what it gives up is lost
        assert one.await_failure() == (20, 1, "soft_efa0")
        return
    for chunk in range(3):
        other.await_chunk(chunk)
    assert (other.data[:300] == 5).all()


@pytest.mark.software
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    ("fault", "status"),
    [
        ("down@1", {"verbs": 12, "efa": 20}),
        ("error@3", {"verbs": 11, "efa": 11}),
    ],
)
def test_an_error_completion_becomes_a_record_on_all_ranks(connect, transport, fault, status):
    one, other = connect(transport, fault=fault)
    other.enter([1] * 4)
    one.enter([])
    for chunk in range(4):
        one.write(1, chunk, chunk * 100, 1, 100, 100, 100)
    assert one.await_failure() == (status[transport], 1, TRANSPORTS[transport][0])
    end = time.monotonic() + 10
    while not all(rank.page.words.abort for rank in (one, other)):
        assert time.monotonic() < end, "not all are told"
        time.sleep(1e-3)
    for rank in (one, other):
        assert rank.page.words.abort == 1 | 1 << 33


@pytest.mark.software
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_what_failed_first_is_reported_and_not_that_more_is_refused_then(connect, transport):
    for position in range(1, 11):
        one, other = connect(transport, fault=f"error@{position}")
        other.enter([1] * 200)
        one.enter([])
        for chunk in range(200):
            one.write(1, chunk, chunk * 100, 1, 100, 100, 100)
        assert one.await_failure() == (11, 1, TRANSPORTS[transport][0])
        for rank in (one, other):
            rank.network.close()  # else the next one's fault may strike what is left of it


@pytest.mark.software
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_card_that_dies_says_no_more_than_that_it_gives_all_back(connect, transport):
    one, other = connect(transport, fault="dies@1")
    other.enter([1])
    one.enter([])
    one.write(1, 0, 0, 1, 100, 100, 100)
    own = one.rank  # it does not know whose fault it is
    assert one.await_failure() == (5, own, TRANSPORTS[transport][0])


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_write_outside_of_what_is_registered_is_refused(connect, transport):
    one, other = connect(transport)
    one.enter([])
    other.enter([1])
    one.write(1, 0, 0, 1, 200, 200, 200, to=(1 << 20) - 100)
    assert one.await_failure()[:2] == (10, 1)
    assert (other.data == 0xFF).all()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_arrival_that_nobody_expects_is_an_error(connect, transport):
    one, other = connect(transport)
    one.enter([])
    other.enter([1])
    one.write(1, 5, 0, 1, 8, 8, 8)
    assert other.await_failure()[0] == 7


@pytest.mark.software
def test_the_address_is_one_that_is_routed(connect):
    """Of the three that the card has: RoCE v1, v2 of the link alone, v2 with a global prefix."""
    one, _ = connect("verbs")
    assert one.network.addresses()[1][0] == 0xFD


@pytest.mark.software
@pytest.mark.parametrize("card", soft.VERBS_CARDS)
def test_packets_go_by_numbers_of_ports_on_infiniband_alone(card):
    """The end of the address, by which an Ethernet finds a card, is taken away."""
    page = HostPage(Segment.create(HostPage.nbytes()))
    where = ([page.address] * 2,)
    options = {"transport": "verbs", "cards": [card], "software": True}
    with (
        contextlib.closing(Network(0, 2, [1], *where, **options)) as one,
        contextlib.closing(Network(1, 2, [0], *where, **options)) as other,
    ):
        address = bytearray(other.addresses()[0])
        one.addresses()
        address[8:16] = bytes(8)
        if card == "soft0":
            with pytest.raises(errors.NetworkError, match="ibv_modify_qp to RTR: No route to host"):
                one.connect({1: bytes(address)})
        else:
            one.connect({1: bytes(address)})


@pytest.mark.software
def test_gpu_memory_is_registered_by_the_first_way_that_works(monkeypatch):
    """The software card takes no dma-buf, and no address that is not of this process."""

    def export():
        files.append(os.memfd_create("dma-buf"))
        return files[-1]

    def refuse():
        raise errors.Error("the driver gives none")

    page = HostPage(Segment.create(HostPage.nbytes()))
    data, files = np.zeros(4096, np.uint8), []
    network = Network(
        *(0, 2, [1], [page.address] * 2), transport="verbs", cards=["soft0"], software=True
    )
    try:
        found = network.register_gpu(0, data.ctypes.data, 4096, export)
        assert (found.path, found.place[0]) == ("peermem", data.ctypes.data)
        assert "dma-buf: soft0: ibv_reg_dmabuf_mr of 4096 bytes: Operation not" in found.refusals
        found = network.register_gpu(1, 1 << 46, 4096, refuse)
        assert found[:2] == ("staged", None)
        assert found.refusals.startswith("dma-buf: the driver gives none; peermem: soft0: ibv_reg_")
        assert "Bad address (errno 14)" in found.refusals
        monkeypatch.setattr(network, "register", lambda *asked: asked)
        found = network.register_gpu(2, 1 << 46, 4096, export)
        assert found == ("dma-buf", (2, 1 << 46, 4096, files[-1]), "")
    finally:
        network.close()
    for file in files:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(file)


@pytest.mark.software
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("hosts", [(3,), (1, 2)])
def test_the_check_of_every_pair_sees_what_comes(transport, hosts, monkeypatch):
    monkeypatch.setenv("MKERNEL_FABRIC", "soft:seed=2")
    monkeypatch.setenv("MKERNEL_TRANSPORT", transport)
    card = TRANSPORTS[transport][0]
    found = mk.LocalWorld(3, hosts=hosts).run(check.every_pair)
    assert found == [[(transport, (card,), True, [], [], "")] * 3] * 3


@pytest.mark.software
def test_the_check_of_every_pair_sees_what_does_not_come_and_what_is_wrong(monkeypatch):
    pattern = check._pattern
    monkeypatch.setattr(check, "_SECONDS", 0.5)
    monkeypatch.setenv("MKERNEL_FABRIC", "soft:fault=down@1")
    found = mk.LocalWorld(2).run(check.every_pair)[0]
    assert [(outcome.silent, outcome.wrong) for outcome in found] == [([1], []), ([0], [])]
    monkeypatch.setattr(check, "_SECONDS", 10)
    monkeypatch.setenv("MKERNEL_FABRIC", "soft")
    turns = itertools.count()
    monkeypatch.setattr(check, "_pattern", lambda rank: pattern(rank) + next(turns))
    found = mk.LocalWorld(2).run(check.every_pair)[0]
    assert [(outcome.silent, outcome.wrong) for outcome in found] == [([], [1]), ([], [0])]


@pytest.mark.software
def test_cards_are_opened_and_closed_by_several_threads_at_once():
    """The last one that closes stops the software card while another one opens it."""

    def work():
        for _ in range(40):
            Network(0, 2, [1], [0, 0], transport="verbs", cards=["soft0"], software=True).close()
        ended.append(1)

    ended = []
    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(ended) == 3


@pytest.mark.software
def test_what_cannot_be_opened_or_registered_says_why():
    page = HostPage(Segment.create(HostPage.nbytes()))
    where = (0, 2, [1], [page.address] * 2)
    with pytest.raises(errors.ConfigurationError, match="no network card mlx5_0; there are: soft0"):
        Network(*where, transport="verbs", cards=["mlx5_0"], software=True)
    with pytest.raises(errors.ConfigurationError, match="soft1:1: this port is not active"):
        Network(*where, transport="verbs", cards=["soft1:1"], software=True)
    with pytest.raises(errors.ConfigurationError, match="soft0:2: there is no such port"):
        Network(*where, transport="verbs", cards=["soft0:2"], software=True)
    with pytest.raises(errors.ConfigurationError, match=r"efadv_query_device \(is it an EFA\?\)"):
        Network(*where, transport="efa", cards=["soft0"], software=True)
    with pytest.raises(errors.ConfigurationError, match=r"libibverbs\.so\.1"):
        Network(*where, transport="verbs", cards=["mlx5_0"], software=False)
    soft.configure(settings.SoftFabric(fault="refuse"))
    network = Network(*where, transport="verbs", cards=["soft0"], software=True)
    try:
        with pytest.raises(
            errors.NetworkError, match=r"soft0: ibv_reg_mr of \d+ bytes \(limit.*ulimit -l"
        ):
            network.register_letters()
    finally:
        network.close()
        soft.configure(settings.SoftFabric())
    with pytest.raises(errors.ConfigurationError, match="fault=down: not allowed"):
        soft.configure(settings.SoftFabric(fault="down"))
