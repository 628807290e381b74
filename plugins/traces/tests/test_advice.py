"""What-ifs on profiles: each change alone, all together, their bounds, and the command."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.traces import made_training
from dse.cli import main
from dse.errors import ConfigError
from dse_traces.change.advice import Advice, advise
from dse_traces.change.bound import lower_bound
from dse_traces.change.dependencies import FIRST, LATER, ORDERS
from dse_traces.change.plan_results import outcomes
from dse_traces.change.settings import Setting
from dse_traces.change.software import HARDLY, NO, PERHAPS, SURELY, software_verdicts
from dse_traces.change.what_if import Plan, WhatIfs, best_together, computed_until, host_seconds, try_all
from dse_traces.laws.contention import assumed_laws, learn_laws
from dse_traces.laws.machine import machine_named, machine_of
from dse_traces.laws.task_graph import EXPECTED, contention_model
from dse_traces.profile.kernels import GRAPH_NAME, Profile, profile_of
from dse_traces.profile.ranks import match
from simulators.costs.collective import collective_seconds
from simulators.costs.other_software import ratio_error
from tests.support import drawn

US = 1e-6
GEMM, SUM = "sm90_xmma_gemm_bf16", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL"
GATHER = "ncclDevKernel_AllGather_RING_LL"


def kernel(name: str, stream: str, start: float, duration: float, **columns: Any) -> dict[str, Any]:
    """A kernel; times in microseconds."""
    return {"name": name, "stream": stream, "start_s": start * US, "seconds": duration * US, **columns}


def serial(name: str = SUM, *, payload: float | None = None, count: int = 3) -> Profile:
    """GEMMs of 1 ms, and a collective of 0.8 ms after each, which the next GEMM waits for."""
    rows: list[dict[str, Any]] = []
    for place in range(count):
        start = 1800.0 * place
        rows.append(kernel(GEMM, "7", start, 1000, ctas=13200))
        rows.append(kernel(name, "20", start + 1000, 800, ctas=16, payload_bytes=payload))
    return profile_of([*rows, kernel(GEMM, "7", 1800.0 * count, 1000, ctas=13200)], "made")


def what_ifs(profile: Profile, system: str = "h100_8") -> WhatIfs:
    return WhatIfs(contention_model(profile, learn_laws(profile, assumed_laws(system))))


def gain(runs: WhatIfs, setting: Setting, group: int = 0) -> Any:
    """Gain of one setting in each case of the laws [us]."""
    return (runs.recorded_s - runs.seconds([Plan().with_setting(group, setting)])[0]) / US


@pytest.mark.slow
def test_plans_run_together_take_as_long_as_each_alone() -> None:
    runs = what_ifs(serial())
    choices = [Setting(), Setting(sms=4), Setting("in 4 parts"), Setting("in 4 parts", sms=4), Setting(link=2.0)]
    plans = [Plan().with_setting(0, choice) for choice in choices]
    alone = np.array([runs.seconds([plan])[0] for plan in plans])
    np.testing.assert_array_equal(runs.seconds(plans), alone)


def test_a_chain_cut_into_parts_hides_its_collectives_as_a_pipeline_does() -> None:
    runs = what_ifs(serial())
    free = runs.recorded_s[EXPECTED]
    latency = runs.model.laws.rate.latency_s
    for parts in (2, 4):
        changed = free - gain(runs, Setting(f"in {parts} parts"))[EXPECTED] * US
        hidden = 3 * 0.8e-3 * (1 - 1 / parts)  # beside the GEMM before; the one after hides what is left, if slowed
        assert 4 * 1e-3 <= changed <= free - hidden + 3 * (parts * latency + 0.5e-3)
    assert gain(runs, Setting("in 2 parts"))[EXPECTED] > 500


def test_what_is_faster_alone_is_faster_by_its_share_of_the_time() -> None:
    runs = what_ifs(serial())
    low, expected, high = gain(runs, Setting(link=2.0))
    assert (low, high) == (pytest.approx(0, abs=1), pytest.approx(3 * 400, rel=1e-3))
    assert expected == pytest.approx(3 * 200, rel=1e-3)


def test_copy_engines_carry_gathers_but_add_nothing() -> None:
    assert what_ifs(serial()).effects.movers(0) == ["SMs", "switch"]
    assert what_ifs(serial(GATHER)).effects.movers(0) == ["SMs", "copy engines", "switch"]
    assert what_ifs(serial(), "mi300x_8").effects.movers(0) == ["SMs"]


@pytest.mark.parametrize("system", ["h100_8", "b200_8", "a100_8"])
def test_software_is_judged_by_the_door_of_collectives(system: str) -> None:
    """Of a serial run whose collectives only move data, software gains what its time is less than the library's."""
    runs = what_ifs(serial(GATHER, payload=2.0**26), system)
    (terms,) = runs.effects.terms
    verdicts = {verdict.software.name: verdict for verdict in software_verdicts(runs)}
    assert "nccl_copy_engine" in verdicts
    for name, verdict in verdicts.items():
        ours, library = (
            float(collective_seconds(machine_named(system), "all_gather", 2.0**26, 8, by)) for by in (name, "nccl")
        )
        moved_s = 3 * 800 * US * terms.moves
        assert verdict.software.ratio == pytest.approx(ours / library)
        gains = (1 - ours / library) * moved_s
        assert verdict.gain.value == pytest.approx(gains[EXPECTED], abs=4e-6)
        off = np.exp(ratio_error())
        least, most = (1 - ours / library * off) * moved_s, (1 - ours / library / off) * moved_s
        assert verdict.gain.low == pytest.approx(min(least.min(), most.min()), abs=4e-6)
        assert verdict.gain.high == pytest.approx(max(least.max(), most.max()), abs=4e-6)


