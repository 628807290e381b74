"""Rows of the instructions that came with Hopper, and of copies and barriers that share their names with older ones.

Sections of the PTX ISA 8: `wgmma` 9.7.15, `mbarrier` 9.7.13.15, `cp.async.bulk` 9.7.9.25, `barrier.cluster` 9.7.13.3,
`mapa` and `getctarank` 9.7.9.23 and 24, `elect` 9.7.13.14, `setmaxnreg` 9.7.19.5.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from dse_ptx import vm
from dse_ptx.instructions import Maker
from dse_ptx.program import Address, Function, Immediate, Instruction, Operand, OperandGroup, Symbol
from dse_ptx.rows import Row, UnreadError, check_modifiers, members
from dse_ptx.warp_trace import Unit

_SPACES = {"shared": vm.SHARED, "shared_cta": vm.SHARED, "shared_cluster": vm.CLUSTER}
# order and scope of memory: instructions are done one after another, so that none changes a result
_ORDERS = ("release", "acquire", "relaxed", "cta", "cluster", "sync", "aligned")
_SINK = Symbol("_")
_KINDS = {"f16": vm.F16, "bf16": vm.BF16}
_MOST_GROUPS = 7
"""Groups that a wait may leave open here."""
_OPS = {
    "init": vm.M_INIT, "inval": vm.M_INVAL, "arrive": vm.M_ARRIVE, "arrive_drop": vm.M_DROP,
    "expect_tx": vm.M_EXPECT, "complete_tx": vm.M_COMPLETE, "pending_count": vm.M_PENDING,
}  # fmt: skip


def _space(instruction: Instruction) -> int:
    return next((_SPACES[word] for word in instruction.modifiers if word in _SPACES), vm.GENERIC)


def _address(operand: Operand) -> Address:
    if not isinstance(operand, Address):
        raise UnreadError("its address")
    return operand


def _number(operand: Operand) -> int:
    if not isinstance(operand, Immediate):
        raise UnreadError("an operand that must be a constant")
    return operand.value


def _results(operands: Sequence[Operand]) -> list[Operand]:
    """Results that are wanted."""
    return [entry for entry in operands if entry != _SINK]


def _mbarrier(function: Function, instruction: Instruction) -> Row:
    word, *names = instruction.modifiers
    if word in ("test_wait", "try_wait"):
        check_modifiers(instruction, word, "parity", *_SPACES, *_ORDERS)
        (result, where, given), address = instruction.operands[:3], _address(instruction.operands[1])
        fields = {vm.KIND: vm.MBARRIER_WAIT, vm.MODE: int("parity" in names)}
        fields |= {vm.SPACE: _space(instruction), vm.OFFSET: address.offset}
        return Row(fields, [result], [where, given], Unit.MBARRIER)
    check_modifiers(instruction, *_OPS, *_SPACES, *_ORDERS)
    op, operands = _OPS[word], instruction.operands
    fields = {vm.KIND: vm.MBARRIER, vm.OP: op, vm.SPACE: _space(instruction)}
    if op == vm.M_PENDING:
        return Row(fields, [operands[0]], [operands[1]])
    has_result = op in (vm.M_ARRIVE, vm.M_DROP)
    if has_result and "expect_tx" in names:
        if op == vm.M_DROP:
            raise UnreadError("arrive_drop with expect_tx")
        fields[vm.OP] = vm.M_ARRIVE_EXPECT
    results, (where, *values) = operands[:has_result], operands[has_result:]
    fields[vm.OFFSET] = _address(where).offset
    return Row(fields, _results(results), [where, *values], Unit.MBARRIER, 0.0, "u32")


def _copy(function: Function, instruction: Instruction) -> Row:
    """`cp.async`, `cp.async.bulk`, and their groups, which have nothing to wait for."""
    names = instruction.modifiers
    if "bulk" in names:
        return _bulk(instruction)
    if "mbarrier" in names:
        return _arrive_after_copies(instruction)
    # commits and waits of groups: the copies are done already
    if "shared" not in names and "shared_cta" not in names:
        if "async" in names:
            return Row({vm.KIND: vm.NOTHING})
        raise UnreadError("its modifiers")
    target, source, size, *lengths = instruction.operands
    if not isinstance(target, Address) or not isinstance(source, Address) or not isinstance(size, Immediate):
        raise UnreadError("its operands")
    # a copy has two offsets, and branches nowhere: TARGET holds the source's
    fields = {vm.KIND: vm.COPY, vm.BYTES: size.value, vm.COUNT: 1, vm.OFFSET: target.offset, vm.TARGET: source.offset}
    return Row(fields, [], [target, source, lengths[0] if lengths else size], Unit.GLOBAL_LOAD, 0.0, "u64")


def _arrive_after_copies(instruction: Instruction) -> Row:
    """`cp.async.mbarrier.arrive`: an arrival that comes at once, as copies do; without `.noinc` one more is awaited."""
    check_modifiers(instruction, "async", "mbarrier", "arrive", "noinc", *_SPACES)
    if "noinc" not in instruction.modifiers:
        return Row({vm.KIND: vm.NOTHING})
    where = instruction.operands[0]
    fields = {vm.KIND: vm.MBARRIER, vm.OP: vm.M_ARRIVE, vm.SPACE: _space(instruction)}
    return Row(fields | {vm.OFFSET: _address(where).offset}, [], [where], Unit.MBARRIER, 0.0, "u32")


def _bulk(instruction: Instruction) -> Row:
    names, operands = instruction.modifiers, list(instruction.operands)
    if "commit_group" in names or "wait_group" in names:
        count = _groups(operands)
        return Row({vm.KIND: vm.NOTHING}, unit=Unit.BULK, argument=count)
    if "prefetch" in names:
        return Row({vm.KIND: vm.NOTHING})
    axes = next((int(word[0]) for word in names if re.fullmatch("[1-5]d", word)), 0)
    words = ("async", "bulk", "tensor", f"{axes}d", "tile", "global", "mbarrier_complete_tx_bytes", "bulk_group")
    check_modifiers(instruction, *words, "multicast_cluster", "L2_cache_hint", *_SPACES)
    spaces = [word for word in names if word in (*_SPACES, "global")]
    if bool(axes) != ("tensor" in names) or len(spaces) != 2:
        raise UnreadError("its modifiers")
    if "L2_cache_hint" in names:
        operands.pop()
    if spaces[0] == "global":
        return _bulk_store(operands, axes)
    mask = operands.pop() if "multicast_cluster" in names else Immediate(0)
    target, source, *sizes, barrier = operands
    loads = spaces[1] == "global"
    if len(sizes) != (0 if axes else 1) or (not loads and axes) or "mbarrier_complete_tx_bytes" not in names:
        raise UnreadError("its operands")
    fields = {vm.KIND: vm.BULK, vm.OP: vm.B_LOAD if loads else vm.B_SHARED, vm.MODE: axes, vm.BYTES: 1, vm.COUNT: 1}
    fields |= {vm.FLAGS: int("multicast_cluster" in names), vm.X: _address(barrier).offset}
    fields |= {vm.OFFSET: _address(target).offset, vm.TARGET: _address(source).offset}
    coordinates = _coordinates(source, axes)
    reads = [target, source, *sizes, barrier, mask, *coordinates]
    return Row(fields, [], reads, Unit.BULK)


def _bulk_store(operands: list[Operand], axes: int) -> Row:
    target, source, *sizes = operands
    if len(sizes) != (0 if axes else 1):
        raise UnreadError("its operands")
    fields = {vm.KIND: vm.BULK, vm.OP: vm.B_STORE, vm.MODE: axes, vm.BYTES: 1, vm.COUNT: 1}
    fields |= {vm.OFFSET: _address(target).offset, vm.TARGET: _address(source).offset}
    return Row(fields, [], [target, source, *sizes, *_coordinates(target, axes)], Unit.BULK)


def _coordinates(operand: Operand, axes: int) -> list[Operand]:
    coordinates = _address(operand).coordinates
    if len(coordinates) != axes:
        raise UnreadError(f"a box of {axes} dimensions has {len(coordinates)} coordinates")
    return list(coordinates)


def _groups(operands: Sequence[Operand]) -> int:
    count = _number(operands[0]) if operands else 0
    if not 0 <= count <= _MOST_GROUPS:
        raise UnreadError(f"it leaves {count} groups open, at most {_MOST_GROUPS}")
    return count


def _wgmma(function: Function, instruction: Instruction) -> Row:
    word, operands = instruction.modifiers[0], instruction.operands
    if word != "mma_async":
        if word not in ("fence", "commit_group", "wait_group"):
            raise UnreadError(f"modifier .{word}")
        return Row({vm.KIND: vm.NOTHING}, unit=Unit.WGMMA, argument=_groups(operands))
    shape = next(entry for entry in instruction.modifiers if re.match("m[0-9]", entry))
    match = re.fullmatch(r"m64n(\d+)k16", shape)
    columns = int(match[1]) if match else 0
    check_modifiers(instruction, word, "sync", "aligned", shape)
    result, kind, other = instruction.types
    if result != "f32" or kind != other or kind not in _KINDS or columns % 8 or not 8 <= columns <= 256:
        raise UnreadError("shapes are m64nNk16, N a multiple of 8 up to 256, of f16 or bf16 with results of f32")
    sums, left, right, adds, *constants = operands
    of_sums, of_left = members(sums), members(left)
    in_registers = isinstance(left, OperandGroup)
    # A of registers is never turned: there is one constant less
    if len(of_sums) != columns // 2 or len(of_left) != (4 if in_registers else 1):
        raise UnreadError("the registers of its fragments")
    if len(constants) != (3 if in_registers else 4):
        raise UnreadError("its constants: signs of A and B, and whether they are turned")
    signs, turns = [_number(entry) for entry in constants[:2]], [_number(entry) for entry in constants[2:]]
    if any(sign not in (-1, 1) for sign in signs) or any(turn not in (0, 1) for turn in turns):
        raise UnreadError("its constants: signs are 1 or -1, turns 0 or 1")
    flags = vm.NEGATE_A * (signs[0] < 0) | vm.NEGATE_B * (signs[1] < 0) | vm.TURN_B * turns[-1]
    flags |= vm.TURN_A * turns[0] if not in_registers else 0
    fields = {vm.KIND: vm.WGMMA, vm.COUNT: columns, vm.MODE: int(in_registers), vm.SOURCE: _KINDS[kind]}
    reads = [*of_sums, *of_left, right, adds]
    # operations of a lane: 64 x N x 16 multiply-adds over 128 lanes
    work = 2 * 64 * columns * 16 / 128
    return Row(
        fields | {vm.FLAGS: flags}, of_sums, reads, Unit.WGMMA, work, "u64", -columns if in_registers else columns
    )


def _barrier(function: Function, instruction: Instruction) -> Row:
    names = instruction.modifiers
    if names[:1] == ("warp",):  # lanes of an entry of the stack run in step
        return Row({vm.KIND: vm.NOTHING})
    if names[:1] == ("cluster",):
        check_modifiers(instruction, "cluster", "arrive", "wait", *_ORDERS)
        op = vm.C_ARRIVE if "arrive" in names else vm.C_WAIT
        return Row({vm.KIND: vm.CLUSTER_SYNC, vm.OP: op}, unit=Unit.CLUSTER)
    check_modifiers(instruction, "sync", "arrive", "aligned", "cta")
    fields = {vm.KIND: vm.BARRIER, vm.MODE: int("arrive" in names)}
    # barrier 0 unless another is named; a second operand is the number of threads
    return Row(fields, [], list(instruction.operands) or [Immediate(0)], Unit.BARRIER, 0.0, "u32")


def _map_rank(function: Function, instruction: Instruction) -> Row:
    check_modifiers(instruction, *_SPACES)
    result, source, *ranks = instruction.operands
    offset = source.offset if isinstance(source, Address) else 0
    op = vm.R_MAP if ranks else vm.R_RANK
    fields = {vm.KIND: vm.MAP_RANK, vm.OP: op, vm.SPACE: _space(instruction), vm.OFFSET: offset}
    return Row(fields, [result], [source, *ranks])


def _elect(function: Function, instruction: Instruction) -> Row:
    check_modifiers(instruction, "sync")
    results, mask = members(instruction.operands[0]), instruction.operands[1]
    wanted = _results(results)
    if len(results) != 2 or results[1] == _SINK:
        raise UnreadError("its results: a lane or _, and a predicate")
    return Row({vm.KIND: vm.VOTE, vm.OP: vm.V_ELECT, vm.MODE: 2 - len(wanted)}, wanted, [mask])


def _registers(function: Function, instruction: Instruction) -> Row:
    """`setmaxnreg`: registers of a warp come and go, which changes no result."""
    check_modifiers(instruction, "inc", "dec", "sync", "aligned")
    count = _number(instruction.operands[0])
    if not 24 <= count <= 256 or count % 8:
        raise UnreadError("its registers are a multiple of 8 from 24 to 256")
    return Row({vm.KIND: vm.NOTHING})


HOPPER: Mapping[str, Maker] = {
    "mbarrier": _mbarrier,
    "cp": _copy,
    "wgmma": _wgmma,
    **dict.fromkeys(("bar", "barrier"), _barrier),
    **dict.fromkeys(("mapa", "getctarank"), _map_rank),
    "elect": _elect,
    "setmaxnreg": _registers,
}
"""Instructions, and what makes their rows, beside `instructions.MAKERS`."""
