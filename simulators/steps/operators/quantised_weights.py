"""Low-precision copies of weights that products read: stored, or made just in time by the GPU or in its memory (JIT-Q).

Weights are kept in the precision of the run. Products read copies whose blocks lie along the axis they sum over, so
that the forward pass (and what is computed again) reads one copy, and dX of the backward pass another, in a format that
may differ. Attention has no weights, and gradients of weights are products without them.

    update  all copies are made once, by the optimizer's kernels, which write them beside the weights, and stored; where
            others have updated most weights (ZeRO), by kernels that read these (bytes / (f W), as other streams)
    gpu     before every product that reads one, by a kernel that reads the weights and writes that copy
    pim     by units at the banks (`simulators/hardware/pim.py`), while layers before it run
    (`simulators/costs/pim_bursts.py`)

With `kept` the copies of that share of the layers, the first ones, are stored all the same.

Products of copies run at the rate of the precision of the run, and read its bytes: what faster or smaller products
would change is for other constants of the device. A product that lacks bytes in a burst goes on with those that its
tiles have on the chip, of which `staged_bytes` hold each as often as tiles read it: with tiles of r x s at most 128,
distinct are the share (1/m + 1/n) / (1/r + 1/s) of them. Other operators have nothing staged (derived).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from dse.values import knob
from dse.values.units import Integer, Number
from simulators.costs.gemm.fitted import LARGEST_TILE
from simulators.hardware.parts import SourcedValue
from simulators.hardware.pim import Direction, Format, InstructionSet, Pim, commands_per_word
from simulators.steps.operators.work import (
    ModelBlock,
    Op,
    OperatorCost,
    Platform,
    Product,
    StageOperator,
    Stream,
    operator_costs,
)
from simulators.workloads.model import Optimizer, Parallel, Run, Share

if TYPE_CHECKING:
    from simulators.costs.pim_bursts import Events, Layers, Memory

Floats = NDArray[np.float64]

_OTHER: Mapping[Direction, Direction] = {"lanes": "word", "word": "lanes"}
_NEEDED = ("look_ahead", "burst_rows", "window", "blocked")
OF_PIM = (*_NEEDED, "over", "beside", "forward_blocks")
"""What of `QuantisedWeights` means something for units in memory alone."""


class QuantisedWeights(SourcedValue):
    """Copies of weights: which there are, and who makes them when.

    backward: format of the backward pass where it differs. stored: the copies that are used, or all directions of both
    formats. kept: share of layers whose copies are stored, of those that are made just in time. forward_blocks: where
    blocks of the forward pass lie in memory, those of the backward pass lie the other way. Of units in memory:
    look_ahead, layers that are begun before the GPU has come to them, of a pass or over a micro-batch; beside, whether
    bursts begin while products run alone, or while anything does; burst_rows,
    rows that a unit opens in a burst; window, time of the GPU after a burst, in bursts; blocked, share of the channels
    that work, and do not serve the GPU, in a burst.
    """

    name: str
    description: str = ""
    made_by: Annotated[Literal["update", "gpu", "pim"], knob(structural=True)]
    backward: Format | None = None
    stored: Annotated[Literal["used", "all"], knob(structural=True)] = "used"
    kept: Share = 0.0
    forward_blocks: Annotated[Direction, knob(structural=True)] = "word"
    over: Annotated[Literal["pass", "micro_batch"], knob(structural=True)] = "pass"
    beside: Annotated[Literal["products", "all"], knob(structural=True)] = "products"
    look_ahead: Annotated[Integer, Field(ge=0, le=1024)] | None = None
    burst_rows: Annotated[Integer, Field(ge=1, le=10**6)] | None = None
    window: Annotated[Number, Field(ge=0, le=1e3)] | None = None
    blocked: Annotated[Number, Field(gt=0, le=1)] | None = None

    @model_validator(mode="after")
    def _says_how_units_work(self) -> QuantisedWeights:
        absent = [name for name in _NEEDED if self.made_by == "pim" and getattr(self, name) is None]
        if absent:
            raise ValueError(f"made_by = pim needs {', '.join(absent)}; see conf/quantised/pim.yaml")
        return self


@dataclass(frozen=True)
class WeightQuantiser:
    """Maker of copies: who makes them, the format of the forward pass, and the units in memory.

    staged_bytes: what tiles of products hold of inputs that they have not yet multiplied.
    """

    quantised: QuantisedWeights
    format: Format
    training: bool
    instructions: InstructionSet | None = None
    pim: Pim | None = None
    staged_bytes: Any = 0.0

    @property
    def backward(self) -> Format:
        """Format of the backward pass."""
        return self.quantised.backward or self.format

    def read(self, op: Op) -> Format | None:
        """Format of the copy that an operator reads; None where it reads no weights."""
        # gradients of weights multiply activations
        if not isinstance(op.work, Product) or op.weight or op.kind == "attention":
            return None
        return self.backward if op.phase == "backward" else self.format

    def stored_blocks(self, count: Any) -> Any:
        """Number of blocks, of `count` equal ones, whose copies are stored."""
        # copies of the update are always stored
        share = 1.0 if self.quantised.made_by == "update" else self.quantised.kept
        return np.rint(np.asarray(share, float) * count)  # whole blocks

    @property
    def stored_bytes(self) -> Any:
        """Bytes of all copies of a weight where all are stored."""
        forward, backward = self.format.bytes_per_element, self.backward.bytes_per_element
        if self.quantised.stored == "used":
            return forward + (backward if self.training else 0.0)
        # one format: two directions; two formats: two each
        return (forward + backward) * (1 if self.quantised.backward is None else 2)

    def direction(self, op: Op) -> Direction:
        """Direction in which blocks of its copy lie in memory."""
        forward = self.quantised.forward_blocks
        return _OTHER[forward] if op.phase == "backward" else forward


@dataclass(frozen=True)
class CopyCosts:
    """Costs of copies [s]: more in a micro-batch and in an iteration; of the former waited for, and slowed by bursts.

    busy_s: units or kernels at work, in a micro-batch. hbm_bytes, kernels: of the GPU, in a micro-batch and in an
    iteration.
    """

    slot_s: Any = 0.0
    update_s: Any = 0.0
    waited_s: Any = 0.0
    slowed_s: Any = 0.0
    busy_s: Any = 0.0
    hbm_bytes: tuple[Any, Any] = (0.0, 0.0)
    kernels: tuple[Any, Any] = (0.0, 0.0)


def elements(op: Op) -> Any:
    """Weights that a product reads, each time that its block runs."""
    assert isinstance(op.work, Product)
    return np.asarray(op.work.m, float) * np.asarray(op.work.k, float) * np.asarray(op.count, float)


class Stage(Protocol):
    """The iteration of one stage of a pipeline, as far as copies depend on it (see `steps.passes.MicroBatch`)."""

    @property
    def weight_copies(self) -> WeightQuantiser | None:
        """The copies; None where products read the weights themselves."""

    @property
    def blocks(self) -> tuple[ModelBlock, ...]:
        """Blocks of the model."""

    @property
    def platform(self) -> Platform:
        """The GPU and its groups."""

    @property
    def run(self) -> Run:
        """Batch, precision and recomputation."""

    @property
    def parallel(self) -> Parallel:
        """Degrees of parallelism."""

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer."""

    @property
    def is_training(self) -> bool:
        """True if weights are updated."""

    @property
    def parts(self) -> tuple[StageOperator, ...]:
        """Operators of the stage, in order."""

    @property
    def counts(self) -> Mapping[str, Floats]:
        """Number of times that each block comes in the stage."""

    def of_blocks(self, attribute: str) -> Floats:
        """Sum of a number of the blocks over those of the stage."""


