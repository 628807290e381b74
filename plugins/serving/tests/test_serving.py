"""Serving: traffic and its traces, designs and their refusals, the answer of the command, measured points."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from dse.backend import Batch
from dse.cli import main
from dse.config.compose import request
from dse.errors import ConfigError
from dse.files import read_csv
from dse.results.run_folder import FinishedRun
from dse.space import get_path
from dse.values import content_key
from dse_serving.backend import ServingBackend
from dse_serving.design import Serving, deployment_of, kernels, step_of
from dse_serving.disaggregated import runs_of
from dse_serving.figures import within_limits
from dse_serving.fitting import start
from dse_serving.measured import (
    Predictor,
    Row,
    design_tree,
    fit_group,
    fitted_names,
    fitted_rows,
    model_name,
    read_rows,
    rows_of_sets,
    settings,
    summary,
)
from dse_serving.overlaps import PartTimes, knobs_of, lacks, times_of
from dse_serving.plan_file import plan_tree, words_of_plan
from dse_serving.results import percentile_interval
from dse_serving.step_times import EngineKernels, StepTimes, step_parts
from dse_serving.study import _spans, nearest, settings_line, transfer_lines
from dse_serving.traffic import PromptBlocks, Traffic, TrafficSpec, read_trace
from simulators.costs.sharing import Sharing
from simulators.steps.backend import metrics_of

SECTIONS = ("system", "model", "kernels", "run", "parallel", "server", "engines", "traffic", "slo")
MOE = ("model=deepseek_v3_671b", "system=h200_8", "run.products=fp8", "run.weights=fp8")
SMALL = ("study=serving", "model=llama3_8b", "traffic.requests=60", "traffic.output.tokens=64", "parallel.tp=1")


def design(*words: str) -> Serving:
    tree = request([*SMALL, *words]).tree
    return ServingBackend().design({name: tree[name] for name in SECTIONS})


@pytest.mark.parametrize(
    ("arrivals", "variation"), [("poisson", 1.0), ("gamma", 2.0), ("bursts", np.sqrt(2 * 8 - 1.0)), ("closed", None)]
)
def test_gaps_between_requests_have_their_mean_and_variation(arrivals: str, variation: float | None) -> None:
    traffic = TrafficSpec.model_validate({"arrivals": arrivals, "requests": 80_000, "rate_per_s": 4.0}).draw()
    gaps = np.diff(traffic.arrivals, prepend=0)
    if variation is None:
        assert not gaps.any() and traffic.num_timed == 16
        return
    assert gaps.mean() == pytest.approx(0.25, rel=0.03)
    assert gaps.std() / gaps.mean() == pytest.approx(variation, rel=0.05)


def test_lengths_are_those_of_their_kind_and_seeds_repeat_them() -> None:
    spec = {"requests": 20_000, "input": {"kind": "lognormal", "tokens": 800, "most": 2000}, "prefix": 0.25, "seed": 3}
    mix = [
        {"weight": 3, "input": {"tokens": 10}, "output": {"tokens": 5}},
        {"input": {"tokens": 90}, "output": {"tokens": 5}},
    ]
    first, second = (TrafficSpec.model_validate(spec).draw() for _ in range(2))
    assert np.array_equal(first.inputs, second.inputs) and first.inputs.max() == 2000
    assert np.median(first.inputs) == pytest.approx(800, rel=0.03)
    assert np.array_equal(first.prefixes, first.inputs // 4)
    mixed = TrafficSpec.model_validate({"requests": 20_000, "mix": mix}).draw()
    assert np.mean(mixed.inputs == 10) == pytest.approx(0.75, abs=0.02)


def test_traces_of_all_formats_are_the_same_requests(tmp_path: Path) -> None:
    texts = {
        "own.csv": "arrival_s,input_tokens,output_tokens,cached_tokens\n5,600,3,0\n5.5,1100,4,1024\n",
        "azure.csv": "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.1000000,600,3\n"
        "2023-11-16 18:15:46.6,1100,4\n",
        "burstgpt.csv": "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,ChatGPT,600,3,603,API log\n5.5,GPT-4,1100,4,1104,API log\n",
        "burstgpt_2.csv": "Timestamp,Session ID,Elapsed time,Request tokens,Response tokens,Total tokens\n"
        "5,a,9,600,3,603\n5.5,a,9,1100,4,1104\n",
        "mooncake.jsonl": '{"timestamp": 100, "input_length": 600, "output_length": 3, "hash_ids": [1, 2]}\n'
        '{"timestamp": 600, "input_length": 1100, "output_length": 4, "hash_ids": [1, 2, 3]}\n',
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
        traffic = read_trace(tmp_path / name, speed=2.0)
        assert traffic.arrivals.tolist() == pytest.approx([0, 0.25]) and traffic.inputs.tolist() == [600, 1100]
        assert traffic.outputs.tolist() == [3, 4]
        assert traffic.prefixes.tolist() == ([0, 1024] if name == "own.csv" else [0, 0])
        assert traffic.blocks.numbers.tolist() == ([0, 0, 1] if name == "mooncake.jsonl" else [])


def test_a_trace_counts_by_what_it_holds(elsewhere: Path) -> None:
    keys = list[str]()
    for file, tokens in (("a.csv", 600), ("b.csv", 600), ("a.csv", 700)):
        Path(file).write_text(f"arrival_s,input_tokens,output_tokens\n0,{tokens},3\n1,90,2\n")
        tree = request([*SMALL, "traffic.arrivals=trace", f"traffic.trace={file}"]).tree
        (scenario,) = ServingBackend().scenarios({name: tree[name] for name in SECTIONS}).values()
        keys.append(content_key(ServingBackend().design(scenario)))
    assert keys[0] == keys[1] != keys[2]


@pytest.mark.nightly
def test_an_edited_trace_is_evaluated_again(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["serve-plan", "model=llama3_8b", "system=h100_8", "slo.ttft_s=3", "figures=none", "tracking=none"]
    left = list[bool]()
    for name, tokens in (("a", 600), ("b", 600), ("b", 700)):
        lines = "".join(f"{number},{tokens},64\n" for number in range(20))
        Path(f"{name}.csv").write_text(f"arrival_s,input_tokens,output_tokens\n{lines}")
        assert main([*words, f"traffic.trace={name}.csv"]) == 0
        left.append(" 0 left" in capsys.readouterr().err)
    assert left == [False, True, False]


def test_a_trace_names_the_prefixes_of_its_prompts(tmp_path: Path) -> None:
    lines = [
        "arrival_s,input_tokens,output_tokens,cached_tokens,prefix_id",
        "0,200,1,128,a",
        "1,300,1,64,b",
        "2,90,1,200,a",
    ]
    (tmp_path / "own.csv").write_text("\n".join([*lines, "3,50,1,20,"]))
    traffic = read_trace(tmp_path / "own.csv")
    assert traffic.prefixes.tolist() == [0, 0, 0, 20] and traffic.blocks.counts.tolist() == [2, 1, 1, 0]
    assert traffic.blocks.numbers.tolist() == [0, 1, 2, 0] and traffic.blocks.tokens == 64


def test_a_trace_that_was_edited_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    for place, tokens in enumerate((10, 20)):
        path.write_text(f"arrival_s,input_tokens,output_tokens\n0,{tokens},1\n")
        os.utime(path, ns=(place, place))
        assert read_trace(path).inputs.tolist() == [tokens]


def test_the_busiest_part_of_a_trace_keeps_its_blocks() -> None:
    """Five requests of one token each, of which the second to the fourth come closest together."""
    counts = np.array([2, 0, 1, 3, 1])
    blocks = PromptBlocks(64, np.arange(7), counts)
    arrivals, tokens = np.array([0.0, 10.0, 11.0, 12.0, 30.0]), np.ones(5, np.int64)
    traffic = Traffic(arrivals, tokens, tokens, 0 * tokens, blocks=blocks)
    part = traffic.busiest(3)
    assert part.arrivals.tolist() == [0, 1, 2] and part.size == 3
    assert part.blocks.counts.tolist() == [0, 1, 3] and part.blocks.numbers.tolist() == [2, 3, 4, 5]
    assert traffic.busiest(5) is traffic


@pytest.mark.parametrize(
    ("name", "text", "rule"),
    [
        ("a.csv", "arrival_s,input_tokens,output_tokens\n2,3,4\n1,3,4\n", "line 3.*arrives at 1 s, before"),
        ("a.csv", "arrival_s,input_tokens,output_tokens\n2,0,4\n", "without tokens"),
        ("a.csv", "arrival_s,input_tokens,output_tokens\nnan,3,4\n", "line 2.*is no request"),
        ("a.csv", "arrival_s,input_tokens,output_tokens\n", "holds no requests"),
        ("a.csv", "when,input_tokens,output_tokens\n1,2,3\n", "no column arrival_s"),
        ("a.csv", "Timestamp,Request tokens,Total tokens\n1,2,3\n", "no column Response tokens .known here: Timestamp"),
        ("a.csv", "Timestamp,Request tokens,Response tokens\n1,2,0\n", "without tokens.*requests that failed"),
        ("a.csv", "arrival_s,input_tokens,total_tokens\n1,2,3\n", "no column output_tokens .known here"),
        ("a.csv", "arrival_s;input_tokens;output_tokens\n1;2;3\n", "by commas, not semicolons"),
        ("a.jsonl", '{"timestamp": 1}\n', "Mooncake"),
        ("a.jsonl", "[1]\n", "line 1.*Mooncake"),
        ("a.jsonl", f'{{"timestamp": 0, "input_length": {2**64}, "output_length": 2}}\n', "line 1.*Mooncake"),
        ("a.jsonl", '{"timestamp": -1, "input_length": 3, "output_length": 2}\n', "line 1.*Mooncake"),
        ("a.jsonl", '{"timestamp": 0, "input_length": 600, "output_length": 2, "hash_ids": [[1]]}\n', "Mooncake"),
        ("a.jsonl", '{"timestamp": 0, "input_length": 600, "output_length": 2, "hash_ids": [{}]}\n', "Mooncake"),
        ("absent.csv", None, "absent"),
    ],
)
def test_a_trace_that_is_none_is_refused_by_its_line(tmp_path: Path, name: str, text: str | None, rule: str) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=rule):
        read_trace(tmp_path / name)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("server: {name: vllm, scheduler: '${absent}'}\n", "plan.server.scheduler.*is no mapping of its settings"),
        ("server: {name: vllm, scheduler: [1]}\n", "plan.server.scheduler.*is no mapping of its settings"),
        ("server: vllm\n", "plan.server: is no section of a plan of serving"),
        ("- server\n", "is no plan of serving"),
    ],
)
def test_a_deployment_of_other_kinds_of_values_is_refused(tmp_path: Path, text: str, rule: str) -> None:
    (tmp_path / "plan.yaml").write_text(text)
    with pytest.raises(ConfigError, match=rule):
        words_of_plan(tmp_path / "plan.yaml")


def tabled(point: Serving, tokens: int, sequences: int, **changes: Any) -> StepTimes:
    """Times of steps without overlap."""
    waited = PartTimes(step_parts(point, tokens, sequences), EngineKernels.model_validate(changes.pop("kernels", {})))
    return times_of({"waited": waited.step_model(1)}, waited, **changes)


def test_steps_are_those_of_the_step_model() -> None:
    point = design("run.weights=fp8")
    times = tabled(point, 64, 64)
    for batch, context in ((1, 1024), (48, 4096)):
        run = point.run.model_copy(update={"batch": batch, "sequence_length": context})
        iteration_s = float(metrics_of(point.model_copy(update={"run": run}))["iteration_s"])
        octave = int(np.log2(context))
        assert times.linear[1, batch] + times.head[batch] + times.decode[1, batch, octave] == pytest.approx(
            iteration_s, rel=0.03
        )
    assert np.array_equal(*times.decode)


@pytest.mark.parametrize(("system", "gpus"), [("mi300x_8", 2), ("mi300x_8", 4), ("mi300x_8", 8), ("h100_8", 2)])
def test_a_gpu_reads_sums_of_its_peers_over_the_links_to_them(system: str, gpus: int) -> None:
    point = design(f"system={system}", f"parallel.tp={gpus}")
    node: Any = point.system.node
    direct, counts = step_parts(point, 64, 64).linear[1, 3:5, -1]
    peers = gpus - 1 if node.topology == "mesh" else node.num_gpus - 1
    read = 2 * 64 * np.asarray(point.model.hidden) * (gpus - 1)
    assert direct / counts >= read / (peers * node.link_bytes_per_s)


def test_products_of_a_step_are_slowed_by_the_law_of_schedules_while_data_moves() -> None:
    """Many tokens lose the SMs that a library's kernels hold, few interference alone; never less than that."""
    point = design("run.weights=fp8")
    gpu: Any = point.system.gpu
    slowed = step_parts(point, 8192, 64).slowed[0, 0]  # of prompts, products that are of no expert
    law = Sharing.of(gpu)
    lost = gpu.num_cus / (gpu.num_cus - gpu.cu_copy.num_cus)
    least = float(law.gemm(1.0, 1.0))
    assert (slowed >= least * (1 - 1e-9)).all()
    assert slowed[-1] == pytest.approx(max(least, lost), rel=0.1)


