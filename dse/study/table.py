"""The table of results, written as a stream: columns of arrays in, row groups of `results.parquet` out.

Values that depend on all rows (which are on a Pareto front) are filled in by a second pass over the file, so memory
holds a few thousand rows however many there are.
"""

from __future__ import annotations

import functools
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from dse.backend import STATUSES, Backend, Columns, Results
from dse.errors import ConfigError
from dse.evaluation.calls import Part
from dse.search import Limit
from dse.space import Assignment, Knob, Points, Space, get_path
from dse.study.plan import Plan
from dse.values import Keys, keys_to_hex

ROWS_PER_GROUP = 1 << 16  # rows held at once: some 30 MB of columns

_DTYPES = {"text": "string", "integer": "Int64", "number": "Float64", "yes or no": "boolean"}
# pandas' types may be missing, NumPy's need a mask
_NUMPY = {"integer": np.int64, "number": np.float64, "yes or no": np.bool_}
# kinds of arrays (dtype.kind) that are taken as they are: i and f
_PLAIN = {"integer": "i", "number": "if", "yes or no": ""}
_MARK = 6  # place of `on_front` among the columns


@dataclass(frozen=True)
class ScenarioRows:
    """Points of one scenario with their results, and the grid that holds their baselines."""

    scenario: int
    part: Part
    baseline: Part
    explored: bool

    @property
    def places(self) -> NDArray[np.intp]:
        """Index of each point's baseline in the grid of baselines."""
        return places(self.part.points, self.baseline.points)


