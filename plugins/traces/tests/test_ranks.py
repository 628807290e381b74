"""Profiles of several ranks: collectives are matched, waiting is told from transfer, clocks are aligned."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from dse.cli import main
from dse.errors import ConfigError
from dse_traces.commands.several_ranks import answer, ranks_summary
from dse_traces.profile.kernels import Profile
from dse_traces.profile.ranks import Ranks, match, replay_without_waiting
from dse_traces.profile.replay import replay
from dse_traces.readers.formats import files_of, read
from tests.support import drawn

US = 1e-6
SUM = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL"
GROUP = {"Collective name": "allreduce", "In msg nelems": 1024, "dtype": "BFloat16", "Group size": 2}


def events(arrivals: Sequence[float], ends: Sequence[float], clock: float = 0.0) -> list[dict[str, Any]]:
    """Kernels that compute until each arrival, and a collective from there to its end [µs]."""
    rows: list[tuple[str, str, float, float, dict[str, Any]]] = []
    last = 0.0
    for arrival, end in zip(arrivals, ends, strict=True):
        rows.append(("gemm", "7", last, arrival - 1 - last, {}))
        rows.append((SUM, "20", arrival, end - arrival, GROUP))
        last = end + 1
    return [
        {"ph": "X", "cat": "kernel", "name": name, "ts": clock + start, "dur": dur, "args": {"stream": stream, **args}}
        for name, stream, start, dur, args in rows
    ]


def rank_file(folder: Path, rank: int | None, rows: list[dict[str, Any]], name: str = "") -> Path:
    head = {} if rank is None else {"distributedInfo": {"backend": "nccl", "rank": rank, "world_size": 2}}
    path = folder / (name or f"rank{rank}.json")
    path.write_text(json.dumps({"schemaVersion": 1, **head, "traceEvents": rows}))
    return path


def two(folder: Path, clock: float = 0.0) -> list[Path]:
    """Rank 1 comes to three collectives 30, 0 and 50 µs after rank 0; each transfers for 20 µs."""
    ends = [150, 300, 500]
    return [
        rank_file(folder, 0, events([100, 280, 430], ends)),
        rank_file(folder, 1, events([130, 280, 480], ends, clock)),
    ]


def ranks_of(paths: Sequence[Path]) -> Ranks:
    return match([read(path) for path in paths])


def waited(profile: Profile) -> list[float]:
    """Waiting in each collective [µs]."""
    column = profile.kernels["waited_for_ranks_s"].to_numpy(float)
    return [float(round(value / US, 3)) for value in column[profile.is_collective]]


def test_waiting_for_late_ranks_is_told_from_transfer(tmp_path: Path) -> None:
    ranks = ranks_of(two(tmp_path))
    assert waited(ranks.profiles[0]) == [30, 0, 50]
    assert waited(ranks.profiles[1]) == [0, 0, 0]
    assert np.isnan(ranks.profiles[0].kernels["waited_for_ranks_s"][~ranks.profiles[0].is_collective]).all()
    row = ranks.by_label().loc["allreduce"]
    assert row["transfer_s"] == pytest.approx(60 * US)
    assert (row["waited_s"], row["longest_s"]) == pytest.approx((40 * US, 80 * US))
    assert ranks.slowest == 1


def test_no_rank_waits_for_one_that_shares_no_collective(tmp_path: Path) -> None:
    group = {**GROUP, "Process Group Name": "another"}
    alone = [{**event, "args": {**event["args"], **group}} if event["name"] == SUM else event
             for event in events([100, 280], [150, 300])]  # fmt: skip
    late = events([130, 270, 480], [150, 300, 500])  # rank 1 waits for 10 us itself
    first = rank_file(tmp_path, 0, events([100, 280, 430], [150, 300, 500]))
    ranks = ranks_of([first, rank_file(tmp_path, 1, late), rank_file(tmp_path, 2, alone)])
    assert ranks.by_rank()["count"].tolist() == [3, 3, 0]
    assert ranks.slowest == 1
    assert match(list(ranks.profiles.values())[1:]).slowest == 1  # which share none


def test_one_rank_has_no_waiting(tmp_path: Path) -> None:
    assert read(two(tmp_path)[0]).kernels["waited_for_ranks_s"].isna().all()


@pytest.mark.parametrize("clock", [0.0, 7e6])
def test_clocks_are_aligned_by_the_ends_of_collectives(tmp_path: Path, clock: float) -> None:
    first, second = two(tmp_path, clock)
    rows = json.loads(second.read_text())
    rows["traceEvents"][0]["ts"] += 11  # what a profile begins with is time 0 of it
    second.write_text(json.dumps(rows))
    ranks = ranks_of([first, second])
    assert ranks.clocks_s[1] == pytest.approx(11 * US)
    assert ranks.disagreement_s == pytest.approx((0, 0), abs=1e-9)


def test_ranks_that_share_nothing_with_the_first_are_aligned_through_others(tmp_path: Path) -> None:
    files = two(tmp_path)
    third = json.loads(files[1].read_text())
    third["distributedInfo"]["rank"] = 2
    names = {0: ("a",), 1: ("a", "b"), 2: ("b",)}
    profiles = []
    for rank, source in enumerate([*files, tmp_path / "third.json"]):
        trace = third if rank == 2 else json.loads(source.read_text())
        rows = [row for row in trace["traceEvents"] if row["name"] == "gemm"]
        for row in (row for row in trace["traceEvents"] if row["name"] != "gemm"):
            rows += [{**row, "args": {**row["args"], "Process Group Name": name}} for name in names[rank]]
        profiles.append(read(rank_file(tmp_path, rank, rows, f"g{rank}.json")))
    ranks = match(profiles)
    assert set(ranks.clocks_s) == {0, 1, 2}
    assert np.isfinite(list(ranks.clocks_s.values())).all()
    assert ranks.shared["collective"].nunique() == 6


@pytest.mark.slow
@drawn(80)
@given(
    late=st.lists(st.tuples(*[st.integers(0, 90)] * 3), min_size=1, max_size=6),
    clocks=st.tuples(*[st.integers(0, 10**7)] * 3),
)
def test_waiting_is_what_the_last_rank_was_late_by(
    tmp_path_factory: pytest.TempPathFactory, late: list[tuple[int, ...]], clocks: tuple[int, ...]
) -> None:
    folder = tmp_path_factory.mktemp("ranks")
    ends = [1000 * (place + 1) for place in range(len(late))]
    profiles = []
    for rank, clock in enumerate(clocks):
        arrivals = [end - 100 + row[rank] for end, row in zip(ends, late, strict=True)]
        profiles.append(read(rank_file(folder, rank, events(arrivals, ends, clock))))
    ranks = match(profiles)
    for rank, profile in ranks.profiles.items():
        assert waited(profile) == pytest.approx([max(row) - row[rank] for row in late])
    assert ranks.disagreement_s[1] == pytest.approx(0, abs=1e-9)


def test_the_replay_of_a_rank_may_leave_waiting_out(tmp_path: Path) -> None:
    ranks = ranks_of(two(tmp_path))
    first, second = ranks.profiles.values()
    spans = [again(first).replayed.span_s for again in (replay, replay_without_waiting)]
    assert spans[0] - spans[1] == pytest.approx(80 * US, rel=1e-6)
    assert replay_without_waiting(second).replayed.span_s == pytest.approx(replay(second).replayed.span_s)


def test_ranks_without_numbers_or_with_the_same_are_numbered_by_their_files(tmp_path: Path) -> None:
    rows = events([100], [150])
    for numbers in ([None, None], [3, 3], [3, None]):
        paths = [rank_file(tmp_path, number, rows, f"{place}.json") for place, number in enumerate(numbers)]
        assert list(ranks_of(paths).profiles) == [0, 1]
    paths = [rank_file(tmp_path, number, rows, f"{number}.json") for number in (9, 4)]
    assert list(ranks_of(paths).profiles) == [4, 9]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("numbers", "assumed"),
    [
        ([0, 0], "0.json and 1.json name rank 0: taken as ranks 0 to 1 of one run, in the order of files; of two runs"),
        (
            [0, 0, 3, 3, 3],
            "0.json and 1.json name rank 0; 2.json, 3.json and 4.json name rank 3: taken as ranks 0 to 4",
        ),
        ([3, None], "1.json says no rank: taken as ranks 0 to 1 of one run, in the order of files"),
        ([None, None], "0.json and 1.json say no rank: taken as ranks 0 to 1"),
        ([0] * 9, "0.json, 1.json, 2.json, 3.json and 5 more name rank 0: taken as ranks 0 to 8"),
        ([9, 4], ""),
    ],
)
def test_what_is_assumed_of_ranks_that_files_do_not_tell_apart_is_in_the_first_lines(
    tmp_path: Path, numbers: list[int | None], assumed: str
) -> None:
    rows = events([100], [150])
    paths = [rank_file(tmp_path, number, rows, f"{place}.json") for place, number in enumerate(numbers)]
    ranks = ranks_of(paths)
    done = {rank: replay(profile) for rank, profile in ranks.profiles.items()}
    second = [line for line in answer(ranks, done) if isinstance(line, str)][1]
    assert ranks.assumed.startswith(assumed)
    assert (second == ranks.assumed) == bool(assumed)
    assert ranks_summary(ranks, done).get("assumed", "") == ranks.assumed
    assert bool(ranks.assumed) == bool(assumed)


@pytest.mark.slow
def test_a_path_through_one_of_two_files_of_the_same_rank_says_what_is_assumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder, later in (("a", 0), ("b", 40)):
        (tmp_path / folder).mkdir()
        for number, begin in enumerate((100, 130)):
            rows = events([begin, 280 + later], [150, 300 + later])
            rank_file(tmp_path / folder, 0, rows, f"{folder}{number}.json")
    assert main(["profile", "explain", f"{tmp_path / 'a'}", f"{tmp_path / 'b'}", f"out={tmp_path / 'out'}"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "a0.json and a1.json name rank 0: taken as ranks 0 to 1" in shown


def test_collectives_that_one_rank_alone_has_are_counted(tmp_path: Path) -> None:
    paths = [rank_file(tmp_path, 0, events([100, 280], [150, 300])), rank_file(tmp_path, 1, events([100], [150]))]
    ranks = ranks_of(paths)
    assert ranks.alone == 1
    assert waited(ranks.profiles[0])[0] == 0
    assert np.isnan(waited(ranks.profiles[0])[1])


def test_collectives_whose_ends_disagree_are_doubted(tmp_path: Path) -> None:
    rows = events([1000, 2000, 4000, 7000], [1020, 2020, 4020, 7020])
    other = [row for row in rows if row["ts"] != 2000]  # its second collective is the third of the first rank
    ranks = ranks_of([rank_file(tmp_path, 0, rows), rank_file(tmp_path, 1, other)])
    done = {rank: replay(profile) for rank, profile in ranks.profiles.items()}
    assert any("may be different ones" in line for line in answer(ranks, done) if isinstance(line, str))


def test_files_of_ranks_are_named_by_a_folder_a_pattern_or_a_list(tmp_path: Path) -> None:
    paths = [rank_file(tmp_path, rank, events([100], [150])) for rank in (10, 2, 1)]
    (tmp_path / "notes.txt").write_text("no profile")
    ordered = [tmp_path / f"rank{rank}.json" for rank in (1, 2, 10)]
    assert files_of(str(tmp_path)) == ordered
    assert files_of(str(tmp_path / "rank*.json")) == ordered
    assert files_of(",".join(map(str, paths))) == paths
    assert files_of(str(paths[0])) == [paths[0]]
    with pytest.raises(ConfigError, match="no file that can be read"):
        files_of(str(tmp_path / "nothing*"))


@pytest.mark.slow
def test_the_command_tells_transfer_from_waiting(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    two(tmp_path)
    (tmp_path / "rank7.json").write_text('{"traceEvents": []}')
    assert main(["profile", "import", f"profile={tmp_path}", f"out={tmp_path / 'out'}"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "transfer for 60.00 µs and wait for late ranks for 40.00 µs" in shown
    assert "a file that cannot be read" in shown
    assert "rank 1 waits least" in shown
    summary = yaml.safe_load((tmp_path / "out" / "ranks.yaml").read_text())
    assert summary["slowest"] == 1
    assert summary["ranks"][0]["waited_s"] == pytest.approx(80 * US)
    table = pd.read_parquet(tmp_path / "out" / "kernels.parquet")
    assert table.groupby("rank")["waited_for_ranks_s"].sum().tolist() == pytest.approx([80 * US, 0])


def test_files_of_which_no_two_can_be_read_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rank_file(tmp_path, 0, events([100], [150]))
    (tmp_path / "rank7.json").write_text("{}")
    assert main(["profile", "import", f"profile={tmp_path}", f"out={tmp_path / 'out'}"]) == 2
    assert "no traceEvents" in capsys.readouterr().err
