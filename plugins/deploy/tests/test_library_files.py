"""Files of single collectives and communicators: read as tools read them, refused with the line, and come back."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from dse.cli import main
from dse.errors import ConfigError
from dse_deploy import communicators, iris_table
from dse_deploy.command import nearest, write_all
from dse_deploy.facts import ModelFacts
from dse_deploy.planned_step import PlannedStep
from dse_deploy.read_back import count_read_back, files_read_back
from dse_deploy.settings import tools
from dse_deploy.step_files import STEP_FORMATS
from dse_deploy.tuner_file import ANY, MOST_BYTES, TunerCall, TunerRow, read_tuner, tuner_format, tuner_text
from dse_deploy.tuner_plan import cells, choices
from studies.plan.plan_file import leaves_of
from tests.support import drawn

NVIDIA = ("model=llama3_8b", "system=h100_8", "parallel.tp=4", "parallel.dp=2", "run.mode=training")
AMD = ("model=llama3_8b", "system=mi300x_8", "parallel.tp=8", "run.mode=training")
SPLIT = "parallel.sequence_parallel=true"
OF_STEP = [name for name, tool in tools().items() if tool.files[0].format in STEP_FORMATS]
BESIDE = ("attention_in_backward", "ffn_in_backward")
# eight to ten columns, wildcards and a collective without a tree, as configurations of the plug-in have them
EXAMPLE = """\
# short messages of one node, registered buffers alone
allreduce,0,32768,tree,ll,4,1,-1,-1,1

# two nodes of eight
allreduce,32769,2097152,ring,simple,8,2,16,1,0

