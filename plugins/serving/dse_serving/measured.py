"""Measured serving points held against predictions (`conf/data/silicon.yaml` says which columns mean what).

A row is a closed loop on engines of one kind: mean time to the first token, and of each later one, over all requests.
The number of GPUs of a row with expert parallelism is that of its experts: some sources multiply degrees of attention
and experts. Engines of disaggregated rows are those of its benchmark's lists (`dse_serving.disaggregated`).
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import spearmanr

from dse.config.options import list_options, load_yaml
from dse.errors import ConfigError
from dse.errors.terminal import bar
from dse.files import cell_number, read_csv
from dse_serving.backend import ServingBackend
from dse_serving.design import DATA, Serving, ServingKernels, deployment_of, with_scheduler
from dse_serving.disaggregated import EngineRun, EnginesOfRole, runs_of
from dse_serving.run import run
from simulators.hardware.machine import tree_of
from simulators.workloads.model_zoo import model_tree, option_tree
from simulators.workloads.public_models import aliases, public
from simulators.workloads.stored import weight_format

CONF = Path(__file__).with_name("conf")
_PARALLEL = {"cp": 1, "sequence_parallel": False, "collectives": "library", "split_ctas": 0}
_KIND = (
    *("dated", "measured", "requests", "gpus", "shared", "mode", "backend", "backend_version"),
    *("system", "model", "precision", "isl", "osl"),
)
_ENGINES = {"replicas": 1, "routing": "fewest_requests"}


@cache
def settings() -> Mapping[str, Any]:
    """The settings of `conf/data/silicon.yaml`."""
    tree: Mapping[str, Any] = load_yaml(DATA / "silicon.yaml")
    return tree


@cache
def server_tree(name: str) -> dict[str, Any]:
    """Tree of a serving software of `conf/server`."""
    return dict(load_yaml(CONF / "server" / f"{name}.yaml"))


@dataclass(frozen=True)
class Row:
    """A measured point: columns of the table, and times [s]."""

    cells: Mapping[str, str]
    ttft_s: float
    tpot_s: float

    @property
    def name(self) -> str:
        """Its id."""
        return self.cells["id"]

    @property
    def apart(self) -> bool:
        """Tell whether prompts have engines of their own."""
        return self.cells["mode"] == "disagg"

    @property
    def group(self) -> tuple[str, ...]:
        """Software, GPU, model and format."""
        return tuple(self.cells[name] for name in ("backend", "system", "model_path", "precision"))

    @property
    def source(self) -> str:
        """The file that it is from."""
        return self.cells["silicon_data_source"].partition("source_file=")[2].partition(";")[0]

    @property
    def is_dated(self) -> bool:
        """Tell whether that file, or the copy of a database, has the name of a date: those are of one benchmark."""
        return self.source.startswith("20") or self.cells["silicon_data_source"].startswith("db-dump/20")

    @property
    def day(self) -> str:
        """The day of its measurement, as in 2026-01-14; empty where it does not say."""
        return self.cells["silicon_data_source"].partition("measured=")[2][:10]

    @property
    def concurrency(self) -> int:
        """Requests under way."""
        match = re.search(r"silicon_concurrency=(\d+)", self.cells["silicon_data_source"])
        # files without that number have the batches of the engines that generate
        if self.apart and not match:
            return self._count("decode_batch_size") * self._count("decode_num_workers", 1)
        return int(match[1]) if match else self._count("batch_size")

    @cached_property
    def runs(self) -> tuple[EngineRun, ...]:
        """Runs that a disaggregated row may be of; more than one where the lists do not tell them apart."""
        listed = runs_of(self.cells, self.concurrency)
        # the row's own columns, if no list has it
        if listed or not all(self.cells.get(f"{role}_num_workers") for role in ("prefill", "decode")):
            return listed
        return (EngineRun(self._engines("prefill"), self._engines("decode")),)

    def _engines(self, role: str) -> EnginesOfRole:
        gpus, ranks = self._degrees(f"{role}_")
        return EnginesOfRole(self._count(f"{role}_num_workers"), gpus, gpus, ranks > 1)

    def _count(self, column: str, absent: int | None = None) -> int:
        """A whole number of the row. absent: for an empty cell, which is no number else. Raises ConfigError."""
        if absent is not None and not self.cells.get(column):
            return absent
        return round(cell_number(self.cells, column, self.name))

    @property
    def run(self) -> EngineRun | None:
        """The run of a disaggregated row; None where the lists do not have it, or several."""
        return self.runs[0] if len(self.runs) == 1 else None

    @property
    def lengths(self) -> tuple[int, int]:
        """Tokens of prompts and outputs."""
        return self._count("isl"), self._count("osl")

    @cached_property
    def degrees(self) -> tuple[int, int]:
        """GPUs of a stage of an engine, and those over which sequences are shared."""
        if self.apart and self.run is not None:
            return self.run.generating.gpus, self.run.generating.ranks
        return self._degrees("decode_" if self.apart else "")

    def stages(self, role: str = "") -> int:
        """Stages of the pipeline of an engine; role: prefill or decode, of a disaggregated row."""
        return self._count(f"{role}_pp_size" if role else "pp_size", 1)

    def _degrees(self, before: str) -> tuple[int, int]:
        tp, experts, ranks = (self._count(f"{before}{name}_size", 0) for name in ("tp", "moe_ep", "attention_dp"))
        # some sources multiply both degrees: experts have the number of GPUs
        gpus = experts if experts > 1 else max(tp, 1)
        shared = ranks > 1 or any(_is_of(self, kind) for kind in settings()["shared"])
        return gpus, gpus if shared else 1

    @property
    def gpus(self) -> int:
        """GPUs of all of its engines, those of prompts among them. Raises KeyError where engines are not known."""
        if not self.apart:
            return self.degrees[0] * self.stages()
        if self.run is None:
            raise KeyError(f"engines are one of {len(self.runs)} runs of its benchmark's lists")
        roles = {"prefill": self.run.prompts, "decode": self.run.generating}
        return sum(engines.workers * engines.gpus * self.stages(role) for role, engines in roles.items())

    def tokens_per_s_per_gpu(self, ttft_s: float, tpot_s: float) -> float:
        """Tokens that a GPU generates in a closed loop with these times."""
        output = self.lengths[1]
        # each request is replaced when it ends: throughput by Little's law
        return self.concurrency * output / (ttft_s + (output - 1) * tpot_s) / self.gpus


def read_rows(folder: Path, name: str = "") -> list[Row]:
    """Rows below a folder that say what they measured. name: pattern of the files; "" for that of the settings.

    Raises ConfigError for a file that cannot be read, and where there is none.
    """
    pattern = name or settings()["file"]
    files = sorted(folder.glob(pattern)) or [folder / pattern]
    tables = (read_csv(file, needed=("id", "silicon_ttft_ms", "silicon_tpot_ms")) for file in files)
    return [
        Row(cells, *(cell_number(cells, f"silicon_{name}_ms", f"{cells['id']}") / 1e3 for name in ("ttft", "tpot")))
        for table in tables
        for _, cells in table.rows
        # rows without these do not name what was measured
        if cells["mode"] and cells["silicon_tpot_ms"] and cells["model_path"]
    ]


def fitted_rows(rows: Sequence[Row]) -> list[Row]:
    """The rows that constants are fitted to: of each group and number of drafts, in the order of the SHA-256 of their
    ids, the first of each number of GPUs and of prompts up to and beyond `long` tokens, of which one of each length
    first, and no more than `of_group` of a group and `most` in all.
    """
    rule = settings()["fitted"]
    able = [row for row in rows if not row.apart and row.degrees[1] == 1 and row.source not in rule["without"]]
    kinds: dict[tuple[Any, ...], Row] = {}
    for row in sorted(able, key=_hash):
        # hashes order rows without regard to their times, so that none is chosen for its error
        kinds.setdefault((fit_group(row), row.degrees[0], row.lengths[0] > rule["long"]), row)
    turns: dict[tuple[Any, ...], int] = {}
    listed = []
    for (group, _, is_long), row in kinds.items():
        # short and long prompts take turns within a group
        turn = turns[group, is_long] = turns.get((group, is_long), -1) + 1
        listed.append((turn, _hash(row), group, row))
    chosen, counts = list[Row](), dict[tuple[Any, ...], int]()
    for _, _, group, row in sorted(listed, key=lambda entry: entry[:2]):
        counts[group] = counts.get(group, 0) + 1
        if counts[group] <= rule["of_group"]:
            chosen.append(row)
    return chosen[: rule["most"]]


def rows_of_sets(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows that sets of kernels are fitted to, by the name of the set in the settings."""
    by_name = {row.name: row for row in rows}
    listed: Mapping[str, Sequence[str]] = settings()["fitted_sets"]
    return {name: [by_name[row] for row in names] for name, names in listed.items()}


