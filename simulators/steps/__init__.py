"""Whole iterations of models: their operators from a description, what they cost, and how they follow one another."""

from dse.plugins import Command

BACKENDS = {
    "step": "simulators.steps.backend:StepBackend",
    "powered_step": "simulators.steps.powered:PoweredStepBackend",
}
COMMANDS = {
    "implementations": Command(
        "simulators.steps.overlap.implementations:list_implementations",
        "implementations [<name> ...]",
        "software that overlaps a GEMM and its collective: GPUs, schedules, sources of its constants",
        examples=("implementations", "implementations torch_async_tp"),
    ),
}
GROUPS = {
    "kernels": "Kernels of a framework",
    "stack": "Software of a step, with its kernels",
    "optimizer": "Optimizers",
    "candidates": "Schedules that a plan tries",
    "iterations": "Iterations that stand for an epoch",
    "quantised": "Low-precision copies of weights",
}
VARIANTS = {"kernels": ("name", "description")}
"""Group of options that may be variants of one another -> keys that none inherits."""
