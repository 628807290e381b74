"""Files of InfraGraph (https://infragraph.dev, schema 3.1): devices of components, their instances, edges, and links.

Edges name slices (`xpu[0:8]`, `cx5[0].port`), which are written out here as InfraGraph's service does it: a slice
beyond the components is cut, and of two vertices with several edges the last edge counts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, product
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from dse.config.options import MOST_BYTES as MOST_YAML_BYTES
from dse.errors import MOST_SHOWN, ConfigError, Problem, Problems, did_you_mean
from dse.errors.parsing import parse_json, parse_yaml
from dse.files import open_plain_file, read_text
from dse.values import Frozen
from dse.values.units import Integer, Number
from dse_peers.nccl_topology import infrastructure_tree

Kind = Literal["custom", "device", "cpu", "xpu", "nic", "memory", "port", "switch"]
Rate = Annotated[Number, Field(gt=0, le=1e9)]
Delay = Annotated[Number, Field(ge=0, le=1e12)]
Name = Annotated[str, Field(pattern=r"^[^.\[\]]{1,200}$")]
Count = Annotated[Integer, Field(ge=0, le=100_000)]
MOST_JSON_BYTES = 1 << 24
MOST_WRITTEN_OUT = 1_000_000
"""Vertices and edges that the slices of a file may stand for."""
_MOST_DEPTH = 20  # of devices in devices
_ELEMENT = re.compile(r"([^\[\]]+)(?:\[([^\[\]]*)\])?")
# an index, or start:stop:step with a positive step, as Python has them; digits are bounded
_SLICE = re.compile(r"-?\d{1,9}|(?:-?\d{1,9})?:(?:-?\d{1,9})?(?::[1-9]\d{0,8})?|")
_WAY = "write a file of InfraGraph: devices, instances, links, edges (https://infragraph.dev)"


class _Part(Frozen):
    """A part of a file. Keys that are not read are kept, so that they can be listed."""

    model_config = ConfigDict(extra="allow")


class Bandwidth(_Part):
    """Rate of a link, in the unit that `choice` names."""

    choice: Literal["gigabits_per_second", "gigabytes_per_second", "gigatransfers_per_second"] | None = None
    gigabits_per_second: Rate | None = None
    gigabytes_per_second: Rate | None = None
    gigatransfers_per_second: Rate | None = None


class Latency(_Part):
    """Latency of a link, in the unit that `choice` names."""

    choice: Literal["ms", "us", "ns"] | None = None
    ms: Delay | None = None
    us: Delay | None = None
    ns: Delay | None = None


class Physical(_Part):
    """What a link can do."""

    bandwidth: Bandwidth | None = None
    latency: Latency | None = None


class Link(_Part):
    """A kind of link, which edges name."""

    name: str
    description: str = ""
    physical: Physical | None = None

    @property
    def bytes_per_s(self) -> float | None:
        """Rate [bytes/s]; None where none is given, or one in transfers, whose lanes are not given."""
        rate = self.physical.bandwidth if self.physical else None
        # bytes/s; transfers have no fixed size, and are left out
        units = {"gigabits_per_second": 1.25e8, "gigabytes_per_second": 1e9}
        return _in_units(rate, units)

    @property
    def seconds(self) -> float | None:
        """Latency [s]; None where none is given."""
        return _in_units(self.physical.latency if self.physical else None, {"ms": 1e-3, "us": 1e-6, "ns": 1e-9})


def _in_units(value: BaseModel | None, units: Mapping[str, float]) -> float | None:
    """The value of the unit chosen, or of the first that is given, in SI units."""
    names = [getattr(value, "choice", None) or name for name in units]
    numbers = [(name, getattr(value, name, None)) for name in names if name in units]
    # 12 digits: a product with a unit may be off in its last ones
    return next((float(f"{number * units[name]:.12g}") for name, number in numbers if number is not None), None)


class Custom(_Part):
    """Kind of a component that the schema has no name for."""

    type: str


class Component(_Part):
    """`count` equal parts of a device. choice: their kind; a `device` is the device of the component's name."""

    name: Name
    description: str = ""
    count: Count
    choice: Kind
    custom: Custom | None = None
    device: Any = None
    cpu: Any = None
    xpu: Any = None
    nic: Any = None
    memory: Any = None
    port: Any = None
    switch: Any = None


class DeviceEnd(_Part):
    """Components of a device, or of a device in it."""

    device: str | None = None
    component: str


