"""The step backend: limits of its costs, grids, rules, models by name, and what was measured."""

from __future__ import annotations

import csv
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dse.backend import Batch, check_results
from dse.config.compose import request
from dse.errors import ConfigError
from dse.values import leaves
from simulators.workloads.public_models import public
from tests.iterations import BACKEND, KERNELS, NETWORK, evaluated, gridded, metrics, runs, single, step, tree
from tests.support import CONF, DEVICES, shipped

MODES = ("training", "prefill", "decode")
COMPUTE = ("forward_s", "backward_s", "optimizer_s")
TOLERANCE = 1 + 1e-12


def computing(row: dict[str, float]) -> float:
    return sum(row[name] for name in COMPUTE)


def of_mode(drawn: dict[str, Any], mode: str) -> dict[str, Any]:
    """The same in another mode; only training has a state that may be split, and a decoder alone decodes."""
    values = {**drawn, "run.mode": mode, "parallel.zero": drawn["parallel.zero"] if mode == "training" else 0}
    return values | ({"model.decoder_layers": 0} if mode == "decode" else {})


# Limits


@pytest.mark.slow
@given(runs(), KERNELS, st.sampled_from(MODES))
def test_the_shares_of_an_iteration_are_all_of_it(drawn: dict[str, Any], kernels: str, mode: str) -> None:
    drawn = of_mode(drawn, mode)
    for pp in (1, 2, 4):
        row = metrics({**drawn, "parallel.pp": pp}, kernels=kernels)
        shares = [value for name, value in row.items() if name.startswith("share_")]
        assert sum(shares) == pytest.approx(1.0, rel=1e-12)
        assert min(shares) >= 0
        parts = [*COMPUTE, "serialized_s", "exposed_dp_s", "bubble_s", "host_s"]
        assert sum(row[name] for name in parts) == pytest.approx(row["iteration_s"], rel=1e-12)


@pytest.mark.slow
@given(runs(), KERNELS, st.sampled_from(MODES), st.floats(0.1, 100))
def test_a_gpu_that_is_faster_altogether_divides_compute_and_leaves_collectives(
    drawn: dict[str, Any], kernels: str, mode: str, faster: float
) -> None:
    drawn = of_mode(drawn, mode)
    before, after = (
        metrics(drawn, kernels=kernels),
        metrics({**drawn, "system.gpu.flop_vs_bw": faster}, kernels=kernels),
    )
    for name in COMPUTE:
        assert after[name] == pytest.approx(before[name] / faster, rel=1e-12)
    for name in ("serialized_s", "dp_s", "flop", "hbm_bytes", "edge", "slack", "memory_bytes"):
        assert after[name] == before[name]


@pytest.mark.slow
@given(runs(), KERNELS)
def test_more_gpus_of_a_layer_never_compute_longer(drawn: dict[str, Any], kernels: str) -> None:
    """Copies that put tokens in order come with the second GPU."""
    drawn |= {"parallel.sequence_parallel": drawn["parallel.sequence_parallel"] and kernels != "compiled"}
    seconds = [computing(metrics({**drawn, "parallel.tp": tp}, kernels=kernels)) for tp in (1, 2, 4, 12)]
    assert all(after <= before * TOLERANCE for before, after in itertools.pairwise(seconds))


@pytest.mark.slow
@given(runs(), KERNELS, st.integers(1, 107), st.floats(0.1, 1.0))
def test_fewer_cus_and_a_lower_clock_are_never_faster(
    drawn: dict[str, Any], kernels: str, cus: int, clock: float
) -> None:
    full = computing(metrics(drawn, kernels=kernels))
    assert computing(metrics({**drawn, "system.gpu.active_cus": cus}, kernels=kernels)) >= full / TOLERANCE
    assert computing(metrics({**drawn, "system.gpu.clock": clock}, kernels=kernels)) >= full / TOLERANCE
    assert metrics({**drawn, "system.gpu.active_cus": 108}, kernels=kernels) == metrics(drawn, kernels=kernels)


