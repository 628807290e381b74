"""Engines: the compiled loop against SimPy, conservation laws, and queueing formulas."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest

import dse_serving.columns as at
from dse.errors import ConfigError
from dse_serving.closed_form import steady_loop
from dse_serving.deployment import Deployment, Pool, Scheduler, Transfer
from dse_serving.durations import most_of_a_rank
from dse_serving.reference import Cluster
from dse_serving.run import run
from dse_serving.traffic import PromptBlocks, Traffic
from tests.serving_cases import one_pool, random_case, step_times


def check_equal(seed: int) -> None:
    deployment, traffic = random_case(seed)
    assert np.array_equal(run(deployment, traffic, seed=seed).state.moments, Cluster(deployment, traffic, seed).run())


@pytest.mark.parametrize("seed", range(25))
def test_compiled_times_are_those_of_simpy(seed: int) -> None:
    check_equal(seed)


@pytest.mark.nightly
def test_compiled_times_are_those_of_simpy_in_a_thousand_cases() -> None:
    for seed in range(1000):
        check_equal(seed)


def closed_loop(count: int, prompt: int, output: int, concurrency: int) -> Traffic:
    lengths = np.full(count, prompt), np.full(count, output)
    return Traffic(np.zeros(count), *lengths, np.zeros(count, np.int64), concurrency)


def poisson(count: int, rate: float, prompts: np.ndarray, output: int = 1) -> Traffic:
    arrivals = np.cumsum(np.random.default_rng(0).exponential(1 / rate, count))
    return Traffic(arrivals, prompts, np.full(count, output), np.zeros(count, np.int64))


@pytest.mark.parametrize("seed", range(0, 60, 3))
def test_tokens_and_pages_are_conserved(seed: int) -> None:
    deployment, traffic = random_case(seed)
    served = run(deployment, traffic, seed=seed, logged=100_000)
    log, engine = served.state.log[: served.steps], served.state.engine
    total = deployment.kv_pages
    assert log[:, at.LOG_GENERATED].sum() == traffic.outputs.sum() == served.state.requests[:, at.GENERATED].sum()
    assert (engine[:, at.LEAST_FREE] >= 0).all() and np.array_equal(engine[:, at.FREE], total)
    assert (log[:, at.LOG_PAGES] <= total[log[:, at.LOG_ENGINE].astype(int)]).all() and (
        log[:, at.LOG_RUNNING] <= 20 * 2
    ).all()
    moments = served.state.moments
    assert (np.diff(moments[:, [at.ARRIVAL, at.READY, at.ADMITTED, at.FIRST, at.FINISH]], axis=1) >= 0).all()


def test_prefixes_are_found_until_requests_need_their_pages() -> None:
    """Of prefixes drawn evenly, an engine with room finds all but the first of each; with little, as many as LRU of
    equal entries: its share of pages (exact for independent references of equal probability).
    """
    draw = np.random.default_rng(0)
    groups, count, tokens = 40, 6000, 128
    inputs, outputs = np.full(count, tokens + 16), np.full(count, 1)
    blocks = PromptBlocks.of_groups(draw.integers(0, groups, count), np.full(count, tokens))
    hits = []
    for prefixes in (60, 20, 10, 1):
        room = 1.0 + 1e5 * 16 * (9 * 1 + 8 * prefixes)
        deployment = one_pool(step_times(room=room), sequences=1, kept_free=0.0, block=16)
        served = run(deployment, Traffic(np.zeros(count), inputs, outputs, 0 * inputs, 1, blocks))
        hits.append(float((served.state.requests[:, at.HIT] == tokens).mean()))
    assert hits[0] == pytest.approx(1 - groups / count)
    assert hits[1:3] == pytest.approx([20 / groups, 10 / groups], abs=0.04) and hits[3] < 0.06


def test_more_of_a_machine_never_serves_less() -> None:
    """Engines for goodput, pages for preemptions, and links for first tokens."""
    prompts = np.random.default_rng(4).integers(20, 200, 3000)
    traffic = poisson(3000, 900.0, prompts, output=40)
    runs = [run(one_pool(step_times(), engines, sequences=16), traffic) for engines in (1, 2, 3, 6)]
    goodput = [served.goodput(0.2, 0.03) * served.deployment.gpus for served in runs]
    assert goodput[0] < 0.5 * goodput[-1] and (np.diff(goodput) >= -0.01 * goodput[-1]).all()
    rooms = [1.0 + 1e5 * 16 * pages for pages in (20, 60, 200, 400, 800)]
    tight = [run(one_pool(step_times(room=room), sequences=50, kept_free=0.0), traffic) for room in rooms]
    preempted = [int(served.state.requests[:, at.PREEMPTIONS].sum()) for served in tight]
    assert preempted[0] > 100 and preempted[-1] == 0 and (np.diff(preempted) <= 0).all()
    pool = one_pool(step_times(), 2, sequences=50).pools[0]
    links = [run(Deployment((pool, pool), Transfer(rate)), traffic) for rate in (1e9, 4e9, 1e10, 1e12)]
    assert (np.diff([float(served.ttft_s.mean()) for served in links]) < 0).all()
    sent = links[0].transfers.min()
    assert sent >= prompts.min() * 1e5 / 1e9


def test_preemption_drafts_and_transfers_happen_in_the_random_cases() -> None:
    runs = [run(*random_case(seed), seed=seed) for seed in range(300)]
    assert sum(int(served.state.requests[:, at.PREEMPTIONS].sum()) for served in runs) > 50
    assert sum(int((served.times(at.MOVED) > 0).sum()) for served in runs) > 200
    # engines that read late, that let prompts wait, and that replay steps with prompts are among them
    for column, least in ((at.READS, 1), (at.WAITED, 0), (at.REPLAYED, 0)):
        assert sum(served.state.limits[0, column] > least for served in runs) > 20
    rounds = sum(int(served.state.requests[:, at.ROUNDS].sum()) for served in runs)
    assert rounds < 0.9 * sum(int(served.traffic.outputs.sum()) for served in runs)


def test_single_services_wait_as_in_a_queue_with_poisson_arrivals() -> None:
    """Pollaczek and Khinchine: a mean wait of rate E[S^2] / (2 (1 - load))."""
    prompts = np.random.default_rng(1).integers(1, 200, 200_000)
    deployment = one_pool(step_times(head=0.0, prompt=0.0), sequences=1)
    service = 1.2 * (1e-3 + 1e-5 * prompts)
    rate = 0.7 / service.mean()
    served = run(deployment, poisson(len(prompts), rate, prompts))
    waits = served.times(at.ADMITTED) - served.times(at.ARRIVAL)
    assert waits.mean() == pytest.approx(rate * np.mean(service**2) / (2 * 0.3), rel=0.04)


def test_services_of_whole_queues_wait_what_is_left_of_one_that_runs() -> None:
    """A batch of all that wait, of constant time S: busy S / 2 on average, busy for S of S + exp(-rate S) / rate."""
    deployment = one_pool(step_times(linear=0.0, head=0.0, prompt=0.0), sequences=100, tokens=10**6)
    service, rate = 1.2e-3, 1500.0
    served = run(deployment, poisson(200_000, rate, np.ones(200_000, np.int64)))
    busy = service / (service + np.exp(-rate * service) / rate)
    waits = served.times(at.ADMITTED) - served.times(at.ARRIVAL)
    assert waits.mean() == pytest.approx(busy * service / 2, rel=0.02)


def test_requests_under_way_are_rate_times_latency() -> None:
    prompts = np.random.default_rng(2).integers(1, 100, 5000)
    served = run(one_pool(step_times(), 2), poisson(5000, 60.0, prompts, output=50), logged=10**6)
    log = served.state.log[: served.steps]
    counted = [log[log[:, at.LOG_ENGINE] == engine] for engine in range(2)]
    seen = sum(
        float(
            (
                (rows[:, at.LOG_RUNNING] + rows[:, at.LOG_WAITING]) * (rows[:, at.LOG_FINISH] - rows[:, at.LOG_START])
            ).sum()
        )
        for rows in counted
    )
    span = served.times(at.FINISH).max()
    latency = (served.times(at.FINISH) - served.times(at.ARRIVAL)).sum() / span
    assert seen / span == pytest.approx(latency, rel=0.03)


@pytest.mark.parametrize("policy", ["mixed", "prefill_first"])
def test_a_steady_loop_is_its_closed_form(policy: str) -> None:
    deployment = one_pool(step_times(), policy=policy, sequences=100)
    draw = np.random.default_rng(0)
    outputs = draw.integers(150, 250, 2000)
    traffic = replace(closed_loop(2000, 100, 200, 16), outputs=outputs)
    served = run(deployment, traffic, skipped=0.2)
    first, later = steady_loop(deployment, 16, 100, 200)
    assert np.mean(served.tpot_s) == pytest.approx(later, rel=0.05)
    assert np.mean(served.ttft_s) == pytest.approx(first, rel=0.25)


def test_a_prompt_stays_on_one_rank() -> None:
    times = step_times(prompt=0.0, head=0.0, base=0.0)
    alone, single = (
        run(Deployment((Pool(1, Scheduler(tokens=400, host_s=0.0), times, ranks=ranks),)), closed_loop(1, 100, 1, 1))
        for ranks in (4, 1)
    )
    shared = run(Deployment((Pool(1, Scheduler(tokens=400), times, ranks=4),)), closed_loop(4, 100, 1, 4))
    assert alone.ttft_s[0] == pytest.approx(single.ttft_s[0])  # no rank helps
    assert shared.ttft_s == pytest.approx(alone.ttft_s[0])  # each rank has one of its own
    assert most_of_a_rank(5, 500, 150, 4) == 200 and most_of_a_rank(4, 400, 250, 4) == 250
    assert most_of_a_rank(3, 310, 150, 1) == 310 and most_of_a_rank(0, 0, 0, 4) == 0


@pytest.mark.parametrize("policy", ["mixed", "prefill_first"])
def test_each_rank_has_the_tokens_of_a_step(policy: str) -> None:
    """Steps of prompts on eight ranks of 100 tokens each, whose answers are one token."""

    def steps(count: int, prompt: int, **changes: object) -> int:
        scheduler = Scheduler.model_validate({"tokens": 100, "policy": policy, **changes})
        deployment, traffic = (
            Deployment((Pool(1, scheduler, step_times(), ranks=8),)),
            closed_loop(count, prompt, 1, 99),
        )
        assert np.array_equal(run(deployment, traffic).state.moments, Cluster(deployment, traffic).run())
        return run(deployment, traffic).steps

    assert steps(8, 100) == 1 and steps(9, 100) == 2
    assert steps(1, 250) == 3  # no other rank helps
    assert steps(9, 50) == 1 and steps(9, 60, chunked=False) == 2  # two of 60 do not fit on a rank


def test_prompts_wait_until_each_rank_has_one() -> None:
    traffic = replace(closed_loop(60, 20, 200, 12), outputs=np.random.default_rng(0).integers(100, 200, 60))
    never, long = (
        run(Deployment((Pool(1, Scheduler(tokens=400, gathered=steps), step_times(), ranks=4),)), traffic)
        for steps in (0, 60)
    )
    assert long.ttft_s.mean() > 3 * never.ttft_s.mean() and long.steps > never.steps
    assert long.ttft_s.max() < 62 * never.state.rates[0, at.HOST] + 62 * 2.5e-3 + 0.05  # and no longer than so


def test_requests_are_read_after_so_many_steps() -> None:
    """One request generates; another that comes during its second step is read after the tenth, or at once."""
    times = step_times(linear=0.0, head=0.0, decode=0.0, prompt=0.0)
    traffic = Traffic(np.array([0.0, 0.0015]), np.array([10, 10]), np.array([40, 1]), np.zeros(2, int))

    def ttft_s(policy: Literal["mixed", "prefill_first"], steps: int) -> float:
        scheduler = Scheduler(policy=policy, read_steps=steps)
        served = run(Deployment((Pool(1, scheduler, times),)), traffic)
        return float(served.ttft_s[1])

    # a step with prompts takes 1.2 ms, others 1 ms: the second request comes in the first of those
    for policy in ("mixed", "prefill_first"):
        assert ttft_s(policy, 1) == pytest.approx(0.0022 - 0.0015 + 0.0012)
        assert ttft_s(policy, 10) == pytest.approx(0.0012 + 10 * 0.001 - 0.0015 + 0.0012)
    # an idle engine reads at once, whatever its interval
    late = Traffic(np.array([0.0, 1.0]), np.array([10, 10]), np.array([40, 1]), np.zeros(2, int))
    assert run(Deployment((Pool(1, Scheduler(read_steps=1000), times),)), late).ttft_s[1] == pytest.approx(0.0012)


def test_prompts_wait_for_others_as_long_as_a_step_has_few_tokens() -> None:
    times = step_times(linear=0.0, head=0.0, decode=0.0, prompt=0.0)
    # one that generates, one prompt at 2 ms, and one more at 4.1 ms
    traffic = Traffic(np.array([0.0, 0.002, 0.0041]), np.full(3, 50), np.array([60, 1, 1]), np.zeros(3, int))

    def admitted_s(**options: Any) -> list[float]:
        scheduler = Scheduler(tokens=100, **options)
        return list(run(Deployment((Pool(1, scheduler, times),)), traffic).times(at.ADMITTED)[1:])

    assert admitted_s() == pytest.approx([0.0022, 0.0044])
    assert admitted_s(wait_steps=20, wait_share=0.4) == pytest.approx([0.0022, 0.0044])  # 51 tokens are enough
    together = admitted_s(wait_steps=20, wait_share=0.9)
    assert together[0] == together[1] == pytest.approx(0.0042)  # as soon as the second has come
    assert admitted_s(wait_steps=1, wait_share=1.0)[0] == pytest.approx(0.0032)  # or after so many steps
    alone = replace(traffic, arrivals=np.array([0.0, 0.5, 0.6]))
    served = run(Deployment((Pool(1, Scheduler(tokens=100, wait_steps=20, wait_share=1.0), times),)), alone)
    assert served.times(at.ADMITTED)[1] == 0.5  # nobody generates: it does not wait


def test_graphs_spare_the_host_the_launches_of_steps_with_few_tokens() -> None:
    times = step_times(linear=0.0, head=0.0, decode=0.0, prompt=0.0)

    def ttft_s(tokens: int, graphs: int) -> float:
        deployment = Deployment((Pool(1, Scheduler(launch_s=1e-3, prompt_graphs=graphs), times),))
        return float(run(deployment, closed_loop(1, tokens, 1, 1)).ttft_s[0])

    assert ttft_s(100, 0) == ttft_s(101, 100) == pytest.approx(10 * 1e-3)  # ten kernels
    assert ttft_s(100, 100) == pytest.approx(1.2e-3)


def test_the_front_end_splits_prompts_one_after_the_other_and_replies_hold_up_nobody() -> None:
    times = step_times(linear=0.0, head=0.0, decode=0.0, prompt=0.0)
    traffic = Traffic(np.zeros(2), np.array([100, 200]), np.array([1, 1]), np.zeros(2, int))

    def ttft_s(**options: Any) -> list[float]:
        return list(run(Deployment((Pool(1, Scheduler(**options), times),)), traffic).ttft_s)

    assert ttft_s(token_s=1e-4) == pytest.approx([0.01 + 0.0012, 0.03 + 0.0012])
    assert np.array(ttft_s(token_s=1e-4, reply_s=0.5)) - ttft_s(token_s=1e-4) == pytest.approx(0.5)


def test_drafts_that_are_all_accepted_come_together() -> None:
    plain, drafted = (
        one_pool(step_times(linear=0.0, head=0.0), drafts=drafts, acceptance=1.0, draft_share=0.0) for drafts in (0, 3)
    )
    traffic = closed_loop(8, 10, 41, 8)
    ratio = np.mean(run(plain, traffic).tpot_s) / np.mean(run(drafted, traffic).tpot_s)
    assert ratio == pytest.approx(4, rel=0.01)


def test_the_output_layer_checks_every_draft() -> None:
    """Forty later tokens come by four in ten steps, each with an output layer of four tokens."""
    times = step_times(base=0.0, linear=0.0, decode=0.0, prompt=0.0, head=1e-3)
    drafted = Deployment((Pool(1, Scheduler(memory=1.0, drafts=3, acceptance=1.0, draft_share=0.0), times),))
    assert run(drafted, closed_loop(1, 10, 41, 1)).tpot_s[0] == pytest.approx(10 * 4e-3 / 40)


def test_requests_that_no_engine_holds_are_refused() -> None:
    small = one_pool(step_times(room=1e5 * 64), block=16)
    with pytest.raises(ConfigError, match="more than the keys and values"):
        run(small, closed_loop(2, 60, 10, 1))
    with pytest.raises(ConfigError, match="leave no room"):
        run(one_pool(step_times(room=0.5)), closed_loop(2, 60, 10, 1))
    with pytest.raises(ConfigError, match="not cut"):
        run(one_pool(step_times(), tokens=32, chunked=False), closed_loop(2, 60, 10, 1))


@pytest.mark.more
@pytest.mark.slow
def test_the_compiled_loop_is_two_hundred_times_as_fast_as_simpy() -> None:
    deployment, traffic = one_pool(step_times(), sequences=100), closed_loop(300, 100, 200, 64)
    run(deployment, traffic)
    seconds = []
    for serve in (lambda: run(deployment, traffic), Cluster(deployment, traffic).run):
        begin = time.perf_counter()
        serve()
        seconds.append(time.perf_counter() - begin)
    assert seconds[1] > 200 * seconds[0]


@pytest.mark.parametrize("count", [20, 33, 700])
def test_tokens_a_second_are_those_of_a_loop_by_its_latency(count: int) -> None:
    """Little: c requests under way that each take T generate c O / T tokens a second, however few rounds there are."""
    served = run(one_pool(step_times(prompt=0.0), sequences=100), closed_loop(count, 100, 200, 32), skipped=0.1)
    latency = (served.times(at.FINISH) - served.times(at.ARRIVAL)).mean()
    assert served.rate(served.traffic.outputs) == pytest.approx(min(count, 32) * 200 / latency, rel=0.1)
