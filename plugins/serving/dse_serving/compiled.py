"""Compiled loop of a serving deployment: the semantics of `dse_serving.reference`, with equal times of every request.

Time goes from instant to instant. At each, what ends there is ended on every engine (steps, then transfers of keys and
values, which begin when all steps have ended), then requests that arrive are given to engines in the order of their
numbers, then idle engines begin a step. Pages are those of `dse_serving.pages`. Columns of the arrays have names in
`dse_serving.columns`. Row 0 of limits, rates and step times is of the first `split` engines, row 1 of the others. An
engine with a pipeline is as many as it has stages, one for each batch.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import dse_serving.columns as at
from dse_serving import durations, pages, queues, transfers
from simulators.compiled import flat_over, inline_never


class State(NamedTuple):
    """Arrays of a deployment; columns as `dse_serving.columns` has them.

    requests, moments [n, ...], engine [E, ...], running [E, sequences]; contents [...]: blocks of all prompts,
    resident [E, blocks, ...]: those that each engine has; of pools: limits, rates [2, ...], linear, experts [2, 2,
    tokens] (steps with prompts; without), head [2, tokens], decode [2, 2, sequences, contexts], prompt [2, lengths]:
    `dse_serving.step_times`; ends, sending [E]: of the step, and when the links are free [s]; lanes [E, 2]: of a
    pipeline, kept by its first batch: when its first stage is free, and its last one [s]; turns [E]; sums [E, 2]: time
    of steps [s] and tokens generated; log [rows, ...].
    """

    requests: Any
    moments: Any
    engine: Any
    running: Any
    contents: Any
    resident: Any
    limits: Any
    rates: Any
    linear: Any
    experts: Any
    head: Any
    decode: Any
    prompt: Any
    ends: Any
    sending: Any
    lanes: Any
    turns: Any
    sums: Any
    log: Any


@inline_never
def draw(seed: int, request: int, number: int) -> float:
    """A number in [0, 1) of a request and a step: a hash of 31 bits by xorshifts and multiplications."""
    mixed = (seed * 0x9E3779B9 + request * 0x85EBCA6B + number * 0xC2B2AE35) & 0x7FFFFFFF  # 31 bits: products fit in 64
    mixed = ((mixed ^ (mixed >> 15)) * 0x2C1B3C6D) & 0x7FFFFFFF
    mixed = ((mixed ^ (mixed >> 12)) * 0x297A2D39) & 0x7FFFFFFF
    return (mixed ^ (mixed >> 15)) / 2147483648.0


@inline_never
def preempt(state: State, e: int, pool: int) -> int:
    """Put the sequence that was admitted last back to the front of the queue, to be computed again; return it."""
    state.engine[e, at.RUNNING] -= 1
    request = state.running[e, state.engine[e, at.RUNNING]]
    pages.release(state, e, pool, request)
    state.requests[request, at.CACHED] = 0
    # as in vLLM's recomputation: what was generated is now part of the prompt
    state.requests[request, at.TARGET] = state.requests[request, at.INPUT] + state.requests[request, at.GENERATED]
    state.requests[request, at.CHUNK] = at.NOBODY
    state.requests[request, at.PREEMPTIONS] += 1
    state.requests[request, at.NEXT] = state.engine[e, at.HEAD]  # first come, first served
    if state.engine[e, at.WAITING] == 0:
        state.engine[e, at.TAIL] = request
    state.engine[e, at.HEAD] = request
    state.engine[e, at.WAITING] += 1
    state.engine[e, at.SEEN] += 1
    return int(request)


@inline_never
def generate(state: State, e: int, pool: int) -> int:
    """Give each sequence that generates a place in the step; preempt the last ones where pages are short.

    Returns how many generate, or -1 - that where sequences were preempted.
    """
    place, count, preempted = 0, 0, False
    # preemption shortens the list from its end, so its length is read anew each time
    while place < state.engine[e, at.RUNNING]:
        request = state.running[e, place]
        place += 1
        if state.requests[request, at.CACHED] < state.requests[request, at.TARGET]:  # its prompt is not whole
            continue
        stays = True
        while stays and not pages.grow(state, e, pool, request, tokens_written(state, pool, request)):
            # the last one may be the sequence itself, when no other is left to give way
            stays = preempt(state, e, pool) != request
            preempted = True
        if stays:
            state.requests[request, at.CHUNK] = 0
            count += 1
    return -1 - count if preempted else count


@inline_never
def tokens_written(state: State, pool: int, request: int) -> int:
    """Tokens whose keys and values a step of a sequence that generates may write; the last token's are never."""
    most = state.requests[request, at.INPUT] + state.requests[request, at.OUTPUT] - 1
    return int(min(state.requests[request, at.CACHED] + 1 + state.limits[pool, at.DRAFTS], most))


