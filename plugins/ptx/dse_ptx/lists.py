"""Traces of warps as lists that the memory engine runs: a list of requests, waits and arithmetic for each block.

Warps of a block go through their instructions in step. An access becomes a request for each run of lines that its
active lanes touch; a wait stands before the first instruction that reads what was loaded since the last one. All that
occupies lanes counts as arithmetic, two operations of a lane for each instruction, as a multiply-add takes them, and
four times as many where the unit has a quarter of the lanes. Accesses of shared memory and barriers take no time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dse_memory.engine import LISTED_COMPUTE, LISTED_LOAD, LISTED_STORE, LISTED_WAIT
from dse_ptx.coalescing import GLOBAL, coalesce
from dse_ptx.sm_state import SECTOR_BYTES
from dse_ptx.warp_trace import Code, Unit, WarpTrace
from simulators.compiled import compile_lazily

Ints = NDArray[np.int64]
_LANES = 32
_LOADS = (Unit.GLOBAL_LOAD,)
_STORES = (Unit.GLOBAL_STORE, Unit.GLOBAL_ATOMIC)
# two operations of a lane in an instruction; SPECIAL has a quarter of the lanes
_WORK = {Unit.INTEGER: 2, Unit.FP32: 2, Unit.FP64: 2, Unit.FP16: 2, Unit.SPECIAL: 8}
"""Operations of a lane, by unit."""


@dataclass(frozen=True)
class BlockLists:
    """Lists of blocks: rows [R, 5] as `dse_memory.engine.run` takes them, begins [blocks + 1].

    stores: of each instruction that makes requests, by its number, whether it stores.
    """

    rows: Ints
    begins: Ints
    stores: dict[int, bool]


def block_lists(trace: WarpTrace, line_bytes: int, first_number: int) -> BlockLists:
    """The lists of a trace's blocks; instructions that make requests are numbered from `first_number`."""
    code = trace.code
    kinds = np.full(len(code.opcodes), -1, np.int64)
    kinds[np.isin(code.units, _LOADS)], kinds[np.isin(code.units, _STORES)] = LISTED_LOAD, LISTED_STORE
    requesting = np.flatnonzero(kinds >= 0)
    numbers = np.zeros(len(kinds), np.int64)
    # numbers go on from the launch before, so that each instruction of an application has its own
    numbers[requesting] = first_number + np.arange(len(requesting))
    runs, places = _runs(trace, kinds, line_bytes)
    first_warps = np.append(np.flatnonzero(np.diff(trace.blocks, prepend=-1)), len(trace.blocks))
    static = np.stack([kinds, numbers, _work(code)], axis=1)
    registers = max(int(code.reads.max(initial=0)), int(code.writes.max(initial=0))) + 1
    # a row of registers for each warp of the largest block
    pending = np.zeros((int(np.diff(first_warps).max()), registers), np.int64)
    streams = first_warps, trace.starts, trace.pcs, trace.access
    begins, rows = np.zeros(len(first_warps), np.int64), np.zeros((0, 5), np.int64)
    _write_lists(*streams, static, code.reads, code.writes, places, runs, pending, begins, rows)
    # the first pass counted the rows, the second writes them
    rows = np.zeros((begins[-1], 5), np.int64)
    _write_lists(*streams, static, code.reads, code.writes, places, runs, pending, begins, rows)
    # the predictor learns loads and stores apart
    stores = {int(numbers[pc]): bool(kinds[pc] == LISTED_STORE) for pc in requesting}
    return BlockLists(rows, begins, stores)


def _work(code: Code) -> Ints:
    """Operations of a warp by instruction; moves are folded into what uses them."""
    work = np.array([_LANES * _WORK.get(Unit(int(unit)), 0) for unit in code.units], np.int64)
    moves = [opcode.startswith(("mov.", "cvta")) for opcode in code.opcodes]
    return np.where(moves, 0, work)


def _runs(trace: WarpTrace, kinds: Ints, line_bytes: int) -> tuple[Ints, Ints]:
    """Runs of lines (address, bytes) [N, 2] of global accesses, and of each access where its runs begin."""
    has = trace.access >= 0
    pcs, active = np.zeros(len(trace.addresses), np.int64), np.zeros(len(trace.addresses), np.uint32)
    pcs[trace.access[has]], active[trace.access[has]] = trace.pcs[has], trace.active[has]
    chosen = np.flatnonzero(kinds[pcs] >= 0)
    of_chosen = trace.addresses[chosen], active[chosen], trace.bytes_per_lane[chosen]
    coalesced = coalesce(*of_chosen, np.full(len(chosen), GLOBAL, np.int8))
    owner = np.repeat(chosen, np.diff(coalesced.begins))
    lines = coalesced.sectors * SECTOR_BYTES // line_bytes
    pairs = np.unique(np.stack([owner, lines], axis=1), axis=0) if len(lines) else np.zeros((0, 2), np.int64)
    goes_on = np.zeros(len(pairs), bool)
    # lines that follow one another are one request
    goes_on[1:] = (np.diff(pairs[:, 0]) == 0) & (np.diff(pairs[:, 1]) == 1)
    firsts = np.flatnonzero(~goes_on)
    lengths = np.diff(np.append(firsts, len(pairs)))
    runs = np.stack([pairs[firsts, 1] * line_bytes, lengths * line_bytes], axis=1)
    return runs, np.searchsorted(pairs[firsts, 0], np.arange(len(trace.addresses) + 1)).astype(np.int64)


@compile_lazily
def _write_lists(  # type: ignore[no-untyped-def]
    first_warps, starts, pcs, access, static, reads, writes, places, runs, pending, begins, rows
):
    """Write the rows of all blocks, or, where `rows` is empty, count them. pending [warps, registers]: the number of
    the wait that would free a register, of those since the beginning."""
    row, epoch, counts = 0, 1, len(rows) == 0
    pending[:] = 0
    for block in range(len(first_warps) - 1):
        begins[block] = row
        work, step, goes_on = 0, 0, True
        while goes_on:
            goes_on = False
            for warp in range(first_warps[block], first_warps[block + 1]):
                at = starts[warp] + step
                if at >= starts[warp + 1]:
                    continue
                goes_on, pc, mine = True, pcs[at], warp - first_warps[block]
                waits = False
                for register in reads[pc]:
                    waits = waits or (register >= 0 and pending[mine, register] == epoch)
                if work and (waits or static[pc, 0] >= 0):
                    if not counts:
                        rows[row, 0], rows[row, 3] = work, LISTED_COMPUTE
                    row, work = row + 1, 0
                if waits:
                    if not counts:
                        rows[row, 3] = LISTED_WAIT
                    # a wait frees all registers at once: none has the new epoch yet
                    row, epoch = row + 1, epoch + 1
                work += static[pc, 2]
                if static[pc, 0] >= 0 and access[at] >= 0:
                    for run in range(places[access[at]], places[access[at] + 1]):
                        if not counts:
                            rows[row, 0], rows[row, 1] = runs[run, 0], runs[run, 1]
                            rows[row, 2], rows[row, 3] = static[pc, 1], static[pc, 0]
                        row += 1
                    if static[pc, 0] == LISTED_LOAD:
                        for register in writes[pc]:
                            if register >= 0:
                                pending[mine, register] = epoch
            step += 1
        if work:
            if not counts:
                rows[row, 0], rows[row, 3] = work, LISTED_COMPUTE
            row += 1
        epoch += 1
    begins[len(first_warps) - 1] = row
