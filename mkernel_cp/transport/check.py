"""Whether the network cards of all ranks reach each other, without any kernel."""

import time
from typing import Any, NamedTuple

import numpy as np

from .. import errors, failure, settings
from ..construction import host_of, together
from ..host_pages import HostPage
from ..memory import Segment
from ..topology import Topology
from . import devices
from .setup import connect

_SECONDS = 10.0
_WORDS = 1 << 13
_ENTER, _WRITE = 1 << 32, 2 << 32  # as in channel.cuh
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
    hosts = mpi.allgather(host_of(mpi))
    pages = [HostPage(Segment.create(HostPage.nbytes())) for _ in range(size)]
    nodes = connect(
        *(Topology(rank, (1,) * size), hosts, [page.address for page in pages]),
        *(devices.of_process(), settings.transport(), settings.nics(), settings.fabric()),
        *(lambda step: together(mpi, step), mpi.allgather),
    )
    try:
        data = np.zeros((size + 1, _WORDS), np.uint64)  # of each rank, and what this one sends
        data[size] = _pattern(rank)
        own = data.ctypes.data, data.nbytes
        nodes.learn(0, mpi.allgather(together(mpi, lambda: nodes.register(0, *own))))
        writes = np.ones(size, np.uint64)
        nodes.queue.put(_ENTER, 0, _GENERATION, writes.ctypes.data, 0, 0, size)
        while nodes.queue.taken < 1:
            time.sleep(1e-3)
        mpi.allgather(None)  # before anything comes, all expect it
        row, others = data[0].nbytes, [peer for peer in range(size) if peer != rank]
        for peer in others:
            place = peer << 32 | (2 * size + rank)
            nodes.queue.put(
                _WRITE | 1, place, _GENERATION, size * row, rank * row, row << 32 | row, row
            )
        arrived, end = nodes.arrived[2 * size :], time.monotonic() + _SECONDS
        while time.monotonic() < end and not pages[rank].words.abort:
            if all(arrived[peer] for peer in others):
                break
            time.sleep(1e-3)
        silent = [peer for peer in others if not arrived[peer]]
        wrong = [peer for peer in others if arrived[peer] and (data[peer] != _pattern(peer)).any()]
        problem = _problem(rank, pages[rank])
        result = Outcome(nodes.transport, nodes.cards, nodes.software, silent, wrong, problem)
        return mpi.allgather(result)
    finally:
        nodes.close()


def _pattern(rank: int) -> np.ndarray:
    return np.arange(_WORDS, dtype=np.uint64) * np.uint64(2 * rank + 3) + np.uint64(rank + 1)


def _problem(rank: int, page: HostPage) -> str:
    record = page.words.by_proxy
    if not record.written:
        return ""
    error: errors.Error = failure.of_network(rank, record, bytes(page.words.card))
    return str(error)
