"""Explanations of two runs: critical paths by cause add up, whatever runs, and so do their differences."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

import dse
from dse import plugins
from dse.backend import Batch
from dse.cli import main
from dse.study.plan_again import plan_words
from dse_traces import DATA
from dse_traces.change.what_if import Plan
from dse_traces.commands.explain import answer, explained, limits_of, summary
from dse_traces.profile.critical_path import HOST, critical_path
from dse_traces.profile.explanation import POINT, Explained, compare
from dse_traces.profile.kernels import GRAPH_NAME, Profile, profile_of
from dse_traces.profile.path_causes import (
    CAUSES,
    COMMUNICATION,
    COMPUTE,
    CONTENTION,
    DECOMPOSITION,
    DEPENDENCY,
    LAUNCH,
    NEITHER,
    WAITING,
    WORK,
    Stretch,
    path_stretches,
)
from dse_traces.profile.waits import waits
from simulators.taskgraph.graph import GraphBuilder, TaskGraph
from simulators.taskgraph.timeline import Timeline
from tests.graphs import graphs
from tests.test_advice import what_ifs
from tests.test_profiles import GEMM, SUM, US, kernel

RUN = {**dict.fromkeys(("ficco_sweep", "conccl", "t3", "t3_mi300x", "fused_ops", "nic_placement", "goldyloc"), ()),
       **dict.fromkeys(("overlap_measured", "bert", "comp_vs_comm", "seqpoint", "jitq", "plan", "whole_models"), ()),
       "ficco": ("simulator=node", "workload=ficco"), "ficco_rules": ("simulator=uncontended",)}  # fmt: skip

NIGHTLY, QUICK = (
    pytest.mark.nightly,
    ("ficco_sweep", "fused_ops", "goldyloc"),
)


def run(graph: TaskGraph) -> Timeline:
    timeline: Timeline = plugins.load("engine", "fluid").run(graph)
    return timeline


def sums(path: Sequence[Stretch]) -> dict[str, float]:
    return {cause: sum(stretch.causes.get(cause, 0.0) for stretch in path) for cause in CAUSES}


def assert_adds_up(path: Sequence[Stretch], length: float) -> None:
    """Without holes, and each stretch is as long as its causes."""
    assert sum(sums(path).values()) == pytest.approx(length, rel=1e-9)
    assert all(before.finish_s == after.start_s for before, after in itertools.pairwise(path))
    assert all(sum(part.causes.values()) == pytest.approx(part.seconds, abs=1e-9 * length) for part in path)


def assert_difference_adds_up(first: Explained, second: Explained) -> None:
    difference, back = compare(first, second), compare(second, first)
    expected, scale = second.seconds - first.seconds, 1e-9 * max(first.seconds, second.seconds)
    for table in (difference.by_cause(), difference.by_kind(), difference.aligned()):
        assert sum(b - a for a, b in table.values()) == pytest.approx(expected, abs=scale)
    assert {cause: (b, a) for cause, (a, b) in back.by_cause().items()} == difference.by_cause()


# Points


@st.composite
def declared(draw: st.DrawFn) -> TaskGraph:
    """Graphs, some of which declare times alone and undivided."""
    graph, declares = draw(graphs()), draw(st.booleans())
    if not declares:
        return graph
    columns = [np.full((1,) * len(graph.shape), draw(st.floats(0, 3))) for _ in ("alone_s", "wide_s")]
    at = {name: np.full(graph.num_tasks, len(graph.values) + place) for place, name in enumerate(("alone_s", "wide_s"))}
    return replace(graph, values=(*graph.values, *columns), at={**graph.at, **at})


@pytest.mark.slow
@given(declared(), declared())
def test_causes_of_any_two_graphs_add_up_and_so_do_their_differences(first: TaskGraph, second: TaskGraph) -> None:
    both = []
    for graph in (first, second):
        timeline = run(graph)
        path = tuple(path_stretches(timeline, 0))
        if (length := float(timeline.makespan[0])) == 0:
            return
        assert_adds_up(path, length)
        idle = [part.causes[WAITING] for part in path if part.kind != "launch"]
        assert all(seconds <= 1e-9 * length for seconds in idle)  # the path goes through what had the slot
        both.append(Explained("drawn", POINT, path))
    assert_difference_adds_up(*both)


def test_a_task_is_cut_into_what_it_would_take_whole_and_alone_and_what_is_added() -> None:
    build = GraphBuilder()
    link = build.resource("link", 1.0)
    moved = build.task("all_gather", "transfer", uses={link: 1.0}, work=4.0, alone_s=4.0, wide_s=3.0)
    build.task("beside", "transfer", uses={link: 1.0}, work=2.0, alone_s=2.0, wide_s=2.0)
    launched = build.task("launch", "launch", after=[moved], delay=0.5)
    build.task("gemm", "gemm", after=[launched], work=1.0, cap=0.1, delay=0.25, alone_s=9.0, wide_s=8.0)
    path = tuple(path_stretches(run(build.build()), 0))
    assert [stretch.name for stretch in path] == ["all_gather", "launch", "gemm"]
    assert path[0].causes == {WORK: 3.0, DECOMPOSITION: 1.0, CONTENTION: 2.0, LAUNCH: 0.0, WAITING: 0.0}
    assert path[1].causes == {LAUNCH: 0.5, WAITING: 0.0}
    assert path[2].causes == {WORK: 8.0, DECOMPOSITION: 1.0, CONTENTION: 1.0, LAUNCH: 0.25, WAITING: 0.0}
    point = Explained("made", POINT, path)
    comparison = compare(point, point)
    assert comparison.bound == "compute"
    assert comparison.by_cause() == {
        cause: (time, time) for cause, time in zip(CAUSES, (8, 2, 3, 0.75, 3, 0), strict=True)
    }


@pytest.mark.slow
@given(graphs())
def test_what_is_proven_of_a_run_is_no_longer_than_it_and_what_binds_adds_up(graph: TaskGraph) -> None:
    makespan = float(run(graph).makespan[0])
    schedules, orders = limits_of(graph, (0.5 * makespan, "links"))
    assert schedules.binds == {"links": 1.0}
    assert orders.seconds <= makespan * (1 + 1e-6)
    assert makespan == 0 or sum(orders.binds.values()) == pytest.approx(1.0, abs=0.02)


def test_limits_say_what_an_order_could_gain_and_what_binds_it() -> None:
    build = GraphBuilder()
    link = build.resource("link", 1.0)
    soon = build.task("soon", "transfer", uses={link: 1.0}, work=1.0)
    build.task("late", "transfer", after=[soon], uses={link: 1.0}, work=3.0)
    (orders,) = limits_of(build.build(), None)
    first = Explained("made", POINT, tuple(path_stretches(run(build.build()), 0)), limits=[orders])
    lines = [line for line in answer(compare(first, first)) if isinstance(line, str) and "any order" in line]
    assert lines[0] == "A  any order of these tasks takes at least 4.000 s, 0.0 % less, by critical path"
    assert summary(compare(first, first))["A"]["limits"][0]["seconds"] == 4.0


def test_the_path_goes_through_the_task_that_had_the_slot() -> None:
    build = GraphBuilder()
    pool = build.pool("stream", 1)
    for name in "abc":
        build.task(name, "gemm", work=1.0, cap=1.0, pool=pool)
    path = list(path_stretches(run(build.build()), 0))
    assert [stretch.name for stretch in path] == ["a", "b", "c"]
    assert sums(path)[WORK] == 3.0


@pytest.mark.one_in(3, 1)
@pytest.mark.slow
@pytest.mark.parametrize("study", [study if study in QUICK else pytest.param(study, marks=NIGHTLY) for study in RUN])
def test_points_of_shipped_studies_add_up(study: str) -> None:
    planned, explanations, random = (
        plan_words([f"study={study}", *RUN[study]]),
        list[Explained](),
        np.random.default_rng(1),
    )
    for name in random.permutation(list(planned.spaces))[:2]:
        blocks = list(itertools.islice(planned.spaces[name].blocks(64), 100))
        for place in random.permutation(len(blocks)):
            block = blocks[place]
            design = None if block.design is None else next(iter(Batch(block.design, block.axes).designs()))
            if design is not None and not planned.backend.problems(design):
                timeline = planned.backend.timeline(design)
                explanations.append(Explained(name, POINT, tuple(path_stretches(timeline, 0))))
                assert_adds_up(explanations[-1].path, float(timeline.makespan[0]))
                assert sums(explanations[-1].path)[CONTENTION] >= -1e-9 * explanations[-1].seconds
                break
    assert_difference_adds_up(explanations[0], explanations[-1])


@pytest.mark.slow
def test_the_path_of_a_step_tells_exposed_communication_from_what_is_computed() -> None:
    planned = plan_words(["study=whole_models", "models=[llama3_8b]", "systems=[h100_8]", "modes=[training]",
                          "run.batch=64", "run.micro_batches=8", "parallel.tp=4",
            "parallel.pp=2"])  # fmt: skip
    design = planned.backend.design(next(iter(planned.spaces.values())).base)
    (result,) = planned.backend.evaluate([Batch(design)])
    path = tuple(path_stretches(planned.backend.timeline(design), 0))
    assert_adds_up(path, float(result.metrics["iteration_s"][0]))
    times = {cause: pair[0] for cause, pair in compare(*[Explained("step", POINT, path)] * 2).by_cause().items()}
    assert times[DEPENDENCY] == pytest.approx(float(result.metrics["serialized_s"][0]), rel=0.1)
    assert times[WAITING] > 0


# Profiles


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 40), st.integers(1, 30), st.integers(0, 40), st.booleans()),
        min_size=1,
        max_size=30,
    ),
    st.floats(0, 1),
    st.floats(0.1, 1),
)
def test_the_critical_path_has_no_holes_and_adds_up_to_the_span(
    drawn: list[tuple[int, int, int, int, bool]], late: float, alone: float
) -> None:
    clocks = dict.fromkeys(range(3), 0)
    rows = []
    for stream, gap, duration, early, communicates in drawn:
        start = clocks[stream] + gap
        rows.append(kernel(SUM if communicates else GEMM, f"{stream}", start, duration, max(start - early, 0)))
        clocks[stream] = start + duration
    profile = profile_of(rows, "drawn")
    profile = replace(profile, kernels=profile.kernels.assign(waited_for_ranks_s=late * profile.seconds))
    path = critical_path(profile, waits(profile), alone * profile.seconds)
    assert_adds_up(path, profile.span_s)
    assert all(part.finish_s > part.start_s for part in path)
    assert all(seconds >= 0 for part in path for seconds in part.causes.values())


def test_waiting_on_the_critical_path_is_the_hosts_where_its_launch_came_last() -> None:
    late = kernel(GEMM, "7", 100, 10, launch=95)
    profile = profile_of([kernel(GEMM, "7", 0, 10, launch=-5), kernel(GEMM, "7", 12, 8, launch=0), late], "made")
    kinds = {part.kind: part.finish_s - part.start_s for part in critical_path(profile, waits(profile))}
    assert kinds[HOST] == pytest.approx(80 * US)


def one_of_each() -> Profile:
    """A kernel of each side, one after another."""
    names = (GEMM, SUM, "Memcpy HtoD (Pinned -> Device)", "Memset (Device)", f"{GRAPH_NAME} 7", "Memcpy PtoP")
    return profile_of([kernel(name, "7", 10 * place, 10) for place, name in enumerate(names)], "made")


SIDES = [COMPUTE, COMMUNICATION, NEITHER, NEITHER, NEITHER, COMMUNICATION]


def test_points_of_recorded_runs_have_the_sides_of_their_kernels() -> None:
    runs = what_ifs(one_of_each())
    path = path_stretches(runs.run(Plan()).timeline, 0)
    assert [part.side for part in path if part.kind != "launch"] == SIDES


def test_the_path_has_the_sides_that_profiles_have() -> None:
    profile = one_of_each()
    path = critical_path(profile, waits(profile))
    assert [part.side for part in path] == SIDES
    sides = [COMPUTE if computes else NEITHER for computes in profile.is_compute]
    assert [part.side for part in path if part.side != COMMUNICATION] == [
        side for side, moves in zip(sides, profile.is_collective, strict=True) if not moves
    ]


@pytest.mark.slow
def test_two_profiles_are_explained_part_by_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = []
    for place, beside in enumerate((200, 600)):
        rows = [f"0,100,7,{GEMM}", f"100,{beside},13,{SUM}", f"{100 + beside},50,7,{GEMM}"]
        files.append(tmp_path / f"{place}.csv")
        files[-1].write_text("\n".join(["start_us,dur_us,stream,name", *rows]), "utf-8")
    assert main(["profile", "explain", *map(str, files), f"out={tmp_path}/out"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"work +200\.00 µs +600\.00 µs +\+400\.00 µs +\+114\.3 %", printed)
    assert re.search(r"dependency +150\.00 µs +150\.00 µs +0 ", printed)
    assert re.search(r"all +350\.00 µs +750\.00 µs +\+400\.00 µs", printed)
    assert "communication bounds both" in printed and "name one: system=" in printed
    written = yaml.safe_load((tmp_path / "out" / "explain.yaml").read_text())
    assert written["difference"]["by_kind"]["collective"]["work"] == pytest.approx(400 * US)
    assert {path.name for path in (tmp_path / "out" / "figures").iterdir()} == {"explain.png", "explain.svg"}


@pytest.mark.slow
@pytest.mark.parametrize("slowed", [1.0, 1.2])
def test_kernels_that_take_the_same_times_in_both_profiles_have_no_contention(tmp_path: Path, slowed: float) -> None:
    """All-reduces of 32 CTAs, exposed in one run, beside the next GEMM in the other, which takes `slowed` as long."""
    head, files = "start_us,dur_us,stream,name,ctas", [tmp_path / "exposed.csv", tmp_path / "overlapped.csv"]
    gemms = [f"{160 * place},100,7,{GEMM},1056" for place in range(6)]
    sums_alone = [f"{100 + 160 * place},60,20,{SUM},32" for place in range(6)]
    files[0].write_text("\n".join([head, *gemms, *sums_alone]), "utf-8")
    begun = [0.0, *(100 + 100 * slowed * place for place in range(6))]
    beside = [f"{begun[place]},{100 * slowed if place else 100},7,{GEMM},1056" for place in range(6)]
    hidden = [f"{begun[place + 1]},60,20,{SUM},32" for place in range(6)]
    files[1].write_text("\n".join([head, *beside, *hidden]), "utf-8")
    assert main(["profile", "explain", *map(str, files), f"out={tmp_path}/out", "system=h100_8"]) == 0
    runs = yaml.safe_load((tmp_path / "out" / "explain.yaml").read_text())
    contention = [runs[name]["causes"][CONTENTION] for name in "AB"]
    assert contention == pytest.approx([0, (slowed - 1) * 500 * US], abs=1e-9)
    work = [runs[name]["by_kind"]["GEMM"][WORK] for name in "AB"]
    assert work == pytest.approx([600 * US, 600 * US], rel=1e-6)


def test_what_a_collective_waited_for_late_ranks_is_waiting(tmp_path: Path) -> None:
    for rank, late in enumerate((0, 300)):
        rows = [f"0,{100 + late},7,{GEMM}", f"{100 + late},{500 - late},13,{SUM}"]
        (tmp_path / f"rank{rank}.csv").write_text("\n".join(["start_us,dur_us,stream,name", *rows]), "utf-8")
    explanation = explained(str(tmp_path), {"system": "h100_8"})
    assert sums(explanation.path) == pytest.approx({**dict.fromkeys(CAUSES, 0.0), WORK: 300 * US, WAITING: 300 * US})


@pytest.mark.nightly
def test_two_points_and_a_point_and_a_profile_are_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    few = ["workload.only=[g1]", "space.schedule.num_chunks=choice(2)", "timeline=false", "figures=none"]
    assert main(["study=ficco_sweep", "tracking=none", "store=none", *few]) == 0
    table = dse.load("ficco_sweep")
    table = table[table["status"] == "ok"]
    serial, best = table[table["schedule.name"] == "serial"].iloc[0], table.sort_values("makespan_s").iloc[0]
    names = [f"ficco_sweep:{row['key'][:12]}" for row in (serial, best)]
    capsys.readouterr()
    assert main(["profile", "explain", *names]) == 0
    assert "schedule.name: serial -> " in capsys.readouterr().out
    tables = pd.read_parquet("outputs/explain/stretches.parquet").groupby("run")[list(CAUSES)].sum().sum(axis=1)
    assert tables.tolist() == pytest.approx([serial["makespan_s"], best["makespan_s"]], rel=1e-9)
    profile = DATA / "profiles" / "mi300x_resnet.csv.gz"
    assert main(["profile", "explain", names[0], str(profile), "system=mi300x_8"]) == 0
    assert "by laws learnt for" in capsys.readouterr().out


@pytest.mark.slow
def test_a_point_without_a_task_graph_is_refused_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["study=operators", "tracking=none", "store=none", "timeline=false", "figures=none"]) == 0
    key = dse.load("operators")["key"].iloc[0][:12]
    assert main(["profile", "explain", f"operators:{key}", f"operators:{key}"]) == 2
    assert "runs no task graph" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["one"], "takes two profiles or two points"),
        (["one", "two", "three=4"], "takes two profiles or two points"),
        (["none.json", "none.csv"], "is no file"),
        (["ficco_sweep:1", "ficco_sweep:2"], "has no finished run"),
    ],
)
def test_what_cannot_be_explained_is_told(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["profile", "explain", *words]) == 2
    assert message in capsys.readouterr().err
