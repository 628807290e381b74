"""Counts of a space before it is evaluated: legal points, points that rules refuse, duplicates."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dse.backend import Result, Results
from dse.errors.terminal import Advance
from dse.evaluation.calls import Part
from dse.results.pareto import SeenHashes
from dse.space import Knob, Points, Space, blocks_together
from dse.study.plan import Plan
from dse.study.table import ROWS_PER_GROUP, Baselines
from dse.study.timing import Call, Estimate

_Z = 1.959964  # two-sided 95 % of the normal distribution
MOST_COUNTED = 20_000_000  # points that are counted one by one, at some 50 bytes each
MOST_DESIGNS = 20_000  # that are made one by one, each of which holds points that differ in numbers alone
NUM_DRAWN = 4000  # points of all scenarios together that are drawn from a space that is not counted
_CALLS_HELD = 64  # from which the timed calls are drawn
_PER_CALL = ROWS_PER_GROUP // 2  # designs in a timed call at most
_FEWEST_CALLS = 16  # in which a space is timed, however many designs the backend takes in one


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
        finite = self.size is not None and other.size is not None  # endless and finite are endless
        size = (self.size or 0) + (other.size or 0) if finite else None
        names = ("asked", "distinct", "refused", "broken", "drawn")
        return Tally(size, **{name: getattr(self, name) + getattr(other, name) for name in names})

    def share(self, count: int) -> Estimate:
        """Estimate the share of points from a count of draws, with Wilson's interval of 95 %."""
        n, p = max(self.drawn, 1), count / max(self.drawn, 1)
        # the score interval: unlike p ± z s it holds for small counts, too
        middle, scale = p + _Z**2 / (2 * n), 1 + _Z**2 / n
        half = _Z * math.sqrt(p * (1 - p) / n + (_Z / (2 * n)) ** 2)
        low, high = (middle - half) / scale, (middle + half) / scale
        # no draws of a kind do not show that there are none, nor all draws that there are no others
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
    legal: SeenHashes = field(default_factory=SeenHashes)
    evaluated: SeenHashes = field(default_factory=SeenHashes)
    num_legal: int = 0
    num_evaluated: int = 0
    calls: list[Call] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._backend, self._words = self.plan.backend, self.plan.context.words
        # duplicates count within a scenario
        self._names, self._own = list(self.plan.spaces), [SeenHashes() for _ in self.plan.spaces]
        change = self.plan.settings.study.baseline
        self._baselines = [Baselines(space, change, self._identify_block) for space in self.plan.spaces.values()]
        self._compared: set[bytes] = set()  # grids of baselines whose rules were checked
        self._offered = 0
        size = sum(tally.size or 0 for tally in self.tallies.values())
        # enough calls to time, in a small space as well
        self._per_call = min(self._backend.batch, _PER_CALL, max(1, size // _FEWEST_CALLS))

    def _identify_block(self, block: Points) -> Part:
        return Part(block.identified("", self._words))

    def take(self, blocks: Sequence[tuple[int, Points]]) -> None:
        """Count the points of some blocks, each of the scenario at a place."""
        batches = [block.batch for _, block in blocks if block.batch is not None]
        screened = iter(self._backend.screen(batches))  # rules that are known without simulating
        for index, block in blocks:
            keys = block.content_keys(*self._words)
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
        # a design may break several rules at once
        for rule, example in {general(text): text for text in reason.split("; ")}.items():
            self.rules[rule] += count
            self.examples.setdefault(rule, example)

    def _hold(self, keys: NDArray[np.uint64], *, explored: bool) -> None:
        """Note designs that would be evaluated."""
        self.num_evaluated += int(self.evaluated.add(keys).sum())
        if explored:
            self.num_legal += int(self.legal.add(keys).sum())

    def _compare(self, index: int, block: Points) -> None:
        """Note the baselines of a block."""
        for _, baseline in self._baselines[index].of(block):
            name = baseline.keys.tobytes()
            if baseline.points.batch is not None and name not in self._compared:
                self._compared.add(name)
                (results,) = self._backend.screen([baseline.batch])
                self._hold(baseline.keys[results.ok], explored=False)

    def _offer(self, blocks: Sequence[tuple[int, Points]]) -> None:
        """Keep some of all calls, each as likely as any other (reservoir sampling)."""
        for candidate in _calls(blocks, self._per_call):
            self._offered += 1
            # of n calls the last takes a place with probability held / n
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
    # numbers of their own: digits in names of knobs stay
    return re.sub(r"(?<![\w.])[+-]?\d+(?:\.\d+)?(?:e[+-]?\d+)?(?![\w])", "…", reason)


def _refusal(block: Points) -> Results:
    return Results.all_alike(Result("infeasible", reason=block.reason), block.size)


def _calls(blocks: Sequence[tuple[int, Points]], most: int) -> Iterator[Call]:
    """Yield the points of some blocks in calls of at most `most` designs, as an enumeration would make them."""
    parts: list[tuple[int, Points]] = []
    count = 0
    for index, block in blocks:
        for part in block.split(most):
            if parts and count + part.size > most:  # a part may fill a call by itself
                yield parts
                parts, count = [], 0
            parts.append((index, part))
            count += part.size
    if parts:
        yield parts


def count_points(planned: Plan, random: np.random.Generator, advance: Advance) -> Census:
    """Count every point of finite spaces; the same block of all scenarios together, as a study takes them."""
    sizes = {name: space.size() for name, space in planned.spaces.items()}
    census = Census(planned, {name: Tally(size) for name, size in sizes.items()}, random)
    pending: list[tuple[int, Points]] = []
    count = 0
    # half, as rows of the study come with their baselines
    for blocks in blocks_together(list(planned.spaces.values()), ROWS_PER_GROUP // 2):
        for index, block in enumerate(blocks):
            if block is not None:
                pending.append((index, block))
                count += block.size
                advance(block.size)
        if count >= ROWS_PER_GROUP:  # rules are checked for many designs at once
            census.take(pending)
            pending, count = [], 0
    census.take(pending)
    return census


def sample_points(planned: Plan, random: np.random.Generator, advance: Advance) -> Census:
    """Count points drawn from each scenario: every knob that counts takes any of its values with equal probability."""
    sizes = {name: space.size() for name, space in planned.spaces.items()}
    num_draws = -(-NUM_DRAWN // len(sizes))  # rounded up, the same for each scenario
    census = Census(planned, {name: Tally(size, drawn=num_draws) for name, size in sizes.items()}, random)
    for index, space in enumerate(planned.spaces.values()):
        for _ in range(num_draws):
            # points as a sampler would ask for them
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
    return [call for call in calls if call]  # all points of a call may have been refused
