"""Studies of serving: the deployment with the most tokens a GPU within what users accept, and what changes it.

Points are deployments under traffic. The answer is the best point within the limits of the study; where no point is,
the nearest one with what binds. With engines of prompts apart, each split is compared with engines that do both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

import dse_serving.columns as at
from dse.plots import Draw
from dse.results.decisions import read_decision
from dse.results.run_folder import FinishedRun, Outputs
from dse.results.words import cell
from dse.space import get_path
from dse.values.units import with_prefix
from dse_serving import figures as serving_figures
from dse_serving.backend import ServingBackend
from dse_serving.certainty import MORE, decide
from dse_serving.design import Serving, deployment_of
from dse_serving.overlaps import OVERLAP_WORDS
from dse_serving.plan_file import plan_tree
from dse_serving.results import percentile_interval
from studies.plain import Plain

if TYPE_CHECKING:
    import pandas as pd
    from rich.table import Table

    from dse.study.plan import Plan

_RATE = "tokens_per_s_per_gpu"
_TIMES = {"ttft_s": "time to the first token", "tpot_s": "time of a later token"}
_SECTIONS = ("system", "model", "kernels", "run", "parallel", "server", "engines", "traffic", "slo")
_DRAWN = 400  # steps of a timeline
_LOGGED = 20_000
_RIVALS = 4  # deployments whose errors are drawn


class ServingStudy(Plain):
    """The answer, what binds it, settings of the software, and figures."""

    columns = (
        *("parallel.tp", "engines.apart", "engines.prefill_replicas", "engines.prefill_tp"),
        *("traffic.arrivals", "traffic.concurrency", "parallel.dp", "parallel.pp", "engines.expert_gpus"),
    )

    def decisions(self, table: pd.DataFrame, planned: Plan) -> dict[str, Any]:
        """Certainty of the best deployment within the limits, by its key; none where no deployment is within them."""
        config = planned.request.tree
        limits = limits_of(config)
        inside = within(with_splits(table), limits)
        if not len(inside):
            return {}
        best = best_of(inside)
        rows = [{str(name): value for name, value in row.items()} for row in best_of_splits(inside).to_dict("records")]
        rows = rows[:_RIVALS]  # of which the first is the best one
        designs, names = [design_of(config, row) for row in rows], [str(row["split"]) for row in rows]
        return {str(best["key"]): decide(designs, names, limits, settings=planned.settings)}

    def answer(self, outputs: Outputs, table: pd.DataFrame) -> Iterator[Table | str]:
        """Yield the best deployment within the limits, its rivals, and how sure that is; or the nearest one."""
        config = outputs.read_config()
        points, limits = with_splits(table), limits_of(config)
        if not len(points):
            yield from refusals(table)
            return
        inside = within(points, limits)
        if not len(inside):
            yield from nearest(points, limits)
            return
        best = best_of(inside)
        yield sentence(best)
        yield rivals_table(inside)
        share = 100 * float(config["slo"]["percentile"])
        yield f"times: of {share:g} % of the requests; pages: most of the memory for keys and values in use at a time"
        yield from tighter_limits(inside, best)
        yield from apart_or_together(inside)
        yield from transfer_lines(config, inside)
        yield from how_sure(config, best)
        yield from with_errors(config, outputs.read_json("summary"), best)
        yield from overlap_lines(config, best)

    def figures(self, table: pd.DataFrame, timelines: pd.DataFrame) -> Iterator[tuple[str, Draw]]:
        """Throughput against interactivity, and what limits leave."""
        points = with_splits(table)
        if len(points):
            yield "interactivity", partial(serving_figures.interactivity, points)
            yield "within_limits", partial(serving_figures.within_limits, points)

    def extras(self, run: FinishedRun) -> Iterator[tuple[str, Any]]:
        """Steps of the engines of the best deployment, and their memory over time."""
        points = with_splits(run.outputs.read_table("results"))
        inside = within(points, limits_of(run.config))
        if not len(inside):
            return
        best = best_of(inside)
        served = ServingBackend().serve(design_of(run.config, best), _LOGGED)
        log = served.state.log[: min(served.steps, _LOGGED)]
        pages = np.repeat(
            [pool.blocks for pool in served.deployment.pools], [p.batches for p in served.deployment.pools]
        )
        yield "plan.yaml", plan_tree(design_of(run.config, best))
        yield "engine", partial(serving_figures.engine_steps, log[:_DRAWN], str(best["split"]))
        rivals = [
            {str(name): value for name, value in row.items()} for row in best_of_splits(inside).to_dict("records")
        ]
        runs = {str(row["split"]): ServingBackend().serve(design_of(run.config, row)) for row in rivals[:_RIVALS]}
        slo = design_of(run.config, best).slo
        for name in _TIMES:
            yield f"goodput_{name[:4]}", partial(serving_figures.goodput, runs, name, slo)
        yield "occupancy", partial(serving_figures.occupancy, log, pages, str(best["split"]))


def with_splits(table: pd.DataFrame) -> pd.DataFrame:
    """Points that were served, with how each splits its GPUs in words; `inside` marks those within all limits."""
    points = table.dropna(subset=[_RATE]).reset_index(drop=True) if _RATE in table else table.iloc[:0]
    return points.assign(
        inside=points["status"] == "ok", status="ok", split=[_split(row) for row in points.to_dict("records")]
    )


def _split(row: Mapping[Any, Any]) -> str:
    """`4 x TP 2`, or `1 x TP 4 for prompts, 2 x TP 2`; DP, PP and GPUs of experts alone where there are some."""
    degrees = {name: int(_plain(row.get(f"parallel.{name}")) or 1) for name in ("tp", "dp", "pp")}
    experts, tp, gpus = int(_plain(row.get("engines.expert_gpus")) or 0), degrees.pop("tp"), int(row["gpus"])
    others = int(np.prod(list(degrees.values())))
    more = "".join(f" {name.upper()} {degree}" for name, degree in degrees.items() if degree > 1)
    name = f"TP {tp}{more}" + (f" and {experts} for experts" if experts else "")
    if not _plain(row.get("engines.apart")):
        return f"{gpus // (tp * others + experts)} x {name}"
    prefill_tp, count = int(_plain(row.get("engines.prefill_tp")) or tp), int(row["engines.prefill_replicas"])
    left = gpus - count * prefill_tp * others
    return f"{count} x TP {prefill_tp}{more} for prompts, {left // (tp * others + experts)} x {name}"


def limits_of(config: Mapping[str, Any]) -> dict[str, float]:
    """Upper limits of the study by metric."""
    limits = config["study"].get("limits") or {}
    return {name: float(limit["high"]) for name, limit in limits.items() if limit.get("high") is not None}


def within(points: pd.DataFrame, limits: Mapping[str, float]) -> pd.DataFrame:
    """Points within all limits."""
    for name, limit in limits.items():
        points = points[points[name] <= limit]
    return points


def best_of(points: pd.DataFrame) -> dict[str, Any]:
    """The point with the most tokens/s a GPU."""
    return {str(name): value for name, value in points.iloc[points[_RATE].argmax()].items()}


def sentence(best: Mapping[Any, Any]) -> str:
    """The best deployment in a sentence."""
    loop = f", {under_way(best):.0f} requests under way"
    times = ", ".join(f"{words} {cell(best[name], 's')}" for name, words in _TIMES.items())
    rate = f"{best[_RATE]:,.0f} tokens/s a GPU, {best['tokens_per_s_per_user']:.1f} tokens/s a user"
    price = f", {best['tokens_per_usd']:,.0f} tokens a dollar" if best["tokens_per_usd"] else ""
    return f"best: {best['split']}{loop}: {rate}{price}; {times}"


def under_way(row: Mapping[Any, Any]) -> float:
    """Requests under way: those of a closed loop, else the mean over time."""
    is_closed = _plain(row.get("traffic.arrivals")) == "closed"
    return float(row["traffic.concurrency"] if is_closed else row["in_system"])


def best_of_splits(points: pd.DataFrame) -> pd.DataFrame:
    """The best point of each split, the best split first."""
    best: pd.DataFrame = points.loc[points.groupby("split")[_RATE].idxmax()].sort_values(_RATE, ascending=False)
    return best


def rivals_table(inside: pd.DataFrame) -> Table:
    """The best point of each split."""
    from rich.table import Table

    shown = Table(box=None, pad_edge=False)
    heads = ("split", "under way", "tokens/s a GPU", "tokens/s a user", "tokens a dollar", *_TIMES.values(), "pages")
    for place, name in enumerate(heads):
        shown.add_column(name, justify="right" if place else "left")
    for row in best_of_splits(inside).head(12).to_dict("records"):
        times = [cell(row[name], "s") for name in _TIMES]
        priced = f"{row['tokens_per_usd']:,.0f}" if row["tokens_per_usd"] else "–"  # of a GPU without a price
        rates = [f"{row[_RATE]:,.0f}", f"{row['tokens_per_s_per_user']:.1f}", priced]
        shown.add_row(row["split"], f"{under_way(row):.0f}", *rates, *times, f"{100 * row['kv_peak']:.0f} %")
    return shown


def refusals(table: pd.DataFrame) -> Iterator[str]:
    """Yield why nothing is served, the commonest reasons first."""
    if "reason" in table:
        for reason, count in table["reason"].value_counts().head(3).items():
            yield f"{count} of {len(table)} deployments: {reason}"


def nearest(points: pd.DataFrame, limits: Mapping[str, float]) -> Iterator[str]:
    """Yield what binds where no point is within the limits, and the nearest point."""
    for name, limit in limits.items():
        least = points.iloc[points[name].argmin()]
        if least[name] > limit:
            rule = f"no deployment has a {_TIMES.get(name, name)} within {cell(limit, 's')}"
            yield f"{rule}: the least is {cell(least[name], 's')}, by {least['split']}"
    excess = np.max([points[name].to_numpy(float) / limit for name, limit in limits.items()], axis=0)
    near = {str(name): value for name, value in points.iloc[int(np.argmin(excess))].items()}
    binding = max(limits, key=lambda name: float(near[name] / limits[name]))
    over = f"{100 * (float(excess.min()) - 1):.0f} % over slo.{binding}"
    yield f"nearest: {over}; {sentence(near).removeprefix('best: ')}"


def tighter_limits(inside: pd.DataFrame, best: Mapping[Any, Any]) -> Iterator[str]:
    """Yield which limit would change the split that is best."""
    rivals = inside[inside["split"] != best["split"]]
    for name, words in _TIMES.items():
        faster = rivals[rivals[name] < best[name]]
        if len(faster):
            rival = best_of(faster)
            lost = 100 * (1 - rival[_RATE] / best[_RATE])
            yield f"for a {words} below {cell(best[name], 's')}: {rival['split']}, {lost:.0f} % fewer tokens/s a GPU"


def apart_or_together(inside: pd.DataFrame) -> Iterator[str]:
    """Yield whether engines of prompts apart beat engines that do both."""
    if "engines.apart" not in inside or inside["engines.apart"].nunique() < 2:
        return
    sides = [inside[inside["engines.apart"].astype(bool) == side] for side in (False, True)]
    together, apart = map(best_of, sides)
    gain = 100 * (apart[_RATE] / together[_RATE] - 1)
    words = "more" if gain > 0 else "fewer"
    yield f"prompts apart: {abs(gain):.0f} % {words} tokens/s a GPU ({apart['split']} against {together['split']})"


def transfer_lines(config: Mapping[str, Any], inside: pd.DataFrame) -> Iterator[str]:
    """Yield what moving keys and values costs the best deployment whose prompts are apart."""
    apart = inside[inside["engines.apart"].astype(bool)] if "engines.apart" in inside else inside.iloc[:0]
    if not len(apart):
        return
    best = best_of(apart)
    served = ServingBackend().serve(design_of(config, best))
    pool, moved = served.deployment.pools[0], served.transfers
    if not len(moved) or served.deployment.transfer is None:
        return
    sent = moved.mean()
    size = float(served.traffic.inputs.mean()) * pool.times.token_bytes * pool.gpus
    share = sent / float((served.times(at.FIRST) - served.times(at.ARRIVAL)).mean())
    way = "layer by layer during the prompt" if served.deployment.transfer.beside else "after the prompt"
    gb_per_s = served.deployment.transfer.bytes_per_s / 1e9
    moves = f"{size / 1e6:,.0f} MB of a prompt at {gb_per_s:,.0f} GB/s an engine, {way}"
    when = f"arrive {cell(sent, 's')} after it, {100 * share:.1f} % of the time to the first token"
    yield f"keys and values of {best['split']}: {moves}, {when}"


def design_of(config: Mapping[str, Any], row: Mapping[Any, Any]) -> Serving:
    """The deployment of a row of the table."""
    tree = {name: config[name] for name in _SECTIONS}
    for path, value in row.items():
        if str(path).partition(".")[0] in _SECTIONS and "." in str(path):
            tree = _replace(tree, str(path).split("."), _plain(value))
    return ServingBackend().design(tree)


def _plain(value: Any) -> Any:
    """A cell as a configuration has it; None where it is empty."""
    import pandas as pd

    return None if pd.isna(value) else value.item() if isinstance(value, np.generic) else value


def _replace(tree: Mapping[str, Any], names: list[str], value: Any) -> dict[str, Any]:
    first, *below = names
    return {**tree, first: _replace(tree[first], below, value) if below else value}


def how_sure(config: Mapping[str, Any], best: Mapping[Any, Any]) -> Iterator[str]:
    """Yield intervals of the best point's percentiles, and the settings that make it."""
    design = design_of(config, best)
    served, share = ServingBackend().serve(design), float(design.slo.percentile)
    for words, values in (("first", served.ttft_s), ("later", served.tpot_s)):
        low, high = percentile_interval(values, share)
        times = f"{_end(low)} {'or more' if np.isinf(high) else 'to ' + _end(high)}"
        yield f"{words} tokens at {100 * share:g} %: {times} (95 %, {len(values)} requests)"
    flags = " ".join(f"{flag} {get_path(_values(design), path)}" for path, flag in design.server.flags.items())
    if flags:
        yield f"{design.server.name}: {flags}"


