"""Options of configuration groups, shipped and the user's own, with their descriptions, and words of a command line.

An option is a file of its group, or is listed in a catalogue: a package declares `CATALOGUES = {group:
"module:attribute"}`, the attribute being a `Catalogue`, which also reads files that a path names. It is loaded only
when a group that has one is asked for its options, or for one that no file of the group describes.

Files hold data within limits, and nothing that YAML 1.1 reads as something else. Those of a folder that a user was
given are read by nobody before they were looked at here (`looked_at`): no aliases (a short file can stand for
gigabytes), no class to call, no setting of Hydra (some run code), nothing from outside the folder.
"""

from __future__ import annotations

import functools
import importlib
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import yaml

from dse import plugins
from dse.errors import ConfigError, Problem
from dse.errors.parsing import LOADER, parse_yaml
from dse.errors.parsing import load as read_yaml
from dse.errors.texts import learn
from dse.files import files_below, read_bytes, read_text

OWN_FLAGS = ("--config-dir", "-cd")
"""Flags before a folder of the user's own configuration."""
DRY_RUN = "--dry-run"
"""Flag to count the points of a study, and evaluate none."""
VERBOSE = ("-v", "--verbose")
"""Flags for `verbose=true`."""
SEVERAL = ("-m", "--multirun")
"""Flags to run a study for each combination of several values."""
MOST_BYTES = 1 << 20
MOST_FILES = 1_000
MOST_ENTRIES = 10_000  # files and folders of any name
_MOST_TOLD = 20  # problems of one file
_ACCIDENTS = {
    # 12:30:45 is 45045 in YAML 1.1
    re.compile(r"[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?"): "would be read in base 60",
    re.compile(r"[-+]?0[0-9]+"): "would be read in base 8 (or lose its leading zero)",
    re.compile(r"[-+]?[0-9]+_[0-9_]+"): "has an underscore inside a number",
    re.compile(r"(?i:on|off|yes|no)"): "would be read as true or false",
}
_HYDRA = re.compile(r"(?<![\w-])hydra(?![\w-])")  # as a word: `hydraulics` is fine
_HEADER = re.compile(r"^\s*#\s*@package\s+(.*)$", re.MULTILINE)
_OUTSIDE = re.compile(r"(^|/)\.\.(/|$)")
_RUNS = "is a setting of Hydra's, and some of these run code"
_CALLS = "names a class to call; plug-ins are chosen by name"
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

    A file may name its own group's section as its place, as those of plug-ins do: that is no place inside another one.

    >>> [override_key(group, conf_dirs()) for group in ("gpu", "system", "technology")]
    ['gpu@system.gpu', 'system', 'technology']
    """
    files = next(filter(None, (files_below(folder / group, "*.yaml") for folder in folders)), [])
    header = read_text(files[0], str(files[0])).partition("\n")[0].partition("# @package ")[2] if files else ""
    section = header.partition(".")[0]
    is_elsewhere = section not in ("", group) and group not in _groups_at_root()
    is_inside = is_elsewhere and any((folder / section).is_dir() for folder in folders)
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
    files = {path.stem: path for folder in places for path in files_below(folder / group, "*.yaml")}
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
    files = (path for folder in conf_dirs() for path in files_below(folder / group, "*.yaml"))
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


def put_least(tree: dict[str, Any]) -> None:
    """Raise numbers of a configuration to the least of which a study's question asks (`study.at_least`): of one node,
    for example, where NICs are asked about. What is typed counts all the same.
    """
    from dse.space import get_path, set_path

    least = get_path(tree, "study.at_least")
    for path, number in least.items() if isinstance(least, Mapping) else ():
        present = get_path(tree, path)
        if isinstance(present, int | float) and present < number:
            set_path(tree, path, number)
            section, _, inner = path.partition(".")
            sources = tree[section].get("sources")
            if isinstance(sources, dict):
                sources[inner] = {
                    "provenance": "derived",
                    "source": "the least that the study asks of",
                }


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


def looked_at(folder: Path) -> Iterator[tuple[Path, list[Problem]]]:
    """The YAML files of a user's folder, links followed, each with why it must not be read (none: it may be)."""
    seen: set[str] = set()
    count = entries = 0
    for place, folders, names in os.walk(folder, followlinks=True):  # Hydra follows links, too
        entries += len(folders) + len(names)
        if entries > MOST_ENTRIES:
            way = "name a folder that holds configurations only"
            yield folder, [Problem(str(folder), f"holds more than {MOST_ENTRIES} files and folders", way_out=way)]
            return
        folders[:] = sorted(  # in place: os.walk goes on with these
            name_of_folder for name_of_folder in folders if os.path.realpath(Path(place, name_of_folder)) not in seen
        )
        seen.update(os.path.realpath(Path(place, name_of_folder)) for name_of_folder in folders)
        for name in sorted(name for name in names if name.endswith(".yaml")):
            count += 1
            if count > MOST_FILES:
                yield folder, [Problem(str(folder), f"holds more than {MOST_FILES} YAML files")]
                return
            path = Path(place, name)
            inside = "hydra" in path.relative_to(folder).with_suffix("").parts  # a group named so
            yield path, [Problem(str(path), _RUNS, way_out="remove it")] if inside else unreadable(path)


