"""The software network card is as strict as real ones, for clients written by others too."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import verbs_abi

from mkernel_cp.transport import soft

PROGRAM = Path(__file__).parent / "programs" / "verbs_client.py"


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Where a program finds our library by the name of the real one."""
    if importlib.util.find_spec("ibverbs") is None:
        assert not os.environ.get("CI"), "the package ibverbs is missing"
        pytest.skip("the package ibverbs is missing: no client written by others was run")
    folder = tmp_path_factory.mktemp("library")
    (folder / "libibverbs.so.1").symlink_to(soft.path())
    return {**os.environ, "LD_LIBRARY_PATH": str(folder)}


@pytest.mark.parametrize("what", ["states", "depths", "keys", "retries", "order", "processes"])
def test_the_package_ibverbs_finds_it_strict(environment, what):
    result = subprocess.run(
        [sys.executable, str(PROGRAM), what],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "all right" in result.stdout


def test_the_tests_for_real_cards_run_on_libraries_of_the_system(tmp_path):
    """As launch/test_fabric.sh runs them; here the system's libraries are ours."""
    for name in ("libibverbs.so.1", "libefa.so.1"):
        (tmp_path / name).symlink_to(soft.path())
    tests = Path(__file__).parent
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--nic", "soft1"]
    result = subprocess.run(
        [*command, tests / "test_network.py", "-k", "letters or sent_means or lost"],
        env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path), "MKERNEL_FABRIC": ""},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "2 passed" in result.stdout


def test_the_check_of_our_declarations_sees_a_difference(tmp_path):
    """With our own header as that of a distribution, and then with a member less."""
    folder = tmp_path / "infiniband"
    folder.mkdir()
    (folder / "efadv.h").touch()
    text = verbs_abi.OURS.read_text()
    (folder / "verbs.h").write_text(text)
    assert verbs_abi.compare(tmp_path)[0] == []
    (folder / "verbs.h").write_text(
        text.replace("    uint32_t vendor_err;\n", "    uint64_t vendor_err;\n")
    )
    different, compared = verbs_abi.compare(tmp_path)
    assert "sizeof(ibv_wc::vendor_err): ours 4, theirs 8" in different
    assert compared > 600
