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
    "explain": Command(
        "simulators.profiles.explain_command:explain",
        "explain <A> <B> [out=<folder>]",
        "where the difference between two profiles, or two points (<study>:<key>), comes from",
        {"out": "folder of the picture (outputs/explain)", "output_dir": "folder of results (outputs)"},
        ("explain before.json.gz after.json.gz", "explain ficco_sweep:1a2b3c ficco_sweep:4d5e6f"),
    ),
}
