"""Which network cards a machine has, and which of them each of its ranks is to use.

All of it is read from sysfs, without any library.
"""

import itertools
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

SYSFS = Path("/sys")
EFA = "EFA"
_OTHER_BRIDGE, _OTHER_NUMA_NODE = 100, 200  # more than any number of steps between bridges


class Place(NamedTuple):
    """Where a device is: its PCI bridges, from the root on, and its NUMA node; -1: unknown."""

    path: tuple[str, ...] = ()
    numa_node: int = -1


class Port(NamedTuple):
    """A port of a network card.

    Attributes
    ----------
    name : str
        The card; with its number behind a colon if it is not the first port.
    kind : str
        'InfiniBand', 'Ethernet' (RoCE) or 'EFA'.
    active : bool
    gbits : float
        What the link carries in a second.
    gids : tuple of str
        The addresses that it has, with their kind.
    place : Place
    """

    name: str
    kind: str
    active: bool
    gbits: float
    gids: tuple[str, ...]
    place: Place


def ports(sysfs: Path | None = None) -> list[Port]:
    """Return the ports of all network cards of this machine that can write to remote memory."""
    found = []
    for card in sorted((sysfs or SYSFS).glob("class/infiniband/*"), key=_by_number):
        is_efa = os.path.realpath(card / "device" / "driver").rpartition("/")[2] == "efa"
        for port in sorted(card.glob("ports/*"), key=_by_number):
            found.append(
                Port(
                    card.name if port.name == "1" else f"{card.name}:{port.name}",
                    EFA if is_efa else _text(port / "link_layer"),
                    "ACTIVE" in _text(port / "state"),
                    float((_text(port / "rate") or "0").split()[0]),
                    _gids(port),
                    _place(card / "device"),
                )
            )
    return found


def of_pci(address: str, sysfs: Path | None = None) -> Place:
    """Return the place of a device by its PCI address, as 0000:18:00.0."""
    return _place((sysfs or SYSFS) / "bus" / "pci" / "devices" / address.lower())


def of_process(sysfs: Path | None = None) -> Place:
    """Return the place of this process: a NUMA node, if it is bound to one."""
    own = os.sched_getaffinity(0)
    for node in (sysfs or SYSFS).glob("devices/system/node/node[0-9]*"):
        if own <= set(_numbers(_text(node / "cpulist"))):
            return Place(numa_node=int(node.name[4:]))
    return Place()


def bar_bytes(address: str, sysfs: Path | None = None) -> int:
    """Return how much of a GPU's memory other PCI devices can reach at a time; 0: unknown."""
    try:
        return ((sysfs or SYSFS) / "bus/pci/devices" / address.lower() / "resource1").stat().st_size
    except OSError:
        return 0


def may_open() -> bool:
    """Return whether this user may open the device file of a network card."""
    files = Path("/dev/infiniband").glob("uverbs*")
    return any(os.access(file, os.R_OK | os.W_OK) for file in files)


def has_module(name: str) -> bool:
    """Return whether the kernel has loaded a module."""
    return (SYSFS / "module" / name).is_dir()


def distance(one: Place, other: Place) -> int:
    """Return how far two devices are from each other: a measure of order only."""
    pairs = zip(one.path, other.path, strict=False)
    common = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))
    if common:
        return len(one.path) + len(other.path) - 2 * common
    same = one.numa_node == other.numa_node >= 0
    return _OTHER_BRIDGE if same else _OTHER_NUMA_NODE


def choose(candidates: Iterable[Port], places: Sequence[Place]) -> list[tuple[str, ...]]:
    """Return, for each rank of a machine, the ports that it is to use: those nearest to it.

    Only the fastest active ones count: others are for storage and management. Ranks that are
    equally near to the same ports share them out in turn. All ranks get the same number.

    Parameters
    ----------
    candidates : iterable of Port
        Of one transport.
    places : sequence of Place
        Of each rank's GPU, or of its process.
    """
    active = [port for port in candidates if port.active]
    fastest = max((port.gbits for port in active), default=0.0)
    active = [port for port in active if port.gbits == fastest]
    if not active:
        return [()] * len(places)
    # Where two kinds are as fast, all ranks are to use the same.
    kind = max(port.kind for port in active)
    active = [port for port in active if port.kind == kind]
    near = [_nearest(active, place) for place in places]
    chosen = []
    for rank, group in enumerate(near):
        sharers = [other for other, theirs in enumerate(near) if theirs == group]
        turn, each = sharers.index(rank), max(1, len(group) // len(sharers))
        chosen.append([group[(turn + i * len(sharers)) % len(group)].name for i in range(each)])
    count = min(map(len, chosen))
    return [tuple(names[:count]) for names in chosen]


def _nearest(active: Sequence[Port], place: Place) -> list[Port]:
    least = min(distance(port.place, place) for port in active)
    return [port for port in active if distance(port.place, place) == least]


def _place(device: Path) -> Place:
    path = os.path.realpath(device).split("/")
    begin = next((i for i, part in enumerate(path) if part.startswith("pci")), len(path))
    # The last part is a function of the device itself.
    return Place(tuple(path[begin:-1]), int(_text(device / "numa_node") or -1))


def _gids(port: Path) -> tuple[str, ...]:
    found = []
    for file in sorted(port.glob("gids/*"), key=_by_number):
        if set(gid := _text(file)) - set("0:"):
            kind = _text(port / "gid_attrs" / "types" / file.name)
            found.append(f"{gid} {kind}".strip())
    return tuple(found)


def _by_number(path: Path) -> tuple[int, str]:
    return len(path.name), path.name


def _numbers(text: str) -> Iterable[int]:
    """Return the numbers of a list as 0-3,8."""
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


def _text(file: Path) -> str:
    try:
        return file.read_text(errors="replace").strip()
    except OSError:
        return ""
