"""Time to evaluate designs and disk space for their results, estimated from timed calls of the real backend.

Results of the timed calls are recorded in a store and a table of their own, in a temporary folder that is removed, so
that the cost of a row is measured, too.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dse.backend import Result, Results
from dse.evaluation.calls import Part, call
from dse.evaluation.evaluators import POOL_PAYS_S
from dse.space import Points
from dse.store.contract import Evaluated
from dse.store.result_store import Store
from dse.study.plan import Plan
from dse.study.table import Baselines, ScenarioRows, Sheet, TableLayout

Floats = NDArray[np.float64]
Call = Sequence[tuple[int, Points]]
"""Blocks that one call of the backend evaluates, each with the place of its scenario."""
BUDGET_S = 2.0
"""Time for timing, after the first call: no call begins later, and a call that takes longer is waited for."""
_PATIENCE = 4  # multiple of BUDGET_S after which no call begins, however long the first one took
LIKELY = 0.95
"""Share of resampled estimates (or of samples) that an interval holds."""
# fewer give no interval
_FEWEST, _MOST = 3, 200  # calls that are timed
_RESAMPLED = 2000  # ends of an interval of 95 % lie at the 50th of them
_RECORDED = 4096  # designs whose results are recorded to measure their cost


@dataclass(frozen=True)
class Estimate:
    """Estimated number with the interval that holds 95 % of the resampled estimates; None: from one call."""

    value: float
    interval: tuple[float, float] | None

    def text(self, shown: Callable[[float], str]) -> str:
        """Return the estimate as text for a person.

        >>> Estimate(4.0, (3.0, 6.0)).text(lambda value: f"{value:g} s")
        '4 s (3 s to 6 s)'
        """
        if self.interval is None:
            return f"about {shown(self.value)} (one timed call: no interval)"
        low, high = map(shown, self.interval)
        return f"{shown(self.value)} ({low} to {high})"


@dataclass(frozen=True)
class CallTimes:
    """Timed calls. sizes, seconds [calls]: designs that were simulated, and how long each call took, in this process.

    start_s: extra seconds of the very first call (compiling, loading).
    """

    sizes: Floats
    seconds: Floats
    start_s: float

    @property
    def per_design(self) -> float:
        """Seconds per design."""
        return float(self.seconds.sum() / self.sizes.sum())

    def resample(self, seed: int) -> Floats:
        """Return the seconds per design of calls drawn with replacement from the timed ones, [resamples]."""
        drawn = np.random.default_rng(seed).integers(len(self.sizes), size=(_RESAMPLED, len(self.sizes)))
        # total over total, as calls differ in size
        return np.asarray(self.seconds[drawn].sum(axis=1) / self.sizes[drawn].sum(axis=1))

    def total(self, count: int, jobs: int, *, extra_s: float = 0.0, seed: int = 0) -> Estimate:
        """Estimate the seconds to evaluate designs on some jobs. extra_s: seconds per design besides evaluation."""

        def total_s(per_design: float) -> float:
            # recording is done by one process
            return self.start_s + spread(count * per_design, jobs) + count * extra_s if count else 0.0

        if len(self.sizes) < _FEWEST:
            return Estimate(total_s(self.per_design), None)
        ends = np.quantile(self.resample(seed), [(1 - LIKELY) / 2, (1 + LIKELY) / 2])
        return Estimate(total_s(self.per_design), (total_s(float(ends[0])), total_s(float(ends[1]))))


def spread(work_s: float, jobs: int) -> float:
    """Return the seconds that work takes on some jobs: here until worker processes pay, then evenly on all jobs."""
    return work_s if jobs == 1 else min(work_s, POOL_PAYS_S) + max(0.0, work_s - POOL_PAYS_S) / jobs


def time_calls(
    plan: Plan, calls: Sequence[Call], random: np.random.Generator
) -> tuple[CallTimes, list[list[Evaluated]]]:
    """Time some calls, in a random order and again until time is up; return the pace and the points with results."""
    backend, words, names = plan.backend, plan.context.words, list(plan.spaces)
    sizes, seconds, points = list[float](), list[float](), list[list[Evaluated]]()
    began = time.perf_counter()
    for place in _order(len(calls), random):  # random, so that drifts of the machine hit all calls alike
        batches = [block.batch for _, block in calls[place] if block.batch is not None]
        started = time.perf_counter()
        results = call(plan.spec, batches)
        seconds.append(time.perf_counter() - started)
        sizes.append(sum(int(result.ok.sum()) for result in backend.screen(batches)))  # refused designs cost nothing
        if len(points) < len(calls):  # the first time only: repeats have the same results
            pairs = zip(calls[place], results, strict=True)
            points.append([(block.identified(names[index], words), result) for (index, block), result in pairs])
        spent = time.perf_counter() - began
        # the first call may compile, and does not count
        if spent - seconds[0] > BUDGET_S or spent > _PATIENCE * BUDGET_S or len(seconds) >= _MOST:
            break
    return _pace(np.array(sizes), np.array(seconds)), points


def _order(count: int, random: np.random.Generator) -> Iterator[int]:
    """Yield every call once, then again and again."""
    while True:
        yield from random.permutation(count).tolist()


def _pace(sizes: Floats, seconds: Floats) -> CallTimes:
    """Return the pace without the first call; the excess of the first call is paid once."""
    if len(sizes) == 1:
        return CallTimes(sizes, seconds, 0.0)
    later = CallTimes(sizes[1:], seconds[1:], 0.0)
    return CallTimes(sizes[1:], seconds[1:], max(0.0, float(seconds[0] - sizes[0] * later.per_design)))


@dataclass(frozen=True)
class RowCost:
    """Measured cost of a row: bytes in the store and in the table, and seconds to write both."""

    store_bytes: float
    table_bytes: float
    seconds: float
    num_rows: int


def measure_row(plan: Plan, points_by_call: Sequence[Sequence[Evaluated]], *, stored: bool) -> RowCost:
    """Record evaluated points in a temporary table and, if `stored`, a temporary store; return the cost of a row."""
    points = list(_some(point for points in points_by_call for point in points))
    size = sum(point.size for point, _ in points)
    with tempfile.TemporaryDirectory(prefix="dse-") as name:
        store_bytes, storing_s = _measure_store(plan, points, Path(name) / "results.db") if stored else (0, 0.0)
        table_bytes, writing_s = _measure_table(plan, list(_rows(plan, points)), Path(name) / "results.parquet")
    return RowCost(store_bytes / size, table_bytes / size, (storing_s + writing_s) / size, size)


def _some(points: Iterable[Evaluated]) -> Iterator[Evaluated]:
    """Yield distinct points, or the first parts of them, with a few thousand designs altogether."""
    met: set[bytes] = set()
    left = _RECORDED
    for point, results in points:
        if point.keys.tobytes() in met or not left:  # designs are recorded once
            continue
        met.add(point.keys.tobytes())
        part = next(point.split(left))
        yield part, results.take(slice(part.size))
        left -= part.size


def _measure_store(plan: Plan, points: Sequence[Evaluated], file: Path) -> tuple[int, float]:
    """Return the bytes of results in a new store, beyond those of its empty tables, and the seconds to record them."""
    store = Store(f"sqlite:///{file}")
    number = store.number(plan.context)
    store.database.tidy()  # else the tables are still in the log
    empty = file.stat().st_size
    began = time.perf_counter()
    inserts = store.inserts(points, context=number, study=1)
    store.database.write(lambda connection: store.add(connection, inserts))
    elapsed_s = time.perf_counter() - began
    store.database.tidy()
    size = file.stat().st_size - empty
    store.database.close()
    return size, elapsed_s


def _rows(plan: Plan, points: Sequence[Evaluated]) -> Iterator[ScenarioRows]:
    """Yield rows of some points with their baselines, which are evaluated for them."""
    names = list(plan.spaces)
    for point, results in points:
        space, words = plan.spaces[point.scenario], plan.context.words

        def identify(block: Points, scenario: str = point.scenario, words: tuple[str, ...] = words) -> Part:
            return Part(block.identified(scenario, words))

        for part, baseline in Baselines(space, plan.settings.study.baseline, identify).of(point):
            explored = identify(part)
            if part.size == point.size:
                explored.take(0, results)
            for evaluated in (explored, baseline):
                if evaluated.left:
                    evaluated.take(0, _evaluate_block(plan, evaluated.points))
            yield ScenarioRows(names.index(point.scenario), explored, baseline, explored=True)


def _evaluate_block(plan: Plan, block: Points) -> Results:
    if block.batch is None:
        return Results.all_alike(Result("infeasible", reason=block.reason), block.size)
    return call(plan.spec, [block.batch])[0]


def _measure_table(plan: Plan, rows: Sequence[ScenarioRows], path: Path) -> tuple[int, float]:
    """Return the bytes of a table of some rows, beyond those of an empty one, and the seconds to write it."""
    layout = TableLayout.of(plan)
    sizes, elapsed_s = list[int](), 0.0
    for batches in ([], [layout.batch(rows)], [layout.batch(rows)]):  # the first two load the libraries for writing
        began, sheet = time.perf_counter(), Sheet(path, layout)
        for batch in batches or [layout.batch(rows).slice(0, 0)]:
            sheet.append(batch)
        sheet.finish(lambda batch: np.zeros(batch.num_rows, bool), lambda count: None)
        elapsed_s = time.perf_counter() - began  # of the last
        sizes.append(path.stat().st_size)
    return sizes[-1] - sizes[0], elapsed_s
