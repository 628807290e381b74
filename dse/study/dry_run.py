"""Forecast of a study before it runs: the number of points, how many of them are no legal design, and the cost.

A finite space is counted exactly, block by block, by the keys that the store would give its designs and by the rules
that the backend checks beforehand; nothing is simulated for it. A space that has an interval, or is too large, is
sampled, and its numbers are marked as estimated. Time and disk come from timed calls of the real backend.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dse.config.compose import request
from dse.config.options import OWN_FLAGS, VERBOSE, overrides, own_folder
from dse.errors import ConfigError, Problem, did_you_mean
from dse.errors.terminal import bar
from dse.evaluation.evaluators import POOL_PAYS_S
from dse.results import report
from dse.results.pareto import SeenHashes
from dse.search import SearchQuestion, ends_by_itself
from dse.store.result_store import recorded_keys
from dse.study.census import (
    MOST_COUNTED,
    MOST_DESIGNS,
    NUM_DRAWN,
    Census,
    Tally,
    count_points,
    sample_points,
    search_calls,
)
from dse.study.influence import check_typed
from dse.study.plan import Plan, plan
from dse.study.settings import Budget
from dse.study.timing import Call, CallTimes, Estimate, RowCost, measure_row, time_calls
from dse.values.units import duration_text, with_prefix

if TYPE_CHECKING:
    from rich.table import Table

_RULES_SHOWN = 8  # lines


# ---------------------------------------------------------------- what comes of it


@dataclass(frozen=True)
class Outlook:
    """Forecast of a study before it runs.

    counts: whether points were counted, not drawn. known: number of its results in the store, None without a store.
    enumerating, searching: seconds; None where the study does not do so. row: cost of a row, None without one.
    refused: why the study would be refused as it was typed.
    """

    census: Census
    counts: bool
    known: int | None
    enumerating: Estimate | None
    searching: Estimate | None
    row: RowCost | None
    notes: tuple[str, ...]
    refused: str = ""

    @property
    def plan(self) -> Plan:
        """The study."""
        return self.census.plan

    @property
    def total(self) -> Tally:
        """Tally of all scenarios together."""
        first, *remaining = self.census.tallies.values()
        return sum(remaining, first)

    @property
    def trials(self) -> int:
        """Points that a search evaluates at most, over all scenarios."""
        most = self.plan.settings.budget.trials
        return sum(most if tally.size is None else min(most, tally.size) for tally in self.census.tallies.values())

    @property
    def searches(self) -> bool:
        """True where a scenario has more points than are evaluated."""
        most = self.plan.settings.budget.trials
        sizes = [tally.size for tally in self.census.tallies.values()]
        # a space that is larger than the budget
        return bool(self.refused) or any(size is None or size > most for size in sizes)

    @property
    def ends_by_itself(self) -> bool:
        """True where the search of a space may end before its budget is spent."""
        settings = self.plan.settings
        space = max(self.plan.spaces.values(), key=lambda space: space.size() or math.inf)
        trials, goals = settings.budget.trials, self.plan.goals
        question = SearchQuestion(space, goals, settings.seed, trials, lambda points: [], repr)
        return ends_by_itself(question, settings.search)

    @property
    def rows(self) -> int:
        """Rows that the table will have at most."""
        total = self.total
        baselines = self.census.num_evaluated - self.census.num_legal  # those outside the space
        return total.distinct + baselines if self.counts and not self.searches else self.trials

    @property
    def verdict(self) -> str:
        """Forecast in one sentence."""
        sizes = [tally.size for tally in self.census.tallies.values()]
        # trials are a number per scenario
        largest = None if None in sizes else max(size for size in sizes if size is not None)
        enumeration_time = "" if self.enumerating is None else f" in {self.enumerating.text(duration_text)}"
        if not self.searches:
            return f"this space can be enumerated{enumeration_time}"
        per = " per scenario" if len(sizes) > 1 else ""
        raised = f"; budget.trials={largest} enumerates all{enumeration_time}" if largest is not None else ""
        if self.refused:
            return f"as typed it would be refused: {self.refused}{raised}"
        search_time = "" if self.searching is None else f" in {self.searching.text(duration_text)}"
        extent = "endlessly many" if largest is None else f"{largest:,}"
        name, most = self.plan.settings.search.name, self.plan.settings.budget.trials
        if self.ends_by_itself:  # how early, outcomes decide
            search_time = search_time.replace(" in ", ", in at most ", 1)
            return f"search={name} ends by itself: at most {most:,} of {extent} points{per}{search_time}{raised}"
        return f"search={name} evaluates {most:,} of {extent} points{per}{search_time}{raised}"

    def json(self) -> dict[str, Any]:
        """Return the forecast as printed with `json=true`."""
        rows = {name: _tally_record(tally) for name, tally in self.census.tallies.items()}
        record: dict[str, Any] = {"study": self.plan.settings.study.name, "counted": self.counts, "scenarios": rows}
        # draws of different scenarios cannot be compared for equal designs
        record |= {"total": _tally_record(self.total), "legal_designs": self.census.num_legal if self.counts else None}
        record |= {"to_evaluate": self.census.num_evaluated if self.counts else None, "in_store": self.known}
        record |= {"rules": dict(self.census.rules.most_common()), "jobs": self.plan.settings.executor.num_jobs}
        for name, estimate in (("enumerating_s", self.enumerating), ("searching_s", self.searching)):
            record[name] = None if estimate is None else {"value": estimate.value, "interval": estimate.interval}
        record["row"] = None if self.row is None else vars(self.row)
        record["disk_bytes"] = None if self.row is None else self.rows * (self.row.store_bytes + self.row.table_bytes)
        return {**record, "notes": list(self.notes), "verdict": self.verdict}


def _tally_record(tally: Tally) -> dict[str, Any]:
    names = ("size", "asked", "distinct", "duplicates", "refused", "broken", "legal", "drawn")
    return {name: getattr(tally, name) for name in names}


def outlook(planned: Plan, refused: str = "") -> Outlook:
    """Count the points of a study, time some of them, and estimate its cost. Nothing is recorded."""
    random = np.random.default_rng(planned.settings.seed)  # the same forecast for the same command
    sizes = [space.size() for space in planned.spaces.values()]
    size = None if None in sizes else sum(size for size in sizes if size is not None)
    designs = sum(space.num_designs() for space in planned.spaces.values()) if size is not None else 0
    counts = size is not None and size <= MOST_COUNTED and designs <= MOST_DESIGNS
    with bar(
        f"{planned.settings.study.name}: {'counting' if counts else 'drawing'}", size if counts else NUM_DRAWN
    ) as on:
        census = count_points(planned, random, on) if counts else sample_points(planned, random, on)
    forecast = Outlook(census, counts, _num_stored(planned, census.evaluated), None, None, None, (), refused)
    return _with_costs(forecast, random)


def _with_costs(forecast: Outlook, random: np.random.Generator) -> Outlook:
    """Return the forecast with time and disk from timed calls."""
    planned, census = forecast.plan, forecast.census
    jobs, seed, notes = planned.settings.executor.num_jobs, planned.settings.seed, list[str]()
    # a call in which all break rules would take no time
    calls = [call for call in census.calls if _has_legal(planned, call)]
    if not calls:
        return replace(forecast, notes=("no point can be evaluated, so nothing was timed",))
    pace, points = time_calls(planned, calls, random)
    row = measure_row(planned, points, stored=planned.settings.store.url is not None)
    enumerating = searching_ = None
    if forecast.counts:
        left = census.num_evaluated - (forecast.known or 0)  # known designs are taken from the store
        enumerating = pace.total(left, jobs, extra_s=row.seconds, seed=seed)
        notes.append(_how(pace, row, jobs))
    if forecast.searches and not forecast.refused:
        legal_calls = [call for call in search_calls(planned, random) if _has_legal(planned, call)]
        # calls of a search hold fewer designs, so that each design takes longer
        slow = time_calls(planned, legal_calls, random)[0] if forecast.counts and legal_calls else pace
        few = min(jobs, -(-planned.settings.search.batch // planned.backend.batch))  # calls that are made together
        searching_ = slow.total(forecast.trials, few, extra_s=row.seconds, seed=seed)
        notes.append(f"searching: {_how(slow, row, few)}; what the method itself takes to propose is not in it")
    return replace(forecast, enumerating=enumerating, searching=searching_, row=row, notes=tuple(notes))


def _has_legal(planned: Plan, call: Call) -> bool:
    batches = [block.batch for _, block in call if block.batch is not None]
    return any(results.ok.any() for results in planned.backend.screen(batches))


def _how(pace: CallTimes, row: RowCost, jobs: int) -> str:
    """Return the basis of a time estimate, and what it includes."""
    calls, most = len(pace.sizes), int(pace.sizes.max())
    plural = "s" if calls > 1 else ""
    basis = f"timed {calls} call{plural} of up to {most:,} designs: {duration_text(pace.per_design)} a design"
    basis += f", {duration_text(pace.start_s)} once to start" if pace.start_s > 0 else ""
    spread = f", evenly on {jobs} jobs after the first {duration_text(POOL_PAYS_S)}" if jobs > 1 else ""
    return f"{basis}{spread}; recording {duration_text(row.seconds)} a row, measured on {row.num_rows:,} rows, is in it"


def _num_stored(planned: Plan, evaluated: SeenHashes) -> int | None:
    """Return the number of designs that have a result in the study's store; None without a store."""
    url = planned.settings.store.url
    if url is None:
        return None
    file = Path(planned.settings.output_dir) / "results.db"
    return sum(int(evaluated.has(keys).sum()) for keys in recorded_keys(f"sqlite:///{file}" if url == "auto" else url))


