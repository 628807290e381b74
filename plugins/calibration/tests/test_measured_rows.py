"""Rows of measured tables: costed as operators elsewhere are, held against recurrent layers, read within bounds."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dse.cli import main
from dse.errors import ConfigError
from dse_calibration.measurements import MeasuredRows, read
from dse_calibration.rows import cost_of
from simulators.hardware import machine
from simulators.hardware.device import Device
from simulators.steps.operators.work import Op, Platform, Recurrence, operator_costs
from tests.test_costs import GEMMS, by_iterations, described
from tests.test_recurrent_steps import VEGA


@pytest.mark.parametrize("name", ["h100_8", "a100_8"])
def test_a_row_of_a_gemm_takes_as_long_as_the_gemm_in_an_iteration(name: str) -> None:
    device = Device.of(machine.merged(described(name, "fitted"), {"gpu": {"loaded": None}}))
    m, n, k = np.array(GEMMS, float).T
    shape = {"m": n, "n": m, "k": k, "ta": np.ones(len(m)), "tb": np.zeros(len(m))}
    ones, names = np.ones((len(m), 1)), tuple(map(str, GEMMS))
    rows = MeasuredRows(device.name, "bf16", "gemm", shape, ones, names, tuple(range(len(m))), ("",) * len(m))
    cost = cost_of(device, rows)
    assert cost is not None
    assert list(cost.seconds[:, 0]) == pytest.approx(by_iterations(device, GEMMS), rel=1e-12, abs=0)


def test_forward_passes_of_gru_layers_are_within_a_third_of_those_measured(shared: Callable[[str], Path]) -> None:
    (rows,) = (part for part in read(shared("data/deepbench/AMD_VegaFE.csv")) if part.kind == "recurrent")
    rows = rows.take((rows.shape["gates"] == 3) & (rows.shape["hidden"] > 1024) & (rows.shape["n"] == 32))
    assert rows.size == 16
    for hidden in np.unique(rows.shape["hidden"]):
        rows_of_size = rows.take(rows.shape["hidden"] == hidden)
        steps, measured = rows_of_size.shape["t"], rows_of_size.seconds[:, 0]
        slope = np.polyfit(steps, measured, 1)[0]
        assert np.abs(slope * steps / measured - 1).max() < 0.08  # proportional, but for one kernel's choice
        (cost,) = operator_costs(
            [Op("steps", "recurrent", "forward", Recurrence(3, hidden, 32, steps, 0))], Platform(VEGA, VEGA)
        )
        assert np.abs(cost.seconds / measured - 1).max() < 0.33


@pytest.mark.parametrize("kind", ["device", "large", "absent"])
@pytest.mark.usefixtures("elsewhere")
def test_only_a_plain_file_of_a_bounded_size_is_read(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    path, part = Path("odd.csv"), {"device": "a device", "large": "is larger than", "absent": "is no file"}[kind]
    if kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "large":
        with path.open("wb") as file:
            file.truncate(1 << 40)  # sparse: it takes no room
    with pytest.raises(ConfigError, match=part) as caught:
        read(path)
    assert str(path) in str(caught.value) and (kind == "absent" or caught.value.problems[0].way_out)
    assert main(["machine", "calibrate", "system=v100_8", f"data={path}", "out=fitted"]) == 2
    assert part in capsys.readouterr().err


@pytest.mark.nightly
@pytest.mark.usefixtures("elsewhere")
def test_a_study_of_overlaps_is_drawn_and_judged_whatever_is_recorded() -> None:
    words = ["tracking=none", "fidelity=none", "timeline=false", "executor.jobs=1"]
    assert main(["study=overlap_measured", "study.recorded=[]", *words]) == 0
    (claims,) = Path("outputs").glob("*/latest/claims.json")
    assert json.loads(claims.read_text("utf-8"))
    assert list(claims.parent.glob("figures/*.png"))
