"""Help texts: of the program, of one command, of one group of the configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from dse import plugins
from dse.config.options import list_options
from dse.config.spelling import rank
from dse.plugins import Command

_COLUMN = 30  # characters of a name before its description
_FOOT = """\
Examples
  python -m dse study=ficco_sweep simulator=event search=nsga2 budget.trials=400
  python -m dse study=ficco_sweep system.gpu.num_cus=228 workload.shapes=my.csv
  python -m dse study=ficco_sweep +space.system.gpu.num_cus='range(64,304,16)'

Flags: --cfg job prints the composed configuration, --config-dir adds a folder of your own configurations,
--multirun runs several, -v prints every table, --hydra-help lists the rest. `python -m dse <command> --help`
explains a command, `python -m dse <group> --help` lists the options of a group."""


def help_text(words: Sequence[str], folder: Path | None) -> str:
    """Help on the command or the group that the words of a command line name, else on the whole program.

    folder: of the user's own configuration.
    """
    folders = [folder] if folder else []
    for word in words:
        if word in plugins.declarations("GROUPS"):
            return _group_text(word, folders)
        if (command := plugins.declaration("COMMANDS", word)) is not None:
            return _command_text(command)
    return _program_text(folders)


def _command_text(command: Command) -> str:
    lines = [f"usage: python -m dse {command.usage}", "", command.description, ""]
    if command.options:
        lines += ["Options", *_table_lines(command.options), ""]
    examples = command.examples or (command.usage,)
    return "\n".join([*lines, "Examples", *(f"  python -m dse {example}" for example in examples)])


def _group_text(group: str, folders: Sequence[Path]) -> str:
    title = plugins.declarations("GROUPS")[group]
    options = list_options(group, folders)
    first = next(iter(options), "<name>")
    study = "" if group == "study" else "study=<name> "
    return "\n".join(
        [f"{title} ({group}=)", *_table_lines(options), "", "Example", f"  python -m dse {study}{group}={first}"]
    )


def _program_text(folders: Sequence[Path]) -> str:
    lines = [
        "usage: python -m dse study=<name> [group=option ...] [path=value ...] [+space.path='range(a,b,step)' ...]",
        "       python -m dse <command> [...]",
        "",
    ]
    titles = plugins.declarations("GROUPS")
    for group in sorted(titles, key=rank):
        lines += [f"{titles[group]} ({group}=)", *_table_lines(list_options(group, folders)), ""]
    commands = {command.usage: command.description for command in plugins.declarations("COMMANDS").values()}
    return "\n".join([*lines, "Commands", *_table_lines(commands), "", _FOOT])


def _table_lines(options: Mapping[str, str]) -> list[str]:
    """Names with their descriptions, these in one column; a name that is too long for that has a line of its own."""
    width = max((len(name) for name in options if len(name) <= _COLUMN), default=0)
    lines = []
    for name, text in options.items():
        lines += [f"  {name:<{width}}  {text}"] if len(name) <= width else [f"  {name}", f"  {'':<{width}}  {text}"]
    return lines
