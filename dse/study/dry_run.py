"""Forecast of a study before it runs: the number of points, how many of them are no legal design, and the cost.

A finite space is counted exactly, block by block, by the keys that the store would give its designs and by the rules
that the backend checks beforehand; nothing is simulated for it. A space that has an interval, or is too large, is
sampled, and its numbers are marked as estimated. Time and disk come from timed calls of the real backend.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dse.backend import Result, Results
from dse.config.compose import OWN_FLAGS, Request, overrides, own_folder, request
from dse.errors import ConfigError, Problem, did_you_mean
from dse.evaluation.executor import POOL_PAYS_S
from dse.progress import Advance, bar
from dse.results import report
from dse.results.pareto import Seen
from dse.space import Block, Evaluated, Knob, Space
from dse.store.result_store import recorded_keys
from dse.study.baselines import Baselines
from dse.study.plan import Plan, plan
from dse.study.settings import Budget
from dse.study.table import ROWS_PER_GROUP
from dse.study.timing import Call, Estimate, Pace, RowCost, measure_row, time_calls, workers
from dse.units import duration_text, with_prefix

if TYPE_CHECKING:
    from rich.table import Table

_MOST_COUNTED = 20_000_000  # points that are counted one by one, at some 50 bytes each
_DRAWN = 4000  # points of all scenarios together that are drawn from a space that is not counted
_CALLS_HELD = 64  # from which the timed calls are drawn
_PER_CALL = ROWS_PER_GROUP // 2  # designs in a timed call at most
_FEWEST_CALLS = 16  # in which a space is timed, however many designs the backend takes in one
_RULES_SHOWN = 8
_Z = 1.959964  # two-sided 95 % of the normal distribution


@dataclass(frozen=True)
class Tally:
    """Points of one scenario, or of all. refused: by the model. broken: those that break a rule.

    drawn: 0 where every point was counted, else the number of draws behind the other numbers. size: number of points,
    None for endlessly many.
    """

    size: int | None
    asked: int = 0
    distinct: int = 0
    refused: int = 0
    broken: int = 0
    drawn: int = 0

    @property
    def duplicates(self) -> int:
        """Points whose design is that of a point before them."""
        return self.asked - self.distinct

    @property
    def legal(self) -> int:
        """Distinct designs that break no rule that is known beforehand."""
        return self.distinct - self.refused - self.broken

    def __add__(self, other: Tally) -> Tally:
        finite = self.size is not None and other.size is not None
        size = (self.size or 0) + (other.size or 0) if finite else None
        names = ("asked", "distinct", "refused", "broken", "drawn")
        return Tally(size, **{name: getattr(self, name) + getattr(other, name) for name in names})

    def share(self, count: int) -> Estimate:
        """Estimate the share of points from a count of draws, with Wilson's interval of 95 %."""
        n, p = max(self.drawn, 1), count / max(self.drawn, 1)
        middle, scale = p + _Z**2 / (2 * n), 1 + _Z**2 / n
        half = _Z * math.sqrt(p * (1 - p) / n + (_Z / (2 * n)) ** 2)
        low, high = (middle - half) / scale, (middle + half) / scale
        return Estimate(p, (low if count else 0.0, high if count < self.drawn else 1.0))


