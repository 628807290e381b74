"""Operator costs against measured tables: a design is a device, a kind of operator and a model that predicts it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel

from dse import plugins
from dse.backend import Backend, Batch, Metric, Result, Results, Tree
from dse.config.options import conf_dir
from dse.errors import Problems, did_you_mean, nearest, validate_as
from dse.space import get_path
from dse.values import Frozen
from dse.values.units import Bytes, BytesPerSecond, Integer, illegal
from dse_calibration.measurements import MeasuredRows
from dse_calibration.predictions import MODELS, PredictedRows, peers, predicted_by, refusal
from dse_calibration.rows import cost_of
from dse_calibration.tables import is_of, read_folder
from simulators.hardware.device import Device
from simulators.hardware.machine import tree_of
from simulators.hardware.network import Topology

_VERSION = "7"  # part of every result's key: raised where errors of predictions change
_SECTIONS = ("devices", "predict", "data_dir")


def _model(name: str) -> str:
    if name not in MODELS and name not in peers():
        known = (*MODELS, *peers())
        raise illegal(f"must be {', '.join(known[:-1])} or {known[-1]}", nearest(name, known) or None)
    return name


class Predict(Frozen):
    """The model that predicts times: one of `dse_calibration.predictions.MODELS` or `peers()`.

    kinds: kinds of rows that are predicted; null for all. least_bytes: of collectives, smaller ones do not count.
    """

    # peers come from plug-ins, so that no list of names is complete here
    model: Annotated[str, AfterValidator(_model)] = "fitted"
    kinds: tuple[str, ...] | None = None
    least_bytes: Bytes = 0.0


class MeasuredTable(Frozen):
    """Measured rows of a device (by its name in tables), a precision and a kind. content: their hash; note: folder."""

    device: str
    precision: str
    kind: str
    content: str
    note: str


class Links(Frozen):
    """How the GPUs of a node are linked: what simulators of others are set up by."""

    topology: Topology
    num_gpus: Integer
    link_bytes_per_s: BytesPerSecond

    @property
    def port_bytes_per_s(self) -> float | None:
        """Rate [bytes/s] of a GPU at a switch, each way; None for other topologies."""
        # links of a mesh, as one port
        return self.link_bytes_per_s * (self.num_gpus - 1) if self.topology == "switch" else None

    @classmethod
    def tree_of(cls, system: Tree) -> dict[str, Any] | None:
        """Links of a system's tree; None where it does not say them all."""
        node = system.get("node") or {}
        links = {name: node.get(name) for name in cls.model_fields}
        return None if None in links.values() else links


class MeasuredDesign(Frozen):
    """A device, rows measured on it, the model that predicts them, and the links of the device's node."""

    system: Device
    table: MeasuredTable
    predict: Predict
    links: Links | None = None

    @property
    def port_bytes_per_s(self) -> float | None:
        """Rate [bytes/s] of a GPU at the switch of its node, each way; None where there is none."""
        return None if self.links is None else self.links.port_bytes_per_s


@plugins.cached_until_refresh
def tables(folder: str) -> tuple[MeasuredRows, ...]:
    """All measured rows below a folder. Raises ConfigError."""
    return tuple(read_folder(Path(folder)))


def predict_rows(design: MeasuredDesign) -> PredictedRows | None:
    """Predict the rows of a design; None if the device has no constants for them."""
    return predicted_by(design.predict.model, design.system, _rows(design.table), design.port_bytes_per_s)


def _rows(table: MeasuredTable) -> MeasuredRows:
    wanted = (table.device, table.precision, table.kind, table.content)
    return next(
        rows for rows in tables(table.note) if (rows.device, rows.precision, rows.kind, _content(rows)) == wanted
    )


def rows_of(device: Device, measured: Sequence[MeasuredRows]) -> list[MeasuredRows]:
    """Measured rows of a device, of collectives those of its node's library."""
    library = None if device.node is None or device.node.library is None else device.node.library.name
    return [rows for rows in measured if is_of(rows, device.gpu.measured_as) and rows.library in ("", library)]