# ---------------------------------------------------------------- the command


def planned_of(words: Sequence[str]) -> Plan:
    """Return the plan of a study from its words. Raises ConfigError."""
    return plan(request(overrides(words), own_folder(words)))


def command(words: Sequence[str], planned: Callable[[Sequence[str]], Plan] = planned_of) -> int:
    """`run <study> ... --dry-run [json=true]`: count the points and their cost; nothing is recorded or written.

    planned: returns the plan of what the words would run. Raises ConfigError.
    """
    flags = [word.partition("=")[0] for word in words if word.startswith("-")]
    known = (*OWN_FLAGS, *VERBOSE)
    for wrong in (flag for flag in flags if flag not in known):  # the first
        raise ConfigError([Problem(wrong, "is no flag of a dry run", way_out=did_you_mean(wrong, known))])
    plan_, refused = _plan_or_refusal([word for word in words if word != _AS_JSON], planned)
    typed_notes = check_typed(plan_)
    forecast = outlook(plan_, refused)
    forecast = replace(forecast, notes=(*typed_notes, *forecast.notes))
    if _AS_JSON in words:
        print(json.dumps(forecast.json(), indent=2, ensure_ascii=False, allow_nan=False))
        return 0
    console = report.console()
    console.print(_table(forecast))
    for line in (*_lines(forecast), forecast.verdict):
        console.print(line, soft_wrap=True, highlight=False)  # no line breaks, for programs that read them
    return 0


