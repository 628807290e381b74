"""Choices of a step: what it may overlap, values of knobs where it overlaps nothing, and conditions of its knobs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from dse.backend import Tree
from dse.values import AtLeast, AtMost
from simulators.steps.design import NONE
from simulators.steps.operators.quantised_weights import OF_PIM
from simulators.steps.overlap.sites import SERIAL, SITES
from simulators.steps.spread.framework_rules import switched_together

CHOICES: Mapping[str, Mapping[str, Any]] = {
    **{name: {f"sites.{name}": SERIAL} for name in SITES},
    "sequence parallelism": {"parallel.sequence_parallel": False},
    "all-reduce": {"parallel.collectives": "library"},
    "two micro-batches of tokens": {"parallel.split_ctas": 0},
    "gradient reduction": {"parallel.reductions": "after"},
    "backward sums": {"parallel.backward_sums": "waited"},
    "weight prefetch": {"parallel.prefetch": False},
    "resharding": {"parallel.reshard": True},
    "optimizer step": {"optimizer.in_backward": False},
    "pipeline schedule": {"parallel.pipeline": "1f1b", "parallel.virtual_stages": 1},
    "expert all-to-all": {"parallel.exchanges": "waited"},
    "pipeline messages": {"parallel.messages": "waited"},
}
"""What a step may overlap: name of a choice -> its knobs with their values where nothing is done."""
OFF: Mapping[str, Any] = {path: value for knobs in CHOICES.values() for path, value in knobs.items()}
"""Every knob of these -> its value where nothing is done."""

DECIDING = ("sequence parallelism", "all-reduce", "two micro-batches of tokens", "expert all-to-all")
"""Choices that sites, or others that decide of sites, need."""


def choices_with(stack: Any, schedules: Iterable[Any]) -> Mapping[str, Mapping[str, Any]]:
    """Choices of a step, of which sites that the software of some schedules switches together are one.

    stack: of a design, or its tree; None for none.
    """
    switches = switched_together(stack, schedules)
    together = {site for sites in switches.values() for site in sites}
    at_once = {name: {f"sites.{site}": SERIAL for site in sites} for name, sites in switches.items()}
    return {**at_once, **{name: knobs for name, knobs in CHOICES.items() if name not in together}}


_SEVERAL = AtLeast(2)
_TRAINING = {"run.mode": "training"}
CONDITIONS: Mapping[str, Mapping[str, Any]] = {
    "parallel.split_ctas": {"parallel.tp": _SEVERAL, "run.mode": "prefill"},
    "parallel.reductions": {**_TRAINING, "parallel.dp": _SEVERAL, "parallel.zero": AtMost(1)},
    "parallel.reshard": {"parallel.zero": 3},
    "parallel.prefetch": {"parallel.zero": 3},
    "parallel.pipeline": {"parallel.pp": _SEVERAL},
    "parallel.virtual_stages": {"parallel.pipeline": "interleaved"},
    "parallel.messages": {"parallel.pp": _SEVERAL},
    "parallel.ends": {"parallel.pp": _SEVERAL},
    "parallel.context": {"parallel.cp": _SEVERAL},
    "parallel.etp": {"parallel.ep": _SEVERAL},
    "parallel.shard_gpus": {**_TRAINING, "parallel.zero": AtLeast(1)},
    "parallel.exchanges": {"parallel.ep": _SEVERAL},
    "optimizer.in_backward": {**_TRAINING, "run.micro_batches": AtMost(1)},
}
"""Knob -> the values of others with which it changes something."""


_OF_TOOLS: Mapping[tuple[str, str | None], Mapping[str, Any]] = {
    ("parallel.messages", "megatron"): {"parallel.pipeline": "interleaved"}
}
"""Conditions that frameworks add: Megatron-LM overlaps messages between virtual stages alone
(`conf/data/framework_rules.yaml`).
"""


def condition_of(path: str, tree: Tree) -> Mapping[str, Any]:
    """Values of others with which a knob of a step counts."""
    section, _, name = path.partition(".")
    tool = (tree.get("stack") or {}).get("tool")
    if (path, tool) in _OF_TOOLS:
        return {**CONDITIONS[path], **_OF_TOOLS[path, tool]}
    if path in CONDITIONS:
        return CONDITIONS[path]
    if path == "run.sequence_length" and isinstance(tree.get("lengths"), Mapping):
        return {"lengths.name": NONE}
    of_memory = path == "system.gpu.staged_bytes" or path.startswith("system.gpu.pim.")
    of_pim = section == "instructions" or of_memory or (section == "quantised" and name in OF_PIM)
    return {"quantised.made_by": "pim"} if of_pim else {}
