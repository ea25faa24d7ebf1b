"""Conjugate gradients with a dense matrix that no rank holds as a whole, for one right-hand side or
for a block of them.

    mpirun -n 4 python launch/examples/conjugate_gradients.py --size 2000 --block 16

S x = b, where S is symmetric and positive definite. Each rank holds some rows S_r of S, and of all
vectors the same rows. S is symmetric, so S p is the sum over ranks of S_r^T p_r: one fused call
multiplies what a rank has, sends every other rank its rows of the product as soon as they are
there, and adds up this rank's. No rank ever holds a whole vector; inner products are sums over
ranks too, with the same bits on all, so that all take the same steps.

The columns of a block share these calls, and have a step length each.
"""

import argparse
import sys

import numpy as np
from mpi4py import MPI

import mkernel_cp as mk


def matrix(size, rows):
    """Return rows of a covariance of points on a line, which vary by themselves a little too."""
    i, j = np.arange(size)[rows, None], np.arange(size)
    return np.exp(-abs(i - j) / 10.0) + 0.1 * (i == j)


def solve(s, b, comm, tolerance=1e-10, most=500):
    """Return this rank's rows of x, and the iterations, from its rows of S and b, NumPy's all."""
    counts = comm.row_counts(s.shape[1])
    s, b = (comm.asarray(part) for part in (s, b))  # on the GPU, if there is one
    x, residual, direction = np.zeros_like(b), b.copy(), b.copy()
    product = np.empty_like(b)

    def dot(u, v):
        """Return the product of each column of u with that of v, the same bits on all ranks."""
        return mk.gemm_allreduce(u.T, v, comm=comm).diagonal()

    multiply = mk.GemmReduceScatter(s.T, direction, comm=comm, row_counts=counts)
    square = dot(b, b)
    enough = tolerance**2 * square
    for iteration in range(most):
        if bool((square <= enough).all()):
            return comm.asnumpy(x), iteration
        multiply(s.T, direction, out=product)
        curvature = dot(direction, product)
        step = square / np.where(curvature > 0, curvature, 1)  # 0 for a column that is solved
        x += step * direction
        residual -= step * product
        before, square = square, dot(residual, residual)
        direction *= square / np.where(before > 0, before, 1)
        direction += residual
    raise RuntimeError(f"not solved after {most} iterations: is S positive definite?")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--size", type=int, default=1000, help="order of the matrix")
    parser.add_argument("--block", type=int, default=1, help="right-hand sides")
    arguments = parser.parse_args()
    size, block = arguments.size, arguments.block

    with mk.Communicator(MPI.COMM_WORLD) as comm:
        b = np.random.default_rng(0).standard_normal((size, block))
        x, iterations = solve(matrix(size, comm.rows(size)), b[comm.rows(size)], comm)
        parts = comm.mpi.gather(x)
        worst = None
        if comm.rank == 0:
            exact = np.linalg.solve(matrix(size, slice(None)), b)
            worst = np.max(abs(np.concatenate(parts) - exact), initial=0.0)
            print(
                f"{size} unknowns, {block} right-hand side(s), {comm.size} rank(s), target "
                f"{comm.target}: {iterations} iterations, largest difference from "
                f"numpy.linalg.solve {worst:.1e}",
                flush=True,
            )
        return int(not comm.mpi.bcast(worst) < 1e-7)


if __name__ == "__main__":
    sys.exit(main())
