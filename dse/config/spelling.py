"""What was meant by words of a command line that a shell has split, or a person has misspelt."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from dse.config.options import listed, plural
from dse.errors import NO_KNOBS, Problem, assignment, did_you_mean, nearest
from dse.values.units import amount, meant_number

_FIRST = ("study", "simulator", "search", "schedule", "system", "workload")  # what is typed most
Options = Mapping[str, Sequence[str]]
_Reading = tuple[int, str, str]  # words that belong together, the rule that they break, what was meant
_KEY = r"[+~]{0,2}[A-Za-z_][\w./@-]*"  # as Hydra's grammar has it: + adds, ~ deletes, @ names a package
_BRACKETS = {"(": ")", "[": "]", "{": "}"}


def rank(group: str) -> int:
    """Place of a group whose options are looked at, and listed, before those of others."""
    return _FIRST.index(group) if group in _FIRST else len(_FIRST)


def mend(words: Sequence[str], options: Options) -> tuple[list[str], list[Problem]]:
    """Words that are `path=value`, with those that are not as they were meant, and a problem for each of these.

    options: group -> its options.
    """
    mended, problems, place = list[str](), list[Problem](), 0
    while place < len(words):
        # the first that fits
        reading = next((found for rule in _RULES if (found := rule(words[place:], options))), None)
        if reading is None:
            mended.append(words[place])
            place += 1
            continue
        count, rule, meant = reading
        typed = " ".join(words[place : place + count])
        problems.append(Problem(typed, rule, way_out=f"write `{meant}`" if meant else "write <path>=<value>"))
        mended += [_unquoted(meant)] if meant and not meant.startswith("-") else []  # flags are read elsewhere
        place += count
    return mended, problems


def _unquoted(word: str) -> str:
    key, _, value = word.partition("=")
    # quotes for the shell: not part of the word here
    return f"{key}={value[1:-1]}" if re.fullmatch(r"'[^']*'", value) else word


def _split_by_the_shell(words: Sequence[str], options: Options) -> _Reading | None:
    """A value with spaces that was typed without quotes: in brackets, or a number and its unit."""
    key, equals, value = words[0].partition("=")
    if not equals or not value:
        return None
    rule = "was split by the shell, as it has a space outside quotes"
    if _is_open(value):
        # up to the closing bracket
        end = next((n for n in range(2, len(words) + 1) if not _is_open(" ".join(words[:n]))), 0)
        return (end, rule, assignment(key, "".join((value, *words[1:end])))) if end else None
    # a unit, if a number may stand before it
    if len(words) > 1 and meant_number(value) is not None and amount(f"1 {words[1]}"):
        return 2, rule, assignment(key, f"{value} {words[1]}")
    return None


def _is_open(text: str) -> bool:
    """True if a text ends inside brackets or quotation marks."""
    return text.count('"') % 2 == 1 or any(text.count(left) > text.count(right) for left, right in _BRACKETS.items())


def _apart_from_its_sign(words: Sequence[str], options: Options) -> _Reading | None:
    """`path = value`, `path= value`, `path =value`, `path value`."""
    first, after = words[0], [*words[1:3], "", ""]
    rule, key = "has a space next to =", first.rstrip("=")
    if not re.fullmatch(_KEY, key) or key.startswith("~"):  # a deletion has no value
        return None
    if after[0] == "=" and "=" not in first and after[1]:
        return 3, rule, assignment(key, after[1])
    if after[0].startswith("=") and "=" not in first and after[0] != "=":
        return 2, rule, assignment(key, after[0].lstrip("="))
    if first.endswith("=") and after[0] and "=" not in after[0]:
        return 2, rule, assignment(key, after[0])
    is_key = "." in key or after[0] in options.get(key, ())  # a word alone may be anything
    if "=" not in first and is_key and after[0] and "=" not in after[0] and not Path(first).exists():
        return 2, "has no = between path and value", assignment(key, after[0])
    return None


def _with_another_sign(words: Sequence[str], options: Options) -> _Reading | None:
    match = re.fullmatch(rf"({_KEY}?)(==|:=|=>|->|:)([^/\\=].*)", words[0])  # no URL and no file on Windows
    if match is None or (match[2] == ":" and not (match[1] in options or "." in match[1])):
        return None
    return 1, f"has {match[2]} between path and value, not =", assignment(match[1], match[3])


def _without_sign(words: Sequence[str], options: Options) -> _Reading | None:
    word = words[0]
    if "=" in word or word.startswith(("~", "-")):
        return None
    for group in sorted(options, key=rank):
        if word in options[group]:
            return 1, "has no path before it", f"{group}={word}"
    near = nearest(word, options.get("study", ()), cutoff=0.75)  # strict: nothing but the word speaks for it
    return 1, "is no path=value", f"study={near}" if near else ""


_RULES: tuple[Callable[[Sequence[str], Options], _Reading | None], ...] = (
    _split_by_the_shell,
    _apart_from_its_sign,
    _with_another_sign,
    _without_sign,
)


def nearest_key(tree: Mapping[str, Any], key: str, value: object = None) -> str:
    """The way out of a dotted path that a configuration does not have: where its value is, or the nearest path.

    value: as typed, for the word that is suggested; None for the path alone.
    """
    parts = key.split(".")
    parent, siblings = _deepest(tree, parts)
    missing = parts[len(parent)]
    path = _elsewhere(tree, key) or ".".join([*parent, *filter(None, [nearest(missing, siblings)])])
    if path == ".".join(parent):
        return did_you_mean(missing, siblings)
    rest = parts[len(parent) + 1 :] if path == ".".join([*parent, path.rpartition(".")[2]]) else []
    # correct one name of a path after the other
    if rest and value is not None and not _has(tree, [*path.split("."), *rest]):
        return nearest_key(tree, ".".join([path, *rest]), value)
    path = ".".join([path, *rest])
    return f"did you mean `{path if value is None else assignment(path, value)}`?"


def _deepest(tree: Mapping[str, Any], parts: Sequence[str]) -> tuple[list[str], list[str]]:
    """The part of a path that a tree has, and the keys below it."""
    node: Any = tree
    for depth, name in enumerate(parts):
        if not isinstance(node, Mapping) or name not in node:
            return list(parts[:depth]), list(node) if isinstance(node, Mapping) else []
        node = node[name]
    return list(parts[:-1]), []


def _has(tree: Any, parts: Sequence[str]) -> bool:
    for name in parts:
        if not isinstance(tree, Mapping) or name not in tree:
            return False
        tree = tree[name]
    return True


_MENTIONS = ("study.uncertainty.", "study.baseline.", "study.probes.")  # keys there are paths of other values


_OTHER_COMMANDS = {"out": "output_dir", "output": "output_dir", "folder": "output_dir"}
"""Names that other commands have for keys of studies."""


def _elsewhere(tree: Mapping[str, Any], key: str) -> str:
    """The one path of a tree that is a key written differently, ends with it, or ends with its last name; or ""."""
    plain = re.sub(r"[-\s]+", "_", key.replace("/", ".").strip(".").lower())
    paths = {path.lower(): path for path in _paths(tree) if not path.startswith(_MENTIONS)}
    if (alike := _OTHER_COMMANDS.get(plain, plain)) in paths:
        return paths[alike]
    for ending in (plain, plain.rpartition(".")[2]):  # the whole of what was typed, then its last name
        fitting = sorted((path for path in paths if path.endswith(f".{ending}")), key=len)
        # one path, or one that is less deep than all others: the obvious one
        if fitting and (len(fitting) == 1 or len(fitting[0]) < len(fitting[1])):
            return paths[fitting[0]]
    if "." in plain:
        return ""
    return nearest(plain, tree, cutoff=0.75) or _near_end(list(paths.values()), plain)  # a section is typed more often


def _near_end(paths: Sequence[str], name: str) -> str:
    """The path whose last name is most like one that stands alone; "" where a section is as near."""
    # the shortest path last, which stays
    ends = {path.rpartition(".")[2]: path for path in sorted(paths, key=len, reverse=True)}
    near = nearest(name, ends, cutoff=0.75)
    return ends[near] if near else ""


_NO_VALUES = ("sources", "description", "space", "question", "name", "note", "fitted_on")


def _paths(tree: Mapping[str, Any], parent: str = "") -> Iterator[str]:
    """Dotted paths of all sections and values of a tree, but not of what only describes them."""
    for name, value in tree.items():
        if name not in _NO_VALUES:
            yield f"{parent}{name}"
            if isinstance(value, Mapping):
                yield from _paths(value, f"{parent}{name}.")


def option_elsewhere(name: str, group: str, options: Options) -> str:
    """The way out of an option that a group does not have: one in a folder or file here, the nearest of the group, else
    that of another group; of a file, where it belongs.
    """
    own = list(Path().glob(f"*/{group}/{name}.yaml")) if name.isidentifier() else []
    if len(own) == 1:
        return f"write --config-dir {own[0].parts[0]}"
    if listed(group) and name.isidentifier() and Path(f"{name}.yaml").is_file():
        return f"did you mean `{group}={name}.yaml`?"
    if name.endswith((".yaml", ".yml")) and Path(name).is_file():
        stem = Path(name).stem
        return f"copy it to my_conf/{group}/{stem}.yaml, and write `{group}={stem} --config-dir my_conf`"
    if near := nearest(name, options[group], cutoff=0.75):
        return f"did you mean `{assignment(group, near)}`?"
    for other in sorted(options, key=lambda other: (other == "study", rank(other))):  # of which there is one already
        if name in options[other]:
            return f"it is an option of another group: `{assignment(other, name)}`"
    way = did_you_mean(name, options[group])
    return (
        way.replace("mean `", f"mean `{group}=") if way.startswith("did") else f"{way}; python -m dse {plural(group)}"
    )


def grammar_problem(text: str, error: Exception, parses: Callable[[str], bool]) -> Problem:
    """The problem of an override that Hydra's grammar refuses. parses: whether it takes another one."""
    key, _, value = text.partition("=")
    is_call = re.match(r"\w*[(\[{]", value) is not None  # in quotes it would be a text
    quoted = f'"{value.rstrip(",;")}"'
    way = "" if is_call or not parses(f"{key}={quoted}") else f"write `{assignment(key, quoted)}`"
    return Problem(text, f"cannot be parsed: {_plain_reason(error)}", way_out=way)