def test_what_moves_by_copy_engines_takes_the_time_of_software_that_uses_them() -> None:
    runs = what_ifs(serial(GATHER, payload=2.0**26))
    engines, software = (Setting(mover="copy engines"), Setting(software="nccl_copy_engine"))
    assert gain(runs, engines) == pytest.approx(gain(runs, software))
    assert runs.effects.of(0, engines)[1] == runs.effects.of(0, software)[1] == 0


def test_software_pays_surely_only_where_its_ratio_was_measured() -> None:
    def verdicts(payload: float | None, system: str = "h100_8", name: str = SUM) -> dict[str, str]:
        judged = software_verdicts(what_ifs(serial(name, payload=payload), system))
        return {of.software.name: of.verdict for of in judged}

    assert verdicts(2.0**18)["nccl_symmetric"] == SURELY
    assert verdicts(2.0**26)["multimem"] == PERHAPS  # 0.78 of the library's time, by 27 % more or less
    assert verdicts(2.0**26)["symm_mem_two_shot"] == HARDLY
    assert verdicts(2.0**18, "mi300x_8")["aiter_custom"] == PERHAPS
    assert verdicts(2.0**12, name=GATHER)["nccl_copy_engine"] == NO
    # of an unknown size nothing is sure, however much it gains
    assert verdicts(None) and SURELY not in verdicts(None).values() and PERHAPS in verdicts(None).values()
    rank = advise_ranks(late(0))
    assert {of.verdict for of in software_verdicts(rank) if of.software.ratio < 0.6} == {SURELY}


def advise_ranks(profiles: Sequence[Profile]) -> WhatIfs:
    """What-ifs of the rank for which others wait, of which the transfer is known."""
    ranks = match(profiles)
    return what_ifs(ranks.profiles[ranks.slowest])


def test_software_is_not_judged_where_the_library_did_not_run_or_the_group_leaves_a_node() -> None:
    assert not software_verdicts(what_ifs(serial("multimem_all_reduce_kernel", payload=2.0**26)))
    assert not software_verdicts(what_ifs(serial(GATHER, payload=2.0**26), "mi300x_8"))
    kernels = serial(payload=2.0**26).kernels.assign(group_size=pd.array([None, 64] * 3 + [None], dtype="Int64"))
    assert not software_verdicts(what_ifs(Profile(kernels, "made")))


