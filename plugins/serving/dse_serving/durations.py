"""Times of the steps of an engine from the tables of `dse_serving.step_times`; parts of the compiled loop."""

from __future__ import annotations

import math
from typing import Any

import dse_serving.columns as at
from simulators.compiled import inline_never


@inline_never
def decode_seconds(table: Any, pool: int, kind: int, sequences: int, context: float) -> float:
    """Attention of `sequences` with `context` tokens each on average [s]; kind: of steps with prompts (0), without."""
    knot = 0
    # knots are powers of two; beyond the last one the line is extended
    while knot + 2 < table.shape[3] and context >= 2.0 ** (knot + 1):
        knot += 1
    low = 2.0**knot
    place = (context - low) / low
    below, above = table[pool, kind, sequences, knot], table[pool, kind, sequences, knot + 1]
    return float(below + place * (above - below))


@inline_never
def prompt_seconds(table: Any, pool: int, tokens: int) -> float:
    """Attention of a whole prompt of `tokens` [s], from its time a token at tabled lengths."""
    if tokens <= 0:
        return 0.0
    mantissa, exponent = math.frexp(float(tokens))
    # mantissa in [0.5, 1): twice it less one is the place within the octave
    place = (exponent - 1) * at.PER_OCTAVE + (2.0 * mantissa - 1.0) * at.PER_OCTAVE
    knot = min(int(place), table.shape[1] - 2)
    share = place - knot
    return float(tokens * (table[pool, knot] + share * (table[pool, knot + 1] - table[pool, knot])))


@inline_never
def both_attend(rates: Any, pool: int, generating: float, prompts: float) -> float:
    """Attention of sequences that generate and of prompts [s], one after the other or in one kernel."""
    if rates[pool, at.BESIDE_PROMPTS] == 0.0:
        return generating + prompts
    # one draws bandwidth while the other multiplies; each waits where both need the same
    moved, computed = rates[pool, at.PROMPTS_DRAW], rates[pool, at.GENERATING_TAKES]
    return float(max(generating + moved * prompts, prompts + computed * generating))


@inline_never
def most_of_a_rank(prompts: int, tokens: int, largest: int, ranks: int) -> int:
    """Tokens of prompts of the rank that has most: no rank shares a prompt, and each has as many prompts as it can."""
    if prompts == 0:
        return 0
    each = (prompts + ranks - 1) // ranks
    return max(largest, (each * tokens + prompts - 1) // prompts)


@inline_never
def tokens_for_prompt(room: int, prompts: int, tokens: int, ranks: int, chunked: int) -> int:
    """Tokens that one more prompt of a step may have beside so many prompts and tokens, if each rank has `room`.

    No rank shares a prompt. One that may be cut fills what any rank has left; one that may not has to fit on a rank.
    """
    if chunked > 0:
        return min(room, ranks * room - tokens)
    each = (prompts + ranks) // ranks
    # of the mean length, a rank has `each` of them
    return min(room, room * (prompts + 1) // each - tokens)


@inline_never
def step_seconds(state: Any, e: int, pool: int) -> float:
    """Time of a step of the sequences that have a part in it [s]."""
    prompts, tokens, largest, sequences, context, scores = 0, 0, 0, 0, 0, 0.0
    for place in range(state.engine[e, at.RUNNING]):
        request = state.running[e, place]
        chunk = state.requests[request, at.CHUNK]
        if chunk == 0:
            sequences += 1
            context += state.requests[request, at.CACHED]
        elif chunk > 0:
            cached = state.requests[request, at.CACHED]
            # attention is causal: a chunk takes what the whole takes beyond what is cached
            scores += prompt_seconds(state.prompt, pool, cached + chunk) - prompt_seconds(state.prompt, pool, cached)
            tokens += chunk
            largest = max(largest, chunk)
            prompts += 1
    ranks, drafts = state.limits[pool, at.RANKS], state.limits[pool, at.DRAFTS]
    per_rank = (sequences + ranks - 1) // ranks
    generated, kind = sequences * (1 + drafts), 1 if prompts == 0 else 0
    # a rank computes no more than its budget: prompts beyond it were cut
    of_prompts = min(most_of_a_rank(prompts, tokens, largest, ranks), state.limits[pool, at.TOKENS])
    most = (generated + ranks - 1) // ranks + of_prompts
    # layers wait for the rank with most tokens; experts get the tokens of all ranks
    row, mean = min(most, state.linear.shape[2] - 1), (generated + tokens + ranks - 1) // ranks
    seconds = state.linear[pool, kind, row] + state.experts[pool, kind, min(mean, state.experts.shape[2] - 1)]
    # the output layer checks every draft; of a prompt it has the last token alone
    logits = min((generated + prompts + ranks - 1) // ranks, state.head.shape[1] - 1)
    seconds += state.head[pool, logits]
    attention = 0.0
    if sequences > 0:
        attention = decode_seconds(state.decode, pool, kind, per_rank, max(1.0, context / sequences))
        seconds += drafts * state.rates[pool, at.DRAFT]
    shared = (prompts + ranks - 1) // ranks / max(prompts, 1)
    seconds += both_attend(state.rates, pool, attention, scores * shared)
    if prompts > 0 and most > state.limits[pool, at.REPLAYED]:
        # no CUDA graph has the step: the host has to launch each kernel
        seconds = max(seconds, state.rates[pool, at.LAUNCHED])
    host = state.rates[pool, at.HOST] + state.rates[pool, at.HOST_SEQUENCE] * (sequences + prompts)
    # an overlapped scheduler prepares the next step while the GPU computes
    return float(max(seconds, host) if state.rates[pool, at.OVERLAPPED] > 0.0 else seconds + host)


@inline_never
def delay_of_step(lanes: Any, first: int, stages: int, seconds: float, now: float) -> float:
    """Time [s] until a step that begins now has gone through all stages of a pipeline, `seconds` each; written to row
    `first` of lanes. Exact for equal stages: the longest path of such a flow shop turns at its first or last one.
    """
    wait = max(0.0, lanes[first, 0] - now)
    delay = max(wait + stages * seconds, max(0.0, lanes[first, 1] - now) + seconds)
    lanes[first, 0], lanes[first, 1] = now + (wait + seconds), now + delay  # first and last stage free
    return float(delay)


@inline_never
def busy_seconds(state: Any, now: float) -> float:
    """Time that all engines have computed until now [s]."""
    total = 0.0
    for e in range(state.ends.shape[0]):
        total += state.sums[e, 0]
        # a step that runs was counted whole when it began
        if state.ends[e] != math.inf:
            total -= state.ends[e] - now
    return total
