"""GOLDYLOC (arXiv:2409.02227): concurrent independent GEMMs on one GPU, by kernels tuned for sharing it.

Sequential is degree 1 with the library's kernels. Default concurrency runs the whole queue at once with the same
kernels. GOLDYLOC runs globally optimised kernels at the degree that a predictor, trained on other shapes, picks from
the queue. The oracle knows the best degree. Averages over queues are geometric.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache, partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

from dse import plugins
from dse.errors import Problems
from dse.plots import Axis, Draw, FigureSheet, Frame, tables
from dse.results.claims import ClaimResult
from dse.results.run_folder import FinishedRun
from dse_papers.goldyloc.predictor import DegreePredictor, Floats, GemmQueue, score_choices
from simulators.costs.gemm.sharing import kernels
from simulators.hardware.machine import System
from simulators.hardware.schedule_system import ScheduleSystem
from simulators.workloads.operators import Gemm, Workload, workloads_of
from studies.plain import Plain, geometric_mean, largest_row

if TYPE_CHECKING:
    import pandas as pd

_KERNELS, _DEGREE = "schedule.kernels", "schedule.num_streams"
_NAMES = {"isolated": "kernels tuned alone", "shared": "kernels tuned for sharing", "best": "best kernels"}
_COPIES = 16  # as many as the largest degree
_LEARNED = 160  # queues of random shapes
_SIZES = ((32, 2048), (256, 8192), (256, 8192))  # ranges of random m, n and k, uniform in their logarithms
_SEED = 0
_WHOLE = 32.0  # sizes are multiples of it
_PRECISION = "fp16"
# share of the gain that counts as sufficient: the paper gives no number, ours by choice
_ENOUGH = 0.7
_CLEAR = 1.1  # speed-up beyond which a queue counts as gaining
_UNKNOWN = "which GEMMs the paper ran is unknown; ours are illustrative"
_NEEDS = (
    "needs isolated, shared and best kernels at degrees from 1 to 16, and scikit-learn "
    "(pip install 'overlap-dse[learning]')"
)


class Goldyloc(Plain):
    """Claims, speed-ups over degrees, the predictor and its regret."""

    columns = (
        "schedule.num_streams",
        "schedule.kernels",
    )

    def further(self, run: FinishedRun) -> Mapping[str, ClaimResult]:
        """Findings of every claim, with GOLDYLOC at the degrees that its predictor picks."""
        queue_run = _load_run(run)
        if queue_run is None:
            absent = ClaimResult(None, _NEEDS)
            return dict.fromkeys((claim.id for claim in self.claims()), absent)
        return {**_speedups(queue_run), **_kernels(queue_run, run)}

    def figures(self, table: pd.DataFrame, timelines: pd.DataFrame) -> Iterator[tuple[str, Draw]]:
        """Speed-ups over sequential by degree, and the best of every queue."""
        ok = table[table["status"] == "ok"]
        if not {_KERNELS, _DEGREE} <= set(ok) or ok[_DEGREE].nunique() < 2:
            return
        ok = ok.assign(**{_KERNELS: ok[_KERNELS].astype(str).map(_NAMES).fillna(ok[_KERNELS])})
        yield "degrees", partial(_degrees, ok)
        yield "queues", partial(_queues_figure, ok)

    def extras(self, run: FinishedRun) -> Iterator[tuple[str, Any]]:
        """Picks of the predictor for each queue, and their scores."""
        queue_run = _load_run(run)
        if queue_run is not None:
            yield "predictor", {**queue_run.judged, "learned_on": _LEARNED, "judged_on": len(queue_run.names)}
            yield "choices", queue_run.choices


# 1 is one after the other: values below it lose
_SPEEDUP = Axis("speedup", "speed-up over one after the other [x]", centre=1.0)


def _degrees(ok: pd.DataFrame) -> FigureSheet:
    """Mean and least speed-up over the number of GEMMs at once."""
    import pandas as pd

    groups = ok.groupby([_KERNELS, _DEGREE], sort=False)["speedup"]
    mean, least = groups.agg(geometric_mean).reset_index(), groups.min().reset_index()
    rows = [mean.assign(panel="geometric mean over queues"), least.assign(panel="the queue that gains least")]
    best = largest_row(mean, "speedup")
    title = f"{best[_DEGREE]:.0f} GEMMs at once by {best[_KERNELS]} gain {best['speedup']:.2f}x in the geometric mean"
    at_once = Axis(_DEGREE, "GEMMs at once")
    return tables.curves(pd.concat(rows), at_once, y=_SPEEDUP, by=_KERNELS, frame=Frame(title, panel="panel"))


def _queues_figure(ok: pd.DataFrame) -> FigureSheet:
    """Best speed-up of every queue by kernels, ranked."""
    best = ok.groupby(["scenario", _KERNELS], sort=False)["speedup"].max().reset_index()
    gains = best.groupby("scenario")["speedup"].max()
    title = f"{int((gains > _CLEAR).sum())} of {len(gains)} queues gain more than {100 * (_CLEAR - 1):.0f} %"
    title += f", at most {gains.max():.2f}x"
    frame = Frame(title, "each queue by each set of kernels, at its best number of GEMMs at once")
    return tables.dots(best, _SPEEDUP, row="scenario", by=_KERNELS, frame=frame)


class _Run:
    """Times [Q, D] of a run's queues by kernels, and the picks of a predictor that was not trained on them."""

    def __init__(self, seconds: Mapping[str, pd.DataFrame], gpu_queues: tuple[System, Mapping[str, GemmQueue]]) -> None:
        self.system, queues = gpu_queues
        self.names = list(seconds["shared"].index)
        self.degrees = [int(degree) for degree in seconds["shared"].columns.tolist()]
        self.seconds = {name: rows.to_numpy(float) for name, rows in seconds.items()}
        self.sequential = self.seconds["isolated"][:, self.degrees.index(1)]
        self.default = self.seconds["isolated"][:, -1]  # the largest degree: the whole queue at once
        predictor = _train_predictor(self.system, self.degrees)
        features = np.stack([queues[name].features(self.system.gpu) for name in self.names])
        self.places = predictor.choose(features)
        self.judged = score_choices(self.seconds["shared"], self.sequential, self.places)

    @classmethod
    def of(cls, run: FinishedRun) -> _Run | None:
        """From a finished run; None where that lacks what `_NEEDS` says, or the system is not one GPU."""
        if find_spec("sklearn") is None:
            return None
        table = run.outputs.read_table("results")
        ok = table[table["status"] == "ok"]
        if not {_KERNELS, _DEGREE} <= set(ok):
            return None
        pivot = ok.pivot_table(index="scenario", columns=[_KERNELS, _DEGREE], values="makespan_s", observed=True)
        names = [str(name) for name in pivot.columns.get_level_values(0).unique()]
        # each queue needs all kernels at all degrees
        if set(names) != {"isolated", "shared", "best"} or pivot.isna().any(axis=None):
            return None
        seconds = {name: pivot.loc[:, [name]].droplevel(0, axis=1) for name in names}
        if not {1, _COPIES} <= set(seconds["shared"].columns):
            return None
        system = ScheduleSystem.model_validate(run.config["system"])
        return cls(seconds, (system, _queues(run.config["workload"])))

    @property
    def goldyloc(self) -> Floats:
        """Times [Q] at the picked degrees."""
        return np.asarray(self.seconds["shared"][np.arange(len(self.places)), self.places])

    @property
    def choices(self) -> pd.DataFrame:
        """Table of picked and best degrees, a row for each queue."""
        import pandas as pd

        best = self.seconds["shared"].argmin(axis=1)
        picked = [self.degrees[place] for place in self.places]
        rows = {"queue": self.names, "picked": picked, "best": [self.degrees[place] for place in best]}
        rows |= {"regret": self.goldyloc / self.seconds["shared"].min(axis=1) - 1}
        times = {"sequential_s": self.sequential, "default_s": self.default, "goldyloc_s": self.goldyloc}
        return pd.DataFrame({**rows, **times})


