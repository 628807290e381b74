"""Collectives inside a node by three protocols: the equation, the layouts of tables, the fit, and measured tables."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import validity
from dse.cli import main
from dse.errors import ConfigError
from simulators.calibration.collectives import (
    COLLECTIVE_KINDS,
    LARGE_BYTES,
    MOST_COLLECTIVES,
    evenly_spaced,
    read_collectives,
)
from simulators.calibration.fit import PROTOCOL_PRIORS
from simulators.costs.collective import collective_cost, node_ring
from simulators.costs.protocols import protocol_seconds
from simulators.hardware.device import LibraryNode, device_of
from simulators.hardware.machine import tree_of
from simulators.hardware.network import CollectiveKind, CollectiveLibrary, Protocols

TYPICAL = Protocols(**{name: prior.middle for name, prior in PROTOCOL_PRIORS.items()})
TRUE = Protocols(
    launch_s=6e-6, ll_step_s=0.8e-6, ll_share=0.06, ll128_step_s=1.6e-6, ll128_share=0.5,
    step_s=5e-6, bytes_per_s=2.2e11, scaling=1.2, fill_s=2e-6, fill_bytes=2e7,
)  # fmt: skip
RINGS: tuple[CollectiveKind, ...] = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
kinds = st.sampled_from(COLLECTIVE_KINDS)
sizes = st.floats(1.0, 1e10)
MEASURED = ("a100_8", "h100_8", "l40s_8")


@given(kinds, st.integers(2, 64), sizes, st.floats(1.0, 100.0))
def test_more_bytes_take_no_less_time(kind: CollectiveKind, gpus: int, size: float, more: float) -> None:
    assert protocol_seconds(TRUE, kind, gpus, more * size) >= protocol_seconds(TRUE, kind, gpus, size) * (1 - 1e-12)


@given(kinds, st.integers(2, 64), sizes)
def test_no_collective_is_faster_than_its_launch_and_its_bytes(kind: CollectiveKind, gpus: int, size: float) -> None:
    sent = size if kind == "send_recv" else (2 if kind == "all_reduce" else 1) * (gpus - 1) / gpus * size
    rate = TRUE.bytes_per_s * TRUE.scaling ** np.log2(gpus / 2)
    assert protocol_seconds(TRUE, kind, gpus, size) >= (TRUE.launch_s + sent / rate) * (1 - 1e-12)


@pytest.mark.parametrize("kind", COLLECTIVE_KINDS)
def test_a_protocol_that_is_slower_everywhere_is_not_taken(kind: CollectiveKind) -> None:
    payload = np.geomspace(256, 1e9, 40)
    slow = TRUE.model_copy(update={"ll_step_s": 1.0, "ll128_step_s": 1.0})
    simple = protocol_seconds(slow, kind, 8, payload)
    assert np.all(protocol_seconds(TRUE, kind, 8, payload) <= simple)
    assert protocol_seconds(TRUE, kind, 8, payload)[0] < 0.9 * simple[0]
    assert protocol_seconds(TRUE, kind, 8, payload)[-1] == pytest.approx(simple[-1])


def test_a_gpu_alone_waits_for_nobody() -> None:
    assert protocol_seconds(TRUE, "all_reduce", np.array([1, 2]), 1e6).tolist()[0] == 0.0


@pytest.mark.parametrize("kind", RINGS)
def test_rings_inside_a_node_take_what_was_measured_and_beyond_it_what_the_network_takes(kind: CollectiveKind) -> None:
    library = CollectiveLibrary(bytes_per_s=2e11, latency_s=5e-6, network_bytes_per_s=2e10, protocols={kind: TRUE})
    node = LibraryNode(num_gpus=8, library=library)
    bare = node.model_copy(update={"library": library.model_copy(update={"protocols": None})})
    gpus = np.array([4, 8, 16])
    ours, rings = (collective_cost(kind, "ring", 1e8, node_ring(one, gpus)).seconds for one in (node, bare))  # type: ignore[arg-type]
    assert ours[:2] == pytest.approx(protocol_seconds(TRUE, kind, gpus[:2], 1e8), rel=1e-12)
    assert ours[2] == rings[2]
    assert not np.any(ours[:2] == rings[:2])


# Tables


def nccl_table(path: Path, *, constants: Protocols = TRUE, rows: list[list[object]] | None = None) -> Path:
    """A table in the layout of aiconfigurator, of times that the equation gives, or of the rows as they are."""
    made: list[list[object]] = [
        ["h100_sxm", "2.27", {"all_to_all": "alltoall"}.get(kind, kind), "half", gpus, size, 1e3 * float(seconds)]
        for kind in RINGS
        for gpus in (2, 4, 8)
        for size in 2 ** np.arange(8, 29)
        if (seconds := protocol_seconds(constants, kind, gpus, 2.0 * size)) > 0
    ]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["device", "nccl", "op_name", "nccl_dtype", "num_gpus", "message_size", "latency"])
        writer.writerows(made if rows is None else rows)
    return path


def test_sizes_are_counted_in_elements_of_the_larger_buffer(tmp_path: Path) -> None:
    lines: list[list[object]] = [
        ["g", "2", "alltoall", "half", 4, 1024, 0.01],
        ["g", "2", "alltoall", "int8", 4, 1024, 0.01],
    ]
    (rows,) = read_collectives(nccl_table(tmp_path / "t.csv", rows=lines))
    assert (rows.kind, rows.shape["bytes"].tolist(), rows.seconds.ravel().tolist()) == (
        "all_to_all",
        [2048, 1024],
        [1e-5, 1e-5],
    )


def test_rows_across_nodes_and_without_a_time_are_skipped_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "t.csv"
    text = "device,collective,gpus,devices_per_node,bytes,median_ms\n"
    path.write_text(text + "A100,all_reduce,8,8,1024,0.02\nA100,all_reduce,8,4,1024,0.2\nA100,send_recv,2,2,1024,\n")
    (rows,) = read_collectives(path)
    assert rows.names == ("1024 x 8",)
    assert "2 rows across nodes or without a time are skipped" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("row", "told"),
    [
        (["g", "2", "gather", "half", 4, 1024, 0.01], "line 2, op_name = 'gather': is unknown"),
        (["g", "2", "all_reduce", "fp7", 4, 1024, 0.01], "line 2, nccl_dtype = 'fp7': is unknown"),
        (["g", "2", "all_reduce", "half", 1, 1024, 0.01], "line 2, num_gpus = '1': must be a whole number from 2"),
        (["g", "2", "all_reduce", "half", 4, 0.5, 0.01], "line 2, message_size = '0.5': must be a whole number"),
        (["g", "2", "all_reduce", "half", 4, 1024, -1], "line 2, latency = '-1': must be a positive time"),
    ],
)
def test_a_row_that_cannot_be_meant_is_told_by_line_and_column(row: list[object], told: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read_collectives(nccl_table(tmp_path / "t.csv", rows=[row]))
    assert told in str(caught.value)


def test_times_in_another_unit_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fast = TRUE.model_copy(update={"bytes_per_s": 2.2e14, "launch_s": 1e-9, "step_s": 1e-9, "fill_s": 1e-9})
    data = nccl_table(tmp_path / "t.csv", constants=fast)
    assert main(["calibrate", "system=h100_8", f"data={data}", f"out={tmp_path / 'out'}"]) == 2
    assert "is it in seconds?" in capsys.readouterr().err


def test_collectives_need_a_node_that_holds_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = nccl_table(tmp_path / "t.csv")
    assert main(["calibrate", "system=mi250", f"data={data}", f"out={tmp_path / 'out'}"]) == 2
    assert "system.node.library: is missing" in capsys.readouterr().err


@pytest.mark.slow
def test_constants_come_back_from_times_that_they_made(tmp_path: Path) -> None:
    data, out = nccl_table(tmp_path / "t.csv"), tmp_path / "out"
    assert main(["calibrate", "system=h100_8", f"data={data}", f"out={out}"]) == 0
    tree = yaml.safe_load((out / "h100_8.yaml").read_text("utf-8"))
    assert set(tree["node"]["library"]["protocols"]) == set(RINGS)
    for kind in RINGS:
        fitted = Protocols.model_validate(tree["node"]["library"]["protocols"][kind])
        assert fitted.bytes_per_s == pytest.approx(TRUE.bytes_per_s, rel=0.05)
        payload = np.geomspace(512, 5e8, 50)
        ours, theirs = (protocol_seconds(one, kind, 8, payload) for one in (fitted, TRUE))
        assert np.median(np.abs(ours / theirs - 1)) < 0.02
        assert len(tree["gpu"]["fitted_on"]["any"][kind]) <= MOST_COLLECTIVES
        assert tree["node"]["sources"][f"library.protocols.{kind}"]["provenance"] == "calibrated"
    assert tree["gpu"]["efficiency"] == tree_of("h100_8")["gpu"]["efficiency"]


def test_rows_to_fit_on_are_spread_over_sizes_and_numbers_of_gpus(tmp_path: Path) -> None:
    rows = read_collectives(nccl_table(tmp_path / "t.csv"))[0]
    places = evenly_spaced(rows)
    assert len(places) == MOST_COLLECTIVES
    for gpus in (2, 4, 8):
        chosen = rows.shape["bytes"][places][rows.shape["gpus"][places] == gpus]
        assert (chosen.min(), chosen.max()) == (rows.shape["bytes"].min(), rows.shape["bytes"].max())


# What was measured


@pytest.mark.parametrize("name", MEASURED)
def test_shipped_constants_are_called_calibrated(name: str) -> None:
    device = device_of(tree_of(name))
    assert device.node is not None
    assert device.node.library is not None
    facts = {path: kind for path, _, kind, _ in device.facts() if ".protocols." in path}
    assert len(facts) == 4 * len(Protocols.model_fields)
    assert set(facts.values()) == {"calibrated"}


@pytest.mark.slow
def test_shipped_constants_predict_the_collectives_that_they_were_not_fitted_on(
    shared: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Medians: 10 % from 256 KiB on, 20 % below, of every collective and GPU of the table of NCCL."""
    folder = shared("data/collectives/nccl_a100_h100_l40s.csv").parent
    assert validity.main(["--data", str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    rows = {(row["device"], row["kind"]): row for row in found["tables"]}
    assert set(rows) == {(name, kind) for name in MEASURED for kind in RINGS}
    assert LARGE_BYTES == 256 * 1024
    assert all(row["large_median"] < 0.10 and row["small_median"] < 0.20 for row in rows.values())
    assert found["collective_large_median_worst"] == max(row["large_median"] for row in rows.values())
