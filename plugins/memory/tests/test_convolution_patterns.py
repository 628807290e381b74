"""LeNet and convolutions kernel by kernel: networks with an algorithm, phases, layers; `study=convolution_patterns`."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml

from dse.cli import main
from dse.errors import ConfigError
from dse_memory.convolution_patterns.convolutions import against, errors
from dse_memory.convolutions import ConvolutionPass, kernels, layers, written_out
from dse_memory.kernels import Application
from dse_memory.measured import load_measured_systems, scenarios
from dse_memory.measures import simulate
from dse_memory.phases import cuts, phases, shares
from tests.applications import BACKEND, design, metrics
from tests.support import shipped

TABLE = """device,precision,op,w,h,c,n,k,r,s,pad_h,pad_w,stride_v,stride_h,fwd_ms,bwd_data_ms,bwd_filter_ms,algo
NV_P100,fp32,conv,32,32,64,16,64,3,3,1,1,1,1,0.2,0.2,0.4,WINOGRAD
"""
LENET = shipped("application")["lenet"]
CUS = 28


def network(**changes: Any) -> dict[str, Any]:
    """Two layers, the second of a stride, with keys changed."""
    kernel = {"kind": "convolution"}
    tree = {
        "name": "two", "precision": "fp32", "algorithm": "implicit_gemm",
        "tensors": {"x": [2, 3, 16, 16], "w": [8, 3, 3, 3], "y": [2, 8, 16, 16], "v": [4, 8, 5, 5], "z": [2, 4, 6, 6]},
        "groups": [{"kernels": [{**kernel, "x": "x", "w": "w", "y": "y", "pad": [1, 1]},
                                {**kernel, "x": "y", "w": "v", "y": "z", "stride": [2, 2]}]}],
    }  # fmt: skip
    return {**tree, **changes}


# Networks


def test_lenet_multiplies_as_often_as_its_layers_say() -> None:
    """arXiv:1811.08933's network: 0.29 M, 1.6 M, 0.40 M and 5 k multiplications."""
    application = Application.model_validate(LENET)
    assert [layer.flop / 2 for layer in layers(application)] == [288_000, 1_600_000]
    products = [kernel for kernel in application.groups[0].kernels if kernel.kind == "gemm"]
    assert [kernel.m * kernel.n * kernel.k for kernel in products] == [400_000, 5_000]


