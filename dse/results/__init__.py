"""Finished runs: their folder, its files, and what is read off their table."""

from dse.plugins import Command

COMMANDS = {
    "results claims": Command(
        "dse.results.answer:show_claims",
        "results claims study=<name>",
        "compare published claims with the results of the newest run",
        {"study": "name of the study", "output_dir": "folder of results (outputs)"},
        ("results claims study=ficco_sweep",),
    ),
    "results report": Command(
        "dse.results.report:command",
        "results report study=<name>",
        "write figures, claims and report.html of the newest run again",
        examples=("results report study=ficco_sweep",),
    ),
}
COLUMNS = {
    "speed-up": "time of the baseline over that of the winner, with its 90 % interval",
    "fraction of ideal": "share of what perfect overlap would gain: (speed-up - 1) / (ideal speed-up - 1)",
    "gap": "how much longer it takes than a proven lower bound, which no schedule can pass",
    "fastest": "probability that no other option is faster, given the errors of predictions",
    "with": "options of the winner",
    "limited by": "what the winner's time was spent on, or lost to",
    "dil": "decomposition inefficiency: time of a GEMM in pieces over its time as a whole",
    "cil": "contention inefficiency: time of a GEMM while data moves over its time alone",
}
"""Column of an answer -> what it means."""
