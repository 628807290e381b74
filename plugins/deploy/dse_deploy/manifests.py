"""Files around launches: manifests of Kubernetes and files of docker compose, whose containers run command lines.

`command:`, `args:` and `entrypoint:` of any container are a command line, with its environment (`env:`); a ConfigMap
holds scripts, and files that a launch names. `script_of` writes them as one launch script, each container at its line.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml

from dse.errors import ConfigError
from dse.errors.parsing import LOADER, parse_yaml
from dse_deploy.arguments import has_script

# "---" begins a document, perhaps with a comment
_BEGIN = re.compile(r"^---(?:[ \t].*)?$", re.MULTILINE)
# Kubernetes replaces $(NAME) itself, before any shell
_REFERENCE = re.compile(r"\$\(([A-Za-z_]\w*)\)")
_WORDS = ("entrypoint", "command", "args")
_CHECKS = ("exec", "livenessProbe", "readinessProbe", "startupProbe", "healthcheck", "lifecycle")
"""Commands of these ask whether a container works, and start nothing."""
_SERVICE = ("image", "build", "command", "entrypoint")
_SCRIPT_ENDS = (".sh", ".bash")
_END = "END_OF_FILE"


def manifest_kind(text: str) -> str:
    """What a text is: a manifest, of which kinds, or a file of docker compose; "" for another one."""
    trees = [tree for tree in _trees(text) if isinstance(tree, Mapping)]
    kinds = [str(tree["kind"]) for tree in trees if "apiVersion" in tree and "kind" in tree]
    if kinds:
        return f"a manifest of Kubernetes ({', '.join(dict.fromkeys(kinds))})"
    services = [service for tree in trees for service in _values(tree.get("services"))]
    if any(isinstance(service, Mapping) and set(service) & set(_SERVICE) for service in services):
        return "a file of docker compose"
    return ""


def _values(tree: Any) -> Sequence[Any]:
    return list(tree.values()) if isinstance(tree, Mapping) else []


def _documents(text: str) -> list[str]:
    """The documents of a text, each with empty lines in place of those before it."""
    parts = list[str]()
    start = 0
    for end in [*(match.start() for match in _BEGIN.finditer(text)), len(text)]:
        # empty lines keep line numbers as in the file
        parts.append("\n" * text.count("\n", 0, start) + _BEGIN.sub("", text[start:end], count=1))
        start = end
    return [part for part in parts if part.strip()]


def _trees(text: str) -> Iterator[Any]:
    """Yield the documents that are YAML."""
    for document in _documents(text):
        try:
            yield parse_yaml(document, "settings")
        except ConfigError:
            continue


def script_of(text: str) -> str:
    """The launch script that the containers of a manifest run. Raises ConfigError for what is no YAML."""
    lines, placed = list[str](), 0
    files: list[str] = []
    for document in _documents(text):
        parse_yaml(document, "settings")  # within limits, and without aliases
        node: yaml.Node | None = yaml.compose(document, Loader=LOADER)
        for line, launch in _launches(node):
            # a launch begins in the line of its container, for messages
            lines += [""] * (line - placed)
            lines += launch.split("\n")
            placed = len(lines)
        files += _files(node)
    return "\n".join([*lines, *files, ""])


def _fields(node: yaml.Node | None) -> dict[str, yaml.Node]:
    """The values of a mapping by their keys; none of another node."""
    return {str(key.value): value for key, value in node.value} if isinstance(node, yaml.MappingNode) else {}


def _launches(node: yaml.Node | None) -> Iterator[tuple[int, str]]:
    """Yield the line of each container, from 0, and what it runs."""
    fields = _fields(node)
    # entrypoint before command before args, as they are joined
    texts = [word for name in _WORDS if name in fields for word in _words(fields[name])]
    if texts and node is not None:
        yield node.start_mark.line, _launch(texts, dict(_environment(fields)))
    children = node.value if isinstance(node, yaml.SequenceNode) else ()
    # probes run commands as well, and start nothing
    for child in [*children, *(value for name, value in fields.items() if name not in (*_CHECKS, *_WORDS))]:
        yield from _launches(child)


def _words(node: yaml.Node) -> list[str]:
    """Words of a command: those of a list, or the text of a shell, marked by the blank that it begins with."""
    if isinstance(node, yaml.SequenceNode):
        return [str(word.value) for word in node.value if isinstance(word, yaml.ScalarNode)]
    # a text goes through a shell, a list does not
    return [f" {node.value}"] if isinstance(node, yaml.ScalarNode) and node.value else []


def _environment(fields: Mapping[str, yaml.Node]) -> Iterator[tuple[str, str]]:
    """Yield variables of a container, as Kubernetes and compose write them."""
    for node in (fields[name] for name in ("env", "environment") if name in fields):
        yield from ((name, str(value.value)) for name, value in _fields(node).items() if _is_plain(value))
        for item in node.value if isinstance(node, yaml.SequenceNode) else ():
            pair = _fields(item)
            if {"name", "value"} <= set(pair) and all(map(_is_plain, pair.values())):
                yield str(pair["name"].value), str(pair["value"].value)
            elif _is_plain(item) and "=" in item.value:
                name, _, value = str(item.value).partition("=")
                yield name, value


def _is_plain(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode)


def _launch(words: Sequence[str], environment: Mapping[str, str]) -> str:
    """A command line with its environment: the script itself where a shell runs one."""
    # unknown references stay, as Kubernetes leaves them
    words = [_REFERENCE.sub(lambda match: environment.get(match[1], match[0]), word) for word in words]
    known = {name: value for name, value in environment.items() if re.fullmatch(r"[A-Za-z_]\w*", name)}
    assigned = [f"{name}={_in_quotes(value)}" for name, value in known.items()]
    for place, word in enumerate(words):
        if not word.startswith(" ") and has_script(words, place):
            # variables become lines in front of the script that the container's shell runs
            return "\n".join([*assigned, words[place + 1].strip()])
    return " ".join([*assigned, *(word.strip() if word.startswith(" ") else _in_quotes(word) for word in words)])


def _in_quotes(word: str) -> str:
    """A word as a shell reads it, which puts values in place of variables."""
    # double quotes keep references alive; what they would change itself is quoted singly
    return f'"{word}"' if "$" in word and not set('"`\\') & set(word) else shlex.quote(word)


def _files(node: yaml.Node | None) -> Iterator[str]:
    """Yield the scripts of a ConfigMap, and its files as a script writes them."""
    fields = _fields(node)
    if "kind" not in fields or fields["kind"].value != "ConfigMap":
        return
    for name, value in _fields(fields.get("data")).items():
        if not _is_plain(value):
            continue
        if name.endswith(_SCRIPT_ENDS) or value.value.startswith("#!"):
            yield str(value.value)
        elif name.endswith((".yaml", ".yml")):
            # a here-document, as `split_documents` reads it back
            yield f"cat > {shlex.quote(name)} <<'{_END}'\n{str(value.value).rstrip()}\n{_END}"
