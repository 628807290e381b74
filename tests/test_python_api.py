"""Studies from Python: `dse.run`, what it returns, and values in the words of the command line."""

from __future__ import annotations

import html
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dse
from dse.config.overrides import override
from dse.errors import ConfigError
from dse.results.study_result import StudyResult

SMALL: dict[str, Any] = {"workload__only": ["g1"], "fidelity": "none", "tracking": "none", "executor__jobs": 1}

TEXTS = st.text(
    st.characters(codec="utf-8", categories=("L", "N", "P", "S", "Zs"), exclude_characters="$"), max_size=20
)
LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS
TREES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3), max_leaves=6)


@given(TREES)
def test_a_value_arrives_as_it_was_given(value: Any) -> None:
    from hydra.core.override_parser.overrides_parser import OverridesParser

    parsed = OverridesParser.create().parse_override(override("some__path", value))
    assert parsed.key_or_group == "some.path"
    assert _plain(parsed.value()) == value


def _plain(value: Any) -> Any:
    """A parsed value without the marks of its quotes."""
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    return value.text if hasattr(value, "text") else value


def test_a_table_is_the_list_of_its_rows() -> None:
    table = pd.DataFrame({"name": ["a", "b"], "m": [8, 16], "load": [None, 1.5]})
    assert override("workload__shapes", table) == "workload.shapes=[{name: a, m: 8}, {name: b, m: 16, load: 1.5}]"
    with pytest.raises(TypeError, match="no value of a configuration"):
        override("x", object())


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> StudyResult:
    return dse.run("ficco_sweep", output_dir=tmp_path_factory.mktemp("api") / "outputs", **SMALL)


@pytest.mark.slow
def test_a_study_from_python_prints_nothing_and_returns_tables_and_words(
    finished: StudyResult, capfd: pytest.CaptureFixture[str]
) -> None:
    again = dse.run("ficco_sweep", output_dir=finished.folder.parents[1], **SMALL)
    assert capfd.readouterr() == ("", "")
    pd.testing.assert_frame_equal(again.table, finished.table)
    assert finished.question.partition("?")[2].startswith(" 1 GEMM (g1) on mi300x_8")
    assert finished.answer
    assert len(finished.winners) == 1
    assert finished.front["on_front"].all()
    assert finished.front["makespan_s"].is_monotonic_increasing
    assert set(finished.claims["within"]) == {None}
    assert html.escape(finished.question) in finished._repr_html_()
    assert dse.result("ficco_sweep", finished.folder.parents[1]).study == "ficco_sweep"


@pytest.mark.slow
def test_figures_are_drawn_by_name_and_leave_the_style_alone(finished: StudyResult) -> None:
    import matplotlib as mpl

    before = dict(mpl.rcParams)
    for name in ("front", *finished.figures[1:3]):
        assert finished.plot(name)._repr_png_().startswith(b"\x89PNG")
    assert dict(mpl.rcParams) == before
    with pytest.raises(ConfigError, match="is no figure of this study"):
        finished.plot("nonsense")


@pytest.mark.nightly
def test_a_study_runs_in_a_thread(tmp_path: Path) -> None:
    results = list[StudyResult]()
    values = {**SMALL, "output_dir": tmp_path / "outputs"}
    thread = threading.Thread(target=lambda: results.append(dse.run("ficco_sweep", **values)))
    thread.start()
    thread.join()
    assert len(results[0].table) > 1


@pytest.mark.slow
def test_mistakes_are_refused_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has the wrong dimension"):
        dse.run("ficco_sweep", system__node__link_bytes_per_s="64 GHz", output_dir=tmp_path / "outputs")
    with pytest.raises(ConfigError, match="did you mean"):
        dse.run("ficco_swep", output_dir=tmp_path / "outputs")
    assert not (tmp_path / "outputs").exists()


@pytest.mark.nightly
@pytest.mark.slow
def test_workers_do_not_run_the_script_that_called_again(tmp_path: Path) -> None:
    values = {**SMALL, "executor__jobs": 2, "executor__timeout_s": 60}
    script = f"import dse\nprint('once')\nprint(len(dse.run('ficco_sweep', **{values!r}).table))\n"
    (tmp_path / "script.py").write_text(script, encoding="utf-8")
    command = [sys.executable, "script.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines()[0] == "once"
    assert done.stdout.count("once") == 1
