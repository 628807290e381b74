"""Steady state of a deployment: whether its engines keep up, which requests count, and how many there must be.

Open traffic is steady below the rate at which the engines serve when they always have work: the saturation rule
(F. Baccelli and S. Foss, On the saturation rule for the stability of queues, J. Appl. Prob. 32, 1995). That rate, the
knee, is simulated apart from the traffic, so that no verdict depends on how many requests come. Beyond it, or where
requests under way grow from the first half of the arrivals to the second one, a deployment is overloaded, and refused.

What begins and ends a run is left out: of a closed loop the first 2 c requests of c under way, and the last c, which no
others follow; of open traffic the first two batches, and the last L requests, with L under way on average. A batch is
long enough that its mean hardly depends on the one before: c requests, or L and 1 / (1 - load)^2, in which a queue
forgets (J. Abate and W. Whitt, Transient behaviour of the M/G/1 workload process, Oper. Res. 42, 1994). There are
twenty batches, and more requests as long as the interval of a percentile has no upper end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

import dse_serving.columns as at
from dse.errors import ConfigError, Problem
from dse_serving.deployment import Deployment
from dse_serving.results import ServingRun, mean_interval
from dse_serving.run import run
from dse_serving.traffic import Traffic, TrafficSpec


@dataclass(frozen=True)
class Effort:
    """How long a run is. batches: of which intervals are made; beyond: requests that a percentile leaves above it."""

    batches: int
    beyond: int
    most: int = 20_000  # requests that count, unless more are under way or asked for


FULL, COARSE = Effort(20, 20), Effort(3, 5, most=3000)
"""Of an answer, and of one of many draws."""
_FEWEST = 5  # batches that make an interval
_SAMPLE = 1000  # requests of drawn traffic that a loop of busy engines repeats
_QUEUED = 1.5  # requests of a loop that keeps engines busy, for each one that they hold
_IN_BATCH = 100  # requests of a batch of such a loop, at least
_PASSES = 4  # runs that find how many requests are under way
_GROWN = 0.01  # share of the arrivals that queue for ever
_ERRORS = 3.0  # standard errors by which a growth is none of chance


class Overloaded(ConfigError):
    """Traffic is more than a deployment keeps up with. knee: requests a second that it does."""

    def __init__(self, problem: Problem, knee: float) -> None:
        super().__init__([problem])
        self.knee = knee


def serve_steadily(
    deployment: Deployment, spec: TrafficSpec, *, percentile: float, effort: Effort = FULL, logged: int = 0
) -> ServingRun:
    """The run of a deployment under traffic, with what statistics count of it. percentile: share that is asked for.

    Raises ConfigError for requests that no engine can serve, and Overloaded for traffic beyond the knee.
    """
    seed, warm_up = int(spec.seed), float(spec.warm_up)
    if spec.counted == "all":
        return run(deployment, spec.draw(), seed=seed, logged=logged, skipped=warm_up)
    plan = _Plan(deployment, spec, max(effort.beyond / (1 - percentile), float(spec.requests or 0)), effort, logged)
    served = plan.run()
    # a rare percentile needs more requests: they double until its interval has an upper end
    while effort is FULL and spec.arrivals != "trace" and not served.is_known(percentile):
        # bounded: an interval without an upper end is reported as such
        if len(served.ttft_s) >= effort.most:
            break
        plan = replace(plan, least=2 * len(served.ttft_s))
        served = plan.run()
    return served


@dataclass(frozen=True)
class _Plan:
    """Runs of a deployment. least: requests that count."""

    deployment: Deployment
    spec: TrafficSpec
    least: float
    effort: Effort
    logged: int

    def run(self) -> ServingRun:
        """The run under the arrivals of the traffic."""
        if self.spec.arrivals == "closed":
            return self.closed()
        return self.trace() if self.spec.arrivals == "trace" else self.open()

    def closed(self) -> ServingRun:
        """A closed loop, whose batches are rounds of all that are under way."""
        under_way = int(self.spec.concurrency)
        counted = self._counted(under_way, self.effort.batches)
        # two rounds of all that are under way forget how the loop began
        warm = max(2 * under_way, int(self.spec.warm_up * counted))
        # the last ones under way have nobody after them, and do not count
        served = self._run(self.spec.draw(warm + counted + under_way))
        return self._part(served, warm, counted, under_way)

    def open(self) -> ServingRun:
        """Traffic that is drawn, of as many requests as those under way need: they are known when it has run."""
        rate = float(self.spec.rate_per_s)
        # refused before anything is served
        knee = self._check_rate(rate, "traffic.rate_per_s", rate)
        under_way, served = 0.0, None
        # how many are under way is known after a run, and decides how long the next one is
        for _ in range(_PASSES):
            # near the knee queues take long to forget: 1 / (1 - load)^2 requests
            batch = int(np.ceil(under_way + 1 / (1 - rate / knee) ** 2))
            counted = self._counted(batch, self.effort.batches)
            warm = max(2 * min(batch, counted), int(self.spec.warm_up * counted))
            # those under way at the end are not followed by others, and do not count
            size = warm + counted + int(np.ceil(under_way))
            if served is not None and size <= served.traffic.size:
                break
            served = self._part(self._run(self.spec.draw(size)), warm, counted, batch)
            under_way = served.in_system
        assert served is not None
        self._check_backlog(served, knee)
        return replace(served, offered_per_s=rate)

    def trace(self) -> ServingRun:
        """A trace, as long as it is; of one of many draws, its busiest part."""
        traffic = self.spec.draw()
        span = float(traffic.arrivals[-1] - traffic.arrivals[0])
        offered = (traffic.size - 1) / span if span > 0 else 0.0
        if offered:
            self._check_rate(offered, "traffic.speed", float(self.spec.speed))
        # a draw of errors has to be quick, and the busiest part is what decides limits
        if self.effort is COARSE:
            traffic = traffic.busiest(self.effort.most)
        served = self._run(traffic)
        # a short trace would count no requests else
        left_out = min(int(np.ceil(served.in_system)), traffic.size // 4)
        warm = max(left_out, int(self.spec.warm_up * traffic.size))
        counted = max(1, traffic.size - warm - left_out)
        # at least one request counts, whatever share warms up
        part = self._part(served, min(warm, traffic.size - counted), counted, max(1, left_out))
        return replace(part, offered_per_s=offered)

    def _counted(self, batch: int, batches: int) -> int:
        """Requests that count: enough for all batches, as far as these are not too many."""
        # twenty batches of a queue near its knee may be millions of requests
        wanted = min(batches * batch, max(self.effort.most, 2 * int(self.spec.concurrency)))
        return int(np.ceil(max(self.least, wanted)))

    def _run(self, traffic: Traffic) -> ServingRun:
        return run(self.deployment, traffic, seed=int(self.spec.seed), logged=self.logged)

    def _part(self, served: ServingRun, first: int, counted: int, batch: int) -> ServingRun:
        """The run with the requests that count, and whether they make batches of such a size."""
        batches = min(self.effort.batches, counted // max(1, batch))
        enough = batches >= min(_FEWEST, self.effort.batches)
        part = slice(first, first + counted)
        # two batches at least have a spread, which `enough` marks as too few
        return replace(served, counted=part, batches=max(2, batches), apart=batch, enough=enough)

    def _check_rate(self, offered: float, path: str, value: float) -> float:
        """The knee [requests/s]. Raises Overloaded where as many requests come, or more."""
        knee = knee_per_s(self.deployment, self.spec)
        if offered < knee:
            return knee
        tokens = float(self.spec.draw(_SAMPLE).outputs.mean())
        rule = (
            f"brings {offered:,.4g} requests/s ({offered * tokens:,.0f} tokens/s), more than the engines keep up with"
        )
        rule += f": {rounded_down(knee)} requests/s ({knee * tokens:,.0f} tokens/s) when they are always busy"
        # a knee of 0 is of an engine whose rate is too uncertain to have a lower end
        way = "use more GPUs" + (f", or at most {rounded_down(value * knee / offered)}" if knee > 0 else "")
        raise Overloaded(Problem(path, rule, value, way), knee)

    def _check_backlog(self, served: ServingRun, knee: float) -> None:
        """Raise Overloaded where requests under way grow from the end of one half of the arrivals to the other's."""
        arrivals, finish = (served.times(column) for column in (at.ARRIVAL, at.FINISH))
        ends = np.linspace(*served.window, 4 * _FEWEST + 1)
        middles = (ends[1:] + ends[:-1]) / 2
        # arrivals so far less departures so far
        present = np.searchsorted(np.sort(arrivals), middles) - np.searchsorted(np.sort(finish), middles)
        # the second and the last quarter: the first one fills up
        first, last = present[_FEWEST : 2 * _FEWEST], present[-_FEWEST:]
        grown = float(last.mean() - first.mean())
        comes = np.histogram(arrivals, ends)[0]
        between = float(comes.mean()) * 2 * _FEWEST  # arrivals and departures vary, in bursts more than by chance
        # variance of Poisson departures is their number; that of arrivals as much as they are dispersed
        error = (between * (1 + max(1.0, float(comes.var(ddof=1) / comes.mean())))) ** 0.5
        if grown > _GROWN * between and grown > _ERRORS * error:
            rule = (
                f"lets requests under way grow from {first.mean():,.0f} to {last.mean():,.0f} in half of the arrivals"
            )
            rate = float(self.spec.rate_per_s)
            raise Overloaded(
                Problem("traffic.rate_per_s", rule, rate, "use more GPUs, or a lower rate"), min(knee, rate)
            )


