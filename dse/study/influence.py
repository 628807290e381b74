"""Influence of typed numbers: a number that changes no metric of a study is refused, with those that do.

What a model reads is found by experiment: the designs of a sample of the space are evaluated with the number as it was
typed, and with multiples of it. A number that changes nothing at any multiple is not read. One that hardly counts, or
in some designs only, is reported before the answer.

Why by experiment: a record of the attributes that a model reads does not tell what counts. Models read tables whole of
which few entries decide, and the times of every algorithm of which the fastest wins; others read copies, or a value
that several paths share. Of 90 numbers drawn from the prefill of a dense model (`study=plan`), 61 change nothing; a
record of reads passes 30 of these (the optimizer's among them), and refuses 3 that count. A declaration for each
backend would have to repeat, for each design, the choices that its models make, and could be tested only so.
"""

from __future__ import annotations

import copy
import functools
import math
import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel

from dse.backend import Backend, Batch, Result, Results
from dse.config.compose import request, searched_knobs
from dse.config.options import load_yaml
from dse.errors import ConfigError, Problem, did_you_mean
from dse.space import Knob, Space, get_path, has_path, set_path
from dse.study.plan import Plan, plan
from dse.study.settings import SECTIONS
from dse.values import LABELS
from dse.values.units import amount, unit_of

TENTH = 1.1
# small steps first; large ones reach limits that do not bind yet
MULTIPLES = (TENTH, 1 / TENTH, 8.0, 1 / 8, 1000.0, 1 / 1000)
_SAMPLE = 16  # designs of a scenario
_SCENARIOS = 6  # each costs a sample
_WEAK = 1e-3  # relative change of an objective
_ROUNDING = 1e-12  # sums in another order differ by this much
_STATUS = "status"  # in place of a metric: which designs are refused
_NAMED = 3  # numbers that are proposed instead
_TRIED = 12  # numbers that are looked at for this
_MOST_OF_A_FILE = 24  # numbers of a user's file that are looked at


@dataclass(frozen=True)
class Influence:
    """Largest relative change of each metric that changes, inf where a rule breaks.

    tenth: with a tenth more or less of the number. most: with any of `MULTIPLES`, as far as they were tried. base:
    whether it is the base design that changes; else other designs of the sample do.
    """

    tenth: Mapping[str, float]
    most: Mapping[str, float]
    base: bool

    @property
    def is_read(self) -> bool:
        """True if the number changes anything at all."""
        return bool(self.most)

    def objective(self, goals: Iterable[str]) -> float:
        """Largest change of an objective with a tenth more or less."""
        # a rule that breaks changes the answer, too
        return max((self.tenth.get(name, 0.0) for name in (*goals, _STATUS)), default=0.0)


def check_typed(planned: Plan) -> list[str]:
    """Notes on typed numbers that count little, or that a user's file holds for nothing.

    Raises ConfigError for numbers of the command line that nothing reads, all at once, and for paths of no knob.
    """
    if unknown := [*_unknown_paths(planned)]:
        raise ConfigError(unknown)
    notes = [f"{key} is not modelled: the answer is as without it" for key in _unread_keys(planned)]
    notes += [*_searched_of_files(planned), *_idle_knobs(planned)]
    sample = _Sample.of(planned)
    if sample is None:
        return notes
    problems = list[Problem]()
    for path, typed in _typed_numbers(planned).items():
        influence = sample.influence(path)
        if not influence.is_read and _is_demanded(planned, path):
            notes.append(f"{path} = {typed}: changes no metric here, and the study is refused without it")
        elif not influence.is_read:
            problems.append(_unread(sample, path, typed))
        elif not influence.base:
            notes.append(_partial(sample, path, typed))
        elif influence.objective(planned.goals) < _WEAK:
            notes.append(_weak(path, typed, influence, tuple(planned.goals)))
    if problems:
        raise ConfigError(problems)
    return [*notes, *_notes_on_files(sample)]  # files last, as they refuse nothing


_TOGETHER = "search.options.together"
"""Option of searches that names knobs; a shipped list has knobs of several backends."""


