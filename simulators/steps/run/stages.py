"""Layers of the stages of a pipeline: how many the longest stage has, and those that an end of the model is on.

Of `beside`, every stage has layers / pp, rounded up. Of `layers`, both ends count as one layer each. Of `balanced`,
whole layers are placed so that the longest stage is the shortest possible, as layouts by name do
(`pipeline_model_parallel_layout` of Megatron-LM): with L layers of time t each, an embedding of e t and an output of
o t, the longest of p stages takes the least T t at which all layers find a place,

    floor(T - e) + floor(T - o) + (p - 2) floor(T) >= L     T >= max(e, o)

which is that of whole layers, or of whole layers and an end: T = k + x with x = 0, e or o, and of each x

    k = max(ceil((L - c) / p), ceil(max(e, o) - x))     c = floor(x - e) + floor(x - o) + (p - 2) floor(x)

(derived). Stages are filled from the first one on, and the last has what is left. Layers are taken as equal, each of
the mean time: layers of several kinds are spread over the stages in equal shares.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
_DIGITS = 9  # a whole number of layers must not become one more by rounding


def stage_share(count: ArrayLike, pp: ArrayLike) -> Floats:
    """Share of equal blocks that the busiest of pp stages has: whole blocks, one more than others where pp does not
    divide their number.
    """
    blocks = np.asarray(count, float)
    with np.errstate(all="ignore"):
        return np.where(blocks > 0, _up(blocks / np.asarray(pp, float)) / blocks, 1.0)


@dataclass(frozen=True)
class BalancedStages:
    """Layers of the longest of some stages, of the first and of the last one, and which end the longest one has.

    first_is_longest, last_is_longest: whether the longest stage has the embedding, or the output; where neither, it has
    layers alone.
    """

    longest: Floats
    first: Floats
    last: Floats
    first_is_longest: NDArray[np.bool_]
    last_is_longest: NDArray[np.bool_]


def balanced_stages(layers: ArrayLike, embedding: ArrayLike, output: ArrayLike, pp: ArrayLike) -> BalancedStages:
    """Place `layers` on pp > 1 stages (equations above). embedding, output: their times over that of a layer."""
    count, e, o, p = np.broadcast_arrays(*(np.asarray(each, float) for each in (layers, embedding, output, pp)))
    longer = np.maximum(e, o)
    above = np.stack([e, o, np.zeros_like(e)])  # x: an end wins where times are equal
    fixed = _down(above - e) + _down(above - o) + (p - 2) * _down(above)
    layers_at = np.maximum(_up((count - fixed) / p), _up(longer - above))
    # a stage of more layers than there are is no longest one: another of the three is as long with fewer
    place = np.argmin(np.where(layers_at > count, np.inf, np.round(layers_at + above, _DIGITS)), axis=0)
    most = np.take_along_axis(layers_at + above, place[None], 0)[0]
    middle = np.where(p > 2, _down(most), 0.0)
    first = np.minimum(_down(most - e), count)
    last = np.clip(count - first - (p - 2) * middle, 0.0, _down(most - o))
    longest = np.take_along_axis(layers_at, place[None], 0)[0]
    return BalancedStages(longest, first, last, place == 0, place == 1)


def _up(number: ArrayLike) -> Floats:
    return np.asarray(np.ceil(np.round(np.asarray(number, float), _DIGITS)))


def _down(number: ArrayLike) -> Floats:
    return np.asarray(np.floor(np.round(np.asarray(number, float), _DIGITS)))