class InstanceEnd(_Part):
    """Components of instances."""

    instance: str
    component: str


class _Edge(_Part):
    scheme: Literal["one2one", "many2many", "ring"]
    link: str


class DeviceEdge(_Edge):
    """Edges inside a device."""

    ep1: DeviceEnd
    ep2: DeviceEnd


class InstanceEdge(_Edge):
    """Edges between instances."""

    ep1: InstanceEnd
    ep2: InstanceEnd


class Device(_Part):
    """Components and their edges."""

    name: Name
    description: str = ""
    components: tuple[Component, ...]
    links: tuple[Link, ...] = ()
    edges: tuple[DeviceEdge, ...] = ()


class Instance(_Part):
    """`count` devices of a kind."""

    name: Name
    description: str = ""
    device: str
    count: Count


class Infrastructure(_Part):
    """A file."""

    name: str = ""
    description: str = ""
    devices: Annotated[tuple[Device, ...], Field(min_length=1)]
    links: tuple[Link, ...] = ()
    instances: tuple[Instance, ...] = ()
    edges: tuple[InstanceEdge, ...] = ()


@dataclass(frozen=True)
class Graph:
    """kinds: vertex (`xpu.0`, `cx5.1.port.0`) -> kind of component. edges: (vertex, vertex) -> link, each once."""

    kinds: Mapping[str, str]
    edges: Mapping[tuple[str, str], Link]

    def of_kind(self, kind: str) -> list[str]:
        """Vertices of a kind, in the order of the file."""
        return [name for name, other in self.kinds.items() if other == kind]


def read_infrastructure(path: Path) -> tuple[Infrastructure, list[str]]:
    """A file, and the dotted paths of it that are not read. A device alone is a file of one. Raises ConfigError."""
    if _starts_with_tag(path):
        tree, unread = infrastructure_tree(path)
    else:
        tree, unread = _parse(path), list[str]()
    if isinstance(tree, Mapping) and "infrastructure" in tree:  # what InfraGraph's get_graph answers
        unread += [str(name) for name in tree if name != "infrastructure"]
        tree = tree["infrastructure"]
    if isinstance(tree, Mapping) and "components" in tree and "devices" not in tree:
        tree = {"devices": [tree]}
    if not isinstance(tree, Mapping):
        raise ConfigError([Problem("file", "holds no devices", str(path), _WAY)])
    check = Problems()
    infrastructure = check.model(Infrastructure, tree, path="file")
    check.done(path.name)
    assert infrastructure is not None
    _check_names(infrastructure, path)
    return infrastructure, unread + list(_extras(infrastructure, ""))


def format_of(path: Path) -> str:
    """Whose format a file has: InfraGraph's, or that of NCCL's and RCCL's topologies. Raises ConfigError."""
    return "NCCL" if _starts_with_tag(path) else "InfraGraph"


def _starts_with_tag(path: Path) -> bool:
    """Return whether a file is XML, by its first bytes."""
    with open_plain_file(path, "file") as file:
        return file.read(1024).decode("utf-8-sig", errors="replace").lstrip().startswith("<")


def _parse(path: Path) -> Any:
    """The tree of a file: JSON by its ending, else YAML. Raises ConfigError."""
    if is_json := path.suffix.lower() == ".json":
        text = read_text(path, "file", most=MOST_JSON_BYTES)
    else:
        text = read_text(path, "file", most=MOST_YAML_BYTES, way_out="name a plain file; a large one may be JSON")
    return parse_json(text, str(path)) if is_json else parse_yaml(text, str(path))


def _extras(part: BaseModel, path: str) -> Iterator[str]:
    """Yield dotted paths of keys that the schema does not have."""
    # extra keys were kept for this
    yield from (f"{path}{name}" for name in part.model_extra or ())
    for name in type(part).model_fields:
        value = getattr(part, name)
        for place, inner in enumerate(value) if isinstance(value, tuple) else [("", value)]:
            if isinstance(inner, BaseModel):
                yield from _extras(inner, f"{path}{name}.{place}." if place != "" else f"{path}{name}.")


