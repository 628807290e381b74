"""Design of a deployment: the sections of a step, the serving software, engines, traffic and what users accept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from dse.config.options import load_yaml
from dse.errors import ConfigError, Problem
from dse.values import Frozen, Memo
from dse.values.units import BytesPerSecond, Integer, Number, Seconds
from dse_serving.deployment import Deployment, Policy, Pool, Scheduler, Transfer
from dse_serving.overlaps import OVERLAPS, Overlap, PartTimes, Table, knobs_of, lacks, times_of, with_experts_apart
from dse_serving.step_times import EngineKernels, Factor, GemmTimeFactors, StepParts, StepTimes, memory_of, step_parts
from dse_serving.traffic import TrafficSpec
from simulators.hardware.parts import SourcedValue
from simulators.hardware.residuals import name_in_tables
from simulators.steps.design import StepDesign
from simulators.workloads.model import Parallel, Transformer

DATA = Path(__file__).with_name("conf") / "data"
_KNOWN = 256  # tables of steps that are remembered
_PARTS = Memo[StepParts](_KNOWN)
Count = Annotated[Integer, Field(ge=1, le=2**20)]


class Server(SourcedValue):
    """Serving software: how its engines schedule, its options by dotted path, and those of the overlaps that it has.

    of_all_ranks: paths whose options count all ranks of data-parallel attention, while a plan counts each.
    """

    name: str
    description: str = ""
    scheduler: Scheduler
    flags: Mapping[str, str] = {}
    of_all_ranks: tuple[str, ...] = ()
    overlaps: Mapping[Overlap, str] = {}


class KernelSet(Frozen):
    """Kernels of layers with experts. dispatch_s: of a layer, for what sorts and quantises tokens [s]; weight_bound,
    flop_bound: as of `GemmTimeFactors`.
    """

    dispatch_s: Seconds
    weight_bound: Factor
    flop_bound: Factor


_TRAITS = ("software", "architecture", "attention", "format")


class ServingKernels(SourcedValue):
    """GEMM times over those of the step model, by architecture of the GPU and by format, kernels of layers with
    experts, and latencies of all-reduces in one kernel.

    experts, sets: by the software, the architecture of the GPU, the kind of attention (latent or grouped) and the
    format of the weights; those of `sets` were fitted after all else. Of another set, the one that is most like it:
    traits of `given_up` may differ, of which each weighs more than all those before it. architectures: their GPUs.
    split_ctas: CTAs of the sums of one half of the tokens beside the other half.
    """

    name: str
    description: str = ""
    dense: Mapping[str, Mapping[str, GemmTimeFactors]]
    experts: Mapping[str, KernelSet]
    sets: Mapping[str, KernelSet] = {}
    given_up: tuple[str, ...] = ()
    architectures: Mapping[str, tuple[str, ...]] = {}
    sum_s: Seconds
    peer_s: Seconds
    split_ctas: Count

    def of(self, design: Serving) -> EngineKernels:
        """Kernels of a design's formats, software and GPU; the closest ones where some were not measured."""
        dense, experts = formats(design)
        architecture = self._architecture(design)
        plain = self._dense(architecture, dense)
        speeds, dispatch_s = plain, 0.0
        if getattr(design.model, "moe", None) is not None:
            # attention over compressed tokens has one key for all heads, as absorbed latents have
            of_latents = any(getattr(design.model, part, None) is not None for part in ("latent", "compressed"))
            attention = "latent" if of_latents else "grouped"
            # sets name mxfp4 by its weights, although its products are in 16 bits
            of_weights = experts if experts == "mxfp4" else _NEAR.get(experts, experts)
            constants, is_format = self._nearest((design.server.name, architecture, attention, of_weights))
            if is_format:
                speeds = GemmTimeFactors(weight_bound=constants.weight_bound, flop_bound=constants.flop_bound)
            dispatch_s = constants.dispatch_s
        if design.server.scheduler.dispatch_s is not None:
            dispatch_s = design.server.scheduler.dispatch_s
        return EngineKernels(dense=plain, experts=speeds, dispatch_s=dispatch_s, sum_s=self.sum_s, peer_s=self.peer_s)

    def _architecture(self, design: Serving) -> str:
        """Architecture of the GPU of a design; empty for one that is not listed."""
        gpu = name_in_tables(design.system.gpu)
        return next((name for name, gpus in self.architectures.items() if gpu in gpus), "")

    def _dense(self, architecture: str, format_name: str) -> GemmTimeFactors:
        """Factors of a format on an architecture; of the closest format there, else of another architecture."""
        names = format_name, _NEAR.get(format_name, "bf16")
        tables = self.dense.get(architecture, {}), *self.dense.values()
        return next((table[name] for table in tables for name in names if name in table), GemmTimeFactors())

    def _nearest(self, cell: tuple[str, str, str, str]) -> tuple[KernelSet, bool]:
        """The set that is most like software, architecture, attention and format, and whether it has that format."""
        order = *self.given_up, *(trait for trait in _TRAITS if trait not in self.given_up)

        def difference(name: str) -> int:
            words = zip(_TRAITS, name.split(), cell, strict=True)
            return sum(2 ** order.index(trait) for trait, word, wanted in words if word != wanted)

        sets = {**self.experts, **self.sets}
        name = min(sets, key=difference)
        return sets[name], name.split()[-1] == cell[-1]


