"""Design of an iteration: its sections, and the rules between them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import ConfigDict

from dse.backend import Tree
from dse.errors import ConfigError
from dse.space.blocks import Rule
from simulators.hardware.device import Device, ScheduledDevice
from simulators.hardware.machine import Gpu
from simulators.hardware.network import link_rules
from simulators.hardware.parts import Grown, MeasuredFormat, Precision, StreamingRates
from simulators.hardware.pim import Format, InstructionSet
from simulators.hardware.schedule_system import has_links
from simulators.steps.epochs.seqpoint import Iterations
from simulators.steps.operators.quantised_weights import QuantisedWeights
from simulators.steps.overlap.implementations import kernel_of_experts, kernels_of_experts
from simulators.steps.spread.framework_rules import Stack, stack_rules
from simulators.steps.spread.groups import leaves_node
from simulators.steps.spread.parallel_rules import offload_rules, parallel_rules, pass_rules
from simulators.workloads.model import Kernels, Model, Optimizer, Parallel, Run, Transformer
from simulators.workloads.sequence_lengths import Lengths, iteration_lengths


class StepDesign(Grown):
    """One iteration: hardware, model, and how it is run.

    quantised, format, instructions: where products read low-precision copies of weights, who makes them, what they are,
    and the commands of units in memory. stack: software whose rules it keeps; None for no framework's.
    """

    system: Device
    model: Model
    run: Run
    parallel: Parallel
    optimizer: Optimizer
    kernels: Kernels
    lengths: Lengths | None = None
    iterations: Iterations | None = None
    quantised: QuantisedWeights | None = None
    format: Format | None = None
    instructions: InstructionSet | None = None
    stack: Stack | None = None


class ScheduledDesign(StepDesign):
    """One iteration whose collectives of tensor parallelism have schedules, by site (`simulators.steps.overlap.sites`).

    sites: schedules by the name of the site; those that are not named are serial.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    system: ScheduledDevice
    sites: Mapping[str, Any] = {}


_PLAIN = {"gradients": None, "optimizer_states": None}
"""Formats of a run that has none of its own."""
OF_LENGTHS = ("lengths", "iterations")
OF_COPIES = ("quantised", "format", "instructions")
OPTIONAL = (*OF_LENGTHS, *OF_COPIES, "stack")
NONE = "none"


def own_sections(tree: Tree) -> dict[str, Any]:
    """The sections of a design, without those that mean nothing there.

    Without lengths the sampling of an epoch is dropped; without copies, their formats; where no units in memory make
    them, their commands and the units themselves.
    """
    absent = set[str]()
    if _chosen(tree, "lengths") == NONE:
        absent.update(OF_LENGTHS)
    if _chosen(tree, "quantised") == NONE:
        absent.update(OF_COPIES)
    # units in memory count only where they make copies
    in_memory = not absent.issuperset(OF_COPIES) and tree["quantised"].get("made_by") == "pim"
    if not in_memory:
        absent.add("instructions")
    sections = {name: tree[name] for name in ScheduledDesign.model_fields if name in tree and name not in absent}
    sections |= {"stack": _software(tree)} if "stack" in tree else {}
    gpu = sections.get("system", {}).get("gpu")
    if not in_memory and isinstance(gpu, Mapping) and gpu.get("pim") is not None:
        sections["system"] = _without_pim(sections["system"])
    return sections


def _software(tree: Tree) -> dict[str, Any] | None:
    """The software whose rules a design keeps; None where kernels are not its own."""
    stack = tree.get("stack") or {}
    if stack.get("kernels", _chosen(tree, "kernels")) != _chosen(tree, "kernels"):
        return None
    return {name: stack[name] for name in Stack.model_fields if name in stack} or None


def _chosen(tree: Tree, section: str) -> Any:
    return (tree.get(section) or {}).get("name", NONE)


def _without_pim(system: Mapping[str, Any]) -> dict[str, Any]:
    return {**system, "gpu": {name: value for name, value in system["gpu"].items() if name != "pim"}}


def product_format(design: StepDesign) -> str:
    """Precision of the products of linear layers; with scales of blocks `fp8_block`, where a machine has constants."""
    run = design.run
    of_blocks = run.products == "fp8" and run.scales == "block"
    return _BLOCKS if of_blocks and _BLOCKS in (design.system.gpu.efficiency or {}) else run.products or run.precision


