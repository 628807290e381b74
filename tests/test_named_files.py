"""Files that designs name: they count by what they hold, wherever they lie."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dse.config.named_file import NamedFile
from dse.errors import ConfigError
from dse.values import Frozen, content_key
from tests.support import syntax

BY_OTHER_MEANS = {
    "FunctionSettings",  # files of a function are part of its version
    "GivenPlan",  # a section that is read before designs are made
}


class Named(Frozen):
    """A design that names a file."""

    trace: NamedFile | None = None


@given(first_bytes=st.binary(max_size=50), other=st.binary(max_size=50))
def test_designs_are_equal_where_their_files_hold_the_same(
    first_bytes: bytes, other: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("files")
    for name, content in (("a", first_bytes), ("b", other)):
        (folder / name).write_bytes(content)
    first, second = (Named.model_validate({"trace": str(folder / name)}) for name in "ab")
    assert (content_key(first) == content_key(second)) == (first_bytes == other)
    (folder / "a").write_bytes(other)
    edited = Named.model_validate({"trace": str(folder / "a")})
    assert content_key(edited) == content_key(second)


def test_a_file_that_is_edited_while_a_study_runs_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("1\n", "utf-8")
    named = NamedFile.model_validate(str(path))
    assert named.path("traffic.trace") == path
    path.write_text("2\n", "utf-8")
    with pytest.raises(ConfigError, match=r"traffic\.trace .*was changed after it was first read"):
        named.path("traffic.trace")


@pytest.mark.parametrize("name", ["absent.csv", "."])
def test_what_is_no_file_is_refused(name: str, elsewhere: Path) -> None:
    with pytest.raises(ValueError, match="is no"):
        Named.model_validate({"trace": name})


@pytest.mark.slow
def test_no_design_holds_a_bare_path() -> None:
    bare = {
        f"{node.name}.{ast.unparse(field.target)}"
        for tree in syntax().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and node.bases and node.name not in BY_OTHER_MEANS
        for field in node.body
        if isinstance(field, ast.AnnAssign) and re.fullmatch(r"(trace|file|log|table)s?", ast.unparse(field.target))
        if "str" in ast.unparse(field.annotation)
    }
    assert bare == set()
