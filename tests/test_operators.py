"""Costs of single operators: what physics and arithmetic demand of them, whatever the constants."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulators.costs.algorithms import ALGORITHMS, Algorithm
from simulators.costs.chip import Chip, Cost
from simulators.costs.collective import Group, collective_cost
from simulators.costs.convolution import algorithms, convolution
from simulators.costs.gemm import GemmShape, gemm_cost
from simulators.costs.gemm.fitted import FittedGemms
from simulators.costs.recurrent import recurrent
from simulators.costs.streaming import streaming_cost
from simulators.hardware.shared import shared_constants
from tests.support import number

CHIP = FittedGemms(
    num_cus=56,
    cus=56,
    flop_per_s=10.6e12,
    hbm_bytes_per_s=720e9,
    element_bytes=4,
    launch_s=5e-6,
    compute=0.9,
    feed=1.5,
    transposed=0.1,
    narrow=2.0,
    latency_s=1e-7,
)
sizes = st.integers(1, 8192)


def gemm(gpu: FittedGemms, size: tuple[Any, Any, Any], *, transposed_a: bool = False, batch: int = 1) -> Cost:
    """Cost of GEMMs with their launch and the least traffic."""
    shape = GemmShape(*size, batch=batch, transposed_a=transposed_a)
    cost = gemm_cost(gpu, shape)
    return Cost.of(cost.flop, shape.least_bytes(gpu.element_bytes), cost.seconds + cost.launch_s)


def slow_gemm(chip: Chip, m: int, n: int, k: int, transposed: bool) -> float:
    """The equations of the module, one kernel after the other in plain Python."""
    c, p = number(chip.cus), number(chip.flop_per_s) / number(chip.num_cus)
    b, bandwidth = number(chip.element_bytes), float(chip.bandwidth)
    stride, doublings = int(b * k), 0
    while stride % 2048 == 0:
        stride, doublings = stride // 2, doublings + 1
    w = number(chip.transposed) * (0.3 + doublings) if transposed else 0.0
    least = np.inf
    for r in (128, 64, 32, 16):
        for s in (128, 64, 32, 16):
            if r * s < 1024 or (min(r, s) == 16) != (min(m, n) <= 16):
                continue
            for z in (1, 2, 4, 8):
                q, depth = -(-(-(-m // r) * -(-n // s) * z) // c), -(-k // z)
                flop = q * 2 * r * s * depth / (number(chip.compute) * p)
                feed = q * b * depth * (r * (1 + w) + s) / (number(chip.feed) * p / 16)
                a = m * k * max(1, n / 2 / min(n, s * c**0.5)) * (1 + w / 2)
                other = n * k * max(1, m / 2 / min(m, r * c**0.5))
                memory = b * (a + other + m * n * (2 * z + 1 if z > 1 else 1)) / bandwidth
                least = min(least, (flop**2 + feed**2 + memory**2) ** 0.5)
    return least * (number(chip.narrow) if min(m, n) <= 16 else 1.0) + number(chip.launch_s)


@given(sizes, sizes, sizes, st.booleans(), st.integers(1, 56))
def test_a_compiled_gemm_is_what_its_equations_say(m: int, n: int, k: int, transposed: bool, cus: int) -> None:
    chip = replace(CHIP, cus=cus)
    ours = float(gemm(chip, (m, n, k), transposed_a=transposed).seconds)
    assert ours == pytest.approx(slow_gemm(chip, m, n, k, transposed), rel=1e-12)


@given(sizes, sizes, sizes)
def test_no_gemm_beats_its_roofline(m: int, n: int, k: int) -> None:
    cost = gemm(CHIP, (m, n, k))
    assert float(cost.seconds) >= float(cost.flop) / (0.9 * 10.6e12)
    assert float(cost.seconds) >= float(cost.bytes) / float(CHIP.bandwidth)


@given(st.integers(1, 4096), st.integers(17, 4096), st.integers(1, 4096), st.sampled_from([1, 2, 7, 28, 55]))
def test_fewer_cus_never_make_a_gemm_faster_than_rounding_explains(m: int, n: int, k: int, cus: int) -> None:
    """Less reuse across a smaller wave is allowed to matter; more time is what is asked for."""
    full, part = gemm(CHIP, (m + 16, n, k)), gemm(replace(CHIP, cus=cus), (m + 16, n, k))
    assert float(part.seconds) >= float(full.seconds) * (1 - 1e-12)


@given(st.integers(1, 10**9), st.integers(1, 4), st.integers(1, 3))
def test_streams_take_the_time_of_their_bytes(elements: int, reads: int, writes: int) -> None:
    cost = streaming_cost(CHIP, 4 * elements * (reads + writes), flop=elements * reads)
    assert float(cost.bytes) == 4 * elements * (reads + writes)
    assert float(cost.seconds) == pytest.approx(float(cost.bytes) / (0.75 * 720e9) + 5e-6)


@given(h=st.integers(64, 4096), n=st.integers(1, 256), t=st.integers(1, 500), setup=st.floats(1e-5, 1e-2))
def test_fused_steps_are_set_up_once_a_pass_and_only_where_a_library_fuses_them(
    h: int, n: int, t: int, setup: float
) -> None:
    """t = a + b T, with a for each gate and the state; an LSTM launches its steps."""
    chip = replace(CHIP, fused_setup_s=setup)
    for gates in (1, 3):
        short, long = (recurrent(chip, gates, h, n, steps).seconds[:2] for steps in (t, 2 * t))
        assert 2 * short - long == pytest.approx((gates + 1) * setup, rel=1e-6)
    assert (recurrent(chip, 4, h, n, t).seconds == recurrent(CHIP, 4, h, n, t).seconds).all()


@given(st.sampled_from([1, 3, 4]), st.sampled_from([256, 1024, 2560]), st.integers(1, 256), st.integers(1, 512))
def test_recurrent_layers_take_their_steps_one_after_the_other(g: int, h: int, n: int, t: int) -> None:
    single, sequence = recurrent(CHIP, g, h, n, 1), recurrent(CHIP, g, h, n, t)
    assert sequence.seconds[:2] == pytest.approx(t * single.seconds[:2], rel=1e-9)
    assert sequence.flop == pytest.approx(2.0 * g * h * h * n * t)
    assert (sequence.seconds >= sequence.flop / (0.9 * 10.6e12)).all()


layers = st.fixed_dictionaries(
    {
        **{name: st.integers(1, 512) for name in ("c", "k")},
        **{name: st.integers(7, 112) for name in ("h", "w")},
        **{name: st.sampled_from([1, 3, 5, 7]) for name in ("r", "s")},
        **{name: st.integers(0, 3) for name in ("pad_h", "pad_w")},
        **{name: st.integers(1, 2) for name in ("stride_v", "stride_h")},
        "n": st.integers(1, 32),
    }
)


@pytest.mark.slow
@given(layers)
def test_a_convolution_takes_its_fastest_algorithm_and_its_work_is_exact(layer: dict[str, int]) -> None:
    fastest, costs = convolution(CHIP, layer), algorithms(CHIP, layer)
    rows = (layer["h"] + 2 * layer["pad_h"] - layer["r"]) // layer["stride_v"] + 1
    cols = (layer["w"] + 2 * layer["pad_w"] - layer["s"]) // layer["stride_h"] + 1
    work = 2.0 * layer["n"] * rows * cols * layer["k"] * layer["c"] * layer["r"] * layer["s"]
    assert fastest.flop == pytest.approx([work] * 3)
    assert set(costs) == {"implicit_gemm", "winograd_2x2", "winograd_4x4", "fft"}
    assert fastest.seconds == pytest.approx(np.min([cost.seconds for cost in costs.values()], axis=0))
    for name, cost in costs.items():
        assert (cost.bytes >= fastest.bytes * (1 - 1e-12)).all() or layer["stride_v"] > layer["r"], name
        assert (cost.seconds >= cost.bytes / 720e9).all(), name
        assert (cost.seconds >= cost.flop / (0.9 * 10.6e12)).all(), name
    dense = layer["stride_v"] * layer["stride_h"] == 1
    assert np.isfinite(costs["winograd_2x2"].seconds).all() == (dense and layer["r"] == layer["s"] == 3)
    assert np.isfinite(costs["fft"].seconds).all() == (dense and max(layer["r"], layer["s"]) >= 3)


groups = st.builds(
    Group,
    num_gpus=st.integers(2, 64),
    bytes_per_s=st.floats(1e9, 1e12),
    latency_s=st.floats(1e-7, 1e-4),
)


@given(groups, st.floats(1.0, 1e10))
def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather(group: Group, payload: float) -> None:
    group = replace(group, short_messages=False)
    combined = collective_cost("all_reduce", "ring", payload, group)
    halves = [collective_cost(name, "ring", payload, group) for name in ("reduce_scatter", "all_gather")]
    both = halves[0].then(halves[1])
    for name in ("steps", "wire_bytes", "flop", "seconds"):
        assert getattr(combined, name) == pytest.approx(getattr(both, name))


@given(groups, st.floats(1.0, 1e10), st.sampled_from(["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]))
def test_no_collective_beats_its_bytes(group: Group, payload: float, pattern: str) -> None:
    n = int(number(group.num_gpus))
    least = (2 if pattern == "all_reduce" else 1) * (n - 1) / n * payload
    for algorithm in ALGORITHMS:
        cost = collective_cost(pattern, algorithm, payload, group)  # type: ignore[arg-type]
        assert float(cost.wire_bytes) >= least * (1 - 1e-12)
        assert float(cost.seconds) >= least / number(group.bytes_per_s) * (1 - 1e-12)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("pattern", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"])
def test_a_gpu_alone_has_nobody_to_talk_to(pattern: str, algorithm: str) -> None:
    cost = collective_cost(pattern, algorithm, 1e9, Group(1, 50e9, 5e-6))  # type: ignore[arg-type]
    assert (float(cost.seconds), float(cost.wire_bytes), float(cost.steps)) == (0.0, 0.0, 0.0)


def test_a_new_algorithm_is_one_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recursive halving and doubling: as many rounds as a tree, and the bytes of a ring."""
    doubling = Algorithm(lambda pattern, n: (2 * np.log2(n), 2 * (n - 1) / n))
    monkeypatch.setitem(ALGORITHMS, "doubling", doubling)
    group = Group(64, 50e9, 5e-6)
    cost, ring = (collective_cost("all_reduce", name, 1e3, group) for name in ("doubling", "ring"))
    assert float(cost.steps) == 12 and float(cost.wire_bytes) == pytest.approx(float(ring.wire_bytes))
    assert float(cost.seconds) < float(ring.seconds)
    with pytest.raises(ValueError, match="is no algorithm of collectives"):
        collective_cost("all_reduce", "halving", 1e3, group)


def test_trees_win_where_latency_decides_and_lose_nothing_where_bandwidth_does() -> None:
    group = Group(64, 50e9, 5e-6)
    small = [float(collective_cost("all_reduce", name, 1e3, group).seconds) for name in ("ring", "tree")]
    large = [float(collective_cost("all_reduce", name, 1e10, group).seconds) for name in ("ring", "tree")]
    assert small[1] < 0.2 * small[0]
    assert large[1] == pytest.approx(large[0], rel=0.01)


def test_shared_numbers_have_sources_and_change_with_the_versions_of_backends() -> None:
    """A result's key holds its backend's version and none of these numbers: raise the versions, then the digest."""
    shared = shared_constants()
    facts = {path: value for path, value, _, _ in shared.facts_below("operators")}
    assert all(isinstance(value, float | int) and value > 0 for value in facts.values())
    assert hashlib.sha256(repr(sorted(facts.items())).encode()).hexdigest()[:8] == "94bc38c9"
