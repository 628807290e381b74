"""Configuration through Hydra: groups, overrides and sweep grammar in, plain trees out.

Everything wrong with the command line and the files is gathered, so that it can be told at once. Only this module,
`composition`, `expansion` and the command line know Hydra.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from dse.config import expansion, spelling
from dse.config import options as option_files
from dse.config.expansion import FEWER_VALUES, MOST_VALUES, limit_cpu_time, plain, with_text_keys
from dse.config.options import catalogue, catalogued, catalogued_paths, catalogued_tree, listed, put_catalogued
from dse.errors import ConfigError, Problem, did_you_mean
from dse.files import files_below
from dse.space import Knob, get_path, has_path, set_path

if TYPE_CHECKING:
    from dse.config.composition import Files


@dataclass(frozen=True)
class Request:
    """A composed configuration.

    tree: everything, resolved. options: group -> option -> its tree, for the groups whose `name` is searched. knobs:
    the space. overrides: as typed, one a value. problems: what is wrong so far. folder: the user's own. levels: option
    of `simulator` -> its tree, for those that `fidelity.levels` names.
    """

    tree: dict[str, Any]
    options: Mapping[str, Mapping[str, dict[str, Any]]]
    knobs: tuple[Knob, ...]
    overrides: tuple[str, ...]
    problems: tuple[Problem, ...] = ()
    folder: Path | None = None
    levels: Mapping[str, dict[str, Any]] = field(default_factory=dict)

    def check(self) -> None:
        """Raise ConfigError for words and files that are wrong: values mean nothing among options nobody asked for."""
        if self.problems:
            raise ConfigError(self.problems)


@dataclass
class _Line:
    """One override as typed, parsed by Hydra's grammar."""

    text: str
    key: str
    value: Any
    kind: str  # change, add or delete
    sweep: bool = False


@dataclass
class _Composer:
    folder: Path | None
    problems: list[Problem] = field(default_factory=list)

    def note(self, path: str, rule: str, value: object = None, way_out: str = "") -> None:
        self.problems.append(Problem(path, rule, value, way_out))

    @property
    def folders(self) -> list[Path]:
        return [*option_files.conf_dirs(), *([self.folder] if self.folder else [])]

    def groups(self) -> dict[str, list[str]]:
        """Group -> its options, in the shipped and the user's folder."""
        options_of: dict[str, set[str]] = {}
        for folder in self.folders:
            for path in files_below(folder, "*/*.yaml"):
                options_of.setdefault(path.parent.name, set()).add(path.stem)
        return {group: sorted(options) for group, options in options_of.items()}  # not in the order of the disk

    def lines(self, texts: Sequence[str]) -> list[_Line]:
        """Overrides that can be parsed; `<group>.name=x` is the same as `<group>=x`."""
        from hydra.core.override_parser.overrides_parser import OverridesParser
        from hydra.errors import HydraException

        lines, groups = [], self.groups()
        words, spoilt = spelling.read_assignments(texts, groups)
        self.problems.extend(spoilt)
        for text in words:
            try:
                override = OverridesParser.create().parse_override(text)
            except HydraException as error:
                self.problems.append(spelling.grammar_problem(text, error))
                continue
            except spelling.BEYOND_GRAMMAR as error:
                self.note(text, f"cannot be parsed: {type(error).__name__}", way_out="write path=value")
                continue
            if self._is_foreign(text, override):
                continue
            is_added = override.is_add() or override.is_force_add()
            kind = "delete" if override.is_delete() else "add" if is_added else "change"
            name = override.key_or_group
            key = option if (option := name.removesuffix(".name")) in groups else name
            sweep = bool(override.is_sweep_override())
            value = None if kind == "delete" else override.value()
            if key in groups and isinstance(value, int | float):  # `false` and `1` name options, or none
                value = text.partition("=")[2]
            lines.append(_Line(text, key, value, kind, sweep))
        return lines

    def _is_foreign(self, text: str, override: Any) -> bool:
        """True if an override would have Hydra call something, which is noted."""
        key, way = text.partition("=")[0].lstrip("+~"), "leave it out"
        if not override.key_or_group.strip("./@"):
            self.note(text, "has no path before its =", way_out="write path=value")
        elif option_files.is_hydras(key):
            rule = "is a setting of Hydra's, which may run code and is not for a study to change"
            self.note(key, rule, way_out=f"{way}; flags such as --multirun and --cfg job are allowed")
        elif any(map(option_files.calls_code, key.split("."))) or "_target_" in text.partition("=")[2]:
            self.note(key, "names a class to call; plug-ins are chosen by name", override.input_line, way)
        else:
            return False
        return True

    @functools.cached_property
    def _files(self) -> Files:
        from dse.config.composition import Files

        return Files(self.folders)

    def compose(self, picks: Sequence[str], group: str = "", option: str = "") -> dict[str, Any]:
        """The configuration with options picked, or the section of a group with one more; {} with a problem noted."""
        try:
            with hydra_errors():
                tree = self._files.section(group, option, picks) if group else self._files.compose(picks)
                resolved = self.resolve(tree) if expansion.interpolates(tree) else with_text_keys(tree)
                return dict(resolved.get(group, {}) if group else resolved)
        except ConfigError as error:
            self.problems.extend(error.problems)
            return {}

    def resolve(self, tree: Any) -> dict[str, Any]:
        """Interpolations resolved, once it is known how much they come to; {} with a problem noted where they fail."""
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException

        try:
            expansion.check(tree)
            return dict(with_text_keys(OmegaConf.to_container(OmegaConf.create(tree), resolve=True)))
        except ConfigError as error:
            self.problems.extend(error.problems)
        except (OmegaConfBaseException, RecursionError) as error:
            self.note("configuration", " ".join(str(error).split()))
        return {}