@pytest.mark.slow
@given(runs(), st.sampled_from(["tp", "dp", "pp"]))
def test_a_group_that_leaves_its_server_is_never_faster(drawn: dict[str, Any], axis: str) -> None:
    """The same GPUs in servers that are smaller, over a network that is slower."""
    drawn |= {"parallel.dp": 1, "parallel.tp": 1, f"parallel.{axis}": 4, "system.node.library.network_bytes_per_s": 5e8}
    within, beyond = (metrics({**drawn, "system.node.num_gpus": gpus}) for gpus in (4, 2))
    for name in ("serialized_s", "dp_s", "bubble_s", "iteration_s"):
        assert beyond[name] >= within[name] / TOLERANCE
    assert beyond["iteration_s"] + beyond["dp_s"] > within["iteration_s"] + within["dp_s"]
    assert computing(beyond) == computing(within)


@pytest.mark.slow
@given(runs(), st.sampled_from(MODES))
def test_micro_batches_take_their_turns(drawn: dict[str, Any], mode: str) -> None:
    once, three = (metrics(of_mode({**drawn, "run.micro_batches": m}, mode)) for m in (1, 3))
    for name in ("forward_s", "backward_s", "serialized_s"):
        assert three[name] == pytest.approx(3 * once[name], rel=1e-12)
    for name in ("optimizer_s", "dp_s", "exposed_dp_s"):
        assert three[name] == pytest.approx(once[name], rel=1e-9, abs=1e-15)
    growth = 1 if mode == "training" else 3  # keys and values stay
    assert three["activation_bytes"] == pytest.approx(growth * once["activation_bytes"], rel=1e-9)


@pytest.mark.slow
@given(runs(), st.sampled_from([2, 4]), st.integers(1, 64))
def test_the_bubble_of_a_pipeline_is_that_of_one_forward_one_backward(drawn: dict[str, Any], pp: int, m: int) -> None:
    """arXiv:2104.04473: (pp - 1) / m of what a stage works; less where embedding or output make one of them longer."""
    equal = metrics({**drawn, "parallel.pp": pp, "run.micro_batches": m, "model.vocab": 0})
    works = equal["forward_s"] + equal["backward_s"] + equal["serialized_s"]
    assert equal["bubble_s"] == pytest.approx((pp - 1) / m * works, rel=1e-12)
    ends = metrics({**drawn, "parallel.pp": pp, "run.micro_batches": m, "model.vocab": 50_000})
    works = ends["forward_s"] + ends["backward_s"] + ends["serialized_s"]
    assert ends["bubble_s"] <= (pp - 1) / m * works * (1 + 1e-12)


# Grids

AXES = {
    "run.batch": [1, 3, 16],
    "run.sequence_length": [64, 512],
    "parallel.tp": [1, 2, 4],
    "parallel.dp": [1, 16],
    "run.micro_batches": [1, 2],
}


@pytest.mark.nightly
@given(runs(), KERNELS, st.sampled_from(MODES))
def test_a_grid_at_once_is_its_designs_one_by_one(drawn: dict[str, Any], kernels: str, mode: str) -> None:
    design = step(of_mode(drawn, mode), kernels=kernels)
    assert_as_single(design, AXES)


def assert_as_single(design: Any, axes: dict[str, Any]) -> None:
    grid = gridded(design, axes)
    assert set(grid.metrics) == set(BACKEND.metrics)
    for place, alone in enumerate(single(design, axes)):
        for name, value in alone.items():
            assert grid.metrics[name][place] == pytest.approx(value, rel=1e-12), (name, place)


PLAIN = {**NETWORK, "parallel.tp": 2, "parallel.dp": 4, "model.kv_heads": 16, "model.head_dim": 64}
EVERYWHERE = {**PLAIN, "system.gpu.active_cus": 90}
NUMERIC = [path for path, _, structural in leaves(step(EVERYWHERE, kernels="unfused")) if not structural]


