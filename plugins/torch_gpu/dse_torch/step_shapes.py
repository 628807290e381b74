"""Shapes of every operator of a real training step of BERT, as PyTorch issues them, beside those of the closed form.

    python -m dse_torch.step_shapes > plugins/torch_gpu/dse_torch/conf/data/bert_step.csv
    python -m dse_torch.step_shapes compare

The first runs one step (forward, backward, AdamW) of two layers of BERT-Large on the CPU and prints a row for each
operator that is issued: shapes do not depend on the device. `study=bert` counts the same products by a formula
(`formula_gemms`), but for those of Q, K and V, which it has in one. The second prints, by class of operators, kernels
and bytes of the shipped table beside the formula's, whose passes are those of a framework without fused kernels.
"""

from __future__ import annotations

import csv
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dse.config.compose import request
from simulators.steps.backend import StepBackend
from simulators.steps.design import StepDesign
from simulators.steps.operators.work import Product, Stream
from simulators.steps.run.build import iteration
from simulators.workloads.model_zoo import model_tree

TABLE = Path(__file__).parent / "conf" / "data" / "bert_step.csv"
"""The shipped table: a row for each phase, operator and set of sizes."""
LAYERS, BATCH, LENGTH = 2, 4, 128
"""Of the step that was recorded; all else is BERT-Large's."""
_FIELDS = ("phase", "operator", "batch", "m", "n", "k", "elements", "times")
_GEMMS = ("mm", "addmm", "bmm", "baddbmm")
# operators that launch no kernel: they change how a tensor is looked at
_VIEWS = (
    "view",
    "t",
    "transpose",
    "permute",
    "expand",
    "_unsafe_view",
    "unsqueeze",
    "detach",
    "select",
    "slice",
    "alias",
)
_ALLOCATIONS = ("empty_like", "ones_like", "slice_backward")
_FORMULA = {"softmax": "softmax", "activation": "activation", "loss": "loss", "norm": "norm", "lookup": "embedding"}
"""Part of an operator's name in the closed form -> class; its others are those of the embedding's gradient."""
Gemm = tuple[int, int, int, int]
"""batch, the smaller and the larger of m and n, k."""


