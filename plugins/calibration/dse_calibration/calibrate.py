"""Fit of a device's efficiency constants on a few measured rows, tested on the others.

    python -m dse machine calibrate system=<name or YAML path> data=<csv> out=<folder>

The rows to fit on are chosen by their shapes alone, in the same way for every device: the choice uses no time and is
never revised. All other rows test the fit.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dse.errors import ConfigError, Problem, Problems, pairs
from dse.files import atomic_replacement, read_bytes
from dse.results.run_folder import Outputs
from dse_calibration.collectives import ANY_PRECISION, COLLECTIVE_ROWS, holds_collectives, read_collectives
from dse_calibration.fit import (
    CAST_PRIOR,
    FEWEST,
    LIBRARY_PRIORS,
    PRIORS,
    TYPICAL,
    FittedConstants,
    fit,
)
from dse_calibration.foreign import open_table
from dse_calibration.layouts import layout_of, read_gemms, read_streams
from dse_calibration.machine_file import write_machine
from dse_calibration.measurements import FLOAT_BYTES, STREAM_KINDS, MeasuredRows, read
from dse_calibration.predictions import MODELS, Errors, PredictedRows, predicted_by, roofline
from dse_calibration.residual_groups import own_groups
from dse_calibration.residual_rows import rows_of_predicted
from dse_calibration.rows import cast_lines, on_device
from dse_calibration.slowdowns import holds_slowdowns, with_contention
from simulators.hardware.device import Device
from simulators.hardware.machine import merged, peak_format, tree_of
from simulators.hardware.network import Protocols, SwitchRate
from simulators.hardware.residuals import (
    OWN,
    OWN_GROUPS,
    ResidualGroup,
    name_in_tables,
    shipped_residuals,
)

if TYPE_CHECKING:
    import pandas as pd
    from rich.table import Table

# times the peak rate; reported when seconds are read as milliseconds (Winograd's F(4x4) needs a quarter of the FLOP)
_TOO_FAST = {"gemm": 3.0, "conv": 12.0, "recurrent": 3.0}
_TOO_SLOW = 200.0  # times the roofline, in the median; reported when microseconds are read as milliseconds
_FAR_FASTER = 50.0  # than the time at typical constants: reported when some rows are in a larger unit than others
_ONE_UNIT = "give every time in the unit of its column"
_TOO_FAST_LINK = 2e12  # bytes/s of a GPU in an all-reduce, faster than any existing link
_POOR_MEDIAN, _POOR_CORRELATION = 0.25, 0.95  # bounds beyond which a fit is reported as poor
_AT_BOUND = 0.02  # of the logarithm
_TOLERANCE = 0.02  # of a constant, that a fit to the same rows may differ by
_NOTE = "on rows not fitted on"
_FEW = 5  # times up to which a correlation is not meaningful
LARGE_BYTES = 1e6
"""Payload of an all-reduce from which its bandwidth matters more than its latency."""


@dataclass(frozen=True)
class Calibration:
    """A device with fitted constants, the `tree` of its file, and the predictions of its rows by model (`found`)."""

    device: Device
    tree: Mapping[str, Any]
    found: Mapping[str, Sequence[PredictedRows]]

    def held_out(self) -> Iterator[tuple[PredictedRows, Mapping[str, Errors | None]]]:
        """Yield each set of rows with the errors of every model on the rows not fitted on."""
        for place, predicted in enumerate(self.found["fitted"]):
            yield predicted, {model: self.found[model][place].errors for model in MODELS}


def calibrate(words: Sequence[str]) -> int:
    """`machine calibrate system=<name or YAML path> data=<csv> out=<folder>`: fit and test a device's constants."""
    from dse.results import report

    options = pairs(words, {"system": "", "data": "", "out": ""})
    tree, file, outputs = tree_of(options["system"]), Path(options["data"]), Outputs(Path(options["out"]))
    target = outputs.folder / f"{tree.get('name')}.yaml"
    # a calibration must not feed on itself
    if target.exists() and Path(options["system"]).exists() and target.samefile(options["system"]):
        raise ConfigError(
            [Problem("out", "would write over the system that is calibrated", options["out"], "name another")]
        )
    console = report.console()
    if holds_slowdowns(open_table(file).columns):
        source = f"dse machine calibrate on {file.name}: medians over its rows (dse_calibration/slowdowns.py)"
        write_machine(with_contention(tree, file, _calibrated(source, file, by="slowdowns")), outputs)
        console.print(f"written to {outputs.folder}/: {target.name}, with contention of its own", soft_wrap=True)
        return 0
    done = calibrate_rows(tree, read_table(file), file)
    _write(done, outputs)
    console.print(_table(done))
    for text in (
        *poor(done),
        *at_bounds(done),
        *cast_lines(done.device, (predicted.rows for predicted in done.found["fitted"])),
        *interval_lines(intervals(done, file.name)),
    ):
        console.print(text)
    written = f"{target.name}, errors.json, residuals.csv, figures/calibration.png"
    console.print(f"written to {outputs.folder}/: {written}", soft_wrap=True)
    return 0