@contextlib.contextmanager
def hydra_errors() -> Iterator[None]:
    """Raise ConfigError for what Hydra and OmegaConf say of a configuration that they cannot compose."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    try:
        yield
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError, RecursionError, OSError) as error:
        raise ConfigError([spelling.composition_problem(error)]) from None


def request(texts: Sequence[str], folder: Path | None = None) -> Request:
    """Compose overrides as typed on the command line, over the shipped configuration and the user's folder."""
    composer = _Composer(folder)
    is_there = folder is None or folder.is_dir()
    if not is_there:
        composer.note("--config-dir", "is no folder", str(folder))
    with limit_cpu_time():
        if is_there and _readable(composer):
            return _request(composer, texts)
        composer.lines(texts)
        return Request({}, {}, (), tuple(texts), problems=tuple(composer.problems))


def searched_knobs(tree: Mapping[str, Any], folder: Path | None = None) -> dict[str, Knob]:
    """The knobs, by path, that the `space` of a composed configuration names; those fixed since are among them."""
    composer = _Composer(folder)
    return {knob.path: knob for knob in _knobs(composer, tree, composer.groups())}


def check_foreign(texts: Sequence[str], folder: Path | None) -> None:
    """Refuse what must not reach Hydra's own command line. Raises ConfigError."""
    composer = _Composer(folder)
    with limit_cpu_time():
        if folder is None or folder.is_dir():
            _readable(composer)
        typed = [text for text in texts if not text.startswith("-") and ("=" in text or text.startswith("~"))]
        _check_jobs(composer, composer.lines(typed))
    if composer.problems:
        raise ConfigError(composer.problems)


def check_expansion(texts: Sequence[str], folder: Path | None) -> None:
    """Refuse overrides, as Hydra is given them, with which it would resolve too much. Raises ConfigError."""
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    composer = _Composer(folder)
    search = option_files.search_path(composer.folders[1:])
    with (
        limit_cpu_time(),
        hydra_errors(),
        initialize_config_dir(str(option_files.conf_dir()), version_base="1.3", job_name="dse"),
    ):
        composer.resolve(OmegaConf.to_container(compose("config", overrides=[*search, *texts])))
    if composer.problems:
        raise ConfigError(composer.problems)


def _check_jobs(composer: _Composer, lines: Sequence[_Line]) -> None:
    """Count what Hydra would make a job of each of before it makes a list of them."""
    from hydra.core.override_parser.types import RangeSweep

    jobs = 1
    for line in lines:
        if isinstance(line.value, RangeSweep) and not line.key.startswith("space."):
            try:
                jobs *= expansion.range_size(line.value)
            except ValueError as error:
                composer.note(line.key, str(error), line.text.partition("=")[2], "take a larger step, or fewer values")
    if jobs > MOST_VALUES:
        rule = f"would be {jobs} studies, and at most {MOST_VALUES} are made"
        composer.note("--multirun", rule, way_out=FEWER_VALUES)


