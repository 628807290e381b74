"""`explain <A> <B>`: where the difference between two points, or two profiles, comes from.

Each is cut along its critical path into parts that add up to its time, and so do their differences to the difference.
Of a point these are the limits of the tasks (`Replay.limits`), of a profile its stretches
(`simulators.profiles.critical_path`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dse.errors import ConfigError, Problem
from dse.results.finished_run import Finished
from dse.results.run_folder import Outputs
from dse.results.words import AS_FAST, cell, gain_in_words
from simulators.profiles.critical_path import GAP, HOST, LATE, critical_path
from simulators.profiles.import_command import merged, writable
from simulators.profiles.kernel_classes import COLLECTIVE, MOVED
from simulators.profiles.readers import read
from simulators.profiles.waits import waits

if TYPE_CHECKING:
    import pandas as pd
    from rich.table import Table

_LANES = (COLLECTIVE, *MOVED, HOST, LATE)
_SMALL = "below 0.1 % each"
_SHOWN = 12  # parts in the table


@dataclass(frozen=True)
class Explained:
    """What takes the time of a point or a profile. parts: cause -> seconds, which add up to `seconds`.

    choices: knob -> value, of a point. path: rows of `lane`, `kind`, `start_s`, `finish_s` of its picture.
    """

    name: str
    seconds: float
    parts: Mapping[str, float]
    path: pd.DataFrame
    choices: Mapping[str, Any]


def explain(words: Sequence[str]) -> int:
    """`explain <A> <B> [out=<folder>] [output_dir=...]`: print what differs, and draw both."""
    from dse.results import report

    options = {name: value for name, _, value in (word.partition("=") for word in words) if value}
    names = [word for word in words if "=" not in word]
    if len(names) != 2 or set(options) - {"out", "output_dir"}:
        way = "python -m dse explain before.json.gz after.json.gz, or <study>:<key> <study>:<key>"
        raise ConfigError([Problem("explain", "takes two profiles or two points", " ".join(words), way)])
    first, second = (explained(name, Path(options.get("output_dir", "outputs"))) for name in names)
    console = report.console()
    for line in answer(first, second):
        console.print(line, soft_wrap=isinstance(line, str))
    for path in _drawn(first, second, writable(options.get("out", "outputs/explain"))):
        console.print(str(path), soft_wrap=True)
    return 0


def explained(name: str, root: Path) -> Explained:
    """A profile by its path, or a point by `<study>:<key>` or `<study>/<time>:<key>`. Raises ConfigError."""
    run, colon, key = name.rpartition(":")
    if Path(name).is_file() or not colon:
        return of_profile(Path(name))
    return of_point(Finished.find(root, run, path="explain").outputs, key)


def of_profile(path: Path) -> Explained:
    """The critical path of a recorded profile."""
    import pandas as pd

    profile = read(path)
    stretches = critical_path(profile, waits(profile))
    rows = pd.DataFrame([vars(stretch) for stretch in stretches])
    spans = rows["finish_s"] - rows["start_s"]
    parts = {str(kind): float(total) for kind, total in spans.groupby(rows["kind"]).sum().items()}
    lanes = rows["kind"].map(lambda kind: kind if kind in _LANES else "compute")
    bars = merged(rows.assign(lane=lanes, kind=lanes)[rows["kind"] != GAP])
    return Explained(path.name, float(spans.sum()), parts, bars, {})


def of_point(outputs: Outputs, key: str) -> Explained:
    """The critical path of a stored point, which is run again."""
    import pandas as pd

    from dse.study.plan_again import Present
    from dse.study.replay import run_again

    row, planned, replay = run_again(outputs, key, Present())
    path = pd.DataFrame([vars(interval) for interval in replay.intervals])
    seconds = float(path["finish_s"].max())
    parts = {name: share * seconds for name, share in replay.limits.items()}
    parts[_SMALL] = seconds - sum(parts.values())
    choices = {knob: row[knob] for knob in planned.knobs if knob in row.dropna()}
    name = f"{outputs.folder.parent.name}:{str(row['key'])[:8]} ({row['scenario']})"
    return Explained(name, seconds, parts, path, choices)


def answer(first: Explained, second: Explained) -> Iterator[Table | str]:
    """Yield how the second differs from the first, the most important first."""
    gain = gain_in_words(first.seconds / second.seconds)
    gain = gain if gain == AS_FAST else f"{gain} than the first"
    yield f"A  {first.name}: {cell(first.seconds, 's')}"
    yield f"B  {second.name}: {cell(second.seconds, 's')}, {gain}"
    for knob in dict.fromkeys([*first.choices, *second.choices]):
        values = [explained.choices.get(knob, "–") for explained in (first, second)]
        if str(values[0]) != str(values[1]):
            yield f"{knob}: {values[0]} -> {values[1]}"
    yield _table(first, second)


def _table(first: Explained, second: Explained) -> Table:
    """Parts of the critical paths, what differs most first, and their sums."""
    from rich.table import Table

    shown = Table(box=None, pad_edge=False)
    shown.add_column("on the critical path")
    for name in ("A", "B", "B - A", "of A"):
        shown.add_column(name, justify="right")
    pairs = {
        name: (first.parts.get(name, 0.0), second.parts.get(name, 0.0))
        for name in dict.fromkeys([*first.parts, *second.parts])
    }
    ranked = sorted(pairs.items(), key=lambda pair: -abs(pair[1][1] - pair[1][0]))
    count = _SHOWN if len(ranked) > _SHOWN + 1 else len(ranked)
    smaller = [times for _, times in ranked[count:]]
    rows = dict(ranked[:count])
    rows |= {f"{len(smaller)} others": (sum(a for a, _ in smaller), sum(b for _, b in smaller))} if smaller else {}
    for name, (a, b) in {**rows, "all": (first.seconds, second.seconds)}.items():
        shown.add_row(name, cell(a, "s"), cell(b, "s"), _signed(b - a), f"{100 * (b - a) / first.seconds:+.1f} %")
    return shown


def _signed(seconds: float) -> str:
    return f"{'-' if seconds < 0 else '+'}{cell(abs(seconds), 's')}"


def _drawn(first: Explained, second: Explained, outputs: Outputs) -> list[Path]:
    """Write the picture of both, one below the other on one axis."""
    import pandas as pd

    from dse import plots
    from dse.plots import timelines

    gain = gain_in_words(first.seconds / second.seconds)
    names = [first.name, second.name if second.name != first.name else f"{second.name} again"]
    both = pd.concat([each.path.assign(panel=name) for each, name in zip((first, second), names, strict=True)])
    title = f"{second.name} is {gain}" + (" as the first" if gain == AS_FAST else "")
    return list(plots.save(partial(timelines.timeline, both, title, panel="panel"), outputs.figures, "explain"))
