"""Plans of steps: what the command prints and writes, that it keeps what it chose, and what it says of bad input."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

from dse.cli import main
from dse.config.options import conf_dir
from dse.results.run_folder import Outputs
from simulators.steps.sites import SITES
from studies.plan import ways_today
from studies.step_plan import Plan, plans
from studies.whole_models import gains

FEW = "choice(serial,'hetero_fused_1d num_chunks=2',shard_p2p)"
SPACE = [f"space.sites.{name}={FEW}" for name in SITES]
QUIET = ["tracking=none", "figures=none", "timeline=false", "executor.jobs=1"]


def planned(folder: Path, *words: str) -> Outputs:
    assert main(["plan", *QUIET, *SPACE, f"output_dir={folder}", *words]) == 0
    return Outputs.latest(folder, "plan")


def plan_of(outputs: Outputs) -> Plan:
    (plan,) = plans(outputs.read_table("results"), outputs.read_config())
    return plan


@pytest.mark.slow
def test_a_plan_is_printed_written_and_taken_up_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outputs = planned(tmp_path, "model=llama3_8b", "system=h100_8", "run.sequence_length=2048")
    told = capsys.readouterr().out
    plan = plan_of(outputs)
    assert plan.gain >= 1
    assert "llama3_8b: " in told
    assert "a step, " in told
    for way in ways_today(plan):
        assert way.partition("(")[0].split()[1] in told
    kept = yaml.safe_load((outputs.folder / "plan.yaml").read_text("utf-8"))
    again = planned(
        tmp_path / "again", "model=llama3_8b", "run.sequence_length=2048", f"plan={outputs.folder}/plan.yaml"
    )
    table = again.read_table("results")
    assert float(table["iteration_s"].min()) == float(plan.best["iteration_s"])
    for path, value in kept["parallel"].items():
        assert again.read_config()["parallel"][path] == value


@pytest.mark.nightly
@pytest.mark.slow
def test_the_same_command_again_answers_from_the_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["model=llama3_8b", "run.sequence_length=1024", "parallel.sequence_parallel=true"]
    first = plan_of(planned(tmp_path, *words))
    capsys.readouterr()
    second = plan_of(planned(tmp_path, *words))
    assert second.best["iteration_s"] == first.best["iteration_s"]
    assert "results were known from earlier studies" in capsys.readouterr().out or len(first.table) == len(second.table)


@pytest.mark.one_in(2)
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["training", "decode"])
def test_a_plan_is_never_slower_than_serial(tmp_path: Path, mode: str) -> None:
    plan = plan_of(planned(tmp_path, "model=llama3_8b", f"run.mode={mode}", "parallel.sequence_parallel=true"))
    assert float(plan.best["iteration_s"]) <= float(plan.before["iteration_s"])
    assert float(plan.table["iteration_s"].min()) == float(plan.best["iteration_s"])
    for choice in plan.choices:
        alone = plan.alone(choice)
        assert alone is None or alone > 0


@pytest.mark.nightly
def test_a_plan_with_layouts_is_kept_by_later_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["model=llama3_8b", "system=h100_8", "run.mode=training", "parallel.split_ctas=0"]
    few = ["space.parallel.virtual_stages=choice(2)", "parallel.collectives=library"]
    outputs = planned(tmp_path, *words, *few, "run.batch=16", "parallel=auto", "parallel.gpus=4", "parallel.dp=1")
    told = capsys.readouterr().out
    plan = plan_of(outputs)
    assert plan.layout(plan.best).name in told
    assert int(plan.best["parallel.dp"]) == 1
    assert float(plan.best["memory_share"]) <= 1
    assert "usual (Takeaways 1 and 2 of arXiv:2104.04473)" in told
    again = plan_of(planned(tmp_path / "again", *words, *few, f"plan={outputs.folder}/plan.yaml"))
    assert float(again.best["iteration_s"]) == pytest.approx(float(plan.best["iteration_s"]))


@pytest.mark.slow
def test_what_does_not_fit_is_never_planned_where_something_does(tmp_path: Path) -> None:
    step = ["model=llama3_8b", "run.mode=training", "run.batch=8", "run.sequence_length=4096", "parallel.tp=4"]
    table = planned(tmp_path, *step, "parallel.split_ctas=0").read_table("results")
    (plan,) = plans(table, {})
    timed = table[table["iteration_s"].notna()]
    assert (timed["memory_share"] > 1).any()
    assert (timed["memory_share"] <= 1).any()
    assert float(plan.best["memory_share"]) <= 1


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["model=llama3_800b"], "llama3_800b"),
        (["parallel.tp=7"], "parallel.tp = 7: does not divide the heads"),
        (["sites.ffn_in=shard_p3p"], "sites.ffn_in = 'shard_p3p': is neither a shipped option"),
        (["plan=nowhere.yaml"], "nowhere.yaml"),
        (["system=mi100_8"], "system.node.topology"),
        (
            ["parallel=auto", "run.mode=training", "parallel.gpus=7", "parallel.tp=7"],
            "parallel = 'auto': finds no layout of 7",
        ),
        (["parallel=auto", "run.mode=training", "run.batch=8"], "times the memory of a GPU (take more GPUs"),
    ],
)
def test_bad_input_is_refused_with_its_path(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *words]) == 2
    assert told in capsys.readouterr().err


def test_every_way_has_a_source_and_belongs_to_something_that_a_plan_may_choose() -> None:
    entries: list[dict[str, Any]] = yaml.safe_load((conf_dir() / "data" / "frameworks.yaml").read_text("utf-8"))[
        "frameworks"
    ]
    for entry in entries:
        assert ("knob" in entry) != ("families" in entry)
        assert entry.get("ways") or entry.get("hardware")
        for way in entry.get("ways", []):
            assert set(way) == {"in", "say", "provenance", "source"}
            assert way["provenance"] in {"vendor", "secondary", "memory"}


def test_gains_of_whole_models_are_over_the_serial_step() -> None:
    rows = [
        {
            "scenario": "m s decode",
            "key": key,
            "baseline": "a",
            "status": "ok",
            "iteration_s": seconds,
            "memory_share": 0.5,
        }
        for key, seconds in (("a", 4.0), ("b", 2.0), ("c", 8.0))
    ]
    (row,) = gains(pd.DataFrame(rows)).to_dict("records")
    assert (row["model"], row["system"], row["mode"], row["gain"]) == ("m", "s", "decode", 2.0)
