"""Which network card a rank uses, on machines that are made up."""

import ctypes
import os

import pytest

from mkernel_cp import errors
from mkernel_cp.commands import doctor
from mkernel_cp.targets import cuda
from mkernel_cp.transport import devices, network, soft
from mkernel_cp.transport.devices import Place, choose, distance

# Two sockets, each with two switches; below each switch are a GPU and two network cards.
BRIDGES = [
    f"pci0000:{root}/0000:{root}:01.0/0000:{switch}:00.0"
    for root, switch in (("10", "11"), ("10", "15"), ("80", "81"), ("80", "85"))
]


def device(sysfs, path, numa_node, driver="mlx5_core"):
    folder = sysfs / "devices" / path
    folder.mkdir(parents=True)
    (folder / "numa_node").write_text(f"{numa_node}\n")
    (sysfs / "drivers" / driver).mkdir(parents=True, exist_ok=True)
    (folder / "driver").symlink_to(sysfs / "drivers" / driver)
    by_address = sysfs / "bus" / "pci" / "devices" / path.rpartition("/")[2]
    by_address.parent.mkdir(parents=True, exist_ok=True)
    by_address.symlink_to(folder)
    return folder


def card(sysfs, name, path, numa_node, *, ports, driver="mlx5_core"):
    """A card whose ports are (state, link layer, rate, types of GIDs)."""
    home = device(sysfs, path, numa_node, driver) / "infiniband" / name
    for number, (state, layer, rate, types) in enumerate(ports, 1):
        port = home / "ports" / str(number)
        (port / "gids").mkdir(parents=True)
        (port / "gid_attrs" / "types").mkdir(parents=True)
        (port / "state").write_text(state)
        (port / "link_layer").write_text(layer)
        (port / "rate").write_text(rate)
        for index, kind in enumerate([*types, ""]):
            gid = "fe80:" + 6 * "0000:" + "0001" if kind else ":".join(8 * ["0000"])
            (port / "gids" / str(index)).write_text(gid + "\n")
            if kind:
                (port / "gid_attrs" / "types" / str(index)).write_text(kind)
    (home / "device").symlink_to(sysfs / "devices" / path)
    (sysfs / "class" / "infiniband").mkdir(parents=True, exist_ok=True)
    (sysfs / "class" / "infiniband" / name).symlink_to(home)


UP = "4: ACTIVE", "InfiniBand", "400 Gb/sec (4X NDR)", ["IB/RoCE v1"]
DOWN = "1: DOWN", "InfiniBand", "400 Gb/sec (4X NDR)", []
SLOW = "4: ACTIVE", "Ethernet", "25 Gb/sec (1X EDR)", ["IB/RoCE v1", "RoCE v2"]
LIKE_EFA = "4: ACTIVE", "Unspecified", "200 Gb/sec (4X HDR)", ["IB/RoCE v1"]