def _unknown_paths(planned: Plan) -> Iterator[Problem]:
    """Yield a problem for each typed path of `_TOGETHER` that is no knob of the study, with any of its options."""
    typed = {text.lstrip("+").partition("=")[0] for text in planned.request.overrides}
    if _TOGETHER not in typed:
        return
    entries = get_path(planned.request.tree, _TOGETHER)
    trees = [tree for space in planned.spaces.values() for tree in _trees(space)]
    for entry in entries if isinstance(entries, list) else ():
        for path in map(str, entry if isinstance(entry, list) else [entry]):
            if path not in planned.knobs and all(planned.backend.condition(path, tree) is None for tree in trees):
                rule, way = f"names {path}, which is no knob here", did_you_mean(path, planned.knobs)
                yield Problem(_TOGETHER, rule, entry, way or "write knobs of the space")


def _trees(space: Space) -> Iterator[Mapping[str, Any]]:
    """Yield the base of a space, and the same with each option of its groups."""
    yield space.base
    for section, named in space.options.items():
        yield from ({**space.base, section: option} for option in named.values())


def _idle_knobs(planned: Plan) -> Iterator[str]:
    """Yield a note on each knob of the study that means nothing for what was typed of other sections."""
    typed = {re.sub(r"^(\+\+?|~)?(space\.)?", "", text.partition("=")[0]) for text in planned.request.overrides}
    for path in searched_knobs(planned.request.tree, planned.request.folder):
        if path not in planned.knobs and typed.isdisjoint({path, path.partition(".")[0]}):
            yield f"{path} is not searched: it means nothing for what was typed"


def _unread_keys(planned: Plan) -> list[str]:
    """Keys of foreign files that may change the answer and that no model reads, as their sections list them."""
    stack: list[Any] = [planned.request.tree, *(space.base for space in planned.spaces.values())]
    keys = dict[str, None]()
    while stack:
        value = stack.pop()
        if isinstance(value, Mapping):
            keys |= dict.fromkeys(map(str, value.get("unread") or ()))
            stack += value.values()
    return list(keys)


def _is_demanded(planned: Plan, path: str) -> bool:
    """True if a rule refuses the study without a number that was typed."""
    kept_texts = [text for text in planned.request.overrides if text.lstrip("+").partition("=")[0] != path]
    try:
        plan(request(kept_texts, planned.request.folder))
    except ConfigError:
        return True
    return False


def _unread(sample: _Sample, path: str, typed: object) -> Problem:
    names = ", ".join(f"`{other}`" for other in sample.alternatives(path))
    way = f"set {names}, or leave it out" if names else "leave it out"
    return Problem(path, f"is not read by {sample.model}: it changes no metric here", typed, way)


def _partial(sample: _Sample, path: str, typed: object) -> str:
    names = ", ".join(f"`{other}`" for other in sample.alternatives(path))
    text = f"{path} = {typed}: has no effect on the base design ({sample.model}), and some on other points of the space"
    return f"{text}; set {names} for it" if names else text


def _weak(path: str, typed: object, influence: Influence, goals: Sequence[str]) -> str:
    """Note that a number changes no objective, or hardly."""
    start, change = f"{path} = {typed}: a tenth more or less changes", influence.objective(goals)
    unlisted = [name for name in influence.tenth if name not in goals]
    if change:
        return f"{start} {goals[0]} by {100 * change:.2g} % at most"
    return f"{start} {', '.join(unlisted) or 'no metric'}, and not {goals[0]}, which other limits bind"


def _notes_on_files(sample: _Sample) -> Iterator[str]:
    """Yield a note on each file of the user's folder that holds numbers which change nothing."""
    for file, numbers in _numbers_of_files(sample.planned).items():
        first = list(numbers)[:_MOST_OF_A_FILE]
        if len(numbers) > len(first):
            yield f"{file}: whether its numbers count was looked at for the first {len(first)} of {len(numbers)}"
        unread = [path for path in first if not sample.influence(path).tenth]
        if unread:
            shown = ", ".join(f"{path} = {numbers[path]}" for path in unread)
            yield f"{file}: a tenth more or less of these changes no metric of this study: {shown}"


