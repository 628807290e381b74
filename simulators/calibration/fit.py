"""Fitting efficiency constants: which rows are looked at, and what is fitted to them.

Rows are chosen by shape alone. All-reduces: the smallest payload, which latency decides, and the largest, which
bandwidth decides, of the fewest GPUs, the most in a server, and the most of all. Convolutions: evenly spaced in the
order of filter area, stride and FLOP. GEMMs and recurrent layers: medoids of k-means over features of the shape, begun
at the row nearest to the mean and then each time at the row farthest from those taken, so that no seed and no luck
takes part. A row stands for its cluster, and weighs as the root of its size. Constants are fitted on the logarithm of
times, robustly (pseudo-Huber), with weak log-normal priors, so that what few rows do not say stays near what such
devices have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simulators.calibration.measurements import Rows
from simulators.calibration.rows import allreduce, on_device
from simulators.costs.convolution import Layer
from simulators.hardware.device import Device, Efficiency, Server

Floats = NDArray[np.float64]

MOST: Mapping[str, int] = {"gemm": 20, "conv": 6, "recurrent": 6, "allreduce": 6}
"""Rows of a kind that are fitted on, at most."""
FEWEST: Mapping[str, int] = {"gemm": 8, "conv": 1, "recurrent": 3, "allreduce": 3}
"""Rows of a kind that a table must have, if it has any."""

_SCALE: Mapping[str, float] = {
    "gemm": 0.05,
    "conv": 0.25,
    "recurrent": 0.1,
    "allreduce": 0.03,
}  # of the logarithm: beyond, linear
_LAYOUT = 2.0  # doublings of a size that a layout is as far as
_FAR = {"n": 1024.0, "k": 16384.0}  # sizes of a GEMM beyond which time goes with FLOP: one is as good as another
_STARTS = 3
_CALLS = 60


Chosen = tuple[Rows, Floats]
"""Rows to fit on, and their weights."""


@dataclass(frozen=True)
class Prior:
    """Of a constant: its middle, the width of its logarithm, and bounds."""

    middle: float
    width: float
    low: float
    high: float


PRIORS: Mapping[str, Prior] = {
    "launch_s": Prior(6e-6, 1.0, 0.5e-6, 200e-6),
    "compute": Prior(0.85, 0.3, 0.3, 1.2),
    "feed": Prior(1.0, 1.0, 0.02, 10.0),
    "transposed": Prior(0.1, 1.0, 0.001, 3.0),
    "narrow": Prior(1.5, 0.7, 1.0, 8.0),
    "latency_s": Prior(1e-7, 1.0, 2e-9, 2e-6),
}
"""Of the constants of a device; the last is the recurrent layers'."""
TYPICAL = Efficiency(**{name: prior.middle for name, prior in PRIORS.items()})
"""Constants before anything was measured."""
_SERVER: Mapping[str, Prior] = {
    "latency_s": Prior(10e-6, 1.0, 0.1e-6, 1e-3),
    "bytes_per_s": Prior(1e10, 2.0, 1e8, 1e13),
    "sharing": Prior(0.03, 1.5, 1e-4, 1.0),
    "network_bytes_per_s": Prior(5e9, 2.0, 1e7, 1e13),
}


@dataclass(frozen=True)
class Fitted:
    """Constants by precision, of the server (None: no rows), and names of the rows: precision -> kind -> names."""

    efficiency: Mapping[str, Efficiency]
    server: Server | None
    fitted_on: Mapping[str, Mapping[str, tuple[str, ...]]]


def fit(device: Device, rows: Sequence[Rows], *, num_gpus: int = 8) -> Fitted:
    """The constants of a device from some of its measured rows. num_gpus: in a server."""
    chosen = {(one.precision, one.kind): _chosen(one, num_gpus) for one in rows}
    names: dict[str, dict[str, tuple[str, ...]]] = {}
    for (precision, kind), (own, _) in chosen.items():
        names.setdefault(precision, {})[kind] = own.names
    efficiency = {}
    for precision in dict.fromkeys(precision for precision, kind in chosen if kind == "gemm"):
        products = [chosen[precision, kind] for kind in ("gemm", "conv") if (precision, kind) in chosen]
        found = _fit_kernels(device, products, {})
        if (precision, "recurrent") in chosen:
            found = _fit_kernels(device, [chosen[precision, "recurrent"]], found)
        efficiency[precision] = TYPICAL.model_copy(update=found)
    reduced = [one for (_, kind), one in chosen.items() if kind == "allreduce"]
    server = _fit_server(num_gpus, reduced[0]) if reduced else None
    return Fitted(efficiency, server, names)


def _fit_kernels(device: Device, chosen: Sequence[Chosen], known: Mapping[str, float]) -> dict[str, float]:
    """Five constants from GEMMs and convolutions; the sixth from recurrent layers, the five being `known`."""
    free = {name: prior for name, prior in PRIORS.items() if (name == "latency_s") == bool(known)}

    def predict(values: Mapping[str, float], rows: Rows) -> Floats:
        return on_device(device, TYPICAL.model_copy(update={**known, **values}), rows).seconds

    return {**known, **_least(free, predict, chosen)}


def _fit_server(num_gpus: int, chosen: Chosen) -> Server:
    """Latency, bandwidth, sharing, and where rings leave the server the bandwidth of the network."""
    beyond = bool((chosen[0].shape["gpus"] > num_gpus).any())
    free = {name: prior for name, prior in _SERVER.items() if beyond or not name.startswith("network")}
    guess = Server(num_gpus=num_gpus, bytes_per_s=1e9, latency_s=1e-6)

    def predict(values: Mapping[str, float], rows: Rows) -> Floats:
        return allreduce(guess.model_copy(update=dict(values)), rows).seconds

    return guess.model_copy(update=_least(free, predict, [chosen]))


