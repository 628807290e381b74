"""Verdicts on published claims under uncertain constants: each is moved alone, and the study is judged again.

A constant is uncertain where its source says that it was assumed, derived or recalled. It is multiplied by 1 - s and
1 + s, s being the `spread` of its source or, where that says nothing, `SPREAD`; whole numbers move by one at least.
All points and probes of the study are evaluated again for each, so this takes two runs for each constant.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dse.backend import Tree
from dse.errors import ConfigError, Problem
from dse.errors.terminal import bar, quiet
from dse.evaluation.evaluators import Services
from dse.results import provenance, report
from dse.results.run_folder import CommandAnswer, FinishedRun, Outputs
from dse.space import Space, get_path, set_path
from dse.study.plan import Plan
from dse.study.plan_again import Present, plan_again
from dse.study.record import evaluate_probes, write_files, write_provenance
from dse.study.run import run as search
from dse.values import LABELS, Memo
from dse.values.units import amount

UNCERTAIN = ("assumed", "memory", "derived")  # measured and vendors' numbers stand
SPREAD = 0.2
"""Share by which a constant is moved whose source does not say how far off it may be."""

Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class ConstantChange:
    """A constant at a dotted path, times a factor."""

    path: str
    factor: float

    def __str__(self) -> str:
        return f"{self.path} x {self.factor:.3g}"


# ---------------------------------------------------------------- constants


def moves(planned: Plan) -> list[ConstantChange]:
    """Both moves of every uncertain constant that the study's designs rest on and that is no searched knob."""
    rested = {fact[0] for tree in _trees(planned) for fact in planned.backend.facts(planned.backend.design(tree))}
    spreads: dict[str, float] = {}
    for tree in _trees(planned):
        for path, spread in _uncertain_leaves(planned, tree):
            if path in rested and path not in planned.knobs:
                spreads[path] = max(spread, spreads.get(path, 0.0))  # the widest, where options differ
    return [ConstantChange(path, 1 + side * spread) for path, spread in sorted(spreads.items()) for side in (-1, 1)]


def _trees(planned: Plan) -> Iterator[Tree]:
    """Yield the design trees of the study: a base of each kind, and the base with each option that is searched."""
    for space in planned.spaces.values():
        planned.backend.design(space.base)  # raises ConfigError where the model refuses it
        yield space.base
    space = next(iter(planned.spaces.values()))
    for section, options in space.options.items():
        for name in options:
            try:
                planned.backend.design(tree := space.tree({f"{section}.name": name}))
            except ConfigError:
                continue
            yield tree


def _uncertain_leaves(planned: Plan, tree: Tree) -> Iterator[tuple[str, float]]:
    """Yield (dotted path, spread) of the numbers of a tree whose source is uncertain; counts that are no axis stay."""
    design = planned.backend.design(tree)
    for path, value in _numbers(tree, ""):
        source = _source(tree, path)
        if source is None or source["provenance"] not in UNCERTAIN or not value or get_path(tree, path) is None:
            continue  # a key with a dot in it, such as those of cost weights, is no path
        if not isinstance(value, int) or planned.backend.is_axis(path, design):
            yield path, float(source.get("spread") or SPREAD)


def _numbers(tree: Any, path: str) -> Iterator[tuple[str, float]]:
    for name, value in tree.items():
        if name in LABELS:
            continue
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{path}{name}.")
        elif (number := _number(value)) is not None:
            yield f"{path}{name}", number


def _number(value: Any) -> float | None:
    if isinstance(value, str):
        quantity = amount(value)
        return None if quantity is None else quantity[0]
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _source(tree: Tree, path: str) -> Mapping[str, Any] | None:
    """The entry of `sources` for a path: of the outermost section that has one for it or for what encloses it."""
    names = path.split(".")
    for depth in range(1, len(names)):
        sources = get_path(tree, ".".join(names[:depth]) + ".sources")
        for end in range(len(names), depth, -1):  # the longest entry first: the most specific
            entry = (sources or {}).get(".".join(names[depth:end]))
            if entry is not None:
                return dict(entry)
    return None


# ---------------------------------------------------------------- plans with a constant moved


def moved(planned: Plan, move: ConstantChange) -> Plan:
    """The same study with a constant moved, in scenarios, options, probes and the recorded configuration."""
    return changed(planned, move.path, lambda section: _scaled(section, move), move.factor)


def changed(planned: Plan, path: str, change: Callable[[Any], Any], value: Any) -> Plan:
    """The same study with the section of a path changed, in scenarios, options, probes and the recorded configuration.

    Raises ConfigError, which names the path and the value, where an option of the study refuses the change.
    """
    sections = Memo[Any]()  # scenarios share sections, and changed ones are shared likewise

    def section(tree: Any) -> Any:
        return sections.get(lambda: change(tree), tree)

    name = path.partition(".")[0]

    def space(old: Space) -> Space:
        base = {**old.base, name: section(old.base[name])} if name in old.base else old.base
        options = dict(old.options)
        if name in options:
            options[name] = {option: section(tree) for option, tree in options[name].items()}
        return replace(old, base=base, options=options, known=Memo())  # what the old space knows is of the old constant

    tree = planned.request.tree
    request = replace(planned.request, tree={**tree, name: section(tree[name])} if name in tree else tree)
    spaces = {scenario: space(old) for scenario, old in planned.spaces.items()}
    probes = {probe: changed(old, path, change, value) for probe, old in planned.probes.items()}
    again = replace(planned, request=request, spaces=spaces, probes=probes)
    # an option that the model refuses now would silently drop out
    if sum(1 for _ in _trees(again)) < sum(1 for _ in _trees(planned)):
        raise ConfigError([Problem(path, "is not accepted by an option of the study", value)])
    return again


