"""GEMMs by libraries of today: the equation, the layouts of other projects' tables, the fit, and the held-out rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import validity
from dse.cli import main
from dse.errors import ConfigError
from dse_calibration.calibrate import calibrate_rows
from dse_calibration.fit import LIBRARY_GEMMS, library_tiles, typical_library
from dse_calibration.layouts import read_gemms
from dse_calibration.measurements import STREAM_KINDS
from dse_calibration.rows import cast_lines
from simulators.costs.gemm import GemmShape, gemm_cost
from simulators.costs.gemm.fitted import FittedGemms
from simulators.costs.streaming import streamed
from simulators.hardware.device import Device
from simulators.hardware.machine import tree_of
from simulators.hardware.parts import Efficiency, StreamingRates

H100 = Device.of(tree_of("h100_8"))
TYPICAL_LIBRARY = typical_library(library_tiles(H100, "bf16"))
CALIBRATED = {"a100_8": ("fp16", "bf16"), "h100_8": ("fp16", "bf16"), "mi300x_8": ("fp8",), "mi355x_8": ("bf16",)}


def chip(precision: str = "bf16", **constants: Any) -> FittedGemms:
    return FittedGemms.of(H100, precision, efficiency=TYPICAL_LIBRARY.model_copy(update=constants))


def seconds(chip: FittedGemms, m: Any, n: Any, k: Any) -> Any:
    cost = gemm_cost(chip, GemmShape(m, n, k))
    return cost.seconds + cost.launch_s


# The equation

SIZES = st.integers(1, 20_000)


@given(m=SIZES, n=SIZES, k=SIZES)
def test_a_gemm_takes_at_least_its_launch_its_traffic_and_its_flop_at_the_sustained_rate(
    m: int, n: int, k: int
) -> None:
    device = chip()
    alone = float(seconds(device, m, n, k)) - TYPICAL_LIBRARY.launch_s
    flop, traffic = 2.0 * m * n * k, 2.0 * (m * k + n * k + m * n)
    peak, bandwidth = H100.gpu.peak("bf16"), H100.gpu.peak_hbm_bytes_per_s
    assert peak is not None and TYPICAL_LIBRARY.sustained is not None and TYPICAL_LIBRARY.hbm_share is not None
    assert alone >= flop / (TYPICAL_LIBRARY.sustained * peak) * (1 - 1e-9)
    assert alone >= traffic / (TYPICAL_LIBRARY.hbm_share * bandwidth) * (1 - 1e-9)


@given(m=SIZES, n=SIZES, k=SIZES, times=st.sampled_from([2, 4, 8]))
def test_a_larger_product_is_never_much_faster(m: int, n: int, k: int, times: int) -> None:
    """Parts of a split K may end where a longer K is split more finely: by no more than the time to add them."""
    base, more = (float(seconds(chip(), m, n, depth)) for depth in (k, times * k))
    assert more >= base - 3e-6
    assert float(seconds(chip(), times * m, n, k)) >= float(seconds(chip(), m, n, k)) * (1 - 1e-9)


@given(m=SIZES, n=SIZES, k=SIZES)
def test_weights_stay_in_the_cache_only_in_loops_whose_sets_fit(m: int, n: int, k: int) -> None:
    cached = chip(cache_bytes=48e6, cache_speed=3.5, weights_cache_bytes=96e6)
    step, loop = (float(gemm_cost(cached, GemmShape(m, n, k, weight_sets=sets)).seconds) for sets in (float("inf"), 6))
    assert loop <= step
    if 2.0 * (6 * m * k + n * k + m * n) > 96e6:
        assert loop == step


# Tables of other projects

AITER = "device,precision,table,tokens,out_features,in_features,us\nMI300X,fp8,t,16,5120,8704,28.8\n"


@given(traffic=st.floats(1.0, 1e12), more=st.floats(1.0, 100.0))
def test_a_stream_takes_its_least_time_or_that_of_its_bytes(traffic: float, more: float) -> None:
    constants = StreamingRates(launch_s=3e-6, hbm_share=0.5)
    base, other = (float(streamed(constants, 2e12, amount).seconds) for amount in (traffic, more * traffic))
    assert base >= max(3e-6, traffic / 1e12)
    assert base <= 3e-6 + traffic / 1e12
    assert base <= other


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text.replace("fp8", "int3"), "table.csv: holds no GEMMs"),
        (lambda text: text.replace("28.8", "-1"), "table.csv, line 2, us = '-1': must be a positive time"),
        (lambda text: text.replace("5120", "51.5"), "table.csv, line 2, out_features = '51.5': must be a whole number"),
        (lambda text: text.replace(",us", ",ms"), "table.csv: has no columns of a known layout"),
        (lambda text: text.splitlines()[0] + "\n", "table.csv: holds no GEMMs"),
    ],
)
def test_a_bad_table_is_refused_by_file_line_and_column(
    change: Callable[[str], str], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "table.csv"
    path.write_text(change(AITER), encoding="utf-8")
    with pytest.raises(ConfigError) as error:
        read_gemms(path)
    assert message in str(error.value)


@pytest.mark.parametrize("factor", [1e-3, 1e3])
def test_a_table_whose_rows_are_in_two_units_is_refused_by_line(
    factor: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = [(2.0**a, 2.0**b, 4096.0) for a in range(10, 14) for b in range(3, 13)]
    times = [1e6 * float(seconds(chip(), *size)) for size in sizes]
    times[::10] = [factor * time for time in times[::10]]
    lines = [f"H100,bf16,t,{n:.0f},{m:.0f},{k:.0f},{t:.9g}" for (m, n, k), t in zip(sizes, times, strict=True)]
    (tmp_path / "made.csv").write_text("\n".join([AITER.splitlines()[0], *lines]), encoding="utf-8")
    assert (
        main(["machine", "calibrate", "system=h100_8", f"data={tmp_path / 'made.csv'}", f"out={tmp_path / 'out'}"]) == 2
    )
    message = capsys.readouterr().err
    assert all(f"made.csv, line {line}, " in message for line in (2, 12, 22, 32))
    assert "line 3, " not in message
    assert "give every time in the unit of its column" in message


# The fit


@pytest.mark.slow
def test_constants_come_back_from_times_that_they_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    true = TYPICAL_LIBRARY.model_copy(update={"launch_s": 4e-6, "sustained": 0.6, "hbm_share": 0.88, "compute": 1.0})
    random = np.random.default_rng(5)
    m, n, k = 2.0 ** random.integers(8, 15, 300), 2.0 ** random.integers(0, 13, 300), 2.0 ** random.integers(8, 14, 300)
    times = 1e6 * seconds(FittedGemms.of(H100, "bf16", efficiency=true), m, n, k)
    lines = [f"H100,bf16,t,{b:.0f},{a:.0f},{c:.0f},{t:.9g}" for a, b, c, t in zip(m, n, k, times, strict=True)]
    table = tmp_path / "made.csv"
    table.write_text("\n".join([AITER.splitlines()[0], *lines]), encoding="utf-8")
    assert main(["machine", "calibrate", "system=h100_8", f"data={table}", f"out={tmp_path / 'out'}"]) == 0
    tree = yaml.safe_load((tmp_path / "out" / "h100_8.yaml").read_text("utf-8"))
    fitted = Efficiency.model_validate(tree["gpu"]["efficiency"]["bf16"])
    assert fitted.launch_s == pytest.approx(4e-6, rel=0.1)
    assert fitted.sustained == pytest.approx(0.6, rel=0.1)
    assert tree["gpu"]["note"]["on rows not fitted on"]["bf16 gemm"]["median"] < 0.02
    assert {"fp16 gemm", "bf16 gemm"} <= set(tree["gpu"]["note"]["on rows not fitted on"])  # of earlier tables, too
    assert len(tree["gpu"]["fitted_on"]["bf16"]["gemm"]) <= LIBRARY_GEMMS
    assert "made.csv" in tree["gpu"]["sources"]["efficiency.bf16"]["source"]


FORMATS = Path(__file__).with_name("field") / "aiconfigurator-formats" / "gemm_perf.csv"


@pytest.mark.slow
def test_formats_of_a_table_are_fitted_apart_and_closer_than_the_nearest_row() -> None:
    done = calibrate_rows(tree_of("h100_8"), read_gemms(FORMATS), FORMATS)
    medians = {}
    for predicted, errors in done.held_out():
        fitted, nearest = errors["fitted"], errors["nearest"]
        assert fitted is not None and nearest is not None
        medians[predicted.rows.precision] = fitted.median
        assert fitted.median < 0.5 * nearest.median and fitted.p90 < nearest.p90
    assert set(medians) == {"bf16", "fp8", "fp8_block"} and max(medians.values()) < 0.08
    block, tensor = (done.device.gpu.constants(name) for name in ("fp8_block", "fp8"))
    assert block is not None and tensor is not None and block.launch_s > 1.5 * tensor.launch_s
    (*lines,) = cast_lines(done.device, (predicted.rows for predicted in done.found["fitted"]))
    assert [line.partition(":")[0] for line in lines] == ["fp8", "fp8_block"]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "traffic"), [("fp8", 8.0), ("fp8_block", 30.0)])
def test_the_cast_of_inputs_comes_back_from_times_that_hold_it(name: str, traffic: float, tmp_path: Path) -> None:
    true = TYPICAL_LIBRARY.model_copy(update={"launch_s": 8e-6, "sustained": 0.6, "compute": 0.9})
    random = np.random.default_rng(6)
    m, n, k = 2.0 ** random.integers(8, 15, 300), 2.0 ** random.integers(0, 13, 300), 2.0 ** random.integers(8, 14, 300)
    casts = traffic * n * k / np.asarray(H100.gpu.hbm_rate)
    times = 1e3 * (seconds(FittedGemms.of(H100, name, efficiency=true), m, n, k) + casts)
    lines = [f"H100,{name},{b:.0f},{a:.0f},{c:.0f},{t:.9g}" for a, b, c, t in zip(m, n, k, times, strict=True)]
    table = tmp_path / "made.csv"
    table.write_text("\n".join(["device,gemm_dtype,m,n,k,latency", *lines]), encoding="utf-8")
    done = calibrate_rows(tree_of("h100_8"), read_gemms(table), table)
    (predicted,), fitted = done.found["fitted"], done.device.gpu.constants(name)
    assert fitted is not None and predicted.errors is not None
    assert fitted.cast_traffic == pytest.approx(traffic, rel=0.1)
    assert fitted.sustained == pytest.approx(0.6, rel=0.1)
    assert predicted.errors.median < 0.03


@pytest.mark.parametrize("name", CALIBRATED)
def test_shipped_constants_are_called_calibrated_and_say_what_they_were_fitted_on(name: str) -> None:
    tree = tree_of(name)
    for precision in CALIBRATED[name]:
        assert tree["gpu"]["efficiency"][precision]["tiles"]
        assert tree["gpu"]["sources"][f"efficiency.{precision}"]["provenance"] == "calibrated"
        assert 0 < len(tree["gpu"]["fitted_on"][precision]["gemm"]) <= LIBRARY_GEMMS
        assert {"median", "p90"} <= set(tree["gpu"]["note"]["on rows not fitted on"][f"{precision} gemm"])


# Held-out rows


@pytest.mark.nightly
def test_shipped_constants_predict_the_rows_that_they_were_not_fitted_on(
    shared: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert validity.main(["--data", str(shared("data/README.md").parent), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    by_device = {(row["device"], row["precision"]): row for row in report["tables"] if row["kind"] == "gemm"}
    calibrated = {(name, precision) for name, precisions in CALIBRATED.items() for precision in precisions}
    assert calibrated <= set(by_device)  # tables of other machines, to which nothing was fitted, are printed as well
    for (name, precision), row in ((place, row) for place, row in by_device.items() if place in calibrated):
        noted = tree_of(name)["gpu"]["note"]["on rows not fitted on"]
        assert row["median"] == pytest.approx(noted[f"{precision} gemm"]["median"], rel=1e-3)
        assert row["p90"] == pytest.approx(noted[f"{precision} gemm"]["p90"], rel=1e-3)
    assert report["gemm_median_worst"] == max(row["median"] for row in by_device.values())
    streams = {(row["device"], row["kind"]): row["median"] for row in report["tables"] if row["kind"] in STREAM_KINDS}
    assert set(streams) == {(device, kind) for device in ("a100_8", "h100_8") for kind in STREAM_KINDS}
    assert report["elementwise_median_worst"] == max(streams.values()) < 0.15
