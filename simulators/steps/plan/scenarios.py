"""Scenarios of iterations: models, with the lengths of an epoch, on machines, in modes, in layouts that are chosen."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from dse.backend import Tree
from dse.errors import ConfigError, Problems
from simulators.steps.design import own_sections
from simulators.steps.plan.given_plan import GivenPlan, with_given
from simulators.steps.plan.layouts import LayoutQuestion, LayoutSection, Steps
from simulators.workloads.model_zoo import model_tree, option_tree

LISTS = {
    "models": "must list models, with lengths where they are of an epoch",
    "systems": "must list systems",
    "modes": "must list values of run.mode",
}
"""Sections that list what each scenario has -> the rule for them."""
_WAYS = {
    "models": "models=[gpt3_175b,llama3_8b], or models=[{model: gnmt, lengths: iwslt15}]",
    "systems": "systems=[h100_8,mi300x_8]",
    "modes": "modes=[training,decode]",
}


CHOSEN = "layouts"
"""Section that asks for layouts (`simulators.steps.plan.layouts.LayoutSection`)."""
GIVEN = "given"
"""Section of a plan that is judged as it is (`simulators.steps.plan.given_plan.GivenPlan`)."""
SOFTWARE = "stack"
"""Section that says which software the kernels are of; nothing of a step reads it."""
APART = " @ "
"""What stands between the name of a scenario and that of its layout."""


_ONE = "leave out parallel=auto, or plan="


def check_lists(check: Problems, tree: Tree) -> None:
    """Note lists that are none, or whose entries are not what they list."""
    for name, rule in LISTS.items():
        listed = tree.get(name) or []
        fits = _is_model if name == "models" else _is_name
        if not isinstance(listed, Sequence) or isinstance(listed, str) or not all(map(fits, listed)):
            check.add(name, rule, value=listed, way_out=_WAYS[name])
    layouts = check.model(LayoutSection, tree.get(CHOSEN) or {}, path=CHOSEN)
    section = check.model(GivenPlan, tree.get(GIVEN) or {}, path=GIVEN)
    # a choice and a given plan exclude each other
    if layouts is not None and layouts.auto and section is not None and section.plan:
        check.add(
            "layouts.auto", "chooses layouts, and a plan that is given is judged as it is", value=True, way_out=_ONE
        )
    for name in ("gpus", "sequences") if layouts is not None and not layouts.auto else ():  # else it would be ignored
        if (value := getattr(layouts, name)) is not None:
            way = f"layouts.auto=true layouts.{name}={value} chooses them, parallel.dp and others give them"
            check.add(f"layouts.{name}", "is read where layouts are chosen alone", value=value, way_out=way)


def with_layouts(trees: Mapping[str, Tree], asked: Any, steps: Steps) -> Mapping[str, Tree]:
    """The same scenarios, or where layouts are chosen, one for each of the best layouts. Raises ConfigError."""
    layouts = LayoutSection.model_validate(asked or {})
    if not layouts.auto:
        return trees
    return {
        f"{name}{APART}{layout.name}": layout.tree(tree)
        for name, tree in trees.items()
        for layout in LayoutQuestion.of(tree, layouts, steps).chosen()
    }


def with_plan(trees: Mapping[str, Tree], tree: Tree, steps: Steps) -> Mapping[str, Tree]:
    """The same scenarios, or those that judge a plan that is given (`simulators.steps.plan.given_plan`)."""
    return with_given(trees, GivenPlan.model_validate(tree.get(GIVEN) or {}), apart=APART, steps=steps)


def scenarios(tree: Tree) -> dict[str, Tree]:
    """The configuration itself, or a scenario for each of `models`, `systems` and `modes`. Raises ConfigError."""
    base = own_sections(tree)
    check, trees, lists = Problems(), dict[str, Tree](), [tree.get(name) or [] for name in LISTS]
    if not any(lists):  # nothing is listed: the configuration itself
        return {str(tree["model"].get("name", "model")): base}
    parts = {name: _parts(check, name, listed) for name, listed in zip(LISTS, lists, strict=True)}
    check.done()
    for (model, of_model), (system, of_system), (mode, of_mode) in itertools.product(*parts.values()):
        name = " ".join(filter(None, (model or str(tree["model"].get("name", "model")), system, mode)))
        run = {**tree["run"], **of_mode}
        # another model or machine may make sections meaningless
        trees[name] = own_sections({**tree, **of_model, **of_system, **({"run": run} if of_mode else {})})
    return trees


def _parts(check: Problems, name: str, listed: Sequence[Any]) -> list[tuple[str, dict[str, Any]]]:
    """(name, sections) of each entry of a list; nothing changed where it is empty. Problems are noted."""
    parts: dict[str, dict[str, Any]] = {}
    for entry in listed:
        try:
            sections = {"mode": entry} if name == "modes" else _sections(name, entry)
        except ConfigError as error:
            check.found.extend(error.problems)
            continue
        named = str(entry) if name == "modes" else " ".join(str(part.get("name", entry)) for part in sections.values())
        if named in parts:
            check.add(name, f"names a {name.removesuffix('s')} twice", value=entry, way_out="list it once")
        parts[named] = sections
    return list(parts.items()) or [("", {})]  # one scenario, of nothing changed


def _sections(name: str, entry: str | Mapping[str, str]) -> dict[str, Any]:
    """Sections of an entry of `models` or `systems`. Raises ConfigError."""
    if name == "systems":
        return {"system": option_tree("system", str(entry))}
    if isinstance(entry, str):
        return {"model": model_tree(entry)}
    sections: dict[str, Any] = {"model": model_tree(entry["model"])}
    return sections | ({"lengths": option_tree("lengths", entry["lengths"])} if "lengths" in entry else {})


def _is_model(entry: object) -> bool:
    """Tell whether an entry of `models` names a model, and perhaps lengths."""
    if isinstance(entry, Mapping):
        return (
            "model" in entry and set(entry) <= {"model", "lengths"} and all(isinstance(n, str) for n in entry.values())
        )
    return isinstance(entry, str)


def _is_name(entry: object) -> bool:
    return isinstance(entry, str)
