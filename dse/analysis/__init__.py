"""Analyses of finished runs: comparisons, importance of knobs, decision rules, robustness."""

from dse.plugins import Command

BACKENDS = {"landscape": "dse.analysis.search_benchmark:LandscapeBackend"}
COMMANDS = {
    "results compare": Command(
        "dse.analysis.compare:command",
        "results compare <run> <run> [--html]",
        "two finished runs side by side: <study>, <study>/<time> or a folder",
        {"output_dir": "folder of results (outputs)"},
        ("results compare ficco_sweep/2026-11-21_17-27-05 ficco_sweep",),
    ),
    "results importance": Command(
        "dse.analysis.importance:command",
        "results importance study=<name>",
        "which knobs matter, for each objective [method=ped_anova|fanova]",
        {
            "study": "name of the study",
            "method": "ped_anova or fanova (ped_anova)",
            "output_dir": "folder of results (outputs)",
        },
        ("results importance study=ficco_sweep method=fanova",),
    ),
    "results robustness": Command(
        "dse.analysis.robustness:command",
        "results robustness study=<name>",
        "does the answer hold with other constants, where does the winner flip [vary=<path>=0.1]",
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
    "results rules": Command(
        "dse.analysis.rules:command",
        "results rules study=<name>",
        "learn which option is best when, and judge it on what it has not seen",
        {
            "study": "name of the study",
            "judge": "further runs to judge the rules on",
            "depth": "of the tree (3)",
            "leaves": "of the tree, at most",
            "objective": "metric that decides",
            "choose": "knobs that are chosen",
            "output_dir": "folder of results (outputs)",
        },
        (
            "results rules study=ficco_sweep",
            "results rules study=ficco_rules judge=ficco_unseen depth=7 leaves=15",
        ),
    ),
}
