"""Bulk copies of the tensor memory accelerator as parts of the compiled interpreter (PTX ISA, section 9.7.9.25).

A copy moves a piece of memory, or a box of a tensor that a map describes (`tensor_map`). It is done at once; or, to
shared memory, once nobody else can go on, so that a kernel that does not wait for it finds what was there. Bytes that a
box has beyond its tensor become 0 in shared memory, and are left out in global memory. Where a copy ends in shared
memory, its mbarrier counts all bytes of the piece or box.

What is recorded of a copy, in the places of lanes: 0 the global address, 1 rows, 2 bytes of a row, 3 from row to row,
4 the mbarrier, 5 blocks that take the copy (bits), 6 bytes that are counted, 7 planes of rows, 8 from plane to plane.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dse_ptx import mbarriers, vm, warpgroups
from dse_ptx.vm import (
    B_LOAD,
    B_STORE,
    CLUSTER,
    COPIES,
    FIRST,
    FLAGS,
    GENERIC,
    GLOBAL,
    LANES,
    MODE,
    OFFSET,
    OP,
    OPERANDS,
    PARAM,
    READS,
    SHARED,
    SHARED_WINDOW,
    TARGET,
    EncodedProgram,
    Memory,
    Queue,
    X,
)
from simulators.compiled import inline_never

MAGIC = 0x54454E534F524D41
"""First word of a tensor map; the others are in `tensor_map.TensorMap.encode`."""
UNIT, TILE_ALIGN, AXES = 16, 128, 5
_W_ADDRESS, _W_FORMAT, _W_SIZES, _W_STRIDES, _W_BOX = 1, 2, 3, 8, 12


@inline_never
def copy(s: Any, p: EncodedProgram, m: Memory, q: Queue, row: int, active: int, warp: int, shift: int) -> bool:
    """A bulk copy, lane by lane: at once, or to shared memory later, as long as there is room. False: it is refused."""
    for lane in range(LANES):
        s.at[lane] = np.uint64(0)
    for lane in range(LANES):
        if (active >> lane) & 1:
            s.fault_thread = warp * LANES + lane
            for place in range(p.code[row, READS]):
                s.sx[place] = np.int64(p.file[vm.base(s, p, p.code[row, FIRST] + place, shift) + lane])
            if s.is_late and p.code[row, OP] == B_LOAD and s.waiting < COPIES:
                entry = q.copies[s.waiting]
                entry[0], entry[1], entry[2] = row, s.rank, s.fault_thread
                for place in range(OPERANDS):
                    entry[3 + place] = s.sx[place]
                s.waiting += 1
            elif not _copy_lane(s, p, m, row):
                return False
    return True


@inline_never
def flush(s: Any, p: EncodedProgram, m: Memory, q: Queue) -> bool:
    """Let copies come that were put off, in their order. False where one is refused."""
    count = s.waiting
    s.waiting = 0
    for number in range(count):
        entry = q.copies[number]
        s.rank, s.fault_thread, s.pc = entry[1], entry[2], entry[0]
        s.shared_at = s.shared_first + s.rank * s.shared_stride
        for place in range(OPERANDS):
            s.sx[place] = entry[3 + place]
        if not _copy_lane(s, p, m, entry[0]):
            return False
    return True


@inline_never
def _copy_lane(s: Any, p: EncodedProgram, m: Memory, row: int) -> bool:
    """The copy of a lane whose operands are in `sx`."""
    return _box(s, p, m, row) if p.code[row, MODE] else _piece(s, p, m, row)


@inline_never
def _targets(s: Any, p: EncodedProgram, row: int, place: int, target: int) -> int:
    """Blocks that take a copy, a bit for each: those of the mask, or the one of the target. -1: the mask is wrong."""
    if not p.code[row, FLAGS]:
        return 1 << vm.rank_of(s, target)
    mask = s.sx[place] & 0xFFFF
    return mask if mask and not mask >> s.cluster_size else -1


@inline_never
def _note(s: Any, first: int, rows: int, length: int, stride: int) -> None:
    """Record what a copy moves in global memory."""
    s.at[0], s.at[1], s.at[2], s.at[3] = np.uint64(first), np.uint64(rows), np.uint64(length), np.uint64(stride)
    s.at[7], s.at[8] = np.uint64(1), np.uint64(0)


@inline_never
def _move(m: Memory, to: int, origin: int, size: int) -> None:
    """Copy bytes, a multiple of 8 at multiples of 8."""
    for word in range(size >> 3):
        m.m64[(to >> 3) + word] = m.m64[(origin >> 3) + word]


@inline_never
def _complete(s: Any, m: Memory, barrier: int, blocks: int, size: int) -> bool:
    """Count the bytes of a copy at the mbarrier of each block that takes it."""
    s.at[4], s.at[5], s.at[6] = np.uint64(vm.in_cluster(s, CLUSTER, barrier)), np.uint64(blocks), np.uint64(size)
    offset = barrier & ((1 << vm.RANK_BITS) - 1)
    for rank in range(s.cluster_size):
        if (blocks >> rank) & 1:
            address = vm.CLUSTER_WINDOW + (np.int64(rank) << vm.RANK_BITS) + offset
            place = vm.locate(s, m, CLUSTER, address, 8, s.fault_thread)
            if place < 0:
                return vm.fault(s, place, address, s.fault_thread)
            if not np.int64(m.m64[place >> 3]) & 0xFFFFF:
                return vm.refuse(s, vm.NO_MBARRIER, address, s.fault_thread)
            if not mbarriers.update(s, m, place, 0, -size, 0):
                return vm.refuse(s, vm.TOO_MANY, address, s.fault_thread)
    return True


@inline_never
def _piece(s: Any, p: EncodedProgram, m: Memory, row: int) -> bool:
    """`cp.async.bulk` of neighbouring bytes: multiples of 16, at multiples of 16."""
    code, op = p.code, p.code[row, OP]
    target = s.sx[0] + code[row, OFFSET]
    source = s.sx[1] + code[row, TARGET]
    size = s.sx[2] & 0xFFFFFFFF
    if size % UNIT:
        return vm.refuse(s, vm.BAD_SIZE, size, s.fault_thread)
    if target % UNIT or source % UNIT:
        return vm.refuse(s, vm.MISALIGNED_BULK, target if target % UNIT else source, s.fault_thread)
    origin = vm.span(s, m, GLOBAL if op == B_LOAD else SHARED, source, size, s.fault_thread)
    if origin < 0:
        return vm.fault(s, origin, source, s.fault_thread)
    if op == B_STORE:
        place = vm.span(s, m, GLOBAL, target, size, s.fault_thread)
        if place < 0:
            return vm.fault(s, place, target, s.fault_thread)
        _move(m, place, origin, size)
        _note(s, target, 1, size, 0)
        return True
    blocks = _targets(s, p, row, 4, target)
    barrier = s.sx[3] + code[row, X]
    if blocks < 0 or (not code[row, FLAGS] and vm.rank_of(s, barrier) != vm.rank_of(s, target)):
        return vm.refuse(s, vm.OTHER_BLOCK, barrier, s.fault_thread)
    for rank in range(s.cluster_size):
        if (blocks >> rank) & 1:
            address = vm.CLUSTER_WINDOW + (np.int64(rank) << vm.RANK_BITS) + (target & ((1 << vm.RANK_BITS) - 1))
            place = vm.span(s, m, CLUSTER, address, size, s.fault_thread)
            if place < 0:
                return vm.fault(s, place, address, s.fault_thread)
            _move(m, place, origin, size)
    _note(s, source if op == B_LOAD else 0, 1 if op == B_LOAD else 0, size, 0)
    return _complete(s, m, barrier, blocks, size)


@inline_never
def _map(s: Any, m: Memory, address: int) -> int:
    """Place of a tensor map, in words of memory; -1 where there is none, which is noted."""
    space = PARAM if address < SHARED_WINDOW else GENERIC  # a parameter, by its name or by a generic address
    place = -2 if address % 64 else vm.span(s, m, space, address, 128, s.fault_thread)
    if place < 0 or m.m64[place >> 3] != np.uint64(MAGIC):
        vm.refuse(s, vm.NO_MAP, address, s.fault_thread)
        return -1
    return place >> 3


@inline_never
def _box_size(m: Memory, at: int, axis: int) -> Any:
    return (np.int64(m.m64[at + _W_BOX + axis // 4]) >> (16 * (axis % 4))) & 0xFFFF


@inline_never
def _box(s: Any, p: EncodedProgram, m: Memory, row: int) -> bool:
    """`cp.async.bulk.tensor` of a box, which lies row after row in shared memory, swizzled as its map says."""
    code, op = p.code, p.code[row, OP]
    is_load = op == B_LOAD
    at = _map(s, m, s.sx[1 if is_load else 0] + code[row, TARGET if is_load else OFFSET])
    if at < 0:
        return False
    shared = s.sx[0 if is_load else 1] + code[row, OFFSET if is_load else TARGET]
    # shared memory of `.shared::cluster` has the rank of its block above the offset
    if shared % TILE_ALIGN:
        return vm.refuse(s, vm.MISALIGNED_BULK, shared, s.fault_thread)
    axes = np.int64(m.m64[at + _W_FORMAT]) & 0xFF
    if axes != code[row, MODE]:
        return vm.refuse(s, vm.NO_MAP, axes, s.fault_thread)
    size = (np.int64(m.m64[at + _W_FORMAT]) >> 8) & 0xFF
    for axis in range(axes):
        size *= _box_size(m, at, axis)
    coordinates = 4 if is_load else 2
    if not is_load:
        if not _move_box(s, p, m, row, at, shared, coordinates, True):
            return False
        _describe(s, p, m, row, at, coordinates)
        return True
    barrier = s.sx[2] + code[row, X]
    blocks = _targets(s, p, row, 3, shared)
    if blocks < 0 or (not code[row, FLAGS] and vm.rank_of(s, barrier) != vm.rank_of(s, shared)):
        return vm.refuse(s, vm.OTHER_BLOCK, barrier, s.fault_thread)
    for rank in range(s.cluster_size):
        if (blocks >> rank) & 1:
            address = vm.CLUSTER_WINDOW + (np.int64(rank) << vm.RANK_BITS) + (shared & ((1 << vm.RANK_BITS) - 1))
            if not _move_box(s, p, m, row, at, address, coordinates, False):
                return False
    _describe(s, p, m, row, at, coordinates)
    return _complete(s, m, barrier, blocks, size)


@inline_never
def _coordinate(s: Any, p: EncodedProgram, row: int, place: int) -> int:
    """A coordinate of 32 bits with its sign."""
    return (s.sx[place] << 32) >> 32


@inline_never
def _move_box(s: Any, p: EncodedProgram, m: Memory, row: int, at: int, shared: int, first: int, stores: int) -> bool:
    """Move a box between a tensor and shared memory; first: place of its coordinates. False out of shared memory."""
    shape, width = np.int64(m.m64[at + _W_FORMAT]), _box_size(m, at, 0)
    axes, size, units = shape & 0xFF, (shape >> 8) & 0xFF, (shape >> 16) & 0xFF
    rows = 1
    for axis in range(1, axes):
        rows *= _box_size(m, at, axis)
    begin = vm.span(s, m, CLUSTER, shared, rows * width * size, s.fault_thread)
    if begin < 0:
        return vm.fault(s, begin, shared, s.fault_thread)
    offset = shared & ((1 << vm.RANK_BITS) - 1)
    base = begin - offset
    for line in range(rows):
        address, rest, is_inside = np.int64(m.m64[at + _W_ADDRESS]), line, True
        for axis in range(1, axes):
            length = _box_size(m, at, axis)
            index = _coordinate(s, p, row, first + axis) + rest % length
            rest //= length
            is_inside = is_inside and 0 <= index < np.int64(m.m64[at + _W_SIZES + axis])
            address += index * np.int64(m.m64[at + _W_STRIDES + axis - 1])
        left, length = _coordinate(s, p, row, first), np.int64(m.m64[at + _W_SIZES])
        for unit in range(width * size // UNIT):
            place = base + warpgroups.swizzle(offset + line * width * size + unit * UNIT, units)
            index = left + unit * (UNIT // size)
            if not _move_unit(s, m, place, address, index, length if is_inside else 0, size, stores):
                return False
    return True


@inline_never
def _move_unit(s: Any, m: Memory, place: int, line: int, index: int, length: int, size: int, stores: bool) -> bool:
    """Move 16 bytes between shared memory and a tensor's line from an element on, of which it has `length`."""
    count = UNIT // size
    if index >= 0 and index + count <= length:
        origin = vm.span(s, m, GLOBAL, line + index * size, UNIT, s.fault_thread)
        if origin < 0:
            return vm.fault(s, origin, line + index * size, s.fault_thread)
        if origin % 8 == 0:
            _move(m, origin if stores else place, place if stores else origin, UNIT)
            return True
    for part in range(count):
        address = line + (index + part) * size
        if 0 <= index + part < length:
            origin = vm.span(s, m, GLOBAL, address, size, s.fault_thread)
            if origin < 0:
                return vm.fault(s, origin, address, s.fault_thread)
            to, begin = (origin, place + part * size) if stores else (place + part * size, origin)
            vm.put(m, to, size, vm.get(m, begin, size))
        elif not stores:
            vm.put(m, place + part * size, size, np.uint64(0))
    return True


@inline_never
def _describe(s: Any, p: EncodedProgram, m: Memory, row: int, at: int, first: int) -> None:
    """Record the part of a box within its tensor: rows of the second axis, planes of the third; others as planes."""
    shape = np.int64(m.m64[at + _W_FORMAT])
    axes, size = shape & 0xFF, (shape >> 8) & 0xFF
    address, width, rows, planes = np.int64(m.m64[at + _W_ADDRESS]), 0, 1, 1
    for axis in range(axes):
        begin = _coordinate(s, p, row, first + axis)
        end = min(begin + _box_size(m, at, axis), np.int64(m.m64[at + _W_SIZES + axis]))
        begin = max(begin, 0)
        stride = size if axis == 0 else np.int64(m.m64[at + _W_STRIDES + axis - 1])
        address += begin * stride
        length = max(end - begin, 0)
        if axis == 0:
            width = length
        elif axis == 1:
            rows = length
        else:
            planes *= length
    _note(s, address, rows, width * size, np.int64(m.m64[at + _W_STRIDES]) if axes > 1 else 0)
    s.at[7], s.at[8] = np.uint64(planes), np.uint64(np.int64(m.m64[at + _W_STRIDES + 1]) if axes > 2 else 0)
