"""Settings of a tool read as a plan: texts of its files, what their settings mean, and which mean nothing to a plan."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dse.errors import ConfigError, Problem
from dse.errors.parsing import parse_yaml
from dse.space import get_path
from search_spaces.frameworks.derived import derive
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
from search_spaces.frameworks.shell import Script, is_open, read_script
from search_spaces.frameworks.user_buffers import is_of_a_site, read_layers, sites_of

Values = Iterator[tuple[str, Any]]
_WHOLE = re.compile(r"-?\d{1,18}")


@dataclass(frozen=True)
class ReadSettings:
    """A plan that files say. unread: settings of them that mean nothing to a plan, or not with their value.

    unmodelled: those that change a step all the same.
    """

    plan: dict[str, Any]
    unread: Sequence[str]
    unmodelled: Sequence[str] = ()


@dataclass
class _Plan:
    """A plan in the making, and settings that have no place there."""

    plan: dict[str, Any]
    unread: list[str] = field(default_factory=list)
    unmodelled: list[str] = field(default_factory=list)
    facts: dict[str, tuple[str, Any]] = field(default_factory=dict)
    of_sites: list[tuple[Setting, Any]] = field(default_factory=list)

    def add(self, name: str, value: Any, setting: Setting | None) -> None:
        """Put a setting into the plan, or among those that have no place there."""
        if setting is None:
            (self.unmodelled if name.startswith("${") else self.unread).append(name)
        elif self._is_open(name, value, setting):
            return
        elif setting.fact:
            if setting.values and value not in (True, False):
                self.unread.append(f"{name} {value}")
                self.facts.pop(setting.fact, None)
            else:
                self.facts[setting.fact] = name, value
        elif setting.path == "sites":
            self.of_sites.append((setting, value))
        elif not setting.read(value, self.plan):
            (self.unmodelled if setting.changes else self.unread).append(f"{name} {value}")
        elif text := setting.beside(self.plan):
            self.unmodelled.append(f"{name} {value} ({text}; its format is read)")

    def _is_open(self, name: str, value: Any, setting: Setting) -> bool:
        """Tell whether only a run would know a value that is not needed. Raises ConfigError where it is."""
        if setting.constant:  # a file, which is opened beside
            return not setting.path
        if not isinstance(value, str) or not is_open(value) or setting.fact:
            return False  # facts may not be needed
        if setting.path != "sites" and get_path(self.plan, setting.path) is not None:
            return True
        way = f"write {setting.path}=<value>" if setting.path != "sites" else "write its value in the file"
        raise ConfigError([Problem(f"settings.{name}", "names what the file does not set", value, way)])


def read(files: Sequence[tuple[SettingsFile, str]], plan: Plan) -> ReadSettings:
    """The plan that files with their texts say, beside what one says already. Raises ConfigError.

    Layers of user buffers count before options that say of all sites whether they overlap.
    """
    gathered = _Plan({name: dict(entries) for name, entries in plan.items()})
    result, unread = gathered.plan, gathered.unread
    by_layer = [text for file, text in files if file.format == "user_buffers"]
    for file, text in files:
        if not text.strip():
            raise ConfigError([Problem("settings", "is empty", file.name)])
        for name, value, setting in [] if file.format == "user_buffers" else settings_of(file, text):
            gathered.add(name, value, setting)
    possible = {setting.fact for file, _ in files for setting in file.settings}
    gathered.unmodelled += derive(gathered.facts, result, possible)
    for text in by_layer:
        unread += _read_layers(text, result)
    unread += _read_sites(gathered.of_sites, result, has_layers=bool(by_layer))
    check_plan(result)
    return ReadSettings(result, unread, gathered.unmodelled)


def settings_of(file: SettingsFile, text: str) -> Iterator[tuple[str, Any, Setting | None]]:
    """Yield the names and values that a file has, and the settings that they are; None where none is known."""
    by_name = by_names(file)
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


def by_names(file: SettingsFile) -> dict[str, Setting]:
    """Settings of a file by their names and aliases, as `_plain` has them."""
    return {_plain(name): setting for setting in file.settings for name in (setting.name, *setting.aliases)}


def _plain(name: str) -> str:
    """Name of a setting, in which tools take dashes for underscores; without those in front, of a command line."""
    return name.lstrip("-").replace("_", "-")


def _read_layers(text: str, plan: dict[str, Any]) -> list[str]:
    tree = _parsed(text)
    if tree is None:  # user buffers are not initialised
        return []
    layers = read_layers(tree)
    plan["sites"] = {**plan.get("sites", {}), **sites_of(layers, tp_of(plan))}
    put_in(plan, "parallel.sequence_parallel", True)
    return [name for name, layer in layers.items() if not is_of_a_site(name, layer)]


def _parsed(text: str) -> Any:
    return parse_yaml(text, "settings")


def _scalar(text: str) -> Any:
    """A whole number, true, false, or the text itself."""
    if _WHOLE.fullmatch(text):
        return int(text)
    return {"true": True, "false": False}.get(text.lower(), text)


def _arguments(text: str, by_name: Mapping[str, Setting]) -> Values:
    """Yield options of a launch script, of a command line, or of a file with one a line; and of its environment."""
    for name in re.findall(r"^# (--[\w-]+) off$", text, re.MULTILINE):
        yield name, False
    batch = " ".join(re.findall(r"^#SBATCH[ \t]+(.*)$", text, re.MULTILINE))
    for script in (read_script(batch), read_script(text)):
        yield from _of_script(script, by_name)


def _of_script(script: Script, by_name: Mapping[str, Setting]) -> Values:
    """Yield what a script sets: its environment, options of its commands, and words that a condition decides."""
    for name, value in script.exports.items():
        if _plain(name) in by_name or _OF_TOOL.match(name):
            yield name, _scalar(value)
    yield from _options(script, by_name)
    for place, word in enumerate(script.words):
        if _has_script(script.words, place):
            yield from _of_script(read_script(script.words[place + 1]), by_name)
        if word[2:-1] in script.two_ways and word == f"${{{word[2:-1]}}}" and not _is_value(script.words, place):
            yield f"{word}, which a condition of the script sets in two ways", True


def _has_script(words: Sequence[str], place: int) -> bool:
    """Tell whether a word is the option of a shell that a script follows: `bash -c "..."`."""
    return bool(_COMMAND.fullmatch(words[place])) and len(" ".join(words[place + 1 : place + 2]).split()) > 1


def _is_of_a_shell(words: Sequence[str], place: int) -> bool:
    """Tell whether an option is one of a shell, or of Python, in front of what runs."""
    return _has_script(words, place) or (words[place] == "-m" and place > 0 and "python" in words[place - 1])


def _is_value(words: Sequence[str], place: int) -> bool:
    """Tell whether a word is what follows an option."""
    return place > 0 and _OPTION.match(words[place - 1]) is not None and "=" not in words[place - 1]


def _options(script: Script, by_name: Mapping[str, Setting]) -> Values:
    """Yield the options among the words of a script, with what follows them."""
    words = script.words
    for place, word in enumerate(words):
        if not _OPTION.match(word) or _is_of_a_shell(words, place):
            continue
        name, equals, value = word.partition("=")
        setting, following = (
            by_name.get(_plain(_path_of(name))),
            words[place + 1] if place + 1 < len(words) else "--",
        )
        if setting is None and _plain(name).startswith("no-"):
            denied = by_name.get(_plain(name)[3:])
            if denied is not None and denied.is_flag:
                yield name.replace("no-", "", 1), False
                continue
        if _plain(name) in ("e", "env") and "=" in following:  # of a container
            variable, _, value = following.partition("=")
            if _plain(variable) in by_name or _OF_TOOL.match(variable):
                yield variable, _scalar(value)
        elif setting and setting.several:
            yield name, " ".join(([value] if equals else []) + list(_up_to_option(words[place + 1 :])))
        elif equals:
            yield from _leaves(name, value)
        elif _OPTION.match(following) or (setting and setting.is_flag and following.lower() not in _BOOLEANS):
            yield _path_of(name), True
        else:
            yield from _leaves(name, following)


def _up_to_option(words: Sequence[str]) -> Iterator[str]:
    """Yield the words in front of the next option."""
    for word in words:
        if _OPTION.match(word):
            return
        yield word


_COMMAND = re.compile(r"-[a-z]?c")  # of a shell: a script follows
_OPTION = re.compile(r"--?[A-Za-z]|--$")
_OF_TOOL = re.compile(r"(VLLM|SGLANG|SGL|NCCL|RCCL|NVTE|NVSHMEM|TLLM|TRTLLM|TORCH_NCCL|MORI|DEEPEP)_")
_BOOLEANS = ("true", "false")


def _leaves(name: str, value: str) -> Values:
    """Yield a value, or those of the JSON that it is, by their paths."""
    if not value.lstrip().startswith("{"):
        yield _path_of(name), _scalar(value)
        return
    tree = _parsed(value)
    for path, leaf in flattened(_path_of(name), tree) if isinstance(tree, Mapping) else [(name, value)]:
        yield path, _scalar(leaf) if isinstance(leaf, str) else leaf


def _path_of(name: str) -> str:
    """Name of an option, of sections by their short names with their long ones."""
    first, dot, below = name.partition(".")
    return f"{_SECTIONS.get(first.lstrip('-'), first)}{dot}{below}"


_SECTIONS: Mapping[str, str] = {"cc": "compilation-config", "O": "compilation-config", "sc": "speculative-config"}


def _yaml_values(text: str, by_name: Mapping[str, Setting]) -> Values:
    tree = _parsed(text)
    if not isinstance(tree, Mapping):
        raise ConfigError([Problem("settings", "is no mapping of YAML", str(tree)[:40])])
    for name, value in tree.items():
        is_json = isinstance(value, str) and value.lstrip().startswith("{")
        for path, leaf in flattened(str(name), _parsed(value) if is_json else value):
            yield path, _scalar(leaf) if isinstance(leaf, str) else leaf


def _environment(text: str, by_name: Mapping[str, Setting]) -> Values:
    for name, value in read_script(text).exports.items():
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
