"""Topologies of InfraGraph read as machines: what of each kind of node comes out, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from dse.cli import main
from dse.config.compose import request
from dse.errors import ConfigError
from dse_peers.infragraph import import_system
from simulators.hardware.machine import System, merged, tree_of


def component(name: str, count: int, choice: str = "") -> dict[str, Any]:
    return {"name": name, "count": count, "choice": choice or name}


def link(name: str, latency: Mapping[str, Any] | None = None, **bandwidth: float) -> dict[str, Any]:
    physical: dict[str, Any] = {}
    if bandwidth:
        physical["bandwidth"] = {"choice": next(iter(bandwidth)), **bandwidth}
    if latency:
        physical["latency"] = {"choice": next(iter(latency)), **latency}
    return {"name": name, **({"physical": physical} if physical else {})}


def edge(first: str, second: str, of: str, scheme: str = "many2many") -> dict[str, Any]:
    return {"ep1": {"component": first}, "ep2": {"component": second}, "link": of, "scheme": scheme}


def device(components: list[Any], links: list[Any], edges: list[Any], name: str = "host") -> dict[str, Any]:
    return {"name": name, "components": components, "links": links, "edges": edges}


def dgx() -> dict[str, Any]:
    """8 GPUs at 4 NVSwitches, which PCIe manages; two GPUs, two NICs and a socket at each switch of PCIe."""
    nvlink = link("nvlink", {"ns": 150}, gigabytes_per_second=112.5)
    edges = [edge("xpu", "nvsw", "nvlink"), edge("nvsw", "pciesw[0]", "pcie"), edge("cpu", "cpu", "upi")]
    for i in range(4):
        edges.append(edge(f"pciesw[{i}]", f"cpu[{i // 2}]", "pcie"))
        edges += [edge(f"{part}[{2 * i}:{2 * i + 2}]", f"pciesw[{i}]", "pcie") for part in ("xpu", "nic")]
    parts = [component("cpu", 2), component("xpu", 8), component("nic", 8), component("memory", 2)]
    parts += [component("nvsw", 4, "switch"), component("pciesw", 4, "switch")]
    return device(parts, [nvlink, link("pcie", gigabits_per_second=400), link("upi")], edges)


def cluster(count: int = 2) -> dict[str, Any]:
    """Hosts whose NICs stand at the ports of one switch."""
    switch = device([component("asic", 1, "switch"), component("port", 64)], [link("ic")], [], "leaf")
    ends = {
        "ep1": {"instance": f"host[0:{count}]", "component": "nic"},
        "ep2": {"instance": "leaf[0]", "component": f"port[:{8 * count}]"},
    }
    return {
        "name": "two hosts",
        "devices": [dgx(), switch],
        "links": [link("eth", {"us": 1}, gigabits_per_second=400)],
        "instances": [
            {"name": "host", "device": "host", "count": count},
            {"name": "leaf", "device": "leaf", "count": 1},
        ],
        "edges": [{**ends, "scheme": "one2one", "link": "eth"}],
    }


def written(folder: Path, tree: Any, name: str = "topology.yaml") -> Path:
    path = folder / name
    path.write_text(json.dumps(tree) if name.endswith(".json") else yaml.safe_dump(tree))
    return path


def machine_of(folder: Path, tree: Any, system: str = "h100_8", **options: str) -> tuple[System, list[str]]:
    """The machine of a topology over a system, and the lines beside it."""
    result = import_system(written(folder, tree), system, "mine", **options)
    below = {key: value for key, value in result.tree.items() if key != "defaults"}
    return System.model_validate(merged(tree_of(system), below)), list(result.lines)


def test_a_dgx_is_a_switch_with_nics_at_pcie_switches(tmp_path: Path) -> None:
    machine, lines = machine_of(tmp_path, cluster())
    node, fabric = machine.node, machine.fabric
    assert node is not None and fabric is not None
    assert (node.num_gpus, node.topology) == (8, "switch")
    assert node.link_bytes_per_s == pytest.approx(4 * 112.5e9 / 7)
    assert node.hop_latency_s == pytest.approx(300e-9)  # to the switch, and on
    assert (fabric.num_nodes, fabric.nic.num_nics, fabric.nic.placement) == (2, 8, "pcie_switch")
    assert fabric.nic.bytes_per_s == fabric.nic.pcie_bytes_per_s == 50e9
    assert fabric.nic.latency_s == pytest.approx(1.5e-6)  # of infiniband_2
    assert "not read: components of host: 2 memory" in lines
    assert "not read: latency of links between instances: eth" in lines
    assert "not read: instances that are no node, and their network: 1 leaf" in lines
    assert any(line.startswith("stays as the system has it: gpu, node.library") for line in lines)
    source = machine.source("node.link_bytes_per_s")
    assert source is not None
    assert source.provenance == "derived"
    assert "topology.yaml" in source.source
    earlier = machine.source("fabric.nic.latency_s")
    assert earlier is not None
    assert earlier.provenance == "memory"


def test_a_fabric_of_the_system_stays_beside_what_the_file_says(tmp_path: Path) -> None:
    machine, lines = machine_of(tmp_path, cluster(3), "mi210_16x4")
    assert machine.fabric is not None
    assert (machine.fabric.num_nodes, machine.fabric.network.topology) == (3, "rail")
    assert machine.fabric.nic.bytes_per_s == 50e9
    assert any(line.startswith("stays as the system has it: fabric") for line in lines)


@pytest.mark.parametrize(
    ("edges", "expected"),
    [
        ([edge("xpu", "xpu", "fast")], ("mesh", 50e9, 1e-6)),
        ([edge("xpu", "xpu", "fast", "ring")], ("ring", 50e9, 1e-6)),
        ([edge(f"xpu[{i}]", f"xpu[{(i + 1) % 8}]", "fast") for i in range(8)], ("ring", 50e9, 1e-6)),
        ([], ("pcie", 31.25e9, None)),
    ],
    ids=["mesh", "ring", "ring of pairs", "pcie"],
)
def test_links_between_gpus_make_a_topology(edges: list[Any], expected: tuple[Any, ...], tmp_path: Path) -> None:
    parts = [component("cpu", 2), component("xpu", 8), component("nic", 2)]
    links = [link("fast", {"ns": 1000}, gigabits_per_second=400), link("host", gigabits_per_second=250), link("upi")]
    box = [edge("cpu[0]", "xpu[:4]", "host"), edge("cpu[1]", "xpu[4:]", "host"), edge("cpu", "cpu", "upi")]
    tree = device(parts, links, [*box, edge("cpu", "nic", "host", "one2one"), *edges])
    machine, lines = machine_of(tmp_path, tree, "mi300x_8")  # a device alone is a file, too
    assert machine.node is not None
    node = machine.node
    assert (node.topology, node.link_bytes_per_s, node.hop_latency_s) == expected
    assert machine.fabric is None
    assert any("one node: fabric.nic.num_nics = 2, fabric.nic.placement = cpu" in line for line in lines)


def test_nics_that_are_devices_count_once_and_add_their_ports(tmp_path: Path) -> None:
    card = device(
        [component("end", 1, "cpu"), component("port", 2)], [link("in")], [edge("end", "port", "in")], name="card"
    )
    host = device(
        [component("xpu", 4), component("card", 4, "device")],
        [link("x"), link("p")],
        [edge("xpu", "xpu", "x"), {**edge("xpu", "x", "p", "one2one"), "ep2": {"device": "card", "component": "end"}}],
    )
    tree = {
        "devices": [card, host, device([component("port", 64)], [], [], "leaf")],
        "links": [link("eth", gigabits_per_second=100)],
        "instances": [{"name": "h", "device": "host", "count": 4}, {"name": "s", "device": "leaf", "count": 1}],
        "edges": [
            {
                "ep1": {"instance": "h", "component": "card.port"},
                "ep2": {"instance": "s", "component": "port[0:32]"},
                "scheme": "one2one",
                "link": "eth",
            }
        ],
    }
    machine, lines = machine_of(tmp_path, tree)
    assert machine.node is not None and machine.fabric is not None
    assert machine.node.topology == "mesh"
    assert machine.node.in_switch is None
    assert (machine.fabric.nic.num_nics, machine.fabric.nic.placement) == (4, "gpu")
    assert machine.fabric.nic.bytes_per_s == 25e9
    assert any("node.in_switch" in line and line.startswith("left out") for line in lines)
    assert any("system.costs.collective=links" in line for line in lines)


def test_what_is_no_topology_of_ours_stays_and_is_told(tmp_path: Path) -> None:
    cube = [
        edge("xpu[:4]", "xpu[:4]", "x"),
        edge("xpu[4:]", "xpu[4:]", "x"),
        edge("xpu[:4]", "xpu[4:]", "x", "one2one"),
    ]
    tree = {"infrastructure": {"devices": [device([component("xpu", 8)], [link("x")], cube)]}, "annotations": {}}
    machine, lines = machine_of(tmp_path, tree, "v100_8")
    assert machine.node is not None
    assert machine.node.topology == "ring"  # as conf/node/v100_ring_8.yaml has it
    assert "not read: links of GPUs, which join 16 of 28 pairs: no mesh, ring or switch of all" in lines
    assert "not read: annotations" in lines


def test_rates_in_transfers_and_unknown_keys_are_listed(tmp_path: Path) -> None:
    tree = device([component("xpu", 2)], [link("x", gigatransfers_per_second=32)], [edge("xpu", "xpu", "x")])
    tree["colour"] = "green"
    _, lines = machine_of(tmp_path, tree)
    assert "not read: rate of the link x, in transfers: the file has no lanes" in lines
    assert "not read: devices.0.colour" in lines


def test_a_rate_that_stays_under_another_topology_is_told(tmp_path: Path) -> None:
    tree = device([component("xpu", 4)], [link("x")], [edge("xpu", "xpu", "x")])
    _, lines = machine_of(tmp_path, tree)
    rule = "node.link_bytes_per_s = 64.3 GB/s is of a switch of 8 GPUs: write that of the file's links over it"
    assert rule in lines
    _, lines = machine_of(tmp_path, tree, "gem5_gcn3")  # a GPU alone
    assert "neither the file nor the system has: node.link_bytes_per_s" in lines


def test_json_says_the_same_as_yaml(tmp_path: Path) -> None:
    trees = [
        import_system(written(tmp_path, cluster(), f"topology.{ending}"), "h100_8", "mine").tree["node"]
        for ending in ("yaml", "json")
    ]
    assert trees[0] == trees[1]


def tree_with(change: Any) -> dict[str, Any]:
    tree = cluster()
    change(tree)
    return tree


WRONG: list[tuple[Any, str, str]] = [
    (lambda tree: tree.pop("devices"), "file.devices", "is missing"),
    (lambda tree: tree["devices"][0]["components"][1].update(count=-1), "components.1.count", "greater than or equal"),
    (lambda tree: tree["devices"][0]["components"][1].update(choice="gpu"), "components.1.choice", "must be"),
    (lambda tree: tree["devices"][0]["components"][1].update(choice="device"), "components.1.name", "names no device"),
    (lambda tree: tree["devices"][0]["edges"][0].update(link="nvlnk"), "edges.0.link", "did you mean `nvlink`?"),
    (lambda tree: tree["devices"][0]["edges"][0]["ep1"].update(component="xpu[9]"), "ep1.component", "name 0 to 7"),
    (lambda tree: tree["devices"][0]["edges"][0]["ep1"].update(component="xpu[a]"), "ep1.component", "no slice"),
    (
        lambda tree: tree["devices"][0]["edges"][0]["ep1"].update(component="xpux"),
        "ep1.component",
        "did you mean `xpu`?",
    ),
    (lambda tree: tree["devices"][0]["edges"][0]["ep1"].update(component="xpu.a"), "ep1.component", "no device"),
    (lambda tree: tree["edges"][0]["ep1"].update(instance="hosts[0]"), "edges.0.ep1.instance", "did you mean `host`?"),
    (lambda tree: tree["instances"][0].update(device="hots"), "instances.0.device", "did you mean `host`?"),
    (lambda tree: tree["devices"].append(dgx()), "devices.2.name", "names two"),
    (
        lambda tree: tree["devices"].append({**dgx(), "name": "b"}) or tree["instances"][1].update(device="b"),
        "",
        "device=",
    ),
    (lambda tree: tree["instances"].pop(0) and tree["edges"].clear(), "file.instances", "no node"),
    (
        lambda tree: tree["devices"][0]["links"][0]["physical"]["bandwidth"].update(gigabytes_per_second=0),
        "bandwidth",
        "",
    ),
    (lambda tree: tree["devices"][0]["components"][1].update(count=99999), "file.devices", "more than 1024"),
    (
        lambda tree: tree["instances"][0].update(count=99999) or tree["edges"][0]["ep1"].update(instance="host"),
        "file.edges.0",
        "vertices and edges",
    ),
    (lambda tree: tree["instances"][0].update(count=9000) or tree["edges"].clear(), "fabric.num_nodes", "4096"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("change", "path", "text"), WRONG, ids=[f"{path} {text}" for _, path, text in WRONG])
def test_a_wrong_topology_is_refused_by_path(change: Any, path: str, text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refusal:
        machine_of(tmp_path, tree_with(change))
    assert path in str(refusal.value)
    assert text in str(refusal.value)


@pytest.mark.slow
def test_devices_in_devices_take_no_long_time(tmp_path: Path) -> None:
    names = [f"d{i}" for i in range(40)]
    pairs = zip(names[::2], names[1::2], strict=True)
    tree: list[Any] = [device([component("xpu", 1)], [], [], names[0]), device([], [], [], names[1])]
    for below in list(pairs)[:-1]:
        for name in names[len(tree) : len(tree) + 2]:
            tree.append(device([component(part, 1, "device") for part in below], [], [], name))
    with pytest.raises(ConfigError, match="holds several devices with xpus"):
        machine_of(tmp_path, {"devices": tree})
    with pytest.raises(ConfigError, match="vertices and edges"):
        machine_of(tmp_path, {"devices": tree}, device=names[38])


def test_a_device_in_itself_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="stands in itself"):
        machine_of(tmp_path, device([component("xpu", 2), component("host", 1, "device")], [], []))


@pytest.mark.parametrize(
    ("name", "text", "rule"),
    [
        ("a.yaml", "{", "is not YAML"),
        ("a.json", "{", "is not JSON"),
        ("a.json", "[" * 100_000, "is not JSON"),
        ("a.yaml", "a: &x [1]\nb: *x\n", "alias"),
        ("a.yaml", "a: !!python/name:os.system\n", "tag"),
        ("a.yaml", "3", "holds no devices"),
        ("a.yaml", "#" * (1 << 21), "is larger than"),
    ],
)
def test_a_file_that_is_none_is_refused(name: str, text: str, rule: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=rule):
        import_system(tmp_path / name, "h100_8", "mine")


def test_the_command_writes_a_system_that_a_study_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = written(tmp_path, cluster())
    assert main(["machine", "import", f"file={file}", "system=h100_8", "out=conf/system/mine.yaml"]) == 0
    shown = capsys.readouterr().out
    assert "node.topology = switch" in shown
    assert "system.fabric=null" in shown
    composed = request(["study=ficco_sweep", "system=mine", "system.fabric=null"], tmp_path / "conf")
    assert not composed.problems
    assert composed.tree["system"]["node"]["link_bytes_per_s"] == pytest.approx(4 * 112.5e9 / 7)
    assert tree_of("conf/system/mine.yaml")["fabric"]["num_nodes"] == 2


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["system=h100_9", "out=a.yaml"], ["system = 'h100_9'", "h100_8"]),
        (["system=h100_8", "out=a.txt"], ["out = 'a.txt'", "out=a.yaml"]),
        (["system=h100_8", "out=b200_8.yaml"], ["out = 'b200_8.yaml'", "b200_8_infragraph.yaml"]),
        (["system=h100_8"], ["out", "is missing"]),
        (["system=h100_8", "out=a.yaml", "fabric=none"], ["fabric = 'none'", "infiniband_2"]),
        (["system=h100_8", "out=a.yaml", "device=hots"], ["device = 'hots'", "did you mean `host`?"]),
    ],
    ids=" ".join,
)
def test_wrong_words_are_refused(
    words: list[str],
    parts: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path, cluster())
    assert main(["machine", "import", "file=topology.yaml", *words]) == 2
    refusal = capsys.readouterr().err
    assert all(part in refusal for part in parts), refusal
    assert not list(tmp_path.glob("a.*"))


def test_a_system_says_whose_topology_it_has(tmp_path: Path) -> None:
    folder = Path(__file__).with_name("field") / "nccl-topology-xml"
    of_nccl = import_system(folder / "switch.xml", "h100_8", "mine").tree
    assert of_nccl["description"].endswith("in switch.xml (NCCL)")
    assert all(entry["source"].startswith("NCCL topology switch.xml: ") for entry in of_nccl["sources"].values())
