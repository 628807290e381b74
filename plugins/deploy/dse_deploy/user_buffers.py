"""User buffers of Transformer Engine: how each layer overlaps its GEMM with a collective, as `ub_cfgs` has it.

    layer                               site                              methods
    qkv_fprop, fc1_fprop                attention_in, ffn_in              ring_exchange
    proj_fprop, fc2_fprop               attention_out, ffn_out            ring_exchange, pipeline
    proj_dgrad, fc2_dgrad               attention_out_, ffn_out_backward  ring_exchange
    qkv_dgrad, fc1_dgrad                attention_in_, ffn_in_backward    ring_exchange, pipeline (sums after dX)
    qkv_wgrad, fc1_wgrad                the same                          bulk (sums beside dW)

A ring exchanges a shard with one peer after the other, by copy engines (`use_ce`) or by `num_sm` SMs, and multiplies
one shard at a time, or two (`aggregate`); one kernel whose tiles wait for shards is `atomic_gemm`. A pipeline cuts the
GEMM into `num_splits` pieces, whose collectives `num_sm` SMs move. Bulk runs one collective of a library's kind on
`num_sm` SMs beside a GEMM. Methods and layers as in transformer_engine/pytorch/module/base.py (initialize_ub, 2.x).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from dse.errors import Problems, did_you_mean
from dse.values import Frozen
from dse.values.units import Integer
from simulators.steps.overlap.sites import SERIAL, SITES, read_schedule

_USUAL_SMS = 16  # of a pipeline and in bulk
MOST_SMS = 32
"""SMs that user buffers have communicators for (UB_MAX_SM)."""
_FORWARD = {"attention_in": "qkv_fprop", "ffn_in": "fc1_fprop", "attention_out": "proj_fprop", "ffn_out": "fc2_fprop"}
_GATHERED = {"attention_out_backward": "proj_dgrad", "ffn_out_backward": "fc2_dgrad"}
_SUMMED = {"attention_in_backward": "qkv", "ffn_in_backward": "fc1"}
LAYERS: Mapping[str, str] = {
    **{layer: site for site, layer in (_FORWARD | _GATHERED).items()},
    **{f"{block}_{kind}": site for site, block in _SUMMED.items() for kind in ("dgrad", "wgrad")},
}
"""Layer of Transformer Engine -> the site that it sets."""
_BY_DEFAULT: Mapping[str, str] = {
    **{layer: site for site, layer in (_FORWARD | _GATHERED).items()},
    **{f"{block}_wgrad": site for site, block in _SUMMED.items()},
}
"""Layer that overlaps by itself -> its site."""
_BY_PIECES = ("chunked", "shard_p2p", "signalled")

_RING = "transformer_engine"
"""Implementation of a ring exchange, with what it costs (`conf/implementation`)."""

Method = Literal["ring_exchange", "pipeline", "bulk", "external"]
Flag = Annotated[Integer, Field(ge=0, le=1)]


class UserBuffer(Frozen):
    """Settings of a layer; what is None has the tool's default."""

    method: Method
    num_sm: Annotated[Integer, Field(ge=1, le=MOST_SMS)] | None = None
    cga_size: Annotated[Integer, Field(ge=1, le=16)] | None = None
    set_sm_margin: Flag | None = None
    num_splits: Annotated[Integer, Field(ge=1, le=1024)] | None = None
    aggregate: Flag | None = None
    atomic_gemm: Flag | None = None
    use_ce: Flag | None = None
    fp8_buf: Flag | None = None
    is_reduce_scatter: Flag | None = None
    comm_priority: Integer | None = None
    gemm_priority: Integer | None = None
    pipeline_rs_overlap_first_gemm: Flag | None = None

    @property
    def tree(self) -> dict[str, Any]:
        """What is set."""
        return {name: value for name, value in self if value is not None}


METHODS: Mapping[str, str] = {
    "ring_exchange": "shards go from GPU to GPU; a GEMM for each, or for two (aggregate), or one for all (atomic_gemm)",
    "pipeline": "the GEMM in num_splits pieces, each with a collective on num_sm SMs during the next",
    "bulk": "a collective on num_sm SMs during a GEMM that does not wait for it",
}


