"""Fixtures of all tests."""

import os

import pytest

from mkernel_cp import compiler


def pytest_addoption(parser):
    parser.addoption("--kernels", help="folder of kernels to test in place of the package's own")
    parser.addoption(
        "--gpu",
        action="store_true",
        help="run the shared bodies on GPUs, as one rank of the world that mpirun started",
    )


def pytest_configure(config):
    # Without it a machine with a GPU would choose that, also in the programs that tests start.
    if not config.getoption("--gpu"):
        os.environ["MKERNEL_TARGET"] = "host"


@pytest.fixture(scope="session", autouse=True)
def kernels(request):
    """Which kernels are tested: a mutated copy where the suite is to fail."""
    folder = request.config.getoption("--kernels")
    with compiler.using_kernels(folder):
        yield folder
