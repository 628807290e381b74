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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_origin

from dse.errors.texts import hidden as hidden
from dse.errors.texts import printable
from dse.errors.texts import redact as redact

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError
    from pydantic_core import ErrorDetails

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
        by_content = {
            (problem.path, problem.rule, repr(problem.value), problem.way_out): problem for problem in problems
        }
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


def environment_text(error: OSError) -> str:
    """Failure outside of the program, with the way out where there is one."""
    if disk_is_full(error):
        return f"{error}; make room there, or set TMPDIR to another folder, and type the same command again"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS) and error.filename:
        way_out = "choose another folder (output_dir=, out=), or change its permissions"
        return f"{error.filename}: {str(error.strerror).lower()}; {way_out}"
    return str(error)


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
        model, problems = _validate(kind, tree, path)
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


def repeated(values: Iterable[str]) -> list[str]:
    """Return the values that come more than once, each once, in their order."""
    return [value for value, count in Counter(values).items() if count > 1]


def nearest(name: str, candidates: Iterable[str], *, cutoff: float = 0.6) -> str:
    """The candidate most like a name, "" where none is; capitals and hyphens do not count.

    >>> nearest("H100", ["v100", "h100"]), nearest("ficco-sweep", ["ficco", "ficco_sweep"])
    ('h100', 'ficco_sweep')
    """
    # of names that differ in capitals only, the first stays
    by_plain = {candidate.lower().replace("-", "_"): candidate for candidate in sorted(candidates, reverse=True)}
    plain = name.lower().replace("-", "_")
    near = difflib.get_close_matches(plain, sorted(by_plain), n=5, cutoff=cutoff)
    if not near:
        return ""

    def likeness(candidate: str) -> tuple[float, bool]:
        # of equally near ones, letters in another order are the likelier slip
        return difflib.SequenceMatcher(None, candidate, plain).ratio(), sorted(candidate) == sorted(plain)

    return by_plain[max(near, key=likeness)]


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

    Raises ConfigError, also for a name that is given two values.

    >>> pairs(["port=80"], {"port": "5000", "host": "here"})
    {'port': '80', 'host': 'here'}
    """
    values = dict(defaults)
    names = (*defaults, *optional)
    check, read = Problems(), set[str]()
    for word in words:
        name, _, value = word.partition("=")
        if name in read and value and value != values[name]:
            check.add(name, f"is given twice, as {values[name]} before", value=value, way_out="write one of them")
        elif name in names and value:
            values[name] = value
            read.add(name)
        else:
            check.add(word, "is not understood here", way_out=_instead_of_word(word, names))
    check.done()  # what is missing may be the word that was not understood
    for name in [name for name, value in values.items() if not value]:
        check.add(name, "is missing", way_out=f"write {name}=<name>")
    check.done()
    return values


def _instead_of_word(word: str, names: Sequence[str]) -> str:
    """The way out of a word of a command that is no `name=value` which it knows: the nearest name."""
    name, equals, value = word.lstrip("-").partition("=")
    near = nearest(name, names)
    if near and (value or not equals):
        return f"did you mean `{assignment(near, value)}`?" if value else f"write {near}=<value>"
    return known_here(sorted(names))


def _validate(kind: type[Model], tree: object, path: str) -> tuple[Model | None, list[Problem]]:
    """A tree as a model; None, and every problem, where it does not hold. path: of the tree, dotted."""
    from pydantic import ValidationError  # a quarter of the time that a refusal takes

    try:
        return kind.model_validate(tree), []
    except ValidationError as error:
        return None, list(_translate(error, kind, path))


def _translate(error: ValidationError, kind: type[BaseModel], path: str) -> Iterator[Problem]:
    for item in error.errors(include_url=False):
        keys, owner = _locate(kind, item["loc"])
        dotted = ".".join([path, *keys] if path else keys)
        if item["type"] == "extra_forbidden":
            fields = list(owner.model_fields) if owner else []
            yield Problem(dotted, "is not a known key", way_out=_other_key(dotted, fields))
        elif item["type"] == "missing" or item["input"] is MISSING:
            yield Problem(dotted, "is missing", way_out=getattr(owner, "missing_way_out", "give it a value"))
        else:
            value = item["input"] if _is_leaf(item["input"]) else None  # whole sections would fill the screen
            way = _way_out(dotted, item) or _way_out_of_field(owner, dotted, item)
            yield Problem(dotted or path, _sentence(item["msg"]), value, way)


def _way_out_of_field(owner: type[BaseModel] | None, path: str, item: ErrorDetails) -> str:
    """The way out of a value that is like no legal one: the field's default, or the key that was left out."""
    field = owner.model_fields.get(path.rpartition(".")[2]) if owner else None
    if field is None:
        return ""
    models = _models_in(field.annotation)
    # a section was given one value
    if item["type"] in ("model_type", "dict_type") and len(models) == 1 and _is_leaf(item["input"]):
        keys = list(models[0].model_fields)
        return f"write `{assignment(f'{path}.{keys[0]}', item['input'])}`" if len(keys) == 1 else known_here(keys)
    is_choice = item["type"] in ("literal_error", "bool_parsing") and isinstance(field.default, str | bool)
    return f"the default is `{assignment(path, field.default)}`" if is_choice else ""