def read_table(file: Path) -> list[MeasuredRows]:
    """Measured rows of a table in any known layout. Raises ConfigError."""
    columns = open_table(file).columns
    if holds_collectives(columns):
        return read_collectives(file)
    return [*read_gemms(file), *read_streams(file)] if layout_of(columns) else read(file)


def calibrate_rows(tree: Mapping[str, Any], rows: Sequence[MeasuredRows], file: Path) -> Calibration:
    """Fit a device on some rows of one file and test it on the others. Raises ConfigError.

    The constants of a precision without rows in the file stay, and so does the node without all-reduces.
    """
    device = Device.of(tree)
    label, device_rows = _rows_of_device(device, rows, file)
    _check(device, device_rows, file)
    num_gpus = 8 if device.node is None else device.node.num_gpus
    constants = _constants(fit(device, device_rows, num_gpus=num_gpus), file)  # on some of the rows, chosen by shape
    # so that the fitted device is found in the same table again
    new_tree = merged(tree, {**constants, "gpu": {**constants["gpu"], "measured_as": device.gpu.measured_as or label}})
    fitted_device = Device.of(new_tree)
    predictions = {
        model: [predicted for group in device_rows if (predicted := predicted_by(model, fitted_device, group))]
        for model in MODELS
    }
    done = Calibration(fitted_device, new_tree, predictions)
    note = {
        f"{predicted.rows.precision} {predicted.rows.kind}": _round_errors(errors["fitted"])
        for predicted, errors in done.held_out()
    }
    earlier = tree["gpu"].get("note")
    text = {} if isinstance(earlier, dict) or not earlier else {"before": earlier}  # notes of the user stay
    groups = [asdict(group) for group in intervals(done, file.name)]
    return replace(done, tree=merged(new_tree, {"gpu": {"note": {**text, _NOTE: note, OWN_GROUPS: groups}}}))


def intervals(done: Calibration, source: str) -> list[ResidualGroup]:
    """Groups of residuals of this machine, of the rows that nothing was fitted on; few rows borrow from its GPU's."""
    gpu = name_in_tables(done.device.gpu)
    rows = [row for predicted in done.found["fitted"] for row in rows_of_predicted(predicted, gpu, f"{OWN}{source}")]
    groups = own_groups(rows, shipped_residuals())
    names = ("low", "median", "high")
    return [replace(group, **{name: round(getattr(group, name), 4) for name in names}) for group in groups]


def interval_lines(groups: Sequence[ResidualGroup]) -> Iterator[str]:
    """Yield the widths of the intervals of each kind by groups of one machine, and before; of wider parts, too."""
    for group in (group for group in groups if not group.where):
        before = shipped_residuals().of(group.kind, group.gpu, group.key)
        now, then = (100 * math.expm1((side.high - side.low) / 2) for side in (group, before))
        if group.key and now <= then:
            continue
        by = f"{group.rows} rows of yours" + (f", {group.basis}" if group.basis != "own" else "")
        of = f"{group.kind} of {group.key}" if group.key else group.kind
        wider = "; wider, as your rows are farther off the fit than the shipped ones" if now > then else ""
        yield f"intervals of {of}: +-{now:.0f} %, before +-{then:.0f} % ({by}){wider}"


