"""Worlds for shared test bodies, and what makes hidden faults of a protocol show."""

import functools

import numpy as np
from shapes import Case

import mkernel_cp as mk
from mkernel_cp import reference
from mkernel_cp.communicator import Communicator

SIZES = (1, 2, 3, 4)


def run(size, program, *args, **options):
    """Run ``program(comm, *args)`` on `size` ranks; return their results."""

    def main(mpi):
        with Communicator(mpi, **options) as comm:
            return program(comm, *args)

    return mk.LocalWorld(size).run(main)


def poison(comm):
    """Fill the data of this rank's arena with NaN, so that what has not arrived shows."""
    if comm.arena is not None:
        start = comm.arena.data_offset_for(comm.arena.signals)
        comm.segments[comm.arena.number].bytes[start:] = 0xFF


def chaos(comm, *, seed, lanes=1, delay_ns=(0, 0)):
    """Let launches yield at random points, copy early at random, and start roles late."""
    comm.hooks.seed, comm.hooks.lanes, comm.hooks.delay_ns = seed, lanes, delay_ns


def row_counts(case: Case):
    """What a caller passes for a case: None where that says the same."""
    return None if case.equal_rows else case.row_counts


@functools.lru_cache(maxsize=512)
def expected(case: Case, seed: int, rank: int, integers: bool = False) -> reference.Expected:
    """The reference of one rank."""
    from shapes import operands

    a_blocks, b_blocks = operands(case, seed, integers=integers)
    return reference.allgather_gemm(a_blocks, b_blocks[rank], case.out_dtype)


def nan_filled(shape, dtype, order="C"):
    """An output in which what nobody writes shows."""
    return np.full(shape, np.nan, dtype, order=order)
