"""Passes of a layer: casts before its products, what is computed again, and the backward pass of each operator.

Two products back for each forward one, of its input (dX) and of its weights (dW); five in attention in one kernel for
its two, as scores are computed again. With adapters (`run.adapters`: LoRA, arXiv:2106.09685) weights are frozen: none
of them has a dW, and inputs and gradients are cast by rows alone; beside each projection of attention, of k to m
numbers, an adapter of rank r reads k and writes r numbers of each token, then reads r and adds m (products of
`run.precision`, after a dropout of their input), with both gradients. Inputs that are kept in a format of their own
(`run.activations`) are cast to it forward, and back before dW.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from simulators.costs.algorithms import Pattern
from simulators.steps.operators.context_parallel import PartialSum, RingPass
from simulators.steps.operators.experts import EXPERT_BIAS, EXPERT_CLAMP, TokenExchange, gradients_of_rows
from simulators.steps.operators.sizes import COPIED, Sizes, elements, product
from simulators.steps.operators.state_layers import Scan
from simulators.steps.operators.work import AGAIN, Exchange, Op, Phase, Product, Stream
from simulators.steps.run.stages import stage_share
from simulators.workloads.stored import weight_format

_SCORE = 4  # bytes of a score in fp32

_SUMS = ("all-reduce", "reduce-scatter")
TRANSPOSES = "transposes"
"""What names of copies of queries, keys and values end in."""
_READS_ALL = ("qkv", "cross qkv", "fc1", "latent down", "shared fc1", "state in")
"""Products of what tp does not split, whose gradients every GPU of tp has a part of."""
_UP = ("q up", "kv up", "rotary")
_DISPATCHED = ("expert fc1", "shared fc1")
_FLASH_BACKWARD = 2.5  # five products for the forward pass's two: scores are computed again
_DROPOUT = 2.5  # passes: read, write, and a mask of one byte
_LARGEST: Mapping[str, float] = {"tensor": 1.0, "row": 1.0, "block": 0.0}
"""Passes that find the largest numbers before a cast by tiles: of a whole tensor, of columns; a block has its own."""
_BY_COLUMNS = 0.5  # of a pass: the copy of 8 bits that gradients of weights alone read


def adapter(sizes: Sizes, name: str, work: Product) -> Iterator[Op]:
    """The adapter beside a projection, forward; nothing where all weights are trained."""
    if sizes.run.adapters is None or sizes.run.mode != "training":
        return
    rank = np.asarray(sizes.run.adapters, float)
    m, n, k = (np.asarray(size, float) for size in (work.m, work.n, work.k))
    # of kind attention: products of activations' precision, with two gradients each
    yield _stream_op(f"{name} adapter dropout", _DROPOUT * sizes.element * k * n)
    yield Op(f"{name} adapter down", "attention", "forward", product(rank, n, k))
    yield Op(f"{name} adapter up", "attention", "forward", product(m, n, rank))
    yield _stream_op(f"{name} adapter sum", 3 * sizes.element * m * n)


def _stream_op(name: str, moved: Any) -> Op:
    return Op(name, "activation", "forward", Stream(moved, like="add", like_bytes=moved))


def adapter_weights(sizes: Sizes, *widths: tuple[Any, Any]) -> Any:
    """Weights of the adapters of projections of (k, m) numbers; None where all weights are trained."""
    rank = sizes.run.adapters
    return None if rank is None else sum(np.asarray(rank, float) * (k + m) for k, m in widths)


def recomputed_share(sizes: Sizes) -> Any:
    """Share of the layers of a stage whose activations are computed again."""
    chosen = sizes.run.recompute_layers
    return 1.0 if chosen is None else share_of_stage(sizes, chosen)


def share_of_stage(sizes: Sizes, chosen: Any) -> Any:
    """Share that so many layers are of those of a stage, at most all of them."""
    layers = np.asarray(sizes.model.layers, float)
    ends = 2 if sizes.parallel.ends == "layers" else 0  # the first and the last stage have one layer less
    of_stage = np.minimum(layers, stage_share(layers + ends, sizes.parallel.pp) * (layers + ends))
    return np.minimum(1.0, np.asarray(chosen, float) / np.maximum(of_stage, 1.0))


def all_passes(sizes: Sizes, forward: tuple[Op, ...]) -> tuple[Op, ...]:
    """Forward operators, then those that recompute, then those of the backward pass."""
    plain, forward = forward, tuple(part for op in forward for part in (*_casts_before(sizes, op), op))
    if sizes.run.mode != "training":
        return forward
    again = _computed_again(sizes, forward)
    if sizes.run.recompute_layers is not None:
        share = recomputed_share(sizes)
        again = [replace(op, count=share * np.asarray(op.count, float)) for op in again]
    recomputed = tuple(replace(op, phase="recompute", name=f"{op.name}{AGAIN}") for op in again)
    backward = (gradient for op in reversed(plain) for gradient in _backward(sizes, op))
    return (*forward, *recomputed, *backward)


def _casts_before(sizes: Sizes, op: Op) -> Iterator[Op]:
    """Casts of what a product reads, and of its input into the format in which it is kept."""
    yield from _casts(sizes, op, backward=False)
    yield from _kept_cast(sizes, op, "forward")


def _kept_cast(sizes: Sizes, op: Op, phase: Phase) -> Iterator[Op]:
    """The cast of a linear layer's input into the format in which it is kept, or back; none where products have it."""
    name, work = sizes.run.activations, op.work
    if name is None or name == sizes.run.products or not isinstance(work, Product) or not _is_linear(op):
        return
    tensor = np.asarray(work.n, float) * np.asarray(work.k, float) * np.asarray(work.batch, float)
    moved = (sizes.element + weight_format(name).bytes_of(sizes.hidden)) * tensor
    word = "kept" if phase == "forward" else "read back"
    yield Op(f"{op.name} {word}", op.kind, phase, Stream(moved), op.count, weight=phase == "backward")


