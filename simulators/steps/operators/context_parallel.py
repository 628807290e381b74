"""Context parallelism: each sequence split over cp GPUs, with keys and values in a ring, or heads by an all-to-all.

In the ring (arXiv:2310.01889) a GPU computes attention of its queries with one part of the keys and values after the
other, and meanwhile sends on the part it has. Of the cp - 1 messages each is exposed by

    max(message - core / cp, (1 - 1 / f) message)

with core the time of all parts and their sums, and f the slowdown of kernels while others move data, in the forward
pass and in the backward pass, where gradients of keys and values go along (twice the bytes; derived). Each part is a
kernel of its own, which reads the queries again. Outputs of a part, n numbers, are added to those before it with their
weights of the softmax: a kernel reads the sum in fp32 and the part, and writes the sum, (4 + 4 + e) n bytes for numbers
of e bytes; so are gradients of queries, keys and values (derived from the recurrence of arXiv:2310.01889, equation 4).
A framework that does so in several kernels says what these move (`kernels.ring`), and whether keys of fewer heads are
copied for every head of queries first, so that messages are larger.

With all-to-alls (DeepSpeed-Ulysses, arXiv:2309.14509) a GPU gets the queries, keys and values of all tokens of its
share of the heads, and gives back their outputs; keys of fewer heads than GPUs are copied. Both wait, in either pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from simulators.steps.operators.sizes import Sizes
from simulators.steps.operators.work import Exchange, Op, OperatorCost, Stream

Floats = NDArray[np.float64]
_CORE = ("attention", "softmax")  # kinds of operators that run with the keys and values at hand
_FP32 = 4


@dataclass(frozen=True)
class RingPass(Exchange):
    """One message round the ring, beside attention with the part that it replaces. parts: cp."""

    parts: int = 1

    @property
    def backward(self) -> RingPass:
        """The same with the gradients."""
        return replace(self, payload_bytes=2 * np.asarray(self.payload_bytes))


@dataclass(frozen=True)
class PartialSum(Stream):
    """The sum of what one part of the ring gives and of those before it. back_bytes: of its gradients, by so many
    kernels.
    """

    back_bytes: ArrayLike = 0.0
    back_kernels: ArrayLike = 2.0

    @property
    def backward(self) -> Stream:
        """The sums of gradients of queries, and of keys and values."""
        return Stream(self.back_bytes, kernels=self.back_kernels)


def parts_of_ring(sizes: Sizes) -> Any:
    """Kernels of attention, one for each part of the keys: 1 where a GPU has all of them."""
    return 1 if by_heads(sizes) else sizes.parallel.cp


def sum_parts(sizes: Sizes, outputs: ArrayLike, keys: ArrayLike, *, name: str) -> Iterator[Op]:
    """Sums of the outputs of parts, `outputs` numbers of each token, with as many gradients, and those of `keys`."""
    cp, known = sizes.parallel.cp, sizes.kernels.ring
    if cp > 1 and not by_heads(sizes):
        results, inputs = (sizes.tokens * np.asarray(numbers, float) for numbers in (outputs, keys))
        moved = float(2 * _FP32 + sizes.element)  # for a number of each token
        summed = PartialSum(moved * results, back_bytes=moved * (results + inputs))
        if known is not None:
            back = known.output_gradients * results + known.key_gradients * inputs * _copies(sizes)
            forward = known.outputs * results + known.keys * inputs * _copies(sizes)
            summed = PartialSum(forward, kernels=known.kernels, back_bytes=back, back_kernels=known.gradient_kernels)
        yield Op(f"{name}sum of parts", "attention", "forward", summed, cp - 1.0)


def ring_pass(sizes: Sizes, numbers: ArrayLike, *, name: str) -> Iterator[Op]:
    """Messages of keys and values, `numbers` of each token; none where a sequence is not split."""
    cp = sizes.parallel.cp
    if cp > 1 and not by_heads(sizes):  # one GPU has all keys
        payload = sizes.element * sizes.tokens * np.asarray(numbers, float) * _copies(sizes)
        # its own part need not be sent
        yield Op(f"{name}ring", "attention", "forward", RingPass("send_recv", payload, "cp", parts=cp), cp - 1.0)


def _copies(sizes: Sizes) -> Any:
    """Heads of queries that each head of keys is copied for before keys go round; 1 where it is not."""
    ring = sizes.kernels.ring
    latent = sizes.model.latent is not None  # every head has keys of its own
    return sizes.heads / sizes.kv_heads if ring is not None and ring.repeated and not latent else 1.0


def by_heads(sizes: Sizes) -> bool:
    """Tell whether GPUs that split a sequence exchange it for heads around attention."""
    return sizes.parallel.cp > 1 and sizes.parallel.context == "all_to_all"


def heads_of_part(sizes: Sizes) -> tuple[Floats, Floats, Floats]:
    """Heads of queries, of keys, and queries of a sequence, of one GPU inside of attention."""
    if not by_heads(sizes):
        return sizes.heads, sizes.kv_heads, sizes.queries
    cp = sizes.parallel.cp
    return sizes.heads / cp, np.maximum(1.0, sizes.kv_heads / cp), sizes.queries * cp


def exchange_heads(sizes: Sizes, *, name: str, after: bool) -> Iterator[Op]:
    """The all-to-all before attention, or after it; none in a ring, or where a sequence is not split."""
    if by_heads(sizes):
        keys = np.maximum(sizes.kv_heads, sizes.parallel.cp)  # copied, one head for each GPU
        heads = sizes.heads if after else sizes.heads + 2 * keys
        payload = sizes.element * sizes.tokens * heads * sizes.head
        yield Op(
            f"{name}{'outputs' if after else 'heads'}", "attention", "forward", Exchange("all_to_all", payload, "cp")
        )


def expose_rings(ops: Sequence[Op], costs: Sequence[OperatorCost], interference: ArrayLike) -> list[OperatorCost]:
    """Costs with ring messages cut down to what attention beside them does not hide, and is slowed down by them."""
    slowed = 1 - 1 / np.asarray(interference, float)
    return [
        # attention with one part hides one message
        replace(
            cost,
            seconds=np.maximum(cost.seconds - _core(ops, costs, place) / op.work.parts, slowed * cost.seconds),
        )
        if isinstance(op.work, RingPass)
        else cost
        for place, (op, cost) in enumerate(zip(ops, costs, strict=True))
    ]


def _core(ops: Sequence[Op], costs: Sequence[OperatorCost], place: int) -> Any:
    """Time [s] of the operators of attention around a place."""
    total: Any = np.zeros(())
    for step in (-1, 1):  # the ring pass stands in the middle of the core
        at = place + step
        # up to the first operator of another kind
        while 0 <= at < len(ops) and ops[at].kind in _CORE and not isinstance(ops[at].work, Exchange):
            total, at = total + costs[at].seconds * np.asarray(ops[at].count, float), at + step
    return total
