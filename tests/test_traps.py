"""A stranger's folder full of modules: the command `dse` imports none of them, in no process that it starts."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import REPOSITORY, syntax

TITLED = re.compile(r'```\w+ title="([^"]+)"\n(.*?)```', re.DOTALL)
LIBRARIES = (
    *("dask", "distributed", "dse", "hydra", "joblib", "llvmlite", "matplotlib", "mlflow", "msgpack", "numba", "numpy"),
    *("omegaconf", "optuna", "pandas", "psutil", "pyarrow", "pydantic", "rich", "scipy", "search_spaces", "simpy"),
    *("simulators", "sitecustomize", "sqlalchemy", "studies", "tornado", "typing_extensions", "usercustomize", "yaml"),
)
TRAP = """
from pathlib import Path
with Path(__file__).with_name("IMPORTED").open("a") as file:
    print(__name__, file=file)
raise ImportError(f"{__name__} of a stranger")
"""


@pytest.fixture
def trapped(tmp_path: Path) -> Path:
    """A folder with README's files, and a module for each of Python's and of the libraries, that tells its import."""
    for name in {*sys.stdlib_module_names, *LIBRARIES}:
        (tmp_path / f"{name}.py").write_text(TRAP, "utf-8")
    for title, text in TITLED.findall((REPOSITORY / "README.md").read_text("utf-8")):
        (tmp_path / title).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / title).write_text(text, "utf-8")
    return tmp_path


def type_in(folder: Path, words: list[str]) -> None:
    """Type `dse` and some words in a folder of traps, in which none may shut."""
    command = [str(Path(sys.executable).with_name("dse")), *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    caught = folder / "IMPORTED"
    assert not caught.exists(), caught.read_text("utf-8")
    assert done.returncode == 0, done.stderr


@pytest.mark.more
def test_commands_of_the_readme_import_nothing_of_the_folder(trapped: Path) -> None:
    typed = re.findall(r"^\$ python -m dse (.*)", (REPOSITORY / "README.md").read_text("utf-8"), re.MULTILINE)
    assert typed
    for words in map(shlex.split, typed):
        type_in(trapped, words)


@pytest.mark.more
def test_workers_import_nothing_of_the_folder(trapped: Path) -> None:
    words = ["run", "ficco_sweep", "executor.jobs=2", "executor.timeout_s=60 s", "store=none", "workload.only=[g4]"]
    type_in(trapped, [*words, "figures=none", "tracking=none"])


@pytest.mark.more
def test_workers_of_a_cluster_import_nothing_of_the_folder(trapped: Path) -> None:
    pytest.importorskip("distributed", reason="distributed is not installed: pip install 'overlap-dse-cluster[dask]'")
    words = ["run", "ficco_sweep", "executor=dask", "executor.jobs=2", "workload.only=[g4]", "schedule=chunked"]
    type_in(trapped, [*words, "figures=none", "tracking=none"])


@pytest.mark.more
def test_every_python_process_is_started_without_the_current_folder() -> None:
    """A command says -P or -I, or runs a script of ours; what a library starts is started while imports are safe."""
    for path, tree in syntax().items():
        name, text = path.relative_to(REPOSITORY), path.read_text("utf-8")
        for node in ast.walk(tree):
            if isinstance(node, ast.List | ast.Tuple) and node.elts and ast.unparse(node.elts[0]) == "sys.executable":
                follows = ast.unparse(node.elts[1]) if len(node.elts) > 1 else ""
                assert follows not in ("'-m'", "'-c'"), f"{name}, line {node.lineno}"
        if re.search(r"get_context\(|LocalCluster|multiprocessing\.(Process|Pool)\b", text):
            assert "safe_imports" in text, name
