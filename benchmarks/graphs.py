"""The graphs that engines are timed on: GPUs that gather over seven links while GEMMs consume what came."""

from __future__ import annotations

from typing import Literal

import numpy as np

from simulators.taskgraph.graph import GraphBuilder, TaskGraph

LINKS = 7
HBM_OF_COPY, HBM_OF_GEMM = 0.02, 0.3  # of the GPU's HBM, while the task runs alone

Kind = Literal["distinct", "regular", "at once", "flows"]


def pipeline(chunks: int, *, gpus: int = 1, designs: int = 1, kind: Kind = "distinct") -> TaskGraph:
    """8 * chunks * gpus tasks. The seven arrivals of a step release a GEMM chunk; GEMM chunks and copies are chains.

    distinct: all tasks differ in length, no two end together. regular: all copies of a design have one length, all
    GEMM chunks another, so that links and GPUs do the same. at once: distinct, and all copies are issued at the start.
    flows: distinct, and uses are one unit per unit of work, as SimGrid's flows have them, with room in HBM for all.
    """
    random, build = np.random.default_rng(0), GraphBuilder()
    size = (1, 1, 1) if kind == "regular" else (gpus, chunks, LINKS)
    copies = np.broadcast_to(1 + 0.2 * random.random((*size, designs)), (gpus, chunks, LINKS, designs))
    gemms = np.broadcast_to(1.1 + 0.22 * random.random((*size[:2], designs)), (gpus, chunks, designs))
    copy_use, gemm_use, room = (1.0, 1.0, 2.0 * (LINKS + 1)) if kind == "flows" else (HBM_OF_COPY, HBM_OF_GEMM, 1.0)
    for gpu in range(gpus):
        hbm, cu = build.resource(f"hbm.{gpu}", room), build.resource(f"cu.{gpu}", 1.0)
        links = [build.resource(f"link.{gpu}.{link}", 1.0) for link in range(LINKS)]
        last: dict[int, list[int]] = {link: [] for link in range(-1, LINKS)}
        for chunk in range(chunks):
            arrived = []
            for link in range(LINKS):
                before = [] if kind == "at once" else last[link]
                uses, work = {links[link]: 1.0, hbm: copy_use}, copies[gpu, chunk, link]
                name = f"copy {gpu}.{chunk}.{link}"
                arrived.append(build.task(name, "transfer", after=before, uses=uses, work=work, cap=1.0))
                last[link] = arrived[-1:]
            work, uses, before = gemms[gpu, chunk], {cu: 1.0, hbm: gemm_use}, [*arrived, *last[-1]]
            last[-1] = [build.task(f"gemm {gpu}.{chunk}", "gemm", after=before, uses=uses, work=work, cap=1.0)]
    return build.build()
