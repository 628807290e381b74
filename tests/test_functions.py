"""Python functions as simulators: `dse.optimise`, and on what their answers depend."""

from __future__ import annotations

import math
import os
import pickle
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dse
from dse.config.function_study import FunctionStudy
from dse.errors import ConfigError
from simulators.external.function import FunctionBackend, content_hash

QUIET: dict[str, Any] = {"tracking": "none", "executor__jobs": 2}


def bowl(x: float) -> float:
    """A function of a module."""
    return (x - 0.5) ** 2


def compiled(text: str, **values: Any) -> Callable[..., Any]:
    """A function as a notebook has it: in no module that could be imported."""
    names: dict[str, Any] = {"__name__": "__main__", **values}
    exec(textwrap.dedent(text), names)
    function: Callable[..., Any] = names["bowl"]
    return function


BOWL = """
def bowl(x, n=2):
    # a comment
    return helper(x) ** n
def helper(x):
    return x - scale
"""


def test_what_a_function_answers_depends_on_its_code_and_what_it_refers_to() -> None:
    original = content_hash(compiled(BOWL, scale=0.5))
    assert content_hash(compiled("\n\n" + BOWL.replace("# a comment", "# another"), scale=0.5)) == original
    changes = [compiled(BOWL.replace("n=2", "n=4"), scale=0.5), compiled(BOWL.replace("x - s", "x + s"), scale=0.5)]
    changes += [compiled(BOWL, scale=0.6), compiled(BOWL.replace("** n", "* n"), scale=0.5)]
    assert len({original, *map(content_hash, changes)}) == 5


def test_files_that_a_function_reads_count(tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    hashes = set()
    for text in ("1", "2"):
        table.write_text(text)
        hashes.add(content_hash(math.hypot, [str(table)]))
    assert len(hashes) == 2
    with pytest.raises(ConfigError, match="absent"):
        content_hash(math.hypot, [str(tmp_path / "absent")])


def test_a_pickled_function_has_the_hash_of_the_function(tmp_path: Path) -> None:
    bowl = compiled(BOWL, scale=0.5)
    folder = FunctionStudy(bowl, {"x": (0.0, 1.0)}, {"loss": "minimize"}).write(tmp_path)
    settings = {"function": str(folder / "bowl.pickle"), "metrics": {"loss": {"unit": "", "meaning": "-"}}}
    assert FunctionBackend(**settings).version == content_hash(bowl)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"space": {"x": 1.0}}, "no argument to search"),
        ({"space": {"x": {}}}, "a list of values, a range"),
        ({"objectives": {"loss": None}}, "has no goal"),
        ({"objectives": {"loss": "least"}}, "write minimize or maximize"),
        ({"function": lambda x: x}, "give one: name='mine'"),
        ({"function": compiled(BOWL, scale=threading.Lock())}, "cannot be sent to worker processes"),
    ],
)
def test_mistakes_are_refused(changes: dict[str, Any], match: str, tmp_path: Path) -> None:
    values: dict[str, Any] = {"function": math.hypot, "space": {"x": (0.0, 1.0)}, "objectives": {"loss": "minimize"}}
    with pytest.raises(ConfigError, match=match):
        dse.optimise(**{**values, **changes}, output_dir=tmp_path)


def test_a_file_that_holds_no_function_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "spoilt.pickle"
    file.write_bytes(pickle.dumps(1)[:-2])
    backend = FunctionBackend(function=str(file), metrics={"loss": {"unit": "", "meaning": "-"}})
    with pytest.raises(ConfigError, match="cannot be loaded"):
        backend.version  # noqa: B018 (it loads the function)


COUNTING = """
def bowl(x, kind, folder):
    import os
    import pathlib
    import tempfile
    tempfile.mkstemp(dir=folder)
    if kind == "crash":
        os._exit(3)
    if x > 2:
        return {"status": "infeasible", "reason": "too far"}
    return {"time_s": (x - 1) ** 2, "process": os.getpid()}
"""


@pytest.mark.slow
def test_a_function_is_searched_in_worker_processes_and_known_points_are_kept(tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    calls.mkdir()
    question: dict[str, Any] = {"space": {"x": range(4), "kind": ["round", "crash"], "folder": str(calls)}}
    goals = {"time_s": "minimize", "process": None}
    values = {**QUIET, "output_dir": tmp_path / "outputs", "executor__max_retries": 0, "executor__broken_after": 0}
    with pytest.warns(UserWarning, match="points failed"):
        result = dse.optimise(compiled(COUNTING), objectives=goals, **question, **values)
    table = result.table.set_index(["arguments.kind", "arguments.x"])
    assert table["status"].to_list() == ["ok", "failed", "ok", "failed", "ok", "failed", "infeasible", "failed"]
    assert "EXIT 3" in str(table.loc[("crash", 0), "reason"])
    assert os.getpid() not in set(table["process"])
    assert result.winners["arguments.x"].to_list() == [1]
    assert result.optuna.best_params == {"arguments.x": 1, "arguments.kind": "round"}
    assert len(list(calls.iterdir())) == 8
    with pytest.warns(UserWarning, match="points failed"):
        again = dse.optimise(compiled(COUNTING), objectives=goals, **question, **values)
    assert len(list(calls.iterdir())) == 8  # all were known
    assert "points" in result.compare(again).text
