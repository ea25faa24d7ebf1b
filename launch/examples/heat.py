"""The heat equation on a plate, with a kernel of one's own: heat.cu, one launch per step.

    mpirun -n 4 python launch/examples/heat.py --size 200 --steps 50

Each rank holds some rows of the plate, whose rim is kept at zero. A step needs the row above a
rank's first one and the row below its last one, which the kernel fetches while it works on the
others. No rank waits for the host of another between two steps. On GPUs where there are some.
"""

import argparse
import sys
from pathlib import Path

import numpy as np

import mkernel_cp as mk

RATE = 0.2


def steps_of_numpy(field, steps):
    """Return the whole plate after some steps."""
    for _ in range(steps):
        padded = np.pad(field, 1)
        neighbours = padded[:-2, 1:-1] + padded[2:, 1:-1] + padded[1:-1, :-2] + padded[1:-1, 2:]
        field = field + RATE * (neighbours - 4 * field)
    return field


def steps_of_kernels(start, steps, comm):
    """Return this rank's rows of the plate after some steps."""
    size, columns = start.shape
    if size < comm.size:
        raise ValueError(f"{size} rows: every one of the {comm.size} ranks needs one")
    counts = comm.row_counts(size)
    field = comm.asarray(start[comm.rows(size)])  # peers read it in place
    following = comm.empty(field.shape)  # and this one, when it has become the field
    halo, arrived = comm.zeros((2, columns)), comm.zeros(2, np.uint64)
    kernel = mk.Module(Path(__file__).with_name("heat.cu")).kernel("heat")
    agents = 3 if comm.target == "host" else 33  # threads of the CPU, or blocks of the GPU
    shape = (len(field), columns, counts[comm.rank - 1])
    for _ in range(steps):
        comm.launch(kernel, agents, (field, following, halo, arrived, *shape, RATE), operand=field)
        field, following = following, field
    return comm.asnumpy(field)


def main():
    """Run the steps and compare with NumPy; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=200, help="rows and columns of the plate")
    parser.add_argument("--steps", type=int, default=50)
    arguments = parser.parse_args()
    size, steps = arguments.size, arguments.steps
    start = np.random.default_rng(0).random((size, size))

    with mk.Communicator() as comm:
        field = steps_of_kernels(start, steps, comm)
        error = abs(field - steps_of_numpy(start, steps)[comm.rows(size)]).max()
        errors = comm.mpi.gather(error)
        if comm.rank == 0:
            print(f"{steps} steps of {size} x {size} on {comm.size} ranks, target {comm.target}:")
            print(f"largest difference to NumPy {max(errors):.1e}")
        return int(comm.mpi.bcast(errors and max(errors)) > 1e-12)


if __name__ == "__main__":
    sys.exit(main())
