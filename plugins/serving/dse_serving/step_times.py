"""Times of the steps of an engine by what is in them, from the step model (`simulators.steps`), tabled once.

A step computes the tokens of prompts and one token of each sequence that generates, or more with drafts. All operators
but attention, and the output, which these tokens and the last one of a prompt alone need, see tokens; attention sees
the cached tokens of each sequence. So with n tokens, l of them with an output, b sequences that generate after c tokens
on average, and chunks of prompts from p to q,

    T = linear(n) + head(l) + decode(b, c) + sum over chunks of (prompt(q) - prompt(p))

(derived; that attention of a chunk is what a whole prompt has more for it is exact for FLOP, not for launches).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import Field

from dse.values import Frozen
from dse.values.units import Number, Seconds
from dse_serving.columns import PER_OCTAVE
from simulators.steps.design import StepDesign
from simulators.steps.operators.experts import TokenExchange
from simulators.steps.operators.work import (
    Exchange,
    Product,
    StageOperator,
    Work,
    beside_moved_data,
    num_kernels,
    quotient,
)
from simulators.steps.run.build import iteration
from simulators.steps.run.iteration import Iteration

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
_CORE = ("attention", "softmax")
_HEAD = "output"
_FEW, _MANY, _MANY_OF_EXPERT = 64, 1024, 256  # tokens; those of an expert at which a GPU's FLOP take as long as weights
Factor = Annotated[Number, Field(gt=0, le=100)]
_OCTAVES = 18  # contexts of up to 131,072 tokens
_STEPS = 6  # knots an octave of tokens


class GemmTimeFactors(Frozen):
    """GEMM time in the serving engine over that of the step model: of few tokens, which reading weights bounds, and of
    many, which FLOP bound; between them by the logarithm of the tokens that multiply with the same weights.
    """

    weight_bound: Factor = 1.0
    flop_bound: Factor = 1.0

    def at(self, tokens: ArrayLike, many: float = _MANY) -> Floats:
        """Factor by the number of tokens, of which from `many` on FLOP bound it."""
        # 0 at `_FEW` tokens, 1 from `many` on, linear in the logarithm between
        place = np.log(np.maximum(np.asarray(tokens, float), 1.0) / _FEW) / np.log(many / _FEW)
        slope = self.flop_bound - self.weight_bound
        return np.asarray(self.weight_bound + np.clip(place, 0.0, 1.0) * slope, float)


class EngineKernels(Frozen):
    """Kernels of serving engines, where they differ from those that the step model was fitted to.

    dense, experts: factors on GEMM times. sum_s: latency of an all-reduce in one kernel, in which every GPU reads the
    partial sums of all others, inside a node; taken where the library is slower. attention, sums, exchanges, other:
    times over those of the step model.
    """

    dense: GemmTimeFactors = GemmTimeFactors()
    experts: GemmTimeFactors = GemmTimeFactors()
    sum_s: Seconds = 1.0  # a second: never faster than the library
    peer_s: Seconds = 0.0
    attention: Factor = 1.0
    dispatch_s: Seconds = 0.0
    sums: Factor = 1.0
    exchanges: Factor = 1.0
    other: Factor = 1.0


@dataclass(frozen=True)
class OverlapChoice:
    """Which overlaps of `names` steps have: with prompts, by tokens [knots]; without, by sequences and context [rows,
    octaves].
    """

    names: tuple[str, ...]
    tokens: Integers
    sequences: Integers
    prompts: Integers
    plain: Integers


@dataclass(frozen=True)
class StepTimes:
    """Times [s] of the steps of one engine, and what it keeps in memory.

    linear [2, tokens + 1]: of steps with prompts, and of those without, which graphs of some sizes replay; experts, of
    the same shape or [2, 1]: what experts take besides, by the mean tokens of ranks, where these share experts. head
    [tokens + 1]: output layer; decode [2, sequences + 1, octaves of context]: attention of sequences that generate, of
    steps with prompts, and of those without, less what runs beside other work. prompt [knots]: of a token of a prompt.
    kernels: of a step. weight_bytes, token_bytes, room_bytes: of a GPU: weights, keys and values of a token, memory.
    shares: HBM's rate that attention of prompts draws, and CUs that attention of sequences that generate takes.
    """

    linear: Floats
    head: Floats
    decode: Floats
    prompt: Floats
    kernels: float
    weight_bytes: float
    token_bytes: float
    room_bytes: float
    shares: tuple[float, float] = (1.0, 1.0)
    overlap: OverlapChoice | None = None
    experts: Floats = field(default_factory=lambda: np.zeros((2, 1)))

    @property
    def single_s(self) -> float:
        """Time of a step with one token, but for attention and the output [s]."""
        return float(self.linear[1, 1] + self.experts[1, min(1, self.experts.shape[1] - 1)])


@dataclass(frozen=True)
class StepParts:
    """Times of steps of so many tokens and sequences by part, at knots; times [s].

    linear [2, 8, knots of tokens]: columns (`_columns`) of steps with prompts and of those without. core, core_moved
    [rows, octaves]: attention of sequences that generate, and the same at the HBM's rate. saved: what the step model
    says runs beside other work, of steps with prompts [knots] and without [rows, octaves]. layers: of a stage;
    routed: of those, the ones with experts. of_expert: tokens of an expert for each one of a rank. slowed
    [2, 2, knots]: factors on the times of products, and of those of experts, while a library's kernels move data
    (`simulators.costs.sharing`). kernel_s: time of the shortest kernel [s].
    """

    tokens: Integers
    rows: Integers
    linear: Floats
    core: Floats
    core_moved: Floats
    saved: tuple[Floats, Floats]
    peers: int
    layers: float
    routed: float
    of_expert: float
    slowed: Floats
    kernel_s: float
    times: StepTimes

    def with_kernels(self, kernels: EngineKernels) -> Floats:
        """Times with these kernels: of what computes outside of attention, of experts, of sums, of exchanges, of all
        but exchanges at the HBM's rate, and of all that computes while data moves [2, 6, knots].
        """
        dense, experts, library, direct, sums, exchanges, other, moved = np.moveaxis(self.linear, 1, 0)
        # engines take their own kernel for small tensors, and the library for large ones
        summed = np.minimum(library, direct + sums * (kernels.sum_s + self.peers * kernels.peer_s))
        products, streams = dense * kernels.dense.at(self.tokens), kernels.other * other
        # norms, activations and the like are streams of bytes
        computed = streams + products
        factors = kernels.experts.at(self.tokens * self.of_expert, _MANY_OF_EXPERT)
        # tokens of an expert, not of a rank, share its weights
        of_experts = experts * factors + self.routed * kernels.dispatch_s
        exchanged = kernels.exchanges * exchanges
        slow, slow_experts = np.moveaxis(self.slowed, 1, 0)
        beside = streams + slow * products + slow_experts * of_experts
        return np.stack([computed, of_experts, kernels.sums * summed, exchanged, moved, beside], axis=1)


def step_parts(design: StepDesign, tokens: int, sequences: int) -> StepParts:
    """Table the steps of a design of up to so many tokens and sequences on a GPU.

    design: whose mode and sizes are chosen here. Tokens and sequences count for each rank of data-parallel attention.
    """
    # a context in each octave: attention is linear between
    knots, contexts = _knots(max(tokens, sequences)), 2.0 ** np.arange(_OCTAVES)
    prompts, steps, rows = (
        step_run(design, "prefill", 1, knots),
        step_run(design, "decode", knots, 1),
        _knots(sequences),
    )
    linear = np.stack([_columns(prompts, knots), _columns(steps, knots)])
    grid = step_run(design, "decode", rows[:, None], contexts[None, :])
    lengths = _lengths()
    # one sequence: attention of several is the sum of theirs
    prompt = step_run(design, "prefill", 1, lengths)
    times = StepTimes(
        np.zeros((2, 2)),
        # of all tokens that sequences check at once, with their drafts
        between(np.arange(knots[-1] + 1), knots, _head(steps)),
        np.zeros((2, 2, 2)),
        # time of a token: nearly linear in the length, so that few knots suffice
        _core(prompt) / lengths,
        _launches(steps),
        *memory_of(design),
        shares=(_share(prompt, _moved_s), _share(grid, _multiplied_s)),
    )
    shape = len(rows), _OCTAVES
    core, moved = (np.broadcast_to(part, shape) for part in (_core(grid), _moved_s(grid, _core_parts(grid))))
    saved = [
        np.broadcast_to(step.passes.hidden_s + step.passes.pair_saved_s, size)
        for step, size in ((prompts, knots.shape), (grid, shape))
    ]
    # all-reduces in one kernel wait for each of the other GPUs
    peers = int(np.asarray(steps.passes.platform.groups["tp"].num_gpus)) - 1
    # kinds of layers may differ in number: the most frequent one sets the depth
    layers = float(max(np.max(count) for name, count in steps.passes.counts.items()))
    slowed = np.stack([_slowed(step, design, knots) for step in (prompts, steps)])
    features = layers, *_routing(design, steps), slowed, float(np.max(steps.passes.platform.chip.launch_s))
    return StepParts(knots, rows, linear, core, moved, (saved[0], saved[1]), peers, *features, times)


def _routing(design: StepDesign, step: Iteration) -> tuple[float, float]:
    """Layers of experts of a stage, and tokens of an expert for each one of a rank; 0 and 1 without experts."""
    moe = getattr(design.model, "moe", None)
    if moe is None:
        return 0.0, 1.0
    routed = [part.times for part in step.passes.parts if isinstance(part.op.work, Product) and part.op.work.grouped]
    # experts shared by ranks get the tokens of all of them
    ranks = float(np.max(design.parallel.dp)) if np.any(np.asarray(design.parallel.ep) > 1) else 1.0
    # on average: tokens are taken to spread evenly over experts
    return float(np.max(routed)), ranks * float(np.max(np.asarray(moe.experts_per_token) / np.asarray(moe.experts)))


def step_run(design: StepDesign, mode: str, batch: ArrayLike, length: ArrayLike) -> Iteration:
    """The step model's iteration of batches and lengths that broadcast."""
    sizes = {"mode": mode, "batch": np.asarray(batch), "sequence_length": np.asarray(length)}
    # halves are of prompts alone
    parallel = design.parallel if mode == "prefill" else design.parallel.model_copy(update={"split_ctas": 0})
    # rules were checked before: sizes that a table does not use may divide by zero
    with np.errstate(all="ignore"):
        return iteration(design.model_copy(update={"run": design.run.model_copy(update=sizes), "parallel": parallel}))


