"""`wmma` against NumPy, PTX as nvcc writes it, and what is refused."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from dse.errors import ConfigError
from dse_ptx.execution import LaunchOptions, Module, PtxDevice
from dse_ptx.sms import sm_array
from dse_ptx.timing import time_launch

pytestmark = pytest.mark.more
_HEAD = ".version 7.8\n.target sm_80\n.address_size 64\n"
_TYPES = {"f16": np.float16, "f32": np.float32, "s8": np.int8, "s32": np.int32, "tf32": np.float32, "bf16": np.uint16}
_REGISTERS = {("f16", "ab"): 8, ("bf16", "ab"): 4, ("tf32", "ab"): 4, ("s8", "ab"): 2, ("f16", "cd"): 4}
_CASES = [
    *(("m16n16k16", "f16", *case) for case in itertools.product(("f32", "f16"), "rc", "rc", "rc")),
    *(("m32n8k16", "f16", "f32", *layouts) for layouts in ("rcr", "crc")),
    *(("m8n32k16", "f16", "f32", *layouts) for layouts in ("rcr", "crc", "rrr")),
    ("m16n16k8", "tf32", "f32", "r", "c", "r"), ("m16n16k8", "tf32", "f32", "c", "r", "c"),
    ("m16n16k16", "bf16", "f32", "r", "c", "r"), ("m16n16k16", "s8", "s32", "r", "c", "r"),
    ("m16n16k16", "s8", "s32", "c", "r", "c"),
]  # fmt: skip


def _kernel(shape: str, kind: str, result: str, layouts: str, pads: dict[str, int]) -> str:
    """Text of a kernel of one warp: D = A B + C, whose lines lie `pads` apart."""
    words, lines = {"r": "row", "c": "col"}, []
    of = {"a": (kind, layouts[0]), "b": (kind, layouts[1]), "c": (result, layouts[2]), "d": (result, layouts[2])}
    for place, (name, (type_name, layout)) in enumerate(of.items()):
        count = _REGISTERS.get((type_name, "ab" if name in "ab" else "cd"), 8)
        registers = ", ".join(f"%{name}{n}" for n in range(count))
        lines += [f".reg .b32 %{name}<{count}>;", f".reg .b64 %p{name};", f"ld.param.u64 %p{name}, [k_{place}];"]
        access = f"sync.aligned.{words[layout]}.{shape}.global.{type_name}"
        if name != "d":
            lines += [f"wmma.load.{name}.{access} {{{registers}}}, [%p{name}], {pads[name]};"]
        else:
            groups = [f"{{{', '.join(f'%{g}{n}' for n in range(_REGISTERS.get((t, 'ab' if g in 'ab' else 'cd'), 8)))}}}"
                      for g, (t, _) in of.items()]  # fmt: skip
            types = f"{result}.{result}" if kind == "f16" else f"{result}.{kind}.{kind}.{result}"
            head = f"wmma.mma.sync.aligned.{words[layouts[0]]}.{words[layouts[1]]}.{shape}.{types}"
            lines += [f"{head} {groups[3]}, {groups[0]}, {groups[1]}, {groups[2]};"]
            lines += [f"wmma.store.d.{access} [%pd], {{{registers}}}, {pads['d']};"]
    parameters = ", ".join(f".param .u64 k_{n}" for n in range(4))
    return _HEAD + f".visible .entry k({parameters})\n{{\n" + "\n".join(lines) + "\nret;\n}\n"


def _laid(values: Any, layout: str, pad: int) -> Any:
    """A matrix by its lines, of which each takes `pad` elements."""
    lines = values if layout == "r" else values.T
    return np.ascontiguousarray(np.pad(lines, ((0, 0), (0, pad - lines.shape[1]))))


@pytest.mark.parametrize(("shape", "kind", "result", "a", "b", "c"), _CASES)
def test_fragments_multiply_as_matrices_do(shape: str, kind: str, result: str, a: str, b: str, c: str) -> None:
    m, n, k = (int(word) for word in shape[1:].replace("n", " ").replace("k", " ").split())
    rng = np.random.default_rng(4)
    draw = lambda *size: rng.integers(-4, 5, size).astype(np.float32)  # noqa: E731
    sizes = {"a": (m, k), "b": (k, n), "c": (m, n), "d": (m, n)}
    matrices = {name: draw(*size) * (name != "d") for name, size in sizes.items()}
    layouts = {"a": a, "b": b, "c": c, "d": c}
    pads = {name: 8 + (size[1] if layouts[name] == "r" else size[0]) for name, size in sizes.items()}
    device, pointers = PtxDevice(), []
    for name, values in matrices.items():
        type_name = kind if name in "ab" else result
        laid = _laid(values, layouts[name], pads[name])
        laid = (laid.view(np.uint32) >> 16) if type_name == "bf16" else laid
        pointers.append(device.allocate(laid.astype(_TYPES[type_name])))
    text = _kernel(shape, kind, result, a + b + c, pads)
    run = Module(text, device).launch("k", (1,), (32,), pointers, LaunchOptions(sample=(0,)))
    lines = m if c == "r" else n
    ours = device.read(pointers[3], _TYPES[result], (lines, pads["d"]))[:, : pads["d"] - 8].astype(np.float32)
    assert np.array_equal(ours if c == "r" else ours.T, matrices["a"] @ matrices["b"] + matrices["c"])
    assert run.trace is not None
    done = time_launch(run.trace, sm_array("a100"))
    assert done.flop == 2 * m * n * k


@pytest.mark.parametrize("opcode", ["wmma.load.a.sync.aligned.row.m8n8k32.global.s4 {%r1}, [%rd1];"])
def test_shapes_that_are_not_executed_are_refused(opcode: str) -> None:
    text = f"{_HEAD}.visible .entry k()\n{{\n.reg .b32 %r<4>;\n.reg .b64 %rd<4>;\n{opcode}\nret;\n}}\n"
    with pytest.raises(ConfigError, match=r"line 8.*shapes are m16n16k16"):
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
        "wgmma.fence.sync.aligned;": "compile for sm_80",
        "tex.2d.v4.f32.f32 {%f1, %f2, %f3, %f4}, [%rd1, {%f1, %f2}];": "is no list of operands",
        "suld.b.1d.b32.trap %r1, %r2;": "textures and surfaces",
        "vprintf_call %r1;": "is no instruction|is not known",
    }.items():
        text = _NVCC.replace("\tbar.sync \t0;", f"\t{line}")
        with pytest.raises(ConfigError, match=f"line 61.*({why})"):
            Module(text, PtxDevice()).kernel("_Z5scalePfPKffi")
