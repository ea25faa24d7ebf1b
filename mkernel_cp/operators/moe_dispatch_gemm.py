"""`moe_dispatch_gemm`: send tokens to the ranks of their experts, and multiply them there."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from .. import errors, structs
from .. import plan as plans
from ..arguments import Options, check_dtype, output_dtype
from ..communicator import Communicator
from ..host_pages import digest_of
from ..memory import Location, extent
from ..moe_plan import (
    Combine,
    Dispatch,
    MoeDispatchGemmPlan,
    dispatch_tile,
    offsets_of,
    plan_moe_dispatch_gemm,
    shared_bytes,
    takes_measured,
)
from ..reference import array_split_counts
from ..runtime import Runtime
from ..shared_memory import Arena
from ..tiles import kernel_defines, type_defines
from ..transport.network import check_chunks
from . import operands
from .operator import Operator, Preparation

_IDS = (np.dtype(np.int32), np.dtype(np.int64))


def moe_dispatch_gemm(
    x: np.ndarray,
    topk_idx: np.ndarray,
    w: np.ndarray,
    *,
    comm: Communicator,
    num_experts: int | None = None,
    max_tokens: int | None = None,
    capacity: int | None = None,
    out: Any = None,
    dtype: Any = None,
    stream: Any = None,
    options: Options | None = None,
) -> tuple[np.ndarray, "DispatchLayout"]:
    """Return the tokens that chose this rank's experts, each times the weights of its expert.

    Collective. The kernel sorts the tokens by expert, tells the peers, brings their tokens here,
    each once however many of this rank's experts it chose, and multiplies those that are there.
    The hosts exchange nothing: ids and numbers of tokens may be others in every call.

    Parameters
    ----------
    x : (T_r, H) array
        This rank's tokens; bfloat16, float16, float32 or float64, in any strides. T_r may differ
        between ranks and from call to call, and be 0. It is read in place by the peers if it comes
        from `Communicator.empty`, `zeros` or `asarray` and its rows are contiguous; else it is
        copied first.
    topk_idx : (T_r, k) array of int32 or int64
        The experts of each token, 0 to E - 1; -1 for none. An id that a token names twice makes
        two rows of the same token.
    w : (E_r, H, I) array
        The weights of this rank's experts, of the dtype of `x`, in any strides. The ranks have the
        E experts as `numpy.array_split` deals them out, rank 0 the first ones; E_r may be 0.
    comm : Communicator
    num_experts : int, optional
        E, the same on all ranks. Default: as many as here on each, times the number of ranks.
    max_tokens : int, optional
        The most tokens that any rank passes in a call, the same on all ranks. Default: the largest
        T_r of the ranks in the first call with such operands.
    capacity : int, optional
        Rows of the result, the same on all ranks. Default: as many as there may be if no token
        names an expert twice, the tokens of all ranks times the smaller of k and E_r.
    out : (array (capacity, I), DispatchLayout or None), optional
        Where to put the result: a pair as is returned, of which the second may be None. A CUDA
        graph that captures a call needs both.
    dtype : data-type, optional
        Of the rows: that of the operands (default), or float32 for 16-bit operands.
    stream : optional
        As for `allgather_gemm`.
    options : Options, optional
        Choices that the plan would make otherwise.

    Returns
    -------
    rows : (capacity, I) array
        Rows ``layout.expert_offsets[e]:layout.expert_offsets[e + 1]`` are those of local expert e,
        in order of source rank, token, slot. What lies behind the last is not written.
    layout : DispatchLayout
        Which token each row is of.

    Raises
    ------
    TypeError, ValueError
        If this rank's arguments are wrong; its peers raise `PeerError`. On all ranks, if an id of
        `topk_idx` on any of them is no expert's: no rows are written, the layout has none, and the
        communicator stays usable.
    CapacityError
        The same, if one of the ranks has more than `max_tokens` tokens or would get more than
        `capacity` rows. On GPUs, where the host does not wait to see that, `synchronize` raises
        both, or a later call, which is made all the same.
    ArgumentMismatchError
        On all ranks, if they do not agree on H, I, k, the dtypes or the keywords.
    TimeoutError, PeerLostError
        On all ranks, if one does not take part. What was not finished of the result is NaN.

    Examples
    --------
    >>> with mk.Communicator() as comm:
    ...     rows, layout = mk.moe_dispatch_gemm(x, topk_idx, w, comm=comm)
    ...     rows = layout.trim(rows)
    """
    return MoeDispatchGemm.call(
        (x, topk_idx, w),
        comm,
        out,
        stream,
        num_experts=num_experts,
        max_tokens=max_tokens,
        capacity=capacity,
        dtype=dtype,
        options=options,
    )


class DispatchLayout:
    """Which token each row of a dispatch is of.

    Attributes
    ----------
    expert_offsets : (E_r + 1,) array of int64
        The first row of each local expert, and behind the last one the number of rows.
    count : array of int64 without dimensions
        The number of rows; in the memory of the others, so that nothing waits.
    source_rank, source_token, source_slot : (capacity,) array of int32
        Row i is ``x[source_token[i]]`` of rank ``source_rank[i]``, because its
        ``topk_idx[source_token[i], source_slot[i]]`` is the expert. Only as far as there are rows.
    tokens, max_tokens, slots : int
        How many tokens this rank passed, how many a rank may pass, and how many experts a token may
        choose.
    """

    def __init__(self, plan: MoeDispatchGemmPlan, machine: Any):
        self._machine = machine
        self._dispatch = machine.empty((1,), np.dtype(np.uint64))  # which call has filled it in
        self.tokens, self.max_tokens, self.slots = 0, plan.max_tokens, plan.slots
        self.expert_offsets = machine.empty((plan.experts + 1,), np.dtype(np.int64))
        self.source_rank, self.source_token, self.source_slot = (
            machine.empty((plan.capacity,), np.dtype(np.int32)) for _ in range(3)
        )

    def __repr__(self) -> str:
        experts, rows = len(self.expert_offsets) - 1, len(self.source_rank)
        return (
            f"<DispatchLayout: up to {rows} rows of {experts} experts, {self.tokens} tokens sent "
            f"of up to {self.max_tokens}, {self.slots} experts each, target {self._machine.name}>"
        )

    @property
    def count(self) -> np.ndarray:
        """The number of rows: an array of int64 without dimensions, in the memory of the others."""
        return self.expert_offsets[-1:].reshape(())

    def trim(self, rows: np.ndarray) -> np.ndarray:
        """Return those of the rows of a result that there are; a view.

        The one thing here that waits for the device.

        Examples
        --------
        >>> rows = layout.trim(rows)
        """
        return rows[: int(self._machine.asnumpy(self.count))]

    def put_into(self, origins: Any) -> None:
        """Fill in a struct ``RowOrigins``, by which kernels find the arrays."""
        for name in ("expert_offsets", "source_rank", "source_token", "source_slot"):
            setattr(origins, name, self._machine.shadow(getattr(self, name)).ctypes.data)
        origins.dispatch = self._machine.shadow(self._dispatch).ctypes.data

    def check_communicator(self, name: str, runtime: Runtime) -> None:
        """Raise ValueError unless it is of calls on this communicator."""
        if self._machine is not runtime.machine:
            raise ValueError(
                f"{name} is of another communicator: use what moe_dispatch_gemm has returned on "
                "this one"
            )

    def _clear(self) -> None:
        """Say that there are no rows."""
        self._machine.zero(self._dispatch)
        self._machine.zero(self.expert_offsets)
        for array in (self.source_rank, self.source_token, self.source_slot):
            self._machine.fill(array, -1)


class _Spec:
    """What was asked for: the checked arguments, less the data and the number of tokens."""

    def __init__(self, x, ids, w, runtime, num_experts, max_tokens, capacity, dtype, options):
        operands.matrix("x", x)
        check_ids(ids, len(x))
        check_dtype("w", w.dtype)
        if w.ndim != 3:
            raise ValueError(f"w has shape {w.shape}: use (experts, H, I)")
        if w.dtype != x.dtype:
            raise TypeError(f"x has dtype {x.dtype}, w {w.dtype}: use the same for both")
        if w.shape[1] != x.shape[1]:
            raise ValueError(
                f"x has shape {x.shape}, w {w.shape}: w needs as many rows as x has columns"
            )
        self.options = operands.options(options, "moe_dispatch_gemm")
        self.asked = Dispatch(
            ranks=runtime.size,
            h=x.shape[1],
            n=w.shape[2],
            experts=experts_of_all(num_experts, len(w), runtime),
            slots=ids.shape[1],
            dtype=x.dtype,
            out_dtype=output_dtype(x.dtype, dtype),
            max_tokens=operands.whole_number("max_tokens", max_tokens),
            capacity=operands.whole_number("capacity", capacity),
            chunk_bytes=self.options.chunk_bytes,
            nodes=runtime.topology.sizes,
            staged=runtime.launches.staging_agents > 0,
        )
        self._shape = w.shape
        self._key = self.asked, self.options

    def check(self, x: np.ndarray, ids: np.ndarray, w: np.ndarray) -> None:
        """Refuse operands that are not as planned."""
        asked = self.asked
        for name, array, shape in (
            ("x", x, (len(x) if x.ndim else 0, asked.h)),
            ("w", w, self._shape),
        ):
            if array.shape != shape or array.dtype != asked.dtype:
                raise ValueError(
                    f"{name} has shape {array.shape} and dtype {array.dtype}: this plan is for "
                    f"{shape} and {asked.dtype}; make another for other operands"
                )
        check_ids(ids, len(x))
        if ids.shape[1] != asked.slots:
            raise ValueError(
                f"topk_idx has shape {ids.shape}: this plan is for {asked.slots} experts a token"
            )

    def outputs(self, out: Any, shadows: Sequence[np.ndarray], machine: Any) -> list[Any]:
        """Return the arrays of the caller; the plan says what is needed."""
        if out is None:
            return []
        rows, layout = _pair(out)
        return [operands.Operand("out[0]", rows, machine), *([] if layout is None else [layout])]

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Spec) and self._key == other._key


class MoeDispatchGemm(Operator):
    """`moe_dispatch_gemm`, planned once for H, I, k, experts and dtypes, and called often.

    Takes the arguments of the function; making one is collective. A context manager. Calls may
    have other numbers of tokens, up to `max_tokens`.

    Attributes
    ----------
    plan : MoeDispatchGemmPlan

    Examples
    --------
    >>> step = mk.MoeDispatchGemm(x, topk_idx, w, comm=comm, max_tokens=4096, capacity=20000)
    >>> for x, topk_idx in batches:
    ...     rows, layout = step(x, topk_idx, w)
    """

    function = "moe_dispatch_gemm"
    names = "x", "topk_idx", "w"
    spec_type = _Spec
    plan: MoeDispatchGemmPlan

    def __init__(
        self,
        x: np.ndarray,
        topk_idx: np.ndarray,
        w: np.ndarray,
        *,
        comm: Communicator,
        num_experts: int | None = None,
        max_tokens: int | None = None,
        capacity: int | None = None,
        out: Any = None,
        dtype: Any = None,
        stream: Any = None,
        options: Options | None = None,
    ):
        self._plan(
            (x, topk_idx, w),
            comm,
            out,
            stream,
            num_experts=num_experts,
            max_tokens=max_tokens,
            capacity=capacity,
            dtype=dtype,
            options=options,
        )

    def _set_up(
        self, spec: _Spec, runtime: Runtime, x: np.ndarray, ids: np.ndarray, w: np.ndarray
    ) -> None:
        self._spec, self._runtime = spec, runtime
        asked, tokens = spec.asked, len(x)
        if asked.max_tokens is None:
            most = max(runtime.agreement(str(asked), None, lambda: tokens))
            asked = dataclasses.replace(asked, max_tokens=most)
        options = measured(spec.options, "moe_dispatch_gemm", asked, asked.products, runtime)
        asked = dataclasses.replace(asked, chunk_bytes=options.chunk_bytes)
        self._dispatch, self._what = asked, str(asked)
        tile = dispatch_tile(runtime.rank, asked, options, runtime.machine.gpu)
        self._reading = Reading(tile, asked.dtype, (w,))
        words = {**type_defines(asked.dtype, asked.out_dtype), **self._reading.defines()}
        if asked.several_nodes:
            words["MK_NODES"] = 1
            check_chunks(asked.ranks * asked.parts, "tokens", "Options(chunk_bytes=)")
        kernel = self._source(self.function, words)

        def compile_and_check() -> None:
            runtime.launches.load(kernel)
            check_room(asked, asked.n, runtime)

        runtime.agreement(self._what, lambda _: asked.need(), compile_and_check)
        self._kernel = runtime.launches.load(kernel)
        room = shared_bytes(asked, tile, asked.out_dtype)
        capacity = gpu_capacity(self._kernel, room, options, runtime)
        self.plan = plan_moe_dispatch_gemm(runtime.rank, asked, tile, options, capacity)
        self._counts = counts_of(asked, sum(self.plan.split) + self.plan.network_agents, runtime)
        self._bind()

    def _fill_in(self, arena: Arena) -> None:
        structures, plan, runtime = structs.shared(), self.plan, self._runtime
        agreed = self._dispatch
        self._arrays["counts"] = self._counts
        self._constant("capacity", np.array(agreed.capacities, np.int64))
        self._stage = stage_of_tokens(agreed, arena, runtime)
        routing, landing = routing_plans(
            agreed, plan.split, self._arrays["capacity"], self._counts, arena, runtime
        )
        constants = structures.MoeDispatchGemmPlan(
            split=structures.Split(*plan.split),
            digest=digest_of(self._what),
            experts=plan.experts,
            h=agreed.h,
            n=agreed.n,
            tile=structures.TileShape(*plan.tile, plan.row_step),
            whole=self._constant("whole", np.array([0, plan.capacity], np.int64)),
            routing=routing,
            landing=landing,
            nodes=node_dispatch_plan(agreed, self._arrays, arena, runtime),
        )
        self._params = structures.MoeDispatchGemmParams(
            world=runtime.world.address, plan=self._constant("plan", constants)
        )
        self._params.message.digest = constants.digest

    def __call__(
        self,
        x: np.ndarray,
        topk_idx: np.ndarray,
        w: np.ndarray,
        *,
        out: Any = None,
        stream: Any = None,
    ) -> tuple[np.ndarray, DispatchLayout]:
        """Return what `moe_dispatch_gemm` does, for operands like the planned ones."""
        return self._call((x, topk_idx, w), out, stream)

    @classmethod
    def _key(cls, runtime: Runtime, given: Sequence[Any], out: Any) -> Any:
        rows, layout = (None, None) if out is None else _pair(out)
        arrays = super()._key(runtime, given, rows)
        return None if arrays is None or layout is None else (arrays, layout)

    def _outputs(self, out: Any, shadows: Sequence[np.ndarray]) -> list[Any]:
        plan, machine = self.plan, self._runtime.machine
        rows, layout = (None, None) if out is None else _pair(out)
        inputs = list(zip(self.names, shadows, strict=True))
        shape = plan.capacity, plan.n
        result = operands.output(rows, shape, plan.out_dtype, inputs, machine, "out[0]")
        if layout is None:
            return [result, DispatchLayout(plan, machine)]
        layout.check_communicator("out[1]", self._runtime)
        have = len(layout.expert_offsets) - 1, len(layout.source_rank)
        have += layout.max_tokens, layout.slots
        need = plan.experts, plan.capacity, plan.max_tokens, plan.slots
        if have != need:
            raise ValueError(
                f"out[1] is for (experts, rows, max_tokens, k) = {have}: the result has {need}"
            )
        return [result, layout]

    def _check_captured(self, out: Any) -> None:
        if out is None or out[1] is None:
            raise ValueError("a call that a CUDA graph captures needs out=(rows, layout)")

    def _request(self, own: Sequence[Any], results: Sequence[Any], before: Preparation) -> Any:
        runtime, plan, params = self._runtime, self.plan, self._params
        machine = runtime.machine
        rows, layout = results
        alignment = self._reading.alignment
        put_tokens(params, own[0], self._dispatch, self._stage, runtime, alignment, before)
        put_choice(params.choice, own[1], machine, before)
        params.w_stride = self._reading.put(params.w, own[2], machine, before)
        params.rows.data = rows.shadow.ctypes.data
        params.rows.row_stride, params.rows.column_stride = operands.element_steps(rows.shadow)
        layout.put_into(params.origins)
        agents = sum(plan.split) + plan.network_agents
        return runtime.launches.prepare(self._kernel, params, agents, plan.shared_bytes)

    def _launch(
        self, request: Any, before: Preparation, arrays: dict[str, Any], results: Any
    ) -> None:
        layout = results[1]
        try:
            super()._launch(request, before, arrays, results)
        except errors.Error:
            layout._clear()
            raise
        layout.tokens = len(arrays["x"])

    def _returned(self, out: Any, results: Sequence[Any]) -> tuple[Any, DispatchLayout]:
        return (results[0].array if out is None else out[0]), results[1]

    @classmethod
    def _leave_nothing(cls, results: Sequence[Any], machine: Any) -> None:
        super()._leave_nothing(results[:1], machine)
        for layout in results[1:]:
            layout._clear()


def check_ids(ids: np.ndarray, tokens: int) -> None:
    if ids.dtype not in _IDS:
        raise TypeError(f"topk_idx has dtype {ids.dtype}: use int32 or int64")
    if ids.ndim != 2 or len(ids) != tokens:
        raise ValueError(
            f"topk_idx has shape {ids.shape}: use (tokens, k), with a row for each of the "
            f"{tokens} tokens of x"
        )


def experts_of_all(num_experts: int | None, own: int, runtime: Runtime) -> int:
    """Return the number of experts of all ranks; ValueError if this rank's are not its part."""
    total = operands.whole_number("num_experts", num_experts)
    if total is None:
        total = own * runtime.size
    part = array_split_counts(total, runtime.size)[runtime.rank]
    if part != own:
        raise ValueError(
            f"num_experts={total}: rank {runtime.rank} of {runtime.size} has {part} of them, as "
            f"numpy.array_split deals them out, but passes {own}"
        )
    return total


