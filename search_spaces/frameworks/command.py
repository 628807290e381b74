"""`export` and `settings-import`: a plan as the settings of a tool, and the settings of a tool as a plan."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from dse.config.yaml_checks import parse_yaml
from dse.errors import ConfigError, Problem, did_you_mean, pairs
from dse.files import atomic_replacement, read_text
from dse.results.run_folder import writable
from dse.space import get_path
from search_spaces.collectives.msccl import xml_of
from search_spaces.collectives.schedule_files import read_schedule, yaml_of
from search_spaces.frameworks.reading import read
from search_spaces.frameworks.settings import (
    Plan,
    SettingsFile,
    Tool,
    Written,
    check_plan,
    leaves_of,
    put_in,
    tools,
    write,
)
from simulators.steps.sites import SERIAL

if TYPE_CHECKING:
    from rich.table import Table

_SECTIONS = ("sites", "parallel", "run", "optimizer", "system")
_MOST_BYTES = 1 << 20


def export(words: Sequence[str]) -> int:
    """`export plan=<plan.yaml> to=<tool> [out=<folder>] [parallel.tp=8 ...]`: write the settings of a tool."""
    from dse.results import report

    option_words, overrides = _words(words)
    options = pairs(option_words, {"plan": "", "to": ""}, optional=["out"])
    name, tool = _tool("to", options["to"])
    folder = writable(options.get("out", f"outputs/export/{name}")).folder
    console = report.console()
    if tool.files[0].format == "msccl":
        file = folder / tool.files[0].name
        _keep(file, xml_of(read_schedule(Path(options["plan"]))))
        console.print(f"written to {file}", soft_wrap=True)
        return 0
    plan = _with_words(_read_plan(Path(options["plan"])), overrides)
    check_plan(plan)
    written = write_all(tool, plan, Path(options["plan"]).name)
    for file_name, part in written.items():
        _keep(folder / file_name, part.text)
    for line in answer(tool, plan, written):
        console.print(line, soft_wrap=True)
    console.print(f"written to {folder}/: {', '.join(written)}", soft_wrap=True)
    return 0


def settings_import(words: Sequence[str]) -> int:
    """`settings-import settings=<file> from=<tool> [out=plan.yaml] [parallel.tp=8 ...]`: read a tool's settings."""
    from dse.results import report

    option_words, overrides = _words(words)
    options = pairs(option_words, {"settings": "", "from": "", "out": "plan.yaml"})
    _, tool = _tool("from", options["from"])
    path, out = Path(options["settings"]), Path(options["out"])
    console = report.console()
    if tool.files[0].format == "msccl":
        _keep(out, yaml_of(read_schedule(path)))
    else:
        settings = read(_texts(tool, path), _with_words({}, overrides))
        _keep(out, yaml.safe_dump(settings.plan, sort_keys=False))
        console.print(yaml.safe_dump(settings.plan, sort_keys=False).rstrip(), soft_wrap=True, highlight=False)
        for name in settings.unread:
            console.print(f"means nothing to a plan: {name}", soft_wrap=True, highlight=False)
    console.print(f"written to {out}; judge it: python -m dse plan plan={out}", soft_wrap=True)
    return 0


def write_all(tool: Tool, plan: Plan, name: str) -> dict[str, Written]:
    """The files of a tool for a plan, by name. Raises ConfigError."""
    head = f"{tool.title}: settings for {name}, by python -m dse export; names as of {tool.version}"
    return {file.name: write(file, plan, head) for file in tool.files}


def nearest(tool: Tool, plan: Plan, written: Mapping[str, Written]) -> dict[str, Any]:
    """The plan that the files of a tool say."""
    texts = [(file, written[file.name].text) for file in tool.files]
    beside = {name: get_path(plan, f"parallel.{name}") for name in ("tp", "sequence_parallel")}
    return dict(read(texts, {"parallel": {name: value for name, value in beside.items() if value is not None}}).plan)


