"""Plans are right for many shapes, without a device or a compiler."""

import dataclasses
import itertools
import json
import math

import numpy as np
import pytest
from shapes import ReductionCase, cases

import mkernel_cp as mk
from mkernel_cp import attention_plan, moe_plan, tiles
from mkernel_cp import plan as plans
from mkernel_cp.arguments import DTYPES as ALLOWED

CASES = [case for size in (1, 2, 3, 4, 7) for case in cases(count=10, seed=size, world=size)]
OPTIONS = (
    mk.Options(),
    mk.Options(chunk_bytes=20),
    mk.Options(split=(3, 5), tile=(16, 40, 24), chunk_bytes=1000),
    mk.Options(tile=(1024, 1, 1024), chunk_bytes=1 << 30),
)


def make(case, rank, options=OPTIONS[0], by_columns=False):
    return plans.plan_allgather_gemm(
        rank,
        case.row_counts,
        case.n_per_rank[rank],
        case.k,
        np.dtype(case.dtype),
        np.dtype(case.out_dtype),
        by_columns,
        options,
    )


def every_plan(case):
    for options in OPTIONS:
        for by_columns in (False, True):
            for rank in range(case.world):
                yield options, make(case, rank, options, by_columns)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_chunks_cover_every_element_once(case):
    """Numbered as Landing of landing.cuh does it: panels of k inside blocks of rows."""
    for options, by_columns in itertools.product(OPTIONS, (False, True)):
        plan = make(case, 0, options, by_columns)  # the same on all ranks: see the next test
        rows, depth = plan.chunk
        panels = -(-plan.k // depth)
        for rank in range(case.world):
            visits = np.zeros((case.row_counts[rank], plan.k), np.int8)
            for i in range(plan.chunks(rank)):
                first_row, first_k = i // panels * rows, i % panels * depth
                piece = visits[first_row : first_row + rows, first_k : first_k + depth]
                assert piece.size, "an empty chunk"
                piece += 1
            assert (visits == 1).all()
        unit = 16 // plan.dtype.itemsize
        run, whole = (rows, max(plan.row_counts)) if by_columns else (depth, plan.k)
        assert run % unit == 0 or run == max(1, whole)
        assert rows * depth * plan.dtype.itemsize <= max(options.chunk_bytes or 1 << 16, 16)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_all_ranks_choose_the_same_chunks_and_places(case):
    """A mover must find what its peer's plan says: only what a rank has for itself may differ."""
    for options in OPTIONS:
        for by_columns in (False, True):
            agreed = {
                (
                    *(plan.chunk, plan.arena_offsets(), plan.row_start),
                    *map(plan.chunks, range(case.world)),
                )
                for plan in (make(case, rank, options, by_columns) for rank in range(case.world))
            }
            assert len(agreed) == 1


@pytest.mark.parametrize("case", CASES, ids=str)
def test_places_in_the_arena_are_aligned_and_apart(case):
    for _, plan in every_plan(case):
        offsets = plan.arena_offsets()
        assert len(offsets) == case.world + 1
        assert offsets[0] == 0
        assert not any(offset % 64 for offset in offsets)
        for rank, rows in enumerate(plan.row_counts):
            lines, run = (plan.k, rows) if plan.by_columns else (rows, plan.k)
            pitch = plan.pitch(rank)
            assert run * plan.dtype.itemsize <= pitch
            assert pitch % 64 == 0
            assert offsets[rank] + lines * pitch <= offsets[rank + 1]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_extents(case):
    for options, plan in every_plan(case):
        assert plan.m == case.m
        assert plan.row_start == tuple(np.cumsum([0, *case.row_counts]))
        limits = (max(case.row_counts), plan.n, plan.k)
        asked = options.tile or (64, 64, 64)
        for extent, limit, wanted in zip(plan.tile, limits, asked, strict=True):
            assert 1 <= extent <= min(wanted, max(1, limit))
        movers, compute = plan.split
        assert movers == (0 if case.world == 1 else (options.split or (1,))[0])
        assert compute == options.split[1] if options.split else 1 <= compute <= 2
        needed = (case.m - case.row_counts[plan.rank]) * case.k * plan.dtype.itemsize
        assert plan.bytes_from_peers == (needed if plan.n else 0)


@pytest.mark.parametrize("case", CASES[::5], ids=str)
def test_shared_bytes_are_what_the_engine_carves_up(case):
    """engine/host.cuh: sums, a panel of A, a panel of B, and a tile of the output."""
    for _, plan in every_plan(case):
        rows, columns, k = plan.tile
        wide = np.float64 if plan.dtype == np.float64 else np.float32
        arrays = [
            np.empty((rows, columns), wide),
            np.empty((rows, k), wide),
            np.empty((k, columns), wide),
            np.empty((rows, columns), plan.out_dtype),
        ]
        assert plan.shared_bytes == sum(array.nbytes for array in arrays)


def test_a_world_of_one_moves_nothing():
    plan = plans.plan_allgather_gemm(
        0, (100,), 50, 30, *[np.dtype(np.float32)] * 2, False, mk.Options(split=(4, 3))
    )
    assert plan.split == (0, 3)
    assert plan.bytes_from_peers == 0


def test_agents_are_no_more_than_tiles():
    plan = plans.plan_allgather_gemm(
        0, (5, 0), 7, 9, *[np.dtype(np.float64)] * 2, False, mk.Options()
    )
    assert plan.split == (1, 1)


def test_compute_agents_share_the_cores_with_the_other_ranks(monkeypatch):
    for cores, ranks, compute in ((1, 2, 1), (4, 2, 2), (4, 4, 1), (64, 2, 2)):
        monkeypatch.setattr(plans.os, "sched_getaffinity", lambda _, n=cores: set(range(n)))
        plan = plans.plan_allgather_gemm(
            0, (999,) * ranks, 999, 9, *[np.dtype(np.float64)] * 2, False, mk.Options()
        )
        assert plan.split == (1, compute)


def test_chunks_have_about_the_bytes_that_were_asked_for():
    for dtype, by_columns in itertools.product(ALLOWED, (False, True)):
        unit = 16 // dtype.itemsize
        for chunk_bytes in (1, 100, 4096, 1 << 18, 1 << 30):
            rows, k = plans.chunk_shape((500, 700), 3000, dtype, by_columns, chunk_bytes)
            most = min(chunk_bytes, 32 * (700 if by_columns else 3000) * dtype.itemsize)
            assert rows * k * dtype.itemsize <= max(most, unit * unit * dtype.itemsize)
            # Whole pieces of 16 bytes are all that rounding may lose.
            assert (rows + unit) * (k + unit) * dtype.itemsize > most / 2


def test_large_extents_do_not_overflow():
    plan = plans.plan_allgather_gemm(
        1, (1 << 33, 1 << 33), 1 << 20, 1 << 20, *[np.dtype(np.float64)] * 2, False, mk.Options()
    )
    assert plan.arena_offsets() == (0, 1 << 56, 1 << 57)
    assert plan.bytes_from_peers == 1 << 56
    assert math.prod(plan.chunk) * 8 * plan.chunks(0) == 1 << 56


def test_explain_says_the_main_numbers():
    plan = plans.plan_allgather_gemm(
        1,
        (130, 70),
        90,
        110,
        np.dtype("bfloat16"),
        np.dtype(np.float32),
        True,
        mk.Options((3, 5), (16, 24, 40), 1000),
    )
    text = plan.explain()
    for part in (
        "allgather_gemm",
        "(200, 110) @ (110, 90)",
        "bfloat16 -> float32",
        "rank 1 of 2",
        "[130, 70]",
        "host",
        "(16, 24, 40)",
        "5 compute",
        "3 movers",
        "F order",
        f"{130 * 110 * 2} bytes",
        str(plan.chunk),
        f"{math.prod(plan.chunk) * 2} bytes",
    ):
        assert part in text, text
    assert len(text.splitlines()) > 1
    assert "C order" in dataclasses.replace(plan, by_columns=False).explain()


def test_plans_are_values():
    case = CASES[0]
    assert make(case, 0) == make(case, 0)
    assert hash(make(case, 0)) == hash(make(case, 0))
    assert make(case, 0) != make(case, 0, OPTIONS[2])
    with pytest.raises(dataclasses.FrozenInstanceError):
        make(case, 0).n = 3


def test_a_plan_is_the_same_when_it_is_read_again(tmp_path):
    for case in CASES[::7]:
        for rank in range(case.world):
            for options, plan in ((o, make(case, rank, o)) for o in OPTIONS):
                plan.save(tmp_path / "plan.json")
                assert plans.AllGatherGemmPlan.load(tmp_path / "plan.json") == plan
                again = make(case, rank, plan.options)
                assert again == plan, options
                assert plan.memory >= plan.bytes_from_peers


def test_what_is_no_plan_is_refused(tmp_path):
    path = tmp_path / "plan.json"
    for text in ("", "[]", "3", "{}", '{"operator": "other"}', '{"operator": "allgather_gemm"}'):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"plan\.json holds no plan of allgather_gemm"):
            plans.AllGatherGemmPlan.load(path)
    make(CASES[0], 0).save(path)
    path.write_text(path.read_text().replace(f'"{CASES[0].dtype}"', '"no dtype"'))
    with pytest.raises(ValueError, match=r"plan\.json holds no plan of .*no dtype"):
        plans.AllGatherGemmPlan.load(path)
    make(CASES[0], 0).save(path)
    entries = json.loads(path.read_text())
    path.write_text(json.dumps({**entries, "tile": ["many", 64, 64]}))
    with pytest.raises(ValueError, match=r"holds no plan of .*tile=.*use 3 integers"):
        plans.AllGatherGemmPlan.load(path)


