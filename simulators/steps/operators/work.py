"""Operators of an iteration: what each does, and what that costs on a GPU and over its links.

Sizes may be arrays over a grid of designs (or over sequence lengths) wherever they are numbers; they broadcast with one
another. An operator does its work in one pass of one block; a block (such as a layer) comes `count` times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dse.values import Memo
from simulators.costs.algorithms import Pattern
from simulators.costs.chip import Chip, Cost
from simulators.costs.collective import CollectiveCost, Group, collective_cost, library_cost
from simulators.costs.convolution import convolution
from simulators.costs.gemm import Gemms, GemmShape, gemm_cost
from simulators.costs.recurrent import recurrent
from simulators.costs.sharing import Sharing
from simulators.costs.streaming import streamed, streaming_cost
from simulators.hardware.parts import StreamingRates, StreamKind
from simulators.steps.operators.fused_sums import fused_sum_s, norm_s
from simulators.workloads.model import BatchedGemmRates

Floats = NDArray[np.float64]

Kind = Literal[
    "linear",
    "fc",
    "attention",
    "softmax",
    "activation",
    "norm",
    "embedding",
    "output",
    "recurrent",
    "convolution",
    "optimizer",
]
KINDS: tuple[Kind, ...] = get_args(Kind)
"""What an operator is for; shares of time are told by these.

linear: projections of attention (and of the input of a recurrent layer). fc: feed-forward layers. attention: batched
products of queries, keys and values. softmax: with scale, mask and dropout. norm: with dropout and residual.
embedding, output: the ends of the model.
"""
Phase = Literal["forward", "recompute", "backward", "optimizer"]
AGAIN = " again"
"""What the names of operators end in that the backward pass computes again."""
Axis = Literal["tp", "pp", "dp", "ep", "cp", "edp", "etp", "shard", "repeat"]
"""Groups of GPUs: tp, pp, dp (with cp, over which gradients are reduced), ep, cp, those with the same experts, those
that share one expert, those that share states of dp, and those that have the same share of them."""


@dataclass(frozen=True)
class Product:
    """`batch` GEMMs of sizes (m, n, k) at once; transposed: whether A is. grouped: by a kernel for GEMMs of experts.

    weight_bytes: of an element of A, where weights are stored in a format of their own.
    """

    m: ArrayLike
    n: ArrayLike
    k: ArrayLike
    batch: ArrayLike = 1.0
    transposed: bool = False
    grouped: bool = False
    weight_bytes: ArrayLike | None = None


@dataclass(frozen=True)
class Stream:
    """Passes over tensors by `kernels` kernels that memory bounds: bytes read and written, and FLOP.

    share_of_peak: the rate at which these FLOP run; vector_share: over that without matrix units where this is known
    (None: share_of_peak counts). parts: kernels one after another that this one stands for, each with a time of its
    own. like: the operator of a layer that one kernel computes, whose fitted constants count where the device has them;
    like_bytes: what this operator moves, without what is fused to it. again: bytes that are read again, from the
    last-level cache.
    """

    bytes: ArrayLike
    flop: ArrayLike = 0.0
    kernels: ArrayLike = 1.0
    share_of_peak: ArrayLike = 1.0
    like: StreamKind | None = None
    like_bytes: ArrayLike = 0.0
    again: ArrayLike = 0.0
    vector_share: ArrayLike | None = None
    parts: tuple[Stream, ...] = ()

    def share_on(self, chip: Chip) -> Floats:
        """Rate of its FLOP over the peak of a GPU."""
        if self.vector_share is None or chip.vector_flop_per_s is None:
            return np.asarray(self.share_of_peak, float)
        vector = np.asarray(self.vector_share) * np.asarray(chip.vector_flop_per_s)
        return np.asarray(vector / np.asarray(chip.flop_per_s))


@dataclass(frozen=True)
class Recurrence:
    """One pass (0 forward, 1 backward-data, 2 backward-filter) of a recurrent layer, without its input's product."""

    gates: ArrayLike
    hidden: ArrayLike
    batch: ArrayLike
    steps: ArrayLike
    pass_: int = 0


