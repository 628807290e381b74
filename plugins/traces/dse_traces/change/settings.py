"""What settings of collectives do to their times and to the SMs that they hold.

    SMs        T (1 - u + u r(s') / r(s)),    u = T_s / T the share of its time that SMs explain
    link       T (1 - v + v / k),    v in [T_m / T, t / T, 1]: what links of the machine explain, the fastest collective
               of the group, all of it; the rest is waiting for late ranks, or a slower link. Where t, too, is more than
               twice T_m, T_m is expected; where other ranks tell the transfer, v is its share
    engines    as another link, at the rate of the copy engines; no SMs. Only for what adds nothing. Where software runs
               it by copy engines (`simulators.costs.other_software`), its time counts
    software   T (1 - v + v q),    q: its time over that of the library; it holds the SMs of its own
    switch     as another link, by the costs of the machine's switch (`simulators.costs.collective`)

A group that copy engines move already (copies between GPUs) holds no SM, so only its order and its link can change.

No change of a collective gains more than what of its time is no waiting (`Terms.gainable_s`), and what it costs others.

r: time of a byte on s SMs, T_s: of the payload so; T: recorded, alone; T_m: time on the machine; t: of the fastest. A
payload that is not known leaves u in [0, 1/2, 1] and T_m = 0. All ranks are taken to change alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from dse_traces.change.dependencies import LATER, RECORDED
from dse_traces.laws.assumed_changes import assumed_changes
from dse_traces.laws.machine import ProfiledMachine
from dse_traces.laws.task_graph import EXPECTED, ContentionModel
from dse_traces.profile.kernels import Marks
from dse_traces.profile.payloads import pattern_of
from simulators.costs.algorithms import Pattern
from simulators.costs.collective import collective_cost, machine_ring
from simulators.costs.collective_software import Call
from simulators.costs.other_software import Replacement, replacements
from simulators.hardware.network import Node

Floats = NDArray[np.float64]
Mover = Literal["SMs", "copy engines", "switch"]

LINKS = (1.0, 1.5, 2.0, 4.0)
"""Factors on the rate of links."""
_SWITCH_SMS = 8.0  # SMs that feed a switch whose rate of one CTA is not known (assumed: a few reach NVLink SHARP's)
_ADDS = ("all_reduce", "reduce_scatter")
_USUAL_BYTES = 64e6  # of a collective whose payload is not known, for ratios
_OF_LIBRARY = r"(?i)nccl|rccl"  # in names of its kernels
_OF_OTHERS = r"(?i)symk|multimem|nvls|symm_mem"  # in names of those over symmetric memory, and in the switch
# a factor of 0 would make an empty task
_LEAST_FACTOR = 1e-3  # on the time of a collective
MANY = 2.0
"""Times as long as links need, from which on a collective waits for late ranks, or a link is slower."""


@dataclass(frozen=True)
class Setting:
    """How the collectives of a group run. order: of `dse_traces.change.dependencies.ORDERS`. sms: None: as recorded.
    link: factor on its rate. software: of `conf/collective`, in place of the library, which takes `slower` times the
    time that its costs say.
    """

    order: str = RECORDED
    sms: float | None = None
    mover: Mover = "SMs"
    link: float = 1.0
    software: str = ""
    slower: float = 1.0

    @property
    def changes(self) -> int:
        """How many things are not as recorded, the link aside."""
        # the link is hardware, and not a change that a user must make
        return (self.order != RECORDED) + (self.sms is not None) + (self.mover != "SMs") + bool(self.software)

    @property
    def in_software(self) -> bool:
        """Whether no other machine, and nothing that the profile does not tell, is needed."""
        return self.link == 1.0 and self.order != LATER

    def __str__(self) -> str:
        parts = [self.order] if self.order != RECORDED else []
        parts += [f"{self.sms:g} SMs"] if self.sms is not None else []
        parts += [f"by the {self.mover}"] if self.mover != "SMs" else []
        parts += [f"by {self.software}"] if self.software else []
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
    of a byte by copy engines over that by its SMs; None where they cannot carry it. gainable_s [3]: what changes of its
    collectives can gain at most; waited_s: how long these wait for late ranks, None where other ranks were not read.
    software: that could run them in place of the library, the fastest first.
    """

    pattern: Pattern | None
    payload_bytes: float
    mean_s: float
    machine_s: float
    moves: Floats
    bound: Floats
    engines: float | None
    switch: Switched | None
    gainable_s: Floats
    waited_s: float | None
    software: tuple[Replacement, ...] = ()


