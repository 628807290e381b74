"""Settings of a tool as a plan (`settings import`), files of a tool for a plan (`dse_deploy.export` prints them)."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from dse import plugins
from dse.errors import ConfigError, Problem, did_you_mean, pairs
from dse.errors.parsing import parse_yaml
from dse.files import atomic_replacement, read_text
from dse.space import get_path
from dse_deploy.facts import UNKNOWN, ModelFacts
from dse_deploy.kinds import kind_of
from dse_deploy.launches import LAUNCH
from dse_deploy.manifests import manifest_kind, script_of
from dse_deploy.reading import read, settings_of
from dse_deploy.settings import AXES, Setting, SettingsFile, Tool, Written, tools, write
from dse_deploy.shell import split_documents
from dse_deploy.step_files import STEP_FORMATS, write_step_file
from simulators.steps.overlap.implementations import implementation
from simulators.steps.overlap.sites import SERIAL, place_of
from studies.plan.plan_file import SECTIONS, Plan, put_in

# settings are short: a larger file is something else
_MOST_BYTES = 1 << 20


def settings_import(words: Sequence[str], facts: ModelFacts = UNKNOWN) -> int:
    """`settings import settings=<file> from=<tool> [model=<name> system=<name>] [parallel.tp=8 ...]`: read settings.

    facts: of the step that is named.
    """
    from dse.results import report

    chosen, overrides = option_words(words)
    options = pairs(chosen, {"settings": "", "from": "", "out": "plan.yaml"}, optional=[LAUNCH, *OF_STEP])
    name, tool = tool_named("from", options["from"])
    path, out = Path(options["settings"]), Path(options["out"])
    console, launch = report.console(), launch_number(options.get(LAUNCH, ""))
    # schedules of MSCCL have a format of their own, read by another plug-in
    if tool.files[0].format == "msccl" and not launch:
        keep(out, plugins.load("format", "msccl").plan(path))
    else:
        settings = read(texts_of(tool, path, launch), with_words({}, overrides), launch=launch, model=facts)
        # a plan of nothing but what was typed would be judged as if the file had been read
        if not settings.unmodelled and (not settings.has_own or settings.plan == with_words({}, overrides)):
            raise ConfigError([_holds_nothing(tool, path)])
        # what changes a step and is not modelled goes into the plan, so that every later answer repeats it
        counting = [*settings.unmodelled, *(unread for unread in settings.unread if _changes(unread, tool))]
        notes = {"unread": [f"{path.name}: {unread}" for unread in counting]} if counting else {}
        text = yaml.safe_dump({"tool": tool.like or name, **notes, **settings.plan}, sort_keys=False)
        keep(out, text)
        for unread in counting:
            console.print(f"changes a step, and is not modelled: {unread}", soft_wrap=True, highlight=False)
        console.print(text.rstrip(), soft_wrap=True, highlight=False)
        for line in _of_software(settings.plan.get("sites", {})):
            console.print(line, soft_wrap=True, highlight=False)
        for unread in dict.fromkeys(unread for unread in settings.unread if unread not in counting):
            console.print(f"means nothing to a plan: {unread}", soft_wrap=True, highlight=False)
    # a library has no mode of its own
    of_step = [f"run.mode={tool.modes[0]}"] if tool.framework else []
    for line in judge_lines("plan", out, options, of_step):
        console.print(line, soft_wrap=True, highlight=False)
    return 0


OF_STEP = ("model", "system")
"""Options that only go into the command that judges a plan."""


def _holds_nothing(tool: Tool, path: Path) -> Problem:
    """The problem of a file of which nothing is read, by what it is."""
    kind = kind_of(_text(path), path.suffix) if path.is_file() else ""
    rule = f"{f'is {kind}, and ' if kind else ''}holds no setting of {tool.name} that a plan has"
    return Problem("settings", rule, str(path), "name a file or launch of this tool, or its own tool with from=")


def judge_lines(name: str, out: Path, options: Mapping[str, str], words: Sequence[str] = ()) -> Iterator[str]:
    """Yield where a plan was written with the command that judges it, and what this takes where nothing was named.

    name: of the command. options: as typed, of which the model and the machine count.
    """
    named = [f"{option}={options[option]}" for option in OF_STEP if option in options]
    judge = shlex.join(["python", "-m", "dse", name, f"plan={out}", *named, *words])
    yield f"written to {out}; judge it: {judge}"
    if unnamed := [f"{option}=" for option in OF_STEP if option not in options]:
        yield f"without {' and '.join(unnamed)} it is judged on what {name} takes by default"


def _of_software(sites: Mapping[str, str]) -> Iterator[str]:
    """Yield which schedules software runs at the sites of a plan."""
    for name in dict.fromkeys(text.partition(" ")[0] for text in sites.values()):
        software = implementation(name)
        if software is not None:
            texts = (site for site, text in sites.items() if text.partition(" ")[0] == name)
            runs = (f"{site}: {software.schedules[place_of(software, site)]['schedule']}" for site in texts)
            yield f"{name} runs {', '.join(runs)}, at what it costs (conf/implementation)"


def launch_number(text: str) -> int:
    """The number of a launch, from what is typed; 0 where nothing is. Raises ConfigError."""
    if text and not re.fullmatch(r"[1-9]\d{0,8}", text):
        way = f"{LAUNCH}=2 is the second launch of a script"
        raise ConfigError([Problem(LAUNCH, "is no whole number from 1", text, way)])
    return int(text or 0)


def _changes(unread: str, tool: Tool) -> bool:
    """Return whether a setting that no plan has changes a step, by its name or that of its section."""
    # the section of a JSON option counts: `compilation-config.level` is one of compilation-config
    name = unread.split(" ")[0].split(".")[0].lstrip("-").replace("_", "-")
    return name in {flag.lstrip("-").replace("_", "-") for flag in tool.unmodelled}


def write_all(tool: Tool, plan: Plan, name: str, model: ModelFacts = UNKNOWN) -> dict[str, Written]:
    """The files of a tool for a plan of a model, by name. Raises ConfigError."""
    head = f"{tool.title}: settings for {name}, by python -m dse settings export; names as of {tool.version}"
    sayable, own_sites = tool.sayable(plan), tool.own_sites(plan)
    # the tool does these by itself: a setting would repeat them
    if own_sites:
        sayable["sites"] = {site: text for site, text in sayable["sites"].items() if site not in own_sites}
    parts = dict[str, Written]()
    for file in tool.files:
        of_step = file.format in STEP_FORMATS
        parts[file.name] = (write_step_file if of_step else write)(file, sayable, head, model)
    return parts


def nearest(tool: Tool, plan: Plan, written: Mapping[str, Written], model: ModelFacts = UNKNOWN) -> dict[str, Any]:
    """The plan that the files of a tool say, with what the tool does by itself at sites that they leave serial.

    model: facts of the step that they were written for.
    """
    texts = [(file, written[file.name].text) for file in tool.files]
    named: dict[str, Any] = {}
    axes = (degree for path in tool.limits for degree in AXES[path])
    for path in ("parallel.tp", *tool.follows, *axes):  # which settings leave open
        if (value := get_path(plan, path)) is not None:
            put_in(named, path, value)
    # written and read again: what comes back is what the tool can express
    nearest_plan = dict(read(texts, named, model=model).plan)
    written_paths = {path for part in written.values() for row in part.rows for path in row.paths}
    # a limit is read as one of sites, too, where nothing tells that the plan has it for whole axes alone
    if tool.limits and not any(path.startswith("sites.") for path in written_paths):
        nearest_plan.pop("sites", None)
    # a site of as many CTAs as its whole axis cannot be told from the others in rows
    ctas = get_path(nearest_plan, "parallel.tp_ctas")
    for path in sorted(path for path in written_paths if path.startswith("sites.") and ctas):
        if get_path(nearest_plan, path) in (None, SERIAL):
            put_in(nearest_plan, path, f"c3_sp comm_cus={ctas}")
    for site, text in tool.own_sites(plan).items():
        if get_path(nearest_plan, f"sites.{site}") in (None, SERIAL):
            put_in(nearest_plan, f"sites.{site}", text)
    return nearest_plan


def is_of_plan(word: str) -> bool:
    """Tell whether a word is a value of a section of a plan."""
    section, dot, _ = word.partition("=")[0].partition(".")
    return bool(dot) and section in SECTIONS


def option_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Options of the command, and values beside the plan."""
    # values of the plan have a section, options of the command have none
    overrides = [word for word in words if is_of_plan(word)]
    return [word for word in words if word not in overrides], overrides