def weights(block: ModelBlock) -> Any:
    """Weights of a block that have copies."""
    reads = (op for op in block.of("forward") if isinstance(op.work, Product) and op.kind != "attention")
    return _sum(elements(op) for op in reads)


def copy_bytes(iteration: Stage, block: ModelBlock) -> Any:
    """Copies of one block that are stored, in the mean of its kind."""
    quantising = iteration.weight_copies
    if quantising is None:
        return np.zeros(())
    return weights(block) * quantising.stored_bytes * _kept_share(iteration, block)


def _kept_share(iteration: Stage, block: ModelBlock) -> Any:
    """Share of the blocks of a kind whose copies are stored, of those that a stage of a pipeline has of them."""
    assert iteration.weight_copies is not None
    # blocks of one stage
    count = np.maximum(1.0, np.ceil(np.asarray(block.count, float) / np.asarray(iteration.parallel.pp, float)))
    return iteration.weight_copies.stored_blocks(count) / count


def flying_bytes(iteration: Stage) -> Any:
    """Bytes of copies made just in time that exist at once: of the largest product, or of all layers in flight.

    A layer that computes again has copies of both passes.
    """
    quantising = iteration.weight_copies
    if quantising is None or quantising.quantised.made_by == "update":  # stored copies are counted as such
        return np.zeros(())
    largest: Any = np.zeros(())
    for block in iteration.blocks:
        read = iteration.counts[block.name] * (1 - _kept_share(iteration, block)) > 0
        largest = np.maximum(largest, np.where(read, _of_layer(quantising, block), 0.0))
    ahead = quantising.quantised.look_ahead
    return largest * (1 + np.asarray(0 if ahead is None else ahead))  # layers ahead have their copies ready


