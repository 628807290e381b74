"""Functions that fit calibrated numbers of `conf` again, by the names that `calibration.recomputed_by` gives.

Each takes the numbers that were fitted together and the table of their rows, and says what they are by a fit today;
where the target is a value and no table, also what the quantity is with the numbers as they stand.
"""

from __future__ import annotations

import contextlib
import io
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np

import dse
from dse.results.run_folder import FinishedRun
from dse_calibration.board_power import fit_governor, fit_power, read_throttle
from dse_calibration.board_power import read as read_boards
from dse_calibration.calibrate import calibrate_rows, read_table
from dse_calibration.collectives import COLLECTIVE_ROWS
from dse_calibration.contention import Overlaps, fit_contention
from dse_calibration.fit import fit
from dse_calibration.overlap_measured import gemm_collective, prefills
from dse_calibration.slowdowns import fit_slowdowns
from dse_calibration.tables import is_of
from simulators.costs.chip import Chip
from simulators.hardware.device import Device
from simulators.hardware.machine import merged, tree_of
from simulators.hardware.parts import ELEMENT_BYTES, Power
from simulators.hardware.schedule_system import ScheduleSystem
from simulators.steps.operators.sizes import Sizes
from simulators.steps.operators.state_layers import state_layer
from simulators.steps.operators.work import Stream, streamed_seconds
from simulators.workloads.model import Kernels, Parallel, Run, Transformer
from simulators.workloads.model_zoo import model_tree, option_tree
from studies import conccl as conccl_study
from validation import amd_tables, expert_rows, library_rows, steps_measured
from validation.calibrated_numbers import Number, read_option, value_of
from validation.measured_step import Step, settings
from validation.published_tables import read_throughput

_DECIMALS = 3  # of coefficients of contention
_LONG_SCAN = 8192  # tokens, from which on launches do not count
_IDEAL = "conccl.best_dma"  # the finding that `contention.dma_beside_gemm` is fitted to


@dataclass(frozen=True)
class Refit:
    """Numbers by a fit today; achieved: the quantity with the numbers as they stand, where the target is a value."""

    values: Mapping[Number, float]
    achieved: float | None = None


Refitter = Callable[[Sequence[Number], Path | None], Refit]


def operators(numbers: Sequence[Number], table: Path | None) -> Refit:
    """Efficiency constants of GPUs: the fit of `dse machine calibrate` to the rows of a table."""
    assert table is not None
    values = dict[Number, float]()
    for option, own in _by_option(numbers).items():
        gpu, precisions = read_option(option), {number.path.split(".")[1] for number in own}
        with _quiet():
            every = [rows for rows in read_table(table) if rows.precision in precisions]
        rows = [rows for rows in every if is_of(rows, str(gpu.get("measured_as")))] or every
        kernels = [group for group in rows if group.kind not in ("allreduce", *COLLECTIVE_ROWS)]
        fitted = fit(Device.of({"name": gpu["name"], "gpu": gpu}), kernels)
        tree = {"efficiency": {name: constants.model_dump() for name, constants in fitted.efficiency.items()}}
        values |= {number: _rounded(_at(tree, number.path)) for number in own}
    return Refit(values)


def collectives(numbers: Sequence[Number], table: Path | None) -> Refit:
    """Constants of a node's collectives: the fit of `dse machine calibrate` to the rows of a table."""
    assert table is not None
    values = dict[Number, float]()
    for option, own in _by_option(numbers).items():
        gpu = re.split(r"_(?:switch|mesh|pcie|ring)", option.rpartition("/")[2])[0]
        tree = {"name": gpu, "gpu": read_option(f"gpu/{gpu}"), "node": read_option(option)}
        with _quiet():
            rows = [rows for rows in read_table(table) if rows.kind in ("allreduce", *COLLECTIVE_ROWS)]
            node = calibrate_rows(tree, rows, table).tree["node"]
        values |= {number: _at(node, number.path) for number in own}
    return Refit(values)


