"""Residuals of predictions by facts that come before the answer, and draws of them (`conf/data/residuals`).

A residual is r = log(measured / predicted). A group of rows has the 5 %, 50 % and 95 % quantile of it, with the
finite-sample correction of split-conformal prediction (`dse_calibration.residual_groups`), so that

    predicted exp(low) ... predicted exp(high)

holds 90 % of the measurements. Groups are of a kind of work on a GPU, of a key (precision, operator, direction,
software) and of ranges of sizes. Draws take z, of a normal distribution, to r = median + z (high - median) / 1.645
above the median and likewise below it; z is shared in part by all operators of a kind:

    z = sqrt(common) z_kind + sqrt(1 - common) z_operator

The same names have the same z in every design, so that shared errors cancel in ratios. What no row was measured of has
the interval of the nearest group that has rows; a kind without any has a wide one, and is called a guess.

A group of rows says nothing of names that none of them has: another release, model, or number of GPUs. Each such trait
has a spread of its own (`Between`): how far rows of a new name are from the centre of the others, by a model of random
effects (`dse_calibration.residual_between`). Where a design has a name that no row has, each side of the interval is

    max(that of the group, those of the spreads of its new names)

since rows of several names show in a group what is between these, and a new name of one trait has its own of others.
What is added all operators of a kind share.
"""

from __future__ import annotations

import hashlib
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import chain
from pathlib import Path
from statistics import NormalDist
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from dse.config.options import conf_dir
from dse.errors import ConfigError, Problem
from dse.files import read_csv

Floats = NDArray[np.float64]
ResidualKind = Literal[
    "gemm", "elementwise", "attention", "collective", "exchange", "overlap", "host", "step", "tpot", "ttft", "power"
]
KINDS: tuple[ResidualKind, ...] = get_args(ResidualKind)
ANY = "any"
"""GPU of groups for GPUs that have no rows."""
UNTOLD = "untold"
"""Name of a trait that a design does not have, and that no row has either."""
LEVEL = 0.9
"""Share of measurements that an interval is to hold."""
ENDS = ((1 - LEVEL) / 2, (1 + LEVEL) / 2)
_Z = NormalDist().inv_cdf(ENDS[1])
_GUESS = 0.7  # log of about a factor of two either way: nothing was measured
_COMPARES: Mapping[str, Callable[[float, float], bool]] = {"<=": operator.le, ">": operator.gt}
_RANGE = re.compile(r"([a-z_]+)(<=|>)([0-9.e+-]+)")
COLUMNS = ("kind", "gpu", "key", "where", "rows", "low", "median", "high", "common", "basis", "source")
BETWEEN_COLUMNS = ("kind", "key", "trait", "names", "low", "high", "source")
BETWEEN_FILE = "between.csv"
_OF_GPU = ("gpus", "nodes")
"""Traits within a GPU: of one that has no rows, its own interval holds what they are off by."""