BEYOND_GRAMMAR = (AssertionError, ArithmeticError, LookupError, RecursionError, TypeError, ValueError)
"""Raised by Hydra's parser for words that are beyond its grammar."""
_REASONS = {
    r"missing EQUAL.*": "it has no =",
    r"(?:mismatched|extraneous) input '<EOF>'.*": "it ends too early",
    r"(?:mismatched|extraneous) input ('.*?')(?: expecting.*)?": r"\1 is not expected there",
    r"no viable alternative at input ('.*?')": r"\1 is not expected there",
    r"token recognition error at: ('.*?')": r"\1 needs quotes",
    r"\w+ while evaluating '.*?': (.*)": r"\1",
}
"""Messages of Hydra's parser, as patterns, and what they mean."""


def _plain_reason(error: Exception) -> str:
    line = str(error).splitlines()[0]
    reason = next((re.sub(f"^{old}$", new, line) for old, new in _REASONS.items() if re.match(f"{old}$", line)), line)
    known = "; known here: choice, range, interval, tag, int, float, glob" if "Unknown function" in reason else ""
    return reason.partition(" is incompatible")[0] + known


MOST_LISTED = 16
"""Values of a knob that a message lists one by one."""


def sweep_of(values: Sequence[Any]) -> str:
    """The shortest sweep of some values: a range of many integers that are equally far apart, else a choice."""
    if len(values) > MOST_LISTED and all(isinstance(value, int) for value in values):
        step = min(later - former for former, later in pairwise(values))
        return f"range({values[0]},{values[-1] + 1},{step})"
    return f"choice({','.join(map(str, values))})"