def _readable(composer: _Composer) -> bool:
    """Note problems of the files of the user's folder; True if every one may be read."""
    files = option_files.looked_at(composer.folder) if composer.folder else []
    problems = [problem for _, found in files for problem in found]
    composer.problems.extend(problems)
    return not problems


def _request(composer: _Composer, texts: Sequence[str]) -> Request:
    lines = composer.lines(texts)
    groups = composer.groups()
    chosen = [line for line in lines if line.key in groups and line.kind == "change" and isinstance(line.value, str)]
    good = [line for line in chosen if _option_exists(composer, line, groups) and _is_only(composer, line, chosen)]
    described = [line for line in good if line.value in groups[line.key]]
    _accidents(composer, described)
    picks = [f"{option_files.override_key(line.key, composer.folders)}={line.value}" for line in described]
    tree = composer.compose(picks)
    if not tree:
        return Request({}, {}, (), tuple(texts), problems=tuple(composer.problems), folder=composer.folder)
    composer.problems.extend(option_files.problems_of_files(tree))
    whole = {line.key: str(line.value) for line in good if line not in described or _describes_another(tree, line)}
    for line in (line for line in described if line.key not in whole):
        _check_name(composer, tree, line.key, str(line.value))
        _add_to_name(composer, tree, line)
    composer.problems.extend(put_catalogued(tree, whole))
    option_files.put_least(tree)
    lines = [leaf for line in lines for leaf in _leaves(tree, line)]
    values = [line for line in lines if line not in chosen]
    typed = [(line.key, line.text) for line in [*good, *values] if line.kind != "delete"]
    composer.problems.extend(expansion.contradictions(typed, groups))
    _apply(composer, tree, values)
    tree = composer.resolve(tree) if any("${" in text for text in texts) else tree
    fixed = {f"{line.key}.name" for line in good} | {key for key, _ in typed if not key.startswith("space.")}
    fixed |= catalogued_paths(tree, whole) - {line.key.removeprefix("space.") for line in values}
    knobs = tuple(knob for knob in _knobs(composer, tree, groups) if knob.path not in fixed)
    composer.problems.extend(expansion.inexact(tree, knobs))
    baseline, probes = (_mapping(tree, f"study.{name}") for name in ("baseline", "probes"))
    extra = [*baseline, *(pair for _, probe in probes for pair in _mapping(probe, "points"))]
    named = {knob.path: knob.values for knob in knobs}
    for path, value in extra:
        named[path] = (*named.get(path, ()), *(value if isinstance(value, list) else [value]))
    options = _options(composer, picks, named, values)
    levels = _levels(composer, tree, picks, groups.get("simulator", []))
    words = tuple(line.text for line in lines)
    return Request(tree, options, knobs, words, tuple(composer.problems), composer.folder, levels)


def _mapping(tree: Any, path: str) -> list[tuple[str, Any]]:
    """The keys and values of a mapping; what is none is refused where the section is validated."""
    inner = get_path(tree, path)
    return [(str(name), value) for name, value in inner.items()] if isinstance(inner, Mapping) else []


