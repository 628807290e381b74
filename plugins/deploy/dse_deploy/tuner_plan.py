"""Rows of a tuner's file for the collectives of a step and its plan, and the plan that rows say of these collectives.

Sizes are cut at 0.75 and 1.5 times each power of two, as in the file that RCCL ships. A cell has the algorithm that the
plan chooses, where a collective of the step is of its size, and the faster one elsewhere; the fastest protocol by the
constants of the node (`simulators.costs.transfer`), or Simple at the sizes of the step alone where none were measured;
and the CUs of the plan's schedules beside GEMMs, or as many channels as the library takes by itself. Equal neighbours
are one row. The plug-in knows of a collective what NCCL tells it: collectives of the same kind, size and group cannot
be told apart, and take the largest number of channels.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dse.results.words import cell as in_words
from dse.space import get_path
from dse_deploy.step_calls import Call
from dse_deploy.tuner_file import ANY, MOST_BYTES, TunerCall, TunerFile, TunerRow, tuner_format
from simulators.steps.overlap.sites import SERIAL, read_schedule
from studies.plan.plan_file import Plan, put_in

COLLECTIVES = "parallel.collectives"
_SWITCHED = ("nvls", "nvls_tree", "collnet_direct", "collnet_chain")
_WIDEST = "simple"
"""The protocol that sends nothing but the payload."""
_LIMITED = "c3_sp comm_cus={}"
"""Schedule of a site whose collective has a number of channels of its own."""


@dataclass(frozen=True)
class Choice:
    """What a cell of sizes has. calls: of the step, of these sizes. limited: sites whose CUs are the channels."""

    algorithm: str
    protocol: str
    channels: int
    calls: tuple[Call, ...] = ()
    limited: tuple[str, ...] = ()

    @property
    def way(self) -> tuple[str, str, int]:
        """Algorithm, protocol and channels."""
        return self.algorithm, self.protocol, self.channels


def cells() -> Iterator[tuple[int, int, int]]:
    """Yield the least and the largest size of each cell [bytes], and the size that stands for it."""
    form = tuner_format()
    low, size = 0, form.first_bytes
    while size < form.last_bytes:
        yield low, size + size // 2, size
        low, size = size + size // 2 + 1, 2 * size
    yield low, MOST_BYTES, size


def choices(calls: Sequence[Call], plan: Plan, most_channels: int) -> Iterator[tuple[TunerRow, Choice]]:
    """Yield the rows for the collectives of a step, each with what it was chosen by.

    most_channels: that the library has; a plan with more CUs takes so many.
    """
    for (collective, nodes, ranks), alike in _groups(calls).items():
        by_cell = list[tuple[int, int, Choice | None]]()
        for low, high, size in cells():
            inside = [call for call in alike if low <= call.payload_bytes <= high]
            by_cell.append((low, high, _choice(inside, alike[0], size, plan)))
        for way, equal in itertools.groupby(by_cell, key=lambda cell: None if cell[2] is None else cell[2].way):
            lows, highs, ways = zip(*equal, strict=True)
            if way is not None:
                choice = functools.reduce(_joined, ways)
                algorithm, protocol, channels = choice.way
                least = min(channels, most_channels)
                yield TunerRow(collective, lows[0], highs[-1], algorithm, protocol, least, nodes, ranks), choice


def without_row(calls: Sequence[Call]) -> Iterator[str]:
    """Yield, in words, collectives of a step for which the file has no row."""
    names = tuner_format().collectives
    kinds = {(call.pattern, call.axis): call for call in calls if names.get(call.pattern) is None}
    for (pattern, axis), call in kinds.items():
        yield f"no row for {pattern} of {axis} among {call.ranks} GPUs: the format has no such collective"
    unmeasured = [call for call in calls if (call.pattern, call.axis) not in kinds and not call.is_measured]
    if patterns := ", ".join(dict.fromkeys(f"{call.pattern} of {call.axis}" for call in unmeasured)):
        yield f"rows at the sizes of the step alone, by Simple, as no protocol was measured: {patterns}"


def _groups(calls: Sequence[Call]) -> dict[tuple[str, int, int], list[Call]]:
    """Collectives that the plug-in can tell apart by their kind and group."""
    groups: dict[tuple[str, int, int], list[Call]] = {}
    for call in calls:
        name = tuner_format().collectives.get(call.pattern)
        if name is not None:
            groups.setdefault((name, call.nodes, call.ranks), []).append(call)
    return groups


def _choice(inside: Sequence[Call], like: Call, size: int, plan: Plan) -> Choice | None:
    """What a cell has; None where nothing was measured and no collective of the step is of its sizes."""
    longest = max(inside, key=lambda call: call.payload_bytes, default=None)
    at, of = (size, like) if longest is None else (longest.payload_bytes, longest)
    times = of.by_protocol(at)
    if not times and longest is None:
        return None
    protocol = min(times, key=lambda name: times[name], default=_WIDEST)
    switched = of.in_switch_s(at) if _by_switch(of, plan) else None
    # at sizes of the step the plan decides
    if switched is not None and (longest is not None or switched < times.get(protocol, 0.0)):
        algorithm, protocol = "nvls", _WIDEST
    else:
        algorithm = "ring"
    limits = {call.site: cus for call in inside if (cus := channels_of(call, plan)) is not None}
    channels = max(limits.values(), default=of.library_channels or ANY)
    return Choice(algorithm, protocol, channels, tuple(inside), tuple(limits))


def _by_switch(call: Call, plan: Plan) -> bool:
    chosen = get_path(plan, COLLECTIVES)
    # what the plan leaves open is as in its step, whose groups have a switch that adds or none
    return chosen in (None, "in_switch")


def channels_of(call: Call, plan: Plan) -> int | None:
    """CUs that the plan gives to a collective beside a GEMM; None where it leaves them to the library."""
    text = str(plan.get("sites", {}).get(call.site, SERIAL))
    if call.beside is None or text == SERIAL:
        return None
    schedule = read_schedule(text, call.site)
    if schedule.family != "concurrent" or schedule.comm_engine != "cu":
        return None
    return int(schedule.comm_cus or 0) or None


def _joined(choice: Choice, following: Choice) -> Choice:
    limited = dict.fromkeys((*choice.limited, *following.limited))
    return replace(choice, calls=(*choice.calls, *following.calls), limited=tuple(limited))


def times_in_words(choice: Choice) -> str:
    """What the collectives of a row take by its way, and by the others, in words; "" where the step has none there."""
    by_size = {(call.payload_bytes, call.pattern): call for call in choice.calls}
    parts = list[str]()
    for (size, pattern), call in by_size.items():
        times = call.by_protocol(size)
        switched = call.in_switch_s(size)
        if not times:
            parts.append(f"{in_words(size, 'byte')}: no protocol was measured, and Simple is assumed")
            continue
        own = switched if choice.algorithm == "nvls" and switched is not None else times[choice.protocol]
        own_name = "" if choice.algorithm == "nvls" else choice.protocol
        rings = [f"{in_words(seconds, 's')} by {name}" for name, seconds in times.items() if name != own_name]
        count = sum(other.times for other in choice.calls if other.payload_bytes == size and other.pattern == pattern)
        parts.append(f"{count:g} x {in_words(size, 'byte')}: {in_words(own, 's')} alone ({', '.join(rings)})")
    return "; ".join(parts)


@dataclass
class Unplanned:
    """What a file says that no plan has. unread: it means nothing to the step; unmodelled: it changes the step."""

    unread: list[str] = field(default_factory=list)
    unmodelled: list[str] = field(default_factory=list)


def read_rows(file: TunerFile, calls: Sequence[Call], plan: dict[str, Any], *, unset_channels: int) -> Unplanned:
    """Put what the rows of a file say of the collectives of a step into a plan. Sites that are there stay.

    unset_channels: that the plug-in leaves a collective without a row.
    """
    result, used = Unplanned(list(file.skipped)), set[int]()
    weight, notes = dict[str, float](), dict[str, list[str]]()
    for call in calls:
        name = tuner_format().collectives.get(call.pattern)
        if name is None:
            continue
        row = file.row_for(TunerCall(name, call.payload_bytes, call.nodes, call.ranks))
        if row is None:
            left = f"the plug-in leaves it {unset_channels} channel" if unset_channels else "the library chooses"
            of_size = f"{name} of {call.payload_bytes} bytes among {call.ranks}"
            notes.setdefault(f"no row for {of_size}: {left} ({{}})", []).append(call.name)
            continue
        used.add(row.line)
        chosen = "in_switch" if row.algorithm in _SWITCHED else "library"
        # a collective that the switch cannot compute says nothing of those that it can
        counts = chosen == "in_switch" or call.in_switch_s(call.payload_bytes) is not None
        weight[chosen] = weight.get(chosen, 0.0) + call.times * call.payload_bytes * counts
        channels = unset_channels if row.channels == ANY and unset_channels else row.channels
        if call.beside is not None and channels not in (ANY, call.library_channels):
            plan.setdefault("sites", {}).setdefault(call.site, _LIMITED.format(channels))
        for note in _not_of_the_model(row, call):
            notes.setdefault(note, []).append(call.name)
    if weight:
        put_in(plan, COLLECTIVES, max(weight, key=lambda name: weight[name]))
    if all(weight.get(name) for name in ("in_switch", "library")):
        result.unmodelled.append(f"some collectives by the switch and some not: {_shares(weight)}")
    result.unmodelled += [note.format(", ".join(dict.fromkeys(names))) for note, names in notes.items()]
    if lines := [str(row.line) for row in file.rows if row.line not in used]:
        result.unread.append(f"lines {', '.join(lines)}: no collective of the step is of their sizes and groups")
    return result


def _not_of_the_model(row: TunerRow, call: Call) -> Iterator[str]:
    """Yield what a row asks for that the time of a step does not follow, with a place for names of collectives."""
    times = call.by_protocol(call.payload_bytes)
    fastest = min(times, key=lambda name: times[name], default=row.protocol)
    if row.algorithm not in ("ring", *_SWITCHED):
        yield f"line {row.line}: {row.algorithm} for {{}}, which the model has by rings"
    if row.algorithm == "ring" and times and row.protocol != fastest:
        slower = f"{in_words(times[row.protocol], 's')}, by {fastest} {in_words(times[fastest], 's')}"
        yield f"line {row.line}: {row.protocol} for {{}} takes {slower}"
    elif call.beside is None and row.channels not in (ANY, call.library_channels):
        usual = call.library_channels
        yield f"line {row.line}: {row.channels} channels for {{}}, which the model has on {usual}"


def _shares(weight: Mapping[str, float]) -> str:
    total = sum(weight.values())
    return ", ".join(f"{name} {share / total:.0%} of the bytes" for name, share in weight.items())
