"""A design of a profile that is changed: the machine, the recorded run, and the plan of its changes.

Values of a plan:

    order           when collectives run (`dse_traces.change.dependencies.ORDERS`, with _ for spaces)
    sms             SMs that each collective holds; 0: as recorded
    mover           what moves the data: sms, copy_engines, switch
    link            factor on the rate of links
    fused           kernels bound by memory run with the kernel before them (`dse_traces.change.fusion`)
    micro_batches   halves of the batch, of which one computes while the other communicates (`.micro_batches`)
    gpu             another machine, whose GPU computes; null: the one that was recorded
    groups          what is different for a group of collectives: c1 (that with the most time), c2, ...
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from dse.config.named_file import content_of
from dse.errors import ConfigError, Problem
from dse.values import Frozen, knob
from dse.values.units import Integer, Number
from dse_chakra.packed import MOST_STREAMED
from dse_traces import DATA
from dse_traces.change.dependencies import ORDERS
from dse_traces.change.settings import Mover, Setting
from dse_traces.change.what_if import Plan
from dse_traces.laws.machine import ProfiledMachine
from dse_traces.readers.imported_folders import TABLE, is_imported

if TYPE_CHECKING:
    Order = str
else:
    # of the mapping, so that an order that is added there can be chosen
    Order = Literal[tuple(name.replace(" ", "_") for name in ORDERS)]
MoverName = Literal["sms", "copy_engines", "switch"]
_MOVERS: Mapping[str, Mover] = {"sms": "SMs", "copy_engines": "copy engines", "switch": "switch"}
_PATH = "workload.path"
# above any GPU's count: the rule that SMs are left for compute is checked with the machine at hand
_Sms = Annotated[Integer, Field(ge=0, le=4096)]
_Link = Annotated[Number, Field(ge=0.01, le=1000)]


class Recorded(Frozen):
    """A recorded run. content: hash of its file; note: its path; rank: of several in a file, the place of it.

    kernels: patterns of names of kernels by class (`dse_traces.profile.kernel_classes`), which come before our own.
    """

    content: str
    note: str
    rank: int = 0
    kernels: Mapping[str, tuple[str, ...]] = Field(default_factory=dict)


class GroupPlan(Frozen):
    """What is different for one group of collectives; None: as the plan says for all."""

    order: Order | None = None
    sms: _Sms | None = None
    mover: MoverName | None = None
    link: _Link | None = None


class PlanKnobs(Frozen):
    """Changes of a run."""

    order: Order = "as_recorded"
    # 0 and not null is the default, as a sweep needs a number for "as recorded"
    sms: Annotated[_Sms | None, knob(when={"mover": "sms"})] = 0
    mover: MoverName = "sms"
    link: _Link = 1.0
    fused: bool = False
    micro_batches: Annotated[Integer, Field(ge=1, le=2)] = 1
    gpu: str | None = None
    groups: Mapping[str, GroupPlan] = Field(default_factory=dict)

    def setting(self, group: int) -> Setting:
        """The setting of a group of collectives, numbered from 0."""
        own = self.groups.get(group_name(group), GroupPlan())
        mover = own.mover or self.mover
        # a group's own value comes before the plan's
        return Setting(
            (own.order or self.order).replace("_", " "),
            None if mover != "sms" else _number(own.sms if own.sms is not None else self.sms),
            _MOVERS[mover],
            float(self.link if own.link is None else own.link),
        )

    def plan(self, groups: int) -> Plan:
        """The plan for as many groups of collectives."""
        plan = Plan((), self.gpu or "", self.fused, self.micro_batches)
        for group in range(groups):
            # settings that equal the recorded one are dropped by the plan, so equal plans compare equal
            plan = plan.with_setting(group, self.setting(group))
        return plan


class ProfileDesign(Frozen):
    """A recorded run, the machine that it ran on, and a plan. other: the machine of `plan.gpu`."""

    system: ProfiledMachine
    workload: Recorded
    plan: PlanKnobs
    other: ProfiledMachine | None = None


def group_name(group: int) -> str:
    """How a plan calls a group of collectives, numbered from 0.

    >>> group_name(0)
    'c1'
    """
    return f"c{group + 1}"


def located(text: str) -> Path:
    """The file or folder of a recorded run: a path, or the name of a shipped profile. Raises ConfigError."""
    folder = DATA / "profiles"
    for path in (Path(text), folder / text):
        if is_imported(path) or path.is_file():
            return path
    names = ", ".join(sorted(path.name for path in folder.iterdir()))
    way = f"name the file of a profile, a folder that profile import wrote, or one of {names}"
    raise ConfigError([Problem(_PATH, "is no file, and no folder that profile import wrote", text, way)])


def content_of_profile(path: Path) -> str:
    """Hash of what a file, or the table of a folder, holds. Raises ConfigError."""
    # a folder is identified by its table of kernels alone: reports next to it may be rewritten
    return content_of(path / f"{TABLE}.parquet" if path.is_dir() else path, _PATH, most=MOST_STREAMED)


def _number(count: int | None) -> float | None:
    return float(count) if count else None
