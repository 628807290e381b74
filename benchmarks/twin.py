"""Machines fitted to profiles of them: `python -m benchmarks.twin [--json] [--data DIR] [--cases N] [--seed N]`.

    recovered      share of the hidden constants that were fitted whose value lies in the printed 90 % interval
    coverage       share of the hidden constants that were fitted at all
    error_median   median error of the fitted constants; the shipped ones are off by up to 40 %
    width_median   median width of their intervals, over the value
    replay_worst   with --data: largest error of the span of a replay of the recorded profiles below DIR

A case is a shipped machine, sizes of a model and a layout. Rates of its GEMMs, streams and collectives and the host's
time are hidden behind factors between 0.7 and 1.4; a training step is written as Chrome traces with our costs and these
factors, noise, and late ranks, and `profile twin` reads them. This judges the fit alone: how far the costs are off
on real kernels is what `benchmarks.operators` and `benchmarks.steps` measure.
"""

from __future__ import annotations

import argparse
import gzip
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.traces import profiles, replay_figures, replayed
from dse.errors.terminal import quiet
from dse.space import get_path
from dse_traces.laws.twin import (
    HOST,
    STREAMS,
    Twin,
    collective_path,
    collective_seconds,
    fit_twin,
    gemm_paths,
    gemm_seconds,
    scaled,
    stream_seconds,
)
from dse_traces.profile.ranks import match
from dse_traces.readers.formats import files_of, read_ranks
from simulators.costs.algorithms import Pattern
from simulators.costs.gemm import GemmShape
from simulators.hardware.device import Device
from simulators.hardware.machine import tree_of
from validation.left_out import given_folder

SYSTEMS = ("h100_8", "h200_8", "a100_8", "b200_8", "mi300x_8")
"""Machines of the cases."""
FACTORS = (0.7, 1.4)
"""Range of the hidden factors."""
_HOST_S = 8e-6  # of a launch, before its factor
_NOISE = 0.03  # of the logarithm of a time
_LATE_S = 40e-6  # of a rank, in the mean of those that are late
_LATE_SHARE = 0.4
_SMALL_KERNELS = 80  # of an optimizer, which the host launches one by one
_TYPES = {"bf16": "c10::BFloat16", "fp16": "c10::Half"}
_PATTERNS: tuple[Pattern, ...] = ("all_reduce", "all_gather", "reduce_scatter")


@dataclass(frozen=True)
class Case:
    """A machine with hidden factors by path (`HOST`: a time), and a step: tokens, width, layers, GPUs of a tp group,
    patterns of its collectives, iterations, and ranks that are recorded.
    """

    system: str
    precision: str
    hidden: dict[str, float]
    tokens: int
    width: int
    layers: int
    gpus: int
    patterns: tuple[Pattern, ...]
    ranks: int
    iterations: int = 3

    @property
    def machine(self) -> Device:
        """The machine with its hidden constants."""
        device = Device.of(tree_of(self.system))
        for path, factor in self.hidden.items():
            if path != HOST:
                paths = gemm_paths(device, self.precision) if path.startswith("gpu.efficiency") else [path]
                device = scaled(device, paths, float(np.log(factor)))
        return device


def draw_case(rng: np.random.Generator, system: str | None = None) -> Case:
    """Draw a case."""
    name = system or str(rng.choice(SYSTEMS))
    device = Device.of(tree_of(name))
    precision = str(rng.choice([kind for kind in _TYPES if device.gpu.constants(kind) is not None]))
    patterns = [_PATTERNS[:1], _PATTERNS[1:], _PATTERNS][rng.integers(3)]
    paths = [gemm_paths(device, precision)[0]]
    paths += [path for kind in patterns if (path := collective_path(device, kind, across=False))]
    hidden = {path: float(rng.uniform(*FACTORS)) for path in paths}
    if device.gpu.stream_efficiency is not None:
        # a share of the HBM's rate is below 1
        hidden[STREAMS] = float(rng.uniform(FACTORS[0], min(FACTORS[1], 0.95 / device.gpu.stream_efficiency)))
    hidden[HOST] = _HOST_S * float(rng.uniform(*FACTORS))
    return Case(
        name,
        precision,
        hidden,
        tokens=int(rng.choice([4096, 8192, 16384])),
        width=int(rng.choice([4096, 5120, 8192])),
        layers=int(rng.integers(2, 5)),
        gpus=int(rng.choice([2, 4, 8])),
        patterns=patterns,
        ranks=int(rng.choice([1, 2])),
    )


