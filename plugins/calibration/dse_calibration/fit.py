"""Fit of efficiency constants: the choice of rows, and the constants fitted to them.

Rows are chosen by shape alone. All-reduces: the smallest payload, bound by latency, and the largest, bound by
bandwidth, of the fewest GPUs, the most in a server, and the most of all. Convolutions: evenly spaced in the order of
filter area, stride and FLOP. GEMMs and recurrent layers: medoids of k-means over features of the shape, begun at the
row nearest to the mean and then repeatedly at the row farthest from those chosen, so that the choice is deterministic.
A row stands for its cluster, with the root of the cluster's size as its weight. Constants are fitted on the logarithm
of times, robustly (pseudo-Huber), with weak log-normal priors, so that constants which few rows determine stay near
typical values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dse_calibration.collectives import (
    CALLED_BY_HOSTS,
    COLLECTIVE_ROWS,
    FEWEST_COLLECTIVES,
    MOST_COLLECTIVES,
    constants_of,
    cost_of_rows,
    evenly_spaced,
)
from dse_calibration.measurements import STREAM_KINDS, MeasuredRows
from dse_calibration.rows import allreduce, on_device
from simulators.costs.convolution import Layer
from simulators.costs.streaming import streamed
from simulators.hardware.device import Device
from simulators.hardware.network import CollectiveLibrary, Node, Protocols, SwitchRate
from simulators.hardware.parts import Efficiency, StreamingRates

Floats = NDArray[np.float64]

MOST: Mapping[str, int] = {
    **{"gemm": 20, "conv": 6, "recurrent": 6, "allreduce": 6},
    **dict.fromkeys(STREAM_KINDS, 12),
    **{kind: MOST_COLLECTIVES[way] for kind, (_, way) in COLLECTIVE_ROWS.items()},
}
"""Largest number of rows of a kind that are fitted on."""
FEWEST: Mapping[str, int] = {
    **{"gemm": 8, "conv": 1, "recurrent": 3, "allreduce": 3},
    **dict.fromkeys(STREAM_KINDS, 3),
    **{kind: FEWEST_COLLECTIVES[way] for kind, (_, way) in COLLECTIVE_ROWS.items()},
}
"""Smallest number of rows of a kind in a table that has any."""

_SCALE: Mapping[str, float] = {
    "gemm": 0.05,
    "conv": 0.25,
    "recurrent": 0.1,
    "allreduce": 0.03,
    **dict.fromkeys((*STREAM_KINDS, *COLLECTIVE_ROWS), 0.05),
}  # of the logarithm: the loss is linear beyond
_LAYOUT = 2.0  # distance of two layouts, in doublings of a size
_FAR = {"n": 1024.0, "k": 16384.0}  # sizes of a GEMM beyond which time is proportional to FLOP
_FAR_TODAY = {"m": 32768.0, "n": 32768.0, "k": 16384.0}
_WHOLE = 64  # sizes that are no multiple of it are left to kernels of their own
_STARTS = 3  # guesses, the first at the priors' middles
_CALLS = 60  # of the cost model, for each start


Chosen = tuple[MeasuredRows, Floats]
"""Rows to fit on, and their weights."""
Tiles = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Prior:
    """Prior of a constant: its middle, the width of its logarithm, and bounds."""

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
"""Priors of the constants of a device; the last constant is for recurrent layers."""
FUSED_PRIOR = Prior(1e-4, 2.0, 1e-6, 20e-3)
"""Prior of `fused_setup_s`, which some libraries have, of recurrent layers."""
TYPICAL = Efficiency(**{name: prior.middle for name, prior in PRIORS.items()})
"""Constants of a device without measurements."""
LIBRARY_PRIORS: Mapping[str, Prior] = {
    "launch_s": Prior(3e-6, 0.4, 0.5e-6, 50e-6),
    "compute": Prior(0.9, 0.3, 0.1, 3.0),
    "feed": Prior(0.2, 0.8, 0.01, 10.0),
    "prologue": Prior(80.0, 0.7, 1.0, 5000.0),
    "hbm_share": Prior(0.85, 0.07, 0.3, 1.1),
    "split_s": Prior(1.5e-6, 0.6, 0.05e-6, 50e-6),
    "split_traffic": Prior(3.0, 0.5, 0.1, 100.0),
    "sustained": Prior(0.75, 0.2, 0.1, 1.2),
    "camping": Prior(0.003, 1.2, 1e-5, 0.1),
}
"""Priors of the constants of GEMMs by a library of today (`simulators.costs.gemm.library`); sustained: over compute."""

CAST_PRIOR = Prior(10.0, 1.0, 1.0, 500.0)
"""Prior of `cast_traffic`, of times with the cast of their inputs, which moves three bytes an element at least."""

CACHE_PRIOR = Prior(2.5, 0.5, 1.0, 15.0)
"""Prior of `cache_speed`, of a GPU whose cache keeps activations from kernel to kernel."""


def typical_library(tiles: Tiles) -> Efficiency:
    """Constants of a library of today, with these tiles, on a GPU without measurements."""
    return TYPICAL.model_copy(
        update={**_of_library({k: prior.middle for k, prior in LIBRARY_PRIORS.items()}), "tiles": tiles}
    )


def _of_library(values: Mapping[str, float]) -> dict[str, float]:
    """Constants of a library from values whose `sustained` is over `compute`."""
    return {**values, "sustained": values["sustained"] * values["compute"]}


COMMON_TILES: Tiles = ((256, 128), (128, 256), (256, 64), (64, 256), (128, 128), (128, 64), (64, 128), (64, 64))
"""(rows, columns) of the tiles of a GPU that names none: those of cuBLAS on an H100 (`conf/gpu/h100.yaml`)."""


def library_tiles(device: Device, precision: str) -> Tiles:
    """(rows, columns) of the tiles of a device's library: at a precision, or at any, or those of its schedules."""
    constants = [device.gpu.constants(precision), *(device.gpu.efficiency or {}).values()]
    named = [fitted.tiles for fitted in constants if fitted is not None and fitted.tiles is not None]
    if named or device.gpu.gemm is None:  # tiles of schedules are those of the same library
        return named[0] if named else COMMON_TILES
    return tuple((tile.rows, tile.cols) for tile in device.gpu.gemm.tiles)


