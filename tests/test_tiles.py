"""Tiles, and how they are chosen for a GPU."""

import mkernel_cp as mk
from mkernel_cp import tiles
from mkernel_cp.arguments import DTYPES

H100 = tiles.Gpu("sm_90a", 132, 227 << 10)


def test_kernels_have_a_name_for_every_dtype():
    names = [tiles.cpp_type(dtype) for dtype in DTYPES]
    assert names == ["bfloat16", "float16", "float", "double"]


def test_tiles_that_can_be_halved_are_chosen_for_a_last_wave_that_is_half_empty():
    shape = (512,) * 4, 7168, mk.Options(split=(0, None)), H100, 8192
    assert tiles.hopper_tile(*shape, gathers=True).tile[:2] == (128, 256)
    assert tiles.hopper_tile(*shape, gathers=False).tile[:2] == (128, 192)


def test_blocks_of_hopper_bring_rows_beside_the_tiles_unless_a_split_says_otherwise():
    def tile(ranks, **options):
        counts = (4096 // ranks,) * ranks
        return tiles.hopper_tile(counts, 1024, mk.Options(**options), H100, 4096, gathers=True)

    assert (tile(4).movers, tile(1).movers) == (0, 0)
    assert tile(4, split=(6, None)).movers == 6
    assert (
        tile(4).courier_bytes > 0 == tile(4, split=(6, None)).courier_bytes == tile(1).courier_bytes
    )


def test_a_small_budget_of_multiprocessors_gets_other_tiles_of_hopper():
    def tile(budget):
        options = mk.Options(sm_budget=budget)
        return tiles.hopper_tile((64,) * 4, 4096, options, H100, 4096, gathers=False).tile[:2]

    assert tile(None) == tile(1000)
    assert tile(None) != tile(8)


def test_sums_of_few_tiles_are_handed_over_by_smaller_ones():
    """Else nothing is multiplied while they travel."""

    def tile(rows, handed):
        options = mk.Options()
        counts = (rows // 2,) * 2
        more = {"gathers": False, "handed": handed}
        return tiles.hopper_tile(counts, 8192, options, H100, 2048, **more).tile[:2]

    scattered, for_all = (2, 0), (2, 2)
    assert tile(512, scattered) == tile(512, for_all) == (128, 128)
    assert (tile(1024, scattered), tile(1024, for_all)) == ((128, 256), (128, 128))
    assert tile(512, (0, 0)) == tile(2048, for_all) == (128, 256)
