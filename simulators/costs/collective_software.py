"""Software that runs collectives (`conf/collective`): what it holds, where it exists, and what it refuses.

New software is a YAML file; it is costed by the paths that its bytes take (`simulators.costs.collective_paths`), behind
the same functions as algorithms (`simulators.costs.collective`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import Field

from dse import plugins
from dse.config.options import list_options, option_file
from dse.config.variants import load_option
from dse.errors import ConfigError, Problem, did_you_mean, validate_as
from dse.values import Frozen
from dse.values.units import Bytes, Fraction, Integer, Number, Seconds, with_prefix
from simulators.costs.algorithms import ALGORITHMS, Pattern
from simulators.hardware.machine import System
from simulators.hardware.network import Topology
from simulators.hardware.parts import Bandwidth, Duration, SourcedValue
from simulators.hardware.schedule_system import has_links

Floats = NDArray[np.float64]
PathName = Literal["library", "switch", "peers", "engines", "calls"]
GROUP = "collective"
ANY = "any"  # of a mapping by GPU or by number of GPUs: all that it does not name


class ShortMessages(Frozen):
    """A protocol for short messages. latency: share of the latency; bytes: sent for a byte; algorithm: by which."""

    latency: Annotated[Fraction, Field(gt=0)]
    bytes: Annotated[Number, Field(ge=1, le=100)]
    algorithm: str = "one_shot"


class PayloadSizes(Frozen):
    """Payloads [bytes] that software takes: from one on, up to another, or below another (None: no limit)."""

    from_bytes: Annotated[Bytes, Field(ge=0)] = 0.0
    to_bytes: Annotated[Bytes, Field(gt=0)] | None = None
    below_bytes: Annotated[Bytes, Field(gt=0)] | None = None


class WireFormat(Frozen):
    """A format on the wire. wire: its bytes over those of an element, scales included. latency_s: of a call.

    lossless_for: formats of elements that it carries as they are. takes: sizes by number of GPUs; those of the software
    where it names none.
    """

    wire: Annotated[Number, Field(gt=0, le=1)]
    latency_s: Mapping[str, Duration]
    lossless_for: tuple[str, ...] = ()
    takes: Mapping[str, PayloadSizes] = {}


class Path(Frozen):
    """Way that bytes take. algorithm: of `simulators.costs.algorithms`. from_gpus: least number of GPUs.

    ctas: that a GPU gives to it, by GPU (None: as many as its library takes); spread: of which each GPU of a group of
    n has 1 / n. bytes_per_s_per_cta: None for that of the GPU's copy kernels.
    """

    algorithm: str = "direct"
    from_gpus: Annotated[Integer, Field(ge=2, le=1024)] = 2
    ctas: Mapping[str, Annotated[Integer, Field(ge=1, le=4096)]] | None = None
    spread: bool = False
    bytes_per_s_per_cta: Bandwidth | None = None


class Messages(Frozen):
    """Messages between pairs: channels that share one, by its size.

    A message has `channels`, and more from `channel_bytes` each on, up to `most_channels`. bytes_per_s_per_channel: one
    way. both_ways: time of a byte that is sent while another arrives, over its time one way.
    """

    channels: Annotated[Integer, Field(ge=1, le=64)]
    most_channels: Annotated[Integer, Field(ge=1, le=64)]
    channel_bytes: Annotated[Bytes, Field(gt=0)]
    bytes_per_s_per_channel: Bandwidth
    both_ways: Annotated[Number, Field(ge=1, le=2)]


class CallLaw(Frozen):
    """Constants of a library as another runtime calls it on one GPU (`call_seconds`).

    launch_s: of a call, waiting of the devices for one another included. step_s: of each step. fill_s: until the
    pipeline is full, in proportion to the bytes up to fill_bytes. bytes_per_s: of a GPU among many; lost: share of it
    that n GPUs lose, over n. sums: time that the additions of a GPU take beside those of its copies, over the steps.
    """

    launch_s: Duration
    step_s: Seconds
    fill_s: Seconds
    fill_bytes: Annotated[Bytes, Field(ge=1)]
    bytes_per_s: Bandwidth
    lost: Annotated[Fraction, Field(lt=1)]
    sums: Annotated[Number, Field(ge=0, le=4)]
    messages: Messages


class CollectiveSoftware(SourcedValue):
    """Software of collectives.

    versions: of the sources that it was read from. patterns, gpus, topologies, num_gpus: that it runs (all GPU counts
    if none is named). across_nodes: whether groups may leave a node. buffers, engines: what it holds besides CTAs.
    paths: by name, from few GPUs to many. latency_s: of a call, by GPU; None: that of the path. longer: by pattern,
    factor on the latency of those with more barriers. formats: on the wire,
    the first by default. takes: sizes by number of GPUs; programs that measure it call it beyond. calls: by GPU.
    refuses: what else it does not run, in words. fitted_on: rows of measured tables, by their cells.
    """

    name: str
    description: str
    versions: str
    patterns: tuple[Pattern, ...] = Field(min_length=1)
    gpus: tuple[str, ...] = Field(min_length=1)
    topologies: tuple[Topology, ...] = Field(min_length=1)
    num_gpus: tuple[int, ...] = ()
    across_nodes: bool = False
    buffers: str
    engines: bool = False
    paths: Mapping[PathName, Path] = Field(min_length=1)
    latency_s: Mapping[str, Duration] | None = None
    longer: Mapping[Pattern, Annotated[Number, Field(ge=1, le=4)]] = {}
    short: ShortMessages | None = None
    formats: Mapping[str, WireFormat] | None = None
    takes: Mapping[str, PayloadSizes] = {}
    calls: Mapping[str, CallLaw] | None = None
    refuses: str = ""
    fitted_on: tuple[Mapping[str, Any], ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Names by which it is asked: its own, or one for each of its formats (`quick_reduce:int4`)."""
        return tuple(f"{self.name}:{key}" for key in self.formats) if self.formats else (self.name,)


