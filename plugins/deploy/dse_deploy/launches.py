"""Launches of a script: the commands in it that set something of a tool, of which a plan is one.

Settings of a script with one launch, or with several that set the same, are those of all its words. Where launches
differ, one of them is chosen (`launch=2`), with the environment as it stands there; commands that set nothing of the
tool, or that ask for the machines of all launches (`salloc`), count beside each.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dse.errors import ConfigError, Problem
from dse_deploy.arguments import (
    Values,
    has_script,
    is_of_tool,
    is_option,
    is_value,
    options,
    scalar,
    setting_of,
)
from dse_deploy.settings import Setting
from dse_deploy.shell import Script, read_script

LAUNCH = "launch"
"""The word of the command that chooses among the launches of a script."""
_PRINTS = ("echo", "printf")
_ALLOCATES = ("salloc", "sbatch")
_ASKS = ("hostname",)  # `srun --nodes=1 hostname`: the address of a node
_MOST_LAUNCHES, _MOST_SHOWN, _LONGEST_PROGRAM = 1000, 4, 60


@dataclass(frozen=True)
class _Command:
    """A command with what it sets. line: of the script. environment: variables of a tool as they stand there."""

    line: int
    words: tuple[str, ...]
    values: tuple[tuple[str, Any], ...]
    environment: Mapping[str, str]
    is_launch: bool

    @property
    def program(self) -> str:
        """Its words in front of options."""
        # `torchrun train.py` of `torchrun train.py --tp 8`
        text = " ".join(itertools.takewhile(lambda word: not is_option(word), self.words))
        return f"{text[:_LONGEST_PROGRAM]}{'...' if len(text) > _LONGEST_PROGRAM else ''}"

    def settings(self, by_name: Mapping[str, Setting]) -> dict[str, Any]:
        """Settings of the tool that are in force in it, by their first names."""
        # options after the environment, as they count over it
        pairs = [*((name, scalar(text)) for name, text in self.environment.items()), *self.values]
        return {setting.name: value for name, value in pairs if (setting := setting_of(name, by_name)) is not None}


def script_values(text: str, by_name: Mapping[str, Setting], launch: int = 0) -> Values:
    """Yield options of a launch script, of a command line, or of a file with one a line; and of its environment.

    launch: the number of one among those of the script; 0 where they set the same. Raises ConfigError where not.
    """
    # as `_arguments_text` writes an option that is off
    for name in re.findall(r"^# (--[\w-]+) off$", text, re.MULTILINE):
        yield name, False
    # options of Slurm stand in comments, so the script's reader passes them over
    yield from _all(read_script(" ".join(re.findall(r"^#SBATCH[ \t]+(.*)$", text, re.MULTILINE))), by_name)
    script = read_script(text)
    commands = list(_commands(script, by_name))
    chosen = _choose([command for command in commands if command.is_launch], by_name, launch)
    if chosen is None:
        values = list(_all(script, by_name))
        yield from values
        # a file of variables that another script sources
        if not any(setting_of(name, by_name) for name, _ in values):
            yield from _variables(script, by_name)
        return
    yield from ((name, scalar(value)) for name, value in chosen.environment.items())
    for command in commands:
        if command is chosen or not (command.is_launch or _starts_nothing(command.words)):
            yield from command.values
    yield from _undecided(chosen.words, script)


def _choose(launches: Sequence[_Command], by_name: Mapping[str, Setting], number: int) -> _Command | None:
    """The launch of a number; None for 0 where all set the same. Raises ConfigError."""
    if len(launches) > _MOST_LAUNCHES:
        raise ConfigError([Problem("settings", f"holds more than {_MOST_LAUNCHES} launches", way_out=_ONE)])
    if number > max(1, len(launches)):
        rule = f"is the number of no launch: the script has {len(launches)}"
        way = f"write {_numbers(launches)}" if launches else "leave it out"
        raise ConfigError([Problem(LAUNCH, rule, number, way)])
    if number:
        return launches[number - 1] if launches else None
    settings = [launch.settings(by_name) for launch in launches]
    # launches that agree need no choice: warm-ups, or one for each node
    if all(other == settings[0] for other in settings[1:]):
        return None
    rule = f"holds {len(launches)} launches that set different things: {'; '.join(_titles(launches, settings))}"
    raise ConfigError([Problem("settings", rule, way_out=f"write {_numbers(launches)}, or {_ONE}")])


_ONE = "leave one launch in the file"


def _numbers(launches: Sequence[_Command]) -> str:
    """The words that choose launches."""
    last, joins = len(launches), "or" if len(launches) == 2 else "to"
    return f"{LAUNCH}=1" if last == 1 else f"{LAUNCH}=1 {joins} {LAUNCH}={last}"


def _titles(launches: Sequence[_Command], settings: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield where the first launches are, and what is not set alike."""
    first, names = settings[0], dict.fromkeys(name for each in settings for name in each)
    differing = [name for name in names if any(each.get(name) != first.get(name) for each in settings)][:_MOST_SHOWN]
    for number, (launch, values) in enumerate(zip(launches[:_MOST_SHOWN], settings, strict=False), 1):
        says = ", ".join(f"{name} {values[name]}" if name in values else f"no {name}" for name in differing)
        yield f"{LAUNCH}={number} in line {launch.line} ({launch.program}) has {says}"
    if len(launches) > _MOST_SHOWN:
        yield f"and {len(launches) - _MOST_SHOWN} more"


