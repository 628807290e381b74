"""Keys and constants that a file sets twice, of which a reader would silently take the last."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import yaml

from dse.errors.parsing import LOADER

TWICE = "is there twice, and only the last one would count"
"""The rule that a key breaks which a mapping has once more."""
_CHANGING = ("update", "setdefault", "pop", "popitem", "clear", "__setitem__", "__delitem__", "__ior__")


def repeated_keys(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of each key that a mapping of a text has once more.

    text: in YAML, or in JSON, which was read without a problem. Raises yaml.YAMLError for JSON that is no YAML.
    """
    level = [yaml.compose(text, Loader=LOADER)]
    while level:
        node, names = level.pop(), set[str]()
        if isinstance(node, yaml.SequenceNode):
            level.extend(node.value)
        for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
            level.append(value)
            if isinstance(key, yaml.ScalarNode):
                if key.value in names:
                    yield key.start_mark.line + 1, str(key.value)
                names.add(key.value)


def repeated_literals(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of each key that a literal of Python has once more."""
    for node in ast.walk(tree):
        names = set[object]()
        for key in node.keys if isinstance(node, ast.Dict) else ():
            if isinstance(key, ast.Constant):
                if key.value in names:
                    yield key.lineno, str(key.value)
                names.add(key.value)


def definition(module: ast.Module, name: str) -> ast.Assign | ast.AnnAssign | None:
    """The first statement of a module that gives a value to a constant alone; None where there is none."""
    for node in module.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if [target.id for target in targets if isinstance(target, ast.Name)] == [name] and len(targets) == 1:
                return node
    return None


def later_changes(module: ast.Module, name: str, first: ast.AST) -> Iterator[int]:
    """Yield the lines of a module that set or change a constant beside its definition.

    These are assignments to it or to its parts, deletions, imports of the name, and calls of methods that change it.
    """
    defining = set(ast.walk(first))
    for node in ast.walk(module):
        if node not in defining and _changes(node, name):
            yield getattr(node, "lineno", 1)


def _changes(node: ast.AST, name: str) -> bool:
    if isinstance(node, ast.alias):
        return (node.asname or node.name) == name
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.attr in _CHANGING and _root(node.func) == name
    if not isinstance(node, ast.Name | ast.Subscript | ast.Attribute):
        return False
    return not isinstance(node.ctx, ast.Load) and _root(node) == name


def _root(node: ast.AST) -> str:
    """Name of the variable of which an expression takes a part; "" for another expression."""
    while isinstance(node, ast.Subscript | ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""
