"""GEMMs that share one GPU: kernels, occupancy, the cache, degrees of concurrency, and who picks them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from dse.backend import Batch
from dse.cli import main
from simulators.costs.gemm.sharing import SHARES, Choice, chosen, kernels
from simulators.hardware.machine import Gpu
from simulators.hardware.system import ScheduleSystem
from simulators.overlap.backend import OverlapBackend
from studies.goldyloc.predictor import DegreePredictor, score_choices
from tests.support import shipped

GPU: Gpu = ScheduleSystem.of(shipped("system")["mi100"]).gpu
BACKEND = OverlapBackend("fluid")
SIZES = st.integers(1, 64).map(lambda size: 64 * size)
DEGREES = st.integers(1, 16)


def makespan(shapes: list[tuple[int, int, int]], kernels_: Choice, degree: int, **knobs: Any) -> float:
    """Time of a queue."""
    gemms = [{"m": m, "n": n, "k": k} for m, n, k in shapes]
    tree = {
        "system": {**shipped("system")["mi100"], **knobs},
        "workload": {"name": "mine", "queues": [{"name": "mine", "gemms": gemms}]},
        "schedule": {**shipped("schedule")["go_kernels"], "kernels": kernels_, "num_streams": degree},
    }
    (result,) = BACKEND.evaluate([Batch(BACKEND.design(BACKEND.scenarios(tree)["mine"]))])
    assert result.ok.all()
    return float(result.column("makespan_s")[0])


@pytest.mark.slow
@given(SIZES, SIZES, SIZES)
def test_one_after_another_takes_the_sum_of_what_each_takes_alone(m: int, n: int, k: int) -> None:
    alone = float(chosen(GPU, (m, n, k), precision="fp16").seconds(GPU)) + GPU.kernel_launch_s
    assert makespan([(m, n, k)], "isolated", 1) == pytest.approx(alone, rel=1e-9)
    assert makespan([(m, n, k)] * 3, "isolated", 1) == pytest.approx(3 * alone, rel=1e-9)


@pytest.mark.slow
@given(SIZES, SIZES, SIZES, DEGREES, st.sampled_from(["isolated", "shared", "best"]))
def test_equal_gemms_at_once_take_what_the_closed_form_says(m: int, n: int, k: int, degree: int, how: Choice) -> None:
    kernel = chosen(GPU, (m, n, k), precision="fp16", degree=degree, choice=how)
    wanted = float(kernel.together(GPU, degree)) + GPU.kernel_launch_s
    assert makespan([(m, n, k)] * degree, how, degree) == pytest.approx(wanted, rel=1e-9)


@given(SIZES, SIZES, SIZES, DEGREES)
def test_globally_optimised_kernels_are_no_worse_than_the_librarys_and_no_better_than_the_best(
    m: int, n: int, k: int, degree: int
) -> None:
    times = [
        float(chosen(GPU, (m, n, k), precision="fp16", degree=degree, choice=how).together(GPU, degree))
        for how in ("best", "shared", "isolated")
    ]
    assert times == sorted(times)


@given(SIZES, SIZES, SIZES)
def test_fewer_cus_never_make_a_kernel_faster(m: int, n: int, k: int) -> None:
    times = [kernels(GPU, (m, n, k), precision="fp16", share=share).seconds(GPU) for share in SHARES]
    assert (times[0] <= times[1] * (1 + 1e-12)).all()
    assert (times[1] <= times[2] * (1 + 1e-12)).all()


def test_a_grid_of_hardware_and_shapes_is_as_its_designs_one_by_one() -> None:
    tree = {
        "system": shipped("system")["mi100"],
        "workload": {
            "name": "mine",
            "queues": [{"name": "mine", "gemms": [{"m": 256, "n": 512, "k": 512, "copies": 4}]}],
        },
        "schedule": {**shipped("schedule")["go_kernels"], "num_streams": 3},
    }
    design = BACKEND.design(BACKEND.scenarios(tree)["mine"])
    axes = {
        "system.gpu.num_cus": np.array([60, 120]),
        "system.gpu.llc.bytes": np.array([1e6, 8e6, 64e6]),
        "system.gpu.hbm_bytes_per_s": np.array([2e11, 1e12]),
        "workload.operators.g01.m": np.array([64, 2048]),
    }
    assert all(BACKEND.is_axis(path, design) for path in axes)
    batch = Batch(Batch(design, axes).at(0), axes)
    (grid,) = BACKEND.evaluate([batch])
    alone = [
        float(result.column("makespan_s")[0])
        for result in BACKEND.evaluate([Batch(point) for point in batch.designs()])
    ]
    assert grid.column("makespan_s") == pytest.approx(alone, rel=1e-12)
    assert len(set(alone)) > 4


def test_small_gemms_gain_from_company() -> None:
    small = [(128, 768, 768)] * 16
    assert makespan(small, "shared", 16) < 0.5 * makespan(small, "isolated", 1)


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


@pytest.mark.slow
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