STREAM_PRIORS: Mapping[str, Prior] = {
    "launch_s": Prior(4e-6, 0.7, 0.5e-6, 50e-6),
    "hbm_share": Prior(0.6, 0.5, 0.05, 2.0),
}
"""Priors of the constants of an operator that memory bounds."""
TYPICAL_STREAMING = StreamingRates(**{name: prior.middle for name, prior in STREAM_PRIORS.items()})
LIBRARY_PRECISIONS = ("fp16", "bf16", "fp8", "fp8_block", "nvfp4")
"""Precisions whose tables are of libraries of today; those of DeepBench (fp32, fp16_storage, mixed) are of 2017."""
LIBRARY_GEMMS = 24
"""Largest number of GEMMs that the constants of such a library are fitted on."""
PROTOCOL_PRIORS: Mapping[str, Prior] = {
    "launch_s": Prior(5e-6, 1.0, 0.5e-6, 200e-6),
    "ll_step_s": Prior(1e-6, 1.0, 0.05e-6, 50e-6),
    "ll_share": Prior(0.05, 1.5, 1e-3, 1.0),
    "ll128_step_s": Prior(2e-6, 1.0, 0.05e-6, 50e-6),
    "ll128_share": Prior(0.4, 0.7, 1e-2, 1.0),
    "simple_s": Prior(8e-6, 1.0, 0.1e-6, 1e-3),
    "step_s": Prior(1.5e-6, 1.0, 0.05e-6, 200e-6),
    "bytes_per_s": Prior(2e11, 2.5, 1e8, 1e13),
    "scaling": Prior(1.0, 1.0, 0.05, 8.0),
    "fill_s": Prior(3e-6, 1.5, 0.01e-6, 1e-3),
    "fill_bytes": Prior(3e7, 1.5, 1e4, 1e9),
}
"""Priors of the constants of a collective inside a node (`simulators.costs.transfer`)."""
TUNED_PRIORS: Mapping[str, Prior] = {
    **{name: prior for name, prior in PROTOCOL_PRIORS.items() if not name.startswith("fill")},
    "ll_share": Prior(0.3, 0.7, 1e-3, 1.0),
    "ll_fill_s": Prior(2e-6, 1.0, 0.05e-6, 50e-6),
    "step_s": Prior(5e-6, 1.0, 0.05e-6, 200e-6),
    "copy_speed": Prior(1.3, 0.3, 1.0, 10.0),
}
"""The same where the library's own choice of a protocol is known: rows of each are told apart."""
NETWORK_PRIORS: Mapping[str, Prior] = {
    **PROTOCOL_PRIORS,
    "ll_step_s": Prior(5e-6, 1.0, 0.05e-6, 200e-6),
    "ll_share": Prior(0.4, 0.7, 1e-3, 1.0),
    "ll128_step_s": Prior(10e-6, 1.0, 0.05e-6, 200e-6),
    "step_s": Prior(20e-6, 1.0, 0.05e-6, 1e-3),
    "bytes_per_s": Prior(2e10, 2.5, 1e8, 1e13),
}
"""The same across nodes."""
HOST_PRIOR = Prior(20e-6, 1.0, 1e-6, 1e-3)
"""Prior of the time between two calls of a host."""
SWITCH_PRIORS: Mapping[str, Prior] = {
    "latency_s": Prior(10e-6, 1.0, 0.5e-6, 200e-6),
    "bytes_per_s": Prior(3e11, 2.5, 1e9, 1e13),
    "bytes_per_s_per_cta": Prior(1e11, 2.5, 1e9, 1e13),
}
"""Priors of the constants of a collective in the switch."""
_RING: Mapping[str, Prior] = {
    "latency_s": Prior(10e-6, 1.0, 0.1e-6, 1e-3),
    "bytes_per_s": Prior(1e10, 2.0, 1e8, 1e13),
    "sharing": Prior(0.03, 1.5, 1e-4, 1.0),
    "network_bytes_per_s": Prior(5e9, 2.0, 1e7, 1e13),
}


