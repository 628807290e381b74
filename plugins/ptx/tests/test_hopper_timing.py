"""Times of wgmma, bulk copies, mbarriers and clusters: bounds that none beats, what they depend on, measured rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dse.cli import main
from dse.errors import ConfigError
from dse_ptx.execution import LaunchOptions, Module, PtxDevice
from dse_ptx.sms import SmArray, sm_array
from dse_ptx.tiles.launches import ProductSize, expected, from_kind, grid_of, product_arguments, to_kind
from dse_ptx.tiles.products import NAME, product_text
from dse_ptx.tiles.shape import ProductKernel
from dse_ptx.tiles.text import Text
from dse_ptx.tiles.times import KERNELS, STEPS, time_tiles, trace_tiles
from dse_ptx.timing import LaunchTime, time_launch
from dse_ptx.warp_trace import WarpTrace

pytestmark = pytest.mark.more


def hopper(sms: int = 4, **times: int) -> SmArray:
    """H100 of few SMs, with other times of what goes on without warps."""
    return sm_array("h100", {"memory": {"num_cus": sms}, "sm": {"asynchronous": times} if times else {}})


def _trace(text: Text, block: int, *, grid: int = 1, sample: int = 0, arguments: Any = ()) -> WarpTrace:
    run = Module(text.render(), PtxDevice()).launch(
        text.name, (grid,), (block,), arguments, LaunchOptions(1 << 17, sample=tuple(range(sample or grid)))
    )
    assert run.trace is not None
    return run.trace


def _product(of: ProductKernel, m: int, n: int, k: int, *, blocks: int | None = None) -> WarpTrace:
    """Trace of a product of zeros."""
    device, size = PtxDevice(), ProductSize(m, n, k)
    a, b, c = (device.allocate(2 * count) for count in (m * k, n * k, m * n))
    grid = grid_of(of, size)
    options = LaunchOptions(of.shared_bytes, sample=tuple(range(blocks or int(np.prod(grid)))))
    run = Module(product_text(of), device).launch(
        NAME, grid, (of.threads,), product_arguments(of, size, (a, b, c)), options
    )
    assert run.trace is not None
    return run.trace


def _products(columns: int, count: int, groups: int = 1, in_registers: bool = False) -> LaunchTime:
    """Time of products one after another."""
    text = Text("k", {})
    sums, left = text.many("f32", columns // 2), text.many("b32", 4)
    descriptor, adds = text.get("b64", "mov.b64", 0), text.equals(0, 0)
    text.op("wgmma.fence.sync.aligned")
    a = f"{{{', '.join(left)}}}" if in_registers else descriptor
    for _ in range(count):
        opcode = f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.f16.f16"
        constants = (1, 1, 0) if in_registers else (1, 1, 0, 0)
        text.op(opcode, f"{{{', '.join(sums)}}}", a, descriptor, adds, *constants)
    text.op("wgmma.commit_group.sync.aligned")
    text.op("wgmma.wait_group.sync.aligned", 0)
    text.op("add.rn.f32", sums[0], sums[0], sums[1])
    return time_launch(_trace(text, 128 * groups), hopper(1))


@pytest.mark.parametrize(
    ("columns", "in_registers", "cycles"),
    [(256, False, 128), (128, False, 64), (64, False, 32), (32, False, 24), (32, True, 16), (8, False, 18)],
)
def test_products_take_the_time_of_tensor_cores_or_of_what_they_read(
    columns: int, in_registers: bool, cycles: int
) -> None:
    """128 bytes a cycle: A of 2,048 bytes, unless in registers, and B of 32 for each column."""
    short, long = (_products(columns, count, in_registers=in_registers).cycles for count in (100, 300))
    assert (long - short) / 200 == pytest.approx(cycles, rel=0.01)
    assert short >= 100 * cycles


def test_warpgroups_share_the_tensor_cores() -> None:
    alone, both = (_products(256, 100, groups) for groups in (1, 2))
    assert both.cycles == pytest.approx(2 * alone.cycles, rel=0.03)
    peak = 2 * 512 * 4  # operations of an SM in a cycle
    assert 0.9 * peak < both.flop / both.cycles <= peak


def _stream(pieces: int, size: int) -> Text:
    text = Text("stream", {"source": "u64"})
    text.begin_barriers({1 << 16: 1})
    end = text.mark()
    text.op("bra", end, guard=text.equals(text.special("tid.x"), 0, "ne.u32"))
    barrier, source = text.get("b32", "mov.u32", 1 << 16), text.parameter("source")
    text.op("mbarrier.arrive.expect_tx.shared::cta.b64", "_", f"[{barrier}]", pieces * size)
    for piece in range(pieces):
        words = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
        text.op(words, "[smem]", f"[{source}+{piece * size}]", size, f"[{barrier}]")
    text.wait(f"[{barrier}]", 0)
    text.place(end)
    return text


def _streamed(pieces: int, size: int, gpu: SmArray) -> LaunchTime:
    text, device = _stream(pieces, size), PtxDevice()
    source = device.allocate(pieces * size)
    run = Module(text.render(), device).launch("stream", (1,), (32,), [source], LaunchOptions(1 << 17, sample=(0,)))
    assert run.trace is not None
    return time_launch(run.trace, gpu)


def test_bulk_copies_come_at_the_pace_of_the_port_after_their_latency() -> None:
    gpu = hopper(1)
    short, long = (_streamed(16, size, gpu) for size in (4096, 16384))
    assert (long.cycles - short.cycles) * gpu.sm.port_bytes_per_cycle == pytest.approx(16 * 12288, rel=0.1)
    assert _streamed(1, 16, gpu).cycles > gpu.sm.asynchronous.bulk  # type: ignore[union-attr]
    # each line of 64 bytes is one request
    assert long.slices[:, :, 0].sum() == 16 * 16384 / 64


def test_a_box_for_several_blocks_is_requested_once() -> None:
    requests = {}
    for cluster in ((1, 1), (2, 1), (2, 2)):
        done = time_launch(_product(ProductKernel(cluster=cluster), 256, 256, 512), hopper())
        requests[cluster] = int(done.slices[:, :, 0].sum())
    stored, loaded = 256 * 256 * 2 // 64, 8 * 4 * 2 * 128 * 64 * 2 // 64
    assert requests[1, 1] == stored + loaded
    assert requests[2, 1] == stored + loaded * 3 // 4  # B once for two blocks
    assert requests[2, 2] == stored + loaded // 2


def test_time_rises_with_each_latency_and_no_slot_is_lost() -> None:
    trace = _product(ProductKernel(cluster=(2, 1)), 256, 256, 512)
    base = time_launch(trace, hopper())
    for name in ("bulk", "wgmma", "hop", "wake"):
        slow = time_launch(trace, hopper(**{name: 2000}))
        assert slow.cycles > base.cycles + 1000, name
    alone = time_launch(_product(ProductKernel(), 256, 256, 512), hopper())
    assert alone.slots.sum() == alone.cycles * 4 * 4
    assert alone.issued.sum() == alone.instructions == alone.units.sum()


def test_more_stages_hide_more_latency() -> None:
    times = [
        time_launch(_product(ProductKernel(stages=stages), 256, 256, 2048), hopper()).cycles for stages in (2, 3, 6)
    ]
    assert times[0] > times[1] > times[2] > 32 * 512


def test_a_kernel_that_waits_for_its_data_takes_longer_than_its_parts() -> None:
    done = time_launch(_product(ProductKernel(columns=256), 256, 512, 4096), hopper())
    products = 64 * 128 * 256 * 64 / 2048
    assert products < done.cycles < 1.15 * products
    assert done.flop == 2 * 256 * 512 * 4096


def test_sms_without_what_hopper_has_and_traces_without_whole_clusters_are_refused() -> None:
    trace = _product(ProductKernel(), 256, 256, 256)
    with pytest.raises(ConfigError, match=r"sm\.asynchronous: is missing, and the kernel has wgmma"):
        time_launch(trace, sm_array("a100"))
    half = replace(_product(ProductKernel(cluster=(2, 1)), 256, 256, 256, blocks=3), num_blocks=3)
    with pytest.raises(ConfigError, match="1 blocks whose warps wait for ever"):
        time_launch(half, hopper())
    with pytest.raises(ConfigError, match="less than the 2 blocks of a cluster"):
        time_launch(half, hopper(1))


def test_sms_that_make_no_whole_cluster_stay_idle() -> None:
    trace = _product(ProductKernel(cluster=(2, 2)), 512, 256, 256)
    assert time_launch(trace, hopper(6)).cycles == time_launch(trace, hopper(4)).cycles
    assert time_launch(trace, hopper(8)).cycles < time_launch(trace, hopper(4)).cycles


def test_a_copy_that_several_lanes_ask_for_is_not_timed() -> None:
    text = Text("k", {})
    text.begin_barriers({0: 1})
    text.op("mbarrier.expect_tx.relaxed.cta.shared::cta.b64", "[smem]", 512, guard=text.elect())
    words = "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes"
    text.op(words, "[smem+64]", "[smem+128]", 16, "[smem]")
    with pytest.raises(ConfigError, match="a copy that several lanes of a warp ask for"):
        time_launch(_trace(text, 32), hopper())


@pytest.mark.parametrize("of", [KERNELS[0], ProductKernel("bf16", columns=128)], ids=["cluster", "block"])
def test_a_grid_that_repeats_a_cluster_is_the_trace_of_all_blocks(of: ProductKernel) -> None:
    size = ProductSize(4 * of.rows * of.cluster[0], 2 * of.columns * of.cluster[1], STEPS * 64, group=4)
    first, grid = trace_tiles(size, of, STEPS)
    every = _product(of, size.m, size.n, size.k)
    assert len(grid.places) == every.num_blocks
    repeated, traced = time_launch(first, hopper(8), grid=grid), time_launch(every, hopper(8))
    assert repeated.instructions == traced.instructions
    assert repeated.slices[:, :, 0].sum() == traced.slices[:, :, 0].sum()
    assert repeated.cycles == pytest.approx(traced.cycles, rel=0.05)


@pytest.mark.parametrize(("m", "n", "k", "measured"), [(4096, 3072, 2048, 70.8e-6), (4096, 4096, 16384, 603.8e-6)])
def test_products_are_within_a_quarter_of_measured_rows(m: int, n: int, k: int, measured: float) -> None:
    """Rows of aiconfigurator's table of H100 (gemm_perf, commit 095f58a51, Apache-2.0)."""
    done = time_tiles(ProductSize(m, n, k), sm_array("h100"))
    assert done.seconds == pytest.approx(measured, rel=0.25)
    assert done.flop / done.seconds < 990e12  # of the data sheet