def answer(tool: Tool, plan: Plan, written: Mapping[str, Written]) -> Iterator[Table | str]:
    """Yield the settings, what each says, and what the tool cannot say."""
    from rich.table import Table

    shown = Table(box=None, pad_edge=False)
    for name in ("setting", "value", "says", "which means"):
        shown.add_column(name)
    for part in written.values():
        for row in part.rows:
            value = row.value if isinstance(row.value, str | int | bool) else _compact(row.value.tree)
            paths = " ".join(row.paths) if len(row.paths) < 3 else f"{len(row.paths)} sites"
            shown.add_row(row.name, str(value), paths, row.meaning)
    yield shown
    unsaid = frozenset.intersection(*(part.unsaid for part in written.values()))
    wanted, reached = dict(leaves_of(plan)), dict(leaves_of(nearest(tool, plan, written)))
    for path in [*wanted, *(path for path in reached if path not in wanted)]:
        if path in unsaid:
            yield f"not expressible there: {path} = {wanted[path]}"
        elif str(reached.get(path)) != str(wanted.get(path)):
            yield f"nearest: {path} = {reached.get(path, SERIAL)}, not {wanted.get(path, SERIAL)}"


def _compact(tree: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in tree.items())


def _words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Options of the command, and values beside the plan."""
    overrides = [word for word in words if word.partition("=")[0].partition(".")[0] in _SECTIONS and "." in word]
    return [word for word in words if word not in overrides], overrides


def _with_words(plan: Plan, words: Sequence[str]) -> dict[str, Any]:
    changed = {name: dict(entries) for name, entries in plan.items()}
    for word in words:
        path, equals, value = word.partition("=")
        if not equals:
            raise ConfigError([Problem(path, "has no value", way_out=f"write {path}=<value>")])
        try:
            put_in(changed, path, parse_yaml(value, path))
        except (yaml.YAMLError, TypeError, AttributeError):
            raise ConfigError([Problem(path, "is no value of a plan", value)]) from None
    return changed


def _tool(word: str, name: str) -> tuple[str, Tool]:
    if name not in tools():
        raise ConfigError([Problem(word, "is no tool", name, did_you_mean(name, tools()))])
    return name, tools()[name]


def _read_plan(path: Path) -> dict[str, Any]:
    """The plan of a file. Raises ConfigError where it is none."""
    way = "name the plan.yaml of a run of `python -m dse plan`"
    tree = parse_yaml(read_text(path, "plan", most=_MOST_BYTES, way_out=way), "plan")
    if not isinstance(tree, Mapping) or not tree or not all(isinstance(part, Mapping) for part in tree.values()):
        raise ConfigError([Problem("plan", "holds no plan", str(path), way)])
    strange = [
        Problem(f"plan.{name}", "is no section of a plan", way_out=way) for name in tree if name not in _SECTIONS
    ]
    if strange:
        raise ConfigError(strange)
    return {str(name): dict(entries) for name, entries in tree.items()}


def _texts(tool: Tool, path: Path) -> list[tuple[SettingsFile, str]]:
    """Texts of the files of a tool in a folder, or that of one file: of the format that its ending is."""
    if path.is_dir():
        paths = [(file, path / _named(tool, path, file)) for file in tool.files]
        texts = [(file, _text(at)) for file, at in paths if at.is_file()]
        if texts:
            return texts
        way = f"a folder with {' or '.join(file.name for file in tool.files)}"
        raise ConfigError([Problem("settings", "holds no file of the tool", str(path), way)])
    alike = [file for file in tool.files if Path(file.name).suffix == path.suffix]
    return [((alike or [tool.files[-1]])[0], _text(path))]


def _named(tool: Tool, folder: Path, file: SettingsFile) -> str:
    """Name of a file in a folder: the one that arguments beside it name, or its own."""
    for other in tool.files:
        for setting in other.settings if (folder / other.name).is_file() else ():
            if setting.constant == file.name:
                found = re.search(rf"^[^#\n]*{setting.name}[= ]+(\S+)", _text(folder / other.name), re.MULTILINE)
                return file.name if found is None else Path(found[1]).name
    return file.name


def _text(path: Path) -> str:
    return read_text(path, "settings", most=_MOST_BYTES, way_out="name a file of the tool")


def _keep(path: Path, text: str) -> None:
    if path.is_dir():
        raise ConfigError([Problem("out", "is a folder", str(path), "name a file")])
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_replacement(path) as scratch:
        scratch.write_text(text, encoding="utf-8")
