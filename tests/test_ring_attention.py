"""`ring_attention` against its reference, through small windows, delays and failures."""

import contextlib
import functools
import json
import re
import time
from dataclasses import dataclass

import numpy as np
import pytest
import simulations
import worlds
from shapes import DTYPES

import mkernel_cp as mk
from mkernel_cp import reference
from mkernel_cp.attention_plan import (
    Attention,
    RingAttentionPlan,
    attention_tiles,
    choose_attention_tile,
    plan_ring_attention,
    zigzag_counts,
)
from mkernel_cp.tiles import Gpu

LAYOUTS = ("contiguous", "zigzag")


@dataclass(frozen=True)
class AttentionCase:
    """One call on all ranks."""

    name: str
    seq_counts: tuple[int, ...]
    heads: tuple[int, int]
    columns: int
    dtype: str
    causal: bool = False
    layout: str = "contiguous"
    batch: int = 1
    scale: float | None = None

    @property
    def world(self):
        return len(self.seq_counts)

    def __str__(self):
        counts, heads = ("+".join(map(str, x)) for x in (self.seq_counts, self.heads))
        mask = "causal" if self.causal else "full"
        return (
            f"{self.name}-{self.batch}x{counts}x{heads}x{self.columns}-{self.dtype}-{mask}-"
            f"{self.layout}"
        )


def counts_in(layout, positions, world):
    """Positions of every rank, as even as they get."""
    if layout == "zigzag":
        return tuple(map(len, mk.zigzag_split(np.arange(positions), world, axis=0)))
    return reference.array_split_counts(positions, world)


