"""What a topology of InfraGraph says of a machine: GPUs and links of a node, NICs and their place, number of nodes.

A switch reaches GPUs by links of their own, or is one of PCIe: links by which GPUs reach a CPU, or whose name or
description says PCI. Rates are taken as the file has them, in one direction.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from dse.errors import ConfigError, Problem, Problems, did_you_mean
from dse.values.units import with_prefix
from dse_peers.infragraph_files import Device, Graph, Infrastructure, Link, graph_of, outer_edges

Neighbours = Mapping[str, Mapping[str, Link]]
_MOST = 1024
"""GPUs, and NICs, of a node; a hundred kinds of links are enough for them."""
_MOST_LINKS = 100
# in the order of preference where several are as near
_PLACES = {"xpu": "gpu", "switch": "pcie_switch", "cpu": "cpu"}
_READ = frozenset({"xpu", "switch", "nic", "cpu"})


@dataclass(frozen=True)
class Reading:
    """values: dotted path of a machine -> (value in SI units, why). unread: what is not read, in words."""

    device: str
    values: Mapping[str, tuple[Any, str]]
    unread: Sequence[str]


class _Notes:
    """Values as they are read, and what is not."""

    def __init__(self) -> None:
        self.values = dict[str, tuple[Any, str]]()
        self.unread = list[str]()

    def put(self, path: str, value: Any, why: str) -> None:
        self.values[path] = (value, why)


def read_machine(infrastructure: Infrastructure, name: str = "") -> Reading:
    """Values of a machine whose node is a device of a file. name: of the device, "" for the only one with GPUs.

    Raises ConfigError.
    """
    notes, device = _Notes(), _host(infrastructure, name)
    # NICs and switches are often devices of ports: one vertex each, as a machine knows them
    graph = _with_parts_as_vertices(infrastructure, graph_of(infrastructure, device))
    gpus = graph.of_kind("xpu")
    _check_size(device, graph)
    notes.put("node.num_gpus", len(gpus), f"xpus of the device {device.name}")
    neighbours = _neighbours(graph)
    # a node of one GPU has no links of its own
    if len(gpus) > 1:
        _read_links(graph, neighbours, notes)
    _read_network(infrastructure, device, graph, notes)
    notes.unread += _unread_parts(infrastructure, device, graph)
    return Reading(device.name, notes.values, notes.unread)


def _check_size(device: Device, graph: Graph) -> None:
    """Check that a node is no cluster. Raises ConfigError."""
    check, way = Problems(), "let an instance be one host"
    for kind in ("xpu", "nic"):
        if len(graph.of_kind(kind)) > _MOST:
            check.add("file.devices", f"has more than {_MOST} of kind {kind} in {device.name}", way_out=way)
    # the search for links to the host looks at each name alone
    if len({link.name for link in graph.edges.values()}) > _MOST_LINKS:
        check.add("file.devices", f"has more than {_MOST_LINKS} links in {device.name}", way_out=way)
    check.done()


def _host(infrastructure: Infrastructure, name: str) -> Device:
    """The device that is a node. Raises ConfigError where there is none, or there are several."""
    devices = {device.name: device for device in infrastructure.devices}
    with_gpus = {other for other in devices if "xpu" in _kinds_in(devices, other)}
    if name and name not in with_gpus:
        way = did_you_mean(name, with_gpus)
        raise ConfigError([Problem("device", "is no device of the file with xpus", name, way)])
    instance_devices = {instance.device for instance in infrastructure.instances if instance.count}
    inner = {
        part.name
        for device in devices.values()
        for part in device.components
        if part.choice == "device" and part.name != device.name
    }
    # instances decide; a file without any describes devices alone
    hosts = sorted(with_gpus & instance_devices if instance_devices else with_gpus - inner)
    if not hosts:
        way = "give a device a component of the choice xpu, and the device an instance"
        raise ConfigError([Problem("file.instances", "holds no device with xpus, so no node", way_out=way)])
    if len(hosts) > 1 and not name:
        rule = f"holds several devices with xpus: {', '.join(hosts)}"
        raise ConfigError([Problem("file.instances", rule, way_out=f"write device={hosts[0]}")])
    return devices[name or hosts[0]]


def _kinds_in(devices: Mapping[str, Device], name: str) -> set[str]:
    """Kinds of the components of a device and of the devices in it."""
    kinds, names, open_names = set[str](), {name}, [name]
    # devices may hold devices: all below the first one
    while open_names:
        for part in devices[open_names.pop()].components:
            kinds.update([part.choice] if part.count else [])
            if part.choice == "device" and part.count and part.name not in names:
                names.add(part.name)
                open_names.append(part.name)
    return kinds


def _with_parts_as_vertices(infrastructure: Infrastructure, graph: Graph) -> Graph:
    """A graph in which devices with ports in a node are one vertex: a NIC, or with a switch in it, a switch."""
    devices = {device.name: device for device in infrastructure.devices}
    # a vertex is `device.index`, below others: the last name but one is the device's
    inner = {name: name.split(".")[-2] for name in graph.of_kind("device")}
    kind_of = {name: _kind_of(_kinds_in(devices, name)) for name in set(inner.values())}
    groups = {name: kind_of[device] for name, device in inner.items() if kind_of[device]}
    kinds = {_grouped(name, groups): groups.get(_grouped(name, groups), kind) for name, kind in graph.kinds.items()}
    edges = {(_grouped(a, groups), _grouped(b, groups)): link for (a, b), link in graph.edges.items()}
    # edges inside a group are gone
    return Graph(kinds, {(a, b): link for (a, b), link in edges.items() if a != b})


def _kind_of(kinds: Collection[str]) -> str:
    """Kind of vertex that a device of components of these kinds is; "" where it is written out."""
    # a device with GPUs or NICs in it is written out: these are read one by one
    if "port" not in kinds or {"xpu", "nic"} & set(kinds):
        return ""
    return "switch" if "switch" in kinds else "nic"


def _grouped(name: str, groups: Collection[str]) -> str:
    """The vertex that a vertex belongs to: the outermost group above it, or itself."""
    words = name.split(".")
    # name and index alternate, from the outermost device on
    above = (".".join(words[:length]) for length in range(2, len(words) + 1, 2))
    return next((prefix for prefix in above if prefix in groups), name)


def _neighbours(graph: Graph) -> dict[str, dict[str, Link]]:
    neighbours: dict[str, dict[str, Link]] = {name: {} for name in graph.kinds}
    for (a, b), link in graph.edges.items():
        neighbours[a][b] = neighbours[b][a] = link
    return neighbours


def _reached(
    neighbours: Neighbours, starts: Collection[str], through: Collection[str], links: Collection[str]
) -> set[str]:
    """Vertices reached from `starts` over links of these names; only those of `through` are passed."""
    past, open_vertices = set(starts), list(starts)
    while open_vertices:
        for name, link in neighbours[open_vertices.pop()].items():
            if link.name in links and name not in past:
                past.add(name)
                if name in through:
                    open_vertices.append(name)
    return past


def _host_links(graph: Graph, neighbours: Neighbours) -> set[str]:
    """Names of links by which GPUs reach the host: a CPU by this link alone, or PCIe by name."""
    gpus, cpus = graph.of_kind("xpu"), set(graph.of_kind("cpu"))
    # paths end at CPUs, and do not pass other GPUs
    through = set(graph.kinds) - cpus - set(gpus)
    links = {link.name: link for gpu in gpus for link in neighbours[gpu].values()}
    return {
        name
        for name, link in links.items()
        if "pci" in f"{name} {link.description}".lower() or cpus & _reached(neighbours, gpus, through, {name})
    }


def _read_links(graph: Graph, neighbours: Neighbours, notes: _Notes) -> None:
    """Topology of a node, and the rate and latency of its links."""
    gpus = graph.of_kind("xpu")
    direct = {
        frozenset(pair): neighbours[pair[0]][pair[1]]
        for pair in combinations(gpus, 2)
        if pair[1] in neighbours[pair[0]] and "pci" not in neighbours[pair[0]][pair[1]].name.lower()
    }
    host = _host_links(graph, neighbours)
    ports = {gpu: _ports(graph, neighbours[gpu], host) for gpu in gpus}
    topology, why = _topology(graph, neighbours, direct, ports=ports, host=host)
    if not topology:
        notes.unread.append(why)
        return
    notes.put("node.topology", topology, why)
    if topology == "switch":
        _read_ports(ports, notes)
    elif topology == "pcie":
        _put_rate(
            notes, "node.link_bytes_per_s", _host_rates(graph, neighbours, "xpu", host), "a GPU's link to its host"
        )
    else:
        links = list(direct.values())
        _put_rate(notes, "node.link_bytes_per_s", [link.bytes_per_s for link in links], f"links {_names(links)}")
        _put_latency(notes, links, 1)


def _ports(graph: Graph, links: Mapping[str, Link], host: Collection[str]) -> list[Link]:
    """Links of a GPU to switches that are not of its host."""
    return [link for name, link in links.items() if graph.kinds[name] == "switch" and link.name not in host]


def _topology(
    graph: Graph,
    neighbours: Neighbours,
    direct: Mapping[frozenset[str], Link],
    *,
    ports: Mapping[str, Sequence[Link]],
    host: Collection[str],
) -> tuple[str, str]:
    """Topology of a node and why; "" where the links make none that is simulated."""
    gpus, pairs = list(ports), len(ports) * (len(ports) - 1) // 2
    # direct links of each GPU
    degrees = Counter(gpu for pair in direct for gpu in pair)
    names = {link.name for link in direct.values()}
    # two GPUs with a link are a mesh, and no ring
    if len(direct) == pairs:
        return "mesh", "each xpu has a link to each other"
    # two links each may also be several small rings: all GPUs must be reached
    if set(degrees.values()) == {2} and _reached(neighbours, gpus[:1], gpus, names) >= set(gpus):
        return "ring", "each xpu has links to two others, around all"
    switch_links = {link.name for links in ports.values() for link in links}
    switches = set(graph.of_kind("switch"))
    if all(ports.values()) and _reached(neighbours, gpus[:1], {*switches, *gpus}, switch_links) >= set(gpus):
        return "switch", f"xpus meet at switches over {', '.join(sorted(switch_links))}"
    if direct or any(ports.values()):
        return "", f"links of GPUs, which join {len(direct)} of {pairs} pairs: no mesh, ring or switch of all"
    nics = set(graph.of_kind("nic"))
    everything = {link.name for link in graph.edges.values()}
    if _reached(neighbours, gpus[:1], set(graph.kinds) - nics, everything) >= set(gpus):
        return "pcie", f"xpus meet over links to their host alone ({', '.join(sorted(host))})"
    return "", "GPUs, between which there is no path"


def _read_ports(ports: Mapping[str, Sequence[Link]], notes: _Notes) -> None:
    """Rate of a link at a switch: all of a GPU's links to switches, shared by the other GPUs."""
    peers = len(ports) - 1
    rates = list[float | None]()
    for links in ports.values():
        numbers = [link.bytes_per_s for link in links if link.bytes_per_s is not None]
        # a system's rate is that to one peer: a switch shares a GPU's links among all others
        rates.append(sum(numbers) / peers if len(numbers) == len(links) else None)
    most = max(map(len, ports.values()))
    why = f"{most} links of an xpu to switches, over {peers} other xpus"
    _put_rate(notes, "node.link_bytes_per_s", rates, why)
    _put_latency(notes, [link for links in ports.values() for link in links], 2)


