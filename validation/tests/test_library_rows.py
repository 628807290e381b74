"""Measured collectives by software of today, against `conf/collective`, whose constants few rows gave."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import libraries
from simulators.costs.collective_software import all_software, software_of
from simulators.costs.other_software import ratio_error
from validation.library_rows import XLA_GPUS, call_of, counts, read_libraries, read_xla, rows_fitted_by

MOST_FITTED = 6  # rows of a source


def test_times_of_libraries_and_which_is_the_fastest(shared: Callable[[str], Path]) -> None:
    figures = libraries.against_libraries(shared("data"))
    assert figures["implementation_rows"] > 100
    assert figures["implementation_median"] <= 0.15
    assert figures["own_kernels_median"] <= 0.10
    assert figures["fastest_right"] >= 0.85 and figures["fastest_right_from_256_kib"] >= 0.85
    assert figures["ratio_p90"] == pytest.approx(ratio_error(), rel=0.01)  # the shipped one
    assert figures["largest_loss_of_a_choice"] <= 0.1


def test_collectives_that_xla_calls(shared: Callable[[str], Path]) -> None:
    figures = libraries.against_xla(shared("data"))
    assert figures["xla_rows"] > 500
    assert figures["xla_collectives_median"] <= 0.12
    assert all(median <= 0.12 for median in figures["xla_by_gpu"].values())


def test_gemms_with_their_collective(shared: Callable[[str], Path]) -> None:
    figures = libraries.against_gemms(shared("data"))
    assert figures["gemm_with_collective_rows"] >= 15
    assert figures["gemm_with_collective_median"] <= 0.12
    assert figures["gemm_with_collective_sign"] >= 0.9


def test_exchanges_of_experts_over_efa(shared: Callable[[str], Path]) -> None:
    figures = libraries.against_exchanges(shared("data"))
    assert figures["moe_dispatch_rows"] >= 4
    assert figures["moe_dispatch_median"] <= 0.2


def test_constants_were_fitted_on_few_rows_of_each_source(shared: Callable[[str], Path]) -> None:
    data, by_source = shared("data"), Counter[str]()
    for software in all_software():
        fitted = list(rows_fitted_by(data, software))
        by_source.update(str(row.cells.get("source", row.table)) for row, _ in fitted)
        for row, fits in fitted:
            assert row.call is not None and row.is_fitted() and fits
            assert software_of(row.call.name.partition(":")[0]) is software
    assert by_source and max(by_source.values()) <= MOST_FITTED, by_source
    assert not any(row.is_fitted() for row in read_xla(data, "mi300x"))


def test_rows_that_are_not_judged_say_why(shared: Callable[[str], Path]) -> None:
    rows = read_libraries(shared("data"))
    unknown = {row.label: row.why_not for row in rows if row.call is None}
    assert set(unknown) == {"NCCL gather to rank 0", "symmetric-memory scatter to rank 0", "NCCL"}
    assert all(unknown.values())


def test_floors_of_xla_are_taken_out_of_rows_of_mi300x_alone(shared: Callable[[str], Path]) -> None:
    for gpu in XLA_GPUS:
        rows = [row for row in read_xla(shared("data"), gpu) if counts(row)]
        lower = [row.seconds < 1e-6 * row.cells["us"] - 1e-12 for row in rows]
        assert all(lower) if gpu == "mi300x" else not any(lower)


@pytest.mark.parametrize(
    "label, name, ctas",
    [
        ("NCCL", "nccl", None),
        ("NCCL 2.29.7", "nccl", None),
        ("NCCL symmetric TmaLD, 32 CTAs", "nccl_symmetric", 32),
        ("quick reduce, fp16 on the wire", "quick_reduce:fp16", None),
        ("aiter custom", "aiter_custom", None),
    ],
)
def test_names_of_a_table_are_software(label: str, name: str, ctas: int | None) -> None:
    call = call_of(label)
    assert call is not None and (call.name, call.num_ctas) == (name, ctas)
    assert call_of("v4: copy engine into NVLS multicast") is None
