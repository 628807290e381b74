"""How much of a finished run's answer hangs on its constants: the front under uncertainty, and where winners flip.

Constants are declared uncertain by a relative half-width. All of them are drawn at once by a seeded Latin hypercube,
uniformly within their widths, and the points of the run are evaluated again for each draw: how often do members of the
front and the winner stay what they are, and what is lost by keeping the winner? Each constant alone is then moved over
a wide range: where does another option win?
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dse.analysis.contexts import TIE, Question
from dse.analysis.decision_tree import Option
from dse.analysis.perturbation import (
    Advance,
    Constant,
    Floats,
    Points,
    at,
    constants,
    evaluate_batches,
    legal,
    one_by_one,
    points,
    together,
)
from dse.errors import ConfigError, Problem, pairs
from dse.files import atomic_replacement
from dse.progress import bar
from dse.results import report
from dse.results.finished_run import Finished
from dse.study.plan_again import Present, plan_again
from dse.units import quantity_text

if TYPE_CHECKING:
    from rich.table import Table

_MOST_EVALUATED = 1_000_000  # points times samples
_STEPS = 25  # of a constant's range, on a logarithmic grid; odd, so that the nominal value is one of them
_PARTS = 8  # into which an interval that holds a flip is cut at a time
_PRECISE = 1e-4  # relative width at which a flip is found
_RIVALS = 4  # options that are looked at while a flip is narrowed down: the best at either end
_FLIPS_SHOWN = 16
_TURN = 1e-6  # share of an objective that is no rounding


# ---------------------------------------------------------------- under uncertainty


@dataclass(frozen=True)
class Standing:
    """How one scenario's answer stands when all constants vary. Regrets are shares of the best objective, by sample.

    winner: the nominal winner's option. members: nominal front as (key, option, share of samples in which it stays).
    stays: share in which the winning point stays best; option_stays: in which some point of its option is best, so
    with all other knobs tuned again. kept: regret of keeping the winning point. options: mean and worst regret of each
    option, tuned again. instead: the option that is best most often where the winner's is not, with its share.
    """

    scenario: str
    winner: Option
    members: tuple[tuple[str, Option, float], ...]
    stays: float
    option_stays: float
    kept: Floats
    options: Mapping[Option, tuple[float, float]]
    instead: tuple[Option, float] | None

    @property
    def least_mean(self) -> Option:
        """The option with the least mean regret; of equal ones the winner, or the least bad."""
        return min(self.options, key=lambda one: (round(self.options[one][0], 9), one != self.winner))

    @property
    def least_worst(self) -> Option:
        """The option with the least worst regret."""
        return min(self.options, key=lambda one: (round(self.options[one][1], 9), one != self.winner))

    def row(self) -> dict[str, Any]:
        """As written."""
        shares = [share for _, _, share in self.members]
        told = {"scenario": self.scenario, "winner": _said(self.winner), "winner_stays": self.stays}
        told |= {"option_stays": self.option_stays, "regret_mean": float(self.kept.mean())}
        told |= {"regret_p95": float(np.quantile(self.kept, 0.95)), "regret_worst": float(self.kept.max())}
        told |= {"front": len(shares), "front_stays_mean": float(np.mean(shares)), "front_stays_least": min(shares)}
        told |= {
            "instead": _said(self.instead[0]) if self.instead else "",
            "instead_wins": (self.instead or ("", 0))[1],
        }
        for name, option in (("mean", self.least_mean), ("worst", self.least_worst)):
            told |= {f"least_{name}": _said(option), f"least_{name}_regret": self.options[option][name == "worst"]}
        return told

    def json(self) -> dict[str, Any]:
        """With every member of the front and every option."""
        members = [{"key": key, "option": list(one), "stays": share} for key, one, share in self.members]
        fared = [{"option": list(one), "mean": mean, "worst": worst} for one, (mean, worst) in self.options.items()]
        return {**self.row(), "members": members, "options": fared}


def draw_factors(changing: Sequence[Constant], samples: int, seed: int) -> Floats:
    """Factors [samples, constants] of a Latin hypercube, uniform within each half-width."""
    from scipy.stats import qmc

    unit = qmc.LatinHypercube(len(changing), rng=np.random.default_rng(seed)).random(samples)
    halves = np.array([constant.half_width for constant in changing])
    return np.asarray(1 + halves * (2 * unit - 1))


def standings(found: Points, nominal: Floats, values: Floats) -> list[Standing]:
    """How every scenario stands: nominal [R, objectives], values [R, samples, objectives], smaller being better."""
    told = []
    for index, name in enumerate(found.scenarios):
        rows = found.rows(index)
        if np.isfinite(nominal[rows, 0]).any():
            told.append(_standing(found, name, rows, (nominal[rows], values[rows])))
    return told


def _standing(found: Points, name: str, rows: NDArray[np.intp], held: tuple[Floats, Floats]) -> Standing:
    nominal, values = held
    regrets = regret(values[:, :, 0])
    winner = int(np.lexsort(nominal.T[::-1])[0])
    places = found.option[rows]
    own = places[winner]
    fared = {place: regrets[places == place].min(axis=0) for place in np.unique(places).tolist()}
    best = np.array([fared[place] <= TIE for place in fared])
    lost = ~best[list(fared).index(own)]
    others = dict(zip(fared, (best & lost).mean(axis=1).tolist(), strict=True))
    rival = max(others, key=lambda place: others[place])
    keys = found.table["key"].to_numpy()[rows]
    stays = np.mean([on_front(values[:, sample]) for sample in range(values.shape[1])], axis=0)
    front = np.flatnonzero(on_front(nominal))
    return Standing(
        scenario=name,
        winner=found.options[own],
        members=tuple((str(keys[row]), found.options[places[row]], float(stays[row])) for row in front),
        stays=float((regrets[winner] <= TIE).mean()),
        option_stays=float(1 - lost.mean()),
        kept=regrets[winner],
        options={found.options[place]: (float(one.mean()), float(one.max())) for place, one in fared.items()},
        instead=(found.options[rival], others[rival]) if lost.any() else None,
    )


def regret(values: Floats) -> Floats:
    """How much worse than the best of its sample each point [R, S] is, as a share of the best.

    A point without a result is as bad as the worst that has one.
    """
    finite = np.isfinite(values)
    filled = np.where(finite, values, np.max(np.where(finite, values, -math.inf), axis=0, keepdims=True))
    best = filled.min(axis=0, keepdims=True)
    return np.asarray(np.divide(filled - best, np.abs(best), out=np.zeros_like(filled), where=filled > best))


def on_front(values: Floats) -> NDArray[np.bool_]:
    """Which points [R, objectives] are on the Pareto front; those without a result are not."""
    import moocore

    rows = np.flatnonzero(np.isfinite(values).all(axis=1))
    marked = np.zeros(len(values), np.bool_)
    if len(rows):
        marked[rows] = moocore.is_nondominated(values[rows], keep_weakly=True)
    return marked


# ---------------------------------------------------------------- break-even


@dataclass(frozen=True)
class Stretch:
    """Values of a constant, from low to high, over which one option wins."""

    low: float
    high: float
    option: Option


@dataclass(frozen=True)
class Breaks:
    """Which option wins in a scenario, by the value of one constant: stretches in ascending order.

    num_anomalies: points whose objective gets both better and worse as the constant rises. largest: the largest share
    by which one does (`reversal_share`).
    """

    scenario: str
    constant: Constant
    nominal: float
    stretches: tuple[Stretch, ...]
    num_anomalies: int = 0
    largest: float = 0.0

    @property
    def home(self) -> int:
        """The stretch that holds the value that the run was made with."""
        return next(place for place, one in enumerate(self.stretches) if self.nominal <= one.high)

    @property
    def near(self) -> float:
        """How far the nearest flip is, as a factor of the nominal value (above 1); infinite without one."""
        ends = [one.high for one in self.stretches[:-1]]
        return min((max(end / self.nominal, self.nominal / end) for end in ends), default=math.inf)

    def sentence(self, choose: Sequence[str]) -> str:
        """For a person: `g4: schedule.comm_engine = dma wins above x = 12 GB/s (now 46.6 GB/s), cu below`."""
        path, own = self.constant.path, self.stretches[self.home]
        now = f"{path} = {{}} (now {quantity_text(self.nominal, path)})"
        if len(self.stretches) == 1:
            ends = f"{quantity_text(own.low, path)} and {quantity_text(own.high, path)}"
            return f"{self.scenario}: no flip between {path} = {ends} (now {quantity_text(self.nominal, path)})"
        beside = self.stretches[max(0, self.home - 1) : self.home + 2]
        differing = [n for n in range(len(choose)) if len({one.option[n] for one in beside}) > 1]
        below = self.stretches[self.home - 1] if self.home else None
        above = self.stretches[self.home + 1] if self.home + 1 < len(self.stretches) else None
        limits = [quantity_text(end, path) for end, there in ((own.low, below), (own.high, above)) if there]
        where = "between" if below and above else "above" if below else "below"
        head = ", ".join(f"{choose[n]} = {own.option[n]}" for n in differing)
        sides: dict[str, list[str]] = {}
        for side, word in ((below, "below"), (above, "above")):
            if side:
                sides.setdefault(_said([side.option[n] for n in differing]), []).append(word)
        told = [f"{option} {' and '.join(words)}" for option, words in sides.items()]
        return f"{self.scenario}: {head} wins {where} {now.format(' and '.join(limits))}, {', '.join(told)}"


def breaks(found: Points, constant: Constant, asked: Asked, advance: Advance) -> list[Breaks]:
    """Where the winning option flips as one constant takes values from nominal / span to nominal x span."""
    objective = asked.objective
    factors = legal(found, constant, np.geomspace(1 / asked.span, asked.span, _STEPS))
    factors[np.argmin(np.abs(np.log(factors)))] = 1.0
    scanned = evaluate_batches(found, one_by_one(found, constant, factors), objective, advance)[:, 0]
    values, nominal = scanned.reshape(len(found.designs), len(factors)), found.nominal(constant.path)
    held = []
    for index in range(len(found.scenarios)):
        rows = found.rows(index)
        axis = constant.values(float(nominal[index]), factors).astype(float)
        held.append(_Search(found, constant, rows, (axis, values[rows], int(np.argmin(np.abs(np.log(factors)))))))
    while any(search.open for search in held):
        wanted = [(search, *search.asks()) for search in held if search.open]
        rows, numbers = (np.concatenate([one[place] for one in wanted]) for place in (1, 2))
        fresh = evaluate_batches(found, at(found, constant, rows, numbers), objective, advance)[:, 0]
        ends = np.cumsum([len(own) for _, own, _ in wanted])[:-1]
        for (search, _, _), got in zip(wanted, np.split(fresh, ends), strict=True):
            search.tell(got)
    turns = [reversal_share(values[found.rows(index)]) for index in range(len(found.scenarios))]
    return [
        Breaks(
            name,
            constant,
            float(nominal[index]),
            tuple(search.stretches()),
            int((turns[index] > _TURN).sum()),
            float(turns[index].max(initial=0.0)),
        )
        for index, (name, search) in enumerate(zip(found.scenarios, held, strict=True))
    ]


def reversal_share(values: Floats) -> Floats:
    """By how much values [R, G] above 0 go back on themselves, as a share [R]; 0 for those that only rise or only fall.

    That is the lesser of the largest rise and the largest fall between any two places, of those that are finite.
    """
    seen = np.isfinite(values)
    least = np.minimum.accumulate(np.where(seen, values, math.inf), axis=1)
    largest = np.maximum.accumulate(np.where(seen, values, 0.0), axis=1)
    rise = np.divide(values, least, out=np.ones_like(values), where=seen).max(axis=1, initial=1.0)
    fall = np.divide(largest, values, out=np.ones_like(values), where=seen).max(axis=1, initial=1.0)
    return np.asarray(np.minimum(rise, fall) - 1.0)


class _Search:
    """The winning option of one scenario over one constant, narrowed down where it flips.

    scanned: values [G] of the constant in ascending order, the objective of each point there [R, G] (inf: none), and
    the place of the nominal value.
    """

    def __init__(
        self, found: Points, constant: Constant, rows: NDArray[np.intp], scanned: tuple[Floats, Floats, int]
    ) -> None:
        axis, values, home = scanned
        self._rows, self._whole, self._options = rows, constant.whole, found.options
        self._places = found.option[rows]
        self._codes = np.unique(self._places)
        self._rank = np.argsort(np.argsort(self._by_option(values)[:, home], kind="stable"))
        unique, first = np.unique(axis, return_index=True)
        self._axis: list[float] = unique.tolist()
        self._ends = {value: values[:, place] for value, place in zip(self._axis, first.tolist(), strict=True)}
        self._winner = [self._best(best) for best in self._by_option(values[:, first]).T]
        self._asked: list[tuple[float, NDArray[np.intp]]] = []

    def _by_option(self, values: Floats) -> Floats:
        return np.stack([values[self._places == code].min(axis=0) for code in self._codes])

    def _best(self, options: Floats) -> int:
        """The place of the best option; of equal ones the one that ranks first at the nominal value."""
        least = options.min()
        tied = np.flatnonzero(options <= least + TIE * abs(least)) if np.isfinite(least) else np.arange(len(options))
        return int(tied[np.argmin(self._rank[tied])])

    @property
    def open(self) -> list[tuple[float, float]]:
        """Intervals that hold a flip and are still wide."""
        both = zip(self._axis, self._axis[1:], self._winner, self._winner[1:], strict=False)
        return [(low, high) for low, high, own, other in both if own != other and self._is_wide(low, high)]

    def _is_wide(self, low: float, high: float) -> bool:
        return high - low > 1 if self._whole else high > low * (1 + _PRECISE)

    def asks(self) -> tuple[NDArray[np.intp], Floats]:
        """Points [N] and the values [N] of the constant at which they are needed."""
        self._asked = []
        for low, high in self.open:
            inner = np.geomspace(low, high, _PARTS + 1)[1:-1]
            inner = np.unique(np.clip(np.rint(inner), low + 1, high - 1)) if self._whole else inner
            rows = np.union1d(self._rivals(low), self._rivals(high))
            self._asked += [(value, rows) for value in inner.tolist()]
        rows = np.concatenate([rows for _, rows in self._asked])
        return self._rows[rows], np.repeat([value for value, _ in self._asked], [len(rows) for _, rows in self._asked])

    def _rivals(self, end: float) -> NDArray[np.intp]:
        """The best point of each of the best options at a value that was looked at."""
        values = self._ends[end]
        best = [np.flatnonzero(self._places == code)[values[self._places == code].argmin()] for code in self._codes]
        order = np.lexsort((self._rank, values[best]))
        return np.array(best)[order[:_RIVALS]]

    def tell(self, values: Floats) -> None:
        """Take in what was asked for."""
        start = 0
        for value, rows in self._asked:
            column = np.full(len(self._rows), math.inf)
            column[rows] = values[start : start + len(rows)]
            start += len(rows)
            place = int(np.searchsorted(self._axis, value))
            self._axis.insert(place, value)
            self._ends[value] = column
            self._winner.insert(place, self._best(self._by_option(column[:, None])[:, 0]))

    def stretches(self) -> list[Stretch]:
        """Which option wins where."""
        told: list[Stretch] = []
        for value, winner in zip(self._axis, self._winner, strict=True):
            option = self._options[self._codes[winner]]
            if told and told[-1].option == option:
                told[-1] = replace(told[-1], high=value)
                continue
            between = value if self._whole or not told else math.sqrt(told[-1].high * value)
            if told and not self._whole:
                told[-1] = replace(told[-1], high=between)
            told.append(Stretch(between, value, option))
        return told


def _said(option: Sequence[Any]) -> str:
    return ", ".join("–" if one is None else str(one) for one in option)


# ---------------------------------------------------------------- the command


@dataclass(frozen=True)
class Asked:
    """What is asked of a run. goals: the objective first. span: factor by which a constant is moved either way."""

    run: Finished
    choose: tuple[str, ...]
    goals: Mapping[str, str]
    samples: int
    seed: int
    span: float

    @classmethod
    def of(cls, run: Finished, given: Mapping[str, str]) -> Asked:
        """Of what was typed. Raises ConfigError."""
        question = Question.of(run, given.get("objective", ""), given.get("choose", ""))
        numbers = [_number(given, "samples", (2, 100_000)), _number(given, "seed", (0, 2**32 - 1))]
        goals = {question.objective: question.goal, **run.goals}
        span = float(_number(given, "range", (2, 1000)))
        return cls(run, question.choose, goals, numbers[0], numbers[1], span)

    @property
    def objective(self) -> Mapping[str, str]:
        """The first of the goals alone."""
        name = next(iter(self.goals))
        return {name: self.goals[name]}


def _number(given: Mapping[str, str], name: str, ends: tuple[int, int]) -> int:
    low, high = ends
    if not given[name].isdigit() or not low <= int(given[name]) <= high:
        raise ConfigError([Problem(name, f"must be a whole number from {low} to {high}", given[name])])
    return int(given[name])


def uncertain_constants(typed: str, study: Mapping[str, float]) -> dict[str, float]:
    """Uncertain constants by path: those typed (`path=0.2,path=0.1`), else the study's. Raises ConfigError."""
    if not typed and not study:
        way = "declare them in study.uncertainty, or type vary=<path>=<share>,..."
        raise ConfigError([Problem("vary", "the study declares no uncertain constants", way_out=way)])
    found = dict(study) if not typed else dict[str, float]()
    for word in filter(None, typed.split(",")):
        path, _, share = word.partition("=")
        try:
            found[path] = float(share)
        except ValueError:
            rule = "is no path with a share"
            raise ConfigError([Problem("vary", rule, word, "write <path>=0.1 for 10 % either way")]) from None
    return found


