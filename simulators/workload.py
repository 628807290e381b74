"""The work: operators with FLOP, bytes and arithmetic intensity, and the order between them."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from dse.problems import ConfigError, Problem, Problems, did_you_mean
from dse.values import Frozen, Integer

ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8": 1}
Precision = Literal["bf16", "fp16", "fp32", "fp8"]
Size = Annotated[Integer, Field(ge=1, le=2**31)]


_WHOLE = re.compile(r"0|-?[1-9][0-9]{0,99}")


class Gemm(Frozen):
    """C[m, n] = A[m, k] B[k, n] on one GPU; the global n is split over `shards` GPUs (tensor parallelism)."""

    kind: Literal["gemm"] = "gemm"
    m: Size
    n: Size
    k: Size
    shards: Size = 1
    precision: Precision = "bf16"
    after: tuple[str, ...] = ()

    @property
    def element_bytes(self) -> int:
        """Bytes of one element."""
        return ELEMENT_BYTES[self.precision]

    @property
    def local_n(self) -> float:
        """Columns of C this GPU computes."""
        return -(-self.n // self.shards)

    @property
    def flop(self) -> float:
        """2 m n k of this GPU's part."""
        return 2.0 * self.m * self.local_n * self.k

    @property
    def bytes(self) -> float:
        """Compulsory traffic: read A and B, write C [bytes]."""
        return self.element_bytes * (1.0 * self.m * self.k + 1.0 * self.k * self.local_n + 1.0 * self.m * self.local_n)

    @property
    def arithmetic_intensity(self) -> float:
        """FLOP per byte of compulsory traffic."""
        return self.flop / self.bytes


class Collective(Frozen):
    """Every GPU ends with a tensor of rows x cols elements, 1/num_gpus of which each peer holds at the start.

    all_gather: peers send everyone the same shard. all_to_all: peers send everyone different rows.
    """

    kind: Literal["collective"] = "collective"
    pattern: Literal["all_gather", "all_to_all"]
    rows: Size
    cols: Size
    precision: Precision = "bf16"
    after: tuple[str, ...] = ()

    @property
    def payload_bytes(self) -> float:
        """The whole tensor as every GPU holds it in the end [bytes]."""
        return 1.0 * ELEMENT_BYTES[self.precision] * self.rows * self.cols


Operator = Annotated[Gemm | Collective, Field(discriminator="kind")]


class Workload(Frozen):
    """A DAG of operators; `after` of an operator names those it waits for."""

    name: str
    operators: Mapping[str, Operator]

    def collective_then_gemm(self) -> tuple[Collective, Gemm]:
        """The one collective and the one GEMM that consumes it. Raises ConfigError for any other workload."""
        gemms = [op for op in self.operators.values() if isinstance(op, Gemm)]
        feeding = [self.operators.get(name) for op in gemms for name in op.after]
        if len(self.operators) == 2 and len(gemms) == 1 and len(feeding) == 1 and isinstance(feeding[0], Collective):
            return feeding[0], gemms[0]
        rule = "this schedule overlaps exactly one collective with the one GEMM that consumes it"
        raise ConfigError([Problem("workload.operators", rule, value=", ".join(self.operators))])


class Shape(Frozen):
    """One GEMM of a shape list. `shards` (GPUs that share n) and `pattern` default to the list's."""

    name: Annotated[str, Field(min_length=1, max_length=60, pattern=r"^[A-Za-z0-9._+-]+$")]
    m: Size
    n: Size
    k: Size
    shards: Size | None = None
    pattern: Literal["all_gather", "all_to_all"] | None = None
    note: str = ""


class ShapeList(Frozen):
    """The `workload` group of a configuration: named GEMM shapes whose input A is moved by a collective.

    shapes: a list, or the path of a CSV file with columns name,m,n,k and optionally shards,pattern,note.
    shards: GPUs that share n; None for all of the node.
    """

    name: str
    description: str = ""
    shapes: tuple[Shape, ...] | str
    only: tuple[str, ...] = ()
    shards: Size | None = None
    pattern: Literal["all_gather", "all_to_all"]
    precision: Precision = "bf16"
    source: str = ""

    def workloads(self) -> dict[str, dict[str, Any]]:
        """Workload trees by shape name, in order. Raises ConfigError for a bad CSV or an unknown name in `only`."""
        shapes = read_shapes(Path(self.shapes)) if isinstance(self.shapes, str) else self.shapes
        check = Problems()
        names = [shape.name for shape in shapes]
        if not shapes:
            check.add("workload.shapes", "names no shape", way_out="list some, or name a CSV file")
        for name in {name for name in names if names.count(name) > 1}:
            check.add("workload.shapes", "names a shape twice", value=name, way_out="rename one of them")
        for name in set(self.only) - set(names):
            check.add("workload.only", "names no shape of the list", value=name, way_out=did_you_mean(name, names))
        check.done()
        return {shape.name: self._tree(shape) for shape in shapes if not self.only or shape.name in self.only}

    def _tree(self, shape: Shape) -> dict[str, Any]:
        moved = {
            "kind": "collective",
            "pattern": shape.pattern or self.pattern,
            "rows": shape.m,
            "cols": shape.k,
            "precision": self.precision,
        }
        gemm = {
            "kind": "gemm",
            **{"m": shape.m, "n": shape.n, "k": shape.k},
            "shards": shape.shards or self.shards,
            "precision": self.precision,
            "after": ["gather"],
        }
        return {"name": shape.name, "operators": {"gather": moved, "gemm": gemm}}


def read_shapes(path: Path) -> tuple[Shape, ...]:
    """GEMM shapes of a CSV file (columns name,m,n,k[,shards,pattern,note]).

    Raises ConfigError naming file, row and column of everything wrong.
    """
    check = Problems()
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([Problem("workload.shapes", f"cannot be read: {error}", value=str(path))]) from error
    reader = csv.DictReader(text.splitlines())
    try:
        rows = [(reader.line_num, row) for row in reader]
    except csv.Error as error:
        raise ConfigError([Problem(f"{path}:{reader.line_num}", f"is not CSV: {error}")]) from error
    if not rows:
        raise ConfigError([Problem("workload.shapes", "holds no row below a header", value=str(path))])
    header = list(reader.fieldnames or ())
    for name in {name for name in header if header.count(name) > 1}:
        check.add(f"{path}:1", "names a column twice", value=name, way_out="remove one of them")
    shapes = [check.model(Shape, _cells(row), path=f"{path}:{line}") for line, row in rows]
    check.done()
    return tuple(shape for shape in shapes if shape is not None)


def _cells(row: Mapping[str | None, str | None]) -> dict[str, Any]:
    """CSV cells as values: blank means absent, digits are whole numbers, the rest stays text."""
    cells = {str(key or "surplus cell").strip(): (value or "") for key, value in row.items() if value}
    trimmed = {key: (value if isinstance(value, str) else ",".join(value)).strip() for key, value in cells.items()}
    texts = ("name", "pattern", "note")
    return {
        key: int(value) if key not in texts and _WHOLE.fullmatch(value) else value
        for key, value in trimmed.items()
        if value
    }
