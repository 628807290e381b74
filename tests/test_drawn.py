"""What figures show and headlines say is what tables hold: values are looked up by key, never by place."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import drawn, headlines
from dse.cli import main
from dse.config.options import conf_dirs, list_options
from dse.plots import Axis, Frame, tables
from dse.results import report
from dse.results.answer import write_answer
from dse.results.decisions import with_ranges
from dse.results.run_folder import Outputs
from tests.campaigns.answer_check import QUIET, SMALL

ELSEWHERE: dict[str, tuple[str, ...]] = {
    "conccl": ("system=mi355x_8",),
    "ficco_sweep": ("system=h100_8",),
    "jitq": ("models=[llama2_13b]",),
    "nic_placement": ("system=h100_8_ndr",),
}
"""Study -> words of another machine or workload than the default one."""


SEVERAL_NODES = [name for name in sorted(list_options("system")) if name.endswith(("_ndr", "_hdr", "_xdr", "_roce"))]


@cache
def run_of(study: str, *words: str) -> Outputs:
    """A finished run of a study with few points; words count before those by which it has few."""
    paths = {word.partition("=")[0] for word in words}
    few = [word for word in SMALL[study] if word.partition("=")[0] not in paths]
    folder = Path(mkdtemp(prefix="dse-drawn-"))
    assert main([f"study={study}", f"output_dir={folder}", *QUIET, *few, *words]) == 0
    return Outputs.latest(folder, study)


# Figures


@given(st.permutations(range(6)), st.integers(0, 1000))
def test_ranges_of_winners_are_of_the_rows_that_have_their_keys_whatever_these_are_numbered(
    order: Sequence[int], first: int
) -> None:
    names = [f"s{place}" for place in range(6)]
    table = pd.DataFrame({"scenario": names, "key": [f"k{place}" for place in range(6)], "value": np.arange(6.0)})
    table.attrs["decisions"] = {f"k{place}": {"low": place + 0.5, "high": place + 1.5} for place in (1, 3, 4)}
    rows = table.iloc[list(order)].set_axis([first + 7 * place for place in order])
    ranged = with_ranges(rows, table, ["scenario"])
    assert list(ranged.index) == list(rows.index)
    drawn_rows = ranged.assign(again=rows["scenario"])  # as figures add columns of the same rows
    assert (drawn_rows["again"] == drawn_rows["scenario"]).all()
    for _, row in drawn_rows.iterrows():
        expected = row["value"] + 0.5 if row["key"] in table.attrs["decisions"] else np.nan
        assert row["range_low"] == pytest.approx(expected, nan_ok=True)


@pytest.mark.slow
@settings(max_examples=10)
@given(st.lists(st.floats(0.1, 10.0), min_size=4, max_size=4))
def test_a_dot_that_is_drawn_in_a_row_of_another_name_is_counted(values: list[float]) -> None:
    rows = pd.DataFrame({"case": list("abcd"), "by": ["x", "x", "y", "y"], "value": values})
    sheet = tables.dots(rows, Axis("value", "value"), row="case", by="by", frame=Frame("title"))
    assert drawn.not_in_rows(sheet) == []
    sheet.table = rows.assign(case=["b", "a", "d", "c"])
    moved = sum(abs(values[place] / values[place ^ 1] - 1) > 1e-3 for place in range(4))
    assert len(drawn.not_in_rows(sheet)) >= moved


@pytest.mark.slow
@pytest.mark.one_in(5, 3)
@pytest.mark.parametrize("study", drawn.QUICK)
def test_every_drawn_value_is_that_of_its_key_in_the_table(study: str) -> None:
    outputs = run_of(study)
    assert drawn.wrong_values(outputs) == {}


@pytest.mark.slow
def test_values_that_are_joined_by_place_are_counted() -> None:
    """As the figure of speed-ups of ConCCL did, which took names from rows that were numbered otherwise."""
    outputs = run_of("ficco_sweep")
    table = _table(outputs)
    rows = table[table["status"] == "ok"]
    ends = [drawn.counted(_joined_by_place(part)) for part in (rows, rows.set_axis(rows.index[::-1]))]
    assert (ends[0] - ends[1]).total()


def _joined_by_place(rows: pd.DataFrame) -> Any:
    best = rows.merge(rows[["scenario", "key"]], on=["scenario", "key"])  # a new index
    best = best.assign(case=rows["schedule.name"]).dropna(subset=["case"])
    return tables.dots(best, Axis("speedup", "speed-up"), row="case", by="scenario", frame=Frame("title"))


def _module(outputs: Outputs) -> str:
    return str(outputs.read_config()["study"]["module"])


def _table(outputs: Outputs) -> pd.DataFrame:
    return report.load_selection(outputs).table


# Headlines


@pytest.mark.slow
@pytest.mark.one_in(5, 3)
@pytest.mark.parametrize("study", drawn.QUICK)
def test_the_numbers_of_a_headline_are_in_its_tables(study: str) -> None:
    assert headlines.numbers_without_origin(run_of(study)) == []


@pytest.mark.nightly
@pytest.mark.parametrize("study", sorted(ELSEWHERE))
def test_a_headline_is_right_for_another_machine_or_workload(study: str) -> None:
    outputs, usual = run_of(study, *ELSEWHERE[study]), run_of(study)
    assert headlines.numbers_without_origin(outputs) == []
    answers = [str(of.read_json("summary")["answer"]) for of in (outputs, usual)]
    assert answers[0] != answers[1]


@pytest.mark.more
@pytest.mark.slow
def test_a_headline_with_numbers_of_its_own_is_wrong() -> None:
    """Else the tests above could not fail."""
    outputs = run_of("jitq")
    numbers, text = headlines.TableNumbers.of(outputs), str(outputs.read_json("summary")["answer"])
    assert numbers.missing(text) == []
    assert numbers.missing(text.replace(" B", "7 B")) != []
    assert numbers.missing("in 2 of 77 cases 123.4 %") == ["2 of 77", "123.4"]


@pytest.mark.slow
def test_the_headline_of_nics_names_what_wins_in_the_table() -> None:
    outputs = run_of("nic_placement")
    table = _table(outputs)
    write_answer(outputs, _module(outputs), table)
    text = str(outputs.read_json("summary")["answer"])
    fastest = table[table["status"] == "ok"].sort_values("makespan_s").iloc[0]
    assert f"{fastest['system.fabric.nic.num_nics']} NICs of a node" in text
    place = {"gpu": "GPUs", "pcie_switch": "PCIe switches", "cpu": "CPUs"}[fastest["system.fabric.nic.placement"]]
    assert f"NICs at {place}" in text


# Machines of several nodes


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize(
    "system", [name for name in sorted(list_options("system")) if name.endswith(("_ndr", "_hdr", "_xdr", "_roce"))]
)
def test_nics_are_placed_on_every_machine_of_several_nodes(system: str, tmp_path: Path) -> None:
    words = ["study=nic_placement", f"system={system}", "workload.only=[dlrm-t100]", f"output_dir={tmp_path}", *QUIET]
    assert main(words) == 0
    table = Outputs.latest(tmp_path, "nic_placement").read_table("results")
    ok = table[table["status"] == "ok"]
    assert ok.groupby("system.fabric.nic.placement")["makespan_s"].min().nunique() > 1
    assert set(ok["schedule.name"]) == {"bulk_sync"}
    assert (table.loc[table["schedule.name"] == "fused_kernels", "status"] == "infeasible").all()


@pytest.mark.slow
def test_only_the_part_that_needs_them_lacks_constants_of_persistent_kernels() -> None:
    table = _table(run_of("nic_placement", *ELSEWHERE["nic_placement"]))
    reasons = table.loc[table["schedule.name"] == "fused_kernels", "reason"].unique()
    for reason in reasons:
        assert "h100_8_ndr" in reason
        assert "has no data for persistent kernels; only mi210_* have" in reason
    assert (table.loc[table["schedule.name"] == "bulk_sync", "status"] == "ok").any()
    assert (table["system.fabric.num_nodes"] == 16).all()


def test_every_folder_of_studies_is_looked_at() -> None:
    shipped = {path.stem for folder in conf_dirs() for path in (folder / "study").glob("*.yaml")}
    assert set(drawn.QUICK) <= shipped
    assert set(ELSEWHERE) <= shipped
