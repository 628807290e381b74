"""Instructions of a kernel as rows of numbers for the interpreter, and as the code of a trace.

What has no row is refused with its instruction and line.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dse.errors import ConfigError, Problem
from dse_ptx import vm
from dse_ptx.control_flow import Flow, live_registers, reconvergence
from dse_ptx.hopper import HOPPER
from dse_ptx.instructions import MAKERS, NOTHING, REFUSED
from dse_ptx.operands import check_operands
from dse_ptx.parser import refusal
from dse_ptx.program import (
    TYPE_BYTES,
    Address,
    Function,
    Immediate,
    Instruction,
    Operand,
    OperandGroup,
    Register,
    Symbol,
)
from dse_ptx.rows import Row, UnreadError, immediate_bits
from dse_ptx.warp_trace import Code, Unit
from dse_ptx.wgmma_rules import broken_rules

_MAKERS = {**MAKERS, **HOPPER}


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
    """Decode a kernel without calls. addresses: of the module's variables, in their spaces; shared: bytes of those.

    Raises ConfigError for all instructions that cannot be executed, at once.
    """
    decoder = _Decoder(function, addresses, path, shared)
    # all faults are gathered: a user sees every instruction that is not executed in one message
    rows, problems = list[Row](), list[Problem]()
    for entry in function.instructions:
        try:
            rows.append(decoder.row(entry))
        except UnreadError as error:
            problems += refusal(path, entry.line, entry.opcode, f"is not executed: {error}").problems
    if problems:
        raise ConfigError(problems)
    return decoder.assemble(rows)


class _Decoder:
    """Numbers of one kernel's registers, variables and constants."""

    def __init__(self, function: Function, addresses: Mapping[str, int], path: str, shared: int) -> None:
        self.function, self.path = function, path
        self.registers = {name: number for number, name in enumerate(function.registers)}
        self.constants = dict[int, int]()
        self.addresses = dict(addresses)
        # shared memory of the function follows that of the module, local memory begins at 0 for each thread
        self.sizes = {"shared": shared, "local": 0}
        for entry in function.variables:
            if entry.space in self.sizes:
                # aligned to a multiple of the variable's alignment
                offset = -(-self.sizes[entry.space] // entry.align) * entry.align
                self.addresses[entry.name] = offset
                self.sizes[entry.space] = offset + entry.size
        self.addresses |= {entry.name: entry.offset for entry in function.parameters}

    def row(self, instruction: Instruction) -> Row:
        """Row of one instruction. Raises UnreadError."""
        make = _MAKERS.get(instruction.name)
        if make is None and instruction.name not in NOTHING:
            raise UnreadError(REFUSED.get(instruction.name, "the instruction is not known"))
        check_operands(instruction)
        if make is None:
            return Row({vm.KIND: vm.NOTHING})
        try:
            row = make(self.function, instruction)
        # makers read modifiers without checking each: what does not fit raises here
        except (LookupError, AttributeError, TypeError, ValueError, StopIteration) as error:
            raise UnreadError(f"its modifiers or operands are not known ({error})") from None
        for entry in (*row.writes, *row.reads):
            self.number(entry, row.immediate)  # refuses what `assembled` could not
        if instruction.guard:
            if instruction.guard.register not in self.registers:
                raise UnreadError(f"{instruction.guard.register} is not declared")
            row.fields[vm.NEGATED] = int(instruction.guard.negated)
        return row

    def number(self, operand: Operand, kind: str) -> int:
        """Number of an operand: of a register (counted from 0), or -1 - number of a constant."""
        if isinstance(operand, OperandGroup) and operand.is_pair:
            # `!%p`: its row has a flag, so that the operand is the register itself
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
                raise UnreadError(f"{operand.name} is not declared")
            operand = Immediate(self.addresses[operand.name])
        if not isinstance(operand, Immediate):
            raise UnreadError("an operand has another form")
        bits = immediate_bits(operand, kind)
        # equal bits share a constant, whatever type they were written in
        return -1 - self.constants.setdefault(bits, len(self.constants))

    def assemble(self, rows: list[Row]) -> Decoded:
        """The kernel of these rows."""
        # a kernel may end without `ret`
        instructions = (*self.function.instructions, Instruction("exit", (), (), self.last_line))
        rows = [*rows, Row({vm.KIND: vm.EXIT}, unit=Unit.EXIT)]
        places, table = list[int](), np.zeros((len(rows), vm.FIELDS), np.int64)
        written, read = list[list[int]](), list[list[int]]()
        for number, (row, instruction) in enumerate(zip(rows, instructions, strict=True)):
            writes = [self.number(entry, "u64") for entry in row.writes]
            reads = [self.number(entry, row.immediate) for entry in row.reads]
            # places of an instruction: written, read, guard
            fields = {vm.FIRST: len(places), vm.WRITES: len(writes), vm.READS: len(reads), vm.GUARD: -1}
            if instruction.guard:
                fields[vm.GUARD] = len(places) + len(writes) + len(reads)
            places += [*writes, *reads]
            guard = [self.registers[instruction.guard.register]] if instruction.guard else []
            places += guard
            # constants depend on nothing, and are no registers of a trace
            written.append([entry for entry in writes if entry >= 0])
            read.append([entry for entry in (*reads, *guard) if entry >= 0])
            for name, value in {vm.BITS: 64, **row.fields, **fields}.items():
                table[number, name] = value
        flows = [
            Flow(tuple(w), tuple(r), _target(row), row.fields[vm.KIND] == vm.EXIT, entry.guard is not None)
            for w, r, row, entry in zip(written, read, rows, instructions, strict=True)
        ]
        problems = list[Problem]()
        for fault in broken_rules(instructions, flows):
            entry = instructions[fault.number]
            problems += refusal(self.path, entry.line, entry.opcode, fault.rule).problems
        if problems:
            raise ConfigError(problems)
        table[:, vm.MEETS] = reconvergence(flows)
        count = len(self.constants)
        kinds = list(self.function.registers.values())
        # predicates have registers of their own on hardware
        # registers of 32 bits: one of 64 bits takes two, one of 16 bits a whole one
        widths = [0 if kind == "pred" else -(-TYPE_BYTES[kind] // 4) for kind in kinds]
        parameters = self.function.parameters
        return Decoded(
            self.function,
            table,
            # constants come first in the file of registers, which is known once all are numbered
            np.array([entry + count if entry >= 0 else -1 - entry for entry in places] or [0], np.int64),
            np.array(list(self.constants), np.uint64),
            tuple(entry.line for entry in instructions),
            self.registers,
            # the most that are alive at once; an assembler may allocate more
            live_registers(flows, widths),
            self.sizes["shared"],
            # a multiple of 16 bytes, so that vectors of each thread stay aligned
            -(-self.sizes["local"] // 16) * 16,
            max((entry.offset + entry.size for entry in parameters), default=0),
            _code(instructions, rows, written, read),
        )

    @property
    def last_line(self) -> int:
        """Line of the last instruction."""
        return self.function.instructions[-1].line if self.function.instructions else 0


def _target(row: Row) -> int:
    return row.fields[vm.TARGET] if row.fields[vm.KIND] == vm.BRANCH else -1


def _code(
    instructions: tuple[Instruction, ...], rows: list[Row], written: list[list[int]], read: list[list[int]]
) -> Code:
    return Code(
        tuple(entry.opcode for entry in instructions),
        np.array([row.unit for row in rows], np.int8),
        _pad(written),
        _pad(read),
        np.array([row.operations for row in rows], np.float64),
        np.array([row.argument for row in rows], np.int64),
    )


def _pad(numbers: list[list[int]]) -> NDArray[np.int32]:
    # at least one column, also for a kernel that only ends
    width = max(map(len, numbers), default=0) or 1
    return np.array([entry + [-1] * (width - len(entry)) for entry in numbers], np.int32)
