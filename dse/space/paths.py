"""Values at dotted paths of trees and frozen models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def get_path(tree: Any, path: str) -> Any:
    """The value at a dotted path of a tree or a frozen model; None where there is none."""
    for name in path.split("."):
        tree = tree.get(name) if isinstance(tree, Mapping) else getattr(tree, name, None)
    return tree


def has_path(tree: Any, path: str) -> bool:
    """Tell whether a tree has a value at a dotted path, be it None."""
    for name in path.split("."):
        if not isinstance(tree, Mapping) or name not in tree:
            return False
        tree = tree[name]
    return True


def set_path(tree: dict[str, Any], path: str, value: Any) -> None:
    """Set the value at a dotted path in place. Raises KeyError where its parent is not a mapping."""
    *parents, last = path.split(".")
    for name in parents:
        tree = tree[name]
        if not isinstance(tree, dict):
            raise KeyError(path)
    tree[last] = value
