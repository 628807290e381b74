"""A machine as schedules see it: what lowering a schedule to a task graph reads of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import numpy as np
from pydantic import Field

from dse.values import put
from dse.values.units import Number
from simulators.hardware.machine import System, View
from simulators.hardware.network import Node

SCHEDULE_NEEDS = (
    *("gpu.matrix_flop_per_s_per_cu", "gpu.hbm_bytes_per_s", "gpu.hbm_bytes", "gpu.kernel_launch_s", "gpu.gemm"),
    *("gpu.cu_copy", "gpu.dma", "gpu.contention", "node", "node.topology", "node.link_bytes_per_s"),
)
"""What schedules need of a machine."""

_OF_FITTED = ("gpu.efficiency", "gpu.loaded", "gpu.fitted_on")


class ScheduleSystem(View):
    """Machine of a design of the overlap backend: sustained rates, kernels, engines and links.

    gpu.peak_flop_per_s gives ratios between formats.
    """

    needs: ClassVar[tuple[str, ...]] = (*SCHEDULE_NEEDS, "cost_weights", "cost_reference")
    presumes: ClassVar[Mapping[str, Any]] = {"costs": {}, "costs.gemm": "fitted", "costs.collective": "library"}
    reads: ClassVar[tuple[str, ...]] = (
        *("gpu.num_cus", "gpu.num_links", "gpu.persistent", "gpu.loaded", "gpu.llc", "gpu.pim"),
        *("gpu.tracker", "gpu.shader_engines", "gpu.peak_flop_per_s", "gpu.efficiency"),
        *("gpu.fitted_on", "gpu.peak_cus", "gpu.stream_efficiency", "gpu.clock"),
        *("node.num_gpus", "node.hop_latency_s", "node.library", "node.in_switch", "fabric"),
    )
    most: ClassVar[Mapping[str, int]] = {"node.num_gpus": 144}  # twice a rack; work grows with their square
    only_for: ClassVar[Mapping[str, Mapping[str, tuple[str, ...]]]] = {
        "gemm": dict.fromkeys(("fitted", "own"), _OF_FITTED),
        "collective": {"library": ("node.library",)},
    }


class PoweredSystem(ScheduleSystem):
    """The same with the board's power, whose limit gives the clock under load: `gpu.loaded` has no part in it."""

    reads: ClassVar[tuple[str, ...]] = (*(path for path in ScheduleSystem.reads if path != "gpu.loaded"), "gpu.power")


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


def has_links(machine: System) -> bool:
    """Return whether the rates of a machine's links and of kernels that copy over them are known."""
    gpu, node = machine.gpu, machine.node
    return not (gpu.cu_copy is None or node is None or node.topology is None or node.link_bytes_per_s is None)


def links_of(machine: System, num_gpus: int) -> System:
    """Some GPUs of a node of a machine. Raises ValueError for a machine without link rates or kernels that copy."""
    if not has_links(machine):
        raise ValueError("links need gpu.cu_copy, node.topology and node.link_bytes_per_s")
    return machine.model_copy(update={"node": machine.node.model_copy(update={"num_gpus": num_gpus})})


def schedules_see(machine: System, num_gpus: int, efficiency: Mapping[str, Any]) -> System:
    """Some GPUs of a node of a machine as schedules see them. efficiency: constants of GEMMs by the format of inputs.

    The machine has all parts that schedules need (`simulators.hardware.device.ScheduledDevice`). At a switch all links
    of a GPU reach any peer, so that fewer peers have more of them each, and a copy to a peer goes as much faster.
    """
    gpu, all_gpus = machine.gpu.as_described.model_copy(update={"efficiency": efficiency}), machine.node.num_gpus
    node = machine.node.model_copy(update={"num_gpus": num_gpus})
    if node.topology == "switch" and num_gpus > 1 and np.any(num_gpus < np.asarray(all_gpus)):
        wider = np.maximum(1.0, (np.asarray(all_gpus) - 1) / (num_gpus - 1))
        node = widen(node, wider)
        gpu = put(gpu, "dma.bytes_per_s", wider * gpu.dma.bytes_per_s)
    return machine.model_copy(update={"gpu": gpu, "node": node})


def widen(node: Node, factor: Any) -> Node:
    """A node with more links to each peer of the same GPUs, which its library had when it was measured."""
    changes: dict[str, Any] = {"link_bytes_per_s": factor * node.link_bytes_per_s}
    library = node.library
    if library is not None and library.link_bytes_per_s is not None:
        links = factor * library.link_bytes_per_s
        changes["library"] = library.model_copy(update={"link_bytes_per_s": links})
    return node.model_copy(update=changes)
