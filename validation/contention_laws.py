"""Laws of contention and of rates against measurements: part of a table is learnt from, the rest of it predicted.

`python -m benchmarks.traces --data DIR` prints the figures.

    SMs          every other number of SMs of a table (the least, and so on) is fitted, the times at the others compared
    DualPipe     laws learnt on layer 0 of two, with times of its kernels; kernels of layer 1 and its span compared.
                 A kernel is the same where its annotation, kind and grid are, and how often they came before
    orders       the period of a layer for each order of the parts of a forward and a backward pass on the two serial
                 streams that respects what waits for what, with times alone and laws
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dse import plugins
from dse_traces.laws.contention import Estimate, Laws, Penalty, assumed_laws, learn_laws, side_by_side
from dse_traces.laws.rate_law import fit_rate_law
from dse_traces.laws.task_graph import EXPECTED, ContentionModel, contention_model
from dse_traces.profile.kernels import Profile
from dse_traces.readers.formats import read
from simulators.taskgraph.graph import GraphBuilder
from validation.expert_rows import read_rows
from validation.left_out import files_below

Floats = NDArray[np.float64]
TABLE = "kernels_layers_0_1.csv"
MACHINE = "h800_8"
_BY_CTAS = ("allreduce_by_ctas", "fused_allreduce_rmsnorm_by_ctas")
_FEWEST = 6  # rows to fit on
_SHORTEST_COMPARED_S = 5e-6  # the profiler told whole microseconds
_BYTES = 2 * 8192  # of a token of TokenWeave's tables


@dataclass(frozen=True)
class Times:
    """Times [s] of one kernel by payload [bytes] and SMs, all [N]."""

    name: str
    payload: Floats
    sms: Floats
    seconds: Floats

    def held_out(self) -> Floats:
        """Relative errors at the SMs that are not fitted; none where too few rows are left to fit on."""
        fitted = np.isin(self.sms, np.unique(self.sms)[::2])
        if fitted.sum() < _FEWEST or fitted.all():
            return np.zeros(0)
        law = fit_rate_law(self.payload[fitted], self.sms[fitted], self.seconds[fitted])
        return law.seconds(self.payload[~fitted], self.sms[~fitted]) / self.seconds[~fitted] - 1


def tables(data: Path) -> Iterator[tuple[str, list[Times]]]:
    """Yield device and table, and the times of each kernel in it."""
    for file in (file for name in _BY_CTAS for file in files_below(data, f"{name}.csv")):
        yield f"h100 {file.stem}", [_by_ctas(file)]
    for path in files_below(data, "*.csv"):
        rows: dict[str, dict[str, list[tuple[float, ...]]]] = {}
        for row in read_rows(path):
            if row.table != "published":
                routed: Any = row.routed
                name = row.name.split(",")[0] if row.table == "deepep" else row.name.rpartition(",")[0]
                shape = f"{row.group} of {routed.nodes} nodes, {name}"
                numbers = (float(routed.tokens * routed.token_bytes), float(row.num_sms), row.seconds)
                device = f"{row.device.removesuffix('_sxm')} {path.stem}"
                rows.setdefault(device, {}).setdefault(shape, []).append(numbers)
        for device, shapes in rows.items():
            yield device, [Times(shape, *np.array(numbers, float).T) for shape, numbers in shapes.items()]


def _by_ctas(path: Path) -> Times:
    table = pd.read_csv(path, comment="#")
    tokens = table.columns[0]
    long = table.melt(id_vars=[tokens], value_vars=[name for name in table.columns.astype(str) if "_ctas_" in name])
    sms = long["variable"].str.rpartition("_")[2].astype(float)
    payload = _BYTES * long[tokens].to_numpy(float)
    return Times(path.stem, payload, np.asarray(sms, float), 1e-6 * long["value"].to_numpy(float))


def sm_errors(data: Path) -> dict[str, Floats]:
    """Device and table -> relative errors at SMs that were not fitted; tables without any are left out."""
    errors = {name: np.concatenate([times.held_out() for times in kernels]) for name, kernels in tables(data)}
    return {name: values for name, values in errors.items() if values.size}


def sm_figures(data: Path) -> dict[str, float]:
    """Largest median error of a table of H100, and of the other devices, of those that there are."""
    worst = dict[str, float]()
    for name, values in sm_errors(data).items():
        figure, median = "sm_law_h100" if name.startswith("h100") else "sm_law_others", np.median(np.abs(values))
        worst[figure] = max(worst.get(figure, 0.0), float(median))
    return worst


@dataclass(frozen=True)
class Layer:
    """One layer of DualPipe: its kernels, by whom each was launched, and each one's key across layers."""

    profile: Profile
    launched_in: tuple[str, ...]
    keys: tuple[tuple[Any, ...], ...]

    @property
    def share(self) -> Floats:
        """Share of each kernel's time beside an exchange [N]."""
        both = side_by_side(self.profile)
        beside = np.bincount(both.kernel, both.seconds, len(self.profile))
        return np.minimum(beside / np.maximum(self.profile.seconds, 1e-9), 1.0)


