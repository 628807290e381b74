"""Groups of residuals from measured rows: a tree of sizes with conformal quantiles at its leaves.

Rows of one kind, GPU and key are divided by their sizes where that makes intervals shorter, by the interval score of
Winkler (1972), (high - low) + 2 / alpha times what lies outside. Leaves have the order statistics of split-conformal
prediction, which hold a share 1 - alpha of new rows at least: of n rows the k-th, k = ceil((n + 1) (1 - alpha / 2)).
Leaves were chosen by the same rows, which makes them too short; a factor makes up for it, the quantile of the distance
from the interval, in widths, on rows that were left out in turn (Romano, Patterson and Candes 2019, cross-fitted).
Groups of few rows borrow: their interval is that of the group above, and what they have outside of it.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from dse_calibration.residual_between import NOTHING, Spread, SpreadPrior
from simulators.hardware.residuals import ANY, LEVEL, Between, ResidualGroup, Residuals

Floats = NDArray[np.float64]

GUESS = ResidualGroup("", ANY)
OPERATION = "operation"
"""Trait of rows whose keys hold several operations with constants of their own: which one."""
FOLDS = 5
"""Parts of the rows: each is judged by intervals that the others gave."""
FEWEST = 19
"""Rows from which the order statistics of a 90 % interval exist."""
LEAST = 3
"""Rows below which nothing is said of a group: two give no distribution."""
POOLED = ("overlap", "step", "tpot", "ttft")
"""Kinds whose rows of all GPUs are one: software and layout tell more of their errors than the GPU does."""
BY_KEY = ("step",)
"""Kinds whose components differ by key: releases change mixtures more than dense models."""
_LEAF = 25
_DEPTH = 5
_GAIN = 0.02  # of the score, that a division must save
_CUTS = np.linspace(0.1, 0.9, 9)  # quantiles of a size at which rows are divided
_ALPHA = 1 - LEVEL
_SHARES = (_ALPHA / 2, 0.5, 1 - _ALPHA / 2)


@dataclass(frozen=True)
class ResidualRow:
    """A measured row that nothing was fitted on. shape: rows of one shape are never apart in judging and fitting.

    residual: log(measured / predicted). sizes: numbers that are known before the answer. facts: what else is known.
    traits: names of what several rows share, as of `simulators.hardware.residuals.Between`. carried: the trait whose
    other names gave the constants that it is predicted by (`gpu`: those of other GPUs, as of an unmeasured one); ""
    for its own. giver: the GPU that gave them.
    """

    kind: str
    gpu: str
    key: str
    shape: str
    residual: float
    sizes: Mapping[str, float]
    source: str
    facts: Mapping[str, float] = field(default_factory=dict)
    traits: Mapping[str, str] = field(default_factory=dict)
    carried: str = ""
    giver: str = ""

    @property
    def fold(self) -> int:
        """The part of the rows that it belongs to: a hash of its shape, so that no result decides it."""
        return int(hashlib.sha256(f"{self.kind} {self.shape}".encode()).hexdigest(), 16) % FOLDS


@dataclass(frozen=True)
class _Leaf:
    """Rows of some ranges of sizes, as (name, whether up to the bound, bound), and their quantiles."""

    ranges: tuple[tuple[str, bool, float], ...]
    low: float
    median: float
    high: float
    rows: int

    @property
    def where(self) -> str:
        return " and ".join(f"{name}{'<=' if upto else '>'}{bound:g}" for name, upto, bound in self.ranges)

    def holds(self, sizes: Mapping[str, Floats]) -> NDArray[np.bool_]:
        """Tell which rows of columns of sizes belong here."""
        sides = [(sizes[name] <= bound) == upto for name, upto, bound in self.ranges]
        return np.logical_and.reduce(sides) if sides else np.ones((), np.bool_)


def quantiles(residuals: Floats) -> tuple[float, float, float]:
    """Low, median and high of at least FEWEST residuals; of fewer the ends, which hold less than 90 %."""
    ordered, n = np.sort(residuals), len(residuals)
    rank = min(n, math.ceil((n + 1) * (1 - _ALPHA / 2)))
    return float(ordered[n - rank]), float(np.median(ordered)), float(ordered[rank - 1])


def _score(residuals: Floats) -> float:
    low, _, high = quantiles(residuals)
    outside = np.maximum(low - residuals, 0).sum() + np.maximum(residuals - high, 0).sum()
    return (high - low) * len(residuals) + 2 / _ALPHA * float(outside)


def _leaves(
    sizes: Mapping[str, Floats], residuals: Floats, ranges: tuple[tuple[str, bool, float], ...] = ()
) -> Iterator[_Leaf]:
    """Yield the leaves of a tree, which divides rows where that saves most of the score."""
    best, undivided = (math.inf, "", 0.0), _score(residuals)
    for name, values in sizes.items() if len(ranges) < _DEPTH and len(residuals) >= 2 * _LEAF else ():
        for cut in np.unique(np.quantile(values, _CUTS)):
            below = values <= cut
            if min(below.sum(), (~below).sum()) >= _LEAF:
                best = min(best, (_score(residuals[below]) + _score(residuals[~below]), name, float(f"{cut:.4g}")))
    score, name, cut = best
    below = sizes[name] <= cut if name else np.zeros(len(residuals), bool)
    # rounding of the bound may leave one side too few
    if score > undivided * (1 - _GAIN) or min(below.sum(), (~below).sum()) < FEWEST:
        yield _Leaf(ranges, *quantiles(residuals), rows=len(residuals))
        return
    for upto, side in ((True, below), (False, ~below)):
        part = {size: values[side] for size, values in sizes.items()}
        yield from _leaves(part, residuals[side], (*ranges, (name, upto, cut)))


def fit_groups(
    rows: Sequence[ResidualRow], *, common: Mapping[str, float], prior: SpreadPrior = NOTHING
) -> list[ResidualGroup]:
    """Groups of all kinds and GPUs, and of GPUs without rows. common: by kind, as of `ResidualGroup`."""
    groups = list[ResidualGroup]()
    for kind, of_kind in _apart(rows, "kind").items():
        unseen = unseen_groups(of_kind, common[kind], prior)
        groups += unseen
        names = " ".join(sorted(_apart(of_kind, "gpu")))
        measured = [row for row in of_kind if not row.carried]
        pooled = [replace(row, gpu=names) for row in measured] if kind in POOLED else measured
        for of_gpu in _apart(pooled, "gpu").values():
            groups += _of_gpu(of_gpu, next(iter(unseen), None), common[kind])
    return groups


def own_groups(rows: Sequence[ResidualRow], before: Residuals) -> list[ResidualGroup]:
    """Groups of one machine from its own rows; of few rows they borrow from what is known of its GPU, or of any."""
    groups = list[ResidualGroup]()
    for kind, of_kind in _apart(rows, "kind").items():
        parent = before.of(kind, of_kind[0].gpu)
        groups += _of_gpu(of_kind, parent, parent.common)
    return groups


def unseen_groups(
    rows: Sequence[ResidualRow], common: float = 0.5, prior: SpreadPrior = NOTHING
) -> list[ResidualGroup]:
    """Groups of GPUs without rows, from rows of one kind: of all keys, and of each that several GPUs have if pooled.

    Two GPUs, or few rows, show less of how an unseen GPU differs than all keys together.
    """
    every = _unseen_group(rows, common, prior)
    if every is None:
        return []
    if rows[0].kind not in POOLED:
        return [every]
    several = {key: part for key, part in _apart(rows, "key").items() if _num_gpus(part) > 2}
    of_keys = ((key, _unseen_group(part, common, prior)) for key, part in several.items())
    return [every, *(replace(group, key=key) for key, group in of_keys if group is not None and not group.is_guess)]


def _num_gpus(rows: Sequence[ResidualRow]) -> int:
    """Number of GPUs of which there are enough rows to say something of each."""
    return sum(len(part) >= LEAST for part in _apart(rows, "gpu").values())


def _of_gpu(rows: Sequence[ResidualRow], parent: ResidualGroup | None, common: float) -> Iterator[ResidualGroup]:
    """Yield the groups of one GPU: all of it, of each key, and of ranges of sizes."""
    if len(rows) < LEAST:
        return
    kind, gpu, source = rows[0].kind, rows[0].gpu, _sources(rows)
    every = ResidualGroup(kind, gpu, common=common, source=source, basis="own", rows=len(rows))
    low, median, high = quantiles(_residuals(rows))
    every = replace(every, low=low, median=median, high=high)
    if len(rows) < FEWEST:
        yield _borrowed(every, parent or ResidualGroup(kind, ANY))
        return
    stretch = _stretch(rows)
    yield every
    for key, of_key in _apart(rows, "key").items():
        part = replace(every, key=key, rows=len(of_key), source=_sources(of_key))
        if LEAST <= len(of_key) < FEWEST:
            low, median, high = quantiles(_residuals(of_key))
            yield _borrowed(replace(part, low=low, median=median, high=high), every)
        elif len(of_key) >= FEWEST:
            yield from _of_key(of_key, part, stretch)


def _of_key(rows: Sequence[ResidualRow], part: ResidualGroup, stretch: float) -> Iterator[ResidualGroup]:
    leaves = list(_leaves(_columns(rows), _residuals(rows)))
    low, median, high = quantiles(_residuals(rows))
    yield _stretched(replace(part, low=low, median=median, high=high), stretch)
    for leaf in leaves if len(leaves) > 1 else ():
        group = replace(part, where=leaf.where, rows=leaf.rows)
        yield _stretched(replace(group, low=leaf.low, median=leaf.median, high=leaf.high), stretch)


def _borrowed(few: ResidualGroup, parent: ResidualGroup) -> ResidualGroup:
    """A group of few rows: the interval of the group above it, and its own rows where they are outside of that."""
    name = " ".join(filter(None, (parent.kind, parent.gpu, parent.key)))
    low, high = min(few.low, parent.low), max(few.high, parent.high)
    return replace(few, low=low, high=high, basis=f"borrows from {name}")


def _unseen_rows(rows: Sequence[ResidualRow]) -> Sequence[ResidualRow]:
    """Rows that are predicted as those of an unmeasured GPU are, with the constants of others; all where none is."""
    return [row for row in rows if row.carried == "gpu"] or [row for row in rows if not row.carried]


def _unseen_spread(rows: Sequence[ResidualRow]) -> Spread | None:
    """The spread of GPUs, and of what gave their constants. Operations, which have constants of their own, are apart.

    Those of one GPU err in part alike, so that they add no degrees of freedom.
    """
    shown, alike = _unseen_rows(rows), dict[str, dict[str, list[float]]]()
    for row in shown:
        names = alike.setdefault(row.traits.get(OPERATION, row.key), {})
        names.setdefault(f"{row.gpu} {row.giver}", []).append(row.residual)
    enough = [{name: part for name, part in names.items() if len(part) >= LEAST} for names in alike.values()]
    if not any(enough):
        return None
    if shown[0].carried:
        every = {f"{place} {name}": part for place, names in enumerate(enough) for name, part in names.items()}
        return Spread.of_pairs(every, names=len({gpu for row in shown for gpu in (row.gpu, row.giver)}))
    return Spread.of(enough, names=_num_gpus(shown)) or Spread.of_one(enough)


def _unseen_group(rows: Sequence[ResidualRow], common: float, prior: SpreadPrior) -> ResidualGroup | None:
    """The group of GPUs without rows: the spread of those that have some, and what is between them.

    Where rows are predicted as those of an unmeasured GPU are, with the constants of others, these alone count. Of
    kinds whose rows are pooled, the spread of the trait `gpu` is added where it is asked for (`components`).
    """
    shown = _unseen_rows(rows)
    by_gpu = {gpu: _residuals(part) for gpu, part in _apart(shown, "gpu").items() if len(part) >= LEAST}
    if not by_gpu:
        return None
    medians = [float(np.median(part)) for part in by_gpu.values()]
    count, median = sum(map(len, by_gpu.values())), float(np.median(medians))
    every = ResidualGroup(rows[0].kind, ANY, rows=count, median=median, common=common, source=_sources(shown))
    spread = _unseen_spread(rows)
    if spread is None or count < FEWEST or spread.free + prior.free == 0:  # nothing shows how GPUs differ
        ends = [quantiles(part) for part in by_gpu.values()]
        low, high = min(GUESS.low, *(end[0] for end in ends)), max(GUESS.high, *(end[2] for end in ends))
        return replace(every, low=low, high=high, basis="guess")
    if rows[0].kind in POOLED:
        low, median, high = quantiles(np.concatenate(list(by_gpu.values())))
        return replace(every, low=low, median=median, high=high, basis=f"rows of {len(by_gpu)} GPUs")
    median = 0.0 if shown[0].carried else median
    below, above = spread.ends(prior)
    return replace(
        every, low=median - below, median=median, high=median + above, basis=f"each of {len(by_gpu)} GPUs by the others"
    )


@dataclass(frozen=True)
class Trait:
    """A trait of rows that has a component. within: traits by which groups are divided, in which names are compared."""

    name: str
    within: tuple[str, ...] = ()


_SERVED = tuple(map(Trait, ("software", "model", "gpu", "release")))
TRAITS: Mapping[str, tuple[Trait, ...]] = {
    "collective": (Trait("gpus", within=("gpu", "way")),),
    "exchange": (Trait("nodes", within=("gpu", "direction")),),
    "overlap": (Trait("software"), Trait("gpu", within=("software",))),
    "step": _SERVED,
    "tpot": _SERVED,
    "ttft": _SERVED,
}
"""Kind of rows -> the traits that have components."""


def components(rows: Sequence[ResidualRow], prior: SpreadPrior | None = None) -> list[Between]:
    """Components of all traits of which rows have several names. prior: what other traits tell; None: that of rows.

    Of kinds of `BY_KEY`, a key whose rows have a single name of a trait has their spread, and between names that of all
    keys together.
    """
    prior = prior_of(rows) if prior is None else prior
    between = list[Between]()
    for kind, of_kind in _apart(rows, "kind").items():
        for trait in TRAITS.get(kind, ()):
            together = _spread(of_kind, trait)
            if together is None:
                continue
            for key, of_key in _apart(of_kind, "key").items() if kind in BY_KEY else ():
                spread = _spread(of_key, trait) or together.around(_residuals(of_key))
                between.append(_component(of_key, key, trait, spread.ends(prior)))
            if kind not in BY_KEY:
                between.append(_component(of_kind, "", trait, together.ends(prior)))
    return between


def prior_of(rows: Sequence[ResidualRow]) -> SpreadPrior:
    """What the traits of all kinds tell of how far names differ, over how far rows of a name do."""
    return SpreadPrior.of(spreads(rows))


def spreads(rows: Sequence[ResidualRow]) -> Iterator[Spread]:
    """Yield the spreads of all traits and kinds that rows show."""
    for kind, of_kind in _apart(rows, "kind").items():
        parts = list(_apart(of_kind, "key").values()) if kind in BY_KEY else [of_kind]
        of_traits = (_spread(part, trait) for part in parts for trait in TRAITS.get(kind, ()))
        of_gpus = () if kind in POOLED else (_unseen_spread(of_kind),)
        yield from (spread for spread in (*of_traits, *of_gpus) if spread is not None)


def _names(rows: Sequence[ResidualRow], trait: Trait) -> frozenset[str]:
    return frozenset(row.traits[trait.name] for row in rows if trait.name in row.traits)


def _component(rows: Sequence[ResidualRow], key: str, trait: Trait, ends: tuple[float, float]) -> Between:
    traited = [row for row in rows if trait.name in row.traits and row.carried in ("", trait.name)]
    return Between(rows[0].kind, key, trait.name, _names(traited, trait), *ends, source=_sources(traited))


def _spread(rows: Sequence[ResidualRow], trait: Trait) -> Spread | None:
    """The spread of a trait: of rows that are predicted as those of a name without rows are, if there are some.

    All of these have the constants of one more name, such as the full number of GPUs of their node.
    """
    traited = [row for row in rows if trait.name in row.traits and row.carried in ("", trait.name)]
    carried = [row for row in traited if row.carried]
    counts = Counter(row.traits[trait.name] for row in carried or traited)
    alike = dict[tuple[str, ...], dict[str, list[float]]]()
    for row in (row for row in carried or traited if counts[row.traits[trait.name]] >= LEAST):
        place = () if carried else tuple(row.traits.get(name, "") for name in trait.within)
        alike.setdefault(place, {}).setdefault(row.traits[trait.name], []).append(row.residual)
    if carried:
        return Spread.of_pairs(alike[()], names=len(alike[()]) + 1) if alike else None
    return Spread.of(list(alike.values()))


def _stretch(rows: Sequence[ResidualRow]) -> float:
    """Factor on the intervals of a GPU that makes those of rows left out in turn hold 90 %; 1 at least."""
    distances = list[float]()
    for fold in range(FOLDS):
        rest_of_rows, left = [row for row in rows if row.fold != fold], [row for row in rows if row.fold == fold]
        if len(rest_of_rows) < FEWEST or not left:
            continue
        every, by_key = (
            _Leaf((), *quantiles(_residuals(rest_of_rows)), rows=len(rest_of_rows)),
            _apart(rest_of_rows, "key"),
        )
        for key, part in _apart(left, "key").items():
            fitted = by_key.get(key, [])
            tree = list(_leaves(_columns(fitted), _residuals(fitted))) if len(fitted) >= FEWEST else [every]
            distances += _distances(part, tree)
    if len(distances) < FEWEST:
        return 1.0
    rank = min(len(distances), math.ceil((len(distances) + 1) * LEVEL))
    return max(1.0, sorted(distances)[rank - 1])


def _distances(rows: Sequence[ResidualRow], tree: Iterable[_Leaf]) -> list[float]:
    """Distance of rows from the median of their leaves, in that of the end of the interval on their side."""
    columns, residuals, distances = _columns(rows), _residuals(rows), np.zeros(len(rows))
    for leaf in tree:
        off = residuals - leaf.median
        side = np.where(off > 0, leaf.high - leaf.median, leaf.median - leaf.low)
        distances = np.where(leaf.holds(columns), np.abs(off) / np.maximum(side, 1e-9), distances)
    return list(map(float, distances))


def _stretched(group: ResidualGroup, factor: float) -> ResidualGroup:
    low, high = (group.median + factor * (end - group.median) for end in (group.low, group.high))
    return replace(group, low=low, high=high)


def common_shares(rows: Sequence[ResidualRow]) -> dict[str, float]:
    """Share of the variance of residuals that a kind has in common on a GPU, by kind: that between tables, keys apart.

    Medians of the rows of each GPU, source and key around 0, over that and the spread of rows around these medians.
    """
    shares = dict[str, float]()
    for kind, of_kind in _apart(rows, "kind").items():
        parts = [
            _residuals(of_key)
            for of_gpu in _apart(of_kind, "gpu").values()
            for of_source in _apart(of_gpu, "source").values()
            for of_key in _apart(of_source, "key").values()
            if len(of_key) >= LEAST
        ]
        if not parts:
            shares[kind] = 0.5  # nothing is known: half of each
            continue
        between = float(np.mean([np.median(part) ** 2 for part in parts]))
        within = float(np.mean([np.median(np.abs(part - np.median(part))) ** 2 for part in parts])) * _MAD**2
        shares[kind] = round(between / max(between + within, 1e-12), 3)
    return shares


_MAD = 1.4826  # standard deviation over the median absolute deviation of a normal distribution


def _apart(rows: Iterable[ResidualRow], name: str) -> dict[str, list[ResidualRow]]:
    parts: dict[str, list[ResidualRow]] = {}
    for row in rows:
        parts.setdefault(getattr(row, name), []).append(row)
    return parts


def _residuals(rows: Sequence[ResidualRow]) -> Floats:
    return np.array([row.residual for row in rows])


def _columns(rows: Sequence[ResidualRow]) -> dict[str, Floats]:
    """Sizes that all rows have, as columns."""
    names = [name for name in rows[0].sizes if all(name in row.sizes for row in rows)]
    return {name: np.array([row.sizes[name] for row in rows]) for name in names}


def _sources(rows: Sequence[ResidualRow]) -> str:
    return "; ".join(sorted({row.source for row in rows}))
