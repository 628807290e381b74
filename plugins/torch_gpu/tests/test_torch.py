"""Kernels that PyTorch runs, measured on the CPU in a GPU's place: the path is the same, the numbers are not.

Skipped where torch is not installed; what a GPU would say is played by stand-ins.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest

import dse
from dse.cli import main
from dse.config.options import load_yaml
from dse.errors import ConfigError
from dse_calibration.calibrate import read_table
from dse_torch import backend as torch_gpu
from dse_torch import kernels as torch_kernels
from dse_torch import study as measure_my_gpu
from dse_torch.backend import Kernel, TorchBackend, median_interval
from dse_torch.kernels import Absent, Copy, Gemm, Machine, OutOfMemory
from tests.support import results

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("torch")]

GEMM = {"operation": "gemm", "m": 64, "n": 48, "k": 32, "precision": "fp32"}
QUIET = {"device": "cpu", "samples": 6, "most_scatter": 1e6, "most_drift": 1e6}


def backend(**settings: Any) -> TorchBackend:
    """A backend on the CPU that puts up with a noisy machine."""
    return TorchBackend(**{**QUIET, **settings})


def measured(*kernels: dict[str, Any], **settings: Any) -> list[Any]:
    """Results of kernels, timed in turns."""
    simulator = backend(**settings)
    return results(simulator, [simulator.design({"kernel": kernel}) for kernel in kernels])


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """Times that samples take, in place of real ones."""
    times: list[float] = []
    monkeypatch.setattr(torch_kernels.Sampler, "warm_up", lambda self: None)
    monkeypatch.setattr(torch_kernels.Sampler, "sample", lambda self: (times.pop(0),))
    yield times


def test_a_gemm_and_a_copy_are_what_they_say(torch: Any) -> None:
    machine = Machine("cpu")
    product = Gemm(3, 2, 5, "fp32").prepare(machine)()
    assert isinstance(product, torch.Tensor)
    assert product.shape == (3, 2)
    copied = Copy(1024).prepare(machine)()
    assert isinstance(copied, torch.Tensor)
    assert (copied.numel(), int(copied.sum())) == (1024, 1024)
    assert Gemm(3, 2, 5, "bf16").prepare(machine)().dtype == torch.bfloat16  # type: ignore[attr-defined]


def test_every_kernel_has_metrics_to_believe() -> None:
    copy = {"operation": "copy", "num_bytes": "64 KiB"}
    gemm, copied, both = measured(GEMM, copy, {**GEMM, "operation": "overlap", "num_bytes": "64 KiB"})
    assert (gemm.status, copied.status, both.status) == ("ok", "ok", "ok")
    assert gemm.metrics["low_s"] <= gemm.metrics["seconds"] <= gemm.metrics["high_s"]
    assert gemm.metrics["flop_per_s"] == pytest.approx(2 * 64 * 48 * 32 / gemm.metrics["seconds"])
    assert copied.metrics["bytes_per_s"] == pytest.approx(65536 / copied.metrics["seconds"])
    assert both.metrics["seconds"] > 0
    assert both.metrics["gemm_s"] > 0
    assert both.metrics["copy_slowdown"] > 0
    assert "torch" in gemm.engine


def test_kernels_of_a_batch_are_timed_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[int] = []
    plain = torch_kernels.Sampler.sample

    def sample(self: torch_kernels.Sampler) -> tuple[float, ...]:
        order.append(id(self))
        return plain(self)

    monkeypatch.setattr(torch_kernels.Sampler, "sample", sample)
    simulator = backend()
    designs = [simulator.design({"kernel": {**GEMM, "m": m}}) for m in (8, 16)]
    simulator._measure(designs)
    assert len(order) == 12
    assert order == order[:2] * 6
    assert order[0] != order[1]


def test_times_that_scatter_or_drift_are_failures_that_say_why(clock: list[float]) -> None:
    clock.extend([1e-3] * 6)
    (steady,) = measured(GEMM, most_scatter=0.2, most_drift=0.1)
    assert steady.status == "ok"
    clock.extend([1e-3, 2e-3, 1e-3, 2e-3, 1e-3, 2e-3])
    (shared,) = measured(GEMM, most_scatter=0.2, most_drift=10)
    assert (shared.status, "is the device shared?" in shared.reason) == ("failed", True)
    clock.extend([1e-3, 1e-3, 1.1e-3, 1.1e-3, 1.3e-3, 1.3e-3])
    (hot,) = measured(GEMM, most_scatter=10, most_drift=0.1)
    assert (hot.status, "drift by +30 %" in hot.reason) == ("failed", True)


def test_out_of_memory_is_a_failure_of_its_point_alone(torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Gemm.prepare

    def prepare(self: Gemm, machine: Machine) -> Any:
        if self.m == 7:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 80 GiB")
        return plain(self, machine)

    monkeypatch.setattr(Gemm, "prepare", prepare)
    starved, other = measured({**GEMM, "m": 7}, GEMM)
    assert (starved.status, other.status) == ("failed", "ok")
    assert starved.reason == "out of memory on the device: CUDA out of memory. Tried to allocate 80 GiB"
    with pytest.raises(OutOfMemory), torch_kernels._memory_errors():
        raise MemoryError
    with pytest.raises(RuntimeError, match="illegal"), torch_kernels._memory_errors():
        raise RuntimeError("an illegal access")


def test_what_a_device_cannot_do_is_unsupported() -> None:
    (result,) = measured({**GEMM, "operation": "overlap", "num_bytes": 1024, "free_sms": 8})
    assert result.status == "unsupported"
    assert "cannot leave SMs free: set kernel.free_sms=0" in result.reason
    simulator = backend()
    design = simulator.design(
        {"kernel": {"operation": "collective", "collective": "all_reduce", "num_bytes": 8, "gpus": 64}}
    )
    (problem,) = simulator.problems(design)
    assert problem.path == "kernel.gpus"
    assert results(simulator, [design])[0].status == "infeasible"


@pytest.mark.more
def test_collectives_run_in_a_process_for_each_gpu() -> None:
    kernel = {"operation": "collective", "collective": "all_gather", "num_bytes": 4096, "gpus": 2}
    if Machine("cpu").count < 2:
        pytest.skip("this machine has one core")
    (result,) = measured(kernel)
    assert result.status == "ok", result.reason
    assert result.metrics["bytes_per_s"] == pytest.approx(4096 / result.metrics["seconds"])


def test_a_process_of_a_collective_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def spawn(*_: Any, **__: Any) -> Any:
        def join(timeout: float) -> bool:
            raise RuntimeError("-- Process 1 terminated --\n\nNCCL error: unhandled system error")

        return SimpleNamespace(join=join, processes=[])

    import torch.multiprocessing as processes

    monkeypatch.setattr(processes, "spawn", spawn)
    (result,) = measured({"operation": "collective", "collective": "all_reduce", "num_bytes": 8, "gpus": 2})
    assert result.status == "failed"
    assert result.reason == "a process of the collective failed: NCCL error: unhandled system error"


def test_without_a_gpu_or_torch_the_way_out_is_told(torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "sees no GPU: measure on a machine with one, or simulator.device=cpu" in TorchBackend().absence()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert "sees 1 GPUs" in TorchBackend(index=3).absence()
    assert Machine.find("gpu", 0).device == "cuda:0"
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(Absent, match=r"install overlap-dse-torch\[torch\]"):
        torch_kernels.torch_module()
    assert "torch cannot be imported" in TorchBackend().absence()
    assert TorchBackend().version == torch_gpu._VERSION


def test_results_of_one_device_are_not_taken_for_those_of_another(torch: Any) -> None:
    assert torch.__version__ in backend().version
    assert backend().version != backend(samples=7).version
    fact = backend().facts(backend().design({"kernel": GEMM}))
    assert [(path, provenance) for path, _, provenance, _ in fact] == [("device", "measured")]


@pytest.mark.parametrize(
    ("kernel", "part"),
    [
        ({"operation": "gemm", "m": 8}, "gemm needs n, k, precision"),
        ({"operation": "copy"}, "copy needs num_bytes"),
        ({"operation": "collective", "num_bytes": 8}, "collective needs collective, gpus"),
        ({**GEMM, "mover": "pigeon"}, "mover"),
        ({**GEMM, "m": 0}, "m"),
    ],
)
def test_a_kernel_that_lacks_something_is_refused(kernel: dict[str, Any], part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        backend().design({"kernel": kernel})


def test_lists_of_kernels_become_scenarios_over_what_all_have() -> None:
    kernels = {"gemms": [[8, 16, 32]], "copies": ["1 KiB"], "overlaps": [[8, 16, 32]], "beside": ["2 KiB"]}
    kernels |= {"collectives": ["all_reduce"], "sizes": ["1 KiB"], "gpus": [2], "precisions": ["fp16"]}
    tree = {"kernel": {"mover": "engine"}, "kernels": kernels, "machine": None}
    backend().sections(tree)
    scenarios = backend().scenarios(tree)
    assert list(scenarios) == [
        "gemm 8x16x32 fp16",
        "copy 1024 B",
        "overlap 8x16x32 fp16, 2048 B",
        "all_reduce 1024 B x 2",
    ]
    assert all(Kernel.model_validate(scenario["kernel"]).mover == "engine" for scenario in scenarios.values())
    gemm, copy, both, _ = scenarios.values()
    needs = {"kernel.operation": "overlap"}
    assert [backend().condition("kernel.mover", combination) for combination in (gemm, copy, both)] == [needs, {}, {}]
    assert [backend().condition("kernel.free_sms", combination) for combination in (gemm, copy, both)] == [
        {},
        needs,
        {},
    ]
    with pytest.raises(ConfigError, match="names no kernel"):
        backend().scenarios({"kernel": {}, "kernels": {}})
    with pytest.raises(ConfigError, match="speed: is not a known section"):
        backend().sections({"kernel": {}, "speed": 1})


def test_the_interval_of_a_median_holds_it_as_often_as_it_says() -> None:
    random = np.random.default_rng(0)
    draws = [median_interval(random.lognormal(0.0, 0.5, 30)) for _ in range(2000)]
    inside = np.mean([low <= 1.0 <= high for _, low, high in draws])
    assert 0.93 < inside < 0.99


def test_a_gemm_and_a_copy_share_memory_in_the_prediction() -> None:
    row = {"kernel.m": 1000, "kernel.n": 1000, "kernel.k": 1000, "kernel.precision": "bf16", "kernel.mover": "kernel"}
    row |= {"kernel.num_bytes": 3e6, "gemm_s": 1e-3, "copy_s": 1e-3}  # both move 6 MB
    assert measure_my_gpu._both_s(row, 12e9) == pytest.approx(1e-3)
    assert measure_my_gpu._both_s(row, 6e9) == pytest.approx(2e-3)
    assert measure_my_gpu._both_s({**row, "kernel.mover": "engine"}, 6e9) == pytest.approx(1.5e-3)


def sample_of(sampler: torch_kernels.Sampler) -> tuple[float, ...]:
    """Times of a kernel on a device of 100 GFLOP/s that copies 10 GB/s: a noisy machine's would not be judged."""
    gemm, alone = sampler._gemm, [5e-6] * len(sampler._calls)
    if gemm is not None:
        alone[0] += 2e-11 * gemm.m * gemm.n * gemm.k * (1 + 0.1 * (gemm.k == 640))
    return (alone[0],) if len(alone) == 1 else (*alone, *alone, max(alone))


