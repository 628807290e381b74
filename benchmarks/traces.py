"""Profiles of real runs, replayed: `python -m benchmarks.traces [--json] [--data DIR] [--large] [--hta PYTHON]`.

    replay_worst          largest error of the span of a replay, of the recorded one
    hidden_points_worst   largest difference of the share of collectives that is hidden, in percentage points
    import_mb_per_s       of a Chrome trace made here, on one core
    advise_s, whatifs     time of the advice on a profile of 1,000 kernels made here, and the what-ifs that it runs
    whatifs_per_s         their ratio; each runs in three cases of the laws
    sm_law_h100           median error of times of collectives at numbers of SMs that were not fitted, worst table
    sm_law_others         the same on GB200, MI300X and MI355X
    dualpipe_...          laws learnt on one layer of DualPipe predict the next (`validation/contention_laws.py`):
      slowdown_median     median error of kernels beside an exchange; ..._alone_before: of those that ran alone before
      pair                error of the span of the layer
      order_gain          what the best order of its two streams would gain, of the recorded one
    micro_batches_...     two micro-batches, against measured prefills in two halves (`validation/micro_batches.py`):
      time                median error of the time; ..._gain_points: of the gain, percentage points
      in_interval         share of the measured times that are in the predicted interval
    import_peak_gb_per_million   with --large: memory at the most of a process that imports a million kernels
    hidden_points_hta     largest difference of the share that is hidden from HolisticTraceAnalysis's, percentage points

--hta names an interpreter that has HolisticTraceAnalysis (this one); without it, the reason is printed instead.

--data names a folder with profiles (`*.csv.gz`), and tables of DualPipe, TokenWeave and exchanges of experts below it,
or some of them; figures that it does not give are named on stderr. Without it the shipped profile is replayed, and the
figures from `sm_law_h100` on are left out.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.trace_memory import import_peak_gb_per_million
from dse.errors.terminal import quiet
from dse_traces import DATA
from dse_traces.change.advice import advise
from dse_traces.profile.kernels import Profile, profile_of
from dse_traces.profile.replay import replay
from dse_traces.readers.formats import read
from validation import contention_laws, micro_batches
from validation.hta import hidden_points_hta
from validation.left_out import files_below, given_folder, report_left_out

_EVENTS = 150_000  # of the trace that is made


def profiles(data: Path | None) -> list[Path]:
    """Files of the profiles that are replayed."""
    if data is None:
        return sorted((DATA / "profiles").glob("*.csv.gz"))
    return [*files_below(data, "*.csv.gz"), *files_below(data, contention_laws.TABLE)]


def replayed(paths: list[Path]) -> Iterator[dict[str, Any]]:
    """Yield the errors of the replay of each profile."""
    for path in paths:
        done = replay(read(path))
        hidden = [100 * overlap.hidden for overlap in (done.recorded, done.replayed)]
        yield {"profile": path.name, "kernels": len(done.profile), "span": done.span_error, "hidden": hidden}


def import_rate() -> float:
    """MB/s at which a Chrome trace is read: kernels, launches and operators of the host in equal numbers."""
    with tempfile.TemporaryDirectory() as folder, quiet():
        path = Path(folder) / "made.json"
        path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": list(made_events(_EVENTS))}, indent=1))
        began = time.perf_counter()
        read(path)
        return path.stat().st_size / 1e6 / (time.perf_counter() - began)


def made_events(count: int) -> Iterator[dict[str, Any]]:
    """Yield events of a Chrome trace as the PyTorch profiler writes them: an operator with its shapes, its launch, its
    kernel.
    """
    name = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>, ...>"
    shape = {"Input Dims": [[4096, 8192], [4096, 8192], []], "Input type": ["c10::BFloat16", "c10::BFloat16", "Scalar"]}
    for place in range(count // 3):
        host = {"ph": "X", "pid": 1, "tid": 1, "ts": 10.0 * place, "dur": 4.0}
        number = {"External id": place, "correlation": place}
        yield {**host, "cat": "cpu_op", "name": "aten::add", "args": {**shape, "External id": place}}
        yield {**host, "cat": "cuda_runtime", "name": "cudaLaunchKernel", "args": {**number, "cbid": 211}}
        kernel = {"stream": 7, "device": 0, "grid": [1024, 1, 1], "block": [128, 1, 1], "registers per thread": 32}
        yield {
            **{"ph": "X", "pid": 0, "tid": 7, "cat": "kernel", "name": name, "ts": 10.0 * place + 6, "dur": 7.5},
            "args": {**number, **kernel, "shared memory": 0, "blocks per SM": 12.3, "warps per SM": 49.2},
        }


def made_training(count: int, *, groups: int) -> Profile:
    """A profile of `count` kernels: GEMMs and kernels bound by memory, and after every tenth one a collective of one of
    so many payloads, which the kernel after the next waits for.
    """
    rows: list[dict[str, Any]] = []
    start = 0.0
    for place in range(count // 10):
        for step in range(9):
            name, seconds, ctas = ("sm90_xmma_gemm", 80e-6, 500) if step % 3 == 0 else ("rms_norm_kernel", 15e-6, 4096)
            rows.append({"name": name, "stream": "7", "start_s": start, "seconds": seconds, "ctas": ctas})
            start += seconds + 1e-6
        payload = 1e6 * (1 + place % groups)
        reduced: dict[str, Any] = {"name": "ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "payload_bytes": payload}
        seconds = 20e-6 + payload / 1e11
        rows.append({**reduced, "stream": "20", "start_s": start, "seconds": seconds, "ctas": 16})
        start += seconds + 1e-6
    return profile_of(rows, "made")


def advice_figures() -> dict[str, float]:
    """Seconds of the advice on a profile of 1,000 kernels with 20 groups of collectives, and its what-ifs a second."""
    profile = made_training(1000, groups=20)
    advise(made_training(40, groups=1), "h100_8")  # compiles the engine
    began = time.perf_counter()
    advice = advise(profile, "h100_8")
    spent = time.perf_counter() - began
    return {"advise_s": spent, "whatifs": advice.count, "whatifs_per_s": advice.count / spent}


def replay_figures(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Largest errors of the span of replays, and of the share that is hidden in those that have collectives."""
    if not rows:
        report_left_out("replay_worst, hidden_points_worst", "the folder has no profile")
        return {}
    points = np.array([abs(row["hidden"][1] - row["hidden"][0]) for row in rows])
    figures = {"replay_worst": max(abs(row["span"]) for row in rows)}
    return figures if np.isnan(points).all() else {**figures, "hidden_points_worst": float(np.nanmax(points))}


