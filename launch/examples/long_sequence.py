"""Causal attention over one long sequence that no rank holds as a whole.

    mpirun -n 4 python launch/examples/long_sequence.py --positions 4000

The sequence is a signal of a few slow oscillations in noise. Each rank holds its part of the
positions, projects them to queries, keys and values for several heads, and gets, from one fused
call, attention over all positions before its own. In the zigzag layout all ranks have the same work
in spite of the mask. Rows that are drawn at random are computed again in float64 and compared.
"""

import argparse
import sys

import numpy as np
from mpi4py import MPI

import mkernel_cp as mk


def embedding(positions, width):
    """Return what is known of some positions: oscillations, and noise that each draws by itself."""
    rates = 0.5 ** np.arange(width // 2)
    phases = positions[:, None] * rates
    waves = np.concatenate((np.sin(phases), np.cos(phases)), axis=1)
    noise = [np.random.default_rng(position).standard_normal(width) for position in positions]
    return waves + 0.3 * np.reshape(noise, waves.shape)


def projections(width, heads, kv_heads, columns):
    """Return the weights that make queries, keys and values, the same on every rank."""
    random = np.random.default_rng(0)
    return [
        random.standard_normal((width, count, columns)) / np.sqrt(width)
        for count in (heads, kv_heads, kv_heads)
    ]


def attend(positions, comm, weights, dtype=np.float32):
    """Return this rank's positions, and attention and log-sum-exp there."""
    parts = mk.zigzag_split(np.arange(positions), comm.size, axis=0)
    own = parts[comm.rank]
    x = embedding(own, len(weights[0]))
    # From comm.asarray, so that the peers read keys and values where they are.
    q, k, v = (
        comm.asarray(np.einsum("sw,whd->shd", x, weight)[None].astype(dtype)) for weight in weights
    )
    out, lse = mk.ring_attention(
        q,
        k,
        v,
        comm=comm,
        seq_counts=[len(part) for part in parts],
        causal=True,
        layout="zigzag",
        return_lse=True,
    )
    comm.synchronize()
    return own, comm.asnumpy(out)[0], comm.asnumpy(lse)[0].T


def row(position, weights):
    """Return attention and log-sum-exp at one position, in float64."""
    x = embedding(np.arange(position + 1), len(weights[0]))
    q, k, v = (np.einsum("sw,whd->hsd", x, weight) for weight in weights)
    k, v = (part.repeat(len(q) // len(part), axis=0) for part in (k, v))
    scores = (k @ q[:, -1, :, None])[..., 0] / np.sqrt(q.shape[-1])
    lse = np.logaddexp.reduce(scores, axis=1)
    return np.einsum("hs,hsd->hd", np.exp(scores - lse[:, None]), v), lse


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--positions", type=int, default=2000, help="of the sequence")
    parser.add_argument("--heads", type=int, default=8, help="of queries, a multiple of 2")
    parser.add_argument("--columns", type=int, default=32, help="of a head")
    parser.add_argument("--samples", type=int, default=10, help="rows checked on every rank")
    asked = parser.parse_args()

    weights = projections(64, asked.heads, 2, asked.columns)
    with mk.Communicator(MPI.COMM_WORLD) as comm:
        own, out, lse = attend(asked.positions, comm, weights)
        worst = 0.0
        random = np.random.default_rng(comm.rank)
        for i in random.choice(len(own), min(asked.samples, len(own)), replace=False):
            pairs = zip((out[i], lse[i]), row(own[i], weights), strict=True)
            worst = max(worst, *(float(abs(got - right).max()) for got, right in pairs))
        worst = comm.mpi.allreduce(worst, MPI.MAX)
        if comm.rank == 0:
            print(
                f"{asked.positions} positions on {comm.size} rank(s), target {comm.target}: "
                f"largest difference of sampled rows from float64 {worst:.1e}",
                flush=True,
            )
        return int(not worst < 1e-4)


if __name__ == "__main__":
    sys.exit(main())