@inline_never
def tokens_at_entry(state: State, pool: int, request: int) -> int:
    """Tokens that a request takes pages for when it enters."""
    left = state.requests[request, at.OUTPUT] - state.requests[request, at.GENERATED]
    tokens = state.requests[request, at.TARGET] + (state.limits[pool, at.RESERVED] * left + 999) // 1000  # rounded up
    return int(max(tokens, tokens_written(state, pool, request)))


@inline_never
def tokens_there(state: State, pool: int, request: int, hits: int) -> int:
    """Tokens of a request that enters that need not be computed: that are there, or hits in so many blocks."""
    ready = max(state.requests[request, at.PREFIX], hits * state.limits[pool, at.UNIT])
    return int(max(state.requests[request, at.CACHED], ready))


@inline_never
def admits(state: State, e: int, pool: int, budget: int) -> bool:
    """Tell whether the first request of the queue may enter: a sequence, tokens and pages are left for it."""
    if state.engine[e, at.SEEN] == 0 or state.engine[e, at.RUNNING] >= state.limits[pool, at.SEQUENCES]:
        return False
    request = state.engine[e, at.HEAD]
    hits = pages.blocks_found(state, e, pool, request)
    need = state.requests[request, at.TARGET] - tokens_there(state, pool, request, hits)
    if need > 0 and (budget <= 0 or (need > budget and state.limits[pool, at.CHUNKED] == 0)):
        return False
    private = tokens_at_entry(state, pool, request) - hits * state.limits[pool, at.UNIT]
    needed = pages.pages_of(state, pool, private) + pages.pages_of_idle(state, e, pool, request, hits)
    # an idle engine would wait for ever for pages that nobody frees
    spare = 0 if state.engine[e, at.RUNNING] == 0 else state.limits[pool, at.KEPT_FREE]
    return bool(needed + spare <= state.engine[e, at.FREE])


@inline_never
def admit(state: State, e: int, pool: int, now: float) -> int:
    """Let the first request of the queue in, with pages for its prompt and what is reserved; return it."""
    request = queues.pop(state, e)
    hits = pages.blocks_found(state, e, pool, request)
    ready = tokens_there(state, pool, request, hits)
    pages.refer(state, e, pool, request, hits)
    pages.grow(state, e, pool, request, tokens_at_entry(state, pool, request))
    state.running[e, state.engine[e, at.RUNNING]] = request
    state.engine[e, at.RUNNING] += 1
    # a preempted request enters again: its first entry counts
    if state.moments[request, at.ADMITTED] < 0.0:
        state.moments[request, at.ADMITTED] = now
        state.requests[request, at.HIT] = ready
    state.requests[request, at.CACHED] = ready  # chunks begin behind what was found
    if state.limits[pool, at.ROLE] == at.DECODE and state.moments[request, at.FIRST] < 0.0:  # after the transfer
        state.moments[request, at.FIRST] = now
    return int(request)


@inline_never
def prefill(state: State, e: int, pool: int, now: float, budget: int) -> int:
    """Give prompts their chunks: sequences that have begun, then those that enter (none where pages are short).
    budget: tokens of a step that each rank has for them.

    Returns the sequences that got one, or whose keys and values had come.
    """
    count, prompts, taken_tokens, may_enter = 0, 0, 0, budget >= 0
    # a negative budget carries two facts: -1 - budget tokens, and nobody enters
    room = budget if may_enter else -1 - budget
    ranks, chunked = state.limits[pool, at.RANKS], state.limits[pool, at.CHUNKED]
    left = durations.tokens_for_prompt(room, prompts, taken_tokens, ranks, chunked)
    for place in range(state.engine[e, at.RUNNING]):
        request = state.running[e, place]
        need = state.requests[request, at.TARGET] - state.requests[request, at.CACHED]
        if need > 0 and left > 0:
            # a prompt that does not fit the budget is cut (chunked prefill)
            state.requests[request, at.CHUNK] = min(need, left)
            taken_tokens += state.requests[request, at.CHUNK]
            prompts += 1
            count += 1
            left = durations.tokens_for_prompt(room, prompts, taken_tokens, ranks, chunked)
    while may_enter and admits(state, e, pool, left):
        request = admit(state, e, pool, now)
        need = state.requests[request, at.TARGET] - state.requests[request, at.CACHED]
        state.requests[request, at.CHUNK] = min(need, left) if need > 0 else 0
        # whose keys and values had come generates at once, and takes as many tokens as one that does
        taken_tokens += state.requests[request, at.CHUNK] if need > 0 else 1 + state.limits[pool, at.DRAFTS]
        prompts += 1 if need > 0 else 0
        count += 1
        left = durations.tokens_for_prompt(room, prompts, taken_tokens, ranks, chunked)
    if count > 0:
        state.engine[e, at.UNREAD_STEPS] = state.limits[pool, at.READS]  # it looks for more after these
    return count


