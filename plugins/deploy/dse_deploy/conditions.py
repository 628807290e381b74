"""Conditions of launch scripts (`[ ... ]`, `[[ ... ]]`, `test`) that the script decides, and their branches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

TESTS: Mapping[str, str] = {"[": "]", "[[": "]]", "test": ""}
"""Commands that test a condition -> the word that ends them."""
_OPENS, _CLOSES = ("if", "case", "for", "while", "until"), ("fi", "esac", "done")
_NUMBERS: Mapping[str, Callable[[int, int], bool]] = {
    "-eq": lambda a, b: a == b,
    "-ne": lambda a, b: a != b,
    "-gt": lambda a, b: a > b,
    "-ge": lambda a, b: a >= b,
    "-lt": lambda a, b: a < b,
    "-le": lambda a, b: a <= b,
}
_Outcome = Literal["yes", "no", "maybe", "past"]
"""Of a branch: whether a run goes through it; past: an earlier one of the same `if` was."""


def decided(words: Sequence[str]) -> bool | None:
    """Tell whether a test holds, from the words of its command; None where only a run would know."""
    if not words or words[0] not in TESTS:
        return None
    end = TESTS[words[0]]
    if end and words[-1] != end:
        return None
    inner = list(words[1 : -1 if end else len(words)])
    if any("$" in word or "`" in word for word in inner):
        return None
    if inner[:1] == ["!"]:
        holds = _holds(inner[1:])
        return None if holds is None else not holds
    return _holds(inner)


def _holds(words: Sequence[str]) -> bool | None:
    """Tell whether operands and their operator hold."""
    match words:
        case [operand] if not operand.startswith("-"):
            return bool(operand)
        case ["-z" | "-n" as operator, operand]:
            return bool(operand) == (operator == "-n")
        case [left, "=" | "==" | "!=" as operator, right] if not set(right) & set("*?["):
            return (left == right) == (operator != "!=")
        case [left, operator, right] if operator in _NUMBERS and left.isdigit() and right.isdigit():
            return _NUMBERS[operator](int(left), int(right))
    return None


@dataclass
class Branches:
    """Conditions and loops that are open at a place of a script, innermost last."""

    outcomes: list[_Outcome] = field(default_factory=list)
    joined: int = 0
    """How many of them end with the line: `[ ... ] && command`."""

    @property
    def is_skipped(self) -> bool:
        """True where a run does not come by."""
        return any(outcome in ("no", "past") for outcome in self.outcomes)

    @property
    def is_open(self) -> bool:
        """True where only a run would know whether it comes by."""
        return "maybe" in self.outcomes

    def turn(self, word: str) -> bool:
        """Go into or out of a condition or a loop, where a word at the start of a command says so."""
        if word in _OPENS:
            self.outcomes.append("maybe")
        elif word in _CLOSES:
            if self.outcomes:
                self.outcomes.pop()
        elif word in ("else", "elif"):
            if self.outcomes and self.outcomes[-1] != "maybe":
                self.outcomes[-1] = "yes" if self.outcomes[-1] == "no" else "past"
        else:
            return False
        return True

    def decide(self, holds: bool | None, *, is_first: bool) -> None:
        """Take the outcome of the condition of an `if`, or of an `elif`, which counts where nothing before it held."""
        if holds is not None and self.outcomes and (is_first or self.outcomes[-1] == "yes"):
            self.outcomes[-1] = "yes" if holds else "no"
        elif holds is None and self.outcomes and self.outcomes[-1] == "yes":
            self.outcomes[-1] = "maybe"

    def join(self, holds: bool | None) -> None:
        """Let what follows up to the end of the line run where a test holds."""
        self.outcomes.append("maybe" if holds is None else "yes" if holds else "no")
        self.joined += 1

    def turn_round(self) -> None:
        """Let what follows `||` run where what a test decided does not: `[ ... ] && one || other`."""
        if self.joined and self.outcomes[-1] != "maybe":
            self.outcomes[-1] = "no" if self.outcomes[-1] == "yes" else "yes"

    def end_line(self) -> None:
        """Leave what was joined to a test."""
        del self.outcomes[len(self.outcomes) - self.joined :]
        self.joined = 0
