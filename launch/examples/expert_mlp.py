"""A mixture of experts whose experts are spread over the ranks, against a dense evaluation.

    mpirun -n 4 python launch/examples/expert_mlp.py --tokens 2000

A router sends each token to the experts that suit it best, a few of many, and weighs them by a
softmax. Each rank has some of the tokens and some of the experts; one fused call brings the tokens
to their experts, applies these, and brings the weighted sums back. How many tokens go where is not
known before: the numbers of tokens, and the router's choice, are others in every step. In each
step, tokens that are drawn at random go through all experts in float64, and are compared.
"""

import argparse
import sys

import numpy as np
from mpi4py import MPI

import mkernel_cp as mk


def route(x, router, chosen):
    """Return the experts of each token and their weights: a softmax over those chosen."""
    scores = x.astype(np.float64) @ router
    ids = np.argsort(-scores, axis=1)[:, :chosen]
    best = np.take_along_axis(scores, ids, axis=1)
    weights = np.exp(best - best[:, :1])
    return ids, (weights / weights.sum(axis=1, keepdims=True)).astype(np.float32)


def expert(number, width, inner):
    """Return the weights of an expert, [gate | up] and down; whoever needs it can make it."""
    random = np.random.default_rng([1, number])
    first = random.standard_normal((width, 2 * inner)) / np.sqrt(width)
    second = random.standard_normal((inner, width)) / np.sqrt(inner)
    return first.astype(np.float32), second.astype(np.float32)


def dense(x, ids, weights, experts):
    """Return the layer's result for one token, with all experts and in float64."""
    out = np.zeros(len(x))
    for number, (first, second) in enumerate(experts):
        gate, up = np.split(x.astype(np.float64) @ first, 2)
        made = (gate / (1 + np.exp(-gate)) * up) @ second
        out += weights[ids == number].sum() * made
    return out


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=1000, help="of all ranks, at the most")
    parser.add_argument("--experts", type=int, default=10, help="of all ranks")
    parser.add_argument("--chosen", type=int, default=3, help="of each token")
    parser.add_argument("--width", type=int, default=64, help="of a token")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--samples", type=int, default=20, help="tokens checked on every rank")
    asked = parser.parse_args()

    inner = asked.width // 2 * 3
    experts = [expert(number, asked.width, inner) for number in range(asked.experts)]
    router = np.random.default_rng(0).standard_normal((asked.width, asked.experts))
    with mk.Communicator(MPI.COMM_WORLD) as comm:
        random = np.random.default_rng([2, comm.rank])
        most = max(comm.row_counts(asked.tokens))
        own = experts[comm.rows(asked.experts)]
        w1 = np.array([first for first, _ in own], np.float32).reshape(-1, asked.width, 2 * inner)
        w2 = np.array([second for _, second in own], np.float32).reshape(-1, inner, asked.width)
        w1, w2 = comm.asarray(w1), comm.asarray(w2)  # on the GPU, if there is one
        worst = 0.0
        for _ in range(asked.steps):
            tokens = int(random.integers(0, most + 1))
            x = random.standard_normal((tokens, asked.width)).astype(np.float32)
            ids, weights = route(x, router, min(asked.chosen, asked.experts))
            made = mk.moe_layer(
                *(comm.asarray(part) for part in (x, ids, weights)),
                *(w1, w2),
                comm=comm,
                num_experts=asked.experts,
                max_tokens=most,
            )
            y = comm.asnumpy(made)
            for i in random.choice(tokens, min(asked.samples, tokens), replace=False):
                right = dense(x[i], ids[i], weights[i], experts)
                worst = max(worst, float(abs(y[i] - right).max()))
        worst = comm.mpi.allreduce(worst, MPI.MAX)
        if comm.rank == 0:
            print(
                f"{asked.steps} steps of up to {asked.tokens} tokens to {asked.chosen} of "
                f"{asked.experts} experts on {comm.size} rank(s), target {comm.target}: largest "
                f"difference of sampled tokens from float64 {worst:.1e}",
                flush=True,
            )
        return int(not worst < 1e-4)


if __name__ == "__main__":
    sys.exit(main())