@dataclass(frozen=True)
class TableLayout:
    """Columns of a table. kinds: type of values of the searched and recorded paths, by path.

    limits: by metric; a row beyond one is infeasible in this table, whatever its result is in other studies.
    """

    scenarios: tuple[str, ...]
    kinds: Mapping[str, str]
    backend: Backend
    limits: Mapping[str, Limit]

    @classmethod
    def of(cls, plan: Plan) -> TableLayout:
        """Return the columns of a study."""
        space = next(iter(plan.spaces.values()))  # scenarios have the same columns
        chosen = [{f"{section}.name": name} for section, named in space.options.items() for name in named]
        designs = []
        for point in ({}, *chosen, *_samples(space)):  # options may have fields of their own
            with suppress(ConfigError, KeyError):  # values that are no design with the base
                designs.append(plan.backend.design(space.tree(point)))
        values = {knob.path: knob.values for knob in space.knobs}
        kinds = {path: _kind(path, designs, values.get(path, ())) for path in (*plan.knobs, *plan.recorded_paths)}
        return cls(tuple(plan.spaces), kinds, plan.backend, plan.settings.study.limits)

    @functools.cached_property
    def schema(self) -> Any:
        """Schema of the finished table for pyarrow; pandas reads the same types from it whatever the rows."""
        import pandas as pd
        import pyarrow as pa

        texts = ("scenario", "key", "status", "reason", "engine", "baseline")
        plain: dict[str, Any] = {name: pd.Series([], dtype="str") for name in texts}
        marked = {"on_front": pd.Series([], dtype=bool)}
        paths = {path: pd.Series([], dtype=_DTYPES[kind]) for path, kind in self.kinds.items()}
        numbers = {name: pd.Series([], dtype=float) for name in self.backend.described}
        schema = pa.Schema.from_pandas(pd.DataFrame({**plain, **marked, **paths, **numbers}), preserve_index=False)
        coded = {  # few different values: an index for each row takes less space
            "scenario",
            "status",
            "reason",
            "engine",
            *(path for path, kind in self.kinds.items() if kind == "text"),
        }
        for place, name in enumerate(schema.names):
            if name in coded:
                schema = schema.set(place, pa.field(name, pa.dictionary(pa.int32(), pa.string())))
            elif name in ("key", "baseline"):  # all different
                schema = schema.set(place, pa.field(name, pa.string()))
        return schema

    def batch(self, rows: Sequence[ScenarioRows]) -> Any:
        """Return rows as a pyarrow RecordBatch, with all columns but `on_front`."""
        import pyarrow as pa

        results = Results.join([group.part.results for group in rows])
        sizes = [group.part.size for group in rows]
        baseline_keys = [group.baseline.keys[group.places] for group in rows]
        limited = self._apply_limits(results)
        columns = {
            "scenario": _dictionary_array(np.repeat([group.scenario for group in rows], sizes), self.scenarios),
            "key": _texts(np.concatenate([group.part.keys for group in rows])),
            "status": _dictionary_array(limited.status, STATUSES),
            "reason": _dictionary_array(*_as_met(limited.reason, limited.texts)),
            "engine": _dictionary_array(*_as_met(results.engine, results.texts)),
            "baseline": _texts(np.concatenate(baseline_keys)),
            **{path: _column(path, kind, rows) for path, kind in self.kinds.items()},
            **{name: pa.array(column) for name, column in self._numbers(results, rows).items()},
        }
        schema = self.schema
        # filled in by the second pass
        return pa.RecordBatch.from_arrays(list(columns.values()), schema=schema.remove(_MARK))

    def _apply_limits(self, results: Results) -> Results:
        """Return the results, those beyond a limit infeasible, with the reason; they keep their metrics."""
        for name, limit in self.limits.items():
            # one reason: the last limit that is broken
            for bound, beyond in limit.beyond(results.column(name)).items():
                over = results.ok & (beyond > 0.0)
                side = "below" if bound == "low" else "above"
                text = f"{name} is {side} study.limits.{name}.{bound} = {getattr(limit, bound):g}"
                status = np.where(over, STATUSES.index("infeasible"), results.status).astype(np.uint8)
                # the place of the text that is added
                reason = np.where(over, len(results.texts), results.reason).astype(np.int32)
                results = replace(results, status=status, reason=reason, texts=(*results.texts, text))
        return results

    def _numbers(self, results: Results, rows: Sequence[ScenarioRows]) -> dict[str, NDArray[np.float64]]:
        """Return metrics, relations where both the point and its baseline have metrics, and bounds."""
        ok = results.ok
        metrics = {name: results.column(name) for name in self.backend.metrics}
        metrics = metrics if ok.all() else {name: np.where(ok, column, math.nan) for name, column in metrics.items()}
        bounds = self._bounds(metrics, rows)
        both = ok & np.concatenate([group.baseline.results.ok[group.places] for group in rows])
        related: Columns = {}
        if both.any():
            baseline_metrics = {
                name: np.concatenate([group.baseline.results.column(name)[group.places] for group in rows])[both]
                for name in self.backend.metrics
            }
            related = self.backend.relate({name: column[both] for name, column in metrics.items()}, baseline_metrics)
        for name in self.backend.relations:
            metrics[name] = np.full(len(ok), math.nan)
            if name in related:
                metrics[name][both] = related[name]
        return metrics | {name: np.where(ok, column, math.nan) for name, column in bounds.items()}

    def _bounds(self, metrics: Columns, rows: Sequence[ScenarioRows]) -> dict[str, NDArray[np.float64]]:
        """Return what is proven of the designs of rows."""
        columns = {name: np.full(sum(group.part.size for group in rows), math.nan) for name in self.backend.bounds}
        start = 0
        for part in (group.part for group in rows if columns):
            place, start = slice(start, start + part.size), start + part.size
            if (batch := part.points.batch) is not None:
                proven = self.backend.bound(batch, {name: column[place] for name, column in metrics.items()})
                for name, values in proven.items():
                    columns[name][place] = values
        return columns


