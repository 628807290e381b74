"""Completion: what follows at the end of a command line, and that the scripts of the shells hand it over."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dse import plugins
from dse.cli import main
from dse.config.options import conf_dirs
from dse.errors import assignment
from dse.shell.completion import candidates
from tests.support import REPOSITORY, shipped

SHELLS = ("bash", "zsh", "fish")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with the files of two finished runs of a study."""
    monkeypatch.chdir(tmp_path)
    for name in ("2026-01-01_00-00-00", "latest"):
        folder = Path("outputs", "ficco_sweep", name)
        folder.mkdir(parents=True)
        (folder / "results.parquet").touch()


@pytest.mark.parametrize("program", ["dse", "/usr/bin/dse", "python -m dse", ".venv/bin/python3.12 -m dse"])
@pytest.mark.parametrize(
    ("line", "matches"),
    [
        ("comp", ["completion "]),
        ("results repo", ["report "]),
        ("run ficco_s", ["ficco_sweep "]),
        ("study=ficco_s", ["study=ficco_sweep "]),
        ("study=nowhere", []),
        ("study=ficco_sweep simulator=ev", ["simulator=event "]),
        ("study=ficco_sweep system.gpu.num_c", ["system.gpu.num_cus="]),
        ("study=ficco_sweep system.gpu.dma.ph", ["system.gpu.dma.phases."]),
        ("study=ficco_sweep +space.system.gpu.num_c", ["+space.system.gpu.num_cus="]),
        ("study=ficco_sweep ~space.schedule.pri", ["~space.schedule.priority="]),
        ("study=ficco_sweep system.node.topology=m", ["system.node.topology=mesh "]),
        ("study=ficco_sweep timeline=", ["timeline=false ", "timeline=true "]),
        ("study=ficco_sweep system=p100 system.gpu.dr", ["system.gpu.dram."]),
        ("study=comp_vs_comm run.prec", ["run.precision="]),
        ("study=ficco_sweep --config", ["--config-dir="]),
        ("results report study=", ["study=ficco_sweep "]),
        ("results compare ficco", ["ficco_sweep ", "ficco_sweep/2026-01-01_00-00-00 "]),
        ("results timeline ke", ["key="]),
        ("machine show h100_96", ["h100_96gb_8 "]),
        ("completion z", ["zsh "]),
        ("study=ficco_sweep workload.shapes='my ", []),
    ],
)
def test_what_may_follow_is_listed(program: str, line: str, matches: list[str]) -> None:
    assert candidates(f"{program} {line}") == matches


def test_every_option_of_every_group_is_a_candidate() -> None:
    for group in ("study", "system", "search", "workload", "gpu"):
        names = sorted(path.stem for folder in conf_dirs() for path in (folder / group).glob("*.yaml"))
        assert [word.strip().partition("=")[2] for word in candidates(f"dse {group}=")] == sorted(names)


def test_options_of_ones_own_folder_are_candidates() -> None:
    Path("my_conf/system").mkdir(parents=True)
    Path("my_conf/system/mine.yaml").write_text("name: mine\ngpu: {odd_cus: 3}\n")
    line = "dse --config-dir=my_conf study=ficco_sweep system"
    assert candidates(f"{line}=mi_none") == []
    assert candidates(f"{line}=min") == ["system=mine "]
    assert candidates(f"{line}=mine system.gpu.odd") == ["system.gpu.odd_cus="]


@pytest.mark.parametrize("text", ["", "dse", "python", "dse 'unclosed", "dse =", "dse ..=", "dse study", "dse \x00"])
def test_odd_lines_are_no_reason_to_fail(text: str) -> None:
    assert isinstance(candidates(text), list)


@pytest.mark.parametrize("shell", ["tcsh", "", "bash zsh"])
def test_a_shell_that_is_not_known_is_refused_with_the_way_out(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", *shell.split()]) == 2
    assert "bash" in capsys.readouterr().err


def script(shell: str) -> str:
    command = [sys.executable, "-m", "dse", "completion", shell]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=REPOSITORY).stdout


