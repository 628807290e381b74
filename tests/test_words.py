"""The language that people read: marks of a dialect are as rare as in the docs of Optuna and NumPy."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dse import plugins
from dse.config.options import list_options
from dse.shell.help import help_text
from tests.test_house import all_trees

ROOT = Path(__file__).parents[1]
MARKS = {
    "beside": r"\bbeside\b",
    "of which": r"\bof which\b",
    "a program that says or tells": r"\b(says?|tells?|told)\b",
    "where there is": r"\bwhere (there|it|nothing|none)\b",
    "those of": r"\bthose of\b",
}
PER_WORD = {  # the larger of both in their docstrings: Optuna 5.0 (36 thousand words), NumPy 2.2 (244 thousand)
    "beside": 0.0,
    "of which": 0.041e-3,
    "a program that says or tells": 0.056e-3,
    "where there is": 0.041e-3,
    "those of": 0.016e-3,
}

KEPT = "of it beside computation"
"""Words of a summary of profiles that scripts of users look for."""


def pages() -> Iterator[str]:
    """Texts of the documentation, without code."""
    for path in (ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("plugins/*/README.md")):
        yield re.sub(r"```.*?```|`[^`\n]*`", "", path.read_text("utf-8"), flags=re.DOTALL)


def screens() -> Iterator[str]:
    """Help of the program and of each command, and the lists of options; what is typed is left out."""
    yield help_text(["--all"], None)
    for name in plugins.names("command"):
        yield re.sub(r"\S*=\S*|`[^`]*`", "", help_text(name.split(), None))
    for group in plugins.declarations("GROUPS"):
        yield "\n".join(list_options(group).values())


def messages() -> Iterator[str]:
    """Texts of several words in our modules, but for what describes code."""
    for tree in all_trees().values():
        described = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in described:
                yield re.sub(r"`[^`]*`", "", node.value) if " " in node.value.strip() else ""


@pytest.mark.slow
@pytest.mark.parametrize("texts", [pages, screens, pytest.param(messages, marks=pytest.mark.more)])
def test_what_people_read_is_in_plain_english(texts: Callable[[], Iterator[str]]) -> None:
    text = "\n".join(texts()).replace(KEPT, "")
    marked = {
        mark: [text[place.start() - 60 : place.end() + 40] for place in re.finditer(pattern, text, re.IGNORECASE)]
        for mark, pattern in MARKS.items()
    }
    most = {mark: PER_WORD[mark] * len(text.split()) for mark in MARKS}
    assert {mark: places for mark, places in marked.items() if len(places) > most[mark]} == {}
