"""Options that are variants of another one: `variant_of: <option>` in a file, over whose values its own ones count.

A group has variants where a package declares `VARIANTS = {group: labels}`: the keys that say what the one option is,
and that no variant inherits. `description` and `sources` are never inherited. A key that a variant sets to null is
absent. A constant that is inherited is assumed, as nobody looked it up for the variant: where the other option assumed
it already, its source says so, and else that it is a copy. Sources that the variant itself names count before these.

Hydra's composition and readers of files compose by the same function, `compose_variant`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dse import plugins
from dse.config.options import is_shipped, list_options, load_yaml, option_file, unreadable
from dse.errors import ConfigError, Problem, did_you_mean

VARIANT_OF = "variant_of"
"""The key that names the option of which a file is a variant."""
_MOST_BASES = 4
_SOURCES = "sources"

Reader = Callable[[str], Mapping[str, Any] | None]
"""Reads the file of an option, `group/name`, without what it inherits; None where there is none."""


def load_option(path: Path) -> Any:
    """Read the file of an option, with what it inherits. Raises ConfigError for one that cannot be read."""
    tree = _read_file(path)
    return compose_variant(f"{path.parent.name}/{path.stem}", tree, _read_option) if isinstance(tree, dict) else tree


def take_defaults(tree: dict[str, Any], path: Path) -> list[Any]:
    """Take the list `defaults` out of a tree. Raises ConfigError for another value and for other entries."""
    entries = tree.pop("defaults", [])
    place, way = f"{path.name}: defaults", "write a list such as [h100_8, {override /gpu: h200}, _self_]"
    if not isinstance(entries, list):
        raise ConfigError([Problem(place, "must be a list", entries, way)])
    for entry in entries:
        if not isinstance(entry, str) and not (isinstance(entry, Mapping) and entry):
            raise ConfigError([Problem(place, "must hold names, or groups with their options", entry, way)])
    return entries


def _read_option(option: str) -> Mapping[str, Any] | None:
    path = option_file(*option.split("/", 1))
    tree = None if path is None else _read_file(path)
    return tree if path is None or isinstance(tree, dict) else {}


def _read_file(path: Path) -> Any:
    """The tree of a file, which is looked at first where it is the user's. Raises ConfigError."""
    if not is_shipped(path) and (problems := unreadable(path)):
        raise ConfigError(problems)
    return load_yaml(path)


def compose_variant(option: str, tree: Mapping[str, Any], read: Reader) -> dict[str, Any]:
    """Put the tree of an option (`group/name`) over what it is a variant of; a tree of no variant stays as it is.

    The trees that `read` returns are left as they are, and share values with the result. Raises ConfigError for a
    name that is no option of the group, for a circle and for a long chain.
    """
    labels = plugins.declaration("VARIANTS", option.partition("/")[0]) if VARIANT_OF in tree else None
    if labels is None:
        return dict(tree)
    chain = {option: tree}
    while VARIANT_OF in (last := chain[name := next(reversed(chain))]):
        base = _base_of(name, last, tuple(chain))
        chain[base] = _tree_of_base(name, base, read)
    *variants, base = chain
    composed = dict(chain[base])
    for variant in reversed(variants):
        _check_sources(variant, chain[variant])
        composed = _put_over(composed, chain[variant], base, labels)
        base = variant
    return composed


def _base_of(option: str, tree: Mapping[str, Any], chain: Sequence[str]) -> str:
    """The option of which another one is a variant, which may be so many steps from the first. Raises ConfigError."""
    path, name = f"{option}.yaml: {VARIANT_OF}", tree[VARIANT_OF]
    group = option.partition("/")[0]
    base = f"{group}/{name}"
    if not isinstance(name, str) or not name or "/" in name:
        raise ConfigError([Problem(path, f"must name an option of {group}", name)])
    if base in chain:
        rule = f"makes a circle of variants: {', '.join((*chain, base))}"
        raise ConfigError([Problem(path, rule, name, "write the values of one of them out")])
    if len(chain) > _MOST_BASES:
        rule = f"makes a chain of more than {_MOST_BASES} variants: {', '.join((*chain, base))}"
        raise ConfigError([Problem(path, rule, name, "name an option nearer to the last one")])
    return base