@dataclass(frozen=True)
class Found:
    """What comes of it."""

    asked: Asked
    points: Points
    constants: Sequence[Constant]
    standings: Sequence[Standing]
    breaks: Sequence[Breaks]

    @property
    def notes(self) -> list[str]:
        """What must be known to read the numbers."""
        widths = ", ".join(f"{one.path} +- {100 * one.half_width:g} %" for one in self.constants)
        objective, samples = next(iter(self.asked.goals)), self.asked.samples
        return [
            f"declared assumptions: {widths}",
            f"{self.points.chosen}, evaluated again for {samples} samples of all constants at once (Latin hypercube, "
            f"uniform, seed {self.asked.seed})",
            f"regret: {objective} of the nominal winner over that of the best point of the sample, less one; of "
            "an option, with all other knobs tuned again",
            f"break-even: one constant at a time, from 1/{self.asked.span:g} to {self.asked.span:g} times its value, "
            f"options over {', '.join(self.asked.choose)} with all other knobs at their best",
        ]

    def json(self) -> dict[str, Any]:
        """As written."""
        told: dict[str, Any] = {"study": self.asked.run.name, "goals": dict(self.asked.goals)}
        told |= {"choose": list(self.asked.choose), "samples": self.asked.samples, "seed": self.asked.seed}
        told |= {"uncertainty": {one.path: one.half_width for one in self.constants}, "notes": self.notes}
        told |= {"scenarios": [one.json() for one in self.standings]}
        flips = [{"sentence": one.sentence(self.asked.choose), **row} for one in self.breaks for row in [_broken(one)]]
        return {**told, "break_even": flips}


