"""Running a study: search every scenario, compare with the baseline, find the fronts, replay the winners."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import BaseModel

from dse.backend import Result, Tree
from dse.execute import evaluate
from dse.plan import Plan
from dse.problems import ConfigError
from dse.progress import Advance, bar
from dse.search import Chosen, Question, explore
from dse.space import Assignment, Space, get_path
from dse.values import key

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Findings:
    """What a study found: the table of points, the winners' timelines, the winners' limits, how each was searched."""

    table: pd.DataFrame
    timelines: pd.DataFrame
    limits: Mapping[str, Mapping[str, float]]
    chosen: Mapping[str, Chosen]


@dataclass
class _Bench:
    """Evaluates designs once: results by key, shared by all scenarios."""

    plan: Plan
    advance: Advance
    results: dict[str, Result] = field(default_factory=dict)
    designs: dict[str, BaseModel] = field(default_factory=dict)

    def identify(self, tree: Tree) -> str:
        """Key of a design tree: equal designs have equal keys, however they were written."""
        backend, spec = self.plan.backend, self.plan.spec
        try:
            design = backend.design(tree)
        except ConfigError as error:
            name = f"illegal {error}"
            self.results[name] = Result("infeasible", reason=str(error).replace("\n", "; "))
            return name
        name = key(design, spec.name, backend.version, repr(spec.parameters))
        self.designs.setdefault(name, design)
        return name

    def evaluate(self, keys: Iterable[str]) -> None:
        """Evaluate what has no result yet; infeasible designs are never simulated."""
        fresh = [name for name in dict.fromkeys(keys) if name not in self.results]
        for name in fresh:
            if reasons := self.plan.backend.problems(self.designs[name]):
                self.results[name] = Result("infeasible", reason="; ".join(map(str, reasons)))
        todo = [name for name in fresh if name not in self.results]
        self.advance(len(fresh) - len(todo))
        jobs = self.plan.settings.executor.jobs
        found = evaluate(self.plan.spec, [self.designs[name] for name in todo], jobs=jobs, seen=self.advance)
        self.results |= dict(zip(todo, found, strict=True))


@dataclass
class _Scenario:
    """The points of one scenario, in the order they were evaluated."""

    name: str
    space: Space
    bench: _Bench
    points: dict[str, Assignment] = field(default_factory=dict)
    baselines: dict[str, str] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)

    def identify(self, point: Assignment) -> str:
        """Key of a point."""
        text = repr(sorted(point.items(), key=lambda item: item[0]))
        if text not in self.keys:
            self.keys[text] = self.bench.identify(self.space.tree(point))
        return self.keys[text]

    def evaluate(self, points: Sequence[Assignment]) -> list[Mapping[str, float] | None]:
        """Evaluate points; their metrics in order, None where there are none."""
        keys = [self.identify(point) for point in points]
        self.bench.evaluate(keys)
        for name, point in zip(keys, points, strict=True):
            self.points.setdefault(name, point)
        return [self.bench.results[name].metrics or None for name in keys]

    def compare(self, change: Mapping[str, Any]) -> None:
        """Evaluate every point's baseline: the point with `change` put in."""
        own = {name: self.space.active({**point, **change}) for name, point in self.points.items()}
        self.evaluate(list(own.values()))
        self.baselines = {name: self.identify(point) for name, point in own.items()}

    def rows(self, plan: Plan) -> Iterator[dict[str, Any]]:
        """Flat table rows."""
        for name in self.points:
            result, baseline = self.bench.results[name], self.baselines.get(name, name)
            theirs = self.bench.results[baseline].metrics
            design = self.bench.designs.get(name)
            yield {
                **{"scenario": self.name, "key": name, "status": result.status, "reason": result.reason},
                **{"engine": result.engine, "baseline": baseline},
                **{path: get_path(design, path) for path in (*plan.knobs, *plan.recorded)},
                **{metric: result.metrics.get(metric) for metric in plan.backend.metrics},
                **(plan.backend.relate(result.metrics, theirs) if result.metrics and theirs else {}),
            }


def run(plan: Plan) -> Findings:
    """Search every scenario of a plan. The table depends on configuration and seed alone."""
    trials, label = plan.settings.budget.trials, plan.settings.study.name
    sizes = {name: space.size(trials) for name, space in plan.spaces.items()}
    total = sum(trials if size is None else size for size in sizes.values())
    chosen = {}
    with bar(label, total) as advance:
        bench = _Bench(plan, advance)
        scenarios = [_Scenario(name, space, bench) for name, space in plan.spaces.items()]
        finite = [one for one in scenarios if sizes[one.name] is not None]
        bench.evaluate(one.identify(point) for one in finite for point in one.space.points())
        for index, one in enumerate(scenarios):
            question = Question(one.space, plan.goals, _seed(plan, index), one.evaluate, one.identify)
            chosen[one.name] = explore(question, plan.settings.search, trials=trials)
            one.compare(plan.settings.study.baseline)
    table = tabulate(plan, [row for one in scenarios for row in one.rows(plan)])
    return _replayed(plan, bench, table, chosen)


def _seed(plan: Plan, index: int) -> int:
    return int(np.random.SeedSequence([plan.settings.seed, index]).generate_state(1)[0])


def tabulate(plan: Plan, rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """One row per point: identity, knobs, metrics, relations, and whether it is on its scenario's Pareto front."""
    import pandas as pd

    table = pd.DataFrame(rows)
    for path in (*plan.knobs, *plan.recorded):
        table[path] = table[path].convert_dtypes()
    for name in (*plan.backend.metrics, *plan.backend.relations):
        table[name] = table[name].astype("float64") if name in table else float("nan")
    table.insert(6, "on_front", front(table, plan.goals))
    return table


def front(table: pd.DataFrame, goals: Mapping[str, str]) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Which rows are Pareto-optimal within their scenario; rows without a result never are."""
    import moocore

    marked = np.zeros(len(table), dtype=bool)
    ok = np.flatnonzero(table["status"] == "ok")
    maximise = [goal == "maximize" for goal in goals.values()]
    for _, places in table.iloc[ok].groupby("scenario", sort=False).indices.items():
        rows = ok[places]
        values = table.iloc[rows][list(goals)].to_numpy(dtype=float)
        marked[rows] = moocore.is_nondominated(values, maximise=maximise, keep_weakly=True)
    return marked


def winners(table: pd.DataFrame, goals: Mapping[str, str]) -> pd.DataFrame:
    """The best row of each scenario: by the first objective, ties by the next ones."""
    ok = table[table["status"] == "ok"]
    ascending = [goal == "minimize" for goal in goals.values()]
    ordered = ok.sort_values(list(goals), ascending=ascending, kind="stable")
    best = ordered.groupby("scenario", sort=False).head(1).set_index("scenario", drop=False)
    return best.reindex([name for name in table["scenario"].unique() if name in best.index]).reset_index(drop=True)


def _replayed(plan: Plan, bench: _Bench, table: pd.DataFrame, chosen: Mapping[str, Chosen]) -> Findings:
    import pandas as pd

    limits, intervals = {}, []
    for row in winners(table, plan.goals).itertuples():
        replay = plan.backend.replay(bench.designs[str(row.key)])
        limits[str(row.scenario)] = dict(replay.limits)
        intervals += [{"scenario": row.scenario, "key": row.key, **vars(interval)} for interval in replay.intervals]
    return Findings(table, pd.DataFrame(intervals), limits, chosen)
