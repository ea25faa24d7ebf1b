"""What the operators that multiply have in common: a call, its checks, and its launch."""

import abc
import contextlib
from typing import Any, ClassVar

import numpy as np

from .. import compiler, errors, structs
from .. import plan as plans
from ..communicator import Arena, Communicator
from ..kernel import Kernel
from . import operands

# Calls, by their arrays, that need not be prepared again.
_MOST_READY = 64


class GemmSpec:
    """What was asked for: the checked arguments, less the data.

    Attributes
    ----------
    dtype, out_dtype : numpy.dtype
    k, n : int
        Rows and columns of b.
    a_rows : int
        Rows of a.
    row_counts : tuple of int
        Rows of every rank.
    out_shape : tuple of int
    options : Options
    """

    sums: ClassVar[bool] = False  # whether it adds over ranks
    row_counts: tuple[int, ...]
    out_shape: tuple[int, int]

    def __init__(self, a: np.ndarray, b: np.ndarray, dtype: Any, options: Any):
        operands.matrix("a", a)
        operands.matrix("b", b)
        self.dtype = operands.same_dtype(a, b)
        self.k, self.n = b.shape
        if a.shape[1] != self.k:
            raise ValueError(
                f"a has shape {a.shape}, b {b.shape}: a needs as many columns as b has rows"
            )
        self.a_rows = len(a)
        self.out_dtype = plans.output_dtype(self.dtype, dtype)
        self.options = operands.options(options, sums=self.sums)
        if self.options.tf32 and self.dtype != np.float32:
            raise TypeError(
                f"Options(tf32=True) with operands of {self.dtype}: it rounds float32; leave it out"
            )

    def _take_measured(self, comm: Communicator, operator: str) -> None:
        """Choose what was measured to be fastest, where the caller chooses nothing."""
        shape = sum(self.row_counts), self.k, self.n
        self.options = comm.tuning.fill(self.options, operator, self.dtype.name, shape)

    def _key(self) -> tuple:
        return (
            *(type(self), self.row_counts, self.k, self.n),
            *(self.dtype, self.out_dtype, self.options),
        )

    def check(self, a: np.ndarray, b: np.ndarray) -> None:
        """Refuse operands that are not as planned."""
        for name, array, shape in (
            ("a", a, (self.a_rows, self.k)),
            ("b", b, (self.k, self.n)),
        ):
            operands.matrix(name, array)
            if array.shape != shape or array.dtype != self.dtype:
                raise ValueError(
                    f"{name} has shape {array.shape} and dtype {array.dtype}: this plan is for "
                    f"{shape} and {self.dtype}; make another for other operands"
                )

    def __hash__(self) -> int:
        return hash(self._key())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GemmSpec) and self._key() == other._key()


