"""Calls of device functions replaced by what they call; parameters of calls become registers.

Hardware passes parameters in registers too (PTX ISA, chapter 7: the parameter space of a call is an abstraction).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from dse_ptx.parser import refusal
from dse_ptx.program import (
    TYPE_BYTES,
    Address,
    Function,
    Guard,
    Instruction,
    Operand,
    OperandGroup,
    PtxProgram,
    Register,
    Symbol,
    Variable,
)

_MOST_INSTRUCTIONS = 1 << 17  # a chain of functions that each call twice doubles with every level


def inline(program: PtxProgram, name: str, path: str) -> Function:
    """Return a kernel without calls. Raises ConfigError for recursion and calls of what the text does not hold."""
    kernel = program.functions[name]
    _check_recursion(program, name, (), path)
    # one call at a time: what is inlined may call again
    while any(entry.name == "call" for entry in kernel.instructions):
        kernel = _without_first_call(kernel, program, path)
    return _with_registers(kernel, path)


def _check_recursion(program: PtxProgram, name: str, callers: tuple[str, ...], path: str) -> None:
    """Raise ConfigError where a function calls one of those that called it."""
    for entry in program.functions[name].instructions:
        if entry.name == "call":
            callee = _callee(entry)
            if callee in (*callers, name):
                raise refusal(path, entry.line, f"call {callee}", "is recursive, and calls are inlined")
            if callee in program.functions:
                _check_recursion(program, callee, (*callers, name), path)


def _callee(call: Instruction) -> str:
    # a call through a register names no symbol: "" is the name of no function
    return next((entry.name for entry in call.operands if isinstance(entry, Symbol)), "")


def _without_first_call(caller: Function, program: PtxProgram, path: str) -> Function:
    place, call = next((i, entry) for i, entry in enumerate(caller.instructions) if entry.name == "call")
    groups = [entry for entry in call.operands if isinstance(entry, OperandGroup)]
    callee = _callee(call)
    if callee not in program.functions:
        raise refusal(path, call.line, f"call {callee}", "calls a function that the text does not hold")
    function, has_result = program.functions[callee], isinstance(call.operands[0], OperandGroup)
    if len(caller.instructions) > _MOST_INSTRUCTIONS:
        raise refusal(path, call.line, f"call {callee}", f"makes a kernel of over {_MOST_INSTRUCTIONS} instructions")
    results = groups[0].members if has_result else ()
    arguments = groups[-1].members if len(groups) > has_result else ()
    formal = [entry.name for entry in (*function.returns, *function.parameters)]
    actual = [entry.name for entry in (*results, *arguments) if isinstance(entry, Register | Symbol)]
    if len(formal) != len(actual):
        raise refusal(path, call.line, f"call {callee}", f"has {len(actual)} parameters, not {len(formal)}")
    # `~` stands in no name of PTX, and the number of labels grows with each call: names stay apart
    suffix = f"~{callee}{len(caller.labels)}"
    names = {entry: entry + suffix for entry in function.registers}
    names |= {entry: entry + suffix for entry in function.labels}
    names |= {entry.name: entry.name + suffix for entry in function.variables}
    names |= dict(zip(formal, actual, strict=True))
    return _splice(caller, place, function, names, f"$after{suffix}")


def _splice(caller: Function, place: int, callee: Function, names: Mapping[str, str], after: str) -> Function:
    """The caller with the body of the callee in the place of a call."""
    call, body = caller.instructions[place], list[Instruction]()
    if call.guard:
        # lanes that do not call jump over the body
        inverse = Guard(call.guard.register, not call.guard.negated)
        body.append(Instruction("bra", (), (Symbol(after),), call.line, inverse))
    start = place + len(body)
    for entry in callee.instructions:
        guard = Guard(names[entry.guard.register], entry.guard.negated) if entry.guard else None
        operands = tuple(_rename(operand, names) for operand in entry.operands)
        if entry.name == "ret":
            # a return goes to the place behind the call
            body.append(Instruction("bra", (), (Symbol(after),), entry.line, guard))
        else:
            body.append(replace(entry, operands=operands, guard=guard))
    # the call itself is replaced
    shift = len(body) - 1
    # labels behind the call move by what it grows
    labels = {name: at + (shift if at > place else 0) for name, at in caller.labels.items()}
    labels |= {names[name]: at + start for name, at in callee.labels.items()} | {after: place + len(body)}
    return replace(
        caller,
        instructions=(*caller.instructions[:place], *body, *caller.instructions[place + 1 :]),
        labels=labels,
        registers={**caller.registers, **{names[entry]: kind for entry, kind in callee.registers.items()}},
        variables=(*caller.variables, *(replace(entry, name=names[entry.name]) for entry in callee.variables)),
    )


def _rename(operand: Operand, names: Mapping[str, str]) -> Operand:
    if isinstance(operand, Register | Symbol):
        return type(operand)(names.get(operand.name, operand.name))
    if isinstance(operand, Address) and operand.base is not None:
        inner = tuple(_rename(entry, names) for entry in operand.coordinates)
        return Address(type(operand.base)(names.get(operand.base.name, operand.base.name)), operand.offset, inner)
    if isinstance(operand, OperandGroup):
        return OperandGroup(tuple(_rename(entry, names) for entry in operand.members), operand.is_pair)
    return operand


def _with_registers(kernel: Function, path: str) -> Function:
    """The kernel with moves in the place of loads and stores of the parameters of its calls."""
    passed = {entry.name: entry for entry in kernel.variables if entry.space == "param"}
    registers, instructions, first = dict(kernel.registers), list[Instruction](), list[int]()
    for entry in kernel.instructions:
        first.append(len(instructions))
        address = next((operand for operand in entry.operands if isinstance(operand, Address)), None)
        base = address.base if address else None
        if "param" in entry.modifiers and address and base is not None and base.name in passed:
            instructions += _moves(entry, passed[base.name], address.offset, registers, path)
        else:
            instructions.append(entry)
    first.append(len(instructions))
    return replace(
        kernel,
        instructions=tuple(instructions),
        labels={name: first[at] for name, at in kernel.labels.items()},
        registers=registers,
        variables=tuple(entry for entry in kernel.variables if entry.space != "param"),
    )


def _moves(
    access: Instruction, variable: Variable, offset: int, registers: dict[str, str], path: str
) -> list[Instruction]:
    """Moves of the pieces of a parameter from or to registers named by their offset."""
    size = TYPE_BYTES[access.types[-1]]
    is_load = access.name == "ld"
    value = access.operands[0 if is_load else 1]
    moves = []
    for number, piece in enumerate(value.members if isinstance(value, OperandGroup) else (value,)):
        name, kind = f"{variable.name}+{offset + number * size}", f"b{8 * size}"
        if registers.setdefault(name, kind) != kind or (is_load and access.types[-1] in ("s8", "s16")):
            raise refusal(path, access.line, access.opcode, "passes a parameter in pieces of another size")
        pair = (piece, Register(name)) if is_load else (Register(name), piece)
        moves.append(replace(access, name="mov", modifiers=(kind,), operands=pair))
    return moves
