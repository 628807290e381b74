"""Finished runs: their folder, its files, and what is read off their table."""

from dse.plugins import Command

COMMANDS = {
    "results claims": Command(
        "dse.results.answer:show_claims",
        "results claims study=<name>",
        "published claims of the newest run, compared with its results",
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
