"""Times of collectives by software (`simulators.costs.collective_software`), by the path that their bytes take.

A call takes a fixed time, and the time in which its bytes move:

    T = latency + wire s S / B

with S the payload, s the bytes that a GPU sends or reads for each byte of it (`simulators.costs.algorithms`), wire the
share of an element that is sent (less than 1 where it is quantised), and B by the path that the bytes take:

    peers    CTAs load from peers or store at them: c CTAs that move r bytes/s each reach min(L, c r) of the links to
             the others, which carry L in all; u L where r is that of the GPU's copy kernels (`kernel_share`)
    switch   the switch adds or copies what a few CTAs order (`simulators.costs.transfer.in_switch_seconds`)
    engines  copy engines: min(L, e r) for e engines of r bytes/s, and the set-up of each round of copies
    calls    a library as another runtime calls it, by the constants of that runtime (`call_seconds`); B follows the
             links that they were measured with, and L bounds it
    library  the node's library as it was measured (`simulators.costs.collective.library_cost`)

L: at a switch all links of a GPU lead to any peer, on a mesh one leads to each. Software with several paths takes the
last one that the machine has and whose `from_gpus` the group reaches. A protocol for short messages (`short`) sends a
flag with each word: a share of the latency, and more bytes, by CTAs that store at peers. CTAs move less at a lower
clock. A new path is a function here and its entry in `PATHS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dse.errors import ConfigError, Problem
from simulators.costs.algorithms import Pattern, additions, traffic
from simulators.costs.collective_software import ANY, Call, CallLaw, Path, PathName, Question, reached_paths
from simulators.costs.transfer import (
    TransferMode,
    in_switch_seconds,
    is_measured,
    kernel_share,
    library_cus,
    library_fill,
    switched,
)
from simulators.hardware.machine import System
from simulators.hardware.network import links
from simulators.hardware.schedule_system import has_links, links_of

Floats = NDArray[np.float64]


def path_of(call: Call, machine: System, pattern: Pattern, num_gpus: float) -> tuple[PathName, Path]:
    """The path that software takes among so many GPUs. Raises ConfigError where the machine has none."""
    reached = reached_paths(call.software, machine, pattern, num_gpus)
    if not reached:
        raise ConfigError([Problem("implementation", f"has no path for {pattern} on {machine.name}", call.name)])
    return reached[-1]


def software_seconds(call: Call, machine: System, question: Question) -> Floats:
    """Time [s] of a collective by software with a path of its own (not `library`); 0 for one GPU. Arrays broadcast."""
    size, counts = np.broadcast_arrays(question.payload, question.num_gpus)
    seconds = np.zeros(size.shape)
    for count in np.unique(counts[counts > 1]):
        name, path = path_of(call, machine, question.pattern, float(count))
        among = replace(question, payload=size, num_gpus=np.asarray(count))
        seconds = np.where(counts == count, PATHS[name](call, path, machine, among), seconds)
    return np.asarray(seconds, float)


def takes_switch(call: Call, machine: System, question: Question) -> NDArray[np.bool_]:
    """Tell of which numbers of GPUs the switch adds or copies."""
    counts = np.asarray(question.num_gpus)
    taken = np.zeros(counts.shape, bool)
    for count in np.unique(counts[counts > 1]):
        name, _ = path_of(call, machine, question.pattern, float(count))
        taken |= (counts == count) & (name == "switch")
    return taken


def software_traffic(call: Call, machine: System, question: Question) -> tuple[Floats, Floats, Floats]:
    """Steps, and bytes that a GPU sends and that it adds for each byte of the payload, by number of GPUs.

    Of the algorithm of the path that so many take, as if no switch added.
    """
    counts, wire = np.asarray(question.num_gpus), 1.0 if call.format is None else call.format.wire
    steps, sent, added = np.zeros(counts.shape), np.zeros(counts.shape), np.zeros(counts.shape)
    for count in np.unique(counts[counts > 1]):
        algorithm = _algorithm(*path_of(call, machine, question.pattern, float(count)), question.pattern)
        here, (of_steps, of_sent) = counts == count, traffic(question.pattern, algorithm, count)
        steps, sent = np.where(here, of_steps, steps), np.where(here, wire * of_sent, sent)
        added = np.where(here, additions(question.pattern, algorithm, count), added)
    return steps, sent, added


def _algorithm(name: PathName, path: Path, pattern: Pattern) -> str:
    """Algorithm of a pattern on a path; an all-to-all of a library goes directly."""
    return "direct" if name == "calls" and pattern == "all_to_all" else path.algorithm


def _latency_s(call: Call, machine: System, pattern: Pattern) -> float:
    """Fixed time [s] of a call on a GPU."""
    by_gpu = (call.software.latency_s or {}) if call.format is None else call.format.latency_s
    return by_gpu.get(str(machine.gpu.name), by_gpu[ANY]) * call.software.longer.get(pattern, 1.0)


def ctas_of(call: Call, path: Path, machine: System, question: Question) -> int:
    """CTAs of a GPU that a call holds among one number of GPUs."""
    if call.num_ctas is not None:
        return call.num_ctas
    if path.ctas is None:
        # a message between two has as many channels as a ring
        pattern: Any = "all_gather" if question.pattern in ("send_recv", "broadcast") else question.pattern
        return int(np.max(library_cus(machine, pattern)))
    ctas = path.ctas.get(str(machine.gpu.name), path.ctas[ANY])
    return int(np.ceil(ctas / question.num_gpus)) if path.spread else ctas


def links_to_others(machine: System, num_gpus: float) -> Any:
    """Rate [bytes/s] of the links of a GPU that lead to the others of a group of its node."""
    node = machine.node
    if node.topology == "mesh":
        return (num_gpus - 1) * np.asarray(node.link_bytes_per_s)
    return sum(np.asarray(rate) for rate in links(node).values())


def _clock(machine: System) -> Any:
    """Clock of the GPU over that of its data sheet."""
    return 1.0 if machine.gpu.clock is None else machine.gpu.clock


def _at_rate(call: Call, path: Path, machine: System, question: Question, wire_s: Floats) -> Floats:
    """Time [s] of a call whose bytes take so long, or by the protocol for short messages where that is faster."""
    latency_s, short = _latency_s(call, machine, question.pattern), call.software.short
    if short is None:
        return np.asarray(latency_s + wire_s)
    rate = _peers_rate(call, call.software.paths.get("peers", path), machine, question)
    _, sent = traffic(question.pattern, short.algorithm, question.num_gpus)
    by_short = short.latency * latency_s + short.bytes * sent * question.payload / rate
    return np.asarray(np.minimum(latency_s + wire_s, by_short))


def _peers_rate(call: Call, path: Path, machine: System, question: Question) -> Any:
    """Rate [bytes/s] at which the CTAs of a GPU load from peers, or store at them, at its clock."""
    ctas = ctas_of(call, path, machine, question)
    links_have = links_to_others(machine, float(question.num_gpus))
    carried = links_have * machine.gpu.cu_copy.link_efficiency
    if path.bytes_per_s_per_cta is not None:
        return np.minimum(carried, ctas * _clock(machine) * path.bytes_per_s_per_cta)
    # the factor of all-to-alls does not apply
    return carried * kernel_share(machine, TransferMode("cu", ctas, "all_gather"), links_have)


def _by_peers(call: Call, path: Path, machine: System, question: Question) -> Floats:
    """CTAs load from peers, or store at them."""
    wire = 1.0 if call.format is None else call.format.wire
    _, sent = traffic(question.pattern, path.algorithm, question.num_gpus)
    wire_s = wire * sent * question.payload / _peers_rate(call, path, machine, question)
    return _at_rate(call, path, machine, question, wire_s)


def _by_switch(call: Call, path: Path, machine: System, question: Question) -> Floats:
    """The switch adds and copies, in the latency of its kernels on the node or in the software's own."""
    pattern: Any = question.pattern
    constants = switched(machine.node, pattern)
    ctas = np.inf if call.num_ctas is None else call.num_ctas * _clock(machine)
    seconds = in_switch_seconds(constants, pattern, question.num_gpus, question.payload, num_ctas=ctas)
    if call.software.latency_s is None:
        return seconds
    return _at_rate(call, path, machine, question, seconds - constants.latency_s)


