"""Options of configuration groups, shipped and the user's own, with their descriptions, and words of a command line.

An option is a file of its group, or is listed in a catalogue: a package declares `CATALOGUES = {group:
"module:attribute"}`, the attribute being a `Catalogue`, which also reads files that a path names. It is loaded only
when a group that has one is asked for its options, or for one that no file of the group describes.
"""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Protocol

import yaml

from dse import plugins
from dse.config.yaml_checks import load_yaml, unreadable
from dse.errors import ConfigError, Problem
from dse.errors.parsing import LOADER
from dse.files import read_text

OWN_FLAGS = ("--config-dir", "-cd")
"""Flags before a folder of the user's own configuration."""
DRY_RUN = "--dry-run"
"""Flag to count the points of a study, and evaluate none."""
VERBOSE = ("-v", "--verbose")
"""Flags for `verbose=true`."""
SEVERAL = ("-m", "--multirun")
"""Flags to run a study for each combination of several values."""
_SUFFIXES = (".yaml", ".yml", ".json")
_HEAD = 200  # characters of a file in which its directives are
_NAMES = ("description", "question")  # of what an option says of itself


@functools.cache
def conf_dir() -> Path:
    """The shipped configuration: `conf/` of a clone, `dse/conf/` of an installed wheel."""
    package = Path(__file__).resolve().parents[1]
    clone = package.parent / "conf"
    return clone if (clone / "config.yaml").is_file() else package / "conf"


def conf_dirs() -> list[Path]:
    """The shipped configuration, and that of other distributions."""
    return [conf_dir(), *plugins.configurations()]


def search_path(folders: Sequence[Path]) -> list[str]:
    """The override by which Hydra looks into further folders of configuration; none without any."""
    # a quotation mark in the name of a folder
    quoted = [str(folder.resolve()).replace("'", "\\'") for folder in folders]
    places = ",".join(f"'file://{one}'" for one in quoted)
    return [f"hydra.searchpath=[{places}]"] if quoted else []


def offered_twice(group: str, option: str, folders: Sequence[Path]) -> list[Problem]:
    """The problem of an option that several folders have, of which Hydra would take the first and say nothing."""
    files = [file for folder in folders if (file := folder / group / f"{option}.yaml").is_file()]
    if len(files) < 2:
        return []
    rule = f"is in {len(files)} folders of configuration: {', '.join(map(str, files))}"
    return [Problem(group, rule, option, "rename one of them, and its `name`")]


def override_key(group: str, folders: Sequence[Path]) -> str:
    """Name that Hydra has for the choice of a group: with its place where that lies inside another group's section.

    >>> override_key("gpu", conf_dirs()), override_key("system", conf_dirs())
    ('gpu@system.gpu', 'system')
    """
    files = [path for folder in folders for path in sorted((folder / group).glob("*.yaml"))]
    header = read_text(files[0], str(files[0])).partition("\n")[0].partition("# @package ")[2] if files else ""
    section = header.partition(".")[0]
    is_inside = any((folder / section).is_dir() for folder in folders if section) and group not in _groups_at_root()
    return f"{group}@{section}.{group}" if is_inside else group


@functools.cache
def _groups_at_root() -> set[str]:
    """Groups whose option `config.yaml` chooses; others are chosen in options of another group, or of a study."""
    entries = load_yaml(conf_dir() / "config.yaml")["defaults"]
    return {name for entry in entries if isinstance(entry, dict) for name in entry}


@contextmanager
def own_options(folder: Path | None) -> Iterator[None]:
    """Let `option_file` and `list_options` find the options of the user's folder, too. Raises ConfigError."""
    if folder is not None and not folder.is_dir():
        raise ConfigError([Problem(OWN_FLAGS[0], "is no folder", str(folder))])
    token = _OWN.set((folder,) if folder else ())
    try:
        yield
    finally:
        _OWN.reset(token)


_OWN: ContextVar[tuple[Path, ...]] = ContextVar("own", default=())


