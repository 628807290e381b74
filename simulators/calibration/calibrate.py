"""Fitting a device's efficiency constants on a few measured rows, and saying how well the rest is predicted.

    python -m dse calibrate system=<name or YAML path> data=<csv> out=<folder>

Rows to fit on are chosen by their shapes alone, the same way for every device: no time is looked at, and none is
chosen again. What is not fitted on is tested.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml

from dse.errors import ConfigError, Problem, Problems, pairs
from dse.files import atomic_replacement, read_bytes
from dse.results.run_folder import Outputs
from simulators.calibration.fit import FEWEST, PRIORS, TYPICAL, Fitted, fit
from simulators.calibration.measurements import FLOAT_BYTES, Rows, read
from simulators.calibration.predictions import MODELS, Errors, Predicted, predicted_by, roofline
from simulators.calibration.rows import on_device
from simulators.hardware.device import Device, device_of, tree_of

if TYPE_CHECKING:
    import pandas as pd
    from rich.table import Table

# times the peak rate: milliseconds taken for seconds are beyond it (Winograd's F(4x4) needs a quarter of the FLOP)
_TOO_FAST = {"gemm": 3.0, "conv": 12.0, "recurrent": 3.0}
_TOO_SLOW = 200.0  # times the roofline, in the median: microseconds taken for milliseconds are beyond it
_TOO_FAST_LINK = 2e12  # bytes/s of a GPU in an all-reduce, beyond any link there is
_POOR_MEDIAN, _POOR_CORRELATION = 0.25, 0.95  # beyond which a fit is said to be poor
_AT_BOUND = 0.02  # of the logarithm
_FEW = 5  # times, whose correlation says little
LARGE_BYTES = 1e6
"""Payload of an all-reduce from which its bandwidth matters more than its latency."""


@dataclass(frozen=True)
class Calibration:
    """A device with fitted constants (`tree`: as its file holds it), and all its rows as each model predicts them."""

    device: Device
    tree: Mapping[str, Any]
    found: Mapping[str, Sequence[Predicted]]

    def held_out(self) -> Iterator[tuple[Predicted, Mapping[str, Errors | None]]]:
        """Each set of rows, with the errors of every model on what was not fitted on."""
        for place, own in enumerate(self.found["fitted"]):
            yield own, {model: self.found[model][place].errors for model in MODELS}


def calibrate(words: Sequence[str]) -> int:
    """`calibrate system=<name or YAML path> data=<csv> out=<folder>`: fit a device's constants and test them."""
    from dse.results import report

    given = pairs(words, {"system": "", "data": "", "out": ""})
    tree, file, outputs = tree_of(given["system"]), Path(given["data"]), Outputs(Path(given["out"]))
    target = outputs.folder / f"{tree.get('name')}.yaml"
    if target.exists() and Path(given["system"]).exists() and target.samefile(given["system"]):
        raise ConfigError(
            [Problem("out", "would write over the system that is calibrated", given["out"], "name another")]
        )
    done = calibrate_rows(tree, read(file), file)
    try:
        outputs.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            [Problem("out", f"cannot be made ({error.strerror})", given["out"], "name another")]
        ) from None
    _write(done, outputs)
    console = report.console()
    console.print(_table(done))
    for text in (*poor(done), *at_bounds(done)):
        console.print(text)
    written = f"{target.name}, errors.json, residuals.csv, figures/calibration.png"
    console.print(f"written to {outputs.folder}/: {written}", soft_wrap=True)
    return 0


