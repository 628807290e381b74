"""Software that runs schedules: what it costs, where it runs, and what plans make of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest

from dse.cli import main
from dse.config.compose import request
from dse.config.options import list_options
from dse.errors import ConfigError
from simulators.steps.backend import StepBackend, metrics_of
from simulators.steps.design import StepDesign
from simulators.steps.overlap.implementations import GROUP, Mode, implementation, list_implementations
from simulators.steps.overlap.sites import SITES, read_schedule
from simulators.steps.plan.choices import CHOICES as CHOICES_OF_STEPS
from tests.support import shipped

GATHER, SUM = "ffn_in", "ffn_out"
CHOICES = {"default": [], "existing": ["candidates=existing"], "ideal": ["candidates=ideal"]}


def prefill_tree(tokens: int, sites: dict[str, str], **model: Any) -> dict[str, Any]:
    """A prefill of a model of width 16,384 on 8 H100s."""
    groups = {group: shipped(group)[name] for group, name in (("optimizer", "adam"), ("kernels", "flash"))}
    run = {"mode": "prefill", "batch": 1, "sequence_length": tokens, "precision": "bf16"}
    tree: dict[str, Any] = {
        **groups,
        "system": shipped("system")["h100_8"],
        "model": shipped("model")["transformer"] | model,
    }
    return {**tree, "run": run, "parallel": {"tp": 8, "sequence_parallel": True}, "sites": sites}


def prefill(tokens: int, sites: dict[str, str], **model: Any) -> StepDesign:
    """The design of that tree."""
    return StepBackend().design(prefill_tree(tokens, sites, **model))


def seconds(tokens: int, sites: dict[str, str]) -> float:
    """Time of that prefill."""
    return float(metrics_of(prefill(tokens, sites))["iteration_s"])


@pytest.mark.parametrize(("tokens", "model", "serial"), [(2048, {}, 0), (2040, {}, 1), (65536, {"hidden": 4096}, 1)])
def test_software_leaves_small_tensors_serial(tokens: int, model: dict[str, int], serial: int) -> None:
    problems = StepBackend().problems(prefill(tokens, {GATHER: "vllm_async_tp"}, **model))
    assert len([problem for problem in problems if "leaves a site serial" in problem.rule]) == serial


@pytest.mark.parametrize("name", list_options(GROUP))
def test_every_implementation_has_schedules_and_a_source_of_each_cost(name: str) -> None:
    software = implementation(name)
    assert software is not None
    for place in software.schedules:
        site = next(site for site in SITES if SITES[site].order == place or (place == "beside" and SITES[site].beside))
        assert read_schedule(name, site).name == name
        costs = set(software.schedules[place]) - {"schedule", "comm_engine", "sender"}
        at_place = f"schedules.{place}"
        assert all(at_place in software.sources or f"{at_place}.{knob}" in software.sources for knob in costs)
    assert all(gpu in list_options("gpu") for gpu in software.gpus)
    assert all({"fits", "gpu", "method"} <= set(row) for row in software.fitted_on)  # by which rows are left out
    assert set(software.modes) <= set(get_args(Mode))


def test_software_is_refused_where_it_does_not_run() -> None:
    flux, vllm = implementation("flux"), implementation("vllm_async_tp")
    assert flux is not None and vllm is not None
    assert "does not run on mi300x" in str(flux.refusal("mi300x", "bf16", "prefill"))
    assert "does not multiply fp8" in str(flux.refusal("h100", "fp8", "prefill"))
    assert "does not run in training" in str(vllm.refusal("h100", "bf16", "training"))
    assert flux.refusal("h100", "bf16", "prefill") is None
    assert flux.refusal("a GPU of one's own", "bf16", "prefill") is None
    with pytest.raises(ConfigError, match="has no schedule of a collective after"):
        read_schedule("torch_native_async_tp", SUM)


def test_what_a_framework_switches_has_one_name_for_the_same_sites() -> None:
    switched = dict[str, set[tuple[str, tuple[str, ...]]]]()
    for software in filter(None, map(implementation, list_options(GROUP))):
        for site in (site for sites in software.switches.values() for site in sites):
            assert software.schedules.keys() & {SITES[site].order, "beside"}
        for tool in software.frameworks if software.switches else ():
            switched.setdefault(tool, set()).update(software.switches.items())
    assert switched
    for groups in switched.values():
        sites = [site for _, group in groups for site in group]
        assert len(sites) == len(set(sites))  # disjoint: each is of one choice of a plan
        assert not {name for name, _ in groups} & CHOICES_OF_STEPS.keys()


@pytest.mark.parametrize("candidates", ["own", "all"])
def test_sites_that_a_framework_switches_together_have_one_schedule(candidates: str) -> None:
    at_all = {"attention_in": "vllm_async_tp", "attention_out": "vllm_async_tp", GATHER: "vllm_async_tp"}
    stack = {"name": "vllm", "tool": "vllm", "candidates": candidates}
    for sites, is_legal in [(at_all | {SUM: "vllm_async_tp"}, True), (at_all, candidates == "all")]:
        design = StepBackend().design({**prefill_tree(2048, sites), "stack": stack})
        problems = [str(problem) for problem in StepBackend().problems(design)]
        assert (problems == []) == is_legal
        assert is_legal or any(
            "for all tensor parallelism at once, and sites.ffn_out have" in text for text in problems
        )


@pytest.mark.slow
def test_ones_own_software_comes_from_a_file_and_costs_more_than_the_hardware(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    text = "name: mine\ndescription: mine\nschedules: {before: {schedule: shard_p2p, sync_s: 5 ms}}\n"
    file.write_text(text, "utf-8")
    mine, ideal = (seconds(4096, {GATHER: name}) for name in (str(file), "shard_p2p"))
    assert mine > ideal
    file.write_text(text.replace("sync_s", "sync_z"), "utf-8")
    assert main(["plan", f"sites.{GATHER}={file}", f"output_dir={tmp_path}"]) == 2


@pytest.mark.slow
def test_few_tokens_lose_by_what_software_costs() -> None:
    sites = dict.fromkeys(("attention_in", "attention_out", GATHER, SUM), "vllm_async_tp")
    short, long = (seconds(tokens, {}) / seconds(tokens, sites) for tokens in (256, 16384))
    assert short < 0.5
    assert long > 1


@pytest.mark.more
@pytest.mark.slow
def test_a_dry_run_of_a_plan_counts_its_points(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "model=llama3_8b", "budget.trials=4", "~space.sites", "~space.parallel", "--dry-run"]) == 0
    assert "points" in capsys.readouterr().out


@pytest.mark.slow
def test_what_a_plan_tries_is_chosen_by_name() -> None:
    texts = {name: str(request(["study=plan", *words]).tree["space"]) for name, words in CHOICES.items()}
    assert texts["default"] == texts["existing"] != texts["ideal"]
    assert "flux" in texts["existing"] and "flux" not in texts["ideal"]


def test_the_list_shows_every_implementation_and_each_constant_its_source() -> None:
    names = list(list_options("implementation"))
    assert all(name in list_implementations([]).text for name in names)
    shown = list_implementations(["nccl"]).text
    assert "7.2185 us" in shown
    assert "calibrated" in shown
    with pytest.raises(ConfigError, match="did you mean `nccl`"):
        list_implementations(["ncll"])
