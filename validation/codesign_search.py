"""Co-design searched against enumerated: the best plan of a machine, and the front of machines.

inner: on machines drawn from the space, the time under every plan over that of the plan that sites find one by one.
outer: the front that the study's search reaches with a fiftieth of all points (a machine under a plan each), over that
of all machines, as the hypervolume of speed, power and cost; and how many points enumeration covers in a second.
claims: what papers say of features, on the base and under its prices: how many copy engines pay (ConCCL), T3's tracker
with and without units in memory, copies by units in memory (JIT-Q), and where NICs are (fused operators).
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import moocore
import numpy as np
import pandas as pd
from numpy.typing import NDArray

from benchmarks.recorded import ROOT
from dse.config.compose import request
from dse.errors.terminal import bar
from dse_codesign.backend import Codesign, CodesignBackend, Judge, largest_die_mm2, metrics_of
from dse_codesign.machine import Base, Machine
from dse_codesign.plans import PlanOptions, best_plans, enumerate_plans, plan_seconds
from dse_codesign.technology import known_gpus, price
from dse_codesign.worth import row_of, worths
from simulators.hardware.pim import Pim
from simulators.steps.backend import StepBackend
from simulators.steps.backend import metrics_of as step_metrics
from simulators.workloads.model_zoo import option_tree

Floats = NDArray[np.float64]
_MACHINES = 200
_SEEDS = 4
_SHARE = 0.02
_SITES = 4  # of a training step whose plans are enumerated: 256
_AXES: Mapping[str, Sequence[float]] = {
    "num_cus": tuple(range(64, 184, 10)),
    "clock": (0.7, 0.8, 0.9, 1.0, 1.1, 1.2),
    "matrix_rate": (0.5, 1.0, 2.0),
    "dies": (1, 2),
    "hbm_stacks": (4, 5, 6, 8),
    "links": (0.5, 1.0, 2.0, 4.0),
    "lane_rate": (1.0, 1.5),
}
"""Space of the outer search: 13,824 machines."""
_WORKLOADS = ("decode", "prefill")
_OBJECTIVES = ("throughput_x", "power_w", "cost_usd")


def _codesign() -> Codesign:
    tree = request(["study=codesign"]).tree
    return CodesignBackend().design({name: tree[name] for name in Codesign.model_fields})


def inner(count: int = _MACHINES, seed: int = 0) -> dict[str, Any]:
    """Share of the optimum that sites decided one by one reach, on drawn machines: the worst, by workload."""
    design, drawn = _codesign(), np.random.default_rng(seed)
    base = Base(design.system, design.technology)
    numbers = {name: drawn.choice(np.array(values, float), count) for name, values in _AXES.items()}
    machine = Machine().model_copy(update=numbers)

    def systems(places: NDArray[np.intp]) -> Any:
        arrays = {name: values[places] for name, values in numbers.items()}
        return base.system_of(machine.model_copy(update=arrays))

    shares = {}
    for name, step in design.workloads.items():
        sites = step.options.options_of(step.design)
        kept = list(sites)[:: max(1, len(sites) // _SITES)][:_SITES]
        chosen = {site: step.options.sites[site] for site in kept}
        options = PlanOptions(sites=chosen, collectives=step.options.collectives)
        found = best_plans(step.design, options, systems, np.ones(count, bool)).metrics["iteration_s"]
        plans = list(enumerate_plans(step.design, options))
        best = np.full(count, np.inf)
        with bar(f"inner {name}", len(plans), "plans") as advance:
            for plan in plans:
                best = np.minimum(best, plan_seconds(step.design, plan, systems, count))
                advance(1)
        shares[name] = float(np.min(best / found))
    return {"inner_share_of_optimum": min(shares.values()), "inner_by_workload": shares, "inner_machines": count}


def _space(design: Codesign) -> tuple[Judge, Machine, int]:
    steps = {name: design.workloads[name] for name in _WORKLOADS}
    grids = np.meshgrid(*(np.array(values, float) for values in _AXES.values()), indexing="ij")
    arrays = {name: grid.reshape(-1) for name, grid in zip(_AXES, grids, strict=True)}
    judge = Judge(Base(design.system, design.technology), steps)
    return judge, Machine().model_copy(update=arrays), grids[0].size


def outer(seeds: int = _SEEDS) -> dict[str, Any]:
    """Share of the hypervolume of all machines that a search reaches with a fiftieth of the points: the worst seed."""
    design = _codesign()
    judge, machine, size = _space(design)
    began = time.perf_counter()
    columns = metrics_of(judge, machine, judge.judge(machine, size))
    taken = time.perf_counter() - began
    plans = sum(step.options.num_plans(step.design) for step in judge.steps.values())
    computed = sum(judge.computed.values())
    legal = (columns["die_mm2"] <= largest_die_mm2(judge.base)) & (columns["memory_share"] <= 1)
    everything = np.column_stack([columns[name] for name in _OBJECTIVES])[legal]
    trials = int(_SHARE * plans * size / (computed / judge.num_known))  # no machine may share its steps with another
    shares = [_share(everything, _searched(trials, seed)) for seed in range(seeds)]
    return {
        "machines": size,
        "points": plans * size,
        "machines_searched": trials,
        "outer_hypervolume_at_2pct": min(shares),
        "outer_by_seed": shares,
        "evaluations_per_s": plans * size / taken,
        "steps_per_s": computed / taken,
    }


def _searched(trials: int, seed: int) -> Floats:
    """Objectives [points, 3] that the study's search finds."""
    choices = {name: ",".join(f"{value:g}" for value in values) for name, values in _AXES.items()}
    space = [f"+space.machine.{name}=choice({values})" for name, values in choices.items()]
    with tempfile.TemporaryDirectory() as name:
        words = ["space={}", *space, f"budget.trials={trials}", f"seed={seed}"]
        words += ["~workloads.training", "store=none", "tracking=none", "figures=none", "fidelity=none"]
        command = [sys.executable, "-m", "dse", "study=codesign", *words]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        subprocess.run(command, cwd=name, env=environment, check=True, stdout=subprocess.DEVNULL)
        (table,) = Path(name).glob("outputs/codesign/2*/results.parquet")
        rows = pd.read_parquet(table)
    ok = rows[(rows["status"] == "ok") & (rows["memory_share"] <= 1)]
    return ok[list(_OBJECTIVES)].to_numpy(float)


