"""`moe_dispatch_gemm` beside grouped GEMMs alone, and behind an all-to-all."""

import contextlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import reference
from ..operators.moe_dispatch_gemm import MoeDispatchGemm, moe_dispatch_gemm
from ..reference import array_split_counts
from . import baselines
from .operator import OperatorBench, Sample, Shape, Way

ROUTINGS = ("uniform", "zipf")
"""Whether all experts are as popular, or expert e in proportion to 1 / (1 + e)."""

_SMALL = 32, 64, 64, 2, 1  # tokens of a rank, H, I, experts of a rank, k
_KEYS = "tokens", "H", "I", "E", "k"
_LARGE = tuple((tokens, 7168, 2048, 256, 8) for tokens in (8192, 32768, 131072))
SHAPES = {"cuda": _LARGE, "host": ((96, 64, 48, 16, 4), (101, 77, 9, 9, 3))}
QUICK_SHAPES = {name: shapes[:1] for name, shapes in SHAPES.items()}


@dataclass(frozen=True, eq=False)
class Operands:
    """One set of what `moe_dispatch_gemm` takes and gives, and the same in other orders.

    Attributes
    ----------
    x : array (T_r, H)
        This rank's tokens, where peers can read them.
    ids : array (T_r, k)
    w : array (E_r, H, I)
    out : array (capacity, I)
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


class Route:
    """Who sends what to whom, as every rank can tell.

    Attributes
    ----------
    ids : array (T, k)
        Of all ranks.
    tokens : tuple of int
        Of each rank.
    offsets : array
        The first row of each of this rank's experts, and behind the last one their number.
    row_tokens : array
        Of all tokens, that of each row.
    capacity : int
        The most rows of a rank.
    landing : int
        The most tokens that come to a rank from others.
    sent : array
        This rank's tokens in the order of experts, as often as they are wanted.
    sent_counts, received_counts : list of int
        Of these, how many go to each rank, and come from each.
    order : array
        Of what comes in the order of ranks and experts, that of the rows.
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
        self.ids, self.tokens = ids, tokens
        self.offsets = np.cumsum([0, *np.bincount(local, minlength=counts[rank])])
        self.row_tokens = here[by_expert] // slots
        self.row_experts = local[by_expert]
        self.capacity = int(np.bincount(owner.ravel(), minlength=ranks).max())
        wanted = [(owner == r).any(axis=1) & (source != r) for r in range(ranks)]
        self.landing = int(max(w.sum() for w in wanted))
        own = slice(sum(tokens[:rank]), sum(tokens[: rank + 1]))
        self.sent = np.argsort(ids[own].ravel(), kind="stable") // slots
        self.sent_counts = np.bincount(owner[own].ravel(), minlength=ranks).tolist()
        sources = source[here // slots]
        self.received_counts = np.bincount(sources, minlength=ranks).tolist()
        arrived = np.lexsort((local, sources))  # stable, too
        place = np.empty_like(arrived)
        place[arrived] = np.arange(len(arrived))
        self.order = place[by_expert]


def choose(tokens: int, experts: int, slots: int, routing: str) -> np.ndarray:
    """Return the ids of different experts for each token."""
    random = np.random.default_rng([tokens, experts, slots])
    chances = np.ones(experts) if routing == "uniform" else 1 / np.arange(1, experts + 1)
    scores = np.log(chances) + random.gumbel(size=(tokens, experts))
    return np.argsort(-scores, axis=1)[:, :slots].astype(np.int64)


class TorchGrouped:
    """The grouped GEMM of PyTorch."""

    def __init__(self) -> None:
        self._torch = torch = importlib.import_module("torch")
        self._cuda = importlib.import_module("cupy").cuda
        self._device = torch.device("cuda", self._cuda.runtime.getDevice())

    def prepare(self, one: Operands) -> Callable[[], Any]:
        """Return what multiplies; its result is an array of integers, bit by bit."""
        torch, offsets = self._torch, one.route.offsets[1:].astype(np.int32)
        a, b = self._tensor(one.rows), self._tensor(one.w)
        ends = torch.as_tensor(offsets, device=self._device)
        stream = torch.cuda.ExternalStream(self._cuda.get_current_stream().ptr, device=self._device)

        def call() -> Any:
            with torch.cuda.stream(stream):
                return torch._grouped_mm(a, b, offs=ends).view(torch.int16)

        return call

    def _tensor(self, array: Any) -> Any:
        bits = self._torch.as_tensor(array.view("i2"), device=self._device)
        return bits.view(getattr(self._torch, array.dtype.name))


class MoeDispatchGemmBench(OperatorBench):
    """`moe_dispatch_gemm`: tokens and experts are those of all ranks.

    Parameters
    ----------
    routing : str
        One of `ROUTINGS`.
    """

    operator = "moe_dispatch_gemm"
    keys = _KEYS
    shapes, quick_shapes = SHAPES, QUICK_SHAPES

    def __init__(self, *args: Any, routing: str):
        self._routing = routing
        super().__init__(*args)
        host = self._comm.target == "host"
        self._grouped = "needs GPUs" if host else self._attempt(TorchGrouped)

    def _communication(self) -> Any:
        return baselines.exchange_for(self._comm)

    def measure(self, *shape: int) -> dict[str, Any]:
        found = super().measure(*shape)
        grouped = found.pop("grouped_ms")
        if not isinstance(grouped, str) and not isinstance(found["compute_ms"], str):
            found["compute_ms"] = min(grouped, found["compute_ms"])  # the faster library
        return found

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
        capacity, experts = len(one.out), self._comm.agree("experts", lambda: len(one.w))
        asked = {"num_experts": sum(experts), "max_tokens": max(one.route.tokens)}
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
        sample = self._sample(sets[0])
        layouts = fused(*self._own(sets[0]))[1], engine(*self._alike(sets[0]))[1]

        def fused_call(one: Operands) -> Any:
            return self._rows(fused(*self._own(one), out=(one.out, layouts[0]))[0], one)

        def engine_call(one: Operands) -> Any:
            return self._rows(engine(*self._alike(one), out=(one.out, layouts[1]))[0], one)

        runs = {
            "compute_ms": lambda one: self._products(one.rows, one),
            "engine_ms": engine_call,
            "fused_ms": fused_call,
        }
        ways = {name: Way(self._in_turn(sets, run), sample) for name, run in runs.items()}
        grouped, exchange = self._grouped, self._library
        ways["grouped_ms"] = Way(
            grouped if isinstance(grouped, str) else lambda: self._in_grouped(sets), sample
        )
        ways["unfused_ms"] = Way(
            exchange if isinstance(exchange, str) else lambda: self._unfused(sets), sample
        )
        return ways

    def _bytes_in(self, one: Operands, shape: Shape) -> int:
        return one.route.landing * shape[1] * self._dtype.itemsize

    # --- ways to do it ----------------------------------------------------------------------------

    @staticmethod
    def _own(one: Operands) -> tuple[Any, Any, Any]:
        return one.x, one.ids, one.w

    @staticmethod
    def _alike(one: Operands) -> tuple[Any, Any, Any]:
        return one.rows, one.experts, one.w

    @staticmethod
    def _rows(out: Any, one: Operands) -> Any:
        return out[: len(one.rows)]

    def _products(self, rows: Any, one: Operands) -> Any:
        """Multiply expert by expert, whose numbers of rows the host knows."""
        for expert, (first, end) in enumerate(
            zip(one.route.offsets[:-1], one.route.offsets[1:], strict=True)
        ):
            if end > first:
                self._gemm(rows[first:end], one.w[expert], one.out[first:end])
        return self._rows(one.out, one)

    def _in_grouped(self, sets: Sequence[Operands]) -> Callable[[int], Any]:
        calls = [self._grouped.prepare(one) for one in sets]
        return lambda number: calls[number % len(calls)]()

    def _unfused(self, sets: Sequence[Operands]) -> Callable[[int], Any]:
        """Return the call that sends copies of tokens in order, and then multiplies."""
        route, xp = sets[0].route, self._numpy
        sent, order = xp.asarray(route.sent), xp.asarray(route.order)
        ordered = self._machine.empty((len(route.sent), sets[0].x.shape[1]), self._dtype)
        arrived, rows = (self._machine.empty(sets[0].rows.shape, self._dtype) for _ in range(2))

        def call(number: int) -> Any:
            one = sets[number % len(sets)]
            _take(xp, one.x, sent, ordered)
            self._library(ordered, route.sent_counts, arrived, route.received_counts)
            _take(xp, arrived, order, rows)
            return self._products(rows, one)

        return call

    # --- operands and results ---------------------------------------------------------------------

    def _operands(self, tokens: int, h: int, i: int, experts: int, k: int, number: int) -> Operands:
        """Return random operands; every rank can make the tokens of all."""
        comm, machine, xp = self._comm, self._machine, self._numpy
        counts, seed = comm.row_counts(tokens), 1000 * (1 + number)
        ids = choose(tokens, experts, k, self._routing)
        route = Route(ids, counts, experts, comm.rank)
        whole = machine.empty((tokens, h), self._dtype)
        for rank, rows in enumerate(counts):
            if rows:
                first = sum(counts[:rank])
                machine.copy(whole[first : first + rows], self._normal(seed + rank, (rows, h)))
        x = comm.empty((counts[comm.rank], h), self._dtype)
        machine.copy(x, whole[comm.rows(tokens)])
        own_experts = array_split_counts(experts, comm.size)[comm.rank]
        w = self._normal(seed + comm.size + comm.rank, (own_experts * h, i))
        rows = machine.empty((len(route.row_tokens), h), self._dtype)
        _take(xp, whole, xp.asarray(route.row_tokens), rows)
        return Operands(
            x,
            machine.asarray(ids[comm.rows(tokens)], None),
            w.reshape(own_experts, h, i),
            machine.empty((route.capacity, i), self._dtype),
            rows,
            machine.asarray(route.row_experts[:, None], None),
            route,
        )

    def _sample(self, one: Operands) -> Sample:
        """Return what to look at: rows at the borders of experts too, and some columns."""
        offsets, every = one.route.offsets, slice(None)
        rows, columns = self._some(self._rows(one.out, one), offsets)
        owners = np.searchsorted(offsets[1:], self._machine.asnumpy(rows), side="right")
        a, parts = self._picked(one.rows, rows, every), []
        for expert in np.unique(owners):
            b = self._picked(one.w[expert], every, columns)
            parts.append(reference.allgather_gemm([a[owners == expert]], b))
        value, bound = (np.concatenate([getattr(p, x) for p in parts]) for x in ("value", "bound"))
        expected = reference.Expected(value, bound, self._dtype)
        return Sample(one.out, rows, columns, expected)


def _take(xp: Any, rows: Any, index: Any, to: Any) -> None:
    """Copy some rows, in the longest words that they consist of."""
    length = rows.shape[1] * rows.itemsize
    word = next(name for name in ("c16", "u8", "u4", "u2") if length % np.dtype(name).itemsize == 0)
    xp.take(rows.view(word), index, axis=0, out=to.view(word))
