"""Options of NCCL's communicators, one for each group of GPUs: Megatron-LM's YAML and process groups of PyTorch.

Megatron-LM makes each of its groups with what `--nccl-communicator-config-path` names for it; PyTorch takes
`ProcessGroupNCCL.Options` for a group. Of a plan they say how many CTAs the collectives of tensor parallelism take
beside a GEMM, and whether their stream comes first. Fields, with the release of NCCL in which they came, are in
`conf/data/library_files.yaml`. Megatron-LM ignores groups and fields that it
does not know, without a word; here they are refused.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import yaml

from dse.errors import ConfigError, Problem, Problems, did_you_mean
from dse.errors.parsing import parse_yaml
from dse.values import Frozen
from dse_deploy.tuner_file import library_files
from simulators.steps.overlap.sites import SERIAL, SITES, read_schedule
from studies.plan.plan_file import Plan

GROUP = "tp"
"""The communicator of tensor parallelism."""
_BESIDE = tuple(name for name, site in SITES.items() if site.beside)
_ZERO = 2  # NCCL_CTA_POLICY_ZERO
_MODELLED = ("max_ctas", "is_high_priority_stream")
_CONSTANT = "PROCESS_GROUPS"


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


def groups_of(plan: Plan) -> tuple[dict[str, dict[str, Any]], tuple[str, ...]]:
    """Options of the communicators of a plan, and the paths of the sites that they say.

    Copy engines have none: NCCL moves by them what does not add (NCCL_CTA_POLICY_ZERO), and these sites add.
    """
    schedules = {name: str(plan.get("sites", {}).get(name, SERIAL)) for name in _BESIDE}
    read = {name: read_schedule(text, name) for name, text in schedules.items() if text != SERIAL}
    beside = {name: way for name, way in read.items() if way.family == "concurrent" and way.comm_engine == "cu"}
    if not beside:
        return {}, ()
    most = fields()["max_ctas"].high
    ctas = max(int(way.comm_cus or 0) for way in beside.values())
    options: dict[str, Any] = {"max_ctas": ctas if most is None else min(ctas, most)} if ctas else {}
    options["is_high_priority_stream"] = any(way.launch_order == "comm_first" for way in beside.values())
    return {GROUP: options}, tuple(f"sites.{name}" for name in beside)


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
    return _checked(parse_yaml(text, name), name, megatron=True)


def read_python(text: str, name: str) -> dict[str, dict[str, Any]]:
    """Options by group of a module, which is not run. name: of the file, in messages. Raises ConfigError."""
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigError([Problem(name, f"is no Python: {error}")]) from None
    for node in body:
        targets = [target.id for target in getattr(node, "targets", ()) if isinstance(target, ast.Name)]
        if isinstance(node, ast.Assign) and targets == [_CONSTANT]:
            try:
                tree = ast.literal_eval(node.value)
            except (ValueError, TypeError, RecursionError, MemoryError):
                rule = "is no literal, and a file is never run"
                raise ConfigError([Problem(f"{name}:{node.lineno}.{_CONSTANT}", rule)]) from None
            return _checked(tree, name, megatron=False)
    raise ConfigError([Problem(name, f"has no {_CONSTANT}", way_out=f"write {_CONSTANT} = {{'tp': {{...}}}}")])


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


def read_groups(groups: Mapping[str, Mapping[str, Any]], plan: dict[str, Any]) -> list[str]:
    """Put what options of communicators say into a plan, and return those that change a step and no plan has.

    Sites that are there stay.
    """
    options = groups.get(GROUP, {})
    if any(name in options for name in _MODELLED):
        sites = plan.setdefault("sites", {})
        for name in _BESIDE:
            sites.setdefault(name, _schedule(options))
    return list(_others(groups))


def _schedule(options: Mapping[str, Any]) -> str:
    name = "c3_sp" if options.get("is_high_priority_stream") else "c3_base"
    return f"{name} comm_cus={options['max_ctas']}" if "max_ctas" in options else name


def _others(groups: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    for group, options in groups.items():
        for option, value in options.items():
            if group != GROUP or option not in _MODELLED:
                copies = option == "cta_policy" and value == _ZERO
                yield f"{group}.{option} {value}{' (copy engines, of what does not add)' if copies else ''}"