def test_commands_take_maps_and_clusters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    of, rng = ProductKernel(cluster=(2, 1)), np.random.default_rng(3)
    left, right = rng.normal(size=(256, 256)), rng.normal(size=(256, 256))
    (tmp_path / "product.ptx").write_text(product_text(of), "utf-8")
    arrays = {"a": to_kind(left, "f16"), "b": to_kind(right.T, "f16"), "c": np.zeros((256, 256), np.float16)}
    np.savez(tmp_path / "data.npz", **arrays)  # type: ignore[arg-type]
    words = [
        f"file={tmp_path / 'product.ptx'}", "grid=2,2", f"block={of.threads}", f"data={tmp_path / 'data.npz'}",
        "arguments=a@128x64/128,b@64x64/128,c@64x64/128,c,0,256,4,2,2,8", f"shared={of.shared_bytes}",
    ]  # fmt: skip
    assert main(["ptx", "run", *words, f"out={tmp_path / 'after.npz'}"]) == 0
    with np.load(tmp_path / "after.npz") as after:
        assert np.allclose(from_kind(after["c"], "f16"), expected(of, left, right), atol=0.05)
    assert main(["ptx", "time", *words, "system=h100", f"out={tmp_path / 'time'}"]) == 0
    assert "product on h100" in capsys.readouterr().out
    assert main(["ptx", "time", *words, "system=a100"]) == 2
    assert "wgmma" in capsys.readouterr().err
    assert main(["ptx", "run", *words, "cluster=4"]) == 2
    assert "differs from the kernel's (.reqnctapercluster)" in capsys.readouterr().err
    assert main(["ptx", "run", *(word.replace("a@128x64", "a@257x64") for word in words)]) == 2
    assert "a box of 1 to 256 elements" in capsys.readouterr().err