def with_words(plan: Plan, words: Sequence[str]) -> dict[str, Any]:
    """A plan with the values of words `path=value` put over it. Raises ConfigError for other words."""
    changed = {name: dict(entries) for name, entries in plan.items()}
    for word in words:
        path, equals, value = word.partition("=")
        if not equals:
            raise ConfigError([Problem(path, "has no value", way_out=f"write {path}=<value>")])
        try:
            put_in(changed, path, parse_yaml(value, path))
        except (ConfigError, TypeError, AttributeError):
            raise ConfigError([Problem(path, "is no value of a plan", value)]) from None
    return changed


def tool_named(word: str, name: str) -> tuple[str, Tool]:
    """The name and the tool that a word of the command names. Raises ConfigError where there is none."""
    if name not in tools():
        raise ConfigError([Problem(word, "is no tool", name, did_you_mean(name, tools()))])
    return name, tools()[name]


def texts_of(tool: Tool, path: Path, launch: int) -> list[tuple[SettingsFile, str]]:
    """Texts of the files of a tool in a folder, or that of one file: of the format that its ending is."""
    if path.is_dir():
        # files of a folder may have names that the launch script gives them
        paths = [(file, path / _file_name(tool, path, file)) for file in tool.files]
        texts = [(file, _text(at)) for file, at in paths if at.is_file()]
        if texts:
            return texts
        way = f"a folder with {' or '.join(file.name for file in tool.files)}"
        raise ConfigError([Problem("settings", "holds no file of the tool", str(path), way)])
    text = _text(path)
    file, text = _file_of(tool, path, text)
    if file.format in STEP_FORMATS:
        return [(file.model_copy(update={"name": path.name}), text)]
    if file.format != "arguments":
        return [(file, text)]
    named = list(_named_files(tool, path, settings_of(file, text, launch), text))
    # a file that counts under the options of the launch is read first, so that they replace its values
    before = [(other, content) for is_later, other, content in named if not is_later]
    after = [(other, content) for is_later, other, content in named if is_later]
    return [*before, (file, text), *after]


