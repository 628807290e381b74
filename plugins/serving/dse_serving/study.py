"""Studies of serving: the deployment with the most tokens a GPU within what users accept, and what changes it.

Points are deployments under traffic in steady state. The answer is the best point within the limits of the study
(`dse_serving.choice`); where no point is, the nearest one with what binds. With engines of prompts apart, each split is
compared with engines that do both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from dse.errors import ConfigError
from dse.plots import Draw
from dse.results.decisions import read_decision
from dse.results.run_folder import FinishedRun, Outputs
from dse.results.words import cell
from dse.space import get_path
from dse.values.units import with_prefix
from dse_serving import figures as serving_figures
from dse_serving.backend import ServingBackend
from dse_serving.certainty import MORE, decide
from dse_serving.choice import (
    HIGH,
    LOW,
    RATE,
    TIMES,
    best_of,
    best_of_splits,
    close_rivals,
    interval_columns,
    is_closed,
    judged,
    named,
    plain,
    sentence,
    split_of,
    under_way,
    with_splits,
    within,
)
from dse_serving.design import Serving, Slo, deployment_of
from dse_serving.energy import power_line
from dse_serving.overlaps import OVERLAP_WORDS, context_octave
from dse_serving.plan_file import plan_tree
from dse_serving.results import CLOSE, MEETS, MISSES, ServingRun, verdict_of
from dse_serving.steady import Overloaded, rounded_down
from dse_serving.step_times import OverlapChoice
from studies.plain import Plain

if TYPE_CHECKING:
    import pandas as pd
    from rich.table import Table

    from dse.study.plan import Plan

SECTIONS = ("system", "model", "kernels", "run", "parallel", "server", "engines", "traffic", "slo")
"""Of the configuration of a deployment."""
_DRAWN = 400  # steps of a timeline
_LOGGED = 20_000
_RIVALS = 4  # deployments whose errors are drawn
_SHOWN = 12  # splits of a table
_NAMED = 4  # deployments of a sentence
_MEMORY = "KV memory in use"


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
        inside = within(judged(with_splits(table), limits)) if len(with_splits(table)) else table[:0]
        if not len(inside):
            return {}
        rows = best_of_splits(inside)[:_RIVALS]
        best = rows[0]
        designs, names = [design_of(config, row) for row in rows], [str(row["split"]) for row in rows]
        return {str(best["key"]): decide(designs, names, limits, settings=planned.settings)}

    def answer(self, outputs: Outputs, table: pd.DataFrame) -> Iterator[Table | str]:
        """Yield the recommended deployment, how sure that is, and its rivals; or the nearest one."""
        config = outputs.read_config()
        points, limits = with_splits(table), limits_of(config)
        if not len(points):
            yield from refusals(table)
            yield from overloaded(config, table)
            return
        points = judged(points, limits)
        inside = within(points)
        if not len(inside):
            yield from nearest(points, limits, typed=limits_of_users(config))
            yield from overloaded(config, table)
            return
        best = best_of(inside)
        yield f"best: {sentence(best)}"
        yield from how_sure(config, best)
        yield from too_close(points, best)
        yield rivals_table(inside)
        share = 100 * float(config["slo"]["percentile"])
        yield f"times: of {share:g} % of the requests; KV memory in use: most at a time, of the fullest engine"
        yield from overloaded(config, table)
        yield from tighter_limits(inside, best)
        yield from apart_or_together(inside)
        yield from transfer_lines(config, inside)
        yield from settings_line(config, best)
        yield from power_line(config, design_of(config, best), best, _drawn_rates(outputs.read_json("summary"), best))
        yield from with_errors(config, outputs.read_json("summary"), best)
        yield from overlap_lines(config, best)

    def details(self, outputs: Outputs, table: pd.DataFrame) -> Iterator[Table | str]:
        """Yield the answer, and the overlap of steps by their sizes (`-v`)."""
        config = outputs.read_config()
        yield from self.answer(outputs, table)
        points = with_splits(table)
        inside = within(judged(points, limits_of(config))) if len(points) else points
        if len(inside):
            yield from overlap_spans(config, best_of(inside))

    def figures(self, table: pd.DataFrame, timelines: pd.DataFrame) -> Iterator[tuple[str, Draw]]:
        """Throughput against interactivity, and what limits leave."""
        points = with_splits(table)
        if len(points):
            yield "interactivity", partial(serving_figures.interactivity, points)
            # 0: no answer has a later token
            if (points["tpot_s"] > 0).any():
                yield "within_limits", partial(serving_figures.within_limits, points[points["tpot_s"] > 0])

    def extras(self, run: FinishedRun) -> Iterator[tuple[str, Any]]:
        """Steps of the engines of the best deployment, and their memory over time."""
        points = with_splits(run.outputs.read_table("results"))
        inside = within(judged(points, limits_of(run.config))) if len(points) else points
        if not len(inside):
            return
        best = best_of(inside)
        # runs are deterministic: the best point is served again for its log, which no table holds
        served = ServingBackend().serve(design_of(run.config, best), _LOGGED)
        log = served.state.log[: min(served.steps, _LOGGED)]
        pages = served.deployment.kv_pages
        yield "plan.yaml", plan_tree(design_of(run.config, best))
        yield "engine", partial(serving_figures.engine_steps, log[:_DRAWN], str(best["split"]))
        rivals = best_of_splits(inside)[:_RIVALS]
        runs = {str(row["split"]): ServingBackend().serve(design_of(run.config, row)) for row in rivals}
        slo = design_of(run.config, best).slo
        for name in TIMES:
            # answers of one token have no later ones
            if any(len(getattr(run_of_split, name)) for run_of_split in runs.values()):
                yield f"goodput_{name[:4]}", partial(serving_figures.goodput, runs, name, slo)
        yield "occupancy", partial(serving_figures.occupancy, log, pages, str(best["split"]))


def limits_of_users(config: Mapping[str, Any]) -> dict[str, float]:
    """Upper limits of times by metric, as `slo` gives them."""
    slo = Slo.model_validate({name: config["slo"].get(name) for name in TIMES})
    return {name: float(limit) for name in TIMES if (limit := getattr(slo, name)) is not None}


def limits_of(config: Mapping[str, Any]) -> dict[str, float]:
    """Upper limits by metric: those of the study, and of users (`slo`); the lower one of both."""
    limits = limits_of_users(config)
    for name, limit in (config["study"].get("limits") or {}).items():
        if limit.get("high") is not None:
            limits[name] = min(float(limit["high"]), limits.get(name, np.inf))
    return limits


def rivals_table(inside: pd.DataFrame) -> Table:
    """The best point of each split."""
    from rich.table import Table

    shown = Table(box=None, pad_edge=False)
    heads = ("split", "under way", "tokens/s a GPU", "tokens/s a user", "tokens a dollar", *TIMES.values(), _MEMORY)
    for place, name in enumerate(heads):
        shown.add_column(name, justify="right" if place else "left")
    for row in best_of_splits(inside)[:_SHOWN]:
        times = [_end(row[name]) for name in TIMES]
        priced = f"{row['tokens_per_usd']:,.0f}" if row["tokens_per_usd"] else "–"  # of a GPU without a price
        rates = [f"{row[RATE]:,.0f}", f"{row['tokens_per_s_per_user']:.1f}", priced]
        shown.add_row(row["split"], f"{under_way(row):.0f}", *rates, *times, f"{100 * row['kv_peak']:.0f} %")
    return shown


def refusals(table: pd.DataFrame) -> Iterator[str]:
    """Yield why nothing is served, the commonest reasons first."""
    if "reason" in table:
        for reason, count in table["reason"].value_counts().head(3).items():
            yield f"{count} of {len(table)} deployments: {reason}"


def nearest(points: pd.DataFrame, limits: Mapping[str, float], *, typed: Mapping[str, float]) -> Iterator[str]:
    """Yield what binds where no point is within the limits, and the nearest point. typed: the limits of `slo`."""
    limits = {name: limit for name, limit in limits.items() if name in points}
    if not limits:  # older tables have verdicts alone
        return
    for name, limit in limits.items():
        least = points.iloc[points[name].argmin()]
        if least[name] > limit:
            unit = "s" if name.endswith("_s") else ""
            rule = f"no deployment has a {TIMES.get(name, name)} within {cell(limit, unit)}"
            yield f"{rule}: the least is {cell(least[name], unit)}, by {least['split']}"
    # by how much a point misses the limit that it misses most
    excess = np.max([points[name].to_numpy(float) / limit for name, limit in limits.items()], axis=0)
    near = {str(name): value for name, value in points.iloc[int(np.argmin(excess))].items()}
    binding = max(limits, key=lambda name: float(near[name] / limits[name]))
    is_typed = typed.get(binding) == limits[binding]
    path = f"slo.{binding}" if is_typed else f"study.limits.{binding}.high"
    over = f"{100 * (float(excess.min()) - 1):.0f} % over {path}"
    yield f"nearest: {over}; {sentence(near)}"


def tighter_limits(inside: pd.DataFrame, best: Mapping[Any, Any]) -> Iterator[str]:
    """Yield which limit would change the split that is best: one that its interval misses, and a rival's holds."""
    rivals = inside[inside["split"] != best["split"]]
    for name, words in TIMES.items():
        low, high = interval_columns(name)
        # intervals that overlap would make it a matter of chance
        faster = rivals[rivals[high] < best[low]]
        if len(faster):
            rival = best_of(faster)
            lost = 100 * (1 - rival[RATE] / best[RATE])
            cost = f"{lost:.0f} % fewer tokens/s a GPU" if lost >= 1 else "as many tokens/s a GPU"
            yield f"for a {words} below {_end(best[low])}: {named(rival)}, {cost}"


