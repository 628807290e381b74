#!/usr/bin/env python3
"""Time of one all-reduce in the alpha-beta model: a small program, as an example of an external simulator.

A message of n bytes takes alpha + n beta (Hockney, Parallel Computing 20, 1994), reducing it n gamma. Ring and
recursive doubling as in Thakur, Rabenseifner, Gropp: Optimization of Collective Communication Operations in MPICH
(IJHPCA 19, 2005); the chunks of a ring are sent one after the other: they cost latency and save buffers. Tree, derived
here: a reduction to the root of a binary tree, then a broadcast from it, both pipelined in chunks. A node receives one
message while it sends one, and has two children, so a chunk enters every two steps.

Reads the design as JSON from standard input, writes the metrics as JSON to standard output.
"""

import json
import math
import sys


def ring(p, n, chunks, cost):
    """(time [s], buffer [bytes]): p - 1 steps that reduce n / p bytes each, and p - 1 that gather them."""
    alpha, beta, gamma = cost
    return 2 * (p - 1) * (chunks * alpha + n / p * beta) + (p - 1) * n / p * gamma, n / p / chunks


def tree(p, n, chunks, cost):
    """(time [s], buffer [bytes]): a buffer for each child."""
    alpha, beta, gamma = cost
    steps, part = 2 * (math.floor(math.log2(p)) + chunks - 1), n / chunks
    return steps * (2 * (alpha + part * beta) + part * gamma), 2 * part


def recursive_doubling(p, n, chunks, cost):
    """(time [s], buffer [bytes]): whole messages between ever more distant pairs."""
    alpha, beta, gamma = cost
    if p & (p - 1):
        raise ValueError("recursive doubling needs a power of two of GPUs")
    if chunks > 1:
        raise ValueError("recursive doubling sends whole messages: collective.chunks must be 1")
    return math.log2(p) * (alpha + n * (beta + gamma)), n


def main():
    """One design in, one answer out."""
    design = json.load(sys.stdin)
    fabric, collective = design["fabric"], design["collective"]
    cost = (fabric["alpha_s"], 1 / fabric["link_bytes_per_s"], 1 / fabric["reduce_bytes_per_s"])
    algorithm = {"ring": ring, "tree": tree, "recursive_doubling": recursive_doubling}[collective["algorithm"]]
    try:
        time_s, buffer = algorithm(fabric["num_gpus"], collective["message_bytes"], collective["chunks"], cost)
    except ValueError as error:
        print(json.dumps({"status": "infeasible", "reason": str(error)}))
        return
    print(json.dumps({"time_s": time_s, "staging_bytes": buffer}))


if __name__ == "__main__":
    main()