@dataclass(frozen=True)
class Call:
    """A call of software. name: with the format, `quick_reduce:int4`; alone: the first one.

    num_ctas: of each GPU, where its path has CTAs (None: as many as it takes). within_sizes: whether the sizes that
    its framework takes count. both_ways: whether GPUs receive a message while they send one. changed: the software with
    other constants than those of its file; None: as they are.
    """

    name: str
    num_ctas: int | None = None
    within_sizes: bool = True
    both_ways: bool = False
    changed: CollectiveSoftware | None = None

    @property
    def software(self) -> CollectiveSoftware:
        """The software of the name. Raises ConfigError for another name."""
        return self.changed or named_software(self.name)

    @property
    def format(self) -> WireFormat | None:
        """The format on the wire; None for that of the tensor."""
        formats = self.software.formats
        return None if not formats else formats[self.name.partition(":")[2] or next(iter(formats))]

    def is_lossy_for(self, element: str) -> bool:
        """Tell whether it sends less than it is given of elements of a format: fewer bits, or another range."""
        return self.format is not None and element not in self.format.lossless_for

    def sizes(self, num_gpus: int) -> PayloadSizes:
        """Sizes that it takes among so many GPUs."""
        takes = (self.format.takes if self.format is not None else {}) or self.software.takes
        return takes.get(str(num_gpus), takes.get(ANY, PayloadSizes()))


def named_software(
    name: str, *, path: str = "implementation", others: Collection[str] = ALGORITHMS
) -> CollectiveSoftware:
    """The software of a name, which may have a format.

    path: of the name in problems. others: that it may be meant for beside software. Raises ConfigError.
    """
    own, colon, key = name.partition(":")
    software = software_of(own)
    if software is None:
        near = did_you_mean(own, [*list_options(GROUP), *others])
        raise ConfigError([Problem(path, "is no software of collectives", own, near)])
    if colon and key not in (software.formats or {}):
        formats = ", ".join(software.formats or ()) or "none"
        raise ConfigError([Problem(path, f"has no such format; {own} has {formats}", name)])
    return software


@plugins.cached_until_refresh
def software_of(name: str) -> CollectiveSoftware | None:
    """The software of a name (`conf/collective/<name>.yaml`); None for another name. Raises ConfigError."""
    if (path := option_file(GROUP, name)) is None:
        return None
    return validate_as(CollectiveSoftware, load_option(path), path=f"{GROUP}/{name}")


def all_software() -> Iterator[CollectiveSoftware]:
    """Yield all software, by name."""
    yield from filter(None, map(software_of, sorted(list_options(GROUP))))


def is_software(name: str) -> bool:
    """Tell whether a name is that of software, with or without a format."""
    return software_of(name.partition(":")[0]) is not None


# ---------------------------------------------------------------- where it exists


@dataclass(frozen=True)
class Question:
    """A collective that software may run: its payload [bytes], GPUs and nodes; arrays broadcast."""

    pattern: Pattern
    payload: Floats
    num_gpus: Floats
    num_nodes: Floats

    @classmethod
    def of(cls, pattern: Pattern, payload: ArrayLike, num_gpus: ArrayLike, num_nodes: ArrayLike = 1) -> Question:
        """Build from numbers."""
        return cls(pattern, *(np.asarray(value, float) for value in (payload, num_gpus, num_nodes)))