@dataclass(frozen=True)
class _Recorded:
    """Collectives of a group as recorded. gpus: that take part in one. alone_s [M]: of each. seconds: of all.
    payload_bytes, machine_s: 0 if not known. by_library: whether the library's own kernels run them, inside a node.
    """

    pattern: Pattern | None
    gpus: int
    by_library: bool
    payload_bytes: float
    alone_s: Floats
    seconds: float
    machine_s: float
    waited_s: float | None

    @property
    def moving_shares(self) -> Floats:
        """Share of the time that moves data, in each case of the laws [3]."""
        mean_s = self.alone_s.mean()
        # the machine cannot be slower than what was recorded: its constants then are too low
        least = min(1.0, self.machine_s / mean_s)
        # the quickest of many hardly waited for anybody; of one or two nobody knows, so the middle
        comparable = self.payload_bytes and len(self.alone_s) > 2
        fastest = self.alone_s.min() / mean_s if comparable else (1 + least) / 2
        expected = max(least, fastest)
        # far longer than its links need: it is taken to wait, and to move for as long as they need
        if self.waited_s is None and self.machine_s and self.alone_s.min() > MANY * self.machine_s:
            expected = least
        return np.array([least, expected, 1.0])

    @property
    def gainable_shares(self) -> Floats:
        """Share of the time that changes can gain at most [3]; infinite where nothing bounds it."""
        # no change of a collective shortens the wait for late ranks
        if self.waited_s is not None:
            return np.full(3, max(0.0, 1 - self.waited_s / self.seconds))
        # without other ranks, a time far above the links' is bounded by what links need
        if self.machine_s and self.alone_s.mean() > MANY * self.machine_s:
            return self.moving_shares
        return np.full(3, np.inf)