@dataclass(frozen=True)
class FittedConstants:
    """Constants by precision, of rings (None: no rows) and of collectives by kind of rows, and names of rows fitted on.

    fitted_on: precision -> kind -> names.
    """

    efficiency: Mapping[str, Efficiency]
    library: CollectiveLibrary | None
    collectives: Mapping[str, Protocols | SwitchRate]
    fitted_on: Mapping[str, Mapping[str, tuple[str, ...]]]


def fit(device: Device, rows: Sequence[MeasuredRows], *, num_gpus: int = 8) -> FittedConstants:
    """Fit the constants of a device to some of its measured rows. num_gpus: GPUs of a node."""
    # by shape alone, before anything is fitted
    chosen = {(group.precision, group.kind): _select_rows(group, num_gpus) for group in rows}
    library = {precision for precision, kind in chosen if kind == "gemm" and precision in LIBRARY_PRECISIONS}
    names: dict[str, dict[str, tuple[str, ...]]] = {}
    for (precision, kind), (kernel_rows, _) in chosen.items():
        names.setdefault(precision, {})[kind] = kernel_rows.names
    efficiency = {}
    # constants of a precision come from GEMMs first
    for precision in dict.fromkeys(precision for precision, kind in chosen if kind == "gemm"):
        if precision in library:
            constants_of_gemms = _fit_library(device, precision, chosen[precision, "gemm"])
            streaming = {
                kind: _fit_stream(device, chosen[precision, kind])
                for kind in STREAM_KINDS
                if (precision, kind) in chosen
            }
            efficiency[precision] = constants_of_gemms.model_copy(update={"streaming": streaming or None})
            continue  # constants of such a library are of GEMMs and streams alone
        products = [chosen[precision, kind] for kind in ("gemm", "conv") if (precision, kind) in chosen]
        constants = _fit_kernels(device, products)
        if (precision, "recurrent") in chosen:
            constants = _fit_recurrent(device, chosen[precision, "recurrent"], constants)
        efficiency[precision] = TYPICAL.model_copy(update=constants)  # what was not fitted is typical
    allreduces = [selection for (_, kind), selection in chosen.items() if kind == "allreduce"]
    ring = _fit_ring(num_gpus, allreduces[0]) if allreduces else None
    collectives = {
        kind: _fit_collective(rows, None if device.node is None else constants_of(device.node, kind))
        for (_, kind), rows in chosen.items()
        if kind in COLLECTIVE_ROWS
    }
    return FittedConstants(efficiency, ring, collectives, names)


