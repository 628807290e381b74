"""Software of collectives (`conf/collective`) in the place of a node's library: its times, and how surely it is faster.

What runs a collective at its size by default, and sends all that it is given, could take the library's place. Steps
(`simulators.steps.judge.other_libraries`) and recorded runs ask here; the error is that of the ratio of both times in
measured rows (`conf/data/collective_software.yaml`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from dse.config.options import conf_dir, load_yaml
from simulators.costs.algorithms import Pattern
from simulators.costs.collective import Group, collective_cost, library_cost
from simulators.costs.collective_paths import held_ctas
from simulators.costs.collective_software import Call, Question, all_software, refusal

_ERRORS = "collective_software.yaml"
_AS_LIBRARY = ("nccl", "rccl", "xla_nccl")
"""Software that is the library of the node, as it comes or as another runtime calls it."""
_ELEMENT_BYTES = 2  # as in steps


@cache
def _errors() -> Mapping[str, Any]:
    errors: Mapping[str, Any] = load_yaml(conf_dir() / "data" / _ERRORS)
    return errors


def ratio_error() -> float:
    """Natural logarithm by which the time of software over its library's is off in nine of ten measured rows."""
    return float(_errors()["ratio_p90"])


def ratio_gpus() -> Sequence[str]:
    """GPUs of these rows: on others the error is not known."""
    return tuple(_errors()["ratio_gpus"])


@dataclass(frozen=True)
class Replacement:
    """Software in the place of the library for one collective: times [s] of both, and CTAs of a GPU that it holds."""

    name: str
    seconds: float
    library_s: float
    num_ctas: int

    @property
    def ratio(self) -> float:
        """Its time over that of the library."""
        return self.seconds / self.library_s

    @property
    def ratios(self) -> tuple[float, float, float]:
        """The least ratio, the expected and the largest, in nine of ten cases."""
        off = float(np.exp(ratio_error()))
        return self.ratio / off, self.ratio, self.ratio * off


def replacements(
    pattern: Pattern, payload_bytes: float, group: Group, *, element: str = "", library_s: float | None = None
) -> list[Replacement]:
    """Software that could run a collective of one size and group in place of the library, the fastest first.

    element: format of what is sent; where it is not known (""), formats on the wire that any could lose are left out.
    library_s: time by the library, where it is known; None: `library_cost`. Without a machine there is none.
    """
    if group.machine is None:
        return []
    if library_s is None:
        library_s = float(library_cost(pattern, payload_bytes, group, element_bytes=_ELEMENT_BYTES).seconds)
    chosen = list[Replacement]()
    for call in _calls(pattern, payload_bytes, group, element):
        cost = collective_cost(pattern, call, payload_bytes, group, element_bytes=_ELEMENT_BYTES)
        ctas = held_ctas(call, group.machine, int(np.max(np.asarray(group.num_gpus))), pattern)
        # what holds an unknown number of CUs slows the work beside it by an unknown amount
        if ctas is not None:
            chosen.append(Replacement(call.name, float(cost.seconds), library_s, ctas))
    return sorted(chosen, key=lambda replacement: (replacement.seconds, replacement.name))


def _calls(pattern: Pattern, payload_bytes: float, group: Group, element: str) -> Iterator[Call]:
    """Yield calls of software that runs a collective and sends what it is given."""
    question = Question.of(pattern, payload_bytes, group.num_gpus, group.num_nodes)
    machine: Any = group.machine
    for software in all_software():
        if software.name in _AS_LIBRARY:
            continue
        for call in map(Call, software.names):
            if not call.is_lossy_for(element) and refusal(call, machine, question) is None:
                yield call
