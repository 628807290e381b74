"""Weights and cache of a step in words: parameters, formats, and the bytes of a GPU."""

from __future__ import annotations

from collections.abc import Mapping

from dse.results.words import cell
from simulators.steps.design import StepDesign
from simulators.steps.operators.stored_formats import cache_format
from simulators.steps.run.blocks import ModelWeights, model_weights
from simulators.workloads.model import Transformer

_16_BITS = ("bf16", "fp16", "fp32")  # precisions that are formats, too


def stored_line(design: StepDesign, metrics: Mapping[str, float]) -> str:
    """Parameters and their formats, and what they and keys and values take of a GPU. metrics: of the step."""
    sizes = [float(metrics[name]) for name in ("state_bytes", "activation_bytes")]
    state, cache = (f"{size / 1e9:,.1f} GB" if size >= 1e8 else cell(size, "byte") for size in sizes)
    counted = model_weights(design.model, design.run, design.kernels)
    weights = f"weights: {_parameters(counted.number)} parameters in {_formats(design, counted)}"
    if design.run.mode == "training":
        return f"{weights}, {state} a GPU with gradients and the optimizer's state; activations {cache}"
    return f"{weights}, {state} a GPU; keys and values in {_cache(design)}, {cache} a GPU"


def _parameters(number: float) -> str:
    # four digits of billions
    return f"{number / 1e6:,.1f} M" if number < 1e9 else f"{number / 1e9:,.{3 if number < 1e10 else 2}f} B"


def _usual(design: StepDesign) -> str:
    """The format of what has none of its own."""
    return design.run.precision if design.run.precision in _16_BITS else f"{8 * design.run.element_bytes} bits"


def _formats(design: StepDesign, weights: ModelWeights) -> str:
    """Formats by their shares of all weights."""
    shares = {name: count / weights.number for name, count in weights.formats.items()}
    unformatted = 1 - sum(shares.values())
    shares |= {_usual(design): shares.get(_usual(design), 0.0) + unformatted} if unformatted > 1e-9 else {}  # rounding
    if len(shares) > 1:
        ordered = sorted(shares.items(), key=lambda item: -item[1])
        return ", ".join(f"{name} ({100 * share:.1f} %)" for name, share in ordered)
    model = design.model
    unused = isinstance(model, Transformer) and model.stored is not None and not weights.formats
    why = " (the formats of its file are of inference)" if unused and design.run.mode == "training" else ""
    return f"{next(iter(shares), _usual(design))}{why}"


def _cache(design: StepDesign) -> str:
    model = design.model
    format = cache_format(model, design.run) if isinstance(model, Transformer) else None
    return _usual(design) if format is None else format.name
