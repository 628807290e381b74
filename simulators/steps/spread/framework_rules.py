"""What a framework asserts when it starts, as rules of the software of a step (`conf/data/framework_rules.yaml`).

The section `stack` of a design names the software that its kernels are of; a design without it is bound by none of
these rules. A rule is a statement on products of quantities: that one divides another, covers it, or equals it; or that
a knob has one of some values. It counts where other knobs have the values that it names (`when`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache, reduce
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import Field

from dse.config.options import conf_dir, load_yaml
from dse.errors import Problems
from dse.space import get_path
from dse.space.blocks import Rule
from dse.values import Frozen, Provenance, put
from simulators.steps.overlap.implementations import GROUP, Mode, implementation, names_of
from simulators.workloads.model import Transformer

Integers = NDArray[np.int64]
Value = str | int | bool | None
_MOST_AWAY = 512  # how far from a number a legal one is looked for


class Stack(Frozen):
    """Software of a step: a framework with its kernels.

    tool: the framework, of `conf/data/frameworks.yaml`; None for none. gpus, modes: that it runs on, and in; all where
    none is named. candidates: whether choices are those that the framework has (`own`), or what others have as well.
    """

    name: str
    tool: str | None = None
    gpus: tuple[str, ...] = ()
    modes: tuple[Mode, ...] = get_args(Mode)
    candidates: Literal["own", "all"] = "own"


class FrameworkRule(Frozen):
    """A statement that a framework checks, or documents, of a configuration.

    path: of the knob that is refused. divisor, of: names of `QUANTITIES`, of which products are taken. values: that the
    knob may have. when: path -> values with which the rule counts; above: quantity -> the number that it exceeds then;
    software: implementations, of which a site has one then. stacks: those of the framework that it is of; all where
    none is named. rule: in words, after `path = value`.
    """

    path: str
    test: Literal["divides", "covers", "equals", "in"]
    divisor: tuple[str, ...] = ()
    of: tuple[str, ...] = ()
    values: tuple[Value, ...] = ()
    when: Mapping[str, tuple[Value, ...]] = {}
    above: Mapping[str, int] = {}
    software: tuple[str, ...] = ()
    stacks: tuple[str, ...] = ()
    rule: str
    way_out: str
    provenance: Provenance
    source: str = Field(min_length=1)

    def over(self, design: Any, tool: str) -> Iterator[Rule]:
        """Yield the rule over the designs of a grid, with the nearest legal value where there is one near."""
        if any(str(_lower(get_path(design, path))) not in map(_lower, values) for path, values in self.when.items()):
            return
        if self.software and not {software for _, software in _software_at(design)}.intersection(self.software):
            return
        broken = np.asarray(self._broken(design), np.bool_)
        for name, number in self.above.items():
            broken = broken & (_quantity(design, name) > number)
        numbers = (_product(design, self.of), _product(design, self.divisor))
        value, rule = get_path(design, self.path), f"{self.rule} ({tool} {self._basis})"
        nearest = self._nearest(design, value, broken)
        near = f"{self.way_out}: {self.path}={{2}} is the nearest"
        yield Rule(self.path, broken & (nearest > 0), rule, value, (*numbers, nearest), near)
        yield Rule(self.path, broken & (nearest == 0), rule, value, numbers, self.way_out)

    def _nearest(self, design: Any, value: Any, broken: NDArray[np.bool_]) -> Integers:
        """The nearest value of the knob with which each design that breaks the rule keeps it; 0 where none is near."""
        nearest = np.zeros(np.broadcast_shapes(np.shape(value), broken.shape), np.int64)
        if self.test == "in" or np.asarray(value).dtype.kind not in "iu":
            return nearest
        left = broken | np.zeros_like(nearest, np.bool_)
        for away, side in itertools.product(range(1, _MOST_AWAY), (-1, 1)):
            if not left.any():
                break
            other = np.asarray(value, np.int64) + side * away
            legal = left & (other > 0) & ~np.asarray(self._broken(put(design, self.path, other)), np.bool_)
            nearest, left = np.where(legal, other, nearest), left & ~legal
        return nearest

    @property
    def _basis(self) -> str:
        return "asserts it" if self.provenance == "vendor" else "is known to need it"

    def _broken(self, design: Any) -> ArrayLike:
        if self.test == "in":
            return _lower(get_path(design, self.path)) not in map(_lower, self.values)
        whole, part = (_product(design, names) for names in (self.of, self.divisor))
        if self.test == "divides":
            return np.not_equal(whole % np.maximum(part, 1), 0)
        return np.less(whole, part) if self.test == "covers" else np.not_equal(whole, part)


def _stage_layers(design: Any) -> Any:
    """Layers that pipelines split: with both ends, where these count."""
    return np.asarray(design.model.layers) + (2 if design.parallel.ends == "layers" else 0)


def _experts(design: Any) -> Any:
    return 0 if design.model.moe is None else design.model.moe.experts


def _tokens(design: Any) -> Any:
    """Tokens of a micro-batch."""
    return np.asarray(design.run.batch) * (1 if design.run.mode == "decode" else np.asarray(design.run.sequence_length))


QUANTITIES: Mapping[str, Callable[[Any], Any]] = {
    "one": lambda design: 1,
    "two": lambda design: 2,
    "three": lambda design: 3,
    "sixteen": lambda design: 16,
    "tp": lambda design: design.parallel.tp,
    "pp": lambda design: design.parallel.pp,
    "dp": lambda design: design.parallel.dp,
    "cp": lambda design: design.parallel.cp,
    "ep": lambda design: design.parallel.ep,
    "etp": lambda design: design.parallel.etp,
    "zero": lambda design: design.parallel.zero,
    "virtual_stages": lambda design: design.parallel.virtual_stages,
    "stages": lambda design: np.asarray(design.parallel.pp) * _virtual(design),
    "layers": _stage_layers,
    "heads": lambda design: design.model.num_heads,
    "kv_heads": lambda design: design.model.num_kv_heads,
    "hidden": lambda design: design.model.hidden,
    "ffn": lambda design: design.model.width_of_ffn,
    "experts": _experts,
    "sequence": lambda design: design.run.sequence_length,
    "tokens": _tokens,
    "micro_batches": lambda design: design.run.micro_batches,
}
"""Name -> quantity of a design, which may be an array over a grid of designs."""


def _virtual(design: Any) -> Any:
    return design.parallel.virtual_stages if design.parallel.pipeline == "interleaved" else 1


def _quantity(design: Any, name: str) -> Integers:
    return np.asarray(np.round(np.asarray(QUANTITIES[name](design), float)), np.int64)


def _product(design: Any, names: Sequence[str]) -> Integers:
    return reduce(np.multiply, (_quantity(design, name) for name in names), np.ones((), np.int64))


def _lower(value: Any) -> str:
    return str(value).lower()


@cache
def framework_rules() -> Mapping[str, tuple[FrameworkRule, ...]]:
    """Rules by the name of a tool. Raises ConfigError."""
    tree, check = load_yaml(conf_dir() / "data" / "framework_rules.yaml"), Problems()
    read = {
        tool: [check.model(FrameworkRule, entry, path=f"rules.{tool}.{place}") for place, entry in enumerate(entries)]
        for tool, entries in tree["rules"].items()
    }
    check.done()
    return {tool: tuple(rule for rule in rules if rule is not None) for tool, rules in read.items()}


_OTHERS = "take another stack=<software>; `python -m dse plan` chooses one by the mode and the machine"


def stack_rules(design: Any) -> Iterator[Rule]:
    """Rules of the software of a design: where it runs, what its framework asserts, and which overlaps it has."""
    stack = design.stack
    if stack is None:
        return
    gpu, mode = design.system.gpu.name, design.run.mode
    on = f"stack={stack.name} does not run on it: it runs on {', '.join(stack.gpus)}"
    yield Rule("system.gpu.name", bool(stack.gpus) and gpu in names_of("gpu") - {*stack.gpus}, on, gpu, (), _OTHERS)
    runs = f"is not a mode of stack={stack.name}, which runs {' and '.join(stack.modes)}"
    yield Rule("run.mode", mode not in stack.modes, runs, mode, (), _OTHERS)
    if not isinstance(design.model, Transformer):
        return
    for rule in framework_rules().get(stack.tool or "", ()):
        if (rule.stacks and stack.name not in rule.stacks) or (rule.test == "in" and stack.candidates == "all"):
            continue
        yield from rule.over(design, stack.tool or "")
    if stack.tool is not None and stack.candidates == "own":
        yield from _site_rules(design, stack)


def _site_rules(design: Any, stack: Stack) -> Iterator[Rule]:
    """Overlaps at sites are those of the framework."""
    for site, name in _software_at(design):
        software = implementation(name)
        if software is None:
            continue
        rule = f"is not part of {stack.tool} (stack={stack.name})"
        elsewhere = stack.tool not in software.frameworks
        yield Rule(f"sites.{site}", elsewhere, rule, software.name, (), "write candidates=all, or take another stack")


def switched_together(stack: Any, schedules: Iterable[Any]) -> Mapping[str, tuple[str, ...]]:
    """What the software of some schedules switches at several sites at once -> these sites.

    stack: of a design, or its tree; None for none. Nothing is switched where a site may have any software.
    """
    if get_path(stack, "tool") is None or get_path(stack, "candidates") == "all":
        return {}
    names = {name for schedule in schedules if (name := _software_of(schedule)) in names_of(GROUP)}
    implementations = filter(None, map(implementation, sorted(names)))
    return {name: sites for software in implementations for name, sites in software.switches.items()}


def switch_rules(design: Any, there: Collection[str]) -> Iterator[Rule]:
    """Yield rules that sites which a framework switches together have one schedule. there: sites of the step."""
    for site, name in _software_at(design):
        for switched, sites in switched_together(design.stack, [name]).items():
            unlike = [other for other in sites if other in there and not _is_at(design, other, name)]
            rule = f"is switched by {design.stack.tool} for all {switched} at once, and {{0}} have another schedule"
            way = f"set it at {', '.join(sites)}, or at none of them"
            text = " and ".join(f"sites.{other}" for other in unlike)
            yield Rule(f"sites.{site}", site in sites and bool(unlike), rule, name, (text,), way)


def _is_at(design: Any, site: str, name: str) -> bool:
    return _software_of(design.sites.get(site)) == name


def _software_at(design: Any) -> Iterator[tuple[str, str]]:
    """Yield each site with the name of its schedule, which may be that of an implementation."""
    for site, schedule in getattr(design, "sites", {}).items():
        yield site, _software_of(schedule)


def _software_of(schedule: Any) -> str:
    """The name of a schedule, or of the text that says it."""
    return str(getattr(schedule, "name", schedule)).partition(" ")[0]
