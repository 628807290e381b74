"""Collectives alone: steps, bytes and time of ring, direct and tree algorithms, by CUs or DMA engines, in a node and
beyond.

A GPU of a group of n takes part in `steps` dependent steps and sends `traffic` bytes in all (S: payload):

    pattern          payload S                       ring                  direct                tree
    all_reduce       the tensor every GPU holds      2(n-1), 2(n-1)/n S    2, 2(n-1)/n S         2 lg n, 2(n-1)/n S
    all_gather       the tensor every GPU ends with  n-1, (n-1)/n S        1, (n-1)/n S          lg n, (n-1)/n S
    reduce_scatter   the tensor every GPU starts with           as all_gather
    all_to_all       what a GPU sends to all, itself included   n-1, (n-1)/2 S    1, (n-1)/n S   lg n, lg n / 2 S
    broadcast        the tensor of the root          n-1, S                2, 2(n-1)/n S         lg n, S

    T = min(steps a + traffic / B,  steps a / 4 + 2 traffic / B)                (alpha-beta, two protocols)

with a the latency of a step, B the rate at which a GPU sends over the links that it uses, lg n = ceil(log2 n).
Standard; a lower bound for pipelined rings and trees, whose first chunk has to arrive (Thakur, Rabenseifner, Gropp,
IJHPCA 2005; tree: two complementary pipelined trees, Sanders, Speck, Traeff 2009; all-to-all on a tree: Bruck). The
second protocol sends a flag with every word, so half of what it sends is payload, and need not wait for a fence: NCCL's
tuning table (`src/graph/tuning.cc`) gives it 1/4 to 1/6 of the latency; 1/4 is used.

Where a node's library has constants of a collective that were fitted to measurements, these count instead
(`simulators.costs.protocols`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from simulators.costs.protocols import protocol_seconds
from simulators.costs.transfer import link_utilisation
from simulators.hardware.device import LibraryNode
from simulators.hardware.network import Protocols
from simulators.hardware.parts import CopyTimes

Floats = NDArray[np.float64]
Pattern = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"]
Algorithm = Literal["ring", "direct", "tree"]

_LOW_LATENCY = (0.25, 2.0)  # of the latency of a step, and of the bytes: the protocol with a flag in every word
_REDUCES = ("all_reduce", "reduce_scatter")


@dataclass(frozen=True)
class Group:
    """GPUs of a collective and their links; numbers or arrays that broadcast.

    bytes_per_s: rate at which one GPU sends over all links that it uses, in one direction. latency_s: of one step.
    computes: whether the engine can add, as CUs can and DMA engines cannot. short_messages: whether it has a protocol
    for short messages. protocols: fitted constants of collectives inside a node, which count where `inside` is true.
    """

    num_gpus: ArrayLike
    bytes_per_s: ArrayLike
    latency_s: ArrayLike
    computes: bool = True
    short_messages: bool = True
    protocols: Mapping[str, Protocols] | None = None
    inside: ArrayLike = True

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


def collective_cost(
    pattern: Pattern,
    algorithm: Algorithm,
    payload_bytes: ArrayLike,
    group: Group,
    *,
    element_bytes: int = 4,
) -> CollectiveCost:
    """Cost of one collective among equal GPUs.

    HBM traffic: bytes sent are read, bytes received are written, and a reduction reads its local operand, too.
    Raises ValueError for a reduction by engines that cannot add.
    """
    if pattern in _REDUCES and not group.computes:
        raise ValueError(f"{pattern} needs CUs: DMA engines move data and cannot add")
    n, payload = np.asarray(group.num_gpus, float), np.asarray(payload_bytes, float)
    steps, sent = _traffic(pattern, algorithm, n)
    wire = sent * payload
    added = (n - 1) / n * payload if pattern in _REDUCES else 0 * wire
    wait, serial = steps * np.asarray(group.latency_s), wire / np.asarray(group.bytes_per_s)
    seconds = wait + serial
    if group.short_messages:
        seconds = np.minimum(seconds, _LOW_LATENCY[0] * wait + _LOW_LATENCY[1] * serial)
    constants = (group.protocols or {}).get(pattern)
    if constants is not None and pattern != "broadcast":
        measured = protocol_seconds(constants, pattern, n, payload)  # what leaves a node is no faster than inside it
        seconds = np.where(group.inside, measured, np.maximum(seconds, measured))
    columns = np.broadcast_arrays(steps + 0 * wire, wire, added / element_bytes, 2 * wire + added, seconds)
    return CollectiveCost(*(np.asarray(column, float) for column in columns))


def _traffic(pattern: Pattern, algorithm: Algorithm, n: Floats) -> tuple[Floats, Floats]:
    """Look up (steps, bytes sent per payload byte) in the table above."""
    once, rounds, several = (n - 1) / n, np.ceil(np.log2(n)), np.asarray(n > 1, float)
    if pattern == "all_reduce":
        return {"ring": 2 * (n - 1), "direct": 2 * several, "tree": 2 * rounds}[algorithm], 2 * once
    if pattern == "broadcast":
        steps = {"ring": n - 1, "direct": 2 * several, "tree": rounds}[algorithm]
        return steps, 2 * once if algorithm == "direct" else several
    steps = {"ring": n - 1, "direct": several, "tree": rounds}[algorithm]
    if pattern == "all_to_all":
        return steps, {"ring": (n - 1) / 2, "direct": once, "tree": rounds / 2}[algorithm]
    return steps, once


def flat_ring(inside: Group, between: Group, gpus_per_node: ArrayLike) -> Group:
    """One ring through all GPUs of `between.num_gpus` nodes, with the rate and latency of its slowest link.

    Rate and latency are those of `inside` for one node.
    """
    nodes = np.asarray(between.num_gpus)
    several = nodes > 1
    rate = np.where(several, np.minimum(inside.bytes_per_s, between.bytes_per_s), inside.bytes_per_s)
    late = np.where(several, np.maximum(inside.latency_s, between.latency_s), inside.latency_s)
    able = {name: getattr(inside, name) and getattr(between, name) for name in ("computes", "short_messages")}
    return Group(nodes * np.asarray(gpus_per_node), rate, late, **able)


def node_ring(node: LibraryNode, gpus: ArrayLike, together: ArrayLike | None = None) -> Group:
    """Ring of `gpus` GPUs, `together` of them in each node (None: all GPUs of a node).

    The rate is NaN for a ring that leaves the node if the network's rate is not given. Raises ValueError if nothing is
    known of the node's library.
    """
    library = node.library
    if library is None:
        raise ValueError("node.library is missing: rates of collectives")
    per_node = np.asarray(node.num_gpus if together is None else together)
    nodes = np.ceil(np.asarray(gpus, float) / per_node)
    sharers = np.maximum(np.minimum(gpus, per_node) - 2.0, 0.0)
    inside = Group(gpus, library.bytes_per_s / (1 + library.sharing * sharers), library.latency_s)
    network = np.nan if library.network_bytes_per_s is None else library.network_bytes_per_s
    ring = flat_ring(inside, Group(nodes, network, library.latency_s), np.asarray(gpus) / nodes)
    protocols = {str(kind): constants for kind, constants in (library.protocols or {}).items()}
    return replace(ring, protocols=protocols or None, inside=nodes <= 1)


@dataclass(frozen=True)
class CopyPhases:
    """Time [s] of the phases of one copy by a DMA engine; arrays over sizes."""

    control_s: Floats
    schedule_s: Floats
    copy_s: Floats
    sync_s: Floats

    @property
    def seconds(self) -> Floats:
        """Total time [s]."""
        return self.control_s + self.schedule_s + self.copy_s + self.sync_s

    @property
    def shares(self) -> Floats:
        """Share of each phase, [..., 4], in the order of the fields."""
        parts = np.stack(np.broadcast_arrays(self.control_s, self.schedule_s, self.copy_s, self.sync_s), axis=-1)
        return np.asarray(parts / self.seconds[..., None])


def copy_phases(size_bytes: ArrayLike, times: CopyTimes, link_bytes_per_s: ArrayLike) -> CopyPhases:
    """Phases of copies by size: all phases but the copy itself take the same time for all sizes (derived)."""
    size = np.asarray(size_bytes, float)
    copy = times.copy_s + size / np.asarray(link_bytes_per_s)
    fixed = (np.full(size.shape, value) for value in (times.control_s, times.schedule_s, times.sync_s))
    control, schedule, sync = fixed
    return CopyPhases(control, schedule, copy, sync)
