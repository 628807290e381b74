"""What a study's claims and figures read is in its table, whatever a person records or searches."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest

from dse import plugins
from dse.cli import main
from dse.config.options import list_options
from tests.test_config import planned

pytestmark = pytest.mark.slow

SMALL = ["tracking=none", "fidelity=none", "timeline=false", "executor.jobs=1"]
FLAGSHIP = ["study=ficco_sweep", "workload.only=[g4]", "space.schedule.num_chunks=choice(2,8)"]


@pytest.mark.more
@pytest.mark.one_in(9)
@pytest.mark.parametrize(
    "words",
    [
        [*FLAGSHIP, "schedule=chunked"],
        [*FLAGSHIP, "space.schedule.name=glob(*_1d,exclude=shard*)"],
        [*FLAGSHIP, "study.recorded=[schedule.name]"],
        ["study=conccl", "study.recorded=[]"],
    ],
    ids=lambda words: " ".join(words[0:1] + words[-1:]),
)
def test_a_study_is_drawn_and_judged_whatever_is_recorded_or_searched(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*words, *SMALL]) == 0
    (claims,) = Path("outputs").glob("*/latest/claims.json")
    assert json.loads(claims.read_text("utf-8"))
    assert list(claims.parent.glob("figures/*.png"))


@pytest.mark.one_in(14)
@pytest.mark.parametrize("study", sorted(set(list_options("study")) - {"measure_my_gpu"}))
def test_the_columns_that_a_study_needs_are_recorded_or_searched(study: str) -> None:
    module = planned(f"study={study}").settings.study.module
    without = planned(f"study={study}", "++study.recorded=[]")
    needed = plugins.load("study", module).columns
    assert set(needed) <= {*without.recorded_paths, *without.knobs}


@pytest.mark.nightly
def test_a_path_that_no_design_has_is_an_empty_column(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*FLAGSHIP, "space.schedule.name=choice(serial,shard_p2p)", *SMALL]) == 0
    (table,) = Path("outputs").glob("*/latest/results.parquet")
    assert pd.read_parquet(table)["schedule.chunk_dim"].isna().all()
