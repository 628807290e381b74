"""Options of NCCL's communicators, one for each group of GPUs: Megatron-LM's YAML and process groups of PyTorch.

Megatron-LM makes each of its groups with what `--nccl-communicator-config-path` names for it; PyTorch takes
`ProcessGroupNCCL.Options` for a group. Of a plan they say how many CTAs the collectives over tp and over dp take, how
many those of tensor parallelism take beside a GEMM, and whether their stream comes first. A limit is of all collectives
of its communicator. Fields, with the release of NCCL in which they came, and the communicators of each axis are in
`conf/data/library_files.yaml`. Megatron-LM ignores groups and fields that it does not know, without a word; here they
are refused.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from typing import Any

import yaml

from dse.errors import ConfigError, Problem, Problems, did_you_mean
from dse.errors.parsing import parse_yaml
from dse.space import get_path
from dse.values import Frozen
from dse_deploy.distinct import TWICE, definition, later_changes, repeated_keys, repeated_literals
from dse_deploy.facts import ModelFacts, put_ctas
from dse_deploy.step_calls import CTAS
from dse_deploy.tuner_file import library_files
from dse_deploy.tuner_plan import Unplanned
from simulators.steps.operators.work import Axis
from simulators.steps.overlap.sites import SERIAL, SITES, read_schedule
from studies.plan.plan_file import Plan

GROUP = "tp"
"""The communicator of tensor parallelism."""
_BESIDE = tuple(name for name, site in SITES.items() if site.beside)
_ZERO = 2  # NCCL_CTA_POLICY_ZERO
_CTAS, _FIRST = "max_ctas", "is_high_priority_stream"
_URGENT = "communication"  # value of schedule.stream_priority
_CONSTANT = "PROCESS_GROUPS"
_OF_EXPERTS = ("ep_dp",)


class Field(Frozen):
    """An option of a communicator. nccl: name of the field there, None for an option of PyTorch alone; since: release.

    zero_since: release of its value for copy engines. megatron: whether Megatron-LM passes it on.
    """

    nccl: str | None
    since: str | None
    low: int | None = None
    high: int | None = None
    values: tuple[str | bool, ...] = ()
    zero_since: str | None = None
    megatron: bool = True

    def rule(self, value: Any) -> str:
        """The rule that a value breaks; "" for none."""
        if self.values:
            allowed = any(type(value) is type(own) and value == own for own in self.values)
            return "" if allowed else f"is none of {', '.join(map(str, self.values))}"
        is_number = isinstance(value, int) and not isinstance(value, bool)
        within = is_number and (self.low or 0) <= value <= (self.high or 0)
        return "" if within else f"is no whole number from {self.low} to {self.high}"

    def meaning(self, value: Any) -> str:
        """Name of the field in NCCL and the release that has it, or its value."""
        if self.nccl is None:
            return "stream of high priority: the collective is launched first"
        since = self.zero_since if self.zero_since is not None and value == _ZERO else self.since
        return f"{self.nccl} of ncclConfig_t, in NCCL {since} and later"


@cache
def fields() -> Mapping[str, Field]:
    """Options by their names in PyTorch. Raises ConfigError."""
    check = Problems()
    table = library_files()["communicators"]["fields"]
    read = {name: check.model(Field, entry, path=f"library_files.{name}") for name, entry in table.items()}
    check.done()
    return {name: entry for name, entry in read.items() if entry is not None}


def groups_of(plan: Plan) -> tuple[dict[str, dict[str, Any]], dict[tuple[str, str], tuple[str, ...]]]:
    """Options of the communicators of a plan by group, and the paths that each group and option says.

    A communicator has the largest number of CTAs that the plan has there. Copy engines have none: NCCL moves by them
    what does not add (NCCL_CTA_POLICY_ZERO), and sites beside a GEMM add.
    """
    schedules = {name: str(plan.get("sites", {}).get(name, SERIAL)) for name in _BESIDE}
    read = {name: read_schedule(text, name) for name, text in schedules.items() if text != SERIAL}
    beside = {name: way for name, way in read.items() if way.family == "concurrent" and way.comm_engine == "cu"}
    sites = tuple(f"sites.{name}" for name in beside)
    groups, paths = dict[str, dict[str, Any]](), dict[tuple[str, str], tuple[str, ...]]()
    for axis, group in _groups_of_axes(plan):
        of_sites = [int(way.comm_cus or 0) for way in beside.values()] if group == GROUP else []
        over_all = int(get_path(plan, CTAS[axis]) or 0)
        if ctas := max([over_all, *of_sites]):
            most = fields()[_CTAS].high
            groups[group] = {_CTAS: ctas if most is None else min(ctas, most)}
            paths[group, _CTAS] = (*(sites if any(of_sites) else ()), *([CTAS[axis]] if over_all else []))
    if beside:
        first = any(way.launch_order == "comm_first" or way.stream_priority == _URGENT for way in beside.values())
        groups = {GROUP: {**groups.get(GROUP, {}), _FIRST: first}, **_without(groups, GROUP)}
        paths[GROUP, _FIRST] = sites
    return groups, paths


def _without(groups: Mapping[str, dict[str, Any]], name: str) -> dict[str, dict[str, Any]]:
    return {group: options for group, options in groups.items() if group != name}


def _axes() -> Mapping[Axis, tuple[str, ...]]:
    """Axis -> its communicators: the first that is there says the CTAs."""
    return {axis: tuple(names) for axis, names in library_files()["communicators"]["axes"].items()}


def _groups_of_axes(plan: Plan) -> Iterator[tuple[Axis, str]]:
    """Yield the axes and communicators whose collectives a plan has; those of experts where GPUs share them."""
    has_experts = int(get_path(plan, "parallel.ep") or 1) > 1
    for axis, names in _axes().items():
        yield from ((axis, name) for name in names if has_experts or name not in _OF_EXPERTS)


def yaml_text(groups: Mapping[str, Mapping[str, Any]]) -> str:
    """Text of Megatron-LM's file."""
    head = "# launch with --nccl-communicator-config-path <this file>\n"
    return head + yaml.safe_dump({name: dict(options) for name, options in groups.items()}, sort_keys=False)


