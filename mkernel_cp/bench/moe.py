"""The operators on experts beside grouped GEMMs alone, and between all-to-alls."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .. import reference
from ..communicator import Communicator, runtime_of
from ..operators.moe_dispatch_gemm import DispatchLayout, MoeDispatchGemm, moe_dispatch_gemm
from ..operators.moe_layer import MoeLayer, moe_layer
from ..reference import array_split_counts
from . import baselines
from .operator import OperatorBench, Sample, Shape, Way
from .timing import Call

ROUTINGS = ("uniform", "zipf")
"""Whether all experts are as popular, or expert e in proportion to 1 / (1 + e)."""

_SMALL = 32, 64, 64, 2, 1  # tokens of a rank, H, I, experts of a rank, k
_KEYS = "tokens", "H", "I", "E", "k"
_LARGE = tuple((tokens, 7168, 2048, 256, 8) for tokens in (8192, 32768, 131072))
SHAPES = {"cuda": _LARGE, "host": ((96, 64, 48, 16, 4), (101, 77, 9, 9, 3))}
QUICK_SHAPES = {name: shapes[:1] for name, shapes in SHAPES.items()}


@dataclass(frozen=True, eq=False)
class Operands:
    """One set of what an operator takes and gives, and the same in other orders.

    Attributes
    ----------
    x : array (T_r, H)
        This rank's tokens, where peers can read them.
    ids : array (T_r, k)
    w : array (E_r, H, I)
        For a layer (E_r, H, 2 I).
    out : array (capacity, I)
        For a layer room for (capacity, 2 I).
    rows : array (rows, H)
        The tokens of this rank's experts, in the order of the result.
    experts : array (rows, 1)
        Local expert of each.
    route : Route
    """

    x: Any
    ids: Any
    w: Any
    out: Any
    rows: Any
    experts: Any
    route: "Route"
    layer: "LayerOperands | None" = None


@dataclass(frozen=True, eq=False)
class LayerOperands:
    """What `moe_layer` takes and gives besides.

    Attributes
    ----------
    weights : array (T_r, k)
        Numbers that 16 bits hold.
    ones : array (rows, 1)
    w2 : array (E_r, I, H)
    hidden : array (rows, I)
    made : array (rows, H)
    out : array (T_r, H)
    """

    weights: Any
    ones: Any
    w2: Any
    hidden: Any
    made: Any
    out: Any


class Route:
    """Who sends what to whom, as every rank can tell.

    Attributes
    ----------
    experts : int
        Of all ranks.
    tokens : tuple of int
        Of each rank.
    offsets : array
        The first row of each of this rank's experts, and behind the last one their number.
    row_slots : array
        Of the slots of all tokens, that of each row.
    capacity : int
        The most rows of a rank.
    landing, returning : list of int
        How many tokens come to each rank from others, and then how many sums for its own.
    sent : array
        This rank's tokens in the order of experts, as often as they are wanted.
    sent_counts, received_counts : list of int
        Of these, how many go to each rank, and come from each.
    order, back : array
        Of what comes in the order of ranks and experts, that of the rows; and the other way.
    returned : array
        Where each slot of each of this rank's tokens is in `sent`.
    """

    def __init__(self, ids: np.ndarray, tokens: tuple[int, ...], experts: int, rank: int):
        ranks, slots = len(tokens), ids.shape[1]
        counts = array_split_counts(experts, ranks)
        ends = np.cumsum(counts)
        source = np.repeat(np.arange(ranks), tokens)
        owner = np.searchsorted(ends, ids, side="right")
        first = ends[rank] - counts[rank]
        here = np.flatnonzero(owner.ravel() == rank)
        local = ids.ravel()[here] - first
        by_expert = np.argsort(local, kind="stable")  # rows are in the order of source and token
        self.experts, self.tokens = experts, tokens
        self.offsets = np.cumsum([0, *np.bincount(local, minlength=counts[rank])])
        self.row_slots = here[by_expert]
        self.row_experts = local[by_expert]
        self.capacity = int(np.bincount(owner.ravel(), minlength=ranks).max())
        wanted = np.array([(owner == r).any(axis=1) & (source != r) for r in range(ranks)])
        self.landing = wanted.sum(axis=1).tolist()
        self.returning = [int(wanted[:, source == r].sum()) for r in range(ranks)]
        own = slice(sum(tokens[:rank]), sum(tokens[: rank + 1]))
        pairs = np.argsort(ids[own].ravel(), kind="stable")
        self.sent, self.returned = pairs // slots, np.argsort(pairs)
        self.sent_counts = np.bincount(owner[own].ravel(), minlength=ranks).tolist()
        sources = source[here // slots]
        self.received_counts = np.bincount(sources, minlength=ranks).tolist()
        arrived = np.lexsort((local, sources))  # stable, too
        place = np.empty_like(arrived)
        place[arrived] = np.arange(len(arrived))
        self.order = place[by_expert]
        self.back = np.argsort(self.order)


def choose(tokens: int, experts: int, slots: int, routing: str) -> np.ndarray:
    """Return the ids of different experts for each token."""
    random = np.random.default_rng([tokens, experts, slots])
    chances = np.ones(experts) if routing == "uniform" else 1 / np.arange(1, experts + 1)
    scores = np.log(chances) + random.gumbel(size=(tokens, experts))
    return np.argsort(-scores, axis=1)[:, :slots].astype(np.int64)


class NumpyMath:
    """What lies between the products of a layer; it also says what such a library does."""

    def gate(self, both: Any, hidden: Any) -> None:
        """Write silu(gate) * up, which lie side by side."""
        gate, up = (x.astype(np.float32) for x in np.split(both, 2, axis=1))
        hidden[...] = gate / (1 + np.exp(-gate)) * up

    def add(self, rows: Any, weights: Any, out: Any) -> None:
        """Write the weighted sums of the rows of each token, which follow each other."""
        wide = rows.reshape(*weights.shape, out.shape[1]).astype(weights.dtype)
        out[...] = (wide * weights[..., None]).sum(axis=1)


class TorchMath:
    """PyTorch."""

    def __init__(self) -> None:
        self._torch = baselines.Torch()

    def grouped(self, a: Any, b: Any, offsets: np.ndarray) -> Callable[[], Any]:
        """Return what multiplies groups of rows; its result is an array of integers."""
        torch, a, b = self._torch.module, self._torch.tensor(a), self._torch.tensor(b)
        ends = torch.as_tensor(offsets[1:].astype(np.int32), device=self._torch.device)

        def call() -> Any:
            with self._torch.on_current_stream():
                return torch._grouped_mm(a, b, offs=ends).view(torch.int16)

        return call

    def gate(self, both: Any, hidden: Any) -> None:
        torch, to = self._torch.module, self._torch.tensor(hidden)
        gate, up = self._torch.tensor(both).chunk(2, 1)
        with self._torch.on_current_stream():
            torch.mul(torch.nn.functional.silu(gate), up, out=to)

    def add(self, rows: Any, weights: Any, out: Any) -> None:
        torch, to = self._torch.module, self._torch.tensor(out)
        with self._torch.on_current_stream():
            factors = torch.as_tensor(weights, device=self._torch.device)
            groups = self._torch.tensor(rows).view(*factors.shape, to.shape[1])
            torch.bmm(factors.to(groups.dtype)[:, None], groups, out=to[:, None])


class ExpertsBench(OperatorBench):
    """What all have in common: tokens and experts are those of all ranks.

    Parameters
    ----------
    routing : str
        One of `ROUTINGS`.
    """

    keys = _KEYS
    shapes, quick_shapes = SHAPES, QUICK_SHAPES

    def __init__(self, comm: Communicator, *args: Any, routing: str):
        runtime_of(comm).refuse_nodes(f"the bench of {self.operator}")
        self._routing = routing
        super().__init__(comm, *args)
        host = self._comm.target == "host"
        self._torch = "needs GPUs" if host else self._attempt(TorchMath)
        self._math = NumpyMath() if host else self._torch

    def _communication(self) -> Any:
        return baselines.exchange_for(self._comm)

    def measure(self, *shape: int) -> dict[str, Any]:
        found = super().measure(*shape)
        compute = found["compute_ms"], found.pop("grouped_ms", "no products")
        if not any(isinstance(ms, str) for ms in compute):
            found["compute_ms"] = min(compute)  # the faster library
        return found

    def _num_experts(self, one: Operands) -> int:
        return sum(runtime_of(self._comm).agree("how many experts there are", lambda: len(one.w)))

    def _way(self, missing: Any, prepare: Callable[[], Call], sample: Sample) -> Way:
        """Return a way, unless words say why there is none."""
        return Way(missing if isinstance(missing, str) else prepare, sample)

    @staticmethod
    def _rows(out: Any, one: Operands) -> Any:
        return out[: len(one.rows)]

    def _products(self, rows: Any, w: Any, out: Any, route: Route) -> Any:
        """Multiply expert by expert, whose numbers of rows the host knows."""
        borders = zip(route.offsets[:-1], route.offsets[1:], strict=True)
        for expert, (first, end) in enumerate(borders):
            if end > first:
                self._gemm(rows[first:end], w[expert], out[first:end])
        return out

    def _dispatch(self, route: Route, columns: int) -> Callable[[Operands], Any]:
        """Return what sends copies of tokens and gives them in the order of the rows."""
        xp, empty = self._numpy, self._machine.empty
        sent, order = xp.asarray(route.sent), xp.asarray(route.order)
        ordered = empty((len(route.sent), columns), self._dtype)
        arrived, rows = (empty((len(route.order), columns), self._dtype) for _ in range(2))

        def run(one: Operands) -> Any:
            take(xp, one.x, sent, ordered)
            self._library(ordered, route.sent_counts, arrived, route.received_counts)
            take(xp, arrived, order, rows)
            return rows

        return run

    def _way_back(self, route: Route, columns: int) -> Callable[[Any, Any, Any], Any]:
        """Return what sends the rows back, and writes their weighted sums for each token."""
        xp, empty = self._numpy, self._machine.empty
        back, returned = xp.asarray(route.back), xp.asarray(route.returned)
        arranged = empty((len(route.back), columns), self._dtype)
        home, gathered = (empty((len(route.sent), columns), self._dtype) for _ in range(2))

        def run(rows: Any, weights: Any, out: Any) -> Any:
            take(xp, rows, back, arranged)
            self._library(arranged, route.received_counts, home, route.sent_counts)
            take(xp, home, returned, gathered)
            self._math.add(gathered, weights, out)
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

    def _products_sample(self, rows: Any, w: Any, out: Any, route: Route) -> Sample:
        """Return what to look at: rows at the borders of experts too, and some columns."""
        offsets, every = route.offsets, slice(None)
        some, columns = self._some(out[: len(rows)], offsets)
        owners = np.searchsorted(offsets[1:], self._machine.asnumpy(some), side="right")
        a, parts = self._picked(rows, some, every), []
        for expert in np.unique(owners):
            b = self._picked(w[expert], every, columns)
            parts.append(reference.allgather_gemm([a[owners == expert]], b))
        value, bound = (np.concatenate([getattr(p, x) for p in parts]) for x in ("value", "bound"))
        return Sample(out, some, columns, reference.Expected(value, bound, self._dtype))

    def _operands(self, tokens: int, h: int, i: int, experts: int, k: int, number: int) -> Operands:
        """Return random operands; every rank can make the tokens and the experts of all."""
        comm, machine, xp = self._comm, self._machine, self._numpy
        counts, seed = comm.row_counts(tokens), 1_000_000 * (1 + number)
        ids = choose(tokens, experts, k, self._routing)
        route = Route(ids, counts, experts, comm.rank)
        whole = machine.empty((tokens, h), self._dtype)
        for rank, count in enumerate(counts):
            if count:
                first = sum(counts[:rank])
                machine.copy(whole[first : first + count], self._normal(seed + rank, (count, h)))
        x = comm.empty((counts[comm.rank], h), self._dtype)
        machine.copy(x, whole[comm.rows(tokens)])
        own = comm.rows(experts)
        w = machine.empty((own.stop - own.start, h, i), self._dtype)
        for local, expert in enumerate(range(own.start, own.stop)):
            machine.copy(w[local], self._expert(number, expert, (h, i)))
        rows = machine.empty((len(route.row_slots), h), self._dtype)
        take(xp, whole, xp.asarray(route.row_slots // k), rows)
        return Operands(
            x,
            machine.asarray(ids[comm.rows(tokens)], None),
            w,
            machine.empty((route.capacity, i), self._dtype),
            rows,
            machine.asarray(route.row_experts[:, None], None),
            route,
        )

    def _expert(self, number: int, expert: int, shape: tuple[int, int], second: int = 0) -> Any:
        """Return the first or the second weights of an expert, of any rank."""
        return self._normal(1_000_000 * (1 + number) + 1000 + 2 * expert + second, shape)


class MoeDispatchGemmBench(ExpertsBench):
    """`moe_dispatch_gemm`."""

    operator = "moe_dispatch_gemm"

    def _small_calls(self) -> dict[str, Callable[[], Any]]:
        comm, (tokens, h, i, experts, k) = self._comm, _SMALL
        one = self._operands(comm.size * tokens, h, i, comm.size * experts, k, 0)
        own, asked = (one.x, one.ids, one.w), {"comm": comm, "capacity": len(one.out)}
        step = MoeDispatchGemm(*own, **asked)
        out = one.out, step(*own)[1]
        return {
            "class": lambda: step(*own, out=out),
            "function": lambda: moe_dispatch_gemm(*own, **asked, out=out),
        }

    @contextlib.contextmanager
    def _steps(self, one: Operands) -> Iterator[tuple[Any, Any]]:
        capacity = len(one.out)
        asked = {"num_experts": self._num_experts(one), "max_tokens": max(one.route.tokens)}
        with (
            MoeDispatchGemm(
                *(one.x, one.ids, one.w), comm=self._comm, capacity=capacity, **asked
            ) as fused,
            MoeDispatchGemm(
                *(one.rows, one.experts, one.w), comm=self._alone, capacity=capacity
            ) as engine,
        ):
            yield fused, engine

    def _ways(self, sets: Sequence[Operands], fused: Any, engine: Any) -> dict[str, Way]:
        one = sets[0]
        sample = self._products_sample(one.rows, one.w, one.out, one.route)
        layouts = fused(*self._own(sets[0]))[1], engine(*self._alike(sets[0]))[1]

        def fused_call(one: Operands) -> Any:
            return self._rows(fused(*self._own(one), out=(one.out, layouts[0]))[0], one)

        def engine_call(one: Operands) -> Any:
            return self._rows(engine(*self._alike(one), out=(one.out, layouts[1]))[0], one)

        runs = {
            "compute_ms": lambda one: self._multiplied(one.rows, one),
            "engine_ms": engine_call,
            "fused_ms": fused_call,
        }
        ways = {name: Way(self._in_turn(sets, run), sample) for name, run in runs.items()}
        return ways | {
            "grouped_ms": self._way(self._torch, lambda: self._in_groups(sets), sample),
            "unfused_ms": self._way(self._library, lambda: self._unfused(sets), sample),
        }

    def _bytes_in(self, one: Operands, shape: Shape) -> int:
        return max(one.route.landing) * shape[1] * self._dtype.itemsize

    @staticmethod
    def _own(one: Operands) -> tuple[Any, Any, Any]:
        return one.x, one.ids, one.w

    @staticmethod
    def _alike(one: Operands) -> tuple[Any, Any, Any]:
        return one.rows, one.experts, one.w

    def _multiplied(self, rows: Any, one: Operands) -> Any:
        return self._products(rows, one.w, self._rows(one.out, one), one.route)

    def _in_groups(self, sets: Sequence[Operands]) -> Call:
        calls = [self._torch.grouped(one.rows, one.w, one.route.offsets) for one in sets]
        return lambda number: calls[number % len(calls)]()

    def _unfused(self, sets: Sequence[Operands]) -> Call:
        dispatch = self._dispatch(sets[0].route, sets[0].x.shape[1])
        return self._in_turn(sets, lambda one: self._multiplied(dispatch(one), one))()


class MoeLayerBench(ExpertsBench):
    """`moe_layer` with swiglu, whose results have as many columns as its tokens."""

    operator = "moe_layer"

    def _small_calls(self) -> dict[str, Callable[[], Any]]:
        comm, (tokens, h, i, experts, k) = self._comm, _SMALL
        one = self._operands(comm.size * tokens, h, i, comm.size * experts, k, 0)
        own, out = self._own(one), one.layer.out
        asked = {"comm": comm, "capacity": len(one.out)}
        step = MoeLayer(*own, **asked)
        return {
            "class": lambda: step(*own, out=out),
            "function": lambda: moe_layer(*own, **asked, out=out),
        }

    @contextlib.contextmanager
    def _steps(self, one: Operands) -> Iterator[tuple[Any, Any]]:
        capacity = len(one.out)
        asked = {"num_experts": self._num_experts(one), "max_tokens": max(one.route.tokens)}
        with (
            MoeLayer(*self._own(one), comm=self._comm, capacity=capacity, **asked) as fused,
            MoeLayer(*self._alike(one), comm=self._alone, capacity=capacity) as engine,
        ):
            yield fused, engine

    def _ways(self, sets: Sequence[Operands], fused: Any, engine: Any) -> dict[str, Way]:
        first, layer = sets[0], sets[0].layer
        products = self._products_sample(layer.hidden, layer.w2, layer.made, first.route)
        alone, summed, roughly = self._samples(first)
        missing = next((x for x in (self._library, self._math) if isinstance(x, str)), None)
        runs = {
            "compute_ms": (self._two_products, products),
            "engine_ms": (lambda one: engine(*self._alike(one), out=one.layer.made), alone),
            "fused_ms": (lambda one: fused(*self._own(one), out=one.layer.out), summed),
        }
        ways = {name: Way(self._in_turn(sets, run), sample) for name, (run, sample) in runs.items()}
        return ways | {
            "grouped_ms": self._way(self._torch, lambda: self._in_groups(sets), products),
            "unfused_ms": self._way(missing, lambda: self._unfused(sets), roughly),
        }

    def _bytes_in(self, one: Operands, shape: Shape) -> int:
        both = zip(one.route.landing, one.route.returning, strict=True)
        return max(map(sum, both)) * shape[1] * self._dtype.itemsize

    @staticmethod
    def _own(one: Operands) -> tuple[Any, ...]:
        return one.x, one.ids, one.layer.weights, one.w, one.layer.w2

    @staticmethod
    def _alike(one: Operands) -> tuple[Any, ...]:
        return one.rows, one.experts, one.layer.ones, one.w, one.layer.w2

    def _two_products(self, one: Operands) -> Any:
        """Multiply twice, the second time something else than the activation of the first."""
        layer = one.layer
        self._products(one.rows, one.w, self._rows(one.out, one), one.route)
        return self._products(layer.hidden, layer.w2, layer.made, one.route)

    def _in_groups(self, sets: Sequence[Operands]) -> Call:
        calls = []
        for one in sets:
            factors = (one.rows, one.w), (one.layer.hidden, one.layer.w2)
            calls.append([self._torch.grouped(*pair, one.route.offsets) for pair in factors])

        def call(number: int) -> Any:
            first, second = calls[number % len(calls)]
            first()
            return second()

        return call

    def _unfused(self, sets: Sequence[Operands]) -> Call:
        route, columns = sets[0].route, sets[0].x.shape[1]
        dispatch, bring_back = self._dispatch(route, columns), self._way_back(route, columns)
        hidden = self._machine.empty(sets[0].layer.hidden.shape, self._dtype)

        def run(one: Operands) -> Any:
            layer = one.layer
            both = self._products(dispatch(one), one.w, self._rows(one.out, one), route)
            self._math.gate(both, hidden)
            self._products(hidden, layer.w2, layer.made, route)
            return bring_back(layer.made, layer.weights, layer.out)

        return self._in_turn(sets, run)()

    def _operands(self, tokens: int, h: int, i: int, experts: int, k: int, number: int) -> Operands:
        """Return random operands; every rank can make the tokens and the experts of all."""
        one = super()._operands(tokens, h, 2 * i, experts, k, number)
        machine, rows, seed = self._machine, len(one.rows), 1_000_000 * (1 + number) + 900
        wide = reference.accumulator_dtype(self._dtype)
        w2 = machine.empty((len(one.w), i, h), self._dtype)
        first = self._comm.rows(experts).start
        for local in range(len(w2)):
            machine.copy(w2[local], self._expert(number, first + local, (i, h), 1))
        layer = LayerOperands(
            self._weights(one.ids.shape, seed),
            machine.asarray(np.ones((rows, 1), wide), None),
            w2,
            self._normal(seed + self._comm.rank, (rows, i)),
            machine.empty((rows, h), self._dtype),
            machine.empty(one.x.shape, self._dtype),
        )
        return replace(one, layer=layer)

    def _samples(self, one: Operands) -> tuple[Sample, Sample, Sample]:
        """Return what to look at of this rank's experts, of the sums, and of those of libraries."""
        layer, first = one.layer, self._comm.rows(one.route.experts).start
        own = self._layer_sample(one, one.rows, one.experts + first, layer.ones, layer.made, None)
        rank = self._comm.rank
        sums = self._layer_sample(one, one.x, one.ids, layer.weights, layer.out, rank)
        return own, sums, self._roughly(sums)

    def _layer_sample(
        self, one: Operands, x: Any, ids: Any, weights: Any, out: Any, rank: int | None
    ) -> Sample:
        """Return the sums of the first and the last token; without a rank, as one alone has them.

        Of each rank's experts only those are made that these tokens chose.
        """
        ranks, here = (1, 0) if rank is None else (self._comm.size, rank)
        rows = self._numpy.asarray(np.unique([0, len(out) - 1])[: len(out)])
        _, columns = self._some(out, [])
        chosen = self._machine.asnumpy(ids[rows])
        ends = np.cumsum(array_split_counts(one.route.experts, ranks))
        owners = np.searchsorted(ends, chosen, side="right")
        lists = [np.unique(chosen[owners == r]).tolist() for r in range(ranks)]
        most = max(1, *map(len, lists))
        named = np.zeros_like(chosen)
        for r, experts in enumerate(lists):
            for place, expert in enumerate(experts):
                named[chosen == expert] = r * most + place
        shapes = (x.shape[1], 2 * one.layer.w2.shape[1]), one.layer.w2.shape[1:]
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

    def _factors(
        self, experts: list[int], most: int, shape: tuple[int, int], second: int
    ) -> np.ndarray:
        """Return weights of some experts of the first set, and zeros for more."""
        found = np.zeros((most, *shape), self._dtype)
        for place, expert in enumerate(experts):
            found[place] = self._machine.asnumpy(self._expert(0, expert, shape, second))
        return found


def layout_of(
    comm: Communicator,
    ids: np.ndarray,
    experts: int,
    max_tokens: int,
    capacity: int,
    dtype: np.dtype,
) -> DispatchLayout:
    """Return the layout of a dispatch that leaves nothing to multiply. Collective."""
    machine, here = runtime_of(comm).machine, comm.row_counts(experts)[comm.rank]
    x, w = (machine.empty(shape, dtype) for shape in ((len(ids), 1), (here, 1, 1)))
    for array in (x, w):
        machine.zero(array)
    operands = x, machine.asarray(ids, None), w
    asked = {"num_experts": experts, "max_tokens": max_tokens, "capacity": capacity}
    with MoeDispatchGemm(*operands, comm=comm, **asked) as step:
        return step(*operands)[1]


def take(xp: Any, rows: Any, index: Any, to: Any) -> None:
    """Copy some rows, in the longest words that they consist of."""
    length = rows.shape[1] * rows.itemsize
    word = next(name for name in ("c16", "u8", "u4", "u2") if length % np.dtype(name).itemsize == 0)
    xp.take(rows.view(word), index, axis=0, out=to.view(word))
