"""`moe_layer`: a whole layer of experts in one launch."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from .. import structs
from ..arguments import Options, check_dtype, output_dtype
from ..communicator import Communicator
from ..host_pages import digest_of
from ..memory import Location
from ..moe_plan import (
    ACTIVATIONS,
    Layer,
    MoeLayerPlan,
    layer_tile,
    offsets_of,
    pairs_columns,
    plan_moe_layer,
    shared_bytes,
)
from ..reference import accumulator_dtype
from ..runtime import Runtime
from ..shared_memory import Arena
from ..tiles import cpp_type
from ..transport.network import check_chunks
from . import operands
from .moe_combine import check_weights, combine_plan, stage, sums_chunks
from .moe_dispatch_gemm import (
    Reading,
    check_ids,
    check_room,
    counts_of,
    experts_of_all,
    gpu_capacity,
    measured,
    node_dispatch_plan,
    put_choice,
    put_tokens,
    routing_plans,
    stage_of_tokens,
)
from .operator import Operator, Preparation

_NAMES = ("x", "topk_idx", "topk_weight", "w1", "w2")


def moe_layer(
    x: np.ndarray,
    topk_idx: np.ndarray,
    topk_weight: np.ndarray,
    w1: np.ndarray,
    w2: np.ndarray,
    *,
    comm: Communicator,
    activation: str | None = "swiglu",
    num_experts: int | None = None,
    max_tokens: int | None = None,
    capacity: int | None = None,
    out: np.ndarray | None = None,
    stream: Any = None,
    options: Options | None = None,
) -> np.ndarray:
    """Return for each of this rank's tokens the weighted sum of what its experts make of it.

    Collective. ``out[t] = sum_j topk_weight[t, j] * (act(x[t] @ w1[e]) @ w2[e])`` over the experts
    ``e = topk_idx[t, j]``, wherever they are: one launch brings the tokens to their experts,
    multiplies, and brings the sums back.

    Parameters
    ----------
    x : (T_r, H) array
        This rank's tokens, as for `moe_dispatch_gemm`.
    topk_idx : (T_r, k) array of int32 or int64
        The experts of each token, 0 to E - 1; -1 for none. An id that a token names twice counts
        twice.
    topk_weight : (T_r, k) array of float32 (float64 for float64)
        Their weights. A weight whose id is -1 has no influence.
    w1 : (E_r, H, I) array
        The first weights of this rank's experts, of the dtype of `x`, in any strides; for 'swiglu'
        (E_r, H, 2 I), first the columns of the gate, then those that it multiplies. The ranks have
        the E experts as `numpy.array_split` deals them out, rank 0 the first ones.
    w2 : (E_r, I, N) array
        The second weights.
    comm : Communicator
    activation : {'swiglu', 'gelu', 'silu', None}, optional
        What is between the two products; 'gelu' is the exact one, None nothing at all.
    num_experts, max_tokens : int, optional
        As for `moe_dispatch_gemm`.
    capacity : int, optional
        The most rows that the experts of a rank get, the same on all ranks. Default: as many as
        there may be if no token names an expert twice.
    out : (T_r, N) array, optional
        Where to put the result, in any strides; must not overlap the other arrays. A call that a
        CUDA graph captures needs it.
    stream : optional
        As for `allgather_gemm`.
    options : Options, optional
        Choices that the plan would make otherwise; `transfer_dtype` as for `moe_combine`.

    Returns
    -------
    (T_r, N) array
        `out`, or a new array of the dtype of `x`. What is between the products, and the rows that
        the experts make, are rounded to that dtype; sums are in float32 (float64 for float64), and
        those over experts as in `moe_combine`. Equal inputs give equal bits.

    Raises
    ------
    TypeError, ValueError
        If this rank's arguments are wrong; its peers raise `PeerError`. On all ranks, if an id of
        `topk_idx` on any of them is no expert's: nothing is written, and the communicator stays
        usable.
    CapacityError
        The same, if one of the ranks has more than `max_tokens` tokens or its experts would get
        more than `capacity` rows. On GPUs, where the host does not wait to see that, `synchronize`
        raises both, or a later call, which is made all the same.
    ArgumentMismatchError
        On all ranks, if they do not agree on H, I, N, k, the dtypes or the keywords.
    TimeoutError, PeerLostError
        On all ranks, if one does not take part. What was not finished of the result is NaN.

    Examples
    --------
    >>> with mk.Communicator() as comm:
    ...     y = mk.moe_layer(x, topk_idx, topk_weight, w1, w2, comm=comm)
    """
    return MoeLayer.call(
        (x, topk_idx, topk_weight, w1, w2),
        comm,
        out,
        stream,
        activation=activation,
        num_experts=num_experts,
        max_tokens=max_tokens,
        capacity=capacity,
        options=options,
    )


class _Spec:
    """What was asked for: the checked arguments, less the data and the number of tokens."""

    def __init__(
        self,
        x,
        ids,
        weights,
        w1,
        w2,
        runtime,
        activation,
        num_experts,
        max_tokens,
        capacity,
        options,
    ):
        operands.matrix("x", x)
        check_ids(ids, len(x))
        check_weights(weights, x.dtype, *ids.shape)
        if activation not in ACTIVATIONS:
            names = ", ".join(map(repr, ACTIVATIONS))
            raise ValueError(f"activation={activation!r}: use one of {names}")
        for name, w in (("w1", w1), ("w2", w2)):
            check_dtype(name, w.dtype)
            if w.ndim != 3:
                raise ValueError(f"{name} has shape {w.shape}: use (experts, rows, columns)")
            if w.dtype != x.dtype:
                raise TypeError(f"x has dtype {x.dtype}, {name} {w.dtype}: use the same for all")
        halves = 2 if activation == "swiglu" else 1
        experts, inner, n = w2.shape
        if w1.shape != (experts, x.shape[1], halves * inner):
            raise ValueError(
                f"x has shape {x.shape}, w1 {w1.shape}, w2 {w2.shape}: for activation="
                f"{activation!r} w1 needs {(experts, x.shape[1], halves * inner)}"
            )
        self.options = operands.options(options, "moe_layer", sums=True)
        transfer = output_dtype(x.dtype, self.options.transfer_dtype, "transfer_dtype")
        self.asked = Layer(
            ranks=runtime.size,
            h=x.shape[1],
            inner=inner,
            n=n,
            experts=experts_of_all(num_experts, experts, runtime),
            slots=ids.shape[1],
            dtype=x.dtype,
            transfer_dtype=transfer,
            activation=activation,
            max_tokens=operands.whole_number("max_tokens", max_tokens),
            capacity=operands.whole_number("capacity", capacity),
            chunk_bytes=self.options.chunk_bytes,
            nodes=runtime.topology.sizes,
            staged=runtime.launches.staging_agents > 0,
        )
        self._shapes = w1.shape, w2.shape
        self._key = self.asked, self.options

    def check(self, x: Any, ids: Any, weights: Any, w1: Any, w2: Any) -> None:
        """Refuse operands that are not as planned."""
        asked = self.asked
        operands.matrix("x", x)
        for name, array, shape in (
            ("x", x, (len(x), asked.h)),
            ("w1", w1, self._shapes[0]),
            ("w2", w2, self._shapes[1]),
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
        check_weights(weights, x.dtype, len(x), asked.slots)

    def outputs(
        self, out: Any, shadows: Sequence[np.ndarray], machine: Any
    ) -> list[operands.Operand]:
        """Return what the result is written into: the caller's array, or a new one."""
        inputs = list(zip(_NAMES, shadows, strict=True))
        shape = len(shadows[0]), self.asked.n
        return [operands.output(out, shape, self.asked.dtype, inputs, machine, remedy="")]

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Spec) and self._key == other._key


