"""Warp instructions of a launch in the order in which each warp executes them: what execution writes and timing reads.

PTX that was executed and SASS traces of hardware become the same value, so one model of time serves both.
"""

from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray


class Unit(IntEnum):
    """Pipelines of an SM to which a warp instruction is issued."""

    INTEGER = 0  # 32-bit integer and logic, moves, predicates, conversions of integers
    FP32 = 1
    FP64 = 2
    FP16 = 3  # packed halves on CUDA cores
    SPECIAL = 4  # reciprocals, roots, sines, exponentials, conversions to and from floating point
    TENSOR = 5  # mma.sync, wmma
    GLOBAL_LOAD = 6  # also local memory: its addresses are in the space of global memory
    GLOBAL_STORE = 7
    GLOBAL_ATOMIC = 8
    SHARED_LOAD = 9
    SHARED_STORE = 10
    SHARED_ATOMIC = 11
    CONSTANT = 12  # parameters and constant memory
    BRANCH = 13
    BARRIER = 14
    EXIT = 15
    WGMMA = 16  # products of warpgroups, and their groups
    BULK = 17  # bulk copies, and their groups
    MBARRIER = 18
    CLUSTER = 19  # barriers of clusters


@dataclass(frozen=True)
class Code:
    """Static instructions of a kernel by program counter: arrays of one row per instruction.

    `writes` and `reads` hold numbers of registers (predicates included), padded with -1; `operations` is the work of
    a lane in floating-point operations (2 for a fused multiply-add; of `mma` the share of one of 32 lanes).
    `arguments` are columns of `wgmma` (below 0: A is in registers), and groups that a wait leaves open; empty: none.
    """

    opcodes: tuple[str, ...]
    units: NDArray[np.int8]  # of `Unit`
    writes: NDArray[np.int32]  # (instructions, most written)
    reads: NDArray[np.int32]  # (instructions, most read)
    operations: NDArray[np.float64]
    arguments: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))


@dataclass(frozen=True)
class WarpTrace:
    """What the warps of a launch executed, warp after warp, warps of a block next to one another.

    Instruction `i` of warp `w` is row `starts[w] + i` of `pcs`, `active` (a bit for each lane) and `access` (a row of
    `addresses`, or -1 where memory is not accessed). Addresses are in bytes; lanes that are not active hold 0.
    `blocks` numbers the block of each warp, those of a cluster next to one another; a trace may hold a sample of the
    launch's `num_blocks`, `cluster` of them in each. What lanes of `mbarrier` and of bulk copies hold instead of
    addresses is told in `mbarriers` and `bulk`.
    """

    code: Code
    blocks: NDArray[np.int32]  # (warps,), ascending
    starts: NDArray[np.int64]  # (warps + 1,)
    pcs: NDArray[np.int32]
    active: NDArray[np.uint32]
    access: NDArray[np.int64]
    addresses: NDArray[np.uint64]  # (accesses, 32)
    bytes_per_lane: NDArray[np.int16]  # (accesses,)
    num_blocks: int
    threads_per_block: int
    registers_per_thread: int
    shared_bytes_per_block: int
    cluster: int = 1
