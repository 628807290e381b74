"""Values of others in figures: published ones, each with its place or a reason, and those that a user measured."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from benchmarks.first_minute import figure_names, figures_without_published
from dse import plots
from dse.errors import ConfigError
from dse.plots import Axis, Frame, tables
from dse.plots.references import Reference, with_references
from dse.results import measured, published
from dse.results.claims import Claim
from tests.figures import overlaps

SPEEDUPS = pd.DataFrame(
    {"case": ["a", "b"], "by": ["x", "y"], "gain": [1.2, 1.4], "panel": ["left", "right"], "chunks": [1, 8]}
)
GAIN = Axis("gain", "speed-up [x]", centre=1.0)
DOTS = partial(tables.dots, SPEEDUPS, GAIN, row="case", by="by", frame=Frame("title", panel="panel"))
CURVES = partial(tables.curves, SPEEDUPS, Axis("chunks", "chunks"), y=GAIN, by="by", frame=Frame("title"))
CLAIMS = {
    name: Claim(
        id=name,
        statement="gains",
        metric="gain",
        value=value,
        unit=unit,
        kind="exact",
        tolerance=None,
        provenance=provenance,
        source=f"source of {name}",
    )
    for name, value, unit, provenance in (
        ("most", 1.6, "x", "abstract"),
        ("mean", 43, "%", "secondary"),
        ("share", (55.0, 60.0), "%", "memory"),
        ("yes", True, "bool", "abstract"),
    )
}


def test_every_figure_of_a_papers_study_shows_published_values_or_has_a_reason() -> None:
    assert figures_without_published() == []
    assert figure_names('yield "new", partial(draw, rows)') == {"new"}


def test_values_lie_on_their_axes_and_widen_them() -> None:
    references = [
        Reference("largest", 1.9, 1.9, unit="x"),
        Reference("band", 1.1, 1.3, panel="left"),
        Reference("in a row", 1.5, 1.5, row="b"),
        Reference("of another figure", 1.5, 1.5, row="c"),
        Reference("told", 2.5, 2.5, unit="x", in_words=True),
    ]
    drawn = plots.draw(with_references(DOTS, references, note="from a table"))
    assert overlaps(drawn) == []
    left, right = drawn.panels
    assert all(panel.get_xlim()[1] > 1.9 for panel in drawn.panels)
    ends = [np.asarray(line.get_xydata())[:, 0].tolist() for line in right.lines]
    assert [1.9, 1.9] in ends
    assert [1.5, 1.5] in ends  # the row has a place in every panel
    assert len(left.patches) == len(right.patches) + 1
    labels = [handle.get_label() for handles in drawn.legends for handle in handles]
    assert labels[-3:] == ["largest: 1.9x", "band: 1.1 to 1.3", "in a row: 1.5"]
    assert drawn.note == "told: 2.5x; from a table"


def test_a_value_at_a_place_is_a_mark_and_one_of_the_other_axis_a_line() -> None:
    references = [Reference("here", 1.3, 1.3, at=8.0), Reference("chunks", 4.0, 4.0, of="chunks")]
    (panel,) = plots.draw(with_references(CURVES, references)).panels
    ends = [line.get_xydata() for line in panel.lines]
    assert any(np.array_equal(line, [[8.0, 1.3], [8.0, 1.3]]) for line in ends)
    assert any(np.array_equal(line, [[4.0, 0.0], [4.0, 1.0]]) for line in ends)


def test_a_recalled_value_is_never_called_published(tmp_path: Path) -> None:
    (tmp_path / "published.yaml").write_text(
        "- figure: gains_*\n  number: Fig. 9\n  values:\n    - {claim: most, label: largest}\n"
        "    - {claim: mean, label: mean, as_gain: true}\n    - {claim: share, label: GEMMs}\n"
        "- {figure: losses, none: the abstract has none}\n"
    )
    listed = published.read(tmp_path / "published.yaml", list(CLAIMS.values()))
    texts = [reference.text for reference in published.values_of(listed, "gains_8").references]
    assert texts == ["published, largest: 1.6x", "published, mean: 1.43x", "recalled, unverified, GEMMs: 55 to 60 %"]
    origin = "Fig. 9 of the paper: source of most; source of mean; source of share"
    assert published.values_of(listed, "gains_8").origin == origin
    assert published.values_of(listed, "losses").reason
    assert not published.values_of(listed, "other").reason


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("- {figure: a, values: [{claim: moist, label: b}]}", "did you mean `most`"),
        ("- {figure: a, values: [{claim: 'yes', label: b}]}", "without a number"),
        ("- {figure: a}", "needs values, or the reason"),
    ],
)
def test_a_wrong_list_of_published_values_is_refused(text: str, rule: str, tmp_path: Path) -> None:
    (tmp_path / "published.yaml").write_text(text)
    with pytest.raises(ConfigError, match=rule):
        published.read(tmp_path / "published.yaml", list(CLAIMS.values()))


MEASURED = "scenario,series,value\n"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("scenario,value\na,1\n", "has no column series"),
        ("scenario;series;value\na;b;1\n", "separate columns by commas"),
        (MEASURED, r"holds no measurement \(add rows, such as: a,my_kernel,1.42"),
        (MEASURED + "aa,k,1\n", "line 2 = 'aa': is no scenario of this study"),
        (MEASURED + "a,,1\n", "names no series"),
        (MEASURED + "a,k,fast\n", r"is no positive number \(write a number such as 1.42"),
        (MEASURED + "a,k,nan\n", "is no positive number"),
        (MEASURED + "a,k,1\na,k,2\n", r"line 3 = 'a, k': repeats a scenario and series \(keep one"),
        (MEASURED + "a,k,1,2\n", "has 4 cells for 3 columns"),
        (MEASURED + 'a,k,"1\n', "is no CSV"),
    ],
)
def test_each_fault_of_a_table_of_measurements_is_refused_in_a_sentence(
    text: str, sentence: str, tmp_path: Path
) -> None:
    (tmp_path / "mine.csv").write_text(text)
    with pytest.raises(ConfigError, match=sentence):
        measured.read(tmp_path / "mine.csv", ["a", "b"])
    with pytest.raises(ConfigError, match=r"beside = .*is no file"):
        measured.read(tmp_path / "yours.csv", ["a", "b"])
