"""Measured power of boards that serve, against the model; and the fit to three rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dse.errors import ConfigError
from dse_serving.energy import served_power
from dse_serving.served_power import TABLE, fit_tree, read_served, unfitted

MEASURED = Path(__file__).parents[4] / "shared" / "data" / "power" / "inferencex_dsv4_b200.csv"


def test_the_shipped_constant_is_that_of_the_fit() -> None:
    rows = read_served()
    power = rows[0].power
    assert fit_tree(rows, power.model_copy(update={"tree_w": 1.0})) == pytest.approx(power.tree_w, rel=0.005)
    errors = [row.drawn(power).gpu_w / row.watts - 1 for row in rows]
    assert np.abs(errors).max() < 0.03


def test_watts_of_rows_that_were_not_fitted_are_within_a_tenth_in_the_median() -> None:
    if not MEASURED.is_file():
        pytest.skip(f"{MEASURED} is missing")
    rows = list(unfitted(read_served(MEASURED)))
    assert len(rows) == 9
    errors = [abs(row.drawn(row.power).token_j / row.token_j - 1) for row in rows]
    assert np.median(errors) < 0.10
    together = [error for row, error in zip(rows, errors, strict=True) if not row.apart]
    assert max(together) < 0.12


def test_engines_of_prompts_have_a_layout_of_their_own() -> None:
    if not MEASURED.is_file():
        pytest.skip(f"{MEASURED} is missing")
    row = next(row for row in read_served(MEASURED) if row.apart)
    assert row.prompts is not None
    assert (int(row.prompts.parallel.dp), int(row.design.parallel.dp)) == (8, 1)
    # data-parallel attention reads and sums the streams of residuals once, tensor parallelism on each GPU
    split = served_power(row.design, row.power, row.traffic)
    assert split is not None
    assert row.drawn(row.power).gpu_w < split.gpu_w


def test_a_table_without_a_number_is_refused_by_its_row(tmp_path: Path) -> None:
    text = TABLE.read_text().replace("389.949", "much")
    (tmp_path / "rows.csv").write_text(text)
    with pytest.raises(ConfigError, match="vllm 1 together: w_per_gpu"):
        fit_tree(read_served(tmp_path / "rows.csv"), read_served()[0].power)