def instead_of_sweep(path: str, text: str, present: object) -> str:
    """The way out of a sweep where one value belongs: the number with a comma, the list, or the knob that was meant.

    present: the value that is there without it.
    """
    parts = [part.strip() for part in text.split(",")]
    if isinstance(present, (list, tuple)):
        return f"write `{assignment(path, parts)}`"
    if path.partition(".")[0] in NO_KNOBS:
        first = re.split(r"[(,)]", text)[1 if "(" in text else 0]  # the first value of a sweep
        return f"write one value, such as `{assignment(path.removesuffix('.name'), first)}`"
    search = f"to search it, write `{assignment(path, text, prefix='+space.')}`"
    number, unit = re.fullmatch(r"([\d.,]*)(.*)", text.strip(), re.DOTALL).groups()  # type: ignore[union-attr]
    meant = meant_number(number) if number else None
    if meant is None:
        return search
    plain = f"a number has no comma: `{assignment(path, f'{meant}{unit}')}`"
    is_number = bool(unit) or re.match(r"0,|.*,0", number) is not None  # and no list of two
    return f"{plain}; {search}" if is_number else f"{search}; {plain}"


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


def flag_problem(flag: str, after: Sequence[str], options: Options, known: Sequence[str]) -> Problem:
    """The problem of a flag that is none: a `path=value` with dashes before it, or a flag misspelt.

    after: the words after it.
    """
    key, equals, value = flag.lstrip("-").partition("=")
    value = value or (after[0] if after and not equals and not after[0].startswith("-") else "")
    if key in options:
        near = nearest(value, options[key]) if value else ""
        way = f"write `{key}={near}`" if near else f"write {key}=<name>"
    elif "." in key and value:
        way = f"write `{assignment(key, value)}`"
    else:
        way = did_you_mean(flag.partition("=")[0], known)
        way = way.replace("`?", f"={value}`?") if equals and value and "mean `--config" in way else way
    name = f"{flag} {after[0]}" if value and not equals and key in {*options, key if "." in key else ""} else flag
    return Problem(name if "=" not in flag else flag, "is no flag that is understood here", way_out=way)
