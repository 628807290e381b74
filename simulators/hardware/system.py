"""The hardware: nodes of GPUs, the links inside them and the fabric between them.

Numbers live in `conf/system/*.yaml`, each with its source. Field names carry SI units.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from dse.errors import Problems
from dse.units import Bytes, BytesPerSecond, FlopPerSecond, Fraction, Integer, Number, Seconds
from dse.values import Frozen, knob, leaves
from simulators.hardware.pim import Pim
from simulators.hardware.sourced import Sourced, is_fact

Bandwidth = Annotated[BytesPerSecond, Field(ge=1e6)]  # 64 would be a forgotten unit
Topology = Literal["mesh", "switch", "ring"]
Placement = Literal["cpu", "pcie_switch", "gpu"]


class Grown(Frozen):
    """A part of a system that has learnt to have more: what is None is not there, so designs keep their keys."""

    def __iter__(self) -> Generator[tuple[str, Any], None, None]:
        """Its fields, without those that it has not."""
        yield from ((name, value) for name, value in super().__iter__() if value is not None)


class Tile(Frozen):
    """A GEMM macro-tile of the library: output rows x columns, and its rate relative to the best tile."""

    rows: Annotated[Integer, Field(ge=8, le=1024)]
    cols: Annotated[Integer, Field(ge=8, le=1024)]
    efficiency: Annotated[Number, Field(gt=0, le=1)]


class GemmLibrary(Grown):
    """What a GEMM kernel costs beside its FLOP (equations in `simulators/costs/gemm_waves.py`).

    assignment: workgroups are dealt out in waves by the hardware (`static`), or stay and take tiles as they become
    free (`dynamic`: persistent, work-stealing). workgroups_per_cu: how many a CU holds at once, where stages are
    simulated (`simulators/costs/gemm_stages.py`). Where kernels share a GPU (`simulators/costs/gemm_sharing.py`) that
    follows from what a CU has, register_bytes and lds_bytes, and a tile takes, tile_depth being how much of k is in the
    LDS at once; half_occupancy: workgroups on a CU that reach half of its rate.
    """

    assignment: Annotated[Literal["static", "dynamic"], knob(structural=True)] = "static"
    workgroups_per_cu: Annotated[Integer, Field(ge=1, le=64)] | None = None
    register_bytes: Annotated[Bytes, Field(ge=1024)] | None = None
    lds_bytes: Annotated[Bytes, Field(ge=1024)] | None = None
    tile_depth: Annotated[Integer, Field(ge=1, le=1024)] | None = None
    half_occupancy: Annotated[Number, Field(gt=0, le=64)] | None = None
    tiles: tuple[Tile, ...] = Field(min_length=1)
    prologue_s: Seconds
    cache_miss: Fraction
    serial_fraction: Fraction


class CuCopy(Frozen):
    """Data movement by kernels that run on CUs.

    num_cus: how many a collective takes when it is left to itself (twice as many where `all_to_all_factor` is 1/2).
    """

    num_cus: Annotated[Integer, Field(ge=1, le=4096)]
    bytes_per_s_per_cu: Bandwidth
    all_to_all_factor: Annotated[Number, Field(gt=0, le=1)]
    link_efficiency: Annotated[Number, Field(gt=0, le=1)]
    setup_s: Seconds


class CopyTimes(Frozen):
    """Fixed times of the phases of one copy by a DMA engine; the copy's own is its latency."""

    control_s: Seconds
    schedule_s: Seconds
    copy_s: Seconds
    sync_s: Seconds


class Dma(Frozen):
    """Data movement by copy engines; each (source, destination) copy runs on one engine.

    setup_s: as schedules see it. phases: how a single copy spends its time, where that was measured.
    """

    num_engines: Annotated[Integer, knob(structural=True, ge=1, le=256)]
    bytes_per_s: Bandwidth
    setup_s: Seconds
    phases: CopyTimes | None = None


Slowdown = Annotated[Number, Field(ge=1, le=16)]