def experts(numbers: Sequence[Number], table: Path | None) -> Refit:
    """Constants of dispatch and combine: the fit of `benchmarks.expert_exchanges` to the rows of a table."""
    assert table is not None
    values, rows = dict[Number, float](), expert_rows.read_rows(table)
    devices = {f"node/{node}": device for device, node in expert_rows.NODES.items()}
    for option, own in _by_option(numbers).items():
        device = devices[option]
        groups = {tuple(number.path.split(".")[2:4]) for number in own}
        members = [row for row in rows if row.device == device and tuple(row.group.split()) in groups]
        fits = expert_rows.fit_all(members, expert_rows.node_of(device))
        for number in own:
            kind, direction, name = number.path.split(".")[2:]
            values[number] = _rounded(getattr(fits[f"{kind} {direction}"][0], name))
    return Refit(values)


def nodes(numbers: Sequence[Number], table: Path | None) -> Refit:
    """Time for each node, and incast, of dispatch and combine across nodes (`validation.expert_rows.fit_nodes`)."""
    assert table is not None
    values = dict[Number, float]()
    rows = [row for row in expert_rows.read_rows(table) if expert_rows.is_fitted_by_nodes(row)]
    for number in numbers:
        name, direction = (number.path.split(".")[place] for place in (-1, -2))
        own = [row for row in rows if row.direction == direction]
        node = expert_rows.node_of(own[0].device)
        kernel = expert_rows.constants_of(own[0], node)
        assert kernel is not None
        values[number] = _rounded(getattr(expert_rows.fit_nodes(own, kernel, node), name))
    return Refit(values)


def links(numbers: Sequence[Number], table: Path | None) -> Refit:
    """Share of a link that the library's collectives reach: bytes that a GPU receives over time and the link's rate."""
    assert table is not None
    (number,) = numbers
    gpu = number.option.rpartition("/")[2]
    (cells,) = gemm_collective.calibration_rows(table, f"{number.option}: cu_copy.link_efficiency, library")
    rows, columns, gpus = int(cells["m"]), int(cells["k"]), int(cells["gpus"])
    received = rows * columns * ELEMENT_BYTES[cells["dtype"]] * (gpus - 1) / gpus
    link = value_of(f"node/{tree_of(f'{gpu}_{gpus}')['node']['name']}", "link_bytes_per_s")
    assert link is not None
    return Refit({number: received / (float(cells["comm_ms"]) * 1e-3) / link})


def stores(numbers: Sequence[Number], table: Path | None) -> Refit:
    """Rate at which a CU stores tiles at peers: speed-ups of overlaps, with the mean logarithm of errors zero."""
    assert table is not None
    (number,) = numbers
    rows = gemm_collective.calibration_rows(table, f"{number.option}: cu_copy.store_bytes_per_s_per_cu")

    def mean_error(values: Sequence[float]) -> list[float]:
        changes = {"gpu": _tree(number.path, values[0])}
        predicted = [gemm_collective.predict_overlap(cells, changes=changes) for cells in rows]
        return [float(np.mean([np.log(each.speedup / each.measured[2]) for each in predicted]))]

    return Refit(_from_shipped(numbers, mean_error))


def software(numbers: Sequence[Number], table: Path | None) -> Refit:
    """Knobs of implementations: times of the rows that each was fitted on, with the mean logarithm of errors zero."""
    assert table is not None
    values = dict[Number, float]()
    for option, own in _by_option(numbers).items():
        rows = [(cells, gemm_collective.fits_of(cells)) for cells in gemm_collective.rows_fitted_by(table, option)]

        def errors(tried: Sequence[float], own: Sequence[Number] = own, rows: Any = rows) -> list[float]:
            return mean_errors(rows, {_knob(number): value for number, value in zip(own, tried, strict=True)})

        values |= _from_shipped(own, errors)
    return Refit(values)


def libraries(numbers: Sequence[Number], table: Path | None) -> Refit:
    """Constants of software of collectives: times of the rows that each was fitted on."""
    assert table is not None
    values = dict[Number, float]()
    for own in _by_option(numbers).values():
        shipped, errors = library_rows.fit_errors(table.parent.parent, own)
        values |= dict(zip(own, least(shipped, errors), strict=True))
    return Refit(values)


