"""Refusals of words of a command line: the rule that a word breaks, and the nearest legal word."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from dse.config.options import plural
from dse.errors import NO_KNOBS, Problem, assignment, did_you_mean, known_here, nearest
from dse.space import get_path

_FIRST = ("study", "simulator", "search", "schedule", "system", "workload")  # what is typed most
Options = Mapping[str, Sequence[str]]


def _group_of(option: str, options: Options) -> str:
    """The group that has an option, of several the one that is typed most; "" where none has it."""
    groups = [group for group in (*_FIRST, *options) if option in options.get(group, ())]
    return groups[0] if groups else ""


def read_assignments(words: Sequence[str], options: Options) -> tuple[list[str], list[Problem]]:
    """Words that are `path=value`, options among them with their group, and a problem for each that was none.

    options: group -> its options.
    """
    assignments, problems = list[str](), list[Problem]()
    for word in words:
        if "=" in word or word.startswith(("~", "-")):  # Hydra deletes with ~; flags are read elsewhere
            assignments.append(word)
            continue
        group = _group_of(word, options)
        study = nearest(word, options.get("study", ()), cutoff=0.75)  # strict: nothing but the word speaks for it
        meant = [f"{group}={word}"] if group else [f"study={study}"] if study else []
        way = f"write `{meant[0]}`" if meant else "write <path>=<value>, without blanks or in quotes"
        problems.append(Problem(word, "is no path=value", way_out=way))
        assignments += meant
    return assignments, problems


def nearest_key(tree: Mapping[str, Any], key: str, value: object = None) -> str:
    """The way out of a dotted path that a configuration does not have: a path that ends with it or its last name, else
    the nearest key of its section, or, where that is not there, the nearest path.

    value: as typed, for the word that is suggested; None for the path alone.
    """
    plain = re.sub(r"[-\s]+", "_", key.replace("/", ".").strip(".").lower())
    paths = [path for path in _paths(tree) if path.startswith("space.") == plain.startswith("space.")]
    parent, _, name = plain.rpartition(".")
    ends = [path for path in paths if f".{path.lower()}".endswith(f".{plain}")]
    ends = ends or [path for path in paths if path.lower().endswith(f".{name}")]
    section = get_path(tree, parent)
    if ends:
        path = min(ends, key=len)  # the least deep: the obvious one
    elif isinstance(section, Mapping):
        near = nearest(name, section)
        path = f"{parent}.{near}" if near else ""
    else:
        path = nearest(plain, paths)
    if not path:
        return known_here(sorted(section if isinstance(section, Mapping) else tree))
    return f"did you mean `{path if value is None else assignment(path, value)}`?"


_NO_VALUES = ("sources", "description", "question", "name", "note", "fitted_on", "uncertainty", "baseline", "probes")
"""Keys whose content only describes values, or names paths of others."""


def _paths(tree: Mapping[str, Any], parent: str = "") -> Iterator[str]:
    """Dotted paths of all sections and values of a tree, but not of `_NO_VALUES`."""
    for name, value in tree.items():
        if name not in _NO_VALUES:
            yield f"{parent}{name}"
            if isinstance(value, Mapping):
                yield from _paths(value, f"{parent}{name}.")


def nearest_option(name: str, group: str, options: Options) -> str:
    """The way out of an option that a group does not have: the nearest of the group, else the group that has it."""
    if near := nearest(name, options[group]):
        return f"did you mean `{assignment(group, near)}`?"
    if other := _group_of(name, options):
        return f"it is an option of another group: `{assignment(other, name)}`"
    return f"{known_here(sorted(options[group]))}; python -m dse {plural(group)}"


def grammar_problem(text: str, error: Exception) -> Problem:
    """The problem of an override that Hydra's grammar refuses."""
    reason = str(error).splitlines()[0].partition(" expecting ")[0]  # what follows is a list of all tokens
    reason = re.sub("^[A-Za-z]+ while evaluating '.*': ", "", reason)
    return Problem(text, f"cannot be parsed: {reason}", way_out="write path=value, and other characters in quotes")


BEYOND_GRAMMAR = (AssertionError, ArithmeticError, LookupError, RecursionError, TypeError, ValueError)
"""Raised by Hydra's parser for words that are beyond its grammar."""


MOST_LISTED = 16
"""Values of a knob that a message lists one by one."""


def sweep_of(values: Sequence[Any]) -> str:
    """The shortest sweep of some values: a range of many integers that are equally far apart, else a choice."""
    if len(values) > MOST_LISTED and all(isinstance(value, int) for value in values):
        step = min(later - former for former, later in pairwise(values))
        return f"range({values[0]},{values[-1] + 1},{step})"
    return f"choice({','.join(map(str, values))})"


def instead_of_sweep(path: str, text: str, present: object) -> str:
    """The way out of a sweep where one value belongs: the list, or the knob. present: the value that is there now."""
    if isinstance(present, (list, tuple)):
        return f"write `{assignment(path, [part.strip() for part in text.split(',')])}`"
    if path.partition(".")[0] in NO_KNOBS:
        return "write one value"
    return f"to search it, write `{assignment(path, text, prefix='+space.')}`"


def composition_problem(error: Exception) -> Problem:
    """The problem of files that cannot be composed, as Hydra and OmegaConf tell it."""
    text = " ".join(str(error).partition("Config search path")[0].split())  # the rest is a list of folders
    match = re.match(r"In '(.*?)': Could not find '(.*?)'", text)
    if match is None:
        return Problem("configuration", text)
    where, missing = match.groups()
    group = missing.split("/")[-2] if "/" in missing else ""
    # Hydra takes a name without a slash as below the present group
    is_inside = missing.startswith(f"{where.partition('/')[0]}/") and missing.count("/") > 1
    way = f"a group of its own is written with a slash: - /{group}: {missing.rpartition('/')[2]}"
    known = f"`python -m dse {plural(group)}` lists the options" if group else "write group: option"
    return Problem(where, f"names {missing} in its defaults, which is not there", way_out=way if is_inside else known)


def flag_problem(flag: str, options: Options, flags: Sequence[str]) -> Problem:
    """The problem of a flag that is none of `flags`: a `path=value` with dashes before it, or a flag misspelt."""
    key, _, value = flag.lstrip("-").partition("=")
    if key in options or "." in key:
        way = f"write `{assignment(key, value)}`" if value else f"write {key}=<value>"
    else:
        way = did_you_mean(flag.partition("=")[0], flags)
    return Problem(flag, "is no flag that is understood here", way_out=way)
