"""The report after a study: the table of winners, the claims, figures, and where everything is."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dse import plugins
from dse.backend import Interval, Replay
from dse.errors import did_you_mean, pairs
from dse.errors.parsing import whole_number
from dse.results import output_files, provenance
from dse.results.pareto import Contest
from dse.results.run_folder import FinishedRun, Outputs
from dse.results.run_folder import console as console
from dse.results.selection import MOST_ROWS, SELECTED, Selection, select
from dse.results.words import cell, choice_in_words

if TYPE_CHECKING:
    import pandas as pd
    from rich.table import Table

    from dse.plots import Draw
    from dse.results.claims import ClaimResult

SERIAL = "serial"
"""Value of a knob with which nothing overlaps: it stands for none where it is the declared one."""
_MOST_COLOURS = 11  # of the palette
_MOST_TASKS = 100_000
_IN_WHOLE_PERCENT = 0.1  # share from which on an error has no digits after the point


def load_selection(outputs: Outputs) -> Selection:
    """The table of a run as it is shown: all of it, or a selection where it is very long."""
    return select(outputs.results, outputs.read_json("summary")["goals"], MOST_ROWS, selected=min(SELECTED, MOST_ROWS))


def figures(outputs: Outputs, module: str, table: pd.DataFrame) -> Iterator[tuple[str, Draw]]:
    """Yield (name, what draws) of a study's figures of a table, the one that answers its question first.

    Each has the published values that it can show, where the study's hardware and workload are those of its claims.
    """
    if not (table["status"] == "ok").any():
        return
    drawn = study_figures(outputs, module, table)
    first = next(drawn, None)
    own = front_figure(outputs, table) if first is None else chain([first], drawn)
    figures = _with_published(outputs, module, own)
    if (outputs.folder / "beside.csv").is_file():
        from dse.results import measured

        figures = measured.add_figures(outputs, table, figures)
    yield from figures


def study_figures(outputs: Outputs, module: str, table: pd.DataFrame) -> Iterator[tuple[str, Draw]]:
    """Yield (name, what draws) of the figures of a study itself.

    `attrs` of its table hold decisions on winners, and (scenario, key) of the winners that its answer shows.
    """
    record = outputs.read_json("summary")
    table.attrs["decisions"] = record.get("decisions") or {}
    won = (
        Contest.of(record).winners(table, record["goals"], apart=True) if (table["status"] == "ok").any() else table[:0]
    )
    table.attrs["winners"] = list(zip(won["scenario"].astype(str), won["key"].astype(str), strict=True))
    yield from plugins.load("study", module).figures(table, outputs.read_table("timelines"))


def extras(outputs: Outputs, module: str) -> Iterator[tuple[str, Draw]]:
    """Write the files that a study has beside its claims; yield (name, what draws) of the figures among them."""
    study = plugins.load("study", module)
    content = getattr(study, "extras", lambda run: ())(FinishedRun(outputs.folder))  # most studies have none
    yield from _with_published(outputs, module, _figures_of(outputs, content))


def _figures_of(outputs: Outputs, content: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Draw]]:
    """Write what is no figure; yield what draws one."""
    for name, extra in content:
        if callable(extra):
            yield name, extra
        elif name.endswith(".csv"):
            outputs.write_csv(name, extra)
        elif hasattr(extra, "to_parquet"):
            outputs.write_table(name, extra)
        elif name.endswith(".yaml"):
            outputs.write_yaml(name, extra)
        else:
            outputs.write_json(name, extra)


def _with_published(outputs: Outputs, module: str, own: Iterable[tuple[str, Draw]]) -> Iterator[tuple[str, Draw]]:
    """Add published values to figures; for a paper (`figures=paper`) also where they are from."""
    study = plugins.load("study", module)
    entries = [] if _departure(outputs, study) or not hasattr(study, "published_values") else study.published_values()
    if not entries:
        yield from own
        return
    from dse.plots.references import with_references
    from dse.results.published import values_of

    for_paper = (outputs.read_config().get("figures") or {}).get("name") == "paper"
    for name, make in own:
        values = values_of(entries, name)
        note = f"published values: {values.origin}" if for_paper and values.references else ""
        yield name, with_references(make, values.references, note=note)


def _departure(outputs: Outputs, study: Any) -> str:
    """Describe how the hardware or workload differs from that of the study's claims, "" where it does not."""
    changed = [
        text for text in outputs.read_json("summary")["departures"] if not text.lstrip("+").startswith(study.allows)
    ]
    return f"the claims are about another configuration: {', '.join(changed)}" if changed else ""


