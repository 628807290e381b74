"""Explicit schedules of collectives as YAML.

name: synthesised, 2 pieces
collective: all_gather
num_gpus: 8
units: 2
chunks:                     # of the tensor's blocks, each of which has `units` units
- block 0 [0, 1)
messages:                   # in an order in which they can be sent; numbers are places in `chunks`
- 0 from 0 to 1
- 3,4 from 2 to 0, added    # to what GPU 0 has
- 5 from 1 to 0, added raw  # GPU 1's own contribution
- 6 from 1 to 0:1           # a partial sum that GPU 0 keeps beside its own
- 6 from 0:1 to 0, added    # and adds to its own
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field

from dse import plugins
from dse.errors import ConfigError, Problem, Problems
from dse.errors.parsing import parse_yaml
from dse.files import read_text
from dse.values import Frozen
from dse_collectives.explicit import (
    Collective,
    CollectiveSchedule,
    DataChunk,
    Message,
    check_schedule,
    end_text,
    is_collective,
)
from dse_collectives.msccl import schedule_of_xml, xml_of
from dse_collectives.of_steps import StepMove, collective_of_steps
from dse_collectives.topology import MOST_GPUS
from simulators.hardware.network import Node

_FAMILY = "synthesised"
"""Schedules step by step, which the plug-in `synthesis` brings."""
_MOST_BYTES = 64 << 20  # 64 MiB
_CHUNK = re.compile(r"block (\d{1,6})(?:-(\d{1,6}))? \[(\d{1,9}), (\d{1,9})\)")
_END = r"(\d{1,6})(?::(\d{1,6}))?"
_MESSAGE = re.compile(rf"(\d{{1,9}}(?:,\d{{1,9}})*) from {_END} to {_END}(, added)?( raw)?")


class ScheduleText(Frozen):
    """Content of the YAML of a schedule."""

    name: Annotated[str, Field(max_length=200)]
    collective: Collective
    num_gpus: Annotated[int, Field(ge=2, le=MOST_GPUS)]
    units: Annotated[int, Field(ge=1, le=10**9)]
    chunks: tuple[str, ...]
    messages: tuple[str, ...]


def yaml_of(schedule: CollectiveSchedule) -> str:
    """A schedule as YAML, one line for each chunk and message."""
    head = {name: getattr(schedule, name) for name in ("name", "collective", "num_gpus", "units")}
    lines = ["chunks:", *(f"- {chunk}" for chunk in schedule.chunks), "messages:"]
    lines += [f"- {_text(message)}" for message in schedule.messages]
    return yaml.safe_dump(head, sort_keys=False, allow_unicode=True) + "\n".join(lines) + "\n"


def _text(message: Message) -> str:
    chunks = ",".join(map(str, message.chunks))
    way = (", added" if message.reduces else "") + (" raw" if message.raw else "")
    ends = end_text(message.source, message.source_slot), end_text(message.target, message.target_slot)
    return f"{chunks} from {ends[0]} to {ends[1]}{way}"


def read_schedule(path: Path, node: Node | None = None, pattern: str | None = None) -> CollectiveSchedule:
    """The schedule of a YAML or MSCCL XML file, proven; of steps of an overlap schedule, their moves.

    node, pattern: the GPUs whose data steps move, and how. Raises ConfigError with the chunk that is lost or doubled.
    """
    text = read_text(path, "schedule", most=_MOST_BYTES, way_out="name the YAML or XML file of a schedule")
    # by its content: names of files end in anything
    if text.lstrip().startswith("<"):
        return _proven(schedule_of_xml(text, path.name), path.name)
    tree = _tree(text)
    if rule := _foreign(tree):
        way = "name an XML of MSCCL, or the YAML of a schedule that `dse machine collective` writes"
        raise ConfigError([Problem("schedule", rule, str(path), way)])
    # an overlap schedule: the moves among its steps are taken
    if isinstance(tree, dict) and "steps" in tree:
        return _schedule_of_steps(tree, node, pattern)
    return _proven(_schedule_of_tree(tree), path.name)


def _foreign(tree: Any) -> str:
    """What a file of another program is, which is not read; "" for a schedule."""
    gpus = tree.get("gpus") if isinstance(tree, dict) else None
    if isinstance(gpus, list) and any(isinstance(gpu, dict) and _MSCCLPP & set(gpu) for gpu in gpus):
        return "is an execution plan of MSCCL++, which is not read"
    return ""


_MSCCLPP = {"threadblocks", "input_chunks", "output_chunks", "scratch_chunks", "inputChunks", "outputChunks"}
"""Keys of a GPU of an execution plan of MSCCL++ (microsoft/mscclpp, test/execution-files)."""


def _proven(schedule: CollectiveSchedule, source: str) -> CollectiveSchedule:
    """A schedule that moves every byte to where it belongs. Raises ConfigError, with the file and a way out."""
    try:
        return check_schedule(schedule)
    except ConfigError as error:
        raise ConfigError([replace(problem, value=source, way_out=_MEND) for problem in error.problems]) from None


_MEND = "mend the messages of that chunk, or start from a schedule that `dse machine collective` writes"


def _schedule_of_steps(tree: dict[str, Any], node: Node | None, pattern: str | None) -> CollectiveSchedule:
    """The moves among the steps of a file of the `schedule` group."""
    check = Problems()
    kind = plugins.load("schedule", _FAMILY)
    plan: Any = check.model(kind, {"name": "steps", "family": _FAMILY, **tree}, path="schedule")
    if node is None or node.topology is None or pattern is None or not is_collective(pattern):
        check.add("pattern", "is missing: which collective the steps are of", way_out="write pattern=all_gather")
    else:
        check.done("schedule")
        assert plan is not None
        moves = [StepMove(step.move, step.peers) for step in plan.steps if step.move is not None]
        return collective_of_steps(pattern, node.num_gpus, node.topology, plan.cuts, moves)
    raise ConfigError(check.found)


def schedule_of_yaml(text: str) -> CollectiveSchedule:
    """The schedule that a YAML text says, not proven. Raises ConfigError."""
    return _schedule_of_tree(_tree(text))


def _schedule_of_tree(tree: Any) -> CollectiveSchedule:
    check = Problems()
    read = check.model(ScheduleText, tree, path="schedule")
    check.done("schedule")
    assert read is not None
    chunks, messages = list(_chunks(read, check)), list(_messages(read, check))
    check.done("schedule")
    return CollectiveSchedule(read.name, read.collective, read.num_gpus, read.units, tuple(chunks), tuple(messages))


def _tree(text: str) -> Any:
    return parse_yaml(text, "schedule")


def _chunks(read: ScheduleText, check: Problems) -> Iterator[DataChunk]:
    for place, text in enumerate(read.chunks):
        match = _CHUNK.fullmatch(text)
        if match is None:
            check.add(f"schedule.chunks.{place}", "is no chunk", value=text, way_out="write block 0 [0, 1)")
        else:
            block, part, start, end = match.groups()
            size = int(end) - int(start)
            yield DataChunk(int(block), int(start), size, -1 if part is None else int(part))


def _messages(read: ScheduleText, check: Problems) -> Iterator[Message]:
    for place, text in enumerate(read.messages):
        match = _MESSAGE.fullmatch(text)
        if match is None:
            check.add(f"schedule.messages.{place}", "is no message", value=text, way_out="write 0 from 0 to 1, added")
        else:
            chunks = tuple(map(int, match[1].split(",")))
            source, of, target, to = (int(number or 0) for number in match.groups()[1:5])
            yield Message(source, target, chunks, match[6] is not None, match[7] is not None, of, to)


@dataclass(frozen=True)
class Msccl:
    """Files of schedules, for plug-ins that know them by the name of their format."""

    def settings(self, path: Path) -> str:
        """A schedule as XML of MSCCL. Raises ConfigError."""
        return xml_of(read_schedule(path))

    def plan(self, path: Path) -> str:
        """A schedule as YAML. Raises ConfigError."""
        return yaml_of(read_schedule(path))


MSCCL = Msccl()