def _of_layer(quantising: WeightQuantiser, block: ModelBlock) -> Any:
    """Copies of a block that one pass has at once: its largest one where the GPU makes them."""
    # recomputation reads forward copies in the backward pass
    passes = [block.of("forward"), block.of("recompute", "backward")]
    sizes = [[_copy_bytes(quantising, op) for op in ops] for ops in passes]
    if quantising.quantised.made_by == "gpu":  # one copy at a time, made just before its product
        return functools.reduce(np.maximum, (size for pass_sizes in sizes for size in pass_sizes), np.zeros(()))
    return np.maximum(*(_sum(pass_sizes) for pass_sizes in sizes))


def _copy_bytes(quantising: WeightQuantiser, op: Op) -> Any:
    """The copy that an operator reads."""
    format = quantising.read(op)
    return np.zeros(()) if format is None else elements(op) * format.bytes_per_element


def copy_costs(iteration: Stage) -> CopyCosts:
    """Costs that copies add to an iteration."""
    if iteration.weight_copies is None:
        return CopyCosts()
    stored = _update_costs(iteration)
    if iteration.weight_copies.quantised.made_by == "update":
        return stored
    just_in_time = _by_gpu(iteration) if iteration.weight_copies.quantised.made_by == "gpu" else _by_pim(iteration)
    return replace(
        just_in_time,
        update_s=stored.update_s,
        hbm_bytes=(just_in_time.hbm_bytes[0], stored.hbm_bytes[1]),
        kernels=(just_in_time.kernels[0], stored.kernels[1]),
    )


def _update_costs(iteration: Stage) -> CopyCosts:
    """Costs of copies written with the update, or after it; nothing where weights stay as they are."""
    if not iteration.is_training:
        return CopyCosts()
    written = [copy_bytes(iteration, block) * iteration.counts[block.name] for block in iteration.blocks]
    read = [weights(block) * _kept_share(iteration, block) * iteration.counts[block.name] for block in iteration.blocks]
    # where other GPUs update most weights, copies are made by kernels that read them
    apart = 1.0 if iteration.parallel.zero else 0.0
    moved = _sum(written) + apart * iteration.run.element_bytes * _sum(read)
    launched = apart * iteration.of_blocks("tensors") * iteration.optimizer.kernels_per_tensor * (moved > 0)
    (cost,) = operator_costs(
        [Op("copies", "optimizer", "optimizer", Stream(moved, kernels=launched))], iteration.platform
    )
    return CopyCosts(update_s=cost.seconds, hbm_bytes=(0.0, moved), kernels=(0.0, launched))


