"""Whether other software of collectives would pay in a recorded run: copy engines, symmetric memory, multimem.

Each group of collectives that the library ran inside a node is run again by each piece of software of
`conf/collective` that could take its place (`simulators.costs.other_software`, which steps ask as well), with the SMs
that this software holds, in the three cases of the laws and with the least, the expected and the largest ratio of its
time to the library's. The gain goes from the least to the largest of these nine runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dse_traces.change.settings import Setting
from dse_traces.change.what_if import WORTH, Plan, WhatIfs
from dse_traces.laws.contention import Estimate
from dse_traces.laws.task_graph import EXPECTED
from simulators.costs.other_software import Replacement, ratio_gpus

Floats = NDArray[np.float64]
SURELY, PERHAPS, HARDLY, NO = "yes", "perhaps", "hardly", "no"
"""Verdicts: it pays in all cases; as expected; in the best case alone; in none."""


@dataclass(frozen=True)
class SoftwareVerdict:
    """Whether software would pay for the collectives of a group: the name of the group, what would run them, the gain
    [s] over the run as recorded, and the verdict.
    """

    group: str
    software: Replacement
    gain: Estimate
    verdict: str


def software_verdicts(what_ifs: WhatIfs) -> list[SoftwareVerdict]:
    """Verdicts on all software that could run the collectives of each group in place of the library.

    Groups in their order; of each the software that gains most, as expected, first.
    """
    verdicts = list[SoftwareVerdict]()
    for group, name in enumerate(what_ifs.model.names):
        of_group = list(_verdicts(what_ifs, group, name))
        verdicts += sorted(of_group, key=lambda verdict: -verdict.gain.value)
    return verdicts


def _verdicts(what_ifs: WhatIfs, group: int, name: str) -> Iterator[SoftwareVerdict]:
    choices = what_ifs.effects.terms[group].software
    plans = [
        Plan().with_setting(group, Setting(software=of.name, slower=ratio / of.ratio))
        for of in choices
        for ratio in of.ratios
    ]
    if not plans:
        return
    gains = (what_ifs.recorded_s - what_ifs.seconds(plans)).reshape(len(choices), 3, -1)
    for of, cases in zip(choices, gains, strict=True):
        gain = Estimate(float(cases.min()), float(cases[1, EXPECTED]), float(cases.max()))
        yield SoftwareVerdict(name, of, gain, _verdict(what_ifs, gain, group))


def _verdict(what_ifs: WhatIfs, gain: Estimate, group: int) -> str:
    """The verdict on a gain; sure only on GPUs whose ratios of times were measured, of collectives of known size."""
    least, effects = WORTH * float(what_ifs.recorded_s[EXPECTED]), what_ifs.effects
    is_measured = effects.terms[group].payload_bytes > 0 and str(effects.machine.gpu.name) in ratio_gpus()
    if gain.low >= least and is_measured:
        return SURELY
    return PERHAPS if gain.value >= least else HARDLY if gain.high >= least else NO


def count_runs(verdicts: Sequence[SoftwareVerdict]) -> int:
    """What-ifs that verdicts took, the cases of the laws counted once."""
    return 3 * len(verdicts)
