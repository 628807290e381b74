"""Counts in a fixed number of bins of time, which become twice as wide when a run outgrows them (compiled parts)."""

from __future__ import annotations

from typing import Any

from simulators.compiled import inline_never


@inline_never
def join_bins(counts: Any, first: int, lanes: int, bins: int) -> None:
    """Join pairs of bins in the first half of a table, and empty its second half.

    counts: flat; the table begins at `first` and has `lanes` counts in each of `bins` bins, an even number of them.
    """
    for place in range(bins):
        for lane in range(lanes):
            pair = first + 2 * place * lanes + lane
            joined = counts[pair] + counts[pair + lanes] if place < bins // 2 else 0
            counts[first + place * lanes + lane] = joined
