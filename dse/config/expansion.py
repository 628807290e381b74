"""Texts of a configuration that stand for more: interpolations, weighed before they are resolved, and sweeps as knobs.

A short file can stand for gigabytes: `a: ${b}${b}`, `b: ${c}${c}`, and so on. OmegaConf resolves without a limit, so
every reference is weighed first, each value once however often it is named. Sweeps of Hydra's grammar (choices, ranges
and intervals) are counted before their values are made.
"""

from __future__ import annotations

import fnmatch
import itertools
import math
import os
import re
import signal
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from types import FrameType
from typing import Any

from dse.config.options import catalogued, list_options
from dse.errors import ConfigError, Problem, Problems, did_you_mean
from dse.space import Knob

_SECTION = re.compile(r"(?!space|study)[a-z_]+=\{.+\}")
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
        for place, text in _texts(tree):
            weight += weigher.text(place, text)
            if weight > MOST_WEIGHT:
                rule = f"interpolations make the configuration larger than {MOST_WEIGHT:,} characters"
                raise ConfigError([Problem(".".join(place), rule, text[:100], _WAY)])
    except RecursionError:
        raise ConfigError([Problem("configuration", "interpolations are nested too deep", way_out=_WAY)]) from None


def interpolates(tree: Any) -> bool:
    """True if any text of a tree has an interpolation."""
    return "${" in "\0".join([text for _, text in _texts(tree)])


def _texts(tree: Any) -> list[tuple[_Place, str]]:
    """Places and texts of a tree, in the order of a reader."""
    texts, stack = list[tuple[_Place, str]](), [(tuple[str, ...](), tree)]
    while stack:
        place, node = stack.pop()
        if isinstance(node, str):
            texts.append((place, node))
        elif isinstance(node, Mapping | list):
            stack += [((*place, name), inner) for name, inner in reversed(_inner(node))]
    return texts


def _inner(node: Any) -> list[tuple[str, Any]]:
    """Names and values of what a tree holds; none of what is no tree."""
    if isinstance(node, Mapping):
        return [(str(name), inner) for name, inner in node.items()]
    return [(str(index), inner) for index, inner in enumerate(node)] if isinstance(node, list) else []


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
            self._known[place] = 1 + sum([self.node((*place, name), inner) for name, inner in _inner(node)])
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


_COMPOSED = Problem("configuration", "to compose", way_out="make it smaller, or leave out interpolations")


