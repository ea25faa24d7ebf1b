"""`doctor`: what this machine has and lacks, and the command that mends it."""

import contextlib
import ctypes
import mmap
import os
import platform
import shlex
import socket
import subprocess
import sys
import tempfile
import uuid
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from .. import __version__, compiler, settings
from ..construction import host_of
from ..errors import ConfigurationError, Error
from ..targets import cuda
from ..transport import check, devices
from ..transport.network import Network
from .job import launched_rank, speaks

_PACKAGES = ("numpy", "ml_dtypes", "mpi4py")
_PROGRAM = "#include <atomic>\n#include <thread>\nint main() { std::thread([] {}).join(); }\n"
_RANKS = 4
_GIDS = 3  # of a port, that are told


class Finding(NamedTuple):
    """One thing: its state, what was found, and what mends it.

    The state is 'ok', 'warning', or of what is in the way 'MISSING' or 'WRONG'.
    """

    state: str
    what: str
    text: str
    mend: str = ""


def doctor() -> int:
    """Print all findings; return 1 if something is in the way.

    On several ranks, they also look whether they reach each other over the network.
    """
    faults = 0
    if speaks():
        print(f"mkernel_cp {__version__} in {Path(compiler.__file__).parent}")
        for look in (
            _python,
            _packages,
            _mpi,
            _target,
            _compiler,
            _nvrtc,
            _cache,
            _shared_memory,
            _system_calls,
            _network,
            _environment,
        ):
            faults += sum(map(_tell, look()))
    if launched_rank() is not None:
        found = [finding for world in _worlds() for finding in _pairs(world)]
        faults += sum(map(_tell, found)) if speaks() else 0
    if speaks():
        print(f"{faults} thing(s) to mend" if faults else "all that is needed is here")
    return int(bool(faults))


def _tell(finding: Finding) -> bool:
    """Print a finding; return whether it is in the way."""
    print(f"{finding.state:8}{finding.what:20}{finding.text}", flush=True)
    if finding.mend:
        print(f"{'':8}{'':20}-> {finding.mend}", flush=True)
    return finding.state in ("MISSING", "WRONG")


def _python() -> Iterator[Finding]:
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    if platform.system() == "Linux":
        yield Finding("ok", "system", system)
    else:
        yield Finding(
            "MISSING", "system", system, "use Linux: a container, a virtual machine, WSL 2"
        )
    yield Finding("ok", "Python", f"{platform.python_version()}, {sys.executable}")


def _packages() -> Iterator[Finding]:
    for name in _PACKAGES:
        try:
            yield Finding("ok", name, metadata.version(name))
        except metadata.PackageNotFoundError:
            yield Finding(
                "MISSING", name, "not installed", f"{sys.executable} -m pip install {name}"
            )


def _mpi() -> Iterator[Finding]:
    # In processes of their own: a library that does not fit may end the one that loads it.
    library = _output([sys.executable, "-m", "mpi4py", "--mpi-lib-version"])
    if library.returncode:
        why = (library.stdout.strip().splitlines() or ["no message"])[-1]
        mend = f"{sys.executable} -m pip install mpi4py mpich, or load your cluster's MPI first"
        yield Finding("MISSING", "MPI library", f"mpi4py does not load it: {why}", mend)
        return
    lines = library.stdout.strip().splitlines() or ["unknown"]
    yield Finding("ok", "MPI library", " ".join(lines[0].replace("Version:", "").split()))
    command = [sys.executable, "-m", "mkernel_cp.launcher", f"--ranks={_RANKS}"]
    inside = launched_rank() is not None
    if not inside:
        command.append("--try")  # a launcher under a launcher may not start
    launcher = _output(command)
    if launcher.returncode:
        what, _, mend = launcher.stdout.strip().removeprefix("mkernel_cp: ").partition(": ")
        yield Finding("MISSING", "MPI launcher", what, mend)
    else:
        tried = "" if inside else " (two ranks start and see each other)"
        yield Finding("ok", "MPI launcher", f"{shlex.join(launcher.stdout.split())}{tried}")


def _target() -> Iterator[Finding]:
    chosen = _chosen_target()
    if chosen == "cuda":
        try:
            text = ", ".join(cuda.describe())
            yield Finding("ok", "target", f"cuda: {text}")
        except ConfigurationError as error:
            text, _, mend = str(error).rpartition(": ")
            yield Finding("MISSING", "target", text, mend)
    elif chosen == "host":
        yield Finding("ok", "target", "host: loops on CPU threads, not a measure of speed")


def _chosen_target() -> str | None:
    try:
        target = settings.target()
    except ConfigurationError:
        return None  # told among the environment variables
    return target if target != "auto" else "cuda" if cuda.has_gpu() else "host"


