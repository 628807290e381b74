"""Formats of stored weights as the files of model hubs say them (`quantization_config`), by part of the model.

A method says the format; lists say which modules keep 16 bits. Modules are looked at by the names that frameworks give
them, layer by layer: a part of which some are left out has its format for the share of the weights that is left. What a
section says that is not understood is refused: memory would be wrong without a word.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any

from pydantic import StringConstraints, TypeAdapter
from pydantic_core import SchemaError

from simulators.workloads.stored import weight_format

Tree = Mapping[str, Any]
Module = tuple[str, str, float]  # part, name below its layer, weights
_PREFIXES = ("model.", "", "model.language_model.", "language_model.model.", "backbone.")
_LISTS = (
    *("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules", "exclude"),
    *("llm_int8_skip_modules", "unquantized_modules"),
)
_16_BITS = 16
# each is matched with every module of every layer
_MOST_ANYWHERE, _MOST_TARGETS = 1000, 5000  # names that are looked for in every layer
_ALGORITHMS: Mapping[str, str] = {
    "FP8": "fp8",
    "FP8_PER_CHANNEL_PER_TOKEN": "fp8_row",
    "FP8_PB_WO": "fp8_block",
    "FP8_PB_REAL": "fp8_block",
    "MXFP8": "mxfp8",
    "MXFP4": "mxfp4",
    "W4A8_MXFP4_FP8": "mxfp4",
    "NVFP4": "nvfp4",
    "NVFP4_AWQ": "nvfp4",
    "W4A16_NVFP4": "nvfp4",
    "NVFP4_SVDQUANT": "nvfp4",
    "W4A16_AWQ": "int4",
    "W4A8_AWQ": "int4",
    "INT4_AWQ": "int4",
    "W8A8_SQ_PER_CHANNEL": "int8",
    "W8A16": "int8",
    "INT8": "int8",
}
_TYPES: Mapping[str, str] = {
    **dict.fromkeys(("fp8", "fp8_e4m3", "fp8_e5m2"), "fp8"),
    **dict.fromkeys(("mx", "fp4", "mxfp4"), "mxfp4"),
    **dict.fromkeys(("mx6", "mxfp6"), "mxfp6"),
    "mxfp8": "mxfp8",
    **dict.fromkeys(("int8", "uint8"), "int8"),
    **dict.fromkeys(("int4", "uint4"), "int4"),
    "int3": "int3",
}
_CACHES: Mapping[str, str] = {"FP8": "fp8", "NVFP4": "nvfp4", "INT8": "int8", "FP16": "fp16", "BF16": "bf16"}


class Unread(Exception):
    """A part of a section that is not understood."""

    def __init__(self, key: str, rule: str, value: Any) -> None:
        super().__init__(key)
        self.key, self.rule, self.value = key, rule, value


@dataclass(frozen=True)
class _QuantisedSection:
    """A section as it is read: the format of a module by its full names (None: 16 bits), and of keys and values."""

    format_of: Callable[[Sequence[str]], Tree | None]
    cache: Tree | None = None
    parts: tuple[str, ...] = ("attention", "state", "dense", "experts", "shared")
    output: bool = False


def stored_tree(section: Any, model: Tree, kinds: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Trees `stored` and `kv_format` of a model. kinds: mixer and feed of each layer. Raises Unread."""
    if not isinstance(section, dict):
        raise Unread("", "is no section of keys", section)
    inner = section.get("quantization")
    section = {**section, **inner} if isinstance(inner, dict) else section
    reading = _reader(section)(section)
    skipped = _WideModules.of(section)
    totals, amounts = dict[str, float](), dict[str, dict[str, tuple[Tree, float]]]()
    for layer, kind in enumerate(kinds):
        for part, name, weights in _modules(model, kind):
            # frameworks wrap a text model in different names: any of them may be meant
            names = [f"{prefix}layers.{layer}.{name}" for prefix in _PREFIXES]
            totals[part] = totals.get(part, 0.0) + weights
            format = None if part not in reading.parts or skipped.has(names, layer) else reading.format_of(names)
            _add(amounts, part, format, weights)
    totals["output"] = 1.0
    heads = ["lm_head", "model.lm_head", "language_model.lm_head", "output"]
    _add(amounts, "output", reading.format_of(heads) if reading.output and not skipped.has(heads, -1) else None, 1.0)
    stored = {
        part: [
            {"format": dict(format), "share": min(1.0, round(weights / totals[part], 12))} for format, weights in shares
        ]
        for part in amounts
        if (shares := list(amounts[part].values()))
    }
    cache = {"kv_format": dict(reading.cache)} if reading.cache else {}
    return ({"stored": stored} if stored else {}) | cache