_BLOCKS: MeasuredFormat = "fp8_block"


def constants_of(design: StepDesign) -> dict[str, str | None]:
    """Precision of the run and of its products -> that whose constants it has."""
    names = (design.run.precision, product_format(design))
    return {str(name): design.system.gpu.stands_for(name) for name in names}


def reads_constant(path: str, design: StepDesign) -> bool:
    """Tell whether a constant of the machine counts: of efficiency at the run's precisions, of what is used."""
    if path.startswith("system.node.in_switch."):  # constants that the run does not read are no facts of it
        return design.parallel.collectives == "in_switch"
    if path.startswith("system.node.experts."):
        return design.parallel.ep > 1
    efficiency = "system.gpu.efficiency."
    constants = set(constants_of(design).values())
    return not path.startswith(efficiency) or path.removeprefix(efficiency).partition(".")[0] in constants


def rules(design: StepDesign) -> Iterator[Rule]:
    """Rules between sections, each with where over a grid it is broken."""
    system, run, parallel = design.system, design.run, design.parallel
    yield from _precision_rules(design)
    if run.mode != "training" and parallel.zero:
        yield Rule("parallel.zero", True, "splits the state of an optimizer, and inference has none", way_out="set 0")
    if design.optimizer.in_backward:  # a layer's gradients are gone once it is updated
        rule = "needs gradients summed over micro-batches, while each layer is updated in the backward pass"
        several, way = np.asarray(run.micro_batches) > 1, "set 1, or optimizer.in_backward=false"
        yield Rule("run.micro_batches", several, rule, run.micro_batches, way_out=way)
    yield from stack_rules(design)
    yield from _schedule_rules(design)
    if parallel.exchanges == "one_kernel":
        yield from _expert_kernel_rules(design)
    yield from _gpu_rules(system.gpu)
    yield from _node_rules(design)
    yield from _epoch_rules(design)
    yield from _copy_rules(design)
    yield from _mode_rules(design.model, run)
    yield from pass_rules(design.model, run, parallel, lengths=design.lengths is not None)
    yield from offload_rules(design.model, run, parallel, system)
    yield from _format_rules(design)
    options = {"quantised": design.quantised is not None, "lengths": design.lengths is not None}
    yield from parallel_rules(design.model, run, parallel, **options)
    if isinstance(design.model, Transformer):
        if design.model.latent is None:
            yield from _head_rules(design.model)
        yield from _division_rules(design.model, parallel)
        return
    # only layers of transformers are known to be split
    for path, degree in (("parallel.tp", parallel.tp), ("parallel.pp", parallel.pp)):
        rule = "splits a model that is no transformer, which is not modelled"
        yield Rule(path, np.asarray(degree) > 1, rule, degree, way_out=f"set {path}=1")


def _precision_rules(design: StepDesign) -> Iterator[Rule]:
    """The machine has constants for the precisions of a run, and the optimizer data for what is trained."""
    gpu, run, optimizer = design.system.gpu, design.run, design.optimizer
    if gpu.constants(run.precision) is None:  # nor of one near it
        rule = f"has no constants for {run.precision}"
        precisions = f"run.precision is one of {', '.join(gpu.efficiency)}"
        yield Rule("system.gpu.efficiency", True, rule, way_out=f"{precisions}; or python -m dse machine calibrate")
    if run.products is not None and gpu.constants(run.products) is None:
        formats = (name for name in get_args(Precision) if gpu.constants(name) is not None)
        precisions = f"run.products is null or one of {', '.join(formats)}"
        yield Rule("system.gpu.efficiency", True, f"has no constants for {run.products}", way_out=precisions)
    if run.mode == "training" and run.precision == "fp8":
        rule = "is of inference: what is trained has activations of 16 bits"
        yield Rule("run.precision", True, rule, run.precision, way_out="set run.precision=bf16 run.products=fp8")
    elif run.mode == "training" and optimizer.bytes_of(run.model_copy(update=_PLAIN)) is None:
        way = f"give it with its source, or take one of {', '.join(optimizer.state_bytes)} as run.precision"
        rule = f"has no {run.precision} data in traffic_bytes and state_bytes"
        yield Rule("optimizer", True, rule, way_out=way)


