"""The page of a finished study: its question, answer, points, figures, causes, claims and sources."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dse.errors.parsing import natural_key
from dse.files import read_text
from dse.plots.labels import COLOURS, words
from dse.results import COLUMNS, output_files, provenance, report
from dse.results.answer import answer_tables, ranked_winners
from dse.results.run_folder import Outputs
from dse.results.selection import Selection, select
from dse.results.words import choice_in_words
from dse.values.units import quantity_text
from dse_pages import page, pictures, vega
from dse_pages.pictures import Picture, data_uri
from dse_pages.tables import TextTable, in_order, sheet, split

if TYPE_CHECKING:
    from dse_pages.points import PagePoints
    from dse_pages.views import Start

NAME = "report.html"
_MOST_CELLS, _MOST_POINTS = 70_000, 5_000  # values and rows that are inside the page
# rows of the table of constants; the page counts the rest, which are in provenance.json
_MOST_FACTS = 400
_MOST_WINNERS = 500
# a cause of less than 1 % of every winner's time has no colour of its own
_LEAST_SHARE = 0.01
_FEW = 4  # values of a baseline that are named


def write_report(outputs: Outputs, *, has_charts: bool = True, drawn: Callable[[], object] = tuple) -> Path:
    """Write `report.html` of a run, with all that its folder holds by now; its path.

    has_charts: whether with charts that a reader can change. drawn: waits until the figures are drawn. Raises
    ConfigError where the folder is damaged.
    """
    if has_charts:
        # the engine starts in its process while the tables are read
        vega.begin()
    shown = content(outputs, has_charts=has_charts, drawn=drawn)
    scripts = page.view_scripts("begin_inline.js") if shown["start"] else []
    return page.write(outputs.folder / NAME, page.render("report.html", shown, scripts=scripts))


def content(outputs: Outputs, *, has_charts: bool = True, drawn: Callable[[], object] = tuple) -> dict[str, Any]:
    """All that the template of a report shows."""
    summary, record = outputs.read_json("summary"), outputs.read_json("provenance")
    shown = report.load_selection(outputs)
    best = ranked_winners(summary, shown.table)
    first = str(best["scenario"].iloc[0]) if len(best) else ""
    views = _views(outputs, summary, first) if has_charts else _NO_VIEWS
    # figures are drawn meanwhile; what follows lists their files
    drawn()
    claims = outputs.read_json("claims") if outputs.has("claims") else []
    return {
        "title": f"{summary['study']}: {summary['question']}",
        "study": summary["study"],
        "paper": outputs.read_config()["study"].get("paper", ""),
        "question": summary["question"],
        "answer": summary["answer"],
        "answered": in_order(answer_tables(outputs, shown.table, most=_MOST_WINNERS)),
        "baseline": _baseline(outputs, summary),
        "plan": read_text(plan, plan.name) if output_files.exists(plan := outputs.folder / "plan.yaml") else "",
        "terms": {**_terms(summary), **(outputs.read_config()["study"].get("terms") or {})},
        "winners_in_full": sheet(report.summary(outputs, shown.table)) if len(best) else None,
        "limits": _limits(summary["limits"]),
        "pictures": pictures.pictures(outputs.figures, outputs.folder, order=figure_names(outputs, shown)),
        "timelines": timelines(outputs),
        "idle": summary.get("idle", []),
        **_claims(claims),
        "levels": split(report.levels(outputs)),
        **_sources(record),
        **views,
    }


def _terms(summary: Mapping[str, Any]) -> dict[str, str]:
    """What the columns of tables mean, by their headings: names of metrics, these in words, and what limits."""
    meanings = summary.get("meanings", {})  # an older run has none
    kinds = {kind for shares in summary["limits"].values() for kind in shares}
    named = {words(name): text for name, text in meanings.items()}
    # activation is a kind, and no activation_bytes
    named |= {kind: meanings[f"share_{kind}"] for kind in kinds if f"share_{kind}" in meanings}
    return {**named, **meanings, **COLUMNS}


def _baseline(outputs: Outputs, summary: Mapping[str, Any]) -> str:
    """Baseline of the speed-ups, in words or where it stands; "" where nothing is relative to a baseline."""
    import pandas as pd

    values = outputs.read_config()["study"].get("baseline") or {}
    if not summary["gain"] or not values:
        return ""
    return "study.baseline of config.yaml" if len(values) > _FEW else choice_in_words(pd.Series(values), values)


def figure_names(outputs: Outputs, shown: Selection) -> list[str]:
    """Names of a study's figures in its order, the one that answers its question first; none where none is drawn."""
    module = outputs.read_config()["study"].get("module")
    if not module or not any(outputs.figures.glob("*.*g")):
        return []
    return [name for name, _ in report.figures(outputs, module, shown.table)]


