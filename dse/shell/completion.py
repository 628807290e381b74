"""Completion for bash, zsh and fish: commands, groups and their options, dotted paths, values, runs.

The script of a shell hands over the command line up to the cursor. Nothing is composed by Hydra, as that takes a
second: the tree of the configuration is put together from the files of the options that are typed.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from dse import plugins
from dse.config.options import OWN_FLAGS, conf_dir, conf_dirs, is_shipped, list_options, own_folder, unreadable
from dse.errors import ConfigError, Problem, did_you_mean
from dse.errors.parsing import load
from dse.shell.help import commands_of

_SCRIPTS = {
    "bash": r"""
_dse_complete() {
    local line="${COMP_LINE:0:COMP_POINT}" word="${COMP_WORDS[COMP_CWORD]}" program=("${COMP_WORDS[0]}") whole
    if [[ ${program[0]##*/} == python* ]]; then
        [[ ${COMP_WORDS[1]} == -m && ${COMP_WORDS[2]} == dse ]] || return 0
        program+=(-m dse)
    fi
    whole="${line##*[[:space:]]}"
    [[ $word == [=:] ]] && word=
    local before="${whole%"$word"}" IFS=$'\n'
    COMPREPLY=($("${program[@]}" completion line "$line" 2>/dev/null))
    COMPREPLY=("${COMPREPLY[@]#"$before"}")
}
complete -o nospace -o default -F _dse_complete dse python python3
""",
    "zsh": r"""
autoload -Uz compinit && (( $+functions[compdef] )) || compinit
_dse_complete() {
    local -a program=("$words[1]") found
    if [[ ${words[1]:t} == python* ]]; then
        if [[ "$words[2] $words[3]" != "-m dse" ]]; then _default; return; fi
        program+=(-m dse)
    fi
    found=("${(@f)$("${program[@]}" completion line "${(j: :)words[1,CURRENT]}" 2>/dev/null)}")
    found=(${found%% })
    (( $#found )) && compadd -S '' -- $found || _files
}
compdef _dse_complete dse python python3
""",
    "fish": r"""
complete -c dse -a '(dse completion line (commandline -cp) 2>/dev/null | string trim)'
for program in python python3
    complete -c $program -n 'string match -qr -- "-m dse( |\$)" (commandline -cp)' \
        -a "($program -m dse completion line (commandline -cp) 2>/dev/null | string trim)"
end
""",
}
_HIDDEN = ("sources", "description", "question", "defaults")
_HYDRAS = ("--cfg", "--dry-run", "--help", "--hydra-help", "--info", "--multirun", "--resolve", "--verbose", "-v")
_ENDS = ("=", ".", "/")  # after which something follows


def completion(words: Sequence[str]) -> int:
    """`completion bash|zsh|fish`: print the script; `completion line <text>`: what may stand at the end of a line."""
    kind, *text = words or [""]
    if kind == "line":
        print("\n".join(candidates(text[0] if text else "")))
        return 0
    if kind not in _SCRIPTS or text:
        typed = " ".join(words)
        way = did_you_mean(kind, _SCRIPTS) if kind else "write `python -m dse completion bash`"
        raise ConfigError([Problem(f"completion {typed}".strip(), "names no shell that is known here", way_out=way)])
    print(_SCRIPTS[kind].strip())
    return 0


def candidates(line: str) -> list[str]:
    """Words that may stand at the end of a command line, each with what follows it: a space, or nothing.

    line: from the program to the cursor.
    """
    words = _words(line)
    while words and (
        Path(words[0]).name.startswith("python") or words[0] in ("-m", "dse") or words[0].endswith("/dse")
    ):
        words.pop(0)
    if not words:
        return []
    *before, word = words
    matches = {match for match in _matches(before, word) if match.startswith(word)}
    return sorted(match if match.endswith(_ENDS) else f"{match} " for match in matches)


def _words(line: str) -> list[str]:
    try:
        words = shlex.split(line)
    except ValueError:  # inside quotation marks, where nothing is completed
        return []
    return [*words, ""] if line[-1:].isspace() else words


def _matches(before: Sequence[str], word: str) -> Iterator[str]:
    names = plugins.names("command")
    typed = next((name for count in (2, 1) if (name := " ".join(before[:count])) in names), "")
    if typed:
        yield from _words_of_command(typed, plugins.declaration("COMMANDS", typed), word)
        return
    if before == ["run"]:
        yield from list_options("study")
    elif len(before) == 1 and commands_of(before[0]):
        yield from (name.partition(" ")[2] for name in names if name.startswith(f"{before[0]} "))
        return
    if not before:
        yield from ("run", *(name.partition(" ")[0] for name in names))
    if word.startswith("-"):
        yield from _HYDRAS
    yield from _overrides(before, word)


def _words_of_command(name: str, command: plugins.Command, word: str) -> Iterator[str]:
    """Options of a command; after `study=` the studies that were run, after another name the options of its group."""
    key, equals, _ = word.partition("=")
    if not equals:
        names = (*command.options, *re.findall(r"(\w+)=", command.usage))
        yield from (option if option.startswith("-") else f"{option}=" for option in names if " " not in option)
        if "<run>" in command.usage:
            yield from _runs(with_times=True)
        if name == "machine show":
            yield from list_options("system")
        if name == "completion":
            yield from _SCRIPTS
    elif key == "study":
        yield from (f"study={run}" for run in _runs(with_times=False) or list_options("study"))
    elif key in plugins.declarations("GROUPS"):
        yield from (f"{key}={option}" for option in list_options(key))


def _runs(*, with_times: bool) -> list[str]:
    """Studies with a finished run below the folder of results, and their runs as `<study>/<time>`."""
    folder = Path("outputs")
    latest = sorted(folder.glob("*/latest/results.parquet"))
    studies = [path.parent.parent.name for path in latest]
    times = [f"{study}/{run.parent.name}" for study in studies for run in folder.glob(f"{study}/*/results.parquet")]
    return [*studies, *(time for time in times if with_times and not time.endswith("/latest"))]


def _overrides(before: Sequence[str], word: str) -> Iterator[str]:
    """Groups, options, dotted paths and values, of the configuration that the words before compose."""
    folders = _own_folders(before)
    key, equals, _ = word.partition("=")
    sign = key[: len(key) - len(key.lstrip("+~"))]
    prefix = "space." if key.lstrip("+~").startswith("space.") else ""
    path = key.removeprefix(sign).removeprefix(prefix)
    groups = plugins.declarations("GROUPS")
    if not equals and not sign and not prefix and "." not in path:
        yield from (f"{group}=" for group in groups)
        yield from (f"{flag}=" for flag in OWN_FLAGS if flag.startswith("--") and word.startswith("-"))
    if equals and path in groups:
        yield from (f"{key}={option}" for option in list_options(path, folders))
    elif equals:
        yield from (f"{key}={value}" for value in _values(path, before, folders))
    else:
        yield from (f"{sign}{prefix}{name}" for name in _paths(_tree(before, folders), path))


def _own_folders(before: Sequence[str]) -> list[Path]:
    try:
        folder = own_folder(before)
    except ConfigError:
        return []
    return [folder] if folder and folder.is_dir() else []


def _paths(tree: Any, typed: str) -> Iterator[str]:
    """Paths one level below the part of a path that is typed in full: sections end in a dot, values in `=`."""
    parent = typed.rpartition(".")[0]
    for name in filter(None, parent.split(".")):
        tree = tree.get(name) if isinstance(tree, Mapping) else None
    for name, value in tree.items() if isinstance(tree, Mapping) else ():
        if name not in _HIDDEN:
            yield f"{parent}.{name}".lstrip(".") + ("." if isinstance(value, Mapping) and value else "=")


def _values(path: str, before: Sequence[str], folders: Sequence[Path]) -> Iterator[str]:
    """Texts, and true and false, that options of the configuration have at a path."""
    node: Any = _tree(before, folders)
    for name in path.split("."):
        node = node.get(name) if isinstance(node, Mapping) else None
    if isinstance(node, bool):
        yield from ("true", "false")
    for group in plugins.declarations("GROUPS"):
        for folder in (*conf_dirs(), *folders):
            for file in (folder / group).glob("*.yaml"):
                yield from _text_at(file, group, path)


def _text_at(file: Path, group: str, path: str) -> Iterator[str]:
    with file.open(encoding="utf-8") as opened:
        header = opened.readline().partition("# @package ")[2].strip() or group
    if header == "_global_" or not f"{path}.".startswith(f"{header}."):
        return
    package, tree = _read(file, group)
    node: Any = tree
    for name in path.removeprefix(package).strip(".").split("."):
        node = node.get(name) if isinstance(node, Mapping) else None
    if isinstance(node, str) and node.isidentifier() and path.rpartition(".")[2] not in ("name", *_HIDDEN):
        yield node


def _tree(before: Sequence[str], folders: Sequence[Path]) -> dict[str, Any]:
    """The configuration that options choose, as far as files say it without interpolation."""
    chosen = dict(word.split("=", 1) for word in before if "=" in word and not word.startswith("-"))
    tree: dict[str, Any] = {}
    base = dict(_read(conf_dir() / "config.yaml", "")[1])
    for entry in base.pop("defaults", []):
        if isinstance(entry, Mapping):
            for group, option in entry.items():
                _compose(tree, group, chosen.get(group, option), (chosen, folders))
    for group, option in chosen.items():  # parts, and groups that a study alone has
        if group not in ("study",) and "." not in group:
            _compose(tree, group, option, (chosen, folders))
    base.pop("hydra", None)
    return _merge(tree, {name: value for name, value in base.items() if name != "space"})


def _compose(tree: dict[str, Any], group: str, option: Any, typed: tuple[Mapping[str, str], Sequence[Path]]) -> None:
    """Put an option of a group into a tree, those that it names in its own defaults before it."""
    chosen, folders = typed
    file = next((f for folder in (*folders, *conf_dirs()) if (f := folder / group / f"{option}.yaml").is_file()), None)
    if file is None or (not is_shipped(file) and unreadable(file)):
        return
    package, part = _read(file, group)
    part = dict(part)
    for entry in part.pop("defaults", None) or []:
        if isinstance(entry, Mapping):
            for name, inner in entry.items():
                other = str(name).removeprefix("override ").lstrip("/")
                _compose(tree, other, chosen.get(other, inner), typed)
    for name in reversed(package.split(".") if package != "_global_" else []):
        part = {name: part}
    _merge(tree, part)


@cache
def _read(file: Path, group: str) -> tuple[str, dict[str, Any]]:
    """The package of a file (where in the configuration its values go) and its tree."""
    text = file.read_text("utf-8")
    header = text.partition("\n")[0].partition("# @package ")[2].strip()
    tree = load(text, str(file))
    return header or group, tree if isinstance(tree, dict) else {}


def _merge(tree: dict[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    for name, value in other.items():
        present = tree.get(name)
        both = isinstance(present, dict) and isinstance(value, Mapping)
        tree[name] = _merge(dict(present), value) if both else value  # type: ignore[arg-type]
    return tree
