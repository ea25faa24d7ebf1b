"""Ranks to which something happens. Arguments: what, folder for what each survivor has to say, and
how many ranks each of several hosts is to have, if any.

Each rank writes what it raised to a file of its own, and then lets its process end by itself;
witness.py notes how it did.
"""

import contextlib
import faulthandler
import os
import signal
import sys
import time
import traceback
from pathlib import Path

import numpy as np
from mpi4py import MPI
from pretended import pretended_hosts

import mkernel_cp as mk

A, B = np.ones((50, 60)), np.ones((60, 40))
VICTIM = 1


def call(comm, step=0):
    """The result is not looked at, so on a GPU nobody waits for it."""
    a, b = (comm._runtime.machine.asarray(array, None) for array in (A + step, B))
    return mk.allgather_gemm(a, b, comm=comm)


def loop(comm, calls=10**9):
    for step in range(calls):
        out = comm.asnumpy(call(comm, step))
        if not comm.closed:
            assert (out == (step + 1) * 60).all(), "wrong result"


def killed(comm):
    """Rank 1 is killed while all call."""
    if comm.rank == VICTIM:
        loop(comm, 20 + os.getpid() % 50)
        os.kill(os.getpid(), signal.SIGKILL)
    loop(comm)


def killed_in_sums(comm):
    """The same of sums so small that peers wait for each other's words and not for signals."""
    a, b = (comm._runtime.machine.asarray(array, None) for array in (A[:4], B))
    step = mk.GemmAllReduce(a, b, comm=comm)
    assert step.plan.low_latency
    for calls in range(10**9):
        if comm.rank == VICTIM and calls == 20 + os.getpid() % 50:
            os.kill(os.getpid(), signal.SIGKILL)
        out = comm.asnumpy(step(a, b))
        if not comm.closed:
            assert (out == 60 * comm.size).all(), "wrong result"


def killed_in_agreement(comm):
    if comm.rank == VICTIM:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    comm.barrier()


def dropped(comm):
    """A failed call whose exception is caught and dropped."""
    loop(comm, 2)
    if comm.rank != VICTIM:
        with contextlib.suppress(mk.TimeoutError):
            call(comm)
    else:
        time.sleep(4)
    sys.exit(0)


def unreported(comm):
    """Rank 1 fails while the others have no call under way; they end without another one."""
    loop(comm, 2)
    if comm.rank == VICTIM:
        with contextlib.suppress(mk.TimeoutError):
            call(comm)
    else:
        time.sleep(4)
    sys.exit(0)


def exits(comm):
    """Rank 1 ends without closing, while the others call."""
    loop(comm, 10)
    if comm.rank == VICTIM:
        sys.exit(0)
    loop(comm)


def raises(comm):
    """Rank 1 raises something of its own between two calls."""
    loop(comm, 10)
    if comm.rank == VICTIM:
        raise KeyError("of its own")
    loop(comm)


def stopped(comm):
    """Rank 1 is stopped longer than the others wait, and comes back."""
    loop(comm, 10)
    if comm.rank == VICTIM:
        child = os.fork()
        if child == 0:
            time.sleep(4)
            os.kill(os.getppid(), signal.SIGCONT)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGSTOP)
    loop(comm)


def finalized(comm):
    """MPI is finalised before the communicator is closed."""
    loop(comm, 3)
    MPI.Finalize()
    comm.close()


def forked(comm):
    """A forked child must not use, close or end its parent's communicator."""
    loop(comm, 3)
    child = os.fork()
    if child == 0:
        try:
            call(comm)
        except RuntimeError as error:
            os._exit(0 if "forked child" in str(error) else 1)
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0, "the child"
    child = os.fork()
    if child == 0:
        comm.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, "the child that closes"
    loop(comm, 20)
    comm.close()


def main(what, folder, *hosts):
    faulthandler.dump_traceback_later(20, exit=True)
    world = pretended_hosts(MPI.COMM_WORLD, [int(ranks) for ranks in hosts])
    comm = mk.Communicator(world, entry_timeout=2.0, progress_timeout=2.0, oversubscribe=True)
    began = time.monotonic()
    try:
        globals()[what](comm)
        said = "nothing"
    except BaseException as error:
        said = f"{type(error).__name__}: {error}"
        traceback.print_exc()
    seconds = time.monotonic() - began
    Path(folder, f"said-{comm.rank}").write_text(f"{seconds:.1f} s closed={comm.closed} {said}")


main(*sys.argv[1:])