class GemmOperator(abc.ABC):
    """An operator, planned once for shapes and dtypes, and called often.

    A subclass says what it asks for (`spec_type`), what its ranks agree on (`_agree`), and how its
    kernel learns of the operands (`_constants`, `_place`). Its kernel is called like its function.
    """

    function: ClassVar[str]
    params_struct: ClassVar[str]
    spec_type: ClassVar[type[GemmSpec]]
    plan: plans.GemmPlan

    @classmethod
    def call(
        cls, a: Any, b: Any, comm: Communicator, out: Any, stream: Any, **asked: Any
    ) -> np.ndarray:
        """Make one call: plan it, unless that was done before, and run it."""
        operands.check_communicator(comm)
        with comm.calling(f"{cls.function}()"), comm.machine.on(stream):
            key = _key(comm, a, b, out)
            question = (cls, key, *asked.values())
            step = None if key is None else _answered(comm, question)
            if step is None:
                step = cls._step_for(a, b, comm, out, asked)
                if key is not None:
                    _remember(comm.answers, question, step)
            return step._run(a, b, out, key)

    @classmethod
    def _step_for(cls, a: Any, b: Any, comm: Communicator, out: Any, asked: dict[str, Any]) -> Any:
        """Return the plan for a call; made by its first one."""
        own, other = _pair(a, b, comm)
        spec = cls.spec_type(own, other, comm, **asked)
        step = comm.plans.get(spec)
        if step is None:
            result = _output(out, spec, own, other, comm)
            try:
                step = comm.plans[spec] = cls.__new__(cls)
                step._set_up(spec, comm, own, other)
            except BaseException as error:
                comm.plans.pop(spec, None)
                if isinstance(error, errors.Error) and out is not None and comm.closed:
                    comm.machine.fill(result.array, np.nan)
                raise
        return step

    def _plan(
        self, a: Any, b: Any, comm: Communicator, out: Any, stream: Any, **asked: Any
    ) -> None:
        """Plan for operands like these, and do not call."""
        operands.check_communicator(comm)
        with comm.calling(f"{type(self).__name__}()"), comm.machine.on(stream):
            own, other = _pair(a, b, comm)
            spec = self.spec_type(own, other, comm, **asked)
            _output(out, spec, own, other, comm)
            self._set_up(spec, comm, own, other)

    def _set_up(self, spec: Any, comm: Communicator, a: np.ndarray, b: np.ndarray) -> None:
        self._spec, self._comm = spec, comm
        self._tile = self._choose_tile()
        self._what = self._agreed_text()
        self._b_by_columns = self._prefers_columns("b", b) is True
        self._a_by_columns = self._agree(a)
        self._kernel, capacity = self._load(self._a_by_columns), 0
        if comm.machine.gpu is not None:
            capacity = self._kernel.capacity(
                self._tile.shared_bytes(spec.dtype, self._staged_dtype()), spec.options.sm_budget
            )
            capacity -= comm.staging_agents
        self.plan = self._make_plan(capacity)
        self._bind(comm.arena)

    # --- what an operator says --------------------------------------------------------------------

    @abc.abstractmethod
    def _agreed_text(self) -> str:
        """Return all that the ranks must agree on, as text."""

    @abc.abstractmethod
    def _agree(self, a: np.ndarray) -> bool:
        """Agree with the other ranks; return whether a is read in F order."""

    @abc.abstractmethod
    def _make_plan(self, capacity: int) -> plans.GemmPlan:
        """Return the plan, for a GPU that runs so many agents at a time."""

    @abc.abstractmethod
    def _constants(self, arena: Arena, base: int) -> Any:
        """Return the struct of the plan, for an arena that is mapped at `base` here."""

    @abc.abstractmethod
    def _place(self, a: operands.Operand, message: Any) -> operands.Operand:
        """Return a as the kernel reads it; say in the message where it is, if peers read it."""

    def _kernel_name(self) -> str:
        """Return what the kernel, and its file, are called."""
        return self.function

    def _choose_tile(self) -> Any:
        spec, gpu = self._spec, self._comm.machine.gpu
        return plans.choose_tile(
            *(spec.row_counts, spec.n, spec.k, spec.dtype, self._staged_dtype()),
            *(spec.options, gpu),
            gathers=True,
        )

    def _staged_dtype(self) -> np.dtype:
        """Return the widest dtype of a finished tile."""
        return self._spec.out_dtype

    def _type_defines(self) -> dict[str, str]:
        """Return the macros that say what the kernel's dtypes are."""
        spec = self._spec
        return plans.type_defines(spec.dtype, spec.out_dtype, tf32=spec.options.tf32)

    # --- kernel and structs -----------------------------------------------------------------------

    def _load(self, a_by_columns: bool) -> Any:
        """Return the kernel for operands in these orders, compiled and loaded."""
        words = plans.kernel_defines(
            *(self._type_defines(), self._tile, self._spec.dtype),
            a_by_columns=a_by_columns,
            b_by_columns=self._b_by_columns,
        )
        if self._comm.num_nodes > 1:
            words["MK_NODES"] = 1
        name = self._kernel_name()
        source = str(compiler.kernel_source(name))
        return self._comm.load(Kernel(source, name, tuple(compiler.macros(words).items())))

    def _prefers_columns(self, name: str, operand: np.ndarray) -> bool | None:
        """Return whether the engine is to read an operand in F order; None if it may be either."""
        if self._mapped and self._spec.options.tf32:  # there are instructions for lines along k
            return name == "b"
        return operands.prefers_columns(operand)

    @property
    def _mapped(self) -> bool:
        """Whether the engine reads operands, and stores the result, through tensor maps."""
        return self._tile.engine == "hopper"

    def _bind(self, arena: Arena) -> None:
        """Fill in the structs with the addresses that this arena gives."""
        comm, structures = self._comm, structs.shared()
        self._arena = arena
        self._ready: dict[Any, Any] = {}
        self._arrays: dict[str, Any] = {}  # that the kernel reads
        constants = self._constants(arena, comm.segments[arena.number].address)
        params = getattr(structures, self.params_struct)
        self._params = params(world=comm.world_address, plan=self._constant("plan", constants))
        self._params.message.digest = comm.digest(self._what)

    def _constant(self, name: str, data: Any) -> int:
        """Return where the kernel finds data, which stay there as long as the binding."""
        self._arrays[name] = self._comm.machine.constant(data)
        return self._arrays[name].address

    # --- calls ------------------------------------------------------------------------------------

    def __call__(
        self, a: np.ndarray, b: np.ndarray, *, out: np.ndarray | None = None, stream: Any = None
    ) -> np.ndarray:
        """Return the result for operands of the planned shapes and dtypes; see the function."""
        comm = self._comm
        if comm is None:
            raise ValueError("this plan is closed: make another")
        with comm.calling(self._what), comm.machine.on(stream):
            return self._run(a, b, out, _key(comm, a, b, out))

    def _run(self, a: Any, b: Any, out: Any, key: Any) -> Any:
        """Make a call; `key` stands for its arrays, with which it may have been made before."""
        comm = self._comm
        ready = self._ready.get(key) if self._arena is comm.arena else None
        if ready is None:
            return self._prepare_and_run(a, b, out, key)
        comm.machine.begin()
        comm.machine.hold(self._arrays, a, b, out)
        comm.run(self._kernel, ready, self._what)
        return out

    def _prepare_and_run(self, a: Any, b: Any, out: Any, key: Any) -> Any:
        comm, machine, spec = self._comm, self._comm.machine, self._spec
        own, other = (operands.Operand(*pair, machine) for pair in (("a", a), ("b", b)))
        spec.check(own.shadow, other.shadow)
        result = _output(out, spec, own.shadow, other.shadow, comm)
        machine.begin()
        if machine.capturing and out is None:
            raise ValueError("a call that a CUDA graph captures needs out=")
        # A kernel steps in whole elements; what does not is copied.
        target = result
        if operands.strides(result.shadow) is None:
            target = operands.Operand("out", machine.empty(spec.out_shape, spec.out_dtype), machine)
        request, used = self._request(own, other, target)
        machine.hold(self._arrays, used, result)
        try:
            comm.run(self._kernel, request, self._what)
        finally:
            if target is not result:
                machine.copy(result.array, target.array)
        if key is not None and used == (own, other, result):
            _remember(self._ready, key, request)
        return result.array if out is None else out

    def prepare(self, a: np.ndarray, b: np.ndarray, out: np.ndarray) -> tuple[Any, Any]:
        """Return the launch struct for checked operands, and what must live until it has run."""
        machine = self._comm.machine
        return self._request(
            *(operands.Operand(name, x, machine) for name, x in (("a", a), ("b", b), ("out", out)))
        )

    def _request(
        self, a: operands.Operand, b: operands.Operand, out: operands.Operand
    ) -> tuple[Any, Any]:
        comm, spec = self._comm, self._spec
        if self._arena is not comm.arena:
            comm.machine.refuse_capture(self._what)
            self._bind(comm.arena)
        params = self._params
        a = self._place(a, params.message)
        b = self._readable("b", b, self._b_by_columns)
        for to, operand in ((params.a, a), (params.b, b), (params.c, out)):
            to.data = operand.shadow.ctypes.data
            to.row_stride, to.column_stride = operands.strides(operand.shadow)
        if self._mapped:
            own, other = self._tile.boxes(spec.dtype, self._a_by_columns, self._b_by_columns)
            for to, operand, by_columns, box in (
                (params.a, a, self._a_by_columns, own),
                (params.b, b, self._b_by_columns, other),
                (params.c, out, False, (128 // out.shadow.itemsize, 64)),
            ):
                rounds = spec.options.tf32 and to is not params.c
                operands.map_lines(to, operand.shadow, by_columns, box, comm.machine, tf32=rounds)
        request = comm.prepare(self._kernel, params, self._agents(), self.plan.shared_bytes)
        return request, (a, b, out)

    def _agents(self) -> int:
        return sum(self.plan.split) + self.plan.network_agents

    def _is_readable(self, array: np.ndarray, by_columns: bool) -> bool:
        """Return whether the engine takes an operand as it lies."""
        if self._mapped:
            return operands.aligned_lines(array, by_columns) is not None
        return operands.strides(array) is not None

    def _readable(self, name: str, value: operands.Operand, by_columns: bool) -> operands.Operand:
        """Return an operand as the engine takes it: itself, or a copy."""
        if self._is_readable(value.shadow, by_columns):
            return value
        machine, dtype = self._comm.machine, self._spec.dtype
        lines, run = value.shadow.shape[::-1] if by_columns else value.shadow.shape
        pitch = plans.line_pitch(run, dtype) // dtype.itemsize
        aligned = machine.empty((lines, pitch), dtype)[:, :run]
        aligned = aligned.T if by_columns else aligned
        machine.copy(aligned, value.array)
        return operands.Operand(name, aligned, machine)

    def close(self) -> None:
        """Forget the plan. Local; nothing waits for it."""
        self._arrays, self._ready, self._comm = {}, {}, None

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()


def _key(comm: Communicator, a: Any, b: Any, out: Any) -> Any:
    """Return what stands for the arrays of a call that may be repeated; None if none can be."""
    return None if out is None else comm.machine.key(a, b, out)


def _answered(comm: Communicator, question: tuple[Any, ...]) -> Any:
    """Return the plan of an earlier call that asked the same of the same arrays."""
    try:
        return comm.answers.get(question)
    except TypeError:  # a list of row counts, say, has no hash: it may be another now
        return None


def _remember(to: dict[Any, Any], key: Any, value: Any) -> None:
    if len(to) == _MOST_READY:
        to.clear()
    with contextlib.suppress(TypeError):
        to[key] = value


def _pair(a: Any, b: Any, comm: Communicator) -> tuple[np.ndarray, np.ndarray]:
    """Return the shadows of two operands."""
    return tuple(operands.Operand(*x, comm.machine).shadow for x in (("a", a), ("b", b)))


def _output(
    out: Any, spec: GemmSpec, a: np.ndarray, b: np.ndarray, comm: Communicator
) -> operands.Operand:
    """Return `out`, or a new array, for a result."""
    inputs = ("a", a), ("b", b)
    return operands.output(out, spec.out_shape, spec.out_dtype, inputs, comm.machine)