# claims and tables ask for the same run: its predictor is trained once
@lru_cache(maxsize=1)
def _load_run(run: FinishedRun) -> _Run | None:
    """Cached `_Run.of` of the latest run."""
    return _Run.of(run)


def _queues(tree: Mapping[str, Any]) -> dict[str, GemmQueue]:
    """Queues of a workload by name."""
    queues = {}
    for name, workload in workloads_of(Problems(), tree).items():
        gemms = [Gemm.model_validate(op) for op in workload["operators"].values()]
        shapes = np.array([(op.m, op.n, op.k) for op in gemms], float)
        queues[name] = GemmQueue(shapes, gemms[0].precision)
    return queues


def _train_predictor(system: System, degrees: list[int]) -> DegreePredictor:
    """Train a predictor on queues of random shapes, simulated by the same engine."""
    random = np.random.default_rng(_SEED)
    low, high = np.log2(np.array(_SIZES, float)).T
    sizes = 2 ** random.uniform(low, high, (_LEARNED, 3))  # uniform in logarithms
    shapes = np.maximum(_WHOLE, np.round(sizes / _WHOLE) * _WHOLE)
    seconds = [_alike(system, degree, shapes) for degree in degrees]
    features = [GemmQueue(np.repeat(shape[None], _COPIES, axis=0), _PRECISION).features(system.gpu) for shape in shapes]
    return DegreePredictor.learn(np.stack(features), np.stack(seconds, axis=1), degrees)


