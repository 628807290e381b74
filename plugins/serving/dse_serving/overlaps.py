"""Overlap of the parts of a step, chosen for each size of batch: the tables of `StepTimes` from those of every choice.

n tokens, b sequences that generate after c tokens each. C(n): what computes outside of attention, A(b, c): attention,
S(n): sums of tp and exchanges of experts, V: time of all that computes at the HBM's rate; f: slowdown of products
beside moved data (`simulators.costs.sharing`); L: layers of a stage.

    waited             C + A + S
    in_switch          the same, with sums in the switch (`parallel.collectives`)
    halves             prompts in two halves, one sums while the other computes (`steps.overlap.token_splits`)
    shared_expert, two_micro_batches    exchanges of experts beside them (`simulators.steps.overlap.expert_exchanges`)
    nano               two halves, of which one multiplies while another attends and another exchanges:
                       max(2 f C', 2 A', 2 S', V, f C' + A' + S') + (f C' + A' + S') / L     ' : of n / 2, b / 2

(nano: derived from NanoFlow, arXiv:2408.12757, whose halves have units of the GPU of their own; no layer begins before
the one before it has ended, and the halves start one after the other. Attention of prompts is waited for.) Where
experts have GPUs of their own, E of them for the R ranks of an engine, m batches go round between both sides:

    apart              max(m (C' + A'), m X', C' + A' + X' + S') + (m - 1) max(C' + A', X') / L       ' : of n / m

with X' the products of experts for n R / (m E) tokens of a GPU, S' the exchange of the side that has more tokens a GPU
(derived; equation 3 of arXiv:2504.02263, where the first term is max(C' + A', X') and exchanges are hidden).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dse_serving.step_times import EngineKernels, OverlapChoice, StepParts, StepTimes, between, pad
from dse_serving.traffic import Traffic
from simulators.steps.design import StepDesign
from simulators.workloads.model import Transformer

Floats = NDArray[np.float64]
Overlap = Literal["waited", "in_switch", "halves", "nano", "shared_expert", "two_micro_batches"]
OVERLAPS: Mapping[Overlap, tuple[Mapping[str, Any], int]] = {
    "waited": ({}, 1),
    "in_switch": ({"collectives": "in_switch"}, 1),
    "halves": ({}, 1),
    "nano": ({}, 1),
    "shared_expert": ({"exchanges": "shared_expert"}, 1),
    "two_micro_batches": ({"exchanges": "two_micro_batches"}, 2),
}
"""Overlap -> knobs of `parallel` with which the step model tables it, and micro-batches of a step."""
OVERLAP_WORDS: Mapping[str, str] = {
    "waited": "nothing overlaps",
    "in_switch": "nothing overlaps, and the switch sums",
    "halves": "one half of the prompts sums while the other computes",
    "nano": "one half of the batch multiplies while the other attends or exchanges",
    "shared_expert": "the shared expert computes while tokens are exchanged",
    "two_micro_batches": "one micro-batch exchanges tokens while the other computes",
    "apart": "experts have GPUs of their own",
}
"""Overlap in words."""


def lacks(design: StepDesign, name: Overlap) -> str | None:
    """What a design lacks for an overlap, in words; None where it has all."""
    parallel, model = design.parallel, design.model
    assert isinstance(model, Transformer)
    adds = _switch_adds(design)
    exchanged = model.moe is not None and parallel.ep > 1
    if name == "in_switch" and not (parallel.tp > 1 and adds):
        return "sums of parallel.tp > 1 in a switch that adds"
    if name == "halves" and not (parallel.tp > 1 and (adds or design.system.gpu.cu_copy is not None)):
        return "sums of parallel.tp > 1 in a switch that adds, or by kernels that are known (system.gpu.cu_copy)"
    if name == "halves" and (model.moe is not None or model.latent is not None or model.pattern is not None):
        return "a model without experts, latents and patterns"
    if name in ("shared_expert", "two_micro_batches") and not exchanged:
        return "parallel.ep > 1 with a model that has experts"
    if name == "shared_expert" and (model.moe is None or not np.all(np.asarray(model.moe.shared_experts) > 0)):
        return "a model with a shared expert"
    return None


def _switch_adds(design: StepDesign) -> bool:
    """Tell whether the switch of the node adds (NVLink SHARP)."""
    node = design.system.node
    return node is not None and node.in_switch is not None and "all_reduce" in node.in_switch.collectives


def knobs_of(design: StepDesign, name: Overlap, split_ctas: int) -> StepDesign:
    """The design with the knobs of an overlap. split_ctas: of the sums of one half beside the other one."""
    changes, micro_batches = OVERLAPS[name]
    if name == "halves":
        copy = design.system.gpu.cu_copy
        # the library's kernel has no more CTAs than these
        held = split_ctas if _switch_adds(design) or copy is None else min(split_ctas, int(np.min(copy.num_cus)))
        changes = {"collectives": "in_switch" if _switch_adds(design) else "library", "split_ctas": held}
    run = design.run.model_copy(update={"micro_batches": micro_batches})
    return design.model_copy(update={"run": run, "parallel": design.parallel.model_copy(update=dict(changes))})


@dataclass(frozen=True)
class Table:
    """Times [s] of steps with prompts, but for their attention [knots], and of others [rows, octaves]."""

    prompts: Floats
    plain: Floats


@dataclass(frozen=True)
class PartTimes:
    """Parts of steps with one set of kernels."""

    parts: StepParts
    kernels: EngineKernels

    def at(self, kind: int, tokens: ArrayLike) -> Floats:
        """C without experts, experts, sums, exchanges, V, f C of so many tokens [6, ...]; kind: 0 with prompts, 1."""
        rows = self.parts.with_kernels(self.kernels)[kind]
        return np.stack([np.interp(np.asarray(tokens, float), self.parts.tokens, row) for row in rows])

    def core(self, sequences: ArrayLike, of: str = "core") -> Floats:
        """Attention of so many sequences [..., octaves]; of: or `core_moved`, at the HBM's rate."""
        columns = self.kernels.attention * getattr(self.parts, of).T
        return np.stack([np.interp(np.asarray(sequences, float), self.parts.rows, c) for c in columns], axis=-1)

    @property
    def sizes(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Knots of tokens and of sequences."""
        return self.parts.tokens, self.parts.rows

    def step_model(self, batches: int) -> Table:
        """Steps in so many micro-batches, less what the step model hides of them."""
        tokens, rows = (knots / batches for knots in self.sizes)
        hidden_prompts, hidden = self.parts.saved
        # the first four: products, experts, sums, exchanges; attention of prompts is tabled apart
        prompts = batches * self.at(0, tokens)[:4].sum(axis=0) - np.interp(tokens, self.parts.tokens, hidden_prompts)
        plain = self.at(1, rows)[:4].sum(axis=0)[:, None] + self.core(rows)
        saved = np.stack([np.interp(rows, self.parts.rows, column) for column in hidden.T], axis=-1)
        return Table(prompts, batches * plain - saved)

    def nano(self) -> Table:
        """Steps in halves that share the GPU."""
        tokens, rows = (knots / 2 for knots in self.sizes)
        return Table(
            # attention of prompts does not overlap: it depends on the chunks of a step
            self._halves(self.at(0, tokens)[:, :, None], np.zeros(1), np.zeros(1))[:, 0],
            self._halves(self.at(1, rows)[:, :, None], self.core(rows), self.core(rows, "core_moved")),
        )

    def _halves(self, half: Floats, attention: Floats, attention_moved: Floats) -> Floats:
        _, _, sums, exchanges, moved, computed = half
        exchanged = sums + exchanges
        batch_s = computed + attention + exchanged
        # each resource serves both halves, and each half needs all of its parts
        bounds = (2 * computed, 2 * attention, 2 * exchanged, 2 * (moved + attention_moved), batch_s)
        return np.asarray(np.maximum.reduce(np.broadcast_arrays(*bounds)) + batch_s / self.parts.layers)

    def apart(self, experts: PartTimes, ranks: int, gpus: int, batches: int) -> Table:
        """Steps whose experts have `gpus` GPUs of their own, for `ranks` ranks, in so many batches that go round."""
        tokens, rows = (knots / batches for knots in self.sizes)

        def round_trip(kind: int, count: Floats, attention: Floats) -> Floats:
            dense, _, sums = (row[:, None] for row in self.at(kind, count)[:3])
            # tokens of all ranks spread over the GPUs of experts
            products = experts.at(kind, count * ranks / gpus)[1][:, None]
            # an exchange ends when the side with more tokens a GPU has moved its own
            moved = experts.at(kind, count * max(1.0, ranks / gpus))[3][:, None]
            attended = dense + sums + attention
            # the slower side sets the pace of the batches that go round
            longer = np.maximum(attended, products)
            # one batch must go round before it can begin the next layer
            turn = np.maximum(batches * longer, attended + products + moved)
            return np.asarray(turn + (batches - 1) * longer / self.parts.layers)

        return Table(round_trip(0, tokens, np.zeros(1))[:, 0], round_trip(1, rows, self.core(rows)))


def context_octave(choice: OverlapChoice, traffic: Traffic) -> int:
    """Column of a choice for the median context of requests in the middle of their outputs."""
    context = float(np.median(traffic.inputs + traffic.outputs // 2))
    return int(np.clip(np.log2(context), 0, choice.plain.shape[1] - 1))


def with_experts_apart(times: StepTimes, waited: PartTimes, graphs: Sequence[int] = ()) -> StepTimes:
    """The same times with those of experts in a table of their own: all ranks compute them for the tokens of all, while
    all else of a step is of the rank that has most.
    """
    counts, knots = np.arange(times.linear.shape[1]), waited.parts.tokens
    prompts, steps = (between(counts, knots, waited.at(kind, knots)[1]) for kind in (0, 1))
    # interpolation of a part must not exceed the whole
    experts = np.minimum(np.stack([prompts, steps[pad(counts, graphs)]]), times.linear)
    return replace(times, linear=times.linear - experts, experts=experts)


def times_of(tables: Mapping[str, Table], waited: PartTimes, graphs: Sequence[int] = ()) -> StepTimes:
    """The shortest of some tables at each size. waited: parts of a step where nothing runs beside. graphs: sizes of
    steps without prompts that are captured; others are padded.
    """
    parts, names = waited.parts, tuple(tables)
    prompts = np.stack([tables[name].prompts for name in names])
    plain = np.stack([tables[name].plain for name in names])
    # what the best overlap saves is taken off attention, which has a table by sequences and context
    hidden = waited.step_model(1).plain - plain.min(axis=0)
    counts, numbers = np.arange(int(parts.tokens[-1]) + 1), np.arange(int(parts.rows[-1]) + 1)
    linear = between(counts, parts.tokens, waited.at(1, parts.tokens)[:4].sum(axis=0))
    decode, less = (
        np.stack([between(numbers, parts.rows, column) for column in columns.T], axis=1)
        for columns in (waited.core(parts.rows), hidden)
    )
    choice = OverlapChoice(names, parts.tokens, parts.rows, prompts.argmin(axis=0), plain.argmin(axis=0))
    # dispatch in units of the shortest kernel, as kernels are what a host launches
    dispatched = parts.routed * waited.kernels.dispatch_s / parts.kernel_s
    return replace(
        parts.times,
        kernels=parts.times.kernels + dispatched,
        linear=np.stack([between(counts, parts.tokens, prompts.min(axis=0)), linear[pad(counts, graphs)]]),
        decode=np.stack([decode, decode - less]),
        prompt=waited.kernels.attention * parts.times.prompt,
        overlap=choice,
    )
