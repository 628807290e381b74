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
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from dse.values import Frozen, Memo
from dse.values.units import Integer, Seconds
from dse_workgroups.arrivals import Arrivals
from dse_workgroups.slots import Kernels, Rates, SlotState, advance
from simulators.costs.gemm.sharing import Choice, SharedGemms, chosen
from simulators.costs.gemm.waves import WaveGemms
from simulators.hardware.machine import Gpu
from simulators.hardware.parts import ELEMENT_BYTES
from studies.goldyloc.predictor import DegreePredictor, GemmQueue

Floats = NDArray[np.float64]
DEGREES = (1, 2, 4, 8, 16)
_LEARNED = 120  # queues of random shapes
_SIZES = ((32, 1024), (256, 8192), (256, 4096))  # ranges of their m, n and k, uniform in their logarithms
_WHOLE = 32.0  # sizes are multiples of it
_SEED = 0


class Logic(Frozen):
    """How GEMMs are chosen. degree: of `static`. decision_s: time of a decision of `dynamic` and `oracle`."""

    name: str
    description: str = ""
    policy: Literal["sequential", "default", "static", "dynamic", "oracle"]
    degree: Annotated[Integer, Field(ge=1, le=16)] | None = None
    decision_s: Seconds = 0.0

    @property
    def kernels(self) -> Choice:
        """Which kernels are launched."""
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
        library, llc, jobs = gpu.gemm, gpu.llc, len(arrivals.shapes)
        assert llc is not None and llc.bytes_per_s is not None and library.half_occupancy is not None
        rates = Rates(float(library.half_occupancy), float(llc.bytes_per_s), float(gpu.hbm_bytes_per_s))
        scale = 1.0 if arrivals.timed else mean_alone_s(gpu, arrivals)
        empty = np.full(jobs, np.nan)
        kernels, state = Kernels.of(jobs, max(DEGREES)), SlotState.idle(jobs, int(gpu.num_cus))
        return cls(gpu, arrivals, logic, rates, kernels, state, arrivals.times * scale, empty)

    @property
    def now(self) -> float:
        """Time [s]."""
        return float(self.state.clock[0])

    @property
    def over(self) -> bool:
        """Whether all GEMMs are done."""
        return bool(np.isfinite(self.state.done).all())

    @property
    def outcome(self) -> Outcome:
        """What happened."""
        done = np.array(self.state.done)
        arrived = np.array(
            [max([time, *done[list(after)]]) for time, after in zip(self.arrived_s, self.arrivals.after, strict=True)]
        )
        return Outcome(arrived, self.begun_s, done, self.degrees)

    def ready(self) -> list[int]:
        """GEMMs that have arrived, whose predecessors are done, and that are not launched, in order of arrival."""
        done = self.state.done <= self.now
        waiting = np.flatnonzero(np.isnan(self.begun_s) & (self.arrived_s <= self.now))
        ready = [int(job) for job in waiting if all(done[each] for each in self.arrivals.after[job])]
        return sorted(ready, key=lambda job: (self.arrived_s[job], job))

    def step(self) -> None:
        """Decide, launch, and go on to the next arrival or end."""
        self._launch(self.ready())
        later = self.arrived_s[(self.arrived_s > self.now) & np.isnan(self.begun_s)]
        advance(self.kernels, self.rates, self.state, float(later.min()) if len(later) else np.inf)

    def _launch(self, ready: list[int]) -> None:
        running = [int(job) for job in self.state.live[: self.state.launched[0]]]
        if not ready:
            return
        degree = self._degree(running, ready)
        chosen_now = ready[: max(0, degree - len(running))]
        begin = self.now
        if self.logic.policy in ("dynamic", "oracle"):
            self.degrees = (*self.degrees, degree)
            self.free_s = max(self.free_s, self.now) + float(self.logic.decision_s)
            begin = self.free_s
        for job in chosen_now:
            self._put(job, min(degree, len(running) + len(ready)))
            self.begun_s[job] = begin
            self.state.launch(self.kernels, job, begin + float(self.gpu.kernel_launch_s))

    def _degree(self, running: list[int], ready: list[int]) -> int:
        policy = self.logic.policy
        if policy == "sequential":
            return 1
        if policy == "default":
            return min(max(DEGREES), len(running) + len(ready))
        if policy == "static":
            return int(self.logic.degree or 1)
        if self.forced is not None:
            return self.forced
        jobs = [*running, *ready]
        return self._look_ahead(len(jobs)) if policy == "oracle" else self._predict(jobs)

    def _predict(self, jobs: list[int]) -> int:
        """Degree that the trained logic chooses for some GEMMs."""
        rows = [features_of(self.gpu, tuple(self.arrivals.shapes[job]), self.arrivals.precision) for job in jobs]
        return trained(self.gpu, self.arrivals.precision).degree(np.stack(rows[: max(DEGREES)]))

    def _look_ahead(self, at_hand: int) -> int:
        """Degree now with which all is over soonest, if the trained logic decides what follows.

        at_hand: GEMMs that run or are ready; larger degrees make no difference.
        """
        enough = next(each for each in DEGREES if each >= min(at_hand, max(DEGREES)))
        return min((each for each in DEGREES if each <= enough), key=self._makespan_with)

    def _makespan_with(self, degree: int) -> float:
        fork = replace(
            self,
            logic=self.logic.model_copy(update={"policy": "dynamic"}),
            state=self.state.copy(),
            kernels=Kernels(*(column.copy() for column in self.kernels)),
            begun_s=self.begun_s.copy(),
            forced=degree,
        )
        fork.step()
        fork.forced = None
        while not fork.over:
            fork.step()
        return fork.outcome.makespan_s

    def _put(self, job: int, degree: int) -> None:
        """Set the kernel of a GEMM as one of so many at once."""
        tuned = min((each for each in DEGREES if each >= degree), default=max(DEGREES))
        row = kernel_of(self.gpu, tuple(self.arrivals.shapes[job]), self.arrivals.precision, tuned, self.logic.kernels)
        for column, value in zip(self.kernels, row, strict=True):
            column[job] = value