def _schedule_rules(design: StepDesign) -> Iterator[Rule]:
    """Virtual stages are of interleaved pipelines, have whole layers, and take micro-batches in groups of stages."""
    parallel, run, model = design.parallel, design.run, design.model
    pp, several = np.asarray(parallel.pp), np.asarray(parallel.virtual_stages)
    if run.mode != "training" and parallel.pipeline not in ("1f1b", "gpipe"):
        rule = "is of training: a forward pass alone has nothing to fill a bubble with"
        yield Rule("parallel.pipeline", True, rule, parallel.pipeline, way_out="set 1f1b")
    if parallel.pipeline != "interleaved":
        return
    uneven = (np.asarray(run.micro_batches) % pp != 0) & (pp > 1)  # one stage has no order to keep
    rule = "of an interleaved pipeline is no multiple of parallel.pp = {0}"
    yield Rule(
        "run.micro_batches", uneven, rule, run.micro_batches, (pp,), "take a multiple, or parallel.pipeline=1f1b"
    )
    if isinstance(model, Transformer):  # stages may differ by a layer, where the ends count as layers
        layers = np.asarray(model.layers)
        rule = "times parallel.pp = {0} is more stages than layers and both ends (model has {1} layers)"
        yield Rule("parallel.virtual_stages", pp * several > layers + 2, rule, several, (pp, layers), "take fewer")


def _expert_kernel_rules(design: StepDesign) -> Iterator[Rule]:
    """Layers of experts in one kernel need software that has one on the GPU, and in the framework."""
    path, how = "parallel.exchanges", "one_kernel"
    where = design.system.gpu.name, product_format(design), design.run.mode
    software = kernel_of_experts(*where)
    if software is None:
        why = "; ".join(f"{kernel.name} {kernel.refusal(*where)}" for kernel in kernels_of_experts())
        rule = f"is a kernel that no software has here: {why or 'none is described'}"
        yield Rule(path, True, rule, how, way_out="set waited, or describe yours in conf/implementation")
        return
    node, parallel = design.system.node, design.parallel
    together = np.asarray(parallel.ep) * np.asarray(parallel.etp)
    if node is not None:
        rule = "is a kernel inside a node, of {0} GPUs, and experts of a layer are on {1}"
        far = (np.asarray(parallel.ep) > 1) & (together > node.num_gpus)
        yield Rule(path, far, rule, how, (node.num_gpus, together), "set waited, or take a smaller parallel.ep")
    stack = design.stack
    if stack is not None and stack.tool is not None and stack.candidates == "own":
        rule, elsewhere = f"is not part of {stack.tool} (stack={stack.name})", stack.tool not in software.frameworks
        way = "set waited, or write candidates=all"
        yield Rule(path, elsewhere, f"is of {software.name}, which {rule}", how, way_out=way)


def _gpu_rules(gpu: Gpu) -> Iterator[Rule]:
    """No more CUs work than there are, and a cache is switched off where it is known what that costs."""
    cus, all_cus = gpu.active_cus, gpu.num_cus
    if cus is not None:
        few = "is more than the GPU has (system.gpu.num_cus = {0})"
        yield Rule("system.gpu.active_cus", np.asarray(cus) > all_cus, few, cus, (all_cus,), "use fewer")
    if gpu.disabled_cache is not None and not gpu.without_cache:
        rule = f"is not described: system.gpu.without_cache.{gpu.disabled_cache} is missing"
        way = "give its factors with their source, or leave the cache on (null)"
        yield Rule("system.gpu.disabled_cache", True, rule, gpu.disabled_cache, way_out=way)


