"""`ring_attention`: attention over a sequence whose positions are spread over the ranks."""

import ctypes
import math
from collections.abc import Sequence
from operator import index
from typing import Any

import numpy as np

from .. import structs
from ..arguments import Options, check_dtype, flag, number
from ..attention_plan import (
    LAYOUTS,
    MOST_COLUMNS,
    Attention,
    RingAttentionPlan,
    Run,
    choose_attention_tile,
    plan_ring_attention,
    zigzag_counts,
)
from ..communicator import Communicator
from ..host_pages import digest_of
from ..memory import Location, extent, offsets_of
from ..reference import accumulator_dtype, array_split_counts
from ..runtime import Runtime
from ..shared_memory import Arena
from ..tiles import cpp_type
from ..transport.network import check_chunks
from . import operands
from .operator import Operator, Preparation


def ring_attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    comm: Communicator,
    seq_counts: Sequence[int] | None = None,
    causal: bool = False,
    scale: float | None = None,
    layout: str = "contiguous",
    return_lse: bool = False,
    max_workspace: int | None = None,
    out: Any = None,
    stream: Any = None,
    options: Options | None = None,
) -> Any:
    """Return softmax(scale * Q @ K.T) @ V for this rank's queries over the whole sequence.

    Collective. Each rank holds some positions of the sequence. The keys and values of the peers are
    fetched by the kernel while it works on those that are there, and only those that this rank's
    queries see.

    Parameters
    ----------
    q : (B, S_r, Hq, D) array
        The queries of this rank's positions; bfloat16, float16, float32 or float64, in any strides.
        D is 1 to 256.
    k, v : (B, S_r, Hkv, D) array
        The keys and values of the same positions, of the same dtype; Hq is a multiple of Hkv, and
        Hq / Hkv heads of queries that follow each other share one of keys and values. They are read
        in place by the peers if they lie in an array from `Communicator.empty`, `zeros` or
        `asarray` (as views, too) and the D elements of a head are contiguous; else they are copied
        first.
    comm : Communicator
    seq_counts : sequence of int, optional
        Positions on every rank, the same sequence on all ranks. Default: as many as here on each.
    causal : bool, optional
        Whether a position sees only itself and those before it, in the whole sequence.
    scale : float, optional
        Factor of the scores. Default: ``1 / sqrt(D)``.
    layout : {'contiguous', 'zigzag'}, optional
        Which positions a rank holds: the next S_r ones in rank order, or, of the 2R parts of
        ``numpy.array_split(positions, 2 * R)``, those with numbers r and 2R - 1 - r, so that a
        causal mask leaves the same work to all; see `zigzag_split`.
    return_lse : bool, optional
        Whether to return the log-sum-exp too. Ranks may differ in it.
    max_workspace : int, optional
        The most bytes that a rank may keep of the peers' keys and values. Default: no limit; what
        is taken then is 64 MiB, or more where two heads need more.
    out : (B, S_r, Hq, D) array, optional
        Where to put the result, in any strides; with `return_lse` a pair of arrays. They must not
        overlap each other or an operand.
    stream : optional
        As for `allgather_gemm`.
    options : Options, optional
        Choices that the plan would make otherwise; of `tile`: (queries, keys, D).

    Returns
    -------
    out : (B, S_r, Hq, D) array
    lse : (B, Hq, S_r) array of float32 (float64 for float64)
        Only with `return_lse`: the natural logarithm of the sum over all keys that are seen of
        exp(scale * q.k).

    Raises
    ------
    TypeError, ValueError
        If this rank's arguments are wrong; its peers raise `PeerError`.
    ArgumentMismatchError
        On all ranks, if they do not agree on B, the positions, heads, D, the dtype, `causal`,
        `scale`, `layout`, `max_workspace` or the size of chunks.
    TimeoutError, PeerLostError
        On all ranks, if one does not take part. What was not finished of the result is NaN.

    Notes
    -----
    Scores, weights and sums are in float32 (float64 for float64), whatever the dtype, and stay with
    the agent that works on a tile of queries while it walks over all keys (online softmax [1]_);
    the ranks' keys and values come one after another, as in ring attention [2]_. The layout
    'zigzag' balances causal masks, as striped attention [3]_ does. Equal inputs in an equal world
    give equal bits. On GPUs the weights of 16-bit operands are rounded to their dtype before they
    multiply the values. On those of sm_90, 16-bit operands whose D is a multiple of 8 are read in
    lines of multiples of 16 bytes; where they lie otherwise they are copied first.

    On the cuda target a call returns at once, and can be captured in a CUDA graph, as
    `allgather_gemm` says.

    .. [1] M. Milakov and N. Gimelshein, Online normalizer calculation for softmax,
       arXiv:1805.02867, 2018.
    .. [2] H. Liu, M. Zaharia and P. Abbeel, Ring attention with blockwise transformers for
       near-infinite context, arXiv:2310.01889, 2023.
    .. [3] W. Brandon et al., Striped attention: faster ring attention for causal transformers,
       arXiv:2311.09431, 2023.

    Examples
    --------
    >>> with mk.Communicator() as comm:
    ...     counts = comm.row_counts(positions)
    ...     o = mk.ring_attention(q, k, v, comm=comm, seq_counts=counts, causal=True)
    """
    return RingAttention.call(
        (q, k, v),
        comm,
        out,
        stream,
        seq_counts=seq_counts,
        causal=causal,
        scale=scale,
        layout=layout,
        return_lse=return_lse,
        max_workspace=max_workspace,
        options=options,
    )