class MeasuredBackend(Backend):
    """Errors of predictions, one design at a time."""

    batch = 64  # a table each: more at once save nothing
    version = _VERSION
    metrics: Mapping[str, Metric] = {
        "median_error": Metric("fraction", "median of |predicted / measured - 1| over rows not fitted on"),
        "signed_error": Metric("fraction", "median of predicted / measured - 1 over the same", low=-1.0),
        "p90_error": Metric("fraction", "90th percentile of the same"),
        "far_off": Metric("fraction", "share of times off by more than a factor 1.5", high=1.0),
        "log_correlation": Metric("", "Pearson's correlation of the logarithms", "maximize", low=-1.0, high=1.0),
        "rank_correlation": Metric("", "Spearman's correlation", "maximize", low=-1.0, high=1.0),
        "times_tested": Metric("", "measured times that errors are over", "maximize"),
        "rows_fitted": Metric("", "shapes that the constants were fitted on"),
    }

    def sections(self, tree: Tree) -> None:
        """Check the sections: `devices`, `predict` and optionally `data_dir`."""
        check = Problems()
        for name in set(tree) - set(_SECTIONS):
            # a section that other backends have
            way = "list them: devices=[p100]" if name == "system" else did_you_mean(name, _SECTIONS)
            check.add(name, "is not a known section", way_out=way)
        names = tree.get("devices")
        listed = isinstance(names, Sequence) and not isinstance(names, str) and names
        if not (listed and all(isinstance(name, str) for name in names or ())):
            check.add("devices", "must list systems, by name or as paths of YAML files: devices=[p100]", value=names)
        check.model(Predict, tree.get("predict", {}), path="predict")
        check.done()

    def scenarios(self, tree: Tree) -> Mapping[str, Tree]:
        """Scenarios, one for each device, precision and kind of operator with measured rows and constants."""
        folder = str(tree.get("data_dir") or conf_dir() / "data")
        measured, trees, check = tables(folder), dict[str, Tree](), Problems()
        seen: dict[str, str] = {}
        kinds = tree.get("predict", {}).get("kinds")
        for name in tree["devices"]:
            system = tree_of(name)
            device = Device.of(system, name)
            if seen.setdefault(device.name, name) != name:  # titles of scenarios are names of devices
                check.add("devices", f"and {seen[device.name]} are both called {device.name}", value=name)
            device_rows = rows_of(device, measured)
            if not device_rows:
                there = ", ".join(sorted({rows.device for rows in measured}))
                label = device.gpu.measured_as or "nothing"
                rule = f"is measured as {label}: {folder} has no rows of it, only of {there}"
                check.add("devices", rule, value=name, way_out="add study.data_dir=<folder of its table>")
            before = len(trees)
            for rows in (rows for rows in device_rows if kinds is None or rows.kind in kinds):
                # no constants for these rows: an error only if there are none for any row
                if cost_of(device, rows) is not None:
                    title = f"{device.name} {rows.precision} {rows.kind}"
                    trees[title] = {
                        "system": system,
                        "table": _table_tree(rows, folder),
                        "predict": tree.get("predict", {}),
                        "links": Links.tree_of(system),
                    }
                    self._check_reach(check, device, rows, name)
            if device_rows and len(trees) == before:
                way = "`python -m dse machine calibrate` fits them, and writes a file to name here"
                check.add("devices", "has no constants for any row", value=name, way_out=way)
        check.done()
        return trees

    def _check_reach(self, check: Problems, device: Device, rows: MeasuredRows, name: str) -> None:
        """Note a problem if a ring leaves the node and the rate of the network is missing."""
        node = device.node
        # rings of one library over any number of GPUs
        if rows.kind != "allreduce" or node is None or node.library is None:
            return
        if node.library.network_bytes_per_s is not None:
            return
        most = int(rows.shape["gpus"].max())
        if most > node.num_gpus:
            rule = f"is missing: a table has all-reduces of {most} GPUs, the node has {node.num_gpus}"
            check.add(
                f"{name}: node.library.network_bytes_per_s", rule, way_out="calibrate it with such rows, or give it"
            )

    def design(self, tree: Tree) -> MeasuredDesign:
        """Validate a design. Raises ConfigError with every problem."""
        return validate_as(MeasuredDesign, tree, path="")

    def condition(self, path: str, tree: Tree) -> Mapping[str, Any] | None:
        """Accept `predict.model` as the only knob."""
        return {} if path == "predict.model" and get_path(tree, path) is not None else None

    def evaluate(self, batches: Sequence[Batch]) -> list[Results]:
        """Compute the errors of each design."""
        # tables differ in shape: nothing to share
        return [Results.of([self._evaluate_design(design) for design in batch.designs()]) for batch in batches]

    def _evaluate_design(self, design: BaseModel) -> Result:
        assert isinstance(design, MeasuredDesign)
        if why := refusal(design.predict.model, _rows(design.table), design.port_bytes_per_s):
            return Result("unsupported", reason=why)  # a property of model and table, not a failure
        predicted = predict_rows(design)
        errors = predicted.errors_from(design.predict.least_bytes) if predicted else None
        if predicted is None or errors is None:
            return Result("unsupported", reason="every measured row was fitted on: none is left to test")
        metrics = {
            "median_error": errors.median,
            "signed_error": errors.signed,
            "p90_error": errors.p90,
            "far_off": errors.far,
            "log_correlation": errors.log_correlation,
            "rank_correlation": errors.rank_correlation,
            "times_tested": float(errors.count),
            "rows_fitted": float(predicted.num_fitted),
        }
        return Result("ok", metrics, engine=design.predict.model)

    def models(self, design: BaseModel) -> Mapping[str, str]:
        """Model that predicts the rows of a kind of operator."""
        assert isinstance(design, MeasuredDesign)
        return {design.table.kind: design.predict.model}

    def facts(self, design: BaseModel) -> Sequence[tuple[str, Any, str, str]]:
        """Constants of the device with their sources."""
        assert isinstance(design, MeasuredDesign)
        return list(design.system.facts())


def _table_tree(rows: MeasuredRows, folder: str) -> dict[str, str]:
    """Identify measured rows, as the tree of a `MeasuredTable`."""
    named = {"device": rows.device, "precision": rows.precision, "kind": rows.kind}
    return {**named, "content": _content(rows), "note": folder}


def _content(rows: MeasuredRows) -> str:
    """Hash of measured rows."""
    # 128 bits are enough to keep tables apart
    return hashlib.sha256(repr(rows.names).encode() + rows.seconds.tobytes()).hexdigest()[:32]
