"""The page of two runs side by side: what the terminal says, and the points that both have, one run over the other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dse.plots.labels import words
from dse.results import provenance
from dse.results.run_folder import FinishedRun, read
from dse_pages import page, pictures, vega
from dse_pages.points import PagePoints, read_points
from dse_pages.tables import split
from dse_pages.views import begin, embedded

if TYPE_CHECKING:
    import pandas as pd

NAME = "compare.html"
# rows that the page holds; more of them make it slow to open
_MOST_MATCHES = 4_000


def write_comparison(folder: Path, runs: tuple[FinishedRun, FinishedRun], printed: Iterable[Any]) -> Path:
    """Write `compare.html` into the folder of a comparison, beside its figures; its path. printed: by the command."""
    sheets, sentences = split(printed)
    matches = match_points(*runs)
    points = _points(matches, runs)
    start = begin(points) if points is not None and len(points) and vega.library() else None
    views = None if points is None or start is None else embedded(points, start, diagonal=True)
    shown = {
        "title": f"{runs[0].name} and {runs[1].name}",
        "names": [run.name for run in runs],
        "sheets": sheets,
        "sentences": sentences,
        "commands": [provenance.command_line(run.provenance) for run in runs],
        "pictures": pictures.pictures(folder, folder),
        "note": vega.absence() or _note(matches),
        "start": views["start"] if views else None,
        "content": views,
    }
    scripts = page.view_scripts("begin_inline.js") if views else []
    return page.write(folder / NAME, page.render("comparison.html", shown, scripts=scripts))


def match_points(first: FinishedRun, second: FinishedRun) -> pd.DataFrame:
    """Points that both runs have: the same scenario and the same knobs, each only once in either run.

    Columns: scenario, knobs, and of each common objective `<name> (A)`, `<name> (B)` and `<name>, B over A`.
    """
    import pandas as pd

    goals = [name for name in first.goals if name in second.goals]
    # a knob that one run alone records is no part of the match
    knobs = [path for path in first.recorded_paths if path in second.recorded_paths]
    place = ["scenario", *knobs]
    ours, theirs = (_rows(run, place, goals) for run in (first, second))
    both = pd.merge(ours, theirs, on=place, suffixes=(" (A)", " (B)"), sort=False)
    both["on_front"] = both.pop("on_front (A)") | both.pop("on_front (B)")
    both["key"] = both.pop("key (A)")
    for name in goals:
        values = [both.pop(f"{name} ({letter})") for letter in "AB"]
        for letter, column in zip("AB", values, strict=True):
            both[f"{words(name)} ({letter})"] = column
        # no ratio over zero: NaN, which charts leave out
        both[f"{words(name)}, B over A"] = values[1] / values[0].where(values[0] != 0)
    # points of a front are what is asked about: they survive the limit; a stable sort keeps the order of the rest
    few = both.sort_values("on_front", ascending=False, kind="stable").head(_MOST_MATCHES)
    few.attrs["total"] = len(both)
    return few.reset_index(drop=True)


def _rows(run: FinishedRun, place: Sequence[str], goals: Sequence[str]) -> pd.DataFrame:
    """Rows with a result whose place no other row has."""
    table = read(run, [*place, *goals, "status", "on_front", "key"])
    table = table[table["status"] == "ok"].drop(columns=["status", "explored"])
    for path in place:
        if table[path].dtype.kind not in "iufb":
            table[path] = table[path].astype("string")
    # a place with several rows has no single partner: none of them is kept
    return table.drop_duplicates(list(place), keep=False)


def _points(matches: pd.DataFrame, runs: tuple[FinishedRun, FinishedRun]) -> PagePoints | None:
    """The matching points, for charts; None where there are none."""
    import pyarrow as pa

    if not len(matches):
        return None
    goals, units = dict[str, str](), dict[str, str]()
    for name, goal in runs[0].goals.items():
        for letter in "AB":
            goals[f"{words(name)} ({letter})"] = goal
            units[f"{words(name)} ({letter})"] = runs[0].summary["units"].get(name, "")
        units[f"{words(name)}, B over A"] = "x"
    shown = [name for name in units if name not in goals]
    summary = {"goals": goals, "units": units, "knobs": list(runs[0].knobs), "shown": shown}
    return read_points(pa.Table.from_pandas(matches, preserve_index=False), summary)


def _note(matches: pd.DataFrame) -> str:
    total = int(matches.attrs.get("total", len(matches)))
    if not total:
        return "No point of one run is in the other: no scenario with the same knobs is in both."
    part = f", {len(matches):,} of them in this page" if len(matches) < total else ""
    equal = "On the dashed line both are equal."
    return f"{total:,} points are in both runs, with the same scenario and knobs{part}. {equal}"
