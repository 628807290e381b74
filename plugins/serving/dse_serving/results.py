"""Metrics from the times of all requests: percentiles with intervals, goodput, rates by GPU, user and dollar."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binom, t

import dse_serving.columns as at
from dse.backend import Metric
from dse_serving.compiled import State
from dse_serving.deployment import Deployment
from dse_serving.traffic import Traffic

Floats = NDArray[np.float64]
MEETS, CLOSE, MISSES = 1.0, 0.5, 0.0
"""A limit is held by the whole interval of a time, by a part of it, or by none."""
METRICS = {
    "goodput_per_s": Metric("1/s", "requests within both limits for each second of steady traffic", "maximize"),
    "attained": Metric("fraction", "of the requests, within both limits", "maximize", high=1.0),
    "tokens_per_s": Metric("1/s", "generated tokens", "maximize"),
    "tokens_per_s_per_gpu": Metric("1/s", "the same over all GPUs", "maximize"),
    "tokens_per_s_per_user": Metric("1/s", "1 over tpot_mean_s: what a user sees; 0 without later tokens", "maximize"),
    "tokens_per_usd": Metric("1/USD", "tokens over the price of all GPUs; 0 where that is not known", "maximize"),
    "ttft_s": Metric("s", "time to the first token, at slo.percentile"),
    "tpot_s": Metric("s", "time of each later token, at slo.percentile; 0 where no answer has two tokens"),
    "ttft_low_s": Metric("s", "lower end of the 95 % interval of ttft_s, by batch means"),
    "ttft_high_s": Metric("s", "upper end of it; the longest time where requests are too few for one"),
    "tpot_low_s": Metric("s", "lower end of the 95 % interval of tpot_s"),
    "tpot_high_s": Metric("s", "upper end of it"),
    "meets": Metric("", "1 within slo with both intervals, 0.5 too close to call, 0 beyond it", "maximize", high=1.0),
    "rate_low_per_gpu": Metric("1/s", "lower end of the 95 % interval of tokens_per_s_per_gpu", "maximize"),
    "rate_high_per_gpu": Metric("1/s", "upper end of it", "maximize"),
    "enough": Metric("", "1 where intervals of both times have upper ends, else 0", "maximize", high=1.0),
    "counted": Metric("", "requests that statistics count", "maximize"),
    "ttft_mean_s": Metric("s", "time to the first token, mean"),
    "tpot_mean_s": Metric("s", "time of each later token, mean"),
    "ttft_p50_s": Metric("s", "time to the first token, median"),
    "tpot_p50_s": Metric("s", "time of each later token, median"),
    "latency_s": Metric("s", "time to the last token, mean"),
    "in_system": Metric("", "requests under way, mean over time", "maximize"),
    "kv_peak": Metric(
        "fraction", "of KV pages, most in use at a time of the whole run, of the engine that used most", high=1.0
    ),
    "prefix_hits": Metric("fraction", "of the tokens of prompts, found in pages at entry", "maximize", high=1.0),
    "transfer_s": Metric("s", "from a whole prompt to its keys and values at an engine that generates, mean"),
    "preempted": Metric("", "preemptions for each request"),
    "busy": Metric("fraction", "of the time in which engines computed", "maximize", high=1.0),
    "gpus": Metric("", "GPUs in use"),
    "steps": Metric("", "steps of all engines in the whole run"),
}


@dataclass(frozen=True)
class ServingRun:
    """A run of a deployment, with the times of all requests [s] in the order of their numbers.

    steps: number of all steps; counted: requests that statistics count, in parts of equal size (`batches`) whose means
    are independent of one another, as are times of requests that come `apart` from one another; enough: whether these
    are as many as intervals need. offered_per_s: requests a second of open traffic that the engines keep up with, so
    that as many leave; 0 where they are counted.
    """

    deployment: Deployment
    traffic: Traffic
    state: State
    steps: int
    counted: slice
    batches: int = 1
    apart: int = 1
    enough: bool = True
    offered_per_s: float = 0.0

    def times(self, column: int) -> Floats:
        """A time of every request, by a column of `dse_serving.columns`."""
        return np.asarray(self.state.moments[:, column])

    @cached_property
    def ttft_s(self) -> Floats:
        """Time from arrival to the first token of every request that counts, with its way back to the client."""
        return np.asarray((self.times(at.FIRST) - self.times(at.ARRIVAL))[self.counted]) + self.reply_s

    @property
    def reply_s(self) -> float:
        """Time of tokens on their way to the client, from the engines that generate [s]."""
        return float(self.deployment.pools[-1].scheduler.reply_s)

    @cached_property
    def tpot_s(self) -> Floats:
        """Time of each token after the first, of the requests that count and have two tokens or more; empty where none
        has, as vLLM's benchmark leaves out requests of one token (`benchmarks/benchmark_serving.py`).
        """
        return self._later_s[~np.isnan(self._later_s)]

    @cached_property
    def _later_s(self) -> Floats:
        """Time of each token after the first of every request that counts; NaN for requests of one token."""
        later = self.traffic.outputs - 1
        spent = self.times(at.FINISH) - self.times(at.FIRST)
        return np.where(later > 0, spent / np.maximum(later, 1), np.nan)[self.counted]

    @property
    def tpot_mean_s(self) -> float:
        """Mean of `tpot_s`; NaN where no request has two tokens."""
        return float(self.tpot_s.mean()) if len(self.tpot_s) else float("nan")

    @cached_property
    def transfers(self) -> Floats:
        """Time from a whole prompt to its keys and values where they are needed, of every request that counts and moved
        some.
        """
        sent, moved = (self.times(column)[self.counted] for column in (at.SENT, at.MOVED))
        return np.asarray((moved - sent)[moved >= 0])

    @cached_property
    def window(self) -> tuple[float, float]:
        """Begin and end [s] of the time over which rates count: from the arrival of the first request that counts to
        that of the last one, while traffic keeps up; all of it where that is shorter than requests take on average.
        """
        arrivals, ends = self.times(at.ARRIVAL), self.times(at.FINISH)
        begin, end = float(arrivals[self.counted].min()), float(arrivals[self.counted].max())
        # a shorter window would depend on when single requests end
        if end - begin > float((ends - arrivals).mean()):
            return begin, end
        return float(arrivals.min()), float(ends.max())

    def shares(self, begin: float, end: float) -> Floats:
        """Share of every request that is served from `begin` to `end`, as it generates evenly over its time."""
        first, finish = self.times(at.FIRST), self.times(at.FINISH)
        inside = np.minimum(finish, end) - np.maximum(first, begin)
        # a request of one token is served at its first and only one
        at_once = (finish > begin) & (finish <= end)
        return np.asarray(
            np.where(finish > first, np.maximum(inside, 0.0) / np.where(finish > first, finish - first, 1.0), at_once)
        )

    def rates(self, amounts: NDArray[Any], parts: int) -> Floats:
        """Sum of an amount of every request for each second of equal parts of the window; 0 where it has no length."""
        ends = np.linspace(*self.window, parts + 1)
        sums = [(self.shares(*pair) * amounts).sum() for pair in itertools.pairwise(ends)]
        return np.array(sums) / (ends[1] - ends[0]) if ends[1] > ends[0] else np.zeros(parts)

    def rate(self, amounts: NDArray[Any]) -> float:
        """Sum of an amount of every request a second: of what comes, where the engines keep up; else of the window."""
        if self.offered_per_s:
            # in steady state as many leave as come: the rate is known without a window
            return self.offered_per_s * float(amounts.mean())
        return float(self.rates(amounts, 1)[0])

    def rate_interval(self, amounts: NDArray[Any]) -> tuple[float, float]:
        """95 % interval of `rate`, by the spread of what comes, or by batch means; none of one batch."""
        if self.offered_per_s:
            low, high = mean_interval(amounts.astype(float))
            return self.offered_per_s * low, self.offered_per_s * high
        return mean_interval(self.rates(amounts, self.batches)) if self.batches > 1 else (self.rate(amounts),) * 2

    def is_known(self, share: float) -> bool:
        """Tell whether the intervals of both times at a percentile have upper ends."""
        return all(np.isfinite(self.percentile_ends(values, share)[1]) for values in (self.ttft_s, self.tpot_s))

    @cached_property
    def in_system(self) -> float:
        """Requests under way, mean over the window."""
        begin, end = self.window
        inside = np.minimum(self.times(at.FINISH), end) - np.maximum(self.times(at.ARRIVAL), begin)
        return float(np.maximum(inside, 0.0).sum()) / (end - begin) if end > begin else float(len(inside))

    @cached_property
    def busy(self) -> float:
        """Share of the time in which engines computed while requests that count came to them; of the whole run where
        these come in less time than a request takes on average.
        """
        ready, computed = (self.times(column)[self.counted] for column in (at.READY, at.BUSY))
        span, busy_s = float(ready[-1] - ready[0]), float(computed[-1] - computed[0])
        if span <= float((self.times(at.FINISH) - self.times(at.ARRIVAL)).mean()):
            span, busy_s = float(self.times(at.FINISH).max()), float(self.state.sums[:, 0].sum())
        # sums of steps are rounded, and may exceed the time by a last digit
        return min(1.0, busy_s / (span * len(self.state.ends)))

    def percentile_ends(self, values: Floats, share: float) -> tuple[float, float]:
        """95 % interval of a percentile of times, (0, 0) of no times; without an upper end where they are too few."""
        if not len(values):
            return 0.0, 0.0
        # few requests may have two tokens
        batches = min(self.batches, len(values))
        low, high = percentile_interval(values, share, batches=batches, apart=self.apart)
        return low, high if self.enough else float("inf")

    def within(self, ttft_s: float | None, tpot_s: float | None) -> NDArray[np.bool_]:
        """The requests that count and are within limits; that of later tokens holds for a request of one token."""
        fits = np.ones(len(self.ttft_s), bool)
        for times, most in ((self.ttft_s, ttft_s), (self._later_s, tpot_s)):
            fits &= ~(times > (np.inf if most is None else most))
        return fits

    def goodput(self, ttft_s: float | None, tpot_s: float | None) -> float:
        """Requests a second and GPU within limits [s], while traffic is steady."""
        within = float(self.within(ttft_s, tpot_s).mean())
        return within * self.rate(np.ones(self.traffic.size)) / self.deployment.gpus


def percentile(values: Floats, share: float) -> float:
    """The smallest value that a share of all does not exceed; NaN of no values."""
    return float(np.quantile(values, share, method="inverted_cdf")) if len(values) else float("nan")


def percentile_interval(
    values: Floats, share: float, confidence: float = 0.95, *, batches: int = 1, apart: int = 1
) -> tuple[float, float]:
    """Interval of a percentile by order statistics: of independent values, whose ranks are binomial (David and
    Nagaraja, Order Statistics, section 7.1), or wider where the shares of equal batches, one after the other, that
    exceed the percentile spread more (batch means; Law, Simulation Modeling and Analysis, section 9.5.3; of the
    logarithm, as shares are not negative), or where those that exceed it are of few peaks, more than `apart` values
    from one another: their number is Poisson's, and their sizes exponential (derived). The upper end is infinite where
    there are too few values for it.
    """
    ordered, count = np.sort(values), len(values)
    tail = (1 - confidence) / 2
    low, high = int(binom.ppf(tail, count, share)), int(binom.ppf(1 - tail, count, share))
    if batches > 1:
        beyond = values > percentile(values, share)
        # share of each batch that exceeds the percentile
        means = np.array([float(part.mean()) for part in np.array_split(beyond, batches)])
        # values beyond that are close to each other are of one peak of the queue
        peaks = 1 + int((np.diff(np.flatnonzero(beyond)) > apart).sum())
        # relative error of the share beyond, by batches, or by the peaks, if they are few
        error = max(float(means.std(ddof=1)) / (batches**0.5 * (1 - share)), (2 / peaks) ** 0.5)
        # an interval of the logarithm: the share beyond is between it over the factor and it times the factor
        factor = float(np.exp(float(t.ppf(1 - tail, batches - 1)) * error))
        low = min(low, int(np.floor((1 - (1 - share) * factor) * count)))
        high = max(high, int(np.ceil((1 - (1 - share) / factor) * count)))
        # the order statistic, or what the tail extrapolates to, whichever is later
        if high < count:
            return float(ordered[max(low - 1, 0)]), max(float(ordered[high]), _beyond(ordered, share, factor))
    return float(ordered[max(low - 1, 0)]), float(ordered[high]) if high < count else float("inf")


def _beyond(ordered: Floats, share: float, factor: float) -> float:
    """Value that a `factor` fewer of the values exceed than a percentile, if they fall off exponentially as from their
    median to it: the largest of correlated values are those of few peaks, and a longer run has higher ones.
    """
    middle = min(0.5, share / 2)
    at_middle, at_share = percentile(ordered, middle), percentile(ordered, share)
    return at_share + (at_share - at_middle) * float(np.log(factor) / np.log((1 - middle) / (1 - share)))


def mean_interval(values: Floats, confidence: float = 0.95) -> tuple[float, float]:
    """Interval of the mean of independent values, or of batch means, by Student's t."""
    half = float(t.ppf((1 + confidence) / 2, len(values) - 1)) * float(values.std(ddof=1)) / len(values) ** 0.5
    return float(values.mean()) - half, float(values.mean()) + half


