"""One study from its plan to results: search, ladder of models, folder, figures, claims, tracking."""

from __future__ import annotations

import io
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext, redirect_stdout
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dse.evaluation.evaluators import Services, evaluator_kind
from dse.evaluation.workers import SignalInterrupt, Stop, stoppable
from dse.results import provenance, report
from dse.results.answer import answer, claims_line, table_of_runs, write_answer
from dse.results.decisions import decisions
from dse.results.run_folder import Outputs
from dse.results.selection import Selection
from dse.results.tables import fit_columns
from dse.store.contract import StorelessSession
from dse.study.influence import check_typed
from dse.study.plan import Plan
from dse.study.record import FigureWorkers, evaluate_probes, write_files, write_provenance
from dse.study.run import FAILED, Findings
from dse.study.run import run as search

if TYPE_CHECKING:
    import pandas as pd

    from dse.study.resume import Begun
    from dse.tracking.process import BackgroundTracking

_FEW_KNOBS = 3  # that are named in a line


class _StoppedBeforeRun(Exception):
    """Ends a command where its study would begin to run: all that its own words mean is in the plan by then."""

    def __init__(self, planned: Plan) -> None:
        super().__init__("is planned, and not run")
        self.planned = planned


_plans_only: ContextVar[bool] = ContextVar("plans_only", default=False)


def run(planned: Plan) -> tuple[Path, int]:
    """Evaluate a study and write everything; its folder, and 0, or 3 if points failed. Raises ConfigError."""
    if _plans_only.get():
        raise _StoppedBeforeRun(planned)
    for note in check_typed(planned):
        print(f"note: {note}", file=sys.stderr)
    drawing = FigureWorkers(planned.settings.figures)
    with _open_tracking(planned) as background, closing(drawing):
        outputs, findings = _evaluate(planned, drawing)
        if background is not None:
            background.begin(outputs.folder)
        _present(planned, outputs, drawing)
        if background is not None:
            background.finish()
        drawing.check()
    return outputs.folder, 3 if _has_failed(planned, findings) else 0


def dry_run(words: Sequence[str], command: Callable[[Sequence[str]], object] | None = None) -> int:
    """Print what a study would evaluate, and how long it would take. Raises ConfigError.

    command: that of words which it translates for a study, so that a dry run takes what a run takes.
    """
    from dse.study import dry_run as forecast

    return forecast.command(words, forecast.planned_of if command is None else partial(_plan_of, command))


def _plan_of(command: Callable[[Sequence[str]], object], words: Sequence[str]) -> Plan:
    """The plan of the study that a command would run."""
    token = _plans_only.set(True)
    try:
        command(words)
    except _StoppedBeforeRun as stopped:
        return stopped.planned
    finally:
        _plans_only.reset(token)
    raise AssertionError("a command of a study runs it")


@dataclass
class SeveralRuns:
    """Runs of a study that differ in some values. Each prints a line, unless verbose; all together, a table."""

    verbose: bool = False
    finished: list[tuple[Mapping[str, str], Outputs]] = field(default_factory=list)

    def run(self, values: Mapping[str, str], study: Callable[[], tuple[Path, int]]) -> int:
        """Run one of them; its exit code. values: by path, those that differ."""
        with nullcontext() if self.verbose else redirect_stdout(io.StringIO()):
            folder, code = study()
        values = {path: value.replace("\\ ", " ") for path, value in values.items()}  # as Hydra's grammar writes blanks
        self.finished.append((values, Outputs(folder)))
        chosen = " ".join(f"{path}={value}" for path, value in values.items())
        sentence = Outputs(folder).read_json("summary").get("answer") or "done"
        report.console().print(f"{chosen}: {sentence} ({folder})", soft_wrap=True)
        return code

    def show(self) -> None:
        """Print the table of those that have finished."""
        for part in table_of_runs(self.finished):
            report.console().print(part, soft_wrap=isinstance(part, str))


def _open_tracking(planned: Plan) -> AbstractContextManager[BackgroundTracking | None]:
    """The process that writes views of the study; None where none is asked for, which imports nothing."""
    wanted = planned.settings.tracking
    if wanted.uri is None and wanted.optuna is None:
        return nullcontext()
    from dse.tracking.process import background_tracking

    return background_tracking(wanted)