def _knots(most: int) -> Integers:
    """Whole numbers from 1 to `most`, all small ones and then some of each octave."""
    # geometric knots, whose rounding keeps every small number
    count = int(np.ceil(np.log2(max(most, 2)) * _STEPS)) + 1
    return np.unique(np.append(np.round(np.geomspace(1, max(most, 2), count)), most)).astype(np.int64)


def _lengths() -> Floats:
    octaves = np.repeat(2.0 ** np.arange(_OCTAVES), PER_OCTAVE).reshape(_OCTAVES, -1)
    # evenly spaced within each octave, as `durations.prompt_seconds` reads them
    return np.asarray((octaves * (1 + np.arange(PER_OCTAVE) / PER_OCTAVE)).reshape(-1), float)


def between(places: Integers, knots: Integers, values: ArrayLike) -> Floats:
    """Values at some places, linear between knots; none at 0."""
    spread = np.broadcast_to(np.asarray(values, float), np.shape(knots))
    return np.asarray(np.where(places > 0, np.interp(places, knots, spread), 0.0))


def pad(places: Integers, graphs: Sequence[int]) -> Integers:
    """Sizes of batches [N] as they run: those that a CUDA graph holds are padded to the next captured size."""
    sizes = np.asarray(sorted(graphs), np.int64)
    if not len(sizes):
        return places
    # a batch beyond the largest graph runs without one
    above = np.searchsorted(sizes, places)
    taken = sizes[np.minimum(above, len(sizes) - 1)]
    return np.where((places > 0) & (above < len(sizes)) & (taken < len(places)), taken, places)


