"""Whether advised plans start, are typed and exported: `python -m benchmarks.startable [--json] [--plans N]`.

Plans are drawn over models, machines, modes, software and numbers of GPUs: one of the best layouts of a step, with
choices of the study's space that break no rule. Each is held against what its framework checks when it starts
(`validation.framework_checks`, written from their code), composed again from the command that gives it, and read back
from the files that `settings export` writes for its framework.

plans: drawn. startable: nothing that the framework checks refuses them. command_equal: the command gives the same time
to the digit. export_equal: what is read back is the plan, but for what the export tells that there is no setting for.
published_refused: configurations that NVIDIA published with throughput and that take more than a GPU's memory (with
DIR, the folder of measured tables); published_share: the largest share of the memory that one of them takes.
figures_wrong, headlines_wrong: values of figures and of headlines that are not those of their tables.
serve_answers_moved: answers of `serve-plan` that change with the number of requests.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from benchmarks import drawn as drawn_values
from dse.config.compose import request
from dse.config.overrides import override
from dse.errors import ConfigError
from dse.errors.parsing import parse_yaml
from dse.space import get_path
from dse_deploy.command import nearest, write_all
from dse_deploy.facts import ModelFacts
from dse_deploy.settings import tools, usual
from dse_serving.steadiness import QUESTIONS, answers_moved
from simulators.steps.backend import StepBackend
from simulators.steps.overlap.sites import SERIAL
from simulators.steps.plan.choices import OFF
from simulators.steps.plan.given_plan import with_values
from simulators.steps.plan.layouts import Layout, LayoutQuestion, LayoutSection
from simulators.steps.plan.scenarios import scenarios
from simulators.steps.run.build import iteration
from simulators.steps.spread.framework_rules import switched_together
from studies.plan.judged import composed_design
from studies.plan.plan_file import all_leaves, leaves_of, put_in
from validation.framework_checks import CHECKS, Launch
from validation.left_out import given_folder
from validation.plan_matrix import MODELS
from validation.published_tables import read_throughput

STACKS: Mapping[str, tuple[str, ...]] = {
    "megatron_2026": ("h100_8_ndr", "h200_8_ndr", "b200_8_ndr", "gb200_72"),
    "megatron_2024": ("h100_8_ndr", "a100_8_hdr"),
    "torchtitan": ("h100_8_ndr", "b200_8_ndr", "mi300x_8_roce"),
    "primus": ("mi300x_8_roce", "mi325x_8_roce", "mi355x_8_roce"),
    "vllm": ("h100_8_ndr", "h200_8_ndr", "b200_8_ndr"),
    "vllm_rocm": ("mi300x_8_roce", "mi355x_8_roce"),
    "sglang": ("h100_8_ndr", "h200_8_ndr", "mi300x_8_roce"),
    "tensorrt_llm": ("h100_8_ndr", "h200_8_ndr", "b200_8_ndr"),
}
"""Software -> machines that its plans are drawn on."""
_TRAINING = ("megatron_2026", "megatron_2024", "torchtitan", "primus")
_NVIDIA = ("megatron_bridge", "nemo")
_TRIES = 12  # draws of a choice that may break rules
_BEST = 8  # layouts among which one is drawn


@dataclass(frozen=True)
class DrawnPlan:
    """A plan: the words of its step, its tree, and its own values by path."""

    words: tuple[str, ...]
    tree: Mapping[str, Any]
    plan: Mapping[str, Any]

    @property
    def tool(self) -> str:
        """The framework."""
        return str(get_path(self.tree, "stack.tool"))


def draw(random: Random, backend: StepBackend) -> DrawnPlan | None:
    """A plan of a step that is drawn; None where no layout of it fits."""
    stack = random.choice(list(STACKS))
    mode = "training" if stack in _TRAINING else random.choice(["prefill", "decode"])
    gpus = random.choice([8, 16, 32, 64])
    words = [f"model={random.choice(MODELS)}", f"system={random.choice(STACKS[stack])}", f"stack={stack}"]
    words += [f"run.mode={mode}", f"run.sequence_length={random.choice([2048, 4096, 8192])}"]
    words += ["run.products=fp8"] if random.random() < 0.4 and stack != "megatron_2024" else []
    sequences = gpus * random.choice([1, 2, 4, 16])
    composed = request(["study=plan", *words, f"run.batch={sequences}", "parallel.tp=1"])
    if composed.problems:
        return None
    (tree, *_) = scenarios(composed_design(composed.tree)).values()
    try:
        question = LayoutQuestion.of(tree, LayoutSection(auto=True, gpus=gpus), backend.steps)
    except ConfigError:
        return None
    layouts = question.candidates().fitting.layouts[:_BEST]
    if not layouts:
        return None
    layout = random.choice(list(layouts))
    return _with_choices(random, backend, (words, layout.tree(question.tree), layout, composed.tree))


def _with_choices(random: Random, backend: StepBackend, drawn: tuple[list[str], Any, Layout, Any]) -> DrawnPlan:
    """A layout with choices that break no rule, drawn one after the other."""
    words, tree, layout, config = drawn
    values: dict[str, Any] = {**layout.paths, "parallel.sequence_parallel": tree["parallel"]["sequence_parallel"]}
    tree = {**tree, "sites": {}}
    texts = ((path, str(text)) for path, text in all_leaves(config["space"]) if path in OFF)
    knobs = {path: text.removeprefix("choice(").rstrip(")").split(",") for path, text in texts}
    for path in random.sample(sorted(knobs), min(_TRIES, len(knobs))):
        value = parse_yaml(random.choice(knobs[path]), path)
        changes = dict.fromkeys(_at_once(backend, path, value, tree), value)
        if path == "parallel.pipeline" and value == "interleaved":
            changes |= {"parallel.virtual_stages": random.choice([2, 3, 4, 5]), "parallel.messages": "beside"}
        if _counts(backend, path, tree) and _is_legal(backend, changed := with_values(tree, changes)):
            tree, values = changed, {**values, **changes}
    plan: dict[str, Any] = {}
    for path, value in values.items():
        put_in(plan, path, value)
    return DrawnPlan(tuple(words), tree, plan)


def _at_once(backend: StepBackend, path: str, value: Any, tree: Mapping[str, Any]) -> Iterator[str]:
    """Yield a knob, and the sites of the step that the software switches with it."""
    yield path
    site = path.removeprefix("sites.")
    switches = switched_together(tree.get("stack"), [value]) if site != path else {}
    for sites in (sites for sites in switches.values() if site in sites):
        yield from (f"sites.{other}" for other in sites if _counts(backend, f"sites.{other}", tree))


def _counts(backend: StepBackend, path: str, tree: Mapping[str, Any]) -> bool:
    """Tell whether a knob changes something in a step."""
    condition = backend.condition(path, tree)
    if condition is None:
        return False
    return all(bool(needed == get_path(tree, other)) for other, needed in condition.items())


def _is_legal(backend: StepBackend, tree: Mapping[str, Any]) -> bool:
    try:
        return not backend.problems(backend.design(tree))
    except ConfigError:
        return False


def seconds_of(backend: StepBackend, tree: Mapping[str, Any]) -> float:
    """Time of a step [s]."""
    return float(iteration(backend.design(tree)).seconds)


def violations(drawn: DrawnPlan, backend: StepBackend) -> list[str]:
    """What the framework of a plan would refuse when it is started."""
    return list(CHECKS[drawn.tool](Launch.of(backend.design(drawn.tree), layout=_layout_of(drawn))))


def _layout_of(drawn: DrawnPlan) -> str:
    """The layers of stages by name, where the export of a plan writes them."""
    if drawn.tool != "megatron":
        return ""
    rows = (row for part in _written(drawn).values() for row in part.rows)
    return next((str(row.value) for row in rows if row.name == "--pipeline-model-parallel-layout"), "")


def _written(drawn: DrawnPlan) -> Mapping[str, Any]:
    return write_all(tools()[drawn.tool], _context(drawn), "plan", ModelFacts.of(drawn.tree))


def _context(drawn: DrawnPlan) -> dict[str, Any]:
    """A plan with what the step has beside it, as the export writes it."""
    plan = {name: dict(entries) for name, entries in drawn.plan.items()}
    for path in ("run.precision", "run.products", "run.sequence_length"):
        if (value := get_path(drawn.tree, path)) is not None:
            put_in(plan, path, value)
    return plan


def command_is_equal(drawn: DrawnPlan, backend: StepBackend) -> bool:
    """Tell whether the command of a plan gives its time again, to the digit."""
    words = [*drawn.words, *(override(path, value) for path, value in all_leaves(drawn.plan))]
    composed = request(["study=plan", *words])
    if composed.problems:
        return False
    (tree, *_) = scenarios(composed_design(composed.tree)).values()
    return _is_legal(backend, tree) and seconds_of(backend, tree) == seconds_of(backend, drawn.tree)


def export_is_equal(drawn: DrawnPlan, backend: StepBackend) -> list[str]:
    """Knobs whose values an export loses without telling; sites that the step does not have mean nothing."""
    plan, tool, written = _context(drawn), tools()[drawn.tool], _written(drawn)
    unsaid = frozenset.intersection(*(part.unsaid for part in written.values()))
    back = dict(leaves_of(nearest(tool, plan, written)))
    sayable = dict(leaves_of(tool.sayable(plan)))
    paths = [path for path in dict.fromkeys([*sayable, *back]) if path not in unsaid]
    counting = [path for path in paths if not path.startswith("sites.") or _counts(backend, path, drawn.tree)]
    return [path for path in counting if not _same(back.get(path, _absent(path)), sayable.get(path, _absent(path)))]


def _absent(path: str) -> Any:
    """What a step has of a knob that nothing is said of."""
    return SERIAL if path.startswith("sites.") else usual(path)


def _same(left: Any, right: Any) -> bool:
    return str(left).lower() == str(right).lower()


def drawn_plans(count: int, seed: int) -> Iterator[DrawnPlan]:
    """Yield so many plans."""
    random, backend = Random(seed), StepBackend()
    while count:
        if (drawn := draw(random, backend)) is not None:
            count -= 1
            yield drawn


def figures(count: int, seed: int = 0) -> dict[str, Any]:
    """Counts over drawn plans, and the first faults."""
    backend, counts, faults = StepBackend(), dict.fromkeys(_COUNTED, 0), list[str]()
    for place, plan in enumerate(drawn_plans(count, seed), 1):
        refused, equal = violations(plan, backend), command_is_equal(plan, backend)
        lost = export_is_equal(plan, backend)
        for name, is_fine in zip(_COUNTED, (True, not refused, equal, not lost), strict=True):
            counts[name] += is_fine
        if refused or not equal or lost:
            faults.append(f"{' '.join(plan.words)} {dict(all_leaves(plan.plan))}: {refused} {equal} {lost}")
        if place % _REPORTED == 0:
            print(f"{place} of {count} plans", file=sys.stderr)
    return {**counts, "faults": faults[:_MOST_FAULTS]}


_COUNTED = ("plans", "startable", "command_equal", "export_equal")
_REPORTED, _MOST_FAULTS = 50, 20


def published_figures(data: Path) -> dict[str, Any]:
    """Published configurations of NVIDIA that take more memory than there is, and the largest share of any."""
    steps = [step for step in read_throughput(data).steps if step.table in _NVIDIA]
    shares = [float(step.metrics()["memory_share"]) for step in steps]
    refused = sum(share > 1 for share in shares)
    return {"published": len(shares), "published_refused": refused, "published_share": max(shares, default=0.0)}


def main(words: Sequence[str] | None = None) -> int:
    """Draw, count and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object with the figures")
    parser.add_argument("--plans", type=int, default=500, help="plans that are drawn")
    parser.add_argument("--seed", type=int, default=0, help="of the draws")
    parser.add_argument("--data", type=given_folder, help="folder of measured tables")
    parser.add_argument("--plans-alone", action="store_true", help="neither figures and headlines, nor serving")
    asked = parser.parse_args(words)
    found = figures(asked.plans, asked.seed)
    found |= published_figures(asked.data) if asked.data is not None else {}
    if not asked.plans_alone:
        found |= {name: value for name, value in drawn_values.counters().items() if name != "where"}
        found |= {"serve_answers_moved": answers_moved(QUESTIONS)}
    if asked.json:
        print(json.dumps(found, indent=2))
    else:
        print("\n".join(f"{name}: {value}" for name, value in found.items()))
    wrong = ("published_refused", "figures_wrong", "headlines_wrong", "serve_answers_moved")
    return 1 if found["faults"] or any(found.get(name) for name in wrong) else 0


if __name__ == "__main__":
    sys.exit(main())
