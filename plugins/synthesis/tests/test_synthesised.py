"""Schedules step by step: what they need to run, what the search finds, and that nobody loses a byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dse.backend import Batch
from dse_synthesis.schedule import SynthesisedSchedule
from simulators.overlap.backend import OverlapBackend
from simulators.overlap.design import OverlapDesign
from tests.support import shipped

FLUID = OverlapBackend("fluid")
GEMM = {"m": 16384, "n": 16384, "k": 8192}
TWO: list[dict[str, Any]] = [
    {"local": [0, 2]},
    {"move": [0, 1]},
    {"move": [1, 2], "kernel": 0},
    {"compute": [0, 1]},
    {"compute": [1, 2]},
]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def design(pattern: str = "all_gather", topology: str = "mesh", **keys: Any) -> OverlapDesign:
    """A GEMM and a collective on 8 x MI300X, with a schedule of some keys."""
    workload = {
        "name": "one",
        "operators": {
            "gather": {"kind": "collective", "pattern": pattern, "rows": GEMM["m"], "cols": GEMM["k"]},
            "gemm": {"kind": "gemm", **GEMM, "shards": None, "after": ["gather"]},
        },
    }
    if pattern == "reduce_scatter":
        workload["operators"] = {
            "gemm": {"kind": "gemm", **GEMM, "shards": 8, "split": "k"},
            "scatter": {
                "kind": "collective",
                "pattern": pattern,
                "rows": GEMM["m"],
                "cols": GEMM["n"],
                "after": ["gemm"],
            },
        }
    system = shipped("system")["mi300x_8"]
    system = {**system, "node": {**system["node"], "topology": topology}}
    schedule = {**shipped("schedule")["synthesised"], **keys}
    return FLUID.design({"system": system, "workload": workload, "schedule": schedule})


def steps(
    *steps_in_order: dict[str, Any], parts: int = 4, cuts: tuple[int, ...] = (0, 1, 4), **keys: Any
) -> OverlapDesign:
    """A design with steps."""
    return design(steps=list(steps_in_order), parts=parts, cuts=list(cuts), kernels=[16], **keys)


def makespan(point: OverlapDesign, backend: OverlapBackend = FLUID) -> float:
    """Makespan of a design that has a result."""
    (results,) = backend.evaluate([Batch(point)])
    assert results.ok.all(), results[0].reason
    return float(results.metrics["makespan_s"][0])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (TWO[:-1], "no step computes interval 1 of the shard of peer 1"),
        ([*TWO, {"compute": [1, 2]}], "step 5 computes interval 1 of the shard of peer 1 once more"),
        ([TWO[0], *TWO[3:], *TWO[1:3]], "step 1 computes interval 0 of the shard of peer 1 before a step moves it"),
        ([*TWO, {"move": [0, 1], "peers": [3]}], "step 5 moves interval 0 of the shard of peer 3 once more"),
        ([*TWO, {"local": [2, 3]}], "step 5 computes interval 2 of the shard of peer 0, which there is not"),
    ],
)
def test_steps_that_lose_or_repeat_a_byte_are_refused_with_the_interval(
    wrong: list[dict[str, Any]], message: str
) -> None:
    assert [message in str(problem) for problem in FLUID.problems(steps(*wrong))] == [True]


def test_steps_of_a_preset_take_as_long_as_the_preset() -> None:
    pieces = [
        {"local": [0, 4]},
        *({"move": [i, i + 1]} for i in range(4)),
        *({"compute": [i, i + 1]} for i in range(4)),
    ]
    chunked = shipped("schedule")["chunked"] | {"num_chunks": 4, "comm_cus": None}
    point = design()
    tree = {"system": shipped("system")["mi300x_8"], "schedule": chunked}
    workload = {"name": "one", "operators": {name: dict(op) for name, op in point.workload.operators.items()}}
    preset = FLUID.design({**tree, "workload": workload})
    assert makespan(steps(*pieces, cuts=(0, 1, 2, 3, 4))) == pytest.approx(makespan(preset), rel=1e-12)


@pytest.mark.slow
@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    ("pattern", "topology"), [("all_gather", "mesh"), ("reduce_scatter", "ring"), ("all_to_all", "switch")]
)
def test_the_search_finds_what_is_no_longer_than_any_preset_and_keeps_it(
    pattern: str, topology: str, tmp_path: Path
) -> None:
    point = design(pattern, topology, evaluations=4)
    settled = FLUID.settle(point)
    assert isinstance(settled.schedule, SynthesisedSchedule)
    assert settled.schedule.steps
    assert not FLUID.problems(settled)
    seconds = makespan(settled)
    bound = FLUID.bound(Batch(settled), {"makespan_s": np.array([seconds])})
    assert bound["gap"][0] >= -1e-9
    assert FLUID.settle(point) == settled  # read from the cache
    (file,) = (tmp_path / "cache").rglob("*.json") if (tmp_path / "cache").is_dir() else tmp_path.rglob("*.json")
    written = file.read_text("utf-8")
    file.write_text(written[:-1], "utf-8")
    assert FLUID.settle(point) == settled
    assert file.read_text("utf-8") == written  # a damaged file is written anew
    assert makespan(point) == seconds
    explicit = design(pattern, topology, **settled.schedule.explicit())
    assert makespan(explicit) == seconds