def _alike(system: System, degree: int, shapes: Floats) -> Floats:
    """Times [Q] of queues of equal GEMMs [Q, 3] by globally optimised kernels, as one batch."""
    gemm = Gemm(m=1, n=1, k=1, precision=_PRECISION).model_copy(update=dict(zip("mnk", shapes.T, strict=True)))
    operators = {f"g{index:02d}": gemm for index in range(_COPIES)}
    # shapes are arrays here, which a validated operator would refuse
    workload = Workload(name="drawn", operators={}).model_copy(update={"operators": operators})
    schedule = plugins.load("schedule", "streams")
    knobs = schedule(name="drawn", family="streams", kernels="shared", num_streams=degree)
    engine = plugins.load("engine", "fluid")
    return np.asarray(engine.totals(knobs.lower(system, workload)).makespan_s)  # all queues in one batch


# Claims


def _speedups(run: _Run) -> dict[str, ClaimResult]:
    over, beside = run.sequential / run.goldyloc, run.default / run.goldyloc
    default = run.sequential / run.default
    note = f"at the degree that is picked, {len(run.names)} queues"
    losing = [name for name, ratio in zip(run.names, default, strict=True) if ratio < 1]
    worst = run.judged["worst_against_sequential"]
    text = f"all {run.degrees[-1]} at once: {len(losing)} of {len(run.names)} queues lose, {_least(run, default)}"
    return {
        "goldyloc.vs_sequential": ClaimResult(100 * (geometric_mean(over) - 1), note, _UNKNOWN),
        "goldyloc.vs_sequential_max": ClaimResult(float(over.max()), _most(run, over), _UNKNOWN),
        "goldyloc.vs_default": ClaimResult(100 * (geometric_mean(beside) - 1), note, _UNKNOWN),
        "goldyloc.vs_default_max": ClaimResult(float(beside.max()), _most(run, beside), _UNKNOWN),
        "goldyloc.default_vs_sequential": ClaimResult(
            100 * (geometric_mean(default) - 1), f"all at once; {note}", _UNKNOWN
        ),
        "goldyloc.default_can_lose": ClaimResult(bool(losing and geometric_mean(default) > 1), text),
        "goldyloc.never_worse": ClaimResult(bool(worst <= 1.05), f"at most {worst:.3f} of the sequential time"),
    }


def _most(run: _Run, ratio: Floats) -> str:
    return f"of {run.names[int(ratio.argmax())]}"


def _least(run: _Run, ratio: Floats) -> str:
    return f"{run.names[int(ratio.argmin())]} most, {ratio.min():.2f}x"


def _kernels(run: _Run, finished: FinishedRun) -> dict[str, ClaimResult]:
    """Findings on kernels: the best ones differ under concurrency; those tuned for a half and a quarter suffice."""
    gpu, names = run.system.gpu, []
    for name, queue in _queues(finished.config["workload"]).items():
        m, n, k = queue.shapes[0]
        every = kernels(gpu, (m, n, k), precision=queue.precision, degree=_COPIES)
        alone = kernels(gpu, (m, n, k), precision=queue.precision).seconds(gpu)
        # kernels are compared at _COPIES at once: the winner alone may lose there
        together = every.together(gpu, _COPIES)
        if together[int(alone.argmin())] > 1.001 * together.min():  # rounding
            names.append(name)
    gains = {}
    for degree in (2, 4, 8, 16):
        if degree in run.degrees:
            place = run.degrees.index(degree)
            default, shared, best = (run.seconds[kind][:, place] for kind in ("isolated", "shared", "best"))
            # shares of a ratio are shares of its logarithm
            gains[degree] = np.log(geometric_mean(default / shared)) / np.log(geometric_mean(default / best))
    shares = ", ".join(f"{100 * gain:.0f} % at {degree}" for degree, gain in gains.items())
    cause = "small GEMMs want tiles under concurrency that are too large for a quarter of this GPU, too"
    enough = f"of the gain that the best of all tiles gives (a yes needs {100 * _ENOUGH:.0f} %): {shares}"
    first = f"the first GEMM of {len(names)} of {len(run.names)} queues has a faster tile at {_COPIES} at once"
    return {
        "goldyloc.isolated_not_concurrent": ClaimResult(bool(names), first),
        # at every degree
        "goldyloc.half_quarter_suffice": ClaimResult(bool(min(gains.values()) >= _ENOUGH), enough, cause),
    }


STUDY = Goldyloc()
