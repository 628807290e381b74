"""Operator costs of measured rows: each row by the cost function of its kind, on its device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from dse_calibration.collectives import COLLECTIVE_ROWS, constants_of, cost_of_rows
from dse_calibration.measurements import FLOAT_BYTES, STREAM_KINDS, MeasuredRows
from simulators.costs.chip import Cost
from simulators.costs.collective import collective_cost, node_ring
from simulators.costs.convolution import convolution
from simulators.costs.gemm import GemmShape, gemm_cost
from simulators.costs.gemm.fitted import FittedGemms
from simulators.costs.recurrent import recurrent
from simulators.costs.streaming import streamed
from simulators.hardware.device import Device
from simulators.hardware.network import Node
from simulators.hardware.parts import Efficiency


def cost_of(device: Device, rows: MeasuredRows) -> Cost | None:
    """Costs [R, passes] of measured rows; None if the device has no constants for them."""
    if rows.kind == "allreduce":
        return None if device.node is None or device.node.library is None else allreduce(device.node, rows)
    if rows.kind in COLLECTIVE_ROWS:
        fitted = None if device.node is None else constants_of(device.node, rows.kind)
        return None if fitted is None else cost_of_rows(fitted, rows)
    constants = device.gpu.constants(rows.precision)
    without = constants is None or (rows.kind in STREAM_KINDS and rows.kind not in dict(constants.streaming or {}))
    return None if constants is None or without else on_device(device, constants, rows)


def on_device(device: Device, constants: Efficiency, rows: MeasuredRows) -> Cost:
    """Costs [R, passes] of rows of a kernel, with any constants."""
    if rows.kind in STREAM_KINDS:
        fitted = {str(kind): stream for kind, stream in (constants.streaming or {}).items()}[rows.kind]
        cost = streamed(fitted, device.gpu.hbm_rate, rows.shape["bytes"])
        return Cost.of(cost.flop[:, None], cost.bytes[:, None], cost.seconds[:, None])
    chip, shape = FittedGemms.of(device, rows.precision, efficiency=constants), rows.shape
    if rows.kind == "gemm":
        gemms = GemmShape(shape["m"], shape["n"], shape["k"], transposed_a=shape["ta"], weight_sets=rows.weight_sets)
        alone = gemm_cost(chip, gemms)
        traffic, seconds = gemms.least_bytes(chip.element_bytes), alone.seconds + alone.launch_s
        if rows.casts and constants.cast_traffic is not None:
            seconds = seconds + constants.cast_traffic * shape["k"] * shape["n"] / device.gpu.hbm_rate
        return Cost.of(alone.flop[:, None], traffic[:, None], seconds[:, None])
    if rows.kind == "recurrent":
        return recurrent(chip, shape["gates"], shape["hidden"], shape["n"], shape["t"])
    return convolution(chip, shape)


def cast_lines(device: Device, groups: Iterable[MeasuredRows]) -> Iterator[str]:
    """Yield what the casts of inputs take that times of rows hold, which a step has as operators of its own."""
    for rows in groups:
        constants = device.gpu.constants(rows.precision)
        if rows.casts and constants is not None and constants.cast_traffic is not None:
            yield (
                f"{rows.precision}: times are with the cast of the inputs, worth {constants.cast_traffic:.3g} bytes of"
                " HBM traffic an element; the other constants are of the GEMM alone"
            )


def allreduce(node: Node, rows: MeasuredRows) -> Cost:
    """Costs [R, 1] of rings over the GPUs of a node, or of several nodes if needed; bytes are those sent."""
    gpus, payload = rows.shape["gpus"], FLOAT_BYTES * rows.shape["floats"]
    cost = collective_cost("all_reduce", "ring", payload, node_ring(node, gpus))
    return Cost.of(cost.flop[:, None], cost.wire_bytes[:, None], cost.seconds[:, None])
