"""Decisions on winners: intervals of their gains, and the probability that nothing else is faster.

A winner is decided where the 90 % interval of its gain does not hold 1 and it is the fastest with a probability of
`decide.least`. Otherwise it is too close to call. A backend that can draw the errors of its predictions
(`Drawing`) is asked for the times of a winner, of what it is compared with, and of the best points of other options,
all with the same errors: what is off in all of them alike cancels in their ratios.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from dse import plugins
from dse.config.options import conf_dir, load_yaml
from dse.results.words import AS_FAST, choice_in_words, gain_in_words
from dse.space import Space

if TYPE_CHECKING:
    import pandas as pd

Floats = NDArray[np.float64]
NO_GAIN = "no certain gain: keep what you have"
AS_GOOD = "too close to call: another option may be as fast"
SLOWER = "slower, however predictions are off: keep what you have"
ENDS = (0.05, 0.95)
"""Quantiles between which 90 % of draws are."""
_TIE = 1e-9  # of a time: equal but for rounding


@dataclass(frozen=True)
class Decision:
    """A winner among its rivals. low, high: 5 and 95 % of its gain over the baseline; None without a baseline.

    fastest: probability that it is the fastest of those compared. rival: the one that is faster most often, in words.
    least: of `fastest`, for a decision. basis: kind of error -> what it rests on. measure: the kind whose knowledge
    would lower the probability of a wrong choice most, and that probability now and then. never_slower: whether an
    interval that touches 1 from above does not hold it, as the winner gains at the median.
    """

    fastest: float
    least: float
    low: float | None = None
    high: float | None = None
    rival: str = ""
    basis: Mapping[str, str] = field(default_factory=dict)
    measure: Mapping[str, Any] = field(default_factory=dict)
    never_slower: bool = False

    @classmethod
    def of(cls, times: Floats, before: Floats | None, *, least: float, rivals: Any = (), basis: Any = None) -> Decision:
        """From drawn times of the winner and its rivals [1 + R, S], and those of the baseline [S]; rivals: in words."""
        ends = (None, None) if before is None else interval(before / times[0])
        wins = times[0] <= times.min(axis=0) * (1 + _TIE)
        faster = (times[1:] < times[0] * (1 - _TIE)).mean(axis=1) if len(times) > 1 else np.zeros(0)
        rival = rivals[int(faster.argmax())] if len(faster) and faster.max() > 0 else ""
        return cls(float(wins.mean()), least, ends[0], ends[1], rival, dict(basis or {}))

    def holding(self, gain: float) -> Decision:
        """The same with an interval that holds the predicted gain."""
        return self if self.low is None else replace(self, low=min(self.low, gain), high=max(self.high or gain, gain))

    @property
    def spans_one(self) -> bool:
        """True if the interval of the gain holds 1."""
        return not self.never_slower and self.low is not None and self.high is not None and self.low <= 1 <= self.high

    @property
    def is_slower(self) -> bool:
        """True if the whole interval of the gain is below 1."""
        return self.high is not None and self.high < 1

    @property
    def is_decided(self) -> bool:
        """True if the winner stands out."""
        return not self.spans_one and not self.is_slower and self.fastest >= self.least

    @property
    def advice(self) -> str:
        """Advice where what is best is not decided, or slower than the baseline; "" elsewhere."""
        if self.is_decided or self.is_slower:
            return SLOWER if self.is_slower else ""
        # both gain: one is as good as the other
        return NO_GAIN if self.spans_one or not self.rival else f"too close to call: {self.rival} is as good"

    def measurement(self, system: str, gpus: int) -> str:
        """The measurement that would decide soonest, as a command; "" where none would, or it is decided."""
        command = _commands(system).get(self.measure.get("kind", ""))
        if not command or self.is_decided or self.is_slower:
            return ""
        now, then = (f"{100 * self.measure[name]:.0f} %" for name in ("wrong", "wrong_if_known"))
        how = command.format(system=system, gpus=gpus)
        cut = f"would cut the risk of a wrong choice from {now} to {then}"
        return f"to decide it, measure {self.measure['kind']}, which {cut}: {how}"

    def gain(self, ratio: float) -> str:
        """The gain with its interval, as a cell of a table: `1.18x (1.06–1.29)`."""
        if self.low is None or self.high is None:
            return gain_in_words(ratio)
        return f"{ratio:.2f}x ({self.low:.2f}–{self.high:.2f})"

    def json(self) -> dict[str, Any]:
        """Entries of `summary.json`."""
        return {**asdict(self), "decided": self.is_decided, "advice": self.advice}

    @classmethod
    def read(cls, entry: Mapping[str, Any]) -> Decision:
        """From entries of `summary.json`."""
        return cls(**{name: entry[name] for name in cls.__dataclass_fields__ if name in entry})


def _commands(system: str) -> Mapping[str, str]:
    """Commands that measure kinds of errors on a machine, by kind; "" where nothing measures one there."""
    table = load_yaml(conf_dir() / "data" / "residuals" / "measure.yaml")
    own = (entry["commands"] for entry in table["others"] if system.startswith(tuple(entry["machines"])))
    return {**table["commands"], **next(own, {})}


def interval(drawn: Floats, predicted: float = math.nan) -> tuple[float, float]:
    """Ends of the 90 % interval of a ratio from draws [S], widened where that is needed to hold the predicted one.

    Predictions of a kind may be off to one side, so that few draws are beyond the prediction itself.

    >>> interval(np.array([1.0, 1.1, 1.2]), predicted=1.5)
    (1.01, 1.5)
    """
    low, high = map(float, np.quantile(drawn, ENDS))
    return (low, high) if math.isnan(predicted) else (min(low, predicted), max(high, predicted))


def gain_text(ratio: float, low: float | None, high: float | None) -> str:
    """A gain with its interval, in words.

    >>> gain_text(1.18, 1.06, 1.29), gain_text(0.8, 0.7, 0.9), gain_text(1.5, None, None), gain_text(1.0, 1.0, 1.0)
    ('1.18x (1.06–1.29) faster', '1.25x (1.11–1.43) slower', '1.50x faster', 'as fast')
    """
    plain = gain_in_words(ratio)
    if low is None or high is None or (plain == AS_FAST and round(low, 2) == round(high, 2) == 1):
        return plain
    if plain == AS_FAST:
        return f"{plain} ({low:.2f}–{high:.2f})"
    ends = (low, high) if ratio > 1 else (1 / high, 1 / low)
    size, _, direction = plain.partition(" ")
    return f"{size} ({ends[0]:.2f}–{ends[1]:.2f}) {direction}"


def with_ranges(rows: pd.DataFrame, table: pd.DataFrame, on: Sequence[str]) -> pd.DataFrame:
    """Rows of a figure with the 90 % intervals of the gains of winners, as `range_low` and `range_high`.

    table: results, whose `attrs` hold decisions; without any, rows stay as they are. on: columns that name a row. Rows
    are found by these columns, never by their place, and keep their index: columns of the same rows go on fitting them.
    """
    entries = table.attrs.get("decisions") or {}
    winners = table[table["key"].astype(str).isin(entries.keys())]
    if not len(winners):
        return rows
    ends = {f"range_{end}": [entries[str(key)].get(end) for key in winners["key"]] for end in ("low", "high")}
    spans = winners[list(on)].assign(**ends).astype(dict.fromkeys(ends, float))
    return rows.merge(spans.drop_duplicates(list(on)), on=list(on), how="left").set_axis(rows.index)


def helpful_measurement(record: Mapping[str, Any], system: Any) -> str:
    """The measurement that would decide most of the winners that are not decided; "" where none is known.

    record: `summary.json`; system: that section of the configuration.
    """
    entries = [Decision.read(entry) for entry in (record.get("decisions") or {}).values()]
    kinds = [decision.measure["kind"] for decision in entries if decision.measure and not decision.is_decided]
    if not kinds or not isinstance(system, Mapping):
        return ""
    first = max(dict.fromkeys(kinds), key=kinds.count)
    decision = next(entry for entry in entries if entry.measure.get("kind") == first and not entry.is_decided)
    node = system.get("node") or {}
    return decision.measurement(str(system.get("name")), int(node.get("num_gpus") or 1))


def metrics_of_winners(record: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Key of a winner -> `speedup_low`, `speedup_high` and `fastest`, of a `summary.json`."""
    by_key = {}
    for key, entry in (record.get("decisions") or {}).items():
        values = {"speedup_low": entry.get("low"), "speedup_high": entry.get("high"), "fastest": entry.get("fastest")}
        by_key[entry.get("preferred") or key] = {
            name: float(value) for name, value in values.items() if value is not None
        }
    return by_key


