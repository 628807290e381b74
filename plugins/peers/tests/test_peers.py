"""Other simulators on the same collectives: what is given to them, what is read of them, and what is compared."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from benchmarks import peers, presets
from dse.config.compose import request
from dse.errors import ConfigError
from dse.study.plan import plan
from dse_calibration.backend import MeasuredBackend
from dse_calibration.measurements import MeasuredRows
from dse_peers import astra_sim, simgrid
from simulators.hardware.schedule_system import WholeNode
from simulators.overlap.backend import OverlapBackend
from simulators.overlap.design import OverlapDesign
from simulators.taskgraph.graph import GraphBuilder, TaskGraph
from tests.support import ENGINES, REPOSITORY, backend, design, design_tree, lower, results, shipped

DATA = REPOSITORY.parent / "shared" / "data"
STAND_IN = """#!{python}
import json, pathlib, sys
import yaml
from dse_chakra.files import read_chakra
given = dict(word[2:].split("=", 1) for word in sys.argv[1:])
network = yaml.safe_load(pathlib.Path(given["network-configuration"]).read_text())
system = json.loads(pathlib.Path(given["system-configuration"]).read_text())
(count,) = network["npus_count"]
traces = [read_chakra(pathlib.Path(given["workload-configuration"] + f".{{gpu}}.et")).nodes for gpu in range(count)]
seen = [[[node.id, node.type, node.payload_bytes, node.source, node.destination] for node in nodes] for nodes in traces]
pathlib.Path({seen!r}).write_text(json.dumps({{"network": network, "system": system, "traces": seen}}))
{what}
pathlib.Path("log").mkdir()
with open("log/log.log", "w") as log:
    for gpu in range(count):
        for place, node in enumerate(traces[gpu]):
            for what, tick in (("issue", 1000 * place + gpu), ("callback", 1000 * place + 500 + gpu)):
                print(f"[D] <workload>: {{what}},sys->id={{gpu}}, tick={{tick}}, node->id={{node.id}}, x", file=log)
for gpu in range(count):
    print(f"[workload] [info] sys[{{gpu}}] finished, {{1000 + gpu}} cycles, exposed communication 1 cycles.")
"""
ENGINE: Any = astra_sim.ENGINE


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """A program in ASTRA-sim's place, which keeps what it is given in a file."""

    def make(what: str = "") -> Path:
        place, seen = tmp_path / "astra", tmp_path / "seen.json"
        place.write_text(STAND_IN.format(python=sys.executable, seen=str(seen), what=what))
        place.chmod(0o755)
        monkeypatch.setenv("ASTRA_SIM", str(place))
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        return seen

    return make


def seconds(kind: str, num_bytes: float, gpus: int = 8, device: str = "h100") -> float:
    """Time of a collective."""
    return float(ENGINE.collective_s(kind, np.array([num_bytes]), np.array([float(gpus)]), 2e11, device)[0])


def node_of(schedule: str, system: str | None = None) -> TaskGraph:
    """The tasks of all GPUs of a shipped node."""
    tree = design_tree(schedule)
    if system is not None:
        tree["system"] = shipped("system")[system]
    point = backend("fluid").design(tree)
    assert isinstance(point, OverlapDesign)
    return point.schedule.lower(WholeNode.of(point.system, 0.0), point.workload)


@pytest.mark.slow
def test_astra_sim_is_given_a_trace_for_each_gpu_and_the_last_one_counts(stand_in: Callable[..., Path]) -> None:
    seen = stand_in()
    assert seconds("all_gather", 1 << 20) == pytest.approx(1007e-9)
    inputs = json.loads(seen.read_text())
    assert inputs["traces"] == [[[0, "COMM_COLL_NODE", 1 << 17, -1, -1]]] * 8
    assert inputs["network"] == {"topology": ["Switch"], "npus_count": [8], "bandwidth": [400.0], "latency": [936.25]}
    assert inputs["system"]["all-gather-implementation"] == ["ring"]
    seconds("all_reduce", 1 << 20, gpus=4, device="a100")
    inputs = json.loads(seen.read_text())
    assert inputs["traces"] == [[[0, "COMM_COLL_NODE", 1 << 20, -1, -1]]] * 4
    assert inputs["network"]["bandwidth"] == pytest.approx([2e11 / 2**30])


