"""Kernels of PTX that are timed: products against NumPy and their roofline, camping, phases, and `ptx time`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dse.cli import main
from dse_ptx.checking.scripts import LANES, Script
from dse_ptx.convolutions import Convolution, time_convolution
from dse_ptx.kernels import kernel_text
from dse_ptx.phases import camping_factor, dram_shares, phases_of, table
from dse_ptx.products import TILINGS, Product, Tiling, kernels, time_product, trace_product
from dse_ptx.sms import sm_array
from dse_ptx.timing import time_launch
from dse_ptx.warp_trace import Unit

pytestmark = pytest.mark.more


@pytest.mark.parametrize("tiling", TILINGS, ids=lambda tiling: f"{tiling.rows}x{tiling.cols}")
@pytest.mark.parametrize(("across", "parts"), [("NN", 1), ("TN", 2), ("NT", 1)])
def test_products_are_those_of_numpy(tiling: Tiling, across: str, parts: int) -> None:
    product = Product(tiling.rows + 9, tiling.cols + 5, 43, across[0] == "T", across[1] == "T")
    m, n, k, rng = product.m, product.n, product.k, np.random.default_rng(1)
    a, b = rng.standard_normal((m, k), np.float32), rng.standard_normal((k, n), np.float32)
    device = kernels().device
    mark = len(device)
    operands = (a if product.transposed_a else a.T), (b if product.transposed_b else b.T)
    places = [device.allocate(np.ascontiguousarray(operand)) for operand in operands]
    c = device.allocate(4 * m * n)
    sizes = m, n, k, *product.strides, m, -(-k // (8 * parts)) * 8
    name = f"sgemm_{tiling.rows}x{tiling.cols}"
    kernels().launch(name, (2, 2, parts), (tiling.threads,), (*places, c, *sizes))
    assert np.allclose(device.read(c, np.float32, (n, m)).T, a @ b, atol=1e-4)
    device.release(mark)


@pytest.mark.parametrize("stride", [(2, 1), (2, 2)])  # planes of whole fours of pixels, and others
@pytest.mark.parametrize("tile", [(128, 256), (64, 128), (32, 128)])
def test_convolutions_are_those_of_numpy(stride: tuple[int, int], tile: tuple[int, int]) -> None:
    layer, rng = Convolution(2, 3, 9, 11, 40, (3, 2), (1, 1), stride), np.random.default_rng(2)
    x, w = rng.standard_normal((2, 3, 9, 11), np.float32), rng.standard_normal((40, 3, 3, 2), np.float32)
    padded, (high, wide) = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1))), layer.plane
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 2), (2, 3))[:, :, :: stride[0], :: stride[1]]
    device = kernels().device
    mark = len(device)
    places = [device.allocate(array) for array in (x, layer.table, w)]
    y = device.allocate(4 * 2 * 40 * high * wide)
    window = np.array([0] * 4 + [2, 3, 9, 11, high, wide, *stride, 1, 1], np.int32)
    window[:4] = np.array([place.address for place in places[:2]]).view(np.int32)
    grid = -(-40 // tile[0]), -(-2 * high * wide // 128)
    arguments = places[2], window, y, 40, 2 * high * wide, layer.k, 24
    kernels().launch(f"convolution_{tile[0]}x128", grid, (tile[1],), arguments)
    expected = np.einsum("nchwrs,kcrs->nkhw", windows, w)
    assert np.allclose(device.read(y, np.float32, expected.shape), expected, atol=1e-4)
    device.release(mark)


def test_blocks_of_a_product_are_its_grid_and_lie_where_they_would() -> None:
    product = Product(300, 200, 512)
    trace, grid = trace_product(product, TILINGS[2], 2)
    assert len(grid.places) == 5 * 4
    stores = trace.access[(trace.code.units[trace.pcs] == Unit.GLOBAL_STORE) & (trace.access >= 0)]
    assert np.unique(grid.shift[stores, 0]).tolist() == [64 * 4]  # the next rows of a column of C
    assert np.unique(grid.shift[stores, 1]).tolist() == [64 * 4 * 300]


@pytest.mark.parametrize("name", ["gtx_1080_ti", "p100"])
def test_products_and_convolutions_never_beat_the_roofline(name: str) -> None:
    gpu = sm_array(name)
    for product in (Product(256, 256, 512), Product(1024, 16, 1024, True)):
        done = time_product(product, gpu)
        assert done.flop / done.seconds < gpu.peak_flop_per_s
        moved = 4 * (product.m * product.k + product.k * product.n + product.m * product.n)
        assert moved / done.seconds < gpu.memory.gpu.dram.bytes_per_s
    layer = Convolution(4, 16, 14, 14, 32, (3, 3), (1, 1))
    seconds, _ = time_convolution(layer, gpu)
    assert 2 * layer.images * layer.filters * layer.k * 14 * 14 / seconds < gpu.peak_flop_per_s


def _loads(step: int, loads: int) -> list[Any]:
    """Loads whose warps lie so many bytes apart."""

    def place(turn: int) -> Any:
        return lambda block, warp: LANES * np.uint64(4) + np.uint64(step * ((block * 8 + warp) * loads + turn))

    return [("ld.global", Unit.GLOBAL_LOAD, (0,), (0,), place(turn), 4) for turn in range(loads)]


def test_a_hash_spreads_what_camps_on_a_channel() -> None:
    camped, spread = (
        time_launch(
            Script(_loads(11 * 256, 24)).trace(112, 8),
            sm_array("gtx_1080_ti", {"memory": {"mapping": {"channel_hash": name}}}),
        )
        for name in ("none", "xor")
    )
    assert camping_factor(camped) == pytest.approx(11, rel=0.01)  # all on one of eleven
    assert camping_factor(spread) < 2
    assert spread.cycles < 0.5 * camped.cycles


def test_phases_are_found_and_tables_add_up() -> None:
    fma = [("fma.rn.f32", Unit.FP32, (1 + n % 8,), (1 + n % 8, 0), None, 0) for n in range(1500)]
    done = time_launch(Script(_loads(128, 40) + fma).trace(112, 8), sm_array("gtx_1080_ti"))
    stretches = phases_of(done)
    assert len(stretches) >= 2
    assert stretches[0].dram > 10 * stretches[-1].dram
    assert stretches[0].cause in ("memory", "pipeline")
    rows = table(done)
    assert np.allclose(rows[[name for name in rows if str(name).startswith("slots")]].sum(axis=1), 1)
    assert dram_shares(done).max() <= 1
    assert rows[[name for name in rows if str(name).startswith("issued")]].to_numpy().sum() == done.instructions


def test_ptx_time_writes_numbers_figures_and_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ones = np.ones((64, 64), np.float32)
    np.savez(tmp_path / "in.npz", a=ones, b=ones, c=ones)
    (tmp_path / "sgemm.ptx").write_text(kernel_text("sgemm"))
    words = [
        f"file={tmp_path / 'sgemm.ptx'}", "kernel=sgemm_32x32", "grid=2,2", "block=64", f"data={tmp_path / 'in.npz'}",
        "arguments=a,b,c,64,64,64,1,64,64,1,64,64", f"out={tmp_path / 'out'}",
    ]  # fmt: skip
    assert main(["ptx", "time", *words, "system=v100"]) == 0
    assert "sgemm_32x32 on v100" in capsys.readouterr().out
    numbers = json.loads((tmp_path / "out" / "time.json").read_text("utf-8"))
    assert numbers["flop"] >= 2 * 64**3
    assert numbers["seconds"] > numbers["launch_s"] > 0
    assert any(fact[2] == "memory" for fact in numbers["facts"])
    events = json.loads((tmp_path / "out" / "figures" / "trace.json").read_text("utf-8"))["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X", "C"}
    assert (tmp_path / "out" / "figures" / "causes.png").stat().st_size > 1000
    assert main(["ptx", "time", *words, "system=gtx_9"]) == 2