@contextmanager
def limit_cpu_time(seconds: float = MOST_SECONDS, work: Problem = _COMPOSED) -> Iterator[None]:
    """While it lasts, more CPU time than that raises ConfigError; in other threads than the main one nothing does.

    work: path and way out of what takes the time; its rule says what for.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def late(number: int, frame: FrameType | None) -> None:
        raise ConfigError([replace(work, rule=f"takes longer than {seconds:g} s of CPU time {work.rule}")])

    before = signal.signal(signal.SIGVTALRM, late)  # CPU time of this process: waiting for a disk does not count
    # again each second, should one be swallowed
    timer = signal.setitimer(signal.ITIMER_VIRTUAL, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, *timer)
        signal.signal(signal.SIGVTALRM, before)


def with_text_keys(tree: Any) -> Any:
    """A tree whose keys are all text, so that every path can be written."""
    if isinstance(tree, dict):
        # most values are no trees, and need no call
        return {
            str(key): with_text_keys(value) if isinstance(value, dict | list) else value for key, value in tree.items()
        }
    return [with_text_keys(value) for value in tree] if isinstance(tree, list) else tree


MOST_VALUES = 1_000_000
"""Of a knob; they are counted before they are made."""
LARGEST_WHOLE = 2**53
"""Beyond it not every whole number is a 64-bit float."""
FEWER_VALUES = "take a larger step, or fewer values"


def sweep_knob(path: str, value: Any, groups: Mapping[str, list[str]]) -> Knob:
    """A sweep as typed, as the knob at a path. Raises ValueError for one without values, or with too many."""
    from hydra.core.override_parser.types import ChoiceSweep, Glob, IntervalSweep, RangeSweep

    if isinstance(value, IntervalSweep):
        return _interval(path, value.start, value.end, log="log" in value.tags)  # tag(log,interval(a,b))
    if isinstance(value, RangeSweep):
        values: tuple[Any, ...] = tuple(_range_values(value))
    elif isinstance(value, Glob):
        names = groups.get(path.partition(".")[0], [])
        values = tuple(name for name in names if _matches(name, value.include) and not _matches(name, value.exclude))
    else:
        values = tuple(value.list if isinstance(value, ChoiceSweep) else value if isinstance(value, list) else [value])
    if not values:
        raise ValueError("it holds no value (the end of a range is left out)")
    if any(isinstance(item, list | dict) for item in values):
        raise ValueError("a value is a number, a text or null, not a list or a mapping")
    if isinstance(value, RangeSweep):
        return Knob(path, values)
    # a value that is listed twice is one
    return Knob(path, tuple(dict.fromkeys(getattr(item, "text", item) for item in values)))


def plain(leaf: Any) -> Any:
    """A value of a space that is no text, as it is. Raises ValueError for a sweep, as one inside braces is if bare."""
    if isinstance(leaf, int | float | list | None):
        return leaf
    raise ValueError("inside braces it needs quotes, as 'choice(a,b)'")


def names_several(word: str, groups: Collection[str]) -> bool:
    """Tell whether a word names several options of a group in brackets: `system=[h100_8,h200_8]`."""
    key, _, value = word.partition("=")
    return key in groups and value.startswith("[") and value.endswith("]")


def each_run(words: Sequence[str], groups: Collection[str]) -> list[tuple[dict[str, str], list[str]]]:
    """For each combination of several values outside the space: value by path, and the words of its run."""
    choices = [_choices(word, groups) for word in words]
    swept = [place for place, texts in enumerate(choices) if len(texts) > 1]
    runs = []
    for chosen in itertools.product(*choices):
        values = dict(chosen[place].split("=", 1) for place in swept)
        runs.append((values, list(chosen)))
    return runs


def check_options(runs: Iterable[Mapping[str, str]], groups: Collection[str], folder: Path | None) -> None:
    """Refuse what is no option of its group, before the first run. folder: the user's own. Raises ConfigError."""
    check = Problems()
    for group, value in dict.fromkeys(item for values in runs for item in values.items() if item[0] in groups):
        known = list_options(group, [folder] if folder else [])
        if value not in known and not catalogued(group, value):
            way = did_you_mean(value, known).replace("mean `", f"mean `{group}=")
            check.add(group, "is no option of this group", value=value, way_out=way)
    check.done()


def each_value(words: Iterable[str]) -> list[str]:
    """Words with one for each value of a mapping that is typed for a section; the space counts whole.

    >>> each_value(["run={mode: training, batch: 4}", "space={run: {batch: 'choice(1,2)'}}"])
    ['run.mode=training', 'run.batch=4', "space={run: {batch: 'choice(1,2)'}}"]
    """
    return [value for word in words for value in (_values(word) if _SECTION.fullmatch(word) else [word])]


def _values(word: str) -> list[str]:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    from dse.config.overrides import override

    with suppress(HydraException):  # composition tells what is wrong
        values: Any = OverridesParser.create().parse_override(word).value()
        return [override(f"{word.partition('=')[0]}.{name}", value) for name, value in values.items()]
    return [word]