class _Spec:
    """What was asked for: the checked arguments, less the data."""

    def __init__(
        self,
        q,
        k,
        v,
        runtime,
        seq_counts,
        causal,
        scale,
        layout,
        return_lse,
        max_workspace,
        options,
    ):
        for name, array in zip("qkv", (q, k, v), strict=True):
            if array.ndim != 4:
                raise ValueError(
                    f"{name} has shape {array.shape}: use (batch, positions, heads, D)"
                )
            check_dtype(name, array.dtype)
        if not q.dtype == k.dtype == v.dtype:
            raise TypeError(
                f"q, k and v have dtypes {q.dtype}, {k.dtype} and {v.dtype}: use the same for all"
            )
        batch, positions, heads, columns = q.shape
        if k.shape != v.shape or k.shape[:2] != q.shape[:2] or k.shape[3] != columns:
            raise ValueError(
                f"q has shape {q.shape}, k {k.shape}, v {v.shape}: k and v need the same shape, "
                "which differs from that of q in nothing but the heads"
            )
        if not 1 <= columns <= MOST_COLUMNS:
            raise ValueError(f"D={columns}: a head has 1 to {MOST_COLUMNS} columns")
        kv_heads = k.shape[2]
        if not kv_heads or not heads or heads % kv_heads:
            raise ValueError(
                f"q has {heads} heads, k and v have {kv_heads}: those of q must be a multiple"
            )
        if layout not in LAYOUTS:
            raise ValueError(f"layout={layout!r}: use one of {', '.join(LAYOUTS)}")
        counts = operands.counts(
            "seq_counts", seq_counts, positions, runtime.rank, runtime.size, "positions"
        )
        zigzag = zigzag_counts(sum(counts), runtime.size)
        if layout == "zigzag" and counts != zigzag:
            raise ValueError(
                f"seq_counts={list(counts)}: in the layout 'zigzag' the ranks hold {list(zigzag)} "
                f"of {sum(counts)} positions; zigzag_split divides an array so"
            )
        self.options = operands.options(options, "ring_attention")
        self.return_lse = flag("return_lse", return_lse)
        self.attention = Attention(
            batch=batch,
            seq_counts=counts,
            heads=heads,
            kv_heads=kv_heads,
            columns=columns,
            dtype=q.dtype,
            causal=flag("causal", causal),
            scale=_scale(scale, columns),
            layout=layout,
            max_workspace=operands.whole_number("max_workspace", max_workspace),
            chunk_bytes=self.options.chunk_bytes,
            nodes=runtime.topology.sizes,
            staged=runtime.launches.staging_agents > 0,
        )
        self._shapes = q.shape, k.shape, v.shape
        self._key = self.attention, self.return_lse, self.options

    def check(self, *arrays: np.ndarray) -> None:
        """Refuse operands that are not as planned."""
        dtype = self.attention.dtype
        for name, array, shape in zip("qkv", arrays, self._shapes, strict=True):
            if array.shape != shape or array.dtype != dtype:
                raise ValueError(
                    f"{name} has shape {array.shape} and dtype {array.dtype}: this plan is for "
                    f"{shape} and {dtype}; make another for other operands"
                )

    def outputs(
        self, out: Any, arrays: Sequence[np.ndarray], machine: Any
    ) -> tuple[operands.Operand, ...]:
        """Return what the results are written into: the caller's arrays, or new ones."""
        dtype, (batch, positions, heads, _) = self.attention.dtype, self._shapes[0]
        inputs = list(zip("qkv", arrays, strict=True))
        if not self.return_lse:
            return (operands.output(out, self._shapes[0], dtype, inputs, machine, remedy=""),)
        pair = (None, None) if out is None else out
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise TypeError("out: with return_lse=True use a pair of arrays, (out, lse)")
        out, lse = pair
        result = operands.output(out, self._shapes[0], dtype, inputs, machine, "out[0]", "")
        inputs.append(("out[0]", result.shadow))
        lse_dtype = accumulator_dtype(dtype)
        shape = (batch, heads, positions)
        return result, operands.output(lse, shape, lse_dtype, inputs, machine, "out[1]", "")

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Spec) and self._key == other._key


