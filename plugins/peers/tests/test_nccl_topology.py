"""Topologies that NCCL and RCCL write: GPUs, links and NICs of a node, and files that are none."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dse.errors import ConfigError
from dse_peers.infragraph import import_system
from dse_peers.infragraph_files import read_infrastructure
from dse_peers.infragraph_machine import Reading, read_machine

FIELD = Path(__file__).with_name("field") / "nccl-topology-xml"


def pci(bus: str, inner: str, speed: str = "16.0 GT/s PCIe", width: int = 16) -> str:
    """A device of PCI."""
    return f'<pci busid="{bus}" class="0x0" link_speed="{speed}" link_width="{width}">{inner}</pci>'


def reading(folder: Path, inner: str) -> Reading:
    """What a topology with these devices at one CPU says of a machine."""
    (folder / "topo.xml").write_text(f'<system version="1"><cpu numaid="0">{inner}</cpu></system>')
    infrastructure, _ = read_infrastructure(folder / "topo.xml")
    return read_machine(infrastructure)


@given(st.integers(2, 9), st.integers(0, 6), st.sampled_from([("5.0 GT/s", 0.8), ("16.0 GT/s PCIe", 128 / 130)]))
def test_gpus_of_a_mesh_and_nics_are_counted_with_the_rates_of_their_slots(
    tmp_path_factory: pytest.TempPathFactory, gpus: int, nics: int, slot: tuple[str, float]
) -> None:
    speed, share = slot
    inner = ""
    for gpu in range(gpus):
        links = "".join(f'<xgmi target="0:{other}" count="2"/>' for other in range(gpus) if other != gpu)
        inner += pci(f"0:{gpu}", f'<gpu dev="{gpu}">{links}</gpu>')
    inner += "".join(pci(f"1:{nic}", '<nic><net name="n" speed="200000"/></nic>', speed, 8) for nic in range(nics))
    values = {path: value for path, (value, _) in reading(tmp_path_factory.mktemp("topo"), inner).values.items()}
    assert (values["node.num_gpus"], values["node.topology"]) == (gpus, "mesh")
    assert values.get("fabric.nic.num_nics", 0) == nics
    if nics:
        assert values["fabric.nic.bytes_per_s"] == 25e9
        transfers = float(speed.split()[0])
        assert values["fabric.nic.pcie_bytes_per_s"] == pytest.approx(transfers * 1e9 * share, rel=1e-8)


def test_a_topology_is_a_system_whose_links_keep_their_rate() -> None:
    imported = import_system(FIELD / "switch.xml", "h100_8", "mine")
    assert imported.tree["node"] == {"name": "mine", "num_gpus": 8, "topology": "switch"}
    assert any(line.startswith("stays as the system has it: gpu, node.link_bytes_per_s") for line in imported.lines)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("<graphs><graph/></graphs>", "holds <graphs>, which NCCL_GRAPH_DUMP_FILE wrote"),
        ("<system><cpu/></system>", "without a <gpu>"),
        ("<system><cpu>", "is no XML"),
        ('<!DOCTYPE a [<!ENTITY b "c">]><system/>', "has declarations"),
        ('<system><cpu><pci><gpu/></pci><nic><net speed="fast"/></nic></cpu></system>', "speed is no number"),
        ("<system>" + "<cpu/>" * 20_001 + "<gpu/></system>", "has more than 20000 parts"),
    ],
)
def test_what_is_no_topology_is_refused(tmp_path: Path, text: str, part: str) -> None:
    (tmp_path / "topo.xml").write_text(text)
    with pytest.raises(ConfigError) as refused:
        read_infrastructure(tmp_path / "topo.xml")
    assert part in str(refused.value)
