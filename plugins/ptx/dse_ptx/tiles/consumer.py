"""The consumers of a product's kernel: warpgroups that multiply, and what they make of their sums.

A thread of a warpgroup holds of its 64 rows those of its lane over 4, plus 16 for each warp before its own, and 8 more;
of each 8 columns two, twice its lane modulo 4 (PTX ISA, section 9.7.15.5.1.1.2).
"""

from __future__ import annotations

from dse_ptx.tiles.ring import Ring
from dse_ptx.tiles.shape import DEPTH, GROUP, STEP

_CHUNK = 64
"""Columns of a box of C: 128 bytes."""
_SWIZZLES = {0: 0, 128: 1, 64: 2, 32: 3}


class Consumer:
    """Writes the products and the end of a tile."""

    def __init__(self, ring: Ring) -> None:
        self.ring, self.of, self.text = ring, ring.of, ring.text

    def write(self) -> None:
        """Write the consumers."""
        text, of = self.text, self.of
        text.op("setmaxnreg.inc.sync.aligned.u32", 232)
        self.group = text.get("b32", "sub.u32", self.ring.group, 1)
        # warp and lane of the group, the first row of a thread's, and the first two of its columns
        in_group = text.get("b32", "and.b32", self.ring.thread, GROUP - 1)
        self.lane = text.get("b32", "and.b32", in_group, 31)
        self.warp = text.get("b32", "shr.u32", in_group, 5)
        self.row = text.get("b32", "shr.u32", self.lane, 2)
        self.row = text.get("b32", "mad.lo.u32", self.warp, 16, self.row)
        self.row = text.get("b32", "mad.lo.u32", self.group, 64, self.row)
        self.column = text.get("b32", "shl.b32", text.get("b32", "and.b32", self.lane, 3), 1)
        self.sums = text.many("f32", of.columns // 2)
        self.parts = [text.many("b32", 4) for _ in range(STEP // DEPTH)] if of.from_registers else []
        self.ring.each_tile(self._consume_tile)

    def _consume_tile(self) -> None:
        text, ring, of = self.text, self.ring, self.of
        again, first = text.mark(), text.mark()
        adds, left = text.equals(0, 1), text.get("b32", "mov.u32", ring.steps)
        last = text.new("b32")
        text.place(again)
        full = ring.full()
        text.wait(f"[{full}]", ring.parity)
        base = ring.base()
        if of.from_registers:
            self._load_parts(base)
        text.op("wgmma.fence.sync.aligned")
        for part in range(STEP // DEPTH):
            self._multiply(base, part, adds)
            text.op("setp.eq.u32", adds, 0, 0)
        text.op("wgmma.commit_group.sync.aligned")
        # registers of A are loaded anew in the next step; of tiles in shared memory a product may go on
        text.op("wgmma.wait_group.sync.aligned", 0 if of.from_registers else 1)
        text.op("bra", first, guard=text.equals(left, ring.steps))
        self._free(last)
        text.place(first)
        text.op("add.u32", last, full, 8 * of.stages)
        ring.next_stage()
        text.op("sub.u32", left, left, 1)
        text.op("bra", again, guard=text.equals(left, 0, "ne.u32"))
        text.op("wgmma.wait_group.sync.aligned", 0)
        self._free(last)
        self._finish()

    def _free(self, barrier: str) -> None:
        """Tell the blocks that copy to this one that a stage is free: one lane of each warp arrives."""
        text, (along, across), ranks = self.text, self.of.cluster, self.ring.ranks
        chosen = text.elect()
        if along * across == 1:
            text.op("mbarrier.arrive.release.cta.shared::cta.b64", "_", f"[{barrier}]", guard=chosen)
            return
        line = text.get("b32", "mul.lo.u32", ranks[1], along)
        places = [text.get("b32", "add.u32", line, other) for other in range(along)]
        for step in range(1, across):
            y = text.get("b32", "add.u32", ranks[1], step)
            y = text.get("b32", "rem.u32", y, across)
            places.append(text.get("b32", "mad.lo.u32", y, along, ranks[0]))
        for place in places:
            remote = text.get("b32", "mapa.shared::cluster.u32", barrier, place)
            text.op("mbarrier.arrive.release.cluster.shared::cluster.b64", "_", f"[{remote}]", guard=chosen)

    def _descriptor(self, address: str, leading: int, stride: int, swizzle: int) -> str:
        """Descriptor of a tile in shared memory (PTX ISA, section 9.7.15.5.1.2.2)."""
        text = self.text
        wide = text.get("b64", "cvt.u64.u32", text.get("b32", "shr.u32", address, 4))
        constant = leading // 16 << 16 | stride // 16 << 32 | _SWIZZLES[swizzle] << 62
        return text.get("b64", "or.b64", wide, f"0x{constant:x}")

    def _along_k(self, base: str, rows: int, part: int) -> str:
        """Descriptor of 16 elements of k of a tile whose boxes of so many rows lie one after another."""
        of, width = self.of, self.of.pitch
        begin = part * DEPTH * 2
        at = begin // width * rows * width + begin % width
        address = self.text.get("b32", "add.u32", base, at)
        # without a swizzle a box is one unit wide: the next one lies behind all rows of it
        return self._descriptor(address, rows * width if not of.swizzle else 16, 8 * width, of.swizzle)

    def _multiply(self, base: str, part: int, adds: str) -> None:
        text, of = self.text, self.of
        b_base = text.get("b32", "add.u32", base, of.a_bytes)
        if of.turned:
            address = text.get("b32", "add.u32", b_base, part * DEPTH * 128)
            right = self._descriptor(address, STEP * 128, 1024, 128)
        else:
            right = self._along_k(b_base, of.columns, part)
        if of.from_registers:
            left = f"{{{', '.join(self.parts[part])}}}"
        else:
            a_base = text.get("b32", "mad.lo.u32", self.group, 64 * of.pitch, base)
            left = self._along_k(a_base, of.rows, part)
        opcode = f"wgmma.mma_async.sync.aligned.m64n{of.columns}k16.f32.{of.kind}.{of.kind}"
        constants = (1, 1, int(of.turned)) if of.from_registers else (1, 1, 0, int(of.turned))
        text.op(opcode, f"{{{', '.join(self.sums)}}}", left, right, adds, *constants)

    def _load_parts(self, base: str) -> None:
        """Load the fragments of A of a stage, whose rows of 128 bytes are swizzled."""
        text = self.text
        # lanes 8 j to 8 j + 7 give rows of matrix j: rows 8 (j mod 2), and units j / 2, of the warp's 16 rows
        row = text.get("b32", "and.b32", self.lane, 15)
        row = text.get("b32", "mad.lo.u32", self.warp, 16, row)
        row = text.get("b32", "mad.lo.u32", self.group, 64, row)
        line = text.get("b32", "mad.lo.u32", row, 128, base)
        within, unit = text.get("b32", "and.b32", row, 7), text.get("b32", "shr.u32", self.lane, 4)
        for part, registers in enumerate(self.parts):
            place = text.get("b32", "xor.b32", text.get("b32", "add.u32", unit, 2 * part), within)
            address = text.get("b32", "mad.lo.u32", place, 16, line)
            group = f"{{{', '.join(registers)}}}"
            text.op("ldmatrix.sync.aligned.m8n8.x4.shared::cta.b16", group, f"[{address}]")

    def _finish(self) -> None:
        """Store the sums of the tile."""
        if self.of.parts > 1:
            self._add_parts()
            return
        if self.of.after:
            self._activate()
        if self.of.persistent or self.of.result == "f32":
            self._store_by_threads()
        else:
            self._store_by_boxes()

    def _activate(self) -> None:
        """Add the bias of each column, and apply what follows."""
        text, of = self.text, self.of
        first = text.get("b32", "mad.lo.u32", self.ring.n, of.columns, self.column)
        pointer = text.get("b64", "mad.wide.u32", first, 4, text.parameter("bias"))
        for block in range(of.columns // 8):
            bias = text.many("f32", 2)
            text.op("ld.global.nc.v2.f32", f"{{{', '.join(bias)}}}", f"[{pointer}+{32 * block}]")
            for place in range(4):
                value = self.sums[4 * block + place]
                text.op("add.rn.f32", value, value, bias[place % 2])
                if of.after == "relu":
                    text.op("max.f32", value, value, "0f00000000")
                else:
                    self._gelu(value)

    def _gelu(self, value: str) -> None:
        """x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), by Hendrycks and Gimpel (arXiv:1606.08415)."""
        text = self.text
        square = text.get("f32", "mul.rn.f32", value, value)
        inner = text.get("f32", "fma.rn.f32", square, "0f3D372713", "0f3F800000")
        inner = text.get("f32", "mul.rn.f32", inner, value)
        inner = text.get("f32", "mul.rn.f32", inner, "0f3F4C422A")
        half = text.get("f32", "mul.rn.f32", value, "0f3F000000")
        text.op("fma.rn.f32", value, text.get("f32", "tanh.approx.f32", inner), half, half)

    def _packed(self, block: int, below: int) -> str:
        """Two neighbours of a row in 16 bits each; below: 1 of the row 8 further down."""
        low, high = self.sums[4 * block + 2 * below : 4 * block + 2 * below + 2]
        return self.text.get("b32", f"cvt.rn.{self.of.kind}x2.f32", high, low)

    def _store_by_threads(self) -> None:
        text, of, ring = self.text, self.of, self.ring
        row = text.get("b32", "mad.lo.u32", ring.m, of.rows, self.row)
        column = text.get("b32", "mad.lo.u32", ring.n, of.columns, self.column)
        n = text.parameter("n")
        place, size = text.get("b32", "mad.lo.u32", row, n, column), 4 if of.result == "f32" else 2
        pointers = [text.get("b64", "mad.wide.u32", place, size, text.parameter("out"))]
        pointers.append(text.get("b64", "mad.wide.u32", n, 8 * size, pointers[0]))
        for block in range(of.columns // 8):
            for below in range(2):
                address = f"[{pointers[below]}+{8 * size * block}]"
                if size == 2:
                    text.op("st.global.b32", address, self._packed(block, below))
                else:
                    pair = ", ".join(self.sums[4 * block + 2 * below : 4 * block + 2 * below + 2])
                    text.op("st.global.v2.f32", address, f"{{{pair}}}")

    def _store_by_boxes(self) -> None:
        """Write a group's rows to the stages, swizzled by 128 bytes, and copy boxes of 64 columns to C."""
        text, of, ring = self.text, self.of, self.ring
        chunk = 64 * 128  # bytes of a box of 64 rows
        if of.consumers > 1:
            text.op("bar.sync", 1, GROUP * of.consumers)  # no group reads the stages any more
        base = text.get("b32", "mul.lo.u32", self.group, of.columns // _CHUNK * chunk)
        in_group = text.get("b32", "and.b32", self.row, 63)
        line = text.get("b32", "mad.lo.u32", in_group, 128, base)
        line = text.get("b32", "mad.lo.u32", self.column, 2, line)
        within = text.get("b32", "shl.b32", text.get("b32", "and.b32", self.row, 7), 4)
        for block in range(of.columns // 8):
            unit = text.get("b32", "xor.b32", within, block % 8 * 16)
            address = text.get("b32", "add.u32", line, unit)
            for below in range(2):
                at = block // 8 * chunk + below * 8 * 128
                text.op("st.shared.b32", f"[{address}+{at}]", self._packed(block, below))
        text.op("fence.proxy.async.shared::cta")
        barrier = text.get("b32", "add.u32", self.group, 2)
        text.op("bar.sync", barrier, GROUP)
        after = text.mark()
        text.op("bra", after, guard=text.equals(self.warp, 0, "ne.u32"))
        text.op("bra", after, guard=f"!{text.elect()}")
        row = text.get("b32", "mul.lo.u32", ring.m, of.rows)
        row = text.get("b32", "mad.lo.u32", self.group, 64, row)
        column, out = text.get("b32", "mul.lo.u32", ring.n, of.columns), text.parameter("c")
        for box in range(of.columns // _CHUNK):
            x = text.get("b32", "add.u32", column, box * _CHUNK)
            words = "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group"
            text.op(words, f"[{out}, {{{x}, {row}}}]", f"[{base}+{box * chunk}]")
        text.op("cp.async.bulk.commit_group")
        text.op("cp.async.bulk.wait_group.read", 0)
        text.place(after)

    def _add_parts(self) -> None:
        """Add the sums of the cluster's blocks: each writes its own to shared memory, and adds a share of the rows."""
        text, of, ring = self.text, self.of, self.ring
        pitch = of.columns * 4
        text.op("bar.sync", 1, GROUP * of.consumers)
        line = text.get("b32", "mul.lo.u32", self.row, pitch)
        line = text.get("b32", "mad.lo.u32", self.column, 4, line)
        for block in range(of.columns // 8):
            for below in range(2):
                pair = ", ".join(self.sums[4 * block + 2 * below : 4 * block + 2 * below + 2])
                text.op("st.shared.v2.f32", f"[{line}+{32 * block + below * 8 * pitch}]", f"{{{pair}}}")
        # the producer's warps come to this barrier at the end
        text.meet()
        rank = text.special("cluster_ctarank")
        share = of.rows // of.parts
        thread = text.get("b32", "sub.u32", ring.thread, GROUP)
        first = text.get("b32", "mul.lo.u32", rank, share * pitch)
        out, n = text.parameter("out"), text.parameter("n")
        for turn in range(share * of.columns // 2 // (GROUP * of.consumers)):
            pair = text.get("b32", "add.u32", thread, turn * GROUP * of.consumers)
            address = text.get("b32", "mad.lo.u32", pair, 8, first)
            totals = text.many("f32", 2)
            for other in range(of.parts):
                remote = text.get("b32", "mapa.shared::cluster.u32", address, other)
                values = text.many("f32", 2) if other else totals
                text.op("ld.shared::cluster.v2.f32", f"{{{', '.join(values)}}}", f"[{remote}]")
                for total, value in zip(totals, values, strict=True):
                    if other:
                        text.op("add.rn.f32", total, total, value)
            row = text.get("b32", "div.u32", pair, of.columns // 2)
            column = text.get("b32", "rem.u32", pair, of.columns // 2)
            row = text.get("b32", "mad.lo.u32", rank, share, row)
            row = text.get("b32", "mad.lo.u32", ring.m, of.rows, row)
            place = text.get("b32", "mul.lo.u32", ring.n, of.columns)
            place = text.get("b32", "mad.lo.u32", column, 2, place)
            place = text.get("b32", "mad.lo.u32", row, n, place)
            pointer = text.get("b64", "mad.wide.u32", place, 2, out)
            packed = text.get("b32", f"cvt.rn.{of.kind}x2.f32", totals[1], totals[0])
            text.op("st.global.b32", f"[{pointer}]", packed)
