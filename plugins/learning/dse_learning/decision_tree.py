"""A small decision tree that picks an option from numbers that are known before anything runs.

A tree has three forms that give the same answers: text, a Python function that imports nothing, and JSON.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dse.analysis.contexts import Option


@dataclass(frozen=True)
class Feature:
    """A number to compare with a threshold: a product or ratio of inputs, or whether an input is a certain text.

    paths: the factors; per: the factors of the divisor. text: what the input at the only path is compared with.
    """

    paths: tuple[str, ...]
    per: tuple[str, ...] = ()
    text: str | None = None

    @property
    def inputs(self) -> tuple[str, ...]:
        """Paths of all inputs that the feature looks at."""
        return (*self.paths, *self.per)

    def of(self, inputs: Mapping[str, Any]) -> Any:
        """Compute the number, or an array of numbers, from inputs by path."""
        if self.text is not None:
            value = inputs[self.paths[0]]
            return np.asarray(value == self.text, float) if isinstance(value, np.ndarray) else float(value == self.text)
        above, below = (prod(_real(inputs[path]) for path in factors) for factors in (self.paths, self.per))
        return above / below if self.per else above

    def expression(self, names: Mapping[str, str]) -> str:
        """Write the feature as an expression over names by path."""
        above, below = (" * ".join(names[path] for path in factors) for factors in (self.paths, self.per))
        if self.text is not None:
            return f"{above} == {self.text!r}"
        return f"{above} / ({below})" if len(self.per) > 1 else f"{above} / {below}" if self.per else above


def _real(value: Any) -> Any:
    # whole numbers would wrap around in products
    return value.astype(float) if isinstance(value, np.ndarray) else float(value)


@dataclass(frozen=True)
class Leaf:
    """An option with its record where the tree was learned: number of contexts, mean and largest regret there."""

    option: Option
    num_contexts: int
    mean_regret: float
    max_regret: float


@dataclass(frozen=True)
class Split:
    """`below` where the feature is at most the threshold, else `above`."""

    feature: Feature
    threshold: float
    below: Node
    above: Node


Node = Leaf | Split


@dataclass(frozen=True)
class Tree:
    """Options over the paths `choose`, picked by splits from a root."""

    choose: tuple[str, ...]
    root: Node

    def pick(self, inputs: Mapping[str, Any]) -> Option:
        """Pick the option for inputs by path. Raises KeyError for a needed input that is absent."""
        node = self.root
        while isinstance(node, Split):
            node = node.below if node.feature.of(inputs) <= node.threshold else node.above
        return node.option

    def picks(self, inputs: Mapping[str, NDArray[Any]], count: int) -> list[Option]:
        """Pick the options for `count` rows of inputs, by path."""
        options: list[Option] = [()] * count
        waiting = [(self.root, np.arange(count))]
        while waiting:  # rows go down the tree together
            node, rows = waiting.pop()
            if isinstance(node, Split):
                below = node.feature.of({path: inputs[path][rows] for path in node.feature.inputs}) <= node.threshold
                waiting += [(node.below, rows[below]), (node.above, rows[~below])]
            else:
                for row in rows.tolist():
                    options[row] = node.option
        return options

    @property
    def nodes(self) -> Iterator[Node]:
        """All nodes, the root first, below before above."""
        waiting = [self.root]
        while waiting:
            node = waiting.pop()
            yield node
            if isinstance(node, Split):
                waiting += [node.above, node.below]  # the last one is taken first

    @property
    def names(self) -> dict[str, str]:
        """Short names of the inputs of the tree, by path: the last words that tell them apart, as identifiers."""
        paths = dict.fromkeys(path for node in self.nodes if isinstance(node, Split) for path in node.feature.inputs)
        return short_names(tuple(paths))

    def text(self) -> str:
        """Write the tree for a person: nested conditions over short names, which are explained first.

        >>> leaves = Leaf(("a",), 1, 0, 0), Leaf(("b",), 1, 0, 0)
        >>> tree = Tree(("way",), Split(Feature(("size.m",)), 2.0, *leaves))
        >>> print(tree.text())
        m = size.m
        <BLANKLINE>
        if m <= 2:
            way = a  [1 context; regret 0 % mean, 0 % most]
        else:
            way = b  [1 context; regret 0 % mean, 0 % most]
        """
        names = self.names
        head = [f"{name} = {path}" for path, name in names.items()]
        return "\n".join([*head, "", *self._lines(self.root, names, 0)] if head else self._lines(self.root, names, 0))

    def _lines(self, node: Node, names: Mapping[str, str], depth: int) -> list[str]:
        pad = "    " * depth
        if isinstance(node, Leaf):
            contexts = f"{node.num_contexts} context{'s' if node.num_contexts != 1 else ''}"
            regret = f"regret {100 * node.mean_regret:.2g} % mean, {100 * node.max_regret:.2g} % most"
            return [f"{pad}{option_said(node.option, self.choose)}  [{contexts}; {regret}]"]
        below, above = (self._lines(side, names, depth + 1) for side in (node.below, node.above))
        if node.feature.text is not None:
            return [f"{pad}if {node.feature.expression(names)}:", *above, f"{pad}else:", *below]
        return [f"{pad}if {node.feature.expression(names)} <= {number(node.threshold)}:", *below, f"{pad}else:", *above]

    def python(self, about: str) -> str:
        """Write a module with one function, `choose`, that imports nothing. about: its docstring."""
        names = self.names
        arguments = ", ".join(["*", *names.values()]) if names else ""
        inputs = [f"    {name}: {path}" for path, name in names.items()]
        # the text becomes a docstring
        first, *following = about.replace("\\", "\\\\").replace('"""', "'''").splitlines()
        lines = [first, *(f"    {line}".rstrip() for line in following), *[""] * bool(inputs), *inputs]
        quoted = "\n".join(lines)
        head = f'def choose({arguments}):\n    """{quoted}\n    """\n'
        return head + "\n".join(self._statements(self.root, names, 1)) + "\n"

    def _statements(self, node: Node, names: Mapping[str, str], depth: int) -> list[str]:
        pad = "    " * depth
        if isinstance(node, Leaf):
            return [f"{pad}return {dict(zip(self.choose, node.option, strict=True))!r}"]
        below, above = (self._statements(side, names, depth + 1) for side in (node.below, node.above))
        if node.feature.text is not None:
            return [f"{pad}if {node.feature.expression(names)}:", *above, *below_without_else(below)]
        real = {path: f"float({name})" for path, name in names.items()}  # as `Feature.of` computes
        # all digits: the function must pick as the tree does
        return [f"{pad}if {node.feature.expression(real)} <= {node.threshold!r}:", *below, *below_without_else(above)]

    def json(self) -> dict[str, Any]:
        """Convert the tree to JSON, for programs."""
        return {"choose": list(self.choose), "inputs": list(self.names), "root": _json(self.root)}

    @classmethod
    def of_json(cls, tree: Mapping[str, Any]) -> Tree:
        """Read a tree that `json` wrote."""
        return cls(tuple(tree["choose"]), _node(tree["root"]))


