"""Plans given back: `python -m tests.campaigns.judged [--plans 50] [--seed 0] [--json]`.

Plans are drawn, written by every exporter that takes them, read back as `settings import` reads them, and judged as
`python -m dse plan plan=<file>` judges them. The judged time is compared with that of a step whose sites and knobs are
put in by hand. An exporter that refuses a plan (of another mode, of a model without experts) is counted.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from dse.backend import Batch
from dse.config.compose import Request, request
from dse.errors import ConfigError
from dse.space import get_path
from dse.study.plan import plan as plan_study
from dse_collectives.schedule_files import read_schedule as read_collective
from dse_deploy.command import nearest, write_all
from dse_deploy.facts import UNKNOWN, ModelFacts
from dse_deploy.planned_step import PlannedStep, check_target
from dse_deploy.settings import tools
from dse_deploy.step_files import STEP_FORMATS
from simulators.steps.backend import StepBackend
from simulators.steps.overlap.sites import SITES
from simulators.steps.plan.choices import OFF
from simulators.steps.plan.given_plan import AS_GIVEN
from simulators.steps.plan.scenarios import APART, scenarios
from simulators.steps.run.build import iteration
from studies.plan import UNSEARCHED, given_section
from studies.plan.judged import composed_design
from studies.plan.plan_file import leaves_of

_MACHINE = "h100_8"  # whose switch adds, so that what tools do by themselves breaks no rule
_STEPS = (
    *(("llama3_8b", "training", 1), ("llama3_70b", "prefill", 1)),
    *(("mixtral_8x7b", "training", 8), ("llama3_8b", "decode", 1)),
)
_SIZES = (("run.batch=64",), ("run.micro_batches=2", "parallel.ep=8", "parallel.sequence_parallel=true"))
"""Model, mode and GPUs that share its experts, of the steps that plans are drawn for."""
_SCHEDULES = (
    *("serial", "shard_p2p", "signalled", "hetero_fused_1d num_chunks=2", "uniform_fused_1d num_chunks=4"),
    *("uniform_fused_1d num_chunks=4 comm_engine=cu comm_cus=24", "signalled comm_engine=cu sender=tiles"),
)
_BESIDE = ("c3_sp comm_cus=12", "c3_sp_rp comm_cus=20")


@dataclass(frozen=True)
class JudgeErrors:
    """Errors of judged times. judged, refused: exports of the plans. worst: relative error."""

    num_plans: int
    judged: int
    refused: int
    worst: float
    by_tool: Mapping[str, int]


def judge_errors(plans: int, seed: int) -> JudgeErrors:
    """The worst relative error of the judged times of drawn plans, over all exporters."""
    draw, refused, errors = random.Random(seed), 0, dict[str, list[float]]()
    for place in range(plans):
        step = _STEPS[place % len(_STEPS)]
        plan = _drawn_plan(draw, step)
        for tool in tools():
            try:
                errors.setdefault(tool, []).append(_error(tool, plan, step))
            except ConfigError:
                refused += 1
    counts = {tool: len(values) for tool, values in errors.items()}
    worst = max((error for values in errors.values() for error in values), default=float("nan"))
    return JudgeErrors(plans, sum(counts.values()), refused, worst, counts)


def _drawn_plan(draw: random.Random, step: tuple[str, str, int]) -> dict[str, Any]:
    """A plan of a step: schedules of sites that it may have, and knobs."""
    _, mode, ep = step
    sites = {}
    for name, site in SITES.items():
        if (mode == "training" or not name.endswith("_backward")) and (ep == 1 or not name.startswith("ffn")):
            sites[name] = draw.choice(_SCHEDULES + (_BESIDE if site.beside else ()))
    knobs = {"collectives": draw.choice(["library", "in_switch"]), "tp": 8, "sequence_parallel": True}
    knobs |= {"ep": ep, "exchanges": draw.choice(["waited", "two_micro_batches"])} if ep > 1 else {}
    plan: dict[str, Any] = {"sites": sites, "parallel": knobs}
    return {**plan, "system": {"node": {"experts": {"num_sms": draw.choice([16, 20, 24])}}}} if ep > 1 else plan


def _error(tool: str, plan: Mapping[str, Any], step: tuple[str, str, int]) -> float:
    """Relative error of the judged time of a plan that a tool has written. Raises ConfigError where it is refused."""
    with tempfile.TemporaryDirectory(prefix="dse-judged-") as folder:
        file = Path(folder, "theirs.yaml")
        file.write_text(yaml.safe_dump(dict(plan)))
        if tools()[tool].files[0].format == "msccl":
            read_collective(file)  # which refuses all that is no schedule of a collective
        check_target(tool, plan, PlannedStep(_base(step), StepBackend(), frozenset()))
        of_step = any(part.format in STEP_FORMATS for part in tools()[tool].files)
        facts = _facts(step) if of_step else UNKNOWN
        back = nearest(tools()[tool], plan, write_all(tools()[tool], plan, "plan.yaml", facts), facts)
        file.write_text(yaml.safe_dump({"tool": tools()[tool].like or tool, **back}))
        judged = _judged_s(file, step)
    direct = _direct_s(tool, back, step)
    return abs(judged - direct) / direct


@cache
def _request(step: tuple[str, str, int]) -> Request:
    return request(["study=plan", *_typed(step), *UNSEARCHED])


def _typed(step: tuple[str, str, int]) -> list[str]:
    """Words that say which step it is."""
    model, mode, ep = step
    words = [f"model={model}", f"system={_MACHINE}", f"run.mode={mode}", "run.sequence_length=2048", *_SIZES[ep > 1]]
    return [*words, "candidates=all", *(["stack=megatron_2026"] if mode == "training" else [])]


def _typed_paths(step: tuple[str, str, int]) -> set[str]:
    return {word.partition("=")[0] for word in _typed(step)}


@cache
def _base(step: tuple[str, str, int]) -> dict[str, Any]:
    return dict(next(iter(scenarios(composed_design(_request(step).tree)).values())))


@cache
def _facts(step: tuple[str, str, int]) -> ModelFacts:
    planned = PlannedStep(_base(step), StepBackend(), frozenset())
    return planned.facts(planned.tree)


def _judged_s(file: Path, step: tuple[str, str, int]) -> float:
    """Time of the point of a run that judges a file [s]."""
    composed = _request(step)
    section = given_section(file, _typed_paths(step))
    planned = plan_study(replace(composed, tree={**composed.tree, "given": section}))
    (name,) = (name for name in planned.spaces if name.endswith(f"{APART}{AS_GIVEN}"))
    backend = planned.backend
    (results,) = backend.evaluate([Batch(backend.design(planned.spaces[name].base), {})])
    assert results.ok.all()
    return float(results.column("iteration_s")[0])


def _direct_s(tool: str, plan: Mapping[str, Any], step: tuple[str, str, int]) -> float:
    """Time of the same step with sites and knobs put in by hand [s]."""
    base = _base(step)
    tree = {**base, "parallel": dict(base["parallel"]), "optimizer": dict(base["optimizer"]), "sites": {}}
    tree["system"] = json.loads(json.dumps(base["system"]))
    values = {**OFF, **tools()[tool].values, **dict(leaves_of(plan))}
    values = {path: value for path, value in values.items() if path not in _typed_paths(step)}
    split = values.get("parallel.sequence_parallel", base["parallel"]["sequence_parallel"]) is True
    training = step[1] == "training"
    for path, value in values.items():
        section, _, name = path.partition(".")
        if section == "sites":
            is_there = (training or not name.endswith("_backward")) and (split or SITES[name].order == "after")
            is_there &= step[2] == 1 or not name.startswith("ffn")
            tree["sites"] |= {name: value} if is_there else {}
        elif section == "system":
            if get_path(tree, "system.node.experts") is not None:
                tree["system"]["node"]["experts"]["num_sms"] = value
        else:
            tree[section][name] = value
    return float(iteration(StepBackend().design(tree)).seconds)


def main(words: Sequence[str] | None = None) -> int:
    """Print the errors."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plans", type=int, default=50, help="drawn plans (50)")
    parser.add_argument("--seed", type=int, default=0, help="of the drawing")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(words)
    errors = judge_errors(options.plans, options.seed)
    if options.json:
        print(json.dumps(asdict(errors), indent=2))
    else:
        counts = f"{errors.judged} judged, {errors.refused} refused"
        print(f"{errors.num_plans} plans: {counts}, worst error {errors.worst:.1e}")
        print(", ".join(f"{tool} {count}" for tool, count in errors.by_tool.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