def read_decision(record: Mapping[str, Any], key: Any) -> Decision | None:
    """The decision on a winner by its key, of a `summary.json`; None where there is none."""
    entry = (record.get("decisions") or {}).get(str(key))
    return None if entry is None else Decision.read(entry)


def wrong_if_known(times: Floats, alone: Floats) -> float:
    """Probability of a wrong choice among options once one error is known, with the best choice for each value of it.

    times [R, S]: drawn times of options. alone [R, S]: with all other errors at their medians, by the same draws, whose
    differences tell the value of that error. Draws are divided into groups of near values.
    """
    wins = np.argmin(times, axis=0)
    spread = np.log(alone[1:] / alone[0])
    # the direction in which the options differ most
    direction = spread[int(np.argmax(spread.std(axis=1)))] if len(spread) else np.zeros(times.shape[1])
    groups = np.array_split(np.argsort(direction, kind="stable"), _VALUES)
    right = sum(int(np.bincount(wins[group]).max()) for group in groups if len(group))
    return 1 - right / float(times.shape[1])


_VALUES = 8  # of a known error that are direction apart


_MOST_RIVALS = 3  # of a winner: points that are farther off are never the fastest
_MOST_WINNERS = 500  # of a study, whose errors are drawn: a twentieth of a second each, less than their points took
DRAWN_TIMES = ("makespan_s", "iteration_s")
"""Objectives whose errors backends draw."""