@pytest.mark.parametrize(
    "kind",
    [
        plans.AllGatherGemmPlan,
        plans.GemmReduceScatterPlan,
        plans.GemmAllReducePlan,
        attention_plan.RingAttentionPlan,
        moe_plan.MoeDispatchGemmPlan,
        moe_plan.MoeCombinePlan,
        moe_plan.MoeLayerPlan,
    ],
)
def test_fields_of_another_version_are_named(kind, tmp_path):
    path = tmp_path / "plan.json"
    names = [field.name for field in dataclasses.fields(kind)]
    assert "split" in names
    lacking = {"operator": kind.operator, **dict.fromkeys(names)}
    del lacking["split"]
    for entries, text in (
        (lacking, "it lacks split: it was written by another version of mkernel_cp"),
        ({**lacking, "split": [], "color": 1}, "color is unknown: it was written by another"),
        ({**lacking, "color": 1}, "it lacks split and color is unknown: it was written by"),
        ({"operator": kind.operator}, f"it lacks {', '.join(names)}: it was written by"),
    ):
        path.write_text(json.dumps(entries))
        with pytest.raises(ValueError, match=f"holds no plan of {kind.operator}: {text}"):
            kind.load(path)


KINDS = plans.GemmReduceScatterPlan, plans.GemmAllReducePlan


