"""Random kernels of PTX that end, race for nothing, and store all that they computed."""

from __future__ import annotations

import random
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

_KINDS = {"h": "b16", "r": "b32", "d": "b64", "f": "f32", "g": "f64", "p": "pred"}
"""Letters of registers, and their types."""
_BYTES = {"h": 2, "r": 4, "d": 8, "f": 4, "g": 8}
COUNT = 6
"""Registers of each letter."""
THREADS, BLOCKS = 64, 2
_SIZES = (("16", "h"), ("32", "r"), ("64", "d"))


def _templates() -> list[str]:
    """Instructions whose operands are letters of registers; `#n` is a constant below n."""
    forms = list[str]()
    for bits, x in _SIZES:
        for kind in ("s" + bits, "u" + bits):
            forms += [
                f"{op}.{kind} {x}, {x}, {x}" for op in ("add", "sub", "mul.lo", "mul.hi", "div", "rem", "min", "max")
            ]
            forms += [f"{op}.{kind} {x}, {x}, {x}, {x}" for op in ("mad.lo", "sad")] + [f"shr.{kind} {x}, {x}, r"]
            forms += [f"setp.{cmp}.{kind} p, {x}, {x}" for cmp in ("eq", "ne", "lt", "le", "gt", "ge")]
        forms += [f"{op}.b{bits} {x}, {x}, {x}" for op in ("and", "or", "xor")]
        forms += [f"not.b{bits} {x}, {x}", f"cnot.b{bits} {x}, {x}", f"shl.b{bits} {x}, {x}, r"]
        forms += [f"neg.s{bits} {x}, {x}", f"abs.s{bits} {x}, {x}", f"selp.b{bits} {x}, {x}, {x}, p"]
        forms += [f"slct.b{bits}.s32 {x}, {x}, {x}, r", f"setp.lt.and.u{bits} p|p, {x}, {x}, p"]
    for bits, x in _SIZES[1:]:
        forms += [f"{op}.b{bits} {'r'}, {x}" for op in ("popc", "clz")] + [f"brev.b{bits} {x}, {x}"]
        forms += [f"bfe.{k}{bits} {x}, {x}, r, r" for k in "su"] + [f"bfi.b{bits} {x}, {x}, {x}, r, r"]
        forms += [f"bfe.{k}{bits} {x}, {x}, #{bits}, #{bits}" for k in "su"]
        forms += [f"bfi.b{bits} {x}, {x}, {x}, #{bits}, #{bits}"]
        forms += [f"bfind.{k}{bits} r, {x}" for k in "su"] + [f"mad.hi.{k}{bits} {x}, {x}, {x}, {x}" for k in "su"]
        forms += [f"shl.b{bits} {x}, {x}, #{bits}", f"shr.s{bits} {x}, {x}, #{bits}", f"shr.u{bits} {x}, {x}, #{bits}"]
    forms += [f"{op}.wide.{k}{n} {y}, {x}, {x}" + (f", {y}" if op == "mad" else "")
              for op in ("mul", "mad") for k in "su" for n, x, y in (("16", "h", "r"), ("32", "r", "d"))]  # fmt: skip
    forms += ["lop3.b32 r, r, r, r, #256", "prmt.b32 r, r, r, r", "prmt.b32 r, r, r, #65536", "add.s32 r, r, #100"]
    forms += [
        f"shf.{side}.{mode}.b32 r, r, r, {n}" for side in "lr" for mode in ("wrap", "clamp") for n in ("r", "#40")
    ]
    forms += [f"dp4a.{a}32.{b}32 r, r, r, r" for a in "su" for b in "su"]
    forms += ["and.pred p, p, p", "or.pred p, p, p", "xor.pred p, p, p", "not.pred p, p"]
    forms += ["set.lt.u32.s32 r, r, r", "set.gt.f32.f32 f, f, f", "setp.hi.u32 p, r, r", "setp.ls.u32 p, r, r"]
    forms += [
        "mov.b32 r, {{h, h}}",
        "mov.b64 d, {{r, r}}",
        "mov.b32 {{h, h}}, r",
        "mov.b64 {{r, r}}, d",
        "mov.b32 r, f",
    ]
    forms += ["setp.ge.or.s32 p|p, r, r, !p", "setp.lt.xor.f32 p, f, f, p"]
    return forms + _float_forms() + _conversions()