@runtime_checkable
class Drawing(Protocol):
    """A backend that can draw the errors of its predictions."""

    def draw(
        self, designs: Sequence[BaseModel], *, samples: int, seed: int, exact: Sequence[str] = ()
    ) -> tuple[NDArray[np.float64], Mapping[str, str]]:
        """Times [designs, samples] with drawn errors, the same in all designs, and what each kind rests on.

        exact: kinds of errors that are taken as measured.
        """


def decisions(planned: Any, table: pd.DataFrame) -> dict[str, Any]:
    """Decision on each winner of a table, by its key; none where the backend draws no errors of the objective.

    A study may decide by itself: `decisions(table, planned)`.
    """
    if not planned.settings.decide.samples:
        return {}
    study = plugins.load("study", planned.settings.study.module)
    if hasattr(study, "decisions"):
        entries: dict[str, Any] = study.decisions(table, planned)
        return entries
    objective, answer = next(iter(planned.goals)), planned.settings.study.answer
    if (
        not isinstance(planned.backend, Drawing)
        or objective not in DRAWN_TIMES
        or answer.over
        or answer.across
        or not (table["status"] == "ok").any()
    ):
        return {}
    winners = _closest(planned.contest.winners(table, planned.goals, apart=True), _MOST_WINNERS)
    by_key, helps = {}, True  # for the first that is not decided: the next ones would name the same
    for _, row in winners.iterrows():
        decision = _decide(planned, row, _rivals(planned, table, row), helps=helps)
        if decision is not None:
            helps = helps and decision.is_decided
            by_key[str(row["key"])] = decision.json()
    return by_key