def _broken(one: Breaks) -> dict[str, Any]:
    stretches = [{"low": part.low, "high": part.high, "option": list(part.option)} for part in one.stretches]
    named = {"scenario": one.scenario, "constant": one.constant.path, "nominal": one.nominal}
    return {**named, "stretches": stretches, "anomalies": one.num_anomalies, "largest_anomaly": one.largest}


def examine(asked: Asked, present: Present, typed: str) -> Found:
    """Evaluate the points of a run with other constants. Raises ConfigError."""
    planned = plan_again(asked.run, present)
    found = points(asked.run, planned, asked.choose, max(1, _MOST_EVALUATED // asked.samples))
    changing = constants(found, uncertain_constants(typed, planned.settings.study.uncertainty))
    size = len(found.designs)
    with bar(f"{asked.run.name}: robustness", size * (1 + asked.samples + _STEPS * len(changing))) as advance:
        nominal = evaluate_batches(found, together(found, changing, np.ones((1, len(changing)))), asked.goals, advance)
        _check_shares(asked, nominal)
        factors = draw_factors(changing, asked.samples, asked.seed)
        values = evaluate_batches(found, together(found, changing, factors), asked.goals, advance)
        held = standings(found, nominal, values.reshape(size, asked.samples, -1))
        flips = [one for each in changing for one in breaks(found, each, asked, advance)]
    return Found(asked, found, changing, held, flips)


def _check_shares(asked: Asked, nominal: Floats) -> None:
    """Refuse an objective of which shares mean nothing."""
    values = nominal[np.isfinite(nominal[:, 0]), 0]
    if not len(values) or values.min() <= 0 <= values.max():
        name = next(iter(asked.goals))
        raise ConfigError([Problem("objective", "is not above 0 throughout", name, "take another objective=")])


def command(words: Sequence[str]) -> int:
    """`robustness study=<name> [vary=<path>=<share>,...] [choose=...] [objective=...] [samples=64] [seed=0] [range=8]`

    `[config_dir=...] [command=...] [output_dir=outputs]`. Raises ConfigError.
    """
    known = {"study": "", "samples": "64", "seed": "0", "range": "8", "output_dir": "outputs"}
    given = pairs(words, known, optional=("vary", "choose", "objective", "config_dir", "command"))
    run = Finished.find(Path(given["output_dir"]), given["study"])
    found = examine(Asked.of(run, given), Present.of(given), given.get("vary", ""))
    _write(found)
    console = report.console()
    console.print(_table(found))
    for line in (*_flips(found), "", *_anomalies(found), *found.notes):
        console.print(line, soft_wrap=True, highlight=False)
    files = "robustness.json, robustness.csv, break_even.csv, figures/robustness and break_even .png and .svg"
    console.print(f"written to {run.folder}/ ({files})", soft_wrap=True)
    return 0


def _table(found: Found) -> Table:
    from rich.table import Table

    shown = Table(title=f"{found.asked.run.name}: {next(iter(found.asked.goals))} under uncertain constants")
    right = ("stays best", "option stays", "regret mean", "p95", "worst", "front stays")
    for name in ("scenario", "winner", *right, "instead", "least regret"):
        shown.add_column(name, justify="right" if name in right else "left", no_wrap=name == "winner")
    for one in found.standings:
        row = one.row()
        shares = [f"{100 * row[name]:.0f} %" for name in ("winner_stays", "option_stays")]
        lost = [f"{100 * row[f'regret_{name}']:.2f} %" for name in ("mean", "p95", "worst")]
        front = f"{100 * row['front_stays_mean']:.0f} %"
        instead = f"{row['instead']} ({100 * row['instead_wins']:.0f} %)" if row["instead"] else "–"
        shown.add_row(one.scenario, row["winner"], *shares, *lost, front, instead, _picked(one))
    return shown


def _picked(one: Standing) -> str:
    """The option with the least mean and the one with the least worst regret."""
    names = ("mean", "worst")
    picks = dict(zip(names, (one.least_mean, one.least_worst), strict=True))
    if set(picks.values()) == {one.winner}:
        return "the winner's option"
    told = {name: "the winner's" if option == one.winner else _said(option) for name, option in picks.items()}
    fared = {name: f"{100 * one.options[option][place]:.2f} %" for place, (name, option) in enumerate(picks.items())}
    return "; ".join(f"{name} {fared[name]}: {told[name]}" for name in names)


def _flips(found: Found) -> list[str]:
    """Break-even in sentences, the nearest flips first, then where there is none."""
    flips = sorted((one for one in found.breaks if len(one.stretches) > 1), key=lambda one: one.near)
    told = [one.sentence(found.asked.choose) for one in flips[:_FLIPS_SHOWN]]
    told += (
        [f"({len(flips) - _FLIPS_SHOWN} more flips are farther off, see break_even.csv)"]
        if flips[_FLIPS_SHOWN:]
        else []
    )
    for constant in found.constants:
        none = [one for one in found.breaks if one.constant == constant and len(one.stretches) == 1]
        if none:
            own, path = none[0].stretches[0], constant.path
            names = "all scenarios" if len(none) == len(found.points.scenarios) else ", ".join(n.scenario for n in none)
            told.append(
                f"no flip between {path} = {quantity_text(own.low, path)} and {quantity_text(own.high, path)}: {names}"
            )
    return told


def _anomalies(found: Found) -> list[str]:
    """Where more of something is both better and worse, by constant."""
    told = []
    for constant in found.constants:
        odd = [one for one in found.breaks if one.constant == constant and one.num_anomalies]
        if odd:
            worst, many = max(odd, key=lambda one: one.largest), sum(one.num_anomalies for one in odd)
            of = f"{next(iter(found.asked.goals))} of {many} of {len(found.points.designs)} points"
            most = f"by up to {100 * worst.largest:.2g} % ({worst.scenario}; docs/models.md)"
            told.append(f"anomalies: {of} both rises and falls over {constant.path}, {most}")
    return told


def _write(found: Found) -> None:
    import pandas as pd

    from dse import plots

    outputs = found.asked.run.outputs
    outputs.write_json("robustness", found.json())
    rows = [one.row() for one in found.standings]
    flips = [
        {"constant": one.constant.path, "scenario": one.scenario, "nominal": one.nominal, "low": part.low}
        | {"high": part.high, "option": _said(part.option), "now": place == one.home}
        for one in found.breaks
        for place, part in enumerate(one.stretches)
    ]
    for name, held in (("robustness", rows), ("break_even", flips)):
        with atomic_replacement(found.asked.run.folder / f"{name}.csv") as fresh:
            pd.DataFrame(held).to_csv(fresh, index=False)
    title = f"{found.asked.run.name}: {next(iter(found.asked.goals))}"
    plots.save(plots.robustness(rows, title), outputs.figures, "robustness")
    widths = {one.path: one.half_width for one in found.constants}
    plots.save(plots.break_even(flips, widths, title), outputs.figures, "break_even")
