"""Collectives alone: steps, bytes and time of ring, direct and tree algorithms, by CUs or DMA engines, in a node and
beyond, and in the switch.

A GPU of a group of n takes part in `steps` dependent steps and sends `traffic` bytes in all
(`simulators.costs.algorithms`):

    T = min(steps a + traffic / B,  steps a / 4 + 2 traffic / B)                (alpha-beta, two protocols)

with a the latency of a step and B the rate at which a GPU sends over the links that it uses. The second protocol sends
a flag with every word, so half of what it sends is payload, and need not wait for a fence: NCCL's tuning table
(`src/graph/tuning.cc`) gives it 1/4 to 1/6 of the latency; 1/4 is used.

Where a node's library has constants of a collective that were fitted to measurements, these count instead
(`simulators.costs.transfer`); where the machine's model of collectives is `links`, what the library's kernels move
over the links of the node (`simulators.costs.transfer`), as in schedules. All-gathers and reduce-scatters that were
not measured take no less than half of an all-reduce of as many bytes, each a half of it; all-reduces across nodes that
were not, no less than those of the shortest messages on other nodes that were (`_short_sum_s`). A switch that adds
(`in_switch`) takes 2 steps for an all-reduce, in which a GPU sends (1 + 1/n) S, and 1 otherwise, with S sent for a
reduce-scatter and S / n for an all-gather; the GPU adds nothing.

Software of collectives by name (`conf/collective`) is costed by the same function, with the paths that it takes
(`simulators.costs.collective_paths`); `collective_seconds` asks it of a machine.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dse.errors import ConfigError, Problem
from dse.values import Memo
from simulators.costs.algorithms import ALGORITHMS, REDUCES, Pattern, additions, traffic
from simulators.costs.collective_paths import software_seconds, software_traffic, takes_switch
from simulators.costs.collective_software import Call, Question, check_exists, is_software
from simulators.costs.transfer import (
    HALVES,
    TransferMode,
    alone,
    channel_cus,
    in_switch_seconds,
    library_cus,
    library_fill,
    link_utilisation,
    protocol_seconds,
)
from simulators.hardware.machine import System
from simulators.hardware.network import ExpertLibrary, InSwitch, Node, Protocols, ShortSums, SwitchRate
from simulators.hardware.network import Pattern as LinkPattern
from simulators.hardware.schedule_system import has_links, links_of
from simulators.hardware.shared import shared_constants

Floats = NDArray[np.float64]

_PARTS = Memo[System](64)  # of a node's GPUs, each with the links between them


@dataclass(frozen=True)
class Group:
    """GPUs of a collective and their links; numbers or arrays that broadcast.

    bytes_per_s: rate at which one GPU sends over all links that it uses, in one direction; message_bytes_per_s: to one
    other GPU alone, where that is less (None: it is not). latency_s: of one step. computes: whether the engine can add,
    as CUs can and DMA engines cannot. short_messages: whether it has a protocol for short messages. protocols, network:
    fitted constants of collectives inside a node and across nodes, which count instead of rates and latencies.
    num_nodes: that the GPUs stand in. in_switch: what their switch computes, in a node. links: the machine whose links
    carry it inside a node, by kernels on the library's CUs, where there are no protocols. network_bytes_per_s: of the
    network that one GPU has in an all-to-all across nodes. experts: library of expert parallelism. link_share: share of
    a GPU's links that lead to the others in its node. ctas: of the library's kernels; None: as many as it takes.
    errors: factors of drawn errors on the time of an exchange, from it, its group and its time. short_sums: what an
    all-reduce across nodes takes at least that was not measured. machine: that software of collectives is asked of.
    """

    num_gpus: ArrayLike
    bytes_per_s: ArrayLike
    latency_s: ArrayLike
    computes: bool = True
    short_messages: bool = True
    protocols: Mapping[str, Protocols] | None = None
    network: Mapping[str, Protocols] | None = None
    network_bytes_per_s: ArrayLike | None = None
    num_nodes: ArrayLike = 1
    in_switch: InSwitch | None = None
    links: System | None = None
    experts: ExpertLibrary | None = None
    link_share: ArrayLike = 1.0
    message_bytes_per_s: ArrayLike | None = None
    errors: Callable[..., Floats] | None = None
    short_sums: ShortSums | None = None
    ctas: ArrayLike | None = None
    machine: System | None = None

    def switched(self, pattern: Pattern) -> SwitchRate | None:
        """Constants of a collective that the switch computes; None if it does not."""
        rates = {} if self.in_switch is None else dict(self.in_switch.collectives)
        return {str(kind): rate for kind, rate in rates.items()}.get(pattern)

    def by_cus(self, cus: ArrayLike, bytes_per_s_per_cu: ArrayLike) -> Group:
        """Return the group with kernels on `cus` CUs as the engine (`simulators.costs.transfer.link_utilisation`).

        bytes_per_s_per_cu: rate of one CU alone.
        """
        links = np.asarray(self.bytes_per_s, float)
        return replace(
            self, bytes_per_s=links * link_utilisation(np.asarray(cus) * np.asarray(bytes_per_s_per_cu) / links)
        )


@dataclass(frozen=True)
class CollectiveCost:
    """Dependent steps, bytes that a GPU sends, additions [FLOP], HBM traffic [bytes] and time [s]; arrays."""

    steps: Floats
    wire_bytes: Floats
    flop: Floats
    hbm_bytes: Floats
    seconds: Floats

    def then(self, other: CollectiveCost) -> CollectiveCost:
        """Cost of this collective followed by another."""
        names = ("steps", "wire_bytes", "flop", "hbm_bytes", "seconds")
        return CollectiveCost(**{name: getattr(self, name) + getattr(other, name) for name in names})

    def where(self, mask: ArrayLike, other: CollectiveCost) -> CollectiveCost:
        """Cost of this collective where the mask is true, and of another elsewhere."""
        names = ("steps", "wire_bytes", "flop", "hbm_bytes", "seconds")
        return CollectiveCost(**{name: np.where(mask, getattr(self, name), getattr(other, name)) for name in names})


def collective_cost(
    pattern: Pattern,
    algorithm: str | Call,
    payload_bytes: ArrayLike,
    group: Group,
    *,
    element_bytes: int = 4,
) -> CollectiveCost:
    """Cost of one collective among equal GPUs.

    HBM traffic: bytes sent are read, bytes received are written, and a reduction reads its local operand, too.
    algorithm: of `simulators.costs.algorithms`; `in_switch`: inside a node; a group that leaves it takes a ring; or
    software of `conf/collective` by name, or a call of it.
    Raises ValueError for a reduction by engines that cannot add, for a switch that does not compute the collective, and
    for an unknown algorithm; ConfigError for software that does not run the collective.
    """
    if (call := call_of(algorithm)) is not None:
        return _by_software(call, pattern, payload_bytes, group, element_bytes=element_bytes)
    assert isinstance(algorithm, str)  # no call
    if algorithm == "in_switch":
        return _in_switch(pattern, payload_bytes, group, element_bytes=element_bytes)
    if pattern in REDUCES and not group.computes:
        raise ValueError(f"{pattern} needs CUs: DMA engines move data and cannot add")
    n, payload = np.asarray(group.num_gpus, float), np.asarray(payload_bytes, float)
    steps, sent = traffic(pattern, algorithm, n)
    wire = sent * payload
    added = additions(pattern, algorithm, n) * payload
    message = group.message_bytes_per_s if pattern == "send_recv" else None
    rate = np.asarray(group.bytes_per_s if message is None else message)
    wait, serial = steps * np.asarray(group.latency_s), wire / rate
    seconds = wait + serial
    if group.short_messages:
        # the library takes the faster protocol by size
        flags = shared_constants().collective
        seconds = np.minimum(seconds, flags.flag_latency * wait + flags.flag_bytes * serial)
    seconds = _library_s(pattern, payload, group, seconds)
    return _moved(steps, (wire, added, payload), seconds, element_bytes=element_bytes)


def _moved(
    steps: Floats, bytes_of: tuple[Floats, Floats, Floats], seconds: Floats, *, element_bytes: int
) -> CollectiveCost:
    """Cost of a collective. bytes_of: that a GPU sends, that it adds, and of the payload.

    Sent bytes are read, as many received ones written, and the local operand is read as far as it is added to.
    """
    wire, added, payload = bytes_of
    hbm_bytes = 2 * wire + np.minimum(added, payload)
    columns = np.broadcast_arrays(steps + 0 * wire, wire, added / element_bytes, hbm_bytes, seconds)
    return CollectiveCost(*(np.asarray(column, float) for column in columns))


def call_of(algorithm: str | Call) -> Call | None:
    """The call of software that a name stands for; None for an algorithm, and for a name of neither."""
    if isinstance(algorithm, Call):
        return algorithm
    is_algorithm = algorithm in ALGORITHMS or algorithm == "in_switch"
    return Call(algorithm) if not is_algorithm and is_software(algorithm) else None


def library_cost(pattern: Pattern, payload_bytes: ArrayLike, group: Group, *, element_bytes: int = 4) -> CollectiveCost:
    """Cost of a collective by the library of a node: the fastest of its algorithms; an all-to-all goes directly."""
    if pattern == "all_to_all":
        return collective_cost(pattern, "direct", payload_bytes, group, element_bytes=element_bytes)
    chosen = [name for name, algorithm in ALGORITHMS.items() if algorithm.by_library]
    costs = [collective_cost(pattern, name, payload_bytes, group, element_bytes=element_bytes) for name in chosen]
    seconds = functools.reduce(np.minimum, [cost.seconds for cost in costs])
    return replace(costs[0], seconds=seconds)  # libraries take the fastest one


def _by_software(
    call: Call, pattern: Pattern, payload_bytes: ArrayLike, group: Group, *, element_bytes: int
) -> CollectiveCost:
    """Cost of a collective by software (`simulators.costs.collective_paths`). Raises ConfigError."""
    if group.machine is None:
        raise ValueError(f"{call.name} needs a machine: build the group with machine_ring")
    question = Question.of(pattern, payload_bytes, group.num_gpus, group.num_nodes)
    check_exists(call, group.machine, question)
    if "library" in call.software.paths:
        return library_cost(pattern, payload_bytes, group, element_bytes=element_bytes)
    seconds, payload = software_seconds(call, group.machine, question), question.payload
    steps, sent, added = software_traffic(call, group.machine, question)
    cost = _moved(steps, (sent * payload, added * payload, payload), seconds, element_bytes=element_bytes)
    if np.any(switched := takes_switch(call, group.machine, question)):
        there = replace(group, in_switch=group.machine.node.switch())
        cost = cost.where(~switched, _in_switch(pattern, payload, there, element_bytes=element_bytes))
    return replace(cost, seconds=seconds)


def collective_seconds(
    machine: System, pattern: Pattern, payload_bytes: ArrayLike, num_gpus: ArrayLike, implementation: str | Call
) -> Floats:
    """Time [s] of a collective among GPUs of a machine, by software of `conf/collective` or an algorithm.

    Raises ConfigError for a single GPU without a node, and where the software does not run the collective there, with
    the software that does; ValueError as `collective_cost`.
    """
    if machine.node is None:
        raise ConfigError([Problem("system.node", "is missing: one GPU has no collectives", way_out="add a node")])
    group = machine_ring(machine, num_gpus)
    return collective_cost(pattern, implementation, payload_bytes, group, element_bytes=2).seconds


def _over_links(
    machine: System, pattern: LinkPattern, payload: Floats, num_gpus: ArrayLike, ctas: ArrayLike | None
) -> Floats:
    """Time [s] of a collective by kernels over the links of a node (`simulators.costs.transfer.alone`).

    ctas: of the kernels; None: as many as the library takes, which more do not exceed.
    """
    counts, size = np.broadcast_arrays(np.asarray(num_gpus, float), payload)
    seconds = np.zeros(size.shape)  # a single GPU sends nothing
    for count in np.unique(counts[counts > 1]):  # few group sizes in a batch: each has links of its own
        system = _PARTS.get(partial(links_of, machine, int(count)), machine, key=int(count))
        most = library_cus(system, pattern)
        cus = most if ctas is None else np.minimum(channel_cus(system, ctas, pattern), most)
        by = TransferMode("cu", cus, pattern)
        seconds = np.where(counts == count, alone(system, size, by=by), seconds)
    return seconds


def _library_s(pattern: Pattern, payload: Floats, group: Group, seconds: Floats) -> Floats:
    """Time [s] over links, or by fitted constants where a library has them; `seconds` elsewhere."""
    if pattern == "broadcast":  # no constants are fitted for it
        return seconds
    inside, across = ((constants or {}).get(pattern) for constants in (group.protocols, group.network))
    leaves, here = np.asarray(group.num_nodes) > 1, None
    if inside is not None:
        # GPUs of a mesh send over the links to one another alone
        here = protocol_seconds(inside.faster(np.asarray(group.link_share)), pattern, group.num_gpus, payload)
        here = _by_fewer_ctas(here, inside, pattern, group)
    elif group.links is not None and pattern != "send_recv":
        together = np.ceil(np.asarray(group.num_gpus, float) / np.asarray(group.num_nodes))  # of them in a node
        here = _over_links(group.links, pattern, payload, together, group.ctas)
    if here is not None:  # what leaves a node is no faster than inside it
        seconds = np.where(leaves, np.maximum(seconds, here), here)
    # each GPU sends to all other nodes by its own NIC
    if pattern == "all_to_all" and group.network_bytes_per_s is not None:
        nodes = np.asarray(group.num_nodes, float)
        sent = (nodes - 1) / nodes * payload / np.asarray(group.network_bytes_per_s)
        seconds = np.where(leaves, np.maximum(seconds, sent), seconds)
    if across is None and pattern == "all_reduce" and group.short_sums is not None:
        seconds = np.where(leaves, np.maximum(seconds, _short_sum_s(group.short_sums, group)), seconds)
    if across is None and pattern in HALVES and np.any(leaves):
        # until it is measured, no less than half of an all-reduce, of twice as many steps and bytes
        sum_s = _library_s("all_reduce", payload, group, 2 * seconds)
        seconds = np.where(leaves, np.maximum(seconds, sum_s / 2), seconds)
    if across is not None:
        there = protocol_seconds(across, pattern, group.num_gpus, payload, num_nodes=group.num_nodes)
        if group.network_bytes_per_s is not None:
            there = _by_fewer_ctas(there, across, pattern, group, port_bytes_per_s=group.network_bytes_per_s)
        seconds = np.where(leaves, there, seconds)
    return seconds


def _by_fewer_ctas(
    seconds: Floats,
    constants: Protocols,
    pattern: Pattern,
    group: Group,
    *,
    port_bytes_per_s: ArrayLike | None = None,
) -> Floats:
    """Time [s] of a library's collective on the group's CTAs and at the clock of its GPU; all but its launch is longer.

    port_bytes_per_s: rate of a GPU's port to the network, where it leaves the node.
    """
    machine = group.links
    if machine is None or pattern == "send_recv" or pattern == "broadcast":
        return seconds
    if group.ctas is None and machine.gpu.clock is None:
        return seconds
    fill = _library_fill(machine, pattern, group.ctas, port_bytes_per_s)
    moving = np.maximum(seconds - constants.launch_s, 0.0)  # a single GPU has none
    return np.asarray(np.where(seconds > 0, constants.launch_s + moving / fill, seconds))


def _library_fill(
    machine: System, pattern: LinkPattern, ctas: ArrayLike | None, port_bytes_per_s: ArrayLike | None
) -> Floats:
    """Share of what a library fills of the links (`library_fill`), of nodes whose numbers of GPUs may differ."""
    counts = np.asarray(machine.node.num_gpus)
    fills: Any = np.ones(counts.shape)
    for count in np.unique(counts):
        system = machine if counts.ndim == 0 else links_of(machine, int(count))
        cus = None if ctas is None else channel_cus(system, ctas, pattern)
        fill = library_fill(system, pattern, cus=cus, port_bytes_per_s=port_bytes_per_s)
        fills = np.where(counts == count, fill, fills)
    return np.asarray(fills, float)


def _short_sum_s(of: ShortSums, group: Group) -> Floats:
    """Time [s] of an all-reduce of the shortest message across nodes: launch + 2 (lg N + n / N - 1) step.

    The library sums along a chain in each node and a tree of the N nodes, and sends the sum back (NCCL's trees,
    `src/graph/trees.cc`); no switch adds between nodes.
    """
    nodes = np.maximum(np.asarray(group.num_nodes, float), 1.0)
    steps = 2 * (np.ceil(np.log2(nodes)) + np.asarray(group.num_gpus, float) / nodes - 1)
    return np.asarray(np.asarray(of.launch_s) + steps * np.asarray(of.step_s), float)


def _in_switch(pattern: Pattern, payload_bytes: ArrayLike, group: Group, *, element_bytes: int) -> CollectiveCost:
    """Cost of a collective that the switch computes; of a ring where the group leaves its node."""
    rate = group.switched(pattern)
    if rate is None:
        raise ValueError(f"{pattern} is not computed by the switch: node.in_switch.collectives has no {pattern}")
    n, payload = np.asarray(group.num_gpus, float), np.asarray(payload_bytes, float)
    several = np.asarray(n > 1, float)  # one GPU: no collective
    reads = several * (1 / n if pattern == "all_gather" else 1.0)  # of a tensor, from this GPU's memory
    writes = several * (1 / n if pattern == "reduce_scatter" else 1.0)
    sent = several * (1 + 1 / n) if pattern == "all_reduce" else reads
    seconds = in_switch_seconds(rate, pattern, n, payload, num_ctas=np.inf if group.ctas is None else group.ctas)
    steps = several * (2.0 if pattern == "all_reduce" else 1.0)
    inside = (steps, sent * payload, 0 * payload, (reads + writes) * payload, seconds)
    ring = collective_cost(pattern, "ring", payload_bytes, group, element_bytes=element_bytes)
    # fields of `CollectiveCost`, to choose design by design
    columns = ("steps", "wire_bytes", "flop", "hbm_bytes", "seconds")
    leaves = np.asarray(group.num_nodes) > 1
    return CollectiveCost(
        *(np.where(leaves, getattr(ring, name), value) for name, value in zip(columns, inside, strict=True))
    )


def flat_ring(inside: Group, between: Group, gpus_per_node: ArrayLike) -> Group:
    """One ring through all GPUs of `between.num_gpus` nodes, with the rate and latency of its slowest link.

    Rate and latency are those of `inside` for one node.
    """
    nodes = np.asarray(between.num_gpus)
    several = nodes > 1
    rate = np.where(several, np.minimum(inside.bytes_per_s, between.bytes_per_s), inside.bytes_per_s)
    late = np.where(several, np.maximum(inside.latency_s, between.latency_s), inside.latency_s)
    # one part of the ring without it slows all of it
    able = {name: getattr(inside, name) and getattr(between, name) for name in ("computes", "short_messages")}
    return Group(nodes * np.asarray(gpus_per_node), rate, late, **able)


def node_ring(node: Node, gpus: ArrayLike, together: ArrayLike | None = None) -> Group:
    """Ring of `gpus` GPUs, `together` of them in each node (None: all GPUs of a node).

    The rate is NaN for a ring that leaves the node if the network's rate is not given. Raises ValueError if nothing is
    known of the node's library.
    """
    library = node.library
    if library is None:
        raise ValueError("node.library is missing: rates of collectives")
    per_node = np.asarray(node.num_gpus if together is None else together)
    nodes = np.ceil(np.asarray(gpus, float) / per_node)  # the last node may be partly filled
    sharers = np.maximum(np.minimum(gpus, per_node) - 2.0, 0.0)  # GPUs beyond two that share the node's links
    inside = Group(gpus, node.speed * library.bytes_per_s / (1 + library.sharing * sharers), library.latency_s)
    # unknown, not unlimited: a ring that leaves the node then has no time
    network = np.nan if library.network_bytes_per_s is None else library.network_bytes_per_s
    nics = np.minimum(gpus, per_node) if library.network_nics == "one_a_gpu" else 1.0  # else one NIC serves the node
    late = library.latency_s if library.network_latency_s is None else library.network_latency_s
    ring = flat_ring(inside, Group(nodes, nics * network, late), np.asarray(gpus) / nodes)
    # with one NIC a node, its GPUs share it
    nic = network * nics / np.maximum(np.minimum(gpus, per_node), 1.0)
    # fitted constants count instead of the ring where the library has them
    measured = replace(ring, protocols=node.protocols() or None, network=node.network() or None)
    share = node.link_share(np.minimum(gpus, per_node))
    # a message takes one link where pairs have their own, and one NIC
    pairs = node.link_bytes_per_s if node.topology in ("mesh", "ring") else None
    one = np.minimum(inside.bytes_per_s, np.inf if pairs is None else pairs)
    message = np.where(nodes > 1, np.minimum(one, network), one)
    measured = replace(measured, network_bytes_per_s=nic, short_sums=library.network_sums)
    return replace(measured, num_nodes=nodes, link_share=share, message_bytes_per_s=message)


def machine_ring(machine: System, gpus: ArrayLike, together: ArrayLike | None = None) -> Group:
    """Ring of GPUs of a machine (`node_ring`), as its model of collectives has it."""
    ring = node_ring(machine.node, gpus, together)
    # schedules and iterations alike: what the library was measured to reach, else what links carry
    protocols = ring.protocols if machine.costs.collective == "library" else None
    return replace(ring, protocols=protocols, links=machine if has_links(machine) else None, machine=machine)
