"""Rules between the parts of a design, checked over a grid of designs, and the reasons why designs are infeasible."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dse.errors import Problem


@dataclass(frozen=True)
class Rule:
    """A rule between the parts of a design, checked for a grid of designs at once.

    broken: flags over the grid (True: everywhere). rule, way_out: texts in which `{0}`, `{1}` ... stand for the
    numbers `given`. value: the value at `path`.
    """

    path: str
    broken: ArrayLike
    rule: str
    value: Any = None
    given: tuple[Any, ...] = ()
    way_out: str = ""

    @classmethod
    def of(cls, problem: Problem) -> Rule:
        """Turn a problem of all designs into a rule."""
        # texts of others are no templates
        escaped = (text.replace("{", "{{").replace("}", "}}") for text in (problem.rule, problem.way_out))
        rule, way_out = escaped
        return cls(problem.path, True, rule, problem.value, way_out=way_out)

    def problem(self, value: Any, numbers: Sequence[Any]) -> Problem:
        """Return the rule as a problem of a design with these numbers."""
        plain = [_plain(number) for number in numbers]
        return Problem(self.path, self.rule.format(*plain), _plain(value), self.way_out.format(*plain))


def problems(rules: Sequence[Rule]) -> list[Problem]:
    """Problems of a single design."""
    return [rule.problem(rule.value, rule.given) for rule in rules if rule.broken]


def reasons(rules: Sequence[Rule], shape: tuple[int, ...]) -> tuple[NDArray[np.int32], tuple[str, ...]]:
    """Reasons why designs are infeasible: code [B] over a grid of this shape, and texts; code 0, "", if feasible."""
    code, texts = np.zeros(shape, np.int32), {"": 0}
    for rule in rules:
        broken = np.broadcast_to(np.asarray(rule.broken, np.bool_), shape)
        if not broken.any():
            continue  # most rules hold everywhere
        numbers = [rule.value, *rule.given]
        varied = [np.broadcast_to(number, shape)[broken] for number in numbers if np.ndim(number)]
        # a text for each combination of numbers that occurs
        cases, which = np.unique(np.stack([code[broken], *varied]), axis=1, return_inverse=True)
        codes = []
        for before, *values in cases.T.tolist():
            varied_values = iter(values)
            value, *arguments = (next(varied_values) if np.ndim(number) else number for number in numbers)
            text = str(rule.problem(value, arguments))
            earlier = list(texts)[int(before)]  # a design may break several rules
            codes.append(texts.setdefault(f"{earlier}; {text}" if earlier else text, len(texts)))
        code[broken] = np.array(codes, np.int32)[which.reshape(-1)]
    return code.reshape(-1), tuple(texts)


def _plain(value: Any) -> Any:
    """Convert a number that is integral to int, one of NumPy to one of Python; other values are as they are."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.item()
    return int(value) if isinstance(value, float) and value.is_integer() else value