def _present(planned: Plan, outputs: Outputs, drawing: FigureWorkers) -> None:
    """Judge the claims, draw what remains, write the page of the run, and print where everything is."""
    drawing.begin(report.level_figures(outputs), outputs.figures)
    shown, module = report.load_selection(outputs), planned.settings.study.module
    rows = report.check(outputs, module, shown)
    _note_idle_knobs(planned, outputs, shown)
    _print_claims(planned, outputs, rows)
    drawing.begin(report.extras(outputs, module), outputs.figures)
    drawn = partial(drawing.finish, planned.settings.study.name)
    page = report.write_page(outputs, has_charts=planned.settings.figures.name != "none", drawn=drawn)
    outputs.finish()  # `latest` leads to complete runs only
    _print_rest(planned, outputs=outputs, shown=shown, page=page)


def _has_failed(planned: Plan, findings: Findings) -> bool:
    """Tell, and return, whether more points failed than may, or none is within what rules and limits allow."""
    failed, most = sum(findings.statuses[name] for name in FAILED), planned.settings.executor.max_failed_fraction
    if findings.num_rows and not failed and not findings.statuses["ok"]:
        counts = ", ".join(f"{count} {status}" for status, count in findings.statuses.most_common())
        print(
            f"exit code 3: no point is within rules and limits: {counts} (see `reason` in results.parquet)",
            file=sys.stderr,
        )
        return True
    if failed <= most * findings.num_rows:
        return False
    way = "all reasons are in results.parquet; evaluate them again with store.retry=[failed,invalid]"
    count = f"{failed} of {findings.num_rows} points failed, more than executor.max_failed_fraction = {most:g}"
    print(f"exit code 3: {count}, the first with: {findings.failure} ({way})", file=sys.stderr)
    return True


def _evaluate(planned: Plan, drawing: FigureWorkers) -> tuple[Outputs, Findings]:
    """Search, record what comes out in a new folder, and print the answer."""
    record = _provenance(planned)
    opened = evaluator_kind(planned.settings.executor.evaluator).opened
    with _open_store(planned, record) as stored, opened() as evaluator:
        outputs = Outputs.create(Path(planned.settings.output_dir), planned.settings.study.name)
        try:
            with stoppable() as stop:
                session = StorelessSession() if stored is None else stored.session
                services = Services(session, stop, evaluator)
                findings = search(planned, outputs.results, services)
                evaluate_probes(planned, outputs, services)
                write_files(planned, findings, outputs=outputs)
                # before anything that takes longer: the answer is what the user waits for
                table = _print_answer(planned, findings, outputs)
                figures = report.figures(outputs, planned.settings.study.module, table)
                drawing.begin(figures, outputs.figures, key=True)
                if planned.levels:
                    from dse.study.fidelity import Climb, write_levels

                    session_of = (
                        partial(stored.at_level, planned) if stored else lambda _: nullcontext(StorelessSession())
                    )
                    write_levels(planned, outputs, Climb(session_of, stop, evaluator))
        except BaseException as error:  # also where a signal ends it
            drawing.close()  # figures would be written into the folder that is removed
            outputs.discard()
            if isinstance(error, SignalInterrupt):
                raise _interruption(stop, is_kept=stored is not None) from None
            raise
        # last: a run without it is not finished
        write_provenance(planned, outputs, record if stored is None else {**record, **stored.recalled_results(record)})
        if stored is not None:
            stored.finish()
    return outputs, findings


def _open_store(planned: Plan, record: Mapping[str, Any]) -> AbstractContextManager[Begun | None]:
    """The study in its store, begun or taken up again; None without a store, which imports nothing."""
    if planned.settings.store.url is None:
        return nullcontext()
    from dse.study.resume import open_study

    return open_study(planned, record)


def _interruption(stop: Stop, *, is_kept: bool) -> SignalInterrupt:
    hint = "; what was evaluated is kept: type the same command to go on" if is_kept else ""
    return SignalInterrupt(stop.number, f"interrupted{hint}")


def _provenance(planned: Plan) -> dict[str, Any]:
    backend = f"{planned.spec.name} {planned.backend.version}"
    request = planned.request
    return provenance.record(request.overrides, request.folder, backend=backend, seed=planned.settings.seed)


def _print_answer(planned: Plan, findings: Findings, outputs: Outputs) -> pd.DataFrame:
    """Print the winners and the answer in one sentence, as soon as they are known; the table they are from."""
    from rich.table import Table  # which only answers need

    console, table = report.console(), report.load_selection(outputs).table
    found = decisions(planned, table)
    outputs.write_json("summary", {**outputs.read_json("summary"), "decisions": found})
    write_answer(outputs, planned.settings.study.module, table)
    for part in answer(outputs, table, verbose=planned.settings.verbose):
        if isinstance(part, Table) and not planned.settings.verbose:
            console.print(fit_columns(part, console.width))
        else:
            console.print(part)
    console.print(_describe_points(planned, findings), soft_wrap=True)
    if text := _most_frequent_reason(table):
        console.print(text, soft_wrap=True)
    return table


