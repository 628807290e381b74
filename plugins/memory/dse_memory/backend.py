"""The memory backend: an application's kernels, request by request, through the caches and DRAM of one GPU.

A design is a memory system, an application, which requests its caches keep, and how much is simulated. Kernels are
address traces by class (`dse_memory.traces`); what takes them is `dse_memory.engine`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from pydantic import BaseModel

from dse.backend import Backend, Batch, Columns, Interval, Metric, Replay, Result, Results, Tree
from dse.config.options import list_options
from dse.errors import Problem, Problems, did_you_mean, validate_as
from dse.space import get_path
from dse.space.blocks import problems
from dse.values import LABELS
from dse_memory.design import SECTIONS, MemoryDesign, rules
from dse_memory.engine import READS, WRITES
from dse_memory.measured import scenarios
from dse_memory.measures import LAWS, METRICS, SimulatedApplication, measure, simulate
from simulators.hardware.machine import reads
from simulators.hardware.memory_system import MemorySystem
from simulators.workloads.model_zoo import option_tree

_VERSION = "1"
_LISTS = {"applications": "applications=[fw_act,sgemm]", "measured": "measured=[p100]"}


class MemoryBackend(Backend):
    """Designs one by one; each takes milliseconds to seconds."""

    version = _VERSION
    metrics: Mapping[str, Metric] = METRICS
    laws = LAWS
    relations: Mapping[str, Metric] = {
        "speedup": Metric("x", "time_s of the baseline / time_s", "maximize"),
        "traffic": Metric("x", "dram_bytes / the baseline's"),
    }

    def sections(self, tree: Tree) -> None:
        """Check the sections, and perhaps lists: `applications`, names of options, each one a scenario;
        `measured`, memory systems of devices, each of whose measured convolutions is one (of the tables in `data_dir`).
        """
        check, sections = Problems(), (*SECTIONS, *_LISTS, "data_dir")
        for name in set(tree) - set(sections):
            check.add(name, "is not a known section", way_out=did_you_mean(name, sections))
        for name in SECTIONS:
            listed = name == "application" and any(tree.get(key) for key in _LISTS)
            if not isinstance(tree.get(name), Mapping) and not listed:
                check.add(name, "is no section of keys", value=tree.get(name), way_out=f"choose one: {name}=<option>")
        for name, way in _LISTS.items():
            names = tree.get(name) or []
            listed = isinstance(names, Sequence) and not isinstance(names, str)
            if not (listed and all(isinstance(entry, str) for entry in names)):
                check.add(name, "must be a list of names", value=names, way_out=way)
        check.done()

    def scenarios(self, tree: Tree) -> Mapping[str, Tree]:
        """The application of the configuration, or one scenario for each of `applications` and each convolution that
        was measured on the devices of `measured`.
        """
        base = {name: tree[name] for name in SECTIONS if name in tree}
        names, devices = (tree.get(name) or [] for name in _LISTS)
        if not names and not devices:
            return {str(tree["application"].get("name", "application")): base}
        check, trees = Problems(), dict[str, Tree]()
        _heard(check, tree.get("application"))
        for option in names:
            layer = option_tree("application", option)
            name = str(layer.get("name", option))
            if name in trees:
                check.add("applications", "names an application twice", value=option, way_out="list it once")
            trees[name] = {**base, "application": layer}
        check.done()
        convolutions = scenarios(devices, tree.get("data_dir")) if devices else {}
        return {**trees, **{name: {**base, **layer} for name, layer in convolutions.items()}}

    def design(self, tree: Tree) -> MemoryDesign:
        """A validated design. Raises ConfigError with every problem."""
        return validate_as(MemoryDesign, tree, path="")

    def problems(self, design: BaseModel) -> Sequence[Problem]:
        """Sizes that do not fit together."""
        assert isinstance(design, MemoryDesign)
        return problems(list(rules(design)))

    def condition(self, path: str, tree: Tree) -> Mapping[str, Any] | None:
        """Every value of a design may be searched."""
        searchable = path.partition(".")[0] in SECTIONS and path.rpartition(".")[2] not in LABELS
        section, _, name = path.partition(".")
        searchable = searchable and (section != "system" or reads(MemorySystem, name))
        searchable = searchable and get_path(tree, path) is not None
        return {} if searchable else None

    def evaluate(self, batches: Sequence[Batch]) -> list[Results]:
        """Simulate each design that breaks no rule."""
        return [Results.of([self._one(design) for design in batch.designs()]) for batch in batches]

    def _one(self, design: BaseModel) -> Result:
        assert isinstance(design, MemoryDesign)
        refused = self.refusal(design)
        if refused:
            return refused
        try:
            return Result("ok", measure(design, self.simulate(design)), engine="requests")
        except OverflowError as error:
            return Result("unsupported", reason=str(error))

    def simulate(self, design: MemoryDesign) -> SimulatedApplication:
        """Run a design that breaks no rule. Raises OverflowError where a kernel runs longer than the clock can tell."""
        return simulate(design)

    def relate(self, point: Columns, baseline: Columns) -> Columns:
        """Speed-up and traffic."""
        return {
            "speedup": baseline["time_s"] / point["time_s"],
            "traffic": point["dram_bytes"] / np.maximum(baseline["dram_bytes"], 1.0),
        }

    def replay(self, design: BaseModel) -> Replay:
        """Every kernel, and what bounds them."""
        assert isinstance(design, MemoryDesign)
        now, intervals, line = 0.0, list[Interval](), design.system.gpu.line_bytes
        for place, (cost, times) in enumerate(self.simulate(design).costs):
            begin, now = now, now + design.system.gpu.launch_s
            intervals += [Interval("kernels", f"launch {place}", "launch", begin, now)] if now > begin else []
            begin, now = now, now + cost.seconds * times
            moved = float(cost.totals[READS] + cost.totals[WRITES]) * line * times
            intervals.append(Interval("kernels", f"{cost.name} {place}", "gemm", begin, now, moved))
        return Replay(tuple(intervals), {})

    def facts(self, design: BaseModel) -> Sequence[tuple[str, Any, str, str]]:
        """Constants of the memory system with their sources."""
        assert isinstance(design, MemoryDesign)
        return list(design.system.facts_below("system"))


def _heard(check: Problems, application: object) -> None:
    """Values that were changed in a section that no scenario has, as `applications` or `measured` list them."""
    if not isinstance(application, Mapping) or application.get("name") not in list_options("application"):
        return
    shipped = option_tree("application", str(application["name"]))
    for name, value in application.items():
        if shipped.get(name) != value:
            rule = "means nothing where `applications` or `measured` list scenarios"
            way = f"search it: space.application.{name}='choice({value})'; or applications=null measured=null"
            check.add(f"application.{name}", rule, value=value, way_out=way)
