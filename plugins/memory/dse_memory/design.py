"""Design of the memory backend: its sections, and the rules between them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag

from dse.space import get_path
from dse.space.blocks import Rule
from dse.values import Frozen
from dse.values.units import Integer
from dse_memory.convolutions import ConvolutionPass, kernels, layers, unsupported_reason, written_out
from dse_memory.engine import PCS
from dse_memory.kernels import ELEMENT_BYTES, Application, touched_tensors
from dse_memory.policy import Policy
from simulators.hardware.memory_system import MemorySystem, whole_power

_MOST_BYTES = 2**40  # what tags of 32 bits can tell apart


class Extent(Frozen):
    """Extent of the simulation: requests of a kernel, from which on its other workgroups are taken to go on alike, and
    repetitions of a group of kernels, whose others are taken to be like the last. most: requests of a kernel beyond
    which the outermost loop of its workgroups is cut short, and the rest of it taken to go on alike.
    """

    requests: Annotated[Integer, Field(ge=1000, le=16_000_000)]
    repeats: Annotated[Integer, Field(ge=1, le=100_000)]
    most: Annotated[Integer, Field(ge=1000, le=60_000_000)] = 60_000_000


def _sort(application: Any) -> str:
    """Sort of an application: `kernels` if it lists its kernels, `layer` for a layer of a convolution."""
    # a mapping as typed, or a model that was validated before
    keys = set(application) if isinstance(application, Mapping) else set(type(application).model_fields)
    return "kernels" if keys & {"tensors", "groups"} else "layer"


Work = Annotated[
    Annotated[Application, Tag("kernels")] | Annotated[ConvolutionPass, Tag("layer")], Discriminator(_sort)
]


class MemoryDesign(Frozen):
    """An application on a memory system under a policy. Convolutions are written out for the system."""

    system: MemorySystem
    application: Work
    policy: Policy
    run: Extent


SECTIONS = tuple(MemoryDesign.model_fields)


def build_kernels(design: MemoryDesign) -> Application:
    """The kernels of a design's application. Raises ValueError of a layer that its algorithm does not serve."""
    # tiles depend on the number of CUs, so that kernels are those of this system
    application, cus = design.application, design.system.gpu.num_cus
    return kernels(application, cus) if isinstance(application, ConvolutionPass) else written_out(application, cus)


def rules(design: MemoryDesign) -> Iterator[Rule]:
    """Sizes that have to be powers of two or fit into one another."""
    system, channels = design.system, design.system.gpu.dram.channels
    line, chunk, row = system.gpu.line_bytes, system.gpu.mapping.interleave_bytes, system.gpu.dram.row_bytes
    for path, sets in (("system.gpu.l1.bytes", system.l1_sets), ("system.gpu.l2.bytes", system.l2_sets)):
        where = "" if path == "system.gpu.l1.bytes" else " x system.gpu.dram.channels"
        text = f"makes {{0}} sets of ways x lines{where}, no whole power of two"
        yield Rule(path, not whole_power(sets), text, get_path(design.model_dump(), path), (sets,), "take another size")
    for path, size in (("system.gpu.mapping.interleave_bytes", chunk), ("system.gpu.dram.row_bytes", row)):
        text = "is not a power of two, or less than a line ({0})"
        yield Rule(path, not whole_power(size / line), text, size, (line,), "take another size")
    text = "holds more than 62 lines of {0}"
    # the index of dirty rows keeps a bit for each in a signed word of 64 bits
    yield Rule("system.gpu.dram.row_bytes", row / line > 62, text, row, (line,), "take shorter rows, or longer lines")
    for path, count in (
        ("system.gpu.dram.banks", system.gpu.dram.banks),
        ("system.gpu.dram.queue", system.gpu.dram.queue),
    ):
        yield Rule(path, not whole_power(count), "is not a power of two", count, way_out="take 16, 32 or 64")
    # its tables divide by a polynomial of as many bits as channels have
    odd = system.gpu.mapping.channel_hash == "polynomial" and not (whole_power(channels) and 2 <= channels <= 128)
    text = "needs 2, 4, ... 128 channels (system.gpu.dram.channels = {0})"
    yield Rule("system.gpu.mapping.channel_hash", odd, text, "polynomial", (channels,), "take xor")
    predictor = design.policy.predictor
    if predictor is not None:
        sampled, text = predictor.sampled_sets, "is not a power of two, or more than the sets of a slice of L2 ({0})"
        wrong = not whole_power(sampled) or sampled > system.l2_sets
        yield Rule("policy.predictor.sampled_sets", wrong, text, sampled, (system.l2_sets,), "take fewer")
    yield from _of_application(design)


def _of_application(design: MemoryDesign) -> Iterator[Rule]:
    """Rules on layers that an algorithm does not serve, and on what the machine cannot run."""
    layer_or_kernels = design.application
    for layer in [layer_or_kernels] if isinstance(layer_or_kernels, ConvolutionPass) else layers(layer_or_kernels):
        reason = unsupported_reason(layer)
        if reason:
            way = "take implicit_gemm, which serves every shape"
            yield Rule("application.algorithm", True, f"does not serve {layer.name}: {reason}", way_out=way)
            return  # the kernels could not be built
    application = build_kernels(design)
    precision = application.precision
    if precision not in dict(design.system.gpu.flop_per_s):
        text = f"has no rate for {precision}, in which the application computes"
        yield Rule("system.gpu.flop_per_s", True, text, way_out="give it with its source")
    total_bytes = ELEMENT_BYTES[precision] * sum(math.prod(sizes) for sizes in application.tensors.values())
    yield Rule(
        "application.tensors",
        total_bytes > _MOST_BYTES,
        "take more than 2^40 bytes",
        total_bytes,
        way_out="take smaller ones",
    )
    used = sum(len(list(touched_tensors(kernel))) for group in application.groups for kernel in group.kernels)
    # each load and store has a counter of its own
    yield Rule("application.groups", used > PCS, f"have more than {PCS} loads and stores", used, way_out="split it")
