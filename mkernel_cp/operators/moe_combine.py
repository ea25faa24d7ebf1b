"""`moe_combine`: add up what the experts of all ranks have made of each token."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from .. import structs
from ..arguments import Options, output_dtype
from ..communicator import Communicator
from ..host_pages import digest_of
from ..memory import Location
from ..moe_plan import Combine, MoeCombinePlan, offsets_of, plan_moe_combine
from ..reference import accumulator_dtype
from ..runtime import Runtime
from ..shared_memory import Arena
from ..tiles import cpp_type
from ..transport.network import check_chunks
from . import operands
from .moe_dispatch_gemm import DispatchLayout, gpu_capacity, mirror_plan
from .operator import Operator, Preparation


def moe_combine(
    rows: np.ndarray,
    topk_weight: np.ndarray,
    layout: DispatchLayout,
    *,
    comm: Communicator,
    out: np.ndarray | None = None,
    stream: Any = None,
    options: Options | None = None,
) -> np.ndarray:
    """Return for each of this rank's tokens the weighted sum of the rows made of it on all ranks.

    Collective. What `moe_dispatch_gemm` spreads over the ranks this brings back: each rank adds up
    its rows of a token, and the sum crosses the link once.

    Parameters
    ----------
    rows : (rows, N) array
        What this rank's experts have made, in the order of `layout`; bfloat16, float16, float32 or
        float64, in any strides. What lies behind ``layout.count`` rows is ignored. Fewer are
        refused; on GPUs, where the host does not know that number, those that are missing count as
        NaN.
    topk_weight : (T_r, k) array of float32 (float64 for float64)
        The weight of each expert that this rank's tokens chose, in the order of ``topk_idx``. A
        weight whose id is -1 has no influence.
    layout : DispatchLayout
        Of the call of `moe_dispatch_gemm` that has sent the tokens, the same on all ranks.
    comm : Communicator
    out : (T_r, N) array, optional
        Where to put the result, in any strides; must not overlap the other arrays. A call that a
        CUDA graph captures needs it.
    stream : optional
        As for `allgather_gemm`.
    options : Options, optional
        Choices that the plan would make otherwise; `transfer_dtype` is that of a rank's sum on its
        way: that of the rows (default), or float32 for 16-bit rows.

    Returns
    -------
    (T_r, N) array
        `out`, or a new array of the dtype of `rows`. Sums are in float32 (float64 for float64): for
        each rank over its rows of a token in the order of slots, then over the ranks in their
        order; between nodes, so in each node, and then over the nodes. So equal inputs give equal
        bits. A token without experts gives 0.

    Raises
    ------
    TypeError, ValueError
        If this rank's arguments are wrong; its peers raise `PeerError`.
    ArgumentMismatchError
        On all ranks, if they do not agree on N, k, the dtypes, `max_tokens` or the options, or
        pass layouts of different calls.
    TimeoutError, PeerLostError
        On all ranks, if one does not take part. What was not finished of the result is NaN.

    Examples
    --------
    >>> rows, layout = mk.moe_dispatch_gemm(x, topk_idx, w, comm=comm)
    >>> y = mk.moe_combine(np.maximum(rows, 0), topk_weight, layout, comm=comm)
    """
    return MoeCombine.call((rows, topk_weight, layout), comm, out, stream, options=options)


class _Spec:
    """What was asked for: the checked arguments, less the data and the numbers of rows."""

    def __init__(self, rows, weights, layout, runtime, options):
        operands.matrix("rows", rows)
        if not isinstance(layout, DispatchLayout):
            raise TypeError(
                f"layout is a {type(layout).__name__}: use what moe_dispatch_gemm has returned"
            )
        check_weights(weights, rows.dtype, layout.tokens, layout.slots)
        self._runtime = runtime
        self.experts = len(layout.expert_offsets) - 1
        shape = runtime.size * layout.max_tokens, rows.shape[1], self.experts, layout.slots
        options = operands.options(options, "moe_combine", sums=True)
        self.options = runtime.tuning.fill(options, "moe_combine", rows.dtype.name, shape)
        transfer = output_dtype(rows.dtype, self.options.transfer_dtype, "transfer_dtype")
        self.asked = Combine(
            ranks=runtime.size,
            n=rows.shape[1],
            slots=layout.slots,
            dtype=rows.dtype,
            transfer_dtype=transfer,
            max_tokens=layout.max_tokens,
            chunk_bytes=self.options.chunk_bytes,
            nodes=runtime.topology.sizes,
            staged=runtime.launches.staging_agents > 0,
        )
        self._key = self.asked, self.experts, self.options

    def check(self, rows: np.ndarray, weights: np.ndarray, layout: DispatchLayout) -> None:
        """Refuse operands that are not as planned."""
        asked = self.asked
        operands.matrix("rows", rows)
        have = rows.shape[1], rows.dtype, layout.slots, layout.max_tokens
        have += (len(layout.expert_offsets) - 1,)
        need = asked.n, asked.dtype, asked.slots, asked.max_tokens, self.experts
        if have != need:
            raise ValueError(
                f"rows and layout have (N, dtype, k, max_tokens, experts) = {have}: this plan is "
                f"for {need}; make another for other operands"
            )
        check_weights(weights, rows.dtype, layout.tokens, layout.slots)
        layout.check_communicator("layout", self._runtime)
        if self._runtime.target == "host" and int(layout.count) > len(rows):
            raise ValueError(f"layout has {int(layout.count)} rows, but rows has {len(rows)}")

    def outputs(self, out: Any, given: Sequence[Any], machine: Any) -> list[operands.Operand]:
        """Return what the result is written into: the caller's array, or a new one."""
        inputs = list(zip(("rows", "topk_weight"), given, strict=False))
        shape = len(given[1]), self.asked.n
        return [operands.output(out, shape, self.asked.dtype, inputs, machine, remedy="")]

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Spec) and self._key == other._key