def _copy_rules(design: StepDesign) -> Iterator[Rule]:
    """Copies are of weights of transformers, in a format, and units in memory must be there to make them."""
    copies, gpu = design.quantised, design.system.gpu
    if copies is None:
        return
    if not isinstance(design.model, Transformer):
        rule = "of a model that is no transformer is not modelled"
        yield Rule("quantised.made_by", True, rule, copies.made_by, way_out="set quantised=none")
    if design.format is None:
        yield Rule("format", True, "is missing: copies have a format", None, way_out="choose one: format=mx9")
    if copies.made_by == "pim":
        ways = {"instructions": "instructions=plain", "system.gpu.pim": "pim=hbm3_strawman"}
        for path, value in (("instructions", design.instructions), ("system.gpu.pim", gpu.pim)):
            if value is None:
                yield Rule(path, True, "is needed by quantised=pim", None, way_out=f"choose one: {ways[path]}")
        if gpu.staged_bytes is None:
            way = "give what of kernels' inputs is under way or on the chip, with its source"
            yield Rule("system.gpu.staged_bytes", True, "is needed by quantised=pim", None, way_out=way)


def _format_rules(design: StepDesign) -> Iterator[Rule]:
    """Weights and caches in formats of their own are those of a transformer's inference, and have no copies."""
    run = design.run
    reasons = {
        "is of inference: what is trained is as wide as run.precision": run.mode == "training",
        "is of transformers": not isinstance(design.model, Transformer),
        "with copies of weights (quantised) is not modelled": design.quantised is not None,
    }
    for path, name in (("run.weights", run.weights), ("run.kv_cache", run.kv_cache)):
        for rule, broken in reasons.items():
            yield Rule(path, broken and name is not None, rule, name, way_out=f"set {path}=null")
    for path, name in (("run.gradients", run.gradients), ("run.optimizer_states", run.optimizer_states)):
        rule = "is of training: inference has no gradients and no optimizer"
        yield Rule(path, run.mode != "training" and name is not None, rule, name, way_out=f"set {path}=null")
    if run.mode == "training" and (missing := design.optimizer.unknown(run)):
        rule = "is needed by run.gradients and run.optimizer_states"
        yield Rule(
            f"optimizer.{missing}", True, rule, None, way_out="give it with its source, or leave the formats out"
        )
    if run.gradients is not None and design.parallel.gradient_bytes is not None:
        rule = "is given by run.gradients as well"
        size = design.parallel.gradient_bytes
        yield Rule("parallel.gradient_bytes", True, rule, size, way_out="leave one of both out")


def _mode_rules(model: Any, run: Run) -> Iterator[Rule]:
    """Modes and recomputation that a model has no operators for."""
    if not isinstance(model, Transformer):
        if run.mode == "decode":
            rule = "is of transformers: a recurrent model has no keys and values"
            yield Rule("run.mode", True, rule, run.mode, way_out="set prefill, the forward pass")
        if run.recompute != "none":
            rule = "is not modelled of a recurrent model"
            yield Rule("run.recompute", True, rule, run.recompute, way_out="set none")
    elif run.mode == "decode" and model.decoder_layers:
        rule = "of an encoder and a decoder is not modelled: the encoder would run for every token"
        yield Rule("run.mode", True, rule, run.mode, way_out="set prefill, or take a decoder alone")


def _division_rules(model: Transformer, parallel: Parallel) -> Iterator[Rule]:
    """tp splits heads and feed-forward layers, or copies keys; pp splits layers, those of a decoder, too."""
    tp, pp, heads, kv = (
        np.asarray(number) for number in (parallel.tp, parallel.pp, model.num_heads, model.num_kv_heads)
    )
    way, ffn = "take a divisor", np.asarray(model.width_of_ffn)
    yield Rule("parallel.tp", heads % tp != 0, "does not divide the heads (model has {0})", parallel.tp, (heads,), way)
    # copied keys must be equally many on each GPU
    uneven = (heads % tp == 0) & (kv % tp != 0) & (tp % kv != 0) & (model.latent is None)
    rule = "neither divides the heads of keys ({0}) nor is a multiple of them"
    yield Rule("parallel.tp", uneven, rule, parallel.tp, (kv,), "take one that does")
    # experts have a width of their own
    dense = model.moe is None or np.asarray(model.moe.dense_layers) > 0
    if model.pattern is not None:
        dense = np.asarray(any(kind.feed == "dense" for kind in model.pattern))
    yield Rule("parallel.tp", (ffn % tp != 0) & dense, "does not divide model.ffn ({0})", parallel.tp, (ffn,), way)
    for layers in (np.asarray(model.layers), np.asarray(model.decoder_layers)):
        yield Rule(
            "parallel.pp",
            (layers > 0) & (pp > layers),
            "is more stages than layers (model has {0})",
            parallel.pp,
            (layers,),
            "use at most {0}",
        )


