"""Requests: when they arrive, with how many tokens of prompt and output, and which of the prompt may be cached.

Arrivals of gamma gaps have a coefficient of variation of their own (1: Poisson); bursts come in groups at one instant.
Lengths are fixed, uniform between a share of the length and the length, or lognormal with that median. Traces of users
are CSV files: `arrival_s,input_tokens,output_tokens` with an optional `cached_tokens`, or the public formats of Azure's
LLM inference traces (`TIMESTAMP,ContextTokens,GeneratedTokens`), of BurstGPT (`Timestamp` in seconds, `Request tokens`,
`Response tokens`, whose sum is `Total tokens`) and of Mooncake (JSON lines with `timestamp` in ms, `input_length`,
`output_length`, `hash_ids` of blocks of 512 tokens). Tokens of `cached_tokens` are always there, or,
with a column `prefix_id`, where the engine has those of an earlier request with the same one, as blocks of Mooncake.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from dse.config.named_file import NamedFile
from dse.errors import ConfigError, Problem, Problems
from dse.errors.parsing import parse_json
from dse.files import csv_columns, read_csv, read_text
from dse.values import Frozen
from dse.values.units import Integer, Number

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]
Tokens = Annotated[Integer, Field(ge=1, le=2**24)]
_OWN = ("arrival_s", "input_tokens", "output_tokens")
_AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_BURSTGPT = ("Timestamp", "Request tokens", "Response tokens")
_PUBLIC = (_AZURE, _BURSTGPT)
_HASHED = 512  # tokens of a block of Mooncake's traces
_UNIT = 64  # tokens of a block of other prompts: pages of software divide it
_MOST = 2**31  # bytes of a trace
_MOST_TOKENS = 2**31  # of a prompt or an output
_DRAWN = 1000  # requests, where nothing says how many
_GOLDEN = (5**0.5 - 1) / 2  # whose multiples fill a circle most evenly


@dataclass(frozen=True)
class PromptBlocks:
    """Blocks of `tokens` tokens at the start of prompts, which engines keep for others: numbers from 0 of those of all
    requests, one after the other, and how many each has; equal numbers are equal tokens after equal ones.
    """

    tokens: int = 0
    numbers: Integers = field(default_factory=lambda: np.zeros(0, np.int64))
    counts: Integers = field(default_factory=lambda: np.zeros(0, np.int64))

    @classmethod
    def of_groups(cls, groups: Integers, tokens: Integers) -> PromptBlocks:
        """Build from the prefix that each prompt begins with, by number, and how many tokens of it."""
        counts = tokens // _UNIT
        longest = int(counts.max(initial=0))
        # block p of group g is g x longest + p, which no other group has; then numbered without gaps
        numbers = np.repeat(groups * longest, counts) + _places(counts)
        return cls(_UNIT, np.unique(numbers, return_inverse=True)[1].astype(np.int64), counts)


def _places(counts: Integers) -> Integers:
    """0, 1, ... for each of some counts, one after the other."""
    ends = np.cumsum(counts)
    return np.asarray(np.arange(int(counts.sum())) - np.repeat(ends - counts, counts))


@dataclass(frozen=True)
class Traffic:
    """Requests in order of arrival: times [s], tokens of prompts and outputs, prompts' tokens that are always cached.

    blocks: of prompts that are cached where an engine has kept them. concurrency: how many are under way at all times,
    each next one when one is finished (closed loop); 0 where all arrive by their times.
    """

    arrivals: Floats
    inputs: Integers
    outputs: Integers
    prefixes: Integers
    concurrency: int = 0
    blocks: PromptBlocks = PromptBlocks()

    @property
    def size(self) -> int:
        """Number of requests."""
        return len(self.inputs)

    @property
    def num_timed(self) -> int:
        """Requests that arrive by their times; the others follow one that is finished."""
        return min(self.concurrency, self.size) if self.concurrency else self.size

    def part_way(self) -> Traffic:
        """The same closed loop, whose first requests have parts of their outputs left, spread evenly: all of them
        finish at different times, as they do after many rounds (points of a golden ratio's rotation).
        """
        if not self.concurrency:
            return self
        outputs = self.outputs.copy()
        left = np.modf(np.arange(1, self.num_timed + 1) * _GOLDEN)[0]
        outputs[: self.num_timed] = np.maximum(1, np.ceil(left * outputs[: self.num_timed]))
        return replace(self, outputs=outputs)

    def busiest(self, count: int) -> Traffic:
        """The `count` requests one after the other that bring most tokens a second; all where they are no more."""
        if count >= self.size:
            return self
        tokens = np.concatenate([[0], np.cumsum(self.inputs + self.outputs)])
        # a window over all runs of `count` requests: tokens by sums so far, time by its first and last arrival
        spans = self.arrivals[count - 1 :] - self.arrivals[: self.size - count + 1]
        rates = (tokens[count:] - tokens[:-count]) / np.maximum(spans, 1e-9)
        first = int(rates.argmax())
        part = slice(first, first + count)
        blocks = self.blocks
        if len(blocks.counts):
            ends = np.concatenate([[0], np.cumsum(blocks.counts)])
            blocks = PromptBlocks(blocks.tokens, blocks.numbers[ends[first] : ends[first + count]], blocks.counts[part])
        # the part begins at 0
        arrivals = self.arrivals[part] - self.arrivals[first]
        lengths = self.inputs[part], self.outputs[part], self.prefixes[part]
        return Traffic(arrivals, *lengths, self.concurrency, blocks)

    def looped(self, concurrency: int, count: int) -> Traffic:
        """The same requests, again and again until there are so many, as a closed loop that begins part of the way."""
        rounds, chosen = -(-count // self.size), np.arange(count) % self.size
        blocks = self.blocks
        if len(blocks.counts):
            # the last round may be cut
            counts = np.tile(blocks.counts, rounds)[:count]
            blocks = PromptBlocks(blocks.tokens, np.tile(blocks.numbers, rounds)[: int(counts.sum())], counts)
        lengths = self.inputs[chosen], self.outputs[chosen], self.prefixes[chosen]
        return Traffic(np.zeros(count), *lengths, concurrency, blocks).part_way()


class TokenLengths(Frozen):
    """Numbers of tokens: `tokens`, all of them (fixed), the longest (uniform, from a share `low` of it), or the median
    (lognormal, with the standard deviation `sigma` of its logarithm).
    """

    kind: Literal["fixed", "uniform", "lognormal"] = "fixed"
    tokens: Tokens
    low: Annotated[Number, Field(gt=0, le=1)] = 0.8
    sigma: Annotated[Number, Field(ge=0, le=4)] = 0.5
    most: Tokens | None = None

    def draw(self, random: np.random.Generator, count: int) -> Integers:
        """So many lengths."""
        if self.kind == "fixed":
            drawn = np.full(count, self.tokens)
        elif self.kind == "uniform":
            drawn = random.integers(int(self.low * self.tokens), self.tokens + 1, count)
        else:
            drawn = np.round(self.tokens * np.exp(self.sigma * random.standard_normal(count))).astype(np.int64)
        return np.asarray(np.clip(drawn, 1, self.most), np.int64)


class Mix(Frozen):
    """Requests of one kind of a mix: their share by weight, and lengths."""

    weight: Annotated[Number, Field(gt=0)] = 1.0
    input: TokenLengths
    output: TokenLengths


class TrafficSpec(Frozen):
    """Traffic that is drawn, or a trace.

    arrivals: closed, `concurrency` requests at all times; poisson or gamma at `rate_per_s` (gamma with the coefficient
    of variation `variation`); bursts of `burst` at once; or those of `trace`, a file, at `speed` times its pace.
    prefix: share of every prompt that is cached; with `prefixes`, so many different ones of which each request begins
    with any, while an engine keeps its pages.

    counted: `steady`, requests of the steady state alone (`dse_serving.steady`), of which `requests` is the least
    number (None: as many as intervals need), and a closed loop begins with requests that are part of the way through
    their outputs; or `all`, exactly `requests`, which a closed loop begins at one instant, as load generators measure.
    warm_up: share of the requests, the first ones, whose times count in no statistic; of steady traffic, at least.
    """

    arrivals: Literal["closed", "poisson", "gamma", "bursts", "trace"] = "closed"
    counted: Literal["steady", "all"] = "steady"
    requests: Annotated[Integer, Field(ge=1, le=10**8)] | None = None
    concurrency: Annotated[Integer, Field(ge=1, le=10**6)] = 16
    rate_per_s: Annotated[Number, Field(gt=0, le=1e9)] = 1.0
    variation: Annotated[Number, Field(gt=0, le=100)] = 2.0
    burst: Annotated[Integer, Field(ge=1, le=10**6)] = 8
    input: TokenLengths = TokenLengths(tokens=1024)
    output: TokenLengths = TokenLengths(tokens=1024)
    mix: tuple[Mix, ...] = ()
    prefix: Annotated[Number, Field(ge=0, le=1)] = 0.0
    prefixes: Annotated[Integer, Field(ge=0, le=10**6)] = 0
    trace: NamedFile | None = None
    speed: Annotated[Number, Field(gt=0, le=1e6)] = 1.0
    warm_up: Annotated[Number, Field(ge=0, lt=1)] = 0.1
    seed: Annotated[Integer, Field(ge=0, le=2**31 - 1)] = 0

    def draw(self, count: int | None = None) -> Traffic:
        """The requests, so many of them where they are drawn (None: `requests`, or a thousand).

        Raises ConfigError for a trace that cannot be read or is out of order.
        """
        if self.arrivals == "trace" and self.trace is None:
            raise ConfigError([Problem("traffic.trace", "is missing", way_out="write traffic.trace=<file>")])
        if self.arrivals == "trace":
            assert self.trace is not None
            return read_trace(self.trace.path("traffic.trace"), self.speed)
        random = np.random.default_rng(self.seed)
        count = count or self.requests or _DRAWN
        kinds = self.mix or (Mix(input=self.input, output=self.output),)
        weights = np.array([kind.weight for kind in kinds])
        chosen = random.choice(len(kinds), count, p=weights / weights.sum())
        # lengths of all kinds are drawn for each request: a seed gives the same lengths whatever is chosen
        inputs, outputs = (
            np.stack([getattr(kind, name).draw(random, count) for kind in kinds])[chosen, np.arange(count)]
            for name in ("input", "output")
        )
        prefixes = np.floor(self.prefix * inputs).astype(np.int64)
        closed = self.concurrency if self.arrivals == "closed" else 0
        times = self._times(random, count)
        if self.prefixes:
            blocks = PromptBlocks.of_groups(random.integers(0, self.prefixes, count), prefixes)
            # prefixes are there only while an engine keeps their blocks
            traffic = Traffic(times, inputs, outputs, 0 * prefixes, closed, blocks)
        else:
            traffic = Traffic(times, inputs, outputs, prefixes, closed)
        return traffic.part_way() if self.counted == "steady" else traffic

    def _times(self, random: np.random.Generator, count: int) -> Floats:
        if self.arrivals == "closed":
            return np.zeros(count)
        # of the gaps between requests
        mean = 1.0 / self.rate_per_s
        if self.arrivals == "bursts":
            # bursts are rarer by as many as come at once: the rate stays
            gaps = random.exponential(mean * self.burst, -(-count // self.burst))
            return np.repeat(np.cumsum(gaps), self.burst)[:count]
        # the coefficient of variation of a gamma distribution is one over the root of its shape
        shape = 1.0 if self.arrivals == "poisson" else 1.0 / self.variation**2
        return np.asarray(np.cumsum(random.gamma(shape, mean / shape, count)))


@dataclass(frozen=True)
class _Row:
    """A request of a trace: line, arrival [s], tokens of prompt and output, and those cached; prefix: which they are,
    "" for tokens that are always cached; hashes: of the blocks of the prompt.
    """

    line: int
    arrival: float
    input: int
    output: int
    cached: int = 0
    prefix: str = ""
    hashes: tuple[Any, ...] = ()

    @property
    def is_possible(self) -> bool:
        """Whether it arrives at a time and has counts of tokens that a request may have."""
        tokens = (self.input, self.output, self.cached)
        return 0 <= self.arrival < np.inf and max(tokens) < _MOST_TOKENS and self.cached >= 0


def read_trace(path: Path, speed: float = 1.0) -> Traffic:
    """The requests of a trace (formats: the module's docstring). Raises ConfigError that names file and line."""
    try:
        state = path.stat()
    except OSError:  # which reading it tells
        return _read(path)
    # times, size and inode stand for the content: a file that is written anew is read anew
    traffic = _read_once(path, (state.st_mtime_ns, state.st_size, state.st_ino))
    return traffic if speed == 1 else replace(traffic, arrivals=traffic.arrivals / speed)


@lru_cache(maxsize=8)
def _read_once(path: Path, state: tuple[int, ...]) -> Traffic:
    """The requests of a trace, read once as long as the file stays as it is."""
    traffic = _read(path)
    shared = (traffic.arrivals, traffic.inputs, traffic.outputs, traffic.prefixes)
    for array in (*shared, traffic.blocks.numbers, traffic.blocks.counts):
        array.setflags(write=False)  # all runs share them
    return traffic


def _read(path: Path) -> Traffic:
    rows = list(_mooncake(path) if path.suffix in (".jsonl", ".json") else _table(path))
    if not rows:
        raise ConfigError([Problem("traffic.trace", "holds no requests", str(path))])
    check = Problems()
    for before, after in itertools.pairwise(rows):
        if after.arrival < before.arrival:
            rule = f"arrives at {after.arrival:g} s, before the request of line {before.line} ({before.arrival:g} s)"
            check.add(f"{path.name}, line {after.line}", rule, way_out="sort the trace by arrival")
    for row in rows:
        if min(row.input, row.output) < 1:
            where, way = f"{path.name}, line {row.line}", "leave out requests that failed, whose output is 0"
            check.add(where, "has a request without tokens", value=min(row.input, row.output), way_out=way)
    check.done(path.name)
    inputs, outputs, cached = (
        np.array([getattr(row, name) for row in rows], np.int64) for name in ("input", "output", "cached")
    )
    arrivals = np.array([row.arrival for row in rows])
    # a named prefix is cached as long as an engine keeps it, others always
    always = np.where([bool(row.prefix) for row in rows], 0, np.minimum(cached, inputs))
    # public traces begin at any time
    return Traffic(arrivals - arrivals[0], inputs, outputs, always, blocks=_blocks(rows, cached - always))


def _blocks(rows: Sequence[_Row], tokens: Integers) -> PromptBlocks:
    """Blocks of the prompts of a trace: those that hashes name, or so many tokens of prefixes."""
    numbers: dict[Any, int] = {}
    if any(row.hashes for row in rows):
        # the last block of a prompt may not be full, and is then none that others can have
        blocks = [
            [numbers.setdefault(name, len(numbers)) for name in row.hashes[: row.input // _HASHED]] for row in rows
        ]
        counts = np.array([len(numbered) for numbered in blocks], np.int64)
        return PromptBlocks(_HASHED, np.array(list(itertools.chain.from_iterable(blocks)), np.int64), counts)
    if not any(row.prefix for row in rows):
        return PromptBlocks()
    groups = np.array([numbers.setdefault(row.prefix, len(numbers)) for row in rows], np.int64)
    return PromptBlocks.of_groups(groups, np.minimum(tokens, [row.input for row in rows]))


def _table(path: Path) -> Iterator[_Row]:
    """Yield the requests of a CSV."""
    names = _names_of(path)
    table = read_csv(path, "traffic.trace", needed=names, most=_MOST, way_out=_WAY)
    check = Problems()
    for line, cells in table.rows:
        try:
            time = _stamp(cells[names[0]]) if names is _AZURE else float(cells[names[0]])
            tokens = int(cells[names[1]]), int(cells[names[2]]), int(cells.get("cached_tokens") or 0)
            row = _Row(line, time, *tokens, prefix=cells.get("prefix_id") or "")
            if not row.is_possible:
                raise ValueError
        except ValueError:
            check.add(f"{path.name}, line {line}", "is no request", value=",".join(cells.values())[:80])
            continue
        yield row
    check.done(path.name)


def _names_of(path: Path) -> tuple[str, str, str]:
    """Columns of arrivals, prompts and outputs: those of a public format that the file has, else our own."""
    columns = set(csv_columns(path, "traffic.trace"))
    whole = (names for names in _PUBLIC if columns >= set(names))
    own = _OWN if columns & set(_OWN) else next((names for names in _PUBLIC if names[0] in columns), _OWN)
    return next(whole, own)


_WAY = "name a CSV with arrival_s,input_tokens,output_tokens, or a trace of Azure, BurstGPT or Mooncake"


def _stamp(text: str) -> float:
    """Seconds of a time stamp; digits beyond microseconds are dropped."""
    # Azure's stamps have seven digits, microseconds six
    head, dot, digits = text.partition(".")
    return datetime.fromisoformat(f"{head}{dot}{digits.rstrip('Z')[:6]}").replace(tzinfo=UTC).timestamp()


def _mooncake(path: Path) -> Iterator[_Row]:
    """Yield the requests of JSON lines of Mooncake."""
    check = Problems()
    for line, text in enumerate(read_text(path, "traffic.trace", most=_MOST).splitlines(), 1):
        if not text.strip():
            continue
        try:
            tree: Mapping[str, Any] = parse_json(text, f"{path.name}, line {line}")
            tokens, hashes = (int(tree["input_length"]), int(tree["output_length"])), tuple(tree.get("hash_ids") or ())
            # timestamps are in ms
            row = _Row(line, float(tree["timestamp"]) / 1000, *tokens, hashes=hashes)
            if not (row.is_possible and all(isinstance(name, int | str) for name in hashes)):
                raise ValueError
        except (ArithmeticError, AttributeError, ValueError, LookupError, TypeError):
            check.add(f"{path.name}, line {line}", "is no request of Mooncake's format", value=text[:80])
            continue
        yield row
    check.done(path.name)
