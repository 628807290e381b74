"""A study before it runs: how many points there are, what of them is known to be no design, and what it will cost.

A finite space is counted exactly, block by block, by the keys that the store would give its designs and by what the
backend knows of them beforehand; nothing is simulated for it. A space that has an interval, or is too large, is
sampled, and what is told of it is marked as estimated. Time and disk come from timed calls of the real backend.
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
from dse.quantities import duration, scaled
from dse.results import report
from dse.results.pareto import Seen
from dse.space import Block, Evaluated, Knob, Space
from dse.store.result_store import recorded
from dse.study.baselines import Baselines
from dse.study.plan import Plan, plan
from dse.study.settings import Budget
from dse.study.table import ROWS_PER_GROUP
from dse.study.timing import Call, Estimate, Pace, RowCost, measured, timed, workers

if TYPE_CHECKING:
    from rich.table import Table

_MOST_COUNTED = 20_000_000  # points that are counted one by one: some 50 bytes each are held
_DRAWN = 4000  # points of all scenarios together that are drawn of a space that is not counted
_CALLS_HELD = 64  # from which those that are timed are drawn
_PER_CALL = ROWS_PER_GROUP // 2  # designs in a timed call at most
_FEWEST_CALLS = 16  # in which a space is timed, however many designs the backend would like in one
_RULES_SHOWN = 8
_Z = 1.959964  # two-sided 95 % of the normal distribution


@dataclass(frozen=True)
class Tally:
    """Points of one scenario, or of all. refused: by the model. broken: those that break a rule.

    drawn: 0 where every point was counted, else of how many draws the other numbers tell. size: points there are,
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
        known = self.size is not None and other.size is not None
        size = (self.size or 0) + (other.size or 0) if known else None
        names = ("asked", "distinct", "refused", "broken", "drawn")
        return Tally(size, **{name: getattr(self, name) + getattr(other, name) for name in names})

    def share(self, count: int) -> Estimate:
        """The share of points that a count of draws tells of, with Wilson's interval of 95 %."""
        n, p = max(self.drawn, 1), count / max(self.drawn, 1)
        middle, scale = p + _Z**2 / (2 * n), 1 + _Z**2 / n
        half = _Z * math.sqrt(p * (1 - p) / n + (_Z / (2 * n)) ** 2)
        low, high = (middle - half) / scale, (middle + half) / scale
        return Estimate(p, (low if count else 0.0, high if count < self.drawn else 1.0))


