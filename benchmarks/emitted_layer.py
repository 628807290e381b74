"""A transformer layer trained with emitted linear layers on 8 ranks, and by one process with all weights."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_RANKS = 8
_HIDDEN, _FFN, _HEADS, _TOKENS = 64, 224, 8, 24  # Llama 3 8B's layer, 1/64 as wide
_SHAPES = {"qkv": (_HIDDEN, 3 * _HIDDEN), "out": (_HIDDEN, _HIDDEN), "up": (_HIDDEN, 2 * _FFN), "down": (_FFN, _HIDDEN)}
_BY_COLUMNS = {"qkv": 3, "up": 2}
"""Layers that gather the tokens -> matrices next to each other in their weights; the others scatter sums."""
_SCHEDULE = "hetero_fused_1d num_chunks=2"
_RATE = 1.0


@dataclass(frozen=True)
class Layer:
    """A layer of `heads` attention heads. linear: its linear layers by name; weights: of these, that are trained.

    group: whose ranks each have a part of the tokens, None for a single process.
    """

    linear: Mapping[str, Callable[[Any], Any]]
    weights: Sequence[Any]
    heads: int
    group: Any = None

    def train(self, x: Any, target: Any, steps: int) -> list[float]:
        """Losses of all ranks before each step of gradient descent."""
        import torch
        import torch.distributed as dist

        history = []
        for _ in range(steps):
            loss = ((self._forward(x) - target) ** 2).sum() / (_TOKENS * _HIDDEN)
            gradients = torch.autograd.grad(loss, self.weights)
            with torch.no_grad():
                for weight, gradient in zip(self.weights, gradients, strict=True):
                    weight.sub_(_RATE * gradient)
            total = loss.detach().clone()
            if self.group is not None:
                dist.all_reduce(total, group=self.group)
            history.append(float(total))
        return history

    def _forward(self, x: Any) -> Any:
        """Attention and a gated feed-forward network, each after an RMS norm and with a residual."""
        import torch

        query, key, value = self.linear["qkv"](_norm(x)).chunk(3, dim=1)
        parts = [part.view(len(part), self.heads, -1).transpose(0, 1) for part in (query, key, value)]
        attended = torch.nn.functional.scaled_dot_product_attention(*parts, is_causal=True).transpose(0, 1).flatten(1)
        x = x + self.linear["out"](attended)
        gate, up = self.linear["up"](_norm(x)).chunk(2, dim=1)
        return x + self.linear["down"](torch.nn.functional.silu(gate) * up)


def losses(rank: int, groups: Mapping[int, Any], steps: int) -> tuple[list[float], list[float]]:
    """Losses of each step of a layer of emitted operators, and of serial execution; of the same weights and data."""
    import torch

    torch.set_default_dtype(torch.float64)
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(shape, generator=generator) * shape[0] ** -0.5 for name, shape in _SHAPES.items()}
    tokens, target = (torch.randn(_TOKENS, _HIDDEN, generator=generator) for _ in range(2))
    emitted = _emitted_layer(weights, rank, groups[_RANKS])
    own_tokens, own_target = (part.tensor_split(_RANKS)[rank] for part in (tokens, target))
    serial = {name: torch.nn.Parameter(weight.clone()) for name, weight in weights.items()}
    linear = {name: functools.partial(torch.matmul, other=weight) for name, weight in serial.items()}
    whole = Layer(linear, list(serial.values()), _HEADS)
    return emitted.train(own_tokens, own_target, steps), whole.train(tokens, target, steps)


def _emitted_layer(weights: Mapping[str, Any], rank: int, group: Any) -> Layer:
    """The layer of a rank, with its part of the weights."""
    package, linear, own = _package("all_gather", "reduce_scatter"), dict[str, Any](), list[Any]()
    for name, weight in weights.items():
        if name in _BY_COLUMNS:
            part = _columns(weight, _BY_COLUMNS[name], rank)
            module = package.ColumnParallelLinear(*part.shape, group)
            linear[name] = functools.partial(module, tokens=_TOKENS)
        else:
            part = weight.chunk(_RANKS, dim=0)[rank]
            linear[name] = module = package.RowParallelLinear(*part.shape, group)
        module.weight.data.copy_(part)
        own.append(module.weight)
    return Layer(linear, own, _HEADS // _RANKS, group)


def _columns(weight: Any, matrices: int, rank: int) -> Any:
    """Columns of a rank: of each of the matrices that are next to each other in a weight."""
    import torch

    return torch.cat([part.chunk(_RANKS, dim=1)[rank] for part in weight.chunk(matrices, dim=1)], dim=1)


def expert_errors(rank: int, groups: Mapping[int, Any], tokens: int) -> list[float]:
    """Largest relative differences of output and gradients of two layers with all-to-alls from those of one process.

    tokens: of a block that a rank sends to another.
    """
    import torch

    torch.set_default_dtype(torch.float64)
    generator, ranks = torch.Generator().manual_seed(0), _RANKS
    xs, goals = (torch.randn(ranks, ranks * tokens, 6, generator=generator) for _ in range(2))
    weights = [torch.randn(shape, generator=generator) for shape in ((ranks, 6, 10), (ranks, 10, 6))]
    package, x = _package("all_to_all", "all_to_all"), xs[rank].clone().requires_grad_()
    layers = [
        kind(*weight.shape[1:], groups[ranks])
        for kind, weight in zip((package.ColumnParallelLinear, package.RowParallelLinear), weights, strict=True)
    ]
    for layer, weight in zip(layers, weights, strict=True):
        layer.weight.data.copy_(weight[rank])
    y = layers[1](torch.relu(layers[0](x, ranks * tokens)))
    ours = [y, *torch.autograd.grad((y * goals[rank]).sum(), [x, *(layer.weight for layer in layers)])]
    inputs = [tensor.clone().requires_grad_() for tensor in (xs, *weights)]
    by_expert = inputs[0].view(ranks, ranks, tokens, 6).transpose(0, 1).reshape(ranks, ranks * tokens, 6)
    results = torch.bmm(torch.relu(torch.bmm(by_expert, inputs[1])), inputs[2])
    whole = results.view(ranks, ranks, tokens, 6).transpose(0, 1).reshape(ranks, ranks * tokens, 6)
    theirs = [whole, *torch.autograd.grad((whole * goals).sum(), inputs)]
    return [
        ((mine - wanted[rank]).abs().max() / wanted[rank].abs().max()).item()
        for mine, wanted in zip(ours, theirs, strict=True)
    ]


def _package(before: str, after: str) -> Any:
    """The emitted `linear` of a schedule, with its operators. before, after: patterns on either side of a GEMM."""
    from dse_emit.table import table_of
    from dse_emit.writing import Sizes, package
    from simulators.steps.overlap.sites import read_schedule

    schedule = read_schedule(_SCHEDULE)
    tables = table_of(schedule, before, _RANKS), table_of(schedule, after, _RANKS, after=True)
    texts = package(*tables, Sizes(), "a test")
    root = types.ModuleType("emitted")
    root.__path__ = []
    sys.modules["emitted"] = root
    for name in ("check", "transport", "gather_gemm", "gemm_reduce", "linear"):
        module = types.ModuleType(f"emitted.{name}")
        sys.modules[module.__name__] = module
        setattr(root, name, module)
        exec(compile(texts[f"{name}.py"], f"{name}.py", "exec"), module.__dict__)
    return sys.modules["emitted.linear"]


def _norm(x: Any) -> Any:
    return x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()