def _by_gpu(iteration: Stage) -> CopyCosts:
    """A kernel before each product, in line with it."""
    # of the layers without stored copies
    every = [(part.times * (1 - _kept_share(iteration, part.block)), cost) for part, cost in kernels(iteration)]
    seconds, moved = (_sum(times * getattr(cost, name) for times, cost in every) for name in ("seconds", "bytes"))
    launches = _sum(times for times, _ in every)
    return CopyCosts(slot_s=seconds, waited_s=seconds, busy_s=seconds, hbm_bytes=(moved, 0.0), kernels=(launches, 0.0))


def kernels(iteration: Stage) -> list[tuple[StageOperator, OperatorCost]]:
    """Products that read a copy, each with the cost of the kernel that makes it, each time."""
    quantising = iteration.weight_copies
    assert quantising is not None
    ops, parts = [], []
    for part in iteration.parts:
        if (format := quantising.read(part.op)) is not None:
            num_elements = elements(part.op) / np.asarray(part.op.count, float)  # elements of one run
            work = Stream(num_elements * (iteration.run.element_bytes + format.bytes_per_element))
            ops.append(Op("copy", part.op.kind, part.op.phase, work))
            parts.append(part)
    return list(zip(parts, operator_costs(ops, iteration.platform), strict=True))


def _sum(values: Iterable[Any]) -> Any:
    return sum(values, np.zeros(()))


def _by_pim(iteration: Stage) -> CopyCosts:
    """Events of one micro-batch."""
    from simulators.costs.pim_bursts import turns

    shape = np.broadcast_shapes(*(np.shape(value) for value in _numbers(iteration)))
    every = turns(*_run(iteration, shape))
    waited, slowed, busy = (value.reshape(shape) for value in (every.waited, every.slowed, every.busy))
    return CopyCosts(slot_s=waited + slowed, waited_s=waited, slowed_s=slowed, busy_s=busy)


def timeline(iteration: Stage) -> Events:
    """Events of one micro-batch of a design whose numbers are single ones."""
    from simulators.costs.pim_bursts import events

    return events(*_run(iteration, ()))


def _passes(iteration: Stage) -> list[tuple[bool, bool, list[StageOperator]]]:
    """(whether forward, whether copies are made, operators of a block) of the blocks of each pass, in order."""
    of_block = {block.name: [part for part in iteration.parts if part.block is block] for block in iteration.blocks}
    names = list(of_block)
    every = [
        (forward, made_, [part for part in of_block[name] if part.forward == forward])
        for forward in (True, False)  # forward pass first
        for name in (names if forward else names[::-1])
        # layers with stored copies come first in the forward pass, last in the backward
        for made_ in ((False, True) if forward else (True, False))
    ]
    return [(forward, made_, parts) for forward, made_, parts in every if parts]


def _numbers(iteration: Stage) -> Iterator[Any]:
    """All that may be an array over designs."""
    memory = _memory(iteration)
    yield from (memory.rate, memory.blocked, memory.window, memory.ahead, _kept_of(iteration))
    for _, _, parts in _passes(iteration):
        for part in parts:
            yield from (part.spent.seconds, part.spent.bytes, part.times)
            yield from (_staged_bytes(iteration, part.op), *_copy_times(iteration, part.op))


def _kept_of(iteration: Stage) -> Any:
    assert iteration.weight_copies is not None
    return iteration.weight_copies.quantised.kept


