"""Data flow over basic blocks: where divergent lanes of a warp meet again, and how many registers are live."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Flow:
    """An instruction as control flow sees it. target: of a branch, -1 for others. widths: 32-bit registers of each
    register that is written or read."""

    writes: tuple[int, ...]
    reads: tuple[int, ...]
    target: int
    is_end: bool
    is_guarded: bool


@dataclass(frozen=True)
class Blocks:
    """Basic blocks. starts: the first instruction of each, and the number of instructions; successors: the number of
    blocks stands for the end of the kernel."""

    starts: tuple[int, ...]
    successors: tuple[tuple[int, ...], ...]

    @property
    def count(self) -> int:
        """Number of blocks."""
        return len(self.successors)


def blocks_of(flows: Sequence[Flow]) -> Blocks:
    """Split a kernel into basic blocks."""
    count = len(flows)
    leaders = {0, count} | {entry.target for entry in flows if 0 <= entry.target < count}
    leaders |= {i + 1 for i, entry in enumerate(flows) if entry.target >= 0 or entry.is_end}
    starts = tuple(sorted(leaders))
    number = {start: block for block, start in enumerate(starts)}
    end, successors = len(starts) - 1, []
    for block in range(end):
        last = flows[starts[block + 1] - 1]
        # a guarded branch, or a guarded end, falls through for lanes whose predicate is false
        following = set() if (last.target >= 0 or last.is_end) and not last.is_guarded else {block + 1}
        if last.target >= 0:
            following.add(number.get(last.target, end))
        successors.append(tuple(sorted(following | ({end} if last.is_end else set()))))
    return Blocks(starts, tuple(successors))


def reconvergence(flows: Sequence[Flow]) -> list[int]:
    """Instruction at which the lanes that a branch separates meet: the immediate post-dominator of its block.

    -1 where they meet at the end only. (Fung et al., "Dynamic Warp Formation", MICRO 2007, section 3.)
    """
    blocks = blocks_of(flows)
    after = _post_dominators(blocks)
    meets = [-1] * len(flows)
    for block in range(blocks.count):
        last = blocks.starts[block + 1] - 1
        # the nearest post-dominator is the one that has most post-dominators itself
        nearest = max(
            (entry for entry in after[block] - {block}), key=lambda entry: len(after[entry]), default=blocks.count
        )
        if flows[last].target >= 0 and nearest < blocks.count:
            meets[last] = blocks.starts[nearest]
    return meets


def _post_dominators(blocks: Blocks) -> list[set[int]]:
    """Blocks through which each block's every way to the end leads; empty where no way leads there."""
    end = blocks.count
    after: list[set[int]] = [set() for _ in range(end)] + [{end}]
    before: list[list[int]] = [[] for _ in range(end + 1)]
    for block, following in enumerate(blocks.successors):
        for entry in following:
            before[entry].append(block)
    order, seen, stack = list[int](), {end}, [end]
    while stack:
        block = stack.pop()
        order.append(block)
        fresh = [entry for entry in before[block] if entry not in seen]
        seen.update(fresh)
        stack += fresh
    # the largest sets to begin with: iteration shrinks them to the fixed point
    for block in seen - {end}:
        after[block] = set(seen)
    changed = True
    while changed:
        changed = False
        # from the end backwards, so that few rounds are needed
        for block in order[1:]:
            ways = [after[entry] for entry in blocks.successors[block] if entry in seen]
            new = set.intersection(*ways) | {block}
            changed = changed or new != after[block]
            after[block] = new
    return after


def live_registers(flows: Sequence[Flow], widths: Sequence[int]) -> int:
    """The most 32-bit registers that are live at once: what a perfect allocation would need.

    widths: 32-bit registers that each register takes (0 for predicates).
    """
    blocks = blocks_of(flows)
    # sets of registers are bits of one integer: operations on them are single ones
    masks = [sum(1 << reg for reg, width in enumerate(widths) if width == size) for size in (1, 2)]
    live_in = [0] * (blocks.count + 1)
    most, changed = 0, True
    while changed:
        changed = False
        for block in reversed(range(blocks.count)):
            live = 0
            for entry in blocks.successors[block]:
                live |= live_in[entry]
            for flow in reversed(flows[blocks.starts[block] : blocks.starts[block + 1]]):
                # a guarded write may not happen, so the old value stays live
                if not flow.is_guarded:
                    live &= ~sum(1 << reg for reg in set(flow.writes))
                live |= sum(1 << reg for reg in set(flow.reads))
                most = max(most, (live & masks[0]).bit_count() + 2 * (live & masks[1]).bit_count())
            changed = changed or live != live_in[block]
            live_in[block] = live
    return most
