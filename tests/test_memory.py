"""Segments, the heap of user arrays, and how an address is found again."""

import contextlib
import gc
import os
import pathlib

import numpy as np
import pytest

import mkernel_cp as mk
from mkernel_cp import memory
from mkernel_cp.memory import ALIGNMENT, Heap, Location, Segment, SegmentTable, available_memory

BYTE = np.dtype(np.uint8)


def descriptors():
    """The open descriptors of memory files of this package, as the system lists them."""
    gc.collect()  # what earlier tests left
    links = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of the listing itself
            links.append(os.readlink(f"/proc/self/fd/{name}"))
    return sum("memfd:mkernel_cp" in link for link in links)


def is_mapped(start):
    """Whether a memory file of this package is mapped from an address on."""
    gc.collect()
    lines = pathlib.Path("/proc/self/maps").read_text().splitlines()
    return any(
        "memfd:mkernel_cp" in line and int(line.split("-")[0], 16) == start for line in lines
    )


@pytest.fixture
def segment():
    """Memory of a heap whose parts are counted in units of the alignment."""
    segment = Segment.create(16 * ALIGNMENT)
    assert segment.nbytes == 16 * ALIGNMENT
    segment.close_fd()
    return segment


def address(array):
    return array.ctypes.data


def take(heap, units):
    assert heap.fits(units * ALIGNMENT)
    return heap.allocate((units * ALIGNMENT,), BYTE)


