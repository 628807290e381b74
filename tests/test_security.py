"""Somebody else's files are data: what would run code, fill the memory or leave its folder is refused, and told."""

from __future__ import annotations

import ast
import json
import re
import shutil
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dse.cli import main
from dse.config.options import MOST_BYTES, MOST_FILES, unreadable
from dse.errors import hidden, redact
from dse.errors.parsing import MOST_NODES
from dse.results import provenance
from dse.results.report import console
from dse.tracking.study import StudyFolder
from tests.folders import finished, odd_table
from tests.support import CONF, REPOSITORY, flat_system, syntax

S = [
    "study=ficco_sweep",
    "tracking=none",
    "fidelity=none",
    "store=none",
    "timeline=false",
    "schedule=serial",
    "workload.only=[g4]",
]


pytestmark = pytest.mark.usefixtures("elsewhere")


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str], elsewhere: Path) -> Callable[..., str]:
    """Run the command line, see that it refuses without long work and leaves nothing behind; what it says."""

    def run(*words: str) -> str:
        began = time.process_time()
        code = main(words)
        output = capsys.readouterr()
        assert code == 2, output.err
        assert time.process_time() - began < 20  # a bomb that goes off takes minutes
        assert "Traceback" not in output.err + output.out
        assert not list(elsewhere.iterdir())
        return output.err

    return run


SYSTEM = flat_system()
CALL = "{_target_: pathlib.Path.write_text, _args_: [pwned]}"
BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 10)
)
FOREIGN = {
    "a class to call": (SYSTEM + f"more: {CALL}\n", "more._target_"),
    "a callback of Hydra's": (f"# @package _global_\nhydra:\n  callbacks:\n    a: {CALL}\n", "hydra"),
    "a callback by its package": (f"# @package hydra.callbacks.a\n{CALL}\n", "@package hydra.callbacks.a"),
    "another launcher": ("defaults: [override /hydra/launcher: joblib]\n", "defaults.0"),
    "a logger of Hydra's": ("defaults:\n  - override /hydra/job_logging: mine\n", "defaults.0"),
    "a package of Hydra's": ("defaults:\n  - /system@hydra.callbacks.a: mine\n", "@hydra.callbacks.a"),
    "a place to look for more": ("# @package _global_\nhydra.searchpath: [file:///tmp]\n", "hydra.searchpath"),
    "a file outside": ("defaults: [../../../../tmp/evil, _self_]\n", "../../../../tmp/evil"),
    "a file named by a value": ("defaults: ['${oc.env:HOME}']\n", "${oc.env:HOME}"),
    "an alias bomb": (BOMB, "uses a YAML alias"),
    "an alias bomb as its description": (BOMB + "description: *a9\n", "uses a YAML alias"),
    "deep nesting": ("a: " + "[" * 3000 + "]" * 3000, "nested deeper than 50"),
    "a long file": ("# " + "x" * MOST_BYTES + "\n", f"larger than {MOST_BYTES}"),
    "many values": ("a: [" + "1," * (MOST_NODES + 1) + "]\n", f"more than {MOST_NODES} values"),
    "a Python object": (SYSTEM + "more: !!python/object/apply:os.system ['touch pwned']\n", "python/object"),
    "a key that is a list": ("? [a]\n: b\n", "unhashable key"),
    "a date that is none": ("a: !!timestamp zz\n", "is not YAML"),
    "a long number": (SYSTEM + f"more: {'9' * 5000}\n", "a number of 5000 characters"),
    "base 60": (SYSTEM.replace("num_cus: 304", "num_cus: 4:1", 1), "base 60"),
    "base 8": (SYSTEM.replace("num_cus: 304", "num_cus: 0400", 1), "base 8"),
    "on": (SYSTEM.replace("num_cus: 304", "num_cus: on", 1), "true or false"),
}


def own(folder: Path, text: str, name: str = "system/mine.yaml") -> list[str]:
    """A user's folder with one file; the words of a study that is given it."""
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text, encoding="utf-8")
    return [*S, f"--config-dir={folder}"]


