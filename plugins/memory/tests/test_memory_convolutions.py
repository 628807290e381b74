"""Convolutions as kernels of the memory backend: their FLOP, what they touch, what is refused, and camping."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter

from dse.values.units import Seconds
from dse_memory import engine
from dse_memory.convolutions import ALGORITHMS, DIRECTIONS, ConvolutionPass, kernels, unsupported_reason
from dse_memory.design import MemoryDesign
from dse_memory.kernels import Application
from dse_memory.measures import programs
from dse_memory.program import Program
from tests.applications import BACKEND, metrics
from tests.support import shipped

CUS = 64
SMALL: Mapping[str, Any] = {"n": 2, "c": 8, "h": 14, "w": 14, "k": 16, "r": 3, "s": 3, "pad_h": 1, "pad_w": 1}
RUN = {"run.requests": 300_000, "run.most": 4_000_000}
DEVICES = tuple(name for name, tree in shipped("system").items() if "dram" in tree["gpu"])


def layer(**fields: Any) -> ConvolutionPass:
    """A small layer, with fields changed."""
    return ConvolutionPass(**{"name": "layer", **SMALL, **fields})


def design_of(conv: ConvolutionPass, system: str = "gem5_gcn3") -> MemoryDesign:
    """The design that runs a layer alone."""
    tree = {"application": kernels(conv, CUS).model_dump(), "policy": shipped("policy")["cache_rw"]}
    return BACKEND.design({**tree, "system": shipped("system")[system], "run": {"requests": 300_000, "repeats": 1}})


def found(
    conv: ConvolutionPass, overrides: Mapping[str, Any] | None = None, *, system: str = "gem5_gcn3"
) -> dict[str, float]:
    """Metrics of a layer under cache_rw."""
    return metrics(kernels(conv, CUS).model_dump(), "cache_rw", {**RUN, **(overrides or {})}, system=system)


def turns(program: Program, place: int) -> int:
    """How often a workgroup comes by an operation."""
    loops = [row for row in program.code[place:] if row[engine.OP] == engine.LOOP and row[engine.TARGET] <= place]
    return int(np.prod([row[engine.TIMES] for row in loops], dtype=np.int64))


def flop(program: Program) -> float:
    """FLOP of all workgroups, with what the arithmetic's time is over that of its FLOP."""
    computes = [place for place, row in enumerate(program.code) if row[engine.OP] == engine.COMPUTE]
    return program.workgroups * sum(float(program.flop[place]) * turns(program, place) for place in computes)


def work(kernel: object) -> float:
    """The time of a kernel's arithmetic over that of its FLOP; 0 of what multiplies nothing."""
    return float(getattr(kernel, "work", 0.0))


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(("k", "side"), [(128, 16), (64, 14), (48, 27), (16, 7)])
def test_implicit_gemm_computes_what_a_convolution_is_up_to_its_tiles(direction: str, k: int, side: int) -> None:
    conv = layer(k=k, c=32, n=8, h=side, w=side, direction=direction)
    design = design_of(conv)
    assert isinstance(design.application, Application)
    (kernel, *_), (program, *_) = design.application.groups[0].kernels, programs(design)[0]
    computed = flop(program) / work(kernel)
    assert 0.999 * conv.flop <= computed <= 2.6 * conv.flop
    if k == 128 and direction == "forward":
        assert computed == pytest.approx(conv.flop)


@pytest.mark.parametrize(
    ("algorithm", "direction"),
    [
        (algorithm, direction)
        for algorithm in ALGORITHMS
        for direction in DIRECTIONS
        if not unsupported_reason(layer(algorithm=algorithm, direction=direction))
    ],
)
def test_tensors_are_touched_wholly(algorithm: str, direction: str) -> None:
    """What no one has read before is read from DRAM, and the result is written: each tensor once at least."""
    conv = layer(algorithm=algorithm, direction=direction)
    tensors = {"x": 2 * 8 * 14 * 14, "w": 16 * 8 * 9, "y": 2 * 16 * 14 * 14}
    result = {"forward": "y", "backward_data": "x", "backward_filter": "w"}[direction]
    got = found(conv)
    assert got["simulated"] == pytest.approx(1)
    assert got["dram_write_bytes"] >= 4 * tensors[result]
    assert got["dram_read_bytes"] >= 0.97 * 4 * sum(size for name, size in tensors.items() if name != result)


def test_winograd_is_for_three_by_three_without_stride() -> None:
    for name in ("winograd", "winograd_nonfused"):
        assert unsupported_reason(layer(algorithm=name)) == ""
        assert "3 x 3" in unsupported_reason(layer(algorithm=name, r=5, s=5, pad_h=2, pad_w=2))
        assert "stride" in unsupported_reason(layer(algorithm=name, stride_v=2, stride_h=2))
    assert "filter pass" in unsupported_reason(layer(algorithm="winograd", direction="backward_filter"))
    with pytest.raises(ValueError, match="3 x 3"):
        kernels(layer(algorithm="winograd", r=5, s=5, pad_h=2, pad_w=2), CUS)


def test_a_filter_larger_than_the_image_and_sizes_of_nothing_are_refused() -> None:
    assert "larger than the padded image" in unsupported_reason(layer(h=1, w=1, pad_h=0, pad_w=0))
    with pytest.raises(ValueError, match="n"):
        layer(n=0)


@pytest.mark.parametrize("system", DEVICES)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_every_algorithm_of_a_small_layer_runs_on_every_device(direction: str, system: str) -> None:
    ran, launch_s = [], TypeAdapter(Seconds).validate_python(shipped("system")[system]["gpu"]["launch_s"])
    for name in ALGORITHMS:
        conv = layer(algorithm=name, direction=direction)
        if not unsupported_reason(conv):
            got = found(conv, system=system)
            assert 0 < got["time_s"] < 1e-2
            assert got["time_s"] >= got["kernels"] * launch_s
            ran.append(name)
    assert len(ran) == (5 if direction == "backward_filter" else 6)


@pytest.mark.slow
@pytest.mark.one_in(2)
@pytest.mark.parametrize(("algorithm", "direction"), [("winograd_nonfused", "backward_filter"), ("fft", "forward")])
def test_planes_of_a_power_of_two_camp_on_few_channels_unless_addresses_are_hashed(
    algorithm: str, direction: str
) -> None:
    """Planes of 1024 tiles (Winograd), or of 16 x 64 images (FFT), are whole multiples of 32 channels x 256 bytes."""
    conv = layer(n=16, c=64, k=64, h=32, w=32, algorithm=algorithm, direction=direction)
    got = {
        name: found(conv, {"system.gpu.mapping.channel_hash": name}, system="p100")
        for name in ("none", "xor", "polynomial")
    }
    assert got["none"]["camping"] > 2
    for name in ("xor", "polynomial"):
        assert got[name]["camping"] < 1.2
        assert got[name]["time_s"] < 0.7 * got["none"]["time_s"]


def test_a_loop_that_is_cut_short_tells_of_the_rest() -> None:
    """Twice the share of a long product's steps makes the same time of it."""
    conv = layer(n=8, c=512, k=128, h=28, w=28)
    full = found(conv)
    cut = found(conv, {"run.requests": 1000, "run.most": 1000}, system="gem5_gcn3")
    assert cut["simulated"] < full["simulated"] <= 1
    assert cut["time_s"] == pytest.approx(full["time_s"], rel=0.15)
    assert cut["requests"] == pytest.approx(full["requests"], rel=0.15)
