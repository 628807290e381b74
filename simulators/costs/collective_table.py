"""`machine libraries`: software of collectives on a machine: its time by size, what it holds, and why it does not run.

The fastest of a size is marked with `*`. A size that software leaves to other software by default has no time, unless
`sizes=any`. `show=<software>` lists the constants of one with their sources.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from dse.errors import Problems, pairs, validate_as
from dse.errors.parsing import whole_number
from dse.results.run_folder import CommandAnswer
from dse.values import Frozen
from dse.values.units import Bytes, Integer, quantity_text, with_prefix
from simulators.costs.algorithms import Pattern
from simulators.costs.collective import collective_seconds
from simulators.costs.collective_paths import describe_held
from simulators.costs.collective_software import (
    Call,
    CollectiveSoftware,
    Question,
    all_software,
    named_software,
    refusal,
)
from simulators.hardware.machine import System, tree_of

if TYPE_CHECKING:
    from rich.table import Table

SIZES = "256KiB,1MiB,4MiB,16MiB,64MiB,256MiB"


class LibrariesRequest(Frozen):
    """Words of the command that have a unit or a choice."""

    pattern: Pattern
    bytes: tuple[Annotated[Bytes, Field(ge=1)], ...]
    gpus: Integer | None = None
    sizes: Literal["framework", "any"] = "framework"


@dataclass(frozen=True)
class SoftwareRow:
    """One piece of software on a machine. seconds: by size, NaN where it does not run; why_not: at which it does not.

    holds: CTAs, engines and buffers; "" where it does not exist at any size.
    """

    name: str
    seconds: NDArray[np.float64]
    holds: str
    why_not: str


def compare_software(words: Sequence[str]) -> CommandAnswer:
    """`machine libraries pattern=<name> [system=] [gpus=] [bytes=] [sizes=] | show=<software>`. Raises ConfigError."""
    if any(word.startswith("show=") for word in words):
        name = pairs(words, {"show": ""})["show"]
        return CommandAnswer(Path(), tuple(_constants(named_software(name, path="show", others=()))))
    options = pairs(words, {"pattern": "", "system": "h100_8", "bytes": SIZES}, optional=["gpus", "sizes"])
    tree: dict[str, Any] = {name: options[name] for name in ("pattern", "gpus", "sizes") if name in options}
    if (count := whole_number(tree.get("gpus", ""))) is not None:
        tree["gpus"] = count
    request = validate_as(LibrariesRequest, {**tree, "bytes": options["bytes"].split(",")}, path="")
    machine, check = System.model_validate(tree_of(options["system"])), Problems()
    most = 1 if machine.node is None else machine.node.num_gpus
    gpus = most if request.gpus is None else request.gpus
    if not 2 <= gpus <= most:
        way = f"write gpus={most}" if most > 1 else "take a system with several GPUs"
        check.add("gpus", f"is no group of a node of {machine.name}, which has {most}", value=gpus, way_out=way)
    for size in sorted(size for size, times in Counter(request.bytes).items() if times > 1):
        check.add("bytes", "is named twice", value=with_prefix(size, "byte"), way_out="write each size once")
    check.done()
    rows = software_rows(machine, request, gpus)
    return CommandAnswer(Path(), tuple(_parts(machine, request, gpus, rows)))


def _constants(software: CollectiveSoftware) -> list[Table | str]:
    """What software is, and each of its constants with the source."""
    from rich.table import Table

    shown = Table()
    for name in ("constant", "value", "known", "source"):
        shown.add_column(name, overflow="fold")
    above = ("", "")
    for path, value, kind, source in software.facts_below(""):
        constant = path.removeprefix(".")
        if not constant.startswith("fitted_on"):
            text = quantity_text(value, _unit_path(constant)) if isinstance(value, (int, float)) else str(value)
            shown.add_row(constant, text, *(("", "") if (kind, source) == above else (kind, source)))
            above = kind, source
    rows = f"; fitted on {len(software.fitted_on)} measured rows" if software.fitted_on else ""
    head = f"{software.name}: {software.description} ({software.versions}){rows}"
    runs = f"runs {', '.join(software.patterns)} on {', '.join(software.gpus)}, across {', '.join(software.topologies)}"
    refuses = [f"refuses {software.refuses}"] if software.refuses else []
    return [head, runs, f"holds {software.buffers}", *refuses, shown]


def _unit_path(path: str) -> str:
    """The path whose last name says the unit: of a value by GPU, that of the table which it is in."""
    above, _, last = path.rpartition(".")
    return above if above.endswith("_s") and "_" not in last else path


def software_rows(machine: System, request: LibrariesRequest, gpus: int) -> list[SoftwareRow]:
    """All software, the fastest for the largest payload first, and after it what does not run."""
    rows = [
        software_row(machine, request, gpus, Call(name, within_sizes=request.sizes == "framework"))
        for software in all_software()
        for name in software.names
    ]
    return sorted(rows, key=lambda row: (not row.holds, np.nan_to_num(row.seconds[-1], nan=np.inf), row.name))


def software_row(machine: System, request: LibrariesRequest, gpus: int, call: Call) -> SoftwareRow:
    """What a call of software takes at each size."""
    reasons = [refusal(call, machine, Question.of(request.pattern, size, gpus)) for size in request.bytes]
    seconds = np.full(len(request.bytes), np.nan)
    runs = [index for index, reason in enumerate(reasons) if reason is None]
    if runs:
        sizes = np.asarray(request.bytes, float)[runs]
        seconds[runs] = collective_seconds(machine, request.pattern, sizes, gpus, call)
    holds = describe_held(call, machine, gpus, request.pattern) if runs else ""
    return SoftwareRow(call.name, seconds, holds, "; ".join(dict.fromkeys(filter(None, reasons))))


def _parts(machine: System, request: LibrariesRequest, gpus: int, rows: Sequence[SoftwareRow]) -> list[Table | str]:
    title = f"{request.pattern} among {gpus} GPUs of {machine.name}, by the size of a GPU's larger buffer"
    there = [row for row in rows if row.holds]
    parts: list[Table | str] = [_table(title, request, there)] if there else [f"{title}: no software is known"]
    absent = {row.name: row.why_not for row in rows if row.why_not}
    return parts + ([f"no time: {_lines(absent)}"] if absent else [])


def _lines(reasons: Mapping[str, str]) -> str:
    return "".join(f"\n  {name}: {reason}" for name, reason in reasons.items())


def _table(title: str, request: LibrariesRequest, rows: Sequence[SoftwareRow]) -> Table:
    from rich.table import Table

    shown = Table(title=title, caption="* the fastest of a size")
    shown.add_column("software")
    for size in request.bytes:
        shown.add_column(with_prefix(size, "byte"), justify="right")
    shown.add_column("holds on each GPU", overflow="fold")
    times = np.array([row.seconds for row in rows])
    least = np.nanmin(np.where(np.all(np.isnan(times), axis=0), np.inf, times), axis=0)
    for row in rows:
        cells = [_cell(value, best) for value, best in zip(row.seconds.tolist(), least.tolist(), strict=True)]
        shown.add_row(row.name, *cells, row.holds)
    return shown


def _cell(seconds: float, least: float) -> str:
    if np.isnan(seconds):
        return "–"
    return f"{with_prefix(seconds, 'second')}{' *' if seconds == least else '  '}"
