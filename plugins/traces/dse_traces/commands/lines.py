"""Lines that several commands print: how much communication is hidden, and which kernels are of unknown kind."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from dse.results.words import cell
from dse_traces.profile.hidden_communication import copy_runs, notifying_kernels, overlap_of
from dse_traces.profile.kernel_classes import OPTION, Patterns, fits_pattern
from dse_traces.profile.kernels import Profile
from dse_traces.profile.overlap import Overlapped
from dse_traces.profile.unnamed_kernels import if_they_communicate, unknown_kernels

_WORTH = 0.001  # of the time of communication, that is told


def share_of_run(seconds: float, run_s: float) -> str:
    """Share of a run, in words.

    >>> share_of_run(1.0, 8.0)
    '12.5 % of the run'
    """
    return f"{100 * seconds / run_s:.1f} % of the run"


def time_words(seconds: float, least_s: float) -> str:
    """A time in words; 0 where it is at most `least_s`, whatever its sign.

    >>> time_words(-2e-3, 5e-8), time_words(1e-9, 5e-8)
    ('-2.000 ms', '0')
    """
    if abs(seconds) <= least_s:
        return "0"
    return f"{'-' if seconds < 0 else ''}{cell(abs(seconds), 's')}"


def communication_lines(profile: Profile, recorded: Overlapped) -> Iterator[str]:
    """Yield how much of the communication of a profile is hidden, the most important first."""
    if not recorded.collective_s:
        yield _nothing_known(profile)
        return
    share = share_of_run(recorded.exposed_s, recorded.span_s)
    yield (
        f"collectives take {cell(recorded.collective_s, 's')}, {100 * recorded.hidden:.1f} % of it beside "
        f"computation; {cell(recorded.exposed_s, 's')} are exposed, {share}"
    )
    if (copies := profile.is_peer_copy).any():
        runs = copy_runs(profile)
        text = f"{copies.sum():,} copies between GPUs by copy engines, in {runs:,} run{'s' if runs > 1 else ''}"
        yield f"  of it {text}: {cell(overlap_of(profile, copies).collective_s, 's')}"
    yield from _fused(profile)
    # a kernel that waits for a late rank moves no data, however long it runs
    notes = notifying_kernels(profile)
    moves = overlap_of(profile, profile.has_communication & ~notes)
    if moves.collective_s and profile.seconds[notes].sum() > _WORTH * recorded.collective_s:
        waited = cell(float(profile.seconds[notes].sum()), "s")
        hidden = f"{100 * moves.hidden:.1f} % is hidden"
        yield f"  of it kernels that notify or wait for ranks: {waited}; without them {hidden}"


def _fused(profile: Profile) -> Iterator[str]:
    """Yield how long kernels run that multiply and communicate in one."""
    if not (fused := profile.is_fused).any():
        return
    # products hide their own communication, so that they raise the share of the rest
    separate = overlap_of(profile, profile.is_collective)
    without = f"; without them {100 * separate.hidden:.1f} % is hidden" if separate.collective_s else ""
    takes = cell(overlap_of(profile, fused).collective_s, "s")
    yield (
        f"  of it kernels that multiply and communicate in one ({fused.sum():,}): {takes}, taken as hidden inside (how "
        f"long they move data is not recorded){without}"
    )


def _nothing_known(profile: Profile) -> str:
    """A line that nothing communicates, as far as that is known."""
    unknown = unknown_kernels(profile)
    if not unknown.counts:
        return "no kernel of it communicates"
    return "no kernel of known kind communicates" + (f", but {unknown.busy} is of unknown kind" if unknown.busy else "")


def unknown_lines(profile: Profile) -> Iterator[str]:
    """Yield what is to be told of the unknown kernels of a profile, if they take enough time."""
    unknown = unknown_kernels(profile)
    if not unknown.counts:
        return
    busy = f"; {unknown.busy}" if unknown.streams else ""
    yield (
        f"{100 * unknown.share:.1f} % of the time of kernels is of unknown kind, taken as computation{busy}: "
        f"{unknown.largest}"
    )
    if unknown.streams:
        done = if_they_communicate(profile, unknown)
        share = f"{100 * done.hidden:.1f} % of {cell(done.collective_s, 's')}"
        yield f"if kernels of stream {', '.join(unknown.streams)} communicate, {share} of communication is hidden"
    yield unknown.way_out()


def unused_patterns(profiles: Iterable[Profile], patterns: Patterns) -> Iterator[str]:
    """Yield a line for each pattern of a user that no kernel of any of the profiles fits."""
    names = {str(name) for profile in profiles for name in profile.kernels["name"].unique()} if patterns else set()
    for kind, texts in patterns.items():
        # patterns that fit nothing are usually typed wrongly
        for text in texts:
            if not any(fits_pattern(name, text) for name in names):
                yield f"{OPTION}.{kind}: no kernel fits the pattern {text}"