def _rows_of_device(device: Device, rows: Sequence[MeasuredRows], file: Path) -> tuple[str, list[MeasuredRows]]:
    """Name and rows of a device in a table; the name is the device's `measured_as`, or the only one in the table."""
    names = sorted({group.device for group in rows})
    # H100 and h100_sxm are one
    alike = [name for name in names if plain_name(name) == plain_name(device.gpu.measured_as)]
    label = alike[0] if alike else names[0]
    if len(names) > 1 and not alike:
        rule = f"is called {device.gpu.measured_as} in tables, and {file.name} has rows of {', '.join(names)}"
        raise ConfigError([Problem("system.gpu.measured_as", rule, way_out="name the one that is meant")])
    if device.gpu.measured_as and not alike:
        print(
            f"{file.name} has rows of {label}; {device.name} says gpu.measured_as: {device.gpu.measured_as}",
            file=sys.stderr,
        )
    if len(names) > 1:
        print(f"{file.name}: rows of {label} are taken, rows of {len(names) - 1} others are not", file=sys.stderr)
    return label, _rows_of_library(device, [group for group in rows if group.device == label], file)


def _rows_of_library(device: Device, rows: Sequence[MeasuredRows], file: Path) -> list[MeasuredRows]:
    """Rows that are of no other library of collectives than the node's. Raises ConfigError if there are none."""
    library = None if device.node is None else device.node.library
    name = None if library is None else library.name
    others = sorted({group.library for group in rows if group.library not in ("", name)})
    taken = [group for group in rows if group.library in ("", name)]
    rule = f"is {name or 'not given'}, and {file.name} has rows of {', '.join(others)}"
    if not taken:
        way = "name it, in a node of its own (as conf/node/h100_switch_8_vidur.yaml)"
        raise ConfigError([Problem("system.node.library.name", rule, way_out=way)])
    if others:  # left out with a note: constants of another library would judge them
        print(f"node.library.name {rule}, which are not taken", file=sys.stderr)
    return taken


def plain_name(name: str) -> str:
    """Name of a GPU in tables without its form factor: H100 and h100_sxm are one."""
    return name.lower().removesuffix("_sxm")


def _check(device: Device, rows: Sequence[MeasuredRows], file: Path) -> None:
    """Check that there are enough rows, a peak rate for each precision, and only times that are plausible in ms."""
    check = Problems()
    if any(group.kind in COLLECTIVE_ROWS for group in rows) and (device.node is None or device.node.library is None):
        way = "give bytes_per_s and latency_s of its rings, or name a system with a node"
        check.add("system.node.library", f"is missing: {file.name} has collectives", way_out=way)
    exchanges = ("allreduce", *COLLECTIVE_ROWS)  # need no peak rate and no GEMMs
    for precision in dict.fromkeys(group.precision for group in rows if group.kind not in exchanges):
        _check_hardware(check, device, precision, file)
    check.done()
    counts = {(group.precision, group.kind): group.size for group in rows}
    for precision in dict.fromkeys(precision for precision, kind in counts if kind not in exchanges):
        count = counts.get((precision, "gemm"), 0)
        if count < FEWEST["gemm"]:
            rule = f"has too few rows to fit on: {count} GEMMs at {precision}, at least {FEWEST['gemm']} are needed"
            check.add(file.name, rule)
    for (precision, kind), count in counts.items():
        if kind != "gemm" and count < FEWEST[kind]:
            check.add(
                file.name, f"has too few rows to fit on: {count} of {kind} at {precision}, {FEWEST[kind]} are needed"
            )
    for group in rows:
        if group.kind in exchanges:
            _check_rates(check, group, file)
        else:
            _check_times(check, device, group, file)
    check.done()


def _check_hardware(check: Problems, device: Device, precision: str, file: Path) -> None:
    """Note what a device must say of itself for the rows of a precision."""
    if device.gpu.peak(precision) is None:
        rule, way = f"is missing: {file.name} has rows of this precision", "give the peak rate of the data sheet"
        check.add(f"system.gpu.peak_flop_per_s.{peak_format(precision)}", rule, way_out=way)