def calibrate_rows(tree: Mapping[str, Any], rows: Sequence[Rows], file: Path) -> Calibration:
    """A device fitted on some rows of one file and held against the others. Raises ConfigError.

    Constants of precisions of which the file has no rows stay, and so does the server where it has no all-reduces.
    """
    device = device_of(tree)
    label, own = _own(device, rows, file)
    _check(device, own, file)
    num_gpus = 8 if device.server is None else device.server.num_gpus
    told = _constants(fit(device, own, num_gpus=num_gpus), file)
    made = {**tree, "measured_as": label, **{name: value for name, value in told.items() if name == "server"}}
    for name in ("efficiency", "fitted_on", "sources"):
        made[name] = {**dict(tree.get(name) or {}), **told.get(name, {})}
    finished = device_of(made)
    found = {model: [one for rows in own if (one := predicted_by(model, finished, rows))] for model in MODELS}
    done = Calibration(finished, made, found)
    note = {f"{one.rows.precision} {one.rows.kind}": _rounded(errors["fitted"]) for one, errors in done.held_out()}
    return replace(done, tree={**made, "note": {"on rows not fitted on": note}})


def _own(device: Device, rows: Sequence[Rows], file: Path) -> tuple[str, list[Rows]]:
    """The rows of a device in a table, and what it is called there: its own name for it, or the only one there is."""
    names = sorted({one.device for one in rows})
    label = device.measured_as if device.measured_as in names else names[0]
    if len(names) > 1 and label != device.measured_as:
        rule = f"is called {device.measured_as} in tables, and {file.name} has rows of {', '.join(names)}"
        raise ConfigError([Problem("system.measured_as", rule, way_out="name the one that is meant")])
    if device.measured_as not in ("", label):
        print(f"{file.name} has rows of {label}; {device.name} says measured_as: {device.measured_as}", file=sys.stderr)
    if len(names) > 1:
        print(f"{file.name}: rows of {label} are taken, those of {len(names) - 1} others are not", file=sys.stderr)
    return label, [one for one in rows if one.device == label]


def _check(device: Device, rows: Sequence[Rows], file: Path) -> None:
    """There must be rows enough, a peak rate for each precision, and no time that no unit of ms would explain."""
    check = Problems()
    for precision in dict.fromkeys(one.precision for one in rows if one.kind != "allreduce"):
        if device.gpu.peak(precision) is None:
            rule = f"is missing: {file.name} has rows of this precision"
            check.add(f"system.gpu.flop_per_s.{precision}", rule, way_out="give the peak rate of the data sheet")
    check.done()
    counts = {(one.precision, one.kind): one.size for one in rows}
    for precision in dict.fromkeys(precision for precision, kind in counts if kind != "allreduce"):
        count = counts.get((precision, "gemm"), 0)
        if count < FEWEST["gemm"]:
            rule = f"has too few rows to fit on: {count} GEMMs at {precision}, at least {FEWEST['gemm']} are needed"
            check.add(file.name, rule)
    for (precision, kind), count in counts.items():
        if kind != "gemm" and count < FEWEST[kind]:
            check.add(
                file.name, f"has too few rows to fit on: {count} of {kind} at {precision}, {FEWEST[kind]} are needed"
            )
    for one in rows:
        if one.kind == "allreduce":
            _check_rates(check, one, file)
        else:
            _check_times(check, device, one, file)
    check.done()


def _check_times(check: Problems, device: Device, rows: Rows, file: Path) -> None:
    """Times that are faster than the device can be, or absurdly slow, are in another unit."""
    work = on_device(device, TYPICAL, rows)
    least = roofline(device, rows, work.flop, traffic=work.bytes)
    peak = device.gpu.peak(rows.precision)
    assert peak is not None
    rate = work.flop / rows.seconds
    for row, column in np.argwhere(rate > _TOO_FAST[rows.kind] * peak)[:10]:
        where = f"{file.name}, line {rows.lines[row]}, {rows.passes[column]}_ms"
        said = f"would be {rate[row, column] / 1e12:.3g} TFLOP/s on a device of {peak / 1e12:.3g}"
        value = float(f"{rows.seconds[row, column] * 1e3:.6g}")
        check.add(where, f"{said}: is it in seconds?", value=value, way_out="write milliseconds")
    slow = float(np.nanmedian(rows.seconds / least))
    if slow > _TOO_SLOW:
        said = f"take {slow:.0f} times as long as the data sheet lets expect (median): are they in microseconds?"
        check.add(file.name, f"times of {rows.kind} at {rows.precision} {said}", way_out="write milliseconds")


