"""The memory backend: applications as kernels, what policies do to them, and what is refused."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dse.backend import Batch, check_laws
from dse.errors import ConfigError
from dse.evaluation.calls import call
from dse_memory import engine
from dse_memory.kernels import Application
from dse_memory.measures import partition_camping, programs, simulate
from dse_memory.simulation import lines
from tests.applications import BACKEND, design, metrics, tree
from tests.support import shipped
from tests.test_config import planned
from tests.test_layers import paths_of, unknown_paths

APPLICATIONS = tuple(name for name, tree in shipped("application").items() if "groups" in tree)
POLICIES = tuple(shipped("policy"))
STREAM = {
    "name": "stream",
    "precision": "fp32",
    "tensors": {"x": [1 << 20], "y": [1 << 20]},
    "groups": [{"kernels": [{"kind": "elementwise", "reads": ["x"], "writes": ["y"]}]}],
}


MEMORIES = [name for name, tree in shipped("system").items() if tree["gpu"]["name"] == name and "dram" in tree["gpu"]]
"""Machines of the backend, each GPU once."""
STUDIES = {"cache_policies": "applications=[fw_act]", "cache_sizes": "applications=[fw_act]"}
STUDIES |= {"convolution_patterns": "measured=[]"}


def only(kernel: dict[str, Any], tensors: dict[str, list[int]], precision: str = "fp32") -> dict[str, Any]:
    """An application of one kernel."""
    return {"name": "one", "precision": precision, "tensors": tensors, "groups": [{"kernels": [kernel]}]}


@pytest.mark.slow
@pytest.mark.one_in(6)
@pytest.mark.parametrize("policy", POLICIES)
def test_streaming_moves_each_byte_once_and_no_faster_than_dram_can(policy: str) -> None:
    row = metrics(STREAM, policy, {"run.requests": 1_000_000})
    assert row["dram_bytes"] == 8 << 20
    assert row["dram_write_bytes"] == 4 << 20
    assert row["requests"] == 2 * (1 << 20) * 4 / 64
    assert 0.5 < row["bandwidth_share"] < 1
    assert row["simulated"] == 1


@pytest.mark.one_in(3)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("application", ["fw_soft", "cm", "fw_lstm"])
def test_a_simulation_is_the_same_to_the_bit_when_it_runs_again(application: str, policy: str) -> None:
    assert metrics(application, policy) == metrics(application, policy)


@pytest.mark.slow
@pytest.mark.one_in(4)
@pytest.mark.parametrize("application", APPLICATIONS)
def test_what_is_read_from_memory_is_at_least_what_is_touched_and_caching_reads_no_more(application: str) -> None:
    plain, cached = (metrics(application, policy, {"run.requests": 1_000_000}) for policy in ("uncached", "cache_r"))
    assert cached["dram_read_bytes"] <= 1.02 * plain["dram_read_bytes"]
    assert plain["l1_hit_rate"] == 0
    tree = shipped("application")[application]
    kernels = [kernel for group in tree["groups"] for kernel in group["kernels"]]
    for names, moved in (("reads", "dram_read_bytes"), ("writes", "dram_write_bytes")):
        tensors = {"reads": "abxw", "writes": "cy"}[names] if application in ("sgemm", "dgemm", "fw_fc") else ""
        touched = {
            name for kernel in kernels for name in (*kernel.get(names, ()), *(kernel.get(tensor) for tensor in tensors))
        }
        sizes = [tree["tensors"][name] for name in touched - {None}]
        assert sizes
        element = 8 if tree["precision"] == "fp64" else 4
        assert plain[moved] >= 0.98 * element * sum(float(np.prod(size)) for size in sizes)


def test_a_strided_kernel_camps_on_one_channel_unless_addresses_are_hashed() -> None:
    """Columns of a matrix whose row is the channels' stride times its chunk lie on one channel."""
    columns = only(
        {"kind": "strided", "reads": ["x"], "writes": ["y"], "tile": 16}, {"x": [1024, 65536], "y": [65536, 1024]}
    )
    by_hash = {
        name: metrics(columns, "uncached", {"system.gpu.mapping.channel_hash": name})["camping"]
        for name in ("none", "xor", "polynomial")
    }
    assert by_hash["none"] > 2
    assert by_hash["xor"] < 1.5
    assert by_hash["polynomial"] < 1.5


@pytest.mark.slow
@given(
    st.lists(st.lists(st.integers(0, 50), min_size=4, max_size=4), min_size=1, max_size=8).filter(
        lambda rows: np.sum(rows) > 0
    )
)
def test_camping_is_one_where_channels_are_even_and_at_most_their_number(rows: list[list[int]]) -> None:
    camping = partition_camping(np.array(rows))
    assert 1 - 1e-12 <= camping <= 4 + 1e-12
    assert partition_camping(np.full((3, 4), 7)) == 1


