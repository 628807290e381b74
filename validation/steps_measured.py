"""Measured training steps held against predictions: `python -m validation.steps_measured [--data DIR] [--json]`.

Tables: GPT on one to eight A100 (Megatron-DeepSpeed; below DIR), Llama 3 on 64 and 256 H100 (FSDP and tp; below DIR)
and on 8 H100 (FSDP and cp; below DIR),
published throughput of GPT on 8 to 3,072 A100 (`conf/data/training_throughput.csv`), and tables of NVIDIA on H100 to
GB300 (`validation.published_tables`; below DIR). `steps_measured.yaml` says of which designs these are, and on which
rows a constant was fitted; those are left out of the errors.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dse.config.options import conf_dir
from simulators.hardware.machine import tree_of
from simulators.steps.overlap.sites import SITES
from simulators.workloads.model_zoo import model_tree, option_tree
from validation.left_out import files_below, given_folder
from validation.measured_step import Step, settings, summary
from validation.published_tables import read_throughput, throughput_figures

BASELINE = "vanilla TP"
BY_ROW = "fp8 rowwise"
"""Precision of rows whose products, slower than with one scale, are not modelled (docs/explanation/training.md)."""
BY = ("hidden", "tp", "dp", "pp", "micro_batch", "micro_batches")


def _design(chosen: Mapping[str, Any], model: Mapping[str, Any], **sections: Mapping[str, Any]) -> dict[str, Any]:
    """The tree of a design: options of a table, with the values of a row."""
    return {
        "system": tree_of(chosen["system"]),
        "model": {"kind": "transformer", **model},
        "optimizer": option_tree("optimizer", chosen["optimizer"]),
        "kernels": option_tree("kernels", chosen["kernels"]),
        "run": {"mode": "training", **chosen["run"], **sections["run"]},
        "parallel": {**chosen["parallel"], **sections["parallel"]},
    }


def _gpt(row: Mapping[str, Any], vocab: int) -> dict[str, Any]:
    """The tree of a GPT of these sizes, with learnt positions and shared embeddings."""
    sizes = {name: int(row[name]) for name in ("layers", "hidden", "heads")}
    return {"name": "gpt", **sizes, "vocab": vocab, "positions": int(row["sequence_length"]), "causal": True}


def _lines(file: Path) -> Iterator[list[str]]:
    """Cells of the lines of a CSV that are no comments."""
    with file.open(encoding="utf-8", newline="") as text:
        yield from csv.reader(line for line in text if not line.startswith("#"))


def megatron_deepspeed(file: Path) -> Iterator[Step]:
    """Steps of GPT on the GPUs of one node."""
    chosen = settings()["megatron_deepspeed"]
    for cells in _lines(file):
        row = dict(zip(chosen["columns"], map(float, cells), strict=True))
        dp, tp, pp, micro_batch = (int(row[name]) for name in ("dp", "tp", "pp", "micro_batch"))
        micro_batches = int(row["batch"]) // (micro_batch * dp)
        multiple = chosen["vocab_multiple"] * tp
        model = _gpt(row, math.ceil(chosen["vocab"] / multiple) * multiple)
        run = {"batch": micro_batch, "micro_batches": micro_batches, "sequence_length": int(row["sequence_length"])}
        design = _design(chosen, model, run=run, parallel={"tp": tp, "dp": dp, "pp": pp})
        facts = {**{name: int(row[name]) for name in BY[:5]}, "micro_batches": micro_batches}
        fitted = all(facts[name] == value for name, value in chosen["calibrated_on"].items())
        yield Step("Megatron-DeepSpeed, A100", " ".join(cells[:-1]), design, row["ms"] * 1e-3, facts, fitted)


def published(file: Path) -> Iterator[Step]:
    """Steps of GPT on up to 3,072 GPUs, of published throughput or seconds."""
    chosen = settings()["published"]
    lines = _lines(file)
    columns = next(lines)
    for cells in lines:
        row: dict[str, Any] = dict(zip(columns, cells, strict=True))
        row["sequence_length"] = chosen["sequence_length"]
        facts = {name: int(row[name]) for name in ("gpus", "hidden", "tp", "dp", "pp", "micro_batch", "virtual_stages")}
        facts["micro_batches"] = int(row["batch"]) // (facts["micro_batch"] * facts["dp"])
        run: dict[str, Any] = {
            "batch": facts["micro_batch"],
            "micro_batches": facts["micro_batches"],
            "recompute": row["recompute"],
            "sequence_length": chosen["sequence_length"],
        }
        parallel: dict[str, Any] = {name: facts[name] for name in ("tp", "dp", "pp", "virtual_stages")}
        parallel |= {"pipeline": "interleaved" if facts["virtual_stages"] > 1 else "1f1b"}
        parallel |= {"reductions": row["reductions"], "sequence_parallel": row["sequence_parallel"] == "true"}
        of_table = chosen["tables"][row["table"]]
        how = {**chosen, **of_table, "parallel": chosen["parallel"]}
        design = _design(how, _gpt(row, chosen["vocab"]), run=run, parallel={**parallel, **of_table["parallel"]})
        name = f"{row['model']} {row['recompute']}"
        yield Step(f"published, A100: {row['table']}", name, design, _seconds(row, chosen["vocab"]), facts)


def memory(file: Path) -> Iterator[dict[str, Any]]:
    """Published memory of stages [GiB] and that of their layers by the step backend."""
    chosen = settings()["published"]
    how = {**chosen, **chosen["tables"]["seqsel_5"]}
    lines = _lines(file)
    columns = next(lines)
    for cells in lines:
        row: dict[str, Any] = dict(zip(columns, cells, strict=True))
        row["sequence_length"] = chosen["sequence_length"]
        batch, several = int(row["micro_batch"]), int(row["virtual_stages"])
        run = {"batch": batch, "micro_batches": int(row["batch"]) // batch, "recompute": row["recompute"]}
        run["sequence_length"] = chosen["sequence_length"]
        parallel: dict[str, Any] = {"tp": int(row["tp"]), "pp": int(row["pp"]), "virtual_stages": several}
        parallel |= {"pipeline": "interleaved" if several > 1 else "1f1b"}
        parallel |= {"sequence_parallel": row["sequence_parallel"] == "true"}
        design = _design(how, _gpt(row, 0), run=run, parallel=parallel)
        metrics = Step("", f"{row['model']} {row['recompute']}", design, 0.0, {}).metrics()
        for kind, metric in (("state", "state_bytes"), ("activations", "activation_bytes")):
            predicted = float(metrics[metric]) / 2**30
            name = f"{row['model']} {row['recompute']} {kind}"
            yield {"row": name, "gib": float(row[f"{kind}_gib"]), "predicted": predicted}


def _seconds(row: Mapping[str, Any], vocab: int) -> float:
    """Time of a step [s] from its value, which may be the FLOP a second that a GPU achieves.

    FLOP of a step that computes the forward pass again, eq. 3 of arXiv:2104.04473, with batch B, sequence length s, l
    layers of width h and vocabulary V: 96 B s l h^2 (1 + s / (6 h) + V / (16 l h)).
    """
    if row["unit"] == "s":
        return float(row["value"])
    b, s, n, h = (float(row[name]) for name in ("batch", "sequence_length", "layers", "hidden"))
    flop = 96 * b * s * n * h**2 * (1 + s / (6 * h) + vocab / (16 * n * h))
    return flop / (float(row["gpus"]) * float(row["value"]) * 1e12)


def async_tp(file: Path, what: str = BASELINE) -> Iterator[Step]:
    """Steps of Llama 3 by FSDP and tp, of the rows that say `what`."""
    chosen = settings()["async_tp"]
    lines = _lines(file)
    columns = next(lines)
    for cells in lines:
        row = dict(zip(columns, cells, strict=True))
        if row["what"] != what:
            continue
        dp, tp = (int(degree) for degree in re.findall(r"(?:FSDP|TP)(\d+)", row["parallel"]))
        (word,) = re.findall(r"(\w+) recomputation", row["parallel"])
        batch, length = int(row["local_batch"]), int(row["seq_len"])
        run = {"batch": batch, "micro_batches": 1, "sequence_length": length, "recompute": chosen["recompute"][word]}
        products = chosen["products"][row["precision"]]
        run |= {"products": products} if products else {}
        run |= {"scales": "row"} if row["precision"] == BY_ROW else {}
        design = _design(chosen, model_tree(chosen["models"][row["model"]]), run=run, parallel={"tp": tp, "dp": dp})
        if what == chosen["overlapped"]["what"]:
            design["sites"] = dict.fromkeys(SITES, chosen["overlapped"]["schedule"])
        seconds = batch * length / (tp * float(row["value"]))
        facts = {"tp": tp, "dp": dp, "model": row["model"], "precision": row["precision"]}
        table = "FSDP and tp, H100" + (", fp8 by row" if row["precision"] == BY_ROW else "")
        yield Step(table, f"{row['model']} {row['precision']}", design, seconds, facts)


def context_parallel(file: Path) -> Iterator[Step]:
    """Steps of Llama 3.1 by FSDP, with sequences split over GPUs."""
    chosen = settings()["context_parallel"]
    lines = _lines(file)
    columns = next(lines)
    for cells in lines:
        row = dict(zip(columns, cells, strict=True))
        dp, cp = (int(degree) for degree in re.findall(r"(?:FSDP|CP)(\d+)", row["parallel"]))
        batch, length = int(row["local_batch"]), int(row["seq_len"])
        run = {"batch": batch, "micro_batches": 1, "sequence_length": length}
        run |= {"products": chosen["products"][row["precision"]]}
        design = _design(chosen, model_tree(chosen["models"][row["model"]]), run=run, parallel={"dp": dp, "cp": cp})
        facts = {"cp": cp, "dp": dp, "model": row["model"], "precision": row["precision"]}
        name = f"{row['model']} cp {cp}, {length} tokens"
        yield Step("FSDP and cp, H100", name, design, batch * length / (cp * float(row["value"])), facts)


@dataclass(frozen=True)
class OverlappedStep:
    """A measured step without and with schedules of its sites."""

    serial: Step
    overlapped: Step

    @property
    def gain_error(self) -> float:
        """Share of the time that overlap is predicted to save, less the measured one."""
        predicted = 1 - self.overlapped.predicted_s / self.serial.predicted_s
        return predicted - (1 - self.overlapped.seconds / self.serial.seconds)


def overlapped_steps(data: Path) -> list[OverlappedStep]:
    """Measured steps with and without async tensor parallelism, of tables below a folder; none where there is none."""
    file = next(files_below(data, Path(settings()["async_tp"]["file"]).name), None)
    if file is None:
        return []
    what = settings()["async_tp"]["overlapped"]["what"]
    with_schedules = list(async_tp(file, what))
    return [
        OverlappedStep(serial, step)
        for serial in async_tp(file)
        for step in with_schedules
        if (step.facts, step.design["run"]) == (serial.facts, serial.design["run"])
    ]


def steps(data: Path | None) -> list[Step]:
    """All steps: of tables below `data`, where they are there, and of the published ones."""
    measured = [] if data is None else [step for name in _READERS for step in steps_of(name, data)]
    return [*measured, *published_steps()]


def steps_of(name: str, data: Path) -> list[Step]:
    """Steps of the table called `name` in the settings, anywhere below a folder; none where there is none."""
    files = files_below(data, Path(settings()[name]["file"]).name)
    return [step for file in itertools.islice(files, 1) for step in _READERS[name](file)]


_READERS: Mapping[str, Callable[[Path], Iterator[Step]]] = {
    "megatron_deepspeed": megatron_deepspeed,
    "async_tp": async_tp,
    "context_parallel": context_parallel,
}
"""Name of a table in the settings -> what reads its steps."""


def published_steps() -> list[Step]:
    """Steps of published throughput, which are shipped."""
    return list(published(conf_dir() / "data" / "training_throughput.csv"))


def by_table(measured: Sequence[Step]) -> dict[str, dict[str, float]]:
    """Summary of the errors of each table, without the rows that a constant was fitted on."""
    errors: dict[str, list[float]] = {}
    for step in measured:
        if not step.fitted:
            errors.setdefault(step.table, []).append(step.error)
    return {table: summary(values) for table, values in errors.items()}


def by_fact(measured: Sequence[Step], names: Sequence[str] = BY) -> dict[str, dict[str, float]]:
    """Summary of errors by the value of each fact of the rows of a table."""
    groups: dict[str, list[float]] = {}
    for step in measured:
        error = step.error
        for name in names:
            if name in step.facts:
                groups.setdefault(f"{name} = {step.facts[name]}", []).append(error)
    return {group: summary(groups[group]) for group in sorted(groups, key=_order)}


def _order(group: str) -> tuple[str, float]:
    name, _, value = group.partition(" = ")
    return name, float(value)


def figures(data: Path | None) -> dict[str, Any]:
    """Summaries by table, those of the largest table by fact, and each row of the small tables."""
    measured = steps(data)
    large = [step for step in measured if step.table.startswith("Megatron-DeepSpeed") and not step.fitted]
    small = [step for step in measured if not step.table.startswith("Megatron-DeepSpeed")]
    rows = [_row(step) for step in small]
    sizes = list(memory(conf_dir() / "data" / "training_memory.csv"))
    found: dict[str, Any] = {"tables": by_table(measured), "by_fact": by_fact(large), "rows": rows, "memory": sizes}
    throughput = None if data is None else read_throughput(data)
    if throughput is not None and throughput.steps:
        found["rows"] += [_row(step) for step in throughput.steps]
        found["throughput"] = throughput_figures(throughput)
        found["tables"] |= found["throughput"]["groups"]
    return found


def _row(step: Step) -> dict[str, Any]:
    return {"table": step.table, "row": step.name, "seconds": step.seconds, "predicted": step.predicted_s}


def _markdown(result: Mapping[str, Any]) -> str:
    head = "| | rows | median | p90 | worst | signed median |\n|---|--:|--:|--:|--:|--:|"
    lines = [head]
    for name, row in [*result["tables"].items(), *result["by_fact"].items()]:
        shares = (f"{100 * row[key]:.1f} %" for key in ("median", "p90", "worst"))
        lines.append(f"| {name} | {row['count']:.0f} | {' | '.join(shares)} | {100 * row['signed_median']:+.1f} % |")
    lines.append("\n| table | row | measured, s | predicted, s | error |\n|---|---|--:|--:|--:|")
    for row in result["rows"]:
        error = 100 * (row["predicted"] / row["seconds"] - 1)
        lines.append(
            f"| {row['table']} | {row['row']} | {row['seconds']:.4g} | {row['predicted']:.4g} | {error:+.1f} % |"
        )
    lines.append("\n| memory of a stage | published, GiB | predicted, GiB | error |\n|---|--:|--:|--:|")
    for row in result["memory"]:
        error = 100 * (row["predicted"] / row["gib"] - 1)
        lines.append(f"| {row['row']} | {row['gib']:.4g} | {row['predicted']:.4g} | {error:+.1f} % |")
    for reason, count in result.get("throughput", {}).get("left_out", {}).items():
        lines.append(f"\n{count} rows are left out: {reason}")
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> int:
    """Predict and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--data", type=given_folder, help="folder of measured tables; without it the published rows alone"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object with the figures")
    asked = parser.parse_args(words)
    result = figures(asked.data)
    print(json.dumps(result, indent=2) if asked.json else _markdown(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
