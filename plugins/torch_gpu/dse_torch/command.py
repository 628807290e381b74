"""The command `judge`: what is predicted of a GPU held against what it measures of itself.

python -m dse judge [system=h100_8] [out=my_gpu] [minutes=8] [tables=gemms,beside]    on a machine with a GPU
python -m dse judge data=<folder>                                            tables that were measured elsewhere
python -m dse judge operators=<folder of `emit`> [out=my_gpu]                emitted operators, on what is there
"""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from dse import plots
from dse.errors import ConfigError, Problem, Problems, did_you_mean, pairs
from dse.errors.parsing import parse_json, whole_number
from dse.files import atomic_replacement
from dse.plugins import safe_imports
from dse.results.run_folder import CommandAnswer, Outputs, writable
from dse.space import set_path
from dse_torch.kernels import Absent, Machine
from dse_torch.tables import TABLES, MeasuredGpu, measured_gpus
from dse_torch.verdict import Sections, judge_tables, measured_constants, slowdowns
from simulators.hardware.machine import tree_of

if TYPE_CHECKING:
    from rich.table import Table

RECORD = "verdict"
_OPERATORS = ("gather_gemm", "gemm_reduce")
# emitted files are read, not imported: they need a process of their own for each rank
_RANKS = re.compile(r"^RANKS = (\d+)$", re.MULTILINE)
_MESSAGES = re.compile(r'^    \("send", ', re.MULTILINE)
_SHOWN = ("GEMMs alone", "GEMMs and other work at once", "Constants")  # all sections are in the record
_MOST_S = 300  # of one operator: a hang ends with it
_WAYS = {"data": ("out",), "operators": ("out",), "": ("out", "system", "tables", "minutes")}
"""Word that says what is judged -> the words read with it."""


def judge(words: Sequence[str]) -> CommandAnswer:
    """`judge [data=<folder> | operators=<folder>] [system=] [out=] [minutes=] [tables=]`; see its help.

    Raises ConfigError where there is no GPU, and for words that would not be read.
    """
    # without `data` or `operators` this machine is measured
    way = next((name for name in _WAYS if name and any(word.startswith(f"{name}=") for word in words)), "")
    options = pairs(words, {way: ""} if way else {}, optional=_WAYS[way])
    if way == "operators":
        return _judge_operators(Path(options["operators"]), options)
    folder = Path(options["data"]) if way else _measure(options)
    try:
        _refuse_gaps(folder)
        judged = judge_tables(folder)
    except ValueError as error:
        raise ConfigError([Problem("data", str(error), str(folder))]) from None
    outputs = writable(options.get("out", "my_gpu"))
    outputs.write_json(RECORD, judged)
    plots.save(partial(slowdowns, judged), outputs.figures, "slowdown")
    shown = [
        _table(f"{gpu}. {title}", rows)
        for gpu, sections in judged.items()
        for title, rows in sections.items()
        if title.startswith(_SHOWN)
    ]
    written = [_write_system(outputs, gpu) for gpu in measured_gpus(folder)]
    return CommandAnswer(outputs.folder, (*shown, *_verdicts(judged), *written), RECORD)


def _refuse_gaps(folder: Path) -> None:
    """Refuse tables that are not all there. Raises ConfigError, and ValueError where there is no GPU's folder."""
    check = Problems()
    for gpu in measured_gpus(folder):
        missing = [name for name in TABLES if not (gpu.folder / f"{name}.csv").is_file()]
        if missing:
            way = "measure them: the same words without tables= go on where they ended"
            check.add("data", f"lacks the tables {', '.join(missing)}", value=str(gpu.folder), way_out=way)
    check.done()


def _measure(options: Mapping[str, str]) -> Path:
    """Measure the tables of the GPU of this machine; their folder. Raises ConfigError."""
    if not _num_gpus():
        way = "measure where one is, by `python -m dse_judge --out <folder>` (torch alone); then judge data=<folder>"
        raise ConfigError([Problem("judge", "needs a GPU that PyTorch sees", way_out=way)])
    # imports torch: only where a GPU was found
    main: Any = importlib.import_module("dse_judge.__main__")
    check, names = Problems(), options["tables"].split(",") if "tables" in options else TABLES
    for name in names:
        if name not in TABLES:
            check.add("tables", "is no table", value=name, way_out=did_you_mean(name, TABLES))
    if not whole_number(minutes := options.get("minutes", "8")):
        check.add("minutes", "must be a whole number above 0", value=minutes, way_out="write minutes=8")
    if "system" not in options:
        check.add("system", "is needed: it is what predicts", way_out="write system=h100_8 (`dse systems` lists them)")
    check.done()
    tree_of(options["system"])  # refused before minutes are spent
    folder = writable(options.get("out", "my_gpu")).folder / "tables"
    main.main(
        ["--out", str(folder), "--system", options["system"], "--seconds", str(60 * int(minutes)), "--tables", *names]
    )
    return folder