def measured(
    options: Options,
    operator: str,
    agreed: Dispatch,
    products: Sequence[tuple[int, int]],
    runtime: Runtime,
    *,
    pairs: bool = False,
) -> Options:
    """Return options with what was measured to be fastest, where the caller chooses nothing.

    Without a measured tile that these products cannot have. `pairs`: each column has a partner.
    """
    shape = runtime.size * agreed.max_tokens, agreed.h, agreed.n, agreed.experts, agreed.slots
    found = runtime.tuning.fill(options, operator, agreed.dtype.name, shape)
    gpu = runtime.machine.gpu
    if gpu is None or options.tile or found.tile is None:
        return found
    if not takes_measured(found.tile, agreed.dtype, products, gpu, pairs=pairs):
        found = dataclasses.replace(found, tile=None)
    return found


def check_room(agreed: Dispatch, columns: int, runtime: Runtime) -> None:
    """Raise ValueError if rows that nobody has asked for would take too much memory."""
    if agreed.capacity is not None:
        return
    rows, free = agreed.capacities[runtime.rank], runtime.machine.room()
    nbytes = rows * columns * agreed.out_dtype.itemsize
    if nbytes > free // 4:
        raise ValueError(
            f"{rows} rows may come, which take {nbytes} bytes, more than a quarter of the {free} "
            f"that are free: pass capacity=, the most rows that a rank is to get"
        )


