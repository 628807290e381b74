"""Projection of iterations from one profile: operators are timed at one size and scaled by their work.

Each operator's time follows the product of what its work is proportional to, with H hidden, L sequence length, B batch
and t = tp (arXiv:2302.02825, as re-derived from operator counts):

    linear, fc           H^2 L B / t          norm                 H L B
    attention            H L^2 B / t          activation           H L B / t
    softmax              H L^2 B / t          collectives of tp    H L B (t - 1) / t
    optimizer            H^2 / t

Heads are of one width, so there are as many as H is wide. An evolution of hardware divides what computes by
`flop_vs_bw`, and leaves collectives alone. Wrong where an operator is no pure function of its work: small GEMMs fill no
GPU, launches and latencies do not scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from simulators.steps.run.iteration import Iteration
from simulators.steps.run.passes import ENDS

Floats = NDArray[np.float64]

COMMUNICATION = "communication"
LAWS: Mapping[str, tuple[int, int, int, int]] = {
    "linear": (2, 1, 1, -1),
    "fc": (2, 1, 1, -1),
    "attention": (1, 2, 1, -1),
    "softmax": (1, 2, 1, -1),
    "activation": (1, 1, 1, -1),
    "norm": (1, 1, 1, 0),
    "optimizer": (2, 0, 0, -1),
    COMMUNICATION: (1, 1, 1, 0),
}
"""Exponents of H, L, B and t by kind of operator; of collectives without the factor (t - 1) / t."""


@dataclass(frozen=True)
class Size:
    """Sizes that are projected from or to: width, sequence length, batch and tp; numbers, or arrays that broadcast."""

    hidden: ArrayLike
    sequence_length: ArrayLike
    batch: ArrayLike
    tp: ArrayLike

    @property
    def columns(self) -> tuple[Floats, ...]:
        """H, L, B, t."""
        every = (self.hidden, self.sequence_length, self.batch, self.tp)
        return tuple(np.asarray(number, float) for number in every)


@dataclass(frozen=True)
class Profile:
    """Seconds of each kind of operator of one layer, timed at one size on GPUs as they are.

    ring: GPUs of the collective that was timed, where that is not the size's tp: a model on one GPU has none.
    """

    size: Size
    seconds: Mapping[str, Floats]
    ring: int


def by_kind(iteration: Iteration) -> dict[str, Floats]:
    """Seconds of one layer by kind of operator, collectives of tp and the update among them."""
    passes = iteration.passes
    layers = [part for part in passes.parts if part.block.name not in ENDS]
    # layers of the stage, as times are of one
    count = np.asarray(sum(passes.counts[block.name] for block in passes.blocks if block.name not in ENDS), float)
    seconds = {
        kind: passes.sum(part for part in layers if part.over is None and part.op.kind == kind) / count for kind in LAWS
    }
    seconds[COMMUNICATION] = passes.sum(part for part in layers if part.over == "tp") / count
    params = passes.of_blocks("params")
    layer_params = sum(
        np.asarray(block.params) * passes.counts[block.name] for block in passes.blocks if block.name not in ENDS
    )
    # the update's time by the share of the weights
    seconds["optimizer"] = iteration.update.seconds * np.asarray(layer_params) / np.asarray(params) / count
    return seconds


def project_layer(profile: Profile, to: Size, flop_vs_bw: ArrayLike = 1.0) -> dict[str, Floats]:
    """Seconds of each kind of operator of one layer at other sizes, on GPUs that compute faster by `flop_vs_bw`."""
    ratios = [new / old for new, old in zip(to.columns, profile.size.columns, strict=True)]
    squares = [ratio * ratio for ratio in ratios]
    seconds = {}
    for kind, law in LAWS.items():
        factor: Floats = np.asarray(1.0)
        for ratio, square, power in zip(ratios, squares, law, strict=True):
            factor = factor * (1.0 if power == 0 else ratio if power == 1 else square if power == 2 else 1 / ratio)
        # links do not get faster with arithmetic
        seconds[kind] = profile.seconds[kind] * factor / (1.0 if kind == COMMUNICATION else np.asarray(flop_vs_bw))
    new, old = to.columns[3], profile.ring
    # a ring of one sends nothing
    seconds[COMMUNICATION] = seconds[COMMUNICATION] * ((new - 1) / new) / ((old - 1) / old)
    return seconds


def serialized_share(seconds: Mapping[str, Floats]) -> Floats:
    """Share of collectives of tp in the time of a layer."""
    total = sum(seconds.values(), np.zeros(()))
    return np.asarray(seconds[COMMUNICATION] / total)
