"""The ladder of models: what is promoted, how levels agree, and that the study itself does not change."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dse.cli import main
from dse.config.compose import request
from dse.errors import ConfigError
from dse.results.agreement import compare, tau
from dse.study.fidelity import excess, point_at_level
from dse.study.levels import plain_design
from dse.study.plan import plan
from simulators.external.sections import SectionsBackend

NAMES = "space.schedule.name=choice(serial,hetero_fused_1d,uniform_fused_1d)"
SMALL = [
    *("study=ficco_sweep", "workload.only=[g4]", "tracking=none", "timeline=false", "executor.jobs=1", NAMES),
    *("space.schedule.num_chunks=choice(2,4)", "space.schedule.comm_cus=choice(16,32)"),
]
GOALS = {"time_s": "minimize", "rate": "maximize"}

PROGRAM = """#!{python} -S
import json, sys
design = json.load(open(sys.argv[1]))
schedule = design["schedule"]
json.dump({{"makespan_s": {formula}, "comm_cu_s": 1.0, "peak_staging_bytes": 1.0}}, open(sys.argv[2], "w"))
"""
METRICS = """\
  makespan_s: {unit: s, meaning: time}
  comm_cu_s: {unit: CU s, meaning: CUs}
  peak_staging_bytes: {unit: byte, meaning: bytes}
"""


def latest() -> Path:
    return Path("outputs/ficco_sweep/latest").resolve()


def rows() -> pd.DataFrame:
    return pd.read_parquet(latest() / "fidelity.parquet")


def found() -> dict[str, Any]:
    report: dict[str, Any] = json.loads((latest() / "fidelity.json").read_text("utf-8"))
    return report


def program(folder: Path, formula: str, metrics: str = METRICS) -> str:
    """A simulator of one's own, `mine`: its time by a formula of the schedule; the flag that adds it."""
    script = folder / "mine.py"
    script.write_text(PROGRAM.format(python=sys.executable, formula=formula), encoding="utf-8")
    script.chmod(0o755)
    option = folder / "conf" / "simulator" / "mine.yaml"
    option.parent.mkdir(parents=True)
    text = f"defaults: [external, _self_]\nname: mine\ncommand: ['{script}', '{{input}}', '{{output}}']\n"
    option.write_text(f"{text}metrics:\n{metrics}", encoding="utf-8")
    return f"--config-dir={folder / 'conf'}"


# A study with a ladder


@pytest.mark.nightly
def test_a_ladder_changes_nothing_of_the_study_tells_how_its_levels_agree_and_is_redrawn(
    elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SMALL, "store=none", "fidelity=none"]) == 0
    alone, figures = (
        pd.read_parquet(latest() / "results.parquet"),
        {figure.name for figure in latest().glob("figures/*")},
    )
    assert main([*SMALL, "store=none", "fidelity=ladder", "-v"]) == 0
    pd.testing.assert_frame_equal(pd.read_parquet(latest() / "results.parquet"), alone)
    assert figures < {figure.name for figure in latest().glob("figures/*")}
    assert "Kendall tau" in (output := capsys.readouterr().out)
    assert "from analytic to node" in output

    table = rows()
    assert list(table["level"].unique()) == ["uncontended", "analytic", "node"]
    assert set(table["status"]) == {"ok"}
    keys = table.groupby("level")["key"].agg(set)
    assert keys["uncontended"] == keys["analytic"] == keys["node"]
    joint = table[table["level"] == "analytic"].merge(alone, on="key", suffixes=("", ".study"))
    assert (joint["makespan_s"] == joint["makespan_s.study"]).all()
    front = set(alone.loc[alone["on_front"], "key"])
    assert front & keys["node"]
    assert (table[table["promoted"] == "sample"].groupby("level").size() == 4).all()

    pictures = {picture.name: picture.read_bytes() for picture in latest().glob("figures/fidelity_*.png")}
    assert set(pictures) == {"fidelity_uncontended_analytic.png", "fidelity_analytic_node.png"}
    for figure_path in latest().glob("figures/*"):
        figure_path.unlink()
    assert main(["results", "report", "study=ficco_sweep"]) == 0
    assert {picture.name: picture.read_bytes() for picture in latest().glob("figures/fidelity_*.png")} == pictures


@pytest.mark.slow
def test_the_study_s_own_simulator_is_no_level_beside_it(elsewhere: Path) -> None:
    planned = plan(request([*SMALL, "fidelity=ladder", "simulator=uncontended"]))
    assert [level.name for level in planned.levels] == ["uncontended", "node"]
    assert plan(request([*SMALL, "fidelity=none"])).levels == ()


# A program of one's own as the finest level