def with_errors(config: Mapping[str, Any], summary: Mapping[str, Any], best: Mapping[Any, Any]) -> Iterator[str]:
    """Yield the best point's values with drawn errors, how often it stays the best, and what would change that."""
    entry, decision = (summary.get("decisions") or {}).get(str(best["key"])), read_decision(summary, best["key"])
    if entry is None or decision is None or "ranges" not in entry:
        return
    low, high = entry["ranges"][_RATE]
    times = (f"{words} {_end(ends[0])} to {_end(ends[1])}" for words, ends in _ranges(entry))
    basis = ", ".join(f"{kind} by {text}" for kind, text in decision.basis.items())
    yield f"with errors of predictions (90 %): {low:,.0f} to {high:,.0f} tokens/s a GPU, {', '.join(times)} ({basis})"
    rival = f"; else mostly {decision.rival}" if decision.rival else ""
    inside = f"within the limits in {100 * entry['within']:.0f} % of {entry['draws']} draws, "
    yield f"{inside if limits_of(config) else ''}the best in {100 * decision.fastest:.0f} %{rival}"
    gpus = (config["system"].get("node") or {}).get("num_gpus") or 1
    yield from filter(None, [decision.advice, decision.measurement(config["system"]["name"], gpus)])
    for words, split in entry["changes"].items():
        answer = f"{split} is the best" if split else "none of these is within the limits"
        same = "no other split" if split == best["split"] else answer
        yield f"with {MORE:g} times as many {words}: {same}"


