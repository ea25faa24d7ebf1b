"""Plain writes over the network, without any kernel: whether all ranks reach each other."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from .. import errors, failure, settings
from ..construction import host_of, together
from ..host_pages import HostPage
from ..memory import Segment
from ..targets.host import HostTarget
from ..topology import Topology
from .setup import Nodes, connect

_SECONDS = 10.0
_WORDS = 1 << 13
_GENERATION = 1


class Outcome(NamedTuple):
    """What one rank has found.

    Attributes
    ----------
    transport : str
    cards : tuple of str
    software : bool
        Whether they are made of software.
    silent, wrong : list of int
        The ranks from which nothing came, or something else than they have sent.
    problem : str
        What its own cards say of a failure.
    """

    transport: str
    cards: tuple[str, ...]
    software: bool
    silent: list[int]
    wrong: list[int]
    problem: str


def every_pair(mpi: Any) -> list[Outcome]:
    """Have each rank write to each other one, and check what has come. Collective.

    Cards and transport are those of the environment, or chosen as for a communicator. Raises as
    making one does.
    """
    rank, size = mpi.Get_rank(), mpi.Get_size()
    where = Topology(rank, (1,) * size)
    data = np.zeros((size + 1, _WORDS), np.uint64)  # of each rank, and what this one sends
    data[size] = _pattern(rank)
    asked = settings.transport(), settings.nics(), settings.fabric()
    with plain_network(mpi, where, data, *asked) as (nodes, pages):
        row = data[0].nbytes
        sends = dict.fromkeys(where.gateways, ((0, size * row), (0, rank * row), row))
        failed = pages[rank].words
        silent, _ = exchange(
            *(nodes, where, _GENERATION, sends),
            *(lambda: mpi.allgather(None), lambda: bool(failed.abort)),
        )
        came = [peer for peer in where.sources if peer not in silent]
        wrong = [peer for peer in came if (data[peer] != _pattern(peer)).any()]
        problem = _problem(rank, pages[rank])
        result = Outcome(nodes.transport, nodes.cards, nodes.software, silent, wrong, problem)
        return mpi.allgather(result)


@contextlib.contextmanager
def plain_network(
    mpi: Any,
    where: Topology,
    data: np.ndarray,
    transport: str,
    nics: Sequence[str] | None,
    fabric: settings.SoftFabric | None,
) -> Iterator[tuple[Nodes, list[HostPage]]]:
    """Give a network that no kernel uses, to write from and to `data`, its region 0. Collective."""
    pages = [HostPage(Segment.create(HostPage.nbytes())) for _ in range(where.size)]
    nodes = connect(
        *(where, mpi.allgather(host_of(mpi)), [page.address for page in pages]),
        *(HostTarget(None), transport, nics, fabric),
        *(lambda step: together(mpi, step), mpi.allgather),
    )
    try:
        own = data.ctypes.data, data.nbytes
        nodes.learn(0, mpi.allgather(together(mpi, lambda: nodes.register(0, *own))))
        yield nodes, pages
    finally:
        nodes.close()


def exchange(
    nodes: Nodes,
    where: Topology,
    generation: int,
    sends: Mapping[int, tuple[tuple[int, int], tuple[int, int], int]],
    meet: Callable[[], Any],
    failed: Callable[[], bool],
) -> tuple[list[int], float]:
    """Write to peers; return from which sources nothing has come, and the seconds it took.

    Parameters
    ----------
    nodes, where
        This rank's network, and its place in it.
    generation : int
        One that no kernel runs for.
    sends : mapping
        For each gateway, where bytes lie, where they go, and how many they are.
    meet : callable
        A barrier of all ranks.
    failed : callable
        Whether there is nothing to wait for any more.
    """
    writes = np.ones(where.size, np.uint64)
    nodes.queue.enter(generation, writes)
    while nodes.queue.sent < nodes.queue.tickets:
        time.sleep(1e-4)
    meet()  # before anything comes, all expect it
    start = time.monotonic()
    for peer, (source, target, nbytes) in sends.items():
        nodes.queue.write(peer, 2 * where.size + where.rank, generation, source, target, nbytes)
    arrived, expected = nodes.arrived[2 * where.size :], generation << 32 | 1
    silent = where.sources
    while silent and time.monotonic() < start + _SECONDS and not failed():
        time.sleep(1e-4)
        silent = [peer for peer in silent if arrived[peer] < expected]
    return silent, time.monotonic() - start


def _pattern(rank: int) -> np.ndarray:
    return np.arange(_WORDS, dtype=np.uint64) * np.uint64(2 * rank + 3) + np.uint64(rank + 1)


def _problem(rank: int, page: HostPage) -> str:
    record = page.words.by_proxy
    if not record.written:
        return ""
    error: errors.Error = failure.of_network(rank, record, bytes(page.words.card))
    return str(error)