def _add(amounts: dict[str, dict[str, tuple[Tree, float]]], part: str, format: Tree | None, weights: float) -> None:
    """Add weights of a part in a format."""
    if format is not None and weights > 0:
        shares = amounts.setdefault(part, {})
        _, before = shares.get(str(format), (format, 0.0))
        shares[str(format)] = format, before + weights


# Modules


def _modules(model: Tree, kind: tuple[str, str]) -> Iterator[Module]:
    """Yield the matrices of a layer, by the names that most frameworks give them, with their weights."""
    mixer, feed = kind
    # hybrids have one mixer or feed a layer, under one name
    hybrid = "none" in kind
    if mixer == "attention":
        yield from (
            ("attention", f"{'mixer' if hybrid else 'self_attn'}.{name}", size) for name, size in _projections(model)
        )
    elif mixer == "state":
        state, below = model["state"], "mixer" if hybrid else "linear_attn"
        yield "state", f"{below}.in_proj", model["hidden"] * state["projected"]
        yield "state", f"{below}.out_proj", model["hidden"] * state["outputs"]
    names = ("gate_proj", "up_proj", "down_proj") if model["gated"] else ("up_proj", "down_proj")
    below = "mixer" if hybrid else "mlp"
    if feed == "dense":
        yield from (("dense", f"{below}.{name}", 1.0) for name in names)
    elif feed == "experts":
        # one expert stands for all: a list is taken to name all of them or none
        yield from (("experts", f"{below}.experts.0.{name}", 1.0) for name in names)
        yield from (("shared", f"{below}.shared_experts.{name}", 1.0) for name in names)


def _projections(model: Tree) -> Iterator[tuple[str, float]]:
    """Yield the projections of attention with their weights."""
    hidden, heads = model["hidden"], model["heads"]
    if (latent := model.get("latent")) is None:
        head = model.get("head_dim") or hidden // heads
        queries, keys = heads * head, (model.get("kv_heads") or heads) * head
        yield from (("q_proj", hidden * queries), ("k_proj", hidden * keys), ("v_proj", hidden * keys))
        yield "o_proj", hidden * queries
        return
    key, rank = latent["nope_dim"] + latent["rope_dim"], latent.get("q_rank")
    if rank:
        yield from (("q_a_proj", hidden * rank), ("q_b_proj", rank * heads * key))
    else:
        yield "q_proj", hidden * heads * key
    yield "kv_a_proj_with_mqa", hidden * (latent["kv_rank"] + latent["rope_dim"])
    yield "kv_b_proj", latent["kv_rank"] * heads * (latent["nope_dim"] + latent["value_dim"])
    yield "o_proj", heads * latent["value_dim"] * hidden


_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)(?:\.|\*|$)")
_ALIASES: Sequence[tuple[re.Pattern[str], str]] = tuple(
    (re.compile(pattern), name)
    for pattern, name in (
        (r"\bshared_expert\b", "shared_experts"),
        (r"\b(block_sparse_moe|feed_forward|ffn|moe)\b", "mlp"),
        (r"\bself_attention\b|\battn\b|\battention\b", "self_attn"),
        (r"\bmamba\b", "linear_attn"),
        (r"\bw1\b", "gate_proj"),
        (r"\bw3\b", "up_proj"),
        (r"\bw2\b", "down_proj"),
        (r"\b(in_proj_qkvz|in_proj_qkv|in_proj_z|qkvz_proj)\b", "in_proj"),
    )
)


def _usual(text: str) -> str:
    """The name of a module as most frameworks have it."""
    for pattern, name in _ALIASES:
        text = pattern.sub(name, text)
    return text


@dataclass(frozen=True)
class _WideModules:
    """Patterns of modules that keep 16 bits: those of one layer by its number, and those of any."""

    of_layers: Mapping[int, Sequence[str]]
    of_any: Sequence[str]

    @classmethod
    def of(cls, section: Tree) -> _WideModules:
        """Build from the lists of a section. Raises Unread."""
        of_layers, of_any = dict[int, list[str]](), list[str]()
        for key in _LISTS:
            patterns = section.get(key) or []
            if not isinstance(patterns, list) or not all(isinstance(text, str) for text in patterns):
                raise Unread(key, "is no list of names of modules", patterns)
            for text in patterns:
                # by number: a list with a name for each layer is then not matched with all others
                layer = None if text.startswith("re:") else _LAYER.search(text)
                (of_any if layer is None else of_layers.setdefault(int(layer[1]), [])).append(text)
        if len(of_any) > _MOST_ANYWHERE:
            raise Unread("ignore", f"has more than {_MOST_ANYWHERE} names without the number of a layer", len(of_any))
        return cls(of_layers, of_any)

    def has(self, names: Sequence[str], layer: int) -> bool:
        """Tell whether a module by one of its names is left out."""
        return any(_matches(text, names) for text in (*self.of_layers.get(layer, ()), *self.of_any))


