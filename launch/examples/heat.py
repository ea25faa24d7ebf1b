"""The heat equation on a plate, with a kernel of one's own: heat.cu, one launch per step.

    mpirun -n 4 python launch/examples/heat.py --size 200 --steps 50

Each rank holds some rows of the plate, whose rim is kept at zero. A step needs the row above a
rank's first one and the row below its last one, which the kernel fetches while it works on the
others. No rank waits for the host of another between two steps.
"""

import argparse
import sys
from pathlib import Path

import numpy as np

import mkernel_cp as mk


def steps_of_numpy(field, steps, rate):
    """Return the whole plate after some steps."""
    for _ in range(steps):
        padded = np.pad(field, 1)
        neighbours = padded[:-2, 1:-1] + padded[2:, 1:-1] + padded[1:-1, :-2] + padded[1:-1, 2:]
        field = field + rate * (neighbours - 4 * field)
    return field


def main():
    """Run the steps and compare with NumPy; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=200, help="rows and columns of the plate")
    parser.add_argument("--steps", type=int, default=50)
    arguments = parser.parse_args()
    size, rate = arguments.size, 0.2
    start = np.random.default_rng(0).random((size, size))

    with mk.Communicator(target="host") as comm:
        if size < comm.size:
            raise ValueError(f"--size {size}: every one of the {comm.size} ranks needs a row")
        counts, own = comm.row_counts(size), comm.rows(size)
        # Peers read the field in place, and the next one becomes the field.
        field, following = comm.zeros((2, counts[comm.rank], size))
        field[...] = start[own]
        halo = np.zeros((2, size))
        arrived = np.zeros(2, np.uint64)
        kernel = mk.Module(Path(__file__).with_name("heat.cu")).kernel("heat")
        shape = (counts[comm.rank], size, counts[comm.rank - 1])
        for _ in range(arguments.steps):
            comm.launch(kernel, 3, (field, following, halo, arrived, *shape, rate), operand=field)
            field, following = following, field
        error = abs(field - steps_of_numpy(start, arguments.steps, rate)[own]).max()
        errors = comm.mpi.gather(error)
        if comm.rank == 0:
            print(f"{arguments.steps} steps of {size} x {size} on {comm.size} ranks: ", end="")
            print(f"largest difference to NumPy {max(errors):.1e}")
        return int(comm.mpi.bcast(errors and max(errors)) > 1e-12)


if __name__ == "__main__":
    sys.exit(main())