def unreadable(path: Path) -> list[Problem]:
    """Why a file must not be read as a configuration: limits, aliases, code, Hydra's settings, names from outside."""
    where = str(path)
    try:
        text = read_bytes(path, where, most=MOST_BYTES).decode("utf-8")
        tree = parse_yaml(text, where)
    except ConfigError as error:
        return list(error.problems)
    except UnicodeDecodeError as error:
        return [Problem(where, f"cannot be read: {error}")]
    problems = list(islice(_foreign(text, where), _MOST_TOLD))  # a file of garbage has thousands
    if not problems:
        learn(tree)  # its secrets are then hidden in messages
    return problems


def load_yaml(path: Path) -> Any:
    """Read a file that is shipped, or that was looked at. Raises ConfigError for one that is no YAML."""
    return read_yaml(path.read_text(encoding="utf-8"), str(path))


def accidents(path: Path) -> list[Problem]:
    """Plain scalars of a readable file that YAML 1.1 misreads, with file and line."""
    events = yaml.parse(path.read_text(encoding="utf-8"), Loader=LOADER)
    # quoted texts are not misread
    scalars = (event for event in events if isinstance(event, yaml.ScalarEvent) and not event.style)
    return list(islice((problem for event in scalars for problem in _misread(event, str(path))), _MOST_TOLD))


def calls_code(value: object) -> bool:
    """True if a tree has a key (or is a text) that Hydra would take for the class to call."""
    if isinstance(value, dict):
        return any(calls_code(key) or calls_code(inner) for key, inner in value.items())
    if isinstance(value, list):
        return any(map(calls_code, value))
    return isinstance(value, str) and value.startswith("_target_")


def is_hydras(path: str) -> bool:
    """True if a dotted path, a group or a package (`group@package`) is one of Hydra's own."""
    return bool(re.match(r"/?hydra($|[./@:])", path)) or ("@" in path and bool(_HYDRA.search(path.partition("@")[2])))


def _foreign(text: str, where: str) -> Iterator[Problem]:
    for package in _HEADER.findall(text):
        if _HYDRA.search(package):
            yield Problem(where, _RUNS, f"@package {package}", "remove the line")
    for root in yaml.compose_all(text, Loader=LOADER):  # nodes, before anything is built
        if isinstance(root, yaml.ScalarNode) and root.value:
            yield Problem(where, "holds one value and no keys", root.value[:100], "write it as key: value")
        for path, node in _walk(root, ""):
            yield from _forbidden(path, node, f"{where}:{node.start_mark.line + 1}")


def _walk(node: Any, path: str) -> Iterator[tuple[str, Any]]:
    """(dotted path, scalar) of all keys and values; that of a key ends in it."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            inner = f"{path}.{key.value}".lstrip(".") if isinstance(key, yaml.ScalarNode) else path
            yield from _walk(key, inner)
            yield from _walk(value, inner)
    elif isinstance(node, yaml.SequenceNode):
        for place, value in enumerate(node.value):
            yield from _walk(value, f"{path}.{place}")
    elif node is not None:
        yield path, node


def _forbidden(path: str, node: Any, line: str) -> Iterator[Problem]:
    text = str(node.value)
    is_key = path.endswith(text) and (path == text or path[: -len(text)].endswith("."))  # the path of a key ends in it
    if text.startswith("_target_"):
        yield Problem(f"{line} {path}", _CALLS, text, "remove it")
    if re.match(r"defaults\.\d+", path):
        if _HYDRA.search(text) and (is_key or re.fullmatch(r"defaults\.\d+", path)):
            yield Problem(f"{line} {path}", _RUNS, text, "remove it")
        if _OUTSIDE.search(text) or "${" in text:
            rule = "must name an option of a group below conf/ or this folder"
            yield Problem(f"{line} {path}", rule, text, "write its name, without .. and ${")
    elif is_key and is_hydras(text):
        yield Problem(f"{line} {path}", _RUNS, way_out="remove it")


def _misread(event: yaml.ScalarEvent, where: str) -> Iterator[Problem]:
    value = str(event.value)
    for pattern, rule in _ACCIDENTS.items():
        if pattern.fullmatch(value):
            way = "put it in quotes, or write the number or true/false you mean"
            yield Problem(f"{where}:{event.start_mark.line + 1 if event.start_mark else 0}", rule, value, way)
