"""Our kernels on a GPU: what measures them, here with a driver that our interpreter stands in for."""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from dse.cli import main
from dse_ptx import compare_command, on_gpu
from dse_ptx.arguments import Pointer, parameter_bytes
from dse_ptx.execution import LaunchOptions, Module, PtxDevice
from dse_ptx.gpu_launches import GpuLaunch, launches

pytestmark = pytest.mark.slow


class Interpreter:
    """A driver, and a torch, whose GPU is the interpreter; it reads arguments by their addresses."""

    def __init__(self) -> None:
        self.device, self.clock = PtxDevice(), 0.0
        self.cuda = SimpleNamespace(
            current_stream=lambda: SimpleNamespace(cuda_stream=0), synchronize=lambda: None, _sleep=lambda cycles: None,
            Event=lambda enable_timing: SimpleNamespace(record=self._tick, elapsed_time=lambda last: 2.0),
        )  # fmt: skip

    def _tick(self) -> None:
        self.clock += 1.0

    def from_numpy(self, values: Any) -> Any:
        place = self.device.allocate(values)
        read = SimpleNamespace(numpy=lambda: self.device.read(place, values.dtype, values.shape))
        tensor = SimpleNamespace(data_ptr=lambda: place.address, cpu=lambda: read)
        return SimpleNamespace(cuda=lambda: tensor)

    def cuModuleLoadData(self, module: Any, text: bytes) -> int:
        self.module = Module(text.rstrip(b"\0").decode(), self.device)
        return 0

    def cuModuleGetFunction(self, function: Any, module: Any, name: bytes) -> int:
        self.name = name.decode()
        return 0 if self.name in self.module.program.kernels else 500

    def cuLaunchKernel(self, function: Any, *words: Any) -> int:
        *sizes, _, places, _ = words
        parameters = self.module.kernel(self.name).function.parameters
        bits = [ctypes.string_at(at, parameter.size) for at, parameter in zip(places, parameters, strict=True)]
        cells = [np.frombuffer(word, f"u{len(word)}")[0] for word in bits]
        self.module.launch(self.name, sizes[:3], sizes[3:6], cells, LaunchOptions(shared=sizes[6]))
        return 0


_SAXPY = GpuLaunch("basics", "saxpy", (4, 1, 1), (256, 1, 1), 0, ("f32:1.5", "f32*1000", "f32*1000", "i32:1000"))


def test_a_launch_passes_its_arguments_as_the_driver_reads_them() -> None:
    gpu = Interpreter()
    row = on_gpu.measure(_SAXPY, on_gpu.Driver(gpu), gpu)
    x: Any = _SAXPY.values()[1]
    assert row["magnitude"] == pytest.approx(float(abs(x).sum() + abs(2.5 * x).sum()), rel=1e-6)
    assert row["seconds"] == pytest.approx(2e-3)
    wrong = GpuLaunch("basics", "nosuch", (1, 1, 1), (32, 1, 1), 0, ())
    with pytest.raises(RuntimeError, match="cuModuleGetFunction returns 500"):
        on_gpu.measure(wrong, on_gpu.Driver(gpu), gpu)


def test_every_launch_is_of_a_kernel_and_fits_its_parameters() -> None:
    assert len({(launch.file, launch.kernel) for launch in launches()}) == len(launches()) > 12
    for launch in launches():
        kernel = Module(launch.text, PtxDevice()).kernel(launch.kernel)
        values = [Pointer(1 << 33) if np.ndim(value) else value for value in launch.values()]
        parameter_bytes(kernel.function.parameters, values)  # raises where sizes differ
        assert not kernel.function.block or kernel.function.block[0] == launch.block[0]


@pytest.mark.more
def test_predicted_and_measured_times_are_one_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    absent = GpuLaunch("basics", "nosuch", (1, 1, 1), (32, 1, 1), 0, ())
    for module in (on_gpu, compare_command):
        monkeypatch.setattr(module, "launches", lambda: [_SAXPY, absent])
    gpu, path = Interpreter(), tmp_path / "ptx.csv"
    assert on_gpu.write(path, "interpreter", lambda launch: on_gpu.measure(launch, on_gpu.Driver(gpu), gpu)) == 1
    assert "cuModuleGetFunction returns 500" in path.read_text("utf-8")
    assert main(["ptx", "compare", f"data={path}", "system=v100", f"out={tmp_path / 'out'}"]) == 0
    assert "1 launches of interpreter by v100: median error" in capsys.readouterr().out
    (compared,) = pd.read_parquet(tmp_path / "out" / "compared.parquet").to_dict("records")
    assert compared["equal"]
    assert compared["error"] == pytest.approx(compared["predicted_s"] / compared["measured_s"] - 1)
    path.write_text(path.read_text("utf-8").replace("saxpy", "other"), "utf-8")
    assert main(["ptx", "compare", f"data={path}"]) == 2
    assert "names no launch of ours" in capsys.readouterr().err


@pytest.mark.parametrize(
    "numbers", [("0", "1"), ("-1", "1"), ("nan", "1"), ("1e999", "1"), ("fast", "1"), ("1", "-inf")]
)
def test_a_measured_row_without_numbers_is_refused_before_anything_is_predicted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, numbers: tuple[str, str]
) -> None:
    predicted = list[Any]()
    monkeypatch.setattr(compare_command, "_row", lambda *launch: predicted.append(launch))
    path, complete = tmp_path / "ptx.csv", "H100,lenet,conv_direct,1e-5,0.1,1.0,"
    seconds, size = numbers
    rows = ["device,file,kernel,seconds,scatter,magnitude,reason", complete, f"H100,basics,saxpy,{seconds},0.1,{size},"]
    path.write_text("\n".join(rows) + "\n", "utf-8")
    assert main(["ptx", "compare", f"data={path}"]) == 2
    assert predicted == []
    assert "ptx.csv, line 3" in (message := capsys.readouterr().err)
    assert "holds no positive seconds and magnitude" in message
