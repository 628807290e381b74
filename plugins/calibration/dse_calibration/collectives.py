"""Measured collectives, inside a node, across nodes and in the switch: tables of other projects, and rows to fit on.

Tables are told by their columns; rows without a time are skipped and counted.

- profiles of ai-dynamo/aiconfigurator: device, op_name, nccl_dtype, num_gpus, message_size (elements of nccl_dtype in
  the larger buffer, as nccl-tests counts them), latency [ms]
- profiles of microsoft/vidur: device, collective, gpus, devices_per_node, bytes, median_ms. Another build of the
  library (`vidur`), each call launched from its host: kernels wait there for the hosts of others
- logs of nccl-tests and rccl-tests (`foreign`): device, test, gpus, nodes, bytes, seconds
- microsoft/tokenweave: BL (tokens), hidden_size, times in us of tensors of bf16 on 8 x H100: by multimem, which are
  collectives in the switch (`multimem_*`, with `ctas_N` on N CTAs), and by the library as PyTorch calls it (`torch_*`)

Rows to fit on are chosen by shape: of each number of GPUs and nodes (and CTAs) the same number of sizes, at most every
other one, evenly spaced in their order.
"""

from __future__ import annotations

import math
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from dse.errors import Problems
from dse.files import CsvTable
from dse_calibration.foreign import TESTS, open_table
from dse_calibration.measurements import MeasuredRows
from simulators.costs.chip import Cost
from simulators.costs.collective import Group, collective_cost
from simulators.costs.transfer import in_switch_seconds, protocol_seconds
from simulators.hardware.network import CollectiveKind, Node, Protocols, SwitchedKind, SwitchRate

Floats = NDArray[np.float64]
Way = Literal["inside", "across_nodes", "in_switch"]
"""How a collective was measured: by the library inside a node, by it across nodes, or in the switch."""

COLLECTIVE_KINDS: tuple[CollectiveKind, ...] = get_args(CollectiveKind)
COLLECTIVE_ROWS: Mapping[str, tuple[CollectiveKind, Way]] = {
    **{kind: (kind, "inside") for kind in COLLECTIVE_KINDS},
    **{f"{kind}_across_nodes": (kind, "across_nodes") for kind in COLLECTIVE_KINDS},
    **{f"{kind}_in_switch": (kind, "in_switch") for kind in get_args(SwitchedKind)},
}
"""Kinds of rows of collectives; their shape is `gpus`, `bytes`, and `nodes` or `ctas`."""
MOST_COLLECTIVES: Mapping[Way, int] = {"inside": 24, "across_nodes": 24, "in_switch": 12}
"""Largest number of rows of a collective that its constants are fitted on."""
FEWEST_COLLECTIVES: Mapping[Way, int] = {"inside": 12, "across_nodes": 12, "in_switch": 6}
LARGE_BYTES = 256 * 1024
"""Size from which a collective counts as large."""
ANY_PRECISION = "any"
"""Precision of rows that only move bytes."""
CALLED_BY_HOSTS = ("vidur",)
"""Libraries of tables whose calls are launched from the host, one by one."""
# types as PyTorch and NCCL name them
_SIZES = {"half": 2, "float16": 2, "bfloat16": 2, "int8": 1, "float": 4, "float32": 4}
# nccl-tests write alltoall in one word
_NAMES: Mapping[str, CollectiveKind] = {**{kind: kind for kind in COLLECTIVE_KINDS}, "alltoall": "all_to_all"}
_OF_CONFIGURATOR = {"device", "op_name", "nccl_dtype", "num_gpus", "message_size", "latency"}
_OF_VIDUR = {"device", "collective", "gpus", "devices_per_node", "bytes", "median_ms"}
_OF_TOKENWEAVE = {"BL", "hidden_size"}
_SWITCHED = re.compile(r"multimem_(ar|rs|ag|all_reduce)_us(?:_ctas_(\d+))?")
_SWITCHED_KINDS: Mapping[str, SwitchedKind] = {"ar": "all_reduce", "rs": "reduce_scatter", "ag": "all_gather"}
_BY_PYTORCH = ("torch_all_reduce_us", "pytorch_dist_ar_us")  # columns of two of their tables
_TOKENWEAVE = ("H100", 8, 2)  # GPU, their number, bytes of an element: its tables are of no others, and do not say so


@dataclass(frozen=True)
class _Cell:
    """One measured time [s] of a collective of `size` bytes; library: its name, "" for that of the node."""

    line: int
    device: str
    kind: str
    gpus: float
    size: float
    seconds: float
    nodes: float = 1.0
    ctas: float = math.inf
    library: str = ""

    @property
    def name(self) -> str:
        """Name of the shape."""
        across = f" on {self.nodes:.0f} nodes" if self.nodes > 1 else ""
        by = f" by {self.ctas:.0f} CTAs" if math.isfinite(self.ctas) else ""
        return f"{self.size:.0f} x {self.gpus:.0f}{across}{by}"


def holds_collectives(columns: tuple[str, ...]) -> bool:
    """Return whether a table with these columns holds collectives."""
    return _reader(columns) is not None


