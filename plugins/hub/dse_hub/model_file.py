"""Models as model hubs describe them: `config.json` of a folder of weights, read as data.

No code of a hub is run. `model_type` says which keys count (`hub_types.yaml`), and what keys mean that a file
lacks: the default that the type's own class gives them (`hub_defaults.yaml`). Of a model that also sees or
hears, the text part counts. How weights are stored is read from `quantization_config`, or from `hf_quant_config.json`
beside the file (`dse_hub.quantised`). What cannot be expressed is refused with file, key and way out.
Which keys were read is recorded: others that may change a cost are listed in the tree.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dse.config.options import load_yaml
from dse.errors import ConfigError, Problem
from dse.errors.parsing import parse_json
from dse.files import read_text
from dse_hub import DATA
from dse_hub.parameters import hub_keys, is_parameters
from dse_hub.quantised import Unread, stored_tree
from dse_hub.rules import UnfitValue, evaluate, names_in
from dse_hub.types import HubType, hub_type, readable_types, refused_types

_MOST_INSIDE = 2  # text parts inside of one another, as of a thinker
_MISSPELT, _LONGEST_TYPE = 2, 60  # letters
# rules are evaluated for each layer: a number that a typing error made must not take minutes
_MOST_LAYERS = 10_000
_LARGEST = 2**31
# keys under which a model of several senses keeps its text part; the first that is there counts
_TEXT = ("text_config", "llm_config", "language_config", "thinker_config")
_SENSES = (
    "talker_config",
    "code2wav_config",
    "vision_encoder",
    "vision_config",
    "audio_config",
    "vision_tower",
    "visual",
    "vit_config",
    "speech_config",
)
_MOE = ("experts", "per_token", "expert_ffn", "shared", "shared_ffn", "groups", "groups_per_token", "expert_hidden")
_NAMES_OF_EXPERTS = {"per_token": "experts_per_token", "shared": "shared_experts"}
_LATENT = ("q_rank", "kv_rank", "rope_dim", "nope_dim", "value_dim")
_INDEX = {"index_heads": "heads", "index_dim": "width", "index_tokens": "tokens"}
# parts that a model may do without; all others are missing when they have no value
_OPTIONAL = ("window", "q_rank", "shared", "shared_ffn", "groups", "groups_per_token", "expert_hidden")
_STATE = ("projected", "outputs", "channels", "kernel", "heads", "key", "value", "chunk", "more", "number_bytes")


@functools.cache
def _keys_without_effect() -> frozenset[str]:
    """Keys that change no cost."""
    return frozenset(load_yaml(DATA / "hub_keys.yaml")["without_effect"])


@dataclass
class HubFile:
    """A parsed file of a type: its keys, which of them were looked up, and what is wrong with it so far.

    widths: numbers that were read. defaulted: keys of widths that the file lacks, with the values of their type.
    """

    path: Path
    keys: Mapping[str, Any]
    type: HubType
    problems: list[Problem] = field(default_factory=list)
    looked_up: set[str] = field(default_factory=set)
    widths: dict[str, Any] = field(default_factory=dict)
    defaulted: dict[str, Any] = field(default_factory=dict)

    def note(self, key: str, rule: str, value: object, way_out: str) -> None:
        """Record the first problem of a key."""
        path = f"{self.path}: {key}"
        if all(problem.path != path for problem in self.problems):
            self.problems.append(Problem(path, rule, value, way_out))

    def value(self, key: str) -> Any:
        """The value of a key: of the file, null too, else the default of its type."""
        self.looked_up.add(key)
        # a null of the file overrides the default: the class would see it, too
        return self.keys[key] if key in self.keys else self.type.defaults.get(key)

    def name(self, name: str) -> Any:
        """The value of a name in an expression: columns, a width, a value that several keys may have, or a key."""
        if name in ("q", "kv"):
            # columns of the projections: of queries, and of keys or values
            return (self.width("heads" if name == "q" else "kv_heads") or 0) * (self.width("head") or 0)
        if name in self.widths or name in self.type.sections["widths"]:
            return self.width(name)
        if (keys := self.type.sections["names"].get(name)) is not None:
            # keys of the file come before defaults of any key
            there = [key for key in keys if self.keys.get(key) is not None]
            return next(value for key in (*there, *keys) if (value := self.value(key)) is not None or key == keys[-1])
        return self.value(name)

    def evaluate(self, text: str, layer: int | None = None) -> Any:
        """The value of an expression, of a layer. Raises UnfitValue."""
        self.looked_up |= names_in(text)
        return evaluate(text, lambda name: layer if name == "i" and layer is not None else self.name(name))

    def width(self, name: str) -> Any:
        """A width, once: of a key of the file, else of a default, else of an expression; None where none is there."""
        if name not in self.widths:
            self.widths[name] = None  # which an expression that names itself would meet
            self.widths[name] = self._width(name)
        return self.widths[name]

    def _width(self, name: str) -> int | None:
        texts = self.type.alternatives(name)
        keys = [text for text in texts if text.isidentifier() and text not in self.type.sections["widths"]]
        for key in keys:
            self.looked_up.add(key)
        there = next((key for key in keys if self.keys.get(key) not in (None, "auto")), None)
        if there is not None:
            return self._whole(there, self.keys[there])
        refused = {key for key in keys if key in self.keys}  # null or auto: what is derived counts, not the default
        for text in texts:
            value = None if text in refused else self.evaluate(text)
            if value not in (None, "auto"):
                if text in keys:
                    self.defaulted[text] = value
                return self._whole(next(iter(keys), name), value)
        return None

    def _whole(self, key: str, value: Any) -> int | None:
        """A whole number; None, and the problem noted, of anything else."""
        # True is an int in Python
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _LARGEST:
            self.note(key, "is no whole number of a width", value, "write a number such as 4096")
            return None
        return value

    @property
    def unread(self) -> list[str]:
        """Keys with a value that nothing looked up, and that may change a cost."""
        return [
            key
            for key, value in self.keys.items()
            if key not in self.looked_up | _keys_without_effect() | self.type.without_effect
            # such values switch nothing on
            and value not in (None, False, [], {}, "")
            and not key.startswith("_")
        ]


def hub_tree(path: Path) -> dict[str, Any]:
    """Tree of a model from its `config.json`. Raises ConfigError with file, key and way out of every problem."""
    keys = _keys_of(path)
    kind, senses = keys.get("model_type"), [key for key in _SENSES if keys.get(key)]
    if what := refused_types().get(str(kind)):
        rule, way = f"is of {what}, which is not read", _instead(None)
        raise ConfigError([Problem(f"{path}: model_type", rule, kind, way)])
    if kind not in readable_types():
        raise ConfigError([Problem(f"{path}: model_type", "is no type of model that is read", kind, _instead(kind))])
    file = HubFile(path, keys, hub_type(str(kind)))
    tree: dict[str, Any] = {}
    try:
        tree = _tree(file)
    except UnfitValue as error:
        if not file.problems:
            file.note("model_type", f"{kind} needs other values: {error}", kind, "correct them, or write a YAML file")
    if file.problems:
        raise ConfigError(file.problems)
    # reported before the answer: a key that may change a cost must not pass in silence
    unread = [f"{path}: {key}" for key in file.unread if key not in senses]
    unread += [f"{path}: {key} (a part that is no text is left out)" for key in senses]
    return tree | ({"unread": unread} if unread else {})


def _instead(kind: Any) -> str:
    """The way out of a type that is not read: one spelt nearly alike, the list of types, a file typed by hand."""
    alike = sorted((letters_apart(str(kind), name), name) for name in readable_types()) if kind else []
    # a third of the letters at most, so that a short name does not match everything
    is_near = alike and alike[0][0] <= min(_MISSPELT, len(str(kind)) // 3)
    guess = f"did you mean `{alike[0][1]}`? else " if is_near else ""
    types = "the types of text models that are read are the rows of hub_types.yaml"
    by_hand = "write any other model by hand, as a YAML file of its layers, hidden and heads: docs/how-to/model.md"
    return f"{guess}{types}; {by_hand}"


def letters_apart(name: str, other: str) -> int:
    """Number of letters that are added, left out or replaced from one name to another; many where their numbers differ.

    >>> letters_apart("lama", "llama"), letters_apart("Qwen3-moe", "qwen3_moe"), letters_apart("gemma9", "gemma3") > 2
    (1, 0, True)
    """
    names = [re.sub(r"[^a-z0-9]", "", text.lower())[:_LONGEST_TYPE] for text in (name, other)]
    if re.findall(r"[0-9]+", names[0]) != re.findall(r"[0-9]+", names[1]):
        return _LONGEST_TYPE  # another version
    # Levenshtein's distance, a row of its table at a time
    row = list(range(len(names[1]) + 1))
    for place, letter in enumerate(names[0], 1):
        before, row = row, [place]
        for at, target in enumerate(names[1], 1):
            row.append(min(before[at] + 1, row[-1] + 1, before[at - 1] + (letter != target)))
    return row[-1]


def _keys_of(path: Path) -> Mapping[str, Any]:
    """Keys of a file; of a model that also sees, those of its text part, and those around it."""
    keys = _json(path)
    if is_parameters(keys):
        return hub_keys(path, keys)
    if str(keys.get("model_type")) in refused_types():
        return keys
    for _ in range(_MOST_INSIDE):
        name = next((name for name in _TEXT if isinstance(keys.get(name), dict)), None)
        if name is None:
            break
        inner = keys[name]
        # keys of the text part override the same keys around it
        around = {key: value for key, value in keys.items() if key not in (name, "architectures")}
        merged = {**around, **{key: value for key, value in inner.items() if key != "_name_or_path"}}
        keys = merged | {"model_type": _text_type(keys.get("model_type"), inner)}
    return keys


def _text_type(outer: Any, inner: Mapping[str, Any]) -> Any:
    """The type of a text part: its own, or that which belongs to the whole."""
    kinds = [inner.get("model_type"), f"{outer}_text", outer]
    # a type that is not read keeps its name, for the message
    return next((kind for kind in kinds if kind in readable_types()), kinds[0] or outer)


def _json(path: Path) -> dict[str, Any]:
    keys = parse_json(read_text(path, str(path)), str(path))
    if not isinstance(keys, dict):
        raise ConfigError([Problem(str(path), "holds no keys", way_out="give the config.json of a model")])
    return keys


def _tree(file: HubFile) -> dict[str, Any]:
    """Sections of a transformer; what is missing or wrong is noted."""
    rules = file.type.rules
    for key, what in file.type.refuses.items():
        if file.keys.get(key):
            file.note(key, f"is of {what}, which is not read", file.keys[key], "describe the model in a YAML file")
    for name in ("layers", "hidden", "heads", "vocab"):
        # one cause at a time: a width that is wrong is noted already and would be called missing, too
        if not file.width(name) and not file.problems:
            file.note(
                file.type.alternatives(name)[0], "is missing", None, "add it, or describe the model in a YAML file"
            )
    layers = file.width("layers")
    if not file.problems and layers > _MOST_LAYERS:
        file.note(file.type.alternatives("layers")[0], f"is more than {_MOST_LAYERS}", layers, "correct it")
    if file.problems:
        return {}
    kinds = [_kind(file, place) for place in range(layers)]
    names = ("layers", "decoder_layers", "hidden", "heads", "kv_heads", "ffn", "vocab")
    tree: dict[str, Any] = {name: value for name in names if (value := file.width(name))}
    flags = {name: bool(file.evaluate(rules[name])) for name in ("gated", "causal", "rotary", "tied")}
    tree |= {"kind": "transformer", "name": _name(file), **flags, "note": _note(file)}
    if "latent" in rules:
        tree["latent"] = _latent(file, layers)
        # latent attention has no keys and values by head in its cache
        tree.pop("kv_heads", None)
    elif (head := file.width("head")) is not None:
        tree["head_dim"] = head
    if any(kind[1] == "experts" for kind in kinds):
        tree["moe"] = _experts(file)
    tree |= _layers(file, kinds) | _windows(file, layers)
    tree |= {name: True for name in ("out_gate", "sinks") if file.evaluate(rules[name])}
    tree["ends"] = [_weights(file, "embedding"), _weights(file, "output")]
    # formats are of widths that are known
    return tree if file.problems else tree | _formats(file, tree, [kind[:2] for kind in kinds])


def _kind(file: HubFile, place: int) -> tuple[str, str, int]:
    """The parts of a layer: its mixer, what follows it, and weights that stand beside its products."""
    mixer, feed = (str(file.evaluate(file.type.rules[name], place)) for name in ("mixer", "feed"))
    parts = ["layer", *(part for part in (mixer, feed) if part != "none")]
    # weights that a state keeps are among its own numbers (`more`)
    return mixer, feed, sum(_weights(file, part, place) for part in parts if part != "state")


def _weights(file: HubFile, part: str, layer: int | None = None) -> int:
    value = file.evaluate(file.type.sections["weights"][part], layer)
    return int(value or 0)


def _layers(file: HubFile, layers: Sequence[tuple[str, str, int]]) -> dict[str, Any]:
    """Kinds of layers where there are several, and what stands beside products in each."""
    # in the order in which kinds appear first
    kinds, tree = Counter(layers), dict[str, Any](vectors=layers[0][2])
    if file.width("decoder_layers"):
        # a layer of a decoder has a second attention, to the encoder
        tree["decoder_vectors"] = tree["vectors"] + _weights(file, "decoder") + _weights(file, "attention")
    if any(mixer == "state" for mixer, _, _ in kinds):
        tree["state"] = _state(file)
    # first layers without experts, as of DeepSeek, have a key of their own in place of a pattern
    if (first := _dense_first(layers)) is not None:
        tree["moe"] = _experts(file) | {"dense_layers": first}
    elif len(kinds) > 1 or "state" in tree:
        tree["pattern"] = [
            {"count": count, "mixer": mixer, "feed": feed, "vectors": vectors}
            for (mixer, feed, vectors), count in kinds.items()
        ]
    return tree


def _dense_first(layers: Sequence[tuple[str, str, int]]) -> int | None:
    """Number of first layers without experts, where all others have them and nothing else differs; None elsewhere."""
    feeds = [feed for _, feed, _ in layers]
    first = feeds.count("dense")
    alike = len({(mixer, vectors) for mixer, _, vectors in layers}) == 1 and layers[0][0] == "attention"
    ordered = feeds == ["dense"] * first + ["experts"] * (len(feeds) - first)
    return first if alike and ordered and 0 < first < len(feeds) else None


def _part(file: HubFile, names: Sequence[str]) -> dict[str, int]:
    """Widths of a part of the model; those that are missing are noted."""
    values = {name: file.width(name) for name in names}
    for name, value in values.items():
        if value is None and name not in _OPTIONAL:
            key = next(iter(file.type.alternatives(name)), name)
            file.note(key, "is missing", None, "add it, or describe the model in a YAML file of one's own")
    return {name: value for name, value in values.items() if value is not None}


def _experts(file: HubFile) -> dict[str, int]:
    """Experts, of a width of their own; a router that picks groups of experts."""
    part = _part(file, _MOE)
    # a router without a choice of groups looks at all experts
    if not part.get("groups_per_token") or not part.get("groups"):
        part = {name: value for name, value in part.items() if name not in ("groups", "groups_per_token")}
    left = [name for name, value in part.items() if not value and name not in ("experts", "per_token", "expert_ffn")]
    return {_NAMES_OF_EXPERTS.get(name, name): value for name, value in part.items() if name not in left}


def _latent(file: HubFile, layers: int) -> dict[str, Any]:
    """Attention from latents, and what picks the tokens that it reads."""
    part: dict[str, Any] = {name: value for name, value in _part(file, _LATENT).items() if value or name != "q_rank"}
    if "indexed" in file.type.rules:
        share = sum(bool(file.evaluate(file.type.rules["indexed"], place)) for place in range(layers)) / layers
        index = _part(file, tuple(_INDEX))
        part["index"] = {_INDEX[name]: value for name, value in index.items()} | {"share": share}
    return part


def _state(file: HubFile) -> dict[str, int]:
    """Numbers of layers that keep a state in place of keys and values."""
    numbers = dict[str, int]()
    if not file.type.sections["state"]:
        raise UnfitValue("its layers with attention alone are read")
    # groups share keys in Mamba-2 alone
    # numbers are in an order in which each may use those before it
    for name in (*_STATE, *(name for name in ("groups",) if name in file.type.sections["state"])):
        file.looked_up |= names_in(str(file.type.sections["state"][name]))
        numbers[name] = int(
            evaluate(str(file.type.sections["state"][name]), lambda key: _state_name(file, numbers, key)) or 0
        )
    return numbers


def _state_name(file: HubFile, numbers: Mapping[str, int], key: str) -> Any:
    return numbers[key] if key in numbers and key not in file.type.sections["widths"] else file.name(key)


def _windows(file: HubFile, layers: int) -> dict[str, Any]:
    """The window of attention and the share of layers with attention that have it; nothing where none has."""
    window, rule = file.width("window"), file.type.rules.get("windowed")
    if not window or rule is None:
        return {}
    places = [place for place in range(layers) if file.evaluate(file.type.rules["mixer"], place) == "attention"]
    # of layers with attention: others have no window to keep in the cache
    share = sum(bool(file.evaluate(rule, place)) for place in places) / max(len(places), 1)
    return {"window": window, "windowed": share}


def _formats(file: HubFile, tree: Mapping[str, Any], kinds: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Formats of weights and of the cache that the file, or the one beside it, says."""
    file.looked_up |= {"quantization_config", "compression_config"}
    section: Any = file.keys.get("quantization_config") or file.keys.get("compression_config")
    beside, key = file.path.parent / "hf_quant_config.json", "quantization_config"
    # where both have a section, the one of config.json counts
    if not section and beside.is_file() and file.path.name == "config.json":
        section, key = _json(beside), str(beside)
    if not section:
        return {}
    try:
        return stored_tree(section, tree, kinds)
    except Unread as error:
        way = "remove the section, and type the format: +run.weights=fp8, or another of conf/data/weight_formats.yaml"
        file.note(f"{key}.{error.key}", error.rule, error.value, way)
        return {}


def _note(file: HubFile) -> str:
    """Say which type was read, and which widths have the value of their type."""
    text = f"{file.type.name}, read from {file.path.name}"
    by_default = [f"{key} = {value}" for key, value in file.defaulted.items() if key != "head_dim"]
    return f"{text}; by default of its type: {', '.join(by_default)}" if by_default else text


def _name(file: HubFile) -> str:
    """The name that the file gives the model, else the folder that it lies in."""
    name = file.keys.get("_name_or_path") or file.keys.get("name_or_path")
    # a name such as "./" is a path of whoever saved it
    if isinstance(name, str) and name.strip("./"):
        return name.rstrip("/").rpartition("/")[2]
    return file.path.resolve().parent.name if file.path.name == "config.json" else file.path.stem
