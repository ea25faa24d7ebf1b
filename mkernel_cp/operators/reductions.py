"""What `gemm_reduce_scatter` and `gemm_allreduce` have in common: sums over ranks."""

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from .. import plan as plans
from .. import structs
from ..arguments import output_dtype
from ..host_pages import digest_of
from ..reference import accumulator_dtype, array_split_counts
from ..shared_memory import Arena
from ..tiles import bringing, choose_tile, type_defines, with_courier
from ..transport.network import check_chunks
from . import operands
from .gemm import GemmOperator, GemmSpec
from .operator import Preparation

_USUAL_K = 2048  # by which a tile is chosen


class ReductionSpec(GemmSpec):
    """What was asked for; `row_counts` says which rows a rank adds.

    Attributes
    ----------
    transfer_dtype : numpy.dtype
        Of partial sums on their way.
    """

    sums = True

    def __init__(self, a, b, runtime, dtype, options, row_counts: Sequence[int] | None = None):
        super().__init__(a, b, dtype, options)
        self.row_counts = array_split_counts(self.a_rows, runtime.size)
        if row_counts is not None:
            self.row_counts = operands.numbers("row_counts", row_counts, runtime.size)
            if sum(self.row_counts) != self.a_rows:
                raise ValueError(
                    f"row_counts={list(self.row_counts)} add up to {sum(self.row_counts)}, but a "
                    f"has {self.a_rows} rows: every row belongs to one rank"
                )
        self.transfer_dtype = output_dtype(
            self.dtype, self.options.transfer_dtype, "Options(transfer_dtype)"
        )


