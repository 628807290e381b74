"""Formats of stored weights and caches that are typed: bytes, and times of inference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from simulators.steps.backend import StepBackend, metrics_of
from simulators.workloads.model_zoo import model_tree
from simulators.workloads.stored import format_names, weight_format
from tests.iterations import step


def _metrics(tree: Mapping[str, Any], **values: Any) -> dict[str, float]:
    changed = {
        "run.mode": "decode",
        "run.batch": 1,
        "run.sequence_length": 4096,
        "parallel.tp": 8,
        "run.precision": "bf16",
    }
    paths = {**changed, **{path.replace("_of_", "."): value for path, value in values.items()}}
    design = step(paths, model=dict(tree), system="h200_8", kernels="flash")
    return {name: float(value) for name, value in metrics_of(design).items()}


@pytest.mark.parametrize("name", format_names())
def test_a_format_that_is_typed_takes_its_bytes_and_no_product_is_slower(name: str) -> None:
    tree, format = model_tree("llama3_70b"), weight_format(name)
    plain, typed = _metrics(tree), _metrics(tree, run_of_weights=name)
    expected = float(format.bytes_of(8192))
    outside = 0.0 if format.all_weights else 0.0298
    assert typed["bytes_per_parameter"] == pytest.approx((1 - outside) * expected + outside * 2, rel=2e-3)
    assert (typed["iteration_s"] <= plain["iteration_s"]) == (expected <= 2)
    assert typed["flop"] == plain["flop"]


def test_decode_of_one_sequence_reads_fp8_weights_in_nearly_half_of_the_time() -> None:
    """Products that the HBM bounds take as long as the bytes of their weights."""
    tree = model_tree("llama3_70b")
    plain, typed = (_metrics(tree, parallel_of_tp=1, **keys) for keys in ({}, {"run_of_weights": "fp8"}))
    assert typed["hbm_bytes"] / plain["hbm_bytes"] == pytest.approx(0.5, abs=0.03)
    assert 0.48 < typed["forward_s"] / plain["forward_s"] < 0.65


def test_a_prompt_that_arithmetic_bounds_is_hardly_faster_with_fp8_weights() -> None:
    tree = model_tree("llama3_70b")
    runs = [
        _metrics(tree, run_of_mode="prefill", run_of_sequence_length=8192, parallel_of_tp=1, **keys)["forward_s"]
        for keys in ({}, {"run_of_weights": "fp8"})
    ]
    assert 0.97 < runs[1] / runs[0] <= 1


@pytest.mark.parametrize("name", ["llama3_8b", "deepseek_v3"])
def test_a_cache_in_fp8_takes_half_and_is_read_faster(name: str) -> None:
    tree = model_tree(name)
    plain, typed = (
        _metrics(tree, run_of_batch=64, run_of_sequence_length=32_768, **keys)
        for keys in ({}, {"run_of_kv_cache": "fp8"})
    )
    assert typed["activation_bytes"] == pytest.approx(plain["activation_bytes"] / 2)
    assert typed["iteration_s"] < plain["iteration_s"]


@pytest.mark.parametrize("path", ["run.weights", "run.kv_cache"])
def test_formats_are_refused_in_training(path: str) -> None:
    design = step({"run.mode": "training", path: "fp8"}, model=model_tree("llama3_8b"))
    assert [problem.path for problem in StepBackend().problems(design)] == [path]
