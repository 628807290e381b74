"""Doors that all texts pass: what a stranger's file says is data, and what is printed or recorded holds no secret."""

from __future__ import annotations

import ast
import contextlib
import io
import itertools
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dse.cli import main
from dse.config.compose import request
from dse.errors import ConfigError, Problem
from dse.errors.parsing import natural_key, parse_json, parse_yaml, whole_number
from dse.errors.terminal import Terminal
from dse.errors.texts import CLOSED_PIPE, ambiguous, hidden, printable, redact, secrets_known
from dse.tracking.doctor import check_port
from tests.support import REPOSITORY, drawn, syntax

QUIET = ["study=ficco_sweep", "tracking=none", "fidelity=none", "figures=none"]
SMALL = [*QUIET, "timeline=false", "schedule=serial", "workload.only=[g4]"]


pytestmark = pytest.mark.usefixtures("elsewhere")


def said(words: list[str]) -> tuple[int, str]:
    """The exit code of a command, and all that it prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        code = main(words)
    return code, out.getvalue()


# Secrets

SIGNS = st.text(st.sampled_from("abcXYZ019 @:/?#%&=+'\"\\$!*{}[](),;~^|<>-_.é"), min_size=6, max_size=16)
PASSWORDS = SIGNS.filter(
    lambda text: len(re.sub(r"\W", "", text)) >= 6 and text == text.strip() and '"' not in text[:1]
)
PLACES = (
    "store.url=postgresql://me:{}@127.0.0.1:9/x",
    "store.url=postgresql+psycopg://me:{}@127.0.0.1:9/x",
    "store.url=postgres://me:{}@127.0.0.1:9/x",
    "store.url=mysql://me:{}@127.0.0.1:9/x",
    "store=postgresql://me:{}@127.0.0.1:9/x",
    "store.ulr=postgresql://me:{}@127.0.0.1:9/x",
    "tracking.uri=http://me:{}@127.0.0.1:9/",
    "tracking.optuna=mysql://me:{}@127.0.0.1:9/x",
    "+case.api_key={}",
    "stroe.password={}",
)


@pytest.mark.more
@settings(max_examples=300, deadline=None)
@given(PASSWORDS, st.sampled_from(PLACES))
def test_a_word_that_is_written_down_has_lost_its_password(password: str, place: str) -> None:
    word = place.format(password)
    with secrets_known([word]):
        for text in (redact(word), str(Problem(word, "is wrong", word)), hidden(f"no {password}, at all")):
            assert password not in text
        assert password not in str(Problem("store.url", "is wrong", {"url": word.partition("=")[2]}))
        assert password not in printable(f"(psycopg.OperationalError) connection to {word!r} failed: {password!r}")


PLAIN_PASSWORDS = st.from_regex(r"[A-Za-z][A-Za-z0-9]{2,11}[0-9]{2}", fullmatch=True)
NOTES_WITH_PASSWORDS = (
    "the password is {}, as before",
    "Password: {}",
    "the passphrase was '{}'",
    "pwd: {}",
    "my pwd is {}",
    "password set to {}.",
    "the password was changed to {}; tell nobody",
    "an API key is {} here",
    "secret -> {}",
    "run with --password {} --quiet",
    "see ftp://me:{}@host/x for more",
    "from me:{}@db.example.org/x on",
    'a note ("password": "{}") of a colleague',
)


@given(
    password=PLAIN_PASSWORDS,
    place=st.sampled_from(NOTES_WITH_PASSWORDS),
    around=st.sampled_from(["{}", "note: {}", "first line\n{}\nlast"]),
)
def test_a_password_in_a_sentence_is_hidden_wherever_text_is_recorded_or_printed(
    password: str, place: str, around: str
) -> None:
    text = around.format(place.format(password))
    shown = (hidden(text), printable(text), redact(text), redact({"note": [text]}), Problem("note", text, text))
    assert not [form for form in map(str, shown) if password in form]
    with secrets_known([text]):
        assert password not in hidden(f"cannot log in: {password} is refused")


@pytest.mark.parametrize(
    "text",
    [
        "the password is wrong",
        "password is required, and was not given",
        "the secret of speed is locality",
        "a token is generated in 3 ms",
        "an image vllm/vllm:0.14@sha256:0123.abc",
        "std::sort@GLIBCXX_3.4",
        "mail to mailto:me@example.org",
        "time per output token: 3 ms",
    ],
)
def test_a_sentence_about_passwords_keeps_its_words(text: str) -> None:
    assert hidden(text) == text


@pytest.mark.slow
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(PASSWORDS, st.sampled_from(PLACES), st.sampled_from([[], ["--cfg", "job"], ["seed=0,1", "--multirun"]]))
def test_no_command_prints_or_leaves_a_password(elsewhere: Path, password: str, place: str, flags: list[str]) -> None:
    code, text = said([*SMALL, "store.patience_s=1s", place.format(password), *flags])
    assert "Traceback" not in text
    assert code in (0, 2, 4)
    assert password not in text
    assert not [path for path in elsewhere.rglob("*") if path.is_file() and password.encode() in path.read_bytes()]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("at postgresql://me:a/b:c?d@host/x, again", "at postgresql://me:***@host/x, again"),
        ("https://host/x?user=me&password=secret&a=b", "https://host/x?user=me&password=***&a=b"),
        ("https://0123456789abcdef0123@host/x", "https://***@host/x"),
        ("postgresql://me@host/x and tcp://127.0.0.1:8786", "postgresql://me@host/x and tcp://127.0.0.1:8786"),
        ("PGPASSWORD=hunter2 psql", "PGPASSWORD=*** psql"),
        ("{'password': 'two words', 'user': 'me'}", "{'password': '***', 'user': 'me'}"),
        ("tokens=64 token: 3 ms, 8192 tokens", "tokens=64 token: 3 ms, 8192 tokens"),
        ("sqlite:///a:b.db", "sqlite:///a:b.db"),
        ("void foo::bar<int>(float)", "void foo::bar<int>(float)"),
    ],
)
def test_a_secret_is_known_by_its_place_and_nothing_else_is_hidden(text: str, shown: str) -> None:
    assert hidden(text) == shown


def test_a_password_of_the_environment_is_hidden_where_a_library_repeats_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGPASSWORD", "correct horse")
    with secrets_known([]):
        assert hidden("invalid dsn: correct horse") == "invalid dsn: ***"
    assert hidden("correct horse") == "correct horse"  # and forgotten with the command


def test_the_folder_of_the_shell_is_no_password(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PWD", "OLDPWD"):
        monkeypatch.setenv(name, "/home/me/studies")
    with secrets_known([]):
        assert hidden("written to /home/me/studies/outputs") == "written to /home/me/studies/outputs"


# Terminals


@given(st.text(st.characters(categories=["Cc", "Cf", "Cs", "Lu", "Zs", "Po"]), max_size=40))
def test_nothing_that_is_printed_steers_a_terminal(text: str) -> None:
    shown = printable(text)
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]", shown)
    out = io.StringIO()
    Terminal(file=out, width=200).print(text, {"a": text})
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", out.getvalue())


def test_escapes_and_markup_of_a_store_are_text(elsewhere: Path) -> None:
    from sqlalchemy import insert

    from dse.store import result_store

    store = result_store.Store(f"sqlite:///{elsewhere}/outputs/results.db")
    columns = {column.name for column in result_store.studies.columns if not column.nullable} - {"id"}
    row: dict[str, Any] = dict.fromkeys(columns, "{}")
    kinds = {column.name: column.type.python_type for column in result_store.studies.columns if column.name in columns}
    row |= {name: 0 for name, kind in kinds.items() if kind in (int, float)}
    row |= {"name": "[/nope]\x1b[2J[red]", "state": "done"}
    store.database.write(lambda connection: connection.execute(insert(result_store.studies).values(row)))
    store.database.close()
    code, text = said(["store", "status"])
    assert code == 0, text
    assert r"[/nope]\x1b[2J[red]" in text
    assert "\x1b" not in text


@pytest.mark.more
def test_consoles_come_from_one_door() -> None:
    makers = set()
    for path, tree in syntax().items():
        for node in ast.walk(tree):
            used = [node.func] if isinstance(node, ast.Call) else node.bases if isinstance(node, ast.ClassDef) else []
            if any(isinstance(name, ast.Name) and name.id in ("Console", "Terminal") for name in used):
                makers.add(str(path.relative_to(REPOSITORY)))
    assert makers == {"dse/errors/terminal.py", "dse/results/run_folder.py"}


# numbers and addresses


@pytest.mark.parametrize(
    ("word", "rule"),
    [
        ("store.url=postgresql://a@localhost:abc/x", "has a port that is no number"),
        ("store.url=postgresql://a:b@localhost:99999/x", "has a port that is no number"),
        ("tracking.uri=http://localhost:65536", "has a port that is no number"),
        ("tracking.optuna=postgresql://localhost:5x/x", "has a port that is no number"),
        ("system.gpu.dma.bytes_per_s=1e-400 kB/s", "is beyond the numbers"),
        ("system.gpu.dma.bytes_per_s=1e400 kB/s", "is beyond the numbers"),
        (f"system.gpu.dma.bytes_per_s=1e{'9' * 30} kB/s", "is beyond the numbers"),
    ],
)
def test_addresses_and_numbers_that_no_computer_has_are_refused(word: str, rule: str) -> None:
    code, text = said(["run", "ficco_sweep", word])
    assert (code, rule in text) == (2, True), text


@pytest.mark.parametrize("port", ["99999", "65536", "port", "²", "9" * 400])
@pytest.mark.parametrize("words", ["store status store", "store check url", "store rebase store"])
def test_a_store_at_a_port_that_no_computer_has_is_refused(words: str, port: str) -> None:
    code, text = said(f"{words}=postgresql://me:hunter22@localhost:{port}/x".split(" "))
    assert (code, "has a port that is no number up to 65535" in text) == (2, True), text
    assert "hunter22" not in text


@pytest.mark.parametrize(
    "url",
    ["postgresql://me:pa/ss@h:5432/x", "postgresql://u@[::1]/x", "databricks://a:b", "sqlite:///a:b.db", "http://h"],
)
def test_addresses_of_other_kinds_are_taken(url: str) -> None:
    assert ambiguous(url) == ""


@given(text=st.one_of(st.text(), st.integers().map(str), st.sampled_from(["9" * 5000, "²", "٣", " 1", "1_0"])))
def test_a_whole_number_is_one_that_python_reads_soon(text: str) -> None:
    number = whole_number(text)
    assert number is None or (str(number) == (text.lstrip("0") or "0") and number < 10**18)


@given(names=st.lists(st.text(st.sampled_from("g1²٣9 a"), max_size=30) | st.just("9" * 5000), max_size=6))
def test_names_with_any_signs_for_numbers_have_an_order(names: list[str]) -> None:
    ordered = sorted(names, key=natural_key)
    assert all(natural_key(first) <= natural_key(second) for first, second in itertools.pairwise(ordered))
    assert sorted(["g10", "g9", "g2"], key=natural_key) == ["g2", "g9", "g10"]


@pytest.mark.parametrize("port", ["²", "99999", "9" * 5000, "no"])
def test_a_port_that_no_computer_has_is_told_and_not_opened(port: str) -> None:
    (check,) = check_port({"port": port})
    assert check.level == "warn" and "no number below 65536" in check.text


# YAML and JSON

HOSTILE = (
    *(
        "[" * 5000,
        "]" * 5000,
        "{" * 5000,
        "a: [",
        "{a: b: c}",
        "- " * 3000,
        "? " * 3000,
        "9" * 5000,
        "a: " + "9" * 5000,
    ),
    *('{"a": ' * 3000, '"\\ud800"', '{"\\udc00": 1}', '{"a": "\\u0000"}', "a\0b", "\ufeff\ufeff", "\x1b[31m", "NaN"),
    *("1e999", "-Infinity", "!!python/object/apply:os.system [a]", "!!timestamp zz", "&a [*a]", "a: &a 1\nb: *a"),
    *(
        "? [a]\n: b",
        "? {a: b}\n: c",
        "<<: 1",
        "%YAML 9\n---\n",
        "\t- a",
        "@",
        "`",
        "!!set {a}",
        "!!binary x",
        "1:1:1:1",
    ),
    *("\ud800", "1_0", "0b2", "0o9", "2020-99-99", "a: |9\n b", "...\n...", "--- a\n--- b", "{,}", "[,]", "'", '"\\x'),
)
WILD = st.one_of(
    st.sampled_from(HOSTILE),
    st.text(st.sampled_from("[]{}:,-?!&*|>'\"%@`#\\ \n\tab01.e\0\ud800~<="), max_size=40),
    st.builds(lambda sign, count: sign * count, st.sampled_from("[{(-?:&*!|9 "), st.integers(1, 6000)),
)


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(WILD)
def test_whatever_a_text_holds_it_is_data_or_a_refusal(text: str) -> None:
    for parse in (parse_yaml, parse_json):
        began = time.process_time()
        with contextlib.suppress(ConfigError):
            tree = parse(text, "file")
            json.dumps(tree, default=str, ensure_ascii=False).encode("utf-8")  # can be written down
        assert time.process_time() - began < 20  # one that goes off takes minutes


READERS = {"load", "loads", "safe_load", "full_load", "unsafe_load", "load_all", "safe_load_all"}
OTHER_DOORS = {
    "dse/errors/parsing.py",  # the door
    "plugins/torch_gpu/dse_judge/__main__.py",  # torch alone: its own tables
    "plugins/torch_gpu/dse_judge/grids.py",  # likewise: a profile that torch wrote just before
    "plugins/peers/dse_peers/simgrid/simulation.py",  # a script of another Python, which reads what we write
    "plugins/serving/dse_serving/ask_aiconfigurator.py",  # likewise
    "simulators/external/supervisor.py",  # likewise: a process of its own that imports nothing of ours
}


@pytest.mark.more
def test_yaml_and_json_are_read_through_one_door() -> None:
    wrong = set()
    for path, tree in syntax().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in READERS:
                module = node.func.value
                if isinstance(module, ast.Name) and module.id in ("yaml", "json"):
                    wrong.add(str(path.relative_to(REPOSITORY)))
    assert wrong == OTHER_DOORS


# Words

SIGNS_OF_WORDS = "|+|++|~|=|x|study|store.url|+space.|space.a|@|.|..|{|[|(|'|null|range(1,3)|choice()|${|${a}|:|,|é|!|&"
PARTS = st.sampled_from([*SIGNS_OF_WORDS.split("|"), "executor.settings", "9" * 500, "a b", "\\", "\x1b"])


@pytest.mark.more
@drawn(120)
@given(st.lists(PARTS, max_size=5))
def test_words_of_any_kind_are_read_or_refused(parts: list[str]) -> None:
    word = "".join(parts)
    with contextlib.suppress(ConfigError):
        request(["study=comp_vs_comm", word])


@pytest.mark.parametrize("word", ["+=x", "=x", "~", "++=", "+.=1", "study.baseline=010"])
def test_a_word_without_a_path_is_refused_with_the_way_out(word: str) -> None:
    code, text = said([*SMALL, "store=none", word])
    assert code == 2
    assert "Traceback" not in text


# Ends


def command(*words: str, **settings: Any) -> subprocess.Popen[bytes]:
    """A command as a process of its own, in the current folder."""
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.Popen([sys.executable, "-m", "dse", *words], env=environment, start_new_session=True, **settings)


@pytest.mark.slow
@pytest.mark.one_in(2)
@pytest.mark.parametrize("words", [["--help"], ["machine", "list"]], ids=["print", "console"])
def test_a_reader_that_goes_away_ends_the_command_quietly(words: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with command(*words, stdout=writer, stderr=subprocess.PIPE) as run:
        os.close(writer)
        _, errors = run.communicate(timeout=120)
    assert errors == b""
    assert run.returncode == CLOSED_PIPE


@pytest.mark.more
def test_the_end_of_the_terminal_is_a_stop_that_keeps_what_was_evaluated() -> None:
    words = [*QUIET, "budget.trials=1000000", "+space.system.gpu.num_cus=range(64,304,1)", "executor.jobs=1"]
    with command(*words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as run:
        assert run.stderr is not None
        _wait_for(Path("outputs/results.db"))
        time.sleep(1.0)
        os.kill(run.pid, signal.SIGHUP)
        _, errors = run.communicate(timeout=120)
    assert b"Traceback" not in errors
    assert b"interrupted" in errors
    assert run.returncode == 128 + signal.SIGHUP


def _wait_for(path: Path) -> None:
    until = time.monotonic() + 120
    while not path.exists() and time.monotonic() < until:
        time.sleep(0.05)


# Large spaces


@pytest.mark.more
@pytest.mark.one_in(3)
@pytest.mark.parametrize("study", ["plan", "comp_vs_comm"])
def test_a_study_of_a_million_values_begins_soon(study: str) -> None:
    words = [f"study={study}", "tracking=none", "figures=none", "timeline=false", "budget.trials=4"]
    with command(*words, "+space.run.batch=range(1,1000000)", stdout=subprocess.DEVNULL) as run:
        _wait_for(Path("outputs/results.db"))
        while run.poll() is None and not _has_begun(Path("outputs/results.db")):
            time.sleep(0.05)
        assert run.poll() is None
        ticks = Path(f"/proc/{run.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        run.kill()
    assert sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK") < 10  # of its CPU time, whatever else this machine does


def _has_begun(database: Path) -> bool:
    """True once a point of a store is in hand, or has a result."""
    with contextlib.suppress(sqlite3.OperationalError), sqlite3.connect(f"file:{database}?mode=ro", uri=True) as store:
        return any(store.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in ("leases", "results"))
    return False


# SECURITY.md

SENTENCES = {
    "Code in configuration": (
        "test_a_foreign_configuration_is_refused_before_hydra_reads_it",
        "test_an_override_that_would_have_hydra_call_something_is_refused_by_its_path",
        "test_flags_that_read_other_configurations_or_pickles_are_refused",
    ),
    "Bombs": ("test_a_bomb_takes_neither_time_nor_memory_even_where_options_are_only_listed",),
    "Input files": ("test_a_folder_may_hold_links_but_neither_devices_nor_settings_of_hydra",),
    "Pickles and `eval`": (
        "test_nothing_evaluates_text_or_reads_pickles",
        "test_mlflow_is_told_to_read_no_pickles",
    ),
    "Programs": (
        "test_a_program_sees_an_empty_folder_few_variables_and_its_limits",
        "test_cpu_time_and_file_size_are_limited",
    ),
    "Output folders": (
        "test_a_damaged_file_ends_every_command_in_a_sentence",
        "test_nothing_is_written_through_a_link_of_a_folder",
        "test_a_place_that_only_a_folder_names_is_not_written_to",
        "test_a_recorded_program_is_started_only_where_it_is_named_and_tells_no_times",
        "test_whatever_a_text_holds_it_is_data_or_a_refusal",
    ),
    "A store": ("test_a_damaged_store_ends_in_a_sentence",),
    "Results": ("test_any_answer_becomes_numbers_in_their_ranges_or_a_reason",),
    "Names": (
        "test_a_study_whose_name_is_no_plain_one_is_refused",
        "test_texts_of_a_configuration_are_shown_as_they_are_and_never_as_markup",
        "test_whatever_a_name_is_it_makes_no_element_of_a_page",
        "test_only_named_scripts_may_run_and_nothing_may_be_asked_for",
    ),
    "A cluster": (
        "test_another_user_of_this_machine_is_let_into_no_port_of_a_cluster",
        "test_without_the_certificate_nobody_speaks_to_the_scheduler",
        "test_what_cannot_work_is_told_with_the_way_out",
    ),
    "What goes to a library unread": (
        "test_a_file_gives_the_executor_data_and_nothing_that_runs",
        "test_a_recorded_command_gives_the_executor_no_settings_that_run",
    ),
    "The UI": ("test_the_user_interface_listens_on_this_machine_only",),
    "Secrets": (
        "test_no_command_prints_or_leaves_a_password",
        "test_no_file_of_a_run_holds_a_password",
        "test_a_password_of_the_environment_is_hidden_where_a_library_repeats_it",
    ),
    "Imports": (
        "test_workers_import_nothing_of_the_folder",
        "test_every_python_process_is_started_without_the_current_folder",
    ),
    "Assistants": (
        "test_settings_that_do_more_than_set_a_value_are_refused",
        "test_files_are_those_of_the_folder_alone",
        "test_a_request_without_the_token_is_turned_away",
    ),
    "Generated files": (
        "test_texts_in_emitted_files_are_comments_of_one_line",
        "test_the_name_of_a_plan_is_a_comment_of_its_files",
    ),
    "Terminals": (
        "test_nothing_that_is_printed_steers_a_terminal",
        "test_escapes_and_markup_of_a_store_are_text",
    ),
}
"""What SECURITY.md says is refused -> the tests that hold it."""


@pytest.mark.more
def test_each_sentence_on_security_has_a_test() -> None:
    text = (REPOSITORY / "SECURITY.md").read_text("utf-8").partition("## What is refused")[2].partition("## What to")[0]
    assert {name.rstrip(".") for name in re.findall(r"^- \*\*(.+?)\*\*", text, re.MULTILINE)} == set(SENTENCES)
    tests = {
        node.name
        for folder in ("tests", "plugins/*/tests")
        for path in REPOSITORY.glob(f"{folder}/test_*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.FunctionDef)
    }
    assert {name for names in SENTENCES.values() for name in names} <= tests
