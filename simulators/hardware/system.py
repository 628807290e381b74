"""A machine as schedules see it: what lowering a schedule to a task graph reads of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import numpy as np
from pydantic import Field

from dse.errors import Problems
from dse.units import FlopPerSecond, Integer, Number, Seconds
from dse.values import knob
from simulators.hardware.machine import CollectiveModel, CostModels, GemmModel, Gpu, Hardware, View, own_fields
from simulators.hardware.network import CollectiveLibrary, Fabric, Node, Topology
from simulators.hardware.parts import (
    Bandwidth,
    Cache,
    Capacity,
    Contention,
    CuCopy,
    Dma,
    Efficiency,
    GemmLibrary,
    LaunchTime,
    LoadedClock,
    PeakFormat,
    Persistent,
    Power,
    Precision,
    ShaderEngines,
    Tracker,
)
from simulators.hardware.pim import Pim


class ScheduleGpu(View, Gpu):
    """One GPU as schedules see it: its sustained rates, its kernels, and its engines.

    peak_flop_per_s gives ratios between formats. peak_hbm_bytes_per_s and efficiency are read by the cost model
    `fitted` only.
    """

    num_cus: Annotated[Integer, Field(ge=1, le=4096)]
    num_links: Annotated[Integer | None, knob(structural=True, ge=0, le=64)] = None
    matrix_flop_per_s_per_cu: FlopPerSecond
    hbm_bytes_per_s: Bandwidth
    hbm_bytes: Capacity
    kernel_launch_s: LaunchTime
    gemm: GemmLibrary
    cu_copy: CuCopy
    dma: Dma
    contention: Contention
    persistent: Persistent | None = None
    power: Power | None = None
    loaded: LoadedClock | None = None
    llc: Cache | None = None
    pim: Pim | None = None
    tracker: Tracker | None = None
    shader_engines: ShaderEngines | None = None
    peak_flop_per_s: Mapping[PeakFormat, Annotated[FlopPerSecond, Field(ge=1e9)]] | None = None
    peak_hbm_bytes_per_s: Bandwidth | None = None
    efficiency: Mapping[Precision, Efficiency] | None = None


class LinkedNode(View, Node):
    """GPUs and the links between them; the cost model `library` reads what collectives reach, too."""

    num_gpus: Annotated[Integer, knob(structural=True, ge=1, le=64)]
    topology: Annotated[Topology, knob(structural=True)]
    link_bytes_per_s: Bandwidth
    hop_latency_s: Seconds | None = None
    library: CollectiveLibrary | None = None


class ScheduleCosts(CostModels):
    """Models of the costs of operators in schedules."""

    gemm: Annotated[GemmModel, knob(structural=True)] = "waves"
    collective: Annotated[CollectiveModel, knob(structural=True)] = "links"


class System(View, Hardware):
    """Hardware of a design of the overlap backend."""

    only_for: ClassVar[Mapping[str, Mapping[str, tuple[str, ...]]]] = {
        "gemm": {"fitted": ("gpu.efficiency", "gpu.peak_hbm_bytes_per_s", "gpu.loaded")},
        "collective": {"library": ("node.library",)},
    }
    gpu: ScheduleGpu
    node: LinkedNode
    fabric: Fabric | None = None
    costs: ScheduleCosts = ScheduleCosts()
    cost_weights: Mapping[str, Annotated[Number, Field(ge=0, le=1e6)]]
    cost_reference: Mapping[str, Annotated[Number, Field(gt=0, le=1e20)]]


class WholeNode(System):
    """System whose GPUs are all simulated.

    imbalance: the largest share of the rows over the mean share, less one. Shares rise linearly from GPU to GPU, from
    1 - imbalance to 1 + imbalance of the mean, and are whole rows.
    """

    imbalance: Annotated[Number, Field(ge=0, lt=1)]

    @classmethod
    def of(cls, system: System, imbalance: float) -> WholeNode:
        """Build from a system, whose numbers may be arrays over a grid."""
        return cls.model_construct(**dict(system), imbalance=imbalance)


def links_of(machine: Hardware, num_gpus: int) -> System:
    """Links of some GPUs of a machine, and what moves data over them, as schedules see them; nothing else is there.

    Raises ValueError for a machine without link rates or kernels that copy.
    """
    gpu, node = machine.gpu, machine.node
    if gpu.cu_copy is None or node is None or node.topology is None or node.link_bytes_per_s is None:
        raise ValueError("links need gpu.cu_copy, node.topology and node.link_bytes_per_s")
    copies = {name: getattr(gpu, name) for name in ("num_cus", "cu_copy", "dma")}
    links = {name: getattr(node, name) for name in ("topology", "link_bytes_per_s")}
    parts: dict[str, Any] = {
        "gpu": ScheduleGpu.model_construct(**copies),
        "node": LinkedNode.model_construct(num_gpus=num_gpus, **links),
    }
    return System.model_construct(**parts)


def schedules_see(machine: Hardware, num_gpus: int, efficiency: Mapping[str, Any]) -> System:
    """Some GPUs of a node of a machine as schedules see them. efficiency: constants of GEMMs by the format of inputs.

    The machine has all parts that schedules need (`simulators.hardware.device.ScheduledDevice`). At a switch all links
    of a GPU reach any peer, so that fewer peers have more of them each, and a copy to a peer goes as much faster.
    """
    gpu = {name: getattr(machine.gpu, name) for name in own_fields(ScheduleGpu) if hasattr(machine.gpu, name)}
    node = {name: getattr(machine.node, name) for name in own_fields(LinkedNode) if hasattr(machine.node, name)}
    costs = {name: value for name, value in machine.costs or () if name in ScheduleCosts.model_fields}
    if node.get("topology") == "switch" and num_gpus > 1 and np.any(num_gpus < np.asarray(node["num_gpus"])):
        wider = np.maximum(1.0, (np.asarray(node["num_gpus"]) - 1) / (num_gpus - 1))
        node["link_bytes_per_s"] = wider * node["link_bytes_per_s"]
        gpu["dma"] = gpu["dma"].model_copy(update={"bytes_per_s": wider * gpu["dma"].bytes_per_s})
    parts: dict[str, Any] = {
        "gpu": ScheduleGpu.model_construct(**{**gpu, "efficiency": efficiency}),
        "node": LinkedNode.model_construct(**{**node, "num_gpus": num_gpus}),
        "costs": ScheduleCosts.model_construct(**costs),
    }
    return System.model_construct(name=machine.name, **parts)


def system_of(tree: Mapping[str, Any]) -> System:
    """Validate the tree of a machine for schedules. Raises ConfigError with every problem."""
    check = Problems()
    system = check.model(System, tree, path="system")
    check.done()
    assert system is not None
    return system
