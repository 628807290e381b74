"""Tables as other programs write them today, in the columns of the layouts that `calibrate` reads.

Told by their columns, and by the first bytes or lines of what is no CSV:

- tuned GEMMs of ROCm/aiter: M (tokens), N (out), K (in), dtype, us; the device is gfx and cu_num where they are given
- profiles of microsoft/vidur: `time_stats.<operation>.median` in ms, with num_tokens and the sizes of the model, or
  with collective, num_workers, size and devices_per_node
- Parquet of ai-dynamo/aiconfigurator, whose columns are those of its CSV
- logs of nccl-tests and rccl-tests: each size out of place and in place, by the header above them
- output of hipblaslt-bench and rocblas-bench: blocks of a header (`transA,transB,...`) and a line of values
- a time whose column names its unit (`latency_us`, `time (ms)`)
"""

from __future__ import annotations

import math
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from dse.errors import ConfigError, Problem
from dse.files import CsvTable, open_plain_file, read_csv, read_text
from dse.results.output_files import table as parquet_table

TESTS = ("device", "test", "gpus", "nodes", "bytes", "seconds")
"""Columns of collectives of nccl-tests."""
_GEMMS = ("device", "precision", "tokens", "out_features", "in_features", "us")
_LAYERS = ("device", "op", "tokens", "out_features", "in_features", "median_ms")
_MODEL = ("hidden", "heads", "kv_heads", "ffn", "gated", "tp")
_COLLECTIVES = ("device", "collective", "gpus", "devices_per_node", "bytes", "median_ms")
_KERNELS = ("device", "precision", "op", "m", "n", "k", "ta", "tb", "fwd_ms")
_HEAD_BYTES, _MOST_ROWS = 1 << 16, 2_000_000
_BENCH = re.compile(r"^\s*(?:\[\d+\]:)?\s*(transA,transB,.*)$", re.IGNORECASE | re.MULTILINE)
_TEST = re.compile(r"\b(all_reduce|all_gather|reduce_scatter|alltoall|all_to_all|[a-z]+)_perf\b")
_TEST_HEADER = re.compile(r"^#?\s+size\s+count\b.*\btime\b")
_RANK = re.compile(r"^#\s+Rank\s+\d+.*?\bon\s+(\S+)\s+device\s+\d+\s+\[[^\]]*\]\s*(.*?)\s*$")
_THREADS = re.compile(r"nThread\s+(\d+)\s+nGpus\s+(\d+)")
_UNITS_S: Mapping[str, float] = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}
_TIMED = re.compile(r"(latency|median|us|time)?[ _]?[(\[]?(ns|us|µs|ms|s)[)\]]?")
_MEDIAN = re.compile(r"time_stats\.(.+)\.median")
_TYPES = ("dtype", "gemm_dtype", "precision", "a_type")


def precision_of(text: str) -> str:
    """Name of a precision as it is here: bf16, fp16, fp32, fp8, fp8_block, or the text where none of them is meant."""
    plain = text.lower().removeprefix("torch.").removeprefix("rocblas_").removeprefix("hip_r_")
    for pattern, name in _PRECISIONS:
        if re.fullmatch(pattern, plain):
            return name
    return text


_PRECISIONS = (
    (r"bf16(_r)?|bfloat16|16bf", "bf16"),
    (r"fp16|f16(_r)?|float16|half|16f|h", "fp16"),
    (r"fp32|f32(_r)?|float32|float|32f|s", "fp32"),
    (r"fp8_block(_?(wise|scaled?|128))?", "fp8_block"),
    (r"b?f8(_fnuz)?(_r)?|fp8(_\w+)?|float8\w*|8f_e[45]m[23](_fnuz)?", "fp8"),
)


def open_table(path: Path) -> CsvTable:
    """A table in a layout of `calibrate`, from what another program wrote. Raises ConfigError."""
    with open_plain_file(path, "data") as file:
        head = file.read(_HEAD_BYTES)
    if head.startswith(b"version https://git-lfs"):
        raise _refuse(path.name, "is a pointer of Git LFS in place of the file", "fetch the file: git lfs pull")
    if head.startswith(b"PAR1"):
        return _translate(_parquet(path), path)
    text = head.decode("utf-8-sig", errors="replace")
    if _THREADS.search(text) or any(_TEST_HEADER.match(line) for line in text.splitlines()):
        return _of_tests(path)
    if _BENCH.search(text):
        return _of_bench(path)
    return _translate(read_csv(path, way_out="name a CSV, or a Parquet table, of measured operators"), path)


