"""The network card made of software: a libibverbs and libefa of our own, compiled at first use."""

import ctypes
import os
from pathlib import Path

from .. import compiler, settings, structs
from ..errors import ConfigurationError

VERBS_CARDS = ("soft0", "soft1")
EFA_CARDS = ("soft_efa0", "soft_efa1")


def path() -> str:
    """Return the path of the library, to be opened in place of libibverbs.so.1 and libefa.so.1."""
    return str(compiler.host_library_path(compiler.native_dir() / "soft.cpp"))


def reach() -> tuple[str, int]:
    """Return what processes have alike whose cards of software reach each other."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    return boot.strip(), os.stat("/proc/self/ns/net").st_ino  # which is as far as sockets reach


def configure(fabric: settings.SoftFabric) -> None:
    """Set what the cards of this process are to do; counts of messages begin anew."""
    library = compiler.host_library(compiler.native_dir() / "soft.cpp")
    rate = ctypes.c_double((fabric.rate or 0.0) * 1e9)
    fault = fabric.fault.encode() if fabric.fault else None
    if library.soft_configure(rate, ctypes.c_uint64(fabric.seed & (2**64 - 1)), fault):
        raise ConfigurationError(
            f"fault={fabric.fault}: not allowed; use down@N (the link), error@N (a completion), "
            "drop@N (a message) or dies@N (the card), where N counts the messages of a process "
            "from 1 on, or refuse (registrations), memlock (heed ulimit -l), absent (cards) or "
            "denied (their use)"
        )


def by_hand() -> ctypes.Structure:
    """Stop the thread of this process's cards; return what a simulation takes its steps by.

    All cards of the process stay by hand until all of them are closed.
    """
    library = compiler.host_library(compiler.native_dir() / "soft.cpp")
    library.soft_halt()
    return structs.helper(library.soft_step)


def counters(context: int) -> tuple[int, int, int, int]:
    """Return bytes sent, bytes received, messages sent and messages received by an open card."""
    four = (ctypes.c_uint64 * 4)()
    library = compiler.host_library(compiler.native_dir() / "soft.cpp")
    library.soft_counters(ctypes.c_void_p(context), four)
    return tuple(four)