def _head(step: Iteration) -> Floats:
    """Time of the output [s]."""
    return step.passes.sum(part for part in step.passes.parts if part.block.name == _HEAD)


def _core_parts(step: Iteration) -> list[StageOperator]:
    return [part for part in step.passes.parts if part.op.kind in _CORE]


def _core(step: Iteration) -> Floats:
    """Time of attention [s]."""
    return step.passes.sum(_core_parts(step))


def _moved_s(step: Iteration, parts: Sequence[StageOperator]) -> Floats:
    """Time [s] of the traffic of operators at the HBM's rate."""
    rate = np.asarray(step.passes.platform.chip.drawable_bytes_per_s, float)
    return np.asarray(sum((part.times * part.spent.bytes for part in parts), np.zeros(())) / rate)


def _multiplied_s(step: Iteration, parts: Sequence[StageOperator]) -> Floats:
    """Time [s] of the FLOP of operators at the peak rate."""
    rate = np.asarray(step.passes.platform.chip.flop_per_s, float)
    return np.asarray(sum((part.times * part.spent.flop for part in parts), np.zeros(())) / rate)


def _share(step: Iteration, bound: Callable[[Iteration, Sequence[StageOperator]], Floats]) -> float:
    """Median share of the time of attention that a bound takes, over the sizes of a step."""
    # launches and waves make attention longer than its bound: a share below one
    return float(min(1.0, np.median(quotient(bound(step, _core_parts(step)), _core(step)))))