@settings(max_examples=25)
@given(
    m=st.integers(1, 200), n=st.integers(1, 200), k=st.integers(1, 100), batch=st.integers(1, 3), across=st.booleans()
)
def test_a_product_touches_all_of_its_operands_and_writes_its_result_once(
    m: int, n: int, k: int, batch: int, across: bool
) -> None:
    kernel = {
        "kind": "gemm",
        "a": "a",
        "b": "b",
        "c": "c",
        "m": m,
        "n": n,
        "k": k,
        "batch": batch,
        "transposed_a": across,
        "transposed_b": not across,
    }
    sizes = {"a": [batch, m, k], "b": [batch, k, n], "c": [batch, m, n]}
    simulation = simulate(design(only(kernel, sizes), "cache_rw", {"system.gpu.l2.bytes": 1 << 24}))
    moved = simulation.total("totals")
    touched = sum(-(-int(np.prod(size)) * 4 // 64) for size in sizes.values())
    assert moved[engine.READS] + moved[engine.WRITES] == touched
    assert moved[engine.WRITES] == -(-batch * m * n * 4 // 64)


@pytest.mark.slow
@pytest.mark.one_in(4)
@pytest.mark.parametrize("application", APPLICATIONS)
def test_a_sample_of_a_kernel_tells_what_all_of_it_would_ask_for(application: str) -> None:
    """Requests: fewer by a tenth at the edges of tensors; more where rows, or runs of a product, begin amid a line."""
    row = metrics(application, "uncached", {"run.repeats": 1})
    requests_of_all = 0.0
    given_, built = design(application, "uncached"), programs(design(application, "uncached"))
    assert isinstance(given_.application, Application)
    for group, kernels in zip(given_.application.groups, built, strict=True):
        requests_of_all += group.repeat * sum(
            kernel.workgroups * lines(kernel, given_.system.gpu.line_bytes) for kernel in kernels
        )
    assert 0.88 * requests_of_all <= row["requests"] <= (2 if application == "fw_fc" else 1.06) * requests_of_all


@pytest.mark.slow
def test_sampled_kernels_take_as_long_as_whole_ones() -> None:
    long = {**STREAM, "tensors": {"x": [1 << 26], "y": [1 << 26]}}
    sample, full = (metrics(long, "cache_rw", {"run.requests": most}) for most in (2_500_000, 16_000_000))
    assert sample["simulated"] < 0.3 < full["simulated"] == 1
    for name in ("time_s", "dram_bytes", "row_hit_rate"):
        assert sample[name] == pytest.approx(full[name], rel=0.03)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"system.gpu.l2.bytes": 3 << 20}, "system.gpu.l2.bytes"),
        ({"system.gpu.l1.bytes": 3000}, "system.gpu.l1.bytes"),
        ({"system.gpu.dram.banks": 12}, "system.gpu.dram.banks"),
        (
            {
                "system.gpu.mapping.channel_hash": "polynomial",
                "system.gpu.dram.channels": 1,
                "system.gpu.l2.bytes": 1 << 18,
            },
            "channel_hash",
        ),
        ({"policy.predictor.sampled_sets": 512}, "sampled_sets"),
        ({"application.precision": "fp16"}, "flop_per_s"),
    ],
)
def test_a_design_that_cannot_be_built_is_infeasible_and_says_why(changes: dict[str, Any], message: str) -> None:
    (results,) = BACKEND.evaluate([Batch(design("fw_soft", "combined", changes))])
    assert results[0].status == "infeasible"
    assert message in results[0].reason


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"application.groups": [{"kernels": [{"kind": "elementwise", "reads": ["z"], "writes": ["y"]}]}]}, "touch z"),
        ({"system.gpu.line_bytes": 48}, "power of two"),
        ({"system.gpu.dram.bytes_per_s": "512 GHz"}, "wrong dimension"),
        ({"policy.loads": "maybe"}, "policy.loads"),
    ],
)
def test_a_configuration_that_means_nothing_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        design("fw_soft", "combined", changes)
    assert message in str(error.value)


def test_sections_of_other_backends_are_refused_with_the_way_out() -> None:
    wrong = {**tree("fw_soft"), "applications": "fw_soft", "schedule": {}}
    with pytest.raises(ConfigError) as error:
        BACKEND.sections(wrong)
    for part in ("applications=[fw_act,sgemm]", "schedule"):
        assert part in str(error.value)


def test_a_machine_without_caches_is_refused_by_the_parts_that_it_lacks() -> None:
    with pytest.raises(ConfigError, match=r"system.gpu.dram: is missing .*dse machine list"):
        design("fw_soft", "combined", system="mi100")


def test_a_replayed_design_shows_its_kernels_one_after_another() -> None:
    point = design("cm", "combined", {"system.gpu.launch_s": 1e-6})
    intervals = BACKEND.replay(point).intervals
    ends = [interval.finish_s for interval in intervals]
    assert ends == sorted(ends)
    assert ends[-1] == pytest.approx(metrics("cm", "combined", {"system.gpu.launch_s": 1e-6})["time_s"])
    assert {interval.kind for interval in intervals} == {"launch", "gemm"}


@pytest.mark.slow
@pytest.mark.parametrize("study", STUDIES)
def test_a_study_is_planned_obeys_its_laws_and_shows_what_there_is(study: str) -> None:
    planned_study = planned(f"study={study}", STUDIES[study])
    block = next(next(iter(planned_study.spaces.values())).blocks(4))
    assert block.batch is not None
    (results,) = call(planned_study.spec, [block.batch])
    assert results.ok.all()
    assert check_laws(results, BACKEND.laws) is results
    paths = {path for name in ("fw_act", "conv_3x3") for path in paths_of(design(name, "combined").model_dump(), "")}
    wanted = planned_study.settings.study.model_dump()
    assert unknown_paths(wanted, paths, {**BACKEND.metrics, **BACKEND.relations}) == set()


@pytest.mark.slow
@pytest.mark.one_in(10)
@pytest.mark.parametrize("words", list(zip_longest(shipped("application"), POLICIES, MEMORIES)), ids=str)
def test_every_option_can_be_named_on_the_command_line(words: tuple[str | None, ...]) -> None:
    named = [f"{group}={name}" for group, name in zip(("application", "policy", "system"), words, strict=True) if name]
    assert planned("study=cache_policies", "applications=null", *named).spaces
