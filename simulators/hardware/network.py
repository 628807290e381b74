"""GPUs together: the node and its links, what its library of collectives reaches, and the fabric between nodes.

Numbers live in `conf/node/*.yaml` and `conf/fabric/*.yaml`, each with its source. Field names carry SI units.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import Field, model_validator

from dse.space.blocks import Rule
from dse.values import Frozen, knob
from dse.values.units import Integer, Number, Seconds
from simulators.hardware.parts import ABSENT, LACKS, Bandwidth, Duration, Grown, Part, WithSources

Topology = Literal["mesh", "switch", "ring", "pcie"]
Pattern = Literal["all_gather", "all_to_all", "reduce_scatter", "all_reduce"]
"""Collectives whose data schedules cut into pieces."""
Placement = Literal["cpu", "pcie_switch", "gpu"]
CollectiveKind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv"]
"""Collectives that are measured by size; `send_recv` is one message between two GPUs."""
SwitchedKind = Literal["all_reduce", "all_gather", "reduce_scatter"]
"""Collectives that a switch can compute."""


class TunedRates(Frozen):
    """Rates of a ring by LL, LL128 and Simple that a library expects, and chooses by: facts of its release.

    ll_s, ll128_s, simple_s: latency of a call by each; ll_step_s, ll128_step_s, step_s: of each of its steps.
    """

    ll_bytes_per_s: Bandwidth
    ll128_bytes_per_s: Bandwidth
    bytes_per_s: Bandwidth
    ll_s: Duration
    ll128_s: Duration
    simple_s: Duration
    ll_step_s: Duration
    ll128_step_s: Duration
    step_s: Duration


class SizeRange(Frozen):
    """Sizes of a message [bytes]: from one, which is in it, to another, which is not."""

    from_bytes: Annotated[Number, Field(ge=0)]
    below_bytes: Annotated[Number, Field(gt=0)]


class Protocols(Grown):
    """Fitted constants of one collective, inside a node or across nodes (equations in `simulators.costs.transfer`).

    launch_s: of a call, to which Simple adds simple_s (None: nothing). ll_step_s, ll128_step_s, step_s: latency of a
    step by LL, LL128 and Simple. ll_share, ll128_share: share of the rate that LL and LL128 reach. bytes_per_s: rate of
    a GPU by Simple, inside a node among two, across nodes with one in each; each doubling of their number (across
    nodes: in a node) multiplies it by `scaling`. fill_s: time of a step to fill the pipeline, in proportion to the
    bytes up to fill_bytes, then constant; None: nothing. host_s: time between two calls of a host, which GPUs that are
    ahead wait for; None where calls are launched ahead. ll_fill_s: time of LL until all threads of a channel have a
    word. copy_speed: rate of the CTAs by Simple over that of the links; None: they are alike. tuned: what the library
    chooses its protocol by; ll_sizes: of the messages that it gives to LL, and no others; None: it takes the fastest.
    """

    launch_s: Duration
    ll_step_s: Duration
    ll_share: Annotated[Number, Field(gt=0, le=1)]
    ll128_step_s: Duration
    ll128_share: Annotated[Number, Field(gt=0, le=1)]
    step_s: Duration
    bytes_per_s: Bandwidth
    scaling: Annotated[Number, Field(gt=0, le=8)]
    fill_s: Duration | None = None
    fill_bytes: Annotated[Number, Field(ge=1)] | None = None
    simple_s: Duration | None = None
    host_s: Duration | None = None
    ll_fill_s: Duration | None = None
    copy_speed: Annotated[Number, Field(ge=1, le=10)] | None = None
    tuned: TunedRates | None = None
    ll_sizes: SizeRange | None = None

    @model_validator(mode="after")
    def _fills_up_to_a_size(self) -> Self:
        if (self.fill_s is None) != (self.fill_bytes is None):
            raise ValueError("has one of fill_s and fill_bytes: give both, or neither")
        return self

    def reached(self, num_gpus: ArrayLike) -> NDArray[np.float64]:
        """Rate [bytes/s] of a GPU by Simple among so many of a node, by which more GPUs never take less time."""
        doublings = np.log2(np.maximum(np.asarray(num_gpus, float), 2) / 2)
        factor = np.ones(doublings.shape)
        for step in range(1, 1 + int(np.ceil(doublings.max(initial=0.0)))):
            gpus = 2.0 ** (step + 1)
            # bytes that each GPU sends grow by as much
            growth = np.minimum(self.scaling, (gpus - 1) / (gpus - 2))
            factor = factor * growth ** np.clip(doublings - (step - 1), 0.0, 1.0)
        return np.asarray(self.bytes_per_s * factor)

    def within(self, bytes_per_s: Any) -> Protocols:
        """The same over a network of a rate that they do not exceed."""
        return self.model_copy(update={"bytes_per_s": np.minimum(self.bytes_per_s, bytes_per_s)})

    def faster(self, factor: Any) -> Protocols:
        """The same over links `factor` times as fast."""
        return self if np.all(factor == 1) else self.model_copy(update={"bytes_per_s": self.bytes_per_s * factor})


class ShortSums(Frozen):
    """Short all-reduces across nodes: launch_s of a call, step_s of a step of chains in nodes and a tree of nodes."""

    launch_s: Duration
    step_s: Duration


class CollectiveLibrary(Grown):
    """Rates that a library of collectives reaches on a node, as its rings use the links.

    bytes_per_s: rate of a GPU in a ring of two; each further GPU lengthens the time of a byte by the share `sharing`,
    because paths through switches and sockets are shared. latency_s: latency of a step. network_bytes_per_s: rate of a
    GPU once a ring leaves the node; None if it was not measured. network_nics: a ring of several GPUs of a node goes
    through one NIC, or each GPU through its own. network_latency_s: latency of a step across nodes; None: as inside.
    nic_bytes_per_s: rate of the port of such a NIC, which nothing exceeds that leaves the node; None: not known.
    network_sums: of all-reduces across nodes that were not measured, which take no less; None: not known.
    network_sprays: the packets of a message take many ways through the network, so that many nodes that send to one NIC
    do not slow it. link_bytes_per_s: rate of the node's links with which all rates inside it (and in its switch) were
    measured, and with which they grow; None: they stay as they are. mesh_gpus: GPUs of the mesh that its protocols were
    measured on, each with a link to all others; None where a switch joins them. protocols, network: constants of
    collectives that were measured by size inside the node and across nodes; rings describe the others. name: of the
    library in measured tables, where several were measured. fitted_on: kind of rows -> names of the rows that these
    were fitted on.
    """

    name: str | None = None
    bytes_per_s: Bandwidth
    latency_s: Duration
    sharing: Annotated[Number, Field(ge=0, le=1)] = 0.0
    network_bytes_per_s: Bandwidth | None = None
    network_nics: Annotated[Literal["one", "one_a_gpu"], knob(structural=True)] = "one_a_gpu"
    network_latency_s: Duration | None = None
    nic_bytes_per_s: Bandwidth | None = None
    network_sums: ShortSums | None = None
    network_sprays: Annotated[bool, knob(structural=True)] = False
    link_bytes_per_s: Bandwidth | None = None
    mesh_gpus: Annotated[Integer | None, knob(structural=True, ge=2, le=1024)] = None
    protocols: Mapping[CollectiveKind, Protocols] | None = None
    network: Mapping[CollectiveKind, Protocols] | None = None
    fitted_on: Mapping[str, tuple[str, ...]] | None = None


class SwitchRate(Frozen):
    """Constants of one collective that the switch computes (`simulators.costs.transfer.in_switch_seconds`).

    latency_s: of the smallest message, barriers included. bytes_per_s: rate of a GPU's links. bytes_per_s_per_cta: rate
    of a CTA that orders loads and stores.
    """

    latency_s: Duration
    bytes_per_s: Bandwidth
    bytes_per_s_per_cta: Bandwidth

    @property
    def num_ctas(self) -> Any:
        """Fewest CTAs whose orders fill the links; an array where the rate is one."""
        return np.ceil(np.asarray(self.bytes_per_s) / self.bytes_per_s_per_cta).astype(int)[()]


class InSwitch(Grown):
    """Reductions and copies in the switch (NVLink SHARP, multimem): each GPU orders those of its share of a tensor.

    collectives: by kind. fitted_on: as of `CollectiveLibrary`.
    """

    collectives: Mapping[SwitchedKind, SwitchRate] = Field(min_length=1)
    fitted_on: Mapping[str, tuple[str, ...]] | None = None


class TokenKernel(Grown):
    """Fitted constants of a kernel that moves tokens to experts or back (`simulators.costs.expert_exchange`).

    launch_s: of a call. sm_launch_s: time beyond it that SMs share. token_s, copy_s: time of an SM for a token, and for
    each GPU that it goes to. passes: over the token's bytes beside those for each GPU. bytes_per_s_per_sm: rate of an
    SM. bytes_per_s: rate of a GPU's links; of its NIC, where tokens leave the node. node_s: time of a call for each
    node beyond two. incast_nodes: other nodes up to which a NIC keeps its rate; None: it always does.
    """

    launch_s: Duration
    sm_launch_s: Annotated[Seconds, Field(ge=0)]
    token_s: Annotated[Seconds, Field(ge=0)]
    copy_s: Annotated[Seconds, Field(ge=0)]
    passes: Annotated[Number, Field(ge=0, le=100)]
    bytes_per_s_per_sm: Bandwidth
    bytes_per_s: Bandwidth
    node_s: Seconds | None = None
    incast_nodes: Annotated[Number, Field(ge=1, le=4096)] | None = None


class TokenKernels(Frozen):
    """Kernels of a library: dispatch sends tokens to experts, combine adds up what these return."""

    dispatch: TokenKernel
    combine: TokenKernel

    def over(self, faster: Any, most: Any = np.inf) -> TokenKernels:
        """The same over links or NICs `faster` times as fast, of a rate that they do not exceed."""
        kernels = {
            name: kernel.model_copy(update={"bytes_per_s": np.minimum(kernel.bytes_per_s * faster, most)})
            for name, kernel in self
        }
        return self.model_copy(update=kernels)

    def without_incast(self) -> TokenKernels:
        """The same on a network where many senders to one NIC do not slow it."""
        return self.model_copy(update={name: kernel.model_copy(update={"incast_nodes": None}) for name, kernel in self})


TokenKernelKind = Literal["node", "network", "network_low_latency"]
"""Kernels of expert parallelism: inside a node, across nodes, and across nodes for few tokens."""


class ExpertLibrary(Grown):
    """Library of expert parallelism (DeepEP, MORI). num_sms: SMs (or workgroups) that its kernels take.

    nic_bytes_per_s: of a GPU's port to the network that kernels were measured on, and grow with; None: not known.
    fp8_bytes: bytes of an element that is dispatched in fp8, with its share of the scales. fitted_on: as of
    `CollectiveLibrary`, by kernel.
    """

    name: str
    num_sms: Annotated[Integer, Field(ge=1, le=4096)]
    nic_bytes_per_s: Bandwidth | None = None
    fp8_bytes: Annotated[Number, Field(ge=1, le=2)]
    kernels: Mapping[TokenKernelKind, TokenKernels] = Field(min_length=1)
    fitted_on: Mapping[str, tuple[str, ...]] | None = None


class Node(WithSources, Grown):
    """GPUs that reach each other directly (`mesh`), through a `switch`, around a bidirectional `ring`, or by `pcie`.

    link_bytes_per_s: achievable payload rate of one link in one direction. A GPU takes num_gpus - 1 links on a
    mesh, one port of as many links' bandwidth at a switch, two links on a ring, and one by PCIe; a single GPU has none.
    By PCIe a GPU reaches no more than the library does among as many (assumed: whatever moves data takes the same way).
    hop_latency_s: time until the first byte arrives, where schedules send without a copy's set-up. library: of
    collectives; None if nothing is known of it. in_switch: what the switch adds up and copies; None if it cannot.
    experts: library of expert parallelism; None for collectives in its place. host_link_bytes_per_s: rate of the link
    of a GPU to its host's memory in one direction; None where nothing goes there.
    """

    missing_way_out: ClassVar[str] = LACKS

    name: str = ""
    description: str = ""
    num_gpus: Annotated[Integer, knob(structural=True, ge=1, le=1024)]
    topology: Annotated[Part[Topology], knob(structural=True)] = ABSENT
    link_bytes_per_s: Part[Bandwidth] = ABSENT
    hop_latency_s: Seconds | None = None
    library: CollectiveLibrary | None = None
    in_switch: InSwitch | None = None
    experts: ExpertLibrary | None = None
    host_link_bytes_per_s: Bandwidth | None = None

    @property
    def speed(self) -> Any:
        """Rate of the links over that with which collectives were measured (`library.link_bytes_per_s`)."""
        measured = None if self.library is None else self.library.link_bytes_per_s
        return (
            1.0 if measured is None or self.link_bytes_per_s is None else np.asarray(self.link_bytes_per_s) / measured
        )

    def link_share(self, gpus: ArrayLike) -> NDArray[np.float64]:
        """Share of a GPU's links that lead to the `gpus` - 1 others: of a mesh one each; all elsewhere and for none."""
        count = np.asarray(gpus, float)
        if self.topology != "mesh":
            return np.ones(count.shape)
        share = (count - 1) / np.maximum(np.asarray(self.num_gpus) - 1, 1)
        return np.where(count > 1, np.minimum(share, 1.0), 1.0)

    def protocols(self) -> dict[str, Protocols]:
        """Constants of the library's collectives inside the node, with its links."""
        if self.library is None:
            return {}
        meshed = self.library.mesh_gpus
        links = 1.0 if meshed is None or self.topology != "mesh" else (self.num_gpus - 1) / (meshed - 1)
        return {str(kind): of.faster(self.speed * links) for kind, of in (self.library.protocols or {}).items()}

    def network(self) -> dict[str, Protocols]:
        """Constants of the library's collectives across nodes, which go no faster than the network's rate."""
        library = self.library
        constants = {} if library is None else {str(kind): of for kind, of in (library.network or {}).items()}
        if library is None or library.network_bytes_per_s is None:
            return constants
        return {kind: of.within(library.network_bytes_per_s) for kind, of in constants.items()}

    def exchange(self) -> ExpertLibrary | None:
        """The library of expert parallelism over the node's links and NICs; no faster than a NIC and its network."""
        library, experts = self.library, self.experts
        if experts is None or library is None:
            return experts
        port, measured = library.nic_bytes_per_s, experts.nic_bytes_per_s
        known = [rate for rate in (port, library.network_bytes_per_s) if rate is not None]
        faster = 1.0 if port is None or measured is None else np.asarray(port) / measured
        inside, across = (self.speed, np.inf), (faster, functools.reduce(np.minimum, known, np.inf))
        ways = ((str(kind), both, inside if kind == "node" else across) for kind, both in experts.kernels.items())
        kernels = {kind: both.over(*way) for kind, both, way in ways}
        if library.network_sprays:
            kernels = {kind: both.without_incast() for kind, both in kernels.items()}
        return experts.model_copy(update={"kernels": kernels})

    def switch(self) -> InSwitch | None:
        """What the switch computes, with the node's links."""
        part, faster = self.in_switch, self.speed
        if part is None or np.all(faster == 1):
            return part
        rates = {
            kind: rate.model_copy(update={"bytes_per_s": rate.bytes_per_s * faster})
            for kind, rate in part.collectives.items()
        }
        return part.model_copy(update={"collectives": rates})


