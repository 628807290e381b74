"""Kernels on vectors and rows that are loaded in bulk, and sums over the blocks of a cluster."""

from __future__ import annotations

from dse_ptx.tiles.text import Text

THREADS, WARPS = 128, 4
_LOAD = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
_LOG2E = "0f3FB8AA3B"


def _over_warp(text: Text, opcode: str, value: str) -> None:
    """Combine a number of all lanes of a warp: each has the result."""
    for distance in (16, 8, 4, 2, 1):
        other = text.get("f32", "shfl.sync.bfly.b32", value, distance, 31, "0xffffffff")
        text.op(opcode, value, value, other)


def _over_block(text: Text, opcode: str, value: str, at: int) -> str:
    """Combine a number of all threads of a block, through shared memory from `at` on."""
    _over_warp(text, opcode, value)
    thread = text.special("tid.x")
    warp = text.get("b32", "shr.u32", thread, 5)
    place = text.get("b32", "mad.lo.u32", warp, 4, at)
    text.op("st.shared.f32", f"[{place}]", value)
    text.op("bar.sync", 0)
    total = text.get("f32", "ld.shared.f32", f"[smem+{at}]")
    for other in range(1, WARPS):
        text.op(opcode, total, total, text.get("f32", "ld.shared.f32", f"[smem+{at + 4 * other}]"))
    return total


def _load(text: Text, target: str, source: str, size: int, barrier: int) -> None:
    """Load a piece by one thread; all wait for it."""
    after = text.mark()
    text.op("bra", after, guard=text.equals(text.special("tid.x"), 0, "ne.u32"))
    text.op("mbarrier.arrive.expect_tx.shared::cta.b64", "_", f"[smem+{barrier}]", size)
    text.op(_LOAD, target, f"[{source}]", size, f"[smem+{barrier}]")
    text.place(after)


def softmax_text(columns: int) -> str:
    """Softmax of a row of fp32 for each block; a row is a multiple of 128 numbers."""
    text, size = Text("softmax", {"source": "u64", "target": "u64"}), 4 * columns
    text.begin_barriers({size + 64: 1})
    line = text.get("b64", "mul.wide.u32", text.special("ctaid.x"), size)
    source, target = (text.get("b64", "add.u64", text.parameter(name), line) for name in ("source", "target"))
    _load(text, "[smem]", source, size, size + 64)
    text.wait(f"[smem+{size + 64}]", 0)
    thread, end = text.special("tid.x"), text.mark()
    place, count = text.get("b32", "shl.b32", thread, 2), columns // THREADS
    values = [text.get("f32", "ld.shared.f32", f"[{place}+{4 * THREADS * turn}]") for turn in range(count)]
    most = text.get("f32", "mov.f32", values[0])
    for value in values[1:]:
        text.op("max.f32", most, most, value)
    most = _over_block(text, "max.f32", most, size)
    total = text.get("f32", "mov.f32", "0f00000000")
    for value in values:
        power = text.get("f32", "mul.rn.f32", text.get("f32", "sub.rn.f32", value, most), _LOG2E)
        text.op("ex2.approx.f32", value, power)
        text.op("add.rn.f32", total, total, value)
    total = _over_block(text, "add.rn.f32", total, size + 32)
    for turn, value in enumerate(values):
        text.op("div.rn.f32", value, value, total)
        text.op("st.shared.f32", f"[{place}+{4 * THREADS * turn}]", value)
    text.op("fence.proxy.async.shared::cta")
    text.op("bar.sync", 0)
    text.op("bra", end, guard=text.equals(thread, 0, "ne.u32"))
    text.op("cp.async.bulk.global.shared::cta.bulk_group", f"[{target}]", "[smem]", size)
    text.op("cp.async.bulk.commit_group")
    text.op("cp.async.bulk.wait_group", 0)
    text.place(end)
    return text.render()


