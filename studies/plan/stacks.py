"""Software that a plan runs in: its kernels, what it overlaps by itself, and which of them a run takes unless told.

An option of the group `stack` picks an option of `kernels` and names a tool of `conf/data/frameworks.yaml`, whose
defaults are what the software does where nothing is set.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Literal, get_args

from dse.config.options import conf_dir, load_yaml, option_file
from dse.errors import Problems
from dse.space import get_path
from dse.values import Frozen
from simulators.hardware.machine import tree_of
from simulators.steps.plan.choices import OFF
from simulators.workloads.public_models import aliases

Mode = Literal["training", "prefill", "decode"]


class Default(Frozen):
    """What a tool does where nothing is set: a knob of a step and its value."""

    path: str
    value: str | int | bool
    provenance: Literal["vendor", "secondary", "memory"]
    source: str


class ToolFacts(Frozen):
    """A framework or library. framework: whether it runs models by itself. modes: of a run that it is for.

    defaults: what it does where nothing is set.
    """

    title: str
    framework: bool = False
    modes: tuple[Mode, ...] = get_args(Mode)
    defaults: tuple[Default, ...] = ()

    @property
    def name(self) -> str:
        """The title without what is added to it."""
        return self.title.partition(" (")[0].partition(",")[0]

    @property
    def values(self) -> dict[str, str | int | bool]:
        """Knobs -> their values where nothing is set."""
        return {default.path: default.value for default in self.defaults}


@cache
def tool_facts() -> dict[str, ToolFacts]:
    """Frameworks and libraries by name. Raises ConfigError."""
    check = Problems()
    read = {name: check.model(ToolFacts, entry, path=f"tools.{name}") for name, entry in _table()["tools"].items()}
    check.done()
    return {name: tool for name, tool in read.items() if tool is not None}


def ways() -> list[Mapping[str, Any]]:
    """Entries of schedules and knobs, each with the settings that come nearest today."""
    entries: list[Mapping[str, Any]] = _table()["frameworks"]
    return entries


def _table() -> Mapping[str, Any]:
    table: Mapping[str, Any] = load_yaml(conf_dir() / "data" / "frameworks.yaml")
    return table


_OF_RUN: Mapping[str, tuple[str, str]] = {"training": ("megatron_2026", "primus")}
"""Mode of a run -> software on NVIDIA's machines, and on AMD's."""
_OF_OTHERS = ("vllm", "vllm_rocm")
_OF_TOOL: Mapping[str, str] = {"torch": "torchtitan", "sglang": "sglang", "tensorrt_llm": "tensorrt_llm"}
"""Tool whose settings a plan was read from -> its software, for the modes and the GPUs that this is for."""
_NONE = "ideal"


def stack_words(typed: Sequence[str], tool: str = "") -> list[str]:
    """The override that chooses software for a run, by its mode and its machines; none where it is typed.

    tool: whose settings a plan was read from; the plan is then of its software. Kernels that are typed are of no
    software.
    """
    values = {word.partition("=")[0]: word.partition("=")[2] for word in typed}
    if "stack" in values:
        return []
    if "kernels" in values:
        return [f"stack={_NONE}"]
    machines = values.get("system", "").strip("[]").split(",")
    of_amd = all(name.strip().startswith("mi") for name in machines)
    mode = values.get("run.mode", "")
    if tool in _OF_TOOL and not of_amd and (tool == "torch") == (mode == "training"):
        return [f"stack={_OF_TOOL[tool]}"]
    return [f"stack={_OF_RUN.get(mode, _OF_OTHERS)[of_amd]}"]


def format_words(typed: Sequence[str]) -> list[str]:
    """Overrides for a model that is published in 8 bits, on machines that have them; none where formats are typed."""
    values = {word.partition("=")[0]: word.partition("=")[2] for word in typed}
    table = load_yaml(conf_dir() / "data" / "published_formats.yaml")["models"]
    known = table.get(aliases().get(values.get("model", ""), values.get("model", "")))
    machines = [name.strip() for name in values.get("system", "").strip("[]").split(",") if name.strip()]
    if known is None or not machines or not _FORMATS.isdisjoint(values):
        return []
    if not all(_multiplies(name, known["products"]) for name in machines):
        return []
    weights = [] if values.get("run.mode") == "training" else [f"run.weights={known['weights']}"]
    return [f"run.products={known['products']}", *weights]


_FORMATS = frozenset({"run.products", "run.precision", "run.weights"})


def _multiplies(machine: str, precision: str) -> bool:
    """Tell whether a shipped machine has a peak rate at a precision."""
    file = option_file("system", machine)
    return file is not None and precision in (get_path(tree_of(machine), "gpu.peak_flop_per_s") or {})


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