def _knob(number: Number) -> str:
    return number.path.rpartition(".")[2]


_OF_BASELINES = ("collective_calls", "expert_s", "rows_before", "rows_after")
"""Knobs that count in what an overlap replaces alone: submissions of a library's collective, a host's experts."""


def mean_errors(rows: Sequence[tuple[Mapping[str, str], frozenset[str]]], knobs: Mapping[str, float]) -> list[float]:
    """Mean logarithm of predicted over measured times of the rows that each knob was fitted on, with knobs at values.

    rows: and what was fitted on each. Times are of overlaps; of what they replace for `_OF_BASELINES`.
    """
    judged = [(gemm_collective.predict_overlap(cells, knobs=knobs), fits) for cells, fits in rows]
    errors = []
    for knob in knobs:
        side = int(knob not in _OF_BASELINES)
        times = [(row.predicted[side], row.measured[side]) for row, fits in judged if knob in fits]
        errors.append(float(np.mean([np.log(predicted / measured) for predicted, measured in times if measured])))
    return errors


def contention(numbers: Sequence[Number], table: Path | None) -> Refit:
    """Coefficients of contention by kernels: least squares on measured overlaps of a GEMM and an all-reduce."""
    assert table is not None
    rows = Overlaps.read(table)
    (option,) = _by_option(numbers)
    system = ScheduleSystem.of(tree_of(f"{option.rpartition('/')[2]}_8"))
    fitted = fit_contention(system, rows.where(rows.fitted))
    return Refit({number: fitted[number.path.rpartition(".")[2]] for number in numbers})


def boards(numbers: Sequence[Number], table: Path | None) -> Refit:
    """Constants of a board's power: the fit of `dse_calibration.board_power` to the rows that are shipped."""
    assert table is not None
    (option,) = _by_option(numbers)
    power = Power.model_validate(read_option(option)["power"])
    fitted = fit_power(power, read_boards(table))
    return Refit({number: _rounded(fitted[number.path.split(".")[1]]) for number in numbers})


def governor(numbers: Sequence[Number], table: Path | None) -> Refit:
    """Constants of a board's governor: which rows throttle, and to which clock."""
    assert table is not None
    (option,) = _by_option(numbers)
    fitted = fit_governor(Power.model_validate(read_option(option)["power"]), read_throttle(table))
    return Refit({number: _rounded(fitted[number.path.split(".")[1]]) for number in numbers})


def served(numbers: Sequence[Number], table: Path | None) -> Refit:
    """What boards that serve draw beside operations and bytes: the fit of `dse_serving.served_power`."""
    from dse_serving.served_power import fit_tree, read_served  # the plug-in of serving, which the numbers came with

    assert table is not None
    rows = read_served(table)
    (number,) = numbers
    return Refit({number: _rounded(fit_tree(rows, rows[0].power))})


def slowdowns(numbers: Sequence[Number], table: Path | None) -> Refit:
    """Coefficients of contention of a GPU by its own tables (`dse_calibration.slowdowns`)."""
    assert table is not None
    fitted = fit_slowdowns(table)
    return Refit({number: fitted[number.path.rpartition(".")[2]] for number in numbers})


def share_by_dma(dma_beside_gemm: float) -> float:
    """Share of the ideal gain [%] of ConCCL's best strategy by DMA engines, on the mix of its study."""
    values: dict[str, Any] = {"fidelity": "none", "tracking": "none", "store": "none", "executor__jobs": 1}
    values |= {"space__schedule__comm_cus": [0, 32]}  # engines take no CUs: any will do
    values |= {"system__gpu__contention__dma_beside_gemm": dma_beside_gemm}
    with tempfile.TemporaryDirectory() as folder:
        run = dse.run("conccl", output_dir=folder, **values)
        config = FinishedRun(run.folder).config
        system, precision = ScheduleSystem.of(config["system"]), config["workload"]["precision"]
        share = conccl_study.by_engines(run.table, system, precision)[_IDEAL].ours
    assert isinstance(share, float)
    return share


