"""A network packet by packet beside ours: `python -m validation.packet_level [--json]`.

csg-htsim (Broadcom) carries every packet of a traffic through a fat tree of two tiers with full bisection, where N
network ports have links of one rate and one latency. Traffics, S bytes a flow, all flows at once:

    ring         each port to the next one
    permutation  each port to the one half of the ports away, which is below another leaf
    all_to_all   each port to all others
    incast       all ports to the first one

Ours: no function of `simulators.costs.fabric` takes any traffic, so each flow is a task that loads the two ports that
it uses (`simulators.engines.fluid`), at the rate of a NIC (`capacities`), after a delay: the latency between the
farthest ports (`latency_s`), four links through three switches. The spine of a full bisection limits nothing. Headers,
packets that are stored before they are forwarded, collisions of paths and transports are left out.

htsim says when the last acknowledgement reaches the sender; the latency of its way back is subtracted. Transports:

    ndp   `htsim_ndp`: packets spread over all paths, receivers pull
    roce  `htsim_roce`: each flow on one path by its hash, links that pause in place of loss

Programs are found on the path, or in the folder that `HTSIM` names.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dse.errors.terminal import bar
from dse.space import set_path
from simulators.costs.fabric import capacities, latency_s
from simulators.engines.fluid import ENGINE
from simulators.hardware.machine import System, tree_of
from simulators.hardware.schedule_system import ScheduleSystem
from simulators.taskgraph.graph import GraphBuilder

PATTERNS = ("ring", "permutation", "all_to_all", "incast")
PORTS = (8, 32, 128)
"""Network ports of the fat trees: 2 m^2, with m below each leaf."""
WAY_OUT = "git clone https://github.com/Broadcom/csg-htsim; cd csg-htsim/sim && make; export HTSIM=$PWD/datacenter"
_SYSTEM = "mi210_2x1"  # one GPU and one NIC a node; rates and latencies are replaced
_SIZES = (1 << 16, 1 << 20, 1 << 24)
_PAYLOAD_BYTES, _HEADER_BYTES = 4000, 64
_ACROSS_LINKS, _LEAF_LINKS = 4, 2
_TIMEOUT_S = 600.0
_LATEST = 20.0  # of the time that the busiest port needs
_LATEST_S = 10e-3  # beyond it
_FINISHED = re.compile(r"^Flow [A-Za-z]+_(\d+)_(\d+)\b.* finished at (\S+) total bytes", re.MULTILINE)

Pair = tuple[int, int]


@dataclass(frozen=True)
class Link:
    """Every link of the network. bytes_per_s: in one direction. hop_s: latency."""

    bytes_per_s: float
    hop_s: float


@dataclass(frozen=True)
class Traffic:
    """Flows that start at once among `ports` network ports. pattern: one of PATTERNS. size_bytes: of each flow."""

    pattern: str
    ports: int
    size_bytes: int

    @property
    def leaf_ports(self) -> int:
        """Ports below a leaf."""
        return math.isqrt(self.ports // 2)

    @property
    def pairs(self) -> list[Pair]:
        """Sender and receiver of each flow. Raises KeyError for an unknown pattern."""
        ports = range(self.ports)
        steps = {"ring": [1], "permutation": [self.ports // 2], "all_to_all": ports[1:]}
        if self.pattern == "incast":
            return [(port, 0) for port in ports[1:]]
        return [(port, (port + step) % self.ports) for step in steps[self.pattern] for port in ports]

    @property
    def packets(self) -> int:
        """Packets of all flows."""
        return len(self.pairs) * math.ceil(self.size_bytes / _PAYLOAD_BYTES)

    def links(self, pair: Pair) -> int:
        """Links between two ports: two below one leaf, four through the spine."""
        return _LEAF_LINKS if pair[0] // self.leaf_ports == pair[1] // self.leaf_ports else _ACROSS_LINKS

    def matrix(self) -> str:
        """The text of htsim's connection matrix."""
        lines = [f"Nodes {self.ports}", f"Connections {len(self.pairs)}"]
        for number, (sender, receiver) in enumerate(self.pairs, 1):
            lines.append(f"{sender}->{receiver} id {number} start 0 size {self.size_bytes}")
        return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class Transport:
    """A program of htsim. options: its way of choosing paths, and queues."""

    program: str
    options: tuple[str, ...]

    def path(self) -> str | None:
        """Path of the program, in the folder `HTSIM` or on the path; None where there is none."""
        return shutil.which(self.program, path=os.environ.get("HTSIM") or None)


