"""A GEMM and its all-reduce in one kernel, summed by the switch."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dse.backend import Batch
from simulators.hardware.machine import tree_of
from simulators.overlap.backend import OverlapBackend
from simulators.steps.overlap.implementations import implementation
from simulators.workloads.model_zoo import option_tree


def _results(system: str, size: tuple[int, int, int], schedule: dict[str, Any], pattern: str = "all_reduce") -> Any:
    m, n, k = size
    gemm = {"kind": "gemm", "m": m, "n": n, "k": k, "split": "k", "precision": "bf16"}
    gather = {"kind": "collective", "pattern": pattern, "rows": m, "cols": n, "precision": "bf16", "after": ["gemm"]}
    workload = {"name": "sum", "operators": {"gemm": gemm, "gather": gather}}
    backend = OverlapBackend("fluid")
    design = backend.design({"system": tree_of(system), "workload": workload, "schedule": schedule})
    return backend.evaluate([Batch(design)])[0]


@settings(max_examples=15)
@given(
    st.tuples(st.integers(8, 16384), st.integers(256, 16384), st.integers(1024, 65536)),
    st.sampled_from([None, 1e11]),
    st.sampled_from([0.0, 5e-5]),
)
def test_it_takes_the_waves_and_the_switch_in_turn(
    size: tuple[int, int, int], rate: float | None, overhead_s: float
) -> None:
    knobs = {"switch_bytes_per_s": rate, "overhead_s": overhead_s}
    result = _results("h100_8", size, {**option_tree("schedule", "in_switch"), **knobs})
    switch = tree_of("h100_8")["node"]["in_switch"]["collectives"]["all_reduce"]
    wire_s = 2 * size[0] * size[1] * (1 + 1 / 8) / (rate or switch["bytes_per_s"])
    gemm_s, makespan_s = float(result.metrics["gemm_s"][0]), float(result.metrics["makespan_s"][0])
    fixed_s = switch["latency_s"] + overhead_s
    assert max(gemm_s, wire_s) + fixed_s < makespan_s < gemm_s + wire_s + fixed_s + 1e-5  # and a launch


def test_only_the_last_wave_is_reduced_after_a_long_gemm() -> None:
    result = _results("h100_8", (16384, 8192, 65536), option_tree("schedule", "in_switch"))
    switch = tree_of("h100_8")["node"]["in_switch"]["collectives"]["all_reduce"]
    waves = 16384 * 8192 / (256 * 128) / 132  # of its largest tiles
    wire_s = 2 * 16384 * 8192 * (1 + 1 / 8) / switch["bytes_per_s"]
    exposed_s = float(result.metrics["makespan_s"][0] - result.metrics["gemm_s"][0]) - switch["latency_s"]
    assert 0 < exposed_s < 1.1 * wire_s / waves


@pytest.mark.parametrize(
    "system, pattern, text",
    [
        ("a100_8", "all_reduce", "is no switch that computes an all-reduce"),
        ("a100_8", "reduce_scatter", "is no switch that computes a reduce-scatter"),
        ("h100_8", "all_gather", "cannot come after the GEMM"),
    ],
)
def test_what_no_switch_sums_is_refused(system: str, pattern: str, text: str) -> None:
    result = _results(system, (4096, 8192, 8192), option_tree("schedule", "in_switch"), pattern)
    assert not result.ok.any() and text in " ".join(result.texts)


def test_kernels_that_exist_lose_with_few_tokens_and_gain_with_many() -> None:
    for software, system, baseline in (("vllm", "b300_8", "nccl_graphs"), ("flagtree", "h800_8", "nccl_graphs")):
        fused, serial = (implementation(name) for name in (f"{software}_gemm_allreduce", baseline))
        assert fused is not None and serial is not None
        gains = [
            _results(system, (tokens, 8192, 12288), serial.tree("after")).metrics["makespan_s"][0]
            / _results(system, (tokens, 8192, 12288), fused.tree("after")).metrics["makespan_s"][0]
            for tokens in (64, 8192)
        ]
        assert gains[0] < 1 < gains[1]


@settings(max_examples=10)
@given(st.tuples(st.integers(128, 16384), st.integers(256, 16384), st.integers(1024, 65536)))
def test_a_reduce_scatter_in_the_switch_moves_the_tensor_once_and_ends_before_an_all_reduce(
    size: tuple[int, int, int],
) -> None:
    scattered, summed = (
        float(_results("b300_8", size, option_tree("schedule", "in_switch"), pattern).metrics["makespan_s"][0])
        for pattern in ("reduce_scatter", "all_reduce")
    )
    switch = tree_of("b300_8")["node"]["in_switch"]["collectives"]
    wire_s = 2 * size[0] * size[1] / switch["reduce_scatter"]["bytes_per_s"]
    fixed_s = switch["reduce_scatter"]["latency_s"] - switch["all_reduce"]["latency_s"]
    assert wire_s + switch["reduce_scatter"]["latency_s"] < scattered
    assert scattered - fixed_s < summed * (1 + 1e-9)


def test_reduce_scatter_of_a_kernel_that_exists_pays_with_many_rows_on_blackwell_alone() -> None:
    fused, serial = (implementation(name) for name in ("cutlass_gemm_scatter", "nccl_graphs"))
    assert fused is not None and serial is not None
    times = {
        (software.name, rows): _results("b300_8", (rows, 8192, 28672), software.tree("after"), "reduce_scatter")
        for software in (fused, serial)
        for rows in (128, 16384)
    }
    seconds = {name: float(result.metrics["makespan_s"][0]) for name, result in times.items()}
    assert seconds[serial.name, 16384] > seconds[fused.name, 16384]
    assert seconds[serial.name, 128] < seconds[fused.name, 128]
    assert fused.refusal("h100", "bf16", "prefill") is not None
    bound = float(times[fused.name, 16384].metrics["gemm_s"][0])
    assert seconds[fused.name, 16384] > bound


def test_an_all_gather_through_the_switch_ends_before_any_tile_begins() -> None:
    gemm = {"kind": "gemm", "m": 2048, "n": 28672, "k": 8192, "shards": 8, "precision": "bf16", "after": ["gather"]}
    gather = {"kind": "collective", "pattern": "all_gather", "rows": 2048, "cols": 8192, "precision": "bf16"}
    workload = {"name": "gathered", "operators": {"gemm": gemm, "gather": gather}}
    backend = OverlapBackend("fluid")
    schedule = option_tree("schedule", "gathered_in_switch")
    design = backend.design({"system": tree_of("h100_8"), "workload": workload, "schedule": schedule})
    (result,) = backend.evaluate([Batch(design)])
    switch = tree_of("h100_8")["node"]["in_switch"]["collectives"]["all_gather"]
    gathered_s = switch["latency_s"] + 2 * 2048 * 8192 / switch["bytes_per_s"]
    gemm_s, makespan_s = float(result.metrics["gemm_s"][0]), float(result.metrics["makespan_s"][0])
    assert gathered_s + gemm_s <= makespan_s < 1.02 * (gathered_s + gemm_s) + 1e-5
