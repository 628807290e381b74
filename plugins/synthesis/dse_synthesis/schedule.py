"""A schedule given step by step, or found by search (`dse_synthesis.search`) where no steps are given.

Each shard is cut at `cuts`, in equal `parts` of its rows (`cut_dim` m) or of the depth (k). Steps follow in the order
in which they are submitted; a range [a, b] stands for what is between cuts a and b of the shards of some peers, or all:

    {move: [0, 2]}                    DMA engines move it, after what they were given before
    {move: [2, 3], kernel: 0}         a kernel on `kernels[0]` CUs moves it, after the kernel before it of as many CUs
    {move: [3, 4], after: 1}          engines pause until step 1 has ended, the first one being 0
    {compute: [0, 2]}                 one GEMM on it, next in the stream, once it has arrived
    {local: [0, 3]}                   a GEMM on the local shard; with `compute`, one on both

Engines and kernels move at once, and share links. A GEMM that comes first makes what is then moved. Checked before it
is lowered: everything is moved and computed exactly once, and no step waits for a later one.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, Self, cast

import numpy as np
from pydantic import Field

from dse.errors import ConfigError
from dse.errors.parsing import parse_json
from dse.files import atomic_replacement, read_text
from dse.space.blocks import Rule
from dse.values import content_key, knob
from dse.values.units import Integer
from dse_synthesis.search import VERSION, ScheduleSearch
from dse_synthesis.steps import LOCAL, Step
from search_spaces.comm_knobs import CommEngineKnobs
from search_spaces.pipeline import Pipeline
from simulators.costs.transfer import Mover, TransferMode, library_cus
from simulators.hardware.machine import System
from simulators.hardware.network import Route
from simulators.overlap.design import OverlapDesign
from simulators.overlap.node import least_shard
from simulators.taskgraph.graph import TaskGraph
from simulators.workloads.operators import Workload

_PATH = "schedule.steps"
_EXPLICIT = ("cut_dim", "parts", "cuts", "kernels", "masked", "steps")


class SynthesisedSchedule(CommEngineKnobs):
    """Knobs of the family.

    masked: where one kernel moves all, its CUs are taken from the GEMM whether or not data moves. evaluations:
    structures that a search runs, where there are no steps; seed: of its random numbers.
    """

    family: Literal["synthesised"]
    comm_engine: None = None  # type: ignore[assignment]  # steps name theirs
    comm_cus: None = None
    cut_dim: Annotated[Literal["m", "k"], knob(structural=True)] = "m"
    parts: Annotated[Integer, knob(structural=True, ge=1, le=2**31)] = 1
    cuts: tuple[Annotated[int, Field(ge=0)], ...] = (0, 1)
    kernels: tuple[Annotated[int, Field(ge=1, le=4096)], ...] = ()
    masked: Annotated[bool, knob(structural=True)] = False
    steps: tuple[Step, ...] = ()
    evaluations: Annotated[Integer, knob(structural=True, ge=0, le=10**6)] = 100
    seed: Annotated[Integer, knob(structural=True, ge=0, le=2**31)] = 0

    @property
    def mover(self) -> Mover:
        """The first mover: kernels, where they move all."""
        return "cu" if self.steps and len(self._movers) == 1 and self._movers[0] is not None else "dma"

    @property
    def _movers(self) -> list[int | None]:
        """Kernels that move data; None: DMA engines."""
        return list(dict.fromkeys(step.kernel for step in self.steps if step.move is not None))

    def neutral(self) -> Mapping[str, Any]:
        """None: what a knob changes depends on the steps."""
        return {}

    @property
    def searches(self) -> bool:
        """True if there are no steps."""
        return not self.steps

    def settle(self, system: System, workload: Workload) -> Self:
        """The schedule with the steps that the search finds, where it has none.

        What was found is kept in the user's cache folder, so that other processes need not search again.
        """
        if self.steps:
            return self
        parts: dict[str, Any] = {"system": system, "workload": workload, "schedule": self}
        # the key covers system, workload and search: a file of another version is never read
        path = _cache() / f"{content_key(OverlapDesign.model_construct(**parts), VERSION)}.json"
        if (settled := self._read(path, system, workload)) is not None:
            return settled
        searched: Any = ScheduleSearch(self, system, workload, seed=self.seed).knobs(self.evaluations)
        # also in the place of a file that cannot be used, else each process would search again
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_replacement(path) as fresh:
                fresh.write_text(json.dumps(searched.explicit()))
        return cast(Self, searched)

    def _read(self, path: Path, system: System, workload: Workload) -> Self | None:
        """The schedule of a file of the cache; None where there is none that can run."""
        if not path.is_file():
            return None
        try:
            named = {"name": self.name, "family": self.family, "priority": self.priority}
            settled = type(self).model_validate({**named, **parse_json(read_text(path, str(path)), str(path))})
        # a damaged file, or one of an older form: searched anew
        except (ValueError, TypeError, ConfigError):
            return None
        # a file is not trusted: a schedule that breaks a rule here is not used
        runs = not any(np.any(rule.broken) for rule in settled.rules(system, workload))
        return self.model_copy(update={name: getattr(settled, name) for name in _EXPLICIT}) if runs else None

    def explicit(self) -> dict[str, Any]:
        """What the steps are, as YAML or JSON holds it: keys of `schedule`."""
        steps = [
            {name: list(value) if isinstance(value, tuple) else value for name, value in step if value is not None}
            for step in self.steps
        ]
        numbers = {name: getattr(self, name) for name in _EXPLICIT}
        return {**numbers, "cuts": list(self.cuts), "kernels": list(self.kernels), "steps": steps}

    def rules(self, system: System, workload: Workload) -> Sequence[Rule]:
        """Require that all parts are moved and computed once, in an order that can run, by CUs that are there."""
        rules = list(super().rules(system, workload))
        # steps can be checked only on a system that is sound
        if any(rule.broken is True for rule in rules):
            return rules
        moved = workload.overlap().collective
        if self.steps:
            most = np.asarray(least_shard(system, moved.rows) if self.cut_dim == "m" else moved.cols)
            rule = "cuts {0} rows of a shard or columns into more parts"
            rules.append(Rule("schedule.parts", (most > 0) & (self.parts > most), rule, self.parts, (most[()],)))
        rules += [
            Rule(_PATH, True, text, None, way_out="every part once; a step after those it needs")
            for text in self._faults(system.node.num_gpus - 1, workload)
        ]
        # a kernel of the collective cannot use more CUs than the library launches work-groups
        library = int(np.min(library_cus(system, moved.pattern)))
        if (most_cus := max(self.kernels, default=0)) > library:
            rule = "is more than the workgroups of the collective's kernel ({0})"
            rules.append(Rule("schedule.kernels", True, rule, most_cus, (library,), "use at most {0}"))
        return rules

    def _faults(self, num_peers: int, workload: Workload) -> Iterator[str]:
        """Yield what is wrong with the steps, with the interval."""
        if not self.steps:
            return
        ends = self.cuts[:1] + self.cuts[-1:]
        if ends != (0, self.parts) or any(b <= a for a, b in itertools.pairwise(self.cuts)):
            yield f"cut the shards at {list(self.cuts)}, which do not rise from 0 to schedule.parts = {self.parts}"
        elif any(kernel is not None and kernel >= len(self.kernels) for kernel in self._movers):
            yield f"name a kernel that there is not: schedule.kernels has {len(self.kernels)}"
        else:
            # one fault at a time: those that follow are mostly its effects
            yield from itertools.islice(self._unsound(num_peers, gathers=workload.overlap().order == "before"), 1)

    def _unsound(self, num_peers: int, *, gathers: bool) -> Iterator[str]:
        """Yield what is moved or computed twice, too early, or never."""
        last = len(self.cuts) - 1
        done: dict[str, set[tuple[int, int]]] = {"moves": set(), "computes": set()}
        for number, step in enumerate(self.steps):
            mine, other = ("moves", "computes") if step.move is not None else ("computes", "moves")
            # one GEMM has one depth: its operands must be cut at the same places
            if step.compute and step.local and self.cut_dim == "k" and step.compute != step.local:
                yield f"step {number} computes slices of different depths at once"
            if step.after is not None and step.after >= number:
                yield f"step {number} waits for step {step.after}, which does not come before it"
            for peer, part in step.cells(num_peers):
                about = f"step {number} {mine} interval {part} of the shard of peer {peer}"
                if peer > num_peers or part >= last:
                    yield f"{about}, which there is not"
                if (peer, part) in done[mine]:
                    yield f"{about} once more"
                # what comes second needs the first: a GEMM after a gather its data, a move after a GEMM its result
                if (mine == "computes") == gathers and peer != LOCAL and (peer, part) not in done[other]:
                    yield f"{about} before a step {other} it"
                done[mine].add((peer, part))
        # the local shard is computed, but never moved
        for mine, least in (("moves", 1), ("computes", LOCAL)):
            cells = {(peer, part) for peer in range(least, num_peers + 1) for part in range(last)}
            if lost := cells - done[mine]:
                peer, part = min(lost)
                yield f"no step {mine} interval {part} of the shard of peer {peer}"

    def lower(self, system: System, workload: Workload) -> TaskGraph:
        """Lower step by step."""
        pattern = workload.overlap().collective.pattern
        # the first mover is the line's own, others are added to it
        first, *more = self._movers or [None]
        cus = None if first is None else self.kernels[first]
        # CUs can be taken for good only where one kernel moves everything
        line = Pipeline(system, workload, knobs=self, comm_cus=cus, masked=self.masked and not more)
        places = {first: 0}
        for kernel in more:
            mode = (
                TransferMode("dma", 0, pattern) if kernel is None else TransferMode("cu", self.kernels[kernel], pattern)
            )
            places[kernel] = line.also(mode)
        _StepLowering(self, line, places).run()
        return line.build()


def _cache() -> Path:
    """Folder of the schedules that were found."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dse" / "schedules"


