"""Transfers of keys and values from engines of prompts to those that generate; parts of the compiled loop.

The links of an engine, those of the sender and of the receiver alike, carry every byte once, in the order in which
prompts are whole: none gets more than its links carry, however many send to it.
"""

from __future__ import annotations

from typing import Any

import dse_serving.columns as at
from simulators.compiled import inline_never


@inline_never
def delay_of_transfer(sending: Any, side: Any, begun: float, whole_s: float, now: float) -> float:
    """Time [s] from now until the links of an engine have carried `whole_s` of one rank's time; written to `sending`.

    sending [1]: when the links are free; side [2]: share that is left when the prompt is whole, and ranks, whose links
    carry several at once. The links begin at `begun` or when they are free, and carry each byte once.
    """
    # ranks have links of their own: several transfers at once
    free = max(sending[0] - now, begun - now) + whole_s / side[1]
    sending[0] = now + free
    # links that were busy, the transfer itself, and what could not begin before the prompt was whole
    return float(max(free, begun - now + whole_s, side[0] * whole_s))


@inline_never
def transfer(state: Any, receiver: int, split: int, request: int, now: float) -> None:
    """Send the keys and values of a prompt over the links of both engines, in the order of `dispatch`; a receiver keeps
    what is under way to it in the order in which it arrives. Batches of a pipeline share the links of its first one.
    """
    beside, delay = state.rates[0, at.BESIDE] > 0.0, 0.0
    # layer by layer beside the prompt: only the last part is left when it is whole
    share = state.rates[0, at.LAST] if beside else 1.0
    begun = state.moments[request, at.ADMITTED] if beside else now
    for pool in range(2):
        engine = receiver if pool == 1 else state.requests[request, at.ENGINE]
        # pool 0 sends and pool 1 receives; the slower side decides
        e = engine - (engine - pool * split) % state.limits[pool, at.STAGES]
        whole_s = state.rates[pool, at.MOVED_TOKEN] * state.requests[request, at.CACHED]
        side = (share, float(state.limits[pool, at.RANKS]))
        delay = max(delay, delay_of_transfer(state.sending[e : e + 1], side, begun, whole_s, now))
    moved = now + (delay + state.rates[0, at.MOVED_LATENCY])
    state.moments[request, at.MOVED] = moved
    # insertion into a short list: few transfers are under way to one engine
    before, after = at.NOBODY, state.engine[receiver, at.SENDING]
    # sorted by arrival, so that `receive` looks at the first alone
    while after != at.NOBODY and state.moments[after, at.MOVED] <= moved:
        before, after = after, state.requests[after, at.NEXT]
    state.requests[request, at.NEXT] = after
    if before == at.NOBODY:
        state.engine[receiver, at.SENDING] = request
    else:
        state.requests[before, at.NEXT] = request
