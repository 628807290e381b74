"""Times of a bank of DRAM (compiled parts), by the constraints of JEDEC's standards (JESD235, HBM).

activation   A >= asked, last use + tRP, last activation + tRC, and the channel's gate (tRRD after its last one)
column       C >= A + tRCD, and when the request is there
refresh      one each tREFI; those that are due while the channel is idle have passed
"""

from __future__ import annotations

from simulators.compiled import inline_always


@inline_always
def activation_at(asked: float, precharged: float, cycled: float, gate: float) -> float:
    """Time from which a bank can open a row.

    precharged: tRP after its last use. cycled: tRC after its last activation. gate: tRRD after the channel's.
    """
    return max(asked, precharged, cycled, gate)


@inline_always
def column_at(opened: float, trcd: float, asked: float) -> float:
    """Time from which a bank can give a column of a row that was opened at a time."""
    return max(opened + trcd, asked)


@inline_always
def refreshes_before(late: float, trefi: float) -> int:
    """Refreshes that were due within so long after the first one that is due; 0 for less than an interval."""
    return int(late / trefi)
