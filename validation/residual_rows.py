"""Residuals of measured tables: every row that a model predicts and that no constant was fitted on.

Tables are those of a folder, by their columns, as `benchmarks.validity`, `benchmarks.expert_exchanges` and
`validation.steps_measured` read them, and those that this project measured (conf/data/measured) and ships. A row has
what is known before the answer: the kind of work, the GPU, a key, and sizes, its predicted time among them.

    gemm         key: precision; m, n, k
    elementwise  key: operator; bytes
    attention    key: kernels of a software, whose constants predict PyTorch's attention; the predicted time alone
    collective   key: inside a node, across nodes or in the switch, and another library than the node's; bytes, gpus
    exchange     key: direction; tokens, sms, nodes
    overlap      key: software; predicted speed-up, m; the residual is of it
    host         key: kernel; the gap between kernels over the constant of a launch
    step         key: training of dense models on a node or several, of mixtures, or prefill; gpus
    tpot, ttft   key: prompts by the same engines, or apart; requests under way, tokens of a prompt
    power        key: kernels at measured rates and locked clocks or at the limit, or engines that serve
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.expert_exchanges import tables_below
from benchmarks.power import BOARDS_OF, BY_CLOCK, H200, SERVED, boards, by_clock, power_of, predicted_gemm_watts, unseen
from benchmarks.validity import device_named
from dse.errors import ConfigError, Problem
from dse.files import csv_columns
from dse_calibration.calibrate import plain_name, read_table
from dse_calibration.collectives import holds_collectives
from dse_calibration.contention import COLUMNS, Overlaps, is_sweep
from dse_calibration.contention import predict_overlaps as predict_overlaps_beside
from dse_calibration.layouts import layout_of
from dse_calibration.overlap_measured.gemm_collective import holds_overlaps, predict_overlaps
from dse_calibration.overlap_measured.prefills import holds_prefills, model_named, read_prefills
from dse_calibration.overlap_measured.prefills import settings as prefill_settings
from dse_calibration.predictions import PredictedRows, predicted_by
from dse_calibration.residual_groups import ResidualRow
from dse_calibration.residual_rows import rows_of_predicted
from dse_serving.measured import Predictor, fitted_names, model_name, settings
from dse_serving.measured import read_rows as read_served
from dse_serving.served_power import read_served as read_served_power
from dse_serving.served_power import unfitted
from dse_torch.tables import measured_gpus
from simulators.hardware.machine import tree_of
from simulators.hardware.schedule_system import ScheduleSystem
from simulators.steps.backend import StepBackend
from simulators.steps.plan.drawn_errors import kind_of_step
from simulators.steps.run.build import iteration
from simulators.workloads.model_zoo import option_tree
from validation.carried_rows import carried_rows, rows_of_fewer_gpus
from validation.expert_rows import NODES, constants_of, error_of, is_fitted, node_of, predict, read_rows
from validation.measured_step import Step
from validation.overlaps import BESIDE_ON
from validation.published_tables import read_throughput
from validation.steps_measured import BY_ROW, published_steps, steps

PRESUMED = " (presumed)"
"""End of the name of a GPU that a table does not state, but its makers are known to have."""
GAP = "kernel after kernel"
_HEAD = 128  # width of a head in the table of attention
_ATTENDING = ("compiled", "vllm")  # PyTorch's software, and the fastest that has one kernel for attention
_SERVED = "silicon_sample.csv"
_FIRST = "c3_sp"  # the schedule by which a collective is launched first


def residual_rows(data: Path) -> list[ResidualRow]:
    """Rows of all kinds, of the tables below a folder and of those that are shipped. Raises ConfigError."""
    files = sorted(data.rglob("*.csv"))
    rows = [row for file in files for row in _of_file(file)]
    rows += [row for file in tables_below(data) for row in _exchanges(file)]
    of_operators = (file for file in files if _holds_operators(csv_columns(file, "--data")))
    tables = [(file.name, table) for file in of_operators for table in read_table(file)]
    carried = [*carried_rows(tables), *rows_of_fewer_gpus(tables)]
    return [*rows, *carried, *_attentions(), *_hosts(), *_steps(data), *_served(data), *_powers(data)]


def _of_file(file: Path) -> Iterator[ResidualRow]:
    columns = csv_columns(file, "--data")
    for holds, read in _READERS.items():
        if holds(columns):
            yield from read(file)


def _operators(file: Path) -> Iterator[ResidualRow]:
    for rows in read_table(file):
        device = device_named(rows.device, rows.library)
        predicted: PredictedRows | None = None if device is None else predicted_by("fitted", device, rows)
        if predicted is not None:
            yield from rows_of_predicted(predicted, plain_name(rows.device), file.name)


def _overlaps(file: Path) -> Iterator[ResidualRow]:
    for overlap in predict_overlaps(file)[0]:
        if overlap.fitted:
            continue
        cells = overlap.row
        shape = " ".join(cells[name] for name in ("op", "m", "n", "k"))
        sizes = {"speedup": overlap.speedup, "m": float(cells["m"])}
        residual = math.log(overlap.measured[2] / overlap.speedup)
        facts = {"measured": overlap.measured[2]}
        gpu = plain_name(cells["gpu"]).removesuffix(PRESUMED)
        traits = {"gpu": gpu, "software": overlap.software}
        yield ResidualRow("overlap", gpu, overlap.software, shape, residual, sizes, file.name, facts, traits)


def _beside(file: Path) -> Iterator[ResidualRow]:
    """Yield a GEMM and a collective that do not wait for one another; the residual is of the time of both at once."""
    every = Overlaps.read(file)
    rows = every.where(~every.fitted)
    walls = predict_overlaps_beside(ScheduleSystem.of(tree_of(BESIDE_ON)), rows)["wall"] if len(rows) else ()
    for place, predicted in enumerate(walls):
        serial = float(rows.gemm_alone[place] + rows.comm_alone[place])
        sizes = {"speedup": serial / float(predicted), "m": float(rows.size[place])}
        shape = f"{rows.size[place]} {rows.channels[place]}"
        residual = math.log(float(predicted) / float(rows.wall[place]))
        gpu = BESIDE_ON.partition("_")[0]
        traits = {"gpu": gpu, "software": _FIRST}
        yield ResidualRow("overlap", gpu, _FIRST, shape, residual, sizes, file.name, traits=traits)


def _prefills(file: Path) -> Iterator[ResidualRow]:
    for row in read_prefills(file)[0]:
        for kind, seconds in row.measured.items() if not row.fitted else ():
            sizes = {
                "seconds": row.predicted[kind],
                "gpus": float(row.tp),
                "tp": float(row.tp),
                "pp": 1.0,
                "sequences": 1.0,
            }
            shape = f"{row.model} {row.tp} {row.prompt_len}"
            software, model = str(prefill_settings()["kernels"]), str(model_named(row.model))
            traits = {"gpu": "h100", "model": model, "software": software, "release": file.name}
            residual = math.log(seconds / sizes["seconds"])
            yield ResidualRow("step", "h100", "prefill", shape, residual, sizes, file.name, traits=traits)


def _exchanges(file: Path) -> Iterator[ResidualRow]:
    for row in read_rows(file):
        node = node_of(row.device) if row.device in NODES else None
        kernel = None if node is None else constants_of(row, node)
        if node is None or kernel is None or is_fitted(row):
            continue
        routed: Any = row.routed
        sizes = {"seconds": predict(kernel, row, node), "tokens": float(routed.tokens)}
        sizes |= {"sms": float(row.num_sms), "nodes": float(routed.nodes)}
        shape = f"{row.name.rpartition(',')[0] or row.name} {routed.gpus:g}"  # all numbers of SMs together
        residual, gpu = -math.log1p(error_of(kernel, row, node)), plain_name(row.device)
        traits = {"gpu": gpu, "direction": row.direction, "nodes": f"{gpu} {routed.nodes:g}"}
        yield ResidualRow("exchange", gpu, row.direction, shape, residual, sizes, file.name, traits=traits)


def _attentions() -> Iterator[ResidualRow]:
    """Yield attention of prompts and of decoded tokens on the GPUs that this project measured."""
    for gpu in measured_gpus():
        for row in gpu.table("kernels").query("kernel == 'attention'").to_dict("records"):
            shape = " ".join(f"{row[name]:g}" for name in ("batch", "heads", "groups", "queries", "keys"))
            for software in _ATTENDING:
                predicted = _attention_s(gpu.tree, row, software)
                residual, sizes = math.log(row["seconds"] / predicted), {"seconds": predicted}
                source = f"measured/{gpu.folder.name}"
                yield ResidualRow("attention", str(gpu.hardware.gpu.name), software, shape, residual, sizes, source)


def _attention_s(system: Mapping[str, Any], row: Mapping[Any, Any], software: str) -> float:
    """Predicted time [s] of the kernel of one attention."""
    heads, decodes = int(row["heads"]), row["queries"] == 1
    if not decodes and row["queries"] != row["keys"]:
        raise ConfigError([Problem("kernels.csv", "has attention of neither a prompt nor a token", row["queries"])])
    model = {"kind": "transformer", "name": "attention", "layers": 1, "hidden": heads * _HEAD, "heads": heads}
    model |= {"kv_heads": int(row["groups"]), "head_dim": _HEAD, "causal": not decodes}
    run = {"mode": "decode" if decodes else "prefill", "batch": int(row["batch"]), "precision": "bf16"}
    tree = {"system": system, "model": model, "run": {**run, "sequence_length": int(row["keys"])}, "parallel": {}}
    options = {name: option_tree(name, option) for name, option in (("optimizer", "adam"), ("kernels", software))}
    parts = iteration(StepBackend().design({**tree, **options})).passes.parts
    return next(float(part.spent.seconds) for part in parts if part.op.name == "flash")


def _hosts() -> Iterator[ResidualRow]:
    for gpu in measured_gpus():
        launch_s = float(gpu.hardware.gpu.kernel_launch_s or math.nan)
        gaps = gpu.table("launches").query(f"what == '{GAP}' and graph == 0")
        for gap in gaps.to_dict("records") if math.isfinite(launch_s) else ():
            name = str(gpu.hardware.gpu.name)
            shape = f"{gap['of']} {gap['graph']}"
            residual = math.log(gap["seconds"] / launch_s)
            source = f"measured/{gpu.folder.name}"
            yield ResidualRow("host", name, "kernel", shape, residual, {"seconds": launch_s}, source)


def _steps(data: Path) -> Iterator[ResidualRow]:
    measured = {step.table: None for step in published_steps()}
    for step in (*steps(data), *read_throughput(data).steps):
        if step.fitted or step.facts.get("precision") == BY_ROW:
            continue
        parallel = step.design["parallel"]
        gpus = float(np.prod([int(parallel.get(name, 1)) for name in ("tp", "pp", "dp", "cp")]))
        predicted = step.predicted_s
        sizes = {"seconds": predicted, "gpus": gpus, **{name: float(parallel.get(name, 1)) for name in ("tp", "pp")}}
        sizes["sequences"] = float(step.design["run"]["batch"])
        source = f"training_throughput.csv: {step.table}" if step.table in measured else step.table
        gpu = str(step.design["system"]["gpu"]["name"])
        residual = math.log(step.seconds / predicted)
        traits = {name: str(step.design[part]["name"]) for name, part in (("software", "kernels"), ("model", "model"))}
        traits |= {"gpu": gpu, "release": str(step.facts.get("release", source))}
        shape = f"{step.table} {step.name}"
        yield ResidualRow("step", gpu, key_of_step(step, gpus), shape, residual, sizes, source, traits=traits)


def _served(data: Path) -> Iterator[ResidualRow]:
    """Yield times to the first and of each later token of measured deployments; none where there is no table."""
    if not any(data.glob(settings()["file"])):
        return
    rows, fitted = read_served(data), fitted_names()
    for point in Predictor().points([row for row in rows if not row.apart or row.run is not None]):
        if point.row.name in fitted:
            continue
        cells, gpu = point.row.cells, plain_name(point.row.cells["system"])
        software = settings()["servers"][cells["backend"]]
        traits = {"gpu": gpu, "software": software, "model": model_name(cells["model_path"])}
        traits |= {"release": f"{cells['backend']} {cells['backend_version'] or point.row.source}"}
        key = "apart" if point.row.apart else "together"
        asked = {"requests": float(point.row.concurrency), "tokens": float(point.row.lengths[0])}
        times = {"tpot": (point.tpot_s, point.row.tpot_s), "ttft": (point.ttft_s, point.row.ttft_s)}
        for kind, (predicted, seconds) in times.items():
            if predicted > 0 and seconds > 0:
                sizes, residual = {"seconds": predicted, **asked}, math.log(seconds / predicted)
                yield ResidualRow(kind, gpu, key, point.row.name, residual, sizes, _SERVED, traits=traits)


def _powers(data: Path) -> Iterator[ResidualRow]:
    """Yield powers of boards: of kernels, and of engines that serve."""
    for file in data.rglob(BY_CLOCK):
        rows = unseen(by_clock(file.parent))
        for row, watts in zip(rows.to_dict("records"), boards(rows).predicted(power_of(BOARDS_OF)), strict=True):
            shape = " ".join(f"{row[name]}" for name in ("work", *"mnk", "channels"))
            yield _power_row("a100", "kernels", shape, watts=(float(row["w"]), float(watts)), source=file.name)
    for file in data.rglob(H200):
        for shape, measured, watts in predicted_gemm_watts(file):
            yield _power_row("h200", "kernels", shape, watts=(measured, watts), source=file.name)
    for file in data.rglob(SERVED):
        for served in unfitted(read_served_power(file)):
            watts = served.drawn(served.power).gpu_w
            gpu = plain_name(served.cells["gpu"])
            yield _power_row(gpu, "served", served.name, watts=(served.watts, watts), source=file.name)


def _power_row(gpu: str, key: str, shape: str, *, watts: tuple[float, float], source: str) -> ResidualRow:
    """A row of (measured, predicted) power [W]."""
    measured, predicted = watts
    residual = math.log(measured / predicted)
    return ResidualRow("power", gpu, key, shape, residual, {}, source, traits={"gpu": gpu})


def key_of_step(step: Step, gpus: float) -> str:
    """What a step is: dense on one node or several, or a mixture of experts."""
    mixture = bool(step.design["model"].get("moe"))
    of_node = float(step.design["system"]["node"]["num_gpus"])
    return kind_of_step("training", mixture=mixture, gpus=gpus, of_node=of_node)


def _holds_operators(columns: tuple[str, ...]) -> bool:
    return layout_of(columns) is not None or holds_collectives(columns)


def _holds_beside(columns: tuple[str, ...]) -> bool:
    return is_sweep(columns) or set(COLUMNS) <= set(columns)


_READERS: Mapping[Callable[[tuple[str, ...]], bool], Callable[[Path], Iterator[ResidualRow]]] = {
    holds_prefills: _prefills,
    holds_overlaps: _overlaps,
    _holds_beside: _beside,
    _holds_operators: _operators,
}
"""Whether a table with some columns is of a layout -> what yields its rows."""
