"""Shapes of public models: each follows from published widths by the rule its file states, and none is FiCCO's."""

from __future__ import annotations

import re
from typing import Any, get_args

import pytest

from dse.values import Provenance
from simulators.workloads.operators import ShapeList
from tests.support import shipped

MODELS: dict[str, dict[str, Any]] = shipped("data")["models"]["models"]
LISTED = ShapeList.model_validate(shipped("workload")["open_models"])
SHAPES = LISTED.listed
FICCO = ShapeList.model_validate(shipped("workload")["ficco"])
LEARNING = ShapeList.model_validate(shipped("workload")["learning"])
SIZES = {
    "deepseek_v4_pro": 1600.0,
    "kimi_k2": 1026.0,
    "mixtral_8x22b": 141.0,
    "mixtral_8x7b": 47.0,
    "bert_large": 0.34,
    "bert_base": 0.11,
}  # as names do not say it


def parameters(model: dict[str, Any]) -> float:
    """Weights of all layers and embeddings, in 1e9; what a model has not (or is not known of it) counts nothing."""
    hidden, kv_heads, state = model["hidden"], model.get("kv_heads", 0), model.get("state", {})
    experts = model.get("experts", 0) * model.get("expert_ffn", 0) * model.get("expert_hidden", hidden) / hidden
    weights = {
        "attention": 2 * (model["heads"] + kv_heads) * model.get("head_dim", 0),
        "state": state.get("projected", 0) + state.get("outputs", 0),
        "experts": (3 if model["gated"] else 2) * (model.get("ffn", 0) + experts),
        "none": 0,
    }
    equal = [{"count": model["layers"], "mixer": "attention", "feed": "experts"}]
    layers = sum(
        kind["count"] * (weights[kind["mixer"]] + weights[kind["feed"]]) for kind in model.get("pattern", equal)
    )
    layers += model.get("decoder_layers", 0) * (2 * weights["attention"] + weights["experts"])
    return float(hidden * (layers + (1 if model.get("tied") else 2) * model.get("vocab", 0))) / 1e9


def test_there_are_more_than_two_hundred_shapes_under_names_of_their_own() -> None:
    assert len(SHAPES) == len(LISTED.workloads()) >= 200  # workloads() refuses a name that is there twice
    assert len({(shape.m, shape.n, shape.k, shape.shards, shape.pattern) for shape in SHAPES}) == len(SHAPES)


def test_a_shape_with_n_and_k_of_one_of_ficcos_says_so() -> None:
    weights = {(shape.n, shape.k) for shape in FICCO.listed}
    assert {shape.name for shape in SHAPES if "n and k of g" in shape.note} == {
        shape.name for shape in SHAPES if (shape.n, shape.k) in weights
    }


def test_every_model_has_a_source_and_its_provenance() -> None:
    for model in MODELS:
        assert MODELS[model]["provenance"] in get_args(Provenance)
        assert len(MODELS[model]["source"]) >= 20


def test_the_widths_of_a_model_make_about_the_parameters_of_its_name() -> None:
    for model in MODELS:
        match = re.search(r"_([0-9.]+)b", model)
        published = float(match[1]) if match else SIZES[model]
        assert parameters(MODELS[model]) == pytest.approx(published, rel=0.15)
        assert MODELS[model].get("parameters", 1e9 * published) == pytest.approx(1e9 * published, rel=0.05)


def test_rules_learn_from_shapes_drawn_by_the_rule_of_their_file_and_from_none_that_they_are_judged_on() -> None:
    drawn = [listed for listed in LEARNING.listed if listed.name.startswith("r")]
    judged = {(published.m, published.n, published.k) for published in SHAPES}
    assert len(drawn) >= 200
    assert not judged & {(learned.m, learned.n, learned.k) for learned in drawn}
    for place, shape in enumerate(drawn):
        kind = ("forward", "weights", "forward", "experts")[place % 4]
        tokens, columns, hidden = (shape.k, shape.m, shape.n) if kind == "weights" else (shape.m, shape.n, shape.k)
        assert 2048 <= hidden <= 20480, shape.name
        assert hidden % 256 == 0, shape.name
        assert 4096 <= tokens <= 2**20, shape.name
        assert (shape.pattern == "all_to_all") == (shape.shards == 1) == (kind == "experts"), shape.name
        assert 2048 <= columns <= 16384 if kind == "experts" else hidden <= columns <= 8 * hidden, shape.name
        part = 1 if shape.shards == 1 else 1 / 8
        assert 2 * (shape.m * shape.k + (shape.n * shape.k + shape.m * shape.n) * part) < 192e9, shape.name