def apart_or_together(inside: pd.DataFrame) -> Iterator[str]:
    """Yield whether engines of prompts apart beat engines that do both."""
    if "engines.apart" not in inside or inside["engines.apart"].nunique() < 2:
        return
    sides = [inside[inside["engines.apart"].astype(bool) == side] for side in (False, True)]
    together, apart = map(best_of, sides)
    gain = 100 * (apart[RATE] / together[RATE] - 1)
    words = f"{abs(gain):.0f} % {'more' if gain > 0 else 'fewer'} tokens/s a GPU"
    # the intervals overlap
    if apart[HIGH] >= together[LOW] and together[HIGH] >= apart[LOW]:
        words = "too close to call by tokens/s a GPU"
    yield f"prompts apart: {words} ({named(apart)}, against {named(together)})"


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
    # a prompt is on one rank, each of whose GPUs holds a part of a token's keys and values
    size = float(served.traffic.inputs.mean()) * pool.times.token_bytes * pool.rank_gpus
    share = sent / float(served.ttft_s.mean())
    way = "layer by layer during the prompt" if served.deployment.transfer.beside else "after the prompt"
    rates = [served.deployment.transfer.bytes_per_s * part.rank_gpus / 1e9 for part in served.deployment.pools]
    links = f"{rates[0]:,.0f} GB/s a rank that sends, {rates[1]:,.0f} GB/s one that receives"
    moves = f"{size / 1e6:,.0f} MB of a prompt at {links}, {way}"
    when = f"arrive {cell(sent, 's')} after it, {100 * share:.1f} % of the time to the first token"
    yield f"keys and values of {best['split']}: {moves}, {when}"


