"""Designs of the step backend: shipped options with values set by dotted path, and designs drawn at random."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray
from pydantic import BaseModel

from dse.backend import Batch, Results
from dse.plugins import available
from dse.space import set_path
from simulators.steps.backend import StepBackend
from simulators.steps.design import StepDesign
from simulators.steps.operators.work import ModelBlock
from simulators.steps.run.build import iteration
from simulators.steps.run.iteration import Iteration
from tests.support import shipped

BACKEND: StepBackend = available("backend")["step"]()
NETWORK = {
    "system.node.library.network_bytes_per_s": 25e9,
    "system.node.library.network_nics": "one",
    "system.sources": {"node.library.network_bytes_per_s": {"provenance": "derived", "source": "made up"}},
}
"""What a node lacks whose groups are to leave it; of `system=a100_8`."""
BERT = shipped("model")["bert_large"]
SHAPES = {"model.heads": 16, "model.ffn": None, "model.head_dim": None, "model.kv_heads": None}


def tree(
    overrides: Mapping[str, Any] | None = None,
    *,
    system: str = "a100_8",
    kernels: str = "fused",
    optimizer: str = "adam",
    model: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The tree of an iteration of BERT-Large at mixed precision, with values set by dotted path.

    Collectives are rings with the library's rate and latency; those measured by size have tests of their own.
    """
    root: dict[str, Any] = {
        "system": shipped("system")[system],
        "model": dict(model or BERT),
        "run": {"mode": "training", "batch": 4, "sequence_length": 128, "precision": "mixed"},
        "parallel": {"tp": 1, "pp": 1, "dp": 1},
        "optimizer": shipped("optimizer")[optimizer],
        "kernels": shipped("kernels")[kernels],
    }
    node = root["system"].get("node") or {}
    if (node.get("library") or {}).pop("protocols", None):
        for part in ("topology", "link_bytes_per_s"):  # links would carry what no protocols describe
            node.pop(part, None)
    for path, value in (overrides or {}).items():
        set_path(root, path, value)
    return root


def step(overrides: Mapping[str, Any] | None = None, **options: Any) -> StepDesign:
    """A validated design; arguments as for `tree`."""
    return BACKEND.design(tree(overrides, **options))


def made(overrides: Mapping[str, Any] | None = None, **options: Any) -> Iteration:
    """The iteration of such a design."""
    return iteration(step(overrides, **options))


def metrics(overrides: Mapping[str, Any] | None = None, **options: Any) -> dict[str, float]:
    """Metrics of one design that breaks no rule."""
    (row,) = evaluated([step(overrides, **options)])
    return row


def evaluated(designs: list[Any]) -> list[dict[str, float]]:
    """Metrics of designs that break no rule, each a batch of its own."""
    results = [column[0] for column in BACKEND.evaluate([Batch(design) for design in designs])]
    assert [result.reason for result in results] == [""] * len(designs)
    return [dict(result.metrics) for result in results]


def gridded(design: BaseModel, axes: Mapping[str, Any]) -> Results:
    """A grid at once. axes: dotted path -> values."""
    arrays: dict[str, NDArray[Any]] = {path: np.asarray(values) for path, values in axes.items()}
    (columns,) = BACKEND.evaluate([Batch(Batch(design, arrays).at(0), arrays)])
    return columns


def block(built: Iteration, name: str = "layer") -> ModelBlock:
    """One of its blocks."""
    return next(part for part in built.passes.blocks if part.name == name)


def laid(built: Iteration, name: str, *, forward: bool | None = None) -> float:
    """FLOP of the products of one block, of both passes or of one."""
    parts = [part for part in built.passes.parts if part.block.name == name and part.over is None]
    chosen = [part for part in parts if forward is None or part.forward == forward]
    return float(sum(part.spent.flop * np.asarray(part.op.count) for part in chosen))


@st.composite
def shapes(draw: st.DrawFn) -> dict[str, Any]:
    """A standard transformer and how it is run: as many heads of keys as of queries, ffn of 4 H, tp that divides."""
    tp = draw(st.sampled_from([1, 2, 3, 4, 8]))
    heads, width = tp * draw(st.integers(1, 6)), draw(st.sampled_from([32, 64, 80, 128]))
    return {
        **SHAPES,
        "model.layers": draw(st.integers(1, 5)),
        "model.heads": heads,
        "model.hidden": heads * width,
        "model.vocab": 0,
        "run.batch": draw(st.integers(1, 8)),
        "run.sequence_length": draw(st.integers(1, 700)),
        "parallel.tp": tp,
    }


@st.composite
def runs(draw: st.DrawFn) -> dict[str, Any]:
    """How a model of 12 heads and 4 layers is run, spread, updated and computed; perhaps with the ends of a model."""
    encoder = draw(st.booleans())
    return {
        **SHAPES,
        **NETWORK,
        "model.heads": 12,
        "model.kv_heads": draw(st.sampled_from([None, 12, 4, 1])),
        "model.hidden": draw(st.sampled_from([192, 768, 3072])),
        "model.layers": 4,
        "model.decoder_layers": 4 if encoder else 0,
        "model.gated": draw(st.booleans()),
        "model.vocab": draw(st.sampled_from([0, 1000, 50000])),
        "model.tied": draw(st.booleans()),
        "run.batch": draw(st.integers(1, 8)),
        "run.sequence_length": draw(st.sampled_from([1, 64, 512])),
        "run.micro_batches": draw(st.integers(1, 3)),
        "run.precision": draw(st.sampled_from(["fp32", "mixed"])),
        "run.recompute": draw(st.sampled_from(["none", "attention", "all"])),
        "parallel.tp": draw(st.sampled_from([1, 2, 4, 12])),
        "parallel.dp": draw(st.sampled_from([1, 2, 8, 64])),
        "parallel.zero": draw(st.integers(0, 1)),
        "parallel.sequence_parallel": draw(st.booleans()),
        "system.node.library.bytes_per_s": draw(st.sampled_from([1e9, 200e9, 1e13])),
    }


KERNELS = st.sampled_from(sorted(shipped("kernels")))
OPTIMIZERS = st.sampled_from(sorted(shipped("optimizer")))


def single(design: BaseModel, axes: Mapping[str, Any]) -> Iterator[dict[str, float]]:
    """Metrics of the designs of a grid one by one."""
    arrays = {path: np.asarray(values) for path, values in axes.items()}
    yield from evaluated(list(Batch(Batch(design, arrays).at(0), arrays).designs()))
