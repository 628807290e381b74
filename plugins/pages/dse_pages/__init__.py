"""Pages for a browser: the report of a study, comparisons, explored tables, reproductions.

A page is one file that asks nothing of any network: its scripts, styles, figures and rows are inside. `page` renders
all of them, `points` and `charts` make the interactive part that they share.
"""

from dse.plugins import Command

VIEWS = {"report": "dse_pages.report:write_report", "comparison": "dse_pages.comparison:write_comparison"}
COMMANDS = {
    "results show": Command(
        "dse_pages.explore:command",
        "results show <run> [port=...]",
        "look at every point of a run in a browser: zoom, filter, any two metrics",
        {"run": "name of a study, for its newest run, or <study>/<time>"},
        ("results show ficco_sweep", "results show ficco_sweep/2026-11-21_17-27-05 port=5002"),
    ),
    "results reproduce": Command(
        "dse_pages.reproduce:command",
        "results reproduce [<paper>]",
        "run every study of a paper, or all studies; one page that compares published values with ours",
        {
            "output": "folder (outputs)",
            "again": "run studies again that are up to date (false)",
            "config_dir": "folder of your own configurations",
        },
        examples=("results reproduce", "results reproduce ficco"),
    ),
}
