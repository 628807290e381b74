"""Dispatch and combine of expert-parallel libraries: what arithmetic says of them, and measured tables."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.expert_exchanges import judged_rows, medians_of, over_sms
from simulators.costs.expert_exchange import RoutedTokens, exchange_seconds, kernel_seconds
from validation.expert_rows import (
    DIRECTIONS,
    NODES,
    fit_all,
    is_fitted,
    node_of,
    predict,
    read_rows,
)

LIBRARIES = {device: node_of(device) for device in NODES}
DEVICES = st.sampled_from(sorted(LIBRARIES))
TABLES = "data/ep_collectives"


def routed(tokens: float, **fields: Any) -> RoutedTokens:
    """Tokens of DeepSeek-V3 among eight GPUs."""
    return RoutedTokens(**{"tokens": tokens, "token_bytes": 7392, "experts": 256, "per_token": 8, "gpus": 8, **fields})


def seconds(device: str, direction: Any, tokens: RoutedTokens) -> float:
    """Time [s] by the library of a device."""
    library = LIBRARIES[device].experts
    assert library is not None
    return float(exchange_seconds(library, direction, tokens))


@given(DEVICES, st.sampled_from(DIRECTIONS), st.integers(1, 10**5), st.integers(1, 10**5))
def test_more_tokens_take_longer(device: str, direction: str, few: int, more: int) -> None:
    few, more = sorted((few, more))
    assert seconds(device, direction, routed(few)) <= seconds(device, direction, routed(more))


@given(DEVICES, st.sampled_from(DIRECTIONS), st.integers(1, 10**5), st.integers(1, 32), st.integers(1, 32))
def test_more_experts_for_each_token_take_longer(device: str, direction: str, tokens: int, few: int, more: int) -> None:
    few, more = sorted((few, more))
    times = [seconds(device, direction, routed(tokens, per_token=picked)) for picked in (few, more)]
    assert times[0] <= times[1] * (1 + 1e-12)


@given(DEVICES, st.sampled_from(DIRECTIONS), st.integers(1, 10**5), st.integers(1, 64), st.integers(1, 64))
def test_more_sms_take_no_longer(device: str, direction: str, tokens: int, few: int, more: int) -> None:
    few, more = sorted((few, more))
    library = LIBRARIES[device].experts
    assert library is not None
    kernel = getattr(dict(library.kernels)["node"], direction)
    assert kernel_seconds(kernel, routed(tokens), num_sms=more) <= kernel_seconds(kernel, routed(tokens), num_sms=few)


def test_published_bandwidths_inside_a_node_come_out_without_a_fit_to_them() -> None:
    """DeepEP on H800, 4,096 tokens of 7168, top 8, 24 SMs: 153 and 158 GB/s (deepseek-ai/DeepEP dd758ca)."""
    library = LIBRARIES["H800"].experts
    assert library is not None
    kernels = dict(library.kernels)["node"]
    for direction, element, published in (("dispatch", 1.03125, 153e9), ("combine", 2.0, 158e9)):
        tokens = routed(4096, token_bytes=element * 7168)
        time = float(kernel_seconds(getattr(kernels, direction), tokens, num_sms=24))
        assert float(tokens.copies) * 4096 * element * 7168 / time == pytest.approx(published, rel=0.15)


# Measured tables


@pytest.mark.nightly
def test_rows_not_fitted_on_are_predicted(shared: Callable[[str], Path]) -> None:
    """Medians of all groups of more than 20 rows; the worst is dispatch across nodes of MI355X."""
    judged = judged_rows(shared(TABLES))
    lines = medians_of(judged).items()
    figures = {
        name: line for name, line in lines if line["count"] > 20 and "4_8_nodes" not in name
    }  # nothing is fitted
    assert len(figures) == 12
    medians = [line["median"] for line in figures.values()]
    assert max(medians) < 0.15
    assert float(np.median(medians)) < 0.08
    assert all(
        value < 0.12 for group, table in over_sms(judged).items() if "nodes" not in group for value in table.values()
    )


@pytest.mark.nightly
def test_constants_are_those_of_a_fit_to_the_rows_that_are_named(shared: Callable[[str], Path]) -> None:
    rows = [row for path in sorted(shared(TABLES).glob("*.csv")) for row in read_rows(path)]
    for device in ("h100_sxm", "mi300x"):
        node = node_of(device)
        assert node.experts is not None
        for group, (kernel, names) in fit_all([row for row in rows if row.device == device], node).items():
            kind, _, direction = group.partition(" ")
            shipped = getattr({str(key): value for key, value in node.experts.kernels.items()}[kind], direction)
            assert dict(node.experts.fitted_on or {})[group] == names
            fitted = [row for row in rows if row.device == device and row.group == group and is_fitted(row)]
            for row in fitted:
                assert predict(shipped, row, node) == pytest.approx(predict(kernel, row, node), rel=0.01)


def test_a_folder_without_tables_is_told(tmp_path: Path) -> None:
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(FileNotFoundError):
        judged_rows(tmp_path)


def test_many_senders_slow_a_nic_but_where_the_network_sprays() -> None:
    """EFA's packets take many ways; on InfiniBand the kernels were measured to slow with the number of nodes."""
    node, sprays = node_of("h100_sxm"), node_of("H100 over EFA")
    assert node.library is not None and not node.library.network_sprays
    assert sprays.library is not None and sprays.library.network_sprays
    times = {}
    for name, of in (("infiniband", node), ("sprays", sprays)):
        library = of.exchange()
        assert library is not None
        for nodes in (2, 8):
            tokens = routed(4096, gpus=8 * nodes, nodes=nodes)
            kernel = library.kernels["network"].dispatch
            times[name, nodes] = float(kernel_seconds(kernel, tokens, num_sms=20)) / float(tokens.sent_bytes)
    assert times["infiniband", 8] > 1.3 * times["infiniband", 2]
    assert times["sprays", 8] < 1.1 * times["sprays", 2]


def test_rates_of_a_table_over_efa_are_judged_by_constants_of_another_network(tmp_path: Path) -> None:
    head = "gpu,gpus,tokens_per_rank,hidden,top_k,experts,operation,dispatch_dtype,backend,us,gb_per_s,note"
    row = "H100,32,4096,7168,8,256,{},bf16,{},,40,{}"
    rows = [
        row.format("dispatch", "DeepEP NVSHMEM", "normal kernels"),
        row.format("combine", "DeepEP NVSHMEM", "low latency"),
        row.format("dispatch", "UCCL", "normal kernels"),
        row.format("NCCL all-to-all", "NCCL", ""),
    ]
    (tmp_path / "efa.csv").write_text("\n".join([head, *rows]))
    ((_, judged),) = judged_rows(tmp_path)
    assert (judged.device, judged.direction, judged.bytes_per_s) == ("H100 over EFA", "dispatch", 40e9)
