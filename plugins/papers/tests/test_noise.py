"""Representatives of an epoch whose times are noisy."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from dse_papers.seqpoint import noise
from simulators.steps.seqpoint import (
    Iterations,
)


@pytest.mark.slow
def test_representatives_err_with_the_noise_of_times_and_not_without() -> None:
    lengths = np.random.default_rng(1).integers(1, 40, 400)
    rows = pd.DataFrame(
        noise.errors(Iterations(name="seqpoint", method="seqpoint"), lengths, 1e-3 * lengths.astype(float))
    )
    logged = rows[rows["lengths"] == "as logged"].sort_values("spread")
    assert logged["error_p90"].iloc[0] <= 0.01  # what SeqPoint allows
    assert logged["error_p90"].iloc[-1] > 3 * logged["error_p90"].iloc[0]
    assert 0 < noise.measured_scatter() < 0.05
    anew = rows[rows["lengths"] == "drawn anew"].sort_values("spread")
    assert (anew["error_median"].iloc[:3].to_numpy() >= logged["error_median"].iloc[:3].to_numpy()).all()