def is_foreign(columns: Sequence[str]) -> bool:
    """Return whether a table with these columns is one of another program that is read here."""
    return _is_of_aiter(columns) or _is_of_vidur(columns)


def _is_of_aiter(columns: Sequence[str]) -> bool:
    return {"M", "N", "K", "us"} <= set(columns)


def _is_of_vidur(columns: Sequence[str]) -> bool:
    return any(_MEDIAN.fullmatch(name) for name in columns)


def _translate(table: CsvTable, path: Path) -> CsvTable:
    if _is_of_aiter(table.columns):
        return _of_aiter(table, path)
    if _is_of_vidur(table.columns):
        return _of_vidur(table, path)
    return _in_milliseconds(table)


def _refuse(where: str, rule: str, way_out: str, value: object = None) -> ConfigError:
    return ConfigError([Problem(where, rule, value, way_out)])


def _parquet(path: Path) -> CsvTable:
    """The rows of a Parquet table as text."""
    try:
        with parquet_table(path, foreign=True) as source:
            is_long = source.num_rows > _MOST_ROWS
            read_columns = [] if is_long else source.whole().columns
            columns = [[_cell(value) for value in column.to_pylist()] for column in read_columns]
            names = source.names
    except ConfigError as error:  # which advises on tables of results
        raise ConfigError([replace(problem, way_out=_WRITE_AGAIN) for problem in error.problems]) from None
    if is_long:
        raise _refuse(path.name, f"has over {_MOST_ROWS} rows", "leave some out")
    rows = enumerate(zip(*columns, strict=True), 1)
    return CsvTable(names, 1, tuple((line, dict(zip(names, cells, strict=True))) for line, cells in rows))


_WRITE_AGAIN = "download it again, or write what you need of it as a CSV"


def _cell(value: object) -> str:
    return "" if value is None or value != value else str(value)


def _number(cells: Mapping[str, str], name: str, where: str) -> float:
    """A cell that is a number. Raises ConfigError."""
    try:
        return float(cells[name])
    except (KeyError, ValueError):
        raise _refuse(f"{where}, {name}", "is no number", "write a number", cells.get(name)) from None


def _needs(table: CsvTable, names: Sequence[str], path: Path, of: str) -> None:
    """Raise ConfigError where a table lacks columns, with what is there and what is needed."""
    if missing := [name for name in names if name not in table.columns]:
        known = ", ".join(table.columns[:12])
        rule = f"has no column {', '.join(missing)}, which a table of {of} needs; its columns: {known}"
        raise _refuse(f"{path.name}, line {table.header}", rule, "add it, or name another table")


def _of_aiter(table: CsvTable, path: Path) -> CsvTable:
    """Tuned GEMMs of aiter: tokens x out x in."""
    kind = next((name for name in ("dtype", "q_dtype_w", *_TYPES) if name in table.columns), None)
    if kind is None:
        _needs(table, ["dtype"], path, "aiter")
    rows = []
    for line, cells in table.rows:
        parts = [cells[name] for name in ("gfx", "cu_num") if cells.get(name)]
        device = cells.get("device") or (" ".join(parts) + " CUs" if "cu_num" in table.columns else "") or path.stem
        values = device, precision_of(cells[kind or ""]), *(cells[name] for name in ("M", "N", "K", "us"))
        rows.append((line, dict(zip(_GEMMS, values, strict=True))))
    return CsvTable(_GEMMS, table.header, tuple(rows))


# Profiles of vidur


def _of_vidur(table: CsvTable, path: Path) -> CsvTable:
    if {"collective", "num_workers", "size"} <= set(table.columns):
        return _collectives_of_vidur(table, path)
    sizes = ("num_tokens", "n_embd", "n_head", "n_kv_head", "n_expanded_embd", "num_tensor_parallel_workers")
    _needs(table, sizes, path, "vidur")
    columns, rows = (*_LAYERS, *_MODEL), list[tuple[int, dict[str, str]]]()
    for line, cells in table.rows:
        rows += ((line, row) for row in _layers(cells, sizes, f"{path.name}, line {line}", path.stem))
    return CsvTable(columns, table.header, tuple(rows))