@dataclass(frozen=True)
class ResidualGroup:
    """Residuals of a group of rows. key: precision, operator, direction, software; where: ranges of sizes with `and`.

    gpu: names of the GPUs that the rows are of, or `any`.

    low, median, high: quantiles of log(measured / predicted). common: share of their variance that operators of one
    kind on a GPU have in common. basis: how it came about: `own` rows, `borrows ...`, or `guess`. unmeasured: traits of
    an asked design that no row has, whose components are in the interval, the largest one first.
    """

    kind: str
    gpu: str
    key: str = ""
    where: str = ""
    rows: int = 0
    low: float = -_GUESS
    median: float = 0.0
    high: float = _GUESS
    common: float = 0.5
    basis: str = "guess"
    source: str = "assumed: a factor of two either way"
    unmeasured: tuple[str, ...] = ()

    @property
    def is_guess(self) -> bool:
        """True if no measurement is behind it."""
        return self.basis == "guess"

    @cached_property
    def ranges(self) -> tuple[tuple[str, str, float], ...]:
        """Ranges of sizes as (name, comparison, bound)."""
        parts = [_RANGE.fullmatch(part) for part in self.where.split(" and ")] if self.where else []
        return tuple((part[1], part[2], float(part[3])) for part in parts if part)

    def holds(self, sizes: Mapping[str, float]) -> bool:
        """Tell whether an operator of these sizes belongs here; a size that is not given belongs to no range."""
        return all(name in sizes and _COMPARES[sign](sizes[name], bound) for name, sign, bound in self.ranges)

    def at(self, z: Floats) -> Floats:
        """Residuals at values of a standard normal variable."""
        side = np.where(z < 0, self.median - self.low, self.high - self.median)
        return np.asarray(self.median + side * z / _Z)

    def widened(self, components: Sequence[Between]) -> ResidualGroup:
        """The group for traits that no row has: as wide as their spreads; operators share what is added."""
        if not components:
            return self
        own = self.median - self.low, self.high - self.median
        reached = max(part.low for part in components), max(part.high for part in components)
        below, above = map(max, own, reached)
        before, after = own[0] ** 2 + own[1] ** 2, below**2 + above**2
        common = 1 - (1 - self.common) * before / after if after > 0 else self.common
        names = tuple(part.trait for part in sorted(components, key=lambda part: -part.low - part.high))
        low, high = self.median - below, self.median + above
        return replace(self, low=low, high=high, common=common, unmeasured=names)

    def interval(self, predicted: Any) -> tuple[Any, Any]:
        """Ends of the interval of a predicted time, or of another ratio scale."""
        return predicted * np.exp(self.low), predicted * np.exp(self.high)


@dataclass(frozen=True)
class Between:
    """How far rows of a new name of a trait are from the centre of those of the other names, their own spread included.

    key: of the rows, "" for all keys of the kind. names: those that rows have. low, high: distances, as logarithms,
    that 90 % of the rows of another name are within.
    """

    kind: str
    key: str
    trait: str
    names: frozenset[str]
    low: float
    high: float
    source: str = ""


@dataclass(frozen=True)
class Residuals:
    """Groups of residuals. of_machine: those of the machine that is asked about, which count before all others.

    between: components of what all rows of a group share.
    """

    groups: tuple[ResidualGroup, ...]
    of_machine: tuple[ResidualGroup, ...] = ()
    between: tuple[Between, ...] = ()

    def of(
        self,
        kind: str,
        gpu: str,
        key: str = "",
        sizes: Mapping[str, float] | None = None,
        traits: Mapping[str, str] | None = None,
    ) -> ResidualGroup:
        """The group of an operator, widened by the components of those of its traits that no row has.

        A trait that is not given is not looked at. Rows of the machine itself have all traits of it.
        """
        group = self._nearest(kind, gpu, key, sizes)
        if group in self.of_machine or group.is_guess:
            return group
        asked = {name: trait for name, trait in (traits or {}).items() if group.gpu != ANY or name not in _OF_GPU}
        of_key = [part for part in self.between if part.kind == kind and part.key in ("", key)]
        return group.widened([part for part in of_key if asked.get(part.trait, "") not in ("", *part.names)])

    def _nearest(self, kind: str, gpu: str, key: str, sizes: Mapping[str, float] | None) -> ResidualGroup:
        """The group of an operator: of this machine, of its GPU, of any GPU, or else a guess; the nearest first.

        Rows of another key of this machine (another precision, or way of a collective) come after those of this key on
        other machines with the GPU.
        """
        own, of_gpu, of_any = (
            self._of_machine.get(kind, ()),
            self._by.get((kind, gpu), ()),
            self._by.get((kind, ANY), ()),
        )
        for candidates, wanted in ((own, key), (of_gpu, key), (own, ""), (of_gpu, ""), (of_any, key), (of_any, "")):
            of_key = [group for group in candidates if group.key == wanted and group.holds(sizes or {})]
            if of_key:  # ranges come before the whole of a key
                return max(of_key, key=lambda group: len(group.ranges))
        return ResidualGroup(kind, gpu)

    @cached_property
    def _by(self) -> Mapping[tuple[str, str], Sequence[ResidualGroup]]:
        grouped: dict[tuple[str, str], list[ResidualGroup]] = {}
        for group in self.groups:
            for gpu in group.gpu.split():
                grouped.setdefault((group.kind, gpu), []).append(group)
        return grouped

    @cached_property
    def _of_machine(self) -> Mapping[str, Sequence[ResidualGroup]]:
        return {kind: [group for group in self.of_machine if group.kind == kind] for kind in KINDS}

    def with_own(self, groups: Sequence[ResidualGroup]) -> Residuals:
        """The same with groups of one machine, which count before all others."""
        return replace(self, of_machine=tuple(groups))


