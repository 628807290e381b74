"""Import rules: those of `pyproject.toml` hold for every folder in `plugins`, a new one included."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from importlinter.application.user_options import UserOptions

from benchmarks.import_rules import fill_options, plugin_packages

REPOSITORY = Path(__file__).parents[1]
LINKED = (
    "dse",
    "simulators",
    "search_spaces",
    "studies",
    "benchmarks",
    "pyproject.toml",
    "Makefile",
    "constraints.txt",
)
HONEST = "from dse.errors import ConfigError\nfrom dse_memory import engine\nfrom studies.common import facts\n"
CURIOUS = "import hydra\nfrom dse_traces import laws\n"


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A folder with the core and all plug-ins, to which plug-ins can be added."""
    (tmp_path / "plugins").mkdir()
    for name in LINKED:
        (tmp_path / name).symlink_to(REPOSITORY / name)
    for folder in (REPOSITORY / "plugins").iterdir():
        if (folder / "pyproject.toml").is_file():
            (tmp_path / "plugins" / folder.name).symlink_to(folder)
    return tmp_path


def add_plugin(clone: Path, name: str, text: str) -> Path:
    """Write a plug-in of one module."""
    folder = clone / "plugins" / name
    (folder / f"dse_{name}").mkdir(parents=True)
    (folder / "pyproject.toml").write_text(f"[project]\nname = 'overlap-dse-{name}'\nversion = '0.4.0'\n")
    (folder / f"dse_{name}" / "__init__.py").write_text(text)
    return folder


def check(clone: Path) -> tuple[int, str]:
    """Exit code and output of the rules of a folder."""
    words = [sys.executable, "-m", "benchmarks.import_rules"]
    done = subprocess.run(words, cwd=clone, capture_output=True, text=True, check=False)
    return done.returncode, " ".join(done.stdout.split())


@pytest.mark.slow
def test_a_new_plug_in_is_under_all_rules_without_an_edit_elsewhere(clone: Path) -> None:
    add_plugin(clone, "honest", HONEST)
    curious = add_plugin(clone, "curious", CURIOUS)
    code, report = check(clone)
    assert code == 1
    assert "plug-ins share chakra, memory and calibration alone BROKEN" in report
    assert "hydra only in dse.cli, and compose, composition and expansion of dse.config BROKEN" in report
    assert "dse_curious -> dse_traces" in report
    assert "dse_curious -> hydra" in report
    assert "dse_honest ->" not in report
    assert "10 kept, 2 broken" in report
    shutil.rmtree(curious)
    code, report = check(clone)
    assert code == 0
    assert "12 kept, 0 broken" in report


def test_the_types_of_a_new_plug_in_are_found_without_an_edit_elsewhere(clone: Path) -> None:
    add_plugin(clone, "honest", HONEST)
    done = subprocess.run(["make", "-n", "check"], cwd=clone, capture_output=True, text=True, check=True)
    (line,) = (line for line in done.stdout.splitlines() if "/mypy" in line)
    path = line.partition("MYPYPATH=")[2].split()[0].split(":")
    assert path == sorted(f"plugins/{folder.name}" for folder in (clone / "plugins").iterdir())


def test_no_rule_names_a_plug_in_but_those_that_others_import_and_exceptions() -> None:
    text = (REPOSITORY / "pyproject.toml").read_text("utf-8")
    options = tomllib.loads(text)["tool"]["importlinter"]
    shared = {"dse_chakra", "dse_memory", "dse_calibration"}
    packages = plugin_packages(REPOSITORY)
    assert len(packages) >= 20
    for contract in options["contracts"]:
        named = " ".join((*contract.get("layers", ()), *contract.get("source_modules", ())))
        assert {name for name in packages if name in re.split(r"[ |()]+", named)} <= shared
    filled = fill_options(UserOptions(options, options["contracts"]), packages)
    assert set(packages) <= set(filled.session_options["root_packages"])
    (layers,) = (contract["layers"] for contract in filled.contracts_options if contract["id"] == "plugins")
    assert sorted(packages) == sorted(name.strip("()") for layer in layers[:3] for name in layer.split(" | "))


@pytest.mark.slow
def test_the_rules_of_the_core_hold_for_the_linter_alone() -> None:
    program = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run(
        [program, "--no-logo", "--no-cache"], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
