"""Calibrated numbers of `conf` as they stand in its files, copies of them, and how one is written back.

A number is calibrated by an entry of `sources`, which holds for all below its path that has no entry of its own, or by
a coefficient `{value, provenance: calibrated, ...}`. Each says in `calibration` what it was fitted to.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dse import plugins
from dse.config.options import conf_dir
from dse.config.variants import load_option
from dse.values import CalibrationSource, Source
from dse.values.units import amount

_DIGITS = 5  # of a number that is written
_NOT_VALUES = ("sources", "note", "fitted_on")


@dataclass(frozen=True)
class Number:
    """A calibrated number: the option of `conf` (gpu/h100), its dotted path there, its value in SI, and its fit."""

    option: str
    path: str
    value: float
    calibration: CalibrationSource

    def __str__(self) -> str:
        return f"{self.option}: {self.path}"


@dataclass(frozen=True)
class Copy:
    """A number that is that of another option, at `original` there."""

    option: str
    path: str
    value: float
    other: str
    original: str

    def __str__(self) -> str:
        return f"{self.option}: {self.path}"


def calibrated_numbers() -> list[Number]:
    """All calibrated numbers of `conf` that say what they were fitted to."""
    return [
        Number(option, path, value, source.calibration)
        for option, _, path, value, source in _sourced_numbers()
        if source.calibration is not None
    ]


def without_calibration() -> list[str]:
    """Calibrated entries of `conf` that do not say what they were fitted to, or that name no number."""
    entries = [each for each in _entries() if each[2].provenance == "calibrated"]
    bare = [f"{option}: {path}" for option, path, source in entries if source.calibration is None]
    numbers = {(option, entry) for option, entry, *_ in _sourced_numbers()}
    return bare + [f"{option}: {path} names no number" for option, path, _ in entries if (option, path) not in numbers]


def copies() -> list[Copy]:
    """All numbers of `conf` that are those of another option, by their source."""
    found = list[Copy]()
    for option, entry, path, value, source in _sourced_numbers():
        if source.copy_of is not None:
            other, _, place = source.copy_of.partition(":")
            found.append(Copy(option, path, value, other, (place or entry) + path.removeprefix(entry)))
    return found


def value_of(option: str, path: str) -> float | None:
    """A number of an option in SI; None where there is none at the path."""
    node: Any = read_option(option)
    for name in path.split("."):
        node = node.get(name) if isinstance(node, Mapping) else None
    return _number(node)


def read_option(option: str) -> dict[str, Any]:
    """The tree of an option, with what it inherits as a variant."""
    file = file_of(option)
    tree: dict[str, Any] = _read(file, file.stat().st_mtime_ns)
    return tree


@functools.cache
def _read(file: Path, changed_ns: int) -> Any:
    """The tree of an option as its file was when it was changed last."""
    return load_option(file)


def _entries() -> Iterator[tuple[str, str, Source]]:
    """Yield option, path and source of every entry of `conf` that has a provenance."""
    for folder in _folders():
        for file in sorted(folder.rglob("*.yaml")):
            tree = _read(file, file.stat().st_mtime_ns)
            if isinstance(tree, Mapping):
                yield from _entries_below(str(file.relative_to(folder).with_suffix("")), tree, "")


def _entries_below(option: str, tree: Mapping[str, Any], path: str) -> Iterator[tuple[str, str, Source]]:
    sources = tree.get("sources")
    for name, source in sources.items() if isinstance(sources, Mapping) else ():
        yield option, f"{path}{name}", Source.model_validate(source)
    for name, value in tree.items():
        if isinstance(value, Mapping) and name != "sources":
            if "provenance" in value and "value" in value:
                own = {key: value[key] for key in Source.model_fields if key in value}
                yield option, f"{path}{name}", Source.model_validate(own)
            yield from _entries_below(option, value, f"{path}{name}.")


def _sourced_numbers() -> Iterator[tuple[str, str, str, float, Source]]:
    """Yield option, path of the entry, path of the number, value and source of all numbers with an entry."""
    entries = list(_entries())
    known = {(option, path) for option, path, _ in entries}
    for option, path, source in entries:
        top = read_option(option) if source.calibration or source.copy_of else {}
        for leaf, value in _leaves(_below(top, path), path):
            if _nearest(option, leaf.removesuffix(".value"), known) == path:
                yield option, path, leaf, value, source


def _below(tree: Any, path: str) -> Any:
    for name in path.split("."):
        tree = tree.get(name) if isinstance(tree, Mapping) else None
    return tree


def _leaves(node: Any, path: str) -> Iterator[tuple[str, float]]:
    """Yield (path, value in SI) of numbers at and below a node; of a coefficient its value alone."""
    if isinstance(node, Mapping):
        names = ["value"] if "provenance" in node else [name for name in node if name not in _NOT_VALUES]
        for name in names:
            yield from _leaves(node[name], f"{path}.{name}")
    elif (number := _number(node)) is not None:
        yield path, number


def _number(node: Any) -> float | None:
    if isinstance(node, str):
        quantity = amount(node)
        return None if quantity is None else quantity[0]
    return float(node) if isinstance(node, (int, float)) and not isinstance(node, bool) else None


def _nearest(option: str, path: str, known: set[tuple[str, str]]) -> str:
    while path and (option, path) not in known:
        path = path.rpartition(".")[0]
    return path


def file_of(option: str) -> Path:
    """The file of an option of `conf`. Raises StopIteration where there is none."""
    return next(file for folder in _folders() if (file := folder / f"{option}.yaml").is_file())


def _folders() -> list[Path]:
    """Folders of configuration: ours, and those of installed plug-ins."""
    return [conf_dir(), *plugins.configurations()]


def write_number(file: Path, path: str, value: float) -> None:
    """Write a number at a dotted path into a file, in the unit that stands there; nothing else of the file changes.

    A variant of another option that has no such path takes the number from that one, and is left as it is.
    """
    text = file.read_text(encoding="utf-8")
    node: Any = yaml.compose(text)
    for name in path.split("."):
        node = next((inner for key, inner in node.value if key.value == name), None)
        if node is None and "variant_of" in yaml.safe_load(text):
            return
    number, _, unit = str(node.value).partition(" ")
    shipped = _number(yaml.safe_load(node.value))
    assert shipped is not None, f"{file}: {path} is no number"
    fresh = f"{float(number) * value / shipped:.{_DIGITS}g}"
    fresh = fresh if "." in fresh else fresh.replace("e", ".0e")  # 2e-05 would be a text
    fresh = f"{fresh} {unit}".strip()
    file.write_text(text[: node.start_mark.index] + fresh + text[node.end_mark.index :], encoding="utf-8")


def table_path(target: str, data: Path | None) -> Path | None:
    """Where a table of rows is: below a folder of measured tables, or shipped; None where it is in neither."""
    places = [folder / target for folder in (data, *(folder / "data" for folder in _folders())) if folder is not None]
    return next((place for place in places if place.is_file()), None)
