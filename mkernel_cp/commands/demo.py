"""`demo`: every operator against its reference, on all ranks."""

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import ml_dtypes  # noqa: F401  NumPy then knows bfloat16 by name
import numpy as np

from .. import __version__, reference
from ..communicator import Communicator, runtime_of
from ..operators.allgather_gemm import AllGatherGemm
from ..operators.gemm import GemmOperator
from ..operators.gemm_allreduce import GemmAllReduce
from ..operators.gemm_reduce_scatter import GemmReduceScatter
from ..operators.moe_combine import MoeCombine
from ..operators.moe_dispatch_gemm import MoeDispatchGemm
from ..operators.moe_layer import MoeLayer
from ..operators.ring_attention import RingAttention
from ..topology import Topology
from .job import CommandError

_WARM_CALLS = 5
_TARGETS = {
    "host": "loops on CPU threads, which prove the protocol; not a measure of speed",
    "cuda": "small shapes, launched one by one; not a measure of speed",
}
_HEADINGS = (
    ("operator", "<20"),
    ("shape", "<34"),
    ("dtype", "<20"),
    ("world", ">5"),
    ("target", ">6"),
    ("error/bound", ">11"),
    ("bytes from peers", ">16"),
    ("planned", ">10"),
    ("ms", ">8"),
)


@dataclass(frozen=True)
class Row:
    """One line of the table: a case, and what came of it on all ranks."""

    operator: str
    shape: dict[str, Any]
    row_counts: tuple[int, ...]
    dtype: str
    out_dtype: str
    world: int
    target: str
    error_over_bound: float
    bytes_from_peers: int
    bytes_planned: int
    ms: float
    ok: bool

    def __str__(self) -> str:
        extents = (x for x in self.shape.values() if type(x) is int)
        words = (name for name, x in self.shape.items() if x is True)
        shape = " ".join((" x ".join(map(str, extents)), *words))
        dtype = self.dtype if self.dtype == self.out_dtype else f"{self.dtype}->{self.out_dtype}"
        cells = (
            self.operator,
            shape if len(set(self.row_counts)) == 1 else f"{shape} uneven",
            dtype,
            self.world,
            self.target,
            f"{self.error_over_bound:.3f}",
            self.bytes_from_peers,
            self.bytes_planned,
            f"{self.ms:.3f}",
        )
        return _line(cells) + ("" if self.ok else "  WRONG")


@dataclass(frozen=True)
class _Measured:
    """What one rank saw of a case; bytes are those of all calls."""

    error: float
    counted: int
    planned: int
    ms: float


@dataclass(frozen=True)
class _GemmCase:
    row_counts: tuple[int, ...]
    k: int
    n: int
    dtype: str
    out_dtype: str

    @property
    def shape(self) -> dict[str, int]:
        return {"M": sum(self.row_counts), "K": self.k, "N": self.n}


