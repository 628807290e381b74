"""Whole iterations of models: their operators from a description, what they cost, and how they follow one another."""

from dse.plugins import Command

BACKENDS = {"step": "simulators.steps.backend:StepBackend"}
COMMANDS = {
    "implementations": Command(
        "simulators.steps.implementations:list_implementations",
        "implementations [<name> ...]",
        "software that overlaps a GEMM and its collective: GPUs, schedules, sources of its constants",
        examples=("implementations", "implementations torch_async_tp"),
    ),
    "profile seqpoint": Command(
        "simulators.steps.epoch_log:seqpoint",
        "profile seqpoint data=<csv> [k0=5] [error=0.01] [out=<csv>]",
        "which iterations of a log over sequence lengths to profile, and what they project",
        {
            "data": "CSV: sequence_length,seconds",
            "k0": "least number of groups (5)",
            "error": "allowed error of the projection (0.01)",
            "out": "CSV to write",
        },
        ("profile seqpoint data=my_epoch.csv",),
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