def _put_rate(notes: _Notes, path: str, rates: Sequence[float | None], why: str) -> None:
    """Note the slowest of rates, where none is missing."""
    numbers = [rate for rate in rates if rate is not None]
    if not numbers or len(numbers) < len(rates):
        if numbers:
            notes.unread.append(f"rates for {path}: {len(rates) - len(numbers)} of {len(rates)} are missing")
        return
    # collectives run at the pace of the slowest link
    if min(numbers) < max(numbers):
        notes.unread.append(f"rates above the slowest for {path}: up to {with_prefix(max(numbers), 'byte/second')}")
    notes.put(path, float(f"{min(numbers):.9g}"), f"rate of {why}, as the file has it")


def _put_latency(notes: _Notes, links: Sequence[Link], hops: int) -> None:
    """Note the time from one GPU to the next: `hops` links of the largest latency."""
    numbers = [link.seconds for link in links if link.seconds is not None]
    if numbers and len(numbers) == len(links):
        why = f"latency of {hops} link{'s' * (hops > 1)} ({_names(links)}) between two xpus"
        # hops: 1 of a link between GPUs, 2 by way of a switch
        notes.put("node.hop_latency_s", float(f"{hops * max(numbers):.9g}"), why)


def _names(links: Sequence[Link]) -> str:
    return ", ".join(sorted({link.name for link in links}))