def _casts(sizes: Sizes, op: Op, *, backward: bool) -> Iterator[Op]:
    """Casts of what a linear layer multiplies: inputs and weights forward, gradients of its output backward."""
    passes, work = sizes.kernels.casts, op.work
    if sizes.run.products is None or op.unnarrowed or not isinstance(work, Product) or not _is_linear(op):
        return
    if passes is None:  # other frameworks cast by tiles
        yield from _tile_casts(sizes, op, work, backward=backward)
        return
    m, n, k = (np.asarray(size, float) for size in (work.m, work.n, work.k))
    tensor = sizes.element * (m * n if backward else (m + n) * k)
    times: Any = passes.backward if backward else passes.forward
    kernels: Any = passes.backward_kernels if backward else passes.forward_kernels
    if sizes.run.scales == "row":  # rows of a product are columns of its gradients: each has a cast of its own
        times, kernels = 2 * np.asarray(times), 2 * np.asarray(kernels)
    elif sizes.run.scales == "block":  # a block finds its largest number in the cast itself
        times, kernels = (np.maximum(np.asarray(number) - 1, 1) for number in (times, kernels))
    cast = Stream(times * tensor, kernels=kernels)
    yield Op(f"{op.name} cast", op.kind, "backward" if backward else "forward", cast, op.count)


def _tile_casts(sizes: Sizes, op: Op, work: Product, *, backward: bool) -> Iterator[Op]:
    """Casts by tiles, of inputs and gradients alone; tokens that were cast for their dispatch are not cast again."""
    casts, experts = sizes.kernels.tile_casts, sizes.kernels.experts
    cast_first = op.name in _DISPATCHED and (experts is None or experts.cast_first)
    if casts is None or (cast_first and not backward):  # cast once, for their dispatch
        return
    scales, apart = sizes.run.scales, work.grouped and sizes.run.products not in casts.together
    launches = np.asarray(op.launches) * (1.0 if experts is None else experts.casts) if apart else 0.0
    before = casts.before(sizes.run.products) if scales is None else _LARGEST[scales]
    once = 0.0 if sizes.run.adapters is None else _BY_COLUMNS  # products with frozen weights read rows alone
    m, n, k, batch = (np.asarray(size, float) for size in (work.m, work.n, work.k, work.batch))
    inputs, outputs = sizes.element * n * k * batch, sizes.element * m * n * batch
    if not backward:
        cast = Stream((before + casts.inputs - once) * inputs)
        yield Op(f"{op.name} cast", op.kind, "forward", cast, op.count, launches=launches)
        return
    gradients = Stream((before + casts.gradients - once) * outputs)
    yield Op(f"{op.name} cast", op.kind, "backward", gradients, op.count, launches=launches)
    if sizes.run.adapters is None and np.any(np.asarray(casts.transposes) > 0):
        transposes = Stream(casts.transposes * inputs)
        yield Op(f"{op.name} transpose", op.kind, "backward", transposes, op.count, weight=True)


def _computed_again(sizes: Sizes, forward: tuple[Op, ...]) -> list[Op]:
    """Forward operators that the backward pass computes again."""
    what, flash = sizes.run.recompute, sizes.kernels.flash_share_of_peak is not None
    if what == "half":
        stored = [op for op in forward if (op.kind == "attention" and flash) or op.name.startswith(_SUMS)]
        left = [op for op in forward if op not in stored]  # linear layers of half of the layers
        return [replace(op, count=0.5 * np.asarray(op.count)) if _is_linear(op) else op for op in left]
    if what == "up_projections":
        ups = () if sizes.model.latent is None else _UP
        return [op for op in forward if op.kind == "norm" or op.name.startswith(ups) or op.name.endswith("activation")]
    core = ("attention", "softmax")
    again = [op for op in forward if what == "all" or (what == "attention" and op.kind in core)]
    return [] if flash and what == "attention" else again  # such a kernel keeps no scores to compute again