@dataclass
class _Rank:
    """Events of a rank so far, and its time [s]."""

    events: list[dict[str, Any]] = field(default_factory=list)
    now: float = 0.0
    number: int = 0

    def kernel(self, name: str, seconds: float, shape: dict[str, Any] | None = None, **args: Any) -> None:
        """Add a kernel that follows the one before, with its launch and its operator."""
        self.number += 1
        number, late = {"External id": self.number, "correlation": self.number}, args.pop("launch_s", self.now - 1e-5)
        host = {"ph": "X", "pid": 1, "tid": 1, "ts": 1e6 * late, "dur": 2.0}
        if shape is not None:
            named = {"cat": "cpu_op", "name": shape["operator"], "args": {**shape, "External id": self.number}}
            self.events.append({**host, **named})
        self.events.append({**host, "cat": "cuda_runtime", "name": "cudaLaunchKernel", "args": number})
        stream = args.pop("stream", 7)
        kernel = {"ph": "X", "cat": "kernel", "pid": 0, "tid": stream, "name": name}
        times = {"ts": round(1e6 * self.now, 3), "dur": round(1e6 * seconds, 3)}
        self.events.append({**kernel, **times, "args": {**number, "stream": stream, "device": 0, **args}})
        self.now += seconds + 1e-6


@dataclass(frozen=True)
class _Draw:
    """Noise of times, drawn. noise: standard deviation of their logarithms."""

    rng: np.random.Generator
    noise: float

    def factor(self) -> float:
        """Factor on a time."""
        return float(np.exp(self.rng.normal(0.0, self.noise)))

    def late_s(self) -> float:
        """By how much a rank is late [s]."""
        return float(self.rng.exponential(_LATE_S)) if self.rng.random() < _LATE_SHARE else 0.0


def write_case(case: Case, folder: Path, rng: np.random.Generator, *, noise: float = _NOISE) -> list[Path]:
    """Write the Chrome traces of a case, one for each rank."""
    machine, draw, ranks = case.machine, _Draw(rng, noise), [_Rank(now=1e-3) for _ in range(case.ranks)]
    for number in range(case.iterations):
        began = [rank.now for rank in ranks]
        for _ in range(case.layers):
            _layer(case, machine, ranks, draw)
        for rank in ranks:
            _optimizer(case.hidden[HOST], rank, draw)
        for rank, start in zip(ranks, began, strict=True):
            mark = {"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{number}", "pid": 1, "tid": 1}
            rank.events.append({**mark, "ts": 1e6 * start, "dur": 1e6 * (rank.now - start), "args": {}})
    paths = [folder / f"rank{place}.json.gz" for place in range(case.ranks)]
    for place, (path, rank) in enumerate(zip(paths, ranks, strict=True)):
        trace = {"distributedInfo": {"rank": place, "world_size": case.gpus}, "traceEvents": rank.events}
        path.write_bytes(gzip.compress(json.dumps({"schemaVersion": 1, **trace}).encode()))
    return paths


