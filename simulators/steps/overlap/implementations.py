"""Software that overlaps GEMMs and collectives (`conf/implementation`): schedules, their costs, and the command.

A schedule says what runs beside what; barriers, time of the host, tiles and rates belong to the software that runs it.
At a site the name of an implementation stands for its schedule in the order of the site (`sites.ffn_in=flux`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, get_args

import numpy as np
from numpy.typing import ArrayLike
from pydantic import Field, model_validator

from dse import plugins
from dse.config.options import list_options
from dse.errors import ConfigError, Problem, did_you_mean, validate_as
from dse.results.run_folder import CommandAnswer
from dse.space.blocks import Rule
from dse.values import Frozen, Source
from dse.values.units import Bytes, Integer, Number, Seconds, with_prefix
from simulators.hardware.machine import merged
from simulators.hardware.parts import Precision
from simulators.workloads.model_zoo import option_tree

if TYPE_CHECKING:
    from rich.table import Table


Place = Literal["before", "after", "beside"]
Mode = Literal["training", "prefill", "decode"]
GROUP = "implementation"
FORMATS = {"mixed": "fp16", "fp16_storage": "fp32", "fp8_block": "fp8"}
"""Precision of a run -> format of the inputs of its GEMMs, where the names differ."""


class LeastSize(Frozen):
    """Sizes from which software overlaps by itself: columns of the tensor, and its bytes for each GPU, by GPU."""

    columns: int = 0
    bytes_per_gpu: Mapping[str, Bytes] = {}


class ExpertKernel(Frozen):
    """One kernel that exchanges rows of experts by tiles and multiplies them (`simulators.costs.tile_pipeline`).

    splits: of experts that it is for, each over GPUs (`tensor`), or among them (`expert`). tile_rows: rows of a tile.
    num_sms: SMs that its communication holds beside the products; None: as many as those of the library of exchanges.
    gathers, scatters: what moves a layer's tokens where each expert is split over GPUs, and its sums: copy engines,
    stores of the workgroups that multiply, or kernels; shard by shard, of which a GPU has one.
    serial: no kernel at all, but one after the other: expert_s of the host for each expert, which waits for the GPU,
    and rows_before, rows_after: how often routed rows pass through memory before products, and after them.
    """

    splits: tuple[Literal["tensor", "expert"], ...] = ("expert",)
    tile_rows: Annotated[Integer, Field(ge=1, le=4096)] = 128
    num_sms: Annotated[Integer | None, Field(ge=0, le=4096)] = None
    gathers: Literal["dma", "store", "cu"] = "cu"
    scatters: Literal["dma", "store", "cu"] = "cu"
    serial: bool = False
    expert_s: Annotated[Seconds, Field(le=1)] = 0.0
    rows_before: Annotated[Number, Field(ge=0, le=1000)] = 0.0
    rows_after: Annotated[Number, Field(ge=0, le=1000)] = 0.0


class Implementation(Frozen):
    """An implementation.

    schedules: option of the group `schedule`, and values of its knobs, by the place of the collective: before or after
    the GEMM that it belongs to, or beside another. experts: its kernel of experts, or how it has them one after
    another; None for none. frameworks: that it is part of. gpus: that it runs on, and precisions; all where none is
    named. fitted_on: rows that constants were fitted on, by their cells, and which. unseen: what they are taken as
    where no row was seen. least: size below which it leaves a site serial. switches: sites that its framework overlaps
    together or not at all, by the name of what is switched.
    """

    name: str
    description: str
    frameworks: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()
    precisions: tuple[Precision, ...] = ()
    modes: tuple[Mode, ...] = get_args(Mode)
    schedules: Mapping[Place, Mapping[str, Any]] = {}
    experts: ExpertKernel | None = None
    fitted_on: tuple[Mapping[str, Any], ...] = ()
    unseen: Mapping[str, Any] = {}
    least: LeastSize = LeastSize()
    switches: Mapping[str, tuple[str, ...]] = {}
    sources: Mapping[str, Source] = {}

    @model_validator(mode="after")
    def _overlaps_something(self) -> Self:
        if not self.schedules and self.experts is None:
            raise ValueError("overlaps nothing: give schedules, or experts")
        return self

    def tree(self, place: Place, *, knobs: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Tree of the schedule at a place. Raises ConfigError.

        knobs: in place of those that it has; None for what the option of the schedule has.
        """
        if place not in self.schedules:
            there = " and ".join(self.schedules) or "beside experts (parallel.exchanges=one_kernel)"
            rule, way = f"has no schedule of a collective {place} its GEMM", f"use it where the collective is {there}"
            raise ConfigError([Problem("", rule, self.name, way)])
        own = dict(self.schedules[place])
        own |= {name: value for name, value in (knobs or {}).items() if name in own}
        option = option_tree("schedule", str(own.pop("schedule")))
        chosen = {name: value for name, value in own.items() if value is not None}
        return {**merged(option, chosen), "name": self.name}

    def fits(self, knob: str) -> bool:
        """Return whether a knob was fitted on rows, here or where it was copied from."""
        copied = (name for name, source in self.sources.items() if source.copy_of is not None)
        fitted = (word for row in self.fitted_on for word in str(row["fits"]).split(", "))
        return knob in fitted or any(name.rpartition(".")[2] == knob for name in copied)

    def refusal(self, gpu: str, precision: str, mode: Mode) -> str | None:
        """Reason why it does not run on a GPU at a precision; None if it does, or if the GPU is not known here."""
        if mode not in self.modes:
            return f"does not run in {mode}; it runs in {' and '.join(self.modes)}"
        if self.gpus and gpu not in self.gpus and gpu in names_of("gpu"):
            return f"does not run on {gpu}; it runs on {', '.join(self.gpus)}"
        if self.precisions and precision not in self.precisions:
            return f"does not multiply {precision}; it multiplies {', '.join(self.precisions)}"
        return None

    def size_rule(self, path: str, gpu: str, *, columns: ArrayLike, bytes_per_gpu: ArrayLike) -> Rule:
        """Rule that a tensor is as large as the software needs. bytes_per_gpu: of the tensor over the GPUs."""
        least = self.least.columns, float(self.least.bytes_per_gpu.get(gpu, 0))
        broken = np.less(columns, least[0]) | np.less(bytes_per_gpu, least[1])
        rule = f"leaves a site serial below {least[0]} columns, or {with_prefix(least[1], 'byte')} a GPU"
        return Rule(path, broken, rule, self.name, way_out="take another implementation, or serial")


