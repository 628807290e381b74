"""Every shipped study answers its question first: its quantity is there, no bound wins, the heading is true."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml

from benchmarks import claims
from dse.cli import main
from dse.config.options import list_options
from dse.results.answer import answer_tables, winners_in_words
from dse.results.pareto import Answer, Contest, Standings
from dse.results.run_folder import Outputs
from tests.campaigns import answer_check
from tests.folders import finished, key

STUDY = Path(__file__).parents[1] / "conf" / "study"
RUN_ELSEWHERE = {"measure_my_gpu"}  # by plugins/torch_gpu/tests/test_torch.py, where PyTorch is


def test_each_study_says_what_answers_it_and_no_question_says_what_a_run_may_change() -> None:
    numbers = r"\b(\d[\d,]*|two|three|four|eight|fourteen|sixteen|seventeen)\b"
    machines = "|".join(("MI\\d+", "H100", "A100", *map(re.escape, list_options("system"))))
    for path in STUDY.glob("*.yaml"):
        study = yaml.safe_load(path.read_text("utf-8"))["study"]
        assert not re.search(f"{numbers}|\\b({machines})\\b", study["question"]), path.stem
        assert study["answer"]["shows"], path.stem
    assert set(answer_check.QUANTITIES) == set(answer_check.SMALL) >= set(list_options("study"))


@pytest.mark.more
@pytest.mark.slow
@pytest.mark.one_in(30)
@pytest.mark.parametrize("study", sorted(set(list_options("study")) - RUN_ELSEWHERE))
def test_the_first_table_has_the_quantity_of_the_question_and_the_heading_what_was_run(
    study: str, tmp_path: Path
) -> None:
    outputs = answer_check.small_run(study, tmp_path)
    assert list(answer_check.faults(outputs)) == []
    table = outputs.read_table("results")
    if "fraction_of_ideal" in table:
        assert (table["fraction_of_ideal"].dropna() <= 1 + 1e-9).all()
    for page in outputs.folder.glob("*.html"):  # where a plug-in writes it
        text = page.read_text("utf-8")
        assert all(name in text for name in answer_check.read(outputs).head if "'" not in name)


@pytest.mark.nightly
def test_a_network_without_directions_is_no_sentence_that_stops(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["applications=[lenet]", "measured=[]", "run.requests=20000", "run.most=100000", *answer_check.QUIET]
    assert main(["study=convolution_patterns", f"output_dir={tmp_path}", *words]) == 0
    assert "application.direction is not searched: it means nothing for what was typed" in capsys.readouterr().err
    sentence = Outputs.latest(tmp_path, "convolution_patterns").read_json("summary")["answer"]
    assert re.fullmatch(r"The busiest channel has up to \d.*the mean.*", sentence)


def table_of(names: list[str], seconds: list[float]) -> pd.DataFrame:
    """Points of one scenario; the first is the baseline."""
    keys = [key(place) for place in range(len(names))]
    common = {"scenario": "g1", "status": "ok", "reason": None, "engine": "event", "on_front": True}
    columns = {"key": keys, "baseline": keys[0], "schedule.name": names, "makespan_s": seconds, "energy_J": 1.0}
    return pd.DataFrame({**columns, **common})


ANSWER = Answer(bounds={"schedule.name": ("ideal",)}, baselines={"schedule.name": ("serial",)})
GOALS = {"makespan_s": "minimize"}


def test_neither_a_bound_nor_a_baseline_wins_however_fast_they_are() -> None:
    table = table_of(["base", "ideal", "serial", "slow", "ring"], [1.0, 0.1, 0.2, 3.0, 2.0])
    assert list(Contest(ANSWER).winners(table, GOALS)["schedule.name"]) == ["ring"]
    assert list(Contest(ANSWER.model_copy(update={"baseline_may_win": True})).winners(table, GOALS)["key"]) == [key(0)]


def test_what_alone_was_run_is_shown() -> None:
    assert list(Contest(ANSWER).winners(table_of(["serial"], [1.0]), GOALS)["schedule.name"]) == ["serial"]


def test_of_equally_good_choices_the_declared_one_wins_in_a_table_and_while_rows_come() -> None:
    import pyarrow as pa

    table = table_of(["base", "tree", "ring", "mesh"], [9.0, 1.0, 1.0, 2.0]).assign(chunks=[1, 8, 32, 1])
    contest = Contest(ANSWER, ("schedule.name", "chunks"), {"schedule.name": "mesh", "chunks": "32"})
    assert list(contest.winners(table, GOALS)["schedule.name"]) == ["ring"]
    assert contest.ties(table, GOALS) == {"schedule.name": 1, "chunks": 1}
    for name in ("scenario", "status"):
        table[name] = pd.Categorical(table[name], categories=["g1"] if name == "scenario" else ["ok", "infeasible"])
    standings = Standings(GOALS, 1, rows=contest)
    batch = pa.RecordBatch.from_pandas(table, preserve_index=False)
    assert [standings.take(batch.slice(place, 1)) for place in range(4)][1:] == [[(0, 0)], [(0, 0)], []]


def test_a_bound_is_on_no_front_and_is_not_replayed_while_rows_come() -> None:
    import pyarrow as pa

    table = table_of(["base", "ideal", "ring", "serial"], [1.0, 0.1, 2.0, 0.2])
    for name in ("scenario", "status"):
        table[name] = pd.Categorical(table[name], categories=["g1"] if name == "scenario" else ["ok", "infeasible"])
    batch = pa.RecordBatch.from_pandas(table, preserve_index=False)
    standings = Standings(GOALS, 1, rows=Contest(ANSWER))
    improved = [first for first in range(4) if standings.take(batch.slice(first, 1))]
    assert improved[-1] == 2  # the ring, though what came before and after it takes less
    assert standings.marks(batch).tolist() == [False, False, False, True]
    assert np.asarray(Contest(ANSWER).may_win(batch)).tolist() == [False, False, True, False]


def test_a_choice_counts_as_at_its_worst_over_what_it_must_hold_for() -> None:
    table = table_of(["base", "ring", "ring", "tree", "tree"], [9.0, 1.0, 5.0, 3.0, 4.0])
    table["system"] = ["a", "a", "b", "a", "b"]
    contest = Contest(Answer(over=("system",)), ("schedule.name", "system"))
    (row,) = contest.winners(table, GOALS).to_dict("records")
    assert (row["schedule.name"], row["makespan_s"]) == ("tree", 4.0)


def test_values_of_a_path_are_columns_of_the_first_table(tmp_path: Path) -> None:
    table = table_of(["base", "ring", "tree"], [3.0, 2.0, 1.0])
    outputs = Outputs(finished(tmp_path, table))
    record = {**outputs.read_json("summary"), "contest": {"across": "schedule.name", "shows": ["makespan_s"]}}
    best = Contest.of(record).winners(table, record["goals"], apart=True)
    shown = winners_in_words(record, best)
    assert [str(column.header) for column in shown.columns] == ["scenario", "makespan, ring", "makespan, tree"]
    assert [list(column.cells) for column in shown.columns] == [["g1"], ["2.000 s"], ["1.000 s"]]
    assert list(answer_tables(outputs, table))


def claim(study: str, name: str, *, within: bool | None, provenance: str = "abstract") -> tuple[str, dict[str, object]]:
    more = {"basis": "predicted", "error": 0.5, "flips": None, "kind": "exact", "unit": "x", "reason": "why"}
    return study, {"id": f"ficco.{name}", "within": within, "provenance": provenance, **more}


def test_a_paper_has_one_row_over_all_its_studies_and_the_worst_verdict_counts() -> None:
    records: dict[str, list[dict[str, object]]] = {"ficco_sweep": [], "ficco": []}
    for study, row in (
        claim("ficco_sweep", "rule", within=None),
        claim("ficco", "rule", within=False),
        claim("ficco_sweep", "best", within=True),
        claim("ficco", "best", within=True),
        claim("ficco_sweep", "never", within=None),
        claim("ficco", "never", within=None),
        claim("ficco", "share", within=True, provenance="derived"),
    ):
        records[study].append(row)
    head, _, line, total = claims.trust(records)
    assert head.split(" | ")[2] == "abstract: within"
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[:3] == ["FiCCO", "`ficco`, `ficco_sweep`", "1 of 3"]
    assert cells[3:] == ["rule missed +50 %, never not tested", "–", "1 of 1"]
    assert "1 of 3" in total
