"""GEMMs that share a GPU: the predictor, and `study=goldyloc` end to end."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml

from dse.cli import main
from dse.results.run_folder import FinishedRun
from dse_papers import goldyloc
from dse_papers.goldyloc.predictor import DegreePredictor, score_choices


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["system=mi210_4"], "is needed where kernels share a GPU"),
        (["workload=dlrm"], "are no GEMMs that wait for nobody"),
        (["system.node.num_gpus=2"], "is more than the one GPU"),
        (["workload.only=[nothing]"], "names no workload of the list"),
    ],
)
def test_what_cannot_share_is_told(words: list[str], message: str, tmp_path: Path, capsys: Any) -> None:
    assert main(["study=goldyloc", f"output_dir={tmp_path}", "tracking=none", "store=none", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_a_predictor_learns_what_can_be_learned() -> None:
    """The best degree is the feature itself, or half of it."""
    random = np.random.default_rng(0)
    degrees = [1, 2, 4, 8, 16]
    features = random.uniform(0, 4, (300, 1))
    seconds = 1 + 0.2 * np.abs(np.log2(degrees)[None] - np.round(features))
    predictor = DegreePredictor.learn(features[:200], seconds[:200], degrees)
    scores = score_choices(seconds[200:], seconds[200:, 0], predictor.choose(features[200:]))
    assert scores["within_5_percent"] > 0.9
    assert scores["largest_regret"] <= 0.2 + 1e-9


FEW = ["tracking=none", "store=none", "timeline=false"]


def run(folder: Path, *words: str) -> Path:
    """The folder of a run of the study."""
    assert main(["study=goldyloc", f"output_dir={folder}", *FEW, *words]) == 0
    return max((folder / "goldyloc").glob("2*"))


@pytest.mark.nightly
def test_the_study_judges_its_claims_and_the_predictor_queues_it_has_not_seen(tmp_path: Path) -> None:
    folder = run(tmp_path)
    rows = {row["id"]: row for row in json.loads((folder / "claims.json").read_text("utf-8"))}
    missed = {name for name, row in rows.items() if row["within"] is False}
    assert missed == {"goldyloc.vs_sequential_max", "goldyloc.half_quarter_suffice"}
    assert all(rows[name]["reason"] for name in missed)
    report = json.loads((folder / "predictor.json").read_text("utf-8"))
    assert report["within_5_percent"] >= 0.95
    assert report["worst_against_sequential"] <= 1.05
    assert report["judged_on"] >= 50
    assert {path.stem for path in (folder / "figures").glob("*.png")} == {"degrees", "queues"}


@pytest.mark.nightly
def test_a_queue_of_ones_own_is_run_without_claims_that_need_all_degrees(tmp_path: Path) -> None:
    mine = {"name": "mine", "queues": [{"name": "mine", "gemms": [{"m": 64, "n": 512, "k": 512, "copies": 4}]}]}
    path = tmp_path / "my_conf" / "workload" / "mine.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(yaml.safe_dump({**mine, "description": "four of mine"}), encoding="utf-8")
    words = [f"--config-dir={tmp_path / 'my_conf'}", "workload=mine", "space.schedule.num_streams=choice(1,2,4)"]
    folder = run(tmp_path, *words)
    assert {row["within"] for row in json.loads((folder / "claims.json").read_text("utf-8"))} == {None}
    table = pd.read_parquet(folder / "results.parquet")
    assert (table["status"] == "ok").all()
    assert table["speedup"].max() > 1


def test_claims_that_need_scikit_learn_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    claims = goldyloc.STUDY.further(FinishedRun(tmp_path))
    assert len(claims) == len(goldyloc.STUDY.claims())
    assert all(claim.ours is None and "overlap-dse[learning]" in claim.remark for claim in claims.values())