def _typed_numbers(planned: Plan) -> dict[str, object]:
    """Dotted path -> value of the numbers of the design that were typed; those of the space are knobs."""
    numbers: dict[str, object] = {}
    for text in planned.request.overrides:
        path, equals, _ = text.lstrip("+").partition("=")
        # numbers that only choose which scenarios there are, such as layouts.most, are in no design
        is_of_design = any(has_path(space.base, path) for space in planned.spaces.values())
        value = get_path(planned.request.tree, path) if equals and is_of_design else None
        # numbers and quantities only
        if path.partition(".")[0] not in SECTIONS and path.rpartition(".")[2] not in LABELS and _multiple(value, 2.0):
            numbers[path] = value
    return numbers


def _numbers_of_files(planned: Plan) -> dict[str, dict[str, object]]:
    """Name of each chosen file of the user's folder that changes a shipped option -> the numbers that it changes."""
    return {
        file: {
            path: value
            for path, value in number_leaves(content, section)
            if get_path(planned.request.tree, path) == value  # the command line may have replaced it
        }
        for file, section, content in _own_files(planned)
    }


def _own_files(planned: Plan) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield the name, the section and the content of each chosen file of the user's that changes a shipped option."""
    folder = planned.request.folder
    for section in planned.request.tree if folder is not None else ():
        file = Path(str(folder)) / section / f"{get_path(planned.request.tree, f'{section}.name')}.yaml"
        if section in SECTIONS or not file.is_file():  # settings do not enter the model
            continue
        content = load_yaml(file)
        # files without are options of the user's own: not changes of ours
        if isinstance(content, dict) and content.pop("defaults", None):
            yield str(file), section, content


def _searched_of_files(planned: Plan) -> Iterator[str]:
    """Yield a note on each value of a user's file that the space searches."""
    for file, section, own in _own_files(planned):
        for path in (path for path in planned.knobs if path.startswith(f"{section}.")):
            value = own.get(path.removeprefix(f"{section}."))
            if value is not None:
                yield f"{file}: the space searches {path}, not {value} alone; fix it with {path}={value}"


def number_leaves(tree: Any, path: str) -> Iterator[tuple[str, object]]:
    """Yield (dotted path, value) of the numbers and quantities of a tree that can be typed, labels left out."""
    for name, value in tree.items() if isinstance(tree, Mapping) else ():
        if name in LABELS or "." in str(name):  # cannot be typed as a path
            continue
        if isinstance(value, Mapping):
            yield from number_leaves(value, f"{path}.{name}")
        elif _multiple(value, 2.0) is not None:
            yield f"{path}.{name}", value


def _multiple(value: object, factor: float) -> object:
    """A multiple of a number or of a quantity such as `5 TB/s`, not the same; None for what is neither, or zero."""
    if isinstance(value, str) and (pair := amount(value)) is not None:
        return f"{pair[0] * factor!r} {pair[1]}" if pair[0] else None  # 0 has no multiples
    if isinstance(value, bool) or not isinstance(value, int | float) or not value:  # True is an int in Python
        return None
    if isinstance(value, float):
        return value * factor
    # whole numbers stay whole, positive and different
    return max(value + 1, round(value * factor)) if factor > 1 else max(1, min(value - 1, round(value * factor)))