def front_figure(outputs: Outputs, table: pd.DataFrame) -> Iterator[tuple[str, Draw]]:
    """Yield the points of a study over its first objectives, coloured by its first choice; none of one objective."""
    from pandas.api.types import is_numeric_dtype

    from dse import plots
    from dse.plots import fronts
    from dse.plots.labels import label, words

    record = outputs.read_json("summary")
    axes = [plots.Axis.of(name, record["units"][name]) for name in record["goals"]]
    # as many values as a legend and the palette hold
    few = [path for path in record["knobs"] if 1 < table[path].nunique() <= _MOST_COLOURS]
    # a choice in words explains more than a number
    by = next((path for path in few if not is_numeric_dtype(table[path])), few[0] if few else "scenario")
    if len(axes) > 1:
        front = table[table["on_front"] & (table["status"] == "ok")]
        first, count = next(iter(front[by].astype(str).value_counts().items()), ("nothing", 0))
        value = f"{first} {words(by)}" if whole_number(str(first)) is not None else f"{words(by)} {label(str(first))}"
        title = f"{count} of {len(front)} points on the Pareto fronts have {value}"
        yield "pareto", partial(fronts.pareto, table, axes[:3], by=by, frame=plots.Frame(title))


def check(outputs: Outputs, module: str, selection: Selection) -> list[dict[str, Any]]:
    """Judge the paper's claims on a table and write `claims.json`; its rows. They are about all points or none."""
    from dse.results.claims import judge

    study = plugins.load("study", module)
    departure = _departure(outputs, study) or (
        "" if selection.complete else f"claims are judged on complete tables, this is {selection}"
    )
    departure = departure if (selection.table["status"] == "ok").any() else "no point has a result"
    findings: Mapping[str, ClaimResult] = {} if departure else study.findings(selection.table)
    if not departure and hasattr(study, "further"):
        findings = {**findings, **study.further(FinishedRun(outputs.folder))}
    claims = study.claims()
    for name in sorted(findings.keys() - {claim.id for claim in claims}):
        hint = did_you_mean(name, [claim.id for claim in claims])
        print(f"{module}: finding {name} has no claim of this id ({hint})", file=sys.stderr)
    rows = judge(claims, findings, departure=departure)
    outputs.write_json("claims", rows)
    return rows


def summary(outputs: Outputs, table: pd.DataFrame) -> Table:
    """One row per scenario: the winner's knobs, the metrics the study shows, and what limits it."""
    from rich.table import Table

    record = outputs.read_json("summary")
    best = Contest.of(record).winners(table, record["goals"], apart=True)
    best = best.assign(**{path: best[path].astype("string").fillna(SERIAL) for path in undone(table, record)})
    wanted = (
        *record["shown"],
        *record["knobs"],
        *(() if record["shown"] else record["goals"]),
    )
    columns = [path for path in dict.fromkeys(wanted) if path in best]
    shown = Table(title=f"{record['study']}: best {next(iter(record['goals']))} per scenario")
    limited = ["limited by"] if any(record["limits"].values()) else []
    for name in ("scenario", *map(_column_title, columns), *limited):
        shown.add_column(name, justify="right" if name in record["units"] else "left")  # numbers to the right
    for _, row in best.iterrows():
        cells = [cell(row[path], record["units"].get(path, "")) for path in columns]
        limit = limits_text(record["limits"].get(row["scenario"], {}))
        shown.add_row(row["scenario"], *cells, *([limit] if limited else []))
    return shown


def undone(table: pd.DataFrame, record: Mapping[str, Any]) -> list[str]:
    """Knobs that are serial where they have no value, of those that have one in some row. record: `summary.json`."""
    declared = record.get("declared", {})  # older records have none
    return [path for path in declared if declared[path] == SERIAL and path in table and table[path].notna().any()]


