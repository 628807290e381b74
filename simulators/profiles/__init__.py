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
    "advise": Command(
        "simulators.profiles.advise_command:advise_profile",
        "advise profile=<file> [system=<machine>] [out=<folder>]",
        "a PyTorch profile: what each collective costs, which change of it gains most, and all changes together",
        {
            "profile": "JSON of the PyTorch profiler, or CSV of kernels; .gz as well",
            "system": "machine whose constants are assumed where the profile tells none; default: by its GPU's name",
            "out": "folder to write to",
        },
        ("advise profile=run.json.gz", "advise profile=kernels.csv system=mi300x_8"),
    ),
}
