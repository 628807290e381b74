"""YAML accidents: what a person wrote and YAML 1.1 reads as something else, refused with file and line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import yaml

from dse.problems import Problem

MOST_BYTES = 1 << 20
MOST_DEPTH = 50
_ACCIDENTS = {
    re.compile(r"[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?"): "would be read in base 60",
    re.compile(r"[-+]?0[0-9]+"): "would be read in base 8 (or lose its leading zero)",
    re.compile(r"[-+]?[0-9]+_[0-9_]+"): "has an underscore inside a number",
    re.compile(r"(?i:on|off|yes|no)"): "would be read as true or false",
}


def accidents(path: Path) -> Iterator[Problem]:
    """Problems of one YAML file: size, nesting, aliases, code tags, and plain scalars that YAML 1.1 misreads."""
    where = str(path)
    try:
        text = path.read_text(encoding="utf-8")
        if len(text) > MOST_BYTES:
            yield Problem(where, f"is larger than {MOST_BYTES} bytes")
            return
        yield from _scan(text, where)
    except (OSError, UnicodeDecodeError) as error:
        yield Problem(where, f"cannot be read: {error}")
    except (yaml.YAMLError, RecursionError) as error:
        yield Problem(where, f"is not YAML: {' '.join(str(error).split())}")


def _scan(text: str, where: str) -> Iterator[Problem]:
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        line = f"{where}:{event.start_mark.line + 1}" if event.start_mark else where
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MOST_DEPTH:
            yield Problem(line, f"is nested deeper than {MOST_DEPTH}")
            return
        if isinstance(event, yaml.AliasEvent):
            yield Problem(line, "uses a YAML alias", f"*{event.anchor}", "write the value out")
        elif isinstance(event, yaml.ScalarEvent):
            yield from _scalar(event, line)


def _scalar(event: yaml.ScalarEvent, line: str) -> Iterator[Problem]:
    value = str(event.value)
    if value == "_target_":
        yield Problem(line, "names a class to call; plug-ins are chosen by name", value)
    if event.style is None:
        for pattern, rule in _ACCIDENTS.items():
            if pattern.fullmatch(value):
                yield Problem(line, rule, value, "put it in quotes, or write the number or true/false you mean")
