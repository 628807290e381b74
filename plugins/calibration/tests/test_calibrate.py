"""Calibrating a device on a table of measurements, and what is wrong with tables."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from dse.cli import main
from dse.config.options import conf_dir
from dse.errors import ConfigError
from dse_calibration.calibrate import calibrate_rows, interval_lines
from dse_calibration.collectives import COLLECTIVE_ROWS, MOST_COLLECTIVES
from dse_calibration.fit import (
    LIBRARY_GEMMS,
    LIBRARY_PRIORS,
    MOST,
    PRIORS,
    PROTOCOL_PRIORS,
    SWITCH_PRIORS,
    TUNED_PRIORS,
    TYPICAL,
    medoids,
)
from dse_calibration.measurements import MeasuredRows, read
from dse_calibration.rows import on_device
from dse_calibration.tables import read_folder
from simulators.hardware.device import Device
from simulators.hardware.machine import tree_of
from simulators.hardware.network import Protocols
from simulators.hardware.parts import Efficiency
from simulators.hardware.residuals import OWN, JointDraws, ResidualGroup

DEVICE: dict[str, Any] = {
    "name": "own",
    "gpu": {
        "measured_as": "OWN",
        "num_cus": 40,
        "peak_hbm_bytes_per_s": "600 GB/s",
        "peak_flop_per_s": {"fp32": "9 TFLOP/s"},
    },
    "sources": {"gpu": {"provenance": "derived", "source": "made up for a test"}},
}
TRUE = Efficiency(launch_s=9e-6, compute=0.8, feed=1.1, transposed=0.2, narrow=2.2, latency_s=8e-8)
HEADER = (
    "device,precision,op,m,n,k,ta,tb,fwd_ms,w,h,c,r,s,pad_h,pad_w,stride_v,stride_h,bwd_data_ms,bwd_filter_ms,hidden,t"
)


@pytest.fixture
def device(tmp_path: Path) -> Path:
    path = tmp_path / "own.yaml"
    path.write_text(yaml.safe_dump(DEVICE))
    return path


def lines_of_gemms(random: np.random.Generator, count: int) -> list[str]:
    sizes = 2 ** random.integers(4, 13, (count, 3)) - random.integers(0, 2, (count, 3)) * 3
    layouts = random.choice(["N", "T"], (count, 2))
    return [f"OWN,fp32,gemm,{m},{n},{k},{ta},{tb},1" for (m, n, k), (ta, tb) in zip(sizes, layouts, strict=True)]


def table(path: Path, lines: Sequence[str], columns: str = HEADER) -> Path:
    path.write_text("\n".join([columns, *lines]) + "\n")
    return path


def measured_by_the_model(path: Path, *, noise: float, lines: Sequence[str], true: Efficiency = TRUE) -> Path:
    """A table whose times are what the model says for some constants, with log-normal noise."""
    random, rows_out = np.random.default_rng(7), []
    rows = {
        line: (table_part, place)
        for table_part in read(table(path, lines))
        for place, line in enumerate(table_part.lines)
    }
    times = {id(table_part): on_device(Device.of(DEVICE), true, table_part).seconds for table_part, _ in rows.values()}
    for number, line in enumerate(lines, 2):
        part, place = rows[number]
        seconds = times[id(part)][place] * np.exp(noise * random.standard_normal(len(part.passes)).clip(-0.5))
        cells = dict(zip(HEADER.split(","), line.split(","), strict=False))
        cells |= {f"{name}_ms": repr(float(value * 1e3)) for name, value in zip(part.passes, seconds, strict=True)}
        rows_out.append(",".join(cells.get(name, "") for name in HEADER.split(",")))
    return table(path, rows_out)


def lines_of_layers() -> list[str]:
    return [
        f"OWN,fp32,{op},,{n},,,,1,,,,,,,,,,,,{hidden},{t}"
        for op, n, hidden, t in (
            *(("lstm", n, h, 25) for n in (16, 32, 64) for h in (512, 1024, 2048)),
            *(("vanilla", n, 1760, 50) for n in (16, 32, 128)),
        )
    ]


@pytest.mark.more
@pytest.mark.parametrize("true", [TRUE, TRUE.model_copy(update={"fused_setup_s": 1.5e-3})], ids=["launched", "fused"])
def test_constants_come_back_from_times_that_they_made(tmp_path: Path, device: Path, true: Efficiency) -> None:
    """A set-up of fused steps, too, where there is one, and there alone."""
    lines = [*lines_of_gemms(np.random.default_rng(1), 120), *lines_of_layers()]
    data = measured_by_the_model(tmp_path / "times.csv", noise=0.01, lines=lines, true=true)
    assert main(["machine", "calibrate", f"system={device}", f"data={data}", f"out={tmp_path / 'out'}"]) == 0
    system = yaml.safe_load((tmp_path / "out" / "own.yaml").read_text())
    for name, value in true.model_dump(exclude_none=True).items():
        assert system["gpu"]["efficiency"]["fp32"][name] == pytest.approx(value, rel=0.15), name
    assert ("fused_setup_s" in system["gpu"]["efficiency"]["fp32"]) == (true.fused_setup_s is not None)
    errors = json.loads((tmp_path / "out" / "errors.json").read_text())
    assert errors["gemm_median"] < 0.02
    assert errors["recurrent_median"] < 0.02
    assert errors["conv_median"] is None
    assert errors["poor"] == []
    assert system["gpu"]["sources"]["efficiency.fp32"]["provenance"] == "calibrated"
    fitted = system["gpu"]["fitted_on"]["fp32"]
    assert {kind: len(names) <= MOST[kind] for kind, names in fitted.items()} == {"gemm": True, "recurrent": True}
    with (tmp_path / "out" / "residuals.csv").open() as text:
        rows = list(csv.DictReader(text))
    assert {row["shape"] for row in rows if row["fitted"] == "True"} == {
        name for names in fitted.values() for name in names
    }
    assert (tmp_path / "out" / "figures" / "calibration.png").is_file()


def test_intervals_that_get_wider_say_so() -> None:
    widths = [("", 0.01), ("", 0.9), ("fp16", 0.01), ("fp16", 0.9)]  # narrow parts go without a line of their own
    groups = [ResidualGroup("gemm", "h100_sxm", key, low=-half, high=half, basis="own") for key, half in widths]
    narrow, wide, part = interval_lines(groups)
    assert "wider" not in narrow and "; wider, as your rows" in wide and part.startswith("intervals of gemm of fp16: ")


@pytest.mark.more
def test_a_file_that_was_calibrated_is_a_system_again(
    tmp_path: Path, device: Path, elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = lines_of_gemms(np.random.default_rng(1), 60)
    data = measured_by_the_model(tmp_path / "times.csv", noise=0.02, lines=lines)
    assert main(["machine", "calibrate", f"system={device}", f"data={data}", f"out={tmp_path / 'out'}"]) == 0
    file = tmp_path / "out" / "own.yaml"
    assert "intervals of gemm: +-" in capsys.readouterr().out
    residuals = JointDraws(8, 0).of(Device.of(tree_of(str(file))).gpu).residuals
    group = residuals.of("gemm", "anything", "fp32")  # its own rows, whatever it is called in tables
    assert group.source.startswith(OWN) and group.high - group.low < 0.2
    words = ["study=operators", f"devices=[{file}]", f"study.data_dir={tmp_path}", "tracking=none", "store=none"]
    assert main(words) == 0
    errors = json.loads(next(Path("outputs/operators").glob("2*/errors.json")).read_text())
    report = json.loads((tmp_path / "out" / "errors.json").read_text())
    assert errors["devices"]["own"]["fp32"]["gemm"] == report["precisions"]["fp32"]["gemm"]
    again = tmp_path / "again"
    assert main(["machine", "calibrate", f"system={file}", f"data={data}", f"out={again}"]) == 0
    assert (again / "own.yaml").read_text() == file.read_text()


@pytest.mark.slow
def test_times_that_no_device_has_are_said_to_be_a_poor_fit(
    tmp_path: Path, device: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = lines_of_gemms(np.random.default_rng(1), 60)
    data = measured_by_the_model(tmp_path / "times.csv", noise=1.0, lines=lines)
    assert main(["machine", "calibrate", f"system={device}", f"data={data}", f"out={tmp_path / 'out'}"]) == 0
    assert "a poor fit: fp32 gemm is off by" in capsys.readouterr().out
    assert json.loads((tmp_path / "out" / "errors.json").read_text())["poor"]


GOOD = [f"OWN,fp32,gemm,{64 * n},512,512,N,N,0.5" for n in range(1, 9)]


@pytest.mark.parametrize(
    ("lines", "parts"),
    [
        ([*GOOD, "OWN,fp32,gemm,64,512,512,N,N,-1"], ["times.csv, line 10, fwd_ms = '-1'", "positive time in ms"]),
        ([*GOOD, "OWN,fp32,gemm,64,512,512,N,N,0"], ["line 10, fwd_ms", "positive time in ms"]),
        ([*GOOD, "OWN,fp32,gemm,64,512,512,N,N,inf"], ["line 10, fwd_ms", "positive time in ms"]),
        ([*GOOD, "OWN,fp32,gemm,64,512,512,N,N,70 us"], ["line 10, fwd_ms", "holds the unit us; this column is in ms"]),
        ([*GOOD, "OWN,fp32,gemm,64,512,512,N,N,fast"], ["line 10, fwd_ms", "is no number"]),
        ([*GOOD, "OWN,fp32,gemm,64,512,512,N,N,"], ["line 10: holds no time"]),
        ([*GOOD, "OWN,fp32,gemmm,64,512,512,N,N,1"], ["line 10, op = 'gemmm'", "did you mean `gemm`?"]),
        ([*GOOD, "OWN,fp32,gemm,64.5,512,512,N,N,1"], ["line 10, m = '64.5'", "must be a whole number from 1"]),
        ([*GOOD, "OWN,fp32,gemm,64,512,0,N,N,1"], ["line 10, k = '0'"]),
        ([*GOOD, "OWN,fp32,gemm,64,512,512,N,X,1"], ["line 10, tb = 'X'", "must be N or T"]),
        ([*GOOD, *["OWN,fp32,gemm,64,512,512,N,N,1" + ",1" * 40]], ["line 10: has", "cells for"]),
        ([*GOOD, "OWN,fp32,conv,,4,32,,,1,33,44,5"], ["line 10, r", "is empty", "DeepBench's list"]),
        ([*GOOD, "OWN,fp32,conv,,4,32,,,1,33,4,5,7,3,1,1,1,1"], ["line 10, r = '7'", "larger than the padded image"]),
        (GOOD[:3], ["too few rows to fit on: 3 GEMMs at fp32"]),
        ([*GOOD, "OWN,mixed,gemm,64,512,512,N,N,1"], ["system.gpu.peak_flop_per_s.fp16", "is missing"]),
        ([*GOOD, "OWN,fp32,gemm,4096,4096,4096,N,N,0.0155"], ["line 10, fwd_ms", "is it in seconds?"]),
        ([line.replace(",0.5", ",500") for line in GOOD], ["times of gemm at fp32 take", "are they in microseconds?"]),
        (
            [*GOOD, "OWN,fp32,gemm,64,512,512,N,N,70"],
            ["line 10, fwd_ms = 70.0", "is it in another unit than they are?"],
        ),
        ([*GOOD, "OWN,fp16_storage,allreduce"], ["line 10, precision", "all-reduces are counted in floats"]),
        ([], ["times.csv: holds no rows"]),
    ],
)
def test_what_is_wrong_with_a_table_is_told_by_line_and_column(
    lines: Sequence[str], parts: Sequence[str], tmp_path: Path, device: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = table(tmp_path / "times.csv", lines)
    assert main(["machine", "calibrate", f"system={device}", f"data={data}", f"out={tmp_path / 'out'}"]) == 2
    message = capsys.readouterr().err
    assert all(text in message for text in parts), message
    assert not (tmp_path / "out").exists()


def test_columns_that_are_missing_or_in_another_unit_are_named(
    tmp_path: Path, device: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = table(tmp_path / "times.csv", ["OWN,fp32,gemm,64,512"], "device,precision,op,m,n")
    assert main(["machine", "calibrate", f"system={device}", f"data={data}", f"out={tmp_path / 'out'}"]) == 2
    message = capsys.readouterr().err
    assert "has no column k, which gemm rows need" in message
    table(data, ["OWN,fp32,gemm,64,512,512,N,N,70"], "device,precision,op,m,n,k,ta,tb,fwd_us")
    assert main(["machine", "calibrate", f"system={device}", f"data={data}", f"out={tmp_path / 'out'}"]) == 2
    assert "'fwd_us': times are in ms (did you mean `fwd_ms`?)" in capsys.readouterr().err
    table(data, ["OWN,gemm"], "device,op")
    assert main(["machine", "calibrate", f"system={device}", f"data={data}", f"out={tmp_path / 'out'}"]) == 2
    assert "line 1: has no column precision" in capsys.readouterr().err


def test_all_reduces_that_are_faster_than_any_link_are_in_seconds(
    tmp_path: Path, device: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [f"OWN,fp32,allreduce{',' * 19},{10**size},{gpus},0.001" for size in (6, 7, 8) for gpus in (2, 4)]
    good = [f"{line}{',' * 15}" for line in GOOD]
    data = table(tmp_path / "times.csv", [*good, *rows], f"{HEADER},floats,gpus,mean_ms")
    assert main(["machine", "calibrate", f"system={device}", f"data={data}", f"out={tmp_path / 'out'}"]) == 2
    assert "GB/s a GPU: is it in seconds?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "../out"}, "system.name"),
        ({"sources": ["a"]}, "system.sources"),
        ({"sources": {1: {"provenance": "vendor", "source": "abc"}}}, "system.sources"),
        ({"gpu": {**DEVICE["gpu"], "peak_flop_per_s": {"fp32": 14.9}}}, "system.gpu.peak_flop_per_s"),
        ({"node": {"gpus": 8}}, "system.node.gpus"),
        (
            {"gpu": {**DEVICE["gpu"], "efficiency": {"mixed": dict.fromkeys(PRIORS, 1.0)}}},
            "has constants for mixed, whose rate peak_flop_per_s does not give",
        ),
    ],
)
def test_a_device_file_that_cannot_be_meant_is_refused(
    change: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own.yaml").write_text(yaml.safe_dump({**DEVICE, **change}))
    data = table(tmp_path / "times.csv", GOOD)
    words = ["machine", "calibrate", f"system={tmp_path / 'own.yaml'}", f"data={data}", f"out={tmp_path / 'out'}"]
    assert main(words) == 2
    assert message in capsys.readouterr().err


def test_nothing_that_was_given_is_written_over(
    tmp_path: Path, device: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = lines_of_gemms(np.random.default_rng(1), 60)
    data = measured_by_the_model(tmp_path / "times.csv", noise=0.02, lines=lines)
    for out, message in ((tmp_path, "would write over"), (data, "cannot be made")):
        assert main(["machine", "calibrate", f"system={device}", f"data={data}", f"out={out}"]) == 2
        assert message in capsys.readouterr().err
    assert yaml.safe_load(device.read_text()) == DEVICE


def test_a_table_may_come_in_several_files_and_a_device_once(
    tmp_path: Path, elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text_lines = (conf_dir() / "data" / "NV_P100.csv").read_text().splitlines()
    head = next(place for place, line in enumerate(text_lines) if line.startswith("device,"))
    for name, rows in (("a", text_lines[head + 1 :: 2]), ("b", text_lines[head + 2 :: 2])):
        (elsewhere / f"{name}.csv").write_text("\n".join([text_lines[head], *rows]) + "\n")
    parts = {(table_part.kind, name) for table_part in read_folder(elsewhere) for name in table_part.names}
    assert parts == {
        (table_part.kind, name) for table_part in read(conf_dir() / "data" / "NV_P100.csv") for name in table_part.names
    }
    (elsewhere / "mine.yaml").write_text(yaml.safe_dump(tree_of("p100")))
    words = ["study=operators", "tracking=none", "store=none", f"study.data_dir={elsewhere}"]
    assert main([*words, "devices=[p100,mine.yaml]"]) == 2
    assert "are both called p100" in capsys.readouterr().err
    (elsewhere / "bare.yaml").write_text(yaml.safe_dump({**DEVICE, "gpu": {**DEVICE["gpu"], "measured_as": "NV_P100"}}))
    assert main([*words, "devices=[bare.yaml]"]) == 2
    assert "has no constants for any row" in capsys.readouterr().err


def test_all_problems_of_a_table_are_told_at_once_but_not_thousands(tmp_path: Path) -> None:
    data = table(tmp_path / "times.csv", ["OWN,fp32,gemm,64,512,512,N,N,-1"] * 1000)
    with pytest.raises(ConfigError) as caught:
        read(data)
    assert len(caught.value.problems) == 21
    assert "980 more problems" in str(caught.value)


@pytest.mark.parametrize("text", ["\x00\x01", '"unclosed', "a,b\n1,2,3,4"])
def test_what_is_no_table_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "times.csv").write_text(text)
    with pytest.raises(ConfigError):
        read(tmp_path / "times.csv")


def test_a_system_is_found_by_name_or_path_and_says_what_it_lacks(tmp_path: Path) -> None:
    assert tree_of("p100")["gpu"]["measured_as"] == "NV_P100"
    with pytest.raises(ConfigError, match="did you mean `p100`"):
        tree_of("p10")
    bad = {**DEVICE, "gpu": {**DEVICE["gpu"], "num_cu": 3}, "sources": {}}
    with pytest.raises(ConfigError) as caught:
        Device.of(bad)
    assert "did you mean `system.gpu.num_cus`?" in str(caught.value)
    with pytest.raises(ConfigError, match=r"no entry in `sources` for gpu\.num_cus"):
        Device.of({**DEVICE, "sources": {}})


def test_every_device_has_few_constants() -> None:
    assert [name for name, value in TYPICAL if value is not None] == list(PRIORS)
    facts = {"cache_bytes", "cache_speed", "weights_cache_bytes", "fused_setup_s", "tiles", "streaming", "cast_traffic"}
    facts.add("sustained_clock")
    assert {*PRIORS, *LIBRARY_PRIORS, *facts} == set(Efficiency.model_fields)
    assert (len(PRIORS), len(LIBRARY_PRIORS)) == (6, 9)
    assert LIBRARY_GEMMS <= 24
    assert MOST["gemm"] <= 20
    assert {*PROTOCOL_PRIORS, *TUNED_PRIORS, "host_s", "tuned", "ll_sizes"} == set(Protocols.model_fields)
    assert (len(PROTOCOL_PRIORS), len(TUNED_PRIORS), len(SWITCH_PRIORS)) == (11, 11, 3)
    assert max(MOST_COLLECTIVES.values()) <= 24
    assert all(count <= 12 for kind, count in MOST.items() if kind not in ("gemm", *COLLECTIVE_ROWS))


def test_rows_to_fit_on_are_chosen_by_shape_alone(tmp_path: Path) -> None:
    points = np.random.default_rng(3).random((100, 4))
    places, weights = medoids(points, 20)
    assert len(places) == len(set(places.tolist())) <= 20
    assert (weights**2).sum() == pytest.approx(100)
    order = np.random.default_rng(4).permutation(100)
    assert set(order[medoids(points[order], 20)[0]].tolist()) == set(places.tolist())


WITHIN = {
    *(f"mi300x_allreduce_{size}" for size in ("16MB", "256MB")),
    *(f"mi300x_ag_perlink_{channels}ch" for channels in (4, 8, 32, 64)),
    *(f"dma_phase_{size}" for size in ("64KB", "1MB", "16MB")),
}
MISSED = "mi300x_ag_perlink_16ch"
TAKEN = {
    "mi300x_allreduce_1MB",
    "mi300x_allreduce_16GB",
    "dma_phase_1KB",
    "mi300x_link",
    "mi300x_bf16_sustained",
}
"""Claims whose values went into constants."""


@pytest.mark.nightly
def test_the_shipped_tables_are_predicted_and_the_claims_of_hardware_are_judged(
    elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["study=operators", "tracking=none", "store=none"]) == 0
    shown = capsys.readouterr().out
    (folder,) = Path("outputs/operators").glob("2*")
    errors = json.loads((folder / "errors.json").read_text())
    assert set(errors["devices"]) == {"vega_fe", "gtx_1080_ti", "m40", "p100"}
    for kind in ("gemm_median", "gemm_p90", "conv_median", "recurrent_median"):
        assert 0 < errors[f"{kind}_worst_device"] < 1
    assert errors["allreduce_median_1mb"] < 0.1
    for device in errors["devices"].values():
        for kinds in device.values():
            for models in kinds.values():
                assert models["fitted"]["median"] < models["roofline"]["median"] or models["fitted"]["median"] < 0.05
    claims = json.loads((folder / "claims.json").read_text())
    hardware = {row["id"].removeprefix("hardware."): row for row in claims if row["id"].startswith("hardware.")}
    assert {name for name, row in hardware.items() if row["within"]} == WITHIN | TAKEN
    assert [name for name, row in hardware.items() if row["within"] is False] == [MISSED]
    assert "measured on an all-reduce" in hardware[MISSED]["reason"]
    assert {name for name, row in hardware.items() if row["basis"] == "input"} == TAKEN
    assert "calibrated" in shown
    assert {path.stem for path in (folder / "figures").glob("*.png")} == {
        "predicted_against_measured",
        "errors_by_model",
        "allreduce",
    }
    assert main(["results", "report", "study=operators"]) == 0
    assert "redrew 6 figures" in capsys.readouterr().out


BARS = {"gemm": (0.081, 0.39), "conv": (0.17, 0.56), "recurrent": (0.12, 0.38), "allreduce": (0.1, 0.5)}


@pytest.mark.slow
@pytest.mark.one_in(4)
@pytest.mark.parametrize("device", ["vega_fe", "gtx_1080_ti", "m40", "p100"])
def test_the_constants_that_are_shipped_are_those_of_the_full_tables(
    device: str, shared: Callable[[str], Path]
) -> None:
    """And the rest of these tables is predicted as `plugins/calibration/README.md` says."""
    tree = tree_of(device)
    file = shared(f"data/deepbench/{tree['gpu']['measured_as']}.csv")
    done = calibrate_rows(tree, read(file), file)
    for precision, constants in tree["gpu"]["efficiency"].items():
        assert dict(done.tree["gpu"]["efficiency"][precision]) == pytest.approx(constants, rel=0.01)
    assert done.tree["gpu"]["fitted_on"] == {
        precision: {kind: list(names) for kind, names in kinds.items()}
        for precision, kinds in tree["gpu"]["fitted_on"].items()
    }
    for fold, errors in done.held_out():
        error, (median, p90) = errors["fitted"], BARS[fold.rows.kind]
        if fold.rows.precision == "fp32":
            assert error is not None
            assert error.median <= median
            assert error.p90 <= p90
            assert error.log_correlation >= (0.99 if fold.rows.kind == "gemm" else 0.93)


def test_the_shipped_tables_are_rows_of_the_full_ones(shared: Callable[[str], Path]) -> None:
    for device in ("vega_fe", "gtx_1080_ti", "m40", "p100"):
        label = tree_of(device)["gpu"]["measured_as"]
        small, full = (
            [row for part in read(path) for row in rounded(part)]
            for path in (conf_dir() / "data" / f"{label}.csv", shared(f"data/deepbench/{label}.csv"))
        )
        assert len(small) <= 60
        assert set(small) <= set(full)


def rounded(rows: MeasuredRows) -> list[tuple[str, ...]]:
    """What identifies a row, with times of five digits."""
    times = [tuple(f"{value:.5g}" for value in column) for column in rows.seconds]
    return [(rows.precision, rows.kind, name, *cells) for name, cells in zip(rows.names, times, strict=True)]