_NO_VIEWS = {"start": None, "content": None, "note": "", "printed": "", "printed_title": ""}


def _views(outputs: Outputs, summary: Mapping[str, Any], scenario: str) -> dict[str, Any]:
    """The interactive part: its rows, and a picture of it for paper. scenario: which is shown first."""
    from dse_pages import charts
    from dse_pages.views import begin, embedded

    points, chosen = read_run(outputs, summary)
    start = begin(points, scenario) if len(points) else None
    if start is None or (absence := vega.absence()):
        return {**_NO_VIEWS, "note": "" if start is None else absence}
    rows = chosen.num_rows
    note = f"All {rows:,} points are in this page." if chosen.complete else f"This page holds {chosen}."
    note += f" `python -m dse results show {summary['study']}` shows every point." if not chosen.complete else ""
    views = embedded(points, start)
    title = f"{charts.axis_title(start.y)} over {charts.axis_title(start.x)}"
    title += f", scenario {start.scenario}" if start.scenario else ""
    return {
        "start": views["start"],
        "content": views,
        "note": note,
        "printed": _print_scatter(points, start),
        "printed_title": f"{title}; outlined points are on a Pareto front",
    }


def read_run(outputs: Outputs, summary: Mapping[str, Any]) -> tuple[PagePoints, Selection]:
    """Points of a run that fit into a page, and which of its rows they are."""
    import pyarrow as pa

    from dse_pages.points import read_points

    with output_files.table(outputs.results) as table:
        # wide tables get fewer rows: the product of rows and columns makes the size
        most = min(_MOST_POINTS, _MOST_CELLS // max(len(table.names), 1))
    chosen = select(outputs.results, summary["goals"], most)
    return read_points(pa.Table.from_pandas(chosen.table, preserve_index=False), summary), chosen


def _print_scatter(points: PagePoints, start: Start) -> str:
    import numpy as np

    from dse_pages import charts

    rows = np.arange(len(points))
    # the picture on paper shows what the page shows first, which is one scenario
    if start.scenario and points.scenario is not None:
        code = points.scenario.categories.index(start.scenario)
        rows = np.flatnonzero(points.values[points.scenario.id] == code)
    columns = [column for column in (start.x, start.y, start.colour) if column]
    taken = charts.rows_of(points, points.take(rows, list(dict.fromkeys(columns))))
    drawn = charts.draw(charts.scatter(start.x, start.y, start.colour, []), taken)
    return data_uri(drawn, "image/png") if drawn else ""


# ---------------------------------------------------------------- why


def _limits(limits: Mapping[str, Mapping[str, float]]) -> dict[str, Any] | None:
    """Shares of the time of every winner by what limits it, the largest of all first, each with its colour."""
    totals: Counter[str] = Counter()
    for shares in limits.values():
        # summed over winners, so that colours are given out by what matters most overall
        totals.update({name: share for name, share in shares.items() if share >= _LEAST_SHARE})
    if not totals:
        return None
    colours = dict(zip([name for name, _ in totals.most_common()], _many_colours(len(totals)), strict=True))
    bars = {scenario: _bar(shares, colours) for scenario, shares in limits.items() if shares}
    columns = ("scenario", *colours)
    rows = tuple(
        (scenario, *(f"{100 * shares[name]:.0f} %" if name in shares else "–" for name in colours))
        for scenario, shares in limits.items()
    )
    numbers = TextTable("Share of the winner's time by what limits it", columns, (False, *(True,) * len(colours)), rows)
    return {"colours": colours, "bars": bars, "numbers": numbers}


def _many_colours(count: int) -> Sequence[str]:
    colours = list(COLOURS.values())
    return [colours[place % len(colours)] for place in range(count)]


def _bar(shares: Mapping[str, float], colours: Mapping[str, str]) -> list[tuple[str, str]]:
    """(colour, percent) of the parts of a bar."""
    return [(colours[name], f"{100 * shares[name]:.2f}") for name in colours if shares.get(name, 0) > 0]


# ---------------------------------------------------------------- claims and sources


def _claims(rows: list[dict[str, Any]]) -> dict[str, Any]:
    sheets, sentences = split([report.claims_table(rows)])
    count = report.claims_count(rows)
    return {"claims": sheets, "claims_text": [*([count] if count else []), *sentences], "statements": statements(rows)}


def statements(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, str]]:
    """(id, statement, source) of claims."""
    return [(row["id"], row["statement"], row["source"]) for row in rows]


