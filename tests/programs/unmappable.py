"""A peer's segment cannot be mapped once, on one rank: all raise, and what follows is right."""

import numpy as np

import mkernel_cp as mk
from mkernel_cp import memory

with mk.Communicator() as comm:
    real, calls = memory._Mapping, []

    def fail_once(fd, nbytes):
        calls.append(nbytes)
        if comm.rank == 0 and len(calls) == 2:
            raise OSError(12, "no room")
        return real(fd, nbytes)

    memory._Mapping = fail_once
    said = ""
    try:
        comm.empty(10)
    except mk.OutOfMemoryError as error:
        said = str(error)
    assert "rank 0" in said, said
    memory._Mapping = real
    for step in range(3):
        a = comm.empty((2, 1 << (18 + step)))
        a[...] = comm.rank + 1
        out = mk.allgather_gemm(a[:, :8], np.ones((8, 1)), comm=comm)
        np.testing.assert_array_equal(out[:, 0], 8 * np.repeat(np.arange(comm.size) + 1, 2))
    comm.barrier()
    if comm.rank == 0:
        print("in step")