def beside() -> Profile:
    """GEMMs of 8 waves, of which every other eight run beside a short message on 32 SMs, and take longer than the 10
    waves that are left to them.
    """
    rows, start = list[dict[str, Any]](), 0.0
    for iteration in range(8):
        reduced = iteration % 2 == 1
        lasts = 150.0 if reduced else 100.0
        rows += [kernel(GEMM, "7", start + lasts * place, lasts, ctas=1000) for place in range(8)]
        rows += [kernel(SUM, "20", start, 8 * lasts, ctas=32, payload_bytes=1e3)] if reduced else []
        start += 8 * lasts
    return profile_of(rows, "made")


def test_of_lost_sms_and_interference_the_larger_counts() -> None:
    runs = what_ifs(beside())
    assert runs.model.laws.penalties["GEMM"].factor.value == pytest.approx(1.5)
    gains = [gain(runs, Setting(sms=count))[EXPECTED] for count in (64, 32, 16, 1)]
    assert gains[1] == pytest.approx(0, abs=1)
    assert gains[0] < -100  # 15 waves on the SMs that 64 leave, longer than interference
    assert gains[2] == pytest.approx(0, abs=1)  # 9 waves are hidden by interference as 10 are
    _, taken = runs.effects.of(0, Setting(mover="switch"))
    assert 0 < taken < 32


def test_a_collective_behind_another_one_begins_when_its_own_kernel_has_ended() -> None:
    rows = [
        kernel(GEMM, "7", 0, 100, launch_s=-20 * US, ctas=132),
        kernel(GEMM, "7", 101, 100, launch_s=-19 * US, ctas=132),
        kernel(SUM, "20", 400, 300, launch_s=392 * US, ctas=16),
        kernel(GEMM, "7", 702, 100, launch_s=-18 * US, ctas=132),
    ]
    assert gain(what_ifs(profile_of(rows, "made")), Setting("earlier"))[EXPECTED] == pytest.approx(199, abs=12)


def small_buckets() -> Profile:
    """A backward pass, then eight small all-reduces that the optimizer waits for."""
    rows = [kernel(GEMM, "7", 0, 100, ctas=132)]
    rows += [kernel(SUM, "20", 101 + 41 * place, 40, ctas=16, payload_bytes=1e6) for place in range(8)]
    return profile_of([*rows, kernel("adam", "7", 101 + 41 * 8, 50, ctas=400)], "made")


def test_merged_buckets_save_a_latency_each() -> None:
    runs = what_ifs(small_buckets())
    latency = runs.model.laws.rate.latency_s / US
    by_two, by_four = (gain(runs, Setting(f"{count} merged"))[EXPECTED] for count in (2, 4))
    assert by_two == pytest.approx(4 * latency, abs=8)
    assert by_four == pytest.approx(6 * latency, abs=8)


def test_buckets_that_kernels_wait_for_one_by_one_are_not_merged() -> None:
    assert gain(what_ifs(serial()), Setting("2 merged"))[EXPECTED] == pytest.approx(0, abs=1e-6)


def test_a_collective_of_high_priority_waits_for_one_wave_of_the_kernel_beside_it() -> None:
    runs = what_ifs(behind_sms())
    (paused,) = ORDERS[FIRST](runs.model, runs.model.structure, 0).paused_s.values()
    assert runs.model.unknown_s.max() == pytest.approx(600 * US, rel=0.02)
    assert paused == pytest.approx(250 * US)
    assert 150 < gain(runs, Setting(FIRST))[EXPECTED] < 350  # both run slower beside one another


def test_kernels_that_go_first_hide_a_collective() -> None:
    rows = [kernel(GEMM, "7", 0, 100), kernel(SUM, "20", 101, 200)]
    rows += [kernel(GEMM, "7", 302 + 101 * place, 100) for place in range(4)]
    low, expected, high = sorted(gain(what_ifs(profile_of(rows, "made")), Setting(LATER)))
    assert 90 < low <= expected <= high < 205