def test_speeds_of_products_and_graphs_change_steps_as_they_say() -> None:
    plain, slow = (
        tabled(design(), 512, 64, kernels={"dense": {"weight_bound": factor, "flop_bound": 1}}) for factor in (1, 2)
    )
    assert slow.linear[1, 1] > 1.7 * plain.linear[1, 1]
    captured = tabled(design(), 512, 64, graphs=[64]).linear
    assert captured[1, 1] == captured[1, 64] == plain.linear[1, 64] and captured[0, 1] == plain.linear[0, 1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "overlaps"),
    [
        (("model=llama3_70b", "parallel.tp=8"), ("in_switch", "halves", "nano")),
        ((*MOE, "parallel.dp=8", "parallel.ep=8"), ("shared_expert", "two_micro_batches", "nano")),
    ],
)
def test_the_best_overlap_of_each_size_is_no_slower_than_any(words: Sequence[str], overlaps: Sequence[str]) -> None:
    point = design(
        *words, "server.scheduler.tokens=4096", "server.scheduler.sequences=128", "server.scheduler.graphs=[]"
    )
    listed = point.server.model_copy(update={"overlaps": dict.fromkeys(overlaps, "--flag")})
    point = point.model_copy(update={"server": listed})

    def times(name: str) -> StepTimes:
        chosen = point.engines.model_copy(update={"overlap": name})
        return deployment_of(point.model_copy(update={"engines": chosen})).pools[0].times

    best, single = times("best"), {name: times(name) for name in ("waited", *overlaps)}
    prompts, plain = (np.stack(rows) for rows in zip(*map(_of_both_kinds, single.values()), strict=True))
    for shortest, tables in zip(_of_both_kinds(best), (prompts, plain), strict=True):
        least = tables.min(axis=0)  # of interpolated times; the best ones are interpolated between sizes
        assert (shortest <= least * (1 + 1e-9)).all() and (shortest >= 0.9 * least).all()
    assert best.overlap is not None
    gained = {best.overlap.names[place] for place in np.unique(best.overlap.prompts)}
    assert len(gained) > 1 and (prompts[1:].min(axis=0) < 0.98 * prompts[0]).any()
    assert (plain[0] - plain.min(axis=0) < 0.5 * plain[0]).all()  # two halves never take less than one resource needs


