"""Tokens and the experts that they choose, for the tests of the operators on experts."""

import functools
from dataclasses import dataclass

import numpy as np

from mkernel_cp import reference

ROUTINGS = ("uniform", "zipf", "one expert", "one rank", "hot", "none", "repeats")


@dataclass(frozen=True)
class ExpertCase:
    """One call on all ranks."""

    name: str
    tokens: tuple[int, ...]
    h: int
    n: int
    experts: int
    slots: int
    dtype: str
    routing: str = "uniform"
    out_dtype: str | None = None
    activation: str | None = None
    columns: int = 0  # that a layer makes

    @property
    def world(self):
        return len(self.tokens)

    @property
    def counts(self):
        """Experts of every rank."""
        return reference.array_split_counts(self.experts, self.world)

    def __str__(self):
        tokens = "+".join(map(str, self.tokens))
        routing = self.routing.replace(" ", "-")
        return (
            f"{self.name}-{tokens}x{self.h}x{self.n}-{self.experts}e{self.slots}-{self.dtype}-"
            f"{routing}"
        )


def choose(random, tokens, slots, experts, routing, ranks):
    """Ids of some tokens, as the routing says; every one is different unless it repeats."""
    ids = np.full((tokens, slots), -1)
    if not experts or routing == "none":
        return ids
    chances = np.ones(experts)
    if routing == "zipf":
        chances = 1.0 / np.arange(1, experts + 1)
    elif routing == "one rank":  # the last one that has an expert
        counts = reference.array_split_counts(experts, ranks)
        chances[: sum(counts[: np.flatnonzero(counts)[-1]])] = 0
    for row in ids:
        if routing == "repeats":
            row[:] = random.integers(-1, experts, slots)
            continue
        wanted = 1 if routing == "one expert" else min(slots, np.count_nonzero(chances))
        chosen = random.choice(experts, wanted, replace=False, p=chances / chances.sum())
        if routing == "one expert" or (routing == "hot" and 0 not in chosen):
            chosen[:1] = 0
        row[random.permutation(slots)[:wanted]] = chosen
        if routing == "uniform":
            row[random.random(slots) < 0.1] = -1
    return ids


@functools.lru_cache(maxsize=64)
def ids_of(case, seed, tokens=None):
    """The choices of all ranks."""
    random = np.random.default_rng([seed, case.experts, case.slots])
    return [
        choose(random, count, case.slots, case.experts, case.routing, case.world)
        for count in tokens or case.tokens
    ]


@functools.lru_cache(maxsize=64)
def tokens_of(case, seed, tokens=None):
    """The tokens of all ranks."""
    random = np.random.default_rng([seed, case.h])
    return [
        random.standard_normal((count, case.h)).astype(case.dtype)
        for count in tokens or case.tokens
    ]


@functools.lru_cache(maxsize=64)
def weights_of(case, rank):
    """A rank's experts."""
    random = np.random.default_rng([rank, case.h, case.n])
    return random.standard_normal((case.counts[rank], case.h, case.n)).astype(case.dtype)


@functools.lru_cache(maxsize=256)
def expected(case, seed, rank, tokens=None):
    """The reference of one rank."""
    return reference.moe_dispatch_gemm(
        tokens_of(case, seed, tokens),
        ids_of(case, seed, tokens),
        weights_of(case, rank),
        rank,
        case.experts,
        case.out_dtype,
    )


@functools.lru_cache(maxsize=64)
def router_weights_of(case, seed, tokens=None):
    """The weights of the choices of all ranks."""
    random = np.random.default_rng([seed, case.slots])
    dtype = reference.accumulator_dtype(case.dtype)
    return [
        random.standard_normal((count, case.slots)).astype(dtype) for count in tokens or case.tokens
    ]


@functools.lru_cache(maxsize=64)
def rows_of(case, seed, tokens=None):
    """Rows of all ranks, as experts may have made them."""
    random = np.random.default_rng([seed, case.n])
    return [
        random.standard_normal((route.expert_offsets[-1], case.n)).astype(case.dtype)
        for rank in range(case.world)
        for route in (reference.moe_routing(ids_of(case, seed, tokens), rank, case.experts),)
    ]


@functools.lru_cache(maxsize=256)
def expected_sum(case, seed, rank, transfer_dtype=None, tokens=None, nodes=None):
    """The reference of one rank."""
    return reference.moe_combine(
        rows_of(case, seed, tokens),
        ids_of(case, seed, tokens),
        router_weights_of(case, seed, tokens)[rank],
        rank,
        case.experts,
        transfer_dtype,
        nodes,
    )


@functools.lru_cache(maxsize=64)
def layer_weights_of(case):
    """The first and the second weights of all ranks."""
    random = np.random.default_rng([case.h, case.n, case.columns])
    halves = 2 if case.activation == "swiglu" else 1
    return tuple(
        [
            (random.standard_normal((count, *shape)) / np.sqrt(max(1, shape[0]))).astype(case.dtype)
            for count in case.counts
        ]
        for shape in ((case.h, halves * case.n), (case.n, case.columns))
    )


@functools.lru_cache(maxsize=256)
def expected_layer(case, seed, rank, transfer_dtype=None, tokens=None, nodes=None):
    """The reference of one rank."""
    return reference.moe_layer(
        tokens_of(case, seed, tokens),
        ids_of(case, seed, tokens),
        router_weights_of(case, seed, tokens)[rank],
        *layer_weights_of(case),
        rank,
        case.experts,
        case.activation,
        transfer_dtype,
        nodes,
    )
