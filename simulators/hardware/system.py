"""A machine as schedules see it: what lowering a schedule to a task graph reads of it."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Annotated, Any, ClassVar, TypeVar

import numpy as np
from pydantic import Field

from dse.errors import Problems
from dse.units import Number
from dse.values import LABELS, knob, put
from simulators.hardware.machine import CollectiveModel, CostModels, GemmModel, Gpu, Hardware, View
from simulators.hardware.network import Node

_Part = TypeVar("_Part", Gpu, Node)
_OF_LINKS = ("gpu.num_cus", "gpu.cu_copy", "gpu.dma", "node.num_gpus", "node.topology", "node.link_bytes_per_s")


class ScheduleCosts(CostModels):
    """Models of the costs of operators in schedules."""

    gemm: Annotated[GemmModel, knob(structural=True)] = "waves"
    collective: Annotated[CollectiveModel, knob(structural=True)] = "links"


class System(View):
    """Hardware of a design of the overlap backend: sustained rates, kernels, engines and links.

    gpu.peak_flop_per_s gives ratios between formats.
    """

    needs: ClassVar[tuple[str, ...]] = (
        *("gpu.matrix_flop_per_s_per_cu", "gpu.hbm_bytes_per_s", "gpu.hbm_bytes", "gpu.kernel_launch_s", "gpu.gemm"),
        *("gpu.cu_copy", "gpu.dma", "gpu.contention", "node.topology", "node.link_bytes_per_s"),
    )
    reads: ClassVar[tuple[str, ...]] = (
        *needs,
        *("gpu.num_cus", "gpu.num_links", "gpu.persistent", "gpu.power", "gpu.loaded", "gpu.llc", "gpu.pim"),
        *("gpu.tracker", "gpu.shader_engines", "gpu.peak_flop_per_s", "gpu.peak_hbm_bytes_per_s", "gpu.efficiency"),
        *("node.num_gpus", "node.hop_latency_s", "node.library", "fabric", "costs", "cost_weights", "cost_reference"),
    )
    most: ClassVar[Mapping[str, int]] = {"node.num_gpus": 64}
    only_for: ClassVar[Mapping[str, Mapping[str, tuple[str, ...]]]] = {
        "gemm": {"fitted": ("gpu.efficiency", "gpu.peak_hbm_bytes_per_s", "gpu.loaded")},
        "collective": {"library": ("node.library",)},
    }
    node: Node
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
    """Links of some GPUs of a machine, and what moves data over them, as schedules see them.

    Raises ValueError for a machine without link rates or kernels that copy.
    """
    gpu, node = machine.gpu, machine.node
    if gpu.cu_copy is None or node is None or node.topology is None or node.link_bytes_per_s is None:
        raise ValueError("links need gpu.cu_copy, node.topology and node.link_bytes_per_s")
    return _system(machine, num_gpus, _OF_LINKS)


def schedules_see(machine: Hardware, num_gpus: int, efficiency: Mapping[str, Any]) -> System:
    """Some GPUs of a node of a machine as schedules see them. efficiency: constants of GEMMs by the format of inputs.

    The machine has all parts that schedules need (`simulators.hardware.device.ScheduledDevice`). At a switch all links
    of a GPU reach any peer, so that fewer peers have more of them each, and a copy to a peer goes as much faster.
    """
    costs = {name: value for name, value in machine.costs or () if name in ScheduleCosts.model_fields}
    system = _system(machine, num_gpus, System.reads, **costs)
    all_gpus = np.asarray(0 if machine.node is None else machine.node.num_gpus)
    gpu, node = system.gpu.model_copy(update={"efficiency": efficiency}), system.node
    if node.topology == "switch" and num_gpus > 1 and np.any(num_gpus < all_gpus):
        wider = np.maximum(1.0, (all_gpus - 1) / (num_gpus - 1))
        node = node.model_copy(update={"link_bytes_per_s": wider * node.link_bytes_per_s})
        gpu = put(gpu, "dma.bytes_per_s", wider * gpu.dma.bytes_per_s)
    return system.model_copy(update={"gpu": gpu, "node": node})


def _system(machine: Hardware, num_gpus: int, read: Container[str], **costs: Any) -> System:
    """Some GPUs of a node of a machine, whose numbers may be arrays. read: dotted paths that are kept of it."""
    assert machine.node is not None
    parts: dict[str, Any] = {
        "gpu": _without_unread(machine.gpu, "gpu.", read),
        "node": _without_unread(machine.node, "node.", read).model_copy(update={"num_gpus": num_gpus}),
        "costs": ScheduleCosts.model_construct(**costs),
    }
    return System.model_construct(name=machine.name, **parts)


def _without_unread(part: _Part, above: str, read: Container[str]) -> _Part:
    """A part of a machine without what is not read of it."""
    unread = [name for name in type(part).model_fields if name not in LABELS and f"{above}{name}" not in read]
    return part.model_copy(update=dict.fromkeys(unread))


def system_of(tree: Mapping[str, Any]) -> System:
    """Validate the tree of a machine for schedules. Raises ConfigError with every problem."""
    check = Problems()
    system = check.model(System, tree, path="system")
    check.done()
    assert system is not None
    return system
