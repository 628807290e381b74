"""What somebody may have meant by a first word that is no command."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from dse import plugins
from dse.config.options import list_options, plural
from dse.config.spelling import mend
from dse.errors import Problem, did_you_mean, known_here, nearest
from dse.shell.help import VERBS, commands_of


def problems_of_no_command(words: Sequence[str]) -> list[Problem]:
    """The problem of words whose first is no command, with the nearest command, option or study."""
    program = next((n for n, word in enumerate(words) if word not in ("python", "python3", "-m", "dse")), len(words))
    if program:
        way = shlex.join(["python", "-m", "dse", *words[program:]])
        return [Problem(" ".join(words[:program]), "is typed twice", way_out=f"write `{way}`")]
    name, groups = words[0], list(plugins.declarations("GROUPS"))
    if inner := [command.partition(" ")[2] for command in commands_of(name)]:
        way = did_you_mean(words[1], inner).replace("mean `", f"mean `python -m dse {name} ")
        return [Problem(" ".join(words[:2]), "is no command", way_out=way)]
    if way := _near_command(words, groups):
        return [Problem(name, "is no command", way_out=way)]
    return _problems_of_overrides(words, groups)


def _near_command(words: Sequence[str], groups: Sequence[str]) -> str:
    """The way out of words whose first is like a verb, the last word of a command, or a list of options."""
    meant = {command.rpartition(" ")[2]: command for command in plugins.names("command")}
    meant |= {plural(group): plural(group) for group in groups} | {verb: verb for verb in VERBS}
    near = nearest(words[0], meant, cutoff=0.75)
    return f"did you mean `{shlex.join(['python', '-m', 'dse', *meant[near].split(), *words[1:]])}`?" if near else ""


def _problems_of_overrides(words: Sequence[str], groups: Sequence[str]) -> list[Problem]:
    name, options = words[0], {group: list(list_options(group)) for group in groups}
    (mended, problems), (rest, _) = mend(words, options), mend(words[1:], options)
    way = f"{known_here(list(VERBS))}; a study is run <name>; `python -m dse studies` lists them"
    if problems and problems[0].path != name and mended:
        return problems  # the first word belongs to the next one
    if (group := nearest(name, options, cutoff=0.65)) and mended[:1] != [f"study={name}"]:
        way = f"write {group}=<one of {len(options[group])}>: `python -m dse {plural(group)}` lists them"
    elif mended and name in options.get(mended[0].partition("=")[0], ()):
        lacks_study = not any(word.startswith("study=") for word in mended)
        way = f"write {'study=<name> ' if lacks_study else ''}`{mended[0]}`"
    elif any(word.startswith("study=") for word in rest):
        way = f"leave it out: `{shlex.join(['python', '-m', 'dse', *rest])}`"
    elif mended and problems[0].path == name:
        way = f"did you mean `{mended[0]}`?"
    return [Problem(name, "is no command", way_out=way)]
