"""What all ranks of a communicator have alike: arguments and variables, checked and agreed on."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import errors, settings
from .arguments import integer, number
from .construction import host_of
from .reference import array_split_counts
from .targets import cuda


@dataclass(frozen=True)
class Configuration:
    """What a communicator is made from.

    Attributes
    ----------
    target : str
        'host' or 'cuda'.
    hosts : tuple of int
        Of each rank: the lowest rank of its host.
    nodes : tuple of int
        Their sizes.
    transport, fabric : str, object
        Between nodes.
    nics : tuple of str or None
        The network cards of this rank alone.
    entry_seconds, progress_seconds : float
    oversubscribe : bool
    """

    target: str
    hosts: tuple[int, ...]
    nodes: tuple[int, ...]
    transport: str
    fabric: Any
    nics: tuple[str, ...] | None
    entry_seconds: float
    progress_seconds: float
    oversubscribe: bool


def agreed(
    mpi: Any,
    *,
    target: Any,
    nodes: Any,
    transport: Any,
    nics: Any,
    entry_timeout: Any,
    progress_timeout: Any,
    oversubscribe: bool,
) -> Configuration:
    """Return what the arguments of all ranks come to; what is wrong on one, all raise. Collective.

    The arguments are those of `Communicator`.
    """
    fact: Any
    try:
        defaults, nics = settings.timeouts(), _nics(nics)
        fact = {
            "target": _target(target),
            "nodes": _nodes(nodes, mpi.Get_size()),
            "transport": _transport(transport),
            "fabric": settings.fabric(),
            "timeouts": (
                _seconds("entry_timeout", entry_timeout, defaults.entry),
                _seconds("progress_timeout", progress_timeout, defaults.progress),
            ),
            "oversubscribe": bool(oversubscribe),
        }
    except (TypeError, ValueError, errors.Error) as error:
        fact = error
    facts = mpi.allgather((fact, host_of(mpi), cuda.has_gpu()))
    for rank, (fact, *_) in enumerate(facts):
        if isinstance(fact, Exception):
            raise type(fact)(f"rank {rank}: {fact}")
    threads = hasattr(mpi, "links")
    automatic = "cuda" if any(has for *_, has in facts) and not threads else "host"
    for fact, *_ in facts:
        if fact["target"] == "auto":
            fact["target"] = automatic
    first = facts[0][0]
    for rank, (fact, *_) in enumerate(facts):
        if fact != first:
            raise errors.ArgumentMismatchError(
                f"Communicator() on rank 0 has {first}, on rank {rank} {fact}; give all ranks "
                "the same arguments and the same MKERNEL_* variables"
            )
    hosts = tuple(host for _, host, _ in facts)
    nodes = _real_nodes(hosts, first["nodes"])
    if first["target"] == "cuda" and threads:
        raise errors.ConfigurationError(
            "ranks that are threads share no GPU: use target='host' for them, or start "
            "processes with mpirun"
        )
    entry, progress = first["timeouts"]
    return Configuration(
        target=first["target"],
        hosts=hosts,
        nodes=nodes,
        transport=first["transport"],
        fabric=first["fabric"],
        nics=nics,
        entry_seconds=entry,
        progress_seconds=progress,
        oversubscribe=first["oversubscribe"],
    )


def _target(target: str) -> str:
    if target not in settings.TARGETS:
        allowed = ", ".join(settings.TARGETS)
        raise ValueError(f"target {target!r}: not allowed; use one of {allowed}")
    return settings.target() if target == "auto" else target


def _transport(transport: str) -> str:
    if transport not in settings.TRANSPORTS:
        allowed = ", ".join(settings.TRANSPORTS)
        raise ValueError(f"transport {transport!r}: not allowed; use one of {allowed}")
    return settings.transport() if transport == "auto" else transport


def _nics(nics: Any) -> tuple[str, ...] | None:
    if nics is None:
        return settings.nics()
    names = () if isinstance(nics, str) else tuple(nics)
    if not names or not all(isinstance(name, str) for name in names):
        raise TypeError(f"nics={nics!r}: use a sequence of names of network cards")
    return names


def _real_nodes(hosts: Sequence[int], asked: tuple[int, ...] | None) -> tuple[int, ...]:
    """Return the sizes of the nodes: hosts, or what was asked for, as far as hosts allow that."""
    real = [hosts.count(host) for host in dict.fromkeys(hosts)]
    if list(hosts) != sorted(hosts):
        raise errors.ConfigurationError(
            f"the ranks of each host must follow each other, and rank by rank their hosts (by "
            f"their lowest rank) are {list(hosts)}: start them host by host (Open MPI: --map-by "
            "slot; MPICH: -ppn; Slurm: --distribution=block)"
        )
    if asked is None:
        return tuple(real)
    ends = set(itertools.accumulate(asked))
    if not ends >= set(itertools.accumulate(real)):
        raise errors.ConfigurationError(
            f"nodes of {list(asked)} ranks do not fit hosts of {real}: no node reaches over two "
            "hosts; leave out nodes= and MKERNEL_NODES to have each host be one"
        )
    return asked


def _nodes(nodes: Any, size: int) -> tuple[int, ...] | None:
    if nodes is None:
        nodes = settings.nodes()
        if nodes is None:
            return None
        try:
            return _nodes(nodes, size)
        except ValueError as error:
            raise errors.ConfigurationError(f"MKERNEL_NODES: {error}") from None
    if isinstance(nodes, int | np.integer) and not isinstance(nodes, bool):
        if not 1 <= nodes <= size:
            raise ValueError(f"nodes={nodes}: not allowed; use 1 to {size}, the number of ranks")
        return array_split_counts(size, int(nodes))
    try:
        sizes = tuple(map(integer, nodes))
    except TypeError:
        message = f"nodes={nodes!r}: use an integer or a sequence of integers"
        raise TypeError(message) from None
    if sum(sizes) != size or min(sizes) < 1:
        raise ValueError(
            f"nodes={list(sizes)}: the sizes must be positive and add up to the {size} ranks"
        )
    return sizes


def _seconds(name: str, value: float | None, default: float) -> float:
    try:
        seconds = number(default if value is None else value)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}={value!r}: use a number of seconds") from None
    # The kernels count in 64-bit nanoseconds; a century is no limit that anybody means.
    if not 0 <= seconds <= 3.2e9:
        raise ValueError(f"{name}={seconds}: not allowed; use seconds from 0 (no limit) to 3.2e9")
    return seconds
