"""`moe_combine` beside a library's sums of rows that are all here, and behind an all-to-all."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import reference
from ..operators.moe_combine import MoeCombine, moe_combine
from ..operators.moe_dispatch_gemm import DispatchLayout
from .moe import ExpertsBench, Route, choose, layout_of, take
from .operator import Sample, Shape, Way
from .timing import Call

_SMALL = 32, 64, 2, 1  # tokens of a rank, N, experts of a rank, k
_LARGE = tuple((tokens, 7168, 256, 8) for tokens in (8192, 32768, 131072))
SHAPES = {"cuda": _LARGE, "host": ((96, 64, 16, 4), (101, 77, 9, 3))}
QUICK_SHAPES = {name: shapes[:1] for name, shapes in SHAPES.items()}


@dataclass(frozen=True, eq=False)
class Operands:
    """One set of what `moe_combine` takes and gives, and the same in other orders.

    Attributes
    ----------
    rows : array (rows, N)
        Of this rank's experts.
    weights : array (T_r, k)
        Numbers that 16 bits hold.
    layout : DispatchLayout
    made : array (T_r * k, N)
        The rows that all experts have made of this rank's tokens, by token and slot.
    by_expert : array (T_r * k, N)
        The same in the order of experts.
    alone : DispatchLayout
        Of these.
    ids : array (T_r, k)
        In host memory.
    route : Route
    out : array (T_r, N)
    """

    rows: Any
    weights: Any
    layout: DispatchLayout
    made: Any
    by_expert: Any
    alone: DispatchLayout
    ids: np.ndarray
    route: Route
    out: Any


class MoeCombineBench(ExpertsBench):
    """`moe_combine`; N is the columns of a row."""

    operator = "moe_combine"
    keys = "tokens", "N", "E", "k"
    shapes, quick_shapes = SHAPES, QUICK_SHAPES

    def _small_calls(self) -> dict[str, Callable[[], Any]]:
        comm, (tokens, n, experts, k) = self._comm, _SMALL
        one = self._operands(comm.size * tokens, n, comm.size * experts, k, 0)
        own, step = self._own(one), MoeCombine(*self._own(one), comm=comm)
        return {
            "class": lambda: step(*own, out=one.out),
            "function": lambda: moe_combine(*own, comm=comm, out=one.out),
        }

    @contextlib.contextmanager
    def _steps(self, one: Operands) -> Iterator[tuple[Any, Any]]:
        with (
            MoeCombine(*self._own(one), comm=self._comm) as fused,
            MoeCombine(*self._alike(one), comm=self._alone) as engine,
        ):
            yield fused, engine

    def _ways(self, sets: Sequence[Operands], fused: Any, engine: Any) -> dict[str, Way]:
        alone, summed = self._samples(sets[0])
        roughly = self._roughly(summed)
        missing = next((x for x in (self._library, self._math) if isinstance(x, str)), None)
        return {
            "compute_ms": self._way(self._math, self._in_turn(sets, self._added), roughly),
            "engine_ms": Way(
                self._in_turn(sets, lambda one: engine(*self._alike(one), out=one.out)), alone
            ),
            "fused_ms": Way(
                self._in_turn(sets, lambda one: fused(*self._own(one), out=one.out)), summed
            ),
            "unfused_ms": self._way(missing, lambda: self._unfused(sets), roughly),
        }

    def _bytes_in(self, one: Operands, shape: Shape) -> int:
        return max(one.route.returning) * shape[1] * self._dtype.itemsize

    @staticmethod
    def _own(one: Operands) -> tuple[Any, ...]:
        return one.rows, one.weights, one.layout

    @staticmethod
    def _alike(one: Operands) -> tuple[Any, ...]:
        return one.by_expert, one.weights, one.alone

    def _added(self, one: Operands) -> Any:
        self._math.add(one.made, one.weights, one.out)
        return one.out

    def _unfused(self, sets: Sequence[Operands]) -> Call:
        bring_back = self._way_back(sets[0].route, sets[0].out.shape[1])
        return self._in_turn(sets, lambda one: bring_back(one.rows, one.weights, one.out))()

    def _operands(self, tokens: int, n: int, experts: int, k: int, number: int) -> Operands:
        """Return random operands; every rank can make the rows of all tokens."""
        comm, machine, xp = self._comm, self._machine, self._numpy
        counts, seed = comm.row_counts(tokens), 1_000_000 * (1 + number)
        ids = choose(tokens, experts, k, self._routing)
        route = Route(ids, counts, experts, comm.rank)
        arrived = machine.empty((len(route.row_slots), n), self._dtype)
        ends = np.cumsum(route.received_counts)
        for rank, (count, end) in enumerate(zip(counts, ends, strict=True)):
            block = self._normal(seed + rank, (count * k, n))
            if rank == comm.rank:
                made = block
            there = slice(end - route.received_counts[rank], end)
            slots = route.row_slots[route.back][there] - sum(counts[:rank]) * k
            take(xp, block, xp.asarray(slots), arrived[there])
        rows, by_expert = (machine.empty(x.shape, self._dtype) for x in (arrived, made))
        take(xp, arrived, xp.asarray(route.order), rows)
        take(xp, made, xp.asarray(np.argsort(route.returned)), by_expert)
        own = ids[comm.rows(tokens)]
        return Operands(
            rows,
            self._weights(own.shape, seed),
            layout_of(comm, own, experts, max(counts), route.capacity, self._dtype),
            made,
            by_expert,
            layout_of(self._alone, own, experts, len(own), own.size, self._dtype),
            own,
            route,
            machine.empty((len(own), n), self._dtype),
        )

    def _samples(self, one: Operands) -> tuple[Sample, Sample]:
        """Return what to look at of sums on one rank alone, and on all."""
        rows, columns = self._some(one.out, [])
        tokens, k = self._machine.asnumpy(rows), one.ids.shape[1]
        ids, weights = one.ids[tokens], self._machine.asnumpy(one.weights)[tokens]
        slots = (tokens[:, None] * k + np.arange(k)).ravel()
        made = self._picked(one.made, self._numpy.asarray(slots), columns)
        samples = []
        for ranks, here in ((1, 0), (self._comm.size, self._comm.rank)):
            chosen = [ids if rank == here else ids[:0] for rank in range(ranks)]
            parts = (reference.moe_routing(chosen, r, one.route.experts) for r in range(ranks))
            blocks = [made[part.source_token * k + part.source_slot] for part in parts]
            sums = reference.moe_combine(blocks, chosen, weights, here, one.route.experts)
            samples.append(Sample(one.out, rows, columns, sums))
        return samples[0], samples[1]