def _check_names(infrastructure: Infrastructure, path: Path) -> None:
    """Check that names are unique, and that those of devices are of the file. Raises ConfigError."""
    check, names = Problems(), {device.name for device in infrastructure.devices}
    _check_unique(check, "file.devices", infrastructure.devices)
    _check_unique(check, "file.instances", infrastructure.instances)
    for place, device in enumerate(infrastructure.devices):
        _check_unique(check, f"file.devices.{place}.components", device.components)
        for number, part in enumerate(device.components):
            if part.choice == "device" and part.name not in names and len(check.found) < MOST_SHOWN:
                where = f"file.devices.{place}.components.{number}.name"
                check.add(where, "names no device", value=part.name, way_out=did_you_mean(part.name, names))
    for place, instance in enumerate(infrastructure.instances):
        if instance.device not in names and len(check.found) < MOST_SHOWN:
            way = did_you_mean(instance.device, names)
            check.add(f"file.instances.{place}.device", "names no device", value=instance.device, way_out=way)
    check.done(path.name)


def _check_unique(check: Problems, where: str, parts: Sequence[Device | Instance | Component]) -> None:
    names = set[str]()
    for place, part in enumerate(parts):
        if part.name in names and len(check.found) < MOST_SHOWN:
            check.add(f"{where}.{place}.name", "names two", value=part.name, way_out="give each a name of its own")
        names.add(part.name)


def graph_of(infrastructure: Infrastructure, device: Device) -> Graph:
    """A device with the devices in it, all slices written out. Raises ConfigError."""
    reader = _Reader(infrastructure)
    graph = reader.graph(device, ())
    reader.check.done("file")
    return graph


def outer_edges(infrastructure: Infrastructure) -> dict[tuple[str, str], Link]:
    """(vertex, vertex) -> link of the edges between instances, as `host.0.nic.3`. Raises ConfigError."""
    reader, edges = _Reader(infrastructure), dict[tuple[str, str], Link]()
    links = {link.name: link for link in infrastructure.links}
    for place, edge in enumerate(infrastructure.edges):
        where = f"file.edges.{place}"
        ends = [reader.ends_at(end, f"{where}.ep{1 + i}") for i, end in enumerate((edge.ep1, edge.ep2))]
        edges.update(reader.pairs(edge, (ends[0], ends[1]), links, where))
    reader.check.done("file")
    return edges


