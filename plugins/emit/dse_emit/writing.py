"""Files of an emitted package: the operators of `dse_emit.package`, with a schedule at their top."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files

from dse import __version__
from dse.errors.texts import visible
from dse_emit.table import Table

_SHARED = ("check.py", "linear.py", "transport.py")
# marks in the files of the package: between them stands a schedule that makes the file run as it is
_SCHEDULE = re.compile(r"^# schedule\n.*?^# end of schedule\n", re.MULTILINE | re.DOTALL)
_SIZES = re.compile(r"^# sizes\n.*?^# end of sizes\n", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Sizes:
    """Sizes that the check of a package begins with: rows m of all ranks, columns n and depth k of a rank's GEMM."""

    m: int = 256
    n: int = 128
    k: int = 64


def package(table: Table, reverse: Table, sizes: Sizes, origin: str) -> Mapping[str, str]:
    """Texts of the files of a package, by name.

    reverse: table of the collective of the gradients (`REVERSED`).
    origin: where the schedule comes from, in words.
    """
    texts = {name: _text(name) for name in ("__init__.py", *_SHARED)}
    texts["check.py"] = _SIZES.sub(
        f"# sizes\nM, N, K = {sizes.m}, {sizes.n}, {sizes.k}\n# end of sizes\n", texts["check.py"]
    )
    for side in (table, reverse):
        name = operator_file(side)
        # a function as replacement: backslashes of a text would be read as references to groups
        texts[name] = _SCHEDULE.sub(lambda _, side=side: _block(side, origin), _text(name))  # type: ignore[misc]
    texts["README.md"] = _readme(table, origin)
    return texts


def operator_file(table: Table) -> str:
    """Name of the file of a table's operator."""
    return "gather_gemm.py" if table.gathers else "gemm_reduce.py"


def _text(name: str) -> str:
    return files("dse_emit").joinpath("package", name).read_text("utf-8")


def _block(table: Table, origin: str) -> str:
    """The schedule as the constants at the top of an operator."""
    cut = "rows" if table.by_rows else "depth" if table.gathers else "columns"
    # `repr` of numbers and tuples is Python that reads back as it was
    steps = "".join(f'    ("{step.what}", {dict(step.parts)!r}),\n' for step in table.steps)
    lines = [
        "# schedule",
        # an origin is text of a user: cut, so that the line keeps the length that linters allow
        f"# {_one_line(f'{table.title}: {origin}')}"[:120],
        f'PATTERN = "{table.pattern}"',
        f"RANKS = {table.ranks}",
        f'CUT = "{cut}"',
        f"CUTS = {table.cuts!r}",
        f"SCHEDULE: tuple[tuple[str, dict[Span, tuple[int, ...]]], ...] = (\n{steps})",
        "# end of schedule",
    ]
    return "\n".join(lines) + "\n"


def _one_line(text: str) -> str:
    """A text that ends no comment and no paragraph: one line without control characters."""
    return visible(" ".join(text.split()))


def _readme(table: Table, origin: str) -> str:
    operator = operator_file(table).removesuffix(".py")
    return (
        f"# {_one_line(table.title)}, {table.pattern} on {table.ranks} ranks\n\n"
        f"From {_one_line(origin)}, by dse {__version__}. Plain PyTorch; `{operator}.py` begins with its schedule.\n\n"
        f"Check it against serial execution, and time both, in the folder above this one:\n\n"
        f"```sh\ntorchrun --nproc-per-node={table.ranks} -m <this folder>.{operator}\n```\n\n"
        "`linear.py` has layers for a model, with backward passes.\n\n"
        "With a GPU for each rank it runs by NCCL and copy engines, otherwise on the CPU by gloo.\n"
    )
