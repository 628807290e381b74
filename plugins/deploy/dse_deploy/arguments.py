"""Options of commands: names and values among the words of a command line."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dse.errors.parsing import parse_yaml
from dse_deploy.settings import Setting
from studies.plan.plan_file import flattened

Values = Iterator[tuple[str, Any]]
# 18 digits fit into 8 bytes
_WHOLE = re.compile(r"-?\d{1,18}")
_COMMAND = re.compile(r"-[eilux]*c")  # of a shell: a script follows
# a dash and a digit is a negative number, and no option
_OPTION = re.compile(r"--?[A-Za-z]|--$")
# prefixes of variables that tools own: one without a known meaning may still change a run
_OF_TOOL = re.compile(r"(VLLM|SGLANG|SGL|NCCL|RCCL|NVTE|NVSHMEM|TLLM|TRTLLM|TORCH_NCCL|MORI|DEEPEP)_")
_BOOLEANS = ("true", "false")
# short options of vLLM
_SECTIONS: Mapping[str, str] = {"cc": "compilation-config", "O": "compilation-config", "sc": "speculative-config"}


def plain(name: str) -> str:
    """Name of a setting, in which tools take dashes for underscores; without those in front, of a command line."""
    return name.lstrip("-").replace("_", "-")


def scalar(text: str) -> Any:
    """A whole number, true, false, or the text itself."""
    if _WHOLE.fullmatch(text):
        return int(text)
    return {"true": True, "false": False}.get(text.lower(), text)


def setting_of(name: str, by_name: Mapping[str, Setting]) -> Setting | None:
    """The setting that an option, or a variable of the environment, is; None where none is known."""
    return by_name.get(plain(name))


def is_of_tool(variable: str, by_name: Mapping[str, Setting]) -> bool:
    """Tell whether a variable of the environment is one that a tool or a library of collectives reads."""
    return plain(variable) in by_name or bool(_OF_TOOL.match(variable))


def is_option(word: str) -> bool:
    """Tell whether a word is the name of an option, perhaps with its value."""
    return bool(_OPTION.match(word))


def has_script(words: Sequence[str], place: int) -> bool:
    """Tell whether a word is the option of a shell that a script follows: `bash -c "..."`."""
    # a script of one word is a program, whose name is read as any other
    return bool(_COMMAND.fullmatch(words[place])) and len(" ".join(words[place + 1 : place + 2]).split()) > 1


def is_value(words: Sequence[str], place: int) -> bool:
    """Tell whether a word is what follows an option."""
    return place > 0 and is_option(words[place - 1]) and "=" not in words[place - 1] and words[place - 1] != "--"


def options(words: Sequence[str], by_name: Mapping[str, Setting]) -> Values:
    """Yield the options among the words of a command, with what follows them."""
    for place, word in enumerate(words):
        if not is_option(word) or word == "--" or _is_of_a_shell(words, place):
            continue
        name, equals, value = word.partition("=")
        # JSON values have sections below the option's own name
        setting = setting_of(_path_of(name), by_name)
        following = words[place + 1] if place + 1 < len(words) else "--"
        # argparse's BooleanOptionalAction: `--no-enable-x` denies `--enable-x`
        if setting is None and plain(name).startswith("no-"):
            denied = by_name.get(plain(name)[3:])
            if denied is not None and denied.is_flag:
                yield name.replace("no-", "", 1), False
                continue
        # docker and kubectl: `-e NAME=value`
        if plain(name) in ("e", "env") and "=" in following:  # of a container
            variable, _, value = following.partition("=")
            if is_of_tool(variable, by_name):
                yield variable, scalar(value)
        # nargs="+": all words up to the next option are one value
        elif setting and setting.several:
            yield name, " ".join(([value] if equals else []) + list(_up_to_option(words[place + 1 :])))
        elif equals:
            yield from _leaves(name, value)
        # a flag takes no value, unless true or false is spelled out
        elif is_option(following) or (setting and setting.is_flag and following.lower() not in _BOOLEANS):
            yield _path_of(name), True
        else:
            yield from _leaves(name, following)


def _is_of_a_shell(words: Sequence[str], place: int) -> bool:
    """Tell whether an option is one of a shell, or of Python, in front of what runs."""
    return has_script(words, place) or (words[place] == "-m" and place > 0 and "python" in words[place - 1])


def _up_to_option(words: Sequence[str]) -> Iterator[str]:
    """Yield the words in front of the next option."""
    for word in words:
        if is_option(word):
            return
        yield word


def _leaves(name: str, value: str) -> Values:
    """Yield a value, or those of the JSON that it is, by their paths."""
    # options such as --compilation-config hold JSON, which YAML reads as well
    if not value.lstrip().startswith("{"):
        yield _path_of(name), scalar(value)
        return
    tree = parse_yaml(value, "settings")
    for path, leaf in flattened(_path_of(name), tree) if isinstance(tree, Mapping) else [(name, value)]:
        yield path, scalar(leaf) if isinstance(leaf, str) else leaf


def _path_of(name: str) -> str:
    """Name of an option, of sections by their short names with their long ones."""
    first, dot, below = name.partition(".")
    return f"{_SECTIONS.get(first.lstrip('-'), first)}{dot}{below}"