TRANSPORTS: Mapping[str, Transport] = {
    "ndp": Transport("htsim_ndp", ("-strat", "perm", "-q", "100")),
    # its default queue of hosts, fair_prio, aborts where it is paused and released within one packet
    "roce": Transport("htsim_roce", ("-strat", "ecmp_host", "-paths", "128", "-q", "1000", "-host_queue_type", "prio")),
}


def absence() -> str:
    """Which programs are missing, with the way out, or ""."""
    missing = [transport.program for transport in TRANSPORTS.values() if transport.path() is None]
    return f"{' and '.join(missing)}: not on the path. {WAY_OUT} (plugins/peers/README.md)" if missing else ""


def network(traffic: Traffic, link: Link) -> System:
    """Our machine with a port on each node and a fat tree of full bisection between them."""
    tree: dict[str, Any] = tree_of(_SYSTEM)
    changes: dict[str, Any] = {"num_nodes": traffic.ports, "network.leaf_nodes": traffic.leaf_ports}
    changes |= {"nic.num_nics": 1, "nic.placement": "gpu", "nic.message_s": 0.0}
    changes |= {"nic.bytes_per_s": link.bytes_per_s, "nic.latency_s": link.hop_s}
    changes |= {"network.topology": "fat_tree", "network.oversubscription": 1.0, "network.hop_s": link.hop_s}
    for path, value in changes.items():
        set_path(tree, f"fabric.{path}", value)
    return ScheduleSystem.model_validate(tree)


def our_seconds(traffic: Traffic, link: Link) -> float:
    """Time [s] until the last byte arrives, by flows through ports after the latency between the farthest ports."""
    system, build = network(traffic, link), GraphBuilder()
    rate, delay = capacities(system)["nic"], float(latency_s(system, "all_to_all", "direct"))
    out = [build.resource(f"out.{port}", rate) for port in range(traffic.ports)]
    into = [build.resource(f"in.{port}", rate) for port in range(traffic.ports)]
    for sender, receiver in traffic.pairs:
        uses = {out[sender]: 1.0, into[receiver]: 1.0}
        build.task(f"{sender}-{receiver}", "transfer", uses=uses, work=float(traffic.size_bytes), delay=delay)
    return float(ENGINE.totals(build.build()).makespan_s[0])


def simulated_seconds(transport: Transport, traffic: Traffic, link: Link, seed: int = 1) -> float:
    """Time [s] until the last byte arrives, by htsim.

    Raises RuntimeError where there is no program, it cannot be run, takes too long, or a flow does not finish.
    """
    program = transport.path()
    if program is None:
        raise RuntimeError(f"{transport.program} is not on the path. {WAY_OUT}")
    words = [program, "-tiers", "2", "-nodes", str(traffic.ports), "-tm", "traffic.cm", "-seed", str(seed)]
    words += [*transport.options, *_link_options(transport, traffic, link)]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "traffic.cm").write_text(traffic.matrix())
        try:
            run = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise RuntimeError(f"{transport.program} cannot be run: {error}") from error
    ends = {(int(sender), int(receiver)): float(end) for sender, receiver, end in _FINISHED.findall(run.stdout)}
    unfinished = set(traffic.pairs) - ends.keys()
    if run.returncode or unfinished:
        last = " ".join((run.stderr or run.stdout).strip().splitlines()[-1:])[:200]
        count = len(traffic.pairs)
        raise RuntimeError(f"{transport.program} finished {count - len(unfinished)} of {count} flows: {last}")
    return max(end * 1e-6 - traffic.links(pair) * link.hop_s for pair, end in ends.items())


def _link_options(transport: Transport, traffic: Traffic, link: Link) -> list[str]:
    """Rate, latency and packets; when to give up; for NDP a window that covers rate times round trip."""
    packet = _PAYLOAD_BYTES + _HEADER_BYTES
    busiest = traffic.ports - 1 if traffic.pattern in ("all_to_all", "incast") else 1
    latest = _LATEST * busiest * traffic.size_bytes / link.bytes_per_s + _LATEST_S
    options = ["-linkspeed", f"{link.bytes_per_s * 8e-6:.0f}", "-hop_latency", f"{link.hop_s * 1e6:g}"]
    options += ["-mtu", str(_PAYLOAD_BYTES), "-end", f"{latest * 1e6:.0f}"]
    if transport.program == "htsim_ndp":
        round_trip = 2 * _ACROSS_LINKS * link.hop_s + _ACROSS_LINKS * packet / link.bytes_per_s
        options += ["-cwnd", str(math.ceil(1.2 * round_trip * link.bytes_per_s / packet))]
    return options