def _memory(iteration: Stage) -> Memory:
    from simulators.costs.pim_bursts import Memory

    quantising = iteration.weight_copies
    assert quantising is not None
    copies = quantising.quantised
    blocked, window, ahead = (
        np.asarray(number, float) for number in (copies.blocked, copies.window, copies.look_ahead)
    )
    return Memory(iteration.platform.chip.drawable_bytes_per_s, blocked, window, ahead)


def _run(iteration: Stage, shape: tuple[int, ...]) -> tuple[Layers, Memory]:
    """Layers and memory that `simulators.costs.pim_bursts` runs, over B designs of this shape."""
    from simulators.costs.pim_bursts import Layers

    passes, quantising = _passes(iteration), iteration.weight_copies
    assert quantising is not None
    every = [(part, made_) for _, made_, parts in passes for part in parts]
    designs = int(np.prod(shape))

    def table(columns: Iterable[Any]) -> Floats:
        flat = [np.broadcast_to(np.asarray(column, float), shape).reshape(designs) for column in columns]
        return np.stack(flat, axis=1)

    def count(made_: bool, block: ModelBlock) -> Any:
        num_blocks = np.rint(iteration.counts[block.name])
        return num_blocks - quantising.stored_blocks(num_blocks) if made_ else quantising.stored_blocks(num_blocks)

    # no copy; any length of burst
    copies = [_copy_times(iteration, part.op) if made_ else (0.0, 1.0) for part, made_ in every]
    over = quantising.quantised.over == "micro_batch"
    layers = Layers(
        np.cumsum([0, *(len(parts) for _, _, parts in passes)]),
        # one pass for all, or the backward pass looks no further than its own layers
        np.array([0 if forward or over else 1 for forward, _, _ in passes]),
        np.array([quantising.quantised.beside == "all" or isinstance(part.op.work, Product) for part, _ in every], int),
        table(count(made_, parts[0].block) for _, made_, parts in passes).astype(np.int64),
        table(part.spent.seconds * np.asarray(part.op.count, float) for part, _ in every),
        table(part.spent.bytes * np.asarray(part.op.count, float) for part, _ in every),
        table(_staged_bytes(iteration, part.op) for part, _ in every),
        *(table(copy[place] for copy in copies) for place in (0, 1)),
    )
    memory = _memory(iteration)
    flat = (np.broadcast_to(np.asarray(copy, float), shape).reshape(designs) for copy in vars(memory).values())
    return layers, type(memory)(*flat)


def _staged_bytes(iteration: Stage, op: Op) -> Any:
    """Distinct bytes of operands staged by resident tiles of a product; 0 for other operators."""
    assert iteration.weight_copies is not None
    if not isinstance(op.work, Product):
        return 0.0
    m, n = (np.asarray(size, float) for size in (op.work.m, op.work.n))
    # a tile is no larger than the product
    share = (1 / m + 1 / n) / (1 / np.minimum(m, LARGEST_TILE) + 1 / np.minimum(n, LARGEST_TILE))
    return np.asarray(iteration.weight_copies.staged_bytes, float) * share


def _copy_times(iteration: Stage, op: Op) -> tuple[Any, Any]:
    """(time of the copy that an operator reads, length of a burst) [s], of units of the channels that are blocked."""
    quantising = iteration.weight_copies
    assert quantising is not None
    format = quantising.read(op)
    pim, instructions = quantising.pim, quantising.instructions
    if format is None or pim is None or instructions is None:
        return 0.0, 1.0
    copies, source = quantising.quantised, iteration.run.element_bytes
    commands = commands_per_word(instructions, pim, format, quantising.direction(op), source)
    words = pim.per_unit(elements(op) * source)
    rows = np.maximum(1.0, words / pim.words_per_row)  # a row is opened at least
    bursts = np.ceil(rows / np.asarray(copies.burst_rows, float))
    seconds = pim.copy_s(words, commands, written=format.bytes_per_element / source) + bursts * pim.switch_s
    return seconds / np.asarray(copies.blocked, float), seconds / bursts  # channels of a burst, not all, work at a time