def conccl(numbers: Sequence[Number], table: Path | None) -> Refit:
    """Slowdown beside DMA engines, from a published share of the ideal gain; it is kept where that comes out."""
    assert table is None
    (number,) = numbers
    target, achieved = float(number.calibration.target), share_by_dma(number.value)
    if abs(achieved / target - 1) <= number.calibration.tolerance:
        return Refit({number: number.value}, achieved)
    solved = _from_shipped(numbers, lambda values: [share_by_dma(values[0]) / target - 1])
    return Refit({number: round(value, _DECIMALS) for number, value in solved.items()}, achieved)


def prefill_rows(numbers: Sequence[Number], table: Path | None) -> Refit:
    """Clock under load, attention's share of its peak and the host: prefills of three lengths without all-reduces."""
    assert table is not None
    rows = prefills.calibration_rows(table)
    groups = {"gpu/h100": ("system", "gpu"), "kernels/vllm": ("kernels",)}

    def errors(values: Sequence[float]) -> list[float]:
        changes: dict[str, Any] = {}
        for number, value in zip(numbers, values, strict=True):
            changes = merged(changes, _tree(".".join((*groups[number.option], number.path)), value))
        return [prefills.predict_prefill(*shape, changes=changes)[prefills.NO_SUMS] / s - 1 for shape, s in rows]

    return Refit(_from_shipped(numbers, errors))


def host(numbers: Sequence[Number], table: Path | None) -> Refit:
    """Times of a host that launches every kernel: steps that it bounds, least squares of relative errors."""
    assert table is not None
    steps = _host_bound_steps(table)

    def errors(values: Sequence[float]) -> list[float]:
        kernels = {number.path: value for number, value in zip(numbers, values, strict=True)}
        designs = [merged(step.design, {"kernels": kernels}) for step in steps]
        return [
            Step(step.table, step.name, design, step.seconds, step.facts).error
            for step, design in zip(steps, designs, strict=True)
        ]

    return Refit(_from_shipped(numbers, errors))


def mixtures(numbers: Sequence[Number], table: Path | None) -> Refit:
    """Constants of kernels: published steps of a table, most of them of mixtures, least squares of relative errors."""
    assert table is not None
    kernels_name = numbers[0].option.removeprefix("kernels/")  # those of a later release have rows of their own
    steps = [
        step
        for step in read_throughput(table.parent.parent, fitted=True).steps
        if step.fitted
        and fnmatch(table.name, Path(settings()[step.table]["file"]).name)
        and step.design["kernels"]["name"] == kernels_name
    ]

    def errors(values: Sequence[float]) -> list[float]:
        kernels: dict[str, Any] = {}
        for number, value in zip(numbers, values, strict=True):
            kernels = merged(kernels, _tree(number.path, value))
        return [replace(step, design=merged(step.design, {"kernels": kernels})).error for step in steps]

    return Refit(_from_shipped(numbers, errors))


def scans(numbers: Sequence[Number], table: Path | None) -> Refit:
    """Rate of the kernels of a chunked scan: times of the forward scan of long sequences on an H100."""
    assert table is not None
    rows = [row for row in amd_tables.rows_of(table) if int(row["tokens"]) >= _LONG_SCAN]
    chip, every = Chip.of(Device.of(tree_of("h100_8")), "bf16"), [_scan_of(row).parts for row in rows]

    def errors(values: Sequence[float]) -> list[float]:
        kernels = [[replace(part, vector_share=values[0]) for part in parts] for parts in every]
        times = (sum(float(streamed_seconds(part, chip)) for part in parts) for parts in kernels)
        return [
            seconds * float(row["tokens_per_s"]) / float(row["tokens"]) - 1
            for seconds, row in zip(times, rows, strict=True)
        ]

    return Refit(_from_shipped(numbers, errors))