@dataclass
class Census:
    """Counts while blocks of points come by.

    legal: keys of the distinct designs that break no rule; evaluated: those and their baselines, over all scenarios.
    rules: what broke a rule, by the rule without its numbers, and one example each. calls: some of those that an
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
        self._baselines = [Baselines(space, change, self._identified) for space in self.plan.spaces.values()]
        self._compared: set[bytes] = set()
        self._offered = 0
        size = sum(tally.size or 0 for tally in self.tallies.values())
        self._per_call = min(self._backend.batch, _PER_CALL, max(1, size // _FEWEST_CALLS))

    def _identified(self, block: Block) -> Evaluated:
        return Evaluated(block, block.keys(*self._words), "")

    def take(self, blocks: Sequence[tuple[int, Block]]) -> None:
        """Count the points of some blocks, each of the scenario at a place."""
        batches = [block.batch for _, block in blocks if block.batch is not None]
        known = iter(self._backend.screen(batches))
        for index, block in blocks:
            keys = block.keys(*self._words)
            fresh = self._own[index].add(keys)
            found = _refused(block) if block.batch is None else next(known)
            self._count(self._names[index], found, fresh, refused=block.batch is None)
            self._hold(keys[fresh & found.ok], own=True)
            self._compare(index, block)
        self._offer([(index, block) for index, block in blocks if block.batch is not None])

    def _count(self, name: str, found: Results, fresh: NDArray[np.bool_], *, refused: bool) -> None:
        bad, tally = fresh & ~found.ok, self.tallies[name]
        which = "refused" if refused else "broken"
        self.tallies[name] = replace(
            tally,
            asked=tally.asked + found.size,
            distinct=tally.distinct + int(fresh.sum()),
            **{which: getattr(tally, which) + int(bad.sum())},
        )
        codes, counts = np.unique(found.reason[bad], return_counts=True)
        for code, count in zip(codes.tolist(), counts.tolist(), strict=True):
            self._blame(found.texts[code], count)

    def _blame(self, reason: str, count: int) -> None:
        """Note the rules that a reason names, each once."""
        for rule, example in {general(text): text for text in reason.split("; ")}.items():
            self.rules[rule] += count
            self.examples.setdefault(rule, example)

    def _hold(self, keys: NDArray[np.uint64], *, own: bool) -> None:
        """Note designs that would be evaluated."""
        self.num_evaluated += int(self.evaluated.add(keys).sum())
        if own:
            self.num_legal += int(self.legal.add(keys).sum())

    def _compare(self, index: int, block: Block) -> None:
        """Note the baselines of a block."""
        for _, baseline in self._baselines[index].of(block):
            name = baseline.keys.tobytes()
            if baseline.block.batch is not None and name not in self._compared:
                self._compared.add(name)
                (found,) = self._backend.screen([baseline.block.batch])
                self._hold(baseline.keys[found.ok], own=False)

    def _offer(self, blocks: Sequence[tuple[int, Block]]) -> None:
        """Have some of all calls at hand, each as likely as any other (reservoir sampling)."""
        for one in _calls(blocks, self._per_call):
            self._offered += 1
            place = int(self.random.integers(self._offered))
            if len(self.calls) < _CALLS_HELD:
                self.calls.append(one)
            elif place < _CALLS_HELD:
                self.calls[place] = one


def general(reason: str) -> str:
    """A reason without the numbers of the one design it was given for.

    >>> general("schedule.comm_cus = 400: leaves no CU (of 304)")
    'schedule.comm_cus = …: leaves no CU (of …)'
    """
    return re.sub(r"(?<![\w.])[+-]?\d+(?:\.\d+)?(?:e[+-]?\d+)?(?![\w])", "…", reason)


def _refused(block: Block) -> Results:
    return Results.all_alike(Result("infeasible", reason=block.reason), block.size)


def _calls(blocks: Sequence[tuple[int, Block]], most: int) -> Iterator[Call]:
    """The points of some blocks in calls of at most so many, as an enumeration would make them."""
    held: list[tuple[int, Block]] = []
    count = 0
    for index, block in blocks:
        for part in block.split(most):
            if held and count + part.size > most:
                yield held
                held, count = [], 0
            held.append((index, part))
            count += part.size
    if held:
        yield held


# ---------------------------------------------------------------- counting


def counted(planned: Plan, random: np.random.Generator, advance: Advance) -> Census:
    """Every point of finite spaces; the same block of all scenarios together, as a study takes them."""
    sizes = {name: space.size() for name, space in planned.spaces.items()}
    census = Census(planned, {name: Tally(size) for name, size in sizes.items()}, random)
    held: list[tuple[int, Block]] = []
    count = 0
    for blocks in zip_longest(*(space.blocks(ROWS_PER_GROUP // 2) for space in planned.spaces.values())):
        for index, block in enumerate(blocks):
            if block is not None:
                held.append((index, block))
                count += block.size
        if count >= ROWS_PER_GROUP:
            census.take(held)
            advance(count)
            held, count = [], 0
    census.take(held)
    advance(count)
    return census


def drawn(planned: Plan, random: np.random.Generator, advance: Advance) -> Census:
    """Points drawn from each scenario: every knob that counts takes any of its values alike."""
    sizes = {name: space.size() for name, space in planned.spaces.items()}
    each = -(-_DRAWN // len(sizes))
    census = Census(planned, {name: Tally(size, drawn=each) for name, size in sizes.items()}, random)
    for index, space in enumerate(planned.spaces.values()):
        for _ in range(each):
            census.take([(index, block) for block in space.resolve(_drawn(space, random))])
            advance(1)
    census.calls = searching(planned, random)
    return census


def _drawn(space: Space, random: np.random.Generator) -> dict[str, Any]:
    return space.walk(lambda knob: _value(knob, random))


def _value(knob: Knob, random: np.random.Generator) -> Any:
    if knob.values:
        return knob.values[int(random.integers(len(knob.values)))]
    if knob.log:
        return float(np.exp(random.uniform(math.log(knob.low), math.log(knob.high))))
    return float(random.uniform(knob.low, knob.high))


def searching(planned: Plan, random: np.random.Generator) -> list[Call]:
    """Calls such as a search makes: some points of one scenario, one by one."""
    each, found = min(planned.settings.search.batch, planned.backend.batch), list[Call]()
    for _ in range(_CALLS_HELD):
        index = int(random.integers(len(planned.spaces)))
        space = list(planned.spaces.values())[index]
        blocks = [block for _ in range(each) for block in space.resolve(_drawn(space, random))]
        found.append([(index, block) for block in blocks if block.batch is not None])
    return [one for one in found if one]


# ---------------------------------------------------------------- what comes of it


@dataclass(frozen=True)
class Outlook:
    """What is known of a study before it runs.

    counts: whether points were counted, not drawn. known: results of it that the store holds, None without a store.
    enumerating, searching: seconds; None where that is not what happens. row: what a row costs, None without one.
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
        """All scenarios together."""
        first, *others = self.census.tallies.values()
        return sum(others, first)

    @property
    def trials(self) -> int:
        """Points that a search evaluates at most, over all scenarios."""
        most = self.plan.settings.budget.trials
        return sum(most if tally.size is None else min(most, tally.size) for tally in self.census.tallies.values())

    @property
    def searches(self) -> bool:
        """Whether a scenario has more points than are evaluated."""
        most = self.plan.settings.budget.trials
        return bool(self.refused) or any(one.size is None or one.size > most for one in self.census.tallies.values())

    @property
    def rows(self) -> int:
        """Rows that the table will have at most."""
        total = self.total
        baselines = self.census.num_evaluated - self.census.num_legal
        return total.distinct + baselines if self.counts and not self.searches else self.trials

    @property
    def verdict(self) -> str:
        """One sentence."""
        sizes = [tally.size for tally in self.census.tallies.values()]
        largest = None if None in sizes else max(size for size in sizes if size is not None)
        whole = "" if self.enumerating is None else f" in {self.enumerating.said(duration)}"
        if not self.searches:
            return f"this space can be enumerated{whole}"
        per = " per scenario" if len(sizes) > 1 else ""
        raised = f"; budget.trials={largest} enumerates all{whole}" if largest is not None else ""
        if self.refused:
            return f"as typed it would be refused: {self.refused}{raised}"
        took = "" if self.searching is None else f" in {self.searching.said(duration)}"
        many = "endlessly many" if largest is None else f"{largest:,}"
        name, most = self.plan.settings.search.name, self.plan.settings.budget.trials
        return f"search={name} evaluates {most:,} of {many} points{per}{took}{raised}"

    def json(self) -> dict[str, Any]:
        """As printed with `json=true`."""
        rows = {name: _told(tally) for name, tally in self.census.tallies.items()}
        told: dict[str, Any] = {"study": self.plan.settings.study.name, "counted": self.counts, "scenarios": rows}
        told |= {"total": _told(self.total), "legal_designs": self.census.num_legal if self.counts else None}
        told |= {"to_evaluate": self.census.num_evaluated if self.counts else None, "in_store": self.known}
        told |= {"rules": dict(self.census.rules.most_common()), "jobs": workers(self.plan.settings.executor)}
        for name, estimate in (("enumerating_s", self.enumerating), ("searching_s", self.searching)):
            told[name] = None if estimate is None else {"value": estimate.value, "interval": estimate.interval}
        told["row"] = None if self.row is None else vars(self.row)
        told["disk_bytes"] = None if self.row is None else self.rows * (self.row.store_bytes + self.row.table_bytes)
        return {**told, "notes": list(self.notes), "verdict": self.verdict}