def option_file(group: str, name: str) -> Path | None:
    """File of an option of a group, ours, another distribution's or the user's; None where there is none."""
    folders = (*conf_dirs(), *_OWN.get())
    if _OWN.get() and (problems := offered_twice(group, name, folders)):
        raise ConfigError(problems)
    files = (folder / group / f"{name}.yaml" for folder in folders)
    return next((file for file in files if file.is_file()), None) if "/" not in name else None


def is_shipped(path: Path) -> bool:
    """True for a file of the shipped configuration, or of another distribution's."""
    return any(folder in path.parents for folder in conf_dirs())


def list_options(group: str, folders: Sequence[Path] = ()) -> dict[str, str]:
    """Options of a group with their descriptions, those of its catalogue after those that have a file."""
    # the user's own last: it describes an option of the same name
    places = (*conf_dirs(), *_OWN.get(), *folders)
    files = {path.stem: path for folder in places for path in sorted((folder / group).glob("*.yaml"))}
    described = {name: _description(path) for name, path in sorted(files.items())}
    return described | {name: text for name, text in listed(group).items() if name not in described}


def plural(group: str) -> str:
    """The word that lists the options of a group.

    >>> plural("study"), plural("search"), plural("gpu"), plural("figures"), plural("tracking")
    ('studies', 'searches', 'gpus', 'figures', 'tracking')
    """
    if re.search("[^aeiou]y$", group):
        return f"{group[:-1]}ies"
    return group if group.endswith(("s", "ing", "ed")) else f"{group}{'es' if group.endswith('ch') else 's'}"


def options_marked(group: str, mark: str) -> set[str]:
    """Shipped options whose file says, below its first lines, `# @listed <mark>`."""
    files = (path for folder in conf_dirs() for path in (folder / group).glob("*.yaml"))
    return {path.stem for path in files if f"# @listed {mark}\n" in path.read_text("utf-8")[:_HEAD]}


def _description(path: Path) -> str:
    """Description of an option: of a shipped one the text is enough, one of the user's own is checked and read."""
    if is_shipped(path):
        return _shipped_description(path)
    if unreadable(path):
        return "(cannot be read)"
    tree = load_yaml(path)
    study = tree.get("study", tree) if isinstance(tree, dict) else {}
    texts = (study.get(name) for name in _NAMES) if isinstance(study, dict) else ()
    return str(next(filter(None, texts), None) or _comment(path))


def _shipped_description(path: Path) -> str:
    """The first scalar called `description`, or `question` of a study, read no further than that."""
    text = path.read_text("utf-8")
    if not any(f"{name}:" in text for name in _NAMES):  # most files without one need no parser
        return _comment(path)
    events = yaml.parse(text, Loader=LOADER)  # events as they come: the rest of a file is not built
    scalars = (event.value for event in events if isinstance(event, yaml.ScalarEvent))
    for value in scalars:
        if value in _NAMES:
            return str(next(scalars, ""))
    return _comment(path)


def _comment(path: Path) -> str:
    """The comment that a file begins with, below its directives: of an option of another section."""
    lines = (line for line in read_text(path, str(path)).splitlines() if not line.startswith("# @"))
    first = next(lines, "")
    return first.removeprefix("# ") if first.startswith("# ") else ""


# Catalogues


class Catalogue(Protocol):
    """Options of one group."""

    def names(self) -> Mapping[str, str]:
        """Names with their descriptions."""
        ...

    def tree(self, name: str) -> dict[str, Any]:
        """The tree of an option, or of a file. Raises ConfigError for one that is unknown or cannot be read."""
        ...


def catalogue(group: str) -> Catalogue | None:
    """The catalogue of a group; None if it has none."""
    place = plugins.declaration("CATALOGUES", group)
    if place is None:
        return None
    module, _, attribute = str(place).partition(":")
    options: Catalogue = getattr(importlib.import_module(module), attribute)
    return options


