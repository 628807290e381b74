"""`profile import` of several ranks: what is transfer and what is waiting for late ranks.

Written into the folder:

    kernels.parquet      a row for each kernel of each rank, as of one rank, with `rank`
    collectives.parquet  a row for each rank of each shared collective: its duration, transfer and waiting
    ranks.yaml           clocks, times and shares of each rank, what was dropped
    figures/timeline     of the rank for which the others wait
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dse.errors import ConfigError, Problem
from dse.results.run_folder import Outputs
from dse.results.words import cell
from dse_traces.commands.lines import unknown_lines
from dse_traces.commands.one_rank import draw, kernels, summary, vars_of
from dse_traces.profile.kernels import Profile
from dse_traces.profile.ranks import Ranks, match, replay_without_waiting
from dse_traces.profile.replay import Replayed, replay
from dse_traces.profile.unnamed_kernels import unknown_kernels
from dse_traces.readers.formats import read_ranks

if TYPE_CHECKING:
    import pandas as pd
    from rich.table import Table

_SHOWN = 16  # classes of collectives, and ranks, in tables
_MOST_LOST = 4  # ranks with damaged files that are named


def read_files(paths: Sequence[Path]) -> tuple[list[Profile], list[str]]:
    """The profiles of all GPUs that some files hold, and which files could not be read, and why.

    Raises ConfigError where nothing can be read, or of several files one profile only.
    """
    profiles, problems = list[Profile](), list[Problem]()
    for path in paths:
        try:
            profiles += read_ranks(path)
        except ConfigError as error:
            problems += error.problems
    # one profile of several files is no comparison of ranks: the damage is the answer
    if not profiles or (problems and len(profiles) == 1):
        raise ConfigError(problems or [Problem("profile", "names no file")])
    return profiles, [str(problem) for problem in problems]


def import_ranks(profiles: Sequence[Profile], unread: Sequence[str] = ()) -> tuple[Ranks, dict[int, Replayed]]:
    """Match and replay the profiles of several ranks. unread: files that could not be read."""
    ranks = replace(match(profiles), unread=unread)
    return ranks, {rank: replay(profile) for rank, profile in ranks.profiles.items()}


def answer(ranks: Ranks, done: Mapping[int, Replayed]) -> Iterator[Table | str]:
    """Yield what a person wants to know of several ranks, the most important first."""
    table = ranks.by_label()
    counted = (
        f"{len(ranks.profiles)} ranks, {ranks.shared['collective'].nunique():,} collectives that several of them have"
    )
    yield counted + _damage(ranks.profiles)
    if ranks.assumed:
        yield ranks.assumed
    if table.empty:
        yield "no collective of a rank is one of another's, so waiting for ranks cannot be separated from transfer"
        yield _ranks(ranks, done)
        yield from _lost(ranks)
        yield from _unknown(ranks)
        return
    # transfer is equal on all ranks, waiting is a mean over them
    transfer, waited = float(table["transfer_s"].sum()), float(table["waited_s"].sum())
    share = 100 * waited / (transfer + waited) if transfer + waited else 0.0
    yield (
        f"collectives transfer for {cell(transfer, 's')} and wait for late ranks for {cell(waited, 's')} of a rank in "
        f"the mean, {share:.1f} % of their time; rank {ranks.slowest} waits least"
    )
    yield _labels(table)
    yield _ranks(ranks, done)
    middle, most = ranks.disagreement_s
    if np.isfinite(middle):
        yield (
            f"clocks are aligned by the ends of collectives, which then agree within {cell(middle, 's')} in the "
            f"median, {cell(most, 's')} for 95 % of them"
        )
    # clocks that agree worse than a transfer lasts suggest a wrong match
    if most > float(ranks.shared["transfer_s"].median()):
        yield "that is longer than half of the collectives take: these may be different ones, of traces cut differently"
    yield from _absent(ranks)
    yield from _unknown(ranks)
    yield from _lost(ranks)


def _absent(ranks: Ranks) -> Iterator[str]:
    """Yield that groups have more ranks than are here."""
    sizes = [profile.kernels["group_size"].dropna() for profile in ranks.profiles.values()]
    largest, here = max((int(size.max()) for size in sizes if len(size)), default=0), len(ranks.profiles)
    # ranks that are not here may be the late ones
    if largest > here:
        yield f"a group has {largest:,} ranks, and {here} are here: waiting for the others counts as transfer"


def _damage(profiles: Mapping[int, Profile]) -> str:
    """The shares of files that were lost, of the first ranks that lost any."""
    lost = [f"of rank {rank} {profile.lost}" for rank, profile in profiles.items() if profile.lost]
    more = f", and of {len(lost) - _MOST_LOST} more ranks" if len(lost) > _MOST_LOST else ""
    return f"; lost: {', '.join(lost[:_MOST_LOST])}{more}" if lost else ""


def _unknown(ranks: Ranks) -> Iterator[str]:
    """Yield what is told of the rank that has most of its time in kernels of unknown kind."""
    shares = {rank: unknown_kernels(profile).share for rank, profile in ranks.profiles.items()}
    most = max(shares, key=lambda rank: shares[rank])
    yield from (f"rank {most}: {line}" for line in unknown_lines(ranks.profiles[most]))


def _lost(ranks: Ranks) -> Iterator[str]:
    yield from (f"dropped: a file that cannot be read: {problem}" for problem in ranks.unread)
    if ranks.alone:
        yield f"dropped: {ranks.alone:,} collectives that one rank alone has, by their order, name and payload"
    losses = defaultdict[tuple[str, int], list[int]](list)
    for rank, profile in ranks.profiles.items():
        for loss in profile.dropped.items():
            losses[loss].append(rank)
    for (reason, count), where in losses.items():
        numbers = ", ".join(map(str, where[:_MOST_LOST])) + ", ..." * (len(where) > _MOST_LOST)
        yield f"dropped: rank{'s' * (len(where) > 1)} {numbers}: {count:,} {reason}"


def _labels(table: pd.DataFrame) -> Table:
    from rich.table import Table

    shown = Table(box=None, pad_edge=False)
    shown.add_column("class of collectives")
    for name in ("collectives", "transfer", "waiting, mean", "waiting, most", "slowest rank"):
        shown.add_column(name, justify="right")
    for label, row in table.head(_SHOWN).iterrows():
        times = [cell(float(row[name]), "s") for name in ("transfer_s", "waited_s", "longest_s")]
        shown.add_row(
            str(label), f"{int(row['count']):,}", *times, f"{int(row['last'])} ({100 * row['last_share']:.0f} %)"
        )
    return shown


def _ranks(ranks: Ranks, done: Mapping[int, Replayed]) -> Table:
    """Each rank: the first ones of many."""
    from rich.table import Table

    shown = Table(box=None, pad_edge=False)
    for name in (
        "rank",
        "span",
        "hidden",
        "exposed",
        "transfer",
        "waiting",
        "came last",
        "replayed",
        "replayed without waiting",
    ):
        shown.add_column(name, justify="right")
    for rank, row in ranks.by_rank().head(_SHOWN).iterrows():
        result = done[int(str(rank))]
        quick = replay_without_waiting(result.profile)
        times = [cell(float(row[name]), "s") for name in ("transfer_s", "waited_s")]
        spans = [cell(again.replayed.span_s, "s") for again in (result, quick)]
        hidden = f"{100 * result.recorded.hidden:.1f} %" if result.recorded.collective_s else "-"
        exposed = cell(result.recorded.exposed_s, "s")
        shown.add_row(
            str(rank), cell(result.recorded.span_s, "s"), hidden, exposed, *times, f"{int(row['last'])}", *spans
        )
    return shown


def ranks_summary(ranks: Ranks, done: Mapping[int, Replayed]) -> dict[str, Any]:
    """Content of `ranks.yaml`."""
    middle, most = ranks.disagreement_s
    by_rank = ranks.by_rank()
    return {
        "slowest": ranks.slowest if len(ranks.shared) else None,
        "collectives": int(ranks.shared["collective"].nunique()),
        "collectives_of_one_rank": ranks.alone,
        "unread": list(ranks.unread),
        **({"assumed": ranks.assumed} if ranks.assumed else {}),
        "disagreement_of_clocks_s": {"median": _number(middle), "most_of_95_per_cent": _number(most)},
        "ranks": {
            rank: {
                **summary(result),
                "clock_s": _number(ranks.clocks_s[rank]),
                **by_rank[["transfer_s", "waited_s"]].loc[rank].to_dict(),
                "came_last": int(by_rank["last"].loc[rank]),
                "replayed_without_waiting": vars_of(replay_without_waiting(result.profile).replayed),
            }
            for rank, result in done.items()
        },
    }


def _number(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def write(ranks: Ranks, done: Mapping[int, Replayed], outputs: Outputs) -> None:
    """Write tables, summary and the timeline of the rank for which the others wait."""
    import pandas as pd

    outputs.write_table("kernels", pd.concat([kernels(result).assign(rank=rank) for rank, result in done.items()]))
    outputs.write_table("collectives", ranks.shared)
    outputs.write_yaml("ranks.yaml", ranks_summary(ranks, done))
    draw(done[ranks.slowest if len(ranks.shared) else next(iter(done))], outputs)