def _check_times(check: Problems, device: Device, rows: MeasuredRows, file: Path) -> None:
    """Note times that are faster than the device can be, or absurdly slow, as being in another unit."""
    if rows.kind in STREAM_KINDS:
        return
    work = on_device(device, TYPICAL, rows)
    least = roofline(device, rows, work.flop, traffic=work.bytes)
    peak = device.gpu.peak(rows.precision)
    assert peak is not None
    rate, too_fast = work.flop / rows.seconds, _TOO_FAST[rows.kind] * peak
    for row, column in np.argwhere(rate > too_fast)[:10]:  # a few examples say as much as all
        where = f"{file.name}, line {rows.lines[row]}, {rows.passes[column]}_ms"
        rule = f"would be {rate[row, column] / 1e12:.3g} TFLOP/s on a device of {peak / 1e12:.3g}"
        value = float(f"{rows.seconds[row, column] * 1e3:.6g}")
        check.add(where, f"{rule}: is it in seconds?", value=value, way_out=_ONE_UNIT)
    slow = float(np.nanmedian(rows.seconds / least))
    if slow > _TOO_SLOW:
        rule = f"take {slow:.0f} times as long as the data sheet lets expect (median): are they in microseconds?"
        check.add(file.name, f"times of {rows.kind} at {rows.precision} {rule}", way_out=_ONE_UNIT)
        return  # all rows are in another unit: one problem in place of one a row
    ratio = rows.seconds / work.seconds
    # their problems are listed above
    for row, column in np.argwhere((ratio > _TOO_SLOW) | ((ratio < 1 / _FAR_FASTER) & (rate <= too_fast)))[:10]:
        where, odd = f"{file.name}, line {rows.lines[row]}, {rows.passes[column]}_ms", ratio[row, column]
        rule = (
            f"takes {odd:.3g} times as long as is typical, and most rows do not: is it in another unit than they are?"
        )
        check.add(where, rule, value=float(f"{rows.seconds[row, column] * 1e3:.6g}"), way_out=_ONE_UNIT)


def _check_rates(check: Problems, rows: MeasuredRows, file: Path) -> None:
    """Note collectives that are faster than any link as being in another unit."""
    gpus = rows.shape["gpus"]
    # all-reduces send each byte twice, others once
    payload = FLOAT_BYTES * rows.shape["floats"] if rows.kind == "allreduce" else rows.shape["bytes"] / 2
    rate = 2 * (gpus - 1) / gpus * payload / rows.seconds[:, 0]
    for row in np.flatnonzero(rate > _TOO_FAST_LINK)[:10]:
        rule = f"would be {rate[row] / 1e9:.3g} GB/s a GPU: is it in seconds?"
        where = f"{file.name}, line {rows.lines[row]}"
        check.add(where, rule, value=float(f"{rows.seconds[row, 0] * 1e3:.6g}"), way_out="write milliseconds")


def _constants(fitted: FittedConstants, file: Path) -> dict[str, Any]:
    """Entries of a machine's tree for fitted constants and their sources."""
    # 64 bits: which table it was, not a proof against tampering
    content = hashlib.sha256(read_bytes(file, "data")).hexdigest()[:16]
    tree: dict[str, Any] = {"gpu": {"sources": {}}}
    gpu = tree["gpu"]
    for precision, constants in fitted.efficiency.items():
        counts = {kind: len(names) for kind, names in fitted.fitted_on[precision].items() if kind != "allreduce"}
        basis = ", ".join(f"{count} {kind} rows" for kind, count in counts.items())
        gpu.setdefault("efficiency", {})[precision] = _rounded(constants.model_dump(exclude_none=True))
        source = f"dse machine calibrate on {basis} of {file.name} (sha256 {content}...)"
        gpu["sources"][f"efficiency.{precision}"] = _calibrated(source, file, by="operators")
    if fitted.library is not None:
        source = f"dse machine calibrate on all-reduce rows of {file.name} (sha256 {content}...)"
        tree["node"] = {
            "library": _rounded(fitted.library.model_dump(exclude_none=True)),
            "sources": {"library": _calibrated(source, file, by="rings")},
        }
    for kind, collective in fitted.collectives.items():
        names = fitted.fitted_on[ANY_PRECISION][kind]
        source = f"dse machine calibrate on {len(names)} {kind} rows of {file.name} (sha256 {content}...)"
        origin = _calibrated(source, file, by="collectives")
        _put_collective(tree.setdefault("node", {"sources": {}}), kind, collective, names=names, origin=origin)
    gpu["fitted_on"] = {
        precision: {kind: list(names) for kind, names in kinds.items()}
        for precision, kinds in fitted.fitted_on.items()
        if precision != ANY_PRECISION
    }
    return tree


