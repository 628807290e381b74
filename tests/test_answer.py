"""The answer that a study prints first: winners, a sentence, claims in a line."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from rich.table import Table

from dse.cli import main
from dse.results.answer import answer, claims_line, conclude
from dse.results.claims import Claim, ClaimResult, judge
from dse.results.run_folder import Outputs
from dse.results.tables import fit_columns
from dse.results.words import choice_in_words, gain_in_words
from simulators import compiled
from tests.folders import finished, key


def outputs_of(root: Path, gains: list[float]) -> tuple[Outputs, pd.DataFrame]:
    """A finished run with one point for each scenario, and its speed-up."""
    count = len(gains)
    table = pd.DataFrame(
        {
            "scenario": [f"g{place}" for place in range(count)],
            "key": [key(place) for place in range(count)],
            "status": "ok",
            "reason": None,
            "engine": "event",
            "baseline": [key(place) for place in range(count)],
            "on_front": True,
            "schedule.name": ["ring" if place % 3 else "tree" for place in range(count)],
            "makespan_s": 1.0,
            "energy_J": 1.0,
            "speedup": gains,
        }
    )
    outputs = Outputs(finished(root, table))
    summary: dict[str, Any] = outputs.read_json("summary")
    summary["units"]["speedup"] = "x"
    more = {"gain": "speedup", "shown": ["schedule.name", "speedup"], "limits": {}}
    (outputs.folder / "summary.json").write_text(json.dumps({**summary, "knobs": ["schedule.name"], **more}))
    return outputs, table


def test_the_sentence_tells_the_geometric_mean_the_largest_gain_and_what_wins_most_often(tmp_path: Path) -> None:
    outputs, table = outputs_of(tmp_path, [1.0, 4.0, 2.0])
    text = conclude(outputs.read_json("summary"), table.sort_values("speedup", ascending=False))
    gains = "the geometric mean of speed-up is 2.00x over the baseline, the largest 4.00x (g1)"
    assert text == f"ring wins in 2 of 3 scenarios; {gains}"


def test_a_table_that_is_too_wide_breaks_between_words_and_stays_as_it_is_itself() -> None:
    table = Table("schedule", "time", box=None, pad_edge=False)
    table.add_row("hetero_fused_1d in 8 chunks by DMA engines", "1.25 ms", end_section=True)
    fitted = fit_columns(table, 30)
    columns = [list(column.cells) for column in fitted.columns]
    assert columns == [["hetero_fused_1d in 8\nchunks by DMA engines"], ["1.25 ms"]]
    assert fitted.rows[0].end_section
    assert list(table.columns[0].cells) == ["hetero_fused_1d in 8 chunks by DMA engines"]
    assert fit_columns(table, 200) is table


@pytest.mark.parametrize(
    ("gain", "text"), [(1.5, "tree is 1.50x faster than the baseline"), (1.0, "tree is as fast as the baseline")]
)
def test_one_scenario_needs_no_mean(tmp_path: Path, gain: float, text: str) -> None:
    outputs, table = outputs_of(tmp_path, [gain])
    assert conclude(outputs.read_json("summary"), table) == text


@pytest.mark.parametrize("verbose", [False, True])
def test_at_most_twenty_rows_are_shown_those_that_gain_most_and_all_on_demand(tmp_path: Path, *, verbose: bool) -> None:
    outputs, table = outputs_of(tmp_path, list(np.linspace(1.0, 2.0, 25)))
    unsure = {key(place): {"fastest": 0.5, "least": 0.8, "low": 0.9, "high": 2.1} for place in range(25)}
    summary = json.dumps({**outputs.read_json("summary"), "decisions": unsure})
    (outputs.folder / "summary.json").write_text(summary)
    shown, *texts = answer(outputs, table, verbose=verbose)
    assert isinstance(shown, Table)
    assert shown.row_count == (25 if verbose else 20)
    assert verbose or str(shown.caption).endswith("25 of 25")
    assert ("and 5 scenarios more: -v lists them" in texts) is not verbose
    assert ("g0" in [*shown.columns[0].cells]) is verbose


def test_claims_are_a_line_that_names_what_is_missed_with_its_sign() -> None:
    about = {"statement": "", "metric": "error", "unit": "%", "provenance": "derived", "source": ""}
    claims = [Claim(id=f"x.{name}", kind="exact", value=1, tolerance=(0, 2), **about) for name in ("right", "wrong")]
    rows = judge(claims, {"x.right": ClaimResult(1.0), "x.wrong": ClaimResult(3.0)})
    line = claims_line(rows, "toy")
    assert line.startswith(
        "claims: 1 of 2 predicted claims are within; missed: wrong +200 % (python -m dse results claims"
    )
    assert claims_line([], "toy") == ""
    untested = claims_line(judge(claims, {}, departure="another machine"), "toy")
    assert untested == "published claims were not tested: another machine"


def test_the_command_lists_the_claims_of_the_newest_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outputs, _ = outputs_of(tmp_path, [1.0])
    about = {"statement": "", "metric": "error", "unit": "%", "provenance": "derived", "source": ""}
    rows = judge([Claim(id="x.right", kind="exact", value=1, tolerance=(0, 2), **about)], {"x.right": ClaimResult(1.0)})
    (outputs.folder / "claims.json").write_text(json.dumps(rows))
    assert main(["results", "claims", "study=sweep", f"output_dir={tmp_path}"]) == 0
    output = capsys.readouterr().out
    assert "x.right" in output
    assert "1 of 1 predicted claims are within" in output


def test_a_choice_reads_as_a_person_says_it() -> None:
    row = pd.Series(
        {
            "schedule.num_chunks": 1,
            "schedule.priority": "equal",
            "schedule.name": "hetero_fused_1d",
            "schedule.comm_engine": "dma",
            "schedule.comm_cus": np.nan,
            "system.node.topology": "mesh",
            "system.gpu.num_cus": 228,
            "schedule.near_memory": False,
        }
    )
    text = choice_in_words(row, row.index)
    assert text == "hetero fused 1d by DMA, 1 chunk, on a mesh, 228 CUs, no near memory"


@pytest.mark.parametrize(("ratio", "text"), [(1.5, "1.50x faster"), (1.004, "as fast"), (0.5, "2.00x slower")])
def test_a_gain_reads_as_a_person_says_it(ratio: float, text: str) -> None:
    assert gain_in_words(ratio) == text


@pytest.mark.slow
def test_a_run_ends_with_a_line_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its bar ends at the number of points that it tells: of 24 combinations some are the same schedule."""
    monkeypatch.chdir(tmp_path)
    small = ["workload.only=[g4]", "space.schedule.num_chunks=choice(2,4)", "space.schedule.comm_cus=choice(16,32)"]
    words = ["study=ficco_sweep", *small, "store=none", "tracking=none", "figures=none", "timeline=false"]
    assert main([*words, "executor.jobs=1"]) == 0
    shown = capsys.readouterr()
    _, _, end = shown.out.partition("in short: ")
    lines = end.splitlines()[1:]
    assert len(lines) <= 8
    assert lines[-1].startswith("written to ")
    points = len(pd.read_parquet("outputs/ficco_sweep/latest/results.parquet"))
    assert lines[0].startswith(f"{points} points with ")
    bar = next(line for line in shown.err.splitlines() if line.startswith("ficco_sweep ") and "points/s" in line)
    assert f" {points}/{points} " in bar
    run = Path("outputs/ficco_sweep/latest")
    facts = json.loads((run / "provenance.json").read_text("utf-8"))
    unsure = [fact["path"] for fact in facts["facts"] if fact["provenance"] in ("memory", "assumed")]
    assert unsure and all(path not in end for path in unsure)
    assert "idle" in json.loads((run / "summary.json").read_text("utf-8"))


def test_a_module_is_told_to_be_compiled_once_and_not_again_by_processes_that_are_started(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DSE_COMPILING", "simulators.one")
    for module in ("simulators.one", "simulators.two", "simulators.two"):
        compiled._tell_compilation(module)
    assert capsys.readouterr().err == "compiling simulators.two, once, in about ten seconds\n"
    assert os.environ["DSE_COMPILING"].split() == ["simulators.one", "simulators.two"]
