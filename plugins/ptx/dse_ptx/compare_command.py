"""`ptx compare`: times of our kernels that a GPU measured (`dse_ptx.on_gpu`), beside those that its SMs predict.

    python -m dse ptx compare data=my_gpu/ptx.csv system=h100 [out=<folder>]

Nothing is fitted. Predictions leave the launch out, as launches that queue hide it, and begin with empty caches.
Results are compared, too: the sum of all numbers' magnitudes after a launch.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from dse.errors import ConfigError, Problem, Problems, pairs
from dse.files import read_csv
from dse.results.run_folder import CommandAnswer, writable
from dse_ptx.arguments import Argument
from dse_ptx.execution import LaunchOptions, Module, PtxDevice
from dse_ptx.gpu_launches import GpuLaunch, is_close, launches, magnitude
from dse_ptx.sms import SmArray, sm_array
from dse_ptx.timing import resident_blocks, simulated_blocks, time_launch

_WAVES = 3  # that are simulated at most, of a launch of many


def compare(words: Sequence[str]) -> CommandAnswer:
    """Predict all launches that were measured."""
    import pandas as pd

    typed = pairs(words, {"data": ""}, optional=("system", "out"))
    machine, path = sm_array(typed.get("system", "h100")), Path(typed["data"])
    measured = _measured_launches(path)
    rows = [_row(launch, machine, device, numbers) for launch, device, numbers in measured]
    outputs = writable(typed.get("out") or f"outputs/ptx_compare/{machine.name}")
    outputs.write_table("compared", pd.DataFrame(rows))
    lines = [
        f"  {row['kernel']:20} {row['predicted_s'] * 1e6:10.1f} us predicted {row['measured_s'] * 1e6:10.1f} measured "
        f"{row['error']:+.0%}{'' if row['equal'] else ', results differ'}"
        for row in rows
    ]
    median = statistics.median(abs(row["error"]) for row in rows)
    head = f"{len(rows)} launches of {rows[0]['device']} by {machine.name}: median error {median:.1%}"
    return CommandAnswer(outputs.folder, (head, *lines, f"written to {outputs.folder}/: compared.parquet"), "compared")


def _measured_launches(path: Path) -> list[tuple[GpuLaunch, str, tuple[float, float]]]:
    """(launch, device, (seconds, magnitude)) of the rows that were measured; before anything is predicted, which takes
    long. Raises ConfigError with every fault of the file.
    """
    by_name = {(launch.file, launch.kernel): launch for launch in launches()}
    check, measured = Problems(), list[tuple[GpuLaunch, str, tuple[float, float]]]()
    for line, row in read_csv(path, needed=("device", "file", "kernel", "seconds", "magnitude")).rows:
        where, launch = f"{path.name}, line {line}", by_name.get((row["file"], row["kernel"]))
        # a table of another version of the kernels
        if launch is None:
            check.add(where, "names no launch of ours", value=row["kernel"])
        elif row["seconds"]:
            seconds, magnitude = _number(row["seconds"]), _number(row["magnitude"])
            if not (0 < seconds < math.inf and 0 <= magnitude < math.inf):
                check.add(
                    where, "holds no positive seconds and magnitude", value=f"{row['seconds']}, {row['magnitude']}"
                )
            measured.append((launch, row["device"], (seconds, magnitude)))
    check.done()
    if not measured:
        raise ConfigError([Problem("data", "holds no launch that was measured", str(path), "see its column reason")])
    return measured


def _number(text: str) -> float:
    with suppress(ValueError):
        return float(text)
    return math.nan  # which no range holds


def _row(launch: GpuLaunch, machine: SmArray, device: str, measured: tuple[float, float]) -> dict[str, Any]:
    """A launch predicted beside its measured row. measured: seconds, and the magnitude of all arrays."""
    seconds, total = measured
    predicted, magnitude = predict(launch, machine)
    return {
        "device": device, "file": launch.file, "kernel": launch.kernel, "predicted_s": predicted,
        "measured_s": seconds, "error": predicted / seconds - 1,
        "equal": is_close(magnitude, total, launch.arguments),
    }  # fmt: skip


def predict(launch: GpuLaunch, machine: SmArray) -> tuple[float, float]:
    """Seconds without the launch, and the magnitude of all arrays, by execution of every block."""
    device = PtxDevice()
    module, written = Module(launch.text, device), launch.values()
    arguments: list[Argument] = [
        device.allocate(value) if isinstance(value, np.ndarray) else value for value in written
    ]
    kernel, blocks = module.kernel(launch.kernel), int(np.prod(launch.grid))
    shared = kernel.shared_bytes + launch.shared
    resident = resident_blocks(machine, int(np.prod(launch.block)), kernel.registers_per_thread, shared)
    wave = resident * machine.num_sms
    sample = tuple(range(simulated_blocks(blocks, _WAVES * wave, wave)))
    run = module.launch(launch.kernel, launch.grid, launch.block, arguments, LaunchOptions(launch.shared, sample))
    assert run.trace is not None
    done = time_launch(run.trace, machine)
    arrays = [
        device.read(place, value.dtype, value.shape)  # type: ignore[arg-type]
        for place, value in zip(arguments, written, strict=True)
        if isinstance(value, np.ndarray)
    ]
    # all blocks are executed, few of them timed: the results are whole
    return done.seconds - done.launch_s, magnitude(arrays)
