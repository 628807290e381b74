"""Command `machine import`: a topology of InfraGraph as a system, over a shipped one that has the constants.

python -m dse machine import file=<InfraGraph YAML or JSON> system=<shipped system> out=<file.yaml>
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dse.config.options import conf_dir, list_options, load_yaml
from dse.errors import ConfigError, Problem, Problems, did_you_mean, pairs
from dse.files import atomic_replacement
from dse.space import get_path
from dse_peers.infragraph_files import format_of, read_infrastructure
from dse_peers.infragraph_machine import Reading, read_machine
from simulators.hardware.machine import System, merged, tree_of

_FABRIC = "infiniband_2"
_LABELS = ("name", "description", "sources")
_LIBRARIES = ("library", "in_switch", "experts")
"""Parts of a node that were fitted to the links of the shipped system."""
_OF_NODE = ("node.topology", "node.link_bytes_per_s", "node.hop_latency_s")


@dataclass(frozen=True)
class Imported:
    """tree: of the system's file. lines: what is not read, what stays and where that is from, in words."""

    tree: Mapping[str, Any]
    lines: Sequence[str]


def infragraph_import(words: Sequence[str]) -> int:
    """`machine import file=<YAML or JSON> system=<name> out=<file.yaml> [device=<name>] [fabric=<name>]`."""
    from dse.results import report

    names = ["device", "fabric"]
    options = pairs(words, {"file": "", "system": "", "out": ""}, optional=names)
    out = _out(options["out"])
    result = import_system(
        Path(options["file"]),
        options["system"],
        out.stem,
        device=options.get("device", ""),
        fabric=options.get("fabric", _FABRIC),
    )
    _write(out, yaml.safe_dump(result.tree, sort_keys=False, allow_unicode=True, width=110))
    console = report.console()
    for path in ("node", "fabric"):
        for name, value in _values(result.tree.get(path, {}), path):
            console.print(f"{name} = {value}", soft_wrap=True, highlight=False)
    for line in result.lines:
        console.print(line, soft_wrap=True, highlight=False, markup=False)
    console.print(f"written to {out}; see it: python -m dse machine show {out}", soft_wrap=True, highlight=False)
    return 0


def import_system(path: Path, system: str, name: str, *, device: str = "", fabric: str = _FABRIC) -> Imported:
    """The system that a topology is over a shipped one.

    name: of the new system. device: of the file, that is a node ("": the only one with GPUs). fabric: shipped one
    that has what neither the file nor the system says of a network. Raises ConfigError.
    """
    _check_option("system", system)
    _check_option("fabric", fabric)
    infrastructure, unread = read_infrastructure(path)
    reading, base = read_machine(infrastructure, device), tree_of(system)
    tree, stays = _tree(reading, base, name=name, fabric=fabric)
    source = {"file": path.name, "device": reading.device, "format": format_of(path)}
    tree = {
        "defaults": [system, "_self_"],
        "name": name,
        "description": f"{system} with the topology of {source['device']} in {source['file']} ({source['format']})",
        **tree,
        "sources": {**_sources(reading, tree, f"{source['format']} topology {path.name}"), **tree.pop("sources", {})},
    }
    check = Problems()
    # validated as the file will be composed, so that what is written can be read
    check.model(System, merged(base, {key: value for key, value in tree.items() if key != "defaults"}), path="system")
    check.done()
    lines = [f"not read: {text}" for text in [*reading.unread, *unread]]
    return Imported(tree, [*lines, *stays, *_of_links(base, tree, system)])


def _tree(reading: Reading, base: Mapping[str, Any], *, name: str, fabric: str) -> tuple[dict[str, Any], list[str]]:
    """The parts that a reading changes in a system, and what stays, in words."""
    tree: dict[str, Any] = {"node": {"name": name}}
    for path in [path for path in reading.values if path.startswith("node.")]:
        tree["node"][path.partition(".")[2]] = reading.values[path][0]
    old, lines = base.get("node") or {}, list[str]()
    if tree["node"].get("topology", "switch") != "switch" and old.get("in_switch"):
        tree["node"]["in_switch"] = None  # overrides the shipped one
        lines.append("left out: node.in_switch of the system, as the file has no switch of all GPUs")
    stays = [path for path in _OF_NODE if path not in reading.values and old.get(path.partition(".")[2]) is not None]
    stays += [f"node.{part}" for part in _LIBRARIES if old.get(part) and part not in tree["node"]]
    lines.append(f"stays as the system has it: {', '.join(['gpu', *stays])}")
    of_network = {path: value for path, (value, _) in reading.values.items() if path.startswith("fabric.")}
    # NICs without a second node have nobody to talk to
    if of_network.get("fabric.num_nodes", 1) < 2:
        of_network.pop("fabric.num_nodes", None)
        if of_network:
            text = ", ".join(f"{path} = {value}" for path, value in of_network.items())
            lines.append(f"not written, as the file has one node: {text}")
        return tree, [*lines, *(["stays as the system has it: fabric"] if base.get("fabric") else [])]
    lines += [_from(of_network, base, fabric), "schedules that know one node only take it with system.fabric=null"]
    return {**tree, **_fabric(of_network, base, name=name, fabric=fabric)}, lines


