"""Software that a plan runs in: its kernels, what it overlaps by itself, and which of them a run takes unless told.

An option of the group `stack` picks an option of `kernels` and names a tool of `conf/data/frameworks.yaml`, whose
defaults are what the software does where nothing is set.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from dse.config.options import conf_dir, load_yaml
from dse.space import get_path
from simulators.steps.choices import OFF
from simulators.workloads.public_models import aliases
from studies.plan.frameworks import tool_facts

_OF_RUN: Mapping[str, tuple[str, str]] = {"training": ("megatron_2026", "primus")}
"""Mode of a run -> software on NVIDIA's machines, and on AMD's."""
_OF_OTHERS = ("vllm", "vllm_rocm")
_NONE = "ideal"


def stack_words(typed: Sequence[str]) -> list[str]:
    """The override that chooses software for a run, by its mode and its machines; none where it is typed.

    Kernels that are typed are of no software.
    """
    values = {word.partition("=")[0]: word.partition("=")[2] for word in typed}
    if "stack" in values:
        return []
    if "kernels" in values:
        return [f"stack={_NONE}"]
    machines = values.get("system", "").strip("[]").split(",")
    of_amd = all(name.strip().startswith("mi") for name in machines)
    return [f"stack={_OF_RUN.get(values.get('run.mode', ''), _OF_OTHERS)[of_amd]}"]


def defaults_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Knobs of a step -> their values as the software of a run comes; {} where it has none, or none of its own."""
    tool = get_path(config, "stack.tool")
    if tool is None or get_path(config, "stack.kernels") != get_path(config, "kernels.name"):
        return {}
    return {**OFF, **{path: value for path, value in tool_facts()[tool].values.items() if path in OFF}}


def named(config: Mapping[str, Any]) -> str:
    """The software of a run by its name."""
    return str(get_path(config, "stack.name"))


def software_line(config: Mapping[str, Any]) -> str:
    """The software whose kernels a run has, and the table that its constants were fitted on; "" for kernels of none."""
    stack = config.get("stack") or {}
    if not stack or stack["kernels"] != get_path(config, "kernels.name"):
        return ""
    return f"software: {stack['description']} (stack={stack['name']}), fitted on {stack['fitted_on']}"


def measured_line(design: Mapping[str, Any]) -> str:
    """What was measured and published of the same configuration; empty where `steps_measured.yaml` has nothing.

    design: the tree of a step. Layout and batch of the published step may be others.
    """
    run = design["run"]
    if run.get("mode", "training") != "training":
        return ""
    table = load_yaml(conf_dir() / "data" / "steps_measured.yaml")
    degrees = (int(design["parallel"].get(name, 1)) for name in ("tp", "pp", "dp", "cp"))
    wanted = {
        "model": aliases().get(design["model"]["name"], design["model"]["name"]),
        "gpu": get_path(design, "system.gpu.name"),
        "gpus": math.prod(degrees),
        "products": run.get("products"),
        "sequence_length": run["sequence_length"],
    }
    for row in table["steps"]:
        same = {**row, "model": aliases().get(row["model"], row["model"])}
        if all(same[name] == value for name, value in wanted.items()):
            of = table["tables"][row["of"]]
            return f"measured: {row['tokens_per_s_per_gpu']:,.0f} tokens/s a GPU by {of['title']} ({of['source']})"
    return ""