class RingAttention(Operator):
    """`ring_attention`, planned once for shapes and dtypes, and called often.

    Takes the arguments of the function; making one is collective. A context manager.

    Attributes
    ----------
    plan : RingAttentionPlan

    Examples
    --------
    >>> step = mk.RingAttention(q, k, v, comm=comm, causal=True)
    >>> for _ in range(1000):
    ...     step(q, k, v, out=o)
    """

    function = "ring_attention"
    names = "q", "k", "v"
    spec_type = _Spec
    plan: RingAttentionPlan

    def __init__(
        self,
        q: np.ndarray,
        k: np.ndarray,
        v: np.ndarray,
        *,
        comm: Communicator,
        seq_counts: Sequence[int] | None = None,
        causal: bool = False,
        scale: float | None = None,
        layout: str = "contiguous",
        return_lse: bool = False,
        max_workspace: int | None = None,
        out: Any = None,
        stream: Any = None,
        options: Options | None = None,
    ):
        self._plan(
            (q, k, v),
            comm,
            out,
            stream,
            seq_counts=seq_counts,
            causal=causal,
            scale=scale,
            layout=layout,
            return_lse=return_lse,
            max_workspace=max_workspace,
            options=options,
        )

    def _set_up(self, spec: "_Spec", runtime: Runtime, *_: np.ndarray) -> None:
        attention = spec.attention
        self._spec, self._runtime, self._what = spec, runtime, str(attention)
        gpu, need = runtime.machine.gpu, attention.need()
        self._tile = tile = choose_attention_tile(runtime.rank, attention, spec.options, gpu)
        macros = {"MK_TYPE": cpp_type(attention.dtype), **tile.defines(attention.dtype)}
        if runtime.num_nodes > 1:
            macros["MK_NODES"] = 1
            chunks = attention.chunks_between_nodes
            check_chunks(chunks, f"{attention.chunk} positions", "Options(chunk_bytes=)")
        kernel = self._source(self.function, macros)
        runtime.agreement(
            self._what, lambda _: need, lambda: runtime.launches.load(kernel) and None
        )
        self._kernel, capacity = runtime.launches.load(kernel), 0
        if gpu is not None:
            capacity = self._kernel.capacity(
                tile.shared_bytes(attention.dtype), spec.options.sm_budget
            )
            capacity -= runtime.launches.staging_agents
        self.plan = plan_ring_attention(runtime.rank, attention, spec.options, gpu, capacity)
        self._bind()

    def _fill_in(self, arena: Arena) -> None:
        structures, plan, runtime = structs.shared(), self.plan, self._runtime
        attention = self._spec.attention
        base = runtime.memory.segments[arena.number].address
        data = arena.data_offset
        window, *stages, _ = attention.arena_offsets(runtime.rank)
        self._stages = [Location(arena.number, data + stage) for stage in stages]
        walk, queries = attention.walk(runtime.rank), attention.held_by(runtime.rank)
        words = offsets_of(attention.signal_sizes(), 1)
        landing = structures.WindowPlan(
            slots=plan.window,
            slot_positions=sum(run.count for run in attention.landing(runtime.rank)),
            chunk_positions=plan.chunk,
            chunks=attention.unit_chunks,
            data=base + data + window,
            left=base + 8 * words["left"],
            arrived=base + 8 * words["arrived"],
        )
        if self._mapped and landing.slot_positions:
            extents = plan.columns, landing.slot_positions, 2, plan.window
            line = plan.columns * plan.dtype.itemsize
            half = landing.slot_positions * line
            box = self._box(plan.tile[1])
            landing.map.opaque[:] = runtime.machine.tensor_map(
                landing.data, plan.dtype, extents, (line, half, 2 * half), box
            )
        constants = structures.RingAttentionPlan(
            split=structures.Split(*plan.split),
            digest=digest_of(self._what),
            batches=plan.batch,
            kv_heads=plan.kv_heads,
            group=plan.heads // plan.kv_heads,
            causal=plan.causal,
            scale=plan.scale,
            tile=structures.TileShape(*plan.tile),
            query_runs=len(queries),
            walk_runs=len(walk),
            window=landing,
            queries=self._constant("queries", _runs(attention, runtime.rank, queries)),
            walk=self._constant("walk", _runs(attention, runtime.rank, walk)),
            nodes=self._between_nodes(arena, data + window, words),
        )
        self._params = structures.RingAttentionParams(
            shown=base + data, world=runtime.world.address, plan=self._constant("plan", constants)
        )
        message = self._params.message
        message.digest = constants.digest
        message.operand.segment, message.operand.offset = arena.number, data

    def _between_nodes(self, arena: Arena, window: int, words: dict[str, int]) -> Any:
        """Return the struct ``NodeWindowPlan``."""
        structures, runtime, agreed = structs.shared(), self._runtime, self._spec.attention
        if runtime.network is None:
            return structures.NodeWindowPlan()
        rank, arriving = runtime.rank, agreed.arriving(runtime.rank)
        positions = [sum(r.count for r in agreed.landing(peer)) for peer in range(runtime.size)]
        arrays = {
            "leaving": _leaving_runs(agreed, rank),
            "arriving": _runs(agreed, rank, arriving),
            "slot_positions": np.array(positions, np.int64),
            "writes": np.ones(agreed.chunks_between_nodes, np.uint64),
        }
        return structures.NodeWindowPlan(
            zone=structures.Place(arena.number, window),
            heard=structures.Place(arena.number, 8 * words["heard"]),
            freed=structures.Place(arena.number, 8 * words["freed"]),
            chunks=agreed.chunks_between_nodes,
            leaving_runs=len(agreed.leaving(rank)),
            arriving_runs=len(arriving),
            **{name: self._constant(name, array) for name, array in arrays.items()},
        )

    def __call__(
        self, q: np.ndarray, k: np.ndarray, v: np.ndarray, *, out: Any = None, stream: Any = None
    ) -> Any:
        """Return what `ring_attention` does, for operands of the planned shapes and dtypes."""
        return self._call((q, k, v), out, stream)

    def _request(
        self,
        own: Sequence[operands.Operand],
        results: Sequence[operands.Operand],
        before: Preparation,
    ) -> Any:
        runtime, plan = self._runtime, self.plan
        own = [x if self._is_readable(x.shadow) else before.put_aside(x) for x in own]
        params = self._params
        for name, x in zip("qkv", own, strict=True):
            _set_heads(getattr(params, name), x.shadow)
            if self._mapped and x.shadow.size:
                seen = operands.aligned_heads(x.shadow)
                box = self._box(self._tile.strip if name == "q" else plan.tile[1])
                words = runtime.machine.tensor_map(x.shadow.ctypes.data, plan.dtype, *seen, box)
                getattr(params, name).map.opaque[:] = words
        _set_heads(params.out, results[0].shadow)
        if self._spec.return_lse:
            _set_heads(params.lse, results[1].shadow.transpose(0, 2, 1)[..., None])
        if runtime.size > 1:
            shared = (params.own.keys, params.own.values)
            for to, x, stage in zip(shared, own[1:], self._stages, strict=True):
                self._share(to, x, stage, before)
        agents = sum(plan.split) + plan.network_agents
        return runtime.launches.prepare(self._kernel, params, agents, plan.shared_bytes)

    def _returned(self, out: Any, results: Sequence[operands.Operand]) -> Any:
        if out is None and self._spec.return_lse:
            return tuple(result.array for result in results)
        return super()._returned(out, results)

    @property
    def _mapped(self) -> bool:
        """Whether the engine reads operands through tensor maps."""
        return self._tile.engine == "hopper"

    def _box(self, lines: int) -> tuple[int, int, int, int]:
        """Return what a tensor copy brings at a time: lines of 128 bytes of one head."""
        return 128 // self.plan.dtype.itemsize, lines, 1, 1

    def _is_readable(self, array: np.ndarray) -> bool:
        """Return whether the engine takes an operand as it lies."""
        if self._mapped:
            return operands.aligned_heads(array) is not None
        return operands.element_steps(array) is not None

    def _share(
        self, to: ctypes.Structure, x: operands.Operand, stage: Location, before: Preparation
    ) -> None:
        """Say where peers find keys or values: where they are, or in a copy of them."""
        runtime, array = self._runtime, x.shadow
        place = stage
        if self._is_shareable(array) and runtime.memory.holds(array):
            low, nbytes = extent(array)
            place = runtime.memory.segments.locate(low, nbytes)
            place = Location(place.segment, place.offset + array.ctypes.data - low)
        else:
            batch, positions, heads, columns = array.shape
            room = runtime.memory.segments[stage.segment].bytes[stage.offset :][: array.nbytes]
            # Head by head, so that what is pulled together lies together.
            staged = room.view(array.dtype).reshape(batch, heads, positions, columns)
            array = staged.transpose(0, 2, 1, 3)
            before.stage(x, array)
        to.place.segment, to.place.offset = place.segment, place.offset
        to.batch_stride, to.position_stride, to.head_stride, _ = array.strides

    def _is_shareable(self, array: np.ndarray) -> bool:
        """Return whether peers read keys or values as they lie; the network wants no gaps."""
        axes = (1, 3) if self._runtime.network else (3,)
        run = array.itemsize
        for axis in reversed(axes):
            if array.shape[axis] > 1 and array.strides[axis] != run:
                return False
            run *= array.shape[axis]
        return True


