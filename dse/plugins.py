"""Plug-ins by name: own modules, what our packages declare, and entry points of other installed distributions.

An engine, schedule or study is a module or package inside one package (`Kind.package`) that carries its kind's
attribute. Backends, evaluators, search methods, pages for a browser, commands and titles of configuration groups are
declared by the packages they belong to, in the mappings `BACKENDS`, `EVALUATORS`, `METHODS`, `VIEWS`, `COMMANDS` and
`GROUPS` of a package's `__init__`. Another distribution joins by an entry point in the group of the kind, or offers
packages by entry points in `dse.packages`: what their `__init__` declares counts as what ours declare, and a folder
`conf` inside one joins the configuration. Nothing else has to be edited, and configuration never names a class or a
path.

Packages stand on one of two shelves. Those that the mapping `RESEARCH` of their `__init__` names (package -> what is
studied there) hold models under study: their tests run in `make more`, and lists show them apart. All others are
supported.

Processes that are started import as little: nothing of the folder that they happen to run in (`safe_imports`).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import pkgutil
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, TypeVar

from dse.errors import ConfigError, Problem, did_you_mean

Key = TypeVar("Key")
Value = TypeVar("Value")

PACKAGES = ("dse", "simulators", "search_spaces", "studies")
OFFERED = "dse.packages"
"""Group of entry points, by which other distributions offer packages that declare what they bring."""


@dataclass(frozen=True)
class Kind:
    """A kind of plug-in. attribute: what its module carries. group: of entry points.

    package: whose modules are plug-ins of this kind; "" where packages declare them as `{attribute}S`. key: of the
    configuration, that names one.
    """

    attribute: str
    group: str
    package: str = ""
    key: str = ""


KINDS: Mapping[str, Kind] = {
    "engine": Kind("ENGINE", "dse.simulators", "simulators.engines", "simulator.engine"),
    "backend": Kind("BACKEND", "dse.simulators", key="simulator.backend"),
    "schedule": Kind("SCHEDULE", "dse.search_spaces", "search_spaces", "schedule.family"),
    "study": Kind("STUDY", "dse.studies", "studies", "study.module"),
    "evaluator": Kind("EVALUATOR", "dse.evaluators", key="executor.evaluator"),
    "format": Kind("FORMAT", "dse.formats"),
    "method": Kind("METHOD", "dse.search.methods", key="search.name"),
    "view": Kind("VIEW", "dse.views"),
    "command": Kind("COMMAND", "dse.commands"),
}
_GROUPS = (OFFERED, *dict.fromkeys(kind.group for kind in KINDS.values()))


@dataclass(frozen=True)
class Command:
    """A command of the command line, named by a verb, or a verb and a word (`results compare`).

    target: `module:function`, of the words after it, which returns the exit code, or a
    `dse.results.run_folder.CommandAnswer`, which is printed, and returned to Python.

    options: word of the command -> what it is for, with its default. examples: words after `python -m dse`.
    keys: path in the configuration of `study` -> what it is, which the help lists with its default.
    """

    target: str
    usage: str
    description: str
    options: Mapping[str, str] = field(default_factory=dict)
    examples: tuple[str, ...] = ()
    study: str = ""
    keys: Mapping[str, str] = field(default_factory=dict)


Level = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class DoctorCheck:
    """A line of `dse doctor`, from a function that a package's `CHECKS` names (name -> `module:function`).

    way_out: what helps. is_detail: shown by `-v` only, as long as all is well.
    """

    level: Level
    subject: str
    text: str
    way_out: str = ""
    is_detail: bool = False

    def __str__(self) -> str:
        return f"{self.subject}: {self.text}" + (f" ({self.way_out})" if self.way_out else "")


def cached_until_refresh(function: Callable[[Key], Value]) -> Callable[[Key], Value]:
    """Decorate a function so that it remembers its results until `refresh()`."""
    cached = functools.cache(function)
    _REMEMBERED.append(cached.cache_clear)
    return cached


_REMEMBERED: list[Callable[[], None]] = []


def refresh() -> None:
    """Forget which plug-ins there are (after a distribution was installed into this process)."""
    for forget in _REMEMBERED:
        forget()


@cached_until_refresh
def names(kind: str) -> tuple[str, ...]:
    """Names of all modules that may be plug-ins of a kind; no plug-in is imported."""
    return tuple(sorted({*_own_plugins(kind), *_entries(KINDS[kind].group)}))


def foreign(kind: str) -> tuple[str, ...]:
    """Names of the plug-ins of a kind that other distributions offer; none is imported."""
    return tuple(sorted(_entries(KINDS[kind].group)))


def load(kind: str, name: str) -> Any:
    """The plug-in of a kind by name.

    Raises ConfigError where it is absent (with the names that exist), ambiguous, or fails to import.
    """
    return _load((kind, name))


@cached_until_refresh
def _load(key: tuple[str, str]) -> Any:
    kind, name = key
    place = target(kind, name)
    plugin = _attribute(place, name) if place else None
    if plugin is None:
        broken = "".join(f" ({package} cannot be imported: {error})" for package, error in broken_packages().items())
        rule, way = f"is no plug-in with {KINDS[kind].attribute}{broken}", did_you_mean(str(name), usable_names(kind))
        if not place and KINDS[kind].package:
            offer = f"a distribution offers it by an entry point in {KINDS[kind].group}"
            way = f"{way}; {offer}" if way else offer
        if kind == "command" and not place:
            rule, way = f"is of a plug-in that is not installed{broken}", "install the plug-in that brings it"
        if place:
            rule = f"is in {place.partition(':')[0]}, which has no {KINDS[kind].attribute}"
            way = f"define it there; {way}"
        raise ConfigError([Problem(KINDS[kind].key or kind, rule, name, way)])
    return plugin


def available(kind: str) -> dict[str, Any]:
    """All plug-ins of a kind, by name. Raises ConfigError where one fails to import."""
    plugins = {name: _attribute(target(kind, name), name) for name in names(kind)}
    return {name: plugin for name, plugin in plugins.items() if plugin is not None}


def usable_names(kind: str) -> list[str]:
    """Names of the plug-ins of a kind that can be used."""
    working = []
    for name in names(kind):
        with contextlib.suppress(ConfigError):
            working += [name] if _attribute(target(kind, name), name) is not None else []
    return working


def broken_packages() -> Mapping[str, str]:
    """Packages that cannot be imported, and why."""
    return _collect_declarations("")[1]


def declarations(attribute: str) -> dict[str, Any]:
    """The mappings of a name (`BACKENDS`, `COMMANDS`, `GROUPS`) that our packages declare, as one."""
    return dict(_collect_declarations(attribute)[0])


@cached_until_refresh
def _collect_declarations(attribute: str) -> tuple[Mapping[str, Any], Mapping[str, str]]:
    """The mappings that our packages declare under a name, and why packages cannot be imported, by package."""
    mappings: dict[str, Any] = {}
    broken: dict[str, str] = {}
    for package in _packages(attribute):
        try:
            mappings |= getattr(importlib.import_module(package), attribute, {})
        except Exception as error:  # a package that is broken breaks only what it declares
            broken[package] = f"{type(error).__name__}: {error}"
    return mappings, broken


def is_research(target: str) -> bool:
    """Tell whether a `module:function` lies in a package whose models are under study."""
    return re.split("[.:]", target, maxsplit=1)[0] in declarations("RESEARCH")


def roots() -> tuple[str, ...]:
    """Our top-level packages, and the packages that other distributions offer."""
    return (*PACKAGES, *_offered(OFFERED))


@cached_until_refresh
def _offered(group: str) -> tuple[str, ...]:
    """What the entry points of a group name."""
    return tuple(entry.value for entries in _entries(group).values() for entry in entries)


@cached_until_refresh
def places(package: str) -> tuple[Path, ...]:
    """Folders of a package; none where it is absent. It is not imported, those that it lies in are."""
    try:
        spec = find_spec(package)
    except Exception:  # a package around it is absent, or raises whatever it raises
        return ()
    return tuple(map(Path, (spec.submodule_search_locations if spec else None) or ()))


def configurations() -> tuple[Path, ...]:
    """Folders of configuration that other distributions bring."""
    return _configurations(roots()[len(PACKAGES) :])


@cached_until_refresh
def _configurations(packages: tuple[str, ...]) -> tuple[Path, ...]:
    folders = [place / "conf" for name in packages for place in places(name)]
    return tuple(folder for folder in folders if folder.is_dir())


def _packages(attribute: str) -> list[str]:
    """Packages that may declare a mapping: of our own those whose source names it, as imports take time."""
    ours = roots()
    packages = [name for root in ours for name in _with_packages_inside(root)]
    return [name for name in packages if name in ours or re.search(f"^{attribute}", _source(name), re.MULTILINE)]


@cached_until_refresh
def _source(package: str) -> str:
    """The text of a package's `__init__`; "" where it has none. Nothing inside the package is imported."""
    with contextlib.suppress(Exception):  # of a package around it
        spec = find_spec(package)
        return Path(spec.origin).read_text("utf-8") if spec and spec.origin else ""
    return ""


