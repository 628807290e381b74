"""Workloads: operators with FLOP, bytes and arithmetic intensity, and the order between them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from dse.config.options import conf_dir
from dse.errors import ConfigError, Problem, Problems, did_you_mean, repeated
from dse.files import read_csv
from dse.values import Frozen, knob
from dse.values.units import Bytes, Integer, Number
from simulators.hardware.network import Pattern
from simulators.hardware.parts import ELEMENT_BYTES

Precision = Literal["bf16", "fp16", "fp32", "fp8"]
Size = Annotated[Integer, Field(ge=1, le=2**31)]


_COLS = 512  # columns of a payload given in bytes
_MOST_BYTES = 1 << 20  # largest list of shapes
_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,99}")
_DECIMAL = re.compile(r"-?[0-9]{1,99}\.[0-9]{1,99}")


class Gemm(Frozen):
    """C[m, n] = A[m, k] B[k, n]; `shards` GPUs share it (tensor parallelism).

    split: the GPUs divide the global n (column-parallel: A is gathered before), or the global k (row-parallel: each GPU
    has partial sums of all of C, which are reduced after).
    """

    kind: Literal["gemm"] = "gemm"
    m: Size
    n: Size
    k: Size
    shards: Annotated[Integer, knob(structural=True, ge=1, le=2**31)] = 1
    split: Literal["n", "k"] = "n"
    precision: Precision = "bf16"
    after: tuple[str, ...] = ()

    @property
    def element_bytes(self) -> float:
        """Bytes of one element."""
        return ELEMENT_BYTES[self.precision]

    @property
    def local_n(self) -> float:
        """Columns of C that this GPU computes."""
        return -(-self.n // self.shards) if self.split == "n" else self.n

    @property
    def local_k(self) -> float:
        """Depth that this GPU sums over."""
        return self.k if self.split == "n" else -(-self.k // self.shards)

    @property
    def flop(self) -> float:
        """FLOP of this GPU's part: 2 m n k."""
        return 2.0 * self.m * self.local_n * self.local_k

    @property
    def out_bytes(self) -> float:
        """Size of C [bytes]."""
        return 1.0 * self.element_bytes * self.m * self.local_n

    @property
    def bytes(self) -> float:
        """Compulsory traffic: read A and B, write C [bytes]."""
        m, n, k = 1.0 * self.m, 1.0 * self.local_n, 1.0 * self.local_k
        return self.element_bytes * (m * k + k * n) + self.out_bytes


class Collective(Frozen):
    """A tensor of rows x cols elements of which every GPU exchanges 1/num_gpus with each peer.

    all_gather: every GPU starts with a part of the tensor and ends with all of it. all_to_all: likewise, but a GPU
    sends different rows to each peer. reduce_scatter: every GPU starts with a summand of the tensor and ends with a
    part of the sum. all_reduce: a reduce_scatter, then an all_gather.
    """

    kind: Literal["collective"] = "collective"
    pattern: Pattern
    rows: Size
    cols: Size
    precision: Precision = "bf16"
    after: tuple[str, ...] = ()

    @property
    def payload_bytes(self) -> float:
        """Size of the full tensor [bytes]."""
        return 1.0 * self.element_bytes * self.rows * self.cols

    @property
    def element_bytes(self) -> float:
        """Bytes of one element."""
        return ELEMENT_BYTES[self.precision]

    @property
    def reduces(self) -> bool:
        """True if the collective adds, which takes CUs."""
        return self.pattern in {"reduce_scatter", "all_reduce"}


class Embedding(Frozen):
    """Rows of tables gathered and added up: `rows` samples x `tables` outputs of `dim` elements, `pooling` rows each.

    update: the backward pass instead, which reads each gradient, and reads and writes its rows.
    """

    kind: Literal["embedding"] = "embedding"
    rows: Size
    tables: Size = 1
    dim: Size
    pooling: Size
    update: bool = False
    precision: Precision = "fp16"
    after: tuple[str, ...] = ()

    @property
    def out_bytes(self) -> float:
        """Pooled outputs (or their gradients) [bytes]."""
        return 1.0 * ELEMENT_BYTES[self.precision] * self.rows * self.tables * self.dim

    @property
    def bytes(self) -> float:
        """HBM traffic [bytes]: (P + 1) out_bytes, P rows read and their sum written; (2 P + 1) out_bytes if update."""
        return (1.0 + (2 if self.update else 1) * self.pooling) * self.out_bytes

    @property
    def flop(self) -> float:
        """FLOP: an addition for each element of each row."""
        return 1.0 * self.pooling * self.rows * self.tables * self.dim


