"""Iterations that stand for an epoch: lengths and their order, what is chosen, what is projected."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from pydantic import ValidationError

from dse.errors import ConfigError
from simulators.steps.epochs.seqpoint import (
    Iterations,
    choose,
    cut_sequential,
    iterations_cut,
    project_epoch,
)
from simulators.workloads.sequence_lengths import Lengths, iteration_lengths
from tests.support import shipped

DATA_SETS = sorted(set(shipped("lengths")) - {"none"})
SOURCE = {"provenance": "derived", "source": "made up for a test"}
SMALL: dict[str, Any] = {
    "name": "small",
    "percentiles": [[0, 1], [0.5, 10], [1, 40]],
    "num_sequences": 1000,
    "sources": dict.fromkeys(("percentiles", "num_sequences", "tail", "bounds", "bucket_width", "per_unit"), SOURCE),
}
Epoch = tuple[NDArray[np.int64], NDArray[np.float64]]


def lengths(**changes: Any) -> Lengths:
    return Lengths.model_validate({**SMALL, **changes})


def method(name: str, **options: Any) -> Iterations:
    return Iterations(name=name, method=name, **options)


# Lengths


@pytest.mark.parametrize("name", DATA_SETS)
def test_a_shipped_data_set_is_drawn_by_seed(name: str) -> None:
    data = Lengths.model_validate(shipped("lengths")[name])
    first, again, other = (iteration_lengths(data, 64, seed) for seed in (1, 1, 2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    sizes = data.num_sequences / 64
    assert 0.99 * sizes - 1 <= len(first) <= 1.1 * sizes
    facts = [path.partition(".")[2] for path, *_ in data.facts_below(name)]
    assert all(any(fact == path or fact.startswith(f"{path}.") for fact in facts) for path in data.sources)


def test_means_of_shipped_data_sets_are_those_that_were_measured() -> None:
    trees = shipped("lengths")
    speech = iteration_lengths(Lengths.model_validate(trees["librispeech_100"]), 1, 0)
    assert speech.mean() == pytest.approx(1280, rel=0.02)  # 12.8 s
    assert speech.std() == pytest.approx(380, rel=0.03)
    words = iteration_lengths(Lengths.model_validate({**trees["iwslt15"], "tail": None}), 1, 0)
    assert words.mean() == pytest.approx(19.39, rel=0.03)
    assert words.std() == pytest.approx(12.57, rel=0.06)


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"percentiles": [[0, 1], [0.5, 10]]}, "end with 1"),
        ({"percentiles": [[0, 5], [0.5, 4], [1, 6]]}, "must ascend: [0.5, 4]"),
        ({"order": "bucketed"}, "give both or neither"),
        ({"bucket_width": 3}, "give both or neither"),
        ({"tail": {"num_sequences": 2000, "low": 1, "high": 2}}, "above num_sequences"),
        ({"tail": {"num_sequences": 2, "low": 3, "high": 2}}, "low must not be above high"),
        ({"bounds": [9, 8]}, "hold no length"),
        ({"sources": {}}, "no entry in `sources`"),
    ],
)
def test_a_data_set_that_makes_no_sense_is_refused(changes: dict[str, Any], part: str) -> None:
    with pytest.raises(ValidationError) as error:
        lengths(**changes)
    assert part in str(error.value)


# What is chosen


@st.composite
def epochs(draw: st.DrawFn, *, equal: bool = True) -> Epoch:
    """An epoch; equal: iterations of one length take equally long."""
    size, seed = draw(st.integers(1, 300)), draw(st.integers(0, 2**32 - 1))
    random = np.random.default_rng(seed)
    sizes = random.integers(1, draw(st.integers(2, 200)), size)
    times = random.uniform(0.1, 1, 200)[sizes] if draw(st.booleans()) else 0.01 * sizes + 1e-4 * sizes**2
    return sizes, times if equal else times * random.uniform(0.9, 1.1, size)


@given(epochs(equal=False), st.integers(1, 20), st.sampled_from([0.1, 0.01, 1e-4]))
def test_weights_are_all_iterations_and_representatives_lie_in_their_bins(epoch: Epoch, k0: int, error: float) -> None:
    sizes, seconds = epoch
    sample = choose(method("seqpoint", k0=k0, error=error, few=3), sizes, seconds)
    unique = np.unique(sizes)
    assert sample.weights.sum() == len(sizes)
    assert len(sample.places) <= sample.bins <= len(unique)
    assert sample.error == pytest.approx(project_epoch(sample, seconds) / seconds.sum() - 1, abs=1e-12)
    if sample.bins < len(unique):
        edges = sizes.min() + np.arange(sample.bins + 1) * (sizes.max() - sizes.min()) / sample.bins
        for place, weight in zip(sample.places, sample.weights, strict=True):
            bin_ = min(np.searchsorted(edges, sizes[place] + 1e-9) - 1, sample.bins - 1)
            last = bin_ == sample.bins - 1
            inside = (sizes >= edges[bin_] - 1e-9) & ((sizes < edges[bin_ + 1] - 1e-9) | last)
            assert inside.sum() == weight


@given(epochs(equal=False), st.sampled_from([0.1, 0.01, 1e-3, 1e-5]))
def test_bins_grow_only_while_the_error_is_above_the_bound(epoch: Epoch, error: float) -> None:
    sample = choose(method("seqpoint", error=error, few=0), *epoch)
    every = len(np.unique(epoch[0]))
    assert abs(sample.error) <= error or sample.bins == every
    for fewer in range(5, sample.bins):
        assert abs(choose(method("seqpoint", k0=fewer, error=1.0, few=0), *epoch).error) > error
    assert sample.bins == every if every <= 5 else sample.bins >= 5


@given(epochs(), st.floats(1e-6, 0.1), st.floats(1e-6, 0.1))
def test_a_smaller_bound_never_needs_fewer_bins(epoch: Epoch, first: float, other: float) -> None:
    small, large = (choose(method("seqpoint", error=bound), *epoch).bins for bound in sorted((first, other)))
    assert small >= large


@given(epochs(), st.integers(1, 30))
def test_the_error_is_within_half_the_gaps_between_times_of_a_bin(epoch: Epoch, bins: int) -> None:
    sizes, seconds = epoch
    sample = choose(method("seqpoint", k0=bins, error=1.0, few=0), sizes, seconds)
    bound = 0.0
    if sample.bins < len(np.unique(sizes)):
        bin_ = np.minimum((sizes - sizes.min()) * sample.bins // (sizes.max() - sizes.min()), sample.bins - 1)
        for bin_number in np.unique(bin_):
            times = np.unique(seconds[bin_ == bin_number])
            bound += (bin_ == bin_number).sum() * np.diff(times, prepend=times[0]).max() / 2
    assert abs(project_epoch(sample, seconds) - seconds.sum()) <= bound + 1e-9 * seconds.sum()


@given(epochs(), st.floats(0.1, 10))
def test_a_configuration_that_is_faster_by_one_factor_has_the_same_error_and_an_exact_speed_up(
    epoch: Epoch, factor: float
) -> None:
    sample = choose(method("seqpoint"), *epoch)
    both = np.stack([epoch[1], factor * epoch[1]])
    true, projected = both.sum(-1), project_epoch(sample, both)
    assert projected / true - 1 == pytest.approx(sample.error, abs=1e-9)
    assert projected[0] / projected[1] == pytest.approx(true[0] / true[1])


@given(epochs(), st.randoms(use_true_random=False))
def test_the_order_of_an_epoch_changes_nothing(epoch: Epoch, random: Any) -> None:
    order = list(range(len(epoch[0])))
    random.shuffle(order)
    sizes, seconds = epoch
    for name in ("seqpoint", "frequent", "median", "worst", "all"):
        sample, other = choose(method(name), sizes, seconds), choose(method(name), sizes[order], seconds[order])
        chosen = [(sizes[sample.places], sample), (sizes[order][other.places], other)]
        (mine, weights), (theirs, weights_again) = ((sorted(sizes_run), choice.weights) for sizes_run, choice in chosen)
        assert mine == theirs
        assert np.array_equal(weights, weights_again)


@given(epochs(equal=False))
def test_all_is_exact_on_every_configuration(epoch: Epoch) -> None:
    sample = choose(method("all"), *epoch)
    other = epoch[1][::-1]
    assert project_epoch(sample, other) == pytest.approx(other.sum())
    assert cut_sequential(sample, other) == pytest.approx(1)
    assert iterations_cut(sample) == 1


def test_baselines_are_what_they_say() -> None:
    sizes = np.array([5, 1, 1, 9, 2, 2, 2, 3, 4, 30])
    seconds = sizes * 0.1
    for name, size in (("frequent", 2), ("median", 2), ("worst", 30)):
        sample = choose(method(name), sizes, seconds)
        assert sizes[sample.places] == [size]
        assert sample.weights == [10]
    prior = choose(method("prior", warm_up=1, window=4), sizes, seconds)
    assert list(prior.places) == [1, 2, 3, 4]
    assert list(prior.weights) == [2.5] * 4
    with pytest.raises(ConfigError, match="an epoch of 10"):
        choose(method("prior", warm_up=7, window=4), sizes, seconds)


@pytest.mark.parametrize("name", sorted(shipped("iterations")))
def test_a_shipped_choice_works_on_a_shipped_data_set(name: str) -> None:
    sizes = iteration_lengths(Lengths.model_validate(shipped("lengths")["iwslt15"]), 64, 0)
    sample = choose(Iterations.model_validate(shipped("iterations")[name]), sizes, 0.01 * sizes)
    assert sample.weights.sum() == pytest.approx(len(sizes))
