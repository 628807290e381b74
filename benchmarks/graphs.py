"""The graphs that engines are timed on: one or more GPUs that gather over seven links while GEMMs consume what came."""

from __future__ import annotations

import numpy as np

from simulators.graph import GraphBuilder, TaskGraph

LINKS = 7
HBM_OF_COPY, HBM_OF_GEMM = 0.02, 0.3  # of the GPU's HBM, while the task runs alone


def pipeline(  # noqa: PLR0913
    chunks: int, *, gpus: int = 1, designs: int = 1, chained: bool = True, alike: bool = False, flows: bool = False
) -> TaskGraph:
    """8 * chunks * gpus tasks, all of different length, so that no two end together.

    The seven arrivals of a step release a GEMM chunk; GEMM chunks run one after the other, and so do a link's copies
    (chained), or all copies are issued at once. alike: all GPUs do the same. flows: uses of one unit per unit of work,
    as SimGrid's flows have them, with room in HBM for all.
    """
    random, build = np.random.default_rng(0), GraphBuilder()
    copies, gemms = 1 + 0.2 * random.random((gpus, chunks, LINKS, designs)), random.random((gpus, chunks, designs))
    copy_use, gemm_use, room = (1.0, 1.0, 2.0 * (LINKS + 1)) if flows else (HBM_OF_COPY, HBM_OF_GEMM, 1.0)
    for gpu in range(gpus):
        copy, gemm = (copies[0], gemms[0]) if alike else (copies[gpu], gemms[gpu])
        hbm, cu = build.resource(f"hbm.{gpu}", room), build.resource(f"cu.{gpu}", 1.0)
        links = [build.resource(f"link.{gpu}.{link}", 1.0) for link in range(LINKS)]
        last: dict[int, list[int]] = {link: [] for link in range(-1, LINKS)}
        for chunk in range(chunks):
            arrived = []
            for link in range(LINKS):
                before = last[link] if chained else []
                uses = {links[link]: 1.0, hbm: copy_use}
                name = f"copy {gpu}.{chunk}.{link}"
                arrived.append(build.task(name, "transfer", after=before, uses=uses, work=copy[chunk, link], cap=1.0))
                last[link] = arrived[-1:]
            work, uses = 1.1 * (1 + 0.2 * gemm[chunk]), {cu: 1.0, hbm: gemm_use}
            before = [*arrived, *last[-1]]
            last[-1] = [build.task(f"gemm {gpu}.{chunk}", "gemm", after=before, uses=uses, work=work, cap=1.0)]
    return build.build()
