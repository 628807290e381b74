"""Examples in docstrings do what they say."""

from __future__ import annotations

import doctest
import importlib

import pytest

from dse.plugins import roots
from tests.support import SOURCES
from tests.test_layers import name_of

EXAMPLES = [
    name_of(path).removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    for path in sorted(path for package in SOURCES for path in package.rglob("*.py"))
    if ">>> " in path.read_text("utf-8") and name_of(path).partition("/")[0] in roots()
]
"""Modules with examples, of the core and of the plug-ins that are installed."""


@pytest.mark.parametrize("module", EXAMPLES)
def test_examples_in_docstrings_do_what_they_say(module: str) -> None:
    result = doctest.testmod(importlib.import_module(module))
    assert result.attempted > 0
    assert result.failed == 0
