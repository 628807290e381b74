"""What becomes of representatives where times scatter and lengths are others of the same kind.

Each draw logs an epoch whose times are multiplied by log-normal noise of mean 1, chooses representatives, and profiles
them in another epoch with noise of its own; with `resampled` the lengths of both are drawn anew from the epoch's, so
that the choice meets lengths that it did not see. The error is that of the projected against the second epoch's time.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dse.config.options import conf_dir
from simulators.steps.epochs.seqpoint import Iterations, choose

Floats = NDArray[np.float64]
_ASSUMED = (0.0, 0.01, 0.03, 0.1)
# nine in ten of them: four draws lie above
_DRAWS = 40
_TABLE = "data/measured/h100_2026-11-26/gemms.csv"


@cache
def measured_scatter() -> float:
    """Median spread of repeated kernels on an H100, as a share of their time (conf/data/measured)."""
    import pandas as pd

    return float(pd.read_csv(conf_dir() / _TABLE, comment="#")["scatter"].median())


def errors(choice: Iterations, lengths: NDArray[np.int64], seconds: Floats, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Yield, by spread of times and kind of lengths, the number of representatives and errors of the projection.

    lengths, seconds: of an epoch's iterations [N]. Errors are absolute shares: the median and nine tenths of the draws.
    """
    of = np.random.default_rng(seed)
    spreads = {f"{100 * spread:g} %": spread for spread in _ASSUMED}
    for name, spread in {**spreads, f"{100 * measured_scatter():.2g} % (H100)": measured_scatter()}.items():
        for resampled in (False, True):
            drawn = [_draw(choice, (lengths, seconds), spread, of, resampled=resampled) for _ in range(_DRAWS)]
            counts, off = np.array(drawn).T
            yield {
                "spread": spread,
                "name": name,
                "lengths": "drawn anew" if resampled else "as logged",
                "representatives": float(np.median(counts)),
                "error_median": float(np.median(off)),
                "error_p90": float(np.quantile(off, 0.9)),
            }


def _draw(
    choice: Iterations,
    epoch: tuple[NDArray[np.int64], Floats],
    spread: float,
    of: np.random.Generator,
    *,
    resampled: bool,
) -> tuple[int, float]:
    """Number of representatives, and the absolute error of what they project."""
    lengths, seconds = epoch

    def noise() -> Floats:
        # the mean of exp(s z) is exp(s^2 / 2), which is divided out
        return np.exp(spread * of.standard_normal(len(seconds)) - spread**2 / 2)

    logged = of.integers(len(lengths), size=len(lengths)) if resampled else np.arange(len(lengths))
    sample = choose(choice, lengths[logged], seconds[logged] * noise())
    # noise of its own: the same iterations, timed another time
    profiled = (seconds[logged] * noise())[sample.places]
    later = of.integers(len(lengths), size=len(lengths)) if resampled else logged
    total = float((seconds[later] * noise()).sum())
    return len(sample.places), abs(float(profiled @ sample.weights) / total - 1)