class MoeCombine(Operator):
    """`moe_combine`, planned once for N, k, `max_tokens` and dtypes, and called often.

    Takes the arguments of the function; making one is collective. A context manager. Calls may have
    other numbers of rows and tokens.

    Attributes
    ----------
    plan : MoeCombinePlan

    Examples
    --------
    >>> combine = mk.MoeCombine(rows, topk_weight, layout, comm=comm)
    >>> for x, topk_idx, topk_weight in batches:
    ...     rows, layout = dispatch(x, topk_idx, w)
    ...     y = combine(rows, topk_weight, layout)
    """

    function = "moe_combine"
    names = "rows", "topk_weight"
    spec_type = _Spec
    plan: MoeCombinePlan

    def __init__(
        self,
        rows: np.ndarray,
        topk_weight: np.ndarray,
        layout: DispatchLayout,
        *,
        comm: Communicator,
        out: np.ndarray | None = None,
        stream: Any = None,
        options: Options | None = None,
    ):
        self._plan((rows, topk_weight, layout), comm, out, stream, options=options)

    def _set_up(self, spec: _Spec, runtime: Runtime, *_: Any) -> None:
        self._spec, self._runtime, self._what = spec, runtime, str(spec.asked)
        asked = spec.asked
        types = {"MK_TYPE": asked.dtype, "MK_TRANSFER_TYPE": asked.transfer_dtype}
        words: dict[str, Any] = {name: cpp_type(dtype) for name, dtype in types.items()}
        if asked.several_nodes:
            words["MK_NODES"] = 1
            check_chunks(sums_chunks(asked, asked.ranks)[1], "sums", "Options(chunk_bytes=)")
        kernel = self._source(self.function, words)
        runtime.agreement(
            self._what, lambda _: asked.need(), lambda: runtime.launches.load(kernel) and None
        )
        self._kernel = runtime.launches.load(kernel)
        capacity = gpu_capacity(self._kernel, 0, spec.options, runtime)
        gpu = runtime.machine.gpu
        self.plan = plan_moe_combine(runtime.rank, asked, spec.options, gpu, capacity)
        self._bind()

    def _fill_in(self, arena: Arena) -> None:
        structures, plan, runtime = structs.shared(), self.plan, self._runtime
        asked = self._spec.asked
        data = arena.data_offset
        at = offsets_of(asked.arena_sizes())
        self._stage = Location(arena.number, data + at["weights"])
        self._constant("writes", np.ones(sums_chunks(asked, asked.ranks)[1], np.uint64))
        constants = structures.MoeCombinePlan(
            split=structures.Split(*plan.split),
            digest=digest_of(self._what),
            experts=self._spec.experts,
            combine=combine_plan(
                *(asked, plan.split[1], arena, runtime, at, 0),
                mirror_plan(asked, arena),
                *(asked.ranks, self._arrays["writes"]),
            ),
        )
        self._params = structures.MoeCombineParams(
            world=runtime.world.address, plan=self._constant("plan", constants)
        )
        self._params.message.digest = constants.digest

    def __call__(
        self,
        rows: np.ndarray,
        topk_weight: np.ndarray,
        layout: DispatchLayout,
        *,
        out: np.ndarray | None = None,
        stream: Any = None,
    ) -> np.ndarray:
        """Return what `moe_combine` does, for operands like the planned ones."""
        return self._call((rows, topk_weight, layout), out, stream)

    @classmethod
    def _key(cls, runtime: Runtime, given: Sequence[Any], out: Any) -> Any:
        *arrays, layout = given
        key = super()._key(runtime, arrays, out)
        if key is None or not isinstance(layout, DispatchLayout):
            return None
        return key, layout, layout.tokens

    def _request(self, own: Sequence[Any], results: Sequence[Any], before: Preparation) -> Any:
        runtime, plan, params = self._runtime, self.plan, self._params
        rows, weights, layout = own
        if operands.element_steps(rows.shadow) is None:
            rows = before.put_aside(rows)
        stage(weights, self._stage, runtime, before)
        for to, array in ((params.rows, rows.shadow), (params.out, results[0].shadow)):
            to.data = array.ctypes.data
            to.row_stride, to.column_stride = operands.element_steps(array)
        params.row_count, params.tokens = len(rows.shadow), len(weights.shadow)
        layout.put_into(params.origins)
        agents = sum(plan.split) + plan.network_agents
        return runtime.launches.prepare(self._kernel, params, agents, plan.shared_bytes)