@dataclass
class Census:
    """Counts over a stream of blocks of points.

    legal: keys of the distinct designs that break no rule; evaluated: those and their baselines, over all scenarios.
    rules: points that broke a rule, by the rule without its numbers; examples: one each. calls: some of those that an
    enumeration would make.
    """

    plan: Plan
    tallies: dict[str, Tally]
    random: np.random.Generator
    rules: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    legal: Seen = field(default_factory=Seen)
    evaluated: Seen = field(default_factory=Seen)
    num_legal: int = 0
    num_evaluated: int = 0
    calls: list[Call] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._backend, self._words = self.plan.backend, self.plan.context.words
        self._names, self._own = list(self.plan.spaces), [Seen() for _ in self.plan.spaces]
        change = self.plan.settings.study.baseline
        self._baselines = [Baselines(space, change, self._identify_block) for space in self.plan.spaces.values()]
        self._compared: set[bytes] = set()
        self._offered = 0
        size = sum(tally.size or 0 for tally in self.tallies.values())
        self._per_call = min(self._backend.batch, _PER_CALL, max(1, size // _FEWEST_CALLS))

    def _identify_block(self, block: Block) -> Evaluated:
        return Evaluated(block, block.keys(*self._words), "")

    def take(self, blocks: Sequence[tuple[int, Block]]) -> None:
        """Count the points of some blocks, each of the scenario at a place."""
        batches = [block.batch for _, block in blocks if block.batch is not None]
        screened = iter(self._backend.screen(batches))
        for index, block in blocks:
            keys = block.keys(*self._words)
            fresh = self._own[index].add(keys)
            results = _refusal(block) if block.batch is None else next(screened)
            self._count(self._names[index], results, fresh, refused=block.batch is None)
            self._hold(keys[fresh & results.ok], explored=True)
            self._compare(index, block)
        self._offer([(index, block) for index, block in blocks if block.batch is not None])

    def _count(self, name: str, results: Results, fresh: NDArray[np.bool_], *, refused: bool) -> None:
        bad, tally = fresh & ~results.ok, self.tallies[name]
        which = "refused" if refused else "broken"
        self.tallies[name] = replace(
            tally,
            asked=tally.asked + results.size,
            distinct=tally.distinct + int(fresh.sum()),
            **{which: getattr(tally, which) + int(bad.sum())},
        )
        codes, counts = np.unique(results.reason[bad], return_counts=True)
        for code, count in zip(codes.tolist(), counts.tolist(), strict=True):
            self._blame(results.texts[code], count)

    def _blame(self, reason: str, count: int) -> None:
        """Note the rules that a reason names, each once."""
        for rule, example in {general(text): text for text in reason.split("; ")}.items():
            self.rules[rule] += count
            self.examples.setdefault(rule, example)

    def _hold(self, keys: NDArray[np.uint64], *, explored: bool) -> None:
        """Note designs that would be evaluated."""
        self.num_evaluated += int(self.evaluated.add(keys).sum())
        if explored:
            self.num_legal += int(self.legal.add(keys).sum())

    def _compare(self, index: int, block: Block) -> None:
        """Note the baselines of a block."""
        for _, baseline in self._baselines[index].of(block):
            name = baseline.keys.tobytes()
            if baseline.block.batch is not None and name not in self._compared:
                self._compared.add(name)
                (results,) = self._backend.screen([baseline.block.batch])
                self._hold(baseline.keys[results.ok], explored=False)

    def _offer(self, blocks: Sequence[tuple[int, Block]]) -> None:
        """Keep some of all calls, each as likely as any other (reservoir sampling)."""
        for candidate in _calls(blocks, self._per_call):
            self._offered += 1
            place = int(self.random.integers(self._offered))
            if len(self.calls) < _CALLS_HELD:
                self.calls.append(candidate)
            elif place < _CALLS_HELD:
                self.calls[place] = candidate


def general(reason: str) -> str:
    """Return a reason without the numbers of its design.

    >>> general("schedule.comm_cus = 400: leaves no CU (of 304)")
    'schedule.comm_cus = …: leaves no CU (of …)'
    """
    return re.sub(r"(?<![\w.])[+-]?\d+(?:\.\d+)?(?:e[+-]?\d+)?(?![\w])", "…", reason)


def _refusal(block: Block) -> Results:
    return Results.all_alike(Result("infeasible", reason=block.reason), block.size)


def _calls(blocks: Sequence[tuple[int, Block]], most: int) -> Iterator[Call]:
    """Yield the points of some blocks in calls of at most `most` designs, as an enumeration would make them."""
    parts: list[tuple[int, Block]] = []
    count = 0
    for index, block in blocks:
        for part in block.split(most):
            if parts and count + part.size > most:
                yield parts
                parts, count = [], 0
            parts.append((index, part))
            count += part.size
    if parts:
        yield parts


# ---------------------------------------------------------------- counting


def count_points(planned: Plan, random: np.random.Generator, advance: Advance) -> Census:
    """Count every point of finite spaces; the same block of all scenarios together, as a study takes them."""
    sizes = {name: space.size() for name, space in planned.spaces.items()}
    census = Census(planned, {name: Tally(size) for name, size in sizes.items()}, random)
    pending: list[tuple[int, Block]] = []
    count = 0
    for blocks in zip_longest(*(space.blocks(ROWS_PER_GROUP // 2) for space in planned.spaces.values())):
        for index, block in enumerate(blocks):
            if block is not None:
                pending.append((index, block))
                count += block.size
        if count >= ROWS_PER_GROUP:
            census.take(pending)
            advance(count)
            pending, count = [], 0
    census.take(pending)
    advance(count)
    return census


def sample_points(planned: Plan, random: np.random.Generator, advance: Advance) -> Census:
    """Count points drawn from each scenario: every knob that counts takes any of its values with equal probability."""
    sizes = {name: space.size() for name, space in planned.spaces.items()}
    num_draws = -(-_DRAWN // len(sizes))
    census = Census(planned, {name: Tally(size, drawn=num_draws) for name, size in sizes.items()}, random)
    for index, space in enumerate(planned.spaces.values()):
        for _ in range(num_draws):
            census.take([(index, block) for block in space.resolve(_draw_point(space, random))])
            advance(1)
    census.calls = search_calls(planned, random)
    return census


def _draw_point(space: Space, random: np.random.Generator) -> dict[str, Any]:
    return space.walk(lambda knob: _value(knob, random))


def _value(knob: Knob, random: np.random.Generator) -> Any:
    if knob.values:
        return knob.values[int(random.integers(len(knob.values)))]
    if knob.log:
        return float(np.exp(random.uniform(math.log(knob.low), math.log(knob.high))))
    return float(random.uniform(knob.low, knob.high))


def search_calls(planned: Plan, random: np.random.Generator) -> list[Call]:
    """Return calls such as a search makes: some points of one scenario, one by one."""
    num_points, calls = min(planned.settings.search.batch, planned.backend.batch), list[Call]()
    for _ in range(_CALLS_HELD):
        index = int(random.integers(len(planned.spaces)))
        space = list(planned.spaces.values())[index]
        blocks = [block for _ in range(num_points) for block in space.resolve(_draw_point(space, random))]
        calls.append([(index, block) for block in blocks if block.batch is not None])
    return [call for call in calls if call]


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
        return bool(self.refused) or any(size is None or size > most for size in sizes)

    @property
    def rows(self) -> int:
        """Rows that the table will have at most."""
        total = self.total
        baselines = self.census.num_evaluated - self.census.num_legal
        return total.distinct + baselines if self.counts and not self.searches else self.trials

    @property
    def verdict(self) -> str:
        """Forecast in one sentence."""
        sizes = [tally.size for tally in self.census.tallies.values()]
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
        return f"search={name} evaluates {most:,} of {extent} points{per}{search_time}{raised}"

    def json(self) -> dict[str, Any]:
        """Return the forecast as printed with `json=true`."""
        rows = {name: _tally_record(tally) for name, tally in self.census.tallies.items()}
        record: dict[str, Any] = {"study": self.plan.settings.study.name, "counted": self.counts, "scenarios": rows}
        record |= {"total": _tally_record(self.total), "legal_designs": self.census.num_legal if self.counts else None}
        record |= {"to_evaluate": self.census.num_evaluated if self.counts else None, "in_store": self.known}
        record |= {"rules": dict(self.census.rules.most_common()), "jobs": workers(self.plan.settings.executor)}
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
    random = np.random.default_rng(planned.settings.seed)
    sizes = [space.size() for space in planned.spaces.values()]
    size = None if None in sizes else sum(size for size in sizes if size is not None)
    counts = size is not None and size <= _MOST_COUNTED
    with bar(f"{planned.settings.study.name}: {'counting' if counts else 'drawing'}", size if counts else _DRAWN) as on:
        census = count_points(planned, random, on) if counts else sample_points(planned, random, on)
    forecast = Outlook(census, counts, _num_stored(planned, census.evaluated), None, None, None, (), refused)
    return _with_costs(forecast, random)


def _with_costs(forecast: Outlook, random: np.random.Generator) -> Outlook:
    """Return the forecast with time and disk from timed calls."""
    planned, census = forecast.plan, forecast.census
    jobs, seed, notes = workers(planned.settings.executor), planned.settings.seed, list[str]()
    calls = [call for call in census.calls if _has_legal(planned, call)]
    if not calls:
        return replace(forecast, notes=("no point can be evaluated, so nothing was timed",))
    pace, points = time_calls(planned, calls, random)
    row = measure_row(planned, points, stored=planned.settings.store.url is not None)
    enumerating = searching_ = None
    if forecast.counts:
        left = census.num_evaluated - (forecast.known or 0)
        enumerating = pace.total(left, jobs, extra_s=row.seconds, seed=seed)
        notes.append(_how(pace, row, jobs))
    if forecast.searches and not forecast.refused:
        legal_calls = [call for call in search_calls(planned, random) if _has_legal(planned, call)]
        slow = time_calls(planned, legal_calls, random)[0] if forecast.counts and legal_calls else pace
        few = min(jobs, -(-planned.settings.search.batch // planned.backend.batch))  # calls that are made together
        searching_ = slow.total(forecast.trials, few, extra_s=row.seconds, seed=seed)
        notes.append(f"searching: {_how(slow, row, few)}; what the method itself takes to propose is not in it")
    return replace(forecast, enumerating=enumerating, searching=searching_, row=row, notes=tuple(notes))


def _has_legal(planned: Plan, call: Call) -> bool:
    batches = [block.batch for _, block in call if block.batch is not None]
    return any(results.ok.any() for results in planned.backend.screen(batches))


def _how(pace: Pace, row: RowCost, jobs: int) -> str:
    """Return the basis of a time estimate, and what it includes."""
    calls, most = len(pace.sizes), int(pace.sizes.max())
    plural = "s" if calls > 1 else ""
    basis = f"timed {calls} call{plural} of up to {most:,} designs: {duration_text(pace.per_design)} a design"
    basis += f", {duration_text(pace.start_s)} once to start" if pace.start_s > 0 else ""
    spread = f", evenly on {jobs} jobs after the first {duration_text(POOL_PAYS_S)}" if jobs > 1 else ""
    return f"{basis}{spread}; recording {duration_text(row.seconds)} a row, measured on {row.num_rows:,} rows, is in it"


def _num_stored(planned: Plan, evaluated: Seen) -> int | None:
    """Return the number of designs that have a result in the study's store; None without a store."""
    url = planned.settings.store.url
    if url is None:
        return None
    file = Path(planned.settings.output_dir) / "results.db"
    return sum(int(evaluated.has(keys).sum()) for keys in recorded_keys(f"sqlite:///{file}" if url == "auto" else url))


# ---------------------------------------------------------------- the command


def command(words: Sequence[str]) -> int:
    """`dry-run study=<name> [overrides as for a study] [json=true]`: nothing is recorded or written."""
    flags = [word.partition("=")[0] for word in words if word.startswith("-")]
    for wrong in (flag for flag in flags if flag not in OWN_FLAGS):
        raise ConfigError([Problem(wrong, "is no flag of a dry run", way_out=did_you_mean(wrong, OWN_FLAGS))])
    typed = [word for word in overrides(words) if word != "json=true"]
    planned, refused = _plan_or_refusal(request(typed, own_folder(words)))
    forecast = outlook(planned, refused)
    if "json=true" in words:
        print(json.dumps(forecast.json(), indent=2, ensure_ascii=False, allow_nan=False))
        return 0
    console = report.console()
    console.print(_table(forecast))
    for line in (*_lines(forecast), forecast.verdict):
        console.print(line, soft_wrap=True, highlight=False)
    return 0


def _plan_or_refusal(typed: Request) -> tuple[Plan, str]:
    """Return the plan, and why it would be refused where the only fault is a space larger than the budget."""
    try:
        return plan(typed), ""
    except ConfigError as error:
        if any(problem.value != "exhaustive" for problem in error.problems):
            raise
        (most,) = (bound.le for bound in Budget.model_fields["trials"].metadata if hasattr(bound, "le"))
        budget = {**typed.tree["budget"], "trials": most}
        return plan(replace(typed, tree={**typed.tree, "budget": budget})), error.problems[0].rule


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
    shares = [tally.share(count).text(_percent) for count in (tally.refused, tally.broken, legal)]
    return ["endless" if tally.size is None else f"{tally.size:,}", "–", "–", *shares]


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


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
            yield f"{shared:,} legal designs are those of another scenario, too, and are evaluated once"
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