def _scan_of(row: Mapping[str, str]) -> Stream:
    """The forward scan of a row, without a gate."""
    widths = {name: int(row[name]) for name in ("heads", "value", "groups", "key", "chunk")}
    tree = merged(model_tree("nemotron3_nano_30b_a3b"), {"state": widths})
    run = Run(mode="prefill", batch=1, sequence_length=int(row["tokens"]), precision="bf16")
    kernels = Kernels.model_validate(option_tree("kernels", "vllm"))
    sizes = Sizes(Transformer.model_validate(tree), run, Parallel(), kernels)
    works = (op.work for op in state_layer(sizes) if op.name == "state scan")
    return next(work for work in works if isinstance(work, Stream))


def latency(numbers: Sequence[Number], table: Path | None) -> Refit:
    """Time of a host for each sequence: latencies of fixed batches, with the mean logarithm of errors zero."""
    assert table is not None
    chosen = settings()[amd_tables.LATENCY]
    every = (row for row in amd_tables.rows_of(table) if amd_tables.fitted(amd_tables.LATENCY, row))
    rows = [(amd_tables.shape_of(row), float(row["e2e_latency_s"])) for row in every]

    def mean_error(values: Sequence[float]) -> list[float]:
        kernels = dict(zip((number.path for number in numbers), values, strict=True))
        logs = [np.log(amd_tables.latency(chosen, shape, kernels) / measured_s) for shape, measured_s in rows]
        return [float(np.mean(logs))]

    return Refit(_from_shipped(numbers, mean_error))


def two_sizes(numbers: Sequence[Number], table: Path | None) -> Refit:
    """Launch, steps and shares of the rate of an all-reduce, from its times at two sizes by a protocol, or by each.

    T = launch + steps ll_step_s + w / (ll_share B) holds at the two smallest, and with LL128's constants at the two
    largest; Simple, with simple_s + steps step_s + w / B beyond the launch, takes as long at the largest.
    """
    assert table is not None
    values = dict[Number, float]()
    for number in numbers:
        gpu = number.option.rpartition("/")[2].partition("_")[0]
        node, nodes = Device.of(tree_of(f"{gpu}_8_roce")).node, 2 if ".network." in number.path else 1
        constants = (node.network() if nodes > 1 else node.protocols())["all_reduce"]
        gpus = nodes * node.num_gpus
        steps, rate = 2 * (nodes + node.num_gpus - 2), constants.bytes_per_s * (node.num_gpus if nodes > 1 else 1)
        rows = amd_tables.fitted_all_reduces(table, gpu.upper(), gpus)
        sent = [(2 * (gpus - 1) / gpus * size, seconds) for size, seconds in rows]
        (short_s, short_slope), (long_s, long_slope) = _line(*sent[:2]), _line(*sent[-2:])
        launch_s = short_s - steps * constants.ll_step_s
        beyond_s = long_s - launch_s
        found = {
            "launch_s": launch_s,
            "ll_share": 1 / (short_slope * rate),
            "ll128_step_s": beyond_s / steps,
            "ll128_share": 1 / (long_slope * rate),
            "simple_s": beyond_s - steps * constants.step_s + sent[-1][0] * (long_slope - 1 / rate),
        }
        values[number] = _rounded(float(found[number.path.rpartition(".")[2]]))
    return Refit(values)


def _line(first: tuple[float, float], second: tuple[float, float]) -> tuple[float, float]:
    """Time without bytes [s], and time of a byte [s], by the bytes sent and the times of two collectives."""
    slope = (second[1] - first[1]) / (second[0] - first[0])
    return first[1] - slope * first[0], slope


def _host_bound_steps(table: Path) -> list[Step]:
    """Steps of the table that the host's times are fitted on; no other row is looked at, as each takes a moment."""
    chosen = settings()["megatron_deepspeed"]
    wanted = {name: value for name, value in chosen["calibrated_on"].items() if name in chosen["columns"]}
    places = {chosen["columns"].index(name): value for name, value in wanted.items()}
    lines = [line for line in table.read_text("utf-8").splitlines() if not line.startswith("#")]
    kept = [line for line in lines if all(float(line.split(",")[at]) == value for at, value in places.items())]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / table.name
        file.write_text("\n".join(kept), encoding="utf-8")
        return [step for step in steps_measured.megatron_deepspeed(file) if step.fitted]