def _gemm_cases(size: int) -> Iterator[_GemmCase]:
    for dtype in ("bfloat16", "float16", "float32", "float64"):
        yield _GemmCase((64,) * size, 128, 64, dtype, dtype)
    odd = reference.array_split_counts(37 * size + size // 2, size)
    yield _GemmCase(odd, 77, 33, "bfloat16", "float32")
    yield _GemmCase(odd, 131, 65, "float64", "float64")
    uneven = tuple((67, 0, 33, 1)[rank % 4] for rank in range(size))
    yield _GemmCase(uneven, 77, 19, "float16", "float16")
    yield _GemmCase(uneven, 1, 70, "float32", "float32")


def _allgather_gemm(comm: Communicator, case: _GemmCase) -> _Measured:
    random = np.random.default_rng(0)  # so every rank knows all of A
    blocks = [random.standard_normal((m, case.k)).astype(case.dtype) for m in case.row_counts]
    random = np.random.default_rng(1 + comm.rank)
    b = random.standard_normal((case.k, case.n)).astype(case.dtype)
    expected = reference.allgather_gemm(blocks, b, case.out_dtype)
    a = comm.asarray(blocks[comm.rank])
    return _measure(comm, AllGatherGemm, expected, a, b, row_counts=case.row_counts)


def _sum_cases(size: int) -> Iterator[_GemmCase]:
    """K is that of one rank; one is too large for low latency, the last has few rows."""
    for dtype in ("bfloat16", "float16", "float32", "float64"):
        yield _GemmCase((48,) * size, 64, 96, dtype, dtype)
    yield _GemmCase((4096 // size,) * size, 16, 576, "bfloat16", "bfloat16")
    odd = reference.array_split_counts(37 * size + size // 2, size)
    yield _GemmCase(odd, 77, 33, "bfloat16", "float32")
    yield _GemmCase(odd, 131, 65, "float64", "float64")
    few = reference.array_split_counts(size - 1, size)
    yield _GemmCase(few, 77, 19, "float16", "float16")


def _terms(case: _GemmCase, size: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return the operands of all ranks."""
    random, m = np.random.default_rng(0), sum(case.row_counts)
    a_blocks, b_blocks = (
        [random.standard_normal(shape).astype(case.dtype) for _ in range(size)]
        for shape in ((m, case.k), (case.k, case.n))
    )
    return a_blocks, b_blocks


def _gemm_reduce_scatter(comm: Communicator, case: _GemmCase) -> _Measured:
    blocks = _terms(case, comm.size)
    where = case.row_counts, comm.rank, case.out_dtype
    expected = reference.gemm_reduce_scatter(*blocks, *where, nodes=runtime_of(comm).topology.sizes)
    own = (block[comm.rank] for block in blocks)
    return _measure(comm, GemmReduceScatter, expected, *own, row_counts=case.row_counts)


def _gemm_allreduce(comm: Communicator, case: _GemmCase) -> _Measured:
    blocks, nodes = _terms(case, comm.size), runtime_of(comm).topology.sizes
    expected = reference.gemm_allreduce(*blocks, case.out_dtype, nodes=nodes)
    return _measure(comm, GemmAllReduce, expected, *(block[comm.rank] for block in blocks))


@dataclass(frozen=True)
class _AttentionCase:
    row_counts: tuple[int, ...]  # positions
    heads: tuple[int, int]
    columns: int
    dtype: str
    causal: bool
    layout: str = "contiguous"
    batch: int = 1

    @property
    def out_dtype(self) -> str:
        return self.dtype

    @property
    def shape(self) -> dict[str, Any]:
        extents = self.batch, sum(self.row_counts), *self.heads, self.columns
        kinds = {"causal": self.causal, "zigzag": self.layout == "zigzag"}
        return dict(zip(("B", "S", "Hq", "Hkv", "D"), extents, strict=True)) | kinds


def _attention_cases(size: int) -> Iterator[_AttentionCase]:
    for dtype in ("bfloat16", "float16", "float32", "float64"):
        yield _AttentionCase((32,) * size, (8, 2), 64, dtype, dtype != "float16")
    yield _AttentionCase((37,) * size, (4, 4), 40, "bfloat16", True, "zigzag")
    uneven = tuple((67, 0, 33, 1)[rank % 4] for rank in range(size))
    yield _AttentionCase(uneven, (4, 1), 24, "float32", False, batch=2)


def _ring_attention(comm: Communicator, case: _AttentionCase) -> _Measured:
    random = np.random.default_rng(0)  # so every rank knows all of the sequence
    heads = case.heads[0], case.heads[1], case.heads[1]
    blocks = [
        [
            random.standard_normal((case.batch, n, count, case.columns)).astype(case.dtype)
            for n in case.row_counts
        ]
        for count in heads
    ]
    asked = {"causal": case.causal, "layout": case.layout}
    expected, expected_lse = reference.ring_attention(
        blocks[0][comm.rank], *blocks[1:], comm.rank, **asked
    )
    q, k, v = (comm.asarray(x[comm.rank]) for x in blocks)
    lse = runtime_of(comm).machine.empty(expected_lse.value.shape, expected_lse.dtype)
    with RingAttention(
        q, k, v, comm=comm, seq_counts=case.row_counts, return_lse=True, **asked
    ) as step:
        planned = _planned(comm, step.plan)
        measured = _time(comm, expected, lambda out: step(q, k, v, out=(out, lse)), planned)
    error = expected_lse.check(comm.asnumpy(lse))
    return replace(measured, error=max(error, measured.error))


@dataclass(frozen=True)
class _ExpertCase:
    row_counts: tuple[int, ...]  # tokens
    h: int
    inner: int
    n: int
    experts: int
    slots: int
    dtype: str
    zipf: bool = False
    activation: str | None = None

    @property
    def out_dtype(self) -> str:
        return self.dtype

    @property
    def shape(self) -> dict[str, Any]:
        extents = sum(self.row_counts), self.h, self.inner, self.experts, self.slots
        kinds = {str(self.activation): self.activation is not None}
        return dict(zip(("tokens", "H", "I", "E", "k"), extents, strict=True)) | kinds


def _expert_cases(size: int, *activations: str | None) -> Iterator[_ExpertCase]:
    dtypes = ("bfloat16", "float16", "float32", "float64")
    for dtype, activation in zip(dtypes, activations, strict=True):
        counts = (48,) * size
        yield _ExpertCase(counts, 64, 48, 64, 4 * size, 4, dtype, activation=activation)
    uneven = tuple((67, 0, 33, 1)[rank % 4] for rank in range(size))
    yield _ExpertCase(uneven, 77, 9, 19, 2 * size + 1, 3, "bfloat16", True, activations[0])


class _Experts:
    """The operands of all ranks, and what of them crosses links."""

    def __init__(self, case: _ExpertCase, nodes: tuple[int, ...]):
        size = sum(nodes)
        random = np.random.default_rng(0)
        chances = 1 / np.arange(1, case.experts + 1) if case.zipf else np.ones(case.experts)
        chances /= chances.sum()
        accumulator = reference.accumulator_dtype(case.dtype)
        halves = 2 if case.activation == "swiglu" else 1
        self._owner = np.repeat(np.arange(size), reference.array_split_counts(case.experts, size))
        self._nodes = nodes
        self.x = [random.standard_normal((n, case.h)).astype(case.dtype) for n in case.row_counts]
        self.ids = [
            np.array([random.choice(case.experts, case.slots, False, chances) for _ in range(n)])
            .reshape(n, case.slots)
            .astype(np.int64)
            for n in case.row_counts
        ]
        self.weights = [random.random(ids.shape).astype(accumulator) for ids in self.ids]
        self.w1, self.w2 = (
            [
                random.standard_normal((n, *shape)).astype(case.dtype)
                for n in reference.array_split_counts(case.experts, size)
            ]
            for shape in ((case.h, halves * case.inner), (case.inner, case.n))
        )

    def of(self, comm: Communicator, *names: str) -> list[Any]:
        """Return operands of a rank, its tokens where peers can read them."""
        machine = runtime_of(comm).machine
        own = [machine.asarray(getattr(self, name)[comm.rank], None) for name in names]
        return [comm.asarray(x) if name == "x" else x for name, x in zip(names, own, strict=True)]

    def tokens_to(self, rank: int) -> int:
        """Return how many tokens the experts of a rank bring from ranks of its node."""
        holders = Topology(rank, self._nodes).holders
        peers = (ids for holder, ids in zip(holders, self.ids, strict=True) if holder != rank)
        return sum(int((self._owner[ids] == rank).any(axis=1).sum()) for ids in peers)

    def sums_to(self, rank: int) -> int:
        """Return how many sums a rank gets from peers: for its tokens, and those it stands for."""
        topology = Topology(rank, self._nodes)
        peers = set(topology.peers) - {rank}
        owners = (rank, *topology.sources)
        rows = (row for owner in owners for row in self._owner[self.ids[owner]].tolist())
        return sum(len(set(row) & peers) for row in rows)


def _moe_dispatch_gemm(comm: Communicator, case: _ExpertCase) -> _Measured:
    runtime, rank = runtime_of(comm), comm.rank
    data, machine = _Experts(case, runtime.topology.sizes), runtime.machine
    expected, routing = reference.moe_dispatch_gemm(
        data.x, data.ids, data.w1[rank], rank, case.experts
    )
    own = data.of(comm, "x", "ids", "w1")
    wrong = []
    with MoeDispatchGemm(*own, comm=comm, num_experts=case.experts) as step:

        def call(out: Any) -> None:
            rows, layout = step(*own)
            count = len(routing.source_rank)
            for name, right in vars(routing).items():
                got = machine.asnumpy(getattr(layout, name))[: len(right)]
                wrong.append(int(layout.count) != count or not np.array_equal(got, right))
            machine.copy(out, rows[:count])

        planned = data.tokens_to(rank) * case.h * expected.dtype.itemsize
        if _counts(comm):
            planned += step.plan.dispatch.bytes_to_network(rank, data.ids)
        measured = _time(comm, expected, call, planned)
    return replace(measured, error=math.inf if any(wrong) else measured.error)


def _moe_combine(comm: Communicator, case: _ExpertCase) -> _Measured:
    data, rank = _Experts(case, runtime_of(comm).topology.sizes), comm.rank
    own = data.of(comm, "x", "ids", "w1")
    with MoeDispatchGemm(*own, comm=comm, num_experts=case.experts) as dispatch:
        rows, layout = dispatch(*own)
    rows, (weights,) = layout.trim(rows), data.of(comm, "weights")
    found = np.array(comm.asnumpy(rows))
    blocks = runtime_of(comm).agree("the rows of the demo", lambda: found)
    nodes = runtime_of(comm).topology.sizes
    expected = reference.moe_combine(
        blocks, data.ids, data.weights[rank], rank, case.experts, nodes=nodes
    )
    with MoeCombine(rows, weights, layout, comm=comm) as step:
        planned = data.sums_to(rank) * case.inner * expected.dtype.itemsize
        if _counts(comm):
            agreed = step.plan.combine
            planned += agreed.sums_to_network(rank, data.ids, case.experts)
            planned += agreed.weights_to_network(rank, list(map(len, data.weights)))
        return _time(comm, expected, lambda out: step(rows, weights, layout, out=out), planned)


def _moe_layer(comm: Communicator, case: _ExpertCase) -> _Measured:
    data, rank = _Experts(case, runtime_of(comm).topology.sizes), comm.rank
    expected = reference.moe_layer(
        *(data.x, data.ids, data.weights[rank], data.w1, data.w2),
        *(rank, case.experts, case.activation),
        nodes=runtime_of(comm).topology.sizes,
    )
    own = data.of(comm, "x", "ids", "weights", "w1", "w2")
    asked = {"num_experts": case.experts, "activation": case.activation}
    with MoeLayer(*own, comm=comm, **asked) as step:
        columns = data.tokens_to(rank) * case.h + data.sums_to(rank) * case.n
        planned = columns * expected.dtype.itemsize
        if _counts(comm):
            agreed = step.plan.layer
            planned += agreed.dispatch.bytes_to_network(rank, data.ids)
            planned += agreed.combine.sums_to_network(rank, data.ids, case.experts)
        return _time(comm, expected, lambda out: step(*own, out=out), planned)


def _measure(
    comm: Communicator,
    kind: type[GemmOperator],
    expected: reference.Expected,
    a: Any,
    b: Any,
    **asked: Any,
) -> _Measured:
    a, b = (runtime_of(comm).machine.asarray(x, None) for x in (a, b))
    with kind(a, b, comm=comm, dtype=expected.dtype, **asked) as step:
        return _time(comm, expected, lambda out: step(a, b, out=out), _planned(comm, step.plan))


def _time(
    comm: Communicator,
    expected: reference.Expected,
    call: Callable[[np.ndarray], Any],
    planned: int,
) -> _Measured:
    before = _moved(comm)
    machine = runtime_of(comm).machine
    nothing = np.full(expected.value.shape, np.nan, expected.dtype)
    out = machine.asarray(nothing.copy(), None)
    call(out)
    error = expected.check(machine.asnumpy(out))
    machine.copy(out, machine.asarray(nothing, None))
    comm.synchronize()
    seconds = []
    for _ in range(_WARM_CALLS):
        start = time.perf_counter()
        call(out)
        comm.synchronize()
        seconds.append(time.perf_counter() - start)
    error = max(error, expected.check(machine.asnumpy(out)))
    counted = _moved(comm) - before
    return _Measured(error, counted, (1 + _WARM_CALLS) * planned, 1e3 * statistics.median(seconds))


def _moved(comm: Communicator) -> int:
    """Return the bytes that kernels have brought here, and that network cards have sent."""
    runtime = runtime_of(comm)
    sent = runtime.network.counters()[0] if _counts(comm) else 0
    return runtime.launches.bytes_from_peers + sent


def _planned(comm: Communicator, plan: Any) -> int:
    """Return the bytes that `_moved` is to count in one call."""
    return plan.bytes_from_peers + (plan.bytes_to_network if _counts(comm) else 0)


def _counts(comm: Communicator) -> bool:
    """Return whether there are network cards between nodes that count."""
    return runtime_of(comm).network is not None and runtime_of(comm).network.software


@dataclass(frozen=True)
class _Operator:
    """An operator of the demonstration: its cases for a number of ranks, and how to run one."""

    name: str
    cases: Callable[[int], Iterator[Any]]
    run: Callable[[Communicator, Any], _Measured]

    def cases_for(self, comm: Communicator) -> Iterator[Any]:
        """Yield the cases for these ranks; between nodes two types stand for all."""
        for case in self.cases(comm.size):
            if comm.num_nodes == 1 or case.dtype in ("bfloat16", "float32"):
                yield case


_NOTHING = (None,) * 4
_OPERATORS = (
    _Operator("allgather_gemm", _gemm_cases, _allgather_gemm),
    _Operator("gemm_reduce_scatter", _sum_cases, _gemm_reduce_scatter),
    _Operator("gemm_allreduce", _sum_cases, _gemm_allreduce),
    _Operator("ring_attention", _attention_cases, _ring_attention),
    _Operator("moe_dispatch_gemm", lambda n: _expert_cases(n, *_NOTHING), _moe_dispatch_gemm),
    _Operator("moe_combine", lambda n: _expert_cases(n, *_NOTHING), _moe_combine),
    _Operator("moe_layer", lambda n: _expert_cases(n, "swiglu", "silu", "gelu", None), _moe_layer),
)


def demo(comm: Communicator, arguments: argparse.Namespace) -> int:
    """Run all cases of all operators, print a table, and raise `CommandError` if one is wrong."""
    if arguments.ranks not in (None, comm.size):
        raise CommandError(
            f"the world has {comm.size} rank(s), --ranks asks for {arguments.ranks}: start it with "
            "the launcher of the MPI that mpi4py uses (mkernel-cp doctor names it)"
        )
    verbose = comm.rank == 0 and not arguments.json
    if verbose:
        print(_title(comm), flush=True)
        print(_line([heading for heading, _ in _HEADINGS]), flush=True)
    rows = []
    for operator in _OPERATORS:
        for case in operator.cases_for(comm):
            rows.append(_run(comm, operator, case))
            if verbose:
                print(rows[-1], flush=True)
    if comm.rank == 0 and arguments.json:
        print(_json(comm, rows), flush=True)
    wrong = sum(not row.ok for row in rows)
    if wrong:
        raise CommandError(
            f"{wrong} of {len(rows)} rows are wrong: an error above its bound, or bytes that were "
            "not planned"
        )
    if verbose:
        print(f"all {len(rows)} rows agree with the reference", flush=True)
    return 0


def _run(comm: Communicator, operator: _Operator, case: Any) -> Row:
    measured = operator.run(comm, case)
    everyone = runtime_of(comm).agree("the next row of the demo", lambda: measured)
    counted, planned = (sum(getattr(m, x) for m in everyone) for x in ("counted", "planned"))
    error = max(m.error for m in everyone)
    calls = 1 + _WARM_CALLS
    return Row(
        operator=operator.name,
        shape=case.shape,
        row_counts=case.row_counts,
        dtype=case.dtype,
        out_dtype=case.out_dtype,
        world=comm.size,
        target=comm.target,
        error_over_bound=error,
        bytes_from_peers=counted // calls,
        bytes_planned=planned // calls,
        ms=max(m.ms for m in everyone),
        ok=error <= 1 and all(m.counted == m.planned for m in everyone),
    )


def _note(comm: Communicator) -> str:
    runtime, network = runtime_of(comm), ""
    shared = "; ranks share GPUs" if runtime.machine.shared else ""
    if runtime.network:
        soft = "network cards made of software, whose bytes are counted too"
        network = (
            f"; nodes of {list(runtime.topology.sizes)} ranks meet over "
            f"{runtime.network.transport} on "
            + (soft if _counts(comm) else ", ".join(runtime.network.cards))
        )
    return _TARGETS[comm.target] + shared + network


def _title(comm: Communicator) -> str:
    nodes = "node" if comm.num_nodes == 1 else "nodes"
    ranks = "rank" if comm.size == 1 else "ranks"
    return (
        f"mkernel_cp {__version__}, {comm.size} {ranks} on {comm.num_nodes} {nodes}, "
        f"target {comm.target}: {_note(comm)}"
    )


def _line(cells: Sequence[object]) -> str:
    form = zip(cells, _HEADINGS, strict=True)
    return "  ".join(f"{cell:{width}}" for cell, (_, width) in form)


def _json(comm: Communicator, rows: Sequence[Row]) -> str:
    records = [asdict(row) for row in rows]
    for record in records:
        if not math.isfinite(record["error_over_bound"]):
            record["error_over_bound"] = None  # JSON has no infinity
    return json.dumps(
        {
            "version": __version__,
            "world": comm.size,
            "nodes": comm.num_nodes,
            "target": comm.target,
            "note": _note(comm),
            "ok": all(row.ok for row in rows),
            "rows": records,
        },
        indent=2,
        allow_nan=False,
    )
