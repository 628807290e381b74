"""Figures drawn by processes beside a study."""

from __future__ import annotations

import os
import signal
from contextlib import closing
from functools import partial
from pathlib import Path

import pandas as pd
import pytest

from dse.plots import Axis, Draw, FigureSheet, Frame, save, tables
from dse.study.record import FigureWorkers
from dse.study.settings import Figures

pytestmark = pytest.mark.slow
ROWS = pd.DataFrame({"scenario": ["a", "b"], "by": ["serial", "serial"], "speedup": [1.1, 1.3]})


def dots(title: str) -> FigureSheet:
    """A small figure."""
    return tables.dots(ROWS, Axis("speedup", "speed-up [x]", centre=1.0), row="scenario", by="by", frame=Frame(title))


def dots_unless_in_worker(here: int) -> FigureSheet:
    """The same figure; in another process, that process is killed."""
    if os.getpid() != here:
        os.kill(os.getpid(), signal.SIGKILL)
    return dots("first")


def broken() -> FigureSheet:
    """A figure that cannot be drawn."""
    raise ValueError("no such axis")


def drawn(folder: Path, which: str, *figures: tuple[str, Draw], key: bool = True) -> dict[str, bytes]:
    """Files that are drawn beside a study, by name."""
    with closing(FigureWorkers(Figures(name=which, format=("svg", "png")))) as drawing:
        drawing.begin(iter(figures), folder, key=key)
        assert drawing.finish("toy") == len(list(folder.iterdir())) // 2
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.more
def test_a_worker_draws_the_same_figure_to_the_byte(tmp_path: Path) -> None:
    figures = [(name, partial(dots, name)) for name in ("first", "second", "third")]
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    expected = [save(make, tmp_path / "here", name, formats=("svg", "png")) for name, make in figures]
    there = drawn(tmp_path / "there", "all", *figures)
    assert there == {path.name: path.read_bytes() for paths in expected for path in paths}


@pytest.mark.more
@pytest.mark.parametrize(
    ("which", "key", "names"), [("key", True, {"first"}), ("key", False, set()), ("none", True, set())]
)
def test_the_key_figure_is_the_first_of_a_study(tmp_path: Path, which: str, *, key: bool, names: set[str]) -> None:
    figures = [(name, partial(dots, name)) for name in ("first", "second")]
    assert {Path(name).stem for name in drawn(tmp_path, which, *figures, key=key)} == names


@pytest.mark.nightly
def test_what_cannot_be_sent_to_a_worker_or_kills_it_is_drawn_here(tmp_path: Path) -> None:
    figures: list[tuple[str, Draw]] = [("closure", lambda: dots("first"))]
    figures += [("deadly", partial(dots_unless_in_worker, os.getpid()))]
    files = drawn(tmp_path, "all", *figures)
    assert {Path(name).stem for name in files} == {"closure", "deadly"}
    assert files["closure.svg"] == files["deadly.svg"]


@pytest.mark.more
def test_what_a_figure_raises_is_raised_once_all_others_are_drawn(tmp_path: Path) -> None:
    figures: list[tuple[str, Draw]] = [("broken", broken), ("fine", partial(dots, "fine"))]
    with closing(FigureWorkers(Figures(name="all"))) as drawing:
        drawing.begin(iter(figures), tmp_path)
        assert drawing.finish("toy") == 2 and (tmp_path / "fine.svg").exists()
        with pytest.raises(ValueError, match="no such axis") as raised:
            drawing.check()
    assert "broken is not drawn" in raised.value.__notes__[0]
