"""Moving a tensor between GPUs: routes in a node, rates by CU kernels or DMA engines, and a library's protocols.

The node is symmetric, so one representative GPU is simulated: what it receives, it also sends. A route names the
incoming links that a peer's data loads, the bytes on each (transit on a ring), and the order in which data arrives.

`protocol_seconds`: collectives by a library with three protocols, as NCCL and RCCL have them, and the choice of one;
`in_switch_seconds`: by a switch that adds and copies. `simulators.costs.collective` has those of algorithms.

A collective of S bytes among n GPUs on N nodes takes s dependent steps, in which a GPU sends w bytes:

    collective       S                               s                  w
    all_reduce       the tensor every GPU holds      2(N + n/N - 2)     2(n-1)/n S
    all_gather       the tensor every GPU ends with  N + n/N - 2        (n-1)/n S
    reduce_scatter   the tensor every GPU begins with   as all_gather
    all_to_all       what a GPU sends to all, itself included   as all_gather
    send_recv        the message                     1                  S

    B      = bytes_per_s scaling^d      d = log2(n / 2) inside a node, log2(n / N) across nodes;
                                        inside a node each doubling to n by (n-1) / (n-2) at most, as w grows
    LL     = launch + s ll_step    + w / (ll_share B) + ll_fill min(1, S / (4096 n))
    LL128  = launch + s ll128_step + w / (ll128_share B)
    Simple = launch + simple + max(s step + w / (copy_speed B) + s fill min(1, w / fill_bytes), w / B)
    T      = max(host, min(LL, LL128, Simple))

LL sends a flag with every four bytes and needs no fence, LL128 one with every 120; Simple waits for fences and fills a
pipeline of chunks that grow with the message until the library's buffers are full (NCCL, `src/graph/tuning.cc`, which
has a base latency for each protocol and one for each of its steps; the form of the filling is derived). LL gives a
message to one channel of 512 threads with a word of 8 bytes for each rank, before it takes more channels
(`src/enqueue.cc`), so that it waits for that many threads from 4096 n bytes on. Where CTAs copy faster than the links
carry (`copy_speed`), the waits of some channels are hidden behind the bytes of others (derived).

The library takes no minimum of true times but of its own estimates, with r = n / s (`tuned`, of rings over NVLink):

    6.6 us + 0.6 us s + S / (r ll),    14 us + 1.9 us s + S / (r ll128),    8.4 us + 3.4 us s + S / (r simple)

so that times step where it changes over (2.27 to 2.30, `ncclTopoTuneModel`). An all-reduce takes the minimum: rings'
estimates do worse where the switch adds (B200), and on A100 four GPUs would beat two at 1 to 2 MiB (as they do).

RCCL gives an all-reduce of 8 GPUs of a mesh by its size to chunks that all pairs send by LL, to those by Simple, or to
rings, and short ones to a ring by LL, since each chunk needs an element (`ll_sizes`, in place of the fastest; its
`tools/msccl-algorithms`): all pairs take two steps, which stand in the launch, and LL128's constants are of the others.

An all-to-all serves all peers at once: a step is what one more of them adds to a call (0.18 us of LL on 2 to 8 H100),
and rows of one number of GPUs do not tell it from the launch.

Across nodes chains run inside the nodes and between them, by as many NICs as a node has GPUs in the group, so that
their rates add up (derived). Where a host calls one collective after another, the GPU whose host is ahead waits in the
kernel for the others, which takes no less than the time between two calls (`host`, derived; a GPU whose own host is
last sees the rest alone). Eleven or twelve constants for each collective, fitted on at most 24 rows (`dse machine
calibrate`).

By a switch (NVLink SHARP, multimem) a GPU orders the reduction of its share of a tensor, which the switch reads from
all GPUs, and writes the sum once, which the switch copies to all of them:

    T = latency + w / min(B, c r)       w = (1 + 1/n) S for an all-reduce, else S      c: CTAs, r: rate of a CTA

The links carry all of S: out of a GPU for a reduction, into it for a copy; an all-reduce does both at once, and its sum
goes out once more (derived). Three constants for each collective, fitted on at most 12 rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dse.values import put
from simulators.costs.sharing import beside_engines
from simulators.hardware.machine import Gpu, System
from simulators.hardware.network import CollectiveKind, Node, Pattern, Protocols, Route, SwitchRate, TunedRates, links

Floats = NDArray[np.float64]
_FULL_CHANNEL = 512 * 8  # bytes of each rank with which every thread of a channel has a word of LL
CommEngine = Literal["cu", "dma"]
Mover = Literal["cu", "dma", "store", "switch"]
"""Engine of a transfer: kernels on CUs of their own, copy engines, stores of the workgroups that compute, or the switch
of the node, which adds and copies what these workgroups order (multimem).
"""
HALVES = ("all_gather", "reduce_scatter")
"""Collectives that are a half of an all-reduce each."""
_TILES = {"store": "stores of CUs", "switch": "switch"}
"""Engines that are a part of the GEMM's kernel, and what bounds them where links do not."""
_FILLED = 0.95  # share of the links from which they count as the limit, for its name alone