@dataclass(frozen=True)
class Filter:
    """One pass (as of `Recurrence`) of a convolution; shape: columns of `simulators.costs.convolution.Layer`."""

    shape: Mapping[str, ArrayLike]
    pass_: int = 0


@dataclass(frozen=True)
class Exchange:
    """A collective of a group of GPUs, or a message to the next stage (pp).

    ctas: of a kernel that adds in the switch and norms `norm_bytes` of the sum, beside other kernels; 0: none.
    """

    pattern: Pattern
    payload_bytes: ArrayLike
    over: Axis = "tp"
    ctas: int = 0
    norm_bytes: ArrayLike = 0.0

    def library_seconds(self, group: Group) -> Floats | None:
        """Time [s] by a library of its own; None where the library of collectives does it."""
        return None


Work = Product | Stream | Recurrence | Filter | Exchange


@dataclass(frozen=True)
class Op:
    """One operator of a block. count: how often it runs in one pass of the block.

    weight: whether it makes gradients of weights, which nothing waits for but their all-reduce. half: of the tokens
    that it is of, A or B, where two halves take turns. launches: of the host, beside one a kernel.
    unnarrowed: whether a product runs at the precision of all else where those of linear layers run at another.
    """

    name: str
    kind: Kind
    phase: Phase
    work: Work
    count: ArrayLike = 1.0
    weight: bool = False
    half: str = ""
    launches: ArrayLike = 0.0
    unnarrowed: bool = False


@dataclass(frozen=True)
class ModelBlock:
    """Operators that come together `count` times in a model. params: weights that one GPU holds of one of them.

    tensors: how many tensors these are. kept: bytes of activations that wait for the backward pass (of inference: keys
    and values), offloaded: those that wait in the host's memory instead. expert_params: weights among `params` that are
    split over ep. weight_bytes: of all of them, where they are stored in formats of their own; formats: how many have
    which. trained, trained_tensors: weights and tensors of them that have gradients; None for all. Order of `ops`: that
    of a pass.
    """

    name: str
    ops: tuple[Op, ...]
    count: ArrayLike = 1.0
    params: ArrayLike = 0.0
    tensors: ArrayLike = 0.0
    kept: ArrayLike = 0.0
    expert_params: ArrayLike = 0.0
    weight_bytes: ArrayLike | None = None
    formats: Mapping[str, ArrayLike] = field(default_factory=dict)
    offloaded: ArrayLike = 0.0
    trained: ArrayLike | None = None
    trained_tensors: ArrayLike | None = None

    @property
    def trained_params(self) -> ArrayLike:
        """Weights of one GPU that have gradients."""
        return self.params if self.trained is None else self.trained

    @property
    def trained_experts(self) -> ArrayLike:
        """Weights of experts among them."""
        return self.expert_params if self.trained is None else 0.0

    @property
    def updated_tensors(self) -> ArrayLike:
        """Tensors that an optimizer updates."""
        return self.tensors if self.trained_tensors is None else self.trained_tensors

    def of(self, *phases: Phase) -> tuple[Op, ...]:
        """Its operators of some phases."""
        return tuple(op for op in self.ops if op.phase in phases)


@dataclass(frozen=True)
class Platform:
    """Platform of operators: a GPU, the groups of GPUs that it exchanges with, and how batched GEMMs do.

    gemms: the GPU as its model of GEMMs reads it. streaming: fitted constants of operators that
    memory bounds. taken: CUs that other kernels hold, which GEMMs do not know of (`simulators.costs.gemm`).
    sharing: laws of kernels while others move data. linear: the platform of products of linear layers, where
    these differ from all others. errors: drawn errors of predictions (`simulators.steps.plan.drawn_errors`).
    """

    chip: Chip
    gemms: Gemms
    groups: Mapping[Axis, Group] = field(default_factory=dict)
    batched: BatchedGemmRates | None = None
    streaming: Mapping[str, StreamingRates] = field(default_factory=dict)
    taken: ArrayLike = 0
    sharing: Sharing = field(default_factory=Sharing)
    linear: Platform | None = None
    errors: Any = None  # that module imports this one

    def with_held(self, cus: ArrayLike) -> Platform:
        """The platform whose GEMMs, those of linear layers too, run on the CUs that other kernels leave."""
        linear = None if self.linear is None else replace(self.linear, taken=cus)
        return replace(self, taken=cus, linear=linear)


