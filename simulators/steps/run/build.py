"""The iteration of a design: blocks, the GPU at the clock that it sustains, schedules of its sites, and its host."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from simulators.costs.gemm import gemms_of
from simulators.costs.gemm.fitted import FittedGemms
from simulators.costs.power import sustained_clock
from simulators.costs.sharing import Sharing
from simulators.hardware.parts import CuCopy
from simulators.steps.design import ScheduledDesign, StepDesign, product_format, streaming_rates, tied_weights
from simulators.steps.operators.quantised_weights import WeightQuantiser
from simulators.steps.operators.work import ModelBlock, Platform
from simulators.steps.overlap.expert_exchanges import OverlappedExchanges
from simulators.steps.overlap.gradient_contention import ContendedPlatform
from simulators.steps.overlap.implementations import kernel_of_experts
from simulators.steps.overlap.sites import SiteSchedules, TensorGroup
from simulators.steps.overlap.token_splits import LibrarySums
from simulators.steps.run.blocks import model_blocks
from simulators.steps.run.iteration import Gradients, Iteration
from simulators.steps.run.passes import MicroBatch
from simulators.steps.spread.groups import groups
from simulators.workloads.experts import ExpertKernels


def iteration(design: StepDesign, errors: Any = None) -> Iteration:
    """The iteration of a design at one sequence length; its numbers may be arrays.

    Where a GPU's clock under load is known, it is that of the shares of time in which the iteration computes and
    exchanges, which are those at the clock of GEMMs alone. errors: drawn for operators; times are of all draws then.
    """
    loaded = design.system.gpu.loaded
    if loaded is None:
        return _at_clock(design, 1.0, errors)  # one pass: the clock does not depend on the step
    first = _at_clock(design, loaded.gemm_clock)  # the shares of time need a step at some clock
    exchanged, computed = first.passes.exchanged_s, first.passes.computed_s
    # streams that run side by side take less than both
    total = np.maximum(first.passes.forward_s + first.passes.backward_s, computed)
    with np.errstate(all="ignore"):  # of designs that break a rule
        return _at_clock(design, sustained_clock(loaded, computed / total, exchanged / total), errors)


def _at_clock(design: StepDesign, clock: ArrayLike, errors: Any = None) -> Iteration:
    platform, kernels = _platform(design, design.run.precision, clock), design.kernels
    if design.run.products is not None:
        platform = replace(platform, linear=_platform(design, product_format(design), clock))
    platform = platform if errors is None else errors.on(platform)
    law = design.system.gpu.contention
    host = {
        name: 0.0 if getattr(kernels, name) is None else getattr(kernels, name)
        for name in ("host_s", "host_launch_s", "host_batch_s")
        if design.run.mode not in kernels.graphs  # a graph is launched whole, so that the host does not count
    }
    if kernels.host_sequence_s is not None and design.run.mode != "training":
        host["host_s"] = np.asarray(host.get("host_s", 0.0)) + kernels.host_sequence_s * np.asarray(design.run.batch)
    host = host if errors is None else errors.of_host(host)
    if design.system.node is not None and design.system.node.host_link_bytes_per_s is not None:
        host["host_link_bytes_per_s"] = design.system.node.host_link_bytes_per_s
    shards = kernels.shard_copies
    passes = MicroBatch(
        blocks_of(design),
        platform,
        design.run,
        design.parallel,
        design.optimizer,
        weight_copies=_weight_copies(design),
        scheduled=schedules_of(design),
        beside=_beside(design, platform),
        library_sums=_library_sums(design),
    )
    gradients = Gradients(
        passes,
        contended=None if law is None else ContendedPlatform(platform, law, _reducing(design)),
        tied=tied_weights(design),
        shard_copies=(0.0, 0.0) if shards is None else (shards.forward, shards.backward),
    )
    experts = kernels.experts or ExpertKernels()
    return Iteration(gradients, design.model.hidden, **host, experts=experts, clock=clock)


def _platform(design: StepDesign, precision: str, clock: ArrayLike) -> Platform:
    """The GPU at a precision and a clock, and its groups."""
    system = design.system
    chip = FittedGemms.of(system, precision).at_clock(clock)
    gemms = gemms_of(system, precision, clock=clock, share=design.kernels.share_of(precision, system.gpu.name))
    at = groups(system, design.parallel)
    streaming, sharing = streaming_rates(design), Sharing.of(system.gpu)
    return Platform(chip, gemms, at, design.kernels.batched, streaming=streaming, sharing=sharing)


def _beside(design: StepDesign, platform: Platform) -> OverlappedExchanges | None:
    """Exchanges of experts beside other work; None where all waits for them."""
    gpu, library, how = design.system.gpu, platform.groups["ep"].experts, design.parallel.exchanges
    if how == "waited":
        return None
    sms: ArrayLike = 0 if gpu.cu_copy is None else gpu.cu_copy.num_cus
    sms = sms if library is None else library.num_sms
    if how != "one_kernel":
        return OverlappedExchanges(how, platform, gpu.contention, sms)
    software = kernel_of_experts(gpu.name, product_format(design), design.run.mode)
    if software is None or software.experts is None:  # a broken rule says so
        return None
    kernel = software.experts
    sms = sms if kernel.num_sms is None else kernel.num_sms
    return OverlappedExchanges(how, platform, gpu.contention, sms, kernel.tile_rows)


def _reducing(design: StepDesign) -> CuCopy | None:
    """Kernels that reduce gradients; None where they are not known."""
    copy, ctas = design.system.gpu.cu_copy, design.parallel.dp_ctas
    return copy if copy is None or not ctas else copy.model_copy(update={"num_cus": np.minimum(ctas, copy.num_cus)})


def _library_sums(design: StepDesign) -> LibrarySums | None:
    """All-reduces of halves of tokens by the library; None where prompts are whole, or the switch adds."""
    gpu, ctas = design.system.gpu, design.parallel.split_ctas
    if not ctas or design.parallel.collectives == "in_switch" or gpu.cu_copy is None:
        return None
    return LibrarySums(ctas, gpu.cu_copy, 1.0 if gpu.contention is None else gpu.contention.cu_copy_beside_gemm)


def schedules_of(design: StepDesign) -> SiteSchedules | None:
    """Schedules of sites, where there are any."""
    if not isinstance(design, ScheduledDesign) or not design.sites:
        return None
    tp, precision = int(design.parallel.tp), product_format(design)
    return SiteSchedules(design.sites, TensorGroup.of(design.system, tp=tp, precision=precision), design.run.mode)


def _weight_copies(design: StepDesign) -> WeightQuantiser | None:
    """Maker of copies of weights, where there are any; of designs that break no rule."""
    gpu, staged = design.system.gpu, design.system.gpu.staged_bytes
    if design.quantised is None or design.format is None:
        return None
    training, share = design.run.mode == "training", 0.0 if staged is None else staged
    return WeightQuantiser(design.quantised, design.format, training, design.instructions, gpu.pim, share)


def blocks_of(design: StepDesign) -> tuple[ModelBlock, ...]:
    """Blocks of the model of a step, as its run and its layout have them."""
    return model_blocks(design.model, design.run, design.parallel, design.kernels)
