"""Context parallelism: each sequence split over cp GPUs, whose keys and values go round a ring (arXiv:2310.01889).

A GPU computes attention of its queries with one part of the keys and values after the other, and meanwhile sends on the
part it has. Of the cp - 1 messages each is exposed by

    max(0, message - attention / cp)

with attention the time of the whole core, in the forward pass and in the backward pass, where gradients of keys and
values go along (twice the bytes; derived).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from simulators.steps.operators import Exchange, Op, OperatorCost
from simulators.steps.sizes import Sizes

_CORE = ("attention", "softmax")  # kinds of operators that run with the keys and values at hand


@dataclass(frozen=True)
class RingPass(Exchange):
    """One message round the ring, beside attention with the part that it replaces. parts: cp."""

    parts: int = 1

    @property
    def backward(self) -> RingPass:
        """The same with the gradients."""
        return replace(self, payload_bytes=2 * np.asarray(self.payload_bytes))


def ring_pass(sizes: Sizes, numbers: ArrayLike, *, name: str) -> Iterator[Op]:
    """Messages of keys and values, `numbers` of each token; none where a sequence is not split."""
    cp = sizes.parallel.cp
    if cp > 1:  # one GPU has all keys
        payload = sizes.element * sizes.tokens * np.asarray(numbers, float)
        # its own part need not be sent
        yield Op(f"{name}ring", "attention", "forward", RingPass("send_recv", payload, "cp", parts=cp), cp - 1.0)


def expose_rings(ops: Sequence[Op], costs: Sequence[OperatorCost]) -> list[OperatorCost]:
    """Costs with ring messages cut down to what attention beside them does not hide."""
    return [
        # attention with one part hides one message
        replace(cost, seconds=np.maximum(0.0, cost.seconds - _core(ops, costs, place) / op.work.parts))
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
            total, at = total + costs[at].seconds, at + step
    return total