class Contention(Frozen):
    """What operators lose beside one another, beyond CUs, HBM bandwidth and links that they share: times as long.

    static_gemm_beside_cus, dynamic_gemm_beside_cus: a GEMM, by how its tiles are assigned, while kernels move data.
    cu_copy_beside_gemm: a CU's byte of a transfer, while a GEMM runs. dma_beside_gemm: a transfer by DMA engines and
    the GEMM beside it, both. These four are all that the project calibrates of contention (docs/models.md).
    """

    static_gemm_beside_cus: Slowdown
    dynamic_gemm_beside_cus: Slowdown
    cu_copy_beside_gemm: Slowdown
    dma_beside_gemm: Slowdown


class Power(Frozen):
    """The activity model of `simulators/costs/power.py`: board power with all busy, idle power [W], energy of a byte
    [J].
    """

    board_w: Annotated[Number, Field(gt=0)]
    idle_w: Annotated[Number, Field(gt=0)]
    hbm_j_per_byte: Annotated[Number, Field(ge=0)]
    link_j_per_byte: Annotated[Number, Field(ge=0)]


class Cache(Grown):
    """A cache of sets of `ways` lines, of which the least recently used goes. bytes_per_s: of all of it, into CUs."""

    bytes: Annotated[Bytes, Field(ge=1024)]
    ways: Annotated[Integer, Field(ge=1, le=1024)]
    bytes_per_s: Bandwidth | None = None


class Tracker(Frozen):
    """Counters at the memory controller that trigger a DMA command once all updates of a workgroup's tile are in (T3,
    arXiv:2401.16677): one entry for each workgroup in flight.
    """

    num_entries: Annotated[Integer, Field(ge=1, le=2**20)]
    bytes_per_entry: Annotated[Integer, Field(ge=1, le=2**16)]


class Gpu(Grown):
    """One GPU. `matrix_flop_per_s_per_cu` is the sustained rate of one CU while all CUs are busy.

    llc: the last-level cache, before the HBM. llc, pim, tracker: None where a GPU has none.
    """

    num_cus: Annotated[Integer, Field(ge=1, le=4096)]
    matrix_flop_per_s_per_cu: FlopPerSecond
    hbm_bytes_per_s: Bandwidth
    hbm_bytes: Bytes
    kernel_launch_s: Seconds
    gemm: GemmLibrary
    cu_copy: CuCopy
    dma: Dma
    contention: Contention
    power: Power | None = None
    llc: Cache | None = None
    pim: Pim | None = None
    tracker: Tracker | None = None


class Node(Grown):
    """GPUs that reach each other directly (`mesh`), through a `switch`, or around a bidirectional `ring`.

    link_bytes_per_s: achievable payload rate of one link in one direction. A GPU has num_gpus - 1 links on a
    mesh, one port of as many links' bandwidth at a switch, and two links on a ring. One that is alone has none.
    hop_latency_s: until the first byte arrives, where schedules send without a copy's set-up.
    """

    num_gpus: Annotated[Integer, knob(structural=True, ge=1, le=64)]
    topology: Annotated[Topology, knob(structural=True)]
    link_bytes_per_s: Bandwidth
    hop_latency_s: Seconds | None = None


class Nic(Frozen):
    """Network interfaces of a node.

    bytes_per_s: of one, in one direction. latency_s: of a message from one to another, without switches. message_s:
    how long a message occupies one, whatever its size. placement: behind the `cpu` (data goes through host memory), on
    a `pcie_switch` with the GPUs, or on the `gpu`'s own die. pcie_bytes_per_s: of the PCIe link of a GPU or of a NIC.
    host_bytes_per_s: of a node's host memory. hop_s: of a PCIe switch or bridge.
    """

    num_nics: Annotated[Integer, knob(structural=True, ge=1, le=64)]
    bytes_per_s: Bandwidth
    latency_s: Seconds
    message_s: Seconds
    placement: Annotated[Placement, knob(structural=True)]
    pcie_bytes_per_s: Bandwidth
    host_bytes_per_s: Bandwidth
    hop_s: Seconds