def _host_rates(graph: Graph, neighbours: Neighbours, kind: str, host: Collection[str] | None) -> list[float | None]:
    """Rate of the fastest link that each vertex of a kind has to its host. host: names of the links, None for any."""
    rates = list[float | None]()
    for name in graph.of_kind(kind):
        links = [link for link in neighbours[name].values() if host is None or link.name in host]
        rates.append(max((link.bytes_per_s for link in links if link.bytes_per_s is not None), default=None))
    return rates


def _read_network(infrastructure: Infrastructure, device: Device, graph: Graph, notes: _Notes) -> None:
    """Number of nodes, of NICs, their place and rates."""
    instances = {group.name: group.count for group in infrastructure.instances if group.device == device.name}
    rates, at_gpus = _rates_at_hosts(outer_edges(infrastructure), instances, graph)
    if at_gpus:
        notes.unread.append(
            f"{at_gpus} ends of edges between instances at xpus or other parts than NICs: a node is one instance"
        )
    nodes = len(rates) or sum(instances.values())
    if instances:
        edges = "with edges of their NICs" if rates else "of the device"
        notes.put("fabric.num_nodes", nodes, f"instances {edges}: {', '.join(instances)}")
    if rates and nodes < sum(instances.values()):
        notes.unread.append(f"{sum(instances.values()) - nodes} instances of {device.name} without edges of their NICs")
    nics, neighbours = graph.of_kind("nic"), _neighbours(graph)
    at_network = {name for of_node in rates.values() for name in of_node}
    # a NIC without an edge between instances may serve storage or management
    of_network = [name for name in nics if name in at_network] or nics
    if len(of_network) < len(nics):
        notes.unread.append(f"{len(nics) - len(of_network)} NICs at no network")
    if not of_network:
        return
    notes.put("fabric.nic.num_nics", len(of_network), "NICs of a node" + (" with edges to a network" if rates else ""))
    _put_place(graph, neighbours, of_network, notes)
    if rates:
        each = [rate for of_node in rates.values() for rate in of_node.values()]
        _put_rate(notes, "fabric.nic.bytes_per_s", each, "the edges of a NIC between instances")


