"""A study: planned, searched, recorded and summed up."""

from dse.plugins import Command

COMMANDS = {
    "dry-run": Command(
        "dse.study.dry_run:command",
        "dry-run study=<name> [...]",
        "what a study would evaluate, how long that takes and how much disk [json=true]",
        {"json": "true prints JSON"},
        ("dry-run study=ficco_sweep +space.system.gpu.num_cus='range(64,304,16)'",),
    ),
    "timeline": Command(
        "dse.study.replay:timeline",
        "timeline study=<name> key=...",
        "run one stored point again: its timeline as a picture and as a trace",
        {
            "study": "name of the study",
            "key": "of the point in results.parquet, or its start",
            "config_dir": "folder of your own configurations",
            "output_dir": "folder of results (outputs)",
        },
        ("timeline study=ficco_sweep key=1a2b3c",),
    ),
}
GROUPS = {"study": "Studies", "simulator": "Simulators", "fidelity": "Ladders of models", "figures": "Figures"}
