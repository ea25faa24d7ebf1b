"""Fixtures of all tests."""

import pytest

from mkernel_cp import compiler


def pytest_addoption(parser):
    parser.addoption("--kernels", help="folder of kernels to test in place of the package's own")


@pytest.fixture(scope="session", autouse=True)
def kernels(request):
    """Which kernels are tested: a mutated copy where the suite is to fail."""
    folder = request.config.getoption("--kernels")
    with compiler.using_kernels(folder):
        yield folder