@dataclass(frozen=True)
class OperatorCost:
    """Work [FLOP], traffic with HBM [bytes], bytes sent over links and time [s] of one operator; arrays.

    comm_cu_s: CU-seconds of communication by the schedule of a site; None for CUs of kernels times their time. drawn:
    factors of drawn errors, which are in the time.
    """

    flop: Floats
    bytes: Floats
    wire_bytes: Floats
    seconds: Floats
    comm_cu_s: Floats | None = None
    drawn: Floats | float = 1.0

    def times(self, factors: Floats) -> OperatorCost:
        """The cost with drawn factors on its time."""
        return replace(self, seconds=np.asarray(self.seconds * factors), drawn=factors)


def quotient(dividend: ArrayLike, divisor: ArrayLike) -> Floats:
    """A quotient of arrays that broadcast; 0 where there is nothing to divide by."""
    top, low = np.broadcast_arrays(np.asarray(dividend, float), np.asarray(divisor, float))
    return np.asarray(np.divide(top, low, out=np.zeros(top.shape), where=low > 0))


def operator_costs(ops: Sequence[Op], platform: Platform) -> list[OperatorCost]:
    """Cost of each operator, once (`count` and the block's are not in it); all GEMMs in one call."""
    if (errors := platform.errors) is not None:  # of collectives, their group draws them
        costs = operator_costs(ops, replace(platform, errors=None))
        return [
            cost if isinstance(op.work, Exchange) else cost.times(errors.of_operator(op, cost))
            for op, cost in zip(ops, costs, strict=True)
        ]
    if platform.linear is not None:  # products of linear layers run at another precision
        return _costs_of_linear(ops, platform, platform.linear)
    products = _products([op.work for op in ops if isinstance(op.work, Product)], platform)
    product_costs, seen = iter(products), Memo[Cost]()
    return [next(product_costs) if isinstance(op.work, Product) else _other(op.work, platform, seen) for op in ops]


def beside_moved_data(
    ops: Sequence[Op], costs: Sequence[OperatorCost], platform: Platform, held: ArrayLike
) -> list[Floats]:
    """Times [s] of operators while kernels that hold so many CUs move data: of products, by `platform.sharing`.

    costs: of the operators alone, on all CUs. Others take as long as alone here.
    """
    left = operator_costs(ops, platform.with_held(held))
    return [
        platform.sharing.gemm(few.seconds, cost.seconds) if isinstance(op.work, Product) else cost.seconds
        for op, cost, few in zip(ops, costs, left, strict=True)
    ]


def is_linear(op: Op) -> bool:
    """Return whether an operator is a product of a linear layer, which may run at a precision of its own."""
    return isinstance(op.work, Product) and op.kind in ("linear", "fc") and not op.unnarrowed


def _costs_of_linear(ops: Sequence[Op], platform: Platform, linear: Platform) -> list[OperatorCost]:
    """Cost of each operator, of products of linear layers on a platform of their own."""
    apart = [is_linear(op) for op in ops]
    platforms = {True: linear, False: replace(platform, linear=None)}  # or it would be split again
    costs = {
        side: iter(operator_costs([op for op, is_apart in zip(ops, apart, strict=True) if is_apart == side], where))
        for side, where in platforms.items()
    }
    return [next(costs[side]) for side in apart]