@pytest.mark.nightly
def test_a_program_may_be_the_finest_level_and_disagreement_promotes_what_is_like_it(elsewhere: Path) -> None:
    """It says that what looked bad is good: points like those of the sample are looked at, too, and win."""
    flag = program(
        elsewhere, "1e-6 * (133 - schedule['num_chunks']) if schedule['name'] == 'uniform_fused_1d' else 1.0"
    )
    ladder = ["fidelity=ladder", "fidelity.levels=[study,mine]", "fidelity.sample=12", "store=none"]
    more = [*(word for word in SMALL if "num_chunks" not in word), "space.schedule.num_chunks=range(2,34)"]
    assert main([*more, *ladder, "fidelity.most=24", "fidelity.near=0.5", flag]) == 0
    table = rows()
    mine = table[table["level"] == "mine"]
    assert (mine["schedule.name"] == "uniform_fused_1d")[mine["promoted"] == "disagreement"].all()
    assert (mine["promoted"] == "disagreement").any()
    fast = mine["schedule.name"] == "uniform_fused_1d"
    assert mine["makespan_s"][fast].tolist() == (1e-6 * (133 - mine["schedule.num_chunks"][fast])).tolist()
    (pair,) = found()["pairs"]
    assert pair["overall"]["front"]["winners_changed"] == 1
    assert mine.sort_values("makespan_s")["schedule.name"].iloc[0] == "uniform_fused_1d"


@pytest.mark.more
def test_a_point_that_fails_at_a_level_is_data(elsewhere: Path) -> None:
    flag = program(elsewhere, "1.0 if schedule['name'] == 'serial' else 1.0 if schedule['num_chunks'] == 4 else 0 / 0")
    ladder = ["fidelity=ladder", "fidelity.levels=[study,mine]", "store=none", "executor.broken_after=0"]
    assert main([*SMALL, *ladder, flag]) == 0
    mine = rows()[rows()["level"] == "mine"]
    failed = mine["status"] == "failed"
    assert failed.any()
    assert mine[failed]["reason"].str.contains("ZeroDivisionError").all()
    assert (mine[failed]["schedule.num_chunks"] == 2).all()
    assert mine[failed]["makespan_s"].isna().all()
    assert found()["pairs"][0]["overall"]["objectives"]["makespan_s"]["points"] == int((~failed).sum())


# What is refused before anything is evaluated


@pytest.mark.slow
@pytest.mark.parametrize(
    ("levels", "parts"),
    [
        ("[uncontendet,study]", ["fidelity.levels = 'uncontendet'", "did you mean `uncontended`?"]),
        ("[uncontended,node]", ["must name each level once", "as `study`"]),
        ("[study,node,study]", ["must name each level once"]),
    ],
)
def test_levels_that_make_no_ladder_are_refused(levels: str, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        plan(request([*SMALL, "fidelity=ladder", f"fidelity.levels={levels}"]))
    assert all(part in str(error.value) for part in parts), str(error.value)


@pytest.mark.slow
def test_an_option_that_is_none_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean `fidelity=ladder`"):
        plan(request([*SMALL, "fidelity=lader"]))


@pytest.mark.slow
def test_a_level_without_an_objective_is_refused(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flag = program(elsewhere, "1.0", "  makespan_s: {unit: s, meaning: time, goal: maximize}\n")
    assert main([*SMALL, "fidelity=ladder", "fidelity.levels=[study,mine]", flag]) == 2
    message = capsys.readouterr().err
    assert "does not minimize the study's objective makespan_s" in message
    assert "peak_staging_bytes" in message
    assert not Path("outputs").exists()


# Numbers


VALUES = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=12)


@given(points=VALUES)
def test_the_excess_is_zero_on_the_front_and_what_must_be_gained_elsewhere(points: list[tuple[int, int]]) -> None:
    values = np.array(points, float)
    front = np.array([point for point in points if not any(_dominates(other, point) for other in points)], float)
    over = excess(values, front)
    for value, found_ in zip(values, over, strict=True):
        assert (found_ == 0) == bool((front == value).all(axis=1).any())
        assert any((value <= member * (1 + found_) * (1 + 1e-12)).all() for member in front)


def _dominates(point: tuple[int, int], other: tuple[int, int]) -> bool:
    return point != other and point[0] <= other[0] and point[1] <= other[1]


def test_rank_correlation_counts_ties_and_is_none_where_it_is_not_defined() -> None:
    values = np.array([1.0, 2.0, 3.0, 4.0])
    assert tau(values, values) == pytest.approx(1.0)
    assert tau(values, -values) == pytest.approx(-1.0)
    assert tau(values, np.array([1.0, 1.0, 2.0, 2.0])) == pytest.approx(4 / math.sqrt(6 * 4))
    assert tau(values, np.ones(4)) is None
    assert tau(values[:1], values[:1]) is None


def _table(level: str, *values: tuple[float, float]) -> pd.DataFrame:
    about = {"scenario": "a", "level": level, "status": "ok", "promoted": "near the front"}
    return pd.DataFrame([{**about, "key": str(n), "time_s": t, "rate": r} for n, (t, r) in enumerate(values)])


def test_a_comparison_counts_who_came_onto_the_front_and_who_left_it() -> None:
    """Goals of both directions; point 1 falls behind, point 2 comes up and wins."""
    coarse, fine = _table("coarse", (1, 1), (2, 3), (3, 2)), _table("fine", (2, 1), (4, 3), (1.5, 4))
    (pair,) = compare(pd.concat([coarse, fine]), ["coarse", "fine"], GOALS)
    front = pair["scenarios"]["a"]["front"]
    assert front == {"before": 2, "after": 1, "entered": 1, "left": 2, "winner_changed": True}
    error = pair["overall"]["objectives"]["time_s"]["error"]
    assert error["median"] == pytest.approx(-0.5)
    assert pair["overall"]["objectives"]["time_s"]["tau"] == pytest.approx(-1 / 3)


@pytest.mark.slow
def test_a_level_with_too_many_tasks_is_left_out_and_tells_nothing_of_winners(
    elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SMALL, "store=none", "figures=none", "fidelity=ladder", "fidelity.most_tasks=800"]) == 0
    shown, summary = capsys.readouterr().out, found()
    assert set(summary["left_out"]) == {"node"}
    assert re.fullmatch(
        r"has about [\d,]+ tasks in \d+ points, more than fidelity.most_tasks = 800: raise that, .*",
        summary["left_out"]["node"],
    )
    assert set(rows()["level"]) == {"uncontended", "analytic"}
    assert [(pair["coarse"], pair["fine"]) for pair in summary["pairs"]] == [("uncontended", "analytic")]
    assert "level node is left out" in " ".join(shown.split())
    assert "0 of 0" not in shown


