"""Servers that take one request after another at a fixed pace: a port, a tag look-up, a bus, a link (compiled parts).

A server is a bucket of one token: it begins a request at max(free, now), and is free again `takes` later. Its state is
the time from which it is free.
"""

from __future__ import annotations

from typing import Any

from simulators.compiled import inline_always


@inline_always
def serve(free: Any, server: int, now: float, takes: float) -> float:
    """Serve a request that is there `now`, for `takes`; return when it begins. free [servers]: times, in any unit."""
    begin = max(free[server], now)
    free[server] = begin + takes
    return begin
