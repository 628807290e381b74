"""Robustness of a finished run's answer to its constants: the front under uncertainty, and where winners flip.

Constants are declared uncertain by a relative half-width. All of them are drawn at once by a seeded Latin hypercube,
uniformly within their widths, and the points of the run are evaluated again for each draw: how often do members of the
front and the winner stay the best, and what does keeping the winner cost? Each constant alone is then moved over a wide
range: where does another option win?
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dse.analysis import verdicts
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
from dse.analysis.standings import Standing, draw_factors, option_text, standings
from dse.errors import ConfigError, Problem, pairs
from dse.progress import bar
from dse.results import output_files, report
from dse.results.finished_run import Finished
from dse.study.plan_again import Present, plan_again
from dse.units import quantity_text

if TYPE_CHECKING:
    from rich.table import Table

_MOST_EVALUATED = 1_000_000  # points times samples
_STEPS = 25  # of a constant's range, on a logarithmic grid; odd, so that the nominal value is on the grid
_PARTS = 8  # of an interval with a flip, in each round of the search
_PRECISE = 1e-4  # relative width of an interval at which the search for a flip ends
_RIVALS = 4  # options to evaluate while a flip is narrowed down: the best at either end
_FLIPS_SHOWN = 16
_TURN = 1e-6  # share of an objective that is more than rounding


# ---------------------------------------------------------------- under uncertainty


# ---------------------------------------------------------------- break-even


@dataclass(frozen=True)
class Stretch:
    """Values of a constant, from low to high, over which one option wins."""

    low: float
    high: float
    option: Option


@dataclass(frozen=True)
class Breaks:
    """Winning options of a scenario by the value of one constant: stretches in ascending order.

    num_anomalies: points whose objective gets both better and worse as the constant rises. largest: the largest
    `reversal_share` of them.
    """

    scenario: str
    constant: Constant
    nominal: float
    stretches: tuple[Stretch, ...]
    num_anomalies: int = 0
    largest: float = 0.0

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
        if len(self.stretches) == 1:
            ends = f"{quantity_text(winning.low, path)} and {quantity_text(winning.high, path)}"
            return f"{self.scenario}: no flip between {path} = {ends} (now {quantity_text(self.nominal, path)})"
        beside = self.stretches[max(0, self.home - 1) : self.home + 2]
        differing = [n for n in range(len(choose)) if len({stretch.option[n] for stretch in beside}) > 1]
        below = self.stretches[self.home - 1] if self.home else None
        above = self.stretches[self.home + 1] if self.home + 1 < len(self.stretches) else None
        limits = [quantity_text(end, path) for end, there in ((winning.low, below), (winning.high, above)) if there]
        where = "between" if below and above else "above" if below else "below"
        head = ", ".join(f"{choose[n]} = {winning.option[n]}" for n in differing)
        sides: dict[str, list[str]] = {}
        for side, word in ((below, "below"), (above, "above")):
            if side:
                sides.setdefault(option_text([side.option[n] for n in differing]), []).append(word)
        side_texts = [f"{option} {' and '.join(words)}" for option, words in sides.items()]
        return f"{self.scenario}: {head} wins {where} {now.format(' and '.join(limits))}, {', '.join(side_texts)}"


def breaks(run_points: Points, constant: Constant, request: Asked, advance: Advance) -> list[Breaks]:
    """Find where the winning option flips as one constant goes from nominal / span to nominal x span."""
    objective = request.objective
    factors = legal(run_points, constant, np.geomspace(1 / request.span, request.span, _STEPS))
    factors[np.argmin(np.abs(np.log(factors)))] = 1.0
    scanned = evaluate_batches(run_points, one_by_one(run_points, constant, factors), objective, advance)[:, 0]
    values, nominal = scanned.reshape(len(run_points.designs), len(factors)), run_points.nominal(constant.path)
    searches = []
    for index in range(len(run_points.scenarios)):
        rows = run_points.rows(index)
        axis = constant.values(float(nominal[index]), factors).astype(float)
        searches.append(
            _Search(run_points, constant, rows, (axis, values[rows], int(np.argmin(np.abs(np.log(factors))))))
        )
    while any(search.open for search in searches):
        wanted = [(search, *search.asks()) for search in searches if search.open]
        rows, numbers = (np.concatenate([query[place] for query in wanted]) for place in (1, 2))
        fresh = evaluate_batches(run_points, at(run_points, constant, rows, numbers), objective, advance)[:, 0]
        ends = np.cumsum([len(query_rows) for _, query_rows, _ in wanted])[:-1]
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
        )
        for index, (name, search) in enumerate(zip(run_points.scenarios, searches, strict=True))
    ]


def reversal_share(values: Floats) -> Floats:
    """Share [R] by which values [R, G] above 0 reverse; 0 for rows that only rise or only fall.

    It is the lesser of the largest rise and the largest fall between any two finite places.
    """
    seen = np.isfinite(values)
    least = np.minimum.accumulate(np.where(seen, values, math.inf), axis=1)
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
        self, run_points: Points, constant: Constant, rows: NDArray[np.intp], scanned: tuple[Floats, Floats, int]
    ) -> None:
        axis, values, home = scanned
        self._rows, self._whole, self._options = rows, constant.whole, run_points.options
        self._places = run_points.option[rows]
        self._codes = np.unique(self._places)
        self._rank = np.argsort(np.argsort(self._by_option(values)[:, home], kind="stable"))
        unique, first = np.unique(axis, return_index=True)
        self._axis: list[float] = unique.tolist()
        self._ends = {value: values[:, place] for value, place in zip(self._axis, first.tolist(), strict=True)}
        self._winner = [self._best(best) for best in self._by_option(values[:, first]).T]
        self._pending: list[tuple[float, NDArray[np.intp]]] = []

    def _by_option(self, values: Floats) -> Floats:
        return np.stack([values[self._places == code].min(axis=0) for code in self._codes])

    def _best(self, options: Floats) -> int:
        """Place of the best option; ties go to the option that ranks first at the nominal value."""
        least = options.min()
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
            inner = np.geomspace(low, high, _PARTS + 1)[1:-1]
            inner = np.unique(np.clip(np.rint(inner), low + 1, high - 1)) if self._whole else inner
            rows = np.union1d(self._rivals(low), self._rivals(high))
            self._pending += [(value, rows) for value in inner.tolist()]
        rows = np.concatenate([rows for _, rows in self._pending])
        return self._rows[rows], np.repeat(
            [value for value, _ in self._pending], [len(rows) for _, rows in self._pending]
        )

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
            column = np.full(len(self._rows), math.inf)
            column[rows] = values[start : start + len(rows)]
            start += len(rows)
            place = int(np.searchsorted(self._axis, value))
            self._axis.insert(place, value)
            self._ends[value] = column
            self._winner.insert(place, self._best(self._by_option(column[:, None])[:, 0]))

    def stretches(self) -> list[Stretch]:
        """Merge neighbouring values with the same winner into stretches."""
        merged: list[Stretch] = []
        for value, winner in zip(self._axis, self._winner, strict=True):
            option = self._options[self._codes[winner]]
            if merged and merged[-1].option == option:
                merged[-1] = replace(merged[-1], high=value)
                continue
            between = value if self._whole or not merged else math.sqrt(merged[-1].high * value)
            if merged and not self._whole:
                merged[-1] = replace(merged[-1], high=between)
            merged.append(Stretch(between, value, option))
        return merged


# ---------------------------------------------------------------- the command


@dataclass(frozen=True)
class Asked:
    """Robustness question to a run. goals: the objective first. span: factor to move a constant by, either way."""

    run: Finished
    choose: tuple[str, ...]
    goals: Mapping[str, str]
    samples: int
    seed: int
    span: float

    @classmethod
    def of(cls, run: Finished, arguments: Mapping[str, str]) -> Asked:
        """Build the question from the typed words. Raises ConfigError."""
        question = Question.of(run, arguments.get("objective", ""), arguments.get("choose", ""))
        numbers = [_number(arguments, "samples", (2, 100_000)), _number(arguments, "seed", (0, 2**32 - 1))]
        goals = {question.objective: question.goal, **run.goals}
        span = float(_number(arguments, "range", (2, 1000)))
        return cls(run, question.choose, goals, numbers[0], numbers[1], span)

    @property
    def objective(self) -> Mapping[str, str]:
        """The first goal, by name."""
        name = next(iter(self.goals))
        return {name: self.goals[name]}


def _number(arguments: Mapping[str, str], name: str, ends: tuple[int, int]) -> int:
    low, high = ends
    if not arguments[name].isdigit() or not low <= int(arguments[name]) <= high:
        raise ConfigError([Problem(name, f"must be a whole number from {low} to {high}", arguments[name])])
    return int(arguments[name])


def uncertain_constants(typed: str, study: Mapping[str, float]) -> dict[str, float]:
    """Return half-widths by path: the typed ones (`path=0.2,path=0.1`), else the study's. Raises ConfigError."""
    if not typed and not study:
        way = "declare them in study.uncertainty, or type vary=<path>=<share>,..."
        raise ConfigError([Problem("vary", "the study declares no uncertain constants", way_out=way)])
    shares = dict(study) if not typed else dict[str, float]()
    for word in filter(None, typed.split(",")):
        path, _, share = word.partition("=")
        try:
            shares[path] = float(share)
        except ValueError:
            rule = "is no path with a share"
            raise ConfigError([Problem("vary", rule, word, "write <path>=0.1 for 10 % either way")]) from None
    return shares


