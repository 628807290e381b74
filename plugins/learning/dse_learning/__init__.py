"""What a finished run teaches: which knobs matter, and rules that pick the best option from sizes alone."""

from dse.plugins import Command

RESEARCH = {"dse_learning": "what a run teaches: importances and rules"}
"""Package -> what is studied there (`dse.plugins`)."""

COMMANDS = {
    "results importance": Command(
        "dse_learning.importance:command",
        "results importance study=<name>",
        "rank the knobs by how much they matter for each objective [method=ped_anova|fanova]",
        {
            "study": "name of the study",
            "method": "ped_anova or fanova (ped_anova)",
            "output_dir": "folder of results (outputs)",
        },
        ("results importance study=ficco_sweep method=fanova",),
    ),
    "results rules": Command(
        "dse_learning.rules:command",
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
