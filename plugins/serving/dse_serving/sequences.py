"""Requests, rules and pages of the reference of a serving deployment (`dse_serving.reference`), as objects."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

import dse_serving.columns as at
from dse_serving.compiled import State
from dse_serving.durations import both_attend, decode_seconds, most_of_a_rank, prompt_seconds

Floats = NDArray[np.float64]


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