_NEAR = {"fp8": "fp8", "mxfp8": "fp8", "fp8_row": "fp8", "fp8_block": "fp8", "nvfp4": "nvfp4", "mxfp4": "bf16"}
"""Formats -> the one whose products are as theirs, if they were not measured; weights of mxfp4 multiply in 16 bits."""


class Engines(Frozen):
    """Engines of a deployment. gpus: all GPUs; None for those of the system's node. replicas: engines, or those that
    generate; None for as many as the GPUs allow. apart: whether prompts have engines of their own, `prefill_replicas`
    of `prefill_tp` GPUs (None: as many as the others), which send keys and values at `bytes_per_s` a GPU after
    `latency_s`, layer by layer where `beside`.

    overlap: of the parts of a step (`dse_serving.overlaps`), or the best one of those that the software has, for each
    size of step. expert_gpus: GPUs of an engine that have its experts alone (0: experts are on all GPUs), between which
    and the others `expert_batches` batches go round; of engines that generate, where prompts have their own.
    usd_per_gpu_hour: price of a GPU; None for that of `conf/data/gpu_prices.yaml`.
    """

    gpus: Count | None = None
    replicas: Count | None = None
    apart: bool = False
    prefill_replicas: Count = 1
    prefill_tp: Count | None = None
    routing: Policy = "fewest_requests"
    bytes_per_s: BytesPerSecond = 5e10
    latency_s: Seconds = 1e-3
    beside: bool = True
    overlap: Overlap | Literal["best"] = "waited"
    expert_gpus: Annotated[Integer, Field(ge=0, le=2**16)] = 0
    expert_batches: Annotated[Integer, Field(ge=1, le=8)] = 2
    usd_per_gpu_hour: Annotated[Number, Field(gt=0)] | None = None


class Slo(Frozen):
    """Limits that users accept: time to the first token and time of each later one [s]; None for no limit.

    percentile: share of the requests for which they must hold.
    """

    ttft_s: Seconds | None = None
    tpot_s: Seconds | None = None
    percentile: Annotated[Number, Field(gt=0, lt=1)] = 0.99


