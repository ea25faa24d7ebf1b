"""What `tune` measures: each operator with operands of one shape, for any options."""

import abc
import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import reference
from ..communicator import Communicator, runtime_of
from ..operators.allgather_gemm import AllGatherGemm
from ..operators.gemm import GemmOperator
from ..operators.gemm_allreduce import GemmAllReduce
from ..operators.gemm_reduce_scatter import GemmReduceScatter
from ..operators.moe_combine import MoeCombine
from ..operators.moe_dispatch_gemm import DispatchLayout, MoeDispatchGemm
from ..operators.moe_layer import MoeLayer
from ..plan import Options
from .data import normal
from .moe import Route, choose, layout_of

SETS = 3  # of operands, used in turn: what the call before has left in a cache is of no use


@dataclass(frozen=True, eq=False)
class Operands:
    """One set of what an operator takes, and where it puts its result."""

    own: tuple[Any, ...]
    out: Any


class Subject(abc.ABC):
    """An operator with sets of operands. Collective.

    Attributes
    ----------
    has_tiles, has_chunks : bool
        Whether its plans choose these.
    sets : list of Operands
    """

    has_tiles: bool = True
    has_chunks: bool = True
    sets: list[Operands]

    def __init__(self, comm: Communicator, dtype: np.dtype):
        self._comm, self._dtype = comm, dtype
        self._numpy = np if comm.target == "host" else importlib.import_module("cupy")

    @abc.abstractmethod
    def plan(self, options: Options) -> Any:
        """Return the operator, planned for the operands: a context manager."""

    def call(self, step: Any, number: int) -> Any:
        """Make a call of a plan with one of the sets; return the result."""
        one = self.sets[number % SETS]
        return step(*one.own, out=one.out)

    def _normal(self, seed: int, shape: tuple[int, ...]) -> Any:
        return normal(self._numpy, self._dtype, seed, shape)

    def _shared(self, array: Any) -> Any:
        """Return an array where peers can read it."""
        to = self._comm.empty(array.shape, array.dtype)
        runtime_of(self._comm).machine.copy(to, array)
        return to


class GemmSubject(Subject):
    """A product with communication.

    Parameters
    ----------
    kind : type of GemmOperator
    comm : Communicator
    dtype : numpy.dtype
    shape : tuple of int
        M, K and N, as for `tuning.Entry`; M is split as by `numpy.array_split`.
    """

    def __init__(
        self,
        kind: type[GemmOperator],
        comm: Communicator,
        dtype: np.dtype,
        shape: tuple[int, int, int],
    ):
        super().__init__(comm, dtype)
        self._kind, (m, k, n) = kind, shape
        self.has_chunks = kind is AllGatherGemm
        counts = comm.row_counts(m)
        self._asked = {} if kind is GemmAllReduce else {"row_counts": counts}
        rows = counts[comm.rank] if kind is AllGatherGemm else m
        out_rows = counts[comm.rank] if kind is GemmReduceScatter else m
        self.sets = []
        for number in range(SETS):
            seed = 2 * (number * comm.size + comm.rank)
            a = self._shared(self._normal(seed, (rows, k)))
            own = a, self._normal(seed + 1, (k, n))
            self.sets.append(Operands(own, runtime_of(comm).machine.empty((out_rows, n), dtype)))

    def plan(self, options: Options) -> Any:
        return self._kind(*self.sets[0].own, comm=self._comm, options=options, **self._asked)


class ExpertsSubject(Subject):
    """An operator on experts, which tokens choose uniformly.

    Parameters
    ----------
    comm : Communicator
    dtype : numpy.dtype
    shape : tuple of int
        As for `tuning.Entry`; tokens and experts are split as by `numpy.array_split`.
    """

    def __init__(self, comm: Communicator, dtype: np.dtype, shape: tuple[int, ...]):
        super().__init__(comm, dtype)
        tokens, *columns, experts, k = shape
        counts = comm.row_counts(tokens)
        ids = choose(tokens, experts, k, "uniform")
        own = ids[comm.rows(tokens)]
        route = Route(ids, counts, experts, comm.rank)
        self._rows = len(route.row_slots)
        self._asked = {
            "num_experts": experts,
            "max_tokens": max(counts),
            "capacity": route.capacity,
        }
        limits = max(counts), route.capacity
        self._layout: DispatchLayout = layout_of(comm, own, experts, *limits, dtype)
        self._ids = runtime_of(comm).machine.asarray(own, None)
        self._experts = comm.row_counts(experts)[comm.rank]
        self.sets = [
            self._operands(4 * (number * comm.size + comm.rank), *columns) for number in range(SETS)
        ]

    @abc.abstractmethod
    def _operands(self, seed: int, *columns: int) -> Operands:
        """Return a set; four seeds are its own."""

    def _weights(self, seed: int) -> Any:
        """Return the weights of the choices."""
        values = np.random.default_rng(seed).random(self._ids.shape)
        values = values.astype(reference.accumulator_dtype(self._dtype))
        return runtime_of(self._comm).machine.asarray(values, None)


class DispatchSubject(ExpertsSubject):
    """`moe_dispatch_gemm`."""

    def _operands(self, seed: int, h: int, i: int) -> Operands:
        x = self._shared(self._normal(seed, (len(self._ids), h)))
        w = self._normal(seed + 1, (self._experts, h, i))
        rows = runtime_of(self._comm).machine.empty((self._asked["capacity"], i), self._dtype)
        return Operands((x, self._ids, w), rows)

    def plan(self, options: Options) -> Any:
        return MoeDispatchGemm(*self.sets[0].own, comm=self._comm, options=options, **self._asked)

    def call(self, step: Any, number: int) -> Any:
        one = self.sets[number % SETS]
        return step(*one.own, out=(one.out, self._layout))[0][: self._rows]


class CombineSubject(ExpertsSubject):
    """`moe_combine`."""

    has_tiles = False

    def _operands(self, seed: int, n: int) -> Operands:
        rows = self._normal(seed, (self._rows, n))
        own = rows, self._weights(seed + 1), self._layout
        return Operands(own, runtime_of(self._comm).machine.empty((len(self._ids), n), self._dtype))

    def plan(self, options: Options) -> Any:
        return MoeCombine(*self.sets[0].own, comm=self._comm, options=options)


class LayerSubject(ExpertsSubject):
    """`moe_layer` with swiglu."""

    def _operands(self, seed: int, h: int, i: int) -> Operands:
        x = self._shared(self._normal(seed, (len(self._ids), h)))
        w1 = self._normal(seed + 1, (self._experts, h, 2 * i))
        w2 = self._normal(seed + 2, (self._experts, i, h))
        own = x, self._ids, self._weights(seed + 3), w1, w2
        return Operands(own, runtime_of(self._comm).machine.empty((len(self._ids), h), self._dtype))

    def plan(self, options: Options) -> Any:
        return MoeLayer(*self.sets[0].own, comm=self._comm, options=options, **self._asked)


SUBJECTS: dict[str, Callable[[Communicator, np.dtype, tuple[int, ...]], Subject]] = {
    **{
        kind.function: functools.partial(GemmSubject, kind)
        for kind in (AllGatherGemm, GemmReduceScatter, GemmAllReduce)
    },
    "moe_dispatch_gemm": DispatchSubject,
    "moe_combine": CombineSubject,
    "moe_layer": LayerSubject,
}