def layers_of(sites: Mapping[str, str], tp: int, *, fp8: bool) -> dict[str, UserBuffer]:
    """Settings of the layers whose sites have schedules that user buffers know. tp: GPUs that share a layer.

    fp8: whether GEMMs are of FP8, of which alone one kernel may wait for shards.
    """
    layers = dict[str, UserBuffer]()
    for site, text in sites.items():
        schedule = None if text == SERIAL else read_schedule(text, site)
        if schedule is None:
            continue
        # sums next to dW: one collective during a GEMM that does not need it
        if schedule.family == "concurrent" and site in _SUMMED and schedule.comm_engine == "cu":
            layers[f"{_SUMMED[site]}_wgrad"] = _bulk(schedule)
        # copies into near memory have no counterpart in user buffers
        elif schedule.family in _BY_PIECES and not getattr(schedule, "near_memory", False):
            layers[_layer(site)] = _by_pieces(schedule, site, tp, fp8=fp8)
    return _paired(layers)


def with_all_sums(layers: Mapping[str, UserBuffer]) -> dict[str, UserBuffer]:
    """The same layers, and where the sums of one block overlap their own GEMM, those of the others alike.

    One flag says it of all blocks, and to `initialize_ub` a layer that is left out is in bulk.
    """
    sums = [layer for name, layer in layers.items() if name in _SUMS]
    # all in bulk, which is the default
    if not sums:
        return dict(layers)
    in_pieces = {name: layer for name, layer in layers.items() if layer.method != "bulk"}
    return {**in_pieces, **{name: layers.get(name, sums[0]) for name in _SUMS}}


def _paired(layers: Mapping[str, UserBuffer]) -> dict[str, UserBuffer]:
    """Settings of which a gather and the sum that belongs to it both have one kernel for all shards, or neither."""
    paired = dict(layers)
    for pair in _PAIRS:
        both = [paired[name] for name in pair if name in paired]
        if len({layer.atomic_gemm for layer in both}) > 1 or len(both) < len(pair):
            paired |= {name: paired[name].model_copy(update={"atomic_gemm": None}) for name in pair if name in paired}
    return paired


_PAIRS = (("qkv_fprop", "proj_fprop"), ("fc1_fprop", "fc2_fprop"))
_SUMS = tuple(f"{block}_dgrad" for block in _SUMMED.values())
"""Layers whose sums overlap their own GEMM, in place of bulk."""


def _layer(site: str) -> str:
    return f"{_SUMMED[site]}_dgrad" if site in _SUMMED else (_FORWARD | _GATHERED)[site]


def _bulk(schedule: Any) -> UserBuffer:
    # 0 becomes None: the tool's default
    sms = min(MOST_SMS, int(schedule.comm_cus)) or None
    return UserBuffer(method="bulk", num_sm=sms, cga_size=2, set_sm_margin=int(bool(schedule.partition)))


def _by_pieces(schedule: Any, site: str, tp: int, *, fp8: bool) -> UserBuffer:
    """A GEMM in pieces: a pipeline where SMs add what a GEMM has made, else a ring."""
    # without a count of pieces there is one for each GPU
    by_copies, pieces = schedule.comm_engine == "dma", int(getattr(schedule, "num_chunks", tp))
    cus = getattr(schedule, "comm_cus", None)  # None: tiles of the GEMM send by themselves
    sms = None if by_copies or cus is None else min(MOST_SMS, int(cus))
    # only a GEMM before its collective can be cut into a pipeline
    if schedule.family == "chunked" and SITES[site].order == "after" and not by_copies:
        return UserBuffer(method="pipeline", num_sm=sms, cga_size=2, num_splits=pieces, set_sm_margin=1)
    return UserBuffer(
        method="ring_exchange",
        num_sm=sms,
        # fewer pieces than GPUs: shards are multiplied in pairs
        aggregate=int(schedule.family == "chunked" and pieces < tp) if SITES[site].order == "before" else None,
        atomic_gemm=1 if fp8 and schedule.family == "signalled" else None,
        use_ce=int(by_copies),
    )


