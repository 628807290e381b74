"""Benchmark of search methods on a space whose every point is known: a design is a search, metrics its progress.

The space is that of another study with one scenario; it is enumerated once per process. A search then looks results
up, so its time is that of the method alone.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import moocore
import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field

from dse import plugins
from dse.backend import Backend, Batch, Metric, Result, Results, Tree
from dse.errors import ConfigError, Problem, Problems, did_you_mean, validate_as
from dse.evaluation.calls import call
from dse.search import Outcome, Search, SearchQuestion, explore
from dse.search.genes import Genes
from dse.space import Assignment, get_path
from dse.study.plan import Plan
from dse.study.plan_again import plan_words
from dse.study.table import places
from dse.values import Frozen, keys_to_hex
from dse.values.units import Integer

_VERSION = "2"
_CALL = 65_536  # points that are evaluated together
# the ends of a front would count nothing with the reference at them
_BEYOND = 1.1  # the reference point, in ranges of the true front from its best to its worst


class Landscape(Frozen):
    """A study, given by the words of its command, with a finite space and one scenario."""

    command: Annotated[tuple[str, ...], Field(min_length=1)]


class SearchRun(Frozen):
    """A search: its method, the points it proposes at a time, and its seed."""

    method: str
    batch: Annotated[Integer, Field(ge=1, le=10_000)] = 32
    seed: Annotated[Integer, Field(ge=0, le=2**32 - 1)] = 0


class SearchBenchmarkDesign(Frozen):
    """A search on a landscape."""

    landscape: Landscape
    run: SearchRun


@dataclass(frozen=True)
class LandscapePoints:
    """Every point of a landscape. places: genes -> row, the same for equal designs. outcomes [N]. values [N, M]:
    objectives, smaller is better, 0 at the best and 1 at the worst of the true front; NaN where a point has no result
    or one beyond a limit. front [F, M]: the true front.
    """

    question: SearchQuestion
    genes: Genes
    places: Mapping[bytes, int]
    outcomes: Sequence[Outcome]
    values: NDArray[np.float64]
    front: NDArray[np.float64]

    @property
    def size(self) -> int:
        """Number of distinct designs."""
        return len(self.outcomes)

    @functools.cached_property
    def num_distinct(self) -> int:
        """Number of distinct outcomes."""
        return len({tuple(outcome.values()) for outcome in self.outcomes if outcome is not None})

    def rows(self, points: Sequence[Assignment]) -> list[int]:
        """Rows of points."""
        return [self.places[row.tobytes()] for row in self.genes.rows(points)]

    def name(self, point: Assignment) -> str:
        """Name of a point; equal designs have the same name."""
        return str(self.rows([point])[0])

    def legal(self, points: Sequence[Assignment]) -> list[bool]:
        """Mask of the points that break no rule."""
        return [self.outcomes[row] is not None for row in self.rows(points)]

    def hypervolume(self, rows: Sequence[int]) -> float:
        """Hypervolume of some points as a share of the true front's."""
        total = moocore.hypervolume(self.front, ref=self._beyond)
        return min(1.0, float(moocore.hypervolume(self._inside(rows), ref=self._beyond)) / float(total))  # rounding

    def distance(self, rows: Sequence[int]) -> float:
        """IGD+ of some points: mean distance of the true front from what they dominate, in its own ranges."""
        values = self.values[rows]
        return float(moocore.igd_plus(values[~np.isnan(values[:, 0])], ref=self.front))

    @property
    def _beyond(self) -> list[float]:
        return [_BEYOND] * self.values.shape[1]

    def _inside(self, rows: Sequence[int]) -> NDArray[np.float64]:
        values = self.values[rows]
        return values[(values < _BEYOND).all(axis=1)] if len(values) else values


