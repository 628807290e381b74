"""Spread of errors between names: it holds rows of new names as often as it promises, of however few names."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dse_calibration.residual_between import NOTHING, Spread, SpreadPrior

_SIGMA = 0.1


def drawn(rng: np.random.Generator, tau: float, *, names: int, rows: int = 40) -> dict[str, list[float]]:
    """Errors of rows by name, of random effects."""
    effects = rng.normal(0, tau, names)
    return {f"n{place}": list(rng.normal(effect, _SIGMA, rows)) for place, effect in enumerate(effects)}


@pytest.mark.parametrize("names", [3, 4, 8])
@pytest.mark.parametrize("tau", [0.05, 0.2])
def test_rows_of_a_new_name_are_inside_nine_times_in_ten(names: int, tau: float) -> None:
    rng, shares = np.random.default_rng(0), list[float]()
    for _ in range(150):
        *measured, new = drawn(rng, tau, names=names + 1).values()
        by_name = {str(place): part for place, part in enumerate(measured)}
        spread = Spread.of([by_name])
        assert spread is not None
        below, above = spread.ends()
        off = np.array(new) - np.median(np.concatenate(measured))
        shares.append(float(np.mean((-below <= off) & (off <= above))))
    assert 0.86 <= np.mean(shares) <= 0.97


def test_predictions_by_another_name_are_off_by_what_two_names_differ() -> None:
    rng, shares = np.random.default_rng(1), list[float]()
    for _ in range(200):
        effects = rng.normal(0, 0.2, 5)
        *measured, new, giver = effects
        pairs = {
            f"{target} {source}": list(rng.normal(target - source, _SIGMA, 30))
            for target in (*measured, giver)
            for source in (*measured, giver)
            if target != source
        }
        below, above = Spread.of_pairs(pairs, names=4).ends()
        off = rng.normal(new - giver, _SIGMA, 30)
        shares.append(float(np.mean((-below <= off) & (off <= above))))
    assert 0.85 <= np.mean(shares) <= 0.97


def test_the_prior_is_what_ratios_of_many_traits_were_drawn_from() -> None:
    rng, free, d0, ratio = np.random.default_rng(2), 4, 6.0, 0.3
    variances = ratio * d0 / rng.chisquare(d0, 400) * rng.chisquare(free, 400) / free
    within = (1.645 * _SIGMA, 1.645 * _SIGMA)
    prior = SpreadPrior.of(Spread(within, math.sqrt(value) * _SIGMA, free, 1.2) for value in variances)
    assert prior.ratio == pytest.approx(ratio, rel=0.15) and 4 < prior.free < 10
    assert SpreadPrior.of([Spread(within, 0.1, 3, 1.2)]) == NOTHING  # one trait shows nothing of how traits vary
    alike = SpreadPrior.of(Spread(within, 0.1, 50, 1.2) for _ in range(5))
    assert alike.free > 1000  # ratios that do not vary are known


def test_a_single_name_has_what_others_tell() -> None:
    (alone,) = [Spread.of_one([drawn(np.random.default_rng(3), 0.0, names=1)])]
    assert alone.between == 0 and alone.free == 0
    narrow, wide = (alone.ends(SpreadPrior(ratio, 4.0)) for ratio in (0.01, 4.0))
    assert narrow[0] < 0.3 * wide[0] and narrow[1] < 0.3 * wide[1]
    assert Spread.of([{"a": [0.1, 0.2]}]) is None
