"""How fast the engines run the same graphs: `python -m benchmarks.engine [--json]`.

The graph is one representative GPU: an all-gather over seven links in C steps whose arrivals release GEMM chunks, links
and GEMMs in order, HBM shared; every duration is jittered so that no two tasks end together. The last cases are
larger. CPU time, best of several runs; everything in one process.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from simulators.analytic import ENGINE as ANALYTIC
from simulators.event import ENGINE as EVENT
from simulators.fluid import ENGINE as FLUID
from simulators.graph import GraphBuilder, TaskGraph

LINKS = 7


def pipeline(chunks: int, *, gpus: int = 1, designs: int = 1, chained: bool = True) -> TaskGraph:
    """8 * chunks * gpus tasks. chained: links move one chunk after the other, else all are issued at once."""
    random, build = np.random.default_rng(0), GraphBuilder()
    for gpu in range(gpus):
        hbm, cu = build.resource(f"hbm.{gpu}", 1.0), build.resource(f"cu.{gpu}", 1.0)
        links = [build.resource(f"link.{gpu}.{link}", 1.0) for link in range(LINKS)]
        last: dict[int, list[int]] = {link: [] for link in range(-1, LINKS)}
        for chunk in range(chunks):
            arrived = []
            for link in range(LINKS):
                work = 1 + 0.2 * random.random(designs)
                name = f"copy {gpu}.{chunk}.{link}"
                before = last[link] if chained else []
                uses = {links[link]: 1.0, hbm: 0.02}
                arrived.append(build.task(name, "transfer", after=before, uses=uses, work=work, cap=1.0))
                last[link] = arrived[-1:]
            work, uses = 1.1 * (1 + 0.2 * random.random(designs)), {cu: 1.0, hbm: 0.3}
            before = [*arrived, *last[-1]]
            last[-1] = [build.task(f"gemm {gpu}.{chunk}", "gemm", after=before, uses=uses, work=work, cap=1.0)]
    return build.build()


def seconds(run: Callable[[], Any], *, repeats: int) -> float:
    """CPU time of the fastest run [s]."""
    best = float("inf")
    for _ in range(repeats):
        began = time.process_time()
        run()
        best = min(best, time.process_time() - began)
    return best


def measure(chunks: int, *, gpus: int = 1, chained: bool = True) -> dict[str, float]:
    """Seconds per design of each engine on one graph."""
    designs = max(1, 200_000 // (8 * chunks * gpus))
    one, many = (
        pipeline(chunks, gpus=gpus, chained=chained),
        pipeline(chunks, gpus=gpus, designs=designs, chained=chained),
    )
    found = {"tasks": float(one.num_tasks), "fluid": seconds(lambda: FLUID.run(many), repeats=3) / designs}
    if one.num_tasks <= 4096:
        found["event"] = seconds(lambda: EVENT.run(one), repeats=1 if one.num_tasks > 100 else 3)
        agree = np.allclose(EVENT.run(one).finished, FLUID.run(one).finished, rtol=1e-9, atol=0)
        found["agree"] = float(agree)
    if not any(ANALYTIC.run(one).refused):
        found["analytic"] = seconds(lambda: ANALYTIC.run(many), repeats=1) / designs
    return found


def main() -> None:
    """Print a table, or with `--json` one object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    as_json = parser.parse_args().json
    FLUID.run(pipeline(1))  # compiled before anything is timed
    cases = {
        "1 step": measure(1),
        "8 steps": measure(8),
        "64 steps": measure(64),
        "64 steps, all issued at once": measure(64, chained=False),
        "64 steps, 8 GPUs": measure(64, gpus=8),
        "12,500 steps": measure(12_500),
    }
    if as_json:
        print(json.dumps(cases, indent=2))
        return
    widths = (30, 9, 13, 13, 13, 9, 16)
    heads = ("graph", "tasks", "SimPy", "analytic", "fluid", "ns/task", "fluid vs SimPy")
    for row in (heads, *(_row(name, found) for name, found in cases.items())):
        print("".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)))


def _row(name: str, found: dict[str, float]) -> tuple[str, ...]:
    times = [f"{found[engine] * 1e6:,.1f} us" if engine in found else "-" for engine in ("event", "analytic", "fluid")]
    ratio = f"{found['event'] / found['fluid']:,.0f} x" if "event" in found else "-"
    return name, f"{found['tasks']:,.0f}", *times, f"{found['fluid'] / found['tasks'] * 1e9:.0f}", ratio


if __name__ == "__main__":
    main()
