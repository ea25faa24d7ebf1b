"""What all operators have in common: calls, the plans that these find or make, their launches."""

import abc
import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from .. import compiler, errors
from ..communicator import Communicator, runtime_of
from ..kernel import Kernel, Module
from ..runtime import Runtime
from ..shared_memory import Arena
from . import operands

# Calls, by their arrays, that need not be prepared again.
_MOST_READY = 64


class Preparation:
    """The copies of operands that come before a launch.

    Parameters
    ----------
    machine : HostTarget or CudaTarget

    Attributes
    ----------
    used : list of array
        New memory that the launch needs.
    lasts : bool
        Whether another call with the same arrays needs the same copies and nothing else.
    """

    def __init__(self, machine: Any):
        self._machine = machine
        self._copies: list[tuple[Any, str]] = []
        self.used: list[Any] = []
        self.lasts = True

    def stage(self, operand: operands.Operand, to: np.ndarray) -> operands.Operand:
        """Have an operand copied to memory that the plan has for it; return it there."""
        self._copies.append((to, operand.name))
        return operands.Operand(operand.name, to, self._machine)

    def put_aside(self, operand: operands.Operand, to: Any = None) -> operands.Operand:
        """Have an operand copied to new memory, for this launch only; return it there."""
        if to is None:
            to = self._machine.empty(operand.shadow.shape, operand.shadow.dtype)
        self.used.append(to)
        self.lasts = False
        return self.stage(operand, to)

    def copy(self, arrays: Mapping[str, Any]) -> None:
        """Make the copies, of operands by name."""
        for to, name in self._copies:
            self._machine.copy(to, arrays[name])


