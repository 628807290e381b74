"""Settings of a tool read as a plan: texts of its files, what their settings mean, and which mean nothing to a plan."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dse.errors import ConfigError, Problem
from dse.errors.parsing import parse_yaml
from dse.space import get_path
from dse_deploy.arguments import Values, plain, scalar
from dse_deploy.deepspeed import deepspeed_values
from dse_deploy.derived import LAUNCHED, derive, open_facts
from dse_deploy.facts import UNKNOWN, ModelFacts
from dse_deploy.launches import LAUNCH, script_values
from dse_deploy.settings import BY_LAYER, Setting, SettingsFile, tp_of
from dse_deploy.shell import is_open, read_script
from dse_deploy.step_files import STEP_FORMATS, read_step_file
from dse_deploy.torchtitan import torchtitan_values
from dse_deploy.user_buffers import is_of_a_site, read_layers, sites_of
from studies.plan.plan_file import SECTIONS, Plan, check_plan, flattened, put_in


@dataclass(frozen=True)
class ReadSettings:
    """A plan that files say. unread: settings of them that mean nothing to a plan, or not with their value.

    unmodelled: those that change a step all the same. has_own: whether they say more than how many GPUs are launched.
    """

    plan: dict[str, Any]
    unread: Sequence[str]
    unmodelled: Sequence[str] = ()
    has_own: bool = True


@dataclass
class _Plan:
    """A plan in the making, and settings that have no place there."""

    plan: dict[str, Any]
    unread: list[str] = field(default_factory=list)
    unmodelled: list[str] = field(default_factory=list)
    facts: dict[str, tuple[str, Any]] = field(default_factory=dict)
    of_sites: list[tuple[Setting, Any]] = field(default_factory=list)
    open_values: list[Problem] = field(default_factory=list)
    has_own: bool = False

    def add(self, name: str, value: Any, setting: Setting | None) -> None:
        """Put a setting into the plan, or among those that have no place there."""
        self.has_own |= setting is not None and setting.fact not in LAUNCHED
        if setting is None:
            # a variable with options that nobody knows may change anything
            (self.unmodelled if name.startswith("${") else self.unread).append(name)
        elif self._is_open(name, value, setting):
            return
        elif setting.reason:
            # a value that leaves all as it is needs no word
            if not setting.is_usual(value):
                (self.unmodelled if setting.changes else self.unread).append(f"{name} {value} ({setting.reason})")
        elif setting.fact:
            # a flag with another value than true or false is not understood: the fact is withdrawn
            if setting.values and value not in (True, False):
                self.unread.append(f"{name} {value}")
                self.facts.pop(setting.fact, None)
            else:
                self.facts[setting.fact] = name, value
        elif setting.path == "sites":
            self.of_sites.append((setting, value))
        # the name is known, the value is not
        elif not setting.read(value, self.plan):
            (self.unmodelled if setting.changes else self.unread).append(f"{name} {value}")
        elif text := setting.beside(self.plan):
            self.unmodelled.append(f"{name} {value} ({text}; its format is read)")

    def _is_open(self, name: str, value: Any, setting: Setting) -> bool:
        """Tell whether only a run would know a value; one that is needed is kept among `open_values`."""
        if setting.constant:  # a file, which is opened beside
            return not setting.path
        if not isinstance(value, str) or not (is_open(value) or value in setting.left_open) or setting.fact:
            return False  # facts may not be needed
        if setting.path == "sites" or get_path(self.plan, setting.path) is None:
            way = f"write {setting.path}=<value>" if setting.path != "sites" else "write its value in the file"
            self.open_values.append(Problem(f"settings.{name}", "names what the file does not set", value, way))
        return True


def read(
    files: Sequence[tuple[SettingsFile, str]], plan: Plan, *, launch: int = 0, model: ModelFacts = UNKNOWN
) -> ReadSettings:
    """The plan that files with their texts say, beside what one says already. Raises ConfigError.

    Layers of user buffers count before options that say of all sites whether they overlap. launch: the number of one
    among those of a script; 0 where there is one. model: facts of the step that is named.
    """
    if launch and all(file.format != _SCRIPT for file, _ in files):
        raise ConfigError([Problem(LAUNCH, "is of launch scripts, and this is none", launch, "leave it out")])
    gathered = _Plan({name: dict(entries) for name, entries in plan.items()})
    result, unread = gathered.plan, gathered.unread
    by_layer = [text for file, text in files if file.format == "user_buffers"]
    for file, text in files:
        if not text.strip():
            raise ConfigError([Problem("settings", "is empty", file.name)])
        # layers are read after the facts that they need
        others = file.format == "user_buffers" or file.format in STEP_FORMATS
        for name, value, setting in [] if others else settings_of(file, text, launch):
            gathered.add(name, value, setting)
    possible = {setting.fact for file, _ in files for setting in file.settings}
    if gathered.open_values:
        raise ConfigError([*gathered.open_values, *open_facts(gathered.facts, result)])
    # facts after all knobs: a knob that is set counts over one that follows
    gathered.unmodelled += derive(gathered.facts, result, possible)
    for text in by_layer:
        unread += _read_layers(text, result)
    unread += _read_sites(gathered.of_sites, result, has_layers=bool(by_layer))
    for setting, value in gathered.of_sites:
        unread += setting.read_limits(value, result, model)
    of_step = [(file, text) for file, text in files if file.format in STEP_FORMATS]
    for file, text in of_step:
        read_file = read_step_file(file, text, model, result)
        unread += read_file.unread
        gathered.unmodelled += read_file.unmodelled
    check_plan({name: entries for name, entries in result.items() if name in SECTIONS})
    return ReadSettings(result, unread, gathered.unmodelled, gathered.has_own or bool(by_layer or of_step))


def settings_of(file: SettingsFile, text: str, launch: int = 0) -> Iterator[tuple[str, Any, Setting | None]]:
    """Yield the names and values that a file has, and the settings that they are; None where none is known.

    launch: the number of one among those of a script; 0 where there is one. Raises ConfigError.
    """
    by_name = by_names(file)
    is_script = file.format == _SCRIPT
    for name, value in script_values(text, by_name, launch) if is_script else _VALUES[file.format](text, by_name):
        yield name, value, by_name.get(plain(name))


def _read_sites(settings: Sequence[tuple[Setting, Any]], plan: dict[str, Any], *, has_layers: bool) -> Iterator[str]:
    """Put settings of sites into a plan, and yield those that mean nothing to it."""
    for setting, value in settings:
        if setting.constant:
            if not has_layers:
                yield f"{setting.name} {value} (import the folder that holds both files)"
            continue
        # user buffers gather and scatter tokens: they imply a split of the sequence
        if setting.schedule == BY_LAYER and value is True:
            put_in(plan, "parallel.sequence_parallel", True)
        # a file of layers is more precise than a flag for all of them
        if (setting.disables or not has_layers) and not setting.read(value, plan):
            yield f"{setting.name} {value}"


def by_names(file: SettingsFile) -> dict[str, Setting]:
    """Settings of a file by their names and aliases, as `plain` has them."""
    return {plain(name): setting for setting in file.settings for name in (setting.name, *setting.aliases)}


def _read_layers(text: str, plan: dict[str, Any]) -> list[str]:
    tree = _parse(text)
    if tree is None:  # user buffers are not initialised
        return []
    layers = read_layers(tree)
    plan["sites"] = {**plan.get("sites", {}), **sites_of(layers, tp_of(plan))}
    put_in(plan, "parallel.sequence_parallel", True)
    return [name for name, layer in layers.items() if not is_of_a_site(name, layer)]


def _parse(text: str) -> Any:
    return parse_yaml(text, "settings")


def _yaml_values(text: str, by_name: Mapping[str, Setting]) -> Values:
    tree = _parse(text)
    if not isinstance(tree, Mapping):
        raise ConfigError([Problem("settings", "is no mapping of YAML", str(tree)[:40])])
    for name, value in tree.items():
        # values of sections may be JSON in a string, as on a command line
        is_json = isinstance(value, str) and value.lstrip().startswith("{")
        for path, leaf in flattened(str(name), _parse(value) if is_json else value):
            yield path, scalar(leaf) if isinstance(leaf, str) else leaf


def _environment(text: str, by_name: Mapping[str, Setting]) -> Values:
    for name, value in read_script(text).exports.items():
        yield name, scalar(value)


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
                # not a literal: the source text, which usually names a class or a constant
                yield target.id, ast.unparse(node.value)


def _toml(text: str, by_name: Mapping[str, Setting]) -> Values:
    yield from torchtitan_values(text)


def _deepspeed(text: str, by_name: Mapping[str, Setting]) -> Values:
    yield from deepspeed_values(text)


_SCRIPT = "arguments"
"""The format of launch scripts and command lines."""
_VALUES: Mapping[str, Callable[[str, Mapping[str, Setting]], Values]] = {
    "yaml": _yaml_values,
    "environment": _environment,
    "python": _python,
    "toml": _toml,
    "deepspeed": _deepspeed,
}
