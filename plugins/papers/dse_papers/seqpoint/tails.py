"""Representatives by how far the longest sentences of a data set reach, which is assumed unless all were counted.

The longest iteration follows from the tail, and bounds what is saved where all representatives run at once. Each data
set is drawn without its tail, and with one that reaches some times as far beyond its lowest length; the epoch of each
is represented anew, and by the representatives of the data set as configured, as if its tail had been another.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from simulators.steps.epochs.seqpoint import Iterations, choose, cut_parallel, cut_sequential
from simulators.workloads.sequence_lengths import Lengths, iteration_lengths

if TYPE_CHECKING:
    import pandas as pd

_REACHES = (0.5, 1.0, 1.5, 2.0, 3.0)
"""Of a tail beyond its lowest length, over that configured."""


def tailed(data: Lengths) -> Mapping[float, Lengths]:
    """Reach over that configured -> data set with such a tail, 0 for none; nothing where none is assumed."""
    tail = data.tail
    if tail is None:
        return {}
    reached = {reach: tail.model_copy(update={"high": tail.low + reach * (tail.high - tail.low)}) for reach in _REACHES}
    return {reach: data.model_copy(update={"tail": longer}) for reach, longer in {0.0: None, **reached}.items()}


def drawn(data: Lengths, batch: int, seed: int) -> Mapping[float, NDArray[np.int64]]:
    """Reach -> sequence lengths [N] of the iterations of an epoch."""
    return {reach: iteration_lengths(other, batch, seed) for reach, other in tailed(data).items()}


def effects(
    choice: Iterations, epochs: Mapping[float, NDArray[np.int64]], seconds: pd.Series[float]
) -> Iterator[dict[str, float]]:
    """Yield a row for each epoch (`drawn`): its longest iteration, its representatives, and what they save.

    seconds: time [s] of an iteration by its sequence length. kept_error: of the projection by the representatives of
    the epoch as configured, whose weights are scaled to the number of iterations, as a signed share.
    """
    if not epochs:
        return
    times = {reach: seconds.loc[lengths.tolist()].to_numpy(float) for reach, lengths in epochs.items()}
    configured = choose(choice, epochs[1.0], times[1.0])
    # time of a mean iteration, as epochs with other tails differ in length
    projected = float(times[1.0][configured.places] @ configured.weights) / len(times[1.0])
    for reach, lengths in epochs.items():
        times_s = times[reach]
        sample = choose(choice, lengths, times_s)
        yield {
            "reach": reach,
            "longest": float(lengths.max()),
            "iterations": float(len(times_s)),
            "longest_over_mean": float(times_s.max() / times_s.mean()),
            "representatives": float(len(sample.places)),
            "error": sample.error,
            "kept_error": float(projected / times_s.mean() - 1),
            "cut_sequential": float(cut_sequential(sample, times_s)),
            "cut_parallel": float(cut_parallel(sample, times_s)),
        }