def levels(outputs: Outputs) -> Iterator[Table | str]:
    """Agreement of the levels of the ladder, if the study has one: a row for each objective and pair of levels."""
    from rich.table import Table

    if not outputs.has("fidelity"):
        return
    ladder = outputs.read_json("fidelity")
    shown = Table(title=f"Levels of the model, from coarse to fine: {', '.join(ladder['levels'])}")
    for name in ("objective", "coarse -> fine"):
        shown.add_column(name)
    for name in ("points", "Kendall tau", "of the sample", "error of the coarse: median", "10 to 90 %"):
        shown.add_column(name, justify="right")
    for pair in ladder["pairs"]:
        for name, agreement in pair["overall"]["objectives"].items():
            ranks = ["–" if agreement[key] is None else f"{agreement[key]:.3f}" for key in ("tau", "tau_of_sample")]
            shown.add_row(
                name,
                f"{pair['coarse']} -> {pair['fine']}",
                str(agreement["points"]),
                *ranks,
                *_error(agreement["error"]),
            )
    yield shown
    yield from (_changes(pair) for pair in ladder["pairs"] if pair["overall"]["front"]["scenarios"])
    for name, why in ladder["broken"].items():
        yield f"level {name} gave up: {why}"
    for name, why in ladder.get("left_out", {}).items():
        yield f"level {name} is left out: it {why}"


def levels_line(outputs: Outputs) -> str:
    """One line on the ladder of models, "" where there is none: how often winners change, and what has no results."""
    if not outputs.has("fidelity"):
        return ""
    ladder = outputs.read_json("fidelity")
    fronts = [(pair, pair["overall"]["front"]) for pair in ladder["pairs"] if pair["overall"]["front"]["scenarios"]]
    parts = [
        f"from {pair['coarse']} to {pair['fine']} in {front['winners_changed']} of {front['scenarios']} scenarios"
        for pair, front in fronts
    ]
    texts = [f"the winner changed {', '.join(parts)}"] if parts else []
    texts += [f"level {name} gave up: {why}" for name, why in ladder["broken"].items()]
    return "; ".join(
        [*texts, *(f"level {name} is left out: it {why}" for name, why in ladder.get("left_out", {}).items())]
    )


def _error(error: Mapping[str, float] | None) -> tuple[str, str]:
    if error is None:
        return "–", "–"
    return f"{100 * error['median']:+.2f} %", f"{100 * error['p10']:+.2f} to {100 * error['p90']:+.2f} %"


def _changes(pair: Mapping[str, Any]) -> str:
    """One line on what promotion changed."""
    front = pair["overall"]["front"]
    moved = f"{front['entered']} points came onto a front and {front['left']} of {front['before']} left it"
    winners = f"the winner changed in {front['winners_changed']} of {front['scenarios']} scenarios"
    return f"from {pair['coarse']} to {pair['fine']}: {moved}; {winners}"


def level_figures(outputs: Outputs) -> Iterator[tuple[str, Draw]]:
    """Yield (name, what draws) of figures of how far the levels of the ladder agree, if the study has one."""
    if not outputs.has("fidelity"):
        return
    from dse import plots
    from dse.plots import fronts
    from dse.results.agreement import errors, match_levels

    ladder, rows = outputs.read_json("fidelity"), outputs.read_table("fidelity")
    goals, units = outputs.read_json("summary")["goals"], outputs.read_json("summary")["units"]
    axes = [plots.Axis.of(name, units[name]) for name in goals]
    for pair in ladder["pairs"]:
        both = match_levels(rows, pair["coarse"], pair["fine"])
        few = [path for path in ladder["texts"] if 1 < both[path].nunique() <= _MOST_COLOURS] if len(both) else []
        if len(both):
            both = both.assign(**{f"{name}.error": errors(both, name) for name in goals})
            by, names = few[0] if few else "scenario", (pair["coarse"], pair["fine"])
            make = partial(fronts.agreement, both, axes, by=by, names=names)
            yield f"fidelity_{pair['coarse']}_{pair['fine']}", make


def _column_title(path: str) -> str:
    section, _, name = path.rpartition(".")
    return section if name == "name" else name


