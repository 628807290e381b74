"""GEMMs that arrive on one GPU: by a Poisson process, from a trace, or as others that they wait for are done.

Kinds: `poisson` draws shapes and gaps; `recurrent` is a stack of recurrent layers, whose cell of a layer and step waits
for the one below and the one before; `transformer` is requests that arrive, each a chain of layers, of which a layer's
query, key and value are independent; `trace` is a CSV file with the columns arrival_s, m, n, k and after (numbers of
rows, separated by blanks).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from dse.config.named_file import NamedFile
from dse.errors import ConfigError, Problem
from dse.files import read_csv
from dse.values import Frozen
from dse.values.units import Integer, Number

Floats = NDArray[np.float64]
Shape = tuple[int, int, int]
Rows = list[tuple[float, Shape, tuple[int, ...]]]
_TRACE = "arrivals.trace"


class ArrivalSpec(Frozen):
    """What arrives. gap: mean time between arrivals, over the mean time of a GEMM alone (of a request: of its GEMMs).

    shapes: (m, n, k) that `poisson` draws from. jobs: GEMMs, or requests. layers, steps: of a recurrent stack, or
    layers of a transformer. hidden, tokens: sizes of a layer, and rows of its GEMMs.
    """

    name: str
    kind: Literal["poisson", "recurrent", "transformer", "trace"]
    shapes: tuple[tuple[Integer, Integer, Integer], ...] = ()
    jobs: Annotated[Integer, Field(ge=1, le=4096)] = 32
    gap: Annotated[Number, Field(ge=0)] = 0.5
    layers: Annotated[Integer, Field(ge=1, le=64)] = 4
    steps: Annotated[Integer, Field(ge=1, le=256)] = 8
    hidden: Annotated[Integer, Field(ge=16)] = 1024
    tokens: Annotated[Integer, Field(ge=1)] = 64
    gates: Annotated[Integer, Field(ge=1, le=4)] = 4
    trace: NamedFile | None = None
    seed: Integer = 0
    precision: Literal["fp16", "bf16", "fp32"] = "fp16"


@dataclass(frozen=True)
class Arrivals:
    """GEMMs [J, 3] of (m, n, k), their arrivals [J] in units of the mean time of one alone, or in seconds (`timed`),
    and the GEMMs that each waits for.
    """

    shapes: Floats
    times: Floats
    after: tuple[tuple[int, ...], ...]
    precision: str
    timed: bool


def arrivals_of(spec: ArrivalSpec) -> Arrivals:
    """GEMMs of a specification, equal for equal seeds. Raises ConfigError where a trace cannot be read."""
    rows = _MAKERS[spec.kind](spec)
    times, shapes, after = zip(*rows, strict=True)
    return Arrivals(np.array(shapes, float), np.array(times, float), tuple(after), spec.precision, spec.kind == "trace")


def _poisson(spec: ArrivalSpec) -> Rows:
    if not spec.shapes:
        raise ConfigError([Problem("arrivals.shapes", "is empty, and GEMMs are drawn from it")])
    # one generator with the seed: times before shapes, so that a change of shapes keeps times
    random = np.random.default_rng(int(spec.seed))
    times = np.cumsum(random.exponential(float(spec.gap), int(spec.jobs)))
    picks = random.integers(len(spec.shapes), size=int(spec.jobs))
    return [(float(time), spec.shapes[pick], ()) for time, pick in zip(times, picks, strict=True)]


def _recurrent(spec: ArrivalSpec) -> Rows:
    """A cell multiplies its gates by its input and its state, both at once: k = 2 hidden."""
    shape = (spec.tokens, spec.gates * spec.hidden, 2 * spec.hidden)
    return [
        (
            0.0,
            shape,
            # the layer below in this step, and this layer in the step before
            tuple([step * spec.layers + layer - 1] * (layer > 0) + [(step - 1) * spec.layers + layer] * (step > 0)),
        )
        for step in range(spec.steps)
        for layer in range(spec.layers)
    ]


def _transformer(spec: ArrivalSpec) -> Rows:
    random = np.random.default_rng(int(spec.seed))
    # six GEMMs a layer: the gap is over the mean time of a request's GEMMs
    begins = np.cumsum(random.exponential(6.0 * spec.layers * float(spec.gap), int(spec.jobs)))
    rows: Rows = []
    for begin in begins:
        # numbers of predecessors are counted within a request
        first = len(rows)
        rows += [
            (time, shape, tuple(first + before for before in after))
            for time, shape, after in _layers(spec, float(begin))
        ]
    return rows


def _layers(spec: ArrivalSpec, begin: float) -> Iterator[tuple[float, Shape, tuple[int, ...]]]:
    """GEMMs of the layers of a request: query, key, value; projection; both of the feed-forward part."""
    m, h = spec.tokens, spec.hidden
    for layer in range(spec.layers):
        at = 6 * layer
        # the last GEMM of the layer before
        before = (at - 1,) if layer else ()
        # query, key and value, which are independent
        yield from ((begin, (m, h, h), before) for _ in range(3))
        # the projection waits for all three
        yield begin, (m, h, h), (at, at + 1, at + 2)
        yield begin, (m, 4 * h, h), (at + 3,)
        yield begin, (m, h, 4 * h), (at + 4,)


def _trace(spec: ArrivalSpec) -> Rows:
    """Rows of a CSV file. Raises ConfigError for one that is absent, has other columns, or rows that wait for later."""
    if spec.trace is None:
        raise ConfigError([Problem(_TRACE, "is missing", way_out="write the path of a CSV file")])
    table = read_csv(spec.trace.path(_TRACE), _TRACE, needed=("arrival_s", "m", "n", "k"))
    if not table.rows:
        raise ConfigError([Problem(_TRACE, "has no rows", spec.trace.note)])
    return [_row(cells, number) for number, (_, cells) in enumerate(table.rows)]


def _row(line: Mapping[str, str], number: int) -> tuple[float, Shape, tuple[int, ...]]:
    try:
        m, n, k = (int(line[name]) for name in "mnk")
        time, after = float(line["arrival_s"]), tuple(int(before) for before in (line.get("after") or "").split())
    except (KeyError, TypeError, ValueError) as error:
        rule = f"row {number} has no numbers arrival_s, m, n, k and after ({error})"
        raise ConfigError([Problem(_TRACE, rule)]) from None
    # rows may wait for rows above only, so that no circle is possible
    if min(m, n, k) < 1 or time < 0 or not all(0 <= before < number for before in after):
        rule = f"row {number} has a size below 1, a time below 0, or waits for a row that is not before it"
        raise ConfigError([Problem(_TRACE, rule)])
    return time, (m, n, k), after


_MAKERS = {"poisson": _poisson, "recurrent": _recurrent, "transformer": _transformer, "trace": _trace}
