"""Text of a kernel in PTX while it is written: registers, instructions, labels and what kernels of Hopper share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

_HEAD = ".version 8.3\n.target sm_90a\n.address_size 64\n"
_LETTERS = {"b16": "h", "b32": "r", "b64": "rd", "f32": "f", "pred": "p"}
MAP_BYTES = 128
"""Of a tensor map."""
REGISTERS = 168
"""Of a thread where registers come and go (`setmaxnreg`): three warpgroups fill an SM with them."""
SHARED = "smem"
"""Name of a kernel's dynamic shared memory, whose first byte is its address 0."""


class Text:
    """A kernel that is written. parameters: name -> type, or `map` for a tensor map; cluster: blocks of one; threads:
    of a block, where they are fixed, as `setmaxnreg` needs it.
    """

    def __init__(self, name: str, parameters: Mapping[str, str], cluster: Sequence[int] = (), threads: int = 0) -> None:
        self.name, self.parameters, self.cluster, self.threads = name, dict(parameters), tuple(cluster), threads
        self._counts, self._lines, self._labels = dict.fromkeys(_LETTERS, 0), list[str](), 0

    def new(self, kind: str) -> str:
        """A fresh register of b16, b32, b64, f32 or pred."""
        self._counts[kind] += 1
        return f"%{_LETTERS[kind]}{self._counts[kind] - 1}"

    def many(self, kind: str, count: int) -> list[str]:
        """Fresh registers."""
        return [self.new(kind) for _ in range(count)]

    def op(self, opcode: str, *operands: object, guard: str = "") -> None:
        """Write an instruction; guard: a predicate, or `!` and one."""
        head = f"@{guard} " if guard else ""
        self._lines.append(f"  {head}{opcode} {', '.join(map(str, operands))};")

    def get(self, kind: str, opcode: str, *operands: object) -> str:
        """Write an instruction with a result; its register."""
        result = self.new(kind)
        self.op(opcode, result, *operands)
        return result

    def mark(self) -> str:
        """A fresh label."""
        self._labels += 1
        return f"$L{self._labels}"

    def place(self, label: str) -> None:
        """Put a label here."""
        self._lines.append(f"{label}:")

    def parameter(self, name: str) -> str:
        """Register of a parameter, of a tensor map with its generic address."""
        kind = self.parameters[name]
        if kind == "map":
            return self.get("b64", "cvta.param.u64", self.get("b64", "mov.b64", name))
        wide = {"u64": "b64", "f32": "f32"}.get(kind, "b32")
        return self.get(wide, f"ld.param.{kind}", f"[{name}]")

    def special(self, name: str) -> str:
        """Register with a special register of 32 bits."""
        return self.get("b32", "mov.u32", f"%{name}")

    def equals(self, first: object, second: object, comparison: str = "eq.u32") -> str:
        """Predicate of a comparison."""
        return self.get("pred", f"setp.{comparison}", first, second)

    def elect(self) -> str:
        """Predicate that holds for one lane of a warp."""
        chosen = self.new("pred")
        self.op("elect.sync", f"_|{chosen}", "0xffffffff")
        return chosen

    def wait(self, barrier: str, parity: object) -> None:
        """Wait until the phase of an mbarrier with this parity has ended."""
        again, done = self.mark(), self.new("pred")
        self.place(again)
        self.op("mbarrier.try_wait.parity.shared::cta.b64", done, barrier, parity)
        self.op("bra", again, guard=f"!{done}")

    def load_box(self, target: str, box: str, barrier: str, mask: str = "") -> None:
        """Copy a box (`[map, {x, y}]`) to shared memory; mask: blocks of the cluster that all take it."""
        words = "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        more = [".multicast::cluster", mask] if mask else ["", ""]
        self.op(words + more[0], target, box, barrier, *more[1:] if mask else ())

    def meet(self) -> None:
        """Let all threads of the cluster, or of the block where there is none, meet."""
        if self.cluster:
            self.op("barrier.cluster.arrive.release.aligned")
            self.op("barrier.cluster.wait.acquire.aligned")
        else:
            self.op("bar.sync", 0)

    def begin_barriers(self, counts: Mapping[int, int]) -> None:
        """Initialise mbarriers (address -> arrivals) by one thread, and let all threads see them."""
        first, after = self.equals(self.special("tid.x"), 0), self.mark()
        self.op("bra", after, guard=f"!{first}")
        for address, count in counts.items():
            self.op("mbarrier.init.shared::cta.b64", f"[{SHARED}+{address}]", count)
        self.op("fence.mbarrier_init.release.cluster")
        self.place(after)
        self.meet()

    def render(self) -> str:
        """The text of a module with this kernel."""
        kinds = {"map": f".param .align 64 .b8 {{}}[{MAP_BYTES}]"}
        parameters = ",\n  ".join(
            kinds.get(kind, f".param .{kind} {{}}").format(name) for name, kind in self.parameters.items()
        )
        block = f".reqntid {self.threads}, 1, 1\n.maxnreg {REGISTERS}\n" if self.threads else ""
        cluster = f".explicitcluster .reqnctapercluster {', '.join(map(str, self.cluster))}\n" if self.cluster else ""
        registers = [f"  .reg .{kind} %{_LETTERS[kind]}<{count}>;" for kind, count in self._counts.items() if count]
        body = "\n".join([*registers, *self._lines, "  ret;"])
        shared = f".extern .shared .align 1024 .b8 {SHARED}[];\n"
        return f"{_HEAD}{shared}.visible .entry {self.name}(\n  {parameters}\n) {block}{cluster}{{\n{body}\n}}\n"
