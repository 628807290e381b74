"""Names of kernels as tools write them: what they are reduced to, their classes, and what nobody knows."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from dse.cli import main
from dse.errors import ConfigError
from dse_traces.change.advice import advise
from dse_traces.commands.lines import communication_lines, unknown_lines, unused_patterns
from dse_traces.profile.hidden_communication import copy_runs
from dse_traces.profile.kernel_classes import CLASSES, kernel_class, read_patterns
from dse_traces.profile.kernel_names import reduce_name
from dse_traces.profile.kernels import Profile, classify, profile_of
from dse_traces.profile.ranks import match
from dse_traces.profile.replay import replay
from dse_traces.profile.unnamed_kernels import nothing_to_move, unknown_kernels
from dse_traces.readers.formats import read

NAMES = yaml.safe_load((Path(__file__).parent / "data" / "kernel_names.yaml").read_text("utf-8"))
GEMM, PEER = "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT", "Memcpy PtoP (Device -> Device)"
US = 1e-6
WORD = st.from_regex(r"[a-z][a-z_]{0,12}", fullmatch=True)


def row(name: str, stream: str, start: float, duration: float, **columns: Any) -> dict[str, Any]:
    """A kernel; times in microseconds."""
    return {"name": name, "stream": stream, "start_s": start * US, "seconds": duration * US, **columns}


@pytest.mark.parametrize("kind", NAMES)
def test_names_are_classed_as_tools_write_them(kind: str) -> None:
    assert {name: kernel_class(name) for name in NAMES[kind]} == dict.fromkeys(NAMES[kind], kind)


def test_the_table_of_names_is_long_and_has_all_classes() -> None:
    assert set(NAMES) == set(CLASSES)
    assert sum(map(len, NAMES.values())) >= 150


@given(st.lists(WORD, min_size=1, max_size=4), st.integers(0, 999))
def test_a_name_is_the_same_however_a_tool_writes_it(path: list[str], number: int) -> None:
    plain, mangled = "::".join(path), "".join(f"{len(part)}{part}" for part in path)
    forms = [
        plain,
        f"void {plain}<{number}, (bool)1, other::thing<float> >(int4*, std::pair<int, float>) [clone .kd]",
        f"void (anonymous namespace)::{plain}<({number}>3), float>(int (*)(float))",
        f"std::enable_if<!(false), void>::type {plain}<{number}>(int)",
        f"_ZN{mangled}ILi{number}ELb1EN5other5thingIfEEEEvP4int4.kd",
        f"_ZN12_GLOBAL__N_1{mangled}ILj{number}EEEvi",
        f"void {plain}<at::native::cut<off, and",
    ]
    assert {reduce_name(form).qualified for form in forms} == {plain}


@given(st.text(max_size=60) | st.from_regex(r"_?_Z[NLZ]?[0-9A-Za-z_]{0,40}|[<>():a-z, ]{0,40}", fullmatch=True))
def test_any_text_has_a_class(text: str) -> None:
    assert kernel_class(text) in CLASSES
    assert reduce_name(text).base or not text.strip().removesuffix(".kd")


@pytest.mark.parametrize(
    "text", ["dispatch_1" * 900 + "!", "_".join(["token"] * 1600), "void f<" + "Moe" * 2700, "_ZN" + "4gemmI" * 1300]
)
def test_a_name_that_is_made_to_take_long_does_not(text: str) -> None:
    assert kernel_class(text) in CLASSES  # patterns without bounds would take longer than the test suite may


@pytest.mark.slow
def test_the_profile_of_dualpipe_hides_what_its_table_says(shared: Callable[[str], Path], tmp_path: Path) -> None:
    names = {
        "dispatch": "void dpsk::ep::internode::dispatch<false, 8, true, 8>(int4*, float*, long*)",
        "dispatch_cached": "void (anonymous namespace)::dispatch<true, 8, true, 8>(int4*, float*, long*)",
        "combine": "void deep_ep::internode::combine<false, 2, __nv_bfloat16, 9>(int4*, float*, bool const*)",
        "notify_dispatch": "void dpsk::ep::internode::notify_dispatch<false, 4>(int const*, long*, int)",
        "cached_notify": "void dpsk::ep::internode::cached_notify<false>(int, int, int)",
        "dispatch_layout": "void dpsk::ep::layout::get_dispatch_layout<256, 32, 8>(long const*, int*)",
    }
    table = shared("data/deepseek_dualpipe/kernels_layers_0_1.csv").read_text("utf-8").splitlines()
    rows = list(csv.DictReader(line for line in table if not line.startswith("#")))
    events = [
        {"ph": "X", "cat": "kernel", "name": names.get(row["kind"], f"void dpsk::{row['kind']}<128>(float*)")}
        | {"ts": float(row["start_us"]), "dur": float(row["dur_us"]), "args": {"stream": row["stream"], "device": 0}}
        for row in rows
    ]
    path = tmp_path / "train.json"
    path.write_text(json.dumps({"traceEvents": events}))
    done = replay(read(path))
    assert 100 * done.recorded.hidden == pytest.approx(97.46, abs=0.1)  # of all exchanges, on stream 27
    moved = [text for text in communication_lines(done.profile, done.recorded) if "notify" in text]
    assert "without them 98.9 % is hidden" in moved[0]  # as validation.dualpipe measures it


def second_stream(name: str = "void acme::exchange<8>(int4*)") -> Profile:
    return profile_of([row(GEMM, "7", 0, 100), row(name, "20", 20, 100), row(name, "20", 150, 100)], "made")


def test_unknown_kernels_of_a_second_stream_are_named_and_never_said_not_to_communicate() -> None:
    profile = second_stream()
    assert unknown_kernels(profile).streams == {"20": 1.0}
    (line,) = communication_lines(profile, replay(profile).recorded)
    assert line == "no kernel of known kind communicates, but 100.0 % of the time of stream 20 is of unknown kind"
    text = " ".join(unknown_lines(profile))
    assert "66.7 %" in text and "acme::exchange" in text and "40.0 % of 200.00 µs" in text
    with pytest.raises(ConfigError, match=r"stream 20 is of unknown kind.*kernels=kernels\.yaml"):
        advise(profile, "h100_8")
    problem = nothing_to_move("has none", profile, path="workload.path", option="workload.kernels")
    assert "acme::exchange" in problem.rule and "workload.kernels=kernels.yaml" in problem.way_out


def test_a_profile_of_known_kernels_says_nothing_of_unknown_ones() -> None:
    profile = second_stream("void at::native::vectorized_elementwise_kernel<4, F>(int)")
    assert list(unknown_lines(profile)) == []
    assert list(communication_lines(profile, replay(profile).recorded)) == ["no kernel of it communicates"]


def test_kernels_that_multiply_and_communicate_in_one_are_both_and_told() -> None:
    alone = profile_of([row("kernel_ag_gemm_intra_node", "7", 0, 100), row(GEMM, "7", 100, 50)], "made")
    done = replay(alone).recorded
    assert (done.collective_s, done.both_s, done.compute_s) == pytest.approx((100 * US, 100 * US, 150 * US))
    lines = list(communication_lines(alone, done))
    assert lines[0].startswith("collectives take 100.00 µs, 100.0 % of it beside computation; 0")
    assert "of it kernels that multiply and communicate in one (1): 100.00 µs, taken as hidden inside" in lines[1]
    with pytest.raises(ConfigError, match="multiply and communicate in one, and hide it inside"):
        advise(alone, "h100_8")
    reduce = row("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "20", 100, 100, collective="allreduce")
    recorded = row("gemm_rs", "7", 200, 50, collective="reduce_scatter")
    both = profile_of([row(GEMM, "7", 100, 50), reduce, recorded], "made")
    assert both.kernels["kind"].tolist() == ["GEMM", "collective", "GEMM with communication"]
    assert replay(both).recorded.hidden == pytest.approx(100 / 150)
    (line,) = (line for line in communication_lines(both, replay(both).recorded) if "in one" in line)
    assert line.endswith("; without them 50.0 % is hidden")
    classed = classify(second_stream(), {"GEMM with communication": ["acme"]})
    assert replay(classed).recorded.hidden == 1


def test_patterns_of_a_user_come_first_and_idle_ones_are_told(tmp_path: Path) -> None:
    path = tmp_path / "kernels.yaml"
    path.write_text("collective: ['^ACME::ex*ge$', nothing]\ncompute: nvjet\n")
    patterns = read_patterns(str(path))
    profile = classify(second_stream(), patterns)
    assert profile.kernels["kind"].tolist() == ["compute", "collective", "collective"]
    assert replay(profile).recorded.hidden == pytest.approx(0.4)
    assert list(unused_patterns([profile], patterns)) == ["kernels.collective: no kernel fits the pattern nothing"]


@pytest.mark.parametrize(
    ("pattern", "fits"),
    [("acme", True), ("^acme::", True), ("exchange$", True), ("^exchange", False), ("acme$", False), ("a*e", True),
     ("x|acme", True), ("acme.*ge$", True), ("exchange<8>", True), ("ge*ge", False), ("^acme::exchange$", True)],
)  # fmt: skip
def test_a_pattern_is_text_that_a_name_holds(pattern: str, fits: bool) -> None:
    kind = kernel_class("void acme::exchange<8>(int4*)", {"collective": [pattern]})
    assert (kind == "collective") == fits


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("collectives: [x]", r"kernels\.collectives: is no class of kernels \(did you mean `collective`"),
        ("GEMM: ['a(b|c)']", r"kernels\.GEMM\[0\] = .*regular expression"),
        ("GEMM: [x, '(a+)+']", r"kernels\.GEMM\[1\] = .*regular expression"),
        ("GEMM: [3]", r"kernels\.GEMM\[0\] = 3: is no text"),
        ("GEMM: ['*']", r"kernels\.GEMM\[0\] = '\*': is no text"),
        ("GEMM: {a: b}", r"kernels\.GEMM = .*is no list"),
        ("[a, b]", "is no mapping"),
        ("", "is no mapping"),
    ],
)
def test_a_wrong_file_of_patterns_is_refused_by_dotted_path(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "kernels.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_patterns(str(path))


def copies(count: int = 7, gap: float = 5, start: float = 0) -> list[dict[str, Any]]:
    return [row(PEER, "30", start + (25 + gap) * at, 25, payload_bytes=4194304.0) for at in range(count)]


@pytest.mark.slow
def test_copies_between_gpus_hold_no_sm_and_are_neither_merged_nor_moved_to_sms() -> None:
    profile = profile_of([row(GEMM, "7", 0, 100), *copies()], "made")
    advice = advise(profile, "h100_8")
    assert [group.name for group in advice.groups] == ["Memcpy PtoP (Device -> Device), 4.19 MB, copy engines"]
    assert advice.groups[0].exposed_s == pytest.approx(90 * US)
    settings = advice.tried.settings
    assert all(of.sms is None and of.mover == "SMs" and "merged" not in of.order for of in settings)
    assert advice.what_ifs.model.group_sms.tolist() == [0.0]
    assert advice.recorded_s == pytest.approx(profile.span_s, rel=0.05)


def test_copies_that_follow_one_another_are_one_run() -> None:
    late = copies(3, start=1000)
    profile = profile_of([row(GEMM, "7", 0, 100), *copies(), *late], "made")
    assert copy_runs(profile) == 2
    assert copy_runs(profile_of([*copies(2, gap=26), row(GEMM, "7", 0, 9)], "made")) == 2


def test_a_copy_between_gpus_waits_for_no_rank() -> None:
    ranks = [profile_of([row(GEMM, "7", 0, 10), row(PEER, "30", 0, lasts)], "made") for lasts in (20, 50)]
    table = match(ranks).shared
    assert table["transfer_s"].tolist() == pytest.approx([20 * US, 50 * US])
    assert table["waited_s"].tolist() == [0.0, 0.0]


@pytest.mark.nightly
def test_the_study_reads_patterns_and_they_are_part_of_its_points(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    events = [
        {
            "ph": "X",
            "cat": "kernel",
            "name": name,
            "ts": start,
            "dur": 100,
            "args": {"stream": stream, "grid": [8, 1, 1]},
        }
        for name, stream, start in [(GEMM, 7, 0), ("void acme::exchange<8>(int4*)", 20, 20)]
    ]
    profile, kernels = tmp_path / "run.json", tmp_path / "kernels.yaml"
    profile.write_text(json.dumps({"traceEvents": events}))
    kernels.write_text("collective: acme\n")
    words = ["--dry-run", "study=trace", "system=h100_8", f"workload.path={profile}", f"output_dir={tmp_path}"]
    assert main(words) == 2
    assert "workload.kernels=kernels.yaml" in " ".join(capsys.readouterr().err.split())
    assert main([*words, f"workload.kernels={kernels}"]) == 0