def fitted_names() -> frozenset[str]:
    """Ids of all rows that a constant was fitted to."""
    return frozenset(
        [*settings()["fitted"]["rows"], *(row for rows in settings()["fitted_sets"].values() for row in rows)]
    )


def _hash(row: Row) -> str:
    return hashlib.sha256(row.name.encode()).hexdigest()


def fit_group(row: Row) -> tuple[Any, ...]:
    """Its group, and how many tokens it drafts: rows with drafts are no measurement of the same software without."""
    return *row.group, _options(row)[0].get("drafts", 0)


def model_name(path: str) -> str:
    """Name of a public model in the repository, by its path on a hub: its last part without words for formats and
    tuning, or what the settings call that.
    """
    plain = re.sub(r"[-_ ]", "_", path.rpartition("/")[2].lower())
    short = re.sub(r"_(instruct|chat|base|fp8|fp4|nvfp4|bf16|v\d[\d.]*|it|hf|2507|0528|thinking)(?=_|$)", "", plain)
    # hubs write Llama-3.1, this repository llama3
    joined = re.sub(r"^(meta_)?llama_", "llama", short)
    for name in (plain, short, joined, re.sub(r"^llama3\.\d", "llama3", joined)):
        name_there = str(settings()["models"].get(name, name))
        if (name_there := aliases().get(name_there, name_there)) in public():
            return name_there
    raise KeyError(f"{path} is no public model that is known")