@pytest.mark.one_in(4)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "flags"),
    [
        pytest.param(kind, flags, id=f"{kind}-{flags[0].strip('-') if flags else 'run'}")
        for kind in FOREIGN
        for flags in ([], ["--cfg", "job"], ["--multirun"])
        if not (flags and kind in ("base 60", "base 8", "on"))  # left to the study itself: they do no harm to Hydra
    ],
)
def test_a_foreign_configuration_is_refused_before_hydra_reads_it(
    kind: str, flags: list[str], tmp_path: Path, refused: Callable[..., str]
) -> None:
    text, part = FOREIGN[kind]
    message = refused(*own(tmp_path / "conf", text), "system=mine", *flags)
    assert part in message
    assert "mine.yaml" in message


@pytest.mark.more
@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", ["an alias bomb", "an alias bomb as its description", "many values"])
def test_a_bomb_takes_neither_time_nor_memory_even_where_options_are_only_listed(kind: str, tmp_path: Path) -> None:
    words = own(tmp_path / "conf", FOREIGN[kind][0])
    code = (
        "import resource, sys, time, hydra, dse.run_study; from dse.cli import main\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10\n"
        "before, began = peak(), time.process_time()\n"
        f"codes = main({[*words, 'system=mine']!r}), main({[*words, '--help']!r})\n"
        "print(*codes, peak() - before < 200, time.process_time() - began < 20)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.splitlines()[-1:] == ["2 0 True True"], done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "word",
    [
        f"+hydra.callbacks.a={CALL}",
        "hydra/launcher=joblib",
        "hydra/job_logging=mine",
        "hydra.searchpath=[file:///tmp]",
        "+hydra.job_logging.handlers.x._target_=os.system",
        "hydra.run.dir=/tmp",
        "system@hydra.callbacks.a=mi300x_8",
        "+system.x._target_=os.system",
        f"+system.x={CALL}",
        "~hydra",
    ],
)
@pytest.mark.parametrize("flags", [[], ["--multirun"]], ids=["run", "multirun"])
def test_an_override_that_would_have_hydra_call_something_is_refused_by_its_path(
    word: str, flags: list[str], refused: Callable[..., str]
) -> None:
    assert word.lstrip("+~").partition("=")[0].partition("@")[0] in refused(*S, word, *flags)


@pytest.mark.parametrize("flag", ["--config-path=/tmp", "--config-name=x", "--experimental-rerun=x.pickle", "-cn=x"])
def test_flags_that_read_other_configurations_or_pickles_are_refused(flag: str, refused: Callable[..., str]) -> None:
    assert flag.partition("=")[0] in refused(*S, flag)


def test_a_folder_may_hold_links_but_neither_devices_nor_settings_of_hydra(
    tmp_path: Path, refused: Callable[..., str]
) -> None:
    words = own(tmp_path / "conf", SYSTEM)
    (tmp_path / "evil").mkdir()
    (tmp_path / "evil" / "bomb.yaml").write_text(BOMB, encoding="utf-8")
    for name, target, part in [
        ("system/zero.yaml", Path("/dev/zero"), "no plain file"),
        ("system/gone.yaml", tmp_path / "absent", "no plain file"),
        ("linked", tmp_path / "evil", "linked/bomb.yaml"),
    ]:
        (tmp_path / "conf" / name).symlink_to(target)
        assert part in refused(*words, "system=mine")
        (tmp_path / "conf" / name).unlink()
    (tmp_path / "conf" / "loop").symlink_to(tmp_path / "conf")
    own(tmp_path / "conf", "a: 1\n", "hydra/job_logging/mine.yaml")
    assert "job_logging/mine.yaml" in refused(*words, "system=mine")
    shutil.rmtree(tmp_path / "conf" / "hydra")
    for number in range(MOST_FILES):
        (tmp_path / "conf" / f"{number}.yaml").touch()
    assert f"more than {MOST_FILES}" in refused(*words, "system=mine")