def _float_forms() -> list[str]:
    forms = list[str]()
    for kind, x in (("f32", "f"), ("f64", "g")):
        for op in ("add", "sub", "mul", "div.rn", "min", "max", "copysign"):
            forms.append(f"{op}.{kind} {x}, {x}, {x}")
        forms += [f"fma.rn.{kind} {x}, {x}, {x}, {x}"] + [f"{op}.{kind} {x}, {x}" for op in ("neg", "abs")]
        forms += [f"{op}.rn.{kind} {x}, {x}" for op in ("rcp", "sqrt")]
        forms += [f"testp.{word}.{kind} p, {x}" for word in ("finite", "infinite", "number", "normal", "subnormal")]
        comparisons = "eq ne lt le gt ge equ neu ltu leu gtu geu num nan"
        forms += [f"setp.{word}.{kind} p, {x}, {x}" for word in comparisons.split()]
        forms.append(f"selp.{kind} {x}, {x}, {x}, p")
    for ending in ("ftz.f32", "sat.f32"):
        forms += [f"add.{ending} f, f, f", f"mul.{ending} f, f, f", f"fma.rn.{ending} f, f, f, f"]
    forms += [f"{op}.NaN.f32 f, f, f" for op in ("min", "max")] + ["rsqrt.approx.f32 f, f", "setp.lt.ftz.f32 p, f, f"]
    forms += [f"{op}.approx.f32 f, f" for op in ("ex2", "lg2", "sin", "cos", "tanh", "rcp", "sqrt")]
    for half in ("f16", "bf16"):
        forms += [f"{op}.{half} h, h, h" for op in ("add.rn", "sub.rn", "mul.rn", "min", "max")] + [
            f"fma.rn.{half} h, h, h, h"
        ]
        forms += [f"{op}.{half}x2 r, r, r" for op in ("add.rn", "mul.rn", "min", "max")]
        forms += [
            f"fma.rn.{half}x2 r, r, r, r",
            f"fma.rn.relu.{half} h, h, h, h",
            f"neg.{half} h, h",
            f"abs.{half}x2 r, r",
        ]
        forms += [f"setp.{word}.{half} p, h, h" for word in ("lt", "geu")]
    return [*forms, "ex2.approx.f16 h, h", "tanh.approx.f16x2 r, r"]


def _conversions() -> list[str]:
    forms = list[str]()
    integers = [(k + bits, x) for bits, x in _SIZES for k in "su"]
    for kind, x in (("f32", "f"), ("f64", "g")):
        forms += [f"cvt.rn.{kind}.{integer} {x}, {y}" for integer, y in integers]
        forms += [
            f"cvt.{mode}.{integer}.{kind} {y}, {x}" for integer, y in integers for mode in ("rzi", "rni", "rmi", "rpi")
        ]
        forms += [f"cvt.{mode}.{kind}.{kind} {x}, {x}" for mode in ("rzi", "rni", "rmi", "rpi")]
    forms += [f"cvt.{to}.{of} {x}, {y}" for to, x in integers for of, y in integers if to != of]
    forms += [f"cvt.sat.{to}.{of} {x}, {y}" for to, x in integers[:4] for of, y in integers[:4] if to != of]
    forms += ["cvt.s32.s8 r, r", "cvt.u32.u8 r, r", "cvt.s16.s8 h, h", "cvt.u16.u8 h, r", "cvt.rn.f32.u8 f, h"]
    forms += [
        "cvt.rn.f32.f64 f, g",
        "cvt.f64.f32 g, f",
        "cvt.f32.f16 f, h",
        "cvt.f32.bf16 f, h",
        "cvt.sat.f32.f32 f, f",
    ]
    forms += [f"cvt.{mode}.{half}.f32 h, f" for mode in ("rn", "rz", "rn.relu") for half in ("f16", "bf16")]
    forms += [f"cvt.{mode}.{half}x2.f32 r, f, f" for mode in ("rn", "rz", "rn.relu") for half in ("f16", "bf16")]
    forms += [f"cvt.{mode}.tf32.f32 r, f" for mode in ("rna", "rn")] + ["cvt.f64.f16 g, h", "cvt.rn.f16.s32 h, r"]
    return [*forms, "cvt.rzi.s32.f16 r, h", "cvt.rni.f16.f16 h, h", "cvt.rn.f16.u16 h, h"]


TEMPLATES = tuple(_templates())
"""Instructions that compute from registers, each of which programs are made of."""
_TOGETHER = (
    *(f"shfl.sync.{mode}.b32 r|p, r, #32, {c}, -1" for mode, c in (("up", 0), ("down", 31), ("bfly", 31), ("idx", 31))),
    "shfl.sync.bfly.b32 r, r, r, 7199, -1",
    *(f"vote.sync.{mode}.pred p, p, -1" for mode in ("all", "any", "uni")),
    "vote.sync.ballot.b32 r, p, -1",
    "match.any.sync.b32 r, r, -1",
    "activemask.b32 r",
    *(
        f"redux.sync.{op} r, r, -1"
        for op in ("add.u32", "min.s32", "max.u32", "and.b32", "or.b32", "xor.b32", "max.s32")
    ),
)
_SPECIALS = ("%tid.x", "%ntid.x", "%ctaid.x", "%nctaid.x", "%laneid", "%warpid", "%lanemask_lt", "%lanemask_ge")
_FLOATS = (
    0.0,
    -0.0,
    1.0,
    -1.5,
    2.0**-149,
    1e-40,
    3.4e38,
    65519.0,
    65520.0,
    6e-8,
    0.1,
    float("inf"),
    float("nan"),
    2.5,
    8388609.0,
)
_INTEGERS = (0, 1, 2, 5, 31, 32, 33, 63, 64, 127, 128, 255, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)


