"""Advised plans start by their framework's own checks, are given again by their command, and come back from files."""

from __future__ import annotations

import pytest

from benchmarks import startable
from simulators.steps.backend import StepBackend
from simulators.steps.frameworks import framework_rules
from studies.plan.stacks import tool_facts
from validation.framework_checks import CHECKS, Launch

_EACH = 10  # plans of a test
FINE = Launch(layers=80, heads=64, kv_heads=8, experts=0, tp=8, pp=4, dp=2, sequence=4096, micro_batches=8)


def check(seed: int) -> None:
    backend = StepBackend()
    for drawn in startable.drawn_plans(_EACH, seed):
        assert startable.violations(drawn, backend) == [], drawn.words
        assert startable.command_is_equal(drawn, backend), drawn.words
        assert startable.export_is_equal(drawn) == [], drawn.words


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
    ],
)
def test_the_checks_of_megatron_refuse_what_it_refuses(changes: dict[str, object], part: str) -> None:
    fine = {**vars(FINE), "waits_for_messages": True}
    assert list(CHECKS["megatron"](Launch(**fine))) == []
    assert any(part in text for text in CHECKS["megatron"](Launch(**{**fine, **changes})))
