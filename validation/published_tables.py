"""Rows of published tables of pre-training throughput as measured steps (`validation.steps_measured`).

A row has a model, a machine, a precision and a layout by the names of its table; `steps_measured.yaml` maps them, and
says what recipes do beside. A row that no design expresses is counted with the reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dse.errors import ConfigError, Problem
from dse.errors.terminal import bar
from dse.files import cell_number
from simulators.hardware.machine import tree_of
from simulators.workloads.model import Transformer
from simulators.workloads.model_zoo import model_tree, option_tree
from validation.amd_tables import fitted as fitted_row
from validation.amd_tables import matches, rows_of
from validation.measured_step import Step, settings, summary

TABLES = ("megatron_bridge", "nemo", "amd_training", "amd_lora")
_ABSENT = ("", "n/a", "0")


@dataclass(frozen=True)
class Throughput:
    """Steps of published tables, and reasons why other rows are left out, with their number."""

    steps: tuple[Step, ...]
    left_out: Mapping[str, int]


def read_throughput(data: Path, *, fitted: bool = False) -> Throughput:
    """Steps of the tables below a folder; none of those that are absent. fitted: of rows for fitting alone."""
    steps, reasons = list[Step](), Counter[str]()
    for name in TABLES:
        names = settings()[name].get("columns", {})
        rows = [
            {names.get(column, column): cell for column, cell in row.items()}
            for file in sorted(data.glob(settings()[name]["file"]))  # a file for each release, or one for all
            for row in rows_of(file)
        ]
        chosen = [row for row in rows if not fitted or fitted_row(name, row)]
        with bar(f"steps of {name}", len(chosen), "rows") as advance:
            for row in chosen:
                step = _step(name, {**settings()[name].get("always", {}), **row})
                if isinstance(step, Step):
                    steps.append(step)
                else:
                    reasons[step] += 1
                advance(1)
    return Throughput(tuple(steps), dict(reasons))


def throughput_figures(read: Throughput) -> dict[str, Any]:
    """Errors of steps that no constant was fitted on, by model and GPU, and the figures of the benchmark [%].

    dense_median, moe_median: median size of the errors of Megatron-Bridge's rows; hybrid_median: of mixtures whose
    layers keep states, which moe_median has as well; moe_worst_model: of the mixture whose median error is largest;
    nemo_median: as dense_median, of NeMo 24.07's rows. None where a table is absent.
    """
    groups: dict[str, list[float]] = {}
    models: dict[str, list[float]] = {}
    for step in (step for step in read.steps if not step.fitted):
        kinds = _kinds(step)
        for name in (
            name
            for kind in kinds
            for name in (kind, f"{kind}: {step.facts['model']}", f"{kind}: {step.facts['system']}")
        ):
            groups.setdefault(name, []).append(step.error)
        if "mixtures" in kinds:
            models.setdefault(step.facts["model"], []).append(step.error)
    medians = {name: 100 * summary(errors)["median"] for name, errors in groups.items()}
    worst = [100 * abs(summary(errors)["signed_median"]) for errors in models.values()]
    return {
        "dense_median": medians.get("dense"),
        "moe_median": medians.get("mixtures"),
        "hybrid_median": medians.get("hybrids"),
        "moe_worst_model": max(worst, default=None),
        "nemo_median": medians.get("nemo"),
        "amd_training_median": medians.get("amd_training"),
        "groups": {name: summary(errors) for name, errors in sorted(groups.items())},
        "left_out": dict(read.left_out),
        "fitted_rows": sum(step.fitted for step in read.steps),
    }


def _kinds(step: Step) -> tuple[str, ...]:
    """The table of a step, or the kinds of model within Megatron-Bridge's that it belongs to."""
    if step.table != "megatron_bridge":
        return (step.table,)
    if not step.facts["mixture"]:
        return ("dense",)
    return ("mixtures", "hybrids") if step.facts["states"] else ("mixtures",)


def _step(table: str, row: Mapping[str, str]) -> Step | str:
    """The step of a row, or why it has none."""
    chosen, model, system = settings()[table], row["model"], row["system"]
    if model in chosen["unmodelled"]:
        return f"{model}: {chosen['unmodelled'][model]}"
    if not (row.get("global_batch") and row.get("micro_batch")):
        return "batch or layout are not stated"
    for kind, names in (("models", model), ("systems", system), ("products", row["precision"])):
        if names not in chosen[kind]:
            return f"{names}: none of the {kind} that steps_measured.yaml maps"
    try:
        design = _design(chosen, row)
        seconds = _seconds(row, design)
    except ConfigError as unread:
        return f"{model} {system}: {unread}"
    name = " ".join(row[key] for key in ("model", "system", "precision", "gpus") if key in row)
    facts: dict[str, Any] = {"model": model, "system": system, "precision": row["precision"]}
    facts |= {"mixture": "moe" in design["model"], "states": "state" in design["model"]}
    facts |= {"release": f"{table} {row['container']}"} if row.get("container") else {}
    step = Step(table, f"{name} {row.get('container', '')}".strip(), design, seconds, facts, fitted_row(table, row))
    try:
        step.metrics()
    except (ValueError, ConfigError) as broken:
        return f"{model} {system}: {str(broken).removeprefix(step.name).lstrip(': ')}"
    return step