def test_an_honest_file_that_speaks_of_hydra_is_read(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("name: mine\ndescription: hydra\nhydraulic: 3\nat: a@hydra\n", encoding="utf-8")
    assert unreadable(path) == []


# Names and texts on their way to MLflow, Markdown and paths

XSS = "<script>alert(1)</script>| [x](javascript:alert(1)) ![y](http://evil/z)"


STUDY = (CONF / "study" / "ficco_sweep.yaml").read_text("utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["../evil", "a/b", "/etc/x", "x" * 81, "<script>", "a\nb", ""])
def test_a_study_whose_name_is_no_plain_one_is_refused(name: str, tmp_path: Path, refused: Callable[..., str]) -> None:
    text = STUDY.replace("name: ficco_sweep", f"name: {json.dumps(name)}", 1)
    assert "study.name" in refused(*own(tmp_path / "conf", text, "study/mine.yaml"), "study=mine")


def test_texts_of_a_configuration_are_shown_as_they_are_and_never_as_markup(tmp_path: Path) -> None:
    table = odd_table()
    table["scenario"] = table["schedule.name"] = table["engine"] = XSS
    folder = finished(tmp_path, table)
    config = (folder / "config.yaml").read_text("utf-8").replace("which is best?", json.dumps(XSS)[1:-1])
    (folder / "config.yaml").write_text(config, encoding="utf-8")
    note = StudyFolder(folder).note()
    assert "<" not in note
    assert "](" not in note
    assert {row.replace(r"\|", "").count("|") for row in note.splitlines()[2:]} == {4}


def test_the_console_prints_markup_of_a_name_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    console().print("[red]x[/red] [link=http://evil]y[/link]")
    assert "[red]x[/red] [link=http://evil]y[/link]" in capsys.readouterr().out


def test_the_user_interface_listens_on_this_machine_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dse.tracking import server

    (tmp_path / "mlflow.db").touch()
    started: list[list[str]] = []

    class Ended(Exception):
        pass

    def popen(command: list[str], **_: Any) -> None:
        started.append(command)
        raise Ended

    monkeypatch.setattr(subprocess, "Popen", popen)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with pytest.raises(Ended):
        server.serve(f"sqlite:///{tmp_path}/mlflow.db", port=port)
    (command,) = started
    assert command[command.index("--host") + 1] == "127.0.0.1"
    assert main(["ui", "host=0.0.0.0"]) == 2


# Secrets


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("store.url=postgresql://me:secret@host/x", "store.url=postgresql://me:***@host/x"),
        ("store.url=postgresql://me:se/cr:et@host/x", "store.url=postgresql://me:***@host/x"),
        (
            "tracking.uri=postgresql://host/x?user=me&password=secret",
            "tracking.uri=postgresql://host/x?user=me&password=***",
        ),
        ("+case.api_key=secret", "+case.api_key=***"),
        ("case.github_token=secret", "case.github_token=***"),
        ("case.tokens=64", "case.tokens=64"),
        ("system.gpu.num_cus=304", "system.gpu.num_cus=304"),
        ("store.url=sqlite:///a:b.db", "store.url=sqlite:///a:b.db"),
    ],
)
def test_what_is_named_a_secret_is_not_written_down(text: str, shown: str) -> None:
    assert redact(text) == shown
    assert hidden(redact(text)) == shown


