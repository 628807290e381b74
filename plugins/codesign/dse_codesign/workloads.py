"""Weighted workloads: a model in a mode of run, spread over GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

from pydantic import ConfigDict, Field

from dse.backend import Tree
from dse.errors import ConfigError, Problems, did_you_mean
from dse.values import Frozen
from dse.values.units import Number
from dse_codesign.plans import PlanOptions
from simulators.steps.backend import StepBackend
from simulators.steps.design import ScheduledDesign
from simulators.steps.overlap.sites import SITES, read_schedule
from simulators.workloads.model_zoo import model_tree, option_tree


class WeightedWorkload(Frozen):
    """One of the workloads that a machine is chosen for.

    model: by name (`python -m dse models`), or a file. run, parallel: as in a study of steps. weight: of it among the
    workloads; weights need not add up to 1. options: schedules by site that a plan may take; sites that mean nothing
    to the mode are passed by.
    """

    model: str
    run: Mapping[str, Any]
    parallel: Mapping[str, Any]
    weight: Annotated[Number, Field(gt=0, le=1e6)] = 1.0
    optimizer: str = "adam"
    kernels: str = "flash"
    options: PlanOptions = PlanOptions()


class Step(Frozen):
    """A workload ready to run: its step on the base machine with serial sites. Other machines take the base's place."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    weight: float
    design: ScheduledDesign
    options: PlanOptions


def steps_of(tree: Tree, system: Tree) -> dict[str, Step]:
    """The steps of the workloads of a configuration, by name.

    Raises ConfigError with every problem, by the path of the workload.
    """
    check, steps = Problems(), dict[str, Step]()
    if not tree:
        check.add("workloads", "has none", way_out="workloads.mine='{model: llama3_70b, run: {...}, parallel: {...}}'")
    # sorted, so that results do not depend on the order of a file
    for name, entry in sorted(tree.items()):
        workload = check.model(WeightedWorkload, entry, path=f"workloads.{name}")
        # all workloads are read, so that a user sees every problem at once
        if workload is None or _breaks_options(check, name, workload.options):
            continue
        try:
            design = _design(workload, system)
        except ConfigError as error:
            paths = (f"workloads.{name}.{problem.path}" for problem in error.problems)
            check.found.extend(replace(problem, path=path) for problem, path in zip(error.problems, paths, strict=True))
            continue
        steps[name] = Step.model_construct(weight=float(workload.weight), design=design, options=workload.options)
    check.done()
    return steps


def _breaks_options(check: Problems, name: str, options: PlanOptions) -> bool:
    """Note options of unknown sites, and schedules that cannot be read."""
    before = len(check.found)
    for site, texts in options.sites.items():
        path = f"workloads.{name}.options.sites.{site}"
        if site not in SITES:
            check.add(path, "is no site", way_out=did_you_mean(site, SITES))
            continue
        for text in texts:
            try:
                read_schedule(text, site)
            except ConfigError as error:
                check.found.extend(replace(problem, path=path) for problem in error.problems)
    return len(check.found) > before


def _design(workload: WeightedWorkload, system: Tree) -> ScheduledDesign:
    sections = {
        "system": system,
        "model": model_tree(workload.model, "model"),
        "run": workload.run,
        "parallel": workload.parallel,
        "optimizer": option_tree("optimizer", workload.optimizer),
        "kernels": option_tree("kernels", workload.kernels),
        "sites": {},
    }
    backend = StepBackend()
    design = backend.design(sections)
    # on the base: a workload that does not run there has no speed to compare with
    if broken := backend.problems(design):
        raise ConfigError(list(broken))
    assert isinstance(design, ScheduledDesign)
    return design
