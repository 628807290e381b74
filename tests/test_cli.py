"""The command line as a person uses it: help, a study from end to end, redrawing, interrupting."""

from __future__ import annotations

import functools
import json
import os
import shlex
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

import dse
from dse.cli import main
from dse.config.compose import request
from dse.config.options import list_options, plural
from dse.errors import ConfigError
from dse.evaluation import evaluators
from dse.results import report
from dse.results.claims import Claim, ClaimResult, judge, within
from dse.results.run_folder import Outputs
from dse.results.selection import Selection
from dse.study.plan import Plan, plan
from dse.values import keys_to_hex
from studies.ficco import STUDY
from tests.support import CONF, QUIET, shipped, until

SMALL = ["study=ficco_sweep", "workload.only=[g4]", "tracking=none", "fidelity=none"]
FAST = ["schedule=serial", "workload.only=[g4]", "tracking=none", "fidelity=none", "figures=none"]
LATER = ("mlflow", "matplotlib", "pandas", "optuna", "simpy", "joblib", "scipy", "sqlalchemy")
HEAVY = ("hydra", *LATER)


def python(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter, run in a folder."""
    return subprocess.run(
        [sys.executable, *words], cwd=folder, capture_output=True, text=True, check=False, timeout=120
    )


def latest(folder: Path) -> Path:
    """The newest run of the shipped study below a folder."""
    return folder / "outputs" / "ficco_sweep" / "latest"


# Help


OF_STEPS = ("model", "kernels", "optimizer", "lengths", "iterations")


def test_help_is_a_screen_and_lists_have_every_option_with_its_description(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    screen = capsys.readouterr().out.splitlines()
    assert len(screen) <= 45
    assert max(map(len, screen)) <= 120
    assert "importance" not in "".join(screen)  # a command under study of a verb that is supported
    for group in ("study", "simulator", "search", "schedule", "system", "workload", "tracking", *OF_STEPS):
        assert main([plural(group), "--all"]) == 0
        entries = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if len(line.split()) > 1]
        lines = {(name, text.strip().removesuffix(" (research)")) for name, text in entries}
        for name, tree in shipped(group).items():
            assert (name, tree["study"]["question"] if group == "study" else tree["description"]) in lines


@pytest.mark.parametrize(
    ("words", "way"),
    [
        (["ficco_sweep"], "write `study=ficco_sweep`"),
        (["ficco_swep"], "write `study=ficco_sweep`"),
        (["study", "ficco_sweep"], "write study=<name>"),
        (["--study", "ficco_sweep"], "write study=<value>"),
        (["h100_8"], "write `system=h100_8`"),
        (["systmes"], "did you mean `python -m dse systems`?"),
        (["reprot", "study=ficco_sweep"], "did you mean `python -m dse results report study=ficco_sweep`?"),
        (["nothing_like_it"], "a study is run <name>"),
    ],
)
def test_a_word_that_is_no_command_is_told_what_it_may_have_meant(
    words: list[str], way: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert way in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "heavy"),
    [
        (None, HEAVY),
        (["--help"], HEAVY),
        (["study=ficco_sweep", "run.nonsense=1"], ("numba", *LATER)),
        (["study=ficco_sweep", "system.gpu.num_cus=0"], ("numba", *LATER)),
    ],
)
def test_neither_the_package_nor_help_nor_a_refusal_imports_anything_heavy(
    words: list[str] | None, heavy: tuple[str, ...], tmp_path: Path
) -> None:
    statement = "import dse" if words is None else f"from dse.cli import main; main({words})"
    ask = f"import sys; {statement}; print('imported:', sorted(set(sys.modules) & {set(heavy)!r}))"
    assert python("-c", ask, folder=tmp_path).stdout.splitlines()[-1] == "imported: []"


@pytest.mark.slow
@pytest.mark.parametrize("words", [[], ["-h"], ["--help", "system=h100_8"]])
def test_help_is_what_one_gets_for_asking_or_for_nothing(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 0
    assert "usage: python -m dse" in capsys.readouterr().out


# A study from end to end


CHANGED = (*SMALL, "system.gpu.kernel_launch_s=3 us")


@functools.cache
def small_plan() -> Plan:
    """The plan of the small study."""
    return plan(request(CHANGED))


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder in which a small study with a changed constant was run, and what was printed."""
    folder = tmp_path_factory.mktemp("study")
    done = python("-m", "dse", *CHANGED, folder=folder)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return folder, done.stdout


@pytest.mark.slow
def test_a_study_writes_a_table_with_a_row_per_point(study: tuple[Path, str]) -> None:
    folder, _ = study
    table = dse.load("ficco_sweep", folder / "outputs")
    planned = small_plan()
    points = {
        key
        for block in planned.spaces["g4"].blocks(1000)
        for key in keys_to_hex(block.content_keys(*planned.context.words))
    }
    assert set(table["key"]) == {key.decode() for key in points}
    assert table["key"].is_unique
    assert set(table["status"]) == {"ok"}
    assert {*planned.knobs, *planned.recorded_paths, *planned.backend.described} <= set(table)
    assert table["on_front"].any()
    assert not table["on_front"].all()
    serial = table[(table["schedule.name"] == "serial") & (table["schedule.comm_engine"] == "cu")]
    assert set(table["baseline"]) <= set(serial["key"])
    assert table.loc[table["key"] == table["baseline"], "speedup"].eq(1.0).all()


@pytest.mark.slow
def test_a_study_writes_its_claims_one_row_each_with_the_reason_where_none_can_be_tested(
    study: tuple[Path, str],
) -> None:
    claims = yaml.safe_load((CONF.parent / "studies" / "ficco" / "claims.yaml").read_text("utf-8"))
    rows = json.loads((latest(study[0]) / "claims.json").read_text("utf-8"))
    assert [row["id"] for row in rows] == [claim["id"] for claim in claims]
    for row, claim in zip(rows, claims, strict=True):
        assert {"id", "published", "ours", "tolerance", "within", "provenance", "basis", "reason"} <= set(row)
        assert (row["published"], row["tolerance"]) == (claim["value"], claim["tolerance"])
        assert row["provenance"] == claim["provenance"]
        assert row["basis"] in ("predicted", "fitted", "by construction", "input")
        assert row["within"] is None, "one shape and a changed constant cannot test the claims"
        assert row["ours"] is None
        assert "workload.only" in row["reason"]
        assert "system.gpu.kernel_launch_s" in row["reason"]


@pytest.mark.slow
def test_claims_are_judged_by_their_tolerance_alone(study: tuple[Path, str]) -> None:
    table = dse.load("ficco_sweep", study[0] / "outputs")
    rows = judge(STUDY.claims(), STUDY.findings(table))
    assert None in {row["within"] for row in rows}
    assert len([row for row in rows if row["within"] is not None]) >= 3
    for row in rows:
        assert (row["within"] is None) == (row["ours"] is None)
        assert row["reason"] or row["within"]
        if row["within"] is not None:
            low, high = row["tolerance"] or (row["published"], row["published"])
            assert row["within"] == (low <= row["ours"] <= high)


def test_a_bound_is_shown_as_one_and_ends_the_tolerance() -> None:
    about = {"id": "x.error", "statement": "", "metric": "error", "unit": "%", "provenance": "derived", "source": ""}
    bound = Claim(**about, kind="at_most", value=3, tolerance=(0, 3))
    assert [within(bound, ClaimResult(ours)) for ours in (2.9, 3.0, 3.1, None)] == [True, True, False, None]
    rows = judge([bound, bound.model_copy(update={"id": "x.other"})], {"x.error": ClaimResult(2.0)})
    shown = report.claims_table(rows)
    assert not isinstance(shown, str)
    assert [*shown.columns[1].cells] == ["≤ 3 %"] * 2
    for tolerance in (None, (0, 4)):
        with pytest.raises(ValueError, match="at_most needs a tolerance that ends at its value"):
            Claim(**about, kind="at_most", value=3, tolerance=tolerance)


def test_a_unit_of_1_is_not_printed_and_any_other_one_is() -> None:
    about = {"id": "x.gain", "statement": "", "metric": "gain", "provenance": "derived", "source": ""}
    for unit, texts in (("1", ["1.3", "1.25/1.4"]), ("s", ["1.3 s", "1.25/1.4 s"])):
        kinds: list[dict[str, Any]] = [{"kind": "exact", "value": 1.3}, {"kind": "band", "value": (1.25, 1.4)}]
        claims = [Claim(**about, **kind, unit=unit, tolerance=(1, 2)) for kind in kinds]
        shown = report.claims_table([row for claim in claims for row in judge([claim], {"x.gain": ClaimResult(1.3)})])
        assert not isinstance(shown, str)
        assert [*shown.columns[1].cells] == texts
        assert [*shown.columns[2].cells] == texts[:1] * 2


def test_only_predictions_are_counted_as_tests_of_the_model() -> None:
    about = {"statement": "", "metric": "error", "unit": "%", "provenance": "derived", "source": ""}
    names = ("right", "wrong", "fitted", "put_in", "certain", "untested")
    claims = [Claim(id=f"x.{name}", kind="exact", value=1, tolerance=(0, 2), **about) for name in names]
    findings = {
        "x.right": ClaimResult(1.0),
        "x.wrong": ClaimResult(3.0),
        "x.fitted": ClaimResult(1.0, basis="fitted"),
        "x.put_in": ClaimResult(1.0, basis="input"),
        "x.certain": ClaimResult(1.0, basis="by construction"),
    }
    text = report.claims_count(judge(claims, findings))
    assert text == ("1 of 2 predicted claims are within, 1 fitted, 1 put in, 1 true by construction, 1 were not tested")
    assert report.claims_count(judge(claims, {}, departure="another machine")) == ""


FIGURES = {"pareto", "speedup", "dil", "cil", "signatures", "cu_sweep", "timeline_g4"}


@pytest.mark.slow
def test_a_study_draws_every_figure_twice_as_pixels_and_as_vectors(study: tuple[Path, str]) -> None:
    figures = latest(study[0]) / "figures"
    drawn = {f"{name}.{kind}" for name in FIGURES for kind in ("png", "svg")}
    assert {path.name for path in figures.iterdir()} == {*drawn, "timeline_g4.json"}  # a trace for Perfetto
    for name in FIGURES:
        assert (figures / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert "</svg>" in (figures / f"{name}.svg").read_text("utf-8")


@pytest.mark.slow
def test_a_study_writes_the_source_of_every_constant_it_rests_on(study: tuple[Path, str]) -> None:
    provenance = json.loads((latest(study[0]) / "provenance.json").read_text("utf-8"))
    facts = {fact["path"]: fact for fact in provenance["facts"]}
    planned = small_plan()
    expected = {path for path, *_ in planned.backend.facts(planned.backend.design(planned.spaces["g4"].base))}
    assert set(facts) == expected
    assert all(fact["provenance"] and fact["source"] for fact in facts.values())
    changed = facts.pop("system.gpu.kernel_launch_s")
    assert (changed["value"], changed["provenance"]) == (3e-6, "user")
    assert "user" not in {fact["provenance"] for fact in facts.values()}
    assert provenance["seed"] == 0
    assert provenance["versions"]["dse"] == dse.__version__
    assert provenance["command"][:3] == ["python", "-m", "dse"]


@pytest.mark.slow
def test_a_study_writes_the_configuration_that_repeats_it(study: tuple[Path, str]) -> None:
    tree = yaml.safe_load((latest(study[0]) / "config.yaml").read_text("utf-8"))
    assert tree == small_plan().request.tree


@pytest.mark.slow
def test_a_study_tells_who_won_and_where_everything_is(study: tuple[Path, str]) -> None:
    folder, output = study
    (run,) = [path for path in (folder / "outputs" / "ficco_sweep").iterdir() if not path.is_symlink()]
    assert latest(folder).resolve() == run
    table = dse.load("ficco_sweep", folder / "outputs")
    best = table.sort_values("makespan_s").iloc[0]
    assert best["schedule.name"].replace("_", " ") in output
    assert f"{best['speedup']:.2f}x" in output
    assert str(run.relative_to(folder)) in output
    assert f"{len(table)} points" in output
    assert "all fit in budget.trials" in output
    assert "workload.only=[g4]" in output  # brackets are text, not mark-up


@pytest.mark.more
def test_a_report_redraws_what_is_stored_without_evaluating_anything(
    study: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(study[0], tmp_path / "copy", symlinks=True)
    run = latest(tmp_path / "copy").resolve()
    page = list(run.glob("*.html"))  # where a plug-in writes it
    written = [*(run / "figures").iterdir(), run / "claims.json", run / "rule.json", *page]
    before = {path.name: path.read_bytes() for path in written}
    shutil.rmtree(run / "figures")
    for path in (run / "claims.json", *page):
        path.unlink()
    (run / "rule.json").unlink()  # what the study adds is written anew, as figures are
    stored = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in run.iterdir()}
    monkeypatch.chdir(tmp_path / "copy")
    assert main(["results", "report", "study=ficco_sweep"]) == 0
    again = [*(run / "figures").iterdir(), run / "claims.json", run / "rule.json", *page]
    assert {path.name: path.read_bytes() for path in again} == before
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in stored} == stored
    output = capsys.readouterr().out
    assert "hetero_fused_1d" in output or "best makespan_s" in output


@pytest.mark.slow
def test_any_point_can_be_run_again_in_full(study: tuple[Path, str], tmp_path: Path) -> None:
    """The trace covers the makespan of its row; a picture comes with it."""
    shutil.copytree(latest(study[0]).resolve(), tmp_path / "ficco_sweep" / "latest")
    table = dse.load("ficco_sweep", tmp_path)
    for place in (0, len(table) // 2, len(table) - 1):
        row = table.iloc[place]
        assert (
            main(["results", "timeline", "study=ficco_sweep", f"key={row['key'][:10]}", f"output_dir={tmp_path}"]) == 0
        )
        (trace,) = tmp_path.glob(f"*/latest/figures/timeline_{row['scenario']}_{row['key'][:8]}.json")
        events = [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
        end = max(event["ts"] + event["dur"] for event in events) / 1e6
        assert end == pytest.approx(row["makespan_s"], rel=1e-9)
        assert sum(event["args"]["flop"] for event in events) == pytest.approx(row["flop"], rel=1e-12)
        assert trace.with_suffix(".png").is_file()


@pytest.mark.slow
@pytest.mark.parametrize(("key", "why"), [("", "several"), ("no-such-key", "is no point")])
def test_a_key_that_is_not_one_points_is_refused(
    key: str, why: str, study: tuple[Path, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(latest(study[0]).resolve(), tmp_path / "ficco_sweep" / "latest")
    start = key or common_start(list(dse.load("ficco_sweep", tmp_path)["key"]))
    assert main(["results", "timeline", "study=ficco_sweep", f"key={start}", f"output_dir={tmp_path}"]) == 2
    assert why in capsys.readouterr().err


def common_start(keys: list[str]) -> str:
    """One letter that begins several keys."""
    return next(letter for letter in "0123456789abcdef" if sum(key.startswith(letter) for key in keys) > 1)


@pytest.mark.nightly
def test_without_timelines_nothing_is_run_again(elsewhere: Path) -> None:
    assert main([*SMALL, "timeline=false", "figures=none"]) == 0
    assert dse.load("ficco_sweep")["status"].eq("ok").any()
    assert not list(latest(elsewhere).glob("figures/timeline_*"))


@pytest.mark.nightly
def test_one_seed_gives_one_table_to_the_byte_for_any_number_of_jobs(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluators, "POOL_PAYS_S", 0.0)  # so that so little work starts the workers at all
    words = [*SMALL, "figures=none", "simulator=event", "search=nsga2", "budget.trials=30"]
    for jobs in (1, 2):
        assert main([*words, f"executor.jobs={jobs}", f"output_dir=jobs{jobs}"]) == 0
    first, second = (
        (elsewhere / f"jobs{jobs}" / "ficco_sweep" / "latest" / "results.parquet").read_bytes() for jobs in "12"
    )
    assert first == second
    assert len(dse.load("ficco_sweep", "jobs1")) >= 30


@pytest.mark.nightly
def test_own_shapes_run_on_every_topology(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("my.csv").write_text("name,m,n,k,pattern\nwide,4096,65536,1024,\nodd,4099,8191,1021,all_to_all\n", "utf-8")
    topology = "+space.system.node.topology=choice(mesh,switch,ring)"
    words = ["schedule=hetero_fused_1d", "space.schedule.num_chunks=choice(2,8)", "tracking=none"]
    assert main([*words, topology, "workload.shapes=my.csv"]) == 0, capsys.readouterr().err
    table = dse.load("ficco_sweep")
    assert list(table["scenario"].unique()) == ["wide", "odd"]
    assert set(table["status"]) == {"ok"}
    rows = table[table["scenario"] == "wide"].groupby(["system.node.topology", "schedule.name"]).size().unstack()
    assert set(rows.index) == {"mesh", "switch", "ring"}
    assert rows.notna().all(axis=None)
    assert (latest(elsewhere) / "figures" / "timeline_odd.png").is_file()


@pytest.mark.nightly
@pytest.mark.slow
def test_multirun_runs_several_studies_and_every_point_becomes_a_run_in_mlflow(tmp_path: Path) -> None:
    done = python("-m", "dse", "--multirun", "seed=0,1", *FAST[:2], *FAST[3:], folder=tmp_path)
    assert done.returncode == 0, done.stderr
    folders = [path for path in (tmp_path / "outputs" / "ficco_sweep").iterdir() if not path.is_symlink()]
    points = [len(pd.read_parquet(path / "results.parquet")) for path in folders]
    assert len(points) == 2
    with sqlite3.connect(tmp_path / "mlflow.db") as database:
        children = database.execute("select run_uuid from tags where key = 'mlflow.parentRunId'").fetchall()
        (runs,) = database.execute("select count(*) from runs").fetchone()
        named = "select distinct p.key from params p join tags t using (run_uuid) where t.key = 'mlflow.parentRunId'"
        parameters = {name for (name,) in database.execute(named)}
    database.close()
    assert (len(children), runs) == (sum(points), sum(points) + 2)
    assert parameters == {"schedule.comm_engine", "schedule.priority"}  # the searched knobs, and nothing else


@pytest.mark.nightly
def test_of_a_very_long_table_figures_show_a_selection_and_it_is_said(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report, "MOST_ROWS", 50)
    assert main(SMALL) == 0
    output = capsys.readouterr().out
    table = dse.load("ficco_sweep")
    assert f"figures show 50 of {len(table)} rows" in output
    assert f"{len(table)} points" in output
    assert table.sort_values("makespan_s").iloc[0]["schedule.name"].replace("_", " ") in output
    assert {path.stem for path in (latest(elsewhere) / "figures").iterdir()} == FIGURES


@pytest.mark.slow
def test_claims_are_judged_on_complete_tables_only(study: tuple[Path, str], tmp_path: Path) -> None:
    shutil.copytree(latest(study[0]).resolve(), tmp_path / "run")
    outputs = Outputs(tmp_path / "run")
    outputs.write_json("summary", {**outputs.read_json("summary"), "departures": []})
    selection = report.load_selection(outputs)
    assert selection.complete
    assert any(row["within"] is not None for row in report.check(outputs, "ficco", selection))
    rows = report.check(outputs, "ficco", Selection(selection.table.head(50), selection.num_rows))
    assert {row["within"] for row in rows} == {None}
    assert all(f"complete tables, this is 50 of {selection.num_rows} rows" in row["reason"] for row in rows)


@pytest.mark.more
def test_a_study_is_shown_in_mlflow_and_of_a_long_table_the_fronts_and_baselines(
    elsewhere: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main([*FAST[:2], "figures=none", "tracking.uri=sqlite:///mlflow.db", "tracking.whole_up_to=1"]) == 0
    table = dse.load("ficco_sweep")
    assert f"1 runs of {len(table)} points" in (output := capfd.readouterr().out)
    assert "tracking.points=all" in output
    with sqlite3.connect(elsewhere / "mlflow.db") as database:
        keys = {key for (key,) in database.execute("select value from tags where key = 'dse.point_key'").fetchall()}
        query = "select value from latest_metrics where key = 'num_points'"
        (count,) = database.execute(query).fetchone()
    database.close()
    assert count == len(table)
    assert len(keys) == 1
    assert keys <= set(table["key"][table["on_front"]])


# Interrupting


@pytest.mark.parametrize("error", [AttributeError, OSError, ConfigError])
def test_an_error_that_an_interrupt_caused_is_told_as_an_interrupt(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def half_built(_: object) -> int:
        try:
            raise KeyboardInterrupt
        finally:
            raise error("a part is missing")  # as OmegaConf's clean-up of a container without its content does

    monkeypatch.setattr("dse.cli._dispatch", half_built)
    assert main(["studies"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.one_in(2)
@pytest.mark.more
@pytest.mark.parametrize("jobs", [1, 2])
def test_an_interrupt_ends_a_long_run_at_once_without_a_traceback(jobs: int, tmp_path: Path) -> None:
    sweep = "+space.system.gpu.num_cus=range(104,304,8)"  # a minute's work
    words = ["study=ficco_sweep", sweep, "simulator=event", *QUIET, f"executor.jobs={jobs}"]
    running = subprocess.Popen(
        [sys.executable, "-m", "dse", *words],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert until(lambda: any(tmp_path.glob("outputs/*/*")), seconds=30)
        time.sleep(2.0 if jobs == 1 else 6.0)  # into the evaluation, with two jobs past the start of the workers
        assert running.poll() is None
        os.killpg(running.pid, signal.SIGINT)  # as a terminal does
        _, output = running.communicate(timeout=20)
    finally:
        if running.poll() is None:
            os.killpg(running.pid, signal.SIGKILL)
            running.communicate()
    assert running.returncode == 130
    assert "Traceback" not in output
    assert output.splitlines()[-1].startswith("interrupted")
    assert not latest(tmp_path).exists()
    assert until(lambda: not lives(running.pid), seconds=15), "worker processes were left behind"


def lives(group: int) -> bool:
    """Whether a process group has any process left."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


# Refusing


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["bake"], ["bake", "known here: ", "results, ", "`python -m dse studies` lists them"]),
        (["results", "report"], ["study", "is missing"]),
        (["results", "report", "study=ficco_sweep"], ["study = 'ficco_sweep'", "python -m dse study=ficco_sweep"]),
        (["results", "report", "stduy=x"], ["stduy=x", "did you mean `study=x`?"]),
        (["ui", "port=no"], ["port = 'no'"]),
        (["ui", "port=0"], ["port = '0'"]),
        (["ui"], ["mlflow.db"]),
    ],
    ids=" ".join,
)
def test_a_wrong_command_is_refused_with_the_way_out(
    words: list[str], parts: list[str], elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    message = capsys.readouterr().err
    assert all(part in message for part in parts), message
    assert "Traceback" not in message
    assert not list(elsewhere.iterdir())


@pytest.mark.slow
def test_a_study_without_results_is_refused_with_the_nearest_one_that_has_some(
    study: tuple[Path, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(study[0])
    assert main(["results", "report", "study=fico_sweep"]) == 2
    assert "did you mean `ficco_sweep`?" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="did you mean `ficco_sweep`"):
        dse.load("fico_sweep")


@pytest.mark.slow
def test_a_place_that_cannot_be_written_is_the_environments_fault(
    elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("taken").write_text("a file, no folder", encoding="utf-8")
    assert main([*FAST, "output_dir=taken"]) == 4
    message = capsys.readouterr().err
    assert "taken" in message
    assert "Traceback" not in message


@pytest.mark.nightly
def test_multirun_refuses_like_a_single_run(tmp_path: Path) -> None:
    words = ["schedule=serial,shard_p2p", "system.gpu.num_cus=0", "tracking=none"]
    done = python("-m", "dse", "--multirun", *words, folder=tmp_path)
    assert done.returncode == 2
    assert "system.gpu.num_cus = 0" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "outputs").exists()


@pytest.mark.slow
@pytest.mark.one_in(2)
@pytest.mark.parametrize("flags", [["--cfg", "job"], ["--multirun"], ["--cfg", "job", "--resolve"]], ids=" ".join)
@pytest.mark.parametrize(
    ("listed", "problem"), [("absent", "configuration: "), ("true", "mine.yaml: defaults = True: ")]
)
def test_what_hydra_cannot_compose_is_refused_in_a_sentence_whatever_the_flag(
    listed: str, problem: str, flags: list[str], tmp_path: Path
) -> None:
    (tmp_path / "conf" / "study").mkdir(parents=True)
    (tmp_path / "conf" / "study" / "mine.yaml").write_text(f"# @package _global_\ndefaults: [{listed}]\n")
    done = python("-m", "dse", "study=mine", "--config-dir=conf", *flags, folder=tmp_path)
    assert done.returncode == 2
    assert f"refused, nothing was evaluated: 1 problem\n  {problem}" in done.stderr
    assert "HYDRA_FULL_ERROR" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        pytest.param(["-m", "run", "system=h100_8,mi300x_8"], marks=pytest.mark.more),
        ["run", "system=[h100_8,mi300x_8]"],
    ],
)
def test_machines_are_compared_in_one_table(
    words: list[str], elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    at = words.index("run") + 1
    typed = [*words[:at], "ficco_sweep", *words[at:], *FAST]
    assert main(typed) == 0
    output = capsys.readouterr().out
    first, *rows = output[output.index("\nsystem ") :].strip().splitlines()
    assert first.split()[:2] == ["system", "scenario"]
    assert [row.split()[0] for row in rows[:2]] == ["h100_8", "mi300x_8"]
    assert rows[-1].startswith("best: system=")
    assert output.count("written to") == 0


@pytest.mark.slow
def test_one_of_several_runs_that_is_refused_leaves_the_others(
    elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["study=ficco_sweep", "-m", "system.node.num_gpus=8,-1", *FAST]) == 2
    written = capsys.readouterr()
    assert "system.node.num_gpus = -1" in written.err
    assert "\n8 " in written.out
    assert main(["study=ficco_sweep", "-m", "system=mi300x_8,mi300x_9", *FAST]) == 2  # before the first run
    written = capsys.readouterr()
    assert ("did you mean `system=mi300x_8`?" in written.err, written.out) == (True, "")


@pytest.mark.slow
@pytest.mark.one_in(6)
@pytest.mark.parametrize("study", sorted(list_options("study")))
def test_help_on_a_study_tells_its_question_its_groups_what_it_searches_and_two_examples(
    study: str, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = []
    for words in (["run", study, "--help"], [f"study={study}", "--help"]):
        assert main(words) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    tree = request([f"study={study}"])
    assert str(tree.tree["study"]["question"]) in texts[0]
    assert "simulator=" in texts[0]
    assert all(f"  {knob.path}" in texts[0] for knob in tree.knobs)
    examples = [line.strip() for line in texts[0].partition("Examples")[2].splitlines() if line.strip()]
    assert len(examples) == 2
    assert all(example.startswith(f"python -m dse run {study}") for example in examples)
    typed = shlex.split(examples[1])[5:]
    assert not request([f"study={study}", *(word for word in typed if word != "--dry-run")]).problems
