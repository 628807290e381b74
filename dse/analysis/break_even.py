"""Break-even of a constant: the values at which another option wins, found as roots.

A grid of values shows where the winner changes; between two of them the values at which the two winners are equal is a
root, to which secants lead in a few rounds; where objectives jump there is none, and equal parts close in on the flip.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dse.analysis.contexts import TIE, Option
from dse.analysis.perturbation import Advance, Constant, Floats, RunPoints, at, evaluate_batches, legal, one_by_one
from dse.analysis.standings import option_text
from dse.values.units import quantity_text

STEPS = 25  # of a constant's range, on a logarithmic grid; odd, so that the nominal value is on the grid
_PRECISE = 1e-9  # relative width of an interval at which the search for a flip ends
# seven values inside: an eighth is left of the interval
_PARTS = np.arange(1, 8) / 8  # of an interval
_NEAR = 1 / 16  # of an interval, at most: the values asked beside the one at which a secant is 0
_RIVALS = 4  # options to evaluate while a flip is narrowed down: the best at either end
_TURN = 1e-6  # share of an objective that is more than rounding


@dataclass(frozen=True)
class WinningInterval:
    """Values of a constant, from low to high, over which one option wins."""

    low: float
    high: float
    option: Option


@dataclass(frozen=True)
class Breaks:
    """Winning options of a scenario by the value of one constant: stretches in ascending order.

    num_anomalies: points whose objective gets both better and worse as the constant rises. largest: the largest
    `reversal_share` of them. is_read: whether the constant changes the objective of any point.
    """

    scenario: str
    constant: Constant
    nominal: float
    stretches: tuple[WinningInterval, ...]
    num_anomalies: int = 0
    largest: float = 0.0
    is_read: bool = True

    @property
    def home(self) -> int:
        """Place of the stretch with the nominal value, the one of the run."""
        return next(place for place, stretch in enumerate(self.stretches) if self.nominal <= stretch.high)

    @property
    def near(self) -> float:
        """Distance of the nearest flip, as a factor of the nominal value (above 1); infinite without a flip."""
        ends = [stretch.high for stretch in self.stretches[:-1]]
        return min((max(end / self.nominal, self.nominal / end) for end in ends), default=math.inf)

    def sentence(self, choose: Sequence[str]) -> str:
        """Describe it: `g4: schedule.comm_engine = dma wins above x = 12 GB/s (now 46.6 GB/s), cu below`."""
        path, winning = self.constant.path, self.stretches[self.home]
        now = f"{path} = {{}} (now {quantity_text(self.nominal, path)})"
        if not self.is_read:
            return f"{self.scenario}: {path} changes nothing here (now {quantity_text(self.nominal, path)})"
        if len(self.stretches) == 1:
            ends = f"{quantity_text(winning.low, path)} and {quantity_text(winning.high, path)}"
            return f"{self.scenario}: no flip between {path} = {ends} (now {quantity_text(self.nominal, path)})"
        beside = self.stretches[max(0, self.home - 1) : self.home + 2]  # the stretches on either side
        differing = [n for n in range(len(choose)) if len({stretch.option[n] for stretch in beside}) > 1]
        below = self.stretches[self.home - 1] if self.home else None
        above = self.stretches[self.home + 1] if self.home + 1 < len(self.stretches) else None
        limits = [quantity_text(end, path) for end, there in ((winning.low, below), (winning.high, above)) if there]
        where = "between" if below and above else "above" if below else "below"
        head = ", ".join(f"{choose[n]} = {option_text(winning.option[n : n + 1])}" for n in differing)
        sides: dict[str, list[str]] = {}
        for side, word in ((below, "below"), (above, "above")):
            if side:
                sides.setdefault(option_text([side.option[n] for n in differing]), []).append(word)
        side_texts = [f"{option} {' and '.join(words)}" for option, words in sides.items()]
        return f"{self.scenario}: {head} wins {where} {now.format(' and '.join(limits))}, {', '.join(side_texts)}"

    def json(self) -> dict[str, Any]:
        """Return an entry of `break_even` in `robustness.json`."""
        stretches = [{"low": part.low, "high": part.high, "option": list(part.option)} for part in self.stretches]
        named = {"scenario": self.scenario, "constant": self.constant.path, "nominal": self.nominal}
        odd = {"anomalies": self.num_anomalies, "largest_anomaly": self.largest}
        return {**named, "stretches": stretches, **odd}


def breaks(
    run_points: RunPoints, constant: Constant, objective: Mapping[str, str], span: float, advance: Advance
) -> list[Breaks]:
    """Find where the winning option flips as one constant goes from nominal / span to nominal x span."""
    factors = legal(run_points, constant, np.geomspace(1 / span, span, STEPS))
    factors[np.argmin(np.abs(np.log(factors)))] = 1.0  # rounding in geomspace must not move the nominal value
    scanned = evaluate_batches(run_points, one_by_one(run_points, constant, factors), objective, advance)[:, 0]
    values, nominal = scanned.reshape(len(run_points.designs), len(factors)), run_points.nominal(constant.path)
    searches = []
    for index in range(len(run_points.scenarios)):
        rows = run_points.rows(index)
        axis = constant.values(float(nominal[index]), factors).astype(float)
        home = int(np.argmin(np.abs(np.log(factors))))
        searches.append(_Search(run_points, constant, rows, (axis, values[rows], home)))
    # all searches ask together, so that the backend is called with large batches
    while any(search.open for search in searches):
        wanted = [(search, *search.asks()) for search in searches if search.open]
        rows, numbers = (np.concatenate([query[place] for query in wanted]) for place in (1, 2))
        fresh = evaluate_batches(run_points, at(run_points, constant, rows, numbers), objective, advance)[:, 0]
        ends = np.cumsum([len(query_rows) for _, query_rows, _ in wanted])[:-1]  # np.split takes inner ends
        for (search, _, _), objectives in zip(wanted, np.split(fresh, ends), strict=True):
            search.tell(objectives)
    turns = [reversal_share(values[run_points.rows(index)]) for index in range(len(run_points.scenarios))]
    return [
        Breaks(
            name,
            constant,
            float(nominal[index]),
            tuple(search.stretches()),
            int((turns[index] > _TURN).sum()),
            float(turns[index].max(initial=0.0)),
            is_read=bool((values[run_points.rows(index)] != values[run_points.rows(index)][:, :1]).any()),
        )
        for index, (name, search) in enumerate(zip(run_points.scenarios, searches, strict=True))
    ]


def reversal_share(values: Floats) -> Floats:
    """Share [R] by which values [R, G] above 0 reverse; 0 for rows that only rise or only fall.

    It is the lesser of the largest rise and the largest fall between any two finite places.
    """
    seen = np.isfinite(values)
    least = np.minimum.accumulate(np.where(seen, values, math.inf), axis=1)  # places without a result are passed over
    largest = np.maximum.accumulate(np.where(seen, values, 0.0), axis=1)
    rise = np.divide(values, least, out=np.ones_like(values), where=seen).max(axis=1, initial=1.0)
    fall = np.divide(largest, values, out=np.ones_like(values), where=seen).max(axis=1, initial=1.0)
    return np.asarray(np.minimum(rise, fall) - 1.0)


class _Search:
    """Search for the values of one constant at which the winning option of one scenario flips.

    scanned: values [G] of the constant in ascending order, the objective of each point there [R, G] (inf: none), and
    the place of the nominal value. `asks` names the points to evaluate next and `tell` takes their objectives.
    """

    def __init__(
        self, run_points: RunPoints, constant: Constant, rows: NDArray[np.intp], scanned: tuple[Floats, Floats, int]
    ) -> None:
        axis, values, home = scanned
        self._rows, self._whole, self._options = rows, constant.whole, run_points.options
        self._places = run_points.option[rows]
        self._codes = np.unique(self._places)
        # ranks of options at the nominal value
        self._rank = np.argsort(np.argsort(self._by_option(values)[:, home], kind="stable"))
        unique, first = np.unique(axis, return_index=True)  # whole constants: several factors may give one value
        self._axis: list[float] = unique.tolist()
        # value -> objective of each point there
        self._ends = {value: values[:, place] for value, place in zip(self._axis, first.tolist(), strict=True)}
        self._winner = [self._best(best) for best in self._by_option(values[:, first]).T]
        self._pending: list[tuple[float, NDArray[np.intp]]] = []

    def _by_option(self, values: Floats) -> Floats:
        return np.stack([values[self._places == code].min(axis=0) for code in self._codes])

    def _best(self, options: Floats) -> int:
        """Place of the best option; ties go to the option that ranks first at the nominal value."""
        least = options.min()
        # no option has a result: all are tied
        tied = np.flatnonzero(options <= least + TIE * abs(least)) if np.isfinite(least) else np.arange(len(options))
        return int(tied[np.argmin(self._rank[tied])])

    @property
    def open(self) -> list[tuple[float, float]]:
        """Intervals with a flip that are still wide."""
        both = zip(self._axis, self._axis[1:], self._winner, self._winner[1:], strict=False)
        return [
            (low, high)
            for low, high, low_winner, high_winner in both
            if low_winner != high_winner and self._is_wide(low, high)
        ]

    def _is_wide(self, low: float, high: float) -> bool:
        return high - low > 1 if self._whole else high > low * (1 + _PRECISE)

    def asks(self) -> tuple[NDArray[np.intp], Floats]:
        """Return points [N] and the values [N] of the constant at which to evaluate them."""
        self._pending = []
        for low, high in self.open:
            rows = np.union1d(self._rivals(low), self._rivals(high))
            self._pending += [(value, rows) for value in self._between(low, high)]
        rows = np.concatenate([rows for _, rows in self._pending])
        return self._rows[rows], np.repeat(
            [value for value, _ in self._pending], [len(rows) for _, rows in self._pending]
        )

    def _between(self, low: float, high: float) -> list[float]:
        """Values to ask between two: of equal parts, where the winners would be equal by a secant, and beside that."""
        width = math.log(high / low)
        apart = [self._apart(end, low, high) for end in (low, high)]
        shares = list(_PARTS)
        # the winners swap, so that a secant has a root between
        if all(map(math.isfinite, apart)) and apart[1] > apart[0]:
            root, near = -apart[0] / (apart[1] - apart[0]), min(_NEAR, width)
            # next to it, so that the next interval is narrow even if it is not exact
            shares += [root - near, root, root + near]
        values = low * np.exp(width * np.clip(shares, 0.0, 1.0))
        if self._whole:
            values = np.clip(np.rint(values), low + 1, high - 1)
        return [value for value in np.unique(values).tolist() if low < value < high]

    def _apart(self, end: float, low: float, high: float) -> float:
        """Share by which the best option at `low` is behind that at `high` at an evaluated value of the constant."""
        options = self._by_option(self._ends[end][:, None])[:, 0]
        first, second = (options[self._winner[self._axis.index(place)]] for place in (low, high))
        with np.errstate(invalid="ignore"):  # infinite where a point fails
            # relative to both, so that large objectives do not dominate
            return float((first - second) / (abs(first) + abs(second))) if first != second else 0.0

    def _rivals(self, end: float) -> NDArray[np.intp]:
        """Return the best point of each of the best options at an evaluated value of the constant."""
        values = self._ends[end]
        best = [np.flatnonzero(self._places == code)[values[self._places == code].argmin()] for code in self._codes]
        order = np.lexsort((self._rank, values[best]))
        return np.array(best)[order[:_RIVALS]]

    def tell(self, values: Floats) -> None:
        """Add the objectives of the points from the last `asks`."""
        start = 0
        for value, rows in self._pending:
            column = np.full(len(self._rows), math.inf)  # points that were not asked for are none of the best
            column[rows] = values[start : start + len(rows)]
            start += len(rows)
            place = int(np.searchsorted(self._axis, value))
            self._axis.insert(place, value)
            self._ends[value] = column
            self._winner.insert(place, self._best(self._by_option(column[:, None])[:, 0]))

    def stretches(self) -> list[WinningInterval]:
        """Merge neighbouring values with the same winner into stretches."""
        merged: list[WinningInterval] = []
        for value, winner in zip(self._axis, self._winner, strict=True):
            option = self._options[self._codes[winner]]
            if merged and merged[-1].option == option:
                merged[-1] = replace(merged[-1], high=value)
                continue
            # the middle of a narrow interval, in logarithms
            between = value if self._whole or not merged else math.sqrt(merged[-1].high * value)
            if merged and not self._whole:
                merged[-1] = replace(merged[-1], high=between)
            merged.append(WinningInterval(between, value, option))
        return merged
