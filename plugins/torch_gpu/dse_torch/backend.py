"""A GPU as the judge: kernels that PyTorch runs on this machine, measured, as points like any other.

A design is one kernel: a GEMM, a copy, both at once on two streams, or a collective where there are several GPUs. The
kernels of a batch are timed in turns (interleaved), so that a clock that drifts meets all of them alike. A point whose
times scatter or drift is `failed`: somebody else uses the GPU, or it throttles.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import BaseModel, Field, model_validator

from dse.backend import Backend, Batch, Metric, Result, Results, Tree
from dse.errors import Problem, Problems, did_you_mean, validate_as
from dse.values import Frozen, knob
from dse.values.units import Bytes, Integer, Number
from dse_torch.kernels import (
    COLLECTIVES,
    Absent,
    Copy,
    Floats,
    Gemm,
    Machine,
    OutOfMemory,
    Sampler,
    collective_samples,
)

_VERSION = "1"
_SECTIONS = ("kernel", "kernels", "machine")
_OF_GEMM, _OF_COPY = ("gemm", "overlap"), ("copy", "overlap")
Size = Annotated[Integer, Field(ge=1, le=1 << 24)]


class Settings(Frozen):
    """How kernels are measured. device, index: the GPU, or `cpu`. samples: of each kernel.

    most_scatter: largest interquartile range over the median; most_drift: of the last third's median over the first's.
    """

    device: Literal["gpu", "cpu"] = "gpu"
    index: Annotated[Integer, Field(ge=0, le=64)] = 0
    samples: Annotated[Integer, Field(ge=6, le=10_000)] = 30
    most_scatter: Annotated[Number, Field(gt=0)] = 0.2
    most_drift: Annotated[Number, Field(gt=0)] = 0.1


class Kernel(Frozen):
    """What is timed. m, n, k, precision: of the GEMM of m tokens. num_bytes: of a copy, or of a collective's buffer.

    mover: copies by a kernel, or by an engine from the host's memory. free_sms: SMs that the GEMM leaves to the copy.
    gpus, collective: of a collective.
    """

    operation: Literal["gemm", "copy", "overlap", "collective"]
    m: Size | None = None
    n: Size | None = None
    k: Size | None = None
    precision: Literal["fp32", "fp16", "bf16"] | None = None
    num_bytes: Annotated[Bytes, Field(ge=1, le=1e12)] | None = None
    mover: Annotated[Literal["kernel", "engine"], knob(structural=True)] = "kernel"
    free_sms: Annotated[Integer, Field(ge=0, le=4096)] = 0
    collective: Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all"] | None = None
    gpus: Annotated[Integer, Field(ge=2, le=64)] | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        needed = {
            "gemm": ("m", "n", "k", "precision"),
            "copy": ("num_bytes",),
            "overlap": ("m", "n", "k", "precision", "num_bytes"),
            "collective": ("collective", "num_bytes", "gpus"),
        }[self.operation]
        if missing := [name for name in needed if getattr(self, name) is None]:
            raise ValueError(f"{self.operation} needs {', '.join(missing)}")
        return self

    def parts(self) -> tuple[Gemm | None, Copy | None]:
        """The GEMM and the copy that it runs."""
        gemm = copy = None
        if self.operation in _OF_GEMM:
            assert self.m and self.n and self.k and self.precision
            gemm = Gemm(self.m, self.n, self.k, self.precision, self.free_sms)
        if self.operation in _OF_COPY:
            copy = Copy(int(self.num_bytes or 0), self.mover)
        return gemm, copy


class KernelDesign(Frozen):
    """One kernel."""

    kernel: Kernel


class KernelLists(Frozen):
    """The kernels of a study, each a scenario. gemms, overlaps: (m, n, k); copies, and those beside GEMMs, in bytes.

    Collectives have each kind, size and number of GPUs (those that this machine does not have are `infeasible`).
    """

    precisions: tuple[Literal["fp32", "fp16", "bf16"], ...] = ("bf16",)
    gemms: tuple[tuple[Size, Size, Size], ...] = ()
    copies: tuple[Bytes, ...] = ()
    overlaps: tuple[tuple[Size, Size, Size], ...] = ()
    beside: tuple[Bytes, ...] = ()
    collectives: tuple[Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all"], ...] = ()
    sizes: tuple[Bytes, ...] = ()
    gpus: tuple[Annotated[Integer, Field(ge=2, le=64)], ...] = ()

    def kernels(self) -> dict[str, dict[str, Any]]:
        """The tree of each kernel, by a name that says it."""
        trees: dict[str, dict[str, Any]] = {}
        for precision, (m, n, k) in itertools.product(self.precisions, self.gemms):
            gemm = {"m": m, "n": n, "k": k, "precision": precision}
            trees[f"gemm {m}x{n}x{k} {precision}"] = {"operation": "gemm", **gemm}
        for size in self.copies:
            trees[f"copy {size:.0f} B"] = {"operation": "copy", "num_bytes": size}
        # every GEMM with every size of copy
        for precision, (m, n, k), size in itertools.product(self.precisions, self.overlaps, self.beside):
            gemm = {"m": m, "n": n, "k": k, "precision": precision}
            trees[f"overlap {m}x{n}x{k} {precision}, {size:.0f} B"] = {
                "operation": "overlap",
                **gemm,
                "num_bytes": size,
            }
        for kind, size, count in itertools.product(self.collectives, self.sizes, self.gpus):
            tree = {"operation": "collective", "collective": kind, "num_bytes": size, "gpus": count}
            trees[f"{kind} {size:.0f} B x {count}"] = tree
        return trees


class TorchBackend(Backend):
    """Kernels timed on this machine, those of a batch in turns; parameters: those of `Settings`. Raises ConfigError."""

    batch = 16
    metrics: Mapping[str, Metric] = {
        "seconds": Metric("s", "time of a call, or of a GEMM and a copy that begin together; the median", low=1e-9),
        "low_s": Metric("s", "lower end of the 95 % interval of that median (order statistics)"),
        "high_s": Metric("s", "upper end of it"),
        "scatter": Metric("fraction", "interquartile range over the median"),
        "drift": Metric("fraction", "median of the last third of the samples over the first's, less 1", low=-1.0),
        "clock_hz": Metric("1/s", "clock after the samples; 0 if unknown", "maximize"),
        "flop_per_s": Metric("flop/s", "of the GEMM; 0 without one", "maximize"),
        "bytes_per_s": Metric(
            "byte/s", "of the copy, or of the larger buffer of a collective; 0 without one", "maximize"
        ),
        "gemm_s": Metric("s", "time of a GEMM alone; 0 without one"),
        "copy_s": Metric("s", "time of a copy alone; 0 without one"),
        "gemm_slowdown": Metric("x", "time of a GEMM during copies over alone; 1 without"),
        "copy_slowdown": Metric("x", "time of a copy during GEMMs over alone; 1 without"),
    }

    def __init__(self, **parameters: Any) -> None:
        settings = validate_as(Settings, parameters, path="simulator")
        self._settings = settings

    @functools.cached_property
    def version(self) -> str:  # type: ignore[override]
        """Names the device and its software, so that results of one are never taken for those of another."""
        if self.absence():
            return _VERSION
        machine = self._machine()
        # samples too: a median of few is another measurement
        return "+".join([_VERSION, str(self._settings.samples), machine.name, machine.software])

    def _machine(self) -> Machine:
        return Machine.find(self._settings.device, self._settings.index)

    def absence(self) -> str:
        """Why there is nothing to measure on, or ""."""
        try:
            self._machine()
        except Absent as error:
            return str(error)
        return ""

    def sections(self, tree: Tree) -> None:
        """Check the sections: `kernel`, and optionally `kernels` and `machine`, which is for the study."""
        check = Problems()
        for name in set(tree) - set(_SECTIONS):
            check.add(name, "is not a known section", way_out=did_you_mean(name, _SECTIONS))
        if not isinstance(tree.get("kernel"), Mapping):
            check.add(
                "kernel", "must be a section of keys", value=tree.get("kernel"), way_out="kernel={operation:gemm}"
            )
        check.done()

    def scenarios(self, tree: Tree) -> Mapping[str, Tree]:
        """A scenario for each kernel of the lists, over what `kernel` says of all; that by itself without lists."""
        if tree.get("kernels") is None:
            return {"base": {"kernel": tree["kernel"]}}
        check = Problems()
        lists = check.model(KernelLists, tree["kernels"], path="kernels")
        if lists is not None and not lists.kernels():
            check.add("kernels", "names no kernel", way_out="add kernels.gemms=[[4096,4096,4096]]")
        check.done()
        assert lists is not None
        return {name: {"kernel": {**tree["kernel"], **kernel}} for name, kernel in lists.kernels().items()}

    def design(self, tree: Tree) -> KernelDesign:
        """Validate a kernel. Raises ConfigError."""
        return validate_as(KernelDesign, {"kernel": tree.get("kernel")}, path="")

    def condition(self, path: str, tree: Tree) -> Mapping[str, Any] | None:
        """Every field of a kernel is a knob; the mover of copies, and SMs left free beside them."""
        section, _, name = path.partition(".")
        if section != "kernel" or name not in Kernel.model_fields or name == "operation":
            return None
        # a knob that does not act would give equal points
        counts = _OF_COPY if name == "mover" else _OF_GEMM if name == "free_sms" else (tree["kernel"].get("operation"),)
        return {} if tree["kernel"].get("operation") in counts else {"kernel.operation": "overlap"}

    def problems(self, design: BaseModel) -> Sequence[Problem]:
        """More GPUs than this machine has."""
        assert isinstance(design, KernelDesign)
        count = design.kernel.gpus or 0
        # without a device nothing is known to be too many
        if count and not self.absence() and count > self._machine().count:
            rule = f"is more than the {self._machine().count} of this machine"
            return [Problem("kernel.gpus", rule, str(count), "leave them out: kernels.gpus=[]")]
        return []

    def evaluate(self, batches: Sequence[Batch]) -> list[Results]:
        """Time all designs in turns."""
        designs = [design for batch in batches for design in batch.designs()]
        rows = iter(self._measure([design for design in designs if isinstance(design, KernelDesign)]))
        return [Results.of([next(rows) for _ in range(batch.size)]) for batch in batches]

    def _measure(self, designs: Sequence[KernelDesign]) -> list[Result]:
        """A result for each design."""
        machine = self._machine()
        results: dict[int, Result] = {}
        samplers: dict[int, Sampler] = {}
        for place, design in enumerate(designs):
            if problems := self.problems(design):
                results[place] = Result("infeasible", reason=str(problems[0]))
            elif design.kernel.operation == "collective":
                results[place] = self._collective(machine, design.kernel)
            else:
                try:
                    samplers[place] = Sampler(machine, *design.kernel.parts())
                    # all kernels are warm before the first sample of any
                    samplers[place].warm_up()
                except (OutOfMemory, ValueError) as error:
                    samplers.pop(place, None)
                    results[place] = _refusal(error, machine)
        rows: dict[int, list[tuple[float, ...]]] = {place: [] for place in samplers}
        # one sample of each kernel in turn: a drift of the clock meets all alike
        for _, place in itertools.product(range(self._settings.samples), list(samplers)):
            # out of memory in an earlier turn
            if place in results:
                continue
            try:
                rows[place].append(samplers[place].sample())
            except OutOfMemory as error:
                results[place] = _refusal(error, machine)
        for place in samplers.keys() - results.keys():
            results[place] = self._result(machine, designs[place].kernel, np.array(rows[place]))
        return [results[place] for place in range(len(designs))]

    def _collective(self, machine: Machine, kernel: Kernel) -> Result:
        assert kernel.collective in COLLECTIVES and kernel.gpus is not None
        size, samples = int(kernel.num_bytes or 0), self._settings.samples
        try:
            times = collective_samples(machine, kernel.collective, size, kernel.gpus, samples=samples)
        except RuntimeError as error:
            return _refusal(error, machine)
        return self._result(machine, kernel, times[:, None])

    def _result(self, machine: Machine, kernel: Kernel, samples: Floats) -> Result:
        """Metrics of samples [samples, times]; failed where they scatter or drift too much."""
        times = samples[:, -1]
        median, low, high = median_interval(times)
        quarter, three = np.quantile(times, [0.25, 0.75])
        third = len(times) // 3
        drift = float(np.median(times[-third:]) / np.median(times[:third]) - 1)
        scatter = float((three - quarter) / median)
        engine = f"{machine.name}, {machine.software}"
        # a median of such times may not be trusted: no point rather than a wrong one
        if scatter > self._settings.most_scatter:
            text = (
                f"its times scatter by {100 * scatter:.0f} % (more than simulator.most_scatter): is the device shared?"
            )
            return Result("failed", reason=text, engine=engine)
        if abs(drift) > self._settings.most_drift:
            text = (
                f"its times drift by {100 * drift:+.0f} % (more than simulator.most_drift): does the device throttle?"
            )
            return Result("failed", reason=text, engine=engine)
        metrics = {"seconds": median, "low_s": low, "high_s": high, "scatter": scatter, "drift": drift}
        metrics |= {"clock_hz": machine.clock_hz(), "gemm_slowdown": 1.0, "copy_slowdown": 1.0}
        metrics |= _rates(kernel, median, np.median(samples, axis=0))
        # what does not apply to an operation is 0
        return Result("ok", dict.fromkeys(self.metrics, 0.0) | metrics, engine=engine)

    def facts(self, design: BaseModel) -> Sequence[tuple[str, Any, str, str]]:
        """The device that was measured."""
        machine = self._machine()
        return [("device", machine.name, "measured", machine.software)]


def _rates(kernel: Kernel, seconds: float, medians: Floats) -> dict[str, float]:
    """Metrics that depend on the operation. medians: of each time of a sample."""
    # two operations of each multiply-add
    flop, size = 2.0 * (kernel.m or 0) * (kernel.n or 0) * (kernel.k or 0), float(kernel.num_bytes or 0)
    if kernel.operation == "gemm":
        return {"flop_per_s": flop / seconds, "gemm_s": seconds}
    if kernel.operation == "copy":
        return {"bytes_per_s": size / seconds, "copy_s": seconds}
    if kernel.operation == "collective":
        return {"bytes_per_s": size / seconds}
    gemm_s, copy_s, gemm_beside, copy_beside, _ = medians.tolist()
    slower = {"gemm_slowdown": gemm_beside / gemm_s, "copy_slowdown": copy_beside / copy_s}
    return {
        "gemm_s": gemm_s,
        "copy_s": copy_s,
        # rates while both run
        "flop_per_s": flop / gemm_beside,
        "bytes_per_s": size / copy_beside,
        **slower,
    }


def median_interval(times: Floats) -> tuple[float, float, float]:
    """Median of samples and the ends of its 95 % interval, by order statistics (normal approximation of the ranks)."""
    ordered, count = np.sort(times), len(times)
    reach = 0.98 * math.sqrt(count)  # half of 1.96 standard deviations of a binomial of a half
    low, high = math.floor(count / 2 - reach), math.ceil(count / 2 + reach)
    return float(np.median(ordered)), float(ordered[max(0, low)]), float(ordered[min(count - 1, high)])


def _refusal(error: Exception, machine: Machine) -> Result:
    """The result of a kernel that could not be run: failed, or unsupported where the device cannot do it."""
    # ValueError: the device cannot do it, as leaving SMs free; others may succeed another time
    status: Literal["unsupported", "failed"] = "unsupported" if isinstance(error, ValueError) else "failed"
    return Result(status, reason=str(error), engine=f"{machine.name}, {machine.software}")