@pytest.mark.more
def test_no_file_of_a_run_holds_a_password(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    words = [word for word in S if word not in ("tracking=none", "store=none")]
    assert main([*words, "tracking.uri=http://me:hunter22@127.0.0.1:9/"]) == 0
    leaks = [path for path in elsewhere.rglob("*") if path.is_file() and b"hunter22" in path.read_bytes()]
    assert leaks == []


# Code of ours


@pytest.mark.more
def test_nothing_evaluates_text_or_reads_pickles() -> None:
    """Of the shipped packages; worker processes of one study talk to each other through multiprocessing."""
    names = {"eval", "exec", "compile", "__import__"}
    modules = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
    calls = []
    for path, tree in syntax().items():
        for node in ast.walk(tree):
            called = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names
            imported = (
                isinstance(node, (ast.Import, ast.ImportFrom))
                and ({alias.name.partition(".")[0] for alias in node.names} | {str(getattr(node, "module", ""))})
                & modules
            )
            is_flag = isinstance(node, ast.keyword) and node.arg in ("allow_pickle", "shell")
            if called or imported or is_flag:
                calls.append(f"{path.relative_to(REPOSITORY)}:{getattr(node, 'lineno', 0)}")
    assert calls == []


def test_mlflow_is_told_to_read_no_pickles() -> None:
    from dse.tracking.database import ENVIRONMENT

    assert ENVIRONMENT["MLFLOW_ALLOW_PICKLE_DESERIALIZATION"] == "false"


# Provenance


@pytest.mark.more
def test_a_run_tells_what_it_was_made_with(capsys: pytest.CaptureFixture[str], elsewhere: Path, tmp_path: Path) -> None:
    words = own(tmp_path / "conf", SYSTEM)
    assert main([*words, "system=mine"]) == 0
    output = capsys.readouterr().out
    provenance_of_run = json.loads((elsewhere / "outputs/ficco_sweep/latest/provenance.json").read_text("utf-8"))
    assert provenance_of_run["command"] == [
        "python",
        "-m",
        "dse",
        f"--config-dir={tmp_path / 'conf'}",
        *S,
        "system=mine",
    ]
    with (REPOSITORY / "pyproject.toml").open("rb") as file:
        needed = {re.match(r"[\w-]+", text)[0] for text in tomllib.load(file)["project"]["dependencies"]}  # type: ignore[index]
    assert {*needed, "dse", "SQLite"} <= set(provenance_of_run["versions"])
    assert provenance_of_run["machine"]["memory_bytes"] > 1 << 28
    assert {"cpu", "cores", "usable_cores", "system"} <= set(provenance_of_run["machine"])
    assert {"git", "python", "seed", "backend", "time"} <= set(provenance_of_run)
    assert f"made with git {provenance_of_run['git']['commit'][:12]}" in output
    assert main(["results", "report", "study=ficco_sweep"]) == 0
    assert "made with" in capsys.readouterr().out
    assert main(provenance_of_run["command"][3:]) == 0
    assert main(["results", "timeline", "study=ficco_sweep", f"key={_first_key(elsewhere)}"]) == 0


def _first_key(folder: Path) -> str:
    import dse

    return str(dse.load("ficco_sweep", folder / "outputs")["key"].iloc[0])


@pytest.mark.nightly
def test_results_of_another_commit_are_told(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = [word for word in S if word != "store=none"]
    mixed = []
    for commit in ("a" * 40, "b" * 40, "b" * 40):
        monkeypatch.setattr(provenance, "_git", lambda root, commit=commit: {"commit": commit, "dirty": False})
        assert main(words) == 0
        provenance_of_run = json.loads((elsewhere / "outputs/ficco_sweep/latest/provenance.json").read_text("utf-8"))
        mixed.append([change["changed"] for change in provenance_of_run["mixed"]])
    assert mixed == [[], [[f"git {'a' * 12} -> {'b' * 12}"]], [[f"git {'a' * 12} -> {'b' * 12}"]]]
    assert f"git {'a' * 12} -> {'b' * 12}" in provenance.describe(provenance_of_run)


def test_uncommitted_changes_and_new_files_of_the_code_count_and_another_checkout_around_it_does_not(
    tmp_path: Path,
) -> None:
    def git(*words: str) -> None:
        who = ("-c", "user.name=x", "-c", "user.email=x@example.org")
        subprocess.run(["git", "-C", str(tmp_path), *who, *words], check=True, capture_output=True)

    (tmp_path / "dse" / "results").mkdir(parents=True)
    (tmp_path / "dse" / "results" / "provenance.py").write_text("1\n")
    git("init")
    assert provenance._git(tmp_path)["commit"] is None
    git("add", ".")
    git("commit", "-m", "x")
    clean = provenance._git(tmp_path)
    assert clean["dirty"] is False
    assert len(clean["commit"]) == 40
    (tmp_path / "notes.txt").write_text("1\n")
    assert provenance._git(tmp_path) == clean
    seen = set()
    for name in ("dse/engine.py", "dse/results/provenance.py"):
        (tmp_path / name).write_text("2\n")
        changed = provenance._git(tmp_path)
        assert changed["dirty"] is True
        seen.add(changed["diff"])
    assert len(seen) == 2
