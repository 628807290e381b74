"""What settings of collectives do to their times and to the SMs that they hold.

    SMs        T (1 - u + u r(s') / r(s)),    u = T_s / T the share of its time that SMs explain
    link       T (1 - v + v / k),    v in [T_m / T, t / T, 1]: what links of the machine explain, the fastest collective
               of the group, all of it; the rest is waiting for late ranks, or a slower link. Where t, too, is more than
               twice T_m, T_m is expected; where other ranks tell the transfer, v is its share
    engines    as another link, at the rate of the copy engines; no SMs. Only for what adds nothing
    switch     as another link, by the costs of the machine's switch (`simulators.costs.collective`)

A group that copy engines move already (copies between GPUs) holds no SM, so only its order and its link can change.

No change of a collective gains more than what of its time is no waiting (`Terms.most_s`), and what it costs others.

r: time of a byte on s SMs, T_s: of the payload so; T: recorded, alone; T_m: time on the machine; t: of the fastest. A
payload that is not known leaves u in [0, 1/2, 1] and T_m = 0. All ranks are taken to change alike.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from dse_traces.laws.assumed_changes import assumed_changes
from dse_traces.laws.machine import ProfiledMachine
from dse_traces.laws.task_graph import EXPECTED, Contended
from dse_traces.profile.kernels import Marks
from simulators.costs.algorithms import Pattern
from simulators.costs.collective import collective_cost, machine_ring
from simulators.hardware.network import Node

Floats = NDArray[np.float64]
Mover = Literal["SMs", "copy engines", "switch"]

RECORDED = "as recorded"
ORDERS = (
    RECORDED,
    "earlier",
    "high priority",
    "in 2 parts",
    "in 4 parts",
    "in 8 parts",
    "2 merged",
    "4 merged",
    "waited for later",
)
"""What can be done with when collectives of a group run."""
FIRST, LATER = "high priority", "waited for later"
LINKS = (1.0, 1.5, 2.0, 4.0)
"""Factors on the rate of links."""
_PATTERNS: Mapping[str, Pattern] = {
    r"all_?reduce|multimem": "all_reduce",
    r"reduce_?scatter": "reduce_scatter",
    r"all_?gather": "all_gather",
    r"all_?to_?all": "all_to_all",
    r"broadcast": "broadcast",
    r"send_?recv|p2p|ptop|peer": "send_recv",
}
_ADDS = ("all_reduce", "reduce_scatter")
_USUAL_BYTES = 64e6  # of a collective whose payload is not known, for ratios
_SHORTEST = 1e-3  # of its time that is left of a collective
MANY = 2.0
"""Times as long as links need, from which on a collective waits for late ranks, or a link is slower."""


@dataclass(frozen=True)
class Setting:
    """How the collectives of a group run. order: of `ORDERS`. sms: None: as recorded. link: factor on its rate."""

    order: str = RECORDED
    sms: float | None = None
    mover: Mover = "SMs"
    link: float = 1.0

    @property
    def changes(self) -> int:
        """How many things are not as recorded, the link aside."""
        return (self.order != RECORDED) + (self.sms is not None) + (self.mover != "SMs")

    @property
    def in_software(self) -> bool:
        """Whether no other machine, and nothing that the profile does not tell, is needed."""
        return self.link == 1.0 and self.order != LATER

    def __str__(self) -> str:
        parts = [self.order] if self.order != RECORDED else []
        parts += [f"{self.sms:g} SMs"] if self.sms is not None else []
        parts += [f"by the {self.mover}"] if self.mover != "SMs" else []
        parts += [f"link x {self.link:g}"] if self.link != 1 else []
        return ", ".join(parts) or RECORDED


@dataclass(frozen=True)
class Switched:
    """All that a switch computes takes `ratio` times as long as on a ring, on `sms` SMs."""

    ratio: float
    sms: float


@dataclass(frozen=True)
class Terms:
    """What is known of a group of collectives. pattern: None if its name says none. moves, bound [3]: shares of its
    time that move data, and that SMs explain. machine_s: time on the links of the machine; 0: not known. engines: time
    of a byte by copy engines over that by its SMs; None where they cannot carry it. most_s [3]: what changes of its
    collectives can gain at most; waited_s: how long these wait for late ranks, None where other ranks were not read.
    """

    pattern: Pattern | None
    payload_bytes: float
    mean_s: float
    machine_s: float
    moves: Floats
    bound: Floats
    engines: float | None
    switch: Switched | None
    most_s: Floats
    waited_s: float | None


@dataclass(frozen=True)
class Effects:
    """Effects of settings on the groups of a profile."""

    model: Contended

    @cached_property
    def machine(self) -> ProfiledMachine:
        """The machine whose constants are assumed."""
        return self.model.laws.hardware

    @cached_property
    def node(self) -> Node:
        """Its node."""
        assert self.machine.node is not None  # laws need one
        return self.machine.node

    @cached_property
    def terms(self) -> tuple[Terms, ...]:
        """Terms of each group [G], as far as they are known."""
        return tuple(self._terms(group, name) for group, name in enumerate(self.model.names))

    def of(self, group: int, setting: Setting) -> tuple[Floats, float]:
        """Factor [3] on the time of collectives of a group, and the SMs that each then holds."""
        terms, sms = self.terms[group], float(self.model.group_sms[group])
        factor = 1 - terms.moves + terms.moves / setting.link
        if setting.mover == "copy engines" and terms.engines is not None:
            return np.maximum(factor + terms.moves * (terms.engines - 1) / setting.link, _SHORTEST), 0.0
        if setting.mover == "switch" and terms.switch is not None:
            factor = factor + terms.moves * (terms.switch.ratio - 1) / setting.link
            return np.maximum(factor, _SHORTEST), terms.switch.sms
        if setting.sms is None or not sms:
            return factor, sms
        of_byte = self.model.laws.rate.seconds_per_byte([sms, setting.sms])
        return np.maximum(factor + terms.bound * (of_byte[1] / of_byte[0] - 1), _SHORTEST), setting.sms

    def movers(self, group: int) -> list[Mover]:
        """Engines that could move the data of a group."""
        terms = self.terms[group]
        engines: list[Mover] = [] if terms.engines is None else ["copy engines"]
        switches: list[Mover] = [] if terms.switch is None else ["switch"]
        return ["SMs", *engines, *switches]

    def _terms(self, group: int, name: str) -> Terms:
        pattern = next((of for text, of in _PATTERNS.items() if re.search(text, name, re.IGNORECASE)), None)
        places = self.model.group == group
        sizes = self.model.profile.kernels["payload_bytes"].to_numpy(float)[places]
        payload = float(np.median(sizes[np.isfinite(sizes)])) if np.isfinite(sizes).any() else 0.0
        times = self.model.alone_s[EXPECTED, places]
        machine_s = self._seconds(pattern, payload) if pattern and payload else 0.0
        least = min(1.0, machine_s / times.mean())
        # the quickest of many hardly waited for anybody; of one or two nobody knows, so the middle
        fastest = times.min() / times.mean() if payload and len(times) > 2 else (1 + least) / 2
        waited_s = self._waited_s(places)
        moves = np.array([least, max(least, fastest), 1.0])
        most = np.full(3, np.inf)
        if waited_s is not None:
            # no change of a collective shortens the wait for late ranks
            most = np.full(3, max(0.0, 1 - waited_s / self.model.profile.seconds[places].sum()))
        # far longer than its links need: it is taken to wait, and to move for as long as they need
        elif machine_s and times.min() > MANY * machine_s:
            moves[1] = least
        if machine_s and times.mean() > MANY * machine_s and waited_s is None:
            most = moves
        sms = float(self.model.group_sms[group])
        of_byte = float(self.model.laws.rate.seconds_per_byte(sms)) if sms else 0.0
        bound = np.minimum(assumed_changes().cases("share_spread") * payload * of_byte / times.mean(), 1.0)
        return Terms(
            pattern,
            payload,
            float(times.mean()),
            machine_s,
            np.minimum(moves, most),
            np.minimum(bound if payload or not sms else np.array([0.0, 0.5, 1.0]), most),
            self._engines(pattern, of_byte) if sms else None,
            self._switch(pattern, payload or _USUAL_BYTES) if sms else None,
            most * float(times.sum()),
            waited_s,
        )

    def _waited_s(self, places: Marks) -> float | None:
        """How long collectives wait for late ranks; None where none of them was matched with those of other ranks."""
        waited = self.model.profile.kernels["waited_for_ranks_s"].to_numpy(float)[places]
        return float(np.nansum(waited)) if np.isfinite(waited).any() else None

    def _seconds(self, pattern: Pattern, payload: float) -> float:
        ring = machine_ring(self.machine, self.node.num_gpus)
        return float(collective_cost(pattern, "ring", payload, ring).seconds)

    def _engines(self, pattern: Pattern | None, of_byte: float) -> float | None:
        dma = self.machine.gpu.dma
        if dma is None or pattern is None or pattern in _ADDS:
            return None
        return 1 / (dma.bytes_per_s * min(dma.num_engines, self.node.num_gpus - 1)) / of_byte

    def _switch(self, pattern: Pattern | None, payload: float) -> Switched | None:
        switch = self.node.switch()
        rates = {} if switch is None else {str(of): rate for of, rate in switch.collectives.items()}
        rate = rates.get(str(pattern))
        if rate is None or pattern is None:
            return None
        group = replace(machine_ring(self.machine, self.node.num_gpus), in_switch=switch)
        seconds = float(collective_cost(pattern, "in_switch", payload, group).seconds)
        # as many CTAs as reach the switch's rate; eight where that is not known
        sms = np.ceil(rate.bytes_per_s / rate.bytes_per_s_per_cta) if rate.bytes_per_s_per_cta else 8.0
        return Switched(seconds / self._seconds(pattern, payload), float(sms))