def _choices(word: str, groups: Collection[str]) -> list[str]:
    """The words that a word with a sweep stands for; any other word, also one that cannot be parsed, as it is."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    if names_several(word, groups):
        key, _, value = word.partition("=")
        word = f"{key}={value[1:-1]}"
    if word.startswith("-") or word.lstrip("+").startswith("space.") or "=" not in word:
        return [word]
    try:
        override = OverridesParser.create().parse_override(word)
    except HydraException:
        return [word]
    if not override.is_discrete_sweep():
        return [word]
    return [f"{override.get_key_element()}={text}" for text in override.sweep_string_iterator()]


def _range_values(sweep: Any) -> Sequence[int | float]:
    """The values of a range, its end left out; whole numbers take no time. Raises ValueError as `range_size` does."""
    count, ends = range_size(sweep), (sweep.start, sweep.stop, sweep.step)
    if all(isinstance(end, int) for end in ends):
        return range(*ends)
    start, step = Decimal(str(sweep.start)), Decimal(str(sweep.step))  # 0.1 + 0.2 in floats would not be 0.3
    return [float(start + place * step) for place in range(count)]


def range_size(sweep: Any) -> int:
    """Number of values of a range, counted without making them, in the decimals that were written.

    Raises ValueError where they are too many.
    """
    start, stop, step = (Decimal(str(end)) for end in (sweep.start, sweep.stop, sweep.step))
    if not (start.is_finite() and stop.is_finite() and step.is_finite() and step):
        raise ValueError("a range has finite ends and a step other than 0")
    count = max(Decimal(0), (stop - start) / step)  # a step in the other direction: no values
    if count > MOST_VALUES:
        raise ValueError(too_many(count))
    return math.ceil(count)


def too_many(count: int | Decimal) -> str:
    """The message on a knob of too many values."""
    return f"it holds {Decimal(count):.4g} values, and a knob has at most {MOST_VALUES:,}"


def _interval(path: str, low: Any, high: Any, *, log: bool) -> Knob:
    if not low < high:
        raise ValueError(f"its low end {low} is not below its high end {high}")
    if log and low <= 0:
        raise ValueError("a logarithmic interval starts above 0")
    if isinstance(low, int) and isinstance(high, int):  # int(interval(a,b))
        if high - low >= MOST_VALUES:
            raise ValueError(too_many(high - low + 1))
        return Knob(path, tuple(range(low, high + 1)))
    return Knob(path, low=float(low), high=float(high), log=log)


def inexact(tree: Mapping[str, Any], knobs: Sequence[Knob]) -> list[Problem]:
    """Problems of whole numbers that a 64-bit float rounds: of a configuration, and the first of each of its knobs."""
    rule = "is a whole number beyond 2**53, which a table of results would round"
    first = ((f"space.{knob.path}", next(filter(_is_inexact, knob.values), None)) for knob in knobs)
    large = [*_inexact_below(tree), *((path, value) for path, value in first if _is_inexact(value))]
    return [Problem(path, rule, value, "write a smaller number, or a text in quotes") for path, value in large]


def _is_inexact(value: object) -> bool:
    return isinstance(value, int) and abs(value) > LARGEST_WHOLE


def _inexact_below(tree: Any) -> list[tuple[str, int]]:
    """(dotted path, value) of the whole numbers of a tree that a 64-bit float rounds, in the order of a reader."""
    numbers, stack = list[tuple[str, int]](), [("", tree)]
    while stack:
        path, node = stack.pop()
        if isinstance(node, int) and abs(node) > LARGEST_WHOLE:
            numbers.append((path, node))
        elif isinstance(node, Mapping | list):
            stack += [(f"{path}.{name}".lstrip("."), value) for name, value in reversed(_inner(node))]
    return numbers


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


def contradictions(typed: Sequence[tuple[str, str]], groups: Collection[str]) -> list[Problem]:
    """Problems of paths that are given one value and a sweep of several on one command line.

    typed: key and text of each override.
    """
    fixed = {f"{key}.name" if key in groups else key: text for key, text in typed}
    problems = list[Problem]()
    for key, text in typed:
        path = key.removeprefix("space.")
        path = f"{path}.name" if path in groups else path
        if key != path and key.startswith("space.") and path in fixed:
            rule = f"is swept here, and fixed by `{fixed[path]}`"
            problems.append(Problem(key, rule, text.partition("=")[2], "keep one of them"))
    return problems