def _fit_kernels(device: Device, chosen: Sequence[Chosen]) -> dict[str, float]:
    """Fit five constants to GEMMs and convolutions."""
    free = {name: prior for name, prior in PRIORS.items() if name != "latency_s"}  # of recurrent layers alone

    def predict(values: Mapping[str, float], rows: MeasuredRows) -> Floats:
        return on_device(device, TYPICAL.model_copy(update=dict(values)), rows).seconds

    return _least(free, predict, chosen)


def _fit_recurrent(device: Device, chosen: Chosen, constants: Mapping[str, float]) -> dict[str, float]:
    """Fit the sixth constant to recurrent layers, given the five `constants`; and the set-up of fused steps.

    A library is taken to fuse steps where the set-up lowers the loss by more than one (Akaike's criterion).
    """

    def predict(values: Mapping[str, float], rows: MeasuredRows) -> Floats:
        return on_device(device, TYPICAL.model_copy(update={**constants, **values}), rows).seconds

    stepwise = {"latency_s": PRIORS["latency_s"]}
    launched, loss = _solve(stepwise, predict, [chosen])
    fused, fused_loss = _solve({**stepwise, "fused_setup_s": FUSED_PRIOR}, predict, [chosen])
    # a constant more has to lower the loss by one
    return {**constants, **(fused if fused_loss < loss - 1.0 else launched)}


def _fit_library(device: Device, precision: str, chosen: Chosen) -> Efficiency:
    """Fit the constants of a library of today to GEMMs."""
    tiles, constants = library_tiles(device, precision), device.gpu.constants(precision)
    # a cache that keeps activations is given, its rate is fitted
    cache = None if constants is None else constants.cache_bytes
    weights_cache = None if constants is None else constants.weights_cache_bytes
    caches = {"cache_bytes": cache, "weights_cache_bytes": weights_cache}
    typical = typical_library(tiles).model_copy(update=caches)
    priors = LIBRARY_PRIORS if cache is None else {**LIBRARY_PRIORS, "cache_speed": CACHE_PRIOR}
    priors = {**priors, "cast_traffic": CAST_PRIOR} if chosen[0].casts else priors

    def predict(values: Mapping[str, float], rows: MeasuredRows) -> Floats:
        return on_device(device, typical.model_copy(update=_of_library(values)), rows).seconds

    return typical.model_copy(update=_of_library(_least(priors, predict, [chosen])))


def _fit_stream(device: Device, chosen: Chosen) -> StreamingRates:
    """Fit the two constants of an operator that memory bounds."""

    def predict(values: Mapping[str, float], rows: MeasuredRows) -> Floats:
        constants = TYPICAL_STREAMING.model_copy(update=dict(values))
        return streamed(constants, device.gpu.hbm_rate, rows.shape["bytes"]).seconds[:, None]

    return TYPICAL_STREAMING.model_copy(update=_least(STREAM_PRIORS, predict, [chosen]))


def _fit_collective(chosen: Chosen, known: Protocols | SwitchRate | None) -> Protocols | SwitchRate:
    """Fit the constants of a collective: with the time between two calls where hosts launch each one.

    known: its constants so far, which say what the library chooses protocols by, and what its rows do not tell.
    """
    rows, _ = chosen
    held = {} if not isinstance(known, Protocols) else _times_of_peers(rows, known)
    way, tuned = COLLECTIVE_ROWS[rows.kind][1], known.tuned if isinstance(known, Protocols) else None
    priors = {"inside": PROTOCOL_PRIORS, "across_nodes": NETWORK_PRIORS, "in_switch": SWITCH_PRIORS}[way]
    priors = TUNED_PRIORS if tuned is not None else priors
    priors = {**priors, **({"host_s": HOST_PRIOR} if rows.library in CALLED_BY_HOSTS else {})}
    free = {name: prior for name, prior in priors.items() if name not in held}
    kind = SwitchRate if way == "in_switch" else Protocols
    given: dict[str, Any] = held if tuned is None else {**held, "tuned": tuned}
    typical = kind(**{name: prior.middle for name, prior in free.items()}, **given)

    def predict(values: Mapping[str, float], rows: MeasuredRows) -> Floats:
        return cost_of_rows(typical.model_copy(update=dict(values)), rows).seconds

    return typical.model_copy(update=_least(free, predict, [chosen]))