@pytest.mark.parametrize(
    ("system", "collectives", "most"),
    [("h100_8", "in_switch", 100), ("l20_8", "library", 8), ("a100_8", "library", 24)],
)
def test_halves_are_summed_by_the_switch_or_by_the_library(system: str, collectives: str, most: int) -> None:
    step = step_of(design("model=llama3_8b", "parallel.tp=8", f"system={system}"))
    assert lacks(step, "halves") is None
    for ctas in (4, 100):
        parallel = knobs_of(step, "halves", ctas).parallel
        # no more than the library's kernel has
        assert (parallel.collectives, parallel.split_ctas) == (collectives, min(ctas, most))


@given(st.lists(st.integers(0, 2), min_size=1))
def test_ranges_of_sizes_follow_one_another(chosen: list[int]) -> None:
    sizes = np.cumsum(np.arange(1, len(chosen) + 1))
    ranges = [[int(size) for size in text.split(" ")[1::2]] for text in _spans(sizes, np.array(chosen), "abc")]
    assert (ranges[0][0], ranges[-1][1]) == (sizes[0], sizes[-1])
    assert all(end + 1 == begin for (_, end), (begin, _) in pairwise(ranges))


def _of_both_kinds(times: StepTimes) -> tuple[Any, Any]:
    return times.linear[0], times.linear[1, 1:129, None] + times.decode[1, 1:]


