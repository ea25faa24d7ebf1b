"""What the operators that multiply two matrices have in common: checks, kernel and structs."""

import abc
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from .. import plan as plans
from .. import structs
from ..arguments import output_dtype
from ..host_pages import digest_of
from ..runtime import Runtime
from ..shared_memory import Arena
from ..tiles import kernel_defines, type_defines
from . import operands
from .operator import Operator, Preparation


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
        self.out_dtype = output_dtype(self.dtype, dtype)
        self.options = operands.options(options, sums=self.sums)
        if self.options.tf32 and self.dtype != np.float32:
            raise TypeError(
                f"Options(tf32=True) with operands of {self.dtype}: it rounds float32; leave it out"
            )

    def _take_measured(self, runtime: Runtime, operator: str) -> None:
        """Choose what was measured to be fastest, where the caller chooses nothing."""
        shape = sum(self.row_counts), self.k, self.n
        self.options = runtime.tuning.fill(self.options, operator, self.dtype.name, shape)

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

    def outputs(
        self, out: Any, shadows: Sequence[np.ndarray], machine: Any
    ) -> list[operands.Operand]:
        """Return what the result is written into: the caller's array, or a new one."""
        inputs = list(zip(("a", "b"), shadows, strict=True))
        return [operands.output(out, self.out_shape, self.out_dtype, inputs, machine)]

    def __hash__(self) -> int:
        return hash(self._key())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GemmSpec) and self._key() == other._key()


class GemmOperator(Operator):
    """An operator that multiplies two matrices of each rank.

    A subclass says what its ranks agree on (`_agree`), and how its kernel learns of the operands
    (`_constants`, `_place`). Its kernel is called like its function.
    """

    names = "a", "b"
    params_struct: ClassVar[str]
    spec_type: ClassVar[type[GemmSpec]]
    plan: plans.GemmPlan

    def _set_up(self, spec: GemmSpec, runtime: Runtime, a: np.ndarray, b: np.ndarray) -> None:
        self._spec, self._runtime = spec, runtime
        self._tile = self._choose_tile()
        self._what = self._agreed_text()
        self._b_by_columns = self._prefers_columns("b", b) is True
        self._a_by_columns = self._agree(a)
        self._kernel, capacity = self._load(self._a_by_columns), 0
        if runtime.machine.gpu is not None:
            capacity = self._kernel.capacity(
                self._tile.shared_bytes(spec.dtype, self._staged_dtype()), spec.options.sm_budget
            )
            capacity -= runtime.launches.staging_agents
        self.plan = self._make_plan(capacity)
        self._bind()

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
    def _constants(self, arena: Arena) -> Any:
        """Return the struct of the plan, for an arena."""

    @abc.abstractmethod
    def _place(self, a: operands.Operand, message: Any, before: Preparation) -> operands.Operand:
        """Return a as the kernel reads it; say in the message where it is, if peers read it."""

    def _kernel_name(self) -> str:
        """Return what the kernel, and its file, are called."""
        return self.function

    def _params_name(self) -> str:
        """Return what the struct of its parameters is called."""
        return self.params_struct

    @abc.abstractmethod
    def _choose_tile(self) -> Any:
        """Return the tile, as far as it is known before the ranks have agreed."""

    def _staged_dtype(self) -> np.dtype:
        """Return the widest dtype of a finished tile."""
        return self._spec.out_dtype

    def _type_defines(self) -> dict[str, str]:
        """Return the macros that say what the kernel's dtypes are."""
        spec = self._spec
        return type_defines(spec.dtype, spec.out_dtype, tf32=spec.options.tf32)

    # --- kernel and structs -----------------------------------------------------------------------

    def _load(self, a_by_columns: bool) -> Any:
        """Return the kernel for operands in these orders, compiled and loaded."""
        words = kernel_defines(
            *(self._type_defines(), self._tile, self._spec.dtype),
            a_by_columns=a_by_columns,
            b_by_columns=self._b_by_columns,
        )
        if self._runtime.num_nodes > 1:
            words["MK_NODES"] = 1
        name = self._kernel_name()
        return self._runtime.launches.load(self._source(name, words))

    def _prefers_columns(self, name: str, operand: np.ndarray) -> bool | None:
        """Return whether the engine is to read an operand in F order; None if it may be either."""
        if self._mapped and self._spec.options.tf32:  # there are instructions for lines along k
            return name == "b"
        return operands.prefers_columns(operand)

    @property
    def _mapped(self) -> bool:
        """Whether the engine reads operands, and stores the result, through tensor maps."""
        return self._tile.engine == "hopper"

    def _fill_in(self, arena: Arena) -> None:
        runtime, structures = self._runtime, structs.shared()
        constants = self._constants(arena)
        params = getattr(structures, self._params_name())
        self._params = params(world=runtime.world.address, plan=self._constant("plan", constants))
        self._params.message.digest = digest_of(self._what)

    # --- calls ------------------------------------------------------------------------------------

    def __call__(
        self, a: np.ndarray, b: np.ndarray, *, out: np.ndarray | None = None, stream: Any = None
    ) -> np.ndarray:
        """Return the result for operands of the planned shapes and dtypes; see the function."""
        return self._call((a, b), out, stream)

    def _request(
        self,
        own: Sequence[operands.Operand],
        results: Sequence[operands.Operand],
        before: Preparation,
    ) -> Any:
        machine, spec, params = self._runtime.machine, self._spec, self._params
        a = self._place(own[0], params.message, before)
        b = self._readable(own[1], self._b_by_columns, before)
        for to, operand in ((params.a, a), (params.b, b), (params.c, results[0])):
            to.data = operand.shadow.ctypes.data
            to.row_stride, to.column_stride = operands.element_steps(operand.shadow)
        if self._mapped:
            first, second = self._tile.boxes(
                *(spec.dtype, self._a_by_columns, self._b_by_columns),
                a_rows=a.shadow.shape[0],
                b_columns=spec.n,
            )
            for to, operand, by_columns, box in (
                (params.a, a, self._a_by_columns, first),
                (params.b, b, self._b_by_columns, second),
                (params.c, results[0], False, (128 // results[0].shadow.itemsize, 64)),
            ):
                rounds = spec.options.tf32 and to is not params.c
                operands.map_lines(to, operand.shadow, by_columns, box, machine, tf32=rounds)
        prepare = self._runtime.launches.prepare
        return prepare(self._kernel, params, self._agents(), self.plan.shared_bytes)

    def _agents(self) -> int:
        return sum(self.plan.split) + self.plan.network_agents

    def _is_readable(self, array: np.ndarray, by_columns: bool) -> bool:
        """Return whether the engine takes an operand as it lies."""
        if self._mapped:
            return operands.aligned_lines(array, by_columns) is not None
        return operands.element_steps(array) is not None

    def _readable(
        self, value: operands.Operand, by_columns: bool, before: Preparation
    ) -> operands.Operand:
        """Return an operand as the engine takes it: itself, or a copy."""
        if self._is_readable(value.shadow, by_columns):
            return value
        dtype = self._spec.dtype
        lines, run = value.shadow.shape[::-1] if by_columns else value.shadow.shape
        pitch = plans.line_pitch(run, dtype) // dtype.itemsize
        aligned = self._runtime.machine.empty((lines, pitch), dtype)[:, :run]
        return before.put_aside(value, aligned.T if by_columns else aligned)
