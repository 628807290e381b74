"""LeNet in PyTorch on a CPU, for comparison, and scikit-learn's digits to train it on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dse_ptx.lenet import LRN, SHAPES

# cuDNN's sample reads MNIST, whose images have this side; the digits of scikit-learn need no download
_SIDE = 28
_BATCH, _EPOCHS, _RATE, _MOMENTUM = 64, 3, 0.02, 0.9


def digits() -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    """Images (1797, 1, 28, 28) and labels: scikit-learn's 8 x 8 digits (UCI, Alpaydin and Kaynak, 1998), enlarged."""
    import torch
    from sklearn.datasets import load_digits

    loaded = load_digits()
    # pixels are 0 to 16 there
    small = torch.tensor(loaded.images[:, None] / 16, dtype=torch.float32)
    large = torch.nn.functional.interpolate(small, size=(_SIDE, _SIDE), mode="bilinear", align_corners=False)
    return large.numpy(), loaded.target.astype(np.int32)


def logits(weights: Mapping[str, Any], images: Any) -> Any:
    """Logits by PyTorch, of tensors."""
    from torch.nn import functional

    size, alpha, beta = LRN
    # each pooling takes the maximum of 2 x 2, without a rectifier after a convolution, as the sample has it
    first = functional.max_pool2d(functional.conv2d(images, weights["conv1.weight"], weights["conv1.bias"]), 2)
    second = functional.max_pool2d(functional.conv2d(first, weights["conv2.weight"], weights["conv2.bias"]), 2)
    hidden = functional.relu(functional.linear(second.flatten(1), weights["fc1.weight"], weights["fc1.bias"]))
    # the normalisation runs across features, so they stand on the axis of channels
    normal = functional.local_response_norm(hidden[:, :, None], size, alpha, beta, 1.0)[:, :, 0]
    return functional.linear(normal, weights["fc2.weight"], weights["fc2.bias"])


def initial(seed: int = 0) -> dict[str, Any]:
    """Weights as PyTorch's layers draw them: uniform, within one over the root of their inputs."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in SHAPES.items():
        # a bias is drawn within the bound of its layer's weights, by their fan-in
        inputs = float(np.prod(SHAPES[name.replace("bias", "weight")][1:]))
        draw = torch.rand(shape, generator=generator) * 2 - 1
        weights[name] = (draw / inputs**0.5).requires_grad_()
    return weights


def step(weights: Mapping[str, Any], images: Any, labels: Any, rate: float) -> float:
    """One step of gradient descent on the mean cross entropy, in place. Returns the loss before it."""
    import torch

    loss = torch.nn.functional.cross_entropy(logits(weights, images), labels)
    # no optimiser: a plain step, which `LeNet.train` repeats on the simulated device
    gradients = torch.autograd.grad(loss, list(weights.values()))
    with torch.no_grad():
        for weight, gradient in zip(weights.values(), gradients, strict=True):
            weight.sub_(rate * gradient)
    return float(loss.detach())


def train_weights(images: NDArray[np.float32], labels: NDArray[np.int32], seed: int = 0) -> dict[str, Any]:
    """Weights after three rounds over the digits, by PyTorch on a CPU."""
    import torch

    weights = initial(seed)
    optimiser = torch.optim.SGD(list(weights.values()), lr=_RATE, momentum=_MOMENTUM)
    # one generator orders the batches, so that a seed gives the same weights
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.from_numpy(images), torch.from_numpy(labels.astype(np.int64))
    for _ in range(_EPOCHS):
        for batch in torch.randperm(len(x), generator=generator).split(_BATCH):
            optimiser.zero_grad()
            torch.nn.functional.cross_entropy(logits(weights, x[batch]), y[batch]).backward()
            optimiser.step()
    return weights


def arrays(weights: Mapping[str, Any]) -> dict[str, NDArray[np.float32]]:
    """Copies of weights as arrays."""
    return {name: weight.detach().numpy().copy() for name, weight in weights.items()}