def _all(script: Script, by_name: Mapping[str, Setting]) -> Values:
    """Yield all that a script sets: its environment, options of its commands, and words that a condition decides."""
    for name, value in script.exports.items():
        if is_of_tool(name, by_name):
            yield name, scalar(value)
    for part in script.commands:
        if not _starts_nothing(part.words):
            yield from options(part.words, by_name)
            for inner in _inner_scripts(part.words):
                yield from _all(inner, by_name)
    yield from _undecided(script.words, script)


def _variables(script: Script, by_name: Mapping[str, Setting]) -> Values:
    """Yield options that variables hold, of a file that other scripts read."""
    for values in script.variables.values():
        words = values if len(values) > 1 else " ".join(values).split()
        if words and is_option(words[0]):
            yield from options(words, by_name)


def _undecided(words: Sequence[str], script: Script) -> Values:
    """Yield the variables of options among words that a condition of the script sets in two ways."""
    for place, word in enumerate(words):
        if word[2:-1] in script.two_ways and word == f"${{{word[2:-1]}}}" and not is_value(words, place):
            yield f"{word}, which a condition of the script sets in two ways", True


def _inner_scripts(words: Sequence[str]) -> Iterator[Script]:
    """Yield the scripts that stand in words of a command: `bash -c "..."`."""
    for place in range(len(words)):
        if has_script(words, place):
            yield read_script(words[place + 1])


def _commands(script: Script, by_name: Mapping[str, Setting]) -> Iterator[_Command]:
    """Yield the commands of a script, those of scripts inside of words in place of the commands around them."""
    # reversed, so that the next change is the last element
    changes, environment = list(reversed(script.changes)), dict[str, str]()
    for part in script.commands:
        # the environment of a command is what was set before it
        while changes and changes[-1].place <= part.place:
            change = changes.pop()
            if is_of_tool(change.name, by_name):
                # a new dict each: earlier commands keep theirs
                others = {name: value for name, value in environment.items() if name != change.name}
                environment = others if change.value is None else {**others, change.name: change.value}
        values = tuple(options(part.words, by_name))
        inner = [command for nested in _inner_scripts(part.words) for command in _commands(nested, by_name)]
        if not any(command.is_launch for command in inner):
            is_launch = _is_launch(part.words, values, by_name)
            yield _Command(part.line, part.words, values, environment, is_launch)
            continue
        for command in inner:
            # variables that the inner script sets count over those around it
            around = {**environment, **command.environment}
            yield replace(command, line=part.line, values=(*values, *command.values), environment=around)


def _is_launch(words: Sequence[str], values: Sequence[tuple[str, Any]], by_name: Mapping[str, Setting]) -> bool:
    """Tell whether a command runs something with options of the tool."""
    if is_option(words[0]) or _starts_nothing(words) or words[0] in _ALLOCATES:
        return False
    named = (name for name, _ in values if not name[:1].isupper())  # an option, and no variable of a container
    return any(setting_of(name, by_name) is not None for name in named)


def _starts_nothing(words: Sequence[str]) -> bool:
    """Tell whether a command prints, or asks what a node is called."""
    return words[0] in _PRINTS or any(word in _ASKS for word in words)