def _is_linear(op: Op) -> bool:
    return isinstance(op.work, Product) and op.kind in ("linear", "fc")


def _backward(sizes: Sizes, op: Op) -> Iterator[Op]:
    """Operators of the backward pass for one forward operator."""
    gradient = replace(op, phase="backward")
    work = op.work
    if isinstance(work, Product) and op.kind == "attention":  # both operands are activations: two gradients
        m, n, k = work.m, work.n, work.k
        yield replace(gradient, name=f"{op.name} dA", work=Product(k, m, n, work.batch))
        yield replace(gradient, name=f"{op.name} dB", work=Product(k, n, m, work.batch))
    elif isinstance(work, Product):
        yield from _casts(sizes, op, backward=True)
        parts: dict[str, Any] = {"batch": work.batch, "grouped": work.grouped}
        yield replace(gradient, name=f"{op.name} dX", work=Product(work.k, work.n, work.m, **parts))
        # each GPU has a part of the gradient of the whole input
        if op.name in _READS_ALL or (op.name == "expert fc1" and sizes.parallel.ep == 1):
            yield from _conjugate(sizes, op)
        if sizes.run.adapters is None:
            yield from _kept_cast(sizes, op, "backward")
            yield replace(gradient, name=f"{op.name} dW", work=Product(work.k, work.m, work.n, **parts), weight=True)
    elif isinstance(work, TokenExchange | RingPass | PartialSum | Scan):
        yield replace(gradient, name=f"{op.name} backward", work=work.backward)
    elif isinstance(work, Stream):
        yield replace(gradient, name=f"{op.name} backward", work=_streamed_back(sizes, op))
    elif isinstance(work, Exchange) and work.pattern == "reduce_scatter":  # its gradient is gathered
        yield replace(gradient, name=f"{op.name} backward", work=replace(work, pattern="all_gather"))
    elif isinstance(work, Exchange) and work.over == "etp":  # and that of what was gathered is added
        yield replace(gradient, name=f"{op.name} backward", work=replace(work, pattern="reduce_scatter"))
    elif isinstance(work, Exchange) and work.pattern == "all_to_all":
        yield replace(gradient, name=f"{op.name} backward")


def _conjugate(sizes: Sizes, op: Op) -> Iterator[Op]:
    """The sum of the gradients of what every GPU has read: of the whole input, or of its own tokens."""
    pattern: Pattern = "reduce_scatter" if sizes.parallel.sequence_parallel else "all_reduce"
    name = f"{pattern.replace('_', '-')} {op.name} dX"
    yield Op(name, op.kind, "backward", Exchange(pattern, sizes.activations))


def _streamed_back(sizes: Sizes, op: Op) -> Stream:
    """The backward pass of what memory bounds."""
    assert isinstance(op.work, Stream)
    if op.kind == "attention":
        moved = np.asarray(op.work.bytes) * 2  # operands and their gradients
        known = sizes.kernels.flash_backward_share
        share = op.work.share_of_peak if known is None else known
        return replace(op.work, bytes=moved, flop=np.asarray(op.work.flop) * _FLASH_BACKWARD, share_of_peak=share)
    if op.name in (EXPERT_BIAS, EXPERT_CLAMP):
        return gradients_of_rows(sizes, op.name)
    if op.work.like in ("rotary", "add") or op.name.startswith(COPIED):
        return op.work  # as much back as forward
    kernels = sizes.kernels
    if op.name.endswith(TRANSPOSES) and kernels.transposes is not None:
        back = kernels.transposes
        tensor = sizes.element * sizes.tokens * sizes.heads * sizes.head
        return Stream(back.backward * tensor, kernels=back.backward_kernels)
    passes = {"norm": kernels.norm, "softmax": kernels.softmax, "activation": kernels.activation}[op.kind]
    # `like_bytes` counts a read and a write
    tensor = np.asarray(op.work.like_bytes) / 2 if op.work.like else sizes.element * elements(sizes, op.kind)
    return Stream(passes.backward * tensor, kernels=passes.backward_kernels)


def add_gradients(sizes: Sizes, params: Any, tensors: Any) -> Iterator[Op]:
    """The sum of gradients of micro-batches, by a kernel for each tensor."""
    passes = sizes.kernels.gradient_passes
    if sizes.run.mode == "training" and passes is not None and sizes.run.adapters is None:
        moved = np.asarray(passes) * sizes.element * params
        yield Op("add gradients", "linear", "backward", Stream(moved, kernels=tensors), weight=True)


def sink_gradients(sizes: Sizes) -> Iterator[Op]:
    """The gradients of sinks: of each token and head its share of the softmax, and what it is multiplied by."""
    if sizes.run.mode == "training" and sizes.model.sinks:
        moved = 2 * _SCORE * sizes.tokens * sizes.heads
        yield Op("sinks", "softmax", "backward", Stream(moved, 2 * sizes.tokens * sizes.heads), weight=True)
