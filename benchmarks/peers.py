"""Peers in one run: `python -m benchmarks.peers --data <folder> [--json]`.

Collectives among 8 x H100 from 1 MiB on, by every simulator that is there, beside NCCL's measured times (the table
nccl_a100_h100_l40s.csv below the folder): the median signed error of each, the median of its size, and points/s.

    ours       the library's constants of h100_8, on rows that they were not fitted on
    astra_sim  ASTRA-sim with its validated configuration of HGX H100 (`dse_peers.astra_sim`)
    simgrid    the steps of a ring as flows through the ports of a switch at the links' nominal rate, without latency

The same errors are a study, `python -m dse study=peers`, which has its own rows and no rates. exported_parse:
share of the files of settings (`python -m dse settings export`) that are read back as the plan that they say.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.recorded import ROOT
from dse import plugins
from dse.errors import ConfigError
from dse.errors.terminal import bar
from dse_calibration.collectives import constants_of, cost_of_rows, fitted_names, read_collectives
from dse_calibration.measurements import MeasuredRows
from dse_calibration.predictions import peers
from dse_deploy.command import nearest, write_all
from dse_deploy.settings import tools
from dse_deploy.step_files import STEP_FORMATS
from simulators.hardware.device import ScheduledDevice
from simulators.hardware.machine import tree_of
from simulators.hardware.network import CollectiveKind, Node
from simulators.taskgraph.graph import Floats
from simulators.taskgraph.timeline import ForeignEngine
from studies.plan.plan_file import leaves_of

KINDS: tuple[CollectiveKind, ...] = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
_TABLE = "nccl_a100_h100_l40s.csv"
_SYSTEM, _DEVICE, _GPUS = "h100_8", "h100", 8
_LEAST_BYTES = 1 << 20
_REPEATS = 200  # of our closed form, whose one evaluation is too short to time
_PLAN = {
    "sites": {
        "attention_in": "shard_p2p",
        "attention_out": "uniform_fused_1d num_chunks=4 comm_engine=cu comm_cus=24",
        "ffn_in": "hetero_fused_1d num_chunks=4",
        "ffn_in_backward": "c3_sp comm_cus=8",
    },
    "parallel": {"tp": 8, "sequence_parallel": True, "collectives": "in_switch", "reductions": "beside"},
}


def measured_rows(data: Path) -> dict[CollectiveKind, MeasuredRows]:
    """MeasuredRows of each collective from 1 MiB on that our constants were not fitted on. Raises ConfigError."""
    return _rows_in(*sorted(data.rglob(_TABLE))[:1] or [data / _TABLE])


def _rows_in(path: Path) -> dict[CollectiveKind, MeasuredRows]:
    rows: dict[CollectiveKind, MeasuredRows] = {}
    for part in read_collectives(path):
        for kind in KINDS:
            if part.kind == kind and part.device.lower().startswith(_DEVICE):
                fitted = fitted_names(_node(), part)
                large = (part.shape["gpus"] == _GPUS) & (part.shape["bytes"] >= _LEAST_BYTES)
                rows[kind] = part.take(large & np.array([name not in fitted for name in part.names]))
    return rows


def rates() -> dict[str, float]:
    """Collectives a second by every simulator that is there, of the sizes in the table that is shipped."""
    rows = _rows_in(ROOT / "conf" / "data" / "nccl_h100.csv")
    return {name: _errors(name, predict, rows)[2] for name, predict in _peers().items()}


@functools.cache
def _node() -> Node:
    return ScheduledDevice.of(tree_of(_SYSTEM)).node


def _ours(kind: CollectiveKind, rows: MeasuredRows) -> Floats:
    constants = constants_of(_node(), kind)
    assert constants is not None
    return cost_of_rows(constants, rows).seconds[:, 0]


def _by(engine: ForeignEngine, kind: CollectiveKind, rows: MeasuredRows) -> Floats:
    port = float(_node().link_bytes_per_s) * (_node().num_gpus - 1)
    return engine.collective_s(kind, rows.shape["bytes"], rows.shape["gpus"], port, _DEVICE)


def _peers() -> dict[str, Callable[[CollectiveKind, MeasuredRows], Floats]]:
    there: dict[str, Callable[[CollectiveKind, MeasuredRows], Floats]] = {"ours": _ours}
    for name in peers():
        engine = plugins.load("engine", name)
        if not engine.absence():
            there[name] = functools.partial(_by, engine)
    return there


def compare(data: Path) -> dict[str, Any]:
    """Median errors of every simulator that is there by collective, and points/s; one that fails is left out, and told.

    Raises ConfigError for a folder without the table.
    """
    rows, errors, absolute, rates = measured_rows(data), dict[str, Any](), dict[str, Any](), dict[str, float]()
    for name, predict in _peers().items():
        try:
            errors[name], absolute[name], rates[name] = _errors(name, predict, rows)
        except RuntimeError as error:
            print(f"{name} is left out: {error}", file=sys.stderr)
    return {
        "median_signed_error": errors,
        "median_error": absolute,
        "points": {kind: part.size for kind, part in rows.items()},
        "points_per_s": rates,
        "ours_over_astra_points_per_s": rates["ours"] / rates["astra_sim"] if "astra_sim" in rates else None,
        "exported_parse": exported_parse(),
    }


def _errors(
    name: str, predict: Callable[[CollectiveKind, MeasuredRows], Floats], rows: Mapping[CollectiveKind, MeasuredRows]
) -> tuple[dict[str, float], dict[str, float], float]:
    """Median signed error and median size of errors of a simulator by collective, and points/s."""
    count, taken, signed, sizes = 0, 0.0, dict[str, float](), dict[str, float]()
    repeats = _REPEATS if name == "ours" else 1
    with bar(f"peers {name}", len(rows), "collectives") as advance:
        for kind, part in rows.items():
            began = time.perf_counter()
            for _ in range(repeats):
                seconds = predict(kind, part)
            taken += time.perf_counter() - began
            count += repeats * part.size
            error = seconds / part.seconds[:, 0] - 1
            signed[kind], sizes[kind] = float(np.median(error)), float(np.median(np.abs(error)))
            advance(1)
    return signed, sizes, count / taken


def exported_parse() -> float:
    """Share of tools whose files are read back as the plan that they say; `dse_deploy.read_back` has those of steps."""
    same = []
    for tool in tools().values():
        if tool.files[0].format not in ("msccl", *STEP_FORMATS):
            once = nearest(tool, _PLAN, write_all(tool, _PLAN, "plan.yaml"))
            again = nearest(tool, once, write_all(tool, once, "plan.yaml"))
            same.append(dict(leaves_of(once)) == dict(leaves_of(again)))
    return sum(same) / len(same)


def _text(figures: Mapping[str, Any]) -> str:
    kinds = [kind for kind in KINDS if kind in figures["points"]]
    lines = [f"{'':16}" + "".join(f"{kind:>18}" for kind in kinds) + f"{'points/s':>12}"]
    for name, by_kind in figures["median_signed_error"].items():
        sizes = figures["median_error"][name]
        cells = "".join(f"{f'{100 * by_kind[kind]:+.1f} ({100 * sizes[kind]:.1f}) %':>18}" for kind in kinds)
        lines.append(f"{name:16}{cells}{figures['points_per_s'][name]:>12,.1f}")
    faster = figures["ours_over_astra_points_per_s"]
    lines.append(f"ours over ASTRA-sim, points/s: {'it is not there' if faster is None else f'{faster:,.0f}'}")
    lines.append(f"settings that are read back as they were written: {100 * figures['exported_parse']:.0f} %")
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> int:
    """Print the figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description="peers beside measured collectives")
    parser.add_argument("--data", type=Path, required=True, metavar="FOLDER", help=f"which holds {_TABLE}")
    parser.add_argument("--json", action="store_true", help="print JSON")
    asked = parser.parse_args(words)
    try:
        figures = compare(asked.data)
    except ConfigError as error:
        parser.error(str(error))
    print(json.dumps(figures, indent=2) if asked.json else _text(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