class Serving(StepDesign):
    """A deployment of a model on a machine, under traffic."""

    server: Server
    engines: Engines
    traffic: TrafficSpec
    slo: Slo

    @property
    def gpus(self) -> int:
        """All GPUs that may be used."""
        node = self.system.node
        in_node = 1 if node is None else int(node.num_gpus)
        return in_node if self.engines.gpus is None else int(self.engines.gpus)

    @property
    def prefill_gpus(self) -> int:
        """GPUs of all engines of prompts, where these are apart."""
        engines, ranks = self.engines, int(self.parallel.dp) * int(self.parallel.pp)
        return int(engines.prefill_replicas * (engines.prefill_tp or self.parallel.tp)) * ranks if engines.apart else 0

    @property
    def each(self) -> int:
        """GPUs of an engine that generates."""
        return int(self.parallel.tp) * int(self.parallel.dp) * int(self.parallel.pp) + int(self.engines.expert_gpus)

    @property
    def replicas(self) -> int:
        """Engines that generate; 0 where there are not enough GPUs for one."""
        fitting = max(0, self.gpus - self.prefill_gpus) // self.each
        return fitting if self.engines.replicas is None else int(self.engines.replicas)


def broken_rules(design: Serving) -> Iterator[Problem]:
    """Rules between sections that a deployment breaks."""
    used = design.prefill_gpus + max(1, design.replicas) * design.each
    if used > design.gpus:
        rule = f"of {design.each} GPUs each, and {design.prefill_gpus} for prompts, are more than engines.gpus = "
        way = "use fewer, or more GPUs"
        yield Problem("engines.replicas", f"{rule}{design.gpus}", design.replicas, way)
    if int(design.parallel.cp) > 1:
        yield Problem("parallel.cp", "of serving is not modelled", design.parallel.cp, "set parallel.cp=1")
    if design.model.kind != "transformer":
        yield Problem("model.kind", "is not served: only transformers generate token by token", design.model.kind)
        return
    dp, ep = int(design.parallel.dp), int(design.parallel.ep)
    if dp > 1 and design.model.moe is None:
        yield Problem("parallel.dp", "shares experts, and the model has none", dp, "use engines.replicas")
    # experts are shared by all GPUs of an engine, or split by tp
    if ep > 1 and ep != dp * int(design.parallel.tp):
        rule = f"is not parallel.tp x parallel.dp = {dp * int(design.parallel.tp)}, the GPUs of an engine"
        yield Problem("parallel.ep", rule, ep, "set 1 or that")
    yield from _overlap_rules(design)


def _missing_rules(design: Serving, name: Overlap) -> Iterator[Problem]:
    """The steps of all engines have what an overlap needs."""
    prompts = prompt_engines(design)
    way = "set best, or waited"
    if (missing := lacks(step_of(design), name)) is not None:
        folded = int(design.parallel.ep) > 1 and int(design.parallel.dp) == 1
        more = ", and parallel.dp > 1: else each GPU has all tokens, and exchanges none" if folded else ""
        yield Problem("engines.overlap", f"needs {missing}{more}", name, way)
    elif prompts is not None and (missing := lacks(step_of(prompts), name)) is not None:
        rule = f"of engines of prompts (engines.prefill_tp = {int(prompts.parallel.tp)}) needs {missing}"
        yield Problem("engines.overlap", rule, name, f"{way}, or another engines.prefill_tp")


def _overlap_rules(design: Serving) -> Iterator[Problem]:
    """An overlap has what it needs; experts on GPUs of their own are of a model that has some, whose other parts wait
    for them.
    """
    assert isinstance(design.model, Transformer)
    engines, moe = design.engines, design.model.moe
    name, gpus, pp = engines.overlap, int(engines.expert_gpus), int(design.parallel.pp)
    if name != "best":
        yield from _missing_rules(design, name)
    if name not in ("waited", "in_switch") and pp > 1:
        rule = f"of a pipeline (parallel.pp = {pp}) is not modelled"
        yield Problem("engines.overlap", rule, name, "set waited, or parallel.pp=1")
    if not gpus:
        return
    path = "engines.expert_gpus"
    if moe is None:
        yield Problem(path, "are of a model with experts, and this one has none", gpus, "set 0")
    elif gpus < 2 or np.any(np.asarray(moe.experts) % gpus):
        yield Problem(path, f"is less than 2, or does not divide the experts ({moe.experts})", gpus, "take a divisor")
    beside = name not in ("waited", "best")
    shared = {"parallel.ep": int(design.parallel.ep) > 1, "parallel.pp": pp > 1, "engines.overlap": beside}
    for other, broken in shared.items():
        if broken:
            rule = f"with engines.expert_gpus = {gpus} is not modelled"
            way = f"leave {other} out, or set engines.expert_gpus=0"
            yield Problem(other, rule, way_out=way)


