"""Steps in one call: designs of one structure are computed together, and each is as it is alone.

To the bit; to rounding where schedules run at sites.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dse.backend import Batch, Result, Tree
from dse.config.compose import request
from dse.config.options import list_options
from dse.errors import ConfigError
from dse.space import get_path, set_path
from dse.values import leaves, put
from simulators.steps.backend import StepBackend
from simulators.steps.design import StepDesign
from tests.support import drawn

STUDIES = [name for name in ("bert", "comp_vs_comm", "jitq", "plan", "whole_models") if name in list_options("study")]
SITES = {"attention_out": "hetero_fused_1d num_chunks=4", "ffn_out": "shard_p2p"}


@cache
def trees(study: str) -> Mapping[str, Tree]:
    return StepBackend().scenarios(request([f"study={study}"]).tree)


def design_of(study: str, chance: random.Random) -> StepDesign:
    """A design of one of the scenarios of a study; of `plan`, some sites have schedules."""
    tree = dict(chance.choice(list(trees(study).values())))
    if study == "plan":
        tree["sites"] = {**tree["sites"], **SITES}
    return StepBackend().design(tree)


def changed(design: StepDesign, path: str, chance: random.Random) -> Any:
    value = get_path(design, path)
    if isinstance(value, int):
        return max(1, round(value * chance.choice([0.5, 1, 1, 2, chance.uniform(0.5, 2)])))
    least = 1.0 if ".contention." in path else 0.8  # slowdowns stay slowdowns
    return value * chance.uniform(least, 1.0 if value <= 1 else 1.2)  # shares stay shares


def beside(design: StepDesign, chance: random.Random, count: int) -> list[StepDesign]:
    """Designs with some other numbers than those of a design."""
    paths = [path for path, value, _ in leaves(design) if value and StepBackend().is_axis(path, design)]
    designs = []
    for _ in range(count):
        other = design
        for path in chance.sample(paths, min(len(paths), chance.choice([1, 3, 10, len(paths)]))):
            if get_path(other, path) is not None:
                other = put(other, path, changed(other, path, chance))
        designs.append(other)
    return designs


def same(first: Result, second: Result, *, exact: bool) -> bool:
    if exact or first.status != "ok":
        return first == second
    close = second.metrics == pytest.approx(first.metrics, rel=1e-12, abs=1e-15)
    return close and replace(first, metrics={}) == replace(second, metrics={})


@pytest.mark.more
@pytest.mark.slow
@pytest.mark.one_in(3)
@pytest.mark.parametrize("study", STUDIES)
@drawn(12)
@given(seed=st.integers(0, 2**32 - 1))
def test_designs_in_one_call_are_as_they_are_alone(study: str, seed: int) -> None:
    chance, simulator = random.Random(seed), StepBackend()
    designs = [design for _ in range(2) for design in beside(design_of(study, chance), chance, 6)]
    chance.shuffle(designs)
    batches = [Batch(design) for design in designs]
    together, screened = simulator.evaluate(batches), simulator.screen(batches)
    for place, batch in enumerate(batches):
        (alone,) = simulator.evaluate([batch])
        assert same(together[place][0], alone[0], exact=study != "plan")
        assert screened[place].ok[0] == (simulator.screen([batch])[0]).ok[0]


def test_sections_are_validated_once_for_all_designs_that_share_them() -> None:
    simulator, tree = StepBackend(), dict(next(iter(trees("comp_vs_comm").values())))
    first = simulator.design(tree)
    second = simulator.design({**tree, "run": {**tree["run"], "batch": 3}})
    assert second == simulator.design({**tree, "run": {**tree["run"], "batch": 3}})
    assert second != first
    for name in ("system", "model", "optimizer", "kernels", "quantised", "format"):
        assert getattr(first, name) is getattr(second, name)
    with pytest.raises(ConfigError, match="model"):
        simulator.design({name: section for name, section in tree.items() if name != "model"})
    set_path(wrong := {**tree, "run": dict(tree["run"])}, "run.batch", -1)
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"run\.batch"):
            simulator.design(wrong)