def cases(world):
    """The edges; `dtypes` take turns, and so do masks and layouts."""
    made = []

    def add(name, positions, heads, columns, **more):
        number = len(made)
        causal = more.pop("causal", number % 2 == 0)
        layout = more.pop("layout", LAYOUTS[number // 2 % 2])
        if isinstance(positions, int):
            positions = counts_in(layout, positions, world)
        dtype = DTYPES[(number + world) % 4]
        made.append(
            AttentionCase(name, tuple(positions), heads, columns, dtype, causal, layout, **more)
        )

    for positions in (7, 65, 129):
        for causal in (False, True):
            for layout in LAYOUTS:
                add("odd", positions, (2, 1), 8, causal=causal, layout=layout)
    for columns in (1, 40, 64, 256):
        add("columns", 33, (2, 2), columns)
    for heads in ((8, 2), (8, 1), (3, 3)):
        for causal in (False, True):
            add("heads", 30, heads, 8, batch=2, causal=causal)
    uneven = [(67, 0, 33, 1)[rank % 4] for rank in range(world)]
    for counts in (uneven, uneven[::-1], [3 * (rank == world - 1) for rank in range(world)]):
        for causal in (False, True):
            add("uneven", counts, (4, 2), 16, causal=causal, layout="contiguous")
    add("scale", 20, (2, 2), 8, scale=-0.7)
    add("nothing", 0, (2, 2), 8)
    add("no batch", 12, (2, 2), 8, batch=0)
    add("long", 300, (1, 1), 24, causal=True, layout="zigzag")
    for number, dtype in enumerate(DTYPES):
        layout = LAYOUTS[number % 2]
        counts = counts_in(layout, 70, world)
        made.append(AttentionCase("dtype", counts, (4, 2), 32, dtype, True, layout))
    return made


CASES = [case for world in worlds.SIZES for case in cases(world)]


@functools.lru_cache(maxsize=64)
def blocks_of(case, seed):
    """Queries, keys and values of all ranks."""
    random = np.random.default_rng([seed, case.columns, *case.seq_counts])
    return tuple(
        [
            random.standard_normal((case.batch, count, heads, case.columns)).astype(case.dtype)
            for count in case.seq_counts
        ]
        for heads in (case.heads[0], case.heads[1], case.heads[1])
    )


@functools.lru_cache(maxsize=256)
def expected(case, seed, rank):
    q, k, v = blocks_of(case, seed)
    return reference.ring_attention(
        q[rank], k, v, rank, causal=case.causal, scale=case.scale, layout=case.layout
    )


def call(comm, case, seed, **keywords):
    """One call on poisoned memory; out and the log-sum-exp."""
    q, k, v = (worlds.put(comm, blocks[comm.rank]) for blocks in blocks_of(case, seed))
    accumulator = reference.accumulator_dtype(case.dtype)
    shape = (case.batch, case.heads[0], case.seq_counts[comm.rank])
    outs = (
        worlds.put(comm, worlds.nan_filled(q.shape, case.dtype)),
        worlds.put(comm, worlds.nan_filled(shape, accumulator)),
    )
    worlds.poison(comm)
    result = mk.ring_attention(
        q,
        k,
        v,
        comm=comm,
        seq_counts=None if len(set(case.seq_counts)) == 1 else case.seq_counts,
        causal=case.causal,
        scale=case.scale,
        layout=case.layout,
        return_lse=True,
        out=outs,
        **keywords,
    )
    assert result is outs
    return tuple(worlds.get(comm, out) for out in outs)


def assert_right(comm, case, seed, results):
    for part, result in zip(expected(case, seed, comm.rank), results, strict=True):
        part.assert_close(result, f"rank {comm.rank}")


@pytest.mark.operator
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_reference(case):
    def program(comm):
        for seed in (1, 2):
            assert_right(comm, case, seed, call(comm, case, seed))

    worlds.run(case.world, program)


@pytest.mark.operator
@pytest.mark.parametrize("units", [1, 2, 3])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_many_units_pass_through_a_small_window(size, units):
    """Slots are used again and again, by roles that start late."""
    layout = LAYOUTS[size % 2]
    counts = counts_in(layout, 21, size)
    case = AttentionCase("window", counts, (8, 4), 6, "float32", size > 2, layout, batch=2)
    slot = Attention(2, counts, 8, 4, 6, np.dtype("f4"), case.causal, 1.0, layout)
    slot = max(map(slot.slot_bytes, range(size)))

    def program(comm):
        options = mk.Options((2, 2), worlds.small_tile(comm, (4, 5, 6)), 60)
        worlds.chaos(comm, seed=size + units, delay_ns=(100_000, 400_000))
        asked = {"max_workspace": units * slot + slot // 2, "options": options}
        for seed in (1, 2, 3):
            assert_right(comm, case, seed, call(comm, case, seed, **asked))
        q, k, v = (blocks[comm.rank] for blocks in blocks_of(case, 1))
        q, k, v = (worlds.put(comm, x) for x in (q, k, v))
        agreed = {"seq_counts": counts, "causal": case.causal, "layout": layout, **asked}
        plan = mk.RingAttention(q, k, v, comm=comm, **agreed).plan
        assert plan.window == units
        assert plan.workspace <= asked["max_workspace"]

    worlds.run(size, program)


@pytest.mark.operator
@pytest.mark.parametrize("lanes", [1, 2, 3])
@pytest.mark.parametrize("size", worlds.SIZES)
def test_back_to_back_calls_with_late_ranks_and_roles(size, lanes):
    """Inputs change under the peers' eyes as soon as a call returns; so early reuse shows."""
    layout = LAYOUTS[lanes % 2]
    counts = (13, 0, 22, 5)[:size] if layout == "contiguous" else counts_in(layout, 37, size)
    case = AttentionCase("calls", counts, (2, 2), 8, "float32", lanes < 3, layout)

    def program(comm):
        worlds.chaos(comm, seed=7 * size + lanes, lanes=lanes, delay_ns=(1_000_000, 300_000))
        shape = (1, counts[comm.rank], 2, 8)
        q, k, v = (comm.empty(shape, np.float32) for _ in range(3))
        for seed in range(20):
            for x, blocks in zip((q, k, v), blocks_of(case, seed), strict=True):
                worlds.fill(comm, x, blocks[comm.rank])
            worlds.poison(comm)
            out = mk.ring_attention(
                q, k, v, comm=comm, seq_counts=counts, causal=case.causal, layout=layout
            )
            for x in (q, k, v):
                worlds.fill(comm, x, np.nan)
            expected(case, seed, comm.rank)[0].assert_close(worlds.get(comm, out))

    worlds.run(size, program)


@pytest.mark.operator
@pytest.mark.parametrize("size", worlds.SIZES)
def test_replayed_calls_equal_reference(size):
    """On GPUs the calls are captured once; inputs change, and other calls come between."""
    counts = counts_in("zigzag", 37, size)
    case = AttentionCase("graph", counts, (4, 2), 8, "float32", True, "zigzag")

    def program(comm):
        asked = {"comm": comm, "seq_counts": counts, "causal": True, "layout": "zigzag"}
        with worlds.stream(comm):
            shapes = [blocks[comm.rank].shape for blocks in blocks_of(case, 0)]
            sets = [[comm.zeros(shape, np.float32) for shape in shapes] for _ in range(2)]
            outs = [worlds.put(comm, np.zeros(shapes[0], np.float32)) for _ in sets]
            step = mk.RingAttention(*sets[0], **asked)

            def calls():
                for qkv, out in zip(sets, outs, strict=True):
                    step(*qkv, out=out)

            calls()
            comm.synchronize()
            replay = worlds.replayer(comm, calls)
            for seed in range(0, 20, 2):
                for number, qkv in enumerate(sets):
                    for x, blocks in zip(qkv, blocks_of(case, seed + number), strict=True):
                        worlds.fill(comm, x, blocks[comm.rank])
                replay()
                results = [*outs, *([mk.ring_attention(*sets[1], **asked)] if seed % 4 else [])]
                for number, out in enumerate(results):
                    right = expected(case, seed + min(number, 1), comm.rank)[0]
                    right.assert_close(worlds.get(comm, out))
            comm.synchronize()

    worlds.run(size, program)


@pytest.mark.operator(world=3)
@pytest.mark.parametrize("dtype", DTYPES)
def test_same_bits_over_repeats_and_splits(dtype):
    case = AttentionCase("bits", (30, 31, 9), (4, 2), 24, dtype, True)

    def program(comm):
        splits = [None, (1, 1), (3, 2), (2, 5)]
        return {
            b"".join(x.tobytes() for x in call(comm, case, 4, options=option))
            for option in [split and mk.Options(split, chunk_bytes=500) for split in splits]
            for _ in range(2)
        }

    assert all(len(bits) == 1 for bits in worlds.run(3, program))


@pytest.mark.operator(world=3)
def test_keys_and_values_in_a_segment_are_read_in_place_and_others_copied():
    counts = (5, 9, 4)
    case = AttentionCase("strides", counts, (3, 3), 8, "float32", True)
    blocks = blocks_of(case, 5)

    def program(comm):
        rank, n = comm.rank, counts[comm.rank]
        q, k, v = (x[rank] for x in blocks)
        packed = np.full((1, n, 3, 3, 11), np.nan, np.float32)
        for part, x in enumerate((q, k, v)):
            packed[:, :, part, :, 2:10] = x
        backward = np.ascontiguousarray(packed[:, ::-1])
        by_head = np.ascontiguousarray(np.stack((q, k, v)).transpose(0, 1, 3, 4, 2))
        forms = {
            "packed": ([packed[:, :, part, :, 2:10] for part in range(3)], packed, True),
            "backward": ([backward[:, ::-1, part, :, 2:10] for part in range(3)], backward, True),
            "D is not contiguous": ([x.transpose(0, 3, 1, 2) for x in by_head], by_head, False),
        }
        for name, (views, whole, contiguous) in forms.items():
            for shared in (False, True):
                if shared:
                    room = comm.empty(whole.shape, np.float32)
                    worlds.fill(comm, room, whole)
                else:
                    room = worlds.put(comm, whole)
                low = whole.ctypes.data
                q, k, v = (moved(room, view, view.ctypes.data - low) for view in views)
                step = mk.RingAttention(q, k, v, comm=comm, seq_counts=counts, causal=True)
                worlds.poison(comm)
                out = worlds.get(comm, step(q, k, v))
                expected(case, 5, rank)[0].assert_close(out, name)
                segment = step._params.own.keys.place.segment
                assert (segment != comm._runtime.memory.arena.number) == (shared and contiguous)

    worlds.run(3, program)


def moved(room, view, offset):
    """The same view of another array of the same bytes."""
    if isinstance(room, np.ndarray):
        flat = room.reshape(-1).view(np.uint8)
        return np.ndarray(view.shape, view.dtype, flat, offset, view.strides)
    import cupy

    return cupy.ndarray(view.shape, view.dtype, room.data + offset, view.strides)


@pytest.mark.operator(world=2)
def test_output_may_have_any_strides():
    case = AttentionCase("out", (9, 6), (4, 2), 5, "float64", True)

    def program(comm):
        q, k, v = (worlds.put(comm, blocks[comm.rank]) for blocks in blocks_of(case, 6))
        n = case.seq_counts[comm.rank]
        whole = worlds.put(comm, np.full((2, 4, 20, 13), np.nan))
        lse = worlds.put(comm, np.full((1, 9, 20), np.nan))
        outs = whole[1:, :, : 2 * n : 2, 12:2:-2].transpose(0, 2, 1, 3), lse[:, 1:9:2, n - 1 :: -1]
        mk.ring_attention(
            *(q, k, v),
            comm=comm,
            seq_counts=case.seq_counts,
            causal=True,
            return_lse=True,
            out=outs,
        )
        assert_right(comm, case, 6, [worlds.get(comm, out) for out in outs])
        assert np.isfinite(worlds.get(comm, whole)).sum() == outs[0].size
        assert np.isfinite(worlds.get(comm, lse)).sum() == outs[1].size

    worlds.run(2, program)


def test_uneven_elements_are_copied():
    case = AttentionCase("fields", (4, 4), (2, 2), 3, "float64")

    def program(comm):
        room = np.zeros((4, 1, 4, 2, 3), [("pad", "u1"), ("x", "f8")])
        for part, blocks in enumerate(blocks_of(case, 7)):
            room["x"][part] = blocks[comm.rank]
        *qkv, out = room["x"]
        mk.ring_attention(*qkv, comm=comm, out=out)
        expected(case, 7, comm.rank)[0].assert_close(np.ascontiguousarray(out))

    worlds.run(2, program)


@pytest.mark.operator(world=3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_masked_nan_does_not_leak_and_what_is_seen_acts_as_in_numpy(layout, dtype):
    counts = counts_in(layout, 25, 3)
    case = AttentionCase("nan", counts, (2, 1), 8, dtype, True, layout)
    q, k, v = ([x.copy() for x in blocks] for blocks in blocks_of(case, 8))
    for rank, position in ((0, 3), (1, 2), (2, 6)):
        k[rank][0, position], v[rank][0, position - 1, 0, 1] = np.nan, np.inf
    v[2][0, -1, 0, 2], v[2][0, 0, 0, 3] = np.nan, -np.inf

    def program(comm):
        own = (worlds.put(comm, x[comm.rank]) for x in (q, k, v))
        options = mk.Options(tile=worlds.small_tile(comm, (4, 3, 8)))
        out, lse = mk.ring_attention(
            *own,
            comm=comm,
            seq_counts=counts,
            causal=True,
            layout=layout,
            return_lse=True,
            options=options,
        )
        right = reference.ring_attention(q[comm.rank], k, v, comm.rank, causal=True, layout=layout)
        for part, result in zip(right, (out, lse), strict=True):
            part.assert_close(worlds.get(comm, result), f"rank {comm.rank}")
        return np.isfinite(right[0].value).mean()

    assert any(0 < part < 1 for part in worlds.run(3, program))


@pytest.mark.operator(world=4)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("causal", [False, True])
def test_a_rank_pulls_only_what_it_uses(causal, layout):
    counts = counts_in(layout, 40, 4)
    case = AttentionCase("bytes", counts, (4, 2), 8, "float32", causal, layout)
    starts = np.array([0, 5, 10, 15, 20, 25, 30, 35, 40])
    used = {
        (False, "contiguous"): [30, 30, 30, 30],
        (False, "zigzag"): [30, 30, 30, 30],
        (True, "contiguous"): [0, 10, 20, 30],
        (True, "zigzag"): [starts[8 - rank] - 10 for rank in range(4)],
    }[causal, layout]

    def program(comm):
        q, k, v = (worlds.put(comm, blocks[comm.rank]) for blocks in blocks_of(case, 1))
        with mk.RingAttention(q, k, v, comm=comm, causal=causal, layout=layout) as step:
            before = worlds.bytes_from_peers(comm)
            step(q, k, v)
            step(q, k, v)
            comm.synchronize()
            assert worlds.bytes_from_peers(comm) - before == 2 * step.plan.bytes_from_peers
            return step.plan.bytes_from_peers // (2 * 2 * 8 * 4)

    assert worlds.run(4, program) == used


def test_zigzag_split_and_join():
    x = np.arange(2 * 23 * 3).reshape(2, 23, 3)
    for ranks in (1, 2, 3, 4, 12, 15):
        parts = mk.zigzag_split(x, ranks)
        np.testing.assert_array_equal(mk.zigzag_join(parts), x)
        turned = mk.zigzag_split(x.T, ranks, axis=-2)
        np.testing.assert_array_equal(mk.zigzag_join(turned, axis=1), x.T)
    np.testing.assert_array_equal(mk.zigzag_split(np.arange(9), 2, axis=0)[0], [0, 1, 2, 7, 8])
    with pytest.raises(ValueError, match="at least 1"):
        mk.zigzag_split(x, 0)
    with pytest.raises(ValueError, match="no zigzag layout"):
        mk.zigzag_join([x[:, :20], x[:, 20:]])
    with pytest.raises(ValueError, match="no zigzag layout"):
        mk.zigzag_join([])


# --- plans ----------------------------------------------------------------------------------------


def attention(**changed):
    """What ranks agree on, for plans."""
    values = {
        "batch": 2,
        "seq_counts": (8, 8, 8),
        "heads": 4,
        "kv_heads": 2,
        "columns": 16,
        "dtype": np.dtype("f4"),
        "causal": False,
        "scale": 0.25,
        "layout": "contiguous",
    }
    return Attention(**{**values, **changed})


def walk_of(agreed, rank):
    return [(run.source, run.first, run.count, run.position) for run in agreed.walk(rank)]


def test_walks():
    assert walk_of(attention(), 1) == [(1, 0, 8, 8), (0, 0, 8, 0), (2, 0, 8, 16)]
    assert walk_of(attention(causal=True), 1) == [(1, 0, 8, 8), (0, 0, 8, 0)]
    assert walk_of(attention(seq_counts=(8, 0, 3)), 1) == []
    assert walk_of(attention(seq_counts=(8, 0, 3)), 2) == [(2, 0, 3, 8), (0, 0, 8, 0)]
    zigzag = attention(layout="zigzag", causal=True)
    own, others = [(1, 0, 4, 4), (1, 4, 4, 16)], [(0, 0, 4, 0), (2, 0, 4, 8), (2, 4, 4, 12)]
    assert walk_of(zigzag, 1) == own + others


def test_windows():
    agreed = attention()
    slot = 16 * 2 * 16 * 4
    assert agreed.slot_bytes(0) == slot
    assert agreed.window == agreed.units == 4
    assert attention(max_workspace=3 * slot - 1).window == 2
    with pytest.raises(ValueError, match=f"max_workspace=5: this needs at least {slot} bytes"):
        _ = attention(max_workspace=5).window
    assert attention(seq_counts=(24,), max_workspace=0).window == 4
    long = attention(seq_counts=(1 << 20, 1 << 20), batch=8)
    assert long.window == 2
    assert attention(causal=True, max_workspace=slot).slot_bytes(0) == 0


def test_plans_are_saved_and_choose_the_same_again(tmp_path):
    plan = plan_ring_attention(1, attention(chunk_bytes=500), mk.Options((2, 3), (4, 5, 16), 500))
    assert plan.chunk == 7
    plan.save(tmp_path / "plan.json")
    again = RingAttentionPlan.load(tmp_path / "plan.json")
    assert again == plan
    assert plan_ring_attention(1, again.attention, again.options) == plan
    text = plan.explain()
    for part in ("rank 1 of 3", "2 movers", "window of 4 of 4 units", "chunks of 7 positions"):
        assert part in text
    assert plan.memory > plan.workspace == plan.bytes_from_peers


@pytest.mark.parametrize(
    ("options", "text"),
    [(mk.Options(split=(0, 2)), "movers of their own"), (mk.Options(tile=(8, 8, 8)), "8, 8, 16")],
)
def test_options_that_do_not_fit_are_refused(options, text):
    with pytest.raises(ValueError, match=text):
        plan_ring_attention(0, attention(), options)


H100, SMALL = Gpu("sm_90a", 132, 227 << 10), Gpu("sm_86", 84, 99 << 10)


@pytest.mark.parametrize("gpu", [None, H100, SMALL], ids=lambda gpu: gpu and gpu.arch)
@pytest.mark.parametrize("dtype", DTYPES)
def test_tiles_that_a_refusal_advises_are_taken(dtype, gpu):
    for columns in range(1, 257):
        asked = attention(columns=columns, dtype=np.dtype(dtype), seq_counts=(500,) * 3)
        with pytest.raises(ValueError, match="attention takes all columns of a head") as refusal:
            choose_attention_tile(0, asked, mk.Options(tile=(128, 256, columns + 1)), gpu)
        _, _, advice = str(refusal.value).partition("all columns")
        tiles = [tuple(map(int, tile)) for tile in re.findall(r"\((\d+), (\d+), (\d+)\)", advice)]
        assert tiles
        for tile in tiles:
            assert choose_attention_tile(0, asked, mk.Options(tile=tile), gpu).tile == tile
        if gpu is not None and (128, 256, columns) not in tiles:
            with pytest.raises(ValueError, match=re.escape(advice)):
                choose_attention_tile(0, asked, mk.Options(tile=(128, 256, columns)), gpu)


def plan_for(gpu, capacity=264, options=None, **changed):
    return plan_ring_attention(0, attention(**changed), options or mk.Options(), gpu, capacity)


def test_plans_for_gpus():
    large = {"seq_counts": (3072,) * 4, "heads": 16, "kv_heads": 16, "dtype": np.dtype("f2")}
    large["columns"] = 128
    plan = plan_for(H100, 132, **large)
    assert (plan.target, plan.engine) == ("cuda", "hopper")
    assert plan.tile == (128, 128, 128)
    assert plan.split == (22, 110)  # keys for five heads, while agents are at own ones
    longer = {**large, "seq_counts": (6144,) * 4}
    assert plan_for(H100, 132, **longer).split == (4, 128)  # 24 tiles each, and time to bring them
    assert plan_for(H100, 132, **longer, causal=True, layout="zigzag").split[0] > 4
    assert "engine hopper: tile (128, 128, 128)" in plan.explain()
    portable = mk.Options(tile=(128, 64, 128))
    plan = plan_for(H100, options=portable, **large)
    assert (plan.target, plan.engine) == ("cuda", "portable")
    assert plan.split == (16, 248)
    assert plan_for(H100, options=portable, **{**large, "seq_counts": (49152,) * 4}).split == (
        4,
        260,
    )
    assert plan_for(H100, options=portable, **{**large, "seq_counts": (1024,) * 4}).split == (
        24,
        240,
    )
    assert 2 * (plan.shared_bytes + 1024) <= 228 << 10  # two blocks on a multiprocessor
    assert plan_ring_attention(0, plan.attention, plan.options, H100, 264) == plan
    assert plan_for(H100).split == (4, 8)  # little to move, and little to compute
    assert plan_for(H100, seq_counts=(24,)).split == (0, 8)
    messages = plan_for(H100, **large, nodes=(2, 2))
    assert messages.chunk == 2 * plan.chunk == 256
    large["options"] = mk.Options((2, None), (128, 64, 128))
    assert plan_for(H100, **large).split == (2, 262)
    with pytest.raises(ValueError, match=r"for float32 and D=16 a GPU takes \(64, 32, 16\)"):
        plan_for(H100, options=mk.Options(tile=(64, 64, 16)))
    large["options"] = mk.Options((200, 100))
    with pytest.raises(ValueError, match="264 agents"):
        plan_for(H100, **large)


@pytest.mark.parametrize("gpu", [H100, SMALL], ids=lambda gpu: gpu.arch)
@pytest.mark.parametrize("dtype", DTYPES)
def test_tiles_fit_every_gpu(dtype, gpu):
    dtype = np.dtype(dtype)
    tiles = attention_tiles(dtype, gpu)
    kernels = [tile.defines(dtype) for tile in tiles]
    for columns in (1, 8, 64, 65, 96, 128, 200, 256):
        tile = choose_attention_tile(0, attention(columns=columns, dtype=dtype), mk.Options(), gpu)
        takes_tensor_copies = gpu is H100 and dtype.itemsize == 2 and columns % 8 == 0
        assert tile.engine == ("hopper" if takes_tensor_copies else "portable")
        assert tile.shared_bytes(dtype) <= gpu.shared_bytes
        assert tile.defines(dtype)["MK_TILE_K"] >= columns
        assert tile.defines(dtype) in kernels


# --- wrong arguments and failures -----------------------------------------------------------------

Q, K = np.ones((2, 4, 4, 6)), np.ones((2, 4, 2, 6))
WRONG = {
    "a list": (TypeError, "ndarray", {"q": [1.0]}),
    "three dimensions": (ValueError, r"\(batch, positions, heads, D\)", {"k": K[0]}),
    "integers": (TypeError, "bfloat16, float16", {"q": Q.astype(int)}),
    "mixed": (TypeError, "same for all", {"v": K.astype("f4")}),
    "k and v": (ValueError, "same shape", {"v": K[:, :3]}),
    "batch": (ValueError, "same shape", {"q": Q[:1]}),
    "D differs": (ValueError, "same shape", {"q": Q[..., :5]}),
    "wide heads": (ValueError, "D=257", {x: np.ones((1, 2, 1, 257)) for x in "qkv"}),
    "no columns": (ValueError, "D=0", {x: np.ones((1, 2, 1, 0)) for x in "qkv"}),
    "heads": (ValueError, "3 heads, k and v have 2", {"q": Q[:, :, :3]}),
    "no heads": (ValueError, "multiple", {"k": K[:, :, :0], "v": K[:, :, :0]}),
    "counts of another world": (ValueError, "2 numbers", {"seq_counts": (4,)}),
    "other counts": (ValueError, "passes 4 positions", {"seq_counts": (5, 5)}),
    "layout": (ValueError, "contiguous, zigzag", {"layout": "striped"}),
    "causal": (TypeError, "causal='no': use True or False", {"causal": "no"}),
    "return_lse": (TypeError, "return_lse=2: use True or False", {"return_lse": 2}),
    "infinite scale": (ValueError, "finite", {"scale": np.inf}),
    "a word as scale": (TypeError, "number", {"scale": "big"}),
    "a bool as scale": (TypeError, "scale=True: use a number", {"scale": True}),
    "a bool of an array as scale": (TypeError, "use a number", {"scale": np.array(True)}),
    "little workspace": (ValueError, "at least 384 bytes", {"max_workspace": 383}),
    "negative workspace": (ValueError, "at least 0", {"max_workspace": -1}),
    "fractional workspace": (TypeError, "integer", {"max_workspace": 1e9}),
    "out of another shape": (ValueError, "the result has", {"out": np.ones((2, 4, 4, 5))}),
    "out of another dtype": (TypeError, "has float64$", {"out": np.ones(Q.shape, "f4")}),
    "one out": (TypeError, "a pair", {"return_lse": True, "out": np.ones(Q.shape)}),
    "options": (TypeError, "Options", {"options": {"tile": 3}}),
    "tf32": (TypeError, "as it is", {"options": mk.Options(tf32=True)}),
    "no movers": (ValueError, "movers", {"options": mk.Options((0, 1))}),
    "part of D": (ValueError, "all columns", {"options": mk.Options(tile=(2, 2, 2))}),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_on_all_ranks_leave_the_communicator_usable(name):
    kind, text, changed = WRONG[name]

    def program(comm):
        with pytest.raises(kind, match=text):
            mk.ring_attention(**{"q": Q, "k": K, "v": K, "comm": comm, **changed})
        np.testing.assert_allclose(mk.ring_attention(Q, K, K, comm=comm), 1.0)

    worlds.run(2, program)


def test_layouts_that_the_counts_do_not_fit_are_refused():
    def program(comm):
        n = (3, 4)[comm.rank]
        x = np.ones((1, n, 1, 2))
        mk.ring_attention(x, x, x, comm=comm, seq_counts=(3, 4), layout="zigzag")
        n = (4, 3)[comm.rank]
        x = np.ones((1, n, 1, 2))
        with pytest.raises(ValueError, match=r"hold \[3, 4\] of 7 positions; zigzag_split"):
            mk.ring_attention(x, x, x, comm=comm, seq_counts=(4, 3), layout="zigzag")

    worlds.run(2, program)


def test_overlapping_outputs_are_refused():
    def program(comm):
        room = comm.zeros((2, 4, 4, 6))
        with pytest.raises(ValueError, match="out overlaps q"):
            mk.ring_attention(room, K, K, comm=comm, out=room)
        with pytest.raises(ValueError, match="out overlaps v"):
            mk.ring_attention(Q, K, room[:, :, :2], comm=comm, out=room)
        lse = room.reshape(-1)[:32].reshape(2, 4, 4)
        with pytest.raises(ValueError, match=r"out\[1\] overlaps out\[0\]"):
            mk.ring_attention(Q, K, K, comm=comm, return_lse=True, out=(room, lse))

    worlds.run(2, program)


def test_a_plan_refuses_other_operands_and_calls_after_its_end():
    def program(comm):
        with mk.RingAttention(Q, K, K, comm=comm) as step:
            with pytest.raises(ValueError, match="this plan is for"):
                step(Q[:, :3], K[:, :3], K[:, :3])
            np.testing.assert_allclose(step(Q, K, K), 1.0)
        with pytest.raises(ValueError, match="closed"):
            step(Q, K, K)

    worlds.run(2, program)


@pytest.mark.operator(world=2)
def test_a_larger_problem_moves_the_arena_under_earlier_plans():
    small = AttentionCase("small", (5, 7), (2, 1), 4, "float32", True)
    large = AttentionCase("large", (150, 170), (4, 2), 32, "float32", True)

    def program(comm):
        for case in (small, large, small):
            assert_right(comm, case, 1, call(comm, case, 1))
            a, b = worlds.put(comm, np.full((3, 5), 2.0)), worlds.put(comm, np.eye(5))
            out = worlds.get(comm, mk.allgather_gemm(a, b, comm=comm))
            np.testing.assert_array_equal(out, 2.0)

    worlds.run(2, program)


DIFFERENT = {
    "batch": {x: y[:1] for x, y in (("q", Q), ("k", K), ("v", K))},
    "positions": {x: y[:, :3] for x, y in (("q", Q), ("k", K), ("v", K))},
    "heads": {"q": Q[:, :, :2]},
    "heads of keys": {"k": K[:, :, :1], "v": K[:, :, :1]},
    "columns": {x: y[..., :4] for x, y in (("q", Q), ("k", K), ("v", K))},
    "dtype": {x: y.astype("f4") for x, y in (("q", Q), ("k", K), ("v", K))},
    "mask": {"causal": True},
    "scale": {"scale": 0.5},
    "layout": {"layout": "zigzag"},
    "workspace": {"max_workspace": 1 << 20},
    "chunks": {"options": mk.Options(chunk_bytes=100)},
}


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("name", DIFFERENT)
def test_different_calls_are_told_on_all_ranks(name, warm):
    same = {"q": Q, "k": K, "v": K}

    def program(comm):
        other = {**same, **DIFFERENT[name]}
        if warm:
            for asked in (same, other):
                mk.ring_attention(comm=comm, **asked)
        with pytest.raises(mk.ArgumentMismatchError, match=r"rank \d calls ring_attention\(B="):
            mk.ring_attention(comm=comm, **(other if comm.rank == 1 else same))
        assert comm.closed

    def main(mpi):
        with contextlib.suppress(mk.Error), mk.Communicator(mpi) as comm:
            program(comm)

    mk.LocalWorld(3).run(main)


@pytest.mark.operator(world=3)
def test_only_the_log_sum_exp_may_be_asked_for_by_some():
    def program(comm):
        q, k = worlds.put(comm, Q), worlds.put(comm, K)
        for _ in range(2):
            out = mk.ring_attention(q, k, k, comm=comm, return_lse=comm.rank == 1)
            if comm.rank == 1:
                lse = worlds.get(comm, out[1])
                np.testing.assert_allclose(lse, np.log(12) + 6**0.5)
                out = out[0]
            np.testing.assert_allclose(worlds.get(comm, out), 1.0)

    worlds.run(3, program)


def outcomes(program, **options):
    """What three ranks raised, and their outputs."""

    def main(mpi):
        comm = mk.Communicator(mpi, **options)
        x = np.ones((1, 70, 3, 8))
        out = np.full(x.shape, 7.0)
        mk.ring_attention(x, x, x, comm=comm, causal=True, max_workspace=1 << 16)
        try:
            program(comm, x, out)
        except mk.Error as error:
            return error, out
        finally:
            with contextlib.suppress(mk.Error):
                comm.close()
        return None, out

    return mk.LocalWorld(3).run(main)


def again(comm, x, out, causal=True):
    mk.ring_attention(x, x, x, comm=comm, causal=causal, max_workspace=1 << 16, out=out)


@pytest.mark.parametrize("warm", [True, False])
@pytest.mark.parametrize("missing", range(3))
def test_a_rank_that_never_calls_ends_in_the_deadline_and_leaves_nan(missing, warm):
    def program(comm, x, out):
        if comm.rank != missing:
            again(comm, x, out, causal=warm)
        else:
            time.sleep(0.4)
            comm.synchronize()

    for rank, (error, out) in enumerate(outcomes(program, entry_timeout=0.2)):
        assert isinstance(error, mk.TimeoutError)
        assert f"rank {missing}" in str(error).lower()
        if rank == missing:
            assert (out == 7).all()
        elif not warm or rank > missing:  # what it sees is missing
            assert np.isnan(out).all()
        else:
            assert (np.isnan(out) | (out == 1)).all()


def test_a_rank_that_refuses_alone_is_quoted_by_the_others():
    def program(comm, x, out):
        again(comm, x[..., :0] if comm.rank == 2 else x, out)

    def tell(comm, x, out):
        if comm.rank < 2:
            program(comm, x, out)
        with pytest.raises(ValueError, match="D=0"):
            program(comm, x, out)
        raise mk.Error("refused")

    results = [error for error, _ in outcomes(tell)]
    assert str(results[2]) == "refused"
    for error in results[:2]:
        assert isinstance(error, mk.PeerError)
        assert "rank 2 raised instead of calling: ValueError" in str(error)


def test_a_late_rank_is_waited_for():
    def program(comm, x, out):
        time.sleep(0.2 * (comm.rank == 1))
        again(comm, x, out)
        np.testing.assert_allclose(out, 1.0)

    assert all(error is None for error, _ in outcomes(program, progress_timeout=0.1))


def test_a_trace_tells_of_chunks_and_tiles(tmp_path):
    def program(comm):
        with mk.trace(tmp_path / "trace.json"):
            mk.ring_attention(Q, K, K, comm=comm)

    worlds.run(2, program)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [(event["cat"], event["args"]) for event in events if event["ph"] == "X"]
    for rank in range(2):
        copied = [
            args["chunk"] for kind, args in spans if kind == "copy" and args["source"] == rank
        ]
        # Keys and values of four units, numbered over both ranks.
        assert sorted(copied) == [4 * i + 2 * rank + part for i in range(4) for part in (0, 1)]
        rows = [args for kind, args in spans if kind == "compute" and args["source"] == rank]
        assert sorted(args["columns"][0] for args in rows) == [0, 0, 1, 1, 2, 2, 3, 3]  # heads


# --- interleavings --------------------------------------------------------------------------------


class Simulated(simulations.World):
    def __init__(self, layout, causal, window, lanes, split, **options):
        counts = counts_in("zigzag", 8, 3) if layout == "zigzag" else (3, 0, 4)
        self.case = AttentionCase("turns", counts, (6, 3), 2, "float32", causal, layout)
        agreed = Attention(
            *(1, counts, 6, 3, 2, np.dtype("f4"), causal, 1.0, layout), nodes=options.get("nodes")
        )
        self.window, self.room = window, window * max(map(agreed.slot_bytes, range(3)))
        self.plan = mk.Options(split, (2, 2, 2), 16)
        super().__init__(lanes, **options)

    def prepare(self, comm):
        shapes = [x[comm.rank].shape for x in blocks_of(self.case, 0)]
        # Head by head, so that the network, too, takes them where they lie.
        qkv = [comm.empty((b, h, s, d), np.float32).swapaxes(1, 2) for b, s, h, d in shapes]
        out = np.empty(shapes[0], np.float32)
        asked = {"causal": self.case.causal, "layout": self.case.layout, "options": self.plan}
        counts = {"seq_counts": self.case.seq_counts, "max_workspace": self.room}
        step = mk.RingAttention(*qkv, comm=comm, **counts, **asked)
        assert step.plan.window == self.window
        return step, qkv, out, step.prepare(*qkv, out)

    def expected(self, rank, launch):
        return expected(self.case, launch, rank)[0].value

    def set_up(self, rank, launch):
        _, _, qkv, out, _ = self.ranks[rank]
        for x, blocks in zip(qkv, blocks_of(self.case, launch or 0), strict=True):
            x[...] = np.nan if launch is None else blocks[rank]
        out[...] = np.nan


@pytest.mark.parametrize(
    ("layout", "causal", "window", "lanes", "split"),
    [
        ("contiguous", False, 1, 1, (2, 2)),
        ("contiguous", True, 2, 1, (1, 2)),
        ("zigzag", True, 1, 1, (2, 3)),
        ("zigzag", False, 2, 2, (1, 1)),
    ],
)
def test_every_interleaving_gives_the_right_result(
    closed_behind, layout, causal, window, lanes, split
):
    world = closed_behind(Simulated(layout, causal, window, lanes, split))
    simulations.assert_right(world, 300 // lanes)


@pytest.mark.parametrize("part", range(12))
def test_a_stopped_rank_ends_all_waits_at_a_deadline(closed_behind, part):
    world = closed_behind(Simulated("zigzag", True, 1, 1, (2, 2)))
    simulations.assert_all_waits_end(world, part, part / 14)


@pytest.mark.parametrize("causal", [False, True])
def test_plans_count_what_queries_see(causal):
    agreed = attention(seq_counts=zigzag_counts(23, 3), causal=causal, layout="zigzag")
    for rank in range(3):
        held, walk = agreed.held_by(rank), agreed.walk(rank)
        queries, keys = (
            [run.position + i for run in runs for i in range(run.count)] for runs in (held, walk)
        )
        seen = sum(key <= query or not causal for query in queries for key in keys)
        assert agreed.pairs(rank, walk) == seen
        assert agreed.pairs(rank, agreed.pulled(rank)) == seen - agreed.pairs(rank, held)
