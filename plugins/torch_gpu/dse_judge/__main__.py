"""Measure the GPU of this machine in some minutes: `python -m dse_judge --out DIR [--system h100_8] [--quick]`.

It needs torch, and nothing of this project but this folder. It writes one table for each question, and the device with
its driver, limits and clocks in `device.yaml` (JSON is YAML), where `--system` says which system judges it. A run that
was cut short goes on where it ended: rows are kept in `<table>.jsonl` until a table is whole.

gemms.csv      GEMMs alone: whole, in chunks along m, n or k, on fewer SMs (green contexts), two at once, grouped, FP8
beside.csv     a GEMM with a background that never ends before it: copies and sums by some SMs, SMs that are merely
               taken, copy engines, kernels that stream memory; and what becomes of the background
starts.csv     one GEMM and one copy of about the same length: which starts first, and with which priority
pipelines.csv  chunks that are copied, each followed by its GEMM, against all copies before one GEMM
kernels.csv    copies by size and by SMs, copy engines, element-wise kernels, attention
targets.csv    a GEMM beside SMs that are taken, by a cuBLAS that counts on all SMs or on the rest; its kernel and grid
launches.csv   host time of a launch, an event, a graph; gaps between kernels with and without graphs
clocks.csv     clock, power and rate over some seconds of load
"""

from __future__ import annotations

import argparse
import csv
import importlib
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from dse_judge.alone import clock_rows, kernel_rows, launch_rows
from dse_judge.gemms import gemm_rows
from dse_judge.overlaps import beside_rows, pipeline_rows, start_rows, target_rows
from dse_judge.timing import SAMPLES, Row

Measure = Callable[[], Row | list[Row]]
TABLES: list[tuple[str, Callable[[], Iterable[Measure]], float]] = [
    ("launches", launch_rows, 0.1),
    ("beside", beside_rows, 0.4),
    ("starts", start_rows, 0.2),
    ("pipelines", pipeline_rows, 0.25),
    ("kernels", kernel_rows, 0.15),
    ("clocks", clock_rows, 0.15),
    ("targets", target_rows, 0.1),
    ("gemms", gemm_rows, 1.0),
]
"""Name, rows and largest share of the time; what may fail in the driver comes last in the last."""
_PARTS = {"size": ("m", "n", "k"), "cut_as": ("axis", "chunks"), "mover": ("mover", "sms")}
"""Columns of words that hold several."""