def _matches(pattern: str, names: Sequence[str]) -> bool:
    """Tell whether a pattern means a module: a regular expression (re:), one with *, or a name or part of it."""
    if pattern.startswith("re:"):
        return any(map(matcher_of(pattern[3:]), names))
    text = _usual(pattern).removesuffix(".weight")
    if "*" in text:
        # a module that is left out takes all below it along
        return any(fnmatch.fnmatchcase(name, text) or fnmatch.fnmatchcase(name, f"{text}.*") for name in names)
    # whole parts of a path: `o_proj` does not mean `go_proj`
    return any(f".{text}." in f".{name}." for name in names)


@lru_cache(maxsize=1024)
def matcher_of(pattern: str) -> Callable[[str], bool]:
    """A function that tells whether a name begins as an expression says, in time linear in both. Raises Unread.

    Pydantic matches without going back, so that no expression takes long in any thread, and none looks around.
    """
    try:
        text = TypeAdapter(Annotated[str, StringConstraints(pattern=f"^(?:{pattern})")])
    except SchemaError:
        rule = "is no regular expression that can be matched without going back: look-around and references cannot"
        raise Unread("ignore", rule, pattern[:_MOST_SHOWN]) from None
    return text.validator.isinstance_python


_MOST_SHOWN = 200  # characters of an expression in a message


# Methods


def _reader(section: Tree) -> Callable[[Tree], _QuantisedSection]:
    """The reader of a section's method. Raises Unread."""
    producer = section.get("producer")
    method = section.get("quant_method") or (producer.get("name") if isinstance(producer, dict) else None)
    if method is None and "quant_algo" in section:
        method = "modelopt"
    if method is None and section.get("config_groups"):
        method = "compressed-tensors"
    if method is None and ("load_in_4bit" in section or "load_in_8bit" in section):
        method = "bitsandbytes"
    name = str(method).lower().replace("_", "-")
    if name not in _READERS:
        raise Unread("quant_method", f"is no method that is read ({', '.join(_READERS)})", method)
    return _READERS[name]


def _format_tree(name: str, **changed: Any) -> Tree:
    """The tree of a format, with other numbers than those of the table."""
    tree = {key: value for key, value in weight_format(name).model_dump().items() if value is not None}
    return {**tree, **changed}


def _only(format: Tree, **more: Any) -> _QuantisedSection:
    return _QuantisedSection(lambda _: format, **more)


def _number(section: Tree, *keys: str, default: int | None = None) -> int:
    """A number under the first of some keys that is there. Raises Unread."""
    value = next((section[key] for key in keys if section.get(key) is not None), default)
    if isinstance(value, bool) or not isinstance(value, int):
        raise Unread(keys[0], "is no whole number", value)
    return value


def _fp8(section: Tree) -> _QuantisedSection:
    """Blocks of weights with a scale, or one for a tensor."""
    block = section.get("weight_block_size")
    if block is None:
        return _only(_format_tree("fp8"))
    if not isinstance(block, list) or not all(isinstance(side, int) and side > 0 for side in block) or len(block) != 2:
        raise Unread("weight_block_size", "is no pair of sides", block)
    if block[0] == 1 and section.get("scale_fmt") == "ue8m0":
        return _only(_format_tree("mxfp8", block=block[1]))
    return _only(_format_tree("fp8_block", block=block[0] * block[1]))


def _groups(section: Tree) -> _QuantisedSection:
    """Groups of compressed-tensors, each with the modules that it is of."""
    groups = section.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise Unread("config_groups", "is no section of groups", groups)
    read = list[tuple[list[str], Tree | None]]()
    for name, group in groups.items():
        if not isinstance(group, dict):
            raise Unread(f"config_groups.{name}", "is no section of keys", group)
        targets, packing = group.get("targets") or ["Linear"], group.get("format") or section.get("format")
        targets = [targets] if isinstance(targets, str) else targets
        read.append(
            (
                [str(target) for target in targets],
                _scheme(group.get("weights"), packing, f"config_groups.{name}.weights"),
            )
        )

    if (count := sum(len(targets) for targets, _ in read)) > _MOST_TARGETS:
        raise Unread("config_groups", f"has more than {_MOST_TARGETS} targets", count)

    def format_of(names: Sequence[str]) -> Tree | None:
        # names come before `Linear`, the class of all modules
        specific = (format for targets, format in read if any(_matches(target, names) for target in targets))
        usual = (format for targets, format in read if "Linear" in targets)
        return next(specific, next(usual, None))

    return _QuantisedSection(format_of, _cache(section), output=True)


