"""The yardstick: the chained pipeline of `benchmarks/graphs.py` on one GPU, and nothing else, written by hand.

It knows that links and GEMMs are chains, that a step's arrivals release its GEMM, and how HBM is shared between two
kinds of tasks; it finds the next end by a scan over eight lanes, and keeps the same totals as the engine.
"""

from __future__ import annotations

import numpy as np

from simulators.compiled import compile_lazily
from simulators.taskgraph.graph import Floats


def hand_loop(copies: Floats, gemms: Floats, hbm: tuple[float, float]) -> Floats:
    """[B, 3]: makespan, GEMM seconds, copy seconds. copies [B, C, L], gemms [B, C]: seconds alone."""
    found = np.empty((len(copies), 3))
    _run(copies, gemms, hbm[0], hbm[1], found)
    return found


@compile_lazily
def _run(  # noqa: C901, PLR0912
    copies: Floats, gemms: Floats, hbm_copy: float, hbm_gemm: float, found: Floats
) -> None:
    designs, chunks, links = copies.shape
    end = np.empty(links + 1)
    for design in range(designs):
        position, arrived = np.zeros(links, np.int64), np.zeros(chunks, np.int64)
        chunk, running, moving = 0, False, links
        busy = spent = 0.0
        slow = 1.0
        for link in range(links):
            end[link] = copies[design, 0, link]
        end[links] = np.inf
        while True:
            lane, now = 0, end[0]
            for other in range(1, links + 1):
                if end[other] < now:
                    lane, now = other, end[other]
            if lane == links:
                busy += gemms[design, chunk] / slow
                chunk += 1
                running = False
                end[links] = np.inf
                if chunk == chunks:
                    break
            else:
                step = position[lane]
                arrived[step] += 1
                position[lane] = step + 1
                spent += copies[design, step, lane] / slow
                if step + 1 < chunks:
                    end[lane] = now + copies[design, step + 1, lane] / slow
                else:
                    end[lane] = np.inf
                    moving -= 1
            if not running and arrived[chunk] == links:
                running = True
                end[links] = now + gemms[design, chunk] / slow
            demand = moving * hbm_copy + (hbm_gemm if running else 0.0)
            fresh = min(1.0, 1.0 / demand) if demand > 0.0 else 1.0
            if fresh != slow:
                for other in range(links + 1):
                    if end[other] < np.inf:
                        end[other] = now + (end[other] - now) * slow / fresh
                slow = fresh
        found[design, 0], found[design, 1], found[design, 2] = now, busy, spent