_PLACES: Mapping[str, tuple[str, str]] = {
    "inside": ("library", "protocols"),
    "across_nodes": ("library", "network"),
    "in_switch": ("in_switch", "collectives"),
}
"""Way in which a collective was measured -> part and field of a node that hold its constants."""


def _put_collective(
    node: dict[str, Any], row_kind: str, fitted: Protocols | SwitchRate, *, names: Sequence[str], origin: dict[str, Any]
) -> None:
    """Put the constants of a collective into a node's tree, with their origin and the rows that they were fitted on."""
    kind, way = COLLECTIVE_ROWS[row_kind]
    part, field = _PLACES[way]
    place = node.setdefault(part, {})
    place.setdefault(field, {})[str(kind)] = _rounded(fitted.model_dump(exclude_none=True))
    place.setdefault("fitted_on", {})[row_kind] = list(names)
    node["sources"][f"{part}.{field}.{kind}"] = origin


def _calibrated(source: str, file: Path, *, by: str) -> dict[str, Any]:
    """The origin of fitted constants: a table, and the function of `validation.refits` that fits them again.

    They are no copies any more of those of another GPU.
    """
    calibration = {"target": file.name, "tolerance": _TOLERANCE, "recomputed_by": by}
    return {"provenance": "calibrated", "source": source, "calibration": calibration, "copy_of": None}


def _rounded(values: Mapping[str, Any]) -> dict[str, Any]:
    """Constants with five digits, by name, those of operators below theirs."""
    return {str(name): _round(value) for name, value in values.items()}


def _round(value: Any) -> Any:
    if isinstance(value, Mapping):
        return _rounded(value)
    if isinstance(value, tuple):
        return [list(tile) for tile in value]
    # five digits: more would pretend a precision that fits do not have
    return value if isinstance(value, int | str) else float(f"{value:.5g}")


def _round_errors(errors: Errors | None) -> dict[str, float] | str:
    if errors is None:
        return "every row was fitted on"
    return {name: float(f"{value:.4g}") for name, value in asdict(errors).items()}


def poor(done: Calibration) -> Iterator[str]:
    """Yield a sentence for each kind of row that is predicted badly or not tested."""
    for predicted, errors in done.held_out():
        fitted, name = errors["fitted"], f"{predicted.rows.precision} {predicted.rows.kind}"
        if fitted is None:
            yield f"not tested: every {name} row was fitted on"
        elif fitted.median > _POOR_MEDIAN or (fitted.count > _FEW and fitted.log_correlation < _POOR_CORRELATION):
            yield (
                f"a poor fit: {name} is off by {100 * fitted.median:.0f} % (median; log-correlation"
                f" {fitted.log_correlation:.3f}) on rows not fitted on; do not rely on it"
            )


def at_bounds(done: Calibration) -> Iterator[str]:
    """Yield a sentence for each constant that the fit pushed to a bound of its range."""
    for precision, constants in done.device.gpu.efficiency.items():
        priors = PRIORS if constants.tiles is None else LIBRARY_PRIORS
        priors = priors if constants.cast_traffic is None else {**priors, "cast_traffic": CAST_PRIOR}
        for name, prior in priors.items():
            value, ends = getattr(constants, name), (prior.low, prior.high)
            if min(abs(np.log(value / end)) for end in ends) < _AT_BOUND:  # relative distance from either end
                yield f"{precision}: {name} = {value:g} is at the end of its range ({ends[0]:g} to {ends[1]:g})"