def test_a_gpu_of_twice_the_peak_takes_half_the_time_of_kernels() -> None:
    runs = what_ifs(serial(), "a100_8")
    flops = 312.0 / 989.4  # of the data sheets
    assert runs.pace("h100_8").shares["waves of CTAs"] == pytest.approx(1)
    changed = runs.seconds([Plan(gpu="h100_8")])[0, EXPECTED]
    assert runs.recorded_s[EXPECTED] - changed == pytest.approx(4e-3 * (1 - flops), rel=0.02)


@pytest.fixture(scope="module")
def advice() -> Advice:
    return advise(made_training(240, groups=4), "h100_8")


@pytest.mark.slow
def test_all_changes_together_lie_between_the_best_alone_and_the_bound(advice: Advice) -> None:
    software = [setting.in_software for setting in advice.tried.settings]
    alone = float(advice.tried.seconds[software, EXPECTED].min())
    assert advice.bound_s <= advice.together_s.value * (1 + 1e-9)
    assert advice.together_s.value <= alone + 2e-3 * advice.recorded_s
    assert advice.together_s.value < 0.97 * advice.recorded_s
    gains = sum(group.gain.value for group in advice.groups)
    assert advice.recorded_s - advice.together_s.value <= gains + 0.2 * advice.recorded_s


@pytest.mark.slow
def test_gains_are_intervals_around_what_is_expected(advice: Advice) -> None:
    for group in advice.groups:
        for estimate in (group.gain, group.faster_link, group.waited_later):
            assert estimate.low <= estimate.value <= estimate.high
        assert 0 <= group.exposed_s <= group.seconds * (1 + 1e-9)


@pytest.mark.slow
def test_no_what_if_in_software_is_below_the_bound(advice: Advice) -> None:
    software = np.array([setting.in_software for setting in advice.tried.settings])
    assert advice.tried.seconds[software, EXPECTED].min() >= advice.bound_s * (1 - 1e-9)
    assert advice.host_s <= advice.bound_s


def test_a_run_whose_collectives_are_hidden_has_nothing_to_gain() -> None:
    rows = [kernel(GEMM, "7", 101 * place, 100, ctas=100) for place in range(20)]
    rows.append(kernel(SUM, "20", 102, 150, ctas=2))
    runs = what_ifs(profile_of(rows, "made"))
    tried = try_all(runs)
    plan, count = best_together(runs, tried)
    assert runs.recorded_s[EXPECTED] - runs.seconds([plan])[0, EXPECTED] < 0.05 * runs.recorded_s[EXPECTED]
    assert count > 0 and lower_bound(runs, tried) <= runs.recorded_s[EXPECTED]


def behind_sms() -> Profile:
    """A collective that waits beside a kernel of four waves, for which priority makes it wait for one."""
    rows = [kernel(GEMM, "7", 0, 1000, ctas=4 * 132), kernel(SUM, "20", 0, 10, ctas=16)]
    return profile_of([*rows, kernel(SUM, "20", 610, 1000, ctas=16), kernel("adam", "7", 1611, 50, ctas=400)], "made")


def on_two_streams() -> Profile:
    """GEMMs of two streams, of which the second needs the sum of the first: in parts they run at once."""
    rows = [kernel(GEMM, "7", 0, 1000, ctas=13200), kernel(SUM, "20", 1001, 100, ctas=16)]
    return profile_of([*rows, kernel(GEMM, "8", 1102, 1000, ctas=13200)], "made")


def short_sums() -> Profile:
    """Eight all-reduces one after another that take hardly more than a latency, and nothing else of note."""
    rows = [kernel(GEMM, "7", 0, 10, ctas=132)]
    rows += [kernel(SUM, "20", 11 + 16 * place, 15, ctas=16, payload_bytes=1e5) for place in range(8)]
    return profile_of([*rows, kernel("adam", "7", 140, 5, ctas=400)], "made")


@pytest.mark.parametrize("build", [serial, beside, small_buckets, behind_sms, on_two_streams, short_sums])
def test_no_plan_in_software_is_below_the_bound(build: Callable[[], Profile]) -> None:
    runs = what_ifs(build())
    tried = try_all(runs)
    plan, _ = best_together(runs, tried)
    software = [setting.in_software for setting in tried.settings]
    replaced = [verdict.gain.value for verdict in software_verdicts(runs)]
    shortest = min(runs.seconds([plan])[0, EXPECTED], tried.seconds[software, EXPECTED].min())
    shortest = min(shortest, runs.recorded_s[EXPECTED] - max(replaced, default=0.0))
    assert 0 < lower_bound(runs, tried) <= shortest * (1 + 1e-9)


