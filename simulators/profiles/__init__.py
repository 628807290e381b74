"""Profiles of real runs: what a GPU executed when, what each kernel waited for, and the same run replayed."""

from dse.plugins import Command

COMMANDS = {
    "trace-import": Command(
        "simulators.profiles.import_command:trace_import",
        "trace-import profile=<file> [out=<folder>]",
        "a PyTorch profile (Chrome trace, or a table of kernels): what is hidden, what waits for what, and its replay",
        {"profile": "JSON of the PyTorch profiler, or CSV of kernels; .gz as well", "out": "folder to write to"},
        ("trace-import profile=run.json.gz",),
    ),
}
