"""Which of a GEMM and a collective is launched first, and by which priority: workgroups that are placed stay."""

from __future__ import annotations

import csv
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dse.backend import Batch
from dse.config.options import conf_dir
from simulators.overlap.backend import OverlapBackend
from simulators.overlap.design import OverlapDesign
from tests.support import design_tree, drawn, lower, shipped

BACKEND = OverlapBackend("fluid")
FIRST: dict[str, Any] = {"launch_order": "comm_first"}
SECOND: dict[str, Any] = {"launch_order": "gemm_first"}
URGENT: dict[str, Any] = {"stream_priority": "communication"}
SOONEST: dict[str, Any] = {**SECOND, **URGENT}
IN_WAVES = ("a100_8", "mi300x_8", "mi355x_8")


def designed(
    system: str, size: int = 8192, *, machine: Any = None, pattern: str = "all_gather", **knobs: Any
) -> OverlapDesign:
    """A square GEMM beside a collective. machine: values of its GPU's library."""
    tree = design_tree("c3_base", {f"schedule.{name}": value for name, value in knobs.items()}, shape=(size,) * 3)
    tree["system"] = shipped("system")[system]
    tree["system"]["gpu"]["gemm"] = {**tree["system"]["gpu"]["gemm"], **(machine or {})}
    entry = {"name": "x", "m": size, "n": size, "k": size, "payload_bytes": 2 * size * size}
    tree["workload"] = {"name": "one", "shards": 1, "pattern": pattern, "precision": "bf16", "shapes": [entry]}
    (design,) = (BACKEND.design(scenario) for scenario in BACKEND.scenarios(tree).values())
    return design


def seconds(system: str, size: int = 8192, **values: Any) -> float:
    """Time of it."""
    design = designed(system, size, **values)
    assert BACKEND.problems(design) == []
    (result,) = BACKEND.evaluate([Batch(design)])
    assert result.ok.all()
    return float(result.column("makespan_s")[0])


@pytest.mark.parametrize("system", ["h100_8", "h200_8", "b200_8"])
def test_priority_frees_no_cus_of_workgroups_that_persist(system: str) -> None:
    assert seconds(system, 4096, **SECOND, **URGENT) == seconds(system, 4096, **SECOND) > seconds(system, 4096, **FIRST)
    waves = {"persistent": False}
    first, urgent, second = (seconds(system, 4096, machine=waves, **knobs) for knobs in (FIRST, SOONEST, SECOND))
    assert urgent == pytest.approx(first, rel=0.01) and urgent < 0.9 * second


@pytest.mark.parametrize("system", ["h100_8", "h200_8", "b200_8"])
@pytest.mark.parametrize("size", [4096, 8192])
def test_a_collective_waits_for_all_of_a_gemm_whose_workgroups_persist(system: str, size: int) -> None:
    """No CU is freed before: it takes its own time after the GEMM (starts.csv)."""
    design = designed(system, size, **SECOND)
    graph, (result,) = lower(design), BACKEND.evaluate([Batch(design)])
    early = next(task for task, name in enumerate(graph.tasks) if "early waves" in name)
    assert float(np.ravel(graph["work"])[early]) == 1
    gemm_s, comm_s, both_s = (float(result.column(name)[0]) for name in ("gemm_s", "comm_s", "makespan_s"))
    assert both_s >= (gemm_s + comm_s) * (1 - 1e-6)


@pytest.mark.parametrize(("size", "share"), [(8192, 108 / 2048), (2048, 108 / 256)])
def test_a_collective_of_high_priority_begins_when_the_first_wave_retires(size: int, share: float) -> None:
    """A tile on each of 108 SMs, of 2048 tiles of 256 x 128 and of 256 of 128 x 128."""
    design = designed("a100_8", size, **SOONEST)
    graph = lower(design)
    early = next(task for task, name in enumerate(graph.tasks) if "early waves" in name)
    assert float(np.ravel(graph["work"])[early]) == pytest.approx(share)


@pytest.mark.parametrize("assignment", ["dynamic", "stream_k"])
def test_priority_frees_no_cus_of_workgroups_that_take_tiles_as_they_go(assignment: str) -> None:
    machine = {"assignment": assignment}
    second = seconds("mi300x_8", machine=machine, **SECOND)
    assert seconds("mi300x_8", machine=machine, **SECOND, **URGENT) == second


@pytest.mark.parametrize("placed", [FIRST, {**SECOND, "partition": True}])
@pytest.mark.parametrize("system", IN_WAVES)
def test_priority_changes_nothing_where_the_collective_has_its_cus(system: str, placed: dict[str, Any]) -> None:
    assert seconds(system, **placed, **URGENT) == seconds(system, **placed)


@drawn(12)
@given(
    st.sampled_from(["mi300x_8", "mi355x_8"]),
    st.integers(1, 24),
    st.integers(2, 48),
    st.sampled_from(["all_gather", "all_reduce"]),
)
def test_a_run_with_priority_lies_between_those_of_both_orders(system: str, sides: int, cus: int, pattern: str) -> None:
    """Where no stream costs time to part, and but for a wave of some twenty."""
    first, urgent, second = (
        seconds(system, 512 * sides, pattern=pattern, comm_cus=cus, **knobs) for knobs in (FIRST, SOONEST, SECOND)
    )
    assert 0.94 * min(first, second) <= urgent <= 1.06 * max(first, second)


def test_priority_changed_nothing_beside_gemms_of_cublas() -> None:
    """Of 90 pairs on H100 and as many on H200 the second kernel ends when it ends without priority."""
    for folder in ("h100_2026-11-26", "h200_2026-11-26"):
        with (conf_dir() / "data" / "measured" / folder / "starts.csv").open() as lines:
            rows = list(csv.DictReader(line for line in lines if not line.startswith("#")))
        second = [row for row in rows if row["order"] == "gemm first"]
        ends = {name: [float(row["other_end_s"]) for row in second if row["priority"] == name] for name in ("0", "-1")}
        assert len(ends["0"]) == len(ends["-1"]) == 90
        apart = np.array(ends["-1"]) / np.array(ends["0"]) - 1
        assert abs(np.median(apart)) < 1e-3 and np.quantile(abs(apart), 0.9) < 0.02
