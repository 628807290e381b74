"""The reference of a serving deployment: one SimPy process an engine, requests as objects; written for readability.

`dse_serving.compiled` has the same semantics and equal times of every request. What happens at one instant has an
order, so that ties are decided alike: steps end, then transfers begin and end, then requests are given to engines in
the order of their numbers, then idle engines begin their next step (`Phase`).
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Generator
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
import simpy
from numpy.typing import NDArray
from simpy.events import EventPriority

import dse_serving.columns as at
from dse_serving.compiled import draw
from dse_serving.deployment import Deployment
from dse_serving.durations import delay_of_step, tokens_for_prompt
from dse_serving.sequences import Pages, Request, Rules
from dse_serving.traffic import Traffic
from dse_serving.transfers import delay_of_transfer

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
        # an engine may be woken by several events of one instant
        if self._value is simpy.events.PENDING:
            self._ok, self._value = True, None
            # SimPy orders events of one time by their priority
            self.env.schedule(self, EventPriority(phase + place), delay)
        return self


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
    links_free: Floats = field(default_factory=lambda: np.zeros(1))
    coming: list[tuple[Request, Engine]] = field(default_factory=list)
    idle: Signal | None = None
    held: int = 0
    seen: int = 0
    unread_steps: int = 0
    busy_s: float = 0.0
    ends_s: float | None = None

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
            # the order of running sequences decides the order of the sum, and so its last digit
            prompts = [request for request in self.running if request.number in chunks]
            stages, seconds = int(self.rules.limits[at.STAGES]), self.rules.seconds(generating, chunks, prompts)
            delay = delay_of_step(self.rules.state.lanes, self.first, stages, seconds, env.now)
            self.ends_s = env.now + delay
            self.busy_s += self.ends_s - env.now
            yield env.timeout(delay)
            self.ends_s = None
            self.finish(generating, chunks)
            # the next step begins after all else of this instant, engines in the order of their places
            yield Signal(env).fire(Phase.BEGINS, place=self.place)

    def wake(self) -> None:
        """Let it look for work when all else of this instant has happened."""
        if self.idle is not None:
            self.idle.fire(Phase.BEGINS, place=self.place)

    def compose(self) -> tuple[list[Request], dict[int, int]]:
        """Sequences that generate in the next step, and chunks of prompts by number."""
        limits = self.rules.limits
        self.read()
        if limits[at.PREFILL_FIRST]:
            arrived, chunks = self.prefill(int(limits[at.TOKENS]), enter=True)
            # steps of prompts alone, as SGLang has them by default
            return (arrived, chunks) if arrived or chunks else (self.generate()[0], {})
        if self.holds_prompts():
            return self.generate()[0], {}
        # sequences that generate come first, prompts get what is left of the budget
        generating, preempted = self.generate()
        busiest = -(-len(generating) * (1 + int(limits[at.DRAFTS])) // int(limits[at.RANKS]))
        arrived, chunks = self.prefill(max(0, int(limits[at.TOKENS]) - busiest), enter=not preempted)
        return generating + arrived, chunks

    def read(self) -> None:
        """Read the requests that came, unless an engine that generates looks for them later."""
        if not self.running or self.unread_steps + 1 >= self.rules.limits[at.READS]:
            self.seen, self.unread_steps = len(self.waiting), 0
        else:
            self.unread_steps += 1

    def holds_prompts(self) -> bool:
        """Tell whether prompts that wait are too few for all ranks, or for a step, and have not waited too long; count
        the steps.
        """
        limits, ranks = self.rules.limits, int(self.rules.limits[at.RANKS])
        holds = 0 < self.seen < ranks <= len(self.running) and self.held < limits[at.GATHERED]
        if self.seen and self.running and self.held < limits[at.WAITED]:
            left = int(limits[at.SEQUENCES]) - len(self.running)
            of_prompts = sum(request.target for request in list(self.waiting)[: min(self.seen, max(left, 0))])
            generated = len(self.running) * (1 + int(limits[at.DRAFTS]))
            # prompts that cannot enter do not wait for others
            holds = left > 0 and generated + of_prompts < limits[at.WAITED_TOKENS]
        holds = holds and all(request.generates for request in self.running)
        # counted in steps, as `timeout_iters` is
        self.held = self.held + 1 if holds else 0
        return holds

    def generate(self) -> tuple[list[Request], bool]:
        """Sequences that generate, with pages for their tokens; the last ones are preempted where pages are short."""
        generating, preempted = [], False
        for request in list(self.running):
            # it may have been preempted by one before it in this loop
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
        # the last one to enter has the least to lose
        request = self.running.pop()
        self.pages.release(request)
        request.cached = 0
        # what was generated is computed again as a part of the prompt
        request.target = request.input + request.generated
        request.preemptions += 1
        self.waiting.appendleft(request)
        self.seen += 1

    def prefill(self, room: int, *, enter: bool) -> tuple[list[Request], dict[int, int]]:
        """Chunks of prompts within `room` tokens of each rank; requests that enter with keys and values generate."""
        arrived: list[Request] = []
        chunks: dict[int, int] = {}

        def left() -> int:
            tokens = sum(chunks.values()) + len(arrived) * (1 + int(self.rules.limits[at.DRAFTS]))
            ranks, chunked = (int(self.rules.limits[column]) for column in (at.RANKS, at.CHUNKED))
            return int(tokens_for_prompt(room, len(chunks), tokens, ranks, chunked))

        for request in self.running:
            # chunks of prompts that have begun come before new ones
            if not request.generates and left() > 0:
                chunks[request.number] = min(request.target - request.cached, left())
        while enter and self.admits(left()):
            request = self.admit()
            if request.generates:
                arrived.append(request)
            else:
                chunks[request.number] = min(request.target - request.cached, left())
        if arrived or chunks:
            # it looks for more after these
            self.unread_steps = int(self.rules.limits[at.READS])
        return arrived, chunks

    def admits(self, left: int) -> bool:
        """Tell whether the first request that waits may enter."""
        limits = self.rules.limits
        if not self.seen or len(self.running) >= limits[at.SEQUENCES]:
            return False
        request = self.waiting[0]
        hits = self.pages.hits(request)
        need = request.target - self.rules.tokens_there(request, len(hits))
        # keys and values that have come need no tokens of the budget
        if need > 0 and (left <= 0 or (need > left and not limits[at.CHUNKED])):
            return False
        # an idle engine would wait for ever for pages that nobody frees
        spare = int(limits[at.KEPT_FREE]) if self.running else 0
        return self.pages.need(request, hits, self.rules.tokens_at_entry(request)) + spare <= self.pages.free

    def admit(self) -> Request:
        """Let the first request that waits in."""
        request = self.waiting.popleft()
        self.seen -= 1
        hits = self.pages.hits(request)
        for block in hits:
            self.pages.use(block)
        request.refs = len(hits)
        self.pages.grow(request, self.rules.tokens_at_entry(request))
        # tokens of hits are not computed again
        request.cached = self.rules.tokens_there(request, len(hits))
        self.running.append(request)
        self._note(request, at.ADMITTED)
        if self.rules.limits[at.ROLE] == at.DECODE:
            self._note(request, at.FIRST)
        return request

    def _note(self, request: Request, column: int) -> None:
        # a preempted request enters again: the first time counts
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
                self.hand_over(request)
        self.cluster.follow(finished)

    def _generated_tokens(self, request: Request) -> int:
        """Tokens of a sequence that generated: one, and the drafts that are accepted."""
        accepted, rate = 0, float(self.rules.rates[at.ACCEPTANCE])
        # one draw decides all drafts, as in the compiled loop
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
            # a whole prompt leaves its blocks to others
            self.pages.keep(request)
        return int(request.generates)

    def _leave(self, request: Request) -> None:
        self.running.remove(request)
        self.pages.release(request)
        self.outstanding -= 1
        request.times[at.FINISH] = self.cluster.env.now
        self._note(request, at.FIRST)

    def hand_over(self, request: Request) -> None:
        """Note a prompt that is whole; it is sent when all steps of this instant have ended."""
        self.running.remove(request)
        request.times[at.SENT] = self.cluster.env.now
        self.sends.append(request)
        # after all steps of this instant: the order of engines must not matter
        whole = Signal(self.cluster.env).fire(Phase.TRANSFERS)
        assert whole.callbacks is not None
        whole.callbacks.append(lambda _: self.cluster.dispatch())

    def carry(self, request: Request, begun: float, share: float) -> float:
        """Take the time of this engine's links for keys and values; the delay until they have carried them [s]."""
        side, now = (share, float(self.rules.limits[at.RANKS])), self.cluster.env.now
        # batches of a pipeline share the links of their engine
        whole_s = float(self.rules.rates[at.MOVED_TOKEN]) * request.cached
        return float(delay_of_transfer(self.cluster.engines[self.first].links_free, side, begun, whole_s, now))


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
                # row of the first batch of its pipeline
                row - place % deployment.pools[pool].stages,
            )
            for row, (pool, place) in enumerate(places)
        ]
        # the front end of the first pool reads all requests
        scheduler = deployment.pools[0].scheduler
        self.split, self.scheduler, self.latency_s = counts[0], scheduler, float(scheduler.latency_s)
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
            # when the front end has read the request before
            before = float(self.requests[request.number - 1].times[at.READY]) - self.latency_s
        read_s = float(self.scheduler.request_s) + float(self.scheduler.token_s) * request.input
        delay = max(0.0, before - arrival) + read_s + self.latency_s
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
            self.requests[self.entering].times[at.BUSY] = self.busy_seconds()
            self.give(self.requests[self.entering])
            self.entering += 1

    def busy_seconds(self) -> float:
        """Time that all engines have computed until now [s]."""
        total = 0.0
        # in the order of the compiled loop, for its last digit
        for engine in self.engines:
            total += engine.busy_s
            total -= 0.0 if engine.ends_s is None else engine.ends_s - self.env.now
        return total

    def dispatch(self) -> None:
        """Send prompts that are whole, engine after engine, each to an engine that generates."""
        rates = self.engines[0].rules.rates
        beside, now = bool(rates[at.BESIDE]), self.env.now
        for sender in self.engines[: self.split]:
            while sender.sends:
                request = sender.sends.popleft()
                receiver = self.choose(self.engines[self.split :], 1)
                # layer by layer all but the last layer has left when the prompt is whole
                share = float(rates[at.LAST]) if beside else 1.0
                begun = float(request.times[at.ADMITTED]) if beside else now
                delay = max(engine.carry(request, begun, share) for engine in (sender, receiver))
                delay = max(0.0, delay) + float(rates[at.MOVED_LATENCY])
                request.times[at.MOVED] = now + delay
                # in the order of arrival, equal ones in that of dispatch
                bisect.insort(receiver.coming, (request, sender), key=lambda entry: float(entry[0].times[at.MOVED]))
                arrival = Signal(self.env).fire(Phase.TRANSFERS, delay)
                assert arrival.callbacks is not None
                arrival.callbacks.append(lambda _: self.receive())

    def receive(self) -> None:
        """Let prompts whose keys and values have come wait at the engines that generate."""
        for engine in self.engines[self.split :]:
            while engine.coming and engine.coming[0][0].times[at.MOVED] <= self.env.now:
                request, sender = engine.coming.pop(0)
                # pages at the sender are taken until the transfer has ended
                sender.pages.release(request)
                sender.outstanding -= 1
                # pages that became free may let a request enter
                sender.wake()
                engine.waiting.append(request)
                engine.wake()

    def give(self, request: Request) -> None:
        """Give a request to one of the engines that it comes to first."""
        chosen = self.choose(self.engines[: self.split], 0)
        chosen.waiting.append(request)
        chosen.wake()

    def choose(self, engines: list[Engine], pool: int) -> Engine:
        """One of some engines for one more request."""
        # turns count in both routings, and are used by round robin alone
        chosen = engines[self.turns[pool] % len(engines)]
        self.turns[pool] += 1
        if self.deployment.routing == "fewest_requests":
            chosen = min(engines, key=lambda engine: (engine.outstanding, engine.place))
        chosen.outstanding += 1
        return chosen