def limits_text(limits: Mapping[str, float]) -> str:
    """The two largest shares of what limits a point: `compute 80 %, contention 15 %`."""
    # below, it rounds to 0 %
    shares = [f"{name} {100 * share:.0f} %" for name, share in limits.items() if share >= 0.01]
    return ", ".join(shares[:2])


_BASES = {"fitted": "fitted", "by construction": "true by construction", "input": "put in"}


def claims_table(rows: list[dict[str, Any]]) -> Table | str:
    """Theirs beside ours, a miss said to be a miss with its cause; one line where none can be tested."""
    from rich.table import Table

    if not rows:
        return "this study checks no published claims"
    # one reason for all: no table is needed
    if all(row["within"] is None for row in rows) and len({row["reason"] for row in rows}) == 1:
        return f"published claims were not tested: {rows[0]['reason']}"

    shown = Table(title="Published claims, and ours")
    for name in ("claim", "published", "ours", "error", "verdict", "basis", "why"):
        is_number = name in ("published", "ours", "error")
        shown.add_column(name, justify="right" if is_number else "left", overflow="fold")
    for row in rows:
        verdict = {True: "within", False: "MISS", None: "not tested"}[row["within"]]
        bound = "≤ " if row["kind"] == "at_most" else ""
        bounded = f"{bound}{_value(row['published'], row['unit'])}"
        published = bounded if row["provenance"] != "memory" else "unverified"  # a value that nobody has looked up
        basis = row["basis"] if row["within"] is not None else ""
        cells = [row["id"], published, _value(row["ours"], row["unit"]), error_text(row)]
        shown.add_row(*cells, verdict, basis, "; ".join(filter(None, [row["reason"], flips_text(row)])))
    return shown


def error_text(row: Mapping[str, Any]) -> str:
    """The signed error of a claim: `+12 %`, `-0.3 %`; nothing where there is none or nothing was published."""
    share = row["error"]
    if share is None or row["provenance"] == "memory":
        return ""
    return f"{100 * share:+.0f} %" if abs(share) >= _IN_WHOLE_PERCENT else f"{100 * share:+.2g} %"


def flips_text(row: Mapping[str, Any]) -> str:
    """What turns the verdict of a claim within the uncertainty of a constant, or that nothing does."""
    if row["flips"] is None:
        return ""
    return f"flips with {', '.join(row['flips'])}" if row["flips"] else "stands"


def claims_count(rows: Sequence[Mapping[str, Any]]) -> str:
    """One line: how many predictions are within, and how many claims test nothing; "" where none was tested."""
    tested = [row for row in rows if row["within"] is not None]
    predicted = [row for row in tested if row["basis"] == "predicted"]
    text = f"{sum(row['within'] for row in predicted)} of {len(predicted)} predicted claims are within"
    for basis in dict.fromkeys(row["basis"] for row in tested if row["basis"] != "predicted"):
        text += f", {sum(row['basis'] == basis for row in tested)} {_BASES[basis]}"
    untested = f", {len(rows) - len(tested)} were not tested" if len(rows) > len(tested) else ""
    return f"{text}{untested}" if tested else ""


def _value(value: Any, unit: str) -> str:
    if isinstance(value, (list, tuple)):
        text = "/".join(cell(float(f"{part:.3g}")) for part in value)
        return text if unit in ("bool", "", "1") else f"{text} {unit}"
    # as many digits as the claim has
    return cell(value, "") if value is None or unit in ("bool", "", "1") else f"{cell(float(value))} {unit}"


def write_timeline(outputs: Outputs, row: Any, replay: Replay, *, knobs: Iterable[str]) -> list[Path]:
    """Write the timeline of a replayed row as picture and as trace (`chrome://tracing`, Perfetto); their paths."""
    import pandas as pd

    from dse import plots
    from dse.plots import timelines

    name = f"timeline_{row['scenario']}_{str(row['key'])[:8]}"
    title = f"{row['scenario']}: {choice_in_words(row, knobs)}"
    intervals = pd.DataFrame([vars(interval) for interval in replay.intervals])
    written = outputs.write_text(f"figures/{name}.json", json.dumps(trace(replay.intervals, replay.limits)))
    return [*plots.save(partial(timelines.timeline, intervals, title), outputs.figures, name), written]