def _head_rules(model: Transformer) -> Iterator[Rule]:
    """Heads are whole numbers of columns, and of queries for each key."""
    if model.heads is None:  # 64 is then the width of a head
        width = np.asarray(64 if model.head_dim is None else model.head_dim)
        rule, way = "is no multiple of the width of a head ({0})", "give model.heads, or another width"
        yield Rule("model.hidden", np.asarray(model.hidden) % width != 0, rule, model.hidden, (width,), way)
    if model.heads is not None and model.head_dim is None:
        uneven = np.asarray(model.hidden) % np.asarray(model.heads) != 0
        rule, way = "does not divide the width (model.hidden = {0})", "take a divisor, or give model.head_dim"
        yield Rule("model.heads", uneven, rule, model.heads, (model.hidden,), way)
    if model.kv_heads is not None:
        heads = np.asarray(model.num_heads)
        rule, uneven = "does not divide the heads (model has {0})", heads % np.asarray(model.kv_heads) != 0
        yield Rule("model.kv_heads", uneven, rule, model.kv_heads, (heads,), "take a divisor")


def _node_rules(design: StepDesign) -> Iterator[Rule]:
    """Several GPUs need a library of collectives, and those beyond a node a network."""
    node, parallel = design.system.node, design.parallel
    gpus, degrees = parallel.gpus, "tp x pp x dp" if parallel.cp == 1 else "tp x cp x pp x dp"
    way = "give it with its source"
    if node is None or node.library is None:
        rule = f"is missing: {degrees} is {{0}} GPUs"
        yield Rule("system.node.library", gpus > 1, rule, given=(gpus,), way_out=way)
    elif node.library.network_bytes_per_s is None:  # a library without a network serves one node
        rule = f"is missing: {degrees} is {{0}} GPUs, a node has {{1}}"
        path = "system.node.library.network_bytes_per_s"
        way = "write `fabric=ndr400`, or another network: python -m dse fabrics"
        yield Rule(path, leaves_node(node, parallel), rule, given=(gpus, node.num_gpus), way_out=way)
    yield from _link_rules(design)
    if parallel.collectives == "in_switch" and (node is None or node.in_switch is None):
        rule = "needs a switch that adds (system.node.in_switch), which the node lacks"
        ways = "set library, or take a machine that has one: python -m dse machine list"
        yield Rule("parallel.collectives", True, rule, parallel.collectives, way_out=ways)
    if parallel.split_ctas:
        yield from _split_rules(design)
    yield from _ctas_rules(design)


def _split_rules(design: StepDesign) -> Iterator[Rule]:
    """Halves of tokens are of prompts, of transformers that several GPUs share, whose switch or library adds."""
    run, parallel, node, copy = design.run, design.parallel, design.system.node, design.system.gpu.cu_copy
    # the sum is computed by the switch
    adds = node is not None and node.in_switch is not None and "all_reduce" in node.in_switch.collectives
    switched, split = parallel.collectives == "in_switch", "splits prompts, whose partial sums are added"
    broken = {
        "run.mode": (run.mode != "prefill", "needs run.mode=prefill"),
        "model.kind": (not isinstance(design.model, Transformer), "needs a transformer"),
        "quantised": (design.quantised is not None, "needs quantised=none"),
        "switch": (switched and not adds, "needs a switch that adds, or parallel.collectives=library"),
        "library": (not switched and copy is None, "needs kernels of the library (system.gpu.cu_copy)"),
        "sequence_parallel": (parallel.sequence_parallel, "needs parallel.sequence_parallel=false"),
    }
    for excluded, way in broken.values():
        yield Rule("parallel.split_ctas", excluded, f"{split}: it {way}", parallel.split_ctas, way_out="set 0")
    alone = np.asarray(parallel.tp) < 2
    yield Rule("parallel.split_ctas", alone, f"{split}: it needs parallel.tp > 1", parallel.split_ctas, way_out="set 0")
    if not switched and copy is not None:
        most = np.asarray(copy.num_cus)
        rule = "is more than the library's all-reduce takes (system.gpu.cu_copy.num_cus)"
        way = "take {0} at most, or parallel.collectives=in_switch"
        yield Rule("parallel.split_ctas", parallel.split_ctas > most, rule, parallel.split_ctas, (most,), way)