def _end(seconds: float) -> str:
    """An end of an interval, in three digits: it is no better known."""
    return with_prefix(float(seconds), "second")


def _ranges(entry: Mapping[str, Any]) -> Iterator[tuple[str, Sequence[float]]]:
    return ((words, entry["ranges"][name]) for name, words in _TIMES.items())


def overlap_lines(config: Mapping[str, Any], best: Mapping[Any, Any]) -> Iterator[str]:
    """Yield which overlap steps of the best point have by their size, and what they gain."""
    design = design_of(config, best)
    plain = design.model_copy(update={"engines": design.engines.model_copy(update={"overlap": "waited"})})
    choice = deployment_of(design).pools[-1].times.overlap
    if choice is None or set(choice.names) <= {"waited", "apart"}:
        return
    served, waited = (ServingBackend().serve(point) for point in (design, plain))
    rates = [run.rate(run.traffic.outputs) for run in (served, waited)]
    context = float(np.median(served.traffic.inputs + served.traffic.outputs // 2))
    octave = int(np.clip(np.log2(context), 0, choice.plain.shape[1] - 1))
    of_steps = {
        "steps with prompts, by tokens": _spans(choice.tokens, choice.prompts, choice.names),
        "steps without, by sequences": _spans(choice.sequences, choice.plain[:, octave], choice.names),
    }
    for what, spans in of_steps.items():
        yield f"overlap of {what}: {', '.join(spans)}"
    used = [choice.names[place] for place in np.unique(np.append(choice.prompts, choice.plain[:, octave]))]
    yield "; ".join(f"{name}: {OVERLAP_WORDS[name]}" for name in used)
    flags = [flag for name, flag in design.server.overlaps.items() if name in used]
    settings = f"; {design.server.name}: {' '.join(flags)}" if flags else ""
    yield f"overlap gains {100 * (rates[0] / rates[1] - 1):.1f} % tokens/s{settings}"


def _spans(sizes: Any, chosen: Any, names: Sequence[str]) -> Iterator[str]:
    """Yield runs of whole sizes with the same choice: that of a knot holds up to the next one."""
    begins = np.flatnonzero(np.diff(chosen, prepend=-1))
    ends = [*(sizes[begins[1:]] - 1), sizes[-1]]
    for begin, end in zip(begins, ends, strict=True):
        yield f"{names[chosen[begin]]} {sizes[begin]:,} to {end:,}"


def _values(design: Serving) -> dict[str, Any]:
    """Sections whose values settings name."""
    return {"parallel": design.parallel.model_dump(), "server": design.server.model_dump()}


STUDY = ServingStudy()
