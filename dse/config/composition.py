"""Files of configuration put together: Hydra says which, in which order and where each belongs, plain data is merged.

Hydra's own composition reads YAML in Python and makes an object of every value, which takes twenty times as long.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra import version
from hydra._internal.config_repository import ConfigRepository
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.defaults_list import create_defaults_list
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.plugins.config_source import ConfigResult, ConfigSource
from omegaconf import OmegaConf
from omegaconf._utils import get_yaml_loader

from dse.config.expansion import interpolates
from dse.config.variants import compose_variant, take_defaults
from dse.errors import ConfigError, Problem
from dse.errors.parsing import LOADER, load
from dse.files import read_text

_MISSING = "???"  # OmegaConf's mark of a value that somebody else gives


class Files(ConfigRepository):
    """The files of some folders of configuration, as Hydra looks at them, with their values as plain trees."""

    def __init__(self, folders: Sequence[Path]) -> None:
        version.setbase("1.3")  # of Hydra's grammar, whatever version is installed
        self.sources = [FileConfigSource("main", str(folder)) for folder in folders]
        self._results = dict[str, ConfigResult | None]()  # file -> its result, as Hydra asks for it many times
        self._trees = dict[str, dict[str, Any]]()
        self._known_places = dict[tuple[str, ...], list[tuple[str, str]]]()

    def load_config(self, config_path: str) -> ConfigResult | None:
        """The package and the defaults of a file: all that its place depends on; None where there is none."""
        if config_path not in self._results:
            source = self._find_object_source(config_path, ObjectType.CONFIG)
            self._results[config_path] = None if source is None else self._load(config_path, source)
        return self._results[config_path]

    def _load(self, config_path: str, source: ConfigSource) -> ConfigResult:
        text, parsed = _read_file(source, config_path)
        tree = compose_variant(config_path, parsed, self._raw_tree)
        # those choose how Hydra itself runs
        defaults_of_file = take_defaults(tree, Path(source.path, f"{config_path}.yaml"))
        chosen = [entry for entry in defaults_of_file if not _is_of_hydra(entry)]
        self._trees[config_path] = tree
        outline = OmegaConf.create({"defaults": chosen})  # without values: OmegaConf is slow with many
        defaults = self._create_defaults_list(config_path, self._extract_defaults_list(config_path, outline))
        header = ConfigSource._get_header_dict(text[:512])  # as much as Hydra reads of it
        return ConfigResult("main", source.path, outline, header, defaults)

    def _raw_tree(self, config_path: str) -> Mapping[str, Any] | None:
        """The tree of a file without what it inherits; None where there is none."""
        source = self._find_object_source(config_path, ObjectType.CONFIG)
        return None if source is None else _read_file(source, config_path)[1]

    def compose(self, picks: Sequence[str]) -> dict[str, Any]:
        """The tree of `config.yaml` with other options picked, as `group=option`; interpolations stay as they are."""
        return self._merge(self._places(tuple(picks)))

    def section(self, group: str, option: str, picks: Sequence[str]) -> dict[str, Any]:
        """The tree with one more option picked: the section of its group, and the rest where that depends on it."""
        places = self._places(tuple(picks))
        files = [place for place in places if place[0].rpartition("/")[0] == group]
        # alone where nothing else depends on which option it is
        if len(files) == 1 and not (self._has_defaults(files[0][0]) or self._has_defaults(f"{group}/{option}")):
            other, sections = (f"{group}/{option}", files[0][1]), ("", group)
            # the section itself; one that refers to others is composed with the whole
            near = [place for place in places if place[1].partition(".")[0] in sections]
            tree = self._merge(other if place == files[0] else place for place in near)
            if not interpolates(tree.get(group)):
                return {group: tree.get(group, {})}
        return self.compose([*picks, f"{group}={option}"])

    def _places(self, picks: tuple[str, ...]) -> list[tuple[str, str]]:
        """(file, section that it fills) in the order of merging."""
        if picks not in self._known_places:
            overrides = OverridesParser.create().parse_overrides(list(picks))
            defaults = create_defaults_list(self, "config", overrides, prepend_hydra=False, skip_missing=False).defaults
            self._known_places[picks] = [(str(place.config_path), place.package or "") for place in defaults]
        return self._known_places[picks]

    def _has_defaults(self, config_path: str) -> bool:
        result = self.load_config(config_path)
        return result is None or bool(result.defaults_list)

    def _merge(self, places: Iterable[tuple[str, str]]) -> dict[str, Any]:
        tree = dict[str, Any]()
        for config_path, package in places:
            inner = self._trees[config_path]
            for name in reversed(package.split(".") if package else ()):  # a.b holds the file's keys below a, then b
                inner = {name: inner}
            _merge(tree, inner)
        tree.pop("hydra", None)  # settings of Hydra are no part of a study
        return tree


def _read_file(source: ConfigSource, config_path: str) -> tuple[str, Mapping[str, Any]]:
    """Text and tree of a file. Raises ConfigError."""
    file = Path(source.path, f"{config_path}.yaml")
    text = read_text(file, str(file))
    return text, _parse_file(text, str(file))


def _is_of_hydra(entry: Any) -> bool:
    """Whether an entry of a defaults list chooses an option of Hydra's own groups, such as its logging."""
    return isinstance(entry, Mapping) and any("hydra/" in str(name) for name in entry)


def _merge(tree: dict[str, Any], other: Mapping[str, Any]) -> None:
    """Put a copy of the values of another tree into a tree; those of both that are mappings are merged."""
    for name, value in other.items():
        if isinstance(value, Mapping):
            if not isinstance(tree.get(name), dict):  # a mapping takes the place of a value
                tree[name] = {}
            _merge(tree[name], value)
        elif value != _MISSING or name not in tree:  # a mark does not erase a value
            tree[name] = _copy(value) if isinstance(value, list) else value


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        # OmegaConf's keys may be numbers; most values are no trees, and need no call
        return {str(name): _copy(inner) if isinstance(inner, dict | list) else inner for name, inner in value.items()}
    return [_copy(inner) for inner in value] if isinstance(value, list) else value


class _Loader(LOADER):  # type: ignore[misc]
    """YAML as OmegaConf reads it: 1e-6 is a number, a date is text, and no key stands twice."""

    yaml_implicit_resolvers = get_yaml_loader().yaml_implicit_resolvers  # 1e-6 is a text in YAML 1.1

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        names = set[str]()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in names:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"found duplicate key {key.value}", key.start_mark
                    )
                names.add(key.value)
        tree: dict[Any, Any] = super().construct_mapping(node, deep=deep)
        return tree


@functools.lru_cache(maxsize=512)  # more files than a command reads, so that each is parsed once
def _parse_file(text: str, where: str) -> Mapping[str, Any]:
    """The tree of a file's text, which nobody changes. Raises ConfigError."""
    tree = load(text, where, _Loader) or {}
    if not isinstance(tree, Mapping):
        raise ConfigError([Problem(where, "holds no keys", way_out="write it as key: value")])
    return tree
