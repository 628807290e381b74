"""What a step's collectives would take by other software of collectives (`conf/collective`), in place of the library.

Of each exchange that waits for nothing else and that nothing hides, in groups inside a node, the software counts that
is the fastest of those that send what they are given, in the run's precision, and run it at its size by default:

    saved = micro-batches x times a micro-batch x (T of the library - T of the software)

(derived); its interval is that of the ratio of both times in measured rows (`conf/data/collective_software.yaml`).
Collectives beside other work, of sites with schedules and of gradients, are not judged: what they hold counts
there, which no row of a table tells.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from simulators.costs.collective import Group
from simulators.costs.other_software import ratio_error, replacements
from simulators.steps.design import StepDesign
from simulators.steps.operators.work import Exchange, StageOperator
from simulators.steps.run.build import iteration
from simulators.steps.run.passes import MicroBatch


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
    fastest = next(iter(replacements(work.pattern, payload, group, element=element, library_s=library_s)), None)
    if fastest is None or fastest.seconds >= library_s:
        return None
    return Saving(work.over, work.pattern, payload, calls, library_s, fastest.seconds, fastest.name)


def _is_judged(work: Exchange, group: Group) -> bool:
    """Tell whether an exchange is one of the library of collectives inside a node."""
    several = float(np.max(np.asarray(group.num_gpus))) > 1 and float(np.max(np.asarray(group.num_nodes))) == 1
    return several and group.machine is not None and work.library_seconds(group) is None