def layers(data: Path) -> tuple[Layer, Layer]:
    """Both layers of the table."""
    file = next(files_below(data, TABLE))
    table = pd.read_csv(file, comment="#").sort_values("start_us", kind="stable", ignore_index=True)
    whole = read(file)
    ctas = whole.kernels["ctas"].fillna(0)
    names = pd.DataFrame({"layer": table["layer"], "by": table["launched_in"], "kind": table["kind"], "ctas": ctas})
    names["count"] = names.groupby(["layer", "by", "kind", "ctas"]).cumcount()
    both = []
    for layer in (0, 1):
        kernels = whole.kernels[names["layer"] == layer].reset_index(drop=True)
        kernels = kernels.assign(start_s=kernels["start_s"] - kernels["start_s"].iloc[0])
        own = names[names["layer"] == layer]
        keys = tuple(own[["by", "kind", "ctas", "count"]].itertuples(index=False, name=None))
        both.append(Layer(replace(whole, kernels=kernels), tuple(own["by"]), keys))
    return both[0], both[1]


def dualpipe_models(data: Path, *, contends: bool = True) -> tuple[Layer, Layer, ContentionModel]:
    """Both layers, and layer 1 with the laws and times alone of layer 0. contends: False: nothing slows anything."""
    first, second = layers(data)
    laws = learn_laws(first.profile, assumed_laws(MACHINE))
    laws = laws if contends else _without_contention(laws)
    known, model = contention_model(first.profile, laws), contention_model(second.profile, laws)
    place = {key: at for at, key in enumerate(first.keys)}
    alone = [
        known.alone_s[:, place[key]] if key in place else model.alone_s[:, at] for at, key in enumerate(second.keys)
    ]
    return first, second, replace(model, alone_s=np.array(alone).T)


def _without_contention(laws: Laws) -> Laws:
    nothing = Estimate(1.0, 1.0, 1.0)
    return replace(laws, penalties=dict.fromkeys(laws.penalties, Penalty(nothing)), collectives=nothing)


def slowed_errors(data: Path, *, contends: bool = True) -> tuple[Floats, Floats]:
    """Relative errors of kernels of layer 1 beside exchanges: of all, and of those that ran alone in layer 0."""
    first, second, model = dualpipe_models(data, contends=contends)
    factors = model.kernel_slowdowns(model.group_sms, np.ones(len(model.names)))[EXPECTED]
    both = side_by_side(second.profile)
    stays = 1 - np.bincount(
        both.kernel,
        both.seconds
        / second.profile.seconds[both.kernel]
        * (1 - 1 / factors[model.kernel_class[both.kernel], model.group[both.collective]]),
        len(second.profile),
    )
    errors = model.alone_s[EXPECTED] / np.maximum(stays, 0.1) / np.maximum(second.profile.seconds, 1e-9) - 1
    share = dict(zip(first.keys, first.share, strict=True))
    beside = second.profile.is_compute & (second.share >= 0.9) & (second.profile.seconds >= _SHORTEST_COMPARED_S)
    beside &= np.array([key in share for key in second.keys])
    alone = beside & np.array([share.get(key, 1.0) <= 0.1 for key in second.keys])
    return errors[beside], errors[alone]