def errors_of(done: Calibration) -> dict[str, Any]:
    """Content of `errors.json`: errors by kind at fp32 and at the worst precision, and by precision, kind and model."""
    sets = list(done.held_out())
    every: dict[str, Any] = {}
    for predicted, errors in sets:
        kinds = every.setdefault(predicted.rows.precision, {})
        kinds[predicted.rows.kind] = {model: asdict(error) if error else None for model, error in errors.items()}

    results = [
        (predicted.rows.kind, predicted.rows.precision, fitted)
        for predicted, errors in sets
        if (fitted := errors["fitted"])
    ]
    return {
        **told_errors(results),
        "allreduce_median_1mb": large_median([predicted for predicted, _ in sets]),
        "worst_precision": told_errors([(kind, "", errors) for kind, _, errors in results]),
        "poor": list(poor(done)),
        "precisions": every,
    }


def told_errors(results: Sequence[tuple[str, str, Errors]]) -> dict[str, float | None]:
    """Largest error of each kind among (kind, precision, errors): at fp32, or at any precision if fp32 is missing."""
    selected = [result for result in results if result[1] == "fp32"] or results

    def worst(kind: str, error: str) -> float | None:
        return max((getattr(errors, error) for name, _, errors in selected if name == kind), default=None)

    return {
        "gemm_median": worst("gemm", "median"),
        "gemm_p90": worst("gemm", "p90"),
        "conv_median": worst("conv", "median"),
        "recurrent_median": worst("recurrent", "median"),
        "allreduce_median": worst("allreduce", "median"),
    }


def large_median(predictions: Sequence[PredictedRows]) -> float | None:
    """Median error of all-reduces of 1 MB and more that were not fitted on; None if there are none."""
    for predicted in predictions:
        if predicted.rows.kind == "allreduce":
            places = (FLOAT_BYTES * predicted.rows.shape["floats"] >= LARGE_BYTES) & ~predicted.fitted
            errors = Errors.of(predicted.seconds[places], predicted.rows.seconds[places])
            return errors.median if errors else None
    return None


def _write(done: Calibration, outputs: Outputs) -> None:
    """Write the device file, every row with its prediction, the errors and a figure."""
    from dse import plots
    from dse.plots import predictions

    write_machine(done.tree, outputs)
    rows = table_of(done.found["fitted"], done.device.name)
    with atomic_replacement(outputs.folder / "residuals.csv") as fresh:
        rows.to_csv(fresh, index=False)
    outputs.write_json("errors", errors_of(done))
    frame = plots.Frame(f"{done.device.name}: fitted costs against measured times")
    plots.save(partial(predictions.scatter, rows, by="precision", frame=frame), outputs.figures, "calibration")


def table_of(predictions: Sequence[PredictedRows], device: str) -> pd.DataFrame:
    """Table with a row for each measured time: device, precision, kind, shape, pass, times, work, and fitted or not."""
    import pandas as pd

    parts = []
    for predicted in predictions:
        for column, name in enumerate(predicted.rows.passes):
            part = pd.DataFrame(
                {
                    "device": device,
                    "precision": predicted.rows.precision,
                    "kind": predicted.rows.kind,
                    "shape": predicted.rows.names,
                    "line": predicted.rows.lines,
                    "pass": name,
                    "measured_s": predicted.rows.seconds[:, column],
                    "predicted_s": predicted.seconds[:, column],
                    "flop": predicted.flop[:, column],
                    "bytes": predicted.bytes[:, column],
                    "fitted": predicted.fitted,
                }
            )
            parts.append(part.dropna(subset=["measured_s"]))  # passes that were not measured
    return pd.concat(parts, ignore_index=True)


def _table(done: Calibration) -> Table:
    from rich.table import Table

    shown = Table(title=f"{done.device.name}: errors on rows that were not fitted on, median / 90th percentile")
    for name in ("precision", "kind", "fitted on", "times tested", *MODELS, "log-correlation"):
        shown.add_column(name, justify="left" if name in ("precision", "kind") else "right")
    for predicted, errors in done.held_out():
        cells = [f"{100 * error.median:.1f} / {100 * error.p90:.0f} %" if error else "–" for error in errors.values()]
        fitted = errors["fitted"]
        counts = [str(predicted.num_fitted), str(fitted.count if fitted else 0)]
        last = f"{fitted.log_correlation:.4f}" if fitted else "–"
        shown.add_row(predicted.rows.precision, predicted.rows.kind, *counts, *cells, last)
    return shown