def _told(tally: Tally) -> dict[str, Any]:
    names = ("size", "asked", "distinct", "duplicates", "refused", "broken", "legal", "drawn")
    return {name: getattr(tally, name) for name in names}


def outlook(planned: Plan, refused: str = "") -> Outlook:
    """Count the points of a study, time some of them, and see what it will take. Nothing is kept."""
    random = np.random.default_rng(planned.settings.seed)
    sizes = [space.size() for space in planned.spaces.values()]
    size = None if None in sizes else sum(size for size in sizes if size is not None)
    counts = size is not None and size <= _MOST_COUNTED
    with bar(f"{planned.settings.study.name}: {'counting' if counts else 'drawing'}", size if counts else _DRAWN) as on:
        census = counted(planned, random, on) if counts else drawn(planned, random, on)
    found = Outlook(census, counts, _known(planned, census.evaluated), None, None, None, (), refused)
    return _costed(found, random)


def _costed(found: Outlook, random: np.random.Generator) -> Outlook:
    """With time and disk, from timed calls."""
    planned, census = found.plan, found.census
    jobs, seed, notes = workers(planned.settings.executor), planned.settings.seed, list[str]()
    calls = [one for one in census.calls if _has_legal(planned, one)]
    if not calls:
        return replace(found, notes=("no point can be evaluated, so nothing was timed",))
    pace, points = timed(planned, calls, random)
    row = measured(planned, points, stored=planned.settings.store.url is not None)
    enumerating = searching_ = None
    if found.counts:
        left = census.num_evaluated - (found.known or 0)
        enumerating = pace.total(left, jobs, extra_s=row.seconds, seed=seed)
        notes.append(_how(pace, row, jobs))
    if found.searches and not found.refused:
        asked = [one for one in searching(planned, random) if _has_legal(planned, one)]
        slow = timed(planned, asked, random)[0] if found.counts and asked else pace
        few = min(jobs, -(-planned.settings.search.batch // planned.backend.batch))  # calls that are made together
        searching_ = slow.total(found.trials, few, extra_s=row.seconds, seed=seed)
        notes.append(f"searching: {_how(slow, row, few)}; what the method itself takes to propose is not in it")
    return replace(found, enumerating=enumerating, searching=searching_, row=row, notes=tuple(notes))


def _has_legal(planned: Plan, one: Call) -> bool:
    batches = [block.batch for _, block in one if block.batch is not None]
    return any(found.ok.any() for found in planned.backend.screen(batches))


def _how(pace: Pace, row: RowCost, jobs: int) -> str:
    """What a time was estimated from, and what it includes."""
    calls, most = len(pace.sizes), int(pace.sizes.max())
    told = (
        f"timed {calls} call{'s' if calls > 1 else ''} of up to {most:,} designs: {duration(pace.per_design)} a design"
    )
    told += f", {duration(pace.start_s)} once to start" if pace.start_s > 0 else ""
    spread = f", evenly on {jobs} jobs after the first {duration(POOL_PAYS_S)}" if jobs > 1 else ""
    return f"{told}{spread}; recording {duration(row.seconds)} a row, measured on {row.num_rows:,} rows, is in it"


def _known(planned: Plan, evaluated: Seen) -> int | None:
    """How many designs have a result in the study's store; None without a store."""
    url = planned.settings.store.url
    if url is None:
        return None
    file = Path(planned.settings.output_dir) / "results.db"
    return sum(int(evaluated.has(keys).sum()) for keys in recorded(f"sqlite:///{file}" if url == "auto" else url))


# ---------------------------------------------------------------- the command


def command(words: Sequence[str]) -> int:
    """`dry-run study=<name> [overrides as for a study] [json=true]`: nothing is recorded or written."""
    flags = [word.partition("=")[0] for word in words if word.startswith("-")]
    for wrong in (flag for flag in flags if flag not in OWN_FLAGS):
        raise ConfigError([Problem(wrong, "is no flag of a dry run", way_out=did_you_mean(wrong, OWN_FLAGS))])
    typed = [word for word in overrides(words) if word != "json=true"]
    planned, refused = _planned(request(typed, own_folder(words)))
    found = outlook(planned, refused)
    if "json=true" in words:
        print(json.dumps(found.json(), indent=2, ensure_ascii=False, allow_nan=False))
        return 0
    console = report.console()
    console.print(_table(found))
    for line in (*_lines(found), found.verdict):
        console.print(line, soft_wrap=True, highlight=False)
    return 0


def _planned(asked: Request) -> tuple[Plan, str]:
    """The plan, and why it would be refused if all that is wrong is that the space is larger than the budget."""
    try:
        return plan(asked), ""
    except ConfigError as error:
        if any(problem.value != "exhaustive" for problem in error.problems):
            raise
        (most,) = (one.le for one in Budget.model_fields["trials"].metadata if hasattr(one, "le"))
        budget = {**asked.tree["budget"], "trials": most}
        return plan(replace(asked, tree={**asked.tree, "budget": budget})), error.problems[0].rule


def _table(found: Outlook) -> Table:
    """A row for scenarios that are alike, and for all."""
    from rich.table import Table

    drawn_ = "" if found.counts else " (estimated from draws, with intervals of 95 %)"
    shown = Table(title=f"{found.plan.settings.study.name}: points before anything is evaluated{drawn_}")
    names = ("points", "distinct", "duplicates", "refused by the model", "break a rule", "legal")
    for name in ("scenario", *names):
        shown.add_column(name, justify="left" if name == "scenario" else "right")
    alike: dict[Tally, list[str]] = {}
    for name, tally in found.census.tallies.items():
        alike.setdefault(tally, []).append(name)
    for tally, held in alike.items():
        shown.add_row(_named(held), *_cells(tally))
    if len(found.census.tallies) > 1:
        shown.add_row("all", *_cells(found.total), style="bold")
    return shown


def _named(scenarios: Sequence[str]) -> str:
    told = ", ".join(scenarios[:4]) + (", ..." if len(scenarios) > 4 else "")
    return told if len(scenarios) == 1 else f"{told} ({len(scenarios)}, each)"


def _cells(tally: Tally) -> list[str]:
    if not tally.drawn:
        counts = (tally.asked, tally.distinct, tally.duplicates, tally.refused, tally.broken, tally.legal)
        return [f"{count:,}" for count in counts]
    legal = tally.drawn - tally.refused - tally.broken
    shares = [tally.share(count).said(_percent) for count in (tally.refused, tally.broken, legal)]
    return ["endless" if tally.size is None else f"{tally.size:,}", "–", "–", *shares]


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def _lines(found: Outlook) -> Iterator[str]:
    """What is printed below the table."""
    census, total = found.census, found.total
    of = f" of {total.drawn:,} drawn" if total.drawn else ""
    for rule, count in census.rules.most_common(_RULES_SHOWN):
        yield f"  {count:,} points{of}: {rule}"
    if len(census.rules) > _RULES_SHOWN:
        yield f"  ({len(census.rules) - _RULES_SHOWN} rules are broken more seldom)"
    if found.counts:
        beside = census.num_evaluated - census.num_legal
        shared = total.legal - census.num_legal
        yield f"to evaluate: {census.num_evaluated:,} designs" + (f", {beside:,} of them baselines" if beside else "")
        if shared:
            yield f"{shared:,} legal designs are those of another scenario, too, and are evaluated once"
        if found.known is not None:
            yield f"the store holds results of {found.known:,} of them"
    yield from found.notes
    if found.row is not None:
        yield _disk(found, found.row)


def _disk(found: Outlook, row: RowCost) -> str:
    parts = [f"{scaled(row.table_bytes * found.rows, 'B')} in the table"]
    parts += [f"{scaled(row.store_bytes * found.rows, 'B')} in the store"] if row.store_bytes else []
    told = f"disk: about {' and '.join(parts)} for {'at most ' if found.searches else ''}{found.rows:,} rows"
    return f"{told} ({row.table_bytes:.0f} and {row.store_bytes:.0f} bytes a row, measured on {row.num_rows:,} rows)"
