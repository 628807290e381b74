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
    ),
    "results reproduce": Command(
        "dse_pages.reproduce:command",
        "results reproduce [<paper>]",
        "run every study of a paper, or all studies; one page that compares published values with ours",
    ),
}
