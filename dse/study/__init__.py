"""A study: planned, searched, recorded and summed up."""

from dse.plugins import Command

COMMANDS = {
    "results timeline": Command(
        "dse.study.replay:timeline",
        "results timeline study=<name> key=...",
        "run one stored point again: its timeline as a picture and as a trace",
        {
            "study": "name of the study",
            "key": "of the point in results.parquet, or its start",
            "config_dir": "folder of your own configurations",
            "output_dir": "folder of results (outputs)",
        },
        ("results timeline study=ficco_sweep key=1a2b3c",),
    ),
    "store rebase": Command(
        "dse.study.rebase:rebase",
        "store rebase [store=<URL>]",
        "carry results of an older store over to the present names of knobs",
        {
            "store": "database of the studies (auto: results.db of output_dir)",
            "output_dir": "folder of results (outputs)",
            "config_dir": "own configuration of the studies' user, if it lies elsewhere here",
            "command": "program that may be started, for simulator=external",
        },
        ("store rebase output_dir=outputs",),
    ),
    "store worker": Command(
        "dse.study.worker:worker",
        "store worker store=<URL> [study=]",
        "help with the studies of a shared store, without a scheduler",
        {
            "store": "database of the studies",
            "study": "name of those to help with (any)",
            "jobs": "processes that evaluate (1)",
            "wait": "time to wait for a study before it ends (60 s)",
            "config_dir": "own configuration of the study's user, if it lies elsewhere here",
            "command": "program that may be started, for simulator=external",
        },
        (
            "store worker store=postgresql://me@host/database",
            "store worker store=sqlite:///outputs/results.db study=ficco_sweep jobs=2",
        ),
    ),
}
GROUPS = {"study": "Studies", "simulator": "Simulators", "fidelity": "Ladders of models", "figures": "Figures"}