def stage(
    weights: operands.Operand, place: Location, runtime: Runtime, before: Preparation
) -> None:
    """Have weights of tokens copied to where the peers read them."""
    segment, array = runtime.memory.segments[place.segment], weights.shadow
    staged = segment.bytes[place.offset :][: array.nbytes].view(array.dtype).reshape(array.shape)
    before.stage(weights, staged)


def sums_chunks(asked: Combine, first: int) -> tuple[int, int]:
    """Return where the chunks of sums begin and end, among what may come over the network."""
    return first, first + len(asked.nodes or ()) * asked.chunks


def combine_plan(
    asked: Combine,
    computing: int,
    arena: Arena,
    runtime: Runtime,
    at: dict[str, int],
    signals: int,
    mirror: Any,
    first_chunk: int,
    writes: Any,
) -> Any:
    """Return the struct ``CombinePlan``.

    Parameters
    ----------
    asked : Combine
    computing : int
        Agents that make rows.
    arena : Arena
    runtime : Runtime
    at : dict of str to int
        Where weights, factors and sums lie in the arena's data, in bytes.
    signals : int
        The first word of the signals.
    mirror : ctypes.Structure
        The ``MirrorPlan`` of the weights.
    first_chunk : int
        Of sums, among what may come over the network.
    writes : constant
        In how many writes each chunk of that comes.
    """
    structures, words = structs.shared(), offsets_of(asked.signal_sizes(), 1)
    data, base = arena.data_offset, runtime.memory.segments[arena.number].address

    def place(name: str) -> Any:
        return structures.Place(arena.number, 8 * (signals + words[name]))

    def node_plan() -> Any:
        return structures.NodeCombinePlan(
            summed=place("summed_here"),
            leaving=structures.Place(arena.number, data + at["leaving_sums"]),
            arriving=structures.Place(arena.number, data + at["arriving_sums"]),
            head_bytes=asked.head_bytes,
            message_bytes=asked.message_bytes,
            first_chunk=first_chunk,
            chunks=sums_chunks(asked, first_chunk)[1],
            writes=writes.address,
        )

    return structures.CombinePlan(
        n=asked.n,
        slots=asked.slots,
        max_tokens=asked.max_tokens,
        chunk_tokens=asked.chunk_tokens,
        chunks=asked.chunks,
        computing=computing,
        rows=base + 8 * (signals + words["rows"]),
        weights=structures.Place(arena.number, data + at["weights"]),
        factors=base + data + at["factors"],
        sums=structures.Place(arena.number, data + at["sums"]),
        pitch=asked.pitch,
        sent=place("sent"),
        summed=place("summed"),
        computed=base + 8 * (signals + words["computed"]),
        mirror=mirror,
        **({"nodes": node_plan()} if asked.several_nodes else {}),
    )


def check_weights(weights: np.ndarray, dtype: np.dtype, tokens: int, slots: int) -> None:
    """Raise TypeError or ValueError unless there is a weight for every slot of every token."""
    if weights.dtype != accumulator_dtype(dtype):
        raise TypeError(
            f"topk_weight has dtype {weights.dtype}: with operands of {dtype} it must be "
            f"{accumulator_dtype(dtype)}"
        )
    if weights.shape != (tokens, slots):
        raise ValueError(
            f"topk_weight has shape {weights.shape}: use {(tokens, slots)}, a weight for each "
            f"of the {slots} experts of the {tokens} tokens that this rank sends"
        )