class _StepLowering:
    """Lowers the steps of a schedule; places: of each mover in the line, by its kernel."""

    def __init__(self, plan: SynthesisedSchedule, line: Pipeline, places: Mapping[int | None, int]) -> None:
        self._plan, self._line, self._places = plan, line, places
        self._tasks: dict[tuple[int, int], int] = {}  # (peer, interval) -> the task that others wait for
        self._waiting: list[list[int]] = []
        self._left = sum(step.move is not None for step in plan.steps)
        self._added: set[int] = set()  # peers of whose rows a part of the product has been made
        self._consumed: set[int] = set()
        self._ends: list[list[int]] = []  # of each step, the tasks that end it

    def run(self) -> None:
        """Add all steps, and what adds up operands that engines moved."""
        for number, step in enumerate(self._plan.steps):
            if step.move is not None:
                self._move(number, step)
            else:
                self._compute(number, step)
        self._add_up(keep=0)

    def _move(self, number: int, step: Step) -> None:
        line, gathers = self._line, self._line.order == "before"
        assert step.move is not None
        peers = step.peers or tuple(route.peer for route in line.routes)
        chosen = [route for route in line.routes if route.peer in peers]
        cells = list(step.cells(len(line.routes)))
        # gathered data is there from the start; results are moved once their GEMM has ended
        after = [] if gathers else list(dict.fromkeys(self._tasks[cell] for cell in cells))
        if step.after is not None:
            after = list(dict.fromkeys([*after, *self._ends[step.after]]))
        amounts = [(route, self._amount(route, step.move)) for route in chosen]
        moved = line.comm.step(f"move {number}", amounts, after=after, by=self._places[step.kernel])
        self._ends.append(moved)
        self._left -= 1
        of_peer = {route.peer: task for route, task in zip(chosen, moved, strict=True)}
        if gathers:
            self._tasks |= {(peer, part): of_peer[peer] for peer, part in cells}
        # engines only copy: a kernel of this GPU has to add what they bring (reduce-scatter)
        elif line.comm.adds and step.kernel is None:
            self._waiting.append(moved)

    def _compute(self, number: int, step: Step) -> None:
        line, gathers = self._line, self._line.order == "before"
        if not gathers:
            # the newest move is mostly still under way: its sum would hold up the stream before this GEMM
            self._add_up(keep=1)
        cells = list(step.cells(len(line.routes)))
        # cells of the local shard have no task
        after = list(dict.fromkeys(self._tasks[cell] for cell in cells if cell in self._tasks)) if gathers else []
        depth: Any = line.op.local_k
        cols: Any = line.op.local_n
        ranged = step.compute or step.local
        assert ranged is not None
        peers = [*(step.peers or range(1, len(line.routes) + 1))] if step.compute else []
        groups = [(peer, step.compute) for peer in peers] + ([(LOCAL, step.local)] if step.local else [])
        rows: Any = 0
        if self._plan.cut_dim == "m":
            rows = sum(self._length(line.shard_rows[peer], part) for peer, part in groups if part)
        else:
            # slices of the depth (gather) or of columns (scatter) have all rows
            rows = sum(line.shard_rows[peer] for peer, _ in groups)
            if gathers:
                depth = self._length(depth, ranged)
            else:
                cols = self._length(cols, ranged)
        # a slice of the depth adds to rows that an earlier slice made: the result is read as well
        again = self._plan.cut_dim == "k" and gathers and not self._added.isdisjoint(peer for peer, _ in groups)
        self._added |= {peer for peer, _ in groups}
        self._consumed |= set(after)
        # data may be moving meanwhile: moves to come, or moves that no GEMM has waited for
        beside = self._left > 0 or not set(self._tasks.values()) <= self._consumed or not gathers
        task = line.compute.gemm(
            f"gemm {number}", (rows, cols, depth), after=after, overlapped=beside, accumulate=again
        )
        self._ends.append([task])
        # moves wait for the GEMM that makes their data
        if not gathers:
            self._tasks |= dict.fromkeys(cells, task)

    def _add_up(self, keep: int) -> None:
        while len(self._waiting) > keep:
            self._line.compute.reduce("reduce", self._waiting.pop(0))

    def _amount(self, route: Route, ranged: tuple[int, int]) -> Any:
        line, cols = self._line, self._line.collective.cols
        if self._plan.cut_dim == "m":
            return line.payload(self._length(line.shard_rows[route.peer], ranged), cols)
        return line.payload(line.shard_rows[route.peer], self._length(cols, ranged))

    def _length(self, total: Any, ranged: tuple[int, int]) -> Any:
        """Items of `total` between two cuts."""
        cuts, parts = self._plan.cuts, self._plan.parts
        # both ends are rounded, not the length: pieces add up to the whole
        first, last = (np.asarray(total) * np.asarray(cuts[place]) // parts for place in ranged)
        return last - first


SCHEDULE = SynthesisedSchedule
