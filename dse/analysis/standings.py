"""Standings of options when all uncertain constants vary: how often the best stays so, and its regret."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dse.analysis.contexts import TIE, Option
from dse.analysis.perturbation import Constant, Floats, RunPoints


@dataclass(frozen=True)
class ScenarioStanding:
    """One scenario's answer when all constants vary. Regrets are shares of the best objective, by sample.

    winner: the nominal winner's option; point: its place among the points. members: nominal front as (key, option,
    share of samples in which it stays). stays: share in which the winning point stays best. option_stays: share in
    which some point of its option is best, that is with all other knobs tuned again. kept: regret of keeping the
    winning point. options: mean and worst regret of each option, tuned again. instead: the option that is best most
    often where the winner's is not, with its share.
    """

    scenario: str
    winner: Option
    point: int
    members: tuple[tuple[str, Option, float], ...]
    stays: float
    option_stays: float
    kept: Floats
    options: Mapping[Option, tuple[float, float]]
    instead: tuple[Option, float] | None

    @property
    def least_mean(self) -> Option:
        """The option with the least mean regret; ties go to the winner."""
        # equal but for rounding
        return min(self.options, key=lambda option: (round(self.options[option][0], 9), option != self.winner))

    @property
    def least_worst(self) -> Option:
        """The option with the least worst regret."""
        return min(self.options, key=lambda option: (round(self.options[option][1], 9), option != self.winner))

    def row(self) -> dict[str, Any]:
        """Return the row of `robustness.csv`."""
        shares = [share for _, _, share in self.members]
        row = {"scenario": self.scenario, "winner": option_text(self.winner), "winner_stays": self.stays}
        row |= {"option_stays": self.option_stays, "regret_mean": float(self.kept.mean())}
        row |= {"regret_p95": float(np.quantile(self.kept, 0.95)), "regret_worst": float(self.kept.max())}
        row |= {"front": len(shares), "front_stays_mean": float(np.mean(shares)), "front_stays_least": min(shares)}
        row |= {
            "instead": option_text(self.instead[0]) if self.instead else "",
            "instead_wins": (self.instead or ("", 0))[1],
        }
        for name, option in (("mean", self.least_mean), ("worst", self.least_worst)):
            row |= {
                f"least_{name}": option_text(option),
                f"least_{name}_regret": self.options[option][name == "worst"],
            }
        return row

    def json(self) -> dict[str, Any]:
        """Return the row with every member of the front and every option."""
        members = [{"key": key, "option": list(option), "stays": share} for key, option, share in self.members]
        fared = [
            {"option": list(option), "mean": mean, "worst": worst} for option, (mean, worst) in self.options.items()
        ]
        return {**self.row(), "members": members, "options": fared}


def draw_factors(changing: Sequence[Constant], samples: int, seed: int) -> Floats:
    """Draw factors [samples, constants] from a Latin hypercube, uniform within each half-width."""
    from scipy.stats import qmc

    unit = qmc.LatinHypercube(len(changing), rng=np.random.default_rng(seed)).random(samples)
    halves = np.array([constant.half_width for constant in changing])
    return np.asarray(1 + halves * (2 * unit - 1))  # 0...1 to -1...1


def standings(run_points: RunPoints, nominal: Floats, values: Floats) -> list[ScenarioStanding]:
    """Summarise every scenario. nominal [R, objectives], values [R, samples, objectives]; smaller is better."""
    scenario_standings = []
    for index, name in enumerate(run_points.scenarios):
        rows = run_points.rows(index)
        if np.isfinite(nominal[rows, 0]).any():  # a scenario without a result has no answer
            scenario_standings.append(_scenario_standing(run_points, name, rows, (nominal[rows], values[rows])))
    return scenario_standings


def _scenario_standing(
    run_points: RunPoints, name: str, rows: NDArray[np.intp], objectives: tuple[Floats, Floats]
) -> ScenarioStanding:
    nominal, values = objectives
    regrets = regret(values[:, :, 0])
    winner = int(np.lexsort(nominal.T[::-1])[0])  # lexsort takes the last key first: the first objective decides
    places = run_points.option[rows]
    winner_place = places[winner]
    # all other knobs tuned again, in each sample
    fared = {place: regrets[places == place].min(axis=0) for place in np.unique(places).tolist()}
    best = np.array([fared[place] <= TIE for place in fared])
    lost = ~best[list(fared).index(winner_place)]  # samples in which the winner's option is not best
    win_shares = dict(zip(fared, (best & lost).mean(axis=1).tolist(), strict=True))
    rival = max(win_shares, key=lambda place: win_shares[place])
    keys = run_points.table["key"].to_numpy()[rows]
    stays = np.mean([on_front(values[:, sample]) for sample in range(values.shape[1])], axis=0)
    front = np.flatnonzero(on_front(nominal))
    return ScenarioStanding(
        scenario=name,
        winner=run_points.options[winner_place],
        point=int(rows[winner]),
        members=tuple((str(keys[row]), run_points.options[places[row]], float(stays[row])) for row in front),
        stays=float((regrets[winner] <= TIE).mean()),
        option_stays=float(1 - lost.mean()),
        kept=regrets[winner],
        options={
            run_points.options[place]: (float(option_regrets.mean()), float(option_regrets.max()))
            for place, option_regrets in fared.items()
        },
        instead=(run_points.options[rival], win_shares[rival]) if lost.any() else None,
    )


def regret(values: Floats) -> Floats:
    """Regret of each point [R, S]: the share by which it is worse than the best of its sample.

    A point without a result counts as the worst that has one.
    """
    finite = np.isfinite(values)
    filled = np.where(finite, values, np.max(np.where(finite, values, -math.inf), axis=0, keepdims=True))
    best = filled.min(axis=0, keepdims=True)
    # the best itself has no regret, also where it is 0
    return np.asarray(np.divide(filled - best, np.abs(best), out=np.zeros_like(filled), where=filled > best))


def on_front(values: Floats) -> NDArray[np.bool_]:
    """Mask of the points [R, objectives] on the Pareto front; points without a result are not on it."""
    import moocore

    rows = np.flatnonzero(np.isfinite(values).all(axis=1))
    marked = np.zeros(len(values), np.bool_)
    if len(rows):
        marked[rows] = moocore.is_nondominated(values[rows], keep_weakly=True)
    return marked


def option_text(option: Sequence[Any]) -> str:
    """An option as text: its values, with a dash for none."""
    return ", ".join("–" if value is None else str(value) for value in option)
