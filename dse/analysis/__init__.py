"""Analyses of finished runs: comparisons, importance of knobs, decision rules, robustness."""

from dse.plugins import Command

BACKENDS = {"landscape": "dse.analysis.search_benchmark:LandscapeBackend"}
COMMANDS = {
    "compare": Command(
        "dse.analysis.compare:command",
        "compare <run> <run> [--html]",
        "two finished runs side by side: <study>, <study>/<time> or a folder",
    ),
    "importance": Command(
        "dse.analysis.importance:command",
        "importance study=<name>",
        "which knobs matter, for each objective [method=ped_anova|fanova]",
    ),
    "robustness": Command(
        "dse.analysis.robustness:command",
        "robustness study=<name>",
        "does the answer hold with other constants, where does the winner flip [vary=<path>=0.1]",
    ),
    "rules": Command(
        "dse.analysis.rules:command",
        "rules study=<name>",
        "learn which option is best when, and judge it on what it has not seen",
    ),
}
