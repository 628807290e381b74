"""Operator costs against measured GPUs: errors beside those of simpler models, and claims about hardware."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dse.config.options import conf_dir
from dse.plots import Draw, FigureSheet, Frame
from dse.plots import predictions as charts
from dse.plots.labels import label
from dse.results.claims import ClaimResult
from dse.results.run_folder import FinishedRun
from dse.space import get_path
from dse_calibration.backend import rows_of, tables
from dse_calibration.calibrate import large_median, table_of, told_errors
from dse_calibration.measurements import FLOAT_BYTES
from dse_calibration.predictions import MODELS, Errors, PredictedRows, predicted_by
from simulators.costs.collective import Group, collective_cost
from simulators.hardware.device import Device
from simulators.hardware.machine import tree_of
from simulators.hardware.parts import CopyTimes
from simulators.hardware.schedule_system import ScheduleSystem
from studies.common.facts import read_rows
from studies.plain import Plain

if TYPE_CHECKING:
    import pandas as pd

Floats = NDArray[np.float64]
_OVERLAP_SYSTEM = "mi300x_8"  # whose collectives and copies the hardware claims are about
_LOW_LATENCY = 4.0  # factor by which the protocol for short messages lowers latency (`simulators.costs.collective`)
_CHANNELS = (4, 8, 16, 32, 64)
_COPIES = {"1KB": 2**10, "64KB": 2**16, "1MB": 2**20, "16MB": 2**24}  # binary, as the published sizes are
_REDUCED = {"1MB": 1e6, "16MB": 16e6, "256MB": 256e6, "16GB": 16e9}  # decimal, as the published sizes are
_KINDS = {"gemm": "GEMM", "conv": "convolution", "recurrent": "recurrent", "allreduce": "all-reduce"}
_INPUT = "an input, no prediction"
_OWN_CONSTANT = "the constant itself, in the system's file"
_OTHER_COLLECTIVE = "the rate of a CU was measured on an all-reduce with two channels, elsewhere (ROCm/tritonBLAS)"


class Operators(Plain):
    """Claims, error tables and figures, from the measured rows of a run's devices."""

    columns = (
        "table.device",
        "table.kind",
        "table.precision",
    )
    allows = ("devices", "study.data_dir")

    def further(self, run: FinishedRun) -> Mapping[str, ClaimResult]:
        """Findings of every claim: on MI300X from its system file, on measured GEMMs from the tables of the run."""
        return {**_mi300x(), **_measured_gemms(_predict_rows(run)["fitted"])}

    def extras(self, run: FinishedRun) -> Iterator[tuple[str, Any]]:
        """`errors.json`, every row with its predictions, and the figures."""
        predicted = _predict_rows(run)
        rows = _table(predicted["fitted"])
        yield "predictions", rows
        yield "errors", _errors(predicted)
        yield "predicted_against_measured", partial(_scatter, rows)
        reduced = _bandwidths(predicted["fitted"])
        if len(reduced):
            yield "allreduce", partial(_allreduce, reduced)

    def figures(self, table: pd.DataFrame, timelines: pd.DataFrame) -> Iterator[tuple[str, Draw]]:
        """Errors of each model on each device."""
        yield "errors_by_model", partial(_errors_by_model, table[table["status"] == "ok"])


def _errors_by_model(ok: pd.DataFrame) -> FigureSheet:
    """Median signed errors of each model on each device."""
    names = ok["scenario"].str.rsplit(n=1, expand=True)  # `<device> <kind>`
    rows = ok.assign(device=names[0], kind=names[1].map(_KINDS), model=ok["predict.model"])
    rows = rows.assign(median=ok["median_error"], p90=ok["p90_error"], signed=ok["signed_error"])
    medians = 100 * rows.groupby("model", sort=False)["median"].median()
    title = "Median error of operators: " + ", ".join(
        f"{value:.0f} % ({label(str(name))})" for name, value in medians.items()
    )
    return charts.errors(rows, MODELS, frame=Frame(title, "of the medians by device and kind"))


