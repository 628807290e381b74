"""Formats of stored weights and caches that are typed: bytes, and times of inference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from simulators.steps.backend import StepBackend, metrics_of
from simulators.workloads.model_zoo import model_tree
from simulators.workloads.stored import format_names, weight_format
from tests.iterations import metrics, step


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


_TRAINED = {"run.mode": "training", "run.precision": "bf16", "parallel.dp": 8}


def _trained(optimizer: str = "adam", **run: str) -> dict[str, float]:
    paths = _TRAINED | {f"run.{name}": value for name, value in run.items()}
    return metrics(paths, model=model_tree("llama3_8b"), system="h200_8", kernels="flash", optimizer=optimizer)


@pytest.mark.parametrize("optimizer", ["adam", "adam_megatron", "adam_megatron_2022", "lamb", "sgd"])
def test_formats_that_are_the_usual_ones_change_nothing(optimizer: str) -> None:
    usual = "fp32" if optimizer == "adam_megatron_2022" else "bf16"
    plain, typed = _trained(optimizer), _trained(optimizer, gradients=usual, optimizer_states="fp32")
    same = ("optimizer_s", "forward_s", "backward_s", *(("state_bytes", "dp_s") if usual == "bf16" else ()))
    assert {name: typed[name] for name in same} == {name: plain[name] for name in same}


@pytest.mark.parametrize("name", format_names("states"))
def test_moments_take_their_bytes_and_are_read_and_written_once(name: str) -> None:
    """Adam of 32 bits: 28 bytes of traffic a weight and 12 of state, of which two moments are 16 and 8."""
    plain, typed = _trained(), _trained(optimizer_states=name)
    saved = 2 * (4 - float(weight_format(name).bytes_of(1)))
    assert plain["bytes_per_parameter"] - typed["bytes_per_parameter"] == pytest.approx(saved)
    assert typed["optimizer_s"] / plain["optimizer_s"] == pytest.approx((28 - 2 * saved) / 28, rel=0.01)


@pytest.mark.parametrize("name", format_names("gradients"))
def test_gradients_are_reduced_in_their_format_after_a_cast(name: str) -> None:
    plain, typed, size = _trained(), _trained(gradients=name), float(weight_format(name).bytes_of(1))
    assert typed["bytes_per_parameter"] - plain["bytes_per_parameter"] == pytest.approx(size - 2)
    assert typed["dp_s"] / plain["dp_s"] == pytest.approx(size / 2, rel=0.1)
    cast = size not in (2, 4)
    read = 28 + (size - 2) + (2 + size) * cast
    assert typed["optimizer_s"] / plain["optimizer_s"] == pytest.approx(read / 28, rel=0.02)


@pytest.mark.parametrize("path", ["run.gradients", "run.optimizer_states"])
def test_formats_of_training_are_refused_elsewhere(path: str) -> None:
    def broken(values: dict[str, Any]) -> list[str]:
        design = step(_TRAINED | {path: "fp8"} | values, model=model_tree("llama3_8b"), system="h200_8")
        return [problem.path for problem in StepBackend().problems(design)]

    assert broken({}) == []
    assert broken({"run.mode": "prefill"}) == [path]
    assert broken({"optimizer.moments": None, "optimizer.gradient_passes": None}) in (
        [["optimizer.moments"], ["optimizer.gradient_passes"]]
    )
    assert broken({"parallel.gradient_bytes": 4}) == (["parallel.gradient_bytes"] if path == "run.gradients" else [])


@pytest.mark.parametrize("path", ["run.weights", "run.kv_cache"])
def test_formats_are_refused_in_training(path: str) -> None:
    design = step({"run.mode": "training", path: "fp8"}, model=model_tree("llama3_8b"))
    assert [problem.path for problem in StepBackend().problems(design)] == [path]
