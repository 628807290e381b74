"""Machines: which backends each serves, and how its constants are known (`machine list`, `machine show`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from dse.config.options import list_options
from dse.errors import ConfigError, Problem, Problems, pairs, validate_as
from dse.values.units import quantity_text
from simulators.hardware.device import Device
from simulators.hardware.machine import System, View, tree_of
from simulators.hardware.memory_system import MemorySystem
from simulators.hardware.schedule_system import ScheduleSystem

VIEWS: Mapping[str, type[View]] = {"schedules": ScheduleSystem, "iterations": Device, "requests": MemorySystem}
"""What is simulated -> the view of a machine that its backend reads."""
_KNOWN = ("measured", "calibrated", "vendor", "abstract", "secondary", "derived", "memory", "assumed", "user")


@dataclass(frozen=True)
class ServedMachine:
    """A machine by what it serves. missing: view -> dotted paths that it lacks; precisions: with fitted constants.

    constants: dotted path -> (value, provenance, source).
    """

    name: str
    description: str
    missing: Mapping[str, tuple[str, ...]]
    precisions: Mapping[str, bool]
    constants: Mapping[str, tuple[Any, str, str]]

    @property
    def provenance(self) -> Mapping[str, int]:
        """Number of constants by provenance."""
        counts = Counter(kind for _, kind, _ in self.constants.values())
        return {kind: counts[kind] for kind in _KNOWN if counts[kind]}


def served_by(name: str) -> ServedMachine:
    """Look at a machine, by the name of a shipped system or by path. Raises ConfigError."""
    tree = tree_of(name)
    machine = validate_as(System, tree, path="system")
    missing = {view: tuple(_missing_fields(kind, tree)) for view, kind in VIEWS.items()}
    constants = {path.partition(".")[2]: (value, kind, source) for path, value, kind, source in machine.facts()}
    fitted = {
        str(precision): constants[f"gpu.efficiency.{precision}.compute"][1] == "calibrated"
        for precision in machine.gpu.efficiency or ()
    }
    return ServedMachine(machine.name, machine.description, missing, fitted, constants)


def _missing_fields(kind: type[BaseModel], tree: Mapping[str, Any]) -> Iterator[str]:
    check = Problems()
    check.model(kind, tree, path="")
    yield from (problem.path for problem in check.found)


def list_machines(words: Sequence[str]) -> int:
    """`machine list`: a line for every machine."""
    from dse.results import report

    pairs(words, {})
    console = report.console()
    console.print(_table([served_by(name) for name in list_options("system")]))
    console.print(
        "iterations: precisions with constants, in parentheses if they are another GPU's. constants: by how"
        " they are known; `machine show <name>` lists them with their sources"
    )
    return 0


def show_machine(words: Sequence[str]) -> int:
    """`machine show <name or YAML path>`: every constant of one machine, and what a backend misses."""
    from dse.results import report

    if len(words) != 1 or words[0].startswith("-"):
        raise ConfigError(
            [Problem(" ".join(words) or "machine", "is not one machine", way_out="write machine show h100_8")]
        )
    report.console().print(_constants(served_by(words[0])))
    return 0


def _table(machines: Sequence[ServedMachine]) -> Any:
    from rich.table import Table

    shown = Table("system", *VIEWS, "constants", title="Machines and what they serve")
    for machine in machines:
        served = [_served(machine, view) if not machine.missing[view] else "–" for view in VIEWS]
        shown.add_row(machine.name, *served, _counts(machine))
    return shown


def _served(machine: ServedMachine, view: str) -> str:
    """Say how a machine serves a view of which it lacks nothing: of iterations, at which precisions."""
    if view != "iterations":
        return "yes"
    fitted = (name if here else f"({name})" for name, here in machine.precisions.items())
    return " ".join(fitted) or "no constants"


def _counts(machine: ServedMachine) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in machine.provenance.items())


def _constants(machine: ServedMachine) -> Any:
    """What a machine serves, and its constants part by part; a source that repeats the one above is left out."""
    from rich.console import Group

    served = (
        f"{view}: no (missing: {', '.join(paths)})" if paths else f"{view}: {_served(machine, view)}"
        for view, paths in machine.missing.items()
    )
    title = f"{machine.name}: {machine.description}"
    return Group(title, *served, f"{len(machine.constants)} constants: {_counts(machine)}", _sources(machine))


def _sources(machine: ServedMachine) -> Any:
    from rich.table import Table

    shown, part, above = Table(), "", ("", "")
    for name in ("constant", "value", "known", "source"):
        shown.add_column(name, overflow="fold")
    for path, (value, kind, source) in machine.constants.items():
        if (here := ".".join(path.split(".")[:-1][: 1 if path.startswith("cost_") else 2])) != part:
            shown.add_section()
            part, above = here, ("", "")
        shown.add_row(path, _text(path, value), *(("", "") if (kind, source) == above else (kind, source)))
        above = kind, source
    return shown


def _list_text(values: list[Any]) -> str:
    """A list in few words: how many values of which keys, or the values themselves, of pairs as `256 x 128`."""
    if values and isinstance(values[0], Mapping):
        return f"{len(values)} of {', '.join(values[0])}"
    return ", ".join(" x ".join(map(str, item)) if isinstance(item, (list, tuple)) else str(item) for item in values)


def _text(path: str, value: Any) -> str:
    """Value of a constant in its unit; of a mapping, such as rates by format, in that of its name."""
    above = path.rpartition(".")[0]
    if not isinstance(value, (int, float)):
        return _list_text(value) if isinstance(value, list) else str(value)
    if path.startswith("cost_weights."):
        return f"{value:g}"
    return quantity_text(value, above if above.endswith("_per_s") else path)