@pytest.mark.slow
@pytest.mark.parametrize("what", ["sys.exit('a trace that it refuses')", "count = 3"])
def test_a_run_that_does_not_finish_on_every_gpu_is_told(what: str, stand_in: Callable[..., Path]) -> None:
    stand_in(what)
    with pytest.raises(RuntimeError, match=r"ASTRA-sim finished on (0|3) of 8 GPUs"):
        seconds("all_reduce", 1 << 20)


def test_a_log_that_says_nothing_of_tasks_is_told(stand_in: Callable[..., Path]) -> None:
    stand_in("traces = [nodes[:0] for nodes in traces]")
    with pytest.raises(RuntimeError, match="log does not have when every task was issued"):
        ENGINE.run(node_of("serial"))


@pytest.mark.slow
def test_a_schedule_becomes_one_program_for_all_gpus(stand_in: Callable[..., Path]) -> None:
    seen, graph = stand_in(), node_of("serial")
    timeline = ENGINE.run(graph)
    inputs = json.loads(seen.read_text())
    kinds = ["COMP_NODE", "COMP_NODE", "COMM_COLL_NODE", "COMP_NODE"]  # launch, wait, all-gather, GEMM
    assert [[kind for _, kind, *_ in nodes] for nodes in inputs["traces"]] == [kinds] * 8
    moved = float(graph["moved_bytes"][0][graph.gpu == 0].sum())
    assert inputs["traces"][3][2] == [4, "COMM_COLL_NODE", round(moved / 7 * 8), -1, -1]
    assert inputs["network"]["topology"] == ["FullyConnected"]
    rate = min(graph.isolated_rate()[0][graph.of_kind("transfer")])
    assert inputs["network"]["bandwidth"] == pytest.approx([rate / 2**30])
    gemm = [task for task in graph.of_kind("gemm").tolist() if graph.gpu[task] == 5]
    assert timeline.issued[0, gemm] == pytest.approx([3005e-9])
    assert timeline.finished[0, gemm] == pytest.approx([3505e-9])


@pytest.mark.slow
def test_shards_from_one_peer_at_a_time_are_sent_and_received(stand_in: Callable[..., Path]) -> None:
    seen, graph = stand_in(), node_of("shard_p2p")
    ENGINE.run(graph)
    inputs = json.loads(seen.read_text())
    for gpu, nodes in enumerate(inputs["traces"]):
        sent = [(source, to) for _, kind, _, source, to in nodes if kind == "COMM_SEND_NODE"]
        received = [(source, to) for _, kind, _, source, to in nodes if kind == "COMM_RECV_NODE"]
        assert {source for source, _ in sent} == {to for _, to in received} == {gpu}
        assert {to for _, to in sent} == {source for source, _ in received} == set(range(8)) - {gpu}
    delay = float(graph["delay"][0][graph.of_kind("transfer")[0]])
    assert inputs["network"]["latency"] == pytest.approx([1e9 * delay])


def test_what_its_traces_cannot_say_is_refused(stand_in: Callable[..., Path]) -> None:
    stand_in()
    assert "on a ring" in ENGINE.run(node_of("serial", "t3_ring")).reason(0)
    point = design("serial")
    assert "one GPU" in ENGINE.run(lower(point)).reason(0)
    build = GraphBuilder()
    for gpu in range(2):
        build.task(f"{gpu}", "gemm", work=1.0, cap=1.0, gpu=gpu)
    build.task("next", "gemm", after=[1], work=1.0, cap=1.0, gpu=0)
    assert "unlike numbers of tasks" in ENGINE.run(build.build()).reason(0)
    build = GraphBuilder()
    for gpu in range(2):
        build.task(f"{gpu}", "gemm", work=1.0 + gpu, cap=1.0, gpu=gpu)
    assert "do not all do the same" in ENGINE.run(build.build()).reason(0)
    build = GraphBuilder()
    hbm = [build.resource(f"hbm.{gpu}", 1.0) for gpu in range(3)]
    for gpu, source in enumerate((1, 0, 0)):
        link = build.resource(f"link.{source}.{gpu}", 1.0)
        build.task(f"{gpu}", "transfer", uses=dict.fromkeys([hbm[gpu], hbm[source], link], 1.0), work=1.0, gpu=gpu)
    assert "sends to several others, or to none" in ENGINE.run(build.build()).reason(0)