class MoeLayer(Operator):
    """`moe_layer`, planned once for H, I, N, k, experts and dtypes, and called often.

    Takes the arguments of the function; making one is collective. A context manager. Calls may
    have other numbers of tokens, up to `max_tokens`.

    Attributes
    ----------
    plan : MoeLayerPlan

    Examples
    --------
    >>> layer = mk.MoeLayer(x, topk_idx, topk_weight, w1, w2, comm=comm, max_tokens=4096)
    >>> for x, topk_idx, topk_weight in batches:
    ...     y = layer(x, topk_idx, topk_weight, w1, w2)
    """

    function = "moe_layer"
    names = _NAMES
    spec_type = _Spec
    plan: MoeLayerPlan

    def __init__(
        self,
        x: np.ndarray,
        topk_idx: np.ndarray,
        topk_weight: np.ndarray,
        w1: np.ndarray,
        w2: np.ndarray,
        *,
        comm: Communicator,
        activation: str | None = "swiglu",
        num_experts: int | None = None,
        max_tokens: int | None = None,
        capacity: int | None = None,
        out: np.ndarray | None = None,
        stream: Any = None,
        options: Options | None = None,
    ):
        self._plan(
            (x, topk_idx, topk_weight, w1, w2),
            comm,
            out,
            stream,
            activation=activation,
            num_experts=num_experts,
            max_tokens=max_tokens,
            capacity=capacity,
            options=options,
        )

    def _set_up(self, spec: _Spec, runtime: Runtime, *arrays: np.ndarray) -> None:
        self._spec, self._runtime = spec, runtime
        asked, tokens = spec.asked, len(arrays[0])
        if asked.max_tokens is None:
            most = max(runtime.agreement(str(asked), None, lambda: tokens))
            asked = dataclasses.replace(asked, max_tokens=most)
        options = measured(
            *(spec.options, "moe_layer", asked.dispatch, asked.products, runtime),
            pairs=asked.gated,
        )
        asked = dataclasses.replace(asked, chunk_bytes=options.chunk_bytes)
        self._layer, self._what = asked, str(asked)
        tile = layer_tile(runtime.rank, asked, options, runtime.machine.gpu)
        self._reading = Reading(tile, asked.dtype, arrays[3:])
        self._sides = 2 if pairs_columns(asked, tile) else 1
        words = {
            "MK_TYPE": cpp_type(asked.dtype),
            "MK_TRANSFER_TYPE": cpp_type(asked.transfer_dtype),
            "MK_ACTIVATION": asked.activation or "none",
            **self._reading.defines(),
        }
        if asked.dispatch.several_nodes:
            words["MK_NODES"] = 1
            chunks = sums_chunks(asked.combine, self._chunks())[1]
            check_chunks(chunks, "tokens and sums", "Options(chunk_bytes=)")
        kernel = self._source(self.function, words)

        def compile_and_check() -> None:
            runtime.launches.load(kernel)
            check_room(asked.dispatch, asked.inner + asked.n, runtime)

        runtime.agreement(self._what, lambda _: asked.need(), compile_and_check)
        self._kernel = runtime.launches.load(kernel)
        staged = accumulator_dtype(asked.dtype)
        room = shared_bytes(asked.dispatch, tile, staged)
        capacity = gpu_capacity(self._kernel, room, options, runtime)
        self.plan = plan_moe_layer(runtime.rank, asked, tile, options, capacity)
        self._make_room()
        self._bind()

    def _chunks(self) -> int:
        """Return in how many chunks tokens may come over the network."""
        return self._layer.ranks * self._layer.dispatch.parts

    def _make_room(self) -> None:
        """Have memory for what is between the products, and for the rows that experts make."""
        plan, machine = self.plan, self._runtime.machine
        rows, columns, _ = plan.tile
        in_turn = plan.layer.gated and self._sides == 1
        stash = (plan.split[1], rows, columns) if in_turn else (0,)
        self._room = {
            "hidden": machine.empty((plan.capacity, plan.inner), plan.dtype),
            "made": machine.empty((plan.capacity, plan.n), plan.dtype),
            "stash": machine.empty(stash, accumulator_dtype(plan.dtype)),
            "expert_offsets": machine.empty((plan.experts + 1,), np.dtype(np.int64)),
            "finished": machine.empty((plan.parts,), np.dtype(np.uint64)),
            "counts": counts_of(
                self._layer.dispatch, sum(plan.split) + plan.network_agents, self._runtime
            ),
        }
        machine.zero(self._room["finished"])

    def _fill_in(self, arena: Arena) -> None:
        structures, plan, asked, runtime = structs.shared(), self.plan, self._layer, self._runtime
        shadow = runtime.machine.shadow
        at, words = offsets_of(asked.arena_sizes()), offsets_of(asked.signal_sizes(), 1)
        data = arena.data_offset
        self._stage = stage_of_tokens(asked.dispatch, arena, runtime)
        self._stage_of_weights = Location(arena.number, data + at["weights"])
        room = {name: shadow(array).ctypes.data for name, array in self._room.items()}
        hidden, made = (
            structures.Matrix(data=room[name], row_stride=columns, column_stride=1)
            for name, columns in (("hidden", plan.inner), ("made", plan.n))
        )
        self._reading.map_rows(hidden, shadow(self._room["hidden"]), runtime.machine)
        self._arrays["room"] = self._room
        self._constant("capacity", np.array(asked.dispatch.capacities, np.int64))
        routing, landing = routing_plans(
            *(asked.dispatch, plan.split, self._arrays["capacity"], self._room["counts"]),
            *(arena, runtime),
        )
        constants = structures.MoeLayerPlan(
            split=structures.Split(*plan.split),
            digest=digest_of(self._what),
            experts=plan.experts,
            h=asked.h,
            inner=asked.inner,
            n=asked.n,
            tile=structures.TileShape(*plan.tile, plan.row_step),
            part_rows=plan.part[0],
            part_columns=plan.part[1],
            capacity=plan.capacity,
            hidden=self._constant("hidden", hidden),
            made=self._constant("made", made),
            routing=routing,
            landing=landing,
            nodes=node_dispatch_plan(
                *(asked.dispatch, self._arrays, arena, runtime),
                more=len(asked.nodes or ()) * asked.combine.chunks,
            ),
            combine=combine_plan(
                *(asked.combine, plan.split[1], arena, runtime, at, words["computed"]),
                *(routing.mirror, self._chunks(), self._arrays.get("writes")),
            ),
            **{name: room[name] for name in ("expert_offsets", "finished", "stash")},
        )
        self._params = structures.MoeLayerParams(
            world=runtime.world.address, plan=self._constant("plan", constants)
        )
        self._params.message.digest = constants.digest

    def __call__(
        self,
        x: np.ndarray,
        topk_idx: np.ndarray,
        topk_weight: np.ndarray,
        w1: np.ndarray,
        w2: np.ndarray,
        *,
        out: np.ndarray | None = None,
        stream: Any = None,
    ) -> np.ndarray:
        """Return what `moe_layer` does, for operands like the planned ones."""
        return self._call((x, topk_idx, topk_weight, w1, w2), out, stream)

    def _request(self, own: Sequence[Any], results: Sequence[Any], before: Preparation) -> Any:
        runtime, plan, params = self._runtime, self.plan, self._params
        machine = runtime.machine
        x, ids, weights, w1, w2 = own
        reading, result = self._reading, results[0].shadow
        put_tokens(params, x, self._layer.dispatch, self._stage, runtime, reading.alignment, before)
        put_choice(params.choice, ids, machine, before)
        if params.tokens <= self._layer.max_tokens:  # else the kernel refuses them
            stage(weights, self._stage_of_weights, runtime, before)
        params.w1_stride = reading.put(params.w1, w1, machine, before, self._sides)
        params.w2_stride = reading.put(params.w2, w2, machine, before)
        params.out.data = result.ctypes.data
        params.out.row_stride, params.out.column_stride = operands.element_steps(result)
        agents = sum(plan.split) + plan.network_agents
        return runtime.launches.prepare(self._kernel, params, agents, plan.shared_bytes)

    def close(self) -> None:
        """Forget the plan. Local; nothing waits for it."""
        super().close()
        self._room = {}
