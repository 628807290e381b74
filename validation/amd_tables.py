"""Public tables of AMD's GPUs beside training: collectives of RCCL by size, and latencies of fixed batches by vLLM.

`steps_measured.yaml` says of which machines and models they are, and which rows constants were fitted on.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dse.files import cell_number
from simulators.costs.collective import collective_cost, machine_ring
from simulators.hardware.device import Device
from simulators.hardware.machine import tree_of
from simulators.workloads.model_zoo import model_tree, option_tree
from validation.left_out import report_left_out
from validation.measured_step import Step, settings

COLLECTIVES, LATENCY = "amd_collectives", "amd_latency"


@dataclass(frozen=True)
class TimedRow:
    """A row of a table: what was measured and what is predicted [s]. fitted: whether a constant was fitted on it."""

    name: str
    seconds: float
    predicted_s: float
    fitted: bool

    @property
    def error(self) -> float:
        """Relative error of the prediction, with its sign."""
        return self.predicted_s / self.seconds - 1


def rows_of(file: Path) -> Iterator[dict[str, str]]:
    """Yield the rows of a CSV with comments; none where there is no file."""
    if file.is_file():
        with file.open(encoding="utf-8", newline="") as text:
            yield from csv.DictReader(line for line in text if not line.startswith("#"))


def matches(cells: Mapping[str, Any], row: Mapping[str, str]) -> bool:
    """Tell whether each named cell of a row is among the values given for it."""
    return all(row.get(name) in values for name, values in cells.items())


def fitted(table: str, row: Mapping[str, str]) -> bool:
    """Tell whether a constant was fitted on a row of a table."""
    return any(matches(cells, row) for cells in settings()[table].get("fitted_on", ()))


def collectives(data: Path) -> list[TimedRow]:
    """All-reduces from the size that counts as large, out of place and in place; none where there is no table."""
    chosen = settings()[COLLECTIVES]
    machines = {gpu: Device.of(tree_of(system)) for gpu, system in chosen["systems"].items()}
    timed = list[TimedRow]()
    for row in rows_of(data / chosen["file"]):
        size, gpus = cell_number(row, "bytes"), round(cell_number(row, "gpus"))
        if size < chosen["from_bytes"] or row["collective"] != "all_reduce":  # the table has no other
            continue
        if row["gpu"] not in machines:
            report_left_out(f"collectives of {row['gpu']}", "none of the systems that steps_measured.yaml maps", rows=1)
            continue
        ring = machine_ring(machines[row["gpu"]], gpus)
        seconds = float(collective_cost("all_reduce", "ring", size, ring).seconds)
        name = f"all-reduce of {row['bytes']} bytes on {gpus} {row['gpu']}"
        timed.append(TimedRow(name, cell_number(row, "time_us") * 1e-6, seconds, fitted(COLLECTIVES, row)))
    return timed


def latencies(data: Path) -> list[TimedRow]:
    """Latencies of fixed batches from prompt to last token; none where there is no table."""
    chosen, timed, known = settings()[LATENCY], list[TimedRow](), dict[tuple[int, ...], float]()
    for row in rows_of(data / chosen["file"]):
        if row["scenario"] != chosen["scenario"]:
            continue
        batch, prompt, tokens, _ = shape = shape_of(row)
        if shape not in known:  # the same in every release
            known[shape] = latency(chosen, shape, {})
        name = f"{row['model']} {row['software']}, {batch} x {prompt} + {tokens}"
        timed.append(TimedRow(name, cell_number(row, "e2e_latency_s"), known[shape], fitted(LATENCY, row)))
    return timed


def fitted_all_reduces(table: Path, gpu: str, gpus: int) -> list[tuple[float, float]]:
    """(bytes, time [s]) of the all-reduces on so many GPUs that constants are fitted on, smaller first."""
    rows = [row for row in rows_of(table) if fitted(COLLECTIVES, row) and (row["gpu"], int(row["gpus"])) == (gpu, gpus)]
    return sorted((cell_number(row, "bytes"), cell_number(row, "time_us") * 1e-6) for row in rows)


def shape_of(row: Mapping[str, str]) -> tuple[int, int, int, int]:
    """(batch, tokens of a prompt, tokens that come out, tp) of a latency."""
    batch, prompt, tokens, tp = (int(row[name]) for name in ("batch_or_concurrency", "isl", "osl", "tp"))
    return batch, prompt, tokens, tp


def latency(chosen: Mapping[str, Any], shape: tuple[int, int, int, int], kernels: Mapping[str, float]) -> float:
    """Time [s] from a batch of prompts to its last token. kernels: constants in place of those of the software."""
    batch, prompt, tokens, tp = shape
    shared = {
        "system": tree_of(chosen["system"]),
        "model": model_tree(chosen["model"]),
        "optimizer": option_tree("optimizer", "adam"),
        "kernels": {**option_tree("kernels", chosen["kernels"]), **kernels},
        "parallel": {"tp": tp},
    }
    lengths = {"prefill": prompt, "decode": prompt + tokens // 2}
    runs = {mode: {"mode": mode, "batch": batch, "sequence_length": lengths[mode], **chosen["run"]} for mode in lengths}
    seconds = {mode: Step(LATENCY, mode, {**shared, "run": run}, 1.0, {}).predicted_s for mode, run in runs.items()}
    return seconds["prefill"] + tokens * seconds["decode"]


def median_error(timed: list[TimedRow]) -> float | None:
    """Median size of the errors [%] of rows that nothing was fitted on; None where there are none."""
    errors = [abs(row.error) for row in timed if not row.fitted]
    return 100 * float(np.median(errors)) if errors else None


def amd_figures(data: Path) -> dict[str, Any]:
    """Figures of the benchmark: amd_collectives_median, amd_latency_median [%]."""
    tables = {"amd_collectives_median": collectives(data), "amd_latency_median": latencies(data)}
    return {name: median_error(timed) for name, timed in tables.items()}