def design_of(config: Mapping[str, Any], row: Mapping[Any, Any]) -> Serving:
    """The deployment of a row of the table."""
    # a row holds values of knobs by dotted path, all else is of the configuration
    tree = {name: config[name] for name in SECTIONS}
    for path, value in row.items():
        if str(path).partition(".")[0] in SECTIONS and "." in str(path):
            tree = replaced(tree, str(path).split("."), plain(value))
    return ServingBackend().design(tree)


def replaced(tree: Mapping[str, Any], names: list[str], value: Any) -> dict[str, Any]:
    """A tree with another value at a path."""
    first, *below = names
    return {**tree, first: replaced(tree[first], below, value) if below else value}


def how_sure(config: Mapping[str, Any], best: Mapping[Any, Any]) -> Iterator[str]:
    """Yield how well the simulation knows the best point's times, and what that says of the limits."""
    share, limits, parts = 100 * float(config["slo"]["percentile"]), limits_of(config), []
    for words, name in (("first", "ttft_s"), ("later", "tpot_s")):
        low, high = (float(best[column]) for column in interval_columns(name))
        times = f"{_end(low)} {'to ' + _end(high) if best['enough'] else 'or more'}"
        limit = limits.get(name)
        verdict = "" if limit is None else _AGAINST[verdict_of(low, high if best["enough"] else np.inf, limit)]
        parts.append(f"{words} tokens {times}{'' if limit is None else f', {verdict} {_end(limit)}'}")
    asked = config["traffic"].get("requests")
    least = f"; traffic.requests = {asked:,} is too few for that" if asked and asked < best["counted"] else ""
    counted = f"{best['counted']:,.0f} requests of the steady state{least}"
    counted = (
        counted if config["traffic"].get("counted") == "steady" else f"{best['counted']:,.0f} requests, all of them"
    )
    yield f"for {share:g} % of the requests (95 % intervals of {counted}): {'; '.join(parts)}"