def deployment_of(design: Serving, speeds: EngineKernels | None = None, prompts: Serving | None = None) -> Deployment:
    """The deployment of a design: its pools with the times of their steps. speeds: None for the kernels of `conf`.
    prompts: a design whose engines compute all prompts; None for those that the design has apart, or none.

    Raises ConfigError for experts that do not fit on GPUs of their own.
    """
    engines, speeds = design.engines, speeds or kernels().of(design)
    pools = [_pool(design, design.replicas, speeds)]
    # the first pool computes prompts
    if prompts is not None:
        pools.insert(0, _pool(prompts, prompts.replicas, speeds))
    elif (own_prompts := prompt_engines(design)) is not None:
        pools.insert(0, _pool(own_prompts, int(engines.prefill_replicas), speeds))
    layers = int(np.max(design.model.layers)) if design.model.kind == "transformer" else 1
    return Deployment(
        tuple(pools), Transfer(float(engines.bytes_per_s), engines.latency_s, engines.beside, layers), engines.routing
    )


def prompt_engines(design: Serving) -> Serving | None:
    """The design of the engines that compute prompts alone; None where engines do both."""
    engines = design.engines
    if not engines.apart:
        return None
    changes = {
        "parallel": _with_tp(design.parallel, int(engines.prefill_tp or design.parallel.tp)),
        "engines": engines.model_copy(update={"expert_gpus": 0}),
    }
    return design.model_copy(update=changes)


def with_scheduler(design: Serving, changes: Mapping[str, Any]) -> Serving:
    """The design with other options of its scheduler."""
    scheduler = design.server.scheduler.model_copy(update=dict(changes))
    return design.model_copy(update={"server": design.server.model_copy(update={"scheduler": scheduler})})


def step_of(design: Serving) -> StepDesign:
    """The design of the steps of an engine."""
    parallel = design.parallel
    # without replicas of attention every GPU has all tokens: as experts that tp splits
    if int(parallel.ep) > 1 and int(parallel.dp) == 1:
        parallel = parallel.model_copy(update={"ep": 1})
    names = [name for name in StepDesign.model_fields if name != "parallel"]
    return StepDesign.model_construct(**{name: getattr(design, name) for name in names}, parallel=parallel)


def _with_tp(parallel: Parallel, tp: int) -> Parallel:
    """Degrees with another tp; experts that all GPUs of an engine share stay so."""
    spread = {"ep": tp * int(parallel.dp)} if int(parallel.ep) > 1 else {}
    return parallel.model_copy(update={"tp": tp, **spread})


def _pool(design: Serving, count: int, speeds: EngineKernels) -> Pool:
    """Equal engines of a design."""
    scheduler, step = design.server.scheduler, step_of(design)
    tp, dp, pp = (int(getattr(step.parallel, name)) for name in ("tp", "dp", "pp"))
    waited, gpus = PartTimes(_parts(step, scheduler), speeds), int(design.engines.expert_gpus)
    if gpus:
        times = _times_apart(design, step, waited)
    else:
        tables: dict[str, Table] = {name: _table(step, scheduler, name, waited) for name in _overlaps(design, step)}
        times = times_of(tables, waited, scheduler.graphs)
        times = with_experts_apart(times, waited, scheduler.graphs) if dp > 1 else times
    return Pool(count, scheduler, times, tp * dp * pp + gpus, dp, pp, gpus)


