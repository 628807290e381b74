"""Bytes of a collective, as `simulators.costs.algorithms` counts them: of the largest tensor that a GPU holds.

Profilers count elements that go into a collective of a rank and that come out of it. These are equal for all patterns
but two: an all-gather takes a shard of what every GPU ends with, a reduce-scatter leaves one of what it started with.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from dse_traces.profile.element_types import element_bytes
from simulators.costs.algorithms import Pattern

_PATTERNS: Mapping[str, Pattern] = {
    r"all_?reduce|multimem": "all_reduce",
    r"reduce_?scatter": "reduce_scatter",
    r"all_?gather": "all_gather",
    r"all_?to_?all": "all_to_all",
    r"broadcast": "broadcast",
    r"send_?recv|p2p|ptop|peer": "send_recv",
}


def pattern_of(*names: str | None) -> Pattern | None:
    """The pattern that the first of some names tells of, or None.

    >>> pattern_of("_allgather_base"), pattern_of("coalesced", "ncclDevKernel_ReduceScatter_Sum_f32"), pattern_of(None)
    ('all_gather', 'reduce_scatter', None)
    """
    found = (of for name in names if name for text, of in _PATTERNS.items() if re.search(text, name, re.IGNORECASE))
    return next(found, None)


def payload_bytes(pattern: Pattern | None, elements: tuple[Any, Any], dtype: Any, group_size: Any) -> float | None:
    """Bytes of the payload of a collective; None where they are not known. Raises ValueError or TypeError.

    elements: that go in and that come out, each perhaps None. dtype: name of their type. group_size: may be None.

    >>> payload_bytes("all_gather", (1024, 8192), "BFloat16", 8), payload_bytes("all_gather", (1024, None), "Half", 8)
    (16384.0, 16384.0)
    >>> payload_bytes("reduce_scatter", (8192, 1024), "Float8_e4m3fn", 8)
    8192.0
    """
    known = [float(count) for count in elements if count is not None]
    size = element_bytes(dtype)
    if not known or size is None:
        return None
    whole, shard = (1, 0) if pattern == "all_gather" else (0, 1)
    if pattern not in ("all_gather", "reduce_scatter"):
        return known[0] * size
    if elements[whole] is not None:
        # a list of tensors may be counted by one of them: the larger side is at least the whole
        return max(known) * size
    # the whole is a shard of each GPU; of how many, only the group tells
    return None if group_size is None else float(elements[shard]) * float(group_size) * size