def residuals_folder() -> Path:
    """Folder of the shipped tables."""
    return conf_dir() / "data" / "residuals"


@cache
def shipped_residuals() -> Residuals:
    """Residuals of public tables, as shipped. Raises ConfigError for a table that cannot be read."""
    folder = residuals_folder()
    files = (file for file in sorted(folder.glob("*.csv")) if file.name != BETWEEN_FILE)
    return Residuals(tuple(chain.from_iterable(map(read_groups, files))), between=read_between(folder / BETWEEN_FILE))


def read_between(file: Path) -> tuple[Between, ...]:
    """The components of a table. Raises ConfigError."""
    return tuple(
        Between(
            cells["kind"],
            cells["key"],
            cells["trait"],
            frozenset(cells["names"].split("; ")),
            float(cells["low"]),
            float(cells["high"]),
            cells["source"],
        )
        for _, cells in read_csv(file, needed=BETWEEN_COLUMNS).rows
    )


def read_groups(file: Path) -> list[ResidualGroup]:
    """The groups of a table. Raises ConfigError."""
    groups = list[ResidualGroup]()
    for line, cells in read_csv(file, needed=COLUMNS).rows:
        low, median, high, common = map(float, map(cells.__getitem__, ("low", "median", "high", "common")))
        if not low <= median <= high:
            rule = "must have low <= median <= high"
            raise ConfigError([Problem(f"{file.name}, line {line}", rule, cells["median"])])
        values: dict[str, Any] = dict(zip(COLUMNS, map(cells.__getitem__, COLUMNS), strict=True))
        numbers = {"low": low, "median": median, "high": high, "common": common, "rows": int(cells["rows"])}
        groups.append(ResidualGroup(**{**values, **numbers}))
    return groups


def single(value: Any) -> float:
    """A number of a design; draws are of single designs."""
    return float(np.asarray(value, float).reshape(-1)[0])


def software_of(schedule: str) -> str:
    """Key of the errors of overlaps: the implementation, or the option, that a schedule is named after."""
    return schedule.partition(" ")[0]


@dataclass(frozen=True)
class Draws:
    """Joint draws of the errors of a machine's predictions. gpu: its name in tables; size: number of draws.

    seed: draws of one seed and kind share an error. exact: kinds that keep their median in all draws, as if they had
    been measured. used: groups that were used.
    """

    residuals: Residuals
    gpu: str
    size: int
    seed: int | str = 0
    exact: tuple[str, ...] = ()
    used: dict[tuple[str, str], ResidualGroup] = field(default_factory=dict, compare=False)

    def factor(
        self,
        kind: str,
        name: str,
        *,
        key: str = "",
        sizes: Mapping[str, float] | None = None,
        traits: Mapping[str, str] | None = None,
    ) -> Floats:
        """Factors [size] on the predicted time of an operator. name: what tells it from others of its kind."""
        group = self.residuals.of(kind, self.gpu, key, sizes, traits)
        self.used[kind, key] = group
        if kind in self.exact:
            return np.full(self.size, np.exp(group.median))
        common, single = self._normal(kind), self._normal(f"{kind} {name}")
        return np.asarray(np.exp(group.at(np.sqrt(group.common) * common + np.sqrt(1 - group.common) * single)))

    def remainder(self, group: ResidualGroup, name: str, drawn: Floats) -> Floats:
        """Factors [size] that widen drawn ratios [size] of a whole to the residuals of such wholes, where wider.

        name: what shares them; the whole has one error for all of its designs, beside those of its parts.
        """
        reached = np.log(np.quantile(drawn, ENDS))
        below, above = (
            math.sqrt(max(0.0, (end - group.median) ** 2 - float(part) ** 2))
            for end, part in zip((group.low, group.high), reached, strict=True)
        )
        left = replace(group, low=group.median - below, high=group.median + above)
        return np.asarray(np.exp(left.at(self._normal(name))))

    def _normal(self, name: str) -> Floats:
        return _stratified(f"{self.seed} {name}", self.size)


