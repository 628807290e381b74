"""Axes of the study, and its designs beside the space: what is profiled, public models, slower networks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from dse.config.compose import searched_knobs
from dse.space import Case, get_path
from simulators.hardware.device import Device
from simulators.steps.plan.given_plan import with_values
from simulators.workloads.model import Transformer
from simulators.workloads.model_zoo import model_tree
from simulators.workloads.public_models import public
from studies.common.facts import facts

WIDTH, LENGTH, BATCH, TP = "model.hidden", "run.sequence_length", "run.batch", "parallel.tp"
FASTER = "system.gpu.flop_vs_bw"
NETWORK = "system.node.library.network_bytes_per_s"
AXES = (WIDTH, LENGTH, BATCH, TP, FASTER)
_TIMES = (1.0, 2.0, 4.0)  # FLOP/s over bandwidth, of that of today


def profiled_case(tree: Mapping[str, Any]) -> dict[str, Case]:
    """The iteration that is profiled: one GPU, as deep as BERT-Large."""
    baseline = facts("comp_vs_comm")["baseline"]
    size = {WIDTH: baseline["hidden"], LENGTH: baseline["sequence_length"], BATCH: baseline["batch"]}
    alone = {TP: 1, FASTER: 1.0, "parallel.dp": 1, "model.layers": model_tree("bert_large")["layers"]}
    return {"baseline": Case(with_values(tree, {**size, **alone}))}


def _network_rates(tree: Mapping[str, Any]) -> tuple[float, ...]:
    """Rates between servers [B/s]: as fast as links inside, and slower; () without a network."""
    node = Device.of(tree["system"]).node
    if node is None or node.library is None or node.library.network_bytes_per_s is None:
        return ()
    inside = float(np.asarray(node.library.bytes_per_s))
    return inside, inside / float(facts("comp_vs_comm")["network_slower"])


def network_cases(config: Mapping[str, Any], tree: Mapping[str, Any]) -> dict[str, Case]:
    """The space on hardware of today, TP inside a server and dp between servers, over rates between these."""
    rates, searched = _network_rates(tree), searched_knobs(config)
    values = {path: searched[path].values if path in searched else (get_path(config, path),) for path in AXES}
    if not rates or not all(values.values()) or None in values[WIDTH]:  # presets have no width to vary
        return {}
    grid = {path: values[path] for path in (WIDTH, LENGTH, BATCH)} | {NETWORK: rates}
    now = min(values[FASTER])
    # TP fills a server, so that dp crosses servers
    apart = ({TP: tp, "system.node.num_gpus": tp, FASTER: now} for tp in values[TP])
    return {f"TP {change[TP]}": Case(with_values(tree, change), grid) for change in apart}


def sequence_length(name: str) -> int:
    """Sequence length of a public model."""
    return int(public().get(name, {}).get("sequence_length", 2048))


def model_cases(tree: Mapping[str, Any]) -> dict[str, Case]:
    """A sequence of each public model at every TP that divides its heads, over FLOP/s against bandwidth."""
    cases = {}
    for name in facts("comp_vs_comm")["models"]:
        size = {LENGTH: sequence_length(name), BATCH: 1, "parallel.dp": 1}
        sections = with_values({**tree, "model": model_tree(name)}, size)
        cases[name] = Case(sections, {TP: _degrees(Transformer.model_validate(sections["model"])), FASTER: _TIMES})
    return cases


def _degrees(model: Transformer) -> list[int]:
    """Degrees of tensor parallelism that divide the heads and feed-forward layers of a model."""
    heads, ffn = (int(np.asarray(getattr(model, name))) for name in ("num_heads", "width_of_ffn"))
    keys = int(np.asarray(getattr(model, "num_kv_heads", heads)))
    fits = (degree for degree in range(1, heads + 1) if heads % degree == ffn % degree == 0)
    # KV heads are copied where there are more GPUs than heads
    return [degree for degree in fits if keys % degree == 0 or degree % keys == 0]
