"""The survival matrix is whole: every fault has a row, every row names tests that exist, and the page shows it."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest

from tests.campaigns.faults import Fault, faults, page, verdict

TESTS = Path(__file__).parent


@functools.cache
def functions(file: str) -> set[str]:
    """Tests of a file."""
    tree = ast.parse((TESTS / f"{file}.py").read_text("utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_fault_has_a_row_and_every_row_a_test_or_a_reason() -> None:
    assert [fault.name for fault in faults()] == [f"F{number:02}" for number in range(1, 41)]
    assert all(fault.fault and fault.seen and fault.by and (fault.tests or fault.without) for fault in faults())


@pytest.mark.slow
def test_a_row_names_tests_that_exist_and_the_page_shows_it() -> None:
    lines = page().splitlines()
    for fault in faults():
        for name in fault.tests:
            file, _, function = name.partition("::")
            assert function in functions(file), name
        (row,) = (line for line in lines if line.startswith(f"| {fault.name} |"))
        assert f"| {fault.fault} |" in row
        assert not row.endswith("|  |"), "without an outcome"


def test_only_tests_that_ran_count() -> None:
    fault = Fault("F00", "x", "x", "x", ("a::b", "a::c"))
    assert verdict(fault, {"a::b": ["passed"], "a::c": ["passed", "skipped"]}) == "passed (2, 1 skipped here)"
    assert verdict(fault, {"a::b": ["passed"]}) == "**not run**"
    assert verdict(fault, {"a::b": ["passed"], "a::c": ["failed"]}) == "**failed**"
    assert verdict(fault, {"a::b": ["skipped"], "a::c": ["skipped"]}) == "not covered"
