"""What somebody may have meant by a first word that is no command."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from dse import plugins
from dse.config.options import list_options, plural
from dse.config.spelling import read_assignments
from dse.errors import Problem, did_you_mean, known_here, nearest
from dse.shell.help import VERBS, commands_of


def problem_of_no_command(words: Sequence[str]) -> Problem:
    """The problem of words whose first is no command, with the nearest command, option or study."""
    name, groups = words[0], list(plugins.declarations("GROUPS"))
    if inner := [command.partition(" ")[2] for command in commands_of(name)]:
        way = did_you_mean(words[1], inner).replace("mean `", f"mean `python -m dse {name} ")
        return Problem(" ".join(words[:2]), "is no command", way_out=way)
    way = f"write {name}=<name>; `python -m dse {plural(name)}` lists them" if name in groups else ""
    way = way or _near_command(words, groups)
    if not way:
        options, (problem,) = read_assignments([name], {group: list(list_options(group)) for group in groups})
        verbs = f"{known_here(list(VERBS))}; a study is run <name>; `python -m dse studies` lists them"
        way = problem.way_out if options else verbs
    return Problem(name, "is no command", way_out=way)


def _near_command(words: Sequence[str], groups: Sequence[str]) -> str:
    """The way out of words whose first is like a verb, the last word of a command, or a list of options."""
    meant = {command.rpartition(" ")[2]: command for command in plugins.names("command")}
    meant |= {plural(group): plural(group) for group in groups} | {verb: verb for verb in VERBS}
    near = nearest(words[0], meant, cutoff=0.75)
    return f"did you mean `{shlex.join(['python', '-m', 'dse', *meant[near].split(), *words[1:]])}`?" if near else ""