def stage_of_tokens(agreed: Dispatch, arena: Arena, runtime: Runtime) -> Location:
    """Return where a rank's own tokens would land."""
    landing = offsets_of(agreed.arena_sizes())["landing"]
    own = landing + runtime.rank * agreed.max_tokens * agreed.pitch
    return Location(arena.number, arena.data_offset + own)


def gpu_capacity(kernel: Any, nbytes: int, options: Options, runtime: Runtime) -> int:
    """Return how many agents of a plan, with so much scratch memory, a GPU runs at a time.

    0 without a GPU.
    """
    if runtime.machine.gpu is None:
        return 0
    return kernel.capacity(nbytes, options.sm_budget) - runtime.launches.staging_agents


def counts_of(agreed: Dispatch, agents: int, runtime: Runtime) -> Any:
    """Return an array for what each agent counts."""
    return runtime.machine.empty((agents, agreed.experts + 1, 2), np.dtype(np.int64))


def routing_plans(
    agreed: Dispatch,
    split: Sequence[int],
    capacity: Any,
    counts: Any,
    arena: Arena,
    runtime: Runtime,
) -> tuple[Any, Any]:
    """Return the structs ``RoutingPlan`` and ``TokenLandingPlan``, which begin an arena."""
    structures = structs.shared()
    base, data = runtime.memory.segments[arena.number].address, arena.data_offset
    at, words = offsets_of(agreed.arena_sizes()), offsets_of(agreed.signal_sizes(), 1)

    def local(*names: str) -> dict[str, int]:
        return {name: base + data + at[name] for name in names}

    shared = {
        name: structures.Place(arena.number, data + at[name])
        for name in ("summary", "starts", "routes", "tokens")
    }
    routing = structures.RoutingPlan(
        experts=agreed.experts,
        slots=agreed.slots,
        max_tokens=agreed.max_tokens,
        sorted=agreed.sorted_tokens,
        capacity=capacity.address,
        counts=runtime.machine.shadow(counts).ctypes.data,
        mirror=mirror_plan(agreed, arena),
        told=base + 8 * words["told"],
        routed=base + 8 * words["routed"],
        **shared,
        **local("known", "said", "totals", "deliveries"),
    )
    landing = structures.TokenLandingPlan(
        tokens=base + data + at["landing"],
        pitch=agreed.pitch,
        bytes=agreed.h * agreed.dtype.itemsize,
        chunk_tokens=agreed.chunk_tokens,
        chunks=agreed.chunks,
        first_chunks=agreed.first_chunks(split),
        arrived=base + 8 * words["arrived"],
        placed=base + 8 * words["placed"],
        **local("list", "places"),
    )
    return routing, landing


