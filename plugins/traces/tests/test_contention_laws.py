"""Laws of contention: what is learnt of a profile, the rate of collectives over SMs, and profiles run with both."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dse.errors import ConfigError
from dse_traces import DATA
from dse_traces.laws.contention import (
    Laws,
    assumed_laws,
    learn_laws,
    lost_share,
    observed_slowdowns,
    recorded_alone,
    side_by_side,
)
from dse_traces.laws.rate_law import RateLaw, fit_rate_law
from dse_traces.laws.task_graph import EXPECTED, Scenarios, contention_model
from dse_traces.profile.kernels import Profile, profile_of
from dse_traces.readers.formats import read
from validation import contention_laws

US = 1e-6
GEMM, NORM, SUM = "sm90_xmma_gemm_bf16", "rms_norm_kernel", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL"
SHIPPED = DATA / "profiles" / "mi300x_resnet.csv.gz"


@pytest.fixture(scope="module")
def assumed() -> Laws:
    return assumed_laws("h100_8")


def iterations(slowed: float, *, count: int = 8, gemm: float = 200.0) -> Profile:
    """Iterations of GEMMs and norms, of which every other one runs beside an all-reduce on 32 SMs."""
    rows: list[dict[str, Any]] = []
    start = 0.0
    for iteration in range(count):
        beside = iteration % 2 == 1
        factor = slowed if beside else 1.0
        begun = start
        for place in range(6):
            name, alone, ctas = (GEMM, gemm, 100) if place % 2 == 0 else (NORM, 50.0, 4096)
            rows.append(_kernel(name, "7", start, alone * factor, ctas))
            start += alone * factor
        if beside:
            rows.append(_kernel(SUM, "20", begun, start - begun, 32))
    return profile_of(rows, "made")


def _kernel(name: str, stream: str, start: float, duration: float, ctas: int) -> dict[str, Any]:
    return {"name": name, "stream": stream, "start_s": start * US, "seconds": duration * US, "ctas": ctas}


@pytest.mark.parametrize(
    ("ctas", "held_sms", "expected"),
    [(100, 32, 1.0), (132, 32, 2.0), (264, 32, 1.5), (float("nan"), 66, 2.0), (10_000, 66, 152 / 76)],
)
def test_waves_are_those_of_the_sms_that_are_left(ctas: float, held_sms: float, expected: float) -> None:
    assert lost_share("GEMM", ctas, 132, held_sms) == pytest.approx(expected)


@pytest.mark.parametrize("slowed", [1.0, 1.2, 1.7])
def test_a_slowdown_that_was_put_in_is_learnt(slowed: float, assumed: Laws) -> None:
    laws = learn_laws(iterations(slowed), assumed)
    for kind in ("GEMM", "norm"):  # 100 CTAs fit onto the 100 SMs that are left
        assert laws.penalties[kind].observed >= 5
        assert laws.penalties[kind].factor.value == pytest.approx(slowed, rel=1e-6)
    assert laws.penalties["attention"] == assumed.penalties["attention"]


def test_what_lost_sms_explain_is_no_penalty(assumed: Laws) -> None:
    profile = iterations(2.0)
    profile = Profile(profile.kernels.assign(ctas=profile.kernels["ctas"].replace(100, 132)), "made")
    seen = observed_slowdowns(profile, assumed)
    np.testing.assert_allclose(seen[seen["kind"] == "GEMM"]["slowdown"], 2.0)
    assert learn_laws(profile, assumed).penalties["GEMM"].factor.value == pytest.approx(1.0)


@pytest.mark.parametrize("of_each", [(None,), (66,), (33, 33), (None, 33)])
def test_sms_that_collectives_at_once_hold_add_up_and_unknown_ones_are_the_usual(
    of_each: tuple[int | None, ...], assumed: Laws
) -> None:
    """GEMMs of many CTAs whose slow-down is just that of the SMs that collectives beside them hold."""
    cus = 132 / 8 if of_each == (None,) else 66.0
    slowed, rows, start = 132 / (132 - cus), list[dict[str, Any]](), 0.0
    for iteration in range(16):
        beside = iteration % 2 == 1
        for _ in range(3):
            seconds = 100 * (slowed if beside else 1.0)
            rows.append(_kernel("flash_fwd_kernel", "7", start, seconds, 4096))
            rows += [
                _kernel(f"{SUM}{place}", str(20 + place), start, seconds, 1) | {"ctas": ctas}
                for place, ctas in enumerate(of_each)
                if beside
            ]
            start += seconds
    seen = observed_slowdowns(profile_of(rows, "made"), assumed)
    assert len(seen) >= 5
    explained = seen[np.isclose(seen["slowdown"], slowed)]
    assert len(explained) >= 5
    np.testing.assert_allclose(explained["penalty"], 1.0)


@pytest.mark.parametrize("slowed", [1.0, 1.3])
@pytest.mark.parametrize("ctas", [132, 1000])
def test_a_recorded_time_counts_before_any_law(slowed: float, ctas: int, assumed: Laws) -> None:
    """One kernel, once alone and once beside a collective that holds 32 SMs: two waves by the law."""
    rows = [_kernel(GEMM, "7", 0, 100, ctas), _kernel(NORM, "7", 100, 50, 4096)]
    rows += [_kernel(GEMM, "7", 150, 100 * slowed, ctas), _kernel(SUM, "20", 150, 100 * slowed, 32)]
    rows += [_kernel(SUM, "20", 400, 100 * slowed, 32)]
    profile = profile_of(rows, "made")
    assert assumed.slowdown("GEMM", ctas, held_sms=32)[EXPECTED] >= 1.25
    np.testing.assert_allclose(recorded_alone(profile)[:3] / US, [100, 50, 100])
    model = contention_model(profile, learn_laws(profile, assumed))
    gemm = model.kernel_class[2]
    np.testing.assert_allclose(model.kernel_slowdowns(model.group_sms, np.ones(1))[:, gemm, 0], slowed)
    np.testing.assert_allclose(model.alone_s[:, 2] / US, 100)
    np.testing.assert_allclose(model.alone_s[:, 3] / US, 100 * slowed)  # the collective took as long alone
    more = model.kernel_slowdowns(model.group_sms * 2, np.ones(1))[EXPECTED, gemm, 0]
    by_law = [assumed.slowdown("GEMM", np.nan, held_sms=sms)[EXPECTED] for sms in (64, 32)]
    assert more == pytest.approx(slowed * by_law[0] / by_law[1])


def test_where_times_alone_differ_the_law_counts(assumed: Laws) -> None:
    """The same name and CTAs, and half as deep: which of them ran beside the collective is not known."""
    rows = [_kernel(GEMM, "7", 0, 100, 132), _kernel(GEMM, "7", 150, 200, 132), _kernel(GEMM, "7", 400, 150, 132)]
    profile = profile_of([*rows, _kernel(SUM, "20", 400, 150, 32)], "made")
    assert np.isnan(recorded_alone(profile)[2])
    assert not learn_laws(profile, assumed).measured


def test_kernels_beside_another_that_computes_teach_nothing(assumed: Laws) -> None:
    profile = iterations(1.5)
    second = profile.kernels[profile.is_compute].assign(stream="23", name="mystery")
    rows: Any = [*profile.kernels.to_dict("records"), *second.to_dict("records")]
    assert observed_slowdowns(profile_of(rows, "made"), assumed).empty


def test_a_collective_that_holds_more_sms_slows_gemms_more(assumed: Laws) -> None:
    factors = [assumed.slowdown("GEMM", 1000, held_sms=sms) for sms in (8, 32, 64)]
    assert all((less <= more).all() for less, more in itertools.pairwise(factors))
    assert (
        assumed.slowdown("norm", 1000, held_sms=8, relative_rate=2.0) >= assumed.slowdown("norm", 1000, held_sms=8)
    ).all()
    assert (assumed.slowdown("GEMM", 1000, held_sms=0) < factors[0])[1:].all()


def test_a_machine_without_constants_is_refused() -> None:
    with pytest.raises(ConfigError, match="no constants of contention"):
        assumed_laws("client_lpddr5x")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("latency", "of_sm", "peak"), [(3e-6, 5e9, 1e11), (2e-5, 1.2e10, 2e11), (5e-5, 4e10, 4.5e11), (1e-5, 3e10, 4e11)]
)
def test_the_law_of_rates_recovers_a_law_of_alpha_and_beta(latency: float, of_sm: float, peak: float) -> None:
    sms, payload = (values.ravel() for values in np.meshgrid([1, 2, 4, 8, 16, 32, 64], np.geomspace(1e5, 1e9, 8)))
    seconds = latency + payload / np.minimum(peak, of_sm * sms)
    fitted = np.isin(sms, [1, 4, 16, 64])
    law = fit_rate_law(payload[fitted], sms[fitted], seconds[fitted])
    errors = law.seconds(payload[~fitted], sms[~fitted]) / seconds[~fitted] - 1
    assert np.median(np.abs(errors)) < 0.03
    assert law.bytes_per_s_per_sm == pytest.approx(of_sm, rel=0.05)
    assert 1 / law.seconds_per_byte(64) == pytest.approx(peak, rel=0.05)
    assert law.spread[0] <= 1.03 and law.spread[1] >= 0.97


def test_the_law_of_rates_needs_as_many_rows_as_constants() -> None:
    with pytest.raises(ValueError, match="5 rows"):
        fit_rate_law([1e6] * 5, [1, 2, 3, 4, 5], [1e-3] * 5)
    assert RateLaw(1e-6, 0.0, 1e10, 1e11, 0.0, 4.0).seconds(1e9, [1, 100])[0] > 0.1


def test_a_profile_run_with_its_laws_takes_as_long_as_it_did(assumed: Laws) -> None:
    profile = iterations(1.4)
    model = contention_model(profile, learn_laws(profile, assumed))
    ran = model.run(model.structure, model.as_recorded())
    np.testing.assert_allclose(ran.start_s[0], profile.start_s, atol=3e-6)
    np.testing.assert_allclose(ran.end_s[0], profile.end_s, atol=3e-6)


def test_the_shipped_profile_run_with_its_laws_takes_as_long_as_it_did() -> None:
    profile = read(SHIPPED)
    model = contention_model(profile, learn_laws(profile, assumed_laws("mi300x_8")))
    case = Scenarios(**{**vars(model.as_recorded(3)), "case": np.arange(3)})
    spans = model.makespans(model.structure, case)
    np.testing.assert_allclose(spans, profile.span_s, rtol=0.02)


def launched(pause: float) -> Profile:
    """Two steps of three kernels; after the first the host waits for its last kernel, and launches on after a pause."""
    rows = [{**_kernel(GEMM, "7", 100 * place, 99, 132), "launch_s": (10 * place - 10) * US} for place in range(3)]
    begun = 299 + pause
    rows += [
        {**_kernel(GEMM, "7", begun + 10 + 100 * place, 99, 132), "launch_s": (begun + 5 * place) * US}
        for place in range(3)
    ]
    return profile_of(rows, "made")


@pytest.mark.parametrize(("pause", "saved"), [(20.0, 568.0), (400.0, 288.0)])
def test_a_host_that_waited_for_a_kernel_goes_on_sooner_when_it_ends_sooner(
    pause: float, saved: float, assumed: Laws
) -> None:
    model = contention_model(launched(pause), assumed)
    slower = np.array([[1.0], [1e-6]]) * np.ones(len(model.profile))
    scenarios = replace(model.as_recorded(2), gpu=np.array([0, 1]), paces=slower)
    slow, fast = model.makespans(model.structure, scenarios)
    assert slow == pytest.approx(model.profile.span_s, abs=4e-6)
    assert slow - fast == pytest.approx(saved * US, abs=8e-6)


def test_the_fluid_engine_agrees_with_a_longest_path_whose_durations_are_iterated(assumed: Laws) -> None:
    """Kernels of one stream beside collectives of another: durations by overlap, until they no longer change."""
    profile = iterations(1.3)
    model = contention_model(profile, learn_laws(profile, assumed))
    faster = model.as_recorded(2)
    faster = Scenarios(**{**vars(faster), "stretch": faster.stretch * np.array([[0.6], [0.3]])})
    ended = model.run(model.structure, faster).end_s
    for row, stretch in enumerate((0.6, 0.3)):
        np.testing.assert_allclose(ended[row], _longest_path(model, stretch), rtol=1e-6)


def _longest_path(model: Any, stretch: float) -> Any:
    profile, alone = model.profile, model.alone_s[EXPECTED].copy()
    alone[profile.is_collective] *= stretch
    factors = model.kernel_slowdowns(model.group_sms, np.ones(1))[EXPECTED]
    slowed_collective = model.laws.collectives.value
    seconds = alone.copy()
    for _ in range(60):
        start, end = np.zeros(len(profile)), np.zeros(len(profile))
        for kernel, previous in enumerate(model.waits.previous):
            needs = model.structure.needs.get(kernel, ())
            ready = [0.0] + [start[n.other] + n.reached * seconds[n.other] for n in needs]
            ready += [end[previous]] if previous >= 0 else []
            start[kernel] = max(ready) + model.waits.gap_s + model.unknown_s[kernel]
            end[kernel] = start[kernel] + seconds[kernel]
        moved = profile.kernels.assign(start_s=start, seconds=seconds)
        both = side_by_side(Profile(moved, "made"))
        heavy = profile.kernels["kind"].to_numpy()[both.kernel] == "GEMM"
        by_kernel = both.seconds * (1 - 1 / factors[model.kernel_class[both.kernel], 0])
        by_collective = both.seconds * heavy * (1 - 1 / slowed_collective)
        more = np.bincount(both.kernel, by_kernel, len(alone)) + np.bincount(both.collective, by_collective, len(alone))
        seconds = 0.5 * seconds + 0.5 * (alone + more)
    return end


def test_laws_of_one_layer_of_dualpipe_predict_the_next(shared: Callable[[str], Path]) -> None:
    data = shared(f"data/deepseek_dualpipe/{contention_laws.TABLE}").parent
    every, alone = contention_laws.slowed_errors(data)
    assert len(every) > 80 and np.median(np.abs(every)) <= 0.06
    assert len(alone) >= 5 and np.median(np.abs(alone)) <= 0.06
    assert abs(contention_laws.pair_error(data)) <= 0.05


def test_times_at_numbers_of_sms_that_were_not_fitted_are_predicted(shared: Callable[[str], Path]) -> None:
    times = contention_laws._by_ctas(shared("data/tokenweave/allreduce_by_ctas.csv"))
    assert np.median(np.abs(times.held_out())) <= 0.05
    times = contention_laws._by_ctas(shared("data/tokenweave/fused_allreduce_rmsnorm_by_ctas.csv"))
    assert np.median(np.abs(times.held_out())) <= 0.05


def test_orders_of_dualpipe_respect_what_waits_for_what() -> None:
    spent = dict.fromkeys(contention_laws.PARTS, 1.0)
    computes = ("attn(F)", "mlp(B)", "mlp(W)", "mlp(F)", "attn(B)", "attn(W)")
    moves = ("combine(B)", "dispatch(F)", "dispatch(B)", "combine(F)")
    assert computes in set(contention_laws._orders(computes))
    assert contention_laws._period(computes, moves, spent, spent) == pytest.approx(6.0, abs=1)
    assert not any(o.index("mlp(W)") < o.index("mlp(B)") for o in contention_laws._orders(computes))