@dataclass(frozen=True)
class _Sample:
    """Designs of a study that stand for all: in some scenarios, assignments of the knobs, the base design first."""

    planned: Plan
    points: Mapping[str, Sequence[Mapping[str, Any]]]

    @classmethod
    def of(cls, planned: Plan) -> _Sample | None:
        """Draw a sample; None where a design takes long, or a program of its own is asked about each."""
        backend, spaces = planned.backend, planned.spaces
        names = list(spaces)[:: max(1, -(-len(spaces) // _SCENARIOS))]  # spread over all scenarios
        # a batch of one: a program outside is asked about each design
        if backend.batch == 1 or any(backend.takes_long(backend.design(spaces[name].base)) for name in names):
            return None
        return cls(planned, {name: list(_drawn_points(spaces[name])) for name in names})

    @property
    def model(self) -> str:
        """The simulator, with the models by which it costs operators."""
        backend, space = self.planned.backend, next(iter(self.planned.spaces.values()))
        models = ", ".join(f"{kind} by {model}" for kind, model in backend.models(backend.design(space.base)).items())
        return f"simulator={self.planned.settings.simulator.get('name')}" + (f" ({models})" if models else "")

    def influence(self, path: str) -> Influence:
        """Change the number at a path in the base designs, and, where that changes nothing, in the whole sample."""
        base = self._influence(path, whole=False)
        # rare: most numbers count in the base design
        return base if base.is_read else self._influence(path, whole=True)

    def _influence(self, path: str, *, whole: bool) -> Influence:
        tenth, most = dict[str, float](), dict[str, float]()
        for factor in MULTIPLES:
            if most and factor not in MULTIPLES[:2]:  # larger steps only where small ones change nothing
                break
            change = self._change(path, factor, whole=whole)
            most = _largest(most, change)
            tenth = most if factor in MULTIPLES[:2] else tenth  # a tenth more, and a tenth less
            # read, and not weakly: nothing more to find out
            if any(tenth.get(name, 0.0) >= _WEAK for name in (*self.planned.goals, _STATUS)):
                break
        return Influence(tenth, most, base=not whole)

    def alternatives(self, path: str) -> list[str]:
        """Paths of numbers near by that count in the base design, those with the most similar names first."""
        tree = next(iter(self.planned.spaces.values())).base
        owner = ".".join(path.split(".")[:2])  # section and part, such as hardware.memory
        near = [other for other, _ in number_leaves(get_path(tree, owner), owner) if other != path]
        words = set(re.split(r"[._]", path))
        # the same unit first: bandwidths for a bandwidth
        near.sort(key=lambda other: (unit_of(other) != unit_of(path), -_likeness(words, other)))
        goals = self.planned.goals
        counting = (name for name in near[:_TRIED] if self._influence(name, whole=False).objective(goals) >= _WEAK)
        # stops at the first few, without evaluating the rest
        return [other for other, _ in zip(counting, range(_NAMED), strict=False)]

    def _change(self, path: str, factor: float, *, whole: bool) -> dict[str, float]:
        """Largest change of each metric in any scenario; none is looked at after one in which an objective changes."""
        spaces, change = _changed_spaces(self.planned, path, factor), dict[str, float]()
        if spaces is None or not set(self.points) <= set(spaces):
            return {_STATUS: math.inf}  # the number breaks a rule, so something reads it
        for name in self.points:
            before, after = (
                self._results_as_typed(name, whole),
                self._results(spaces[name], name, whole, (path, factor)),
            )
            change = _largest(change, _differences(before, after))
            if any(change.get(goal, 0.0) >= _WEAK for goal in self.planned.goals):
                break
        return change

    def _results_as_typed(self, name: str, whole: bool) -> Results:
        """Results of a scenario with all numbers as they were typed."""
        if (name, whole) not in self._remembered:  # the same for every number that is looked at
            self._remembered[name, whole] = self._results(self.planned.spaces[name], name, whole)
        return self._remembered[name, whole]

    @functools.cached_property
    def _remembered(self) -> dict[tuple[str, bool], Results]:
        return {}  # a cache in a frozen class

    def _results(self, space: Space, name: str, whole: bool, change: tuple[str, float] = ("", 1.0)) -> Results:
        """Results of points of a scenario, `infeasible` where a design is refused.

        change: path and factor of a number that is changed below the options that points choose, too.
        """
        parts = [
            self._design(_changed(space.tree(point), *change, space.base), change[0], name)
            for point in self.points[name][: None if whole else 1]  # the base design comes first
        ]
        backend = self.planned.backend
        designs = [Batch(design) for design in parts if design is not None]
        results = iter(backend.evaluate(designs) if designs else [])
        refused = Results.all_alike(Result("infeasible"), 1)
        return Results.join([refused if design is None else next(results) for design in parts])

    def _design(self, tree: dict[str, Any], path: str, name: str) -> BaseModel | None:
        """The design of a tree; None where it is refused.

        The range of the changed number itself does not show that a model reads it: then the number as it was typed.
        """
        try:
            return self.planned.backend.design(tree)
        except ConfigError as error:
            if not path or any(problem.path != path for problem in error.problems):
                return None
        return self.planned.backend.design(_with_value_of(tree, self.planned.spaces[name].base, path))


def _with_value_of(tree: dict[str, Any], other: Mapping[str, Any], path: str) -> dict[str, Any]:
    """A tree with the number at a path that another has."""
    section = path.partition(".")[0]
    tree = {**tree, section: copy.deepcopy(tree[section])}
    set_path(tree, path, get_path(other, path))
    return tree


def _changed(tree: dict[str, Any], path: str, factor: float, base: Mapping[str, Any]) -> dict[str, Any]:
    """A tree with a number changed that lies in an option which the point has chosen."""
    section = path.partition(".")[0]
    # the point chose no other option of the section: changed with the base
    if not path or tree.get(section) is base.get(section) or not has_path(tree, path):
        return tree
    value = get_path(tree, path)
    # an option with the same number was changed with the base
    if value == get_path(base, path) or (multiple := _multiple(value, factor)) is None:
        return tree
    tree = {**tree, section: copy.deepcopy(tree[section])}  # options are shared by all points
    set_path(tree, path, multiple)
    return tree


def _changed_spaces(planned: Plan, path: str, factor: float) -> Mapping[str, Space] | None:
    """The spaces of the scenarios with a number changed; None where the scenarios refuse it."""
    base = next(iter(planned.spaces.values())).base
    tree = {key: value for key, value in planned.request.tree.items() if key not in SECTIONS}
    if data_dir := get_path(planned.request.tree, "study.data_dir"):
        tree["data_dir"] = data_dir
    value = get_path(tree, path)  # null: the scenarios fill it in
    value = get_path(base, path) if value is None else value
    multiple = _multiple(value, factor)
    if multiple is None:
        return planned.spaces
    if get_path(base, path) == value:  # scenarios leave it as it is
        return {
            name: replace(space, base=with_value(space.base, path, factor)) for name, space in planned.spaces.items()
        }
    backend: Backend = planned.backend
    try:
        bases = backend.scenarios(with_value(tree, path, factor))  # made anew, as they derive other values from it
    except ConfigError:
        return None
    first = next(iter(planned.spaces.values()))
    return {name: replace(first, base=changed) for name, changed in bases.items()}


def with_value(tree: Mapping[str, Any], path: str, factor: float) -> dict[str, Any]:
    """A tree with a multiple of the number at a path; the tree as it is where there is none."""
    multiple, section = _multiple(get_path(tree, path), factor), path.partition(".")[0]
    if multiple is None:
        return dict(tree)
    changed = {**tree, section: copy.deepcopy(tree[section])}
    set_path(changed, path, multiple)
    return changed


def _drawn_points(space: Space) -> Iterator[Mapping[str, Any]]:
    """Yield the base design, then points in which every value of every knob occurs, then random ones."""
    yield {}
    draw = random.Random(0)  # the same answer every time
    for row in range(_SAMPLE):
        yield space.walk(lambda knob, row=row: _value(knob, row, draw))  # type: ignore[misc]


def _value(knob: Knob, row: int, draw: random.Random) -> Any:
    if not knob.values:
        return knob.low if row % 2 else knob.high  # both ends of an interval in turn
    # the first half cycles through the values
    return knob.values[row % len(knob.values)] if row < _SAMPLE // 2 else draw.choice(knob.values)


def _differences(before: Results, after: Results) -> dict[str, float]:
    """Largest relative change of each metric that changes; inf as `_STATUS` where other designs are refused."""
    changes = {} if np.array_equal(before.status, after.status) else {_STATUS: math.inf}
    both = before.ok & after.ok
    for name in before.metrics:
        old, new = before.column(name)[both], after.column(name)[both]
        scale = np.maximum(np.abs(old), np.abs(new))  # symmetric, so that a change and its reverse count alike
        # both are 0: no change
        change = float(np.nanmax(np.abs(old - new) / np.where(scale > 0, scale, 1.0), initial=0.0))
        changes |= {name: change} if change > _ROUNDING else {}
    return changes


def _largest(first: Mapping[str, float], second: Mapping[str, float]) -> dict[str, float]:
    return {name: max(first.get(name, 0.0), second.get(name, 0.0)) for name in {**first, **second}}


def _likeness(words: set[str], path: str) -> float:
    """Share of the words of a path that another one has, too."""
    return len(words & set(re.split(r"[._]", path))) / len(set(re.split(r"[._]", path)))
