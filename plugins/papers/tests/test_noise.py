"""Representatives of an epoch whose times are noisy, or whose longest sequences are assumed."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from dse_papers.seqpoint import noise, tails
from simulators.steps.epochs.seqpoint import Iterations, choose
from simulators.workloads.sequence_lengths import Lengths
from tests.support import shipped


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


def test_longer_tails_leave_less_to_save_and_mislead_who_assumed_another() -> None:
    data = Lengths.model_validate({**shipped("lengths")["iwslt15"], "num_sequences": 20000})
    choice = Iterations(name="seqpoint", method="seqpoint")
    epochs = tails.drawn(data, 64, 0)
    seconds = pd.Series(1e-3 * np.arange(1000), name="iteration_s")  # linear in the length
    rows = pd.DataFrame(tails.effects(choice, epochs, seconds))
    assert rows["iterations"].nunique() == 1 and rows["longest"].is_monotonic_increasing
    assert (np.diff(rows["longest_over_mean"]) > 0).all() and (rows["error"].abs() <= choice.error).all()
    assert (rows["cut_parallel"] * rows["longest_over_mean"] >= rows["iterations"] * (1 - 1e-9)).all()
    as_configured = rows[rows["reach"] == 1].iloc[0]
    lengths = epochs[1.0]
    assert as_configured["kept_error"] == pytest.approx(choose(choice, lengths, 1e-3 * lengths).error)
    assert (np.diff(rows["kept_error"]) < 0).all()  # whoever missed a tail projects too short an epoch
    assert not tails.drawn(Lengths.model_validate(shipped("lengths")["librispeech_100"]), 64, 0)
