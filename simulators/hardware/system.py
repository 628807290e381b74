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
    """A part of a system with fields added later; a field of None is left out, so that old designs keep their keys."""

    def __iter__(self) -> Generator[tuple[str, Any], None, None]:
        """Iterate over the fields that are not None."""
        yield from ((name, value) for name, value in super().__iter__() if value is not None)


class Tile(Frozen):
    """A GEMM macro-tile of the library: output rows x columns, and its rate relative to the best tile."""

    rows: Annotated[Integer, Field(ge=8, le=1024)]
    cols: Annotated[Integer, Field(ge=8, le=1024)]
    efficiency: Annotated[Number, Field(gt=0, le=1)]


class GemmLibrary(Grown):
    """Costs of a GEMM kernel beside its FLOP (equations in `simulators/costs/gemm_waves.py`).

    assignment: the hardware assigns workgroups in waves (`static`), or resident workgroups take tiles as they become
    free (`dynamic`: persistent, work-stealing). workgroups_per_cu: resident workgroups of a CU, where stages are
    simulated (`simulators/costs/gemm_stages.py`). Where kernels share a GPU (`simulators/costs/gemm_sharing.py`), this
    number follows from the register_bytes and lds_bytes of a CU and the needs of a tile, with tile_depth of k in the
    LDS at once. half_occupancy: workgroups on a CU that reach half of its rate.
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

    num_cus: CUs that a collective takes by default (twice as many if `all_to_all_factor` is 1/2).
    """

    num_cus: Annotated[Integer, Field(ge=1, le=4096)]
    bytes_per_s_per_cu: Bandwidth
    all_to_all_factor: Annotated[Number, Field(gt=0, le=1)]
    link_efficiency: Annotated[Number, Field(gt=0, le=1)]
    setup_s: Seconds


class CopyTimes(Frozen):
    """Fixed times of the phases of one copy by a DMA engine; copy_s is the latency of the copy itself."""

    control_s: Seconds
    schedule_s: Seconds
    copy_s: Seconds
    sync_s: Seconds


class Dma(Frozen):
    """Data movement by copy engines; each (source, destination) copy runs on one engine.

    setup_s: set-up time in schedules. phases: times of the phases of a single copy, if measured.
    """

    num_engines: Annotated[Integer, knob(structural=True, ge=1, le=256)]
    bytes_per_s: Bandwidth
    setup_s: Seconds
    phases: CopyTimes | None = None


Slowdown = Annotated[Number, Field(ge=1, le=16)]


class Contention(Frozen):
    """Slowdowns of operators that run side by side, beyond their sharing of CUs, HBM bandwidth and links.

    static_gemm_beside_cus, dynamic_gemm_beside_cus: of a GEMM, by the assignment of its tiles, while kernels move data.
    cu_copy_beside_gemm: of a CU's byte of a transfer, while a GEMM runs. dma_beside_gemm: of both a transfer by DMA
    engines and the GEMM beside it. These four are the only calibrated constants of contention (docs/models.md).
    """

    static_gemm_beside_cus: Slowdown
    dynamic_gemm_beside_cus: Slowdown
    cu_copy_beside_gemm: Slowdown
    dma_beside_gemm: Slowdown


class Power(Frozen):
    """Activity model of `simulators/costs/power.py`: board power at full load, idle power [W], energy of a byte [J]."""

    board_w: Annotated[Number, Field(gt=0)]
    idle_w: Annotated[Number, Field(gt=0)]
    hbm_j_per_byte: Annotated[Number, Field(ge=0)]
    link_j_per_byte: Annotated[Number, Field(ge=0)]


class Cache(Grown):
    """A set-associative cache of `ways` lines a set with LRU replacement. bytes_per_s: total rate into the CUs."""

    bytes: Annotated[Bytes, Field(ge=1024)]
    ways: Annotated[Integer, Field(ge=1, le=1024)]
    bytes_per_s: Bandwidth | None = None