@pytest.mark.parametrize("server", ["vllm", "sglang", "tensorrt_llm"])
def test_settings_are_those_of_each_rank_as_software_counts_them(server: str) -> None:
    point = design(*MOE, "parallel.dp=8", "parallel.ep=8", f"server={server}")
    row = {"parallel.dp": 8, "parallel.ep": 8}
    config = request([*SMALL, *MOE, f"server={server}"]).tree
    (line,) = settings_line({name: config[name] for name in SECTIONS}, row)
    scheduler, ranks = point.server.scheduler, 8 if server == "sglang" else 1
    assert f" {scheduler.tokens * ranks} " in line and f" {scheduler.sequences * ranks} " in line
    assert plan_tree(point)["server"]["scheduler"]["tokens"] == scheduler.tokens


def test_options_that_were_typed_go_with_the_plan(tmp_path: Path) -> None:
    typed = ["server=sglang", "server.scheduler.read_steps=30", "server.scheduler.drafts=2"]
    tree = plan_tree(design(*SMALL, *typed))
    assert {"read_steps": 30, "drafts": 2}.items() <= tree["server"]["scheduler"].items()
    assert "prompt_graphs" not in tree["server"]["scheduler"]  # as the software has it
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(tree))
    words = words_of_plan(tmp_path / "plan.yaml")
    assert {"server=sglang", "server.scheduler.read_steps=30", "server.scheduler.drafts=2"} <= set(words)


@pytest.mark.slow
def test_stages_of_a_pipeline_share_layers_and_latency() -> None:
    words = ["model=llama3_70b", "traffic.concurrency=1", "traffic.requests=8", "traffic.input.kind=fixed"]
    small = ["model=llama3_8b", "engines.overlap=waited"]
    single, staged = (design(*words, f"parallel.{split}") for split in ("tp=8", "pp=8"))
    deployment = deployment_of(staged)
    assert deployment.gpus == 8 and deployment.pools[0].batches == 8
    alone = ServingBackend().serve(design(*words, "parallel.tp=1", *small))
    through = ServingBackend().serve(design(*words, "parallel.pp=2", *small))
    scheduler = deployment.pools[0].scheduler
    # one user waits for every stage, and for the host of each
    host_s = scheduler.host_s + scheduler.host_sequence_s
    assert np.mean(through.tpot_s) == pytest.approx(np.mean(alone.tpot_s) + host_s, rel=0.08)
    assert np.mean(ServingBackend().serve(staged).tpot_s) > 3 * np.mean(ServingBackend().serve(single).tpot_s)