def _columns(step: Iteration, knots: ArrayLike) -> Floats:
    """Columns of `StepParts.linear` [8, knots]: products, those of experts, sums by the library and in one kernel
    without its latency, number of sums, exchanges of experts, all else, and all that computes at the HBM's rate.
    """
    kinds: dict[str, list[StageOperator]] = {"dense": [], "experts": [], "sums": [], "exchanges": [], "rest": []}
    for part in step.passes.parts:
        if part.block.name != _HEAD and part.op.kind not in _CORE:
            kinds[_kind(part.op.work)].append(part)
    group = step.passes.platform.groups["tp"]
    gpus = np.asarray(group.num_gpus, float)
    rate = np.asarray(group.bytes_per_s, float) * group.link_share  # of a mesh, links to these peers alone
    # in one kernel a GPU reads the whole tensor of each of the others, which no GPU of another node can
    payloads = [part.times * _payload(part.op.work) for part in kinds["sums"]]
    direct = np.where(np.asarray(group.num_nodes) > 1, np.inf, sum(payloads, np.zeros(())) * (gpus - 1) / rate)
    counts = sum((part.times for part in kinds["sums"]), np.zeros(()))
    dense, experts, sums, exchanges, other = (step.passes.sum(parts) for parts in kinds.values())
    moved = _moved_s(step, [*kinds["dense"], *kinds["experts"], *kinds["rest"]])
    # between stages of a pipeline
    sent = step.message_s if np.all(np.asarray(step.passes.parallel.pp) > 1) else 0.0
    columns = (dense, experts, sums, direct, counts, exchanges, other + sent, moved)
    return np.stack([np.broadcast_to(np.asarray(column, float), np.shape(knots)) for column in columns])


def _slowed(step: Iteration, design: StepDesign, knots: ArrayLike) -> Floats:
    """Factors on the times of products, and of those of experts, while kernels of a library move data [2, knots]."""
    platform, copy = step.passes.platform, design.system.gpu.cu_copy
    # a kernel that copies leaves one CU to products at least
    copying_cus = 0 if copy is None else np.minimum(copy.num_cus, np.asarray(platform.chip.cus) - 1)
    rows = []
    for kind in ("dense", "experts"):
        parts = [part for part in step.passes.parts if _kind(part.op.work) == kind and part.op.kind not in _CORE]
        times = beside_moved_data([part.op for part in parts], [part.spent for part in parts], platform, copying_cus)
        late = sum((part.times * seconds for part, seconds in zip(parts, times, strict=True)), np.zeros(()))
        alone = step.passes.sum(parts)
        rows.append(np.where(alone > 0, quotient(late, alone), 1.0))
    return np.stack([np.broadcast_to(np.asarray(row, float), np.shape(knots)) for row in rows])


def _payload(work: Work) -> Floats:
    assert isinstance(work, Exchange)
    return np.asarray(work.payload_bytes, float)


def _kind(work: Work) -> str:
    """The columns of `StepParts.linear` an operator belongs to."""
    if isinstance(work, Product):
        return "experts" if work.grouped else "dense"
    if isinstance(work, TokenExchange):
        return "exchanges"
    if not isinstance(work, Exchange) or work.ctas:  # which norms what it adds
        return "rest"
    return "sums" if work.pattern == "all_reduce" and work.over == "tp" else "rest"


def _launches(step: Iteration) -> float:
    """Kernels that a host launches in a step."""
    tp = step.passes.parallel.tp
    return float(np.max(sum((part.times * num_kernels(part.op, tp) for part in step.passes.parts), np.zeros(()))))


def memory_of(design: StepDesign) -> tuple[float, float, float]:
    """Bytes of a GPU: weights, keys and values of a token, all memory."""
    # the difference is of the cache alone: buffers of a step do not grow with the context
    near, far = (step_run(design, "decode", 1, length) for length in (1, 1025))
    cached = [float(step.passes.of_blocks("kept")) for step in (near, far)]
    passes, room = near.passes, design.system.gpu.hbm_bytes
    stored = [
        passes.weight_bytes(block) if block.weight_bytes is None else block.weight_bytes for block in passes.blocks
    ]
    weights = [
        float(np.asarray(size) * passes.counts[block.name]) for size, block in zip(stored, passes.blocks, strict=True)
    ]
    return sum(weights), (cached[1] - cached[0]) / 1024, float("inf") if room is None else float(room)
