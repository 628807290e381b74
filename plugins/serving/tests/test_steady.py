"""Steady state: no verdict depends on how many requests are simulated; beyond the knee no deployment is feasible."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest

import dse_serving.columns as at
from dse_serving.certainty import other_traffic, ranges_of
from dse_serving.choice import best_of, close_rivals, judged, within
from dse_serving.deployment import Deployment, Transfer
from dse_serving.results import CLOSE, MEETS, MISSES, metrics_of, percentile_interval, verdict_of
from dse_serving.run import run
from dse_serving.steadiness import QUESTIONS, SIZES, answers_moved, recommendation
from dse_serving.steady import COARSE, FULL, Overloaded, knee_per_s, serve_steadily
from dse_serving.study import _with_drawn_errors
from dse_serving.traffic import TokenLengths, Traffic, TrafficSpec
from tests.serving_cases import one_pool, random_case, step_times


def spec(**changes: Any) -> TrafficSpec:
    """Traffic of short requests, so that runs are short."""
    lengths = {
        "input": TokenLengths(kind="uniform", tokens=100),
        "output": TokenLengths(kind="uniform", tokens=60),
    }
    return TrafficSpec.model_validate({**lengths, "concurrency": 16, **changes})


def drawn(seed: int) -> Deployment:
    """A deployment whose engines hold requests of `spec`, drawn by a seed."""
    draw = np.random.default_rng(seed)
    room = 1.0 + 1e5 * 16 * int(draw.integers(40, 400))
    scheduler = {
        "policy": draw.choice(["mixed", "prefill_first"]),
        "tokens": int(draw.integers(200, 900)),
        "sequences": int(draw.integers(2, 40)),
        "host_s": float(draw.uniform(0, 1e-3)),
        "request_s": float(draw.choice([0, 1e-4])),
    }
    deployment = one_pool(step_times(draw, room), int(draw.integers(1, 4)), **scheduler)
    if draw.integers(2):
        return deployment
    return Deployment(
        (*deployment.pools, *deployment.pools), Transfer(float(draw.uniform(1e9, 1e11)), 1e-4), "round_robin"
    )


@pytest.mark.parametrize("seed", range(12))
def test_traffic_beyond_the_knee_is_never_feasible_however_few_requests_come(seed: int) -> None:
    deployment, draw = drawn(seed), np.random.default_rng(seed)
    knee = knee_per_s(deployment, spec())
    arrivals = str(draw.choice(["poisson", "gamma", "bursts"]))
    for requests in (20, 2000):
        traffic = spec(arrivals=arrivals, rate_per_s=knee * float(draw.uniform(1.0, 3.0)), requests=requests)
        with pytest.raises(Overloaded, match="more than the engines keep up with"):
            serve_steadily(deployment, traffic, percentile=0.99)


@pytest.mark.parametrize("seed", range(12))
def test_the_knee_parts_queues_that_are_bounded_from_those_that_grow(seed: int) -> None:
    """Beyond it the queue of a run takes a share of all arrivals, below it a share that shrinks as more come."""
    deployment = drawn(seed)
    knee = knee_per_s(deployment, spec())
    grown = []
    for load in (0.8, 1.3):
        traffic = spec(arrivals="poisson", rate_per_s=load * knee, counted="all").draw(8000)
        moments = run(deployment, traffic).state.moments
        ends = [moments[size - 1, at.ARRIVAL] for size in (4000, 8000)]
        left = [int((moments[:, at.ARRIVAL] <= end).sum() - (moments[:, at.FINISH] <= end).sum()) for end in ends]
        grown.append((left[1] - left[0]) / 4000)
    assert grown[0] < 0.05 < 0.12 < grown[1]


def test_a_single_server_has_the_knee_of_its_service_time() -> None:
    deployment = one_pool(step_times(head=0.0, prompt=0.0, linear=0.0), sequences=1)
    lengths = {"input": TokenLengths(tokens=50), "output": TokenLengths(tokens=1)}
    knee = knee_per_s(deployment, TrafficSpec(arrivals="poisson", **lengths))
    assert knee == pytest.approx(1 / 1.2e-3, rel=0.01)
    assert knee_per_s(deployment, TrafficSpec(arrivals="gamma", **lengths)) == knee


@pytest.mark.parametrize(("arrivals", "value"), [("closed", 16), ("closed", 64), ("poisson", 0.5), ("poisson", 0.85)])
def test_times_of_few_and_of_many_requests_agree_within_their_intervals(arrivals: str, value: float) -> None:
    deployment = one_pool(step_times(), 2, sequences=40)
    rate = value * knee_per_s(deployment, spec()) if arrivals == "poisson" else 1.0
    several = {"concurrency": int(max(1, value)), "rate_per_s": rate}
    runs = [
        serve_steadily(deployment, spec(arrivals=arrivals, requests=requests, **several), percentile=0.99)
        for requests in (1000, 10_000)
    ]
    for name in ("ttft_s", "tpot_s"):
        (low, high), (least, most) = (served.percentile_ends(getattr(served, name), 0.99) for served in runs)
        assert low <= most and least <= high
    assert runs[0].rate(runs[0].traffic.outputs) == pytest.approx(runs[1].rate(runs[1].traffic.outputs), rel=0.01)


def test_the_burst_that_begins_a_closed_loop_counts_only_where_all_is_counted() -> None:
    deployment = one_pool(step_times(), sequences=64, tokens=200)
    steady, complete = (
        serve_steadily(deployment, spec(concurrency=64, requests=640, counted=counted), percentile=0.99)
        for counted in ("steady", "all")
    )
    assert complete.traffic.size == 640 and len(complete.ttft_s) == 576  # less a tenth, its warm-up
    assert len(steady.ttft_s) >= 2000 and steady.traffic.size >= len(steady.ttft_s) + 3 * 64
    first = serve_steadily(
        deployment, spec(concurrency=64, requests=640, counted="all", warm_up=0.0), percentile=0.99
    ).ttft_s
    assert first[:64].max() > 3 * np.quantile(steady.ttft_s, 0.99)


def test_requests_of_one_token_have_no_time_of_a_later_one() -> None:
    """As in vLLM's benchmark: mean, percentile and rate a user are of the others; every limit of theirs holds."""
    deployment, outputs = one_pool(step_times(), sequences=64), np.where(np.arange(40) % 4, 1, 21)
    traffic = Traffic(np.linspace(0.0, 3.9, 40), np.full(40, 20), outputs, np.zeros(40, np.int64))
    served = run(deployment, traffic)
    assert len(served.tpot_s) == 10 and served.tpot_s.min() > 0
    metrics = metrics_of(served, 0.5, (None, 1e-9), None)
    assert metrics["tpot_mean_s"] == served.tpot_s.mean() == 1 / metrics["tokens_per_s_per_user"]
    assert metrics["tpot_p50_s"] > 0 and metrics["attained"] == 0.75
    single = run(deployment, replace(traffic, outputs=np.ones(40, np.int64)))
    assert len(single.tpot_s) == 0 and np.isnan(single.tpot_mean_s) and single.is_known(0.9)
    empty = metrics_of(single, 0.9, (None, 1e-9), None)
    assert np.isfinite(list(empty.values())).all() and (empty["tpot_s"], empty["meets"]) == (0.0, MEETS)


