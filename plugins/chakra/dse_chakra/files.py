"""Chakra execution traces (MLCommons), read and written: tasks with what they wait for, times and collectives.

A file is a stream of messages, each after its length as a varint: `GlobalMetadata`, then a `Node` for each task. Files
are read node by node. What is read of a node, and written: id, name, type, `data_deps`, `ctrl_deps`, start and duration
in whole microseconds; and of its attributes `is_cpu_op`, `num_ops`, `tensor_size`, `comm_type`, `comm_size`,
`comm_src`, `comm_dst`, `comm_tag`, `stream`, and of ours `lane`, `kind`, `start_s`, `duration_s`, `group_size`, which
give back what microseconds round away.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from dse.errors import ConfigError, Problem
from dse.files import atomic_replacement
from dse_chakra.messages import COLLECTIVES, NODE_TYPES, message
from dse_chakra.packed import DAMAGED, loss, open_packed

VERSION = "1.0.0"
"""Of the schema that is written."""
MOST_MESSAGE = 1 << 26
"""Bytes of one node."""
# 64 bits in groups of seven
_MOST_VARINT = 10  # bytes
_TYPES, _PATTERNS = dict(enumerate(NODE_TYPES)), dict(enumerate(COLLECTIVES))
_LAST_MICROSECOND = (1 << 63) - 1


@dataclass(frozen=True)
class TraceNode:
    """A task of an execution trace.

    type: of `NODE_TYPES`. data_deps, ctrl_deps: ids of the tasks that must have ended. start_s: NaN where it is not
    recorded. collective: of `COLLECTIVES`, or "". payload_bytes: `comm_size`. source, destination, tag: ranks of a
    message, and its tag. flop: `num_ops`. moved_bytes: `tensor_size`. lane, kind: what it runs on, and what it is, as
    far as the trace says so. on_host: `is_cpu_op`.
    """

    id: int
    name: str
    type: str
    seconds: float
    start_s: float = float("nan")
    data_deps: tuple[int, ...] = ()
    ctrl_deps: tuple[int, ...] = ()
    collective: str = ""
    payload_bytes: int = 0
    source: int = -1
    destination: int = -1
    tag: int = 0
    group_size: int = 0
    flop: int = 0
    moved_bytes: int = 0
    lane: str = ""
    kind: str = ""
    on_host: bool = False

    @property
    def communicates(self) -> bool:
        """True for collectives and messages."""
        return self.type.startswith("COMM_")


@dataclass(frozen=True)
class ExecutionTrace:
    """The tasks of one GPU, and where they come from. dropped: how many could not be used, by reason."""

    nodes: tuple[TraceNode, ...]
    source: str = ""
    version: str = VERSION
    dropped: Mapping[str, int] = field(default_factory=dict)


def read_chakra(path: Path) -> ExecutionTrace:
    """The execution trace that a file holds, plain or gzip. Raises ConfigError where it holds no node.

    A file that ends in the middle is used as far as it goes. Nodes of an id that was met before, and dependencies on
    nodes that are not there, are dropped and counted.
    """
    dropped, nodes, version = Counter[str](), dict[int, TraceNode](), ""
    with open_packed(path) as (file, _):
        for place, encoded in enumerate(_messages(file, dropped)):
            try:
                # the first message is of another type, without a mark of its own
                if place == 0:
                    version = str(message("GlobalMetadata").FromString(encoded).version)
                    continue
                node = _node(message("Node").FromString(encoded))
            except (ValueError, TypeError, OverflowError, KeyError, _decode_error()):
                dropped["nodes that cannot be read"] += 1
                continue
            dropped["nodes whose id was met before"] += node.id in nodes
            dropped["collectives of a type that is not known"] += _lacks_type(node)
            # the first of an id stays: dependencies name ids alone
            nodes.setdefault(node.id, node)
    if not nodes:
        way = "name an .et file of mlcommons/chakra"
        raise ConfigError([Problem("profile", "is no execution trace of Chakra: it holds no node", str(path), way)])
    linked = tuple(_linked(node, nodes, dropped) for node in nodes.values())
    return ExecutionTrace(linked, path.name, version, {reason: count for reason, count in dropped.items() if count})


def write_chakra(path: Path, trace: ExecutionTrace) -> None:
    """Write an execution trace into a file, which is replaced as a unit. Raises OSError."""
    with atomic_replacement(path) as partial, partial.open("wb") as file:
        _write(file, message("GlobalMetadata")(version=trace.version or VERSION))
        for node in trace.nodes:
            _write(file, _encode(node))


def _decode_error() -> type[Exception]:
    from google.protobuf.message import DecodeError

    error: type[Exception] = DecodeError
    return error


def _messages(file: IO[bytes], dropped: Counter[str]) -> Iterator[bytes]:
    """Yield messages until the file ends, or is damaged."""
    try:
        while (length := _varint(file)) is not None:
            if length > MOST_MESSAGE:
                dropped["the rest of a file after a node that claims to be too long"] += 1
                return
            encoded = file.read(length)
            if len(encoded) < length:
                dropped["the rest of a file that ends within a node"] += 1
                return
            yield encoded
    except DAMAGED as error:
        dropped[loss(error)] += 1


def _varint(file: IO[bytes]) -> int | None:
    """The next number; None at the end of the file. One that does not end counts as too long."""
    value = 0
    for place in range(_MOST_VARINT):
        byte = file.read(1)
        # a file may end between messages, but not within a length
        if not byte:
            return None if place == 0 else MOST_MESSAGE + 1
        value |= (byte[0] & 0x7F) << (7 * place)
        if byte[0] < 0x80:
            return value
    return MOST_MESSAGE + 1


def _write(file: IO[bytes], encoded: Any) -> None:
    # deterministic: equal traces give equal files
    data, length, head = encoded.SerializeToString(deterministic=True), encoded.ByteSize(), bytearray()
    while length >= 0x80:
        head.append(length & 0x7F | 0x80)
        length >>= 7
    file.write(bytes([*head, length]) + data)


def _linked(node: TraceNode, nodes: Mapping[int, TraceNode], dropped: Counter[str]) -> TraceNode:
    """The node with the dependencies that are there."""
    # dependencies may point forwards, so they are checked once all nodes are known
    lost = sum(before not in nodes for before in (*node.data_deps, *node.ctrl_deps))
    if not lost:
        return node
    dropped["dependencies on nodes that are not there"] += lost
    data, control = (tuple(before for before in ids if before in nodes) for ids in (node.data_deps, node.ctrl_deps))
    return TraceNode(**{**vars(node), "data_deps": data, "ctrl_deps": control})


def _node(encoded: Any) -> TraceNode:
    """A node as it was encoded. Raises KeyError, ValueError, TypeError or OverflowError for what cannot be read."""
    values = {attribute.name: _value(attribute) for attribute in encoded.attr}
    kind, stream, pattern = _TYPES[encoded.type], values.get("stream"), values.get("comm_type")
    exact, start = "duration_s" in values, encoded.start_time_micros
    seconds = float(values["duration_s"]) if exact else encoded.duration_micros * 1e-6
    if not 0 <= seconds < float("inf"):
        raise ValueError(f"node {encoded.id} takes {seconds} s")
    # protobuf does not store zeros: a start of 0 is one that was not recorded
    start_s = float(values["start_s"]) if "start_s" in values else (start * 1e-6 if start else float("nan"))
    return TraceNode(
        id=encoded.id,
        name=encoded.name,
        type=kind,
        seconds=seconds,
        start_s=start_s,
        data_deps=tuple(encoded.data_deps),
        ctrl_deps=tuple(encoded.ctrl_deps),
        collective=_PATTERNS.get(int(pattern), "") if kind == "COMM_COLL_NODE" and pattern is not None else "",
        payload_bytes=int(values.get("comm_size") or 0),
        # -1, as 0 is a rank
        source=int(values.get("comm_src", -1)),
        destination=int(values.get("comm_dst", -1)),
        tag=int(values.get("comm_tag") or 0),
        group_size=int(values.get("group_size") or 0),
        flop=int(values.get("num_ops") or 0),
        moved_bytes=int(values.get("tensor_size") or 0),
        # the lane that `write_chakra` adds, else the stream of the GPU
        lane=str(values.get("lane") or ("" if stream is None else stream)),
        kind=str(values.get("kind") or ""),
        on_host=bool(values.get("is_cpu_op", False)),
    )


def _lacks_type(node: TraceNode) -> bool:
    """True for a collective of a GPU whose type is absent or unknown; those of the host call one of the GPU."""
    return node.type == "COMM_COLL_NODE" and not node.collective and not node.on_host


def _value(attribute: Any) -> Any:
    """The value of an attribute; None for a list."""
    name = attribute.WhichOneof("value")
    return getattr(attribute, name) if name and name.endswith("_val") else None


def _encode(node: TraceNode) -> Any:
    """The message of a node. Its microseconds are those of its ends, so that roundings do not add up."""
    # NaN alone differs from itself
    begin = 0 if node.start_s != node.start_s else _microseconds(node.start_s)
    end = _microseconds(node.seconds if node.start_s != node.start_s else node.start_s + node.seconds)
    encoded = message("Node")(id=node.id, name=node.name, type=NODE_TYPES.index(node.type))
    encoded.ctrl_deps.extend(node.ctrl_deps)
    encoded.data_deps.extend(node.data_deps)
    encoded.start_time_micros, encoded.duration_micros = begin, end - begin
    for name, value in _attributes(node):
        attribute = encoded.attr.add(name=name)
        kind, _, of = name.partition(":")
        attribute.name = kind
        if of == "list":
            attribute.bool_list.values.extend(value)
        else:
            setattr(attribute, f"{of}_val", value)
    return encoded


def _attributes(node: TraceNode) -> Iterable[tuple[str, Any]]:
    """Yield `name:type` and value of each attribute that says something."""
    yield "is_cpu_op:bool", node.on_host
    if node.collective:
        yield "comm_type:int64", COLLECTIVES.index(node.collective)
    # ASTRA-sim asks which dimensions of its network take part: here one, which does
    if node.type == "COMM_COLL_NODE":
        yield "involved_dim:list", [True]
    if node.communicates or node.payload_bytes:
        yield "comm_size:int64", node.payload_bytes
    if node.type in ("COMM_SEND_NODE", "COMM_RECV_NODE"):
        yield from (("comm_src:int64", node.source), ("comm_dst:int64", node.destination), ("comm_tag:int64", node.tag))
    numbers = {"num_ops:int64": node.flop, "tensor_size:uint64": node.moved_bytes}
    texts = {"lane:string": node.lane, "kind:string": node.kind}
    yield from ((name, value) for name, value in {**numbers, **texts}.items() if value)
    if node.group_size:
        yield "group_size:int64", node.group_size
    yield "duration_s:double", node.seconds
    if node.start_s == node.start_s:
        yield "start_s:double", node.start_s


def _microseconds(seconds: float) -> int:
    return min(round(seconds * 1e6), _LAST_MICROSECOND)
