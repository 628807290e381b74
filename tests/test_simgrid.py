"""SimGrid as a witness from outside: its flows mean what tasks mean that use one unit of each resource per work.

Needs an interpreter with SimGrid's module (Debian: `python3-simgrid`); skipped where there is none.
"""

from __future__ import annotations

import numpy as np
import pytest
from conftest import ENGINES, EXACT

from benchmarks.peers import run_flows, simgrid_python
from simulators.taskgraph.graph import GraphBuilder, TaskGraph

pytestmark = pytest.mark.slow


def flows(seed: int, parts: int = 40) -> TaskGraph:
    """Unconnected random graphs side by side, as a SimGrid process runs one simulation; works in whole billionths."""
    random, build = np.random.default_rng(seed), GraphBuilder()
    for part in range(parts):
        count = int(random.integers(1, 6))
        links = [build.resource(f"link {part}.{i}", float(random.choice([1.0, 2.0, 3.5]))) for i in range(count)]
        tasks: list[int] = []
        for number in range(int(random.integers(2, 25))):
            after = random.permutation(tasks)[: random.integers(0, 4)].tolist() if tasks else []
            used = random.permutation(links)[: random.integers(1, 4)].tolist()
            work = float(random.choice([1.0, 2.0, round(float(random.uniform(0.1, 5)), 9)]))
            name = f"{part}.{number}"
            tasks.append(build.task(name, "transfer", after=after, uses=dict.fromkeys(used, 1.0), work=work))
    return build.build()


@pytest.mark.skipif(simgrid_python() is None, reason="no Python interpreter here can import simgrid")
@pytest.mark.parametrize("seed", range(5))
def test_simgrid_finishes_every_flow_when_the_engines_do(seed: int) -> None:
    graph = flows(seed)
    theirs, _ = run_flows(graph)
    timelines = [ENGINES[name].run(graph) for name in EXACT]
    exact = [timeline.finished[0] for timeline in timelines if not timeline.reason(0)]
    assert len(exact) >= 2
    for finished in exact:
        np.testing.assert_allclose(theirs, finished, rtol=1e-9)
