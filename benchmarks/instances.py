"""Instances and graphs that bounds are measured on, drawn with a seed.

Gathers: chunks of the shards of 1 to 7 peers arrive, and a GEMM chunk uses each of them, or all of a step. A chunk
comes over the link of its peer by a DMA engine, of which there may be fewer than links. In half of the gathers it may
come by a kernel as well, which takes CUs from the GEMM, or over the link of another peer, which passes it on; and a
GEMM chunk takes all CUs, or longer on those that a kernel leaves.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dse_optimal.instance import Instance, Job, JobServer, Way
from simulators.taskgraph.graph import GraphBuilder, TaskGraph

CUS, KERNEL_CUS, MOST_JOBS = 8, 2, 60
_FEW = np.array([0.25, 0.5, 1.0, 2.0, 3.0])


def gather(seed: int) -> Instance:
    """A gather beside its GEMM, of up to 60 jobs; all lengths are whole."""
    random = np.random.default_rng(seed)
    peers, fused, choice = int(random.integers(1, 8)), bool(random.integers(2)), bool(random.integers(2))
    width = peers + (1 if fused else peers)
    chunks = int(random.integers(1, MOST_JOBS // width + 1))
    servers = [JobServer(f"link {peer}") for peer in range(peers)]
    cus, dma, stream = peers, peers + 1, peers + 2
    servers += [JobServer("CUs", CUS), JobServer("DMA engines", int(random.integers(2, peers + 2)), from_issue=True)]
    servers.append(JobServer("stream", from_issue=True))
    launch, setup = int(random.integers(0, 4)), int(random.integers(0, 7))
    copies, gemms = random.integers(5, 60, (chunks, peers)), random.integers(5, 60, (chunks, peers))
    jobs: list[Job] = []
    for chunk in range(chunks):
        arrived = []
        for peer in range(peers):
            seconds = int(copies[chunk, peer])
            ways = [Way(float(seconds), {peer: 1, dma: 1}, float(setup), "DMA")]
            if choice:
                ways.append(Way(float(seconds - seconds // 4), {peer: 1, cus: KERNEL_CUS}, float(launch), "CUs"))
                if peers > 1:
                    ways.append(_relayed(random, seconds + seconds // 5, peer, (peers, dma, setup)))
            arrived.append(len(jobs))
            jobs.append(Job(f"chunk {chunk} of {peer}", "transfer", tuple(ways)))
        parts = (
            [(arrived, int(gemms[chunk].sum()))] if fused else [([at], int(gemms[chunk, at % width])) for at in arrived]
        )
        for after, seconds in parts:
            ways = [Way(float(seconds), {cus: CUS, stream: 1}, float(launch), "all CUs")]
            if choice:
                beside = CUS - KERNEL_CUS
                longer = -(-seconds * CUS // beside)
                ways.append(Way(float(longer), {cus: beside, stream: 1}, float(launch), f"{beside} of {CUS} CUs"))
            jobs.append(Job(f"gemm {len(jobs)}", "gemm", tuple(ways), tuple(after)))
    return Instance(tuple(jobs), tuple(servers))


def _relayed(random: Any, seconds: int, peer: int, of: tuple[int, int, int]) -> Way:
    """A way over the link of another peer, which passes the chunk on."""
    peers, dma, setup = of
    relay = (peer + int(random.integers(1, peers))) % peers
    return Way(float(seconds), {relay: 1, dma: 1}, float(2 * setup), f"DMA by {relay}")


def random_graph(seed: int, most: int = 24) -> TaskGraph:
    """A graph of tasks with resources, pools, delays, caps, weights, priorities and contention laws.

    Half of the numbers are of a few values, so that tasks end together.
    """
    random, build = np.random.default_rng(seed), GraphBuilder()

    def amount() -> float:
        return float(random.choice(_FEW) if random.integers(2) else random.uniform(0.1, 10))

    resources = [build.resource(f"r{place}", amount()) for place in range(random.integers(0, 5))]
    pools = [build.pool(f"p{place}", int(random.integers(1, 4))) for place in range(random.integers(0, 3))]
    groups = ["", "a", "b", "c"] if random.integers(2) else [""]
    for pair in ("ab", "ba", "ca", "bc") if len(groups) > 1 else ():
        if random.integers(2):
            build.slows(pair[0], while_active=pair[1], factor=min(1.0, amount() / 10))
    for index in range(random.integers(1, most + 1)):
        after = random.choice(index, min(index, int(random.integers(0, 4))), replace=False).tolist() if index else []
        count = min(len(resources), int(random.integers(0, 4)))
        uses = {int(place): amount() for place in random.choice(len(resources), count, replace=False)} if count else {}
        numbers = {"delay": 0.0 if random.integers(2) else amount(), "weight": amount()}
        numbers["work"] = 0.0 if random.integers(4) == 0 else amount()
        if not uses or random.integers(2):
            numbers["cap"] = amount()
        place = {"pool": int(random.integers(-1, len(pools))), "priority": int(random.integers(0, 3))}
        build.task(f"t{index}", "gemm", after=after, uses=uses, group=str(random.choice(groups)), **numbers, **place)
    return build.build()