@inline_never
def begin(state: State, e: int, pool: int, now: float) -> int:
    """Choose what the next step of an idle engine computes. Returns how many sequences have a part in it."""
    for place in range(state.engine[e, at.RUNNING]):
        # NOBODY: no part in this step; 0: generates; above: tokens of its prompt
        state.requests[state.running[e, place], at.CHUNK] = at.NOBODY
    queues.read(state, e, pool)
    # SGLang's default: a step has prompts or sequences that generate, never both
    if state.limits[pool, at.PREFILL_FIRST] > 0:
        count = prefill(state, e, pool, now, state.limits[pool, at.TOKENS])  # prompts have all of the budget
        if count > 0:
            return int(count)
        count = generate(state, e, pool)
        return int(count if count >= 0 else -1 - count)
    held = queues.holds_prompts(state, e, pool)  # before `generate`, which may preempt
    count = generate(state, e, pool)
    several = count if count >= 0 else -1 - count
    if held:
        return int(several)
    # the rank with most sequences sets what is left of its budget
    ranks = state.limits[pool, at.RANKS]
    generated = (several * (1 + state.limits[pool, at.DRAFTS]) + ranks - 1) // ranks
    budget = max(0, state.limits[pool, at.TOKENS] - generated)
    if count < 0:  # pages are short: nobody enters
        budget = -1 - budget
    return int(several + prefill(state, e, pool, now, budget))


@inline_never
def accepted_drafts(state: State, pool: int, seed: int, request: int, number: int) -> int:
    """Drafts of a step that are accepted, each with the same chance after the one before."""
    if state.limits[pool, at.DRAFTS] == 0:
        return 0
    # one number decides all drafts: the chance that k are accepted is that of the first, to the k
    drawn, chance, count = draw(seed, request, number), state.rates[pool, at.ACCEPTANCE], 0
    while count < state.limits[pool, at.DRAFTS] and drawn < chance:
        count += 1
        chance *= state.rates[pool, at.ACCEPTANCE]
    return count


@inline_never
def advance(state: State, pool: int, seed: int, request: int, now: float) -> int:
    """Give a sequence the tokens of its part in a step that ends; return how many it generated."""
    chunk = state.requests[request, at.CHUNK]
    if chunk < 0:
        return 0
    tokens = 1
    if chunk == 0:
        tokens += accepted_drafts(state, pool, seed, request, state.requests[request, at.ROUNDS])
        # drafts beyond the end of the answer are thrown away
        tokens = min(tokens, state.requests[request, at.OUTPUT] - state.requests[request, at.GENERATED])
        state.requests[request, at.ROUNDS] += 1
        state.requests[request, at.CACHED] += tokens  # drafts that are rejected leave no keys
    else:
        state.requests[request, at.CACHED] += chunk
        if state.requests[request, at.CACHED] < state.requests[request, at.TARGET]:
            return 0
    state.requests[request, at.GENERATED] += tokens
    if state.moments[request, at.FIRST] < 0.0 and state.limits[pool, at.ROLE] == at.BOTH:
        state.moments[request, at.FIRST] = now
    return tokens


