"""How a job of several ranks ends: all of them, with one message, when one of them fails."""

import contextlib
import errno
import faulthandler
import os
import secrets
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any

from ..communicator import Communicator, runtime_of
from ..errors import Error, PeerError, PeerLostError

# Of Hydra (MPICH, Intel MPI), Open MPI, PMIx and Slurm.
_RANK_VARIABLES = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "SLURM_PROCID")
_FINALIZE_SECONDS = 5.0


class CommandError(Exception):
    """What stops a command; all ranks raise the same, so rank 0 tells it."""


def launched_rank() -> int | None:
    """Return this process's rank as its launcher counts, before MPI starts; None without one."""
    for name in _RANK_VARIABLES:
        with contextlib.suppress(KeyError, ValueError):
            return int(os.environ[name])
    return None


def speaks() -> bool:
    """Return whether this process tells what all of them have to say, before MPI starts."""
    return not launched_rank()


def say(text: object) -> None:
    """Print a message for the user."""
    # One write, so that lines of different ranks do not mix.
    sys.stderr.write(f"mkernel_cp: {text}\n")
    sys.stderr.flush()


def on_ranks(program: Callable[[Communicator], int], *, oversubscribe: bool = False) -> int:
    """Return the exit code of ``program(comm)``, which runs on all ranks of the world.

    If asked to, ranks share GPUs where there are fewer.

    An exception ends the whole job with exit code 1 and one message.
    """
    try:
        from mpi4py import MPI
    except Exception as error:
        if speaks():
            say(
                f"MPI does not load ({error}): {sys.executable} -m mkernel_cp doctor "
                "tells what mends it"
            )
        return 1
    world = MPI.COMM_WORLD
    _show_warnings(world.Get_rank())
    speaker = _Speaker(world)
    try:
        with Communicator(world, oversubscribe=oversubscribe) as comm:
            # The peers fail when this block is left, so the reason is told before.
            try:
                return program(comm)
            except Exception as error:
                speaker.tell(error)
                raise
            except KeyboardInterrupt:
                speaker.claim()
                raise
    except Exception as error:
        speaker.tell(error)
        # A rank that has only closed its communicator does come to the end.
        gone = isinstance(error, PeerLostError) and str(error).startswith("lost")
        return _leave(MPI, 1, lost=gone)
    except KeyboardInterrupt:
        return _leave(MPI, 130)


def together(comm: Communicator, what: str, work: Callable[[], Any]) -> list[Any]:
    """Return `work()` of every rank; if one of them cannot, all raise the same `CommandError`."""

    def attempt() -> tuple[Any, str | None]:
        try:
            return work(), None
        except OSError as error:
            name = f"{error.filename}: " if error.filename else ""
            return None, f"{name}{error.strerror or error}"
        except (ValueError, TypeError, OverflowError) as error:
            return None, str(error)

    results = runtime_of(comm).agree(what, attempt)
    for _, problem in results:
        if problem is not None:
            raise CommandError(problem)
    return [value for value, _ in results]


class _Speaker:
    """Sees to it that one rank of a world tells why the job ends."""

    def __init__(self, world: Any):
        self._rank = world.Get_rank()
        self._token = world.bcast(secrets.token_hex(16) if self._rank == 0 else None)
        self._claim: socket.socket | None = None
        self._told = False

    def tell(self, error: Exception) -> None:
        """Print the error, unless another rank tells it or has told the one that led to it."""
        if self._told:
            return
        self._told = True
        if isinstance(error, CommandError):
            mine = self._rank == 0 and speaks()
        else:
            if isinstance(error, PeerError):
                time.sleep(1.0)  # the rank that raised first knows more
            mine = self.claim()
        if mine:
            say(self._text(error))
        # Nothing is to be added, not by the hook that reports unseen failures at exit either.
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115

    def claim(self) -> bool:
        """Return whether this rank is the first of the node to claim the word."""
        # A name of the kernel's, not of a file: free again when the process is gone.
        self._claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._claim.bind(f"\0mkernel_cp-word-{self._token}")
        except OSError as error:
            return error.errno != errno.EADDRINUSE
        return True

    def _text(self, error: Exception) -> str:
        if isinstance(error, CommandError):
            return str(error)
        if isinstance(error, Error):
            return f"{type(error).__name__}: {error}"
        return f"rank {self._rank}:\n{''.join(traceback.format_exception(error)).rstrip()}"


def _show_warnings(rank: int) -> None:
    if rank:
        warnings.simplefilter("ignore")  # rank 0 has the same
    else:
        warnings.showwarning = lambda message, *rest: say(message)


def _leave(MPI: Any, status: int, *, lost: bool = False) -> int:
    """Return the exit code once MPI is finalised, or leave without that if a rank does not come."""
    sys.stdout.flush()
    if lost:
        # The launcher ends all ranks when one leaves so: first the one that tells is to do it.
        time.sleep(1.0)
        os._exit(status)
    # Finalising may wait for ever, and hold the interpreter's lock; this watchdog needs none.
    with open(os.devnull, "w") as nowhere:
        faulthandler.dump_traceback_later(_FINALIZE_SECONDS, exit=True, file=nowhere)
        MPI.Finalize()
        faulthandler.cancel_dump_traceback_later()
    return status