def system_name(system: str, gpus: int = 1) -> str:
    """Name of a system by that of the table: of the settings, or a node of eight of its GPU, with a network for engines
    of more GPUs.
    """
    name = str(settings()["systems"].get(system, f"{system.removesuffix('_sxm')}_8"))
    several = f"{name}{settings()['across']}"
    return several if gpus > 8 and several in list_options("system") else name


def _options(row: Row) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options of the scheduler, and formats, that the benchmark of a row gave (`runs` of the settings)."""
    entry: Mapping[str, Any] = next((entry for entry in settings()["runs"] if _is_of(row, entry)), {})
    counts = {name: _count(entry[name], row) for name in ("tokens", "sequences") if name in entry}
    more = [entry["scheduler"] for entry in settings()["also"] if _is_of(row, entry)]
    scheduler = {name: value for options in (entry.get("scheduler", {}), *more) for name, value in options.items()}
    if any(_is_of(row, kind) for kind in settings()["held"]):
        counts["sequences"] = max(1, counts["sequences"] - 1)
    drafted = {"acceptance": settings()["acceptance"]} if scheduler.get("drafts") else {}
    return {**scheduler, **counts, **drafted}, entry.get("formats", {})


def _is_of(row: Row, kind: Mapping[str, Any]) -> bool:
    """Tell whether a row has the cells of an entry of the settings, none below its `from` and none above its `to`."""
    readers: dict[str, Callable[[], Any]] = {
        "dated": lambda: row.is_dated,
        "gpus": lambda: row.degrees[0],
        "measured": lambda: row.day,
        "model": lambda: model_name(row.cells["model_path"]),
        "requests": lambda: row.concurrency,
        "shared": lambda: row.degrees[1] > 1,
    }
    least, most = kind.get("from", {}), kind.get("to", {})
    return (
        all(
            (readers[name]() if name in readers else row.cells.get(name)) == kind[name]
            for name in _KIND
            if name in kind
        )
        and all(readers[name]() >= value for name, value in least.items())
        and all(readers[name]() <= value for name, value in most.items())
    )


def _count(rule: Mapping[str, float], row: Row) -> int:
    """Tokens or sequences of a step of a rank by a rule of the settings."""
    # a rule is linear in these, rounded up to a multiple
    sizes = {"input": row.lengths[0], "output": row.lengths[1], "request": row.concurrency, "more": 1}
    count = max(math.ceil(sum(rule.get(name, 0) * size for name, size in sizes.items())), int(rule.get("least", 1)))
    multiple = int(rule.get("multiple", 1))
    return -(-count // multiple) * multiple


def design_tree(row: Row, run: EngineRun | None = None, role: str = "") -> dict[str, Any]:
    """Tree of the deployment of a row; of a disaggregated row, of its engines of one role: prefill, or decode."""
    names, cells = settings(), row.cells
    engines = None if run is None else run.prompts if role == "prefill" else run.generating
    gpus, ranks = row.degrees if engines is None else (engines.gpus, engines.ranks)
    workers, stages = 1 if engines is None else engines.workers, row.stages(role)
    model, formats = _model(row)
    server = server_tree(names["servers"][cells["backend"]])
    scheduler, other_formats = _options(row)
    if run is not None:
        scheduler |= _options_apart(row, run, role)
    server = {**server, "scheduler": {**server["scheduler"], **scheduler}}
    # lengths that the dated benchmark draws
    kind = {"kind": "uniform", "low": names["low"]} if row.is_dated else {"kind": "fixed"}
    lengths = {name: {**kind, "tokens": tokens} for name, tokens in zip(("input", "output"), row.lengths, strict=True)}
    requests = row.concurrency * names["rounds"]
    return {
        "system": tree_of(system_name(cells["system"], gpus * stages)),
        "model": model,
        "kernels": option_tree("kernels", "vllm"),
        "run": {"precision": "bf16", **formats, **other_formats},
        "parallel": {**_PARALLEL, "tp": gpus // ranks, "pp": stages, "dp": ranks, "ep": ranks},
        "server": server,
        "engines": {**_ENGINES, "replicas": workers, "gpus": workers * gpus * stages},
        "traffic": {"concurrency": row.concurrency, "requests": requests, "counted": "all", "warm_up": 0, **lengths},
        "slo": {},
    }


def _model(row: Row) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tree of the model of a row, and formats of its run."""
    names, precision = settings(), row.cells["precision"]
    model = model_tree(model_name(row.cells["model_path"]))
    kept = next((entry["formats"] for entry in names["kept"] if _is_of(row, entry)), None)
    if kept is None and precision not in names["formats"]:
        raise KeyError(f"{precision} is no format that is known")
    formats = dict(names["formats"][precision] if kept is None else kept)
    if stored := formats.pop("stored", {}):
        model["stored"] = {
            part: [{"format": weight_format(name).model_dump(), "share": 1.0}] for part, name in stored.items()
        }
    return model, formats


