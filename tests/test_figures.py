"""Figures: laid out without overlaps, with plain numbers and SI units, reproducible, drawn only when asked for."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dse import plots
from dse.cli import main
from dse.config.options import list_options
from dse.plots import Axis, Draw, Frame, fronts, predictions, tables, timelines
from dse.plots.canvas import MOST_PANELS, WIDTHS
from dse.plots.labels import log_ticks, number, scale, with_unit
from dse.results import report
from dse.results.run_folder import FinishedRun, Outputs
from studies.ficco import _CAUSES, _signatures
from tests.figures import overlaps

SIZES = st.floats(1e-12, 1e15)
UNITS = st.sampled_from(["s", "B", "B/s", "FLOP/s"])
WIDE = st.text("abcdefghij_- 0123456789", min_size=1, max_size=24)
PREFIXES = {"": 1.0, "n": 1e-9, "µ": 1e-6, "m": 1e-3, "p": 1e-12, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
PREFIXES |= {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50}


# Quantities


@given(SIZES, UNITS)
def test_a_prefix_leaves_one_to_three_digits_before_the_point(value: float, unit: str) -> None:
    chosen = scale(Axis("x", "x", unit), [value])
    assert chosen.text.removesuffix(unit) in PREFIXES
    assert math.isclose(chosen.factor, 1 / PREFIXES[chosen.text.removesuffix(unit)])
    assert value < 1e-11 or unit == "B" or 1 - 1e-9 <= value * chosen.factor < 1000 * (1 + 1e-9)


@given(st.floats(-1e9, 1e9) | st.floats(1e-11, 1e-7))
def test_a_number_is_plain_and_right_to_four_digits(value: float) -> None:
    text = number(value)
    assert "e" not in text or abs(value) < 1e-9
    assert math.isclose(float(text.replace(",", "")), value, rel_tol=1e-3, abs_tol=1e-12)


@given(st.floats(1e-6, 1e6), st.floats(1.1, 1e9), st.booleans())
def test_ticks_of_a_logarithmic_axis_are_few_and_inside(low: float, ratio: float, binary: bool) -> None:
    ticks = log_ticks(low, low * ratio, binary=binary)
    assert len(ticks) <= 6
    assert all(low * 0.999 <= tick <= low * ratio * 1.001 for tick in ticks)
    assert (np.diff(ticks) > 0).all()


def test_an_axis_over_many_decades_has_a_unit_at_each_tick() -> None:
    payload = Axis("payload", "payload", "B")
    few, wide = ([2.0**power for power in range(10, end)] for end in (12, 35))
    assert scale(payload, few, logarithmic=True).title == "payload [KiB]"
    assert scale(payload, wide, logarithmic=True).title == "payload"
    assert scale(payload, wide, logarithmic=True).tick(2.0**30) == with_unit(2.0**30, "B") == "1 GiB"


# Layout


def rows_of(names: Sequence[str], panels: Sequence[str], series: Sequence[str]) -> pd.DataFrame:
    """A row for each name, panel and series, with numbers over five decades."""
    index = pd.MultiIndex.from_product([panels, names, series], names=["panel", "row", "by"])
    table = index.to_frame(index=False)
    values = np.random.default_rng(0).lognormal(0, 2, len(table))
    x = 2.0 ** (np.arange(len(table)) % 12)
    return table.assign(
        value=values, second=values[::-1], x=x, scenario=table["panel"], status="ok", on_front=values > 1
    )


def charts(table: pd.DataFrame) -> Iterator[Draw]:
    """Every kind of chart of a table."""
    frame = Frame(
        "A sentence that says what comes out of all this, with a number of 1.43x in it", "how it is read", "panel"
    )
    value = Axis("value", "speed-up over the serial schedule [x]", centre=1.0)
    yield partial(tables.dots, table, value, row="row", by="by", frame=frame)
    yield partial(tables.heat, table, value, x=Axis("by", "series"), y="row", frame=frame)
    few = table.drop_duplicates(["panel", "row"])
    parts = [Axis("value", "a part", "s"), Axis("second", "another part", "s")]
    yield partial(tables.stacks, few, parts, bar="row", label="time", frame=frame)
    payload = Axis("x", "payload", "B")
    yield partial(tables.curves, table, payload, y=Axis("value", "time", "s"), by="by", frame=frame)
    axes = [payload, Axis("value", "time", "s"), Axis("second", "area")]
    yield partial(fronts.pareto, table, axes, by="by", frame=frame)
    pairs = table.assign(kind=table["panel"], measured_s=table["value"], predicted_s=table["second"], fitted=False)
    yield partial(predictions.scatter, pairs, by="by", frame=frame)


@pytest.mark.nightly
@settings(max_examples=10)
@given(
    st.lists(WIDE.filter(str.strip), min_size=1, max_size=12, unique=True),
    st.lists(WIDE.filter(str.strip), min_size=1, max_size=9, unique=True),
    st.lists(WIDE.filter(str.strip), min_size=1, max_size=6, unique=True),
    st.sampled_from(sorted(WIDTHS)),
)
def test_texts_of_charts_never_overlap(names: list[str], panels: list[str], series: list[str], width: str) -> None:
    table = rows_of(
        [name.strip() for name in names], [name.strip() for name in panels], [name.strip() for name in series]
    )
    for make in charts(table.drop_duplicates(["panel", "row", "by"])):
        assert overlaps(plots.draw(make, width)) == []


@pytest.mark.slow
def test_the_test_of_overlaps_sees_texts_that_overlap_and_that_leave_the_canvas() -> None:
    drawn = plots.draw(next(charts(rows_of(["a", "b"], ["p"], ["x", "y"]))))
    assert overlaps(drawn) == []
    drawn.figure.texts[0].set_position((0.5, 0.5))
    drawn.figure.texts[1].set_position((0.5, 0.5))
    assert any("overlap" in fault for fault in overlaps(drawn))
    drawn.figure.texts[0].set_position((0.9, 0.9))
    assert any("leaves the canvas" in fault for fault in overlaps(drawn))


def test_of_many_panels_those_with_the_largest_and_the_smallest_values_are_drawn_and_said() -> None:
    table = rows_of(["a"], [f"p{number}" for number in range(40)], ["x"]).assign(value=np.arange(40.0))
    groups, note = Frame("", panel="panel").panels(table, "value")
    assert set(groups) == {f"p{number}" for number in [*range(MOST_PANELS // 2), *range(40 - MOST_PANELS // 2, 40)]}
    assert "16 of 40" in note


@pytest.mark.slow
def test_a_heat_map_of_more_than_twenty_rows_is_a_ranked_dot_plot() -> None:
    table = rows_of([f"r{number}" for number in range(70)], ["p"], ["x", "y"])
    drawn = plots.draw(
        partial(tables.heat, table, Axis("value", "value"), x=Axis("by", "by"), y="row", frame=Frame("title"))
    )
    (panel,) = drawn.panels
    assert not panel.images
    names = [text.get_text() for text in panel.get_yticklabels()]
    best = table.groupby("row")["value"].max().sort_values(ascending=False)
    assert names == [*best.index[:20], *best.index[-20:]]
    assert "of 70 rows" in drawn.note


def test_signed_values_have_diverging_colours_around_their_centre() -> None:
    table = rows_of(["a"], ["p"], ["x", "y", "z"]).assign(value=[-0.5, 0.0, 0.5])
    error = Axis("value", "error", "%", centre=0.0)
    drawn = plots.draw(partial(tables.heat, table, error, x=Axis("by", "by"), y="row", frame=Frame("title")))
    low, middle, high = np.asarray(drawn.panels[0].images[0].get_array())[0]
    assert low[2] > low[0]  # blue
    assert high[0] > high[2]  # orange
    assert middle.min() > 0.9


def test_widths_of_papers_are_kept_with_letters_of_seven_to_nine_points() -> None:
    make = next(charts(rows_of(["a", "b"], ["p", "q"], ["x", "y"])))
    for width, inches in (("column", 3.35), ("page", 7.0)):
        drawn = plots.draw(make, width)
        assert drawn.figure.get_figwidth() == inches
        labels = [float(text.get_fontsize()) for panel in drawn.panels for text in panel.get_xticklabels()]
        assert min(labels) >= 6.3
        assert 7 <= drawn.figure.texts[0].get_fontsize() <= 9


@pytest.mark.slow
def test_files_are_written_in_the_formats_asked_for_and_are_the_same_to_the_byte(tmp_path: Path) -> None:
    make = next(charts(rows_of(["a", "b"], ["p", "q"], ["x", "y"])))
    first = [path.read_bytes() for path in plots.save(make, tmp_path, "one", formats=["pdf", "svg", "png"])]
    second = [path.read_bytes() for path in plots.save(make, tmp_path, "two", formats=["pdf", "svg", "png"])]
    assert first == second
    assert first[0].startswith(b"%PDF")
    assert b"/Subtype /Type0" in first[0]  # TrueType, as journals ask for


def test_a_timeline_names_its_lanes_and_kinds() -> None:
    spans = pd.DataFrame([["compute", "gemm", 0.0, 2e-3], ["link.1", "transfer", 1e-3, 3e-3]])
    spans.columns = pd.Index(["lane", "kind", "start_s", "finish_s"])
    drawn = plots.draw(partial(timelines.timeline, spans, "g1"))
    assert overlaps(drawn) == []
    assert drawn.xlabel == "time [ms]"


# Studies

FEW = {
    "cache_policies": ["applications=[fw_pool,fw_lstm]", "run.requests=20000"],
    "cache_sizes": ["applications=[fw_pool]", "run.requests=20000"],
    "ficco": ["budget.trials=300", "workload.only=[g1,g5]"],
    "ficco_rules": ["budget.trials=8", "workload=ficco"],
    "ficco_unseen": ["budget.trials=8", "workload=ficco"],
    "fused_ops": ["budget.trials=200"],
    "fused_workgroups": ["workload.only=[emb-p10-b512,gemv-70b_out]"],
    "goldyloc_arrivals": ["arrivals.only=[lstm-h512-4x8,small-gap0.5]"],
    "convolution_patterns": ["applications=[lenet]", "measured=[p100]", "run.requests=20000", "run.most=200000"],
    "jitq": ["budget.trials=500"],
    "synthesis": ["workload.only=[g1]", "space.system.node.topology=choice(mesh,ring)"],
    "trace": ["space.plan.order=choice(as_recorded,in_2_parts)", "space.plan.sms=choice(0,32)"],
    "search_benchmark": [
        "~landscapes",
        "+landscapes={small: {command: ['study=ficco_sweep', 'workload.only=[g4]', 'study.hardware_objectives=[]']}}",
        "space.run.seed=choice(0,1)",
        "space.run.method=choice(auto,random)",
    ],
}


QUICK = ("bert", "dlrm_scaleout", "plan")
"""Studies whose figures are drawn in every run of the tests, those of the others in `make nightly`."""


@pytest.mark.more
@pytest.mark.one_in(30)
@pytest.mark.parametrize(
    "study",
    [
        name if name in QUICK else pytest.param(name, marks=pytest.mark.nightly)
        for name in sorted(list_options("study"))
        if name != "measure_my_gpu"  # which takes a GPU
    ],
)
def test_figures_of_a_study_overlap_nowhere_and_say_their_answer(study: str, tmp_path: Path) -> None:
    words = [f"study={study}", "tracking=none", "store=none", "figures=none", "fidelity=none", f"output_dir={tmp_path}"]
    assert main([*words, *FEW.get(study, [])]) == 0
    outputs = Outputs.latest(tmp_path, study)
    module = FinishedRun(outputs.folder).config["study"]["module"]
    table = report.load_selection(outputs).table
    for name, make in chain(report.figures(outputs, module, table), report.extras(outputs, module)):
        for width in WIDTHS:
            drawn = plots.draw(make, width)
            assert overlaps(drawn) == [], name
            assert len(drawn.title) > 10, name
            assert len(drawn.panels) <= MOST_PANELS, name


def test_the_title_of_a_figure_is_known_without_drawing_it() -> None:
    make = next(charts(rows_of(["a", "b"], ["p", "q"], ["x", "y"])))
    assert plots.title(make) == plots.draw(make, "page").title


def test_groups_without_a_value_have_a_name() -> None:
    rows = [
        {"status": "ok", "x": 1.0 + place, "y": 2.0, "hbm": hbm, "on_front": True}
        for place, hbm in enumerate((None, "hbm3"))
    ]
    table = pd.DataFrame(rows).assign(scenario="one")
    drawn = fronts.pareto(table, [Axis("x", "x"), Axis("y", "y")], by="hbm", frame=Frame("title", ""))
    labels = {str(handle.get_label()) for handles in drawn.legends for handle in handles}
    assert {"not set", "hbm3"} <= labels


def test_losses_are_drawn_of_the_winner_too_whatever_moves() -> None:
    columns = dict.fromkeys((*(f"{cause}_s" for cause in _CAUSES), "ideal_s"), 1.0) | {"scenario": "g1"}
    kinds = [{"key": "a", "schedule.name": "hetero_fused_1d", "schedule.comm_engine": "dma", "makespan_s": 2.0}]
    won = [{"key": "b", "schedule.name": "shard_p2p", "schedule.comm_engine": "cu", "makespan_s": 1.0}]
    dma, fastest = (pd.DataFrame([{**columns, "speedup": 1.0, **row} for row in rows]) for rows in (kinds, won))
    (axis,) = _signatures(dma, fastest).axes.values()
    assert axis.rows == ("hetero fused 1d", "shard p2p by CUs")


def test_no_ideal_is_drawn_beyond_a_proven_bound() -> None:
    rows = pd.DataFrame({"row": ["a", "b"], "by": "x", "speedup": 1.2, "ideal": [1.4, 1.8], "bound": 1.5})
    sheet = tables.dots(rows, Axis("speedup", "speed-up [x]", centre=1.0), row="row", by="by", frame=Frame("title"))
    marks = [np.asarray(line.get_xdata(), float) for line in sheet.panels[0].lines if line.get_linestyle() == "None"]
    ideal = next(values for values in marks if 1.4 in values)
    assert 1.5 in np.concatenate(marks) and not np.nanmax(ideal) > 1.5