@dataclass(frozen=True)
class TrainedLogic:
    """A logistic regression as the command processor would have it: sums of products of standardised features.

    centre, spread [F + 1]; powers [T, F + 1] and weights [T] of the products; offset.
    """

    centre: Floats
    spread: Floats
    powers: Floats
    weights: Floats
    offset: float

    @classmethod
    def of(cls, predictor: DegreePredictor) -> TrainedLogic:
        """Take the numbers out of a trained predictor."""
        scale, products, model = (step for _, step in predictor.model.steps)
        weights, offset = model.coef_[0], float(model.intercept_[0])
        return cls(scale.mean_, scale.scale_, products.powers_.astype(float), weights, offset)

    @property
    def products(self) -> int:
        """Products that a decision sums."""
        return len(DEGREES) * len(self.weights)

    def near_best(self, rows: Floats) -> Floats:
        """Probability [D] that each degree is near the best one for GEMMs of features [Q, F]."""
        queue = np.append(rows.mean(axis=0), np.log2(len(rows)))
        pairs = np.column_stack([np.tile(queue, (len(DEGREES), 1)), np.log2(DEGREES)])
        terms = np.prod(((pairs - self.centre) / self.spread)[:, None, :] ** self.powers, axis=2)
        return np.asarray(1 / (1 + np.exp(-(terms @ self.weights + self.offset))))

    def degree(self, rows: Floats) -> int:
        """The largest degree that is near the best more probably than not, so that nothing waits without a reason; the
        most probable one where none is.
        """
        near = self.near_best(rows)
        return max(
            (each for each, share in zip(DEGREES, near, strict=True) if share >= 0.5),
            default=DEGREES[int(np.argmax(near))],
        )


_KERNELS, _TRAINED, _FEATURES = Memo[Any](4096), Memo[TrainedLogic](16), Memo[Floats](4096)


