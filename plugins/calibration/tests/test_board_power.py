"""Fits of boards' power: what they find again, and what they refuse."""

from __future__ import annotations

import pandas as pd
import pytest

from dse.config.options import conf_dir
from dse_calibration.board_power import fit_governor, limit_clock, limit_flop_j, read_throttle
from simulators.costs.power import Activity, board_w
from simulators.hardware.machine import tree_of
from simulators.hardware.parts import Power
from simulators.hardware.schedule_system import ScheduleSystem

AT_THE_LIMIT = ("b200_8", "b300_8", "gb200_72", "gb300_72", "mi300x_8", "mi325x_8", "mi355x_8", "l40s_8")
"""Systems whose energy of an operation follows from the board's limit."""


@pytest.mark.parametrize("name", AT_THE_LIMIT)
def test_an_energy_that_follows_from_the_limit_is_the_one_that_is_shipped(name: str) -> None:
    tree = tree_of(name)
    power = Power.model_validate(tree["gpu"]["power"])
    assert limit_flop_j(ScheduleSystem.of(tree), power) == pytest.approx(power.flop_j["bf16"], rel=0.02)


def test_a_sustained_rate_has_the_clock_at_which_it_draws_the_limit() -> None:
    """Of A100, whose products were measured at the limit; those of H100 were not (`gpu.loaded`)."""
    tree = tree_of("a100_8")
    system, power = ScheduleSystem.of(tree), Power.model_validate(tree["gpu"]["power"])
    clocks = {form: constants.sustained_clock for form, constants in system.gpu.efficiency.items()}
    assert {form for form, clock in clocks.items() if clock is not None} == {"bf16"}
    assert limit_clock(system, power, "bf16") == pytest.approx(clocks["bf16"], rel=0.005)


@pytest.mark.parametrize("name", ["h100", "h200"])
def test_the_law_gives_the_watts_that_were_recorded(name: str) -> None:
    """Of GEMMs at the limit and of element-wise kernels, once the mean of the board's own sensor has settled."""
    power = Power.model_validate(tree_of(f"{name}_8")["gpu"]["power"])
    table = pd.read_csv(conf_dir() / "data" / "measured" / f"{name}_2026-11-26" / "clocks.csv", comment="#")
    settled = table[table["at_s"] > 2.0].groupby("work")[["call_s", "sm_clock_mhz", "power_w"]].mean()
    flop, moved = 2 * 8192.0**3, 2.0 * 256 * 2**20
    for work, precision, count, num_bytes, stream in (
        ("gemm 8192", "bf16", flop, 3 * 2 * 8192.0**2, 0.0),
        ("gemm 8192 fp8", "fp8", flop, 2 * 2 * 8192.0**2, 0.0),
        ("elementwise", "bf16", 0.0, moved, moved),
    ):
        row = settled.loc[work]
        rates = Activity(*(amount / row["call_s"] for amount in (count, num_bytes, 0.0, 0.0, stream)))
        drawn = board_w(power, 1e6 * row["sm_clock_mhz"] / power.clock_hz, rates, precision)
        assert float(drawn) == pytest.approx(row["power_w"], rel=0.02), work


def test_constants_of_a_governor_are_those_of_its_rows() -> None:
    power = Power.model_validate(tree_of("a100_8")["gpu"]["power"])
    rows = read_throttle()
    assert fit_governor(power, rows) == pytest.approx({"window_s": power.window_s, "dip": power.dip}, rel=1e-3)
    with pytest.raises(ValueError, match="no window"):
        fit_governor(power, [(*row[:3], not row[3]) for row in rows])