def _note_idle_knobs(planned: Plan, outputs: Outputs, shown: Selection) -> None:
    """Write which searched knobs change no metric to `summary.json`, where all points are at hand."""
    if shown.complete and planned.knobs:
        from dse.results.idle_axes import idle_axes

        # a part of the table cannot show that a knob never matters
        idle = [str(axes) for axes in idle_axes(shown.table, planned.knobs, tuple(planned.backend.metrics))]
        outputs.write_json("summary", {**outputs.read_json("summary"), "idle": idle})


def _print_claims(planned: Plan, outputs: Outputs, rows: Sequence[dict[str, Any]]) -> None:
    """Print how the published claims came out, and how far the levels of the model agree."""
    console, verbose = report.console(), planned.settings.verbose
    if verbose:
        console.print(report.claims_table(list(rows)))
        for part in report.levels(outputs):
            console.print(part)
    else:
        if text := claims_line(rows, planned.settings.study.name):
            console.print(text, soft_wrap=True)
        if text := report.levels_line(outputs):
            console.print(text, soft_wrap=True)


def _print_rest(planned: Plan, *, outputs: Outputs, shown: Selection, page: Path | None) -> None:
    """Print, a line each, what follows: knobs that change nothing, what the results rest on, where all of it is."""
    console, record = report.console(), outputs.read_json("provenance")
    summary = outputs.read_json("summary")
    idle = summary.get("idle") if summary["num_outcomes"] else None  # of nothing, no knob can be said to matter
    lines = [_idle_knobs(idle, len(planned.knobs))] if idle else []
    recalled = sum(record.get("recalled", {}).values())
    notes = [f"{recalled} of the results were known from earlier studies"] if recalled else []
    notes += [] if shown.complete else [f"figures show {shown}; results.parquet has them all"]
    lines += ["; ".join(notes)] if notes else []
    models = ", ".join(f"{operator} by {model}" for operator, model in record["models"].items())
    lines.append((f"costed by: {models}; " if models else "") + _rests_on(record["facts"]))
    lines.append(provenance.describe(record))
    full = f"; {page.name} has all of this in full" if page else ""
    lines.append(f"written to {outputs.folder}/ (results.parquet, figures/, ...){full}")
    for line in lines:
        console.print(line, soft_wrap=True)


def _idle_knobs(idle: Sequence[str], count: int) -> str:
    """One line on the searched knobs that change no metric; several are counted, and the report names them."""
    few = len(idle) <= _FEW_KNOBS
    return "changes no metric: " + ("; ".join(idle) if few else f"{len(idle)} of {count} searched knobs, some in part")


def _rests_on(facts: Sequence[Mapping[str, Any]]) -> str:
    """Counts of constants by provenance; the report and provenance.json name them."""
    counts = Counter(fact["provenance"] for fact in facts)
    shares = ", ".join(f"{count} {name}" for name, count in counts.most_common())
    return f"rests on {len(facts)} constants: {shares}" if facts else "rests on no constants"


def _most_frequent_reason(table: pd.DataFrame) -> str:
    """Why most of the points without a result have none; "" where all have one."""
    counts = table.loc[table["status"] != "ok", "reason"].dropna().astype(str).value_counts()
    return f"of those without a result, {counts.iloc[0]} of {counts.sum()}: {counts.index[0]}" if len(counts) else ""


def _describe_points(planned: Plan, findings: Findings) -> str:
    """One sentence: how points were chosen, and how many have no result."""
    total, methods = findings.num_rows, {chosen.method for chosen in findings.chosen.values()}
    method = planned.settings.search.name
    extra = total - sum(chosen.num_points for chosen in findings.chosen.values())
    text = f"{total} points" + (f" ({extra} of them baselines)" if extra else "")
    text += f" with {findings.num_outcomes} distinct outcomes, {', '.join(sorted(methods))}"
    if methods == {"exhaustive"}:
        text += f": all fit in budget.trials = {planned.settings.budget.trials}"
        text += "" if method in ("exhaustive", "auto") else f", so search={method} was not needed"
    illegal = sum(chosen.illegal for chosen in findings.chosen.values())
    text += f"; {illegal} proposals broke a rule and were not evaluated" if illegal else ""
    bad = ", ".join(f"{count} {status}" for status, count in findings.statuses.most_common() if status != "ok")
    engines = ", ".join(f"{count} by {name}" for name, count in findings.engines.most_common() if name)
    return "; ".join(filter(None, [text, engines, bad]))
