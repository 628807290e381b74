"""The first minute of a user: seconds to the first answer and to the prompt, help, the MLflow UI, size of the report.

`python -m benchmarks.first_minute [--json]` runs `study=ficco_sweep` in a fresh folder with compiled kernels, then once
more with none; `--commands` measures help and refusals alone, `--studies` the first answer of every study instead.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from dse import plugins
from dse.config.options import conf_dir, list_options, load_yaml
from dse.results.published import values_of

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
            "page_overflow_px": page_overflow_px(run / "report.html"),
            "figures_without_published": len(figures_without_published()),
        }


def commands() -> dict[str, float]:
    """Figures of help and refusals."""
    return {
        "help_lines": _help_lines(),
        "help_cpu_s": cpu_s("--help"),
        "refusal_cpu_s": max(cpu_s(*words) for words in REFUSALS),
    }


def page_overflow_px(report: Path) -> float:
    """Pixels that a report is too wide, at 1,280 and at 400 px: the page itself, and any of its tables, details open.

    NaN without Chromium.
    """
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        return float("nan")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        pages = [browser.new_page(viewport={"width": width, "height": 900}) for width in (1280, 400)]
        for page in pages:
            page.goto(report.resolve().as_uri(), wait_until="networkidle")
        widest = max(int(page.evaluate(_OVERFLOW)) for page in pages)
        browser.close()
    return widest


_OVERFLOW = """() => {
  document.querySelectorAll("details").forEach((part) => { part.open = true; });
  const boxes = [document.documentElement, ...document.querySelectorAll(".sheet, pre, figure")];
  return Math.max(...boxes.map((box) => box.scrollWidth - box.clientWidth));
}"""


def figures_without_published() -> list[str]:
    """Figures of papers' studies, as `module.figure`, that show no published value and have no reason for it."""
    studies = [load_yaml(path)["study"] for path in (conf_dir() / "study").glob("*.yaml")]
    modules = sorted({study["module"] for study in studies if study.get("paper")} - {"plain"})
    return [f"{module}.{name}" for module in modules for name in sorted(_missing_values(module))]


def _missing_values(module: str) -> set[str]:
    study = plugins.load("study", module)
    file = Path(inspect.getfile(type(study)))
    sources = file.parent.glob("*.py") if file.name == "__init__.py" else [file]
    names = {name for source in sources for name in figure_names(source.read_text("utf-8"))}
    listed = study.published_values()
    known = {name: values_of(listed, name) for name in names}
    return {name for name, figure in known.items() if not (figure.references or figure.reason)}


def figure_names(source: str) -> set[str]:
    """Names of the figures that a module of a study yields: pairs of a name and what draws.

    >>> sorted(figure_names('yield "a", partial(f, x); yield f"{b}_c", draw_figure; yield "table", rows()'))
    ['_c', 'a']
    """
    pairs = (node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Yield))
    drawn = [pair.elts for pair in _choices(pairs) if isinstance(pair, ast.Tuple) and len(pair.elts) == 2]
    return {text for name, make in drawn if _draws(make) and (text := _constant(name)).strip("_")}


def _choices(nodes: Iterable[ast.expr | None]) -> Iterator[ast.expr]:
    for node in nodes:
        yield from _choices([node.body, node.orelse]) if isinstance(node, ast.IfExp) else [node] if node else []


def _draws(node: ast.expr) -> bool:
    is_partial = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "partial"
    return is_partial or (isinstance(node, ast.Name) and "figure" in node.id)


def _constant(node: ast.expr) -> str:
    """The text of a name; its constant parts where others are known at run time alone."""
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    return "".join(str(part.value) for part in parts if isinstance(part, ast.Constant))


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