def _products(works: Sequence[Product], platform: Platform) -> list[OperatorCost]:
    """Costs of products, all in one call."""
    if not works:
        return []
    # `grouped` is a flag, and `weight_bytes` may be None
    names = [field.name for field in fields(Product) if field.name not in ("grouped", "weight_bytes")]
    columns = [[np.asarray(getattr(work, name), float) for work in works] for name in names]
    gpu = platform.gemms
    constants = [*vars(gpu).values(), platform.taken, *(vars(platform.batched).values() if platform.batched else ())]
    numbers = [np.shape(value) for value in constants if isinstance(value, (int, float, np.ndarray))]
    # also over constants of the machine that are searched
    shape = np.broadcast_shapes(*(value.shape for column in columns for value in column), *numbers)
    m, n, k, batch, across = (np.stack([np.broadcast_to(value, shape) for value in column]) for column in columns)
    gemms = GemmShape(m, n, k, batch, across)
    narrower = _narrower(works, (m, n, k), element=np.asarray(gpu.element_bytes, float))
    if narrower is not None:  # as if the HBM were faster for this product
        gpu = replace(gpu, hbm_bytes_per_s=np.asarray(gpu.hbm_bytes_per_s, float) / narrower)
    alone = gemm_cost(gpu, gemms, taken=platform.taken)
    traffic = gemms.least_bytes(gpu.element_bytes) * (1.0 if narrower is None else narrower)
    cost = Cost.of(alone.flop, traffic, alone.seconds + alone.launch_s)
    seconds = _of_batched(cost, (m, n, k), platform=platform, batch=batch) if platform.batched else cost.seconds
    grouped = np.array([work.grouped for work in works]).reshape(-1, *(1 for _ in shape))
    seconds = np.where(grouped, cost.seconds, seconds)  # rates of batched GEMMs do not apply to a kernel of experts
    return [OperatorCost(*row) for row in zip(cost.flop, cost.bytes, 0 * cost.flop, seconds, strict=True)]


def _narrower(works: Sequence[Product], sizes: tuple[Floats, Floats, Floats], *, element: Floats) -> Floats | None:
    """Traffic with weights in their formats over that with elements of one width; None where all have this one."""
    if all(work.weight_bytes is None for work in works):  # the usual case
        return None
    m, n, k = sizes
    stored = [element if work.weight_bytes is None else np.asarray(work.weight_bytes, float) for work in works]
    weights = np.stack([np.broadcast_to(value, m.shape[1:]) for value in stored])
    others = element * (k * n + m * n)
    return np.asarray((weights * m * k + others) / (element * m * k + others))


def _of_batched(cost: Cost, sizes: tuple[Floats, Floats, Floats], *, platform: Platform, batch: Floats) -> Floats:
    """Seconds, of batched GEMMs not below what their share of the roofline allows."""
    chip, several = platform.chip, batch > 1
    assert platform.batched is not None
    if not several.any():
        return cost.seconds
    roofline = np.maximum(cost.flop / (chip.rate * np.asarray(chip.cus)), cost.bytes / chip.drawable_bytes_per_s)
    slow = roofline / platform.batched.share(np.maximum.reduce(sizes)) + np.asarray(chip.launch_s)
    return np.where(several, np.maximum(cost.seconds, slow), cost.seconds)


def _other(work: Work, platform: Platform, seen: Memo[Cost]) -> OperatorCost:
    """Cost of anything but a product. seen: costs of all passes of layers of which one was asked before."""
    if isinstance(work, Exchange):
        group = platform.groups[work.over]
        moved = collective(work, group)
        return OperatorCost(moved.flop, moved.hbm_bytes, moved.wire_bytes, _exchange_s(work, platform, moved.seconds))
    if isinstance(work, Stream) and work.parts:
        costs = [_other(part, platform, seen) for part in work.parts]
        columns = zip(*((cost.flop, cost.bytes, cost.wire_bytes, cost.seconds) for cost in costs), strict=True)
        return OperatorCost(*(np.asarray(sum(column)) for column in columns))
    if isinstance(work, Stream):
        flop, cost = np.asarray(work.flop, float), _streamed(work, platform.chip)
        seconds = _stream_s(work, platform, cost.seconds)  # fitted constants count where there are any
        cost = replace(cost, flop=np.broadcast_to(flop, seconds.shape), seconds=seconds)
    else:
        assert isinstance(work, Recurrence | Filter)
        every = _passes(work, platform.chip, seen)
        cost = Cost(*(value[..., work.pass_] for value in (every.flop, every.bytes, every.seconds)))
    return OperatorCost(cost.flop, cost.bytes, 0 * cost.flop, cost.seconds)


def _streamed(work: Stream, chip: Chip) -> Cost:
    at_peak = np.asarray(work.flop, float) / work.share_on(chip)
    return streaming_cost(chip, work.bytes, flop=at_peak, kernels=work.kernels, again=work.again)