class Network(Frozen):
    """What joins the nodes.

    `rail`: one switch for the first NIC of all nodes, one for the second, ..., and a spine. `fat_tree`: leaf switches
    of `leaf_nodes` nodes, and a spine. Oversubscription is of spines. `torus`: two-dimensional, as square as can be,
    the ports of a node's NICs dealt out evenly over its directions. hop_s: of a switch, or of a node that forwards.
    """

    topology: Annotated[Literal["rail", "fat_tree", "torus"], knob(structural=True)]
    leaf_nodes: Annotated[Integer, knob(structural=True, ge=1, le=4096)]
    oversubscription: Annotated[Number, Field(ge=1, le=64)]
    hop_s: Seconds


class Fabric(Frozen):
    """Nodes, each as `system.node` says, and how they reach one another (equations in `simulators/costs/fabric.py`).

    simulated: one node that stands for all, or every one with a load of its own. imbalance: the largest load of a node
    over the mean, less one; loads rise linearly from node to node (as in `simulators/overlap/node.py`).
    """

    num_nodes: Annotated[Integer, knob(structural=True, ge=1, le=4096)]
    nic: Nic
    network: Network
    simulated: Annotated[Literal["one", "all"], knob(structural=True)]
    imbalance: Annotated[Number, Field(ge=0, lt=1)]


class Persistent(Frozen):
    """What kernels need that stay on the GPU and communicate by themselves, and what streaming kernels reach.

    post_s: a put by one thread, from the end of a slice to the network. poll_s: from a flag's arrival until who waits
    for it goes on. gather_efficiency, stream_efficiency: share of the HBM rate that random rows, and long rows, reach.
    in_flight_bytes_per_cu: requests under way, at the occupancy of a kernel that does not communicate.
    memory_latency_s: of one.
    """

    post_s: Seconds
    poll_s: Seconds
    gather_efficiency: Annotated[Fraction, Field(gt=0)]
    stream_efficiency: Annotated[Fraction, Field(gt=0)]
    in_flight_bytes_per_cu: Annotated[Bytes, Field(gt=0)]
    memory_latency_s: Annotated[Seconds, Field(gt=0)]


class System(Sourced, Grown):
    """Hardware of a design. `cost_weights` (dotted path -> weight) and `cost_reference` define the cost proxy.

    fabric: None for a node by itself. persistent: None where nothing is known of such kernels.
    """

    name: str
    description: str = ""
    gpu: Gpu
    node: Node
    fabric: Fabric | None = None
    persistent: Persistent | None = None
    cost_weights: Mapping[str, Annotated[Number, Field(ge=0, le=1e6)]]
    cost_reference: Mapping[str, Annotated[Number, Field(gt=0, le=1e20)]]

    @field_validator("cost_weights")
    @classmethod
    def _weighs_numbers_of_a_system(cls, weights: Mapping[str, float], info: ValidationInfo) -> Mapping[str, float]:
        parts = {name: info.data[name] for name in ("gpu", "node", "fabric") if info.data.get(name)}
        numbers = {
            f"{name}.{path}" for name, part in parts.items() for path, value, _ in leaves(part) if is_fact(value)
        }
        unknown = [path for path in weights if {"gpu", "node"} <= set(parts) and path not in numbers]
        if unknown:
            raise ValueError(f"names {', '.join(unknown)}, no number of a system")
        if not sum(weights.values()) > 0:
            raise ValueError("must not all be zero: the cost proxy is their weighted mean")
        return weights

    @field_validator("cost_reference")
    @classmethod
    def _has_what_is_weighed(cls, reference: Mapping[str, float], info: ValidationInfo) -> Mapping[str, float]:
        absent = set(info.data.get("cost_weights", ())) - set(reference)
        if absent:
            raise ValueError(f"has no value for {', '.join(sorted(absent))}, which cost_weights names")
        return reference

    def facts(self) -> Iterator[tuple[str, Any, str, str]]:
        """(dotted path, value, provenance, source) of every constant."""
        return self.facts_below("system")


def system_of(tree: Mapping[str, Any]) -> System:
    """A validated system. Raises ConfigError with every problem."""
    check = Problems()
    found = check.model(System, tree, path="system")
    check.done()
    assert found is not None
    return found
