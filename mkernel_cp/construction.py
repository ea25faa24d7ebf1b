"""What ranks do together before they have anything but MPI."""

import pickle
from collections.abc import Callable
from typing import Any

from . import errors


class Raised:
    """An exception of one rank, on its way to all."""

    def __init__(self, rank: int, error: Exception):
        try:
            self.error = type(error)(f"rank {rank}: {error}")
            pickle.loads(pickle.dumps(self.error))
        except Exception:
            self.error = errors.PeerError(f"rank {rank}: {type(error).__name__}: {error}")


def together(mpi: Any, step: Callable[[], Any]) -> Any:
    """Return the result of a step; what fails on one rank is raised on all. Collective."""
    result, problem, rank = None, None, mpi.Get_rank()
    try:
        result = step()
    except errors.Error as error:
        problem = Raised(rank, error)
    except OSError as error:
        problem = Raised(rank, errors.ConfigurationError(f"cannot be set up: {error}"))
    for raised in mpi.allgather(problem):
        if raised is not None:
            raise raised.error
    return result


def host_of(mpi: Any) -> int:
    """Return a number for this rank's host: the lowest rank there. Collective."""
    kind = getattr(mpi, "COMM_TYPE_SHARED", None)
    if kind is None:
        from mpi4py import MPI

        kind = MPI.COMM_TYPE_SHARED
    local = mpi.Split_type(kind)
    lowest = local.allgather(mpi.Get_rank())[0]
    local.Free()
    return lowest