def pair_error(data: Path, *, contends: bool = True) -> float:
    """Relative error of the span of layer 1, with the times alone and the laws of layer 0."""
    _, second, model = dualpipe_models(data, contends=contends)
    ran = model.run(model.structure, model.as_recorded())
    return float((ran.end_s.max() - ran.start_s.min()) / second.profile.span_s - 1)


PARTS: Mapping[str, tuple[str, ...]] = {
    "attn(F)": (),
    "dispatch(F)": ("attn(F)",),
    "mlp(F)": ("dispatch(F)",),
    "combine(F)": ("mlp(F)",),
    "combine(B)": (),
    "mlp(B)": ("combine(B)",),
    "mlp(W)": ("mlp(B)",),
    "dispatch(B)": ("mlp(B)",),
    "attn(B)": ("dispatch(B)",),
    "attn(W)": ("attn(B)",),
}
"""Parts of a forward and a backward pass through a layer, and what each waits for."""
ACROSS: Mapping[str, str] = {"attn(F)": "combine(F)", "combine(B)": "attn(B)"}
"""Part -> part of the layer before that it waits for."""
_LAYERS = 6  # until every layer takes as long as the one before
Order = tuple[str, ...]


def orders(data: Path) -> list[tuple[float, Order, Order]]:
    """Period [s] of a layer by the orders of both streams, shortest first; the recorded order is among them.

    Times alone are means of both layers; an exchange slows a part by the mean of its kernels.
    """
    spent, slowed = _parts(data)
    moves = [part for part in PARTS if part.startswith(("dispatch", "combine"))]
    computes = [part for part in PARTS if part not in moves]
    pairs = itertools.product(_orders(computes), _orders(moves))
    return sorted((_period(*pair, spent, slowed), *pair) for pair in pairs)


def recorded_order(data: Path) -> tuple[Order, Order]:
    """Order in which the parts begin on both streams."""
    begun = dict.fromkeys(layers(data)[0].launched_in)
    moves = tuple(part for part in begun if part.startswith(("dispatch", "combine")))
    return tuple(part for part in begun if part in PARTS and part not in moves), moves


def _orders(parts: Sequence[str]) -> Iterator[Order]:
    """Yield orders in which no part comes before one that it waits for, through parts of the other stream as well."""
    for order in itertools.permutations(parts):
        if not any(later in _all_before(part) for at, part in enumerate(order) for later in order[at:]):
            yield order


def _all_before(part: str) -> set[str]:
    return {name for before in PARTS[part] for name in (before, *_all_before(before))}


def _parts(data: Path) -> tuple[dict[str, float], dict[str, float]]:
    """Time of each part alone [s], and its slow-down beside an exchange. Kernels that notify wait, and are left out."""
    spent, late = dict.fromkeys(PARTS, 0.0), dict.fromkeys(PARTS, 0.0)
    for layer in layers(data):
        model = contention_model(layer.profile, learn_laws(layer.profile, assumed_laws(MACHINE)))
        factors = model.kernel_slowdowns(model.group_sms, np.ones(len(model.names)))[EXPECTED].mean(axis=1)
        times = model.alone_s[EXPECTED] / 2
        for place, part in enumerate(layer.launched_in):
            if "notify" not in layer.profile.kernels["name"].iloc[place]:
                of = model.kernel_class[place]
                spent[part] += times[place]
                late[part] += times[place] * (factors[of] if of >= 0 else 1.0)
    return spent, {part: late[part] / spent[part] for part in spent}