def refusal(call: Call, machine: System, question: Question) -> str | None:
    """Reason why software does not run a collective on a machine; None where it does.

    A GPU that `conf/gpu` does not have is not refused for its name.
    """
    return next(_refusals(call, machine, question), None)


def _refusals(call: Call, machine: System, question: Question) -> Iterator[str]:
    """Yield reasons why software does not run a collective, from what it never runs to what this machine lacks."""
    software, gpu, node = call.software, str(machine.gpu.name), machine.node
    if question.pattern not in software.patterns:
        yield f"does not run {question.pattern}; it runs {_listed(software.patterns)}"
    if gpu in list_options("gpu") and gpu not in software.gpus:
        yield f"does not run on {gpu}; it runs on {_listed(software.gpus)}"
    if node is None:
        yield "needs a node; this machine has one GPU"
        return
    if node.topology is not None and node.topology not in software.topologies:
        yield f"does not run across {node.topology}; it runs across {_listed(software.topologies)}"
    if not software.across_nodes and np.any(question.num_nodes > 1):
        yield "does not leave a node"
    if np.any(question.num_gpus > np.asarray(node.num_gpus) * question.num_nodes):
        yield f"has no more than {node.num_gpus} GPUs in a node of {machine.name}"
    counts = [int(count) for count in np.unique(question.num_gpus)]
    if software.num_gpus and (unknown := [count for count in counts if count not in (1, *software.num_gpus)]):
        yield f"does not run among {_listed(unknown)} GPUs; it runs among {_listed(software.num_gpus)}"
    yield from _lacks(software, machine, question)
    if call.within_sizes:
        yield from _size_refusals(call, question, counts)


def _lacks(software: CollectiveSoftware, machine: System, question: Question) -> Iterator[str]:
    """Yield what a machine does not have of what all paths of software need."""
    paths, gpu, laws = software.paths, machine.gpu, software.calls or {}
    if "calls" in paths and gpu.name not in laws:
        yield f"was measured on {_listed(laws)} alone"
    library = machine.node.library
    if library is None:
        yield "needs node.library: rates of collectives"
    elif library.network_bytes_per_s is None and np.any(question.num_nodes > 1):
        yield "needs a network between nodes (system.fabric)"
    if paths.keys() <= {"calls", "library"}:
        return
    if not has_links(machine) or (software.engines and gpu.dma is None):
        yield "needs gpu.cu_copy, gpu.dma and node.link_bytes_per_s"
        return
    several = question.num_gpus[question.num_gpus > 1]
    if several.size and not reached_paths(software, machine, question.pattern, float(np.min(several))):
        yield f"needs a switch that computes {question.pattern} (node.in_switch)"


def reached_paths(
    software: CollectiveSoftware, machine: System, pattern: Pattern, num_gpus: float
) -> list[tuple[PathName, Path]]:
    """Paths that a machine has and that so many GPUs reach."""
    switched_here = pattern in _switched(machine)
    paths = ((name, path) for name, path in software.paths.items() if num_gpus >= path.from_gpus)
    return [(name, path) for name, path in paths if name != "switch" or switched_here]


def _size_refusals(call: Call, question: Question, counts: list[int]) -> Iterator[str]:
    """Yield the sizes that software leaves to other software."""
    for count in counts:
        sizes, payload = call.sizes(count), question.payload
        if np.any(payload < sizes.from_bytes):
            yield f"takes no less than {with_prefix(sizes.from_bytes, 'byte')} among {count} GPUs"
        if sizes.to_bytes is not None and np.any(payload > sizes.to_bytes):
            yield f"takes no more than {with_prefix(sizes.to_bytes, 'byte')} among {count} GPUs"
        if sizes.below_bytes is not None and np.any(payload >= sizes.below_bytes):
            yield f"takes less than {with_prefix(sizes.below_bytes, 'byte')} among {count} GPUs"


def _switched(machine: System) -> tuple[str, ...]:
    switch = machine.node.switch()
    return () if switch is None else tuple(map(str, switch.collectives))


def _listed(values: Any) -> str:
    return ", ".join(map(str, values))


def existing_software(machine: System, question: Question) -> list[str]:
    """Names of software that runs a collective on a machine."""
    names = (name for software in all_software() for name in software.names)
    return [name for name in names if refusal(Call(name), machine, question) is None]


def check_exists(call: Call, machine: System, question: Question) -> None:
    """Raise ConfigError, with the software that exists, where this one does not run the collective."""
    reason = refusal(call, machine, question)
    if reason is not None:
        alternatives = existing_software(machine, question)
        way = f"here there is {_listed(alternatives)}" if alternatives else "no software is known here; take ring"
        raise ConfigError([Problem("implementation", reason, call.name, way)])
