"""Prediction intervals of one machine, from GEMMs in its own profiles: `profile import ... system=<machine>`.

A kernel counts whose operator has recorded shapes (record_shapes) and whose class is GEMM, where no collective runs for
more than a twentieth of its time; kernels of one shape count once, by the median of their times. The machine's fitted
constants predict them, and what they are off by are residuals of this machine
(`dse_calibration.residual_groups.own_groups`), which count before those of its GPU in every later answer; few
rows borrow from these.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from dse_calibration.measurements import MeasuredRows
from dse_calibration.predictions import predicted_by
from dse_calibration.residual_groups import ResidualRow, own_groups
from dse_calibration.residual_rows import rows_of_predicted
from dse_traces.laws.contention import side_by_side
from dse_traces.profile.kernels import Profile
from dse_traces.profile.shapes import parse_shape
from simulators.hardware.device import Device
from simulators.hardware.machine import merged
from simulators.hardware.residuals import OWN, OWN_GROUPS, ResidualGroup, name_in_tables, shipped_residuals

NO_GEMMS = "intervals stay: fewer than three sizes of GEMMs ran alone with shapes (record_shapes=True) and constants"
_KIND = "GEMM"
# a GEMM that ran next to a collective would count its contention as an error of the cost model
_MOST_BESIDE = 0.05  # of a kernel's time
_NAMES = ("low", "median", "high")


def gemm_rows(profiles: Sequence[Profile]) -> list[MeasuredRows]:
    """GEMMs that ran alone, by precision: m of outputs, n of tokens, as tables of GPUs have them."""
    times = gemm_times(profiles, _MOST_BESIDE)
    return [_rows(profiles[0].device, precision, by_size) for precision, by_size in sorted(times.items())]


def gemm_times(profiles: Sequence[Profile], most_beside: float) -> dict[str, dict[tuple[int, int, int], list[float]]]:
    """Times [s] of GEMMs that ran alone, by precision and size: m of outputs, n of tokens, k.

    most_beside: share of a kernel's time beside collectives.
    """
    times: dict[str, dict[tuple[int, int, int], list[float]]] = {}
    for profile in profiles:
        for text, seconds in _alone(profile, most_beside):
            shape = parse_shape(text)
            product = None if shape is None else shape.product
            # tables of GPUs hold single products: batched ones would be compared with the wrong constants
            if shape is not None and product is not None and product.batch == 1:
                by_size = times.setdefault(shape.precision, {})
                # PyTorch is row-major, BLAS column-major: n and m change places
                by_size.setdefault((product.n, product.m, product.k), []).append(seconds)
    return times


def _alone(profile: Profile, most_beside: float) -> Iterator[tuple[str, float]]:
    """Yield shape and time [s] of the GEMMs of a profile beside which nothing communicates."""
    both = side_by_side(profile)
    beside = np.bincount(both.kernel, both.seconds, len(profile)) if len(both.kernel) else np.zeros(len(profile))
    kernels = profile.kernels
    counts = (kernels["kind"] == _KIND) & kernels["shape"].notna() & (beside < most_beside * profile.seconds)
    yield from zip(kernels["shape"][counts], kernels["seconds"][counts].astype(float), strict=True)


def _rows(device: str, precision: str, by_size: Mapping[tuple[int, int, int], Sequence[float]]) -> MeasuredRows:
    m, n, k = np.array(list(by_size), float).T
    # whether a matrix was transposed is not recorded
    shape = {"m": m, "n": n, "k": k, "ta": np.zeros(len(m)), "tb": np.zeros(len(m))}
    # one column of times, the median, as a single slow run (clock, cache) must not count
    seconds = np.array([[float(np.median(times))] for times in by_size.values()])
    names = tuple("x".join(map(str, size)) for size in by_size)
    none = ("",) * len(names)
    return MeasuredRows(device, precision, "gemm", shape, seconds, names, tuple(range(len(names))), none)


def residuals(profiles: Sequence[Profile], tree: Mapping[str, Any]) -> list[ResidualGroup]:
    """Groups of residuals of a machine from profiles of it; none where these have no GEMM that it predicts."""
    device, rows = Device.of(tree), list[ResidualRow]()
    for measured in gemm_rows(profiles):
        predicted = predicted_by("fitted", device, measured)
        if predicted is not None:
            # marked as the machine's own, so that they come before rows of its GPU
            rows += rows_of_predicted(predicted, name_in_tables(device.gpu), f"{OWN}{profiles[0].source}")
    groups = own_groups(rows, shipped_residuals())
    return [replace(group, **{name: round(getattr(group, name), 4) for name in _NAMES}) for group in groups]


def with_residuals(tree: Mapping[str, Any], groups: Sequence[ResidualGroup]) -> dict[str, Any]:
    """A machine's tree with these groups in the place of its own ones of the same kinds."""
    note = tree["gpu"].get("note")
    # a note in words stays as it is, under a key of its own
    text = {} if isinstance(note, Mapping) or not note else {"before": note}
    kinds = {group.kind for group in groups}
    before = note.get(OWN_GROUPS, ()) if isinstance(note, Mapping) else ()
    # a kind that was measured again replaces its older group; other kinds stay
    kept = [group for group in before if group["kind"] not in kinds]
    return merged(tree, {"gpu": {"note": {**text, OWN_GROUPS: [*kept, *(asdict(group) for group in groups)]}}})
