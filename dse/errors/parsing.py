"""The one door for YAML and JSON that a person typed, a file holds or a program answers: data, or a ConfigError.

A text is looked at before anything is made of it: its size is that of its file, its depth, its number of values and its
numbers have limits; aliases, tags and what no file of text can hold (NUL, halves of UTF-16) are refused.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, NoReturn

import yaml

from dse.errors import ConfigError, Problem, repeated

MOST_DEPTH = 50
MOST_NODES = 100_000
MOST_JSON_VALUES = 1_000_000
LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast where libyaml is there
_STANDARD = "tag:yaml.org,2002:"
_PLAIN = re.compile(rf"!$|{re.escape(_STANDARD)}(?!python/)")  # tags of Python's objects run code
_LONG = re.compile(r"[-+.0-9][-+.:_0-9a-fA-Fx]{400,}")
_LONG_IN_JSON = re.compile(r"[-+.0-9eE]{400}")
_DIGITS = re.compile(r"[0-9]{1,18}")
_GARBLED = re.compile("[\0\ud800-\udfff]")
_WAY_OUT = "write plain text there"
_NOT_YAML = (
    *(yaml.YAMLError, ValueError, ArithmeticError, AttributeError, LookupError, TypeError, RecursionError),
    *(MemoryError, AssertionError),
)
"""Raised by PyYAML for texts that it cannot read, in the order in which somebody met them."""


def parse_yaml(text: str, where: str) -> Any:
    """Parse a text in YAML that is within the limits. where: the file or the path that holds it. Raises ConfigError."""
    try:
        # the first problem is enough
        if problems := list(islice(_limits(text, where), 1)):
            raise ConfigError(problems)
        return _plain(yaml.load(text, Loader=LOADER), where)
    except yaml.MarkedYAMLError as error:
        raise ConfigError([_syntax_problem(error, where)]) from None
    except _NOT_YAML as error:
        raise ConfigError([Problem(where, f"is not YAML: {_reason(error)}")]) from None


def whole_number(text: str) -> int | None:
    """A whole number from 0 that a text writes in at most 18 digits, or None: Python itself refuses some thousands.

    >>> whole_number("12"), whole_number("-1"), whole_number("9" * 5000)
    (12, None, None)
    """
    return int(text) if _DIGITS.fullmatch(text) else None


def natural_key(name: str) -> list[tuple[int, str]]:
    """A key by which `g2` comes before `g10`, whatever a name holds.

    >>> sorted(["g10", "g2", "g²"], key=natural_key)
    ['g2', 'g10', 'g²']
    """
    parts = re.split("([0-9]+)", name)
    return [(-1 if (number := whole_number(part)) is None else number, part) for part in parts]


def load(text: str, where: str, loader: Any = LOADER) -> Any:
    """Read a text in YAML that is our own, or that was looked at. Raises ConfigError."""
    try:
        return yaml.load(text, Loader=loader)
    except yaml.MarkedYAMLError as error:
        raise ConfigError([_syntax_problem(error, where)]) from None
    except _NOT_YAML as error:
        raise ConfigError([Problem(where, f"is not YAML: {_reason(error)}")]) from None


def parse_json(
    text: str | bytes,
    where: str,
    *,
    most_values: int = MOST_JSON_VALUES,
    distinct: bool = False,
    lenient: bool = False,
) -> Any:
    """Parse a text in JSON that is within the limits. where: the file or the path that holds it. Raises ConfigError.

    distinct: refuse an object that has one key twice. lenient: read all numbers as floats, NaN and infinities
    among them, and any text, for a reader that judges each value by itself.
    """
    hook = _distinct_keys if distinct else None
    kinds: dict[str, Any] = {"parse_constant": _no_number, "parse_float": _finite}
    try:
        # some programs put a mark before a text
        content = text.decode("utf-8-sig") if isinstance(text, bytes) else text
        if sum(map(content.count, ",[{")) > most_values:  # an upper bound of the number of values, without parsing
            raise ConfigError([Problem(where, f"holds more than {most_values} values")])
        if not lenient and (long := _LONG_IN_JSON.search(content)):
            _check_is_text(content, long.start(), where)
        tree = json.loads(content, object_pairs_hook=hook, **({"parse_int": float} if lenient else kinds))
    except (ValueError, RecursionError, MemoryError) as error:
        raise ConfigError([Problem(where, f"is not JSON: {_reason(error)}")]) from None
    if depth(tree) > MOST_DEPTH:
        raise ConfigError([Problem(where, f"is nested deeper than {MOST_DEPTH}")])
    # a character that no text has stands in the file as it is, or is written as an escape
    return _plain(tree, where) if not lenient and ("\\u" in content or _GARBLED.search(content)) else tree


def _reason(error: BaseException) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deep"
    return " ".join(str(error).split())[:200] or type(error).__name__


def _check_is_text(content: str, place: int, where: str) -> None:
    """Raise ConfigError where a long run of digits stands outside of quotation marks, as no number is so long."""
    marks = re.sub(r"\\.", "", content[:place], flags=re.DOTALL).count('"')
    if marks % 2 == 0:  # outside of a text
        raise ConfigError([Problem(where, "holds a number of more than 400 characters")])


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):  # 1e999 is read as infinity
        raise ValueError(f"{text[:40]} is too large a number")
    return number


def _distinct_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    tree = dict(pairs)
    if len(tree) < len(pairs):
        raise ValueError(f"{repeated(name for name, _ in pairs)[0]!r} is there twice")
    return tree


def depth(tree: Any) -> int:
    """Levels of a tree; it is left as soon as there are too many."""
    count, level = 0, [tree]
    while level and count <= MOST_DEPTH:
        count += 1
        level = _below(level)  # a level at a time: no recursion, which has a limit of its own
    return count


def _below(level: Iterable[Any]) -> list[Any]:
    """The values of all mappings and lists among some nodes."""
    containers = [node for node in level if isinstance(node, dict | list | tuple)]
    return [value for node in containers for value in (node.values() if isinstance(node, dict) else node)]


def _plain(tree: Any, where: str) -> Any:
    """A tree whose texts can be written to a file. Raises ConfigError."""
    level = [tree]
    while level:
        texts = [text for node in level for text in (node if isinstance(node, dict) else [node])]  # keys are texts, too
        if garbled := next((text for text in texts if isinstance(text, str) and _GARBLED.search(text)), None):
            rule = "holds a character that no text has (NUL, or half of a pair of UTF-16)"
            raise ConfigError([Problem(where, rule, garbled[:40], _WAY_OUT)])
        level = _below(level)
    return tree


# ---------------------------------------------------------------- YAML before it is read


def _syntax_problem(error: yaml.MarkedYAMLError, where: str) -> Problem:
    """The problem of a text that is no YAML, with its line."""
    is_left_open = "flow" in str(error.context)
    mark = error.context_mark if is_left_open else error.problem_mark
    line = mark.line + 1 if mark else 0
    rule = " ".join(f"is not YAML: {error.problem or error.context}".split())
    if is_left_open:
        return Problem(f"{where}:{line}", "is not YAML: a bracket is left open", way_out="close it")
    has_tab = "\\t" in rule or "cannot start any token" in rule
    way = "indent with spaces, not tabs; quote what begins with % or @" if has_tab else "write key: value, with a space"
    return Problem(f"{where}:{line}", rule, way_out=way)


def _limits(text: str, where: str) -> Iterator[Problem]:
    """Problems of the stream of events, which is read no further than its first problem and never expanded."""
    level = nodes = 0
    for event in yaml.parse(text, Loader=LOADER):
        level += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        nodes += isinstance(event, yaml.NodeEvent)
        if level > MOST_DEPTH:
            yield Problem(_line(event, where), f"is nested deeper than {MOST_DEPTH}")
        if nodes > MOST_NODES:
            yield Problem(_line(event, where), f"holds more than {MOST_NODES} values")
        if isinstance(event, yaml.AliasEvent):
            yield Problem(_line(event, where), "uses a YAML alias", f"*{event.anchor}", "write the value out")
        elif not _PLAIN.match(tag := getattr(event, "tag", None) or _STANDARD):
            yield Problem(_line(event, where), "has a YAML tag that is not of plain data", tag, "remove the tag")
        # reading thousands of digits takes time that grows with their square; quoted, they are a text
        if isinstance(event, yaml.ScalarEvent) and not event.style and _LONG.fullmatch(event.value):
            yield Problem(_line(event, where), f"is a number of {len(event.value)} characters")


def _line(event: Any, where: str) -> str:
    return f"{where}:{event.start_mark.line + 1}" if event.start_mark else where
