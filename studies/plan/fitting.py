"""A step that does not fit the memory of a GPU: by how much, the nearest layout that fits, and what fewer bits save.

The work of the step is kept, and its pipeline's schedule where a layout with it fits. Layouts of as many GPUs are tried
first, then of twice as many, and so on; of those that fit, the one with the fewest values that differ is the nearest,
and of such the fastest. Memory does not depend on the network, so that one that is not described is no obstacle here:
the answer says that a time needs it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dse.errors import ConfigError
from dse.space import get_path
from simulators.steps.backend import StepBackend, metrics_of
from simulators.steps.design import StepDesign
from simulators.steps.plan.choices import OFF
from simulators.steps.plan.given_plan import with_values
from simulators.steps.plan.layouts import PATHS, Candidates, Layout, LayoutQuestion, LayoutSection
from studies.plan.step_plan import MEMORY, StepPlan, most_memory

# powers of two, which most degrees of parallelism are
_TIMES = (1, 2, 4, 8, 16, 32)  # as many GPUs
_LEAN: Mapping[str, Sequence[Any]] = {"zero": (3,), "recompute": ("all",)}  # what takes least memory of all
_TIGHT = 0.95  # of a GPU's memory: beyond it, what a framework takes beside may be missing
_NEARLY = 1.1  # times the memory: where the leanest states take more, no other layout fits
_NETWORK = "system.node.library.network_bytes_per_s"
_SPLIT = "parallel.sequence_parallel"
_SCHEDULE = ("parallel.pipeline", "parallel.virtual_stages", "parallel.messages")
"""Knobs of the schedule of a pipeline, which other layouts keep where they fit with it."""
_BITS = (8, 4)
_FORMATS = ("fp8", "int4")


def may_not_fit(plan: StepPlan) -> Iterator[str]:
    """Yield what is known where a plan takes about as much memory as a GPU has."""
    share = float(plan.best[MEMORY]) if MEMORY in plan.best else 0.0
    if share <= _TIGHT:
        return
    text = f"may not fit: {share:.2f} times the memory of a GPU by the model, which leaves out the framework's own"
    off = f"and is off by up to {100 * (most_memory(plan.config) - 1):.0f} %"
    if share <= 1:
        yield f"{text} (context, buffers of collectives, fragments), {off}"
        return
    tree = plan.point_tree(plan.best)
    nearest = _nearest(tree, int(StepBackend().design(tree).parallel.gpus), StepBackend())
    surely = f"; surely fits: {nearest}" if nearest else ""
    yield f"{text}, {off}{surely}"


def does_not_fit(name: str, tree: Mapping[str, Any]) -> Iterator[str]:
    """Yield by how much the step of a tree does not fit, and what comes nearest that does."""
    backend = StepBackend()
    design = backend.design(tree)
    metrics = {metric: float(value) for metric, value in metrics_of(design).items()}
    share, gpus = metrics[MEMORY], int(design.parallel.gpus)
    room = metrics["memory_bytes"] / share
    needs = f"{metrics['memory_bytes'] / 1e9:,.1f} GB, and a GPU has {room / 1e9:,.1f}"
    yield f"{name}: does not fit in any schedule: it takes {share:.2f} times the memory of a GPU ({needs})"
    nearest = _nearest(tree, gpus, backend) or f"no layout of up to {_TIMES[-1]} times the GPUs; take a smaller model"
    narrower = _bits(design, metrics) if design.run.mode == "training" else _formats(tree, share)
    yield f"nearest that fits: {nearest}; {narrower}"


def _nearest(tree: Mapping[str, Any], gpus: int, backend: StepBackend) -> str:
    """The nearest layout that fits in words to type; "" where none does."""
    layers = get_path(tree, "model.layers")
    if layers is None:  # models without layers have no pipeline to split
        return "run.batch=1" if _share(with_values(tree, {"run.batch": 1}), backend) <= 1 else ""
    connected, is_described = _with_network(tree)
    bare = {name: section for name, section in connected.items() if name != "sites"}
    for times, off in itertools.product(_TIMES, ({}, OFF)):  # first with the schedule of its pipeline
        changed = with_values(bare, off)
        fitting = _fitting(changed, times * gpus, backend)
        if fitting is None:
            continue
        changes = [_changes(layout, changed, tree) for layout in fitting.layouts]
        # fewest changes, then fastest, as layouts are sorted
        place = min(range(len(changes)), key=lambda place: (len(changes[place]), place))
        words = " ".join(f"{path}={str(value).lower()}" for path, value in changes[place].items())
        # GPUs of one server need no network
        network = "" if is_described or times == 1 else f", whose time needs {_NETWORK}"
        return f"{words} ({times * gpus} GPUs, {fitting.memory_share[place]:.2f} times{network})"
    return ""


def _fitting(tree: Mapping[str, Any], gpus: int, backend: StepBackend) -> Candidates | None:
    """Layouts of a step on so many GPUs that fit; None where there are none."""
    try:
        spreading = LayoutQuestion.of(tree, LayoutSection(auto=True, gpus=gpus), backend.steps)
    except ConfigError:
        return None  # no layout of such a step is legal
    lean = spreading.candidates(**_LEAN).memory_share
    if not len(lean) or lean.min() > _NEARLY:  # a quick look, before all layouts are tried
        return None
    fitting = spreading.candidates().fitting
    return fitting if fitting.layouts else None


def _changes(layout: Layout, changed: Mapping[str, Any], present: Mapping[str, Any]) -> dict[str, Any]:
    """Values of a step in a layout that differ from those of the step as it is."""
    tree = layout.tree(changed)
    differing = {path: get_path(tree, path) for path in (*PATHS, _SPLIT, *_SCHEDULE)}
    return {path: value for path, value in differing.items() if str(get_path(present, path)) != str(value)}


def _with_network(tree: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    """The step on machines with some network, and whether the network is described."""
    described = get_path(tree, _NETWORK) is not None
    if described or not all(get_path(tree, f"system.node.{name}") for name in ("library", "link_bytes_per_s")):
        return dict(tree), described
    network = {_NETWORK: get_path(tree, "system.node.link_bytes_per_s"), "system.sources": _with_source(tree)}
    return with_values(tree, network), False


def _with_source(tree: Mapping[str, Any]) -> dict[str, Any]:
    assumed = {"provenance": "assumed", "source": "the rate of a link, in whose place any rate would do for memory"}
    return {**(get_path(tree, "system.sources") or {}), _NETWORK.partition(".")[2]: assumed}


def _share(tree: Mapping[str, Any], backend: StepBackend) -> float:
    return float(metrics_of(backend.design(tree))[MEMORY])


def _formats(tree: Mapping[str, Any], share: float) -> str:
    """Memory that a forward pass takes with weights in narrower formats, in words to type."""
    backend, texts = StepBackend(), list[str]()
    for name in _FORMATS:
        less = _share(with_values(tree, {"run.weights": name}), backend)
        if less < share:
            texts.append(f"run.weights={name} {less:.2f} times{' (fits)' if less <= 1 else ''}")
    return f"weights in other formats: {', '.join(texts)}" if texts else "weights have the narrowest format already"


def _bits(design: StepDesign, metrics: Mapping[str, float]) -> str:
    """Memory that the step would take with weights of fewer bits, in words."""
    weights = metrics["state_bytes"] / metrics["bytes_per_parameter"] * design.run.element_bytes
    if design.parallel.zero == 3:
        weights /= float(np.asarray(design.parallel.replicas))  # ZeRO-3 splits weights over replicas
    texts = list[str]()
    for bits in _BITS:
        saved = weights * (1 - bits / (8 * design.run.element_bytes))
        share = metrics[MEMORY] * (1 - saved / metrics["memory_bytes"])
        texts.append(f"{bits} bits {share:.2f} times")
    fits = " (fits)" if share <= 1 else ""  # that of the fewest bits
    return f"precision of weights alone: {', '.join(texts)}{fits}, whose time is not predicted"
