"""What a design of the memory backend is: its sections, and the rules between them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag

from dse.space import get_path
from dse.units import Integer
from dse.values import Frozen
from simulators.hardware.memory_system import MemorySystem, whole_power
from simulators.memory.convolutions import Layer, kernels, layers, unsupported_reason, written_out
from simulators.memory.engine import PCS
from simulators.memory.kernels import ELEMENT_BYTES, Application, touched_tensors
from simulators.memory.policy import Policy
from simulators.rules import Rule

_MOST_BYTES = 2**40  # what tags of 32 bits can tell apart


class Run(Frozen):
    """How much is simulated: requests of a kernel, from which on its other workgroups are taken to go on alike, and
    repetitions of a group of kernels, whose others are taken to be like the last. most: requests of a kernel beyond
    which the outermost loop of its workgroups is cut short, and the rest of it taken to go on alike.
    """

    requests: Annotated[Integer, Field(ge=1000, le=16_000_000)]
    repeats: Annotated[Integer, Field(ge=1, le=100_000)]
    most: Annotated[Integer, Field(ge=1000, le=60_000_000)] = 60_000_000


def _sort(given: Any) -> str:
    """Whether an application lists its kernels, or is a layer of a convolution."""
    keys = set(given) if isinstance(given, Mapping) else set(type(given).model_fields)
    return "kernels" if keys & {"tensors", "groups"} else "layer"


Work = Annotated[Annotated[Application, Tag("kernels")] | Annotated[Layer, Tag("layer")], Discriminator(_sort)]


class Design(Frozen):
    """An application on a memory system under a policy. Convolutions are written out for the system."""

    system: MemorySystem
    application: Work
    policy: Policy
    run: Run


SECTIONS = tuple(Design.model_fields)


def build_kernels(design: Design) -> Application:
    """The kernels of a design's application. Raises ValueError of a layer that its algorithm does not serve."""
    given, cus = design.application, design.system.gpu.num_cus
    return kernels(given, cus) if isinstance(given, Layer) else written_out(given, cus)


def rules(design: Design) -> Iterator[Rule]:
    """Sizes that have to be powers of two or fit into one another."""
    system, channels = design.system, design.system.dram.channels
    line, chunk, row = system.line_bytes, system.mapping.interleave_bytes, system.dram.row_bytes
    for path, sets in (("system.l1.bytes", system.l1_sets), ("system.l2.bytes", system.l2_sets)):
        where = "" if path == "system.l1.bytes" else " x system.dram.channels"
        told = f"makes {{0}} sets of ways x lines{where}, no whole power of two"
        yield Rule(path, not whole_power(sets), told, get_path(design.model_dump(), path), (sets,), "take another size")
    for path, size in (("system.mapping.interleave_bytes", chunk), ("system.dram.row_bytes", row)):
        told = "is not a power of two, or less than a line ({0})"
        yield Rule(path, not whole_power(size / line), told, size, (line,), "take another size")
    told = "holds more than 62 lines of {0}"
    yield Rule("system.dram.row_bytes", row / line > 62, told, row, (line,), "take shorter rows, or longer lines")
    for path, many in (("system.dram.banks", system.dram.banks), ("system.dram.queue", system.dram.queue)):
        yield Rule(path, not whole_power(many), "is not a power of two", many, way_out="take 16, 32 or 64")
    odd = system.mapping.channel_hash == "polynomial" and not (whole_power(channels) and 2 <= channels <= 128)
    told = "needs 2, 4, ... 128 channels (system.dram.channels = {0})"
    yield Rule("system.mapping.channel_hash", odd, told, "polynomial", (channels,), "take xor")
    predictor = design.policy.predictor
    if predictor is not None:
        sampled, told = predictor.sampled_sets, "is not a power of two, or more than the sets of a slice of L2 ({0})"
        wrong = not whole_power(sampled) or sampled > system.l2_sets
        yield Rule("policy.predictor.sampled_sets", wrong, told, sampled, (system.l2_sets,), "take fewer")
    yield from _of_application(design)


def _of_application(design: Design) -> Iterator[Rule]:
    """What an algorithm does not serve, and what the machine cannot run."""
    given = design.application
    for layer in [given] if isinstance(given, Layer) else layers(given):
        reason = unsupported_reason(layer)
        if reason:
            way = "take implicit_gemm, which serves every shape"
            yield Rule("application.algorithm", True, f"does not serve {layer.name}: {reason}", way_out=way)
            return
    application = build_kernels(design)
    precision = application.precision
    if precision not in dict(design.system.gpu.flop_per_s):
        told = f"says nothing of {precision}, which the application computes in"
        yield Rule("system.gpu.flop_per_s", True, told, way_out="give it with its source")
    whole = ELEMENT_BYTES[precision] * sum(math.prod(sizes) for sizes in application.tensors.values())
    yield Rule(
        "application.tensors", whole > _MOST_BYTES, "take more than 2^40 bytes", whole, way_out="take smaller ones"
    )
    used = sum(len(list(touched_tensors(kernel))) for group in application.groups for kernel in group.kernels)
    yield Rule("application.groups", used > PCS, f"have more than {PCS} loads and stores", used, way_out="split it")