def _scheme(weights: Any, packing: Any, key: str) -> Tree | None:
    """The format of a group's weights; None where they keep 16 bits. Raises Unread."""
    if weights is None:
        return None
    if not isinstance(weights, dict):
        raise Unread(key, "is no section of keys", weights)
    bits, kind, group = _number(weights, "num_bits"), weights.get("type", "int"), weights.get("group_size")
    if bits >= _16_BITS:
        return None
    if kind == "float" and bits in (4, 8):
        return _floats(bits, weights, str(packing))
    if kind != "int" or bits > 8 or bits < 1:
        raise Unread(key, "is of a type that is not read", f"{kind} of {bits} bits")
    return _integers(bits, group, zeros=weights.get("symmetric") is False)


def _floats(bits: int, weights: Tree, packing: str) -> Tree:
    """Floats of four or eight bits, whose scales are of blocks, groups, rows or the whole tensor."""
    group = weights.get("group_size")
    group = group if isinstance(group, int) and group > 0 else 0
    sides = [int(side) for side in re.findall(r"[0-9]{1,9}", str(weights.get("block_structure") or ""))]
    if bits == 4:
        name = "mxfp4" if "mxfp4" in packing or group == 32 else "nvfp4"
        return _format_tree(name, block=group or (32 if name == "mxfp4" else 16))
    if len(sides) == 2 and all(sides):
        return _format_tree("fp8_block", block=sides[0] * sides[1])
    if group:
        return _format_tree("mxfp8" if "mxfp8" in packing else "fp8_block", block=group)
    return _format_tree("fp8_row" if weights.get("strategy") == "channel" else "fp8")


def _integers(bits: int, group: Any, *, zeros: bool) -> Tree:
    """Integers with a scale of 16 bits, and perhaps a zero point, for each group; without groups for each row."""
    if group is not None and (isinstance(group, bool) or not isinstance(group, int)):
        raise Unread("group_size", "is no whole number", group)
    scale = _16_BITS + (bits if zeros else 0)
    block = group if group and group > 0 else "row"
    return {"name": f"int{bits}", "bits": bits, "scale_bits": scale, "block": block}


def _awq(section: Tree) -> _QuantisedSection:
    """Integers in groups with scales and zero points."""
    bits, group = (
        _number(section, "bits", "w_bit", default=4),
        _number(section, "group_size", "q_group_size", default=128),
    )
    zeros = section.get("zero_point", True) is not False
    return _only(_integers(bits, group, zeros=zeros))


def _gptq(section: Tree) -> _QuantisedSection:
    """Integers in groups; files hold zero points of symmetric ones, too."""
    bits, group = _number(section, "bits", default=4), _number(section, "group_size", default=128)
    if section.get("dynamic"):
        raise Unread("dynamic", "gives modules formats of their own, which is not read", section["dynamic"])
    return _only(_integers(bits, group, zeros=True), output=section.get("lm_head") is True)


def _by_algorithm(section: Tree) -> _QuantisedSection:
    """Algorithms of modelopt: one for all, or one for each module that is quantised."""
    name, layers = section.get("quant_algo"), section.get("quantized_layers")
    cache = _cache(section)
    if isinstance(layers, dict) and layers:
        formats = {_below_prefix(_usual(module)): _algorithm(entry, section) for module, entry in layers.items()}
        return _QuantisedSection(lambda names: _of_module(formats, names), cache, output=True)
    if name is None:
        return _groups(section)
    format = _algorithm({"quant_algo": name}, section)
    return _QuantisedSection(lambda _: format, cache, output=True)


def _below_prefix(name: str) -> str:
    """A module's name from its layer on."""
    at = re.search(r"(?:^|\.)(layers\.\d+\..*)$", name)
    return at[1] if at else name


