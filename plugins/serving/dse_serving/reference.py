"""The reference of a serving deployment: one SimPy process an engine, requests as objects; written for readability.

`dse_serving.compiled` has the same semantics and equal times of every request. What happens at one instant has an
order, so that ties are decided alike: steps end, then transfers end, then requests are given to engines in the order
of their numbers, then idle engines begin their next step (`Phase`).
"""

from __future__ import annotations

import itertools
from collections import OrderedDict, deque
from collections.abc import Generator
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
import simpy
from numpy.typing import NDArray
from simpy.events import EventPriority

import dse_serving.columns as at
from dse_serving.compiled import State, delay_of_step, draw
from dse_serving.deployment import Deployment
from dse_serving.durations import both_attend, decode_seconds, most_of_a_rank, prompt_seconds
from dse_serving.traffic import Traffic

Floats = NDArray[np.float64]


class Phase(IntEnum):
    """Order of what happens at one instant."""

    ENDS = 1
    TRANSFERS = 2
    REQUESTS = 3
    BEGINS = 4


class Signal(simpy.Event):
    """An event that happens after a delay, in its phase of that instant."""

    def fire(self, phase: Phase, delay: float = 0.0, place: int = 0) -> Signal:
        """Schedule it, once; in the order of places in the last phase."""
        if self._value is simpy.events.PENDING:
            self._ok, self._value = True, None
            self.env.schedule(self, EventPriority(phase + place), delay)
        return self


@dataclass
class Request:
    """A request and how far it is. cached: tokens whose keys and values are there; target: that precede the next.

    contents: blocks of its prompt, of which it refers to the first `refs`; blocks: pages of its own.
    """

    number: int
    input: int
    output: int
    prefix: int
    times: Floats
    cached: int = 0
    generated: int = 0
    blocks: int = 0
    rounds: int = 0
    preemptions: int = 0
    target: int = 0
    contents: tuple[int, ...] = ()
    refs: int = 0

    @property
    def generates(self) -> bool:
        """Tell whether all is there that precedes its next token."""
        return self.cached >= self.target


