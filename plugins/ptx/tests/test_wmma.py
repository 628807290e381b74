"""`wmma` against NumPy, PTX as nvcc writes it, and what is refused."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from dse.errors import ConfigError
from dse_ptx.checking import comparison
from dse_ptx.execution import LaunchOptions, Module, PtxDevice
from dse_ptx.sms import sm_array
from dse_ptx.timing import time_launch

pytestmark = pytest.mark.more
_HEAD = ".version 7.8\n.target sm_80\n.address_size 64\n"
_TYPES = {"f16": np.float16, "f32": np.float32, "s8": np.int8, "u8": np.uint8, "s32": np.int32, "tf32": np.float32,
          "f64": np.float64, "bf16": np.uint16, "s4": np.uint8, "u4": np.uint8, "b1": np.uint8}  # fmt: skip
_PACKED = {"f16": 2, "bf16": 2, "s8": 4, "u8": 4, "s4": 8, "u4": 8, "b1": 32}
_CASES = [
    *(("m16n16k16", "f16", *case) for case in itertools.product(("f32", "f16"), "rc", "rc", "rc")),
    *(("m32n8k16", "f16", "f32", *layouts) for layouts in ("rcr", "crc")),
    *(("m8n32k16", "f16", "f32", *layouts) for layouts in ("rcr", "crc", "rrr")),
    ("m16n16k8", "tf32", "f32", "r", "c", "r"), ("m16n16k8", "tf32", "f32", "c", "r", "c"),
    ("m16n16k16", "bf16", "f32", "r", "c", "r"), ("m16n16k16", "s8", "s32", "r", "c", "r"),
    ("m16n16k16", "s8", "s32", "c", "r", "c"), ("m16n16k16", "u8", "s32", "r", "c", "r"),
    ("m32n8k16", "u8", "s32", "c", "r", "c"), ("m8n32k16", "s8", "s32", "r", "r", "c"),
    ("m8n32k16", "bf16", "f32", "r", "c", "r"), ("m32n8k16", "bf16", "f32", "c", "r", "r"),
    ("m8n8k32", "s4", "s32", "r", "c", "r"), ("m8n8k32", "u4", "s32", "r", "c", "c"),
    ("m8n8k128", "b1", "s32", "r", "c", "r"), ("m8n8k128", "b1", "s32", "r", "c", "c"),
    *(("m8n8k4", "f64", "f64", *layouts) for layouts in ("rcr", "crc", "rrr")),
]  # fmt: skip
_RANGES = {"u8": (0, 256), "s8": (-128, 128), "u4": (0, 16), "s4": (-8, 8), "b1": (0, 2)}


def _sizes(shape: str) -> tuple[int, int, int]:
    m, n, k = (int(word) for word in shape[1:].replace("n", " ").replace("k", " ").split())
    return m, n, k


def _count(shape: str, kind: str, matrix: str) -> int:
    """Registers of a fragment (PTX ISA, section 9.7.15.1)."""
    m, n, k = _sizes(shape)
    elements = {"a": m * k, "b": k * n}.get(matrix, m * n) // 32
    return 8 if kind == "f16" and matrix in "ab" else elements // _PACKED.get(kind, 1)


def _kernel(shape: str, kind: str, result: str, layouts: str, pads: dict[str, int], bits: str) -> str:
    """Text of a kernel of one warp: D = A B + C, whose lines lie `pads` apart."""
    words, lines = {"r": "row", "c": "col"}, []
    of = {"a": (kind, layouts[0]), "b": (kind, layouts[1]), "c": (result, layouts[2]), "d": (result, layouts[2])}
    groups = {g: f"{{{', '.join(f'%{g}{n}' for n in range(_count(shape, t, g)))}}}" for g, (t, _) in of.items()}
    for place, (name, (type_name, layout)) in enumerate(of.items()):
        width = "f64" if type_name == "f64" else "b32"
        lines += [f".reg .{width} %{name}<{_count(shape, type_name, name)}>;", f".reg .b64 %p{name};"]
        lines += [f"ld.param.u64 %p{name}, [k_{place}];"]
        access = f"sync.aligned.{words[layout]}.{shape}.global.{type_name}"
        if name != "d":
            lines += [f"wmma.load.{name}.{access} {groups[name]}, [%p{name}], {pads[name]};"]
        else:
            types = f"{result}.{result}" if kind == "f16" else f"{result}.{kind}.{kind}.{result}"
            head = f"wmma.mma{bits}.sync.aligned.{words[layouts[0]]}.{words[layouts[1]]}.{shape}.{types}"
            lines += [f"{head} {groups['d']}, {groups['a']}, {groups['b']}, {groups['c']};"]
            lines += [f"wmma.store.d.{access} [%pd], {groups['d']}, {pads['d']};"]
    parameters = ", ".join(f".param .u64 k_{n}" for n in range(4))
    return _HEAD + f".visible .entry k({parameters})\n{{\n" + "\n".join(lines) + "\nret;\n}\n"


def _laid(values: Any, layout: str, pad: int) -> Any:
    """A matrix by its lines, of which each takes `pad` elements."""
    lines = values if layout == "r" else values.T
    return np.ascontiguousarray(np.pad(lines, ((0, 0), (0, pad - lines.shape[1]))))


def _stored(values: Any, kind: str) -> Any:
    """Lines of a matrix as they lie in memory."""
    if kind == "bf16":
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    if kind in ("s4", "u4"):
        return ((values[:, ::2] & 15) | (values[:, 1::2] & 15) << 4).astype(np.uint8)
    return (
        np.packbits(values.astype(np.uint8), axis=1, bitorder="little") if kind == "b1" else values.astype(_TYPES[kind])
    )


@pytest.mark.parametrize(("shape", "kind", "result", "a", "b", "c"), _CASES)
def test_fragments_multiply_as_matrices_do(shape: str, kind: str, result: str, a: str, b: str, c: str) -> None:
    m, n, k = _sizes(shape)
    rng, sizes = np.random.default_rng(4), {"a": (m, k), "b": (k, n), "c": (m, n), "d": (m, n)}
    of, layouts = {"a": kind, "b": kind, "c": result, "d": result}, {"a": a, "b": b, "c": c, "d": c}
    matrices: dict[str, Any] = {g: rng.integers(*_RANGES.get(of[g], (-4, 5)), sizes[g]) for g in sizes}
    pads = {g: 32 + (size[1] if layouts[g] == "r" else size[0]) for g, size in sizes.items()}
    arrays = [_stored(_laid(matrices[g], layouts[g], pads[g]), of[g]) for g in sizes]
    text = _kernel(shape, kind, result, a + b + c, pads, ".xor.popc" if kind == "b1" else "")
    compiled, plain = comparison.both(text, "k", ((1,), (32,)), arrays)
    assert comparison.same(compiled, plain)
    ours = compiled[3].astype(np.int64)[:, : n if c == "r" else m]
    left, right = matrices["a"], matrices["b"]
    product = (left[:, :, None] != right[None]).sum(axis=1) if kind == "b1" else left @ right
    assert np.array_equal(ours if c == "r" else ours.T, product + matrices["c"])


_PRODUCTS = [
    "m16n8k8.row.col.f32.bf16.bf16.f32", "m16n8k4.row.col.f32.tf32.tf32.f32", "m8n8k16.row.col.s32.s8.u8.s32",
    "m16n8k32.row.col.satfinite.s32.u8.s8.s32", "m16n8k32.row.col.s32.u4.s4.s32",
    "m16n8k64.row.col.satfinite.s32.s4.u4.s32",
    "m8n8k128.row.col.s32.b1.b1.s32.and.popc", "m16n8k256.row.col.s32.b1.b1.s32.xor.popc",
    "m8n8k4.row.col.f64.f64.f64.f64", "m16n8k4.row.col.f64.f64.f64.f64", "m16n8k16.row.col.f64.f64.f64.f64",
    "m16n8k16.row.col.f16.f16.f16.f16",
]  # fmt: skip


def _product(words: str, times: int = 1) -> tuple[str, list[int], str]:
    """Text of a kernel whose lanes load fragments and store their product, registers of D, A, B, C, type of A."""
    m, n, k = _sizes(words.partition(".")[0])
    result, kind = [word for word in words.split(".") if word in _TYPES][:2]
    sizes = zip((m * n, m * k, k * n, m * n), (result, kind, kind, result), strict=True)
    counts = [size // 32 // _PACKED.get(word, 1) for size, word in sizes]
    wide = 8 if kind == "f64" else 4
    lines = [f".reg .b{8 * wide} %r<{sum(counts)}>;", ".reg .b32 %t;", ".reg .b64 %p<2>;", "mov.u32 %t, %tid.x;"]
    lines += ["ld.param.u64 %p0, [data];", f"mad.wide.u32 %p1, %t, {wide * sum(counts)}, %p0;"]
    lines += [f"ld.global.b{8 * wide} %r{i}, [%p1+{wide * i}];" for i in range(counts[0], sum(counts))]
    starts = [sum(counts[:number]) for number in range(4)]
    groups = [", ".join(f"%r{at + i}" for i in range(count)) for at, count in zip(starts, counts, strict=True)]
    lines += [f"mma.sync.aligned.{words} {', '.join(f'{{{group}}}' for group in groups)};"] * times
    lines += [f"st.global.b{8 * wide} [%p1+{wide * i}], %r{i};" for i in range(counts[0])]
    body = "\n".join([*lines, "ret;"])
    return f"{_HEAD}.visible .entry k(.param .u64 data)\n{{\n{body}\n}}\n", counts, kind


@pytest.mark.parametrize("words", _PRODUCTS)
def test_products_of_all_types_are_those_of_the_plain_interpreter(words: str) -> None:
    text, counts, kind = _product(words)
    rng, size = np.random.default_rng(len(words)), 32 * sum(counts)
    data = rng.normal(size=size) if kind == "f64" else rng.integers(0, 2**32, size, np.uint32)
    if kind[-2:] in ("16", "32"):  # whose sums are exact in any order
        data = _stored(rng.integers(-8, 8, size * _PACKED.get(kind, 1)).astype(np.float32), kind).view(np.uint32)
    assert comparison.same(*comparison.both(text, "k", ((1,), (32,)), [data]))


_RATES = [(_PRODUCTS[place], rate) for place, rate in {0: 1, 1: 0.5, 3: 2, 5: 4, 7: 16, 10: 0.0625}.items()]


@pytest.mark.parametrize(("words", "rate"), _RATES)
def test_products_take_the_time_of_their_elements_and_never_beat_it(words: str, rate: float) -> None:
    text, counts, kind = _product(words, 200)
    device, (m, n, k) = PtxDevice(), _sizes(words.partition(".")[0])
    data = device.allocate(1024 * 8 * sum(counts))
    run = Module(text, device).launch("k", (1,), (1024,), [data], LaunchOptions(sample=(0,)))
    assert run.trace is not None
    gpu = sm_array("a100", {"memory": {"num_cus": 1}})
    done = time_launch(run.trace, gpu)
    assert done.flop == 32 * 200 * 2 * m * n * k
    most = 2 * gpu.sm.pipes["tensor"].lanes * gpu.sm.schedulers * rate
    assert 0.5 * most < done.flop / done.cycles <= most
    if kind != "f16":
        with pytest.raises(ConfigError, match=f"has none for {kind}"):
            time_launch(run.trace, sm_array("v100"))


@pytest.mark.parametrize("opcode", ["wmma.load.a.sync.aligned.col.m8n8k32.global.s4 {%r1}, [%rd1];",
                                    "wmma.load.a.sync.aligned.row.m16n16k32.global.s4 {%r1}, [%rd1];"])  # fmt: skip
def test_shapes_that_are_not_executed_are_refused(opcode: str) -> None:
    text = f"{_HEAD}.visible .entry k()\n{{\n.reg .b32 %r<4>;\n.reg .b64 %rd<4>;\n{opcode}\nret;\n}}\n"
    with pytest.raises(ConfigError, match=r"line 8.*shapes are f16 m16n16k16"):
        Module(text, PtxDevice()).kernel("k")


_NVCC = """//
// Generated by NVIDIA NVVM Compiler
// Cuda compilation tools, release 12.4, V12.4.131
.version 8.4
.target sm_70
.address_size 64