@dataclass(frozen=True)
class Found:
    """Answer to an `Asked`: one standing per scenario, one `Breaks` per constant and scenario."""

    asked: Asked
    points: Points
    constants: Sequence[Constant]
    standings: Sequence[Standing]
    breaks: Sequence[Breaks]

    @property
    def notes(self) -> list[str]:
        """Assumptions behind the numbers, for the reader."""
        widths = ", ".join(f"{constant.path} +- {100 * constant.half_width:g} %" for constant in self.constants)
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
        """Return the content of `robustness.json`."""
        document: dict[str, Any] = {"study": self.asked.run.name, "goals": dict(self.asked.goals)}
        document |= {"choose": list(self.asked.choose), "samples": self.asked.samples, "seed": self.asked.seed}
        document |= {
            "uncertainty": {constant.path: constant.half_width for constant in self.constants},
            "notes": self.notes,
        }
        document["scenarios"] = [standing.json() for standing in self.standings]
        flips = [{"sentence": flip.sentence(self.asked.choose), **_breaks_json(flip)} for flip in self.breaks]
        return {**document, "break_even": flips}


def _breaks_json(scenario_breaks: Breaks) -> dict[str, Any]:
    stretches = [
        {"low": part.low, "high": part.high, "option": list(part.option)} for part in scenario_breaks.stretches
    ]
    named = {
        "scenario": scenario_breaks.scenario,
        "constant": scenario_breaks.constant.path,
        "nominal": scenario_breaks.nominal,
    }
    return {
        **named,
        "stretches": stretches,
        "anomalies": scenario_breaks.num_anomalies,
        "largest_anomaly": scenario_breaks.largest,
    }