def features_of(gpu: Gpu, shape: tuple[float, ...], precision: str) -> Floats:
    """Features [F] of one GEMM, known before anything runs; those of a queue are their means."""
    single = GemmQueue(np.array([shape], float), precision)
    return _FEATURES.get(lambda: single.features(gpu)[:-1], gpu, key=(shape, precision))


def kernel_of(gpu: Gpu, shape: tuple[float, ...], precision: str, degree: int, choice: Choice) -> tuple[Any, ...]:
    """Columns of `slots.Kernels` for a GEMM of (m, n, k), by the kernel that is chosen for a degree."""
    place = (shape, precision, degree, choice)
    columns: tuple[Any, ...] = _KERNELS.get(lambda: _kernel(gpu, shape, precision, degree, choice), gpu, key=place)
    return columns


def _kernel(gpu: Gpu, shape: tuple[float, ...], precision: str, degree: int, choice: Choice) -> tuple[Any, ...]:
    m, n, k = shape
    kernel = chosen(gpu, (m, n, k), precision=precision, degree=degree, choice=choice)
    count = float(kernel.workgroups)
    at_once = np.arange(max(DEGREES) + 1).clip(1)
    hbm = _hbm_bytes(gpu, (m, n, k), precision, kernel, at_once) / count
    tile = (int(kernel.rows), int(kernel.cols))
    efficiency = next(each.efficiency for each in gpu.gemm.tiles if (each.rows, each.cols) == tile)
    rate = float(np.asarray(WaveGemms.of(gpu, precision).flop_per_s_per_cu, float)) * float(efficiency)
    work = 2 * float(kernel.rows) * float(kernel.cols) * k / rate
    return count, work, 1 / float(kernel.occupancy), float(kernel.llc_bytes) / count, hbm


def _hbm_bytes(
    gpu: Gpu, shape: tuple[float, float, float], precision: str, kernel: SharedGemms, at_once: Any
) -> Floats:
    """HBM traffic [bytes] of a kernel by how many share the LLC (`simulators.costs.gemm.sharing`)."""
    m, n, k = shape
    operands = ELEMENT_BYTES[precision] * np.array([m * k, k * n, m * n])
    assert gpu.llc is not None
    small = operands[:2].min()
    hits = np.minimum(1.0, float(gpu.llc.bytes) / at_once / (small + 0.25 * operands[2]))
    waves = np.ceil(kernel.workgroups * at_once / (gpu.num_cus * kernel.occupancy))
    return np.asarray(operands.sum() + (waves - 1) * small * (1 - hits))


def trained(gpu: Gpu, precision: str) -> TrainedLogic:
    """The logic of a GPU: trained on random queues that are complete at the start, as it runs them."""
    return _TRAINED.get(lambda: _train(gpu, precision), gpu, key=precision)


def _train(gpu: Gpu, precision: str) -> TrainedLogic:
    random = np.random.default_rng(_SEED)
    low, high = np.log2(np.array(_SIZES, float)).T
    features, seconds = [], []
    for _ in range(_LEARNED):
        kinds = 2 ** random.uniform(low, high, (int(random.integers(1, 4)), 3))
        shapes = np.maximum(_WHOLE, np.round(kinds / _WHOLE) * _WHOLE)
        queue = shapes[random.integers(len(shapes), size=int(random.integers(1, max(DEGREES) + 1)))]
        waits = Arrivals(queue, np.zeros(len(queue)), ((),) * len(queue), precision, True)
        features.append(GemmQueue(queue, precision).features(gpu))
        seconds.append([_static(gpu, waits, degree).makespan_s for degree in DEGREES])
    return TrainedLogic.of(DegreePredictor.learn(np.stack(features), np.array(seconds), DEGREES))


def _static(gpu: Gpu, arrivals: Arrivals, degree: int) -> Outcome:
    return serve(gpu, arrivals, Logic(name="static", policy="static", degree=degree))
