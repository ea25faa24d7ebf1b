"""The errors of the package: each is an `Error` and also the builtin that a user would catch.

Plain `ValueError` and `TypeError` report faults of the arguments that one rank sees by itself.
"""

import builtins

__all__ = [
    "ArgumentMismatchError",
    "CapacityError",
    "CompileError",
    "ConcurrentCallError",
    "ConfigurationError",
    "Error",
    "NetworkError",
    "OutOfMemoryError",
    "PeerError",
    "PeerLostError",
    "TimeoutError",
]


class Error(Exception):
    """Base class of every error that this package defines.

    Never raised itself. Catch it to handle all failures of a collective call alike, then look at
    the communicator's ``closed`` to see whether it can still be used.
    """


class ArgumentMismatchError(Error, ValueError):
    """The ranks called with arguments, operators or orders of calls that do not fit together.

    Raised on every rank, at any call whose call messages differ in operator, agreed extents, dtypes
    or plan. The outputs of the call hold NaN. The communicator is closed on all ranks; a new one
    can be made in the same process.
    """


class CapacityError(Error, ValueError):
    """The data of a call need more room than the plan reserved.

    Raised on every rank, for instance when more tokens arrive at a rank than its capacity holds.
    It is found before anything is written, so the communicator stays usable: call again with less
    data, or with a larger capacity.
    """


class TimeoutError(Error, builtins.TimeoutError):
    """A wait inside a call passed its deadline.

    Raised on every rank when a peer did not enter the call within the entry timeout, or entered it
    and made no progress within the progress timeout. The text names the rank and the signal that
    was awaited. Outputs that were not reached hold NaN. The communicator is closed on all ranks.
    """


class PeerLostError(Error, ConnectionError):
    """The process of a peer is gone.

    Raised on every surviving rank soon after a peer was killed or its host became unreachable,
    without waiting for a deadline. Outputs that were not reached hold NaN. The communicator is
    closed, and since finalising MPI may hang without the peer, the process leaves at its exit
    without doing so, with status 1.
    """


class PeerError(Error, RuntimeError):
    """Another rank raised alone, and this is its text.

    Raised on the ranks whose own arguments were right when a peer refused its arguments, or failed
    by itself before it could take part in the call. The communicator is closed on all ranks,
    including the one that raised; a new one can be made in the same process.
    """


class NetworkError(Error, OSError):
    """The network between nodes refused or failed an operation.

    Raised on every rank for a completion with an error status, a lost link, or a network device
    that cannot be opened or cannot register memory; the text names the device, the peer and the
    status. When it is raised while a communicator is made there is no communicator; afterwards the
    communicator is closed on all ranks and outputs that were not reached hold NaN.
    """


class OutOfMemoryError(Error, MemoryError):
    """A rank could not allocate the memory that a collective call needs.

    Raised on every rank, with the rank that failed and the number of bytes that it asked for.
    Nothing stays allocated on any rank and nothing was started, so the communicator stays usable
    for smaller requests. Only a rank that cannot start the threads or the grid of a launch raises
    alone; its peers raise `PeerError`, and the communicator is closed.
    """


class CompileError(Error, RuntimeError):
    """A native source did not compile, or its result did not load.

    Raised on every rank before anything is launched; the text has the rank that failed, the command
    line and the compiler's own words. The communicator stays usable.
    """


class ConfigurationError(Error, RuntimeError):
    """The machine, the installation or a setting does not allow what was asked.

    Raised for an environment variable with a value that is not allowed, a missing compiler, library
    or driver, or ranks that cannot reach each other; the text names what mends it. Most are raised
    while a communicator is made, and then there is none; a missing compiler is found by the first
    call that needs it, raised on every rank, and leaves the communicator usable.
    """


class ConcurrentCallError(Error, RuntimeError):
    """Two calls of one communicator were made at the same time.

    Raised for the second one, when another thread of this process is in a call of the communicator.
    It has done nothing, and the first goes on; but the other ranks may now wait for the call that
    was refused, until a deadline.
    """