def mirror_plan(agreed: Dispatch | Combine, arena: Arena) -> Any:
    """Return the struct ``MirrorPlan``, for tables that begin an arena."""
    structures = structs.shared()
    if not agreed.several_nodes:
        return structures.MirrorPlan()
    at, words = offsets_of(agreed.arena_sizes()), offsets_of(agreed.signal_sizes(), 1)
    return structures.MirrorPlan(
        first=at["mirrors"],
        bytes=offsets_of(agreed.table_sizes())["end"],
        heard=structures.Place(arena.number, 8 * words["heard"]),
        parts=agreed.parts,
    )


def node_dispatch_plan(
    agreed: Dispatch, arrays: dict[str, Any], arena: Arena, runtime: Runtime, more: int = 0
) -> Any:
    """Return the struct ``NodeDispatchPlan``; put what it points to with other `arrays`.

    `more`: chunks besides, that may come over the network.
    """
    structures = structs.shared()
    if not agreed.several_nodes:
        return structures.NodeDispatchPlan()
    base, data = runtime.memory.segments[arena.number].address, arena.data_offset
    at, begins = offsets_of(agreed.arena_sizes()), np.cumsum([0, *agreed.nodes])
    firsts = np.cumsum([0, *agreed.experts_of])[begins]
    chunks = agreed.ranks * agreed.parts + more
    constant = runtime.machine.constant
    arrays["first_expert"] = constant(firsts.astype(np.int64))
    arrays["writes"] = constant(np.ones(chunks, np.uint64))
    return structures.NodeDispatchPlan(
        first_expert=arrays["first_expert"].address,
        head_bytes=agreed.head_bytes,
        list=structures.Place(arena.number, data + at["crossing_list"]),
        place_of=base + data + at["place_of"],
        order=base + data + at["order"],
        chunks=chunks,
        writes=arrays["writes"].address,
        **{
            name: structures.Place(arena.number, data + at[name])
            for name in ("crossing", "leaving", "landed")
        },
    )