def _fabric(values: Mapping[str, Any], base: Mapping[str, Any], *, name: str, fabric: str) -> dict[str, Any]:
    """The fabric of values, and, where the system has none, the rest of a shipped one with its sources."""
    tree: dict[str, Any] = {"name": name, "nic": {}}
    for path, value in values.items():
        *above, last = path.split(".")[1:]
        # `fabric.nic.<key>` and `fabric.<key>`
        (tree["nic"] if above else tree)[last] = value
    if base.get("fabric"):
        return {"fabric": tree}
    # a fabric needs more than a topology has, such as latencies
    option = load_yaml(conf_dir() / "fabric" / f"{fabric}.yaml")
    sources = {f"fabric.{path}": entry for path, entry in option["sources"].items() if f"fabric.{path}" not in values}
    parts = {key: value for key, value in option.items() if key not in _LABELS}
    return {"fabric": merged(parts, tree), "sources": sources}


def _from(values: Mapping[str, Any], base: Mapping[str, Any], fabric: str) -> str:
    """Say where what a file does not say of a network is from."""
    if base.get("fabric"):
        return f"stays as the system has it: fabric, except {', '.join(values)}"
    return f"as in conf/fabric/{fabric}.yaml, as the system has no fabric: all of it except {', '.join(values)}"


def _of_links(base: Mapping[str, Any], tree: Mapping[str, Any], system: str) -> Iterator[str]:
    """Yield what follows where links change under a library of collectives that was measured on others."""
    old, new = base.get("node") or {}, tree["node"]
    changes = [
        name for name in ("num_gpus", "topology", "link_bytes_per_s") if name in new and new[name] != old.get(name)
    ]
    lacks = [path for path in _OF_NODE[:2] if get_path({"node": {**old, **new}}, path) is None]
    if lacks and new["num_gpus"] > 1:
        yield f"neither the file nor the system has: {', '.join(lacks)}"
    if "link_bytes_per_s" not in new and old.get("link_bytes_per_s") is not None and changes:
        of = f"a {old.get('topology')} of {old.get('num_gpus')} GPUs"
        yield f"node.link_bytes_per_s = {old['link_bytes_per_s']} is of {of}: write that of the file's links over it"
    # rates of a library hold for the links that they were measured on
    if changes and old.get("library"):
        yield f"node.library was measured on the node of {system}; the file changes {', '.join(changes)}"
        if get_path(base, "costs.collective") == "library":
            yield "the system costs collectives by node.library; system.costs.collective=links goes by the links"


def _sources(reading: Reading, tree: Mapping[str, Any], file: str) -> dict[str, Any]:
    """Entries of `sources` for what a reading of a file, with its format in front, put into a tree."""
    return {
        path: {"provenance": "derived", "source": f"{file}: {why}"}
        for path, (_, why) in reading.values.items()
        if get_path(tree, path) is not None
    }


def _values(tree: Mapping[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _values(value, f"{path}.{name}")
        elif name not in _LABELS:
            yield f"{path}.{name}", value


def _check_option(group: str, name: str) -> None:
    """Check that a name is a shipped option of a group. Raises ConfigError."""
    names = list_options(group)
    if name not in names or (group == "fabric" and name == "none"):
        rule = f"is no shipped {group}"
        raise ConfigError([Problem(group, rule, name, did_you_mean(name, set(names) - {"none"}))])


def _out(text: str) -> Path:
    """The file to write: a YAML that is no folder. Raises ConfigError."""
    path = Path(text)
    if path.suffix != ".yaml":
        raise ConfigError([Problem("out", "is no YAML file", text, f"write out={path.with_suffix('.yaml')}")])
    if path.is_dir():
        raise ConfigError([Problem("out", "is a folder", text, "name a file")])
    if path.stem in list_options("system"):
        rule = "has the name of a shipped system, which its own file would hide"
        raise ConfigError([Problem("out", rule, text, f"write out={path.with_stem(f'{path.stem}_infragraph')}")])
    return path


def _write(path: Path, text: str) -> None:
    """Write a file whose folder may not be there yet. Raises ConfigError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # an interrupted run leaves no half of a file
        with atomic_replacement(path) as scratch:
            scratch.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            [Problem("out", f"cannot be written ({error.strerror})", str(path), "name another")]
        ) from None