def _check_rates(check: Problems, rows: Rows, file: Path) -> None:
    """All-reduces that are faster than any link are in another unit."""
    gpus, payload = rows.shape["gpus"], FLOAT_BYTES * rows.shape["floats"]
    rate = 2 * (gpus - 1) / gpus * payload / rows.seconds[:, 0]
    for row in np.flatnonzero(rate > _TOO_FAST_LINK)[:10]:
        said = f"would be {rate[row] / 1e9:.3g} GB/s a GPU: is it in seconds?"
        where = f"{file.name}, line {rows.lines[row]}, mean_ms"
        check.add(where, said, value=float(f"{rows.seconds[row, 0] * 1e3:.6g}"), way_out="write milliseconds")


def _constants(fitted: Fitted, file: Path) -> dict[str, Any]:
    """What a device file says of fitted constants and where they are from."""
    content = hashlib.sha256(read_bytes(file, "data")).hexdigest()[:16]
    found: dict[str, Any] = {"sources": {}}
    for precision, constants in fitted.efficiency.items():
        held = {kind: len(names) for kind, names in fitted.fitted_on[precision].items() if kind != "allreduce"}
        said = ", ".join(f"{count} {kind} rows" for kind, count in held.items())
        found.setdefault("efficiency", {})[precision] = {
            name: float(f"{value:.5g}") for name, value in constants.model_dump().items()
        }
        source = f"dse calibrate on {said} of {file.name} (sha256 {content}...)"
        found["sources"][f"efficiency.{precision}"] = {"provenance": "calibrated", "source": source}
    if fitted.server is not None:
        found["server"] = {
            name: value if isinstance(value, int) else float(f"{value:.5g}")
            for name, value in fitted.server.model_dump(exclude_none=True).items()
        }
        source = f"dse calibrate on all-reduce rows of {file.name} (sha256 {content}...)"
        found["sources"]["server"] = {"provenance": "calibrated", "source": source}
    found["fitted_on"] = {
        precision: {kind: list(names) for kind, names in kinds.items()} for precision, kinds in fitted.fitted_on.items()
    }
    return found


def _rounded(errors: Errors | None) -> dict[str, float] | str:
    if errors is None:
        return "every row was fitted on"
    return {name: float(f"{value:.4g}") for name, value in asdict(errors).items()}


def poor(done: Calibration) -> Iterator[str]:
    """What is not predicted well, in words."""
    for own, errors in done.held_out():
        fitted, name = errors["fitted"], f"{own.rows.precision} {own.rows.kind}"
        if fitted is None:
            yield f"not tested: every {name} row was fitted on"
        elif fitted.median > _POOR_MEDIAN or (fitted.count > _FEW and fitted.log_correlation < _POOR_CORRELATION):
            yield (
                f"a poor fit: {name} is off by {100 * fitted.median:.0f} % (median; log-correlation"
                f" {fitted.log_correlation:.3f}) on rows not fitted on; do not rely on it"
            )


def at_bounds(done: Calibration) -> Iterator[str]:
    """Constants that a fit pushed to the end of what is allowed, in words."""
    for precision, constants in done.device.efficiency.items():
        for name, value in constants.model_dump().items():
            ends = (PRIORS[name].low, PRIORS[name].high)
            if min(abs(np.log(value / end)) for end in ends) < _AT_BOUND:
                yield f"{precision}: {name} = {value:g} is at the end of its range ({ends[0]:g} to {ends[1]:g})"


def errors_of(done: Calibration) -> dict[str, Any]:
    """`errors.json`: by kind at fp32 and at the worst precision, and everything by precision, kind and model."""
    sets = list(done.held_out())
    every: dict[str, Any] = {}
    for own, errors in sets:
        kinds = every.setdefault(own.rows.precision, {})
        kinds[own.rows.kind] = {model: asdict(error) if error else None for model, error in errors.items()}

    held = [(own.rows.kind, own.rows.precision, errors["fitted"]) for own, errors in sets if errors["fitted"]]
    return {
        **told_errors(held),
        "allreduce_median_1mb": large_median([own for own, _ in sets]),
        "worst_precision": told_errors([(kind, "", errors) for kind, _, errors in held]),
        "poor": list(poor(done)),
        "precisions": every,
    }