def word(of: random.Random, letter: str) -> int:
    """Bits of an operand, often a limit of its type."""
    bits = 8 * _BYTES[letter]
    # else any bits: numbers that are none, subnormal ones
    if letter in "fg" and of.random() < 0.8:
        number = of.choice(_FLOATS) if of.random() < 0.4 else of.uniform(-1, 1) * 2.0 ** of.randint(-20, 40)
        packed = struct.pack("<f" if letter == "f" else "<d", number)
        return int.from_bytes(packed, "little")
    value = of.choice(_INTEGERS) * of.choice((1, -1)) if of.random() < 0.5 else of.getrandbits(of.randint(1, bits))
    return value % (1 << bits)


@dataclass
class _Writer:
    """Writes the statements of one kernel."""

    of: random.Random
    lines: list[str] = field(default_factory=list)
    labels: int = 0

    def register(self, letter: str) -> str:
        """A register of a letter."""
        return f"%{letter}{self.of.randrange(COUNT)}"

    def fill(self, template: str) -> str:
        """A template with registers and constants; two results are not the same register."""
        opcode, _, operands = template.partition(" ")
        used = set[str]()

        def pick(forms: re.Match[str]) -> str:
            if forms[0].startswith("#"):
                return str(self.of.randrange(int(forms[0][1:])))
            name = self.register(forms[0])
            # PTX leaves open which of two results is written last
            while name in used and len(used) < COUNT - 1 and ("|" in operands or "{" in operands):
                name = self.register(forms[0])
            used.add(name)
            return name

        operands = re.sub(r"#\d+|\b[hrdfgp]\b", pick, operands.replace("{{", "{").replace("}}", "}"))
        guard = f"@{self.of.choice(('', '!'))}{self.register('p')} " if self.of.random() < 0.1 else ""
        return f"\t{guard}{opcode} {operands};"

    def straight(self, count: int, templates: Sequence[str]) -> None:
        """Instructions one after another."""
        self.lines += [self.fill(self.of.choice(templates)) for _ in range(count)]

    def body(self, depth: int, templates: Sequence[str]) -> None:
        """Instructions, branches and loops; those of whole warps where all lanes are."""
        for _ in range(self.of.randint(2, 4)):
            self.straight(self.of.randint(1, 6), templates)
            choice = self.of.random()
            if choice < 0.25 and depth:
                self.branch(depth, templates)
            elif choice < 0.45 and depth:
                self.loop(depth, templates)
            # at the outer level alone are all threads of a block together
            elif choice < 0.6 and depth == 2:
                self.exchange()
            elif choice < 0.75 and depth == 2:
                self.lines += [self.fill(self.of.choice(_TOGETHER)).replace("@!%", "@%").partition("@")[0] or ""]
                if not self.lines[-1].strip():
                    self.lines[-1] = "\tactivemask.b32 %r0;"
            elif choice < 0.85:
                self.private()
            else:
                self.lines.append(f"\tmov.u32 {self.register('r')}, {self.of.choice(_SPECIALS)};")

    def label(self) -> str:
        """A label that is new."""
        self.labels += 1
        return f"$L{self.labels}"

    def branch(self, depth: int, templates: Sequence[str]) -> None:
        """Lanes part at a predicate, and meet again."""
        other, end = self.label(), self.label()
        self.lines.append(f"\t@{self.of.choice(('', '!'))}{self.register('p')} bra {other};")
        self.body(depth - 1, templates)
        self.lines += [f"\tbra {end};", f"{other}:"]
        if self.of.random() < 0.7:
            self.body(depth - 1, templates)
        self.lines.append(f"{end}:")

    def loop(self, depth: int, templates: Sequence[str]) -> None:
        """Lanes go round as often as their number asks for."""
        start, counter = self.label(), f"%c{depth}"
        self.lines += [
            f"\tmov.u32 {counter}, %laneid;",
            # at most four rounds, of different number for lanes of a warp
            f"\tand.b32 {counter}, {counter}, {self.of.choice((0, 1, 3))};",
        ]
        self.lines.append(f"{start}:")
        self.body(depth - 1, templates)
        self.lines += [f"\tsub.s32 {counter}, {counter}, 1;", f"\tsetp.ge.s32 %q, {counter}, 0;", f"\t@%q bra {start};"]

    def exchange(self) -> None:
        """Threads of the block pass words through shared memory, or add them up there."""
        value, result = self.register("r"), self.register("r")
        shift = self.of.randrange(THREADS)
        self.lines += ["\tmov.u32 %t, %tid.x;", "\tshl.b32 %s, %t, 2;", "\tmov.u32 %b, tile;", "\tadd.u32 %s, %s, %b;"]
        # barriers between the writes and the reads: programs race for nothing
        self.lines += [f"\tst.shared.b32 [%s], {value};", "\tbar.sync 0;"]
        if self.of.random() < 0.5:
            op = self.of.choice(("add.u32", "min.s32", "max.u32", "or.b32", "xor.b32", "and.b32"))
            self.lines += [f"\tred.shared.{op} [tile+{4 * shift}], {self.register('r')};", "\tbar.sync 0;"]
        self.lines += [f"\txor.b32 %t, %t, {shift};", "\tshl.b32 %t, %t, 2;", "\tadd.u32 %t, %t, %b;"]
        self.lines += [f"\tld.shared.u32 {result}, [%t];", "\tbar.sync 0;"]

    def private(self) -> None:
        """A word goes through local memory, or a parameter is read."""
        place = 8 * self.of.randrange(4)
        self.lines += [f"\tst.local.b64 [depot+{place}], {self.register('d')};"]
        kind, letter = self.of.choice(
            (("s16", "r"), ("u8", "h"), ("b64", "d"), ("s32", "d"), ("u32", "r"), ("f32", "f"))
        )
        if kind == "f32":
            self.lines.append(f"\tld.param.f32 {self.register('f')}, [number];")
        else:
            self.lines.append(f"\tld.local.{kind} {self.register(letter)}, [depot+{place}];")