def test_a_peer_that_fails_is_told_and_the_others_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ASTRA_SIM", str(tmp_path / "nowhere"))
    with pytest.raises(RuntimeError, match="ASTRA-sim cannot be run"):
        seconds("all_reduce", 1 << 20)
    shape = {"gpus": np.array([8.0]), "bytes": np.array([2.0**24])}
    rows = MeasuredRows("h100", "any", "all_reduce", shape, np.array([[1e-4]]), ("one",), (1,), ("",))
    monkeypatch.setattr(peers, "measured_rows", lambda data: {"all_reduce": rows})
    monkeypatch.setattr(simgrid.ENGINE, "absence", lambda: "not here")
    assert peers.main(["--data", str(tmp_path)]) == 0
    output = capsys.readouterr()
    assert "astra_sim is left out: ASTRA-sim cannot be run" in output.err
    assert "it is not there" in output.out


def test_without_the_program_the_way_out_is_told_and_a_level_is_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("ASTRA_SIM", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match=r"is not on the path; see plugins/peers/README\.md"):
        seconds("all_reduce", 1 << 20)
    assert "is not on the path" in OverlapBackend("astra_sim", gpus="all").absence()
    with pytest.raises(ConfigError, match="simulator = 'astra_sim': AstraSim"):
        plan(request(["study=ficco_sweep", "simulator=astra_sim"]))
    planned = plan(request(["study=ficco_sweep", "fidelity=peers"]))
    assert "astra_sim" not in {level.name for level in planned.levels}
    assert "level astra_sim is left out: AstraSim" in capsys.readouterr().err


@pytest.mark.nightly
def test_a_study_of_peers_predicts_collectives_and_says_what_it_cannot(stand_in: Callable[..., Path]) -> None:
    seen = stand_in()
    predict = {"kinds": ["all_reduce"], "least_bytes": "256 MiB"}
    tree = {"devices": ["h100_8"], "predict": predict}
    measured = MeasuredBackend()
    measured.sections(tree)
    (base,) = measured.scenarios(tree).values()
    predictions = {
        model: results(measured, [measured.design({**base, "predict": {**predict, "model": model}})])[0]
        for model in ("fitted", "astra_sim")
    }
    assert predictions["astra_sim"].status == "ok"
    assert predictions["astra_sim"].metrics["times_tested"] == predictions["fitted"].metrics["times_tested"] == 2
    assert predictions["astra_sim"].metrics["median_error"] == pytest.approx(1 - 1007e-9 / 1.2e-3, abs=0.01)
    assert json.loads(seen.read_text())["network"]["bandwidth"] == [400.0]
    measured_design = measured.design({**base, "predict": {"model": "simgrid"}, "links": None})
    assert (
        results(measured, [measured_design])[0].reason
        == "simgrid is set up for GPUs at a switch, with node.link_bytes_per_s"
    )


@pytest.mark.slow
@pytest.mark.skipif(bool(ENGINE.absence()), reason="ASTRA-sim's program is not on the path")
@pytest.mark.parametrize("schedule", ["serial", "uniform_fused_1d", "shard_p2p", "conccl"])
def test_astra_sim_takes_as_long_as_our_longest_path(schedule: str) -> None:
    graph = node_of(schedule)
    theirs, ours = ENGINE.run(graph).makespan[0], ENGINES["uncontended"].run(graph).makespan[0]
    assert theirs == pytest.approx(ours, abs=1e-6)  # launches are in whole microseconds


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


@pytest.mark.more
def test_our_choice_for_a_preset_is_held_against_its_layers(tmp_path: Path) -> None:
    name = "userbuffers_bf16_h100_h4096_tp2_mbs1_seqlen2048"
    ours = presets.choice(name)
    assert {"qkv_fprop", "fc2_fprop", "fc1_wgrad"} <= set(ours)
    assert {ours[layer].method for layer in ("qkv_fprop", "proj_dgrad")} == {"ring_exchange"}
    assert presets.compare(None).keys() >= {"preset_methods_right", "preset_sms_within_2x"}
    mine = {layer: choice.tree for layer, choice in ours.items()}
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
