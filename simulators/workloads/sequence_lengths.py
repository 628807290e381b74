"""Lengths of the sequences of a data set, and the order in which an epoch batches them.

A data set is described by its inverse cumulative distribution, piecewise linear between measured percentiles, from
which a seeded sample is drawn. A batch is padded to its longest sequence: the sequence length of its iteration.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, field_validator, model_validator

from dse.errors import ConfigError, Problem
from dse.values import Frozen, knob
from dse.values.units import Fraction, Integer, Number
from simulators.hardware.parts import SourcedValue

Integers = NDArray[np.int64]
Length = Annotated[Number, Field(gt=0, le=2**31)]
Tokens = Annotated[Integer, Field(ge=1, le=2**31)]


class PassTokens(Frozen):
    """Tokens that a pass of inference computes.

    chunk: tokens of a prompt in one pass of prefill, which follow one another (chunked prefill); None for all of them.
    drafts: tokens that are drafted for each sequence of a decode step, which checks all of them at once (speculative
    decoding, arXiv:2211.17192); acceptance: chance of each to be accepted after the one before; draft_share: time of a
    draft over that of the step that checks them.
    """

    chunk: Tokens | None = None
    drafts: Annotated[Integer | None, knob(structural=True, ge=1, le=64)] = None
    acceptance: Annotated[Number, Field(ge=0, le=1)] | None = None
    draft_share: Annotated[Number, Field(ge=0, le=10)] | None = None

    @property
    def checked(self) -> int:
        """Tokens of a sequence that a decode step computes: the drafts, and one after them."""
        return 1 + (self.drafts or 0)

    @property
    def generated(self) -> Any:
        """Tokens of a sequence that a decode step yields on average: (1 - a^(k + 1)) / (1 - a), Eq. 1 there."""
        accepted = np.asarray(0.0 if self.acceptance is None else self.acceptance, float)
        return sum((accepted**place for place in range(1, self.checked)), np.ones(()))

    @property
    def drafting(self) -> Any:
        """Time of all drafts over that of the step that checks them."""
        share = 0.0 if self.draft_share is None else self.draft_share
        return (self.drafts or 0) * np.asarray(share, float)


class Tail(Frozen):
    """Sequences beyond the measured range: `num_sequences` of the data set, uniform between low and high."""

    num_sequences: Annotated[Integer, Field(ge=0, le=2**31)]
    low: Length
    high: Length

    @model_validator(mode="after")
    def _ascends(self) -> Tail:
        if self.low > self.high:
            raise ValueError(f"goes from {self.low:g} to {self.high:g}; low must not be above high")
        return self


class Lengths(SourcedValue):
    """A data set's sequence lengths, and the order of an epoch.

    percentiles: [share of the sequences, length that they do not exceed], of share 0 to 1. per_unit: frames or tokens
    of the model for each unit of the lengths (100 frames a second); None if the lengths are in frames or tokens.
    bounds: shortest and longest sequence of an epoch, in frames or tokens; others are left out. order: sorted by
    length; shuffled; bucketed, in the order of buckets of `bucket_width` lengths and then cut into batches, which are
    shuffled. whole: the last batch is dropped if it is not full.
    """

    name: str
    description: str = ""
    percentiles: tuple[tuple[Fraction, Length], ...] = Field(min_length=2)
    num_sequences: Annotated[Integer, Field(ge=1, le=10**8)]
    per_unit: Annotated[Number, Field(gt=0, le=1e6)] | None = None
    tail: Tail | None = None
    bounds: tuple[Tokens, Tokens] | None = None
    order: Annotated[Literal["sorted", "shuffled", "bucketed"], knob(structural=True)] = "sorted"
    bucket_width: Tokens | None = None
    whole: Annotated[bool, knob(structural=True)] = False
    note: Any = None

    @field_validator("percentiles")
    @classmethod
    def _ascend(cls, percentiles: tuple[tuple[float, float], ...]) -> tuple[tuple[float, float], ...]:
        if percentiles[0][0] != 0 or percentiles[-1][0] != 1:
            raise ValueError("must begin with the share 0 (the shortest) and end with 1 (the longest)")
        for (share, length), (further, longer) in pairwise(percentiles):
            if further <= share or longer < length:
                raise ValueError(f"must ascend: [{further:g}, {longer:g}] comes after [{share:g}, {length:g}]")
        return percentiles

    @model_validator(mode="after")
    def _hangs_together(self) -> Lengths:
        if (self.order == "bucketed") != (self.bucket_width is not None):
            raise ValueError("bucket_width is the width of the buckets of order: bucketed; give both or neither")
        if self.tail is not None and self.tail.num_sequences > self.num_sequences:
            raise ValueError(f"tail.num_sequences is above num_sequences = {self.num_sequences}")
        if self.bounds is not None and self.bounds[0] > self.bounds[1]:
            raise ValueError(f"bounds = [{self.bounds[0]}, {self.bounds[1]}] hold no length")
        return self


def iteration_lengths(lengths: Lengths, batch: int, seed: int) -> Integers:
    """Sequence lengths [N] of the iterations of one epoch in their order: the longest sequence of each batch.

    The same seed draws the same epoch. Raises ConfigError if the epoch has no iteration.
    """
    random = np.random.default_rng(seed)
    sample = _draw_lengths(lengths, random)
    bucket = np.zeros_like(sample) if lengths.bucket_width is None else (sample - 1) // lengths.bucket_width
    within = sample if lengths.order == "sorted" else random.permutation(len(sample))
    if len(sample) < batch:
        rule = f"has no batch of {batch} among {len(sample)} sequences"
        raise ConfigError([Problem("lengths", rule, lengths.name, "a smaller batch, or wider bounds")])
    ordered = sample[np.lexsort((within, bucket))]
    longest = np.maximum.reduceat(ordered, np.arange(0, len(ordered), batch))
    longest = longest[: len(ordered) // batch] if lengths.whole else longest
    return random.permutation(longest) if lengths.order == "bucketed" else longest


def _draw_lengths(lengths: Lengths, random: np.random.Generator) -> Integers:
    """Draw a sample of all lengths in frames or tokens, at least 1."""
    shares, values = np.array(lengths.percentiles).T
    beyond = 0 if lengths.tail is None else lengths.tail.num_sequences
    samples = np.interp(random.random(lengths.num_sequences - beyond), shares, values)
    if lengths.tail is not None:
        samples = np.append(samples, random.uniform(lengths.tail.low, lengths.tail.high, beyond))
    counts = np.maximum(1, np.rint(samples * (lengths.per_unit or 1.0))).astype(np.int64)
    low, high = lengths.bounds or (1, np.inf)
    return np.asarray(counts[(counts >= low) & (counts <= high)])
