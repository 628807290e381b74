"""The producer of a product's kernel: one thread copies boxes of A and B to the stages of its block and neighbours."""

from __future__ import annotations

from dse_ptx.tiles.ring import Ring
from dse_ptx.tiles.shape import STEP


class Producer:
    """Writes the copies of a block."""

    def __init__(self, ring: Ring) -> None:
        self.ring, self.of, self.text = ring, ring.of, ring.text

    def write(self, end: str) -> None:
        """Write the producer; end: label to which its other threads go."""
        self.text.op("setmaxnreg.dec.sync.aligned.u32", 40)
        self.text.op("bra", end, guard=self.text.equals(self.ring.thread, 0, "ne.u32"))
        self.maps = [self.text.parameter(name) for name in "ab"]
        self.ring.each_tile(self._produce_tile)

    def _produce_tile(self) -> None:
        """Copy all steps of k of a tile."""
        text, of = self.text, self.of
        again = text.mark()
        k = text.get("b32", "mul.lo.u32", self.ring.first, STEP)
        left = text.get("b32", "mov.u32", self.ring.steps)
        row = text.get("b32", "mul.lo.u32", self.ring.m, of.rows)
        column = text.get("b32", "mul.lo.u32", self.ring.n, of.columns)
        text.place(again)
        inner = self.ring.full()
        full = f"[{inner}]"
        # a stage that was never used counts as free: the phase before the first has the other parity
        text.wait(f"[{inner}+{8 * of.stages}]", text.get("b32", "xor.b32", self.ring.parity, 1))
        text.op("mbarrier.arrive.expect_tx.shared::cta.b64", "_", full, of.stage_bytes)
        base = self.ring.base()
        self._load_a(base, k, row, full)
        self._load_b(base, k, column, full)
        self.ring.next_stage()
        text.op("add.u32", k, k, STEP)
        text.op("sub.u32", left, left, 1)
        text.op("bra", again, guard=text.equals(left, 0, "ne.u32"))

    def _mask(self, axis: int) -> str:
        """Blocks of the cluster along an axis, in the line of this one, as bits."""
        text, (along, across) = self.text, self.of.cluster
        if axis == 0:  # neighbours along m have the same place along n
            shift = text.get("b32", "mul.lo.u32", self.ring.ranks[1], along)
            bits = sum(1 << rank for rank in range(along))
        else:
            shift, bits = self.ring.ranks[0], sum(1 << along * rank for rank in range(across))
        mask = text.get("b32", "shl.b32", text.get("b32", "mov.u32", bits), shift)
        return text.get("b16", "cvt.u16.u32", mask)

    def _load_a(self, base: str, k: str, row: str, full: str) -> None:
        text, of = self.text, self.of
        height, width = of.a_box
        mask = self._mask(1) if of.cluster[1] > 1 else ""
        if mask:
            base = text.get("b32", "mad.lo.u32", self.ring.ranks[1], height * of.pitch, base)
            row = text.get("b32", "mad.lo.u32", self.ring.ranks[1], height, row)
        for box in range(STEP // width):
            x = text.get("b32", "add.u32", k, box * width)
            text.load_box(f"[{base}+{box * of.rows * of.pitch}]", f"[{self.maps[0]}, {{{x}, {row}}}]", full, mask)

    def _load_b(self, base: str, k: str, column: str, full: str) -> None:
        text, of = self.text, self.of
        mask = self._mask(0) if of.cluster[0] > 1 else ""
        share = of.columns // of.cluster[0]
        if of.turned:
            count, size = share // 64, STEP * 128
            if mask:
                base = text.get("b32", "mad.lo.u32", self.ring.ranks[0], count * size, base)
                column = text.get("b32", "mad.lo.u32", self.ring.ranks[0], share, column)
            for box in range(count):
                x, at = text.get("b32", "add.u32", column, 64 * box), of.a_bytes + box * size
                text.load_box(f"[{base}+{at}]", f"[{self.maps[1]}, {{{x}, {k}}}]", full, mask)
            return
        width = of.b_box[1]
        if mask:
            base = text.get("b32", "mad.lo.u32", self.ring.ranks[0], share * of.pitch, base)
            column = text.get("b32", "mad.lo.u32", self.ring.ranks[0], share, column)
        for box in range(STEP // width):
            x, at = text.get("b32", "add.u32", k, box * width), of.a_bytes + box * of.columns * of.pitch
            text.load_box(f"[{base}+{at}]", f"[{self.maps[1]}, {{{x}, {column}}}]", full, mask)
