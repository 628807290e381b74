"""A study: planned, searched, recorded and summed up."""

from dse.plugins import Command

COMMANDS = {
    "dry-run": Command(
        "dse.study.dry_run:command",
        "dry-run study=<name> [...]",
        "what a study would evaluate, how long that takes and how much disk [json=true]",
    ),
    "timeline": Command(
        "dse.study.replay:timeline",
        "timeline study=<name> key=...",
        "run one stored point again: its timeline as a picture and as a trace",
    ),
}
GROUPS = {"study": "Studies", "simulator": "Simulators", "fidelity": "Ladders of models", "figures": "Figures"}
