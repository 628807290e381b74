"""PTX: how it is read, that it computes what a plain interpreter and PyTorch do, and how it fails."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dse.cli import main
from dse.errors import ConfigError
from dse_ptx import build
from dse_ptx.checking import comparison, random_programs, semantics
from dse_ptx.checking.cases import cases
from dse_ptx.control_flow import Flow, live_registers, reconvergence
from dse_ptx.execution import LaunchError, LaunchOptions, Module, PtxDevice, Watch
from dse_ptx.inlining import inline
from dse_ptx.kernels import FOLDER, kernel_text
from dse_ptx.parser import parse
from dse_ptx.program import Address, Immediate, Register
from dse_ptx.warp_trace import Unit

BASICS = kernel_text("basics")
HEAD = ".version 8.0\n.target sm_80\n.address_size 64\n.shared .align 4 .b8 tile[64];\n"
HEAD += ".visible .entry k(.param .u64 data)\n{\n"
NAMES = (
    "\t.reg .b32 %r<4>;\n\t.reg .b64 %d<2>;\n\t.reg .pred %p;\n\tld.param.u64 %d0, [data];\n\tmov.u32 %r0, %tid.x;\n"
)
GUARD = "\tsetp.lt.u32 %p, %r0, 40;\n"


def text(body: str) -> str:
    return HEAD + NAMES + body + "\n\tret;\n}\n"


def launch(body: str, block: int = 64, words: int = 64, options: LaunchOptions | None = None) -> np.ndarray:
    device = PtxDevice()
    module = Module(text(body), device)
    data = device.allocate(np.arange(words, dtype=np.uint32))
    module.launch("k", (1,), (block,), [data], options)
    return device.read(data, np.uint32, words)


def test_a_text_becomes_a_program() -> None:
    program = parse(
        ".version 7.0 // one\n.target sm_70, debug\n.address_size 64\n/* two\nlines */"
        ".const .align 4 .b32 table[3] = {1, -1, 0x10};\n"
        ".entry k(.param .u32 a, .param .align 8 .b8 b[12], .param .u64 c)\n.reqntid 32, 2\n{\n.reg .b32 %r<2>;\n"
        "@!%p1 ld.global.v2.b32 {%r0, %r1}, [%r1+-8]; { .reg .b32 %r0; mov.b32 %r0, 0f3F800000; }\n$L: bra.uni $L;\n}\n"
    )
    kernel = program.functions["k"]
    assert (program.target, program.variables[0].content.hex()) == ("sm_70, debug", "01000000ffffffff10000000")
    assert [entry.offset for entry in kernel.parameters] == [0, 8, 24] and kernel.block == (32, 2)
    load, move, _ = kernel.instructions
    assert load.opcode == "ld.global.v2.b32" and load.line == 10 and load.guard is not None and load.guard.negated
    assert load.operands[1] == Address(Register("%r1"), -8) and kernel.labels == {"$L": 2}
    assert move.operands == (Register("%r0@1"), Immediate(0x3F800000, 32)), (
        "a register of an inner scope is another one"
    )


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("\ttcgen05.wait::ld.sync.aligned;", "is not executed: it works on tensor memory"),
        ("\tadd.rz.f32 %r1, %r1, %r1;", "modifier .rz"),
        ("\tadd.cc.u32 %r1, %r1, %r1;", "modifier .cc"),
        ("\tcvt.rz.f64.s64 %d0, %d0;", "rounding .rz"),
        ("\tmov.u32 %r1, %nosuch;", "special register %nosuch"),
        ("\tmov.u32 %r1, nosuch;", "nosuch is not declared"),
        ("\tbra nowhere;", "label is not in the function"),
        ("\tadd.f32 %r1, %r1, 2;", "written as an integer"),
        ("\tmma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%d0}, {%d0}, {%d0}, {%d0};", "the shape of its fragments"),
        ("\tcall f, ();", "does not hold"),
        ("\tadd.u32 %r1 %r1;", "no list of operands"),
        ("\t.callprototype p;", "no directive that is read"),
        ("\t?;", "is no instruction"),
    ],
)
def test_what_is_not_executed_is_refused_with_its_line(body: str, words: str) -> None:
    with pytest.raises(ConfigError, match="line 12") as caught:
        Module(text(body), PtxDevice()).kernel("k")
    assert words in str(caught.value)


def test_blocks_are_those_for_which_a_kernel_was_compiled() -> None:
    for words, block in ((".reqntid 32", 64), (".maxntid 32, 2", 65)):
        module = Module(text("").replace("data)\n{", f"data)\n{words}\n{{"), PtxDevice())
        module.launch("k", (1,), (32,), [0])
        with pytest.raises(ConfigError, match=words.split()[0]):
            module.launch("k", (1,), (block,), [0])


def test_all_that_is_not_executed_is_told_at_once_and_recursion_ends() -> None:
    with pytest.raises(ConfigError) as caught:
        Module(text("\twgmma.a;\n\ttcgen05.b;"), PtxDevice()).kernel("k")
    assert len(caught.value.problems) == 2
    loop = ".func f()\n{\n\tcall f, ();\n\tret;\n}\n" + text("\tcall f, ();").replace(HEAD.splitlines()[0], "")
    with pytest.raises(ConfigError, match="recursive"):
        inline(parse(loop), "k", "ptx")


def flow(
    target: int = -1, *, end: bool = False, guarded: bool = False, w: tuple[int, ...] = (), r: tuple[int, ...] = ()
) -> Flow:
    return Flow(w, r, target, end, guarded)


def test_lanes_meet_at_the_nearest_place_that_all_pass() -> None:
    diamond = [flow(3, guarded=True), flow(), flow(4), flow(), flow(end=True)]
    assert reconvergence(diamond) == [4, -1, 4, -1, -1]
    loop = [flow(), flow(4, guarded=True), flow(), flow(0), flow(end=True)]
    assert reconvergence(loop) == [-1, 4, -1, 0, -1]
    early = [flow(2, guarded=True), flow(end=True), flow(end=True)]
    assert reconvergence(early)[0] == -1
    endless = [flow(2, guarded=True), flow(1), flow(end=True)]
    assert reconvergence(endless)[0] == 2
    assert live_registers([flow(w=(0,)), flow(w=(1,)), flow(r=(0, 1)), flow(end=True)], [1, 2]) == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [pytest.param(entry, id=f"{entry.file}-{entry.kernel}-{i}") for i, entry in enumerate(cases())]
)
@pytest.mark.one_in(12, 3)
def test_kernels_leave_the_memory_of_the_plain_interpreter(case) -> None:  # type: ignore[no-untyped-def]
    assert case.is_equal()


@pytest.mark.slow
@pytest.mark.parametrize("place", range(len(random_programs.TEMPLATES)))
@pytest.mark.one_in(60, 10)
def test_each_instruction_computes_what_the_manual_says(place: int) -> None:
    assert comparison.random_is_equal(place, [random_programs.TEMPLATES[place]] * 4, 0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1200))
@pytest.mark.one_in(40, 10)
def test_random_programs_leave_the_memory_of_the_plain_interpreter(seed: int) -> None:
    assert comparison.random_is_equal(seed)


@pytest.mark.slow
def test_a_fault_of_either_interpreter_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    right = semantics.integer
    wrong = lambda entry, kind, words: right(entry, kind, words) ^ (entry.name == "add")  # noqa: E731
    monkeypatch.setattr(semantics, "integer", wrong)
    assert not comparison.random_is_equal(0, ["add.u32 r, r, r"], 0)


STORE = "\tmul.wide.u32 %d1, %r0, 4;\n\tadd.s64 %d0, %d0, %d1;\n\tst.global.u32 [%d0], %r1;"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "words"),
    [
        (
            "\tld.global.u32 %r1, [%d0+256];",
            "line 12, ld.global.u32 of k: thread (0, 0, 0) of block (0, 0, 0) accesses 0x1000001",
        ),
        ("\tst.global.u32 [%d0+-4], %r1;", "accesses 0xfffffffc, which is out of bounds"),
        ("\tld.global.u32 %r1, [%d0+2];", "not a multiple of the access's size"),
        ("\tld.shared.u32 %r1, [tile+64];", "out of bounds"),
        (f"{GUARD}\t@%p bar.sync 1;\n\tbar.sync 0;", "a barrier is reached without thread (40, 0, 0)"),
        ("\tsetp.lt.u32 %p, %r0, 32;\n\t@%p bra A;\n\tbar.sync 1;\nA:\n\tbar.sync 0;", "never come (deadlock)"),
        ("A:\n\tbra A;", "1000 warp instructions were executed, and the kernel has not ended"),
        (f"{GUARD}\t@!%p trap;", "thread (40, 0, 0) of block (0, 0, 0) executes a trap"),
    ],
)
def test_what_goes_wrong_is_told_with_line_and_thread(body: str, words: str) -> None:
    with pytest.raises(LaunchError) as caught:
        launch(body, options=LaunchOptions(most=1000))
    assert words in str(caught.value)


@pytest.mark.slow
def test_lanes_that_part_meet_again() -> None:
    body = f"{GUARD}\tmov.u32 %r1, 7;\n\t@%p bra A;\n\tmov.u32 %r1, 1;\n"
    body += "A:\n\tactivemask.b32 %r2;\n\tadd.u32 %r1, %r1, %r2;\n"
    assert (launch(body + STORE) == (np.where(np.arange(64) < 40, 7, 1) + 0xFFFFFFFF) % 2**32).all()
    assert (launch(f"{GUARD}\t@%p ret;\n\tmov.u32 %r1, 5;\n{STORE}")[:40] == np.arange(40)).all(), (
        "lanes that end store nothing"
    )


@pytest.mark.slow
def test_a_thread_is_shown_before_a_line() -> None:
    device = PtxDevice()
    module = Module(text("A:\n\tadd.u32 %r1, %r1, 3;\n\tsetp.lt.u32 %p, %r1, 9;\n\t@%p bra A;"), device)
    data = device.allocate(256)
    for visit in range(3):
        options = LaunchOptions(watch=Watch(13, (0,), (5,), visit))
        registers = module.launch("k", (1,), (64,), [data], options).registers
        assert (registers["%r0"], registers["%r1"], registers["%d0"]) == (5, 3 * visit, data.address)
    with pytest.raises(LaunchError, match="does not come there so often"):
        module.launch("k", (1,), (64,), [data], replace(options, watch=Watch(13, (0,), (5,), 3)))
    with pytest.raises(ConfigError, match="holds no instruction"):
        module.launch("k", (1,), (64,), [data], replace(options, watch=Watch(1)))


@pytest.mark.slow
def test_a_trace_holds_what_the_sampled_warps_did() -> None:
    device, n = PtxDevice(), 20
    module = Module(BASICS, device)
    x, y = (device.allocate(np.ones((n, n), np.float32)) for _ in range(2))
    done = module.launch("transpose", (2, 2), (16, 16), [x, y, n], LaunchOptions(sample=(0, 1, 2, 3)))
    trace = done.trace
    assert trace is not None and (trace.num_blocks, trace.threads_per_block, len(trace.starts)) == (4, 256, 33)
    assert trace.blocks.tolist() == sorted(trace.blocks.tolist()) and trace.shared_bytes_per_block == 4 * 16 * 17
    assert (np.bincount(trace.pcs, minlength=len(done.issued)) == done.issued).all()
    lanes = np.bincount(trace.pcs, [int(entry).bit_count() for entry in trace.active], len(done.issued))
    assert (lanes == done.lanes).all() and (trace.code.units[trace.pcs[trace.starts[1:] - 1]] == Unit.EXIT).all()
    loads = (trace.code.units[trace.pcs] == Unit.GLOBAL_LOAD) & (trace.active != 0)
    touched = trace.addresses[trace.access[loads]]
    assert sorted(touched[touched > 0].tolist()) == [x.address + 4 * i for i in range(n * n)]
    assert (trace.bytes_per_lane[trace.access[loads]] == 4).all()
    last = module.launch("transpose", (2, 2), (16, 16), [x, y, n], LaunchOptions(sample=(3, 9))).trace
    assert last is not None and set(last.blocks.tolist()) == {3}
    assert (last.pcs == trace.pcs[trace.starts[24] :]).all()


@pytest.mark.slow
def test_a_trace_grows_with_what_is_recorded() -> None:
    device, count = PtxDevice(), 6400
    x, steps = device.allocate(np.arange(1, count + 1, dtype=np.uint32)), device.allocate(4 * count)
    done = Module(BASICS, device).launch(
        "collatz", (100,), (64,), [x, steps, count], LaunchOptions(sample=tuple(range(100)))
    )
    assert done.trace is not None and len(done.trace.pcs) == done.issued.sum() > 1 << 15
    assert (np.diff(done.trace.starts) > 0).all() and (
        np.bincount(done.trace.pcs, minlength=len(done.issued)) == done.issued
    ).all()
    assert done.trace.access.max() == len(done.trace.addresses) - 1


@pytest.mark.more
@pytest.mark.parametrize("algorithm", ["direct", "implicit_gemm", "fft", "winograd"])
def test_lenet_has_the_logits_and_the_step_of_pytorch(algorithm: str, torch: Any) -> None:
    from dse_ptx import digits
    from dse_ptx.lenet import LeNet

    weights, images = digits.initial(), np.random.default_rng(0).random((2, 1, 28, 28), np.float32)
    network, labels = LeNet(digits.arrays(weights), algorithm), np.array([3, 8], np.int32)
    expected = digits.logits(weights, torch.from_numpy(images))
    assert abs(network.logits(images) - expected.detach().numpy()).max() <= 1e-5
    assert abs(network.probabilities(images) - torch.softmax(expected, 1).detach().numpy()).max() <= 1e-5
    if algorithm == "direct":
        loss = digits.step(weights, torch.from_numpy(images), torch.from_numpy(labels.astype(np.int64)), 0.1)
        assert network.train(images, labels, 0.1) == pytest.approx(loss, rel=1e-6)
        for name, weight in digits.arrays(weights).items():
            assert abs(network.weight(name) - weight).max() <= 1e-6, name


@pytest.mark.slow
@pytest.mark.parametrize("source", ["basics", "lenet", "sgemm"])
def test_texts_are_what_clang_makes_of_their_sources(source: str) -> None:
    committed = kernel_text(source)
    if shutil.which("clang") is None:
        pytest.skip("clang is not installed: apt-get install clang")
    if build.clang_version() not in committed.splitlines()[0]:
        pytest.skip("another clang is installed than the first line names")
    assert build.from_cuda(FOLDER / f"{source}.cu") == committed


@pytest.mark.more
@pytest.mark.filterwarnings("ignore")
def test_texts_are_what_triton_makes_of_their_sources() -> None:
    triton = pytest.importorskip("triton", reason="triton is not installed: pip install triton")
    for name, compiled in build.from_triton():
        committed = kernel_text(name)
        if triton.__version__ not in committed.splitlines()[0]:
            pytest.skip("another Triton is installed than the first line names")
        assert compiled == committed, name


@pytest.mark.slow
def test_commands_run_a_kernel_and_show_a_thread(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, out = tmp_path / "in.npz", tmp_path / "out.npz"
    np.savez(data, x=np.arange(100, dtype=np.float32), y=np.ones(100, np.float32))
    file = tmp_path / "basics.ptx"
    file.write_text(BASICS)
    words = [f"file={file}", "kernel=saxpy", "grid=2", "block=64", f"data={data}"]
    assert main(["ptx", "run", *words, "arguments=2.0,x,y,100", f"out={out}"]) == 0
    assert "fma.rn.f32" in capsys.readouterr().out
    assert (np.load(out)["y"] == 2 * np.arange(100) + 1).all()
    assert main(["ptx", "run", *words, "arguments=2,x,y,100", f"out={out}"]) == 0
    assert (np.load(out)["y"] == 2 * np.arange(100) + 1).all(), "a whole number is one in the parameter's type"
    line = next(i for i, entry in enumerate(BASICS.splitlines(), 1) if "fma.rn.f32" in entry)
    assert main(["ptx", "show", *words, "arguments=2.0,x,y,100", f"line={line}", "thread=5", "of=1"]) == 0
    assert "69" in capsys.readouterr().out, "x of the thread 64 + 5"
    assert main(["ptx", "run", *words, "arguments=2.0,x,y,120"]) == 3
    assert "thread (36, 0, 0) of block (1, 0, 0)" in capsys.readouterr().err
    for typed, rule in (
        (["arguments=2.0,x,z,1"], "neither a number nor an array"),
        (["arguments=2.0,x"], "holds 2 values where the kernel has 4 parameters"),
        (["arguments=2.0,x,y,1", "block=2000"], "more than 1024 threads"),
        (["arguments=2.0,x,y,1", "kernel=nosuch"], "must be one of"),
        (["arguments=2.0,x,y,1", "grid=0"], "must hold positive numbers"),
        (["arguments=2.0,x,y,1", "grid=1,70000"], "at most"),
        (["arguments=2.0,x,y,1.5"], "no whole number"),
        (["arguments=2.0,x,y,5000000000"], "no number of 32 bits"),
        (["arguments=2.0,x,y,1", "shared=300000"], "of any GPU"),
        (["file=nosuch.ptx"], "is no file"),
        ([f"data={__file__}"], "cannot be read as .npz"),
        ([], "holds 0 values"),
    ):
        names = {word.partition("=")[0] for word in typed}  # in place of those above
        base = [word for word in words if word.partition("=")[0] not in names]
        assert main(["ptx", "run", *base, *typed]) == 2
        assert rule in capsys.readouterr().err