\t// .globl\t_Z5scalePfPKffi
.extern .func  (.param .b32 func_retval0) vprintf
(
\t.param .b64 vprintf_param_0,
\t.param .b64 vprintf_param_1
)
;
.const .align 4 .f32 factors[2] = {0f40000000, 0f40400000};
.global .align 1 .b8 $str[4] = {37, 100, 10};
// _ZZ5scalePfPKffiE4tile has been demoted

.visible .entry _Z5scalePfPKffi(
\t.param .u64 _Z5scalePfPKffi_param_0,
\t.param .u64 _Z5scalePfPKffi_param_1,
\t.param .f32 _Z5scalePfPKffi_param_2,
\t.param .u32 _Z5scalePfPKffi_param_3
)
.maxntid 128, 1, 1
.minnctapersm 2
{
\t.reg .pred \t%p<3>;
\t.reg .f32 \t%f<7>;
\t.reg .b32 \t%r<9>;
\t.reg .b64 \t%rd<9>;
\t// demoted variable
\t.shared .align 4 .b8 _ZZ5scalePfPKffiE4tile[512];
\tld.param.u64 \t%rd1, [_Z5scalePfPKffi_param_0];
\tld.param.u64 \t%rd2, [_Z5scalePfPKffi_param_1];
\tld.param.f32 \t%f1, [_Z5scalePfPKffi_param_2];
\tld.param.u32 \t%r2, [_Z5scalePfPKffi_param_3];
\t.loc\t1 5 17, function_name $L__info_string0, inlined_at 1 4 3
\tmov.u32 \t%r3, %ctaid.x;
\tmov.u32 \t%r4, %ntid.x;
\tmov.u32 \t%r5, %tid.x;
\tmad.lo.s32 \t%r1, %r3, %r4, %r5;
\tsetp.ge.s32 \t%p1, %r1, %r2;
\t@%p1 bra \t$L__BB0_2;
\tcvta.to.global.u64 \t%rd3, %rd2;
\tmul.wide.s32 \t%rd4, %r1, 4;
\tadd.s64 \t%rd5, %rd3, %rd4;
\tld.global.nc.f32 \t%f2, [%rd5];
\tshl.b32 \t%r6, %r5, 2;
\tmov.u32 \t%r7, _ZZ5scalePfPKffiE4tile;
\tadd.s32 \t%r8, %r7, %r6;
\tst.shared.f32 \t[%r8], %f2;
\tld.shared.f32 \t%f3, [%r8];
\tld.const.f32 \t%f4, [factors+4];
\tmul.ftz.f32 \t%f5, %f3, %f4;
\tfma.rn.ftz.f32 \t%f6, %f5, %f1, 0f3F800000;
\tcvta.to.global.u64 \t%rd6, %rd1;
\tadd.s64 \t%rd7, %rd6, %rd4;
\tst.global.f32 \t[%rd7], %f6;
$L__BB0_2:
\tbar.sync \t0;
\tret;
}
"""


def test_a_text_of_nvcc_is_executed() -> None:
    device, x = PtxDevice(), np.arange(300, dtype=np.float32)
    y, source = device.allocate(4 * 300), device.allocate(x)
    Module(_NVCC, device).launch("_Z5scalePfPKffi", (3,), (128,), (y, source, 0.5, 300))
    assert np.array_equal(device.read(y, np.float32, 300), x * 3 * 0.5 + 1)


def test_what_nvcc_writes_and_is_not_executed_is_refused_by_its_line() -> None:
    for line, why in {
        "tcgen05.fence;": "compile for sm_80",
        "tex.2d.v4.f32.f32 {%f1, %f2, %f3, %f4}, [%rd1, {%f1, %f2}];": "textures and surfaces",
        "suld.b.1d.b32.trap %r1, %r2;": "textures and surfaces",
        "vprintf_call %r1;": "is no instruction|is not known",
    }.items():
        text = _NVCC.replace("\tbar.sync \t0;", f"\t{line}")
        with pytest.raises(ConfigError, match=f"line 61.*({why})"):
            Module(text, PtxDevice()).kernel("_Z5scalePfPKffi")