def sites_of(layers: Mapping[str, UserBuffer], tp: int) -> dict[str, str]:
    """Schedules of sites that settings of layers mean; layers that are no site's are left out.

    A layer that is not named has the tool's default: sums are in bulk, whatever those of another block are.
    """
    named = {name: layer for name, layer in layers.items() if is_of_a_site(name, layer)}
    # layers that are named count over defaults
    sites = {LAYERS[name]: _schedule(name, layer, tp) for name, layer in named.items()}
    for name, site in _BY_DEFAULT.items():
        sites.setdefault(site, _schedule(name, UserBuffer(method=_usual_method(name)), tp))
    return sites


def is_of_a_site(name: str, layer: UserBuffer) -> bool:
    """Tell whether a layer is of a site: gathering an input beside dX (a bulk dgrad) is not."""
    return name in LAYERS and not (name.endswith("_dgrad") and layer.method == "bulk")


def _schedule(name: str, layer: UserBuffer, tp: int) -> str:
    if layer.method == "bulk":
        option = "c3_sp_rp" if layer.set_sm_margin else "c3_sp"
        return f"{option} comm_cus={layer.num_sm or _USUAL_SMS}"
    if layer.method == "pipeline":
        return (
            f"uniform_fused_1d num_chunks={layer.num_splits or 4} comm_engine=cu comm_cus={layer.num_sm or _USUAL_SMS}"
        )
    by_sms = f" comm_engine=cu comm_cus={layer.num_sm or 1}" if layer.use_ce == 0 else ""
    if layer.atomic_gemm:
        return f"signalled{by_sms}"
    # `aggregate` means something only for gathered inputs
    in_pairs = layer.aggregate and SITES[LAYERS[name]].order == "before"
    return (f"hetero_fused_1d num_chunks={max(1, tp // 2)}" if in_pairs else _RING) + by_sms


def read_layers(tree: Any) -> dict[str, UserBuffer]:
    """Settings of layers from a tree of YAML. Raises ConfigError with every problem."""
    check, layers = Problems(), dict[str, UserBuffer]()
    if not isinstance(tree, Mapping):
        check.add("settings", "is no mapping of layers", value=tree, way_out="qkv_fprop: {method: ring_exchange}")
        check.done()
    for name, entry in tree.items():
        if name not in LAYERS and name not in _OTHERS:
            check.add(str(name), "is no layer of user buffers", way_out=did_you_mean(str(name), [*LAYERS, *_OTHERS]))
            continue
        if not isinstance(entry, Mapping | None):
            check.add(str(name), "is no mapping of settings", value=entry, way_out=f"{name}: {{method: bulk}}")
            continue
        # YAML has true and false, Transformer Engine 0 and 1
        flags = {key: int(value) if isinstance(value, bool) else value for key, value in (entry or {}).items()}
        layer = check.model(UserBuffer, {"method": _usual_method(str(name)), **flags}, path=str(name))
        if layer is not None:
            layers[str(name)] = layer
            if layer.method not in _methods(str(name)):
                way = f"one of {', '.join(_methods(str(name)))}"
                check.add(f"{name}.method", "is no method of this layer", value=layer.method, way_out=way)
    for block in _SUMMED.values():
        # dgrad and wgrad would both carry the same sums
        sums = layers.get(f"{block}_dgrad")
        if sums is not None and sums.method != "bulk" and f"{block}_wgrad" in layers:
            rule = f"is in bulk, which sums that overlap their own GEMM ({block}_dgrad) turn off"
            check.add(f"{block}_wgrad", rule, way_out="leave it out")
    check.done()
    return layers


_OTHERS = ("proj_wgrad", "fc2_wgrad")
"""Layers of no site."""


def _methods(name: str) -> tuple[str, ...]:
    if name.endswith("_wgrad"):
        return ("external",) if name in _OTHERS else ("bulk",)
    if name in ("proj_fprop", "fc2_fprop"):
        return ("pipeline", "ring_exchange")
    return ("bulk", "pipeline", "ring_exchange") if name in ("qkv_dgrad", "fc1_dgrad") else ("ring_exchange",)


def _usual_method(name: str) -> Method:
    """The method of a layer that names none, as `initialize_ub` has it."""
    if name in _OTHERS:
        return "external"
    if name.endswith("_wgrad") or name in _SUMS:
        return "bulk"
    return "pipeline" if name in ("proj_fprop", "fc2_fprop") else "ring_exchange"
