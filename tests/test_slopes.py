"""Slopes of the makespan against differences of the compiled engine, kinks and jumps; elasticities of designs."""

from __future__ import annotations

import csv
import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dse.analysis import one_sided
from dse.backend import Batch
from dse.cli import main
from dse.space import get_path
from dse.values import put
from simulators.engines.fluid import ENGINE
from simulators.overlap.backend import OverlapBackend
from simulators.taskgraph.graph import Floats, GraphBuilder, TaskGraph
from simulators.taskgraph.slopes import slopes
from tests.graphs import graphs, pipelines
from tests.support import design, drawn, smooth_numbers

STEPS = (1e-5, 1e-6, 1e-7)
"""Of differences; the order of events may change within the larger ones."""


def makespan(graph: TaskGraph, direction: Floats, step: float) -> float:
    moved = (
        np.asarray(column + step * slope) if slope else column
        for column, slope in zip(graph.values, direction, strict=True)
    )
    return float(ENGINE.run(replace(graph, values=tuple(moved))).makespan[0])


def apart(graph: TaskGraph, random: np.random.Generator) -> TaskGraph:
    """The same graph, in which about half of the numbers are columns of their own, so that equal ones move apart."""
    values, at = list(graph.values), {}
    for name, columns in graph.at.items():
        moved = np.flatnonzero(random.random(columns.size) < 0.5)
        at[name] = columns.copy()
        at[name][moved] = len(values) + np.arange(moved.size)
        values += [graph.values[column] for column in columns[moved]]
    return replace(graph, values=tuple(values), at=at)


def directions_of(graph: TaskGraph, random: np.random.Generator) -> Floats:
    """Two random directions and one number alone, each forwards and backwards [K, 6]."""
    numbers = np.array([column.item() for column in graph.values])
    numbers[~np.isfinite(numbers)] = 0.0
    mixed = random.uniform(-1, 1, (numbers.size, 2)) * (random.random((numbers.size, 2)) < 0.5)
    alone = np.arange(numbers.size)[:, None] == random.integers(numbers.size)
    forwards = numbers[:, None] * np.hstack([mixed, alone])
    return np.hstack([forwards, -forwards])


def difference(graph: TaskGraph, direction: Floats, slope: float, limit: float) -> float:
    """Least distance of slope and limit from those of forward differences, over their tolerances."""
    scale, errors = max(1.0, abs(slope), limit), []
    for step in STEPS:
        near, far = (makespan(graph, direction, times * step) for times in (1, 2))
        off = abs((far - near) / step - slope) / (1e-3 * scale)
        errors.append(max(off, abs(2 * near - far - limit) / (1e-6 * max(limit, 1e-300))))
    return min(errors)


@pytest.mark.more
@pytest.mark.slow
@drawn(400)
@given(graph=graphs() | pipelines(), seed=st.integers(0, 2**32 - 1))
def test_slopes_are_those_of_differences_on_either_side(graph: TaskGraph, seed: int) -> None:
    random = np.random.default_rng(seed)
    graph = apart(graph, random) if seed % 4 else graph
    directions = directions_of(graph, random)
    result = slopes(graph, directions)
    for place, direction in enumerate(directions.T):
        assert difference(graph, direction, result.slope[place], result.makespan_s[place]) < 1


def two(*, works: tuple[float, float], pooled: bool = False) -> TaskGraph:
    """Two tasks side by side, with a column of work each, and one after the first."""
    build = GraphBuilder()
    pool = build.pool("p", 1) if pooled else -1
    first = build.task("first", "gemm", work=np.array([works[0]]), cap=1.0)
    second = build.task("second", "gemm", work=np.array([works[1] + 1e-300]), cap=1.0)
    if pooled:
        build.task("long", "gemm", after=[second], work=4.0, cap=1.0, pool=pool)
        short = build.task("short", "gemm", after=[first], work=1.0, cap=1.0, pool=pool)
        build.task("last", "gemm", after=[short], work=8.0, cap=1.0)
    graph = build.build()
    work = graph.at["work"].copy()  # columns of equal content are one
    work[[0, 1]] = len(graph.values) + np.arange(2)
    values = (*graph.values, *(np.array([work]) for work in works))
    return replace(graph, values=values, at={**graph.at, "work": work})


def along(graph: TaskGraph, *changes: tuple[float, float]) -> Floats:
    """Directions in which the works of the first two tasks change."""
    columns = np.zeros((len(graph.values), len(changes)))
    columns[-2:] = np.transpose(changes)
    return columns


def test_where_the_order_of_an_instant_decides_who_gets_a_slot_the_makespan_jumps() -> None:
    """Both become ready at 3: the long one is granted first by its index, the short one if its own comes earlier."""
    graph = two(works=(3.0, 3.0), pooled=True)
    assert ENGINE.run(graph).makespan[0] == 3 + 4 + 1 + 8
    result = slopes(graph, along(graph, (1, 0), (-1, 0), (0, 0)))
    assert result.makespan_s.tolist() == [16.0, 12.0, 16.0]
    assert result.slope.tolist() == [0.0, -1.0, 0.0]


