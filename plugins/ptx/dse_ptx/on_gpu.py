"""Times of our kernels in PTX on the GPU of this machine: `python -m dse_ptx.on_gpu --out ptx.csv`.

The driver compiles and launches the same texts that `ptx compare` predicts. It needs torch, and of this project the
folders `dse` and `plugins/ptx`. A time is the median of samples, of launches queued behind a kernel that waits.
"""

from __future__ import annotations

import argparse
import csv
import ctypes
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dse_ptx.gpu_launches import GpuLaunch, launches, magnitude

COLUMNS = ("device", "file", "kernel", "seconds", "scatter", "magnitude", "reason")
_MOST_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
# samples, seconds of launches in one, and cycles that the GPU waits so that launches queue
_SAMPLES, _SAMPLE_S, _WAIT_CYCLES = 15, 1e-3, 4_000_000
_ALWAYS = 48 << 10  # bytes of shared memory that need no permission


class Driver:
    """The part of CUDA's driver that loads a text of PTX and launches its kernels."""

    def __init__(self, library: Any) -> None:
        self.library = library

    def _call(self, name: str, *words: Any) -> None:
        status = getattr(self.library, name)(*words)
        if status:
            raise RuntimeError(f"{name} returns {status}")

    def function(self, text: str, kernel: str, shared: int) -> ctypes.c_void_p:
        """A kernel of a text. Raises RuntimeError where the driver refuses it."""
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuModuleLoadData", ctypes.byref(module), text.encode() + b"\0")
        self._call("cuModuleGetFunction", ctypes.byref(function), module, kernel.encode())
        if shared > _ALWAYS:
            self._call("cuFuncSetAttribute", function, _MOST_SHARED, shared)
        return function

    def launch(self, function: ctypes.c_void_p, launch: GpuLaunch, values: Sequence[Any], stream: int) -> None:
        """Queue a launch; values: its arguments, of arrays their addresses."""
        cells = [np.array(value) for value in values]
        places = (ctypes.c_void_p * len(cells))(*(cell.ctypes.data for cell in cells))
        sizes = (*launch.grid, *launch.block, launch.shared)
        self._call("cuLaunchKernel", function, *sizes, ctypes.c_void_p(stream), places, None)


def measure(launch: GpuLaunch, driver: Driver, torch: Any) -> dict[str, Any]:
    """Seconds of a launch, their scatter, and the magnitude of all arrays after the first."""
    written = launch.values()
    tensors = {place: torch.from_numpy(entry).cuda() for place, entry in enumerate(written) if np.ndim(entry)}
    values = [np.uint64(tensors[at].data_ptr()) if at in tensors else entry for at, entry in enumerate(written)]
    function, stream = driver.function(launch.text, launch.kernel, launch.shared), torch.cuda.current_stream()

    def call() -> None:
        driver.launch(function, launch, values, stream.cuda_stream)

    call()
    torch.cuda.synchronize()
    total = magnitude(tensor.cpu().numpy() for tensor in tensors.values())
    count = max(1, min(400, math.ceil(_SAMPLE_S / max(_seconds(call, 2, torch), 1e-7))))
    low, middle, high = statistics.quantiles([_seconds(call, count, torch) for _ in range(_SAMPLES)], n=4)
    return {"seconds": middle, "scatter": (high - low) / middle, "magnitude": total}


def _seconds(call: Callable[[], None], count: int, torch: Any) -> float:
    """Seconds of one of some calls."""
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(_WAIT_CYCLES)
    first.record()
    for _ in range(count):
        call()
    last.record()
    torch.cuda.synchronize()
    return 1e-3 * float(first.elapsed_time(last)) / count


def write(path: Path, device: str, row: Callable[[GpuLaunch], dict[str, Any]]) -> int:
    """Write a row for each launch; what cannot be measured has a reason. Returns how many could."""
    done = 0
    with path.open("w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        table.writeheader()
        for launch in launches():
            try:
                cells, done = row(launch), done + 1
            except Exception as error:  # whatever a driver or a library raises
                cells = {"reason": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:120]}"}
            table.writerow({"device": device, "file": launch.file, "kernel": launch.kernel, **cells})
            file.flush()
    return done


def main(words: Sequence[str] | None = None) -> int:
    """Measure all launches."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="table to write")
    options = parser.parse_args(words)
    import torch

    if not torch.cuda.is_available():
        print("torch sees no GPU", file=sys.stderr)
        return 3
    torch.zeros(1).cuda()  # makes the context, in which the driver loads
    driver = Driver(ctypes.CDLL("libcuda.so.1"))
    name = torch.cuda.get_device_name(0)
    print(f"{write(options.out, name, lambda launch: measure(launch, driver, torch))} launches on {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