def _scatter(rows: pd.DataFrame) -> FigureSheet:
    """Predicted against measured times of all rows."""
    sets = rows["device"].where(rows["precision"] == "fp32", rows["device"] + " " + rows["precision"])
    error = charts.median_error(rows)
    off = "all rows were fitted on" if error is None else f"{100 * error:.0f} % off in the median"
    title = f"Fitted costs of single operators are {off}"
    return charts.scatter(
        rows.assign(device=sets, kind=rows["kind"].map(_KINDS)), by="device", frame=Frame(title, "fp32 unless said")
    )


def _allreduce(reduced: pd.DataFrame) -> FigureSheet:
    """Bus bandwidth of all-reduces over payload."""
    unseen = reduced[~reduced["fitted"].astype(bool)]  # rows that were fitted on would flatter the model
    error = (unseen["predicted_bytes_per_s"] / unseen["measured_bytes_per_s"] - 1).abs().median()
    title = f"Bus bandwidth of all-reduces is predicted to {100 * error:.0f} % in the median"
    return charts.bandwidths(reduced, frame=Frame(title))


def _predict_rows(run: FinishedRun) -> dict[str, dict[str, list[PredictedRows]]]:
    """Predictions of the measured rows: model -> device -> rows."""
    folder = str(get_path(run.config, "study.data_dir") or conf_dir() / "data")
    devices = [Device.of(tree_of(name), name) for name in run.config["devices"]]
    measured = tables(folder)
    return {
        model: {
            device.name: [
                prediction
                for rows in rows_of(device, measured)
                if (prediction := predicted_by(model, device, rows)) is not None
            ]
            for device in devices
        }
        for model in MODELS
    }


def _table(predicted: Mapping[str, Sequence[PredictedRows]]) -> pd.DataFrame:
    import pandas as pd

    parts = [table_of(predictions, name) for name, predictions in predicted.items() if predictions]
    return pd.concat(parts, ignore_index=True)


def _errors(predicted: Mapping[str, Mapping[str, Sequence[PredictedRows]]]) -> dict[str, Any]:
    """Content of `errors.json`: the worst device by kind, and errors by device, precision, kind and model.

    The worst device is taken at fp32, at which all were measured; the worst at any precision is written beside it.
    """
    devices: dict[str, Any] = {}
    checked: list[tuple[str, str, Errors]] = []
    for model, by_device in predicted.items():
        for name, predictions in by_device.items():
            for prediction in predictions:
                errors, rows = prediction.errors, prediction.rows
                place = devices.setdefault(name, {}).setdefault(rows.precision, {}).setdefault(rows.kind, {})
                place[model] = asdict(errors) if errors else None
                # simpler models are for comparison
                checked += [(rows.kind, rows.precision, errors)] if errors and model == "fitted" else []
    large = {name: large_median(predictions) for name, predictions in predicted["fitted"].items()}
    gemms = [errors.log_correlation for kind, _, errors in checked if kind == "gemm"]
    anywhere = told_errors([(kind, "", errors) for kind, _, errors in checked])
    return {
        **{f"{name}_worst_device": value for name, value in told_errors(checked).items()},
        "gemm_log_correlation_worst_device": min(gemms, default=None),
        "allreduce_median_1mb": max((median for median in large.values() if median is not None), default=None),
        **{f"{name}_worst_precision": value for name, value in anywhere.items()},
        "allreduce_median_1mb_by_device": large,
        "allreduce_by_payload": _by_payload(predicted["fitted"]),
        "devices": devices,
    }


def _by_payload(predicted: Mapping[str, Sequence[PredictedRows]]) -> list[dict[str, Any]]:
    """Median and largest error of all-reduces by payload, over devices and numbers of GPUs that were not fitted on."""
    rows = _bandwidths(predicted)
    if rows.empty:
        return []
    rows = rows[~rows["fitted"]]
    by_payload = (rows["predicted_s"] / rows["measured_s"] - 1).abs().groupby(rows["payload_bytes"])
    return [
        {
            "payload_bytes": float(payload),
            "count": len(error),
            "median": float(error.median()),
            "max": float(error.max()),
        }
        for payload, error in by_payload
    ]