_AGAINST = {
    MEETS: "within the limit of",
    CLOSE: "too close to call against the limit of",
    MISSES: "beyond the limit of",
}


def too_close(points: pd.DataFrame, best: Mapping[Any, Any]) -> Iterator[str]:
    """Yield which other deployments may be better, as far as the simulation can tell."""
    close: dict[str, list[str]] = {}
    for rival, why in sorted(close_rivals(points, best), key=lambda pair: -float(pair[0][RATE])):
        close.setdefault(why, []).append(f"{named(rival)} ({rival[RATE]:,.0f} tokens/s a GPU)")
    for why, names in close.items():
        more = f", and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        yield f"too close to call: {', '.join(names[:_NAMED])}{more} {why}"


def overloaded(config: Mapping[str, Any], table: pd.DataFrame) -> Iterator[str]:
    """Yield which deployments cannot keep up with the traffic, and up to which rate they do."""
    if "reason" not in table or config["traffic"]["arrivals"] == "closed":
        return
    knees = dict[str, float]()
    for row in table[table["status"] == "infeasible"].to_dict("records"):
        design = design_of(config, row)
        try:
            if ServingBackend().refusal(design) is None:
                ServingBackend().serve(design)
        except Overloaded as error:
            # refused rows have no metrics: the knee is found again, by serving
            knees[split_of({**row, "gpus": deployment_of(design).gpus})] = error.knee
        except ConfigError:
            continue
    if knees:
        shown = sorted(knees.items(), key=lambda entry: -entry[1])[:_SHOWN]
        texts = [f"{split} (at most {rounded_down(knee)} requests/s)" for split, knee in shown]
        yield f"cannot keep up: {', '.join(texts)}"


def settings_line(config: Mapping[str, Any], best: Mapping[Any, Any]) -> Iterator[str]:
    """Yield the settings of the software that make the best point."""
    design = design_of(config, best)
    values = {path: get_path(_values(design), path) for path in design.server.flags}
    values |= {path: values[path] * int(design.parallel.dp) for path in design.server.of_all_ranks}
    flags = " ".join(f"{flag} {values[path]}" for path, flag in design.server.flags.items())
    if flags:
        yield f"{design.server.name}: {flags}"


def with_errors(config: Mapping[str, Any], summary: Mapping[str, Any], best: Mapping[Any, Any]) -> Iterator[str]:
    """Yield the best point's values with drawn errors, how often it stays the best, and what would change that."""
    entry, decision = (summary.get("decisions") or {}).get(str(best["key"])), read_decision(summary, best["key"])
    if entry is None or decision is None or "ranges" not in entry:
        return
    basis = ", ".join(f"{kind} by {text}" for kind, text in decision.basis.items())
    rests = "; times by ".join(filter(None, [basis, entry.get("deployments")]))  # older runs have no such entry
    yield f"with errors of predictions (90 %): {'; '.join(_with_drawn_errors(entry, best))} ({rests})"
    rival = f"; else mostly {decision.rival}" if decision.rival else ""
    inside = f"within the limits in {100 * entry['within']:.0f} % of {entry['draws']} draws, "
    yield f"{inside if limits_of(config) else ''}the best in {100 * decision.fastest:.0f} %{rival}"
    gpus = (config["system"].get("node") or {}).get("num_gpus") or 1
    yield from filter(None, [decision.advice, decision.measurement(config["system"]["name"], gpus)])
    for words, split in entry["changes"].items():
        answer = f"{split} is the best" if split else "none of these is within the limits"
        same = "no other split" if split == best["split"] else answer
        yield f"with {MORE:g} times as many {words}: {same}"


def _drawn_rates(summary: Mapping[str, Any], best: Mapping[Any, Any]) -> tuple[float, float] | None:
    """Ends of the interval of the best point's rate; None of open traffic, whose rate is what comes."""
    entry = (summary.get("decisions") or {}).get(str(best["key"])) or {}
    ends = entry.get("ranges", {}).get(RATE) if is_closed(best) else None
    return None if ends is None else (float(ends[0]), float(ends[1]))