def _closest(winners: pd.DataFrame, most: int) -> pd.DataFrame:
    """The winners that gain least, at most so many: others are the least in doubt. All keep their order."""
    if len(winners) <= most or "speedup" not in winners:
        return winners.head(most)
    gained = np.abs(np.log(winners["speedup"].to_numpy(float)))
    return winners.iloc[np.sort(np.argsort(gained, kind="stable")[:most])]


def most_helpful(times: Floats, alone: Mapping[str, Floats]) -> dict[str, Any]:
    """The kind of error whose knowledge lowers the probability of a wrong choice most; empty where none does.

    times: of the options [options, samples], with errors of all kinds; alone: the same with those of each kind.
    """
    now = 1 - float(np.bincount(np.argmin(times, axis=0)).max()) / times.shape[1]
    wrong = {kind: wrong_if_known(times, drawn) for kind, drawn in alone.items()}
    kind = min(wrong, key=lambda name: wrong[name], default="")
    if not kind or wrong[kind] >= now - _LEAST_HELP:
        return {}
    return {"kind": kind, "wrong": now, "wrong_if_known": wrong[kind]}


_LEAST_HELP = 0.01  # of the probability, below which draws tell nothing


def _rivals(planned: Any, table: pd.DataFrame, winner: pd.Series[Any]) -> pd.DataFrame:
    """The best points of other options of the winner's scenario: other names where these are searched."""
    answer, objective = planned.settings.study.answer, next(iter(planned.goals))
    rows = planned.contest.contenders(table)
    rows = rows[(rows["scenario"] == winner["scenario"]) & (rows["key"] != winner["key"])]
    for path in (path for path in answer.by if path in rows):
        rows = rows[rows[path].astype(str) == str(winner[path])]
    names = [path for path in planned.knobs if path.endswith(".name") and path in rows]
    if names:
        same = np.logical_and.reduce([rows[path].astype(str) == str(winner[path]) for path in names])
        rows = rows[~same]
    rows = rows.sort_values(objective, kind="stable")
    distinct: pd.DataFrame = rows.drop_duplicates(names or [objective])
    return distinct.head(_MOST_RIVALS)


def _decide(planned: Any, winner: pd.Series[Any], rivals: pd.DataFrame, *, helps: bool) -> Decision | None:
    """The decision on a winner. helps: whether to look for the measurement that helps most."""
    space, baseline = planned.spaces[str(winner["scenario"])], planned.settings.study.baseline
    rows = [winner, *(row for _, row in rivals.iterrows())]
    designs = [_design(space, _chosen(row, planned.knobs)) for row in rows]
    before = _design(space, space.active({**_chosen(winner, planned.knobs), **baseline})) if baseline else None
    if any(design is None for design in designs):
        return None
    assert isinstance(planned.backend, Drawing)
    chosen = [design for design in (*designs, before) if design is not None]
    settings = planned.settings.decide
    times, basis = planned.backend.draw(chosen, samples=settings.samples, seed=planned.settings.seed)
    named = [choice_in_words(row, planned.knobs) for row in rows[1:]]
    last = None if before is None else times[-1]
    decision = Decision.of(times[: len(rows)], last, least=settings.least, rivals=named, basis=basis)
    if math.isfinite(winner.get("speedup", math.nan)):
        decision = decision.holding(float(winner["speedup"]))
    if decision.is_decided or not helps:
        return decision
    draw = partial(planned.backend.draw, chosen, samples=settings.samples, seed=planned.settings.seed)
    alone = {kind: draw(exact=[other for other in basis if other != kind])[0] for kind in basis}
    return replace(decision, measure=most_helpful(times, alone))


def _chosen(row: pd.Series[Any], knobs: Sequence[str]) -> dict[str, Any]:
    present = row.dropna()
    values = {path: present[path] for path in knobs if path in present}
    return {path: value.item() if hasattr(value, "item") else value for path, value in values.items()}


def _design(space: Space, chosen: dict[str, Any]) -> BaseModel | None:
    """The design of a point; None where it has none."""
    blocks = list(space.resolve(chosen))
    return blocks[0].design if len(blocks) == 1 else None