def zigzag_split(x: Any, ranks: int, *, axis: int = 1) -> list[Any]:
    """Return what each rank holds of an array in the layout 'zigzag'.

    Local. The array is divided into 2R parts, as `numpy.array_split` does; rank r gets those with
    numbers r and 2R - 1 - r.

    Parameters
    ----------
    x : array
        With all positions of the sequence along `axis`.
    ranks : int
        R, 1 or more.
    axis : int, optional

    Returns
    -------
    list of array

    Examples
    --------
    >>> [part.tolist() for part in mk.zigzag_split(np.arange(7), 2, axis=0)]
    [[0, 1, 6], [2, 3, 4, 5]]
    """
    if index(ranks) < 1:
        raise ValueError(f"ranks={ranks}: use at least 1")
    parts = np.array_split(x, 2 * ranks, axis)
    return [np.concatenate((parts[rank], parts[-1 - rank]), axis) for rank in range(ranks)]


def zigzag_join(parts: Sequence[Any], *, axis: int = 1) -> Any:
    """Return the whole of an array from what each rank holds of it; undoes `zigzag_split`.

    Local.

    Parameters
    ----------
    parts : sequence of array
        Every rank's, in rank order.
    axis : int, optional

    Raises
    ------
    ValueError
        If no array is divided so.

    Examples
    --------
    >>> mk.zigzag_join(mk.zigzag_split(np.arange(7), 2, axis=0), axis=0).tolist()
    [0, 1, 2, 3, 4, 5, 6]
    """
    lengths = tuple(part.shape[axis] for part in parts)
    if not lengths or lengths != zigzag_counts(sum(lengths), len(lengths)):
        raise ValueError(f"parts of {list(lengths)} positions are no zigzag layout")
    sizes = array_split_counts(sum(lengths), 2 * len(lengths))
    halves = [np.split(part, [size], axis) for part, size in zip(parts, sizes, strict=False)]
    first, last = zip(*halves, strict=True)
    return np.concatenate((*first, *reversed(last)), axis)