@pytest.mark.slow
def test_experts_on_gpus_of_their_own_leave_room_and_keep_no_resource_too_busy() -> None:
    traffic = ("traffic.concurrency=256", "traffic.requests=400")
    words = (*MOE, "parallel.dp=4", "engines.gpus=12", "server.scheduler.sequences=512", *traffic)
    together = design(*MOE, "parallel.dp=8", "parallel.ep=8")
    apart, once = (design(*words, "engines.expert_gpus=8", f"engines.expert_batches={m}") for m in (3, 1))
    pools = [deployment_of(point).pools[0] for point in (together, apart, once)]
    assert pools[1].gpus == 12 and pools[1].times.weight_bytes < 0.6 * pools[0].times.weight_bytes
    large, small = (pools[1].times.decode[1, size, 11] + pools[1].times.linear[1, size] for size in (500, 4))
    large_once, small_once = (pools[2].times.decode[1, size, 11] + pools[2].times.linear[1, size] for size in (500, 4))
    # batches that go round hide each other's, or read weights again
    assert large < 0.9 * large_once and small > small_once


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        (["engines.replicas=9"], "engines.replicas = 9"),
        (["parallel.cp=2"], "parallel.cp = 2"),
        (["engines.overlap=halves"], "needs sums of parallel.tp > 1"),
        (["engines.apart=true", "engines.prefill_tp=3"], "engines.prefill_tp = 3: does not divide the heads"),
        (
            ["parallel.tp=2", "engines.apart=true", "engines.prefill_tp=1", "engines.overlap=in_switch"],
            "engines.overlap = 'in_switch': of engines of prompts .engines.prefill_tp = 1. needs sums .*another",
        ),
        ([*MOE, "parallel.tp=8", "parallel.ep=8", "engines.overlap=two_micro_batches"], "and parallel.dp > 1: else"),
        (["server.scheduler.context=1000"], "server.scheduler.context = 1000: is less than the longest request"),
        (["engines.expert_gpus=4"], "this one has none"),
        ([*MOE, "engines.expert_gpus=3"], "does not divide the experts"),
        ([*MOE, "engines.expert_gpus=2"], "are too few: "),
        (["parallel.dp=2"], "shares experts"),
        (["server.scheduler.chunked=false", "server.scheduler.tokens=512"], "not cut"),
        (["traffic.input.tokens=100000", "traffic.requests=1", "server.scheduler.memory=0.25"], "more than the keys"),
        (
            ["traffic.arrivals=poisson", "traffic.rate_per_s=5000", "engines.replicas=1"],
            "traffic.rate_per_s = 5000.0: brings 5,000 requests/s .*more than the engines keep up with: .*busy",
        ),
    ],
)
def test_a_deployment_that_cannot_be_is_infeasible_with_its_rule(words: list[str], rule: str) -> None:
    (results,) = ServingBackend().evaluate([Batch(design(*words))])
    assert results[0].status == "infeasible" and re.search(rule, results[0].reason)


@pytest.mark.parametrize("name", ["sglang", "tensorrt_llm"])
def test_serving_software_is_chosen_by_its_name(name: str) -> None:
    assert design(f"server={name}").server.name == name


def test_values_that_engines_choose_are_refused() -> None:
    tree = request(list(SMALL)).tree
    with pytest.raises(ConfigError, match="chosen by engines"):
        ServingBackend().sections({**{name: tree[name] for name in SECTIONS}, "run": {"batch": 3}})


@pytest.mark.slow
def test_moving_keys_and_values_takes_as_long_as_their_bytes() -> None:
    words = ["engines.apart=true", "traffic.concurrency=1", "traffic.input.kind=fixed", "engines.latency_s=0 s"]
    slow, fast = (
        design(*words, "engines.beside=false", f"engines.bytes_per_s={rate}") for rate in ("1 GB/s", "1 TB/s")
    )
    first = [float(ServingBackend().serve(point).ttft_s.mean()) for point in (slow, fast)]
    moved = 1024 * deployment_of(slow).pools[0].times.token_bytes * (1e-9 - 1e-12)
    assert first[0] - first[1] == pytest.approx(moved, rel=1e-6)


def test_an_interval_of_a_percentile_covers_it_as_often_as_it_says() -> None:
    draws = np.random.default_rng(0).exponential(size=(400, 300))
    intervals = [percentile_interval(values, 0.9) for values in draws]
    covered = np.mean([low <= np.log(10) <= high for low, high in intervals])
    assert 0.92 < covered < 0.99