def _sources(record: Mapping[str, Any]) -> dict[str, Any]:
    facts = record.get("facts", [])
    counts = Counter(fact["provenance"] for fact in facts)
    rows = tuple(
        (fact["path"], _fact_value(fact["value"], fact["path"]), fact["provenance"], fact["source"])
        for fact in facts[:_MOST_FACTS]
    )
    return {
        "facts": TextTable("Constants", ("constant", "value", "known how", "source"), (False,) * 4, rows),
        "facts_left": max(0, len(facts) - _MOST_FACTS),
        "fact_counts": ", ".join(f"{count} {kind}" for kind, count in counts.most_common()),
        "from_memory": [fact["path"] for fact in facts if fact["provenance"] == "memory"],
        "assumed": [fact["path"] for fact in facts if fact["provenance"] == "assumed"],
        "models": record.get("models", {}),
        "command": provenance.command_line(record),
        "made": provenance.describe(
            {"git": {"commit": None, "reason": "unknown"}, "python": "", "machine": {}, **record}
        ),
        "versions": record.get("versions", {}),
        "environment": environment(record),
    }


def _fact_value(value: Any, path: str) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:g}" if ".cost_weights." in path else quantity_text(value, path)  # a weight has no unit


def environment(record: Mapping[str, Any]) -> dict[str, str]:
    """Facts of a run by name, for people."""
    git, machine = record.get("git", {}), record.get("machine", {})
    shown = {
        "Time": record.get("time", ""),
        "Seed": record.get("seed", ""),
        "Backend": record.get("backend", ""),
        "Commit": git.get("commit") or git.get("reason", ""),
        "Uncommitted changes": git.get("diff", "yes") if git.get("dirty") else "none" if git.get("commit") else "",
        "Python": record.get("python", ""),
        "System": machine.get("system", platform.system()),
        "Processor": machine.get("cpu", ""),
        "Cores": machine.get("usable_cores") or machine.get("cores") or "",
    }
    return {name: str(value) for name, value in shown.items() if value != ""}


# ---------------------------------------------------------------- timelines


def timelines(outputs: Outputs) -> list[Picture]:
    """Pictures and traces of the winners' timelines that stand beside the page, as links."""
    folder = outputs.figures
    names = {path.stem for kind in ("png", "svg", "json") for path in folder.glob(f"timeline_*.{kind}")}
    return [
        Picture(name.removeprefix("timeline_"), "", pictures.links(folder, name, base=outputs.folder))
        for name in sorted(names, key=natural_key)
    ]