def _ctas_rules(design: StepDesign) -> Iterator[Rule]:
    """CTAs of a library's kernels are no more than it takes, and are of kernels that are known, over some GPUs."""
    parallel, copy, node = design.parallel, design.system.gpu.cu_copy, design.system.node
    replicas = np.maximum(parallel.replicas, parallel.expert_replicas)
    for axis, gpus in (("tp", parallel.tp), ("dp", replicas)):
        path, ctas = f"parallel.{axis}_ctas", getattr(parallel, f"{axis}_ctas")
        if not ctas:
            continue
        rule = f"is of collectives over {axis}, which is of one GPU"
        yield Rule(path, np.asarray(gpus) < 2, rule, ctas, way_out="set 0")
        rule = "is of kernels whose rates are not known here (system.gpu.cu_copy, links and measured collectives)"
        known = copy is not None and node is not None and has_links(design.system) and bool(node.protocols())
        yield Rule(path, not known, rule, ctas, way_out="set 0")
        if copy is not None:
            most = np.asarray(copy.num_cus)
            rule = "is more than the library's kernels take (system.gpu.cu_copy.num_cus = {0})"
            yield Rule(path, np.asarray(ctas) > most, rule, ctas, (most,), "set {0} at most, or 0")


def _link_rules(design: StepDesign) -> Iterator[Rule]:
    """Collectives over links need the links, and kernels that copy."""
    system, parallel = design.system, design.parallel
    if system.costs.collective != "links":  # the library's constants need no description of links
        return
    gpus, node = parallel.gpus, system.node
    needed = {
        "gpu.cu_copy": system.gpu.cu_copy,
        "node.topology": None if node is None else node.topology,
        "node.link_bytes_per_s": None if node is None else node.link_bytes_per_s,
    }
    for path, value in needed.items():
        if value is None:
            rule = "is missing: costs.collective = links reads it"
            yield Rule(f"system.{path}", gpus > 1, rule, way_out="use system.costs.collective=library")
    if node is not None:
        yield from link_rules(node, system.gpu.num_links)


def _epoch_rules(design: StepDesign) -> Iterator[Rule]:
    """An epoch must have iterations, and as many as are wanted of it."""
    if design.lengths is None:
        return
    try:
        size = len(iteration_lengths(design.lengths, design.run.batch, design.run.seed))
    except ConfigError as error:  # the sequence lengths themselves break rules: reported here
        yield from map(Rule.of, error.problems)
        return
    for path, degree in (("parallel.dp", design.parallel.dp), ("run.micro_batches", design.run.micro_batches)):
        rule = "is more than one, and an epoch of sequences of all lengths is of one batch an iteration"
        yield Rule(path, np.asarray(degree) > 1, rule, degree, way_out=f"set {path}=1")
    choice = design.iterations
    # a window of consecutive iterations must lie inside of the epoch
    if choice is not None and choice.method == "prior" and choice.warm_up + choice.window > size:
        rule = "ends beyond the {0} iterations of an epoch, after a warm-up of {1}"
        yield Rule("iterations.window", True, rule, choice.window, (size, choice.warm_up), "choose fewer")


def tied_weights(design: StepDesign) -> ArrayLike:
    """Weights of a GPU that the input and the output of a transformer share."""
    model = design.model
    if not isinstance(model, Transformer) or not model.tied:  # only ends of a transformer share weights
        return 0.0
    weights: NDArray[np.float64] = (
        np.asarray(model.vocab, float) * np.asarray(model.hidden) / np.asarray(design.parallel.tp)
    )
    return weights


def streaming_rates(design: StepDesign) -> dict[str, StreamingRates]:
    """Fitted constants of operators that memory bounds, as the setting speeds them up."""
    # launches of streams follow the speed of the GPU
    faster, constants = np.asarray(design.system.gpu.flop_vs_bw), design.system.gpu.streaming(design.run.precision)
    return {
        name: fitted.model_copy(update={"launch_s": fitted.launch_s / faster}) for name, fitted in constants.items()
    }
