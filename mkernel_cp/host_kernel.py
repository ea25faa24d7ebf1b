"""Kernels of the host target: compiled to a shared library, called through ctypes."""

import ctypes
import os
from collections.abc import Callable, Mapping, Sequence

from . import compiler, errors, structs

_ENDED = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64)


class HostKernel:
    """A kernel of the host target.

    Parameters
    ----------
    source : path
        The file that has it.
    name : str
        What its ``MK_KERNEL`` says.
    defines : mapping of str to str
        Preprocessor definitions.
    options : sequence of str, optional
        More options of the compiler.

    Attributes
    ----------
    params_bytes : int
        Size of the struct that it takes.
    parts : int
        Of an agent, that record in a trace by themselves.
    """

    parts = 1

    def __init__(
        self,
        source: str | os.PathLike[str],
        name: str,
        defines: Mapping[str, str],
        options: Sequence[str] = (),
    ):
        library = compiler.host_library(source, defines=defines, options=options)
        self.name = name
        try:
            attach = getattr(library, f"{name}_attach")
        except AttributeError:
            raise errors.CompileError(
                f"{os.fspath(source)} has no kernel {name}: define it with MK_KERNEL({name}, ...)"
            ) from None
        runtime = compiler.host_library(compiler.host_runtime())
        runtime.host_runtime.restype = ctypes.c_void_p
        attach.argtypes, attach.restype = [ctypes.c_void_p], ctypes.c_uint64
        self.params_bytes = attach(runtime.host_runtime())
        self._entry = ctypes.cast(getattr(library, f"{name}_entry"), ctypes.c_void_p)
        self._launch, self._simulate = runtime.host_launch, runtime.host_simulate
        self._launch.argtypes = [ctypes.c_void_p] * 2
        self._simulate.argtypes = [ctypes.c_void_p] * 3

    def capacity(self, shared_bytes: int, processors: int | None = None) -> int:
        """Return how many agents with so much shared memory may run at a time; no GPU limits it."""
        return 1 << 16

    @staticmethod
    def request(
        params: ctypes.Structure, agents: int, lanes: int, shared_bytes: int, seed: int
    ) -> ctypes.Structure:
        """Return the struct that asks for a launch; the caller keeps `params` alive."""
        return structs.host().Launch(
            params=ctypes.addressof(params),
            agents=agents,
            lanes=lanes,
            shared_bytes=shared_bytes,
            seed=seed,
        )

    def run(self, request: ctypes.Structure) -> int:
        """Launch on threads and wait; return 0, or an errno if nothing could be started."""
        return self._launch(self._entry, ctypes.byref(request))

    def simulate(
        self,
        requests: Sequence[Sequence[ctypes.Structure]],
        seed: int,
        ended: Callable[[int, int], bool],
        *,
        stopped_rank: int | None = None,
        stop_step: int = 0,
        helpers: Sequence[ctypes.Structure] = (),
    ) -> ctypes.Structure:
        """Run launches of all ranks in this thread, interleaved by a seed, in virtual time.

        Parameters
        ----------
        requests : sequence of sequence of ctypes.Structure
            Per rank, the launches that it runs one after the other.
        seed : int
        ended : callable
            Called with (rank, launch) when a launch of a rank is over: its host's turn. Returns
            whether the rank makes its next launch.
        stopped_rank : int, optional
            This rank gets no turn any more after `stop_step` turns of all.
        stop_step : int, optional
        helpers : sequence of ctypes.Structure, optional
            ``Helper``: who else gets turns.

        Returns
        -------
        ctypes.Structure
            ``Simulation``: steps taken, and virtual nanoseconds.
        """
        structures = structs.host()
        callback = _ENDED(ended)
        beside = (structures.Helper * len(helpers))(*helpers)
        simulation = structures.Simulation(
            seed=seed,
            ranks=len(requests),
            launches_per_rank=len(requests[0]),
            ended=ctypes.cast(callback, ctypes.c_void_p).value,
            stopped_rank=2**64 - 1 if stopped_rank is None else stopped_rank,
            stop_step=stop_step,
            helpers=ctypes.addressof(beside),
            helper_count=len(helpers),
        )
        flat = [request for row in requests for request in row]
        array = (structures.Launch * len(flat))(*flat)
        status = self._simulate(self._entry, ctypes.byref(array), ctypes.byref(simulation))
        if status:
            raise errors.TimeoutError("a simulated launch waits for ever: a wait has no deadline")
        return simulation
