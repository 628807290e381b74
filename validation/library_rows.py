"""Measured collectives by software (`libraries/collectives_libraries.csv`, `compiler_tables/xla_collectives_*.csv`):
rows, what each is by `conf/collective`, and the fit of its constants to the rows that `fitted_on` names.

Tables of XLA hold the waiting of devices for one another: rows of MI300X rest at 100 to 480 us by collective. That
floor, the median of its rows up to `FLOOR_BYTES`, is taken out, and our time of the shortest of them put in its place;
rows of MI300X count from `FROM_BYTES_AMD` on, and those of other GPUs from `FROM_BYTES_XLA`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from dse.values import put
from simulators.costs.collective import collective_seconds
from simulators.costs.collective_software import Call, CollectiveSoftware, software_of
from simulators.hardware.machine import System, tree_of
from validation.calibrated_numbers import Number

LIBRARIES = "libraries/collectives_libraries.csv"
GEMMS = "libraries/gemm_with_collective.csv"
EXCHANGES = "libraries/moe_dispatch_efa.csv"
XLA = "compiler_tables/xla_collectives_{}.csv"
XLA_GPUS = {"b200": "b200_8", "h100": "h100_8", "mi300x": "mi300x_8"}
"""GPU in the names of XLA's tables -> system."""
FROM_BYTES = 2.0**18
FROM_BYTES_XLA = 2.0**16
FROM_BYTES_AMD = 2.0**26
FLOOR_BYTES = 2.0**16
_MICROSECOND = 1e-6
_SYSTEMS = {"H100": "h100_8", "B200": "b200_8", "MI300": "mi300x_8"}
_PATTERNS = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all")
_NAMES = (
    (r"NCCL symmetric (?:Tma)?LD, (\d+) CTAs", "nccl_symmetric"),
    (r"NCCL symmetric memory", "nccl_symmetric"),
    (r"NCCL(?: ring| all-gather| \d.*)?", "nccl"),
    (r"symm_mem multimem|Triton symmetric-memory all-gather \(multimem store\)", "multimem"),
    (r"symm_mem two-shot", "symm_mem_two_shot"),
    (r"custom 1-stage|vLLM custom", "custom_one_shot"),
    (r"custom 2-stage", "custom_two_shot"),
    (r"aiter custom", "aiter_custom"),
    (r"quick reduce, (fp16|fp8|int6|int4).*", "quick_reduce"),
)
"""Regular expression of what a table calls software, whose group is a format or CTAs -> its name in conf/collective."""
_OUTLIERS = {("ByteDance-Seed/Triton-distributed issue 57 (2025-07-14)", 2097152): "is an outlier, as its source says"}
_XLA_PATTERNS = {
    "all-gather": "all_gather",
    "all-reduce": "all_reduce",
    "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all",
    "collective-permute": "send_recv",
}


@dataclass(frozen=True)
class LibraryRow:
    """A measured collective. cells: of its table; call: None where `conf/collective` has no such software, and why.

    seconds: measured; less the floor, of a table that has one, which `floored` tells.
    """

    table: str
    cells: Mapping[str, Any]
    system: str
    pattern: str
    num_gpus: int
    num_bytes: float
    seconds: float
    call: Call | None
    why_not: str = ""
    floored: bool = False

    @property
    def label(self) -> str:
        """What its table calls the software."""
        return str(self.cells.get("implementation", "XLA"))

    @functools.cached_property
    def predicted_s(self) -> float:
        """Time [s] by `conf/collective`."""
        return predict(self)

    @property
    def error(self) -> float:
        """Relative error of the time."""
        return self.predicted_s / self.seconds - 1

    def is_fitted(self) -> bool:
        """Tell whether a constant was fitted on it."""
        software = None if self.call is None else self.call.software
        return software is not None and any(_is_row(self, fitted) for fitted in software.fitted_on)


@functools.cache
def machine(name: str) -> System:
    """A shipped system."""
    return System.model_validate(tree_of(name))


def predict(row: LibraryRow, changed: CollectiveSoftware | None = None) -> float:
    """Time [s] of a row by its software, or with other constants of it."""
    assert row.call is not None
    call = replace(row.call, changed=changed)
    pattern: Any = row.pattern
    return float(collective_seconds(machine(row.system), pattern, row.num_bytes, row.num_gpus, call))


def read_libraries(folder: Path) -> list[LibraryRow]:
    """Rows of libraries with a time; those that nothing is known of say why."""
    table = pd.read_csv(folder / LIBRARIES, comment="#").query("us == us")
    return [_library_row(cells) for cells in table.to_dict("records")]