def _scale(value: Any, columns: int) -> float:
    if value is None:
        return 1 / math.sqrt(columns)
    try:
        value = number(value)
    except (TypeError, ValueError):
        raise TypeError(f"scale={value!r}: use a number") from None
    if not math.isfinite(value):
        raise ValueError(f"scale={value}: use a finite number")
    return value


def _set_heads(to: Any, array: np.ndarray) -> None:
    # The stride of an axis of length 1 leads nowhere, and NumPy leaves anything there.
    steps = [step // array.itemsize for step in array.strides]
    to.data = array.ctypes.data
    to.batch_stride, to.position_stride, to.head_stride, to.column_stride = steps


def _runs(agreed: Attention, rank: int, runs: Sequence[Run]) -> Any:
    """Return runs as a rank's kernel has them."""
    topology = agreed.topology(rank)
    places = {holder: agreed.places(holder) for holder in topology.peers}
    result = (structs.shared().Run * max(1, len(runs)))()
    for to, run in zip(result, runs, strict=False):
        to.source, to.first, to.count, to.position = run.source, run.first, run.count, run.position
        to.place = places[rank].get(run, 0)
        to.held = places[topology.holders[run.source]].get(run, 0)
        to.first_chunk = agreed.first_chunks[run]
    return result


def _leaving_runs(agreed: Attention, rank: int) -> Any:
    """Return the runs that a rank sends, with whom it sends them to and where they land there."""
    leaving = agreed.leaving(rank)
    result = _runs(agreed, rank, [run for _, run in leaving])
    for to, (gateway, run) in zip(result, leaving, strict=False):
        to.source, to.place = gateway, agreed.places(gateway)[run]
    return result
