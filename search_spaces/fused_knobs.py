"""Knobs of schedules of fused kernels: which operators share a kernel with their collective, in how many chunks."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from dse.values import knob
from dse.values.units import Fraction, Integer
from simulators.costs.fabric import Algorithm
from simulators.overlap.design import ScheduleKnobs
from simulators.workloads.operators import Collective, Embedding, Gemm, Gemv, Workload

_FUSABLE = (Embedding, Gemm, Gemv)
_FUSED = {"kernel": "fused"}


class FusedKnobs(ScheduleKnobs):
    """Knobs of `search_spaces/fused.py`; those of fused kernels have no effect in bulk."""

    orders: ClassVar[tuple[str, ...]] = ("before", "after", "beside")
    family: Literal["fused"]
    kernel: Annotated[Literal["bulk", "fused"], knob(structural=True)]
    collective: Annotated[Algorithm, knob(structural=True)]
    copies: Annotated[bool, knob(structural=True)]
    pairs: Annotated[Literal["producer", "all"] | None, knob(structural=True, when=_FUSED)]
    num_chunks: Annotated[Integer | None, knob(structural=True, when=_FUSED, ge=1, le=1024)]
    issue_order: Annotated[Literal["remote_first", "local_first"] | None, knob(structural=True, when=_FUSED)]
    zero_copy: Annotated[bool | None, knob(structural=True, when=_FUSED)]
    occupancy_loss: Annotated[Annotated[Fraction, Field(lt=1)] | None, knob(when=_FUSED)]
    near_memory: Annotated[bool, knob(structural=True)] = False
    elementwise: Annotated[Literal["gpu", "pim"], knob(structural=True)] = "gpu"


def remote_chunks(num_chunks: int, gpus: int) -> int:
    """Number of chunks that go to other GPUs; one in `gpus` stays."""
    return max(1, -(-num_chunks * (gpus - 1) // gpus))


def issue_order(workload: Workload) -> list[str]:
    """Operators in issue order, independent of the order in which they are written.

    Among ready operators, collectives come first, then inputs of collectives, then the others, each by name. Operators
    in a cycle, or with an unknown input, are left out.
    """
    operators, issued = workload.operators, list[str]()
    sent = {before for op in operators.values() if isinstance(op, Collective) for before in op.after}
    ranks = {
        name: (0 if isinstance(op, Collective) else 1 if name in sent else 2, name) for name, op in operators.items()
    }
    while ready := [name for name, op in operators.items() if name not in issued and set(op.after) <= set(issued)]:
        issued.append(min(ready, key=lambda name: ranks[name]))
    return issued


def partners(workload: Workload, pairs: str) -> dict[str, str]:
    """Map each collective to the operator that shares its kernel: its producer, or (pairs = all) its consumer.

    An operator shares its kernel with one collective: the first that it produces for, else the first that it consumes.
    """
    operators, shared = workload.operators, dict[str, str]()
    moves = [name for name in issue_order(workload) if isinstance(operators[name], Collective)]
    producers = {name: operators[name].after for name in moves}
    consumers = {name: [key for key, op in operators.items() if name in op.after] for name in moves}
    for neighbours in (producers, consumers) if pairs == "all" else (producers,):
        for name in moves:
            candidates = [
                key for key in neighbours[name] if isinstance(operators[key], _FUSABLE) and key not in shared.values()
            ]
            if name not in shared and candidates:
                shared[name] = candidates[0]
    return shared
