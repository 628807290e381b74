"""Settings of a tool read as a plan: texts of its files, what their settings mean, and which mean nothing to a plan."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from dse.config.yaml_checks import parse_yaml
from dse.errors import ConfigError, Problem
from search_spaces.frameworks.settings import (
    BY_LAYER,
    Plan,
    Setting,
    SettingsFile,
    check_plan,
    flattened,
    put_in,
    tp_of,
)
from search_spaces.frameworks.user_buffers import is_of_a_site, read_layers, sites_of

Values = Iterator[tuple[str, Any]]
_WHOLE = re.compile(r"-?\d{1,18}")


@dataclass(frozen=True)
class ReadSettings:
    """A plan that files say. unread: settings of them that mean nothing to a plan, or not with their value."""

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
        if not text.strip():
            raise ConfigError([Problem("settings", "is empty", file.name)])
        for name, value, setting in [] if file.format == "user_buffers" else _settings(file, text):
            if setting is not None and setting.path == "sites":
                of_sites.append((setting, value))
            elif setting is None or not setting.read(value, result):
                unread.append(name if setting is None else f"{name} {value}")
    for text in by_layer:
        unread += _read_layers(text, result)
    unread += _read_sites(of_sites, result, has_layers=bool(by_layer))
    check_plan(result)
    return ReadSettings(result, unread)


def _settings(file: SettingsFile, text: str) -> Iterator[tuple[str, Any, Setting | None]]:
    """Yield the names and values that a file has, and the settings that they are; None where none is known."""
    by_name = {_plain(name): setting for setting in file.settings for name in (setting.name, *setting.aliases)}
    for name, value in _VALUES[file.format](text, by_name):
        yield name, value, by_name.get(_plain(name))


def _read_sites(settings: Sequence[tuple[Setting, Any]], plan: dict[str, Any], *, has_layers: bool) -> Iterator[str]:
    """Put settings of sites into a plan, and yield those that mean nothing to it."""
    for setting, value in settings:
        if setting.constant:
            if not has_layers:
                yield f"{setting.name} {value} (import the folder that holds both files)"
            continue
        if setting.schedule == BY_LAYER and value is True:
            put_in(plan, "parallel.sequence_parallel", True)
        if (setting.disables or not has_layers) and not setting.read(value, plan):
            yield f"{setting.name} {value}"


def _plain(name: str) -> str:
    """Name of a setting, in which tools take dashes for underscores."""
    return name.replace("_", "-")


def _read_layers(text: str, plan: dict[str, Any]) -> list[str]:
    tree = _parsed(text)
    if tree is None:  # user buffers are not initialised
        return []
    layers = read_layers(tree)
    plan["sites"] = {**plan.get("sites", {}), **sites_of(layers, tp_of(plan))}
    put_in(plan, "parallel.sequence_parallel", True)
    return [name for name, layer in layers.items() if not is_of_a_site(name, layer)]


def _parsed(text: str) -> Any:
    try:
        return parse_yaml(text, "settings")
    except yaml.YAMLError as error:
        raise ConfigError([Problem("settings", f"is no YAML: {str(error).splitlines()[0]}")]) from None


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text.replace("\r\n", "\n").replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise ConfigError([Problem("settings", f"is no command line: {error}".lower())]) from None


def _scalar(text: str) -> Any:
    """A whole number, true, false, or the text itself."""
    if _WHOLE.fullmatch(text):
        return int(text)
    return {"true": True, "false": False}.get(text.lower(), text)


def _arguments(text: str, by_name: Mapping[str, Setting]) -> Values:
    """Yield options of a command line, or of a file with one a line."""
    for name in re.findall(r"^# (--[\w-]+) off$", text, re.MULTILINE):
        yield name, False
    words = _words(text)
    for place, word in enumerate(words):
        if not word.startswith("--"):
            continue
        name, equals, value = word.partition("=")
        setting, following = by_name.get(_plain(name)), words[place + 1] if place + 1 < len(words) else "--"
        if equals:
            yield name, _scalar(value)
        elif (setting is not None and setting.is_flag) or following.startswith("--"):
            yield name, True
        else:
            yield name, _scalar(following)


def _yaml_values(text: str, by_name: Mapping[str, Setting]) -> Values:
    tree = _parsed(text)
    if not isinstance(tree, Mapping):
        raise ConfigError([Problem("settings", "is no mapping of YAML", str(tree)[:40])])
    for name, value in tree.items():
        is_json = isinstance(value, str) and value.lstrip().startswith("{")
        for path, leaf in flattened(str(name), _parsed(value) if is_json else value):
            yield path, _scalar(leaf) if isinstance(leaf, str) else leaf


def _environment(text: str, by_name: Mapping[str, Setting]) -> Values:
    for word in _words(text):
        name, equals, value = word.rstrip(";").partition("=")
        if equals:
            yield name, _scalar(value)


def _python(text: str, by_name: Mapping[str, Setting]) -> Values:
    """Yield constants of a module, which is not run."""
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError) as error:
        raise ConfigError([Problem("settings", f"is no Python: {error}")]) from None
    for node in body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(target, ast.Name) and node.value is not None:
            try:
                yield target.id, ast.literal_eval(node.value)
            except (ValueError, TypeError):
                yield target.id, ast.unparse(node.value)


_VALUES: Mapping[str, Callable[[str, Mapping[str, Setting]], Values]] = {
    "arguments": _arguments,
    "yaml": _yaml_values,
    "environment": _environment,
    "python": _python,
}
