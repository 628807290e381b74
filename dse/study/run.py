"""Running a study: search every scenario, compare with the baseline, find the fronts, replay the winners.

Blocks of points come from the search space, go to the backend as batches and to the table as columns. A finite space
streams: however many points it has, a few thousand are held at a time. The ledger writes every row once, in the order
of arrival, and keeps what concerns all rows.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from dse.backend import Canonical, Replay, Result, Results
from dse.errors.terminal import Advance, bar
from dse.evaluation.calls import Part
from dse.evaluation.evaluators import AnyEvaluator, Services
from dse.results.pareto import SeenHashes, Standings
from dse.search import Chosen, Outcome, SearchQuestion, explore
from dse.space import Assignment, Points, Space, blocks_together
from dse.study.plan import Plan
from dse.study.table import ROWS_PER_GROUP, Baselines, ScenarioRows, Sheet, TableLayout
from dse.values import grid_content_keys, keys_to_hex

if TYPE_CHECKING:
    import pandas as pd

FAILED = ("failed", "invalid")
"""Statuses of rows for which the backend, or what it says, is to blame."""
_TOGETHER = 64  # scenarios whose points are made at once: many share calls, and the first results come soon


@dataclass(frozen=True)
class Findings:
    """Results of a study besides the table of points.

    statuses, engines: number of rows with each. num_outcomes: distinct ones (rows of a scenario with equal metrics are
    one). front_size: number of outcomes on a front. timelines, limits: of the winners. chosen: how each scenario was
    searched. failure: reason of the first row that failed or was invalid.
    """

    statuses: Counter[str]
    engines: Counter[str]
    num_outcomes: int
    front_size: int
    timelines: pd.DataFrame
    limits: Mapping[str, Mapping[str, float]]
    chosen: Mapping[str, Chosen]
    failure: str

    @property
    def num_rows(self) -> int:
        """Rows of the table."""
        return sum(self.statuses.values())


def run(plan: Plan, path: Path, services: Services | None = None) -> Findings:
    """Search every scenario of a plan and write the table to `path`. It depends on configuration and seed alone."""
    services, trials, name = services or Services(), plan.settings.budget.trials, plan.settings.study.name
    # None: too many to enumerate within the budget
    sizes = {name: space.size(trials) for name, space in plan.spaces.items()}
    chosen: dict[str, Chosen] = {}
    total = sum(trials if size is None else size for size in sizes.values())
    with Ledger(plan, path) as ledger:
        with bar(name, total) as advance:
            evaluator = replace(services, advance=advance).evaluator_of(plan.spec, plan.settings.executor)
            scenarios = [_Scenario(plan, index, evaluator, advance) for index in range(len(sizes))]
            finite = [scenario for scenario in scenarios if sizes[scenario.name] is not None]
            # finite scenarios first, as they share calls
            for part in _evaluate_rows(evaluator, _enumerate_points(finite)):
                ledger.take(part)
            for scenario in scenarios:
                if sizes[scenario.name] is None:
                    from dse.study import warm_start

                    first = warm_start.points(plan, scenario.name)
                    chosen[scenario.name] = explore(scenario.question, plan.settings.search, first=first)
                    for part in _evaluate_rows(evaluator, scenario.rows(scenario.sampled_points)):
                        ledger.take(part)
            ledger.flush()
            # a sampler may have asked for fewer points than its budget
            advance(0, exactly=sum(ledger.statuses.values()))
        front_size = ledger.finish(name)
    for scenario in finite:
        distinct = int(ledger.distinct[scenario.index])
        # points that were the same design as others are not distinct
        chosen[scenario.name] = Chosen(distinct, "exhaustive", (sizes[scenario.name] or 0) - distinct)
    in_order = {name: chosen[name] for name in plan.spaces}
    timelines, limits = _replay_winners(plan, ledger.winners if plan.settings.timeline else {})
    counts = ledger.statuses, ledger.engines, ledger.num_outcomes, front_size
    return Findings(*counts, timelines, limits, in_order, ledger.failure)


def finite_points(plan: Plan, evaluator: AnyEvaluator) -> Iterator[Points]:
    """Yield the points of a plan's finite spaces and their baselines that have designs, each once."""
    trials = plan.settings.budget.trials
    finite = [place for place, space in enumerate(plan.spaces.values()) if space.size(trials) is not None]
    for rows in _enumerate_points([_Scenario(plan, place, evaluator) for place in finite]):
        if rows.part.submitted:  # a baseline may be a point of the space, too
            continue
        rows.part.submitted = True
        if rows.part.points.design is None:
            evaluator.advance(rows.part.size)
        else:
            yield rows.part.points