def hta_figures(paths: list[Path], python: str) -> dict[str, float]:
    """Largest difference of the hidden share from HolisticTraceAnalysis's, of an interpreter that has it."""
    with tempfile.TemporaryDirectory() as folder, quiet():
        witness = hidden_points_hta([read(path) for path in paths], Path(folder), python)
    if isinstance(witness, float):
        return {"hidden_points_hta": witness}
    report_left_out("hidden_points_hta", witness)
    return {}


def measured_figures(data: Path) -> dict[str, float]:
    """What the tables below a folder say of laws of SMs, of DualPipe and of two micro-batches."""
    measured = {
        "sm_law_...": contention_laws.sm_figures(data),
        "dualpipe_...": contention_laws.dualpipe_figures(data),
        "micro_batches_...": micro_batches.micro_batch_figures(data),
    }
    for name, figures in measured.items():
        if not figures:
            report_left_out(name, f"no table below {data} gives it")
    return {name: value for figures in measured.values() for name, value in figures.items()}


def main(words: list[str] | None = None) -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--data", type=given_folder, help="folder of recorded profiles")
    parser.add_argument("--large", action="store_true", help="import a million kernels as well")
    parser.add_argument("--hta", default=sys.executable, metavar="PYTHON", help="interpreter with HTA")
    options = parser.parse_args(words)
    rows = list(replayed(profiles(options.data)))
    figures = {**replay_figures(rows), "import_mb_per_s": import_rate(), **advice_figures()}
    figures |= hta_figures(profiles(options.data), options.hta)
    if options.large:
        figures["import_peak_gb_per_million"] = import_peak_gb_per_million(made_events(3_000_000))
    figures |= measured_figures(options.data) if options.data is not None else {}
    if options.json:
        print(json.dumps({name: round(value, 4) for name, value in figures.items()}))
        return
    for row in rows:
        recorded, again = row["hidden"]
        shares = f"hidden {recorded:5.1f} % recorded, {again:5.1f} % replayed"
        print(f"{row['profile']:32} {row['kernels']:6,} kernels, span {100 * row['span']:+6.2f} %, {shares}")
    for line in (*contention_laws.lines(options.data), *micro_batches.lines(options.data)) if options.data else ():
        print(line)
    for name, value in figures.items():
        print(f"{name:30} {value:.4g}")


if __name__ == "__main__":
    main()