def _scaled(section: Any, move: ConstantChange) -> Any:
    """A copy of a section with the constant moved; the section itself where it is absent or certain."""
    name = move.path.partition(".")[0]
    tree = {name: section}
    source, value = _source(tree, move.path), get_path(tree, move.path)
    number = _number(value)
    if source is None or source["provenance"] not in UNCERTAIN or number is None:
        return section
    scaled = {name: copy.deepcopy(section)}
    set_path(scaled, move.path, _times(value, number, move.factor))
    return scaled[name]


def _times(value: Any, number: float, factor: float) -> Any:
    if isinstance(value, int):
        moved_by = max(1, round(abs(value * (factor - 1))))  # a step at least, or a small number would not move
        return max(1, value + (moved_by if factor > 1 else -moved_by))
    return number * factor  # in the unit of the field, as `amount` reads it


# ---------------------------------------------------------------- judging again


def judge_again(planned: Plan) -> Rows:
    """Evaluate a study in a folder of its own and judge its claims; the rows of `claims.json`."""
    settings = planned.settings.model_copy(update={"timeline": False})  # replays are not judged
    planned = replace(planned, settings=settings)
    with tempfile.TemporaryDirectory() as folder:
        outputs = Outputs.create(Path(folder), settings.study.name)
        findings = search(planned, outputs.results)
        evaluate_probes(planned, outputs, Services())
        record = provenance.record(planned.request.overrides, planned.request.folder, backend="", seed=settings.seed)
        write_files(planned, findings, outputs=outputs)
        write_provenance(planned, outputs, record)
        return report.check(outputs, settings.study.module, report.load_selection(outputs))


@dataclass(frozen=True)
class Verdicts:
    """Claims judged under moved constants. flips: claim -> the moves that turn its verdict, as text.

    reach: claim -> smallest and largest value of ours under all moves, of numbers. refused: moves that the model does
    not accept, which were left out.
    """

    rows: Rows
    flips: Mapping[str, Sequence[str]]
    reach: Mapping[str, tuple[float, float]]
    num_moves: int
    refused: Sequence[str]

    def json(self) -> dict[str, Any]:
        """Return the content of `verdicts.json`."""
        claims = {
            row["id"]: {"flips": list(self.flips[row["id"]]), "reach": self.reach.get(row["id"])}
            for row in self.rows
            if row["within"] is not None
        }
        return {"moves": self.num_moves, "refused": list(self.refused), "claims": claims}


def examine(planned: Plan, nominal: Rows) -> Verdicts:
    """Judge the claims of a study again for each move of each constant. nominal: its rows of `claims.json`."""
    todo, refused = moves(planned), list[str]()
    flips: dict[str, list[str]] = {row["id"]: [] for row in nominal}
    values: dict[str, list[float]] = {row["id"]: [] for row in nominal}
    with bar(f"{planned.settings.study.name}: verdicts", len(todo), "runs") as advance:
        for move in todo:
            try:
                with quiet():
                    rows = judge_again(moved(planned, move))
            except ConfigError:
                refused.append(str(move))
                rows = nominal  # a move that is refused turns nothing
            advance(1)
            for before, now in zip(nominal, rows, strict=True):
                if None not in (before["within"], now["within"]) and before["within"] != now["within"]:
                    flips[before["id"]].append(str(move))
                values[before["id"]] += _values(now["ours"])
    reach = {name: (min(seen), max(seen)) for name, seen in values.items() if seen}
    return Verdicts(nominal, flips, reach, len(todo), refused)


def _values(ours: Any) -> list[float]:
    if ours is None or isinstance(ours, bool):
        return []
    return [float(value) for value in (ours if isinstance(ours, (list, tuple)) else [ours])]


def command(run: FinishedRun, present: Present) -> CommandAnswer:
    """Examine the claims of a finished run; write `verdicts.json`, and the verdicts into `claims.json`."""
    planned, nominal = plan_again(run, present), run.outputs.read_json("claims")
    if not any(row["within"] is not None for row in nominal):
        rule, way = "tested no claim", "run the study as it is shipped"
        raise ConfigError([Problem("study", rule, run.name, way)])
    # verdicts must be those of this code before a constant is moved
    if again := _differing(nominal, judge_again(planned)):
        rule, way = f"was judged by other code: {', '.join(again)}", "run the study again"
        raise ConfigError([Problem("study", rule, run.name, way)])
    verdicts = examine(planned, nominal)
    run.outputs.write_json("verdicts", verdicts.json())
    rows = [{**row, "flips": None if row["within"] is None else list(verdicts.flips[row["id"]])} for row in nominal]
    run.outputs.write_json("claims", rows)
    turned = sum(bool(verdicts.flips[row["id"]]) for row in rows)
    # two moves each
    constants = f"{verdicts.num_moves // 2} constants that were assumed, derived or recalled, each moved alone"
    line = f"{turned} verdicts flip under {constants}; written to {run.folder}/verdicts.json"
    return CommandAnswer(run.folder, (report.claims_table(rows), line), "verdicts")


def _differing(before: Rows, now: Rows) -> list[str]:
    pairs = zip(before, now, strict=True)
    return [old["id"] for old, new in pairs if (old["id"], old["within"]) != (new["id"], new["within"])]