@plugins.cached_until_refresh
def evaluated_points(command: tuple[str, ...]) -> LandscapePoints:
    """Evaluate every point of a landscape. Raises ConfigError unless the space is finite and has one scenario."""
    # nothing is recorded: the truth is needed in memory only
    planned = plan_words(["store=none", "tracking=none", "fidelity=none", "search=exhaustive", *command])
    if len(planned.spaces) != 1:
        rule = f"has {len(planned.spaces)} scenarios: {', '.join(planned.spaces)}"
        raise ConfigError([Problem("landscape.command", rule, way_out="choose one, such as workload.only=[g4]")])
    (space,) = planned.spaces.values()
    genes, outcomes, rows = Genes(space), dict[str, tuple[int, Outcome]](), dict[bytes, int]()
    for points, names, block_outcomes in _evaluate_blocks(planned):
        for row, name, outcome in zip(genes.rows(points), names, block_outcomes, strict=True):
            rows[row.tobytes()], _ = outcomes.setdefault(name, (len(outcomes), outcome))  # equal designs have one row
    question = SearchQuestion(space, planned.goals, 0, 1, lambda points: [], repr, limits=planned.settings.study.limits)
    distinct = [outcome for _, outcome in outcomes.values()]
    # points beyond a limit are not on the true front
    ok = np.array([outcome is not None and question.violation(outcome) == 0 for outcome in distinct])
    values = np.full((len(ok), len(planned.goals)), np.nan)
    values[ok] = question.values(
        [outcome for outcome, fine in zip(distinct, ok, strict=True) if fine and outcome is not None]
    )
    front = values[ok][moocore.is_nondominated(values[ok])]
    low, range_ = front.min(axis=0), np.ptp(front, axis=0)
    scaled = (values - low) / np.where(range_ > 0, range_, 1.0)
    return LandscapePoints(question, genes, rows, distinct, scaled, (front - low) / np.where(range_ > 0, range_, 1.0))


def _evaluate_blocks(planned: Plan) -> Iterator[tuple[list[Assignment], list[str], list[Outcome]]]:
    """Evaluate the space in blocks. Yields points as a search may propose them, with their keys and outcomes."""
    (space,) = planned.spaces.values()
    names = [*planned.goals, *(name for name in planned.settings.study.limits if name not in planned.goals)]
    for block in space.blocks(_CALL):
        results = Results.all_alike(Result("infeasible"), block.size)
        if block.batch is not None:
            (results,) = call(planned.spec, [block.batch])
        columns = zip(*(results.column(name).tolist() for name in names), strict=True)
        outcomes: list[Outcome] = [
            dict(zip(names, row, strict=True)) if ok else None
            for ok, row in zip(results.ok.tolist(), columns, strict=True)
        ]
        # a search proposes what was asked for, not what it was settled to
        requested = block if block.unsettled is None else block.unsettled
        where, keys = places(requested, block), keys_to_hex(block.content_keys()).astype(str)
        yield list(requested.assignments()), keys[where].tolist(), [outcomes[place] for place in where]


