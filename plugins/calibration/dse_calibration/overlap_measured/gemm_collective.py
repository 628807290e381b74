"""Measured overlaps of one GEMM and its collective held against schedules: rows of `gemm_collective.csv` and its like.

A row names GPU, collective, sizes, and the software that overlaps, which is the implementation that plans take
(`gemm_collective.yaml` says which); baseline and overlap are then designs of the overlap backend on the machine of that
GPU, and nothing knows the row's times but the reading of its sizes: whether n (of a GEMM before a reduction: k) is of
the whole problem or of one GPU: the reading counts whose predicted baseline is nearer to the measured one, or the whole
problem where no baseline is given. k before an all-reduce is of one GPU. Rows of `gemm_collective_small.csv`, which
write AG+GEMM, give the rows m of the shard of a rank, and a GPU that its source does not name as presumed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from dse.backend import Batch
from dse.config.options import list_options, load_yaml
from dse.errors import validate_as
from dse.errors.parsing import whole_number
from dse.files import read_csv
from dse_calibration.calibrate import plain_name
from dse_calibration.overlap_measured import expert_layers
from dse_calibration.overlap_measured.expert_layers import ExpertLayer
from simulators.hardware.machine import merged, tree_of
from simulators.hardware.parts import ELEMENT_BYTES
from simulators.hardware.schedule_system import ScheduleSystem, widen
from simulators.overlap.backend import OverlapBackend
from simulators.steps.overlap.implementations import ExpertKernel, Implementation, Place, implementation

NEEDED = ("gpu", "gpus", "op", "m", "n", "k", "dtype", "method", "baseline_ms", "overlapped_ms", "speedup")
_NODE = 8  # GPUs of the machines that are shipped for schedules
_OPS: Mapping[str, tuple[str, str, Place]] = {
    "ag_gemm": ("all_gather", "n", "before"),
    "gemm_rs": ("reduce_scatter", "k", "after"),
    "GEMM+AR": ("all_reduce", "k", "after"),
}


_ALIASES = {
    **{"AG+GEMM": "ag_gemm", "GEMM+RS": "gemm_rs"},
    **dict.fromkeys(("AG+MoE", "AG+GroupGEMM", "ag_moe"), "moe_ag_scatter_gemm"),
    **dict.fromkeys(("MoE+RS", "GroupGEMM+RS", "moe_rs"), "moe_gemm_gather_rs"),
}
_OF_RANK = "AG+GEMM"  # whose m is the rows of one rank
_PRESUMED = " (presumed)"


class UnpredictableError(Exception):
    """A row that cannot be predicted, with the reason."""


_OF_LINKS = {"link_bytes_per_s", "library"}  # of a node


@dataclass(frozen=True)
class MeasuredOverlap:
    """A measured row and its prediction.

    measured: times [s] of baseline and overlap (None: not given) and the speed-up. predicted: times [s] of both. parts:
    predicted times [s] of GEMM and collective in the baseline. fitted: constants were fitted on this row. software:
    name of the implementation that overlaps.
    """

    row: Mapping[str, str]
    measured: tuple[float | None, float | None, float]
    predicted: tuple[float, float]
    parts: tuple[float, float]
    fitted: bool
    software: str

    @property
    def speedup(self) -> float:
        """Predicted speed-up."""
        return self.predicted[0] / self.predicted[1]

    @property
    def error(self) -> float:
        """Relative error of the speed-up, signed."""
        return self.speedup / self.measured[2] - 1

    @property
    def right_sign(self) -> bool:
        """True if overlap gains, or loses, in both."""
        return (self.speedup >= 1) == (self.measured[2] >= 1)


def holds_overlaps(columns: tuple[str, ...]) -> bool:
    """Return whether a table with these columns holds overlaps of a GEMM and its collective."""
    return set(NEEDED) <= set(columns)


def predict_overlaps(file: Path) -> tuple[list[MeasuredOverlap], dict[str, int]]:
    """Predict the rows of a table; the others are counted by the reason why not. Raises ConfigError for a bad table."""
    predicted, skipped = [], dict[str, int]()
    for _, cells in read_csv(file, needed=NEEDED).rows:
        try:
            predicted.append(predict_overlap(cells))
        except UnpredictableError as error:
            skipped[str(error)] = skipped.get(str(error), 0) + 1
    return predicted, skipped


def calibration_rows(file: Path, fits: str) -> list[Mapping[str, str]]:
    """Rows of a table that the constants called `fits` (of `calibrated_on`) were fitted on. Raises ConfigError."""
    return [cells for _, cells in read_csv(file, needed=NEEDED).rows if _is_fitted(cells, fits)]


def rows_fitted_by(file: Path, option: str) -> list[Mapping[str, str]]:
    """Rows of a table that constants of an option `implementation/<name>` were fitted on. Raises ConfigError."""
    fitted = _implementation(option.rpartition("/")[2]).fitted_on
    return [cells for _, cells in read_csv(file, needed=NEEDED).rows if any(_is_row(cells, row) for row in fitted)]


def fits_of(cells: Mapping[str, str]) -> frozenset[str]:
    """Names of the constants that were fitted on a row."""
    fitted = (str(row["fits"]) for row in fitted_rows() if _is_row(cells, row))
    return frozenset(word for names in fitted for word in names.split(", "))


def _unpredictable(cells: Mapping[str, str]) -> str | None:
    """The first reason why a row cannot be predicted; None if it can."""
    gpus = cells["gpus"] or str(_NODE)
    known = cells["op"] in _OPS or cells["op"] in expert_layers.OPS
    reasons = {
        f"{cells['op']}: no single GEMM with an all-gather before or a sum after it": known,
        "no sizes": all(whole_number(cells[name]) is not None for name in ("m", "n", "k")),
        f"no such format: {cells['dtype']}": cells["dtype"] in ELEMENT_BYTES,
        "no overlapped time": bool(cells["speedup"]),
        "several nodes: schedules overlap a GEMM and a collective inside one": cells.get("nodes", "") in ("", "1"),
        f"no machine for GPU {cells['gpu'] or '(not named)'}": _system(cells) in list_options("system"),
        f"{gpus} GPUs: machines are of {_NODE}": 2 <= (whole_number(gpus) or 0) <= _NODE,
        f"method {cells['method']}: no implementation describes it": _software(cells) is not None,
        "no number of experts and of those of a token": cells["op"] in _OPS or _layer(cells) is not None,
    }
    return next((reason for reason, holds in reasons.items() if not holds), None)


def _system(cells: Mapping[str, str]) -> str:
    return f"{plain_name(cells['gpu'])}_{_NODE}"


def _num_gpus(cells: Mapping[str, str]) -> int:
    """GPUs of a row; a whole node where it does not say."""
    return int(cells["gpus"] or _NODE)


@cache
def _settings() -> Mapping[str, Any]:
    settings: Mapping[str, Any] = load_yaml(Path(__file__).with_suffix(".yaml"))
    return settings


def _software(cells: Mapping[str, str], *, learnt: bool = True) -> tuple[Implementation, Implementation] | None:
    """Implementations of a row's baseline and of its method at its operator; None where there is none.

    learnt: those count whose schedule is known from measured times alone.
    """
    for method in _settings()["methods"]:
        if all(re.fullmatch(pattern, cells.get(column, "")) for column, pattern in method["match"].items()):
            software = _implementation(method["implementation"])
            if not learnt and software.fits("schedule"):
                continue
            baseline = _implementation(method.get("baseline", _settings()["baseline"]))
            if cells["op"] in expert_layers.OPS:
                return (baseline, software) if software.experts is not None else None
            return (baseline, software) if _OPS[cells["op"]][2] in software.schedules else None
    return None


def _layer(cells: Mapping[str, str]) -> ExpertLayer | None:
    return ExpertLayer.of(cells, _num_gpus(cells))


def _implementation(name: str) -> Implementation:
    software = implementation(name)
    assert software is not None
    return software


def predict_overlap(
    cells: Mapping[str, str], *, changes: Mapping[str, Any] | None = None, knobs: Mapping[str, Any] | None = None
) -> MeasuredOverlap:
    """Predict a row. changes: of the shipped machine's tree. knobs: in place of those that implementations were fitted
    by; None for `unseen` or ideal ones, and `schedule: None` where no schedule was learnt from measured times.

    Raises UnpredictableError where it cannot be predicted.
    """
    row, cells = cells, _plain(cells)
    if reason := _unpredictable(cells):
        raise UnpredictableError(reason)
    names = ("baseline_ms", "overlapped_ms")
    baseline, overlapped = (float(cells[name]) * 1e-3 if cells[name] else None for name in names)
    machine = merged(_machine(cells), changes or {})
    # two readings of the sizes: of all GPUs, or of one; tables of all-reduces say that k is of one
    if cells["op"] in expert_layers.OPS:
        readings = [_times_of_experts(cells, machine, knobs or {})]
    else:
        wholes = (False,) if _OPS[cells["op"]][0] == "all_reduce" else (True, False)
        readings = [_times(cells, machine, whole=whole, knobs=knobs) for whole in wholes]
    times = readings[0]
    if baseline is not None:
        # ratios: half and twice are as far off
        times = min(readings, key=lambda reading: abs(math.log(reading[0] / baseline)))
    measured = baseline, overlapped, float(cells["speedup"])
    software = _software(cells)
    assert software is not None
    return MeasuredOverlap(row, measured, times[:2], times[2:], _is_fitted(row), software[1].name)


def _plain(cells: Mapping[str, str]) -> Mapping[str, str]:
    """A row by the names of operators and GPUs that are used here, with the rows m of all ranks."""
    op, plain = cells["op"], {**cells, "gpu": cells["gpu"].removesuffix(_PRESUMED)}
    rows = whole_number(cells["m"])
    if op == _OF_RANK and rows is not None:
        plain["m"] = str(rows * (whole_number(cells["gpus"]) or _NODE))
    return {**plain, "op": _ALIASES.get(op, op)}


def _is_fitted(cells: Mapping[str, str], fits: str | None = None) -> bool:
    """Tell whether a constant was calibrated on this row: those called `fits`, or any."""
    return any(_is_row(cells, row) for row in fitted_rows() if fits in (None, row["fits"]))


def _is_row(cells: Mapping[str, str], row: Mapping[str, Any]) -> bool:
    # a name of constants, not a column
    return all(str(value) == cells[name] for name, value in row.items() if name != "fits")


@cache
def fitted_rows() -> Sequence[Mapping[str, Any]]:
    """Rows that constants of machines or of implementations were fitted on."""
    methods = _settings()["methods"]
    names = {_settings()["baseline"], *(method[key] for method in methods for key in method if key in _NAMED)}
    return [*_settings()["calibrated_on"], *(row for name in sorted(names) for row in _implementation(name).fitted_on)]


_NAMED = ("implementation", "baseline")


def unseen_constants() -> Mapping[str, Any]:
    """Constants of machines, as a tree, in place of those that were fitted on rows that are left out."""
    constants: Mapping[str, Any] = _settings()["unseen"]
    return constants


def _times(
    cells: Mapping[str, str], system: Mapping[str, Any], *, whole: bool, knobs: Mapping[str, Any] | None
) -> tuple[float, float, float, float]:
    """Predicted times [s] of the baseline, of the overlap, and of GEMM and collective in the baseline."""
    workload = _workload(cells, whole=whole)
    cus = system["gpu"]["cu_copy"]["num_cus"]
    place, changed = _OPS[cells["op"]][2], dict(knobs or {})
    software = _software(cells, learnt=changed.pop("schedule", "") is not None)
    assert software is not None
    schedules = [
        each.tree(
            place,
            knobs={
                knob: each.unseen.get(knob) if value is None else value
                for knob, value in changed.items()
                if each.fits(knob)
            },
        )
        for each in software
    ]
    schedules = [{**tree, **({"comm_cus": cus} if "comm_cus" in tree else {})} for tree in schedules]
    backend = OverlapBackend("fluid")
    designs = [backend.design({"system": system, "workload": workload, "schedule": knobs}) for knobs in schedules]
    results = backend.evaluate([Batch(design) for design in designs])
    broken = [result.texts[-1] for result in results if not result.ok.all()]
    if broken:
        raise UnpredictableError(broken[0])
    baseline, overlapped = (float(result.metrics["makespan_s"][0]) for result in results)
    gemm_s, comm_s = (float(results[0].metrics[name][0]) for name in ("gemm_s", "comm_s"))
    return baseline, overlapped, gemm_s, comm_s


def _times_of_experts(
    cells: Mapping[str, str], tree: Mapping[str, Any], knobs: Mapping[str, Any]
) -> tuple[float, float, float, float]:
    """The same of a layer of experts."""
    layer, software = _layer(cells), _software(cells)
    assert layer is not None and software is not None
    kernels = [_kernel(described, described.experts, knobs) for described in software if described.experts is not None]
    system = ScheduleSystem.of(tree)
    baseline, gemm_s, comm_s = expert_layers.serial_s(layer, kernels[0], system)
    return baseline, expert_layers.fused_s(layer, kernels[-1], system), gemm_s, comm_s


def _kernel(software: Implementation, kernel: ExpertKernel, knobs: Mapping[str, Any]) -> ExpertKernel:
    """How software has experts, with knobs that it was fitted by at other values; `unseen` ones for None."""
    changed = {
        knob: software.unseen.get(knob) if value is None else value
        for knob, value in knobs.items()
        if software.fits(knob) and knob in ExpertKernel.model_fields
    }
    tree = {**kernel.model_dump(), **{knob: value for knob, value in changed.items() if value is not None}}
    return validate_as(ExpertKernel, tree, path=software.name)


def _machine(cells: Mapping[str, str]) -> dict[str, Any]:
    """The machine of a row, with what was measured of it: its GEMMs (if at this precision) and its collectives."""
    tree, gpus = tree_of(_system(cells)), _num_gpus(cells)
    node = {**tree["node"], "num_gpus": gpus}
    if node["topology"] == "switch":  # whose port serves fewer peers
        node |= widen(ScheduleSystem.of(tree).node, (_NODE - 1) / (gpus - 1)).model_dump(include=_OF_LINKS)
    return {**tree, "node": node}


def _workload(cells: Mapping[str, str], *, whole: bool) -> dict[str, Any]:
    pattern, split, _ = _OPS[cells["op"]]
    size = {name: int(cells[name]) for name in ("m", "n", "k")}
    gpus = _num_gpus(cells)
    if not whole:
        size[split] *= gpus  # sizes of one GPU: that of all is asked for
    precision = cells["dtype"]
    moved = {"rows": size["m"], "cols": size["k"] if pattern == "all_gather" else size["n"]}
    gather = {"kind": "collective", "pattern": pattern, **moved, "precision": precision}
    gemm = {"kind": "gemm", **size, "shards": gpus, "split": split, "precision": precision}
    before, after = ("gather", "gemm") if pattern == "all_gather" else ("gemm", "gather")
    operators = {"gather": gather, "gemm": gemm}
    operators[after] = {**operators[after], "after": [before]}
    return {"name": "measured", "operators": operators}
