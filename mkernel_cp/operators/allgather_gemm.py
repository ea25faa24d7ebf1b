"""`allgather_gemm`: multiply the rows that all ranks hold by a matrix of one's own."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from .. import compiler, errors, structs
from .. import plan as plans
from ..communicator import Arena, Communicator, extent
from ..kernel import Kernel
from ..memory import Location
from . import operands

# Triples of operands for which a call need not be prepared again.
_MOST_READY = 64


def allgather_gemm(
    a: np.ndarray,
    b: np.ndarray,
    *,
    comm: Communicator,
    row_counts: Sequence[int] | None = None,
    out: np.ndarray | None = None,
    dtype: Any = None,
    options: plans.Options | None = None,
) -> np.ndarray:
    """Return A @ b, where A is the rows `a` of all ranks, one rank's below another's.

    Collective. The rows of the peers are fetched by the kernel while it multiplies those that are
    there; no rank sees more of A than its own rows.

    Parameters
    ----------
    a : (M_r, K) array
        This rank's rows of A; bfloat16, float16, float32 or float64, in any strides: a NumPy array
        on the host target; on the cuda target a CuPy array, or one that has
        ``__cuda_array_interface__`` or DLPack, on the communicator's GPU. It is read in
        place by the peers if it comes from `Communicator.empty`, `zeros` or `asarray` and its rows
        (or, on all ranks, its columns) are contiguous; else it is copied first.
    b : (K, N_r) array
        Of the same dtype, in any strides. N_r may differ between ranks, and be 0.
    comm : Communicator
    row_counts : sequence of int, optional
        Rows of A on every rank, the same sequence on all ranks. Default: as many as here on each.
    out : (M, N_r) array, optional
        Where to put the result, in any strides; must not overlap `a` or `b`.
    dtype : data-type, optional
        Of the result: that of the operands (default), or float32 for 16-bit operands.
    options : Options, optional
        Choices that the plan would make otherwise.

    Returns
    -------
    (M, N_r) array
        `out`, or a new array. Sums are in float32 (float64 for float64), in the order of K, so
        equal inputs give equal bits whatever the number of ranks.

    Notes
    -----
    On the cuda target a call returns at once: it runs in the order of the current CuPy stream, and
    a failure is raised by the next call or by `Communicator.synchronize`. With `out` it can be
    captured in a CUDA graph once it has been made outside the capture; graphs that hold fused calls
    must be replayed one after the other, and in the same order on all ranks.

    Raises
    ------
    TypeError, ValueError
        If this rank's arguments are wrong; its peers raise `PeerError`.
    ArgumentMismatchError
        On all ranks, if they do not agree on the number of rows, K, dtypes or options.
    TimeoutError, PeerLostError
        On all ranks, if one does not take part. What was not finished of the result is NaN.

    Examples
    --------
    >>> with mk.Communicator() as comm:
    ...     c = mk.allgather_gemm(a[comm.rows(m)], b, comm=comm, row_counts=comm.row_counts(m))
    """
    operands.check_communicator(comm)
    with comm.calling("allgather_gemm()"):
        own, other = _pair(a, b, comm)
        spec = _Spec(own, other, comm, row_counts, dtype, options)
        step = comm.plans.get(spec)
        if step is None:
            result = operands.output(
                out, spec.out_shape, spec.out_dtype, (("a", own), ("b", other)), comm.machine
            )
            try:
                step = comm.plans[spec] = AllGatherGemm._from_spec(spec, comm, a)
            except errors.Error:
                if out is not None and comm.closed:
                    comm.machine.fill(result.array, np.nan)
                raise
        return step(a, b, out=out)


class AllGatherGemm:
    """`allgather_gemm`, planned once for shapes and dtypes, and called often.

    Takes the arguments of the function; making one is collective. A context manager.

    Attributes
    ----------
    plan : AllGatherGemmPlan

    Examples
    --------
    >>> step = mk.AllGatherGemm(a, b, comm=comm)
    >>> for _ in range(1000):
    ...     step(a, b, out=c)
    """

    def __init__(
        self,
        a: np.ndarray,
        b: np.ndarray,
        *,
        comm: Communicator,
        row_counts: Sequence[int] | None = None,
        out: np.ndarray | None = None,
        dtype: Any = None,
        options: plans.Options | None = None,
    ):
        operands.check_communicator(comm)
        with comm.calling("AllGatherGemm()"):
            own, other = _pair(a, b, comm)
            spec = _Spec(own, other, comm, row_counts, dtype, options)
            inputs = ("a", own), ("b", other)
            operands.output(out, spec.out_shape, spec.out_dtype, inputs, comm.machine)
            self._set_up(spec, comm, a)

    @classmethod
    def _from_spec(cls, spec: "_Spec", comm: Communicator, a: np.ndarray) -> "AllGatherGemm":
        self = cls.__new__(cls)
        self._set_up(spec, comm, a)
        return self

    def _set_up(self, spec: "_Spec", comm: Communicator, a: np.ndarray) -> None:
        self._spec, self._comm = spec, comm
        self._what = spec.agreed_text()
        kernels = []

        def compile_and_prefer() -> bool | None:
            kernels.append(_kernel(spec, comm))
            return operands.prefers_columns(operands.Operand("a", a, comm.machine).shadow)

        chunk = plans.chunk_shape(spec.row_counts, spec.k, spec.dtype, spec.options.chunk_bytes)

        def need() -> tuple[int, int]:
            signals = sum(-(-rows // chunk[0]) for rows in spec.row_counts) * -(-spec.k // chunk[1])
            sizes = (
                plans.arena_offsets(spec.row_counts, spec.k, spec.dtype, order)[-1]
                for order in (False, True)
            )
            return signals, max(sizes)

        preferences = set(comm.agreement(self._what, need, compile_and_prefer)) - {None}
        self._kernel = kernels[0] if kernels else _kernel(spec, comm)
        gpu, capacity = comm.machine.gpu, 0
        if gpu is not None:
            tile = _portable_tile(spec, gpu)
            capacity = self._kernel.capacity(tile.shared_bytes(spec.dtype))
        self.plan = plans.plan_allgather_gemm(
            comm.rank,
            spec.row_counts,
            spec.n,
            spec.k,
            spec.dtype,
            spec.out_dtype,
            preferences == {True},
            spec.options,
            gpu,
            capacity,
        )
        self._bind(comm.arena)

    def _bind(self, arena: Arena) -> None:
        """Fill in the structs with the addresses that this arena gives."""
        structures, plan, comm = structs.shared(), self.plan, self._comm
        self._arena = arena
        self._ready: dict[Any, Any] = {}
        base = comm.segments[arena.number]
        offsets = [arena.data_offset_for(arena.signals) + at for at in plan.arena_offsets()]
        self._stage = Location(arena.number, offsets[comm.rank])
        ranks = range(comm.size)
        first_chunk = np.cumsum([0, *(plan.chunks(rank) for rank in ranks)])
        arrays = {
            "row_start": np.array(plan.row_start, np.int64),
            "data": np.array([base.address + at for at in offsets[:-1]], np.uint64),
            "pitch": np.array([plan.pitch(rank) for rank in ranks], np.int64),
            "first_chunk": first_chunk[:-1].astype(np.int64),
        }
        constant = comm.machine.constant
        self._arrays = {name: constant(array) for name, array in arrays.items()}
        constants = structures.AllGatherGemmPlan(
            split=structures.Split(*plan.split),
            digest=comm.digest(self._what),
            n=plan.n,
            tile=structures.TileShape(*plan.tile),
            landing=structures.LandingPlan(
                by_columns=plan.by_columns,
                k=plan.k,
                chunk_rows=plan.chunk[0],
                chunk_k=plan.chunk[1],
                arrived=base.address,
                **{name: array.address for name, array in self._arrays.items()},
            ),
        )
        self._arrays["plan"] = constant(constants)
        self._params = structures.AllGatherGemmParams(
            world=comm.world_address, plan=self._arrays["plan"].address
        )
        self._params.message.digest = constants.digest

    def __call__(
        self, a: np.ndarray, b: np.ndarray, *, out: np.ndarray | None = None
    ) -> np.ndarray:
        """Return A @ b for operands of the planned shapes and dtypes; see `allgather_gemm`."""
        comm = self._comm
        if comm is None:
            raise ValueError("this plan is closed: make another")
        with comm.calling(self._what):
            ready = self._ready_for(a, b, out)
            if ready is None:
                return self._call(a, b, out)
            comm.machine.begin()
            comm.machine.hold(self._arrays, a, b, out)
            comm.run(self._kernel, ready, self._what)
            return out

    def _ready_for(self, a: Any, b: Any, out: Any) -> Any:
        """Return what was prepared for an earlier call with the same arrays, if it still holds."""
        if out is None or self._arena is not self._comm.arena:
            return None
        return self._ready.get(self._comm.machine.key(a, b, out))

    def _call(self, a: Any, b: Any, out: Any) -> Any:
        comm, machine, spec = self._comm, self._comm.machine, self._spec
        own, other = (operands.Operand(*pair, machine) for pair in (("a", a), ("b", b)))
        spec.check(own.shadow, other.shadow)
        inputs = ("a", own.shadow), ("b", other.shadow)
        result = operands.output(out, spec.out_shape, spec.out_dtype, inputs, machine)
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
        key = out is not None and machine.key(a, b, out)
        if key and used == (own, other, result):
            if len(self._ready) == _MOST_READY:
                self._ready.clear()
            self._ready[key] = request
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
        comm = self._comm
        if self._arena is not comm.arena:
            comm.machine.refuse_capture(self._what)
            self._bind(comm.arena)
        params = self._params
        place, pitch, a_rows = self._operand(a)
        params.message.operand.segment = place.segment
        params.message.operand.offset = place.offset
        params.message.operand_pitch = pitch
        if operands.strides(b.shadow) is None:
            dense = comm.machine.empty(b.shadow.shape, b.shadow.dtype)
            comm.machine.copy(dense, b.array)
            b = operands.Operand("b", dense, comm.machine)
        _set_matrix(params.a, a_rows.shadow)
        _set_matrix(params.b, b.shadow)
        _set_matrix(params.c, out.shadow)
        request = comm.prepare(self._kernel, params, sum(self.plan.split), self.plan.shared_bytes)
        return request, (a_rows, b, out)

    def _operand(self, a: operands.Operand) -> tuple[Location, int, operands.Operand]:
        """Return where peers find this rank's rows, their pitch, and the rows."""
        comm, plan, rows = self._comm, self.plan, a.shadow
        pitch = operands.line_pitch(rows, plan.by_columns)
        if pitch is not None and rows.flags.aligned and comm.in_segment(rows):
            return comm.segments.locate(*extent(rows)), pitch, a
        pitch = plan.pitch(comm.rank)
        lines, run = rows.shape[::-1] if plan.by_columns else rows.shape
        segment, start = comm.segments[self._stage.segment], self._stage.offset
        staged = segment.bytes[start : start + lines * pitch].view(rows.dtype)
        staged = staged.reshape(lines, pitch // rows.itemsize)[:, :run]
        staged = staged.T if plan.by_columns else staged
        comm.machine.copy(staged, a.array)
        return self._stage, pitch, operands.Operand("a", staged, comm.machine)

    def close(self) -> None:
        """Forget the plan. Local; nothing waits for it."""
        self._arrays, self._ready, self._comm = {}, {}, None

    def __enter__(self) -> "AllGatherGemm":
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()


def _pair(a: Any, b: Any, comm: Communicator) -> tuple[np.ndarray, np.ndarray]:
    """Return the shadows of two operands."""
    return tuple(operands.Operand(*x, comm.machine).shadow for x in (("a", a), ("b", b)))


class _Spec:
    """What was asked for: the checked arguments, less the data."""

    def __init__(self, a, b, comm, row_counts, dtype, options):
        operands.matrix("a", a)
        operands.matrix("b", b)
        self.dtype = operands.same_dtype(a, b)
        self.k, self.n = b.shape
        if a.shape[1] != self.k:
            raise ValueError(
                f"a has shape {a.shape}, b {b.shape}: a needs as many columns as b has rows"
            )
        self.row_counts = operands.counts("row_counts", row_counts, len(a), comm.rank, comm.size)
        self.out_dtype = plans.output_dtype(self.dtype, dtype)
        if options is not None and not isinstance(options, plans.Options):
            raise TypeError(f"options is a {type(options).__name__}: use mkernel_cp.Options")
        self.options = options or plans.Options()
        self.own_rows = len(a)
        self.out_shape = (sum(self.row_counts), self.n)
        self._key = (self.row_counts, self.k, self.n, self.dtype, self.out_dtype, self.options)

    def agreed_text(self) -> str:
        """Return all that the ranks must agree on, as text."""
        options = self.options.chunk_bytes
        tail = "" if options is None else f", chunk_bytes={options}"
        return (
            f"allgather_gemm(row_counts={list(self.row_counts)}, K={self.k}, "
            f"{self.dtype.name} -> {self.out_dtype.name}{tail})"
        )

    def check(self, a: np.ndarray, b: np.ndarray) -> None:
        """Refuse operands that are not as planned."""
        for name, array, shape in (
            ("a", a, (self.own_rows, self.k)),
            ("b", b, (self.k, self.n)),
        ):
            operands.matrix(name, array)
            if array.shape != shape or array.dtype != self.dtype:
                raise ValueError(
                    f"{name} has shape {array.shape} and dtype {array.dtype}: this plan is for "
                    f"{shape} and {self.dtype}; make another for other operands"
                )

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Spec) and self._key == other._key


def _kernel(spec: _Spec, comm: Communicator) -> Any:
    machine = comm.machine
    defines: dict[str, Any] = plans.type_defines(spec.dtype, spec.out_dtype)
    if machine.gpu is not None:
        defines |= _portable_tile(spec, machine.gpu).defines(spec.dtype)
    words = tuple((name, str(value)) for name, value in defines.items())
    return comm.load(Kernel(str(compiler.kernel_source("allgather_gemm")), "allgather_gemm", words))


def _portable_tile(spec: _Spec, gpu: plans.Gpu) -> plans.PortableTile:
    return plans.portable_tile(spec.dtype, spec.options, gpu.shared_bytes)


def _set_matrix(to: Any, array: np.ndarray) -> None:
    to.data = array.ctypes.data
    to.row_stride, to.column_stride = operands.strides(array)