class LandscapeBackend(Backend):
    """Searches on landscapes. shares: of the distinct outcomes, in ascending order; each is the budget of a search, the
    baseline counted.
    """

    version = _VERSION

    def __init__(self, shares: Sequence[float]) -> None:
        if not shares or list(shares) != sorted(set(shares)) or not 0 < shares[0] <= shares[-1] <= 1:
            raise ConfigError([Problem("simulator.shares", "must ascend between 0 and 1", shares)])
        self._shares = tuple(shares)
        self.metrics: dict[str, Metric] = {
            "missed_hypervolume": Metric(
                "share", "1 - hypervolume over that of the true front, of the largest budget", high=1.0
            ),
            "overhead_s_per_point": Metric("s", "time of the search method itself, per point"),
            "points_to_95": Metric("points", "evaluated until 95 % of the true hypervolume; all, if never"),
            "duplicates": Metric("points", "proposed that were known already, in all"),
            "repeats": Metric("points", "evaluated more than once, in all"),
        }
        for share in self._shares:
            at = f"with {100 * share:g} % of the distinct outcomes"
            meaning = f"hypervolume over that of the true front {at}"
            self.metrics[column("hypervolume", share)] = Metric("share", meaning, "maximize", high=1.0)
            self.metrics[column("igd_plus", share)] = Metric("ranges", f"distance from the true front {at}")
            self.metrics[column("overhead_s", share)] = Metric("s", f"time of the search method itself {at}")

    def sections(self, tree: Tree) -> None:
        """`landscapes` and `run`."""
        check = Problems()
        for name in ("landscapes", "run"):
            if not isinstance(tree.get(name), Mapping):
                check.add(name, "is no section of keys", value=tree.get(name))
        for name in set(tree) - {"landscapes", "run"}:
            check.add(name, "is not a known section", way_out=did_you_mean(name, ("landscapes", "run")))
        check.done()

    def scenarios(self, tree: Tree) -> Mapping[str, Tree]:
        """One per landscape."""
        return {name: {"landscape": landscape, "run": tree["run"]} for name, landscape in tree["landscapes"].items()}

    def design(self, tree: Tree) -> SearchBenchmarkDesign:
        """Validate a search."""
        return validate_as(SearchBenchmarkDesign, tree, path="")

    def condition(self, path: str, tree: Tree) -> Mapping[str, Any] | None:
        """Every value of `run` may be a knob."""
        return {} if path.startswith("run.") and get_path(tree, path) is not None else None

    def evaluate(self, batches: Sequence[Batch]) -> list[Results]:
        """Run the searches."""
        return [Results.of([self._run_search(design) for design in batch.designs()]) for batch in batches]

    def _run_search(self, design: BaseModel) -> Result:
        assert isinstance(design, SearchBenchmarkDesign)
        truth = evaluated_points(design.landscape.command)
        runs = [Progress.of(truth, design.run, budget) for budget in self._budgets(truth)]
        last = runs[-1]
        metrics = {
            "missed_hypervolume": max(0.0, 1.0 - truth.hypervolume(last.rows)),
            "overhead_s_per_point": last.overhead_s / len(last.rows),
            "points_to_95": float(last.until(0.95)),
            "duplicates": float(sum(run.duplicates for run in runs)),
            "repeats": float(sum(len(run.rows) - len(set(run.rows)) for run in runs)),
        }
        for share, run in zip(self._shares, runs, strict=True):
            metrics[column("hypervolume", share)] = truth.hypervolume(run.rows)
            metrics[column("igd_plus", share)] = truth.distance(run.rows)
            metrics[column("overhead_s", share)] = run.overhead_s
        return Result("ok", metrics, engine=design.run.method)

    def _budgets(self, truth: LandscapePoints) -> list[int]:
        """Points of each search beside the one for the baseline."""
        return [max(1, round(share * truth.num_distinct) - 1) for share in self._shares]  # the point for the baseline


def column(metric: str, share: float) -> str:
    """The name of a metric at a share of the points: `hypervolume_at_2_pct`."""
    return f"{metric}_at_{100 * share:g}_pct".replace(".", "p")


class Progress:
    """Record of a search. rows: evaluated points, in order. overhead_s: time of the method itself."""

    def __init__(self, truth: LandscapePoints) -> None:
        self._truth, self.rows = truth, list[int]()
        self._began, self._away = time.perf_counter(), 0.0
        self.overhead_s, self.duplicates = 0.0, 0

    @classmethod
    def of(cls, truth: LandscapePoints, run: SearchRun, trials: int) -> Progress:
        """Run a search of `trials` points."""
        progress = cls(truth)
        question = replace(
            truth.question,
            seed=run.seed,
            trials=trials,
            evaluate=progress.evaluate,
            identify=truth.name,
            legal=truth.legal,
        )
        progress.duplicates = explore(question, Search(name=run.method, batch=run.batch)).duplicates
        return progress

    def evaluate(self, points: Sequence[Assignment]) -> list[Outcome]:
        """Look results up; the time it takes does not count as the method's."""
        came = time.perf_counter()
        self.rows += self._truth.rows(points)
        outcomes = [self._truth.outcomes[row] for row in self.rows[len(self.rows) - len(points) :]]
        self.overhead_s = came - self._began - self._away  # time since the start without that of looking up
        self._away += time.perf_counter() - came
        return outcomes

    def until(self, share: float) -> int:
        """Number of points evaluated to reach a share of the true hypervolume; all of them if it was not reached."""
        low, high = 1, len(self.rows)
        while low < high:  # bisection: the hypervolume grows with every point
            middle = (low + high) // 2
            low, high = (low, middle) if self._truth.hypervolume(self.rows[:middle]) >= share else (middle + 1, high)
        return low
