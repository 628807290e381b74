"""Contention of a GPU that is read off its own tables."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import yaml

from dse.cli import main
from dse.errors import ConfigError
from dse_calibration.slowdowns import fit_slowdowns
from simulators.hardware.machine import tree_of

COLUMNS = "other,sms,gemm_alone_s,gemm_beside_s,other_alone_s,other_beside_s"


def tables(folder: Path, engine: list[float], *, copies: float = 1.4, late: float = 0.9) -> Path:
    """Tables of GEMMs beside engines, with slowdowns, and beside copies by one SM, which are slower, and by eight."""
    rows = [f"engine_to_gpu,0,1e-3,{1e-3 * factor},1,1" for factor in engine]
    rows += [f"copy_by_sms,{sms},1,1,2e-3,{2e-3 * factor}" for sms, factor in [(1, 9.0), (8, copies)] * 12]
    (folder / "beside.csv").write_text("\n".join([COLUMNS, *rows]), "utf-8")
    starts = [f"{order},2,1,{1 + 2 * late}" for order in ["gemm first"] * 11] + ["copy first,2,1,1"] * 30
    (folder / "starts.csv").write_text("\n".join(["order,gemm_alone_s,other_alone_s,other_end_s", *starts]), "utf-8")
    return folder / "beside.csv"


def test_each_coefficient_is_the_median_of_the_rows_of_its_law(tmp_path: Path) -> None:
    engine = np.random.default_rng(0).uniform(1.0, 1.3, 21).tolist()
    coefficients = fit_slowdowns(tables(tmp_path, engine))
    truth = {"dma_beside_gemm": float(np.median(engine)), "cu_copy_beside_gemm": 1.4, "late_start": 0.9}
    truth["late_start_first"] = 0.0
    assert coefficients == pytest.approx(truth, rel=1e-3)
    # nothing gains by contention, and nine rows are too few for a law
    assert fit_slowdowns(tables(tmp_path, [0.5] * 10, copies=0.7, late=-0.4)) == dict.fromkeys(truth, 1.0) | {
        "late_start": 0.0,
        "late_start_first": 0.0,
    }
    assert set(fit_slowdowns(tables(tmp_path, engine[:9]))) == set(truth) - {"dma_beside_gemm"}


def test_calibrate_writes_a_machine_with_contention_of_its_own(tmp_path: Path) -> None:
    words = ["machine", "calibrate", "system=a100_8", f"data={tables(tmp_path, [1.2] * 10)}", f"out={tmp_path / 'o'}"]
    assert main(words) == 0
    gpu = yaml.safe_load((tmp_path / "o" / "a100_8.yaml").read_text("utf-8"))["gpu"]
    assert gpu["contention"]["dma_beside_gemm"] == 1.2
    assert gpu["contention"]["gemm_beside_cus"] == tree_of("a100_8")["gpu"]["contention"]["gemm_beside_cus"]
    assert gpu["sources"]["contention.late_start"]["calibration"]["recomputed_by"] == "slowdowns"


def test_times_that_are_none_are_refused_with_their_line(tmp_path: Path) -> None:
    file = tables(tmp_path, [1.2] * 10)
    file.write_text(file.read_text("utf-8").replace("1e-3,0.0012", "1e-3,nan", 1), "utf-8")
    with pytest.raises(ConfigError, match="line 2, gemm_beside_s"):
        fit_slowdowns(file)