def _compiler() -> Iterator[Finding]:
    try:
        command = compiler._find_cxx()
        version = compiler._identity(command).splitlines()[0]
    except (ConfigurationError, OSError, IndexError) as error:
        text, _, mend = str(error).rpartition("; ")
        yield Finding("MISSING", "C++ compiler", text or mend, mend if text else "")
        return
    with tempfile.TemporaryDirectory() as folder:
        source, program = Path(folder, "probe.cc"), Path(folder, "probe")
        source.write_text(_PROGRAM)
        build = [*command, "-std=c++17", "-pthread", "-o", str(program), str(source)]
        done = _output(build)
    if done.returncode:
        why = (done.stdout.strip().splitlines() or ["no message"])[0]
        mend = "apt install g++, or dnf install gcc-c++, or set CXX to a compiler of C++17"
        yield Finding("MISSING", "C++ compiler", f"{version} compiles no C++17: {why}", mend)
    else:
        yield Finding("ok", "C++ compiler", f"{version}, {shlex.join(command)}")
    try:
        yield Finding("ok", "kernels", str(compiler.kernels_dir()))
    except ConfigurationError as error:
        mend = f"{sys.executable} -m pip install --force-reinstall mkernel_cp"
        yield Finding("MISSING", "kernels", str(error), mend)


def _nvrtc() -> Iterator[Finding]:
    try:
        major, minor = compiler.nvrtc_version()
        yield Finding("ok", "NVRTC", f"{major}.{minor}, {compiler.nvrtc_path()}")
    except ConfigurationError as error:
        text, _, mend = str(error).rpartition("; ")
        text = text.removeprefix("no NVRTC, which ")
        if _chosen_target() == "cuda":
            yield Finding("MISSING", "NVRTC", text, mend)
        else:
            yield Finding("ok", "NVRTC", f"not there: the host target needs none; it {text}", mend)


def _cache() -> Iterator[Finding]:
    mend = "set MKERNEL_CACHE_DIR to a folder that can be written; until then each run compiles"
    try:
        folder = settings.cache_dir()
    except ConfigurationError as error:
        yield Finding("warning", "cache", str(error), mend)
        return
    entries = list(folder.glob("*.so")) if folder.is_dir() else []
    mebibytes = sum(entry.stat().st_size for entry in entries) / 2**20
    text = f"{folder}, {len(entries)} entries, {mebibytes:.1f} MiB"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
        yield Finding("ok", "cache", text)
    except OSError as error:
        yield Finding("warning", "cache", f"{text}: cannot be written ({error.strerror})", mend)


def _shared_memory() -> Iterator[Finding]:
    # Whether it is enough depends on the MPI: its launcher has been asked.
    try:
        stat = os.statvfs("/dev/shm")
        free, total = (stat.f_frsize * blocks >> 20 for blocks in (stat.f_bavail, stat.f_blocks))
        yield Finding(
            "ok", "/dev/shm", f"{free} of {total} MiB free (for MPI; we keep nothing there)"
        )
    except OSError as error:
        mend = "mount -t tmpfs tmpfs /dev/shm, where your MPI needs it"
        yield Finding("warning", "/dev/shm", f"{error.strerror}", mend)


def _system_calls() -> Iterator[Finding]:
    container = "allow this system call (a container's seccomp profile, or the kernel, refuses it)"
    for name, probe, needed in (
        ("UNIX sockets", _try_sockets, True),
        ("memfd", _try_memfd, True),
        ("pidfd", _try_pidfd, False),
    ):
        try:
            probe()
            yield Finding("ok", name, "work")
        except (OSError, AttributeError) as error:
            state = "MISSING" if needed else "warning"
            effect = "" if needed else "; a peer's death is then seen by its socket only"
            yield Finding(state, name, f"{error}{effect}", container)


def _try_sockets() -> None:
    name = f"\0mkernel_cp-{uuid.uuid4().hex}"
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener,
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client,
    ):
        listener.bind(name)
        listener.listen(1)
        client.settimeout(5)
        client.connect(name)
        server, _ = listener.accept()
        with server, open(os.devnull) as file:
            socket.send_fds(client, [b"."], [file.fileno()])
            for descriptor in socket.recv_fds(server, 1, 1)[1]:
                os.close(descriptor)