def record(model: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows of `_FIELDS` of one step on the CPU. elements: of the outputs; m, n, k: of GEMMs, else 0.

    model: its `hidden`, `ffn`, `heads`, `vocab` and `positions`.
    """
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    counts: Counter[tuple[Any, ...]] = Counter()
    phase = "forward"

    class Recorder(TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            name = func.overloadpacket.__name__
            if name not in _VIEWS:
                counts[phase, name, *_sizes(name, args), _elements(out)] += 1
            return out

    torch.manual_seed(0)
    bert = _bert(torch, model)
    # foreach joins parameters, which hides the shapes of each
    optimizer = torch.optim.AdamW(bert.parameters(), foreach=False)
    tokens = torch.randint(model["vocab"], (BATCH, LENGTH))
    with Recorder():
        loss = bert(tokens)
        phase = "backward"
        loss.backward()
        phase = "optimizer"
        optimizer.step()
    return [dict(zip(_FIELDS, (*key, count), strict=True)) for key, count in counts.items()]


def _sizes(name: str, args: Sequence[Any]) -> Gemm:
    """batch, m, n and k of a GEMM; zeros of other operators."""
    if name not in _GEMMS:
        return 0, 0, 0, 0
    # addmm and baddbmm have the summand in front
    left, right = args[-2:] if name in ("mm", "bmm") else args[1:3]
    batch = left.shape[0] if left.dim() == 3 else 1
    return batch, left.shape[-2], right.shape[-1], left.shape[-1]


def _elements(out: Any) -> int:
    tensors = out if isinstance(out, (tuple, list)) else [out]
    return sum(int(tensor.numel()) for tensor in tensors if hasattr(tensor, "numel"))


def _bert(torch: Any, model: Mapping[str, Any]) -> Any:
    """Embedding, layers (attention, feed-forward; dropout, residual, LayerNorm), tied output of every token."""
    nn, functional = torch.nn, torch.nn.functional
    hidden, ffn, heads, vocab = (model[name] for name in ("hidden", "ffn", "heads", "vocab"))

    class Layer(nn.Module):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.query, self.key, self.value, self.out = (nn.Linear(hidden, hidden) for _ in range(4))
            self.up, self.down = nn.Linear(hidden, ffn), nn.Linear(ffn, hidden)
            self.norms, self.drop = nn.ModuleList([nn.LayerNorm(hidden) for _ in range(2)]), nn.Dropout(0.1)

        def forward(self, x: Any) -> Any:
            split = (BATCH, LENGTH, heads, hidden // heads)
            q, k, v = (part(x).view(split).transpose(1, 2) for part in (self.query, self.key, self.value))
            # written out: a fused attention would be one operator
            scores = (q @ k.transpose(-1, -2)) / (hidden // heads) ** 0.5
            attended = (self.drop(scores.softmax(-1)) @ v).transpose(1, 2).reshape(BATCH, LENGTH, hidden)
            x = self.norms[0](x + self.drop(self.out(attended)))
            return self.norms[1](x + self.drop(self.down(functional.gelu(self.up(x)))))

    class Bert(nn.Module):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.words, self.places = nn.Embedding(vocab, hidden), nn.Embedding(model["positions"], hidden)
            self.layers, self.norm = nn.Sequential(*(Layer() for _ in range(LAYERS))), nn.LayerNorm(hidden)

        def forward(self, tokens: Any) -> Any:
            x = self.norm(self.words(tokens) + self.places.weight[:LENGTH])
            # the output shares its weights with the embedding
            logits = functional.linear(self.layers(x), self.words.weight)
            return functional.cross_entropy(logits.view(-1, vocab), tokens.view(-1))

    return Bert()


def shipped() -> list[dict[str, str]]:
    """Rows of the shipped table."""
    with TABLE.open(encoding="utf-8") as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))


def recorded_gemms(rows: Sequence[Mapping[str, Any]]) -> Counter[Gemm]:
    """Count each GEMM in rows of a step."""
    counts: Counter[Gemm] = Counter()
    for row in rows:
        batch, m, n, k = (int(row[name]) for name in ("batch", "m", "n", "k"))
        if batch:
            # a product and its transpose are the same work
            counts[batch, min(m, n), max(m, n), k] += int(row["times"])
    return counts


def formula_gemms(design: StepDesign) -> Counter[Gemm]:
    """Count each GEMM in an iteration by the closed form."""
    counts: Counter[Gemm] = Counter()
    for part in iteration(design).passes.parts:
        work = part.op.work
        if isinstance(work, Product):
            batch, m, n, k = (round(float(size)) for size in (work.batch, work.m, work.n, work.k))  # type: ignore[arg-type]
            counts[batch, min(m, n), max(m, n), k] += round(float(part.times))
    return counts


def closed_form(**model: int) -> StepDesign:
    """The step of `study=bert` of the sizes that were recorded, with other values of the model."""
    words = [f"model.{name}={value}" for name, value in {**model, "layers": LAYERS}.items()]
    tree = request(["study=bert", *words, f"run.batch={BATCH}", f"run.sequence_length={LENGTH}"]).tree
    backend = StepBackend()
    (only,) = backend.scenarios(tree).values()
    return backend.design(only)


def _class_of(name: str, elements: int, model: Mapping[str, Any]) -> str:
    """Class of an operator that is no GEMM, by its name or by how large its output is."""
    names = {"gelu": "activation", "_log_softmax": "loss", "nll": "loss", "embedding": "embedding", "sum": "biases"}
    for part, kind in {**names, "clone": "layouts"}.items():
        if name.startswith(part):
            return kind
    # as large as the table of words: its gradient
    if elements == model["vocab"] * model["hidden"]:
        return "embedding"
    return "softmax" if elements == model["heads"] * BATCH * LENGTH**2 else "norm"  # with dropout and residuals


def passes(rows: Sequence[Mapping[str, Any]], design: StepDesign, model: Mapping[str, Any]) -> dict[str, list[float]]:
    """Class -> kernels and bytes written as recorded, kernels and bytes read and written of the closed form.

    Of operators that are no GEMMs, forward and backward.
    """
    by_class: dict[str, list[float]] = {}
    for row in rows:
        elements, times, name = int(row["elements"]), int(row["times"]), str(row["operator"])
        if row["phase"] != "optimizer" and name not in (*_GEMMS, *_ALLOCATIONS):
            line = by_class.setdefault(_class_of(name, elements, model), [0.0] * 4)
            # fp32: 4 bytes
            line[0], line[1] = line[0] + times, line[1] + 4.0 * times * elements
    for part in iteration(design).passes.parts:
        work, count = part.op.work, float(part.times)
        if isinstance(work, Stream):
            kind = next((kind for name, kind in _FORMULA.items() if name in part.op.name), "embedding")
            line = by_class.setdefault(kind, [0.0] * 4)
            line[2], line[3] = line[2] + count * float(work.kernels), line[3] + count * float(work.bytes)  # type: ignore[arg-type]
    return by_class


def compare() -> None:
    """Print kernels and bytes by class as recorded beside the closed form's, products by their FLOP."""
    from rich.table import Table

    from dse.results import report

    design, rows, model = closed_form(), shipped(), model_tree("bert_large")
    heads = ("kernels recorded", "written [MB]", "kernels by formula", "read and written [MB]")
    table = Table("class", *heads, title=f"a step of {LAYERS} layers of BERT-Large, {BATCH} x {LENGTH} tokens, fp32")
    counts = recorded_gemms(rows).total(), formula_gemms(design).total()
    table.add_row("products", str(counts[0]), "", f"{counts[1]} (Q, K and V in one)", "")
    for kind, (kernels, written, formula, moved) in sorted(passes(rows, design, model).items()):
        table.add_row(kind, f"{kernels:.0f}", f"{written / 1e6:.0f}", f"{formula:.0f}", f"{moved / 1e6:.0f}")
    report.console().print(table)


def main(words: Sequence[str] = ()) -> int:
    """Record a step of BERT-Large's sizes and print the table; with the word `compare`, print what was recorded."""
    if list(words) == ["compare"]:
        compare()
        return 0
    if words:
        print(f"{' '.join(words)}: is no way to use this; leave it out, or use compare", file=sys.stderr)
        return 2
    import torch

    rows = record(model_tree("bert_large"))
    of = f"{BATCH} sequences of {LENGTH} tokens, fp32, AdamW without foreach"
    print(f"# one step of {LAYERS} layers of BERT-Large, {of}")
    print(f"# recorded by PyTorch {torch.__version__} on a CPU: python -m dse_torch.step_shapes (measured; CC0-1.0)")
    writer = csv.DictWriter(sys.stdout, _FIELDS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