@pytest.mark.more
def test_the_study_writes_tables_that_calibrate_reads_and_judges_a_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch_kernels.Sampler, "sample", sample_of)
    shapes = [[m, n, k] for m in (128, 256) for n in (64, 256, 512) for k in (64, 256, 512, 640, 768)]
    (tmp_path / "cpu.yaml").write_text(
        "name: my_cpu\n"
        f"gpu:\n  measured_as: {Machine('cpu').name}\n  num_cus: 2\n  peak_hbm_bytes_per_s: 100 GB/s\n"
        "  peak_flop_per_s: {fp32: 1 TFLOP/s}\nsources:\n  gpu: {provenance: assumed, source: a guess}\n"
    )
    words = ["study=measure_my_gpu", *(f"simulator.{name}={value}" for name, value in QUIET.items()), "tracking=none"]
    lists = {"kernels.precisions": ["fp32"], "kernels.gemms": shapes, "kernels.copies": ["64 KiB"], "kernels.gpus": []}
    lists |= {"kernels.overlaps": [[64, 64, 64]], "kernels.beside": ["16 KiB"]}
    words += [f"{path}={json.dumps(value)}" for path, value in lists.items()]
    assert main([*words, "machine=cpu.yaml", "space.kernel.free_sms=choice(0)"]) == 0
    run = next((tmp_path / "outputs" / "measure_my_gpu").glob("2*"))
    (rows,) = read_table(run / "gemms.csv")
    assert (rows.size, rows.device, rows.precision) == (len(shapes), Machine("cpu").name, "fp32")
    judged = json.loads((run / "calibration.json").read_text())["errors"]["fp32 gemm"]
    assert 0 < judged["rows_fitted"] <= 24
    assert judged["fitted"]["count"] == len(shapes) - judged["rows_fitted"]
    assert math.isfinite(judged["fitted"]["median"])
    assert "provenance: calibrated" in (run / "my_cpu.yaml").read_text()
    overlaps = pd.read_parquet(run / "overlaps.parquet")
    assert set(overlaps["mover"]) == {"kernel", "engine"}
    assert (overlaps["predicted_s"] >= overlaps[["gemm_s", "copy_s"]].max(axis=1) * (1 - 1e-9)).all()
    assert {path.stem for path in (run / "figures").glob("*.png")} >= {"gemms_predicted", "overlaps_predicted"}
    assert set(dse.load("measure_my_gpu")["status"]) == {"ok"}


def test_the_recorded_and_shown_paths_of_the_study_are_paths_of_its_designs() -> None:
    study = load_yaml(Path(measure_my_gpu.__file__).with_name("conf") / "study" / "measure_my_gpu.yaml")["study"]
    paths = {f"kernel.{name}" for name in Kernel.model_fields}
    assert {*study["recorded"], *study["baseline"]} <= paths
    assert {*study["summary"], *study["objectives"]} <= {*paths, *TorchBackend.metrics}
