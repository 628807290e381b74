"""Conditions of launch scripts (`[ ... ]`, `[[ ... ]]`, `test`, `case`) that the script decides, and their branches."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal

from dse.errors.parsing import whole_number

TESTS: Mapping[str, str] = {"[": "]", "[[": "]]", "test": ""}
"""Commands that test a condition -> the word that ends them."""
# how often a loop runs changes no setting
_LOOPS = ("for", "while", "until")  # whose body is taken to run
_OPENS, _CLOSES = ("if", "case", *_LOOPS), ("fi", "esac", "done")
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
    # a variable without a known value
    if any("$" in word or "`" in word for word in inner):
        return None
    # `[ ! -z "$x" ]`
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
        # the right side of [[ ]] may be a pattern: only the run decides then
        case [left, "=" | "==" | "!=" as operator, right] if not set(right) & set("*?["):
            return (left == right) == (operator != "!=")
        case [left, operator, right] if operator in _NUMBERS:
            # a shell fails on what is no number: nothing is known
            numbers = [number for number in map(whole_number, (left, right)) if number is not None]
            return _NUMBERS[operator](*numbers) if len(numbers) == 2 else None
    return None


def default_of(words: Sequence[str]) -> str:
    """The variable of a test that a value by default follows, as in `[ -z "$TP" ] && TP=8`; "" of another test."""
    match = _UNSET.fullmatch(" ".join(words[1:]))
    return match[1] if match is not None and words[0] in TESTS else ""


_UNSET = re.compile(r"-z \$\{?([A-Za-z_]\w*)(?::?-)?\}?(?: \]{1,2})?")


def matches(subject: str, patterns: Sequence[str]) -> bool | None:
    """Tell whether a word fits one of the patterns of a `case`; None where only a run would know."""
    if any("$" in text or "`" in text for text in (subject, *patterns)):
        return None
    # `case` matches as file names do
    return any(fnmatchcase(subject, pattern) for pattern in patterns)


@dataclass
class _Branch:
    """A condition or a loop. word: that opened it. subject: of a `case`. default: see `default_of`.

    first: variables that the branch as it stands is the first to set, with values; before: those of branches before it.
    is_complete: whether one of its branches runs in any case. has_begun: whether a pattern of a `case` came by.
    """

    word: str
    outcome: _Outcome = "maybe"
    subject: str = ""
    default: str = ""
    is_complete: bool = False
    has_begun: bool = False
    first: dict[str, list[str]] = field(default_factory=dict)
    before: list[dict[str, list[str]]] = field(default_factory=list)

    @property
    def is_open(self) -> bool:
        """True where only a run would know whether it comes by."""
        return self.outcome == "maybe"

    @property
    def names_before(self) -> set[str]:
        """Variables that branches before the one that the script is in were the first to set."""
        return {name for first in self.before for name in first}

    def left(self) -> dict[str, list[str] | None]:
        """Variables that were set in it alone; with values where all its branches agree, None where a run decides."""
        every = [*self.before, self.first]
        names = dict.fromkeys(name for first in every for name in first)
        return {name: self._values_of_all(name, every) for name in names}

    def _values_of_all(self, name: str, every: Sequence[Mapping[str, list[str]]]) -> list[str] | None:
        values = [first[name] for first in every if name in first]
        # `[ -z "$TP" ] && TP=8` leaves 8 in any case that the script itself can know
        is_sure = name == self.default or (self.is_complete and len(values) == len(every))
        return values[0] if is_sure and all(value == values[0] for value in values) else None


@dataclass
class Branches:
    """Conditions and loops that are open at a place of a script, innermost last."""

    stack: list[_Branch] = field(default_factory=list)
    joined: int = 0
    """How many of them end with the line: `[ ... ] && command`."""
    left: dict[str, list[str] | None] = field(default_factory=dict)
    """Variables whose branches ended, see `_Branch.left`, until the reader of the script takes them."""

    @property
    def is_skipped(self) -> bool:
        """True where a run does not come by."""
        return any(branch.outcome in ("no", "past") for branch in self.stack)

    @property
    def is_open(self) -> bool:
        """True where only a run would know whether it comes by."""
        return any(branch.is_open for branch in self.stack)

    def is_first_here(self, name: str) -> bool:
        """Tell whether the branch that the script is in was the first to set a variable."""
        return any(name in branch.first for branch in self.stack)

    @property
    def is_in_case(self) -> bool:
        """True where the innermost of them is a `case`."""
        return bool(self.stack) and self.stack[-1].word == "case"

    def note(self, name: str, values: list[str], *, is_first: bool) -> None:
        """Note that a variable is set where only a run would know whether it comes by."""
        # innermost first: the branch that decides whether the assignment is reached
        for branch in reversed(self.stack):
            if branch.is_open and branch.word not in _LOOPS and (is_first or name in branch.first):
                branch.first[name] = values
                return

    def turn(self, word: str) -> bool:
        """Go into or out of a condition or a loop, where a word at the start of a command says so."""
        if word in _OPENS:
            self.stack.append(_Branch(word))
        elif word in _CLOSES:
            if self.stack:
                self._leave(self.stack.pop())
        elif word in ("else", "elif"):
            if self.stack:
                branch = self.stack[-1]
                self._next(branch, is_last=word == "else")
                # a condition that did not hold makes its `else` run; after one that held nothing else does
                if not branch.is_open:
                    branch.outcome = "yes" if branch.outcome == "no" else "past"
        else:
            return False
        return True

    def _next(self, branch: _Branch, *, is_last: bool) -> None:
        """Go to the next branch of a condition: what the one before was the first to set is not set there."""
        # a variable of an earlier branch is unknown here until all branches have ended
        self.left |= dict.fromkeys(branch.first)
        branch.before.append(branch.first)
        branch.first, branch.is_complete = {}, branch.is_complete or is_last

    def _leave(self, branch: _Branch) -> None:
        for name, values in branch.left().items():
            self.left[name] = values
            if values is not None:
                self.note(name, values, is_first=True)

    def take_left(self) -> dict[str, list[str] | None]:
        """Variables whose branches ended since this was asked."""
        left, self.left = self.left, {}
        return left

    def decide(self, holds: bool | None, *, is_first: bool, default: str = "") -> None:
        """Take the outcome of the condition of an `if`, or of an `elif`, which counts where nothing before it held."""
        if not self.stack:
            return
        branch = self.stack[-1]
        branch.default = default if is_first else ""
        # an `elif` counts only if no branch before it was taken
        if holds is not None and (is_first or branch.outcome == "yes"):
            branch.outcome = "yes" if holds else "no"
        elif holds is None and branch.outcome == "yes":
            branch.outcome = "maybe"

    def choose(self, patterns: Sequence[str]) -> None:
        """Go to the next branch of a `case`, which runs where its subject fits a pattern and did fit none before."""
        branch = self.stack[-1]
        if branch.has_begun:
            self._next(branch, is_last=False)
        # the pattern * catches the rest: one branch is taken in any case
        branch.is_complete = "*" in patterns
        # after a branch that may have run, whether this one runs depends on it
        holds = None if branch.has_begun and branch.is_open else matches(branch.subject, patterns)
        # a branch that ran ends the `case`
        if branch.outcome in ("yes", "past"):
            branch.outcome = "past"
        else:
            branch.outcome = "maybe" if holds is None else "yes" if holds else "no"
        branch.has_begun = True

    def join(self, holds: bool | None, default: str = "") -> None:
        """Let what follows up to the end of the line run where a test holds."""
        outcome: _Outcome = "maybe" if holds is None else "yes" if holds else "no"
        self.stack.append(_Branch("test", outcome, default=default))
        self.joined += 1

    def turn_round(self) -> None:
        """Let what follows `||` run where what a test decided does not: `[ ... ] && one || other`."""
        # `test && a || b`: b runs exactly if a does not
        if self.joined and not self.stack[-1].is_open:
            self.stack[-1].outcome = "no" if self.stack[-1].outcome == "yes" else "yes"
        elif self.joined:
            self._next(self.stack[-1], is_last=True)

    def end_line(self) -> None:
        """Leave what was joined to a test."""
        # a script that is damaged may have closed more than it opened
        for _ in range(min(self.joined, len(self.stack))):
            self._leave(self.stack.pop())
        self.joined = 0