@pytest.mark.slow
@pytest.mark.parametrize("shell", SHELLS)
def test_a_script_is_legal_in_its_shell(shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed: apt-get install {shell}")
    subprocess.run([shell, "-n"], input=script(shell), text=True, check=True, capture_output=True)


def complete_in_bash(line: str, function: str = "_dse_complete") -> list[str]:
    """What bash is offered at the end of a line, its words split as bash does it: at spaces, `=` and `:`."""
    ask = f"""
{script("bash")}
COMP_LINE={line!r}; COMP_POINT=${{#COMP_LINE}}; COMP_WORDS=(); spaced="${{COMP_LINE//=/ = }}"
read -ra COMP_WORDS <<< "$spaced"; [[ $COMP_LINE == *" " ]] && COMP_WORDS+=("")
COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
{function}
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(REPOSITORY),
    }
    done = subprocess.run(["bash", "-c", ask], capture_output=True, text=True, check=True, env=environment)
    return [text for text in done.stdout.split("\n") if text]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed: apt-get install bash")
@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("python -m dse results comp", ["compare "]),
        ("python -m dse study=ficco_s", ["ficco_sweep "]),
        ("python -m dse study=ficco_sweep timeline=", ["false ", "true "]),
        ("python -m dse study=ficco_sweep system.gpu.num_c", ["system.gpu.num_cus="]),
        ("python -m pip install x", []),
    ],
)
def test_bash_completes_the_word_at_the_cursor(line: str, offered: list[str]) -> None:
    assert complete_in_bash(line) == offered


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["results", "report", "--help"],
        ["systems"],
        ["completion", "line", "dse study=ficco_sweep system.gpu.nu"],
    ],
)
def test_help_and_completion_import_nothing_heavy(words: list[str]) -> None:
    heavy = ("mlflow", "matplotlib", "pandas", "seaborn", "optuna", "hydra", "simpy", "joblib", "scipy", "numba")
    imported = f"sorted(set(sys.modules) & set({heavy!r}))"
    ask = f"import sys; from dse.cli import main; main({words!r}); print('imported:', {imported})"
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True, cwd=REPOSITORY)
    assert done.stdout.splitlines()[-1] == "imported: []"


@pytest.mark.parametrize(
    "command",
    ["results report", "results compare", "results robustness", "doctor", "completion", "store status", "machine list"],
)
def test_every_command_has_help_of_its_own_with_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command.split(), "--help"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: python -m dse {command}")
    assert f"Examples\n  python -m dse {command}" in text
    assert "Studies (study=)" not in text


def test_the_plural_of_a_group_lists_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    for words, shown, absent in (
        (["searches"], "nsga2", "more:"),
        (["studies"], "ficco_sweep", "ficco_unseen"),
        (["studies", "--all"], "ficco_unseen", "more:"),
        (["systems"], "h100_8", "p100"),
        (["run"], "ficco_sweep", "nsga2"),
        (["options"], "schedules", "nsga2"),
    ):
        assert main(words) == 0
        text = capsys.readouterr().out
        assert shown in text
        assert absent not in text


def test_a_verb_alone_lists_its_commands_and_a_wrong_one_gets_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["results"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in plugins.names("command") if name.startswith("results "))
    for words, way in (
        (["results", "compaer"], "`python -m dse results compare`"),
        (["compare"], "`python -m dse results compare`"),
        (["reslts"], "`python -m dse results`"),
        (["studis"], "`python -m dse studies`"),
    ):
        assert main(words) == 2
        assert f"did you mean {way}?" in capsys.readouterr().err


def test_help_of_plan_has_every_key_of_its_step_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--help"]) == 0
    text = capsys.readouterr().out
    tree = shipped("study")["plan"]
    for section in ("run", "parallel", "layouts"):
        assert all(assignment(f"{section}.{name}", value) in text for name, value in tree[section].items())
