"""Errors of an input, with the information needed to correct it.

A `Problem` names the dotted path, the value, the rule it breaks and the way out; a `ConfigError` carries all problems
at once, so that a configuration can be corrected in one go.
"""

from __future__ import annotations

import difflib
import errno
import re
import traceback
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from dse.errors.texts import hidden as hidden
from dse.errors.texts import printable
from dse.errors.texts import redact as redact

if TYPE_CHECKING:
    from pydantic import BaseModel

Model = TypeVar("Model", bound="BaseModel")
MOST_SHOWN = 20
"""Problems of one file that are reported one by one."""


@dataclass(frozen=True)
class Problem:
    """One broken rule: `path = value`, the rule, the way out."""

    path: str
    rule: str
    value: object = None
    way_out: str = ""

    def __str__(self) -> str:
        item = getattr(self.value, "item", None)  # of a number of NumPy, whose own text says its type
        # an array stays as it is
        value = item() if callable(item) and not getattr(self.value, "ndim", 0) else self.value
        where = str(redact(self.path)) + (f" = {redact(value)!r}" if self.value is not None else "")
        return printable(f"{where}: {self.rule}" + (f" ({self.way_out})" if self.way_out else ""))


class ConfigError(Exception):
    """Input refused before anything was evaluated; exit code 2."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        # several checks may find the same problem
        by_content = {(each.path, each.rule, repr(each.value), each.way_out): each for each in problems}
        self.problems = tuple(by_content.values())

    def __str__(self) -> str:
        return "\n".join(dict.fromkeys(map(str, self.problems)))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[tuple[Problem, ...]]]:
        return ConfigError, (self.problems,)  # so that it survives the way back from a worker process


class Broken(Exception):
    """A backend that fails every time, and alike: the study stops; exit code 3."""


def fault_text(error: BaseException, module: str = "") -> str:
    """An exception of somebody's code in words, with the last line of `module`, or of any, that it passed."""
    places = [(frame.f_globals.get("__name__", ""), line) for frame, line in traceback.walk_tb(error.__traceback__)]
    inside = [place for place in places if place[0] == module] or places
    where = f" ({inside[-1][0]}, line {inside[-1][1]})" if inside else ""
    return f"{type(error).__name__}: {error}{where}"