def _options_apart(row: Row, run: EngineRun, role: str) -> dict[str, Any]:
    """Options of the scheduler of engines of one role."""
    if role == "prefill":
        entry: Mapping[str, Any] = next((entry for entry in settings()["prompts"] if _is_of(row, entry)), {})
        return {name: entry[name] for name in ("tokens", "sequences") if name in entry}
    drafted = {"drafts": run.drafts, "acceptance": settings()["acceptance"] if run.drafts else 0.0}
    sequences = {"sequences": run.sequences} if run.sequences else {}
    return {**drafted, **sequences, "chunked": True}


@dataclass(frozen=True)
class Point:
    """A row with its predicted times [s]."""

    row: Row
    ttft_s: float
    tpot_s: float

    @property
    def ttft_error(self) -> float:
        """Relative error, with its sign."""
        return self.ttft_s / self.row.ttft_s - 1

    @property
    def tpot_error(self) -> float:
        """Relative error, with its sign."""
        return self.tpot_s / self.row.tpot_s - 1


class Predictor:
    """Predictions of rows; designs are kept, so that their tables are computed once."""

    def __init__(self) -> None:
        self._backend, self._designs = ServingBackend(), dict[str, tuple[Serving, ...]]()
        self.refused: dict[str, str] = {}
        self.stopped = False

    def designs(self, row: Row) -> tuple[Serving, ...]:
        """The deployment of a row; of engines of prompts, and of those that generate, where they are apart.

        Raises ConfigError, also where it breaks a rule, and KeyError for engines that are not known.
        """
        if row.name not in self._designs:
            # several runs would have several predictions
            if row.apart and row.run is None:
                raise KeyError(f"engines are one of {len(row.runs)} runs of its benchmark's lists")
            trees = (
                [design_tree(row, row.run, role) for role in ("prefill", "decode")] if row.apart else [design_tree(row)]
            )
            designs = tuple(self._backend.design(tree) for tree in trees)
            if problems := [problem for design in designs for problem in self._backend.problems(design)]:
                raise ConfigError(problems)
            self._designs[row.name] = designs
        return self._designs[row.name]

    def predict(
        self, row: Row, changes: Mapping[str, Any] | None = None, software: ServingKernels | None = None
    ) -> Point | None:
        """The row with its predicted times; None where its deployment is refused (`refused` says why).

        changes: of its scheduler; software: kernels in place of those of conf.
        """
        try:
            designs = [with_scheduler(design, changes or {}) for design in self.designs(row)]
            speeds = None if software is None else software.of(designs[0])
            # the engines that generate come last, and have the traffic
            served = run(deployment_of(designs[-1], speeds, *designs[:-1]), designs[-1].traffic.draw())
        except (ConfigError, KeyError) as error:
            self.refused[row.name] = str(error)
            return None
        return Point(row, float(served.ttft_s.mean()), served.tpot_mean_s)

    def points(self, rows: Sequence[Row]) -> list[Point]:
        """Rows with predictions; those until an interrupt, after which `stopped` is true and none follow."""
        points = list[Point]()
        with bar("measured points", len(rows), "rows") as advance:
            try:
                for row in () if self.stopped else rows:
                    point = self.predict(row)
                    points += [] if point is None else [point]
                    advance(1)
            # hours of predictions so far are of use
            except KeyboardInterrupt:
                self.stopped = True
        return points