def listed(group: str) -> Mapping[str, str]:
    """Options of the catalogue of a group with their descriptions; {} if it has none."""
    options = catalogue(group)
    return {} if options is None else options.names()


def catalogued(group: str, value: object) -> bool:
    """Tell whether the catalogue of a group has an option, or reads the file or folder that it names."""
    if not isinstance(value, str) or catalogue(group) is None:
        return False
    return value.endswith(_SUFFIXES) or value in listed(group) or ("/" in value and Path(value).is_dir())


def catalogued_tree(group: str, value: str) -> dict[str, Any]:
    """The tree of an option of a catalogue. Raises ConfigError."""
    options = catalogue(group)
    assert options is not None
    return options.tree(value)


def put_catalogued(tree: dict[str, Any], chosen: Mapping[str, str]) -> list[Problem]:
    """Put options of catalogues, by group, in place of whole sections, and return what is wrong with them.

    What a study says of values of its own option does not hold for another one.
    """
    problems = list[Problem]()
    for group, value in chosen.items():
        try:
            if group not in tree:
                way = "leave it out, or take a study that has it"
                raise ConfigError([Problem(group, "is no section of this study", value, way)])
            tree[group] = catalogued_tree(group, value)
        except ConfigError as error:
            problems.extend(error.problems)
    return problems


def catalogued_paths(tree: Mapping[str, Any], groups: Collection[str]) -> set[str]:
    """Dotted paths in the `space` of a configuration that lie in sections put in by `put_catalogued`."""
    paths, stack = set[str](), [("", tree.get("space") or {})]
    while stack:
        path, value = stack.pop()
        if isinstance(value, Mapping):
            stack += [(f"{path}.{name}".lstrip("."), inner) for name, inner in value.items()]
        elif path.partition(".")[0] in groups:
            paths.add(path)
    return paths


def note_source(tree: dict[str, Any], key: str, value: Any) -> None:
    """Say in the `sources` of a section that a number was typed: the source of the former value is not its own."""
    from dse.values.units import amount  # a list of options needs no units

    section, _, path = key.partition(".")
    inner = tree.get(section)
    sources = inner.get("sources") if isinstance(inner, dict) else None
    # a quantity such as `5 TB/s` is a number, too
    is_number = not isinstance(value, bool) and (isinstance(value, int | float) or amount(str(value)) is not None)
    if path and is_number and isinstance(sources, dict):
        sources[path] = {"provenance": "user", "source": "typed on the command line"}


def problems_of_files(tree: Mapping[str, Any]) -> list[Problem]:
    """Values that only the command line may give, in a configuration as files, or a record, give it.

    A package says what these are in its mapping `GUARDS`: section -> `module:function`, of the section.
    """
    problems = list[Problem]()
    for section, place in plugins.declarations("GUARDS").items():
        if isinstance(tree.get(section), Mapping):
            module, _, function = place.partition(":")
            problems += getattr(importlib.import_module(module), function)(tree[section])
    return problems


def own_folder(words: Sequence[str]) -> Path | None:
    """The folder that a command line names. Raises ConfigError where the flag names none."""
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name in OWN_FLAGS:
            folder = value or (words[index + 1] if index + 1 < len(words) and not equals else "")
            if not folder:
                raise ConfigError([Problem(name, "names no folder", way_out=f"write {name}=<folder>")])
            return Path(folder)
    return None


def overrides(words: Sequence[str]) -> list[str]:
    """The words of a command line that are no flags."""
    typed = ["verbose=true" if word in VERBOSE else word for word in without_own_folder(words)]
    return [word for word in typed if not word.startswith("-")]


def without_own_folder(words: Sequence[str]) -> list[str]:
    """The words of a command line but the flag that names the user's folder."""
    values = {place + 1 for place, word in enumerate(words) if word in OWN_FLAGS}  # the word after is its value
    kept = [word for place, word in enumerate(words) if place not in values]
    return [word for word in kept if word.partition("=")[0] not in OWN_FLAGS]