@dataclass(frozen=True)
class Rates:
    """Payload rate [bytes/s] of an engine over one route, and the name of what bounds it."""

    bytes_per_s: Floats
    limiter: str


def routes(node: Node, pattern: Pattern) -> list[Route]:
    """One route per peer, in order of arrival.

    Mesh: a link of its own. Switch, PCIe: all share the GPU's port. Ring: data goes the shorter way round; an
    all-gather forwards each shard from neighbour to neighbour (every link carries it once), and so does a reduction,
    which adds on its way; an all-to-all message of distance d loads d links, and by symmetry the representative GPU's
    link carries d of them.
    """
    if node.topology == "ring":
        return _ring_routes(node.num_gpus, pattern)
    shared = node.topology in ("switch", "pcie")
    # all at once
    return [Route(peer, {"port" if shared else f"link.{peer}": 1.0}, 0) for peer in range(1, node.num_gpus)]


def _ring_routes(num_gpus: int, pattern: Pattern) -> list[Route]:
    by_distance = []
    for distance in range(1, num_gpus // 2 + 1):
        # a message crosses as many links as it is far; gathered or reduced shards are forwarded
        load = float(distance) if pattern == "all_to_all" else 1.0
        if 2 * distance == num_gpus:  # the opposite GPU is as far either way: half goes each way
            halves = {"link.cw": load / 2, "link.ccw": load / 2}
            by_distance.append(Route(distance, halves, distance))
        else:
            by_distance.append(Route(distance, {"link.cw": load}, distance))
            by_distance.append(Route(num_gpus - distance, {"link.ccw": load}, distance))
    return by_distance


@dataclass(frozen=True)
class TransferMode:
    """Transfers of a collective `pattern`, by DMA engines, by kernels on `cus` CUs, or by a GEMM's own kernel.

    bytes_per_s: rate of a GPU's links that a kernel reaches which orders the switch; None for that of the node.
    """

    engine: Mover
    cus: ArrayLike
    pattern: Pattern
    bytes_per_s: ArrayLike | None = None


SplitPolicy = Literal["whole", "even"]


def rate(
    system: System, route: Route, active: Sequence[Route], *, by: TransferMode, split: SplitPolicy = "whole"
) -> Rates:
    """Payload rate of `route` while the routes `active` (itself included) run at once.

    A GEMM's own workgroups, and the switch by their orders: `tiles_share` of the link. DMA: min(share of the link,
    engines). An engine serves one link (measured: engines have per-destination affinity), so a copy is split over the
    idle engines of its link: over `whole` engines, or `even`ly, as if copies could share an engine. CU kernels: c CUs
    that move r bytes/s each reach `link_utilisation(c r / B)` of the links in use, which have B in all.
    """
    capacity, crossed = links(system.node), [name for other in active for name in other.loads]
    shares = [
        # routes that are not active alone share with none
        np.asarray(capacity[name]) / (load * crossed.count(name) or 1)
        for name, load in route.loads.items()
    ]
    link = np.asarray(np.min(np.broadcast_arrays(*shares), axis=0))  # the scarcest link on the way
    if by.engine == "dma":
        dma = system.gpu.dma
        # copies that share the engines of a link
        at_once = max(map(crossed.count, route.loads)) or 1
        # engines are spread over the links
        engines = min(len(route.loads) * max(1, dma.num_engines // len(capacity)), dma.num_engines)
        # no copy goes without an engine
        engine = np.asarray(dma.bytes_per_s) * max(1, engines // at_once if split == "whole" else engines / at_once)
        bound = "DMA engine" if np.all(engine < link) else "link"
        return Rates(np.minimum(link, engine), bound)
    if by.engine in _TILES:  # workgroups move data as they compute: no engine of copies limits them
        share = tiles_share(system, by)
        carried = np.all(share > _FILLED * system.gpu.cu_copy.link_efficiency)
        return Rates(np.asarray(link * share), "link" if carried else _TILES[by.engine])
    full = _cu_fill(system, active, by)
    return Rates(link * system.gpu.cu_copy.link_efficiency * full, "link" if np.all(full > _FILLED) else "copy CUs")


def tiles_share(system: System, by: TransferMode) -> Any:
    """Share of the links that a GEMM's own workgroups reach together: what CUs store, the switch or the links carry.

    Raises ValueError for a switch that does not compute the collective.
    """
    copy, carried = system.gpu.cu_copy, sum(np.asarray(rate) for rate in links(system.node).values())
    if by.engine == "switch":
        reached = switched(system.node, by.pattern).bytes_per_s if by.bytes_per_s is None else by.bytes_per_s
        return np.minimum(1.0, np.asarray(reached) / carried)
    # not measured: as kernels of copies
    share = copy.link_efficiency if copy.store_efficiency is None else copy.store_efficiency
    if copy.store_bytes_per_s_per_cu is None:
        return share
    stored = np.asarray(system.gpu.num_cus) * copy.store_bytes_per_s_per_cu
    return np.minimum(share, stored / carried)


def switched(node: Node, pattern: Pattern) -> SwitchRate:
    """Constants of a collective that the node's switch computes. Raises ValueError if it does not."""
    rates = {} if (switch := node.switch()) is None else {str(kind): each for kind, each in switch.collectives.items()}
    if pattern not in rates:
        raise ValueError(f"{pattern} is not computed by the switch: node.in_switch.collectives has no {pattern}")
    return rates[pattern]


def link_utilisation(demand: ArrayLike) -> Floats:
    """Share u of the links' rate that CUs reach, for a demand of x times that rate: u = x / sqrt(1 + x^2).

    Issue-bound and link-bound times, added in quadrature (derived); within 2.3 % of RCCL's all-reduce on 2 to 32
    channels, whose first point gives the rate of a CU (docs/explanation/contention.md).
    """
    ratio = np.asarray(demand, float)
    return np.asarray(ratio / np.sqrt(1 + ratio * ratio))


def accumulate_hbm_bytes(system: System, *, near_memory: bool) -> Any:
    """HBM traffic [bytes] to accumulate a byte, beyond its write: a read, or an update by units in memory."""
    gpu = system.gpu
    # the update less the write that it replaces
    return gpu.pim.update(gpu.hbm_bytes_per_s) - 1.0 if near_memory and gpu.pim is not None else 1.0


def setup(system: System, *, by: TransferMode) -> ArrayLike:
    """Set-up time [s] of a collective (by DMA engines: of each of its copies) before data moves.

    `cu_copy.setup_s` is the floor of short messages, measured on an all-reduce, which has two steps; others have one.
    An all-to-all counts as two steps: it consists of sends and receives (derived).
    """
    if by.engine == "dma":
        return system.gpu.dma.setup_s
    if by.engine in _TILES:  # no kernel of its own is launched
        return 0.0
    if (constants := _protocols(system, by.pattern)) is not None:
        return constants.launch_s
    steps = 2 if by.pattern in {"all_reduce", "all_to_all"} else 1
    return np.asarray(system.gpu.cu_copy.setup_s) * steps / 2  # measured with two steps


def library_s(system: System, received_bytes: ArrayLike, *, by: TransferMode) -> Floats | None:
    """Time [s], after its launch, of a library's collective by which a GPU receives so many bytes (an all-reduce: both
    ways); None unless the machine names the cost model `library` and the node's was measured by size.

    On fewer CUs than the library takes it is slower by what they fill of the links; more CUs stay idle. An all-gather
    and a reduce-scatter that were not measured, where the all-reduce was: as links carry them, and no less than half.
    """
    constants, node = _protocols(system, by.pattern), system.node
    if by.engine != "cu":
        return None
    if constants is None:
        return _half_of_all_reduce_s(system, received_bytes, by) if by.pattern in HALVES else None
    passes = 2 if by.pattern == "all_reduce" else 1  # both halves of an all-reduce are one collective to the library
    # a GPU keeps its own share
    tensor = np.asarray(received_bytes, float) / passes * node.num_gpus / (node.num_gpus - 1)
    moving = protocol_seconds(constants, by.pattern, node.num_gpus, tensor) - constants.launch_s
    return np.asarray(moving / library_fill(system, by.pattern, cus=by.cus))


def library_fill(
    system: System, pattern: Pattern, *, cus: ArrayLike | None = None, port_bytes_per_s: ArrayLike | None = None
) -> Floats:
    """What kernels fill of the links over what a library's kernels, as measured, fill of them: (0, 1].

    cus: that they have (None: as many as the library takes). port_bytes_per_s: rate of a port to the network, in place
    of the node's links. A CU moves less at a lower clock than that of the data sheet, at which libraries were measured.
    """
    active, library = routes(system.node, pattern), library_cus(system, pattern)
    by, usual = (TransferMode("cu", library if count is None else count, pattern) for count in (cus, None))
    measured = system if system.gpu.clock is None else put(system, "gpu.clock", 1.0)
    if port_bytes_per_s is None:
        fills = _cu_fill(system, active, by), _cu_fill(measured, active, usual)
    else:
        fills = kernel_share(system, by, port_bytes_per_s), kernel_share(measured, usual, port_bytes_per_s)
    return np.minimum(fills[0] / fills[1], 1.0)  # more CUs than the library takes would stay idle


def is_measured(system: System, pattern: Pattern) -> bool:
    """Tell whether a collective inside the node costs what its library was measured to take."""
    return _protocols(system, pattern) is not None


def _half_of_all_reduce_s(system: System, received_bytes: ArrayLike, by: TransferMode) -> Floats | None:
    """Time [s], after its launch, of a half of an all-reduce over links, and no less than half of the measured whole.

    A library scatters and gathers by the same protocols, steps and kernels, whose time links alone do not hold; None
    where the all-reduce was not measured either.
    """
    received, both = np.asarray(received_bytes, float), replace(by, pattern="all_reduce")
    whole = library_s(system, 2 * received, by=both)
    if whole is None:
        return None
    half = (np.asarray(setup(system, by=both)) + whole) / 2 - np.asarray(setup(system, by=by))
    return np.asarray(np.maximum(_carried_s(system, received / (system.node.num_gpus - 1), by), half))


def _protocols(system: System, pattern: Pattern) -> Protocols | None:
    """Constants of a collective of the node's library; None on a ring of links, which GPUs forward along."""
    node = system.node
    # its constants are of machines whose GPUs reach one another directly
    if system.costs.collective != "library" or node.topology == "ring" or node.num_gpus < 2:
        return None
    return node.protocols().get(pattern)


def alone(system: System, payload_bytes: ArrayLike, *, by: TransferMode) -> Floats:
    """Isolated time [s] of a collective of `payload_bytes`, launched as a library would.

    The host launches DMA copies one after another and waits for each: (n - 1) (control + schedule + sync), and the
    latency of the copy, where the phases are known (DMA-Latte, arXiv:2511.06605; schedules that are launched ahead of
    time do not pay this). An engine moves one copy at a time: where there are fewer engines than peers, copies queue.
    """
    received = np.asarray(payload_bytes, float) * (system.node.num_gpus - 1) / system.node.num_gpus  # the other shares
    measured = library_s(system, received * (2 if by.pattern == "all_reduce" else 1), by=by)
    if measured is not None:  # a library's collective counts as measured
        return np.asarray(np.asarray(setup(system, by=by)) + measured, float)
    node, phases = system.node, system.gpu.dma.phases if by.engine == "dma" else None
    begin: Any = setup(system, by=by)
    if by.engine == "dma" and phases is not None:
        # a host waits for each copy before it launches the next
        begin = (node.num_gpus - 1) * (phases.control_s + phases.schedule_s + phases.sync_s) + phases.copy_s
    passes = 2 if by.pattern == "all_reduce" else 1
    return np.asarray(begin + _carried_s(system, passes * np.asarray(payload_bytes) / node.num_gpus, by), float)


def _carried_s(system: System, share_bytes: ArrayLike, by: TransferMode) -> Floats:
    """Time [s] in which links carry a share of a tensor over each route of a collective."""
    peer_routes, seconds = routes(system.node, by.pattern), np.zeros(())
    for step in sorted({route.step for route in peer_routes}):
        copies = [route for route in peer_routes if route.step == step]
        # a kernel serves all peers at once, engines one each
        at_once = min(len(copies), system.gpu.dma.num_engines) if by.engine == "dma" else len(copies)
        for start in range(0, len(copies), at_once):
            active = copies[start : start + at_once]
            times = [np.asarray(share_bytes) / rate(system, route, active, by=by).bytes_per_s for route in active]
            seconds = seconds + np.max(times, axis=0)  # the slowest copy of the round
    return seconds


def channel_cus(system: System, channels: ArrayLike, pattern: Pattern) -> NDArray[np.int_]:
    """CUs that a number of channels of a collective take.

    A channel of a ring (all-reduce, all-gather, reduce-scatter) is a workgroup on a CU. One of an all-to-all sends and
    receives at once, and a CU moves `all_to_all_factor` of what it moves for a ring: it counts as so many more CUs.
    """
    factor = _all_to_all_factor(system, pattern)
    return np.asarray(np.rint(np.asarray(channels) / factor).astype(int))  # whole CUs


def library_cus(system: System, pattern: Pattern) -> NDArray[np.int_]:
    """CUs that a library's kernel takes for a collective, by the largest number of its channels."""
    return channel_cus(system, system.gpu.cu_copy.num_cus, pattern)


def _all_to_all_factor(system: System, pattern: Pattern) -> Any:
    """Bytes that a CU moves for a collective, over those of a ring."""
    return system.gpu.cu_copy.all_to_all_factor if pattern == "all_to_all" else 1.0


def saturating_cus(system: System, pattern: Pattern, *, share: float) -> int:
    """Least number of CUs whose kernels reach a share of the bandwidth that all CUs reach."""
    every = np.arange(1, system.gpu.num_cus + 1)
    # of a ring, the neighbours; all else has one step
    active = [route for route in routes(system.node, pattern) if not route.step or route.step == 1]
    paces = rate(system, active[0], active, by=TransferMode("cu", every, pattern)).bytes_per_s
    return int(every[np.argmax(paces >= share * paces[-1])])  # the first that reaches it


def late_start_s(gpu: Gpu, gemm_s: ArrayLike, *, by: Mover) -> Floats:
    """Time [s] of a GEMM's run that passes until kernels launched beside it move data; `gemm_s`: its time alone.

    Their workgroups wait for others to leave, on the slowest of all GPUs: measured as a share of the GEMM's time that
    does not depend on the payload (docs/explanation/contention.md). They hold their CUs meanwhile. DMA engines do
    not wait.
    """
    share = np.asarray(gpu.contention.late_start if by == "cu" else 0.0, float)  # engines need no CU
    return np.asarray(share * gemm_s)


def fork_s(gpu: Gpu) -> Floats:
    """Time [s] that passes from where streams part until a kernel that moves data starts on its own."""
    return np.asarray(0.0 if gpu.contention.fork_s is None else gpu.contention.fork_s, float)


def launched_first(system: System) -> System:
    """A system on which kernels that move data were launched before the GEMM beside which they run."""
    first = system.gpu.contention.late_start_first
    return system if first is None else put(system, "gpu.contention.late_start", first)


def slowed_beside_gemm(system: System, active: Sequence[Route], *, by: TransferMode, withheld: ArrayLike = 0) -> Floats:
    """Factor (0, 1] on the rate of transfers while a GEMM runs. withheld: CUs that it does not get.

    CUs: each takes `cu_copy_beside_gemm` times as long for a byte, so links that few CUs fill suffer and links that
    many fill hardly do. DMA engines: `beside_engines`.
    """
    contention = system.gpu.contention
    if by.engine in _TILES:
        return np.ones(())
    if by.engine == "dma":
        return beside_engines(system.gpu, withheld=withheld)
    # the demand of fewer CUs, as each takes longer for a byte
    slow = TransferMode(by.engine, np.asarray(by.cus) / contention.cu_copy_beside_gemm, by.pattern)
    return np.minimum(_cu_fill(system, active, slow) / _cu_fill(system, active, by), 1.0)  # 1 + 1 ulp is none


def _cu_fill(system: System, active: Sequence[Route], by: TransferMode) -> Floats:
    used = {name for other in active for name in other.loads}  # each link once, however many routes share it
    capacity = links(system.node)
    return kernel_share(system, by, sum([np.asarray(capacity[name]) for name in sorted(used)]))


def kernel_share(system: System, by: TransferMode, bytes_per_s: ArrayLike) -> Floats:
    """Share u of what links of a total rate [bytes/s] carry at most, that kernels on `by.cus` CUs reach."""
    copy = system.gpu.cu_copy
    factor = _all_to_all_factor(system, by.pattern)
    carried = np.asarray(bytes_per_s) * copy.link_efficiency
    clock = 1.0 if system.gpu.clock is None else system.gpu.clock  # a CU moves as much less at a lower one
    return link_utilisation(np.asarray(by.cus) * copy.bytes_per_s_per_cu * clock * factor / carried)


def protocol_seconds(
    constants: Protocols, kind: CollectiveKind, num_gpus: ArrayLike, payload: ArrayLike, *, num_nodes: ArrayLike = 1
) -> Floats:
    """Time [s] of a collective of `payload` bytes among 2 or more GPUs; 0 for one GPU. Arrays broadcast."""
    n, size, nodes = (np.asarray(number, float) for number in (num_gpus, payload, num_nodes))
    passes, together = 2.0 if kind == "all_reduce" else 1.0, n / nodes  # scattered, then gathered
    steps, wire = passes * (nodes + together - 2), passes * (n - 1) / n * size
    if kind == "send_recv":
        steps, wire = np.ones(()), size
    # across nodes rates grow or fall with each doubling of the GPUs in a node
    across = constants.bytes_per_s * constants.scaling ** np.log2(np.maximum(together, 1))
    rate = np.where(nodes > 1, across, constants.reached(n))
    setup_s, host_s = (0.0 if part is None else part for part in (constants.simple_s, constants.host_s))
    low_latency = steps * constants.ll_step_s + wire / (constants.ll_share * rate)
    if constants.ll_fill_s is not None:
        low_latency = low_latency + constants.ll_fill_s * np.minimum(1.0, size / (_FULL_CHANNEL * n))
    flag_of_128 = steps * constants.ll128_step_s + wire / (constants.ll128_share * rate)
    carried = wire / rate
    waits = steps * constants.step_s
    if constants.fill_s is not None:  # chunks grow until the buffers are full
        waits = waits + steps * constants.fill_s * np.minimum(1.0, wire / constants.fill_bytes)
    simple = setup_s + waits + carried
    if constants.copy_speed is not None:
        simple = setup_s + np.maximum(waits + carried / constants.copy_speed, carried)
    if constants.tuned is None:
        others, ranged = np.minimum(flag_of_128, simple), constants.ll_sizes
        fastest = np.minimum(low_latency, others)
        if ranged is not None:
            fastest = np.where((size >= ranged.from_bytes) & (size < ranged.below_bytes), low_latency, others)
        seconds = constants.launch_s + fastest
    else:
        first, second, third = _estimates(constants.tuned, steps, n, size)
        larger = np.where(second <= third, flag_of_128, simple)
        seconds = constants.launch_s + np.where(first <= np.minimum(second, third), low_latency, larger)
    # the GPU whose host is ahead waits for the others
    return np.asarray(np.where(n > 1, np.maximum(seconds, host_s), 0.0), float)


def _estimates(tuned: TunedRates, steps: Floats, n: Floats, size: Floats) -> list[Floats]:
    """Times [s] by LL, LL128 and Simple that the library expects of a ring."""
    rates = (tuned.ll_bytes_per_s, tuned.ll128_bytes_per_s, tuned.bytes_per_s)
    share = size * (np.maximum(steps, 1.0) / n)
    calls = (tuned.ll_s, tuned.ll128_s, tuned.simple_s)
    step_s = (tuned.ll_step_s, tuned.ll128_step_s, tuned.step_s)
    estimates = zip(calls, step_s, rates, strict=True)
    return [call + step * steps + share / np.asarray(rate) for call, step, rate in estimates]


def in_switch_seconds(
    constants: SwitchRate, kind: str, num_gpus: ArrayLike, payload: ArrayLike, *, num_ctas: ArrayLike = np.inf
) -> Floats:
    """Time [s] of a collective of `payload` bytes that the switch computes; 0 for one GPU. Arrays broadcast.

    num_ctas: that order it; as many as it takes unless said otherwise.
    """
    n, size = np.asarray(num_gpus, float), np.asarray(payload, float)
    wire = size * (1 + 1 / n) if kind == "all_reduce" else size  # the reduced share goes out once more
    rate = np.minimum(constants.bytes_per_s, np.asarray(num_ctas) * constants.bytes_per_s_per_cta)
    return np.asarray(np.where(n > 1, constants.latency_s + wire / rate, 0.0), float)
