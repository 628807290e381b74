"""Whether an answer stands out of what predictions are off by: intervals of a gain, and how sure its winner is.

A winner is decided where the 90 % interval of its gain does not hold 1 and it is the fastest with a probability of
`decide.least`. Otherwise the difference is within the noise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dse.config.options import conf_dir
from dse.config.yaml_checks import load_yaml
from dse.results.words import AS_FAST, gain_in_words

Floats = NDArray[np.float64]
NOISE = "within the noise: keep what you have"
ENDS = (0.05, 0.95)
"""Quantiles between which 90 % of draws are."""
_TIE = 1e-9  # of a time: equal but for rounding


@dataclass(frozen=True)
class Decision:
    """A winner among its rivals. low, high: 5 and 95 % of its gain over the baseline; None without a baseline.

    fastest: probability that it is the fastest of those compared. rival: the one that is faster most often, in words.
    least: of `fastest`, for a decision. basis: kind of error -> what it rests on. measure: the kind whose knowledge
    would lower the probability of a wrong choice most, and that probability now and then.
    """

    fastest: float
    least: float
    low: float | None = None
    high: float | None = None
    rival: str = ""
    basis: Mapping[str, str] = field(default_factory=dict)
    measure: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, times: Floats, before: Floats | None, *, least: float, rivals: Any = (), basis: Any = None) -> Decision:
        """From drawn times of the winner and its rivals [1 + R, S], and those of the baseline [S]; rivals: in words."""
        ends = (None, None) if before is None else tuple(map(float, np.quantile(before / times[0], ENDS)))
        wins = times[0] <= times.min(axis=0) * (1 + _TIE)
        faster = (times[1:] < times[0] * (1 - _TIE)).mean(axis=1) if len(times) > 1 else np.zeros(0)
        rival = rivals[int(faster.argmax())] if len(faster) and faster.max() > 0 else ""
        return cls(float(wins.mean()), least, ends[0], ends[1], rival, dict(basis or {}))

    @property
    def spans_one(self) -> bool:
        """Whether the interval of the gain holds 1."""
        return self.low is not None and self.high is not None and self.low <= 1 <= self.high

    @property
    def is_decided(self) -> bool:
        """Whether the winner stands out."""
        return not self.spans_one and self.fastest >= self.least

    @property
    def advice(self) -> str:
        """What follows where it is not decided; "" where it is."""
        if self.is_decided:
            return ""
        # both gain: one is as good as the other
        return NOISE if self.spans_one or not self.rival else f"{NOISE} if that is {self.rival}"

    def measurement(self, system: str, gpus: int) -> str:
        """The measurement that would decide soonest, as a command; "" where none would, or it is decided."""
        commands = load_yaml(conf_dir() / "data" / "residuals" / "measure.yaml")["commands"]
        command = commands.get(self.measure.get("kind", ""))
        if not command or self.is_decided:
            return ""
        now, then = (f"{100 * self.measure[name]:.0f} %" for name in ("wrong", "wrong_if_known"))
        how = command.format(system=system, gpus=gpus)
        return f"to decide it, measure {self.measure['kind']} (a wrong choice: {now}, then {then}): {how}"

    def gain(self, ratio: float) -> str:
        """The gain with its interval: `1.18x (1.06–1.29) faster`."""
        return gain_text(ratio, self.low, self.high)

    def json(self) -> dict[str, Any]:
        """Entries of `summary.json`."""
        return {**asdict(self), "decided": self.is_decided, "advice": self.advice}

    @classmethod
    def read(cls, entry: Mapping[str, Any]) -> Decision:
        """From entries of `summary.json`."""
        return cls(**{name: entry[name] for name in cls.__dataclass_fields__ if name in entry})


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


def helpful_measurement(record: Mapping[str, Any], system: Any) -> str:
    """The measurement that would decide most of the winners that are not decided; "" where none is known.

    record: `summary.json`; system: that section of the configuration.
    """
    entries = [Decision.read(entry) for entry in (record.get("decisions") or {}).values()]
    kinds = [made.measure["kind"] for made in entries if made.measure and not made.is_decided]
    if not kinds or not isinstance(system, Mapping):
        return ""
    first = max(dict.fromkeys(kinds), key=kinds.count)
    made = next(made for made in entries if made.measure.get("kind") == first and not made.is_decided)
    node = system.get("node") or {}
    return made.measurement(str(system.get("name")), int(node.get("num_gpus") or 1))


def metrics_of_winners(record: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Key of a winner -> `speedup_low`, `speedup_high` and `fastest`, of a `summary.json`."""
    found = {}
    for key, entry in (record.get("decisions") or {}).items():
        values = {"speedup_low": entry.get("low"), "speedup_high": entry.get("high"), "fastest": entry.get("fastest")}
        found[entry.get("preferred") or key] = {
            name: float(value) for name, value in values.items() if value is not None
        }
    return found


def read_decision(record: Mapping[str, Any], key: Any) -> Decision | None:
    """The decision on a winner by its key, of a `summary.json`; None where there is none."""
    entry = (record.get("decisions") or {}).get(str(key))
    return None if entry is None else Decision.read(entry)


def wrong_if_known(times: Floats, alone: Floats) -> float:
    """Probability of a wrong choice among options once one error is known, the best choice made for each value of it.

    times [R, S]: drawn times of options. alone [R, S]: with all other errors at their medians, by the same draws, whose
    differences tell the value of that error. Draws are divided into groups of near values.
    """
    wins = np.argmin(times, axis=0)
    spread = np.log(alone[1:] / alone[0])
    # the direction in which the options differ most
    told = spread[int(np.argmax(spread.std(axis=1)))] if len(spread) else np.zeros(times.shape[1])
    groups = np.array_split(np.argsort(told, kind="stable"), _VALUES)
    right = sum(int(np.bincount(wins[group]).max()) for group in groups if len(group))
    return 1 - right / float(times.shape[1])


_VALUES = 8  # of a known error that are told apart
