"""All studies of a paper by one command: chosen by name, resumed, and a failure of one told beside the others."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dse import plugins
from dse.config.options import list_options
from dse.errors import ConfigError
from dse_pages.reproduce import ReproducedStudy, choose, command, studies
from dse_pages.reproduction import StudyRow, counts, distinct, duration, write
from tests.browser import PHONE, browsing, needs_chromium

SHIPPED = studies()
CLAIM = {
    **{"id": "x.y", "statement": "s", "source": "where", "unit": "x", "kind": "max", "published": 4.25, "ours": 4.0},
    **{"error": -0.06, "basis": "predicted", "reason": "because", "flips": None, "provenance": "abstract"},
}


def test_every_study_is_of_a_paper_or_of_none() -> None:
    assert {study.name for study in SHIPPED} == set(list_options("study"))
    assert all(re.fullmatch(r"arXiv:\d{4}\.\d{5}", study.paper) for study in SHIPPED if study.paper)
    of_none = {
        "codesign",
        "measure_my_gpu",
        "operators",
        "overlap_measured",
        "peers",
        "plan",
        "power",
        "prefill_decode",
        "search_benchmark",
        "serving",
        "synthesis",
        "trace",
        "whole_models",
    }
    assert {study.name for study in SHIPPED if not study.paper} == of_none & {study.name for study in SHIPPED}


@pytest.mark.parametrize("word", ["arXiv:2401.16677", "arxiv:2401.16677", "2401.16677", "t3", "t3_hardware"])
def test_a_paper_is_meant_by_its_number_or_by_one_of_its_studies(word: str) -> None:
    assert [study.name for study in choose(word, SHIPPED)] == ["t3", "t3_hardware", "t3_mi300x", "t3_requests"]


def test_a_study_without_a_paper_is_reproduced_alone_and_all_are_all() -> None:
    assert choose("operators", SHIPPED) == [ReproducedStudy("operators", "")]
    assert choose("all", SHIPPED) == SHIPPED


@pytest.mark.parametrize(("word", "way"), [("fico", "did you mean `ficco`"), ("2512.10237", "arXiv:2512.10236")])
def test_an_unknown_paper_is_refused_with_the_nearest(word: str, way: str) -> None:
    with pytest.raises(ConfigError, match=way):
        choose(word, SHIPPED)


@pytest.mark.nightly
@given(verdicts=st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from([True, False, None])), max_size=12))
def test_a_claim_of_several_studies_counts_once_and_a_miss_is_a_miss(verdicts: list[tuple[str, bool | None]]) -> None:
    rows = [{"id": name, "within": within, "basis": "predicted"} for name, within in verdicts]
    count = counts(distinct(rows))
    assert count["within"] + count["missed"] + count["untested"] == len({name for name, _ in verdicts})
    assert count["missed"] == len({name for name, within in verdicts if within is False})


@given(seconds=st.floats(0, 1e6))
def test_a_duration_is_said_in_at_most_two_units(seconds: float) -> None:
    numbers = [float(number) for number in re.findall(r"[\d.]+", duration(seconds))]
    assert len(numbers) <= 2
    assert all(number <= 60 for number in numbers[1:])


def test_a_page_tells_of_a_failed_study_beside_the_others(tmp_path: Path) -> None:
    hostile = "failed: its configuration was refused: </script><img src=x onerror=alert(1)>"
    missed = {**CLAIM, "within": False}
    rows = [
        StudyRow("one", "arXiv:1", None, [], hostile, 3.0),
        StudyRow("two", "arXiv:1", None, [missed], "failed: no", None),
    ]
    text = write(tmp_path / "page.html", "one", rows).read_text()
    assert "<img" not in text
    assert "because" in text
    assert "0 of 1 predicted values" in text


@pytest.mark.slow
@needs_chromium
def test_a_page_of_a_reproduction_can_be_read_by_everybody(tmp_path: Path) -> None:
    rows = [StudyRow("one", "arXiv:1", None, [{**CLAIM, "within": False}], "failed: no", 3.0)]
    path = write(tmp_path / "page.html", "one", rows)
    with browsing(PHONE) as visit:
        visit.page.goto(path.as_uri())
        assert visit.faults() == []
        assert visit.overhang() <= 0
        assert not visit.complaints


def own_studies(folder: Path, *, only: str = "[g4]") -> Path:
    """A configuration of two studies of a paper, of which one is refused."""
    (folder / "study").mkdir(parents=True)
    text = """\
        # @package _global_
        defaults:
          - ficco_sweep
          - override /fidelity: none
          - override /figures: none
        study: {{name: {name}, paper: mine, question: "Which is it?"}}
        workload: {{only: {only}}}
        """
    for name, what in (("broken_own", "[no_such_gemm]"), ("small_own", only)):
        content = textwrap.dedent(text).format(name=name, only=what)
        (folder / "study" / f"{name}.yaml").write_text(content)
    return folder


@pytest.mark.nightly
def test_a_study_that_fails_stops_no_other_and_what_is_done_is_not_done_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["mine", f"output={tmp_path / 'out'}", f"config_dir={own_studies(tmp_path / 'conf')}"]
    assert command(words) == 3
    printed = capfd.readouterr().out
    assert "1 of 2: broken_own (mine)" in printed
    assert "FAILED" in printed
    assert "no_such_gemm" in printed
    assert "2 of 2: small_own" in printed
    page = (tmp_path / "out" / "reproduce" / "mine.html").read_text()
    assert "its configuration was refused" in page
    assert "study=small_own" in page
    assert json.loads((tmp_path / "out" / "reproduce" / "times.json").read_text())["small_own"] > 0
    assert command(words) == 3
    assert "as it was, up to date" in capfd.readouterr().out


@pytest.mark.more
def test_an_interrupted_reproduction_goes_on_when_it_is_typed_again(tmp_path: Path) -> None:
    conf = own_studies(tmp_path / "conf")
    (conf / "study" / "broken_own.yaml").unlink()
    (conf / "study" / "small_own.yaml").write_text(
        textwrap.dedent("""\
            # @package _global_
            defaults:
              - ficco
              - override /fidelity: none
              - override /figures: none
            study: {name: small_own, paper: mine}
            """)
    )
    words = [
        sys.executable,
        "-m",
        "dse",
        "results",
        "reproduce",
        "mine",
        f"output={tmp_path / 'out'}",
        f"config_dir={conf}",
    ]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, start_new_session=True, text=True)
    while not (tmp_path / "out" / "results.db").exists() and process.poll() is None:
        time.sleep(0.05)
    assert process.poll() is None, process.communicate()[1]
    os.killpg(process.pid, signal.SIGINT)
    _, output = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "type the same command to go on" in output
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


def test_every_command_that_reads_a_folder_of_configurations_declares_it() -> None:
    commands = {name: plugins.load("command", name).__doc__ or "" for name in plugins.names("command")}
    reading = {name for name, text in commands.items() if "config_dir" in text}
    declared = {name for name in commands if "config_dir" in plugins.declaration("COMMANDS", name).options}
    assert "results reproduce" in reading and reading <= declared