def python_text(groups: Mapping[str, Mapping[str, Any]]) -> str:
    """Text of a module with the options of process groups, and the function that makes them."""
    return f'''{_CONSTANT} = { ({name: dict(options) for name, options in groups.items()})!r}


def options(group):
    """Options of a process group: torch.distributed.new_group(..., pg_options=options("tp")); None for no others."""
    import torch.distributed as dist

    if group not in {_CONSTANT}:
        return None
    chosen = dict({_CONSTANT}[group])
    result = dist.ProcessGroupNCCL.Options(is_high_priority_stream=chosen.pop("is_high_priority_stream", False))
    for name, value in chosen.items():
        setattr(result.config, name, value)
    return result
'''


def read_yaml(text: str, name: str) -> dict[str, dict[str, Any]]:
    """Options by group of Megatron-LM's file. name: of the file, in messages. Raises ConfigError."""
    tree = parse_yaml(text, name)
    _refuse_repeated(repeated_keys(text), name)
    return _checked(tree, name, megatron=True)


def _refuse_repeated(keys: Iterable[tuple[int, str]], name: str) -> None:
    check = Problems()
    for line, key in keys:
        check.add(f"{name}:{line}.{key}", TWICE, way_out="remove one of them")
    check.done(name)


def read_python(text: str, name: str) -> dict[str, dict[str, Any]]:
    """Options by group of a module, which is not run. name: of the file, in messages. Raises ConfigError."""
    try:
        module = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigError([Problem(name, f"is no Python: {error}")]) from None
    first = definition(module, _CONSTANT)
    if first is None or first.value is None:
        raise ConfigError([Problem(name, f"has no {_CONSTANT}", way_out=f"write {_CONSTANT} = {{'tp': {{...}}}}")])
    try:
        tree = ast.literal_eval(first.value)
    except (ValueError, TypeError, RecursionError, MemoryError):
        rule = "is no literal, and a file is never run"
        raise ConfigError([Problem(f"{name}:{first.lineno}.{_CONSTANT}", rule)]) from None
    check = Problems()
    for line in dict.fromkeys(later_changes(module, _CONSTANT, first)):
        rule = f"is changed after line {first.lineno}, and a file is never run"
        check.add(f"{name}:{line}.{_CONSTANT}", rule, way_out="write all groups in one literal")
    check.done(name)
    _refuse_repeated(repeated_literals(first.value), name)
    return _checked(tree, name, megatron=False)