def _levels(
    composer: _Composer, tree: Mapping[str, Any], picks: Sequence[str], simulators: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """The trees of the simulators that a ladder of models names, beside the study's own."""
    levels = get_path(tree, "fidelity.levels")
    names = [name for name in levels if name != "study"] if isinstance(levels, list) else []
    other_picks = [pick for pick in picks if not pick.startswith("simulator=")]
    trees = {}
    for name in names:
        if name not in simulators:
            way = did_you_mean(str(name), [*simulators, "study"])
            composer.note("fidelity.levels", "names no option of the group simulator", name, way)
        else:
            trees[str(name)] = composer.compose(other_picks, "simulator", str(name))
    return trees


def _option_exists(composer: _Composer, line: _Line, groups: Mapping[str, list[str]]) -> bool:
    if line.value in groups[line.key] or catalogued(line.key, line.value):
        composer.problems.extend(option_files.offered_twice(line.key, str(line.value), composer.folders))
        return True
    options = {**groups, line.key: list(dict.fromkeys([*groups[line.key], *listed(line.key)]))}
    way = spelling.nearest_option(str(line.value), line.key, options)
    if listed(line.key) and way.startswith("known here"):
        way += f", or a file: `{line.key}=my_{line.key}.yaml`"
    composer.note(line.key, "is no option of this group", line.value, way)
    return False


def _is_only(composer: _Composer, line: _Line, chosen: Sequence[_Line]) -> bool:
    """True for the last choice of a group; several different ones are noted."""
    same = [other for other in chosen if other.key == line.key]
    values = ", then ".join(dict.fromkeys(str(other.value) for other in same))
    if line is same[-1] and "," in values:
        composer.note(line.key, f"is chosen more than once: {values}", way_out="keep one of them")
    return line is same[-1]


def _describes_another(tree: Mapping[str, Any], line: _Line) -> bool:
    """Tell whether a study describes another option of a group in place of the chosen one, which counts whole."""
    return catalogue(line.key) is not None and get_path(tree, f"{line.key}.name") not in (None, line.value)


def _check_name(composer: _Composer, tree: Mapping[str, Any], group: str, option: str) -> None:
    """An option and its `name` are one, or a result would be shown under a name nobody can type."""
    name = get_path(tree, f"{group}.name")
    if name not in (None, option):
        composer.note(f"{group}.name", f"is not the name of its file, {option}.yaml", name, f"write name: {option}")


def _add_to_name(composer: _Composer, tree: dict[str, Any], line: _Line) -> None:
    """Say in the name of an option that a part of it was chosen otherwise: it is no longer what its file describes."""
    section = option_files.override_key(line.key, composer.folders).partition("@")[2].partition(".")[0]
    if section and isinstance(tree.get(section), dict):
        tree[section]["name"] = f"{tree[section].get('name', '')} {line.key}={line.value}".lstrip()


def _accidents(composer: _Composer, chosen: Sequence[_Line]) -> None:
    """Look for YAML accidents in the user's own files and in the options that were chosen."""
    own_files = [path for path, _ in option_files.looked_at(composer.folder)] if composer.folder else []
    shipped = [folder / line.key / f"{line.value}.yaml" for folder in option_files.conf_dirs() for line in chosen]
    for path in [*own_files, *(path for path in shipped if path.is_file())]:
        composer.problems.extend(option_files.accidents(path))


def _leaves(tree: Mapping[str, Any], line: _Line) -> Iterator[_Line]:
    """The line, or one for each value of a mapping that is typed for a section other than space and study."""
    present, value = get_path(tree, line.key), line.value
    merges = isinstance(value, Mapping) and isinstance(present, Mapping) and value and present
    if not merges or line.key.partition(".")[0] in ("space", "study"):
        yield line
    else:
        from dse.config.overrides import override

        for key, inner in ((f"{line.key}.{name}", inner) for name, inner in value.items()):
            yield from _leaves(tree, replace(line, text=override(key, inner), key=key, value=inner))


def _apply(composer: _Composer, tree: dict[str, Any], lines: Sequence[_Line]) -> None:
    """Set, add and delete values; every unknown key is a problem. The space takes new paths without a `+`."""
    for line in lines:
        in_space = line.key.startswith("space.")
        exists, group = has_path(tree, line.key), line.key.removesuffix(".name").rpartition(".")[2]
        if line.kind == "delete":
            _delete(composer, tree, line, exists)
        elif not exists and line.kind == "change" and not in_space:
            composer.note(line.key, "is not a known key", way_out=_nearest(tree, line))
        elif isinstance(line.value, str) and line.value in composer.groups().get(group, ()):
            way = f"write `{group}={line.value}`"
            composer.note(line.key, "is chosen as an option of its group", line.value, way)
        elif line.sweep and not in_space:
            typed = line.text.partition("=")[2]
            path = f"{line.key}.name" if line.key in composer.groups() else line.key
            way = spelling.instead_of_sweep(path, typed, get_path(tree, path))
            composer.note(line.key, "is given a sweep, but is one value", typed, way)
        else:
            value = line.text.partition("=")[2] if line.sweep else line.value
            _set(composer, tree, line.key, value)
            option_files.note_source(tree, line.key, value)


def _delete(composer: _Composer, tree: dict[str, Any], line: _Line, exists: bool) -> None:
    if not exists:
        composer.note(line.text, "deletes a key that is not there", way_out=_nearest(tree, line))
        return
    parent, _, last = line.key.rpartition(".")
    (get_path(tree, parent) if parent else tree).pop(last)


def _set(composer: _Composer, tree: dict[str, Any], key: str, value: Any) -> None:
    parts = key.split(".")
    node: Any = tree
    for name in parts[:-1]:
        node = node.setdefault(name, {}) if isinstance(node, dict) else None
    if isinstance(node, dict):
        node[parts[-1]] = value
    else:
        composer.note(key, "lies below a value that holds no keys")


def _nearest(tree: Mapping[str, Any], line: _Line) -> str:
    typed = line.text.partition("=")[2]
    flags = {flag.strip("-").replace("-", "_"): flag for flag in option_files.OWN_FLAGS}
    if line.key in flags:
        return f"it is a flag: `{flags[line.key]}={typed}`"
    way = spelling.nearest_key(tree, line.key, None if line.kind == "delete" else typed)
    if line.kind == "delete":
        return way.replace("mean `", "mean `'~").replace("`?", "'`?")
    return way.replace("mean `", "mean `+space.") if line.sweep else way


def _knobs(composer: _Composer, tree: Mapping[str, Any], groups: Mapping[str, list[str]]) -> Iterator[Knob]:
    """The nested `space` as knobs, in order."""
    stack = [("", tree.get("space") or {})]
    while stack:
        path, value = stack.pop()
        if isinstance(value, Mapping):
            stack += [(f"{path}.{name}".lstrip("."), inner) for name, inner in reversed(list(value.items()))]
            continue
        knob = _knob(composer, path, value, groups)
        if knob is not None and not knob.values and isinstance(get_path(tree, path), int) and knob.whole:
            low, high = int(knob.low), int(knob.high)
            if high - low >= MOST_VALUES:
                composer.note(f"space.{path}", expansion.too_many(high - low + 1), value, FEWER_VALUES)
                continue
            knob = Knob(path, tuple(range(low, high + 1)))
        if knob is not None:
            yield knob


def _knob(composer: _Composer, path: str, leaf: Any, groups: Mapping[str, list[str]]) -> Knob | None:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        value = OverridesParser.create().parse_override(f"k={leaf}").value() if isinstance(leaf, str) else plain(leaf)
        knob = expansion.sweep_knob(path, value, groups)
    except (HydraException, ValueError, OverflowError) as error:
        rule = str(error).splitlines()[0]
        way = FEWER_VALUES if f"at most {MOST_VALUES:,}" in rule else "write choice(a,b), range(a,b,step)"
        composer.note(f"space.{path}", f"is no sweep: {rule}", leaf, way)
        return None
    section, _, name = path.partition(".")
    if name == "name" and section in groups:
        unlisted = set(knob.values) - set(groups[section])
        for wrong in (option for option in unlisted if not catalogued(section, option)):
            way = did_you_mean(str(wrong), groups[section])
            composer.note(f"space.{path}", "is no option of this group", wrong, way)
    return knob


def _options(
    composer: _Composer, picks: Sequence[str], named: Mapping[str, Sequence[Any]], values: Sequence[_Line]
) -> dict[str, dict[str, dict[str, Any]]]:
    """For each `<group>.name` that may be chosen, the tree of every option; values typed are put in where they fit."""
    groups = composer.groups()
    trees: dict[str, dict[str, dict[str, Any]]] = {}
    for path, choices in named.items():
        section, _, name = path.partition(".")
        if name == "name" and section in groups:
            typed = {line.key: line.value for line in values if line.key.startswith(f"{section}.")}
            distinct = dict.fromkeys(choices)
            legal = [option for option in distinct if option in groups[section] or catalogued(section, option)]
            trees[section] = {str(option): _option(composer, picks, f"{section}={option}", typed) for option in legal}
    return trees


def _option(composer: _Composer, picks: Sequence[str], pick: str, typed: Mapping[str, Any]) -> dict[str, Any]:
    section, _, option = pick.partition("=")
    if catalogued(section, option) and option not in composer.groups()[section]:
        tree = {section: catalogued_tree(section, option)}
    else:
        tree = {section: composer.compose(picks, section, option)}
        _check_name(composer, tree, section, option)
    for key, value in typed.items():
        if has_path(tree, key):
            set_path(tree, key, value)
            option_files.note_source(tree, key, value)
    return dict(tree.get(section, {}))
