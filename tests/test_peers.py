"""Other simulators on the same collectives: what is given to them, what is read of them, and what is compared."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from conftest import REPOSITORY

from benchmarks import astra_sim, peers, presets
from dse.errors import ConfigError
from simulators.calibration.measurements import Rows
from simulators.profiles.chakra import read_chakra

DATA = REPOSITORY.parent / "shared" / "data"
STAND_IN = """#!{python}
import json, pathlib, re, sys
given = dict(word[2:].split("=", 1) for word in sys.argv[1:])
network = pathlib.Path(given["network-configuration"]).read_text()
count = int(re.search(r"npus_count: \\[(\\d+)\\]", network)[1])
rate = float(re.search(r"bandwidth: \\[([\\d.]+)\\]", network)[1])
json.loads(pathlib.Path(given["system-configuration"]).read_text())
traces = [pathlib.Path(given["workload-configuration"] + f".{{gpu}}.et") for gpu in range(count)]
pathlib.Path({seen!r}).write_bytes(traces[0].read_bytes())
{what}
for gpu in range(count):
    print(f"[workload] [info] sys[{{gpu}}] finished, {{1000 + gpu}} cycles, exposed communication 1 cycles.")
"""


def stand_in(folder: Path, what: str = "") -> Path:
    """A program in ASTRA-sim's place, which keeps the first trace."""
    program = folder / "astra"
    program.write_text(STAND_IN.format(python=sys.executable, seen=str(folder / "seen.et"), what=what))
    program.chmod(0o755)
    return program


def test_astra_sim_is_given_a_trace_for_each_gpu_and_the_last_one_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASTRA_SIM", str(stand_in(tmp_path)))
    assert astra_sim.seconds("all_gather", 1 << 20, 8) == pytest.approx(1007e-9)
    (node,) = read_chakra(tmp_path / "seen.et").nodes
    assert (node.type, node.collective, node.payload_bytes) == ("COMM_COLL_NODE", "ALL_GATHER", 1 << 17)
    astra_sim.seconds("all_reduce", 1 << 20, 4)
    (node,) = read_chakra(tmp_path / "seen.et").nodes
    assert (node.collective, node.payload_bytes) == ("ALL_REDUCE", 1 << 20)


@pytest.mark.parametrize("what", ["sys.exit('a trace that it refuses')", "count = 3"])
def test_a_run_that_does_not_finish_on_every_gpu_is_told(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASTRA_SIM", str(stand_in(tmp_path, what)))
    with pytest.raises(RuntimeError, match=r"ASTRA-sim finished on (0|3) of 8 GPUs"):
        astra_sim.seconds("all_reduce", 1 << 20, 8)


def test_a_peer_that_fails_is_told_and_the_others_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ASTRA_SIM", str(tmp_path / "nowhere"))
    with pytest.raises(RuntimeError, match="ASTRA-sim cannot be run"):
        astra_sim.seconds("all_reduce", 1 << 20, 8)
    shape = {"gpus": np.array([8.0]), "bytes": np.array([2.0**24])}
    rows = Rows("h100", "any", "all_reduce", shape, np.array([[1e-4]]), ("one",), (1,), ("",))
    monkeypatch.setattr(peers, "measured_rows", lambda data: {"all_reduce": rows})
    monkeypatch.setattr(peers, "simgrid_python", lambda: None)
    assert peers.main(["--data", str(tmp_path)]) == 0
    told = capsys.readouterr()
    assert "astra_sim is left out: ASTRA-sim cannot be run" in told.err
    assert "it is not there" in told.out


def test_without_the_program_the_way_out_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("ASTRA_SIM", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert astra_sim.program() is None
    with pytest.raises(RuntimeError, match=r"is not on the path; docs/how-to/peers\.md"):
        astra_sim.seconds("all_reduce", 1 << 20, 8)


@pytest.mark.parametrize(
    ("kind", "passes"), [("all_gather", 1), ("reduce_scatter", 1), ("all_reduce", 2), ("all_to_all", 1)]
)
def test_messages_of_a_collective_are_those_of_its_steps(kind: str, passes: int) -> None:
    graph = peers.ring(kind, 8e6, 8)  # type: ignore[arg-type]
    assert graph.num_tasks == 8 * 7 * passes
    assert graph["work"].sum() == pytest.approx(1e-9 * 8 * 7 * passes * 1e6)


@pytest.mark.slow
@pytest.mark.skipif(not DATA.is_dir(), reason="measured collectives are not in this checkout")
def test_ours_is_close_to_measured_collectives_and_settings_are_read_back(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "_peers", lambda: {"ours": peers._ours})
    assert peers.main(["--data", str(DATA), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["exported_parse"] == 1
    assert all(figures["points"][kind] >= 4 for kind in peers.KINDS)
    assert max(figures["median_error"]["ours"].values()) < 0.2
    assert figures["ours_over_astra_points_per_s"] is None


def test_a_folder_without_the_table_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        peers.main(["--data", str(tmp_path)])
    assert end.value.code == 2
    assert "is no file" in capsys.readouterr().err
    with pytest.raises(ConfigError):
        peers.measured_rows(tmp_path)


# Presets of user buffers


def test_our_choice_for_a_preset_is_held_against_its_layers(tmp_path: Path) -> None:
    name = "userbuffers_bf16_h100_h4096_tp2_mbs1_seqlen2048"
    ours = presets.choice(name)
    assert {"qkv_fprop", "fc2_fprop", "fc1_wgrad"} <= set(ours)
    assert {ours[layer].method for layer in ("qkv_fprop", "proj_dgrad")} == {"ring_exchange"}
    assert presets.compare(None).keys() >= {"preset_methods_right", "preset_sms_within_2x"}
    mine = {layer: each.tree for layer, each in ours.items()}
    theirs = {**mine, "proj_fprop": {"method": "pipeline", "num_sm": 4}, "fc1_wgrad": {"method": "bulk", "num_sm": 1}}
    (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(theirs))
    figures = presets.compare(tmp_path)
    changed = ours["proj_fprop"].method != "pipeline"
    assert figures["preset_methods_right"] == 1 - changed / len(ours)
    assert 0 < figures["preset_sms_within_2x"] < 1
    with pytest.raises(ValueError, match="names no preset"):
        presets.choice("userbuffers_fp8")


def test_a_folder_without_presets_and_wrong_ones_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(part: str) -> None:
        with pytest.raises(SystemExit) as end:
            presets.main(["--presets", str(tmp_path)])
        assert end.value.code == 2
        assert part in capsys.readouterr().err

    refused("holds no preset")
    (tmp_path / "userbuffers_bf16_h100_large.yaml").write_text("{}")
    refused("names no preset")
    (tmp_path / "userbuffers_bf16_h100_large.yaml").unlink()
    (tmp_path / "userbuffers_bf16_h100_h4096_tp2_mbs1_seqlen2048.yaml").write_text("fc9: {}")
    refused("fc9: is no layer")
