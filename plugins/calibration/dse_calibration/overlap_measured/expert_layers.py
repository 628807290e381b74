"""Rows of a layer of experts and its collective: an all-gather before grouped GEMMs, or a reduce-scatter after them.

T tokens, each for k of E experts, whose width g_t GPUs split, and which g_e groups of these share. A GPU multiplies
k T / g_e rows, in E / g_e groups, and each group wastes half a tile of rows in the mean; with w = 1 + tile E / (2 k T):

    C = w (time of the grouped GEMM) + reading the routed rows once, where a token's outputs are added before they leave
    D, B = time of all tokens, by whatever moves them: shards of the GPUs arrive, or leave, one after another

and the kernel takes the pipeline of `simulators.costs.tile_pipeline` with a tile for each GPU's shard (assumed of the
order of tiles). Copy engines cannot add, so that a kernel reads what they brought. What it replaces runs one after the
other: the library's collective, then a GEMM for each expert from a host that waits for the GPU (`ExpertKernel`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from simulators.costs.gemm import GemmShape, gemm_cost, gemms_of
from simulators.costs.sharing import Sharing, beside_engines
from simulators.costs.tile_pipeline import tile_pipeline_s
from simulators.costs.transfer import TransferMode, alone, library_cus
from simulators.hardware.network import Pattern
from simulators.hardware.parts import ELEMENT_BYTES
from simulators.hardware.schedule_system import ScheduleSystem
from simulators.steps.overlap.implementations import ExpertKernel

OPS: Mapping[str, Pattern] = {"moe_ag_scatter_gemm": "all_gather", "moe_gemm_gather_rs": "reduce_scatter"}
"""Operator of a row -> its collective."""
_SPLIT = re.compile(r"TPxEP\s*(\d+)\s*x\s*(\d+)")
_EXPERTS = re.compile(r"\b(\d+) experts|\b(?:E|experts)\s*=\s*(\d+)")
_PICKED = re.compile(r"\btop-?k?[- =]*(\d+)", re.IGNORECASE)


@dataclass(frozen=True)
class ExpertLayer:
    """Sizes of a row: m tokens, n outputs and k inputs of all GPUs. tensor, groups: g_t and g_e of the module."""

    pattern: Pattern
    m: int
    n: int
    k: int
    precision: str
    experts: int
    per_token: int
    tensor: int
    groups: int

    @classmethod
    def of(cls, cells: Mapping[str, str], gpus: int) -> ExpertLayer | None:
        """Read a row, whose note says how many experts there are and what splits them; None where it does not."""
        note = cells.get("note", "")
        split, experts, picked = (pattern.search(note) for pattern in (_SPLIT, _EXPERTS, _PICKED))
        if experts is None or picked is None:
            return None
        tensor, groups = (gpus, 1) if split is None else (int(split[1]), int(split[2]))
        m, n, k = (int(cells[name]) for name in ("m", "n", "k"))
        counts = int(experts[1] or experts[2]), int(picked[1]), tensor, groups
        return cls(OPS[cells["op"]], m, n, k, cells["dtype"], *counts)

    @property
    def gathers(self) -> bool:
        """True if tokens are gathered before the products."""
        return self.pattern == "all_gather"

    @property
    def rows(self) -> float:
        """Rows that a GPU multiplies."""
        return self.m * self.per_token / self.groups

    @property
    def local_experts(self) -> float:
        """Experts of which a GPU has a part."""
        return self.experts / self.groups

    @property
    def payload_bytes(self) -> float:
        """All tokens, as they are gathered or scattered."""
        return float(ELEMENT_BYTES[self.precision] * self.m * (self.k if self.gathers else self.n))

    @property
    def routed_bytes(self) -> float:
        """Rows of a GPU before its products, or after them."""
        return float(ELEMENT_BYTES[self.precision] * self.rows * (self.k if self.gathers else self.n))

    def gemm_s(self, system: ScheduleSystem, *, held: Any = 0, batched: bool = True) -> float:
        """Time [s] of its products on the SMs that others leave: as a grouped GEMM, or one after another."""
        n, k = (self.n / self.tensor, self.k) if self.gathers else (self.n, self.k / self.tensor)
        rows, count = self.rows / self.local_experts, self.local_experts
        shape = GemmShape(n, rows, k, batch=count if batched else 1.0, transposed_a=True)
        cost = gemm_cost(gemms_of(system, self.precision), shape, taken=held)
        return float((cost.seconds + cost.launch_s) * (1.0 if batched else count))


def serial_s(layer: ExpertLayer, software: ExpertKernel, system: ScheduleSystem) -> tuple[float, float, float]:
    """Times [s] of a layer one after the other, of its products, and of its collective."""
    by = TransferMode("cu", library_cus(system, layer.pattern), layer.pattern)
    moved, multiplied = float(alone(system, layer.payload_bytes, by=by)), layer.gemm_s(system, batched=False)
    passes = software.rows_before if layer.gathers else software.rows_after
    ordered = passes * layer.routed_bytes / _stream_rate(system)
    return moved + multiplied + ordered + layer.local_experts * software.expert_s, multiplied, moved


def fused_s(layer: ExpertLayer, software: ExpertKernel, system: ScheduleSystem) -> float:
    """Time [s] of a layer in one kernel."""
    mover = software.gathers if layer.gathers else software.scatters
    sms = 0 if mover != "cu" else library_cus(system, layer.pattern) if software.num_sms is None else software.num_sms
    computed, gpus = layer.gemm_s(system, held=sms), system.node.num_gpus
    if mover == "cu":
        computed = float(Sharing.of(system.gpu).gemm(computed, layer.gemm_s(system)))
    elif mover == "dma":
        computed = float(computed / beside_engines(system.gpu, withheld=0))
    computed *= 1 + software.tile_rows * layer.local_experts / (2 * layer.rows)
    moved = float(alone(system, layer.payload_bytes, by=TransferMode(mover, sms, layer.pattern)))
    if layer.gathers:
        return float(tile_pipeline_s(moved, computed, 0.0, tiles=gpus))
    computed += layer.routed_bytes / _stream_rate(system)
    # what copy engines brought is read, and its sum written
    added = layer.payload_bytes * (gpus + 1) / gpus / _stream_rate(system) if mover == "dma" else 0.0
    return float(tile_pipeline_s(0.0, computed, moved, tiles=gpus)) + added


def _stream_rate(system: ScheduleSystem) -> float:
    """Rate of kernels that memory bounds [bytes/s]."""
    return float(np.asarray(system.gpu.stream_share * np.asarray(system.gpu.hbm_bytes_per_s)))