@pytest.mark.more
def test_every_number_that_is_no_structure_is_an_axis() -> None:
    for path in NUMERIC:
        design = step(EVERYWHERE, kernels="unfused")
        assert BACKEND.is_axis(path, design)
        (value,) = (leaf for name, leaf, _ in leaves(design) if name == path)
        other = value * 2 if path not in ("model.predicted", "system.gpu.active_cus") else value / 2
        other = 0.5 if path == "system.node.library.sharing" else other
        values = [value, other] if isinstance(value, float) else [value, int(other)]
        if values[0] == values[1]:  # zero
            values = [value, value + 1]
        if path == "model.kv_heads":
            values = [value, value // 2]
        if path == "model.hidden":
            values = [value, value + 512]
        assert_as_single(design, {path: values, "run.batch" if path != "run.batch" else "run.sequence_length": [8, 24]})


# Rules

BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "heads": ({"parallel.tp": 3}, "parallel.tp = 3: does not divide the heads (model has 16)"),
    "layers": ({**NETWORK, "parallel.pp": 25}, "parallel.pp = 25: is more stages than layers (model has 24)"),
    "network": ({"parallel.dp": 9}, "system.node.library.network_bytes_per_s: is missing: tp x pp x dp is 9 GPUs"),
    "library": ({"system.node": None, "parallel.dp": 2}, "system.node.library: is missing: tp x pp x dp is 2 GPUs"),
    "constants": ({"run.precision": "fp16_storage"}, "system.gpu.efficiency: has no constants for fp16_storage"),
    "zero": ({"run.mode": "prefill", "parallel.zero": 1}, "parallel.zero"),
    "cus": ({"system.gpu.active_cus": 109}, "system.gpu.active_cus = 109: is more than the GPU has"),
    "width": ({"model.heads": 7}, "model.heads = 7: does not divide the width (model.hidden = 1024)"),
    "keys": ({"model.kv_heads": 5}, "model.kv_heads = 5: does not divide the heads (model has 16)"),
    "optimizer": ({"optimizer.traffic_bytes": {"fp32": 28}}, "optimizer: has no mixed data"),
}


@pytest.mark.parametrize("rule", BROKEN)
def test_a_design_that_breaks_a_rule_is_infeasible_with_the_reason(rule: str) -> None:
    overrides, reason = BROKEN[rule]
    design = step(overrides)
    (outcomes,) = BACKEND.evaluate([Batch(design)])
    assert outcomes[0].status == "infeasible"
    assert reason in outcomes[0].reason
    assert outcomes[0].reason == "; ".join(map(str, BACKEND.problems(design)))
    assert BACKEND.problems(step()) == []


@pytest.mark.slow
@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 64), st.integers(1, 200))
def test_in_a_grid_only_designs_that_break_a_rule_are_infeasible(tp: int, pp: int, dp: int, cus: int) -> None:
    """Whatever is beside them in the grid; the network is missing beyond eight GPUs."""
    axes = {"parallel.tp": [1, tp], "parallel.pp": [1, pp], "parallel.dp": [1, dp], "system.gpu.active_cus": [108, cus]}
    grid = gridded(step({"system.gpu.active_cus": 108}), axes)
    for place in range(grid.size):
        t, p, d, c = (axes[path][i] for path, i in zip(axes, np.unravel_index(place, (2, 2, 2, 2)), strict=True))
        fits = 16 % t == 0 and t * p * d <= 8 and c <= 108
        assert grid[place].status == ("ok" if fits else "infeasible")
        assert grid[place].metrics or not fits


# The configuration