def below_without_else(lines: Sequence[str]) -> list[str]:
    """Dedent statements by one step, as they follow a branch that has returned."""
    return [line[4:] for line in lines]


def _json(node: Node) -> dict[str, Any]:
    if isinstance(node, Leaf):
        return {**vars(node), "option": list(node.option)}
    feature = {"paths": list(node.feature.paths), "per": list(node.feature.per), "text": node.feature.text}
    split = {"feature": feature, "at_most": node.threshold}
    return {**split, "then": _json(node.below), "else": _json(node.above)}


def _node(tree: Mapping[str, Any]) -> Node:
    if "option" in tree:
        return Leaf(tuple(tree["option"]), tree["num_contexts"], tree["mean_regret"], tree["max_regret"])
    record = tree["feature"]
    feature = Feature(tuple(record["paths"]), tuple(record["per"]), record["text"])
    return Split(feature, tree["at_most"], _node(tree["then"]), _node(tree["else"]))


def option_said(option: Option, choose: Sequence[str]) -> str:
    """Write an option such as `schedule.name = serial, schedule.comm_engine = dma`, without knobs that do not count."""
    return ", ".join(f"{path} = {value}" for path, value in zip(choose, option, strict=True) if value is not None)


def number(value: float) -> str:
    """Write a threshold exactly, as a person would.

    >>> number(8192.0), number(0.35), number(3e13)
    ('8192', '0.35', '3e+13')
    """
    return next((text for text in (f"{value:g}", str(int(value))) if float(text) == value), repr(value))


def short_names(paths: Sequence[str]) -> dict[str, str]:
    """Shorten paths to identifiers: the fewest last words that tell a path from the other paths.

    >>> short_names(["gemm.m", "gemm.k", "conv.k"])
    {'gemm.m': 'm', 'gemm.k': 'gemm_k', 'conv.k': 'conv_k'}
    """
    names: dict[str, str] = {}
    for path in paths:
        words = path.split(".")
        tails = (".".join(words[-count:]) for count in range(1, len(words) + 1))
        # the fewest whole words
        tail = next(
            candidate for candidate in tails if sum(f".{other}".endswith(f".{candidate}") for other in paths) == 1
        )
        name = re.sub(r"\W", "_", tail)
        names[path] = f"_{name}" if not name.isidentifier() or keyword.iskeyword(name) or name == "float" else name
    return names


def between(low: float, high: float) -> float:
    """Find the shortest decimal number well between two (low <= it < high), in the middle half (of logarithms if > 0).

    >>> between(4096, 16384), between(0.3, 0.31), between(-1, 1)
    (8000.0, 0.305, 0.0)
    """
    near, far = _middle_half(low, high)
    for digits in range(1, 17):
        # the middle, in logarithms where numbers are positive
        shortest = float(f"{near**0.5 * far**0.5 if near > 0 else near / 2 + far / 2:.{digits}g}")
        if near <= shortest <= far:
            return shortest
    return low  # neighbouring floats: nothing lies between


def _middle_half(low: float, high: float) -> tuple[float, float]:
    if low > 0:
        return low**0.75 * high**0.25, low**0.25 * high**0.75
    return 0.75 * low + 0.25 * high, 0.25 * low + 0.75 * high
