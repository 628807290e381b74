"""Expressions of the table of a model hub's types: arithmetic, comparison and choice over keys of a file, as data.

The texts are ours (`hub_types.yaml`); the values they meet are a stranger's: whatever these are, an
expression has a value or raises `UnfitValue`. A key that is absent is None, which counts as 0 in sums and as no in
conditions.
"""

from __future__ import annotations

import ast
import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any

Lookup = Callable[[str], Any]
_OPERATORS: Mapping[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    # a list that the file lacks holds nothing
    ast.In: lambda value, values: value in (() if values is None else values),
    ast.NotIn: lambda value, values: value not in (() if values is None else values),
    # `is list` asks for the type, `is none` for the value
    ast.Is: lambda value, kind: isinstance(value, list) if kind is list else value is kind,
    ast.IsNot: lambda value, kind: not isinstance(value, list) if kind is list else value is not kind,
}
_ARITHMETIC = (ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod)
_WORDS: Mapping[str, Any] = {"true": True, "false": False, "none": None, "list": list}
# numbers of a file are a stranger's: products of them must not grow without end
_LARGEST = 2**62


class UnfitValue(Exception):
    """A value that an expression cannot be computed with."""


# texts are a fixed table, and are evaluated for every layer of every model
@functools.cache
def parsed_rule(text: str) -> ast.expr:
    """The tree of an expression."""
    return ast.parse(" ".join(text.split()), mode="eval").body


@functools.cache
def names_in(text: str) -> frozenset[str]:
    """Names that an expression mentions, whatever it comes to."""
    return frozenset(node.id for node in ast.walk(parsed_rule(text)) if isinstance(node, ast.Name))


def evaluate(text: str, lookup: Lookup) -> Any:
    """The value of an expression whose names are looked up. Raises UnfitValue."""
    try:
        # whatever a value of a file does to an operator ends as one kind of error
        return _value(parsed_rule(text), lookup)
    except (TypeError, ValueError, ArithmeticError, LookupError) as error:
        raise UnfitValue(f"{text}: {error}") from None


def _value(node: ast.expr, lookup: Lookup) -> Any:
    """The value of a node of an expression."""
    # only kinds in the table are computed, so that no expression can call or reach anything else
    if type(node) not in _NODES:
        raise ValueError(f"an expression of a kind that is not read: {ast.unparse(node)}")
    return _NODES[type(node)](node, lookup)


def _unary(node: ast.UnaryOp, lookup: Lookup) -> Any:
    value = _value(node.operand, lookup)
    return not value if isinstance(node.op, ast.Not) else -value


def _binary(kind: ast.operator | ast.cmpop, left: Any, right: Any) -> Any:
    """The value of two operands; in sums and products none is 0, and numbers stay within bounds."""
    if not isinstance(kind, _ARITHMETIC):
        return _OPERATORS[type(kind)](left, right)
    # an absent width adds nothing
    numbers = [0 if value is None else value for value in (left, right)]
    if not all(isinstance(value, int) and abs(value) <= _LARGEST for value in numbers):
        raise ValueError("no whole number of a width")
    return _OPERATORS[type(kind)](*numbers)


def _either(node: ast.BoolOp, lookup: Lookup) -> Any:
    """The first operand that decides."""
    value: Any = None
    for operand in node.values:
        value = _value(operand, lookup)
        # `or` ends at the first true operand, `and` at the first false one
        if bool(value) == isinstance(node.op, ast.Or):
            break
    return value


def _entry(values: Any, place: Any) -> Any:
    """An entry of a list or of a section; None of what is absent."""
    if values is None:
        return None
    if isinstance(values, dict):
        return values.get(place)
    # Python would count from the end, where a layer number is out of range
    if isinstance(place, int) and place < 0:
        raise ValueError("counts from the end")
    return values[place]


_NODES: Mapping[type, Callable[[Any, Lookup], Any]] = {
    ast.Constant: lambda node, _: node.value,
    ast.Name: lambda node, lookup: _WORDS[node.id] if node.id in _WORDS else lookup(node.id),
    ast.BinOp: lambda node, lookup: _binary(node.op, _value(node.left, lookup), _value(node.right, lookup)),
    ast.Compare: lambda node, lookup: _binary(
        node.ops[0], _value(node.left, lookup), _value(node.comparators[0], lookup)
    ),
    ast.IfExp: lambda node, lookup: _value(node.body if _value(node.test, lookup) else node.orelse, lookup),
    ast.BoolOp: _either,
    ast.UnaryOp: _unary,
    ast.List: lambda node, lookup: [_value(entry, lookup) for entry in node.elts],
    ast.Subscript: lambda node, lookup: _entry(_value(node.value, lookup), _value(node.slice, lookup)),
    ast.Call: lambda node, lookup: len(_value(node.args[0], lookup) or ()),  # len, the one function
}
