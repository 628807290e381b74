"""Kernels of the cache studies' applications against NumPy and PyTorch, their lists, and `study=cache_policies_ptx`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from dse.cli import main
from dse_memory.engine import LISTED_COMPUTE, LISTED_LOAD, LISTED_STORE, LISTED_WAIT
from dse_ptx.applications import APPLICATIONS
from dse_ptx.checking.scripts import LANES, Script
from dse_ptx.execution import Module, PtxDevice
from dse_ptx.kernels import kernel_text
from dse_ptx.lists import block_lists
from dse_ptx.warp_trace import Unit
from tests.support import shipped

pytestmark = pytest.mark.more
_RNG = np.random.default_rng(3)


def _draw(*shape: int) -> Any:
    return _RNG.standard_normal(shape, np.float32)


def _results(kernel: str, grid: tuple[int, ...], arguments: list[Any], wanted: dict[int, Any]) -> list[Any]:
    """Run a kernel on arrays and numbers; the arrays at the places that are wanted, by the shapes and types given."""
    device = PtxDevice()
    places = [device.allocate(value) if isinstance(value, np.ndarray) else value for value in arguments]
    Module(kernel_text("layers"), device).launch(kernel, grid, (256,), places)
    return [device.read(places[at], like.dtype, like.shape) for at, like in wanted.items()]


def _close(ours: Any, theirs: Any) -> None:
    assert np.allclose(ours, np.asarray(theirs), atol=2e-5, rtol=2e-5)


def test_activations_and_pools_are_those_of_pytorch(torch: Any) -> None:
    x, dy = _draw(4, 9, 20, 20), _draw(4, 9, 20, 20)
    fours = x.size // 4
    _close(_results("relu", (15,), [x, x * 0, fours], {1: x})[0], np.maximum(x, 0))
    _close(_results("relu_backward", (15,), [x, dy, x * 0, fours], {2: x})[0], dy * (x > 0))
    images, wide, out = 36, 21, 10
    x, dy = torch.tensor(_draw(images, 1, wide, wide)), _draw(images, 1, out, out)
    x.requires_grad_()
    y = torch.nn.functional.max_pool2d(x, 3, 2)
    y.backward(torch.tensor(dy))
    before, mask = x.detach().numpy(), np.zeros_like(dy, np.int32)
    ours, mask = _results("max_pool", (15,), [before, dy * 0, mask, images, wide, out], {1: dy, 2: mask})
    _close(ours, y.detach())
    _close(_results("max_pool_backward", (63,), [dy, mask, before * 0, images, wide, out], {2: before})[0], x.grad)


def test_normalisations_are_those_of_pytorch(torch: Any) -> None:
    functional = torch.nn.functional
    x = torch.tensor(_draw(7, 300), requires_grad=True)
    dy = _draw(7, 300)
    y = torch.softmax(x, 1)
    y.backward(torch.tensor(dy))
    rows = x.detach().numpy()
    _close(_results("softmax", (7,), [rows, dy * 0, 300], {1: dy})[0], y.detach())
    _close(_results("softmax_backward", (7,), [y.detach().numpy(), dy, dy * 0, 300], {2: dy})[0], x.grad)
    x, scale, shift = torch.tensor(rows, requires_grad=True), _draw(300), _draw(300)
    weight = torch.tensor(scale, requires_grad=True)
    y = functional.batch_norm(x, None, None, weight, torch.tensor(shift), True, eps=1e-5)
    y.backward(torch.tensor(dy))
    arguments = [rows, scale, shift, dy * 0, shift * 0, shift * 0, 7, 300, 1e-5]
    ours, means, inverses = _results("batch_norm", (2,), arguments, {3: dy, 4: shift, 5: shift})
    _close(ours, y.detach())
    arguments = [rows, dy, scale, means, inverses, dy * 0, shift * 0, shift * 0, 7, 300]
    ours, of_scale = _results("batch_norm_backward", (2,), arguments, {5: dy, 6: shift})
    _close(ours, x.grad)
    _close(of_scale, weight.grad)
    images = _draw(2, 11, 10, 10)
    ours = _results("lrn", (1, 2), [images, images * 0, images * 0, 11, 100, 1100, 1e-2, 0.75], {1: images})[0]
    _close(ours, functional.local_response_norm(torch.tensor(images), 5, 1e-2, 0.75, 1.0))


@pytest.mark.parametrize(("kind", "gates"), [("lstm", 4), ("gru", 3)])
def test_recurrent_cells_are_those_of_pytorch(kind: str, gates: int, torch: Any) -> None:
    """Forward, and the gradients of the product of the state by differences of PyTorch."""
    q, pre = (torch.tensor(_draw(5, gates * 64), requires_grad=True) for _ in range(2))
    before, dh, dc = _draw(5, 64), _draw(5, 64), _draw(5, 64)
    state = torch.tensor(before, requires_grad=True)
    parts, of_input = [part.clone() for part in q.chunk(gates, 1)], pre.chunk(gates, 1)
    arrays = [q.detach().numpy(), pre.detach().numpy()]
    if kind == "lstm":
        i, f, g, o = (left + right for left, right in zip(parts, of_input, strict=True))
        c = torch.sigmoid(f) * state + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        ours = _results("lstm", (2,), [*arrays, before.copy(), dh * 0, 5, 64], {3: dh, 2: dh})
        ((h * torch.tensor(dh)).sum() + (c * torch.tensor(dc)).sum()).backward()
        _close(ours[1], c.detach())
        arguments = [*arrays, before, dh, dc, arrays[0] * 0, 5, 64]
        dq, passed = _results("lstm_backward", (2,), arguments, {5: arrays[0], 4: dc})
    else:
        reset, keep = (torch.sigmoid(parts[at] + of_input[at]) for at in range(2))
        h = (1 - keep) * torch.tanh(of_input[2] + reset * parts[2]) + keep * state
        ours = _results("gru", (2,), [*arrays, before.copy(), 5, 64], {2: dh})
        h.backward(torch.tensor(dh))
        arguments = [*arrays, before, dh, arrays[0] * 0, 5, 64]
        dq, passed = _results("gru_backward", (2,), arguments, {4: arrays[0], 3: dh})
    _close(ours[0], h.detach())
    _close(dq, q.grad)
    _close(passed, state.grad)


def test_products_in_double_precision_are_those_of_numpy() -> None:
    a, b = _RNG.standard_normal((70, 19)), _RNG.standard_normal((19, 65))
    c = np.zeros((65, 70))
    for left, strides in ((a, (19, 1)), (np.ascontiguousarray(a.T), (1, 70))):
        arguments = [left, b, c, 70, 65, 19, *strides, 1, 65, 70]
        assert np.allclose(_results("dgemm", (2, 2), arguments, {2: c})[0].T, a @ b)


def test_a_list_holds_runs_of_lines_waits_and_work() -> None:
    place = lambda block, warp: LANES * np.uint64(8) + np.uint64(4096 * block + 256 * warp)  # noqa: E731
    steps = [
        ("ld.global", Unit.GLOBAL_LOAD, (1,), (0,), place, 4),
        ("fma.rn.f32", Unit.FP32, (2,), (0, 0), None, 0),
        ("add.f32", Unit.FP32, (2,), (1, 1), None, 0),
        ("st.global", Unit.GLOBAL_STORE, (), (2,), place, 4),
    ]
    lists = block_lists(Script(steps).trace(3, 2), 64, 10)
    assert np.diff(lists.begins).tolist() == [7, 7, 7]
    first, work = lists.rows[:7], [LISTED_COMPUTE, LISTED_WAIT, LISTED_COMPUTE]
    assert first[:, 3].tolist() == [LISTED_LOAD, LISTED_LOAD, *work, LISTED_STORE, LISTED_STORE]
    assert first[first[:, 3] == LISTED_COMPUTE, 0].tolist() == [128, 128]  # two operations of each lane of two warps
    assert first[first[:, 3] < LISTED_WAIT, 1].tolist() == [256] * 4  # 32 lanes, 8 bytes apart
    assert lists.stores == {10: False, 11: True}


def test_every_application_of_the_study_has_kernels() -> None:
    options = shipped("application")
    for name, make in APPLICATIONS.items():
        shapes = {tensor: tuple(sizes) for tensor, sizes in options[name]["tensors"].items()}
        launches = make(shapes, 1000)
        assert all(launches.whole[tensor] >= size or size < 1 << 25 for tensor, size in launches.sizes.items()), name


def test_policies_are_judged_by_kernels_and_by_patterns(tmp_path: Path) -> None:
    few = ["applications=[fw_soft,bw_bn]", "figures=none", f"output_dir={tmp_path}", "executor.jobs=1"]
    assert main(["study=cache_policies_ptx", *few]) == 0
    run = tmp_path / "cache_policies_ptx" / "latest"
    verdicts = {row["claim"]: row for row in json.loads((run / "verdicts.json").read_text("utf-8"))}
    assert (
        verdicts["cache_policies.app_count"]["ours_ptx"] == verdicts["cache_policies.app_count"]["ours_patterns"] == 2
    )
    both = pd.read_parquet(run / "sources.parquet").sort_values("policy.name")
    for source in ("ptx", "patterns"):
        speedups = both[f"speedup_{source}"].to_numpy(float)
        assert (speedups[both["policy.name"] == "uncached"] == 1).all()
        assert (speedups[both["policy.name"] == "cache_rw"] > 1).all()


def test_an_application_without_kernels_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["study=cache_policies_ptx", "applications=[lenet]", f"output_dir={tmp_path}"]) != 0
    assert "has no kernels in PTX" in capsys.readouterr().err
