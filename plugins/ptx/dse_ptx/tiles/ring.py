"""What producers and consumers of a product's kernel share: the ring of stages, and the tiles of a block."""

from __future__ import annotations

from collections.abc import Callable

from dse_ptx.tiles.shape import ProductKernel
from dse_ptx.tiles.text import Text


class Ring:
    """Registers of a thread's place in the ring of stages and of its block's tile, and what moves them on."""

    def __init__(self, kernel: ProductKernel, text: Text) -> None:
        self.of, self.text = kernel, text
        self.thread, self.steps = text.special("tid.x"), text.parameter("steps")
        self.group = text.get("b32", "shr.u32", self.thread, 7)
        in_cluster = bool(kernel.blocks_of_cluster)
        self.ranks = [text.special(f"cluster_ctaid.{axis}") for axis in "xy"] if in_cluster else ["0", "0"]
        # the part of k of this block begins after those before it
        self.first = text.get("b32", "mul.lo.u32", text.special("ctaid.z"), self.steps) if kernel.parts > 1 else "0"
        self.number, self.m, self.n = self._tiles()
        self.stage, self.parity = text.new("b32"), text.new("b32")

    def full(self) -> str:
        """Register with the address of the mbarrier of the stage that is full."""
        address = self.text.get("b32", "shl.b32", self.stage, 3)
        return self.text.get("b32", "add.u32", address, self.of.barriers_at)

    def base(self) -> str:
        """Register with the address of the stage."""
        return self.text.get("b32", "mul.lo.u32", self.stage, self.of.stage_bytes)

    def each_tile(self, body: Callable[[], None]) -> None:
        """Write what is done for a tile, once, or for each tile of a persistent block."""
        text = self.text
        text.op("mov.u32", self.stage, 0)
        text.op("mov.u32", self.parity, 0)
        if not self.of.persistent:
            self._locate(self.number, self.m, self.n)
            body()
            return
        again, over = text.mark(), text.mark()
        tiles = text.get("b32", "mul.lo.u32", text.parameter("tiles_m"), text.parameter("tiles_n"))
        text.place(again)
        text.op("bra", over, guard=text.equals(self.number, tiles, "ge.u32"))
        self._locate(self.number, self.m, self.n)
        body()
        text.op("add.u32", self.number, self.number, text.special("nctaid.x"))
        text.op("bra", again)
        text.place(over)

    def next_stage(self) -> None:
        """Go to the next stage; after the last one the parity of phases changes."""
        text = self.text
        text.op("add.u32", self.stage, self.stage, 1)
        wraps = text.equals(self.stage, self.of.stages)
        text.op("selp.b32", self.stage, 0, self.stage, wraps)
        text.op("xor.b32", self.parity, self.parity, 1, guard=wraps)

    def _tiles(self) -> tuple[str, str, str]:
        """Registers of the tile's number, and of its place along m and n, which `_locate` sets."""
        text = self.text
        number, (m, n) = text.new("b32"), text.many("b32", 2)
        x, y = text.special("ctaid.x"), text.special("ctaid.y")
        across = text.get("b32", "div.u32", text.parameter("tiles_m"), self.of.cluster[0])
        if self.of.blocks_of_cluster:
            x = text.get("b32", "div.u32", x, self.of.cluster[0])
            y = text.get("b32", "div.u32", y, self.of.cluster[1])
        text.op("mad.lo.u32", number, y, across, x)
        return number, m, n

    def _locate(self, number: str, m: str, n: str) -> None:
        """Place of a tile by its number: `group` rows of tiles are filled, along m first, before the next ones.

        Neighbours in time then share A and B in the caches (Triton's tutorial of products).
        """
        text, (along, across) = self.text, self.of.cluster
        rows = text.get("b32", "div.u32", text.parameter("tiles_m"), along)
        columns = text.get("b32", "div.u32", text.parameter("tiles_n"), across)
        group = text.parameter("group")
        size = text.get("b32", "mul.lo.u32", group, columns)
        first = text.get("b32", "mul.lo.u32", text.get("b32", "div.u32", number, size), group)
        height = text.get("b32", "min.u32", group, text.get("b32", "sub.u32", rows, first))
        within = text.get("b32", "rem.u32", number, size)
        text.op("rem.u32", m, within, height)
        text.op("add.u32", m, m, first)
        text.op("div.u32", n, within, height)
        if max(along, across) > 1:  # clusters are numbered: a block has its place in one
            text.op("mad.lo.u32", m, m, along, self.ranks[0])
            text.op("mad.lo.u32", n, n, across, self.ranks[1])
