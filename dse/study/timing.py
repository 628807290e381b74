"""How long evaluating takes and how much disk its results need, from timed calls of the real backend.

Results of the timed calls are recorded in a store and a table of their own, in a temporary folder that is taken away:
what a row costs is measured, too.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import joblib
import numpy as np
from numpy.typing import NDArray

from dse.backend import Result, Results
from dse.evaluation.calls import call
from dse.evaluation.executor import POOL_PAYS_S, Executor
from dse.space import Block, Evaluated
from dse.store.result_store import Fresh, Store
from dse.study.baselines import Baselines
from dse.study.plan import Plan
from dse.study.table import Layout, Rows, Sheet

Floats = NDArray[np.float64]
Call = Sequence[tuple[int, Block]]
"""Blocks that one call of the backend evaluates, each with the place of its scenario."""
BUDGET_S = 2.0
"""For timing, after the first call: no call begins later, and one that takes longer is waited for."""
_PATIENCE = 4  # times that: no call begins later, however long the first one took
LIKELY = 0.95
"""Of intervals: the share of resampled estimates (or of samples) that they hold."""
_FEWEST, _MOST = 3, 200  # calls that are timed
_RESAMPLED = 2000
_RECORDED = 4096  # designs whose results are recorded to see what they cost


@dataclass(frozen=True)
class Estimate:
    """A number that was estimated, and the interval that holds 95 % of what resampling gives; None: from one call."""

    value: float
    interval: tuple[float, float] | None

    def said(self, shown: Callable[[float], str]) -> str:
        """For a person.

        >>> Estimate(4.0, (3.0, 6.0)).said(lambda value: f"{value:g} s")
        '4 s (3 s to 6 s)'
        """
        if self.interval is None:
            return f"about {shown(self.value)} (one timed call: no interval)"
        low, high = map(shown, self.interval)
        return f"{shown(self.value)} ({low} to {high})"


@dataclass(frozen=True)
class Pace:
    """Timed calls. sizes, seconds [calls]: designs that were simulated, and how long each call took, in this process.

    start_s: what the very first call took beyond that (compiling, loading).
    """

    sizes: Floats
    seconds: Floats
    start_s: float

    @property
    def per_design(self) -> float:
        """Seconds for a design."""
        return float(self.seconds.sum() / self.sizes.sum())

    def resampled(self, seed: int) -> Floats:
        """Seconds for a design by calls that are drawn with replacement from those that were timed, [resamples]."""
        drawn = np.random.default_rng(seed).integers(len(self.sizes), size=(_RESAMPLED, len(self.sizes)))
        return np.asarray(self.seconds[drawn].sum(axis=1) / self.sizes[drawn].sum(axis=1))

    def total(self, count: int, jobs: int, *, extra_s: float = 0.0, seed: int = 0) -> Estimate:
        """Seconds to evaluate so many designs on some jobs. extra_s: seconds for each that are no evaluation."""

        def told(per_design: float) -> float:
            return self.start_s + spread(count * per_design, jobs) + count * extra_s if count else 0.0

        if len(self.sizes) < _FEWEST:
            return Estimate(told(self.per_design), None)
        ends = np.quantile(self.resampled(seed), [(1 - LIKELY) / 2, (1 + LIKELY) / 2])
        return Estimate(told(self.per_design), (told(float(ends[0])), told(float(ends[1]))))


def spread(work_s: float, jobs: int) -> float:
    """Seconds that work takes on some jobs: here until worker processes pay, then on all of them, evenly."""
    return work_s if jobs == 1 else min(work_s, POOL_PAYS_S) + max(0.0, work_s - POOL_PAYS_S) / jobs


def workers(executor: Executor) -> int:
    """How many jobs an executor has."""
    return int(joblib.cpu_count()) if executor.jobs < 0 else executor.jobs


def timed(plan: Plan, calls: Sequence[Call], random: np.random.Generator) -> tuple[Pace, list[list[Evaluated]]]:
    """The pace of some calls, in a random order and again until time is up, and the points with their results."""
    backend, words, names = plan.backend, plan.context.words, list(plan.spaces)
    sizes, seconds, found = list[float](), list[float](), list[list[Evaluated]]()
    began = time.perf_counter()
    for place in _order(len(calls), random):
        batches = [block.batch for _, block in calls[place] if block.batch is not None]
        started = time.perf_counter()
        results = call(plan.spec, batches)
        seconds.append(time.perf_counter() - started)
        sizes.append(sum(int(one.ok.sum()) for one in backend.screen(batches)))
        if len(found) < len(calls):
            told = zip(calls[place], results, strict=True)
            found.append([Evaluated(b, b.keys(*words), names[index], one) for (index, b), one in told])
        spent = time.perf_counter() - began
        if spent - seconds[0] > BUDGET_S or spent > _PATIENCE * BUDGET_S or len(seconds) >= _MOST:
            break
    return _pace(np.array(sizes), np.array(seconds)), found


def _order(count: int, random: np.random.Generator) -> Iterator[int]:
    """Every call once, then again and again."""
    while True:
        yield from random.permutation(count).tolist()


def _pace(sizes: Floats, seconds: Floats) -> Pace:
    """The first call apart: what it took beyond the pace of the others is paid once."""
    if len(sizes) == 1:
        return Pace(sizes, seconds, 0.0)
    rest = Pace(sizes[1:], seconds[1:], 0.0)
    return Pace(sizes[1:], seconds[1:], max(0.0, float(seconds[0] - sizes[0] * rest.per_design)))


@dataclass(frozen=True)
class RowCost:
    """What a row costs, measured: bytes in the store and in the table, and seconds to write both."""

    store_bytes: float
    table_bytes: float
    seconds: float
    num_rows: int


def measured(plan: Plan, found: Sequence[Sequence[Evaluated]], *, stored: bool) -> RowCost:
    """Record what was evaluated in a store (unless there is to be none) and a table that are taken away again."""
    points = list(_some(point for points in found for point in points))
    size = sum(point.block.size for point in points)
    with tempfile.TemporaryDirectory(prefix="dse-") as name:
        kept, storing_s = _stored(plan, points, Path(name) / "results.db") if stored else (0, 0.0)
        table, writing_s = _table(plan, list(_rows(plan, points)), Path(name) / "results.parquet")
    return RowCost(kept / size, table / size, (storing_s + writing_s) / size, size)


def _some(points: Iterable[Evaluated]) -> Iterator[Evaluated]:
    """Points of which none comes twice, or the first parts of them, with a few thousand designs altogether."""
    met: set[bytes] = set()
    left = _RECORDED
    for point in points:
        if point.keys.tobytes() in met or not left:
            continue
        met.add(point.keys.tobytes())
        part = next(point.block.split(left))
        found = point.found.take(slice(part.size))
        yield Evaluated(part, point.keys[: part.size], point.scenario, found)
        left -= part.size


def _stored(plan: Plan, points: Sequence[Evaluated], file: Path) -> tuple[int, float]:
    """Bytes that results take in a new store, beside its empty tables, and seconds to record them."""
    store = Store(f"sqlite:///{file}")
    number = store.number(plan.context)
    store.database.tidy()
    empty = file.stat().st_size
    fresh = Fresh.join([Fresh(one.keys, one.found, one.block.texts(one.scenario)) for one in points])
    began = time.perf_counter()
    store.database.write(lambda connection: store.add(connection, fresh, context=number, study=1))
    took = time.perf_counter() - began
    store.database.tidy()
    size = file.stat().st_size - empty
    store.database.close()
    return size, took


def _rows(plan: Plan, points: Sequence[Evaluated]) -> Iterator[Rows]:
    """Rows of some points beside their baselines, which are evaluated for it."""
    names = list(plan.spaces)
    for point in points:
        space, words = plan.spaces[point.scenario], plan.context.words

        def identified(block: Block, scenario: str = point.scenario, words: tuple[str, ...] = words) -> Evaluated:
            return Evaluated(block, block.keys(*words), scenario)

        for part, own in Baselines(space, plan.settings.study.baseline, identified).of(point.block):
            explored = point if part.size == point.block.size else identified(part)
            for one in (explored, own):
                one.results = one.results or _found(plan, one.block)
            yield Rows(names.index(point.scenario), explored, own, explored=True)


def _found(plan: Plan, block: Block) -> Results:
    if block.batch is None:
        return Results.all_alike(Result("infeasible", reason=block.reason), block.size)
    return call(plan.spec, [block.batch])[0]


def _table(plan: Plan, rows: Sequence[Rows], path: Path) -> tuple[int, float]:
    """Bytes of a table of some rows, beside an empty one, and seconds to write it."""
    layout = Layout.of(plan)
    sizes, took = list[int](), 0.0
    for held in ([], [layout.batch(rows)], [layout.batch(rows)]):  # the first two load what writing needs
        began, sheet = time.perf_counter(), Sheet(path, layout)
        for batch in held or [layout.batch(rows).slice(0, 0)]:
            sheet.append(batch)
        sheet.finish(lambda batch: np.zeros(batch.num_rows, bool), lambda count: None)
        took = time.perf_counter() - began
        sizes.append(path.stat().st_size)
    return sizes[-1] - sizes[0], took