def test_counts_are_of_the_steady_state() -> None:
    """Prefixes miss and pages run short while the loop begins alone."""
    deployment = one_pool(step_times(room=1.0 + 1e5 * 16 * 60), sequences=50, kept_free=0.0)
    traffic = spec(concurrency=20, counted="all", requests=400, prefix=0.9, prefixes=2).draw()
    served = run(deployment, traffic)
    first, last = (
        metrics_of(replace(served, counted=part), 0.9, (None, None), None) for part in (slice(20), slice(20, 400))
    )
    requests = served.state.requests
    for metrics, part in ((first, requests[:20]), (last, requests[20:])):
        assert metrics["preempted"] == part[:, at.PREEMPTIONS].mean()
        assert metrics["prefix_hits"] == pytest.approx(part[:, at.HIT].sum() / part[:, at.INPUT].sum())
    assert first["prefix_hits"] < 0.9 * last["prefix_hits"]


def test_an_engine_is_as_busy_as_while_requests_that_count_come() -> None:
    """Services of 1.2 ms come every 10 ms, then every 2 ms."""
    arrivals = np.cumsum(np.repeat([0.01, 0.002], 100))
    singles = np.ones(200, np.int64)
    deployment = one_pool(step_times(head=0.0, prompt=0.0, linear=0.0, decode=0.0))
    served = run(deployment, Traffic(arrivals, singles, singles, 0 * singles))
    shares = [replace(served, counted=part).busy for part in (slice(100), slice(100, 200), slice(200))]
    assert shares == pytest.approx([0.12, 0.6, 200 * 0.0012 / 1.2], rel=0.01)


def test_more_traffic_is_more_of_one_request_as_well() -> None:
    point = SimpleNamespace(traffic=spec(concurrency=1, output=TokenLengths(tokens=1, most=3)))
    changes = dict(other_traffic(point))  # type: ignore[arg-type]
    assert changes["requests under way"] == {"concurrency": 2}
    assert changes["tokens of outputs"]["output"].tokens == 2
    assert changes["tokens of outputs"]["output"].most == 5


