"""Groups of collectives and classes of kernels that compute: the laws slow every kernel of one by the same factor.

Pairs of kernels would be far too many, so `dse_traces.laws.task_graph` counts by class and group.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dse_traces.laws.contention import ON_SMS, Laws, kernel_keys
from dse_traces.profile.kernel_classes import PEER_COPY
from dse_traces.profile.kernel_names import reduce_name
from dse_traces.profile.kernels import Profile

Floats = NDArray[np.float64]
Ints = NDArray[np.intp]
MOST_GROUPS = 20
"""Groups of collectives, the rest are one more."""
# of kernels with CTAs of their own; the rest of a kind shares one class, as laws grow with classes x groups
_MOST_CLASSES = 16
_FEW_WAVES = 4  # of CTAs, whose number counts
_STEP = 0.05  # to which measured slow-downs are rounded, so that kernels share classes


class KernelClass(NamedTuple):
    """Kernels that compute and slow down alike. ctas: None where their number is not known, or does not count.
    measured: slow-down during collectives as recorded, None where the laws alone give it.
    """

    kind: str
    ctas: float | None = None
    measured: float | None = None


def collective_groups(profile: Profile) -> tuple[Ints, tuple[str, ...]]:
    """Group of each collective [N], else -1, and the names of groups: by name, payload and CTAs, those with the most
    time first.
    """
    kernels = profile.kernels[profile.is_collective]
    labels = {name: reduce_name(name).label() for name in kernels["name"].unique()}
    names = kernels["collective"].str.slice(0, 40).fillna(kernels["name"].map(labels))
    sizes = [f", {size / 1e6:.3g} MB" if size > 0 else "" for size in kernels["payload_bytes"]]
    # a grid of a copy means nothing
    counts = kernels["ctas"].astype("string").fillna("?").mask(kernels["kind"] == PEER_COPY, "")
    ctas = [f", {count} CTAs" if count else ", copy engines" for count in counts]
    keys = names.astype("string") + pd.Series(sizes, kernels.index, "string") + pd.Series(ctas, kernels.index, "string")
    ordered = kernels["seconds"].groupby(keys).sum().sort_values(ascending=False, kind="stable").index.tolist()
    places = {key: min(place, MOST_GROUPS) for place, key in enumerate(ordered)}
    group = np.full(len(profile), -1)
    group[kernels.index] = keys.map(places)
    further = ["other collectives"] if len(ordered) > MOST_GROUPS else []
    return group, (*(str(name) for name in ordered[:MOST_GROUPS]), *further)


def median_sms(group: Ints, sms: Floats, count: int) -> Floats:
    """SMs that a collective of each of `count` groups holds [G], from those that each kernel holds [N]."""
    # the median, as one group may hold collectives with other numbers of channels
    return np.array([np.median(sms[group == place]) for place in range(count)])


def contention_classes(profile: Profile, laws: Laws) -> tuple[Ints, tuple[KernelClass, ...]]:
    """Place of the class of each kernel that computes [N], else -1, and the classes.

    Kernels with a measured slow-down are of a class by that alone; CTAs of the others count where they are few.
    """
    kernels = profile.kernels[profile.is_compute]
    exact = _exact_classes(profile, laws)
    ordered = sorted(set(exact), key=lambda of: (of.kind, of.ctas or 0.0, of.measured or 0.0))
    codes = {kernel_class: code for code, kernel_class in enumerate(ordered)}
    spent = kernels["seconds"].groupby(np.array([codes[of] for of in exact], int)).sum()
    by_time = [ordered[code] for code in spent.sort_values(ascending=False, kind="stable").index]
    counted = [of for of in by_time if of.ctas is not None][:_MOST_CLASSES]
    measured = [of for of in by_time if of.measured is not None]
    classes = *counted, *measured, *(KernelClass(str(kind)) for kind in kernels["kind"].unique())
    places = {of: place for place, of in enumerate(classes)}
    class_of = np.full(len(profile), -1)
    # a count that got no class of its own is of the class of its kind
    class_of[kernels.index] = [places.get(of, places[KernelClass(of.kind)]) for of in exact]
    return class_of, classes


def _exact_classes(profile: Profile, laws: Laws) -> list[KernelClass]:
    """What each kernel that computes would be classed by if there could be any number of classes."""
    kernels = profile.kernels[profile.is_compute]
    measured = kernel_keys(profile)[profile.is_compute].map(laws.measured).to_numpy(float)
    # rounded to steps, as each value opens a class; within half a step of 1 is no slow-down
    measured = np.where(measured < 1 + _STEP / 2, 1.0, np.round(measured / _STEP) * _STEP)
    ctas = kernels["ctas"].to_numpy(float, na_value=np.nan)
    # with many waves the share of the last one is small, and the count of CTAs matters no more
    counts = kernels["kind"].isin(ON_SMS).to_numpy(bool) & (ctas > 0) & (ctas <= _FEW_WAVES * laws.sms)
    counts &= np.isnan(measured)
    return [
        KernelClass(str(kind), count if counted else None, None if np.isnan(slowdown) else slowdown)
        for kind, count, counted, slowdown in zip(
            kernels["kind"], ctas.tolist(), counts.tolist(), measured.tolist(), strict=True
        )
    ]