class Gemv(Frozen):
    """C[n, m] = W[n, k] X[k, m] for few tokens m: a decode step, bound by reading the weights of this GPU."""

    kind: Literal["gemv"] = "gemv"
    n: Size
    k: Size
    m: Size = 1
    precision: Precision = "fp16"
    after: tuple[str, ...] = ()

    @property
    def out_bytes(self) -> float:
        """Size of C [bytes]."""
        return 1.0 * ELEMENT_BYTES[self.precision] * self.n * self.m

    @property
    def bytes(self) -> float:
        """HBM traffic [bytes]: read W and X, write C."""
        read = 1.0 * self.n * self.k + 1.0 * self.m * self.k
        return ELEMENT_BYTES[self.precision] * read + self.out_bytes

    @property
    def flop(self) -> float:
        """FLOP: 2 m n k."""
        return 2.0 * self.m * self.n * self.k


class Mlp(Frozen):
    """`layers` square GEMMs of `rows` x `width` x `width`, one after another; backward passes count as two of each."""

    kind: Literal["mlp"] = "mlp"
    rows: Size
    width: Size
    layers: Size
    backward: bool = False
    precision: Precision = "fp16"
    after: tuple[str, ...] = ()

    @property
    def num_gemms(self) -> float:
        """Number of GEMMs, which is that of kernels."""
        return (2 if self.backward else 1) * self.layers

    @property
    def flop(self) -> float:
        """FLOP: 2 rows width^2 of each GEMM."""
        return 2.0 * self.num_gemms * self.rows * self.width * self.width

    @property
    def bytes(self) -> float:
        """Compulsory traffic: read both inputs and write the output of each GEMM [bytes]."""
        elements = 2.0 * self.rows * self.width + 1.0 * self.width * self.width
        return ELEMENT_BYTES[self.precision] * self.num_gemms * elements


class Elementwise(Frozen):
    """Element-wise kernel over tensors of rows x cols: activations, norms, an optimizer's update.

    reads, writes: numbers of tensors. flop_per_element: operations for each element.
    """

    kind: Literal["elementwise"] = "elementwise"
    rows: Size
    cols: Size
    reads: Annotated[Integer, Field(ge=1, le=64)] = 2
    writes: Annotated[Integer, Field(ge=1, le=64)] = 1
    flop_per_element: Annotated[Number, Field(ge=0, le=1e3)] = 1.0
    precision: Precision = "bf16"
    after: tuple[str, ...] = ()

    @property
    def tensor_bytes(self) -> float:
        """Size of one tensor [bytes]."""
        return 1.0 * ELEMENT_BYTES[self.precision] * self.rows * self.cols

    @property
    def bytes(self) -> float:
        """HBM traffic: every tensor once [bytes]."""
        return (self.reads + self.writes) * self.tensor_bytes

    @property
    def flop(self) -> float:
        """Operations on all elements."""
        return 1.0 * self.flop_per_element * self.rows * self.cols


Compute = Gemm | Embedding | Gemv | Mlp | Elementwise
Order = Literal["before", "after", "beside"]


@dataclass(frozen=True)
class Overlap:
    """One collective and one GEMM.

    order: the collective comes `before` the GEMM, which consumes its output, `after` it, or `beside` it, if neither
    waits for the other.
    """

    collective: Collective
    gemm: Gemm
    order: Order


Operator = Annotated[Gemm | Collective | Embedding | Gemv | Mlp | Elementwise, Field(discriminator="kind")]


class Workload(Frozen):
    """A DAG of operators; `after` of an operator names its predecessors."""

    name: str
    operators: Mapping[str, Operator]

    def overlap(self) -> Overlap:
        """Return the only collective and the only GEMM of the workload. Raises ConfigError for any other workload."""
        gemms = {name: op for name, op in self.operators.items() if isinstance(op, Gemm)}
        collectives = {name: op for name, op in self.operators.items() if isinstance(op, Collective)}
        if len(gemms) == len(collectives) == 1 and len(self.operators) == 2:
            (gemm_name, gemm), (transfer_name, collective) = next(iter(gemms.items())), next(iter(collectives.items()))
            orders: dict[tuple[tuple[str, ...], tuple[str, ...]], Order] = {
                ((transfer_name,), ()): "before",
                ((), (gemm_name,)): "after",
                ((), ()): "beside",
            }
            order = orders.get((gemm.after, collective.after))
            if order:
                return Overlap(collective, gemm, order)
        rule = "schedules overlap exactly one collective with one GEMM: before, after or during it"
        raise ConfigError([Problem("workload.operators", rule, value=", ".join(self.operators))])