@dataclass(frozen=True)
class Effects:
    """Effects of settings on the groups of a profile."""

    model: ContentionModel

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
            # the terms add up: the link's gain, and the engine's rate over the SMs' on what is left
            return np.maximum(factor + terms.moves * (terms.engines - 1) / setting.link, _LEAST_FACTOR), 0.0
        if setting.mover == "switch" and terms.switch is not None:
            factor = factor + terms.moves * (terms.switch.ratio - 1) / setting.link
            return np.maximum(factor, _LEAST_FACTOR), terms.switch.sms
        replaced = next((of for of in terms.software if of.name == setting.software), None)
        if replaced is not None:
            factor = factor + terms.moves * (replaced.ratio * setting.slower - 1) / setting.link
            return np.maximum(factor, _LEAST_FACTOR), float(replaced.num_ctas)
        # copy engines hold no SM as recorded, so another number of SMs means nothing
        if setting.sms is None or not sms:
            return factor, sms
        # r(s') / r(s): the law of the machine gives the ratio, the profile the time
        of_byte = self.model.laws.rate.seconds_per_byte([sms, setting.sms])
        return np.maximum(factor + terms.bound * (of_byte[1] / of_byte[0] - 1), _LEAST_FACTOR), setting.sms

    def movers(self, group: int) -> list[Mover]:
        """Engines that could move the data of a group."""
        terms = self.terms[group]
        engines: list[Mover] = [] if terms.engines is None else ["copy engines"]
        switches: list[Mover] = [] if terms.switch is None else ["switch"]
        return ["SMs", *engines, *switches]

    def _terms(self, group: int, name: str) -> Terms:
        """What the profile and the machine tell of a group. name: of the group, which tells its pattern."""
        recorded, byte_s = self._recorded(group, name), self._byte_s(group)
        gainable, software = recorded.gainable_shares, self._software(recorded) if byte_s else ()
        return Terms(
            pattern=recorded.pattern,
            payload_bytes=recorded.payload_bytes,
            mean_s=float(recorded.alone_s.mean()),
            machine_s=recorded.machine_s,
            moves=np.minimum(recorded.moving_shares, gainable),
            bound=np.minimum(_sms_shares(recorded, byte_s), gainable),
            # copies between GPUs are on engines already
            engines=self._engines(recorded, byte_s, software) if byte_s else None,
            switch=self._switch(recorded) if byte_s else None,
            gainable_s=gainable * float(recorded.alone_s.sum()),
            waited_s=recorded.waited_s,
            software=software,
        )

    def _recorded(self, group: int, name: str) -> _Recorded:
        """The collectives of a group as recorded."""
        places, profile = self.model.group == group, self.model.profile
        payload, gpus = self._median("payload_bytes", places) or 0.0, self._gpus(places)
        # a group of one GPU sends nothing: neither links nor engines matter
        pattern = pattern_of(name) if gpus > 1 else None
        return _Recorded(
            pattern=pattern,
            gpus=gpus,
            by_library=self._by_library(places),
            payload_bytes=payload,
            alone_s=self.model.alone_s[EXPECTED, places],
            seconds=profile.seconds[places].sum(),
            machine_s=self._seconds(pattern, payload, gpus) if pattern and payload else 0.0,
            waited_s=self._waited_s(places),
        )

    def _byte_s(self, group: int) -> float:
        """Time of a byte on the SMs that a collective of a group holds; 0 where copy engines move it."""
        sms = float(self.model.group_sms[group])
        return float(self.model.laws.rate.seconds_per_byte(sms)) if sms else 0.0

    def _waited_s(self, places: Marks) -> float | None:
        """How long collectives wait for late ranks; None where none of them was matched with those of other ranks."""
        waited = self.model.profile.kernels["waited_for_ranks_s"].to_numpy(float)[places]
        return float(np.nansum(waited)) if np.isfinite(waited).any() else None

    def _by_library(self, places: Marks) -> bool:
        """Tell whether kernels of the library alone run some collectives, as far as known inside a node."""
        names = self.model.profile.kernels["name"][places]
        is_library = names.str.contains(_OF_LIBRARY, regex=True) & ~names.str.contains(_OF_OTHERS, regex=True)
        return (
            bool(is_library.fillna(value=False).all())
            and (self._median("group_size", places) or 0) <= self.node.num_gpus
        )

    def _median(self, name: str, places: Marks) -> float | None:
        """The median of what is known of some kernels in a column; None where it is known of none."""
        values = self.model.profile.kernels[name].to_numpy(float, na_value=np.nan)[places]
        return float(np.median(values[np.isfinite(values)])) if np.isfinite(values).any() else None

    def _gpus(self, places: Marks) -> int:
        """GPUs that take part in a collective, of those of a node."""
        # where no group is recorded, all of a node; a larger group leaves it, and takes at least as long as inside
        return min(round(self._median("group_size", places) or self.node.num_gpus), self.node.num_gpus)

    def _seconds(self, pattern: Pattern, payload: float, gpus: int) -> float:
        return float(collective_cost(pattern, "ring", payload, machine_ring(self.machine, gpus)).seconds)

    def _software(self, recorded: _Recorded) -> tuple[Replacement, ...]:
        """Software that could run collectives of a group inside a node in place of the library, the fastest first."""
        if recorded.pattern is None or not recorded.by_library or self.node.library is None:
            return ()
        group = machine_ring(self.machine, recorded.gpus)
        return tuple(replacements(recorded.pattern, recorded.payload_bytes or _USUAL_BYTES, group))

    def _engines(self, recorded: _Recorded, byte_s: float, software: Sequence[Replacement]) -> float | None:
        dma = self.machine.gpu.dma
        if dma is None or recorded.pattern is None or recorded.pattern in _ADDS:
            return None
        by_engines = next((of for of in software if Call(of.name).software.engines), None)
        if by_engines is not None:
            return by_engines.ratio
        # an engine drives one peer at a time, so more engines than peers do not help
        return 1 / (dma.bytes_per_s * min(dma.num_engines, recorded.gpus - 1)) / byte_s

    def _switch(self, recorded: _Recorded) -> Switched | None:
        switch, pattern, payload = self.node.switch(), recorded.pattern, recorded.payload_bytes or _USUAL_BYTES
        rates = {} if switch is None else {str(of): rate for of, rate in switch.collectives.items()}
        rate = rates.get(str(pattern))
        if rate is None or pattern is None:
            return None
        group = replace(machine_ring(self.machine, recorded.gpus), in_switch=switch)
        seconds = float(collective_cost(pattern, "in_switch", payload, group).seconds)
        # as many CTAs as reach the switch's rate
        sms = np.ceil(rate.bytes_per_s / rate.bytes_per_s_per_cta) if rate.bytes_per_s_per_cta else _SWITCH_SMS
        return Switched(seconds / self._seconds(pattern, payload, recorded.gpus), float(sms))


def _sms_shares(recorded: _Recorded, byte_s: float) -> Floats:
    """Share of the time that SMs explain, in each case of the laws [3]. byte_s: time of a byte on them; 0: no SMs."""
    if byte_s and not recorded.payload_bytes:
        return np.array([0.0, 0.5, 1.0])
    by_sms = assumed_changes().cases("share_spread") * recorded.payload_bytes * byte_s
    return np.asarray(np.minimum(by_sms / recorded.alone_s.mean(), 1.0))
