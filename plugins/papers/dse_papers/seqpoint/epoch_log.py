"""SeqPoint on an epoch's log of one's own: which iterations to profile, and what they project.

    python -m dse profile seqpoint data=<csv> [k0=5] [error=0.01] [out=<csv>]

The CSV has a row for each iteration in the order of the epoch: `sequence_length`, `seconds`, and, if other
configurations were timed, `seconds_<name>` of each. Other columns are not read. What is wrong is told by line and
column.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dse.errors import ConfigError, Problem, Problems, pairs, validate_as
from dse.errors.parsing import whole_number
from dse.files import atomic_replacement, read_csv
from dse.results.words import cell
from simulators.steps.epochs.seqpoint import (
    Iterations,
    Sample,
    choose,
    cut_parallel,
    cut_sequential,
    iterations_cut,
    project_epoch,
)

if TYPE_CHECKING:
    from rich.table import Table

Floats = NDArray[np.float64]

_LENGTH, _SECONDS = "sequence_length", "seconds"
_MOST_LENGTH = 2**31


def seqpoint(words: Sequence[str]) -> int:
    """`profile seqpoint data=<csv> [k0=5] [error=0.01] [out=<csv>]`: iterations that stand for an epoch."""
    from dse.results import report

    defaults = {name: str(Iterations.model_fields[name].default) for name in ("k0", "error")}
    options = pairs(words, {"data": "", **defaults}, optional=["out"])
    # k0 is a whole number, error is not: what is neither stays text, for validation to refuse
    numbers = {name: whole_number(options[name]) for name in defaults}
    choice = {name: _number(options[name]) if number is None else number for name, number in numbers.items()}
    iterations = validate_as(Iterations, {"name": "seqpoint", "method": "seqpoint", **choice}, path="")
    log = read(Path(options["data"]))
    sample = choose(iterations, log[_LENGTH], log[_SECONDS])
    console = report.console()
    for part in (_points(log, sample), _configurations(log, sample)):
        console.print(part)
    for text in _summary_lines(iterations, log, sample):
        console.print(text, soft_wrap=True)
    if "out" in options:
        _write(Path(options["out"]), Path(options["data"]), list(_rows(log, sample)))
        console.print(f"written to {options['out']}", soft_wrap=True)
    return 0


def read(path: Path) -> dict[str, Floats]:
    """Columns [N] of an epoch's log: sequence_length, seconds [s], and seconds_<name>. Raises ConfigError."""
    table = read_csv(path, needed=(_LENGTH, _SECONDS), way_out="name a CSV of the iterations of an epoch")
    if not table.rows:
        raise ConfigError([Problem(path.name, "holds no iterations")])
    names = [name for name in table.columns if name in (_LENGTH, _SECONDS) or name.startswith(f"{_SECONDS}_")]
    check = Problems()
    for line, cells in table.rows:
        check.found += [problem for name in names for problem in _wrong(f"{path.name}, line {line}", name, cells[name])]
    check.done(path.name)
    return {name: np.array([float(cells[name]) for _, cells in table.rows]) for name in names}


def _wrong(where: str, name: str, cell: str) -> Iterator[Problem]:
    """Yield the problem of a cell, if it has one."""
    value = _number(cell)
    if not isinstance(value, float) or not math.isfinite(value):
        yield Problem(f"{where}, {name}", "is no number" if cell else "is missing", cell or None)
    elif name == _LENGTH and not (value.is_integer() and 1 <= value <= _MOST_LENGTH):
        yield Problem(f"{where}, {name}", "must be a whole number from 1", cell)
    elif value <= 0:
        yield Problem(f"{where}, {name}", "must be a positive time in seconds", cell)


def _number(text: str) -> float | str:
    """A text as a number, if it is one."""
    with suppress(ValueError):
        return float(text)
    return text


def _rows(log: Mapping[str, Floats], sample: Sample) -> Iterator[tuple[int, int, float, float]]:
    """Iteration (the first is 0), sequence length, seconds and weight of each point, by length."""
    for point in np.argsort(log[_LENGTH][sample.places], kind="stable"):
        place = int(sample.places[point])
        yield place, int(log[_LENGTH][place]), float(log[_SECONDS][place]), float(sample.weights[point])


def _points(log: Mapping[str, Floats], sample: Sample) -> Table:
    from rich.table import Table

    table = Table("iteration", _LENGTH, _SECONDS, "weight", title="iterations that stand for the epoch")
    for place, length, seconds, weight in _rows(log, sample):
        table.add_row(str(place), str(length), cell(seconds, "s"), cell(weight))
    return table


def _configurations(log: Mapping[str, Floats], sample: Sample) -> Table:
    """The epoch's time on each configuration and the speed-up over the first, as measured and as projected."""
    from rich.table import Table

    names = [name for name in log if name != _LENGTH]
    # the first column is the reference of speed-ups
    names.sort(key=lambda name: name != _SECONDS)
    times = np.array([log[name] for name in names])
    true, projected = times.sum(-1), project_epoch(sample, times)
    table = Table("configuration", "epoch", "projected", "error", "speed-up", "projected", "error")
    for name, measured, other in zip(names, true, projected, strict=True):
        speedup, guess = true[0] / measured, projected[0] / other
        # a generator: the first error is of the time, the second of the speed-up
        errors = (f"{100 * (shown / real - 1):+.2f} %" for shown, real in ((other, measured), (guess, speedup)))
        texts = (cell(float(measured), "s"), cell(float(other), "s"), next(errors))
        table.add_row(name, *texts, cell(float(speedup), "x"), cell(float(guess), "x"), next(errors))
    return table


def _summary_lines(iterations: Iterations, log: Mapping[str, Floats], sample: Sample) -> Iterator[str]:
    seconds, every = log[_SECONDS], len(np.unique(log[_LENGTH]))
    yield f"{len(sample.places)} of {len(seconds)} iterations, of {every} lengths; error {100 * sample.error:+.3g} %"
    # with a bin for each length the rest of the error is scatter within a length
    if abs(sample.error) > iterations.error:
        yield f"above {100 * iterations.error:g} %, with every length taken: iterations of one length differ"
    yield (
        f"profiling is cut {cut_sequential(sample, seconds):.3g} times one after another,"
        f" {cut_parallel(sample, seconds):.3g} times all at once, {iterations_cut(sample):.3g} times in iterations"
    )


def _write(out: Path, data: Path, rows: Sequence[tuple[float, ...]]) -> None:
    if out.exists() and out.samefile(data):
        raise ConfigError([Problem("out", "would write over the log", str(out), "name another")])
    try:
        with atomic_replacement(out) as fresh, fresh.open("w", encoding="utf-8", newline="") as text:
            writer = csv.writer(text)
            writer.writerow(("iteration", _LENGTH, _SECONDS, "weight"))
            writer.writerows(rows)
    except OSError as error:
        raise ConfigError([Problem("out", f"cannot be written ({error.strerror})", str(out), "name another")]) from None
