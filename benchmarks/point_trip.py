"""The way of one point: what `study=ficco_sweep` goes through where one GEMM and one schedule are left of it.

`python -m benchmarks.point_trip` prints as JSON, for a run without store, tracking, figures and levels of the model:
modules_in_a_point: modules of the core that it imports; with _all: those of plug-ins too. calls_in_a_point: calls of
functions of the core, without comprehensions and steps of generators; calls_all: with both, and those of plug-ins.
changes_of_module_all: of these calls, those into another module. frames_to_gemm: own frames on the stack when a GEMM is
priced; deepest_frames: at most. point_cpu_s: CPU time of the whole process [s], with compiled kernels.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import subprocess
import sys
import tempfile
from inspect import CO_GENERATOR
from pathlib import Path
from types import FrameType

from benchmarks.house import PACKAGES, PLUGINS, ROOT

WORDS = (
    *("study=ficco_sweep", "workload.only=[g1]", "schedule=hetero_fused_1d", "~space.schedule", "timeline=false"),
    *("fidelity=none", "tracking=none", "store=none", "figures=none"),
)
_ROOTS = tuple(f"{ROOT / package}{os.sep}" for package in PACKAGES)
_ALL_ROOTS = (*_ROOTS, *(f"{path}{os.sep}" for path in sorted(ROOT.glob("plugins/*/dse_*"))))
_NO_FUNCTIONS = ("<module>", "<listcomp>", "<dictcomp>", "<setcomp>")
_COSTS = str(ROOT / "simulators" / "costs")


class _Trip:
    """Counts of calls of own functions, and the depth of the stack at `gemm_cost`."""

    def __init__(self) -> None:
        self.calls = self.calls_all = self.changes = self.frames = self.deepest = 0

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(_ALL_ROOTS):
            return
        self.calls_all += 1
        self.changes += _caller(frame) != code.co_filename
        self.deepest = max(self.deepest, _own_frames(frame, _ALL_ROOTS))
        if code.co_filename.startswith(_ROOTS):
            self.calls += not (code.co_flags & CO_GENERATOR or code.co_name in _NO_FUNCTIONS)
            if code.co_name == "gemm_cost" and code.co_filename.startswith(_COSTS):
                self.frames = max(self.frames, _own_frames(frame, _ROOTS))


def _caller(frame: FrameType) -> str:
    """File of the own function on the stack below a frame; "" for none."""
    below = frame.f_back
    while below is not None and not below.f_code.co_filename.startswith(_ALL_ROOTS):
        below = below.f_back
    return "" if below is None else below.f_code.co_filename


def _own_frames(frame: FrameType | None, roots: tuple[str, ...]) -> int:
    count = 0
    while frame is not None:
        count += frame.f_code.co_filename.startswith(roots)
        frame = frame.f_back
    return count


def trip(folder: str) -> dict[str, int]:
    """Run the study in this process, which has run nothing before."""
    count = _Trip()
    sys.setprofile(count)
    with contextlib.redirect_stdout(io.StringIO()):
        from dse.cli import main

        code = main([*WORDS, f"output_dir={folder}"])
    sys.setprofile(None)
    if code or not count.frames:
        raise RuntimeError(f"exit code {code}, and {count.frames} frames down to gemm_cost: no such way was gone")
    roots = [name.partition(".")[0] for name in sys.modules]
    return {
        "modules_in_a_point": sum(root in PACKAGES for root in roots),
        "modules_in_a_point_all": sum(root in (*PACKAGES, *PLUGINS) for root in roots),
        "calls_in_a_point": count.calls,
        "calls_all": count.calls_all,
        "changes_of_module_all": count.changes,
        "frames_to_gemm": count.frames,
        "deepest_frames": count.deepest,
    }


def point_trip() -> dict[str, float]:
    """All figures, each of a fresh process."""
    with tempfile.TemporaryDirectory() as folder:
        code = f"import json; from benchmarks.point_trip import trip; print(json.dumps(trip({folder!r})))"
        counts = json.loads(_run(["-c", code]))
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        _run(["-m", "dse", *WORDS, f"output_dir={folder}"])
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {**counts, "point_cpu_s": round(seconds, 2)}


def _run(words: list[str]) -> str:
    paths = os.pathsep.join([str(ROOT), *map(str, sorted(Path(ROOT, "plugins").iterdir()))])
    command, env = [sys.executable, *words], {**os.environ, "PYTHONPATH": paths}
    return subprocess.run(command, check=True, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True).stdout


if __name__ == "__main__":
    print(json.dumps(point_trip(), indent=2))
