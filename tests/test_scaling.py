"""Studies of whole iterations: what they claim, what they say of other spaces and models, and the figures they draw."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from benchmarks import steps
from dse import plugins
from dse.cli import main
from dse.config.options import list_options
from tests.support import CONF

FEW = ["tracking=none", "store=none", "timeline=false"]
MISSED = {
    "bert": {"attn_gemm_mp", "lamb_next"},
    "comp_vs_comm": {"comm_share_future", "band_2x", "profiling_ratio", "overlap_range_1x"},
    "seqpoint": set(),
}
UNTESTED = {"comp_vs_comm": {"band_4x"}}  # judged once, as comm_share_future
PRESENT = [name for name in MISSED if name in list_options("study")]
FIGURES = {
    "bert": {"breakdown", "times", "roofline", "what_changes", "throughput_measured"},
    "comp_vs_comm": {"serialized", "overlapped", "models_share", "projection_error", "generations"},
    "seqpoint": {
        "errors",
        "speedup_errors",
        "representatives",
        "bounds",
        "noise",
        "recurrent_measured",
        "throughput_measured",
    },
}


def run(folder: Path, study: str, *words: str) -> Path:
    """The folder of a run of a study."""
    assert main([f"study={study}", f"output_dir={folder}", *FEW, *words]) == 0
    return max((folder / study).glob("2*"))


def claims(folder: Path) -> dict[str, dict[str, Any]]:
    """Rows of claims.json by name, without the paper's."""
    rows = json.loads((folder / "claims.json").read_text("utf-8"))
    return {row["id"].partition(".")[2]: row for row in rows}


@pytest.mark.more
@pytest.mark.one_in(3)
@pytest.mark.parametrize("study", PRESENT)
def test_a_study_judges_every_claim_and_says_why_one_is_missed(study: str, tmp_path: Path) -> None:
    folder = run(tmp_path, study)
    rows = claims(folder)
    assert {name for name, row in rows.items() if row["within"] is False} == MISSED[study]
    assert {name for name, row in rows.items() if row["within"] is None} == UNTESTED.get(study, set())
    assert [name for name in MISSED[study] if not rows[name]["reason"]] == []
    assert {path.stem for path in (folder / "figures").glob("*.png")} == FIGURES[study]


@pytest.mark.parametrize("study", PRESENT)
def test_what_is_recalled_of_a_paper_is_not_shown_as_published(study: str) -> None:
    stated = plugins.load("study", study).claims()
    assert {claim.provenance for claim in stated} <= {"abstract", "derived", "memory"}
    abstract_ids = {claim.id for claim in stated if claim.provenance == "abstract"}
    assert all("abstract" in claim.source.lower() for claim in stated if claim.id in abstract_ids)


NARROW: list[tuple[str, list[str]]] = [
    ("bert", ["run.batch=8"]),
    ("bert", ["run.precision=mixed"]),
    ("bert", ["search=random", "budget.trials=3"]),
    ("bert", ["models=[llama3_8b]", "system=h100_8", "parallel.tp=8", "kernels=flash"]),
    ("bert", ["model=gnmt"]),
    ("bert", ["lengths=iwslt15", "iterations=seqpoint", "space.run.batch=choice(4,8)"]),
    ("bert", ["run.mode=decode", "kernels=flash"]),
    ("comp_vs_comm", ["parallel.tp=8", "system.gpu.flop_vs_bw=2"]),
    ("comp_vs_comm", ["space.run.batch=choice(1)", "run.mode=prefill"]),
    ("comp_vs_comm", ["search=random", "budget.trials=8"]),
    ("comp_vs_comm", ["models=[gpt3_175b]", "parallel.tp=32", "~space.model", "space.run.batch=1"]),
    ("seqpoint", ["iterations=seqpoint", "system=vega_fe"]),
    ("seqpoint", ["search=random", "budget.trials=3"]),
    (
        "seqpoint",
        ["models=[]", "model=bert_large", "lengths=iwslt15", "space.system.name=choice(vega_fe,vega_fe_16_cus)"],
    ),
    ("seqpoint", ["models=[]", "model=gnmt", "lengths=iwslt15", "system=v100_8"]),
]
NARROW = [entry for entry in NARROW if entry[0] in PRESENT]


@pytest.mark.slow
@pytest.mark.one_in(20)
@pytest.mark.parametrize(("study", "words"), NARROW, ids=lambda value: value if isinstance(value, str) else value[0])
def test_another_space_model_or_system_is_told_without_claims_that_need_the_papers(
    study: str, words: list[str], tmp_path: Path
) -> None:
    folder = run(tmp_path, study, *words, "figures=none")
    rows = claims(folder)
    assert all(row["reason"] for row in rows.values() if row["within"] is not True)
    table = pd.read_parquet(folder / "results.parquet")
    assert (table["status"] == "ok").any()
    assert np.isfinite(table.loc[table["status"] == "ok", "iteration_s"].to_numpy(float)).all()


@pytest.mark.nightly
def test_the_tp_that_memory_forces_grows_with_the_model(tmp_path: Path) -> None:
    rows = json.loads((run(tmp_path, "comp_vs_comm", "figures=none") / "models.json").read_text("utf-8"))
    now = {row["model"]: row for row in rows if row["flop_vs_bw"] == 1}
    order = ["bert_large", "megatron_8.3b", "t_nlg_17b", "gpt3_175b"]
    degrees = [now[name]["tp"] for name in order]
    assert degrees == sorted(degrees)
    assert degrees[0] == 1
    for name in now:
        shares = [row["serialized_share"] for row in rows if row["model"] == name]
        assert shares == sorted(shares)


def test_generations_and_throughput_say_where_they_are_from() -> None:
    for name in ("generations.csv", "bert_throughput.csv", "gnmt_throughput.csv"):
        lines = (CONF / "data" / name).read_text("utf-8").splitlines()
        assert lines[0].startswith("#")
        assert "source" in next(line for line in lines if not line.startswith("#"))


@pytest.mark.nightly
def test_the_speed_of_scenarios_is_measured(capsys: Any) -> None:
    assert steps.main(["--json", "--quick"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (
        report["projected_scenarios_per_s"] > report["full_scenarios_per_s"] > report["one_by_one_scenarios_per_s"] > 0
    )
