"""Racks of 72 GPUs and all other machines: overlap schedules run on them, or say why not, at a cost that is told."""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dse.config.compose import request
from dse.errors import ConfigError
from dse.study.fidelity import point_at_level
from dse.study.plan import plan
from simulators.compiled import dispatcher_of
from simulators.engines.fluid import many_classes
from simulators.overlap.backend import OverlapBackend
from simulators.taskgraph.graph import TaskGraph
from simulators.taskgraph.symmetry import reduce_graph
from tests.graphs import graphs
from tests.support import design, drawn, results, shipped
from tests.test_lockstep import kernel_rows, varied

NODE = OverlapBackend("fluid", gpus="all", imbalance=0.1)
RUN = {"gb200_72", "gb300_72", "b200_8", "h100_8", "mi300x_8", "mi355x_8", "t3_ring"}
"""Machines that must not be refused."""


KNOBS = {
    "pieces by DMA": {"name": "hetero_unfused_1d", "comm_engine": "dma", "num_chunks": 2},
    "pieces by CUs": {"name": "hetero_unfused_1d", "comm_engine": "cu", "num_chunks": 2, "comm_cus": 8},
}


def makespans(system: str, knobs: Mapping[str, object]) -> list[float]:
    """Makespan [s] of a point of the study at each level, from the coarsest. Raises ConfigError as the study does."""
    few = [f"space.schedule.{name}=choice({value})" for name, value in knobs.items()]
    planned = plan(request(["study=ficco_sweep", f"system={system}", "workload.only=[g4]", "tracking=none", *few]))
    point, times = {f"schedule.{name}": value for name, value in knobs.items()}, []
    for level in planned.levels:
        block = point_at_level(planned, level, "g4", {**point, "schedule.priority": "equal"})
        assert block.design is not None, block.reason
        (result,) = results(level.spec.make(), [block.design])
        assert result.status == "ok", (system, level.name, result.reason)
        times.append(result.metrics["makespan_s"])
    return times


@pytest.mark.more
def test_every_machine_runs_the_study_of_schedules_or_is_refused_with_a_reason() -> None:
    """Where it runs, nothing is faster for contention, or for unequal shares but by how their waves round."""
    run = set()
    for system in shipped("system"):
        for title, knobs in KNOBS.items():
            try:
                coarse, study, node = makespans(system, knobs)
            except ConfigError as error:
                assert re.search(r"system\.\S+.*: is ", str(error)), error
                break
            assert coarse <= study * (1 + 1e-9), (system, title)
            assert node >= study * 0.98, (system, title)
            run.add(system)
    assert run >= RUN


@pytest.mark.parametrize("pattern", ["all_gather", "reduce_scatter"])
@pytest.mark.parametrize("engine", ["dma", "cu"])
@pytest.mark.parametrize("schedule", ["serial", "hetero_fused_1d", "hetero_unfused_1d", "shard_p2p", "signalled"])
def test_the_tasks_and_laws_of_a_node_are_told_before_it_is_lowered(schedule: str, engine: str, pattern: str) -> None:
    knobs = {} if schedule == "signalled" else {"schedule.comm_engine": engine}
    point = design(
        schedule,
        {**knobs, "system.node.num_gpus": 12, "system.node.topology": "switch"},
        shape=(12 * 1024, 4096, 4096),
        pattern=pattern,
    )
    graph = NODE._simulation.lower(point)
    lowered = graph.num_tasks + len(graph.slowed)
    assert lowered <= NODE.num_tasks(point) <= 2 * lowered


@pytest.mark.slow
@drawn(60)
@given(graph=graphs(), seed=st.integers(0, 2**32))
def test_classes_that_a_law_names_and_all_classes_asked_anew_come_to_the_same(graph: TaskGraph, seed: int) -> None:
    prepared, table = varied(reduce_graph(graph).graph, seed, designs=2)
    all_anew = kernel_rows(prepared, table, many_classes.run)
    with pytest.MonkeyPatch.context() as patch, np.errstate(all="ignore"):
        patch.setattr(many_classes, "_FEW", 0)
        named = kernel_rows(prepared, table, dispatcher_of(many_classes.run).py_func)
    np.testing.assert_allclose(named, all_anew, rtol=1e-9, atol=1e-12)