def _checked(tree: Any, name: str, *, megatron: bool) -> dict[str, dict[str, Any]]:
    check, by_name = Problems(), fields()
    if not isinstance(tree, Mapping):
        raise ConfigError([Problem(name, "is no mapping of communicators", str(tree)[:40], "tp: {max_ctas: 16}")])
    groups = library_files()["communicators"]["groups"]
    for group, options in tree.items():
        at = f"{name}: {group}"
        if group not in groups:
            rule = "is no communicator of Megatron-LM, which ignores it"
            check.add(at, rule if megatron else "is no group", way_out=did_you_mean(str(group), groups))
        if not isinstance(options, Mapping):
            check.add(at, "is no mapping of options", value=options, way_out="tp: {max_ctas: 16}")
            continue
        for option, value in options.items():
            if option not in by_name or (megatron and not by_name[option].megatron):
                rule = "is no option that Megatron-LM passes on" if megatron else "is no option of ProcessGroupNCCL"
                check.add(f"{at}.{option}", rule, value=value, way_out=did_you_mean(str(option), by_name))
            elif rule := by_name[option].rule(value):
                check.add(f"{at}.{option}", rule, value=value)
        low, high = options.get("min_ctas"), options.get("max_ctas")
        if isinstance(low, int) and isinstance(high, int) and low > high:
            check.add(f"{at}.min_ctas", f"is above max_ctas = {high}", value=low, way_out="lower it")
    check.done(name)
    return {str(group): dict(options) for group, options in tree.items()}


def read_groups(
    groups: Mapping[str, Mapping[str, Any]], plan: dict[str, Any], facts: ModelFacts, *, megatron: bool
) -> Unplanned:
    """Put what options of communicators say into a plan, and return what no plan has. What is there stays.

    A limit alone says no schedule; the order of the stream says that sums run beside a GEMM.
    """
    result, read = Unplanned(), set[tuple[str, str]]()
    options = groups.get(GROUP, {})
    if _FIRST in options:
        read.add((GROUP, _FIRST))
        for name in _BESIDE:
            plan.setdefault("sites", {}).setdefault(name, _schedule(options))
    for axis, names in _axes().items():
        limits = {name: int(groups[name][_CTAS]) for name in names if _CTAS in groups.get(name, {})}
        group = next((name for name in limits if name not in _OF_EXPERTS), None)
        if group is None:
            continue
        reason = put_ctas(plan, CTAS[axis], limits[group], facts)
        read.update((name, _CTAS) for name, ctas in limits.items() if ctas == limits[group])
        if reason and not (group == GROUP and _FIRST in options):
            result.unread.append(f"{group}.{_CTAS} {limits[group]} ({reason})")
        # gradients have a communicator of their own there
        if megatron and group != names[0]:
            result.unmodelled.append(
                f"{group}.{_CTAS} {limits[group]} (read as {CTAS[axis]}, though gradients are reduced in {names[0]}: "
                "set it there, too)"
            )
    result.unmodelled += _others(groups, read)
    return result


def _schedule(options: Mapping[str, Any]) -> str:
    name = "c3_sp" if options[_FIRST] else "c3_base"
    return f"{name} comm_cus={options[_CTAS]}" if _CTAS in options else name


def _others(groups: Mapping[str, Mapping[str, Any]], read: Collection[tuple[str, str]]) -> Iterator[str]:
    for group, options in groups.items():
        for option, value in options.items():
            if (group, option) not in read:
                copies = option == "cta_policy" and value == _ZERO
                yield f"{group}.{option} {value}{' (copy engines, of what does not add)' if copies else ''}"