def _end(seconds: float) -> str:
    """An end of an interval, in three digits: it is no better known."""
    return with_prefix(float(seconds), "second")


def _with_drawn_errors(entry: Mapping[str, Any], best: Mapping[Any, Any]) -> Iterator[str]:
    """Yield the ranges of the best point's values over draws, and in how many of these it cannot keep up."""
    ranges = entry["ranges"]
    # the rate of open traffic is what comes, whatever the errors
    rate = [f"{ranges[RATE][0]:,.0f} to {ranges[RATE][1]:,.0f} tokens/s a GPU"] if RATE in ranges else []
    times = [
        f"{words} {_end(ranges[name][0])} to {_end(ranges[name][1])}" for name, words in TIMES.items() if name in ranges
    ]
    if values := [*(rate if is_closed(best) else []), *times]:
        yield ", ".join(values)
    if entry["kept"] < 1:
        yield f"it cannot keep up in {100 * (1 - entry['kept']):.0f} % of the draws"


def overlap_lines(config: Mapping[str, Any], best: Mapping[Any, Any]) -> Iterator[str]:
    """Yield what the overlap of the best point's steps gains, and the setting that makes it."""
    design = design_of(config, best)
    choice = deployment_of(design).pools[-1].times.overlap
    if choice is None or set(choice.names) <= {"waited", "apart"}:
        return
    plain_engines = design.engines.model_copy(update={"overlap": "waited"})
    runs = []
    for point in (design, design.model_copy(update={"engines": plain_engines})):
        try:
            runs.append(ServingBackend().serve(point))
        except Overloaded:
            yield "overlap: without it, the engines cannot keep up"
            return
    used = _used(choice, context_octave(choice, runs[0].traffic))
    flags = [flag for name, flag in design.server.overlaps.items() if name in used]
    settings = f"; {design.server.name}: {' '.join(flags)}" if flags else ""
    yield f"overlap gains {_gain(*runs)}{settings}"


def _gain(served: ServingRun, waited: ServingRun) -> str:
    """Gain of a run over one without overlap: in tokens/s, or in time where traffic brings as many to both."""
    if not served.offered_per_s:
        rates = [run.rate(run.traffic.outputs) for run in (served, waited)]
        return f"{100 * (rates[0] / rates[1] - 1):.1f} % tokens/s"
    name = "tpot_s" if len(served.tpot_s) else "ttft_s"
    times = [float(getattr(run, name).mean()) for run in (served, waited)]
    return f"{100 * (times[1] / times[0] - 1):.1f} % {TIMES[name]}"


def overlap_spans(config: Mapping[str, Any], best: Mapping[Any, Any]) -> Iterator[str]:
    """Yield which overlap steps of the best point have by their size."""
    design = design_of(config, best)
    choice = deployment_of(design).pools[-1].times.overlap
    if choice is None or set(choice.names) <= {"waited", "apart"}:
        return
    octave = context_octave(choice, ServingBackend().serve(design).traffic)
    of_steps = {
        "steps with prompts, by tokens": _spans(choice.tokens, choice.prompts, choice.names),
        "steps without, by sequences": _spans(choice.sequences, choice.plain[:, octave], choice.names),
    }
    for what, spans in of_steps.items():
        yield f"overlap of {what}: {', '.join(spans)}"
    yield "; ".join(f"{name}: {OVERLAP_WORDS[name]}" for name in _used(choice, octave))


def _used(choice: OverlapChoice, octave: int) -> list[str]:
    """Overlaps that steps have at some size."""
    return [choice.names[place] for place in np.unique(np.append(choice.prompts, choice.plain[:, octave]))]


def _spans(sizes: Any, chosen: Any, names: Sequence[str]) -> Iterator[str]:
    """Yield runs of whole sizes with the same choice: that of a knot holds up to the next one."""
    # a choice holds from its knot to before the next one with another
    begins = np.flatnonzero(np.diff(chosen, prepend=-1))
    ends = [*(sizes[begins[1:]] - 1), sizes[-1]]
    for begin, end in zip(begins, ends, strict=True):
        yield f"{names[chosen[begin]]} {sizes[begin]:,} to {end:,}"


def _values(design: Serving) -> dict[str, Any]:
    """Sections whose values settings name."""
    return {"parallel": design.parallel.model_dump(), "server": design.server.model_dump()}


STUDY = ServingStudy()
