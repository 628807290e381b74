"""Rules between the parts of a design: where over a grid of designs they are broken, and what a design then says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dse.errors import Problem


@dataclass(frozen=True)
class Rule:
    """A rule between the parts of a design, looked at for a grid of designs at once.

    broken: where over the grid (True: everywhere). rule, way_out: texts in which `{0}`, `{1}` ... stand for the
    numbers `given`. value: what `path` holds.
    """

    path: str
    broken: ArrayLike
    rule: str
    value: Any = None
    given: tuple[Any, ...] = ()
    way_out: str = ""

    @classmethod
    def of(cls, problem: Problem) -> Rule:
        """A problem that all designs have."""
        plain = (text.replace("{", "{{").replace("}", "}}") for text in (problem.rule, problem.way_out))
        rule, way_out = plain
        return cls(problem.path, True, rule, problem.value, way_out=way_out)

    def problem(self, value: Any, given: Sequence[Any]) -> Problem:
        """The rule as a problem of a design that holds these numbers."""
        return Problem(self.path, self.rule.format(*given), value, self.way_out.format(*given))


def problems(rules: Sequence[Rule]) -> list[Problem]:
    """What is wrong with a single design."""
    return [rule.problem(rule.value, rule.given) for rule in rules if rule.broken]


def reasons(rules: Sequence[Rule], shape: tuple[int, ...]) -> tuple[NDArray[np.int32], tuple[str, ...]]:
    """(code [B] over a grid of this shape, texts): why each design is infeasible; code 0, "", if it is not."""
    code, texts = np.zeros(shape, np.int32), {"": 0}
    for rule in rules:
        broken = np.broadcast_to(np.asarray(rule.broken, np.bool_), shape)
        if not broken.any():
            continue
        numbers = [rule.value, *rule.given]
        varied = [np.broadcast_to(number, shape)[broken] for number in numbers if np.ndim(number)]
        cases, which = np.unique(np.stack([code[broken], *varied]), axis=1, return_inverse=True)
        found = []
        for before, *values in cases.T.tolist():
            told = iter(values)
            value, *given = (_plain(next(told)) if np.ndim(number) else number for number in numbers)
            text = str(rule.problem(value, given))
            earlier = list(texts)[int(before)]
            found.append(texts.setdefault(f"{earlier}; {text}" if earlier else text, len(texts)))
        code[broken] = np.array(found, np.int32)[which.reshape(-1)]
    return code.reshape(-1), tuple(texts)


def _plain(number: float) -> float | int:
    """A number of a table as it is written."""
    return int(number) if float(number).is_integer() else float(number)