_LINKS_NEEDED = {"ring": 2, "switch": 1}
"""Links of a GPU that a topology takes at least; a mesh takes one to each peer, PCIe none."""


def links(node: Node) -> dict[str, ArrayLike]:
    """Incoming links of a GPU and their rates [bytes/s]."""
    rate = node.link_bytes_per_s
    if node.topology == "pcie":  # one port for all peers, at the rate of one link
        # bridges and sockets that all GPUs share carry no more than the library was measured to send
        measured = [of.reached(node.num_gpus) for of in node.protocols().values()]
        return {"port": np.minimum(rate, np.maximum.reduce(measured)) if measured else rate}
    if node.topology == "switch":  # as much into the switch as a mesh would give to all peers
        return {"port": (node.num_gpus - 1) * np.asarray(rate)}
    if node.topology == "ring":  # two neighbours, whatever the number of GPUs
        return {"link.cw": rate, "link.ccw": rate}
    return {f"link.{peer}": rate for peer in range(1, node.num_gpus)}


@dataclass(frozen=True)
class Route:
    """Path of one peer's data. loads: link -> bytes on it per payload byte. step: routes of a later one wait."""

    peer: int
    loads: Mapping[str, float]
    step: int


def link_rules(node: Node, num_links: int | None) -> Iterator[Rule]:
    """Require that a GPU has the links that its node takes. num_links: None if that is not known."""
    mesh, peers = node.topology == "mesh", node.num_gpus - 1
    needed = peers if mesh else _LINKS_NEEDED.get(str(node.topology), 0)
    if num_links is None or peers < 1 or needed <= num_links:
        return
    rule, given = "takes {0} links of a GPU, which has {1} (system.gpu.num_links)", (needed, num_links, num_links + 1)
    if mesh:
        way = "use at most {2}, or system.node.topology=switch" if num_links else "set system.node.topology=pcie"
        yield Rule("system.node.num_gpus", True, f"{rule}, as a mesh", node.num_gpus, given, way)
    else:
        yield Rule("system.node.topology", True, rule, node.topology, given, "set pcie, or take another GPU")