def _layers(cells: Mapping[str, str], sizes: Sequence[str], where: str, device: str) -> Iterator[dict[str, str]]:
    """Yield a row for each operation that a profile has a median of."""
    tokens, hidden, heads, kv_heads, ffn, tp = (_number(cells, name, where) for name in sizes)
    if min(tokens, hidden, heads, kv_heads, ffn, tp) < 1:
        raise _refuse(where, "has a size below 1", "leave the row out")
    gated = cells.get("use_gated_mlp", "False").lower() in ("true", "1")
    features = {
        "attn_pre_proj": ((heads + 2 * kv_heads) * hidden / heads / tp, hidden),
        "attn_post_proj": (hidden, hidden / tp),
        "mlp_up_proj": ((1 + gated) * ffn / tp, hidden),
        "mlp_down_proj": (hidden, ffn / tp),
    }
    model = [f"{value:.0f}" for value in (hidden, heads, kv_heads, ffn)]
    model_cells = dict(zip(_MODEL, [*model, str(gated), f"{tp:.0f}"], strict=True))
    for name, text in cells.items():
        if (match := _MEDIAN.fullmatch(name)) and text:
            both = [f"{value:.10g}" for value in features.get(match[1], ())] or ["", ""]
            values = cells.get("device") or device, match[1], f"{tokens:.0f}", *both, text
            yield dict(zip(_LAYERS, values, strict=True)) | model_cells


def _collectives_of_vidur(table: CsvTable, path: Path) -> CsvTable:
    together = next((name for name in ("devices_per_node", "num_devices_per_node") if name in table.columns), None)
    if together is None:
        _needs(table, ["devices_per_node"], path, "vidur")
    rows = []
    for line, cells in table.rows:
        medians = [text for name, text in cells.items() if _MEDIAN.fullmatch(name) and text]
        if len(medians) != 1:
            raise _refuse(f"{path.name}, line {line}", f"has {len(medians)} medians of a collective", "keep one")
        names = ("collective", "num_workers", together or "", "size")
        values = cells.get("device") or path.stem, *(cells[name] for name in names), medians[0]
        rows.append((line, dict(zip(_COLLECTIVES, values, strict=True))))
    return CsvTable(_COLLECTIVES, table.header, tuple(rows))


# Times in other units


def _in_milliseconds(table: CsvTable) -> CsvTable:
    """A table whose `latency` is in ms, where its column names another unit."""
    if "latency" in table.columns or not {"gemm_dtype", "op_name"} & set(table.columns):
        return table
    timed = [(name, match[2]) for name in table.columns if (match := _TIMED.fullmatch(name.lower()))]
    if len(timed) != 1:
        return table
    name, unit = timed[0]
    columns = tuple("latency" if column == name else column for column in table.columns)
    rows = tuple((line, {**cells, "latency": _scale(cells[name], _UNITS_S[unit] * 1e3)}) for line, cells in table.rows)
    return replace(table, columns=columns, rows=rows)


def _scale(text: str, factor: float) -> str:
    try:
        return repr(float(text) * factor)
    except ValueError:
        return text


# Logs of nccl-tests and rccl-tests


@dataclass
class _Log:
    """State of a log: which test, its GPUs, and the columns of its rows."""

    test: str = ""
    hosts: list[str] = field(default_factory=list)
    gpu: str = ""
    threads: int = 0
    header: list[str] = field(default_factory=list)
    unit_s: float | None = None
    rows: list[tuple[int, dict[str, str]]] = field(default_factory=list)
    wrong: int = 0


def _of_tests(path: Path) -> CsvTable:
    """Sizes of a log, out of place and in place. Raises ConfigError where it does not say what was measured."""
    log = _Log()
    for line, text in enumerate(read_text(path, "data").splitlines(), 1):
        _read_line(log, line, text, path)
    if not log.rows:
        rule = "holds no row of a size that is right" if log.wrong else "holds no rows under a header of nccl-tests"
        raise _refuse(path.name, rule, "name the whole output of all_reduce_perf or another test")
    if log.wrong:
        print(f"{path.name}: {log.wrong} rows with wrong results are skipped", file=sys.stderr)
    return CsvTable(TESTS, 1, tuple(log.rows))


def _read_line(log: _Log, line: int, text: str, path: Path) -> None:
    if (threads := _THREADS.search(text)) is not None:
        counts = {"nThread": threads[1], "nGpus": threads[2]}
        numbers = [_number(counts, name, f"{path.name}, line {line}") for name in counts]
        log.threads, log.hosts, log.gpu = int(min(math.prod(numbers), _MOST_ROWS)), [], ""
    if (rank := _RANK.match(text)) is not None:
        log.hosts.append(rank[1])
        log.gpu = rank[2] or log.gpu
    elif (test := _TEST.search(text)) is not None:
        log.test = test[1]
    elif _TEST_HEADER.match(text):
        log.header, log.unit_s = text.lstrip("# ").split(), None
    elif log.header and log.unit_s is None and (unit := re.search(r"\((ns|us|µs|ms|s)\)", text)):
        log.unit_s = _UNITS_S[unit[1]]
    elif log.header and re.match(r"\s*\d+\s+\d+\s", text):
        log.rows += ((line, row) for row in _sizes_of(log, text.split(), f"{path.name}, line {line}", path))