@pytest.mark.parametrize("algorithm", ["gemm", "implicit_gemm", "fft", "fft_tiling"])
def test_a_layer_in_a_network_is_the_layer_alone(algorithm: str) -> None:
    """The same kernels on tensors of other names, and so the same time where nothing comes before it."""
    tree_of_network = network(algorithm=algorithm)
    tree_of_network["groups"] = [{"kernels": tree_of_network["groups"][0]["kernels"][:1]}]
    alone = ConvolutionPass(name="y", n=2, c=3, h=16, w=16, k=8, r=3, s=3, pad_h=1, pad_w=1, algorithm=algorithm)
    inside, outside = written_out(Application.model_validate(tree_of_network), CUS), kernels(alone, CUS)
    pairs = zip(inside.groups[0].kernels, outside.groups[0].kernels, strict=True)
    names = {"x", "w", "y", "a", "b", "c", "reads", "writes"}
    assert all(ours.model_dump(exclude=names) == theirs.model_dump(exclude=names) for ours, theirs in pairs)
    sizes = sorted(math.prod(size) for size in outside.tensors.values())
    both = [metrics(tree, "cache_rw", system="gtx_1080_ti") for tree in (tree_of_network, outside.model_dump())]
    assert sorted(math.prod(inside.tensors[name]) for name in inside.tensors if name not in ("v", "z")) == sizes
    assert both[0]["requests"] == both[1]["requests"]
    assert both[0]["time_s"] == pytest.approx(both[1]["time_s"], rel=0.02)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"algorithm": None}, "algorithm belongs to kernels of kind convolution"),
        ({"tensors": {**network()["tensors"], "w": [8, 4, 3, 3]}}, "w has 4 channels, x has 3"),
        ({"tensors": {**network()["tensors"], "y": [2, 8, 14, 14]}}, r"16, 16\], and y is \[2, 8, 14, 14\]"),
        ({"tensors": {**network()["tensors"], "w": [8, 3, 9]}}, "have four sizes"),
        ({"tensors": {**network()["tensors"], "x": [9000, 3, 16, 16]}}, "up to 4096"),
    ],
    ids=["algorithm", "channels", "result", "sizes", "large"],
)  # fmt: skip
def test_sizes_that_make_no_convolution_are_refused(changes: Mapping[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        design(network(**changes))


def test_rows_and_columns_of_a_layer_are_not_mixed_up() -> None:
    kernel = {"kind": "convolution", "x": "x", "w": "w", "y": "y", "stride": [2, 1], "pad": [1, 3]}
    tensors = {"x": [2, 3, 20, 11], "w": [8, 3, 4, 5], "y": [2, 8, 10, 13]}
    (convolution,) = layers(Application.model_validate(network(tensors=tensors, groups=[{"kernels": [kernel]}])))
    assert (
        convolution.h,
        convolution.w,
        convolution.r,
        convolution.s,
        convolution.pad_h,
        convolution.pad_w,
        convolution.stride_v,
        convolution.stride_h,
    ) == (20, 11, 4, 5, 1, 3, 2, 1)
    assert (convolution.oh, convolution.ow) == (10, 13)


# Phases


def test_stretches_are_found_where_levels_change() -> None:
    random = np.random.default_rng(3)
    levels = np.repeat([[0.1, 0.9, 0.2], [0.8, 0.1, 0.9], [0.1, 0.9, 0.5]], [60, 100, 40], axis=0)
    places = cuts(levels + random.normal(0, 0.03, levels.shape))
    assert len(places) == 3
    assert np.abs(np.array(places) - [60, 160, 200]).max() <= 1


def test_phases_of_a_run_follow_one_another_and_their_means_are_those_of_the_run() -> None:
    conv = design("conv_3x3", "cache_rw", {"application.algorithm": "winograd_nonfused"}, system="gtx_1050")
    activity = simulate(conv).machine.activity()
    stretches = phases(activity, conv.system)
    assert len(stretches) >= 3
    assert stretches[0].begin_s == 0
    assert all(before.end_s == after.begin_s for before, after in itertools.pairwise(stretches))
    weighted = sum(
        (stretch.end_s - stretch.begin_s) * np.array([stretch.requests, stretch.computing, stretch.bandwidth])
        for stretch in stretches
    )
    np.testing.assert_allclose(weighted / stretches[-1].end_s, shares(activity, conv.system).mean(axis=0))
    transform = max(stretches, key=lambda phase: phase.bandwidth)
    product = max(stretches, key=lambda phase: phase.computing)
    assert transform.bandwidth > 0.7 > 0.5 > product.bandwidth
    assert product.computing > 0.8 > 0.2 > transform.computing


@pytest.mark.slow
def test_shares_add_up_to_what_was_asked_computed_and_moved() -> None:
    conv = design("conv_5x5", "cache_rw", {"application.algorithm": "gemm"}, system="gtx_1080_ti")
    simulation = simulate(conv)
    activity, gpu = simulation.machine.activity(), conv.system.gpu
    seconds = activity.seconds * len(activity.channels)
    requests, computing, bandwidth = shares(activity, conv.system).mean(axis=0)
    costs = [cost for cost, _ in simulation.costs]
    assert requests * seconds / gpu.cycle_s * gpu.num_cus == pytest.approx(activity.requests.sum())
    assert bandwidth * seconds * conv.system.gpu.dram.bytes_per_s == pytest.approx(activity.channels.sum() * 64)
    assert computing * seconds * gpu.num_cus == pytest.approx(sum(cost.busy_s * cost.share for cost in costs), rel=0.01)


# Measured layers


def test_every_measured_convolution_is_a_scenario() -> None:
    (measured,) = load_measured_systems(["p100"], None)
    trees = scenarios(["p100"], None)
    assert len(trees) == measured.rows.size == len(set(measured.rows.names))
    for row in range(measured.rows.size):
        tree = trees[measured.scenario(row)]
        layer = ConvolutionPass.model_validate(tree["application"])
        assert f"{layer.w}x{layer.h}x{layer.c} n{layer.n} k{layer.k} {layer.r}x{layer.s}" in measured.scenario(row)
        settings = {"policy": shipped("policy")["cache_rw"], "run": {"requests": 1000, "repeats": 1}}
        assert BACKEND.problems(BACKEND.design({**tree, **settings})) == []
    assert measured.fitted == set(shipped("system")["p100"]["gpu"]["fitted_on"]["fp32"]["conv"])
    assert 0 < len(measured.fitted & set(measured.rows.names)) < measured.rows.size


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["gem5_gcn3"], r"system.gpu.peak_flop_per_s|peak_flop_per_s: is missing"),
        (["p100", "p100"], "names a system twice"),
        (["p1000"], "did you mean `p100`"),
        (["mi100"], "measured: mi100.gpu.dram: is missing"),
    ],
)
def test_systems_of_which_nothing_was_measured_are_refused(names: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        scenarios(names, None)


@pytest.mark.slow
def test_a_value_of_an_application_that_no_scenario_has_is_refused() -> None:
    tree = {"system": shipped("system")["gtx_1050"], "policy": shipped("policy")["cache_rw"], "run": {}}
    base = {**tree, "application": {**shipped("application")["conv_3x3"], "algorithm": "fft"}}
    assert list(BACKEND.scenarios(base)) == ["conv_3x3"]
    for lists in ({"applications": ["lenet"]}, {"measured": ["p100"]}):
        with pytest.raises(ConfigError, match=r"application.algorithm = 'fft'.*space.application.algorithm"):
            BACKEND.scenarios({**base, **lists})
        unchanged = {**base, **lists, "application": shipped("application")["conv_3x3"]}
        assert len(BACKEND.scenarios(unchanged)) >= 1


def points(*rows: tuple[str, str, str, float]) -> pd.DataFrame:
    """Rows of one scenario: direction, algorithm, hash, time."""
    (measured,) = load_measured_systems(["p100"], None)
    table = pd.DataFrame(rows, columns=["direction", "algorithm", "hash", "time_s"])
    return table.assign(scenario=measured.scenario(0))


def test_a_layer_takes_what_its_fastest_algorithm_takes() -> None:
    (measured,) = load_measured_systems(["p100"], None)
    seconds = measured.rows.seconds[0]
    rows = points(
        ("forward", "gemm", "none", 1.5 * seconds[0]), ("forward", "implicit_gemm", "none", 2 * seconds[0]),
        ("backward_data", "gemm", "none", 4 * seconds[1]), ("backward_data", "fft", "none", 3 * seconds[1]),
        ("forward", "fft", "xor", seconds[0]),
    )  # fmt: skip
    joined = against(["p100"], None, rows).set_index(["direction", "hash"])
    ratio = joined["predicted_s"] / joined["measured_s"]
    assert ratio["forward", "none"] == pytest.approx(1.5)
    assert ratio["backward_data", "none"] == pytest.approx(3)
    assert ratio["forward", "xor"] == pytest.approx(1)
    assert joined["fitted"].all()
    assert errors(joined.reset_index())["p100"]["none"]["all"] is None
    by_hash = errors(joined.reset_index().assign(fitted=False))["p100"]
    assert by_hash["none"]["all"]["count"] == 2
    assert by_hash["none"]["all"]["median"] == pytest.approx((0.5 + 2) / 2)
    assert by_hash["none"]["by_direction"]["forward"]["bias"] == pytest.approx(1.5)
    assert by_hash["none"]["forward_algorithm_as_measured"] == 1.0
    assert by_hash["xor"]["forward_algorithm_as_measured"] == 0.0


def test_rows_that_no_layer_can_be_are_refused_by_line(tmp_path: Path) -> None:
    odd = {"large": (TABLE.replace(",16,64,3,3", ",8192,64,3,3"), "NV_P100 fp32, line 2"),
           "mixed": (TABLE.replace("fp32", "mixed"), "in fp32, but in mixed")}  # fmt: skip
    for name, (text, message) in odd.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.csv").write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError, match=message):
            scenarios(["p100"], str(tmp_path / name))


# The study


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The study on LeNet, a layer, a network and one measured layer of a table of one's own."""
    folder = tmp_path_factory.mktemp("convolution_patterns")
    (folder / "tables").mkdir()
    (folder / "tables" / "mine.csv").write_text(TABLE, encoding="utf-8")
    (folder / "mine.yaml").write_text(yaml.safe_dump(network()), encoding="utf-8")
    few = ["measured=[p100]", f"applications=[lenet,conv_3x3,{folder}/mine.yaml]"]
    few.append(f"study.data_dir={folder / 'tables'}")
    fast = ["tracking=none", "store=none", "run.requests=100000", "run.most=1000000"]
    assert main(["study=convolution_patterns", *few, *fast, f"output_dir={folder}"]) == 0
    return folder / "convolution_patterns" / "latest"


@pytest.mark.nightly
@pytest.mark.slow
def test_the_study_judges_its_claims_and_says_what_has_no_reference(run: Path) -> None:
    claims = {
        claim["id"].removeprefix("gpgpusim."): claim for claim in json.loads((run / "claims.json").read_text("utf-8"))
    }
    within = {"phases", "camping", "camping_no_hash", "camping_hash", "floors"}
    assert {name for name, claim in claims.items() if claim["within"]} == within
    for name in ("lenet_v1", "lenet_ispass", "kernel_corr"):
        assert claims[name]["within"] is claims[name]["ours"] is None
        assert claims[name]["reason"]
    assert claims["camping_hash"]["ours"] < 1.2 < 2 < claims["camping_no_hash"]["ours"]


@pytest.mark.nightly
def test_the_study_tells_errors_kernels_phases_and_camping(run: Path) -> None:
    errors_of = json.loads((run / "errors.json").read_text("utf-8"))["p100"]
    table = pd.read_parquet(run / "predictions.parquet")
    assert set(errors_of) == {"none", "xor"}
    assert errors_of["none"]["all"]["count"] == 3
    assert len(table) == 6
    ratio = table["predicted_s"] / table["measured_s"]
    assert ratio.between(0.2, 5).all()
    every = pd.read_parquet(run / "kernels.parquet")
    lenet = every[(every["scenario"] == "lenet") & (every["algorithm"] == "implicit_gemm")]
    results = pd.read_parquet(run / "results.parquet")
    plain = (results["scenario"] == "lenet") & (results["system.gpu.mapping.channel_hash"] == "none")
    ok = results[plain & (results["status"] == "ok")]
    total_s = float(((lenet["seconds"] + lenet["launch_s"]) * lenet["launches"]).sum())
    assert total_s == pytest.approx(float(ok[ok["application.algorithm"] == "implicit_gemm"]["time_s"].iloc[0]))
    assert len(lenet) == 27
    moved = float((lenet["dram_bytes"] * lenet["launches"]).sum())
    assert moved == pytest.approx(float(ok[ok["application.algorithm"] == "implicit_gemm"]["dram_bytes"].iloc[0]))
    np.testing.assert_allclose(lenet["bandwidth_share"], lenet["dram_bytes"] / (lenet["seconds"] * 112e9))
    listed = json.loads((run / "phases.json").read_text("utf-8"))
    assert {row["scenario"] for row in listed} == {"lenet", "conv_3x3", "two"}
    measured = pd.read_parquet(run / "camping.parquet")
    assert measured[measured["plain"] > 2]["camping"].max() < 1.2


@pytest.mark.more
def test_the_study_draws_who_did_what_when(run: Path) -> None:
    drawn = {path.stem for path in (run / "figures").glob("*.png")}
    maps = {"lenet", "conv_3x3_sms", "conv_3x3_channels", "two_sms", "camping", "camping_channels"}
    assert drawn >= maps | {"predicted_against_measured"}