# Differences


@drawn(100)
@given(value=st.floats(1e-9, 1e15), shape=st.floats(0.01, 100))
def test_differences_are_good_to_eight_digits(value: float, shape: float) -> None:
    """y = 1 + shape x, and exp(-shape x), of x = number / value."""
    for side in (-1, 1):
        x = one_sided.beside(value, side) / value
        exact = one_sided.elasticity(np.stack([1 + shape * x, np.exp(-shape * x)], axis=1), side)
        assert exact[0] == pytest.approx(shape / (1 + shape), abs=1e-8)
        assert exact[1] == pytest.approx(-shape, rel=1e-8, abs=1e-8)


# Designs


@pytest.mark.parametrize("schedule", ["uniform_fused_1d", "hetero_unfused_1d", "serial"])
def test_elasticities_are_those_of_the_evaluated_makespan(schedule: str) -> None:
    backend, point = OverlapBackend("fluid"), design(schedule=schedule)
    paths = smooth_numbers(point)
    sides = [(path, sign) for path in paths for sign in (-1, 1)]
    values = backend.elasticities(point, sides)
    assert values is not None
    points = [put(point, path, get_path(point, path) * (1 + h)) for path in paths for h in (-1e-5, 1e-5)]
    base, *moved = (
        float(result.column("makespan_s")[0]) for result in backend.evaluate([*map(Batch, (point, *points))])
    )
    tally: Counter[bool] = Counter()
    for (path, sign), elasticity, seconds in zip(sides, values, moved, strict=True):
        # all-reduces change their protocol at 16 MiB, the size of this one
        if math.isnan(elasticity) and "protocols.all_reduce." in path:
            continue
        assert elasticity == pytest.approx(sign * (seconds - base) / base / 1e-5, abs=1e-4), path
        tally[elasticity != 0] += 1
    assert tally[True] >= 3
    assert tally[False] >= 3


@pytest.mark.more
def test_robustness_says_what_each_number_of_the_machine_does_to_the_winners(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    few = ["schedule=chunked", "workload.only=[g1,g4]", "tracking=none", "store=none", "figures=none"]
    assert main(["study=ficco_sweep", *few]) == 0
    assert (
        main(["results", "robustness", "study=ficco_sweep", "samples=2", "range=2", "vary=system.gpu.dma.setup_s=0.1"])
        == 0
    )
    assert "what 1 % more of a number does to makespan_s of the winners [%]" in capsys.readouterr().out
    folder = tmp_path / "outputs" / "ficco_sweep" / "latest"
    rows = list(csv.DictReader((folder / "elasticities.csv").read_text("utf-8").splitlines()))
    assert {row["scenario"] for row in rows} == {"g1", "g4"}
    for row in rows:
        rate = row["number"] in ("system.node.link_bytes_per_s", "system.gpu.matrix_flop_per_s_per_cu")
        assert float(row["above"]) < 0 or not rate
    assert sum(row["number"] == "system.node.link_bytes_per_s" for row in rows) == 2
    document = json.loads((folder / "robustness.json").read_text("utf-8"))
    assert [row["above"] for row in document["elasticities"]] == [float(row["above"]) for row in rows]
    assert (folder / "figures" / "elasticities.png").stat().st_size > 10_000


@pytest.mark.nightly
def test_a_backend_that_knows_no_derivatives_has_differences_of_the_objective(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("dse_papers")
    monkeypatch.chdir(tmp_path)
    assert main(["study=bert", "tracking=none", "figures=none"]) == 0
    words = ["results", "robustness", "study=bert", "samples=2", "range=2", "vary=system.gpu.hbm_bytes_per_s=0.1"]
    assert main(words) == 0
    assert "to iteration_s of the winners [%, by differences]" in capsys.readouterr().out
    rows = list(csv.DictReader((tmp_path / "outputs/bert/latest/elasticities.csv").read_text("utf-8").splitlines()))
    assert {(row["metric"], row["exact"]) for row in rows} == {("iteration_s", "False")}
    by_name = {row["number"]: float(row["above"]) for row in rows}
    assert by_name["system.gpu.flop_vs_bw"] == pytest.approx(-1, abs=1e-6)  # all of a GPU is faster
    assert -1 < by_name["system.gpu.hbm_bytes_per_s"] < -0.3
    assert by_name["system.gpu.efficiency.mixed.launch_s"] > 0
    times = ["system.gpu.hbm_bytes_per_s", "system.gpu.clock", "system.gpu.efficiency.mixed.launch_s"]
    assert by_name[times[0]] + by_name[times[1]] - by_name[times[2]] == pytest.approx(-1, abs=1e-3)
