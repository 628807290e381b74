"""Requests that wait at an engine: their queue, and when it reads and admits them; parts of the compiled loop."""

from __future__ import annotations

from typing import Any

import dse_serving.columns as at
from simulators.compiled import inline_never


@inline_never
def append(state: Any, e: int, request: int) -> None:
    """Put a request at the end of an engine's queue."""
    state.requests[request, at.NEXT] = at.NOBODY
    if state.engine[e, at.WAITING] == 0:
        state.engine[e, at.HEAD] = request
    else:
        state.requests[state.engine[e, at.TAIL], at.NEXT] = request
    state.engine[e, at.TAIL] = request
    state.engine[e, at.WAITING] += 1


@inline_never
def pop(state: Any, e: int) -> int:
    """Take the first request of an engine's queue."""
    request = state.engine[e, at.HEAD]
    state.engine[e, at.HEAD] = state.requests[request, at.NEXT]
    state.engine[e, at.WAITING] -= 1
    state.engine[e, at.SEEN] -= 1
    return int(request)


@inline_never
def tokens_that_wait(state: Any, e: int, pool: int) -> int:
    """Tokens of a step of all sequences and of as many requests of the queue as may run; 2**62 if none may."""
    request, left = state.engine[e, at.HEAD], state.limits[pool, at.SEQUENCES] - state.engine[e, at.RUNNING]
    tokens = state.engine[e, at.RUNNING] * (1 + state.limits[pool, at.DRAFTS])
    if left <= 0:
        return 2**62
    for _ in range(min(left, state.engine[e, at.SEEN])):
        tokens += state.requests[request, at.TARGET]
        request = state.requests[request, at.NEXT]
    return int(tokens)


@inline_never
def read(state: Any, e: int, pool: int) -> None:
    """Read the requests that came, unless an engine that generates looks for them later."""
    if state.engine[e, at.RUNNING] == 0 or state.engine[e, at.UNREAD_STEPS] + 1 >= state.limits[pool, at.READS]:
        state.engine[e, at.SEEN], state.engine[e, at.UNREAD_STEPS] = state.engine[e, at.WAITING], 0
    else:
        state.engine[e, at.UNREAD_STEPS] += 1


@inline_never
def holds_prompts(state: Any, e: int, pool: int) -> bool:
    """Tell whether prompts that wait are too few for all ranks, or for a step, and have not waited too long; count the
    steps.
    """
    ranks, waiting, steps = state.limits[pool, at.RANKS], state.engine[e, at.SEEN], state.engine[e, at.HELD]
    holds = 0 < waiting < ranks and steps < state.limits[pool, at.GATHERED] and state.engine[e, at.RUNNING] >= ranks
    if waiting > 0 and steps < state.limits[pool, at.WAITED] and state.engine[e, at.RUNNING] > 0:
        holds = tokens_that_wait(state, e, pool) < state.limits[pool, at.WAITED_TOKENS]
    for place in range(state.engine[e, at.RUNNING]):
        request = state.running[e, place]
        holds = holds and state.requests[request, at.CACHED] >= state.requests[request, at.TARGET]
    state.engine[e, at.HELD] = state.engine[e, at.HELD] + 1 if holds else 0
    return bool(holds)
