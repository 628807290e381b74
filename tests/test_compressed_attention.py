"""Attention over compressed tokens, and streams of residuals: weights, entries, caches, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dse.backend import Batch
from simulators.steps.backend import StepBackend
from simulators.workloads.compressed import CompressedAttention, CompressedLayers
from simulators.workloads.model_zoo import model_tree
from tests import iterations

MODEL = "deepseek_v4_pro"
BACKEND = StepBackend()
LAYERS = "model.compressed.layers"
PARTLY = {"heads": 64, "width": 128, "tokens": 1024, "share": 0.5}


def tree(**overrides: Any) -> dict[str, Any]:
    words = {"run.mode": "decode", "run.batch": 1, "run.sequence_length": 4096, "parallel.tp": 8, **overrides}
    base = iterations.tree({"run.precision": "bf16", **words}, system="b200_8", kernels="vllm")
    model, changed = model_tree(MODEL), dict(overrides.get("model", {}))
    changed["compressed"] = {**model["compressed"], **changed.get("compressed", {})}
    return {**base, "model": {**model, **changed}}


def results_of(design_tree: dict[str, Any]) -> Any:
    (results,) = BACKEND.evaluate([Batch(BACKEND.design(design_tree))])
    assert results.ok[0], results.texts
    return results


def test_weights_are_as_many_as_published() -> None:
    """1.6e12, of which 49e9 multiply with a token."""
    results = results_of(tree(**{"run.sequence_length": 1, "parallel.tp": 1}))
    stored = results.column("state_bytes")[0] / results.column("bytes_per_parameter")[0]
    assert stored == pytest.approx(1.6e12, rel=0.03)
    assert results.column("flop")[0] / 2 == pytest.approx(49e9, rel=0.03)


@given(st.integers(1, 20_000), st.integers(1, 128), st.integers(1, 2048))
def test_mean_entries_are_the_mean_over_queries(tokens: int, ratio: int, most: int) -> None:
    index = {"heads": 1, "width": 1, "tokens": most}
    for layers in (CompressedLayers(share=1, ratio=ratio), CompressedLayers(share=1, ratio=ratio, index=index)):
        steps = (np.arange(4000) + 0.5) / 4000 * tokens
        assert layers.mean_entries(tokens) == pytest.approx(layers.entries(steps).mean(), rel=2e-3)


def test_a_window_and_both_ratios_count_by_their_layers() -> None:
    attention = CompressedAttention.model_validate(model_tree(MODEL)["compressed"])
    of_128, of_4 = (layers.share for layers in attention.layers)
    assert of_128 + of_4 == pytest.approx(1)
    assert attention.entries(64) == pytest.approx(64 + of_128 / 2 + of_4 * 16)
    assert attention.entries(1 << 20) == pytest.approx(128 + of_128 * 8192 + of_4 * 1024)
    far = attention.cached_numbers(1 << 20, 512)
    assert far == pytest.approx(128 * 512 + 2**20 * (of_128 * 512 / 128 + of_4 * (512 + 128) / 4))
    queries = np.arange(1, 1001)
    mean = np.mean([attention.entries(tokens) for tokens in queries])
    assert attention.mean_entries(1000) == pytest.approx(mean, rel=2e-3)


def test_a_cache_is_a_fraction_of_that_of_keys_of_all_tokens() -> None:
    near, far = (
        results_of(tree(**{"run.sequence_length": length})).column("activation_bytes")[0] for length in (8192, 16384)
    )
    of_token = (far - near) / 8192
    assert of_token == pytest.approx(61 * 2 * (0.508 * 512 / 128 + 0.492 * 640 / 4), rel=0.01)


def test_streams_of_residuals_take_time_and_bytes() -> None:
    four, two = (results_of(tree(**{"run.batch": 64, "model": {"streams": number}})) for number in (4, 2))
    assert four.column("stream_bytes")[0] > two.column("stream_bytes")[0]
    assert four.column("iteration_s")[0] > two.column("iteration_s")[0]


@pytest.mark.parametrize(
    ("words", "path"),
    [
        ({"run.mode": "training"}, "run.mode"),
        ({"parallel.pp": 2}, "parallel.pp"),
        ({"parallel.cp": 2, "run.mode": "prefill"}, "parallel.cp"),
        ({"model": {"window": 128}}, "model.compressed"),
        ({"parallel.tp": 32}, "parallel.tp"),
        ({"run.mode": "prefill", "run.chunk": 512}, "run.chunk"),
        ({"model": {"sinks": True}}, "model.compressed"),
        ({"model": {"out_gate": True}}, "model.compressed"),
        ({"model": {"kv_heads": 8}}, "model.kv_heads"),
        ({"model": {"compressed": {"layers": [{"share": 0.9, "ratio": 4}, {"share": 0.2, "ratio": 8}]}}}, LAYERS),
        ({"model": {"compressed": {"layers": [{"share": 0.9, "ratio": 4, "index": PARTLY}]}}}, LAYERS),
        ({"model": {"compressed": {"rope_dim": 1024}}}, "model.compressed.rope_dim"),
        ({"model": {"compressed": {"out_groups": 24}}}, "model.compressed.out_groups"),
    ],
)
def test_what_is_not_modelled_is_refused_by_its_path(words: dict[str, Any], path: str) -> None:
    problems = BACKEND.problems(BACKEND.design(tree(**words)))
    assert path in {problem.path for problem in problems}


def test_streams_of_residuals_are_refused_of_kinds_of_layers() -> None:
    """They would be ignored."""
    base = iterations.tree({"run.mode": "decode", "run.precision": "bf16"}, system="b200_8", kernels="vllm")
    design = BACKEND.design({**base, "model": {**model_tree("nemotron3_nano_30b_a3b"), "streams": 4}})
    assert "model.streams" in {problem.path for problem in BACKEND.problems(design)}