class Shape(Frozen):
    """One GEMM of a shape list. `shards` (GPUs that share it) and `pattern` default to the list's.

    payload_bytes: size of an unrelated collective during the GEMM; None if the collective moves the GEMM's input (or
    reduces its output). load: rows of the busiest GPU over the mean, if an all-to-all spreads tokens unevenly over
    experts; the busiest GPU, which ends last, is simulated.
    """

    name: Annotated[str, Field(min_length=1, max_length=60, pattern=r"^[A-Za-z0-9._+-]+$")]
    m: Size
    n: Size
    k: Size
    shards: Size | None = None
    pattern: Pattern | None = None
    payload_bytes: Annotated[Bytes, Field(ge=1024)] | None = None
    load: Annotated[Number, Field(ge=1, le=64)] = 1.0
    note: str = ""


class ShapeList(Frozen):
    """The `workload` group of a configuration: named GEMM shapes, each with a collective.

    pattern: all_gather and all_to_all move the input A before the GEMM, and `shards` GPUs share its n; reduce_scatter
    sums the output C after the GEMM, and the GPUs share its k. shapes: a list, or the path of a CSV file with columns
    name,m,n,k and optionally shards,pattern,payload_bytes,load,note; a path that leads nowhere is one in the shipped
    configuration. shards: None for all GPUs of the node.
    """

    name: str
    description: str = ""
    shapes: tuple[Shape, ...] | str
    only: tuple[str, ...] = ()
    shards: Size | None = None
    pattern: Pattern
    precision: Precision = "bf16"
    source: str = ""

    @property
    def listed(self) -> tuple[Shape, ...]:
        """The shapes, of a file if there is one. Raises ConfigError for a bad CSV."""
        return read_shapes(_shipped_if_absent(Path(self.shapes))) if isinstance(self.shapes, str) else self.shapes

    def workloads(self) -> dict[str, dict[str, Any]]:
        """Workload trees by shape name, in order. Raises ConfigError for a bad CSV or an unknown name in `only`."""
        check, shapes = Problems(), self.listed
        names = [shape.name for shape in shapes]
        if not shapes:
            check.add("workload.shapes", "names no shape", way_out="list some, or name a CSV file")
        for name in repeated(names):
            check.add("workload.shapes", "names a shape twice", value=name, way_out="rename one of them")
        for name in set(self.only) - set(names):
            check.add("workload.only", "names no shape of the list", value=name, way_out=did_you_mean(name, names))
        for shape in shapes:
            if shape.load != 1 and (shape.pattern or self.pattern) != "all_to_all":
                path, rule = f"workload.shapes.{shape.name}.load", "is of the rows that an all-to-all sends a GPU"
                check.add(path, rule, value=shape.load, way_out="add pattern: all_to_all, or leave it out")
        check.done()
        return {shape.name: self._tree(shape) for shape in shapes if not self.only or shape.name in self.only}

    def _tree(self, shape: Shape) -> dict[str, Any]:
        pattern, m = shape.pattern or self.pattern, round(shape.m * shape.load)
        reduces = pattern in {"reduce_scatter", "all_reduce"}
        rows, cols = (m, shape.n) if reduces else (m, shape.k)
        if shape.payload_bytes is not None:
            rows, cols = round(shape.payload_bytes / (_COLS * ELEMENT_BYTES[self.precision])), _COLS
        alone = shape.payload_bytes is not None
        after = reduces and not alone
        collective: dict[str, Any] = {"kind": "collective", "pattern": pattern, "rows": rows, "cols": cols}
        collective |= {"precision": self.precision, "after": ["gemm"] if after else []}
        gemm: dict[str, Any] = {"kind": "gemm", "m": m, "n": shape.n, "k": shape.k, "split": "k" if after else "n"}
        gemm |= {"shards": shape.shards or self.shards, "precision": self.precision}
        gemm["after"] = [] if after or alone else ["gather"]
        return {"name": shape.name, "operators": {"gather": collective, "gemm": gemm}}


class Dag(Frozen):
    """One explicit workload: operators by name, whose `after` names their predecessors."""

    name: Annotated[str, Field(min_length=1, max_length=60, pattern=r"^[A-Za-z0-9._+-]+$")]
    operators: Mapping[str, Operator] = Field(min_length=1)
    note: str = ""