def test_the_host_does_not_bound_a_run_of_large_copies_and_whole_graphs() -> None:
    names = ("Memcpy HtoD (Pinned -> Device)", "Memset (Device)", f"{GRAPH_NAME} 7", GEMM, SUM)
    rows = [kernel(name, "7", 1001 * place, 1000) for place, name in enumerate(names)]
    runs = what_ifs(profile_of(rows, "made"))
    assert host_seconds(runs) < 10 * US < 5e-3 < runs.recorded_s[EXPECTED]


def test_kernels_that_compute_at_once_hide_a_collective_once() -> None:
    rows = [kernel("adam", stream, 0, 100, ctas=4) for stream in ("7", "8")]
    rows += [kernel(SUM, "20", 0, 200, ctas=1), kernel("adam", "7", 150, 20, ctas=4)]
    runs = what_ifs(profile_of(rows, "made"))
    assert runs.exposed_s.sum() == pytest.approx(80 * US, abs=2 * US)
    assert runs.exposed_s.sum() == pytest.approx(outcomes(runs, [Plan()]).exposed_s[0])


def test_time_in_which_something_is_computed_counts_once() -> None:
    start, end = np.array([2.0, 0.0, 0.5, 5.0]), np.array([3.0, 1.0, 2.0, 7.0])
    until = computed_until(np.array([-1.0, 0.25, 3.5, 6.0, 9.0]), start, end)
    assert until == pytest.approx([0.0, 0.25, 3.0, 4.0, 5.0])
    assert not computed_until(end, start[:0], end[:0]).any()


def test_machines_are_taken_by_the_name_of_the_gpu() -> None:
    profile = serial()
    assert machine_of(Profile(profile.kernels, "made", "NVIDIA H100 80GB HBM3")) == "h100_8"
    assert machine_of(Profile(profile.kernels, "made", "AMD Instinct MI300X")) == "mi300x_8"
    assert machine_of(profile, "b200_8") == "b200_8"
    with pytest.raises(ConfigError, match="add system="):
        machine_of(profile)


def test_a_profile_without_collectives_is_refused() -> None:
    with pytest.raises(ConfigError, match="has no collective"):
        advise(profile_of([kernel(GEMM, "7", 0, 100)], "made"), "h100_8")


def late(late_us: float, *, own_us: float = 300, count: int = 6) -> list[Profile]:
    """Two ranks, of which the second one comes late to each all-reduce of 2 MiB, which transfers for 30 us."""
    profiles = []
    for rank, later in enumerate((0.0, late_us)):
        rows = []
        for place in range(count):
            start, end = place * (own_us + late_us + 40), place * (own_us + late_us + 40) + own_us + late_us + 30
            rows.append(kernel(GEMM, "7", start, own_us + later, ctas=132))
            arrives = start + own_us + later
            more = {"collective": "allreduce", "group": "tp", "payload_bytes": 2.0**21, "ctas": 16}
            rows.append(kernel(SUM, "20", arrives, end - arrives, **more))
        profiles.append(replace(profile_of(rows, f"rank{rank}.json"), rank=rank))
    return profiles


@pytest.mark.more
@pytest.mark.slow
@drawn(8)
@given(st.integers(0, 2000))
def test_no_change_of_a_collective_gains_what_is_waiting(late_us: int) -> None:
    profiles = late(late_us)
    ranks = match(profiles)
    for rank in ranks.profiles:
        advised = advise(ranks.profiles[rank], "h100_8")
        slowed = float(advised.what_ifs.contention_s.max())
        gains = advised.what_ifs.recorded_s - advised.tried.seconds
        assert gains.max() <= 6 * 30 * US + slowed + 1e-9
        assert advised.bound_s >= advised.recorded_s - 6 * 30 * US - slowed - 1e-9


