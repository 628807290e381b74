"""Points of a study as runs of MLflow: names, params, metrics and tags."""

from __future__ import annotations

import hashlib
import math
import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from dse.results.selection import NUMBER

# MLflow's own limits, in characters (mlflow/utils/validation.py).
MAX_NAME: Final = 250
MAX_PARAM: Final = 6000
MAX_TAG: Final = 8000

MAY_WIN: Final = "dse.may_win"  # tag of a point: no bound and no baseline that it is compared with

_MAX_POINT_NAME: Final = 100  # our own limit, as the runs table shows a run name in one column


@dataclass(frozen=True)
class Point:
    """One point as a run of MLflow. `scenario` and `key` identify it within its study run; `row` is its place there."""

    row: int
    scenario: str
    key: str
    name: str
    status: Literal["FINISHED", "FAILED"]
    params: dict[str, str]
    metrics: dict[str, float]
    tags: dict[str, str]

    def run_id(self, study_run: str) -> str:
        """Compute the id of the point, the same at every writing, so that the database refuses a duplicate.

        It begins with study and row, because ids in the order of writing let the indexes grow at their ends.
        """
        hashed = hashlib.sha256(f"{study_run}\n{self.scenario}\n{self.key}".encode()).hexdigest()
        return f"{study_run[:8]}{self.row:08x}{hashed[:16]}"


def points(
    table: Any,
    knobs: Mapping[str, bool],
    metrics: Sequence[str],
    *,
    shared: Mapping[str, str],
    may_win: Sequence[bool],
) -> Iterator[Point]:
    """Convert rows to runs. knobs: path -> whether its values differ, so that names have them. shared: tags of all
    runs. may_win: of each row, false for bounds and baselines that are compared with. A missing knob is inactive and
    gives no param.

    NaN and infinity give no metric: MLflow stores infinity as 1.8e308 and draws NaN as a value.
    """
    columns = {name: table.column(name).to_pylist() for name in table.column_names}
    chosen = {mlflow_name(path): columns[path] for path in knobs if path in columns}
    differing = {mlflow_name(path) for path, differs in knobs.items() if differs}
    measured = {mlflow_name(path): columns[path] for path in metrics if path in columns}
    tag_columns = {tag: columns[name] for name, tag in _TAGS.items()}
    for row in range(table.num_rows):
        params = {name: text(value) for name, column in chosen.items() if not _is_missing(value := column[row])}
        tags = {tag: value for tag, column in tag_columns.items() if (value := column[row])}
        tags["dse.on_front"] = "true" if columns["on_front"][row] else "false"
        tags[MAY_WIN] = "true" if may_win[row] else "false"
        if columns["baseline"][row] == columns["key"][row]:
            tags["dse.baseline"] = "true"
        if "promoted" in columns and columns["promoted"][row]:
            tags["dse.promoted"] = "true"
        name = _point_name(tags, [value for path, value in params.items() if path in differing])
        numbers = {name: value for name, column in measured.items() if _is_finite(value := column[row])}
        yield Point(
            row=columns[NUMBER][row],
            scenario=tags["dse.scenario"],
            key=tags["dse.point_key"],
            name=name,
            status="FINISHED" if tags["dse.status"] == "ok" else "FAILED",
            params={key: truncate(value, MAX_PARAM) for key, value in params.items()},
            metrics={key: float(value) for key, value in numbers.items()},
            tags={**shared, **{key: truncate(value, MAX_TAG) for key, value in tags.items()}, "mlflow.runName": name},
        )


_TAGS: Final = {
    "scenario": "dse.scenario",
    "key": "dse.point_key",
    "status": "dse.status",
    "engine": "dse.engine",
    "reason": "dse.reason",
}


def _point_name(tags: Mapping[str, str], values: Sequence[str]) -> str:
    """Name a point by the start of its key, its scenario and the values that tell it from others.

    The key comes first, as the runs table shows some twenty characters.
    """
    words = [f"{float(value):.4g}" if re.fullmatch(r"-?\d+\.\d{4,}", value) else value for value in values]
    parts = [tags["dse.point_key"][:6], tags["dse.scenario"], *words]
    return truncate(" ".join(filter(None, parts)), _MAX_POINT_NAME)


def _is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def _is_finite(value: Any) -> bool:
    return value is not None and math.isfinite(value)


def text(value: Any) -> str:
    """Convert a value to text, floats with all digits."""
    return repr(value) if isinstance(value, float) else str(value)


def mlflow_name(path: str) -> str:
    """Convert a path to a valid name of MLflow: letters, digits, `_-./ :`, at most 250 characters."""
    allowed = re.sub(r"[^/\w.\- :]", "_", path) or "_"
    if posixpath.normpath(allowed) != allowed or allowed.startswith(("/", ".")):
        allowed = allowed.replace("/", "_").lstrip(".") or "_"  # MLflow refuses paths like a/../b
    return allowed if len(allowed) <= MAX_NAME else allowed[: MAX_NAME - 3] + "..."


def truncate(value: str, limit: int) -> str:
    """Truncate a text to `limit` characters, with an ellipsis, and replace characters that a database refuses."""
    if not value.isascii() or "\0" in value:
        # PostgreSQL does not store NUL, and no database stores half a surrogate pair.
        value = value.replace("\0", "\ufffd").encode("utf-8", "replace").decode()
    return value if len(value) <= limit else value[: limit - 1] + "…"
