"""The survival matrix is whole: every fault has a row, every row names tests that exist, and the page shows it."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

from tests.campaigns.faults import Fault, faults, page, verdict

TESTS = Path(__file__).parent


@functools.cache
def functions(file: str) -> set[str]:
    """Tests of a file."""
    tree = ast.parse((TESTS / f"{file}.py").read_text("utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_fault_has_a_row_and_every_row_a_test_or_a_reason() -> None:
    assert [one.name for one in faults()] == [f"F{number:02}" for number in range(1, 41)]
    assert all(one.fault and one.seen and one.by and (one.tests or one.without) for one in faults())


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
    one = Fault("F00", "x", "x", "x", ("a::b", "a::c"))
    assert verdict(one, {"a::b": ["passed"], "a::c": ["passed", "skipped"]}) == "passed (2, 1 skipped here)"
    assert verdict(one, {"a::b": ["passed"]}) == "**not run**"
    assert verdict(one, {"a::b": ["passed"], "a::c": ["failed"]}) == "**failed**"
    assert verdict(one, {"a::b": ["skipped"], "a::c": ["skipped"]}) == "not covered"