class Operator(abc.ABC):
    """An operator, planned once for what was asked for, and called often. A context manager.

    A subclass plans (`_set_up`, `_fill_in`), and puts operands into the struct of a launch
    (`_request`).

    Attributes
    ----------
    function : str
    names : tuple of str
        Of the operands, which are arrays; what else is given comes behind them.
    spec_type : type
        What was asked for: the checked arguments, less the data. It is hashable, and has
        ``check(*given)``, which refuses what is not as planned, and ``outputs(out, given,
        machine)``: what results are written into, the caller's arrays or new ones.
    """

    function: ClassVar[str]
    names: ClassVar[tuple[str, ...]]
    spec_type: ClassVar[Any]

    # Of a plan; without a runtime it is closed.
    _spec: Any
    _runtime: Runtime | None
    _what: str
    _kernel: Any
    # Of how it is bound to an arena: arrays that the kernel reads, and calls that are prepared.
    _arena: Arena | None
    _arrays: dict[str, Any]
    _ready: dict[Any, tuple[Any, Preparation]]
    _pointers: np.ndarray

    # --- plans ------------------------------------------------------------------------------------

    @classmethod
    def call(
        cls, given: Sequence[Any], comm: Communicator, out: Any, stream: Any, **asked: Any
    ) -> Any:
        """Make one call: plan it, unless that was done before, and run it."""
        runtime = runtime_of(comm)
        with runtime.calls.calling(f"{cls.function}()"), runtime.machine.on(stream):
            key = cls._key(runtime, given, out)
            values = asked.values()
            question = (cls, key, *values, *map(_kind, values))
            step = None if key is None else _answered(runtime, question)
            if step is None:
                step = cls._step_for(given, runtime, out, asked)
                if key is not None:
                    _remember(runtime.answers, question, step)
            return step._run(given, out, key)

    @classmethod
    def _step_for(
        cls, given: Sequence[Any], runtime: Runtime, out: Any, asked: dict[str, Any]
    ) -> Any:
        """Return the plan for a call; made by its first one."""
        shadows = _shadows(cls._own(given, runtime.machine))
        spec = cls.spec_type(*shadows, runtime, **asked)
        step = runtime.plans.get(spec)
        if step is None:
            results = spec.outputs(out, shadows, runtime.machine)
            try:
                step = cls.__new__(cls)
                step._set_up(spec, runtime, *shadows)
            except errors.Error:
                if out is not None and runtime.calls.closed:
                    cls._leave_nothing(results, runtime.machine)
                raise
            runtime.plans[spec] = step
        return step

    def _plan(
        self, given: Sequence[Any], comm: Communicator, out: Any, stream: Any, **asked: Any
    ) -> None:
        """Plan for operands like these, and do not call."""
        runtime = runtime_of(comm)
        with runtime.calls.calling(f"{type(self).__name__}()"), runtime.machine.on(stream):
            shadows = _shadows(self._own(given, runtime.machine))
            spec = self.spec_type(*shadows, runtime, **asked)
            spec.outputs(out, shadows, runtime.machine)
            self._set_up(spec, runtime, *shadows)
            if out is not None:
                self._outputs(out, shadows)

    @classmethod
    def _own(cls, given: Sequence[Any], machine: Any) -> list[Any]:
        """Return the operands that a rank has given, and what else."""
        count = len(cls.names)
        arrays = zip(cls.names, given[:count], strict=True)
        return [*(operands.Operand(*pair, machine) for pair in arrays), *given[count:]]

    @classmethod
    def _leave_nothing(cls, results: Sequence[Any], machine: Any) -> None:
        """Mark the results of a call that could not be made."""
        for result in results:
            machine.fill(result.array, np.nan)

    # --- what an operator says --------------------------------------------------------------------

    @abc.abstractmethod
    def _set_up(self, spec: Any, runtime: Runtime, *shadows: Any) -> None:
        """Agree with the other ranks, compile and plan, for operands like these; then `_bind`."""

    def _source(self, name: str, defines: Mapping[str, str | int]) -> Kernel:
        """Return one of the package's kernels, with these macros."""
        return Module(compiler.kernel_source(name), defines=defines).kernel(name)

    @abc.abstractmethod
    def _fill_in(self, arena: Arena) -> None:
        """Fill in the structs with the addresses that this arena gives."""

    @abc.abstractmethod
    def _request(self, own: Sequence[Any], results: Sequence[Any], before: Preparation) -> Any:
        """Return what asks for a launch with operands that have been checked."""

    def _bind(self) -> None:
        """Fill in the structs with the addresses that the arena gives now."""
        self._arena, self._arrays, self._ready = self._runtime.memory.arena, {}, {}
        self._pointers = self._runtime.memory.segments.pointers
        self._fill_in(self._arena)

    def _constant(self, name: str, data: Any) -> int:
        """Return where the kernel finds data, which stay there as long as the plan is bound."""
        self._arrays[name] = self._runtime.machine.constant(data)
        return self._arrays[name].address

    # --- calls ------------------------------------------------------------------------------------

    def _call(self, given: Sequence[Any], out: Any, stream: Any) -> Any:
        """Return the result for operands like the planned ones."""
        runtime = self._runtime
        if runtime is None:
            raise ValueError("this plan is closed: make another")
        with runtime.calls.calling(self._what), runtime.machine.on(stream):
            return self._run(given, out, self._key(runtime, given, out))

    @classmethod
    def _key(cls, runtime: Runtime, given: Sequence[Any], out: Any) -> Any:
        """Return what stands for a call that may be repeated; None to look at it each time."""
        outs = out if isinstance(out, tuple) else (out,)
        return None if out is None else runtime.machine.key(*given, *outs)

    def _run(self, given: Sequence[Any], out: Any, key: Any) -> Any:
        """Make a call; `key` stands for its arrays, with which it may have been made before."""
        runtime = self._runtime
        if self._pointers is not runtime.memory.segments.pointers:
            # Memory may be gone, and what has its address now need not be where peers look.
            self._pointers, self._ready = runtime.memory.segments.pointers, {}
        ready = self._ready.get(key) if self._arena is runtime.memory.arena else None
        if ready is None:
            return self._prepare_and_run(given, out, key)
        runtime.machine.begin()
        runtime.machine.hold(given, out)
        self._launch(*ready, dict(zip(self.names, given, strict=False)), out)
        return self._returned(out, out)

    def _prepare_and_run(self, given: Sequence[Any], out: Any, key: Any) -> Any:
        machine = self._runtime.machine
        own, results = self._checked(given, out)
        machine.begin()
        if machine.capturing:
            self._check_captured(out)
        before = Preparation(machine)
        targets = [_target(result, before, machine) for result in results]
        request = self._prepared(own, targets, before)
        machine.hold(own, results, targets, before.used)
        try:
            self._launch(request, before, _arrays_of(own), results)
        finally:
            for result, target in zip(results, targets, strict=True):
                if target is not result:
                    machine.copy(result.array, target.array)
        if key is not None and before.lasts:
            _remember(self._ready, key, (request, before))
        return self._returned(out, results)

    def prepare(self, *given_and_out: Any) -> tuple[Any, Any]:
        """Return the launch struct for operands, and what must live until it has run."""
        *given, out = given_and_out
        own, results = self._checked(given, out)
        before = Preparation(self._runtime.machine)
        request = self._prepared(own, results, before)
        before.copy(_arrays_of(own))
        return request, (own, results, before)

    def _checked(self, given: Sequence[Any], out: Any) -> tuple[Sequence[Any], Sequence[Any]]:
        """Return operands as planned, and what the results are written into."""
        own = self._own(given, self._runtime.machine)
        shadows = _shadows(own)
        self._spec.check(*shadows)
        return own, self._outputs(out, shadows)

    def _outputs(self, out: Any, shadows: Sequence[Any]) -> Sequence[Any]:
        return self._spec.outputs(out, shadows, self._runtime.machine)

    def _check_captured(self, out: Any) -> None:
        """Refuse a call that a graph captures, if its results would go anywhere."""
        if out is None:
            raise ValueError("a call that a CUDA graph captures needs out=")

    def _prepared(self, own: Sequence[Any], results: Sequence[Any], before: Preparation) -> Any:
        runtime = self._runtime
        if self._arena is not runtime.memory.arena:
            runtime.machine.refuse_capture(f"{self._what}, whose arena a later plan has replaced,")
            self._bind()
        return self._request(own, results, before)

    def _launch(
        self, request: Any, before: Preparation, arrays: dict[str, Any], results: Any
    ) -> None:
        """Launch, with operands by name."""
        runtime = self._runtime
        runtime.machine.hold(self._arrays)
        before.copy(arrays)
        runtime.launches.run(self._kernel, request, self._what)

    def _returned(self, out: Any, results: Sequence[Any]) -> Any:
        """Return the results as the caller gets them."""
        return results[0].array if out is None else out

    def __repr__(self) -> str:
        plan = self.plan
        what = plan.explain().partition("\n")[0].partition(": ")[2]
        state = ", closed" if self._runtime is None else ""
        return f"<{type(self).__name__}: {what}, target {plan.target}, engine {plan.engine}{state}>"

    # --- the end ----------------------------------------------------------------------------------

    def close(self) -> None:
        """Forget the plan. Local; nothing waits for it."""
        self._arrays, self._ready, self._runtime = {}, {}, None

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()