@pytest.mark.slow
def test_of_one_rank_alone_the_short_time_is_expected_and_the_long_one_the_upper_end() -> None:
    alone = advise(late(400)[0], "h100_8")
    terms = alone.what_ifs.effects.terms[0]
    (group,) = alone.groups
    assert group.cause.endswith("late ranks, or a slower link")
    assert group.faster_link.value == pytest.approx(6 * terms.machine_s / 2, rel=1e-3)
    assert group.faster_link.high == pytest.approx(6 * 430 * US / 2, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["ranks", "[{0},{1}]", "{0},{1}", "ranks/rank*.csv"])
def test_the_late_rank_is_named_before_any_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], form: str
) -> None:
    (tmp_path / "ranks").mkdir()
    monkeypatch.chdir(tmp_path)
    paths = []
    for rank, profile in enumerate(late(400)):
        paths.append(table(tmp_path, profile).rename(tmp_path / "ranks" / f"rank{rank}.csv").relative_to(tmp_path))
    assert main(["profile", "advise", f"profile={form.format(*paths)}", "system=h100_8", "out=advice"]) == 0
    lines = capsys.readouterr().out.splitlines()
    first = next(place for place, line in enumerate(lines) if "rank 1 comes last 6 times" in line)
    assert "rank 0 waits for late ranks for 2.400 ms" in lines[first]
    assert first < next(place for place, line in enumerate(lines) if "best together" in line)
    assert yaml.safe_load((tmp_path / "advice" / "advice.yaml").read_text())["slowest"] == 1


def table(folder: Path, profile: Profile) -> Path:
    """A CSV of the kernels of a profile."""
    kernels = profile.kernels
    columns = {
        "start_us": kernels["start_s"] / US,
        "dur_us": kernels["seconds"] / US,
        "stream": kernels["stream"],
        "name": kernels["name"],
        "grid": [f"{count}x1x1" for count in kernels["ctas"]],
    }
    pd.DataFrame(columns).to_csv(folder / "run.csv", index=False)
    return folder / "run.csv"


@pytest.mark.slow
def test_the_command_writes_advice_what_ifs_and_timelines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = table(tmp_path, serial()), tmp_path / "here"
    assert main(["profile", "advise", str(path), "system=h100_8", f"out={out}"]) == 0
    printed = capsys.readouterr().out
    assert "best together" in printed and "in 4 parts" in printed
    written = {name.name for name in out.rglob("*") if name.is_file()}
    assert {"advice.yaml", "what_ifs.parquet", "timeline.png", "timeline.json", "gains.png"} <= written
    tree = yaml.safe_load((out / "advice.yaml").read_text())
    assert "nccl_symmetric" in printed
    assert {of["software"] for of in tree["software"]} >= {"nccl_symmetric", "multimem"}
    assert tree["machine"] == "h100_8" and tree["together_s"]["value"] < tree["recorded_s"]
    rows = pd.read_parquet(out / "what_ifs.parquet")
    assert len(rows) <= tree["what_ifs"] and (rows["gain_expected_s"] > 0).any()
    events = json.loads((out / "figures" / "timeline.json").read_text())["traceEvents"]
    lanes = {event["args"]["name"] for event in events if event["ph"] == "M"}
    assert {"before, critical path", "after, critical path", "before, stream 7", "after, stream 20"} <= lanes


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["system=no_such"], "neither a shipped system"),
        (["system=client_lpddr5x"], "no constants of contention"),
        ([], "add system="),
    ],
)
def test_what_cannot_be_advised_on_is_refused(
    tmp_path: Path, words: Sequence[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", "advise", str(table(tmp_path, serial())), *words]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_as_many_collectives_run_at_once_as_did() -> None:
    runs = what_ifs(small_buckets())
    ran = runs.run(Plan().with_setting(0, Setting("earlier")))
    moves = np.flatnonzero(runs.model.group >= 0)
    order = moves[np.argsort(ran.start_s[0, moves])]
    assert (ran.start_s[0, order][1:] >= ran.end_s[0, order][:-1] - 1e-9).all()
