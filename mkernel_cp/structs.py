"""The structs that kernels and Python share, read from the headers that define them.

Each is written down once, in C++, between two marks; every member takes 8 bytes.
"""

import ctypes
import re
import threading
import types
from pathlib import Path
from typing import Any

from . import compiler

_SECTION = re.compile(
    r"// --- structs shared with Python -+\n(.*)// --- end of the shared", re.DOTALL
)
_STRUCT = re.compile(r"struct (?:alignas\(\d+\) )?(\w+) \{(.*?)\};", re.DOTALL)
_MEMBER = re.compile(r"(\w+)(\**) (\w+)(?:\[(\d+)\])?;")
_SCALARS = {"u64": ctypes.c_uint64, "i64": ctypes.c_int64, "double": ctypes.c_double}


_parsed: dict[tuple[Path, str], types.SimpleNamespace] = {}
# Ranks may be threads, and a class made twice is two classes.
_one_at_a_time = threading.Lock()


def _read(header: str) -> types.SimpleNamespace:
    key = compiler.kernels_dir(), header
    with _one_at_a_time:
        if key not in _parsed:
            _parsed[key] = _parse(Path(compiler.include_dir(), "mkernel", header))
        return _parsed[key]


def _parse(header: Path) -> types.SimpleNamespace:
    structs: dict[str, type[ctypes.Structure]] = {}
    section = _SECTION.search(header.read_text()).group(1)
    for name, body in _STRUCT.findall(re.sub(r"//.*", "", section)):
        fields = []
        for kind, stars, member, count in _MEMBER.findall(body):
            ctype = ctypes.c_uint64 if stars else _SCALARS.get(kind) or structs[kind]
            fields.append((member, ctype * int(count) if count else ctype))
        structs[name] = type(name, (ctypes.Structure,), {"_fields_": fields})
    return types.SimpleNamespace(**structs)


def shared() -> types.SimpleNamespace:
    """Return the structs of types.cuh as `ctypes.Structure` classes; pointers are integers."""
    return _read("types.cuh")


def host() -> types.SimpleNamespace:
    """Return the structs of host_runtime.cuh likewise: Launch, Simulation and Helper."""
    return _read("host_runtime.cuh")


def helper(step: Any, of: int = 0) -> ctypes.Structure:
    """Return the ``Helper`` struct of a native function and what it is called with."""
    return host().Helper(step=ctypes.cast(step, ctypes.c_void_p).value, of=of)
