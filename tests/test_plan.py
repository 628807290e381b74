"""Plans of steps: what the command prints and writes, that it keeps what it chose, and what it says of bad input."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml

from dse.cli import main
from dse.config.compose import request
from dse.config.options import conf_dir
from dse.results.decisions import gain_text
from dse.results.pareto import Answer, Contest
from dse.results.run_folder import Outputs
from dse.space import get_path
from dse.study.settings import Decide
from simulators.steps.backend import StepBackend, metrics_of
from simulators.steps.overlap.sites import SITES
from simulators.steps.plan.given_plan import AS_GIVEN, with_values
from simulators.steps.plan.scenarios import scenarios
from simulators.steps.run.build import iteration
from studies.plan import _gains as gains_of_choices
from studies.plan.answer import ways_today
from studies.plan.certainty import DrawnPlan, as_decided
from studies.plan.fitting import does_not_fit
from studies.plan.judged import PlanJudgement, composed_design, judgements
from studies.plan.stacks import stack_words
from studies.plan.step_plan import StepPlan, evaluated, plain, plans
from studies.plan.texts import next_best, next_best_text
from studies.whole_models import gains

FEW = "choice(serial,'hetero_fused_1d num_chunks=2',shard_p2p)"
SPACE = [f"space.sites.{name}={FEW}" for name in SITES]
DECODE = ("model=llama3_70b", "system=h100_8", "parallel.tp=8", "run.mode=decode", "run.batch=64")
QUIET = ["tracking=none", "figures=none", "timeline=false", "executor.jobs=1"]


def planned(folder: Path, *words: str) -> Outputs:
    assert main(["plan", *QUIET, *SPACE, f"output_dir={folder}", *words]) == 0
    return Outputs.latest(folder, "plan")


def plan_of(outputs: Outputs) -> StepPlan:
    (plan,) = as_decided(
        plans(outputs.read_table("results"), outputs.read_config()), outputs.read_json("summary")["decisions"]
    )
    return plan


@pytest.mark.slow
def test_a_plan_is_printed_written_and_taken_up_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outputs = planned(tmp_path, "model=llama3_8b", "system=h100_8", "run.sequence_length=2048")
    output = capsys.readouterr().out
    plan = plan_of(outputs)
    assert plan.gain >= 1
    assert re.search(r"llama3_8b on 8 x h100: [\d.]+ ms a step", output)
    assert "step: prefill of 1 sequence of 2,048 tokens in bf16" in output
    words = " ".join(output.split())
    assert re.search(r"(so this is \d\.\d\dx \(\d\.\d\d–\d\.\d\d\) faster|as fast .*as vLLM as it comes)", words)
    taken = r"; [\d.]+ m?s to [\d.]+ m?s a step \(90 %, by \d+ measured steps, none of this [\w, ]+\)"
    assert re.search(rf"turn on: .+ sure: (over )?\d+ % that no other setting is faster{taken}", words)
    for way in ways_today(plan):
        assert way.partition("(")[0].split()[1] in output
    content = yaml.safe_load((outputs.folder / "plan.yaml").read_text("utf-8"))
    again = judge(tmp_path / "again", outputs.folder / "plan.yaml", "model=llama3_8b", "run.sequence_length=2048")
    assert float(again.point["iteration_s"]) == float(plan.best["iteration_s"])
    assert float(again.serial["iteration_s"]) == float(plan.serial["iteration_s"])
    assert plan.gain <= float(plan.serial["iteration_s"] / plan.best["iteration_s"]) * (1 + 1e-9)
    for path, value in content["parallel"].items():
        assert get_path(again.trees[AS_GIVEN], f"parallel.{path}") == value
    for choice in plan.choices:
        if plan.is_off(choice):
            assert choice.name not in again.losses


@pytest.mark.more
def test_a_plan_keeps_what_stands_out_and_leaves_off_what_nobody_could_tell(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["model=llama3_70b", "system=h100_8", "parallel.split_ctas=0", "run.sequence_length=2048"]
    outputs = planned(tmp_path, *words, "store=sqlite")
    plan, output = plan_of(outputs), capsys.readouterr().out
    (decision,) = outputs.read_json("summary")["decisions"].values()
    fastest = plans(outputs.read_table("results"), outputs.read_config())[0]
    assert float(plan.best["iteration_s"]) >= float(fastest.best["iteration_s"])
    assert (plan.best["key"] == fastest.best["key"]) == (not decision["left_off"])
    assert all(plan.is_off(choice) for choice in plan.choices if choice.name in decision["left_off"])
    assert decision["low"] <= plan.gain <= decision["high"] and 0 <= decision["fastest"] <= 1
    table = outputs.read_table("results")
    table.attrs["decisions"] = outputs.read_json("summary")["decisions"]
    assert gains_of_choices(table)["range_low"].notna().all()
    low, high = decision["over_serial"]
    assert low <= float(plan.serial["iteration_s"] / plan.best["iteration_s"]) <= high
    assert f"is {gain_text(plan.gain, decision['low'], decision['high'])}" in " ".join(output.split())
    undecided = "no certain gain" in output or "too close to call" in output
    assert undecided == (not decision["decided"])
    assert ("to decide it, measure " in output) == bool(decision["measure"])
    again = planned(tmp_path, *words, "store=sqlite", "decide.samples=0")
    assert "sure: " not in capsys.readouterr().out
    assert again.read_json("summary")["decisions"] == {}


@pytest.mark.more
def test_a_step_that_is_kept_as_it_comes_gains_exactly_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outputs = planned(tmp_path, *DECODE, "run.sequence_length=4096")  # vLLM's sums in the switch are the fastest
    plan, output = plan_of(outputs), " ".join(capsys.readouterr().out.split())
    assert plan.gain == plan.decision["gain"] == 1 < float(plan.serial["iteration_s"] / plan.best["iteration_s"])
    assert plan.decision["low"] == pytest.approx(1) == plan.decision["high"]
    for choice in plan.choices:
        second = next_best(plan, choice)
        if second is not None and " with " not in next_best_text(
            plan, choice, second
        ):  # then all others are as planned
            values = {path: plain(second[path]) for path in choice.off if path in plan.table}
            assert evaluated(plan, plan.best, values)["iteration_s"] == pytest.approx(float(second["iteration_s"]))
    assert "as fast as vLLM as it comes" in output and "of 2025 (stack=vllm), fitted on three prefills" in output


@pytest.mark.parametrize(
    ("ratios", "stays"), [([1, 1, 1.2, 1.3], True), ([0.9, 1.1, 1.2, 1.3], False), ([1, 1, 1, 1.3], False)]
)
def test_a_choice_that_never_costs_and_gains_at_the_median_is_kept(ratios: list[float], stays: bool) -> None:
    settings = SimpleNamespace(decide=Decide())
    drawn = DrawnPlan(None, SimpleNamespace(settings=settings))  # type: ignore[arg-type]
    drawn._times.update(without=np.array(ratios), planned=np.ones(4))
    rows = ({"key": name, "iteration_s": seconds} for name, seconds in (("without", 1.2), ("planned", 1.0)))
    assert drawn.never_slower(*rows) == stays


def judge(folder: Path, file: Path, *words: str, code: int = 0) -> PlanJudgement:
    """The judgement of the plan of a file, of one scenario."""
    assert main(["plan", *QUIET, f"output_dir={folder}", *words, f"plan={file}"]) == code
    outputs = Outputs.latest(folder, "plan")
    (judged,) = judgements(outputs.read_table("results"), outputs.read_config())
    return judged


THEIRS = {
    "tool": "vllm",
    "sites": dict.fromkeys(("attention_in", "attention_out", "ffn_in", "ffn_out"), "shard_p2p"),
    "parallel": {"tp": 8, "sequence_parallel": True},
}


@pytest.mark.more
def test_a_given_plan_that_is_slower_is_told_as_slower_with_the_site_that_loses_most(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "theirs.yaml"
    file.write_text(yaml.safe_dump(THEIRS))
    judged = judge(tmp_path, file, *DECODE, "run.sequence_length=4096")
    answer = capsys.readouterr().out
    first = " ".join(below_heading(answer)[:2])
    seconds = {name: float(row["iteration_s"]) for name, row in judged.rows.items()}
    unchanged_s = seconds[AS_GIVEN]
    tree = judged.trees[AS_GIVEN]
    assert unchanged_s == float(iteration(StepBackend().design(tree)).seconds)
    assert all(tree["sites"][site] == schedule for site, schedule in THEIRS["sites"].items())  # type: ignore[attr-defined]
    assert unchanged_s > seconds["serial"] > seconds["defaults of vllm"]  # whose switch adds
    assert first.startswith(f"llama3_70b, as theirs.yaml has it: {1e3 * unchanged_s:.3f} ms a step")
    assert f"{unchanged_s / seconds['serial']:.2f}x slower than serial execution" in first
    sites = {name: lost for name, lost in judged.losses.items() if name in SITES}
    worst = max(sites, key=lambda name: sites[name])
    assert sites[worst] == unchanged_s - seconds[f"without {worst}"] > 0
    assert f"site that loses most: {worst} (shard_p2p)" in answer.replace("\n", " ")
    assert all(f"\n{site} " in answer for site in THEIRS["sites"])
    outputs = Outputs.latest(tmp_path, "plan")
    again = yaml.safe_load((outputs.folder / "plan.yaml").read_text())
    assert {**again, "step": []} == {**THEIRS, "parallel": {"sequence_parallel": True}, "step": []}  # tp was typed
    decision = outputs.read_json("summary")["decisions"][str(judged.point["key"])]
    assert set(decision["ranges"]) == set(seconds)
    assert all(low <= seconds[name] / unchanged_s <= high for name, (low, high) in decision["ranges"].items())
    low, high = decision["ranges"]["serial"]
    assert f"({1 / high:.2f}–{1 / low:.2f}) slower" in answer and not decision["decided"]


def below_heading(answer: str) -> list[str]:
    """Lines of an answer below its question, which ends with what was typed in brackets."""
    lines = answer.splitlines()
    return lines[1 + next(place for place, line in enumerate(lines) if line.endswith(")")) :]


@pytest.mark.slow
def test_sites_that_a_step_does_not_have_are_told_before_the_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "theirs.yaml"
    sites = {"ffn_in_backward": "c3_sp", "attention_in": "shard_p2p", "ffn_out": "shard_p2p"}
    file.write_text(yaml.safe_dump({"sites": sites}))
    words = ("model=llama3_8b", "run.sequence_length=2048", "run.batch=8", "parallel.sequence_parallel=true")
    judged = judge(tmp_path, file, *words)
    first = below_heading(capsys.readouterr().out)[0]
    assert first == "left out, as this step has no such site: sites.ffn_in_backward = c3_sp"
    assert set(judged.losses) == {"attention_in", "ffn_out"}
    assert get_path(judged.trees["serial"], "parallel.sequence_parallel") is True  # what was typed is not taken back
    assert not any("ffn_in_backward" in name for name in judged.rows)


QWEN = ("model=qwen2.5_72b", "system=h100_8", "run.mode=training", "run.batch=64")


@pytest.mark.nightly
def test_a_plan_that_fits_nowhere_is_no_gain(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *QUIET, *SPACE, *QWEN, f"output_dir={tmp_path}", "parallel.split_ctas=0"]) == 3
    answer, errors = capsys.readouterr()
    outputs = Outputs.latest(tmp_path, "plan")
    table, lines = outputs.read_table("results"), below_heading(answer)
    assert set(table["status"]) == {"infeasible"}
    assert not table["on_front"].any()
    assert table["reason"].str.contains("memory_share is above").all()
    least = float(table["memory_share"].min())
    assert lines[0].startswith(f"qwen2.5_72b: does not fit in any schedule: it takes {least:.2f} times the memory")
    assert lines[1].startswith("nearest that fits: parallel.")
    assert "precision of weights alone: 8 bits" in " ".join(lines[1:4])
    assert "no point is within rules and limits" in errors
    assert not any("faster" in line for line in lines)
    assert "in short" not in answer
    assert not (outputs.folder / "plan.yaml").exists()
    file = tmp_path / "mine.yaml"
    file.write_text("sites: {ffn_out: signalled}\n")
    judge(tmp_path / "judged", file, *QWEN, code=3)
    again = capsys.readouterr().out
    assert "does not fit in any schedule" in again
    assert not any("faster" in line for line in below_heading(again))


@pytest.mark.slow
def test_the_nearest_layout_fits_and_keeps_the_work(tmp_path: Path) -> None:
    composed = request(["study=plan", *QWEN, *stack_words(QWEN)])
    tree = dict(next(iter(scenarios(composed_design(composed.tree)).values())))
    _, line = does_not_fit("it", tree)
    words = dict(word.split("=") for word in line.partition(" (")[0].split(": ")[1].split())
    typed = with_values(tree, {path: yaml.safe_load(value) for path, value in words.items()})
    assert float(metrics_of(StepBackend().design(typed))["memory_share"]) <= 1
    sequences = [get_path(typed, "run.batch") * get_path(typed, "run.micro_batches") * get_path(typed, "parallel.dp")]
    assert sequences == [64]


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
@pytest.mark.more
@pytest.mark.parametrize("mode", ["training", "decode"])
def test_a_plan_is_never_slower_than_serial(tmp_path: Path, mode: str) -> None:
    plan = plan_of(planned(tmp_path, "model=llama3_8b", f"run.mode={mode}", "parallel.sequence_parallel=true"))
    assert float(plan.best["iteration_s"]) <= float(plan.before["iteration_s"])
    fastest = replace(plan, preferred="").best  # the planned one may be simpler, and as fast within the noise
    assert float(plan.table["iteration_s"].min()) == float(fastest["iteration_s"])
    for choice in plan.choices:
        alone = plan.alone(choice)
        assert alone is None or alone > 0


@pytest.mark.nightly
def test_a_plan_with_layouts_is_kept_by_later_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["model=llama3_8b", "system=h100_8", "run.mode=training", "parallel.split_ctas=0"]
    few = ["space.parallel.virtual_stages=choice(2)", "parallel.collectives=library"]
    outputs = planned(tmp_path, *words, *few, "run.batch=16", "parallel=auto", "layouts.gpus=4", "parallel.dp=1")
    output = capsys.readouterr().out
    plan = plan_of(outputs)
    assert plan.layout(plan.best).name in output
    assert int(plan.best["parallel.dp"]) == 1
    assert float(plan.best["memory_share"]) <= 1
    assert "usual (Takeaways 1 and 2 of arXiv:2104.04473)" in output
    again = judge(tmp_path / "again", outputs.folder / "plan.yaml", *words)
    assert float(again.point["iteration_s"]) == float(plan.best["iteration_s"])


@pytest.mark.nightly
def test_what_does_not_fit_is_never_planned_where_something_does(tmp_path: Path) -> None:
    step = ["model=llama3_8b", "run.mode=training", "run.batch=8", "run.sequence_length=4096", "parallel.tp=4"]
    table = planned(tmp_path, *step, "parallel.split_ctas=0").read_table("results")
    (plan,) = plans(table, {})
    timed = table[table["iteration_s"].notna()]
    assert (timed["memory_share"] > 1).any()
    assert (timed["memory_share"] <= 1).any()
    assert float(plan.best["memory_share"]) <= 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model=llama3_800b"], "llama3_800b"),
        (["parallel.tp=7"], "parallel.tp = 7: does not divide the heads"),
        (["sites.ffn_in=shard_p3p"], "sites.ffn_in = 'shard_p3p': is neither a shipped option"),
        (["plan=nowhere.yaml"], "nowhere.yaml"),
        (
            ["plan=mine.yaml", "space.sites.ffn_in=choice(serial)"],
            "a plan that is given is judged as it is (leave it out",
        ),
        (["plan=mine.yaml", "parallel=auto"], "parallel = 'auto': is searched, and a plan that is given is judged"),
        (["plan=mine.yaml", "model=llama3_8b", "parallel.tp=7"], "parallel.tp = 7: does not divide the heads"),
        (["plan=wrong.yaml"], "sites.ffn_on: is no site (did you mean `ffn_in`?)"),
        (["plan=two.yaml"], "plan.llama3_8b: is no section of a plan"),
        (["parallel.gpus=32"], "parallel.gpus = '32': is the number of GPUs of layouts that are chosen: degrees give"),
        (["parallel.gpus=32"], "(write parallel=auto layouts.gpus=32)"),
        (["layouts.sequences=8"], "layouts.sequences = 8: is read where layouts are chosen alone"),
        (["layouts.gpus=32"], "layouts.gpus = 32: is read where layouts are chosen alone (layouts.auto=true layouts.g"),
        (["layouts.auto=true", "+given.plan={parallel.tp:8}"], "a plan that is given is judged as it is"),
        (["system=mi100_8"], "system.node.topology"),
        (
            ["parallel=auto", "run.mode=training", "parallel.gpus=7", "parallel.tp=7"],
            "parallel = 'auto': finds no layout of 7",
        ),
        (["parallel=auto", "run.mode=training", "run.batch=8"], "times the memory of a GPU (take more GPUs"),
    ],
)
def test_bad_input_is_refused_with_its_path(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text("sites: {ffn_in: shard_p2p}\n")
    Path("wrong.yaml").write_text("sites: {ffn_on: shard_p2p}\n")
    Path("two.yaml").write_text("llama3_8b: {sites: {ffn_in: shard_p2p}}\n")
    assert main(["plan", *words]) == 2
    assert message in capsys.readouterr().err


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
    slower = pd.DataFrame(rows).assign(iteration_s=[1.0, 2.0, 8.0])
    contest = Contest(Answer.model_validate(request(["study=whole_models"]).tree["study"]["answer"]))
    assert list(contest.winners(slower, {"iteration_s": "minimize"})["key"]) == ["a"]
    assert gains(slower)["gain"].tolist() == [1.0]