def _bandwidths(predicted: Mapping[str, Sequence[PredictedRows]]) -> pd.DataFrame:
    """Table of all-reduces, a row each: times, and bus bandwidths 2 (n - 1) / n S / t."""
    import pandas as pd

    parts = []
    for name, predictions in predicted.items():
        for prediction in predictions:
            if prediction.rows.kind == "allreduce":
                gpus, payload = prediction.rows.shape["gpus"], FLOAT_BYTES * prediction.rows.shape["floats"]
                # bus bandwidth as nccl-tests define it: comparable over numbers of GPUs
                bus = 2 * (gpus - 1) / gpus * payload
                columns = {"device": name, "gpus": gpus, "payload_bytes": payload, "fitted": prediction.fitted}
                measured, ours = prediction.rows.seconds[:, 0], prediction.seconds[:, 0]
                times = {"measured_s": measured, "predicted_s": ours}
                rates = {"measured_bytes_per_s": bus / measured, "predicted_bytes_per_s": bus / ours}
                parts.append(pd.DataFrame({**columns, **times, **rates}))
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()


def _mi300x() -> dict[str, ClaimResult]:
    """Judge the costs of collectives for 8 x MI300X."""
    system = ScheduleSystem.of(tree_of(_OVERLAP_SYSTEM))
    gpu, node = system.gpu, system.node
    peers = node.num_gpus - 1
    findings: dict[str, ClaimResult] = {}
    floor = gpu.cu_copy.setup_s * _LOW_LATENCY / 2  # two steps, each with the latency floor of short messages
    group = Group(node.num_gpus, peers * node.link_bytes_per_s * gpu.cu_copy.link_efficiency, floor)
    for name, payload in _REDUCED.items():
        cost = collective_cost("all_reduce", "direct", payload, group)
        rests = {"1MB": "rests on the floor of short messages", "16GB": "rests on the rate at 16 GB"}.get(name, "")
        ours = float(cost.wire_bytes / cost.seconds / 1e9)
        findings[f"hardware.mi300x_allreduce_{name}"] = _input_finding(ours, rests) if rests else ClaimResult(ours)
    cap = _conditions()["mi300x_all_gather_link_bytes_per_s"]
    capped = Group(node.num_gpus, peers * cap, 0.0)
    text = f"a CU a channel, on links of {cap / 1e9:g} GB/s"
    for channels in _CHANNELS:
        # the rate of a CU falls with the links in the same measurement
        moved = capped.by_cus(channels, gpu.cu_copy.bytes_per_s_per_cu * cap / node.link_bytes_per_s)
        rate = float(np.asarray(moved.bytes_per_s)) / peers / 1e9
        findings[f"hardware.mi300x_ag_perlink_{channels}ch"] = ClaimResult(rate, text, _OTHER_COLLECTIVE)
    assert gpu.dma.phases is not None
    for name, size in _COPIES.items():
        shares = _copy_phases(size, gpu.dma.phases, node.link_bytes_per_s).shares
        split = tuple(float(100 * share) for share in shares)
        derived = _input_finding(split, "the phases were derived from this row")
        findings[f"hardware.dma_phase_{name}"] = derived if name == "1KB" else ClaimResult(split)
    findings["hardware.mi300x_link"] = _input_finding(node.link_bytes_per_s / 1e9, _OWN_CONSTANT)
    sustained = gpu.num_cus * gpu.matrix_flop_per_s_per_cu / 1e12
    text = f"{_OWN_CONSTANT}; {sustained:.3f} rounded as it was published"
    findings["hardware.mi300x_bf16_sustained"] = _input_finding(float(round(sustained)), text)
    return findings


def _input_finding(ours: float | tuple[float, ...], why: str) -> ClaimResult:
    """Finding that is no prediction: the published value, or a constant taken from it, is an input."""
    return ClaimResult(ours, f"{_INPUT}: {why}", basis="input")


def _conditions() -> dict[str, float]:
    """Conditions of the measurements that are claims, by name."""
    return {row["name"]: float(row["value"]) for row in read_rows("conditions")}


def _measured_gemms(predicted: Mapping[str, Sequence[PredictedRows]]) -> dict[str, ClaimResult]:
    """Judge rates of measured GEMMs, our errors, and scaling from one point."""
    gemms = {
        prediction.rows.device: prediction
        for predictions in predicted.values()
        for prediction in predictions
        if prediction.rows.kind == "gemm" and prediction.rows.precision == "fp32"
    }
    return {
        "data.vegafe_gemm_large_rate": _large_rate(gemms.get("AMD_VegaFE")),
        "data.vegafe_gemm_model_mdape": _plain_error(gemms.get("AMD_VegaFE")),
        "data.scaling_vegafe": _scaling_error(gemms.get("AMD_VegaFE")),
        "data.scaling_p100": _scaling_error(gemms.get("NV_P100")),
    }


