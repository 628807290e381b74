"""Files of settings of a tool: what they say of a plan, and what a plan is that they say.

A plan is a tree of overrides of a step, as `plan.yaml` of a run of `plan` has it: `sites`, `parallel`, `run`,
`optimizer`. A tool says some of it in words of its own (`conf/data/framework_settings.yaml`); what it has no word for
is told. Reading a file that was written gives the nearest plan that the tool can say, and writing that the same file.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import yaml

from dse.config.options import conf_dir
from dse.config.yaml_checks import load_yaml, parse_yaml
from dse.errors import ConfigError, Problem, Problems
from dse.space import get_path
from dse.values import Frozen
from search_spaces.frameworks.user_buffers import (
    LAYERS,
    METHODS,
    UserBuffer,
    is_of_a_site,
    layers_of,
    read_layers,
    sites_of,
)
from simulators.steps.sites import SERIAL, SITES, read_schedule

Plan = Mapping[str, Any]
_TP = "parallel.tp"


class Setting(Frozen):
    """A setting of a tool. name: with dots where a file has sections. path: of the knob that it says.

    values: value of the knob -> that of the setting; the same where empty. constant: value that the setting has where
    sites overlap. disables: it is on where none of its sites overlaps and others do. sites, families, knob, schedule:
    see `conf/data/framework_settings.yaml`.
    """

    name: str
    path: str
    meaning: str
    provenance: Literal["vendor", "secondary", "memory"]
    source: str
    values: Mapping[str | int | bool, str | int | bool] = {}
    sites: tuple[str, ...] = tuple(SITES)
    families: tuple[str, ...] = ()
    knob: str = ""
    schedule: str = ""
    constant: str = ""
    disables: bool = False

    def value_for(self, plan: Plan) -> Any:
        """Value of the setting for a plan; None where the plan does not say it, or the setting has no value for it."""
        if self.path == "sites":
            return self._of_sites(plan)
        value = get_path(plan, self.path)
        if value is None or not self.values:
            return value
        return next((setting for knob, setting in self.values.items() if _same(knob, value)), None)

    def _of_sites(self, plan: Plan) -> Any:
        if "sites" not in plan:
            return None
        overlapped = list(self._overlapped(plan))
        if self.disables:
            return True if not overlapped and any(text != SERIAL for text in plan["sites"].values()) else None
        if self.constant:
            return self.constant if overlapped else None
        if not self.knob:
            return bool(overlapped)
        numbers = [int(getattr(read_schedule(text), self.knob) or 0) for _, text in overlapped]
        return max(numbers, default=0) or None

    def _overlapped(self, plan: Plan) -> Iterator[tuple[str, str]]:
        """Yield the sites with schedules that the setting is of."""
        for site, text in plan.get("sites", {}).items():
            is_mine = site in self.sites and text != SERIAL
            if is_mine and (not self.families or read_schedule(text).family in self.families):
                yield site, text

    def paths(self, plan: Plan) -> list[str]:
        """Paths of a plan that the setting says something of."""
        if self.value_for(plan) is None:
            return []
        return [f"sites.{site}" for site, _ in self._overlapped(plan)] if self.path == "sites" else [self.path]

    def read(self, value: Any, plan: dict[str, Any]) -> None:
        """Put what a value of the setting means into a plan; sites that are there are left."""
        if self.constant:
            return
        if self.disables:
            plan["sites"] = {**plan.get("sites", {}), **(dict.fromkeys(self.sites, SERIAL) if value else {})}
            return
        if self.path == "sites":
            for site in self.sites if value else ():
                plan.setdefault("sites", {}).setdefault(site, self.schedule.replace("{}", str(value)))
            return
        knobs = [knob for knob, setting in self.values.items() if _same(setting, value)]
        if self.values and not knobs:
            options = ", ".join(map(str, self.values.values()))
            raise ConfigError([Problem(self.name, "has no value of a plan for it", value, f"known: {options}")])
        put_in(plan, self.path, knobs[0] if knobs else value)


def _same(one: Any, other: Any) -> bool:
    return str(one).lower() == str(other).lower()


class SettingsFile(Frozen):
    """A file of a tool."""

    name: str
    format: Literal["arguments", "yaml", "environment", "python", "user_buffers", "msccl"]
    settings: tuple[Setting, ...] = ()


class Tool(Frozen):
    """A framework or library. version: that the settings are of."""

    title: str
    version: str
    files: tuple[SettingsFile, ...]


@cache
def tools() -> dict[str, Tool]:
    """All tools by name. Raises ConfigError."""
    check = Problems()
    tree = load_yaml(conf_dir() / "data" / "framework_settings.yaml")["tools"]
    read = {name: check.model(Tool, entry, path=f"tools.{name}") for name, entry in tree.items()}
    check.done()
    return {name: tool for name, tool in read.items() if tool is not None}


@dataclass(frozen=True)
class Row:
    """A setting as it is written: its value, the knobs that it says, what it means to the tool, and who says so."""

    name: str
    value: Any
    paths: Sequence[str]
    meaning: str
    source: str

    @property
    def note(self) -> str:
        """What it means, with the source."""
        return f"{self.meaning} ({self.source})"


@dataclass(frozen=True)
class Written:
    """A file of a plan. unsaid: paths of the plan for which the file has no word."""

    text: str
    rows: Sequence[Row]
    unsaid: frozenset[str]


def write(file: SettingsFile, plan: Plan, head: str) -> Written:
    """A file of settings for a plan. head: lines of comment above. Raises ConfigError."""
    rows = list(_layer_rows(plan) if file.format == "user_buffers" else _rows(file, plan))
    covered = {path for row in rows for path in row.paths}
    text = _comment(head) + _TEXTS[file.format](rows)
    return Written(text, rows, frozenset(path for path, _ in leaves_of(plan)) - covered)


def put_in(tree: dict[str, Any], path: str, value: Any) -> None:
    """Put a value at a dotted path, with the mappings above it."""
    *above, last = path.split(".")
    for name in above:
        tree = tree.setdefault(name, {})
    tree[last] = value


def leaves_of(plan: Plan) -> Iterator[tuple[str, Any]]:
    """Yield each choice of a plan, by its path; serial sites are none."""
    for section, entries in plan.items():
        for name, value in _below(f"{section}.", entries):
            if not (section == "sites" and value == SERIAL):
                yield name, value


def _below(path: str, tree: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(tree, Mapping):
        yield path.rstrip("."), tree
        return
    for name, value in tree.items():
        yield from _below(f"{path}{name}.", value)


def _comment(head: str) -> str:
    return "".join(f"# {line}\n" for line in head.splitlines())


def _rows(file: SettingsFile, plan: Plan) -> Iterator[Row]:
    for setting in file.settings:
        value = setting.value_for(plan)
        if value is not None:
            yield Row(setting.name, value, setting.paths(plan), setting.meaning, setting.source)


def _layer_rows(plan: Plan) -> Iterator[Row]:
    sites, tp, precision = plan.get("sites", {}), _tp(plan), get_path(plan, "run.precision")
    for name, layer in layers_of(sites, tp, fp8=str(precision).startswith("fp8")).items():
        yield Row(
            name, layer, [f"sites.{LAYERS[name]}"], METHODS[layer.method], "transformer_engine/pytorch/module/base.py"
        )


def _tp(plan: Plan) -> int:
    tp = get_path(plan, _TP)
    if not isinstance(tp, int) or isinstance(tp, bool) or tp < 2:
        rule = "is missing: how many GPUs share a layer, two at least"
        raise ConfigError([Problem(_TP, rule, tp, "write parallel.tp=8")])
    return tp


# Texts


def _layers_text(rows: Sequence[Row]) -> str:
    notes = "".join(f"# {method}: {meaning}\n" for method, meaning in METHODS.items())
    return notes + (yaml.safe_dump({row.name: row.value.tree for row in rows}, sort_keys=False) if rows else "{}\n")


def _arguments_text(rows: Sequence[Row]) -> str:
    """One argument a line; an option that is off is a comment."""
    lines = []
    for row in rows:
        line = row.name if row.value is True else f"{row.name} {row.value}"
        lines.append(f"# {row.note}\n" + (f"# {row.name} off" if row.value is False else line))
    return "".join(f"{line}\n" for line in lines)


def _yaml_text(rows: Sequence[Row]) -> str:
    tree: dict[str, Any] = {}
    for row in rows:
        put_in(tree, row.name, row.value)
    notes = "".join(f"# {row.name}: {row.note}\n" for row in rows)
    return notes + (yaml.safe_dump(tree, sort_keys=False) if tree else "{}\n")


def _environment_text(rows: Sequence[Row]) -> str:
    return "".join(f"# {row.note}\nexport {row.name}={shlex.quote(str(row.value))}\n" for row in rows)


def _python_text(rows: Sequence[Row]) -> str:
    return "".join(f"# {row.note}\n{row.name} = {row.value!r}\n" for row in rows)


_TEXTS: Mapping[str, Callable[[Sequence[Row]], str]] = {
    "user_buffers": _layers_text,
    "arguments": _arguments_text,
    "yaml": _yaml_text,
    "environment": _environment_text,
    "python": _python_text,
}


# Reading


@dataclass(frozen=True)
class ReadSettings:
    """A plan that files say. unread: settings of them that no knob of a plan is for."""

    plan: dict[str, Any]
    unread: Sequence[str]


def read(files: Sequence[tuple[SettingsFile, str]], plan: Plan) -> ReadSettings:
    """The plan that files with their texts say, beside what one says already. Raises ConfigError.

    Layers of user buffers count before options that say of all sites whether they overlap.
    """
    result, unread = {name: dict(entries) for name, entries in plan.items()}, list[str]()
    by_layer = [text for file, text in files if file.format == "user_buffers"]
    of_sites = list[tuple[Setting, Any]]()
    for file, text in files:
        if file.format == "user_buffers":
            continue
        by_name = {setting.name: setting for setting in file.settings}
        for name, value in _VALUES[file.format](text):
            if name not in by_name:
                unread.append(name)
            elif by_name[name].path == "sites":
                of_sites.append((by_name[name], value))
            else:
                by_name[name].read(value, result)
    for text in by_layer:
        unread += _read_layers(text, result)
    for setting, value in of_sites:
        if setting.disables or not by_layer:
            setting.read(value, result)
    return ReadSettings(result, unread)


def _read_layers(text: str, plan: dict[str, Any]) -> list[str]:
    layers: dict[str, UserBuffer] = read_layers(parse_yaml(text, "settings"))
    plan["sites"] = {**plan.get("sites", {}), **sites_of(layers, _tp(plan))}
    return [name for name, layer in layers.items() if not is_of_a_site(name, layer)]


def _arguments(text: str) -> Iterator[tuple[str, Any]]:
    """Yield options of a command line, or of a file with one a line."""
    for name in re.findall(r"^# (--[\w-]+) off$", text, re.MULTILINE):
        yield name, False
    words = shlex.split(text.replace("\\\n", " "), comments=True)
    for place, word in enumerate(words):
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            following = words[place + 1] if place + 1 < len(words) else "--"
            if equals:
                yield name, parse_yaml(value, name)
            else:
                yield name, True if following.startswith("--") else parse_yaml(following, name)


def _yaml_values(text: str) -> Iterator[tuple[str, Any]]:
    tree = parse_yaml(text, "settings")
    if not isinstance(tree, Mapping):
        raise ConfigError([Problem("settings", "is no mapping of YAML", str(tree)[:40])])
    for name, value in tree.items():
        yield from _below(f"{name}.", value)


def _environment(text: str) -> Iterator[tuple[str, Any]]:
    for word in shlex.split(text, comments=True):
        name, equals, value = word.partition("=")
        if equals:
            yield name, parse_yaml(value, name)


def _python(text: str) -> Iterator[tuple[str, Any]]:
    """Yield constants of a module, which is not run."""
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError) as error:
        raise ConfigError([Problem("settings", f"is no Python: {error}")]) from None
    for node in body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            try:
                yield node.targets[0].id, ast.literal_eval(node.value)
            except (ValueError, TypeError):
                continue


_VALUES: Mapping[str, Callable[[str], Iterator[tuple[str, Any]]]] = {
    "arguments": _arguments,
    "yaml": _yaml_values,
    "environment": _environment,
    "python": _python,
}