def _try_memfd() -> None:
    descriptor = os.memfd_create("mkernel_cp", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(descriptor, 0, mmap.PAGESIZE)
        mmap.mmap(descriptor, mmap.PAGESIZE).close()
    finally:
        os.close(descriptor)


def _try_pidfd() -> None:
    os.close(os.pidfd_open(os.getpid()))


def _network() -> Iterator[Finding]:
    """What can lie between nodes: libraries, ports of network cards, and who is near to which."""
    for library, package in (("libibverbs.so.1", "libibverbs1"), ("libefa.so.1", "libefa")):
        try:
            ctypes.CDLL(library)
            yield Finding("ok", library, "loads")
        except OSError:
            yield Finding("ok", library, f"not here ({package}); within a node nothing needs it")
    ports = devices.ports()
    for port in ports:
        state = "active" if port.active else "down"
        more = f" and {len(port.gids) - _GIDS} more" if len(port.gids) > _GIDS else ""
        gids = ", ".join(port.gids[:_GIDS]) or "none"
        text = f"{port.kind}, {state}, {port.gbits:g} Gb/s, NUMA node {port.place.numa_node}"
        yield Finding("ok", f"port {port.name}", f"{text}, GIDs: {gids}{more}")
    if not ports:
        soft = "between virtual nodes (MKERNEL_NODES) they are made of software"
        yield Finding("ok", "network cards", f"none in this machine; {soft}")
        return
    gpus: list[cuda.PciGpu] = []
    if cuda.has_gpu():
        with contextlib.suppress(ConfigurationError):  # told with the target
            gpus = cuda.on_pci()
    for transport in ("verbs", "efa"):
        fitting = [port for port in ports if (port.kind == devices.EFA) == (transport == "efa")]
        places = [devices.of_pci(gpu.address) for gpu in gpus] or [devices.of_process()]
        for i, cards in enumerate(devices.choose(fitting, places)):
            if cards and not gpus:
                yield Finding("ok", f"{transport} here", ", ".join(cards))
            elif cards:
                yield _gpu_and_cards(gpus[i], transport, cards)


def _worlds() -> list[Any]:
    """Return the world of several ranks, if there is one; what MPI lacks is told elsewhere."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError):
        return []
    return [MPI.COMM_WORLD] if MPI.COMM_WORLD.Get_size() > 1 else []


def _pairs(world: Any) -> Iterator[Finding]:
    """Have every rank write to every other one."""
    several = len(set(world.allgather(host_of(world)))) > 1
    bad = "MISSING" if several else "warning"
    try:
        outcomes = check.every_pair(world)
    except Error as error:
        yield Finding(bad, "pairs of ranks", str(error))
        return
    used = sorted({(outcome.transport, outcome.cards) for outcome in outcomes})
    over = "; ".join(f"{transport} on {', '.join(cards)}" for transport, cards in used)
    software = ", made of software," if outcomes[0].software else ""
    for rank, outcome in enumerate(outcomes):
        for what, peers in (("nothing", outcome.silent), ("wrong data", outcome.wrong)):
            if peers:
                text = f"over {over}{software} rank {rank} gets {what} from {peers}"
                mend = outcome.problem or "see that switches and firewalls let these hosts meet"
                yield Finding(bad, "pairs of ranks", text, mend)
    if not any(outcome.silent or outcome.wrong for outcome in outcomes):
        text = f"each of {len(outcomes)} has written to each other one over {over}{software} and"
        yield Finding("ok", "pairs of ranks", f"{text} all of it came")


def _gpu_and_cards(gpu: cuda.PciGpu, transport: str, cards: Sequence[str]) -> Finding:
    """Have the nearest cards register memory of a GPU, and tell how that went."""
    what, text = f"{transport}, GPU {gpu.index}", ", ".join(cards)
    try:
        with contextlib.closing(
            Network(0, 1, (), (0,), transport=transport, cards=cards, software=False)
        ) as network:
            found = cuda.with_memory(
                gpu.index, lambda *m: network.register_gpu(0, *m, lambda: cuda.export_dmabuf(*m))
            )
    except Error as error:
        return Finding("warning", what, f"{text}: {error}")
    facts = f"{text}: {found.path}; what they write is ordered for {gpu.ordering}"
    if found.path != "staged":
        return Finding("ok", what, facts)
    bar = devices.bar_bytes(gpu.address)
    module = "loaded" if devices.has_module("nvidia_peermem") else "not loaded"
    why = f"{found.refusals}; nvidia_peermem is {module}; BAR1 has {bar >> 20} MiB"
    mend = (
        "modprobe nvidia_peermem, or a driver and kernel (5.12) with dma-buf; ulimit -l unlimited"
    )
    return Finding("warning", what, f"{facts} ({why})", mend)


def _environment() -> Iterator[Finding]:
    accessors: dict[str, Callable[[], object]] = {
        "MKERNEL_TARGET": settings.target,
        "MKERNEL_NODES": settings.nodes,
        "MKERNEL_TRANSPORT": settings.transport,
        "MKERNEL_NICS": settings.nics,
        "MKERNEL_FABRIC": settings.fabric,
        "MKERNEL_TIMEOUT": settings.timeouts,
        "CXX": settings.cxx,
    }
    for variable in settings.VARIABLES:
        value = os.environ.get(variable.name)
        text = f"({variable.default})" if not value else shlex.quote(value)
        try:
            accessors.get(variable.name, lambda: None)()
        except ConfigurationError as error:
            mend = f"unset {variable.name}, or set it to {str(error).rpartition('expected ')[2]}"
            yield Finding("WRONG", variable.name, f"{text}: not allowed", mend)
            continue
        yield Finding("ok", variable.name, f"{text}: {variable.meaning}")
    with warnings.catch_warnings(record=True) as unknown:
        warnings.simplefilter("always")
        settings.warn_unknown()
    for warning in unknown:
        name, _, hint = (
            str(warning.message).removeprefix("unknown environment variable ").partition(": ")
        )
        yield Finding("warning", name, "unknown environment variable", hint)


def _output(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a command; what it prints, wherever to, is in stdout."""
    try:
        return subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=100,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(command, 1, str(error), "")
