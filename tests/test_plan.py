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
from studies.plan import Plan, plans, ways_today
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


@pytest.mark.slow
def test_the_same_command_again_answers_from_the_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["model=llama3_8b", "run.sequence_length=1024", "parallel.sequence_parallel=true"]
    first = plan_of(planned(tmp_path, *words))
    capsys.readouterr()
    second = plan_of(planned(tmp_path, *words))
    assert second.best["iteration_s"] == first.best["iteration_s"]
    assert "results were known from earlier studies" in capsys.readouterr().out or len(first.table) == len(second.table)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["training", "decode"])
def test_a_plan_is_never_slower_than_serial(tmp_path: Path, mode: str) -> None:
    plan = plan_of(planned(tmp_path, "model=llama3_8b", f"run.mode={mode}", "parallel.sequence_parallel=true"))
    assert float(plan.best["iteration_s"]) <= float(plan.before["iteration_s"])
    assert float(plan.table["iteration_s"].min()) == float(plan.best["iteration_s"])
    for name in plan.sites:
        alone = plan.alone(name)
        assert alone is None or alone > 0


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["model=llama3_800b"], "llama3_800b"),
        (["parallel.tp=7"], "parallel.tp = 7: does not divide the heads"),
        (["sites.ffn_in=shard_p3p"], "sites.ffn_in = 'shard_p3p': is neither a shipped option"),
        (["plan=nowhere.yaml"], "nowhere.yaml"),
        (["system=mi100_8"], "system.node.topology"),
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
