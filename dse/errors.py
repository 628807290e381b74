"""Errors of an input, with the information needed to correct it.

A `Problem` names the dotted path, the value, the rule it breaks and the way out; a `ConfigError` carries all problems
at once, so that a configuration can be corrected in one go.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError

from dse.values import moved_to, renamed_to

Model = TypeVar("Model", bound=BaseModel)
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
        value = item() if callable(item) and not getattr(self.value, "ndim", 0) else self.value
        where = f"{self.path} = {value!r}" if self.value is not None else self.path
        return f"{where}: {self.rule}" + (f" ({self.way_out})" if self.way_out else "")


class ConfigError(Exception):
    """Input refused before anything was evaluated; exit code 2."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple({str(problem): problem for problem in problems}.values())
        super().__init__("\n".join(map(str, self.problems)))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[tuple[Problem, ...]]]:
        return ConfigError, (self.problems,)  # so that it survives the way back from a worker process


class Broken(Exception):
    """A backend that fails every time, and alike: the study stops; exit code 3."""


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
        try:
            return kind.model_validate(tree)
        except ValidationError as error:
            self.found.extend(_translate(error, kind, path))
            return None

    def done(self, file: str = "") -> None:
        """Raise `ConfigError` if anything was noted; of the many problems of a file, its first ones."""
        more = len(self.found) - MOST_SHOWN
        if file and more > 0:
            self.found[MOST_SHOWN:] = [Problem(file, f"has {more} more problems")]
        if self.found:
            raise ConfigError(self.found)


_SECRET = r"(?:token|secret|password|passwd|api_?key|access_?key|private_?key|credentials?)"


def hidden(text: str) -> str:
    """A text whose URIs have lost their passwords.

    >>> hidden("cannot reach postgresql://me:secret@host/x")
    'cannot reach postgresql://me:***@host/x'
    """
    plain = re.sub(r"(://[^/@:\s]*):[^@\s]*@", r"\1:***@", text)
    return re.sub(rf"(?i)([?&][\w-]*{_SECRET}[\w-]*=)[^&\s]*", r"\1***", plain)


def redact(tree: Any) -> Any:
    """A tree, or a text such as an override, that may be written down: without passwords and what is named a secret.

    >>> redact({"store": {"url": "postgresql://me:x@host/db"}, "api_key": "abc", "tokens": 3})
    {'store': {'url': 'postgresql://me:***@host/db'}, 'api_key': '***', 'tokens': 3}
    """
    if isinstance(tree, Mapping):
        return {key: "***" if _is_secret(key, value) else redact(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [redact(value) for value in tree]
    if not isinstance(tree, str):
        return tree
    name, equals, value = tree.partition("=")
    return f"{name}=***" if equals and _is_secret(name, value) else hidden(tree)


def _is_secret(name: object, value: object) -> bool:
    last = str(name).rpartition(".")[2]
    return isinstance(value, str) and bool(value) and re.fullmatch(rf"(?i)(.*[_-])?{_SECRET}", last) is not None


def did_you_mean(name: str, candidates: Iterable[str], *, path: str = "") -> str:
    """The way out of a name that is not known: what it is called now, else the nearest known one, else all of them.

    path: the dotted path that the name is part of, for values that moved to another section.

    >>> did_you_mean("num_cuz", ["num_cus", "kernel_launch_s"])
    'did you mean `num_cus`?'
    """
    names = sorted(candidates)
    if moved := moved_to(path):
        return moved
    if now := renamed_to(name, names):
        return now
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if near:
        return f"did you mean `{near[0]}`?"
    return f"known here: {', '.join(names)}" if names else "nothing is known here"


def pairs(words: Iterable[str], defaults: Mapping[str, str], *, optional: Sequence[str] = ()) -> dict[str, str]:
    """Parse the words `name=value` of a command. defaults: by name, empty where a value must be given.

    Raises ConfigError.

    >>> pairs(["port=80"], {"port": "5000", "host": "here"})
    {'port': '80', 'host': 'here'}
    """
    values = dict(defaults)
    for word in words:
        name, _, value = word.partition("=")
        if name not in (*defaults, *optional) or not value:
            raise ConfigError(
                [Problem(word, "is not understood here", way_out=did_you_mean(name, (*defaults, *optional)))]
            )
        values[name] = value
    missing = [name for name, value in values.items() if not value]
    if missing:
        raise ConfigError([Problem(missing[0], "is missing", way_out=f"write {missing[0]}=<name>")])
    return values


def _translate(error: ValidationError, kind: type[BaseModel], path: str) -> Iterator[Problem]:
    for item in error.errors(include_url=False):
        keys, owner = _locate(kind, item["loc"])
        dotted = ".".join([path, *keys] if path else keys)
        if item["type"] == "extra_forbidden":
            fields = list(owner.model_fields) if owner else []
            yield Problem(dotted, "is not a known key", way_out=did_you_mean(keys[-1], fields))
        elif item["type"] == "missing":
            yield Problem(dotted, "is missing", way_out=getattr(owner, "missing_way_out", "give it a value"))
        else:
            value = item["input"] if _is_leaf(item["input"]) else None
            way = _way_out(dotted, item["type"], item["input"])
            yield Problem(dotted or path, _sentence(item["msg"]), value, way)


def _way_out(path: str, kind: str, value: object) -> str:
    """The way out of a value of a wrong kind: a list where one belongs, one where a list belongs, no unit."""
    if kind == "tuple_type" and _is_leaf(value):
        return f"write [{value}]"
    if isinstance(value, (list, tuple)) and kind not in ("tuple_type", "list_type", "too_short", "too_long"):
        several = f"; to search several: +space.{path}='choice({','.join(map(str, value[:8]))})'"
        return "give one value" + ("" if path.partition(".")[0] in _NO_KNOBS else several)
    unit = next((unit for suffix, unit in _UNITS.items() if path.endswith(suffix)), "")
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return f"with its unit: '{value:g} {unit}'" if kind == "greater_than_equal" and unit and is_number else ""


_NO_KNOBS = ("seed", "budget", "executor", "fidelity", "figures", "output_dir", "search", "store", "study", "tracking")
"""Sections of a configuration that say how a study runs: none of it can be searched."""
_UNITS = {"bytes_per_s": "GB/s", "bytes_per_s_per_cu": "GB/s", "flop_per_s": "TFLOP/s", "_bytes": "GB"}
"""Endings of dotted paths -> the unit that a small number most likely lacks."""


def _is_leaf(value: object) -> bool:
    return not isinstance(value, (Mapping, list, tuple, BaseModel))


def _sentence(message: str) -> str:
    text = message.removeprefix("Value error, ").removeprefix("Assertion failed, ")
    return text[:1].lower() + text[1:] if text.startswith("Input should") else text


def _locate(kind: Any, location: tuple[int | str, ...]) -> tuple[list[str], type[BaseModel] | None]:
    """The keys a person typed for a pydantic error location (without the tags of unions), and the last model on it."""
    keys, owner = list[str](), None
    for key in location:
        models = _models_in(kind)
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
    return next((part for part in reversed(get_args(annotation)) if part is not Ellipsis), None)


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in _models_in(part)]


def _tag(model: type[BaseModel]) -> object:
    field = model.model_fields.get("kind")
    return field.default if field else None