def free_blocks(heap):
    """What a heap could give: the sizes of its free blocks, by address, in units."""
    heap.fits(1)  # takes back what a collector returned
    return [size // ALIGNMENT for _, size in heap._free]


# --- segments -----------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [0, 1, 4096, 4097, 1 << 20])
def test_a_segment_is_zeroed_whole_pages(nbytes):
    segment = Segment.create(nbytes)
    assert segment.nbytes >= max(nbytes, 1)
    assert segment.nbytes % 4096 == 0
    assert segment.address % 4096 == 0
    assert segment.bytes.shape == (segment.nbytes,)
    assert not segment.bytes.any()
    segment.close_fd()


def test_a_second_mapping_sees_the_same_bytes():
    first = Segment.create(5000)
    second = Segment(os.dup(first.fd), first.nbytes)
    first.bytes[4999] = 7
    assert second.bytes[4999] == 7
    assert second.address != first.address
    for segment in (first, second):
        segment.close_fd()


def test_a_closed_file_leaves_the_mapping_and_no_descriptor():
    """A communicator maps many segments per peer, and a process may open only so many files."""
    before = descriptors()
    segment = Segment.create(4096)
    assert descriptors() > before
    segment.close_fd()
    segment.close_fd()
    segment.bytes[:] = 3
    assert (segment.bytes == 3).all()
    assert segment.fd is None
    assert descriptors() == before


def test_the_last_array_unmaps():
    before = descriptors()
    segment = Segment.create(1 << 16)
    segment.close_fd()
    start, view = segment.address, segment.bytes[10:20]
    del segment
    assert is_mapped(start)
    view[:] = 1
    del view
    assert not is_mapped(start)
    assert descriptors() == before


def test_too_large_a_segment_is_refused_before_anything_is_allocated(monkeypatch):
    monkeypatch.setattr(memory, "available_memory", lambda: 10_000)
    before = descriptors()
    with pytest.raises(mk.OutOfMemoryError, match=r"cannot allocate 12288 bytes.* 10000 bytes are"):
        Segment.create(10_001)
    assert descriptors() == before
    Segment.create(8192).close_fd()


@pytest.mark.parametrize("nbytes", [1 << 50, 1 << 62, 1 << 70])
def test_what_no_machine_has_is_refused(nbytes):
    before = descriptors()
    with pytest.raises(mk.OutOfMemoryError, match=str(nbytes)):
        Segment.create(nbytes)
    assert descriptors() == before


@pytest.mark.parametrize("call", ["memfd_create", "ftruncate"])
def test_a_refusal_of_the_system_is_out_of_memory_and_leaves_no_file(monkeypatch, call):
    def refuse(*_):
        raise OSError(28, "No space left on device")

    before = descriptors()
    monkeypatch.setattr(memory.os, call, refuse)
    with pytest.raises(mk.OutOfMemoryError, match="No space left"):
        Segment.create(4096)
    assert descriptors() == before


def test_a_mapping_that_fails_closes_the_file():
    pipe, other = os.pipe()
    os.close(other)
    with pytest.raises(mk.OutOfMemoryError, match="cannot map 4096 bytes"):
        Segment(pipe, 4096)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(pipe)


# --- available memory ---------------------------------------------------------------------------


@pytest.fixture
def system(tmp_path, monkeypatch):
    """A made-up /proc and /sys: write(path, text)."""

    def moved(*parts):
        return pathlib.Path(tmp_path, *(str(part).lstrip("/") for part in parts))

    def write(path, text):
        moved(path).parent.mkdir(parents=True, exist_ok=True)
        moved(path).write_text(text)

    monkeypatch.setattr(memory, "Path", moved)
    write("/proc/meminfo", "MemTotal: 9000 kB\nMemFree: 10 kB\nMemAvailable:    5000 kB\n")
    return write


def cgroup(system, maximum, current, file=0, inactive=0):
    system("/proc/self/cgroup", "0::/job/step\n")
    system("/sys/fs/cgroup/job/step/memory.max", f"{maximum}\n")
    system("/sys/fs/cgroup/job/step/memory.current", f"{current}\n")
    stat = f"anon 5\nfile {file}\nactive_file {file - inactive}\ninactive_file {inactive}\n"
    system("/sys/fs/cgroup/job/step/memory.stat", stat)


def test_available_memory_is_the_machines(system):
    assert available_memory() == 5000 * 1024


@pytest.mark.parametrize(
    ("maximum", "current", "expected"),
    [
        (3_000_000, 1_000_000, 2_000_000),
        (30_000_000, 1_000_000, 5000 * 1024),
        ("max", 1_000_000, 5000 * 1024),
        (3_000_000, 3_000_001, 0),
    ],
)
def test_available_memory_is_that_of_the_cgroup_if_less(system, maximum, current, expected):
    cgroup(system, maximum, current)
    assert available_memory() == expected


def test_cached_files_do_not_use_memory_up(system):
    """memory.current counts them, but they are dropped as soon as memory is wanted."""
    cgroup(system, 3_000_000, 2_900_000, file=2_000_000, inactive=1_500_000)
    assert 1_600_000 <= available_memory() <= 2_100_000


def test_available_memory_without_facts_is_no_limit(system):
    system("/proc/meminfo", "MemTotal: 9000 kB\n")
    system("/proc/self/cgroup", "5:memory:/job\n")
    assert available_memory() > 1 << 60


def test_available_memory_of_this_machine_is_plausible():
    assert 1 << 20 < available_memory() < 1 << 50


# --- the heap -----------------------------------------------------------------------------------


def test_blocks_are_split_merged_and_given_first_fit(segment):
    heap = Heap()
    assert not heap.fits(1)
    heap.add(segment)
    assert heap.fits(16 * ALIGNMENT)
    assert not heap.fits(16 * ALIGNMENT + 1)
    arrays = [take(heap, units) for units in (3, 1, 4, 2)]
    offsets = [(address(array) - segment.address) // ALIGNMENT for array in arrays]
    assert offsets == [0, 3, 4, 8]
    assert free_blocks(heap) == [6]
    # Two holes, of 3 and 4: the first that is large enough is taken, and split.
    arrays[0] = arrays[2] = None
    assert free_blocks(heap) == [3, 4, 6]
    small, large = take(heap, 2), take(heap, 4)
    assert address(small) == segment.address
    assert address(large) == segment.address + 4 * ALIGNMENT
    assert free_blocks(heap) == [1, 6]
    # Freed ones merge with the neighbour below, above, or both.
    arrays[1] = None
    assert free_blocks(heap) == [2, 6]
    arrays[3] = None
    assert free_blocks(heap) == [2, 8]
    large = None
    assert free_blocks(heap) == [14]
    small = None
    assert free_blocks(heap) == [16]
    assert large is small


def test_segments_that_lie_side_by_side_do_not_merge():
    """An array across the border would lie in no segment, though its address range exists."""
    whole = Segment.create(8 * 4096)
    whole.close_fd()

    class Part:
        def __init__(self, index):
            self.nbytes, self.address = 4096, whole.address + index * 4096
            self.whole = whole

        def block(self, address, nbytes):
            return whole.block(address, nbytes)

    for order in ((0, 1, 2), (2, 1, 0), (1, 0, 2), (1, 2, 0)):
        heap = Heap()
        for index in order:
            heap.add(Part(index))
        assert heap.fits(4096)
        assert not heap.fits(4097)
        arrays = [heap.allocate((4096,), BYTE) for _ in range(3)]
        assert not heap.fits(1)
        for index in order:
            arrays[index] = None
        assert heap.fits(4096)
        assert not heap.fits(4097)
        assert len(free_blocks(heap)) == 3


@pytest.mark.parametrize("dtype", ["u1", "f8", "c16", "S3", "bfloat16"])
def test_arrays_are_aligned_and_of_the_asked_kind(segment, dtype):
    heap = Heap()
    heap.add(segment)
    for shape in ((), (0,), (1,), (0, 5), (3, 1, 2)):
        array = heap.allocate(shape, np.dtype(dtype))
        assert array.shape == shape
        assert array.dtype == dtype
        assert array.flags.c_contiguous
        assert array.flags.writeable
        assert array.flags.aligned
        assert address(array) % ALIGNMENT == 0 or not array.size


def test_arrays_of_no_bytes_do_not_overlap_others_or_run_out(segment):
    heap = Heap()
    heap.add(segment)
    taken = [heap.allocate((0,), BYTE) for _ in range(16)]
    assert not heap.fits(0)
    taken.clear()
    assert free_blocks(heap) == [16]


def test_a_view_keeps_its_block_and_a_block_its_segment():
    heap, segment = Heap(), Segment.create(16 * ALIGNMENT)
    segment.close_fd()
    heap.add(segment)
    start = segment.address
    view = np.asarray(memoryview(heap.allocate((40,), np.dtype(np.float64))))[3:].reshape(-1, 1)
    assert free_blocks(heap) == [14]
    del heap, segment
    assert is_mapped(start)
    view[:] = 2.0
    assert (view == 2.0).all()
    del view
    assert not is_mapped(start)


def test_what_a_collector_frees_between_fits_and_allocate_disturbs_nothing(segment):
    """A finalizer may run anywhere: it must neither move blocks under allocate() nor be lost."""
    heap = Heap()
    heap.add(segment)
    arrays = [take(heap, 1) for _ in range(16)]
    arrays[5] = arrays[9] = None
    assert heap.fits(ALIGNMENT)
    arrays[4] = arrays[6] = arrays[0] = None
    new = heap.allocate((ALIGNMENT,), BYTE)
    assert address(new) == segment.address + 5 * ALIGNMENT
    held = [address(array) for array in arrays if array is not None] + [address(new)]
    assert len(held) == 12
    assert len(set(held)) == 12
    assert free_blocks(heap) == [1, 1, 1, 1]
    arrays.clear()
    assert free_blocks(heap) == [5, 10]


def test_arrays_in_cycles_come_back_with_the_collector(segment):
    heap = Heap()
    heap.add(segment)
    gc.disable()
    try:
        cycle = [take(heap, 16)]
        cycle.append(cycle)
        del cycle
        assert not heap.fits(1)
        gc.collect()
    finally:
        gc.enable()
    assert free_blocks(heap) == [16]


def test_random_allocations_never_overlap_and_all_come_back():
    rng = np.random.default_rng(3)
    segments = [Segment.create(int(n) * 4096) for n in (3, 1, 5)]
    heap = Heap()
    for segment in segments:
        segment.close_fd()
        heap.add(segment)
    whole = sorted(free_blocks(heap))
    live = []
    for tag in range(600):
        nbytes = int(rng.integers(0, 3000))
        if heap.fits(nbytes) and rng.random() < 0.6:
            array = heap.allocate((nbytes,), BYTE)
            array[:] = tag % 251
            live.append((array, tag % 251))
            assert any(
                s.address <= address(array) and address(array) + nbytes <= s.address + s.nbytes
                for s in segments
            )
        elif live:
            live.pop(int(rng.integers(len(live))))
        for array, value in live:
            assert (array == value).all()
    array = None
    live.clear()
    assert sorted(free_blocks(heap)) == whole


# --- the table ----------------------------------------------------------------------------------


@pytest.fixture
def table():
    """Rank 1's table in a world of 2, with three segments of different sizes."""
    table = SegmentTable(1, 2)
    rows = [[Segment.create(4096 * (1 + n + rank)) for rank in range(2)] for n in range(3)]
    for number, row in enumerate(rows):
        assert table.add(row) == number
        for segment in row:
            segment.close_fd()
    return table, rows


def test_pointers_are_every_ranks_addresses(table):
    table, rows = table
    assert table.pointers.dtype == np.uint64
    assert table.pointers.flags.c_contiguous
    assert table.pointers.tolist() == [[segment.address for segment in row] for row in rows]
    assert all(table[number] is row[1] for number, row in enumerate(rows))


def test_an_address_is_located_in_this_ranks_segments_only(table):
    table, rows = table
    for number, row in enumerate(rows):
        mine, other = row[1], row[0]
        assert table.locate(mine.address, mine.nbytes) == Location(number, 0)
        assert table.locate(mine.address + 100, 8) == Location(number, 100)
        assert table.locate(mine.address + mine.nbytes - 1, 1) == Location(number, mine.nbytes - 1)
        assert table.locate(other.address, 1) is None
    outside = np.zeros(4)
    assert table.locate(outside.ctypes.data, outside.nbytes) is None


def test_a_range_that_leaves_its_segment_is_not_located():
    class Part:
        nbytes = 100

        def __init__(self, address):
            self.address = address

    table = SegmentTable(0, 1)
    table.add([Part(1000)])
    table.add([Part(1100)])
    assert table.locate(999, 10) is None
    assert table.locate(1090, 10) == Location(0, 90)
    assert table.locate(1090, 11) is None
    assert table.locate(1100, 100) == Location(1, 0)
    assert table.locate(1100, 101) is None


def test_a_removed_number_is_used_again(table):
    table, rows = table
    table.remove(1)
    assert table.locate(rows[1][1].address, 1) is None
    assert table.pointers[1].tolist() == [0, 0]
    assert table.locate(rows[2][1].address, 1) == Location(2, 0)
    assert table.add(rows[0][::-1]) == 1
    assert table.locate(rows[0][0].address, 1) == Location(1, 0)
    assert table.pointers.shape == (3, 2)


def test_an_empty_table():
    table = SegmentTable(0, 3)
    assert table.pointers.shape == (0, 3)
    assert table.locate(4096, 1) is None
