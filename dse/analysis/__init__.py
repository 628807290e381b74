"""Analyses of finished runs: comparisons, scores of rules, robustness."""

from dse.plugins import Command

COMMANDS = {
    "results compare": Command(
        "dse.analysis.compare:command",
        "results compare <run> <run> [--html]",
        "compare two finished runs: <study>, <study>/<time> or a folder",
        {"output_dir": "folder of results (outputs)"},
        ("results compare ficco_sweep/2026-11-21_17-27-05 ficco_sweep",),
    ),
    "results robustness": Command(
        "dse.analysis.robustness:command",
        "results robustness study=<name>",
        "test whether the answer holds with other constants, and where the winner flips [vary=<path>=0.1]",
        {
            "study": "name of the study",
            "vary": "<path>=<share>,... instead of the study's own",
            "choose": "knobs that are chosen",
            "objective": "metric that decides",
            "samples": "number of draws (64)",
            "range": "factor searched for flips (8)",
            "seed": "of the draws (0)",
            "claims": "true asks which verdicts on claims flip (false)",
            "config_dir": "folder of your own configurations",
            "output_dir": "folder of results (outputs)",
        },
        (
            "results robustness study=ficco_sweep",
            "results robustness study=t3 claims=true",
        ),
    ),
}