_AS_JSON = "json=true"


def _plan_or_refusal(words: Sequence[str], planned: Callable[[Sequence[str]], Plan]) -> tuple[Plan, str]:
    """Return the plan, and why it would be refused where the only fault is a space larger than the budget."""
    try:
        return planned(words), ""
    except ConfigError as error:
        if any(problem.value != "exhaustive" for problem in error.problems):  # other problems are reported as they are
            raise
        # the largest budget that is accepted
        (most,) = (bound.le for bound in Budget.model_fields["trials"].metadata if hasattr(bound, "le"))
        words_without = [word for word in words if word.partition("=")[0] != "budget.trials"]
        return planned([*words_without, f"budget.trials={most}"]), error.problems[0].rule


def _table(forecast: Outlook) -> Table:
    """Return a table with a row for each group of equal scenarios, and one for all."""
    from rich.table import Table

    drawn_ = "" if forecast.counts else " (estimated from draws, with intervals of 95 %)"
    shown = Table(title=f"{forecast.plan.settings.study.name}: points before anything is evaluated{drawn_}")
    names = ("points", "distinct", "duplicates", "refused by the model", "break a rule", "legal")
    for name in ("scenario", *names):
        shown.add_column(name, justify="left" if name == "scenario" else "right")
    alike: dict[Tally, list[str]] = {}
    for name, tally in forecast.census.tallies.items():
        alike.setdefault(tally, []).append(name)
    for tally, scenarios in alike.items():
        shown.add_row(_scenario_list(scenarios), *_cells(tally))
    if len(forecast.census.tallies) > 1:
        shown.add_row("all", *_cells(forecast.total), style="bold")
    return shown


def _scenario_list(scenarios: Sequence[str]) -> str:
    listed = ", ".join(scenarios[:4]) + (", ..." if len(scenarios) > 4 else "")
    return listed if len(scenarios) == 1 else f"{listed} ({len(scenarios)}, each)"


def _cells(tally: Tally) -> list[str]:
    if not tally.drawn:
        counts = (tally.asked, tally.distinct, tally.duplicates, tally.refused, tally.broken, tally.legal)
        return [f"{count:,}" for count in counts]
    legal = tally.drawn - tally.refused - tally.broken
    parts = (tally.share(count) for count in (tally.refused, tally.broken, legal))
    shares = [part.text(lambda share: f"{100 * share:.3g} %") for part in parts]
    # draws say nothing of how many are distinct
    return ["endless" if tally.size is None else f"{tally.size:,}", "–", "–", *shares]


def _lines(forecast: Outlook) -> Iterator[str]:
    """Yield the lines printed below the table."""
    census, total = forecast.census, forecast.total
    of = f" of {total.drawn:,} drawn" if total.drawn else ""
    for rule, count in census.rules.most_common(_RULES_SHOWN):
        yield f"  {count:,} points{of}: {rule}"
    if len(census.rules) > _RULES_SHOWN:
        yield f"  ({len(census.rules) - _RULES_SHOWN} rules are broken more seldom)"
    if forecast.counts:
        beside = census.num_evaluated - census.num_legal
        shared = total.legal - census.num_legal
        yield f"to evaluate: {census.num_evaluated:,} designs" + (f", {beside:,} of them baselines" if beside else "")
        if shared:
            yield f"{shared:,} legal designs are in another scenario, too, and are evaluated once"
        if forecast.known is not None:
            yield f"the store holds results of {forecast.known:,} of them"
    yield from forecast.notes
    if forecast.row is not None:
        yield _disk(forecast, forecast.row)


def _disk(forecast: Outlook, row: RowCost) -> str:
    parts = [f"{with_prefix(row.table_bytes * forecast.rows, 'byte')} in the table"]
    parts += [f"{with_prefix(row.store_bytes * forecast.rows, 'byte')} in the store"] if row.store_bytes else []
    text = f"disk: about {' and '.join(parts)} for {'at most ' if forecast.searches else ''}{forecast.rows:,} rows"
    return f"{text} ({row.table_bytes:.0f} and {row.store_bytes:.0f} bytes a row, measured on {row.num_rows:,} rows)"