WRONG: dict[str, tuple[dict[str, Any], str, str]] = {
    "a section that is not known": ({"modle": {}}, "modle", "model"),
    "a section that is missing": ({"kernels": None}, "kernels", "kernels=<option>"),
    "models that are no list": ({"models": "llama3_8b"}, "models", "models=[gpt3_175b,llama3_8b]"),
    "models that are no names": ({"models": [3]}, "models", "models=[gpt3_175b,llama3_8b]"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_section_is_named_with_a_way_out(case: str) -> None:
    changed, path, way = WRONG[case]
    with pytest.raises(ConfigError) as error:
        BACKEND.sections({**tree(), **changed})
    (problem,) = error.value.problems
    assert problem.path == path
    assert way in str(problem)
    BACKEND.sections({**tree(), "models": []})


def test_a_machine_without_a_data_sheet_is_refused_by_the_parts_that_it_lacks() -> None:
    with pytest.raises(ConfigError, match=r"system.gpu.peak_flop_per_s: is missing .*dse machine list"):
        step(system="t3_ring")


FIELDS: dict[str, tuple[str, Any]] = {
    "a batch of none": ("run.batch", 0),
    "half a head": ("model.heads", 2.5),
    "a number in quotes": ("run.sequence_length", "128"),
    "a mode that is unknown": ("run.mode", "serving"),
    "a key that is unknown": ("parallel.degree", 8),
    "zero of four": ("parallel.zero", 4),
    "a pipeline that is unknown": ("parallel.pipeline", "dual"),
    "an optimizer without weights": ("optimizer.flop", -1),
    "kernels that read less than nothing": ("kernels.softmax.forward", -1),
    "a clock that stands": ("system.gpu.clock", 0),
    "a share above one": ("model.windowed", 1.5),
}


@pytest.mark.parametrize("case", FIELDS)
def test_a_wrong_value_is_named_by_its_dotted_path(case: str) -> None:
    path, value = FIELDS[case]
    with pytest.raises(ConfigError) as error:
        step({path: value})
    assert [problem.path for problem in error.value.problems] == [path]


def test_each_of_several_models_is_a_scenario() -> None:
    scenarios = BACKEND.scenarios({**tree(), "models": ["gpt3_175b", "bert_large"]})
    assert list(scenarios) == ["gpt3_175b", "bert_large"]
    assert [BACKEND.design(scenario).model.hidden for scenario in scenarios.values()] == [12288, 1024]
    assert list(BACKEND.scenarios(tree())) == ["bert_large"]


REFUSED = {
    ("lama3_8b",): "is neither a model known by name nor a file",
    ("llama3_8b", "llama3_8b"): "names a model twice",
    ("nowhere/else.yaml",): "is neither a model known by name nor a file",
}


@pytest.mark.parametrize("names", REFUSED, ids=",".join)
def test_a_model_that_cannot_be_laid_out_is_refused_with_the_reason(names: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as error:
        BACKEND.scenarios({**tree(), "models": list(names)})
    (problem,) = error.value.problems
    assert (problem.path, problem.rule) == ("models", REFUSED[names])
    assert problem.way_out


def test_a_model_may_be_described_in_a_file_of_ones_own(tmp_path: Path) -> None:
    """The one of this test is that of the configuration, so it costs the same."""
    model_tree = {"name": "mine", "kind": "transformer", "layers": 4, "hidden": 512, "heads": 8}
    path = tmp_path / "mine.yaml"
    path.write_text("name: mine\nlayers: 4\nhidden: 512\nheads: 8\n")
    scenarios = BACKEND.scenarios({**tree(), "models": [str(path)]})
    assert list(scenarios) == ["mine"]
    assert evaluated([BACKEND.design(scenarios["mine"])]) == evaluated([step(model=model_tree)])


@pytest.mark.parametrize("text", ["- 3", "layers: [", ""], ids=repr)
def test_a_file_that_describes_no_model_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError):
        BACKEND.scenarios({**tree(), "models": [str(path)]})


# Everything that is shipped

SHIPPED_MODELS = sorted({*public(), *shipped("model")})
OF_INFERENCE = {name for name, widths in public().items() if "compressed" in widths}


@pytest.mark.nightly
@pytest.mark.one_in(73)
@pytest.mark.parametrize(
    ("mode", "system"),
    list(itertools.product(MODES, DEVICES)),
)
def test_every_shipped_model_on_every_device_has_metrics_to_believe(mode: str, system: str) -> None:
    precisions = shipped("system")[system]["gpu"]["efficiency"]
    names = [name for name in SHIPPED_MODELS if mode != "training" or name not in OF_INFERENCE]
    listed = BACKEND.scenarios({**tree(system=system), "models": names})
    for precision in precisions:
        for kernels in shipped("kernels"):
            root = tree({"run.mode": mode, "run.precision": precision}, system=system, kernels=kernels)
            designs = [BACKEND.design({**root, "model": option["model"]}) for option in listed.values()]
            refused = {problem.path for design in designs for problem in BACKEND.problems(design)}
            # what is trained has activations of 16 bits, and no optimizer has a state of 8
            untrained = {"optimizer", "run.precision"} if mode == "training" and precision == "fp8" else set()
            assert mode == "decode" or refused <= untrained
            designs = [design for design in designs if not BACKEND.problems(design)]
            for result in BACKEND.evaluate([Batch(design) for design in designs]):
                assert check_results(result, BACKEND.metrics)[0].reason == ""


# What was measured


def measured() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """(ours, measured) sequences per second of BERT-Large on one GPU, padded, by PyTorch of 2019 and 2020."""
    path = CONF / "data" / "bert_throughput.csv"
    lines = [line for line in path.read_text("utf-8").splitlines() if not line.startswith("#")]
    rows = [row for row in csv.DictReader(lines) if row["padded"] == "true" and row["gpus"] == "1"]
    ours, theirs = [], []
    for row in rows:
        system = row["device"].partition("_")[0]
        if system not in ("v100", "a100") or row["precision"] not in ("fp32", "mixed"):
            continue
        if (system, row["precision"]) == ("a100", "fp32") or "729963d" in row["source"]:
            continue
        overrides = {
            "run.batch": int(row["batch"]),
            "run.sequence_length": int(row["sequence_length"]),
            "run.micro_batches": int(row["accumulation"] or 1),
            "run.precision": row["precision"],
            "model.predicted": 1.0,
        }
        row_ours = metrics(overrides, system=f"{system}_8", kernels="unfused", optimizer="lamb")
        ours.append(row_ours["tokens_per_s"] / int(row["sequence_length"]))
        theirs.append(float(row["sequences_per_s"]))
    return np.array(ours), np.array(theirs)


def test_iterations_of_bert_take_about_as_long_as_was_measured() -> None:
    """No constant was fitted on these; none is off by a third."""
    ours, theirs = measured()
    assert len(ours) >= 10
    error = np.abs(ours / theirs - 1)
    assert np.median(error) < 0.15
    assert error.max() < 0.3
    assert np.corrcoef(np.log(ours), np.log(theirs))[0, 1] > 0.98


@pytest.mark.slow
@pytest.mark.parametrize("system", ["vega_fe", "vega_fe_no_l2", "h100_8"])
def test_means_of_an_epoch_stay_within_the_ranges_of_their_metrics(system: str) -> None:
    """A share that is 1 in every iteration is 1 in the mean, but for rounding, which no range refuses."""
    words = ["study=seqpoint", f"system={system}", "tracking=none", "store=none"]
    tree_of_study = {**request(words).tree, "systems": None}
    for design_tree in BACKEND.scenarios(tree_of_study).values():
        (results,) = BACKEND.evaluate([Batch(BACKEND.design(design_tree))])
        assert results.ok.all(), results.texts
        ranges = {name: (BACKEND.metrics[name].low, BACKEND.metrics[name].high) for name in results.metrics}
        outside = [name for name, (low, high) in ranges.items() if not low <= results.column(name)[0] <= high]
        assert outside == []