def streamed_seconds(work: Stream, chip: Chip) -> Floats:
    """Time [s] of kernels that memory bounds, without constants fitted for their operator."""
    return _streamed(work, chip).seconds


def _exchange_s(work: Exchange, platform: Platform, alone: Floats) -> Floats:
    """Time [s] of an exchange, which takes `alone` unless one kernel norms the sum as well."""
    if not work.ctas:  # a plain sum
        return alone
    fitted, group = platform.streaming.get("norm"), platform.groups[work.over]
    normed = norm_s(platform.chip, work.norm_bytes, fitted=fitted, ctas=work.ctas)
    seconds = fused_sum_s(group, work.payload_bytes, normed_s=normed, ctas=work.ctas)
    return seconds if group.errors is None else np.asarray(seconds * group.errors(work, group, seconds))


def _stream_s(work: Stream, platform: Platform, plain: Floats) -> Floats:
    """Time [s] of one kernel by the constants of the operator that it computes; `plain` where there are none.

    What is fused to it moves its bytes along: the kernel takes no less than all bytes at the rate of a sum, the
    operator that moves bytes and does hardly anything else. Several kernels for an operator were not measured.
    """
    constants, rate = platform.streaming, platform.chip.hbm_bytes_per_s
    if work.like is None or work.like not in constants:
        return plain
    alone = streamed(constants[work.like], rate, work.like_bytes).seconds
    fused = streamed(constants.get("add", constants[work.like]), rate, work.bytes).seconds
    # constants are of one kernel
    return np.asarray(np.where(np.asarray(work.kernels) == 1, np.maximum(alone, fused), plain))


def _passes(work: Recurrence | Filter, chip: Chip, seen: Memo[Cost]) -> Cost:
    """Costs [..., 3] of all passes of a layer, computed once for those whose sizes are the same objects."""
    sizes = (work.shape,) if isinstance(work, Filter) else (work.gates, work.hidden, work.batch, work.steps)
    compute = (lambda: convolution(chip, work.shape)) if isinstance(work, Filter) else (lambda: recurrent(chip, *sizes))
    return seen.get(compute, *sizes)


def collective(work: Exchange, group: Group) -> CollectiveCost:
    """Cost of one exchange; by the switch if it is to, else by a ring or a tree, whichever is faster.

    Nothing in a group of one. Times have the drawn errors of the group, where it has some.
    """
    cost = _collective(work, group)
    if group.errors is None:
        return cost
    return replace(cost, seconds=np.asarray(cost.seconds * group.errors(work, group, cost.seconds)))


def _collective(work: Exchange, group: Group) -> CollectiveCost:
    if group.switched(work.pattern) is not None:  # only where the switch computes this pattern
        return collective_cost(work.pattern, "in_switch", work.payload_bytes, group, element_bytes=2)
    cost = library_cost(work.pattern, work.payload_bytes, group, element_bytes=2)
    seconds = work.library_seconds(group) if work.pattern == "all_to_all" else None
    if seconds is None:
        return cost
    # the library has no kernel for this shape
    return replace(cost, seconds=np.where(np.isnan(seconds), cost.seconds, seconds + 0 * cost.seconds))


def num_kernels(op: Op, tp: ArrayLike) -> Floats:
    """Number of kernels of an operator, once; none for an exchange within tp of one GPU."""
    if isinstance(op.work, Stream):
        return np.asarray(op.work.kernels, float)
    return np.asarray(np.asarray(tp) > 1, float) if isinstance(op.work, Exchange) else np.ones(())


@dataclass(frozen=True)
class StageOperator:
    """One operator of one block, and what it takes once. times: how often, in a pass over one micro-batch."""

    op: Op
    block: ModelBlock
    spent: OperatorCost
    times: Floats

    @property
    def over(self) -> Axis | None:
        """The group it exchanges with; None for what computes."""
        return self.op.work.over if isinstance(self.op.work, Exchange) else None

    @property
    def forward(self) -> bool:
        """True for an operator of the forward pass."""
        return self.op.phase == "forward"

    @property
    def seconds(self) -> Floats:
        """All its time, in a pass over one micro-batch."""
        return self.times * self.spent.seconds