def intervals_of(rows: pd.DataFrame) -> list[Interval]:
    """Intervals of rows of a table of timelines."""
    return [Interval(*row) for row in rows[list(_FIELDS)].itertuples(index=False)]


_FIELDS = ("lane", "name", "kind", "start_s", "finish_s", "moved_bytes", "flop")


def trace(intervals: Iterable[Interval], limits: Mapping[str, float]) -> dict[str, Any]:
    """Return intervals in Chrome's trace event format: complete events in microseconds, a thread for each lane."""
    spans = list(intervals)
    lanes = {lane: number for number, lane in enumerate(dict.fromkeys(span.lane for span in spans), start=1)}
    names = [
        {"name": "thread_name", "ph": "M", "pid": 1, "tid": number, "args": {"name": lane}}
        for lane, number in lanes.items()
    ]
    events = [
        {
            "name": span.name,
            "cat": span.kind,
            "ph": "X",
            "pid": 1,
            "tid": lanes[span.lane],
            "ts": span.start_s * 1e6,  # µs, as the format has it
            "dur": (span.finish_s - span.start_s) * 1e6,
            "args": {"moved_bytes": span.moved_bytes, "flop": span.flop},
        }
        for span in spans
    ]
    return {"traceEvents": [*names, *events], "displayTimeUnit": "ns", "otherData": {"limited by": dict(limits)}}


def redraw(outputs: Outputs) -> None:
    """Draw the figures of a run again and judge its claims; print its summary. Nothing is evaluated."""
    from dse import plots

    module = FinishedRun(outputs.folder).config["study"]["module"]
    shown = load_selection(outputs)
    rows = check(outputs, module, shown)
    drawn = chain(figures(outputs, module, shown.table), level_figures(outputs), extras(outputs, module))
    paths = [path for name, make in drawn for path in plots.save(make, outputs.figures, name)]
    terminal = console()
    terminal.print(summary(outputs, shown.table))
    terminal.print(claims_table(rows))
    if count := claims_count(rows):
        terminal.print(count)
    for part in levels(outputs):
        terminal.print(part)
    terminal.print(provenance.describe(outputs.read_json("provenance")))
    terminal.print(f"redrew {len(paths)} figures and claims.json in {outputs.folder}/", soft_wrap=True)


def write_traces(outputs: Outputs) -> list[Path]:
    """Write the timeline of every winner in the trace event format (Perfetto, chrome://tracing); their paths."""
    if not output_files.exists(outputs.folder / "timelines.parquet"):
        return []
    tasks = outputs.read_table("timelines")
    if not len(tasks) or len(tasks) > _MOST_TASKS:
        return []
    limits = outputs.read_json("summary")["limits"]
    paths = []
    for scenario, rows in tasks.groupby("scenario", sort=False):
        name = re.sub(r"[^\w.+-]", "_", str(scenario))[:80]
        text = json.dumps(trace(intervals_of(rows), limits.get(str(scenario), {})))
        paths.append(outputs.write_text(f"figures/timeline_{name}.json", text))
    return paths


def view(name: str) -> Callable[..., Path] | None:
    """What writes the page of a name for a browser, as an installed plug-in offers it; None where none does."""
    return plugins.load("view", name) if plugins.target("view", name) else None


def write_page(outputs: Outputs, *, has_charts: bool = True, drawn: Callable[[], object] = tuple) -> Path | None:
    """Write timelines that programs open, and the page of a run; its path, or None where no plug-in offers pages.

    drawn: waits until all figures are drawn; a page calls it when it has done all else.
    """
    write_traces(outputs)
    write = view("report")
    if write:
        return write(outputs, has_charts=has_charts, drawn=drawn)
    drawn()
    return None


@output_files.working_on_folders
def command(words: Sequence[str]) -> int:
    """`results report study=<name> [output_dir=<folder>]`: figures, claims and the page again; nothing is evaluated."""
    options = pairs(words, {"study": "", "output_dir": "outputs"})
    outputs = Outputs.latest(Path(options["output_dir"]), options["study"])
    redraw(outputs)
    console().print(f"report: {write_page(outputs) or outputs.folder}", soft_wrap=True)
    return 0