def _shadows(own: Sequence[Any]) -> list[Any]:
    return [x.shadow if isinstance(x, operands.Operand) else x for x in own]


def _arrays_of(own: Sequence[Any]) -> dict[str, Any]:
    return {x.name: x.array for x in own if isinstance(x, operands.Operand)}


def _target(result: Any, before: Preparation, machine: Any) -> Any:
    """Return what a kernel writes a result into: it steps in whole elements."""
    if not isinstance(result, operands.Operand) or operands.element_steps(result.shadow):
        return result
    before.lasts = False
    target = operands.Operand(
        result.name, machine.empty(result.shadow.shape, result.shadow.dtype), machine
    )
    machine.copy(target.array, result.array)
    return target


def _kind(value: Any) -> Any:
    """Return what tells 24 from 24.0, which are equal."""
    return tuple(map(type, value)) if type(value) is tuple else type(value)


def _answered(runtime: Runtime, question: tuple[Any, ...]) -> Any:
    """Return the plan of an earlier call that asked the same of the same arrays."""
    try:
        return runtime.answers.get(question)
    except TypeError:  # a list of row counts, say, has no hash: it may be another now
        return None


def _remember(to: dict[Any, Any], key: Any, value: Any) -> None:
    if len(to) == _MOST_READY:
        to.clear()
    with contextlib.suppress(TypeError):
        to[key] = value