@pytest.fixture
def machine(tmp_path):
    """Four GPUs, eight cards with one port, of which one is down, and a slow one near GPU 0."""
    for i, bridges in enumerate(BRIDGES):
        device(tmp_path, f"{bridges}/0000:{i}a:00.0/0000:{i}b:00.0", i // 2, "nvidia")
        for j in range(2):
            ports = [DOWN if (i, j) == (3, 1) else UP]
            path = f"{bridges}/0000:{i}c:0{j}.0/0000:{i}d:0{j}.0"
            card(tmp_path, f"mlx5_{2 * i + j}", path, i // 2, ports=ports)
    card(tmp_path, "mlx5_10", f"{BRIDGES[0]}/0000:ff:00.0", 0, ports=[SLOW])
    return tmp_path


def gpus(machine):
    return [devices.of_pci(f"0000:{i}B:00.0", machine) for i in range(4)]


def test_ports_are_what_sysfs_says(machine):
    ports = devices.ports(machine)
    assert [port.name for port in ports] == [*(f"mlx5_{i}" for i in range(8)), "mlx5_10"]
    assert {port.name for port in ports if not port.active} == {"mlx5_7"}
    slow = ports[-1]
    assert (slow.kind, slow.gbits, slow.place.numa_node) == ("Ethernet", 25, 0)
    assert slow.gids == (
        "fe80:0000:0000:0000:0000:0000:0000:0001 IB/RoCE v1",
        "fe80:0000:0000:0000:0000:0000:0000:0001 RoCE v2",
    )
    assert devices.ports(machine / "nowhere") == []


def test_a_gpu_has_the_cards_below_its_switch_and_all_ranks_as_many(machine):
    chosen = choose(devices.ports(machine), gpus(machine))
    assert chosen == [("mlx5_0",), ("mlx5_2",), ("mlx5_4",), ("mlx5_6",)]
    # Three ranks, none of them near the card that is down.
    chosen = choose(devices.ports(machine), gpus(machine)[:3])
    assert chosen == [("mlx5_0", "mlx5_1"), ("mlx5_2", "mlx5_3"), ("mlx5_4", "mlx5_5")]


def test_who_is_equally_near_takes_turns(machine):
    ports = devices.ports(machine)
    # Two ranks on a GPU; five on a socket with four cards; ranks that are bound to nothing.
    assert choose(ports, [gpus(machine)[0]] * 2) == [("mlx5_0",), ("mlx5_1",)]
    socket = Place(numa_node=0)
    five = choose(ports, [socket] * 5)
    assert five == [("mlx5_0",), ("mlx5_1",), ("mlx5_2",), ("mlx5_3",), ("mlx5_0",)]
    nowhere = choose(ports, [Place()] * 3)
    assert nowhere == [("mlx5_0", "mlx5_3"), ("mlx5_1", "mlx5_4"), ("mlx5_2", "mlx5_5")]
    both = choose(ports, [Place(numa_node=1), socket])
    assert both == [("mlx5_4", "mlx5_5", "mlx5_6"), ("mlx5_0", "mlx5_1", "mlx5_2")]


def test_distance_goes_by_bridges_and_then_by_numa_node(machine):
    near, other_switch, other_socket, _ = gpus(machine)
    cards = {port.name: port.place for port in devices.ports(machine)}
    steps = [distance(near, cards[name]) for name in ("mlx5_0", "mlx5_2", "mlx5_4")]
    assert steps == sorted(set(steps))
    assert distance(other_switch, cards["mlx5_2"]) == steps[0]
    assert distance(other_socket, cards["mlx5_6"]) == distance(near, cards["mlx5_2"])
    assert steps[1] < distance(Place(("pci0000:99",), 0), near) < steps[2]


def test_the_second_port_is_named_and_efa_is_known_by_its_driver(tmp_path):
    card(tmp_path, "mlx5_0", "pci0000:00/0000:00:01.0", -1, ports=[DOWN, UP])
    card(tmp_path, "rdmap0s6", "pci0000:00/0000:00:06.0", -1, ports=[LIKE_EFA], driver="efa")
    ports = devices.ports(tmp_path)
    assert [(port.name, port.kind) for port in ports] == [
        *(("mlx5_0", "InfiniBand"), ("mlx5_0:2", "InfiniBand")),
        ("rdmap0s6", "EFA"),
    ]
    assert choose(ports[:2], [Place()]) == [("mlx5_0:2",)]
    assert choose(ports[:1], [Place()] * 2) == [(), ()]


def test_doctor_tells_ports_and_who_is_near(machine, monkeypatch):
    monkeypatch.setattr(devices, "SYSFS", machine)
    monkeypatch.setattr(cuda, "has_gpu", lambda: False)
    found = {finding.what: finding.text for finding in doctor._network()}
    assert found["port mlx5_0"].startswith("InfiniBand, active, 400 Gb/s, NUMA node 0, GIDs: fe80:")
    assert found["port mlx5_7"].endswith("down, 400 Gb/s, NUMA node 1, GIDs: none")
    assert "RoCE v2" in found["port mlx5_10"]
    assert found["verbs here"].startswith("mlx5_0, mlx5_1")


def test_doctor_tells_how_cards_reach_gpus(machine, monkeypatch):
    """On a card that reaches none, and then on one that does."""

    def refuse(*memory):
        raise errors.Error("CUDA driver: CUDA_ERROR_NOT_SUPPORTED")

    address = f"{4 * '0'}:2B:00.0"
    (machine / "bus/pci/devices" / address.lower() / "resource1").write_bytes(bytes(1 << 21))
    monkeypatch.setattr(devices, "SYSFS", machine)
    monkeypatch.setattr(network, "LIBRARIES", (soft.path(),) * 2)
    monkeypatch.setattr(cuda, "has_gpu", lambda: True)
    monkeypatch.setattr(cuda, "on_pci", lambda: [cuda.PciGpu(0, address, "this GPU")])
    monkeypatch.setattr(cuda, "export_dmabuf", refuse)
    monkeypatch.setattr(devices, "choose", lambda ports, _: [("soft0",) if ports else ()])
    data = bytearray(4096)
    own = ctypes.addressof(ctypes.c_ubyte.from_buffer(data))
    for place, state, words in (
        (
            1 << 46,
            "warning",
            ("soft0: staged", "dma-buf: CUDA driver", "not loaded; BAR1 has 2 MiB"),
        ),
        (own, "ok", ("soft0: peermem; what they write is ordered for this GPU",)),
    ):
        monkeypatch.setattr(cuda, "with_memory", lambda _, work, at=place: work(at, 4096))
        *_, finding = doctor._network()
        assert (finding.state, finding.what) == (state, "verbs, GPU 0")
        for word in words:
            assert word in finding.text


def test_a_process_is_where_all_its_cpus_are(tmp_path):
    own = os.sched_getaffinity(0)
    lists = {"node0": "", "node1": f"0-1,{max(own)},{','.join(map(str, sorted(own)))}"}
    for name, cpus in lists.items():
        (tmp_path / "devices" / "system" / "node" / name).mkdir(parents=True)
        (tmp_path / "devices" / "system" / "node" / name / "cpulist").write_text(cpus)
    assert devices.of_process(tmp_path) == Place(numa_node=1)
    assert devices.of_process(tmp_path / "devices") == Place()