def test_a_limit_that_is_missed_is_named_by_its_path() -> None:
    rates = ("tokens_per_s_per_gpu", "tokens_per_s_per_user", "tokens_per_usd")
    times = {"ttft_s": 0.1, "tpot_s": 0.02, "latency_s": 3.0}
    traffic = {"traffic.arrivals": "closed", "traffic.concurrency": 4}
    points = pd.DataFrame([{**times, **traffic, **dict.fromkeys(rates, 1.0), "split": "one", "verdict": "", "gpus": 1}])
    *_, line = nearest(points, {"tpot_s": 0.015, "latency_s": 1.0}, typed={"tpot_s": 0.015})
    assert "200 % over study.limits.latency_s.high" in line
    *_, line = nearest(points, {"tpot_s": 0.015}, typed={"tpot_s": 0.015})
    assert "33 % over slo.tpot_s" in line


@pytest.mark.more
def test_limits_of_users_count_without_those_of_the_study(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*SMALL, "tracking=none", "figures=none", "~space.parallel", "space.traffic.concurrency=choice(4)"]
    assert main([*words, "slo.tpot_s=1e-6"]) in (0, 3)
    shown = capsys.readouterr().out
    assert "no deployment has a time of a later token within 1.00 µs" in shown and "nearest: " in shown


@pytest.mark.more
@pytest.mark.parametrize("arrivals", ["closed", "poisson"])
def test_answers_of_one_token_have_an_answer(
    elsewhere: Path, capsys: pytest.CaptureFixture[str], arrivals: str
) -> None:
    words = ["study=serving", "model=llama3_70b", "traffic.output.tokens=1", f"traffic.arrivals={arrivals}"]
    words += ["tracking=none", "decide.samples=4", "~space.traffic", "space.parallel.tp=choice(4,8)"]
    assert main([*words, "traffic.concurrency=4", "slo.tpot_s=0.01"]) == 0
    shown = capsys.readouterr().out
    assert "best: " in shown and "nan" not in shown
    assert (FinishedRun.find(elsewhere / "outputs", "serving").outputs.read_table("results")["meets"] == 1).all()


def test_bytes_of_a_prompt_are_those_of_one_rank() -> None:
    """Of two ranks of one GPU, whose experts have GPUs of their own."""
    words = ["model=gpt_oss_20b", "parallel.dp=2", "engines.apart=true", "engines.expert_gpus=4", "engines.replicas=1"]
    words += ["traffic.concurrency=4", "traffic.input.kind=fixed", "engines.gpus=8"]
    tree = request([*SMALL, *words]).tree
    rows = pd.DataFrame(
        [{"engines.apart": True, "tokens_per_s_per_gpu": 1.0, "split": "a", "traffic.arrivals": "closed"}]
    )
    (line,) = transfer_lines({name: tree[name] for name in SECTIONS}, rows)
    size = 1024 * deployment_of(design(*words)).pools[0].times.token_bytes / 1e6
    assert f": {size:,.0f} MB of a prompt at 50 GB/s a rank that sends, 50 GB/s one that receives" in line