def verdict_of(low: float, high: float, limit: float | None) -> float:
    """MEETS, MISSES or CLOSE: of a time with an interval against a limit."""
    if limit is None or high <= limit:
        return MEETS
    return MISSES if low > limit else CLOSE


def metrics_of(
    served: ServingRun, share: float, slo: tuple[float | None, float | None], usd_per_gpu_hour: float | None
) -> dict[str, float]:
    """Every metric of `METRICS`. share: percentile; slo: limits of the first and of later tokens [s].

    Times of later tokens are 0 where no request has two tokens: a table holds finite numbers alone.
    """
    fits, gpus = served.within(*slo), served.deployment.gpus
    rates = [max(0.0, end) / gpus for end in served.rate_interval(served.traffic.outputs)]
    tokens = served.rate(served.traffic.outputs)
    latency = served.times(at.FINISH) - served.times(at.ARRIVAL) + served.reply_s
    state = served.state
    ttft, tpot, counted = served.ttft_s, served.tpot_s, served.counted
    later_mean_s, later_p50_s, later_s = np.nan_to_num(
        [served.tpot_mean_s, percentile(tpot, 0.5), percentile(tpot, share)]
    ).tolist()
    return {
        "goodput_per_s": served.goodput(*slo) * gpus,
        "attained": float(fits.mean()),
        "tokens_per_s": tokens,
        "tokens_per_s_per_gpu": tokens / gpus,
        "tokens_per_s_per_user": 1.0 / later_mean_s if later_mean_s > 0 else 0.0,
        "tokens_per_usd": 3600 * tokens / (gpus * usd_per_gpu_hour) if usd_per_gpu_hour else 0.0,
        "ttft_s": percentile(ttft, share),
        "tpot_s": later_s,
        **_judged(served, share, slo),
        "rate_low_per_gpu": rates[0],
        "rate_high_per_gpu": rates[1],
        "enough": float(served.is_known(share)),
        "counted": float(len(ttft)),
        "ttft_mean_s": float(ttft.mean()),
        "tpot_mean_s": later_mean_s,
        "ttft_p50_s": percentile(ttft, 0.5),
        "tpot_p50_s": later_p50_s,
        "latency_s": float(latency[served.counted].mean()),
        "in_system": served.in_system,
        # of the engine that came closest to its last page
        "kv_peak": float((1 - state.engine[:, at.LEAST_FREE] / served.deployment.kv_pages).max()),
        "prefix_hits": float(state.requests[counted, at.HIT].sum() / served.traffic.inputs[counted].sum()),
        "transfer_s": float(served.transfers.mean()) if len(served.transfers) else 0.0,
        "preempted": float(state.requests[counted, at.PREEMPTIONS].mean()),
        "busy": served.busy,
        "gpus": float(gpus),
        "steps": float(served.steps),
    }


def _judged(served: ServingRun, share: float, slo: tuple[float | None, float | None]) -> dict[str, float]:
    """Ends of the intervals of both times, and how they stand against their limits."""
    judged, verdicts = dict[str, float](), list[float]()
    for name, values, limit in zip(("ttft", "tpot"), (served.ttft_s, served.tpot_s), slo, strict=True):
        low, high = served.percentile_ends(values, share)
        # the weaker of both verdicts counts
        verdicts.append(verdict_of(low, high, limit))
        judged |= {f"{name}_low_s": low, f"{name}_high_s": min(high, float(values.max(initial=0.0)))}
    return judged | {"meets": min(verdicts)}