@inline_never
def end(state: State, e: int, pool: int, seed: int, now: float) -> tuple[int, int]:
    """End the step of an engine. Returns the requests that are finished and the tokens that were generated."""
    stay, finished, generated = 0, 0, 0
    for place in range(state.engine[e, at.RUNNING]):
        request = state.running[e, place]
        tokens = advance(state, pool, seed, request, now)
        generated += tokens
        # the prompt is whole: its blocks may serve others with the same prefix
        if tokens > 0 and state.requests[request, at.CHUNK] > 0:
            pages.keep(state, e, pool, request)
        if state.requests[request, at.GENERATED] >= state.requests[request, at.OUTPUT]:
            state.moments[request, at.FINISH] = now
            # an engine of prompts alone may also end the answer: its one token is the first
            if state.moments[request, at.FIRST] < 0.0:
                state.moments[request, at.FIRST] = now
            pages.release(state, e, pool, request)
            state.engine[e, at.OUTSTANDING] -= 1
            finished += 1
        elif tokens > 0 and state.limits[pool, at.ROLE] == at.PREFILL:  # pages stay until the transfer has ended
            hand_over(state, e, request, now)
        else:
            state.running[e, stay] = request
            stay += 1
    state.engine[e, at.RUNNING] = stay
    return finished, generated


@inline_never
def hand_over(state: State, e: int, request: int, now: float) -> None:
    """Note a prompt that is whole, whose keys and values `dispatch` sends once all steps of this instant have ended."""
    state.moments[request, at.SENT] = now
    state.requests[request, at.NEXT] = at.NOBODY
    if state.engine[e, at.SENDING] == at.NOBODY:
        state.engine[e, at.SENDING] = request
    else:
        state.requests[state.engine[e, at.LAST_SENDING], at.NEXT] = request
    state.engine[e, at.LAST_SENDING] = request


@inline_never
def choose(state: State, first: int, last: int) -> int:
    """One of the engines from `first` to before `last` for one more request."""
    chosen = first
    if state.limits[0, at.ROUTING] == at.ROUND_ROBIN:
        # turns are counted at the first engine of a group, of which there may be two
        chosen = first + state.turns[first] % (last - first)
        state.turns[first] += 1
    else:
        for e in range(first + 1, last):
            if state.engine[e, at.OUTSTANDING] < state.engine[chosen, at.OUTSTANDING]:  # of equals the first
                chosen = e
    state.engine[chosen, at.OUTSTANDING] += 1
    return int(chosen)


@inline_never
def give(state: State, last: int, request: int) -> None:
    """Give a request to one of the engines before `last`."""
    chosen = choose(state, 0, last)
    state.requests[request, at.ENGINE] = chosen
    queues.append(state, chosen, request)


@inline_never
def dispatch(state: State, split: int, engines: int, now: float) -> None:
    """Send prompts that are whole, engine after engine, each to an engine that generates."""
    for e in range(split):
        while state.engine[e, at.SENDING] != at.NOBODY:
            request = state.engine[e, at.SENDING]
            state.engine[e, at.SENDING] = state.requests[request, at.NEXT]
            transfers.transfer(state, choose(state, split, engines), split, request, now)


@inline_never
def receive(state: State, split: int, engines: int, now: float) -> None:
    """Let prompts whose keys and values have come wait where they generate, and free their blocks where they were."""
    for e in range(split, engines):
        while state.engine[e, at.SENDING] != at.NOBODY and state.moments[state.engine[e, at.SENDING], at.MOVED] <= now:
            request = state.engine[e, at.SENDING]
            state.engine[e, at.SENDING] = state.requests[request, at.NEXT]
            sender = state.requests[request, at.ENGINE]
            pages.release(state, sender, 0, request)
            state.engine[sender, at.OUTSTANDING] -= 1
            state.requests[request, at.ENGINE] = e
            queues.append(state, e, request)


@inline_never
def next_instant(state: State, entering: int, arriving: int, split: int) -> float:
    """The next time at which a step or transfer ends or a request is ready; infinity where nothing is to come."""
    now = state.moments[entering, at.READY] if entering < arriving else math.inf  # the queue is in order
    for e in range(state.ends.shape[0]):
        now = min(now, state.ends[e])
        if e >= split and state.engine[e, at.SENDING] != at.NOBODY:
            now = min(now, state.moments[state.engine[e, at.SENDING], at.MOVED])
    return now


