"""The size of a configuration once its interpolations are resolved, told before they are.

A short file can stand for gigabytes: `a: ${b}${b}`, `b: ${c}${c}`, and so on. OmegaConf resolves without a limit, so
every reference is weighed first, each value once however often it is named.
"""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

from dse.errors import ConfigError, Problem

MOST_WEIGHT = 20_000_000
"""Characters of a resolved configuration, with _EACH for every value that is resolved on the way."""
MOST_SECONDS = 60.0
"""CPU time that composing may take."""
_EACH = 1_000  # resolving one takes about as long as copying so many characters
_REFERENCE = re.compile(r"\$\{([^${}]*)\}")
_INNER = "\0"  # stands for what was a reference inside another
_ENVIRONMENT = "oc.env:"
_WAY = "write the values out"
_Place = tuple[str, ...]


def check(tree: Any) -> None:
    """Raise ConfigError where resolving the interpolations of a tree would take too much, or cannot be told to."""
    weigher = _Weigher(tree)
    try:
        weight = 0
        for place, text in _texts(tree, ()):
            weight += weigher.text(place, text)
            if weight > MOST_WEIGHT:
                rule = f"interpolations make the configuration larger than {MOST_WEIGHT:,} characters"
                raise ConfigError([Problem(".".join(place), rule, text[:100], _WAY)])
    except RecursionError:
        raise ConfigError([Problem("configuration", "interpolations are nested too deep", way_out=_WAY)]) from None


def interpolates(tree: Any) -> bool:
    """True if any text of a tree has an interpolation."""
    return any("${" in text for _, text in _texts(tree, ()))


def _texts(node: Any, place: _Place) -> Iterator[tuple[_Place, str]]:
    for name, inner in _inner(node):
        yield from _texts(inner, (*place, name))
    if isinstance(node, str):
        yield place, node


def _inner(node: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(node, Mapping):
        yield from ((str(name), inner) for name, inner in node.items())
    elif isinstance(node, list):
        yield from ((str(index), inner) for index, inner in enumerate(node))


class _Weigher:
    """Weights of what is in a tree, by place, once each."""

    def __init__(self, tree: Any) -> None:
        self._tree, self._known = tree, dict[_Place, int]()

    def node(self, place: _Place, node: Any) -> int:
        """Weight of a value with all that is below it."""
        if isinstance(node, str):
            return self.text(place, node)
        if place not in self._known:
            self._known[place] = 0  # whatever comes back to itself is for OmegaConf to refuse
            self._known[place] = 1 + sum(self.node((*place, name), inner) for name, inner in _inner(node))
        return self._known[place]

    def text(self, place: _Place, text: str) -> int:
        """Weight of a text with all that it names. Raises ConfigError for what cannot be weighed."""
        if "${" not in text:
            return 1 + len(text)
        if place not in self._known:
            self._known[place] = 0
            weight, remaining = len(text), text
            while match := _REFERENCE.search(remaining):  # the innermost first: its pattern takes no braces
                weight += _EACH + self._weight_of_name(place, match[1], text)
                remaining = remaining[: match.start()] + _INNER + remaining[match.end() :]
            self._known[place] = weight
        return self._known[place]

    def _weight_of_name(self, place: _Place, name: str, text: str) -> int:
        if name.strip().startswith(_ENVIRONMENT):
            variable = name.strip().removeprefix(_ENVIRONMENT).partition(",")[0].strip()
            return len(name) + len(os.environ.get(variable, ""))
        if _INNER in name or ":" in name:
            rule = "names a value by another interpolation, or by a function"
            way = "write ${section.key} or ${oc.env:NAME}"
            raise ConfigError([Problem(".".join(place), rule, text[:100], way)])
        target = self._find(_absolute(place, name))
        return 0 if target is None else self.node(*target)

    def _find(self, place: _Place) -> tuple[_Place, Any] | None:
        """The place and value of a name, references on the way followed; None where there is none."""
        here, node = tuple[str, ...](), self._tree
        for depth, part in enumerate(place):
            node = next((inner for name, inner in _inner(node) if name == part), None)
            here = (*here, part)
            last = depth == len(place) - 1
            if isinstance(node, str) and not last and (alias := _REFERENCE.fullmatch(node.strip())):
                return self._find((*_absolute(here, alias[1]), *place[depth + 1 :]))
        return None if node is None else (here, node)


def _absolute(place: _Place, name: str) -> _Place:
    """The place that a name means where it is written: each dot before it is one level up."""
    plain = re.sub(r"[\[\].]+", ".", name.strip())  # `a[0].b` and `a.0.b` are one
    dots = len(name.strip()) - len(name.strip().lstrip("."))
    parts = tuple(part.strip("'\" ") for part in plain.strip(".").split(".") if part)
    return (*place[: max(0, len(place) - dots)], *parts) if dots else parts  # more dots than levels: the root


@contextmanager
def limit_cpu_time(seconds: float = MOST_SECONDS) -> Iterator[None]:
    """While it lasts, more CPU time than that raises ConfigError; in other threads than the main one nothing does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def late(number: int, frame: FrameType | None) -> None:
        rule = f"takes longer than {seconds:g} s of CPU time to compose"
        raise ConfigError([Problem("configuration", rule, way_out="make it smaller, or leave out interpolations")])

    before = signal.signal(signal.SIGVTALRM, late)  # CPU time of this process: waiting for a disk does not count
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, 1.0)  # again each second, should one be swallowed
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def with_text_keys(tree: Any) -> Any:
    """A tree whose keys are all text, so that every path can be written."""
    if isinstance(tree, dict):
        return {str(key): with_text_keys(value) for key, value in tree.items()}
    return [with_text_keys(value) for value in tree] if isinstance(tree, list) else tree