def _period(computes: Order, moves: Order, spent: Mapping[str, float], slowed: Mapping[str, float]) -> float:
    """Period of a layer when all layers have the same order [s]; infinite if the streams would wait for each other."""
    graph, ends = GraphBuilder(), dict[tuple[str, int], int]()
    queues = [[(part, layer) for layer in range(_LAYERS) for part in order] for order in (computes, moves)]
    last: list[list[int]] = [[], []]
    while any(queues):
        ready = [place for place, queue in enumerate(queues) if queue and _before(*queue[0]) <= ends.keys()]
        if not ready:
            return float("inf")
        part, layer = queues[ready[0]].pop(0)
        after = [*last[ready[0]], *(ends[before] for before in _before(part, layer))]
        task = graph.task(
            part, "gemm", after=after, work=spent[part], cap=1.0, group=part if ready[0] == 0 else "moves"
        )
        ends[part, layer], last[ready[0]] = task, [task]
    for part in computes:
        if slowed[part] > 1:
            graph.slows(part, while_active="moves", factor=1 / slowed[part])
    finished = plugins.load("engine", "fluid").run(graph.build()).finished[0]
    halves = [finished[ends[computes[-1], layer]] for layer in (_LAYERS // 2 - 1, _LAYERS - 1)]
    return float((halves[1] - halves[0]) / (_LAYERS // 2))


def _before(part: str, layer: int) -> set[tuple[str, int]]:
    earlier = {(ACROSS[part], layer - 1)} if part in ACROSS and layer else set()
    return {(before, layer) for before in PARTS[part]} | earlier


def holds_layers(data: Path) -> bool:
    """Return whether a folder has both layers of DualPipe, with every part of each."""
    file = next(files_below(data, TABLE), None)
    if file is None:
        return False
    table = pd.read_csv(file, comment="#")
    return all(set(PARTS) <= set(table["launched_in"][table["layer"] == layer]) for layer in (0, 1))


def dualpipe_figures(data: Path) -> dict[str, float]:
    """Median errors of kernels beside exchanges, the error of the pair, and what the best order would gain; {} without
    both layers.
    """
    if not holds_layers(data):
        return {}
    every, alone = slowed_errors(data)
    periods = orders(data)
    recorded = next(period for period, *both in periods if tuple(both) == recorded_order(data))
    errors = {"dualpipe_slowdown_median": every, "dualpipe_slowdown_alone_before": alone}
    return {
        **{name: float(np.median(np.abs(sizes))) for name, sizes in errors.items() if sizes.size},
        "dualpipe_pair": pair_error(data),
        "dualpipe_order_gain": 1 - periods[0][0] / recorded,
    }


def lines(data: Path) -> Iterator[str]:
    """Yield lines that say what the figures consist of."""
    for name, errors in sm_errors(data).items():
        sizes = np.abs(errors)
        spread = f"median {np.median(sizes):.1%}, 90 % within {np.quantile(sizes, 0.9):.1%}"
        yield f"{name:44} {len(errors):5,} rows at other SMs: {spread}"
    if not holds_layers(data):
        return
    every, alone = slowed_errors(data)
    yield f"DualPipe: {len(every)} kernels of layer 1 beside an exchange, {len(alone)} of them alone in layer 0"
    medians = [f"{np.median(np.abs(errors)):.1%}" for errors in slowed_errors(data, contends=False)]
    spans = [f"{pair_error(data, contends=contends):+.1%}" for contends in (True, False)]
    yield f"without laws: median errors {medians[0]} and {medians[1]}; span {spans[1]}, with laws {spans[0]}"
    periods, own = orders(data), recorded_order(data)
    (best, computes, moves), recorded = periods[0], next(time for time, *both in periods if tuple(both) == own)
    gain = f"{1e3 * recorded:.2f} ms a layer as recorded, {1e3 * best:.2f} ms by the best of {len(periods)} orders"
    yield f"DualPipe: {gain}: {', '.join(computes)}; {', '.join(moves)}"