@pytest.mark.more
def test_the_command_answers_or_names_what_binds(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["serve-plan", "model=llama3_8b", "traffic.requests=60", "traffic.output.tokens=64", "tracking=none"]
    words += ["figures=none", "space={parallel: {tp: 'choice(1,8)'}}"]
    assert main([*words, "slo.tpot_s=0.05"]) == 0
    shown = capsys.readouterr().out
    assert "best: " in shown and "--tensor-parallel-size" in shown and "tokens a dollar" in shown
    assert "with errors of predictions (90 %): " in shown and "with 1.5 times as many requests under way: " in shown
    plan = FinishedRun.find(elsewhere / "outputs", "serving").folder / "plan.yaml"
    again = ["serve-plan", f"plan={plan}", *words[1:3], "tracking=none", "figures=none", "output_dir=again"]
    assert main(again) == 0 and f"x TP {yaml.safe_load(plan.read_text())['parallel']['tp']}" in capsys.readouterr().out
    points = FinishedRun.find(elsewhere / "outputs", "serving").outputs.read_table("results")
    assert (points["tpot_s"] <= 0.05).all() and set(points["parallel.tp"]) == {1, 8}
    assert main([*words, "slo.ttft_s=0.001", "output_dir=other"]) == 3
    shown = capsys.readouterr().out
    assert "no deployment has a time to the first token within 1.000 ms: the least is" in shown and "nearest: " in shown
    assert main([*words, "slo.tpot=1"]) == 2 and "slo.tpot_s" in capsys.readouterr().err
    assert main([*words, "traffic.rate_per_s=3"]) == 2 and "arrivals=poisson" in capsys.readouterr().err


def test_ctas_of_halves_are_the_fewest_that_are_nearly_as_fast(shared: Callable[[str], Path]) -> None:
    table = read_csv(shared("data") / "tokenweave" / "fused_allreduce_rmsnorm_by_ctas.csv", needed=("num_tokens",))
    named = {name: int(name.rpartition("_")[2]) for name in table.rows[0][1] if "_ctas_" in name}
    by_ctas = {ctas: np.array([float(row[name]) for _, row in table.rows]) for name, ctas in named.items()}
    least = np.min(list(by_ctas.values()), axis=0)
    near = [ctas for ctas, column in by_ctas.items() if (column <= 1.15 * least).all()]
    assert kernels().split_ctas == min(near)


def test_a_fit_names_few_rows_of_every_group(shared: Callable[[str], Path]) -> None:
    rows = read_rows(shared("data"), settings()["fitted"]["file"])
    chosen = fitted_rows(rows)
    largest = max(Counter(fit_group(row) for row in chosen).values())
    assert len(rows) > 1000 and 30 <= len(chosen) <= 40 and largest <= 3
    assert fitted_rows(list(reversed(rows))) == chosen
    assert sorted(row.name for row in chosen) == settings()["fitted"]["rows"]  # where constants are fitted anew
    assert {f"{row.cells['backend']}" for row in chosen} == {"vllm", "sglang", "trtllm"}
    assert model_name("Qwen/Qwen3-235B-A22B-FP8") == "qwen3_235b_a22b" and len(start()) < len(chosen)


@pytest.mark.parametrize(
    ("source", "backend", "model", "precision", "expected"),
    [
        ("2026-04-06.csv", "trtllm", "deepseek-ai/DeepSeek-R1", "fp8", {"tokens": 1152, "chunked": False}),
        ("2026-04-06.csv", "trtllm", "meta-llama/Llama-3.1-70B", "fp4", {"tokens": 1736, "chunked": False}),
        ("2026-04-06.csv", "vllm", "meta-llama/Llama-3.1-70B", "fp4", {"tokens": 8192, "chunked": True}),
        ("x.csv", "trtllm", "Qwen/Qwen3-32B", "fp8", {"tokens": 2532, "sequences": 8}),
        ("x.csv", "trtllm", "meta-llama/Llama-3.1-8B-Instruct", "", {"tokens": 2532, "sequences": 7}),
        ("x.csv", "vllm", "Qwen/Qwen3-32B", "", {"tokens": 2048, "chunked": True}),
    ],
)
def test_rows_have_the_options_that_their_benchmark_gave(
    source: str, backend: str, model: str, precision: str, expected: dict[str, Any]
) -> None:
    text = f"source_file={source}; silicon_concurrency=8"
    cells = cells_of(
        silicon_data_source=text, backend=backend, model_path=model, system="h100_sxm", precision=precision
    )
    scheduler = design_tree(Row(cells, 0.1, 0.01))["server"]["scheduler"]
    assert {name: scheduler[name] for name in expected} == expected


def cells_of(**cells: str) -> dict[str, str]:
    """Cells of a row of one engine of two GPUs."""
    plain = dict.fromkeys(("moe_ep_size", "attention_dp_size"), "") | {"mode": "agg", "id": "x", "tp_size": "2"}
    lengths = {"silicon_data_source": "source_file=x.csv; silicon_concurrency=8", "isl": "1024", "osl": "512"}
    return plain | lengths | {"backend": "trtllm", "model_path": "a/Llama-3.1-70B", "system": "b200_sxm"} | cells


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        ({"model_path": "nvidia/DeepSeek-R1-0528-FP4-v2", "precision": "fp4"}, {"run.products": "nvfp4"}),
        ({"model_path": "deepseek-ai/DeepSeek-R1", "precision": "fp8"}, {"run.products": "fp8"}),
        ({"precision": "fp8", "pp_size": "2"}, {"parallel.pp": 2, "parallel.tp": 2, "engines.gpus": 4}),
        ({"precision": "fp8", "system": "h100_sxm", "tp_size": "16"}, {"system.name": "h100_8_ndr"}),
    ],
)
def test_cells_of_a_row_are_read(cells: dict[str, str], expected: dict[str, Any]) -> None:
    tree = design_tree(Row(cells_of(**cells), 0.1, 0.01))
    assert {path: get_path(tree, path) for path in expected} == expected


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        ({"precision": "fp8", "system": "a100_sxm"}, "has no constants for fp8"),
        ({"precision": "int8"}, "int8 is no format that is known"),
        ({"precision": "", "model_path": "a/DeepSeek-R1-Distill-Llama-70B"}, "no public model that is known"),
    ],
)
def test_rows_of_what_is_not_known_are_left_out_with_the_reason(cells: dict[str, str], reason: str) -> None:
    predictor = Predictor()
    assert predictor.points([Row(cells_of(**cells), 0.1, 0.01)]) == [] and reason in predictor.refused["x"]


@pytest.mark.more
def test_measured_points_are_predicted(shared: Callable[[str], Path]) -> None:
    rows = [row for row in read_rows(shared("data"), settings()["fitted"]["file"]) if not row.apart]
    points = Predictor().points([row for row in rows[::4] if row.name not in fitted_names()])
    figures = summary(points)
    assert figures["rows"] > 200 and figures["tpot_median"] < 0.08 and figures["ttft_median"] < 0.18