class _Reader:
    """Writes slices out, and notes in `check` what they name that is not there."""

    def __init__(self, infrastructure: Infrastructure) -> None:
        self.devices = {device.name: (place, device) for place, device in enumerate(infrastructure.devices)}
        self.parts = {device.name: {part.name: part for part in device.components} for device in infrastructure.devices}
        self.instances = {instance.name: instance for instance in infrastructure.instances}
        # each device is written out once, however often it is used
        self.graphs = dict[str, Graph]()
        self.check, self.number = Problems(), 0

    def count(self, number: int, where: str) -> None:
        """Count vertices and edges that slices stand for. Raises ConfigError where they, or problems, are too many."""
        # before the slices are written out: a short file may stand for millions of edges
        self.number += number
        if self.number > MOST_WRITTEN_OUT:
            rule = f"makes more than {MOST_WRITTEN_OUT} vertices and edges of the file"
            raise ConfigError([Problem(where, rule, way_out="describe fewer instances")])
        # problems that nobody is shown need not be found
        if len(self.check.found) > MOST_SHOWN:
            self.check.done("file")

    def graph(self, device: Device, above: Sequence[str]) -> Graph:
        """A device and all in it. above: names of the devices that it stands in. Raises ConfigError."""
        where = f"file.devices.{self.devices[device.name][0]}"
        # a device in itself would be written out for ever
        if device.name in above or len(above) > _MOST_DEPTH:
            rule = "stands in itself" if device.name in above else f"stands in more than {_MOST_DEPTH} devices"
            raise ConfigError([Problem(where, rule, device.name, "remove a component")])
        if device.name not in self.graphs:
            kinds, edges = self._parts(device, [*above, device.name], where)
            links = {link.name: link for link in device.links}
            for number, edge in enumerate(device.edges):
                at = f"{where}.edges.{number}"
                ends = [self.ends_in(device, end, f"{at}.ep{1 + i}") for i, end in enumerate((edge.ep1, edge.ep2))]
                edges.update(self.pairs(edge, (ends[0], ends[1]), links, at))
            self.graphs[device.name] = Graph(kinds, edges)
        return self.graphs[device.name]

    def _parts(
        self, device: Device, above: Sequence[str], where: str
    ) -> tuple[dict[str, str], dict[tuple[str, str], Link]]:
        """Kinds of the vertices of a device, and the edges of the devices in it."""
        kinds, edges = dict[str, str](), dict[tuple[str, str], Link]()
        for part in device.components:
            inner = self.graph(self.devices[part.name][1], above) if part.choice == "device" else Graph({}, {})
            self.count(part.count * (1 + len(inner.kinds) + len(inner.edges)), where)
            for name in (f"{part.name}.{index}" for index in range(part.count)):
                kinds[name] = part.choice
                kinds.update((f"{name}.{below}", kind) for below, kind in inner.kinds.items())
                edges.update(((f"{name}.{a}", f"{name}.{b}"), link) for (a, b), link in inner.edges.items())
        return kinds, edges

    def ends_in(self, device: Device, end: DeviceEnd, where: str) -> list[str]:
        """Vertices of an end in a device."""
        return self.names(device, f"{end.device}.{end.component}" if end.device else end.component, where)

    def ends_at(self, end: InstanceEnd, where: str) -> list[str]:
        """Vertices of an end at instances."""
        name, slice_text = _element(end.instance)
        instance = self.instances.get(name)
        if instance is None:
            way = did_you_mean(name, self.instances)
            self.check.add(f"{where}.instance", "names no instance", value=end.instance, way_out=way)
            return []
        indices = self.indices(slice_text, instance.count, f"{where}.instance")
        inner = self.names(self.devices[instance.device][1], end.component, where)
        self.count(len(indices) * len(inner), where)
        return [f"{name}.{index}.{below}" for index in indices for below in inner]

    def names(self, device: Device, text: str, where: str) -> list[str]:
        """Vertices of a device that a path of slices names."""
        # an empty path names nothing
        names, here = [""], device if text else None
        for element in text.split("."):
            name, slice_text = _element(element)
            parts = self.parts[here.name] if here else {}
            if name not in parts:
                rule = f"names no component of {here.name}" if here else "names a part of what is no device"
                self.check.add(f"{where}.component", rule, value=text, way_out=did_you_mean(name, parts))
                return []
            indices = self.indices(slice_text, parts[name].count, f"{where}.component")
            self.count(len(names) * len(indices), where)
            names = [f"{above}.{name}.{index}".lstrip(".") for above in names for index in indices]
            # the next element is a part of this one, if it is a device
            here = self.devices[name][1] if parts[name].choice == "device" else None
        return names

    def indices(self, text: str, count: int, where: str) -> Sequence[int]:
        """Indices below `count` that a slice of Python names; all of them by an empty one."""
        if not _SLICE.fullmatch(text):
            self.check.add(where, "has no slice of Python", value=text, way_out="write such as [0:8], [3] or nothing")
            return []
        bounds = [int(bound) if bound else None for bound in text.split(":")]
        if ":" in text or not text:
            # Python cuts a slice that is longer than what there is
            return range(*slice(*(bounds if ":" in text else [None])).indices(count))
        index = int(text) + (count if text.startswith("-") else 0)
        if not 0 <= index < count:
            self.check.add(
                where, f"names one of {count} that is not there", value=text, way_out=f"name 0 to {count - 1}"
            )
            return []
        return [index]

    def pairs(
        self,
        edge: DeviceEdge | InstanceEdge,
        ends: tuple[list[str], list[str]],
        links: Mapping[str, Link],
        where: str,
    ) -> Iterator[tuple[tuple[str, str], Link]]:
        """Yield the edges of a scheme between the vertices of its ends, with their link."""
        if edge.link not in links:
            way = did_you_mean(edge.link, links)
            self.check.add(f"{where}.link", "names no link", value=edge.link, way_out=way)
            return
        self.count(len(ends[0]) * len(ends[1]) if edge.scheme == "many2many" else sum(map(len, ends)), where)
        link = links[edge.link]
        # edges have no direction: one key for both
        yield from (((min(a, b), max(a, b)), link) for a, b in _pairs(edge.scheme, *ends) if a != b)


_Item = TypeVar("_Item")


def _pairs(scheme: str, first: Sequence[_Item], second: Sequence[_Item]) -> Iterator[tuple[_Item, _Item]]:
    """Pairs of two ends. one2one: as far as the shorter goes. ring: of both ends' vertices, the last at the first."""
    if scheme == "many2many":
        return product(first, second)
    if scheme == "one2one":
        return zip(first, second, strict=False)
    # both ends usually name the same vertices
    around = list(dict.fromkeys(chain(first, second)))
    return zip(around, around[1:] + around[:1], strict=True)


def _element(text: str) -> tuple[str, str]:
    """Name and slice of an element of a path; the text itself where it is none."""
    match = _ELEMENT.fullmatch(text)
    return (match[1], match[2] or "") if match else (text, "")