class Sheet:
    """A table being written: row groups are appended, then finished with what the second pass adds."""

    def __init__(self, path: Path, layout: TableLayout) -> None:
        import pyarrow as pa

        self._path = path
        self._part = path.with_suffix(".part")
        self._schema = layout.schema
        # an Arrow stream is written and read in batches, and needs no footer
        self._writer = pa.ipc.new_stream(str(self._part), self._schema.remove(_MARK))
        self.num_rows = 0

    def append(self, batch: Any) -> None:
        """Add a batch of rows, without `on_front`."""
        self._writer.write_batch(batch)
        self.num_rows += batch.num_rows

    def finish(self, marks: Callable[[Any], NDArray[np.bool_]], advance: Callable[[int], None]) -> None:
        """Write the file; `marks` tells for each batch which rows are on a front."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        self._writer.close()
        coded = [name for name in self._schema.names if pa.types.is_dictionary(self._schema.field(name).type)]
        fresh = self._path.with_suffix(".new")  # a file that is complete or absent
        with (
            pa.OSFile(str(self._part)) as source,
            pa.ipc.open_stream(source) as reader,
            pq.ParquetWriter(fresh, self._schema, use_dictionary=coded, store_schema=False) as writer,
        ):
            for batch in reader:  # one batch at a time
                columns = [*batch.columns[:_MARK], pa.array(marks(batch)), *batch.columns[_MARK:]]
                writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=self._schema))
                advance(batch.num_rows)
            writer.add_key_value_metadata(self._schema.metadata)  # the types for pandas
        self._part.unlink()
        fresh.replace(self._path)

    def discard(self) -> None:
        """Remove the files written so far."""
        self._writer.close()
        for suffix in (".part", ".new"):
            self._path.with_suffix(suffix).unlink(missing_ok=True)


def _samples(space: Space) -> Iterator[Assignment]:
    """Yield points that differ in one knob from the base: one for every type of its values, and for every text.

    They show the types of values that a column may hold where a design declares none.
    """
    for knob in space.knobs:
        # the last value of each type, and every text
        values = {value if isinstance(value, str) else type(value): value for value in knob.values or (knob.low,)}
        yield from ({knob.path: value} for value in values.values() if not space.is_option(knob.path))


def _kind(path: str, designs: Sequence[BaseModel], values: Sequence[Any]) -> str:
    """Return the type of a column: text, integer, number, or yes or no. values: of the knob, if it is one."""
    # what designs declare decides; where they say nothing, what values are
    types = {kind for design in designs for kind in _kinds(design, path)} or {type(value) for value in values}
    types -= {type(None)}  # a missing value says nothing of the type
    if types and types <= {int, float}:  # a column may mix whole numbers and fractions
        return "integer" if types == {int} else "number"
    return "yes or no" if types == {bool} else "text"


def _kinds(design: BaseModel, path: str) -> Iterator[Any]:
    parent, _, name = path.rpartition(".")
    owner = get_path(design, parent) if parent else design
    if isinstance(owner, BaseModel) and name in type(owner).model_fields:
        yield from _plain(type(owner).model_fields[name].annotation)
    elif get_path(design, path) is not None:
        yield type(get_path(design, path))


def _plain(annotation: Any) -> Iterator[Any]:
    """Yield the types of values that an annotation allows."""
    if get_origin(annotation) is Literal:
        yield from map(type, get_args(annotation))
    elif get_origin(annotation) is Annotated:
        yield from _plain(get_args(annotation)[0])
    elif get_args(annotation):  # unions and containers
        for part in get_args(annotation):
            yield from _plain(part)
    else:
        yield annotation


def _texts(hashes: Keys) -> Any:
    """Return keys as a pyarrow array of texts, without a Python object each."""
    import pyarrow as pa

    data = keys_to_hex(hashes)  # 32 hexadecimal digits for each key
    offsets = np.arange(0, 32 * len(data) + 1, 32, dtype=np.int32)
    return pa.StringArray.from_buffers(len(data), pa.py_buffer(offsets), pa.py_buffer(data))


def _as_met(codes: NDArray[np.int32], texts: Sequence[str]) -> tuple[NDArray[np.int32], list[str]]:
    """Number texts in the order of their first use, whatever order they are listed in."""
    used, first, places = np.unique(codes, return_index=True, return_inverse=True)
    order = np.argsort(first)
    rank = np.empty(len(order), np.int32)
    rank[order] = np.arange(len(order))
    return rank[places], [texts[code] for code in used[order]]


def _dictionary_array(codes: NDArray[Any], names: Sequence[str]) -> Any:
    """Return a dictionary array of texts given as indices into a list of names; a negative index is missing."""
    import pyarrow as pa

    codes = codes.astype(np.int32, copy=False)
    missing = codes < 0
    indices = pa.array(codes, mask=missing) if missing.any() else pa.array(codes)
    return pa.DictionaryArray.from_arrays(indices, pa.array(names, pa.string()))


def _column(path: str, kind: str, rows: Sequence[ScenarioRows]) -> Any:
    """Return the values of the designs of some rows at a path, as a pyarrow array."""
    import pyarrow as pa

    blocks = [group.part.points for group in rows]
    if kind == "text":
        names: dict[str, int] = {}
        # places of texts in the order of their first use
        cells = [
            _cells(block, path, lambda value: names.setdefault(str(value), len(names)), plain="") for block in blocks
        ]
        codes = np.concatenate([np.where(missing, -1, array) for array, missing in cells])  # -1: missing
        return _dictionary_array(codes, list(names))
    # a value of another type is missing, not converted
    cells = [
        _cells(block, path, lambda value: value if _fits(value, kind) else None, plain=_PLAIN[kind]) for block in blocks
    ]
    values: NDArray[Any] = np.concatenate([array for array, _ in cells]).astype(_NUMPY[kind], copy=False)
    missing = np.concatenate([none for _, none in cells])
    return pa.array(values, mask=missing if missing.any() else None)


def _cells(
    points: Points, path: str, read: Callable[[Any], Any], *, plain: str
) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """Return the values of some points at a path, as `read` gives them, and where they are None.

    plain: kinds of arrays that need no reading.
    """
    column = points.values_at(path)
    if isinstance(column, np.ndarray) and column.dtype.kind in plain:
        return column, np.zeros(len(column), bool)
    values = column.tolist() if isinstance(column, np.ndarray) else [column]
    readings = [None if value is None else read(value) for value in values]
    size = points.size // len(readings)  # a constant of all points, or an axis that later axes repeat
    none = np.array([value is None for value in readings])
    # 0 where missing: masked
    return np.repeat([0 if value is None else value for value in readings], size), np.repeat(none, size)


def _fits(value: Any, kind: str) -> bool:
    if isinstance(value, bool) or kind == "yes or no":  # True is an int in Python
        return isinstance(value, bool) and kind == "yes or no"
    return isinstance(value, int if kind == "integer" else (int, float))


_REMEMBERED = 1_000_000  # designs of baselines that are kept, at about 100 bytes each
_WEIGHT = 100  # designs that a grid counts for by itself: it takes some kilobytes, however small


class Baselines:
    """Baselines of the blocks of one scenario.

    change: values that turn a point into its baseline. identify: makes a part of some points, with their keys.
    """

    def __init__(self, space: Space, change: Mapping[str, Any], identify: Callable[[Points], Part]) -> None:
        self._space, self._change, self._identify = space, change, identify
        self._known: OrderedDict[str, Part] = OrderedDict()  # name of a grid -> its designs, the least used first
        self._held = 0

    def of(self, block: Points) -> Iterator[tuple[Points, Part]]:
        """Yield the block, or parts of it, each with the grid of its baselines.

        A block is split where the baselines of its points do not form one grid.
        """
        # any point of the block: which knobs count is the same in all of it
        point = {**block.assignment, **{path: values[0] for path, values in block.axes.items()}, **self._change}
        active = self._space.active(point)
        axes = {path: values for path, values in block.axes.items() if path in active and path not in self._change}
        fixed = {path: value for path, value in active.items() if path not in axes}
        # values, not identities: blocks of other parts of the space may share a grid
        name = repr((fixed, [(path, values.tolist()) for path, values in axes.items()]))
        if name not in self._known:
            free = [Knob(path, tuple(values.tolist())) for path, values in axes.items()]
            grids = list(self._space.resolve(fixed, free))
            if len(grids) > 1:  # a rule of the space may depend on an axis: take it apart
                yield from self._of_parts(block, next(path for path, values in axes.items() if len(values) > 1))
                return
            self._remember(name, grids[0])
        self._known.move_to_end(name)
        yield block, self._known[name]

    def _of_parts(self, block: Points, path: str) -> Iterator[tuple[Points, Part]]:
        for place in range(len(block.axes[path])):
            yield from self.of(block.part({**block.axes, path: block.axes[path][place : place + 1]}))

    def _remember(self, name: str, grid: Points) -> None:
        self._known[name] = self._identify(grid)
        self._held += grid.size + _WEIGHT
        while self._held > _REMEMBERED and len(self._known) > 1:  # the newest grid stays, however large
            _, dropped = self._known.popitem(last=False)
            self._held -= dropped.size + _WEIGHT


def places(block: Points, baseline: Points) -> NDArray[np.intp]:
    """Return the index of each point's baseline in the grid of baselines of its block, [block.size]."""
    shape = tuple(len(values) for values in block.axes.values())
    if baseline.size == block.size:  # no axis was dropped: one to one
        return np.arange(block.size)
    # dropped axes have length 1
    extents = tuple(len(values) if path in baseline.axes else 1 for path, values in block.axes.items())
    assert math.prod(extents) == baseline.size
    # all points along a dropped axis share a baseline
    return np.broadcast_to(np.arange(baseline.size).reshape(extents), shape).reshape(-1)
