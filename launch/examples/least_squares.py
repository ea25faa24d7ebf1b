"""Least squares with more rows than one rank holds, by the normal equations.

    mpirun -n 4 python launch/examples/least_squares.py --rows 20000 --columns 60

min |A x - b| is solved by A^T A x = A^T b, if A is well conditioned. Each rank holds some rows of A
and b; one fused call adds A_r^T (A_r b_r) over the ranks while it multiplies, and leaves the sum to
all of them, with the same bits: so all find the same x, and no rank has to send it.
"""

import argparse
import sys

import numpy as np
from mpi4py import MPI

import mkernel_cp as mk


def solve(a, b, comm):
    """Return x from this rank's rows of A and b, NumPy's both."""
    terms = comm.asarray(np.column_stack([a, b]))  # on the GPU, if there is one
    sums = comm.asnumpy(mk.gemm_allreduce(terms[:, :-1].T, terms, comm=comm))
    return np.linalg.solve(sums[:, :-1], sums[:, -1])


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=20000, help="of A, on all ranks together")
    parser.add_argument("--columns", type=int, default=60, help="unknowns")
    arguments = parser.parse_args()

    with mk.Communicator(MPI.COMM_WORLD) as comm:
        random = np.random.default_rng(0)
        truth = random.standard_normal(arguments.columns)
        own = comm.rows(arguments.rows)
        random = np.random.default_rng([1, comm.rank])
        a = random.standard_normal((own.stop - own.start, arguments.columns))
        b = a @ truth + 1e-3 * random.standard_normal(len(a))
        x = solve(a, b, comm)
        parts = comm.mpi.gather((a, b, x.tobytes()))
        worst = None
        if comm.rank == 0:
            a, b = (np.concatenate(blocks) for blocks in list(zip(*parts, strict=True))[:2])
            worst = np.max(abs(x - np.linalg.lstsq(a, b)[0]))
            print(
                f"{len(a)} equations, {len(x)} unknowns, {comm.size} rank(s), target "
                f"{comm.target}: {len({bits for *_, bits in parts})} answer, largest difference "
                f"from numpy.linalg.lstsq {worst:.1e}",
                flush=True,
            )
        return int(not comm.mpi.bcast(worst) < 1e-9)


if __name__ == "__main__":
    sys.exit(main())
