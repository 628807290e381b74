"""Pages of keys and values of an engine, and the blocks of prompts that it keeps in them; parts of the compiled loop.

A block is UNIT tokens of prompts that begin alike (`dse_serving.traffic.PromptBlocks`). A request refers to the first
REFS blocks of its prompt, which it hits, or computed and left to others; its other tokens have pages of its own. A
block without users stays in free pages, until a request takes these: the block used longest ago goes first, and of a
prompt the last one, so that those before it are hits (vLLM's automatic prefix caching; equal blocks are joined when a
prompt is whole, as in SGLang's radix tree).
"""

from __future__ import annotations

from typing import Any

import dse_serving.columns as at
from simulators.compiled import inline_never


@inline_never
def pages_of(state: Any, pool: int, tokens: int) -> int:
    """Pages for so many tokens."""
    block = state.limits[pool, at.PAGE]
    return int((max(tokens, 0) + block - 1) // block)


@inline_never
def blocks_found(state: Any, e: int, pool: int, request: int) -> int:
    """Blocks at the start of a prompt that an engine has; a token is left to compute."""
    if state.requests[request, at.BLOCKED] == 0 or state.limits[pool, at.ROLE] == at.DECODE:
        return 0
    first = state.requests[request, at.CONTENT]
    limit = min(
        state.requests[request, at.BLOCKED], (state.requests[request, at.INPUT] - 1) // state.limits[pool, at.UNIT]
    )
    count = 0
    # blocks behind the first one that is missing follow other tokens, and are no hits
    while count < limit and state.resident[e, state.contents[first + count], at.USERS] >= 0:
        count += 1
    return int(count)


@inline_never
def pages_of_idle(state: Any, e: int, pool: int, request: int, hits: int) -> int:
    """Free pages with blocks without users, among so many blocks that a request found."""
    first, idle = state.requests[request, at.CONTENT], 0
    for place in range(hits):
        idle += 1 if state.resident[e, state.contents[first + place], at.USERS] == 0 else 0
    return int(idle * pages_of(state, pool, state.limits[pool, at.UNIT]))


@inline_never
def refer(state: Any, e: int, pool: int, request: int, hits: int) -> None:
    """Let a request that enters use so many blocks that its engine has."""
    for place in range(hits):
        use(state, e, pool, state.contents[state.requests[request, at.CONTENT] + place])
    state.requests[request, at.REFS] = hits


@inline_never
def use(state: Any, e: int, pool: int, block: int) -> None:
    """Count one more user of a block that an engine has."""
    if state.resident[e, block, at.USERS] == 0:
        unlink(state, e, block)
        pages = pages_of(state, pool, state.limits[pool, at.UNIT])
        # an idle block lies in free pages, which a user takes again
        state.engine[e, at.FREE] -= pages
        state.engine[e, at.IDLE] -= pages
    state.resident[e, block, at.USERS] += 1


@inline_never
def unlink(state: Any, e: int, block: int) -> None:
    """Take a block out of the list of those without users."""
    older, newer = state.resident[e, block, at.OLDER], state.resident[e, block, at.NEWER]
    if older < 0:
        state.engine[e, at.OLDEST] = newer
    else:
        state.resident[e, older, at.NEWER] = newer
    if newer < 0:
        state.engine[e, at.NEWEST] = older
    else:
        state.resident[e, newer, at.OLDER] = older


@inline_never
def grow(state: Any, e: int, pool: int, request: int, tokens: int) -> bool:
    """Take the pages that a sequence needs for so many tokens; False where they are not free."""
    private = tokens - state.requests[request, at.REFS] * state.limits[pool, at.UNIT]
    missing = pages_of(state, pool, private) - state.requests[request, at.PAGES]
    if missing > state.engine[e, at.FREE]:
        return False
    if missing > 0:
        state.requests[request, at.PAGES] += missing
        state.engine[e, at.FREE] -= missing
        # evict until the blocks that stay fit in free pages
        while state.engine[e, at.IDLE] > state.engine[e, at.FREE]:
            oldest = state.engine[e, at.OLDEST]
            unlink(state, e, oldest)
            # -1: the engine does not have it any more
            state.resident[e, oldest, at.USERS] = -1
            state.engine[e, at.IDLE] -= pages_of(state, pool, state.limits[pool, at.UNIT])
    state.engine[e, at.LEAST_FREE] = min(state.engine[e, at.LEAST_FREE], state.engine[e, at.FREE])
    return True


@inline_never
def keep(state: Any, e: int, pool: int, request: int) -> None:
    """Leave the blocks of a prompt that is whole to others, and join those that its engine has already."""
    if state.limits[pool, at.ROLE] == at.DECODE:
        return
    pages = pages_of(state, pool, state.limits[pool, at.UNIT])
    while state.requests[request, at.REFS] < state.requests[request, at.BLOCKED]:
        block = state.contents[state.requests[request, at.CONTENT] + state.requests[request, at.REFS]]
        # the first to compute a block gives its own pages to it; others free theirs
        if state.resident[e, block, at.USERS] < 0:
            state.resident[e, block, at.USERS] = 1
        else:
            use(state, e, pool, block)
            state.engine[e, at.FREE] += pages
        state.requests[request, at.PAGES] -= pages
        state.requests[request, at.REFS] += 1


@inline_never
def release(state: Any, e: int, pool: int, request: int) -> None:
    """Free the pages of a request; blocks that it alone used stay in free pages."""
    state.engine[e, at.FREE] += state.requests[request, at.PAGES]
    state.requests[request, at.PAGES] = 0
    while state.requests[request, at.REFS] > 0:
        # the last block first: it is older than those before it, and evicted sooner
        state.requests[request, at.REFS] -= 1
        block = state.contents[state.requests[request, at.CONTENT] + state.requests[request, at.REFS]]
        state.resident[e, block, at.USERS] -= 1
        if state.resident[e, block, at.USERS] == 0:
            append_idle(state, e, pool, block)


@inline_never
def append_idle(state: Any, e: int, pool: int, block: int) -> None:
    """Put a block that lost its last user at the end of the list of those without any."""
    newest, pages = state.engine[e, at.NEWEST], pages_of(state, pool, state.limits[pool, at.UNIT])
    state.resident[e, block, at.OLDER], state.resident[e, block, at.NEWER] = newest, -1
    if newest < 0:
        state.engine[e, at.OLDEST] = block
    else:
        state.resident[e, newest, at.NEWER] = block
    state.engine[e, at.NEWEST] = block
    state.engine[e, at.FREE] += pages
    state.engine[e, at.IDLE] += pages