def _reader(columns: tuple[str, ...]) -> Callable[[CsvTable, Problems, str], Iterator[_Cell]] | None:
    if set(columns) >= _OF_CONFIGURATOR:
        return _of_configurator
    if set(columns) >= _OF_VIDUR:
        return _of_vidur
    if set(columns) >= set(TESTS):
        return _of_tests
    multimem = any(_SWITCHED.fullmatch(column) for column in columns)  # BL and hidden_size alone could be of any table
    return _of_tokenweave if set(columns) >= _OF_TOKENWEAVE and multimem else None


def read_collectives(path: Path) -> list[MeasuredRows]:
    """Rows of the collectives of a table, by device, kind and library; [] without any. Raises ConfigError."""
    table, check = open_table(path), Problems()
    reader = _reader(table.columns)
    if reader is None:
        return []
    groups = defaultdict[tuple[str, str, str], list[_Cell]](list)
    skipped = 0
    for cell in reader(table, check, path.name):
        skipped += math.isnan(cell.seconds)  # sizes that a profiler left out
        if not math.isnan(cell.seconds):
            groups[cell.device, cell.kind, cell.library].append(cell)
    check.done(path.name)
    if skipped:
        print(f"{path.name}: {skipped} rows without a time are skipped", file=sys.stderr)
    return [_rows(cells) for cells in groups.values()]


def _of_configurator(table: CsvTable, check: Problems, name: str) -> Iterator[_Cell]:
    """Yield the cells of a profile of aiconfigurator."""
    columns = ("op_name", "num_gpus", "message_size", "latency")
    for line, cells in table.rows:
        element = _SIZES.get(cells["nccl_dtype"])
        if element is None:
            check.add(f"{name}, line {line}, nccl_dtype", "is unknown", value=cells["nccl_dtype"])
            continue
        legal = _legal(cells, columns, check, f"{name}, line {line}")
        if legal is not None:
            kind, gpus, size, seconds = legal
            yield _Cell(line, cells["device"], kind, gpus, size * element, seconds)  # counted in elements there


def _of_vidur(table: CsvTable, check: Problems, name: str) -> Iterator[_Cell]:
    """Yield the cells of a profile of vidur."""
    columns = ("collective", "gpus", "bytes", "median_ms")
    for line, cells in table.rows:
        legal = _legal(cells, columns, check, f"{name}, line {line}")
        if legal is None:
            continue
        kind, gpus, size, seconds = legal
        together = _number(cells["devices_per_node"])
        if not (together >= 1 and gpus % min(together, gpus) == 0):
            rule = "must divide the number of GPUs"
            check.add(f"{name}, line {line}, devices_per_node", rule, value=cells["devices_per_node"])
            continue
        nodes = max(1.0, gpus / together)  # fewer GPUs than a node holds
        row_kind = kind if nodes == 1 else f"{kind}_across_nodes"
        yield _Cell(line, cells["device"], row_kind, gpus, size, seconds, nodes, library="vidur")


def _of_tests(table: CsvTable, check: Problems, name: str) -> Iterator[_Cell]:
    """Yield the cells of a log of nccl-tests or rccl-tests."""
    for line, cells in table.rows:
        where = f"{name}, line {line}"
        kind = _NAMES.get(cells["test"])
        if kind is None:
            check.add(f"{where}, test", "is none whose constants are fitted", value=cells["test"])
            continue
        gpus, nodes, size = (_whole(cells, column, 1, check, where) for column in ("gpus", "nodes", "bytes"))
        row_kind = kind if nodes == 1 else f"{kind}_across_nodes"
        if size:  # a problem was noted, or nothing was moved
            yield _Cell(line, cells["device"], row_kind, gpus, size, _time(cells, "seconds", 1.0, check, where), nodes)


def _of_tokenweave(table: CsvTable, check: Problems, name: str) -> Iterator[_Cell]:
    """Yield the cells of a table of tokenweave: a column for each collective, or for each number of CTAs."""
    device, gpus, element = _TOKENWEAVE
    for line, cells in table.rows:
        tokens, hidden = (_whole(cells, column, 1, check, f"{name}, line {line}") for column in ("BL", "hidden_size"))
        size = tokens * hidden * element
        for column in table.columns:
            switched, seconds = _SWITCHED.fullmatch(column), _time(cells, column, 1e-6, check, f"{name}, line {line}")
            if switched:
                kind = _SWITCHED_KINDS.get(switched[1], "all_reduce")
                ctas = float(switched[2] or math.inf)  # as many CTAs as the kernel takes
                yield _Cell(line, device, f"{kind}_in_switch", gpus, size, seconds, ctas=ctas)
            elif column in _BY_PYTORCH:
                yield _Cell(line, device, "all_reduce", gpus, size, seconds, library="pytorch")