def disk_is_full(error: BaseException) -> bool:
    """True for a failure to write for lack of room, which is nobody's fault but the machine's."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


MISSING = object()
"""What stands in a tree for a value that must be given there, so that its place is told with all other problems."""


class Problems:
    """Collects problems over several checks; `done()` raises them together.

    >>> check = Problems()
    >>> check.add("budget.trials", "must be at least 1", value=0)
    >>> len(check.found)
    1
    """

    def __init__(self) -> None:
        self.found: list[Problem] = []

    def add(self, path: str, rule: str, *, value: object = None, way_out: str = "") -> None:
        """Note one problem."""
        self.found.append(Problem(path, rule, value, way_out))

    def model(self, kind: type[Model], tree: object, *, path: str) -> Model | None:
        """Validate `tree` as `kind`; None, with every problem noted, where it does not hold."""
        from dse.errors.validation import validated  # pydantic is a quarter of the time that a refusal takes

        model, problems = validated(kind, tree, path)
        self.found.extend(problems)
        return model

    def done(self, file: str = "") -> None:
        """Raise `ConfigError` if anything was noted; of the many problems of a file, its first ones."""
        more = len(self.found) - MOST_SHOWN
        if file and more > 0:
            self.found[MOST_SHOWN:] = [Problem(file, f"has {more} more problems")]
        if self.found:
            raise ConfigError(self.found)


def validate_as(kind: type[Model], tree: object, *, path: str) -> Model:
    """Validate `tree` as `kind`. Raises ConfigError with every problem."""
    check = Problems()
    model = check.model(kind, tree, path=path)
    check.done()
    assert model is not None
    return model


def not_installed(path: str, library: str, extra: str) -> ConfigError:
    """The refusal of what needs a library that is not installed. extra: of this distribution, which brings it."""
    return ConfigError(
        [Problem(path, f"needs {library}, which is not installed", None, f"pip install 'overlap-dse[{extra}]'")]
    )


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """The way out of a name that is not known: the nearest known one, else all of them.

    >>> did_you_mean("num_cuz", ["num_cus", "kernel_launch_s"])
    'did you mean `num_cus`?'
    """
    names = sorted(candidates)
    near = nearest(name, names)
    return f"did you mean `{near}`?" if near else known_here(names)


_OFF = frozenset({"off", "no", "false", "disabled", "0", "null"})
"""Words by which people turn something off that has an option `none`."""


def repeated(values: Iterable[str]) -> list[str]:
    """Return the values that come more than once, each once, in their order."""
    return [value for value, count in Counter(values).items() if count > 1]


def nearest(name: str, candidates: Iterable[str], *, cutoff: float = 0.6) -> str:
    """The candidate most like a name, "" where none is; capitals, hyphens, folders and endings of files do not count.

    >>> nearest("H100", ["v100", "h100"]), nearest("conf/study/ficco-sweep.yaml", ["ficco", "ficco_sweep"])
    ('h100', 'ficco_sweep')
    """
    # of names that differ in capitals only, the first stays
    by_plain = {_plain(candidate): candidate for candidate in sorted(candidates, reverse=True)}
    plain = _plain(name)
    if plain in by_plain:
        return by_plain[plain]
    if plain in _OFF and "none" in by_plain:
        return by_plain["none"]
    near = difflib.get_close_matches(plain, sorted(by_plain), n=3, cutoff=cutoff)
    # ratios of equal matches may differ in their last digits
    ratios = {other: round(difflib.SequenceMatcher(None, plain, other).ratio(), 3) for other in near}
    return by_plain[min(near, key=lambda other: (-ratios[other], other))] if near else ""


def _plain(name: str) -> str:
    """A name without what people write differently: capitals, hyphens, spaces, a folder before it, `.yaml` after."""
    # a path that a shell has completed
    stem = name.replace("\\", "/").rpartition("/")[2] if "/" in name or name.endswith(".yaml") else name
    return re.sub(r"[-\s]+", "_", stem.strip().removesuffix(".yaml").removesuffix(".yml").lower())


_MOST_LISTED = 110
"""Characters of a list of known names."""


def known_here(names: Sequence[str]) -> str:
    """A list of the known names, cut where it would fill more than a line.

    >>> known_here(["a", "b"]), known_here([])
    ('known here: a, b', 'nothing is known here')
    """
    text = ", ".join(names)
    if len(text) > _MOST_LISTED:
        text = f"{text[:_MOST_LISTED].rpartition(',')[0]}, ... ({len(names)} in all)"
    return f"known here: {text}" if names else "nothing is known here"


NO_KNOBS = ("seed", "budget", "executor", "fidelity", "figures", "output_dir", "search", "store", "study", "tracking")
"""Sections of a configuration that say how a study runs: none of it can be searched."""
PLAIN_PATH = re.compile(r"[A-Za-z_]\w*(\.\w+)*")
_WORD = re.compile(r"[\w@%+:,./-]+")  # of a shell, which it leaves as it is


def assignment(path: str, value: object, *, prefix: str = "") -> str:
    """Write `path=value` as a word of the shell, with the quotes that the shell and Hydra's grammar need.

    >>> assignment("a.b_bytes_per_s", "64 GB/s"), assignment("a.b", ["x", "y"]), assignment("a.b", False)
    ("a.b_bytes_per_s='64 GB/s'", "a.b='[x,y]'", 'a.b=false')
    """
    text = grammar(value)
    # the shell's way of a quotation mark within quotes
    quoted = text if _WORD.fullmatch(text) or not text else "'" + text.replace("'", "'\"'\"'") + "'"
    return f"{prefix}{path}={quoted}"


def grammar(value: object) -> str:
    """A value as Hydra's grammar reads it."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(grammar, value))}]"
    return f"{value:.15g}" if isinstance(value, float) else str(value)  # without the digits that rounding adds


def pairs(words: Iterable[str], defaults: Mapping[str, str], *, optional: Sequence[str] = ()) -> dict[str, str]:
    """Parse the words `name=value` of a command. defaults: by name, empty where a value must be given.

    Raises ConfigError.

    >>> pairs(["port=80"], {"port": "5000", "host": "here"})
    {'port': '80', 'host': 'here'}
    """
    values = dict(defaults)
    names = (*defaults, *optional)
    check = Problems()
    for word in words:
        name, _, value = word.partition("=")
        if name in names and value:
            values[name] = value
        else:
            check.add(word, "is not understood here", way_out=_instead_of_word(word, values, names))
    check.done()  # what is missing may be the word that was not understood
    for name in [name for name, value in values.items() if not value]:
        check.add(name, "is missing", way_out=f"write {name}=<name>")
    check.done()
    return values


def _instead_of_word(word: str, values: Mapping[str, str], names: Sequence[str]) -> str:
    """The way out of a word of a command that is no `name=value` which it knows. values: by name, so far."""
    name, equals, value = word.lstrip("-").partition("=")
    near = nearest(name, names)
    if near and (value or not equals):
        return f"did you mean `{assignment(near, value)}`?" if value else f"write {near}=<value>"
    if not equals:
        # a bare number was most likely meant for the option that takes one
        numeric = [other for other in names if name.isdigit() and values.get(other, "").isdigit()]
        missing = [other for other in names if other in values and not values[other]]
        if target := [*numeric, *missing]:
            return f"write `{assignment(target[0], name)}`"
    return known_here(sorted(names))
