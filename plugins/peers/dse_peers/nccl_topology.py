"""NCCL's and RCCL's own view of a node (NCCL_TOPO_DUMP_FILE), as a topology of InfraGraph: one host and its network.

<system><cpu><pci><gpu><nvlink target= count= tclass=/></gpu></pci> <pci><nic><net speed=/></nic></pci></cpu></system>:
a `pci` with neither is a switch of PCIe, with its parent at GT/s x lanes of `link_speed` and `link_width`; the target
of an `nvlink` or `xgmi` is another GPU, or a switch. Rates of these links are not in the file, and stay as a system has
them.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from dse.errors import ConfigError, Problem
from dse.files import read_text

_MOST_BYTES, _MOST_PARTS = 1 << 24, 20_000  # 16 MiB
_SPEED = re.compile(r"\s*([0-9.]{1,8})\s*GT/s.*")
_KINDS: Mapping[str, str] = {"gpu": "xpu", "nic": "nic", "cpu": "cpu", "pcie_switch": "switch", "nvswitch": "switch"}
_READ = frozenset({"system", "cpu", "pci", "gpu", "nic", "net", "nvlink", "xgmi"})
_WAY = "name what NCCL_TOPO_DUMP_FILE wrote: <system> with <cpu>, <pci>, <gpu>, <nic>"


@dataclass
class _Host:
    """Parts by kind, and links between them. gpus: bus of a PCI device -> its GPU. networks: NIC -> rate [Gbit/s]."""

    counts: Counter[str] = field(default_factory=Counter)
    edges: list[tuple[str, str, str]] = field(default_factory=list)
    links: dict[str, dict[str, Any]] = field(default_factory=dict)
    gpus: dict[str, str] = field(default_factory=dict)
    switches: dict[str, str] = field(default_factory=dict)
    targets: list[tuple[str, str, str]] = field(default_factory=list)
    networks: dict[str, float] = field(default_factory=dict)
    unread: Counter[str] = field(default_factory=Counter)

    def part(self, kind: str) -> str:
        """A new part of a kind, as an element of a path. Raises ConfigError where they are too many."""
        if sum(self.counts.values()) >= _MOST_PARTS:
            raise ConfigError([Problem("file", f"has more than {_MOST_PARTS} parts", way_out="describe one node")])
        self.counts[kind] += 1
        return f"{kind}[{self.counts[kind] - 1}]"

    def join(self, first: str, second: str, link: str, gigabits: float | None = None) -> None:
        """Join two parts by a link of a name."""
        rate = {"choice": "gigabits_per_second", "gigabits_per_second": gigabits}
        self.links[link] = {"name": link, **({"physical": {"bandwidth": rate}} if gigabits else {})}
        self.edges.append((first, second, link))


def infrastructure_tree(path: Path) -> tuple[dict[str, Any], list[str]]:
    """The tree of InfraGraph that a topology is, and what of it is not read. Raises ConfigError."""
    host = _Host()
    _read(host, _root(path))
    # targets may stand behind what names them, so that they are looked up at the end
    for gpu, target, link in host.targets:
        host.join(gpu, host.gpus.get(target) or _switch(host, target), link)
    unread = [f"{count} <{name}> of {path.name}" for name, count in host.unread.items()]
    return _tree(host, path.stem), unread


def _root(path: Path) -> ET.Element:
    text = read_text(path, "file", most=_MOST_BYTES)
    # no entities, which could grow without bound
    if "<!" in text.replace("<!--", ""):
        raise ConfigError(
            [Problem("file", "has declarations, which a topology of NCCL does not need", str(path), _WAY)]
        )
    try:
        root = ET.fromstring(text)
    except ET.ParseError as error:
        raise ConfigError([Problem("file", f"is no XML: {error}", str(path), _WAY)]) from None
    if root.tag != "system" or root.find(".//gpu") is None:
        what = (
            "<graphs>, which NCCL_GRAPH_DUMP_FILE wrote" if root.tag == "graphs" else f"<{root.tag}>, without a <gpu>"
        )
        raise ConfigError([Problem("file", f"holds {what}", str(path), _WAY)])
    return root


def _read(host: _Host, root: ET.Element) -> None:
    """Read all parts from the root down, each after what it hangs on."""
    # a stack, and no recursion: nesting is the file's
    waiting = [(element, "") for element in reversed(root)]
    while waiting:
        element, above = waiting.pop()
        here = _part(host, element, above)
        host.unread.update([element.tag] if element.tag not in _READ else [])
        waiting += [(inner, here) for inner in reversed(element)]
    cpus = [f"cpu[{place}]" for place in range(host.counts["cpu"])]
    # sockets are joined in a line, by a link whose rate is not in the file
    for first, second in pairwise(cpus):
        host.join(first, second, "between CPUs")


def _part(host: _Host, element: ET.Element, above: str) -> str:
    """Add what an element is to a host; the part that elements in it hang on."""
    if element.tag == "cpu":
        return host.part("cpu")
    if element.tag == "pci":
        kind = "gpu" if element.find("gpu") is not None else "nic" if element.find("nic") is not None else "pcie_switch"
        # buses are written in either case
        here, bus = host.part(kind), element.get("busid", "").lower()
        if kind == "gpu":
            host.gpus[bus] = here
        if above:
            host.join(here, above, *_pcie(element))
        return here
    if element.tag == "nic" and not above.startswith("nic"):  # without a PCI device of its own
        here = host.part("nic")
        host.join(here, above, "PCIe of a virtual NIC")
        return here
    # keep="0": NCCL does not use it
    if element.tag == "net" and element.get("keep", "1") != "0":
        # Mbit/s
        megabits = _number(element, "speed")
        # ports of a NIC add up
        host.networks[above] = host.networks.get(above, 0.0) + megabits / 1000
    if element.tag in ("nvlink", "xgmi"):
        link = f"{element.tag}, {element.get('count', '1')} links"
        host.targets.append((above, element.get("target", "").lower(), link))
    return above


def _switch(host: _Host, target: str) -> str:
    """The switch of GPUs at a bus; there is one for each."""
    # NVSwitches are named by their bus, and have no element of their own
    if target not in host.switches:
        host.switches[target] = host.part("nvswitch")
    return host.switches[target]


def _pcie(element: ET.Element) -> tuple[str, float | None]:
    """Name and rate [Gbit/s] of the link of a PCI device: 8b/10b up to 5 GT/s, 128b/130b above (PCI Express Base)."""
    speed = _SPEED.fullmatch(element.get("link_speed", ""))
    lanes = element.get("link_width", "")
    if speed is None or not re.fullmatch(r"[1-9]\d?", lanes):
        return "PCIe of unknown rate", None
    transfers = float(speed[1])
    rate = transfers * int(lanes) * (0.8 if transfers <= 5 else 128 / 130)
    return f"PCIe {transfers:g} GT/s x{lanes}", float(f"{rate:.9g}")


def _number(element: ET.Element, name: str) -> float:
    text = element.get(name, "0")
    if not re.fullmatch(r"\d{1,9}", text):
        raise ConfigError([Problem("file", f"has a <{element.tag}> whose {name} is no number", text, _WAY)])
    return float(text)


def _tree(host: _Host, name: str) -> dict[str, Any]:
    """The host as devices, an instance, and edges of its NICs to a network."""
    parts = [{"name": kind, "count": count, "choice": _KINDS[kind]} for kind, count in host.counts.items()]
    inner = [_edge({"component": a}, {"component": b}, link) for a, b, link in host.edges]
    links, outer = dict[str, dict[str, Any]](), list[dict[str, Any]]()
    for nic, gigabits in _rates(host):
        link = f"network at {gigabits:g} Gbit/s"
        rate = {"choice": "gigabits_per_second", "gigabits_per_second": gigabits}
        links[link] = {"name": link, "physical": {"bandwidth": rate}}
        ends = {"instance": "node[0]", "component": nic}, {"instance": "network[0]", "component": "port[0]"}
        # one network stands for whatever the NICs reach
        outer.append(_edge(*ends, link))
    network = {"name": "network", "components": [{"name": "port", "count": 1, "choice": "switch"}]}
    device = {"name": "host", "components": parts, "links": list(host.links.values()), "edges": inner}
    instances = [{"name": "node", "device": "host", "count": 1}]
    return {
        "name": name,
        "devices": [device, *([network] if outer else [])],
        "links": list(links.values()),
        "instances": [*instances, *([{"name": "network", "device": "network", "count": 1}] if outer else [])],
        "edges": outer,
    }


def _rates(host: _Host) -> Iterator[tuple[str, float]]:
    """Yield NICs whose rate is given."""
    # speed 0: not known
    return ((nic, gigabits) for nic, gigabits in host.networks.items() if gigabits)


def _edge(first: Mapping[str, str], second: Mapping[str, str], link: str) -> dict[str, Any]:
    return {"ep1": dict(first), "ep2": dict(second), "scheme": "one2one", "link": link}