def _legal(
    cells: Mapping[str, str], columns: tuple[str, str, str, str], check: Problems, where: str
) -> tuple[CollectiveKind, float, float, float] | None:
    """Kind, GPUs, size and time [s] of a row, from four columns; None for a kind that is unknown, which is noted."""
    kind = _NAMES.get(cells[columns[0]])
    if kind is None:
        check.add(f"{where}, {columns[0]}", "is unknown", value=cells[columns[0]])
        return None
    gpus, size = (_whole(cells, column, least, check, where) for column, least in ((columns[1], 2), (columns[2], 1)))
    return kind, gpus, size, _time(cells, columns[3], 1e-3, check, where)


def _whole(cells: Mapping[str, str], column: str, least: int, check: Problems, where: str) -> float:
    value = _number(cells[column])
    if not (value.is_integer() and value >= least):
        check.add(f"{where}, {column}", f"must be a whole number from {least}", value=cells[column])
    return value


def _time(cells: Mapping[str, str], column: str, unit: float, check: Problems, where: str) -> float:
    """A time [s]; NaN where none was measured."""
    if not cells[column]:
        return math.nan
    seconds = _number(cells[column]) * unit
    if not (math.isfinite(seconds) and seconds > 0):
        check.add(f"{where}, {column}", "must be a positive time", value=cells[column])
    return seconds


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _rows(cells: list[_Cell]) -> MeasuredRows:
    first = cells[0]
    way = COLLECTIVE_ROWS[first.kind][1]
    columns = {"gpus": "gpus", "bytes": "size"}
    if way == "across_nodes":  # the shape of a row is what its constants depend on
        columns["nodes"] = "nodes"
    elif any(math.isfinite(cell.ctas) for cell in cells):
        columns["ctas"] = "ctas"
    shape = {name: np.array([getattr(cell, field) for cell in cells], float) for name, field in columns.items()}
    return MeasuredRows(
        first.device,
        ANY_PRECISION,
        first.kind,
        shape,
        np.array([[cell.seconds] for cell in cells]),
        tuple(cell.name for cell in cells),
        tuple(cell.line for cell in cells),
        ("",) * len(cells),
        library=first.library,
    )


def evenly_spaced(rows: MeasuredRows) -> NDArray[np.int64]:
    """Rows to fit on: of each number of GPUs, nodes and CTAs at most every other size, evenly spaced in their order."""
    others = [values for name, values in rows.shape.items() if name != "bytes"]
    numbers, label = np.unique(np.column_stack(others), axis=0, return_inverse=True)
    most = MOST_COLLECTIVES[COLLECTIVE_ROWS[rows.kind][1]]
    count, places = max(1, most // len(numbers)), set[int]()  # shared evenly among numbers of GPUs
    for number in range(len(numbers)):
        same = np.flatnonzero(label.ravel() == number)
        sizes, first = np.unique(rows.shape["bytes"][same], return_index=True)
        # every other size at most: the others test the fit
        chosen = np.unique(np.round(np.linspace(0, len(sizes) - 1, min(count, -(-len(sizes) // 2)))).astype(int))
        places |= set(same[first[chosen]].tolist())
    return np.array(sorted(places))


def constants_of(node: Node, row_kind: str) -> Protocols | SwitchRate | None:
    """Fitted constants of a node for a kind of rows; None if it has none."""
    kind, way = COLLECTIVE_ROWS[row_kind]
    if way == "in_switch":
        return _by_name({} if node.in_switch is None else node.in_switch.collectives).get(kind)
    library = node.library
    if library is None:
        return None
    return _by_name(library.protocols if way == "inside" else library.network).get(kind)


def _by_name(constants: Mapping[Any, Any] | None) -> dict[str, Any]:
    return {str(kind): fitted for kind, fitted in (constants or {}).items()}


def fitted_names(node: Node, rows: MeasuredRows) -> frozenset[str]:
    """Names of the rows that a node's constants were fitted on; none of another library."""
    part = node.in_switch if COLLECTIVE_ROWS[rows.kind][1] == "in_switch" else node.library
    # constants of one library say nothing of another
    if part is None or rows.library not in ("", node.library.name if node.library else None):
        return frozenset()
    return frozenset((part.fitted_on or {}).get(rows.kind, ()))


def cost_of_rows(constants: Protocols | SwitchRate, rows: MeasuredRows) -> Cost:
    """Costs [R, 1] of rows of one collective; bytes are those that a GPU sends."""
    (kind, _), gpus, payload = COLLECTIVE_ROWS[rows.kind], rows.shape["gpus"], rows.shape["bytes"]
    # rate and latency do not matter for bytes
    moved = collective_cost(kind, "ring", payload, Group(gpus, 1.0, 0.0)).wire_bytes
    if isinstance(constants, SwitchRate):
        seconds = in_switch_seconds(constants, kind, gpus, payload, num_ctas=rows.shape.get("ctas", np.inf))
    else:
        seconds = protocol_seconds(constants, kind, gpus, payload, num_nodes=rows.shape.get("nodes", 1.0))
    cost = Cost.of(np.zeros(rows.size), moved, seconds)
    return Cost.of(cost.flop[:, None], cost.bytes[:, None], cost.seconds[:, None])