def test_draws_that_keep_up_alone_have_ranges() -> None:
    assert ranges_of(np.zeros((0, 3))) == {}
    assert set(ranges_of(np.array([[5.0, 0.1, np.nan], [6.0, 0.2, np.nan]]))) == {"tokens_per_s_per_gpu", "ttft_s"}
    lost, row = {"ranges": {}, "kept": 0.0}, {"traffic.arrivals": "closed"}
    assert list(_with_drawn_errors(lost, row)) == ["it cannot keep up in 100 % of the draws"]


def test_a_deployment_whose_knee_is_not_known_is_refused_without_a_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dse_serving.steady.knee_per_s", lambda *_: 0.0)
    with pytest.raises(Overloaded, match=r"keep up with: 0 requests/s .*\(use more GPUs\)"):
        serve_steadily(one_pool(step_times()), spec(arrivals="poisson"), percentile=0.99)


def test_a_draw_of_many_takes_fewer_requests_than_an_answer() -> None:
    deployment = one_pool(step_times(), sequences=64)
    full, coarse = (
        serve_steadily(deployment, spec(), percentile=0.99, effort=effort).traffic.size for effort in (FULL, COARSE)
    )
    assert coarse < full / 3


def test_a_trace_beyond_the_knee_is_refused_and_one_below_it_is_judged_whole(tmp_path: Path) -> None:
    deployment = one_pool(step_times(), sequences=20)
    rows = [f"{0.01 * place:.3f},100,60" for place in range(600)]
    (tmp_path / "a.csv").write_text("\n".join(["arrival_s,input_tokens,output_tokens", *rows]))
    knee = knee_per_s(deployment, spec(arrivals="trace", trace=str(tmp_path / "a.csv")))
    slow, fast = (
        spec(arrivals="trace", trace=str(tmp_path / "a.csv"), speed=load * knee / 100.0) for load in (0.5, 1.05)
    )
    served = serve_steadily(deployment, slow, percentile=0.9)
    assert 300 < len(served.ttft_s) < 600 and served.offered_per_s == pytest.approx(0.5 * knee)
    with pytest.raises(Overloaded, match=r"traffic\.speed"):
        serve_steadily(deployment, fast, percentile=0.9)


@pytest.mark.parametrize("seed", range(0, 300, 5))
def test_no_link_carries_more_than_its_rate(seed: int) -> None:
    """Of an engine that sends or receives: the bytes of all transfers, over the time from the first begin to the last
    end, at most its rate.
    """
    deployment, traffic = random_case(seed)
    if len(deployment.pools) < 2:
        return
    served = run(deployment, traffic, seed=seed)
    assert served.deployment.transfer is not None
    moments, requests, pools = served.state.moments, served.state.requests, deployment.pools
    moved = moments[:, at.MOVED] >= 0
    begun = moments[:, at.ADMITTED if served.deployment.transfer.beside else at.SENT]
    stages, split = pools[1].stages, pools[0].batches
    engines = (requests[:, at.ENGINE] - split) // stages
    for engine in np.unique(engines[moved]):
        chosen = moved & (engines == engine)
        token_s = pools[1].times.token_bytes / served.deployment.transfer.bytes_per_s / pools[1].ranks
        busy = token_s * float(requests[chosen, at.INPUT].sum())
        assert busy <= (moments[chosen, at.MOVED].max() - begun[chosen].min()) * (1 + 1e-9)


def test_many_senders_share_the_links_of_one_receiver() -> None:
    """Eight engines of prompts of no time send to one: its links bound what arrives, not theirs."""
    pool = one_pool(step_times(prompt=0.0, base=1e-6, linear=0.0), 8, sequences=50).pools[0]
    last = one_pool(step_times(base=1e-6, linear=0.0), 1, sequences=50).pools[0]
    traffic = spec(concurrency=64, counted="all", requests=400, output=TokenLengths(tokens=2)).draw()
    served = run(Deployment((pool, last), Transfer(1e8)), traffic)
    arrived = np.sort(served.times(at.MOVED))
    rate = float(traffic.inputs.sum()) * 1e5 / (arrived[-1] - served.times(at.SENT).min())
    assert 0.9e8 < rate <= 1e8 * (1 + 1e-9)


