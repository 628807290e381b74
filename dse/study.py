"""Running a study: search every scenario, compare with the baseline, find the fronts, replay the winners.

Blocks of points come from the search space, go to the backend as batches and to the table as columns. A finite space
streams: however many points it has, a few thousand are held at a time.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import BaseModel

from dse.backend import Batch, Result, Results
from dse.baselines import Baselines, Evaluated
from dse.execute import evaluate
from dse.ledger import Ledger
from dse.plan import Plan
from dse.progress import Advance, bar
from dse.search import Chosen, Outcome, Question, explore
from dse.space import Assignment, Block, Space
from dse.table import ROWS_PER_GROUP, Rows
from dse.values import hexes

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Findings:
    """What a study found beside the table of points.

    statuses, engines: how many rows have each. front_size: how many are on a front. timelines, limits: of the winners.
    chosen: how each scenario was searched.
    """

    statuses: Counter[str]
    engines: Counter[str]
    front_size: int
    timelines: pd.DataFrame
    limits: Mapping[str, Mapping[str, float]]
    chosen: Mapping[str, Chosen]

    @property
    def num_rows(self) -> int:
        """Rows of the table."""
        return sum(self.statuses.values())


def run(plan: Plan, path: Path) -> Findings:
    """Search every scenario of a plan and write the table to `path`. It depends on configuration and seed alone."""
    ledger = Ledger(plan, path)
    try:
        chosen = _search(plan, ledger)
        front_size = ledger.finish(plan.settings.study.name)
    except BaseException:
        ledger.sheet.discard()
        raise
    timelines, limits = _replayed(plan, ledger.winners if plan.settings.timeline else {})
    return Findings(ledger.statuses, ledger.engines, front_size, timelines, limits, chosen)


def _search(plan: Plan, ledger: Ledger) -> dict[str, Chosen]:
    trials = plan.settings.budget.trials
    sizes = {name: space.size(trials) for name, space in plan.spaces.items()}
    chosen: dict[str, Chosen] = {}
    with bar(plan.settings.study.name, sum(trials if size is None else size for size in sizes.values())) as advance:
        scenarios = [_Scenario(plan, index, advance) for index in range(len(sizes))]
        finite = [one for one in scenarios if sizes[one.name] is not None]
        ledger.take(_evaluated(plan, _enumerated(finite), advance))
        for one in scenarios:
            if sizes[one.name] is None:
                question = Question(one.space, plan.goals, one.seed, one.outcomes, one.identify)
                chosen[one.name] = explore(question, plan.settings.search, trials=trials)
                ledger.take(_evaluated(plan, one.rows(one.sampled), advance))
    ledger.flush()
    for one in finite:
        distinct = int(ledger.distinct[one.index])
        chosen[one.name] = Chosen(distinct, "exhaustive", (sizes[one.name] or 0) - distinct)
    return {name: chosen[name] for name in plan.spaces}


def _enumerated(scenarios: Sequence[_Scenario]) -> Iterator[Rows]:
    """Every point of finite spaces; the same block of all scenarios together, so that they share calls."""
    for blocks in zip_longest(*(one.space.blocks(ROWS_PER_GROUP // 2) for one in scenarios)):
        for one, block in zip(scenarios, blocks, strict=True):
            yield from one.rows([] if block is None else [block])


def _evaluated(plan: Plan, rows: Iterable[Rows], advance: Advance) -> Iterator[Rows]:
    """The same rows, with results: what has none yet is evaluated, once."""
    waiting: deque[Rows] = deque()

    def batches() -> Iterator[Batch]:
        for one in rows:
            waiting.append(one)
            point, batch = one.point, one.point.block.batch
            if point.asked:
                continue
            point.asked = True
            if batch is not None:
                yield batch
            else:
                point.results = Results.all_alike(Result("infeasible", reason=point.block.reason), point.block.size)
                advance(point.block.size)

    def ready() -> Iterator[Rows]:
        while waiting and waiting[0].point.results is not None:
            yield waiting.popleft()

    for results in evaluate(plan.spec, batches(), jobs=plan.settings.executor.jobs, seen=advance):
        yield from ready()
        waiting[0].point.results = results
        yield from ready()
    yield from ready()


class _Scenario:
    """One scenario's points: as blocks with their baselines, and one by one for a sampler."""

    def __init__(self, plan: Plan, index: int, advance: Advance) -> None:
        self._plan, self.index, self._advance = plan, index, advance
        self.name = list(plan.spaces)[index]
        self.space: Space = plan.spaces[self.name]
        self.seed = int(np.random.SeedSequence([plan.settings.seed, index]).generate_state(1)[0])
        self._context = (plan.spec.name, plan.backend.version, repr(plan.spec.parameters))
        self._baselines = Baselines(self.space, plan.settings.study.baseline, self._context)
        self._points: dict[str, str] = {}
        self._known: dict[str, Evaluated] = {}
        self._sampled: dict[str, None] = {}

    @property
    def sampled(self) -> list[Block]:
        """Points that a sampler had evaluated, in order."""
        return [self._known[name].block for name in self._sampled]

    def rows(self, blocks: Iterable[Block]) -> Iterator[Rows]:
        """Rows of some blocks, those of their baselines before them."""
        for block in blocks:
            for part, baseline in self._baselines.of(block):
                point = self._once(Evaluated(part, part.keys(*self._context)))
                own = self._once(baseline)
                if np.array_equal(point.keys, own.keys):
                    point = own
                elif not own.asked:
                    yield Rows(self.index, own, own, explored=False)
                yield Rows(self.index, point, own, explored=True)

    def _once(self, found: Evaluated) -> Evaluated:
        """The same designs as evaluated for a sampler, if they were."""
        return self._known.get(_name(found), found) if self._known and found.block.size == 1 else found

    def identify(self, point: Assignment) -> str:
        """Key of a point: equal designs have equal keys, however they were written."""
        text = repr(sorted(point.items(), key=lambda item: item[0]))
        if text not in self._points:
            (block,) = self.space.resolve(point)
            found = Evaluated(block, block.keys(*self._context))
            self._points[text] = _name(found)
            self._known.setdefault(_name(found), found)
        return self._points[text]

    def outcomes(self, points: Sequence[Assignment]) -> list[Outcome]:
        """Evaluate points that a sampler asks for; their metrics in order, None where there are none."""
        names = [self.identify(point) for point in points]
        fresh = [self._known[name] for name in dict.fromkeys(names) if not self._known[name].asked]
        for _ in _evaluated(self._plan, [Rows(self.index, one, one, explored=True) for one in fresh], self._advance):
            pass
        self._sampled.update(dict.fromkeys(names))
        return [self._known[name].found[0].metrics or None for name in names]


def _name(point: Evaluated) -> str:
    return str(hexes(point.keys)[0].decode())


def _replayed(
    plan: Plan, winners: Mapping[str, tuple[str, BaseModel]]
) -> tuple[pd.DataFrame, dict[str, Mapping[str, float]]]:
    import pandas as pd

    limits: dict[str, Mapping[str, float]] = {}
    intervals: list[dict[str, Any]] = []
    for scenario in (name for name in plan.spaces if name in winners):
        key, design = winners[scenario]
        replay = plan.backend.replay(design)
        limits[scenario] = dict(replay.limits)
        intervals += [{"scenario": scenario, "key": key, **vars(interval)} for interval in replay.intervals]
    return pd.DataFrame(intervals), limits
