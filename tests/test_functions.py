"""Python functions as simulators: `dse.optimise`, and on what their answers depend."""

from __future__ import annotations

import importlib
import math
import os
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dse
from dse.config.function_study import FunctionStudy
from dse.errors import ConfigError
from simulators.external.function import FunctionBackend

QUIET: dict[str, Any] = {"tracking": "none", "executor__jobs": 2}


def bowl(x: float) -> float:
    """A function of a module."""
    return (x - 0.5) ** 2


def backend(folder: Path, function: str, files: tuple[str, ...] = ()) -> FunctionBackend:
    return FunctionBackend(
        function=function, folder=str(folder), files=files, metrics={"loss": {"unit": "", "meaning": "-"}}
    )


def test_answers_depend_on_the_files_of_a_function_and_of_what_it_imports(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    texts = {
        "package/__init__.py": "SCALE = 1\n",
        "package/own.py": "from . import other\ndef loss(x):\n    import late\n    return other.HALF * x\n",
        "package/other.py": "HALF = 0.5\n",
        "late.py": "",
        "table.csv": "1",
    }
    for name, text in {**texts, "unused.py": ""}.items():
        (tmp_path / name).write_text(text)
    versions = [backend(tmp_path, "package.own:loss", (str(tmp_path / "table.csv"),)).version]
    for name, text in texts.items():
        (tmp_path / name).write_text(f"{text}# changed\n")
        versions.append(backend(tmp_path, "package.own:loss", (str(tmp_path / "table.csv"),)).version)
    assert len(set(versions)) == len(texts) + 1
    (tmp_path / "unused.py").write_text("# changed")
    assert backend(tmp_path, "package.own:loss", (str(tmp_path / "table.csv"),)).version == versions[-1]


def test_a_function_is_named_so_that_it_is_found_again(tmp_path: Path) -> None:
    FunctionStudy(bowl, {"x": (0.0, 1.0)}, {"loss": "minimize"}).write(tmp_path)
    text = (tmp_path / "bowl" / "simulator" / "bowl.yaml").read_text()
    assert f"function: tests.test_functions:bowl\nfolder: {Path(__file__).parents[1]}\n" in text


def test_a_module_that_optimises_when_imported_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    call = "import dse\ndef f(x):\n    return x\ndse.optimise(f, {'x': [1, 2]}, objectives={'loss': 'minimize'})\n"
    (tmp_path / "unguarded.py").write_text(call)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="if __name__ =="):
        importlib.import_module("unguarded")


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"space": {"x": 1.0}}, "no argument to search"),
        ({"space": {"x": {}}}, "a list of values, a range"),
        ({"objectives": {"loss": None}}, "has no goal"),
        ({"function": lambda x, other: 0, "name": "two"}, "space.other: is missing"),
        ({"objectives": {"loss": "least"}}, "write minimize or maximize"),
        ({"function": lambda x: x}, "give one: name='mine'"),
        ({"function": lambda x: x, "name": "mine"}, "write it at the top level of a file"),
        ({"function": math.hypot}, "write it at the top level of a file"),
        ({"files": ["absent"]}, "absent"),
    ],
)
def test_mistakes_are_refused(changes: dict[str, Any], match: str, tmp_path: Path) -> None:
    values: dict[str, Any] = {"function": bowl, "space": {"x": (0.0, 1.0)}, "objectives": {"loss": "minimize"}}
    with pytest.raises(ConfigError, match=match):
        dse.optimise(**{**values, **changes}, output_dir=tmp_path, **QUIET)


@pytest.mark.parametrize("function", ["absent:f", "os:absent", "no name", "tests.test_functions:absent"])
def test_a_configuration_that_names_no_function_is_refused(function: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"simulator\.function"):
        simulator = backend(Path(__file__).parents[1], function)
        simulator._call(simulator.design({"arguments": {"x": 1}})) if "tests" in function else simulator.version


COUNTING = """
import os
import tempfile

def bowl(x, kind, folder):
    tempfile.mkstemp(dir=folder)
    if kind == "crash":
        os._exit(3)
    if x > 2:
        return {"status": "infeasible", "reason": "too far"}
    return {"time_s": (x - 1) ** 2, "process": os.getpid()}
"""


def written(text: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """The function `bowl` of a file that is imported."""
    (folder / "counting.py").write_text(textwrap.dedent(text))
    monkeypatch.syspath_prepend(folder)
    sys.modules.pop("counting", None)
    function: Callable[..., Any] = importlib.import_module("counting").bowl
    return function


@pytest.mark.slow
def test_a_function_is_searched_in_worker_processes_and_known_points_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = tmp_path / "calls"
    calls.mkdir()
    arguments: dict[str, Any] = {"space": {"x": range(4), "kind": ["round", "crash"], "folder": str(calls)}}
    goals = {"time_s": "minimize", "process": None}
    values = {**QUIET, "output_dir": tmp_path / "outputs", "executor__max_retries": 0, "executor__broken_after": 0}
    function = written(COUNTING, tmp_path, monkeypatch)
    with pytest.warns(UserWarning, match="points failed"):
        result = dse.optimise(function, objectives=goals, **arguments, **values)
    table = result.table.set_index(["arguments.kind", "arguments.x"])
    assert table["status"].to_list() == ["ok", "failed", "ok", "failed", "ok", "failed", "infeasible", "failed"]
    assert "EXIT 3" in str(table.loc[("crash", 0), "reason"])
    assert os.getpid() not in set(table["process"])
    assert result.winners["arguments.x"].to_list() == [1]
    assert result.optuna.best_params == {"arguments.x": 1, "arguments.kind": "round"}
    assert len(list(calls.iterdir())) == 8
    with pytest.warns(UserWarning, match="points failed"):
        again = dse.optimise(function, objectives=goals, **arguments, **values)
    assert len(list(calls.iterdir())) == 8  # all were known
    assert "scenario" in result.compare(again).text