def _least(
    free: Mapping[str, Prior], predict: Callable[[Mapping[str, float], Rows], Floats], chosen: Sequence[Chosen]
) -> dict[str, float]:
    """The constants that predict measured times best."""
    from scipy.optimize import least_squares

    middle, width, low, high = np.array([(p.middle, p.width, p.low, p.high) for p in free.values()]).T
    middle, low, high = np.log(middle), np.log(low), np.log(high)

    def residuals(logs: Floats) -> Floats:
        values = dict(zip(free, np.exp(logs).tolist(), strict=True))
        parts = [_robust(predict(values, rows), rows, weights) for rows, weights in chosen]
        return np.concatenate([*parts, (logs - middle) / width])

    random, best = np.random.default_rng(0), None
    for start in range(_STARTS):
        guess = middle + (0.7 * random.standard_normal(len(middle)) if start else 0.0)
        inside = np.clip(guess, low + 0.01, high - 0.01)
        found = least_squares(residuals, inside, bounds=(low, high), diff_step=1e-3, max_nfev=_CALLS)
        best = found if best is None or found.cost < best.cost else best
    assert best is not None
    return dict(zip(free, np.exp(best.x).tolist(), strict=True))


def _robust(predicted: Floats, rows: Rows, weights: Floats) -> Floats:
    """Roots of the pseudo-Huber loss of the logarithms of predicted over measured times, each pass one time."""
    known = np.isfinite(rows.seconds)
    weight = np.broadcast_to((weights / weights.mean())[:, None], known.shape)[known]
    error = np.log(predicted[known] / rows.seconds[known]) / _SCALE[rows.kind]
    return np.asarray(np.sign(error) * np.sqrt(2 * weight * (np.sqrt(1 + error**2) - 1)))


def _chosen(rows: Rows, num_gpus: int) -> Chosen:
    """The rows to fit on."""
    if rows.kind in ("allreduce", "conv"):
        ends = rows.kind == "allreduce"
        places = _ends(rows.shape["floats"], rows.shape["gpus"], num_gpus) if ends else _spread(rows.shape)
        return rows.take(places), np.ones(len(places))
    places, weights = medoids(_features(rows), MOST[rows.kind])
    return rows.take(places), weights


def _ends(payload: Floats, gpus: Floats, num_gpus: int) -> NDArray[np.int64]:
    """The smallest and the largest payload of the fewest GPUs, the most in a server and the most of all."""
    found = set()
    for number in {gpus.min(), gpus[gpus <= num_gpus].max(initial=gpus.min()), gpus.max()}:
        own = np.flatnonzero(gpus == number)
        found |= {int(own[payload[own].argmin()]), int(own[payload[own].argmax()])}
    return np.array(sorted(found))


def _spread(shape: Mapping[str, Floats]) -> NDArray[np.int64]:
    """Convolutions evenly spaced in the order of filter area, stride and FLOP."""
    flop = Layer.of(shape, 1.0).flop
    order = np.lexsort((flop, shape["stride_v"] * shape["stride_h"], shape["r"] * shape["s"]))
    count = min(MOST["conv"], len(order))
    places = ((np.arange(count) + 0.5) * len(order) / count).astype(int)
    return np.sort(order[places])


def _features(rows: Rows) -> Floats:
    """Shapes as points [R, features]: of GEMMs in doublings, of recurrent layers scaled to what the table holds."""
    shape = rows.shape
    if rows.kind == "gemm":
        sizes = [np.log2(np.minimum(shape[name], _FAR.get(name, np.inf))) for name in ("m", "n", "k")]
        return np.column_stack([*sizes, _LAYOUT * shape["ta"], _LAYOUT * shape["tb"]])
    points = np.column_stack([np.log2(shape[name]) for name in ("gates", "hidden", "n", "t")])
    scaled: Floats = (points - points.min(axis=0)) / np.maximum(np.ptp(points, axis=0), 1e-12)
    return scaled


def medoids(points: Floats, count: int) -> tuple[NDArray[np.int64], Floats]:
    """At most `count` of R points [R, features] that stand for all, in order, and roots of their clusters' sizes."""
    taken = [int(((points - points.mean(axis=0)) ** 2).sum(axis=1).argmin())]
    while len(taken) < min(count, len(points)):
        taken.append(int(_squares(points, points[taken]).min(axis=1).argmax()))
    centres = points[taken]
    for _ in range(200):
        label = _squares(points, centres).argmin(axis=1)
        own = [points[label == place] for place in range(len(centres))]
        moved = np.array([part.mean(axis=0) if len(part) else centres[place] for place, part in enumerate(own)])
        if np.array_equal(moved, centres):
            break
        centres = moved
    squares = _squares(points, centres)
    sizes = np.bincount(squares.argmin(axis=1), minlength=len(centres))
    chosen = {int(squares[:, place].argmin()): float(np.sqrt(sizes[place])) for place in np.flatnonzero(sizes)}
    places = np.array(sorted(chosen))
    return places, np.array([chosen[int(place)] for place in places])


def _squares(points: Floats, centres: Floats) -> Floats:
    found: Floats = ((points[:, None, :] - centres[None, :, :]) ** 2).sum(axis=2)
    return found