def unmeasured_text(group: ResidualGroup) -> str:
    """Traits that no row of a group has, the one that widens its interval most first, as a clause; "" for none.

    >>> unmeasured_text(ResidualGroup("step", "h100", unmeasured=("model", "gpu", "release")))
    ', none of this model, GPU or release'
    """
    *names, last = (_TRAIT_WORDS.get(name, name) for name in group.unmeasured or ("",))
    return f", none of this {', '.join(names)}{' or ' if names else ''}{last}" if last else ""


_TRAIT_WORDS = {"gpu": "GPU", "gpus": "number of GPUs", "nodes": "number of nodes"}


def _basis(groups: Sequence[ResidualGroup]) -> str:
    if any(group.is_guess for group in groups):
        return "a guess"
    if any(group.gpu == ANY for group in groups):
        return "other GPUs"
    return "own rows" if any(group.source.startswith(OWN) for group in groups) else "rows of this GPU"


OWN = "own: "
"""How the source of groups of a machine of the user begins."""


@dataclass(frozen=True)
class JointDraws:
    """Draws of the errors of several designs: those on one GPU share them, and another GPU has errors of its own."""

    size: int
    seed: int
    exact: tuple[str, ...] = ()
    _by_gpu: dict[str, Draws] = field(default_factory=dict, compare=False)

    def of(self, gpu: Any) -> Draws:
        """Draws of a GPU (`simulators.hardware.machine.Gpu`), with its own residuals where it has some."""
        name, note = name_in_tables(gpu), gpu.note if isinstance(gpu.note, Mapping) else {}
        if name not in self._by_gpu:
            fitted = tuple(ResidualGroup(**group) for group in note.get(OWN_GROUPS, ()))
            seed = f"{self.seed} {name}" if self._by_gpu else self.seed
            self._by_gpu[name] = Draws(shipped_residuals().with_own(fitted), name, self.size, seed, self.exact)
        return self._by_gpu[name]

    @property
    def basis(self) -> dict[str, str]:
        """Basis of the errors of each kind, in words."""
        grouped: dict[str, list[ResidualGroup]] = {}
        for draws in self._by_gpu.values():
            for (kind, _), group in draws.used.items():
                grouped.setdefault(kind, []).append(group)
        return {kind: _basis(groups) for kind, groups in sorted(grouped.items())}


OWN_GROUPS = "residuals"
"""Entry of the note of a GPU that holds groups of its own (`machine calibrate`)."""


def name_in_tables(gpu: Any) -> str:
    """Name of a GPU as tables have it: without its form factor."""
    names_of_tables = {name for group in shipped_residuals().groups for name in group.gpu.split()}
    names = (str(gpu.name), str(gpu.measured_as or "").lower().removesuffix("_sxm"))
    return next((name for name in names if name in names_of_tables), str(gpu.name))


@cache
def _stratified(name: str, size: int) -> Floats:
    """Normal draws [size], one of each stratum, in an order that the name decides."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
    return np.asarray(np.random.default_rng(seed).permutation(_strata(size)))


@cache
def _strata(size: int) -> Floats:
    normal = NormalDist()
    return np.array([normal.inv_cdf((place + 0.5) / size) for place in range(size)])