def _engines_of(machine: System, num_gpus: float) -> Any:
    """Copy engines that a GPU of a group has at work.

    Engines of a mesh serve one link each. At a switch a copy to few peers is split over all of them: `dma.bytes_per_s`
    of H100 is what a copy between two GPUs reaches, over its engines.
    """
    engines = np.asarray(machine.gpu.dma.num_engines)
    return np.minimum(engines, num_gpus - 1) if machine.node.topology == "mesh" else engines


def _by_engines(call: Call, path: Path, machine: System, question: Question) -> Floats:
    """Copy engines move the shares of all peers at once, as many as there are engines."""
    dma, peers = machine.gpu.dma, float(question.num_gpus) - 1
    rounds = np.ceil(peers / np.asarray(dma.num_engines))
    engines = _engines_of(machine, peers + 1)
    rate = np.minimum(links_to_others(machine, peers + 1), engines * dma.bytes_per_s)
    _, sent = traffic(question.pattern, path.algorithm, question.num_gpus)
    begin = _latency_s(call, machine, question.pattern)
    return np.asarray(begin + rounds * np.asarray(dma.setup_s) + sent * question.payload / rate)


def _by_calls(call: Call, path: Path, machine: System, question: Question) -> Floats:
    """A library as another runtime calls it, with the links of the node and the clock of the GPU."""
    law, clock, n = (call.software.calls or {})[str(machine.gpu.name)], _clock(machine), float(question.num_gpus)
    pattern: Any = question.pattern
    messages = law.messages.model_copy(update={"bytes_per_s_per_channel": clock * law.messages.bytes_per_s_per_channel})
    faster = law.model_copy(update={"bytes_per_s": machine.node.speed * law.bytes_per_s, "messages": messages})
    seconds = call_seconds(faster, question, both_ways=call.both_ways)
    if machine.gpu.clock is not None and has_links(machine) and pattern != "send_recv":
        fill = library_fill(links_of(machine, int(n)), pattern)
        seconds = law.launch_s + (seconds - law.launch_s) / fill
    if machine.node.link_bytes_per_s is None:
        return seconds
    _, sent = traffic(question.pattern, _algorithm("calls", path, question.pattern), question.num_gpus)
    return np.asarray(np.maximum(seconds, law.launch_s + sent * question.payload / links_to_others(machine, n)))


