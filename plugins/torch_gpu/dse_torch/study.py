"""Kernels measured on this machine: tables that `calibrate` reads, the calibrated machine's errors, and overlaps.

A GEMM and a copy at once are predicted from what each takes alone and the memory that they share: the GEMM moves its
matrices at least once, a copy by a kernel reads and writes, a copy by an engine writes; memory gives what the fastest
copy inside the device reached. Nothing is fitted to overlaps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from dse.errors import ConfigError
from dse.plots import FigureSheet, Frame
from dse.plots import predictions as charts
from dse.results.run_folder import FinishedRun
from dse_calibration.calibrate import calibrate_rows, read_table, table_of
from simulators.engines.fluid import ENGINE
from simulators.hardware.machine import tree_of
from simulators.hardware.parts import ELEMENT_BYTES
from simulators.taskgraph.graph import GraphBuilder
from studies.plain import Plain

if TYPE_CHECKING:
    import pandas as pd

_GEMMS, _COLLECTIVES = "gemms.csv", "collectives.csv"
_OPERATION = "kernel.operation"


class MeasureMyGpu(Plain):
    """Tables of what was measured, and how well it is predicted."""

    columns = (
        _OPERATION,
        *(f"kernel.{name}" for name in ("m", "n", "k", "precision", "num_bytes", "mover", "free_sms")),
        *("kernel.collective", "kernel.gpus"),
    )

    def extras(self, run: FinishedRun) -> Iterator[tuple[str, Any]]:
        """`gemms.csv`, `collectives.csv`, `overlaps`, and with a machine its calibrated file, errors and a figure."""
        table = run.outputs.read_table("results")
        ok = table[table["status"] == "ok"]
        tables = {_GEMMS: gemms_of(ok), _COLLECTIVES: collectives_of(ok)}
        yield from ((name, rows) for name, rows in tables.items() if len(rows))
        overlaps = overlaps_of(ok)
        if len(overlaps):
            yield "overlaps", overlaps
            yield "overlaps_predicted", partial(_overlaps_figure, overlaps)
        machine = run.config.get("machine")
        if machine is not None and len(tables[_GEMMS]):
            yield from _calibrate(run, str(machine))


def gemms_of(ok: pd.DataFrame) -> pd.DataFrame:
    """GEMMs as `calibrate` reads them: column-major, of `m` out features and `n` tokens; times in ms."""
    import pandas as pd

    # GEMMs on fewer SMs are no measurement of the whole GPU
    rows = ok[(ok[_OPERATION] == "gemm") & (ok["kernel.free_sms"] == 0)]
    columns = {"device": _device(rows), "precision": rows["kernel.precision"], "op": "gemm"}
    # column-major: C^T = B A^T, so that rows and columns change places
    columns |= {"m": rows["kernel.n"], "n": rows["kernel.m"], "k": rows["kernel.k"], "ta": "T", "tb": "N"}
    sizes = dict.fromkeys(("m", "n", "k"), "int64")
    return pd.DataFrame(columns | {"fwd_ms": 1e3 * rows["seconds"]}).astype(sizes if len(rows) else {})


def collectives_of(ok: pd.DataFrame) -> pd.DataFrame:
    """Collectives as `calibrate` reads them: messages in bytes of the larger buffer, times in ms."""
    import pandas as pd

    rows = ok[ok[_OPERATION] == "collective"]
    columns = {"device": _device(rows), "op_name": rows["kernel.collective"], "nccl_dtype": "int8"}
    columns |= {"num_gpus": rows["kernel.gpus"], "message_size": rows["kernel.num_bytes"]}
    sizes = dict.fromkeys(("num_gpus", "message_size"), "int64")
    return pd.DataFrame(columns | {"latency": 1e3 * rows["seconds"]}).astype(sizes if len(rows) else {})


def _device(rows: pd.DataFrame) -> pd.Series[Any]:
    """Name of the device that was measured."""
    return rows["engine"].str.split(", ").str[0]


def overlaps_of(ok: pd.DataFrame) -> pd.DataFrame:
    """A row for each GEMM and copy at once: shape, mover, SMs left free, measured and predicted time [s]."""
    import pandas as pd

    inside = ok[(ok[_OPERATION] == "copy") & (ok["kernel.mover"] == "kernel")]
    rows = ok[ok[_OPERATION] == "overlap"]
    if not len(rows) or not len(inside):
        return pd.DataFrame()
    # a copy inside the device reads and writes: twice its bytes
    memory = 2.0 * float(inside["bytes_per_s"].max())
    predicted = [_both_s(row, memory) for row in rows.to_dict("records")]
    shape = rows["kernel.m"].astype(int).astype(str)
    for name in ("n", "k"):
        shape = shape + "x" + rows[f"kernel.{name}"].astype(int).astype(str)
    about = {"shape": shape, "mover": rows["kernel.mover"], "free_sms": rows["kernel.free_sms"].astype(int)}
    times = {"copied_bytes": rows["kernel.num_bytes"], "gemm_s": rows["gemm_s"], "copy_s": rows["copy_s"]}
    both = {"measured_s": rows["seconds"], "predicted_s": np.array(predicted), "fitted": False}
    return pd.DataFrame({**about, **times, **both}).reset_index(drop=True)


def _both_s(row: dict[Any, Any], memory_bytes_per_s: float) -> float:
    """Time [s] of a GEMM and a copy that begin together, from each alone and the memory that they share."""
    m, n, k = (float(row[f"kernel.{name}"]) for name in ("m", "n", "k"))
    # A, B and C once each
    moved = ELEMENT_BYTES[row["kernel.precision"]] * (m * k + n * k + m * n)
    copied = float(row["kernel.num_bytes"]) * (2.0 if row["kernel.mover"] == "kernel" else 1.0)
    build = GraphBuilder()
    memory = build.resource("memory", memory_bytes_per_s)
    for name, traffic in (("gemm", moved), ("copy", copied)):
        alone = float(row[f"{name}_s"])
        # alone a task draws what it drew when measured; both share the memory
        build.task(name, name, uses={memory: 1.0}, work=traffic, cap=traffic / alone)
    return float(ENGINE.run(build.build()).makespan[0])


def _overlaps_figure(rows: pd.DataFrame) -> FigureSheet:
    error = float(np.median(np.abs(rows["predicted_s"] / rows["measured_s"] - 1)))
    title = f"A GEMM and a copy at once are predicted to {100 * error:.0f} % in the median"
    by: Any = "by " + rows["mover"] + np.where(rows["free_sms"] > 0, ", SMs left free", "")
    note = "from each alone and the memory they share"
    return charts.scatter(rows.assign(kind="GEMM and copy", by=by), by="by", frame=Frame(title, note))


def _calibrate(run: FinishedRun, machine: str) -> Iterator[tuple[str, Any]]:
    """The machine with constants fitted to some of the GEMMs, and its errors on the others."""
    tree = tree_of(machine)
    try:
        done = calibrate_rows(tree, read_table(run.folder / _GEMMS), run.folder / _GEMMS)
    except ConfigError as error:
        yield "calibration", {"machine": machine, "refused": str(error)}
        return
    errors = {
        f"{predicted.rows.precision} {predicted.rows.kind}": {
            "rows_fitted": predicted.num_fitted,
            **{model: None if result is None else asdict(result) for model, result in by_model.items()},
        }
        for predicted, by_model in done.held_out()
    }
    yield "calibration", {"machine": machine, "errors": errors}
    yield f"{tree.get('name', 'machine')}.yaml", dict(done.tree)
    yield "gemms_predicted", partial(_gemms_figure, table_of(done.found["fitted"], done.device.name))


def _gemms_figure(rows: pd.DataFrame) -> FigureSheet:
    error = charts.median_error(rows)
    title = f"GEMMs of the calibrated machine are {100 * (error or 0.0):.0f} % off in the median"
    frame = Frame("All GEMMs were fitted on: none is left to judge" if error is None else title, "hollow: fitted on")
    return charts.scatter(rows.assign(kind="GEMM"), by="precision", frame=frame)


STUDY = MeasureMyGpu()