def _times_of_peers(rows: MeasuredRows, known: Protocols) -> dict[str, float]:
    """Time that each peer adds to an all-to-all, as known, where rows of one number of GPUs leave it in the launch.

    All peers are served at once, so it is a fraction of what a step of a ring takes, whose prior would be taken for it.
    """
    if rows.kind != "all_to_all" or np.ptp(rows.shape["gpus"]) > 0:
        return {}
    return {name: getattr(known, name) for name in ("ll_step_s", "step_s")}


def _fit_ring(num_gpus: int, chosen: Chosen) -> CollectiveLibrary:
    """Fit latency, bandwidth, sharing, and, if rings leave the node, the bandwidth of the network."""
    beyond = bool((chosen[0].shape["gpus"] > num_gpus).any())  # the network is fitted only where rings use it
    free = {name: prior for name, prior in _RING.items() if beyond or not name.startswith("network")}
    # rows of one ring at a time cannot tell the NICs of a node apart: the rate is that of the node
    guess = CollectiveLibrary(bytes_per_s=1e9, latency_s=1e-6, network_nics="one")

    def predict(values: Mapping[str, float], rows: MeasuredRows) -> Floats:
        node = Node(num_gpus=num_gpus, library=guess.model_copy(update=dict(values)))
        return allreduce(node, rows).seconds

    return guess.model_copy(update=_least(free, predict, [chosen]))


def _least(
    free: Mapping[str, Prior], predict: Callable[[Mapping[str, float], MeasuredRows], Floats], chosen: Sequence[Chosen]
) -> dict[str, float]:
    """Constants that predict the measured times best."""
    return _solve(free, predict, chosen)[0]


def _solve(
    free: Mapping[str, Prior], predict: Callable[[Mapping[str, float], MeasuredRows], Floats], chosen: Sequence[Chosen]
) -> tuple[dict[str, float], float]:
    """Constants that predict the measured times best, and their loss, priors included."""
    from scipy.optimize import least_squares

    middle, width, low, high = np.array([(p.middle, p.width, p.low, p.high) for p in free.values()]).T
    middle, low, high = np.log(middle), np.log(low), np.log(high)

    def residuals(logs: Floats) -> Floats:
        values = dict(zip(free, np.exp(logs).tolist(), strict=True))
        parts = [_robust(predict(values, rows), rows, weights) for rows, weights in chosen]
        return np.concatenate([*parts, (logs - middle) / width])  # a prior is a residual like a row

    random, best = np.random.default_rng(0), None  # the same guesses in every run
    for start in range(_STARTS):
        guess = middle + (0.7 * random.standard_normal(len(middle)) if start else 0.0)
        inside = np.clip(guess, low + 0.01, high - 0.01)  # inside of the bounds, or the solver refuses to start
        solution = least_squares(residuals, inside, bounds=(low, high), diff_step=1e-3, max_nfev=_CALLS)
        best = solution if best is None or solution.cost < best.cost else best
    assert best is not None
    return dict(zip(free, np.exp(best.x).tolist(), strict=True)), float(best.cost)


def _robust(predicted: Floats, rows: MeasuredRows, weights: Floats) -> Floats:
    """Roots of the pseudo-Huber losses of log(predicted / measured), one for each pass that was measured."""
    measured = np.isfinite(rows.seconds)
    # weights say what rows count among themselves
    weight = np.broadcast_to((weights / weights.mean())[:, None], measured.shape)[measured]
    error = np.log(predicted[measured] / rows.seconds[measured]) / _SCALE[rows.kind]
    # residuals whose squares are pseudo-Huber losses
    return np.asarray(np.sign(error) * np.sqrt(2 * weight * (np.sqrt(1 + error**2) - 1)))


