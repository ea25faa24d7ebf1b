"""Density matrix of a model insulator by purification, on any number of ranks.

    mpirun -n 4 python launch/examples/purification.py --size 400

The density matrix P of a gapped Hamiltonian H projects onto its lowest n_occ eigenvectors. SP2 [1]
finds it with matrix products alone: the spectrum of H is mapped to [0, 1], turned over, and
X <- X^2 or X <- 2X - X^2, whichever brings the trace to n_occ, drives all eigenvalues to 0 or 1.

Each rank holds some rows of X. X is symmetric, so its transposed rows are its own columns, and one
fused call gathers the rows of the others while it multiplies.

[1] A. M. N. Niklasson, Expansion algorithm for the density matrix, Phys. Rev. B 66, 155115 (2002).
"""

import argparse
import sys

import numpy as np
from mpi4py import MPI

import mkernel_cp as mk


def hamiltonian(size, rows):
    """Return rows of a chain with alternating hopping and a modulated potential: it has a gap."""
    i, j = np.arange(size)[rows, None], np.arange(size)
    hopping = 1 + 0.3 * (-1.0) ** np.minimum(i, j)
    potential = 0.1 * np.cos(0.7 * i)
    return np.where(abs(i - j) == 1, -hopping, np.where(i == j, potential, 0.0))


def purify(h, n_occ, comm, tolerance=1e-11, most=60):
    """Return this rank's rows of the density matrix from its rows of H, NumPy's both."""
    world, size = comm.mpi, h.shape[1]
    own_diagonal = (np.arange(len(h)), np.arange(size)[comm.rows(size)])

    # Gershgorin: every eigenvalue lies within these bounds.
    center = h[own_diagonal]
    radius = abs(h).sum(axis=1) - abs(center)
    low = world.allreduce(np.min(center - radius, initial=np.inf), MPI.MIN)
    high = world.allreduce(np.max(center + radius, initial=-np.inf), MPI.MAX)

    start = -h / (high - low)
    start[own_diagonal] += high / (high - low)
    x = comm.asarray(start)  # on the GPU, if there is one; the other ranks read it in place

    square = mk.AllGatherGemm(x, x.T, comm=comm, row_counts=comm.row_counts(size))
    for iteration in range(most):
        x2 = square(x, x.T).T  # own columns of X^2, so own rows
        own = np.array([float(x[own_diagonal].sum()), float(((x2 - x) ** 2).sum())])
        trace, error = world.allreduce(own)
        error = np.sqrt(error)
        if comm.rank == 0:
            print(f"{iteration:3}  trace {trace:14.8f}  |X^2 - X| {error:9.2e}", flush=True)
        if error < tolerance and abs(trace - n_occ) < 0.5:
            return comm.asnumpy(x)
        x[...] = x2 if trace > n_occ else 2 * x - x2
    raise RuntimeError(f"not idempotent after {most} iterations: no gap above state {n_occ}?")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--size", type=int, default=400, help="order of the matrix")
    size = parser.parse_args().size
    n_occ = size // 2

    with mk.Communicator(MPI.COMM_WORLD) as comm:
        h = hamiltonian(size, comm.rows(size))
        p = purify(h, n_occ, comm)
        parts = comm.mpi.gather((h, p))
        worst = None
        if comm.rank == 0:
            h, p = (np.concatenate(blocks) for blocks in zip(*parts, strict=True))
            occupied = np.linalg.eigh(h)[1][:, :n_occ]
            worst = np.max(abs(p - occupied @ occupied.T), initial=0.0)
            print(
                f"{size} states, {n_occ} occupied, {comm.size} rank(s), target {comm.target}: "
                f"largest difference from numpy.linalg.eigh {worst:.1e}",
                flush=True,
            )
        return int(not comm.mpi.bcast(worst) < 1e-9)


if __name__ == "__main__":
    sys.exit(main())
