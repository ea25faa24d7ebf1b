"""`ring_attention` beside a library's attention with all keys here, and a ring around that."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import reference
from ..attention_plan import Attention, Run, zigzag_counts
from ..operators.ring_attention import RingAttention, ring_attention
from . import baselines
from .baselines import available
from .data import Operands
from .operator import OperatorBench, Sample, Shape, Work

SHAPES = {
    "cuda": tuple((s, 4, 16, 16, 128) for s in (12288, 24576, 49152)),
    "host": ((96, 2, 4, 2, 16), (101, 1, 6, 3, 5)),
}
QUICK_SHAPES = {name: shapes[:1] for name, shapes in SHAPES.items()}


@dataclass(frozen=True, eq=False, kw_only=True)
class AttentionOperands(Operands):
    """One set of what `ring_attention` takes and gives.

    Attributes
    ----------
    kv : array (2, B, S_r, Hkv, D)
        This rank's keys and values.
    whole : array (2, B, S, Hkv, D)
        Those of all ranks, in the order of the sequence.
    attention : Attention
    """

    kv: Any
    whole: Any
    attention: Attention


class RingAttentionBench(OperatorBench):
    """`ring_attention`: S counts the positions of all ranks."""

    operator = "ring_attention"
    step_type, function = RingAttention, ring_attention
    choices = ()
    within_node = True
    shapes, quick_shapes = SHAPES, QUICK_SHAPES

    def _load(self) -> None:
        super()._load()
        host = self._comm.target == "host"
        self._attend = self._attempt(baselines.NumpyAttention if host else baselines.TorchAttention)

    def _small(self, ranks: int) -> Shape:
        return 32 * ranks, 1, 2, 2, 64

    def _communication(self) -> Any:
        return baselines.Ring(self._comm)

    def result(self, returned: Any, one: AttentionOperands) -> Any:
        return returned.reshape(-1, returned.shape[-1])

    def _compute(self, sets: Sequence[AttentionOperands]) -> Work:
        """Return attention of this rank's queries over all keys, which are here."""
        attend, causal, rank = available(self._attend), self._variant["causal"], self._comm.rank

        def call(one: AttentionOperands) -> Any:
            with attend.queued():
                for run in one.attention.held_by(rank):
                    k, v = one.whole[:, :, : run.position + run.count] if causal else one.whole
                    found, _ = attend(_of(one.own[0], run), k, v, causal)
                    attend.store(found, _of(one.out, run))
            return self.result(one.out, one)

        return call

    def _unfused(self, sets: Sequence[AttentionOperands]) -> Work:
        """Return the same with the keys of one rank after the other, which go around the ring."""
        attend, ring = available(self._attend), available(self._library)
        causal, rank, size = self._variant["causal"], self._comm.rank, self._comm.size
        agreed, (two, batch, _, *head) = sets[0].attention, sets[0].kv.shape
        held = [agreed.held_by(source) for source in range(size)]
        shapes = [(two, batch, count, *head) for count in agreed.seq_counts]
        rooms = [self._machine.empty((max(map(math.prod, shapes)),), self._dtype) for _ in range(2)]

        def call(one: AttentionOperands) -> Any:
            kv, merged = one.kv, [None] * len(held[rank])
            with attend.queued():
                for step in range(size):
                    source, last = (rank - step) % size, step + 1 == size
                    if not last:
                        shape = shapes[source - 1]
                        following = rooms[step % 2][: math.prod(shape)].reshape(shape)
                        ring.start(kv, following)
                    for i, own in enumerate(held[rank]):
                        for run in held[source]:
                            if causal and run.position > own.position:
                                continue
                            k, v = (_of(x, run) for x in kv)
                            found = attend(_of(one.own[0], own), k, v, causal and run == own)
                            merged[i] = merge(attend.numpy, merged[i], found)
                    if not last:
                        ring.wait()
                        kv = following
                for own, (found, _) in zip(held[rank], merged, strict=True):
                    attend.store(found, _of(one.out, own))
            return self.result(one.out, one)

        return call

    def _bytes_in(self, one: AttentionOperands, shape: Shape) -> int:
        agreed = one.attention
        pulled = (agreed.pulled(rank) for rank in range(agreed.ranks))
        return agreed.units * agreed.bytes_of(max(sum(run.count for run in x) for x in pulled))

    def operands(
        self, positions: int, batch: int, heads: int, kv_heads: int, columns: int, number: int
    ) -> AttentionOperands:
        """Return random operands; every rank knows all keys and values.

        A rank alone has all positions, for its share of the batch or else of the heads.
        """
        comm, machine, dtype, seed = self._comm, self._machine, self._dtype, 1000 * (1 + number)
        zigzag = self._variant["layout"] == "zigzag"
        counts = zigzag_counts(positions, comm.size) if zigzag else comm.row_counts(positions)
        own, scale = counts[comm.rank], 1 / math.sqrt(columns)
        extents = batch, counts, heads, kv_heads, columns
        attention = Attention(*extents, dtype, scale=scale, **self._variant)
        whole = self._normal(seed, (2, batch, positions, kv_heads, columns))
        kv = comm.empty((2, batch, own, kv_heads, columns), dtype)
        for run in attention.held_by(comm.rank):
            end = run.position + run.count
            for to, source in zip(kv, whole, strict=True):
                machine.copy(_of(to, run), source[:, run.position : end])
        q = self._normal(seed + 1 + comm.rank, (batch, own, heads, columns))
        if batch % comm.size == 0:
            entries, share = batch // comm.size, kv_heads
        else:
            entries, share = 1, -(-batch * kv_heads // comm.size)
        size, group = entries * positions * share * columns, heads // kv_heads
        fewer = (x.reshape(-1)[:size].reshape(entries, positions, share, columns) for x in whole)
        like_q = self._normal(seed + 500 + comm.rank, (entries, positions, share * group, columns))
        return AttentionOperands(
            own=(q, *kv),
            out=machine.empty(q.shape, dtype),
            asked={"seq_counts": counts, **self._variant},
            alike=(like_q, *fewer),
            made=machine.empty(like_q.shape, dtype),
            asked_alone={"causal": self._variant["causal"]},
            kv=kv,
            whole=whole,
            attention=attention,
        )

    def _samples(self, one: AttentionOperands) -> dict[str, Sample]:
        """Return what to look at: some rows of heads, at the borders of runs too."""
        alone = Run(0, 0, one.whole.shape[2], 0)
        sample = self._sample(
            one.own[0], one.whole, one.attention.held_by(self._comm.rank), one.out
        )
        return {
            "compute_ms": sample,
            "engine_ms": self._sample(one.alike[0], one.alike[1:], [alone], one.made),
            "fused_ms": sample,
            "unfused_ms": sample,
        }

    def _sample(self, q: Any, kv: Any, held: Sequence[Run], out: Any) -> Sample:
        """Return the same of queries that hold some runs of the sequence, over all keys."""
        asnumpy, (k, _), heads = self._machine.asnumpy, kv, q.shape[2]
        positions = [run.position + i for run in held for i in range(run.count)]
        borders = [run.first * heads for run in held]
        rows, columns = self._some(out.reshape(-1, out.shape[-1]), borders)
        value, bound = (np.empty((len(rows), len(columns))) for _ in range(2))
        for i, row in enumerate(asnumpy(rows)):
            b, place, head = np.unravel_index(row, q.shape[:3])
            seen = positions[place] + 1 if self._variant["causal"] else k.shape[1]
            kv_head = head // (heads // k.shape[2])
            keys = (x[b : b + 1, :seen, kv_head : kv_head + 1] for x in kv)
            # Of two ranks, the second, which has one position.
            k_blocks, v_blocks = (np.split(asnumpy(x), [seen - 1], axis=1) for x in keys)
            query = asnumpy(q[b : b + 1, place : place + 1, head : head + 1])
            expected, _ = reference.ring_attention(query, k_blocks, v_blocks, 1)
            value[i], bound[i] = (
                x.ravel()[asnumpy(columns)] for x in (expected.value, expected.bound)
            )
        return Sample(out, rows, columns, reference.Expected(value, bound, self._dtype))


def _of(array: Any, run: Run) -> Any:
    """Return what an array (B, S_r, H, D) of the rank that holds a run has of it."""
    return array[:, run.first : run.first + run.count]


def merge(numpy: Any, one: tuple[Any, Any] | None, other: tuple[Any, Any]) -> tuple[Any, Any]:
    """Return attention over the keys of two results, each with its log-sum-exp, in float32."""
    if one is None:
        out, lse = other
        return out * numpy.ones_like(lse)[..., None], lse
    lse = numpy.logaddexp(one[1], other[1])
    parts = (out * numpy.exp(part - lse)[..., None] for out, part in (one, other))
    return sum(parts), lse