def _select_rows(rows: MeasuredRows, num_gpus: int) -> Chosen:
    """Select the rows to fit on, with their weights."""
    if rows.kind in ("allreduce", "conv"):
        ends = rows.kind == "allreduce"
        places = _ends(rows.shape["floats"], rows.shape["gpus"], num_gpus) if ends else _spread(rows.shape)
        return rows.take(places), np.ones(len(places))
    if rows.kind in COLLECTIVE_ROWS:
        places = evenly_spaced(rows)
        return rows.take(places), np.ones(len(places))
    if rows.kind in STREAM_KINDS:
        places, weights = medoids(np.log2(rows.shape["bytes"])[:, None], MOST[rows.kind])  # sizes span decades
        return rows.take(places), weights
    if rows.precision not in LIBRARY_PRECISIONS:
        places, weights = medoids(_features(rows), MOST[rows.kind])
        return rows.take(places), weights
    # others run on kernels of their own, which constants do not describe
    aligned = np.flatnonzero((rows.shape["m"] % _WHOLE == 0) & (rows.shape["k"] % _WHOLE == 0))
    if len(aligned) < LIBRARY_GEMMS:  # too few: take what there is
        aligned = np.arange(rows.size)
    places, weights = medoids(_features(rows.take(aligned)), LIBRARY_GEMMS)
    places = aligned[places]
    return rows.take(places), weights


def _ends(payload: Floats, gpus: Floats, num_gpus: int) -> NDArray[np.int64]:
    """Rows with the smallest and the largest payload of the fewest GPUs, the most in a server and the most of all."""
    places = set()
    # latency of the smallest ring, sharing in a server, and the network
    for number in {gpus.min(), gpus[gpus <= num_gpus].max(initial=gpus.min()), gpus.max()}:
        same_gpus = np.flatnonzero(gpus == number)
        places |= {int(same_gpus[payload[same_gpus].argmin()]), int(same_gpus[payload[same_gpus].argmax()])}
    return np.array(sorted(places))


def _spread(shape: Mapping[str, Floats]) -> NDArray[np.int64]:
    """Convolutions evenly spaced in the order of filter area, stride and FLOP."""
    flop = Layer.of(shape, 1.0).flop
    order = np.lexsort((flop, shape["stride_v"] * shape["stride_h"], shape["r"] * shape["s"]))
    count = min(MOST["conv"], len(order))
    places = ((np.arange(count) + 0.5) * len(order) / count).astype(int)  # middles of equal parts
    return np.sort(order[places])


def _features(rows: MeasuredRows) -> Floats:
    """Shapes as points [R, features]: of GEMMs in doublings, of recurrent layers scaled to the range of the table."""
    shape = rows.shape
    if rows.kind == "gemm":
        far = _FAR_TODAY if rows.precision in LIBRARY_PRECISIONS else _FAR
        # beyond, one size is as good as another
        sizes = [np.log2(np.minimum(shape[name], far.get(name, np.inf))) for name in ("m", "n", "k")]
        return np.column_stack([*sizes, _LAYOUT * shape["ta"], _LAYOUT * shape["tb"]])
    points = np.column_stack([np.log2(shape[name]) for name in ("gates", "hidden", "n", "t")])
    # a table with one size of a kind
    scaled: Floats = (points - points.min(axis=0)) / np.maximum(np.ptp(points, axis=0), 1e-12)
    return scaled


def medoids(points: Floats, count: int) -> tuple[NDArray[np.int64], Floats]:
    """Select at most `count` medoids of R points [R, features], in order, with the roots of their clusters' sizes."""
    taken = [int(((points - points.mean(axis=0)) ** 2).sum(axis=1).argmin())]
    while len(taken) < min(count, len(points)):
        # the row farthest from all that are taken
        taken.append(int(_squares(points, points[taken]).min(axis=1).argmax()))
    centres = points[taken]
    for _ in range(200):  # ends long before: each round lowers the sum of squares
        label = _squares(points, centres).argmin(axis=1)
        clusters = [points[label == place] for place in range(len(centres))]
        # an empty cluster keeps its centre
        means = np.array([part.mean(axis=0) if len(part) else centres[place] for place, part in enumerate(clusters)])
        if np.array_equal(means, centres):
            break
        centres = means
    squares = _squares(points, centres)
    sizes = np.bincount(squares.argmin(axis=1), minlength=len(centres))
    # the row nearest to the centre stands for the cluster
    chosen = {int(squares[:, place].argmin()): float(np.sqrt(sizes[place])) for place in np.flatnonzero(sizes)}
    places = np.array(sorted(chosen))
    return places, np.array([chosen[int(place)] for place in places])


def _squares(points: Floats, centres: Floats) -> Floats:
    squares: Floats = ((points[:, None, :] - centres[None, :, :]) ** 2).sum(axis=2)
    return squares
