"""Times of collectives by software (`simulators.costs.collective_software`), by the path that their bytes take.

A call takes a fixed time, and the time in which its bytes move:

    T = latency + wire s S / B

with S the payload, s the bytes that a GPU sends or reads for each byte of it (`simulators.costs.algorithms`), wire the
share of an element that is sent (less than 1 where it is quantised), and B by the path that the bytes take:

    peers    CTAs load from peers or store at them: c CTAs that move r bytes/s each reach min(L, c r) of the links to
             the others, which carry L in all; u L where r is that of the GPU's copy kernels (`kernel_share`)
    switch   the switch adds or copies what a few CTAs order (`simulators.costs.transfer.in_switch_seconds`)
    engines  copy engines: min(L, e r) for e engines of r bytes/s, and the set-up of each round of copies
    calls    a library as another runtime calls it, by the constants of that runtime (`call_seconds`)
    library  the node's library as it was measured (`simulators.costs.collective.library_cost`)

L: at a switch all links of a GPU lead to any peer, on a mesh one leads to each. Software with several paths takes the
last one that the machine has and whose `from_gpus` the group reaches. A protocol for short messages (`short`) sends a
flag with each word: a share of the latency, and more bytes. A new path is a function here and its entry
in `PATHS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dse.errors import ConfigError, Problem
from simulators.costs.algorithms import Pattern, traffic
from simulators.costs.collective_software import ANY, Call, CallLaw, Path, PathName, Question, reached_paths
from simulators.costs.transfer import TransferMode, in_switch_seconds, kernel_share, library_cus, switched
from simulators.hardware.machine import System
from simulators.hardware.network import links

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


def software_traffic(call: Call, question: Question) -> tuple[Floats, Floats]:
    """Steps, and bytes that a GPU sends for each byte of the payload, by a path other than the switch."""
    software, wire = call.software, 1.0 if call.format is None else call.format.wire
    algorithm = next(iter(software.paths.values())).algorithm
    steps, sent = traffic(question.pattern, algorithm, question.num_gpus)
    return steps, wire * sent


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


def _at_rate(call: Call, machine: System, question: Question, wire_s: Floats) -> Floats:
    """Time [s] of a call whose bytes take so long, or by the protocol for short messages where that is faster."""
    latency_s, short = _latency_s(call, machine, question.pattern), call.software.short
    if short is None:
        return np.asarray(latency_s + wire_s)
    carried = links_to_others(machine, float(question.num_gpus)) * machine.gpu.cu_copy.link_efficiency
    _, sent = traffic(question.pattern, short.algorithm, question.num_gpus)
    by_short = short.latency * latency_s + short.bytes * sent * question.payload / carried
    return np.asarray(np.minimum(latency_s + wire_s, by_short))


def _by_peers(call: Call, path: Path, machine: System, question: Question) -> Floats:
    """CTAs load from peers, or store at them."""
    ctas = ctas_of(call, path, machine, question)
    links_have = links_to_others(machine, float(question.num_gpus))
    carried = links_have * machine.gpu.cu_copy.link_efficiency
    if path.bytes_per_s_per_cta is not None:
        rate = np.minimum(carried, ctas * path.bytes_per_s_per_cta)
    else:  # CTAs of no all-to-all of the library
        rate = carried * kernel_share(machine, TransferMode("cu", ctas, "all_gather"), links_have)
    wire = 1.0 if call.format is None else call.format.wire
    _, sent = traffic(question.pattern, path.algorithm, question.num_gpus)
    return _at_rate(call, machine, question, wire * sent * question.payload / rate)


def _by_switch(call: Call, path: Path, machine: System, question: Question) -> Floats:
    """The switch adds and copies, in the latency of its kernels on the node or in the software's own."""
    pattern: Any = question.pattern
    constants = switched(machine.node, pattern)
    ctas = np.inf if call.num_ctas is None else call.num_ctas
    seconds = in_switch_seconds(constants, pattern, question.num_gpus, question.payload, num_ctas=ctas)
    if call.software.latency_s is None:
        return seconds
    return _at_rate(call, machine, question, seconds - constants.latency_s)


def _by_engines(call: Call, path: Path, machine: System, question: Question) -> Floats:
    """Copy engines move the shares of all peers at once, as many as there are engines."""
    dma, peers = machine.gpu.dma, float(question.num_gpus) - 1
    rounds = np.ceil(peers / np.asarray(dma.num_engines))
    rate = np.minimum(links_to_others(machine, peers + 1), np.asarray(dma.num_engines) * dma.bytes_per_s)
    _, sent = traffic(question.pattern, path.algorithm, question.num_gpus)
    begin = _latency_s(call, machine, question.pattern)
    return np.asarray(begin + rounds * np.asarray(dma.setup_s) + sent * question.payload / rate)


def _by_calls(call: Call, path: Path, machine: System, question: Question) -> Floats:
    law = (call.software.calls or {})[str(machine.gpu.name)]
    return call_seconds(law, question, both_ways=call.both_ways)


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


def describe_held(call: Call, machine: System, num_gpus: int, pattern: Pattern) -> str:
    """Say what a call holds of a GPU while it runs: CTAs, copy engines and buffers."""
    software, question = call.software, Question.of(pattern, 0, num_gpus)
    _, path = path_of(call, machine, pattern, num_gpus)
    if software.engines:
        engines = int(np.min([np.max(np.asarray(machine.gpu.dma.num_engines)), num_gpus - 1]))
        return f"no CTA, {engines} copy engines; {software.buffers}"
    has_ctas = path.ctas is not None or call.num_ctas is not None or machine.gpu.cu_copy is not None
    count = ctas_of(call, path, machine, question) if has_ctas else 0
    ctas = f"{count} CTA{'s' if count > 1 else ''}" if has_ctas else "CTAs (not known)"
    return f"{ctas}; {software.buffers}"