def _check_sources(option: str, tree: Mapping[str, Any]) -> None:
    """Refuse sources that are no mapping. Raises ConfigError."""
    if not isinstance(tree.get(_SOURCES) or {}, Mapping):
        rule = "must map constants to their sources"
        raise ConfigError([Problem(f"{option}.yaml: {_SOURCES}", rule, tree[_SOURCES], "see `machine show h100_8`")])


def _tree_of_base(option: str, base: str, read: Reader) -> Mapping[str, Any]:
    """The file of the option of which another one is a variant. Raises ConfigError where there is none."""
    group, _, name = base.partition("/")
    path, tree = f"{option}.yaml: {VARIANT_OF}", read(base)
    if tree is None:
        way = did_you_mean(name, list_options(group))
        raise ConfigError([Problem(path, f"names no option of {group}", name, way)])
    if "defaults" in tree:
        raise ConfigError([Problem(path, "names an option with `defaults`", name, f"name one of these: {base}.yaml")])
    return tree


def _put_over(below: Mapping[str, Any], variant: Mapping[str, Any], base: str, labels: Sequence[str]) -> dict[str, Any]:
    """The tree of a variant over the composed one of its base."""
    inherited = {key: value for key, value in below.items() if key not in (*labels, _SOURCES)}
    values = {key: value for key, value in variant.items() if key not in (VARIANT_OF, _SOURCES)}
    named = variant.get(_SOURCES) or {}
    copies = _sources_of_copies(below.get(_SOURCES) or {}, list(_inherited_paths(inherited, values)), base)
    sources = {path: source for path, source in copies.items() if named.keys().isdisjoint(_upwards(path))}
    return {**_merge_values(inherited, values), _SOURCES: {**sources, **named}}


def _merge_values(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """One tree with the values of another put over it; keys that the latter sets to null are absent."""
    merged = dict(below)
    for key, value in above.items():
        if value is None:
            merged.pop(key, None)
        elif isinstance(value, Mapping):
            under = below.get(key)
            merged[key] = _merge_values(under if isinstance(under, Mapping) else {}, value)
        else:
            merged[key] = value
    return merged


def _inherited_paths(below: Mapping[str, Any], above: Mapping[str, Any]) -> Iterator[str]:
    """Yield the dotted paths at which all values are those of the tree below, the highest of them."""
    for key, value in below.items():
        if key not in above:
            yield str(key)
        elif isinstance(value, Mapping) and isinstance(above[key], Mapping):
            yield from (f"{key}.{path}" for path in _inherited_paths(value, above[key]))


def _sources_of_copies(sources: Mapping[str, Any], paths: Sequence[str], base: str) -> dict[str, Any]:
    """Sources of the constants at some paths, as those of a copy: entries at and below each, and what covers it."""
    copies = dict[str, Any]()
    for path in paths:
        covering = next((place for place in reversed(_upwards(path)) if place in sources), None)
        inner = [place for place in sources if place.startswith(f"{path}.")]
        copies |= {} if covering is None else {path: _source_of_copy(sources[covering], base)}
        copies |= {place: _source_of_copy(sources[place], base) for place in inner}
    return copies


def _source_of_copy(source: Any, base: str) -> dict[str, Any]:
    """The source of a copy; a new value each time, as YAML writes a value that stands twice as an alias."""
    if isinstance(source, Mapping) and source.get("provenance") == "assumed":
        return dict(source)
    return {"provenance": "assumed", "copy_of": base, "source": f"that of {base.partition('/')[2]}"}


def _upwards(path: str) -> list[str]:
    """A dotted path and those above it, from the first name on."""
    names = path.split(".")
    return [".".join(names[: count + 1]) for count in range(len(names))]