allreduce,2097153,8589934592,ring,ll128,-1,-1,-1,4,-1
broadcast,0,16384,tree,simple,-1,1,-1
broadcast,16385,8589934592,ring,simple,2,-1,-1,1
"""


@cache
def facts(words: tuple[str, ...]) -> ModelFacts:
    step = PlannedStep.of(Path(), [*words, SPLIT])
    assert step is not None
    return step.facts(step.tree)


def facts_for(name: str) -> ModelFacts:
    return facts(AMD if name in ("rccl_tuner", "iris") else NVIDIA)


# The tuner's file, as the plug-in reads it


def by_plug_in(text: str) -> list[tuple[str | int, ...]]:
    """Rows as loadConfig of the plug-in in C makes them: its tokens, its numbers, its names by default."""
    rows = list[tuple[str | int, ...]]()
    names = tuner_format().names
    for line in text.split("\n"):
        if not line or line[0] == "#":
            continue
        tokens = [token.strip(" \t") for token in line.split(",") if token][:10]  # strtok has no empty token
        if len(tokens) < 8:
            continue
        numbers = [int(re.match(r"\s*[+-]?\d*", token).group() or 0) for token in tokens[5:]]  # type: ignore[union-attr]
        sizes = [int(re.match(r"\s*\d*", token).group() or 0) for token in tokens[1:3]]  # type: ignore[union-attr]
        collective = tokens[0] if tokens[0] in names["collective_type"] else "allreduce"
        algorithm = tokens[3] if tokens[3] in names["algorithm"] else "ring"
        protocol = tokens[4] if tokens[4] in names["protocol"] else "simple"
        rows.append((collective, *sizes, algorithm, protocol, *numbers, *[-1] * (5 - len(numbers))))
    return rows


@st.composite
def tuner_rows(draw: Callable[[Any], Any]) -> list[TunerRow]:
    """Rows that do not overlap: sizes cut at drawn places, for drawn groups."""
    form, rows = tuner_format(), list[TunerRow]()
    groups = draw(st.lists(st.tuples(_COLLECTIVES, st.sampled_from([(1, 8), (2, 16), (ANY, ANY)])), unique=True))
    for collective, (nodes, ranks) in groups:
        if (nodes, ranks) == (ANY, ANY) and any(name == collective for name, other in groups if other != (ANY, ANY)):
            continue  # a general row first would cover the others
        cuts = sorted({0, *draw(st.lists(st.integers(1, MOST_BYTES), max_size=4))})
        for low, high in zip(cuts, [*(cut - 1 for cut in cuts[1:]), MOST_BYTES], strict=True):
            algorithm, protocol = draw(st.sampled_from(list(form.by))), draw(st.sampled_from(form.protocols))
            channels = draw(st.sampled_from([ANY, 1, 16, 64]))
            numbers = draw(st.sampled_from([(ANY, ANY), (1, ANY), (ANY, 0), (4, 1)]))
            rows.append(TunerRow(collective, low, high, algorithm, protocol, channels, nodes, ranks, *numbers))
    return rows


_COLLECTIVES = st.sampled_from(list(tuner_format().names["collective_type"]))


@drawn(100)
@given(rows=tuner_rows(), note=st.text(max_size=600))
def test_rows_come_back_as_they_were_written_and_as_the_plug_in_reads_them(rows: list[TunerRow], note: str) -> None:
    text = tuner_text(rows, [note])
    read = read_tuner(text, "drawn.conf", "nccl")
    assert [row.values for row in read.rows] == [row.values for row in rows] == by_plug_in(text)
    # no line is longer than what the plug-in reads at once
    assert max(len(line.encode()) for line in text.split("\n")) < tuner_format().line_bytes
    assert tuner_text(read.rows, [note]) == text


@pytest.mark.parametrize("note", ["x" * 300, "é" * 200, f"{'é' * 300} and {'x' * 700}", "€" * 1000])
def test_long_words_of_a_note_are_cut_by_bytes(note: str) -> None:
    text = tuner_text([TunerRow("allreduce", 0, 9, "ring", "ll")], [note])
    assert max(len(line.encode()) for line in text.split("\n")) < tuner_format().line_bytes
    assert len(read_tuner(text, "x", "nccl").rows) == 1
    # nothing of the note is lost
    notes = [line[2:] for line in text.split("\n") if line.startswith("# ")][:-1]
    assert "".join("".join(notes).split()) == "".join(note.split())


@drawn(100)
@given(rows=tuner_rows(), data=st.data())
def test_the_first_row_that_matches_and_is_usable_is_applied(rows: list[TunerRow], data: st.DataObject) -> None:
    read = read_tuner(tuner_text(rows), "drawn.conf", "nccl")
    size = st.one_of(st.integers(0, MOST_BYTES), st.sampled_from([row.high for row in rows] or [0]))
    group, more = data.draw(st.sampled_from([(1, 8), (2, 16)])), data.draw(st.sampled_from([(1, 0), (4, 1)]))
    call = TunerCall(data.draw(_COLLECTIVES), data.draw(size), *group, *more)
    applied = read.row_for(call)
    candidates = [row for row in read.rows if row.matches(call)]
    assert applied is None or (applied in candidates and applied.is_usable(call))
    before = candidates if applied is None else candidates[: candidates.index(applied)]
    assert not any(row.is_usable(call) for row in before)


def test_an_example_is_read_and_a_row_without_effect_is_told() -> None:
    read = read_tuner(EXAMPLE, "nccl_tuner.conf", "nccl")
    assert [row.values for row in read.rows] == by_plug_in(EXAMPLE)
    assert [row.line for row in read.rows] == [2, 5, 7, 8, 9]
    (note,) = read.skipped
    assert note.startswith("nccl_tuner.conf:8 has no effect: the library has no broadcast by tree and simple")
    # it is passed over, and nothing else is of this size
    assert read.row_for(TunerCall("broadcast", 100, 1, 8)) is None
    row = read.row_for(TunerCall("allreduce", 1 << 20, 2, 16))
    assert row is not None and (row.algorithm, row.channels) == ("ring", 8)
    assert read.row_for(TunerCall("allreduce", 1 << 20, 2, 16, registered=1)) is None
    assert read.row_for(TunerCall("allreduce", 1 << 20, 4, 32)) is None


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("allreduce,0,10,ring,simple,1,1\n", "x:1 has 7 columns, and the plug-in skips"),
        ("allreduce,0,10,ring,simple,1,1,8,-1,-1,9\n", "x:1 has 11 columns"),
        ("collective_type,min_bytes,max_bytes,algorithm,protocol,channels,nNodes,nRanks\n", "x:1 is a header"),
        ("\n  # a note\n", "x:2 is no comment to the plug-in"),
    ],
)
def test_what_the_plug_in_skips_without_a_word_is_told(text: str, part: str) -> None:
    (note,) = read_tuner(text, "x", "nccl").skipped
    assert note.startswith(part)


GOOD = "allreduce,0,1024,ring,ll,2,1,8,-1,-1"


@pytest.mark.parametrize(
    ("line", "path", "rule"),
    [
        ("allreduc,0,1024,ring,ll,2,1,8", "t.conf:2.collective_type", "reads it as allreduce"),
        ("allreduce,0,1024,rings,ll,2,1,8", "t.conf:2.algorithm", "reads it as ring"),
        ("allreduce,0,1024,ring,LL,2,1,8", "t.conf:2.protocol", "reads it as simple"),
        ("allreduce,0,1e6,ring,ll,2,1,8", "t.conf:2.max_bytes", "no whole number"),
        ("allreduce,0,1024,ring,ll,two,1,8", "t.conf:2.channels", "no whole number"),
        ("allreduce,0,,ring,ll,2,1,8,-1", "t.conf:2.max_bytes", "no whole number"),
        ("allreduce,2048,1024,ring,ll,2,1,8", "t.conf:2.max_bytes", "is less than min_bytes"),
        ("allreduce,-1,1024,ring,ll,2,1,8", "t.conf:2.min_bytes", "is no size"),
        ("allreduce,0,1024,ring,ll,0,1,8", "t.conf:2.channels", "is neither -1 nor from 1 to 64"),
        ("allreduce,0,1024,ring,ll,2,0,8", "t.conf:2.nNodes", "is neither -1 nor at least 1"),
        ("allreduce,0,1024,ring,ll,2,4,2", "t.conf:2.nRanks", "is less than nNodes"),
        ("allreduce,0,1024,ring,ll,2,1,8,0,2", "t.conf:2.regBuff", "is not -1, 0 or 1"),
        ("allreduce,1024,4096,ring,simple,2,1,8", "t.conf:2", "overlaps line 1"),
        ("allreduce,0,512,ring,simple,2,1,8,1,0", "t.conf:2", "is never applied, as line 1 matches all"),
        (f"# {'long ' * 60}", "t.conf:2", "as one line"),
        (f"allreduce,0,{'9' * 5000},ring,ll,2,1,8", "t.conf:2", "as one line"),
        ("allreduce,0,１２,ring,ll,2,1,8", "t.conf:2.max_bytes", "no whole number"),
    ],
)
def test_a_line_that_the_plug_in_would_read_as_something_else_is_refused(
    line: str, path: str, rule: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        read_tuner(f"{GOOD}\n{line}\n", "t.conf", "nccl")
    assert any(problem.path == path and rule in problem.rule for problem in caught.value.problems)
    (tmp_path / "t.conf").write_text(f"{GOOD}\n{line}\n")
    assert main(["settings", "import", f"settings={tmp_path / 't.conf'}", "from=nccl_tuner"]) == 2
    assert path in capsys.readouterr().err


def test_a_general_row_after_special_ones_is_fine() -> None:
    read = read_tuner(f"{GOOD}\nallreduce,0,4096,ring,simple,4,-1,-1\n", "t.conf", "nccl")
    rows = [read.row_for(TunerCall("allreduce", 512, *group)) for group in ((1, 8), (1, 4))]
    assert [row.line for row in rows if row is not None] == [1, 2]


def test_a_file_of_thousands_of_rows_is_read_in_linear_time() -> None:
    rows = [TunerRow("allreduce", 8 * place, 8 * place + 7, "ring", "ll", 1, 1, 8) for place in range(20_000)]
    assert len(read_tuner(tuner_text(rows), "t.conf", "nccl").rows) == len(rows)
    ranks = [TunerRow("allgather", 0, 7, "ring", "ll", 1, 1, place + 1) for place in range(5_000)]
    assert len(read_tuner(tuner_text(ranks), "t.conf", "nccl").rows) == len(ranks)


def test_libraries_differ_in_channels_that_they_have_and_leave() -> None:
    row = "allreduce,0,1024,ring,ll,112,1,8\n"
    assert read_tuner(row, "t.conf", "rccl").rows[0].channels == 112
    with pytest.raises(ConfigError, match="64"):
        read_tuner(row, "t.conf", "nccl")


# Rows for a step


def test_cells_cover_every_size_once() -> None:
    ends = list(cells())
    assert ends[0][0] == 0 and ends[-1][1] == MOST_BYTES
    assert all(high + 1 == low for (_, high, _), (low, *_) in itertools.pairwise(ends))
    assert all(low <= size <= high for low, high, size in ends)


SITES = st.sampled_from(
    ["serial", "c3_sp", "c3_sp comm_cus=12", "c3_sp_rp comm_cus=16", "c3_base comm_cus=8", "conccl"]
)
PLANS = st.fixed_dictionaries(
    {
        "sites": st.fixed_dictionaries({}, optional=dict.fromkeys(BESIDE, SITES)),
        "parallel": st.fixed_dictionaries(
            {"tp": st.just(4)}, optional={f"{axis}_ctas": st.sampled_from([0, 1, 8, 24, 32]) for axis in ("tp", "dp")}
        ),
    },
)


@drawn(40)
@given(plan=PLANS, collectives=st.sampled_from([None, "library", "in_switch"]))
@pytest.mark.parametrize("name", OF_STEP)
def test_a_plan_that_files_can_say_is_the_same_after_writing_and_reading(
    name: str, plan: dict[str, Any], collectives: str | None
) -> None:
    tool, of_step = tools()[name], facts_for(name)
    plan = {**plan, "parallel": {**plan["parallel"], **({} if collectives is None else {"collectives": collectives})}}
    once = nearest(tool, plan, write_all(tool, plan, "plan.yaml", of_step), of_step)
    written = write_all(tool, once, "plan.yaml", of_step)
    again = nearest(tool, once, written, of_step)
    assert dict(leaves_of(again)) == dict(leaves_of(once))
    assert {file: part.text for file, part in write_all(tool, again, "plan.yaml", of_step).items()} == {
        file: part.text for file, part in written.items()
    }


def test_rows_have_the_plan_s_cus_at_the_size_of_its_collective_and_the_library_s_elsewhere() -> None:
    of_step = facts(NVIDIA)
    plan = {"sites": {"attention_in_backward": "c3_sp comm_cus=12"}, "parallel": {"collectives": "library"}}
    rows = [row for row, _ in choices(of_step.calls, plan, 64) if row.collective == "reducescatter"]
    (call,) = {call.payload_bytes for call in of_step.calls if call.site == "attention_in_backward"}
    library = next(call.library_channels for call in of_step.calls)
    assert {row.channels for row in rows if row.low <= call <= row.high} == {12}
    assert {row.channels for row in rows if not row.low <= call <= row.high} == {library}
    assert {row.algorithm for row in rows} == {"ring"}


def test_more_cus_than_the_library_has_channels_are_as_many_as_it_has() -> None:
    tool, of_step = tools()["nccl_tuner"], facts(NVIDIA)
    plan = {"sites": {"ffn_in_backward": "c3_sp comm_cus=100"}, "parallel": {"tp": 4}}
    back = nearest(tool, plan, write_all(tool, plan, "plan.yaml", of_step), of_step)
    assert back["sites"]["ffn_in_backward"] == "c3_sp comm_cus=64"


def test_each_row_has_the_fastest_protocol_at_the_sizes_of_the_step() -> None:
    of_step = facts(NVIDIA)
    for row, choice in choices(of_step.calls, {"parallel": {"collectives": "library"}}, 64):
        for call in choice.calls:
            times = call.by_protocol(call.payload_bytes)
            assert row.protocol == min(times, key=lambda name: times[name])


def test_a_collective_that_the_switch_computes_has_nvls_and_is_read_as_in_switch() -> None:
    step = PlannedStep.of(Path(), [*NVIDIA, SPLIT, "parallel.collectives=in_switch"])
    assert step is not None
    of_step, tool = step.facts(step.tree), tools()["nccl_tuner"]
    plan = {"parallel": {"tp": 4, "collectives": "in_switch"}}
    written = write_all(tool, plan, "plan.yaml", of_step)
    rows = read_tuner(written["nccl_tuner.conf"].text, "x", "nccl").rows
    assert {"nvls"} < {row.algorithm for row in rows}
    assert all(row.protocol == "simple" for row in rows if row.algorithm == "nvls")
    assert nearest(tool, plan, written, of_step)["parallel"]["collectives"] == "in_switch"


# The command


def test_a_file_is_exported_read_back_and_told_what_no_plan_has(
    elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = {"sites": dict.fromkeys(BESIDE, "c3_sp comm_cus=16"), "parallel": {"collectives": "library"}}
    (elsewhere / "plan.yaml").write_text(yaml.safe_dump({**plan, "step": [*NVIDIA, SPLIT, "stack=megatron_2026"]}))
    # a plan, or the folder that it is in
    texts = list[str]()
    for name in ("plan.yaml", "."):
        assert main(["settings", "export", f"plan={name}", "to=nccl_tuner", "out=theirs"]) == 0
        assert "by NCCL's tuner" in capsys.readouterr().out
        texts.append((elsewhere / "theirs" / "nccl_tuner.conf").read_text())
    assert texts[0] == texts[1]
    line = ["settings", "import", "settings=theirs/nccl_tuner.conf", "from=nccl_tuner", "out=back.yaml"]
    assert main([*line, *NVIDIA, SPLIT]) == 0
    printed = capsys.readouterr().out
    # the forward pass has collectives of the same kind and size
    assert "16 channels for reduce-scatter attention, reduce-scatter ffn, which the model has on 24" in printed
    back = yaml.safe_load((elsewhere / "back.yaml").read_text())
    assert back["sites"] == plan["sites"] and back["parallel"]["collectives"] == "library"
    assert back["tool"] == "nccl"


def test_sizes_take_a_step(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (elsewhere / "t.conf").write_text(f"{GOOD}\n")
    assert main(["settings", "import", "settings=t.conf", "from=nccl_tuner"]) == 2
    assert "no step is named" in capsys.readouterr().err
    (elsewhere / "plan.yaml").write_text("sites: {}\nparallel: {tp: 8, collectives: library}\n")
    assert main(["settings", "export", "plan=plan.yaml", "to=nccl_tuner"]) == 2
    assert "name the step" in capsys.readouterr().err


@pytest.mark.slow
def test_a_plan_that_was_read_back_is_judged(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = "".join(f"{name},0,{MOST_BYTES},ring,simple,12,1,4,-1,-1\n" for name in ("reducescatter", "allgather"))
    (elsewhere / "t.conf").write_text(rows)
    assert main(["settings", "import", "settings=t.conf", "from=nccl_tuner", *NVIDIA, SPLIT]) == 0
    assert "no row for allreduce of 33554432 bytes among 4" in capsys.readouterr().out
    assert main(["plan", "plan=plan.yaml", *NVIDIA[:2], "run.mode=training"]) == 0
    printed = capsys.readouterr()
    assert "c3_sp comm_cus=12" in printed.out
    assert "leaves it 1 channel" in printed.err


# Communicators


def test_groups_say_channels_and_priority_of_sums_beside_gemms() -> None:
    plan = {"sites": {"ffn_in_backward": "c3_sp_rp comm_cus=16", "attention_in_backward": "c3_sp comm_cus=12"}}
    groups, paths = communicators.groups_of(plan)
    assert groups == {"tp": {"max_ctas": 16, "is_high_priority_stream": True}}
    assert [set(names) for names in paths.values()] == [{f"sites.{name}" for name in BESIDE}] * 2
    # copy engines cannot add
    assert communicators.groups_of({"sites": {"ffn_in_backward": "conccl"}}) == ({}, {})
    assert "2.28" in communicators.fields()["cta_policy"].meaning(2)
    assert "2.17" in communicators.fields()["max_ctas"].meaning(8)


def test_the_module_of_process_groups_is_read_without_running_it() -> None:
    text = communicators.python_text({"tp": {"max_ctas": 16, "is_high_priority_stream": True}})
    compile(text, "dse_process_groups.py", "exec")
    assert communicators.read_python(text, "x")["tp"]["max_ctas"] == 16
    with pytest.raises(ConfigError, match="never run"):
        communicators.read_python("PROCESS_GROUPS = {'tp': options()}\n", "x")


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("tpp: {max_ctas: 8}", "c.yaml: tpp"),
        ("tp: {max_cta: 8}", "c.yaml: tp.max_cta"),
        ("tp: {cta_policy: 2}", "c.yaml: tp.cta_policy"),
        ("tp: {max_ctas: 65}", "c.yaml: tp.max_ctas"),
        ("tp: {max_ctas: true}", "c.yaml: tp.max_ctas"),
        ("tp: {is_high_priority_stream: 1}", "c.yaml: tp.is_high_priority_stream"),
        ("tp: {min_ctas: 9, max_ctas: 8}", "c.yaml: tp.min_ctas"),
        ("tp: {net_name: tcp}", "c.yaml: tp.net_name"),
        ("tp: 8", "c.yaml: tp"),
        ("[tp]", "c.yaml"),
    ],
)
def test_options_that_megatron_would_ignore_or_refuse_are_refused(text: str, path: str) -> None:
    with pytest.raises(ConfigError) as caught:
        communicators.read_yaml(text, "c.yaml")
    assert path in [problem.path for problem in caught.value.problems]


_ONCE = "PROCESS_GROUPS = {'tp': {'max_ctas': 8}}\n"


@pytest.mark.parametrize(
    "later",
    [
        "PROCESS_GROUPS['dp'] = {'max_ctas': 4}",
        "PROCESS_GROUPS['tp']['max_ctas'] = 4",
        "PROCESS_GROUPS = {}",
        "PROCESS_GROUPS: dict = {}",
        "PROCESS_GROUPS |= {'dp': {}}",
        "PROCESS_GROUPS.update(dp={})",
        "PROCESS_GROUPS['tp'].clear()",
        "del PROCESS_GROUPS['tp']",
        "if True: PROCESS_GROUPS = {}",
        "from theirs import PROCESS_GROUPS",
    ],
)
def test_a_constant_that_a_module_changes_later_is_refused_with_the_line(later: str) -> None:
    with pytest.raises(ConfigError) as caught:
        communicators.read_python(f"{_ONCE}\n{later}\n", "m.py")
    assert [problem.path for problem in caught.value.problems] == ["m.py:3.PROCESS_GROUPS"]
    # what only reads it is fine, and so is what our own module does with it
    assert communicators.read_python(f"{_ONCE}print(PROCESS_GROUPS['tp'])\n", "m.py") == {"tp": {"max_ctas": 8}}


_KEY = "arch=gfx942|world=8|nwg=304|mode=fused|coll=all_reduce|g=1x2x3|c=4x5"
_ENTRY = '{"config": {"gemm_wgs": 8, "gemm_block": [1, 1, 1]}}'


@pytest.mark.parametrize(
    ("read", "text", "path"),
    [
        (communicators.read_yaml, "tp: {max_ctas: 8}\ndp: {max_ctas: 4}\ntp: {min_ctas: 2}\n", "f:3.tp"),
        (communicators.read_yaml, "tp:\n  max_ctas: 8\n  max_ctas: 4\n", "f:3.max_ctas"),
        (communicators.read_python, "PROCESS_GROUPS = {\n'tp': {},\n'tp': {'max_ctas': 4}}\n", "f:3.tp"),
        (communicators.read_python, "PROCESS_GROUPS = {'tp': {'max_ctas': 8,\n'max_ctas': 4}}\n", "f:2.max_ctas"),
        (iris_table.read_table, f'{{"{_KEY}": {_ENTRY},\n"{_KEY}": {_ENTRY}}}', f"f:2.{_KEY}"),
        (iris_table.read_table, f'{{"{_KEY}": {_ENTRY[:-2]},\n"gemm_wgs": 9}}}}}}', "f:2.gemm_wgs"),
    ],
)
def test_a_key_that_is_there_twice_is_refused_with_its_line(
    read: Callable[[str, str], object], text: str, path: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        read(text, "f")
    (problem,) = caught.value.problems
    assert problem.path == path and "twice" in problem.rule


def test_json_that_is_no_yaml_has_its_keys_once() -> None:
    with pytest.raises(ConfigError, match="twice"):
        iris_table.read_table(f'{{\t"{_KEY}":\t{_ENTRY},\n\t"{_KEY}":\t{_ENTRY}}}', "f")


def test_options_of_other_groups_are_told(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (elsewhere / "c.yaml").write_text("cp: {max_ctas: 8}\ntp: {max_ctas: 16, cga_cluster_size: 2}\n")
    assert main(["settings", "import", "settings=c.yaml", "from=communicators"]) == 0
    printed = capsys.readouterr().out
    assert "is not modelled: cp.max_ctas 8" in printed and "is not modelled: tp.cga_cluster_size 2" in printed
    plan = yaml.safe_load((elsewhere / "plan.yaml").read_text())
    assert plan["parallel"] == {"tp_ctas": 16} and "sites" not in plan


# CTAs over tp and over dp

CTAS = {"sites": {}, "parallel": {"tp": 4, "dp": 2, "collectives": "library", "tp_ctas": 8, "dp_ctas": 4}}


def test_ctas_of_each_axis_are_the_limits_of_its_communicators() -> None:
    groups, paths = communicators.groups_of(CTAS)
    assert groups == {"tp": {"max_ctas": 8}, "dp_cp": {"max_ctas": 4}, "dp": {"max_ctas": 4}}
    assert paths["tp", "max_ctas"] == ("parallel.tp_ctas",) and paths["dp", "max_ctas"] == ("parallel.dp_ctas",)
    # gradients of experts have a communicator of their own
    assert communicators.groups_of({"parallel": {"ep": 4, "dp_ctas": 4}})[0]["ep_dp"] == {"max_ctas": 4}
    # a communicator has one limit, the largest that is asked for
    both = {"sites": {"ffn_in_backward": "c3_sp comm_cus=12"}, "parallel": {"tp_ctas": 8}}
    assert communicators.groups_of(both)[0]["tp"] == {"max_ctas": 12, "is_high_priority_stream": True}


@pytest.mark.parametrize("name", ["nccl_tuner", "communicators", "process_groups"])
def test_ctas_of_each_axis_come_back_and_leave_sites_alone(name: str) -> None:
    tool, of_step = tools()[name], facts(NVIDIA)
    written = write_all(tool, CTAS, "plan.yaml", of_step)
    back = nearest(tool, CTAS, written, of_step)
    assert {path: back["parallel"].get(path) for path in ("tp_ctas", "dp_ctas")} == {"tp_ctas": 8, "dp_ctas": 4}
    assert "sites" not in back
    assert not any({"parallel.tp_ctas", "parallel.dp_ctas"} & part.unsaid for part in written.values())


def test_rows_have_the_ctas_of_their_axis_at_all_sizes_and_those_of_a_site_at_its_own() -> None:
    of_step = facts(NVIDIA)
    rows = [row for row, _ in choices(of_step.calls, CTAS, 64)]
    assert {(row.ranks, row.channels) for row in rows} == {(4, 8), (2, 4)}
    plan = {**CTAS, "sites": {"ffn_in_backward": "c3_sp comm_cus=12"}}
    tool = tools()["nccl_tuner"]
    back = nearest(tool, plan, write_all(tool, plan, "plan.yaml", of_step), of_step)
    assert back["parallel"]["tp_ctas"] == 8 and back["sites"]["ffn_in_backward"] == "c3_sp comm_cus=12"


@pytest.mark.parametrize("ctas", [8, 12, 16])
def test_a_site_beside_a_gemm_is_not_lost_among_the_ctas_of_its_axis(ctas: int) -> None:
    tool, of_step = tools()["nccl_tuner"], facts(NVIDIA)
    plan = {"sites": dict.fromkeys(BESIDE, "c3_sp comm_cus=12"), "parallel": {"tp": 4, "dp": 2, "tp_ctas": ctas}}
    back = nearest(tool, plan, write_all(tool, plan, "plan.yaml", of_step), of_step)
    assert back["sites"] == plan["sites"] and back["parallel"]["tp_ctas"] == ctas


def test_limits_that_a_step_cannot_have_are_told() -> None:
    for name, limit, part in (("tp", 32, "takes 24 at most"), ("dp", 8, "no collective there")):
        plan = dict[str, Any]()
        of_step = facts(("model=llama3_8b", "system=h100_8", "parallel.tp=8", "run.mode=training"))
        (note,) = communicators.read_groups({name: {"max_ctas": limit}}, plan, of_step, megatron=False).unread
        assert plan == {} and note.startswith(f"{name}.max_ctas {limit}") and part in note


def test_communicators_of_one_axis_that_differ_are_told() -> None:
    plan = dict[str, Any]()
    groups = communicators.read_yaml("dp: {max_ctas: 8}\ndp_cp: {max_ctas: 4}\n", "c.yaml")
    result = communicators.read_groups(groups, plan, facts(NVIDIA), megatron=True)
    assert plan == {"parallel": {"dp_ctas": 4}} and result.unmodelled == ["dp.max_ctas 8"]
    # Megatron-LM reduces gradients in dp_cp
    plan = {}
    result = communicators.read_groups({"dp": {"max_ctas": 8}}, plan, facts(NVIDIA), megatron=True)
    assert plan == {"parallel": {"dp_ctas": 8}} and "reduced in dp_cp" in result.unmodelled[0]


@pytest.mark.parametrize(
    ("parallel", "value"),
    [
        ({"dp": 2, "tp_ctas": 8, "dp_ctas": 8}, 8),
        ({"tp_ctas": 8}, 8),
        ({"dp": 2, "tp_ctas": 8, "dp_ctas": 4}, None),
        ({"dp": 2, "tp_ctas": 8}, None),
    ],
)
def test_the_limit_of_a_process_is_written_where_axes_agree(parallel: dict[str, int], value: int | None) -> None:
    words = (word for word in NVIDIA if "dp" in parallel or not word.startswith("parallel.dp"))
    tool, of_step = tools()["nccl"], facts(tuple(words))
    plan = {"parallel": {"tp": 4, **parallel}}
    (part,) = write_all(tool, plan, "plan.yaml", of_step).values()
    assert {row.name: row.value for row in part.rows} == ({"NCCL_MAX_CTAS": value} if value else {})
    back = nearest(tool, plan, {"nccl.env": part}, of_step) if value else plan
    assert back == plan
    assert ("parallel.tp_ctas" in part.unsaid) == (value is None)


def test_axes_that_differ_are_told_of_the_limit_of_a_process(
    elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = {"parallel": {"tp_ctas": 8, "dp_ctas": 4, "collectives": "library"}, "step": [*NVIDIA, SPLIT]}
    (elsewhere / "plan.yaml").write_text(yaml.safe_dump(plan))
    assert main(["settings", "export", "plan=plan.yaml", "to=nccl"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "one number for a process, and the plan has parallel.tp_ctas = 8, parallel.dp_ctas = 4" in printed
    assert "NCCL_MAX_CTAS" not in (elsewhere / "outputs/export/nccl/nccl.env").read_text()


def test_the_limit_of_a_process_is_read_as_that_of_each_axis_that_a_step_has(
    elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (elsewhere / "n.env").write_text("export NCCL_MAX_CTAS=8\n")
    line = ["settings", "import", "settings=n.env", "from=nccl", "out=p.yaml"]
    for words, parallel, part in (
        (["parallel.tp=4", "parallel.dp=2"], {"tp": 4, "dp": 2, "tp_ctas": 8, "dp_ctas": 8}, ""),
        (["parallel.tp=4"], {"tp": 4, "tp_ctas": 8}, "NCCL_MAX_CTAS 8 (of parallel.dp_ctas: name the step"),
    ):
        assert main([*line, *words]) == 0
        assert part in " ".join(capsys.readouterr().out.split())
        assert yaml.safe_load((elsewhere / "p.yaml").read_text())["parallel"] == parallel


def test_ctas_of_a_step_are_exported_and_priced_by_what_a_file_says(
    elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (elsewhere / "plan.yaml").write_text(yaml.safe_dump({**CTAS, "step": [*NVIDIA, SPLIT]}))
    assert main(["settings", "export", "plan=plan.yaml", "to=communicators", "out=theirs"]) == 0
    printed = capsys.readouterr().out
    assert "has no setting for parallel.tp_ctas" not in printed and "nearest: parallel" not in printed
    planned, by_tool = re.findall(r"(?:planned|by NCCL[^,]*?) ([0-9.]+) ms", printed)[:2]
    assert planned == by_tool
    # a framework has no setting, and runs as many CTAs as the library takes
    assert main(["settings", "export", "plan=plan.yaml", "to=megatron", "out=others"]) == 0
    printed = capsys.readouterr().out
    assert "has no setting for parallel.tp_ctas = 8" in printed
    planned, by_tool = re.findall(r"(?:planned|by Megatron-LM) ([0-9.]+) ms", printed)[:2]
    assert float(planned) > float(by_tool)


# Iris


def test_keys_of_iris_name_the_shapes_of_a_step() -> None:
    of_step, tool = facts(AMD), tools()["iris"]
    plan = {"sites": {"ffn_in_backward": "c3_sp comm_cus=24"}}
    (text,) = (part.text for part in write_all(tool, plan, "plan.yaml", of_step).values())
    ((key, entry),) = json.loads(text).items()
    assert key.startswith(
        "arch=gfx942:sramecc+:xnack-|world=8|nwg=304|mode=fused|coll=reduce_scatter|g=4096x3584x4096|"
    )
    assert entry["config"] == {"gemm_wgs": 280, "gemm_block": [256, 256, 64]}
    assert nearest(tool, plan, write_all(tool, plan, "plan.yaml", of_step), of_step)["sites"] == plan["sites"]


@pytest.mark.parametrize(
    ("key", "entry", "rule"),
    [
        ("gfx942|world=8", {"config": {"gemm_wgs": 8, "gemm_block": [1, 1, 1]}}, "no key"),
        (None, {"gemm_wgs": 8}, "no config"),
        (None, {"config": {"gemm_wgs": 305, "gemm_block": [256, 256, 64]}}, "no number of workgroups"),
        (None, {"config": {"gemm_wgs": 280, "gemm_block": [256, 256]}}, "no list of three sizes"),
    ],
)
def test_entries_that_iris_never_finds_or_cannot_use_are_refused(key: str | None, entry: object, rule: str) -> None:
    fine = "arch=gfx942|world=8|nwg=304|mode=fused|coll=all_reduce|g=1x2x3|c=4x5"
    with pytest.raises(ConfigError) as caught:
        iris_table.read_table(json.dumps({key or fine: entry}), "i.json")
    assert any(rule in problem.rule for problem in caught.value.problems)


@pytest.mark.parametrize(("name", "words"), [("nccl_tuner", AMD), ("rccl_tuner", NVIDIA)])
def test_a_tuner_is_of_the_vendor_of_the_gpus(name: str, words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="another vendor"):
        write_all(tools()[name], {"sites": {}}, "plan.yaml", facts(words))


@pytest.mark.parametrize("text", ["megatron_async_sums", "transformer_engine", "conccl", "c3_sp"])
@pytest.mark.parametrize("name", OF_STEP)
def test_schedules_that_a_file_has_no_number_for_are_left_unsaid(name: str, text: str) -> None:
    plan = {"sites": {"ffn_in_backward": text}, "parallel": {"tp": 4}}
    of_step = facts_for(name)
    for part in write_all(tools()[name], plan, "plan.yaml", of_step).values():
        by_priority = any("is_high_priority_stream" in row.name for row in part.rows)
        assert ("sites.ffn_in_backward" in part.unsaid) != by_priority


@pytest.mark.parametrize("text", ["[" * 100_000, "{", "[]"])
def test_what_is_no_table_of_iris_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        iris_table.read_table(text, "i.json")


@drawn(200)
@given(text=st.text(max_size=300))
def test_any_text_is_read_or_refused(text: str) -> None:
    readers = (
        lambda: read_tuner(text, "x", "nccl"),
        lambda: communicators.read_yaml(text, "x"),
        lambda: communicators.read_python(text, "x"),
        lambda: iris_table.read_table(text, "x"),
    )
    for read in readers:
        with contextlib.suppress(ConfigError):
            read()


def test_iris_is_of_machines_whose_architecture_is_known() -> None:
    with pytest.raises(ConfigError, match="h100"):
        write_all(tools()["iris"], {"sites": {}}, "plan.yaml", facts(NVIDIA))


# Switches of frameworks


def test_a_launch_says_which_switches_change_a_step(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    launch = (
        "export VLLM_ALLREDUCE_USE_SYMM_MEM=0\nexport VLLM_USE_NCCL_SYMM_MEM=1\nvllm serve m --tensor-parallel-size 8\n"
    )
    (elsewhere / "serve.sh").write_text(launch)
    assert main(["settings", "import", "settings=serve.sh", "from=vllm"]) == 0
    assert "is not modelled: VLLM_USE_NCCL_SYMM_MEM 1" in capsys.readouterr().out
    assert yaml.safe_load((elsewhere / "plan.yaml").read_text())["parallel"] == {"collectives": "library", "tp": 8}
    toml = "[parallelism]\ntensor_parallel_degree = 4\nenable_fsdp_symm_mem = true\n[training]\nlocal_batch_size = 1\n"
    (elsewhere / "t.toml").write_text(f"{toml}[compile]\nenable_async_tensor_parallel = true\n")
    assert main(["settings", "import", "settings=t.toml", "from=torch"]) == 0
    assert "is not modelled: FSDP_SYMM_MEM True" in capsys.readouterr().out
    assert yaml.safe_load((elsewhere / "plan.yaml").read_text())["sites"]["ffn_in"] == "torch_async_tp"


def test_every_kind_of_file_comes_back() -> None:
    kinds = files_read_back()
    assert [name for name, equal in kinds.items() if not equal] == []
    written = {
        f"{name}: {file.name}" for name, tool in tools().items() for file in tool.files if file.format != "msccl"
    }
    assert kinds.keys() == written
    assert count_read_back() == len(written)
