"""Instructions of a kernel as rows of numbers for the interpreter, and as the code of a trace.

What has no row is refused with its instruction and line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from dse.errors import ConfigError
from dse_ptx import interpreter as vm
from dse_ptx.control_flow import Flow, live_registers, reconvergence
from dse_ptx.parser import refusal
from dse_ptx.program import TYPE_BYTES, Address, Function, Group, Immediate, Instruction, Operand, Register, Symbol
from dse_ptx.warp_trace import Code, Unit

_AXES = [f"%{name}.{axis}" for name in ("tid", "ntid", "ctaid", "nctaid") for axis in "xyz"]
SPECIAL_REGISTERS = (
    *_AXES,
    *("%laneid", "%warpid", "%nwarpid", "%lanemask_eq", "%lanemask_lt", "%lanemask_le", "%lanemask_gt", "%lanemask_ge"),
    *("%clock", "%dynamic_smem_size", "%smid", "%gridid"),
)
"""Special registers by number. `%clock` counts executed warp instructions."""
_SAME = {"%clock64": "%clock", "%globaltimer": "%clock", "%total_smem_size": "%dynamic_smem_size"}
_SPACES = {
    "global": vm.GLOBAL,
    "shared": vm.SHARED,
    "shared_cta": vm.SHARED,
    "local": vm.LOCAL,
    "param": vm.PARAM,
    "const": vm.GLOBAL,
}
_FORMATS = {"f16": vm.F16, "bf16": vm.BF16, "f32": vm.F32, "f64": vm.F64, "tf32": vm.TF32}
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan")
_UNSIGNED = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
_ROUNDING = {"rn": vm.RN, "rz": vm.RZ, "rna": vm.RNA, "rni": vm.RN, "rzi": vm.RZ, "rmi": vm.RM, "rpi": vm.RP}
_ATOMS = ("add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec")
_NOTHING = (
    "membar",
    "fence",
    "nanosleep",
    "prefetch",
    "prefetchu",
    "griddepcontrol",
    "discard",
    "setmaxnreg",
    "pmevent",
)
_NUMBER_OF = {"x1": 1, "x2": 2, "x4": 4, "v2": 2, "v4": 4, "v8": 8}


class _UnreadError(Exception):
    """What of an instruction is not executed."""


@dataclass
class _Row:
    """A row that is made: fields by number, the operands written and read."""

    fields: dict[int, int] = field(default_factory=dict)
    writes: list[Operand] = field(default_factory=list)
    reads: list[Operand] = field(default_factory=list)
    unit: Unit = Unit.INTEGER
    operations: float = 0.0
    immediate: str = "u64"  # type of the constants that are read


@dataclass(frozen=True)
class Decoded:
    """A kernel that can be executed.

    rows (instructions, `interpreter.FIELDS`); operands: numbers of constants, then of registers; constants: their bits.
    lines: of the text. registers: name -> number. shared_bytes: static; local_bytes: of a thread. code: for traces.
    """

    function: Function
    rows: NDArray[np.int64]
    operands: NDArray[np.int64]
    constants: NDArray[np.uint64]
    lines: tuple[int, ...]
    registers: Mapping[str, int]
    registers_per_thread: int
    shared_bytes: int
    local_bytes: int
    param_bytes: int
    code: Code


def decode(function: Function, addresses: Mapping[str, int], path: str = "ptx", shared: int = 0) -> Decoded:
    """Decode a kernel without calls. addresses: of the module's variables, in their state space; shared: bytes of those.

    Raises ConfigError for all instructions that cannot be executed, at once.
    """
    decoder = _Decoder(function, addresses, path, shared)
    rows, problems = [], []
    for each in function.instructions:
        try:
            rows.append(decoder.row(each))
        except _UnreadError as error:
            problems += refusal(path, each.line, each.opcode, f"is not executed: {error}").problems
    if problems:
        raise ConfigError(problems)
    return decoder.assembled(rows)


class _Decoder:
    """Numbers of one kernel's registers, variables and constants."""

    def __init__(self, function: Function, addresses: Mapping[str, int], path: str, shared: int) -> None:
        self.function, self.path = function, path
        self.registers = {name: number for number, name in enumerate(function.registers)}
        self.constants = dict[int, int]()
        self.addresses = dict(addresses)
        self.sizes = {"shared": shared, "local": 0}
        for each in function.variables:
            if each.space in self.sizes:
                offset = -(-self.sizes[each.space] // each.align) * each.align
                self.addresses[each.name] = offset
                self.sizes[each.space] = offset + each.size
        self.addresses |= {each.name: each.offset for each in function.parameters}

    def row(self, instruction: Instruction) -> _Row:
        """Row of one instruction. Raises _UnreadError."""
        if instruction.name in _NOTHING:
            return _Row({vm.KIND: vm.NOTHING})
        make = _MAKERS.get(instruction.name)
        if make is None:
            raise _UnreadError("the instruction is not known")
        try:
            row = make(self, instruction)
        except (IndexError, KeyError, AttributeError) as error:
            raise _UnreadError(f"its modifiers or operands are not known ({error})") from None
        if instruction.guard:
            row.fields[vm.NEGATED] = int(instruction.guard.negated)
        return row

    def bits_of(self, operand: Operand) -> int:
        """Bits of a register."""
        if not isinstance(operand, Register):
            return 64
        kind = self.function.registers[operand.name]
        return 1 if kind == "pred" else 8 * TYPE_BYTES[kind]

    def number(self, operand: Operand, kind: str) -> int:
        """Number of an operand: of a register (counted from 0), or -1 - number of a constant."""
        if isinstance(operand, Group) and operand.is_pair:
            operand = operand.members[0]
        if isinstance(operand, Register):
            return self.registers[operand.name]
        if isinstance(operand, Address):
            operand = operand.base or Immediate(0)
            kind = "u64"
            if isinstance(operand, Register):
                return self.registers[operand.name]
        if isinstance(operand, Symbol):
            if operand.name not in self.addresses:
                raise _UnreadError(f"{operand.name} is not declared")
            operand = Immediate(self.addresses[operand.name])
        if not isinstance(operand, Immediate):
            raise _UnreadError("an operand has another form")
        bits = _immediate_bits(operand, kind)
        return -1 - self.constants.setdefault(bits, len(self.constants))

    def assembled(self, rows: list[_Row]) -> Decoded:
        """The kernel of these rows."""
        instructions = (*self.function.instructions, Instruction("exit", (), (), self.last_line))
        rows = [*rows, _Row({vm.KIND: vm.EXIT}, unit=Unit.EXIT)]
        places, table = list[int](), np.zeros((len(rows), vm.FIELDS), np.int64)
        written, read = list[list[int]](), list[list[int]]()
        for number, (row, instruction) in enumerate(zip(rows, instructions, strict=True)):
            writes = [self.number(each, "u64") for each in row.writes]
            reads = [self.number(each, row.immediate) for each in row.reads]
            fields = {vm.FIRST: len(places), vm.WRITES: len(writes), vm.READS: len(reads), vm.GUARD: -1}
            if instruction.guard:
                fields[vm.GUARD] = len(places) + len(writes) + len(reads)
            places += [*writes, *reads]
            guard = [self.registers[instruction.guard.register]] if instruction.guard else []
            places += guard
            written.append([each for each in writes if each >= 0])
            read.append([each for each in (*reads, *guard) if each >= 0])
            for name, value in {vm.BITS: 64, **row.fields, **fields}.items():
                table[number, name] = value
        flows = [
            Flow(tuple(w), tuple(r), _target(row), row.fields[vm.KIND] == vm.EXIT, each.guard is not None)
            for w, r, row, each in zip(written, read, rows, instructions, strict=True)
        ]
        table[:, vm.MEETS] = reconvergence(flows)
        count = len(self.constants)
        kinds = list(self.function.registers.values())
        widths = [0 if kind == "pred" else -(-TYPE_BYTES[kind] // 4) for kind in kinds]
        parameters = self.function.parameters
        return Decoded(
            self.function,
            table,
            np.array([each + count if each >= 0 else -1 - each for each in places] or [0], np.int64),
            np.array(list(self.constants), np.uint64),
            tuple(each.line for each in instructions),
            self.registers,
            live_registers(flows, widths),
            self.sizes["shared"],
            -(-self.sizes["local"] // 16) * 16,
            max((each.offset + each.size for each in parameters), default=0),
            _code(instructions, rows, written, read),
        )

    @property
    def last_line(self) -> int:
        """Line of the last instruction."""
        return self.function.instructions[-1].line if self.function.instructions else 0


def _target(row: _Row) -> int:
    return row.fields[vm.TARGET] if row.fields[vm.KIND] == vm.BRANCH else -1


def _code(
    instructions: tuple[Instruction, ...], rows: list[_Row], written: list[list[int]], read: list[list[int]]
) -> Code:
    return Code(
        tuple(each.opcode for each in instructions),
        np.array([row.unit for row in rows], np.int8),
        _padded(written),
        _padded(read),
        np.array([row.operations for row in rows], np.float64),
    )


def _padded(numbers: list[list[int]]) -> NDArray[np.int32]:
    width = max(map(len, numbers), default=0) or 1
    return np.array([each + [-1] * (width - len(each)) for each in numbers], np.int32)


def _immediate_bits(constant: Immediate, kind: str) -> int:
    """Bits of a constant as an operand of a type."""
    bits = 1 if kind == "pred" else 8 * TYPE_BYTES[kind]
    value = constant.value
    if constant.float_bits == 64 and kind == "f32":
        value = int(np.array(value, np.uint64).view(np.float64).astype(np.float32).view(np.uint32))
    elif constant.float_bits == 32 and kind == "f64":
        value = int(np.array(value, np.uint32).view(np.float32).astype(np.float64).view(np.uint64))
    elif not constant.float_bits and kind in ("f32", "f64") and value:
        raise _UnreadError("a floating-point operand is written as an integer")
    return int(value % (1 << bits))


def _bits(kind: str) -> int:
    return 1 if kind == "pred" else 8 * TYPE_BYTES[kind]


def _signed(kind: str) -> int:
    """Bits from which the sign of an operand is extended."""
    return _bits(kind) if kind[0] == "s" else 0


def _is_float(kind: str) -> bool:
    return kind.startswith(("f", "bf"))


def _only(instruction: Instruction, *known: str) -> None:
    """Raise _UnreadError for modifiers that are neither types nor known."""
    unknown = [each for each in instruction.modifiers if each not in known and each not in TYPE_BYTES]
    if unknown:
        raise _UnreadError(f"modifier .{unknown[0]}")


def _float_flags(instruction: Instruction) -> int:
    flags = {"ftz": vm.FTZ, "sat": vm.SAT, "relu": vm.RELU, "NaN": vm.PROPAGATE}
    packed = vm.PACKED if any(each.endswith("x2") for each in instruction.types) else 0
    return sum(flags.get(each, 0) for each in instruction.modifiers) | packed


def _float_row(op: int, work: float = 1.0, unit: Unit | None = None) -> Callable[[_Decoder, Instruction], _Row]:
    """Maker of a floating-point operation. work: operations of a lane."""

    def make(decoder: _Decoder, instruction: Instruction) -> _Row:
        _only(instruction, "rn", "ftz", "sat", "relu", "NaN", "approx", "full")
        kind, (result, *sources) = instruction.types[-1], instruction.operands
        packed = 2.0 if kind.endswith("x2") else 1.0
        base = kind.removesuffix("x2")
        units = {"f64": Unit.FP64, "f32": Unit.FP32}
        fields = {vm.KIND: vm.FLOAT, vm.OP: op, vm.FORMAT: _FORMATS[base], vm.FLAGS: _float_flags(instruction)}
        fields[vm.BITS] = _bits(kind)
        if base == "f64" and fields[vm.FLAGS]:
            raise _UnreadError("modifier of double precision")
        return _Row(fields, [result], sources, unit or units.get(base, Unit.FP16), packed * work, kind)

    return make


def _integer_row(
    op: int, *, signs: str = "xy", wide: bool = False, bits: int = 0
) -> Callable[[_Decoder, Instruction], _Row]:
    """Maker of an integer operation. signs: operands with the sign of the type; bits: of the result, if not the type's."""

    def make(decoder: _Decoder, instruction: Instruction) -> _Row:
        kind, (result, *sources) = instruction.types[-1], instruction.operands
        fields = {vm.KIND: vm.INTEGER, vm.OP: op, vm.BYTES: _bits(kind)}
        fields[vm.BITS] = bits or (2 if wide else 1) * _bits(kind)
        for name, place in (("x", vm.X), ("y", vm.Y), ("z", vm.Z)):
            fields[place] = _signed(kind) if name in signs else 0
        # shift counts and the third operand of a wide product have other types, whose constants need no cutting
        immediate = {1: "u32", 64: "u64"}.get(_bits(kind), kind) if signs == "xy" and not wide else "s64"
        return _Row(fields, [result], sources, Unit.INTEGER, 0.0, immediate)

    return make


def _cut(kind: str, operand: Operand) -> Operand:
    """A constant operand cut to its own type, before the instruction's is applied."""
    return Immediate(_immediate_bits(operand, kind)) if isinstance(operand, Immediate) else operand


def _either(integer: Callable[..., _Row], floating: Callable[..., _Row]) -> Callable[[_Decoder, Instruction], _Row]:
    """Maker of an operation by its type."""

    def make(decoder: _Decoder, instruction: Instruction) -> _Row:
        if _is_float(instruction.types[-1]):
            return floating(decoder, instruction)
        _only(instruction, "lo", "hi", "wide")
        return integer(decoder, instruction)

    return make


def _product(low: int, high: int) -> Callable[[_Decoder, Instruction], _Row]:
    """Maker of `mul` and `mad` by the part of the product."""

    def make(decoder: _Decoder, instruction: Instruction) -> _Row:
        kind, names = instruction.types[-1], instruction.modifiers
        operands = list(instruction.operands)
        operands[1:3] = [_cut(kind, each) for each in operands[1:3]]
        cut = replace(instruction, operands=tuple(operands))
        if "wide" in names:
            return _integer_row(low, wide=True)(decoder, cut)
        row = _integer_row(high if "hi" in names else low, signs="xyz" if kind[0] == "s" else "")(decoder, cut)
        row.immediate = kind
        return row

    return make


def _shift(op: int) -> Callable[[_Decoder, Instruction], _Row]:
    """Maker of shifts and fields, whose first operand alone has the type."""

    def make(decoder: _Decoder, instruction: Instruction) -> _Row:
        kind, (result, value, *counts) = instruction.types[-1], instruction.operands
        operands = (result, _cut(kind, value), *(_cut("u32", each) for each in counts))
        return _integer_row(op, signs="x")(decoder, replace(instruction, operands=operands))

    return make


def _move(decoder: _Decoder, instruction: Instruction) -> _Row:
    kind, (result, source) = instruction.types[-1], instruction.operands
    if isinstance(result, Group):
        if len(result.members) != 2:
            raise _UnreadError("unpacks other than two halves")
        return _Row({vm.KIND: vm.UNPACK, vm.BITS: _bits(kind) // 2}, list(result.members), [source], immediate=kind)
    if isinstance(source, Group):
        if len(source.members) != 2:
            raise _UnreadError("packs other than two halves")
        fields = {vm.KIND: vm.INTEGER, vm.OP: vm.PACK, vm.BITS: _bits(kind), vm.BYTES: _bits(kind)}
        return _Row(fields, [result], list(source.members), immediate=f"b{_bits(kind) // 2}")
    if isinstance(source, Symbol) and source.name.startswith("%"):
        name = _SAME.get(source.name, source.name)
        if name not in SPECIAL_REGISTERS:
            raise _UnreadError(f"special register {name}")
        return _Row({vm.KIND: vm.SPECIAL, vm.MODE: SPECIAL_REGISTERS.index(name)}, [result])
    if isinstance(source, Address):
        raise _UnreadError("moves an address with an offset")
    fields = {vm.KIND: vm.INTEGER, vm.OP: vm.MOV, vm.BITS: _bits(kind), vm.BYTES: _bits(kind)}
    return _Row(fields, [result], [source], immediate=kind)


def _plain(op: int, unit: Unit = Unit.INTEGER) -> Callable[[_Decoder, Instruction], _Row]:
    """Maker of operations on bits whose type does not count."""

    def make(decoder: _Decoder, instruction: Instruction) -> _Row:
        kind, (result, *sources) = instruction.types[0], instruction.operands
        fields = {vm.KIND: vm.INTEGER, vm.OP: op, vm.BITS: _bits(kind), vm.BYTES: _bits(kind)}
        return _Row(fields, [result], sources, unit, 0.0, kind)

    return make


def _select(decoder: _Decoder, instruction: Instruction) -> _Row:
    kind, (result, first, second, chosen) = instruction.types[0], instruction.operands
    operands = (result, _cut(kind, first), _cut(kind, second), chosen)
    row = _plain(vm.SELP)(decoder, replace(instruction, operands=operands))
    row.immediate = "u64"  # they are cut
    if instruction.name == "slct":
        if instruction.types[1] != "s32":
            raise _UnreadError("selects by a floating-point number")
        row.fields |= {vm.OP: vm.SLCT, vm.Z: 32}
    return row


def _compare(decoder: _Decoder, instruction: Instruction) -> _Row:
    """`setp` and `set`, with a third predicate or without."""
    names, kind, (result, first, second, *third) = instruction.modifiers, instruction.types[-1], instruction.operands
    word = _UNSIGNED.get(names[0], names[0])
    combine = {"and": vm.AND_Z, "or": vm.OR_Z, "xor": vm.XOR_Z}
    flags = sum(combine[each] for each in names[1:] if each in combine)
    if third and isinstance(third[0], Group):
        flags |= vm.NOT_Z
    if bool(third) != any(each in combine for each in names):
        raise _UnreadError("its third operand")
    results = list(result.members) if isinstance(result, Group) else [result]
    true, bits = 1, 1
    if instruction.name == "set":
        true, bits = (0x3F800000 if instruction.types[0] == "f32" else 0xFFFFFFFF), 32
    fields = {vm.MODE: _COMPARISONS.index(word), vm.OFFSET: true, vm.BITS: bits, vm.BYTES: bits}
    fields |= {vm.KIND: vm.INTEGER, vm.OP: vm.SETP, vm.X: _signed(kind), vm.Y: _signed(kind)}
    unit = Unit.INTEGER
    if _is_float(kind):
        flags |= vm.FTZ if "ftz" in names else 0
        fields |= {vm.KIND: vm.FLOAT, vm.OP: vm.FSETP, vm.FORMAT: _FORMATS[kind], vm.X: 0, vm.Y: 0}
        unit = {"f64": Unit.FP64, "f32": Unit.FP32}.get(kind, Unit.FP16)
    reads = [_cut(kind, first), _cut(kind, second), *third]
    return _Row(fields | {vm.FLAGS: flags}, results, reads, unit, 0.0, "u64")


def _test(decoder: _Decoder, instruction: Instruction) -> _Row:
    words = ("finite", "infinite", "number", "notanumber", "normal", "subnormal")
    fields = {vm.KIND: vm.FLOAT, vm.OP: vm.FTESTP, vm.MODE: words.index(instruction.modifiers[0])}
    fields |= {vm.FORMAT: _FORMATS[instruction.types[0]], vm.BITS: 1}
    return _Row(fields, [instruction.operands[0]], [instruction.operands[1]], Unit.FP32, 0.0, instruction.types[0])


def _convert(decoder: _Decoder, instruction: Instruction) -> _Row:
    _only(instruction, *_ROUNDING, "ftz", "sat", "relu", "satfinite")
    names, types, (result, *sources) = instruction.modifiers, instruction.types, instruction.operands
    target, source = types[0].removesuffix("x2"), types[-1]
    flags = _float_flags(instruction) & ~vm.PACKED
    word = next((each for each in names if each in _ROUNDING), "rn" if _is_float(source) else "rn")
    flags |= vm.INTEGRAL if word.endswith("i") else 0
    fields = {vm.KIND: vm.CONVERT, vm.MODE: _ROUNDING[word], vm.FLAGS: flags, vm.X: _signed(source)}
    fields |= {vm.SOURCE: _FORMATS.get(source, vm.INT), vm.FORMAT: _FORMATS.get(target, vm.INT)}
    fields |= {vm.BITS: _bits(target), vm.Y: int(target[0] == "s")}
    is_exact = target in ("f32", "f64") or word in ("rn", "rna") or flags & vm.INTEGRAL or not _is_float(target)
    if not is_exact and not (word == "rz" and target in ("f16", "bf16")):
        raise _UnreadError(f"rounding .{word}")
    if target == "f32" and word == "rz" and source != "f32":
        raise _UnreadError("rounding .rz")
    if fields[vm.SOURCE] == vm.INT and fields[vm.FORMAT] == vm.INT:
        bits = min(_bits(target), 63)
        fields[vm.OFFSET] = -(1 << (bits - 1)) if target[0] == "s" else 0
        fields[vm.BYTES] = (1 << (bits - 1)) - 1 if target[0] == "s" else (1 << bits) - 1
        if flags & vm.SAT and 64 in (_bits(target), _bits(source)):
            raise _UnreadError("saturation of 64 bits")
        if decoder.bits_of(result) > _bits(target):  # a wider register holds the sign-extended value
            fields[vm.BITS] = decoder.bits_of(result)
            fields[vm.X] = (
                min(_bits(source), _bits(target)) if target[0] == "s" and not flags & vm.SAT else fields[vm.X]
            )
    if not fields[vm.X] and fields[vm.SOURCE] == vm.INT and decoder.bits_of(sources[0]) > _bits(source):
        fields[vm.X] = -_bits(source)
    is_integer = fields[vm.SOURCE] == vm.INT and fields[vm.FORMAT] == vm.INT
    return _Row(fields, [result], sources, Unit.INTEGER if is_integer else Unit.SPECIAL, 0.0, source)


_CACHING = frozenset(
    "nc ca cg cs cv lu wb wt volatile relaxed acquire release acq_rel weak sys gpu cta cluster noftz sync aligned "
    "L1_no_allocate L1_evict_first L1_evict_last L1_evict_normal L1_evict_unchanged L2_evict_first L2_evict_last "
    "L2_evict_normal L2_cache_hint L2_64B L2_128B L2_256B unified read".split()  # noqa: SIM905
)


def _space(instruction: Instruction) -> int:
    return next((_SPACES[each] for each in instruction.modifiers if each in _SPACES), vm.GENERIC)


def _access(decoder: _Decoder, instruction: Instruction) -> _Row:
    """`ld` and `st`, of vectors too."""
    _only(instruction, *_CACHING, *_SPACES, *_NUMBER_OF)
    kind, is_load = instruction.types[-1], instruction.name in ("ld", "ldu")
    operands = instruction.operands[:2]
    address, value = (operands[1], operands[0]) if is_load else (operands[0], operands[1])
    if not isinstance(address, Address):
        raise _UnreadError("its address")
    values = list(value.members) if isinstance(value, Group) else [value]
    space = _space(instruction)
    fields = {vm.KIND: vm.LOAD if is_load else vm.STORE, vm.SPACE: space, vm.OFFSET: address.offset}
    fields |= {vm.BYTES: TYPE_BYTES[kind], vm.COUNT: len(values)}
    if is_load:
        fields |= {vm.X: _signed(kind), vm.BITS: max(decoder.bits_of(values[0]), _bits(kind))}
    units = {vm.SHARED: (Unit.SHARED_LOAD, Unit.SHARED_STORE), vm.PARAM: (Unit.CONSTANT, Unit.CONSTANT)}
    load, store = units.get(space, (Unit.GLOBAL_LOAD, Unit.GLOBAL_STORE))
    unit = Unit.CONSTANT if "const" in instruction.modifiers else load if is_load else store
    if is_load:
        return _Row(fields, values, [address], unit, 0.0, "u64")
    return _Row(fields, [], [address, *(_cut(kind, each) for each in values)], unit, 0.0, "u64")


def _atomic(decoder: _Decoder, instruction: Instruction) -> _Row:
    _only(instruction, *_CACHING, *_SPACES, *_ATOMS)
    kind, word = instruction.types[-1], next(each for each in instruction.modifiers if each in _ATOMS)
    has_result = instruction.name == "atom"
    result, (address, *values) = instruction.operands[:has_result], instruction.operands[has_result:]
    if not isinstance(address, Address) or any(isinstance(each, Group) for each in values):
        raise _UnreadError("its operands")
    if _is_float(kind) and (word != "add" or kind not in ("f16", "f32", "f64")):
        raise _UnreadError(f"type .{kind} of .{word}")
    fields = {vm.KIND: vm.ATOMIC, vm.OP: _ATOMS.index(word), vm.SPACE: _space(instruction), vm.OFFSET: address.offset}
    fields |= {vm.BYTES: TYPE_BYTES[kind], vm.COUNT: 1, vm.FORMAT: _FORMATS.get(kind, vm.INT), vm.X: -_signed(kind)}
    unit = Unit.SHARED_ATOMIC if fields[vm.SPACE] == vm.SHARED else Unit.GLOBAL_ATOMIC
    results = [] if not result or result[0] == Symbol("_") else list(result)
    return _Row(fields, results, [address, *(_cut(kind, each) for each in values)], unit, 0.0, "u64")


def _copy(decoder: _Decoder, instruction: Instruction) -> _Row:
    """`cp.async` and its groups, which have nothing to wait for."""
    if "shared" not in instruction.modifiers and "shared_cta" not in instruction.modifiers:
        if "async" in instruction.modifiers and "bulk" not in instruction.modifiers:
            return _Row({vm.KIND: vm.NOTHING})
        raise _UnreadError("bulk copies")
    if "bulk" in instruction.modifiers:
        raise _UnreadError("bulk copies")
    target, source, size, *given = instruction.operands
    if not isinstance(target, Address) or not isinstance(source, Address) or not isinstance(size, Immediate):
        raise _UnreadError("its operands")
    fields = {vm.KIND: vm.COPY, vm.BYTES: size.value, vm.COUNT: 1, vm.OFFSET: target.offset, vm.TARGET: source.offset}
    return _Row(fields, [], [target, source, given[0] if given else size], Unit.GLOBAL_LOAD, 0.0, "u64")


def _matrix(decoder: _Decoder, instruction: Instruction) -> _Row:
    _only(instruction, "sync", "aligned", "m8n8", "x1", "x2", "x4", "trans", *_SPACES)
    value, address = instruction.operands
    if not isinstance(address, Address) or instruction.types != ("b16",):
        raise _UnreadError("its operands")
    values = list(value.members) if isinstance(value, Group) else [value]
    fields = {vm.KIND: vm.MATRIX, vm.COUNT: len(values), vm.SPACE: _space(instruction), vm.OFFSET: address.offset}
    fields |= {vm.MODE: int("trans" in instruction.modifiers), vm.BYTES: 16}
    return _Row(fields, values, [address], Unit.SHARED_LOAD, 0.0, "u64")


_DEPTH = {"f16": 2, "bf16": 2, "tf32": 1, "s8": 4}


def _mma(decoder: _Decoder, instruction: Instruction) -> _Row:
    """`mma.sync` m16n8 of halves, TF32 and signed bytes."""
    _only(instruction, "sync", "aligned", "row", "col", *(f"m16n8k{k}" for k in (4, 8, 16, 32)))
    groups = [each.members if isinstance(each, Group) else (each,) for each in instruction.operands]
    result, kind = instruction.types[0], instruction.types[1]
    depth = next(int(each.partition("k")[2]) for each in instruction.modifiers if each.startswith("m16n8k"))
    each, rows = _DEPTH[kind], len(groups[1])
    counts = (2 if result == "f16" else 4, rows, rows // 2, 2 if result == "f16" else 4)
    if tuple(map(len, groups)) != counts or 4 * each * (rows // 2) != depth:
        raise _UnreadError("the shape of its fragments")
    accumulators = {"f32": vm.F32, "f16": vm.F16, "s32": vm.INT}
    fields = {vm.KIND: vm.MMA, vm.COUNT: rows, vm.MODE: each, vm.FORMAT: accumulators[result]}
    fields[vm.SOURCE] = _FORMATS.get(kind, vm.INT)
    reads = [member for group in groups[1:] for member in group]
    return _Row(fields, list(groups[0]), reads, Unit.TENSOR, 2 * 16 * 8 * depth / 32, "u64")


def _shuffle(decoder: _Decoder, instruction: Instruction) -> _Row:
    _only(instruction, "sync", "up", "down", "bfly", "idx")
    modes = {"up": vm.UP, "down": vm.DOWN, "bfly": vm.BFLY, "idx": vm.IDX}
    mode = next(modes[each] for each in instruction.modifiers if each in modes)
    result, *sources = instruction.operands
    results = list(result.members) if isinstance(result, Group) else [result]
    return _Row({vm.KIND: vm.SHUFFLE, vm.MODE: mode, vm.BITS: 32}, results, sources[:3], Unit.SHARED_LOAD, 0.0, "u32")


def _vote(decoder: _Decoder, instruction: Instruction) -> _Row:
    """`vote`, `match.any`, `activemask` and `redux`."""
    words = {"all": vm.V_ALL, "any": vm.V_ANY, "uni": vm.V_UNI, "ballot": vm.V_BALLOT}
    result, *sources = instruction.operands
    fields = {vm.KIND: vm.VOTE}
    if instruction.name == "vote":
        fields[vm.OP] = next(words[each] for each in instruction.modifiers if each in words)
        fields[vm.FLAGS] = vm.NOT_Z if isinstance(sources[0], Group) else 0
    elif instruction.name == "activemask":
        fields[vm.OP] = vm.V_ACTIVE
    elif instruction.name == "match" and "any" in instruction.modifiers:
        fields[vm.OP] = vm.V_MATCH
    elif instruction.name == "redux" and not _is_float(instruction.types[-1]):
        word = next(each for each in instruction.modifiers if each in _ATOMS[:6])
        sign = _signed(instruction.types[-1])
        fields |= {vm.OP: vm.V_REDUX, vm.MODE: _ATOMS.index(word), vm.X: 0}
        if sign:  # compared as numbers of 64 bits
            fields[vm.X] = sign
    else:
        raise _UnreadError("its modifiers")
    return _Row(fields, [result], sources[:1], Unit.INTEGER, 0.0, instruction.types[-1] if instruction.types else "u32")


def _branch(decoder: _Decoder, instruction: Instruction) -> _Row:
    _only(instruction, "uni")
    label = instruction.operands[0]
    if not isinstance(label, Symbol) or label.name not in decoder.function.labels:
        raise _UnreadError("its label is not in the function")
    return _Row({vm.KIND: vm.BRANCH, vm.TARGET: decoder.function.labels[label.name]}, unit=Unit.BRANCH)


def _barrier(decoder: _Decoder, instruction: Instruction) -> _Row:
    names = instruction.modifiers
    if names[:1] == ("warp",):
        return _Row({vm.KIND: vm.NOTHING})
    _only(instruction, "sync", "arrive", "aligned", "cta")
    fields = {vm.KIND: vm.BARRIER, vm.MODE: int("arrive" in names)}
    return _Row(fields, [], list(instruction.operands) or [Immediate(0)], Unit.BARRIER, 0.0, "u32")


def _end(decoder: _Decoder, instruction: Instruction) -> _Row:
    return _Row({vm.KIND: vm.EXIT}, unit=Unit.EXIT)


def _trap(decoder: _Decoder, instruction: Instruction) -> _Row:
    return _Row({vm.KIND: vm.TRAP}, unit=Unit.EXIT)


def _generic(decoder: _Decoder, instruction: Instruction) -> _Row:
    """`cvta`: addresses of global memory are generic ones; the windows of shared and local memory are added."""
    window = {vm.SHARED: vm.SHARED_WINDOW, vm.LOCAL: vm.LOCAL_WINDOW}.get(_space(instruction), 0)
    result, source = instruction.operands
    kind = instruction.types[-1]
    fields = {vm.KIND: vm.INTEGER, vm.OP: vm.ADD, vm.BITS: _bits(kind), vm.BYTES: _bits(kind)}
    offset = -window if "to" in instruction.modifiers else window
    return _Row(fields, [result], [source, Immediate(offset)], Unit.INTEGER, 0.0, "s64")


def _lookup(decoder: _Decoder, instruction: Instruction) -> _Row:
    """`lop3`: its last operand is a table of eight bits."""
    _only(instruction)
    result, *sources, table = instruction.operands
    if not isinstance(table, Immediate) or len(sources) != 3:
        raise _UnreadError("its table")
    fields = {vm.KIND: vm.INTEGER, vm.OP: vm.LOP3, vm.BITS: 32, vm.BYTES: 32, vm.MODE: table.value}
    return _Row(fields, [result], sources, Unit.INTEGER, 0.0, "b32")


def _bytes(decoder: _Decoder, instruction: Instruction) -> _Row:
    """`prmt`, `bfi`, `shf` and `dp4a`."""
    _only(instruction, "l", "r", "wrap", "clamp")
    names, kind = instruction.modifiers, instruction.types[0]
    result, *sources = instruction.operands
    op = {"prmt": vm.PRMT, "bfi": vm.BFI, "dp4a": vm.DP4A, "shf": vm.SHF_L if "l" in names else vm.SHF_R}
    mode = int("clamp" in names)
    if instruction.name == "dp4a":
        mode = (instruction.types[0][0] == "s") + 2 * (instruction.types[1][0] == "s")
    fields = {vm.KIND: vm.INTEGER, vm.OP: op[instruction.name], vm.BITS: _bits(kind), vm.BYTES: _bits(kind)}
    return _Row(fields | {vm.MODE: mode}, [result], sources, Unit.INTEGER, 0.0, kind)


def _policy(decoder: _Decoder, instruction: Instruction) -> _Row:
    """`createpolicy`: a hint to caches, of no effect on results."""
    fields = {vm.KIND: vm.INTEGER, vm.OP: vm.MOV, vm.BITS: 64, vm.BYTES: 64}
    return _Row(fields, [instruction.operands[0]], [Immediate(0)])


_SFU = Unit.SPECIAL
_MAKERS: Mapping[str, Callable[[_Decoder, Instruction], _Row]] = {
    "mov": _move,
    "add": _either(_integer_row(vm.ADD), _float_row(vm.FADD)),
    "sub": _either(_integer_row(vm.SUB), _float_row(vm.FSUB)),
    "mul": _either(_product(vm.MUL, vm.MUL_HI), _float_row(vm.FMUL)),
    "mad": _either(_product(vm.MAD, vm.MAD_HI), _float_row(vm.FFMA, 2.0)),
    "fma": _float_row(vm.FFMA, 2.0),
    "div": _either(_integer_row(vm.DIV), _float_row(vm.FDIV, 1.0, _SFU)),
    "rem": _integer_row(vm.REM),
    "min": _either(_integer_row(vm.MIN), _float_row(vm.FMIN)),
    "max": _either(_integer_row(vm.MAX), _float_row(vm.FMAX)),
    "abs": _either(_integer_row(vm.ABS), _float_row(vm.FABS)),
    "neg": _either(_integer_row(vm.NEG), _float_row(vm.FNEG)),
    "sad": _integer_row(vm.SAD),
    **{name: _plain(op) for name, op in {"and": vm.AND, "or": vm.OR, "xor": vm.XOR, "not": vm.NOT}.items()},
    "cnot": _plain(vm.CNOT),
    "selp": _select,
    "slct": _select,
    "setp": _compare,
    "set": _compare,
    "testp": _test,
    "shl": _shift(vm.SHL),
    "shr": _shift(vm.SHR),
    "bfe": _shift(vm.BFE),
    "brev": _plain(vm.BREV),
    "popc": _integer_row(vm.POPC, bits=32),
    "clz": _integer_row(vm.CLZ, bits=32),
    "bfind": _integer_row(vm.BFIND, bits=32),
    "lop3": _lookup,
    **dict.fromkeys(("prmt", "bfi", "shf", "dp4a"), _bytes),
    "rcp": _float_row(vm.FRCP, 1.0, _SFU),
    "sqrt": _float_row(vm.FSQRT, 1.0, _SFU),
    "rsqrt": _float_row(vm.FRSQRT, 1.0, _SFU),
    "ex2": _float_row(vm.FEX2, 1.0, _SFU),
    "lg2": _float_row(vm.FLG2, 1.0, _SFU),
    "sin": _float_row(vm.FSIN, 1.0, _SFU),
    "cos": _float_row(vm.FCOS, 1.0, _SFU),
    "tanh": _float_row(vm.FTANH, 1.0, _SFU),
    "copysign": _float_row(vm.FCOPYSIGN),
    "cvt": _convert,
    "cvta": _generic,
    **dict.fromkeys(("ld", "ldu", "st"), _access),
    **dict.fromkeys(("atom", "red"), _atomic),
    "cp": _copy,
    "ldmatrix": _matrix,
    "mma": _mma,
    "shfl": _shuffle,
    **dict.fromkeys(("vote", "match", "activemask", "redux"), _vote),
    "bra": _branch,
    **dict.fromkeys(("bar", "barrier"), _barrier),
    **dict.fromkeys(("ret", "exit"), _end),
    **dict.fromkeys(("trap", "brkpt"), _trap),
    "createpolicy": _policy,
}
"""Instructions that are executed, and what makes their rows."""
