"""Presets of user buffers held against our choice: `python -m benchmarks.presets [--presets <folder>] [--json]`.

Presets are named by what they are tuned for (userbuffers_bf16_h100_h12288_tp4_mbs1_seqlen2048): our choice for such a
step is the best plan that user buffers can say, on h100_8. Without a folder only our choices are printed, which are
predictions; with one of YAML files, `<name>.yaml` of layers, how many layers have the same method, and how many the
SMs of collectives within a factor of two.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from dse.errors import ConfigError
from dse_codesign.plans import PlanOptions, best_plans
from dse_deploy.user_buffers import UserBuffer, layers_of, read_layers
from simulators.hardware.device import ScheduledDevice
from simulators.hardware.machine import tree_of
from simulators.steps.backend import StepBackend
from simulators.steps.design import ScheduledDesign
from simulators.workloads.model_zoo import option_tree

NAMES = ("userbuffers_bf16_h100_h8192_tp4_mbs1_seqlen8192", "userbuffers_bf16_h100_h12288_tp4_mbs1_seqlen2048")
_NAME = re.compile(r"userbuffers_bf16_h100_h(\d+)_tp(\d+)_mbs(\d+)_seqlen(\d+)")
_SYSTEM = "h100_8"
_SMS, _PIECES = (2, 4, 8, 16, 24, 32), (2, 4, 8)
_WITHIN = 2.0


def choice(name: str) -> dict[str, UserBuffer]:
    """Our settings of layers for what a preset is tuned for, by its name. Raises ValueError for another name."""
    found = _NAME.fullmatch(name)
    if found is None:
        raise ValueError(f"{name}: names no preset of bf16 on H100")
    hidden, tp, batch, length = map(int, found.groups())
    system, design = ScheduledDevice.of(tree_of(_SYSTEM)), _step(hidden, tp, batch, length)
    plans = best_plans(design, _options(tp), lambda places: system, np.array([False]))
    plan = plans.plans[0] or {}
    return layers_of({site: text for site, text in plan.items() if site != "collectives"}, tp, fp8=False)


def _step(hidden: int, tp: int, batch: int, length: int) -> ScheduledDesign:
    """A step of training of GPT's proportions: heads of 128, a feed-forward layer four times as wide."""
    widths = {"layers": 8, "hidden": hidden, "heads": hidden // 128, "ffn": 4 * hidden, "vocab": 51200}
    run = {"mode": "training", "batch": batch, "sequence_length": length, "micro_batches": 1}
    tree = {
        "system": tree_of(_SYSTEM),
        "model": {**option_tree("model", "transformer"), "name": "gpt", **widths, "gated": False, "causal": True},
        "run": {**run, "precision": "bf16", "recompute": "none"},
        "parallel": {"tp": tp, "sequence_parallel": True},
        "optimizer": option_tree("optimizer", "adam"),
        "kernels": option_tree("kernels", "flash"),
        "sites": {},
    }
    design = StepBackend().design(tree)
    assert isinstance(design, ScheduledDesign)
    return design


def _options(tp: int) -> PlanOptions:
    """What user buffers can say of bf16."""
    by_sms = [f"comm_engine=cu comm_cus={sms}" for sms in _SMS]
    options: dict[str, tuple[str, ...]] = {
        "gathers": ("shard_p2p", f"hetero_fused_1d num_chunks={max(1, tp // 2)}"),
        "sums": ("shard_p2p", *(f"uniform_fused_1d num_chunks={count} {how}" for count in _PIECES for how in by_sms)),
        "beside": tuple(f"c3_sp comm_cus={sms}" for sms in _SMS),
    }
    sites = {"attention_in": "gathers", "ffn_in": "gathers", "attention_out": "sums", "ffn_out": "sums"}
    backward = {"gathers": "beside", "sums": "gathers"}
    sites |= {f"{name}_backward": backward[kind] for name, kind in sites.items()}
    return PlanOptions(sites={name: options[kind] for name, kind in sites.items()})


def agreement(ours: Mapping[str, UserBuffer], theirs: Mapping[str, UserBuffer]) -> tuple[int, int, int, int]:
    """Layers of both with the same method, their number; those whose SMs are within two of one another, and theirs."""
    both = [(ours[name], layer) for name, layer in theirs.items() if name in ours]
    methods = sum(mine.method == layer.method for mine, layer in both)
    sms = [(mine.num_sm, layer.num_sm) for mine, layer in both if mine.num_sm and layer.num_sm]
    return methods, len(both), sum(max(pair) <= _WITHIN * min(pair) for pair in sms), len(sms)


def compare(folder: Path | None) -> dict[str, Any]:
    """Our choices by preset; with a folder, shares of layers with the same method, and with SMs within a factor.

    Raises ValueError for a folder without presets, or with one of another name, and ConfigError for wrong layers.
    """
    files = sorted(folder.glob("*.yaml")) if folder else []
    if folder and not files:
        raise ValueError(f"{folder}: holds no preset, <name>.yaml")
    theirs = {path.stem: read_layers(yaml.safe_load(path.read_text("utf-8"))) for path in files}
    ours = {name: choice(name) for name in theirs or NAMES}
    figures: dict[str, Any] = {
        "choices": {name: {layer: each.tree for layer, each in layers.items()} for name, layers in ours.items()}
    }
    counts = np.zeros(4, int)
    for name, layers in theirs.items():
        counts += agreement(ours[name], layers)
    methods, both, close, sized = counts.tolist()
    figures["preset_methods_right"] = methods / both if both else None
    figures["preset_sms_within_2x"] = close / sized if sized else None
    return figures


def main(words: Sequence[str] | None = None) -> int:
    """Print the figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.presets", description=str(__doc__).splitlines()[0])
    parser.add_argument("--presets", type=Path, metavar="FOLDER", help="YAML files of layers, named as the presets")
    parser.add_argument("--json", action="store_true", help="print JSON")
    asked = parser.parse_args(words)
    try:
        figures = compare(asked.presets)
    except (ConfigError, ValueError, yaml.YAMLError) as error:
        parser.error(str(error))
    print(json.dumps(figures, indent=2) if asked.json else yaml.safe_dump(figures, sort_keys=False))
    return 0


if __name__ == "__main__":
    sys.exit(main())