def test_an_interval_of_correlated_values_covers_its_percentile_more_often_than_one_of_independent_values() -> None:
    """An autoregressive process of known normal distribution."""
    draw, rho, count = np.random.default_rng(0), 0.98, 4000
    covered = np.zeros(2)
    for _ in range(100):
        noise = draw.standard_normal(count) * np.sqrt(1 - rho**2)
        values = np.empty(count)
        values[0] = draw.standard_normal()
        for place in range(1, count):
            values[place] = rho * values[place - 1] + noise[place]
        for place, more in enumerate(({}, {"batches": 20, "apart": 100})):
            low, high = percentile_interval(values, 0.95, **more)
            covered[place] += low <= 1.6449 <= high
    assert covered[0] < 50 and covered[1] > 88


def test_a_limit_is_held_missed_or_too_close_to_call() -> None:
    assert [verdict_of(1.0, 2.0, limit) for limit in (None, 2.5, 1.5, 0.5)] == [MEETS, MEETS, CLOSE, MISSES]
    assert verdict_of(1.0, np.inf, 5.0) == CLOSE


def points(*rows: dict[str, Any]) -> pd.DataFrame:
    """Points of a table, alike but for some values."""
    plain = {"traffic.arrivals": "closed", "gpus": 8.0, "verdict": MEETS, "tpot_s": 0.02, "ttft_s": 0.1}
    plain |= {"tpot_low_s": 0.019, "tpot_high_s": 0.021, "ttft_low_s": 0.09, "ttft_high_s": 0.11, "split": "1 x TP 8"}
    plain |= {"traffic.concurrency": 8, "in_system": 8.0}
    rates = ({"rate_low_per_gpu": row["rate"] - 1, "rate_high_per_gpu": row["rate"] + 1} for row in rows)
    listed = [
        {**plain, **ends, "key": str(place), "tokens_per_s_per_gpu": row["rate"], **row}
        for place, (row, ends) in enumerate(zip(rows, rates, strict=True))
    ]
    return pd.DataFrame(listed)


def test_a_deployment_whose_limit_is_too_close_to_call_is_named_and_not_recommended() -> None:
    table = judged(points({"rate": 100.0}, {"rate": 150.0, "ttft_high_s": 0.3}, {"rate": 90.0}), {"ttft_s": 0.2})
    best = best_of(within(table))
    assert best["key"] == "0" and [(row["key"], why) for row, why in close_rivals(table, best)] == [
        ("1", "may hold the limits")
    ]
    alone = within(
        judged(
            points({"rate": 150.0, "ttft_high_s": 0.3}, {"rate": 1.0, "ttft_low_s": 0.4, "ttft_high_s": 0.5}),
            {"ttft_s": 0.2},
        )
    )
    assert list(alone["verdict"]) == [CLOSE]


def test_rates_whose_intervals_overlap_are_too_close_to_call() -> None:
    table = points({"rate": 100.0}, {"rate": 98.5}, {"rate": 97.0})
    assert [row["key"] for row, _ in close_rivals(table, best_of(table))] == ["1"]


def test_open_traffic_takes_the_fewest_gpus_and_of_those_the_shortest_times() -> None:
    several = {"traffic.arrivals": "poisson", "rate": 400.0}
    table = points(
        {**several, "gpus": 2.0, "rate": 800.0},
        {**several, "gpus": 2.0, "rate": 800.0, "tpot_s": 0.01, "tpot_low_s": 0.009, "tpot_high_s": 0.011},
        {**several, "gpus": 4.0, "tpot_s": 0.005},
    )
    best = best_of(table)
    assert best["key"] == "1" and not list(close_rivals(table, best))


@pytest.mark.nightly
def test_answers_do_not_depend_on_how_many_requests_are_simulated() -> None:
    assert answers_moved(QUESTIONS[:2]) + answers_moved(QUESTIONS[5:9:2]) == 0
    assert recommendation(QUESTIONS[6], SIZES[0]).name == recommendation(QUESTIONS[6], SIZES[2]).name == "3 x TP 1"


@pytest.mark.parametrize("seed", range(3))
def test_a_draw_of_a_long_trace_serves_its_busiest_part(seed: int, tmp_path: Path) -> None:
    deployment, random = drawn(seed), np.random.default_rng(seed)
    gaps = random.exponential(2 / knee_per_s(deployment, spec()), COARSE.most + 500)
    rows = [f"{when:.6f},{random.integers(50, 100)},{random.integers(30, 60)}" for when in np.cumsum(gaps)]
    path = tmp_path / "trace.csv"
    path.write_text("\n".join(["arrival_s,input_tokens,output_tokens", *rows]) + "\n")
    traffic = spec(arrivals="trace", trace=str(path))
    full, part = (
        serve_steadily(deployment, traffic, percentile=0.99, effort=effort).traffic.size for effort in (FULL, COARSE)
    )
    assert (full, part) == (len(rows), COARSE.most)
