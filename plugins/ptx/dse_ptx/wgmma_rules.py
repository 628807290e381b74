"""Order of `wgmma` and of what touches its registers (PTX ISA, section 9.7.15), along all ways.

A warpgroup's products read and write registers while its warps go on. Registers that other instructions have written
need a `wgmma.fence` before a product takes them; those that it writes may be read after a `wgmma.wait_group`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dse_ptx.control_flow import Flow, blocks_of
from dse_ptx.program import Instruction

_FENCE = "follows no wgmma.fence that stands after what else writes its registers, as the first one needs it too"
_WAIT = "touches a register that a wgmma.mma_async still writes: wgmma.wait_group comes first"


@dataclass(frozen=True)
class Broken:
    """An instruction by its number, and the rule that it breaks."""

    number: int
    rule: str


def broken_rules(instructions: Sequence[Instruction], flows: Sequence[Flow]) -> list[Broken]:
    """All instructions that break a rule, in their order. Sets of registers are bits of integers."""
    if all(entry.name != "wgmma" for entry in instructions):
        return []
    blocks, highest = blocks_of(flows), max((max(flow.writes + flow.reads, default=0) for flow in flows), default=0)
    # at the beginning no fence has come: all registers count as written by others
    first = ((1 << (highest + 1)) - 1, 0)
    before = [first if block == 0 else (0, 0) for block in range(blocks.count + 1)]
    faults, changed = dict[int, str](), True
    while changed:
        changed = False
        for block in range(blocks.count):
            state = before[block]
            for number in range(blocks.starts[block], blocks.starts[block + 1]):
                state = _after(number, instructions[number], flows[number], state, faults)
            for following in blocks.successors[block]:
                joined = before[following][0] | state[0], before[following][1] | state[1]
                changed = changed or joined != before[following]
                before[following] = joined
    return [Broken(number, faults[number]) for number in sorted(faults)]


def _after(
    number: int, entry: Instruction, flow: Flow, state: tuple[int, int], faults: dict[int, str]
) -> tuple[int, int]:
    """Registers that others have written since a fence, and those that products still write, after an instruction."""
    dirty, running = state
    writes, reads = (sum(1 << register for register in set(each)) for each in (flow.writes, flow.reads))
    word = entry.modifiers[0] if entry.name == "wgmma" and entry.modifiers else ""
    if word == "fence":
        return 0, running
    if word == "wait_group":
        return dirty, 0
    if word == "mma_async":
        # descriptors and the predicate are read when it is issued: D, and A in registers, are the fragments
        fragment = writes | sum(1 << register for register in flow.reads[len(flow.writes) : -2][:4] if _is_group(entry))
        if dirty & fragment:
            faults[number] = _FENCE
        return dirty, running | fragment
    if running & (writes | reads):
        faults[number] = _WAIT
    return dirty | writes, running


def _is_group(entry: Instruction) -> bool:
    """Tell whether A is in registers."""
    return hasattr(entry.operands[1], "members")