@pytest.mark.nightly
def test_kernels_of_experts_that_six_rows_gave_predict_the_others(shared: Callable[[str], Path]) -> None:
    rows = read_rows(shared("data"), "serving/silicon_more.csv")
    of_sets = rows_of_sets(rows)
    assert set(of_sets) == set(kernels().sets) and sum(map(len, of_sets.values())) == 6
    points = Predictor().points([row for row in rows[::4] if row.name not in fitted_names()])
    figures = summary(points)
    assert figures["rows"] > 80 and figures["tpot_median"] < 0.15


def test_a_set_of_kernels_that_was_not_fitted_is_that_of_the_same_architecture_and_format() -> None:
    def dispatch_s(backend: str, system: str, model: str) -> float:
        cells = cells_of(backend=backend, system=system, model_path=model, precision="fp8", moe_ep_size="1")
        design = ServingBackend().design(design_tree(Row(cells, 0.1, 0.01)))
        assert isinstance(design, Serving)
        return kernels().of(design).dispatch_s

    r1, qwen = "deepseek-ai/DeepSeek-R1", "Qwen/Qwen3-235B-A22B-FP8"
    constants = kernels().sets["tensorrt_llm blackwell latent fp8"].dispatch_s
    assert dispatch_s("trtllm", "b200_sxm", r1) == dispatch_s("sglang", "b200_sxm", r1) == constants
    # attention is the first that is given up, then the software, then the architecture
    assert dispatch_s("trtllm", "b200_sxm", qwen) == constants
    assert dispatch_s("sglang", "mi300x", qwen) == kernels().experts["sglang hopper latent fp8"].dispatch_s


def test_a_time_of_dispatches_that_is_typed_counts() -> None:
    tree = design_tree(Row(cells_of(model_path="deepseek-ai/DeepSeek-R1", precision="fp8"), 0.1, 0.01))
    tree["server"]["scheduler"]["dispatch_s"] = 1e-3
    design = ServingBackend().design(tree)
    assert isinstance(design, Serving) and kernels().of(design).dispatch_s == 1e-3


@pytest.mark.more
def test_disaggregated_points_with_known_engines_are_predicted(shared: Callable[[str], Path]) -> None:
    rows = [row for row in read_rows(shared("data"), settings()["fitted"]["file"]) if row.apart]
    predictor = Predictor()
    figures = summary(predictor.points([row for row in rows if row.run is not None][::3]))
    assert figures["rows"] > 10 and figures["tpot_median"] < 0.15
    assert predictor.predict(next(row for row in rows if len(row.runs) > 1)) is None
    assert all("runs of its benchmark's lists" in reason for reason in predictor.refused.values())


def test_engines_of_disaggregated_rows_are_those_of_the_lists() -> None:
    cells = {"model_path": "deepseek-ai/DeepSeek-R1", "system": "h200_sxm", "backend": "trtllm", "precision": "fp8"}
    cells |= {"isl": "1024", "osl": "1024", "prefill_moe_ep_size": "8", "decode_moe_ep_size": "8"}
    (run,) = runs_of(cells, 9 * 128)
    assert (run.prompts.workers, run.prompts.ranks, run.generating.workers, run.generating.ranks) == (1, 8, 9, 8)
    assert run.drafts == 0 and run.sequences == 512
    row = Row({**cells_of(**cells), "mode": "disagg", "silicon_data_source": "silicon_concurrency=1152"}, 1.0, 0.01)
    assert row.gpus == 80 and row.tokens_per_s_per_gpu(1.0, 0.01) == pytest.approx(1152 * 1024 / (1 + 10.23) / 80)
    assert sum(role.workers * role.gpus for role in (run.prompts, run.generating)) == 80
    assert {run.drafts for run in runs_of(cells, 144)} == {0, 3}  # of 16 requests an engine, with drafts and without
    assert not runs_of(cells, 145)
    sglang = {**cells, "backend": "sglang", "prefill_moe_ep_size": "1", "decode_moe_ep_size": "1", "isl": "8192"}
    assert len(runs_of(sglang, 16)) == 4 and len(runs_of({**sglang, "decode_num_workers": "6"}, 16)) == 2
    assert all(not run.generating.shared for run in runs_of(sglang, 64))  # those alike in both degrees alone


@pytest.mark.slow
def test_limits_that_no_deployment_is_within_are_drawn_empty() -> None:
    times, rates = [0.0112, 0.02, 0.04], [100.0, 200.0, 300.0]  # 0.0112 x 1.02 is rounded to 0.011
    points = pd.DataFrame({"tpot_s": times, "tokens_per_s_per_gpu": rates, "split": ["a", "b", "b"]})
    title = within_limits(points).title
    assert "a serves most within the tightest" in title