def _file_of(tool: Tool, path: Path, text: str) -> tuple[SettingsFile, str]:
    """The file of a tool that a text is, and its text: of a manifest that of the launches of its containers.

    Raises ConfigError for a format that the tool has no file of.
    """
    suffix = ".yaml" if path.suffix == ".yml" else path.suffix
    is_manifest = suffix in (".yaml", ".json") and bool(manifest_kind(text))
    if suffix == ".toml":
        python = [file for file in tool.files if file.format == "python"]
        if not python:
            rule = f"is {kind_of(text, suffix)}, from which {tool.name} takes no setting"
            raise ConfigError(
                [Problem("settings", rule, str(path), "write from=torch for a configuration of torchtitan")]
            )
        # TOML has the settings of the Python file, in another syntax
        return python[0].model_copy(update={"format": "toml"}), text
    alike = [file for file in tool.files if Path(file.name).suffix == suffix]
    # no configuration file: a launch script or a command line
    if is_manifest or suffix not in (".yaml", ".json", ".py"):
        # a tool whose own file is YAML has the same names on its command line
        launched = [file for file in tool.files if file.format == "yaml" and tool.framework]
        alike = [file.model_copy(update={"format": "arguments"}) for file in launched] or alike
    if not is_manifest:
        return (alike or [tool.files[-1]])[0], text
    script, files = script_of(text), [file for file in (*alike, *tool.files) if file.format in _OF_LAUNCHES]
    launches, written = split_documents(script)
    configs = [file for file in tool.files if file.format == "yaml"]
    # a ConfigMap with one file, and no container that starts anything
    if configs and len(written) == 1 and not launches.strip():
        return configs[0], next(iter(written.values()))
    if not files or not script.strip():
        rule = f"is {manifest_kind(text)} that holds no launch of {tool.name}"
        raise ConfigError([Problem("settings", rule, str(path), "name the file whose containers run it")])
    return files[0], script


_OF_LAUNCHES = ("arguments", "environment")


def _named_files(
    tool: Tool, path: Path, settings: Iterable[tuple[str, Any, Setting | None]], text: str
) -> Iterator[tuple[bool, SettingsFile, str]]:
    """Yield the files that a launch names, from beside it or as it writes them, and whether they count over it.

    Raises ConfigError for one that is not there.
    """
    files, written = {other.name: other for other in tool.files}, split_documents(text)[1]
    for name, value, setting in settings:
        if setting is not None and setting.constant in files:
            # paths in a launch are of the container: only the name can be found here
            here = path.parent / Path(str(value)).name
            if here.name not in written and not here.is_file():
                rule = f"is not in the folder of the launch file, which takes settings from it ({setting.meaning})"
                raise ConfigError([Problem(f"settings.{name}", rule, str(value), f"put it there as {here.name}")])
            yield setting.later, files[setting.constant], written.get(here.name) or _text(here)


def _file_name(tool: Tool, folder: Path, file: SettingsFile) -> str:
    """Name of a file in a folder: the one that arguments beside it name, or its own."""
    for other in tool.files:
        for setting in other.settings if (folder / other.name).is_file() else ():
            if setting.constant == file.name:
                # a comment may name another file
                match = re.search(rf"^[^#\n]*{setting.name}[= ]+(\S+)", _text(folder / other.name), re.MULTILINE)
                return file.name if match is None else Path(match[1]).name
    return file.name


def _text(path: Path) -> str:
    return read_text(path, "settings", most=_MOST_BYTES, way_out="name a file of the tool")


def keep(path: Path, text: str) -> None:
    """Write a text in place of a file. Raises ConfigError where that is a folder."""
    if path.is_dir():
        raise ConfigError([Problem("out", "is a folder", str(path), "name a file")])
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_replacement(path) as scratch:
        scratch.write_text(text, encoding="utf-8")
