"""Text of PTX, as clang, Triton and nvcc write it, to a `PtxProgram`.

The grammar is that of NVIDIA's "PTX ISA" (chapters 4 and 5). What is not read is refused with its line.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NoReturn

from dse.errors import ConfigError, Problem
from dse_ptx.program import (
    TYPE_BYTES,
    Address,
    Function,
    Guard,
    Immediate,
    Instruction,
    Operand,
    OperandGroup,
    Parameter,
    PtxProgram,
    Register,
    Symbol,
    Variable,
)

_NAME = r"[A-Za-z_$%][\w$]*"
# `%tid.x` is one name; `0f3F800000` and `0d...` hold the bits of a number in hexadecimal, not its value
_TOKEN = re.compile(
    rf"(?P<name>{_NAME}(?:\.[xyzw])?)|(?P<float>0[fFdD][0-9a-fA-F]{{8,16}})"
    r"|(?P<number>-?(?:0[xX][0-9a-fA-F]+|0[bB][01]+|\d+\.\d+(?:[eE][-+]?\d+)?|\d+)U?)|(?P<sign>[\[\]{}(),+|!<>=-])|\s+"
)
_LINE_WORDS = (".loc", ".file", ".version", ".target", ".address_size")
# a label ends with one colon: `shared::cta` is a part of an opcode
_LABEL = re.compile(rf"\s*({_NAME})\s*:(?!:)")
_VARIABLE = re.compile(
    # `.shared .align 4 .b8 tile[256]`: a size of `[]` is given by the launch, and is 0 here
    rf"(?:\.(?:visible|extern|weak|common)\s+)*\.(?P<space>shared|global|const|local)\s+(?:\.align\s+(?P<align>\d+)\s+)?"
    rf"(?:\.attribute\([^)]*\)\s*)?\.(?P<type>\w+)\s+(?P<name>{_NAME})\s*(?P<sizes>(?:\[\s*\d*\s*\]\s*)*)(?:=\s*(?P<content>.*))?$",
    re.S,
)
_PARAMETER = re.compile(
    rf"\.param\s+(?:\.align\s+(?P<before>\d+)\s+)?\.(?P<type>\w+)(?:\s+\.ptr(?:\s+\.\w+)?(?:\s+\.align\s+\d+)?)?"
    rf"\s+(?P<name>{_NAME})\s*(?:\[\s*(?P<size>\d*)\s*\])?$"
)
_HEAD = re.compile(
    rf"(?:\.(?:visible|extern|weak)\s+)*\.(?P<kind>entry|func)\s*(?:\.noreturn\s*)?(?:\((?P<returns>[^)]*)\)\s*)?"
    rf"(?P<name>{_NAME})\s*(?:\((?P<parameters>[^)]*)\))?(?P<rest>.*)$",
    re.S,
)
_REGISTERS = re.compile(rf"\s*({_NAME})\s*(?:<\s*(\d+)\s*>)?\s*$")


@dataclass(frozen=True)
class _Piece:
    """A statement, label, or brace of a scope, and the line on which it begins."""

    text: str
    line: int
    kind: str = "statement"


def parse(text: str, path: str = "ptx") -> PtxProgram:
    """Parse a text of PTX. Raises ConfigError with `path` and the line of what is not understood."""
    return _Parser(text, path).program()


class _Parser:
    """Reads the pieces of one text."""

    def __init__(self, text: str, path: str) -> None:
        self.path, self.words = path, dict[str, str]()
        self.pieces = list(_pieces(self._code(text)))

    def program(self) -> PtxProgram:
        """All functions and variables of the text."""
        functions, variables = dict[str, Function](), list[Variable]()
        # A head is followed by the piece of its opening brace: the body begins two pieces after the head.
        place = 0
        while place < len(self.pieces):
            piece = self.pieces[place]
            if piece.kind == "head":
                end = self._end(place + 1)
                function = self._function(piece, self.pieces[place + 2 : end])
                functions[function.name] = function
                place = end + 1
                continue
            if piece.kind != "statement":
                self._refuse(piece.line, piece.text, "is not expected outside of a function")
            variable = _VARIABLE.match(piece.text)
            if variable:
                variables.append(self._variable(variable, piece.line))
            # a declaration without a body adds nothing; a call of it is refused when it is inlined
            elif not re.match(r"(\.extern\s+|\.visible\s+|\.weak\s+)*\.func\b|\.pragma\b", piece.text):
                self._refuse(piece.line, piece.text, "is no directive that is read")
            place += 1
        return PtxProgram(self.words.get("version", ""), self.words.get("target", ""), functions, tuple(variables))

    def _code(self, text: str) -> str:
        """The text without comments, sections for debuggers and directives that end with their line."""
        # newlines of comments stay, so that pieces keep their line in the text
        text = re.sub(r"/\*.*?\*/", lambda match: "\n" * match[0].count("\n"), text, flags=re.S)
        lines, depth, in_section = [], 0, False
        for line in text.splitlines():
            # `//` within a string, such as the path of a `.file`, begins no comment
            bare = line.partition("//")[0].rstrip() if '"' not in line.partition("//")[0] else line
            word = bare.split(maxsplit=1)[0] if bare.strip() else ""
            in_section = in_section or word == ".section"
            if in_section:
                depth += bare.count("{") - bare.count("}")
                # the section goes on until a line closes its outermost brace
                in_section, bare = depth > 0 or "}" not in bare, ""
            elif word in _LINE_WORDS:
                self.words[word[1:]] = bare.split(maxsplit=1)[1].strip()
                bare = ""
            lines.append(bare)
        return "\n".join(lines)

    def _end(self, start: int) -> int:
        """Place of the brace that closes the one at `start`."""
        depth = 0
        for place in range(start, len(self.pieces)):
            kind = self.pieces[place].kind
            depth += (kind == "open") - (kind == "close")
            if not depth:
                return place
        self._refuse(self.pieces[start].line, "{", "is not closed")

    def _variable(self, match: re.Match[str], line: int) -> Variable:
        type_name, sizes = match["type"], re.findall(r"\[\s*(\d*)\s*\]", match["sizes"])
        if type_name not in TYPE_BYTES:
            self._refuse(line, match[0], "has a type that is not read")
        size = TYPE_BYTES[type_name]
        # an array of several dimensions lies as one of their product
        for part in sizes:
            size *= int(part or 0)
        content = self._content(match["content"], type_name, line) if match["content"] else b""
        return Variable(match["name"], match["space"], size, int(match["align"] or TYPE_BYTES[type_name]), content)

    def _content(self, text: str, type_name: str, line: int) -> bytes:
        """Bytes of an initialiser of numbers."""
        size, content = TYPE_BYTES[type_name], b""
        for item in re.sub(r"[{}\s]", "", text).split(","):
            operand = self._operands(item, line)[0] if item else Immediate(0)
            if not isinstance(operand, Immediate):
                # addresses of other variables are known only after the module is placed
                self._refuse(line, text, "initialises a variable with an address")
            # modulo its size: a negative number becomes its two's complement
            content += (operand.value % (1 << 8 * size)).to_bytes(size, "little")
        return content

    def _parameters(self, text: str | None, line: int) -> tuple[Parameter, ...]:
        """Parameters in their order, each at a multiple of its alignment."""
        parameters, offset = [], 0
        for item in filter(str.strip, (text or "").split(",")):
            match = _PARAMETER.match(item.strip())
            register = re.match(rf"\.reg\s+\.(\w+)\s+({_NAME})$", item.strip())
            if register:
                # PTX lets a `.func` take parameters in registers; compilers use the parameter space
                self._refuse(line, item.strip(), "is a parameter in a register, which is not read")
            if not match or match["type"] not in TYPE_BYTES:
                self._refuse(line, item.strip(), "is no parameter that is read")
            unit = TYPE_BYTES[match["type"]]
            size, align = unit * int(match["size"] or 1), int(match["before"] or unit)
            # rounded up to a multiple of the alignment, as the driver lays parameters out
            offset = -(-offset // align) * align
            parameters.append(Parameter(match["name"], match["type"], size, align, offset))
            offset += size
        return tuple(parameters)

    def _function(self, head: _Piece, pieces: list[_Piece]) -> Function:
        match = _HEAD.match(head.text)
        if not match:
            self._refuse(head.line, head.text, "is no head of a function")
        # `.reqntid` fixes the three sizes of a block, `.maxntid` bounds the product of three
        words = ("reqntid", "maxntid", "reqnctapercluster")
        exact, most, cluster = (re.search(rf"\.{word}\s+([\d\s,]+)", match["rest"]) for word in words)
        body = _Body(self, match["name"])
        for piece in pieces:
            body.add(piece)
        return Function(
            match["name"],
            match["kind"] == "entry",
            self._parameters(match["parameters"], head.line),
            self._parameters(match["returns"], head.line),
            tuple(body.instructions),
            body.labels,
            body.registers,
            tuple(body.variables),
            tuple(int(part) for part in exact[1].split(",")) if exact else (),
            math.prod(int(part) for part in most[1].split(",")) if most else 0,
            tuple(int(part) for part in cluster[1].split(",")) if cluster else (),
        )

    def _operands(self, text: str, line: int) -> tuple[Operand, ...]:
        tokens, place = [], 0
        while place < len(text):
            match = _TOKEN.match(text, place)
            if not match:
                self._refuse(line, text.strip(), f"has a sign that is not read: {text[place]}")
            if not match[0].isspace():
                tokens.append((match.lastgroup or "", match[0]))
            place = match.end()
        operands, place = [], 0
        try:
            while place < len(tokens):
                operand, place = _operand(tokens, place)
                operands.append(operand)
                # operands are separated by commas alone
                if place < len(tokens) and tokens[place][1] != ",":
                    raise ValueError(tokens[place][1])
                place += 1
        except (IndexError, ValueError):
            self._refuse(line, text.strip(), "is no list of operands")
        return tuple(operands)

    def _refuse(self, line: int, text: str, rule: str) -> NoReturn:
        raise refusal(self.path, line, text, rule)


def refusal(path: str, line: int, text: str, rule: str, way_out: str = "") -> ConfigError:
    """An error of one statement of a text of PTX."""
    return ConfigError([Problem(f"{path}, line {line}", rule, " ".join(text.split())[:120], way_out)])


@dataclass
class _Body:
    """Declarations and instructions of a function. Names of an inner scope are renamed where they repeat."""

    parser: _Parser
    function: str
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    registers: dict[str, str] = field(default_factory=dict)
    variables: list[Variable] = field(default_factory=list)
    # A stack of scopes: the innermost declaration of a name hides the others, as in C.
    scopes: list[dict[str, str]] = field(default_factory=lambda: [{}])
    suffixes: list[str] = field(default_factory=lambda: [""])
    count: int = 0

    def add(self, piece: _Piece) -> None:
        """Take the next piece of the function."""
        if piece.kind == "open":
            self.count += 1
            self.scopes.append({})
            self.suffixes.append(f"@{self.count}")
        elif piece.kind == "close":
            self.scopes.pop()
            self.suffixes.pop()
        elif piece.kind == "label":
            if piece.text in self.labels:
                # labels belong to the function: a branch may leave the scope in which it stands
                raise refusal(self.parser.path, piece.line, piece.text, "is a label twice in one function")
            self.labels[piece.text] = len(self.instructions)
        elif piece.text.startswith("."):
            self._directive(piece)
        else:
            self.instructions.append(self._instruction(piece))

    def _declare(self, name: str) -> str:
        self.scopes[-1][name] = name + self.suffixes[-1]
        return self.scopes[-1][name]

    def _name_of(self, name: str) -> str:
        # what no scope declares is a label, a function, a variable of the module or a special register
        return next((scope[name] for scope in reversed(self.scopes) if name in scope), name)

    def _directive(self, piece: _Piece) -> None:
        word, _, tail = piece.text.partition(" ") if " " in piece.text else piece.text.partition("\t")
        if word == ".reg":
            type_name, _, names = tail.strip().replace("\t", " ").partition(" ")
            for item in names.split(","):
                match = _REGISTERS.match(item)
                if not match or type_name[1:] not in TYPE_BYTES:
                    raise refusal(self.parser.path, piece.line, piece.text, "declares registers that are not read")
                # `%r<5>` declares %r0 to %r4
                numbered = [f"{match[1]}{i}" for i in range(int(match[2]))] if match[2] else [match[1]]
                self.registers |= {self._declare(name): type_name[1:] for name in numbered}
        elif word == ".param":
            for part in self.parser._parameters(piece.text, piece.line):
                self.variables.append(Variable(self._declare(part.name), "param", part.size, part.align))
        elif match := _VARIABLE.match(piece.text):
            variable = self.parser._variable(match, piece.line)
            name = self._declare(variable.name)
            self.variables.append(Variable(name, variable.space, variable.size, variable.align, variable.content))
        elif word != ".pragma":
            raise refusal(self.parser.path, piece.line, piece.text, "is no directive that is read")

    def _instruction(self, piece: _Piece) -> Instruction:
        match = re.match(rf"(?:@(!?)({_NAME})\s+)?([a-z][\w.:]*)\s*(.*)$", piece.text, re.S)
        if not match:
            raise refusal(self.parser.path, piece.line, piece.text, "is no instruction")
        guard = Guard(self._name_of(match[2]), bool(match[1])) if match[2] else None
        # `shared::cta` becomes `shared_cta`, one modifier; the opcode itself is split at its points
        name, *modifiers = match[3].replace("::", "_").split(".")
        operands = tuple(self._rename(part) for part in self.parser._operands(match[4], piece.line))
        return Instruction(name, tuple(modifiers), operands, piece.line, guard)

    def _rename(self, operand: Operand) -> Operand:
        """The operand with the names of its scope; what is declared as a register becomes one."""
        if isinstance(operand, Symbol):
            name = self._name_of(operand.name)
            return Register(name) if name in self.registers else Symbol(name)
        if isinstance(operand, Address) and operand.base is not None:
            base = self._rename(operand.base)
            inner = tuple(self._rename(part) for part in operand.coordinates)
            return Address(base if isinstance(base, Register | Symbol) else None, operand.offset, inner)
        if isinstance(operand, OperandGroup):
            return OperandGroup(tuple(self._rename(part) for part in operand.members), operand.is_pair)
        return operand


def _pieces(code: str) -> Iterator[_Piece]:
    """Statements, labels and braces. A brace belongs to a statement if one has begun that is no head of a function."""
    start, line, first = 0, 1, 1
    for match in re.finditer(r"[;{}:\n]", code):
        sign, place = match[0], match.start()
        text = code[start:place]
        if sign == "\n":
            line += 1
            first = first if text.strip() else line
            continue
        is_head = sign == "{" and re.match(r"\s*(\.(visible|weak|extern)\s+)*\.(entry|func)\b", text) is not None
        if sign == ":" and not _LABEL.fullmatch(code[start : place + 1]):
            continue  # of an opcode, as in shared::cta
        if sign in "{}" and text.strip() and not is_head:
            continue  # of operands or an initialiser
        if text.strip():
            kind = "head" if is_head else "label" if sign == ":" else "statement"
            yield _Piece(text.strip(), first, kind)
        if sign in "{}":
            yield _Piece(sign, line, "open" if sign == "{" else "close")
        start, first = place + 1, line
    if code[start:].strip():
        yield _Piece(code[start:].strip(), first)


def _operand(tokens: list[tuple[str, str]], place: int) -> tuple[Operand, int]:
    """The operand that begins at a token, and the place after it. Raises ValueError where none does."""
    kind, text = tokens[place]
    if text in "{(":
        members, place = [], place + 1
        # a closing brace or parenthesis ends the group; commas between its members are skipped
        while tokens[place][1] not in "})":
            member, place = _operand(tokens, place)
            members.append(member)
            place += tokens[place][1] == ","
        return OperandGroup(tuple(members)), place + 1
    if text == "[":
        return _address(tokens, place + 1)
    operand: Operand
    if kind == "name":
        operand = Symbol(text)
    elif kind in ("number", "float"):
        operand = _constant(text)
    # `!%p`: the third operand of `setp`, negated, is a pair of one member
    elif text == "!" and tokens[place + 1][0] == "name":
        return OperandGroup((Symbol(tokens[place + 1][1]),), is_pair=True), place + 2
    else:
        raise ValueError(text)
    # `%p|%q` of `setp` and `shfl`: two results
    if place + 1 < len(tokens) and tokens[place + 1][1] == "|":
        second, place = _operand(tokens, place + 2)
        return OperandGroup((operand, second), is_pair=True), place
    return operand, place + 1


def _address(tokens: list[tuple[str, str]], place: int) -> tuple[Operand, int]:
    """An address, whose bracket stands before `place`."""
    base, offset, sign = None, 0, 1
    while tokens[place][1] != "]":
        kind, text = tokens[place]
        if kind == "name" and base is None:
            # a second name is no base: such a sum of addresses is refused below
            base = Symbol(text)
        elif text == "," and tokens[place + 1][1] == "{":
            # `[map, {x, y}]`: a tensor map and coordinates in its tensor
            group, place = _operand(tokens, place + 1)
            if tokens[place][1] != "]" or not isinstance(group, OperandGroup):
                raise ValueError(text)
            return Address(base, offset, group.members), place + 1
        elif kind == "number":
            offset, sign = offset + sign * int(text.rstrip("U"), 0), 1
        elif text in "+-":
            sign = 1 if text == "+" else -1
        else:
            raise ValueError(text)
        place += 1
    return Address(base, offset), place + 1


def _constant(text: str) -> Immediate:
    """A number as it is written. Decimal fractions are numbers of 64 bits."""
    if text[:2].lower() == "0f" and len(text) == 10:
        return Immediate(int(text[2:], 16), 32)
    if text[:2].lower() == "0d" and len(text) == 18:
        return Immediate(int(text[2:], 16), 64)
    if "." in text:
        # the bits of a double, which `rows.immediate_bits` rounds for an operand of single precision
        return Immediate(struct.unpack("<Q", struct.pack("<d", float(text)))[0], 64)
    # a leading zero means octal, as in C
    return Immediate(int(text.rstrip("U"), 8 if re.fullmatch(r"-?0[0-7]+U?", text) else 0))