def _put_place(graph: Graph, neighbours: Neighbours, nics: Sequence[str], notes: _Notes) -> None:
    """Note where most NICs are, and the rate of the links that they and GPUs hang on."""
    places = Counter(place for nic in nics if (place := _place(graph, neighbours, nic)))
    if not places:
        notes.unread.append("place of NICs: no path to a GPU, a switch or a CPU")
        return
    # a system has one place for all NICs
    place, number = places.most_common(1)[0]
    if number < len(nics):
        notes.unread.append(f"places of {len(nics) - number} NICs: {dict(places)}; most are at {place}")
    notes.put("fabric.nic.placement", place, f"what {number} of {len(nics)} NICs hang on")
    host = _host_links(graph, neighbours)
    if place != "gpu":
        of_gpus = [rate for rate in _host_rates(graph, neighbours, "xpu", host) if rate is not None]
        # a transfer crosses the links of both
        rates = [*_host_rates(graph, neighbours, "nic", None), *of_gpus]
        _put_rate(notes, "fabric.nic.pcie_bytes_per_s", rates, "the links of NICs and GPUs to the host")


def _place(graph: Graph, neighbours: Neighbours, nic: str) -> str:
    """Where a NIC is: at the nearest of GPU, switch and CPU; a slot that joins GPU and CPU is a switch of PCIe."""
    past, ring = {nic}, [nic]
    # rings of vertices around the NIC, nearest first
    while ring:
        ring = [
            name for name in dict.fromkeys(other for here in ring for other in neighbours[here]) if name not in past
        ]
        past.update(ring)
        kinds = {graph.kinds[name] for name in ring} & set(_PLACES)
        if kinds:
            is_direct = bool({graph.kinds[name] for name in neighbours[nic]} & kinds)
            # GPU and CPU at once, behind something that the file does not name a switch
            if not is_direct and len(kinds) > 1:
                return "pcie_switch"
            return next(place for kind, place in _PLACES.items() if kind in kinds)
        # the way does not lead through other NICs
        ring = [name for name in ring if graph.kinds[name] != "nic"]
    return ""


def _rates_at_hosts(
    edges: Mapping[tuple[str, str], Link], instances: Collection[str], graph: Graph
) -> tuple[dict[str, dict[str, float | None]], int]:
    """(instance -> NIC -> rate [bytes/s] of its edges, None where an edge has none), and edges at other parts."""
    rates, strange = dict[str, dict[str, float | None]](), 0
    groups = {name for name, kind in graph.kinds.items() if kind in ("nic", "switch")}
    for ends, link in edges.items():
        for end in ends:
            instance, index, vertex = end.split(".", 2)
            if instance not in instances:
                continue
            nic = _grouped(vertex, groups)
            if graph.kinds.get(nic) != "nic":
                strange += 1
                continue
            of_node, rate = rates.setdefault(f"{instance}.{index}", {}), link.bytes_per_s
            # several edges of a NIC, such as two ports, add up; one without a rate leaves the sum unknown
            earlier = of_node.get(nic, 0.0)
            of_node[nic] = None if earlier is None or rate is None else earlier + rate
    return rates, strange


def _unread_parts(infrastructure: Infrastructure, device: Device, graph: Graph) -> Iterator[str]:
    """Yield, in words, components, links and instances that mean nothing to a machine."""
    kinds = Counter(kind for kind in graph.kinds.values() if kind not in _READ)
    yield from (f"components of {device.name}: {number} {kind}" for kind, number in kinds.items())
    links = {link.name: link for link in [*graph.edges.values(), *infrastructure.links]}
    for name, link in links.items():
        rate = link.physical.bandwidth if link.physical else None
        if rate is not None and rate.gigatransfers_per_second is not None and link.bytes_per_s is None:
            yield f"rate of the link {name}, in transfers: the file has no lanes"
    between = [link.name for link in infrastructure.links if link.seconds is not None]
    if between:
        yield f"latency of links between instances: {', '.join(between)}"
    away = [f"{group.count} {group.name}" for group in infrastructure.instances if group.device != device.name]
    if away:
        yield f"instances that are no node, and their network: {', '.join(away)}"
