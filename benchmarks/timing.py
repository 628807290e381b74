"""CPU time of a call: the best of several, as a shared machine only ever adds to it."""

from __future__ import annotations

import time
from collections.abc import Callable


def best(call: Callable[[], object], repeats: int = 3) -> float:
    """Seconds of the fastest of some calls, after one that is not counted."""
    call()
    taken = []
    for _ in range(repeats):
        began = time.process_time()
        call()
        taken.append(time.process_time() - began)
    return min(taken)
