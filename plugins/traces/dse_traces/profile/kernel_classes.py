"""Classes of kernels by their names, as compilers and libraries call them.

Names are reduced (`dse_traces.profile.kernel_names`); the first rule of `conf/data/kernel_classes.yaml` that one fits
decides, and `other` is what none fits: nobody knows what such a kernel does. Patterns of a user come first. They are
read from a file:

    collective: [my_ep::exchange, ring_step*]
    compute: my_routing$

A class, and what names of its kernels hold, whatever their case: plain text, with `*` for anything, `^` at the begin of
a name, `$` at its end, and `|` between alternatives. They are held against the name with its namespace, without
template and arguments, and against the name as it was recorded.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dse.errors import ConfigError, Problem, Problems, did_you_mean
from dse.errors.parsing import parse_yaml
from dse.files import read_text
from dse_traces import DATA
from dse_traces.profile.kernel_names import MOST_LETTERS, KernelName, reduce_name

COLLECTIVE, PEER_COPY = "collective", "peer copy"
COMMUNICATES = (COLLECTIVE, PEER_COPY)
"""Classes of what moves data between GPUs: by kernels, and by copy engines."""
OTHER = "other"
"""The class of kernels that no rule fits."""
FUSED = "GEMM with communication"
"""The class of kernels that multiply and communicate in one: they compute, and hide their communication inside."""
MOVED = ("copy", "fill")
"""Classes of what copy engines, or kernels in their place, do within a GPU, or between it and the host."""
CLASSES = (
    *COMMUNICATES,
    *MOVED,
    "attention",
    "grouped GEMM",
    "convolution",
    "GEMM",
    FUSED,
    "norm",
    "softmax",
    "optimizer",
    "element-wise",
    "compute",
    OTHER,
)
"""All classes; `compute`: computes, and is of no closer class."""
Patterns = Mapping[str, Sequence[str]]
"""Class -> patterns of a user."""
OPTION = "kernels"
"""The word of a command that names a file of patterns."""
_TABLE = "kernel_classes.yaml"
# expressions are searched in names of strangers: their time is bounded by the length
_MOST_READ = {"base": 400, "namespace": 400, "arguments": 4000}  # letters of each part of a name
_MOST_PATTERNS, _LONGEST_PATTERN = 1000, 200
# marks that plain patterns never need: escapes, repetitions, groups with alternatives, sets
_EXPRESSION = re.compile(r"[\\+?]|\([^()]*\||\|[^()]*\)|\[\^?\w-\w")
_SYNTAX = "write plain text, with * for anything, ^ and $ for begin and end, | between alternatives"
_EXAMPLE = "write lines such as `collective: [my_dispatch, my_combine]`"


@dataclass(frozen=True)
class _Rule:
    """A class, and the expressions that parts of a name must hold."""

    kind: str
    patterns: Mapping[str, re.Pattern[str]]

    def fits(self, name: KernelName) -> bool:
        """Tell whether a name is of this rule."""
        parts = {"base": name.words, "namespace": name.namespace, "arguments": name.arguments}
        # every field that a rule names must fit; a field that it leaves out does not matter
        return all(pattern.search(parts[field][: _MOST_READ[field]]) for field, pattern in self.patterns.items())


def kernel_class(name: str, patterns: Patterns | None = None) -> str:
    """The class of a kernel. patterns: of a user, which come first.

    >>> kernel_class("ncclDevKernel_AllReduce_Sum_bf16_RING_LL"), kernel_class("sm90_xmma_gemm_bf16bf16")
    ('collective', 'GEMM')
    >>> kernel_class("void my::step<4>(int4*)"), kernel_class("void my::step<4>(int4*)", {"collective": ["my::step$"]})
    ('other', 'collective')
    """
    # the user knows kernels of their own better than any rule
    for kind, wanted in (patterns or {}).items():
        if any(fits_pattern(name, pattern) for pattern in wanted):
            return kind
    reduced = reduce_name(name)
    return next((rule.kind for rule in _rules() if rule.fits(reduced)), OTHER)


@functools.cache
def _rules() -> Sequence[_Rule]:
    tree: Any = parse_yaml((DATA / _TABLE).read_text("utf-8"), _TABLE)
    return tuple(_rule(row) for row in tree["rules"])


def _rule(row: Mapping[str, Any]) -> _Rule:
    texts = {field: "|".join(f"(?:{text})" for text in row[field]) for field in _MOST_READ if field in row}
    return _Rule(row["class"], {field: re.compile(text, re.IGNORECASE) for field, text in texts.items()})


def fits_pattern(name: str, pattern: str) -> bool:
    """Tell whether the name of a kernel, reduced or as recorded, holds one of the alternatives of a pattern.

    >>> fits_pattern("void my_ep::send_rows<4>(int4*)", "^my_ep::*rows$"), fits_pattern("my_add", "mul|cat")
    (True, False)
    """
    # mangled names are readable only when reduced, others only as recorded
    texts = reduce_name(name).qualified.lower(), name[:MOST_LETTERS].lower()
    alternatives = [alternative.strip().lower() for alternative in pattern.split("|")]
    return any(_fits(text, alternative) for alternative in alternatives for text in texts)


def _fits(text: str, pattern: str) -> bool:
    """Tell whether a text holds a pattern: its pieces, one after the other."""
    # `.*` is what people type who think of regular expressions
    body = pattern.removeprefix("^").removesuffix("$").replace(".*", "*")
    first, *pieces = body.split("*")
    at = (0 if text.startswith(first) else -1) if pattern.startswith("^") else text.find(first)
    # a fixed end: find() would stop at an earlier occurrence
    if pattern.endswith("$") and not pieces:
        return text.endswith(first) and (not pattern.startswith("^") or text == first)
    for piece in pieces:
        # each piece after the one before it, so that pieces keep their order
        at, first = (text.find(piece, at + len(first)) if at >= 0 else -1), piece
    # the last piece must not overlap with the one before it to reach the end
    ends = not pattern.endswith("$") or (text.endswith(first) and len(text) - len(first) >= at)
    return at >= 0 and ends


def read_patterns(path: str, option: str = OPTION) -> Patterns:
    """The patterns of a file of the user; none where no file is named. option: dotted path of what names the file.

    Raises ConfigError.
    """
    if not path:
        return {}
    tree = parse_yaml(read_text(Path(path), option, way_out=_EXAMPLE), path)
    if not isinstance(tree, Mapping) or not tree:
        raise ConfigError([Problem(option, "is no mapping of classes to patterns", path, _EXAMPLE)])
    return check_patterns(tree, option)


def check_patterns(tree: Mapping[Any, Any], path: str) -> Patterns:
    """Patterns as a file holds them, by class. path: dotted path of the mapping. Raises ConfigError."""
    check, patterns = Problems(), dict[str, Sequence[str]]()
    for kind, value in tree.items():
        place, texts = f"{path}.{kind}", [value] if isinstance(value, str) else value
        if kind not in CLASSES:
            check.add(place, "is no class of kernels", way_out=did_you_mean(str(kind), CLASSES))
        elif not isinstance(texts, Sequence) or not texts or len(texts) > _MOST_PATTERNS:
            check.add(place, f"is no list of 1 to {_MOST_PATTERNS} patterns", value=value, way_out=_EXAMPLE)
        else:
            check.found += [problem for at, text in enumerate(texts) for problem in _wrong(text, f"{place}[{at}]")]
            patterns[str(kind)] = tuple(map(str, texts))
    check.done()
    return patterns


def _wrong(text: Any, path: str) -> Iterator[Problem]:
    """Why a text is no pattern."""
    # a pattern of marks alone would fit every kernel
    if not isinstance(text, str) or not text.strip("^$*.| "):
        yield Problem(path, "is no text that a name could hold", text, _SYNTAX)
    elif len(text) > _LONGEST_PATTERN:
        yield Problem(path, f"has more than {_LONGEST_PATTERN} letters", way_out=_SYNTAX)
    elif _EXPRESSION.search(text):
        yield Problem(path, "is a regular expression, which patterns are not", text, _SYNTAX)