def compare(traffics: Sequence[Traffic], link: Link, seed: int = 1) -> dict[str, Any]:
    """Times [s] of every traffic by ours and each transport, and signed errors of ours against it, with medians.

    A run that fails is None, and said on stderr.
    """
    rows = []
    with bar("packet level", len(traffics), "traffics") as advance:
        for traffic in traffics:
            ours, times, errors = our_seconds(traffic, link), dict[str, float | None](), dict[str, float | None]()
            for name, transport in TRANSPORTS.items():
                times[name] = _seconds_or_none(transport, traffic, link, seed)
                errors[name] = None if times[name] is None else ours / float(times[name] or math.nan) - 1
            shape = {"pattern": traffic.pattern, "ports": traffic.ports, "size_bytes": traffic.size_bytes}
            rows.append({**shape, "ours_s": ours, "seconds": times, "signed_error": errors})
            advance(1)
    return {"rows": rows, "median_signed_error": _medians(rows)}


def _seconds_or_none(transport: Transport, traffic: Traffic, link: Link, seed: int) -> float | None:
    try:
        return simulated_seconds(transport, traffic, link, seed)
    except RuntimeError as error:
        print(f"{traffic.pattern}, {traffic.ports} ports, {traffic.size_bytes} B: {error}", file=sys.stderr)
        return None


def _medians(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float | None]]:
    """Median signed error by pattern, and of all rows, for each transport; None without a row."""
    medians: dict[str, dict[str, float | None]] = {}
    for pattern in (*dict.fromkeys(row["pattern"] for row in rows), "all"):
        medians[pattern] = {}
        for name in TRANSPORTS:
            errors = [row["signed_error"][name] for row in rows if pattern in (row["pattern"], "all")]
            numbers = [error for error in errors if error is not None]
            medians[pattern][name] = float(np.median(numbers)) if numbers else None
    return medians


def _text(figures: Mapping[str, Any]) -> str:
    names = list(TRANSPORTS)
    heads = "".join(f"{f'{name} us':>12}{'error':>10}" for name in names)
    lines = [f"{'pattern':12}{'N':>5}{'S KiB':>8}{'ours us':>12}{heads}"]
    for row in figures["rows"]:
        cells = "".join(_micros(row["seconds"][name]) + _percent(row["signed_error"][name]) for name in names)
        shape = f"{row['pattern']:12}{row['ports']:>5}{row['size_bytes'] / 1024:>8g}"
        lines.append(f"{shape}{_micros(row['ours_s'])}{cells}")
    lines.append("median signed error of ours")
    for pattern, by_name in figures["median_signed_error"].items():
        lines.append(f"{pattern:37}" + "".join(f"{'':12}{_percent(by_name[name])}" for name in names))
    for text in figures["left_out"]:
        lines.append(f"left out: {text}")
    return "\n".join(lines)


def _micros(seconds: float | None) -> str:
    return f"{'failed':>12}" if seconds is None else f"{seconds * 1e6:>12,.1f}"


def _percent(error: float | None) -> str:
    return f"{'-':>10}" if error is None else f"{f'{100 * error:+.1f} %':>10}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m validation.packet_level", description="a network packet by packet")
    parser.add_argument("--ports", type=int, nargs="+", choices=PORTS, default=list(PORTS), help="network ports")
    parser.add_argument("--bytes", type=int, nargs="+", default=list(_SIZES), help="of a flow")
    parser.add_argument("--rate", type=float, default=400.0, metavar="GBIT", help="of a link [Gbit/s]")
    parser.add_argument("--hop", type=float, default=0.5, metavar="US", help="latency of a link [us]")
    parser.add_argument("--packets", type=int, default=600_000, help="traffics of more packets are left out")
    parser.add_argument("--seed", type=int, default=1, help="of htsim's choices")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def main(words: Sequence[str] | None = None) -> int:
    """Print the figures; 2 where a program is missing."""
    parser = _parser()
    options = parser.parse_args(words)
    if min(options.rate, options.hop, *options.bytes) <= 0:
        parser.error("--rate, --hop and --bytes must be above 0")
    if absence():
        print(absence(), file=sys.stderr)
        return 2
    shapes = [(pattern, ports) for pattern in PATTERNS for ports in options.ports]
    traffics = [Traffic(pattern, ports, size) for pattern, ports in shapes for size in options.bytes]
    few = [traffic for traffic in traffics if traffic.packets <= options.packets]
    figures = compare(few, Link(options.rate * 1e9 / 8, options.hop * 1e-6), options.seed)
    figures["left_out"] = [
        f"{traffic.pattern}, {traffic.ports} ports, {traffic.size_bytes / 1024:g} KiB: {traffic.packets:,} packets"
        for traffic in traffics
        if traffic not in few
    ]
    print(json.dumps(figures, indent=2) if options.json else _text(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