def _other_key(path: str, fields: Sequence[str]) -> str:
    """The way out of a key that a model does not have: the nearest of its fields, as a path where that can be typed."""
    parent, _, name = path.rpartition(".")
    way = did_you_mean(name, fields)
    return way.replace("mean `", f"mean `{parent}.") if PLAIN_PATH.fullmatch(path) and parent else way


def _way_out(path: str, item: ErrorDetails) -> str:
    """The way out of a value that is not legal, as a word that can be typed where one is known."""
    kind, value = item["type"], item["input"]
    # a list where a list belongs: only its length is wrong
    if isinstance(value, (list, tuple)) and kind not in ("tuple_type", "list_type", "too_short", "too_long"):
        several = assignment(path, f"choice({','.join(map(str, value[:8]))})", prefix="+space.")
        return "give one value" + ("" if path.partition(".")[0] in NO_KNOBS else f"; to search several: `{several}`")
    legal = _legal_value(path, item)
    if legal is None:
        return ""
    return f"write `{assignment(path, legal)}`" if PLAIN_PATH.fullmatch(path) else f"write {grammar(legal)}"


def _legal_value(path: str, item: ErrorDetails) -> object:
    """The legal value nearest to one that was refused; None where it cannot be told."""
    kind, value, limits = item["type"], item["input"], item.get("ctx", {})
    if "legal" in limits:
        return limits["legal"]
    if kind == "tuple_type" and _is_leaf(value):
        return [value]
    if kind == "literal_error":
        # among a few legal values a vague match will do
        return nearest(grammar(value), re.findall(r"'([^']*)'", limits["expected"]), cutoff=0.4) or None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    if kind == "greater_than_equal":
        # a small number was most likely meant in a larger unit
        unit = next((unit for suffix, unit in _UNITS.items() if path.endswith(suffix)), "")
        return f"{value:g} {unit}" if unit and value > 0 else limits["ge"]
    return limits["le"] if kind == "less_than_equal" else None


_UNITS = {"bytes_per_s": "GB/s", "bytes_per_s_per_cu": "GB/s", "flop_per_s": "TFLOP/s", "_bytes": "GB"}
"""Endings of dotted paths -> the unit that a small number most likely lacks."""


def _is_leaf(value: object) -> bool:
    return not isinstance(value, (Mapping, list, tuple)) and not hasattr(value, "model_dump")


_RULES = {
    r"Input should be a valid (dictionary or instance of \w+|dictionary)": "is a section: write one of its keys",
    r"Input should be a valid tuple": "must be a list",
    r"Input should be a valid boolean.*": "must be true or false",
    r"Input should be a valid integer": "must be a whole number",
    r"Input should be (a valid )?": "must be ",
    r"String should have at least 1 character": "must not be empty",
    r"String should match pattern '\^\[A-Za-z0-9\._\+-\]\+\$'": "has other characters than A-Z, a-z, 0-9 and ._+-",
    r"String should match pattern '\^\[A-Za-z0-9_\.,:.*": 'is no title: letters, digits, blanks and _.,:"=+-%/[]{}',
}
"""Messages of pydantic, as patterns, and the rule as a person says it."""


def _sentence(message: str) -> str:
    text = message.removeprefix("Value error, ").removeprefix("Assertion failed, ")
    for pattern, rule in _RULES.items():
        if match := re.match(pattern, text):
            return rule + text[match.end() :]
    return text


def _locate(kind: Any, location: tuple[int | str, ...]) -> tuple[list[str], type[BaseModel] | None]:
    """The keys a person typed for a pydantic error location (without the tags of unions), and the last model on it."""
    keys, owner = list[str](), None
    for key in location:
        models = _models_in(kind)
        # a union's tag is no key that a person typed
        if len(models) > 1 and (tagged := [model for model in models if _tag(model) == key]):
            kind = tagged[0]
            continue
        keys.append(str(key))
        owner = models[0] if models else None
        field = owner.model_fields.get(str(key)) if owner and not _holds_many(kind) else None
        kind = field.annotation if field else (_item(kind) if _holds_many(kind) else None)
    return keys, owner


def _holds_many(annotation: Any) -> bool:
    """True if a location's next key is an index or a mapping's key, not a field."""
    origin = get_origin(annotation)
    return isinstance(origin, type) and issubclass(origin, (tuple, list, Mapping))


def _item(annotation: Any) -> Any:
    # the values of a mapping, not its keys
    return next((part for part in reversed(get_args(annotation)) if part is not Ellipsis), None)


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and hasattr(annotation, "model_fields"):
        return [annotation]
    return [model for part in get_args(annotation) for model in _models_in(part)]


def _tag(model: type[BaseModel]) -> object:
    field = model.model_fields.get("kind")
    return field.default if field else None