def _seconds(row: Mapping[str, str], design: Mapping[str, Any]) -> float:
    """Time of a step [s], of what its row says: tokens a second, milliseconds, or FLOP/s as Megatron-LM counts them."""
    tokens = _count(row, "global_batch") * _count(row, "sequence_length") / _count(row, "gpus")
    if row["tokens_per_s_per_gpu"]:
        return tokens / cell_number(row, "tokens_per_s_per_gpu")
    if row["step_ms"]:
        return cell_number(row, "step_ms") * 1e-3
    return tokens * megatron_flop(design) / (cell_number(row, "tflop_per_s_per_gpu") * 1e12)


def megatron_flop(design: Mapping[str, Any]) -> float:
    """FLOP of a token as Megatron-LM counts them: 6 a weight of a product, and all pairs of queries and keys."""
    model, moe = Transformer.model_validate(design["model"]), design["model"].get("moe")
    numbers = model.layers, model.hidden, model.width_of_head, model.num_heads, model.num_kv_heads, model.width_of_ffn
    layers, hidden, head, heads, kv_heads, wide = (float(np.asarray(number)) for number in numbers)
    if moe is not None:
        wide = float(moe["experts_per_token"]) * float(moe["expert_ffn"])
    each = hidden * (2 * (heads + kv_heads) * head + (3 if model.gated else 2) * wide)
    return 6 * (layers * each + model.vocab * hidden) + 12 * layers * heads * head * float(
        design["run"]["sequence_length"]
    )


def _design(chosen: Mapping[str, Any], row: Mapping[str, str]) -> dict[str, Any]:
    """The tree of the design of a row."""
    tp, pp, cp, vp, ep = (_degree(row, name) for name in ("tp", "pp", "cp", "vp", "ep"))
    dp, batch = _count(row, "gpus") // (tp * pp * cp), _count(row, "micro_batch")
    run = {"batch": batch, "micro_batches": _count(row, "global_batch") // (batch * dp)}
    run |= {"sequence_length": _count(row, "sequence_length")}
    products = chosen["products"][row["precision"]]
    parallel: dict[str, Any] = {"tp": tp, "pp": pp, "cp": cp, "dp": dp, "ep": ep, "sequence_parallel": tp > 1}
    if vp > 1 and pp > 1:
        parallel |= {"pipeline": "interleaved", "virtual_stages": vp}
    tree: dict[str, Any] = {
        "system": _system(chosen, row["system"]),
        "model": model_tree(chosen["models"][row["model"]]),
        "optimizer": option_tree("optimizer", chosen["optimizer"]),
        "kernels": dict(option_tree("kernels", _kernels(chosen, row))),
        "run": {"mode": "training", **chosen["run"], **run, **({"products": products} if products else {})},
        "parallel": {**chosen["parallel"], **parallel, **({"zero": 3} if _degree(row, "fsdp") > 1 else {})},
    }
    for recipe in chosen["recipes"]:
        parts = ("run", "parallel", "kernels", "experts", "widths")
        sections = {name: recipe[name] for name in parts if name in recipe}
        if matches({name: cells for name, cells in recipe.items() if name not in sections}, row):
            for name, values in sections.items():
                part = tree["kernels"] if name == "experts" else tree
                of_tree = {"widths": "model"}.get(name, name)
                part[of_tree] = {**(part.get(of_tree) or {}), **values}
    return tree


def _count(row: Mapping[str, str], column: str) -> int:
    """A whole number from 1. Raises ConfigError for another one."""
    if (number := round(cell_number(row, column))) < 1:
        raise ConfigError([Problem(f"data: {column}", "is a number from 1", row[column])])
    return number


def _degree(row: Mapping[str, str], column: str) -> int:
    """A degree of parallelism; 1 where the row has none."""
    return 1 if row.get(column, "") in _ABSENT else _count(row, column)


def _kernels(chosen: Mapping[str, Any], row: Mapping[str, str]) -> str:
    """Name of the kernels of a row: those of the table, or of the software that its cells have."""
    other = (
        software["kernels"]
        for software in chosen.get("software", ())
        if matches({name: cells for name, cells in software.items() if name != "kernels"}, row)
    )
    return str(next(other, chosen["kernels"]))


def _system(chosen: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The tree of a machine with the changes that the table of settings names."""
    of_name = chosen["systems"][name]
    tree = deepcopy(tree_of(of_name["system"]))
    for path, value in of_name.get("changes", {}).items():
        *parents, last = path.split(".")
        part = tree
        for parent in parents:
            part = part[parent]
        part[last] = value
        tree.setdefault("sources", {})[path] = {"provenance": "assumed", "source": "validation/steps_measured.yaml"}
    return tree