def make_reduction(
    kind, case, rank, options=OPTIONS[0], low_latency=False, nodes=None, *, pulled=False
):
    k, dtype = case.k_per_rank[rank], np.dtype(case.dtype)
    tile = tiles.choose_tile(case.row_counts, case.n, k, dtype, options, None)
    tile = plans.whole_groups(tile) if low_latency else tile
    return plans.plan_reduction(
        *(kind, rank, case.row_counts, case.n, k, dtype, np.dtype(case.out_dtype)),
        *(np.dtype(case.transfer_dtype), tile, low_latency, options),
        nodes=nodes,
        pulled=pulled,
    )


@pytest.mark.parametrize("nodes", [(2, 2), (1, 2, 1), (3, 1), (1, 1, 1, 1)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_plans_of_sums_between_nodes_agree_and_each_part_has_a_place(kind, nodes, tmp_path):
    for case in cases("reduction", count=10, seed=5, world=4):
        options = mk.Options(split=(1, 2, 3), tile=(16, 24, 8))
        each = [make_reduction(kind, case, rank, options, nodes=nodes) for rank in range(4)]
        assert len({(p.zones, p.tile[:2], p.part, p.parts) for p in each}) == 1
        pushed, products, leaving, arriving = (each[0].zones[i][0] for i in (0, -3, -2, -1))
        assert products == leaving
        for plan in each:
            holders, parts, added = plan.topology.holders, plan.parts, set()
            for rank, adds in enumerate(holders):
                if adds == plan.rank:
                    start = plan.added_start[rank]
                    added |= set(range(start, start + parts[rank]))
                    assert rank == adds or start + parts[rank] <= products
            held = sum(parts[rank] for rank, adds in enumerate(holders) if adds == plan.rank)
            assert added == set(range(held))
            assert plans.added_parts(parts, nodes)[0][plan.rank] == held
            assert pushed >= held * (plan.topology.local_size - 1)
            assert arriving >= parts[plan.rank] * (len(nodes) - 1)
            assert plan.split == (1, 2, 3)
            assert f"nodes of {list(nodes)} ranks: {plan.bytes_to_network} bytes" in plan.explain()
        sums = sum(p.bytes_to_network for p in each) - 2 * 64 * 4 * (len(nodes) - 1)
        whole = case.out_dtype if kind is KINDS[1] else None
        per_element = sum(np.dtype(d).itemsize for d in (case.transfer_dtype, whole) if d)
        assert sums == (len(nodes) - 1) * case.m * case.n * per_element
    plan = each[1]
    plan.save(tmp_path / "plan.json")
    assert kind.load(tmp_path / "plan.json") == plan
    assert make_reduction(kind, case, 1, plan.options, nodes=nodes) == plan


@pytest.mark.parametrize("kind", KINDS)
def test_plans_of_sums_agree_between_ranks_and_fit(kind):
    for size in (1, 2, 3, 7):
        for case in cases("reduction", count=10, seed=size, world=size):
            for options in OPTIONS:
                each = [make_reduction(kind, case, rank, options) for rank in range(size)]
                # What they push to each other: tiles, places, sizes.
                assert len({(p.zones, p.tile[:2], p.part) for p in each}) == 1
                partials = each[0].zones[0]
                rows, columns, _ = each[0].tile
                for plan in each:
                    own = -(-case.row_counts[plan.rank] // rows) * -(-case.n // columns)
                    assert partials[0] >= (size - 1) * own
                assert partials[1] >= rows * columns * each[0].transfer_dtype.itemsize
                assert sum(p.bytes_from_peers for p in each) == sum_of_bytes(kind, case)


def sum_of_bytes(kind, case):
    """Of a sum: what crosses the links of all ranks, from the shapes."""
    peers, elements = case.world - 1, case.m * case.n
    partials = peers * elements * np.dtype(case.transfer_dtype).itemsize
    sums = peers * elements * np.dtype(case.out_dtype).itemsize
    return partials + sums * (kind is plans.GemmAllReducePlan)


def test_stripes_are_whole_tiles_and_cover_the_columns():
    for case in cases("reduction", count=20, seed=0, world=3):
        for options in OPTIONS:
            plan = make_reduction(plans.GemmAllReducePlan, case, 1, options)
            assert 1 <= plan.stripes <= 4
            assert plan.stripe_columns % plan.tile[1] == 0
            assert plan.stripes * plan.stripe_columns >= case.n


def test_few_rows_are_summed_with_low_latency():
    bfloat16 = np.dtype("bfloat16")
    scatter, whole = KINDS
    small = tiles.choose_tile((64,), 8192, 1024, bfloat16, OPTIONS[0], H100, small=True)

    def chosen(kind, counts, n=8192, tile=small, k=256):
        sums = kind, counts, n, bfloat16, bfloat16
        return plans.has_low_latency(*sums, tile, H100, k, bfloat16)

    for rows, wanted in ((16, True), (96, True), (192, False)):
        counts = mk.reference.array_split_counts(rows, 4)
        for kind in KINDS:
            assert chosen(kind, counts) is wanted
    # Who adds most has the last word.
    assert not chosen(scatter, (0, 64, 0, 0))
    assert not chosen(whole, (16,), 64)
    # Several waves of tiles, in each of which all wait.
    assert not chosen(whole, (8, 8), 20 * 8192)
    # Else B is read again for the rows of each rank.
    assert chosen(scatter, (128, 128), k=8192)
    assert not chosen(scatter, (128, 128))
    # Whose sums leave no registers.
    large = tiles.choose_tile((8192,), 8192, 1024, bfloat16, OPTIONS[0], H100)
    assert large.tile[1] > small.tile[1]
    assert not chosen(whole, (16, 16), 64, large)


def test_bytes_with_low_latency_are_those_of_words():
    case = ReductionCase("x", (2, 1), 5, (3, 4), "bfloat16", "bfloat16", transfer_dtype="bfloat16")
    plan = make_reduction(plans.GemmAllReducePlan, case, 0, low_latency=True)
    # Of 8 columns: two rows of products, and one of sums.
    assert plan.bytes_from_peers == 2 * 8 * 2 + 8 * 2
    # Words for products of a peer, and sums, of two tiles of 2 x 8.
    assert plan.zones == ((0, 0),)
    assert plan.words == 2 * 2 * (2 * 8) * 2 // 8
    assert plan.memory == 8 * plan.words
    for rank, rows in enumerate((2, 1)):
        plan = make_reduction(plans.GemmReduceScatterPlan, case, rank, low_latency=True)
        assert plan.bytes_from_peers == rows * 8 * 2
        assert plan.words == 2 * (2 * 8) * 2 // 8


@pytest.mark.parametrize("low_latency", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_plans_of_sums_are_explained_and_kept(kind, low_latency, tmp_path):
    case = cases("reduction", count=1, seed=3, world=3)[-1]
    plan = make_reduction(kind, case, 1, low_latency=low_latency)
    text = plan.explain()
    order = "ranks from the owner of a row on" if low_latency else "ranks 1, 2, 0"
    for fact in (kind.operator, order, str(plan.bytes_from_peers), str(plan.memory)):
        assert fact in text
    plan.save(tmp_path / "plan.json")
    assert kind.load(tmp_path / "plan.json") == plan
    again = make_reduction(kind, case, 1, plan.options, low_latency)
    assert again == plan
    assert ("low latency" in text) is low_latency
    other = KINDS[kind is KINDS[0]]
    with pytest.raises(ValueError, match=f"no plan of {other.operator}"):
        other.load(tmp_path / "plan.json")


H100 = tiles.Gpu("sm_90a", 132, 232448)


def test_partial_sums_that_take_less_time_than_their_products_are_pulled():
    bfloat16, float32 = np.dtype("bfloat16"), np.dtype(np.float32)
    scatter, whole = KINDS
    tile = tiles.choose_tile((4096, 4096), 8192, 2048, bfloat16, OPTIONS[0], H100)

    def pulls(kind=scatter, tile=tile, rows=(4096, 4096), k=2048, dtype=bfloat16):
        return plans.pulls_partials(kind, tile, H100, rows, 8192, k, dtype)

    assert pulls()
    assert pulls(rows=(2048, 2048, 2048, 2048))
    assert pulls(rows=(1024, 1024), k=7168)
    assert not pulls(rows=(256, 256), k=7168)
    assert not pulls(k=1024)
    assert not pulls(dtype=float32)
    assert not pulls(kind=whole)
    assert not pulls(tile=tiles.default_tile(bfloat16))
    assert not pulls(tile=tiles._hopper_tile(128, 128, 64, 1, 0, H100.shared_bytes))


def test_what_is_pulled_has_room_where_it_comes_from_and_on_the_way():
    half = "bfloat16"
    case = ReductionCase("x", (300, 0, 20), 500, (3, 4, 5), half, half, transfer_dtype=half)
    pushed, pulled = (make_reduction(KINDS[0], case, 2, pulled=way) for way in (False, True))
    assert pulled.zones == pushed.zones * 2
    assert pulled.bytes_from_peers == pushed.bytes_from_peers
    assert "partial sums are brought as" in pulled.explain()
    assert "partial sums travel as" in pushed.explain()
    for shape in tiles._HOPPER_TILES:
        tile = tiles._hopper_tile(*shape[:2], 64, shape[2], 0, H100.shared_bytes)
        tile = tiles.bringing(tile, H100.shared_bytes)
        assert tile.courier_bytes > 16 << 10
        assert tile.shared_bytes(np.dtype("bfloat16"), np.dtype("f4")) <= H100.shared_bytes


def test_a_budget_of_multiprocessors_that_is_too_small_is_named():
    case = 1, (64, 64), 50, 30, *[np.dtype(np.float32)] * 2, False
    plan = plans.plan_allgather_gemm(*case, mk.Options(sm_budget=2), H100, 2)
    assert sum(plan.split) == 2
    with pytest.raises(ValueError, match=r"sm_budget=1\): 1 agents .* needs 2"):
        plans.plan_allgather_gemm(*case, mk.Options(sm_budget=1), H100, 1)


@pytest.mark.parametrize(
    ("rows", "n", "whole"),
    [(512, 7168, 396), (2048, 2048, 512), (1024, 1024, 128), (256, 256, 8), (2112, 2048, 528)],
)
def test_the_last_tiles_are_halved_where_most_agents_would_have_none(rows, n, whole):
    options = mk.Options(tile=(128, 256, 512), split=(0, None))
    half = np.dtype(np.float16)
    plan = plans.plan_allgather_gemm(0, (rows,) * 4, n, 8192, half, half, False, options, H100, 132)
    tiles = 4 * -(-rows // 128) * -(-n // 256)
    assert plan.whole_tiles == whole
    assert whole == tiles or (tiles - whole) * 2 <= 132
    pair = mk.Options(tile=(256, 256, 512), split=(0, None))
    plan = plans.plan_allgather_gemm(0, (512,) * 4, 7168, 8192, half, half, False, pair, H100, 132)
    assert plan.whole_tiles == 8 * 28


def test_few_rows_of_all_ranks_are_multiplied_together():
    """Else B, of which the L2 cache keeps little, is read again for those of each rank."""
    half = np.dtype("bfloat16")

    def made(counts, n=7168, k=8192, *, by_columns=False, nodes=None, gpu=H100):
        case = 0, counts, n, k, half, half, by_columns, mk.Options()
        return plans.plan_allgather_gemm(*case, gpu, 132, nodes)

    few = made((32, 32))
    assert few.gathered
    assert "when all are here" in few.explain()
    assert few.split == (20, 112)
    assert few.whole_tiles == 112
    # What comes is what peers have.
    assert few.bytes_from_peers == 32 * 8192 * 2
    # Movers may be few, where little comes.
    assert made((8, 8), 8192, 2048).split == (4, 128)
    for other in (
        made((1024, 1024)),
        made((32, 32), by_columns=True),
        made((32, 32), nodes=(1, 1)),
        made((32, 32), 512),
        made((64, 0)),
        made((64,)),
        made((32, 32), gpu=None),
    ):
        assert not other.gathered
        assert "when all are here" not in other.explain()
    # Nor is its tile one for all rows.
    assert made((16,) * 8, by_columns=True).tile[:2] == (128, 256)


@pytest.mark.parametrize(("n", "split"), [(8, (20, 32)), (1024, (0, 132))])
def test_blocks_without_tiles_bring_rows_and_else_all_do(n, split):
    counts, dtype = (1024,) * 4, np.dtype(np.float16)
    plan = plans.plan_allgather_gemm(
        *(0, counts, n, 4096, dtype, dtype, False, mk.Options()), gpu=H100, capacity=132
    )
    assert plan.split == split


@pytest.mark.parametrize(
    ("counts", "n", "k", "capacity", "split"),
    [
        ((1,) * 8, 128, 8, 132, (2, 16)),  # one chunk, but pairs of blocks
        ((129,) * 4, 128, 8192, 132, (20, 8)),
        ((129,) * 4, 128, 8192, 27, (18, 8)),
        ((129,) * 4, 0, 8192, 16, (14, 2)),
    ],
)
def test_movers_are_whole_clusters_and_leave_room_for_tiles(counts, n, k, capacity, split):
    half, options = np.dtype(np.float16), mk.Options(tile=(256, 256, 512))
    plan = plans.plan_allgather_gemm(
        *(0, counts, n, k, half, half, False, options), gpu=H100, capacity=capacity
    )
    assert plan.split == split


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ALLOWED, ids=str)
def test_plans_of_sums_for_a_gpu(kind, dtype):
    counts, options = (1024,) * 4, mk.Options()
    tile = tiles.choose_tile(counts, 4096, 1024, dtype, options, H100)
    plan = plans.plan_reduction(
        kind, 2, counts, 4096, 1024, dtype, dtype, dtype, tile, False, options, capacity=132
    )
    assert plan.target == "cuda"
    assert plan.engine == ("hopper" if dtype.itemsize == 2 else "portable")
    assert plan.shared_bytes <= H100.shared_bytes
    assert sum(plan.split) <= 132
    assert all(agents % plan.cluster == 0 for agents in plan.split)
    assert not any(extent % part for extent, part in zip(plan.tile, plan.part, strict=False))
    assert (plan.split[0] > 0) == (plan.engine == "portable")  # else a warp of each block moves
