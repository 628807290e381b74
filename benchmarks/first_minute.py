"""The first minute of a user: seconds to the first answer and to the prompt, help, the MLflow UI, size of the report.

`python -m benchmarks.first_minute [--json]` runs `study=ficco_sweep` in a fresh folder with compiled kernels, then once
more with none; `--commands` measures help and refusals alone, `--studies` the first answer of every study instead.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from dse.config.options import list_options

ANSWER = "in short:"
READY = "ready after"
REFUSALS = (
    ("study=ficco_swep",),
    ("study=ficco_sweep", "sytem=h100_8"),
    ("study=ficco_sweep", "workload.precision=bf17"),
    ("reprot",),
)
"""Commands with a mistake: a study, a key, a value, a verb."""
_DSE = (sys.executable, "-m", "dse")
_ROOT = Path(__file__).parents[1]


def first_minute() -> dict[str, float]:
    """All figures but those of the other studies."""
    with tempfile.TemporaryDirectory(prefix="dse-first-minute-") as folder:
        place = Path(folder)
        answer_and_prompt(place / "compiles", "ficco_sweep", {})  # kernels are compiled from here on
        answer_s, prompt_s = answer_and_prompt(place / "warm", "ficco_sweep", {})
        cold_s, _ = answer_and_prompt(place / "cold", "ficco_sweep", {"NUMBA_CACHE_DIR": str(place / "numba")})
        run = place / "warm" / "outputs" / "ficco_sweep" / "latest"
        return {
            "first_answer_s": answer_s,
            "prompt_s": prompt_s,
            "cold_first_answer_s": cold_s,
            **commands(),
            "ui_ready_s": _ui_ready_s(place / "warm"),
            "report_mb": (run / "report.html").stat().st_size / 1e6,
        }


def commands() -> dict[str, float]:
    """Figures of help and refusals."""
    return {
        "help_lines": _help_lines(),
        "help_cpu_s": cpu_s("--help"),
        "refusal_cpu_s": max(cpu_s(*words) for words in REFUSALS),
    }


def studies() -> dict[str, float]:
    """Study -> seconds to its first answer, without figures and tracking."""
    seconds = {}
    for study in list_options("study"):
        with tempfile.TemporaryDirectory(prefix="dse-first-minute-") as folder:
            words = ("figures=none", "tracking=none", "fidelity=none")
            seconds[study], _ = answer_and_prompt(Path(folder), study, {}, *words)
        print(f"{study:<24}{seconds[study]:.1f} s", file=sys.stderr)
    return seconds


def answer_and_prompt(folder: Path, study: str, variables: Mapping[str, str], *words: str) -> tuple[float, float]:
    """Seconds from the start of a study in a fresh folder to its first answer, and to its end."""
    folder.mkdir(exist_ok=True)
    began, answer_s = time.monotonic(), float("nan")
    with _started((*_DSE, f"study={study}", *words), folder, variables) as child:
        for line in child.stdout or ():
            if line.startswith(ANSWER):
                answer_s = time.monotonic() - began
        if child.wait():
            raise RuntimeError(f"study={study} ended with exit code {child.returncode}")
    return answer_s, time.monotonic() - began


def _help_lines() -> float:
    return len(subprocess.run([*_DSE, "--help"], cwd=_ROOT, capture_output=True, check=True).stdout.splitlines())


def cpu_s(*words: str) -> float:
    """Seconds of CPU that a command takes once Python has kept the modules that it compiled."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    show = partial(subprocess.run, [*_DSE, *words], cwd=_ROOT, env=variables, check=False, **quiet)
    show()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    show()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _ui_ready_s(folder: Path) -> float:
    """Seconds from the start of `dse ui` until it says that it is ready."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    began = time.monotonic()
    with _started((*_DSE, "ui", f"port={port}", "open=false"), folder, {}) as child:
        ready = any(READY in line for line in child.stdout or ())
        seconds = time.monotonic() - began
        child.send_signal(signal.SIGINT)
    return seconds if ready else float("nan")


@contextmanager
def _started(command: tuple[str, ...], folder: Path, variables: Mapping[str, str]) -> Iterator[subprocess.Popen[str]]:
    """A command that runs in a folder, its output read line by line."""
    paths = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH", ""))))
    environment = {**os.environ, "PYTHONPATH": paths, "PYTHONUNBUFFERED": "1", **variables}
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as child:
        yield child


def main() -> int:
    """Print the figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.first_minute", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--commands", action="store_true", help="measure help and refusals (seconds)")
    parser.add_argument("--studies", action="store_true", help="time the first answer of every study (minutes)")
    words = parser.parse_args()
    figures = studies() if words.studies else commands() if words.commands else first_minute()
    print(json.dumps(figures) if words.json else "\n".join(f"{name:<24}{value:.2f}" for name, value in figures.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
