"""Barriers in shared memory (`mbarrier`), as parts of the compiled interpreter (PTX ISA, section 9.7.13.15).

An object of 64 bits holds, from its lowest bit on: arrivals that a phase expects (20 bits), those that lack (20), bytes
of copies that lack, plus 2^20 (21), and the parity of the phase that goes on (1). PTX leaves the layout open; zeros are
no object. A phase ends when neither arrivals nor bytes lack; the state that `arrive` returns is the object before it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dse_ptx import vm
from dse_ptx.vm import (
    FIRST,
    LANES,
    M_ARRIVE,
    M_ARRIVE_EXPECT,
    M_COMPLETE,
    M_DROP,
    M_EXPECT,
    M_INIT,
    M_INVAL,
    M_PENDING,
    MODE,
    OFFSET,
    OP,
    READS,
    SPACE,
    WRITES,
    EncodedProgram,
    Memory,
)
from simulators.compiled import inline_never

_MOST = (1 << 20) - 1
"""Arrivals of a phase, and bytes that may lack (section 9.7.13.15.2)."""
_ZERO_BYTES = 1 << 20
_PARITY = 61


@inline_never
def _parity(word: Any) -> Any:
    return (np.int64(word) >> _PARITY) & 1


@inline_never
def _pending(word: Any) -> Any:
    return (np.int64(word) >> 20) & _MOST


@inline_never
def _bytes(word: Any) -> Any:
    return ((np.int64(word) >> 40) & (2 * _ZERO_BYTES - 1)) - _ZERO_BYTES


@inline_never
def _word(expected: int, pending: int, lacking: int, parity: int) -> Any:
    return np.uint64(expected | (pending << 20) | ((lacking + _ZERO_BYTES) << 40) | (parity << _PARITY))


@inline_never
def _object(s: Any, m: Memory, space: int, address: int, thread: int) -> int:
    """Place of an object that is initialised; below 0 where there is none, which is noted."""
    place = vm.locate(s, m, space, address, 8, thread)
    if place < 0:
        vm.fault(s, place, address, thread)
        return -1
    if not np.int64(m.m64[place >> 3]) & _MOST:
        vm.refuse(s, vm.NO_MBARRIER, address, thread)
        return -1
    return place


@inline_never
def update(s: Any, m: Memory, place: int, arrivals: int, moved: int, dropped: int) -> bool:
    """Count arrivals, bytes that are expected (above 0) or have moved (below 0), and threads that leave.

    False where more arrive, or more bytes lack, than an object counts. The phase ends when nothing lacks.
    """
    word = m.m64[place >> 3]
    expected, pending = (np.int64(word) & _MOST) - dropped, _pending(word) - arrivals
    lacking, parity = _bytes(word) + moved, _parity(word)
    if pending < 0 or abs(lacking) > _MOST:
        return False
    # an expectation is counted together with its arrival, so that the phase does not end between them
    if pending == 0 and lacking == 0:
        pending, parity = expected, 1 - parity
        s.progress += 1
    m.m64[place >> 3] = _word(expected, pending, lacking, parity)
    return True


@inline_never
def change(s: Any, p: EncodedProgram, m: Memory, row: int, active: int, warp: int, shift: int) -> bool:
    """`mbarrier.init`, `inval`, `arrive`, `arrive_drop`, `expect_tx`, `complete_tx` and `pending_count`, lane by lane.

    The recorded address of a lane holds its count or bytes above bit 32. False where an instruction is refused.
    """
    code, first = p.code, p.code[row, FIRST] + p.code[row, WRITES]
    op, space = code[row, OP], code[row, SPACE]
    where = vm.base(s, p, first, shift)
    values = vm.base(s, p, first + 1, shift) if code[row, READS] > 1 else where
    for lane in range(LANES):
        s.at[lane] = np.uint64(0)
        if not (active >> lane) & 1:
            continue
        if op == M_PENDING:
            s.out[lane] = np.uint64(_pending(p.file[where + lane]))
            continue
        thread, address = warp * LANES + lane, np.int64(p.file[where + lane]) + code[row, OFFSET]
        value = np.int64(p.file[values + lane] & np.uint64(0xFFFFFFFF)) if code[row, READS] > 1 else 1
        s.at[lane] = np.uint64(vm.in_cluster(s, space, address) | (value << 32))
        if value > _MOST or (value == 0 and op in (M_INIT, M_ARRIVE, M_DROP)):
            s.fault_bytes = value
            return vm.refuse(s, vm.BAD_COUNT, address, thread)
        if op == M_INIT:
            place = vm.locate(s, m, space, address, 8, thread)
            if place < 0:
                return vm.fault(s, place, address, thread)
            m.m64[place >> 3] = _word(value, value, 0, 0)
            continue
        place = _object(s, m, space, address, thread)
        if place < 0:
            return False
        s.out[lane] = m.m64[place >> 3]
        if op == M_INVAL:
            m.m64[place >> 3] = np.uint64(0)
            continue
        arrivals = value if op in (M_ARRIVE, M_DROP) else 1 if op == M_ARRIVE_EXPECT else 0
        moved = value if op in (M_EXPECT, M_ARRIVE_EXPECT) else -value if op == M_COMPLETE else 0
        if not update(s, m, place, arrivals, moved, arrivals if op == M_DROP else 0):
            return vm.refuse(s, vm.TOO_MANY, address, thread)
    return True


@inline_never
def _goes_on(p: EncodedProgram, row: int, word: Any, given: Any) -> bool:
    """Tell whether the phase that a wait names has not ended: by its parity, or by the state of an arrival."""
    parity = np.int64(given & np.uint64(1)) if p.code[row, MODE] else _parity(given)
    return _parity(word) == parity


@inline_never
def is_shut(s: Any, p: EncodedProgram, m: Memory, row: int, active: int, warp: int, shift: int) -> bool:
    """Tell whether no lane's wait has come to its end; what the last one lacks is noted. Faults count as an end."""
    code, first = p.code, p.code[row, FIRST] + p.code[row, WRITES]
    where, given = vm.base(s, p, first, shift), vm.base(s, p, first + 1, shift)
    for lane in range(LANES):
        if (active >> lane) & 1:
            address = np.int64(p.file[where + lane]) + code[row, OFFSET]
            place = vm.locate(s, m, code[row, SPACE], address, 8, warp * LANES + lane)
            if place < 0 or not _goes_on(p, row, m.m64[place >> 3], p.file[given + lane]):
                return False
            if not np.int64(m.m64[place >> 3]) & _MOST:
                return False
            s.fault_arrivals, s.fault_bytes = _pending(m.m64[place >> 3]), _bytes(m.m64[place >> 3])
            s.fault_address = address
    return True


@inline_never
def test(s: Any, p: EncodedProgram, m: Memory, row: int, active: int, warp: int, shift: int) -> bool:
    """`mbarrier.test_wait` and `try_wait`: whether a phase has ended; above bit 32 the record holds its parity."""
    code, first = p.code, p.code[row, FIRST] + p.code[row, WRITES]
    where, given = vm.base(s, p, first, shift), vm.base(s, p, first + 1, shift)
    for lane in range(LANES):
        s.at[lane] = np.uint64(0)
        if not (active >> lane) & 1:
            continue
        thread, address = warp * LANES + lane, np.int64(p.file[where + lane]) + code[row, OFFSET]
        place = _object(s, m, code[row, SPACE], address, thread)
        if place < 0:
            return False
        has_ended = not _goes_on(p, row, m.m64[place >> 3], p.file[given + lane])
        s.out[lane] = np.uint64(has_ended)
        if has_ended:  # a wait that did not wait is not timed
            parity = 1 - _parity(m.m64[place >> 3])
            s.at[lane] = np.uint64(vm.in_cluster(s, code[row, SPACE], address) | (parity << 32))
    return True
