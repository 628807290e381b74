"""Advised plans start by their framework's own checks, are given again by their command, and come back from files."""

from __future__ import annotations

import pytest

from benchmarks import startable
from dse.config.compose import request
from dse_deploy.command import nearest, write_all
from dse_deploy.facts import ModelFacts
from dse_deploy.settings import tools
from simulators.steps.backend import StepBackend
from simulators.steps.plan.scenarios import scenarios
from simulators.steps.spread.framework_rules import framework_rules
from studies.plan.judged import composed_design
from studies.plan.stacks import tool_facts
from validation.framework_checks import CHECKS, Launch

_EACH = 10  # plans of a test
_SPLIT, _REDUCTIONS = "parallel.sequence_parallel", "parallel.reductions"
FINE = Launch(layers=80, heads=64, kv_heads=8, experts=0, tp=8, pp=4, dp=2, sequence=4096, micro_batches=8)


def check(seed: int) -> None:
    backend = StepBackend()
    for drawn in startable.drawn_plans(_EACH, seed):
        assert startable.violations(drawn, backend) == [], drawn.words
        assert startable.command_is_equal(drawn, backend), drawn.words
        assert startable.export_is_equal(drawn, backend) == [], drawn.words


@pytest.mark.more
def test_drawn_plans_start_and_come_back() -> None:
    check(0)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(1, 50))
def test_five_hundred_drawn_plans_start_and_come_back(seed: int) -> None:
    check(seed)


def test_rules_are_of_frameworks_that_are_known_and_checked() -> None:
    assert set(framework_rules()) == set(CHECKS) <= set(tool_facts())


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"pp": 3}, "divisible by pipeline"),
        ({"pp": 4, "virtual": 8}, "divisible by pipeline"),
        ({"tp": 6}, "num_attention_heads"),
        ({"cp": 3}, "2 * context-parallel-size"),
        ({"virtual": 2, "pp": 2, "waits_for_messages": True}, "more pipeline stages"),
        ({"schedule": "zb_h2"}, "does not exist"),
        ({"virtual": 5, "micro_batches": 6}, "number of microbatches"),
        ({"user_buffers": True}, "only when sequence parallelism"),
        ({"gathers_beside": True}, "with --overlap-grad-reduce"),
    ],
)
def test_the_checks_of_megatron_refuse_what_it_refuses(changes: dict[str, object], part: str) -> None:
    fine = {**vars(FINE), "waits_for_messages": True}
    assert list(CHECKS["megatron"](Launch(**fine))) == []
    assert any(part in text for text in CHECKS["megatron"](Launch(**{**fine, **changes})))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "path"),
    [
        (["parallel.tp=8", "parallel.sequence_parallel=false", "sites.ffn_in_backward=transformer_engine"], _SPLIT),
        (["parallel.dp=8", "parallel.zero=3", "parallel.prefetch=true", "parallel.reductions=after"], _REDUCTIONS),
    ],
)
def test_a_plan_that_megatron_asserts_against_is_refused_with_its_rule(words: list[str], path: str) -> None:
    step = ["study=plan", "model=llama3_8b", "system=h100_8", "stack=megatron_2026", "run.mode=training"]
    (tree, *_) = scenarios(composed_design(request([*step, *words]).tree)).values()
    problems = [problem for problem in StepBackend().problems(StepBackend().design(tree)) if problem.path == path]
    assert problems and "megatron asserts it" in problems[0].rule


@pytest.mark.slow
@pytest.mark.parametrize(("zero", "is_refused"), [(0, True), (1, True), (2, False), (3, False)])
def test_primus_refuses_overlapped_reductions_of_zero_bubbles_where_they_count(zero: int, is_refused: bool) -> None:
    words = ["parallel.dp=8", "parallel.pp=2", "parallel.pipeline=zb_h1", "parallel.reductions=beside"]
    split = [f"parallel.zero={zero}", "parallel.prefetch=false", "run.micro_batches=4", "fabric=ndr400"]
    step = ["study=plan", "model=llama3_8b", "system=mi300x_8", "stack=primus", "run.mode=training"]
    (tree, *_) = scenarios(composed_design(request([*step, *words, *split]).tree)).values()
    problems = StepBackend().problems(StepBackend().design(tree))
    assert (_REDUCTIONS in [problem.path for problem in problems]) == is_refused
    launch = Launch(
        **{**vars(FINE), "waits_for_messages": True, "schedule": "zb_h1", "reduces_beside": True, "zero": zero}
    )
    assert any("overlap_grad_reduce" in text for text in CHECKS["megatron"](launch)) == is_refused


def test_overlapped_exchanges_are_written_with_the_kernels_that_vllm_needs_for_them() -> None:
    plan = {"parallel": {"tp": 1, "dp": 8, "ep": 8, "exchanges": "two_micro_batches"}, "run": {"mode": "decode"}}
    written = write_all(tools()["vllm"], plan, "plan", ModelFacts(experts=True))
    assert "all2all-backend: deepep_low_latency" in written["vllm.yaml"].text
    assert nearest(tools()["vllm"], plan, written)["parallel"]["exchanges"] == "two_micro_batches"