def _overlaps(design: Serving, step: StepDesign) -> list[Overlap]:
    """Overlaps that engines choose from."""
    chosen = design.engines.overlap
    if chosen != "best":
        return [chosen]
    # overlaps within a pipeline's steps are not modelled
    several = int(step.parallel.pp) == 1
    return ["waited", *(name for name in design.server.overlaps if several and lacks(step, name) is None)]


def _parts(step: StepDesign, scheduler: Scheduler) -> StepParts:
    """Tables of the step model, which are kept."""
    tokens, sequences = int(scheduler.tokens), int(scheduler.sequences)
    shared = (step.system, step.model, step.kernels)
    # parts that are shared are compared by identity, the others by their content
    key = (step.parallel.model_dump_json(), step.run.model_dump_json(), tokens, sequences)
    return _PARTS.get(lambda: step_parts(step, tokens, sequences), *shared, key=key)


def _table(step: StepDesign, scheduler: Scheduler, name: Overlap, waited: PartTimes) -> Table:
    """Times of steps with an overlap."""
    if name == "nano":
        return waited.nano()
    if name == "waited":
        return waited.step_model(1)
    batches = OVERLAPS[name][1]
    return PartTimes(_parts(knobs_of(step, name, kernels().split_ctas), scheduler), waited.kernels).step_model(batches)


def _times_apart(design: Serving, step: StepDesign, attending: PartTimes) -> StepTimes:
    """Times of steps whose experts have GPUs of their own, and the memory of the others."""
    scheduler, gpus, batches = (
        design.server.scheduler,
        int(design.engines.expert_gpus),
        int(design.engines.expert_batches),
    )
    # experts are not split by tp on GPUs of their own: each has whole ones
    alone = _with_tp(step.parallel, 1)
    parts = _parts(step.model_copy(update={"parallel": alone.model_copy(update={"dp": gpus, "ep": gpus})}), scheduler)
    table = attending.apart(PartTimes(parts, attending.kernels), int(step.parallel.dp), gpus, batches)
    times = times_of({"apart": table}, attending, scheduler.graphs)
    # all weights on one GPU; what one of `parts` lacks of them are other GPUs' experts
    memory = memory_of(step.model_copy(update={"parallel": alone.model_copy(update={"dp": 1})}))[0]
    experts = (memory - parts.times.weight_bytes) / (1 - 1 / gpus)  # a GPU of `parts` has all else, and a share of them
    if experts / gpus > scheduler.memory * times.room_bytes:
        rule = f"are too few: {experts / gpus / 1e9:,.1f} GB of experts each"
        raise ConfigError([Problem("engines.expert_gpus", rule, gpus, "use more")])
    return replace(times, weight_bytes=times.weight_bytes - experts / int(step.parallel.tp))


def formats(design: StepDesign) -> tuple[str, str]:
    """Formats of the products of a design's dense layers and of its experts."""
    run, stored = design.run, getattr(design.model, "stored", None) or {}
    dense = str(run.products or run.precision)
    experts = stored["experts"][0].format.name if "experts" in stored else str(run.weights or dense)
    return dense, experts


@cache
def kernels() -> ServingKernels:
    """Calibrated kernels, from `conf/data/serving_kernels.yaml`."""
    return ServingKernels.model_validate(load_yaml(DATA / "serving_kernels.yaml"))


@cache
def gpu_prices() -> Mapping[str, Mapping[str, Any]]:
    """Prices of GPUs [USD an hour] with their sources, from `conf/data/gpu_prices.yaml`."""
    prices: Mapping[str, Mapping[str, Any]] = load_yaml(DATA / "gpu_prices.yaml")["prices"]
    return prices


def usd_per_gpu_hour(design: Serving) -> float | None:
    """Price of a GPU [USD an hour]; None where it is not known."""
    if design.engines.usd_per_gpu_hour is not None:
        return float(design.engines.usd_per_gpu_hour)
    row = gpu_prices().get(design.system.gpu.name)
    return None if row is None else float(row["usd"])
