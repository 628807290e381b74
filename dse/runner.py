"""One study from request to results, and the commands that belong to orchestration."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dse import provenance, report, views
from dse.backend import Metric
from dse.beside import Beside, beside
from dse.compose import Request
from dse.outputs import Outputs
from dse.plan import Plan, plan
from dse.problems import pairs
from dse.selection import Selection
from dse.study import Findings
from dse.study import run as search

if TYPE_CHECKING:
    from rich.console import Console


def run(request: Request) -> int:
    """Evaluate a study and write everything; 0, or 3 if points failed. Raises ConfigError before any evaluation."""
    planned = plan(request)
    with beside(planned.settings.tracking) as shown_beside:
        return _run(planned, shown_beside)


def _run(planned: Plan, shown_beside: Beside) -> int:
    outputs = Outputs.create(Path(planned.settings.output_dir), planned.settings.study.name)
    try:
        found = search(planned, outputs.results)
    except BaseException:
        outputs.discard()
        raise
    _store(planned, found, outputs)
    shown_beside.begin(outputs.folder)
    shown = report.stored(outputs)
    rows = report.check(outputs, planned.settings.study.module, shown)
    report.draw(outputs, planned.settings.study.module, shown.table)
    outputs.finish()
    _tell(planned, found, outputs=outputs, shown=shown, rows=rows)
    shown_beside.finish()
    return 3 if {"failed", "invalid"} & set(found.statuses) else 0


def _store(planned: Plan, found: Findings, outputs: Outputs) -> None:
    settings = planned.settings
    outputs.write_table("timelines", found.timelines)
    outputs.write_config(planned.request.tree)
    outputs.write_json(
        "summary",
        {
            "study": settings.study.name,
            "goals": dict(planned.goals),
            "shown": list(settings.study.summary),
            "knobs": list(planned.knobs),
            "departures": planned.departures,
            "units": {name: metric.unit for name, metric in _metrics(planned).items()},
            "limits": {name: dict(shares) for name, shares in found.limits.items()},
            "searched": {name: vars(chosen) for name, chosen in found.chosen.items()},
        },
    )
    made = provenance.record(planned.request.overrides, f"{planned.spec.name} {planned.backend.version}", settings.seed)
    outputs.write_json("provenance", {**made, "facts": _facts(planned)})


def _metrics(planned: Plan) -> dict[str, Metric]:
    return {**planned.backend.metrics, **planned.backend.relations}


def _facts(planned: Plan) -> list[dict[str, Any]]:
    """The constants the study rests on, with their sources; those set on the command line are the user's."""
    space = next(iter(planned.spaces.values()))
    design = planned.backend.design(space.base)
    typed = {text.partition("=")[0] for text in planned.request.overrides}
    names = ("path", "value", "provenance", "source")
    facts = [dict(zip(names, fact, strict=True)) for fact in planned.backend.facts(design)]
    return [
        {**fact, "provenance": "user", "source": "command line"} if fact["path"] in typed else fact for fact in facts
    ]


def _console() -> Console:
    from rich.console import Console

    width = None if sys.stdout.isatty() else 160
    return Console(width=width, markup=False)


def _tell(
    planned: Plan, found: Findings, *, outputs: Outputs, shown: Selection, rows: Sequence[dict[str, Any]]
) -> None:
    console = _console()
    console.print(report.summary(outputs, shown.table))
    console.print(report.claims_table(list(rows)))
    console.print(_how(planned, found))
    if not shown.complete:
        console.print(f"figures show {shown}; results.parquet has them all")
    console.print(_rests_on(outputs.read_json("provenance")["facts"]))
    console.print(
        f"written to {outputs.folder}/ (results.parquet, claims.json, figures/, config.yaml, provenance.json)",
        soft_wrap=True,
    )


def _rests_on(facts: Sequence[Mapping[str, Any]]) -> str:
    """How the constants are known; those from memory by name, as they are nobody's published values."""
    counts = Counter(fact["provenance"] for fact in facts)
    told = ", ".join(f"{count} {name}" for name, count in counts.most_common())
    memory = ", ".join(fact["path"] for fact in facts if fact["provenance"] == "memory")
    return f"rests on {len(facts)} constants: {told}" + (f" (from memory, unverified: {memory})" if memory else "")


def _how(planned: Plan, found: Findings) -> str:
    """How the points were chosen, and how many have no result."""
    total, methods = found.num_rows, {chosen.method for chosen in found.chosen.values()}
    asked = planned.settings.search.name
    extra = total - sum(chosen.num_points for chosen in found.chosen.values())
    text = f"{total} points" + (f" ({extra} of them baselines)" if extra else "") + f", {', '.join(sorted(methods))}"
    if methods == {"exhaustive"}:
        text += f": all there are, as no scenario has more than budget.trials = {planned.settings.budget.trials}"
        text += "" if asked == "exhaustive" else f" (search={asked} was not needed)"
    bad = ", ".join(f"{count} {status}" for status, count in found.statuses.most_common() if status != "ok")
    engines = ", ".join(f"{count} by {name}" for name, count in found.engines.most_common() if name)
    return f"{text}; {engines}" + (f"; without result: {bad}" if bad else "")


def redraw(words: Sequence[str]) -> int:
    """`report study=<name> [output_dir=<folder>]`: figures, claims and summary again, nothing is evaluated."""
    given = pairs(words, {"study": "", "output_dir": "outputs"})
    outputs = Outputs.latest(Path(given["output_dir"]), given["study"])
    module = outputs.read_config()["study"]["module"]
    shown = report.stored(outputs)
    rows = report.check(outputs, module, shown)
    paths = report.draw(outputs, module, shown.table)
    console = _console()
    console.print(report.summary(outputs, shown.table))
    console.print(report.claims_table(rows))
    console.print(f"redrew {len(paths)} figures and claims.json in {outputs.folder}/", soft_wrap=True)
    return 0


def timeline(words: Sequence[str]) -> int:
    """`timeline study=<name> key=<its first letters> [config_dir=...] [output_dir=...]`: one point in full."""
    from dse.replay import replayed

    given = pairs(words, {"study": "", "key": "", "config_dir": ".", "output_dir": "outputs"})
    folder = None if given["config_dir"] == "." else Path(given["config_dir"])
    outputs = Outputs.latest(Path(given["output_dir"]), given["study"])
    for path in replayed(outputs, given["key"], folder):
        _console().print(str(path), soft_wrap=True)
    return 0


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {"report": redraw, "timeline": timeline, **views.COMMANDS}