class Tracker(Frozen):
    """Counters at the memory controller (T3, arXiv:2401.16677), one entry for each workgroup in flight.

    A counter triggers a DMA command once all updates of its workgroup's tile have arrived.
    """

    num_entries: Annotated[Integer, Field(ge=1, le=2**20)]
    bytes_per_entry: Annotated[Integer, Field(ge=1, le=2**16)]


class Gpu(Grown):
    """One GPU. `matrix_flop_per_s_per_cu` is the sustained rate of one CU while all CUs are busy.

    llc: the last-level cache, before the HBM. llc, pim, tracker: None if the GPU has none.
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
    mesh, one port of as many links' bandwidth at a switch, and two links on a ring; a single GPU has none.
    hop_latency_s: time until the first byte arrives, where schedules send without a copy's set-up.
    """

    num_gpus: Annotated[Integer, knob(structural=True, ge=1, le=64)]
    topology: Annotated[Topology, knob(structural=True)]
    link_bytes_per_s: Bandwidth
    hop_latency_s: Seconds | None = None


class Nic(Frozen):
    """Network interfaces of a node.

    bytes_per_s: rate of one NIC in one direction. latency_s: latency of a message between two NICs, without switches.
    message_s: time that a message occupies a NIC, whatever its size. placement: behind the `cpu` (data goes through
    host memory), on a `pcie_switch` with the GPUs, or on the die of the `gpu`. pcie_bytes_per_s: rate of the PCIe link
    of a GPU or of a NIC. host_bytes_per_s: rate of a node's host memory. hop_s: latency of a PCIe switch or bridge.
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
    """The network between the nodes.

    `rail`: one switch for the first NIC of all nodes, one for the second, ..., and a spine. `fat_tree`: leaf switches
    of `leaf_nodes` nodes, and a spine. `torus`: two-dimensional, as square as possible, with the ports of a node's NICs
    spread evenly over its directions. oversubscription: of the spines. hop_s: latency of a switch or forwarding node.
    """

    topology: Annotated[Literal["rail", "fat_tree", "torus"], knob(structural=True)]
    leaf_nodes: Annotated[Integer, knob(structural=True, ge=1, le=4096)]
    oversubscription: Annotated[Number, Field(ge=1, le=64)]
    hop_s: Seconds


class Fabric(Frozen):
    """Nodes as in `system.node`, and the network between them (equations in `simulators/costs/fabric.py`).

    simulated: one node that stands for all, or every node with its own load. imbalance: the largest load of a node over
    the mean, minus one; loads rise linearly from node to node (as in `simulators/overlap/node.py`).
    """

    num_nodes: Annotated[Integer, knob(structural=True, ge=1, le=4096)]
    nic: Nic
    network: Network
    simulated: Annotated[Literal["one", "all"], knob(structural=True)]
    imbalance: Annotated[Number, Field(ge=0, lt=1)]


class Persistent(Frozen):
    """Constants of persistent kernels that communicate by themselves, and of streaming kernels.

    post_s: time of a put by one thread, from the end of a slice to the network. poll_s: time from a flag's arrival
    until the waiting thread continues. gather_efficiency, stream_efficiency: share of the HBM rate that random rows and
    long rows reach. in_flight_bytes_per_cu: outstanding requests at the occupancy of a kernel that does not
    communicate. memory_latency_s: latency of a request.
    """

    post_s: Seconds
    poll_s: Seconds
    gather_efficiency: Annotated[Fraction, Field(gt=0)]
    stream_efficiency: Annotated[Fraction, Field(gt=0)]
    in_flight_bytes_per_cu: Annotated[Bytes, Field(gt=0)]
    memory_latency_s: Annotated[Seconds, Field(gt=0)]


class System(Sourced, Grown):
    """Hardware of a design. `cost_weights` (dotted path -> weight) and `cost_reference` define the cost proxy.

    fabric: None for a single node. persistent: None if the constants of such kernels are not known.
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
        """Yield (dotted path, value, provenance, source) of every constant."""
        return self.facts_below("system")


def system_of(tree: Mapping[str, Any]) -> System:
    """Validate the tree of a system. Raises ConfigError with every problem."""
    check = Problems()
    system = check.model(System, tree, path="system")
    check.done()
    assert system is not None
    return system
