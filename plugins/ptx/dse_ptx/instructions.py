"""Rows of the interpreter for each instruction of PTX (PTX ISA, section 9.7): one maker for each of its forms."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeAlias

from dse_ptx import vm
from dse_ptx.mma import mma
from dse_ptx.program import TYPE_BYTES, Address, Function, Immediate, Instruction, OperandGroup, Symbol
from dse_ptx.rows import (
    Row,
    UnreadError,
    bits_of,
    check_modifiers,
    cut_constant,
    is_float,
    members,
    register_bits,
    sign_of,
)
from dse_ptx.warp_trace import Unit

_AXES = [f"%{name}.{axis}" for name in ("tid", "ntid", "ctaid", "nctaid") for axis in "xyz"]
SPECIAL_REGISTERS = (
    *_AXES,
    *("%laneid", "%warpid", "%nwarpid", "%lanemask_eq", "%lanemask_lt", "%lanemask_le", "%lanemask_gt", "%lanemask_ge"),
    *("%clock", "%dynamic_smem_size", "%smid", "%gridid"),
    *(f"%{name}.{axis}" for name in ("clusterid", "nclusterid", "cluster_ctaid", "cluster_nctaid") for axis in "xyz"),
    *("%cluster_ctarank", "%cluster_nctarank", "%is_explicit_cluster"),
)
"""Special registers by number. `%clock` counts executed warp instructions."""
_SAME = {"%clock64": "%clock", "%globaltimer": "%clock", "%total_smem_size": "%dynamic_smem_size"}
_SPACES = {
    "global": vm.GLOBAL,
    "shared": vm.SHARED,
    "shared_cta": vm.SHARED,
    "shared_cluster": vm.CLUSTER,
    "local": vm.LOCAL,
    "param": vm.PARAM,
    # constants lie in global memory of the device here
    "const": vm.GLOBAL,
}
_FORMATS = {"f16": vm.F16, "bf16": vm.BF16, "f32": vm.F32, "f64": vm.F64, "tf32": vm.TF32}
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan")
# unsigned comparisons have names of their own: lower, lower or same, higher, higher or same
_UNSIGNED = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
_ROUNDING = {"rn": vm.RN, "rz": vm.RZ, "rna": vm.RNA, "rni": vm.RN, "rzi": vm.RZ, "rmi": vm.RM, "rpi": vm.RP}
_ATOMS = ("add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec")
# hints to caches and to the scheduler of grids: results do not depend on them
_HINTS = ("prefetch", "prefetchu", "griddepcontrol", "discard", "pmevent")
NOTHING = ("membar", "fence", "nanosleep", *_HINTS)
_TEXTURES = "textures and surfaces are not executed; read their arrays by ld.global"
REFUSED = {
    "tcgen05": "it works on tensor memory, which is not there; compile for sm_80, which has mma.sync",
    **dict.fromkeys(("tex", "tld4", "txq", "suld", "sust", "sured", "suq"), _TEXTURES),
}
"""Instructions that are known and not executed, and why."""
_NUMBER_OF = {"x1": 1, "x2": 2, "x4": 4, "v2": 2, "v4": 4, "v8": 8}


Maker: TypeAlias = Callable[[Function, Instruction], Row]


def _float_flags(instruction: Instruction) -> int:
    flags = {"ftz": vm.FTZ, "sat": vm.SAT, "relu": vm.RELU, "NaN": vm.PROPAGATE}
    packed = vm.PACKED if any(entry.endswith("x2") for entry in instruction.types) else 0
    return sum(flags.get(entry, 0) for entry in instruction.modifiers) | packed


def _float_row(op: int, work: float = 1.0, unit: Unit | None = None) -> Maker:
    """Maker of a floating-point operation. work: operations of a lane."""

    def make(function: Function, instruction: Instruction) -> Row:
        check_modifiers(instruction, "rn", "ftz", "sat", "relu", "NaN", "approx", "full")
        kind, (result, *sources) = instruction.types[-1], instruction.operands
        packed = 2.0 if kind.endswith("x2") else 1.0  # x2: two halves in one register
        base = kind.removesuffix("x2")
        units = {"f64": Unit.FP64, "f32": Unit.FP32}
        fields = {vm.KIND: vm.FLOAT, vm.OP: op, vm.FORMAT: _FORMATS[base], vm.FLAGS: _float_flags(instruction)}
        fields[vm.BITS] = bits_of(kind)
        # no flag is applied in double precision: refused rather than ignored
        if base == "f64" and fields[vm.FLAGS]:
            raise UnreadError("modifier of double precision")
        return Row(fields, [result], sources, unit or units.get(base, Unit.FP16), packed * work, kind)

    return make


def _integer_row(op: int, *, signs: str = "xy", wide: bool = False, bits: int = 0) -> Maker:
    """Maker of an integer operation. signs: operands with the sign of the type; bits: of the result."""

    def make(function: Function, instruction: Instruction) -> Row:
        kind, (result, *sources) = instruction.types[-1], instruction.operands
        fields = {vm.KIND: vm.INTEGER, vm.OP: op, vm.BYTES: bits_of(kind)}
        fields[vm.BITS] = bits or (2 if wide else 1) * bits_of(kind)
        for name, place in (("x", vm.X), ("y", vm.Y), ("z", vm.Z)):
            fields[place] = sign_of(kind) if name in signs else 0
        # shift counts and the third operand of a wide product have other types, whose constants need no cutting
        immediate = {1: "u32", 64: "u64"}.get(bits_of(kind), kind) if signs == "xy" and not wide else "s64"
        return Row(fields, [result], sources, Unit.INTEGER, 0.0, immediate)

    return make


def _either(integer: Callable[..., Row], floating: Callable[..., Row]) -> Maker:
    """Maker of an operation by its type."""

    def make(function: Function, instruction: Instruction) -> Row:
        if is_float(instruction.types[-1]):
            return floating(function, instruction)
        check_modifiers(instruction, "lo", "hi", "wide")
        return integer(function, instruction)

    return make


def _product(low: int, high: int) -> Maker:
    """Maker of `mul` and `mad` by the part of the product."""

    def make(function: Function, instruction: Instruction) -> Row:
        kind, names = instruction.types[-1], instruction.modifiers
        operands = list(instruction.operands)
        operands[1:3] = [cut_constant(kind, entry) for entry in operands[1:3]]
        shortened = replace(instruction, operands=tuple(operands))
        # `mul.wide` of 16 or 32 bits has a result of twice as many; both fit into the 64 bits of a lane
        if "wide" in names:
            return _integer_row(low, wide=True)(function, shortened)
        # the low half of a product is the same with and without signs; the high half is not
        row = _integer_row(high if "hi" in names else low, signs="xyz" if kind[0] == "s" else "")(function, shortened)
        row.immediate = kind
        return row

    return make


def _shift(op: int) -> Maker:
    """Maker of shifts and fields, whose first operand alone has the type."""

    def make(function: Function, instruction: Instruction) -> Row:
        kind, (result, value, *counts) = instruction.types[-1], instruction.operands
        # a shift count has 32 bits, whatever the type of what is shifted
        operands = (result, cut_constant(kind, value), *(cut_constant("u32", entry) for entry in counts))
        return _integer_row(op, signs="x")(function, replace(instruction, operands=operands))

    return make


def _move(function: Function, instruction: Instruction) -> Row:
    kind, (result, source) = instruction.types[-1], instruction.operands
    if isinstance(result, OperandGroup):
        # two registers of half the size, the lower first
        if len(result.members) != 2:
            raise UnreadError("unpacks other than two halves")
        return Row({vm.KIND: vm.UNPACK, vm.BITS: bits_of(kind) // 2}, list(result.members), [source], immediate=kind)
    if isinstance(source, OperandGroup):
        if len(source.members) != 2:
            raise UnreadError("packs other than two halves")
        fields = {vm.KIND: vm.INTEGER, vm.OP: vm.PACK, vm.BITS: bits_of(kind), vm.BYTES: bits_of(kind)}
        return Row(fields, [result], list(source.members), immediate=f"b{bits_of(kind) // 2}")
    # a name with `%` that is no register of the kernel is a special one
    if isinstance(source, Symbol) and source.name.startswith("%"):
        name = _SAME.get(source.name, source.name)
        if name not in SPECIAL_REGISTERS:
            raise UnreadError(f"special register {name}")
        return Row({vm.KIND: vm.SPECIAL, vm.MODE: SPECIAL_REGISTERS.index(name)}, [result])
    if isinstance(source, Address):
        raise UnreadError("moves an address with an offset")
    fields = {vm.KIND: vm.INTEGER, vm.OP: vm.MOV, vm.BITS: bits_of(kind), vm.BYTES: bits_of(kind)}
    return Row(fields, [result], [source], immediate=kind)


def _plain(op: int, unit: Unit = Unit.INTEGER) -> Maker:
    """Maker of operations on bits whose type does not count."""

    def make(function: Function, instruction: Instruction) -> Row:
        kind, (result, *sources) = instruction.types[0], instruction.operands
        fields = {vm.KIND: vm.INTEGER, vm.OP: op, vm.BITS: bits_of(kind), vm.BYTES: bits_of(kind)}
        return Row(fields, [result], sources, unit, 0.0, kind)

    return make


def _select(function: Function, instruction: Instruction) -> Row:
    kind, (result, first, second, chosen) = instruction.types[0], instruction.operands
    operands = (result, cut_constant(kind, first), cut_constant(kind, second), chosen)
    row = _plain(vm.SELP)(function, replace(instruction, operands=operands))
    row.immediate = "u64"  # they are cut
    if instruction.name == "slct":
        if instruction.types[1] != "s32":
            raise UnreadError("selects by a floating-point number")
        row.fields |= {vm.OP: vm.SLCT, vm.Z: 32}
    return row


def _compare(function: Function, instruction: Instruction) -> Row:
    """`setp` and `set`, with a third predicate or without."""
    names, kind, (result, first, second, *third) = instruction.modifiers, instruction.types[-1], instruction.operands
    word = _UNSIGNED.get(names[0], names[0])
    combine = {"and": vm.AND_Z, "or": vm.OR_Z, "xor": vm.XOR_Z}
    flags = sum(combine[entry] for entry in names[1:] if entry in combine)
    if third and isinstance(third[0], OperandGroup):  # `!p`
        flags |= vm.NOT_Z
    if bool(third) != any(entry in combine for entry in names):
        raise UnreadError("its third operand")
    results = members(result)
    true, bits = 1, 1
    if instruction.name == "set":
        # `set` writes all ones, or 1.0, where the comparison holds
        true, bits = (0x3F800000 if instruction.types[0] == "f32" else 0xFFFFFFFF), 32
    fields = {vm.MODE: _COMPARISONS.index(word), vm.OFFSET: true, vm.BITS: bits, vm.BYTES: bits}
    fields |= {vm.KIND: vm.INTEGER, vm.OP: vm.SETP, vm.X: sign_of(kind), vm.Y: sign_of(kind)}
    unit = Unit.INTEGER
    if is_float(kind):
        flags |= vm.FTZ if "ftz" in names else 0
        fields |= {vm.KIND: vm.FLOAT, vm.OP: vm.FSETP, vm.FORMAT: _FORMATS[kind], vm.X: 0, vm.Y: 0}
        unit = {"f64": Unit.FP64, "f32": Unit.FP32}.get(kind, Unit.FP16)
    reads = [cut_constant(kind, first), cut_constant(kind, second), *third]
    return Row(fields | {vm.FLAGS: flags}, results, reads, unit, 0.0, "u64")


def _test(function: Function, instruction: Instruction) -> Row:
    words = ("finite", "infinite", "number", "notanumber", "normal", "subnormal")
    fields = {vm.KIND: vm.FLOAT, vm.OP: vm.FTESTP, vm.MODE: words.index(instruction.modifiers[0])}
    fields |= {vm.FORMAT: _FORMATS[instruction.types[0]], vm.BITS: 1}
    return Row(fields, [instruction.operands[0]], [instruction.operands[1]], Unit.FP32, 0.0, instruction.types[0])


def _convert(function: Function, instruction: Instruction) -> Row:
    check_modifiers(instruction, *_ROUNDING, "ftz", "sat", "relu", "satfinite")
    names, types, (result, *sources) = instruction.modifiers, instruction.types, instruction.operands
    target, source = types[0].removesuffix("x2"), types[-1]
    # the halves of a packed conversion are put together by `_convert_pair`
    flags = _float_flags(instruction) & ~vm.PACKED
    word = next((entry for entry in names if entry in _ROUNDING), "rn")
    flags |= vm.INTEGRAL if word.endswith("i") else 0
    fields = {vm.KIND: vm.CONVERT, vm.MODE: _ROUNDING[word], vm.FLAGS: flags, vm.X: sign_of(source)}
    fields |= {vm.SOURCE: _FORMATS.get(source, vm.INT), vm.FORMAT: _FORMATS.get(target, vm.INT)}
    fields |= {vm.BITS: bits_of(target), vm.Y: int(target[0] == "s")}
    # the interpreter rounds to the nearest into f32 and f64; truncation is known for halves alone
    is_exact = target in ("f32", "f64") or word in ("rn", "rna") or flags & vm.INTEGRAL or not is_float(target)
    if not is_exact and not (word == "rz" and target in ("f16", "bf16")):
        raise UnreadError(f"rounding .{word}")
    # integers of 32 bits are exact in f64; those of 64 bits are rounded
    inexact = (target == "f32" and source != "f32") or (target == "f64" and source in ("s64", "u64"))
    if word == "rz" and inexact:
        raise UnreadError("rounding .rz")
    if fields[vm.SOURCE] == vm.INT and fields[vm.FORMAT] == vm.INT:
        bits = min(bits_of(target), 63)
        # limits of the target, for `.sat`
        fields[vm.OFFSET] = -(1 << (bits - 1)) if target[0] == "s" else 0
        fields[vm.BYTES] = (1 << (bits - 1)) - 1 if target[0] == "s" else (1 << bits) - 1
        if flags & vm.SAT and 64 in (bits_of(target), bits_of(source)):
            raise UnreadError("saturation of 64 bits")
        if register_bits(function, result) > bits_of(target):  # a wider register holds the sign-extended value
            fields[vm.BITS] = register_bits(function, result)
            fields[vm.X] = (
                min(bits_of(source), bits_of(target)) if target[0] == "s" and not flags & vm.SAT else fields[vm.X]
            )
    # a negative X reads that many bits and clears the others
    if not fields[vm.X] and fields[vm.SOURCE] == vm.INT and register_bits(function, sources[0]) > bits_of(source):
        fields[vm.X] = -bits_of(source)
    is_integer = fields[vm.SOURCE] == vm.INT and fields[vm.FORMAT] == vm.INT
    return Row(fields, [result], sources, Unit.INTEGER if is_integer else Unit.SPECIAL, 0.0, source)


# Hints of caching and scopes of memory: blocks run one after another, so that neither changes a result.
_CACHING = (
    "nc ca cg cs cv lu wb wt volatile relaxed acquire release acq_rel weak sys gpu cta cluster noftz sync aligned "
    "L1_no_allocate L1_evict_first L1_evict_last L1_evict_normal L1_evict_unchanged L2_evict_first L2_evict_last "
    "L2_evict_normal L2_cache_hint L2_64B L2_128B L2_256B unified read"
)


def _space(instruction: Instruction) -> int:
    return next((_SPACES[entry] for entry in instruction.modifiers if entry in _SPACES), vm.GENERIC)


def _access(function: Function, instruction: Instruction) -> Row:
    """`ld` and `st`, of vectors too."""
    check_modifiers(instruction, *_CACHING.split(), *_SPACES, *_NUMBER_OF)
    kind, is_load = instruction.types[-1], instruction.name in ("ld", "ldu")
    operands = instruction.operands[:2]
    address, value = (operands[1], operands[0]) if is_load else (operands[0], operands[1])
    if not isinstance(address, Address):
        raise UnreadError("its address")
    values = members(value)
    space = _space(instruction)
    fields = {vm.KIND: vm.LOAD if is_load else vm.STORE, vm.SPACE: space, vm.OFFSET: address.offset}
    fields |= {vm.BYTES: TYPE_BYTES[kind], vm.COUNT: len(values)}
    # a narrow load fills its register: with the sign of its type, or zeros
    if is_load:
        fields |= {vm.X: sign_of(kind), vm.BITS: max(register_bits(function, values[0]), bits_of(kind))}
    units = dict.fromkeys((vm.SHARED, vm.CLUSTER), (Unit.SHARED_LOAD, Unit.SHARED_STORE))
    load, store = (units | {vm.PARAM: (Unit.CONSTANT, Unit.CONSTANT)}).get(space, (Unit.GLOBAL_LOAD, Unit.GLOBAL_STORE))
    unit = Unit.CONSTANT if "const" in instruction.modifiers else load if is_load else store
    if is_load:
        return Row(fields, values, [address], unit, 0.0, "u64")
    return Row(fields, [], [address, *(cut_constant(kind, entry) for entry in values)], unit, 0.0, "u64")


def _atomic(function: Function, instruction: Instruction) -> Row:
    check_modifiers(instruction, *_CACHING.split(), *_SPACES, *_ATOMS)
    kind, word = instruction.types[-1], next(entry for entry in instruction.modifiers if entry in _ATOMS)
    has_result = instruction.name == "atom"
    result, (address, *values) = instruction.operands[:has_result], instruction.operands[has_result:]
    if not isinstance(address, Address) or any(isinstance(entry, OperandGroup) for entry in values):
        raise UnreadError("its operands")
    if is_float(kind) and (word != "add" or kind not in ("f16", "f32", "f64")):
        raise UnreadError(f"type .{kind} of .{word}")
    fields = {vm.KIND: vm.ATOMIC, vm.OP: _ATOMS.index(word), vm.SPACE: _space(instruction), vm.OFFSET: address.offset}
    # X is negative: an atomic's numbers are not extended when they are read, but compared with their signs
    fields |= {vm.BYTES: TYPE_BYTES[kind], vm.COUNT: 1, vm.FORMAT: _FORMATS.get(kind, vm.INT), vm.X: -sign_of(kind)}
    unit = Unit.SHARED_ATOMIC if fields[vm.SPACE] in (vm.SHARED, vm.CLUSTER) else Unit.GLOBAL_ATOMIC
    results = [] if not result or result[0] == Symbol("_") else list(result)  # `_`: the old value is not wanted
    return Row(fields, results, [address, *(cut_constant(kind, entry) for entry in values)], unit, 0.0, "u64")


def _matrix(function: Function, instruction: Instruction) -> Row:
    check_modifiers(instruction, "sync", "aligned", "m8n8", "x1", "x2", "x4", "trans", *_SPACES)
    value, address = instruction.operands
    if not isinstance(address, Address) or instruction.types != ("b16",):
        raise UnreadError("its operands")
    values = members(value)
    fields = {vm.KIND: vm.MATRIX, vm.COUNT: len(values), vm.SPACE: _space(instruction), vm.OFFSET: address.offset}
    fields |= {vm.MODE: int("trans" in instruction.modifiers), vm.BYTES: 16}  # a row of eight elements of 16 bits
    return Row(fields, values, [address], Unit.SHARED_LOAD, 0.0, "u64")


def _shuffle(function: Function, instruction: Instruction) -> Row:
    check_modifiers(instruction, "sync", "up", "down", "bfly", "idx")
    modes = {"up": vm.UP, "down": vm.DOWN, "bfly": vm.BFLY, "idx": vm.IDX}
    mode = next(modes[entry] for entry in instruction.modifiers if entry in modes)
    result, *sources = instruction.operands
    results = members(result)
    return Row({vm.KIND: vm.SHUFFLE, vm.MODE: mode, vm.BITS: 32}, results, sources[:3], Unit.SHARED_LOAD, 0.0, "u32")


def _vote(function: Function, instruction: Instruction) -> Row:
    """`vote`, `match.any`, `activemask` and `redux`."""
    words = {"all": vm.V_ALL, "any": vm.V_ANY, "uni": vm.V_UNI, "ballot": vm.V_BALLOT}
    result, *sources = instruction.operands
    fields = {vm.KIND: vm.VOTE}
    if instruction.name == "vote":
        fields[vm.OP] = next(words[entry] for entry in instruction.modifiers if entry in words)
        fields[vm.FLAGS] = vm.NOT_Z if isinstance(sources[0], OperandGroup) else 0
    elif instruction.name == "activemask":
        fields[vm.OP] = vm.V_ACTIVE
    elif instruction.name == "match" and "any" in instruction.modifiers:
        fields[vm.OP] = vm.V_MATCH
    elif instruction.name == "redux" and not is_float(instruction.types[-1]):
        word = next(entry for entry in instruction.modifiers if entry in _ATOMS[:6])
        sign = sign_of(instruction.types[-1])
        fields |= {vm.OP: vm.V_REDUX, vm.MODE: _ATOMS.index(word), vm.X: 0}
        if sign:  # compared as numbers of 64 bits
            fields[vm.X] = sign
    else:
        raise UnreadError("its modifiers")
    return Row(fields, [result], sources[:1], Unit.INTEGER, 0.0, instruction.types[-1] if instruction.types else "u32")


def _branch(function: Function, instruction: Instruction) -> Row:
    check_modifiers(instruction, "uni")
    label = instruction.operands[0]
    if not isinstance(label, Symbol) or label.name not in function.labels:
        raise UnreadError("its label is not in the function")
    return Row({vm.KIND: vm.BRANCH, vm.TARGET: function.labels[label.name]}, unit=Unit.BRANCH)


def _end(function: Function, instruction: Instruction) -> Row:
    return Row({vm.KIND: vm.EXIT}, unit=Unit.EXIT)


def _trap(function: Function, instruction: Instruction) -> Row:
    return Row({vm.KIND: vm.TRAP}, unit=Unit.EXIT)


def _generic(function: Function, instruction: Instruction) -> Row:
    """`cvta`: addresses of global memory are generic ones; the windows of other spaces are added."""
    windows = {vm.SHARED: vm.SHARED_WINDOW, vm.LOCAL: vm.LOCAL_WINDOW, vm.PARAM: vm.PARAM_WINDOW}
    window = windows.get(_space(instruction), 0)
    result, source = instruction.operands
    kind = instruction.types[-1]
    fields = {vm.KIND: vm.INTEGER, vm.OP: vm.ADD, vm.BITS: bits_of(kind), vm.BYTES: bits_of(kind)}
    offset = -window if "to" in instruction.modifiers else window  # `.to` leaves the window
    return Row(fields, [result], [source, Immediate(offset)], Unit.INTEGER, 0.0, "s64")


def _lookup(function: Function, instruction: Instruction) -> Row:
    """`lop3`: its last operand is a table of eight bits."""
    check_modifiers(instruction)
    result, *sources, table = instruction.operands
    if not isinstance(table, Immediate) or len(sources) != 3:
        raise UnreadError("its table")
    # MODE: bit k of the table is the result where the three inputs spell k
    fields = {vm.KIND: vm.INTEGER, vm.OP: vm.LOP3, vm.BITS: 32, vm.BYTES: 32, vm.MODE: table.value}
    return Row(fields, [result], sources, Unit.INTEGER, 0.0, "b32")


def _bytes(function: Function, instruction: Instruction) -> Row:
    """`prmt`, `bfi`, `shf` and `dp4a`."""
    check_modifiers(instruction, "l", "r", "wrap", "clamp")
    names, kind = instruction.modifiers, instruction.types[0]
    result, *sources = instruction.operands
    op = {"prmt": vm.PRMT, "bfi": vm.BFI, "dp4a": vm.DP4A, "shf": vm.SHF_L if "l" in names else vm.SHF_R}
    mode = int("clamp" in names)
    if instruction.name == "dp4a":
        mode = (instruction.types[0][0] == "s") + 2 * (instruction.types[1][0] == "s")  # bit 0: A has signs, bit 1: B
    fields = {vm.KIND: vm.INTEGER, vm.OP: op[instruction.name], vm.BITS: bits_of(kind), vm.BYTES: bits_of(kind)}
    return Row(fields | {vm.MODE: mode}, [result], sources, Unit.INTEGER, 0.0, kind)


def _policy(function: Function, instruction: Instruction) -> Row:
    """`createpolicy`: a hint to caches, of no effect on results."""
    fields = {vm.KIND: vm.INTEGER, vm.OP: vm.MOV, vm.BITS: 64, vm.BYTES: 64}
    return Row(fields, [instruction.operands[0]], [Immediate(0)])


_SFU = Unit.SPECIAL
MAKERS: Mapping[str, Maker] = {
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
    "ldmatrix": _matrix,
    "mma": mma,
    "shfl": _shuffle,
    **dict.fromkeys(("vote", "match", "activemask", "redux"), _vote),
    "bra": _branch,
    **dict.fromkeys(("ret", "exit"), _end),
    **dict.fromkeys(("trap", "brkpt"), _trap),
    "createpolicy": _policy,
}
"""Instructions that are executed, and what makes their rows."""
