"""Kernels that move memory in bulk: pieces, boxes, and copies to the blocks of a cluster."""

from __future__ import annotations

from dse_ptx.tiles.text import Text

PIECE, TILE, LINE = 4096, 32, 128
"""Bytes of a piece, rows and columns of a box of 32-bit numbers, and bytes of its rows."""
_LOAD = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"


def copy_text(stages: int = 2) -> str:
    """Copy of `bytes` bytes, a multiple of 16, in pieces: a thread of each block lets them pass through its stages."""
    text = Text("copy", {"source": "u64", "target": "u64", "bytes": "u32"})
    full, end = stages * PIECE, text.mark()
    text.begin_barriers({full + 8 * stage: 1 for stage in range(stages)})
    text.op("bra", end, guard=text.equals(text.special("tid.x"), 0, "ne.u32"))
    source, target, size = (text.parameter(name) for name in ("source", "target", "bytes"))
    at = text.get("b32", "mul.lo.u32", text.special("ctaid.x"), PIECE)
    step = text.get("b32", "mul.lo.u32", text.special("nctaid.x"), PIECE)
    stage, parity, again = text.get("b32", "mov.u32", 0), text.get("b32", "mov.u32", 0), text.mark()
    text.op("bra", end, guard=text.equals(at, size, "ge.u32"))
    text.place(again)
    length = text.get("b32", "min.u32", text.get("b32", "sub.u32", size, at), PIECE)
    barrier = text.get("b32", "mad.lo.u32", stage, 8, full)
    place = text.get("b32", "mul.lo.u32", stage, PIECE)
    wide = text.get("b64", "cvt.u64.u32", at)
    # a stage is free once the copy out of it, a round ago, has been read: one group fewer than stages may be open
    text.op("cp.async.bulk.wait_group.read", stages - 1)
    text.op("mbarrier.arrive.expect_tx.shared::cta.b64", "_", f"[{barrier}]", length)
    text.op(_LOAD, f"[{place}]", f"[{text.get('b64', 'add.u64', source, wide)}]", length, f"[{barrier}]")
    text.wait(f"[{barrier}]", parity)
    out = text.get("b64", "add.u64", target, wide)
    text.op("cp.async.bulk.global.shared::cta.bulk_group", f"[{out}]", f"[{place}]", length)
    text.op("cp.async.bulk.commit_group")
    text.op("add.u32", stage, stage, 1)
    wraps = text.equals(stage, stages)
    text.op("selp.b32", stage, 0, stage, wraps)
    text.op("xor.b32", parity, parity, 1, guard=wraps)
    text.op("add.u32", at, at, step)
    text.op("bra", again, guard=text.equals(at, size, "lt.u32"))
    text.op("cp.async.bulk.wait_group", 0)
    text.place(end)
    return text.render()


