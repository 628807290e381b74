"""What a step's collectives would take by other software of collectives (`conf/collective`), in place of the library.

Of each exchange that waits for nothing else and that nothing hides, in groups inside a node, the software counts that
is the fastest of those that send what they are given, in the run's precision, and run it at its size by default:

    saved = micro-batches x times a micro-batch x (T of the library - T of the software)

(derived); its interval is that of the ratio of both times in measured rows (`conf/data/collective_software.yaml`).
Collectives beside other work, of sites with schedules and of gradients, are not judged: what they hold counts
there, which no row of a table tells.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from dse.config.options import conf_dir, load_yaml
from simulators.costs.collective import Group, collective_cost
from simulators.costs.collective_software import Call, Question, all_software, refusal
from simulators.steps.design import StepDesign
from simulators.steps.operators.work import Exchange, StageOperator
from simulators.steps.run.build import iteration
from simulators.steps.run.passes import MicroBatch

_ERRORS = "collective_software.yaml"
_AS_LIBRARY = ("nccl", "rccl", "xla_nccl")
"""Software that is the library of the node, as it comes or as another runtime calls it."""


@dataclass(frozen=True)
class Saving:
    """What other software saves of a step. over: axis. calls: in a step. library_s, software_s: of one call [s]."""

    over: str
    pattern: str
    payload_bytes: float
    calls: float
    library_s: float
    software_s: float
    software: str

    @property
    def saved_s(self) -> float:
        """Time [s] that a step is shorter."""
        return self.calls * (self.library_s - self.software_s)

    @property
    def interval_s(self) -> tuple[float, float]:
        """Least and most of it, in nine of ten cases."""
        off = ratio_error()
        least, most = (self.calls * (self.library_s - self.software_s * np.exp(sign * off)) for sign in (1, -1))
        return float(least), float(most)


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


def savings(design: StepDesign) -> list[Saving]:
    """What the fastest other software saves of each kind of exchange of a step, where some is faster."""
    passes, kinds = iteration(design).passes, dict[tuple[str, str, float], list[StageOperator]]()
    for part in passes.parts:
        work = part.op.work
        if not isinstance(work, Exchange) or part.spent.comm_cu_s is not None or work.ctas or part.op.half:
            continue
        if _is_judged(work, passes.platform.groups[work.over]):
            kinds.setdefault((work.over, work.pattern, float(np.max(work.payload_bytes))), []).append(part)
    element = str(design.run.precision)
    calls = {kind: sum(float(np.max(part.times)) for part in parts) for kind, parts in kinds.items()}
    return [
        saving
        for kind, (part, *_) in kinds.items()
        if (saving := _saving(passes, part, float(np.max(passes.micro_batches)) * calls[kind], element)) is not None
    ]


def _saving(passes: MicroBatch, part: StageOperator, calls: float, element: str) -> Saving | None:
    """What other software saves of `calls` like one, of elements of a format; None where none is faster."""
    work = part.op.work
    assert isinstance(work, Exchange)
    group = passes.platform.groups[work.over]
    payload, library_s = float(np.max(work.payload_bytes)), float(np.max(part.spent.seconds))
    times = {
        call.name: float(collective_cost(work.pattern, call, payload, group, element_bytes=2).seconds)
        for call in _calls(work, group, payload, element)
    }
    software = min(times, key=lambda name: times[name], default=None)
    if software is None or times[software] >= library_s:
        return None
    return Saving(work.over, work.pattern, payload, calls, library_s, times[software], software)


def _is_judged(work: Exchange, group: Group) -> bool:
    """Tell whether an exchange is one of the library of collectives inside a node."""
    several = float(np.max(np.asarray(group.num_gpus))) > 1 and float(np.max(np.asarray(group.num_nodes))) == 1
    return several and group.machine is not None and work.library_seconds(group) is None


def _calls(work: Exchange, group: Group, payload: float, element: str) -> Iterator[Call]:
    """Yield calls of software that runs an exchange and sends what it is given."""
    question = Question.of(work.pattern, payload, group.num_gpus, group.num_nodes)
    machine: Any = group.machine
    for software in all_software():
        if software.name in _AS_LIBRARY:
            continue
        for call in map(Call, software.names):
            if not call.is_lossy_for(element) and refusal(call, machine, question) is None:
                yield call
