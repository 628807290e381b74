"""One machine: a GPU with its parts, the node that it stands in, and the fabric between nodes.

A machine (`conf/system/<name>.yaml`) is composed of a GPU (`conf/gpu`), a node (`conf/node`) and a fabric
(`conf/fabric`). Every backend reads the same description, and of it the parts that its view declares.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, cast

import numpy as np
from pydantic import BaseModel, Field, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic_core import InitErrorDetails

from dse.config.options import conf_dir, list_options, option_file
from dse.config.variants import load_option, take_defaults
from dse.errors import MISSING, ConfigError, Problem, did_you_mean, validate_as
from dse.files import read_text
from dse.space import get_path
from dse.values import LABELS, knob
from dse.values.units import Bytes, FlopPerSecond, Fraction, Integer, Number
from simulators.hardware.network import Fabric, Node
from simulators.hardware.parts import (
    ABSENT,
    ELEMENT_BYTES,
    L1,
    L2,
    LACKS,
    AddressMapping,
    Bandwidth,
    Cache,
    Capacity,
    Contention,
    Count,
    CuCopy,
    Dma,
    Dram,
    Efficiency,
    GemmLibrary,
    Grown,
    LaunchTime,
    LoadedClock,
    MeasuredFormat,
    Part,
    PeakFormat,
    Persistent,
    Power,
    ShaderEngines,
    ShortTime,
    SourcedValue,
    StreamingRates,
    SwitchableCache,
    Tracker,
    WithoutCache,
    WithSources,
    is_fact,
)
from simulators.hardware.pim import Pim

Cus = Annotated[Integer, Field(ge=1, le=4096)]
Clock = Annotated[Number, Field(gt=0, le=4)]
Speed = Annotated[Number, Field(gt=0, le=1e3)]
Rates = Mapping[str, Annotated[FlopPerSecond, Field(ge=1e9)]]
GemmModel = Literal["waves", "fitted", "own"]
CollectiveModel = Literal["links", "library"]
SiteModel = Literal["uncontended", "fluid", "node"]
"""Models of a schedule at a site, from the coarsest to the finest."""

_FORMAT: Mapping[str, PeakFormat] = {"fp16_storage": "fp32", "mixed": "fp16", "mxfp8": "fp8", "fp8_block": "fp8"}
"""Precision -> format whose peak rate counts, where the names differ: 16-bit data may be computed in 32 bits."""
_BLOCK_SCALED = ("mxfp8", "nvfp4", "mxfp4")
_WIDER = ("fp8", "fp8_block", "bf16", "fp16")
_NEAREST: Mapping[str, tuple[str, ...]] = dict.fromkeys(("fp8", "fp8_block", *_BLOCK_SCALED), _WIDER)
"""Precision -> those whose constants it has, at its own peak, where nobody measured it; the nearest first."""


def peak_format(precision: str) -> str:
    """Format of inputs whose peak rate counts at a precision."""
    return "fp4" if precision.endswith("fp4") else _FORMAT.get(precision, precision)


class CostModels(Grown):
    """Names of the models of operators' costs, the same for all backends.

    gemm: `waves` (`simulators.costs.gemm.waves`: tiles of the library, sustained rates), `fitted`
    (`simulators.costs.gemm.fitted`: constants fitted to measured GEMMs, at precisions that have some, else waves) or
    `own` (likewise, constants that were fitted on this GPU alone). collective: `links`
    (`simulators.costs.transfer`: what CUs or copy engines move over the node's links) or `library`
    (`simulators.costs.collective`: what the library of collectives was measured to reach). sites: of a schedule at a
    site (`simulators.steps.overlap.sites`): the longest path without contention, one GPU that stands for all, or every
    GPU of a tp group, with unevenly sharded rows.
    """

    gemm: Annotated[Part[GemmModel], knob(structural=True)] = ABSENT
    collective: Annotated[Part[CollectiveModel], knob(structural=True)] = ABSENT
    sites: Annotated[Part[SiteModel], knob(structural=True)] = ABSENT


class Gpu(WithSources, Grown):
    """One GPU. A part of None is one that it lacks, or of which nothing is known.

    Data sheet: num_cus, num_links (to other GPUs), peak_flop_per_s (by the format of inputs, dense, of all of the
    peak_cus CUs; None: of num_cus), peak_hbm_bytes_per_s, hbm_bytes.

    Sustained, as kernels reach it: matrix_flop_per_s_per_cu (of one CU while all CUs are busy), flop_per_s (of all CUs,
    by the precision of an application that is simulated request by request), hbm_bytes_per_s (of which fitted constants
    are shares; None: of the data sheet's), stream_efficiency (share of it that streams of a few tensors reach; None:
    that of all devices); kernel_launch_s.

    As it runs: active_cus (None for all), clock (of the CUs and the last-level cache over the nominal one),
    disabled_cache, with the factors without_cache, and flop_vs_bw (speedup of everything on the GPU, arithmetic and
    memory, with unchanged links between GPUs: arXiv:2302.02825). 1 or None: as its data sheet says.

    Fitted: efficiency (constants of kernels by precision), fitted_on (precision -> kind -> names of rows), note (errors
    on other rows), measured_as (name of the GPU in measured tables).

    Kernels and engines: gemm, cu_copy, dma, shader_engines (None if workgroups are dispatched to any CU), contention,
    persistent, power, loaded. Memory: llc (the last-level cache, before the HBM), pim, tracker, staged_bytes (inputs
    not yet multiplied that tiles of products hold on the chip).

    Request by request: cycle_s (cycle of a CU, which issues one line in each), waves (capacity of a CU), in_flight
    (outstanding lines of a CU), launch_s (time from one kernel to the next), l1, l2, dram, mapping, line_bytes,
    page_bytes (alignment of tensors).
    """

    missing_way_out: ClassVar[str] = LACKS

    name: str = ""
    description: str = ""
    num_cus: Cus
    num_links: Annotated[Integer | None, knob(structural=True, ge=0, le=64)] = None
    active_cus: Cus | None = None
    clock: Part[Clock] = ABSENT
    disabled_cache: Annotated[SwitchableCache | None, knob(structural=True)] = None
    without_cache: Mapping[SwitchableCache, WithoutCache] | None = None
    flop_vs_bw: Part[Speed] = ABSENT
    peak_cus: Cus | None = None
    peak_flop_per_s: Part[Mapping[PeakFormat, Annotated[FlopPerSecond, Field(ge=1e9)]]] = ABSENT
    peak_hbm_bytes_per_s: Part[Bandwidth] = ABSENT
    hbm_bytes: Part[Capacity] = ABSENT
    matrix_flop_per_s_per_cu: Part[FlopPerSecond] = ABSENT
    flop_per_s: Part[Rates] = ABSENT
    hbm_bytes_per_s: Part[Bandwidth] = ABSENT
    stream_efficiency: Annotated[Fraction, Field(gt=0)] | None = None
    kernel_launch_s: Part[LaunchTime] = ABSENT
    measured_as: Part[str] = ABSENT
    efficiency: Part[Mapping[MeasuredFormat, Efficiency]] = ABSENT
    fitted_on: Part[Mapping[str, Mapping[str, tuple[str, ...]]]] = ABSENT
    note: Any = None
    gemm: Part[GemmLibrary] = ABSENT
    cu_copy: Part[CuCopy] = ABSENT
    dma: Part[Dma] = ABSENT
    contention: Part[Contention] = ABSENT
    persistent: Persistent | None = None
    power: Power | None = None
    loaded: LoadedClock | None = None
    llc: Cache | None = None
    pim: Pim | None = None
    tracker: Tracker | None = None
    shader_engines: ShaderEngines | None = None
    staged_bytes: Bytes | None = None
    cycle_s: Part[Annotated[ShortTime, Field(gt=0)]] = ABSENT
    waves: Part[Annotated[Integer, Field(ge=1, le=64)]] = ABSENT
    in_flight: Part[Count] = ABSENT
    launch_s: Part[ShortTime] = ABSENT
    l1: Part[L1] = ABSENT
    l2: Part[L2] = ABSENT
    dram: Part[Dram] = ABSENT
    mapping: Part[AddressMapping] = ABSENT
    line_bytes: Part[Annotated[Integer, Field(ge=32, le=256)]] = ABSENT
    page_bytes: Part[Annotated[Integer, Field(ge=256, le=2**30)]] = ABSENT

    @field_validator("efficiency")
    @classmethod
    def _has_the_peaks(
        cls, efficiency: Mapping[str, Efficiency] | None, info: ValidationInfo
    ) -> Mapping[str, Efficiency] | None:
        peaks = info.data.get("peak_flop_per_s")
        absent = [name for name in efficiency or () if peaks is not None and peak_format(name) not in peaks]
        if absent:
            raise ValueError(f"has constants for {', '.join(absent)}, whose rate peak_flop_per_s does not give")
        return efficiency

    @field_validator("line_bytes", "page_bytes")
    @classmethod
    def _is_a_power_of_two(cls, size: int | None) -> int | None:
        if size is not None and size & (size - 1):
            raise ValueError("must be a power of two")
        return size

    @property
    def as_described(self) -> Self:
        """The GPU as its data sheet says, with all CUs and caches at the nominal clock."""
        changed = {"active_cus": None, "clock": 1.0, "disabled_cache": None, "without_cache": None, "flop_vs_bw": 1.0}
        return self.model_copy(update=changed)

    @property
    def working_cus(self) -> int:
        """CUs that work."""
        return self.num_cus if self.active_cus is None else self.active_cus

    @property
    def overall_speed(self) -> float:
        """Speed of arithmetic and of memory over what the data sheet says: flop_vs_bw."""
        return 1.0 if self.flop_vs_bw is None else self.flop_vs_bw

    @property
    def cu_speed(self) -> float:
        """Speed of the CUs and of the last-level cache over what the data sheet says: clock times flop_vs_bw."""
        return self.overall_speed if self.clock is None else self.clock * self.overall_speed

    def peak(self, precision: str) -> float | None:
        """Peak rate [FLOP/s] of all CUs at a precision; None if the data sheet does not give it.

        Matrix units that scale blocks came with those of fp4.
        """
        sheets = {str(key): rate for key, rate in (self.peak_flop_per_s or {}).items()}
        sheet = None if precision in _BLOCK_SCALED and "fp4" not in sheets else sheets.get(peak_format(precision))
        # each CU has its rate, however many there are
        more = 1.0 if self.peak_cus is None else np.asarray(self.num_cus) / self.peak_cus
        return sheet if sheet is None or np.all(more == 1) else cast("float", sheet * more)  # or an array of them

    @property
    def stream_share(self) -> float:
        """Share of the HBM bandwidth that streams of a few tensors reach."""
        if self.stream_efficiency is not None:
            return self.stream_efficiency
        from simulators.hardware.shared import shared_constants

        return shared_constants().streamed_share

    @property
    def hbm_rate(self) -> Any:
        """HBM bandwidth [bytes/s] of which efficiencies are shares: as sustained, else of the data sheet."""
        return self.peak_hbm_bytes_per_s if self.hbm_bytes_per_s is None else self.hbm_bytes_per_s

    def peak_ratio(self, precision: str) -> float | None:
        """Peak rate at a precision over that at 16 bits; 1 if no peaks are known, None if those of one of both are."""
        if not self.peak_flop_per_s or precision in ("fp16", "mixed"):
            return 1.0
        peak, half = self.peak(precision), self.peak("fp16")
        return None if peak is None or half is None else peak / half

    def streaming(self, precision: str) -> Mapping[str, StreamingRates]:
        """Fitted constants of operators that memory bounds: at a precision, or at another one of elements as wide."""
        names = sorted(map(str, self.efficiency or {}), key=lambda name: name != precision)
        for name in names:
            fitted = self.constants(name)
            if fitted and fitted.streaming and ELEMENT_BYTES.get(name) == ELEMENT_BYTES[precision]:
                return {str(kind): constants for kind, constants in fitted.streaming.items()}
        return {}

    def constants(self, precision: str) -> Efficiency | None:
        """Constants of kernels at a precision, those of `stands_for` where none were fitted; None if there are none."""
        known = self.stands_for(precision)
        return None if known is None else {str(name): of for name, of in (self.efficiency or {}).items()}[known]

    def stands_for(self, precision: str) -> str | None:
        """Name of the precision whose constants count: its own, or the nearest measured one at the peak of its own."""
        near = _NEAREST.get(precision, ()) if self.peak(precision) is not None else ()
        return next((name for name in (precision, *near) if name in dict(self.efficiency or {})), None)


class System(SourcedValue, Grown):
    """A GPU, its node and the fabric. costs: models by which operators are costed.

    cost_weights (dotted path -> weight) and cost_reference define the cost proxy. node: None for a GPU alone. fabric:
    None for a single node.
    """

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.= -]{1,200}$")]
    description: str = ""
    gpu: Gpu
    node: Part[Node] = ABSENT
    fabric: Fabric | None = None
    costs: Part[CostModels] = ABSENT
    cost_weights: Part[Mapping[str, Annotated[Number, Field(ge=0, le=1e6)]]] = ABSENT
    cost_reference: Part[Mapping[str, Annotated[Number, Field(gt=0, le=1e20)]]] = ABSENT

    @model_validator(mode="before")
    @classmethod
    def _leave_out_empty_parts(cls, tree: Any) -> Any:
        """`node: {}` and `fabric: {}`, as the options `none` say, are no parts."""
        if not isinstance(tree, Mapping):
            return tree
        return {key: value for key, value in tree.items() if key not in ("node", "fabric") or value != {}}

    @field_validator("cost_weights")
    @classmethod
    def _weighs_own_numbers(
        cls, weights: Mapping[str, float] | None, info: ValidationInfo
    ) -> Mapping[str, float] | None:
        if weights is None:
            return None
        has_parts = info.data.get("gpu") is not None and info.data.get("node") is not None
        unknown = [path for path in weights if has_parts and not is_fact(get_path(info.data, path))]
        if unknown:
            raise ValueError(f"names {', '.join(unknown)}, no number of a system")
        if not sum(weights.values()) > 0:
            raise ValueError("must not all be zero: the cost proxy is their weighted mean")
        return weights

    @field_validator("cost_reference")
    @classmethod
    def _has_what_is_weighed(
        cls, reference: Mapping[str, float] | None, info: ValidationInfo
    ) -> Mapping[str, float] | None:
        absent = set(info.data.get("cost_weights") or ()) - set(reference or ())
        if absent:
            raise ValueError(f"has no value for {', '.join(sorted(absent))}, which cost_weights names")
        return reference

    def gemm_model(self, precision: str) -> GemmModel:
        """Model of GEMMs at a precision, `waves` or `fitted` (`CostModels`)."""
        gpu, named = self.gpu, self.costs.gemm
        fitted = gpu.constants(precision) is not None
        if named == "own":  # constants of another GPU do not count
            rows = {str(name): of for name, of in (gpu.fitted_on or {}).items()}
            fitted = fitted and "gemm" in rows.get(precision, {})
        return "fitted" if fitted and named != "waves" else "waves"

    def facts(self) -> list[tuple[str, Any, str, str]]:
        """(dotted path, value, provenance, source) of every constant."""
        return self.facts_below("system")


class View(System):
    """A machine as a backend sees it: what it does not read is dropped before validation, so that a design says nothing
    of it, and a key that no machine has is refused.

    needs: dotted paths of what it reads and must be there, below parts that are. presumes: values of what it reads and
    need not be given. reads: other paths that it reads beside labels; of a part without a path below it, all. most: the
    largest numbers that it takes. only_for: name of a cost model's kind -> model -> dotted paths that are read where
    this model is chosen (`costs`), and dropped elsewhere.
    """

    missing_way_out: ClassVar[str] = LACKS
    needs: ClassVar[tuple[str, ...]] = ()
    presumes: ClassVar[Mapping[str, Any]] = {}
    reads: ClassVar[tuple[str, ...]] = ()
    most: ClassVar[Mapping[str, int]] = {}
    only_for: ClassVar[Mapping[str, Mapping[str, tuple[str, ...]]]] = {}

    @classmethod
    def of(cls, tree: object, path: str = "system") -> Self:
        """Validate the tree of a machine. Raises ConfigError with every problem."""
        return validate_as(cls, tree, path=path)

    @model_validator(mode="before")
    @classmethod
    def _keep_what_is_read(cls, tree: Any) -> Any:
        if not isinstance(tree, Mapping):
            return tree
        own_tree = _read_of(cls, System, tree, "")
        for name, kind in _PARTS.items():
            if isinstance(own_tree.get(name), Mapping):
                own_tree[name] = _read_of(cls, kind, own_tree[name], f"{name}.")
        for path in _of_other_models(cls, own_tree):
            own_tree = _without(own_tree, path.split("."))
        return own_tree

    @model_validator(mode="after")
    def _is_not_too_large(self) -> Self:
        above = [
            InitErrorDetails(type="less_than_equal", loc=tuple(path.split(".")), input=value, ctx={"le": most})
            for path, most in self.most.items()
            if (value := get_path(self, path)) is not None and value > most
        ]
        if above:
            raise ValidationError.from_exception_data(type(self).__name__, above)
        return self


_PARTS: Mapping[str, type[BaseModel]] = {"gpu": Gpu, "node": Node, "costs": CostModels}


def _read_of(view: type[View], kind: type[BaseModel], tree: Mapping[str, Any], above: str) -> dict[str, Any]:
    """Pick what a view reads of the machine, or of a part of it, with what it presumes and marks of what it needs."""
    read = {
        name: value
        for name, value in tree.items()
        if value != {} and (name not in kind.model_fields or _may_read(view, f"{above}{name}"))
    }
    absent = {name: value for name, value in _values_where_absent(view, above).items() if read.get(name) is None}
    return read | absent


@cache
def _values_where_absent(view: type[View], above: str) -> Mapping[str, Any]:
    """Values that stand in a part for absent ones: those that a view presumes, and marks of those that it needs."""
    values = {**view.presumes, **dict.fromkeys(view.needs, MISSING)}
    return {path.removeprefix(above): value for path, value in values.items() if path.rpartition(".")[0] == above[:-1]}


def _of_other_models(kind: type[View], tree: Mapping[str, Any]) -> list[str]:
    """Dotted paths that only cost models read which a tree does not choose."""
    chosen, paths = tree.get("costs"), list[str]()
    for name, models in kind.only_for.items():
        named = chosen.get(name) if isinstance(chosen, Mapping) else getattr(chosen, name, None)
        model = named or kind.presumes[f"costs.{name}"]
        paths += [path for read in models.values() for path in read if path not in models.get(model, ())]
    return paths


def _without(tree: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Tree without the value at a path."""
    name, *below = names
    if not below:
        return {key: value for key, value in tree.items() if key != name}
    inner = tree.get(name)
    return {**tree, name: _without(inner, below)} if isinstance(inner, Mapping) else dict(tree)


def reads(kind: type[View], path: str, tree: Mapping[str, Any] | None = None) -> bool:
    """Return whether a view reads the value at a dotted path, in a tree by the cost models that it chooses."""
    others = () if tree is None else _of_other_models(kind, tree)
    return _may_read(kind, path) and not any(f"{path}.".startswith(f"{other}.") for other in others)


@cache
def _may_read(kind: type[View], path: str) -> bool:
    """Return whether a view reads the value at a dotted path where some cost models are chosen."""
    above, _, name = path.rpartition(".")
    paths, parts = _paths(kind)
    is_label = name in LABELS and (not above or above in parts)
    return is_label or path in parts or not paths.isdisjoint(_upwards(path))


@cache
def _paths(kind: type[View]) -> tuple[frozenset[str], frozenset[str]]:
    """Dotted paths of all that a view reads as a whole; and those with all that is above them."""
    paths = {*kind.needs, *kind.presumes, *kind.reads}
    above = {path.rpartition(".")[0] for path in paths}
    return frozenset(paths - above), frozenset(part for path in paths for part in _upwards(path))


def _upwards(path: str) -> list[str]:
    """A dotted path and those above it."""
    return list(accumulate(path.split("."), "{}.{}".format))


def tree_of(name: str, chosen: Mapping[str, object] | None = None) -> dict[str, Any]:
    """Composed tree of a system by name or by path, with options chosen for groups. Raises ConfigError."""
    path = option_file("system", name) or Path(name)
    if not path.is_file():
        way = f"{did_you_mean(name, list_options('system'))}; your own: --config-dir <folder that has system/>"
        raise ConfigError([Problem("system", "is neither a shipped system nor a YAML file", name, way)])
    return _composed(path, chosen or {})


def tree_of_gpu(name: str) -> dict[str, Any]:
    """Tree of a machine that is one shipped GPU (`conf/gpu/<name>.yaml`) and nothing else."""
    return {"name": name, "gpu": _read(conf_dir() / "gpu" / f"{name}.yaml")}


def _composed(path: Path, chosen: Mapping[str, object]) -> dict[str, Any]:
    """A file's tree over those of the systems and groups that its `defaults` name; its own values count."""
    tree, composed = _read(path), dict[str, Any]()
    entries = take_defaults(tree, path)
    named = {str(group): of for entry in entries if isinstance(entry, Mapping) for group, of in entry.items()}
    overrides = {group.partition("/")[2]: of for group, of in named.items() if group.startswith("override /")}
    for entry in entries:
        if isinstance(entry, str) and entry != "_self_":
            composed = merged(composed, tree_of(entry, {**overrides, **chosen}))
        for group in entry if isinstance(entry, Mapping) else ():
            section = str(group).strip("/")
            if not section.startswith("override "):
                composed = _with_option(composed, section, chosen.get(section, entry[group]), path)
    return merged(composed, tree)


def _with_option(composed: dict[str, Any], section: str, option: object, path: Path) -> dict[str, Any]:
    """A machine's tree with an option of a group, which fills its section or, as a network, several."""
    file = option_file(section, str(option))
    if file is None:
        way = did_you_mean(str(option), list_options(section))
        raise ConfigError([Problem(f"{path.name}: defaults", f"names no option of {section}", option, way)])
    tree, is_of_several = _read(file), read_text(file, str(file)).startswith("# @package system\n")
    for below in reversed(take_defaults(tree, file)):  # options that it is written on top of
        part = {} if below == "_self_" else _with_option({}, section, below, file)
        tree = merged(part.get(section, part), tree)
    return merged(composed, tree) if is_of_several else {**composed, section: tree}


def _read(path: Path) -> dict[str, Any]:
    tree = load_option(path)
    if not isinstance(tree, dict):
        raise ConfigError([Problem("system", "holds no keys", str(path))])
    return tree


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """One tree with the values of another put over it."""
    both = {key: value for key, value in below.items() if isinstance(value, dict) and isinstance(above.get(key), dict)}
    return {**below, **above, **{key: merged(value, above[key]) for key, value in both.items()}}