def call_seconds(law: CallLaw, question: Question, *, both_ways: bool = False) -> Floats:
    """Time [s] of a collective by a library that another runtime calls, among n GPUs of a node:

        T = launch + s step + fill min(1, w / fill_bytes) + p (n - 1) / (n - lost) S / B (1 + sums a / (n - 1))

    with p passes (2 of an all-reduce), s = p (n - 1) steps, w = p (n - 1) / n S sent, and a the share of passes that
    add. A ring of n GPUs reaches B (1 - lost / n): each of its messages waits once for the ring (derived). One of the n
    - 1 blocks that a GPU receives is added to its own, which no other copy hides (derived). A message between two:

        T = launch + max(S / B, S / (c r))      c = S / channel_bytes, within channels and most_channels
    """
    n, size = question.num_gpus, question.payload
    if question.pattern == "send_recv":
        message = law.messages
        channels = np.clip(size / message.channel_bytes, message.channels, message.most_channels)
        slower = message.both_ways if both_ways else 1.0
        moved = np.maximum(size / law.bytes_per_s, slower * size / (channels * message.bytes_per_s_per_channel))
        return np.asarray(law.launch_s + moved)
    passes = 2.0 if question.pattern == "all_reduce" else 1.0
    adds = {"all_reduce": 0.5, "reduce_scatter": 1.0}.get(question.pattern, 0.0)
    sent = passes * (n - 1) / n * size
    moved = passes * (n - 1) / (n - law.lost) * size / law.bytes_per_s * (1 + law.sums * adds / (n - 1))
    filled = law.fill_s * np.minimum(1.0, sent / law.fill_bytes)
    return np.asarray(law.launch_s + passes * (n - 1) * law.step_s + filled + moved)


def _by_library(call: Call, path: Path, machine: System, question: Question) -> Floats:
    raise ValueError(f"{call.name} is costed by simulators.costs.collective.collective_cost")


PATHS: Mapping[PathName, Callable[[Call, Path, System, Question], Floats]] = {
    "library": _by_library,
    "switch": _by_switch,
    "peers": _by_peers,
    "engines": _by_engines,
    "calls": _by_calls,
}


def held_ctas(call: Call, machine: System, num_gpus: int, pattern: Pattern) -> int | None:
    """CTAs of a GPU that a call holds among so many GPUs: 0 by copy engines, None where they are not known."""
    if call.software.engines:
        return 0
    _, path = path_of(call, machine, pattern, num_gpus)
    if path.ctas is None and call.num_ctas is None and machine.gpu.cu_copy is None:
        return None
    return ctas_of(call, path, machine, Question.of(pattern, 0, num_gpus))


def describe_held(call: Call, machine: System, num_gpus: int, pattern: Pattern) -> str:
    """Say what a call holds of a GPU while it runs: CTAs, copy engines and buffers."""
    software, count = call.software, held_ctas(call, machine, num_gpus, pattern)
    name, _ = path_of(call, machine, pattern, num_gpus)
    if software.engines:
        engines = int(np.max(_engines_of(machine, num_gpus)))
        return f"no CTA, {engines} copy engine{'s' if engines > 1 else ''}; {software.buffers}"
    ctas = "CTAs (not known)" if count is None else f"{count} CTA{'s' if count > 1 else ''}"
    links_pattern: Any = pattern
    unsure = "; not measured on this node" if name == "library" and not is_measured(machine, links_pattern) else ""
    return f"{ctas}; {software.buffers}{unsure}"