def kernel(seed: int, templates: Sequence[str] = TEMPLATES, depth: int = 2) -> str:
    """A random kernel. It reads the registers of each thread from words of 8 bytes, and stores all where they were."""
    writer = _Writer(random.Random(seed))
    # Registers of the kernel itself (%c1, %t, ...) are not letters of _KINDS, so that no template writes them.
    registers = [f"\t.reg .{kind} %{letter}<{COUNT}>;" for letter, kind in _KINDS.items()]
    moves = [("ld", letter, number) for letter in _BYTES for number in range(COUNT)]
    first, last = [], []
    for place, (_, letter, number) in enumerate(moves):
        kind, offset = _KINDS[letter], 8 * place
        first.append(f"\tld.global.{kind} %{letter}{number}, [%base+{offset}];")
        last.append(f"\tst.global.{kind} [%base+{offset}], %{letter}{number};")
    # predicates cannot be loaded: they begin as comparisons
    first += [f"\tsetp.gt.s32 %p{i}, %r{i}, {i};" for i in range(COUNT)]
    last += [
        f"\tselp.u32 %r0, 1, 0, %p{i};\n\tst.global.u32 [%base+{8 * (len(moves) + i)}], %r0;" for i in range(COUNT)
    ]
    if depth:
        writer.body(depth, templates)
    else:
        writer.straight(len(templates), templates)
    size = 8 * (len(moves) + COUNT)
    return "\n".join([
        ".version 8.0", ".target sm_80", ".address_size 64", f".shared .align 4 .b8 tile[{4 * THREADS}];",
        ".visible .entry random(.param .u64 data, .param .f32 number)", "{", *registers,
        "\t.reg .b32 %c1, %c2, %t, %s, %b;", "\t.reg .b64 %base, %own;", "\t.reg .pred %q;",
        "\t.local .align 8 .b8 depot[32];", "\tld.param.u64 %base, [data];", "\tmov.u32 %t, %ctaid.x;",
        "\tmov.u32 %s, %ntid.x;", "\tmov.u32 %b, %tid.x;", "\tmad.lo.s32 %t, %t, %s, %b;",
        f"\tmul.wide.u32 %own, %t, {size};", "\tadd.s64 %base, %base, %own;", *first, *writer.lines, *last,
        "\tret;", "}",
    ])  # fmt: skip


def data(seed: int) -> NDArray[np.uint64]:
    """Words of the registers of all threads, (threads, words of each)."""
    of = random.Random(seed)
    rows = []
    for _ in range(THREADS * BLOCKS):
        rows.append([word(of, letter) for letter in _BYTES for _ in range(COUNT)] + [0] * COUNT)
    return np.array(rows, np.uint64)
