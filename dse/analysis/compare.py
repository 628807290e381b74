"""Comparison of two finished runs: whose winners and fronts are better, differences in configuration and code.

Objectives are compared scenario by scenario, each scaled so that the best value on either front is 0 and the worst is 1
(a scale common to both runs); smaller is better. The hypervolume is the share of the box up to 1.1 in every
objective that a front dominates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dse.analysis.compared_winners import ComparedWinner, as_json, compared_winners, winners_table
from dse.errors import ConfigError, Problem, pairs
from dse.results import output_files, provenance, report
from dse.results.output_files import plain_folder
from dse.results.pareto import minimized
from dse.results.run_folder import CommandAnswer, FinishedRun, Outputs, read

if TYPE_CHECKING:
    from rich.table import Table

Floats = NDArray[np.float64]
REFERENCE = 1.1
"""The reference point, in every objective as scaled: a tenth beyond the worst value on either front."""
_LABELS = ("description", "question", "note", "paper", "sources", "output_dir")
_STEPS = 40  # of a curve


# ---------------------------------------------------------------- configuration and code


def flat(tree: Any, path: str = "") -> dict[str, Any]:
    """Dotted path -> value of a configuration, without labels for people; a list is one value."""
    if not isinstance(tree, Mapping):
        return {path: tree}
    parts = (flat(value, f"{path}.{name}".lstrip(".")) for name, value in tree.items() if name not in _LABELS)
    return {name: value for part in parts for name, value in part.items()}


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Dotted path -> (old value, new value) where two configurations differ; None where one has no value."""
    before, now = flat(old), flat(new)
    # a value of None is not the same as no value
    return {
        path: (before.get(path), now.get(path))
        for path in dict.fromkeys([*before, *now])
        if before.get(path) != now.get(path) or (path in before) != (path in now)
    }