def _sizes_of(log: _Log, cells: Sequence[str], where: str, path: Path) -> Iterator[dict[str, str]]:
    """Yield the times of a row whose results are right."""
    if log.unit_s is None:
        raise _refuse(where, "has no unit of time above it", "keep both lines of the header")
    test = log.test or next((match[1] for match in [re.search(_NAMES, path.stem)] if match), "")
    if not test:
        way = "keep the line of the command (all_reduce_perf ...), or name the file so"
        raise _refuse(where, "is of a test that the log does not name", way)
    gpus, nodes = len(log.hosts) or log.threads, len(set(log.hosts)) or 1
    if gpus < 2:
        raise _refuse(where, f"is of {gpus} GPUs", "keep the lines `# Rank ...` of the log")
    if len(cells) != len(log.header):
        raise _refuse(where, f"has {len(cells)} cells for {len(log.header)} columns of the header", "leave it out")
    places = [place for place, name in enumerate(log.header) if name == "time"]
    for place in places:
        after = dict(zip(log.header[place : place + 4], cells[place : place + 4], strict=True))
        bad = next((after[name] for name in ("#wrong", "error", "wrong") if name in after), "0")
        if re.fullmatch(r"N/A|0|0?e?[+-]?0+|[\d.]+e-\d+", bad) is None:
            log.wrong += 1
        elif after["time"] != "N/A":
            size = cells[log.header.index("size")] if "size" in log.header else ""
            time_s = _number(after, "time", where) * log.unit_s
            values = log.gpu or path.stem, test, str(gpus), str(nodes), size, repr(time_s)
            yield dict(zip(TESTS, values, strict=True))


_NAMES = r"(all_reduce|all_gather|reduce_scatter|alltoall|all_to_all)"


# Output of hipblaslt-bench and rocblas-bench


def _of_bench(path: Path) -> CsvTable:
    """GEMMs of blocks of a header and lines of values. Raises ConfigError for one without a precision."""
    header, precision, skipped = list[str](), "", Counter[str]()
    rows = list[tuple[int, dict[str, str]]]()
    for line, text in enumerate(read_text(path, "data").splitlines(), 1):
        if (match := _BENCH.match(text)) is not None:
            header = [name.strip() for name in match[1].split(",")]
        elif option := re.search(r"(?:\s|^)(?:-r|--precision|--a_type)[ =](\w+)", text):
            precision = option[1]
        elif kernel := re.search(r"\brocblas_([hsd])gemm", text):
            precision = kernel[1]
        elif header and re.match(r"\s*[NTC]\s*,\s*[NTC]\s*,", text):
            cells = dict(zip(header, [cell.strip() for cell in text.split(",")], strict=False))
            if cells.get("batch_count") and _number(cells, "batch_count", f"{path.name}, line {line}") > 1:
                skipped["of batches"] += 1
                continue
            row = _kernel(cells, precision, f"{path.name}, line {line}", path.stem)
            rows.append((line, row))
    for what, count in skipped.items():
        print(f"{path.name}: {count} rows {what} are skipped", file=sys.stderr)
    if not rows:
        raise _refuse(path.name, "holds no lines of values under its headers", "name the whole output of the tool")
    return CsvTable(_KERNELS, 1, tuple(rows))


def _kernel(cells: Mapping[str, str], precision: str, where: str, device: str) -> dict[str, str]:
    """One GEMM of a bench, column-major as it is here."""
    by_name = {name.lower(): text for name, text in cells.items()}
    kind = by_name.get("a_type") or precision
    if not kind:
        raise _refuse(where, "has no precision: no a_type, and no -r before it", "keep the command line in the file")
    if "us" not in by_name:
        rule = f"has no time in us, only {', '.join(cells)}"
        raise _refuse(where, rule, "keep the whole line, or run the tool without --flops_only")
    time_ms = repr(_number(by_name, "us", where) * 1e-3)
    sizes = (by_name.get(name, "") for name in ("m", "n", "k"))
    sides = ("N" if by_name.get(name, "N") == "N" else "T" for name in ("transa", "transb"))
    return dict(zip(_KERNELS, (device, precision_of(kind), "gemm", *sizes, *sides, time_ms), strict=True))
