"""Layouts of steps: all GPUs and sequences have work, memory is respected, and few searched ones hold the best."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dse.cli import main
from dse.errors import ConfigError
from dse.results.run_folder import Outputs
from dse.values import AtLeast, AtMost
from simulators.hardware.machine import tree_of
from simulators.steps.backend import StepBackend, metrics_of
from simulators.steps.overlap.sites import SITES
from simulators.steps.plan.choices import CONDITIONS, OFF
from simulators.steps.plan.layouts import Layout, LayoutQuestion, LayoutSection, usual
from simulators.steps.run.build import iteration
from simulators.workloads.model_zoo import model_tree, option_tree
from studies.plan.flips import Uncertain
from studies.plan.step_plan import plans

BACKEND = StepBackend()


def tree(model: str = "llama3_8b", system: str = "h100_8", **run: Any) -> dict[str, Any]:
    return {
        "system": tree_of(system),
        "model": model_tree(model),
        "run": {"mode": "training", "batch": 16, "sequence_length": 4096, "precision": "bf16", **run},
        "parallel": {"tp": 1},
        "optimizer": option_tree("optimizer", "adam"),
        "kernels": option_tree("kernels", "flash"),
    }


def spreading(step: Mapping[str, Any], **fields: Any) -> LayoutQuestion:
    values = {"auto": True, "probe": "hetero_fused_1d num_chunks=2", **fields}
    return LayoutQuestion.of(step, LayoutSection.model_validate(values), BACKEND.steps)


@pytest.mark.slow
@pytest.mark.parametrize(("gpus", "mode"), [(8, "training"), (4, "prefill"), (8, "decode")])
def test_every_layout_uses_all_gpus_and_keeps_the_sequences_of_a_step(gpus: int, mode: str) -> None:
    layouts = spreading(tree(mode=mode), gpus=gpus).candidates()
    assert layouts.layouts
    for layout in layouts.layouts:
        assert layout.gpus == layout.tp * layout.pp * layout.cp * layout.dp == gpus
        assert layout.sequences == layout.dp * layout.micro_batches * layout.batch == 16
        assert layout.tp <= 8


@pytest.mark.slow
def test_layouts_are_computed_at_once_as_each_by_itself() -> None:
    question = spreading(tree("mixtral_8x7b", "h100_96gb_8"), gpus=16)
    layouts = question.candidates(zero=(1, 3), recompute=("none",))
    order = np.argsort(layouts.seconds)
    for place in (*order[:3].tolist(), int(order[-1])):
        layout = layouts.layouts[place]
        step = layout.tree(question.tree)
        step["parallel"]["sequence_parallel"] = True
        metrics = metrics_of(BACKEND.design(step))
        assert float(metrics["memory_share"]) == pytest.approx(float(layouts.memory_share[place]))
        assert float(metrics["iteration_s"]) >= float(layouts.seconds[place]) * (1 - 1e-9)  # whose pipeline is the best


@pytest.mark.more
def test_layouts_that_are_searched_fit_and_the_best_with_serial_sites_is_among_them() -> None:
    question = spreading(tree("llama2_13b", "a100_8"))
    fitting, chosen = question.candidates().fitting, question.chosen()
    assert fitting.layouts[0] in chosen
    assert set(chosen) <= set(fitting.layouts)
    assert len({(layout.tp, layout.pp, layout.ep) for layout in chosen}) >= len(chosen) - 1
    assert (fitting.memory_share <= 1).all()


def test_degrees_that_are_given_are_kept() -> None:
    layouts = spreading(tree(), fixed={"tp": 2, "zero": 1, "recompute": "half"}).candidates()
    assert {(layout.tp, layout.zero, layout.recompute) for layout in layouts.layouts} == {(2, 1, "half")}


def test_the_usual_layout_is_tensor_parallel_in_a_node() -> None:
    layout = usual(spreading(tree("llama3_70b", "h100_96gb_8", batch=64), gpus=32))
    assert layout == Layout(8, 1, 4, 1, 1, 1, batch=1, micro_batches=16, recompute="none")
    assert usual(spreading(tree(mode="prefill"))) is None


@pytest.mark.slow
def test_a_model_that_fits_nowhere_is_refused_with_the_gpus_that_would_do() -> None:
    with pytest.raises(ConfigError) as caught:
        spreading(tree("llama3_70b", "h100_96gb_8"), gpus=8).chosen()
    (problem,) = caught.value.problems
    assert problem.path == "parallel"
    assert "times the memory of a GPU" in problem.rule
    assert "layouts.gpus=16 fits: " in problem.way_out


def test_an_unknown_number_of_gpus_is_refused() -> None:
    alone = tree()
    alone["system"].pop("node")
    with pytest.raises(ConfigError, match=r"layouts.gpus: is not known.*layouts.gpus=8"):
        spreading(alone)


def test_gpus_that_no_degrees_divide_are_refused() -> None:
    with pytest.raises(ConfigError, match="finds no layout of 7 GPUs for 16 sequences"):
        spreading(tree(), gpus=7, fixed={"tp": 7}).chosen()


@pytest.mark.nightly
@given(st.integers(-5, 5), st.integers(-5, 5))
def test_a_bound_equals_what_is_within_it(bound: int, value: int) -> None:
    assert (value == AtLeast(bound)) == (value >= bound)
    assert (value == AtMost(bound)) == (value <= bound)
    assert AtLeast(bound) != "text"


def test_conditions_are_of_knobs_of_steps() -> None:
    design = BACKEND.design({**tree(), "sites": {}})
    for path in (*CONDITIONS, *OFF):
        assert (
            path.startswith("sites.")
            or path.partition(".")[2] in type(getattr(design, path.partition(".")[0])).model_fields
        )


@pytest.mark.slow
@pytest.mark.parametrize("tp", [2, 4, 8])
@pytest.mark.parametrize("schedule", ["hetero_fused_1d num_chunks=2", "signalled", "shard_p2p"])
def test_schedules_hide_communication_and_not_gemms(tp: int, schedule: str) -> None:
    step = tree(mode="prefill", batch=2)
    step["parallel"] = {"tp": tp, "sequence_parallel": True}
    serial = iteration(BACKEND.design(step))
    sites = {name: schedule for name in SITES if not name.endswith("_backward")}
    scheduled = iteration(BACKEND.design({**step, "sites": sites}))
    assert float(serial.passes.computed_s) < float(scheduled.seconds) < float(serial.seconds)


def test_flips_appear_where_the_interval_is_wide() -> None:
    step = tree(mode="prefill", batch=2)
    step["parallel"] = {"tp": 8, "sequence_parallel": True}
    designs = [
        BACKEND.design({**step, "sites": {"ffn_in": text}}) for text in ("serial", "hetero_fused_1d num_chunks=2")
    ]
    rival, best = sorted(designs, key=lambda design: -float(iteration(design).seconds))
    path = "system.node.library.protocols.all_gather.bytes_per_s"
    wide = Uncertain(best, {"system.gpu.dma.bytes_per_s": 0.9, "system.nowhere": 0.5}).flips(rival)
    assert [flip.path for flip in wide] == ["system.gpu.dma.bytes_per_s"]
    assert str(wide[0]).startswith("gpu.dma.bytes_per_s below ")
    assert 0 < wide[0].value < 53.8e9
    assert not Uncertain(best, {"system.gpu.dma.bytes_per_s": 0.01, path: 0.01}).flips(rival)


@pytest.mark.nightly
@pytest.mark.parametrize("model", ["llama3_8b"])
def test_few_layouts_hold_the_best_of_all(model: str, tmp_path: Path) -> None:
    few = "choice(serial,'hetero_fused_1d num_chunks=2')"
    words = [
        "study=plan",
        f"model={model}",
        "system=a100_8",
        "stack=megatron_2026",
        "run.mode=training",
        "run.batch=16",
    ]
    words += ["layouts.auto=true", "tracking=none", "figures=none", "timeline=false", "store=none", "executor.jobs=1"]
    words += [*(f"space.sites.{name}={few}" for name in SITES), "parallel.split_ctas=0", "parallel.collectives=library"]
    best = []
    for most in (1, 1000):
        assert main([*words, f"layouts.most={most}", f"output_dir={tmp_path / str(most)}"]) == 0
        outputs = Outputs.latest(tmp_path / str(most), "plan")
        (plan,) = plans(outputs.read_table("results"), outputs.read_config())
        assert float(plan.best["memory_share"]) <= 1
        assert float(plan.best["iteration_s"]) <= float(plan.before["iteration_s"])
        best.append(float(plan.best["iteration_s"]))
    assert best[1] <= best[0] <= best[1] / 0.99