def _layer(case: Case, machine: Device, ranks: list[_Rank], draw: _Draw) -> None:
    """Add the GEMMs, streams and collectives of a layer to each rank."""
    d, kind, m, gpus = case.width, _TYPES[case.precision], case.tokens, case.gpus
    for outputs, inner in ((3 * d // gpus, d), (d, d // gpus), (4 * d // gpus, d), (d, 4 * d // gpus)):
        seconds = float(gemm_seconds(machine, case.precision, GemmShape(outputs, m, inner)))
        shape = {"operator": "aten::mm", "Input Dims": [[m, inner], [inner, outputs]], "Input type": [kind, kind]}
        for rank in ranks:
            rank.kernel("sm90_xmma_gemm_bf16", seconds * draw.factor(), shape, grid=[512, 1, 1])
    seconds = float(stream_seconds(machine, case.precision, np.array([2 * 3 * 4 * m * d]))[0])
    shape = {"operator": "aten::add", "Input Dims": [[4 * m, d], [4 * m, d]], "Input type": [kind, kind]}
    for rank in ranks:
        name = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>>"
        rank.kernel(name, seconds * draw.factor(), shape, grid=[4096, 1, 1])
    for pattern in case.patterns:
        _collective(case, pattern, machine, ranks, draw)


def _collective(case: Case, pattern: Any, machine: Device, ranks: list[_Rank], draw: _Draw) -> None:
    """Add a collective to each rank, which ends at once on all, and begins late on some."""
    elements = case.tokens * case.width
    transfer = float(collective_seconds(machine, pattern, np.array([2.0 * elements]), np.array([float(case.gpus)]))[0])
    for rank in ranks:
        rank.now += draw.late_s()
    # of one rank alone the others are late, who are not recorded
    late_s = draw.late_s() if case.ranks == 1 else 0.0
    end = max(rank.now for rank in ranks) + late_s + transfer * draw.factor()
    shard = elements // case.gpus
    counts = {"all_gather": (shard, elements), "reduce_scatter": (elements, shard)}.get(pattern, (elements, elements))
    message = {"Collective name": pattern, "In msg nelems": counts[0], "Out msg nelems": counts[1]}
    group = {"Group size": case.gpus, "Process Group Name": "tp", "dtype": _TYPES[case.precision].removeprefix("c10::")}
    for rank in ranks:
        fields: dict[str, Any] = {**message, **group, "stream": 20, "grid": [24, 1, 1]}
        rank.kernel(f"ncclDevKernel_{pattern}_Sum_bf16_RING_LL", end - rank.now, None, **fields)


def _optimizer(host_s: float, rank: _Rank, draw: _Draw) -> None:
    """Add small kernels for each of which the GPU waits for the host."""
    launched = rank.now + 2 * host_s
    for _ in range(_SMALL_KERNELS):
        rank.now = launched + 1e-6
        rank.kernel("multi_tensor_apply_kernel_adam", 1.5e-6, launch_s=launched, grid=[64, 1, 1])
        launched = max(launched + host_s * draw.factor(), rank.now)


def fitted_case(case: Case, folder: Path, rng: np.random.Generator, *, noise: float = _NOISE) -> Twin:
    """Write a case, read it, and fit its twin."""
    write_case(case, folder, rng, noise=noise)
    read = [profile for path in files_of(str(folder)) for profile in read_ranks(path)]
    ranks = match(read) if read[1:] else None
    return fit_twin(tree_of(case.system), list(ranks.profiles.values()) if ranks else read, ranks)


def rows_of_case(case: Case, twin: Twin) -> Iterator[dict[str, Any]]:
    """Yield a row for each hidden constant: its path, whether it was fitted, inside its interval, error and width."""
    device, fitted = Device.of(tree_of(case.system)), {of.path: of for of in twin.fitted}
    for path, hidden in case.hidden.items():
        row: dict[str, Any] = {"system": case.system, "ranks": case.ranks, "path": path, "fitted": path in fitted}
        if path in fitted:
            of = fitted[path]
            true = hidden if path == HOST else hidden * float(get_path(device, path))
            row |= {
                "inside": of.low <= true <= of.high,
                "error": of.value / true - 1,
                "width": (of.high - of.low) / true,
            }
        yield row


def figures(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Figures of all rows of all cases."""
    fitted = [row for row in rows if row["fitted"]]
    return {
        "recovered": float(np.mean([row["inside"] for row in fitted])),
        "coverage": len(fitted) / len(rows),
        "error_median": float(np.median([abs(row["error"]) for row in fitted])),
        "width_median": float(np.median([row["width"] for row in fitted])),
        "constants": len(rows),
    }


def main(words: list[str] | None = None) -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--data", type=given_folder, help="folder of recorded profiles")
    parser.add_argument("--cases", type=int, default=20, help="cases that are drawn")
    parser.add_argument("--seed", type=int, default=0, help="of the drawing")
    options = parser.parse_args(words)
    rng, rows = np.random.default_rng(options.seed), list[dict[str, Any]]()
    for _ in range(options.cases):
        case = draw_case(rng)
        with tempfile.TemporaryDirectory() as folder, quiet():
            rows += rows_of_case(case, fitted_case(case, Path(folder), rng))
    shown = figures(rows)
    if options.data is not None:
        worst = replay_figures(list(replayed(profiles(options.data)))).get("replay_worst")
        shown |= {} if worst is None else {"replay_worst": worst}
    if options.json:
        print(json.dumps({name: round(value, 4) for name, value in shown.items()}))
        return
    for row in rows:
        text = f"inside {row['inside']!s:5} {100 * row['error']:+6.2f} %" if row["fitted"] else "not fitted"
        print(f"{row['system']:10} {row['ranks']} ranks  {row['path']:58} {text}")
    for name, value in shown.items():
        print(f"{name:20} {value:.4g}")


if __name__ == "__main__":
    main()
