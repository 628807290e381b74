"""Designs that are sections of values under any names, and what holds for all backends of such designs."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from dse.backend import Backend, Columns, Metric, Tree
from dse.errors import Problems, did_you_mean
from dse.space import get_path, set_path
from dse.values import LABELS
from dse.values.units import Bytes, BytesPerSecond, FlopPerSecond, Seconds

_IGNORED_KEYS = LABELS - {"name"}  # for people only: not passed to a program, and without effect on keys
_SCENARIO = re.compile(r"[A-Za-z0-9_.-]{1,80}")
_QUANTITIES: Mapping[str, TypeAdapter[float]] = {
    "_bytes_per_s": TypeAdapter(BytesPerSecond),
    "_flop_per_s": TypeAdapter(FlopPerSecond),
    "_bytes": TypeAdapter(Bytes),
    "_s": TypeAdapter(Seconds),
}


class ExternalDesign(BaseModel):
    """One point: sections by name, each a mapping of numbers, strings, booleans, lists and mappings."""

    model_config = ConfigDict(frozen=True, extra="allow")


class SectionsBackend(Backend):
    """A backend whose designs are sections of values under any names."""

    takes_any_keys = True

    def sections(self, tree: Tree) -> None:
        """Check that sections hold keys; `scenarios` is optional."""
        check = Problems()
        parts = {name: part for name, part in tree.items() if name != "scenarios"}
        for name, part in parts.items():
            if not isinstance(part, Mapping):
                check.add(name, "is no section of keys", value=part, way_out="write it as a mapping")
            # attributes of the model would hide the section
            if hasattr(ExternalDesign, name) or name in LABELS or name.startswith("_"):
                check.add(name, "cannot be the name of a section", way_out="choose another")
        if not parts:
            check.add(
                "configuration", "has no section of values for the program", way_out="see docs/how-to/simulator.md"
            )
        check.done()

    def scenarios(self, tree: Tree) -> Mapping[str, Tree]:
        """Merge each entry of `scenarios` into the other sections; without it, return a single scenario `base`."""
        parts = {name: part for name, part in tree.items() if name != "scenarios"}
        overrides = tree.get("scenarios")
        check, trees = Problems(), dict[str, Tree]()
        if overrides is not None and not (isinstance(overrides, Mapping) and overrides):
            check.add("scenarios", "must map names to the values that they change")
            overrides = None  # go on, so that one message lists all problems
        for name, changes in ({"base": {}} if overrides is None else overrides).items():
            if not _SCENARIO.fullmatch(name) or not isinstance(changes, Mapping):
                rule = "must be a name (letters, digits, - _ .) with the values that it changes"
                check.add(f"scenarios.{name}", rule)
                continue
            trees[name] = _change_values(parts, changes, check=check, where=f"scenarios.{name}")
        check.done()
        return trees

    def design(self, tree: Tree) -> ExternalDesign:
        """Freeze the sections; strings under a name that ends in a unit become numbers in that unit."""
        check = Problems()
        parts = {name: _frozen(part, name, check) for name, part in tree.items() if name != "scenarios"}
        check.done()
        return ExternalDesign.model_construct(**parts)

    def condition(self, path: str, tree: Tree) -> Mapping[str, Any] | None:
        """Accept every value of the design as a knob, without a condition."""
        parent, _, name = path.rpartition(".")
        owner = get_path(tree, parent) if parent else None
        if (
            path.startswith("scenarios.")
            or name in _IGNORED_KEYS
            or not isinstance(owner, Mapping)
            or name not in owner
        ):
            return None
        return None if isinstance(owner[name], Mapping) else {}

    def relate(self, point: Columns, baseline: Columns) -> Columns:
        """Improvement of each metric over the baseline, as a ratio; NaN where the denominator is 0."""
        ratios = {}
        for name, metric in self.metrics.items():
            if improvement(name) in self.relations:
                better, worse = (baseline, point) if metric.goal == "minimize" else (point, baseline)
                ratio = np.full(len(point[name]), math.nan)
                # a ratio to nothing is no number
                ratios[improvement(name)] = np.divide(better[name], worse[name], out=ratio, where=worse[name] != 0)
        return ratios

    def facts(self, design: BaseModel) -> Sequence[tuple[str, Any, str, str]]:
        """Every number of the design, with the user as its source."""
        numbers = [(path, value) for path, value in leaves(dict(design)) if type(value) in (int, float)]
        return [(path, value, "user", "the sections of the study") for path, value in numbers]


def improvement(name: str) -> str:
    """Name of a metric's ratio to the baseline."""
    return f"{name}_improvement"


def relations(metrics: Mapping[str, Metric]) -> Iterator[tuple[str, Metric]]:
    """Yield, by name, a ratio for every metric whose range has no negative values."""
    for name, metric in metrics.items():
        if metric.low >= 0:
            ratio = "baseline / point" if metric.goal == "minimize" else "point / baseline"
            yield improvement(name), Metric("x", f"{name}: {ratio}, better above 1", goal="maximize")


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted path, value) of every leaf: every value that is not a mapping."""
    if not isinstance(tree, Mapping):
        yield path, tree
        return
    for name, value in tree.items():
        yield from leaves(value, f"{path}.{name}" if path else name)


def _change_values(base: Tree, changes: Tree, *, check: Problems, where: str) -> Tree:
    """Copy a tree with some of its values changed; a path that does not exist is noted as a problem."""
    tree, values = copy.deepcopy(dict(base)), dict(leaves(base))
    for path, value in leaves(changes):
        if path in values:
            set_path(tree, path, value)
        else:
            check.add(f"{where}.{path}", "is no value of the design", way_out=did_you_mean(path, values))
    return tree


def _frozen(value: Any, path: str, check: Problems) -> Any:
    """Convert a value to an immutable one that JSON can represent; other values are noted as problems."""
    if isinstance(value, Mapping):
        for name in value:
            if not name or set(name) & set(". \0"):
                way = f"rename it, or write `- override /{path.partition('.')[0]}: null` in the study's defaults"
                check.add(f"{path}.{name}", "must have a name without dots and blanks", way_out=way)
        return {
            name: _frozen(value[name], f"{path}.{name}", check) for name in sorted(value) if name not in _IGNORED_KEYS
        }
    if isinstance(value, (list, tuple)):
        return tuple(_frozen(item, f"{path}.{index}", check) for index, item in enumerate(value))
    if isinstance(value, str):
        return _quantity(value, path, check)
    if isinstance(value, float) and not math.isfinite(value):
        check.add(path, "must be finite", value=value)
    elif isinstance(value, int) and not -(2**63) <= value < 2**63:  # keys and tables hold 64 bits
        check.add(path, "does not fit into 64 bits", value=value)
    elif not isinstance(value, (int, float, bool, type(None))):
        check.add(path, "must be a number, a text, true or false, a list or a section", value=str(value))
    return value


def _quantity(text: str, path: str, check: Problems) -> Any:
    """Return a string unchanged, or as a number if the name ends in a unit."""
    if "\0" in text:
        check.add(path, "must hold no NUL")
    name = path.rpartition(".")[2]
    name = f"_{name}" if name.endswith("_per_s") else name  # a rate may have no other words
    reader = next((reader for ending, reader in _QUANTITIES.items() if name.endswith(ending)), None)
    try:
        return text if reader is None else reader.validate_python(text)
    except ValidationError as error:
        check.add(path, error.errors()[0]["msg"].removeprefix("Value error, "), value=text)
        return text
