"""Environment variables: what each accessor accepts, what it refuses, and with which words."""

import os
import warnings
from pathlib import Path

import pytest

from mkernel_cp import settings
from mkernel_cp.errors import ConfigurationError
from mkernel_cp.settings import SoftFabric


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in [*os.environ]:
        if name.startswith("MKERNEL_") or name in ("CXX", "XDG_CACHE_HOME"):
            monkeypatch.delenv(name)


ACCEPTED = [
    (settings.target, "MKERNEL_TARGET", None, "auto"),
    (settings.target, "MKERNEL_TARGET", "", "auto"),
    (settings.target, "MKERNEL_TARGET", "host", "host"),
    (settings.transport, "MKERNEL_TRANSPORT", None, "auto"),
    (settings.transport, "MKERNEL_TRANSPORT", "efa", "efa"),
    (settings.nodes, "MKERNEL_NODES", None, None),
    (settings.nodes, "MKERNEL_NODES", "2", 2),
    (settings.nodes, "MKERNEL_NODES", "1,2,1", (1, 2, 1)),
    (settings.nics, "MKERNEL_NICS", None, None),
    (settings.nics, "MKERNEL_NICS", "mlx5_0, mlx5_1", ("mlx5_0", "mlx5_1")),
    (settings.fabric, "MKERNEL_FABRIC", None, None),
    (settings.fabric, "MKERNEL_FABRIC", "soft", SoftFabric()),
    (settings.fabric, "MKERNEL_FABRIC", "soft:seed=7", SoftFabric(seed=7)),
    (
        settings.fabric,
        "MKERNEL_FABRIC",
        "soft:rate=2.5,seed=7,fault=down@3",
        SoftFabric(rate=2.5, seed=7, fault="down@3"),
    ),
    (settings.timeouts, "MKERNEL_TIMEOUT", None, (600.0, 30.0)),
    (settings.timeouts, "MKERNEL_TIMEOUT", "5", (5.0, 30.0)),
    (settings.timeouts, "MKERNEL_TIMEOUT", "0,0.5", (0.0, 0.5)),
    (settings.cxx, "CXX", None, None),
    (settings.cxx, "CXX", "ccache g++ -m64", ["ccache", "g++", "-m64"]),
    (settings.cache_dir, "MKERNEL_CACHE_DIR", "/a/b", Path("/a/b")),
]


@pytest.mark.parametrize(("accessor", "name", "text", "value"), ACCEPTED)
def test_accepts(monkeypatch, accessor, name, text, value):
    if text is not None:
        monkeypatch.setenv(name, text)
    assert accessor() == value


REFUSED = [
    (settings.target, "MKERNEL_TARGET", "gpu", "auto, cuda, host"),
    (settings.transport, "MKERNEL_TRANSPORT", "tcp", "auto, verbs, efa"),
    (settings.nodes, "MKERNEL_NODES", "0", "at least 1"),
    (settings.nodes, "MKERNEL_NODES", "2,", "at least 1"),
    (settings.nodes, "MKERNEL_NODES", "2,-1", "at least 1"),
    (settings.nodes, "MKERNEL_NODES", "two", "number of nodes"),
    (settings.nics, "MKERNEL_NICS", "mlx5_0,", "device names"),
    (settings.nics, "MKERNEL_NICS", "mlx5_0,mlx5_0", "different device names"),
    (settings.fabric, "MKERNEL_FABRIC", "hard", "soft"),
    (settings.fabric, "MKERNEL_FABRIC", "soft:", "rate="),
    (settings.fabric, "MKERNEL_FABRIC", "soft:speed=1", "rate="),
    (settings.fabric, "MKERNEL_FABRIC", "soft:rate=0", "positive"),
    (settings.fabric, "MKERNEL_FABRIC", "soft:rate=nan", "positive"),
    (settings.fabric, "MKERNEL_FABRIC", "soft:seed=x", "seed=<integer>"),
    (settings.fabric, "MKERNEL_FABRIC", "soft:fault", "fault=<rule>"),
    (settings.timeouts, "MKERNEL_TIMEOUT", "-1", "0 (none) or more"),
    (settings.timeouts, "MKERNEL_TIMEOUT", "nan", "0 (none) or more"),
    (settings.timeouts, "MKERNEL_TIMEOUT", "1,2,3", "entry[,progress]"),
    (settings.timeouts, "MKERNEL_TIMEOUT", "10s", "entry[,progress]"),
    (settings.cxx, "CXX", "g++ '-m64", "command line"),
]


@pytest.mark.parametrize(("accessor", "name", "text", "allowed"), REFUSED)
def test_refuses_with_name_value_and_what_is_allowed(monkeypatch, accessor, name, text, allowed):
    monkeypatch.setenv(name, text)
    with pytest.raises(ConfigurationError) as caught:
        accessor()
    assert f"{name}={text}" in str(caught.value)
    assert allowed in str(caught.value)


def test_cache_dir_defaults(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    assert settings.cache_dir() == Path("/home/someone/.cache/mkernel_cp")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert settings.cache_dir() == Path("/home/someone/.cache/mkernel_cp")
    monkeypatch.setenv("XDG_CACHE_HOME", "/scratch/cache")
    assert settings.cache_dir() == Path("/scratch/cache/mkernel_cp")
    monkeypatch.setenv("MKERNEL_CACHE_DIR", "~/kernels")
    assert settings.cache_dir() == Path("/home/someone/kernels")


def test_cache_dir_without_a_home(monkeypatch):
    monkeypatch.setenv("MKERNEL_CACHE_DIR", "~no-such-user/kernels")
    with pytest.raises(ConfigurationError, match="set MKERNEL_CACHE_DIR"):
        settings.cache_dir()


def test_every_accessor_has_a_row_in_the_table():
    read = {name for _, name, _, _ in ACCEPTED}
    assert read == {variable.name for variable in settings.VARIABLES}
    for variable in settings.VARIABLES:
        assert variable.meaning
        assert variable.default


def test_unknown_variables_warn_once_and_suggest(monkeypatch):
    monkeypatch.setenv("MKERNEL_TIMEOUT", "5")
    monkeypatch.setenv("MKERNEL_TIMOUT", "5")
    monkeypatch.setenv("MKERNEL_QQQQQQQQQQQQ", "1")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        settings.warn_unknown()
        settings.warn_unknown()
    texts = sorted(str(warning.message) for warning in caught)
    assert len(texts) == 2
    assert "MKERNEL_QQQQQQQQQQQQ" in texts[0]
    assert "did you mean" not in texts[0]
    assert "MKERNEL_TIMOUT: did you mean MKERNEL_TIMEOUT?" in texts[1]
    for name in (v.name for v in settings.VARIABLES if v.name.startswith("MKERNEL_")):
        assert name in texts[1]