def transpose_text() -> str:
    """Transpose of a matrix of 32-bit numbers by boxes of 32 x 32, which are swizzled; what a box has beyond is 0.

    A thread of 256 moves four numbers: of a column of the box that came to a row of the one that leaves.
    """
    text = Text("transpose", {"source": "map", "target": "map"})
    size, full, end = TILE * LINE, 2 * TILE * LINE, text.mark()
    text.begin_barriers({full: 1})
    thread, after = text.special("tid.x"), text.mark()
    x, y = (text.get("b32", "mul.lo.u32", text.special(f"ctaid.{axis}"), TILE) for axis in "xy")
    text.op("bra", after, guard=text.equals(thread, 0, "ne.u32"))
    text.op("mbarrier.arrive.expect_tx.shared::cta.b64", "_", f"[{text.get('b32', 'mov.u32', full)}]", size)
    text.load_box("[smem]", f"[{text.parameter('source')}, {{{x}, {y}}}]", f"[smem+{full}]")
    text.place(after)
    text.wait(f"[smem+{full}]", 0)
    column, first = text.get("b32", "and.b32", thread, 31), text.get("b32", "shr.u32", thread, 5)
    for turn in range(TILE // 8):
        row = text.get("b32", "add.u32", first, 8 * turn)
        value = text.get("b32", "ld.shared.b32", f"[{_swizzled(text, row, column)}]")
        text.op("st.shared.b32", f"[{_swizzled(text, column, row)}+{size}]", value)
    text.op("fence.proxy.async.shared::cta")
    text.op("bar.sync", 0)
    text.op("bra", end, guard=text.equals(thread, 0, "ne.u32"))
    words = "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group"
    text.op(words, f"[{text.parameter('target')}, {{{y}, {x}}}]", f"[smem+{size}]")
    text.op("cp.async.bulk.commit_group")
    text.op("cp.async.bulk.wait_group", 0)
    text.place(end)
    return text.render()


def _swizzled(text: Text, row: str, column: str) -> str:
    """Address of a 32-bit number in a box whose rows of 128 bytes are swizzled."""
    unit = text.get("b32", "xor.b32", text.get("b32", "shr.u32", column, 2), text.get("b32", "and.b32", row, 7))
    within = text.get("b32", "shl.b32", text.get("b32", "and.b32", column, 3), 2)
    place = text.get("b32", "mad.lo.u32", unit, 16, within)
    return text.get("b32", "mad.lo.u32", row, LINE, place)


def broadcast_text(blocks: int) -> str:
    """Copy of a piece to all blocks of a cluster by one of them; each writes it to its own line of the target."""
    text = Text("broadcast", {"source": "u64", "target": "u64"}, (blocks, 1, 1))
    text.begin_barriers({PIECE: 1})
    end = text.mark()
    thread, rank, after = text.special("tid.x"), text.special("cluster_ctarank"), text.mark()
    text.op("bra", end, guard=text.equals(thread, 0, "ne.u32"))
    text.op("mbarrier.arrive.expect_tx.shared::cta.b64", "_", f"[smem+{PIECE}]", PIECE)
    text.op("bra", after, guard=text.equals(rank, 0, "ne.u32"))
    mask = text.get("b16", "mov.u16", (1 << blocks) - 1)
    cluster = text.get("b32", "mul.lo.u32", text.special("clusterid.x"), PIECE)
    wide = text.get("b64", "cvt.u64.u32", cluster)
    source = text.get("b64", "add.u64", text.parameter("source"), wide)
    text.op(f"{_LOAD}.multicast::cluster", "[smem]", f"[{source}]", PIECE, f"[smem+{PIECE}]", mask)
    text.place(after)
    text.wait(f"[smem+{PIECE}]", 0)
    line = text.get("b64", "mul.wide.u32", text.special("ctaid.x"), PIECE)
    target = text.get("b64", "add.u64", text.parameter("target"), line)
    text.op("cp.async.bulk.global.shared::cta.bulk_group", f"[{target}]", "[smem]", PIECE)
    text.op("cp.async.bulk.commit_group")
    text.op("cp.async.bulk.wait_group", 0)
    text.place(end)
    text.meet()
    return text.render()


def ring_text(blocks: int) -> str:
    """Copy of each block's piece to the next block of its cluster, from shared memory to shared memory."""
    text = Text("ring", {"source": "u64", "target": "u64"}, (blocks, 1, 1))
    loaded, came, end = 2 * PIECE, 2 * PIECE + 8, text.mark()
    text.begin_barriers({loaded: 1, came: 1})
    text.op("bra", end, guard=text.equals(text.special("tid.x"), 0, "ne.u32"))
    line = text.get("b64", "mul.wide.u32", text.special("ctaid.x"), PIECE)
    source, target = (text.get("b64", "add.u64", text.parameter(name), line) for name in ("source", "target"))
    for at in (loaded, came):
        text.op("mbarrier.arrive.expect_tx.shared::cta.b64", "_", f"[smem+{at}]", PIECE)
    text.op(_LOAD, "[smem]", f"[{source}]", PIECE, f"[smem+{loaded}]")
    text.wait(f"[smem+{loaded}]", 0)
    following = text.get("b32", "add.u32", text.special("cluster_ctarank"), 1)
    following = text.get("b32", "rem.u32", following, text.special("cluster_nctarank"))
    place, barrier = (
        text.get("b32", "mapa.shared::cluster.u32", text.get("b32", "mov.u32", at), following) for at in (PIECE, came)
    )
    words = "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes"
    text.op(words, f"[{place}]", "[smem]", PIECE, f"[{barrier}]")
    text.wait(f"[smem+{came}]", 0)
    text.op("cp.async.bulk.global.shared::cta.bulk_group", f"[{target}]", f"[smem+{PIECE}]", PIECE)
    text.op("cp.async.bulk.commit_group")
    text.op("cp.async.bulk.wait_group", 0)
    text.place(end)
    text.meet()
    return text.render()