@cached_until_refresh
def _with_packages_inside(root: str) -> list[str]:
    if root not in PACKAGES or root == KINDS["study"].package:
        return [root]  # others declare all at their root; the packages inside `studies` are imported when they are run
    modules = pkgutil.iter_modules(map(str, places(root)))
    return [root, *sorted(f"{root}.{module.name}" for module in modules if module.ispkg)]


def _own_plugins(kind: str) -> dict[str, str]:
    """Name -> `module:attribute` of our own plug-ins of a kind."""
    attribute, package = KINDS[kind].attribute, KINDS[kind].package
    if not package:
        plugins = declarations(f"{attribute}S")
        return {name: plugin.target if isinstance(plugin, Command) else plugin for name, plugin in plugins.items()}
    modules = pkgutil.iter_modules(importlib.import_module(package).__path__)
    return {
        plugin.name: f"{package}.{plugin.name}:{attribute}" for plugin in modules if not plugin.name.startswith("_")
    }


def declaration(attribute: str, name: str) -> Any:
    """The entry `name` of the first package whose mapping `attribute` has it, or None; others are not imported."""
    for package in _packages(attribute):
        if package.partition(".")[0] in PACKAGES and f'"{name}"' not in _source(package):
            continue
        with contextlib.suppress(Exception):  # `load` tells which package is broken, where nothing is found
            if name in (mapping := getattr(importlib.import_module(package), attribute, {})):
                return mapping[name]
    return None