class ReductionOperator(GemmOperator):
    """An operator whose kernel hands partial sums over to the ranks that add them.

    Few rows have another kernel, within one node: sums travel in words that are their own signals.
    """

    plan_type: ClassVar[type[plans.GemmReduceScatterPlan]]
    plan: plans.GemmReduceScatterPlan

    def _agreed_text(self) -> str:
        spec = self._spec
        transfer = spec.transfer_dtype
        tail = plans.tf32_text(spec.options.tf32)
        tail += "" if transfer == spec.dtype else f", partial sums as {transfer.name}"
        tail += ", low latency" if self._low_latency else ""
        return (
            f"{self.function}(row_counts={list(spec.row_counts)}, N={spec.n}, {spec.dtype.name} -> "
            f"{spec.out_dtype.name}, tile={self._tile.tile[:2]}{tail})"
        )

    def _agree(self, a: np.ndarray) -> bool:
        # Peers read nothing of a, so its order is this rank's own affair.
        by_columns = self._prefers_columns("a", a) is True and self._columns_are_readable()

        def compile_and_vote() -> bool:
            self._load(by_columns)
            return self._prefers_to_pull()

        def need(votes: list[bool]) -> tuple[int, int, int]:
            zones = self._zones(any(votes))
            signals, nbytes = sum(slots for slots, _ in zones), sum(map(math.prod, zones))
            return signals, nbytes, self._told_words()

        # K_r, and so the answer, may differ between ranks: the one that multiplies longest counts.
        self._pulled = any(self._runtime.agreement(self._what, need, compile_and_vote))
        if self._pulled and self._mapped:
            self._tile = bringing(self._tile, self._runtime.machine.gpu.shared_bytes)
        return by_columns

    def _prefers_to_pull(self) -> bool:
        """Return whether partial sums are to be pulled, as far as this rank knows."""
        spec, runtime = self._spec, self._runtime
        if self._low_latency or runtime.size == 1 or runtime.num_nodes > 1:
            return False
        return plans.pulls_partials(
            *(self.plan_type, self._tile, runtime.machine.gpu),
            *(spec.row_counts, spec.n, spec.k, spec.transfer_dtype),
        )

    def _columns_are_readable(self) -> bool:
        """Return whether the engine may read a by columns, in which each rank's rows are a run."""
        if not self._mapped or self._low_latency:
            return True
        # Tensor copies begin at multiples of 16 bytes of a line, as tiles do if a rank's rows do.
        spec = self._spec
        begins = np.cumsum((0, *spec.row_counts[:-1])) * spec.dtype.itemsize
        return not (begins[np.array(spec.row_counts) > 0] % 16).any()

    def _told_words(self) -> int:
        spec = self._spec
        if not self._low_latency:
            return 0
        return plans.told_words(
            *(self.plan_type, spec.row_counts, spec.n, spec.out_dtype, spec.transfer_dtype),
            self._tile.tile,
        )

    def _zones(self, pulled: bool) -> tuple[tuple[int, int], ...]:
        spec = self._spec
        return plans.reduction_zones(
            *(self.plan_type, spec.row_counts, spec.n, spec.out_dtype, spec.transfer_dtype),
            *(self._tile, self._low_latency, self._runtime.topology.sizes),
            pulled=pulled,
        )

    def _make_plan(self, capacity: int) -> plans.GemmReduceScatterPlan:
        spec, agreed = self._spec, (self._tile, self._low_latency)
        return plans.plan_reduction(
            *(self.plan_type, self._runtime.rank, spec.row_counts, spec.n, spec.k, spec.dtype),
            *(spec.out_dtype, spec.transfer_dtype, *agreed, spec.options, capacity),
            *(self._runtime.topology.sizes, self._runtime.launches.staging_agents > 0),
            pulled=self._pulled,
        )

    def _kernel_name(self) -> str:
        return "gemm_reduce_low_latency" if self._low_latency else self.function

    def _params_name(self) -> str:
        return "LowLatencyParams" if self._low_latency else self.params_struct

    def _choose_tile(self) -> Any:
        spec, gpu = self._spec, self._runtime.machine.gpu
        # K_r may differ between ranks; the rows and columns of a tile may not.
        k = spec.k if gpu is None else _USUAL_K

        def tile_for(rows: tuple[int, ...], **wanted: Any) -> Any:
            return choose_tile(rows, spec.n, k, spec.dtype, spec.options, gpu, **wanted)

        # Tiles of few rows may cross borders between owners.
        tile = plans.whole_groups(tile_for((spec.a_rows,), small=True))
        self._low_latency = self._runtime.num_nodes == 1 and plans.has_low_latency(
            *(self.plan_type, spec.row_counts, spec.n, spec.out_dtype, spec.transfer_dtype),
            *(tile, gpu, self._most_terms(), spec.dtype),
        )
        if self._low_latency:
            return tile
        whole = self.plan_type is plans.GemmAllReducePlan
        handed = spec.transfer_dtype.itemsize, whole * spec.out_dtype.itemsize
        tile = tile_for(spec.row_counts, handed=handed)
        if whole and self._runtime.size > 1 and tile.engine == "hopper":
            return with_courier(tile, gpu.shared_bytes)
        return tile

    def _most_terms(self) -> int:
        """Return the largest K_r of all ranks, as it was when such a sum was first planned.

        It may change on one rank, and the others do not hear of that.
        """
        spec = self._spec
        if self._runtime.machine.gpu is None or self._runtime.size == 1:
            return spec.k
        what = (
            f"{self.function}(row_counts={list(spec.row_counts)}, N={spec.n}, "
            f"{spec.dtype.name} -> {spec.out_dtype.name})"
        )
        return max(self._runtime.agreement(what, None, lambda: spec.k))

    def _staged_dtype(self) -> np.dtype:
        return accumulator_dtype(self._spec.dtype)

    def _type_defines(self) -> dict[str, str]:
        spec = self._spec
        return type_defines(spec.dtype, spec.out_dtype, spec.transfer_dtype, tf32=spec.options.tf32)

    def _place(self, a: operands.Operand, message: Any, before: Preparation) -> operands.Operand:
        return self._readable(a, self._a_by_columns, before)

    def _constants(self, arena: Arena) -> Any:
        reduction = self._reduction(arena)
        if not self._low_latency:
            return self._with_reduction(reduction, arena)
        plan, rank = self.plan, self._runtime.rank
        scattered = self.plan_type is plans.GemmReduceScatterPlan
        begin, end = (plan.row_start[rank], plan.row_start[rank + 1]) if scattered else (0, plan.m)
        return structs.shared().LowLatencyPlan(
            reduction=reduction,
            words=structs.shared().Place(arena.number, arena.words_offset),
            elements=plans.told_elements(plan.row_counts, plan.n, plan.tile),
            scattered=scattered,
            all_rows=(0, plan.m),
            first_row=-begin,
            kept_begin=begin,
            kept_end=end,
        )

    def _with_reduction(self, reduction: Any, arena: Arena) -> Any:
        """Return the struct of the plan, of which the one of its sums is a part or all."""
        return reduction

    def _reduction(self, arena: Arena) -> Any:
        structures, plan = structs.shared(), self.plan
        arrays = {
            "row_start": plan.row_start,
            "part_start": np.cumsum([0, *plan.parts]),
            "added_start": plan.added_start,
        }
        return structures.GemmReduceScatterPlan(
            split=structures.Split(*plan.split),
            digest=digest_of(self._what),
            n=plan.n,
            k=plan.k,
            tile=structures.TileShape(*plan.tile),
            stripe=plan.stripe_columns,
            part_rows=plan.part[0],
            part_columns=plan.part[1],
            piece_columns=plan.piece_columns,
            most_added=max(plans.added_parts(plan.parts, plan.nodes)[0]),
            pulled=plan.pulled,
            partials=self._zone(arena, 0),
            offered=self._zone(arena, int(plan.pulled)),
            **{
                name: self._constant(name, np.array(array, np.int64))
                for name, array in arrays.items()
            },
            **self._between_nodes(arena),
        )

    def _between_nodes(self, arena: Arena) -> dict[str, Any]:
        """Return the member of the plan that says how sums go to other nodes."""
        plan, names = self.plan, ("products", "leaving", "arriving")
        if self._runtime.network is None:
            return {}
        check_chunks(plan.chunks, f"{plan.part} of a tile", "Options(tile=)")
        first = len(plan.zones) - len(names)
        return {
            "nodes": structs.shared().NodeSumsPlan(
                first_total=plan.zones[-1][0],
                chunks=plan.chunks,
                writes=self._constant("writes", np.ones(plan.chunks, np.uint64)),
                **{name: self._zone(arena, first + i) for i, name in enumerate(names)},
            )
        }

    def _zone(self, arena: Arena, number: int) -> Any:
        """Return where a landing zone is, one behind another in the arena of every rank.

        Other operators, and other plans, have theirs in the same place. They do not meet there: who
        pushes has seen the owner make this call, and the owner's earlier calls are over by then.
        """
        structures, before = structs.shared(), self.plan.zones[:number]
        signals = 8 * sum(slots for slots, _ in before)
        data = arena.data_offset + sum(map(math.prod, before))
        return structures.ZonePlan(
            signals=structures.Place(arena.number, signals),
            slots=structures.Place(arena.number, data),
            slot_bytes=self.plan.zones[number][1],
        )