_ABSENT = ClaimResult(None, "the tables hold too few such rows: study.data_dir=<folder of the full tables>")
_FEW = 30  # rows; with fewer, a claim about a whole table is not judged
_LARGE_N, _WIDE_N = 1000, 24_000


def _large_rate(gemms: PredictedRows | None) -> ClaimResult:
    """Mean predicted rate [TFLOP/s] of GEMMs with a large n and A as it is stored, not fitted on."""
    if gemms is None:
        return _ABSENT
    large = (gemms.rows.shape["n"] >= _LARGE_N) & (gemms.rows.shape["ta"] == 0) & ~gemms.fitted
    rates = (gemms.flop / gemms.seconds)[large, 0] / 1e12
    measured = (gemms.flop / gemms.rows.seconds)[large, 0] / 1e12
    if len(rates) < _FEW:
        return _ABSENT
    return ClaimResult(float(rates.mean()), f"over {len(rates)} GEMMs, measured {measured.mean():.2f}")


def _plain_error(gemms: PredictedRows | None) -> ClaimResult:
    """Median error [%] on GEMMs whose A is not transposed, not fitted on."""
    plain = None if gemms is None else (gemms.rows.shape["ta"] == 0) & ~gemms.fitted
    if gemms is None or plain is None or plain.sum() < _FEW:
        return _ABSENT
    errors = np.abs(gemms.seconds[plain, 0] / gemms.rows.seconds[plain, 0] - 1)
    return ClaimResult(100 * float(np.median(errors)), f"our model on {len(errors)} GEMMs not fitted on")


def _scaling_error(gemms: PredictedRows | None) -> ClaimResult:
    """Mean error [%] of scaling measured times (3 H, N, H) with H^2 N from one of them, averaged over its choice."""
    if gemms is None:
        return _ABSENT
    shape = gemms.rows.shape
    # shapes of recurrent layers: weights of three gates, a wide batch of tokens
    chosen = (shape["m"] == 3 * shape["k"]) & (shape["n"] >= _WIDE_N) & (shape["ta"] == 0)
    rate = (gemms.flop / gemms.rows.seconds)[chosen, 0]
    if len(rate) < 8:
        return _ABSENT
    off = np.abs(rate[None, :] / rate[:, None] - 1)  # each as the point scaled from, each as the one scaled to
    errors = 100 * off.sum(axis=1) / (len(rate) - 1)  # without itself
    spread = f"{errors.min():.1f} to {errors.max():.1f} %, depending on the point scaled from"
    text = f"measured times alone, no model: {len(rate)} GEMMs; {spread}"
    return ClaimResult(
        float(errors.mean()), text, cause="the source does not give the point that the published value is scaled from"
    )


@dataclass(frozen=True)
class _CopyPhases:
    """Time [s] of the phases of one copy by a DMA engine; arrays over sizes."""

    control_s: Floats
    schedule_s: Floats
    copy_s: Floats
    sync_s: Floats

    @property
    def seconds(self) -> Floats:
        """Total time [s]."""
        return self.control_s + self.schedule_s + self.copy_s + self.sync_s

    @property
    def shares(self) -> Floats:
        """Share of each phase, [..., 4], in the order of the fields."""
        parts = np.stack(np.broadcast_arrays(self.control_s, self.schedule_s, self.copy_s, self.sync_s), axis=-1)
        return np.asarray(parts / self.seconds[..., None])


def _copy_phases(size_bytes: ArrayLike, times: CopyTimes, link_bytes_per_s: ArrayLike) -> _CopyPhases:
    """Phases of copies by size: all phases but the copy itself take the same time for all sizes (derived)."""
    size = np.asarray(size_bytes, float)
    copy = times.copy_s + size / np.asarray(link_bytes_per_s)  # first byte
    fixed = (np.full(size.shape, value) for value in (times.control_s, times.schedule_s, times.sync_s))
    control, schedule, sync = fixed
    return _CopyPhases(control, schedule, copy, sync)


STUDY = Operators()
