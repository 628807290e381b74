"""What instructions do that go on without their warps, as arrays of the model of SMs: records of `sm_state.TASK`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dse.errors import ConfigError, Problem
from dse_ptx import sm_state as ss
from dse_ptx.vm import RANK_BITS
from dse_ptx.warp_trace import Code, Unit, WarpTrace
from simulators.device.records import table

Ints = NDArray[np.int64]
_KINDS = (
    ("wgmma.mma_async", ss.WARPGROUP), ("wgmma.commit_group", ss.GROUP_COMMIT), ("wgmma.wait_group", ss.GROUP_WAIT),
    ("cp.async.bulk.commit_group", ss.BULK_COMMIT), ("cp.async.bulk.wait_group", ss.BULK_WAIT),
    ("cp.async.bulk.prefetch", ss.PLAIN), ("cp.async.bulk", ss.BULK),
    ("cp.async.mbarrier", ss.M_ARRIVE), ("mbarrier.init", ss.M_INIT),
    ("mbarrier.test_wait", ss.M_WAIT), ("mbarrier.try_wait", ss.M_WAIT),
    ("mbarrier.arrive", ss.M_ARRIVE), ("mbarrier.expect_tx", ss.M_ARRIVE), ("mbarrier.complete_tx", ss.M_ARRIVE),
    ("barrier.cluster.arrive", ss.CLUSTER_ARRIVE), ("barrier.cluster.wait", ss.CLUSTER_WAIT),
)  # fmt: skip
"""First words of opcodes, and what is done; others do nothing beside their pipeline."""
UNITS = (Unit.WGMMA, Unit.BULK, Unit.MBARRIER, Unit.CLUSTER)
"""Units of such instructions."""
_LOW = (1 << 32) - 1


def kind_of(opcode: str) -> int:
    """What is done when an instruction is issued."""
    return next((kind for words, kind in _KINDS if opcode.startswith(words)), ss.PLAIN)


def argument_of(opcode: str, argument: int) -> int:
    """The number of a pc: groups that a wait leaves open, the sort of a copy, or 1 of an arrival without a wait at a
    barrier, or for good at an mbarrier.
    """
    if opcode.startswith("mbarrier."):
        return int(opcode.startswith("mbarrier.arrive_drop"))
    if opcode.startswith("cp.async.bulk"):
        if "wait_group" in opcode:
            return argument + (ss.READ if ".read" in opcode else 0)
        ends = opcode.partition(".global.shared_cta")[1]
        return ss.OUT_STORE if ends else ss.IN_CLUSTER if "shared_cluster.shared_cta" in opcode else ss.IN_LOAD
    return int("arrive" in opcode.split(".")) if opcode.startswith(("bar.", "barrier.")) else argument


def without_fragments(registers: Ints, code: Code, kept: int) -> Ints:
    """Registers of each pc; of `wgmma` the last `kept`, as its warps do not wait for its fragments."""
    rows = registers.copy()
    for pc in np.flatnonzero(code.units == Unit.WGMMA):
        used = rows[pc][rows[pc] >= 0]
        rows[pc] = -1
        rows[pc, : min(kept, len(used))] = used[len(used) - min(kept, len(used)) :]
    return rows


def tasks_of(trace: WarpTrace, pcs: Ints, active: NDArray[np.uint32]) -> tuple[Any, Ints, int]:
    """Tasks, where those of each access begin, and mbarriers of a block. pcs, active: of each access.

    Raises ConfigError where several lanes of a warp ask for a copy at once.
    """
    units = trace.code.units[pcs]
    copies = np.flatnonzero(units == Unit.BULK)
    if (np.bitwise_count(active[copies]) > 1).any():
        pc = pcs[copies[np.bitwise_count(active[copies]) > 1][0]]
        way = "let one lane of a warp ask, by elect.sync"
        raise ConfigError(
            [Problem("trace", "has a copy that several lanes of a warp ask for", trace.code.opcodes[pc], way)]
        )
    objects = np.flatnonzero(units == Unit.MBARRIER)
    owner, address, value, lanes = _arrivals(trace.addresses[objects], active[objects])
    named = np.flatnonzero(units == Unit.BARRIER)
    offsets = np.unique(np.concatenate([address, trace.addresses[copies, 4].astype(np.int64)]) & _mask())
    rows = table(len(owner) + len(named) + len(copies), ss.TASK, planes=1)
    of_objects, of_named = rows[: len(owner)], rows[len(owner) : len(owner) + len(named)]
    of_objects.barrier, of_objects.rank = np.searchsorted(offsets, address & _mask()), address >> RANK_BITS & 15
    _fill_objects(of_objects, trace.code, pcs[objects][owner], value, lanes)
    of_named.barrier = (trace.addresses[named, 0] & np.uint64(_LOW)).astype(np.int64)
    of_named.value = (trace.addresses[named, 0] >> np.uint64(32)).astype(np.int64)
    of_copies, words = rows[len(owner) + len(named) :], trace.addresses[copies].astype(np.int64)
    of_copies.barrier = np.searchsorted(offsets, words[:, 4] & _mask())
    names = ("address", "rows", "row", "stride", "", "mask", "bytes", "planes", "plane")
    for place, name in enumerate(names):
        if name:
            of_copies[name] = words[:, place]
    accesses = np.concatenate([objects[owner], named, copies]).astype(np.int64)
    order = np.argsort(accesses, kind="stable")
    begins = np.searchsorted(accesses[order], np.arange(len(pcs) + 1)).astype(np.int64)
    return np.ascontiguousarray(rows[order]).view(np.recarray), begins, max(len(offsets), 1)


def _mask() -> int:
    """Bits of an address within its block's shared memory."""
    return (1 << RANK_BITS) - 1


def _arrivals(words: NDArray[np.uint64], active: NDArray[np.uint32]) -> tuple[Ints, Ints, Ints, Ints]:
    """Of each mbarrier that lanes of an access use: the access, its address, the sum of values, and lanes."""
    # a wait that did not wait, as nobody else could go on, holds 0
    access, lane = np.nonzero((active[:, None] >> np.arange(32, dtype=np.uint32)) & 1 & (words != 0))
    chosen = words[access, lane]
    keys = np.stack([access, (chosen & np.uint64(_LOW)).astype(np.int64)], axis=1)
    pairs, place = np.unique(keys, axis=0, return_inverse=True)
    sums = np.bincount(place.reshape(-1), (chosen >> np.uint64(32)).astype(np.float64), len(pairs))
    lanes = np.bincount(place.reshape(-1), minlength=len(pairs))
    return pairs[:, 0], pairs[:, 1], sums.astype(np.int64), lanes.astype(np.int64)


def _fill_objects(rows: Any, code: Code, pcs: Ints, sums: Ints, lanes: Ints) -> None:
    """Arrivals and bytes of each use of an mbarrier, of several lanes their sum; of a wait its parity, of one lane."""
    kinds = np.array([kind_of(opcode) for opcode in code.opcodes], np.int64)
    words = [opcode.split(".") for opcode in code.opcodes]
    has = {name: np.array([name in each for each in words])[pcs] for name in ("expect_tx", "complete_tx")}
    arrives = np.array(["arrive" in each or "arrive_drop" in each for each in words])[pcs]
    moves = has["expect_tx"] | has["complete_tx"]
    each = sums // np.maximum(lanes, 1)
    rows.value = np.where(kinds[pcs] == ss.M_ARRIVE, np.where(moves, np.where(arrives, lanes, 0), sums), each)
    rows.bytes = np.where(moves, np.where(has["complete_tx"], -sums, sums), 0)
