"""A plan of a step in a file: a tree of overrides of a step, as `plan.yaml` of a run of `plan` has it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from dse.config.options import OWN_FLAGS
from dse.errors import ConfigError, Problem, Problems, did_you_mean
from dse.errors.parsing import parse_yaml
from dse.files import read_text
from dse.study import settings
from simulators.steps.overlap.sites import SERIAL, SITES, read_schedule
from simulators.workloads.model import Optimizer, Parallel, Run
from studies.plan.stacks import tool_facts

Plan = Mapping[str, Any]
SECTIONS = ("sites", "parallel", "run", "optimizer", "system")
"""Sections of a plan."""


_OF_A_RUN = {*settings.SECTIONS, "given", "layouts", "candidates", ""} - {"simulator"}
_MOST_BYTES = 1 << 20  # a plan is a page


@dataclass(frozen=True)
class PlanFile:
    """A plan that was read. tool: whose settings it was; "" where a run of `plan` wrote it, or a person.

    unread: settings of the tool that change a step and are not modelled. step: overrides that the step of the plan has.
    """

    plan: dict[str, Any]
    tool: str = ""
    unread: tuple[str, ...] = ()
    step: tuple[str, ...] = ()


def step_words(words: Iterable[str]) -> list[str]:
    """Overrides, among those of a run, that the step of its plan has, and the flag of the user's folder."""
    kept = (word for word in words if word[0] not in "~-" or _path(word) == OWN_FLAGS[0])
    return [word for word in kept if _path(word).partition(".")[0] not in _OF_A_RUN]


def step_of_run(provenance: Mapping[str, Any]) -> list[str]:
    """Overrides of the step of a run's plan, with paths that are the same in every working folder."""
    folder = provenance.get("config_dir")  # of the user's own configuration
    words = [f"{OWN_FLAGS[0]}={folder}"] if folder else []
    return [_absolute(word) for word in (*words, *step_words(provenance["overrides"]))]


def _absolute(word: str) -> str:
    path, _, value = word.partition("=")
    # a name without an ending is that of an option
    is_place = path == OWN_FLAGS[0] or "/" in value or bool(Path(value).suffix)
    return f"{path}={Path(value).absolute()}" if is_place and Path(value).exists() else word


def over_step(step: Sequence[str], typed: Sequence[str], plan: Plan) -> list[str]:
    """Typed overrides, after those of a step that neither they nor the plan replace."""
    replaced = {*map(_path, typed), *(path for path, _ in all_leaves(plan))}
    if not replaced.isdisjoint(("system", "run.mode", "kernels")):  # another machine or mode has other software
        replaced.add("stack")
    return [*(word for word in step if replaced.isdisjoint((_path(word), _path(word).partition(".")[0]))), *typed]


def _path(word: str) -> str:
    return word.lstrip("+").partition("=")[0]


def read_plan(path: Path) -> PlanFile:
    """The plan of a file. Raises ConfigError where it is none."""
    way = "name the plan.yaml of a run of `python -m dse plan`"
    tree = parse_yaml(read_text(path, "plan", most=_MOST_BYTES, way_out=way), "plan")
    tool = tree.pop("tool", "") if isinstance(tree, dict) else ""  # not sections of the plan
    unread, step = (tree.pop(name, []) if isinstance(tree, dict) else [] for name in ("unread", "step"))
    if not isinstance(tree, Mapping) or not tree or not all(isinstance(part, Mapping) for part in tree.values()):
        raise ConfigError([Problem("plan", "holds no plan", str(path), way)])
    check = Problems()
    for name in tree:
        if name not in SECTIONS:
            check.add(f"plan.{name}", "is no section of a plan", way_out=way)
    if tool and tool not in tool_facts():
        check.add("plan.tool", "is no tool", value=tool, way_out=did_you_mean(str(tool), tool_facts()))
    if not isinstance(unread, list):
        check.add("plan.unread", "is no list of settings", value=unread, way_out="leave it out")
    if not isinstance(step, list) or step_words(map(str, step)) != step:
        check.add("plan.step", "is no list of overrides of a step", value=step, way_out="leave it out")
    check.done()
    plan = {str(name): dict(entries) for name, entries in tree.items()}
    return PlanFile(plan, str(tool), tuple(map(str, unread)), tuple(step))


_NUM_SMS = "system.node.experts.num_sms"
SECTION_MODELS: Mapping[str, type[BaseModel]] = {"parallel": Parallel, "run": Run, "optimizer": Optimizer}
"""Sections of a step whose knobs a plan may have."""


def check_plan(plan: Plan) -> None:
    """Check the choices of a plan: sites, schedules, and knobs with values that they may have. Raises ConfigError."""
    check = Problems()
    for path, value in leaves_of(plan):
        section, _, name = path.partition(".")
        if section == "sites":
            _check_site(check, path, name, value)
        elif section in SECTION_MODELS:
            _check_knob(check, path, SECTION_MODELS[section].model_fields.get(name), value)
        elif path != _NUM_SMS:
            check.add(path, "is no choice of a plan", value=value)
        # half of the SMs send, half receive
        elif not isinstance(value, int) or isinstance(value, bool) or value < 2 or value % 2:
            check.add(path, "is no even number of SMs", value=value)
    check.done()


def _check_site(check: Problems, path: str, name: str, value: Any) -> None:
    if name not in SITES:
        check.add(path, "is no site", way_out=did_you_mean(name, SITES))
        return
    try:
        read_schedule(str(value), name)
    except ConfigError as error:
        check.found.extend(replace(problem, path=f"{path}.{problem.path}".rstrip(".")) for problem in error.problems)


def _check_knob(check: Problems, path: str, field: FieldInfo | None, value: Any) -> None:
    if field is None:
        check.add(path, "is no knob of a step", value=value)
        return
    # with the limits of the field
    kind: Any = Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation
    try:
        TypeAdapter(kind).validate_python(value)
    except ValidationError as error:
        check.add(path, error.errors()[0]["msg"].lower(), value=value)


def leaves_of(plan: Plan) -> Iterator[tuple[str, Any]]:
    """Yield each choice of a plan, by its path; serial sites are none."""
    for path, value in all_leaves(plan):
        if not (path.startswith("sites.") and value == SERIAL):
            yield path, value


def all_leaves(plan: Plan) -> Iterator[tuple[str, Any]]:
    """Yield every value of a plan, by its path."""
    for section, entries in plan.items():
        yield from flattened(section, entries)


def flattened(path: str, tree: Any) -> Iterator[tuple[str, Any]]:
    """Yield the values below a dotted path with theirs."""
    if not isinstance(tree, Mapping):
        yield path, tree
        return
    for name, value in tree.items():
        yield from flattened(f"{path}.{name}", value)


def put_in(tree: dict[str, Any], path: str, value: Any) -> None:
    """Put a value at a dotted path, with the mappings above it."""
    *above, last = path.split(".")
    for name in above:
        tree = tree.setdefault(name, {})
    tree[last] = value