def _of_module(formats: Mapping[str, Tree | None], names: Sequence[str]) -> Tree | None:
    """The format of a module, or of what it lies in."""
    name = _below_prefix(names[0])
    while name:
        # names of fused modules: gate and up in one, experts in one
        for text in (name, name.replace("gate_proj", "gate_up_proj"), name.replace("experts.0", "experts")):
            if text in formats:
                return formats[text]
        name = name.rpartition(".")[0]
    return None


def _algorithm(entry: Any, section: Tree) -> Tree | None:
    """The format of an algorithm of modelopt. Raises Unread."""
    name = entry.get("quant_algo") if isinstance(entry, dict) else entry
    if name in (None, "NONE"):
        return None
    if str(name).upper() not in _ALGORITHMS:
        raise Unread("quant_algo", f"is no algorithm that is read ({', '.join(_ALGORITHMS)})", name)
    format = _ALGORITHMS[str(name).upper()]
    group = (entry.get("group_size") if isinstance(entry, dict) else None) or section.get("group_size")
    return _format_tree(
        format, **({"block": group} if isinstance(group, int) and format in ("nvfp4", "int4", "mxfp4") else {})
    )


def _cache(section: Tree) -> Tree | None:
    """The format of keys and values; None for that of the run. Raises Unread."""
    name, scheme = section.get("kv_cache_quant_algo"), section.get("kv_cache_scheme")
    if isinstance(scheme, dict):
        bits, kind = _number(scheme, "num_bits"), scheme.get("type", "float")
        name = {(8, "float"): "FP8", (8, "int"): "INT8", (4, "float"): "NVFP4"}.get((bits, str(kind)), scheme)
    elif isinstance(scheme, str):
        name = scheme
    if name is None or str(name).upper() in ("NONE", "AUTO"):
        return None
    if str(name).upper() not in _CACHES:
        raise Unread("kv_cache_scheme", "is no format of keys and values that is read", name)
    return _format_tree(_CACHES[str(name).upper()])


def _bitsandbytes(section: Tree) -> _QuantisedSection:
    """Four bits in blocks of 64, whose scales may be quantised again, or eight bits."""
    if section.get("load_in_8bit") or section.get("_load_in_8bit"):
        return _only(_format_tree("int8"))
    if not (section.get("load_in_4bit") or section.get("_load_in_4bit")):
        raise Unread("load_in_4bit", "and load_in_8bit are false: nothing is said", None)
    twice = section.get("bnb_4bit_use_double_quant") is True
    kind = "nf4" if section.get("bnb_4bit_quant_type", "fp4") == "nf4" else "fp4"
    return _only({**_format_tree("nf4"), "name": kind, **({} if twice else {"scale_bits": 32})})


def _mxfp4(section: Tree) -> _QuantisedSection:
    """Experts alone, as gpt-oss has them."""
    return _only(_format_tree("mxfp4"), parts=("experts",))


def _quark(section: Tree) -> _QuantisedSection:
    """One format for all layers. Raises Unread for layers with others of their own."""
    for key in ("layer_quant_config", "layer_type_quant_config"):
        if section.get(key):
            raise Unread(key, "gives layers formats of their own, which is not read", section[key])
    common = section.get("global_quant_config") or {}
    weights = common.get("weight") if isinstance(common, dict) else None
    weights = weights[0] if isinstance(weights, list) and weights else weights
    if not isinstance(weights, dict):
        raise Unread("global_quant_config.weight", "is no section of keys", weights)
    kind = str(weights.get("dtype")).lower()
    if kind not in _TYPES:
        raise Unread("global_quant_config.weight.dtype", f"is no type that is read ({', '.join(_TYPES)})", kind)
    name, group = _TYPES[kind], weights.get("group_size")
    if name == "fp8" and weights.get("qscheme") == "per_channel":
        name = "fp8_row"
    return _only(_format_tree(name, **({"block": group} if isinstance(group, int) and group > 0 else {})), output=True)


_READERS: Mapping[str, Callable[[Tree], _QuantisedSection]] = {
    "fp8": _fp8,
    "fbgemm-fp8": lambda _: _only(_format_tree("fp8_row")),
    "compressed-tensors": _groups,
    "awq": _awq,
    "gptq": _gptq,
    "gptq-marlin": _gptq,
    "auto-round": _gptq,
    "intel/auto-round": _gptq,
    "modelopt": _by_algorithm,
    "modelopt-fp4": _by_algorithm,
    "mxfp4": _mxfp4,
    "mxfp8": lambda _: _only(_format_tree("mxfp8")),
    "bitsandbytes": _bitsandbytes,
    "quark": _quark,
    "experts-int8": lambda _: _only(_format_tree("int8"), parts=("experts",)),
}
