"""A step that does not fit the memory of a GPU: by how much, the nearest layout that fits, and what fewer bits save.

The work of the step is kept. Layouts of as many GPUs are tried first, then of twice as many, and so on; of those that
fit, the one with the fewest values that differ is the nearest, and of such the fastest. Memory does not depend on the
network, so that one that is not described is no obstacle here: the answer says that a time needs it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dse.errors import ConfigError
from dse.space import get_path
from simulators.steps.backend import StepBackend, metrics_of
from simulators.steps.choices import OFF
from simulators.steps.design import StepDesign
from simulators.steps.given import with_values
from simulators.steps.layouts import PATHS, Layout, LayoutQuestion, LayoutSection
from studies.plan.step_plan import MEMORY

# powers of two, which most degrees of parallelism are
_TIMES = (1, 2, 4, 8, 16, 32)  # as many GPUs
_LEAN: Mapping[str, Sequence[Any]] = {"zero": (3,), "recompute": ("all",)}  # what takes least memory of all
_NEARLY = 1.1  # times the memory: where the leanest states take more, no other layout fits
_NETWORK = "system.node.library.network_bytes_per_s"
_SPLIT = "parallel.sequence_parallel"
_BITS = (8, 4)
_FORMATS = ("fp8", "int4")


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
    present = {path: get_path(tree, path) for path in (*PATHS, _SPLIT)}
    for times in _TIMES:
        try:
            spreading = LayoutQuestion.of(connected, LayoutSection(auto=True, gpus=times * gpus), backend.steps)
        except ConfigError:
            return ""  # no layout of such a step is legal
        lean = spreading.candidates(**_LEAN).memory_share
        if not len(lean) or lean.min() > _NEARLY:  # a quick look, before all layouts are tried
            continue
        fitting = spreading.candidates().fitting
        if not fitting.layouts:
            continue
        changes = [_changes(layout, connected, present) for layout in fitting.layouts]
        # fewest changes, then fastest, as layouts are sorted
        place = min(range(len(changes)), key=lambda place: (len(changes[place]), place))
        words = " ".join(f"{path}={str(value).lower()}" for path, value in changes[place].items())
        # GPUs of one server need no network
        network = "" if is_described or times == 1 else f", whose time needs {_NETWORK}"
        return f"{words} ({times * gpus} GPUs, {fitting.memory_share[place]:.2f} times{network})"
    return ""


def _changes(layout: Layout, tree: Mapping[str, Any], present: Mapping[str, Any]) -> dict[str, Any]:
    """Values of a layout that differ from those of the step, and whether its tokens are split."""
    values = {**layout.paths, _SPLIT: get_path(layout.tree(tree), _SPLIT)}
    return {path: value for path, value in values.items() if str(present[path]) != str(value)}


def _with_network(tree: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    """The step with nothing overlapped on machines with some network, and whether the network is described."""
    bare = {name: section for name, section in with_values(tree, OFF).items() if name != "sites"}
    described = get_path(tree, _NETWORK) is not None
    if described or not all(get_path(tree, f"system.node.{name}") for name in ("library", "link_bytes_per_s")):
        return bare, described
    network = {_NETWORK: get_path(tree, "system.node.link_bytes_per_s"), "system.sources": _with_source(tree)}
    return with_values(bare, network), False


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