def put_tokens(
    params: Any,
    x: operands.Operand,
    agreed: Dispatch,
    stage: Location,
    runtime: Runtime,
    alignment: int,
    before: Preparation,
) -> None:
    """Say in a launch struct where a rank's tokens are, for itself and the peers.

    `alignment`: bytes at a multiple of which each is to begin.
    """
    rows = x.shadow
    place, pitch, tokens = stage, operands.line_pitch(rows, False), x
    whole = pitch is not None and pitch % alignment == 0 == rows.ctypes.data % alignment
    if len(rows) > agreed.max_tokens:
        pitch = 0  # the kernel refuses them, and reads none
    elif whole and runtime.size > 1 and runtime.memory.holds(rows):
        place = runtime.memory.segments.locate(*extent(rows))
    elif not whole or runtime.size > 1:
        pitch, segment = agreed.pitch, runtime.memory.segments[stage.segment]
        staged = segment.bytes[stage.offset :][: len(rows) * pitch].view(rows.dtype)
        staged = staged.reshape(len(rows), pitch // rows.itemsize)[:, : agreed.h]
        tokens = before.stage(x, staged)
    message = params.message
    message.operand.segment, message.operand.offset = place.segment, place.offset
    message.operand_pitch, params.tokens = pitch, len(rows)
    params.x.data, params.x.row_stride = tokens.shadow.ctypes.data, pitch // rows.itemsize


def put_choice(to: Any, ids: operands.Operand, machine: Any, before: Preparation) -> None:
    """Fill in a struct ``TokenChoice``."""
    if operands.element_steps(ids.shadow) is None:
        ids = before.put_aside(ids, machine.empty(ids.shadow.shape, _IDS[1]))
    to.ids, to.wide = ids.shadow.ctypes.data, ids.shadow.dtype == _IDS[1]
    to.row_stride, to.column_stride = operands.element_steps(ids.shadow)


class Reading:
    """How an engine reads tokens and the weights of experts.

    Parameters
    ----------
    tile : HostTile or PortableTile or HopperTile
    dtype : numpy.dtype
    weights : sequence of array
        All in one order, or those that are not are copied.

    Attributes
    ----------
    mapped : bool
        Whether through tensor maps, for which it is compiled for one order of weights.
    alignment : int
        Bytes at a multiple of which a token begins.
    """

    def __init__(self, tile: Any, dtype: np.dtype, weights: Sequence[np.ndarray]):
        self._tile, self._dtype = tile, dtype
        self.mapped = tile.engine == "hopper"
        self.alignment = 16 if self.mapped else dtype.itemsize
        self._by_columns = all(len(w) and operands.prefers_columns(w[0]) for w in weights)

    def defines(self) -> dict[str, Any]:
        """Return the macros that say so."""
        return kernel_defines({}, self._tile, self._dtype, b_by_columns=self._by_columns)

    def put(
        self, to: Any, w: operands.Operand, machine: Any, before: Preparation, sides: int = 1
    ) -> int:
        """Fill in the ``Matrix`` of the first expert; return the bytes to the next.

        `sides`: in how many places the columns of a tile are.
        """
        if self._steps(w.shadow) is None:
            w = before.put_aside(w, self._like(w.shadow, machine))
        to.data = w.shadow.ctypes.data
        if not self.mapped:
            stride, to.row_stride, to.column_stride = self._steps(w.shadow)
            return stride * self._dtype.itemsize
        extents, pitches = self._steps(w.shadow)
        box = *self._tile.boxes(self._dtype, False, self._by_columns, sides=sides)[1], 1
        to.box_lines = box[1] if w.shadow.size else 0
        if to.box_lines:
            to.map.opaque[:] = machine.tensor_map(to.data, self._dtype, extents, pitches, box)
        return pitches[1]

    def map_rows(self, to: Any, rows: np.ndarray, machine: Any) -> None:
        """Give a ``Matrix`` of rows that are multiplied a tensor map, if the engine wants one."""
        if self.mapped:
            box = self._tile.boxes(self._dtype, False, self._by_columns)[0]
            operands.map_lines(to, rows, False, box, machine)

    def _steps(self, w: np.ndarray) -> Any:
        """Return how the engine steps through weights; None if it cannot."""
        if self.mapped:
            return operands.aligned_stack(w, self._by_columns)
        return operands.element_steps(w)

    def _like(self, w: np.ndarray, machine: Any) -> Any:
        """Return new memory for weights, as the engine steps through them."""
        count, lines, run = w.shape
        if self._by_columns:
            lines, run = run, lines
        pitch = plans.line_pitch(run, self._dtype) // self._dtype.itemsize
        like = machine.empty((count, lines, pitch), self._dtype)[..., :run]
        return like.swapaxes(1, 2) if self._by_columns else like


def _pair(out: Any) -> tuple[Any, Any]:
    if not isinstance(out, tuple | list) or len(out) != 2:
        raise TypeError("out: use a pair, (rows, layout), of which layout may be None")
    if out[1] is not None and not isinstance(out[1], DispatchLayout):
        raise TypeError(f"out[1] is a {type(out[1]).__name__}: use a DispatchLayout, or None")
    return out[0], out[1]