def _table(title: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    from rich.table import Table

    names = list(dict.fromkeys(name for row in rows for name in row))
    table = Table(*names, title=title)
    for row in rows:
        table.add_row(*(_cell(row.get(name)) for name in names))
    return table


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _verdicts(judged: Mapping[str, Sections]) -> Iterator[str]:
    """Yield which constants of each GPU the tables contradict."""
    for gpu, sections in judged.items():
        rows = next(rows for title, rows in sections.items() if title.startswith("Constants"))
        wrong = [row["constant"].partition(":")[0] for row in rows if row["verdict"] == "contradicted"]
        stands = f"{len(rows) - len(wrong)} of {len(rows)} constants stand"
        yield f"{gpu}: {stands}; contradicted: {', '.join(wrong) or 'none'}"


def _write_system(outputs: Outputs, gpu: MeasuredGpu) -> str:
    """Write a system whose constants are the medians of what was measured; the line on it."""
    base, name = str(gpu.tree["name"]), f"{gpu.folder.name}_measured"
    constants = dict(measured_constants(gpu))
    where = {"provenance": "measured", "source": f"median of the tables {gpu.folder.name}, by `dse judge`"}
    tree: dict[str, Any] = {"defaults": [base, "_self_"], "name": name, "gpu": {"contention": {}}}
    tree["description"] = f"{base} with what {gpu.folder.name} measured of its GPU"
    tree["sources"] = {path: dict(where) for path in constants}
    for path, value in constants.items():
        set_path(tree, path, value)
    place = outputs.folder / "system"
    place.mkdir(exist_ok=True)
    with atomic_replacement(place / f"{name}.yaml") as scratch:
        scratch.write_text(yaml.safe_dump(tree, sort_keys=False), encoding="utf-8")
    return f"system={name} --config-dir {outputs.folder}: {base} with {len(constants)} constants as measured"


def _judge_operators(folder: Path, options: Mapping[str, str]) -> CommandAnswer:
    """Run the operators of an emitted package, each with its ranks as processes."""
    files = [folder / f"{name}.py" for name in _OPERATORS if (folder / f"{name}.py").is_file()]
    if not files:
        way = "write one by `python -m dse emit`"
        raise ConfigError([Problem("operators", "is no package that `emit` wrote", str(folder), way)])
    rows = [_operator_row(file) for file in files]
    outputs: Outputs = writable(options.get("out", "my_gpu"))
    outputs.write_json("operators", {"operators": rows})
    failed = any(not row.get("equal", False) for row in rows)
    return CommandAnswer(outputs.folder, (_table(f"Operators of {folder}", rows),), "operators", 3 if failed else 0)


def _operator_row(file: Path) -> dict[str, Any]:
    """What an operator says of itself; with a reason where it did not run."""
    text = file.read_text("utf-8")
    if (match := _RANKS.search(text)) is None:
        way = "write one by `python -m dse emit`"
        raise ConfigError([Problem("operators", "has no RANKS, as what `emit` writes has", str(file), way)])
    ranks = int(match[1])
    row: dict[str, Any] = {"operator": file.stem, "ranks": ranks}
    package = file.resolve().parent
    words = [f"--nproc-per-node={ranks}", "-m", f"{package.name}.{file.stem}", "--json"]
    # operators with messages need a GPU for each rank
    words += ["--one-gpu"] if not _MESSAGES.search(text) and 0 < _num_gpus() < ranks else []
    # -P: the current folder is not importable
    command = [sys.executable, "-P", "-m", "torch.distributed.run", *words]
    try:
        with tempfile.TemporaryDirectory(prefix="dse-operators-") as place, safe_imports():
            # a folder that holds the package alone: nothing beside it is imported
            Path(place, package.name).symlink_to(package)
            environment = {**os.environ, "PYTHONPATH": place}
            done = subprocess.run(
                command, cwd=place, env=environment, capture_output=True, text=True, timeout=_MOST_S, check=False
            )
    except subprocess.TimeoutExpired:
        return {**row, "reason": f"did not end within {_MOST_S} s"}
    answers = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not answers:
        return {**row, "reason": (done.stderr.strip().splitlines() or ["no output"])[0]}
    return {**row, **parse_json(answers[-1], f"answer of {file.name}")}


def _num_gpus() -> int:
    try:
        return Machine.find("gpu", 0).count
    except Absent:
        return 0
