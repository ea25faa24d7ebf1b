"""Every environment variable that the package reads: no other module looks at the environment.

Values are read when asked for, so a change takes effect at the next use. A variable that is set to
the empty string counts as unset.
"""

import difflib
import math
import os
import shlex
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from .errors import ConfigurationError

TARGETS = ("auto", "cuda", "host")
TRANSPORTS = ("auto", "verbs", "efa")


class Variable(NamedTuple):
    """One row of the table of environment variables."""

    name: str
    meaning: str
    default: str


VARIABLES = (
    Variable("MKERNEL_TARGET", "what kernels are compiled for: auto, cuda or host", "auto"),
    Variable(
        "MKERNEL_NODES",
        "virtual nodes on one host: their number (2), or the size of each (1,2,1)",
        "unset: the real nodes",
    ),
    Variable(
        "MKERNEL_TRANSPORT",
        "network path between nodes: auto (efa if an EFA device exists, else verbs), verbs or efa",
        "auto",
    ),
    Variable(
        "MKERNEL_NICS",
        "network devices to use, names separated by commas, as mlx5_0,mlx5_1:2 (its second port)",
        "unset: chosen automatically",
    ),
    Variable(
        "MKERNEL_FABRIC",
        "software network for tests: soft, or soft:rate=GB/s,seed=integer,fault=rule",
        "unset: the real devices, or soft between virtual nodes where there are none",
    ),
    Variable(
        "MKERNEL_TIMEOUT",
        "deadlines of a call: entry[,progress] in seconds, 0 = none",
        "600,30",
    ),
    Variable(
        "MKERNEL_CACHE_DIR",
        "folder of compiled code",
        "$XDG_CACHE_HOME/mkernel_cp, else ~/.cache/mkernel_cp",
    ),
    Variable("CXX", "C++ compiler, with its own options", "the first of c++, g++, clang++"),
)


class Timeouts(NamedTuple):
    """Deadlines of a call in seconds; 0 means none."""

    entry: float
    progress: float


@dataclass(frozen=True)
class SoftFabric:
    """What the software network is to do.

    Attributes
    ----------
    rate : float or None
        Speed of a link in GB/s; None does not limit it.
    seed : int
        Seed of reordering and of the choices that faults leave open.
    fault : str or None
        The fault to inject, in the software network's own words.
    """

    rate: float | None = None
    seed: int = 0
    fault: str | None = None


def target() -> str:
    """Return MKERNEL_TARGET: ``'auto'``, ``'cuda'`` or ``'host'``."""
    return _choice("MKERNEL_TARGET", TARGETS)


def transport() -> str:
    """Return MKERNEL_TRANSPORT: ``'auto'``, ``'verbs'`` or ``'efa'``."""
    return _choice("MKERNEL_TRANSPORT", TRANSPORTS)


def nodes() -> int | tuple[int, ...] | None:
    """Return MKERNEL_NODES: a number of virtual nodes, a tuple of their sizes, or None if unset."""
    text = _read("MKERNEL_NODES")
    if text is None:
        return None
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1:
        raise _refusal(
            "MKERNEL_NODES", text, "a number of nodes (2) or their sizes (1,2,1), all at least 1"
        )
    return numbers if len(numbers) > 1 else numbers[0]


def nics() -> tuple[str, ...] | None:
    """Return MKERNEL_NICS: names of network devices, or None if unset."""
    text = _read("MKERNEL_NICS")
    if text is None:
        return None
    names = tuple(name.strip() for name in text.split(","))
    if not all(names) or len(set(names)) < len(names):
        raise _refusal("MKERNEL_NICS", text, "different device names separated by commas")
    return names


def fabric() -> SoftFabric | None:
    """Return MKERNEL_FABRIC: the software network's options, or None for the real devices."""
    text = _read("MKERNEL_FABRIC")
    if text is None:
        return None
    kind, colon, rest = text.partition(":")
    options = dict(part.partition("=")[::2] for part in rest.split(",")) if colon else {}
    try:
        if kind != "soft" or not options.keys() <= {"rate", "seed", "fault"}:
            raise ValueError
        rate = float(options["rate"]) if "rate" in options else None
        if rate is not None and not 0 < rate < math.inf:
            raise ValueError
        fault = options.get("fault")
        if fault == "":
            raise ValueError
        return SoftFabric(rate, int(options.get("seed", 0)), fault)
    except ValueError:
        raise _refusal(
            "MKERNEL_FABRIC",
            text,
            "soft, or soft: followed by any of rate=<positive GB/s>, seed=<integer>, fault=<rule>, "
            "separated by commas",
        ) from None


def timeouts() -> Timeouts:
    """Return MKERNEL_TIMEOUT: the entry and the progress deadline in seconds, 0 for none."""
    text = _read("MKERNEL_TIMEOUT")
    default = Timeouts(600.0, 30.0)
    if text is None:
        return default
    try:
        seconds = [float(part) for part in text.split(",")]
    except ValueError:
        seconds = []
    if len(seconds) not in (1, 2) or not all(0 <= value < math.inf for value in seconds):
        raise _refusal(
            "MKERNEL_TIMEOUT", text, "entry[,progress] in seconds, each 0 (none) or more"
        )
    return Timeouts(*seconds, *default[len(seconds) :])


def cache_dir() -> Path:
    """Return the folder of compiled code, which need not exist: MKERNEL_CACHE_DIR or its default.

    Raises
    ------
    ConfigurationError
        If the variable is unset and there is no home folder to put the default in.
    """
    text = _read("MKERNEL_CACHE_DIR")
    try:
        if text is not None:
            return Path(text).expanduser().absolute()
        base = _read("XDG_CACHE_HOME")
        # The XDG specification says that relative paths are to be ignored.
        if base is None or not os.path.isabs(base):
            base = Path.home() / ".cache"
        return Path(base) / "mkernel_cp"
    except RuntimeError as error:
        raise ConfigurationError(
            f"no folder for compiled code: {error}; set MKERNEL_CACHE_DIR to a folder"
        ) from None


def cxx() -> list[str] | None:
    """Return CXX as a list of words (a compiler, perhaps with options), or None if unset."""
    text = _read("CXX")
    if text is None:
        return None
    try:
        return shlex.split(text)
    except ValueError:
        raise _refusal("CXX", text, "a command line that a shell can split into words") from None


def warn_unknown() -> None:
    """Warn about each MKERNEL_* variable of the environment that has no meaning here, once."""
    known = [variable.name for variable in VARIABLES if variable.name.startswith("MKERNEL_")]
    for name in sorted(os.environ):
        if not name.startswith("MKERNEL_") or name in known or name in _warned:
            continue
        _warned.add(name)
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        warnings.warn(
            f"unknown environment variable {name}: {hint}known are {', '.join(known)}",
            stacklevel=3,  # where a communicator is made
        )


_warned: set[str] = set()


def _read(name: str) -> str | None:
    return os.environ.get(name, "").strip() or None


def _choice(name: str, allowed: tuple[str, ...]) -> str:
    text = _read(name) or allowed[0]
    if text not in allowed:
        raise _refusal(name, text, f"one of {', '.join(allowed)}")
    return text


def _refusal(name: str, text: str, allowed: str) -> ConfigurationError:
    return ConfigurationError(f"{name}={text}: not allowed; expected {allowed}")