TIMES = {"provenance.json", "report.html"}
"""Files that hold when a run was made (docs/reference/files.md)."""


def _artefacts(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.name not in TIMES)
    provenance = json.loads((folder / "provenance.json").read_text("utf-8"))
    pages = [path.read_text("utf-8") for path in folder.glob("*.html")]  # where a plug-in writes it
    page = "".join(pages).replace(provenance.pop("time"), "").replace(folder.name, "")
    same = {"made": json.dumps(provenance).encode(), "page": page.encode()}
    return same | {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.mark.nightly
def test_two_runs_of_a_study_are_equal_to_the_byte_though_one_has_the_machine_for_itself_and_one_not(
    elsewhere: Path,
) -> None:
    command = [*SMALL, "store=none", "fidelity=ladder", "figures=key", "executor.jobs=2"]
    assert main(command) == 0
    alone = _artefacts(latest())
    spin = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(3 * (os.cpu_count() or 1))]
    try:
        assert main(command) == 0
    finally:
        for process in spin:
            process.kill()
            process.wait()
    loaded = _artefacts(latest())
    assert {"results.parquet", "summary.json", "fidelity.json", "fidelity.parquet", "claims.json"} <= set(alone)
    assert set(alone) == set(loaded)
    assert [name for name, text in alone.items() if loaded[name] != text] == []


# Backends that extend another one, and designs for others


def powered(*words: str) -> Any:
    """A study under a limit of power with a ladder, planned."""
    named = ["simulator=powered", "system=a100_8", "fidelity=ladder", "tracking=none", "store=none", *words]
    return plan(request(named, None))


def test_a_study_under_a_limit_of_power_is_compared_with_backends_that_it_extends() -> None:
    """They take its designs, with their sources, and leave out knobs of power."""
    planned = powered("study=conccl", "workload.only=[70b_qkv-equal-ag]")
    assert [level.name for level in planned.levels] == ["uncontended", "powered", "node"]
    space = next(iter(planned.spaces.values()))
    scenario, level_of_study = next(iter(planned.spaces)), space.backend.design(space.base)
    for level in planned.levels:
        block = point_at_level(planned, level, scenario, {"schedule.name": "serial"})
        design: Any = block.design
        assert design is not None, block.reason
        assert design.system.cost_weights == level_of_study.system.cost_weights


def test_a_level_without_the_objective_is_refused_with_the_way_out() -> None:
    with pytest.raises(ConfigError) as caught:
        powered("study=power")
    (text,) = [str(problem) for problem in caught.value.problems]
    assert "fidelity.levels (uncontended): does not minimize the study's objective energy_j" in text
    assert "set fidelity=none" in text


def test_a_key_with_dots_of_a_mapping_stays_a_key_for_a_backend_of_another_kind() -> None:
    planned = powered("study=conccl", "workload.only=[70b_qkv-equal-ag]")
    space = next(iter(planned.spaces.values()))
    tree = plain_design(space.backend, space.base, space.backend)
    weights = space.backend.design(space.base).system.cost_weights
    assert any("." in key for key in weights)
    assert tree["system"]["cost_weights"] == dict(weights)
    assert tree["system"]["name"] == "a100_8"
    assert "sources" not in tree["system"]


def test_a_key_with_dots_is_a_path_for_a_backend_that_takes_any_keys() -> None:
    planned = powered("study=conccl", "workload.only=[70b_qkv-equal-ag]")
    space = next(iter(planned.spaces.values()))
    tree = plain_design(space.backend, space.base, SectionsBackend())
    weights = space.backend.design(space.base).system.cost_weights
    assert tree["system"]["cost_weights"]["gpu"]["num_cus"] == weights["gpu.num_cus"]
    assert not any("." in key for key in tree["system"]["cost_weights"])