def _library_row(cells: Mapping[Any, Any]) -> LibraryRow:
    label, gpu = str(cells["implementation"]), str(cells["gpu"])
    pattern = "all_gather" if label.endswith(("all-gather", "(multimem store)")) else str(cells["collective"])
    system = next(name for prefix, name in _SYSTEMS.items() if gpu.startswith(prefix))
    why_not = _OUTLIERS.get((str(cells["source"]), int(cells["bytes"])), "")
    if pattern not in _PATTERNS:
        why_not = f"{pattern} is no pattern of ours"
    call = None if why_not else call_of(label)
    size = int(cells["gpus"]), float(cells["bytes"])
    return LibraryRow(
        LIBRARIES, _named(cells), system, pattern, *size, _MICROSECOND * float(cells["us"]), call, why_not
    )


def call_of(label: str) -> Call | None:
    """The call that a table names; None for software that `conf/collective` does not have.

    >>> call_of("quick reduce, int4").name, call_of("NCCL symmetric LD, 32 CTAs").num_ctas
    ('quick_reduce:int4', 32)
    """
    for pattern, name in _NAMES:
        if (match := re.fullmatch(pattern, label)) is not None:
            detail = match.group(1) if match.groups() else None
            if detail is None:
                return Call(name, within_sizes=False)
            if detail.isdigit():
                return Call(name, int(detail), within_sizes=False)
            return Call(f"{name}:{detail}", within_sizes=False)
    return None


def read_xla(folder: Path, gpu: str) -> list[LibraryRow]:
    """Rows of XLA's table of a GPU; of MI300X without their floor, and by RCCL alone."""
    table = pd.read_csv(folder / XLA.format(gpu), comment="#")
    table["pattern"] = table["pattern"].fillna("")
    alike = ["dtype", "op", "pattern", "group_size"]
    floors = table[table["tensor_bytes"] <= FLOOR_BYTES].groupby(alike)["us"].median()
    is_amd = gpu.startswith("mi")
    rows = list[LibraryRow]()
    for cells in table.to_dict("records"):
        pattern, size = _XLA_PATTERNS[cells["op"]], float(cells["tensor_bytes"])
        floor = float(floors.loc[tuple(cells[name] for name in alike)]) if is_amd else 0.0
        both_ways = cells["pattern"] in ("ring", "two_way_neighbours")
        call = Call("rccl") if is_amd else Call("xla_nccl", both_ways=both_ways)
        gpus = 2 if pattern == "send_recv" else int(cells["group_size"])
        row = LibraryRow(XLA.format(gpu), _named(cells), XLA_GPUS[gpu], pattern, gpus, size, 0.0, call, floored=is_amd)
        added = predict(replace(row, num_bytes=float(table["tensor_bytes"].min()))) if is_amd else 0.0
        rows.append(replace(row, seconds=_MICROSECOND * (float(cells["us"]) - floor) + added))
    return rows


def _named(cells: Mapping[Any, Any]) -> dict[str, Any]:
    return {str(name): value for name, value in cells.items()}


def counts(row: LibraryRow) -> bool:
    """Tell whether a row is long enough to be judged."""
    if row.table == LIBRARIES:
        return row.num_bytes >= FROM_BYTES
    return row.num_bytes >= (FROM_BYTES_AMD if row.floored else FROM_BYTES_XLA)


def _is_row(row: LibraryRow, fitted: Mapping[str, Any]) -> bool:
    """Tell whether a row is the one that `fitted_on` names."""
    if fitted["table"] != row.table:
        return False
    return all(row.cells[name] == value for name, value in fitted.items() if name not in ("table", "fits"))


def rows_fitted_by(folder: Path, software: CollectiveSoftware) -> Iterator[tuple[LibraryRow, frozenset[str]]]:
    """Yield the rows that constants of software were fitted on, with the paths of these."""
    tables = {str(fitted["table"]) for fitted in software.fitted_on}
    rows = read_libraries(folder) if LIBRARIES in tables else []
    rows += [row for gpu in XLA_GPUS if XLA.format(gpu) in tables for row in read_xla(folder, gpu)]
    for fitted in software.fitted_on:
        (row,) = (row for row in rows if _is_row(row, fitted))
        yield row, frozenset(str(fitted["fits"]).split(", "))


def fit_errors(folder: Path, numbers: Sequence[Number]) -> tuple[list[float], Any]:
    """Values of numbers of one option as they stand, and the errors of their rows by other values of them."""
    (option,) = {number.option for number in numbers}
    software = software_of(option.rpartition("/")[2])
    assert software is not None
    paths = [number.path for number in numbers]
    rows = [row for row, fits in rows_fitted_by(folder, software) if not fits.isdisjoint(paths)]

    def errors(values: Sequence[float]) -> list[float]:
        changed = software
        for path, value in zip(paths, values, strict=True):
            changed = put(changed, path, value)
        return [float(np.log(predict(row, changed) / row.seconds)) for row in rows]

    return [number.value for number in numbers], errors
