"""Operator costs held against measured tables: a design is a device, a kind of operator and what predicts it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel

from dse import plugins
from dse.backend import Backend, Batch, Metric, Result, Results, Tree
from dse.config.compose import conf_dir
from dse.errors import Problems, did_you_mean
from dse.space import get_path
from dse.values import Frozen
from simulators.calibration.measurements import Rows, read_folder
from simulators.calibration.predictions import Predicted, predicted_by
from simulators.calibration.rows import cost_of
from simulators.hardware.device import Device, device_of, tree_of

_VERSION = "1"
_SECTIONS = ("devices", "predict", "data_dir")


class Predict(Frozen):
    """What times are predicted by: one of `simulators.calibration.predictions.MODELS`."""

    model: Literal["fitted", "roofline", "nearest"] = "fitted"


class Table(Frozen):
    """Measured rows of a device as tables call it, a precision and a kind. content: their hash. note: the folder."""

    device: str
    precision: str
    kind: str
    content: str
    note: str


class Design(Frozen):
    """A device, rows that were measured on it, and what predicts them."""

    system: Device
    table: Table
    predict: Predict


@plugins.cached_until_refresh
def tables(folder: str) -> tuple[Rows, ...]:
    """All measured rows below a folder. Raises ConfigError."""
    return tuple(read_folder(Path(folder)))


def predict_rows(design: Design) -> Predicted | None:
    """The rows of a design, predicted; None where the device has no constants for them."""
    return predicted_by(design.predict.model, design.system, _rows(design.table))


def _rows(table: Table) -> Rows:
    wanted = (table.device, table.precision, table.kind)
    return next(one for one in tables(table.note) if (one.device, one.precision, one.kind) == wanted)


class MeasuredBackend(Backend):
    """Errors of predictions, one design at a time."""

    batch = 64
    version = _VERSION
    metrics: Mapping[str, Metric] = {
        "median_error": Metric("fraction", "median of |predicted / measured - 1| over rows not fitted on"),
        "p90_error": Metric("fraction", "90th percentile of the same"),
        "far_off": Metric("fraction", "share of times off by more than a factor 1.5", high=1.0),
        "log_correlation": Metric("", "Pearson's correlation of the logarithms", "maximize", low=-1.0, high=1.0),
        "rank_correlation": Metric("", "Spearman's correlation", "maximize", low=-1.0, high=1.0),
        "times_tested": Metric("", "measured times that errors are over", "maximize"),
        "rows_fitted": Metric("", "shapes that the constants were fitted on"),
    }

    def sections(self, tree: Tree) -> None:
        """`devices`, `predict` and perhaps `data_dir`."""
        check = Problems()
        for name in set(tree) - set(_SECTIONS):
            way = "list them: devices=[p100]" if name == "system" else did_you_mean(name, _SECTIONS)
            check.add(name, "is not a known section", way_out=way)
        names = tree.get("devices")
        listed = isinstance(names, Sequence) and not isinstance(names, str) and names
        if not (listed and all(isinstance(name, str) for name in names or ())):
            check.add("devices", "must list systems, by name or as paths of YAML files: devices=[p100]", value=names)
        check.model(Predict, tree.get("predict", {}), path="predict")
        check.done()

    def scenarios(self, tree: Tree) -> Mapping[str, Tree]:
        """One for each device, precision and kind of operator that was measured and that has constants."""
        folder = str(tree.get("data_dir") or conf_dir() / "data")
        known, found, check = tables(folder), dict[str, Tree](), Problems()
        seen: dict[str, str] = {}
        for name in tree["devices"]:
            system = tree_of(name)
            device = device_of(system, name)
            if seen.setdefault(device.name, name) != name:
                check.add("devices", f"and {seen[device.name]} are both called {device.name}", value=name)
            own = [rows for rows in known if rows.device == device.measured_as]
            if not own:
                there = ", ".join(sorted({rows.device for rows in known}))
                rule = (
                    f"is measured as {device.measured_as or 'nothing'}, of which {folder} has no rows (but of {there})"
                )
                check.add("devices", rule, value=name, way_out="add study.data_dir=<folder of its table>")
            before = len(found)
            for rows in own:
                if cost_of(device, rows) is not None:
                    title = f"{device.name} {rows.precision} {rows.kind}"
                    found[title] = {"system": system, "table": _told(rows, folder), "predict": tree.get("predict", {})}
                    self._check_reach(check, device, rows, name)
            if own and len(found) == before:
                way = "python -m dse calibrate fits them, and writes a file to name here"
                check.add("devices", "has no constants for any row", value=name, way_out=way)
        check.done()
        return found

    def _check_reach(self, check: Problems, device: Device, rows: Rows, name: str) -> None:
        """Rings that leave the server need the rate of the network."""
        server = device.server
        if rows.kind != "allreduce" or server is None or server.network_bytes_per_s is not None:
            return
        most = int(rows.shape["gpus"].max())
        if most > server.num_gpus:
            rule = f"is missing: a table has all-reduces of {most} GPUs, the server has {server.num_gpus}"
            check.add(f"{name}: server.network_bytes_per_s", rule, way_out="calibrate it with such rows, or give it")

    def design(self, tree: Tree) -> Design:
        """A validated design."""
        check = Problems()
        found = check.model(Design, tree, path="")
        check.done()
        assert found is not None
        return found

    def condition(self, path: str, tree: Tree) -> Mapping[str, Any] | None:
        """What predicts is a knob."""
        return {} if path == "predict.model" and get_path(tree, path) is not None else None

    def evaluate(self, batches: Sequence[Batch]) -> list[Results]:
        """Errors of each design."""
        return [Results.of([self._one(design) for design in batch.designs()]) for batch in batches]

    def _one(self, design: BaseModel) -> Result:
        assert isinstance(design, Design)
        found = predict_rows(design)
        errors = found.errors if found else None
        if found is None or errors is None:
            return Result("unsupported", reason="every measured row was fitted on: none is left to test")
        metrics = {
            "median_error": errors.median,
            "p90_error": errors.p90,
            "far_off": errors.far,
            "log_correlation": errors.log_correlation,
            "rank_correlation": errors.rank_correlation,
            "times_tested": float(errors.count),
            "rows_fitted": float(found.num_fitted),
        }
        return Result("ok", metrics, engine=design.predict.model)

    def facts(self, design: BaseModel) -> Sequence[tuple[str, Any, str, str]]:
        """Constants of the device with their sources."""
        assert isinstance(design, Design)
        return list(design.system.facts())


def _told(rows: Rows, folder: str) -> dict[str, str]:
    """What identifies rows."""
    content = hashlib.sha256(repr(rows.names).encode() + rows.seconds.tobytes()).hexdigest()[:32]
    return {
        "device": rows.device,
        "precision": rows.precision,
        "kind": rows.kind,
        "content": content,
        "note": folder,
    }
