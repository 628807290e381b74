"""Groups that files do not tell: streams of ranks are matched by what they carry, never by their numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dse_traces.commands.several_ranks import answer
from dse_traces.profile.kernels import Profile, profile_of
from dse_traces.profile.ranks import Ranks, match
from dse_traces.profile.replay import replay
from tests.support import drawn

US = 1e-6
SUM = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL"
GATHER = "ncclDevKernel_AllGather_RING_LL"
MESSAGE = "ncclDevKernel_SendRecv"
Kernel = tuple[str, str, float, float]
"""Name, stream, start and duration [µs]."""


def profile(rows: Sequence[Kernel], clock: str = "", **more: str | int) -> Profile:
    """A rank that computes first, then runs some kernels. more: columns of these."""
    table = [
        {"name": name, "stream": stream, "start_s": start * US, "seconds": seconds * US, **more}
        for name, stream, start, seconds in rows
    ]
    table.append({"name": "sm90_xmma_gemm", "stream": "7", "start_s": 0.0, "seconds": 5 * US})
    return replace(profile_of(table, "run"), clock=clock)


def calls(name: str, stream: str, starts: Sequence[float], seconds: float = 20) -> list[Kernel]:
    return [(name, stream, start, seconds) for start in starts]


def partners(ranks: Ranks) -> set[tuple[int, ...]]:
    """The ranks that share collectives."""
    return {tuple(part["rank"]) for _, part in ranks.shared.groupby("collective")}


@pytest.mark.slow
@drawn(60)
@given(st.permutations([SUM, GATHER, "cross_device_reduce_1stage"]), st.integers(1, 9), st.sampled_from(["", "run"]))
def test_streams_of_any_numbers_are_matched_by_what_they_carry(names: list[str], step: int, clock: str) -> None:
    """The numbers of a later process go on from where those of the first one end, in whatever order."""
    starts = {name: [100 + 10 * place + 40 * number for number in range(4)] for place, name in enumerate(sorted(names))}

    def of(rank: int, order: list[str]) -> Profile:
        numbered = enumerate(order, start=3 * rank)
        rows = [calls(name, str(20 + step * place), starts[name], 8) for place, name in numbered]
        return profile([kernel for row in rows for kernel in row], clock)

    first, second = of(0, sorted(names)), of(1, names)
    ranks = match([first, second])
    assert ranks.alone == 0
    assert partners(ranks) == {(0, 1)}
    assert ranks.shared.groupby("collective")["name"].nunique().max() == 1
    assert ranks.shared["waited_s"].max() == pytest.approx(0, abs=1e-12)


def test_streams_of_equal_names_and_counts_are_told_apart_by_the_times_between_their_ends() -> None:
    regular, uneven = [100, 200, 300, 400], [150, 180, 290, 310]
    ranks = match(
        [
            profile([*calls(SUM, "20", regular), *calls(SUM, "21", uneven)]),
            profile([*calls(SUM, "28", uneven), *calls(SUM, "29", regular)]),
        ]
    )
    assert ranks.alone == 0
    assert ranks.disagreement_s[1] == pytest.approx(0, abs=1e-12)


def test_the_first_streams_of_ranks_belong_together_where_nothing_else_tells() -> None:
    starts = [100, 200, 300]
    later = [start + 50 for start in starts]
    numbers = ("9", "20"), ("17", "28")
    ranks = match([profile([*calls(SUM, first, starts), *calls(SUM, second, later)]) for first, second in numbers])
    assert ranks.disagreement_s[1] == pytest.approx(0, abs=1e-12)


def test_a_trace_that_was_cut_is_matched_by_names() -> None:
    ranks = match([profile(calls(SUM, "20", range(100, 900, 100))), profile(calls(SUM, "28", range(100, 700, 100)))])
    assert (ranks.shared["collective"].nunique(), ranks.alone) == (6, 2)


def test_groups_of_one_name_that_run_at_different_times_of_one_clock_are_different() -> None:
    first, second = calls(SUM, "20", [100, 300, 500]), calls(SUM, "28", [200, 400, 600])
    ranks = match([profile(rows, "run") for rows in (first, first, second, second)])
    assert partners(ranks) == {(0, 1), (2, 3)}


def pipeline(count: int, clock: str = "") -> list[Profile]:
    """Ranks of a pipeline, which have a stream for each neighbour."""
    rows: list[list[Kernel]] = [[] for _ in range(count)]
    for pair in range(count - 1):
        starts = [100 * (pair + 1) + 1000 * step for step in range(5)]
        for rank, stream in ((pair, 40), (pair + 1, 20)):
            rows[rank] += calls(MESSAGE, str(stream + 100 * rank), starts)
    return [profile(row, clock) for row in rows]


@pytest.mark.parametrize("clock", ["", "run"])
def test_sends_and_receives_of_a_pipeline_connect_two_ranks_each(clock: str) -> None:
    ranks = match(pipeline(4, clock))
    assert partners(ranks) == {(0, 1), (1, 2), (2, 3)}
    assert ranks.shared["waited_s"].max() == pytest.approx(0, abs=1e-12)
    assert max(map(abs, ranks.clocks_s.values())) == pytest.approx(0, abs=1e-12)


def test_an_all_to_all_by_sends_and_receives_is_one_of_all_ranks() -> None:
    ranks = match([profile(calls(MESSAGE, str(20 + 8 * rank), [100, 300, 500])) for rank in range(4)])
    assert partners(ranks) == {(0, 1, 2, 3)}


def test_messages_of_several_neighbours_on_one_stream_are_matched_with_none() -> None:
    inner, outer = range(100, 900, 100), range(100, 500, 100)
    ranks = match([profile(calls(MESSAGE, "20", starts)) for starts in (outer, inner, outer)])
    assert ranks.alone == 16
    assert ranks.shared.empty


def messages(later: Sequence[float], clock: str = "") -> list[Profile]:
    """A rank that sends, for 20 µs from 100, 200, ... on, and one that receives each after its end by as much."""
    ends = [120 + 100 * place for place in range(len(later))]
    sent = calls(MESSAGE, "20", [end - 20 for end in ends])
    received = [(MESSAGE, "28", end + by - 10, 10.0) for end, by in zip(ends, later, strict=True)]
    first = profile(sent, clock, group="pp", collective="send", destination_rank=1)
    second = profile(received, clock, group="pp", collective="recv", source_rank=0)
    return [replace(first, rank=0), replace(second, rank=1)]


@pytest.mark.slow
@drawn(40)
@given(st.lists(st.integers(0, 90), min_size=1, max_size=7))
def test_a_receive_that_comes_late_shifts_no_clock(later: list[int]) -> None:
    quickest = min(later)
    assert match(messages(later)).clocks_s[1] == pytest.approx(-quickest * US)
    assert match(messages(later, "run")).clocks_s[1] == pytest.approx(0, abs=1e-12)


def test_copies_shift_no_clock() -> None:
    first, second = (calls("Memcpy PtoP", stream, [100, 200 + late, 300]) for stream, late in (("20", 0), ("28", 35)))
    apart = match([profile(first), profile(second)])
    assert apart.clocks_s[1] != apart.clocks_s[1]
    assert match([profile(first, "run"), profile(second, "run")]).clocks_s[1] == 0
    done = {rank: replay(profile_of_rank) for rank, profile_of_rank in apart.profiles.items()}
    assert not any("clocks are aligned" in line for line in answer(apart, done) if isinstance(line, str))