@plugins.cached_until_refresh
def names_of(group: str) -> frozenset[str]:
    """Names of the options of a group; asked for at every point of a plan."""
    return frozenset(list_options(group))


@plugins.cached_until_refresh
def implementation(name: str) -> Implementation | None:
    """The implementation of a name, or of a YAML file with `schedules`; None for another name. Raises ConfigError."""
    if name not in names_of(GROUP) and not Path(name).is_file():
        return None
    tree = option_tree(GROUP, name)
    described = {"schedules", "experts"} & tree.keys()
    return validate_as(Implementation, tree, path=f"{GROUP}/{name}") if described else None


def kernels_of_experts() -> tuple[Implementation, ...]:
    """Implementations with one kernel for a layer whose experts are spread over GPUs, by name."""
    every = filter(None, map(implementation, sorted(names_of(GROUP))))
    kernels = ((software, software.experts) for software in every if software.experts is not None)
    return tuple(software for software, kernel in kernels if "expert" in kernel.splits and not kernel.serial)


def kernel_of_experts(gpu: str, precision: str, mode: Mode) -> Implementation | None:
    """The first of these by name that runs on a GPU at a precision in a mode; None where none does."""
    where = gpu, FORMATS.get(precision, precision), mode
    return next((software for software in kernels_of_experts() if software.refusal(*where) is None), None)


def list_implementations(words: Sequence[str]) -> CommandAnswer:
    """`implementations [<name> ...]`: all in a table, or those named with each constant and its source.

    Raises ConfigError.
    """
    names = list(list_options(GROUP))
    for word in words:
        if word not in names:
            raise ConfigError([Problem(word, "is no implementation", way_out=did_you_mean(word, names))])
    chosen = [software for name in (words or names) if (software := implementation(name)) is not None]
    if words:
        parts = [part for software in chosen for part in (_head(software), _sources(software))]
        return CommandAnswer(Path(), tuple(parts))
    hint = "`python -m dse implementations <name>` shows the source of each constant; sites.ffn_in=<name> takes one"
    return CommandAnswer(Path(), (_table(chosen), hint))


def _table(chosen: Sequence[Implementation]) -> Table:
    from rich.table import Table

    shown = Table(title=f"Software that overlaps a GEMM and its collective ({GROUP})")
    for name in ("name", "software", "GPUs", "formats", "schedules", "constants"):
        shown.add_column(name, overflow="fold")
    for software in chosen:
        counts = Counter(source.provenance for source in software.sources.values())
        known = ", ".join(f"{count} {kind}" for kind, count in counts.most_common())
        gpus, formats = (", ".join(values) or "all" for values in (software.gpus, software.precisions))
        schedules = "\n".join(f"{place}: {tree['schedule']}" for place, tree in software.schedules.items())
        schedules = schedules or "experts"
        shown.add_row(software.name, software.description, gpus, formats, schedules, known)
    return shown


def _head(software: Implementation) -> str:
    rows = f"; fitted on {len(software.fitted_on)} measured rows" if software.fitted_on else ""
    return f"{software.name}: {software.description}; in {', '.join(software.modes)}{rows}"


def _sources(software: Implementation) -> Table:
    from rich.table import Table

    shown = Table("constant", "value", "known", "source")
    tree = software.model_dump(mode="json")
    for path, source in software.sources.items():
        shown.add_row(path, _value(tree, path), source.provenance, source.source)
    return shown


def _value(tree: dict[str, Any], path: str) -> str:
    """The value at a path; what lies below it is shown at its own path."""
    node: Any = tree
    for name in path.split("."):
        node = node.get(name) if isinstance(node, dict) else None
    if isinstance(node, list):
        return ", ".join(map(str, node))
    return "" if node is None or isinstance(node, dict) else str(node)