def examine(request: Asked, present: Present, typed: str) -> Found:
    """Evaluate the points of a run with other constants. Raises ConfigError."""
    planned = plan_again(request.run, present)
    run_points = points(request.run, planned, request.choose, max(1, _MOST_EVALUATED // request.samples))
    changing = constants(run_points, uncertain_constants(typed, planned.settings.study.uncertainty))
    size = len(run_points.designs)
    with bar(f"{request.run.name}: robustness", size * (1 + request.samples + _STEPS * len(changing))) as advance:
        nominal = evaluate_batches(
            run_points, together(run_points, changing, np.ones((1, len(changing)))), request.goals, advance
        )
        _check_shares(request, nominal)
        factors = draw_factors(changing, request.samples, request.seed)
        values = evaluate_batches(run_points, together(run_points, changing, factors), request.goals, advance)
        scenario_standings = standings(run_points, nominal, values.reshape(size, request.samples, -1))
        flips = [flip for constant in changing for flip in breaks(run_points, constant, request, advance)]
    return Found(request, run_points, changing, scenario_standings, flips)


def _check_shares(request: Asked, nominal: Floats) -> None:
    """Refuse an objective that is not of one sign, since shares of it mean nothing."""
    values = nominal[np.isfinite(nominal[:, 0]), 0]
    if not len(values) or values.min() <= 0 <= values.max():
        name = next(iter(request.goals))
        raise ConfigError([Problem("objective", "is not above 0 throughout", name, "take another objective=")])


@output_files.working_on_folders
def command(words: Sequence[str]) -> int:
    """`robustness study=<name> [vary=<path>=<share>,...] [choose=...] [objective=...] [samples=64] [seed=0] [range=8]`

    `[config_dir=...] [command=...] [output_dir=outputs]`, or `claims=true` for verdicts on published claims instead
    (`dse.analysis.verdicts`). Raises ConfigError.
    """
    defaults = {"study": "", "samples": "64", "seed": "0", "range": "8", "output_dir": "outputs", "claims": "false"}
    arguments = pairs(words, defaults, optional=("vary", "choose", "objective", "config_dir", "command"))
    run = Finished.find(Path(arguments["output_dir"]), arguments["study"])
    if arguments["claims"] == "true":
        return verdicts.command(run, Present.of(arguments))
    findings = examine(Asked.of(run, arguments), Present.of(arguments), arguments.get("vary", ""))
    _write(findings)
    console = report.console()
    console.print(_table(findings))
    for line in (*_flips(findings), "", *_anomalies(findings), *findings.notes):
        console.print(line, soft_wrap=True, highlight=False)
    files = "robustness.json, robustness.csv, break_even.csv, figures/robustness and break_even .png and .svg"
    console.print(f"written to {run.folder}/ ({files})", soft_wrap=True)
    return 0


def _table(findings: Found) -> Table:
    from rich.table import Table

    shown = Table(title=f"{findings.asked.run.name}: {next(iter(findings.asked.goals))} under uncertain constants")
    right = ("stays best", "option stays", "regret mean", "p95", "worst", "front stays")
    for name in ("scenario", "winner", *right, "instead", "least regret"):
        shown.add_column(name, justify="right" if name in right else "left", no_wrap=name == "winner")
    for standing in findings.standings:
        row = standing.row()
        shares = [f"{100 * row[name]:.0f} %" for name in ("winner_stays", "option_stays")]
        lost = [f"{100 * row[f'regret_{name}']:.2f} %" for name in ("mean", "p95", "worst")]
        front = f"{100 * row['front_stays_mean']:.0f} %"
        instead = f"{row['instead']} ({100 * row['instead_wins']:.0f} %)" if row["instead"] else "–"
        shown.add_row(standing.scenario, row["winner"], *shares, *lost, front, instead, _least_regret_text(standing))
    return shown


def _least_regret_text(standing: Standing) -> str:
    """Describe the option with the least mean regret and the one with the least worst regret."""
    names = ("mean", "worst")
    picks = dict(zip(names, (standing.least_mean, standing.least_worst), strict=True))
    if set(picks.values()) == {standing.winner}:
        return "the winner's option"
    option_texts = {
        name: "the winner's" if option == standing.winner else option_text(option) for name, option in picks.items()
    }
    fared = {
        name: f"{100 * standing.options[option][place]:.2f} %" for place, (name, option) in enumerate(picks.items())
    }
    return "; ".join(f"{name} {fared[name]}: {option_texts[name]}" for name in names)


def _flips(findings: Found) -> list[str]:
    """Describe break-evens, the nearest flips first, then the constants without a flip."""
    flips = sorted((flip for flip in findings.breaks if len(flip.stretches) > 1), key=lambda flip: flip.near)
    lines = [flip.sentence(findings.asked.choose) for flip in flips[:_FLIPS_SHOWN]]
    lines += (
        [f"({len(flips) - _FLIPS_SHOWN} more flips are farther off, see break_even.csv)"]
        if flips[_FLIPS_SHOWN:]
        else []
    )
    for constant in findings.constants:
        none = [flip for flip in findings.breaks if flip.constant == constant and len(flip.stretches) == 1]
        if none:
            stretch, path = none[0].stretches[0], constant.path
            names = (
                "all scenarios" if len(none) == len(findings.points.scenarios) else ", ".join(n.scenario for n in none)
            )
            low, high = quantity_text(stretch.low, path), quantity_text(stretch.high, path)
            lines.append(f"no flip between {path} = {low} and {high}: {names}")
    return lines


def _anomalies(findings: Found) -> list[str]:
    """Describe objectives that both rise and fall over a constant."""
    lines = []
    for constant in findings.constants:
        odd = [flip for flip in findings.breaks if flip.constant == constant and flip.num_anomalies]
        if odd:
            worst, num_points = max(odd, key=lambda flip: flip.largest), sum(flip.num_anomalies for flip in odd)
            of = f"{next(iter(findings.asked.goals))} of {num_points} of {len(findings.points.designs)} points"
            most = f"by up to {100 * worst.largest:.2g} % ({worst.scenario}; docs/explanation/costs.md)"
            lines.append(f"anomalies: {of} both rises and falls over {constant.path}, {most}")
    return lines


def _write(findings: Found) -> None:
    import pandas as pd

    from dse import plots
    from dse.plots import comparisons

    outputs = findings.asked.run.outputs
    outputs.write_json("robustness", findings.json())
    rows = [standing.row() for standing in findings.standings]
    flips = [
        {"constant": flip.constant.path, "scenario": flip.scenario, "nominal": flip.nominal, "low": part.low}
        | {"high": part.high, "option": option_text(part.option), "now": place == flip.home}
        for flip in findings.breaks
        for place, part in enumerate(flip.stretches)
    ]
    widths = {constant.path: constant.half_width for constant in findings.constants}
    for name, records in (("robustness", rows), ("break_even", flips)):
        outputs.write_text(f"{name}.csv", pd.DataFrame(records).to_csv(index=False))
    plots.save(partial(comparisons.robustness, rows), outputs.figures, "robustness")
    plots.save(partial(comparisons.break_even, flips, widths), outputs.figures, "break_even")
