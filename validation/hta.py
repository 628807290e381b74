"""HolisticTraceAnalysis as a witness of the share of collectives that is hidden.

It is no dependency of this project: an interpreter that has it (PyPI: HolisticTraceAnalysis) is named, and started.
Profiles are written for it as Chrome traces with kernels alone, so that both look at the same ones.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

from dse_traces.profile.kernels import Profile
from dse_traces.profile.replay import replay

_SECONDS = 600
_SCRIPT = """
import json, logging, os, sys
os.environ["HTA_DISABLE_NS_ROUNDING"] = "1"
logging.disable(logging.CRITICAL)
from hta.trace_analysis import TraceAnalysis
for path in sys.argv[1:]:
    analysis = TraceAnalysis(trace_files={0: path}, trace_dir=os.path.dirname(path), include_last_profiler_step=True)
    overlap = analysis.get_comm_comp_overlap(visualize=False)
    print(json.dumps(float(overlap["comp_comm_overlap_pctg"].iloc[0])))
"""


def hidden_points_hta(profiles: Sequence[Profile], folder: Path, python: str) -> float | str:
    """Largest difference of our share of hidden collectives from HTA's, in percentage points, or why there is none.

    python: an interpreter that can import `hta`. folder: for the traces that are written. HTA rounds to 0.01 points.
    """
    chosen = [profile for profile in profiles if profile.is_collective.any() and profile.is_compute.any()]
    paths = [write_chrome(profile, folder / f"{place}.json") for place, profile in enumerate(chosen)]
    command = [python, "-W", "ignore", "-c", _SCRIPT, *map(str, paths)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_SECONDS)
    except FileNotFoundError:
        return f"{python} is no interpreter"
    except subprocess.TimeoutExpired:
        return f"HTA took more than {_SECONDS} s"
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or ["no message"])[-1]
        return f"{python}: {last}"
    witness = [json.loads(line) for line in done.stdout.splitlines() if line and line[0] in "0123456789"]
    ours = [100 * replay(profile).recorded.hidden for profile in chosen]
    return max((abs(mine - theirs) for mine, theirs in zip(ours, witness, strict=True)), default=0.0)


def write_chrome(profile: Profile, path: Path) -> Path:
    """Write the kernels of a profile as a Chrome trace, with names that tell HTA which of them communicate."""
    columns = [profile.kernels[name].tolist() for name in ("stream", "kind")]
    names = {"collective": "ncclKernel", "copy": "Memcpy DtoD", "fill": "Memset"}
    numbers = {stream: place + 1 for place, stream in enumerate(dict.fromkeys(columns[0]))}
    host = {"ph": "X", "cat": "cpu_op", "name": "host", "pid": 1, "tid": 1, "ts": 0, "dur": 1, "args": {}}
    events = [host]
    rows = zip(*columns, profile.start_s.tolist(), profile.seconds.tolist(), strict=True)
    for place, (stream, kind, start, seconds) in enumerate(rows):
        args = {"stream": numbers[stream], "device": 0, "correlation": place}
        times = {"ts": start * 1e6, "dur": seconds * 1e6}
        what = {"cat": "kernel", "name": names.get(kind, "gemm_kernel"), "pid": 0, "tid": numbers[stream]}
        events.append({"ph": "X", **what, **times, "args": args})
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))
    return path
