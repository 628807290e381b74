"""Checks of configuration files: data within limits, and nothing that YAML 1.1 reads as something else.

Files of a folder that a user was given are read by nobody before they were looked at here: no aliases (a short file
can stand for gigabytes), no class to call, no setting of Hydra (some run code), nothing from outside the folder.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from dse.errors import ConfigError, Problem
from dse.errors.parsing import LOADER, parse_yaml
from dse.errors.parsing import load as read_yaml
from dse.errors.texts import learn
from dse.files import read_bytes

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