def command_of_study(study: str) -> str:
    """Name of the command by which a study of the same name is run; "" where it needs none."""
    command = declaration("COMMANDS", study)
    return study if isinstance(command, Command) and command.study == study else ""


def _own_target(kind: str, name: str) -> str:
    """`module:attribute` of our own plug-in of a name, or ""."""
    if KINDS[kind].package:
        return _own_plugins(kind).get(name, "")
    plugin = declaration(f"{KINDS[kind].attribute}S", name)
    return plugin.target if isinstance(plugin, Command) else plugin or ""


def target(kind: str, name: str) -> str:
    """`module:attribute` of a plug-in; "" where there is none. Raises ConfigError where several offer the name."""
    entries, own_target = _entries(KINDS[kind].group).get(name, []), _own_target(kind, name)
    if len(entries) + bool(own_target) > 1:  # nobody should have to know which one wins
        places = [own_target.partition(":")[0]] if own_target else []
        places += [_distribution(entry) for entry in entries]
        raise ConfigError([Problem(f"{kind}.{name}", f"is offered by {' and '.join(places)}", way_out="keep one")])
    if own_target or not entries:
        return own_target
    value = entries[0].value
    return value if ":" in value else f"{value}:{KINDS[kind].attribute}"  # an entry point may name the module alone


def _attribute(place: str, name: str) -> Any:
    """The object that `module:attribute` names; None where the module has no such attribute."""
    path, _, attribute = place.partition(":")
    return getattr(_module(path, name), attribute, None)


def _module(path: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(path)
    except Exception as error:
        rule = f"cannot be imported: {type(error).__name__}: {error}"
        entries = [entry for kind in KINDS.values() for entry in _entries(kind.group).get(name, [])]
        way = next((f"it is registered by {_distribution(entry)}" for entry in entries if entry.module == path), "")
        raise ConfigError([Problem(path, rule, way_out=way or "mend that module")]) from error


def distributions() -> set[str]:
    """Names of the distributions that offer packages or plug-ins."""
    return {entry.dist.name for group in _installed(_GROUPS).values() for entry in group if entry.dist}


@cached_until_refresh
def _entries(group: str) -> dict[str, list[EntryPoint]]:
    entries: dict[str, list[EntryPoint]] = {}
    for entry in _installed(_GROUPS)[group]:
        entries.setdefault(entry.name, []).append(entry)
    return entries


@cached_until_refresh
def _installed(groups: tuple[str, ...]) -> Mapping[str, EntryPoints]:
    """Entry points by group: of one look, as each reads a file of every distribution that is installed."""
    installed = entry_points()
    return {group: installed.select(group=group) for group in groups}


def _distribution(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist else "an unknown distribution"


SAFE_PATH = "PYTHONSAFEPATH"
"""Variable by which CPython leaves the current folder off the path of `-c` and `-m`, as by its flag -P."""


@contextlib.contextmanager
def safe_imports() -> Iterator[None]:
    """While it lasts, processes that are started, and those that they start, import nothing of the current folder.

    multiprocessing, loky and Dask start theirs by `python -c`: a stranger's `json.py` there would run. What this
    process itself may import is handed on to workers: `python -m dse` finds modules of its user's folder in them, too.
    """
    before = os.environ.get(SAFE_PATH)
    os.environ[SAFE_PATH] = "1"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(SAFE_PATH, None)
        else:
            os.environ[SAFE_PATH] = before