def _share(everything: Floats, found: Floats) -> float:
    """Hypervolume of some machines over that of all, objectives between their least and most values."""
    signs = np.array([-1.0, 1.0, 1.0])
    whole, part = everything * signs, found * signs
    low, high = whole.min(axis=0), whole.max(axis=0)
    volumes = [moocore.hypervolume((points - low) / (high - low), ref=np.ones(3)) for points in (part, whole)]
    return float(volumes[0] / volumes[1])


def claims() -> dict[str, Any]:
    """What papers say of features, by these models with a price: speeds over the base's, areas, and what pays."""
    design = _codesign()
    judge = Judge(Base(design.system, design.technology), design.workloads)
    counts = (1, 2, 4, 7, 14)
    engines = judge.judge_all([(Machine(copy_engines=count), 1) for count in counts])
    speeds = {count: float(part.throughput[0]) for count, part in zip(counts, engines, strict=True)}
    places = ("cpu", "pcie_switch", "gpu")
    placed = judge.judge_all([(Machine(nic_placement=place), 1) for place in places])
    worth = {feature.name: row_of(feature) for feature in worths(judge, Machine())}
    tracker, with_units, off_host = (
        worth[name] for name in ("T3's tracker", "T3 with units in memory", "NICs off the host")
    )
    just_in_time = _just_in_time(design)
    return {
        "conccl_speed_by_copy_engines": speeds,
        "t3_tracker": _priced(tracker),
        "t3_with_units_in_memory": _priced(with_units),
        "jitq_units_over_copies_by_the_gpu": just_in_time,
        "nic_training_speed_by_placement": {
            place: float(part.speeds["training"][0]) for place, part in zip(places, placed, strict=True)
        },
        "nic_off_the_host": _priced(off_host),
        "signs_as_published": {
            "conccl: copy engines pay up to one for each peer": 0
            <= speeds[14] - speeds[7]
            < (speeds[7] - speeds[1]) / 2,
            "t3: faster for little area": bool(tracker["gain"] > 1 and tracker["area_mm2"] < 1 and tracker["pays"]),
            "jitq: units in memory beat copies by the GPU": just_in_time["gain"] > 1,
            "fused operators: NICs at the GPU, not behind the host": bool(off_host["gain"] > 1 and off_host["pays"]),
        },
    }


def _priced(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: row[name] for name in ("gain", "area_mm2", "usd", "usd_worth", "pays", "odds")}


def _just_in_time(design: Codesign) -> dict[str, Any]:
    """Copies of weights made by units in memory, against those by the GPU, in a step of training of study jitq.

    gain: of speed. usd: of units in all stacks of its GPU, MI250X; usd_worth: of the gain, as throughput for a dollar.
    """
    steps, backend = dict[str, Any](), StepBackend()
    for made_by in ("pim", "gpu", "stored"):
        tree = request(["study=jitq", f"quantised={made_by}", "models=[llama2_7b]"]).tree
        (scenario,) = backend.scenarios(tree).values()
        steps[made_by] = step_metrics(backend.design(scenario))
    knobs, nominal = known_gpus().gpus["mi250x"].machine(design.technology), design.technology.nominal
    units = Pim.model_validate(option_tree("pim", "hbm3_strawman")["gpu"]["pim"]).units
    prices = [
        float(np.squeeze(price(machine, nominal).total_usd))
        for machine in (knobs, knobs.with_knobs({"pim_units": units}))
    ]
    gain = float(steps["pim"]["tokens_per_s"] / steps["gpu"]["tokens_per_s"])
    saved = float(steps["stored"]["memory_bytes"] - steps["pim"]["memory_bytes"])
    worth = (gain - 1) * prices[0]
    return {
        "gain": gain,
        "usd": prices[1] - prices[0],
        "usd_worth": worth,
        "pays": prices[1] - prices[0] < worth,
        "bytes_saved_over_stored_copies": saved,
        "speed_over_stored_copies": float(steps["pim"]["tokens_per_s"] / steps["stored"]["tokens_per_s"]),
    }


GROUPS: Mapping[str, Callable[[], dict[str, Any]]] = {"inner": inner, "outer": outer, "claims": claims}
"""Group -> its figures."""