@dataclass(frozen=True)
class Rules:
    """Limits and rates of an engine, by the columns of `dse_serving.columns`, and its step times."""

    limits: NDArray[np.int64]
    rates: Floats
    state: State
    pool: int

    def seconds(self, generating: list[Request], chunks: dict[int, int], prompts: list[Request]) -> float:
        """Time of a step [s] of sequences that generate and of prompts with their chunks by number."""
        drafts, ranks = int(self.limits[at.DRAFTS]), int(self.limits[at.RANKS])
        scores = 0.0
        for request in prompts:
            ends = (request.cached + chunks[request.number], request.cached)
            scores += _span(*(prompt_seconds(self.state.prompt, self.pool, end) for end in ends))
        count, tokens = len(generating), sum(chunks[request.number] for request in prompts)
        generated, largest = count * (1 + drafts), max(chunks.values(), default=0)
        most = -(-generated // ranks) + most_of_a_rank(len(prompts), tokens, largest, ranks)
        total = self._at(self.state.linear, most, not prompts)
        total += self._at(self.state.experts, -(-(generated + tokens) // ranks), not prompts)
        total += float(self.state.head[self.pool, -(-(count + len(prompts)) // ranks)])
        attention = 0.0
        if generating:
            context = max(1.0, sum(request.cached for request in generating) / count)
            attention = decode_seconds(self.state.decode, self.pool, int(not prompts), -(-count // ranks), context)
            total += drafts * self.rates[at.DRAFT]
        shared = -(-len(prompts) // ranks) / max(len(prompts), 1)
        total += both_attend(self.state.rates, self.pool, attention, scores * shared)
        if prompts:
            total = max(total, self.rates[at.LAUNCHED])
        host = self.rates[at.HOST] + self.rates[at.HOST_SEQUENCE] * (count + len(prompts))
        return float(max(total, host) if self.rates[at.OVERLAPPED] else total + host)

    def _at(self, table: Floats, tokens: int, plain: bool) -> float:
        """Time by tokens of a rank [s]; plain: of a step without prompts."""
        return float(table[self.pool, int(plain), min(tokens, table.shape[2] - 1)])

    def blocks(self, tokens: int) -> int:
        """Pages for so many tokens."""
        return -(-tokens // int(self.limits[at.BLOCK]))

    def tokens_written(self, request: Request) -> int:
        """Tokens whose keys and values a step that generates may write."""
        most = request.input + request.output - 1
        return min(request.cached + 1 + int(self.limits[at.DRAFTS]), most)

    def tokens_at_entry(self, request: Request) -> int:
        """Tokens that a request takes pages for when it enters."""
        left = request.output - request.generated
        reserved = request.target + -(-int(self.limits[at.RESERVED]) * left // 1000)
        return max(reserved, self.tokens_written(request))

    def tokens_there(self, request: Request, hits: int) -> int:
        """Tokens of a request that enters that need not be computed: that are there, or found in so many blocks."""
        return max(request.cached, request.prefix, hits * self.unit)

    @property
    def unit(self) -> int:
        """Tokens of a block of a prompt."""
        return int(self.limits[at.UNIT])


def _span(end: float, start: float) -> float:
    return end - start


@dataclass
class Pages:
    """Pages of keys and values of an engine. free: those that no request uses; users: requests that refer to each block
    of a prompt that is there; idle: blocks without any, in free pages, from the one used longest ago.
    """

    rules: Rules
    free: int
    users: dict[int, int] = field(default_factory=dict)
    idle: OrderedDict[int, None] = field(default_factory=OrderedDict)

    @property
    def of_block(self) -> int:
        """Pages of a block."""
        return self.rules.blocks(self.rules.unit)

    def hits(self, request: Request) -> tuple[int, ...]:
        """Blocks at the start of a prompt that are there; a token is left to compute."""
        if not request.contents or self.rules.limits[at.ROLE] == at.DECODE:
            return ()
        possible = request.contents[: (request.input - 1) // self.rules.unit]
        return tuple(itertools.takewhile(self.users.__contains__, possible))

    def need(self, request: Request, hits: tuple[int, ...], tokens: int) -> int:
        """Free pages that a request takes when it enters with these blocks."""
        idle = sum(block in self.idle for block in hits)
        return self.rules.blocks(max(0, tokens - len(hits) * self.rules.unit)) + idle * self.of_block

    def use(self, block: int) -> None:
        """Count one more user of a block that is there."""
        if block in self.idle:
            del self.idle[block]
            self.free -= self.of_block
        self.users[block] += 1

    def grow(self, request: Request, tokens: int) -> bool:
        """Take pages for so many tokens, of the idle blocks used longest ago last; False where they are not free."""
        more = self.rules.blocks(max(0, tokens - request.refs * self.rules.unit)) - request.blocks
        if more > self.free:
            return False
        request.blocks += max(more, 0)
        self.free -= max(more, 0)
        while len(self.idle) * self.of_block > self.free:
            del self.users[self.idle.popitem(last=False)[0]]
        return True

    def keep(self, request: Request) -> None:
        """Leave the blocks of a prompt that is whole to others, and join those that are there already."""
        if self.rules.limits[at.ROLE] == at.DECODE:
            return
        for block in request.contents[request.refs :]:
            if block in self.users:
                self.use(block)
                self.free += self.of_block
            else:
                self.users[block] = 1
            request.blocks -= self.of_block
        request.refs = len(request.contents)

    def release(self, request: Request) -> None:
        """Free the pages of a request; blocks that it alone used stay in free pages."""
        self.free += request.blocks
        request.blocks = 0
        for block in reversed(request.contents[: request.refs]):
            self.users[block] -= 1
            if not self.users[block]:
                self.idle[block] = None
                self.free += self.of_block
        request.refs = 0


@dataclass
class Engine:
    """An engine, or one batch of its pipeline, whose `first` is at another place: requests that wait and sequences that
    it has, in the order in which they came.
    """

    place: int
    rules: Rules
    cluster: Cluster
    pages: Pages
    first: int
    waiting: deque[Request] = field(default_factory=deque)
    running: list[Request] = field(default_factory=list)
    sends: deque[Request] = field(default_factory=deque)
    outstanding: int = 0
    sending_until: float = 0.0
    idle: Signal | None = None
    held: int = 0

    def work(self) -> Generator[Any, Any, None]:
        """Begin one step after the other, and wait where there is nothing to compute."""
        env = self.cluster.env
        while True:
            generating, chunks = self.compose()
            if not generating and not chunks:
                self.idle = Signal(env)
                yield self.idle
                self.idle = None
                continue
            prompts = [request for request in self.running if request.number in chunks]
            stages, seconds = int(self.rules.limits[at.STAGES]), self.rules.seconds(generating, chunks, prompts)
            yield env.timeout(delay_of_step(self.rules.state.lanes, self.first, stages, seconds, env.now))
            self.finish(generating, chunks)
            yield Signal(env).fire(Phase.BEGINS, place=self.place)

    def wake(self) -> None:
        """Let it look for work when all else of this instant has happened."""
        if self.idle is not None:
            self.idle.fire(Phase.BEGINS, place=self.place)

    def compose(self) -> tuple[list[Request], dict[int, int]]:
        """Sequences that generate in the next step, and chunks of prompts by number."""
        limits = self.rules.limits
        if limits[at.PREFILL_FIRST]:
            arrived, chunks = self.prefill(int(limits[at.TOKENS]), enter=True)
            return (arrived, chunks) if arrived or chunks else (self.generate()[0], {})
        if self.holds_prompts():
            return self.generate()[0], {}
        generating, preempted = self.generate()
        left = max(0, int(limits[at.TOKENS]) - len(generating) * (1 + int(limits[at.DRAFTS])))
        arrived, chunks = self.prefill(left, enter=not preempted)
        return generating + arrived, chunks

    def holds_prompts(self) -> bool:
        """Tell whether prompts that wait are too few for all ranks, and have not waited too long; count the steps."""
        limits, ranks = self.rules.limits, int(self.rules.limits[at.RANKS])
        busy = len(self.running) >= ranks and all(request.generates for request in self.running)
        holds = busy and 0 < len(self.waiting) < ranks and self.held < limits[at.GATHERED]
        self.held = self.held + 1 if holds else 0
        return holds

    def generate(self) -> tuple[list[Request], bool]:
        """Sequences that generate, with pages for their tokens; the last ones are preempted where pages are short."""
        generating, preempted = [], False
        for request in list(self.running):
            if request not in self.running or not request.generates:
                continue
            while request in self.running and not self.pages.grow(request, self.rules.tokens_written(request)):
                self.preempt()
                preempted = True
            if request in self.running:
                generating.append(request)
        return generating, preempted

    def preempt(self) -> None:
        """Put the sequence that came last back to the front of the queue, to be computed again."""
        request = self.running.pop()
        self.pages.release(request)
        request.cached = 0
        request.target = request.input + request.generated
        request.preemptions += 1
        self.waiting.appendleft(request)

    def prefill(self, left: int, *, enter: bool) -> tuple[list[Request], dict[int, int]]:
        """Chunks of prompts within `left` tokens; entering requests whose keys and values have come generate."""
        arrived, chunks = [], {}
        for request in self.running:
            if not request.generates and left > 0:
                chunks[request.number] = min(request.target - request.cached, left)
                left -= chunks[request.number]
        while enter and self.admits(left):
            request = self.admit()
            if request.generates:
                arrived.append(request)
                left -= 1 + int(self.rules.limits[at.DRAFTS])
            else:
                chunks[request.number] = min(request.target - request.cached, left)
                left -= chunks[request.number]
        return arrived, chunks

    def admits(self, left: int) -> bool:
        """Tell whether the first request that waits may enter."""
        limits = self.rules.limits
        if not self.waiting or len(self.running) >= limits[at.SEQUENCES]:
            return False
        request = self.waiting[0]
        hits = self.pages.hits(request)
        need = request.target - self.rules.tokens_there(request, len(hits))
        if need > 0 and (left <= 0 or (need > left and not limits[at.CHUNKED])):
            return False
        spare = int(limits[at.KEPT_FREE]) if self.running else 0
        return self.pages.need(request, hits, self.rules.tokens_at_entry(request)) + spare <= self.pages.free

    def admit(self) -> Request:
        """Let the first request that waits in."""
        request = self.waiting.popleft()
        hits = self.pages.hits(request)
        for block in hits:
            self.pages.use(block)
        request.refs = len(hits)
        self.pages.grow(request, self.rules.tokens_at_entry(request))
        request.cached = self.rules.tokens_there(request, len(hits))
        self.running.append(request)
        self._note(request, at.ADMITTED)
        if self.rules.limits[at.ROLE] == at.DECODE:
            self._note(request, at.FIRST)
        return request

    def _note(self, request: Request, column: int) -> None:
        if request.times[column] < 0:
            request.times[column] = self.cluster.env.now

    def finish(self, generating: list[Request], chunks: dict[int, int]) -> None:
        """Give each sequence its tokens when the step ends."""
        finished = 0
        for request in list(self.running):
            tokens = (
                self._generated_tokens(request) if request in generating else self._computed_tokens(request, chunks)
            )
            request.generated += tokens
            if tokens and self.rules.limits[at.ROLE] == at.BOTH:
                self._note(request, at.FIRST)
            if request.generated >= request.output:
                self._leave(request)
                finished += 1
            elif tokens and self.rules.limits[at.ROLE] == at.PREFILL:
                self.send(request)
        self.cluster.follow(finished)

    def _generated_tokens(self, request: Request) -> int:
        """Tokens of a sequence that generated: one, and the drafts that are accepted."""
        accepted, rate = 0, float(self.rules.rates[at.ACCEPTANCE])
        if self.rules.limits[at.DRAFTS]:
            drawn, chance = draw(self.cluster.seed, request.number, request.rounds), rate
            while accepted < self.rules.limits[at.DRAFTS] and drawn < chance:
                accepted, chance = accepted + 1, chance * rate
        tokens = min(1 + accepted, request.output - request.generated)
        request.rounds += 1
        request.cached += tokens
        return tokens

    def _computed_tokens(self, request: Request, chunks: dict[int, int]) -> int:
        """One token of a prompt that is whole; none of others."""
        if request.number not in chunks:
            return 0
        request.cached += chunks[request.number]
        if request.generates:
            self.pages.keep(request)
        return int(request.generates)

    def _leave(self, request: Request) -> None:
        self.running.remove(request)
        self.pages.release(request)
        self.outstanding -= 1
        request.times[at.FINISH] = self.cluster.env.now
        self._note(request, at.FIRST)

    def send(self, request: Request) -> None:
        """Send keys and values behind those that are under way; their pages are free when they have arrived."""
        rates, now = self.rules.rates, self.cluster.env.now
        self.running.remove(request)
        share = float(rates[at.LAST]) if rates[at.BESIDE] else 1.0
        moved = float(rates[at.MOVED_TOKEN]) * share * request.cached + float(rates[at.MOVED_LATENCY])
        delay = max(0.0, self.sending_until - now) + moved
        self.sending_until = request.times[at.MOVED] = now + delay
        request.times[at.SENT] = now
        self.sends.append(request)
        arrival = Signal(self.cluster.env).fire(Phase.TRANSFERS, delay)
        assert arrival.callbacks is not None
        arrival.callbacks.append(lambda _: self.cluster.receive())


class Cluster:
    """All engines, the front end that reads requests, and the routes between them."""

    def __init__(self, deployment: Deployment, traffic: Traffic, seed: int = 0) -> None:
        self.env, self.seed, self.deployment = simpy.Environment(), seed, deployment
        state = deployment.state(traffic)
        self.requests = [
            Request(
                number,
                int(row[at.INPUT]),
                int(row[at.OUTPUT]),
                int(row[at.PREFIX]),
                times,
                target=int(row[at.INPUT]),
                contents=tuple(state.contents[row[at.CONTENT] : row[at.CONTENT] + row[at.BLOCKED]].tolist()),
            )
            for number, (row, times) in enumerate(zip(state.requests, state.moments, strict=True))
        ]
        rules = [Rules(state.limits[pool], state.rates[pool], state, pool) for pool in range(2)]
        counts = [pool.batches for pool in deployment.pools]
        places = [(pool, place) for pool, count in enumerate(counts) for place in range(count)]
        self.engines = [
            Engine(
                row,
                rules[pool],
                self,
                Pages(rules[pool], int(rules[pool].limits[at.TOTAL])),
                row - place % deployment.pools[pool].stages,
            )
            for row, (pool, place) in enumerate(places)
        ]
        plan = deployment.pools[0].scheduler
        self.split, self.request_s, self.latency_s = counts[0], float(plan.request_s), float(plan.latency_s)
        self.coming, self.entering, self.turns = traffic.num_timed, 0, [0, 0]

    def run(self) -> Floats:
        """Serve all requests; times of each, by the columns of `dse_serving.columns` [requests, columns]."""
        for engine in self.engines:
            self.env.process(engine.work())
        for request in self.requests[: self.coming]:
            self.arrive(request, float(request.times[at.ARRIVAL]), 0.0)
        self.env.run()
        return np.array([request.times for request in self.requests])

    def arrive(self, request: Request, arrival: float, now: float) -> None:
        """Let a request come to the front end, which reads one after the other."""
        before = arrival
        if request.number:
            before = float(self.requests[request.number - 1].times[at.READY]) - self.latency_s
        delay = max(0.0, before - arrival) + self.request_s + self.latency_s
        request.times[at.ARRIVAL], request.times[at.READY] = arrival, arrival + delay
        ready = Signal(self.env).fire(Phase.REQUESTS, delay if now == arrival else float(request.times[at.READY]) - now)
        assert ready.callbacks is not None
        ready.callbacks.append(lambda _: self.enter())

    def follow(self, finished: int) -> None:
        """Let a request follow each one that is finished, of a closed loop."""
        for request in self.requests[self.coming : self.coming + finished]:
            self.coming += 1
            self.arrive(request, self.env.now, self.env.now)

    def enter(self) -> None:
        """Give the requests that are read to engines, in the order of their numbers."""
        while self.entering < self.coming and self.requests[self.entering].times[at.READY] <= self.env.now:
            self.give(self.requests[self.entering], self.engines[: self.split], 0)
            self.entering += 1

    def receive(self) -> None:
        """Give prompts whose keys and values have come to engines that generate."""
        for engine in self.engines[: self.split]:
            while engine.sends and engine.sends[0].times[at.MOVED] <= self.env.now:
                request = engine.sends.popleft()
                engine.pages.release(request)
                engine.outstanding -= 1
                engine.wake()
                self.give(request, self.engines[self.split :], 1)

    def give(self, request: Request, engines: list[Engine], pool: int) -> None:
        """Give a request to one of some engines."""
        chosen = engines[self.turns[pool] % len(engines)]
        self.turns[pool] += 1
        if self.deployment.routing == "fewest_requests":
            chosen = min(engines, key=lambda engine: (engine.outstanding, engine.place))
        chosen.outstanding += 1
        chosen.waiting.append(request)
        chosen.wake()
