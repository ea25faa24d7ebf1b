"""`Communicator`: the ranks that make fused calls together, as a program sees them."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from . import settings
from .arguments import integer
from .kernel import Kernel
from .reference import array_split_counts
from .runtime import Runtime


class Communicator:
    """Ranks that make fused calls together.

    Making one is collective, like every call on it that is not said to be local. It is a context
    manager; leaving it closes it.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm or LocalComm, optional
        The ranks; duplicated. Default: ``MPI.COMM_WORLD``.
    target : {'auto', 'host', 'cuda'}, optional
        What kernels are compiled for. 'auto' takes MKERNEL_TARGET; if that is unset, 'cuda' if any
        rank's host has an NVIDIA GPU, else 'host'. Ranks that are threads have 'host'.
    device : int, optional
        This rank's GPU, as CUDA counts; it becomes the current device. Default: by rank. Nothing
        on the host target.
    nodes : int or sequence of int, optional
        Virtual nodes: their number, or the size of each; none reaches over two hosts. Default:
        MKERNEL_NODES, else each host is a node. The ranks of one host then reach those of another
        node over the network only, as on different hosts.
    transport : {'auto', 'verbs', 'efa'}, optional
        How nodes are reached. 'auto' takes MKERNEL_TRANSPORT; if that is unset, 'efa' if there is
        an EFA card, else 'verbs'.
    nics : sequence of str, optional
        This rank's network cards, with a colon and the number of a port where that is not the
        first active one: ``['mlx5_0', 'mlx5_1:2']``. Default: MKERNEL_NICS, else the fastest that
        are nearest to this rank; on a host without any, nodes meet over one made of software.
    entry_timeout, progress_timeout : float, optional
        Seconds that a call waits for a peer to enter it (default 600), and for a peer that has
        entered it to go on (default 30); 0 means no limit. MKERNEL_TIMEOUT changes the defaults.
        A peer shows that it goes on by what it finishes, so `progress_timeout` has to be longer
        than one may multiply, or be kept from running, in between: a second or more. Where threads
        outnumber cores, nothing may be finished for tenths of a second.
    oversubscribe : bool, optional
        Let several ranks have one GPU, which is slow and meant for tests. Default: refuse that.

    Attributes
    ----------
    rank, size : int
    node, num_nodes, local_rank, local_size : int
        Where this rank is: its node, and its place in that.
    target : str
    device : str
        'cpu' on the host target; number and name of the GPU on the cuda target.
    mpi : mpi4py.MPI.Intracomm or LocalComm
        The duplicate.

    Raises
    ------
    ConfigurationError
        On all ranks, if the ranks cannot work together or a setting is wrong on one of them.
    OutOfMemoryError
        On all ranks, if there is no shared memory.

    Examples
    --------
    >>> from mpi4py import MPI
    >>> import mkernel_cp as mk
    >>> with mk.Communicator(MPI.COMM_WORLD) as comm:
    ...     a = comm.asarray(rows_of_this_rank)
    ...     c = mk.allgather_gemm(a, b, comm=comm)
    """

    def __init__(
        self,
        comm: Any = None,
        *,
        target: str = "auto",
        device: int | None = None,
        nodes: int | Sequence[int] | None = None,
        transport: str = "auto",
        nics: Sequence[str] | None = None,
        entry_timeout: float | None = None,
        progress_timeout: float | None = None,
        oversubscribe: bool = False,
    ):
        if comm is None:
            from mpi4py import MPI

            comm = MPI.COMM_WORLD
        if not hasattr(comm, "Dup"):
            raise TypeError(
                f"comm is of type {type(comm).__name__}: use an intracommunicator of mpi4py, or "
                "what LocalWorld passes to its program"
            )
        settings.warn_unknown()
        self._runtime = runtime = Runtime(
            comm,
            device=device,
            target=target,
            nodes=nodes,
            transport=transport,
            nics=nics,
            entry_timeout=entry_timeout,
            progress_timeout=progress_timeout,
            oversubscribe=oversubscribe,
        )
        self.mpi, self.rank, self.size = runtime.mpi, runtime.rank, runtime.size
        where = runtime.topology
        self.node, self.num_nodes = where.node, runtime.num_nodes
        self.local_rank, self.local_size = where.local_rank, where.local_size
        self.target, self.device = runtime.target, runtime.machine.device

    def __repr__(self) -> str:
        state = ", closed" if self.closed else ""
        return (
            f"<Communicator rank {self.rank} of {self.size}, node {self.node} of {self.num_nodes} "
            f"(local rank {self.local_rank} of {self.local_size}), target {self.target}, "
            f"device {self.device}{state}>"
        )

    @property
    def closed(self) -> bool:
        """Whether no call can be made any more, after `close` or a failure."""
        return self._runtime.calls.closed

    # --- how rows are split -----------------------------------------------------------------------

    def row_counts(self, m: int) -> tuple[int, ...]:
        """Return how many of `m` rows each rank gets if they are split as by `numpy.array_split`.

        Local.
        """
        try:
            return array_split_counts(integer(m), self.size)
        except TypeError:
            raise TypeError(f"m={m!r}: use an integer") from None

    def rows(self, m: int) -> slice:
        """Return which of `m` rows are this rank's if they are split as by `numpy.array_split`.

        Local.

        Examples
        --------
        >>> a_r = a[comm.rows(len(a))]
        """
        counts = self.row_counts(m)
        start = sum(counts[: self.rank])
        return slice(start, start + counts[self.rank])

    # --- arrays that peers can read ---------------------------------------------------------------

    def empty(self, shape: Any, dtype: Any = np.float64, order: str = "C") -> np.ndarray:
        """Return an uninitialised array that peers can read in place.

        Collective, but shapes and dtypes may differ by rank. Its memory is free for other arrays
        when the last view of it is gone; that is local. The array may outlive the communicator.

        Parameters
        ----------
        shape : int or tuple of int
        dtype : data-type, optional
        order : {'C', 'F'}, optional

        Returns
        -------
        numpy.ndarray, or cupy.ndarray on the cuda target

        Raises
        ------
        OutOfMemoryError
            On all ranks, if one of them has no shared memory left; the communicator stays usable.
        """
        return self._runtime.memory.empty(shape, dtype, order)

    def zeros(self, shape: Any, dtype: Any = np.float64, order: str = "C") -> np.ndarray:
        """Return an array of zeros that peers can read in place; see `empty`."""
        return self._runtime.memory.zeros(shape, dtype, order)

    def asarray(self, a: Any, dtype: Any = None) -> np.ndarray:
        """Return `a` in memory that peers can read in place: `a` itself if it is there already.

        Collective; see `empty`. A copy has the order of `a`, without gaps between its rows; on the
        cuda target NumPy's arrays are copied to the GPU.
        """
        return self._runtime.memory.asarray(a, dtype)

    def asnumpy(self, a: Any) -> np.ndarray:
        """Return the data of an array in host memory; on the host target `a` itself. Local.

        Waits for what was launched before on the current stream; see `synchronize` for failures.
        """
        return self._runtime.machine.asnumpy(a)

    # --- calls ------------------------------------------------------------------------------------

    def launch(
        self,
        kernel: Kernel,
        agents: int,
        args: Sequence[Any] = (),
        *,
        operand: Any = None,
        shared_bytes: int = 0,
        stream: Any = None,
    ) -> None:
        """Run a kernel of one's own on every rank; collective, and a call like any operator's.

        The kernel takes one struct: ``mk::World*``, ``mk::CallMessage``, and then `args`, 8 bytes
        each. The message tells the peers where `operand` lies; it is for
        ``mk::Launch::announce``, and its digest for ``await_call``.

        Parameters
        ----------
        kernel : Kernel
            Of a `Module`; compiled by its first launch.
        agents : int
            How many of them; agents of one launch run at the same time.
        args : sequence of array, int or float
            Arrays are passed as pointers.
        operand : array, optional
            From `empty`, `zeros` or `asarray`: what peers read by ``mk::Launch::operand_of``; its
            rows must be contiguous.
        shared_bytes : int, optional
            Scratch memory of each agent.
        stream : optional
            As for every operator.

        Raises
        ------
        TypeError, ValueError
            If this rank's arguments are wrong; its peers raise `PeerError`.
        ArgumentMismatchError
            On all ranks, if they launch different kernels, or one reads an operand that its peer
            has not passed.
        ConfigurationError
            If the ranks are on several nodes, or the kernel is for the other target.
        CompileError
            If the kernel does not compile, or its source has none of that name.
        Error
            As for every operator.
        """
        runtime = self._runtime
        with runtime.calls.calling("launch()"), runtime.machine.on(stream):
            runtime.refuse_nodes("launch()")
            runtime.launches.launch(kernel, agents, args, operand, shared_bytes)

    def synchronize(self) -> None:
        """Wait for the calls of this rank, and raise what has failed in one, if any has. Local.

        On the host target a call returns when it is complete, so there is nothing to wait for.
        """
        self._runtime.calls.synchronize()

    def barrier(self) -> None:
        """Return when all ranks have called it; under the deadlines of a call, as MPI's is not."""
        self._runtime.agree("barrier()", lambda: None)

    def close(self) -> None:
        """Free what the communicator holds. Arrays in its segments stay valid here.

        Collective over MPI, but never waits for a rank, unless within a `trace`. May be called
        again.

        Raises
        ------
        Error
            The failure of an earlier call, once.
        """
        pending = self._runtime.close(together=True)
        if pending is not None:
            raise pending

    def __enter__(self) -> "Communicator":
        return self

    def __exit__(self, kind: Any, value: Any, traceback: Any) -> None:
        if value is None:
            self.close()
        else:
            self._runtime.close(together=False)


def runtime_of(comm: Any) -> Runtime:
    """Return what operators use of a communicator; TypeError if it is none of this package."""
    if not isinstance(comm, Communicator):
        raise TypeError(
            f"comm is of type {type(comm).__name__}: use a mkernel_cp.Communicator, which is made "
            "from one of mpi4py"
        )
    return comm._runtime
