"""README's commands need Python and make alone: what tests import is installed by set-up, and no skip is forgotten."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

import dse
from benchmarks import install
from tests import passes
from tests.support import REPOSITORY

FOLDERS = ("tests", "plugins/*/tests", "validation/tests")
ROOTS = [REPOSITORY, *sorted(REPOSITORY.glob("plugins/*/"))]


def modules_of_tests() -> list[Path]:
    """Every module of a test, and those beside them."""
    paths = [path for folder in FOLDERS for path in sorted(REPOSITORY.glob(f"{folder}/**/*.py"))]
    return [path for path in paths if "field" not in path.relative_to(REPOSITORY).parts]


@cache
def imported(path: Path) -> tuple[str, ...]:
    """Modules that are imported as soon as a module is: neither in functions, nor for types alone."""
    return tuple(_imports(ast.parse(path.read_text("utf-8")).body))


def _imports(body: Sequence[ast.stmt]) -> Iterator[str]:
    stack = list(body)
    while stack:
        node = stack.pop()
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{name.name}" for name in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            stack += node.orelse
        elif isinstance(node, ast.Try):
            stack += [*node.body, *node.orelse, *node.finalbody]
        elif isinstance(node, (ast.If, ast.With, ast.ClassDef)):
            stack += [*node.body, *getattr(node, "orelse", [])]


@cache
def ours(module: str) -> Path | None:
    """The file of a module of this clone."""
    place = Path(*module.split("."))
    files = [root / name for root in ROOTS for name in (place.with_suffix(".py"), place / "__init__.py")]
    return next((file for file in files if file.is_file()), None)


@cache
def libraries(path: Path) -> frozenset[str]:
    """Top-level modules of libraries that come with the import of a module, those of our own followed."""
    packages, seen, stack = set[str](), {path}, [path]
    while stack:
        for module in imported(stack.pop()):
            parts = module.split(".")
            files = {ours(".".join(parts[:length])) for length in range(1, len(parts) + 1)} - {None}
            if (
                not files
                and parts[0] not in sys.stdlib_module_names
                and not any((r / parts[0]).is_dir() for r in ROOTS)
            ):
                packages.add(parts[0])
            stack += (fresh := [file for file in files if file is not None and file not in seen])
            seen.update(fresh)
    return frozenset(packages)


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def declared() -> dict[str, dict[str, Any]]:
    """File -> what it declares of its project, of the core and of every plug-in."""
    files = [REPOSITORY / "pyproject.toml", *sorted(REPOSITORY.glob("plugins/*/pyproject.toml"))]
    return {str(file.relative_to(REPOSITORY)): tomllib.loads(file.read_text("utf-8"))["project"] for file in files}


@cache
def of_setup() -> frozenset[str]:
    """Libraries that `make setup` installs: what the projects and the extra `dev` require, and what these do."""
    files = [REPOSITORY / "pyproject.toml", *REPOSITORY.glob("plugins/*/pyproject.toml")]
    projects = {
        _canonical(tree["name"]): tree for tree in (tomllib.loads(f.read_text("utf-8"))["project"] for f in files)
    }
    stack = [(name, "dev") for name in projects]
    imports = set[tuple[str, str]]()
    while stack:
        key = stack.pop()
        if key in imports:
            continue
        imports.add(key)
        name, extra = key
        if name in projects:
            texts = [*projects[name]["dependencies"], *projects[name].get("optional-dependencies", {}).get(extra, [])]
        else:
            texts = metadata.requires(name) or []
        for need in map(Requirement, texts):
            if need.marker is None or need.marker.evaluate({"extra": extra}):
                stack += [(_canonical(need.name), inner) for inner in ("", *need.extras)]
    return frozenset(name for name, _ in imports)


@pytest.mark.more
def test_no_module_of_a_test_imports_what_set_up_does_not_install() -> None:
    """`constraints.txt` has an exact version of each, so that it is the same tomorrow."""
    named = metadata.packages_distributions()
    lines = (REPOSITORY / "constraints.txt").read_text("utf-8").splitlines()
    pinned = {_canonical(line.partition("==")[0]) for line in lines if "==" in line}
    paths = modules_of_tests()
    assert len(paths) > 150
    wrong = set[str]()
    for path in paths:
        for module in libraries(path):
            owners = {_canonical(name) for name in named.get(module, ())}
            if not owners & of_setup() & pinned:
                wrong.add(f"{path.relative_to(REPOSITORY)} imports {module}, of {owners or 'nothing installed'}")
    assert not wrong


def test_what_is_imported_in_a_function_or_for_types_alone_is_not_imported_at_once(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text(
        "import a\nfrom typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import b\nelse:\n    import c\n"
        "def f():\n    import d\nclass C:\n    import e\ntry:\n    import g\nexcept ImportError:\n    g = None\n"
    )
    assert set(imported(file)) == {"a", "typing", "typing.TYPE_CHECKING", "c", "e", "g"}


def test_every_version_is_the_same() -> None:
    """Plug-ins are released with the core: each reads what the others write."""
    files = [REPOSITORY / "pyproject.toml", *REPOSITORY.glob("plugins/*/pyproject.toml")]
    versions = {
        str(f.relative_to(REPOSITORY)): tomllib.loads(f.read_text("utf-8"))["project"]["version"] for f in files
    }
    versions["CITATION.cff"] = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text("utf-8"))["version"]
    changes = re.search(r"^## (\S+)", (REPOSITORY / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    assert changes is not None
    versions["CHANGELOG.md"] = changes[1]
    assert versions == dict.fromkeys(versions, dse.__version__)


def test_in_a_week_every_nightly_test_has_its_day() -> None:
    names = [f"tests/test_x.py::test_{number}[{number}]" for number in range(7000)]
    days = [passes.day_of(name) for name in names]
    assert set(days) == set(range(1, passes.DAYS + 1))
    assert max(map(days.count, set(days))) < 1.2 * len(names) / passes.DAYS
    assert days == [passes.day_of(name) for name in names]


SAMPLE = """
import pytest
{module}
@pytest.mark.nightly
@pytest.mark.parametrize("n", range(40))
def test_of_a_night(n): pass
def test_that_runs(): pass
def test_of_a_library(): pytest.skip("thing is not installed: apt-get install thing")
@pytest.mark.skipif(True, reason="this machine has one core")
def test_of_two_cores(): pass
@pytest.mark.xfail(strict=True)
def test_that_is_known_to_fail(): assert False
"""


@pytest.fixture
def sample(tmp_path: Path) -> Any:
    """Runs pytest on a module of tests, with the hooks of passes; what it says, and its exit code."""

    def run(*words: str, module: str = "") -> tuple[int, str]:
        (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n  nightly\n  tonight\n")
        (tmp_path / "test_sample.py").write_text(SAMPLE.format(module=module))
        command = [sys.executable, "-m", "pytest", "-p", "tests.passes", "-p", "no:cacheprovider", *words]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
        variables = {**environment, "PYTHONPATH": str(REPOSITORY)}
        done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr

    return run


@pytest.mark.more
def test_the_second_pass_runs_what_the_first_skipped_and_lets_no_skip_pass(sample: Any, tmp_path: Path) -> None:
    assert sample("--skipped-to=skipped.txt", "-m", "not nightly", "-n", "1")[0] == 0
    ids = (tmp_path / "skipped.txt").read_text().split()
    assert ids == ["test_sample.py::test_of_a_library", "test_sample.py::test_of_two_cores"]
    code, output = sample("--no-skips", "-rf", "@skipped.txt", "-n", "1")
    assert code == 1
    assert "1 failed, 1 skipped" in output
    assert "thing is not installed: apt-get install thing" in output


@pytest.mark.more
def test_a_module_that_is_skipped_as_a_whole_is_a_failure_of_the_second_pass(sample: Any, tmp_path: Path) -> None:
    module = 'pytest.importorskip("no_such_library", reason="no_such_library is not installed")'
    assert sample("--skipped-to=skipped.txt", module=module)[0] in (0, 5)
    assert (tmp_path / "skipped.txt").read_text() == "test_sample.py\n"
    code, output = sample("--no-skips", "@skipped.txt", module=module)
    assert code not in (0, 5)
    assert "no_such_library is not installed" in output


@pytest.mark.slow
def test_each_day_runs_its_own_nightly_tests(sample: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(passes.DAY_VARIABLE, "3")
    expected = [passes.day_of(f"test_sample.py::test_of_a_night[{number}]") for number in range(40)].count(3)
    assert 0 < expected < 40
    assert f" {expected} passed, " in sample("-m", "tonight")[1]


def test_settings_of_the_package_index_are_those_of_pip() -> None:
    text = "global.extra-index-url='https://one.example/simple https://two.example/simple'\n:env:.find-links='/a /b'\n"
    assert install.variables(text) == {
        "UV_INDEX": "https://one.example/simple https://two.example/simple",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_FIND_LINKS": "/a,/b",
    }
    assert install.variables("") == {}


def test_an_extra_is_asked_of_every_project_that_has_it_and_of_no_other() -> None:
    words = install.requirements(["dev", "dask"])
    assert words[:2] == ["-e", "./.[dev]"]
    assert "./plugins/cluster[dask]" in words
    assert "./plugins/hub" in words
    assert not {"gp", "torch"} & set(install.everything())
    with pytest.raises(SystemExit, match="no project has an extra nosuch: choose from everything, browser"):
        install.requirements(["nosuch"])


def test_targets_that_need_an_extra_name_one_that_there_is() -> None:
    text = (REPOSITORY / "Makefile").read_text("utf-8")
    named = set(re.findall(r"\$\(VENV\)/\.with-([a-z-]+)", text)) - {"everything"}
    assert {"docs", "dask"} <= named <= set(install.everything())


def test_reasons_of_lawful_skips_are_those_of_a_test() -> None:
    text = "".join(path.read_text("utf-8") for path in modules_of_tests() if path.name != "passes.py")
    reasons = re.findall(r'f?"([^"\n]{10,})"', text)
    assert not [pattern for pattern in passes.LAWFUL if not any(re.search(pattern, reason) for reason in reasons)]
