"""GOLDYLOC's run-time logic (arXiv:2409.02227): which of the GEMMs that are ready run now, and by which kernels.

Whenever a GEMM arrives or ends, the logic looks at those that run and those that are ready, predicts the degree of
concurrency that suits them, and launches as many as are missing by kernels tuned for that degree; the others wait. Its
decisions take time, one after another. A kernel that runs is not changed.

sequential  one GEMM at a time, by the library's kernels           static    a fixed degree, by kernels tuned for it
default     whatever is ready, by the library's kernels            dynamic   the predicted degree, by kernels for it
oracle      dynamic with the future: at each decision, every degree is tried to the end, and the best is taken
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from dse.values import Frozen, Memo
from dse.values.units import Integer, Seconds
from dse_workgroups.arrivals import Arrivals
from dse_workgroups.kernel_library import DEGREES, kernel_of, rates_of
from dse_workgroups.slots import Kernels, Rates, SlotState, advance
from simulators.costs.gemm.sharing import Choice, chosen
from simulators.hardware.machine import Gpu

Floats = NDArray[np.float64]
_LEARNED = 160  # queues of random shapes
_SIZES = ((32, 2048), (256, 8192), (256, 8192))  # ranges of their m, n and k, uniform in their logarithms
_WHOLE = 32.0  # sizes are multiples of it
_SEED = 0
_NEAR = 1.02  # ratio of times up to which a degree is as good as the best


class Logic(Frozen):
    """How GEMMs are chosen. degree: of `static`. decision_s: time of a decision of `dynamic` and `oracle`."""

    name: str
    description: str = ""
    policy: Literal["sequential", "default", "static", "dynamic", "oracle"]
    degree: Annotated[Integer, Field(ge=1, le=16)] | None = None
    decision_s: Seconds = 0.0

    @property
    def kernels(self) -> Choice:
        """Names of the kernels that are launched."""
        return "isolated" if self.policy in ("sequential", "default") else "shared"


@dataclass(frozen=True)
class Outcome:
    """When GEMMs arrived, began and were done [J] in seconds; degrees that were decided, in order."""

    arrived_s: Floats
    begun_s: Floats
    done_s: Floats
    degrees: tuple[int, ...]

    @property
    def makespan_s(self) -> float:
        """From the first arrival to the last end."""
        return float(self.done_s.max() - self.arrived_s.min())

    @property
    def turnaround_s(self) -> float:
        """Mean time from arrival to end."""
        return float((self.done_s - self.arrived_s).mean())


_GPUS = dict[str, Gpu]()


def serve(gpu: Gpu, arrivals: Arrivals, logic: Logic) -> Outcome:
    """Run GEMMs as they arrive."""
    # equal GPUs are one object, by which kernels and the trained logic are kept
    dispatcher = Dispatcher.of(_GPUS.setdefault(gpu.model_dump_json(), gpu), arrivals, logic)
    while not dispatcher.over:
        dispatcher.step()
    return dispatcher.outcome


def mean_alone_s(gpu: Gpu, arrivals: Arrivals) -> float:
    """Mean time [s] of a GEMM alone, launch included."""
    m, n, k = arrivals.shapes.T
    return float(np.mean(chosen(gpu, (m, n, k), precision=arrivals.precision).seconds(gpu)) + gpu.kernel_launch_s)


@dataclass
class Dispatcher:
    """GEMMs that run, are ready, or wait for others, with what decides between them."""

    gpu: Gpu
    arrivals: Arrivals
    logic: Logic
    rates: Rates
    kernels: Kernels
    state: SlotState
    arrived_s: Floats
    begun_s: Floats
    degrees: tuple[int, ...] = ()
    free_s: float = 0.0  # when the logic is done with its last decision
    forced: int | None = None

    @classmethod
    def of(cls, gpu: Gpu, arrivals: Arrivals, logic: Logic) -> Dispatcher:
        """An idle GPU, and all that will arrive."""
        jobs = len(arrivals.shapes)
        # gaps are relative to GEMMs of this GPU, traces are in seconds
        scale = 1.0 if arrivals.timed else mean_alone_s(gpu, arrivals)
        # NaN: not begun
        empty = np.full(jobs, np.nan)
        kernels, state = Kernels.of(jobs, max(DEGREES)), SlotState.idle(jobs, int(gpu.num_cus))
        return cls(gpu, arrivals, logic, rates_of(gpu), kernels, state, arrivals.times * scale, empty)

    @property
    def now(self) -> float:
        """Time [s]."""
        return float(self.state.clock[0])

    @property
    def over(self) -> bool:
        """True if all GEMMs are done."""
        return bool(np.isfinite(self.state.done).all())

    @property
    def outcome(self) -> Outcome:
        """What happened."""
        done = np.array(self.state.done)
        # a GEMM may run once its predecessors are done, however early it arrived
        arrived = np.array(
            [max([time, *done[list(after)]]) for time, after in zip(self.arrived_s, self.arrivals.after, strict=True)]
        )
        return Outcome(arrived, self.begun_s, done, self.degrees)

    def ready(self) -> list[int]:
        """GEMMs that have arrived, whose predecessors are done, and that are not launched, in order of arrival."""
        done = self.state.done <= self.now
        waiting = np.flatnonzero(np.isnan(self.begun_s) & (self.arrived_s <= self.now))
        ready = [int(job) for job in waiting if all(done[number] for number in self.arrivals.after[job])]
        # by number at equal times, so that runs are deterministic
        return sorted(ready, key=lambda job: (self.arrived_s[job], job))

    def step(self) -> None:
        """Decide, launch, and go on to the next arrival or end."""
        self._launch(self.ready())
        # GEMMs that have arrived and wait are served by the next end, and need no event
        later = self.arrived_s[(self.arrived_s > self.now) & np.isnan(self.begun_s)]
        advance(self.kernels, self.rates, self.state, float(later.min()) if len(later) else np.inf)

    def _launch(self, ready: list[int]) -> None:
        running = [int(job) for job in self.state.live[: self.state.launched[0]]]
        if not ready:
            return
        degree = self._degree(running, ready)
        # those that run stay: a smaller degree only launches nothing
        chosen_now = ready[: max(0, degree - len(running))]
        begin = self.now
        if self.logic.policy in ("dynamic", "oracle"):
            self.degrees = (*self.degrees, degree)
            # the command processor decides one thing after another
            self.free_s = max(self.free_s, self.now) + float(self.logic.decision_s)
            begin = self.free_s
        for job in chosen_now:
            # tuned for as many as can be at once, which may be fewer than the degree
            self._put(job, min(degree, len(running) + len(ready)))
            self.begun_s[job] = begin
            self.state.launch(self.kernels, job, begin + float(self.gpu.kernel_launch_s))

    def _degree(self, running: list[int], ready: list[int]) -> int:
        policy = self.logic.policy
        if policy == "sequential":
            return 1
        if policy == "default":
            # kernels that share a GPU are modelled for up to the largest degree
            return min(max(DEGREES), len(running) + len(ready))
        if policy == "static":
            return int(self.logic.degree or 1)
        # a fork of the oracle: the degree that it tries
        if self.forced is not None:
            return self.forced
        jobs = [*running, *ready]
        return self._look_ahead(len(jobs)) if policy == "oracle" else self._predict(jobs)

    def _predict(self, jobs: list[int]) -> int:
        """Degree that the trained logic chooses for some GEMMs."""
        shapes, precision = self.arrivals.shapes[jobs[: max(DEGREES)]], self.arrivals.precision
        return trained(self.gpu, precision).degree(features(self.gpu, shapes, precision))

    def _look_ahead(self, at_hand: int) -> int:
        """Degree now with which all is over soonest, if the trained logic decides what follows.

        at_hand: GEMMs that run or are ready; larger degrees make no difference.
        """
        # the first degree that takes all at hand: any larger one launches the same
        enough = next(number for number in DEGREES if number >= min(at_hand, max(DEGREES)))
        return min((number for number in DEGREES if number <= enough), key=self._makespan_with)

    def _makespan_with(self, degree: int) -> float:
        # a copy of all that changes; only arrays that are written are copied
        fork = replace(
            self,
            logic=self.logic.model_copy(update={"policy": "dynamic"}),
            state=self.state.copy(),
            kernels=Kernels(*(column.copy() for column in self.kernels)),
            begun_s=self.begun_s.copy(),
            forced=degree,
        )
        # one step with the degree that is tried, then the trained logic
        fork.step()
        fork.forced = None
        while not fork.over:
            fork.step()
        return fork.outcome.makespan_s

    def _put(self, job: int, degree: int) -> None:
        """Set the kernel of a GEMM as one of so many at once."""
        # kernels are kept for powers of two: the next one above is used
        tuned = min((number for number in DEGREES if number >= degree), default=max(DEGREES))
        row = kernel_of(self.gpu, tuple(self.arrivals.shapes[job]), self.arrivals.precision, tuned, self.logic.kernels)
        for column, value in zip(self.kernels, row, strict=True):
            column[job] = value


@dataclass(frozen=True)
class TrainedLogic:
    """A logistic regression as the command processor would have it: sums of products of standardised features.

    centre, spread [F]; powers [T, F] and weights [T] of the products; offset.
    """

    centre: Floats
    spread: Floats
    powers: Floats
    weights: Floats
    offset: float

    @classmethod
    def fit(cls, queues: Floats, seconds: Floats) -> TrainedLogic:
        """Fit to features [Q, D, F] of queues and their times [Q, D] at each degree."""
        from sklearn.linear_model import LogisticRegression
        from sklearn.preprocessing import PolynomialFeatures, StandardScaler

        near = seconds <= _NEAR * seconds.min(axis=1, keepdims=True)
        scale, products = StandardScaler(), PolynomialFeatures(2)
        terms = products.fit_transform(scale.fit_transform(queues.reshape(-1, queues.shape[-1])))
        # a weak penalty: hundreds of queues, and squares of a few features
        model = LogisticRegression(C=10.0, max_iter=5000).fit(terms, near.reshape(-1))
        return cls(
            scale.mean_, scale.scale_, products.powers_.astype(float), model.coef_[0], float(model.intercept_[0])
        )

    @property
    def products(self) -> int:
        """Products that a decision sums."""
        return len(DEGREES) * len(self.weights)

    def near_best(self, queue: Floats) -> Floats:
        """Probability [D] that each degree is near the best one for a queue of features [D, F]."""
        # products of up to two features, as exponents: [D, T]
        terms = np.prod(((queue - self.centre) / self.spread)[:, None, :] ** self.powers, axis=2)
        return np.asarray(1 / (1 + np.exp(-(terms @ self.weights + self.offset))))

    def degree(self, queue: Floats) -> int:
        """The degree that is most probably near the best."""
        return DEGREES[int(np.argmax(self.near_best(queue)))]


_TRAINED, _FEATURES = Memo[TrainedLogic](16), Memo[Floats](4096)


def features(gpu: Gpu, shapes: Floats, precision: str) -> Floats:
    """Features [D, F] of GEMMs [Q, 3] at each degree, from what the kernel library knows of the kernel tuned for it:
    means over the queue of the logarithms of waves, times on CUs, LLC and HBM, and occupancy; and of Q and the degree.
    """
    rows = [_features(gpu, tuple(shape), precision) for shape in shapes]
    queue = np.full((len(DEGREES), 1), np.log2(len(shapes)))
    # logarithms: times range over orders of magnitude, and their products become sums
    return np.column_stack([np.mean(rows, axis=0), queue, np.log2(DEGREES)])


def _features(gpu: Gpu, shape: tuple[float, ...], precision: str) -> Floats:
    """Features [D, F] of one GEMM."""
    return _FEATURES.get(lambda: _measured_rates(gpu, shape, precision), gpu, key=(shape, precision))


def _measured_rates(gpu: Gpu, shape: tuple[float, ...], precision: str) -> Floats:
    rates, rows = rates_of(gpu), []
    for degree in DEGREES:
        count, work, share, llc, hbm = kernel_of(gpu, shape, precision, degree, "shared")
        on_cus = count * work / gpu.num_cus
        # of all copies, if each takes its share of the CUs
        waves = count * share * degree / gpu.num_cus
        # what the LLC, the HBM and occupancy would hold up, over the time on CUs
        ratios = (count * llc / rates.llc / on_cus, count * hbm[degree] / rates.hbm / on_cus, 1 / share)
        rows.append((waves, on_cus / gpu.kernel_launch_s, *ratios))
    return np.asarray(np.log2(np.array(rows, float)))


def trained(gpu: Gpu, precision: str) -> TrainedLogic:
    """The logic of a GPU: trained on random queues that are complete at the start, as it runs them."""
    return _TRAINED.get(lambda: _train(gpu, precision), gpu, key=precision)


def _train(gpu: Gpu, precision: str) -> TrainedLogic:
    random = np.random.default_rng(_SEED)
    low, high = np.log2(np.array(_SIZES, float)).T
    queues, seconds = [], []
    # training queues are drawn apart from the studied ones: the logic never sees those
    for _ in range(_LEARNED):
        # one to three kinds of GEMMs, as layers of a network repeat
        # uniform in the logarithm: sizes of layers differ by factors
        kinds = 2 ** random.uniform(low, high, (int(random.integers(1, 4)), 3))
        shapes = np.maximum(_WHOLE, np.round(kinds / _WHOLE) * _WHOLE)
        queue = shapes[random.integers(len(shapes), size=int(random.integers(1, max(DEGREES) + 1)))]
        # all are there at once: the logic learns what is best, not when to wait
        waits = Arrivals(queue, np.zeros(len(queue)), ((),) * len(queue), precision, True)
        queues.append(features(gpu, queue, precision))
        # every fixed degree is run: the logic learns which are near the best
        seconds.append([_static(gpu, waits, degree).makespan_s for degree in DEGREES])
    return TrainedLogic.fit(np.stack(queues), np.array(seconds))


def _static(gpu: Gpu, arrivals: Arrivals, degree: int) -> Outcome:
    return serve(gpu, arrivals, Logic(name="static", policy="static", degree=degree))