def summary(points: Sequence[Point]) -> dict[str, float]:
    """Number of rows, median and 90th percentile of the sizes of the errors, and their signed medians."""
    if not points:
        return {"rows": 0}
    first, later = (np.array([getattr(point, name) for point in points]) for name in ("ttft_error", "tpot_error"))
    return {
        "rows": len(points),
        "tpot_median": float(np.median(np.abs(later))),
        "tpot_p90": float(np.quantile(np.abs(later), 0.9)),
        "tpot_signed": float(np.median(later)),
        "ttft_median": float(np.median(np.abs(first))),
        "ttft_signed": float(np.median(first)),
    }


def _apart_by(points: Sequence[Point], *names: str) -> Iterator[list[Point]]:
    groups: dict[tuple[Any, ...], list[Point]] = {}
    for point in points:
        groups.setdefault(tuple(point.row.cells[name] for name in names), []).append(point)
    yield from groups.values()


def rank_correlation(points: Sequence[Point]) -> float:
    """Spearman's correlation of tokens/s a GPU between predictions and measurements: median over models and GPUs at
    equal lengths, of five rows or more.
    """
    correlations = []
    for group in _apart_by(points, "model_path", "system", "isl", "osl"):
        # ranks of fewer rows are a matter of chance
        if len(group) >= 5:
            rates = [[_rate(point, measured=side) for point in group] for side in (True, False)]
            correlations.append(float(spearmanr(*rates).statistic))
    return float(np.median(correlations)) if correlations else float("nan")


def frontier_error(points: Sequence[Point]) -> float:
    """Error of the area under the frontier of tokens/s a GPU against tokens/s a user: median over software, models,
    GPUs, formats and lengths, of three rows or more.
    """
    errors = []
    for group in _apart_by(points, "backend", "model_path", "system", "precision", "isl", "osl"):
        if len(group) >= 3:
            measured, predicted = (_area([_place(point, side) for point in group]) for side in (True, False))
            errors.append(abs(predicted / measured - 1))
    return float(np.median(errors)) if errors else float("nan")


def _rate(point: Point, *, measured: bool) -> float:
    side: Row | Point = point.row if measured else point
    return point.row.tokens_per_s_per_gpu(side.ttft_s, side.tpot_s)


def _place(point: Point, measured: bool) -> tuple[float, float]:
    side: Row | Point = point.row if measured else point
    return 1.0 / side.tpot_s, _rate(point, measured=measured)


def _area(places: Sequence[tuple[float, float]]) -> float:
    """Area under the staircase of the points that no other one dominates."""
    area, best, last = 0.0, 0.0, 0.0
    # from the quickest for a user on: each point adds what it has more of tokens/s a GPU
    for user, gpu in sorted(places, reverse=True):
        area += best * (last - user) if best else 0.0
        best, last = max(best, gpu), user
    return area + best * last