def made_otherwise(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Differences in the provenance of two runs that may matter: backend, seed, code, libraries, machine."""
    settings = [
        f"{name} {old.get(name)} -> {new.get(name)}" for name in ("backend", "seed") if old.get(name) != new.get(name)
    ]
    return [*settings, *provenance.changes(old, new)]


# ---------------------------------------------------------------- fronts


@dataclass(frozen=True)
class ComparedPoints:
    """The points of one scenario of a run that have a result, in the order of the table.

    values [N, objectives]: smaller is better, so maximized objectives have their sign turned. numbers [N]: how many of
    the `total` points of the scenario had been evaluated once this one was.
    """

    values: Floats
    numbers: NDArray[np.intp]
    total: int

    @property
    def front(self) -> Floats:
        """Distinct members of the Pareto front, [front, objectives]."""
        return _front(self.values)


@dataclass(frozen=True)
class Pair:
    """One scenario of both runs."""

    scenario: str
    first: ComparedPoints
    second: ComparedPoints

    @property
    def scale(self) -> tuple[Floats, Floats]:
        """(ideal [objectives], extent [objectives]) of both fronts together; an extent of 0 becomes 1."""
        both = np.concatenate([self.first.front, self.second.front])
        extent = np.ptp(both, axis=0)
        return both.min(axis=0), np.where(extent > 0, extent, 1.0)

    def scale_objectives(self, values: Floats) -> Floats:
        """Objectives [N, objectives] such that the best of both fronts is 0 and the worst is 1."""
        ideal, extent = self.scale
        return np.asarray((values - ideal) / extent)

    def row(self, *, factors: bool) -> dict[str, Any]:
        """Measures of both fronts, first run first. factors: whether epsilon is a factor of raw values, else scaled."""
        first, second = self.first.front, self.second.front
        measured = (first, second) if factors else (self.scale_objectives(first), self.scale_objectives(second))
        ideal, extent = self.scale
        # `equal` compares each member with each, [front, front]
        return {
            "scenario": self.scenario,
            "evaluated": [self.first.total, self.second.total],
            "front": [len(first), len(second)],
            "equal": int((first[:, None] == second[None]).all(axis=2).any(axis=1).sum()),
            "dominated": [_count_dominated(first, second), _count_dominated(second, first)],
            "hypervolume": [_hypervolume(self.scale_objectives(first)), _hypervolume(self.scale_objectives(second))],
            "epsilon": [_epsilon(*measured, factors), _epsilon(*measured[::-1], factors)],
            "ideal": ideal.tolist(),
            "reference": (ideal + REFERENCE * extent).tolist(),
        }

    def curve(self, points: ComparedPoints) -> tuple[Floats, Floats]:
        """Progress of one of the runs: (points evaluated [steps], hypervolume by then [steps])."""
        # fine at the start, where progress is fast
        steps = np.unique(np.geomspace(1, points.total, _STEPS).round().astype(int))
        reached, front = [], points.values[:0]
        for before, now in zip([0, *steps[:-1]], steps, strict=True):
            fresh = points.values[(points.numbers > before) & (points.numbers <= now)]
            front = _front(np.concatenate([front, fresh])) if len(fresh) else front
            reached.append(_hypervolume(self.scale_objectives(front)) if len(front) else 0.0)
        return steps.astype(float), np.array(reached)


def _front(values: Floats) -> Floats:
    import moocore

    return np.asarray(np.unique(values[moocore.is_nondominated(values, keep_weakly=False)], axis=0))


def _count_dominated(front: Floats, other: Floats) -> int:
    """Number of members of a front that some member of the other front dominates."""
    # no worse in any objective, and better in one
    return int(sum(((other <= member).all(axis=1) & (other < member).any(axis=1)).any() for member in front))


def _hypervolume(front: Floats) -> float:
    """Hypervolume of scaled points, as a share of the box from the ideal to the reference point."""
    import moocore

    inside = front[(front < REFERENCE).all(axis=1)]  # what is beyond the reference point dominates nothing of the box
    if not len(inside):
        return 0.0
    return float(moocore.hypervolume(inside, ref=[REFERENCE] * front.shape[1]) / REFERENCE ** front.shape[1])


def _epsilon(front: Floats, other: Floats, multiplicative: bool) -> float:
    """Improvement that a front needs to be nowhere worse than the other: a factor, or a sum."""
    import moocore

    return float((moocore.epsilon_mult if multiplicative else moocore.epsilon_additive)(front, ref=other))


@dataclass(frozen=True)
class RunComparison:
    """Comparison of two runs. winners: of each scenario of both. rows: of `Pair.row`. unit: of the first objective.
    why_not: what could not be compared, with the reason.

    curves: scenario -> of each run, points evaluated and hypervolume. attainment: rectangles [R, 5], see
    `attainment_difference`.
    """

    names: tuple[str, str]
    winners: Sequence[ComparedWinner]
    unit: str
    config: Mapping[str, tuple[Any, Any]]
    made: Sequence[str]
    counts: Sequence[Mapping[str, Any]]
    goals: Mapping[str, str]
    epsilon: str
    rows: Sequence[Mapping[str, Any]]
    curves: Mapping[str, tuple[tuple[Floats, Floats], tuple[Floats, Floats]]]
    attainment: Floats | None
    why_not: Mapping[str, str]

    def json(self) -> dict[str, Any]:
        """Record that compare.json holds."""
        record: dict[str, Any] = {"a": self.names[0], "b": self.names[1], "why_not": dict(self.why_not)}
        record |= {"winners": as_json(self.winners)}
        record |= {"config": {path: list(pair) for path, pair in self.config.items()}, "made": list(self.made)}
        record |= {"counts": list(self.counts), "goals": dict(self.goals), "reference": REFERENCE}
        record |= {"epsilon": self.epsilon, "fronts": list(self.rows)}
        kinds = ("evaluated", "hypervolume")
        curves = {
            name: [dict(zip(kinds, map(np.ndarray.tolist, curve), strict=True)) for curve in both]
            for name, both in self.curves.items()
        }
        # rectangles may be open to infinity, which JSON does not have
        finite = None if self.attainment is None else np.minimum(self.attainment, REFERENCE).tolist()
        return {**record, "curves": curves, "attainment": finite}


def compare_runs(first: FinishedRun, second: FinishedRun) -> RunComparison:
    """Compare two finished runs."""
    why_not: dict[str, str] = {}
    pairs_: list[Pair] = []
    if first.goals == second.goals:
        pairs_ = _pairs(_points(first, first.goals), _points(second, first.goals), why_not)
    else:
        goals = ["; ".join(f"{goal} {name}" for name, goal in run.goals.items()) for run in (first, second)]
        rule = (
            f"the objectives differ ({goals[0]} | {goals[1]}): run one of them again with the other's study.objectives"
        )
        why_not["fronts, hypervolume and attainment"] = rule
    # a factor means nothing of values about 0
    factors = bool(pairs_) and all((points.values > 0).all() for pair in pairs_ for points in (pair.first, pair.second))
    return RunComparison(
        (first.name, second.name),
        compared_winners(first, second),
        str((first.summary.get("units") or {}).get(next(iter(first.goals)), "")),
        differences(first.config, second.config),
        made_otherwise(first.provenance, second.provenance),
        [_counts(run) for run in (first, second)],
        first.goals,
        "factor" if factors else "share of the scale",
        [pair.row(factors=factors) for pair in pairs_],
        {pair.scenario: (pair.curve(pair.first), pair.curve(pair.second)) for pair in pairs_},
        attainment_difference(pairs_, why_not),
        why_not,
    )


def _points(run: FinishedRun, goals: Mapping[str, str]) -> dict[str, ComparedPoints]:
    """Points by scenario."""
    points = {}
    table = read(run, ["scenario", "status", *goals])
    for name, rows in table.groupby("scenario", sort=False, observed=True):
        ok = np.flatnonzero(rows["status"] == "ok")
        # rows without a result took evaluations, too
        points[str(name)] = ComparedPoints(minimized(rows.iloc[ok], goals), ok + 1, len(rows))
    return points


def _pairs(
    first: Mapping[str, ComparedPoints], second: Mapping[str, ComparedPoints], why_not: dict[str, str]
) -> list[Pair]:
    """Scenarios that both runs have results for; the other scenarios are noted in `why_not`."""
    for name in dict.fromkeys([*first, *second]):
        lacking = [
            letter
            for letter, points in (("A", first), ("B", second))
            if not len(points[name].values if name in points else [])
        ]
        if lacking:
            why_not[f"scenario {name}"] = f"has no result in {' and '.join(lacking)}"
    return [Pair(name, first[name], second[name]) for name in first if f"scenario {name}" not in why_not]


def _counts(run: FinishedRun) -> dict[str, Any]:
    """Numbers of rows in all, by status and by engine."""
    table = read(run, ["scenario", "status", "engine", "on_front"])
    totals = {
        "rows": len(table),
        "scenarios": int(table["scenario"].nunique()),
        "on_front": int(table["on_front"].sum()),
    }
    kinds = {name: table[name].value_counts() for name in ("status", "engine")}
    # engines of rows without a result have no name
    counted = {
        name: {str(key): int(count) for key, count in counts.items() if key and count} for name, counts in kinds.items()
    }
    return {**totals, **counted, "methods": list(run.methods)}


def attainment_difference(pairs_: Sequence[Pair], why_not: dict[str, str]) -> Floats | None:
    """Difference of attainment over scenarios: rectangles [R, 5] in scaled objectives that one run attains more often.

    A row is (x from, y from, x to, y to, share of scenarios in which A attains it less the share in which B does).
    The scenarios stand for the repetitions of an empirical attainment function (Grunert da Fonseca et al., 2001).
    The result is None, with the reason noted, unless there are two objectives.
    """
    import moocore

    if not pairs_:
        return None
    number = pairs_[0].first.values.shape[1]
    if number != 2:
        why_not["attainment"] = f"differences of attainment are drawn for two objectives, not {number}"
        return None
    sets = []
    for side in ("first", "second"):
        fronts = [pair.scale_objectives(getattr(pair, side).front) for pair in pairs_]
        # as moocore numbers the sets of an attainment function
        numbers = np.repeat(np.arange(1, len(fronts) + 1), [len(front) for front in fronts])
        sets.append(np.column_stack([np.concatenate(fronts), numbers]))
    if not moocore.eafdiff(*sets)[:, 2].any():  # moocore cannot return no rectangles
        return np.empty((0, 5))
    rectangles = np.asarray(moocore.eafdiff(*sets, rectangles=True), float)
    rectangles[:, 4] /= len(pairs_)
    return np.asarray(rectangles[(rectangles[:, 4] != 0) & (rectangles[:, :2] < REFERENCE).all(axis=1)])


# ---------------------------------------------------------------- the command


@output_files.working_on_folders
def command(words: Sequence[str]) -> CommandAnswer:
    """`compare A B [--html] [output_dir=outputs]`: two finished runs side by side, each a folder, <study> or
    <study>/<time>; with --html (or html=true) in a page, too.

    Raises ConfigError.
    """
    words = ["html=true" if word == "--html" else word for word in words]
    names = [word for word in words if "=" not in word]
    options = pairs([word for word in words if "=" in word], {"output_dir": "outputs", "html": "false"})
    if options["html"] not in ("true", "false"):
        raise ConfigError([Problem("html", "must be true or false", options["html"])])
    write_page = report.view("comparison") if options["html"] == "true" else None
    if options["html"] == "true" and write_page is None:
        way = "pip install overlap-dse-pages"
        raise ConfigError([Problem("html", "needs pages, which are not installed", None, way)])
    if len(names) != 2:
        way = "write python -m dse results compare <study>/<time> <study>"
        raise ConfigError([Problem("compare", "needs two runs", " ".join(names) or None, way)])
    root = Path(options["output_dir"])
    first, second = (FinishedRun.find(root, name, letter) for letter, name in zip("AB", names, strict=True))
    if first.folder == second.folder:
        raise ConfigError([Problem("B", "is the same run as A", names[1], "name another one: <study>/<time>")])
    comparison = compare_runs(first, second)
    folder = _write(comparison, root)
    printout = [*_printout(comparison), f"written to {folder}/ (compare.json, figures)"]
    if write_page is not None:
        printout.append(f"page: {write_page(folder, (first, second), _printout(comparison))}")
    return CommandAnswer(folder, tuple(printout), "compare")


def _write(comparison: RunComparison, root: Path) -> Path:
    from dse import plots
    from dse.plots import searches
    from dse.plots.labels import words

    name = "--".join(name.replace("/", "_") for name in comparison.names)
    root.mkdir(parents=True, exist_ok=True)
    folder = plain_folder(plain_folder(root / "compare") / name)
    Outputs(folder).write_json("compare", comparison.json())
    for stale in (*folder.glob("*.png"), *folder.glob("*.svg")):  # figures of an earlier comparison of the same runs
        stale.unlink()
    if comparison.rows:
        make = partial(searches.hypervolumes, comparison.curves, comparison.names, _methods(comparison))
        plots.save(make, folder, "hypervolume")
    if comparison.attainment is not None:
        goals = [words(name) for name in comparison.goals]
        plots.save(partial(searches.attainment, comparison.attainment, comparison.names, goals), folder, "attainment")
    return folder


def _methods(comparison: RunComparison) -> list[str]:
    return [", ".join(counts["methods"]) for counts in comparison.counts]


def _printout(comparison: RunComparison) -> list[Table | str]:
    """Texts and tables to print."""
    objective = next(iter(comparison.goals)), comparison.unit
    parts: list[Table | str] = [*winners_table(comparison.winners, comparison.names, objective)]
    parts = parts or [f"A = {comparison.names[0]}\nB = {comparison.names[1]}"]
    parts.append(_count_table(comparison.counts))
    parts.append(_change_table(comparison.config) if comparison.config else "the configurations are the same")
    parts.append(
        "made otherwise: " + "; ".join(comparison.made)
        if comparison.made
        else "made by the same code on the same machine"
    )
    parts += [_fronts(comparison)] if comparison.rows else []
    parts += [f"not compared: {what}: {why}" for what, why in comparison.why_not.items()]
    if comparison.rows:
        parts.append(_how_to_read(comparison))
    return parts


def _how_to_read(comparison: RunComparison) -> str:
    unit = "factor on every objective" if comparison.epsilon == "factor" else "share of the scale"
    need = "1" if comparison.epsilon == "factor" else "0"
    text = f"hypervolume: share of the box up to {REFERENCE} times a scale common to both runs, scenario by scenario"
    text += f"\nepsilon: {unit} by which a front must improve to be nowhere worse than the other ({need}: it covers it)"
    return text


def _count_table(counts: Sequence[Mapping[str, Any]]) -> Table:
    from rich.table import Table

    shown = Table(title="Points")
    for name in ("", "A", "B"):
        shown.add_column(name, justify="right" if name else "left")
    for name in ("rows", "scenarios", "on_front"):
        shown.add_row(name.replace("_", " "), *(str(run[name]) for run in counts))
    for group in ("status", "engine"):
        for name in dict.fromkeys(name for run in counts for name in run[group]):
            shown.add_row(f"{group} {name}", *(str(run[group].get(name, 0)) for run in counts))
    shown.add_row("search", *(", ".join(run["methods"]) for run in counts))
    return shown


def _change_table(config: Mapping[str, tuple[Any, Any]]) -> Table:
    from rich.table import Table

    shown = Table(title="Configuration")
    for name in ("path", "A", "B"):
        shown.add_column(name)
    for path, values in config.items():
        shown.add_row(path, *("–" if value is None else str(value) for value in values))
    return shown


def _fronts(comparison: RunComparison) -> Table:
    from rich.table import Table

    shown = Table(title=f"Fronts in {', '.join(comparison.goals)} (A | B)")
    for name in (
        "scenario",
        "members",
        "in both",
        "dominated by the other",
        "hypervolume",
        "B - A",
        f"epsilon ({comparison.epsilon})",
    ):
        shown.add_column(name, justify="right" if name != "scenario" else "left")
    for row in comparison.rows:
        a, b = row["hypervolume"]
        cells = [" | ".join(map(str, row["front"])), str(row["equal"]), " | ".join(map(str, row["dominated"]))]
        epsilon = " | ".join(f"{value:.4g}" for value in row["epsilon"])
        shown.add_row(row["scenario"], *cells, f"{a:.4f} | {b:.4f}", f"{b - a:+.4f}", epsilon)
    means = [float(np.mean([row["hypervolume"][place] for row in comparison.rows])) for place in (0, 1)]
    shown.add_section()
    shown.add_row("mean", "", "", "", f"{means[0]:.4f} | {means[1]:.4f}", f"{means[1] - means[0]:+.4f}", "")
    return shown
