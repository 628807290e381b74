"""Four ways from the README to an answer, typed as a new reader would: each ends without a refusal."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.recorded import ROOT

SCRIPTS = {path.stem: path for path in Path(__file__).parent.glob("*.sh")}
TITLED = re.compile(r'```\w+ title="([^"]+)"\n(.*?)```', re.DOTALL)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("own_program", marks=pytest.mark.more),
        pytest.param("own_gemms", marks=pytest.mark.nightly),
        pytest.param("own_model", marks=pytest.mark.nightly),
        pytest.param("own_schedule", marks=pytest.mark.nightly),
    ],
)
def test_a_journey_reaches_its_end(name: str, tmp_path: Path) -> None:
    for title, text in TITLED.findall((ROOT / "README.md").read_text("utf-8")):
        (tmp_path / title).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / title).write_text(text, "utf-8")
    script = SCRIPTS[name]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    variables = {**os.environ, "PATH": path, "DSE": str(ROOT)}
    done = subprocess.run(
        ["bash", "-eu", str(script)],
        cwd=tmp_path,
        env=variables,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for expected in re.findall(r"# expect: (.*)", script.read_text("utf-8")):
        assert re.search(expected, done.stdout), f"{expected}\n{done.stdout}"


def test_every_script_is_run_and_begins_with_what_the_readme_shows() -> None:
    assert set(SCRIPTS) == {"own_gemms", "own_model", "own_program", "own_schedule"}
    shown = re.search(r"\$ (python -m dse study=ficco_sweep .*)", (ROOT / "README.md").read_text("utf-8"))
    assert shown is not None
    assert shown[1] in SCRIPTS["own_gemms"].read_text("utf-8")
