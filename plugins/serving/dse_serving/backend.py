"""The serving backend: deployments under traffic, one after the other, by the compiled loop."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel

import dse_serving.columns as at
from dse.backend import Backend, Batch, Interval, Metric, Replay, Result, Results, Tree
from dse.config.named_file import content_of
from dse.errors import ConfigError, Problem, Problems, did_you_mean
from dse_serving.design import (
    Engines,
    Server,
    Serving,
    Slo,
    broken_rules,
    deployment_of,
    kernels,
    prompt_engines,
    usd_per_gpu_hour,
)
from dse_serving.results import METRICS, ServingRun, metrics_of
from dse_serving.steady import serve_steadily
from dse_serving.traffic import TrafficSpec
from simulators.steps.backend import StepBackend
from simulators.workloads.model_zoo import option_tree

_OWN: Mapping[str, Any] = {"server": Server, "engines": Engines, "traffic": TrafficSpec, "slo": Slo}
_OF_STEPS = ("system", "model", "kernels", "run", "parallel")
_CHOSEN = {"mode": "decode", "batch": 1, "sequence_length": 1, "micro_batches": 1}
"""Values of a run that engines choose step by step."""
_APART = {"engines.apart": True}
_MIXED = {"server.scheduler.policy": "mixed", "engines.apart": False}
_CONDITIONS: Mapping[str, Mapping[str, Any]] = {
    "engines.prefill_replicas": _APART,
    "engines.prefill_tp": _APART,
    "engines.beside": _APART,
    "traffic.concurrency": {"traffic.arrivals": "closed"},
    "server.scheduler.gathered": _MIXED,
    "server.scheduler.wait_steps": _MIXED,
    "server.scheduler.wait_share": _MIXED,
    "server.scheduler.read_steps": {"engines.apart": False},
}
"""Knob -> values with which it counts."""
_LOGGED = 4000  # steps of a timeline


class ServingBackend(Backend):
    """Deployments of models, under traffic."""

    version = "11"
    metrics: Mapping[str, Metric] = METRICS

    def __init__(self) -> None:
        self._steps, self._parts = StepBackend(), dict[str, Any]()

    def sections(self, tree: Tree) -> None:
        """Check that a configuration has the sections of a deployment and no others."""
        check, names = Problems(), (*_OF_STEPS, *_OWN)
        for name in set(tree) - set(names):
            check.add(name, "is not a known section", way_out=did_you_mean(name, names))
        for name in names:
            if not isinstance(tree.get(name), Mapping):
                check.add(name, "is no section of keys", value=tree.get(name))
        for name in _CHOSEN if isinstance(tree.get("run"), Mapping) else ():
            if name in tree["run"]:
                way = "leave it out: traffic has the lengths, the scheduler the sizes"
                check.add(f"run.{name}", "is chosen by engines, step by step", value=tree["run"][name], way_out=way)
        check.done()

    def scenarios(self, tree: Tree) -> Mapping[str, Tree]:
        """The configuration itself, whose traffic can be drawn. Raises ConfigError, of a trace that is out of order."""
        check = Problems()
        spec = check.model(TrafficSpec, tree["traffic"], path="traffic")
        check.done()
        assert spec is not None
        # drawn here once, so that a faulty trace is refused before any design
        spec.draw()
        return {str(tree["model"]["name"]): {**tree, "traffic": _with_content(tree["traffic"])}}

    def condition(self, path: str, tree: Tree) -> Mapping[str, Any] | None:
        """Knobs of engines of prompts count where these are apart, those of arrivals where these are of their kind."""
        return _CONDITIONS.get(path, super().condition(path, tree))

    def design(self, tree: Tree) -> Serving:
        """A validated deployment. Raises ConfigError with every problem."""
        check, parts = Problems(), dict[str, Any]()
        step_tree = {name: tree[name] for name in _OF_STEPS}
        own = {name: tree[name] for name in _OWN} | {"traffic": _with_content(tree["traffic"])}
        for name, part in {"step": step_tree, **own}.items():
            text = name + json.dumps(part, sort_keys=True, default=str)
            if text not in self._parts:  # a part that many designs share is read once
                self._parts[text] = self._step(part) if name == "step" else check.model(_OWN[name], part, path=name)
            parts[name] = self._parts[text] if self._parts[text] is not None else self._parts.pop(text)
        check.done()
        step = parts.pop("step")
        return Serving.model_construct(**{name: getattr(step, name) for name in type(step).model_fields}, **parts)

    def _step(self, tree: Tree) -> Any:
        sections = {
            **tree,
            "kernels": {**tree["kernels"], "host_s": None},  # of the engine, not of the kernels
            "run": {**tree["run"], **_CHOSEN},
            "optimizer": option_tree("optimizer", "adam"),
        }
        return self._steps.design(sections)

    def problems(self, design: BaseModel) -> Sequence[Problem]:
        """Rules that a deployment breaks, those of its steps among them."""
        assert isinstance(design, Serving)
        # the batch of a run is none here: engines choose it step by step
        of_steps = [problem for problem in self._steps.problems(design) if problem.path != "run.batch"]
        prompts, listed = prompt_engines(design), set(map(str, of_steps))
        of_prompts = [] if prompts is None else self._steps.problems(prompts)
        of_steps += [
            replace(problem, path="engines.prefill_tp") if problem.path == "parallel.tp" else problem
            for problem in of_prompts
            if problem.path != "run.batch" and str(problem) not in listed
        ]
        return [*of_steps, *broken_rules(design)]

    def evaluate(self, batches: Sequence[Batch]) -> list[Results]:
        """Serve the traffic of one design after the other."""
        return [Results.of([self.result(design) for design in batch.designs()]) for batch in batches]

    def result(self, design: BaseModel) -> Result:
        """The metrics of a design, or why it cannot serve or keep up with its traffic."""
        assert isinstance(design, Serving)
        refused = self.refusal(design)
        if refused is not None:
            return refused
        try:
            # traffic beyond the knee is a property of the deployment, and no failure of the run
            served = self.serve(design)
        except ConfigError as error:
            return Result("infeasible", reason="; ".join(map(str, error.problems)))
        slo = design.slo
        limits = (slo.ttft_s, slo.tpot_s)
        metrics = metrics_of(served, float(slo.percentile), limits, usd_per_gpu_hour(design))
        return Result("ok", metrics, engine="compiled")

    def serve(self, design: Serving, logged: int = 0) -> ServingRun:
        """The run of a design. logged: steps that are noted. Raises ConfigError where it cannot serve its traffic, or
        cannot keep up with it (`dse_serving.steady.Overloaded`).
        """
        share = float(design.slo.percentile)
        return serve_steadily(deployment_of(design), design.traffic, percentile=share, logged=logged)

    def replay(self, design: BaseModel) -> Replay:
        """Steps of every engine, as far as they are noted."""
        assert isinstance(design, Serving)
        log = self.serve(design, _LOGGED).state.log
        # rows of the log that no step filled end at 0
        rows = log[log[:, at.LOG_FINISH] > 0]
        return Replay(tuple(_interval(row) for row in rows), {})

    def facts(self, design: BaseModel) -> Sequence[tuple[str, Any, str, str]]:
        """Constants of the machine, of the serving software and of its kernels, with sources."""
        assert isinstance(design, Serving)
        software = [*design.server.facts_below("server"), *kernels().facts_below("serving_kernels")]
        return [*self._steps.facts(design), *software]

    def models(self, design: BaseModel) -> Mapping[str, str]:
        """Models of the costs of GEMMs and collectives."""
        return self._steps.models(design)


def _with_content(traffic: Tree) -> Tree:
    """Traffic whose trace is named by what it holds, not by its path alone. Raises ConfigError."""
    named = traffic.get("trace")
    if not isinstance(named, str):
        return traffic
    return {**traffic, "trace": {"content": content_of(Path(named), "traffic.trace"), "note": named}}


def _interval(row: Any) -> Interval:
    start, finish = row[at.LOG_START], row[at.LOG_FINISH]
    generating, tokens = row[at.LOG_GENERATING], row[at.LOG_PROMPT_TOKENS]
    kind = "decode" if tokens == 0 else "prefill" if generating == 0 else "mixed"
    return Interval(
        f"engine {row[at.LOG_ENGINE]:.0f}",
        f"{generating:.0f} generate, {tokens:.0f} tokens of prompts",
        kind,
        start,
        finish,
    )