class DagList(Frozen):
    """The `workload` group of a configuration in its second form: explicit operators, instead of a `ShapeList`."""

    name: str
    description: str = ""
    workloads: tuple[Dag, ...] = Field(min_length=1)
    only: tuple[str, ...] = ()
    source: str = ""

    def trees(self) -> dict[str, dict[str, Any]]:
        """Workload trees by name, in order. Raises ConfigError for a name that comes twice, or is unknown in `only`."""
        check, names = Problems(), [workload.name for workload in self.workloads]
        for name in repeated(names):
            check.add("workload.workloads", "names a workload twice", value=name, way_out="rename one of them")
        for name in set(self.only) - set(names):
            check.add("workload.only", "names no workload of the list", value=name, way_out=did_you_mean(name, names))
        check.done()
        selected = [workload for workload in self.workloads if not self.only or workload.name in self.only]
        return {workload.name: workload.model_dump(mode="json", exclude={"note"}) for workload in selected}


class QueuedGemms(Frozen):
    """GEMMs of one shape, `copies` of them."""

    m: Size
    n: Size
    k: Size
    copies: Annotated[Integer, Field(ge=1, le=64)] = 1


class Queue(Frozen):
    """Independent GEMMs in the order in which they are queued: one of each shape in turn."""

    name: Annotated[str, Field(min_length=1, max_length=60, pattern=r"^[A-Za-z0-9._+-]+$")]
    gemms: tuple[QueuedGemms, ...] = Field(min_length=1)
    note: str = ""


class QueueList(Frozen):
    """The `workload` group of a configuration in its third form: queues of independent GEMMs on one GPU."""

    name: str
    description: str = ""
    queues: tuple[Queue, ...] = Field(min_length=1)
    only: tuple[str, ...] = ()
    precision: Precision = "fp16"
    source: str = ""

    def trees(self) -> dict[str, dict[str, Any]]:
        """Workload trees by name, in order. Raises ConfigError for a name that comes twice, or is unknown in `only`."""
        dags = tuple(Dag(name=queue.name, operators=self._operators(queue), note=queue.note) for queue in self.queues)
        return DagList(name=self.name, workloads=dags, only=self.only).trees()

    def _operators(self, queue: Queue) -> dict[str, Gemm]:
        turns = [(turn, place) for place, gemm in enumerate(queue.gemms) for turn in range(gemm.copies)]
        operators = {}
        for number, (_, place) in enumerate(sorted(turns)):
            gemm = queue.gemms[place]
            operators[f"g{number:02d}"] = Gemm(m=gemm.m, n=gemm.n, k=gemm.k, precision=self.precision)
        return operators


def workloads_of(check: Problems, tree: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Workload trees by name of the `workload` group in any of its forms; {} if `check` has noted problems."""
    try:
        if "queues" in tree:
            queues = check.model(QueueList, tree, path="workload")
            return queues.trees() if queues else {}
        if "workloads" in tree:
            dags = check.model(DagList, tree, path="workload")
            return dags.trees() if dags else {}
        shapes = check.model(ShapeList, tree, path="workload")
        return shapes.workloads() if shapes else {}
    except ConfigError as error:
        check.found.extend(error.problems)
        return {}


_WAY_OUT, _SIZES = "name a CSV of GEMM shapes", ("m", "n", "k")


def _shipped_if_absent(path: Path) -> Path:
    shipped = conf_dir() / path
    return shipped if shipped.is_file() and not path.exists() else path


def read_shapes(path: Path) -> tuple[Shape, ...]:
    """GEMM shapes of a CSV file (columns m,n,k[,name,shards,pattern,payload_bytes,load,note]), by default named mxnxk.

    Raises ConfigError naming file, row and column of everything wrong.
    """
    check = Problems()
    table = read_csv(path, "workload.shapes", needed=_SIZES, most=_MOST_BYTES, way_out=_WAY_OUT)
    if not table.rows:
        raise ConfigError([Problem("workload.shapes", "holds no row below a header", value=str(path))])
    shapes = [check.model(Shape, _cells(cells), path=f"{path.name}, line {line}") for line, cells in table.rows]
    check.done(path.name)
    return tuple(shape for shape in shapes if shape is not None)


def _cells(cells: Mapping[str, str]) -> dict[str, Any]:
    """Convert CSV cells: a blank is absent, digits are integers, a load may have decimals, any other cell is text."""
    texts = ("name", "pattern", "note", "payload_bytes")
    read: dict[str, Any] = {key: value for key, value in cells.items() if value}
    integers = {key: int(value) for key, value in read.items() if key not in texts and _INTEGER.fullmatch(value)}
    decimal = {key: float(value) for key, value in read.items() if key == "load" and _DECIMAL.fullmatch(value)}
    return {"name": "x".join(cells[size] for size in _SIZES), **read, **integers, **decimal}