@inline_never
def arrive(state: State, request: int, now: float) -> None:
    """Let a request come now, which the front end reads after those before it."""
    latency_s = state.rates[0, at.LATENCY]
    request_s = state.rates[0, at.REQUEST] + state.rates[0, at.REQUEST_TOKEN] * state.requests[request, at.INPUT]
    # the front end is one thread: it is free once it has read the request before
    before = state.moments[request - 1, at.READY] - latency_s if request > 0 else now
    state.moments[request, at.ARRIVAL] = now
    state.moments[request, at.READY] = now + (max(0.0, before - now) + request_s + latency_s)


@inline_never
def write_step(state: State, e: int, pool: int, now: float, row: int) -> None:
    """Note a step that begins."""
    state.sums[e, 0] += state.ends[e] - now
    state.engine[e, at.STEPS] = row
    # the log is a sample for pictures: sums go on without it
    if row >= state.log.shape[0]:
        return
    sequences, tokens = 0, 0
    for place in range(state.engine[e, at.RUNNING]):
        chunk = state.requests[state.running[e, place], at.CHUNK]
        sequences += 1 if chunk == 0 else 0
        tokens += max(chunk, 0)
    used = state.limits[pool, at.TOTAL] - state.engine[e, at.FREE]
    state.log[row, at.LOG_ENGINE], state.log[row, at.LOG_START], state.log[row, at.LOG_FINISH] = e, now, state.ends[e]
    state.log[row, at.LOG_GENERATING], state.log[row, at.LOG_PROMPT_TOKENS] = sequences, tokens
    state.log[row, at.LOG_RUNNING], state.log[row, at.LOG_WAITING] = (
        state.engine[e, at.RUNNING],
        state.engine[e, at.WAITING],
    )
    state.log[row, at.LOG_PAGES] = used


@inline_never
def end_steps(state: State, split: int, seed: int, now: float) -> int:
    """End the steps that end now. Returns the requests that are finished."""
    finished = 0
    for e in range(state.ends.shape[0]):
        if state.ends[e] <= now:
            done, tokens = end(state, e, 0 if e < split else 1, seed, now)
            finished += done
            state.sums[e, 1] += tokens
            if state.engine[e, at.STEPS] < state.log.shape[0]:
                state.log[state.engine[e, at.STEPS], at.LOG_GENERATED] = tokens
            state.ends[e] = math.inf  # idle until `begin_steps`
    return finished


@inline_never
def begin_steps(state: State, split: int, now: float, steps: int) -> int:
    """Begin a step on every idle engine that has work. Returns the steps so far."""
    for e in range(state.ends.shape[0]):
        pool = 0 if e < split else 1
        if state.ends[e] == math.inf and begin(state, e, pool, now) > 0:
            stages, begun = state.limits[pool, at.STAGES], 0 if e < split else split
            # batches of a pipeline follow one another in the rows of the first one
            first = e - (e - begun) % stages
            seconds = durations.step_seconds(state, e, pool)
            state.ends[e] = now + durations.delay_of_step(state.lanes, first, stages, seconds, now)
            write_step(state, e, pool, now, steps)
            steps += 1
    return steps


@flat_over(pages, durations, transfers, queues)
def serve(state: State, arrivals: int, split: int, seed: int) -> int:
    """Serve all requests; the first `arrivals` come by their times, each other one when one before it is finished.

    Engines from `split` on generate from keys and values that the others send; with `split` of all engines each does
    both. Times and tokens are written to the arrays, steps to the log as long as it has rows. Returns how many steps
    there were, or -1 where requests are left that no engine can serve.
    """
    total, engines = state.requests.shape[0], state.engine.shape[0]
    entering, coming, finished, steps = 0, arrivals, 0, 0
    for request in range(arrivals):
        arrive(state, request, state.moments[request, at.ARRIVAL])
    while finished < total:
        now = next_instant(state, entering, coming, split)
        if now == math.inf:  # requests are left, and nothing is to come
            return -1
        ended = end_steps(state, split, seed, now)
        finished += ended
        # after all steps of the instant have ended, so that the order of engines does not matter
        if split < engines:
            dispatch(state, split, engines, now)
            receive(state, split, engines, now)
        # a closed loop: each request that ends lets the next one come
        while ended > 0 and coming < total:
            arrive(state, coming, now)
            coming += 1
            ended -= 1
        while entering < coming and state.moments[entering, at.READY] <= now:
            state.moments[entering, at.BUSY] = durations.busy_seconds(state, now)
            give(state, split, entering)
            entering += 1
        steps = begin_steps(state, split, now, steps)
    return steps
