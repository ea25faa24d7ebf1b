"""Fixtures of all tests."""

import contextlib
import fcntl
import os
import tempfile
from pathlib import Path

import pytest
import worlds

from mkernel_cp import compiler
from mkernel_cp.transport import devices


def pytest_addoption(parser):
    parser.addoption("--kernels", help="folder of kernels to test in place of the package's own")
    parser.addoption(
        "--target",
        choices=("host", "cuda"),
        default="host",
        help="where the programs run that tests start on ranks of their own",
    )
    parser.addoption(
        "--nic",
        help="names of real network cards, separated by commas, in place of those of software",
    )
    parser.addoption(
        "--gpu",
        action="store_true",
        help="run what is for GPUs on them, as one rank of the world that mpirun started",
    )
    parser.addoption(
        "--one-gpu",
        action="store_true",
        help="run the shared bodies on one GPU, on ranks that are threads",
    )


def pytest_configure(config):
    if config.getoption("--gpu"):
        from mpi4py import MPI

        worlds.gpu_world = MPI.COMM_WORLD
    elif config.getoption("--one-gpu"):
        worlds.on_one_gpu = True
    else:
        # A machine with a GPU would choose that, also in the programs that tests start.
        os.environ["MKERNEL_TARGET"] = config.getoption("--target")
        # So would one with network cards.
        if config.getoption("--nic"):
            worlds.nics = tuple(config.getoption("--nic").split(","))
            os.environ["MKERNEL_NICS"] = config.getoption("--nic")
        else:
            os.environ["MKERNEL_FABRIC"] = "soft"


def pytest_collection_modifyitems(config, items):
    """On GPUs: the shared bodies for as many ranks as there are, and what only GPUs show."""
    if worlds.on_one_gpu:
        here = [item for item in items if item.get_closest_marker("operator")]
    elif worlds.gpu_world is None:
        here = [item for item in items if not item.get_closest_marker("gpu")]
        if worlds.nics:
            here = [item for item in here if _runs_on(worlds.nics, item)]
    else:
        size = worlds.gpu_world.Get_size()
        here = [item for item in items if _world_of(item) == size]
    kept = set(here)
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = here
    if worlds.gpu_world is not None or worlds.on_one_gpu:
        config.expected = {item.nodeid for item in here}


def _world_of(item):
    marker = item.get_closest_marker("operator") or item.get_closest_marker("gpu")
    if marker is None:
        return None
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    case = parameters.get("case")
    return case.world if case else parameters.get("size") or marker.kwargs["world"]


def _runs_on(nics, item):
    """Whether real network cards can show what a test is about."""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    kinds = {port.kind for port in devices.ports() if port.name in nics}
    transport = "efa" if devices.EFA in kinds else "verbs"
    return (
        not item.get_closest_marker("software")
        and "fault" not in parameters
        and parameters.get("transport", transport) == transport
        and parameters.get("cards", 1) <= len(nics)
    )


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item):
    """A test that measures time has the machine for itself: no worker's test runs beside it."""
    # Not in the checkout: it may lie where files are not locked, or not those that are only read.
    path = Path(tempfile.gettempdir(), f"mkernel_cp-tests-{os.getuid()}.lock")
    with open(path, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX if item.get_closest_marker("alone") else fcntl.LOCK_SH)
        return (yield)


def pytest_runtest_logreport(report):
    if report.when == "call" and report.passed:
        _passed.add(report.nodeid)


def pytest_sessionfinish(session):
    """On GPUs a test that did not run is a failure."""
    if session.config.getoption("collectonly"):
        return
    missing = getattr(session.config, "expected", set()) - _passed
    if missing and not session.exitstatus:
        print(f"did not run: {sorted(missing)}")
        session.exitstatus = 1


_passed = set()


@pytest.fixture(scope="session", autouse=True)
def kernels(request):
    """Which kernels are tested: a mutated copy where the suite is to fail."""
    folder = request.config.getoption("--kernels")
    with compiler.using_kernels(folder):
        yield folder


@pytest.fixture
def closed_behind():
    """What passes on a world, and closes it at the end of the test."""
    with contextlib.ExitStack() as stack:
        yield lambda world: stack.enter_context(contextlib.closing(world))