class Nic(Frozen):
    """Network interfaces of a node.

    bytes_per_s: rate of one NIC in one direction. latency_s: latency of a message between two NICs, without switches.
    message_s: time that a message occupies a NIC, whatever its size. placement: behind the `cpu` (data goes through
    host memory), on a `pcie_switch` with the GPUs, or on the die of the `gpu`. pcie_bytes_per_s: rate of the PCIe link
    of a GPU or of a NIC. host_bytes_per_s: rate of a node's host memory. hop_s: latency of a PCIe switch or bridge.
    """

    num_nics: Annotated[Integer, knob(structural=True, ge=1, le=128)]
    bytes_per_s: Bandwidth
    latency_s: Seconds
    message_s: Seconds
    placement: Annotated[Placement, knob(structural=True)]
    pcie_bytes_per_s: Bandwidth
    host_bytes_per_s: Bandwidth
    hop_s: Seconds


class Network(Frozen):
    """The network between the nodes.

    `rail`: one switch for the first NIC of all nodes, one for the second, ..., and a spine. `fat_tree`: leaf switches
    of `leaf_nodes` nodes, and a spine. `torus`: two-dimensional, as square as possible, with the ports of a node's NICs
    spread evenly over its directions. oversubscription: of the spines. hop_s: latency of a switch or forwarding node.
    """

    topology: Annotated[Literal["rail", "fat_tree", "torus"], knob(structural=True)]
    leaf_nodes: Annotated[Integer, knob(structural=True, ge=1, le=4096)]
    oversubscription: Annotated[Number, Field(ge=1, le=64)]
    hop_s: Seconds


class Fabric(WithSources):
    """Nodes as in `system.node`, and the network between them (equations in `simulators/costs/fabric.py`).

    simulated: one node that stands for all, or every node with its own load. imbalance: the largest load of a node over
    the mean, minus one; loads rise linearly from node to node (as in `simulators/overlap/node.py`).
    """

    name: str = ""
    description: str = ""
    num_nodes: Annotated[Integer, knob(structural=True, ge=1, le=4096)]
    nic: Nic
    network: Network
    simulated: Annotated[Literal["one", "all"], knob(structural=True)]
    imbalance: Annotated[Number, Field(ge=0, lt=1)]
