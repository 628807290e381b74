"""Robustness of a finished run's answer to its constants: the front under uncertainty, and where winners flip.

Constants are declared uncertain by a relative half-width. All of them are drawn at once by a seeded Latin hypercube,
uniformly within their widths, and the points of the run are evaluated again for each draw: how often do members of the
front and the winner stay the best, and what does keeping the winner cost? Each constant alone is then moved over a wide
range: where does another option win? What 1 % more of each number of the machine does to the winners is added
(`dse.analysis.elasticities`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dse.analysis import verdicts
from dse.analysis.break_even import STEPS, Breaks, breaks
from dse.analysis.contexts import ContextQuestion
from dse.analysis.elasticities import Elasticity, elasticities, strongest, table
from dse.analysis.perturbation import (
    Constant,
    Floats,
    RunPoints,
    constants,
    evaluate_batches,
    points,
    together,
)
from dse.analysis.standings import ScenarioStanding, draw_factors, option_text, standings
from dse.errors import ConfigError, Problem, pairs
from dse.errors.parsing import whole_number
from dse.errors.terminal import bar
from dse.results import output_files
from dse.results.decisions import DRAWN_TIMES, Drawing
from dse.results.run_folder import CommandAnswer, FinishedRun
from dse.study.plan_again import Present, plan_again
from dse.values.units import quantity_text

if TYPE_CHECKING:
    from rich.table import Table

_MOST_EVALUATED = 1_000_000  # points times samples
_MOST_DRAWN = 200  # points, whose graphs are built one by one
_FLIPS_SHOWN = 16  # lines; break_even.csv has all


@dataclass(frozen=True)
class RobustnessQuestion:
    """Robustness question to a run. goals: the objective first. span: factor to move a constant by, either way."""

    run: FinishedRun
    choose: tuple[str, ...]
    goals: Mapping[str, str]
    samples: int
    seed: int
    span: float

    @classmethod
    def of(cls, run: FinishedRun, arguments: Mapping[str, str]) -> RobustnessQuestion:
        """Build the question from the typed words. Raises ConfigError."""
        question = ContextQuestion.of(run, arguments.get("objective", ""), arguments.get("choose", ""))
        numbers = [_number(arguments, "samples", (2, 100_000)), _number(arguments, "seed", (0, 2**32 - 1))]
        goals = {question.objective: question.goal, **run.goals}  # the chosen objective first: it decides
        span = float(_number(arguments, "range", (2, 1000)))
        return cls(run, question.choose, goals, numbers[0], numbers[1], span)

    @property
    def objective(self) -> Mapping[str, str]:
        """The first goal, by name."""
        name = next(iter(self.goals))
        return {name: self.goals[name]}


def _number(arguments: Mapping[str, str], name: str, ends: tuple[int, int]) -> int:
    low, high = ends
    number = whole_number(arguments[name])
    if number is None or not low <= number <= high:
        raise ConfigError([Problem(name, f"must be a whole number from {low} to {high}", arguments[name])])
    return number


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
class RobustnessAnswer:
    """One standing per scenario, one `Breaks` per constant and scenario, and elasticities.

    idle: declared constants that change the objective of no point. with_errors: whether predictions have drawn errors.
    """

    asked: RobustnessQuestion
    points: RunPoints
    constants: Sequence[Constant]
    standings: Sequence[ScenarioStanding]
    breaks: Sequence[Breaks]
    elasticities: Sequence[Elasticity]
    idle: Sequence[str] = ()
    with_errors: bool = False

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
            *(["errors of predictions are drawn as well (conf/data/residuals)"] if self.with_errors else []),
            *([f"declared, but without effect on {objective} here: {', '.join(self.idle)}"] if self.idle else []),
        ]

    def json(self) -> dict[str, Any]:
        """Return the content of `robustness.json`."""
        document: dict[str, Any] = {"study": self.asked.run.name, "goals": dict(self.asked.goals)}
        document |= {"choose": list(self.asked.choose), "samples": self.asked.samples, "seed": self.asked.seed}
        document["uncertainty"] = {constant.path: constant.half_width for constant in self.constants}
        document["notes"] = self.notes
        document["scenarios"] = [standing.json() for standing in self.standings]
        flips = [{"sentence": flip.sentence(self.asked.choose), **flip.json()} for flip in self.breaks]
        return {
            **document,
            "break_even": flips,
            "elasticities": [elasticity.json() for elasticity in self.elasticities],
        }


def examine(request: RobustnessQuestion, present: Present, typed: str) -> RobustnessAnswer:
    """Evaluate the points of a run with other constants. Raises ConfigError."""
    planned = plan_again(request.run, present)
    # fewer points where samples are many: their product takes the time
    run_points = points(request.run, planned, request.choose, max(1, _MOST_EVALUATED // request.samples))
    declared = uncertain_constants(typed, planned.settings.study.uncertainty)
    # typed constants must exist, those of a study are declared for all its options
    absent = [path for path in declared if not typed and not run_points.holders(path).size]
    absent = absent if len(absent) < len(declared) else []  # all of them are refused, with the way out
    changing = constants(run_points, {path: half for path, half in declared.items() if path not in absent})
    size = len(run_points.designs)
    with bar(f"{request.run.name}: robustness", size * (1 + request.samples + STEPS * len(changing))) as advance:
        # factors of 1: by the same way as the samples, so that the two are comparable
        nominal = evaluate_batches(
            run_points, together(run_points, changing, np.ones((1, len(changing)))), request.goals, advance
        )
        _check_shares(request, nominal)
        factors = draw_factors(changing, request.samples, request.seed)
        values = evaluate_batches(run_points, together(run_points, changing, factors), request.goals, advance)
        values = values.reshape(size, request.samples, -1)
        off = _prediction_errors(request, run_points, nominal)
        if off is not None:
            values[:, :, 0] *= off
        scenario_standings = standings(run_points, nominal, values)
        flips = [
            flip
            for constant in changing
            for flip in breaks(run_points, constant, request.objective, request.span, advance)
        ]
        idle = [path for path in declared if not any(flip.is_read for flip in flips if flip.constant.path == path)]
        slopes = elasticities(run_points, scenario_standings, next(iter(request.goals)))
    done = RobustnessAnswer(request, run_points, changing, scenario_standings, flips, slopes, idle)
    return replace(done, with_errors=off is not None)


def _prediction_errors(request: RobustnessQuestion, run_points: RunPoints, nominal: Floats) -> Floats | None:
    """Drawn errors of predictions [R, S], as factors on the objective; None where the backend draws none of it.

    Points that are far from the best of their scenario have the errors of that one: they never win.
    """
    backend, objective = run_points.plan.backend, next(iter(request.goals))
    if objective not in DRAWN_TIMES or not isinstance(backend, Drawing):
        return None
    off = np.ones((len(nominal), request.samples))
    most = max(2, _MOST_DRAWN // len(run_points.scenarios))
    for scenario in range(len(run_points.scenarios)):
        rows = run_points.rows(scenario)
        ordered = rows[np.argsort(nominal[rows, 0], kind="stable")]
        near = ordered[np.isfinite(nominal[ordered, 0])][:most]
        if len(near):
            designs = [run_points.designs[row] for row in near]
            times, _ = backend.draw(designs, samples=request.samples, seed=request.seed)
            factors = times / nominal[near, :1]
            off[rows] = factors[0]
            off[near] = factors
    return off


def _check_shares(request: RobustnessQuestion, nominal: Floats) -> None:
    """Refuse an objective that is not of one sign, since shares of it mean nothing."""
    values = nominal[np.isfinite(nominal[:, 0]), 0]
    if not len(values) or values.min() <= 0 <= values.max():
        name = next(iter(request.goals))
        raise ConfigError([Problem("objective", "is not above 0 throughout", name, "take another objective=")])


@output_files.working_on_folders
def command(words: Sequence[str]) -> CommandAnswer:
    """`results robustness study=<name> [vary=<path>=<share>,...] [choose=...] [objective=...] [samples=64] [seed=0]`

    `[range=8] [config_dir=...] [command=...] [output_dir=outputs]`, or `claims=true` for verdicts on published claims
    (`dse.analysis.verdicts`). Raises ConfigError.
    """
    defaults = {"study": "", "samples": "64", "seed": "0", "range": "8", "output_dir": "outputs", "claims": "false"}
    arguments = pairs(words, defaults, optional=("vary", "choose", "objective", "config_dir", "command"))
    run = FinishedRun.find(Path(arguments["output_dir"]), arguments["study"])
    if arguments["claims"] == "true":
        return verdicts.command(run, Present.of(arguments))
    findings = examine(RobustnessQuestion.of(run, arguments), Present.of(arguments), arguments.get("vary", ""))
    _write(findings)
    tables = [_table(findings), *([table(findings.elasticities)] if findings.elasticities else [])]
    lines = [*_flips(findings), "", *_anomalies(findings), *findings.notes]
    files = "robustness, break_even and elasticities: .csv, and .png and .svg in figures/; robustness.json has all"
    return CommandAnswer(run.folder, (*tables, *lines, f"written to {run.folder}/ ({files})"), "robustness")


def _table(findings: RobustnessAnswer) -> Table:
    from rich.table import Table

    shown = Table(title=f"{findings.asked.run.name}: {next(iter(findings.asked.goals))} under uncertain constants")
    right = ("stays best", "option stays", "regret mean", "p95", "worst", "front stays")
    whole = ("winner", *right) if all(len(option_text(one.winner)) < 40 for one in findings.standings) else right
    for name in ("scenario", "winner", *right, "instead", "least regret"):
        shown.add_column(name, justify="right" if name in right else "left", no_wrap=name in whole)
    for standing in findings.standings:
        row = standing.row()
        shares = [f"{100 * row[name]:.0f} %" for name in ("winner_stays", "option_stays")]
        lost = [f"{100 * row[f'regret_{name}']:.2f} %" for name in ("mean", "p95", "worst")]
        front = f"{100 * row['front_stays_mean']:.0f} %"
        instead = f"{row['instead']} ({100 * row['instead_wins']:.0f} %)" if row["instead"] else "–"
        shown.add_row(standing.scenario, row["winner"], *shares, *lost, front, instead, _least_regret_text(standing))
    return shown


def _least_regret_text(standing: ScenarioStanding) -> str:
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


def _flips(findings: RobustnessAnswer) -> list[str]:
    """Describe break-evens, the nearest flips first, then the constants without a flip."""
    flips = sorted((flip for flip in findings.breaks if len(flip.stretches) > 1), key=lambda flip: flip.near)
    lines = [flip.sentence(findings.asked.choose) for flip in flips[:_FLIPS_SHOWN]]
    if flips[_FLIPS_SHOWN:]:
        lines.append(f"({len(flips) - _FLIPS_SHOWN} more flips are farther off, see break_even.csv)")
    for constant in findings.constants:
        of = [flip for flip in findings.breaks if flip.constant == constant and flip.is_read]
        none = [flip for flip in of if len(flip.stretches) == 1]
        if none:
            stretch, path, names = none[0].stretches[0], constant.path, ", ".join(flip.scenario for flip in none)
            names = "all scenarios" if len(none) == len(findings.points.scenarios) else names
            low, high = quantity_text(stretch.low, path), quantity_text(stretch.high, path)
            lines.append(f"no flip between {path} = {low} and {high}: {names}")
    return lines


def _anomalies(findings: RobustnessAnswer) -> list[str]:
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


def _write(findings: RobustnessAnswer) -> None:
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
    slopes = [elasticity.row() for elasticity in findings.elasticities]
    for name, records in (("robustness", rows), ("break_even", flips), ("elasticities", slopes)):
        outputs.write_text(f"{name}.csv", pd.DataFrame(records).to_csv(index=False))
    plots.save(partial(comparisons.robustness, rows), outputs.figures, "robustness")
    plots.save(partial(comparisons.break_even, flips, widths), outputs.figures, "break_even")
    if slopes:
        shown = [elasticity.row() for _, ones in strongest(findings.elasticities) for elasticity in ones]
        plots.save(partial(comparisons.elasticities, shown), outputs.figures, "elasticities")