def knee_per_s(deployment: Deployment, spec: TrafficSpec) -> float:
    """Requests a second that engines serve when they always have work: the lower end of its 95 % interval.

    Engines that do both are alike, so one of them is simulated; the front end reads one request after the other.
    """
    alike = len(deployment.pools) == 1
    part = replace(deployment, pools=(replace(deployment.pools[0], engines=1),)) if alike else deployment
    traffic = spec.draw(_SAMPLE)
    # half as many again as the engines hold: none ever waits for a request
    loop = max(2, int(np.ceil(_QUEUED * sum(_resident_requests(part, traffic)))))
    counted = max(2 * loop, _FEWEST * _IN_BATCH)
    # two rounds warm up, and one is left at the end
    served = run(part, traffic.looped(loop, 3 * loop + counted), seed=int(spec.seed))
    served = replace(served, counted=slice(2 * loop, 2 * loop + counted))
    # the lower end: a rate between both ends might never become steady
    low, _ = mean_interval(served.rates(np.ones(served.traffic.size), _FEWEST))
    scheduler = deployment.pools[0].scheduler
    front = float(scheduler.request_s) + float(scheduler.token_s) * float(traffic.inputs.mean())
    rate = max(low, 0.0) * (deployment.pools[0].engines if alike else 1)
    # the front end is shared by all engines
    return min(rate, 1 / front if front > 0 else np.inf)


def _resident_requests(deployment: Deployment, traffic: Traffic) -> Iterator[float]:
    """Yield requests that the engines of each pool hold: as many sequences as they may have, or have pages for."""
    tokens = float((traffic.inputs + traffic.outputs).mean())
    limits = deployment.limits()
    for place, pool in enumerate(deployment.pools):
        # whole lengths: pages of a sequence at its end
        paged = int(limits[place, at.TOTAL]) * int(limits[place, at.PAGE]) / tokens
        yield pool.batches * min(float(limits[place, at.SEQUENCES]), max(1.0, paged))


def rounded_down(rate: float) -> str:
    """A rate in three digits, none above it: one that engines keep up with.

    >>> rounded_down(19.997), rounded_down(0.012349), rounded_down(1234.0), rounded_down(0.0)
    ('19.9', '0.0123', '1230', '0')
    """
    if rate <= 0:
        return "0"
    # down, as a rate above the knee would be refused when it is typed
    digit = 10.0 ** (np.floor(np.log10(rate)) - 2)
    return f"{np.floor(rate / digit) * digit:.6g}"
