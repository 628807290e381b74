"""SMs of a GPU as its timing reads them, each constant with its source; the files are `dse_ptx/sms/*.yaml`.

What lies below the SMs (L2, DRAM, address mapping, clock) is that of `conf/gpu`, with what a file puts over it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from dse.config.options import load_yaml
from dse.errors import ConfigError, Problem, did_you_mean, validate_as
from dse.values import Frozen
from dse.values.units import Bytes, Integer, Number
from simulators.hardware.machine import merged, tree_of_gpu
from simulators.hardware.memory_system import MemorySystem
from simulators.hardware.parts import SourcedValue

FOLDER = Path(__file__).parent / "sms"
Cycles = Annotated[Integer, Field(ge=0, le=100_000)]
PIPES = ("integer", "fp32", "fp64", "fp16", "special", "tensor", "control", "shared", "global")
"""Pipelines: of a scheduler, but for the last two, which are the SM's."""
# the first seven are of each scheduler
OWN_PIPES = 7


class Pipe(Frozen):
    """A pipeline: lanes that start in a cycle, and cycles until a value is there. as_part_of: the one it shares.

    rates: of a matrix's elements by type, over the lanes; a type that is absent is refused, unless all are.
    """

    lanes: Annotated[Number, Field(gt=0, le=4096)]
    latency: Annotated[Cycles, Field(ge=1)]
    as_part_of: Literal["integer", "fp32", "fp64", "fp16", "special", "tensor"] | None = None
    rates: Mapping[str, Annotated[Number, Field(gt=0, le=64)]] = Field(default_factory=dict)


class Asynchronous(Frozen):
    """Cycles of what goes on without warps. bulk: from the issue of a bulk copy to its first request. wgmma: from the
    last multiply-add to sums that may be read. hop: to another SM of a cluster. wake: from the end of an mbarrier's
    phase until a warp that waits for it goes on.
    """

    bulk: Cycles
    wgmma: Cycles
    hop: Cycles
    wake: Cycles


class Sm(Frozen):
    """Places, schedulers and rates of an SM; latencies in its cycles.

    issue_width: instructions of one warp in a cycle. allocation: registers of a warp and bytes of shared memory come in
    units of so many. shared_of_block: bytes that one block may have. unified_bytes: L1 and shared memory together; else
    both have their own. l1_loads: whether L1 keeps loads of global memory. in_flight: sectors of 32 bytes that may be
    outstanding. barrier: from the last warp that comes to it until all go on. atomic: from one lane to the next of an
    atomic's address. branch: until the next instruction. launch: until a kernel begins. slots: opcode -> machine
    instructions that it becomes, where these are several. asynchronous: of SMs since Hopper.
    """

    schedulers: Annotated[Integer, Field(ge=1, le=8)]
    issue_width: Annotated[Integer, Field(ge=1, le=2)]
    policy: Literal["gto", "lrr"]
    warps: Annotated[Integer, Field(ge=1, le=128)]
    blocks: Annotated[Integer, Field(ge=1, le=64)]
    registers: Annotated[Integer, Field(ge=1024, le=2**20)]
    register_allocation: Annotated[Integer, Field(ge=1, le=4096)]
    shared_bytes: Bytes
    shared_of_block: Bytes
    shared_allocation: Annotated[Integer, Field(ge=1, le=4096)]
    unified_bytes: Bytes | None = None
    l1_loads: bool
    l1_bytes_per_cycle: Annotated[Number, Field(gt=0, le=4096)]
    port_bytes_per_cycle: Annotated[Number, Field(gt=0, le=4096)]
    in_flight: Annotated[Integer, Field(ge=1, le=65536)]
    barrier: Cycles
    atomic: Cycles
    branch: Cycles
    launch: Cycles
    slots: Mapping[str, Annotated[Integer, Field(ge=1, le=1000)]] = Field(default_factory=dict)
    pipes: Mapping[str, Pipe]
    asynchronous: Asynchronous | None = None


class SmArray(SourcedValue):
    """All SMs of a GPU and the memory below them. memory: of `conf/gpu`, where files put keys over
    those of `gpu`; L2 and DRAM move its lines, SMs ask for sectors of 32 bytes.
    """

    name: str
    description: str
    gpu: str
    sm: Sm
    memory: MemorySystem

    @property
    def num_sms(self) -> int:
        """SMs that are active."""
        return self.memory.gpu.num_cus

    @property
    def cycle_s(self) -> float:
        """Cycle of an SM [s]."""
        return self.memory.gpu.cycle_s

    @property
    def peak_flop_per_s(self) -> float:
        """Fused multiply-adds of fp32 that all lanes start [FLOP/s]."""
        # two operations of a multiply-add
        return 2 * self.sm.pipes["fp32"].lanes * self.sm.schedulers * self.num_sms / self.cycle_s


def sm_array(name: str, changes: Mapping[str, Any] | None = None) -> SmArray:
    """The shipped SMs of a GPU, or those of a YAML file, with `changes` of its tree. Raises ConfigError."""
    shipped = FOLDER / f"{name}.yaml"
    # a path has a slash, so that a file of the same name as a shipped GPU can be named
    path = shipped if "/" not in name and shipped.is_file() else Path(name)
    if not path.is_file():
        way = did_you_mean(name, names())
        raise ConfigError([Problem("system", "is neither a shipped GPU with SMs nor a YAML file", name, way)])
    tree = load_yaml(path)
    if not isinstance(tree, dict) or not isinstance(tree.get("gpu"), str):
        raise ConfigError([Problem("system.gpu", "is missing", str(path), "name a GPU of conf/gpu")])
    tree = merged(tree, changes or {})
    # keys of the file, and changes of the caller, go over `conf/gpu`
    tree["memory"] = merged(tree_of_gpu(tree["gpu"]), {"gpu": tree.get("memory") or {}})
    return validate_as(SmArray, tree, path="system")


def names() -> list[str]:
    """GPUs whose SMs are shipped."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))
