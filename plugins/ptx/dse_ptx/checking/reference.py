"""A plain interpreter of PTX: threads one by one, each a counter and a dictionary of registers.

It shares with the compiled interpreter the parser and what inlines calls, and nothing that computes a result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from dse_ptx.checking import numbers as num
from dse_ptx.checking import products, semantics
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

# Instructions whose result depends on other lanes of the warp, or other warps of the block.
_TOGETHER = ("shfl", "vote", "match", "activemask", "redux", "mma", "ldmatrix", "bar", "barrier")
_SKIPPED = ("membar", "fence", "nanosleep", "prefetch", "griddepcontrol")
# windows of generic addresses, as the compiled interpreter places them
_SHARED, _LOCAL, _GLOBAL = 1 << 24, 1 << 25, 1 << 32
_WORD = (1 << 64) - 1


@dataclass
class Scalar:
    """A thread: its next instruction, registers, and local memory."""

    number: int
    registers: dict[str, int]
    local: bytearray
    at: int = 0
    is_over: bool = False


@dataclass
class Reference:
    """A launch of a kernel. memory: bytes from address 2**32 on. addresses: of the module's variables."""

    kernel: Function
    memory: bytearray
    parameters: bytes
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    addresses: dict[str, int] = field(default_factory=dict)
    shared_bytes: int = 0

    def run(self) -> None:
        """Run all blocks; the memory holds what they stored."""
        sizes = {"shared": 0, "local": 0}
        for entry in self.kernel.variables:
            start = -(-sizes[entry.space] // entry.align) * entry.align
            self.addresses[entry.name], sizes[entry.space] = start, start + entry.size
        self.addresses |= {entry.name: entry.offset for entry in self.kernel.parameters}
        count = self.block[0] * self.block[1] * self.block[2]
        for number in range(self.grid[0] * self.grid[1] * self.grid[2]):
            # shared memory is new for each block
            self.number, self.shared = number, bytearray(max(sizes["shared"], self.shared_bytes) + 16)
            registers = dict.fromkeys(self.kernel.registers, 0)
            threads = [Scalar(entry, dict(registers), bytearray(sizes["local"] + 16)) for entry in range(count)]
            self._block(threads)

    def _block(self, threads: list[Scalar]) -> None:
        """Run threads alone as far as they go, then together what warps or the block do together."""
        # Each round brings every thread to its end or to an instruction that it does not execute alone.
        while not all(entry.is_over for entry in threads):
            for entry in threads:
                self._alone(entry)
            waiting = [entry for entry in threads if not entry.is_over]
            at_barrier = [entry for entry in waiting if self._next(entry).name in ("bar", "barrier")]
            # all live threads have come: the barrier opens
            if len(at_barrier) == len(waiting):
                for entry in waiting:
                    entry.at += 1
                continue
            for warp in {entry.number // 32 for entry in waiting}:
                lanes = [entry for entry in waiting if entry.number // 32 == warp]
                places = {entry.at for entry in lanes}
                if len(places) == 1 and self._next(lanes[0]).name not in ("bar", "barrier"):
                    self._together(lanes)
                # the order of such lanes is not modelled here
                elif len(places) > 1:
                    raise NotImplementedError("lanes of a warp wait at different places")

    def _next(self, thread: Scalar) -> Instruction:
        if thread.at >= len(self.kernel.instructions):
            # a kernel may end without `ret`
            return Instruction("exit", (), (), 0)
        return self.kernel.instructions[thread.at]

    def _alone(self, thread: Scalar) -> None:
        while not thread.is_over:
            instruction = self._next(thread)
            # `bar.warp.sync` waits for nothing: lanes meet at the next instruction that a warp executes together
            if instruction.name in _TOGETHER and "warp" not in instruction.modifiers:
                return
            thread.at += 1
            if (
                instruction.guard
                and bool(thread.registers[instruction.guard.register] & 1) == instruction.guard.negated
            ):
                continue
            self._step(thread, instruction)

    def _step(self, thread: Scalar, instruction: Instruction) -> None:
        name = instruction.name
        if name in ("ret", "exit"):
            thread.is_over = True
        elif name == "bra":
            assert isinstance(instruction.operands[0], Symbol)
            thread.at = self.kernel.labels[instruction.operands[0].name]
        # commits and waits of `cp.async` have fewer operands: its copies are done at once
        elif name in _SKIPPED or name == "bar" or (name == "cp" and len(instruction.operands) < 3):
            pass
        elif name in _FORMS:
            _FORMS[name](self, thread, instruction)
        elif name == "mov" and any(isinstance(operand, OperandGroup) for operand in instruction.operands):
            self._halves(thread, instruction)
        elif name == "cvta":
            window = _SHARED if "shared" in instruction.modifiers else _LOCAL if "local" in instruction.modifiers else 0
            value = self.value(thread, instruction.operands[1], "u64")
            self.assign(
                thread, instruction.operands[0], value - window if "to" in instruction.modifiers else value + window
            )
        else:
            words = [
                self.value(thread, operand, self._kind(instruction, i))
                for i, operand in enumerate(instruction.operands[1:])
            ]
            word = words[0] if name == "mov" else semantics.result(instruction, words)
            self.assign(thread, instruction.operands[0], word)

    @staticmethod
    def _kind(instruction: Instruction, place: int) -> str:
        """Type of a constant at a place among the operands that are read."""
        kind = instruction.types[0] if instruction.name in ("selp", "slct") else instruction.types[-1]
        # counts and positions have 32 bits, whatever the type of the value
        if (instruction.name in ("shl", "shr", "bfe") and place) or (instruction.name == "bfi" and place > 1):
            return "u32"
        # the addend of a wide product is as wide as its result
        return "u64" if place == 2 and "wide" in instruction.modifiers else kind

    def value(self, thread: Scalar, operand: Operand, kind: str) -> int:
        """Bits of an operand; kind: type of a constant."""
        if isinstance(operand, OperandGroup):
            # `!%p`
            return self.value(thread, operand.members[0], kind) ^ 1
        if isinstance(operand, Register):
            return thread.registers[operand.name]
        if isinstance(operand, Immediate):
            value = operand.value
            # a constant in double precision is rounded to the operand's type
            if operand.float_bits and num.is_float(kind) and operand.float_bits != num.bits_of(kind):
                value = num.encode(num.decode(value, f"f{operand.float_bits}"), kind)
            return value % (1 << num.bits_of(kind))
        assert isinstance(operand, Symbol)
        if operand.name.startswith("%"):
            return self._special(thread, operand.name[1:])
        return self.addresses[operand.name]

    def _special(self, thread: Scalar, name: str) -> int:
        base, _, axis = name.partition(".")
        if axis:
            size = self.block if base in ("tid", "ntid") else self.grid
            number, place = thread.number if base == "tid" else self.number, "xyz".index(axis)
            split = (number % size[0], number // size[0] % size[1], number // (size[0] * size[1]))
            return size[place] if base.startswith("n") else split[place]
        lane = thread.number % 32
        masks = {"eq": 1 << lane, "lt": (1 << lane) - 1, "le": (2 << lane) - 1}
        masks |= {"gt": 0xFFFFFFFF & ~masks["le"], "ge": 0xFFFFFFFF & ~masks["lt"]}
        if name.startswith("lanemask_"):
            return masks[name[-2:]]
        count = self.block[0] * self.block[1] * self.block[2]
        # clocks are 0 here: random programs do not read them
        return {"laneid": lane, "warpid": thread.number // 32, "nwarpid": -(-count // 32)}.get(name, 0)

    def assign(self, thread: Scalar, operand: Operand, word: int) -> None:
        """Write a register, cut to its size."""
        if isinstance(operand, Register):
            thread.registers[operand.name] = word & ((1 << num.bits_of(self.kernel.registers[operand.name])) - 1)

    def _place(self, thread: Scalar, instruction: Instruction, operand: Operand) -> tuple[bytearray, int]:
        """The memory of an address, and where in it."""
        assert isinstance(operand, Address)
        base = self.value(thread, operand.base, "u64") if operand.base is not None else 0
        at, names = (base + operand.offset) & _WORD, instruction.modifiers
        if "param" in names:
            return bytearray(self.parameters), at
        if "shared" in names or "shared_cta" in names:
            return self.shared, at
        if "local" in names:
            return thread.local, at
        if at >= _GLOBAL:
            return self.memory, at - _GLOBAL
        return (thread.local, at - _LOCAL) if at >= _LOCAL else (self.shared, at - _SHARED)

    def _access(self, thread: Scalar, instruction: Instruction) -> None:
        is_load, kind = instruction.name == "ld", instruction.types[-1]
        value, address = (
            (instruction.operands[0], instruction.operands[1])
            if is_load
            else (instruction.operands[1], instruction.operands[0])
        )
        memory, at = self._place(thread, instruction, address)
        size = TYPE_BYTES[kind]
        for k, member in enumerate(value.members if isinstance(value, OperandGroup) else (value,)):
            start = at + k * size
            if is_load:
                word = int.from_bytes(memory[start : start + size], "little")
                # a signed load fills wider registers with its sign
                self.assign(thread, member, int(num.decode(word, kind)) if kind[0] == "s" else word)
            else:
                word = self.value(thread, member, kind)
                memory[start : start + size] = (word % (1 << 8 * size)).to_bytes(size, "little")

    def _atomic(self, thread: Scalar, instruction: Instruction) -> None:
        kind = instruction.types[-1]
        # `red` has no result: `_` is no register, and is not written
        operands = instruction.operands if instruction.name == "atom" else (Symbol("_"), *instruction.operands)
        memory, at = self._place(thread, instruction, operands[1])
        size, words = TYPE_BYTES[kind], [self.value(thread, operand, kind) for operand in operands[2:]]
        old = int.from_bytes(memory[at : at + size], "little")
        word = next(
            m
            for m in instruction.modifiers
            if m in ("add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec")
        )
        updates: dict[str, Callable[[], int]] = {
            "exch": lambda: words[0],
            "cas": lambda: words[1] if old == words[0] else old,
            "inc": lambda: 0 if old >= words[0] else old + 1,
            "dec": lambda: words[0] if old == 0 or old > words[0] else old - 1,
        }
        new = (
            updates[word]() if word in updates else semantics.result(Instruction(word, (kind,), (), 0), [old, words[0]])
        )
        memory[at : at + size] = (new % (1 << 8 * size)).to_bytes(size, "little")
        self.assign(thread, operands[0], old)

    def _copy(self, thread: Scalar, instruction: Instruction) -> None:
        target, source, size, *lengths = instruction.operands
        assert isinstance(size, Immediate)
        length = min(self.value(thread, lengths[0], "u32"), size.value) if lengths else size.value
        inside = Instruction("ld", ("global",), (), instruction.line)
        # a copy of no bytes does not touch its source
        memory, at = self._place(thread, inside, source) if length else (self.memory, 0)
        place = self._place(thread, Instruction("st", ("shared",), (), instruction.line), target)[1]
        self.shared[place : place + size.value] = bytes(memory[at : at + length]) + bytes(size.value - length)

    def _compare(self, thread: Scalar, instruction: Instruction) -> None:
        kind, target, names = instruction.types[-1], instruction.operands[0], instruction.modifiers
        words = [self.value(thread, operand, kind) for operand in instruction.operands[1:3]]
        a, b = (num.decode(word, kind) for word in words)
        # signs of zeros do not matter to a comparison
        if "ftz" in names:
            a, b = (0.0 if abs(x) < 2.0**-126 else x for x in (a, b))
        holds = [semantics.compare(names[0], a, b)]
        # the second result, before both are combined with the third operand
        holds.append(not holds[0])
        if len(instruction.operands) > 3:
            third = bool(self.value(thread, instruction.operands[3], "pred"))
            word = next(x for x in names if x in ("and", "or", "xor"))
            holds = [{"and": x and third, "or": x or third, "xor": x != third}[word] for x in holds]
        if instruction.name == "set":
            self.assign(thread, target, (0x3F800000 if instruction.types[0] == "f32" else 0xFFFFFFFF) * holds[0])
            return
        for member, truth in zip(
            target.members if isinstance(target, OperandGroup) else (target,), holds, strict=False
        ):
            self.assign(thread, member, int(truth))

    def _test(self, thread: Scalar, instruction: Instruction) -> None:
        kind = instruction.types[0]
        value = float(num.decode(self.value(thread, instruction.operands[1], kind), kind))
        tiny, finite = 2.0**-1022 if kind == "f64" else 2.0**-126, abs(value) < np.inf
        answer = {
            "finite": finite,
            "infinite": abs(value) == np.inf,
            "number": value == value,
            "notanumber": value != value,
            "normal": finite and abs(value) >= tiny,
            "subnormal": 0 < abs(value) < tiny,
        }[instruction.modifiers[0]]
        self.assign(thread, instruction.operands[0], int(answer))

    def _halves(self, thread: Scalar, instruction: Instruction) -> None:
        target, source = instruction.operands
        half = num.bits_of(instruction.types[-1]) // 2
        if isinstance(source, OperandGroup):
            words = [self.value(thread, member, f"b{half}") for member in source.members]
            self.assign(thread, target, words[0] | words[1] << half)
        elif isinstance(target, OperandGroup):
            word = self.value(thread, source, instruction.types[-1])
            for place, member in enumerate(target.members):
                self.assign(thread, member, word >> half * place & ((1 << half) - 1))

    def _together(self, lanes: list[Scalar]) -> None:
        """Run an instruction of a warp."""
        instruction = self._next(lanes[0])
        for thread in lanes:
            thread.at += 1
        if instruction.guard:
            wanted = not instruction.guard.negated
            lanes = [thread for thread in lanes if bool(thread.registers[instruction.guard.register] & 1) == wanted]
        if instruction.name == "shfl":
            self._shuffle(lanes, instruction)
        elif instruction.name == "mma":
            products.run(self, lanes, instruction)
        elif instruction.name == "ldmatrix":
            self._matrix(lanes, instruction)
        else:
            self._vote(lanes, instruction)

    def _shuffle(self, lanes: list[Scalar], instruction: Instruction) -> None:
        target, *sources = instruction.operands
        # values of all lanes before any is written: a register may be source and result
        before = {thread.number % 32: self.value(thread, sources[0], "b32") for thread in lanes}
        for thread in lanes:
            lane, b, c = thread.number % 32, *(self.value(thread, operand, "u32") for operand in sources[1:3])
            b, segment = b & 31, (c >> 8) & 31
            most = (lane & segment) | (c & 31 & ~segment)
            other, inside = {
                "up": (lane - b, lane - b >= most),
                "down": (lane + b, lane + b <= most),
                "bfly": (lane ^ b, lane ^ b <= most),
                "idx": ((lane & segment) | (b & ~segment), ((lane & segment) | (b & ~segment)) <= most),
            }[next(word for word in instruction.modifiers if word in ("up", "down", "bfly", "idx"))]
            results = target.members if isinstance(target, OperandGroup) else (target,)
            self.assign(thread, results[0], before.get(other if inside else lane, 0))
            if len(results) > 1:
                self.assign(thread, results[1], int(inside))

    def _vote(self, lanes: list[Scalar], instruction: Instruction) -> None:
        kind = instruction.types[-1] if instruction.types else "pred"
        words = [
            self.value(thread, instruction.operands[1], kind) if len(instruction.operands) > 1 else 1
            for thread in lanes
        ]
        if instruction.name == "match":
            for thread, word in zip(lanes, words, strict=True):
                same = sum(1 << other.number % 32 for other, x in zip(lanes, words, strict=True) if x == word)
                self.assign(thread, instruction.operands[0], same)
            return
        if instruction.name == "redux":
            operation = next(m for m in instruction.modifiers if m in ("add", "min", "max", "and", "or", "xor"))
            answer = words[0]
            for more in words[1:]:
                answer = semantics.result(Instruction(operation, (kind,), (), 0), [answer, more])
        else:
            ballot = sum((word & 1) << thread.number % 32 for thread, word in zip(lanes, words, strict=True))
            active = sum(1 << thread.number % 32 for thread in lanes)
            answers = {"all": int(ballot == active), "any": int(ballot != 0), "ballot": ballot}
            answers["uni"] = int(ballot in (0, active))
            answer = (
                active
                if instruction.name == "activemask"
                else next(answers[m] for m in instruction.modifiers if m in answers)
            )
        for thread in lanes:
            self.assign(thread, instruction.operands[0], answer)

    def _matrix(self, lanes: list[Scalar], instruction: Instruction) -> None:
        target, address = instruction.operands
        results = target.members if isinstance(target, OperandGroup) else (target,)
        for j, member in enumerate(results):
            rows = []
            for i in range(8):
                memory, at = self._place(lanes[8 * j + i], instruction, address)
                rows.append(np.frombuffer(bytes(memory[at : at + 16]), np.uint16))
            matrix = np.array(rows).T if "trans" in instruction.modifiers else np.array(rows)
            for lane, thread in enumerate(lanes):
                # four lanes share a row, two elements each
                low, high = matrix[lane // 4, 2 * (lane % 4) : 2 * (lane % 4) + 2].tolist()
                self.assign(thread, member, low | high << 16)


_FORMS = {
    **dict.fromkeys(("ld", "st"), Reference._access),
    **dict.fromkeys(("atom", "red"), Reference._atomic),
    **dict.fromkeys(("setp", "set"), Reference._compare),
    "cp": Reference._copy,
    "testp": Reference._test,
}
"""What a thread does alone that is more than the result of an instruction."""