def technology(numbers: Sequence[Number], table: Path | None) -> Refit:
    """Coefficients of area and power: the largest relative error over public GPUs is least."""
    from benchmarks import codesign  # the plug-in of co-design, which the numbers came with

    assert table is not None
    fitted = codesign.fitted_coefficients()
    return Refit({number: fitted[number.path.removesuffix(".value")] for number in numbers})


def serving(numbers: Sequence[Number], table: Path | None) -> Refit:
    """Kernels and hosts of serving software: the rows of the table that the plug-in's rule names."""
    from dse_serving.fitting import fit  # the plug-in of serving, which the numbers came with
    from dse_serving.measured import fitted_rows, read_rows

    assert table is not None
    fitted = fit(fitted_rows(read_rows(table.parent.parent, f"serving/{table.name}")))
    own = {number: number.path.removeprefix("scheduler.") for number in numbers}
    servers = {number: number.option.removeprefix("server/") for number in numbers}
    return Refit(
        # those of kernels and of the front end are one for all software
        {number: fitted[path if path in fitted else f"{servers[number]}.{path}"] for number, path in own.items()}
    )


def serving_sets(numbers: Sequence[Number], table: Path | None) -> Refit:
    """Kernels of layers with experts by software, architecture, attention and format: the rows of each set."""
    from dse_serving.fitting import fit_sets  # the plug-in of serving, which the numbers came with
    from dse_serving.measured import read_rows, rows_of_sets

    assert table is not None
    fitted = fit_sets(rows_of_sets(read_rows(table.parent.parent)))
    paths = {number: number.path.removeprefix("sets.").rpartition(".") for number in numbers}
    return Refit({number: fitted[name][constant] for number, (name, _, constant) in paths.items()})


REFITTERS: Mapping[str, Refitter] = {
    "operators": operators,
    "rings": collectives,
    "collectives": collectives,
    "experts": experts,
    "nodes": nodes,
    "links": links,
    "stores": stores,
    "software": software,
    "contention": contention,
    "boards": boards,
    "governor": governor,
    "served": served,
    "slowdowns": slowdowns,
    "conccl": conccl,
    "prefills": prefill_rows,
    "host": host,
    "mixtures": mixtures,
    "scans": scans,
    "latency": latency,
    "two_sizes": two_sizes,
    "technology": technology,
    "serving": serving,
    "serving_sets": serving_sets,
    "libraries": libraries,
}
"""Name -> function, in order of dependence: a fit uses numbers of those above it alone."""


def _from_shipped(
    numbers: Sequence[Number], errors: Callable[[Sequence[float]], Sequence[float]]
) -> dict[Number, float]:
    """Numbers that make the squares of some errors least, searched for from their values as they stand."""
    return dict(zip(numbers, least([number.value for number in numbers], errors), strict=True))


def least(values: Sequence[float], errors: Callable[[Sequence[float]], Sequence[float]]) -> list[float]:
    """Values that make the squares of some errors least, searched for from others, all above zero."""
    from scipy.optimize import least_squares

    shipped = np.array(values)
    solved = least_squares(
        lambda logs: np.asarray(errors((shipped * np.exp(logs)).tolist())),
        np.zeros(len(values)),
        diff_step=1e-3,
        xtol=1e-4,
        ftol=1e-6,
        max_nfev=12,
    )
    found: list[float] = (shipped * np.exp(solved.x)).tolist()
    return found


def _by_option(numbers: Sequence[Number]) -> dict[str, list[Number]]:
    options = dict.fromkeys(number.option for number in numbers)
    return {option: [number for number in numbers if number.option == option] for option in options}


def _tree(path: str, value: float) -> dict[str, Any]:
    """A tree with one value, at a dotted path."""
    name, _, below = path.partition(".")
    return {name: _tree(below, value) if below else value}


def _at(tree: Mapping[str, Any], path: str) -> float:
    node: Any = tree
    for name in path.split("."):
        node = node[name]
    return float(node)


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Leave out what a fit tells of rows that it does not take."""
    with contextlib.redirect_stderr(io.StringIO()):
        yield