def gemv_text(columns: int) -> str:
    """y = A x in fp32: a row of A for each block, loaded together with x; `columns` is a multiple of 128."""
    text, size = Text("gemv", {"a": "u64", "x": "u64", "y": "u64"}), 4 * columns
    barrier = 2 * size + 64
    text.begin_barriers({barrier: 2})
    line = text.get("b64", "mul.wide.u32", text.special("ctaid.x"), size)
    _load(text, "[smem]", text.get("b64", "add.u64", text.parameter("a"), line), size, barrier)
    _load(text, f"[smem+{size}]", text.parameter("x"), size, barrier)
    text.wait(f"[smem+{barrier}]", 0)
    thread, end = text.special("tid.x"), text.mark()
    place, total = text.get("b32", "shl.b32", thread, 2), text.get("f32", "mov.f32", "0f00000000")
    for turn in range(columns // THREADS):
        a, x = (text.get("f32", "ld.shared.f32", f"[{place}+{4 * THREADS * turn + at}]") for at in (0, size))
        text.op("fma.rn.f32", total, a, x, total)
    total = _over_block(text, "add.rn.f32", total, 2 * size)
    text.op("bra", end, guard=text.equals(thread, 0, "ne.u32"))
    y = text.get("b64", "mad.wide.u32", text.special("ctaid.x"), 4, text.parameter("y"))
    text.op("st.global.f32", f"[{y}]", total)
    text.place(end)
    return text.render()


def cluster_sum_text(blocks: int) -> str:
    """Sum of 128 numbers of each block of a cluster: blocks send their sums to the first one, and arrive there."""
    text = Text("cluster_sum", {"source": "u64", "target": "u64"}, (blocks, 1, 1))
    barrier, sums, end = 512, 256, text.mark()
    text.begin_barriers({barrier: blocks})
    thread, rank = text.special("tid.x"), text.special("cluster_ctarank")
    index = text.get("b32", "mad.lo.u32", text.special("ctaid.x"), THREADS, thread)
    source = text.get("b64", "mad.wide.u32", index, 4, text.parameter("source"))
    total = _over_block(text, "add.rn.f32", text.get("f32", "ld.global.f32", f"[{source}]"), 0)
    text.op("bra", end, guard=text.equals(thread, 0, "ne.u32"))
    place = text.get("b32", "mad.lo.u32", rank, 4, sums)
    remote = text.get("b32", "mapa.shared::cluster.u32", place, 0)
    text.op("st.shared::cluster.f32", f"[{remote}]", total)
    there = text.get("b32", "mapa.shared::cluster.u32", text.get("b32", "mov.u32", barrier), 0)
    text.op("mbarrier.arrive.release.cluster.shared::cluster.b64", "_", f"[{there}]")
    text.op("bra", end, guard=text.equals(rank, 0, "ne.u32"))
    text.wait(f"[smem+{barrier}]", 0)
    whole = text.get("f32", "ld.shared.f32", f"[smem+{sums}]")
    for other in range(1, blocks):
        text.op("add.rn.f32", whole, whole, text.get("f32", "ld.shared.f32", f"[smem+{sums + 4 * other}]"))
    target = text.get("b64", "mad.wide.u32", text.special("clusterid.x"), 4, text.parameter("target"))
    text.op("st.global.f32", f"[{target}]", whole)
    text.place(end)
    text.meet()
    return text.render()


def histogram_text(blocks: int, bins: int) -> str:
    """Histogram whose bins are spread over a cluster's blocks: each number adds to the block that has its bin."""
    text = Text("histogram", {"source": "u64", "target": "u64"}, (blocks, 1, 1))
    of_block, thread = bins // blocks, text.special("tid.x")
    text.meet()
    index = text.get("b32", "mad.lo.u32", text.special("ctaid.x"), THREADS, thread)
    source = text.get("b64", "mad.wide.u32", index, 4, text.parameter("source"))
    value = text.get("b32", "ld.global.u32", f"[{source}]")
    owner, within = (text.get("b32", f"{word}.u32", value, of_block) for word in ("div", "rem"))
    remote = text.get("b32", "mapa.shared::cluster.u32", text.get("b32", "shl.b32", within, 2), owner)
    text.op("red.shared::cluster.add.u32", f"[{remote}]", 1)
    text.meet()
    end = text.mark()
    text.op("bra", end, guard=text.equals(thread, of_block, "ge.u32"))
    count = text.get("b32", "ld.shared.u32", f"[{text.get('b32', 'shl.b32', thread, 2)}]")
    place = text.get("b32", "mad.lo.u32", text.special("cluster_ctarank"), of_block, thread)
    target = text.get("b64", "mad.wide.u32", place, 4, text.parameter("target"))
    text.op("red.global.add.u32", f"[{target}]", count)
    text.place(end)
    return text.render()


def relay_text(slots: int = 3) -> str:
    """Numbers that one warp doubles and puts into slots of a ring, and another takes out, in turns of 32.

    Slots are handed over by mbarriers alone.
    """
    text = Text("relay", {"source": "u64", "target": "u64", "turns": "u32"})
    full, free = slots * 128, slots * 136
    text.begin_barriers({at + 8 * slot: 32 for at in (full, free) for slot in range(slots)})
    thread, turns = text.special("tid.x"), text.parameter("turns")
    lane, take, end = text.get("b32", "and.b32", thread, 31), text.mark(), text.mark()
    turn, slot, parity = (text.get("b32", "mov.u32", 0) for _ in range(3))
    place = text.get("b64", "mul.wide.u32", lane, 4)
    source, target = (text.get("b64", "add.u64", text.parameter(name), place) for name in ("source", "target"))
    text.op("bra", take, guard=text.equals(thread, 32, "ge.u32"))
    for label, is_source in ((text.mark(), True), (take, False)):
        again = text.mark()
        text.place(label)
        text.place(again)
        mine = text.get("b32", "mad.lo.u32", lane, 4, text.get("b32", "mul.lo.u32", slot, 128))
        before, after = (
            text.get("b32", "mad.lo.u32", slot, 8, at) for at in ((free, full) if is_source else (full, free))
        )
        text.wait(f"[{before}]", text.get("b32", "xor.b32", parity, 1) if is_source else parity)
        if is_source:
            value = text.get("b32", "ld.global.u32", f"[{source}]")
            text.op("st.shared.u32", f"[{mine}]", text.get("b32", "shl.b32", value, 1))
        else:
            text.op("st.global.u32", f"[{target}]", text.get("b32", "ld.shared.u32", f"[{mine}]"))
        text.get("b64", "mbarrier.arrive.shared::cta.b64", f"[{after}]")
        pointer = source if is_source else target
        text.op("add.u64", pointer, pointer, 128)
        text.op("add.u32", slot, slot, 1)
        wraps = text.equals(slot, slots)
        text.op("selp.b32", slot, 0, slot, wraps)
        text.op("xor.b32", parity, parity, 1, guard=wraps)
        text.op("add.u32", turn, turn, 1)
        text.op("bra", again, guard=text.equals(turn, turns, "lt.u32"))
        text.op("bra", end)
    text.place(end)
    return text.render()
