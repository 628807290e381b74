"""A plan that is given: the step with it as it is, beside the step with nothing overlapped, with what tools do by
themselves, and with each choice of the plan taken back.

Nothing is searched: each of these is a scenario of one point. Values are those of knobs of a step by their dotted
paths. A site that a step does not have (a backward one of inference, say) means nothing there and is left out;
`absent_sites` names such sites. What is known of tools is theirs alone: a value that breaks a rule on this machine is
none of its (a switch that adds, where there is none).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from pydantic import Field

from dse.backend import Tree
from dse.errors import ConfigError, Problem
from dse.space import get_path, set_path
from dse.values import Frozen
from simulators.steps.overlap.sites import SERIAL, SITES, site_condition
from simulators.steps.plan.choices import CHOICES, DECIDING, OFF, choices_with, condition_of
from simulators.steps.plan.layouts import Steps

AS_GIVEN, AS_SERIAL, BY_DEFAULT, WITHOUT = "as given", "serial", "defaults of ", "without "
"""What the scenarios are called, the last two with the name of a tool or of a choice after them."""
Values = Mapping[str, Any]


class ToolDefaults(Frozen):
    """What a tool does where nothing is set. modes: of a run that it is for. values: of knobs, by path; those that
    break a rule on a machine do not count there.
    """

    modes: tuple[str, ...]
    values: Values


class GivenPlan(Frozen):
    """The section `given`. plan: values of knobs by path; empty: no plan is given. file: that it was read from.

    tool: whose settings it was, "" for none: what it does by itself counts below the plan. tools: defaults to compare
    with, by the name of the tool. typed: paths of choices that are the same in all that is compared. unread: settings
    of the tool that change a step and are not modelled.
    """

    file: str = ""
    tool: str = ""
    plan: Values = Field(default_factory=dict)
    tools: Mapping[str, ToolDefaults] = Field(default_factory=dict)
    typed: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()


def with_given(trees: Mapping[str, Tree], section: GivenPlan, *, apart: str, steps: Steps) -> Mapping[str, Tree]:
    """The same scenarios; where a plan is given, several of each: as given, serial, by default, without each choice."""
    if not section.plan:  # no plan: nothing to judge
        return trees
    return {
        f"{name}{apart}{variant}": changed
        for name, tree in trees.items()
        for variant, changed in _variants(tree, section, steps)
    }


def given_tree(tree: Tree, section: GivenPlan, steps: Steps) -> dict[str, Any]:
    """The tree of a design with a plan that is given, as far as this step has its sites; what a tool does by itself
    counts where the plan says nothing.
    """
    planned = with_values(tree, section.plan)
    planned = with_values(planned, {f"sites.{name}": SERIAL for name in absent_sites(planned, section.plan, steps)})
    tool = section.tools.get(section.tool)
    # settings of the plan come before a tool's own
    unsaid = {} if tool is None else {path: value for path, value in tool.values.items() if path not in section.plan}
    return with_legal(planned, unsaid, steps)


def serial_tree(tree: Tree, steps: Steps, typed: Collection[str] = ()) -> dict[str, Any] | None:
    """The same step with nothing overlapped; where that breaks a rule, with what decides of sites as it is; or None.

    typed: paths of choices that stay as they are.
    """
    deciding = {path for name in DECIDING for path in CHOICES[name]}
    for left in (set(typed), deciding.union(typed)):  # first with all off, then with what decides which sites there are
        serial = with_values(tree, {path: value for path, value in OFF.items() if path not in left})
        if is_legal(serial, steps):
            return serial
    return None


def without(tree: Tree, name: str, steps: Steps) -> dict[str, Any] | None:
    """The same step without one choice, and sites that need it; None where nothing is chosen, or rules forbid."""
    knobs = choices_at(tree)[name]
    if all(str(get_path(tree, path)) in (str(value), "None") for path, value in knobs.items()):  # nothing to take back
        return None
    less = with_values(tree, knobs)
    # a choice may be what gives a step some of its sites
    sites = {f"sites.{name}": text for name, text in (less.get("sites") or {}).items() if text != SERIAL}
    less = with_values(less, {f"sites.{site}": SERIAL for site in absent_sites(less, sites, steps)})
    return less if is_legal(less, steps) else None


def with_values(tree: Tree, values: Values) -> dict[str, Any]:
    """A tree with values at paths; sections that stay as they are, are the same objects. Raises ConfigError."""
    sections = {path.partition(".")[0] for path in values}
    changed = {**tree, **{name: _copy(tree.get(name) or {}) for name in sections}}
    for path, value in values.items():
        try:
            set_path(changed, path, value)
        except KeyError:
            rule = "lies below a part that this machine does not have"
            raise ConfigError([Problem(path, rule, value, "leave it out, or take another system")]) from None
    return changed


def with_legal(tree: Tree, values: Values, steps: Steps) -> dict[str, Any]:
    """A tree with those values that break no rule there, one after the other."""
    changed = dict(tree)
    for path, value in values.items():
        # one after the other: a value that breaks a rule does not take others along
        candidate = with_values(changed, {path: value})
        changed = candidate if is_legal(candidate, steps) else changed
    return changed


def is_legal(tree: Tree, steps: Steps) -> bool:
    """Tell whether the design of a tree breaks no rule."""
    return bool(steps.legal(steps.make(tree), ())[0].all())


def absent_sites(tree: Tree, values: Values, steps: Steps) -> list[str]:
    """Names of the sites among paths with a schedule that the step of a tree does not have."""
    scheduled = [path.partition(".")[2] for path, text in values.items() if path in _SITE_PATHS and text != SERIAL]
    # without schedules, which may be of sites that are not there
    there = steps.sites(steps.make({name: section for name, section in tree.items() if name != "sites"}))
    return [name for name in scheduled if name not in there]


_SITE_PATHS = frozenset(f"sites.{name}" for name in SITES)


def _copy(tree: Any) -> Any:
    return {name: _copy(value) for name, value in tree.items()} if isinstance(tree, Mapping) else tree


def _variants(tree: Tree, section: GivenPlan, steps: Steps) -> Iterator[tuple[str, dict[str, Any]]]:
    planned = given_tree(tree, section, steps)
    yield AS_GIVEN, planned
    # compared with nothing, as it has no time
    if not is_legal(planned, steps):  # which is told of the plan alone
        return
    serial = serial_tree(planned, steps, section.typed)
    if serial is not None:
        yield AS_SERIAL, serial
    for name, tool in section.tools.items():
        if serial is not None and get_path(serial, "run.mode") in tool.modes:
            yield f"{BY_DEFAULT}{name}", with_legal(serial, tool.values, steps)
    # choices that are the same everywhere are not taken back
    choices = choices_at(planned)
    for name in (name for name in choices_of(planned) if not choices[name].keys() <= set(section.typed)):
        if (less := without(planned, name, steps)) is not None:
            yield f"{WITHOUT}{name}", less


def choices_of(tree: Tree) -> list[str]:
    """Names of the choices with which the step of a tree overlaps something."""
    return [name for name, knobs in choices_at(tree).items() if any(_is_chosen(tree, path) for path in knobs)]


def choices_at(tree: Tree) -> Mapping[str, Values]:
    """Choices of the step of a tree with their knobs: sites that its framework switches together are one."""
    return choices_with(tree.get("stack"), (tree.get("sites") or {}).values())


def _is_chosen(tree: Tree, path: str) -> bool:
    """Tell whether a knob has another value than that where nothing is done, and counts in the step of a tree."""
    value = get_path(tree, path)
    if value is None or str(value) == str(OFF[path]):
        return False
    needed = site_condition(path, tree) if path.startswith("sites.") else condition_of(path, tree)
    # a knob without meaning here is no choice
    return needed is not None and all(get_path(tree, other) == wanted for other, wanted in needed.items())
