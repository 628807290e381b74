"""Choices of a step: what it may overlap, and values of knobs where it overlaps nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from simulators.steps.sites import SERIAL, SITES

CHOICES: Mapping[str, Mapping[str, Any]] = {
    **{name: {f"sites.{name}": SERIAL} for name in SITES},
    "tokens": {"parallel.sequence_parallel": False},
    "sums": {"parallel.collectives": "library"},
    "halves of prompts": {"parallel.split_ctas": 0},
    "gradients": {"parallel.reductions": "after"},
    "sums during weight gradients": {"parallel.backward_sums": "waited"},
    "split weights": {"parallel.prefetch": False},
    "kept weights": {"parallel.reshard": True},
    "update": {"optimizer.in_backward": False},
    "pipeline": {"parallel.pipeline": "1f1b", "parallel.virtual_stages": 1},
    "exchanges of experts": {"parallel.exchanges": "waited"},
    "messages": {"parallel.messages": "waited"},
}
"""What a step may overlap: name of a choice -> its knobs with their values where nothing is done."""
OFF: Mapping[str, Any] = {path: value for knobs in CHOICES.values() for path, value in knobs.items()}
"""Every knob of these -> its value where nothing is done."""
DECIDING = ("tokens", "sums", "halves of prompts", "exchanges of experts")
"""Choices that sites, or others that decide of sites, need."""
