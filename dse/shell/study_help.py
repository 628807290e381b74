"""Help on one study: its question, the groups whose options it takes, what it searches, and two examples."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dse import plugins
from dse.config.options import list_options, override_key, plural
from dse.shell.help import table_lines

if TYPE_CHECKING:
    from dse.config.compose import Request

_MOST_VALUES = 8  # of a knob that are listed


def named_study(words: Sequence[str], folder: Path | None) -> str:
    """The study that words name, as `run <study>` or `study=<study>`; "" where they name none that there is.

    folder: of the user's own configuration.
    """
    after_run = words[1:2] if words[:1] == ["run"] else []
    named = [*after_run, *(word.removeprefix("study=") for word in words if word.startswith("study="))]
    return next((name for name in named if name in list_options("study", [folder] if folder else [])), "")


def study_text(name: str, folder: Path | None) -> str:
    """Help on a study. folder: of the user's own configuration."""
    from dse.config.compose import request

    composed = request([f"study={name}"], folder)
    tree: Mapping[str, Any] = composed.tree.get("study") or {}
    command = plugins.declaration("COMMANDS", name)
    has_command = isinstance(command, plugins.Command) and command.study == name
    groups = dict(_groups(composed, folder))
    if composed.problems:  # a folder of one's own may hold what cannot be read
        options = {problem.path: f"refused: {problem.rule}" for problem in composed.problems}
    else:
        options = {**dict(_knobs(composed)), **dict(_settings(composed))}
    examples = [f"run {name}", f"run {name} {_second_example(composed)}"]
    lines = [
        f"{name}: {tree.get('question') or list_options('study').get(name, '')}",
        "",
        f"usage: python -m dse run {name} [group=option ...] [path=value ...] [space.path='choice(a,b)' ...]",
        *([f"       python -m dse {command.usage}"] if has_command else []),
        "",
        "Groups, with what the study takes",
        *table_lines(groups),
        "",
        "Options: what it searches; `path=value` fixes one, `space.path=...` changes its values",
        *table_lines({**options, **(command.options if has_command else {})}),
        "",
        "Examples",
        *(f"  python -m dse {example}" for example in examples),
    ]
    return "\n".join(lines)


def _groups(composed: Request, folder: Path | None) -> Iterator[tuple[str, str]]:
    """Yield `group=option` of each group whose option the study takes, and how others are listed."""
    folders = [folder] if folder else []
    for group, title in sorted(plugins.declarations("GROUPS").items()):
        if group == "study":
            continue
        options = list_options(group, folders)
        section = override_key(group, _all_folders(folder)).partition("@")[2] or group
        chosen: Any = composed.tree
        for name in (*section.split("."), "name"):
            chosen = chosen.get(name) if isinstance(chosen, Mapping) else None
        if chosen in options:
            yield f"{group}={chosen}", f"{title}; {len(options)} options: python -m dse {plural(group)}"


def _all_folders(folder: Path | None) -> list[Path]:
    from dse.config.options import conf_dirs

    return [*conf_dirs(), *([folder] if folder else [])]


def _knobs(composed: Request) -> Iterator[tuple[str, str]]:
    """Yield the path of each searched knob, and its values."""
    for knob in composed.knobs:
        if knob.values:
            more = f", ... ({len(knob.values)} values)" if len(knob.values) > _MOST_VALUES else ""
            yield knob.path, ", ".join(map(str, knob.values[:_MOST_VALUES])) + more
        else:
            yield knob.path, f"{knob.low} to {knob.high}"


def _settings(composed: Request) -> Iterator[tuple[str, str]]:
    """Yield settings that every study has, with their values here."""
    tree = composed.tree
    yield f"budget.trials={tree['budget']['trials']}", "points per scenario at most"
    objectives: Sequence[str] = tree["study"].get("objectives") or ()
    yield f"study.objectives=[{','.join(objectives)}]", "metrics that decide, the first before the others"


def _second_example(composed: Request) -> str:
    """Words that search fewer values of a knob, or fewer points where there is none."""
    knob = next((knob for knob in composed.knobs if len(knob.values) > 1), None)
    if knob is None:
        return "budget.trials=100 --dry-run"
    # options with values of their knobs have blanks, which Hydra's grammar takes in quotes
    values = ",".join(f"'{value}'" if " " in str(value) else str(value) for value in knob.values[:2])
    return f"{shlex.quote(f'space.{knob.path}=choice({values})')} --dry-run"
