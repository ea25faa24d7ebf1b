"""`allgather_gemm`: multiply the rows that all ranks hold by a matrix of one's own."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from .. import plan as plans
from .. import structs
from ..arguments import Options
from ..communicator import Communicator
from ..host_pages import digest_of
from ..memory import Location, extent
from ..shared_memory import Arena
from ..tiles import choose_tile
from ..transport.network import check_chunks
from . import operands
from .gemm import GemmOperator, GemmSpec
from .operator import Preparation


def allgather_gemm(
    a: np.ndarray,
    b: np.ndarray,
    *,
    comm: Communicator,
    row_counts: Sequence[int] | None = None,
    out: np.ndarray | None = None,
    dtype: Any = None,
    stream: Any = None,
    options: Options | None = None,
) -> np.ndarray:
    """Return A @ b, where A is the rows `a` of all ranks, one rank's below another's.

    Collective. The rows of the peers are fetched by the kernel while it multiplies those that are
    there, or, if there are so few that it is faster, before it multiplies all together; no rank
    sees more of A than its own rows.

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
    stream : cupy.cuda.Stream, int, or object with ``__cuda_stream__``, optional
        Where the call is queued on the cuda target. Default: the current CuPy stream.
    options : Options, optional
        Choices that the plan would make otherwise.

    Returns
    -------
    (M, N_r) array
        `out`, or a new array. Sums are in float32 (float64 for float64), in the order of K, so
        equal inputs give equal bits whatever the number of ranks.

    Notes
    -----
    On the cuda target a call returns at once: it runs in the order of its stream, and a failure is
    raised by the next call or by `Communicator.synchronize`. With `out` it can be captured in a
    CUDA graph once it has been made outside the capture; graphs that hold fused calls must be
    replayed one after the other, and in the same order on all ranks.

    Raises
    ------
    TypeError, ValueError
        If this rank's arguments are wrong; its peers raise `PeerError`.
    ArgumentMismatchError
        On all ranks, if they do not agree on the number of rows, K, dtypes or options.
    TimeoutError, PeerLostError
        On all ranks, if one does not take part. What was not finished of the result is NaN.
    ConcurrentCallError
        If another thread is in a call of the communicator; on all ranks, if graphs that hold fused
        calls were replayed at once.

    Examples
    --------
    >>> with mk.Communicator() as comm:
    ...     c = mk.allgather_gemm(a[comm.rows(m)], b, comm=comm, row_counts=comm.row_counts(m))
    """
    return AllGatherGemm.call(
        (a, b), comm, out, stream, row_counts=row_counts, dtype=dtype, options=options
    )


class _Spec(GemmSpec):
    def __init__(self, a, b, runtime, row_counts, dtype, options):
        super().__init__(a, b, dtype, options)
        where = runtime.rank, runtime.size
        self.row_counts = operands.counts("row_counts", row_counts, len(a), *where)
        self.out_shape = (sum(self.row_counts), self.n)
        self._take_measured(runtime, "allgather_gemm")


class AllGatherGemm(GemmOperator):
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

    function = "allgather_gemm"
    params_struct = "AllGatherGemmParams"
    spec_type = _Spec
    plan: plans.AllGatherGemmPlan

    def __init__(
        self,
        a: np.ndarray,
        b: np.ndarray,
        *,
        comm: Communicator,
        row_counts: Sequence[int] | None = None,
        out: np.ndarray | None = None,
        dtype: Any = None,
        stream: Any = None,
        options: Options | None = None,
    ):
        self._plan((a, b), comm, out, stream, row_counts=row_counts, dtype=dtype, options=options)

    def _agreed_text(self) -> str:
        spec, chunk = self._spec, self._spec.options.chunk_bytes
        tail = plans.tf32_text(spec.options.tf32)
        tail += "" if chunk is None else f", chunk_bytes={chunk}"
        return (
            f"allgather_gemm(row_counts={list(spec.row_counts)}, K={spec.k}, "
            f"{spec.dtype.name} -> {spec.out_dtype.name}{tail})"
        )

    def _agree(self, a: np.ndarray) -> bool:
        spec = self._spec

        def compile_and_prefer() -> bool | None:
            preference = self._prefers_columns("a", a)
            self._tile = self._choose_tile(preference is True)
            self._load(preference is True)  # most probably what the others prefer too
            return preference

        def need(_: list[bool | None]) -> tuple[int, int]:
            counts, sizes = [], []
            for by_columns in (False, True):
                matrix = spec.row_counts, spec.k, spec.dtype, by_columns
                rows, k = plans.chunk_shape(*matrix, spec.options.chunk_bytes)
                counts.append(sum(-(-count // rows) for count in spec.row_counts) * -(-spec.k // k))
                sizes.append(plans.arena_offsets(*matrix)[-1])
            return max(counts) * (2 if self._runtime.num_nodes > 1 else 1), max(sizes)

        preferences = set(self._runtime.agreement(self._what, need, compile_and_prefer)) - {None}
        by_columns = preferences == {True}
        self._tile = self._choose_tile(by_columns)
        return by_columns

    def _choose_tile(self, by_columns: bool = False) -> Any:
        spec, runtime = self._spec, self._runtime
        gpu, nodes = runtime.machine.gpu, runtime.topology.sizes
        rows = plans.tiled_rows(
            spec.row_counts, spec.n, spec.k, spec.dtype, gpu, nodes, by_columns=by_columns
        )
        return choose_tile(rows, spec.n, spec.k, spec.dtype, spec.options, gpu, gathers=True)

    def _make_plan(self, capacity: int) -> plans.AllGatherGemmPlan:
        spec, runtime = self._spec, self._runtime
        return plans.plan_allgather_gemm(
            *(runtime.rank, spec.row_counts, spec.n, spec.k, spec.dtype, spec.out_dtype),
            *(self._a_by_columns, spec.options, runtime.machine.gpu, capacity),
            *(runtime.topology.sizes, runtime.launches.staging_agents > 0),
        )

    def _constants(self, arena: Arena) -> Any:
        structures, plan, runtime = structs.shared(), self.plan, self._runtime
        base = runtime.memory.segments[arena.number].address
        offsets = [arena.data_offset + at for at in plan.arena_offsets()]
        self._stage = Location(arena.number, offsets[runtime.rank])
        ranks = range(runtime.size)
        first_chunk = np.cumsum([0, *(plan.chunks(rank) for rank in ranks)])
        landing = [
            self._landing(base + offsets[rank], plan.row_counts[rank], plan.pitch(rank))
            for rank in ranks
        ]
        if plan.gathered:
            landing.append(self._landing(base + offsets[0], plan.m, plan.pitch(0)))
        arrays = {
            "row_start": np.array(plan.row_start, np.int64),
            "first_chunk": first_chunk[:-1].astype(np.int64),
            "rows": (structures.Matrix * len(landing))(*landing),
        }
        return structures.AllGatherGemmPlan(
            split=structures.Split(*plan.split),
            digest=digest_of(self._what),
            n=plan.n,
            whole=plan.whole_tiles,
            tile=structures.TileShape(*plan.tile),
            landing=structures.LandingPlan(
                by_columns=plan.by_columns,
                gathered=plan.gathered,
                all_rows=(0, plan.m),
                k=plan.k,
                chunk_rows=plan.chunk[0],
                chunk_k=plan.chunk[1],
                phase_k=plan.phase_k,
                arrived=base,
                **{name: self._constant(name, array) for name, array in arrays.items()},
                **self._between_nodes(arena, int(first_chunk[-1])),
            ),
        )

    def _between_nodes(self, arena: Arena, chunks: int) -> dict[str, Any]:
        """Return the members of ``LandingPlan`` that say how rows come from other nodes."""
        runtime, place = self._runtime, structs.shared().Place
        if runtime.network is None:
            return {}
        check_chunks(chunks, str(self.plan.chunk), "Options(chunk_bytes=)")
        writes = np.array(self.plan.writes(runtime.network.transport), np.uint64)
        return {
            "zone": place(arena.number, arena.data_offset),
            "relayed": place(arena.number, 8 * chunks),
            "chunks": chunks,
            "writes": self._constant("writes", writes),
        }

    def _place(self, a: operands.Operand, message: Any, before: Preparation) -> operands.Operand:
        place, message.operand_pitch, rows = self._operand(a, before)
        message.operand.segment, message.operand.offset = place.segment, place.offset
        return rows

    def _operand(
        self, a: operands.Operand, before: Preparation
    ) -> tuple[Location, int, operands.Operand]:
        """Return where peers find this rank's rows, their pitch, and the rows."""
        runtime, plan, rows = self._runtime, self.plan, a.shadow
        pitch = operands.line_pitch(rows, plan.by_columns)
        if self._is_readable(rows, plan.by_columns):
            if runtime.size == 1:
                return self._stage, 0, a
            if pitch is not None and runtime.memory.holds(rows) and self._can_be_sent(rows, pitch):
                return runtime.memory.segments.locate(*extent(rows)), pitch, a
        pitch = plan.pitch(runtime.rank)
        lines, run = rows.shape[::-1] if plan.by_columns else rows.shape
        segment, start = runtime.memory.segments[self._stage.segment], self._stage.offset
        staged = segment.bytes[start : start + lines * pitch].view(rows.dtype)
        staged = staged.reshape(lines, pitch // rows.itemsize)[:, :run]
        return self._stage, pitch, before.stage(a, staged.T if plan.by_columns else staged)

    def _can_be_sent(self, rows: np.ndarray, pitch: int) -> bool:
        """Return whether the network takes rows as they lie: without gaps if they land so."""
        landing = self.plan.pitch(self._runtime.rank)
        run = rows.shape[0 if self.plan.by_columns else 1] * rows.itemsize
        return self._runtime.network is None or run != landing or pitch == landing

    def _landing(self, address: int, rows: int, pitch: int) -> Any:
        """Return the ``Matrix`` in which so many rows land."""
        plan, spec = self.plan, self._spec
        stride, by_columns = pitch // spec.dtype.itemsize, plan.by_columns
        to = structs.shared().Matrix(data=address)
        to.row_stride, to.column_stride = (1, stride) if by_columns else (stride, 1)
        if self._mapped and rows and plan.k:
            extents = (rows, plan.k) if by_columns else (plan.k, rows)
            box, _ = self._tile.boxes(spec.dtype, by_columns, False, a_rows=rows)
            words = self._runtime.machine.tensor_map(
                address, spec.dtype, extents, (pitch,), box, tf32=spec.options.tf32
            )
            to.map.opaque[:], to.box_lines = words, box[1]
        return to