def told_errors(held: Sequence[tuple[str, str, Errors]]) -> dict[str, float | None]:
    """The largest error of each kind among (kind, precision, errors): at fp32, or at any where no fp32 is there."""
    plain = [one for one in held if one[1] == "fp32"] or held

    def worst(kind: str, what: str) -> float | None:
        return max((getattr(errors, what) for name, _, errors in plain if name == kind), default=None)

    return {
        "gemm_median": worst("gemm", "median"),
        "gemm_p90": worst("gemm", "p90"),
        "conv_median": worst("conv", "median"),
        "recurrent_median": worst("recurrent", "median"),
        "allreduce_median": worst("allreduce", "median"),
    }


def large_median(found: Sequence[Predicted]) -> float | None:
    """Median error of all-reduces of 1 MB and more that were not fitted on; None where there are none."""
    for one in found:
        if one.rows.kind == "allreduce":
            places = (FLOAT_BYTES * one.rows.shape["floats"] >= LARGE_BYTES) & ~one.fitted
            errors = Errors.of(one.seconds[places], one.rows.seconds[places])
            return errors.median if errors else None
    return None


def _write(done: Calibration, outputs: Outputs) -> None:
    """The device file, every row with what is predicted, the errors and a figure."""
    from dse import plots
    from dse.plots import predictions

    text = yaml.safe_dump(dict(done.tree), sort_keys=False, allow_unicode=True, width=120)
    with atomic_replacement(outputs.folder / f"{done.device.name}.yaml") as fresh:
        fresh.write_text(text, encoding="utf-8")
    rows = table_of(done.found["fitted"], done.device.name)
    with atomic_replacement(outputs.folder / "residuals.csv") as fresh:
        rows.to_csv(fresh, index=False)
    outputs.write_json("errors", errors_of(done))
    figure = predictions.scatter(rows, by="precision", title=f"{done.device.name}: precision")
    plots.save(figure, outputs.figures, "calibration")


def table_of(found: Sequence[Predicted], device: str) -> pd.DataFrame:
    """A row for every measured time: device, precision, kind, shape, pass, both times, work, and if it was fitted."""
    import pandas as pd

    parts = []
    for one in found:
        for column, name in enumerate(one.rows.passes):
            part = pd.DataFrame(
                {
                    "device": device,
                    "precision": one.rows.precision,
                    "kind": one.rows.kind,
                    "shape": one.rows.names,
                    "line": one.rows.lines,
                    "pass": name,
                    "measured_s": one.rows.seconds[:, column],
                    "predicted_s": one.seconds[:, column],
                    "flop": one.flop[:, column],
                    "bytes": one.bytes[:, column],
                    "fitted": one.fitted,
                }
            )
            parts.append(part.dropna(subset=["measured_s"]))
    return pd.concat(parts, ignore_index=True)


def _table(done: Calibration) -> Table:
    from rich.table import Table

    shown = Table(title=f"{done.device.name}: errors on rows that were not fitted on, median / 90th percentile")
    for name in ("precision", "kind", "fitted on", "times tested", *MODELS, "log-correlation"):
        shown.add_column(name, justify="left" if name in ("precision", "kind") else "right")
    for own, errors in done.held_out():
        cells = [f"{100 * one.median:.1f} / {100 * one.p90:.0f} %" if one else "–" for one in errors.values()]
        fitted = errors["fitted"]
        counts = [str(own.num_fitted), str(fitted.count if fitted else 0)]
        last = f"{fitted.log_correlation:.4f}" if fitted else "–"
        shown.add_row(own.rows.precision, own.rows.kind, *counts, *cells, last)
    return shown
