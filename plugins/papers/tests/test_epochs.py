"""Studies of BERT and SeqPoint end to end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

from dse.cli import main
from tests.test_scaling import FEW, claims, run


@pytest.mark.nightly
def test_a_model_of_ones_own_is_a_file(tmp_path: Path) -> None:
    mine = {"name": "mine", "layers": 2, "hidden": 512, "heads": 8, "ffn": 1024, "gated": True, "vocab": 1000}
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(mine), encoding="utf-8")
    folder = run(tmp_path, "bert", f"models=[{path}]", "run.batch=2", "figures=none")
    table = pd.read_parquet(folder / "results.parquet")
    assert set(table["scenario"]) == {"mine"}
    assert {row["within"] for row in claims(folder).values()} == {None}


@pytest.mark.more
@pytest.mark.slow
def test_representatives_stand_for_every_iteration_of_an_epoch(tmp_path: Path) -> None:
    words = ["models=[{model: gnmt, lengths: iwslt15}]", "iterations=seqpoint", "system=vega_fe", "figures=none"]
    folder = run(tmp_path, "seqpoint", *words)
    (points,) = json.loads((folder / "points.json").read_text("utf-8")).values()
    table = pd.read_parquet(folder / "results.parquet")
    assert sum(point["weight"] for point in points) == table["iterations"].iloc[0]
    projected_s = sum(point["weight"] * point["seconds"] for point in points)
    assert projected_s == pytest.approx(table["projected_s"].iloc[0], rel=1e-12)
    assert table["iteration_s"].iloc[0] == pytest.approx(projected_s / table["iterations"].iloc[0], rel=1e-12)


@pytest.mark.nightly
def test_an_epoch_whose_iterations_are_all_simulated_is_projected_as_it_is(tmp_path: Path) -> None:
    words = ["models=[{model: gnmt, lengths: iwslt15}]", "iterations=all", "figures=none"]
    table = pd.read_parquet(run(tmp_path, "seqpoint", *words) / "results.parquet")
    assert table["projection_error"].max() < 1e-12
    assert table["speedup_error"].max() < 1e-12


@pytest.mark.slow
def test_prior_iterations_that_an_epoch_does_not_have_are_refused(tmp_path: Path, capsys: Any) -> None:
    words = ["study=seqpoint", f"output_dir={tmp_path}", *FEW, "iterations=prior", "iterations.window=5000"]
    assert main(words) == 2
    assert "iterations.window = 5000: ends beyond the 445 iterations of an epoch" in capsys.readouterr().err


@pytest.mark.more
@pytest.mark.slow
def test_a_schedule_with_more_pieces_than_the_shortest_sequence_has_rows_breaks_a_rule(tmp_path: Path) -> None:
    schedules = "flux,vllm_async_tp,triton_distributed,flagtree_gemm_allreduce,uniform_fused_1d"
    words = ["lengths=iwslt15", f"+space.sites.ffn_out=choice(serial,{schedules})", "sites.attention_out=serial"]
    words += ["parallel.split_ctas=0", "parallel.collectives=library", "parallel.sequence_parallel=false"]
    words += ["candidates=all"]
    folder = run(tmp_path, "plan", *words, "search=exhaustive", "figures=none")
    table = pd.read_parquet(folder / "results.parquet").set_index("sites.ffn_out").loc[schedules.split(",")]
    assert set(table["status"]) == {"infeasible"}
    assert "sites.ffn_out.rows = 1: gives some of the GPUs no row" in str(table["reason"].iloc[0])


@pytest.mark.nightly
def test_training_of_gnmt_takes_about_as_long_as_measured(tmp_path: Path) -> None:
    words = ["models=[{model: gnmt, lengths: iwslt15}]", "iterations=seqpoint", "system=vega_fe", "figures=none"]
    rows = pd.read_parquet(run(tmp_path, "seqpoint", *words) / "throughput.parquet")
    assert len(rows) == 5
    assert ((rows["ours_per_s"] / rows["measured_per_s"] - 1).abs() < 0.25).all()
