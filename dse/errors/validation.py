"""Problems of a tree that a pydantic model refuses, in the words that a person typed, with the way out of each."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from dse.errors import (
    MISSING,
    NO_KNOBS,
    PLAIN_PATH,
    Model,
    Problem,
    assignment,
    did_you_mean,
    grammar,
    known_here,
    nearest,
)


def validated(kind: type[Model], tree: object, path: str) -> tuple[Model | None, list[Problem]]:
    """A tree as a model; None, and every problem, where it does not hold. path: of the tree, dotted."""
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
        return [part.strip() for part in value.split(",")] if isinstance(value, str) else [value]
    if kind == "literal_error":
        # among a few legal values a vague match will do
        return nearest(grammar(value), re.findall(r"'([^']*)'", limits["expected"]), cutoff=0.4) or None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return _legal_number(path, kind, value, limits)


def _legal_number(path: str, kind: str, value: float, limits: Mapping[str, Any]) -> object:
    """The legal number nearest to one out of range: with the unit that it most likely lacks, else the limit."""
    unit = next((unit for suffix, unit in _UNITS.items() if path.endswith(suffix)), "")
    if kind == "greater_than_equal":
        # a small number was most likely meant in a larger unit
        return f"{value:g} {unit}" if unit and value > 0 else limits["ge"]
    if kind == "less_than_equal" and limits["le"] == 1 and 1 < value <= 100:  # a percentage
        return value / 100
    if kind == "less_than_equal":
        # beyond 10,000 s it was hardly meant as seconds
        return f"{value:g} us" if path.endswith("_s") and not unit else limits["le"]
    return None


_UNITS = {"bytes_per_s": "GB/s", "bytes_per_s_per_cu": "GB/s", "flop_per_s": "TFLOP/s", "_bytes": "GB"}
"""Endings of dotted paths -> the unit that a small number most likely lacks."""


def _is_leaf(value: object) -> bool:
    return not isinstance(value, (Mapping, list, tuple, BaseModel))


_RULES = {
    r"Input should be a valid (dictionary or instance of \w+|dictionary)": "is a section: write one of its keys",
    r"Input should be a valid tuple": "must be a list",
    r"Input should be a valid boolean.*": "must be true or false",
    r"Input should be a valid integer": "must be a whole number",
    r"Input should be (a valid )?": "must be ",
    r"String should have at least 1 character": "must not be empty",
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
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in _models_in(part)]


def _tag(model: type[BaseModel]) -> object:
    field = model.model_fields.get("kind")
    return field.default if field else None
