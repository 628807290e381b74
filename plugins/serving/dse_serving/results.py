"""Metrics from the times of all requests: percentiles with intervals, goodput, rates by GPU, user and dollar."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binom

import dse_serving.columns as at
from dse.backend import Metric
from dse_serving.compiled import State
from dse_serving.deployment import Deployment
from dse_serving.traffic import Traffic

Floats = NDArray[np.float64]
METRICS = {
    "goodput_per_s": Metric("1/s", "requests within both limits for each second of steady traffic", "maximize"),
    "attained": Metric("fraction", "of the requests, within both limits", "maximize", high=1.0),
    "tokens_per_s": Metric("1/s", "generated tokens", "maximize"),
    "tokens_per_s_per_gpu": Metric("1/s", "the same over all GPUs", "maximize"),
    "tokens_per_s_per_user": Metric("1/s", "1 over tpot_mean_s: what a user sees", "maximize"),
    "tokens_per_usd": Metric("1/USD", "tokens over the price of all GPUs; 0 where that is not known", "maximize"),
    "ttft_s": Metric("s", "time to the first token, at slo.percentile"),
    "tpot_s": Metric("s", "time of each later token, at slo.percentile"),
    "ttft_mean_s": Metric("s", "time to the first token, mean"),
    "tpot_mean_s": Metric("s", "time of each later token, mean"),
    "ttft_p50_s": Metric("s", "time to the first token, median"),
    "tpot_p50_s": Metric("s", "time of each later token, median"),
    "latency_s": Metric("s", "time to the last token, mean"),
    "in_system": Metric("", "requests under way, mean over time", "maximize"),
    "kv_peak": Metric(
        "fraction", "of the pages of keys and values in use at the worst, of the engine that used most", high=1.0
    ),
    "prefix_hits": Metric("fraction", "of the tokens of prompts, found in pages at entry", "maximize", high=1.0),
    "transfer_s": Metric("s", "from a whole prompt to its keys and values at an engine that generates, mean"),
    "preempted": Metric("", "preemptions for each request"),
    "busy": Metric("fraction", "of the time in which engines computed", "maximize", high=1.0),
    "gpus": Metric("", "GPUs in use"),
    "steps": Metric("", "steps of all engines"),
}


@dataclass(frozen=True)
class ServingRun:
    """A run of a deployment, with the times of all requests [s] in the order of their numbers.

    steps: number of all steps; skipped: share of the requests, the first ones, that no statistic counts.
    """

    deployment: Deployment
    traffic: Traffic
    state: State
    steps: int
    skipped: float = 0.0

    def times(self, column: int) -> Floats:
        """A time of every request, by a column of `dse_serving.columns`."""
        return np.asarray(self.state.moments[:, column])

    @cached_property
    def counted_requests(self) -> slice:
        """Requests that statistics count."""
        return slice(min(int(self.skipped * self.traffic.size), self.traffic.size - 1), None)

    @cached_property
    def ttft_s(self) -> Floats:
        """Time from arrival to the first token of every request that counts."""
        return np.asarray((self.times(at.FIRST) - self.times(at.ARRIVAL))[self.counted_requests])

    @cached_property
    def tpot_s(self) -> Floats:
        """Time of each token after the first of the same; 0 where there is one token."""
        later = np.maximum(self.traffic.outputs - 1, 1)
        return np.asarray(((self.times(at.FINISH) - self.times(at.FIRST)) / later)[self.counted_requests])

    @cached_property
    def transfers(self) -> Floats:
        """Time from a whole prompt to its keys and values where they are needed, of every request that moved some."""
        sent, moved = self.times(at.SENT), self.times(at.MOVED)
        return np.asarray((moved - sent)[moved >= 0])

    @cached_property
    def window(self) -> tuple[float, float]:
        """Begin and end [s] of the time over which rates count: from the arrival of the first request that counts to
        that of the last one, while traffic keeps up; all of it where that is shorter than requests take on average.
        """
        arrivals, ends = self.times(at.ARRIVAL), self.times(at.FINISH)
        begin, end = float(arrivals[self.counted_requests].min()), float(arrivals.max())
        if end - begin > float((ends - arrivals).mean()):
            return begin, end
        return float(arrivals.min()), float(ends.max())

    @cached_property
    def shares(self) -> Floats:
        """Share of every request that is served within the window, as it generates evenly over its time."""
        begin, end = self.window
        first, finish = self.times(at.FIRST), self.times(at.FINISH)
        inside = np.minimum(finish, end) - np.maximum(first, begin)
        at_once = (finish > begin) & (finish <= end)
        return np.asarray(
            np.where(finish > first, np.maximum(inside, 0.0) / np.where(finish > first, finish - first, 1.0), at_once)
        )

    def rate(self, amounts: NDArray[Any]) -> float:
        """Sum of an amount of every request for each second of the window; 0 where it has no length."""
        begin, end = self.window
        return float((self.shares * amounts).sum()) / (end - begin) if end > begin else 0.0

    def within(self, ttft_s: float | None, tpot_s: float | None) -> NDArray[np.bool_]:
        """The requests that count and are within limits."""
        fits = np.ones(len(self.ttft_s), bool)
        for times, most in ((self.ttft_s, ttft_s), (self.tpot_s, tpot_s)):
            fits &= times <= (np.inf if most is None else most)
        return fits

    def goodput(self, ttft_s: float | None, tpot_s: float | None) -> float:
        """Requests a second and GPU within limits [s], while traffic is steady."""
        within = float(self.within(ttft_s, tpot_s).mean())
        return within * self.rate(np.ones(self.traffic.size)) / self.deployment.gpus


def percentile(values: Floats, share: float) -> float:
    """The smallest value that a share of all does not exceed."""
    return float(np.quantile(values, share, method="inverted_cdf"))


def percentile_interval(values: Floats, share: float, confidence: float = 0.95) -> tuple[float, float]:
    """Interval of a percentile of independent values by order statistics, whose ranks are binomial (David and Nagaraja,
    Order Statistics, section 7.1). The upper end is infinite where there are too few values for it.
    """
    ordered, count = np.sort(values), len(values)
    tail = (1 - confidence) / 2
    low, high = int(binom.ppf(tail, count, share)), int(binom.ppf(1 - tail, count, share))
    return float(ordered[max(low - 1, 0)]), float(ordered[high]) if high < count else float("inf")


def metrics_of(
    served: ServingRun, share: float, slo: tuple[float | None, float | None], usd_per_gpu_hour: float | None
) -> dict[str, float]:
    """Every metric of `METRICS`. share: percentile; slo: limits of the first and of later tokens [s]."""
    fits, gpus = served.within(*slo), served.deployment.gpus
    tokens = served.rate(served.traffic.outputs)
    latency = served.times(at.FINISH) - served.times(at.ARRIVAL)
    ends, state = float(served.times(at.FINISH).max()), served.state
    ttft, tpot = served.ttft_s, served.tpot_s
    total = np.repeat(
        [pool.blocks for pool in served.deployment.pools], [pool.batches for pool in served.deployment.pools]
    )
    return {
        "goodput_per_s": served.goodput(*slo) * gpus,
        "attained": float(fits.mean()),
        "tokens_per_s": tokens,
        "tokens_per_s_per_gpu": tokens / gpus,
        "tokens_per_s_per_user": 1.0 / float(tpot.mean()) if tpot.mean() > 0 else 0.0,
        "tokens_per_usd": 3600 * tokens / (gpus * usd_per_gpu_hour) if usd_per_gpu_hour else 0.0,
        "ttft_s": percentile(ttft, share),
        "tpot_s": percentile(tpot, share),
        "ttft_mean_s": float(ttft.mean()),
        "tpot_mean_s": float(tpot.mean()),
        "ttft_p50_s": percentile(ttft, 0.5),
        "tpot_p50_s": percentile(tpot, 0.5),
        "latency_s": float(latency[served.counted_requests].mean()),
        "in_system": float(latency.sum()) / (ends - float(served.times(at.ARRIVAL).min())),
        "kv_peak": float((1 - state.engine[:, at.LEAST_FREE] / total).max()),
        "prefix_hits": float(state.requests[:, at.HIT].sum() / served.traffic.inputs.sum()),
        "transfer_s": float(served.transfers.mean()) if len(served.transfers) else 0.0,
        "preempted": float(state.requests[:, at.PREEMPTIONS].mean()),
        "busy": min(1.0, float(state.sums[:, 0].sum()) / (ends * len(state.ends))),
        "gpus": float(gpus),
        "steps": float(served.steps),
    }
