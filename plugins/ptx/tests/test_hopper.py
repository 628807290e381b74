"""Instructions of Hopper against NumPy, and what is refused: with the rule in a sentence, never an endless loop."""

from __future__ import annotations

import itertools
import math
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dse.errors import ConfigError
from dse_ptx.arguments import Pointer
from dse_ptx.checking import hopper_cases
from dse_ptx.checking.hopper_cases import CASES, PRODUCTS
from dse_ptx.execution import LaunchError, LaunchOptions, LaunchRun, Module, PtxDevice
from dse_ptx.tensor_map import TensorMap, matrix_map
from dse_ptx.tiles import copies, launches, vectors
from dse_ptx.tiles.launches import error_in_steps, expected, multiply
from dse_ptx.tiles.products import product_text
from dse_ptx.tiles.shape import ProductKernel
from dse_ptx.tiles.text import Text

pytestmark = pytest.mark.more


@pytest.mark.parametrize("name", CASES)
def test_kernels_compute_what_numpy_does(name: str) -> None:
    assert CASES[name]() <= 1e-2


@pytest.mark.parametrize("name", CASES)
def test_kernels_compute_the_same_where_copies_come_late(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (hopper_cases, launches):
        monkeypatch.setattr(module, "LaunchOptions", partial(LaunchOptions, late=True))
    assert CASES[name]() <= 1e-2


def test_a_wait_that_is_missing_shows_where_copies_come_late() -> None:
    text, values = vectors.softmax_text(128), np.random.default_rng(5).normal(size=(2, 128)).astype(np.float32)
    hasty = re.sub(r".*mbarrier\.try_wait.*\n.*bra.*\n", "", text)
    assert text.count("\n") - hasty.count("\n") == 2
    shares = dict[tuple[bool, bool], Any]()
    for waits, late in itertools.product((True, False), repeat=2):
        device = PtxDevice()
        source, target = device.allocate(values), device.allocate(values.nbytes)
        module = Module(text if waits else hasty, device)
        module.launch("softmax", (2,), (128,), [source, target], LaunchOptions(4096, late=late))
        shares[waits, late] = device.read(target, np.float32, values.shape)
    assert np.array_equal(shares[True, True], shares[True, False])
    assert np.array_equal(shares[False, False], shares[True, False])  # at once: nothing is seen
    assert not np.allclose(shares[False, True], shares[True, False])


_TEXTS = {
    **{name: product_text(of) for name, of in PRODUCTS.items()},
    "copy": copies.copy_text(),
    "transpose": copies.transpose_text(),
    "broadcast": copies.broadcast_text(4),
    "ring": copies.ring_text(8),
    "softmax": vectors.softmax_text(512),
    "gemv": vectors.gemv_text(384),
    "cluster sum": vectors.cluster_sum_text(8),
    "histogram": vectors.histogram_text(4, 256),
    "relay": vectors.relay_text(),
}


@pytest.mark.parametrize("name", _TEXTS)
def test_nvidias_assembler_takes_all_texts(name: str, tmp_path: Path) -> None:
    """Without a warning: products are not serialised, and registers come and go."""
    if (program := shutil.which("ptxas")) is None:
        pytest.skip("NVIDIA's ptxas is not on the path")
    (tmp_path / "k.ptx").write_text(_TEXTS[name], "utf-8")
    command = [program, "-arch=sm_90a", str(tmp_path / "k.ptx"), "-o", str(tmp_path / "k.cubin")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_an_error_of_one_step_would_be_seen() -> None:
    exact = np.array([1.0, 3.0])
    assert error_in_steps(exact + 2.0**-9, exact, "f32") == pytest.approx(1.0, abs=0.01)
    assert error_in_steps(np.array([1.0, math.nan]), exact, "f16") == math.inf


@pytest.mark.parametrize("columns", [8, 24, 96, 200, 256])
@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_products_of_all_widths_are_exact_for_small_integers(columns: int, kind: str) -> None:
    of, rng = ProductKernel(kind, 1, columns, 2, result="f32"), np.random.default_rng(columns)
    left, right = rng.integers(-4, 5, (64, 128)).astype(float), rng.integers(-4, 5, (128, 2 * columns)).astype(float)
    result, run = multiply(of, left, right)
    assert np.array_equal(result, left @ right)
    # two operations of each multiply-add, in whichever lanes
    products = [place for place, opcode in enumerate(run.kernel.code.opcodes) if "mma_async" in opcode]
    flop = sum(run.lanes[place] * run.kernel.code.operations[place] for place in products)
    assert flop == 2 * 64 * 2 * columns * 128


def test_a_kernel_that_swaps_two_units_is_found() -> None:
    """The swizzle counts: the same boxes without it give another product."""
    of, rng = ProductKernel(consumers=1, columns=64), np.random.default_rng(1)
    text = product_text(of)
    left, right = rng.normal(size=(64, 64)), rng.normal(size=(64, 64))
    result, _ = multiply(of, left, right)
    assert error_in_steps(result, expected(of, left, right), "f16") < 1e-2
    assert f"0x{1 << 62 | 1024 // 16 << 32 | 1 << 16:x}" in text  # 128 bytes, 1024 from 8 rows to 8 rows


def _run(
    write: Callable[[Text], None], *, shared: int = 4096, grid: int = 1, block: int = 32, cluster: Sequence[int] = ()
) -> LaunchRun:
    """Run a kernel that `write` writes."""
    text = Text("k", {}, cluster)
    write(text)
    options = LaunchOptions(shared, most=100_000)
    return Module(text.render(), PtxDevice()).launch("k", (grid,), (block,), [], options)


def _waits(text: Text) -> None:
    text.begin_barriers({0: 2})
    text.op("mbarrier.arrive.expect_tx.shared::cta.b64", "_", "[smem]", 64, guard=text.elect())
    text.wait("[smem]", 0)


def _tests(text: Text) -> None:
    text.begin_barriers({0: 1})
    again, done = text.mark(), text.new("pred")
    text.place(again)
    text.op("mbarrier.test_wait.parity.shared::cta.b64", done, "[smem]", 0)
    text.op("bra", again, guard=f"!{done}")


@pytest.mark.parametrize("write", [_waits, _tests])
def test_a_wait_without_its_arrivals_is_a_deadlock(write: Callable[[Text], None]) -> None:
    with pytest.raises(LaunchError, match=r"waits for the mbarrier at 0x0, whose phase never ends: 1 arrivals and "):
        _run(write)


def test_a_barrier_of_a_cluster_to_which_a_warp_never_comes_is_a_deadlock() -> None:
    def waits(text: Text) -> None:
        first = text.equals(text.special("cluster_ctarank"), 0)
        after = text.mark()
        text.op("bra", after, guard=f"!{first}")
        text.meet()
        text.place(after)
        text.op("bar.sync", 1, 64)

    with pytest.raises(LaunchError, match="deadlock"):
        _run(waits, grid=2, cluster=(2, 1, 1))


def test_a_wait_that_is_asked_again_lets_a_program_count() -> None:
    """`try_wait` may answer that a phase goes on: a program that gives up by itself ends."""

    def gives_up(text: Text) -> None:
        text.begin_barriers({0: 1})
        count, again, done = text.get("b32", "mov.u32", 0), text.mark(), text.new("pred")
        text.place(again)
        text.op("mbarrier.try_wait.parity.shared::cta.b64", done, "[smem]", 0)
        text.op("add.u32", count, count, 1)
        text.op("bra", again, guard=text.equals(count, 10, "lt.u32"))

    assert _run(gives_up).thread_instructions > 0


def _op(*words: object, barriers: bool = True) -> Callable[[Text], None]:
    """Write one instruction, by one lane, after an mbarrier at 0 is made."""

    def write(text: Text) -> None:
        if barriers:
            text.begin_barriers({0: 1})
        text.op(*map(str, words), guard=text.elect())

    return write


_SHARED_COPY = "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes"
_REFUSED = {
    "mbarrier.init": (_op("mbarrier.init.shared::cta.b64", "[smem]", 0), r"a count of 0: counts are 1 to 2\^20 - 1"),
    "no object": (_op("mbarrier.arrive.shared::cta.b64", "_", "[smem+8]"), "where no mbarrier.init has made"),
    "too many": (_op("mbarrier.arrive.shared::cta.b64", "_", "[smem]", 2), "lets more arrive at the mbarrier"),
    "misaligned object": (_op("mbarrier.init.shared::cta.b64", "[smem+4]", 1), "not a multiple of the access's size"),
    "outside": (_op("mbarrier.init.shared::cta.b64", "[smem+4096]", 1), "0x1000, which is out of bounds"),
    "size": (_op(_SHARED_COPY, "[smem+32]", "[smem+64]", 24, "[smem]"), "copies 24 bytes, and bulk copies move a mult"),
    "misaligned": (_op(_SHARED_COPY, "[smem+40]", "[smem+64]", 16, "[smem]"), "copies at 0x28: pieces lie at mult"),
    "beyond": (_op(_SHARED_COPY, "[smem+4080]", "[smem+64]", 32, "[smem]"), "which is out of bounds"),
}


@pytest.mark.parametrize("name", _REFUSED)
def test_what_breaks_a_rule_is_refused_with_the_rule(name: str) -> None:
    write, words = _REFUSED[name]
    with pytest.raises(LaunchError, match=words):
        _run(write)


def test_a_block_that_is_not_in_the_cluster_or_has_ended_is_not_reached() -> None:
    def maps(text: Text) -> None:
        text.get("b32", "mapa.shared::cluster.u32", text.get("b32", "mov.u32", 0), 2)

    with pytest.raises(LaunchError, match="names block 2 of its cluster, and the cluster has 2 blocks"):
        _run(maps, grid=2, cluster=(2, 1, 1))

    def reads(text: Text) -> None:
        end, turn, again = text.mark(), text.get("b32", "mov.u32", 0), text.mark()
        remote = text.get("b32", "mapa.shared::cluster.u32", text.get("b32", "mov.u32", 0), 1)
        text.op("bra", end, guard=text.equals(text.special("cluster_ctarank"), 1))
        text.place(again)
        text.get("b32", "ld.shared::cluster.u32", f"[{remote}]")
        text.op("add.u32", turn, turn, 1)
        text.op("bra", again, guard=text.equals(turn, 10_000, "lt.u32"))
        text.place(end)

    with pytest.raises(LaunchError, match="of a block of its cluster that has ended"):
        _run(reads, grid=2, cluster=(2, 1, 1))


def test_each_wait_at_a_clusters_barrier_follows_an_arrival() -> None:
    def waits(text: Text) -> None:
        text.op("barrier.cluster.wait.aligned")

    with pytest.raises(LaunchError, match="arrives twice at the barrier of its cluster, or waits there without an arr"):
        _run(waits, grid=2, cluster=(2, 1, 1))


def test_places_in_clusters_cover_the_grid() -> None:
    text = Text("k", {"out": "u64"}, (2, 3, 1))
    names = ("ctaid.x", "ctaid.y", "clusterid.x", "clusterid.y", "cluster_ctaid.x", "cluster_ctaid.y",
             "cluster_ctarank", "cluster_nctarank", "nclusterid.y", "cluster_nctaid.y")  # fmt: skip
    place = text.get("b32", "mad.lo.u32", text.special("ctaid.y"), 4, text.special("ctaid.x"))
    out = text.get("b64", "mad.wide.u32", place, 4 * len(names), text.parameter("out"))
    for number, name in enumerate(names):
        text.op("st.global.u32", f"[{out}+{4 * number}]", text.special(name))
    device = PtxDevice()
    target = device.allocate(4 * 24 * len(names))
    Module(text.render(), device).launch("k", (4, 6), (1,), [target])
    rows = device.read(target, np.uint32, (24, len(names)))
    for number, row in enumerate(rows.tolist()):
        x, y = number % 4, number // 4
        assert row == [x, y, x // 2, y // 3, x % 2, y % 3, x % 2 + 2 * (y % 3), 6, 2, 3]


def test_clusters_fill_the_grid_and_have_at_most_sixteen_blocks() -> None:
    with pytest.raises(ConfigError, match="is no multiple of the blocks of a cluster"):
        _run(lambda text: None, grid=3, cluster=(2, 1, 1))
    with pytest.raises(ConfigError, match="holds more than 16 blocks"):
        _run(lambda text: None, grid=32, cluster=(32, 1, 1))


_PRODUCT = "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16"


def _product(*before: str, descriptor: int = 0, after: Sequence[str] = ()) -> Callable[[Text], None]:
    """Write a product of a warpgroup after words like `fence`."""

    def write(text: Text) -> None:
        sums, pair = text.many("f32", 4), text.many("b64", 2)
        for register in sums:
            text.op("mov.f32", register, "0f00000000")
        text.op("mov.b64", pair[0], f"0x{descriptor:x}")
        text.op("mov.b64", pair[1], 0)
        for word in before:
            text.op(f"wgmma.{word}.sync.aligned")
        text.op(_PRODUCT, f"{{{', '.join(sums)}}}", *pair, text.equals(0, 0), 1, 1, 0, 0)
        text.op("wgmma.commit_group.sync.aligned")
        for opcode in after:
            text.op(opcode, *([0] if "wait_group" in opcode else [sums[0], sums[0], sums[1]]))

    return write


def test_a_product_needs_a_fence_after_others_wrote_its_registers() -> None:
    with pytest.raises(ConfigError, match=r"mma_async.*follows no wgmma\.fence"):
        _run(_product(), block=128)
    assert _run(_product("fence"), block=128).thread_instructions > 0


def test_sums_are_read_after_a_wait() -> None:
    add, wait = "add.rn.f32", "wgmma.wait_group.sync.aligned"
    with pytest.raises(ConfigError, match=r"add\.rn.*wgmma\.wait_group comes first"):
        _run(_product("fence", after=(add,)), block=128)
    assert _run(_product("fence", after=(wait, add)), block=128).thread_instructions > 0


def test_a_descriptor_outside_shared_memory_is_refused() -> None:
    with pytest.raises(LaunchError, match="a descriptor that leads to 0x1000, which is not in the block's shared mem"):
        _run(_product("fence", descriptor=4096 >> 4), block=128)
    with pytest.raises(LaunchError, match="a descriptor with a base offset"):
        _run(_product("fence", descriptor=1 << 49), block=128)
    with pytest.raises(LaunchError, match="no multiple of the four of a warpgroup"):
        _run(_product("fence"), block=64)


@pytest.mark.parametrize("shape", ["m64n260k16.f32.f16.f16", "m64n8k8.f32.tf32.tf32", "m64n8k16.f16.f16.f16"])
def test_shapes_that_are_not_executed_are_refused(shape: str) -> None:
    def write(text: Text) -> None:
        pair = text.many("b64", 2)
        sums = ", ".join(text.many("f32", 4))
        text.op(f"wgmma.mma_async.sync.aligned.{shape}", f"{{{sums}}}", *pair, text.equals(0, 0), 1, 1, 0, 0)

    with pytest.raises(ConfigError, match=r"line \d+.*shapes are m64nNk16"):
        _run(write, block=128)


_MAPS: dict[str, tuple[dict[str, Any], str]] = {
    "box": ({"box": (16, 257)}, "a box of 1 to 256 elements along a dimension"),
    "empty box": ({"box": (16, 0)}, "a box of 1 to 256"),
    "address": ({"pointer": Pointer((1 << 32) + 8)}, "begins at a multiple of 16 bytes"),
    "strides": ({"strides": (100,)}, "strides of a multiple of 16 bytes"),
    "rows": ({"box": (3, 8)}, "rows are multiples of 16 bytes"),
    "swizzle": ({"box": (128, 8), "swizzle": 128}, "at most the 128 bytes of its swizzle"),
    "other swizzle": ({"swizzle": 48}, "has a swizzle of"),
    "dimensions": ({"sizes": (64,) * 6, "box": (8,) * 6}, "one to 5 dimensions"),
    "sizes": ({"sizes": (64, 0)}, "1 to 2.32 elements"),
    "element": ({"element_bytes": 3}, "has elements of"),
}


@pytest.mark.parametrize("name", _MAPS)
def test_maps_keep_the_rules_of_tensors(name: str) -> None:
    changes, words = _MAPS[name]
    facts: dict[str, Any] = {"pointer": Pointer(1 << 32), "element_bytes": 2, "sizes": (64, 64), "box": (16, 16)}
    with pytest.raises(ConfigError, match=words):
        TensorMap(**{**facts, **changes})


def test_boxes_lie_at_128_bytes_and_maps_are_maps() -> None:
    device, values = PtxDevice(), np.zeros((64, 64), np.uint32)
    pointer = device.allocate(values)
    encoded = matrix_map(pointer, values, (32, 32), 128).encode()
    module = Module(copies.transpose_text().replace("[smem], [", "[smem+64], ["), device)
    with pytest.raises(LaunchError, match="copies at 0x40: pieces lie at multiples of 16 bytes, boxes of 128"):
        module.launch("transpose", (1, 1), (256,), [encoded, encoded], LaunchOptions(1 << 14))
    module = Module(copies.transpose_text(), device)
    with pytest.raises(LaunchError, match="finds no tensor map of that many dimensions"):
        module.launch("transpose", (1, 1), (256,), [np.zeros(128, np.uint8), encoded], LaunchOptions(1 << 14))


_UNITS = {0: 1, 128: 8, 64: 4, 32: 2}
_MODES = {0: 0, 128: 1, 64: 2, 32: 3}


def _laid(values: Any, swizzle: int, turned: bool) -> tuple[Any, int, int]:
    """A matrix [m or n, k of 16] in a canonical layout, and its leading and other stride (CUTLASS, mma_traits_sm90)."""
    rows, w = values.shape[0], _UNITS[swizzle]
    r, k = np.meshgrid(np.arange(rows), np.arange(16), indexing="ij")
    other, leading = 128 * w, (256 * w if turned else 16 * rows)
    if w == 1 and turned:
        other, leading = 128, 16 * rows
        place = r % 8 * 2 + r // 8 * other + k % 8 * 16 + k // 8 * leading
    elif turned:
        place = r % 8 * 2 + r // 8 % w * 16 + r // (8 * w) * leading + k % 8 * 16 * w + k // 8 * other
    else:
        place = r % 8 * 16 * w + r // 8 * other + k % 8 * 2 + k // 8 * (leading if w == 1 else 16)
    place ^= (place >> 7 & (w - 1)) << 4
    laid = np.zeros(1 << 13, np.float16)
    assert len(np.unique(place)) == values.size
    laid[place // 2] = values
    return laid, leading, other


@pytest.mark.parametrize("turned", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
def test_all_layouts_of_tiles_are_those_of_cutlass(swizzle: int, turned: tuple[bool, bool]) -> None:
    rng, columns, half = np.random.default_rng(swizzle), 128, 1 << 14
    a, b = rng.integers(-4, 5, (64, 16)).astype(np.float16), rng.integers(-4, 5, (columns, 16)).astype(np.float16)
    text = Text("k", {"a": "u64", "b": "u64", "out": "u64"})
    text.begin_barriers({2 * half: 1})
    after, thread = text.mark(), text.special("tid.x")
    text.op("bra", after, guard=text.equals(thread, 0, "ne.u32"))
    text.op("mbarrier.arrive.expect_tx.shared::cta.b64", "_", f"[smem+{2 * half}]", 2 * half)
    descriptors = []
    arrays = [_laid(values, swizzle, is_turned) for values, is_turned in zip((a, b), turned, strict=True)]
    for place, name in enumerate("ab"):
        words = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
        text.op(words, f"[smem+{place * half}]", f"[{text.parameter(name)}]", half, f"[smem+{2 * half}]")
    text.place(after)
    text.wait(f"[smem+{2 * half}]", 0)
    for place, (_, leading, other) in enumerate(arrays):
        bits = place * half >> 4 | leading // 16 << 16 | other // 16 << 32 | _MODES[swizzle] << 62
        descriptors.append(text.get("b64", "mov.b64", f"0x{bits:x}"))
    sums = text.many("f32", columns // 2)
    text.op("wgmma.fence.sync.aligned")
    group, opcode = f"{{{', '.join(sums)}}}", f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.f16.f16"
    text.op(opcode, group, *descriptors, text.equals(0, 1), -1, 1, *map(int, turned))
    text.op("wgmma.commit_group.sync.aligned")
    text.op("wgmma.wait_group.sync.aligned", 0)
    out = text.get("b64", "mad.wide.u32", thread, 2 * columns, text.parameter("out"))
    for place, register in enumerate(sums):
        text.op("st.global.f32", f"[{out}+{4 * place}]", register)
    device = PtxDevice()
    pointers = [device.allocate(laid) for laid, *_ in arrays]
    target = device.allocate(128 * 2 * columns)
    Module(text.render(), device).launch("k", (1,), (128,), [*pointers, target], LaunchOptions(1 << 16))
    result = device.read(target, np.float32, (4, 8, 4, columns // 8, 2, 2))
    # warps, rows of 8, lanes of a row; blocks of 8 columns, rows 8 further down, and neighbours
    matrix = result.transpose(0, 4, 1, 3, 2, 5).reshape(64, columns)
    assert np.array_equal(matrix, -(a.astype(float) @ b.astype(float).T))


def _words(write: Callable[[Text], Sequence[str]], *, grid: int = 1, cluster: Sequence[int] = ()) -> Any:
    """Words that each thread stores, of registers of 32 bits that `write` returns [blocks, threads, words]."""
    text = Text("k", {"out": "u64"}, cluster)
    registers = write(text)
    place = text.get("b32", "mad.lo.u32", text.special("ctaid.x"), 32, text.special("tid.x"))
    out = text.get("b64", "mad.wide.u32", place, 4 * len(registers), text.parameter("out"))
    for number, register in enumerate(registers):
        text.op("st.global.u32", f"[{out}+{4 * number}]", register)
    if cluster:
        text.meet()
    device = PtxDevice()
    target = device.allocate(4 * grid * 32 * len(registers))
    Module(text.render(), device).launch("k", (grid,), (32,), [target], LaunchOptions(4096))
    return device.read(target, np.uint32, (grid, 32, len(registers)))


def test_states_of_arrivals_and_threads_that_leave() -> None:
    def write(text: Text) -> list[str]:
        text.begin_barriers({0: 64})
        state = text.get("b64", "mbarrier.arrive.shared::cta.b64", "[smem]")
        pending = text.get("b32", "mbarrier.pending_count.b64", state)
        early, late = text.new("pred"), text.new("pred")
        text.op("mbarrier.test_wait.shared::cta.b64", early, "[smem]", state)
        text.get("b64", "mbarrier.arrive_drop.shared::cta.b64", "[smem]")
        text.op("mbarrier.test_wait.shared::cta.b64", late, "[smem]", state)
        # of the next phase 32 arrivals are left
        text.get("b64", "mbarrier.arrive.shared::cta.b64", "[smem]")
        text.wait("[smem]", 1)
        return [pending, *(text.get("b32", "selp.u32", 1, 0, answer) for answer in (early, late))]

    result = _words(write)[0]
    assert sorted(result[:, 0].tolist()) == list(range(33, 65))  # before each of the 32 arrivals
    assert result[:, 1].max() == 0
    assert result[:, 2].min() == 1


def test_arrivals_after_asynchronous_copies_and_bytes_by_hand() -> None:
    def write(text: Text) -> list[str]:
        text.begin_barriers({0: 32, 8: 1})
        text.op("cp.async.mbarrier.arrive.noinc.shared::cta.b64", "[smem]")
        text.op("cp.async.mbarrier.arrive.shared::cta.b64", "[smem+8]")
        text.wait("[smem]", 0)
        chosen = text.elect()
        text.op("mbarrier.arrive.expect_tx.shared::cta.b64", "_", "[smem+8]", 48, guard=chosen)
        text.op("mbarrier.expect_tx.relaxed.cta.shared::cta.b64", "[smem+8]", 16, guard=chosen)
        text.op("mbarrier.complete_tx.relaxed.cta.shared::cta.b64", "[smem+8]", 64, guard=chosen)
        text.wait("[smem+8]", 0)
        return [text.special("laneid")]

    assert _words(write)[0, :, 0].tolist() == list(range(32))


def test_generic_addresses_reach_shared_memory_of_a_cluster() -> None:
    def write(text: Text) -> list[str]:
        rank, count = text.special("cluster_ctarank"), text.special("cluster_nctarank")
        text.op("st.shared.u32", "[smem+64]", rank)
        text.meet()
        following = text.get("b32", "rem.u32", text.get("b32", "add.u32", rank, 1), count)
        generic = text.get("b64", "cvta.shared.u64", text.get("b64", "mov.u64", 64))
        remote = text.get("b64", "mapa.u64", generic, following)
        value = text.get("b32", "ld.u32", f"[{remote}]")
        return [value, text.get("b32", "getctarank.u64", remote), text.get("b32", "getctarank.u64", generic)]

    result = _words(write, grid=4, cluster=(4, 1, 1))[:, 0]
    assert result.tolist() == [[(rank + 1) % 4, (rank + 1) % 4, rank] for rank in range(4)]


def test_boxes_of_three_dimensions_are_cut_at_the_edges() -> None:
    values = np.arange(3 * 5 * 12, dtype=np.uint32).reshape(3, 5, 12)
    text = Text("k", {"map": "map", "out": "u64"})
    text.begin_barriers({2048: 1})
    size, words = 2 * 4 * 8 * 4, "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
    chosen = text.elect()
    text.op("mbarrier.arrive.expect_tx.shared::cta.b64", "_", "[smem+2048]", size, guard=chosen)
    box = f"[{text.parameter('map')}, {{{text.get('b32', 'mov.u32', -4)}, 2, 2}}]"
    text.op(words, "[smem]", box, "[smem+2048]", guard=chosen)
    text.wait("[smem+2048]", 0)
    text.op("cp.async.bulk.global.shared::cta.bulk_group", f"[{text.parameter('out')}]", "[smem]", size, guard=chosen)
    device = PtxDevice()
    pointer, target = device.allocate(values), device.allocate(size)
    encoded = TensorMap(pointer, 4, (12, 5, 3), (8, 4, 2)).encode()
    Module(text.render(), device).launch("k", (1,), (32,), [encoded, target], LaunchOptions(4096))
    padded = np.zeros((4, 6, 16), np.uint32)
    padded[:3, :5, 4:] = values
    assert np.array_equal(device.read(target, np.uint32, (2, 4, 8)), padded[2:4, 2:6, :8])


def test_an_mbarrier_that_was_given_up_is_none_and_hints_change_nothing() -> None:
    def write(text: Text) -> None:
        text.op("griddepcontrol.wait")
        text.op("griddepcontrol.launch_dependents")
        text.op("setmaxnreg.dec.sync.aligned.u32", 40)
        text.op("fence.proxy.async")
        text.begin_barriers({0: 1})
        text.op("mbarrier.inval.shared::cta.b64", "[smem]", guard=text.elect())

    assert _run(write).thread_instructions > 0

    def arrives(text: Text) -> None:
        write(text)
        text.op("mbarrier.arrive.shared::cta.b64", "_", "[smem]")

    with pytest.raises(LaunchError, match=r"where no mbarrier\.init has made an mbarrier"):
        _run(arrives)
    with pytest.raises(ConfigError, match="a multiple of 8 from 24 to 256"):
        _run(lambda text: text.op("setmaxnreg.dec.sync.aligned.u32", 41))
