"""The operators on experts beside grouped GEMMs and sums alone, and between all-to-alls."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .. import reference
from ..operators.moe_combine import MoeCombine, moe_combine
from ..operators.moe_dispatch_gemm import MoeDispatchGemm, moe_dispatch_gemm
from ..operators.moe_layer import MoeLayer, moe_layer
from ..reference import array_split_counts
from . import baselines
from .baselines import available
from .data import Operands
from .operator import OperatorBench, Sample, Shape, Work
from .routes import Route, layout_of, route_for, take

_LARGE = tuple((tokens, 7168, 2048, 256, 8) for tokens in (8192, 32768, 131072))
SHAPES = {"cuda": _LARGE, "host": ((96, 64, 48, 16, 4), (101, 77, 9, 9, 3))}
QUICK_SHAPES = {name: shapes[:1] for name, shapes in SHAPES.items()}
COMBINE_SHAPES = {
    name: tuple((tokens, n, *last) for tokens, n, _, *last in shapes)
    for name, shapes in SHAPES.items()
}
QUICK_COMBINE_SHAPES = {name: shapes[:1] for name, shapes in COMBINE_SHAPES.items()}


@dataclass(frozen=True, eq=False, kw_only=True)
class RoutedOperands(Operands):
    """One set of what an operator on experts takes and gives.

    Attributes
    ----------
    route : Route
    """

    route: Route


@dataclass(frozen=True, eq=False, kw_only=True)
class ProductOperands(RoutedOperands):
    """The same of one that multiplies.

    Attributes
    ----------
    products : list of tuple of array
        What is multiplied, one after the other: rows (rows, K) in the order of this rank's experts,
        weights (E_r, K, N), and where the result (rows, N) comes.
    """

    products: list[tuple[Any, Any, Any]]


@dataclass(frozen=True, eq=False, kw_only=True)
class SumOperands(RoutedOperands):
    """The same of one that adds.

    Attributes
    ----------
    by_slot : array (T_r * k, N)
        The rows that all experts have made of this rank's tokens, by token and slot.
    """

    by_slot: Any


class ExpertsBench(OperatorBench):
    """What all have in common: tokens and experts are those of all ranks."""

    within_node = True
    shapes, quick_shapes = SHAPES, QUICK_SHAPES

    def _load(self) -> None:
        super()._load()
        host = self._comm.target == "host"
        self._math = self._attempt(baselines.NumpyExperts if host else baselines.TorchExperts)

    def _communication(self) -> Any:
        return baselines.exchange_for(self._comm)

    def _route(self, tokens: int, experts: int, slots: int) -> Route:
        return route_for(self._comm, tokens, experts, slots, self._variant["routing"])

    def _way_back(self, route: Route, columns: int) -> Callable[[Any, Any, Any], Any]:
        """Return what sends the rows back, and writes their weighted sums for each token."""
        exchange, math = available(self._library), available(self._math)
        xp, empty = self._numpy, self._machine.empty
        back, returned = xp.asarray(route.back), xp.asarray(route.returned)
        arranged = empty((len(route.back), columns), self._dtype)
        home, gathered = (empty((len(route.sent), columns), self._dtype) for _ in range(2))

        def run(rows: Any, weights: Any, out: Any) -> Any:
            take(xp, rows, back, arranged)
            exchange(arranged, route.received_counts, home, route.sent_counts)
            take(xp, home, returned, gathered)
            math.add(gathered, weights, out)
            return out

        return run

    def _weights(self, shape: tuple[int, int], seed: int) -> Any:
        """Return random weights for choices of this rank's tokens, numbers that 16 bits hold."""
        random = np.random.default_rng([seed, self._comm.rank])
        values = random.integers(1, 257, shape) / 256
        return self._machine.asarray(values.astype(reference.accumulator_dtype(self._dtype)), None)

    def _roughly(self, sample: Sample) -> Sample:
        """Return what to look at of libraries, which round some of what lies between."""
        right = sample.expected
        return replace(
            sample, expected=reference.Expected(right.value, 8 * right.bound, self._dtype)
        )


