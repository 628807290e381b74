"""Rows predicted as those of an unmeasured GPU, or number of GPUs, are: by constants that others gave.

A GPU of which nothing is measured has the constants of another one, whose rates scale by the data sheet. Such
predictions err more than those by a GPU's own constants, and only they show how wide its interval has to be. Each
measured GPU is therefore predicted by the constants of every sibling, of the same precision: GEMMs and kernels that
memory bounds with `dse_calibration.rows.on_device`, collectives in a node by the library of the other node, at its own
links. Siblings are GPUs whose nodes have a switch, as nobody would take the constants of a card at a PCIe port for one
of these. Collectives of two and four GPUs are predicted by constants that are fitted to eight.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from benchmarks.validity import device_named
from dse_calibration.calibrate import plain_name
from dse_calibration.collectives import COLLECTIVE_ROWS, cost_of_rows
from dse_calibration.fit import fit
from dse_calibration.measurements import STREAM_KINDS, MeasuredRows
from dse_calibration.predictions import PredictedRows
from dse_calibration.residual_groups import ResidualRow
from dse_calibration.residual_rows import rows_of_predicted
from dse_calibration.rows import on_device
from simulators.costs.chip import Cost
from simulators.costs.collective import collective_cost, node_ring
from simulators.hardware.device import Device
from simulators.hardware.parts import Efficiency

_FULL = 8  # GPUs of a node whose collectives are measured


def carried_rows(tables: Sequence[tuple[str, MeasuredRows]]) -> Iterator[ResidualRow]:
    """Yield rows of measured tables, as (file, rows), by the constants of the other GPUs among them."""
    # tables spell one GPU in several ways: its own constants are no sibling's
    devices = {plain_name(rows.device): device_named(rows.device) for _, rows in tables}
    known = {name: device for name, device in devices.items() if device is not None}
    for file, rows in tables:
        gpu = plain_name(rows.device)
        device = known.get(gpu)
        if device is None or rows.library:
            continue
        siblings = {name: other for name, other in known.items() if name != gpu and _at_a_switch(device, other)}
        for name, other in siblings.items():
            if (cost := _carried(device, other, rows)) is not None:
                yield from (replace(row, giver=name) for row in _rows(rows, cost, file, carried="gpu"))


def _at_a_switch(*devices: Device) -> bool:
    return all(device.node is not None and device.node.topology == "switch" for device in devices)


def _carried(device: Device, other: Device, rows: MeasuredRows) -> Cost | None:
    """Costs of rows of a GPU by the constants of another one; None where that has none, or another kind of links."""
    if rows.kind in COLLECTIVE_ROWS:
        return _carried_collective(device, other, rows)
    constants = other.gpu.constants(rows.precision)
    if constants is None or not _holds(constants, rows.kind) or not _same_library(device, constants, rows):
        return None
    return on_device(device, constants, rows)


def _holds(constants: Efficiency, kind: str) -> bool:
    return kind == "gemm" or (kind in STREAM_KINDS and kind in dict(constants.streaming or {}))


def _same_library(device: Device, constants: Efficiency, rows: MeasuredRows) -> bool:
    """Tell whether both GPUs are priced by the same model: libraries of today have tiles of their own."""
    own = device.gpu.constants(rows.precision)
    return own is not None and (own.tiles is None) == (constants.tiles is None)


def _carried_collective(device: Device, other: Device, rows: MeasuredRows) -> Cost | None:
    kind, way = COLLECTIVE_ROWS[rows.kind]
    assert device.node is not None and other.node is not None
    if way != "inside" or other.node.library is None:
        return None
    node = device.node.model_copy(update={"library": other.node.library})
    gpus = rows.shape["gpus"]
    cost = collective_cost(kind, "ring", rows.shape["bytes"], node_ring(node, gpus))
    seconds = np.asarray(cost.seconds, float)[:, None]
    return Cost.of(np.zeros_like(seconds), np.broadcast_to(np.asarray(cost.wire_bytes), gpus.shape)[:, None], seconds)


def rows_of_fewer_gpus(tables: Sequence[tuple[str, MeasuredRows]]) -> Iterator[ResidualRow]:
    """Yield collectives of fewer GPUs than a node has, by constants that are fitted to all of them."""
    for file, rows in tables:
        device = device_named(rows.device, rows.library)
        if rows.kind not in COLLECTIVE_ROWS or COLLECTIVE_ROWS[rows.kind][1] != "inside" or device is None:
            continue
        full = rows.shape["gpus"] == _FULL
        if full.any() and not full.all():
            fitted = fit(device, [rows.take(np.flatnonzero(full))]).collectives[rows.kind]
            few = rows.take(np.flatnonzero(~full))
            yield from _rows(few, cost_of_rows(fitted, few), file, carried="gpus")


def _rows(rows: MeasuredRows, cost: Cost, file: str, *, carried: str) -> Iterator[ResidualRow]:
    predicted = PredictedRows(rows, cost.flop, cost.bytes, cost.seconds, np.zeros(rows.size, bool))
    for row in rows_of_predicted(predicted, plain_name(rows.device), file):
        yield replace(row, carried=carried)
