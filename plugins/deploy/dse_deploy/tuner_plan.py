"""Rows of a tuner's file for the collectives of a step and its plan, and the plan that rows say of these collectives.

Sizes are cut at 0.75 and 1.5 times each power of two, as in the file that RCCL ships. A cell has the algorithm that the
plan chooses, where a collective of the step is of its size, and the faster one elsewhere; the fastest protocol by the
constants of the node (`simulators.costs.transfer`), or Simple at the sizes of the step alone where none were measured;
and the CUs of the plan's schedules beside GEMMs, or the CTAs that the plan has over tp and over dp, or as many channels
as the library takes by itself. Equal neighbours are one row. The plug-in knows of a collective what NCCL tells it:
collectives of the same kind, size and group cannot be told apart, and take the largest number of channels.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dse.results.words import cell as in_words
from dse.space import get_path
from dse_deploy.facts import ModelFacts, put_ctas
from dse_deploy.step_calls import CTAS, Call
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
    """What a cell of sizes has. calls: of the step, of these sizes. limited: paths of what the channels follow."""

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
            by_cell.append((low, high, _choice(inside, alike, size, plan)))
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


def _choice(inside: Sequence[Call], alike: Sequence[Call], size: int, plan: Plan) -> Choice | None:
    """What a cell has; None where nothing was measured and no collective of the step is of its sizes."""
    longest = max(inside, key=lambda call: call.payload_bytes, default=None)
    at, of = (size, alike[0]) if longest is None else (longest.payload_bytes, longest)
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
    channels, limited = _channels(inside, alike, plan)
    return Choice(algorithm, protocol, channels, tuple(inside), limited)


def _channels(inside: Sequence[Call], alike: Sequence[Call], plan: Plan) -> tuple[int, tuple[str, ...]]:
    """Channels of a cell, and the paths of a plan that they follow; those of collectives of other sizes where it has
    none.
    """
    sites = {f"sites.{call.site}": cus for call in inside if (cus := channels_of(call, plan)) is not None}
    unlimited = [call for call in inside or alike if f"sites.{call.site}" not in sites]
    axes = {path: ctas for call in unlimited if (ctas := _ctas(call, plan)) and (path := CTAS.get(call.axis))}
    # what the plan leaves to the library takes what a schedule beside it has
    left = [] if sites else [call.library_channels for call in unlimited if not _ctas(call, plan)]
    # a schedule beside a GEMM decides, as one that a row has no number for would be lost
    channels = max(sites.values() or (*axes.values(), *left), default=0)
    return channels or ANY, (*sites, *(axes if inside else ()))


def _ctas(call: Call, plan: Plan) -> int:
    """CTAs that a plan has over the axis of a collective; 0 where it leaves them to the library."""
    path = CTAS.get(call.axis)
    return int(get_path(plan, path) or 0) if path else 0


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


def read_rows(file: TunerFile, facts: ModelFacts, plan: dict[str, Any], *, unset_channels: int) -> Unplanned:
    """Put what the rows of a file say of the collectives of a step into a plan. What is there stays.

    unset_channels: that the plug-in leaves a collective without a row.
    """
    result, read = Unplanned(list(file.skipped)), list[_Applied]()
    weight, notes = dict[str, float](), dict[str, list[str]]()
    for call in facts.calls:
        name = tuner_format().collectives.get(call.pattern)
        if name is None:
            continue
        row = file.row_for(TunerCall(name, call.payload_bytes, call.nodes, call.ranks))
        read.append(_Applied(call, row, unset_channels))
        if row is None:
            left = f"the plug-in leaves it {unset_channels} channel" if unset_channels else "the library chooses"
            of_size = f"{name} of {call.payload_bytes} bytes among {call.ranks}"
            notes.setdefault(f"no row for {of_size}: {left} ({{}})", []).append(call.name)
            continue
        chosen = "in_switch" if row.algorithm in _SWITCHED else "library"
        # a collective that the switch cannot compute says nothing of those that it can
        counts = chosen == "in_switch" or call.in_switch_s(call.payload_bytes) is not None
        weight[chosen] = weight.get(chosen, 0.0) + call.times * call.payload_bytes * counts
    ctas = {path: number for path, number in _by_axis(read) if not put_ctas(plan, path, number, facts)}
    for applied in (applied for applied in read if applied.row is not None):
        call, usual = applied.call, ctas.get(CTAS.get(applied.call.axis, ""), applied.call.library_channels)
        if call.beside is not None and applied.channels != usual:
            plan.setdefault("sites", {}).setdefault(call.site, _LIMITED.format(applied.channels))
        for note in _not_of_the_model(applied, usual):
            notes.setdefault(note, []).append(call.name)
    if weight:
        put_in(plan, COLLECTIVES, max(weight, key=lambda name: weight[name]))
    if all(weight.get(name) for name in ("in_switch", "library")):
        result.unmodelled.append(f"some collectives by the switch and some not: {_shares(weight)}")
    result.unmodelled += [note.format(", ".join(dict.fromkeys(names))) for note, names in notes.items()]
    used = {applied.row.line for applied in read if applied.row is not None}
    if lines := [str(row.line) for row in file.rows if row.line not in used]:
        result.unread.append(f"lines {', '.join(lines)}: no collective of the step is of their sizes and groups")
    return result


@dataclass(frozen=True)
class _Applied:
    """A collective of a step and its row. unset: channels where none are set; 0: as many as the library takes."""

    call: Call
    row: TunerRow | None
    unset: int

    @property
    def channels(self) -> int:
        """Channels on which it runs."""
        set_channels = ANY if self.row is None else self.row.channels
        return (self.unset or self.call.library_channels) if set_channels == ANY else set_channels

    @property
    def kind(self) -> tuple[str, int, int, int]:
        """What the plug-in knows of it."""
        return self.call.pattern, self.call.payload_bytes, self.call.nodes, self.call.ranks


def _by_axis(read: Sequence[_Applied]) -> Iterator[tuple[str, int]]:
    """Yield the knob of each axis whose collectives run on one number of channels other than the library's.

    Those that the plug-in cannot tell from one beside a GEMM count only where all are such.
    """
    beside = {applied.kind for applied in read if applied.call.beside is not None}
    for path in dict.fromkeys(CTAS.values()):
        plain = [applied for applied in read if CTAS.get(applied.call.axis) == path and applied.call.beside is None]
        counted = [applied for applied in plain if applied.kind not in beside] or plain
        numbers = {applied.channels for applied in counted}
        if len(numbers) == 1 and numbers != {applied.call.library_channels for applied in counted}:
            yield path, numbers.pop()


def _not_of_the_model(applied: _Applied, usual: int) -> Iterator[str]:
    """Yield what a row asks for that the time of a step does not follow, with a place for names of collectives.

    usual: channels on which the plan has the collective.
    """
    call, row = applied.call, applied.row
    if row is None:
        return
    times = call.by_protocol(call.payload_bytes)
    fastest = min(times, key=lambda name: times[name], default=row.protocol)
    if row.algorithm not in ("ring", *_SWITCHED):
        yield f"line {row.line}: {row.algorithm} for {{}}, which the model has by rings"
    if row.algorithm == "ring" and times and row.protocol != fastest:
        slower = f"{in_words(times[row.protocol], 's')}, by {fastest} {in_words(times[fastest], 's')}"
        yield f"line {row.line}: {row.protocol} for {{}} takes {slower}"
    elif call.beside is None and applied.channels != usual:
        yield f"line {row.line}: {applied.channels} channels for {{}}, which the model has on {usual}"


def _shares(weight: Mapping[str, float]) -> str:
    total = sum(weight.values())
    return ", ".join(f"{name} {share / total:.0%} of the bytes" for name, share in weight.items())