class ProductsBench(ExpertsBench):
    """What those that multiply have in common."""

    def _small(self, ranks: int) -> Shape:
        return 32 * ranks, 64, 64, 2 * ranks, 1

    def measure(self, *shape: int) -> dict[str, Any]:
        found = super().measure(*shape)
        compute = found["compute_ms"], found.pop("grouped_ms", "needs GPUs")
        if not any(isinstance(ms, str) for ms in compute):
            found["compute_ms"] = min(compute)  # the faster library
        return found

    def _ways(self, fused: Any, engine: Any) -> dict[str, Callable[[Sequence[Any]], Work]]:
        ways = super()._ways(fused, engine)
        return ways if self._comm.target == "host" else {**ways, "grouped_ms": self._grouped}

    def _compute(self, sets: Sequence[ProductOperands]) -> Work:
        return lambda one: [self._multiply(*factors, one.route) for factors in one.products][-1]

    def _grouped(self, sets: Sequence[ProductOperands]) -> Work:
        """Return the same by another library, which multiplies in groups."""
        multiply = available(self._math).grouped
        calls = {
            one: [multiply(rows, w, one.route.offsets) for rows, w, _ in one.products]
            for one in sets
        }
        return lambda one: [call() for call in calls[one]][-1]

    def _multiply(self, rows: Any, w: Any, out: Any, route: Route) -> Any:
        """Multiply expert by expert, whose numbers of rows the host knows."""
        borders = zip(route.offsets[:-1], route.offsets[1:], strict=True)
        for expert, (first, end) in enumerate(borders):
            if end > first:
                self._gemm(rows[first:end], w[expert], out[first:end])
        return out

    def _dispatch(self, route: Route, columns: int) -> Callable[[Any], Any]:
        """Return what sends copies of tokens and gives them in the order of the rows."""
        exchange, xp, empty = available(self._library), self._numpy, self._machine.empty
        sent, order = xp.asarray(route.sent), xp.asarray(route.order)
        ordered = empty((len(route.sent), columns), self._dtype)
        arrived, rows = (empty((len(route.order), columns), self._dtype) for _ in range(2))

        def run(x: Any) -> Any:
            take(xp, x, sent, ordered)
            exchange(ordered, route.sent_counts, arrived, route.received_counts)
            take(xp, arrived, order, rows)
            return rows

        return run

    def _product_sample(self, one: ProductOperands) -> Sample:
        """Return what to look at of the last product: rows at the borders of experts, too."""
        (rows, w, out), offsets, every = one.products[-1], one.route.offsets, slice(None)
        some, columns = self._some(out, offsets)
        owners = np.searchsorted(offsets[1:], self._machine.asnumpy(some), side="right")
        a = self._picked(rows, some, every)
        value, bound = (np.empty((len(some), len(columns))) for _ in range(2))
        for expert in np.unique(owners):
            own, b = owners == expert, self._picked(w[expert], every, columns)
            part = reference.allgather_gemm([a[own]], b)
            value[own], bound[own] = part.value, part.bound
        return Sample(out, some, columns, reference.Expected(value, bound, self._dtype))

    def _tokens(self, tokens: int, columns: int, route: Route, number: int) -> tuple[Any, Any]:
        """Return this rank's tokens, and those of its experts' rows.

        Every rank can make the tokens of all.
        """
        comm, machine, xp = self._comm, self._machine, self._numpy
        counts, seed = comm.row_counts(tokens), 1_000_000 * (1 + number)
        whole = machine.empty((tokens, columns), self._dtype)
        for rank, count in enumerate(counts):
            if count:
                first = sum(counts[:rank])
                block = self._normal(seed + rank, (count, columns))
                machine.copy(whole[first : first + count], block)
        x = comm.empty((counts[comm.rank], columns), self._dtype)
        machine.copy(x, whole[comm.rows(tokens)])
        rows = machine.empty((len(route.row_slots), columns), self._dtype)
        take(xp, whole, xp.asarray(route.row_slots // route.ids.shape[1]), rows)
        return x, rows

    def _experts(self, experts: int, number: int, shape: Shape, second: int = 0) -> Any:
        """Return the first or the second weights of this rank's experts."""
        own = self._comm.rows(experts)
        w = self._machine.empty((own.stop - own.start, *shape), self._dtype)
        for local, expert in enumerate(range(own.start, own.stop)):
            self._machine.copy(w[local], self._expert(number, expert, shape, second))
        return w

    def _expert(self, number: int, expert: int, shape: Shape, second: int) -> Any:
        """Return the first or the second weights of an expert, of any rank."""
        return self._normal(1_000_000 * (1 + number) + 1000 + 2 * expert + second, shape)


class MoeDispatchGemmBench(ProductsBench):
    """`moe_dispatch_gemm`."""

    operator = "moe_dispatch_gemm"
    step_type, function = MoeDispatchGemm, moe_dispatch_gemm

    def result(self, returned: Any, one: ProductOperands) -> Any:
        return returned[0][: len(one.alike[0])]

    def _unfused(self, sets: Sequence[ProductOperands]) -> Work:
        dispatch = self._dispatch(sets[0].route, sets[0].own[0].shape[1])

        def run(one: ProductOperands) -> Any:
            ((_, w, out),) = one.products
            return self._multiply(dispatch(one.own[0]), w, out, one.route)

        return run

    def _samples(self, one: ProductOperands) -> dict[str, Sample]:
        ways = "compute_ms", "grouped_ms", "engine_ms", "fused_ms", "unfused_ms"
        return dict.fromkeys(ways, self._product_sample(one))

    def _bytes_in(self, one: ProductOperands, shape: Shape) -> int:
        return max(one.route.landing) * shape[1] * self._dtype.itemsize

    def operands(
        self, tokens: int, h: int, i: int, experts: int, k: int, number: int
    ) -> ProductOperands:
        comm, machine, dtype = self._comm, self._machine, self._dtype
        route = self._route(tokens, experts, k)
        x, rows = self._tokens(tokens, h, route, number)
        w, out = self._experts(experts, number, (h, i)), machine.empty((route.capacity, i), dtype)
        return ProductOperands(
            own=(x, machine.asarray(route.ids, None), w),
            out=(out, layout_of(comm, route.ids, route.asked, dtype)),
            asked=route.asked,
            alike=(rows, machine.asarray(route.row_experts, None), w),
            made=(out, layout_of(self._alone, route.row_experts, route.asked_alone, dtype)),
            asked_alone=route.asked_alone,
            route=route,
            products=[(rows, w, out[: len(rows)])],
        )


class MoeLayerBench(ProductsBench):
    """`moe_layer` with swiglu, whose results have as many columns as its tokens."""

    operator = "moe_layer"
    step_type, function = MoeLayer, moe_layer

    def _unfused(self, sets: Sequence[ProductOperands]) -> Work:
        like, math = sets[0], available(self._math)
        dispatch, bring_back = (
            make(like.route, like.out.shape[1]) for make in (self._dispatch, self._way_back)
        )
        hidden = self._machine.empty(like.products[1][0].shape, self._dtype)

        def run(one: ProductOperands) -> Any:
            x, _, weights, w1, w2 = one.own
            both, made = (out for _, _, out in one.products)
            self._multiply(dispatch(x), w1, both, one.route)
            math.gate(both, hidden)
            self._multiply(hidden, w2, made, one.route)
            return bring_back(made, weights, one.out)

        return run

    def _bytes_in(self, one: ProductOperands, shape: Shape) -> int:
        both = zip(one.route.landing, one.route.returning, strict=True)
        return max(map(sum, both)) * shape[1] * self._dtype.itemsize

    def operands(
        self, tokens: int, h: int, i: int, experts: int, k: int, number: int
    ) -> ProductOperands:
        machine, dtype, seed = self._machine, self._dtype, 1_000_000 * (1 + number) + 900
        route = self._route(tokens, experts, k)
        x, rows = self._tokens(tokens, h, route, number)
        w1 = self._experts(experts, number, (h, 2 * i))
        w2 = self._experts(experts, number, (i, h), 1)
        ones = np.ones(route.row_experts.shape, reference.accumulator_dtype(dtype))
        # What libraries multiply next is something else than the activation of the first product.
        hidden = self._normal(seed + self._comm.rank, (len(rows), i))
        both, made = (machine.empty((len(rows), n), dtype) for n in (2 * i, h))
        weights = self._weights(route.ids.shape, seed)
        return ProductOperands(
            own=(x, machine.asarray(route.ids, None), weights, w1, w2),
            out=machine.empty(x.shape, dtype),
            asked=route.asked,
            alike=(
                *(rows, machine.asarray(route.row_experts, None), machine.asarray(ones, None)),
                *(w1, w2),
            ),
            made=made,
            asked_alone=route.asked_alone,
            route=route,
            products=[(rows, w1, both), (hidden, w2, made)],
        )

    def _samples(self, one: ProductOperands) -> dict[str, Sample]:
        """Return what to look at of this rank's experts, of the sums, and of those of libraries."""
        product, comm = self._product_sample(one), self._comm
        first = comm.rows(one.route.asked["num_experts"]).start
        rows, experts, ones, *_ = one.alike
        alone = self._layer_sample(one, rows, experts + first, ones, one.made, None)
        sums = self._layer_sample(one, *one.own[:3], one.out, comm.rank)
        return {
            "compute_ms": product,
            "grouped_ms": product,
            "engine_ms": alone,
            "fused_ms": sums,
            "unfused_ms": self._roughly(sums),
        }

    def _layer_sample(
        self, one: ProductOperands, x: Any, ids: Any, weights: Any, out: Any, rank: int | None
    ) -> Sample:
        """Return the sums of the first and the last token; without a rank, as one alone has them.

        Of each rank's experts only those are made that these tokens chose.
        """
        ranks, here = (1, 0) if rank is None else (self._comm.size, rank)
        rows = self._numpy.asarray(np.unique([0, len(out) - 1])[: len(out)])
        _, columns = self._some(out, [])
        chosen = self._machine.asnumpy(ids[rows])
        ends = np.cumsum(array_split_counts(one.route.asked["num_experts"], ranks))
        owners = np.searchsorted(ends, chosen, side="right")
        lists = [np.unique(chosen[owners == r]).tolist() for r in range(ranks)]
        most = max(1, *map(len, lists))
        named = np.zeros_like(chosen)
        for r, experts in enumerate(lists):
            for place, expert in enumerate(experts):
                named[chosen == expert] = r * most + place
        shapes = [w.shape[1:] for _, w, _ in one.products]
        factors = [
            [self._factors(experts, most, shape, second) for experts in lists]
            for second, shape in enumerate(shapes)
        ]
        found = self._machine.asnumpy(columns)
        factors[1] = [np.ascontiguousarray(block[..., found]) for block in factors[1]]
        tokens = self._picked(x, rows, slice(None))
        expected = reference.moe_layer(
            [tokens if r == here else tokens[:0] for r in range(ranks)],
            [named if r == here else named[:0] for r in range(ranks)],
            *(self._machine.asnumpy(weights[rows]), *factors, here, ranks * most, "swiglu"),
        )
        return Sample(out, rows, columns, expected)

    def _factors(self, experts: list[int], most: int, shape: Shape, second: int) -> np.ndarray:
        """Return weights of some experts of the first set, and zeros for more."""
        found = np.zeros((most, *shape), self._dtype)
        for place, expert in enumerate(experts):
            found[place] = self._machine.asnumpy(self._expert(0, expert, shape, second))
        return found


class MoeCombineBench(ExpertsBench):
    """`moe_combine`; N is the columns of a row."""

    operator = "moe_combine"
    step_type, function = MoeCombine, moe_combine
    choices = "movers", "chunk_bytes"
    shapes, quick_shapes = COMBINE_SHAPES, QUICK_COMBINE_SHAPES

    def _small(self, ranks: int) -> Shape:
        return 32 * ranks, 64, 2 * ranks, 1

    def _compute(self, sets: Sequence[SumOperands]) -> Work:
        math = available(self._math)

        def run(one: SumOperands) -> Any:
            math.add(one.by_slot, one.own[1], one.out)
            return one.out

        return run

    def _unfused(self, sets: Sequence[SumOperands]) -> Work:
        bring_back = self._way_back(sets[0].route, sets[0].out.shape[1])
        return lambda one: bring_back(*one.own[:2], one.out)

    def _bytes_in(self, one: SumOperands, shape: Shape) -> int:
        return max(one.route.returning) * shape[1] * self._dtype.itemsize

    def operands(self, tokens: int, n: int, experts: int, k: int, number: int) -> SumOperands:
        """Return random operands; every rank can make the rows of all tokens."""
        comm, machine, xp = self._comm, self._machine, self._numpy
        counts, seed = comm.row_counts(tokens), 1_000_000 * (1 + number)
        route = self._route(tokens, experts, k)
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
        ids, weights = route.ids, self._weights(route.ids.shape, seed)
        asked_alone = {"num_experts": experts, "max_tokens": len(ids), "capacity": ids.size}
        out = machine.empty((len(ids), n), self._dtype)
        return SumOperands(
            own=(rows, weights, layout_of(comm, ids, route.asked, self._dtype)),
            out=out,
            alike=(by_expert, weights, layout_of(self._alone, ids, asked_alone, self._dtype)),
            made=out,
            route=route,
            by_slot=made,
        )

    def _samples(self, one: SumOperands) -> dict[str, Sample]:
        route, (rows, columns) = one.route, self._some(one.out, [])
        tokens, k = self._machine.asnumpy(rows), route.ids.shape[1]
        experts = route.asked["num_experts"]
        ids, weights = route.ids[tokens], self._machine.asnumpy(one.own[1])[tokens]
        slots = (tokens[:, None] * k + np.arange(k)).ravel()
        made = self._picked(one.by_slot, self._numpy.asarray(slots), columns)
        samples = []
        for ranks, here in ((1, 0), (self._comm.size, self._comm.rank)):
            chosen = [ids if rank == here else ids[:0] for rank in range(ranks)]
            parts = (reference.moe_routing(chosen, r, experts) for r in range(ranks))
            blocks = [made[part.source_token * k + part.source_slot] for part in parts]
            sums = reference.moe_combine(blocks, chosen, weights, here, experts)
            samples.append(Sample(one.out, rows, columns, sums))
        alone, summed = samples
        roughly = self._roughly(summed)
        return {
            "compute_ms": roughly,
            "engine_ms": alone,
            "fused_ms": summed,
            "unfused_ms": roughly,
        }
