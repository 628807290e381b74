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

    contents: blocks of its prompt, of which it refers to the first `refs`; pages: of keys and values, its own ones.
    """

    number: int
    input: int
    output: int
    prefix: int
    times: Floats
    cached: int = 0
    generated: int = 0
    pages: int = 0
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
            begin, end = request.cached, request.cached + chunks[request.number]
            # a chunk costs what a whole prompt up to its end has more than one up to its begin
            scores += self._prompt_s(end) - self._prompt_s(begin)
        count, tokens = len(generating), sum(chunks[request.number] for request in prompts)
        generated, largest = count * (1 + drafts), max(chunks.values(), default=0)
        # layers wait for the rank with most tokens
        of_prompts = most_of_a_rank(len(prompts), tokens, largest, ranks)
        # prompts beyond the budget of a rank were cut
        most = -(-generated // ranks) + min(of_prompts, int(self.limits[at.TOKENS]))
        total = self._at(self.state.linear, most, not prompts)
        # experts get the tokens of all ranks, on average
        total += self._at(self.state.experts, -(-(generated + tokens) // ranks), not prompts)
        # the output layer checks every draft; of a prompt it has the last token alone
        logits = min(-(-(generated + len(prompts)) // ranks), self.state.head.shape[1] - 1)
        total += float(self.state.head[self.pool, logits])
        attention = 0.0
        if generating:
            # attention is linear in the context: the mean of all stands for each
            context = max(1.0, sum(request.cached for request in generating) / count)
            attention = decode_seconds(self.state.decode, self.pool, int(not prompts), -(-count // ranks), context)
            # drafts are made one after another, by a small model or head
            total += drafts * self.rates[at.DRAFT]
        # share of the prompts that the busiest rank attends to
        shared = -(-len(prompts) // ranks) / max(len(prompts), 1)
        total += both_attend(self.state.rates, self.pool, attention, scores * shared)
        if prompts and most > self.limits[at.REPLAYED]:
            # no CUDA graph has the step: the host launches each kernel
            total = max(total, self.rates[at.LAUNCHED])
        host = self.rates[at.HOST] + self.rates[at.HOST_SEQUENCE] * (count + len(prompts))
        return float(max(total, host) if self.rates[at.OVERLAPPED] else total + host)

    def _prompt_s(self, tokens: int) -> float:
        """Attention of a whole prompt [s]."""
        return float(prompt_seconds(self.state.prompt, self.pool, tokens))

    def _at(self, table: Floats, tokens: int, plain: bool) -> float:
        """Time by tokens of a rank [s]; plain: of a step without prompts."""
        # beyond the table a step is as long as its last one
        return float(table[self.pool, int(plain), min(tokens, table.shape[2] - 1)])

    def pages_of(self, tokens: int) -> int:
        """Pages for so many tokens."""
        return -(-tokens // int(self.limits[at.PAGE]))

    def tokens_written(self, request: Request) -> int:
        """Tokens whose keys and values a step that generates may write."""
        # keys and values of the last token are never read
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
        return self.rules.pages_of(self.rules.unit)

    def hits(self, request: Request) -> tuple[int, ...]:
        """Blocks at the start of a prompt that are there; a token is left to compute."""
        if not request.contents or self.rules.limits[at.ROLE] == at.DECODE:
            return ()
        # the last token is always computed: the first output comes from it
        possible = request.contents[: (request.input - 1) // self.rules.unit]
        # a block without the one before it is no hit: its tokens follow others
        return tuple(itertools.takewhile(self.users.__contains__, possible))

    def need(self, request: Request, hits: tuple[int, ...], tokens: int) -> int:
        """Free pages that a request takes when it enters with these blocks."""
        idle = sum(block in self.idle for block in hits)
        # idle blocks lie in free pages, and are taken with the others
        return self.rules.pages_of(max(0, tokens - len(hits) * self.rules.unit)) + idle * self.of_block

    def use(self, block: int) -> None:
        """Count one more user of a block that is there."""
        if block in self.idle:
            del self.idle[block]
            self.free -= self.of_block
        self.users[block] += 1

    def grow(self, request: Request, tokens: int) -> bool:
        """Take pages for so many tokens, of the idle blocks used longest ago last; False where they are not free."""
        more = self.rules.pages_of(max(0, tokens - request.refs * self.rules.unit)) - request.pages
        if more > self.free:
            return False
        request.pages += max(more, 0)
        self.free -= max(more, 0)
        # evict until the blocks that stay fit in free pages
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
            request.pages -= self.of_block
        request.refs = len(request.contents)

    def release(self, request: Request) -> None:
        """Free the pages of a request; blocks that it alone used stay in free pages."""
        self.free += request.pages
        request.pages = 0
        # the last block first, so that it is evicted before those that it follows
        for block in reversed(request.contents[: request.refs]):
            self.users[block] -= 1
            if not self.users[block]:
                self.idle[block] = None
                self.free += self.of_block
        request.refs = 0
