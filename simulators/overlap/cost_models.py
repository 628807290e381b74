"""Models by which a design's operators are costed: their names, and what a machine lacks for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from dse.errors.rules import Rule
from simulators.hardware.machine import System, peak_format
from simulators.overlap.design import OverlapDesign, Schedule
from simulators.workloads.operators import Gemm, Mlp, Workload


def model_names(design: OverlapDesign) -> Mapping[str, str]:
    """Operator -> name of the model of its cost, with what the schedule's family refines."""
    refinement = getattr(design.schedule, "gemm_refinement", "")
    models = sorted({design.system.gemm_model(precision) for precision in gemm_precisions(design.workload)})
    gemm = ", ".join(models) + (f" with {refinement}" if refinement else "")
    return {"gemm": gemm, "collective": design.system.costs.collective}


def model_rules(system: System, workload: Workload, schedule: Schedule) -> Iterator[Rule]:
    """Rules on what the chosen models need: constants or peaks of every precision, a measured library."""
    gpu, models = system.gpu, system.costs
    refinement = getattr(schedule, "gemm_refinement", "")
    fitted = [precision for precision in gemm_precisions(workload) if system.gemm_model(precision) != "waves"]
    if refinement and fitted:
        rule = f"has no {refinement} at {', '.join(fitted)}, which schedule.family = {schedule.family} needs"
        yield Rule("system.costs.gemm", True, rule, models.gemm, way_out="use system.costs.gemm=waves")
    for precision in gemm_precisions(workload):
        if system.gemm_model(precision) == "fitted" or gpu.peak_ratio(precision) is not None:
            continue
        if models.gemm == "fitted":
            way = "take another precision or GPU, or fit them: python -m dse machine calibrate"
            rule = "is missing: a GEMM of the workload has this precision"
            yield Rule(f"system.gpu.efficiency.{precision}", True, rule, way_out=way)
        else:
            rule = "is missing: a GEMM of the workload has this precision"
            way = "take another precision or GPU, or give the peak with its source"
            yield Rule(f"system.gpu.peak_flop_per_s.{peak_format(precision)}", True, rule, way_out=way)
    if models.collective == "library" and system.node.library is None and system.node.num_gpus > 1:
        way = "use system.costs.collective=links, or give what the library reaches"
        yield Rule("system.node.library", True, "is missing: costs.collective = library reads it", way_out=way)


def reads_fact(design: OverlapDesign, path: str) -> bool:
    """Return whether a design reads the constant at a path: fitted ones of its precisions, tiles, or of the switch."""
    if path.startswith("system.node.in_switch."):
        return getattr(design.schedule, "mover", None) == "switch"
    models = {precision: design.system.gemm_model(precision) for precision in gemm_precisions(design.workload)}
    if path.startswith("system.gpu.gemm."):
        return "waves" in models.values()
    if not path.startswith("system.gpu.efficiency."):
        return True
    return models.get(path.split(".")[3]) == "fitted"


def gemm_precisions(workload: Workload) -> list[str]:
    """Precisions of a workload's GEMMs, sorted."""
    return sorted({op.precision for op in workload.operators.values() if isinstance(op, Gemm | Mlp)})
