"""Help texts: of the program, of a verb, of one command, and lists of the options of a group."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from dse import plugins
from dse.config.options import conf_dirs, list_options, options_marked, plural
from dse.errors import assignment
from dse.errors.parsing import load
from dse.files import files_below
from dse.plugins import Command

_MARK = " (research)"
_COLUMN = 30  # characters of a name before its description
VERBS = {
    "run": "evaluate a study: run <study>, or study=<study>",
    "plan": "choose how a model's step is parallelised and overlapped on a machine",
    "codesign": "find the best machine for workloads within area, power and cost",
    "profile": "analyse recorded runs",
    "settings": "translate plans into settings of frameworks, and back",
    "results": "analyse finished runs",
    "machine": "show and calibrate machines",
    "store": "manage the database of results",
    "ui": "open MLflow in a browser",
    "doctor": "check the installation",
}
"""Verb -> its purpose, in the order of the help. Plug-ins add commands to a verb, and verbs of their own (`VERBS`)."""
_LISTS = ("study", "system", "schedule", "implementation", "model", "workload", "simulator", "search")
_FOOT = """\
Examples
  python -m dse run ficco_sweep system=h100_8 workload.shapes=my.csv
  python -m dse run ficco_sweep +space.system.gpu.num_cus='range(64,304,16)' --dry-run
  python -m dse plan model=llama3_70b system=h100_8"""


def help_text(words: Sequence[str], folder: Path | None) -> str:
    """Help on the command or the verb that the words of a command line name, else on the whole program.

    folder: of the user's own configuration.
    """
    if "--all" in words:
        return _program_text(every=True)
    for place in range(len(words)):
        for name in (" ".join(words[place : place + 2]), words[place]):
            if (command := plugins.declaration("COMMANDS", name)) is not None:
                return _command_text(command)
        if commands := commands_of(words[place]):
            return _verb_text(words[place], commands)
    if "run" not in words:
        return _program_text()
    studies = _list_text("study", [folder] if folder else [], every=False)
    return "\n".join([studies, "", "Columns of an answer", *table_lines(plugins.declarations("COLUMNS"))])


def commands_of(verb: str) -> dict[str, Command]:
    """The commands of a verb that has several, by name."""
    commands: dict[str, Command] = plugins.declarations("COMMANDS")
    return {name: commands[name] for name in sorted(commands) if name.startswith(f"{verb} ")}


def list_text(word: str, words: Sequence[str], folder: Path | None) -> str:
    """The options of the group whose plural a word is, or all groups for `options`; "" for another word.

    words: those after it; `--all` lists what few people need, too. folder: of the user's own configuration.
    """
    titles = plugins.declarations("GROUPS")
    if word == "options":
        groups = {plural(group): titles[group] for group in sorted(titles)}
        return "\n".join(["Groups of options: `python -m dse <group>` lists one", *table_lines(groups)])
    group = next((group for group in titles if plural(group) == word), None)
    return _list_text(group, [folder] if folder else [], every="--all" in words) if group else ""


def _list_text(group: str, folders: Sequence[Path], *, every: bool) -> str:
    title = plugins.declarations("GROUPS")[group]
    options = list_options(group, folders)
    rare = set() if every else options_marked(group, "--all")
    studied = _research_options(group)
    shown = {name: text + _MARK * (name in studied) for name, text in options.items() if name not in rare}
    more = [f"  ({len(rare)} more: python -m dse {plural(group)} --all)"] if rare else []
    first = next(iter(shown), "<name>")
    example = f"run {first}" if group == "study" else f"run <study> {group}={first}"
    return "\n".join([f"{title} ({group}=)", *table_lines(shown), *more, "", "Example", f"  python -m dse {example}"])


def _command_text(command: Command) -> str:
    lines = [f"usage: python -m dse {command.usage}", "", command.description, ""]
    if command.options:
        lines += ["Options", *table_lines(command.options), ""]
    for section, keys in _keys(command).items():
        lines += [f"{section}.*, with defaults", *table_lines(keys), ""]
    examples = command.examples or (command.usage,)  # a usage without placeholders
    return "\n".join([*lines, "Examples", *(f"  python -m dse {example}" for example in examples)])


def _shelf(command: Command) -> str:
    return _MARK if plugins.is_research(command.target) else ""


def _research_options(group: str) -> set[str]:
    """Options of a group that packages bring whose models are under study."""
    research = plugins.declarations("RESEARCH")
    folders = [folder / group for folder in plugins.configurations() if folder.parent.name in research]
    return {path.stem for folder in folders for path in files_below(folder, "*.yaml")}


def _keys(command: Command) -> dict[str, dict[str, str]]:
    """Section -> `path=default` -> what the key is, for the sections of a study that a command explains."""
    if not command.keys:
        return {}
    file = next(path for folder in conf_dirs() if (path := folder / "study" / f"{command.study}.yaml").is_file())
    tree: dict[str, dict[str, object]] = load(file.read_text("utf-8"), str(file))
    sections: dict[str, dict[str, str]] = {}
    for key, text in command.keys.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[assignment(key, tree[section][name])] = text
    return sections


def _verb_text(verb: str, commands: Mapping[str, Command]) -> str:
    lines = [f"usage: python -m dse {verb} <command> [...]", "", f"{_purposes().get(verb, verb)}:", ""]
    table = {name: command.description + _shelf(command) for name, command in commands.items()}
    return "\n".join([*lines, *table_lines(table), "", f"`python -m dse {verb} <command> --help` explains one."])


def _program_text(*, every: bool = False) -> str:
    studies = list_options("study")
    shown = studies if every else {name: studies[name] for name in studies if name in options_marked("study", "first")}
    lists = " | ".join(map(plural, _LISTS))
    return "\n".join(
        [
            "Find which overlap of computation and communication wins on a GPU system, by how much, and how surely.",
            "",
            "usage: python -m dse run <study> [group=option ...] [path=value ...] [+space.path='range(a,b,step)' ...]",
            "       python -m dse <verb> [...]              `python -m dse <verb> --help` explains a verb",
            "",
            "Verbs",
            *table_lines(dict(_verbs(research=False))),
            "",
            "Research (models under study)",
            *table_lines(dict(_verbs(research=True))),
            "",
            "Studies",
            *table_lines(shown),
            "",
            f"Lists: python -m dse {lists}",
            "(`options` lists the groups of options; --all after a list adds the options that few people need)",
            "Flags: --dry-run counts the points and evaluates none, --config-dir adds a folder of configurations,",
            "-m runs a study for each of several values, -v prints every table, --cfg job prints the configuration,",
            "--hydra-help explains the rest.",
            "",
            _FOOT,
        ]
    )


def _verbs(*, research: bool) -> Iterator[tuple[str, str]]:
    """Verbs with what they are for, and the names of their commands where these are several.

    research: those whose commands all lie in packages under study, or the others, without such commands among theirs.
    """
    commands = plugins.declarations("COMMANDS")
    purposes = _purposes()
    others = {name.partition(" ")[0] for name in commands} - {*purposes, *map(plural, _LISTS)}
    for verb in (*purposes, *sorted(others)):
        named = {name: command for name, command in commands.items() if name == verb or name.startswith(f"{verb} ")}
        studied = bool(named) and all(plugins.is_research(command.target) for command in named.values())
        if studied != research:
            continue
        supported = {name for name, command in named.items() if research or not plugins.is_research(command.target)}
        inner = ", ".join(name.partition(" ")[2] for name in sorted(supported - {verb}))
        if inner:
            yield verb, f"{purposes.get(verb, '')}: {inner}".lstrip(": ")
        elif verb in commands or verb == "run":
            yield verb, purposes.get(verb) or commands[verb].description


def _purposes() -> dict[str, str]:
    """Verb -> its purpose, with those that plug-ins declare."""
    return VERBS | plugins.declarations("VERBS")


def table_lines(options: Mapping[str, str]) -> list[str]:
    """Names with their descriptions, these in one column; a name that is too long for that has a line of its own."""
    width = max((len(name) for name in options if len(name) <= _COLUMN), default=0)
    lines = []
    for name, text in options.items():
        lines += [f"  {name:<{width}}  {text}"] if len(name) <= width else [f"  {name}", f"  {'':<{width}}  {text}"]
    return lines
