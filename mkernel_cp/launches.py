"""Launches: kernels compiled and loaded, what each is to know, and what comes of it."""

import ctypes
import operator
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import errors, structs
from .arguments import at_least
from .calls import Calls
from .host_pages import SignalPage, digest_of
from .kernel import Kernel
from .memory import extent
from .shared_memory import SharedMemory
from .trace import current as current_trace
from .world import World

_NOWHERE = (1 << 64) - 1  # as in world.cuh


@dataclass
class TestHooks:
    """What tests change in every launch of a communicator.

    Attributes
    ----------
    lanes : int
        Threads per agent.
    seed : int
        Draws random yields and early copies; 0 for none.
    delay_ns : tuple of int
        Per role, up to how long its agents start late.
    """

    __test__ = False  # not a test class, whatever pytest thinks of its name
    lanes: int = 1
    seed: int = 0
    delay_ns: tuple[int, ...] = (0, 0)


class Launches:
    """What a rank launches.

    Parameters
    ----------
    calls : Calls
    agree : callable
        As `Agreements.agree`.
    memory : SharedMemory
    machine : HostTarget or CudaTarget
    world : World
    page : SignalPage
        Of this rank.
    staging_agents : int
        Agents that each launch has beside those of its plan: what they do no kernel knows of.

    Attributes
    ----------
    calls, agree, machine, staging_agents
        As above.
    hooks : TestHooks
    """

    def __init__(
        self,
        calls: Calls,
        agree: Callable[[str, Callable[[], Any]], list[Any]],
        memory: SharedMemory,
        machine: Any,
        world: World,
        page: SignalPage,
        staging_agents: int,
    ):
        self.calls, self.agree, self.machine = calls, agree, machine
        self.staging_agents = staging_agents
        self.hooks = TestHooks()
        self._memory, self._world = memory, world
        self._signals, self._page = calls.signals, calls.pages[calls.rank]
        self._bytes_word = page.bytes_word
        self._kernels: dict[Kernel, Any] = {}
        self._delays: tuple[Any, ...] = ()

    # --- kernels ----------------------------------------------------------------------------------

    def load(self, kernel: Kernel) -> Any:
        """Return a kernel as this communicator's target runs it; compiled by the first use."""
        if kernel not in self._kernels:
            if kernel.target not in ("auto", self.machine.name):
                raise errors.ConfigurationError(
                    f"{kernel.name} is for target {kernel.target!r}, the communicator's is "
                    f"{self.machine.name!r}: leave out target= of its Module, or make another"
                )
            self._kernels[kernel] = self.machine.kernel(kernel)
        return self._kernels[kernel]

    def source_of(self, loaded: Any) -> Kernel:
        """Return what `load` has made a kernel of."""
        return next(source for source, known in self._kernels.items() if known is loaded)

    # --- one launch -------------------------------------------------------------------------------

    def prepare(self, kernel: Any, params: ctypes.Structure, agents: int, shared_bytes: int) -> Any:
        """Return the launch struct for a kernel; keeps `params` alive."""
        hooks = self.hooks
        delays = hooks.delay_ns, hooks.seed
        if delays != self._delays:
            self._delays = delays
            for role, delay in enumerate(hooks.delay_ns):
                self._world.struct.delay_ns[role] = delay
            self._world.struct.delay_seed = 1 + self._seed() if any(hooks.delay_ns) else 0
            self._world.update()
        seed = self._seed() * 1_000_003 + self._signals.generation + 1 if hooks.seed else 0
        agents += self.staging_agents
        return kernel.request(params, agents, hooks.lanes, shared_bytes, seed)

    def _seed(self) -> int:
        return self.hooks.seed * self.calls.size + self.calls.rank

    def run(self, kernel: Any, request: Any, what: str) -> None:
        """Launch; raise what any rank raised in it as far as this target waits for that."""
        trace = current_trace()
        if trace is not None and not self.machine.capturing:
            kernel = trace.variant(self, kernel, request, what)
        generation = self._signals.generation + 1
        self._page.set_text(generation, what)
        try:
            self.machine.launch(kernel, request)
        except OSError as reason:
            raise errors.OutOfMemoryError(
                f"{what}: its threads or its grid could not be started: {reason.strerror or reason}"
            ) from None
        if not self._signals.launched(generation):
            self.calls.raise_failure()
            raise errors.Error(f"{what}: the kernel ended without result or record")

    def record_in(self, address: int) -> None:
        """Tell traced kernels where their ``Trace`` struct lies."""
        self._world.struct.trace = address
        self._world.update()

    @property
    def bytes_from_peers(self) -> int:
        """Bytes that kernels have brought here from peers, as they counted them."""
        return self.machine.word(self._bytes_word)

    # --- kernels of a user's own ------------------------------------------------------------------

    def launch(
        self,
        kernel: Kernel,
        agents: int,
        args: Sequence[Any],
        operand: Any,
        shared_bytes: int,
    ) -> None:
        """Do as `Communicator.launch`, within a call of that."""
        if not isinstance(kernel, Kernel):
            raise TypeError(f"kernel is a {type(kernel).__name__}: use Module(...).kernel(name)")
        what = f"launch of {kernel.name}"
        agents = at_least(1, "agents", agents)
        shared_bytes = at_least(0, "shared_bytes", shared_bytes)
        loaded = self.load(kernel)
        message = structs.shared().CallMessage(digest=digest_of(what))
        if operand is None:
            message.operand.segment = _NOWHERE
        else:
            self._place(self.machine.shadow(self.machine.array("operand", operand)), message)
        words = b"".join(map(self._argument, args))
        params = ctypes.create_string_buffer(
            struct.pack("=Q", self._world.address) + bytes(message) + words,
            8 + ctypes.sizeof(message) + len(words),
        )
        if len(params) != loaded.params_bytes:
            raise ValueError(
                f"{what}: its struct has {loaded.params_bytes} bytes; World*, CallMessage and "
                f"{len(args)} arguments make {len(params)}"
            )
        capacity = loaded.capacity(shared_bytes)
        if agents > capacity:
            raise ValueError(
                f"agents={agents}: {self.machine.device} runs {capacity} of {kernel.name} at a time"
            )
        self.machine.begin()
        request = self.prepare(loaded, params, agents, shared_bytes)
        self.run(loaded, request, what)

    def _place(self, operand: np.ndarray, message: ctypes.Structure) -> None:
        """Say in a message where peers find an operand; ValueError if they cannot read it."""
        if operand.size == 0:
            return
        contiguous = operand.ndim > 0 and operand.strides[-1] == operand.itemsize
        if not contiguous or min(operand.strides) < 0 or not self._memory.holds(operand):
            raise ValueError(
                "operand: use an array from empty(), zeros() or asarray(), with contiguous rows in "
                "ascending order, so that peers can read it"
            )
        place = self._memory.segments.locate(*extent(operand))
        message.operand.segment, message.operand.offset = place.segment, place.offset
        message.operand_pitch = operand.strides[0]

    def _argument(self, value: Any) -> bytes:
        """Return the 8 bytes by which a kernel gets an argument."""
        if isinstance(value, float | np.floating):
            return struct.pack("=d", value)
        if not hasattr(value, "shape") or isinstance(value, np.generic):
            try:
                number = operator.index(value)
                return struct.pack("=q" if number < 1 << 63 else "=Q", number)
            except (TypeError, struct.error):
                raise TypeError(
                    f"argument {value!r}: use an array, a float, or an integer of 64 bits"
                ) from None
        array = self.machine.shadow(self.machine.array("argument", value))
        return struct.pack("=Q", array.ctypes.data)