def _enumerate_points(scenarios: Sequence[_Scenario]) -> Iterator[ScenarioRows]:
    """Yield every point of finite spaces; the same block of many scenarios together, so that they share calls."""
    for first in range(0, len(scenarios), _TOGETHER):
        batch = scenarios[first : first + _TOGETHER]
        # half: each row may come with its baseline
        for blocks in blocks_together([scenario.space for scenario in batch], ROWS_PER_GROUP // 2):
            for scenario, block in zip(batch, blocks, strict=True):
                yield from scenario.rows([] if block is None else [block])


def _evaluate_rows(evaluator: AnyEvaluator, rows: Iterable[ScenarioRows]) -> Iterator[ScenarioRows]:
    """Yield the same rows with results: rows without any are evaluated, once."""
    waiting: deque[ScenarioRows] = deque()  # rows in order, whose results are on their way

    def points() -> Iterator[Points]:
        for group in rows:
            waiting.append(group)
            part = group.part
            if part.submitted:
                continue
            part.submitted = True
            if part.points.design is not None:
                yield part.points
            else:
                # no design at all: nothing for a backend to judge
                part.take(0, Results.all_alike(Result("infeasible", reason=part.points.reason), part.size))
                evaluator.advance(part.size)

    def ready() -> Iterator[ScenarioRows]:
        # results of parts that were known earlier come without a call
        while waiting and not waiting[0].part.left:
            yield waiting.popleft()

    for results in evaluator.results(points()):
        yield from ready()
        waiting[0].part.take(0, results)
        yield from ready()
    yield from ready()


class _Scenario:
    """Points of one scenario: as blocks with their baselines, and one by one for a sampler."""

    def __init__(self, plan: Plan, index: int, evaluator: AnyEvaluator, advance: Advance | None = None) -> None:
        self.index, self._evaluator, self._advance = index, evaluator, advance
        self.name = list(plan.spaces)[index]
        self.space: Space = plan.spaces[self.name]
        # independent streams, though seeds of studies are small numbers
        self.seed = int(np.random.SeedSequence([plan.settings.seed, index]).generate_state(1)[0])
        self._plan, self._words = plan, plan.context.words
        self._baselines = Baselines(self.space, plan.settings.study.baseline, self._identify_block)
        self._points: dict[str, str] = {}  # assignment as text -> name, so that equal assignments are resolved once
        self._known: dict[str, Part] = {}  # name -> point: equal designs are evaluated once
        self._sampled: dict[str, None] = {}  # a set in order
        self._met = SeenHashes()

    @property
    def question(self) -> SearchQuestion:
        """Question to a sampler."""
        settings = self._plan.settings
        return SearchQuestion(
            self.space,
            self._plan.goals,
            self.seed,
            trials=settings.budget.trials,
            evaluate=self.outcomes,
            identify=self.identify,
            legal=self.legal,
            limits=settings.study.limits,
        )

    @property
    def sampled_points(self) -> list[Points]:
        """Points that a sampler had evaluated, in order."""
        return [self._known[name].points for name in self._sampled]

    def rows(self, blocks: Iterable[Points]) -> Iterator[ScenarioRows]:
        """Yield the rows of some blocks, those of their baselines first."""
        for block in blocks:
            if self._repeats(block):
                if self._advance is not None:
                    self._advance(0, fewer=block.size)
                continue
            for part, baseline in self._baselines.of(block):
                point = self._once(self._identify_block(part))
                reference = self._once(baseline)
                if np.array_equal(point.keys, reference.keys):  # a point that is its own baseline is one row
                    point = reference
                elif not reference.submitted:  # several blocks share a baseline, which has one row
                    yield ScenarioRows(self.index, reference, reference, explored=False)
                yield ScenarioRows(self.index, point, reference, explored=True)

    def _repeats(self, block: Points) -> bool:
        """Tell whether all points of a block came before it, apart from a knob that changes nothing."""
        if not isinstance(self._plan.backend, Canonical) or block.design is None:
            return False
        # also where all are kept: later blocks are compared with it
        fresh = self._met.add(block.content_keys(*self._words))
        return block.unsettled is not None and not fresh.any()

    def _identify_block(self, block: Points) -> Part:
        return Part(block.identified(self.name, self._words))

    def _once(self, point: Part) -> Part:
        """Return the same designs as evaluated for a sampler, if they were."""
        # samplers evaluate points one by one
        return self._known.get(_name(point), point) if self._known and point.size == 1 else point

    def identify(self, point: Assignment) -> str:
        """Return the key of a point: equal designs have equal keys, however they are written."""
        text = repr(sorted(point.items(), key=lambda item: item[0]))  # the order of knobs does not matter
        if text not in self._points:
            (block,) = self.space.resolve(point)
            evaluated = self._identify_block(block)
            self._points[text] = _name(evaluated)
            self._known.setdefault(_name(evaluated), evaluated)  # another assignment may have made the same design
        return self._points[text]

    def legal(self, points: Sequence[Assignment]) -> list[bool]:
        """Tell of each point whether it breaks no rule of the backend."""
        designs = [self._known[self.identify(point)].points.design for point in points]
        return [design is not None and not self._plan.backend.problems(design) for design in designs]

    def outcomes(self, points: Sequence[Assignment]) -> list[Outcome]:
        """Evaluate points for a sampler; return their metrics in order, None where there are none."""
        names = [self.identify(point) for point in points]
        fresh = [self._known[name] for name in dict.fromkeys(names) if not self._known[name].submitted]
        # rows are made anew for the table, with their baselines
        for _ in _evaluate_rows(
            self._evaluator, [ScenarioRows(self.index, point, point, explored=True) for point in fresh]
        ):
            pass
        self._sampled.update(dict.fromkeys(names))
        return [self._known[name].results[0].metrics or None for name in names]


def _name(point: Part) -> str:
    return str(keys_to_hex(point.keys)[0].decode())


def replay_points(plan: Plan) -> pd.DataFrame:
    """Run every point of a plan that breaks no rule again in full: a row for each task, with scenario and key."""
    import pandas as pd

    rows: list[dict[str, Any]] = []
    for scenario, space in plan.spaces.items():
        for block in space.blocks(ROWS_PER_GROUP):
            batch, keys = block.batch, keys_to_hex(block.content_keys(*plan.context.words))
            for key, design in zip(keys, batch.designs(), strict=True) if batch else ():
                # illegal designs cannot be lowered
                replay = Replay((), {}) if plan.backend.problems(design) else plan.backend.replay(design)
                rows += [{"scenario": scenario, "key": key.decode(), **vars(task)} for task in replay.intervals]
    return pd.DataFrame(rows)


def _replay_winners(
    plan: Plan, winners: Mapping[str, tuple[str, BaseModel]]
) -> tuple[pd.DataFrame, dict[str, Mapping[str, float]]]:
    import pandas as pd

    limits: dict[str, Mapping[str, float]] = {}
    intervals: list[dict[str, Any]] = []
    for scenario in (name for name in plan.spaces if name in winners):  # in the order of the plan
        key, design = winners[scenario]
        replay = plan.backend.replay(design)
        limits[scenario] = dict(replay.limits)
        intervals += [{"scenario": scenario, "key": key, **vars(interval)} for interval in replay.intervals]
    return pd.DataFrame(intervals), limits


class Ledger:
    """Table of a study while it is being written; as a context, one that is discarded where something is raised.

    distinct: number of distinct points explored in each scenario. winners: scenario -> key and design of its best row.
    statuses, engines: number of rows with each. failure: as in `Findings`.
    """

    def __init__(self, plan: Plan, path: Path) -> None:
        self._layout = TableLayout.of(plan)
        self.sheet = Sheet(path, self._layout)
        self._standings = Standings(plan.goals, len(plan.spaces), tuple(plan.backend.metrics), rows=plan.contest)
        # names of rows: written, written as a baseline only, and of these explored later
        self._written, self._unexplored, self._claimed = SeenHashes(), SeenHashes(), SeenHashes()
        # one for each scenario: equal designs of different scenarios are different rows
        self._salts = np.concatenate([grid_content_keys([f"scenario = {name}"], {}) for name in plan.spaces])
        self._held: list[ScenarioRows] = []  # a row group takes many small parts
        self._num_held = 0
        self.distinct = np.zeros(len(plan.spaces), int)
        self.winners: dict[str, tuple[str, BaseModel]] = {}
        self.statuses: Counter[str] = Counter()
        self.engines: Counter[str] = Counter()
        self.failure = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.sheet.discard()  # half a table looks like a whole one

    def take(self, part: ScenarioRows) -> None:
        """Take in rows, in the order of the table."""
        self._held.append(part)
        self._num_held += part.part.size
        if self._num_held >= ROWS_PER_GROUP:
            self.flush()

    def flush(self) -> None:
        """Write the rows that are held back."""
        parts, self._held, self._num_held = self._held, [], 0
        if not parts:
            return
        sizes = [rows.part.size for rows in parts]
        scenarios = np.repeat([part.scenario for part in parts], sizes)
        explored = np.repeat([part.explored for part in parts], sizes)
        names = np.concatenate([rows.part.keys for rows in parts]) + self._salts[scenarios]
        fresh = self._written.add(names)  # each row once: a baseline is often a point as well
        self._unexplored.add(names[fresh & ~explored])
        again = np.flatnonzero(explored & ~fresh)  # points whose row was written before, as a baseline
        again = again[self._unexplored.has(names[again])]
        again = again[self._claimed.add(names[again])]  # counted once, however often they come
        newly_explored = scenarios[np.concatenate([np.flatnonzero(explored & fresh), again])]
        self.distinct += np.bincount(newly_explored, minlength=len(self.distinct))
        self._write(parts, np.flatnonzero(fresh), sizes)

    def _write(self, parts: Sequence[ScenarioRows], chosen: NDArray[np.intp], sizes: Sequence[int]) -> None:
        """Write the chosen rows of some parts."""
        batch = self._layout.batch(parts)
        batch = batch if len(chosen) == batch.num_rows else batch.take(chosen)
        self.sheet.append(batch)
        ends = np.cumsum(sizes)
        for scenario, row in self._standings.take(batch):
            part = int(np.searchsorted(ends, chosen[row], side="right"))  # the part in which the row lies
            place = int(chosen[row] - (ends[part] - sizes[part]))
            point = parts[part].part
            design = point.batch.at(place)
            self.winners[self._layout.scenarios[scenario]] = (keys_to_hex(point.keys)[place].decode(), design)
        for counts, name in ((self.statuses, "status"), (self.engines, "engine")):
            column = batch.column(name)
            occurrences = np.bincount(column.indices.to_numpy(), minlength=len(column.dictionary))
            counts.update(
                {text: int(n) for text, n in zip(column.dictionary.to_pylist(), occurrences, strict=True) if n}
            )
        if not self.failure and any(self.statuses[status] for status in FAILED):
            rows = zip(batch.column("status").to_pylist(), batch.column("reason").to_pylist(), strict=True)
            self.failure = next(str(reason) for status, reason in rows if status in FAILED)

    @property
    def num_outcomes(self) -> int:
        """Number of distinct outcomes: rows of a scenario with equal metrics count once."""
        return self._standings.num_outcomes

    def finish(self, label: str) -> int:
        """Fill in which outcomes are on a front; return their number."""
        size = 0

        def marks(batch: Any) -> NDArray[np.bool_]:
            nonlocal size
            on_front = self._standings.marks(batch)
            size += int(on_front.sum())
            return on_front

        long = self.sheet.num_rows > ROWS_PER_GROUP  # a short table is written before a bar could be read
        with bar(f"{label}: writing", self.sheet.num_rows) if long else nullcontext(_silent) as advance:
            self.sheet.finish(marks, advance)
        return size


def _silent(count: int) -> None:
    """Show no progress."""