def main(words: Sequence[str] | None = None) -> int:
    """Measure all tables that the time allows, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the tables")
    parser.add_argument("--system", help="name of the system that `dse judge` compares with")
    names = [name for name, *_ in TABLES]
    parser.add_argument("--tables", nargs="+", choices=names, default=names, help="tables to measure")
    parser.add_argument("--seconds", type=float, default=480.0, help="after which no further row is begun")
    parser.add_argument("--quick", action="store_true", help="some rows of each table, to try the way")
    options = parser.parse_args(words)
    options.out.mkdir(parents=True, exist_ok=True)
    start_s = time.monotonic()
    facts = device_facts() | ({"system": options.system} if options.system else {})
    # tables of one folder are of one device and software
    _keep_facts(options.out / "device.yaml", facts)
    for name, rows, share in TABLES:
        if name not in options.tables:
            continue
        # named tables may take all of the time
        part = share if len(options.tables) == len(TABLES) else 1.0
        until = min(start_s + options.seconds, time.monotonic() + part * options.seconds)
        measures = list(rows())
        # spread over the table, so that each kind of row is tried
        measures = measures[:: max(1, len(measures) // 8)] if options.quick else measures
        count = write_table(options.out / f"{name}.csv", measures, until=until)
        print(f"{time.monotonic() - start_s:6.1f} s  {name}: {count} rows", flush=True)
    return 0


def _keep_facts(path: Path, facts: Row) -> None:
    """Write the facts of the device. Exits where the folder holds tables of another device or software."""
    if path.exists():
        before = json.loads(path.read_text("utf-8"))
        for name in ("device", "num_sms", "torch", "driver", "system"):
            if name in before and before[name] != facts.get(name):
                sys.exit(f"{path}: {name} is {before[name]!r}, now {facts.get(name)!r}: name another folder by --out")
    path.write_text(json.dumps(facts, indent=1) + "\n", "utf-8")


def write_table(path: Path, measures: Sequence[Measure], *, until: float) -> int:
    """Measure rows one by one and write them; what cannot be measured is a row with the reason.

    Rows that an earlier run measured are kept: a table without a journal is whole. until: time of the monotonic clock
    [s] after which no further row is begun.
    """
    journal = path.with_suffix(".jsonl")
    # the journal is removed when a table is whole
    if path.exists() and not journal.exists():
        return max(0, len(path.read_text("utf-8").splitlines()) - 1)
    done = _journal_rows(journal)
    for number, measure in enumerate(measures[len(done) :], len(done)):
        if time.monotonic() > until:
            print(f"{path.name}: ended after {number} of {len(measures)} measurements, by time", flush=True)
            break
        done.append(_rows_of(measure, path.name))
        with journal.open("a", encoding="utf-8") as file:
            # one line a measurement, written at once: a run that is killed loses one
            file.write(json.dumps(done[-1], default=str) + "\n")
        # caches of torch would fill the memory with buffers of past sizes
        if number % 16 == 0:
            torch.cuda.empty_cache()
    rows = [row for measured in done for row in measured]
    # rows of a table may have different columns
    names = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows({name: _text(value) for name, value in row.items()} for row in rows)
    if len(done) == len(measures):
        journal.unlink(missing_ok=True)
    return len(rows)


def _journal_rows(journal: Path) -> list[list[Row]]:
    """Rows of each measurement that an earlier run made; a last line that was cut short is left out, and removed."""
    lines = journal.read_text("utf-8").rpartition("\n")[0] if journal.exists() else ""
    if lines:
        journal.write_text(lines + "\n", "utf-8")
    return [json.loads(line) for line in lines.splitlines()]


def _rows_of(measure: Measure, name: str) -> list[Row]:
    """Rows of a measurement, or one with the reason why there is none."""
    try:
        result = measure()
    except Exception as error:  # whatever a driver, a library or a missing feature raises
        result = {**_words(measure), "reason": _reason(error)}
        print(f"{name}: {result}", flush=True)
    return result if isinstance(result, list) else [result]


def _words(measure: Measure) -> Row:
    """Columns of what was to be measured, as the words of its call have them."""
    row: Row = {}
    for name, value in getattr(measure, "keywords", {}).items():
        row |= dict(zip(_PARTS[name], value, strict=True)) if name in _PARTS else {name: value}
    return row


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:120]}"


def _text(value: Any) -> Any:
    return f"{value:.6g}" if isinstance(value, float) else value


def device_facts() -> Row:
    """The device, its driver and software, and its clocks and limits."""
    gpu = torch.cuda.get_device_properties(0)
    facts: Row = {"device": gpu.name, "num_sms": gpu.multi_processor_count, "memory_bytes": gpu.total_memory}
    facts |= {"l2_bytes": getattr(gpu, "L2_cache_size", None), "torch": torch.__version__, "cuda": torch.version.cuda}
    facts |= {"date": time.strftime("%Y-%m-%d"), "samples": SAMPLES}
    try:
        for name, fact in _management_facts(importlib.import_module("pynvml")):
            facts[name] = fact
    except Exception as error:  # no management library, or one that tells less
        facts["nvml"] = str(error)
    return facts


def _management_facts(nvml: Any) -> Iterator[tuple[str, Any]]:
    """Yield what NVIDIA's management library tells, one fact after the other: any may be missing."""
    nvml.nvmlInit()
    handle = nvml.nvmlDeviceGetHandleByIndex(0)
    driver = nvml.nvmlSystemGetDriverVersion()
    # older versions of pynvml return bytes
    yield "driver", driver.decode() if isinstance(driver, bytes) else str(driver)
    yield "power_limit_w", nvml.nvmlDeviceGetPowerManagementLimit(handle) / 1e3
    for name, kind in (("sm", nvml.NVML_CLOCK_SM), ("memory", nvml.NVML_CLOCK_MEM)):
        yield f"most_{name}_clock_mhz", nvml.nvmlDeviceGetMaxClockInfo(handle, kind)
    yield "pcie_generation", nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle)
    yield "pcie_lanes", nvml.nvmlDeviceGetMaxPcieLinkWidth(handle)


if __name__ == "__main__":
    sys.exit(main())
